// World: two flows and the network between them, simulated in one process, from a seed. No socket, no thread, no clock.
//
//   world.c        chance, events, faults, the loop
//   world_ways.c   the network: connections are ordered pipes of bytes
//   world_bytes.c  what is written to connections, and read from them
//   world_ends.c   two ends that do what the engine does: connect, tick, lose connections, close
//   judge.c        what must be true after every event
//   proto_world.c  what happens in a world: its plan, its users, its faults
//
// The ends follow the engine's rules, and each rule can be left out, to see what it is good for.

#ifndef NP_WORLD_H
#define NP_WORLD_H

#include "../core/proto.h"
#include "../core/silence.h"

enum { SENDER, RECEIVER };
enum { LINKS = 400, PIPE = 4096, PIECES = 1024, MESSAGES = 256, EVENTS = 8192, FAULTS = 16, HEAD = 64 };
enum { SLOW_NS = 2000000 }; // for a byte: a path is slow from then on

// What the engine has to keep to, beside calling the protocol.
typedef enum {
  RULE_BREAK_UNWANTED = 1, // a connection in the midst of a chunk that was dropped, not delivered, is lost
  RULE_MEMORY_SUM = 2,     // a checksum is taken of the memory when the chunk is whole, not of the bytes as they come
  RULE_BYE_AGAIN = 4,      // who has closed and could not say so goes on connecting, for a while
  RULE_NEW_EPOCH = 8,      // each attempt to connect has an epoch of its own
  RULE_NO_OLDER = 16,      // a HELLO with an epoch before that of the path's connection is refused
  RULE_ALIVE = 32,         // a HELLO is refused while the path's connection was heard of lately
  RULE_REFUSED = 64, // who is refused twice, as the peer hears the old connection, and hears nothing over it, ends it
  RULE_SUM_ALL = 128, // a checksum is of frames, too, not of data alone
  RULE_WOKEN = 256, // nor is it taken for another's silence that one was stopped oneself: until it had time to hear
  ALL_RULES = 511,
} rule;

typedef struct {
  uint32_t size;
  uint64_t ready;
} piece;

typedef struct { // one direction of a connection
  uint8_t bytes[PIPE];
  uint32_t from, count, room;
  piece piece[PIECES];
  uint32_t first, pieces;
  uint64_t left;   // bytes that still get through
  uint64_t slow_us; // nothing gets through before
  int planned, stalled, ends; // see way_end
} way;

// The writer has closed: gently, after what it has written; with a reset, which drops what is under way; or with a reset
// behind what is under way, which is still read, though nobody is there any more.
typedef enum { WAY_OPEN, WAY_CLOSED, WAY_RESET, WAY_RESET_BEHIND } way_end;

typedef enum { SIDE_NONE, SIDE_CONNECTING, SIDE_GREETING, SIDE_ACCEPTED, SIDE_LIVE, SIDE_CLOSED } side_state;

typedef struct { // what an end knows of a connection
  side_state state;
  uint64_t since_us;
  int last;
  _Alignas(frame) uint8_t head[HEAD];
  uint32_t head_size, out_size, out_done;
  frame out;
  const uint8_t *data;
  _Alignas(frame) uint8_t in[HEAD];
  uint32_t in_have, in_done, in_sum;
  frame in_frame;
  int in_data, in_clean;
} side;

typedef struct {
  int used, path, cut;
  unsigned life;
  uint16_t epoch;
  side side[2];
  way way[2]; // [SENDER]: what the sender writes
} link;

typedef struct {
  flow flow;
  int live[NP_MAX_PATHS], probe[NP_MAX_PATHS]; // numbers of links, -1: none
  uint16_t epoch[NP_MAX_PATHS];
  uint64_t retry_us[NP_MAX_PATHS], read_us[NP_MAX_PATHS];
  uint32_t pause_ms[NP_MAX_PATHS], refusals[NP_MAX_PATHS];
  uint64_t stopped_since, stopped_until, linger_us, ticked_us, heard_us, closed_us, up_us;
  unsigned tick; // number of the tick that is planned
  int closed, gone, aborted;
  uint64_t silent_losses, probes;
} terminal;

typedef enum { NOT_POSTED, OPEN, DONE, FAILED, DROPPED } fate;

typedef struct {
  uint32_t size, room;
  uint8_t *sent, *got;
  flow_slot *send, *receive;
  fate send_fate, receive_fate; // as their users know
  uint64_t sent_at, room_at;
  int sent_seen, got_seen; // the judge has looked at it when it was over
} message;

typedef enum { BLACKHOLE, BREAK, STOP, CORRUPT, SLOW } fault_kind;

typedef struct {
  uint64_t at_us, for_us;
  fault_kind kind;
  int path, which; // which: of the ways, or of the ends; 2: both
} fault;

typedef struct {
  const char *name;
  int paths, messages, checked, depth[2], rules;
  flow_limits limits;
  uint32_t size_most, delay_us[NP_MAX_PATHS], byte_ns[NP_MAX_PATHS];
  uint64_t gap_us[2]; // between bursts of an end's user
  int burst;
  fault fault[FAULTS];
  int faults, immune, no_loss, extra; // no_loss: no connection may be lost; extra: receives for which no message comes
  int closer;                // who closes, or aborts, before all is done; -1: nobody
  int aborts;
  uint64_t closes_us;
  uint64_t until_us; // the world ends, whatever is left
} plan;

typedef enum { E_USER, E_TICK, E_CARRY, E_BREAK, E_ARRIVE, E_CONNECTED, E_FAULT, E_HEAL } event_kind;

typedef struct {
  uint64_t at, order;
  event_kind kind;
  int end, link, number;
  unsigned life;
} event;

typedef struct {
  plan plan;
  uint64_t now, random, order, last_fault_us, woken_us;
  int story, messages_over;
  event event[EVENTS];
  int events;
  terminal end[2];
  int blackhole[NP_MAX_PATHS][2], corrupting[NP_MAX_PATHS];
  message message[MESSAGES];
  int posted[2], burst_left[2];
  uint64_t next_post_us[2], closes_us[2];
  // the judge's: since when both ends and the network of a path are well (0: they are not); its network and connection
  // alone; for how long somebody waited while there was no good connection though the network is well
  uint64_t good_us[NP_MAX_PATHS], wire_us[NP_MAX_PATHS], lame_us[NP_MAX_PATHS], judged_us, oldest_us, bye_us;
  int oldest, was_busy;
  uint32_t oldest_left;
  uint64_t fillers, corrupted, longest_stall;
  link link[LINKS]; // last, as most are never used
} world;

extern world w;

void violate(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
void tell(const char *format, ...) __attribute__((format(printf, 1, 2)));
uint64_t draw(uint64_t below);
int chance(int percent);
void plan_event(uint64_t at, event_kind kind, int end, int number, int link);
uint8_t byte_of(uint64_t seq, uint32_t offset);
const char *name_of(int end);
int stopped(int end);
uint64_t delay_of(int path);

// world.c
void world_begin(const plan *given, uint64_t seed, int story);
void world_run(void);
void world_end(void);

// world_ways.c
int link_new(int path);
int open_side(const link *c, int end);
void plan_carry(int of, int k, uint64_t at);
void way_write(int of, int k, const uint8_t *bytes, uint32_t size);
void side_close(int end, int of, int gently);
void carry(int of, int k);
void cut_links(int path);

// world_bytes.c
void send_frame(side *s, const link *c, frame_type type, uint32_t reason);
void write_link(int end, int of);
void pump(int end);
void read_bytes(int end, int of, const uint8_t *bytes, uint32_t size);

// world_ends.c
void lose(int end, int of, const char *why);
void arrive(int of);
void greet(int of);
void heard_early(int end, int of, const frame *in);
void tick(int end);
void wake_ticks(int end);
void end_close(int end);
void end_abort(int end);

// proto_world.c: users
void user_acts(int end);

// judge.c
void judge_begin(void);
void judge(void);
void judge_write(uint64_t seq, const uint8_t *target, uint32_t size);
void judge_read(uint64_t seq, const uint8_t *data, uint32_t size);
void judge_loss(int end, int path);
void judge_replaced(int of);
void judge_give_up(int end);
void judge_finish(int end);

#endif
