// Scenarios of lives: what the plugin says of itself, and its beginnings and ends, the unusual ones, too.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "nccl_side.h"

// ---------------------------------------------------------------- what it says of itself

static void properties(void) {
  void *context;
  abi_properties_v12 p;
  int count = -1;
  net_check_symbol();
  CHECK(!strcmp(net_name, "torchrelay"), "%s", net_name);
  OK(net_init(&context, 1));
  CHECK(net_has_contexts() == (context != NULL), "a context from version 11 on");
  OK(net.devices(&count));
  CHECK(count == 1, "%d devices", count);
  OK(net_properties(0, &p));
  CHECK(!strcmp(p.name, "torchrelay"), "%s", p.name);
  CHECK(p.guid && p.memory == ABI_HOST_MEMORY && !p.registers_for_all, "memory %d", p.memory);
  CHECK(p.speed == 2 * 10000, "%d Mb/s of two paths of an unknown speed", p.speed);
  CHECK(!p.pci_path, "%s, but there is no hardware", p.pci_path);
  CHECK(p.latency > 0 && p.latency < 1000, "%f us", (double)p.latency);
  CHECK(p.most_comms >= 1024 && p.most_receives == 1, "%d comms, %d receives", p.most_comms, p.most_receives);
  CHECK(p.device_type == ABI_HOST_DEVICE && !p.device_version, "type %d", p.device_type);
  if (version >= 9) {
    CHECK(p.parts.count == 1 && p.parts.device[0] == 0, "%d parts", p.parts.count);
    CHECK(p.most_bytes > 512 << 10 && p.most_bytes < NP_MAX_MESSAGE, "%zu bytes", p.most_bytes);
    CHECK(p.most_bytes_of_collective == p.most_bytes && !p.always_flushes, "of a collective");
  }
  if (version >= 11) CHECK(p.most_requests_at_once == 1, "%d", p.most_requests_at_once);
  if (version >= 12) CHECK(p.rail == -1 && p.plane == -1, "rail %d, plane %d", p.rail, p.plane);
  OK(net_finalize(context));
}

// Who has the same paths has the same device, and who has others another one.
static void guids(void) {
  abi_properties_v12 p;
  void *context;
  uint64_t other;
  for (int differ = 0; differ < 2; differ++) {
    if (differ && right) setenv("TORCHRELAY_NET_PATHS", "127.0.1.7,127.0.2.7", 1);
    if (differ && !net_has_contexts()) return; // it keeps the paths it has
    OK(net_init(&context, 1));
    OK(net_properties(0, &p));
    tell_peer(&p.guid, sizeof p.guid);
    hear_peer(&other, sizeof other);
    CHECK((p.guid != other) == differ, "%#llx and %#llx", (unsigned long long)p.guid, (unsigned long long)other);
    OK(net_finalize(context));
  }
}

// ---------------------------------------------------------------- beginnings and ends

static void begin_again(void) {
  enum { TIMES = 4 };
  void *context[TIMES], *send, *receive;
  for (int i = 0; i < TIMES; i++) OK(net_init(&context[i], (uint64_t)i));
  for (int i = 1; i < TIMES; i++) OK(net_finalize(context[i]));
  OK(net_finalize(NULL));
  stage("after all but one have ended");
  open_both(context[0], &send, &receive);
  run_both(send, receive, 1, 30, of_any);
  meet();
  close_both(send, receive);
  OK(net_finalize(context[0]));
  stage("from the beginning");
  talk t = talk_begin();
  run_both(t.send, t.receive, 2, 30, of_any);
  talk_end(&t);
}

#ifdef __SANITIZE_THREAD__
enum { OWN_THREADS = 3 }; // two are the sanitizer's
#else
enum { OWN_THREADS = 1 };
#endif

// A thread that was joined is shown by the kernel a little longer.
static void await_no_thread_but_ours(void) {
  stage("waiting for the end of the engine's thread");
  while (threads() != OWN_THREADS) sched_yield();
}

// From version 11 on nothing is left: no thread, no file.
static void nothing_is_left(void) {
  int files = open_files();
  for (int i = 0; i < 3; i++) {
    talk t = talk_begin();
    CHECK(threads() > OWN_THREADS && open_files() > files, "nothing was begun");
    run_both(t.send, t.receive, 3, 30, of_any);
    talk_end(&t);
    await_no_thread_but_ours();
    CHECK(open_files() == files, "%d files, %d before", open_files(), files);
  }
}

// A comm that is closed after its communicator has ended, as with one that shares another's resources.
static void closed_late(void) {
  talk t = talk_begin();
  OK(net_finalize(t.context));
  stage("the communicator has ended");
  run_both(t.send, t.receive, 4, 30, of_any);
  meet();
  close_both(t.send, t.receive);
  await_no_thread_but_ours();
}

static void open_again(const char *library) {
  int of = version;
  net_open(library, of);
}

static void closed_library(void) {
  Dl_info info;
  char library[512];
  CHECK(dladdr(net_symbol("np_version"), &info), "the library's name");
  snprintf(library, sizeof library, "%s", info.dli_fname);
  for (int i = 0; i < 3; i++) {
    stage("time %d", i);
    talk t = talk_begin();
    run_both(t.send, t.receive, 5, 20, of_any);
    talk_end(&t);
    CHECK(net_release(), "the library was unloaded, and its thread may run");
    open_again(library);
  }
  stage("with comms that are open");
  talk t = talk_begin();
  CHECK(net_release(), "the library was unloaded, and its thread runs");
  open_again(library);
  run_both(t.send, t.receive, 6, 20, of_any);
  talk_end(&t);
}

typedef struct {
  pthread_barrier_t *together;
  int times;
} beginner;

static void *begin_and_end(void *of) {
  beginner *b = of;
  char handle[ABI_HANDLE_BYTES];
  for (int i = 0; i < b->times; i++) {
    void *context, *listener;
    pthread_barrier_wait(b->together);
    OK(net_init(&context, 1));
    OK(net_listen(context, 0, handle, &listener));
    OK(net.close_listener(listener));
    OK(net_finalize(context));
  }
  return NULL;
}

// One thread's communicator begins while another's ends.
static void beginning_at_an_end(void) {
  enum { THREADS = 3 };
  pthread_t thread[THREADS];
  pthread_barrier_t together;
  beginner b = {&together, 100};
  pthread_barrier_init(&together, NULL, THREADS);
  for (int i = 0; i < THREADS; i++) CHECK(!pthread_create(&thread[i], NULL, begin_and_end, &b), "no thread");
  for (int i = 0; i < THREADS; i++) pthread_join(thread[i], NULL);
  pthread_barrier_destroy(&together);
}

// ---------------------------------------------------------------- fork

// A child has none of its parent's connections, and may do all by itself.
static void be_child(talk *of_parent, int sockets) {
  void *context, *send, *receive;
  stage("in the child");
  CHECK(open_sockets() == sockets, "%d sockets, %d before the parent began", open_sockets(), sockets);
  close_both(of_parent->send, of_parent->receive);
  OK(net_finalize(of_parent->context));
#ifdef __SANITIZE_THREAD__
  exit(0); // the sanitizer knows no threads in a child of several
#endif
  OK(net_init(&context, 3));
  open_self(context, &send, &receive);
  run_both(send, receive, 7, 50, of_any);
  close_both(send, receive);
  OK(net_finalize(context));
  exit(0);
}

static void forked(void) {
  int sockets = open_sockets(), children = 0, status;
  talk t = talk_begin();
  stream both[2];
  pid_t child = 0;
  stream_begin(&both[0], t.send, 1, 8, 600, of_any);
  stream_begin(&both[1], t.receive, 0, 8, 600, of_any);
  while (both[0].done < both[0].total || both[1].done < both[1].total || child) {
    if (!child && both[1].done >= (uint64_t)(children + 1) * 100 && children < 3) {
      children++;
      if (!(child = fork())) be_child(&t, sockets);
      CHECK(child > 0, "fork");
    }
    if (child && waitpid(child, &status, WNOHANG) == child) {
      CHECK(status == 0, "the child ended with %#x", status);
      child = 0;
    }
    int went_on = 0;
    for (int i = 0; i < 2; i++) went_on |= both[i].done < both[i].total && stream_step(&both[i]);
    if (!went_on) sched_yield();
  }
  CHECK(children, "nothing was forked");
  for (int i = 0; i < 2; i++) stream_end(&both[i]);
  talk_end(&t);
}

// A program that is started keeps none of our files.
static void started_program(void) {
  talk t = talk_begin();
  int status, from[2];
  char text[64] = "";
  CHECK(!pipe2(from, O_CLOEXEC), "pipe");
  pid_t child = fork();
  if (!child) {
    dup2(from[1], STDOUT_FILENO);
    execl("/bin/sh", "sh", "-c", "ls -l /proc/$$/fd | grep -c 'socket:\\|eventpoll\\|eventfd'", (char *)NULL);
    _exit(127);
  }
  close(from[1]);
  CHECK(read(from[0], text, sizeof text - 1) > 0 && waitpid(child, &status, 0) == child, "no answer");
  close(from[0]);
  CHECK(atoi(text) == 0, "%d of our files are open in it", atoi(text));
  run_both(t.send, t.receive, 9, 20, of_any);
  talk_end(&t);
}

// ---------------------------------------------------------------- nobody waits

static void nobody_blocks(void) {
  void *context, *listener = NULL, *comm = NULL;
  char handle[ABI_HANDLE_BYTES];
  OK(net_init(&context, 1));
  OK(net_listen(context, 0, handle, &listener));
  CHECK(listener, "listen must return a comm");
  for (int i = 0; i < 1000; i++) {
    OK(net_accept(listener, &comm));
    CHECK(!comm, "nobody has connected");
  }
  OK(net.close_listener(listener));
  OK(net_finalize(context));
}

// The peer is stopped: its kernel takes connections, and nobody answers.
static void stopped_peer(void) {
  void *context, *listener, *comm = NULL;
  char handle[ABI_HANDLE_BYTES];
  OK(net_init(&context, 1));
  if (right) {
    OK(net_listen(context, 0, handle, &listener));
    tell_peer(handle, sizeof handle);
    raise(SIGSTOP);
    for (; !comm; sched_yield()) OK(net_accept(listener, &comm));
    OK(net.close_listener(listener));
  } else {
    hear_peer(handle, sizeof handle);
    await_stopped_peer();
    double begun = now();
    for (int calls = 0; calls < 100 || now() < begun + 0.4; calls++) {
      OK(net_connect(context, 0, handle, &comm));
      CHECK(!comm, "a comm with somebody who does not answer");
    }
    kill(peer_process, SIGCONT);
    for (; !comm; sched_yield()) OK(net_connect(context, 0, handle, &comm));
  }
  run_one(comm, !right, 10, 20, of_any);
  meet();
  OK(right ? net.close_receive(comm) : net.close_send(comm));
  OK(net_finalize(context));
}

// NCCL gives up connecting, as a communicator is aborted: there is no comm yet that could be closed.
static void given_up_connecting(void) {
  void *context, *listener = NULL, *comm = NULL;
  char handle[ABI_HANDLE_BYTES], used[ABI_HANDLE_BYTES];
  OK(net_init(&context, 1));
  OK(net_listen(context, 0, handle, &listener));
  exchange(0);
  tell_peer(handle, sizeof handle);
  hear_peer(used, sizeof used);
  OK(net_connect(context, 0, used, &comm));
  CHECK(!comm, "so fast that there is nothing to see");
  meet();
  OK(net.close_listener(listener)); // with somebody who has connected and was not accepted
  OK(net_finalize(context));
  stage("and all goes on");
  talk t = talk_begin();
  run_both(t.send, t.receive, 11, 20, of_any);
  talk_end(&t);
}

const scenario life_scenarios[] = {
    {"properties", properties, ALONE, 8},
    {"guids", guids, IN_BOTH, 8},
    {"begin_again", begin_again, IN_BOTH, 8},
    {"nothing_is_left", nothing_is_left, IN_BOTH, 11},
    {"closed_late", closed_late, IN_BOTH, 11},
    {"closed_library", closed_library, IN_BOTH, 8},
    {"beginning_at_an_end", beginning_at_an_end, ALONE, 8},
    {"forked", forked, IN_BOTH, 8},
    {"started_program", started_program, IN_BOTH, 8},
    {"nobody_blocks", nobody_blocks, ALONE, 8},
    {"stopped_peer", stopped_peer, IN_BOTH, 8},
    {"given_up_connecting", given_up_connecting, IN_BOTH, 8},
    {NULL, NULL, ALONE, 0},
};
