// Plugin, versions 11 and 12: a context for each communicator, with an end.

#include <string.h>

#include "plugin.h"

static abi_result init(void **context, uint64_t communicator, abi_config *config, abi_log log, abi_profiler *profiler) {
  (void)config, (void)profiler;
  return plugin_begin(context, communicator, log);
}

static abi_result listen_at(void *context, int device, void *handle, void **listener) {
  return plugin_listen(plugin_communicator(context), device, handle, listener);
}

static abi_result connect_to(void *context, int device, void *handle, void **comm, abi_device **on_gpu) {
  return plugin_connect(plugin_communicator(context), device, handle, comm, on_gpu);
}

static abi_result isend(void *comm, void *data, size_t size, int tag, void *registered, void *profiled,
                        void **request) {
  (void)tag, (void)registered, (void)profiled;
  return plugin_isend(comm, data, size, request);
}

static abi_result irecv(void *comm, int count, void **data, size_t *sizes, int *tags, void **registered,
                        void **profiled, void **request) {
  (void)tags, (void)registered, (void)profiled;
  return plugin_irecv(comm, count, data[0], sizes[0], request);
}

static abi_result describe_v11(int device, abi_properties_v11 *into) {
  abi_properties_v9 all_but_the_last;
  abi_result code = plugin_describe_v9(device, &all_but_the_last);
  if (code) return code;
  memset(into, 0, sizeof *into);
  memcpy(into, &all_but_the_last, sizeof all_but_the_last);
  into->most_requests_at_once = 1;
  return ABI_OK;
}

#define FIELDS                                                                                             \
  PLUGIN_FIELDS, .init = init, .listen = listen_at, .connect = connect_to, .isend = isend, .irecv = irecv, \
  .finalize = plugin_finalize

NP_API extern const abi_net_v11 ncclNetPlugin_v11;
NP_API extern const abi_net_v12 ncclNetPlugin_v12;
const abi_net_v11 ncclNetPlugin_v11 = {FIELDS, .properties = describe_v11};
const abi_net_v12 ncclNetPlugin_v12 = {FIELDS, .properties = plugin_describe};
