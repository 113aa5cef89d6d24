// Proto world: the protocol in simulated networks, with faults, drawn by seed. See world.h for what is simulated, and
// judge.c for what must be true.
//
//   proto_world FROM COUNT                 so many seeds; the first that fails is told as a story
//   proto_world --story SEED               one seed, as a story
//   proto_world --without RULE FROM COUNT  the ends do not keep to a rule of the engine (a number, see world.h)

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "world.h"

static jmp_buf over;
static char violation[256];
static int rules = ALL_RULES;

void violate(const char *format, ...) {
  va_list rest;
  va_start(rest, format);
  vsnprintf(violation, sizeof violation, format, rest);
  va_end(rest);
  longjmp(over, 1);
}

// ---------------------------------------------------------------- users

static fate *fate_of(int end, int seq) {
  return end == SENDER ? &w.message[seq].send_fate : &w.message[seq].receive_fate;
}

static void conclude(int end) {
  for (int seq = w.messages_over; seq < w.posted[end]; seq++) {
    message *m = &w.message[seq];
    flow_slot *slot = end == SENDER ? m->send : m->receive;
    if (*fate_of(end, seq) != OPEN || !(end == SENDER ? m->sent_seen : m->got_seen)) continue;
    if (chance(15)) {
      plan_event(w.now + draw(3000), E_USER, end, 0, -1);
      continue;
    }
    *fate_of(end, seq) = slot->state == SLOT_DONE ? DONE : FAILED;
    flow_release(&w.end[end].flow, slot);
    uint8_t **memory = end == SENDER ? &m->sent : &m->got;
    free(*memory);
    *memory = NULL;
  }
}

static int open_requests(int end) {
  int open = 0;
  for (int seq = w.messages_over; seq < w.posted[end]; seq++) open += *fate_of(end, seq) == OPEN;
  return open;
}

static int post_one(int end) {
  int seq = w.posted[end];
  message *m = &w.message[seq];
  uint32_t size = end == SENDER ? m->size : m->room;
  uint8_t *memory = malloc(size ? size : 1);
  if (!memory) violate("there is no memory");
  for (uint32_t i = 0; i < size; i++) memory[i] = end == SENDER ? byte_of((uint64_t)seq, i) : 0x5a;
  flow_slot *slot = flow_post(&w.end[end].flow, memory, size, w.now);
  if (!slot) {
    free(memory);
    return 0;
  }
  if (slot->seq != (uint64_t)seq) violate("request %d is counted as %d", seq, (int)slot->seq);
  w.posted[end]++;
  *fate_of(end, seq) = OPEN;
  if (end == SENDER) {
    m->sent = memory;
    m->send = slot;
    m->sent_at = w.now;
  } else {
    m->got = memory;
    m->receive = slot;
    m->room_at = w.now;
  }
  tell("%s posts message %d, %u bytes", end == SENDER ? "sender  " : "receiver", seq, size);
  return 1;
}

static int wants_more(int end) {
  return w.posted[end] < w.plan.messages + (end == RECEIVER ? w.plan.extra : 0) && !w.end[end].flow.failed;
}

static void post(int end) {
  if (w.now < w.next_post_us[end]) return;
  int was_busy = flow_busy(&w.end[end].flow);
  while (wants_more(end) && open_requests(end) < w.plan.depth[end]) {
    if (!w.burst_left[end]) {
      w.burst_left[end] = w.plan.burst;
      if (w.plan.gap_us[end]) {
        w.next_post_us[end] = w.now + draw(2 * w.plan.gap_us[end]);
        plan_event(w.next_post_us[end], E_USER, end, 0, -1);
        break;
      }
    }
    if (!post_one(end)) break;
    w.burst_left[end]--;
  }
  pump(end);
  if (!was_busy) wake_ticks(end);
}

void user_acts(int end) {
  terminal *t = &w.end[end];
  if (t->closed) return;
  if (end == w.plan.closer && w.now >= w.plan.closes_us && !w.closes_us[end]) {
    if (w.plan.aborts) end_abort(end);
    w.closes_us[end] = w.now + (w.plan.aborts ? draw(100000) : 0);
    plan_event(w.closes_us[end], E_USER, end, 0, -1);
  }
  conclude(end);
  post(end);
  if (w.closes_us[end] && w.now >= w.closes_us[end]) {
    end_close(end);
  } else if (!wants_more(end) && !open_requests(end) && !w.closes_us[end]) {
    w.closes_us[end] = w.now + (chance(50) ? draw(1000) : draw(400000));
    plan_event(w.closes_us[end], E_USER, end, 0, -1);
  }
}

// ---------------------------------------------------------------- plans

static uint64_t plan_random;

static uint64_t pick(uint64_t below) { // of the plan, not of what happens in it
  uint64_t kept = w.random;
  w.random = plan_random;
  uint64_t drawn = draw(below);
  plan_random = w.random;
  w.random = kept;
  return drawn;
}

static void pick_limits(plan *p) {
  static const uint32_t chunks[] = {8, 16, 16, 33, 64}, times[][3] = {{50, 100, 250}, {50, 100, 250}, {20, 60, 150},
                                                                      {50, 250, 250}, {30, 80, 400}};
  const uint32_t *ms = times[pick(5)];
  p->limits.chunk = chunks[pick(5)];
  p->limits.window = p->limits.chunk * (uint32_t)(pick(4) ? 1 + pick(8) : 100) + (uint32_t)pick(5);
  p->limits.ping_us = ms[0] * 1000;
  p->limits.suspect_us = ms[1] * 1000;
  p->limits.dead_us = ms[2] * 1000;
}

static void pick_traffic(plan *p, uint64_t lasts) {
  p->messages = (int)(pick(10) ? 1 + pick(40) : 60 + pick(140));
  p->depth[SENDER] = (int)(pick(4) ? 1 + pick(8) : 64);
  p->depth[RECEIVER] = (int)(pick(4) ? 1 + pick(8) : 64);
  p->burst = (int)(1 + pick(6));
  for (int end = 0; end < 2; end++)
    if (pick(4)) p->gap_us[end] = lasts * (uint64_t)p->burst / (uint64_t)p->messages;
  p->extra = pick(4) ? 0 : (int)pick(4);
  p->size_most = p->limits.chunk * (uint32_t)(pick(3) ? 1 + pick(20) : 150);
  for (int i = 0; i < p->paths; i++) {
    p->delay_us[i] = (uint32_t)(pick(4) ? 50 + pick(1000) : pick(8000));
    p->byte_ns[i] = (uint32_t)(pick(2) ? 10 : pick(2000));
  }
}

static void add_fault(plan *p, uint64_t lasts, fault_kind kind) {
  if (p->faults == FAULTS) return;
  fault *x = &p->fault[p->faults++];
  x->kind = kind;
  x->at_us = 1000 + pick(lasts);
  x->for_us = pick(3) ? pick(600000) : pick(5000000);
  x->which = (int)pick(3);
  if (kind == STOP) x->which %= 2;
  x->path = (int)pick((uint64_t)p->paths);
  if (kind != STOP && p->immune >= 0 && x->path == p->immune) {
    if (p->paths == 1) p->faults--;
    else x->path = (p->immune + 1) % p->paths;
  }
}

static void pick_faults(plan *p, uint64_t lasts, const fault_kind *kinds, int count, int most) {
  int faults = (int)(1 + pick((uint64_t)most));
  for (int i = 0; i < faults; i++) add_fault(p, lasts, kinds[pick((uint64_t)count)]);
}

static void cut_all(plan *p, uint64_t lasts) { // all ways of all paths at about the same time
  uint64_t at = pick(lasts), length = pick(2) ? 1000000 + pick(3000000) : 20000000;
  for (int i = 0; i < p->paths && p->faults < FAULTS; i++)
    p->fault[p->faults++] =
        (fault){.at_us = at + pick(100000), .for_us = length, .kind = BLACKHOLE, .path = i, .which = 2};
}

static plan plan_of(uint64_t seed) {
  static const char *const names[] = {"quiet", "one path is immune", "faults", "stops", "stops and faults",
                                      "corruption", "closing early", "aborting", "giving up", "bursts", "flaps",
                                      "slow"};
  static const fault_kind any[] = {BLACKHOLE, BREAK, BREAK, STOP, BLACKHOLE, SLOW};
  static const uint64_t spans[] = {30000, 300000, 3000000};
  plan_random = seed * 0x9e3779b97f4a7c15ull + 77;
  int kind = (int)pick(12);
  uint64_t lasts = spans[pick(3)];
  plan p = {.name = names[kind], .closer = -1, .immune = -1, .until_us = 120000000, .rules = rules};
  p.paths = (int)(1 + pick(NP_MAX_PATHS));
  p.checked = kind == 5 || !pick(3);
  pick_limits(&p);
  if (kind == 9) lasts = 6000000;
  pick_traffic(&p, lasts);
  if (kind == 1 || kind == 9 || !pick(3)) p.immune = (int)pick((uint64_t)p.paths);
  if (kind == 1 || kind == 2 || kind >= 6) pick_faults(&p, lasts, any, 2 + (int)pick(2), kind < 6 ? 8 : 3);
  if (kind == 3) {
    pick_faults(&p, lasts, any + 3, 1, 4);
    // Always the same: who is stopped while it connects anew to one that was stopped comes too late.
    for (int i = 1; i < p.faults; i++) p.fault[i].which = p.fault[0].which;
    p.no_loss = 1;
  }
  if (kind == 4) pick_faults(&p, lasts, any, 5, 8);
  if (kind == 5) {
    static const fault_kind some[] = {CORRUPT, CORRUPT, SLOW, BLACKHOLE, BREAK};
    pick_faults(&p, lasts, some, 3 + (int)pick(3), 8);
  }
  if (kind == 6 || kind == 7) {
    p.closer = (int)pick(2);
    p.closes_us = pick(lasts);
    p.aborts = kind == 7;
  }
  if (kind == 8) {
    p.limits.giveup_us = 1000000 + pick(2000000);
    cut_all(&p, lasts);
  }
  if (kind == 9) pick_faults(&p, lasts, any, 1, 3);
  if (kind == 10) pick_faults(&p, lasts, any + 1, 1, 15);
  if (kind == 11) pick_faults(&p, lasts, any, 6, 5);
  return p;
}

static void pick_messages(const plan *p) {
  for (int i = 0; i < MESSAGES; i++) {
    message *m = &w.message[i];
    uint32_t chunk = p->limits.chunk;
    uint32_t some[] = {0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk, (uint32_t)pick(p->size_most + 1), p->size_most};
    m->size = some[pick(8)];
    m->room = m->size;
    if (!pick(4)) m->room += (uint32_t)pick(4 * chunk);
    if (!pick(40) && m->size) m->room = (uint32_t)pick(m->size); // the users do not agree
  }
}

// ---------------------------------------------------------------- seeds

typedef struct {
  uint64_t silent, probes, fillers, corrupted, again, duplicates, gave_up, stall, messages;
} reached;

static reached sum;

static void count(void) {
  for (int end = 0; end < 2; end++) {
    const terminal *t = &w.end[end];
    sum.silent += t->silent_losses;
    sum.probes += t->probes;
    sum.gave_up += t->flow.failed;
    for (int i = 0; i < w.plan.paths; i++) {
      sum.again += t->flow.path[i].sent_again;
      sum.duplicates += t->flow.path[i].duplicates;
    }
  }
  sum.fillers += w.fillers;
  sum.corrupted += w.corrupted;
  sum.messages += (uint64_t)w.posted[RECEIVER];
  if (w.longest_stall > sum.stall) sum.stall = w.longest_stall;
}

static int run_seed(uint64_t seed, int story) {
  plan p = plan_of(seed);
  if (story)
    printf("seed %llu: %s, %d paths, %d messages, chunks of %u bytes, window %u\n", (unsigned long long)seed, p.name,
           p.paths, p.messages, p.limits.chunk, p.limits.window);
  world_begin(&p, seed, story);
  pick_messages(&p);
  violation[0] = 0;
  if (!setjmp(over)) world_run();
  if (!violation[0]) count();
  world_end();
  if (violation[0]) printf("seed %llu, at %.3f ms: %s\n", (unsigned long long)seed, (double)w.now / 1000, violation);
  return !violation[0];
}

static int run_seeds(uint64_t from, uint64_t seeds) {
  for (uint64_t seed = from; seed < from + seeds; seed++)
    if (!run_seed(seed, 0)) {
      run_seed(seed, 1);
      return 1;
    }
  printf("%llu seeds hold. Messages %llu, chunks sent again %llu, come twice %llu, paths lost by silence %llu, "
         "probes %llu, bits turned %llu, ends that failed %llu, chunks cut short %llu, longest wait with a good path "
         "%.1f ms\n",
         (unsigned long long)seeds, (unsigned long long)sum.messages, (unsigned long long)sum.again,
         (unsigned long long)sum.duplicates, (unsigned long long)sum.silent, (unsigned long long)sum.probes,
         (unsigned long long)sum.corrupted, (unsigned long long)sum.gave_up, (unsigned long long)sum.fillers,
         (double)sum.stall / 1000);
  return 0;
}

int main(int count, char **words) {
  if (count >= 3 && !strcmp(words[1], "--without")) {
    rules &= ~atoi(words[2]);
    words += 2;
    count -= 2;
  }
  if (count == 3 && !strcmp(words[1], "--story")) return !run_seed(strtoull(words[2], NULL, 10), 1);
  if (count == 3) return run_seeds(strtoull(words[1], NULL, 10), strtoull(words[2], NULL, 10));
  fprintf(stderr, "proto_world [--without RULE] FROM COUNT, or proto_world [--without RULE] --story SEED\n");
  return 2;
}
