// Two sides: the sender's and the receiver's flow of a story, and what goes between them.

#ifndef NP_TWO_SIDES_H
#define NP_TWO_SIDES_H

#include "../core/proto.h"
#include "../core/silence.h"

enum { MS = 1000, CHUNK = 16, PINGS = 50 * MS, SUSPECT = 100 * MS, DEAD = 250 * MS, TICK = 10 * MS };
enum { ENDLESS = 10000 }; // so many frames are never needed

extern flow s, r; // the sender's side, and the receiver's
extern uint8_t sent[64 * CHUNK], got[64 * CHUNK];
extern int failures;

void expect(int holds, const char *what);

#define EXPECT(what) expect((what) != 0, #what)

void begin(const char *name, int paths, flow_limits limits);
flow_limits usual(void);
void up(int path, uint16_t epoch, uint64_t now);
void hear(flow *to, int path, const flow_frame *what, uint64_t now);
void talk(int path, uint64_t now);                        // all that both have to say over a path, to and fro
int talk_to_nobody(flow *f, int path, uint64_t now);      // what is said over a path that leads nowhere: chunks
int says(flow *f, int path, frame_type type, uint64_t now, flow_frame *said);

// Both tick until a time, over paths of which some work. Returns what the sender's ticks called for.
flow_verdict wait_until(uint64_t *now, uint64_t until, int working);

void stories_of_sending(void); // sending_stories.c
void stories_of_hearing(void); // hearing_stories.c

#endif
