// Engine: the thread that serves all comms while nobody calls, its beginning and its end.

#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "../netpath.h"
#include "clock.h"
#include "comm.h"
#include "conn.h"
#include "greet.h"
#include "inject.h"
#include "linkmon.h"
#include "neighbours.h"
#include "paths.h"
#include "proto.h"
#include "receive.h"
#include "report.h"
#include "settings.h"
#include "silence.h"
#include "text.h"

enum {
  TICK_MS = 10,
  IDLE_TICK_MS = 100,
  ATTEMPT_US = 150000,     // connecting may take; longer where round trips do
  SOON_US = 80000,         // until the next attempt, at most, while somebody waits
  GREETING_US = 2000000,   // who connects must say for which comm
  LAST_WORDS_US = 500000,  // of all comms, at the end
  EVENTS = 64,
};

static source kernel_source = {OF_KERNEL, 0}, wake_source = {OF_WAKE, 0};

// ---------------------------------------------------------------- paths of this machine

static void lose_path(int path, const char *reason, uint64_t now) {
  for (int again = 1; again;) { // losing one may change the list
    again = 0;
    for (conn *each = engine.conns; each; each = each->next)
      if (each->source.local == path) {
        conn_lose(each, reason, now);
        again = 1;
        break;
      }
  }
}

static void take_path_back(int path, uint64_t now) {
  for (np_comm *each = engine.comms; each; each = each->next)
    if (each->flow.sends && now >= each->calm_us[path]) {
      each->retry_us[path] = now;
      each->pause_ms[path] = 20;
    }
}

static void refresh_path(int path) {
  for (conn *each = engine.conns; each; each = each->next)
    if (each->source.local == path) conn_want(each);
}

// Those who tell of the paths, linkmon.c and inject.c, are below the connections and cannot end them: it is done here.
static void act_on(const path_event *event, uint64_t now) {
  switch (event->what) {
  case PATH_LOST: lose_path(event->path, event->reason, now); break;
  case PATH_BACK: take_path_back(event->path, now); break;
  case PATH_REFRESH: refresh_path(event->path); break;
  }
}

static void act_on_kernel(uint64_t now) {
  path_event events[NP_MAX_PATHS];
  for (int count; (count = kernel_read(events));)
    for (int i = 0; i < count; i++) act_on(&events[i], now);
}

static void act_on_faults(uint64_t now) {
  for (path_event event; inject_next(engine.paths, now, &event);) act_on(&event, now);
}

static int set_faults(const char *faults, uint64_t now) {
  injections wanted;
  int code = inject_read(faults, now, &wanted);
  if (code) return code;
  inject_end(now);
  act_on_faults(now);
  inject_set(&wanted);
  act_on_faults(now);
  return NP_OK;
}

// ---------------------------------------------------------------- time

static int may_try(const np_comm *comm, int path, uint64_t now) {
  if (comm->refused || comm->probe[path] || now < comm->retry_us[path]) return 0;
  if (now >= comm->calm_us[path]) return 1;
  for (int i = 0; i < comm->flow.paths; i++)
    if (comm->live[i] && !comm->flow.path[i].silent) return 0; // it rests, as others do its work
  return 1;
}

// Attempts are far apart while nobody waits. Now somebody does, perhaps with no path at all.
static void hurry(np_comm *comm, int path, uint64_t now) {
  uint64_t soon = comm_any_live(comm) ? now + SOON_US : now;
  if (!flow_busy(&comm->flow) || comm->probe[path] || comm->retry_us[path] <= now + SOON_US) return;
  comm->retry_us[path] = soon;
}

static uint64_t attempt_us(const np_comm *comm, int path) {
  uint64_t four = 4ull * comm->flow.path[path].round_trip;
  return four > ATTEMPT_US ? four : ATTEMPT_US;
}

// Nobody is left to be told that it is closed.
static int is_over(const np_comm *comm) {
  if (!comm->closed) return 0;
  if (!comm->flow.sends || comm->wired || comm->may_be_known) return flow_finished(&comm->flow);
  for (int i = 0; i < comm->flow.paths; i++)
    if (comm->probe[i] && comm->probe[i]->state == CONN_GREETING) return 0;
  return 1;
}

static void tick_paths(np_comm *comm, flow_verdict verdict, uint64_t now) {
  for (int i = 0; i < comm->flow.paths; i++) {
    int bit = 1 << i;
    if (verdict.lost & bit && comm->live[i]) conn_lose(comm->live[i], "silent", now);
    if (!comm->flow.sends) continue;
    conn *probe = comm->probe[i];
    if (probe && now - probe->since_us > attempt_us(comm, i)) conn_lose(probe, "refused", now);
    // What is up again according to its bytes needs no second connection.
    else if (probe && comm->live[i] && !(verdict.probe & bit)) conn_end(probe);
    int wanted = !comm->live[i] || verdict.probe & bit;
    if (wanted) hurry(comm, i, now);
    if (wanted && !is_over(comm) && may_try(comm, i, now)) conn_connect(comm, i, now);
  }
}

static void tick_reach(np_comm *comm, uint64_t now) {
  int away = comm->flow.unreachable || comm->left;
  if (away && !comm->told_unreachable && comm->wired) {
    comm->told_unreachable = 1;
    comm->cut_us = now;
    report_unreachable(comm, now);
  } else if (!away && comm->told_unreachable) {
    comm->told_unreachable = 0;
    report_back(comm, now);
  }
}

static int tick_comm(np_comm *comm, uint64_t now) {
  flow_verdict verdict = flow_tick(&comm->flow, now);
  tick_paths(comm, verdict, now);
  tick_reach(comm, now);
  if (verdict.failed) {
    say(NP_LEVEL_WARN, "comm %016llx: no path to the peer for %llu s: its requests fail (TORCHRELAY_NET_GIVEUP_S)",
        (unsigned long long)comm->label, (unsigned long long)(comm->flow.limits.giveup_us / 1000000));
    report_gave_up(comm);
    comm_changed(comm);
  }
  comm_pump(comm, now);
  return flow_watches(&comm->flow) || !comm->wired;
}

static void tick_strangers(uint64_t now) {
  for (conn *each = engine.conns, *next; each; each = next) {
    next = each->next;
    if (each->state == CONN_ACCEPTED && now - each->since_us > GREETING_US) conn_end(each);
  }
}

static int sending(const np_comm *comm) {
  for (int i = 0; i < comm->flow.paths; i++)
    if (comm->live[i] && comm->live[i]->out_done < comm->live[i]->out_size) return 1;
  return 0;
}

static void end_comm(np_comm *comm) {
  report_drop(comm);
  conn_end_all(comm);
  comm_free(comm);
}

// Returns whether anybody waits for anything.
static int tick(uint64_t now) {
  int busy = 0;
  act_on_faults(now);
  tick_strangers(now);
  for (int i = 0; i < engine.paths; i++)
    if (engine.deaf[i]) conn_listen(i, 1);
  for (np_comm *each = engine.comms, *next; each; each = next) {
    next = each->next;
    busy |= tick_comm(each, now);
    if (each->closed && !each->waiters && ((is_over(each) && !sending(each)) || now > each->linger_us)) end_comm(each);
  }
  neighbours_keep(now);
  report_page(now);
  return busy || inject_any();
}

// ---------------------------------------------------------------- the thread

static void serve(struct epoll_event *events, int count) {
  uint64_t now = now_us();
  for (int i = 0; i < count; i++) // nothing more goes over a path that is lost
    if (((source *)events[i].data.ptr)->kind == OF_KERNEL) act_on_kernel(now);
  for (int i = 0; i < count; i++) {
    source *from = events[i].data.ptr;
    uint64_t drained;
    if (from->kind == OF_CONN) conn_event((conn *)from, events[i].events, now);
    else if (from->kind == OF_WAKE && read(engine.wake, &drained, sizeof drained) < 0) continue;
  }
  // Whoever connects anew is only judged after what had come over the old connection was read.
  for (int i = 0; i < count; i++) {
    source *from = events[i].data.ptr;
    if (from->kind == OF_LISTENER) conn_accept(from->local, now);
  }
}

static void free_buried(void) {
  while (engine.buried) {
    conn *next = engine.buried->next;
    free(engine.buried);
    engine.buried = next;
  }
}

static void *run(void *unused) {
  (void)unused;
  struct epoll_event events[EVENTS];
  uint64_t ticked = 0;
  int busy = 1;
  for (;;) {
    int count = epoll_wait(engine.epoll, events, EVENTS, busy ? TICK_MS : IDLE_TICK_MS);
    pthread_mutex_lock(&engine.lock);
    if (engine.ends) break;
    serve(events, count > 0 ? count : 0);
    uint64_t now = now_us();
    if (now - ticked >= TICK_MS * 1000 / 2) {
      ticked = now;
      busy = tick(now);
    }
    free_buried();
    pthread_mutex_unlock(&engine.lock);
  }
  pthread_mutex_unlock(&engine.lock);
  return NULL;
}

// ---------------------------------------------------------------- beginning and end

static void close_all(void) {
  for (conn *each = engine.conns; each; each = each->next) close(each->fd);
  for (int i = 0; i < engine.paths; i++)
    if (engine.path[i].listens >= 0) close(engine.path[i].listens);
  neighbours_end();
  int *files[] = {&engine.epoll, &engine.wake, &engine.kernel};
  for (unsigned i = 0; i < 3; i++) {
    if (*files[i] >= 0) close(*files[i]);
    *files[i] = -1;
  }
  engine.paths = 0;
}

// A child has our descriptors, and must not keep our connections open when we are gone. It may start on its own.
static void in_child(void) {
  pthread_mutex_init(&engine.lock, NULL);
  if (engine.runs) close_all();
  report_end();
  engine.users = engine.runs = engine.ends = engine.stopping = 0;
  engine.comms = NULL;
  engine.listeners = NULL;
  engine.conns = engine.buried = NULL;
  engine.process++;
}

static int watch(int file, source *of) {
  struct epoll_event event = {.events = EPOLLIN, .data.ptr = of};
  return file >= 0 && epoll_ctl(engine.epoll, EPOLL_CTL_ADD, file, &event);
}

// No signal is for the engine's thread: whoever blocks one everywhere else, to wait for it, shall get it. Its own
// faults are its own.
static int start_thread(void) {
  static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
  sigset_t all, before;
  sigfillset(&all);
  for (unsigned i = 0; i < sizeof own / sizeof own[0]; i++) sigdelset(&all, own[i]);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int failed = pthread_create(&engine.thread, NULL, run, NULL);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (failed) report_end();
  return failed;
}

static int start(void) {
  static int guarded;
  int code = settings_read(&engine.settings);
  if (!code) code = paths_find(engine.path, &engine.paths);
  if (!code) code = paths_listen(engine.path, engine.paths);
  if (code) return code;
  engine.epoll = epoll_create1(EPOLL_CLOEXEC);
  engine.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  engine.kernel = kernel_open();
  int failed = engine.epoll < 0 || engine.wake < 0 || watch(engine.wake, &wake_source) ||
               watch(engine.kernel, &kernel_source);
  for (int i = 0; i < engine.paths; i++) {
    engine.listening[i] = (source){OF_LISTENER, i};
    engine.deaf[i] = 0;
    failed |= watch(engine.path[i].listens, &engine.listening[i]);
  }
  if (failed) return fail(NP_SYSTEM, "the engine cannot watch its sockets: %s", strerror(errno));
  const char *faults = getenv("TORCHRELAY_NET_INJECT");
  if (faults && (code = set_faults(faults, now_us()))) return code;
  if (!guarded) pthread_atfork(engine_lock, engine_unlock, in_child);
  guarded = 1;
  engine.ends = 0;
  engine.process++;
  report_start();
  if (start_thread()) return fail(NP_SYSTEM, "no thread for the engine");
  engine.runs = 1;
  return NP_OK;
}

int np_start(np_logger logger) {
  engine_lock();
  while (engine.stopping) {
    engine_unlock();
    usleep(1000);
    engine_lock();
  }
  text_set_logger(logger);
  int code = NP_OK;
  if (!engine.runs && (code = start())) close_all();
  engine.users += !code;
  engine_unlock();
  return code;
}

static int all_is_said(void) {
  for (np_comm *each = engine.comms; each; each = each->next)
    for (int i = 0; i < each->flow.paths; i++) {
      const flow_path *p = &each->flow.path[i];
      if (p->live && !p->silent && (p->ack_due || p->bye_due || p->count)) return 0;
    }
  return 1;
}

void np_stop(void) {
  engine_lock();
  if (!engine.users || --engine.users) {
    engine_unlock();
    return;
  }
  engine.stopping = 1;
  for (np_comm *each = engine.comms; each; each = each->next) {
    if (!each->closed) flow_close(&each->flow);
    each->closed = 1;
    each->linger_us = now_us() + LAST_WORDS_US;
  }
  engine_wake();
  uint64_t until = now_us() + LAST_WORDS_US;
  while (!all_is_said() && now_us() < until) {
    engine_unlock();
    usleep(1000);
    engine_lock();
  }
  engine.ends = 1;
  engine_wake();
  engine_unlock();
  pthread_join(engine.thread, NULL);
  engine_lock();
  while (engine.comms) end_comm(engine.comms);
  while (engine.listeners) {
    np_listener *next = engine.listeners->next;
    free(engine.listeners);
    engine.listeners = next;
  }
  while (engine.conns) conn_end(engine.conns);
  free_buried();
  close_all();
  report_end();
  engine.runs = engine.stopping = 0;
  engine_unlock();
}

// ---------------------------------------------------------------- what there is

int np_paths(np_path_info *paths, int room) {
  engine_lock();
  for (int i = 0; i < engine.paths && i < room; i++) {
    memcpy(paths[i].interface, engine.path[i].interface, NP_TEXT);
    memcpy(paths[i].address, engine.path[i].text, NP_TEXT);
    paths[i].speed_mbps = engine.path[i].speed_mbps;
    paths[i].up = (uint32_t)engine.path[i].up;
  }
  int count = engine.paths;
  engine_unlock();
  return count;
}

int np_counts(np_path_counts *counts, int room) {
  engine_lock();
  int count = engine.paths;
  for (int i = 0; i < count && i < room; i++) {
    counts[i] = engine.gone[i];
    for (np_comm *each = engine.comms; each; each = each->next)
      for (int k = 0; k < each->flow.paths; k++)
        if (each->local[k] == i) comm_count(&counts[i], each, k);
  }
  engine_unlock();
  return count;
}

int np_inject(const char *faults) {
  engine_lock();
  int code = engine.runs ? set_faults(faults, now_us()) : fail(NP_INVALID, "np_start was not called");
  engine_wake();
  engine_unlock();
  return code;
}
