// Small states: a state of the small world (see small.h), kept, gone back to, and told from those that were seen.

#include <stdlib.h>
#include <string.h>

#include "small.h"

flow flows[2];
state now;
uint64_t states;

void keep(state *into) {
  *into = now;
  for (int end = 0; end < 2; end++) {
    memcpy(into->flow[end], &flows[end], BEFORE_SLOTS);
    memcpy(into->flow[end] + BEFORE_SLOTS, (uint8_t *)&flows[end] + SLOTS_END, AFTER_SLOTS);
  }
}

void back_to(const state *from) {
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

uint64_t fingerprint(void) {
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

int is_new(uint64_t hash) {
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

void forget_all(void) {
  free(seen);
  seen = NULL;
  seen_room = states = 0;
}
