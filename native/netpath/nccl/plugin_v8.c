// Plugin, versions 8 to 10: there are no contexts, and nobody says when we are not needed any more.

#include "plugin.h"

static abi_result listen_at(int device, void *handle, void **listener) {
  return plugin_listen(0, device, handle, listener);
}

static abi_result connect_to(int device, void *handle, void **comm, abi_device **on_gpu) {
  return plugin_connect(0, device, handle, comm, on_gpu);
}

// ---------------------------------------------------------------- version 8

static abi_result describe_v8(int device, abi_properties_v8 *into) {
  abi_properties_v12 all;
  abi_result code = plugin_describe(device, &all);
  if (code) return code;
  *into = (abi_properties_v8){
      .name = all.name,
      .pci_path = all.pci_path,
      .guid = all.guid,
      .memory = all.memory,
      .speed = all.speed,
      .latency = all.latency,
      .most_comms = all.most_comms,
      .most_receives = all.most_receives,
      .device_type = all.device_type,
  };
  return ABI_OK;
}

// A size below zero is one that is too long, and is refused as such.
static abi_result isend_v8(void *comm, void *data, int size, int tag, void *registered, void **request) {
  (void)tag, (void)registered;
  return plugin_isend(comm, data, (size_t)size, request);
}

static abi_result irecv_v8(void *comm, int count, void **data, int *sizes, int *tags, void **registered,
                           void **request) {
  (void)tags, (void)registered;
  return plugin_irecv(comm, count, data[0], (size_t)sizes[0], request);
}

NP_API extern const abi_net_v8 ncclNetPlugin_v8;
const abi_net_v8 ncclNetPlugin_v8 = {
    PLUGIN_FIELDS,
    .init = plugin_begin_for_good,
    .properties = describe_v8,
    .listen = listen_at,
    .connect = connect_to,
    .isend = isend_v8,
    .irecv = irecv_v8,
};

// ---------------------------------------------------------------- version 9: longer sizes

static abi_result isend_v9(void *comm, void *data, size_t size, int tag, void *registered, void **request) {
  (void)tag, (void)registered;
  return plugin_isend(comm, data, size, request);
}

static abi_result irecv_v9(void *comm, int count, void **data, size_t *sizes, int *tags, void **registered,
                           void **request) {
  (void)tags, (void)registered;
  return plugin_irecv(comm, count, data[0], sizes[0], request);
}

NP_API extern const abi_net_v9 ncclNetPlugin_v9;
const abi_net_v9 ncclNetPlugin_v9 = {
    PLUGIN_FIELDS,
    .init = plugin_begin_for_good,
    .properties = plugin_describe_v9,
    .listen = listen_at,
    .connect = connect_to,
    .isend = isend_v9,
    .irecv = irecv_v9,
};

// ---------------------------------------------------------------- version 10: a profiler, and a traffic class

static abi_result init_v10(abi_log log, abi_profiler *profiler) {
  (void)profiler;
  return plugin_begin_for_good(log);
}

static abi_result connect_v10(int device, abi_config *config, void *handle, void **comm, abi_device **on_gpu) {
  (void)config;
  return connect_to(device, handle, comm, on_gpu);
}

static abi_result isend_v10(void *comm, void *data, size_t size, int tag, void *registered, void *profiled,
                            void **request) {
  (void)tag, (void)registered, (void)profiled;
  return plugin_isend(comm, data, size, request);
}

static abi_result irecv_v10(void *comm, int count, void **data, size_t *sizes, int *tags, void **registered,
                            void **profiled, void **request) {
  (void)tags, (void)registered, (void)profiled;
  return plugin_irecv(comm, count, data[0], sizes[0], request);
}

NP_API extern const abi_net_v10 ncclNetPlugin_v10;
const abi_net_v10 ncclNetPlugin_v10 = {
    PLUGIN_FIELDS,
    .init = init_v10,
    .properties = plugin_describe_v9,
    .listen = listen_at,
    .connect = connect_v10,
    .isend = isend_v10,
    .irecv = irecv_v10,
};
