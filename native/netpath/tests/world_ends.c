// World ends: how the two ends of a simulated world (see world.h) connect, tick, lose connections and close.

#include <string.h>

#include "world.h"

enum { TICK_US = 10000, IDLE_TICK_US = 100000, ATTEMPT_US = 150000, LINGER_US = 10000000 };

// ---------------------------------------------------------------- losing

static void try_later(int end, int path) {
  terminal *t = &w.end[end];
  uint32_t most = flow_busy(&t->flow) ? 80 : 1000, pause = t->pause_ms[path] < most ? t->pause_ms[path] : most;
  t->retry_us[path] = w.now + pause * 1000ull;
  t->pause_ms[path] = pause * 2;
}

void lose(int end, int of, const char *why) {
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

void arrive(int of) { // by the kernel: a process that is stopped is connected to as well
  link *c = &w.link[of];
  c->side[RECEIVER].state = SIDE_ACCEPTED;
  c->side[RECEIVER].since_us = w.now;
  if (!w.blackhole[c->path][RECEIVER]) plan_event(w.now + delay_of(c->path), E_CONNECTED, SENDER, 0, of);
}

void greet(int of) {
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
    int woken = flow_was_stopped(&t->flow, w.now) && w.plan.rules & RULE_WOKEN;
    if ((older && w.plan.rules & RULE_NO_OLDER) || ((alive || woken) && w.plan.rules & RULE_ALIVE)) {
      refuse(of, REFUSE_ALIVE);
      return;
    }
  }
  judge_replaced(of);
  send_frame(&c->side[RECEIVER], c, WELCOME, 0);
  go_live(RECEIVER, of);
  pump(RECEIVER);
}

void heard_early(int end, int of, const frame *in) {
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

void tick(int end) {
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
