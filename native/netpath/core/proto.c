#include "proto.h"

#include <string.h>

static const uint64_t SPAN_US = 8000; // of a path's deliveries that may be under way: 1 MB at 1 Gb/s

static int chunk_index(const flow *f, uint32_t offset) { return (int)(offset / f->limits.chunk); }

static uint32_t chunks_of(const flow *f, uint32_t size) {
  return size == 0 ? 1 : (uint32_t)(((uint64_t)size + f->limits.chunk - 1) / f->limits.chunk);
}

static int in(const uint64_t *set, int index) { return set[index / 64] >> (index % 64) & 1; }

static void put(uint64_t *set, int index) { set[index / 64] |= 1ull << (index % 64); }

static void drop(uint64_t *set, int index) { set[index / 64] &= ~(1ull << (index % 64)); }

// No message is longer: the sets of chunks have so much room.
static uint32_t longest(const flow *f) {
  uint64_t room = (uint64_t)f->limits.chunk * MAX_CHUNKS;
  return room < NP_MAX_MESSAGE ? (uint32_t)room : NP_MAX_MESSAGE;
}

static flow_slot *slot_of(const flow *f, uint64_t seq) { return (flow_slot *)&f->slot[seq % NP_MAX_REQUESTS]; }

static flow_slot *open_slot(const flow *f, uint64_t seq) {
  flow_slot *slot = slot_of(f, seq);
  return slot->state == SLOT_OPEN && slot->seq == seq ? slot : NULL;
}

// ---------------------------------------------------------------- requests

void flow_init(flow *f, int sends, int paths, int checked, const flow_limits *limits) {
  memset(f, 0, sizeof *f);
  f->sends = sends;
  f->paths = paths;
  f->checked = checked;
  f->limits = *limits;
}

int flow_busy(const flow *f) { return f->tail < f->posted; }

// The peer has closed. Whatever it had not to wait for will not come: a receiver's messages, and a sender's from its
// count on. (What it had asked for it takes still, to say that it came.)
static int too_late(const flow *f, uint64_t seq) { return f->peer_closed && (!f->sends || seq >= f->peer_end); }

static void pass_done(flow *f) {
  while (f->tail < f->posted && !open_slot(f, f->tail)) f->tail++;
}

flow_slot *flow_post(flow *f, void *data, uint32_t size, uint64_t now) {
  flow_slot *slot = slot_of(f, f->posted);
  if (slot->state != SLOT_FREE || size > longest(f)) return NULL;
  (void)now;
  slot->seq = f->posted++;
  slot->data = data;
  slot->size = size;
  slot->next = slot->first_time = 0;
  slot->begun = 0;
  slot->left = f->sends ? chunks_of(f, size) : 0;
  // A longer message than there is room for never begins, so no more than these are looked at.
  size_t used = (chunks_of(f, size) + 63) / 64 * sizeof slot->have[0];
  memset(slot->have, 0, used);
  memset(slot->given, 0, used);
  slot->state = f->failed || too_late(f, slot->seq) ? SLOT_FAILED : SLOT_OPEN;
  pass_done(f);
  if (!f->sends)
    for (int i = 0; i < f->paths; i++) f->path[i].cts_due = 1;
  return slot;
}

void flow_release(flow *f, flow_slot *slot) {
  (void)f;
  slot->state = SLOT_FREE;
}

void flow_fail(flow *f) {
  f->failed = 1;
  for (uint64_t seq = f->tail; seq < f->posted; seq++) {
    flow_slot *slot = open_slot(f, seq);
    if (slot) slot->state = SLOT_FAILED;
  }
  f->tail = f->posted;
}

void flow_close(flow *f) {
  // What was promised to the peer and not received is given up, and so is what it was to be sent.
  for (int i = 0; i < NP_MAX_REQUESTS; i++) f->slot[i].state = SLOT_FREE;
  f->tail = f->posted;
  f->closing = 1;
  for (int i = 0; i < f->paths; i++) f->path[i].bye_due = 1;
}

int flow_finished(const flow *f) {
  if (!f->closing) return 0;
  if (f->sends) return f->peer_knows; // until then its BYE may be lost, and nobody else connects
  if (!f->peer_closed) return 0;      // the sender may still ask for an ACK that was lost with its path
  int live = 0;
  for (int i = 0; i < f->paths; i++) {
    if (f->path[i].live && !f->path[i].bye_due) return 1;
    live |= f->path[i].live;
  }
  return !live;
}

// ---------------------------------------------------------------- paths

// What this path has not delivered, other paths shall take; once for each chunk.
void let_others_take(flow *f, flow_path *p) {
  for (uint32_t i = p->hedged > p->acknowledged ? (uint32_t)(p->hedged - p->acknowledged) : 0; i < p->count; i++) {
    flow_chunk *chunk = &p->fifo[(p->first + i) % FIFO];
    flow_slot *slot = open_slot(f, chunk->seq);
    uint32_t index = (uint32_t)chunk_index(f, chunk->offset);
    if (!slot || in(slot->have, (int)index)) continue;
    drop(slot->given, (int)index);
    if (index < slot->next) slot->next = index;
  }
  p->hedged = p->acknowledged + p->count;
}

void flow_down(flow *f, int path, uint64_t now) {
  flow_path *p = &f->path[path];
  if (!p->live) return;
  (void)now;
  p->live = 0;
  if (!f->peer_closed && !f->closing) p->downs++; // else it ends in peace
  let_others_take(f, p);
  p->count = p->unacknowledged = 0;
  for (int i = 0; i < f->paths; i++) {
    if (i == path || !f->path[i].live) continue;
    f->path[i].downs_due |= (uint8_t)(1u << path);
    f->path[i].lost_epoch[path] = p->epoch;
    f->path[i].cts_due = !f->sends; // the last one may have been lost with the path
  }
}

// Until something is known of the path.
static uint32_t first_window(const flow_limits *limits) {
  uint64_t some = 4ull * limits->chunk > limits->window / 4 ? 4ull * limits->chunk : limits->window / 4;
  return some < limits->window ? (uint32_t)some : limits->window;
}

void flow_up(flow *f, int path, uint16_t epoch, uint64_t now) {
  flow_path *p = &f->path[path];
  flow_down(f, path, now); // what an older connection carried has to go another way
  if (p->epoch) p->ups++;
  p->live = 1;
  p->suspect = p->silent = p->slow = 0;
  p->deaf_us = 0;
  p->hedged = 0;
  p->trial = f->sends && p->epoch;
  p->window = first_window(&f->limits);
  p->least_us = 0;
  p->epoch = epoch;
  p->heard_us = p->sent_us = now;
  p->first = p->count = p->unacknowledged = 0;
  p->acknowledged = p->arrived = 0;
  p->ack_due = p->ping_due = p->pong_due = 0;
  p->downs_due = 0;
  p->cts_due = !f->sends;
  p->bye_due = f->closing || (!f->sends && f->peer_closed);
  f->cut_us = 0;
  f->unreachable = 0;
  if (!f->ticked_us) f->ticked_us = now; // it may be stopped before the first tick
}

// ---------------------------------------------------------------- sending

static int room_in(const flow *f, const flow_path *p) {
  if (p->count == 0) return 1;
  return !p->trial && p->count < FIFO && p->unacknowledged + f->limits.chunk <= p->window;
}

// The first chunk of a message that no path has; its number of chunks if there is none: no bit after the last is ever set.
static uint32_t first_free(const flow *f, flow_slot *slot) {
  uint32_t chunks = chunks_of(f, slot->size);
  while (slot->next < chunks) {
    uint32_t word = slot->next / 64;
    uint64_t free = ~(slot->given[word] | slot->have[word]) & ~0ull << slot->next % 64;
    slot->next = free ? word * 64 + (uint32_t)__builtin_ctzll(free) : (word + 1) * 64;
    if (free) break;
  }
  return slot->next;
}

// The next chunk that a path should send: of the oldest message that the receiver has room for.
static int take(flow *f, uint64_t now, flow_chunk *out, int *repeated) {
  for (uint64_t seq = f->tail; seq < f->posted && seq < f->allowed; seq++) {
    flow_slot *slot = open_slot(f, seq);
    if (!slot) continue;
    uint32_t index = first_free(f, slot);
    if (index == chunks_of(f, slot->size)) continue;
    uint32_t offset = index * f->limits.chunk, left = slot->size - offset;
    uint32_t length = left < f->limits.chunk ? left : f->limits.chunk;
    *out = (flow_chunk){.seq = seq, .offset = offset, .length = length, .given_us = now};
    put(slot->given, (int)index);
    *repeated = index < slot->first_time;
    if (!*repeated) slot->first_time = index + 1;
    slot->next = index + 1;
    return 1;
  }
  return 0;
}

static frame header_of(const flow_path *p, int path, frame_type type, uint64_t seq) {
  return (frame){.magic = WIRE_MAGIC, .type = (uint8_t)type, .path = (uint8_t)path, .epoch = p->epoch, .seq = seq};
}

static int next_control(flow *f, int path, uint64_t now, frame *out) {
  flow_path *p = &f->path[path];
  if (p->downs_due) {
    int lost = __builtin_ctz(p->downs_due);
    p->downs_due &= (uint8_t)(p->downs_due - 1);
    *out = header_of(p, lost, DOWN, 0);
    out->epoch = p->lost_epoch[lost];
  } else if (p->ack_due) {
    p->ack_due = 0;
    *out = header_of(p, path, ACK, p->arrived);
  } else if (p->cts_due) {
    p->cts_due = 0;
    *out = header_of(p, path, CTS, f->posted);
  } else if (p->pong_due) {
    p->pong_due = 0;
    *out = header_of(p, path, PONG, p->pong_time);
  } else if (p->ping_due) {
    p->ping_due = 0;
    *out = header_of(p, path, PING, now);
  } else if (p->bye_due) {
    p->bye_due = 0;
    *out = header_of(p, path, BYE, f->posted);
    out->offset = f->peer_closed;
  } else {
    return 0;
  }
  return 1;
}

int flow_next(flow *f, int path, uint64_t now, flow_frame *out) {
  flow_path *p = &f->path[path];
  if (!p->live) return 0;
  out->data = NULL;
  if (next_control(f, path, now, &out->header)) {
    p->sent_us = now;
    return 1;
  }
  flow_chunk chunk;
  int repeated;
  if (!f->sends || p->suspect || p->slow || !room_in(f, p) || !take(f, now, &chunk, &repeated)) return 0;
  flow_slot *slot = open_slot(f, chunk.seq);
  p->unacknowledged += chunk.length;
  chunk.ahead = p->unacknowledged;
  p->fifo[(p->first + p->count++) % FIFO] = chunk;
  if (p->trial) let_others_take(f, p);
  p->sent_again += (uint64_t)repeated;
  p->sent_bytes += chunk.length;
  p->sent_us = now;
  out->header = header_of(p, path, DATA, chunk.seq);
  out->header.offset = chunk.offset;
  out->header.length = chunk.length;
  out->header.total = slot->size;
  out->data = slot->data + chunk.offset;
  return 1;
}

int flow_wanted(const flow *f, const frame *header) { return open_slot(f, header->seq) != NULL; }

// ---------------------------------------------------------------- hearing

void flow_alive(flow *f, int path, uint64_t now) {
  flow_path *p = &f->path[path];
  p->heard_us = now;
  p->suspect = p->silent = 0;
  p->downs_due &= (uint8_t)~(1u << path);
  f->unreachable = 0;
}

// As many bytes may be under way as the path delivers in SPAN_US and the time that a chunk takes at least. Only what went
// out with the window nearly full tells of that.
static void learn_window(const flow *f, flow_path *p, const flow_chunk *chunk, uint64_t now) {
  uint64_t took = now > chunk->given_us ? now - chunk->given_us : 1;
  uint32_t least = f->limits.chunk < f->limits.window ? f->limits.chunk : f->limits.window;
  if (took > UINT32_MAX) took = UINT32_MAX;
  if (!p->least_us || took < p->least_us) p->least_us = (uint32_t)took;
  if (2ull * chunk->ahead < p->window) return;
  uint64_t fits = p->window * (SPAN_US + p->least_us) / took;
  if (fits > f->limits.window) fits = f->limits.window;
  p->window = (uint32_t)((7ull * p->window + fits + (fits > p->window ? 7 : 0)) / 8);
  if (p->window < least) p->window = least;
}

static int heard_ack(flow *f, int path, const frame *header, uint64_t now) {
  if (header->path >= f->paths) return 0;
  flow_path *p = &f->path[header->path];
  if (header->path != path || !p->live || header->epoch != p->epoch) return 1; // of an older connection
  if (header->seq < p->acknowledged) return 1;
  if (header->seq - p->acknowledged > p->count) return 0;
  while (p->acknowledged < header->seq) {
    flow_chunk chunk = p->fifo[p->first];
    p->first = (p->first + 1) % FIFO;
    p->count--;
    p->unacknowledged -= chunk.length;
    p->acknowledged++;
    p->trial = 0;
    learn_window(f, p, &chunk, now);
    if (!p->count) p->slow = 0;
    flow_slot *slot = open_slot(f, chunk.seq);
    int index = chunk_index(f, chunk.offset);
    if (!slot || in(slot->have, index)) continue;
    put(slot->have, index);
    if (--slot->left == 0) slot->state = SLOT_DONE;
  }
  pass_done(f);
  return 1;
}

static void heard_bye(flow *f, const frame *header) {
  f->peer_closed = 1;
  f->peer_knows |= header->offset != 0;
  f->peer_end = header->seq;
  for (uint64_t each = f->tail; each < f->posted; each++) {
    flow_slot *slot = open_slot(f, each);
    if (slot && too_late(f, each)) slot->state = SLOT_FAILED;
  }
  pass_done(f);
  for (int i = 0; i < f->paths && !f->sends; i++) f->path[i].bye_due = 1; // whoever has said it may go
}

int flow_heard(flow *f, int path, const frame *header, uint64_t now, int *lost) {
  flow_path *p = &f->path[path];
  *lost = -1;
  flow_alive(f, path, now);
  switch (header->type) {
  case ACK:
    return f->sends && heard_ack(f, path, header, now);
  case CTS:
    if (!f->sends || header->seq > f->posted + (1u << 31)) return 0;
    if (header->seq > f->allowed) f->allowed = header->seq;
    return 1;
  case PING:
    p->pong_due = 1;
    p->pong_time = header->seq;
    p->cts_due |= !f->sends; // it may have been lost
    return 1;
  case PONG:
    if (header->seq >= p->deaf_us) p->deaf_us = 0; // it was asked after the peer had complained
    if (now >= header->seq && now - header->seq < 1000000000u) p->round_trip = (uint32_t)(now - header->seq);
    return 1;
  case DOWN:
    if (header->path >= f->paths) return 0;
    if (!f->path[header->path].live || f->path[header->path].epoch != header->epoch) return 1;
    if (header->path != path) {
      *lost = header->path;
      return 1;
    }
    p->deaf_us = now;
    p->ping_due = 1;
    return 1;
  case BYE:
    heard_bye(f, header);
    return 1;
  default:
    return 0;
  }
}

// ---------------------------------------------------------------- receiving

int flow_accepts(const flow *f, const frame *h) {
  if (f->sends || h->seq >= f->posted || h->total > longest(f)) return 0;
  if (h->path >= f->paths || !f->path[h->path].live || h->epoch != f->path[h->path].epoch) return 0;
  if (h->offset % f->limits.chunk || h->offset > h->total) return 0;
  uint32_t left = h->total - h->offset;
  return h->length == (left < f->limits.chunk ? left : f->limits.chunk) && (h->length || h->total == 0);
}

uint8_t *flow_target(flow *f, const frame *h) {
  flow_slot *slot = open_slot(f, h->seq);
  if (!slot || (slot->begun ? h->total != slot->size : h->total > slot->size)) return NULL;
  return in(slot->have, chunk_index(f, h->offset)) ? NULL : slot->data + h->offset;
}

void flow_arrived(flow *f, int path, const frame *h, uint64_t now) {
  flow_path *p = &f->path[path];
  if (h->path != path || h->epoch != p->epoch) return; // of an older connection, whose chunks nobody counts any more
  flow_alive(f, path, now);
  p->arrived++;
  p->ack_due = 1;
  p->received_bytes += h->length;
  flow_slot *slot = open_slot(f, h->seq);
  if (slot && (slot->begun ? h->total != slot->size : h->total > slot->size)) {
    slot->state = SLOT_FAILED; // more than there is room for: the two users do not agree
    pass_done(f);
    return;
  }
  int index = chunk_index(f, h->offset);
  if (!slot || in(slot->have, index)) {
    p->duplicates++;
    return;
  }
  if (!slot->begun) {
    slot->begun = 1;
    slot->size = h->total;
    slot->left = chunks_of(f, h->total);
  }
  put(slot->have, index);
  if (--slot->left == 0) slot->state = SLOT_DONE;
  pass_done(f);
}
