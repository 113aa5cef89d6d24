// Sending stories: what is sent over which path, how much at once, and what is sent again.

#include <string.h>

#include "two_sides.h"

static void acknowledge(uint64_t count, uint64_t now) {
  frame ack = {.magic = WIRE_MAGIC, .type = ACK, .epoch = s.path[0].epoch, .seq = count};
  int lost;
  EXPECT(flow_heard(&s, 0, &ack, now, &lost));
}

// What a path takes of a message at once goes out, and is acknowledged so much later; so often. Returns what the last took.
static int bursts(int times, uint32_t size, uint64_t took, uint64_t *now) {
  int chunks = 0;
  for (int i = 0; i < times; i++) {
    uint64_t before = s.path[0].acknowledged;
    flow_slot *slot = flow_post(&s, sent, size, *now);
    s.allowed = s.posted;
    chunks = talk_to_nobody(&s, 0, *now);
    *now += took;
    acknowledge(before + (uint64_t)chunks, *now);
    slot->state = SLOT_DONE; // the rest of it is not needed
    flow_release(&s, slot);
    s.tail = s.posted;
  }
  return chunks;
}

static void what_may_be_under_way_follows_the_rate(void) {
  flow_limits limits = usual();
  limits.window = 32 * CHUNK;
  begin("what may be under way follows the rate of the path", 1, limits);
  uint64_t now = MS;
  flow_up(&s, 0, 1, now);
  EXPECT(bursts(1, sizeof sent, 2 * MS, &now) == 8);   // a quarter, as nothing is known of it
  EXPECT(bursts(20, sizeof sent, 2 * MS, &now) == 32); // all is there within the span
  EXPECT(bursts(20, CHUNK, 50 * MS, &now) == 1);
  EXPECT(bursts(1, sizeof sent, 2 * MS, &now) == 32); // what went out alone tells nothing of the rate
  EXPECT(bursts(20, sizeof sent, 100 * MS, &now) == 1);
  EXPECT(bursts(100, sizeof sent, 2 * MS, &now) == 32);
  flow_up(&s, 0, 2, now);
  bursts(1, sizeof sent, 100 * MS, &now);
  EXPECT(bursts(50, sizeof sent, 100 * MS, &now) == 32); // a long way, not a slow one
  EXPECT(s.path[0].window <= limits.window);
}

static void a_path_that_is_back_has_to_prove_itself(void) {
  begin("a path that was lost gets one chunk, which others send, too, until that has come", 2, usual());
  up(0, 1, 0);
  up(1, 1, 0);
  flow_down(&s, 0, 0);
  flow_down(&r, 0, 0);
  s.path[0].suspect = s.path[0].silent = s.path[0].slow = 1; // so it was
  up(0, 2, 0);
  EXPECT(!s.path[0].silent);
  flow_post(&r, got, 4 * CHUNK, 0);
  flow_post(&r, got, 4 * CHUNK, 0);
  talk(1, 0);
  flow_slot *slot = flow_post(&s, sent, 4 * CHUNK, 0);
  EXPECT(talk_to_nobody(&s, 0, 0) == 1);
  talk(1, 0);
  EXPECT(slot->state == SLOT_DONE && !memcmp(sent, got, 4 * CHUNK));
  flow_post(&s, sent, 4 * CHUNK, 0);
  EXPECT(talk_to_nobody(&s, 0, 0) == 0);
  acknowledge(1, MS);
  EXPECT(talk_to_nobody(&s, 0, 0) == 4);
}

// ---------------------------------------------------------------- silence

static void others_send_a_suspects_chunks_once(void) {
  begin("what a suspect path carries goes over another one once, and not with each tick", 2, usual());
  uint64_t now = 0;
  up(0, 1, now);
  up(1, 1, now);
  for (int i = 0; i < 2; i++) {
    flow_post(&r, got, CHUNK, now);
    talk(1, now);
    flow_post(&s, sent, CHUNK, now);
    if (!i) talk(0, now); // one is acknowledged
  }
  EXPECT(talk_to_nobody(&s, 0, now) == 1 && s.path[0].acknowledged == 1);
  int chunks = 0;
  for (; now < 2 * SUSPECT; now += TICK) {
    flow_alive(&s, 1, now);
    flow_tick(&s, now);
    chunks += talk_to_nobody(&s, 1, now);
  }
  EXPECT(s.path[0].suspect && chunks == 1);
}

static void nothing_else_is_sent_again(void) {
  begin("what a suspect path carries is sent again, but for what has come since; what others carry is not", 2, usual());
  uint64_t now = SUSPECT;
  flow_frame said;
  up(0, 1, 0);
  up(1, 1, 0);
  flow_post(&r, got, 3 * CHUNK, 0);
  talk(1, 0);
  flow_tick(&s, 0);
  flow_post(&s, sent, 3 * CHUNK, 0);
  EXPECT(says(&s, 0, DATA, 0, &said) && says(&s, 1, DATA, 0, &said) && said.header.offset == CHUNK);
  EXPECT(says(&s, 0, DATA, 0, &said) && said.header.offset == 2 * CHUNK);
  for (uint64_t at = 0; at <= now; at += TICK) {
    flow_alive(&s, 1, at);
    flow_tick(&s, at);
  }
  EXPECT(s.path[0].suspect);
  acknowledge(1, now);
  EXPECT(says(&s, 1, DATA, now, &said) && said.header.offset == 2 * CHUNK);
  EXPECT(!says(&s, 1, DATA, now, &said));
}

void stories_of_sending(void) {
  what_may_be_under_way_follows_the_rate();
  a_path_that_is_back_has_to_prove_itself();
  others_send_a_suspects_chunks_once();
  nothing_else_is_sent_again();
}
