// Scenarios of messages: all sizes, many at a time, many comms, and what must be refused.

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_side.h"

static void transfer(void) {
  talk t = talk_begin();
  stage("all sizes");
  run_both(t.send, t.receive, 1, 200, of_any);
  stage("steps");
  run_both(t.send, t.receive, 2, 200, of_step);
  talk_end(&t);
}

static void small_messages(void) {
  talk t = talk_begin();
  run_both(t.send, t.receive, 3, 3000, of_small);
  talk_end(&t);
}

// One way each: NCCL has comms that only send, or only receive.
static void one_way(void) {
  void *context;
  OK(net_init(&context, 1));
  for (int turn = 0; turn < 2; turn++) {
    int sends = right == turn;
    stage("turn %d", turn);
    void *comm = sends ? open_send(context) : open_receive(context);
    run_one(comm, sends, 4 + (uint64_t)turn, 60, of_any);
    meet();
    OK(sends ? net.close_send(comm) : net.close_receive(comm));
  }
  OK(net_finalize(context));
}

static void newest_first(void) {
  talk t = talk_begin();
  stream both[2];
  stream_begin(&both[0], t.send, 1, 5, 300, of_any);
  stream_begin(&both[1], t.receive, 0, 5, 300, of_any);
  both[0].newest_first = both[1].newest_first = 1;
  run_streams(both, 2);
  talk_end(&t);
}

// The longest message that the properties promise.
static size_t of_longest(uint64_t number) {
  abi_properties_v12 properties;
  OK(net_properties(0, &properties));
  return (properties.most_bytes ? properties.most_bytes : 16 << 20) - number;
}

static void longest(void) {
  talk t = talk_begin();
  abi_properties_v12 properties;
  OK(net_properties(0, &properties));
  run_both(t.send, t.receive, 6, 3, of_longest);
  talk_end(&t);
}

// ---------------------------------------------------------------- requests

static void none_left(void) {
  enum { MOST = 1000 };
  talk t = talk_begin();
  static uint8_t out[MOST], in[MOST];
  void *request[MOST], *comm = right ? t.receive : t.send;
  int posted = 0, size;
  stage("posting until there is no request");
  // Nothing can end before both sides have posted all: who sends does so first, and nobody receives meanwhile.
  if (right) meet();
  for (; posted < MOST; posted++) {
    out[posted] = (uint8_t)(posted * 7);
    OK(right ? net_irecv(comm, 1, &in[posted], 1, &request[posted])
             : net_isend(comm, &out[posted], 1, &request[posted]));
    if (!request[posted]) break;
  }
  if (!right) meet();
  CHECK(posted >= DEPTH, "%d requests", posted);
  if (!right) CHECK(posted < MOST, "%d requests, and nobody has received anything", posted);
  int most = exchange(posted);
  most = most < posted ? most : posted;
  stage("asking %d of %d", most, posted);
  for (int i = 0; i < most; i++) {
    OK(net_wait(request[i], &size));
    CHECK(size == 1, "%d", size);
    if (right) CHECK(in[i] == (uint8_t)(i * 7), "message %d", i);
  }
  talk_end(&t); // with those requests under way that the other side had no room for
}

// NCCL passes (void*)1 where it can do without being told of the end, and NULL sizes where it knows them.
static void hints(void) {
  talk t = talk_begin();
  char out[100], in[200];
  for (int i = 0; i < 50; i++) {
    void *sent = NULL, *received = (void *)1;
    memset(out, i, sizeof out);
    OK(net_irecv(t.receive, 1, in, sizeof in, &received));
    OK(net_isend(t.send, out, sizeof out, &sent));
    CHECK(received && received != (void *)1 && sent, "a request is needed");
    OK(net_wait(received, NULL));
    CHECK(!memcmp(in, out, sizeof out), "message %d", i);
    OK(net_wait(sent, NULL));
  }
  talk_end(&t);
}

static void flush(void) {
  talk t = talk_begin();
  char byte;
  void *data = &byte, *registered = NULL, *request = NULL;
  int size = 1, done = 0;
  for (int i = 0; i < 100; i++) {
    OK(net.iflush(t.receive, 1, &data, &size, &registered, &request));
    CHECK(request, "NCCL asks about it");
    OK(net_test(request, &done, NULL));
    CHECK(done, "there is nothing to wait for");
  }
  run_both(t.send, t.receive, 7, 10, of_any);
  talk_end(&t);
}

static void memory(void) {
  talk t = talk_begin();
  static char data[10000];
  void *comms[] = {t.send, t.receive};
  for (int i = 0; i < 2; i++) {
    void *registered = NULL;
    OK(net.register_memory(comms[i], data + i, sizeof data - 1, ABI_HOST_MEMORY, &registered));
    CHECK(registered, "NCCL takes NULL for none");
    OK(net.deregister(comms[i], registered));
    FAILS(ABI_INVALID, net.register_memory(comms[i], data, sizeof data, ABI_CUDA_MEMORY, &registered));
  }
  talk_end(&t);
}

// ---------------------------------------------------------------- many

static void many_comms(void) {
  enum { COMMS = 48 };
  void *context, *send[COMMS], *receive[COMMS];
  static stream streams[2 * COMMS];
  OK(net_init(&context, 1));
  for (int i = 0; i < COMMS; i++) {
    stage("opening %d", i);
    open_both(context, &send[i], &receive[i]);
    stream_begin(&streams[2 * i], send[i], 1, 100 + (uint64_t)i, 2 * DEPTH, of_small);
    stream_begin(&streams[2 * i + 1], receive[i], 0, 100 + (uint64_t)i, 2 * DEPTH, of_small);
  }
  stage("%d requests in each of %d comms", DEPTH, 2 * COMMS);
  run_streams(streams, 2 * COMMS);
  meet();
  for (int i = 0; i < COMMS; i++) close_both(send[i], receive[i]);
  OK(net_finalize(context));
}

// One listen comm for several connections, all of them open at a time.
static void one_listener(void) {
  enum { COMMS = 5 };
  char handle[ABI_HANDLE_BYTES], copy[COMMS][ABI_HANDLE_BYTES];
  void *context, *listener = NULL, *comm[COMMS] = {0};
  stream streams[COMMS];
  OK(net_init(&context, 1));
  if (right) OK(net_listen(context, 0, handle, &listener));
  right ? tell_peer(handle, sizeof handle) : hear_peer(handle, sizeof handle);
  for (int i = 0; i < COMMS; i++) memcpy(copy[i], handle, sizeof handle);
  stage("connecting");
  for (int left = COMMS; left;) {
    left = 0;
    sched_yield();
    for (int i = 0; i < COMMS; i++) {
      if (!comm[i]) OK(right ? net_accept(listener, &comm[i]) : net_connect(context, 0, copy[i], &comm[i]));
      left += !comm[i];
    }
  }
  if (right) OK(net.close_listener(listener));
  stage("sending");
  uint8_t index[COMMS]; // which connection each comm is, says its first message
  void *request[COMMS];
  int seen = 0;
  for (uint8_t i = 0; i < COMMS; i++) {
    index[i] = i;
    OK(right ? net_irecv(comm[i], 1, &index[i], 1, &request[i]) : net_isend(comm[i], &index[i], 1, &request[i]));
  }
  for (int i = 0; i < COMMS; i++) {
    OK(net_wait(request[i], NULL));
    seen |= 1 << index[i];
    stream_begin(&streams[i], comm[i], !right, 200 + index[i], 50, of_any);
  }
  CHECK(seen == (1 << COMMS) - 1, "not each connection came once: %#x", seen);
  run_streams(streams, COMMS);
  meet();
  for (int i = 0; i < COMMS; i++) OK(right ? net.close_receive(comm[i]) : net.close_send(comm[i]));
  OK(net_finalize(context));
}

static void with_itself(void) {
  void *context, *send, *receive;
  OK(net_init(&context, 1));
  open_self(context, &send, &receive);
  run_both(send, receive, 8, 100, of_any);
  close_both(send, receive);
  OK(net_finalize(context));
}

// ---------------------------------------------------------------- threads

typedef struct {
  void *context, *send, *receive;
  int index;
} worker_of;

// As NCCL's progress thread.
static void *make_progress(void *of) {
  worker_of *w = of;
  channel = w->index;
  run_both(w->send, w->receive, 300 + (uint64_t)w->index, 200, of_any);
  return NULL;
}

// As NCCL's service thread: it opens and closes comms while others use theirs.
static void *serve(void *of) {
  worker_of *w = of;
  channel = w->index;
  for (int i = 0; i < 20; i++) {
    void *context, *send, *receive;
    OK(net_init(&context, 2));
    open_both(context, &send, &receive);
    run_both(send, receive, 400 + (uint64_t)i, 10, of_small);
    meet();
    close_both(send, receive);
    OK(net_finalize(context));
  }
  return NULL;
}

static void several_threads(void) {
  talk t[2] = {talk_begin(), talk_begin()};
  pthread_t thread[3];
  worker_of worker[3];
  for (int i = 0; i < 3; i++) {
    worker[i] = (worker_of){t[i % 2].context, t[i % 2].send, t[i % 2].receive, i + 1};
    CHECK(!pthread_create(&thread[i], NULL, i < 2 ? make_progress : serve, &worker[i]), "no thread");
  }
  for (int i = 0; i < 3; i++) pthread_join(thread[i], NULL);
  talk_end(&t[0]);
  talk_end(&t[1]);
}

// ---------------------------------------------------------------- what is refused

static void misuse(void) {
  talk t = talk_begin();
  char byte = 0, handle[ABI_HANDLE_BYTES] = {0};
  void *request = NULL, *comm = NULL;
  abi_properties_v12 properties;
  FAILS(ABI_INVALID, net_properties(1, &properties));
  FAILS(ABI_INVALID, net_properties(-1, &properties));
  FAILS(ABI_INVALID, net_listen(t.context, 1, handle, &comm));
  FAILS(ABI_INVALID, net_connect(t.context, 1, handle, &comm));
  stage("a handle of zeros");
  FAILS(ABI_INVALID, net_connect(t.context, 0, handle, &comm));
  CHECK(!comm, "a comm that leads nowhere");
  stage("requests");
  FAILS(ABI_INVALID, net_irecv(t.receive, 2, &byte, 1, &request));
  FAILS(ABI_INVALID, net_irecv(t.receive, 0, &byte, 1, &request));
  FAILS(ABI_INVALID, net_isend(t.receive, &byte, 1, &request));
  FAILS(ABI_INVALID, net_irecv(t.send, 1, &byte, 1, &request));
  FAILS(ABI_INVALID, net_isend(t.send, &byte, (size_t)INT32_MAX, &request));
  FAILS(ABI_INVALID, net_irecv(t.receive, 1, &byte, version == 8 ? (size_t)-1 : (size_t)1 << 40, &request));
  CHECK(!request, "a request for what was refused");
  CHECK(log_count(ABI_LEVEL_WARN, "NET/torchrelay") >= 10, "each has its reason in NCCL's log");
  stage("closing nothing");
  OK(net.close_send(NULL));
  OK(net.close_receive(NULL));
  OK(net.close_listener(NULL));
  stage("and all goes on");
  run_both(t.send, t.receive, 9, 30, of_any);
  talk_end(&t);
}

// The message is longer than the room for it: an error at whoever receives, and nothing is written behind the room.
static void too_little_room(void) {
  enum { SENT = 600000, ROOM = 599999 };
  talk t = talk_begin();
  static uint8_t data[SENT + 64];
  void *request = NULL;
  memset(data, right ? 0xee : 0x11, sizeof data);
  OK(right ? net_irecv(t.receive, 1, data, ROOM, &request) : net_isend(t.send, data, SENT, &request));
  abi_result code = net_wait(request, NULL);
  if (right) {
    CHECK(code == ABI_REMOTE, "%d", code);
    CHECK(all_are(data + ROOM, sizeof data - ROOM, 0xee), "written behind the room");
  }
  talk_end(&t);
}

// ---------------------------------------------------------------- figures, not a test

static void measure(void) {
  talk t = talk_begin();
  uint64_t out = 0, in;
  enum { TURNS = 20000 };
  double begun = now();
  for (int i = 0; i < TURNS; i++)
    for (int half = 0; half < 2; half++) {
      void *request = NULL;
      OK(half == right ? net_isend(t.send, &out, 8, &request) : net_irecv(t.receive, 1, &in, 8, &request));
      OK(net_wait(request, NULL));
    }
  if (right) printf("half a round trip of 8 bytes: %.1f us\n", (now() - begun) / TURNS / 2 * 1e6);
  meet();
  begun = now();
  run_one(right ? t.receive : t.send, !right, 10, 4000, of_step);
  if (right)
    printf("one way, steps of 512 KiB, each byte checked: %.2f Gb/s; the longest call took %.1f ms\n",
           4000 * 524288.0 * 8 / (now() - begun) / 1e9, net_longest_call() * 1e3);
  fflush(stdout);
  talk_end(&t);
}

const scenario message_scenarios[] = {
    {"transfer", transfer, IN_BOTH, 8},
    {"small_messages", small_messages, IN_BOTH, 8},
    {"one_way", one_way, IN_BOTH, 8},
    {"newest_first", newest_first, IN_BOTH, 8},
    {"longest", longest, IN_BOTH, 8},
    {"none_left", none_left, IN_BOTH, 8},
    {"hints", hints, IN_BOTH, 8},
    {"flush", flush, IN_BOTH, 8},
    {"memory", memory, IN_BOTH, 8},
    {"many_comms", many_comms, IN_BOTH, 8},
    {"one_listener", one_listener, IN_BOTH, 8},
    {"with_itself", with_itself, ALONE, 8},
    {"several_threads", several_threads, IN_BOTH, 8},
    {"misuse", misuse, IN_BOTH, 8},
    {"too_little_room", too_little_room, IN_BOTH, 8},
    {NULL, NULL, ALONE, 0},
};

// What the harness must notice itself: this one fails.
static size_t of_wrong(uint64_t number) {
  (void)number;
  return 100000;
}

static void wrong_byte(void) {
  static uint8_t data[100000];
  void *request = NULL;
  talk t = talk_begin();
  if (right) {
    run_one(t.receive, 0, 11, 1, of_wrong);
  } else {
    fill_pattern(data, sizeof data, 11, 0);
    data[77776] ^= 1;
    OK(net_isend(t.send, data, sizeof data, &request));
    OK(net_wait(request, NULL));
  }
  meet();
}

const scenario figure_scenarios[] = {
    {"measure", measure, IN_BOTH, 8},
    {"wrong_byte", wrong_byte, IN_BOTH, 8},
    {NULL, NULL, ALONE, 0},
};
