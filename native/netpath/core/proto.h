// Proto: one side of a comm as a state machine. No socket, thread, clock or memory of its own: times are given in
// microseconds, buffers are pointers that it hands on and never follows.
//
//   sender     flow_post    a message is to be sent
//              flow_next    what to send next on a path: control frames first, then what a lost path left behind, then
//                           new chunks, the oldest message first; of each path at most a window is not acknowledged,
//                           which is what the path delivers in a few milliseconds, so that no message waits for long
//                           for a path that is slower than others
//   receiver   flow_post    there is room for one more message
//              flow_target  where the bytes of a chunk go now; nowhere if they are not wanted any more
//              flow_arrived a chunk is there
//   both       flow_heard   a control frame has come
//              flow_up, flow_down   a path's connection is there, or lost
//              flow_tick    time passes: silence makes a path suspect, then lost (silence.h)
//
// Exactly once: a receiver counts each chunk of a message once, whichever way it comes, and takes bytes only for a receive
// that is posted and not done. A sender's message is done when all of its chunks are acknowledged, as then nobody will
// ask for its memory again. ACK counts the chunks that have come over one connection; which these were, the sender knows
// from their order. A new connection is a new epoch, and words about an older one change nothing.
//
// A path that was lost and is connected again has proven little: small packets may pass where large ones are lost. It
// gets one chunk, which another path sends as well, and nothing more until that is acknowledged.
//
// All paths silent at once are not as many lost paths: the peer is stopped, or far away. Their connections are kept, and
// the engine tries new ones beside them. Only the sender can connect; a receiver to which all are silent says so over
// each of them, as the way to the sender may be free: DOWN over the path that it is about.

#ifndef NP_PROTO_H
#define NP_PROTO_H

#include "../netpath.h"
#include "wire.h"

enum {
  FIFO = 64,        // chunks of a path that are not acknowledged, at most
  MAX_CHUNKS = 4096 // of a message
};

typedef struct {
  uint32_t chunk;       // bytes; a message has MAX_CHUNKS of these at most
  uint32_t window;      // bytes of a path that are not acknowledged, at most; one chunk may always go
  uint64_t ping_us;     // a path over which nothing was sent for so long gets a PING
  uint64_t suspect_us;  // silence after which chunks under way go another way, too
  uint64_t dead_us;     // silence after which the path is lost
  uint64_t giveup_us;   // no path for so long: requests fail; 0: never
} flow_limits;

typedef struct {
  uint64_t seq;
  uint32_t offset, length;
  uint64_t given_us; // when
  uint32_t ahead;    // bytes that were not acknowledged then, with its own
} flow_chunk;

typedef enum { SLOT_FREE, SLOT_OPEN, SLOT_DONE, SLOT_FAILED } slot_state;

typedef struct np_request {
  uint64_t seq;
  uint8_t *data;
  uint32_t size;  // of the message; of a receive the room there is, until the first chunk has come
  uint32_t next;  // sender: no chunk before this one is to be given to a path
  uint32_t first_time; // sender: no chunk from this one on was ever given to a path
  uint32_t left;  // chunks that are not acknowledged, or have not come
  uint8_t begun;  // receiver: `size` is the message's
  _Atomic uint8_t state;
  uint64_t have[MAX_CHUNKS / 64];  // which chunks are acknowledged, or have come
  uint64_t given[MAX_CHUNKS / 64]; // sender: which are on their way over a path that is believed in
  void *owner;    // the comm, for whoever has only the request
} flow_slot;

typedef struct {
  uint8_t live, suspect, silent;
  uint8_t slow;                  // sender: it takes too long, while others do not; no more until it has delivered all
  uint16_t epoch;
  uint64_t heard_us, sent_us;    // when something last came, and went
  uint64_t deaf_us;              // when the peer said that it hears nothing over it; 0: it has not
  // sender: chunks in the order in which they went out
  flow_chunk fifo[FIFO];
  uint32_t first, count;
  uint64_t acknowledged;         // of this epoch
  uint32_t unacknowledged;       // bytes
  uint32_t window;               // bytes that may be unacknowledged, see learn_window
  uint32_t least_us;             // that a chunk has taken on this connection; 0: none was acknowledged
  uint8_t trial;                 // it was lost, is back, and has delivered nothing yet: one chunk, which others send, too
  uint64_t hedged;               // so many chunks of this epoch were given to other paths, too, or are acknowledged
  // receiver
  uint64_t arrived;              // chunks of this epoch
  // frames that are due
  uint8_t ack_due, cts_due, ping_due, pong_due, bye_due;
  uint64_t pong_time;
  uint8_t downs_due;             // a bit for each path of whose loss the peer is to be told here
  uint16_t lost_epoch[NP_MAX_PATHS];
  uint32_t round_trip;           // us, of the last PONG
  uint64_t sent_bytes, received_bytes, sent_again, duplicates, downs, ups, corrupt;
} flow_path;

typedef struct {
  int sends, paths, checked;
  flow_limits limits;
  uint64_t posted;    // messages that the user has given us
  uint64_t allowed;   // sender: how many the receiver has room for
  uint64_t tail;      // the oldest that is not done
  flow_path path[NP_MAX_PATHS];
  flow_slot slot[NP_MAX_REQUESTS];
  uint64_t busy_us;   // since when we listen and silence means something
  uint64_t apart_us;  // since when some path is heard of; before that the silence of one says nothing about it
  uint64_t ticked_us;
  uint64_t woke_us;   // when we were stopped last, until then; 0: never
  uint64_t cut_us;    // since when no path has been heard of while somebody waits; 0: not so
  uint64_t peer_end;  // peer_closed: it has said so with this count
  uint8_t unreachable, closing, peer_closed, failed;
  uint8_t peer_knows; // that we have closed
  uint8_t watched;    // at the last tick
} flow;

typedef struct {
  frame header;
  const uint8_t *data; // DATA: `header.length` bytes at this place; valid while flow_wanted says so
} flow_frame;

typedef enum { LOST_SILENT = 1, LOST_TOLD, LOST_BROKEN } loss;

// What the engine is to do after a tick (silence.h): bits, by path.
typedef struct {
  uint8_t lost;  // close the connection: it was silent while others were not
  uint8_t probe; // silent like all others, or only to the peer: try a new connection beside it
  uint8_t failed; // gave up
} flow_verdict;

void flow_init(flow *f, int sends, int paths, int checked, const flow_limits *limits);

flow_slot *flow_post(flow *f, void *data, uint32_t size, uint64_t now); // NULL: no slot is free, or it is too long
void flow_release(flow *f, flow_slot *slot);                            // its user has seen that it is done
void flow_fail(flow *f);                                                // all that is not done fails, now and later
void flow_close(flow *f);                                               // the user is gone: drop what is not done
int flow_finished(const flow *f);                                       // closing, and nobody waits for us any more
int flow_busy(const flow *f);                                           // somebody waits for a message

void flow_up(flow *f, int path, uint16_t epoch, uint64_t now);
void flow_down(flow *f, int path, uint64_t now);

int flow_next(flow *f, int path, uint64_t now, flow_frame *out);        // 0: there is nothing to send
int flow_wanted(const flow *f, const frame *header);                    // whether a DATA frame's memory is still ours

// Returns 0 if the frame breaks the rules. *lost: the path that the peer calls lost, or -1.
int flow_heard(flow *f, int path, const frame *header, uint64_t now, int *lost);
int flow_accepts(const flow *f, const frame *header);                   // whether a DATA frame keeps to the rules
uint8_t *flow_target(flow *f, const frame *header);
void flow_arrived(flow *f, int path, const frame *header, uint64_t now);
void flow_alive(flow *f, int path, uint64_t now);                       // bytes have come

void let_others_take(flow *f, flow_path *p); // for silence.c: what is under way on this path goes over others, too

#endif
