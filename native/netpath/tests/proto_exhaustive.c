// Proto exhaustive: every state that two messages of two chunks over two paths can come to, with faults at every place
// where they can happen, and steps taken out of turn. There is no time here.
//
//   proto_exhaustive FAULTS LATE    so many faults at most, and so many steps that are passed over for a later one
//
// A chunk is written in two halves, and read in two halves, as anything may happen between them. A fault is: a
// connection breaks, and both ends notice it when they notice it; the sender mistrusts a path that is well, or finds it
// slow; an end closes early, or aborts.

#include <setjmp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../core/proto.h"

enum { PATHS = 2, MESSAGES = 2, CHUNK = 2, ROOM = 4, QUEUE = 3, DEEPEST = 4000, SENDER = 0, RECEIVER = 1 };

enum { // of a flow, all but the slots that are not used
  BEFORE_SLOTS = offsetof(flow, slot) + MESSAGES * sizeof(flow_slot),
  SLOTS_END = offsetof(flow, slot) + NP_MAX_REQUESTS * sizeof(flow_slot),
  AFTER_SLOTS = sizeof(flow) - SLOTS_END,
};

static uint32_t size_of[MESSAGES] = {4, 3};

typedef struct { // a frame that is on its way; of a chunk perhaps only the first half
  frame header;
  uint8_t data[CHUNK], halves, welcome;
} letter;

typedef struct {
  letter letter[2][QUEUE]; // [SENDER]: what the sender wrote
  uint8_t count[2], cut, greeting;
  uint8_t reading, clean; // the receiver has the first half of the first letter
  uint16_t epoch;
} connection;

typedef struct {
  uint8_t sent[MESSAGES][ROOM], got[MESSAGES][ROOM], faults, late;
  uint8_t posted[2], closed[2], aborted[2], gone[2];
  uint8_t fate[2][MESSAGES]; // 1: open, 2: done, 3: failed
  connection connection[PATHS];
  uint8_t flow[2][BEFORE_SLOTS + AFTER_SLOTS];
} state;

static flow flows[2];
static state now; // but for its flows, which are in `flows`
static jmp_buf over;
static const char *trail[DEEPEST];
static state *stack[DEEPEST]; // what to go back to
static int deep;
static uint64_t states, moves;

static void wrong(const char *what) {
  printf("after %llu states: %s\n", (unsigned long long)states, what);
  for (int i = 0; i < deep; i++) printf("  %s\n", trail[i]);
  longjmp(over, 1);
}

// ---------------------------------------------------------------- states

static void keep(state *into) {
  *into = now;
  for (int end = 0; end < 2; end++) {
    memcpy(into->flow[end], &flows[end], BEFORE_SLOTS);
    memcpy(into->flow[end] + BEFORE_SLOTS, (uint8_t *)&flows[end] + SLOTS_END, AFTER_SLOTS);
  }
}

static void back_to(const state *from) {
  now = *from;
  for (int end = 0; end < 2; end++) {
    memcpy(&flows[end], from->flow[end], BEFORE_SLOTS);
    memcpy((uint8_t *)&flows[end] + SLOTS_END, from->flow[end] + BEFORE_SLOTS, AFTER_SLOTS);
  }
}

static uint8_t key[2048];
static size_t key_size;

static void add(uint64_t value, int bytes) {
  for (int i = 0; i < bytes; i++) key[key_size++] = (uint8_t)(value >> 8 * i);
}

static void add_flow(const flow *f) {
  add(f->posted | f->allowed << 3 | f->tail << 6, 2);
  add((uint64_t)(f->closing | f->peer_closed << 1 | f->failed << 2 | f->peer_knows << 3), 1);
  add(f->peer_end, 1);
  for (int i = 0; i < PATHS; i++) {
    const flow_path *p = &f->path[i];
    add((uint64_t)(p->live | p->suspect << 1 | p->slow << 2 | p->ack_due << 3 | p->cts_due << 4 | p->bye_due << 5), 1);
    add(p->downs_due | (uint64_t)(p->lost_epoch[!i] << 4), 2);
    add(p->epoch, 1);
    if (!p->live) continue;
    uint64_t hedged = p->hedged > p->acknowledged ? p->hedged - p->acknowledged : 0;
    add(p->acknowledged | p->arrived << 8 | hedged << 16 | (uint64_t)p->count << 24, 4);
    for (uint32_t k = 0; k < p->count; k++) {
      const flow_chunk *chunk = &p->fifo[(p->first + k) % FIFO];
      add(chunk->seq << 4 | chunk->offset, 1);
    }
  }
  for (int i = 0; i < MESSAGES; i++) {
    const flow_slot *slot = &f->slot[i];
    add(slot->state, 1);
    if (slot->state == SLOT_OPEN) add(slot->have[0] | slot->given[0] << 3 | (uint64_t)slot->begun << 6 |
                                          (uint64_t)slot->next << 8 | (uint64_t)slot->first_time << 12, 2);
  }
}

static void add_connection(const connection *c) {
  add((uint64_t)(c->cut | c->greeting << 1 | c->reading << 2 | c->clean << 3) | (uint64_t)c->epoch << 4, 2);
  for (int k = 0; k < 2; k++) {
    add(c->count[k], 1);
    for (int i = 0; i < c->count[k]; i++) {
      const letter *l = &c->letter[k][i];
      add(l->header.type | (uint64_t)(l->halves << 4 | l->welcome << 6), 1);
      add(l->header.seq | l->header.offset << 4, 1);
      add((uint64_t)(l->header.epoch | l->header.path << 7), 1);
      if (l->header.type == DATA) add((uint64_t)(l->data[0] | l->data[1] << 8), 2);
    }
  }
}

static uint64_t fingerprint(void) {
  key_size = 0;
  add(now.faults | (uint64_t)now.late << 4, 1);
  for (int end = 0; end < 2; end++) {
    add((uint64_t)(now.posted[end] | now.closed[end] << 2 | now.gone[end] << 3 | now.aborted[end] << 4), 1);
    for (int i = 0; i < MESSAGES; i++) add(now.fate[end][i], 1);
    add_flow(&flows[end]);
  }
  for (int i = 0; i < MESSAGES; i++)
    for (int k = 0; k < ROOM; k++) add(now.got[i][k], 1);
  for (int i = 0; i < PATHS; i++) add_connection(&now.connection[i]);
  uint64_t hash = 0x9e3779b97f4a7c15ull;
  for (size_t i = 0; i < key_size; i++) {
    hash = (hash ^ key[i]) * 0x100000001b3ull;
    hash ^= hash >> 29;
  }
  return hash ? hash : 1;
}

static uint64_t *seen, seen_room;

static int is_new(uint64_t hash) {
  if (states * 2 >= seen_room) { // twice as much room
    uint64_t *old = seen, old_room = seen_room;
    seen_room = old_room ? old_room * 2 : 1 << 20;
    seen = calloc(seen_room, sizeof *seen);
    if (!seen) wrong("there is no memory for more states");
    for (uint64_t i = 0; i < old_room; i++) {
      if (!old[i]) continue;
      uint64_t at = old[i] % seen_room;
      while (seen[at]) at = (at + 1) % seen_room;
      seen[at] = old[i];
    }
    free(old);
  }
  uint64_t at = hash % seen_room;
  for (; seen[at]; at = (at + 1) % seen_room)
    if (seen[at] == hash) return 0;
  seen[at] = hash;
  states++;
  return 1;
}

// ---------------------------------------------------------------- what must be true

static void check_memory(int message) {
  for (uint32_t i = 0; i < size_of[message]; i++)
    if (now.got[message][i] != now.sent[message][i]) wrong("a message has come, with a wrong byte");
}

static void conclude(int end) {
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

static void check_flows(void) {
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
static void all_write(int first) {
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

// ---------------------------------------------------------------- all of it

typedef struct {
  const char *name;
  int (*happens)(int);
  int which, fault;
} move;

static int writes_0(int p) { return writes_half(SENDER, p); }
static int reads_0(int p) { return reads(SENDER, p); }
static int reads_1(int p) { return reads(RECEIVER, p); }
static int notices_0(int p) { return notices(SENDER, p); }
static int notices_1(int p) { return notices(RECEIVER, p); }

static const move MOVES[] = {
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

static int step(const move *m, int first) {
  if (m->fault && !now.faults) return 0;
  if (!m->happens(m->which)) return 0;
  now.faults -= m->fault != 0;
  all_write(first);
  for (int end = 0; end < 2; end++) conclude(end);
  check_flows();
  moves++;
  return 1;
}

static void explore(void) {
  if (!is_new(fingerprint())) return;
  if (deep == DEEPEST) wrong("it does not come to an end");
  if (!stack[deep] && !(stack[deep] = malloc(sizeof **stack))) wrong("there is no memory to go on");
  state *here = stack[deep];
  keep(here);
  int enabled = 0;
  for (unsigned i = 0; i < 2 * sizeof MOVES / sizeof MOVES[0]; i++) {
    const move *m = &MOVES[i / 2];
    trail[deep++] = m->name;
    int cost = m->fault ? 0 : enabled;
    int moved = cost <= here->late && step(m, i % 2);
    if (moved) {
      now.late -= (uint8_t)cost;
      explore();
    }
    if (moved || m->fault) back_to(here);
    if (moved && !m->fault && i % 2) enabled++;
    deep--;
  }
  if (!enabled && !(now.gone[SENDER] && now.gone[RECEIVER])) wrong("nothing more happens, and not all is over");
}

static int run(int faults, int late, uint32_t first, uint32_t second) {
  flow_limits limits = {CHUNK, 2 * CHUNK, 50000, 100000, 250000, 0};
  memset(&now, 0, sizeof now);
  size_of[0] = first;
  size_of[1] = second;
  for (int i = 0; i < MESSAGES; i++)
    for (int k = 0; k < ROOM; k++) now.sent[i][k] = (uint8_t)(16 * i + k + 1);
  now.faults = (uint8_t)faults;
  now.late = (uint8_t)late;
  deep = 0;
  states = moves = 0;
  if (seen) memset(seen, 0, seen_room * sizeof *seen);
  for (int end = 0; end < 2; end++) flow_init(&flows[end], end == SENDER, PATHS, 0, &limits);
  for (int i = 0; i < PATHS; i++) now.connection[i].cut = 1;
  if (setjmp(over)) return 1;
  explore();
  printf("messages of %u and %u bytes, %d faults, %d steps late: %llu states, %llu moves\n", first, second, faults,
         late, (unsigned long long)states, (unsigned long long)moves);
  return 0;
}

int main(int count, char **words) {
  if (count != 3) {
    fprintf(stderr, "proto_exhaustive FAULTS LATE\n");
    return 2;
  }
  int faults = atoi(words[1]), late = atoi(words[2]);
  int failed = run(faults, late, 4, 3) || run(faults, late, 0, 4);
  free(seen);
  for (int i = 0; i < DEEPEST; i++) free(stack[i]);
  return failed;
}
