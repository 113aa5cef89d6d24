// Receive: what comes over a connection. Greetings go to greet.c, frames and chunks to the protocol.

#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/uio.h>

#include "comm.h"
#include "conn.h"
#include "crc32c.h"
#include "greet.h"
#include "inject.h"
#include "proto.h"
#include "receive.h"
#include "report.h"
#include "text.h"

enum { TURNS = 64 }; // of reading, before others have their turn

static void heard_frame(conn *c, const frame *in, uint64_t now) {
  np_comm *comm = c->comm;
  int lost;
  if (!flow_heard(&comm->flow, c->path, in, now, &lost)) {
    say(NP_LEVEL_WARN, "comm %016llx path %d: a frame breaks the rules (type %u)", (unsigned long long)comm->id,
        c->path, in->type);
    conn_lose(c, "error", now);
    return;
  }
  if (lost >= 0 && comm->live[lost]) conn_lose(comm->live[lost], "told", now);
  if (in->type == ACK || in->type == BYE) comm_changed(comm);
}

// What was changed on its way is not believed.
static void is_damaged(conn *c, uint64_t now) {
  if (c->comm) {
    c->comm->flow.path[c->path].corrupt++;
    report_corrupt(c->comm, c->path);
  }
  conn_lose(c, "checksum", now);
}

static void chunk_is_whole(conn *c, uint64_t now) {
  np_comm *comm = c->comm;
  uint8_t *target = flow_target(&comm->flow, &c->in_frame);
  c->in_data = 0;
  if (comm->flow.checked && c->in_clean && target && checksum(target, c->in_frame.length) != c->in_frame.crc) {
    is_damaged(c, now);
    return;
  }
  // Part of it went nowhere while it was not wanted; now it is, so it has to come once more.
  if (target && !c->in_clean) {
    conn_lose(c, "error", now);
    return;
  }
  flow_arrived(&comm->flow, c->path, &c->in_frame, now);
  comm_changed(comm);
}

static int begin_chunk(conn *c, uint64_t now) {
  if (!flow_accepts(&c->comm->flow, &c->in_frame)) {
    say(NP_LEVEL_WARN, "comm %016llx path %d: a chunk breaks the rules", (unsigned long long)c->comm->id, c->path);
    conn_lose(c, "error", now);
    return 0;
  }
  c->in_data = 1;
  c->in_done = 0;
  c->in_clean = 1;
  return 1;
}

// Where the rest of the chunk goes.
static uint8_t *rest_of_chunk(conn *c) {
  uint8_t *target = flow_target(&c->comm->flow, &c->in_frame);
  if (!target) c->in_clean = 0;
  return (target && c->in_clean ? target : conn_nothing) + c->in_done;
}

static uint32_t frame_size(const conn *c, const frame *in) {
  return (uint32_t)sizeof(frame) + (c->state == CONN_ACCEPTED && in->type == HELLO ? HELLO_BYTES : 0);
}

static void another_magic(conn *c, const frame *in, uint64_t now) {
  if (c->state == CONN_LIVE && c->comm->flow.checked) {
    is_damaged(c, now);
  } else if (c->state == CONN_ACCEPTED && (in->magic & 0xffffff) == (WIRE_MAGIC & 0xffffff)) {
    say(NP_LEVEL_WARN, "a peer speaks version %u of the network part, and we %d: install the same torchrelay on all nodes",
        in->magic >> 24, WIRE_VERSION);
    conn_refuse(c, REFUSE_VERSION, now);
  } else {
    conn_lose(c, "error", now);
  }
}

// Take one frame, or part of a chunk, from what was read ahead. 0: there is not enough.
static int take_ahead(conn *c, uint64_t now) {
  uint32_t there = c->ahead_to - c->ahead_from;
  if (c->in_data) {
    uint32_t left = c->in_frame.length - c->in_done, now_taken = there < left ? there : left;
    memcpy(rest_of_chunk(c), c->ahead + c->ahead_from, now_taken);
    c->ahead_from += now_taken;
    c->in_done += now_taken;
    if (c->in_done < c->in_frame.length) return 0;
    chunk_is_whole(c, now);
    return c->state != CONN_DEAD;
  }
  if (there < sizeof(frame)) return 0;
  frame in;
  memcpy(&in, c->ahead + c->ahead_from, sizeof in);
  if (in.magic != (c->state == CONN_LIVE ? conn_magic(c, &in) : WIRE_MAGIC)) {
    another_magic(c, &in, now);
    return 0;
  }
  if (there < frame_size(c, &in)) return 0;
  if (c->state != CONN_LIVE && in.crc != greeting_sum(c->ahead + c->ahead_from, frame_size(c, &in))) {
    is_damaged(c, now);
    return 0;
  }
  hello_body body;
  if (frame_size(c, &in) > sizeof in) memcpy(&body, c->ahead + c->ahead_from + sizeof in, sizeof body);
  c->ahead_from += frame_size(c, &in);
  if (c->state != CONN_LIVE) {
    heard_greeting(c, &in, &body, now);
  } else if (in.type == DATA) {
    c->in_frame = in;
    if (begin_chunk(c, now) && in.length == 0) chunk_is_whole(c, now);
  } else {
    heard_frame(c, &in, now);
  }
  return c->state != CONN_DEAD && !c->last;
}

static void conn_read(conn *c, uint64_t now) {
  for (int turn = 0; turn < TURNS && c->state != CONN_DEAD && !c->last; turn++) {
    while (c->ahead_from < c->ahead_to && take_ahead(c, now)) {}
    if (c->state == CONN_DEAD || c->last) return;
    memmove(c->ahead, c->ahead + c->ahead_from, c->ahead_to - c->ahead_from);
    c->ahead_to -= c->ahead_from;
    c->ahead_from = 0;
    struct iovec parts[2];
    int count = 0;
    uint32_t left = c->in_data ? c->in_frame.length - c->in_done : 0;
    if (left) parts[count++] = (struct iovec){rest_of_chunk(c), left};
    parts[count++] = (struct iovec){c->ahead + c->ahead_to, sizeof c->ahead - c->ahead_to};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
    ssize_t size = recvmsg(c->fd, &message, MSG_DONTWAIT);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && errno == EAGAIN) return;
    if (size <= 0) {
      conn_lose(c, size == 0 ? "closed" : errno == ECONNRESET ? "reset" : "error", now);
      return;
    }
    if (c->state == CONN_LIVE) flow_alive(&c->comm->flow, c->path, now);
    uint32_t of_chunk = (uint32_t)size < left ? (uint32_t)size : left;
    c->in_done += of_chunk;
    c->ahead_to += (uint32_t)size - of_chunk;
    if (left && of_chunk == left) chunk_is_whole(c, now);
  }
}

void conn_event(conn *c, unsigned events, uint64_t now) {
  if (c->state == CONN_DEAD) return;
  np_comm *comm = c->comm;
  if (c->state == CONN_CONNECTING) {
    if (events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) conn_greet(c, now);
    return;
  }
  if (inject_any() && inject_now(c->source.local, INJECT_DROP, now)) return;
  if (events & (EPOLLIN | EPOLLERR | EPOLLHUP)) conn_read(c, now);
  if (c->state != CONN_DEAD) conn_pump(c, now);
  if (comm) comm_pump(comm, now);
}
