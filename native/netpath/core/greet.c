// Greet: how a connection comes to be. Whoever sends in the comm connects, and greets with HELLO; whoever receives answers
// WELCOME, and both count it as the path's connection from then on.

#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "comm.h"
#include "conn.h"
#include "crc32c.h"
#include "greet.h"
#include "inject.h"
#include "neighbours.h"
#include "paths.h"
#include "proto.h"
#include "report.h"
#include "silence.h"
#include "text.h"

enum {
  MOST_STRANGERS = 256, // connections that have not said what they want
  REFUSED_TWICE = 2,
  ASK_AGAIN_MS = 1000, // after an attempt that cannot be made now
  FIRST_PAUSE_MS = 20,
};

// ---------------------------------------------------------------- what is said

// The checksum of a greeting or its answer, and of what follows.
uint32_t greeting_sum(const uint8_t *bytes, uint32_t size) {
  uint8_t copy[sizeof(frame) + HELLO_BYTES];
  memcpy(copy, bytes, size);
  memset(copy + offsetof(frame, crc), 0, sizeof((frame *)0)->crc);
  return checksum(copy, size);
}

static void send_frame(conn *c, frame_type type, uint32_t reason) {
  frame out = {.magic = WIRE_MAGIC, .type = (uint8_t)type, .path = (uint8_t)c->path, .epoch = c->epoch,
               .seq = c->comm ? c->comm->id : 0, .offset = reason};
  c->head_size = c->out_size = c->out_done = c->out_data_size = 0;
  conn_add(c, &out, sizeof out);
  ((frame *)c->head)->crc = greeting_sum(c->head, c->head_size);
}

// ---------------------------------------------------------------- connecting

static void no_socket(uint64_t now) {
  static uint64_t said;
  if (said && now - said < 10000000) return;
  said = now;
  say(NP_LEVEL_WARN, "no socket can be opened: %s. Raise the limit (ulimit -n)", strerror(errno));
}

void conn_connect(np_comm *comm, int path, uint64_t now) {
  const local_path *local = &engine.path[path];
  if (neighbours_in_vain(path, &comm->remote[path])) {
    conn_try_later(comm, path, now);
    return;
  }
  if (comm->remote[path].any.sa_family != local->own.any.sa_family ||
      (inject_any() && inject_now(path, INJECT_DOWN, now))) {
    comm->retry_us[path] = now + ASK_AGAIN_MS * 1000ull;
    return;
  }
  int fd = socket(local->own.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    no_socket(now);
    conn_try_later(comm, path, now);
    return;
  }
  address from = local->own;
  from.v4.sin_port = 0;
  bind_to_interface(fd, local);
  if (bind(fd, &from.any, address_length(&from)) ||
      (connect(fd, &comm->remote[path].any, address_length(&comm->remote[path])) && errno != EINPROGRESS)) {
    close(fd);
    conn_try_later(comm, path, now);
    return;
  }
  conn *c = conn_new(fd, path, CONN_CONNECTING, now);
  if (!c) return;
  c->comm = comm;
  comm->probe[path] = c;
  conn_want(c);
}

void conn_greet(conn *c, uint64_t now) {
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &length);
  np_comm *comm = c->comm;
  if (error) {
    // Its machine answers, and it does not.
    if (error == ECONNREFUSED && comm->wired && !comm_any_live(comm) && !comm->closed && !comm->flow.peer_closed)
      comm->left = 1;
    conn_lose(c, "refused", now);
    return;
  }
  c->state = CONN_GREETING;
  c->epoch = ++comm->epoch[c->path];
  if (!c->epoch) c->epoch = ++comm->epoch[c->path]; // 0 is never one
  send_frame(c, HELLO, 0);
  ((frame *)c->head)->length = HELLO_BYTES;
  hello_body body = {.chunk = comm->flow.limits.chunk, .checked = (uint32_t)comm->flow.checked};
  memcpy(body.token, comm->token, sizeof body.token);
  conn_add(c, &body, sizeof body);
  ((frame *)c->head)->crc = greeting_sum(c->head, c->head_size);
  conn_pump(c, now);
}

static void go_live(conn *c, uint64_t now) {
  np_comm *comm = c->comm;
  int path = c->path;
  if (comm->live[path]) conn_lose(comm->live[path], "replaced", now);
  if (comm->probe[path] == c) comm->probe[path] = NULL;
  comm->live[path] = c;
  comm->ended_us[path] = 0;
  comm->left = 0;
  c->state = CONN_LIVE;
  comm->pause_ms[path] = FIRST_PAUSE_MS;
  comm->wired = 1;
  flow_up(&comm->flow, path, c->epoch, now);
  report_up(comm, path, now);
  say(NP_LEVEL_TRACE, "comm %016llx path %d is up, epoch %u", (unsigned long long)comm->id, path, c->epoch);
}

// The peer hears the old connection, and we hear nothing over it: only we can end it.
static void refused_as_alive(np_comm *comm, int path, uint64_t now) {
  int silent = comm->live[path] && comm->flow.path[path].silent;
  comm->refusals[path] = silent ? comm->refusals[path] + 1 : 0;
  if (comm->refusals[path] < REFUSED_TWICE) return;
  comm->refusals[path] = 0;
  conn_lose(comm->live[path], "silent", now);
}

static void heard_refusal(conn *c, uint32_t reason, uint64_t now) {
  np_comm *comm = c->comm;
  int path = c->path;
  conn_lose(c, "refused", now);
  if (reason == REFUSE_ALIVE) {
    refused_as_alive(comm, path, now);
    return;
  }
  if (reason == REFUSE_VERSION && comm->wired) return; // it has understood us before
  if (reason == REFUSE_VERSION)
    say(NP_LEVEL_WARN, "the peer speaks another version of the network part than %d: install the same torchrelay on all nodes",
        WIRE_VERSION);
  comm->refused = (int)reason;
  comm->flow.peer_knows = 1; // nobody is left to be told that we close
  flow_fail(&comm->flow);
  comm_changed(comm);
}

// ---------------------------------------------------------------- being connected to

void conn_accept(int local, uint64_t now) {
  int waiting = 0, fd;
  for (conn *each = engine.conns; each; each = each->next) waiting += each->state == CONN_ACCEPTED;
  while ((fd = accept4(engine.path[local].listens, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
    if (waiting++ >= MOST_STRANGERS || (inject_any() && inject_now(local, INJECT_DOWN, now))) {
      close(fd);
      continue;
    }
    conn *c = conn_new(fd, local, CONN_ACCEPTED, now);
    if (c) conn_want(c);
  }
  if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) { // it would be called again at once
    no_socket(now);
    conn_listen(local, 0);
  }
}

void conn_listen(int local, int on) {
  struct epoll_event event = {.events = on ? EPOLLIN : 0, .data.ptr = &engine.listening[local]};
  epoll_ctl(engine.epoll, EPOLL_CTL_MOD, engine.path[local].listens, &event);
  engine.deaf[local] = !on;
}

static int equal_tokens(const uint8_t *a, const uint8_t *b) { // in the same time, wherever they differ
  uint8_t differs = 0;
  for (int i = 0; i < TOKEN_BYTES; i++) differs |= a[i] ^ b[i];
  return !differs;
}

static int has_ended(uint64_t id) {
  for (unsigned i = 0; i < sizeof engine.closed / sizeof engine.closed[0]; i++)
    if (engine.closed[i] == id) return 1;
  return 0;
}

// The comm that a greeting is for; a new one for a listener of ours. NULL, and the reason, if there is none.
static np_comm *comm_for(const frame *hello, const hello_body *body, refusal *why) {
  np_comm *comm = comm_find(hello->seq, 0);
  *why = REFUSE_STRANGER;
  if (comm) return equal_tokens(comm->token, body->token) ? comm : NULL;
  for (np_listener *each = engine.listeners; each; each = each->next)
    if (equal_tokens(each->token, body->token)) {
      if (has_ended(hello->seq)) break;
      flow_limits limits = engine.settings.limits;
      limits.chunk = body->chunk;
      comm = comm_new(0, hello->seq, body->token, &limits, body->checked != 0);
      if (comm) comm->listener = each;
      return comm;
    }
  if (has_ended(hello->seq)) *why = REFUSE_CLOSED;
  return NULL;
}

void conn_refuse(conn *c, refusal why, uint64_t now) {
  if (why == REFUSE_STRANGER) say(NP_LEVEL_WARN, "a stranger's connection to %s is refused: it does not know the token",
                                  engine.path[c->source.local].text);
  send_frame(c, REFUSE, why);
  c->last = 1;
  conn_pump(c, now);
}

static void heard_hello(conn *c, const frame *hello, const hello_body *body, uint64_t now) {
  refusal why;
  if (body->chunk < 4096 || body->chunk > LARGEST_CHUNK || hello->epoch == 0 || hello->path >= NP_MAX_PATHS) {
    conn_refuse(c, REFUSE_VERSION, now);
    return;
  }
  c->epoch = hello->epoch;
  np_comm *comm = comm_for(hello, body, &why);
  if (comm && body->chunk != comm->flow.limits.chunk) comm = NULL;
  if (!comm) {
    conn_refuse(c, why, now);
    return;
  }
  c->comm = comm;
  c->path = hello->path;
  if (hello->path >= comm->flow.paths) comm->flow.paths = hello->path + 1;
  conn *old = comm->live[hello->path];
  const flow_path *known = &comm->flow.path[hello->path];
  int alive = now - known->heard_us < comm->flow.limits.suspect_us || flow_was_stopped(&comm->flow, now);
  int older = (int16_t)(hello->epoch - known->epoch) <= 0; // it was long on its way
  if (old && (alive || older)) {
    c->comm = NULL;
    conn_refuse(c, REFUSE_ALIVE, now);
    return;
  }
  socklen_t length = sizeof comm->remote[0];
  getpeername(c->fd, &comm->remote[hello->path].any, &length);
  if (comm->probe[hello->path]) conn_end(comm->probe[hello->path]);
  comm->local[hello->path] = c->source.local;
  send_frame(c, WELCOME, 0);
  go_live(c, now);
  if (comm->listener) comm_changed(comm);
  comm_pump(comm, now);
}

// ---------------------------------------------------------------- hearing it

// Frames before a connection is live.
void heard_greeting(conn *c, const frame *in, const hello_body *body, uint64_t now) {
  if (c->state == CONN_ACCEPTED && in->type == HELLO) {
    heard_hello(c, in, body, now);
  } else if (c->state == CONN_GREETING && in->type == WELCOME && in->epoch == c->epoch) {
    np_comm *comm = c->comm;
    go_live(c, now);
    comm_changed(comm);
    comm_pump(comm, now);
  } else if (c->state == CONN_GREETING && in->type == REFUSE) {
    heard_refusal(c, in->offset, now);
  } else {
    conn_lose(c, "error", now);
  }
}
