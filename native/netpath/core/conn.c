// Conn: one TCP connection of one path of a comm, its life, and what is sent over it. How it comes to be is in greet.c, and
// what comes over it in receive.c: both are above this file, which calls neither.
//
// A user's memory is only touched for what the protocol still wants: that is asked before each send() and each recv(), as
// the message may have been finished over another path, or dropped, since the last one.

#define _GNU_SOURCE
#include <errno.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/uio.h>
#include <unistd.h>

#include "clock.h"
#include "comm.h"
#include "conn.h"
#include "crc32c.h"
#include "inject.h"
#include "neighbours.h"
#include "proto.h"
#include "report.h"
#include "text.h"

enum {
  PAUSE_MS = 20,         // after an attempt to connect that failed, doubled each time
  LONGEST_PAUSE_MS = 80, // while somebody waits
  IDLE_PAUSE_MS = 1000,
  FLAPS_FREE = 4,        // losses within FLAP_WINDOW_US that are not damped
  AT_ONCE_US = 500000,   // connections that end so close to each other have one cause
};

static const uint64_t FLAP_WINDOW_US = 10 * 1000000ull, LONGEST_DAMPING_US = 30 * 1000000ull;

uint8_t conn_nothing[LARGEST_CHUNK];

// ---------------------------------------------------------------- life

void conn_want(conn *c) {
  int wants = EPOLLIN;
  if (c->state == CONN_CONNECTING || c->out_done < c->out_size) wants |= EPOLLOUT;
  if (inject_any() && inject_now(c->source.local, INJECT_DROP, now_us())) wants = 0;
  if (wants == c->wants) return;
  struct epoll_event event = {.events = (uint32_t)wants, .data.ptr = c};
  epoll_ctl(engine.epoll, c->wants < 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, c->fd, &event);
  c->wants = wants;
}

conn *conn_new(int fd, int local, conn_state state, uint64_t now) {
  conn *c = calloc(1, sizeof *c);
  if (!c) {
    close(fd);
    return NULL;
  }
  int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  c->source = (source){OF_CONN, local};
  c->path = local;
  c->fd = fd;
  c->wants = -1;
  c->state = state;
  c->since_us = now;
  c->next = engine.conns;
  engine.conns = c;
  return c;
}

static void bury(conn *c) {
  if (c->wants >= 0) epoll_ctl(engine.epoll, EPOLL_CTL_DEL, c->fd, NULL);
  close(c->fd);
  c->fd = -1;
  c->state = CONN_DEAD;
  for (conn **at = &engine.conns; *at; at = &(*at)->next)
    if (*at == c) {
      *at = c->next;
      break;
    }
  c->next = engine.buried;
  engine.buried = c;
  if (c->comm) {
    if (c->comm->live[c->path] == c) c->comm->live[c->path] = NULL;
    if (c->comm->probe[c->path] == c) c->comm->probe[c->path] = NULL;
  }
}

void conn_end(conn *c) {
  if (c->state != CONN_DEAD) bury(c);
}

void conn_end_all(np_comm *comm) {
  for (int i = 0; i < NP_MAX_PATHS; i++) {
    if (comm->live[i]) conn_end(comm->live[i]);
    if (comm->probe[i]) conn_end(comm->probe[i]);
  }
  // The buried are kept until the round is over, and must not lead to a comm that is freed meanwhile.
  for (conn *each = engine.buried; each; each = each->next)
    if (each->comm == comm) each->comm = NULL;
}

static void reset(conn *c) {
  struct linger at_once = {1, 0}; // what is in its buffers is of no use, and the peer shall know
  setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  if (c->comm && neighbours_in_vain(c->source.local, &c->comm->remote[c->path])) neighbours_mute(c->fd);
  bury(c);
}

// After each failure a little later; sooner while somebody waits. `began`: the attempt that failed; one that has taken
// its time is followed by the next at once.
void conn_try_later(np_comm *comm, int path, uint64_t began) {
  uint32_t most = flow_busy(&comm->flow) ? LONGEST_PAUSE_MS : IDLE_PAUSE_MS;
  uint32_t pause = comm->pause_ms[path] < most ? comm->pause_ms[path] : most;
  comm->retry_us[path] = began + pause * 1000ull;
  comm->pause_ms[path] = pause * 2;
}

// A path that is lost again and again rests for a while, if there is another.
static void damp(np_comm *comm, int path, uint64_t now) {
  if (now - comm->flaps_us[path] > FLAP_WINDOW_US) {
    comm->flaps_us[path] = now;
    comm->flaps[path] = 0;
  }
  comm->retry_us[path] = now;
  comm->pause_ms[path] = PAUSE_MS;
  if (++comm->flaps[path] <= FLAPS_FREE) return;
  uint32_t doublings = comm->flaps[path] - FLAPS_FREE < 10 ? comm->flaps[path] - FLAPS_FREE : 10;
  uint64_t rest = 100000ull << doublings;
  comm->calm_us[path] = now + (rest < LONGEST_DAMPING_US ? rest : LONGEST_DAMPING_US);
}

// The kernel of a process that dies ends all of its connections, and no path has to do with it.
static int has_left(const np_comm *comm, uint64_t now) {
  int ended = 0;
  if (comm->closed || comm->flow.peer_closed) return 0; // in peace
  for (int i = 0; i < comm->flow.paths; i++) ended += comm->ended_us[i] && now - comm->ended_us[i] <= AT_ONCE_US;
  return ended > 1 && !comm_any_live(comm);
}

void conn_lose(conn *c, const char *reason, uint64_t now) {
  np_comm *comm = c->comm;
  int path = c->path;
  if (c->state == CONN_DEAD) return;
  if (c->state != CONN_LIVE) {
    // A greeting that nobody answers may have arrived. One that was answered by an end has not made a comm over there.
    if (c->state == CONN_GREETING && strcmp(reason, "closed") && strcmp(reason, "reset")) comm->may_be_known = 1;
    reset(c);
    if (comm && comm->flow.sends) conn_try_later(comm, path, c->since_us);
    return;
  }
  uint32_t under_way = comm->flow.path[path].count;
  say(NP_LEVEL_TRACE, "comm %016llx path %d lost (%s), %u chunks under way", (unsigned long long)comm->id, path, reason,
      under_way);
  reset(c);
  comm->ended_us[path] = !strcmp(reason, "closed") || !strcmp(reason, "reset") ? now : 0;
  comm->left |= has_left(comm, now);
  flow_down(&comm->flow, path, now);
  damp(comm, path, now);
  report_down(comm, path, reason, under_way, now);
  comm_pump(comm, now);
}

// ---------------------------------------------------------------- sending

void conn_add(conn *c, const void *bytes, uint32_t size) {
  memcpy(c->head + c->head_size, bytes, size);
  c->head_size += size;
  c->out_size += size;
}

uint32_t conn_magic(const conn *c, const frame *of) {
  if (!c->comm->flow.checked) return WIRE_MAGIC;
  return WIRE_MAGIC + checksum((const uint8_t *)of + sizeof of->magic, sizeof *of - sizeof of->magic);
}

// Fill the head with what is to be sent next: frames, up to the first with data.
static int fill(conn *c, uint64_t now) {
  c->head_size = c->out_size = c->out_done = c->out_data_size = 0;
  c->out_data = NULL;
  flow_frame next;
  while (c->head_size + sizeof next.header <= sizeof c->head && flow_next(&c->comm->flow, c->path, now, &next)) {
    if (next.data) {
      c->out_data = next.data;
      c->out_data_size = next.header.length;
      if (c->comm->flow.checked) {
        next.header.crc = checksum(next.data, next.header.length);
        if (inject_any() && inject_now(c->source.local, INJECT_CORRUPT, now)) next.header.crc ^= 1;
      }
    }
    next.header.magic = conn_magic(c, &next.header);
    c->out_frame = next.header;
    conn_add(c, &next.header, sizeof next.header);
    if (next.data) break;
  }
  c->out_size += c->out_data_size;
  return c->out_size > 0;
}

static ssize_t send_some(conn *c) {
  struct iovec parts[2];
  int count = 0;
  uint32_t into_data = c->out_done > c->head_size ? c->out_done - c->head_size : 0;
  if (c->out_done < c->head_size)
    parts[count++] = (struct iovec){c->head + c->out_done, c->head_size - c->out_done};
  if (c->out_data_size > into_data) {
    const uint8_t *data = c->out_data;
    if (!flow_wanted(&c->comm->flow, &c->out_frame)) {
      if (c->comm->flow.closing || c->comm->flow.failed) { // the peer still waits for it, and must not get anything else
        errno = ECONNABORTED;
        return -1;
      }
      data = conn_nothing; // it has come over another path: nobody will look at it
    }
    parts[count++] = (struct iovec){(void *)(data + into_data), c->out_data_size - into_data};
  }
  struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
  return sendmsg(c->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void conn_pump(conn *c, uint64_t now) {
  if (c->state == CONN_DEAD || c->state == CONN_CONNECTING) return;
  if (inject_any() && inject_now(c->source.local, INJECT_DROP, now)) return;
  for (;;) {
    if (c->out_done == c->out_size) {
      if (c->last) {
        bury(c);
        return;
      }
      if (c->state != CONN_LIVE || !fill(c, now)) break;
    }
    ssize_t sent = send_some(c);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) break;
    if (sent < 0) {
      conn_lose(c, errno == ECONNRESET ? "reset" : "error", now);
      return;
    }
    c->out_done += (uint32_t)sent;
  }
  conn_want(c);
}

void comm_pump(np_comm *comm, uint64_t now) {
  for (int i = 0; i < comm->flow.paths; i++)
    if (comm->live[i]) conn_pump(comm->live[i], now);
}
