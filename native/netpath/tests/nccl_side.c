// Side: the plugin as NCCL sees it, whatever its version; how two processes find each other over it.

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "nccl_side.h"

int version;
net_common net;
const char *net_name;

static void *library;
static union {
  const void *any;
  const abi_net_v8 *v8;
  const abi_net_v9 *v9;
  const abi_net_v10 *v10;
  const abi_net_v11 *v11;
  const abi_net_v12 *v12;
} plugin;

// ---------------------------------------------------------------- the log

enum { LOG_BYTES = 1 << 18 };

static struct {
  pthread_mutex_t lock;
  char text[LOG_BYTES];
  size_t used;
} logged = {.lock = PTHREAD_MUTEX_INITIALIZER};

__attribute__((format(printf, 5, 6))) static void log_line(int level, unsigned long flags, const char *file, int line,
                                                         const char *format, ...) {
  char text[2048];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (getenv("NCCL_DEBUG")) fprintf(stderr, "[%d] %s:%d %d %#lx %s\n", (int)getpid(), file, line, level, flags, text);
  pthread_mutex_lock(&logged.lock);
  if (logged.used + strlen(text) + 3 < LOG_BYTES)
    logged.used += (size_t)sprintf(logged.text + logged.used, "%d%s\n", level, text);
  pthread_mutex_unlock(&logged.lock);
}

int log_count(int level, const char *part) {
  int count = 0;
  pthread_mutex_lock(&logged.lock);
  for (char *line = logged.text, *end; (end = strchr(line, '\n')); line = end + 1) {
    *end = 0;
    count += *line == '0' + level && strstr(line, part);
    *end = '\n';
  }
  pthread_mutex_unlock(&logged.lock);
  return count;
}

// ---------------------------------------------------------------- loading

#define TAKE(of) \
  net = (net_common){(of)->devices, (of)->accept,     (of)->register_memory, (of)->deregister,    (of)->iflush, \
                     (of)->test,    (of)->close_send, (of)->close_receive,   (of)->close_listener}; \
  net_name = (of)->name

void *net_symbol(const char *name) {
  void *found = dlsym(library, name);
  CHECK(found, "%s", dlerror());
  return found;
}

void net_open(const char *path, int of_version) {
  char name[32];
  version = of_version;
  library = dlopen(path, RTLD_NOW | RTLD_LOCAL); // as NCCL does
  CHECK(library, "%s", dlerror());
  snprintf(name, sizeof name, "ncclNetPlugin_v%d", version);
  plugin.any = net_symbol(name);
  switch (version) {
  case 8: TAKE(plugin.v8); break;
  case 9: TAKE(plugin.v9); break;
  case 10: TAKE(plugin.v10); break;
  case 11: TAKE(plugin.v11); break;
  default: TAKE(plugin.v12); break;
  }
}

int net_release(void) {
  Dl_info info;
  CHECK(dladdr(plugin.any, &info), "the library's name");
  char *path = strdup(info.dli_fname);
  CHECK(!dlclose(library), "%s", dlerror());
  library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  int there = library != NULL;
  if (there) dlclose(library);
  free(path);
  return there;
}

void net_check_symbol(void) {
  static const size_t sizes[] = {152, 160, 160, 176, 176};
  const ElfW(Sym) *symbol = NULL;
  Dl_info info;
  CHECK(dladdr1(plugin.any, &info, (void **)&symbol, RTLD_DL_SYMENT) && symbol, "no symbol is there");
  CHECK(ELF64_ST_TYPE(symbol->st_info) == STT_OBJECT, "type %d", ELF64_ST_TYPE(symbol->st_info));
  CHECK(symbol->st_size == sizes[version - 8], "%zu", (size_t)symbol->st_size);
}

// ---------------------------------------------------------------- calls

int net_has_contexts(void) { return version >= 11; }

abi_result net_init(void **context, uint64_t communicator) {
  abi_config config = {-1};
  *context = NULL;
  switch (version) {
  case 8: return plugin.v8->init(log_line);
  case 9: return plugin.v9->init(log_line);
  case 10: return plugin.v10->init(log_line, NULL);
  case 11: return plugin.v11->init(context, communicator, &config, log_line, NULL);
  default: return plugin.v12->init(context, communicator, &config, log_line, NULL);
  }
}

abi_result net_finalize(void *context) {
  if (!net_has_contexts()) return ABI_OK;
  return version == 11 ? plugin.v11->finalize(context) : plugin.v12->finalize(context);
}

abi_result net_properties(int device, abi_properties_v12 *into) {
  // What an older version writes lies at the same place up to its parts, but for version 8.
  abi_properties_v8 v8 = {0};
  abi_properties_v11 v11;
  abi_result code;
  memset(&v11, 0xee, sizeof v11);
  if (version == 12) return plugin.v12->properties(device, into);
  if (version == 11) code = plugin.v11->properties(device, &v11);
  else if (version == 8) code = plugin.v8->properties(device, &v8);
  else code = (version == 9 ? plugin.v9->properties : plugin.v10->properties)(device, (abi_properties_v9 *)&v11);
  *into = (abi_properties_v12){v8.name, v8.pci_path, v8.guid, v8.memory, v8.registers_for_all, 0, v8.speed, v8.port,
                               v8.latency, v8.most_comms, v8.most_receives, v8.device_type, v8.device_version,
                               .parts = {-2, {-2}}, .most_requests_at_once = -2, .rail = -2, .plane = -2};
  if (version == 8) return code;
  memcpy(into, &v11, offsetof(abi_properties_v11, parts));
  into->parts.count = v11.parts.count;
  into->parts.device[0] = v11.parts.device[0];
  into->most_bytes = v11.most_bytes;
  into->most_bytes_of_collective = v11.most_bytes_of_collective;
  if (version == 11) into->most_requests_at_once = v11.most_requests_at_once;
  else CHECK(all_are((uint8_t *)&v11 + sizeof(abi_properties_v9), sizeof v11 - sizeof(abi_properties_v9), 0xee),
             "more was written than version %d has", version);
  return code;
}

// None of these calls may block: the longest is kept, in ns.
static _Atomic uint64_t longest;

static abi_result timed(double begun, abi_result code) {
  uint64_t took = (uint64_t)((now() - begun) * 1e9);
  uint64_t most = longest;
  while (took > most && !atomic_compare_exchange_weak(&longest, &most, took)) {}
  return code;
}

double net_longest_call(void) { return (double)longest / 1e9; }

abi_result net_listen(void *context, int device, void *handle, void **listener) {
  double begun = now();
  switch (version) {
  case 8: return timed(begun, plugin.v8->listen(device, handle, listener));
  case 9: return timed(begun, plugin.v9->listen(device, handle, listener));
  case 10: return timed(begun, plugin.v10->listen(device, handle, listener));
  case 11: return timed(begun, plugin.v11->listen(context, device, handle, listener));
  default: return timed(begun, plugin.v12->listen(context, device, handle, listener));
  }
}

abi_result net_connect(void *context, int device, void *handle, void **comm) {
  abi_device *on_gpu = (abi_device *)&net;
  abi_config config = {-1};
  abi_result code;
  double begun = now();
  switch (version) {
  case 8: code = plugin.v8->connect(device, handle, comm, &on_gpu); break;
  case 9: code = plugin.v9->connect(device, handle, comm, &on_gpu); break;
  case 10: code = plugin.v10->connect(device, &config, handle, comm, &on_gpu); break;
  case 11: code = plugin.v11->connect(context, device, handle, comm, &on_gpu); break;
  default: code = plugin.v12->connect(context, device, handle, comm, &on_gpu); break;
  }
  CHECK(!on_gpu, "connect tells of something on the GPU");
  return timed(begun, code);
}

abi_result net_accept(void *listener, void **comm) {
  abi_device *on_gpu = (abi_device *)&net;
  double begun = now();
  abi_result code = net.accept(listener, comm, &on_gpu);
  CHECK(!on_gpu, "accept tells of something on the GPU");
  return timed(begun, code);
}

abi_result net_isend(void *comm, void *data, size_t size, void **request) {
  double begun = now();
  switch (version) {
  case 8: return timed(begun, plugin.v8->isend(comm, data, (int)size, 0, NULL, request));
  case 9: return timed(begun, plugin.v9->isend(comm, data, size, 0, NULL, request));
  case 10: return timed(begun, plugin.v10->isend(comm, data, size, 0, NULL, NULL, request));
  case 11: return timed(begun, plugin.v11->isend(comm, data, size, 0, NULL, NULL, request));
  default: return timed(begun, plugin.v12->isend(comm, data, size, 0, NULL, NULL, request));
  }
}

abi_result net_irecv(void *comm, int count, void *data, size_t size, void **request) {
  void *all[8] = {data, data}, *registered[8] = {0}, *profiled[8] = {0};
  size_t sizes[8] = {size, size};
  int tags[8] = {0}, small[8] = {(int)size, (int)size};
  double begun = now();
  switch (version) {
  case 8: return timed(begun, plugin.v8->irecv(comm, count, all, small, tags, registered, request));
  case 9: return timed(begun, plugin.v9->irecv(comm, count, all, sizes, tags, registered, request));
  case 10: return timed(begun, plugin.v10->irecv(comm, count, all, sizes, tags, registered, profiled, request));
  case 11: return timed(begun, plugin.v11->irecv(comm, count, all, sizes, tags, registered, profiled, request));
  default: return timed(begun, plugin.v12->irecv(comm, count, all, sizes, tags, registered, profiled, request));
  }
}

abi_result net_test(void *request, int *done, int *size) {
  double begun = now();
  return timed(begun, net.test(request, done, size));
}

abi_result net_wait(void *request, int *size) {
  abi_result code = ABI_OK;
  for (int done = 0; !done && !code;) {
    code = net_test(request, &done, size);
    if (!done) sched_yield();
  }
  return code;
}

// ---------------------------------------------------------------- comms

// NCCL's handles lie anywhere: these at an odd place.
typedef struct {
  char odd, bytes[ABI_HANDLE_BYTES];
} odd_handle;

void *open_receive(void *context) {
  odd_handle handle;
  void *listener = NULL, *comm = NULL;
  OK(net_listen(context, 0, handle.bytes, &listener));
  CHECK(listener, "listen must return a comm");
  tell_peer(handle.bytes, sizeof handle.bytes);
  for (; !comm; sched_yield()) OK(net_accept(listener, &comm));
  OK(net.close_listener(listener));
  return comm;
}

void *open_send(void *context) {
  odd_handle handle;
  void *comm = NULL;
  hear_peer(handle.bytes, sizeof handle.bytes);
  for (; !comm; sched_yield()) OK(net_connect(context, 0, handle.bytes, &comm));
  return comm;
}

// Whoever listens accepts, and whoever has a handle connects, by turns: nobody waits for the other.
static void turn(void *context, odd_handle *theirs, void *listener, void **send, void **receive) {
  *send = *receive = NULL;
  for (; !*send || !*receive; sched_yield()) {
    if (!*send) OK(net_connect(context, 0, theirs->bytes, send));
    if (!*receive) OK(net_accept(listener, receive));
  }
  OK(net.close_listener(listener));
}

void open_both(void *context, void **send, void **receive) {
  odd_handle ours, theirs;
  void *listener = NULL;
  OK(net_listen(context, 0, ours.bytes, &listener));
  tell_peer(ours.bytes, sizeof ours.bytes);
  hear_peer(theirs.bytes, sizeof theirs.bytes);
  turn(context, &theirs, listener, send, receive);
}

void open_self(void *context, void **send, void **receive) {
  odd_handle handle;
  void *listener = NULL;
  OK(net_listen(context, 0, handle.bytes, &listener));
  turn(context, &handle, listener, send, receive);
}

void close_both(void *send, void *receive) {
  OK(net.close_send(send));
  OK(net.close_receive(receive));
}

talk talk_begin(void) {
  talk t;
  OK(net_init(&t.context, 0x1234567890abcdef));
  open_both(t.context, &t.send, &t.receive);
  return t;
}

void talk_end(talk *t) {
  meet(); // nobody closes what the other has not done with
  close_both(t->send, t->receive);
  OK(net_finalize(t->context));
}

// ---------------------------------------------------------------- what this process holds

static int entries(const char *folder, int (*counts)(const char *name)) {
  DIR *list = opendir(folder);
  CHECK(list, "%s", folder);
  int count = 0;
  for (struct dirent *each; (each = readdir(list));)
    count += each->d_name[0] != '.' && (!counts || counts(each->d_name)) && atoi(each->d_name) != dirfd(list);
  closedir(list);
  return count;
}

static int is_socket(const char *number) {
  struct stat found;
  return !fstat(atoi(number), &found) && S_ISSOCK(found.st_mode);
}

int open_files(void) { return entries("/proc/self/fd", NULL); }

int open_sockets(void) { return entries("/proc/self/fd", is_socket); }

int threads(void) { return entries("/proc/self/task", NULL); }
