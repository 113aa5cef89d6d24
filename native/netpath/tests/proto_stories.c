// Proto stories: one fault of the protocol each, that a simulated world has shown. `proto_stories` tells all of them.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "two_sides.h"

// ---------------------------------------------------------------- requests

static void posts_after_the_peer_has_closed_fail_at_once(void) {
  begin("posts after the peer has closed fail at once", 1, usual());
  up(0, 1, 0);
  flow_slot *first = flow_post(&r, got, CHUNK, 0);
  talk(0, 0);
  flow_close(&s);
  talk(0, 0);
  EXPECT(first->state == SLOT_FAILED);
  flow_slot *late = flow_post(&r, got, CHUNK, 0);
  EXPECT(late->state == SLOT_FAILED);
  EXPECT(!flow_busy(&r));

  begin("sends for which a closed receiver never asked fail at once", 1, usual());
  up(0, 1, 0);
  flow_post(&r, got, CHUNK, 0);
  flow_close(&r);
  talk(0, 0);
  flow_slot *wanted = flow_post(&s, sent, CHUNK, 0), *unwanted = flow_post(&s, sent, CHUNK, 0);
  EXPECT(wanted->state == SLOT_OPEN);
  EXPECT(unwanted->state == SLOT_FAILED);
  talk(0, 0);
  EXPECT(wanted->state == SLOT_DONE);
}

static void requests_have_their_bounds(void) {
  begin("a message of more chunks than there is room for is refused, and so are posts after a failure", 1, usual());
  EXPECT(!flow_post(&s, sent, CHUNK * MAX_CHUNKS + 1, 0) && flow_post(&s, sent, CHUNK * MAX_CHUNKS, 0));
  flow_fail(&s);
  EXPECT(flow_post(&s, sent, CHUNK, 0)->state == SLOT_FAILED);
}

// ---------------------------------------------------------------- connections

static void a_new_connection_hands_on_what_the_old_one_carried(void) {
  begin("a new connection hands on what the old one carried", 1, usual());
  up(0, 1, 0);
  flow_post(&r, got, CHUNK, 0);
  talk(0, 0);
  flow_slot *slot = flow_post(&s, sent, CHUNK, 0);
  EXPECT(talk_to_nobody(&s, 0, 0) == 1 && s.path[0].sent_again == 0);
  up(0, 2, 0);
  talk(0, 0);
  EXPECT(slot->state == SLOT_DONE && !memcmp(sent, got, CHUNK));
  EXPECT(s.path[0].sent_again == 1 && s.path[0].sent_bytes == 2 * CHUNK);
}

static void a_new_connection_begins_anew(void) {
  begin("a new connection tells what may have been lost, and owes nothing for the old one", 1, usual());
  flow_frame said;
  up(0, 1, 0);
  flow_post(&r, got, CHUNK, 0);
  talk_to_nobody(&r, 0, 0);
  up(0, 2, 0);
  EXPECT(says(&r, 0, CTS, 0, &said) && said.header.seq == 1);
  hear(&s, 0, &said, 0);
  flow_post(&s, sent, CHUNK, 0);
  EXPECT(says(&s, 0, DATA, 0, &said));
  hear(&r, 0, &said, 0);
  up(0, 3, 0);
  EXPECT(!says(&r, 0, ACK, 0, &said));
}

static void giving_up_counts_from_the_last_connection(void) {
  flow_limits limits = usual();
  limits.giveup_us = 1000 * MS;
  begin("giving up counts from the last connection", 1, limits);
  uint64_t now = 0;
  flow_post(&s, sent, CHUNK, now);
  EXPECT(!wait_until(&now, 900 * MS, 0).failed); // not connected yet
  flow_up(&s, 0, 1, now);
  EXPECT(!s.unreachable);
  now += TICK;
  flow_tick(&s, now);
  flow_down(&s, 0, now);
  EXPECT(!wait_until(&now, 1500 * MS, 0).failed);
  EXPECT(wait_until(&now, 2500 * MS, 0).failed);
}

static void chunks_of_an_older_connection_are_not_counted(void) {
  begin("chunks of an older connection are not counted", 1, usual());
  up(0, 1, 0);
  flow_post(&r, got, CHUNK, 0);
  talk(0, 0);
  flow_post(&s, sent, CHUNK, 0);
  flow_frame chunk;
  EXPECT(says(&s, 0, DATA, 0, &chunk));
  up(0, 2, 0);
  EXPECT(!flow_accepts(&r, &chunk.header));
  flow_arrived(&r, 0, &chunk.header, 0); // it had begun before
  EXPECT(r.path[0].arrived == 0 && flow_busy(&r));
}

static void a_blocked_path_is_found_out_in_short_bursts(void) {
  begin("a blocked path is found out, though nobody ever waits for long", 2, usual());
  up(0, 1, 0);
  up(1, 1, 0);
  uint64_t now = 0;
  int lost = 0;
  for (int burst = 0; burst < 10 && !lost; burst++) {
    flow_slot *receive = flow_post(&r, got, CHUNK, now);
    talk(1, now);
    talk_to_nobody(&r, 0, now);
    flow_slot *send = flow_post(&s, sent, CHUNK, now);
    talk_to_nobody(&s, 0, now); // the blocked path comes first
    for (int tick = 0; send->state == SLOT_OPEN && tick < ENDLESS; tick++) {
      talk(1, now);
      lost |= wait_until(&now, now + TICK, 2).lost;
    }
    EXPECT(send->state == SLOT_DONE);
    flow_release(&s, send);
    flow_release(&r, receive);
    lost |= wait_until(&now, now + 130 * MS, 2).lost; // it computes
  }
  EXPECT(lost == 1);
}

static void a_blocked_path_that_nothing_needs_is_found_out(void) {
  begin("a blocked path is found out, though all goes over the other one, for a moment each time", 2, usual());
  up(0, 1, 0);
  up(1, 1, 0);
  uint64_t now = 0;
  int lost = 0;
  for (int burst = 0; burst < 60 && !lost; burst++) {
    flow_slot *receive = flow_post(&r, got, CHUNK, now);
    flow_slot *send = flow_post(&s, sent, CHUNK, now);
    talk(0, now);
    talk(0, now);
    EXPECT(send->state == SLOT_DONE);
    flow_release(&s, send);
    flow_release(&r, receive);
    lost |= wait_until(&now, now + 130 * MS, 1).lost; // it computes
  }
  EXPECT(lost == 2);
}

static void paths_that_nothing_needs_are_not_lost(void) {
  begin("two paths without traffic that both work, or of which neither does, are left alone", 2, usual());
  up(0, 1, 0);
  up(1, 1, 0);
  uint64_t now = 0;
  flow_verdict verdict = wait_until(&now, 20000 * MS, 3);
  EXPECT(!verdict.lost && !verdict.probe && !flow_watches(&s));
  verdict = wait_until(&now, now + 20000 * MS, 0); // the peer is stopped
  EXPECT(!verdict.lost && !verdict.probe && !flow_watches(&s));
}

static void a_suspect_path_is_found_out_though_nobody_waits(void) {
  begin("a path that is suspect is listened to until it is lost, though nobody waits any more", 2, usual());
  up(0, 1, 0);
  up(1, 1, 0);
  uint64_t now = 0;
  flow_slot *slot = flow_post(&s, sent, CHUNK, now);
  EXPECT(!wait_until(&now, 150 * MS, 2).lost);
  EXPECT(s.path[0].suspect && !s.path[0].count);
  flow_post(&r, got, CHUNK, now);
  talk(1, now);
  EXPECT(slot->state == SLOT_DONE && !flow_busy(&s));
  EXPECT(wait_until(&now, 300 * MS, 2).lost == 1);
}

static void a_peer_that_was_stopped_loses_no_path(void) {
  begin("a peer that was stopped speaks over one path first, and the others are not lost", 2, usual());
  up(0, 1, 0);
  up(1, 1, 0);
  uint64_t now = 0;
  flow_post(&s, sent, CHUNK, now);
  flow_verdict verdict = wait_until(&now, 3000 * MS, 0);
  EXPECT(!verdict.lost && verdict.probe == 3);
  flow_alive(&s, 1, now);
  verdict = flow_tick(&s, now);
  EXPECT(!verdict.lost);
  flow_alive(&s, 0, now + 5 * MS);
  EXPECT(!wait_until(&now, now + DEAD + 2 * TICK, 3).lost);
  EXPECT(wait_until(&now, now + 2 * DEAD, 2).lost == 1); // now it is alone
}

static void who_was_stopped_itself_calls_nothing_lost(void) {
  begin("who was stopped itself has heard nothing, and calls no path lost", 2, usual());
  up(0, 1, 0);
  up(1, 1, 0);
  uint64_t now = 0;
  flow_post(&s, sent, CHUNK, now);
  EXPECT(!wait_until(&now, 100 * MS, 3).lost);
  now += 3000 * MS;
  flow_alive(&s, 1, now);
  flow_verdict verdict = flow_tick(&s, now);
  EXPECT(!verdict.lost && !verdict.probe);
  frame deaf = {.magic = WIRE_MAGIC, .type = DOWN, .epoch = 1};
  int lost;
  EXPECT(flow_heard(&s, 0, &deaf, now, &lost) && s.path[0].deaf_us); // what the peer said meanwhile
  EXPECT(!flow_tick(&s, now + TICK).probe);
  EXPECT(flow_tick(&s, now + SUSPECT).probe == 1);
}

static void when_all_fall_silent_none_is_lost(void) {
  flow_limits limits = usual();
  limits.suspect_us = limits.dead_us;
  begin("when all fall silent one after the other, none is lost", 2, limits);
  up(0, 1, 0);
  up(1, 1, 0);
  uint64_t now = 0;
  flow_post(&s, sent, CHUNK, now);
  EXPECT(!wait_until(&now, 100 * MS, 3).lost);
  flow_alive(&s, 1, now + 30 * MS);
  EXPECT(!wait_until(&now, 2000 * MS, 0).lost);
  EXPECT(!s.path[0].suspect && !s.path[1].suspect); // nothing is better over the other
}

static void a_receiver_says_that_it_hears_nothing(void) {
  begin("a receiver that hears nothing over any path says so, and the sender connects anew", 1, usual());
  up(0, 1, 0);
  uint64_t now = 0;
  flow_frame said;
  int lost;
  flow_post(&r, got, CHUNK, now);
  talk(0, now);
  flow_post(&s, sent, CHUNK, now);
  frame stale = {.magic = WIRE_MAGIC, .type = PONG, .epoch = 1, .seq = now};
  for (; now < 2 * DEAD; now += TICK) {
    flow_tick(&r, now);
    flow_tick(&s, now);
    if (says(&r, 0, DOWN, now, &said)) break;
  }
  EXPECT(now >= DEAD && now < DEAD + 3 * TICK);
  EXPECT(flow_heard(&s, 0, &said.header, now, &lost) && lost == -1 && s.path[0].live);
  EXPECT(flow_heard(&s, 0, &stale, now, &lost)); // an answer from before
  EXPECT(flow_tick(&s, now).probe == 1);
  now += TICK;
  EXPECT(flow_tick(&s, now).probe == 1);
  EXPECT(says(&s, 0, PING, now, &said));
  EXPECT(flow_heard(&r, 0, &said.header, now, &lost) && says(&r, 0, PONG, now, &said));
  EXPECT(flow_heard(&s, 0, &said.header, now, &lost));
  EXPECT(flow_tick(&s, now + TICK).probe == 0);
}

static void what_was_said_of_an_older_connection_is_forgotten(void) {
  begin("a complaint about a connection does not count for the next one of its path", 1, usual());
  up(0, 1, 0);
  uint64_t now = 0;
  flow_post(&s, sent, CHUNK, now);
  EXPECT(!wait_until(&now, 2 * SUSPECT, 1).probe);
  frame deaf = {.magic = WIRE_MAGIC, .type = DOWN, .epoch = 1};
  int lost;
  EXPECT(flow_heard(&s, 0, &deaf, now, &lost) && lost == -1);
  EXPECT(flow_tick(&s, now).probe == 1);
  up(0, 2, now);
  EXPECT(flow_tick(&s, now).probe == 0); // nobody has complained about this one
}

static void a_path_that_gets_nowhere_holds_nothing_up(void) {
  begin("a path over which bytes come, but no chunk gets through, holds nothing up", 2, usual());
  up(0, 1, 0);
  up(1, 1, 0);
  uint64_t now = 0;
  flow_post(&r, got, CHUNK, now);
  talk(0, now);
  talk(1, now);
  flow_slot *slot = flow_post(&s, sent, CHUNK, now);
  EXPECT(talk_to_nobody(&s, 0, now) == 1);
  for (; now <= DEAD + TICK; now += TICK) {
    flow_alive(&s, 0, now);
    flow_alive(&s, 1, now);
    flow_tick(&s, now);
    talk(1, now);
  }
  EXPECT(slot->state == SLOT_DONE);
  flow_post(&r, got, CHUNK, now);
  talk(1, now);
  flow_post(&s, sent, CHUNK, now);
  EXPECT(talk_to_nobody(&s, 0, now) == 0);
  frame ack = {.magic = WIRE_MAGIC, .type = ACK, .epoch = 1, .seq = 1};
  int lost;
  EXPECT(flow_heard(&s, 0, &ack, now, &lost));
  EXPECT(talk_to_nobody(&s, 0, now) == 1);
}

// ---------------------------------------------------------------- the end

static void closing_waits_for_no_blocked_path(void) {
  begin("closing waits for no blocked path", 2, usual());
  up(0, 1, 0);
  up(1, 1, 0);
  uint64_t now = 0;
  flow_frame said;
  flow_post(&r, got, CHUNK, now);
  talk(0, now);
  talk(1, now);
  flow_slot *slot = flow_post(&s, sent, CHUNK, now);
  talk_to_nobody(&s, 0, now);
  wait_until(&now, 150 * MS, 2);
  EXPECT(slot->state == SLOT_DONE && s.path[0].count == 1);
  flow_close(&s);
  EXPECT(says(&s, 1, BYE, now, &said));
}

static void the_peer_is_told_of_a_loss(void) {
  begin("over another path the peer is told which connection is lost", 2, usual());
  flow_frame said;
  up(0, 7, 0);
  up(1, 1, 0);
  flow_down(&s, 0, 0);
  EXPECT(says(&s, 1, DOWN, 0, &said) && said.header.path == 0 && said.header.epoch == 7);
  hear(&r, 1, &said, 0);
  EXPECT(!r.path[0].live && r.path[1].live);
}

static void an_answer_to_a_bye_is_said_again(void) {
  begin("who has heard that the other closes says so again over the next connection", 1, usual());
  flow_frame said;
  up(0, 1, 0);
  flow_close(&s);
  EXPECT(says(&s, 0, BYE, 0, &said));
  hear(&r, 0, &said, 0);
  talk_to_nobody(&r, 0, 0);
  up(0, 2, 0);
  EXPECT(says(&r, 0, BYE, 0, &said) && said.header.offset && !flow_finished(&s));
  hear(&s, 0, &said, 0);
  EXPECT(flow_finished(&s));
}

static void what_ends_with_the_peer_is_not_lost(void) {
  begin("a path that ends after the peer has closed was not lost", 2, usual());
  up(0, 1, 0);
  up(1, 1, 0);
  flow_down(&s, 0, 0);
  EXPECT(s.path[0].downs == 1);
  flow_close(&r);
  talk(1, 0);
  flow_down(&s, 1, 0);
  EXPECT(s.peer_closed && !s.path[1].live && s.path[1].downs == 0);

  begin("a path that ends after we have closed was not lost", 1, usual());
  up(0, 1, 0);
  flow_close(&s);
  flow_down(&s, 0, 0);
  EXPECT(s.path[0].downs == 0);
}

static void a_sender_goes_when_the_receiver_knows(void) {
  begin("a sender is finished when the receiver knows, not when it has said so", 1, usual());
  up(0, 1, 0);
  flow_post(&r, got, CHUNK, 0);
  talk(0, 0);
  flow_close(&s);
  talk_to_nobody(&s, 0, 0);
  EXPECT(!flow_finished(&s));
  up(0, 2, 0);
  talk(0, 0);
  EXPECT(flow_finished(&s));
  EXPECT(!flow_busy(&r) && !flow_finished(&r));
  flow_close(&r);
  EXPECT(!flow_finished(&r)); // its own is still to be said
  talk(0, 0);
  EXPECT(flow_finished(&r));

  begin("a sender tells a receiver that has closed before", 1, usual());
  up(0, 1, 0);
  flow_close(&r);
  talk(0, 0);
  EXPECT(!flow_finished(&r));
  flow_close(&s);
  EXPECT(!flow_finished(&s));
  talk(0, 0);
  EXPECT(flow_finished(&s) && flow_finished(&r));
}

int main(void) {
  posts_after_the_peer_has_closed_fail_at_once();
  requests_have_their_bounds();
  a_new_connection_hands_on_what_the_old_one_carried();
  a_new_connection_begins_anew();
  giving_up_counts_from_the_last_connection();
  chunks_of_an_older_connection_are_not_counted();
  a_blocked_path_is_found_out_in_short_bursts();
  a_blocked_path_that_nothing_needs_is_found_out();
  paths_that_nothing_needs_are_not_lost();
  a_suspect_path_is_found_out_though_nobody_waits();
  a_peer_that_was_stopped_loses_no_path();
  who_was_stopped_itself_calls_nothing_lost();
  when_all_fall_silent_none_is_lost();
  a_receiver_says_that_it_hears_nothing();
  what_was_said_of_an_older_connection_is_forgotten();
  a_path_that_gets_nowhere_holds_nothing_up();
  closing_waits_for_no_blocked_path();
  the_peer_is_told_of_a_loss();
  an_answer_to_a_bye_is_said_again();
  what_ends_with_the_peer_is_not_lost();
  a_sender_goes_when_the_receiver_knows();
  stories_of_sending();
  stories_of_hearing();
  if (!failures) printf("all stories hold\n");
  return failures != 0;
}
