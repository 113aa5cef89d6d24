// Small moves: what may happen in the small world (see small.h), and what must be true after it.

#include <string.h>

#include "small.h"

uint32_t size_of[MESSAGES] = {4, 3};

// ---------------------------------------------------------------- what must be true

static void check_memory(int message) {
  for (uint32_t i = 0; i < size_of[message]; i++)
    if (now.got[message][i] != now.sent[message][i]) wrong("a message has come, with a wrong byte");
}

void conclude(int end) {
  for (int i = 0; i < now.posted[end]; i++) {
    flow_slot *slot = &flows[end].slot[i];
    if (now.fate[end][i] != 1 || slot->state == SLOT_OPEN) continue;
    int done = slot->state == SLOT_DONE;
    if (done && end == RECEIVER) check_memory(i);
    if (done && end == RECEIVER && slot->size != size_of[i]) wrong("a message has come, with a wrong size");
    int peer_left = now.closed[!end] || now.aborted[!end] || now.aborted[end] || now.closed[end];
    if (done && end == SENDER && now.fate[RECEIVER][i] != 2 && flows[RECEIVER].slot[i].state != SLOT_DONE &&
        !now.closed[RECEIVER] && !now.aborted[RECEIVER])
      wrong("a send is done, and its message has not come");
    if (!done && !peer_left) wrong("a request fails, and nobody has left");
    if (!done && end == RECEIVER && now.fate[SENDER][i] == 2 && !now.aborted[RECEIVER])
      wrong("what was sent and said to have come fails");
    now.fate[end][i] = done ? 2 : 3;
    flow_release(&flows[end], slot);
  }
}

static int carried(uint64_t seq, uint32_t offset) {
  for (int i = 0; i < PATHS; i++) {
    const flow_path *p = &flows[SENDER].path[i];
    uint32_t at = p->hedged > p->acknowledged ? (uint32_t)(p->hedged - p->acknowledged) : 0;
    for (; p->live && at < p->count; at++)
      if (p->fifo[(p->first + at) % FIFO].seq == seq && p->fifo[(p->first + at) % FIFO].offset == offset) return 1;
  }
  return 0;
}

void check_flows(void) {
  if (flows[SENDER].allowed > flows[RECEIVER].posted) wrong("the sender may send more than was asked for");
  for (uint64_t seq = 0; seq < MESSAGES; seq++) {
    const flow_slot *slot = &flows[SENDER].slot[seq];
    if (slot->state != SLOT_OPEN) continue;
    if (seq < flows[SENDER].tail) wrong("an open message is before the oldest");
    for (uint32_t i = 0; i < 2; i++) {
      int have = slot->have[0] >> i & 1, given = slot->given[0] >> i & 1;
      if (given && !have && !carried(seq, i * CHUNK)) wrong("a chunk was given to a path, and no path has it");
      if (!given && !have && i < slot->next) wrong("a chunk was passed over");
    }
  }
  if (flows[RECEIVER].peer_closed && flow_busy(&flows[RECEIVER])) wrong("the receiver waits for one that has closed");
}

// ---------------------------------------------------------------- what may happen

static void cut(int path) {
  connection *c = &now.connection[path];
  c->cut = 1;
  c->greeting = 0;
  c->count[SENDER] = c->count[RECEIVER] = c->reading = 0;
}

static int has(int end, int path) { // the end takes the connection for the path's
  const flow_path *p = &flows[end].path[path];
  return p->live && p->epoch == now.connection[path].epoch && !now.gone[end];
}

static void lose(int end, int path) {
  if (!flows[end].path[path].live) return;
  flow_down(&flows[end], path, 0);
  cut(path);
}

static letter *unfinished(int end, int path) { // the chunk of which only the first half is written
  connection *c = &now.connection[path];
  if (c->cut || !has(end, path) || !c->count[end]) return NULL;
  letter *last = &c->letter[end][c->count[end] - 1];
  return last->halves == 1 ? last : NULL;
}

static int writes_half(int end, int path) {
  letter *l = unfinished(end, path);
  flow *f = &flows[end];
  if (!l) return 0;
  if (flow_wanted(f, &l->header)) {
    for (uint32_t i = 1; i < l->header.length; i++) l->data[i] = now.sent[l->header.seq][l->header.offset + i];
  } else if (f->closing || f->failed) {
    lose(end, path);
    return 1;
  } else {
    l->data[1] = 0xee;
  }
  l->halves = 2;
  return 1;
}

static int writes(int end, int path) {
  connection *c = &now.connection[path];
  uint8_t *count = &c->count[end];
  flow_frame next;
  if (c->cut || !has(end, path) || *count == QUEUE || unfinished(end, path)) return 0;
  if (!flow_next(&flows[end], path, 0, &next)) return 0;
  letter *l = &c->letter[end][(*count)++];
  int data = next.header.type == DATA && next.header.length;
  *l = (letter){.header = next.header, .halves = data ? 1 : 2};
  if (data) l->data[0] = next.data[0];
  return 1;
}

// Whoever can write does so at once; of the sender's paths this one first.
void all_write(int first) {
  for (int some = 1; some;) {
    some = 0;
    for (int i = 0; i < PATHS; i++) {
      while (writes(SENDER, first ^ i)) some = 1;
      while (writes(RECEIVER, i)) some = 1;
    }
  }
}

static void take_off(connection *c, int k) {
  c->count[k]--;
  memmove(&c->letter[k][0], &c->letter[k][1], c->count[k] * sizeof c->letter[k][0]);
  memset(&c->letter[k][c->count[k]], 0, sizeof c->letter[k][0]);
}

static void write_half(const letter *l, uint8_t *target, int half) {
  uint32_t from = half ? 1 : 0, to = half ? l->header.length : 1;
  for (uint32_t i = from; i < to && i < l->header.length; i++) {
    if (now.fate[RECEIVER][l->header.seq] != 1) wrong("memory is written to that is not outstanding");
    target[i] = l->data[i];
  }
}

static int reads_chunk(int path) {
  connection *c = &now.connection[path];
  letter *l = &c->letter[SENDER][0];
  if (c->reading && l->halves == 1) return 0;
  if (!c->reading && !flow_accepts(&flows[RECEIVER], &l->header)) wrong("a chunk breaks the rules");
  uint8_t *target = flow_target(&flows[RECEIVER], &l->header);
  flow_alive(&flows[RECEIVER], path, 0);
  if (!c->reading && l->header.length) {
    c->reading = 1;
    c->clean = target != NULL;
    if (target) write_half(l, target, 0);
    return 1;
  }
  if (target && l->header.length && !c->clean) wrong("what was not wanted is wanted again");
  if (target && l->header.length) write_half(l, target, 1);
  flow_arrived(&flows[RECEIVER], path, &l->header, 0);
  c->reading = 0;
  take_off(c, SENDER);
  return 1;
}

static int reads(int end, int path) {
  connection *c = &now.connection[path];
  if (c->cut || !c->count[!end]) return 0;
  letter l = c->letter[!end][0];
  if (end == SENDER && l.welcome) {
    flow_up(&flows[SENDER], path, c->epoch, 0);
    c->greeting = 0;
    take_off(c, RECEIVER);
    return 1;
  }
  if (!has(end, path)) return 0;
  if (l.header.type == DATA) return reads_chunk(path);
  int lost;
  take_off(c, !end);
  if (!flow_heard(&flows[end], path, &l.header, 0, &lost)) wrong("a frame breaks the rules");
  if (lost >= 0) lose(end, lost);
  return 1;
}

// A connection that is cut, or whose other end has gone and said all: this end notices.
static int notices(int end, int path) {
  connection *c = &now.connection[path];
  if (!flows[end].path[path].live || now.gone[end]) return 0;
  const letter *first = &c->letter[!end][0];
  int left = now.gone[!end] && (!c->count[!end] || (first->halves == 1 && c->reading)); // there is no other half
  if (has(end, path) && !c->cut && !left) return 0;
  if (!has(end, path) && !c->cut) { // it was replaced
    flow_down(&flows[end], path, 0);
    return 1;
  }
  lose(end, path);
  return 1;
}

static int connects(int path) {
  connection *c = &now.connection[path];
  if (flows[SENDER].path[path].live || c->greeting || now.gone[SENDER]) return 0;
  if (now.gone[RECEIVER]) { // refused: the receiver is gone
    if (flows[SENDER].closing) now.gone[SENDER] = 1;
    else if (flows[SENDER].failed) return 0;
    else flow_fail(&flows[SENDER]);
    return 1;
  }
  cut(path);
  c->cut = 0;
  c->epoch++;
  c->greeting = 1;
  if (flows[RECEIVER].path[path].live) flow_down(&flows[RECEIVER], path, 0);
  flow_up(&flows[RECEIVER], path, c->epoch, 0);
  c->letter[RECEIVER][0] = (letter){.welcome = 1, .halves = 2};
  c->count[RECEIVER] = 1;
  return 1;
}

static int posts(int end) {
  int i = now.posted[end];
  if (i == MESSAGES || now.closed[end] || flows[end].failed) return 0;
  uint8_t *memory = end == SENDER ? now.sent[i] : now.got[i];
  if (!flow_post(&flows[end], memory, end == SENDER ? size_of[i] : ROOM, 0)) wrong("there is no slot");
  now.posted[end]++;
  now.fate[end][i] = 1;
  return 1;
}

static void close_end(int end) {
  for (int i = 0; i < MESSAGES; i++)
    if (now.fate[end][i] == 1) now.fate[end][i] = 3;
  flow_close(&flows[end]);
  now.closed[end] = 1;
}

static int closes(int end) {
  if (now.closed[end] || (now.posted[end] < MESSAGES && !flows[end].failed)) return 0;
  for (int i = 0; i < MESSAGES; i++)
    if (now.fate[end][i] == 1) return 0;
  close_end(end);
  return 1;
}

static int goes(int end) {
  if (now.gone[end] || !now.closed[end] || !flow_finished(&flows[end])) return 0;
  now.gone[end] = 1;
  return 1;
}

// A path that was mistrusted and is well is heard of again, sooner or later.
static int is_trusted(int path) {
  flow_path *p = &flows[SENDER].path[path];
  if (!p->suspect || now.connection[path].cut || !has(SENDER, path)) return 0;
  flow_alive(&flows[SENDER], path, 0);
  return 1;
}

// ---------------------------------------------------------------- faults

static int breaks(int path) {
  connection *c = &now.connection[path];
  if (c->cut || (!has(SENDER, path) && !has(RECEIVER, path) && !c->greeting)) return 0;
  cut(path);
  return 1;
}

static void tick_with(int path, uint64_t heard_us, uint64_t given_us) {
  flow *f = &flows[SENDER];
  uint64_t at = 1000000;
  for (int i = 0; i < PATHS; i++) {
    f->path[i].heard_us = i == path ? heard_us : at;
    for (int k = 0; k < FIFO; k++) f->path[i].fifo[k].given_us = i == path ? given_us : at;
  }
  f->busy_us = f->apart_us = f->cut_us = 0;
  f->ticked_us = at - 1;
  f->watched = 1;
  flow_tick(f, at);
  for (int i = 0; i < PATHS; i++) {
    f->path[i].ping_due = 0;
    f->path[i].silent = 0;
    f->path[i].sent_us = 0;
  }
}

static int is_mistrusted(int path) {
  if (!flows[SENDER].path[path].live || flows[SENDER].path[path].suspect || now.gone[SENDER]) return 0;
  tick_with(path, 1000000 - 100000, 1000000);
  return flows[SENDER].path[path].suspect;
}

static int is_slow(int path) {
  const flow_path *p = &flows[SENDER].path[path];
  if (!p->live || !p->count || p->slow || now.gone[SENDER]) return 0;
  tick_with(path, 1000000, 0);
  return p->slow;
}

static int closes_early(int end) {
  if (now.closed[end]) return 0;
  close_end(end);
  return 1;
}

static int aborts(int end) {
  if (now.closed[end] || flows[end].failed) return 0;
  now.aborted[end] = 1;
  flow_fail(&flows[end]);
  return 1;
}

// ---------------------------------------------------------------- all of them

static int writes_0(int p) { return writes_half(SENDER, p); }
static int reads_0(int p) { return reads(SENDER, p); }
static int reads_1(int p) { return reads(RECEIVER, p); }
static int notices_0(int p) { return notices(SENDER, p); }
static int notices_1(int p) { return notices(RECEIVER, p); }

const move MOVES[] = {
    {"sender connects path 0", connects, 0, 0},
    {"sender connects path 1", connects, 1, 0},
    {"sender notices the end of path 0", notices_0, 0, 0},
    {"sender notices the end of path 1", notices_0, 1, 0},
    {"receiver notices the end of path 0", notices_1, 0, 0},
    {"receiver notices the end of path 1", notices_1, 1, 0},
    {"receiver posts", posts, RECEIVER, 0},
    {"sender posts", posts, SENDER, 0},
    {"sender writes the other half on path 0", writes_0, 0, 0},
    {"sender writes the other half on path 1", writes_0, 1, 0},
    {"receiver reads from path 0", reads_1, 0, 0},
    {"sender reads from path 0", reads_0, 0, 0},
    {"receiver reads from path 1", reads_1, 1, 0},
    {"sender reads from path 1", reads_0, 1, 0},
    {"sender trusts path 0", is_trusted, 0, 0},
    {"sender trusts path 1", is_trusted, 1, 0},
    {"sender closes", closes, SENDER, 0},
    {"receiver closes", closes, RECEIVER, 0},
    {"sender goes", goes, SENDER, 0},
    {"receiver goes", goes, RECEIVER, 0},
    {"FAULT path 0 breaks", breaks, 0, 1},
    {"FAULT path 1 breaks", breaks, 1, 1},
    {"FAULT sender mistrusts path 0", is_mistrusted, 0, 1},
    {"FAULT sender mistrusts path 1", is_mistrusted, 1, 1},
    {"FAULT sender finds path 0 slow", is_slow, 0, 1},
    {"FAULT sender closes early", closes_early, SENDER, 1},
    {"FAULT receiver closes early", closes_early, RECEIVER, 1},
    {"FAULT sender aborts", aborts, SENDER, 1},
    {"FAULT receiver aborts", aborts, RECEIVER, 1},
};

const unsigned MOVES_COUNT = sizeof MOVES / sizeof MOVES[0];
