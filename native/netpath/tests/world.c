// World: chance, events, faults, and the loop of a simulated world (see world.h).

#include "world.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

world w;

static const uint64_t FIRST_ORDER = 1ull << 40;

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

const char *name_of(int end) { return end == SENDER ? "sender  " : "receiver"; }

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

int stopped(int end) { return w.now < w.end[end].stopped_until; }

uint64_t delay_of(int path) { return w.plan.delay_us[path] + draw(w.plan.delay_us[path] / 4 + 1); }

// ---------------------------------------------------------------- faults

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
    if (!stopped(x->which)) t->stopped_since = w.now;
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
      if (y->ends == WAY_RESET || (y->ends && !y->count)) plan_event(w.now + draw(100000), E_BREAK, !k, 0, i);
      else if (!y->planned) {
        y->planned = 1;
        plan_event(at, E_CARRY, !k, k, i);
      }
    }
  }
}

// ---------------------------------------------------------------- the loop

// Who wakes sees all that has come meanwhile, in any order.
static void wait_for_wake(const event *e) {
  plan_ordered(w.end[e->end].stopped_until, draw(1u << 30), e->kind, e->end, e->number, e->link);
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
