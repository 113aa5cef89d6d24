// World bytes: what the two ends of a simulated world (see world.h) write to connections, and read from them.

#include <string.h>

#include "world.h"

// ---------------------------------------------------------------- writing

static uint32_t sum_of(uint32_t sum, const uint8_t *bytes, uint32_t size) {
  for (uint32_t i = 0; i < size; i++) sum = (sum ^ bytes[i]) * 16777619u;
  return sum;
}

void send_frame(side *s, const link *c, frame_type type, uint32_t reason) {
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

void write_link(int end, int of) {
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

void read_bytes(int end, int of, const uint8_t *bytes, uint32_t size) {
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
