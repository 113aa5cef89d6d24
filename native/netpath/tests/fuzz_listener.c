// Fuzz listener: a process that listens, and one that sends to it, while a third, which is hostile, connects to the
// same addresses: with bytes of any content, half greetings, wrong versions and tokens, a right token and frames that
// break the rules, and floods of connections. The two go on, and not a byte of theirs is wrong.
//
//   fuzz_listener SEED SECONDS    exit status 0: nothing is wrong, and the longest wait of the two is shown
//
// Compile it with all of core/*.c. The paths are 127.0.1.1 and 127.0.2.1, or what TORCHRELAY_NET_PATHS says.

#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../core/crc32c.h"
#include "../core/paths.h"
#include "../core/wire.h"
#include "../netpath.h"

enum { DEPTH = 4, MESSAGE = 100000, STRANGE_COMMS = 32, FLOOD = 400, LONGEST_WAIT_MS = 3000 };

static uint64_t random_state;

static uint64_t draw(uint64_t below) { // splitmix64
  uint64_t x = random_state += 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return (x ^ x >> 31) % below;
}

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void check(int code, const char *what) {
  if (!code) return;
  fprintf(stderr, "fuzz_listener: %s: %s\n", what, np_error());
  exit(3);
}

static uint8_t byte_of(uint64_t number, size_t offset) { return (uint8_t)(number * 31 + offset * 7 + (offset >> 9)); }

static size_t size_of(uint64_t number) { return number % 5 ? (size_t)(number * 7919 % MESSAGE) : number % 3; }

// ---------------------------------------------------------------- the good ones

typedef struct {
  np_comm *comm;
  np_request *request;
  double until;
  uint8_t *memory;
} strange_comm;

static strange_comm strange[STRANGE_COMMS];

// Comms that nobody meant to make are accepted, asked for a message, and closed after a while.
static void meet_strangers(np_listener *listener) {
  for (int i = 0; i < STRANGE_COMMS; i++) {
    strange_comm *s = &strange[i];
    if (!s->comm) {
      check(np_accept(listener, 2, &s->comm), "np_accept of a stranger");
      if (!s->comm) return;
      size_t size = draw(MESSAGE);
      s->memory = malloc(size + 1);
      s->until = seconds() + (double)draw(300) / 1000;
      if (!s->memory || np_irecv(s->comm, s->memory, size, &s->request)) s->request = NULL;
      continue;
    }
    int done = 0;
    if (s->request && (np_test(s->request, &done, NULL) || done)) s->request = NULL;
    if (seconds() < s->until) continue;
    check(np_close(s->comm), "np_close of a stranger");
    free(s->memory);
    *s = (strange_comm){0};
  }
}

static int receives(int handle_to, double lasts) {
  static uint8_t memory[DEPTH][MESSAGE];
  static uint8_t handle[NP_HANDLE_BYTES];
  np_request *request[DEPTH] = {0};
  np_listener *listener;
  np_comm *comm = NULL;
  check(np_start(NULL), "np_start");
  check(np_listen(handle, &listener), "np_listen");
  if (write(handle_to, handle, sizeof handle) != sizeof handle) return 4;
  while (!comm) check(np_accept(listener, 1, &comm), "np_accept");
  if (write(handle_to, "", 1) != 1) return 4;
  uint64_t posted = 0, number = 0;
  double until = seconds() + lasts, last = seconds(), longest = 0;
  while (seconds() < until) {
    for (; posted < number + DEPTH; posted++) {
      check(np_irecv(comm, memory[posted % DEPTH], MESSAGE, &request[posted % DEPTH]), "np_irecv");
      if (!request[posted % DEPTH]) break;
    }
    int done, at = (int)(number % DEPTH);
    size_t size;
    check(np_wait(request[at], 20, &done, &size), "np_wait");
    meet_strangers(listener);
    double waited = seconds() - last;
    if (waited > longest) longest = waited;
    if (waited * 1000 > LONGEST_WAIT_MS) {
      fprintf(stderr, "fuzz_listener: nothing has come for %d ms\n", LONGEST_WAIT_MS);
      return 5;
    }
    if (!done) continue;
    last = seconds();
    int wrong = size != size_of(number);
    for (size_t i = 0; i < size && !wrong; i++) wrong = memory[at][i] != byte_of(number, i);
    if (wrong) {
      fprintf(stderr, "fuzz_listener: message %llu is wrong\n", (unsigned long long)number);
      return 6;
    }
    number++;
  }
  printf("%llu messages came, each right; the longest wait was %.0f ms\n", (unsigned long long)number, longest * 1000);
  np_stop();
  return number == 0;
}

static int sends(const uint8_t *told, double lasts) {
  static uint8_t memory[DEPTH][MESSAGE], handle[NP_HANDLE_BYTES];
  np_request *request[DEPTH] = {0};
  np_comm *comm = NULL;
  memcpy(handle, told, sizeof handle);
  check(np_start(NULL), "np_start");
  while (!comm) check(np_connect(handle, 1, &comm), "np_connect");
  double until = seconds() + lasts + 1;
  for (uint64_t number = 0; seconds() < until; number++) {
    int done = 0, at = (int)(number % DEPTH);
    while (request[at] && !done && seconds() < until)
      if (np_wait(request[at], 20, &done, NULL)) return 0; // the receiver has closed
    if (request[at] && !done) break;
    for (size_t i = 0; i < size_of(number); i++) memory[at][i] = byte_of(number, i);
    if (np_isend(comm, memory[at], size_of(number), &request[at])) break;
  }
  np_stop();
  return 0;
}

// ---------------------------------------------------------------- the hostile one

static np_handle target;

static int reach(void) {
  address to;
  struct linger at_once = {1, 0};
  if (!handle_read(&target, (int)draw(target.paths), &to)) return -1;
  int fd = socket(to.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  if (draw(2)) setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  if (!connect(fd, &to.any, address_length(&to))) return fd;
  close(fd);
  return -1;
}

static void say_bytes(int fd, const void *bytes, size_t size) {
  const uint8_t *from = bytes;
  while (size) {
    size_t now = draw(4) ? size : 1 + draw(size);
    ssize_t sent = send(fd, from, now, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent <= 0) return;
    from += sent;
    size -= (size_t)sent;
  }
}

static void say_nonsense(int fd) {
  uint8_t bytes[512];
  for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)draw(256);
  say_bytes(fd, bytes, draw(sizeof bytes));
}

static size_t greeting(uint8_t *into, int right_token, uint32_t magic) {
  frame hello = {.magic = magic, .type = HELLO, .path = (uint8_t)draw(5), .epoch = (uint16_t)draw(4), .seq = draw(5),
                 .length = HELLO_BYTES};
  hello_body body = {.chunk = draw(3) ? 4096u << draw(8) : (uint32_t)draw(1u << 31), .checked = (uint32_t)draw(2)};
  if (right_token) memcpy(body.token, target.token, sizeof body.token);
  memcpy(into, &hello, sizeof hello);
  memcpy(into + sizeof hello, &body, sizeof body);
  hello.crc = draw(20) ? checksum(into, sizeof hello + sizeof body) : (uint32_t)draw(UINT32_MAX);
  memcpy(into, &hello, sizeof hello);
  return sizeof hello + sizeof body;
}

// Frames that are nearly right, after a greeting with the right token.
static void say_frames(int fd) {
  uint8_t bytes[256];
  uint32_t chunk, checked;
  say_bytes(fd, bytes, greeting(bytes, 1, WIRE_MAGIC));
  memcpy(&chunk, bytes + sizeof(frame) + offsetof(hello_body, chunk), sizeof chunk);
  memcpy(&checked, bytes + sizeof(frame) + offsetof(hello_body, checked), sizeof checked);
  frame told;
  memcpy(&told, bytes, sizeof told);
  usleep((useconds_t)draw(3000));
  for (uint64_t i = draw(40); i; i--) {
    frame out = {.magic = WIRE_MAGIC, .type = (uint8_t)draw(12), .path = told.path};
    out.epoch = draw(10) ? told.epoch : (uint16_t)draw(65536);
    if (draw(2)) out.type = DATA;
    out.seq = draw(10) ? draw(3) : draw(UINT64_MAX);
    out.total = draw(10) ? (uint32_t)draw(MESSAGE) : (uint32_t)draw(1u << 31);
    out.offset = chunk ? (uint32_t)draw(3) * chunk : 0;
    uint32_t left = out.total > out.offset ? out.total - out.offset : 0;
    out.length = left < chunk ? left : chunk;
    if (!draw(10)) out.length = (uint32_t)draw(1u << 31);
    if (checked) out.magic += checksum((uint8_t *)&out + sizeof out.magic, sizeof out - sizeof out.magic);
    if (!draw(50)) out.magic = (uint32_t)draw(1u << 31);
    say_bytes(fd, &out, sizeof out);
    static uint8_t data[MESSAGE];
    say_bytes(fd, data, out.length < sizeof data ? out.length : draw(sizeof data));
  }
}

static void flood(void) {
  static int fds[FLOOD];
  int count = 0;
  for (; count < FLOOD; count++)
    if ((fds[count] = reach()) < 0) break;
  usleep((useconds_t)draw(200000));
  while (count--) close(fds[count]);
}

static void attack(void) {
  uint8_t bytes[256];
  uint64_t how = draw(24);
  if (how == 0) {
    flood();
    return;
  }
  int fd = reach();
  if (fd < 0) return;
  if (how < 5) say_nonsense(fd);
  else if (how < 8) say_bytes(fd, bytes, draw(greeting(bytes, draw(2) != 0, WIRE_MAGIC)));
  else if (how < 11) say_bytes(fd, bytes, greeting(bytes, 1, WIRE_MAGIC + (1u << 24)));
  else if (how < 14) say_bytes(fd, bytes, greeting(bytes, 0, WIRE_MAGIC));
  else say_frames(fd);
  usleep((useconds_t)draw(2000));
  if (draw(2) && recv(fd, bytes, sizeof bytes, MSG_DONTWAIT) < 0 && errno == EBADF) abort();
  close(fd);
}

// ---------------------------------------------------------------- all three

static int status_of(pid_t child) {
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int main(int count, char **words) {
  if (count != 3) {
    fprintf(stderr, "fuzz_listener SEED SECONDS\n");
    return 2;
  }
  setenv("TORCHRELAY_NET_PATHS", "127.0.1.1,127.0.2.1", 0);
  uint64_t seed = strtoull(words[1], NULL, 10);
  double lasts = atof(words[2]);
  int handles[2];
  uint8_t handle[2][NP_HANDLE_BYTES];
  if (pipe(handles)) return 2;
  random_state = seed;
  fflush(stdout);
  pid_t receiver = fork();
  if (!receiver) exit(receives(handles[1], lasts));
  close(handles[1]);
  if (read(handles[0], handle[0], sizeof handle[0]) != sizeof handle[0]) return 2;
  pid_t sender = fork();
  if (!sender) exit(sends(handle[0], lasts));
  memcpy(&target, handle[0], sizeof target);
  if (read(handles[0], handle[1], 1) != 1) return 2; // the good one came first
  double until = seconds() + lasts;
  uint64_t attacks = 0;
  for (; seconds() < until; attacks++) attack();
  int received = status_of(receiver), sent = status_of(sender);
  printf("seed %llu: %llu attacks; the receiver ended with %d, the sender with %d\n", (unsigned long long)seed,
         (unsigned long long)attacks, received, sent);
  return received || sent;
}
