// Scenarios of faults: of paths, which NCCL must not notice; of peers, which it is told; comms closed in the middle.

#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "nccl_side.h"

// ---------------------------------------------------------------- paths

typedef int inject(const char *faults);
typedef int counts(np_path_counts *counts, int room);

// Lost, silent, and reset, one after the other and at once: no error, no wrong byte.
static void lost_paths(void) {
  static const char plan[] = "path0:drop@100ms+500ms,path1:reset@750ms,path1:down@900ms+300ms,path0:down@1300ms+200ms,"
                             "path1:drop@1400ms+300ms,path0:reset@1900ms";
  talk t = talk_begin();
  np_path_counts count[NP_MAX_PATHS] = {0};
  uint64_t rounds = 0, downs = 0;
  double begun = now();
  if (right) OK(((inject *)net_symbol("np_inject"))(plan));
  for (int more = 1; more;) {
    stage("round %d", (int)rounds);
    run_both(t.send, t.receive, 1000 + rounds++, 32, of_any);
    int ours = now() < begun + 2.2, theirs = exchange(ours);
    more = right ? ours : theirs;
  }
  int paths = ((counts *)net_symbol("np_counts"))(count, NP_MAX_PATHS);
  for (int i = 0; i < paths; i++) downs += count[i].downs;
  CHECK(paths == 2 && downs >= 4, "%d paths, lost %d times: the faults have not hit", paths, (int)downs);
  talk_end(&t);
}

static void all_paths_lost(void) {
  talk t = talk_begin();
  double begun = now();
  if (right) OK(((inject *)net_symbol("np_inject"))("path0:down@0ms+600ms,path1:down@0ms+600ms"));
  meet();
  run_both(t.send, t.receive, 2, 100, of_any);
  if (right) CHECK(now() > begun + 0.6, "it went on without a path"); // the left one does not know since when
  talk_end(&t);
}

static void no_path_at_first(void) {
  void *context, *send, *receive;
  OK(net_init(&context, 1));
  if (right) OK(((inject *)net_symbol("np_inject"))("path0:down@0ms+500ms,path1:down@0ms+700ms"));
  meet();
  open_both(context, &send, &receive);
  run_both(send, receive, 3, 60, of_any);
  meet();
  close_both(send, receive);
  OK(net_finalize(context));
}

static void fewer_paths(void) {
  if (right) setenv("TORCHRELAY_NET_PATHS", "127.0.2.1", 1);
  talk t = talk_begin();
  if (right) CHECK(log_count(ABI_LEVEL_INFO, "nothing to fail over to") > 0, "that there is one path only is not said");
  run_both(t.send, t.receive, 4, 60, of_any);
  talk_end(&t);
}

// Loudly: NCCL takes another transport without a word.
static void no_path(void) {
  void *context = &context;
  char good[256];
  const char *given = getenv("TORCHRELAY_NET_PATHS");
  snprintf(good, sizeof good, "%s", given ? given : "");
  setenv("TORCHRELAY_NET_PATHS", "192.0.2.1", 1);
  for (int i = 0; i < 2; i++) {
    CHECK(net_init(&context, 1) != ABI_OK, "192.0.2.1 is no address of ours");
    CHECK(!context, "a context of what has not begun");
    OK(net_finalize(context)); // NCCL 2.28 does so
  }
  CHECK(log_count(ABI_LEVEL_WARN, "192.0.2.1") == 2, "NCCL's log tells nothing of it");
  CHECK(log_count(ABI_LEVEL_WARN, "NCCL_NET=torchrelay") == 2, "nor what to do");
  setenv("TORCHRELAY_NET_PATHS", good, 1);
  OK(net_init(&context, 1));
  OK(net_finalize(context));
}

// No file can be opened: connecting waits, says why, and goes on as soon as one can.
static void no_file_left(void) {
  enum { MOST = 256 };
  int taken[MOST], count = 0;
  void *context, *send = NULL, *receive = NULL;
  OK(net_init(&context, 1));
  CHECK(!setrlimit(RLIMIT_NOFILE, &(struct rlimit){MOST, MOST}), "setrlimit");
  while (count < MOST && (taken[count] = open("/dev/null", O_RDONLY)) >= 0) count++;
  char handle[ABI_HANDLE_BYTES];
  void *listener = NULL;
  OK(net_listen(context, 0, handle, &listener));
  tell_peer(handle, sizeof handle);
  hear_peer(handle, sizeof handle);
  stage("waiting for a word of it in NCCL's log");
  for (; !log_count(ABI_LEVEL_WARN, "ulimit -n"); sched_yield()) {
    OK(net_connect(context, 0, handle, &send));
    CHECK(!send, "a comm without a file");
  }
  meet();
  while (count) close(taken[--count]);
  stage("files can be opened again");
  for (; !send || !receive; sched_yield()) {
    if (!send) OK(net_connect(context, 0, handle, &send));
    if (!receive) OK(net_accept(listener, &receive));
  }
  OK(net.close_listener(listener));
  run_both(send, receive, 6, 30, of_any);
  meet();
  close_both(send, receive);
  OK(net_finalize(context));
}

// ---------------------------------------------------------------- peers

// The peer has closed: whoever waits for it is told.
static void peer_closes(void) {
  talk t = talk_begin();
  static char data[DEPTH][4096];
  void *request[2 * DEPTH];
  if (right) {
    meet();
    talk_end(&t);
    return;
  }
  for (int i = 0; i < DEPTH; i++) {
    OK(net_isend(t.send, data[i], sizeof data[i], &request[i]));
    OK(net_irecv(t.receive, 1, data[i], sizeof data[i], &request[DEPTH + i]));
  }
  meet();
  meet();
  stage("the peer has closed");
  for (int i = 0; i < 2 * DEPTH; i++) {
    abi_result code = net_wait(request[i], NULL);
    CHECK(code == ABI_REMOTE, "request %d: %d", i, code);
  }
  close_both(t.send, t.receive);
  OK(net_finalize(t.context));
}

// A peer that is gone is told after TORCHRELAY_NET_GIVEUP_S, and not before: until then it may be any fault of a path.
static void peer_dies(void) {
  static char data[1 << 20];
  void *request[2];
  setenv("TORCHRELAY_NET_GIVEUP_S", "1", 1);
  talk t = talk_begin();
  run_both(t.send, t.receive, 5, 10, of_any);
  meet();
  if (right) raise(SIGKILL);
  OK(net_irecv(t.receive, 1, data, 1, &request[0]));
  OK(net_isend(t.send, data, sizeof data, &request[1]));
  double begun = now();
  for (int i = 0; i < 2; i++) {
    abi_result code = net_wait(request[i], NULL);
    CHECK(code == ABI_REMOTE, "request %d: %d", i, code);
    CHECK(now() > begun + 0.8, "request %d was given up after %.3f s", i, now() - begun);
  }
  close_both(t.send, t.receive);
  OK(net_finalize(t.context));
}

static void peer_dies_unnoticed(void) {
  static char data[1 << 20];
  void *request[2];
  int done = 0;
  talk t = talk_begin();
  meet();
  if (right) raise(SIGKILL);
  OK(net_irecv(t.receive, 1, data, 1, &request[0]));
  OK(net_isend(t.send, data, sizeof data, &request[1]));
  for (double begun = now(); now() < begun + 1.5; sched_yield())
    for (int i = 0; i < 2; i++) {
      OK(net_test(request[i], &done, NULL));
      CHECK(!done, "request %d", i);
    }
  close_both(t.send, t.receive); // with both under way
  OK(net_finalize(t.context));
}

static void bad_handles(void) {
  char handle[ABI_HANDLE_BYTES], forged[ABI_HANDLE_BYTES];
  void *context, *listener = NULL, *comm = NULL;
  abi_result code = ABI_OK;
  OK(net_init(&context, 1));
  OK(net_listen(context, 0, handle, &listener));
  tell_peer(handle, sizeof handle);
  hear_peer(handle, sizeof handle);
  stage("a token that the listener does not know");
  memcpy(forged, handle, sizeof forged);
  forged[10] ^= 1;
  for (; !code && !comm; sched_yield()) code = net_connect(context, 0, forged, &comm);
  CHECK(code == ABI_REMOTE, "%d", code);
  meet();
  OK(net.close_listener(listener));
  meet();
  stage("a listener that was closed");
  for (code = ABI_OK; !code && !comm; sched_yield()) code = net_connect(context, 0, handle, &comm);
  CHECK(code == ABI_REMOTE, "%d", code);
  meet();
  OK(net_finalize(context));
}

// ---------------------------------------------------------------- closing in the middle

enum { BIG = 1 << 20 };

static const uint8_t AFTERWARDS = 0x5a;

typedef struct {
  size_t size; // of each message
  uint8_t *data[DEPTH];
  void *request[DEPTH];
} window;

static void open_window(window *w, void *comm, int sends, uint64_t seed, size_t size) {
  w->size = size;
  for (int i = 0; i < DEPTH; i++) {
    w->data[i] = malloc(size);
    CHECK(w->data[i], "no memory");
    if (sends) fill_pattern(w->data[i], size, seed, (uint64_t)i);
    else memset(w->data[i], 0, size);
    OK(sends ? net_isend(comm, w->data[i], size, &w->request[i])
             : net_irecv(comm, 1, w->data[i], size, &w->request[i]));
    CHECK(w->request[i], "a request is needed");
  }
}

static void use_otherwise(window *w) {
  for (int i = 0; i < DEPTH; i++) memset(w->data[i], AFTERWARDS, w->size);
}

static void free_window(window *w) {
  for (int i = 0; i < DEPTH; i++) free(w->data[i]);
}

// What is left of a comm whose other side was closed: messages are right, or there is an error.
static void see_the_end(window *w, int sends, uint64_t seed, int from) {
  abi_result code = ABI_OK;
  for (int i = from; i < DEPTH && !code; i++) {
    int size = -1;
    code = net_wait(w->request[i], &size);
    if (code || sends) continue;
    size_t good = first_difference(w->data[i], w->size, seed, (uint64_t)i);
    CHECK((size_t)size == w->size && good == w->size, "message %d is done with %d bytes, and wrong at %zu of %zu", i,
          size, good, w->size);
  }
  CHECK(code == ABI_OK || code == ABI_REMOTE, "%d", code);
}

// The receiver closes with chunks on their way: from then on its memory is its own.
static void receiver_closes(void) {
  talk t = talk_begin();
  window w;
  for (uint64_t round = 0; round < 5; round++) {
    stage("round %d", (int)round);
    void *comm = right ? open_receive(t.context) : open_send(t.context);
    open_window(&w, comm, !right, round, BIG);
    for (uint64_t i = 0; i < round; i++) OK(net_wait(w.request[i], NULL));
    if (right) {
      OK(net.close_receive(comm));
      use_otherwise(&w);
    } else {
      stage("round %d, seeing the end", (int)round);
      see_the_end(&w, 1, round, (int)round);
      OK(net.close_send(comm));
    }
    stage("round %d, afterwards", (int)round);
    run_both(t.send, t.receive, 600 + round, 10, of_step);
    for (int i = 0; i < DEPTH && right; i++) CHECK(all_are(w.data[i], BIG, AFTERWARDS), "message %d was touched", i);
    meet();
    free_window(&w);
  }
  talk_end(&t);
}

// The sender closes with chunks on their way, and uses its memory for something else: no receive is done with that.
static void sender_closes(void) {
  talk t = talk_begin();
  window w;
  for (uint64_t round = 0; round < 5; round++) {
    stage("round %d", (int)round);
    void *comm = right ? open_receive(t.context) : open_send(t.context);
    open_window(&w, comm, !right, round, BIG);
    for (uint64_t i = 0; i < round; i++) OK(net_wait(w.request[i], NULL));
    if (right) {
      stage("round %d, seeing the end", (int)round);
      see_the_end(&w, 0, round, (int)round);
      OK(net.close_receive(comm));
    } else {
      OK(net.close_send(comm));
      use_otherwise(&w);
    }
    stage("round %d, afterwards", (int)round);
    run_both(t.send, t.receive, 700 + round, 10, of_step);
    meet();
    free_window(&w);
  }
  talk_end(&t);
}

// The sender closes while the receiver posts one receive after the other: it is told each time.
static void closed_while_posting(void) {
  enum { ROUNDS = 200, SIZE = 3000 };
  static uint8_t data[DEPTH][SIZE];
  void *context, *request[DEPTH];
  OK(net_init(&context, 1));
  for (int round = 0; round < ROUNDS; round++) {
    stage("round %d", round);
    void *comm = right ? open_receive(context) : open_send(context);
    abi_result code = ABI_OK;
    for (int i = 0; !right && i < round % 7; i++) OK(net_isend(comm, data[i], SIZE, &request[i]));
    for (int i = 0; right && !code; i = (i + 1) % DEPTH) {
      code = net_irecv(comm, 1, data[i], SIZE, &request[i]);
      if (!code && i >= round % 7) code = net_wait(request[i], NULL);
    }
    CHECK(!right || code == ABI_REMOTE, "%d", code);
    OK(right ? net.close_receive(comm) : net.close_send(comm));
  }
  meet();
  OK(net_finalize(context));
}

// The same in the middle of a chunk for certain: the receiver is stopped until the sender has closed, and the kernel
// has room for a part of the messages only.
static void sender_closes_a_chunk(void) {
  enum { SIZE = 4 << 20 };
  setenv("TORCHRELAY_NET_CHUNK", "4194304", 1);
  setenv("TORCHRELAY_NET_WINDOW", "134217728", 1);
  void *context;
  window w;
  OK(net_init(&context, 1));
  void *comm = right ? open_receive(context) : open_send(context);
  if (right) {
    open_window(&w, comm, 0, 1, SIZE);
    meet();
    raise(SIGSTOP);
    see_the_end(&w, 0, 1, 0);
    OK(net.close_receive(comm));
  } else {
    meet();
    await_stopped_peer();
    open_window(&w, comm, 1, 1, SIZE);
    OK(net.close_send(comm));
    use_otherwise(&w);
    kill(peer_process, SIGCONT);
  }
  meet();
  free_window(&w);
  OK(net_finalize(context));
}

// Memory that is not even there any more.
static void memory_gone(void) {
  talk t = talk_begin();
  for (uint64_t round = 0; round < 4; round++) {
    void *send, *receive, *request;
    stage("round %d", (int)round);
    open_both(t.context, &send, &receive);
    uint8_t *memory = mmap(NULL, 2 * DEPTH * BIG, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED, "no memory");
    for (int i = 0; i < DEPTH; i++) {
      OK(net_irecv(receive, 1, memory + 2 * i * BIG, BIG, &request));
      OK(net_isend(send, memory + (2 * i + 1) * BIG, BIG, &request));
    }
    close_both(send, receive);
    munmap(memory, 2 * DEPTH * BIG);
    run_both(t.send, t.receive, 800 + round, 10, of_step);
    meet();
  }
  talk_end(&t);
}

const scenario fault_scenarios[] = {
    {"lost_paths", lost_paths, IN_BOTH, 8},
    {"all_paths_lost", all_paths_lost, IN_BOTH, 8},
    {"no_path_at_first", no_path_at_first, IN_BOTH, 8},
    {"fewer_paths", fewer_paths, IN_BOTH, 8},
    {"no_path", no_path, ALONE, 8},
    {"no_file_left", no_file_left, IN_BOTH, 8},
    {"peer_closes", peer_closes, IN_BOTH, 8},
    {"peer_dies", peer_dies, RIGHT_DIES, 8},
    {"peer_dies_unnoticed", peer_dies_unnoticed, RIGHT_DIES, 8},
    {"bad_handles", bad_handles, IN_BOTH, 8},
    {"receiver_closes", receiver_closes, IN_BOTH, 8},
    {"sender_closes", sender_closes, IN_BOTH, 8},
    {"closed_while_posting", closed_while_posting, IN_BOTH, 8},
    {"sender_closes_a_chunk", sender_closes_a_chunk, IN_BOTH, 8},
    {"memory_gone", memory_gone, IN_BOTH, 8},
    {NULL, NULL, ALONE, 0},
};
