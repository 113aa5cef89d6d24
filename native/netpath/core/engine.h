// Engine: what the parts of the library share. One thread and one lock serve all comms of a process.

#ifndef NP_ENGINE_H
#define NP_ENGINE_H

#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>

#include "proto.h"

typedef union {
  struct sockaddr any;
  struct sockaddr_in v4;
  struct sockaddr_in6 v6;
} address;

// ---------------------------------------------------------------- text.c

void text_set_logger(np_logger logger);
void text_set_level(int level);
__attribute__((format(printf, 2, 3))) void say(int level, const char *format, ...);
__attribute__((format(printf, 2, 3))) int fail(int code, const char *format, ...); // keeps the text for np_error()

// ---------------------------------------------------------------- clock

uint64_t now_us(void);  // since some time in the past
uint64_t date_us(void); // since 1970

// ---------------------------------------------------------------- settings.c, from the environment

typedef struct {
  flow_limits limits;
  int checked; // chunks have checksums
  int neighbours; // hardware addresses of peers are kept, see neighbours.c
} settings;

int settings_read(settings *into); // NP_OK, or what is wrong

// ---------------------------------------------------------------- paths.c

typedef struct {
  char interface[NP_TEXT];
  char text[NP_TEXT]; // the address
  address own;        // with the port where we listen
  unsigned index;     // of the interface; 0: not known
  uint32_t speed_mbps;
  int up;             // as far as the kernel has said
  int carrier;        // what is sent may go somewhere; 1 where it is not known
  int listens;        // descriptor
} local_path;

typedef struct {
  uint32_t magic;
  uint8_t version, paths, unused[2];
  uint8_t token[TOKEN_BYTES];
  struct {
    uint8_t family, unused; // 4 or 6
    uint16_t port;          // big endian, as the address
    uint8_t bytes[16];
  } at[NP_MAX_PATHS];
  uint64_t begun; // id of the comm that np_connect has begun
} np_handle;

_Static_assert(sizeof(np_handle) <= NP_HANDLE_BYTES, "fits into what NCCL carries");

int paths_find(local_path *paths, int *count); // reads TORCHRELAY_NET_PATHS
int paths_listen(local_path *paths, int count);
socklen_t address_length(const address *of);
void address_text(const address *of, char *text, size_t room);
void handle_fill(np_handle *handle, const local_path *paths, int count);
int handle_read(const np_handle *handle, int at, address *into); // 0: there is none
int same_address(const address *a, const address *b); // whatever their ports

// ---------------------------------------------------------------- connections

typedef enum { OF_CONN, OF_LISTENER, OF_KERNEL, OF_WAKE } source_kind;

typedef struct { // what epoll tells us of; first in whatever it is
  source_kind kind;
  int local; // our own path
} source;

typedef enum { CONN_CONNECTING, CONN_GREETING, CONN_ACCEPTED, CONN_LIVE, CONN_DEAD } conn_state;

enum { HEAD_FRAMES = 16, AHEAD = 4096, LARGEST_CHUNK = 16 << 20 };

typedef struct conn {
  source source;
  int fd, wants; // what epoll is asked for
  conn_state state;
  np_comm *comm; // NULL: accepted, and has not said for which
  int path;      // of the comm: as the sender counts its paths, which may be more than ours
  uint16_t epoch;
  uint64_t since_us;
  int last; // close it when all is sent
  // on its way out: frames, then the data of the last of them
  _Alignas(frame) uint8_t head[HEAD_FRAMES * sizeof(frame) + HELLO_BYTES];
  uint32_t head_size, out_size, out_done;
  frame out_frame; // DATA that is on its way
  const uint8_t *out_data;
  uint32_t out_data_size;
  // coming in: what was read ahead, and the chunk that is not whole yet
  uint8_t ahead[AHEAD];
  uint32_t ahead_from, ahead_to;
  frame in_frame;
  uint32_t in_done;
  int in_data, in_clean; // a chunk is coming; all of it went to where it belongs
  struct conn *next;     // of all connections
} conn;

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
void engine_wake(void);
int comm_any_live(const np_comm *comm);
conn *conn_new(int fd, int local, conn_state state, uint64_t now);
void conn_add(conn *c, const void *bytes, uint32_t size); // to the head of what is to be sent
void conn_try_later(np_comm *comm, int path, uint64_t began);
void conn_greet(conn *c, uint64_t now);                     // it is connected, or could not be
void conn_refuse(conn *c, refusal why, uint64_t now);
void bind_to_interface(int fd, const local_path *path);     // where that is permitted
void heard_greeting(conn *c, const frame *in, const hello_body *body, uint64_t now); // before it is live
uint32_t greeting_sum(const uint8_t *bytes, uint32_t size);
void conn_connect(np_comm *comm, int path, uint64_t now); // begin an attempt
void conn_refresh(int local);                             // faults that are injected have changed
void conn_accept(int path, uint64_t now);
void conn_listen(int local, int on);
void conn_event(conn *c, unsigned events, uint64_t now);
void conn_pump(conn *c, uint64_t now);
void conn_lose(conn *c, const char *reason, uint64_t now);
void conn_end(conn *c); // in peace
void conn_want(conn *c);
void comm_pump(np_comm *comm, uint64_t now);
void comm_changed(np_comm *comm);
np_comm *comm_find(uint64_t id, int sends);
np_comm *comm_new(int sends, uint64_t id, const uint8_t *token, const flow_limits *limits, int checked);
void path_lost(int path, const char *reason, uint64_t now); // all connections of a local path
void path_back(int path, uint64_t now);

// ---------------------------------------------------------------- the other parts

int kernel_open(void);           // linkmon.c: -1 if the kernel tells nothing
void kernel_read(uint64_t now);

void neighbours_keep(uint64_t now); // neighbours.c
int neighbours_in_vain(int local, const address *remote); // there is no carrier: nothing should be sent there now
void neighbours_mute(int fd);                             // what is sent over it goes nowhere
void neighbours_end(void);

uint32_t checksum(const uint8_t *data, size_t size); // crc32c.c

typedef enum { INJECT_DROP, INJECT_DOWN, INJECT_RESET, INJECT_CORRUPT } injected;
int inject_set(const char *faults, uint64_t now);
int inject_now(int path, injected what, uint64_t now);
void inject_tick(uint64_t now);
int inject_any(void);

void report_start(void);
void report_end(void);
void report_up(np_comm *comm, int path, uint64_t now);
void report_down(np_comm *comm, int path, const char *reason, uint32_t under_way, uint64_t now);
void report_unreachable(np_comm *comm, uint64_t now);
void report_back(np_comm *comm, uint64_t now);
void report_corrupt(np_comm *comm, int path);
void report_gave_up(np_comm *comm);
void report_page(uint64_t now);
void report_drop(np_comm *comm); // it ends

#endif
