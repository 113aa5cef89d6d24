// Two sides: the sender's and the receiver's flow of a story, and what goes between them (see two_sides.h).

#include "two_sides.h"

#include <stdio.h>
#include <string.h>

flow s, r;
uint8_t sent[64 * CHUNK], got[64 * CHUNK];
int failures;
static const char *story;

void expect(int holds, const char *what) {
  if (holds) return;
  printf("%s: not so: %s\n", story, what);
  failures++;
}

void begin(const char *name, int paths, flow_limits limits) {
  story = name;
  flow_init(&s, 1, paths, 0, &limits);
  flow_init(&r, 0, paths, 0, &limits);
  for (unsigned i = 0; i < sizeof sent; i++) sent[i] = (uint8_t)(i * 7 + 1);
  memset(got, 0, sizeof got);
}

flow_limits usual(void) { return (flow_limits){CHUNK, 4 * CHUNK, PINGS, SUSPECT, DEAD, 0}; }

void up(int path, uint16_t epoch, uint64_t now) {
  flow_up(&s, path, epoch, now);
  flow_up(&r, path, epoch, now);
}

void hear(flow *to, int path, const flow_frame *what, uint64_t now) {
  int lost;
  if (what->header.type != DATA) {
    EXPECT(flow_heard(to, path, &what->header, now, &lost));
    if (lost >= 0) flow_down(to, lost, now);
    return;
  }
  EXPECT(flow_accepts(to, &what->header));
  uint8_t *target = flow_target(to, &what->header);
  if (target) memcpy(target, what->data, what->header.length);
  flow_arrived(to, path, &what->header, now);
}

void talk(int path, uint64_t now) {
  flow_frame next;
  int said = 0;
  for (int before = -1; before < said && said < ENDLESS;) {
    before = said;
    for (; flow_next(&s, path, now, &next) && said < ENDLESS; said++) hear(&r, path, &next, now);
    for (; flow_next(&r, path, now, &next) && said < ENDLESS; said++) hear(&s, path, &next, now);
  }
  EXPECT(said < ENDLESS);
}

int talk_to_nobody(flow *f, int path, uint64_t now) {
  flow_frame next;
  int chunks = 0;
  for (int i = 0; i < ENDLESS && flow_next(f, path, now, &next); i++) chunks += next.header.type == DATA;
  return chunks;
}

int says(flow *f, int path, frame_type type, uint64_t now, flow_frame *said) {
  for (int i = 0; i < ENDLESS && flow_next(f, path, now, said); i++)
    if (said->header.type == type) return 1;
  return 0;
}

flow_verdict wait_until(uint64_t *now, uint64_t until, int working) {
  flow_verdict all = {0};
  for (; *now < until; *now += TICK) {
    flow_verdict verdict = flow_tick(&s, *now);
    flow_tick(&r, *now);
    all.lost |= verdict.lost;
    all.probe |= verdict.probe;
    all.failed |= verdict.failed;
    for (int i = 0; i < s.paths; i++) {
      if (working & 1 << i) {
        flow_alive(&s, i, *now);
        flow_alive(&r, i, *now);
        talk(i, *now);
      } else {
        talk_to_nobody(&s, i, *now);
        talk_to_nobody(&r, i, *now);
      }
    }
  }
  return all;
}
