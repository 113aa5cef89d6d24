// Stream: messages one way, several under way at once, every byte checked, and a time line of what came through.
//
//   stream recv|send MEET [--size BYTES] [--outstanding N] [--seconds S] [--unchecked] [--plain|--mptcp ADDRESS]
//
// The receiver writes into the file MEET where it is; the sender waits for that file. Without --plain the messages go
// over netpath, with it over one TCP connection to the receiver's ADDRESS; with --mptcp this is a Multipath TCP
// connection. All else is the same for all of them, so that they can be compared. The sender ends after S seconds or at
// SIGTERM, by a word to the receiver, which then ends, too.
//
// Message s is a window of one random text, which begins elsewhere for each of outstanding + 1 messages in a row. So no
// two that were in the same memory of the receiver one after the other are alike, and bytes that did not come are seen.
// Every 4096 bytes have a stamp of s and of the place: a message that is lost, that comes twice or early is seen, and so
// is a chunk in a wrong place. The receiver only compares.
//
// Time line, JSON lines on stdout, times in seconds of CLOCK_MONOTONIC:
//   {"what":"rate","t":T,"bytes":N}        so many bytes were done in the 50 ms from T on; none: there is no line
//   {"what":"gap","from":T,"to":U}         nothing was done in between, for longer than 10 ms
//   {"what":"path",...}                    counters of a path (netpath)
//   {"what":"error","text":"..."}          something failed: exit status 1
//   {"what":"end",...}                     the sum; "complete": the sender's last word was heard

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "../netpath.h"

#ifndef IPPROTO_MPTCP
#define IPPROTO_MPTCP 262
#endif

enum { MOST = 64, UNIT = 4096, SHIFT = 64, POLL_MS = 50 };

static const double BIN_S = 0.05, GAP_S = 0.01, MEET_S = 30;
static const uint64_t GOLDEN = 0x9E3779B97F4A7C15ull;

static struct {
  int sends, outstanding, checked, protocol; // protocol: 0 netpath, else of the socket
  const char *meet, *address;
  size_t size;
  double seconds;
} options = {.outstanding = 8, .checked = 1, .size = 1 << 20, .seconds = 1e9};

static volatile sig_atomic_t stopped;

static void stop(int signal) {
  (void)signal;
  stopped = 1;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void fail(const char *format, ...) {
  char text[300];
  va_list rest;
  va_start(rest, format);
  vsnprintf(text, sizeof text, format, rest);
  va_end(rest);
  for (char *c = text; *c; c++)
    if (*c == '"' || *c == '\\' || *c < ' ') *c = '\'';
  printf("{\"what\":\"error\",\"t\":%.6f,\"text\":\"%s\"}\n", now(), text);
  fflush(stdout);
  _exit(1);
}

static void must(int result) {
  if (result != NP_OK) fail("netpath said %d: %s", result, np_error());
}

// ---------------------------------------------------------------- the time line

static struct {
  double first, last, bin, longest;
  uint64_t bytes, messages, recent;
} line;

static void begin_line(void) { line.first = line.last = line.bin = now(); }

static void end_bin(void) {
  if (line.recent) printf("{\"what\":\"rate\",\"t\":%.6f,\"bytes\":%" PRIu64 "}\n", line.bin, line.recent);
  line.recent = 0;
}

static void note_gap(double until) {
  double gap = until - line.last;
  if (gap > line.longest) line.longest = gap;
  if (gap > GAP_S) printf("{\"what\":\"gap\",\"from\":%.6f,\"to\":%.6f}\n", line.last, until);
}

static void note_done(size_t bytes) {
  double t = now();
  if (t >= line.bin + BIN_S) {
    end_bin();
    line.bin += (double)(uint64_t)((t - line.bin) / BIN_S) * BIN_S;
    note_gap(t);
    fflush(stdout);
  } else {
    note_gap(t);
  }
  line.last = t;
  line.recent += bytes;
  line.bytes += bytes;
  line.messages++;
}

// ---------------------------------------------------------------- contents

static uint8_t *text;             // random; message s is what begins at SHIFT * (s % (outstanding + 1)), and stamps
static uint8_t *buffer[MOST + 1]; // sender: one for each of these parts, never changed but for the stamps
static uint64_t wrong_bytes, wrong_messages;

static void *memory(size_t bytes) {
  void *got = NULL;
  if (posix_memalign(&got, UNIT, bytes ? bytes : 1)) fail("no memory for %zu bytes", bytes);
  return got;
}

static int part(uint64_t seq) { return (int)(seq % (uint64_t)(options.outstanding + 1)); }

static void make_contents(void) {
  size_t bytes = options.size + (size_t)SHIFT * MOST + sizeof(uint64_t);
  text = memory(bytes);
  uint64_t x = 88172645463325252ull; // xorshift: the same text at both ends
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    memcpy(text + i, &x, 8);
  }
  int buffers = options.sends ? options.outstanding + 1 : options.outstanding;
  for (int i = 0; i < buffers; i++) {
    buffer[i] = memory(options.size);
    if (options.sends) memcpy(buffer[i], text + SHIFT * i, options.size);
    else memset(buffer[i], 0, options.size);
  }
}

static uint64_t stamp_of(uint64_t seq, size_t offset) { return (seq + 1) * GOLDEN ^ offset; }

static size_t stamp_bytes(size_t offset) {
  size_t rest = options.size - offset;
  return rest < sizeof(uint64_t) ? rest : sizeof(uint64_t);
}

static void stamp(uint8_t *data, uint64_t seq) {
  for (size_t at = 0; at < options.size; at += UNIT) {
    uint64_t value = stamp_of(seq, at);
    memcpy(data + at, &value, stamp_bytes(at));
  }
}

static void count_wrong(const uint8_t *a, const uint8_t *b, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) wrong_bytes += a[i] != b[i];
}

static void check(const uint8_t *data, uint64_t seq, size_t size) {
  const uint8_t *wanted = text + SHIFT * part(seq);
  uint64_t before = wrong_bytes;
  if (size != options.size) {
    wrong_bytes += options.size;
    wrong_messages++;
    return;
  }
  for (size_t at = 0; at < size; at += UNIT) {
    uint64_t value = stamp_of(seq, at);
    size_t stamped = stamp_bytes(at), end = at + UNIT < size ? at + UNIT : size;
    if (memcmp(data + at, &value, stamped)) count_wrong(data + at, (uint8_t *)&value, stamped);
    at += stamped;
    if (memcmp(data + at, wanted + at, end - at)) count_wrong(data + at, wanted + at, end - at);
    at -= stamped;
  }
  wrong_messages += wrong_bytes != before;
}

// ---------------------------------------------------------------- meeting

static void publish(const void *what, size_t bytes) {
  char draft[4096];
  snprintf(draft, sizeof draft, "%s.draft", options.meet);
  FILE *file = fopen(draft, "w");
  if (!file || fwrite(what, 1, bytes, file) != bytes || fclose(file) || rename(draft, options.meet))
    fail("cannot write %s: %s", options.meet, strerror(errno));
}

static void look_up(void *what, size_t bytes) {
  double until = now() + MEET_S;
  while (access(options.meet, R_OK)) {
    if (stopped || now() > until) fail("no receiver has written %s", options.meet);
    usleep(1000);
  }
  FILE *file = fopen(options.meet, "r");
  if (!file || fread(what, 1, bytes, file) != bytes) fail("%s is too short", options.meet);
  fclose(file);
}

// ---------------------------------------------------------------- over netpath

static np_comm *comm;
static np_request *request[MOST];

static void log_line(int level, const char *words) { fprintf(stderr, "%.6f netpath %d: %s\n", now(), level, words); }

static void meet_over_netpath(void) {
  uint8_t handle[NP_HANDLE_BYTES] = {0};
  np_listener *listener = NULL;
  must(np_start(getenv("TORCHRELAY_NET_LOG") ? log_line : NULL));
  if (options.sends) {
    look_up(handle, sizeof handle);
  } else {
    must(np_listen(handle, &listener));
    publish(handle, sizeof handle);
  }
  for (double until = now() + MEET_S; !comm; usleep(500)) {
    if (stopped || now() > until) fail("no connection within %g s", MEET_S);
    must(options.sends ? np_connect(handle, 1, &comm) : np_accept(listener, 1, &comm));
  }
  if (listener) must(np_close_listener(listener));
}

static void show_paths(void) {
  np_path_info info[NP_MAX_PATHS];
  np_path_counts counts[NP_MAX_PATHS];
  int paths = np_paths(info, NP_MAX_PATHS);
  if (np_counts(counts, NP_MAX_PATHS) < paths) paths = 0;
  for (int i = 0; i < paths; i++) {
    const np_path_counts *c = &counts[i];
    printf("{\"what\":\"path\",\"path\":%d,\"interface\":\"%s\",\"sent_bytes\":%" PRIu64 ",\"received_bytes\":%" PRIu64
           ",\"sent_again\":%" PRIu64 ",\"duplicates\":%" PRIu64 ",\"downs\":%" PRIu64 ",\"ups\":%" PRIu64
           ",\"corrupt\":%" PRIu64 ",\"live\":%u,\"round_trip_us\":%u}\n",
           i, info[i].interface, c->sent_bytes, c->received_bytes, c->sent_again, c->duplicates, c->downs, c->ups,
           c->corrupt, c->live, c->round_trip);
  }
}

static int post_netpath(int slot, void *data, size_t size) {
  must(options.sends ? np_isend(comm, data, size, &request[slot]) : np_irecv(comm, data, size, &request[slot]));
  return request[slot] != NULL;
}

static int wait_netpath(int slot, size_t *size) {
  int done = 0;
  must(np_wait(request[slot], POLL_MS, &done, size));
  return done;
}

// An empty message is the last word; none other here is empty.
static void say_end_netpath(void) {
  np_request *last = NULL;
  int done = 0;
  while (!last) must(np_isend(comm, "", 0, &last));
  while (!done) must(np_wait(last, POLL_MS, &done, NULL));
}

static void leave_netpath(void) {
  show_paths();
  must(np_close(comm));
  np_stop();
}

// ---------------------------------------------------------------- over one connection

static int connection = -1;
static struct {
  uint8_t *data;
  size_t size, at;
} posted[MOST];

static struct sockaddr_in place(const char *address) {
  struct sockaddr_in at = {.sin_family = AF_INET};
  if (inet_pton(AF_INET, address, &at.sin_addr) != 1) fail("%s is no IPv4 address", address);
  return at;
}

static int open_socket(void) {
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, options.protocol);
  if (fd < 0) fail("no socket of protocol %d: %s", options.protocol, strerror(errno));
  return fd;
}

static void meet_over_socket(void) {
  struct sockaddr_in at = place(options.address);
  socklen_t length = sizeof at;
  int fd = open_socket(), one = 1;
  if (options.sends) {
    look_up(&at, sizeof at);
    if (connect(fd, (struct sockaddr *)&at, sizeof at)) fail("cannot connect: %s", strerror(errno));
    connection = fd;
  } else {
    if (bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 1)) fail("cannot listen: %s", strerror(errno));
    getsockname(fd, (struct sockaddr *)&at, &length);
    publish(&at, sizeof at);
    if ((connection = accept(fd, NULL, NULL)) < 0) fail("cannot accept: %s", strerror(errno));
    // It stays open: MPTCP's further subflows come to it.
  }
  setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  fcntl(connection, F_SETFL, fcntl(connection, F_GETFL) | O_NONBLOCK);
}

static int post_socket(int slot, void *data, size_t size) {
  posted[slot].data = data;
  posted[slot].size = size;
  posted[slot].at = 0;
  return 1;
}

static int wait_socket(int slot, size_t *size) {
  uint8_t *data = posted[slot].data;
  while (posted[slot].at < posted[slot].size) {
    size_t rest = posted[slot].size - posted[slot].at;
    ssize_t n = options.sends ? send(connection, data + posted[slot].at, rest, MSG_NOSIGNAL)
                              : recv(connection, data + posted[slot].at, rest, 0);
    if (n == 0 && !options.sends) break;
    if (n < 0 && errno != EAGAIN && errno != EINTR) fail("the connection is lost: %s", strerror(errno));
    if (n > 0) {
      posted[slot].at += (size_t)n;
      continue;
    }
    struct pollfd ready = {.fd = connection, .events = options.sends ? POLLOUT : POLLIN};
    if (poll(&ready, 1, POLL_MS) <= 0) return 0;
  }
  if (size) *size = posted[slot].at;
  return 1;
}

// The end of the stream is the last word; the receiver closes when it has heard it.
static void say_end_socket(void) {
  char nothing;
  struct pollfd ready = {.fd = connection, .events = POLLIN};
  shutdown(connection, SHUT_WR);
  while (1) {
    if (poll(&ready, 1, POLL_MS) <= 0) continue;
    if (recv(connection, &nothing, 1, 0) >= 0) return;
    if (errno != EAGAIN && errno != EINTR) fail("the connection is lost: %s", strerror(errno));
  }
}

// ---------------------------------------------------------------- both

static int post(int slot, void *data) {
  return (options.protocol ? post_socket : post_netpath)(slot, data, options.size);
}

static int wait_for(int slot, size_t *size) { return (options.protocol ? wait_socket : wait_netpath)(slot, size); }

// SIGTERM ends a sender between two messages.
static void send_all(void) {
  uint64_t begun = 0, done = 0;
  while (1) {
    int more = !stopped && now() - line.first < options.seconds;
    if (more && begun < done + (uint64_t)options.outstanding) {
      uint8_t *data = buffer[part(begun)];
      if (options.checked) stamp(data, begun);
      begun += (uint64_t)post((int)(begun % (uint64_t)options.outstanding), data);
      continue;
    }
    if (done == begun) break;
    if (!wait_for((int)(done % (uint64_t)options.outstanding), NULL)) continue;
    note_done(options.size);
    done++;
  }
  (options.protocol ? say_end_socket : say_end_netpath)();
}

// Returns whether the last word was heard; SIGTERM ends it before.
static int receive_all(void) {
  uint64_t begun = 0, done = 0;
  while (!stopped) {
    int slot = (int)(begun % (uint64_t)options.outstanding);
    if (begun < done + (uint64_t)options.outstanding && post(slot, buffer[slot])) {
      begun++;
      continue;
    }
    slot = (int)(done % (uint64_t)options.outstanding);
    size_t size = 0;
    if (!wait_for(slot, &size)) continue;
    if (size == 0) return 1;
    note_done(size);
    if (options.checked) check(buffer[slot], done, size);
    done++;
  }
  note_gap(now());
  return 0;
}

static void show_end(int complete) {
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  double seconds = line.last - line.first;
  double cpu = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec);
  cpu += (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
  end_bin();
  double gbps = seconds > 0 ? (double)line.bytes * 8 / seconds / 1e9 : 0;
  printf("{\"what\":\"end\",\"complete\":%s,\"messages\":%" PRIu64 ",\"bytes\":%" PRIu64 ",\"seconds\":%.6f,"
         "\"gbps\":%.4f,\"wrong_bytes\":%" PRIu64 ",\"wrong_messages\":%" PRIu64 ",\"longest_gap_ms\":%.3f,"
         "\"cpu_s\":%.3f}\n",
         complete ? "true" : "false", line.messages, line.bytes, seconds, gbps, wrong_bytes, wrong_messages,
         line.longest * 1e3, cpu);
  fflush(stdout);
}

static int usage(void) {
  fprintf(stderr, "stream recv|send MEET [--size BYTES] [--outstanding N (1 to %d)] [--seconds S] [--unchecked]\n"
                  "       [--plain|--mptcp ADDRESS]\n", MOST - 1);
  return 2;
}

static int read_options(int argc, char **argv) {
  if (argc < 3 || (strcmp(argv[1], "send") && strcmp(argv[1], "recv"))) return 0;
  options.sends = !strcmp(argv[1], "send");
  options.meet = argv[2];
  for (int i = 3; i < argc; i++) {
    const char *name = argv[i];
    if (!strcmp(name, "--unchecked")) {
      options.checked = 0;
      continue;
    }
    if (++i == argc) return 0;
    if (!strcmp(name, "--size")) options.size = strtoul(argv[i], NULL, 10);
    else if (!strcmp(name, "--outstanding")) options.outstanding = atoi(argv[i]);
    else if (!strcmp(name, "--seconds")) options.seconds = atof(argv[i]);
    else if (!strcmp(name, "--plain")) options.protocol = IPPROTO_TCP, options.address = argv[i];
    else if (!strcmp(name, "--mptcp")) options.protocol = IPPROTO_MPTCP, options.address = argv[i];
    else return 0;
  }
  return options.size > 0 && options.outstanding > 0 && options.outstanding < MOST;
}

int main(int argc, char **argv) {
  if (!read_options(argc, argv)) return usage();
  signal(SIGTERM, stop);
  make_contents();
  (options.protocol ? meet_over_socket : meet_over_netpath)();
  begin_line();
  int complete = 1;
  if (options.sends) send_all();
  else complete = receive_all();
  if (!options.protocol) leave_netpath();
  else close(connection);
  show_end(complete);
  return wrong_bytes ? 1 : 0;
}
