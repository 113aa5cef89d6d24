// Comm: the registry of what there is: the engine's state, its lock, and its comms. It knows nothing of what they do.

#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm.h"
#include "proto.h"

np_engine engine = {.lock = PTHREAD_MUTEX_INITIALIZER, .epoll = -1, .wake = -1, .kernel = -1};

void engine_lock(void) { pthread_mutex_lock(&engine.lock); }

void engine_unlock(void) { pthread_mutex_unlock(&engine.lock); }

void engine_wake(void) {
  uint64_t one = 1;
  if (write(engine.wake, &one, sizeof one) < 0) return; // it is awake
}

// ---------------------------------------------------------------- comms

np_comm *comm_find(uint64_t id, int sends) {
  for (np_comm *each = engine.comms; each; each = each->next)
    if (each->id == id && each->flow.sends == sends) return each;
  return NULL;
}

np_comm *comm_new(int sends, uint64_t id, const uint8_t *token, const flow_limits *limits, int checked) {
  np_comm *comm = calloc(1, sizeof *comm);
  if (!comm) return NULL;
  flow_init(&comm->flow, sends, engine.paths, checked, limits);
  comm->id = id;
  memcpy(comm->token, token, sizeof comm->token);
  comm->process = engine.process;
  for (int i = 0; i < NP_MAX_PATHS; i++) {
    comm->local[i] = i < engine.paths ? i : 0;
    comm->pause_ms[i] = 20;
  }
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&comm->changed, &monotonic);
  pthread_condattr_destroy(&monotonic);
  comm->next = engine.comms;
  engine.comms = comm;
  return comm;
}

void comm_changed(np_comm *comm) {
  if (comm->waiters) pthread_cond_broadcast(&comm->changed);
}

int comm_any_live(const np_comm *comm) {
  for (int i = 0; i < comm->flow.paths; i++)
    if (comm->live[i]) return 1;
  return 0;
}

void comm_count(np_path_counts *sum, const np_comm *comm, int path) {
  const flow_path *p = &comm->flow.path[path];
  sum->sent_bytes += p->sent_bytes;
  sum->received_bytes += p->received_bytes;
  sum->sent_again += p->sent_again;
  sum->duplicates += p->duplicates;
  sum->downs += p->downs;
  sum->ups += p->ups;
  sum->corrupt += p->corrupt;
  if (!p->live) return;
  sum->live++;
  if (p->round_trip > sum->round_trip) sum->round_trip = p->round_trip;
}

void comm_free(np_comm *comm) {
  for (int i = 0; i < comm->flow.paths; i++) comm_count(&engine.gone[comm->local[i]], comm, i);
  for (np_comm **at = &engine.comms; *at; at = &(*at)->next)
    if (*at == comm) {
      *at = comm->next;
      break;
    }
  engine.closed[engine.closed_count++ % (sizeof engine.closed / sizeof engine.closed[0])] = comm->id;
  pthread_cond_destroy(&comm->changed);
  free(comm);
}
