// World: the network, and two ends that do what the engine does (see world.h).

#include "world.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

world w;

static const uint64_t FIRST_ORDER = 1ull << 40;

enum { TICK_US = 10000, IDLE_TICK_US = 100000, ATTEMPT_US = 150000, LINGER_US = 10000000 };

// ---------------------------------------------------------------- chance and events

uint64_t draw(uint64_t below) { // splitmix64
  uint64_t x = w.random += 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return below ? (x ^ x >> 31) % below : 0;
}

int chance(int percent) { return (int)draw(100) < percent; }

uint8_t byte_of(uint64_t seq, uint32_t offset) {
  uint64_t x = (seq << 32 | offset) * 0x9e3779b97f4a7c15ull;
  return (uint8_t)(x >> 56 ^ x >> 29);
}

static const char *name_of(int end) { return end == SENDER ? "sender  " : "receiver"; }

void tell(const char *format, ...) {
  if (!w.story) return;
  va_list rest;
  va_start(rest, format);
  printf("%11.3f ms  ", (double)w.now / 1000);
  vprintf(format, rest);
  printf("\n");
  va_end(rest);
}

static int sooner(const event *a, const event *b) { return a->at != b->at ? a->at < b->at : a->order < b->order; }

static void plan_ordered(uint64_t at, uint64_t order, event_kind kind, int end, int number, int of) {
  if (w.events == EVENTS) violate("the world has too many events");
  event added = {at < w.now ? w.now : at, order, kind, end, of, number, of < 0 ? 0 : w.link[of].life};
  int i = w.events++;
  for (; i > 0 && sooner(&added, &w.event[(i - 1) / 2]); i = (i - 1) / 2) w.event[i] = w.event[(i - 1) / 2];
  w.event[i] = added;
}

void plan_event(uint64_t at, event_kind kind, int end, int number, int of) {
  plan_ordered(at, FIRST_ORDER + w.order++, kind, end, number, of);
}

static event next_event(void) {
  event first = w.event[0], last = w.event[--w.events];
  int i = 0;
  for (;;) {
    int child = 2 * i + 1;
    if (child >= w.events) break;
    if (child + 1 < w.events && sooner(&w.event[child + 1], &w.event[child])) child++;
    if (!sooner(&w.event[child], &last)) break;
    w.event[i] = w.event[child];
    i = child;
  }
  w.event[i] = last;
  return first;
}

static int stopped(int end) { return w.now < w.end[end].stopped_until; }

static uint64_t delay_of(int path) { return w.plan.delay_us[path] + draw(w.plan.delay_us[path] / 4 + 1); }

// ---------------------------------------------------------------- connections

static void plan_carry(int of, int k, uint64_t at) {
  way *y = &w.link[of].way[k];
  if (y->planned || y->stalled) return;
  y->planned = 1;
  plan_event(at > y->slow_us ? at : y->slow_us, E_CARRY, !k, k, of);
}

static void way_write(int of, int k, const uint8_t *bytes, uint32_t size) {
  link *c = &w.link[of];
  way *y = &c->way[k];
  for (uint32_t i = 0; i < size; i++) y->bytes[(y->from + y->count + i) % PIPE] = bytes[i];
  y->count += size;
  uint64_t ready = w.now + delay_of(c->path);
  if (y->pieces && y->piece[(y->first + y->pieces - 1) % PIECES].ready > ready)
    ready = y->piece[(y->first + y->pieces - 1) % PIECES].ready;
  uint32_t step = w.plan.byte_ns[c->path] >= SLOW_NS ? 8 : size; // a slow path is slow, and not silent
  for (uint32_t now = 0; now < size; now += step) {
    if (step > size - now) step = size - now;
    ready += (uint64_t)step * w.plan.byte_ns[c->path] / 1000;
    y->piece[(y->first + y->pieces++) % PIECES] = (piece){step, ready};
  }
  plan_carry(of, k, y->piece[y->first].ready);
}

static int link_new(int path) {
  for (int i = 0; i < LINKS; i++) {
    link *c = &w.link[i];
    if (c->used) continue;
    unsigned life = c->life + 1;
    memset(c, 0, sizeof *c);
    c->used = 1;
    c->life = life;
    c->path = path;
    for (int k = 0; k < 2; k++) {
      c->way[k].room = 40 + (uint32_t)draw(chance(50) ? 200 : 3000);
      c->way[k].left = UINT64_MAX;
      if (w.plan.faults && chance(3)) c->way[k].slow_us = w.now + draw(300000);
    }
    return i;
  }
  violate("the world has too many connections");
}

static int open_side(const link *c, int end) {
  return c->side[end].state != SIDE_NONE && c->side[end].state != SIDE_CLOSED;
}

// The other end learns of it: after what was sent when closed gently, else as soon as the way lets it.
static void side_close(int end, int of, int gently) {
  link *c = &w.link[of];
  way *y = &c->way[end];
  c->side[end].state = SIDE_CLOSED;
  if (!open_side(c, !end)) {
    c->used = 0;
    return;
  }
  if (c->cut && chance(30)) return; // nobody will tell
  y->ends = gently ? 1 : 2;
  if (w.blackhole[c->path][end]) y->stalled = 1;
  else if (!gently || y->count == 0) plan_event(w.now + delay_of(c->path), E_BREAK, !end, 0, of);
}

static void try_later(int end, int path) {
  terminal *t = &w.end[end];
  uint32_t most = flow_busy(&t->flow) ? 80 : 1000, pause = t->pause_ms[path] < most ? t->pause_ms[path] : most;
  t->retry_us[path] = w.now + pause * 1000ull;
  t->pause_ms[path] = pause * 2;
}

static void lose(int end, int of, const char *why) {
  link *c = &w.link[of];
  terminal *t = &w.end[end];
  side_state was = c->side[end].state;
  int path = c->path;
  if (was == SIDE_CLOSED || was == SIDE_NONE) return;
  int both = was == SIDE_LIVE && c->side[!end].state == SIDE_LIVE && !w.end[!end].closed && !w.end[end].closed;
  if (both && w.plan.no_loss && strcmp(why, "silent")) // silence was judged already
    violate("%s loses path %d (%s), and nothing is wrong with it", name_of(end), path, why);
  tell("%s path %d epoch %u: the connection is lost (%s)%s", name_of(end), path, c->epoch, why,
       was == SIDE_LIVE ? "" : ", it was not up");
  side_close(end, of, 0);
  if (t->probe[path] == of) t->probe[path] = -1;
  if (was != SIDE_LIVE) {
    if (end == SENDER) try_later(end, path);
    return;
  }
  t->live[path] = -1;
  if (t->gone) return;
  flow_down(&t->flow, path, w.now);
  t->retry_us[path] = w.now;
  t->pause_ms[path] = 20;
  pump(end);
}

// ---------------------------------------------------------------- writing

static uint32_t sum_of(uint32_t sum, const uint8_t *bytes, uint32_t size) {
  for (uint32_t i = 0; i < size; i++) sum = (sum ^ bytes[i]) * 16777619u;
  return sum;
}

static void send_frame(side *s, const link *c, frame_type type, uint32_t reason) {
  frame out = {.magic = WIRE_MAGIC, .type = (uint8_t)type, .path = (uint8_t)c->path, .epoch = c->epoch,
               .offset = reason};
  memcpy(s->head, &out, sizeof out);
  s->head_size = s->out_size = sizeof out;
  s->out_done = 0;
}

// A frame's magic has a checksum of the rest of it added: it has to be known for good before anything is done with it.
static uint32_t head_sum(const frame *head) {
  int summed = w.plan.checked && w.plan.rules & RULE_SUM_ALL;
  return summed ? sum_of(1, (const uint8_t *)head + sizeof head->magic, sizeof *head - sizeof head->magic) : 0;
}

static int turns_a_bit(int path) {
  if (!w.corrupting[path] || !chance(w.corrupting[path])) return 0;
  w.corrupted++;
  tell("on path %d a bit is turned", path);
  return 1;
}

static int fill(int end, const link *c, side *s) {
  flow_frame next;
  s->head_size = s->out_size = s->out_done = 0;
  s->data = NULL;
  if (!flow_next(&w.end[end].flow, c->path, w.now, &next)) return 0;
  s->out = next.header;
  s->out_size = s->head_size = sizeof next.header;
  if (next.header.type == DATA) {
    judge_read(next.header.seq, next.data, next.header.length);
    s->data = next.data;
    s->out_size += next.header.length;
    s->out.crc = sum_of(1, next.data, next.header.length);
    tell("%s path %d sends message %d, bytes %u to %u of %u", name_of(end), c->path, (int)s->out.seq, s->out.offset,
         s->out.offset + s->out.length, s->out.total);
  } else if (s->out.type == DOWN || s->out.type == BYE) {
    tell("%s path %d says %s (path %u epoch %u, %d)", name_of(end), c->path, s->out.type == DOWN ? "DOWN" : "BYE",
         s->out.path, s->out.epoch, (int)s->out.seq);
  }
  s->out.magic ^= head_sum(&s->out);
  memcpy(s->head, &s->out, sizeof s->out);
  if (turns_a_bit(c->path)) s->head[draw(sizeof(frame))] ^= (uint8_t)(1u << draw(8));
  return 1;
}

// Part of a chunk's data. Returns 0 if there is nothing that may be sent in its place.
static int data_piece(int end, int of, uint8_t *into, uint32_t size) {
  side *s = &w.link[of].side[end];
  flow *f = &w.end[end].flow;
  uint32_t from = s->out_done - s->head_size;
  if (flow_wanted(f, &s->out)) {
    judge_read(s->out.seq, s->data + from, size);
    memcpy(into, s->data + from, size);
  } else if ((f->closing || f->failed) && w.plan.rules & RULE_BREAK_UNWANTED) {
    return 0;
  } else {
    w.fillers++;
    memset(into, 0xee, size);
  }
  if (turns_a_bit(w.link[of].path)) into[draw(size)] ^= (uint8_t)(1u << draw(8));
  return 1;
}

static void write_link(int end, int of) {
  link *c = &w.link[of];
  side *s = &c->side[end];
  while (open_side(c, end) && s->state != SIDE_CONNECTING) {
    if (s->out_done == s->out_size) {
      if (s->last) {
        side_close(end, of, 1);
        return;
      }
      if (s->state != SIDE_LIVE || !fill(end, c, s)) return;
    }
    uint32_t room = c->way[end].room - c->way[end].count;
    if (!room || c->way[end].pieces > PIECES / 2) return;
    int head = s->out_done < s->head_size;
    uint32_t size = (head ? s->head_size : s->out_size) - s->out_done;
    if (size > room) size = room;
    if (chance(20)) size = 1 + (uint32_t)draw(size);
    uint8_t bytes[PIPE];
    if (head) memcpy(bytes, s->head + s->out_done, size);
    else if (size && !data_piece(end, of, bytes, size)) {
      lose(end, of, "what it carries was dropped");
      return;
    }
    s->out_done += size;
    way_write(of, end, bytes, size);
  }
}

void pump(int end) {
  terminal *t = &w.end[end];
  if (stopped(end)) return;
  int first = (int)draw((uint64_t)w.plan.paths);
  for (int i = 0; i < w.plan.paths; i++) {
    int path = (first + i) % w.plan.paths;
    if (!t->gone && t->live[path] >= 0) write_link(end, t->live[path]);
    if (t->probe[path] >= 0) write_link(end, t->probe[path]);
  }
}

// ---------------------------------------------------------------- connecting

static void connect_path(int path) {
  int of = link_new(path);
  link *c = &w.link[of];
  c->side[SENDER].state = SIDE_CONNECTING;
  c->side[SENDER].since_us = w.now;
  w.end[SENDER].probe[path] = of;
  if (w.blackhole[path][SENDER]) return;
  plan_event(w.now + delay_of(path), E_ARRIVE, RECEIVER, 0, of);
}

static void arrive(int of) { // by the kernel: a process that is stopped is connected to as well
  link *c = &w.link[of];
  c->side[RECEIVER].state = SIDE_ACCEPTED;
  c->side[RECEIVER].since_us = w.now;
  if (!w.blackhole[c->path][RECEIVER]) plan_event(w.now + delay_of(c->path), E_CONNECTED, SENDER, 0, of);
}

static void greet(int of) {
  link *c = &w.link[of];
  side *s = &c->side[SENDER];
  terminal *t = &w.end[SENDER];
  if (s->state != SIDE_CONNECTING) return;
  s->state = SIDE_GREETING;
  if (w.plan.rules & RULE_NEW_EPOCH || !t->epoch[c->path] || t->live[c->path] >= 0)
    if (!++t->epoch[c->path]) ++t->epoch[c->path];
  c->epoch = t->epoch[c->path];
  send_frame(s, c, HELLO, 0);
  ((frame *)s->head)->length = HELLO_BYTES;
  s->head_size = s->out_size = sizeof(frame) + HELLO_BYTES;
  write_link(SENDER, of);
}

static void go_live(int end, int of) {
  link *c = &w.link[of];
  terminal *t = &w.end[end];
  int path = c->path;
  if (t->live[path] >= 0) lose(end, t->live[path], "replaced");
  if (t->probe[path] == of) t->probe[path] = -1;
  t->live[path] = of;
  t->pause_ms[path] = 20;
  t->read_us[path] = t->heard_us = t->up_us = w.now;
  c->side[end].state = SIDE_LIVE;
  flow_up(&t->flow, path, c->epoch, w.now);
  tell("%s path %d is up, epoch %u", name_of(end), path, c->epoch);
}

static void refuse(int of, refusal why) {
  side *s = &w.link[of].side[RECEIVER];
  tell("receiver path %d epoch %u is refused (%d)", w.link[of].path, w.link[of].epoch, (int)why);
  send_frame(s, &w.link[of], REFUSE, why);
  s->last = 1;
  write_link(RECEIVER, of);
}

static void heard_hello(int of, const frame *in) {
  link *c = &w.link[of];
  terminal *t = &w.end[RECEIVER];
  flow_path *p = &t->flow.path[c->path];
  if (t->gone) {
    refuse(of, REFUSE_CLOSED);
    return;
  }
  if (t->live[c->path] >= 0) {
    int older = (int16_t)(in->epoch - p->epoch) <= 0;
    int alive = w.now - p->heard_us < t->flow.limits.suspect_us;
    if ((older && w.plan.rules & RULE_NO_OLDER) || (alive && w.plan.rules & RULE_ALIVE)) {
      refuse(of, REFUSE_ALIVE);
      return;
    }
  }
  send_frame(&c->side[RECEIVER], c, WELCOME, 0);
  go_live(RECEIVER, of);
  pump(RECEIVER);
}

static void heard_early(int end, int of, const frame *in) {
  side *s = &w.link[of].side[end];
  terminal *t = &w.end[end];
  if (s->state == SIDE_ACCEPTED && in->type == HELLO) {
    heard_hello(of, in);
  } else if (s->state == SIDE_GREETING && in->type == WELCOME) {
    go_live(end, of);
    pump(end);
  } else if (s->state == SIDE_GREETING && in->type == REFUSE) {
    int path = w.link[of].path;
    lose(end, of, in->offset == REFUSE_CLOSED ? "refused, closed" : "refused, alive");
    if (in->offset != REFUSE_CLOSED) {
      int silent = t->live[path] >= 0 && t->flow.path[path].silent;
      t->refusals[path] = silent ? t->refusals[path] + 1 : 0;
      if (t->refusals[path] >= 2 && w.plan.rules & RULE_REFUSED) lose(end, t->live[path], "silent to us alone");
      return;
    }
    flow_fail(&t->flow);
    plan_event(w.now, E_USER, end, 0, -1);
    if (t->closed) t->linger_us = w.now;
  } else {
    violate("%s heard a frame of type %d too early", name_of(end), in->type);
  }
}

// ---------------------------------------------------------------- reading

// Only what was changed on its way breaks the rules.
static void breaks_rules(int end, int of, const frame *in) {
  if (!w.corrupted) violate("%s says that a frame of type %d breaks the rules", name_of(end), in->type);
  lose(end, of, "rules");
}

static void heard_frame(int end, int of, const frame *in) {
  terminal *t = &w.end[end];
  int lost;
  if (!flow_heard(&t->flow, w.link[of].path, in, w.now, &lost)) {
    breaks_rules(end, of, in);
    return;
  }
  if (lost >= 0 && t->live[lost] >= 0) lose(end, t->live[lost], "told");
}

static void chunk_is_whole(int end, int of) {
  link *c = &w.link[of];
  side *s = &c->side[end];
  flow *f = &w.end[end].flow;
  uint8_t *target = flow_target(f, &s->in_frame);
  s->in_data = 0;
  uint32_t sum = w.plan.rules & RULE_MEMORY_SUM && target ? sum_of(1, target, s->in_frame.length) : s->in_sum;
  if (f->checked && target && sum != s->in_frame.crc) {
    lose(end, of, "checksum");
    return;
  }
  if (target && !s->in_clean) violate("what was not wanted is wanted again");
  flow_arrived(f, c->path, &s->in_frame, w.now);
}

static void begin_chunk(int end, int of, const frame *in) {
  side *s = &w.link[of].side[end];
  if (!flow_accepts(&w.end[end].flow, in)) {
    breaks_rules(end, of, in);
    return;
  }
  s->in_frame = *in;
  s->in_data = s->in_clean = 1;
  s->in_done = 0;
  s->in_sum = 1;
  if (in->length == 0) chunk_is_whole(end, of);
}

static void take_data(int end, int of, const uint8_t *bytes, uint32_t size) {
  side *s = &w.link[of].side[end];
  uint8_t *target = flow_target(&w.end[end].flow, &s->in_frame);
  if (!target) s->in_clean = 0;
  if (target && s->in_clean) {
    judge_write(s->in_frame.seq, target + s->in_done, size);
    memcpy(target + s->in_done, bytes, size);
  }
  s->in_sum = sum_of(s->in_sum, bytes, size);
  s->in_done += size;
  if (s->in_done == s->in_frame.length) chunk_is_whole(end, of);
}

static uint32_t wanted_bytes(const side *s) {
  if (s->in_have < sizeof(frame)) return sizeof(frame);
  return sizeof(frame) + (s->state == SIDE_ACCEPTED && ((const frame *)s->in)->type == HELLO ? HELLO_BYTES : 0);
}

static void read_bytes(int end, int of, const uint8_t *bytes, uint32_t size) {
  link *c = &w.link[of];
  side *s = &c->side[end];
  while (size && open_side(c, end) && !s->last) {
    uint32_t most = s->in_data ? s->in_frame.length - s->in_done : wanted_bytes(s) - s->in_have;
    uint32_t now = size < most ? size : most;
    if (s->in_data) {
      take_data(end, of, bytes, now);
    } else {
      memcpy(s->in + s->in_have, bytes, now);
      s->in_have += now;
      if (s->in_have == wanted_bytes(s)) {
        frame in;
        memcpy(&in, s->in, sizeof in);
        s->in_have = 0;
        if (s->state == SIDE_LIVE) in.magic ^= head_sum(&in);
        if (in.magic != WIRE_MAGIC) breaks_rules(end, of, &in);
        else if (s->state != SIDE_LIVE) heard_early(end, of, &in);
        else if (in.type == DATA) begin_chunk(end, of, &in);
        else heard_frame(end, of, &in);
      }
    }
    bytes += now;
    size -= now;
  }
}

// Bytes that have come over a way, some or all.
static void carry(int of, int k) {
  link *c = &w.link[of];
  way *y = &c->way[k];
  y->planned = 0;
  if (w.blackhole[c->path][k]) {
    y->stalled = 1;
    return;
  }
  y->stalled = 0;
  uint8_t bytes[PIPE];
  uint32_t size = 0;
  while (y->pieces && y->piece[y->first].ready <= w.now) {
    size += y->piece[y->first].size;
    y->first = (y->first + 1) % PIECES;
    y->pieces--;
  }
  if (size > 1 && chance(30)) { // part of it comes later
    uint32_t now = 1 + (uint32_t)draw(size - 1);
    y->first = (y->first + PIECES - 1) % PIECES;
    y->piece[y->first] = (piece){size - now, w.now + draw(200)};
    y->pieces++;
    size = now;
  }
  for (uint32_t i = 0; i < size; i++) bytes[i] = y->bytes[(y->from + i) % PIPE];
  y->from = (y->from + size) % PIPE;
  y->count -= size;
  uint32_t through = size < y->left ? size : (uint32_t)y->left;
  if (y->left != UINT64_MAX) y->left -= through;
  if (y->left && y->pieces) plan_carry(of, k, y->piece[y->first].ready);
  if (y->ends == 1 && y->count == 0) plan_event(w.now + 1, E_BREAK, !k, 0, of);
  if (open_side(c, !k) && through) {
    terminal *t = &w.end[!k];
    if (c->side[!k].state == SIDE_LIVE) {
      t->read_us[c->path] = t->heard_us = w.now;
      flow_alive(&t->flow, c->path, w.now);
    }
    read_bytes(!k, of, bytes, through);
    if (!t->gone) pump(!k);
  }
  if (c->used && open_side(c, k)) pump(k);
}

// ---------------------------------------------------------------- time

// A receiver that goes has answered over one path at least.
static int has_answered(int end) {
  const terminal *t = &w.end[end];
  int live = 0;
  for (int i = 0; i < w.plan.paths; i++) {
    if (t->live[i] < 0) continue;
    const side *s = &w.link[t->live[i]].side[end];
    if (s->out_done == s->out_size && !t->flow.path[i].bye_due) return 1;
    live = 1;
  }
  return !live || end == SENDER;
}

static void finish(int end) {
  terminal *t = &w.end[end];
  tell("%s is finished%s", name_of(end), flow_finished(&t->flow) ? "" : ", as nobody answers");
  judge_finish(end);
  t->gone = 1;
  for (int i = 0; i < w.plan.paths; i++) {
    if (t->live[i] >= 0) side_close(end, t->live[i], 1);
    if (t->probe[i] >= 0) side_close(end, t->probe[i], 0);
    t->live[i] = t->probe[i] = -1;
  }
}

static void tick_path(int end, int path, flow_verdict verdict) {
  terminal *t = &w.end[end];
  int bit = 1 << path;
  if (verdict.lost & bit && t->live[path] >= 0) {
    judge_loss(end, path);
    t->silent_losses++;
    lose(end, t->live[path], "silent");
  }
  if (verdict.probe & bit) t->probes++;
  if (end != SENDER) return;
  if (!t->flow.path[path].silent) t->refusals[path] = 0;
  int probe = t->probe[path];
  int late = probe >= 0 && w.now - w.link[probe].side[end].since_us > ATTEMPT_US;
  if (late && w.now != t->stopped_until) { // who wakes first looks at what has come
    lose(end, probe, "no answer");
  } else if (probe >= 0 && t->live[path] >= 0 && !(verdict.probe & bit)) {
    side_close(end, probe, 0);
    t->probe[path] = -1;
  }
  int open = !t->closed || flow_busy(&t->flow) || (w.plan.rules & RULE_BYE_AGAIN && !flow_finished(&t->flow));
  int wanted = t->live[path] < 0 || verdict.probe & bit;
  if (wanted && open && t->probe[path] < 0 && w.now >= t->retry_us[path]) connect_path(path);
}

void wake_ticks(int end) {
  terminal *t = &w.end[end];
  uint64_t at = t->ticked_us + TICK_US > w.now ? t->ticked_us + TICK_US : w.now;
  plan_event(at, E_TICK, end, (int)++t->tick, -1);
}

static void tick(int end) {
  terminal *t = &w.end[end];
  if (t->gone) return;
  t->ticked_us = w.now;
  flow_verdict verdict = flow_tick(&t->flow, w.now);
  if (verdict.failed) {
    tell("%s gives up", name_of(end));
    judge_give_up(end);
    plan_event(w.now, E_USER, end, 0, -1);
  }
  for (int i = 0; i < w.plan.paths && !t->gone; i++) tick_path(end, i, verdict);
  pump(end);
  if (t->closed && ((flow_finished(&t->flow) && has_answered(end)) || w.now > t->linger_us)) finish(end);
  plan_event(w.now + (flow_watches(&t->flow) ? TICK_US : IDLE_TICK_US), E_TICK, end, (int)++t->tick, -1);
}

static void drop_open(int end) {
  for (int seq = 0; seq < w.posted[end]; seq++) {
    message *m = &w.message[seq];
    fate *known = end == SENDER ? &m->send_fate : &m->receive_fate;
    if (*known == OPEN) *known = DROPPED;
  }
}

void end_close(int end) {
  terminal *t = &w.end[end];
  tell("%s closes", name_of(end));
  drop_open(end);
  flow_close(&t->flow);
  t->closed = 1;
  t->closed_us = w.now;
  t->linger_us = w.now + LINGER_US;
  pump(end);
}

void end_abort(int end) {
  tell("%s aborts", name_of(end));
  w.end[end].aborted = 1;
  flow_fail(&w.end[end].flow);
  plan_event(w.now, E_USER, end, 0, -1);
}

// ---------------------------------------------------------------- faults

static void cut_links(int path) {
  for (int i = 0; i < LINKS; i++) {
    link *c = &w.link[i];
    if (!c->used || c->path != path || c->cut) continue;
    c->cut = 1;
    for (int k = 0; k < 2; k++) {
      c->way[k].left = draw(c->way[k].count + 1u);
      if (open_side(c, k) && chance(80)) plan_event(w.now + draw(60000), E_BREAK, k, 0, i);
    }
  }
}

static void begin_fault(const fault *x, int number) {
  static const char *const names[] = {"blackhole", "break", "stop", "corrupt", "slow"};
  tell("FAULT %s, path or end %d, way %d, for %.1f ms", names[x->kind], x->kind == STOP ? x->which : x->path, x->which,
       (double)x->for_us / 1000);
  w.last_fault_us = w.now;
  if (x->kind == BLACKHOLE)
    for (int k = 0; k < 2; k++) w.blackhole[x->path][k] += x->which == k || x->which == 2;
  if (x->kind == BREAK) cut_links(x->path);
  if (x->kind == STOP) {
    terminal *t = &w.end[x->which];
    uint64_t until = w.now + x->for_us;
    if (until > t->stopped_until) t->stopped_until = until;
    if (until > w.woken_us) w.woken_us = until;
  }
  if (x->kind == CORRUPT) w.corrupting[x->path] += 30;
  if (x->kind == SLOW) w.plan.byte_ns[x->path] += SLOW_NS;
  if (x->kind != BREAK && x->kind != STOP) plan_event(w.now + x->for_us, E_HEAL, 0, number, -1);
}

// What was stuck in a connection is tried again only some time after the way is free again, the longer it was not.
static void end_fault(const fault *x) {
  tell("HEALED path %d", x->path);
  if (x->kind == CORRUPT) w.corrupting[x->path] -= 30;
  if (x->kind == SLOW) w.plan.byte_ns[x->path] -= SLOW_NS;
  if (x->kind != BLACKHOLE) return;
  for (int k = 0; k < 2; k++) {
    w.blackhole[x->path][k] -= x->which == k || x->which == 2;
    if (w.blackhole[x->path][k]) continue;
    for (int i = 0; i < LINKS; i++) {
      way *y = &w.link[i].way[k];
      if (!w.link[i].used || w.link[i].path != x->path || !y->stalled) continue;
      uint64_t at = w.now + 1000 + draw(chance(50) ? x->for_us : 30000);
      if (y->ends == 2 || (y->ends && !y->count)) plan_event(w.now + draw(100000), E_BREAK, !k, 0, i);
      else if (!y->planned) {
        y->planned = 1;
        plan_event(at, E_CARRY, !k, k, i);
      }
    }
  }
}

// ---------------------------------------------------------------- the loop

// Who wakes sees all that has come meanwhile, in any order; but new connections after what came over the old.
static void wait_for_wake(const event *e) {
  int new = e->kind == E_CARRY && w.link[e->link].side[e->end].state == SIDE_ACCEPTED;
  uint64_t order = draw(1u << 30) + (new ? 1ull << 31 : 0);
  plan_ordered(w.end[e->end].stopped_until, order, e->kind, e->end, e->number, e->link);
}

static void happen(const event *e) {
  if (e->link >= 0 && (!w.link[e->link].used || w.link[e->link].life != e->life)) return;
  if (e->kind != E_FAULT && e->kind != E_HEAL && e->kind != E_ARRIVE && stopped(e->end)) {
    wait_for_wake(e);
    return;
  }
  switch (e->kind) {
  case E_USER: user_acts(e->end); break;
  case E_TICK:
    if (e->number == (int)w.end[e->end].tick) tick(e->end);
    break;
  case E_CARRY: carry(e->link, e->number); break;
  case E_BREAK: lose(e->end, e->link, "broken"); break;
  case E_ARRIVE: arrive(e->link); break;
  case E_CONNECTED: greet(e->link); break;
  case E_FAULT: begin_fault(&w.plan.fault[e->number], e->number); break;
  case E_HEAL: end_fault(&w.plan.fault[e->number]); break;
  }
}

void world_begin(const plan *given, uint64_t seed, int story) {
  memset(&w, 0, offsetof(world, link));
  for (int i = 0; i < LINKS; i++) w.link[i].used = (int)(w.link[i].life = 0);
  w.plan = *given;
  w.random = seed * 0x2545f4914f6cdd1dull + 1;
  w.story = story;
  for (int end = 0; end < 2; end++) {
    terminal *t = &w.end[end];
    flow_init(&t->flow, end == SENDER, w.plan.paths, w.plan.checked, &w.plan.limits);
    for (int i = 0; i < NP_MAX_PATHS; i++) {
      t->live[i] = t->probe[i] = -1;
      t->pause_ms[i] = 20;
      t->epoch[i] = chance(20) ? (uint16_t)(65533 + draw(3)) : 0;
    }
    plan_event(draw(1000), E_TICK, end, 0, -1);
    plan_event(draw(5000), E_USER, end, 0, -1);
  }
  for (int i = 0; i < w.plan.faults; i++) plan_event(w.plan.fault[i].at_us, E_FAULT, 0, i, -1);
  judge_begin();
}

void world_run(void) {
  while (w.events && !(w.end[SENDER].gone && w.end[RECEIVER].gone)) {
    event e = next_event();
    w.now = e.at;
    if (w.now > w.plan.until_us) violate("the world does not come to its end");
    happen(&e);
    judge();
  }
}

void world_end(void) {
  for (int i = 0; i < MESSAGES; i++) {
    free(w.message[i].sent);
    free(w.message[i].got);
    w.message[i].sent = w.message[i].got = NULL;
  }
}
