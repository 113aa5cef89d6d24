// Plugin: what all versions have in common, in plugin.c. `communicator` is NCCL's number of one, or 0.

#ifndef NCCL_PLUGIN_H
#define NCCL_PLUGIN_H

#include "../netpath.h"
#include "abi.h"

extern const char plugin_name[]; // for NCCL_NET

abi_result plugin_begin_for_good(abi_log log); // until the process ends; may be called again
abi_result plugin_begin(void **context, uint64_t communicator, abi_log log);
abi_result plugin_finalize(void *context); // NULL: its beginning had failed
uint64_t plugin_communicator(const void *context);

abi_devices plugin_devices;
abi_result plugin_describe(int device, abi_properties_v12 *into); // the newest version's: the older have less
abi_result plugin_describe_v9(int device, abi_properties_v9 *into);

abi_result plugin_listen(uint64_t communicator, int device, void *handle, void **listener);
abi_result plugin_connect(uint64_t communicator, int device, void *handle, void **comm, abi_device **on_gpu);
abi_accept plugin_accept;
abi_close plugin_close, plugin_close_listener;

abi_register plugin_register;
abi_deregister plugin_deregister;
abi_result plugin_isend(void *comm, void *data, size_t size, void **request);
abi_result plugin_irecv(void *comm, int count, void *data, size_t size, void **request);
abi_iflush plugin_iflush;
abi_test plugin_test;

// Fields of all versions. What is not listed is NULL: there is no memory of the GPU, and no device made of others.
#define PLUGIN_FIELDS                                                                                          \
  .name = plugin_name, .devices = plugin_devices, .accept = plugin_accept, .register_memory = plugin_register, \
  .deregister = plugin_deregister, .iflush = plugin_iflush, .test = plugin_test, .close_send = plugin_close,   \
  .close_receive = plugin_close, .close_listener = plugin_close_listener

#endif
