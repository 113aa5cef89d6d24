// Calls: what netpath.h offers for comms and their messages. Each takes the engine's lock.

#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "../netpath.h"
#include "clock.h"
#include "comm.h"
#include "conn.h"
#include "greet.h"
#include "paths.h"
#include "proto.h"
#include "text.h"

static const uint64_t LINGER_US = 10000000; // a closed comm still answers whoever has not heard of it

// ---------------------------------------------------------------- connecting

static int not_started(void) { return engine.runs ? NP_OK : fail(NP_INVALID, "np_start was not called"); }

int np_listen(void *handle, np_listener **listener) {
  *listener = NULL;
  engine_lock();
  int code = not_started();
  np_listener *made = code ? NULL : calloc(1, sizeof *made);
  if (made && getrandom(made->token, sizeof made->token, 0) == sizeof made->token) {
    memcpy(made->handle.token, made->token, sizeof made->token);
    handle_fill(&made->handle, engine.path, engine.paths);
    memset(handle, 0, NP_HANDLE_BYTES);
    memcpy(handle, &made->handle, sizeof made->handle);
    made->next = engine.listeners;
    engine.listeners = made;
    *listener = made;
  } else if (!code) {
    free(made);
    code = fail(NP_SYSTEM, "no memory or no randomness for a listener");
  }
  engine_unlock();
  return code;
}

static np_comm *begin_comm(np_handle *handle, uint64_t label, uint64_t now) {
  uint64_t id;
  if (getrandom(&id, sizeof id, 0) != sizeof id) return NULL;
  np_comm *comm = comm_new(1, id, handle->token, &engine.settings.limits, engine.settings.checked);
  if (!comm) return NULL;
  comm->label = label;
  handle->begun = id;
  for (int i = 0; i < engine.paths; i++) {
    handle_read(handle, i, &comm->remote[i]);
    conn_connect(comm, i, now);
  }
  engine_wake();
  return comm;
}

static void close_comm(np_comm *comm) {
  flow_close(&comm->flow);
  comm->closed = 1;
  comm->listener = NULL;
  comm->linger_us = now_us() + LINGER_US;
  comm_changed(comm);
  comm_pump(comm, now_us());
}

int np_connect(void *handle, uint64_t label, np_comm **out) {
  np_handle *told = handle;
  address unused;
  *out = NULL;
  engine_lock();
  int code = not_started();
  if (!code && !handle_read(told, 0, &unused))
    code = fail(NP_INVALID, "this is no handle of version %s: install the same torchrelay on all nodes", np_version());
  if (!code) {
    np_comm *comm = told->begun ? comm_find(told->begun, 1) : begin_comm(told, label, now_us());
    if (!comm) code = fail(NP_INTERNAL, "the comm that was begun with this handle is not there");
    else if (comm->refused) {
      code = comm->refused == REFUSE_VERSION
                 ? fail(NP_REMOTE, "the listener refuses us: another version of the network part")
                 : fail(NP_REMOTE, "the listener refuses us: it was closed, or does not know this handle's token");
      close_comm(comm);
      told->begun = 0;
    } else if (comm_any_live(comm)) {
      comm->accepted = 1;
      told->begun = 0;
      *out = comm;
    }
  }
  engine_unlock();
  return code;
}

int np_forget(void *handle) {
  np_handle *told = handle;
  engine_lock();
  int code = not_started();
  np_comm *comm = code || !told->begun ? NULL : comm_find(told->begun, 1);
  if (comm) close_comm(comm);
  told->begun = 0;
  engine_unlock();
  return code;
}

int np_accept(np_listener *listener, uint64_t label, np_comm **out) {
  *out = NULL;
  engine_lock();
  int code = not_started();
  for (np_comm *each = engine.comms; !code && each; each = each->next)
    if (each->listener == listener && (!*out || each->wired)) *out = each; // the last of the list came first
  if (*out) {
    (*out)->listener = NULL;
    (*out)->accepted = 1;
    (*out)->label = label;
  }
  engine_unlock();
  return code;
}

// ---------------------------------------------------------------- requests

static int usable(const np_comm *comm) {
  if (!engine.runs || comm->process != engine.process)
    return fail(NP_INVALID, "a comm of another process: it was made before fork(), or before np_stop()");
  return NP_OK;
}

static int post(np_comm *comm, void *data, size_t size, int sends, np_request **out) {
  *out = NULL;
  engine_lock();
  int code = usable(comm);
  if (!code && comm->flow.sends != sends)
    code = fail(NP_INVALID, sends ? "this comm receives" : "this comm sends");
  if (!code && (size > NP_MAX_MESSAGE || size > (uint64_t)comm->flow.limits.chunk * MAX_CHUNKS))
    code = fail(NP_INVALID, "a message of %zu bytes is too long: send several", size);
  if (!code && comm->flow.failed) code = fail(NP_REMOTE, "the peer is gone, or the comm was aborted");
  if (!code) {
    uint64_t now = now_us();
    int was_busy = flow_busy(&comm->flow);
    np_request *made = flow_post(&comm->flow, data, (uint32_t)size, now);
    if (made) {
      made->owner = comm;
      comm_pump(comm, now);
      if (!was_busy) engine_wake(); // it may be in a long sleep
    }
    *out = made;
  }
  engine_unlock();
  return code;
}

int np_isend(np_comm *comm, const void *data, size_t size, np_request **request) {
  return post(comm, (void *)data, size, 1, request);
}

int np_irecv(np_comm *comm, void *data, size_t size, np_request **request) { return post(comm, data, size, 0, request); }

// Of a request that is over: how it ended. Its place is free from then on.
static int conclude(np_request *request, int *done, size_t *size) {
  int failed = request->state != SLOT_DONE; // SLOT_FREE: another thread has closed the comm meanwhile
  *done = 1;
  if (size) *size = request->size;
  flow_release(&((np_comm *)request->owner)->flow, request);
  if (failed) return fail(NP_REMOTE, "the message did not get through: the peer has closed, does not answer, sent more than "
                                     "there was room for, or the comm was aborted or closed");
  return NP_OK;
}

int np_test(np_request *request, int *done, size_t *size) {
  *done = 0;
  if (request->state == SLOT_OPEN) return NP_OK;
  engine_lock();
  int code = conclude(request, done, size);
  engine_unlock();
  return code;
}

int np_wait(np_request *request, int timeout_ms, int *done, size_t *size) {
  np_comm *comm = request->owner;
  uint64_t until = now_us() + (uint64_t)(timeout_ms < 0 ? 0 : timeout_ms) * 1000;
  struct timespec at = {.tv_sec = (time_t)(until / 1000000), .tv_nsec = (long)(until % 1000000) * 1000};
  *done = 0;
  engine_lock();
  int code = usable(comm), over = 0;
  comm->waiters++;
  while (!code && request->state == SLOT_OPEN && !over) {
    if (timeout_ms < 0) pthread_cond_wait(&comm->changed, &engine.lock);
    else over = pthread_cond_timedwait(&comm->changed, &engine.lock, &at) == ETIMEDOUT;
  }
  comm->waiters--;
  if (!code && request->state != SLOT_OPEN) code = conclude(request, done, size);
  engine_unlock();
  return code;
}

// ---------------------------------------------------------------- the end of a comm

int np_abort(np_comm *comm) {
  engine_lock();
  int code = usable(comm);
  if (!code) {
    flow_fail(&comm->flow);
    comm_changed(comm);
  }
  engine_unlock();
  return code;
}

int np_close(np_comm *comm) {
  engine_lock();
  int code = usable(comm);
  if (!code) close_comm(comm);
  engine_unlock();
  return code;
}

int np_close_listener(np_listener *listener) {
  engine_lock();
  for (np_listener **at = &engine.listeners; *at; at = &(*at)->next)
    if (*at == listener) {
      *at = listener->next;
      for (np_comm *each = engine.comms; each; each = each->next)
        if (each->listener == listener) close_comm(each);
      free(listener);
      break;
    }
  engine_unlock();
  return NP_OK;
}
