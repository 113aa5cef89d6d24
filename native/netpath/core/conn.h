// Conn: one TCP connection of one path of a comm.

#ifndef NP_CONN_H
#define NP_CONN_H

#include "comm.h"

typedef enum { CONN_CONNECTING, CONN_GREETING, CONN_ACCEPTED, CONN_LIVE, CONN_DEAD } conn_state;

enum { HEAD_FRAMES = 16, AHEAD = 4096, LARGEST_CHUNK = 16 << 20 };

struct conn {
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
};

extern uint8_t conn_nothing[LARGEST_CHUNK]; // sent and received instead of memory that is not ours any more

conn *conn_new(int fd, int local, conn_state state, uint64_t now);
void conn_want(conn *c);
void conn_lose(conn *c, const char *reason, uint64_t now);
void conn_end(conn *c);            // in peace
void conn_end_all(np_comm *comm); // its connections, none of which knows it any more
void conn_try_later(np_comm *comm, int path, uint64_t began);
uint32_t conn_magic(const conn *c, const frame *of);     // of a live connection's frame
void conn_add(conn *c, const void *bytes, uint32_t size); // to the head of what is to be sent
void conn_pump(conn *c, uint64_t now);
void comm_pump(np_comm *comm, uint64_t now);

#endif
