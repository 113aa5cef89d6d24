// Comm: the registry at the bottom. What the parts of the library share: one engine in a process, with one lock, and
// its comms. What becomes of them over time is the engine's loop's affair (engine.c).

#ifndef NP_COMM_H
#define NP_COMM_H

#include <pthread.h>

#include "paths.h"
#include "proto.h"
#include "settings.h"

typedef enum { OF_CONN, OF_LISTENER, OF_KERNEL, OF_WAKE } source_kind;

typedef struct { // what epoll tells us of; first in whatever it is
  source_kind kind;
  int local; // our own path
} source;

typedef struct conn conn; // see conn.h

struct np_listener {
  uint8_t token[TOKEN_BYTES];
  np_handle handle;
  np_listener *next;
};

struct np_comm {
  flow flow;
  uint64_t id, label;
  uint8_t token[TOKEN_BYTES];
  np_listener *listener; // who has not accepted it yet
  unsigned process;      // generation of the engine, see engine.process
  conn *live[NP_MAX_PATHS], *probe[NP_MAX_PATHS];
  int local[NP_MAX_PATHS]; // which of ours each path is
  address remote[NP_MAX_PATHS];
  uint16_t epoch[NP_MAX_PATHS];                       // last used
  uint64_t retry_us[NP_MAX_PATHS];                    // no attempt before
  uint32_t pause_ms[NP_MAX_PATHS];                    // after the next attempt that fails
  uint64_t flaps_us[NP_MAX_PATHS], calm_us[NP_MAX_PATHS]; // when its losses began to be counted; damped until
  uint32_t flaps[NP_MAX_PATHS];
  int wired;      // was live once
  int may_be_known; // not wired, and yet the peer may have made a comm of our greeting
  int refused;    // the refusal that ends it
  int refusals[NP_MAX_PATHS]; // in a row, as the peer hears a connection over which we hear nothing
  int accepted, closed, told_unreachable;
  uint64_t ended_us[NP_MAX_PATHS]; // when the peer last ended it; 0: it is up, or was lost
  int left;                        // the peer has ended all at once, and has not come back
  uint64_t cut_us; // since when the peer is unreachable
  uint64_t linger_us; // closed: gone at that time at the latest
  int waiters;
  pthread_cond_t changed;
  struct np_comm *next;
};

typedef struct {
  pthread_mutex_t lock;
  pthread_t thread;
  int users, runs, ends, stopping;
  unsigned process; // another in each process, and after each start
  settings settings;
  local_path path[NP_MAX_PATHS];
  int paths;
  source listening[NP_MAX_PATHS];
  int deaf[NP_MAX_PATHS]; // nobody is accepted until the next tick: there are no descriptors
  int epoll, wake, kernel;
  np_comm *comms;
  np_listener *listeners;
  conn *conns, *buried; // the buried are freed by the engine's thread alone, which may still hold an event of them
  uint64_t closed[256]; // ids of comms that have ended
  unsigned closed_count;
  np_path_counts gone[NP_MAX_PATHS]; // of comms that have ended
} np_engine;

extern np_engine engine;

void engine_lock(void);
void engine_unlock(void);
void engine_wake(void); // the loop looks at once

np_comm *comm_find(uint64_t id, int sends);
np_comm *comm_new(int sends, uint64_t id, const uint8_t *token, const flow_limits *limits, int checked);
void comm_changed(np_comm *comm);
int comm_any_live(const np_comm *comm);
void comm_count(np_path_counts *sum, const np_comm *comm, int path); // adds the path's counters
void comm_free(np_comm *comm);                                       // its caller has ended its connections

#endif
