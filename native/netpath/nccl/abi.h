// Abi: what NCCL and RCCL expect of a net plugin, versions 8 to 12, in our own words.
//
// NCCL looks up the newest const object `ncclNetPlugin_vN` that it knows: a name and a list of functions. The names of
// fields and types are ours; their order and their sizes are NCCL's, and are checked below (x86-64 and AArch64 Linux).
//
//   v8   NCCL 2.20 - 2.23   v11  2.28 - 2.29
//   v9   2.24 - 2.25        v12  2.30 - 2.32
//   v10  2.26 - 2.27

#ifndef NCCL_ABI_H
#define NCCL_ABI_H

#include <stddef.h>
#include <stdint.h>

enum { // results
  ABI_OK = 0,
  ABI_SYSTEM = 2,
  ABI_INTERNAL = 3,
  ABI_INVALID = 5,
  ABI_REMOTE = 6,
};

enum {
  ABI_HANDLE_BYTES = 128, // of whoever listens; NCCL carries it to whoever connects, and keeps it between calls
  ABI_REQUESTS = 32,      // under way in a comm, at most
  ABI_HOST_MEMORY = 1,    // a bit for each kind of memory
  ABI_CUDA_MEMORY = 2,
  ABI_HOST_DEVICE = 0,    // nothing of the transport runs on the GPU
};

enum { // of messages
  ABI_LEVEL_WARN = 2,
  ABI_LEVEL_INFO = 3,
  ABI_OF_INIT = 1,
  ABI_OF_NET = 16,
};

typedef int abi_result;
typedef void (*abi_log)(int level, unsigned long flags, const char *file, int line, const char *format, ...);
typedef struct abi_profiler abi_profiler; // a function of NCCL's that is never called here

typedef struct { // what connect and accept may tell of a transport that runs on the GPU
  int type, version;
  void *handle;
  size_t size;
  int needs_progress;
} abi_device;

typedef struct { // how a communicator is to be used
  int traffic_class;
} abi_config;

typedef struct abi_hints abi_hints; // never read

// ---------------------------------------------------------------- properties of a device

typedef struct {
  int count, device[4];
} abi_parts_v9; // devices that this one is made of

typedef struct {
  int count, device[8];
} abi_parts_v12;

typedef struct {
  const char *name, *pci_path;
  uint64_t guid;
  int memory;    // kinds that may be sent and received
  int registers_for_all;
  int speed;     // Mb/s
  int port;
  float latency; // us
  int most_comms, most_receives, device_type, device_version;
} abi_properties_v8;

typedef struct { // and v10
  const char *name, *pci_path;
  uint64_t guid;
  int memory, registers_for_all;
  int always_flushes; // received data needs a flush before the GPU reads it
  int speed, port;
  float latency;
  int most_comms, most_receives, device_type, device_version;
  abi_parts_v9 parts;
  size_t most_bytes, most_bytes_of_collective; // of a message
} abi_properties_v9;

typedef struct {
  const char *name, *pci_path;
  uint64_t guid;
  int memory, registers_for_all, always_flushes, speed, port;
  float latency;
  int most_comms, most_receives, device_type, device_version;
  abi_parts_v9 parts;
  size_t most_bytes, most_bytes_of_collective;
  int most_requests_at_once;
} abi_properties_v11;

typedef struct {
  const char *name, *pci_path;
  uint64_t guid;
  int memory, registers_for_all, always_flushes, speed, port;
  float latency;
  int most_comms, most_receives, device_type, device_version;
  abi_parts_v12 parts;
  size_t most_bytes, most_bytes_of_collective;
  int most_requests_at_once;
  int16_t rail, plane; // -1: not known
} abi_properties_v12;

// ---------------------------------------------------------------- functions

typedef abi_result abi_devices(int *count);
typedef abi_result abi_listen(int device, void *handle, void **listener);
typedef abi_result abi_connect(int device, void *handle, void **comm, abi_device **on_gpu);
typedef abi_result abi_accept(void *listener, void **comm, abi_device **on_gpu);
typedef abi_result abi_register(void *comm, void *data, size_t size, int memory, void **registered);
typedef abi_result abi_register_dma(void *comm, void *data, size_t size, int memory, uint64_t offset, int file,
                                    void **registered);
typedef abi_result abi_deregister(void *comm, void *registered);
typedef abi_result abi_isend_v9(void *comm, void *data, size_t size, int tag, void *registered, void **request);
typedef abi_result abi_irecv_v9(void *comm, int count, void **data, size_t *sizes, int *tags, void **registered,
                                void **request);
typedef abi_result abi_isend_v10(void *comm, void *data, size_t size, int tag, void *registered, void *profiled,
                                 void **request);
typedef abi_result abi_irecv_v10(void *comm, int count, void **data, size_t *sizes, int *tags, void **registered,
                                 void **profiled, void **request);
typedef abi_result abi_iflush(void *comm, int count, void **data, int *sizes, void **registered, void **request);
typedef abi_result abi_test(void *request, int *done, int *sizes);
typedef abi_result abi_close(void *comm);
typedef abi_result abi_device_registered(void *comm, void *registered, void **on_gpu);
typedef abi_result abi_irecv_consumed(void *comm, int count, void *request);
typedef abi_result abi_make_device_v9(int *device, abi_parts_v9 *parts);
typedef abi_result abi_make_device_v12(int *device, abi_parts_v12 *parts);

typedef abi_result abi_init_v11(void **context, uint64_t communicator, abi_config *config, abi_log log,
                                abi_profiler *profiler);
typedef abi_result abi_listen_v11(void *context, int device, void *handle, void **listener);
typedef abi_result abi_connect_v11(void *context, int device, void *handle, void **comm, abi_device **on_gpu);
typedef abi_result abi_finalize(void *context);
typedef abi_result abi_hint(void *context, abi_hints *hints);

typedef struct {
  const char *name;
  abi_result (*init)(abi_log log);
  abi_devices *devices;
  abi_result (*properties)(int device, abi_properties_v8 *into);
  abi_listen *listen;
  abi_connect *connect;
  abi_accept *accept;
  abi_register *register_memory;
  abi_register_dma *register_dma;
  abi_deregister *deregister;
  abi_result (*isend)(void *comm, void *data, int size, int tag, void *registered, void **request);
  abi_result (*irecv)(void *comm, int count, void **data, int *sizes, int *tags, void **registered, void **request);
  abi_iflush *iflush;
  abi_test *test;
  abi_close *close_send, *close_receive, *close_listener;
  abi_device_registered *device_registered;
  abi_irecv_consumed *irecv_consumed;
} abi_net_v8;

typedef struct {
  const char *name;
  abi_result (*init)(abi_log log);
  abi_devices *devices;
  abi_result (*properties)(int device, abi_properties_v9 *into);
  abi_listen *listen;
  abi_connect *connect;
  abi_accept *accept;
  abi_register *register_memory;
  abi_register_dma *register_dma;
  abi_deregister *deregister;
  abi_isend_v9 *isend;
  abi_irecv_v9 *irecv;
  abi_iflush *iflush;
  abi_test *test;
  abi_close *close_send, *close_receive, *close_listener;
  abi_device_registered *device_registered;
  abi_irecv_consumed *irecv_consumed;
  abi_make_device_v9 *make_device;
} abi_net_v9;

typedef struct {
  const char *name;
  abi_result (*init)(abi_log log, abi_profiler *profiler);
  abi_devices *devices;
  abi_result (*properties)(int device, abi_properties_v9 *into);
  abi_listen *listen;
  abi_result (*connect)(int device, abi_config *config, void *handle, void **comm, abi_device **on_gpu);
  abi_accept *accept;
  abi_register *register_memory;
  abi_register_dma *register_dma;
  abi_deregister *deregister;
  abi_isend_v10 *isend;
  abi_irecv_v10 *irecv;
  abi_iflush *iflush;
  abi_test *test;
  abi_close *close_send, *close_receive, *close_listener;
  abi_device_registered *device_registered;
  abi_irecv_consumed *irecv_consumed;
  abi_make_device_v9 *make_device;
} abi_net_v10;

typedef struct {
  const char *name;
  abi_init_v11 *init; // once for each communicator
  abi_devices *devices;
  abi_result (*properties)(int device, abi_properties_v11 *into);
  abi_listen_v11 *listen;
  abi_connect_v11 *connect;
  abi_accept *accept;
  abi_register *register_memory;
  abi_register_dma *register_dma;
  abi_deregister *deregister;
  abi_isend_v10 *isend;
  abi_irecv_v10 *irecv;
  abi_iflush *iflush;
  abi_test *test;
  abi_close *close_send, *close_receive, *close_listener;
  abi_device_registered *device_registered;
  abi_irecv_consumed *irecv_consumed;
  abi_make_device_v9 *make_device;
  abi_finalize *finalize;
  abi_hint *hint;
} abi_net_v11;

typedef struct {
  const char *name;
  abi_init_v11 *init;
  abi_devices *devices;
  abi_result (*properties)(int device, abi_properties_v12 *into);
  abi_listen_v11 *listen;
  abi_connect_v11 *connect;
  abi_accept *accept;
  abi_register *register_memory;
  abi_register_dma *register_dma;
  abi_deregister *deregister;
  abi_isend_v10 *isend;
  abi_irecv_v10 *irecv;
  abi_iflush *iflush;
  abi_test *test;
  abi_close *close_send, *close_receive, *close_listener;
  abi_device_registered *device_registered;
  abi_irecv_consumed *irecv_consumed;
  abi_make_device_v12 *make_device;
  abi_finalize *finalize;
  abi_hint *hint;
} abi_net_v12;

// ---------------------------------------------------------------- checks

#define ABI_SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), #type " is of another size in NCCL")
#define ABI_PLACE(type, field, at) \
  _Static_assert(offsetof(type, field) == (at), #field " of " #type " is at another place in NCCL")

ABI_SIZE(void *, 8);
ABI_SIZE(abi_device, 32);
ABI_SIZE(abi_parts_v9, 20);
ABI_SIZE(abi_parts_v12, 36);

ABI_SIZE(abi_net_v8, 152);
ABI_SIZE(abi_net_v9, 160);
ABI_SIZE(abi_net_v10, 160);
ABI_SIZE(abi_net_v11, 176);
ABI_SIZE(abi_net_v12, 176);

ABI_SIZE(abi_properties_v8, 64);
ABI_PLACE(abi_properties_v8, speed, 32);
ABI_PLACE(abi_properties_v8, device_version, 56);

ABI_SIZE(abi_properties_v9, 104);
ABI_SIZE(abi_properties_v11, 112);
ABI_SIZE(abi_properties_v12, 128);

#define ABI_PLACES_SINCE_V9(type)   \
  ABI_PLACE(type, always_flushes, 32); \
  ABI_PLACE(type, speed, 36);       \
  ABI_PLACE(type, latency, 44);     \
  ABI_PLACE(type, parts, 64)

ABI_PLACES_SINCE_V9(abi_properties_v9);
ABI_PLACES_SINCE_V9(abi_properties_v11);
ABI_PLACES_SINCE_V9(abi_properties_v12);

ABI_PLACE(abi_properties_v9, most_bytes, 88);
ABI_PLACE(abi_properties_v9, most_bytes_of_collective, 96);
ABI_PLACE(abi_properties_v11, most_bytes, 88);
ABI_PLACE(abi_properties_v11, most_bytes_of_collective, 96);
ABI_PLACE(abi_properties_v11, most_requests_at_once, 104);
ABI_PLACE(abi_properties_v12, most_bytes, 104);
ABI_PLACE(abi_properties_v12, most_requests_at_once, 120);
ABI_PLACE(abi_properties_v12, rail, 124);
ABI_PLACE(abi_properties_v12, plane, 126);

#undef ABI_PLACES_SINCE_V9
#undef ABI_PLACE
#undef ABI_SIZE

#endif
