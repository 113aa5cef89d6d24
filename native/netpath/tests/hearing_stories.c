// Hearing stories: what each frame does to whoever hears it, and what silence does that is over.

#include "two_sides.h"

static int lost; // what flow_heard says of it is not looked at here

static void messages_go_side_by_side(void) {
  begin("a message that is all under way does not hold up the next", 1, usual());
  up(0, 1, 0);
  for (int i = 0; i < 2; i++) flow_post(&r, got, CHUNK, 0);
  talk(0, 0);
  for (int i = 0; i < 2; i++) flow_post(&s, sent, CHUNK, 0);
  EXPECT(talk_to_nobody(&s, 0, 0) == 2);
}

static void a_path_that_is_heard_again_is_as_before(void) {
  begin("a path that is heard again is neither silent nor suspect", 2, usual());
  uint64_t now = 0;
  up(0, 1, now);
  up(1, 1, now);
  flow_post(&s, sent, CHUNK, now);
  for (; now < 2 * SUSPECT; now += TICK) {
    flow_alive(&s, 1, now);
    flow_tick(&s, now);
  }
  EXPECT(s.path[0].suspect);
  flow_alive(&s, 0, now);
  EXPECT(!s.path[0].suspect);
  wait_until(&now, now + 2 * DEAD, 0);
  EXPECT(s.path[0].silent && s.path[1].silent);
  flow_alive(&s, 0, now);
  EXPECT(!s.path[0].silent && s.path[1].silent);
}

static void a_complaint_that_is_out_of_date_is_not_made(void) {
  begin("who hears the path again before it could complain does not", 1, usual());
  flow_frame said;
  uint64_t now = 0;
  up(0, 1, now);
  flow_post(&r, got, CHUNK, now);
  for (; now < 2 * DEAD; now += TICK) flow_tick(&r, now);
  EXPECT(r.path[0].silent);
  flow_alive(&r, 0, now);
  EXPECT(!says(&r, 0, DOWN, now, &said));
}

static void a_complaint_is_looked_into_at_once(void) {
  begin("who is told that it is not heard asks at once", 1, usual());
  flow_frame said;
  up(0, 1, 0);
  frame deaf = {.magic = WIRE_MAGIC, .type = DOWN, .epoch = 1};
  EXPECT(flow_heard(&s, 0, &deaf, MS, &lost) && says(&s, 0, PING, MS, &said));
}

static void a_ping_brings_what_may_have_been_lost(void) {
  begin("a PING brings the count of posts, too", 1, usual());
  flow_frame said;
  up(0, 1, 0);
  flow_post(&r, got, CHUNK, 0);
  talk_to_nobody(&r, 0, 0);
  frame ping = {.magic = WIRE_MAGIC, .type = PING, .epoch = 1};
  EXPECT(flow_heard(&r, 0, &ping, MS, &lost) && says(&r, 0, CTS, MS, &said) && said.header.seq == 1);
}

static void an_ack_of_an_older_connection_counts_nothing(void) {
  begin("an ACK of an older connection counts nothing", 1, usual());
  up(0, 1, 0);
  flow_post(&r, got, CHUNK, 0);
  talk(0, 0);
  flow_slot *slot = flow_post(&s, sent, CHUNK, 0);
  up(0, 2, 0);
  EXPECT(talk_to_nobody(&s, 0, 0) == 1);
  frame ack = {.magic = WIRE_MAGIC, .type = ACK, .epoch = 1, .seq = 1};
  EXPECT(flow_heard(&s, 0, &ack, 0, &lost) && slot->state == SLOT_OPEN);
  ack.epoch = 2;
  EXPECT(flow_heard(&s, 0, &ack, 0, &lost) && slot->state == SLOT_DONE);
}

static void a_slow_path_delivers_all_before_it_gets_more(void) {
  begin("a slow path gets no more before it has delivered all that it has", 1, usual());
  up(0, 1, 0);
  flow_post(&r, got, 2 * CHUNK, 0);
  talk(0, 0);
  flow_post(&s, sent, 2 * CHUNK, 0);
  EXPECT(talk_to_nobody(&s, 0, 0) == 2);
  s.path[0].slow = 1; // see gets_nowhere
  frame ack = {.magic = WIRE_MAGIC, .type = ACK, .epoch = 1, .seq = 1};
  EXPECT(flow_heard(&s, 0, &ack, 0, &lost) && s.path[0].slow);
  ack.seq = 2;
  EXPECT(flow_heard(&s, 0, &ack, 0, &lost) && !s.path[0].slow);
}

static void where_all_are_slow_none_is(void) {
  begin("where chunks get through over no path none of them is slow", 2, usual());
  uint64_t now = 0;
  up(0, 1, now);
  up(1, 1, now);
  flow_post(&r, got, 2 * CHUNK, now);
  talk(0, now);
  flow_post(&s, sent, 2 * CHUNK, now);
  flow_frame said;
  EXPECT(says(&s, 0, DATA, now, &said) && says(&s, 1, DATA, now, &said));
  for (; now < 2 * DEAD; now += TICK)
    for (int i = 0; i < 2; i++) {
      flow_alive(&s, i, now);
      flow_tick(&s, now);
    }
  EXPECT(!s.path[0].slow && !s.path[1].slow);
  flow_close(&s);
  flow_down(&s, 0, now);
  flow_down(&s, 1, now);
  up(0, 2, now);
  EXPECT(flow_watches(&s)); // closing, it waits for an answer
}

static void giving_up_counts_from_when_the_peer_was_heard(void) {
  flow_limits limits = usual();
  limits.giveup_us = 1000 * MS;
  begin("giving up counts from when the peer was last heard", 1, limits);
  uint64_t now = 0;
  up(0, 1, now);
  flow_post(&s, sent, CHUNK, now); // for which there is no room
  EXPECT(!wait_until(&now, 1000 * MS, 0).failed && s.unreachable);
  flow_alive(&s, 0, now);
  EXPECT(!wait_until(&now, 2000 * MS, 0).failed);
  EXPECT(wait_until(&now, 2500 * MS, 0).failed);
}

static void what_breaks_the_rules_is_refused(void) {
  begin("frames that nobody may send are refused", 1, usual());
  up(0, 1, 0);
  frame chunk = {.magic = WIRE_MAGIC, .type = DATA, .epoch = 1, .length = CHUNK, .total = CHUNK};
  EXPECT(!flow_accepts(&r, &chunk)); // nobody has asked for it
  flow_post(&r, got, CHUNK, 0);
  flow_post(&s, sent, CHUNK, 0);
  EXPECT(flow_accepts(&r, &chunk) && !flow_accepts(&s, &chunk));
  chunk.seq = 1;
  EXPECT(!flow_accepts(&r, &chunk));
  frame empty = {.magic = WIRE_MAGIC, .type = DATA, .epoch = 1, .offset = CHUNK, .total = CHUNK};
  EXPECT(!flow_accepts(&r, &empty)); // after the end, and of no length
  frame ack = {.magic = WIRE_MAGIC, .type = ACK, .epoch = 1};
  EXPECT(flow_heard(&s, 0, &ack, 0, &lost) && !flow_heard(&r, 0, &ack, 0, &lost));
}

void stories_of_hearing(void) {
  what_breaks_the_rules_is_refused();
  messages_go_side_by_side();
  a_path_that_is_heard_again_is_as_before();
  a_complaint_that_is_out_of_date_is_not_made();
  a_complaint_is_looked_into_at_once();
  a_ping_brings_what_may_have_been_lost();
  an_ack_of_an_older_connection_counts_nothing();
  a_slow_path_delivers_all_before_it_gets_more();
  where_all_are_slow_none_is();
  giving_up_counts_from_when_the_peer_was_heard();
}
