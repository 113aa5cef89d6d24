// netpath: messages between two processes over several network paths at once, each exactly once and in order.
//
// A comm is one direction between two processes. It has one TCP connection for each path; a path is a pair of addresses,
// the i-th of ours and the i-th of the peer's. While one path lives, messages go on; a path that is lost is tried again
// for ever, and is used in full as soon as it is back. No fault of a path is an error.
//
// All calls may be made from any thread. None but np_wait, np_stop and the closing calls block, and these not for long.
// They return NP_OK, or say in np_error() what is wrong.

#ifndef TORCHRELAY_NETPATH_H
#define TORCHRELAY_NETPATH_H

#include <stddef.h>
#include <stdint.h>

#define NP_API __attribute__((visibility("default")))

enum { NP_OK = 0, NP_SYSTEM = 2, NP_INTERNAL = 3, NP_INVALID = 5, NP_REMOTE = 6 }; // the numbers that NCCL has for them

enum {
  NP_HANDLE_BYTES = 128,     // what whoever connects must be told of whoever listens
  NP_MAX_PATHS = 4,
  NP_MAX_REQUESTS = 64,      // under way in a comm
  NP_MAX_MESSAGE = 1 << 30,  // bytes
  NP_TEXT = 64,
};

enum { NP_LEVEL_WARN = 2, NP_LEVEL_INFO = 3, NP_LEVEL_TRACE = 5 };

typedef struct np_comm np_comm;
typedef struct np_listener np_listener;
typedef struct np_request np_request;
typedef void (*np_logger)(int level, const char *text);

// One of our local paths.
typedef struct {
  char interface[NP_TEXT]; // empty: only an address is known
  char address[NP_TEXT];
  uint32_t speed_mbps;     // 0: not known
  uint32_t up;
} np_path_info;

// Counters of one path, over all comms of this process. Times in microseconds.
typedef struct {
  uint64_t sent_bytes, received_bytes;
  uint64_t sent_again;      // chunks that went out once more, as their path was lost or silent
  uint64_t duplicates;      // chunks that arrived twice and were dropped
  uint64_t downs, ups;      // connections lost; connected anew after that
  uint64_t corrupt;         // chunks whose checksum was wrong
  uint32_t live, round_trip;
} np_path_counts;

// Start, or count one more user. The first reads the environment (see docs/network.md) and opens the listeners.
// `logger` may be NULL. After np_stop by the last user it may be started anew.
NP_API int np_start(np_logger logger);
NP_API void np_stop(void);

NP_API int np_paths(np_path_info *paths, int room); // how many there are; fills in `room` of them at most
NP_API int np_counts(np_path_counts *counts, int room);

NP_API int np_listen(void *handle, np_listener **listener); // fills in the handle, NP_HANDLE_BYTES long
// Connecting takes several calls: *comm stays NULL until a path is up. The handle keeps what has been begun.
// `label` names the communicator in reports.
NP_API int np_connect(void *handle, uint64_t label, np_comm **comm);
NP_API int np_forget(void *handle); // what was begun with it and has not come to a comm is given up
NP_API int np_accept(np_listener *listener, uint64_t label, np_comm **comm);

// *request is NULL if NP_MAX_REQUESTS are under way: call again. The memory is ours until the request is done.
NP_API int np_isend(np_comm *comm, const void *data, size_t size, np_request **request);
NP_API int np_irecv(np_comm *comm, void *data, size_t size, np_request **request);
// Done: the request is gone, and *size (may be NULL) says how much was sent or received.
NP_API int np_test(np_request *request, int *done, size_t *size);
NP_API int np_wait(np_request *request, int timeout_ms, int *done, size_t *size); // less than 0: for ever

NP_API int np_abort(np_comm *comm); // all its requests fail at once with NP_REMOTE, and those that come
NP_API int np_close(np_comm *comm); // requests that are not done are dropped: no memory is touched any more
NP_API int np_close_listener(np_listener *listener);

// Cause a fault of our own, for tests that may change no network: "path0:drop@0s+5s" (see core/inject.c); "" ends all.
NP_API int np_inject(const char *faults);

NP_API const char *np_error(void); // of this thread's last call that failed
NP_API const char *np_version(void);

#endif
