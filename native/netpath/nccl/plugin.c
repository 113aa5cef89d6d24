// Plugin: netpath as a net plugin of NCCL and RCCL, one device that is made of all paths of this machine.
//
// A plugin decides nothing: it turns NCCL's calls into those of netpath.h. What differs between the versions is in
// plugin_v8.c and plugin_v11.c. A path that is lost is no error for NCCL; a peer that is gone, or a call that makes no
// sense, is one.
//
// The engine runs while a communicator of NCCL's or a comm is there. Versions before 11 do not say when they are done
// with us, and it runs until the process ends. The library is linked with -z nodelete, as NCCL unloads it then.

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "plugin.h"

_Static_assert((int)ABI_SYSTEM == NP_SYSTEM && (int)ABI_INTERNAL == NP_INTERNAL && (int)ABI_INVALID == NP_INVALID &&
                   (int)ABI_REMOTE == NP_REMOTE,
               "the engine's results are handed on as they are");
_Static_assert((int)ABI_HANDLE_BYTES == NP_HANDLE_BYTES, "NCCL carries the engine's handle as it is");
_Static_assert((int)ABI_REQUESTS <= NP_MAX_REQUESTS, "NCCL may have so many under way");

enum {
  MOST_BYTES = 16 << 20, // of a message: what even the smallest chunks (TORCHRELAY_NET_CHUNK) allow
  MOST_COMMS = 65536,
  UNKNOWN_SPEED = 10000, // Mb/s of a path of which the kernel tells no speed: what NCCL takes for its own sockets
  HALF_ROUND_TRIP = 70,  // us, of 8 bytes between two processes on two cores (nccl_harness, `measure`)
};

const char plugin_name[] = "torchrelay";

// A communicator of NCCL's, from version 11 on.
typedef struct {
  uint64_t communicator;
  pid_t process; // a child that was forked has it as well, and has no part in it
} context;

typedef struct {
  np_listener *listener;
  uint64_t communicator;
} listening;

// What NCCL only hands back. Nothing has to be done for memory of the host, nor to flush it.
static char registered_memory, flushed;

// ---------------------------------------------------------------- NCCL's log

static _Atomic(abi_log) nccl_log;

static void log_line(int level, const char *place, int line, const char *text) {
  abi_log log = nccl_log;
  if (log) log(level, ABI_OF_INIT | ABI_OF_NET, place, line, "NET/%s : %s", plugin_name, text);
  else if (level == ABI_LEVEL_WARN) fprintf(stderr, "NET/%s : %s\n", plugin_name, text);
}

static void from_engine(int level, const char *text) { log_line(level, "netpath", 0, text); }

__attribute__((format(printf, 4, 5))) static void tell(int level, const char *place, int line, const char *format,
                                                       ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  log_line(level, place, line, text);
}

#define WARN(...) tell(ABI_LEVEL_WARN, __func__, __LINE__, __VA_ARGS__)
#define INFO(...) tell(ABI_LEVEL_INFO, __func__, __LINE__, __VA_ARGS__)

// The engine's result, and its reason in NCCL's log.
static abi_result result_of(int code, const char *call) {
  if (code) WARN("%s: %s", call, np_error());
  return code;
}

// ---------------------------------------------------------------- beginning and end

static void tell_paths(void) {
  static _Atomic pid_t told;
  if (atomic_exchange(&told, getpid()) == getpid()) return; // once in a process
  np_path_info path[NP_MAX_PATHS];
  int count = np_paths(path, NP_MAX_PATHS);
  for (int i = 0; i < count; i++)
    INFO("path %d is %s%s%s%s", i, path[i].interface, *path[i].interface ? " " : "", path[i].address,
         path[i].up ? "" : ", which is down");
  if (count == 1) INFO("one path only: if it is lost there is nothing to fail over to");
}

static abi_result begin(abi_log log) {
  if (log) nccl_log = log;
  int code = np_start(from_engine);
  if (code) {
    WARN("no path can be used: %s. Without us NCCL takes a transport of its own, and losing a path ends the job; with "
         "NCCL_NET=%s it stops here instead",
         np_error(), plugin_name);
    return code;
  }
  tell_paths();
  return ABI_OK;
}

abi_result plugin_begin_for_good(abi_log log) {
  static _Atomic pid_t begun;
  if (begun == getpid()) {
    if (log) nccl_log = log;
    return ABI_OK;
  }
  abi_result code = begin(log);
  if (!code && atomic_exchange(&begun, getpid()) == getpid()) np_stop(); // another thread was as fast
  return code;
}

abi_result plugin_begin(void **into, uint64_t communicator, abi_log log) {
  *into = NULL;
  abi_result code = begin(log);
  if (code) return code;
  context *made = malloc(sizeof *made);
  if (!made) {
    np_stop();
    return ABI_SYSTEM;
  }
  *made = (context){communicator, getpid()};
  *into = made;
  return ABI_OK;
}

abi_result plugin_finalize(void *of) {
  context *ended = of;
  if (!ended) return ABI_OK;
  if (ended->process == getpid()) np_stop();
  free(ended);
  return ABI_OK;
}

uint64_t plugin_communicator(const void *of) { return of ? ((const context *)of)->communicator : 0; }

// ---------------------------------------------------------------- the device

abi_result plugin_devices(int *count) {
  *count = np_paths(NULL, 0) > 0;
  if (!*count) WARN("there is no path: NCCL takes a transport of its own, and losing a path ends the job");
  return ABI_OK;
}

static int is_ours(int device) {
  if (device == 0) return 1;
  WARN("there is device 0 and no device %d", device);
  return 0;
}

static uint64_t mix(uint64_t sum, const char *text) {
  for (; *text; text++) sum = (sum ^ (uint8_t)*text) * 0x100000001b3u; // FNV-1a
  return (sum ^ '/') * 0x100000001b3u;
}

// Of this machine since it was started, or nothing.
static void boot_id(char *into, size_t room) {
  ssize_t size = -1;
  int file = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  if (file >= 0) {
    size = read(file, into, room - 1);
    close(file);
  }
  into[size > 0 ? size : 0] = 0;
}

// The same for all processes that use these paths of this machine, and for no others.
static uint64_t guid_of(const np_path_info *path, int count) {
  char boot[64];
  boot_id(boot, sizeof boot);
  uint64_t sum = mix(0xcbf29ce484222325u, boot);
  for (int i = 0; i < count; i++) sum = mix(mix(sum, path[i].interface), path[i].address);
  return sum;
}

// Where an interface is, so that NCCL may choose near GPUs; NULL if it is no piece of hardware. NCCL keeps the pointer.
static const char *pci_path_of(const char *interface) {
  static _Atomic(char *) known;
  char *place = known;
  if (!*interface) return NULL;
  if (place) return place;
  char name[128];
  snprintf(name, sizeof name, "/sys/class/net/%s/device", interface);
  char *found = realpath(name, NULL);
  if (!found || atomic_compare_exchange_strong(&known, &place, found)) return found;
  free(found);
  return place;
}

abi_result plugin_describe(int device, abi_properties_v12 *into) {
  np_path_info path[NP_MAX_PATHS];
  if (!is_ours(device)) return ABI_INVALID;
  int count = np_paths(path, NP_MAX_PATHS), speed = 0;
  if (count < 1) return ABI_INVALID;
  for (int i = 0; i < count; i++) speed += path[i].speed_mbps ? (int)path[i].speed_mbps : UNKNOWN_SPEED;
  *into = (abi_properties_v12){
      .name = plugin_name,
      .pci_path = pci_path_of(path[0].interface),
      .guid = guid_of(path, count),
      .memory = ABI_HOST_MEMORY,
      .speed = speed,
      .latency = HALF_ROUND_TRIP,
      .most_comms = MOST_COMMS,
      .most_receives = 1,
      .device_type = ABI_HOST_DEVICE,
      .parts = {1, {device}},
      .most_bytes = MOST_BYTES,
      .most_bytes_of_collective = MOST_BYTES,
      .most_requests_at_once = 1,
      .rail = -1,
      .plane = -1,
  };
  return ABI_OK;
}

abi_result plugin_describe_v9(int device, abi_properties_v9 *into) {
  abi_properties_v12 all;
  abi_result code = plugin_describe(device, &all);
  if (code) return code;
  *into = (abi_properties_v9){
      .name = all.name,
      .pci_path = all.pci_path,
      .guid = all.guid,
      .memory = all.memory,
      .speed = all.speed,
      .latency = all.latency,
      .most_comms = all.most_comms,
      .most_receives = all.most_receives,
      .device_type = all.device_type,
      .parts = {1, {device}},
      .most_bytes = all.most_bytes,
      .most_bytes_of_collective = all.most_bytes_of_collective,
  };
  return ABI_OK;
}

// ---------------------------------------------------------------- connecting

abi_result plugin_listen(uint64_t communicator, int device, void *handle, void **into) {
  *into = NULL;
  if (!is_ours(device)) return ABI_INVALID;
  listening *made = malloc(sizeof *made);
  if (!made) return ABI_SYSTEM;
  made->communicator = communicator;
  abi_result code = result_of(np_listen(handle, &made->listener), "listen");
  if (code) free(made);
  else *into = made;
  return code;
}

// A comm keeps the engine alive, whatever becomes of NCCL's communicator.
static abi_result keep(np_comm *comm) {
  int code = comm ? np_start(NULL) : NP_OK;
  if (code) np_close(comm);
  return result_of(code, "a comm");
}

abi_result plugin_connect(uint64_t communicator, int device, void *handle, void **into, abi_device **on_gpu) {
  _Alignas(uint64_t) char aligned[NP_HANDLE_BYTES]; // NCCL's is anywhere
  np_comm *comm = NULL;
  *into = NULL;
  if (on_gpu) *on_gpu = NULL;
  if (!is_ours(device)) return ABI_INVALID;
  memcpy(aligned, handle, sizeof aligned);
  int code = np_connect(aligned, communicator, &comm);
  memcpy(handle, aligned, sizeof aligned); // what has been begun is noted there
  if (code) return result_of(code, "connect");
  code = keep(comm);
  if (!code) *into = comm;
  return code;
}

abi_result plugin_accept(void *listener, void **into, abi_device **on_gpu) {
  listening *at = listener;
  np_comm *comm = NULL;
  *into = NULL;
  if (on_gpu) *on_gpu = NULL;
  int code = np_accept(at->listener, at->communicator, &comm);
  if (code) return result_of(code, "accept");
  code = keep(comm);
  if (!code) *into = comm;
  return code;
}

// What is under way is dropped, and its memory is not touched any more.
abi_result plugin_close(void *comm) {
  // A child that was forked closes what is its parent's: nothing is to be done.
  if (!comm || np_close(comm)) return ABI_OK;
  np_stop();
  return ABI_OK;
}

abi_result plugin_close_listener(void *listener) {
  listening *at = listener;
  if (!at) return ABI_OK;
  int code = np_close_listener(at->listener);
  free(at);
  return result_of(code, "closing a listener");
}

// ---------------------------------------------------------------- messages

abi_result plugin_register(void *comm, void *data, size_t size, int memory, void **registered) {
  (void)comm, (void)data, (void)size;
  *registered = NULL;
  if (memory != ABI_HOST_MEMORY) {
    WARN("memory of kind %d cannot be sent: only that of the host can", memory);
    return ABI_INVALID;
  }
  *registered = &registered_memory;
  return ABI_OK;
}

abi_result plugin_deregister(void *comm, void *registered) {
  (void)comm, (void)registered;
  return ABI_OK;
}

abi_result plugin_isend(void *comm, void *data, size_t size, void **request) {
  np_request *made = NULL;
  int code = np_isend(comm, data, size, &made);
  *request = made;
  return result_of(code, "isend");
}

static int is_one(int count) {
  if (count == 1) return 1;
  WARN("irecv of %d messages at once: it can be one only, as the properties say", count);
  return 0;
}

abi_result plugin_irecv(void *comm, int count, void *data, size_t size, void **request) {
  np_request *made = NULL;
  *request = NULL; // it may have said that nobody need be told of the end; who asks is told nevertheless
  if (!is_one(count)) return ABI_INVALID;
  int code = np_irecv(comm, data, size, &made);
  *request = made;
  return result_of(code, "irecv");
}

abi_result plugin_iflush(void *comm, int count, void **data, int *sizes, void **registered, void **request) {
  (void)comm, (void)count, (void)data, (void)sizes, (void)registered;
  *request = &flushed;
  return ABI_OK;
}

abi_result plugin_test(void *request, int *done, int *sizes) {
  size_t size = 0;
  int code = NP_OK;
  if (request == &flushed) *done = 1;
  else code = np_test(request, done, &size);
  if (!code && *done && sizes) *sizes = (int)size;
  return result_of(code, "test");
}
