// Silence: what time tells a flow. When it listens, when it asks, and which paths are suspect, slow or lost.

#include "proto.h"
#include "silence.h"

// ---------------------------------------------------------------- when it listens

// Another path has spoken since this one has missed three pings of those that go while nobody waits.
static int missed(const flow *f, const flow_path *p) {
  for (int i = 0; i < f->paths; i++)
    if (f->path[i].live && f->path[i].heard_us >= p->heard_us + 60ull * f->limits.ping_us) return 1;
  return 0;
}

// A path that is suspect, or has not said what has come, is listened to until it speaks or is lost, though nobody
// waits: else one that is blocked would never be found out by a job that communicates now and then, for less than
// dead_us. Nor would one that its short messages never need.
int flow_watches(const flow *f) {
  if (flow_busy(f) || f->closing) return 1;
  for (int i = 0; i < f->paths; i++) {
    const flow_path *p = &f->path[i];
    if (p->live && (p->suspect || p->deaf_us || p->count || missed(f, p))) return 1;
  }
  return 0;
}

// ---------------------------------------------------------------- what it hears

static uint64_t silence(const flow *f, const flow_path *p, uint64_t now) {
  uint64_t since = p->heard_us > f->busy_us ? p->heard_us : f->busy_us;
  return now > since ? now - since : 0;
}

// Lately: if all fall silent at once, none of them is heard any more when the first has been silent for too long.
static int others_are_heard(const flow *f, int path, uint64_t now) {
  uint64_t lately = f->limits.suspect_us < f->limits.dead_us / 2 ? f->limits.suspect_us : f->limits.dead_us / 2;
  for (int i = 0; i < f->paths; i++)
    if (i != path && f->path[i].live && silence(f, &f->path[i], now) < lately) return 1;
  return 0;
}

// How long the oldest chunk of a path is under way.
static uint64_t age(const flow_path *p, uint64_t now) { return p->count ? now - p->fifo[p->first].given_us : 0; }

// Bytes come and go, but chunks get through over other paths only.
static int gets_nowhere(const flow *f, int path, uint64_t now) {
  if (age(&f->path[path], now) < f->limits.dead_us) return 0;
  for (int i = 0; i < f->paths; i++) {
    const flow_path *other = &f->path[i];
    if (i == path || !other->live || other->suspect || other->slow) continue;
    if (age(other, now) < f->limits.suspect_us) return 1;
  }
  return 0;
}

static void tick_path(flow *f, int path, uint64_t now, flow_verdict *verdict) {
  flow_path *p = &f->path[path];
  uint64_t silent = silence(f, p, now);
  uint64_t ping_us = flow_watches(f) ? f->limits.ping_us : 20 * f->limits.ping_us;
  if (now - p->sent_us >= ping_us) {
    p->ping_due = 1;
    p->cts_due |= !f->sends;
    p->sent_us = now;
  }
  if (!flow_watches(f)) return;
  int others = others_are_heard(f, path, now);
  // A peer that heard nothing while we were stopped is answered first.
  if (p->deaf_us && now - f->busy_us >= f->limits.suspect_us) verdict->probe |= (uint8_t)(1u << path);
  if (silent >= f->limits.dead_us) {
    if (!p->silent && !f->sends) {
      p->downs_due |= (uint8_t)(1u << path);
      p->lost_epoch[path] = p->epoch;
    }
    p->silent = 1;
    // A peer that was stopped speaks over one path first: what it says over the others has as much time as ever.
    if (others && now - f->apart_us >= f->limits.dead_us) verdict->lost |= (uint8_t)(1u << path);
    else verdict->probe |= (uint8_t)(1u << path);
  }
  // Who was silent for so long and was lately spoken to is suspect; others get its chunks, if there are others.
  if (silent >= f->limits.suspect_us && others) {
    p->suspect = 1;
    let_others_take(f, p);
  }
  if (gets_nowhere(f, path, now)) {
    p->slow = 1;
    let_others_take(f, p);
  }
}

static const uint64_t SELDOM_US = 125000; // more than what lies between two ticks while nobody waits

// Who was stopped has heard nothing, and that proves nothing.
static int has_slept(const flow *f, uint64_t now) {
  return f->ticked_us && now - f->ticked_us >= f->limits.dead_us / 2 + (f->watched ? 0 : SELDOM_US);
}

int flow_was_stopped(const flow *f, uint64_t now) {
  return has_slept(f, now) || (f->woke_us && now - f->woke_us < f->limits.suspect_us);
}

flow_verdict flow_tick(flow *f, uint64_t now) {
  flow_verdict verdict = {0};
  int heard = 0;
  int watches = flow_watches(f);
  int stopped = has_slept(f, now);
  if (stopped) f->woke_us = now;
  if (!f->watched || stopped) f->busy_us = now;
  f->watched = (uint8_t)watches;
  f->ticked_us = now;
  if (!others_are_heard(f, -1, now)) f->apart_us = now;
  for (int i = 0; i < f->paths; i++) {
    if (!f->path[i].live) continue;
    tick_path(f, i, now, &verdict);
    heard |= !f->path[i].silent;
  }
  if (heard || !flow_busy(f)) {
    f->cut_us = 0;
    return verdict;
  }
  f->unreachable = 1;
  if (!f->cut_us) f->cut_us = now;
  if (f->limits.giveup_us && now - f->cut_us >= f->limits.giveup_us && !f->failed) {
    flow_fail(f);
    verdict.failed = 1;
  }
  return verdict;
}
