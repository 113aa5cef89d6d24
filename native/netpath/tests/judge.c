// Judge: what must be true after every event of a simulated world (see world.h).

#include <stdio.h>
#include <string.h>

#include "world.h"

static uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }

static uint32_t chunks_of(const flow *f, uint32_t size) {
  return size ? (size + f->limits.chunk - 1) / f->limits.chunk : 1;
}

static int in(const uint64_t *set, uint32_t index) { return set[index / 64] >> (index % 64) & 1; }

static const char *const NAMES[] = {"the sender", "the receiver"};

// ---------------------------------------------------------------- memory

static message *message_of(uint64_t seq) {
  if (seq >= MESSAGES) violate("message %llu is none of ours", (unsigned long long)seq);
  return &w.message[seq];
}

void judge_write(uint64_t seq, const uint8_t *target, uint32_t size) {
  message *m = message_of(seq);
  if (m->receive_fate != OPEN || m->receive->state != SLOT_OPEN)
    violate("the memory of receive %d is written to, and it is not outstanding", (int)seq);
  if (target < m->got || target + size > m->got + m->room) violate("receive %d is written to beyond its end", (int)seq);
}

void judge_read(uint64_t seq, const uint8_t *data, uint32_t size) {
  message *m = message_of(seq);
  if (m->send_fate != OPEN || m->send->state != SLOT_OPEN)
    violate("the memory of send %d is read, and it is not outstanding", (int)seq);
  if (data < m->sent || data + size > m->sent + m->size) violate("send %d is read beyond its end", (int)seq);
}

// ---------------------------------------------------------------- one flow

// Whether a chunk is under way over a path that is believed in.
static int under_way(const flow *f, uint64_t seq, uint32_t offset) {
  for (int i = 0; i < f->paths; i++) {
    const flow_path *p = &f->path[i];
    uint32_t at = p->hedged > p->acknowledged ? (uint32_t)(p->hedged - p->acknowledged) : 0;
    for (; p->live && at < p->count; at++) {
      const flow_chunk *chunk = &p->fifo[(p->first + at) % FIFO];
      if (chunk->seq == seq && chunk->offset == offset) return 1;
    }
  }
  return 0;
}

static void judge_slots(int end, const flow *f) {
  for (uint64_t seq = f->tail; seq < f->posted; seq++) {
    const flow_slot *slot = &f->slot[seq % NP_MAX_REQUESTS];
    if (slot->state != SLOT_OPEN || slot->seq != seq || (end == RECEIVER && !slot->begun)) continue;
    uint32_t missing = 0;
    for (uint32_t i = 0; i < chunks_of(f, slot->size); i++) {
      missing += !in(slot->have, i);
      if (end == RECEIVER || in(slot->have, i)) continue;
      if (in(slot->given, i) && !under_way(f, seq, i * f->limits.chunk))
        violate("chunk %u of message %d was given to a path, and no path has it", i, (int)seq);
      if (!in(slot->given, i) && i < slot->next) violate("chunk %u of message %d was passed over", i, (int)seq);
    }
    if (missing != slot->left)
      violate("%s has %u chunks left of message %d, not %u", NAMES[end], missing, (int)seq, slot->left);
    if (!missing) violate("message %d is whole, and %s does not say so", (int)seq, NAMES[end]);
  }
}

static void judge_flow(int end) {
  const flow *f = &w.end[end].flow;
  for (int i = 0; i < f->paths; i++) {
    const flow_path *p = &f->path[i];
    uint32_t bytes = 0;
    if (p->count > FIFO || (!p->live && p->count))
      violate("%s path %d has %u chunks under way", NAMES[end], i, p->count);
    for (uint32_t k = 0; k < p->count; k++) {
      const flow_chunk *chunk = &p->fifo[(p->first + k) % FIFO];
      bytes += chunk->length;
      if (chunk->seq >= f->allowed) violate("message %d is sent before it may be", (int)chunk->seq);
    }
    if (bytes != p->unacknowledged) violate("path %d has %u bytes under way, not %u", i, bytes, p->unacknowledged);
    if (p->count > 1 && bytes > f->limits.window) violate("path %d has %u bytes under way, over its window", i, bytes);
  }
  if (f->tail > f->posted) violate("%s: the oldest message is after the last", NAMES[end]);
  for (uint64_t seq = f->posted > NP_MAX_REQUESTS ? f->posted - NP_MAX_REQUESTS : 0; seq < f->posted; seq++) {
    const flow_slot *slot = &f->slot[seq % NP_MAX_REQUESTS];
    int open = slot->state == SLOT_OPEN && slot->seq == seq;
    if (open && seq < f->tail) violate("%s: message %d is open, and before the oldest", NAMES[end], (int)seq);
    if (!open && seq == f->tail) violate("%s: the oldest message, %d, is over", NAMES[end], (int)seq);
  }
  if (end == SENDER && f->allowed > w.end[RECEIVER].flow.posted) violate("the sender may send more than was asked for");
  if (end == RECEIVER && f->peer_closed && flow_busy(f)) violate("the receiver waits for one that has closed");
  judge_slots(end, f);
}

// ---------------------------------------------------------------- messages

static void judge_receive(int seq) {
  message *m = &w.message[seq];
  const terminal *t = &w.end[RECEIVER];
  int state = m->receive->state;
  if (m->got_seen || state == SLOT_OPEN) return;
  m->got_seen = 1;
  plan_event(w.now + draw(200), E_USER, RECEIVER, 0, -1);
  if (state == SLOT_FAILED) {
    if (t->flow.failed || m->room < m->size) return;
    if (!w.end[SENDER].closed) violate("receive %d fails, and nobody has closed", seq);
    if (m->send_fate == DONE) violate("receive %d fails, and its send is done", seq);
    return;
  }
  tell("receiver has message %d", seq);
  if (seq >= w.posted[SENDER]) violate("message %d has come, and was never sent", seq);
  if (m->receive->size != m->size) violate("message %d has %u bytes, not %u", seq, m->receive->size, m->size);
  for (uint32_t i = 0; i < m->size; i++)
    if (m->got[i] != byte_of((uint64_t)seq, i)) violate("message %d: byte %u is wrong", seq, i);
}

static void judge_send(int seq) {
  message *m = &w.message[seq];
  int state = m->send->state;
  if (m->sent_seen || state == SLOT_OPEN) return;
  m->sent_seen = 1;
  plan_event(w.now + draw(200), E_USER, SENDER, 0, -1);
  const terminal *peer = &w.end[RECEIVER];
  if (state == SLOT_FAILED) {
    if (!w.end[SENDER].flow.failed && !(peer->closed && seq >= w.posted[RECEIVER]))
      violate("send %d fails, and the receiver waits for it", seq);
    return;
  }
  tell("sender   is told that message %d has come", seq);
  int whole = m->receive_fate == DONE || (m->receive_fate == OPEN && m->receive->state == SLOT_DONE);
  if (!whole && !peer->closed && !peer->flow.failed && m->room >= m->size)
    violate("send %d is done, and the receiver has not got it", seq);
}

static void judge_messages(void) {
  int most = w.posted[SENDER] > w.posted[RECEIVER] ? w.posted[SENDER] : w.posted[RECEIVER];
  for (int seq = w.messages_over; seq < most; seq++) {
    message *m = &w.message[seq];
    if (m->receive_fate == OPEN) judge_receive(seq);
    if (m->send_fate == OPEN) judge_send(seq);
    if (seq == w.messages_over && m->receive_fate > OPEN && m->send_fate > OPEN) w.messages_over++;
  }
}

// ---------------------------------------------------------------- paths and time

static int network_is_well(int path) {
  return !w.blackhole[path][0] && !w.blackhole[path][1] && !w.corrupting[path] && w.plan.byte_ns[path] < SLOW_NS;
}

static int connection_is_well(int path) {
  int of = w.end[SENDER].live[path];
  if (of < 0 || of != w.end[RECEIVER].live[path] || !network_is_well(path)) return 0;
  const link *c = &w.link[of];
  for (int k = 0; k < 2; k++) {
    const way *y = &c->way[k];
    if (c->cut || y->stalled || y->slow_us > w.now || y->ends) return 0;
  }
  return 1;
}

// Whether what a path was given while it was slow is gone.
static int is_prompt(int path) {
  const link *c = &w.link[w.end[SENDER].live[path]];
  for (int k = 0; k < 2; k++) {
    const way *y = &c->way[k];
    if (y->pieces && y->piece[(y->first + y->pieces - 1) % PIECES].ready > w.now + 30000) return 0;
  }
  return 1;
}

static void judge_paths(void) {
  int runs = w.now >= w.end[SENDER].stopped_until && w.now >= w.end[RECEIVER].stopped_until;
  const flow_limits *limits = &w.plan.limits;
  // Attempts that fail are tried again after a second, if nobody waits; else sooner.
  uint64_t most = limits->dead_us + limits->suspect_us + (w.plan.gap_us[SENDER] ? 1500000 : 600000);
  for (int i = 0; i < w.plan.paths; i++) {
    int well = connection_is_well(i), prompt = well && is_prompt(i);
    if (!prompt) w.wire_us[i] = 0;
    else if (!w.wire_us[i]) w.wire_us[i] = w.now;
    if (!prompt || !runs) w.good_us[i] = 0;
    else if (!w.good_us[i]) w.good_us[i] = w.now;
    if (well || !network_is_well(i) || w.end[SENDER].closed || w.end[RECEIVER].closed) w.lame_us[i] = 0;
    else if (runs && w.was_busy) w.lame_us[i] += w.now - w.judged_us;
    if (w.lame_us[i] > most) violate("path %d is well again, and not used", i);
  }
  w.was_busy = flow_busy(&w.end[SENDER].flow);
  w.judged_us = w.now;
}

// Since when one path is well, both ends run and no fault has begun; 0: it is not so.
static uint64_t calm_since(void) {
  uint64_t since = 0;
  for (int i = 0; i < w.plan.paths; i++)
    if (w.good_us[i] && (!since || w.good_us[i] < since)) since = w.good_us[i];
  return since ? later(since, later(w.last_fault_us, w.woken_us)) : 0;
}

static int is_slow_world(void) {
  for (int i = 0; i < w.plan.faults; i++)
    if (w.plan.fault[i].kind == SLOW) return 1;
  return 0;
}

static uint64_t slack(void) {
  uint64_t delay = 0;
  for (int i = 0; i < w.plan.paths; i++) delay = later(delay, w.plan.delay_us[i]);
  return 20000 + 6 * delay;
}

// While one path is well, the oldest message is not held up for longer than a loss takes to be noticed.
static void judge_stall(void) {
  int seq = w.messages_over;
  while (seq < w.posted[SENDER] && w.message[seq].send_fate != OPEN) seq++;
  uint64_t since = calm_since();
  const message *m = &w.message[seq];
  uint32_t left = seq < w.posted[SENDER] ? m->send->left : 0;
  if (seq != w.oldest || left != w.oldest_left) {
    w.oldest = seq;
    w.oldest_left = left;
    w.oldest_us = w.now;
  }
  if (!since || seq >= w.posted[SENDER] || seq >= w.posted[RECEIVER] || m->send->state != SLOT_OPEN) return;
  if (w.end[SENDER].gone || w.end[RECEIVER].gone) return;
  since = later(later(since, w.oldest_us), later(m->sent_at, m->room_at));
  if (w.now <= since) return;
  w.longest_stall = later(w.longest_stall, w.now - since);
  // Each path that is slow, or was, may get a chunk next, only to hold it up as well.
  uint64_t most = (is_slow_world() ? (uint64_t)w.plan.paths : 1) * w.plan.limits.dead_us + slack();
  if (w.end[RECEIVER].closed) most += 100000; // it has begun to listen only then
  if (w.now - since > most)
    violate("message %d is held up for %.1f ms though a path is well", seq, (double)(w.now - since) / 1000);
}

// Both have closed, or the sender is finished: the other gets to know, while one path is well.
static void judge_closing(void) {
  const terminal *s = &w.end[SENDER], *r = &w.end[RECEIVER];
  uint64_t since = calm_since();
  if (since && s->closed && r->closed && !s->gone && !r->gone) {
    since = later(since, later(s->closed_us, r->closed_us));
    if (w.now > since + w.plan.limits.dead_us + slack() + 200000) violate("both have closed, and neither is finished");
  }
  if (!w.bye_us || w.last_fault_us > w.bye_us || w.woken_us > w.bye_us || r->gone || r->flow.peer_closed) return;
  if (w.now > w.bye_us + slack() + 50000) violate("the sender is finished, and has not told the receiver");
}

void judge_finish(int end) {
  if (end == SENDER && calm_since() && !w.end[RECEIVER].gone) w.bye_us = w.now;
}

// ---------------------------------------------------------------- verdicts

void judge_loss(int end, int path) {
  const terminal *t = &w.end[end];
  const flow_limits *limits = &w.plan.limits;
  int heard = 0;
  // What a slow path was given, or a new connection's greeting, still comes when its sender is stopped, and then only that.
  int stopped = w.now < w.end[!end].stopped_until + limits->dead_us;
  int late = is_slow_world() || w.now - t->up_us < limits->dead_us;
  if (w.wire_us[path] && w.now - w.wire_us[path] >= limits->dead_us && !(stopped && late))
    violate("%s calls path %d silent, and nothing is wrong with it", NAMES[end], path);
  if (w.now - t->read_us[path] < limits->dead_us) violate("%s calls path %d silent too early", NAMES[end], path);
  for (int i = 0; i < w.plan.paths; i++)
    heard |= i != path && t->live[i] >= 0 && w.now - t->read_us[i] < limits->suspect_us;
  if (!heard) violate("%s calls path %d lost while all are silent", NAMES[end], path);
}

// A path was well long before its end, which listened to it, was stopped; and it has only just woken.
static int was_only_stopped(const terminal *t, int path) {
  const flow_limits *limits = &w.plan.limits;
  if (!t->flow.watched || t->stopped_until - t->stopped_since < limits->dead_us) return 0;
  if (w.now - t->stopped_until >= limits->suspect_us / 2) return 0;
  return w.wire_us[path] && w.wire_us[path] + limits->dead_us <= t->stopped_since;
}

// A connection gives way to another of its path, `of`. That a newer one was left by its sender meanwhile, nobody can know.
void judge_replaced(int of) {
  const link *c = &w.link[of];
  const terminal *t = &w.end[RECEIVER];
  int older = t->live[c->path] >= 0 && (int16_t)(c->epoch - w.link[t->live[c->path]].epoch) < 0;
  if (older && connection_is_well(c->path) && c->side[SENDER].state == SIDE_CLOSED)
    violate("the receiver gives up path %d for an older connection, which its sender has left", c->path);
  if (t->live[c->path] >= 0 && connection_is_well(c->path) && was_only_stopped(t, c->path))
    violate("the receiver gives up path %d, which is well, as it was stopped itself", c->path);
}

void judge_give_up(int end) {
  const terminal *t = &w.end[end];
  if (w.now - t->heard_us < w.plan.limits.giveup_us)
    violate("%s gives up, and heard of its peer %.1f ms ago", NAMES[end], (double)(w.now - t->heard_us) / 1000);
}

void judge_begin(void) { w.oldest = -1; }

void judge(void) {
  for (int end = 0; end < 2; end++)
    if (!w.end[end].gone) judge_flow(end);
  judge_messages();
  judge_paths();
  judge_stall();
  judge_closing();
}
