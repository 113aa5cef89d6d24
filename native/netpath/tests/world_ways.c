// World ways: the connections of a simulated world (see world.h): ordered pipes of bytes, which can be cut.

#include <string.h>

#include "world.h"

void plan_carry(int of, int k, uint64_t at) {
  way *y = &w.link[of].way[k];
  if (y->planned || y->stalled) return;
  y->planned = 1;
  plan_event(at > y->slow_us ? at : y->slow_us, E_CARRY, !k, k, of);
}

void way_write(int of, int k, const uint8_t *bytes, uint32_t size) {
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

int link_new(int path) {
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
      if (w.plan.faults && chance(3)) c->way[k].slow_us = w.now + draw(chance(30) ? 3000000 : 300000); // a queue stands
    }
    return i;
  }
  violate("the world has too many connections");
}

int open_side(const link *c, int end) {
  return c->side[end].state != SIDE_NONE && c->side[end].state != SIDE_CLOSED;
}

// The other end learns of it: after what was sent when closed gently, else as soon as the way lets it.
void side_close(int end, int of, int gently) {
  link *c = &w.link[of];
  way *y = &c->way[end];
  c->side[end].state = SIDE_CLOSED;
  if (!open_side(c, !end)) {
    c->used = 0;
    return;
  }
  if (c->cut && chance(30)) return; // nobody will tell
  y->ends = gently ? WAY_CLOSED : WAY_RESET;
  if (!gently && y->count && !y->stalled && !w.blackhole[c->path][end] && chance(50)) y->ends = WAY_RESET_BEHIND;
  if (w.blackhole[c->path][end]) y->stalled = 1;
  else if (y->ends == WAY_RESET || y->count == 0) plan_event(w.now + delay_of(c->path), E_BREAK, !end, 0, of);
}

// Bytes that have come over a way, some or all.
void carry(int of, int k) {
  link *c = &w.link[of];
  way *y = &c->way[k];
  y->planned = 0;
  if (w.blackhole[c->path][k]) {
    y->stalled = 1;
    if (y->ends == WAY_RESET_BEHIND) y->ends = WAY_RESET; // nobody sends again what was lost
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
  if ((y->ends == WAY_CLOSED || y->ends == WAY_RESET_BEHIND) && y->count == 0) plan_event(w.now + 1, E_BREAK, !k, 0, of);
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

void cut_links(int path) {
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
