// Small: a world of two messages of two chunks over two paths, small enough to see each of its states. No time.
//
//   small_states.c      a state: kept, gone back to, and told from those that were seen
//   small_moves.c       what may happen, and what must be true after it
//   proto_exhaustive.c  all of it

#ifndef NP_SMALL_H
#define NP_SMALL_H

#include <stddef.h>

#include "../core/proto.h"
#include "../core/silence.h"

enum { PATHS = 2, MESSAGES = 2, CHUNK = 2, ROOM = 4, QUEUE = 3, DEEPEST = 4000, SENDER = 0, RECEIVER = 1 };

enum { // of a flow, all but the slots that are not used
  BEFORE_SLOTS = offsetof(flow, slot) + MESSAGES * sizeof(flow_slot),
  SLOTS_END = offsetof(flow, slot) + NP_MAX_REQUESTS * sizeof(flow_slot),
  AFTER_SLOTS = sizeof(flow) - SLOTS_END,
};

typedef struct { // a frame that is on its way; of a chunk perhaps only the first half
  frame header;
  uint8_t data[CHUNK], halves, welcome;
} letter;

typedef struct {
  letter letter[2][QUEUE]; // [SENDER]: what the sender wrote
  uint8_t count[2], cut, greeting;
  uint8_t reading, clean; // the receiver has the first half of the first letter
  uint16_t epoch;
} connection;

typedef struct {
  uint8_t sent[MESSAGES][ROOM], got[MESSAGES][ROOM], faults, late;
  uint8_t posted[2], closed[2], aborted[2], gone[2];
  uint8_t fate[2][MESSAGES]; // 1: open, 2: done, 3: failed
  connection connection[PATHS];
  uint8_t flow[2][BEFORE_SLOTS + AFTER_SLOTS];
} state;

extern flow flows[2];
extern state now; // but for its flows, which are in `flows`
extern uint32_t size_of[MESSAGES];
extern uint64_t states; // that were seen

void wrong(const char *what) __attribute__((noreturn));

// small_states.c
void keep(state *into);
void back_to(const state *from);
uint64_t fingerprint(void);
int is_new(uint64_t hash);
void forget_all(void); // what was seen; its memory is given back

// small_moves.c
typedef struct {
  const char *name;
  int (*happens)(int); // 0: it cannot, now
  int which, fault;
} move;

extern const move MOVES[];
extern const unsigned MOVES_COUNT;

void all_write(int first);
void conclude(int end);
void check_flows(void);

#endif
