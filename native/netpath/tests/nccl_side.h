// Side: one of the two processes that play NCCL's part, left and right. Each opens the plugin as NCCL does and calls it
// through its own symbols; what NCCL would send by its bootstrap goes over sockets between the two.

#ifndef NCCL_SIDE_H
#define NCCL_SIDE_H

#include "../nccl/abi.h"
#include "../netpath.h"

enum { CHANNELS = 4, DEPTH = ABI_REQUESTS };

// ---------------------------------------------------------------- the harness

extern int version;      // of the plugin
extern int right;        // which of the two we are
extern int peer_process; // its id

__attribute__((format(printf, 3, 4), noreturn)) void failed(const char *file, int line, const char *format, ...);
__attribute__((format(printf, 1, 2))) void stage(const char *format, ...); // said if there is no end
double now(void); // seconds

// The rest of the arguments says what was seen.
#define CHECK(condition, ...) \
  do { \
    if (!(condition)) failed(__FILE__, __LINE__, #condition ": " __VA_ARGS__); \
  } while (0)
#define OK(call) expect_result((call), ABI_OK, #call, __FILE__, __LINE__)
#define FAILS(code, call) expect_result((call), (code), #call, __FILE__, __LINE__)
void expect_result(abi_result found, abi_result wanted, const char *call, const char *file, int line);

// ---------------------------------------------------------------- the bootstrap

extern _Thread_local int channel; // threads that talk to the other side have one each
void tell_peer(const void *bytes, size_t size);
void hear_peer(void *bytes, size_t size);
int exchange(int number); // the peer's
void meet(void);
void await_stopped_peer(void); // by SIGSTOP

// ---------------------------------------------------------------- the plugin

// What is the same in all versions.
typedef struct {
  abi_devices *devices;
  abi_accept *accept;
  abi_register *register_memory;
  abi_deregister *deregister;
  abi_iflush *iflush;
  abi_test *test;
  abi_close *close_send, *close_receive, *close_listener;
} net_common;

extern net_common net;
extern const char *net_name;

void net_open(const char *library, int of_version);
int net_release(void); // dlclose; whether the library is still there
void *net_symbol(const char *name);
void net_check_symbol(void); // a constant, as long as NCCL has it

// Versions below 11 have no contexts: theirs are NULL, and finalize does nothing.
int net_has_contexts(void);
abi_result net_init(void **context, uint64_t communicator);
abi_result net_finalize(void *context);
abi_result net_properties(int device, abi_properties_v12 *into); // fields that the version does not have are -2
abi_result net_listen(void *context, int device, void *handle, void **listener);
abi_result net_connect(void *context, int device, void *handle, void **comm);
abi_result net_accept(void *listener, void **comm);
abi_result net_isend(void *comm, void *data, size_t size, void **request);
abi_result net_irecv(void *comm, int count, void *data, size_t size, void **request);
abi_result net_test(void *request, int *done, int *size);
double net_longest_call(void); // of those that must not block, in seconds

int log_count(int level, const char *part); // how many lines the plugin has logged with these words

// Asks until it is done, and lets others run meanwhile, as NCCL's progress thread does.
abi_result net_wait(void *request, int *size); // size may be NULL

// ---------------------------------------------------------------- comms

void *open_send(void *context);    // to whom listens at the other side
void *open_receive(void *context); // the other half
void open_both(void *context, void **send, void **receive);
void open_self(void *context, void **send, void **receive); // within this process
void close_both(void *send, void *receive);

// What most scenarios begin and end with: an init, and a comm each way.
typedef struct {
  void *context, *send, *receive;
} talk;

talk talk_begin(void);
void talk_end(talk *t);

// ---------------------------------------------------------------- messages, every byte of which is checked

typedef size_t (*size_rule)(uint64_t number);

typedef struct {
  void *request;
  uint8_t *data;
  size_t size, room; // a receive has more room than it needs
  uint64_t number;
} message;

typedef struct {
  void *comm;
  int sends;
  uint64_t seed;     // both sides have the same
  size_rule size_of; // of message `number`
  uint64_t total, posted, done;
  int newest_first;  // requests are asked about in this order
  message slot[DEPTH];
  uint64_t nothing_yet; // how often the plugin had no request for us
} stream;

void stream_begin(stream *s, void *comm, int sends, uint64_t seed, uint64_t total, size_rule size_of);
int stream_step(stream *s); // whether anything went on
void stream_end(stream *s); // gives its memory back
void run_streams(stream *streams, int count);
void run_one(void *comm, int sends, uint64_t seed, uint64_t total, size_rule size_of);
void run_both(void *send, void *receive, uint64_t seed, uint64_t total, size_rule size_of);
void fill_pattern(uint8_t *data, size_t size, uint64_t seed, uint64_t number);
size_t first_difference(const uint8_t *data, size_t size, uint64_t seed, uint64_t number); // `size` if there is none
int all_are(const uint8_t *data, size_t size, uint8_t value);

size_t of_step(uint64_t number);  // as NCCL's: 512 KiB
size_t of_any(uint64_t number);   // of all kinds, up to 2 MiB
size_t of_small(uint64_t number); // up to 8 KiB

// ---------------------------------------------------------------- scenarios

typedef enum { IN_BOTH, ALONE, RIGHT_DIES } cast;

typedef struct {
  const char *name;
  void (*play)(void);
  cast cast;
  int since; // of the plugin's versions
} scenario;

// Each up to one without a name.
extern const scenario message_scenarios[], life_scenarios[], fault_scenarios[], figure_scenarios[];

int open_files(void); // of this process
int open_sockets(void);
int threads(void);

#endif
