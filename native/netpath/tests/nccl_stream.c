// Stream: messages one way over a comm, as many under way as NCCL has. Every byte is checked, those behind each, too.

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_side.h"

enum { BEHIND = 64 }; // bytes after a receive's room that nobody may touch

static const uint8_t UNTOUCHED = 0xee;

// ---------------------------------------------------------------- bytes

static uint64_t mixed(uint64_t x) { // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

static uint64_t key_of(uint64_t seed, uint64_t number) { return mixed(mixed(seed) ^ number); }

static uint64_t word_at(uint64_t key, size_t at) { return key + at * 0x9e3779b97f4a7c15u; }

void fill_pattern(uint8_t *data, size_t size, uint64_t seed, uint64_t number) {
  uint64_t key = key_of(seed, number);
  for (size_t at = 0; at < size; at += 8) {
    uint64_t word = word_at(key, at);
    memcpy(data + at, &word, size - at < 8 ? size - at : 8);
  }
}

size_t first_difference(const uint8_t *data, size_t size, uint64_t seed, uint64_t number) {
  uint64_t key = key_of(seed, number);
  for (size_t at = 0; at < size; at += 8) {
    uint64_t word = word_at(key, at);
    if (memcmp(data + at, &word, size - at < 8 ? size - at : 8)) return at;
  }
  return size;
}

int all_are(const uint8_t *data, size_t size, uint8_t value) {
  for (size_t at = 0; at < size; at++)
    if (data[at] != value) return 0;
  return 1;
}

// ---------------------------------------------------------------- sizes

size_t of_step(uint64_t number) {
  (void)number;
  return 512 << 10;
}

size_t of_small(uint64_t number) { return mixed(number) % 8193; }

size_t of_any(uint64_t number) {
  static const size_t special[] = {0,     1,      2,      7,          8,          9,      4095,    4096,
                                   4097,  65535,  262143, 262144,     262145,     524287, 524288,  524289,
                                   0,     786433, 0,      (1 << 20),  1048577,    3,      1999993, (2 << 20)};
  size_t count = sizeof special / sizeof special[0];
  return number < count ? special[number] : mixed(number) % (number % 7 ? 5000 : 2 << 20);
}

// ---------------------------------------------------------------- streams

void stream_begin(stream *s, void *comm, int sends, uint64_t seed, uint64_t total, size_rule size_of) {
  memset(s, 0, sizeof *s);
  s->comm = comm;
  s->sends = sends;
  s->seed = seed;
  s->total = total;
  s->size_of = size_of;
}

static int post(stream *s, message *m) {
  m->number = s->posted;
  m->size = s->size_of(m->number);
  m->room = m->size + (s->sends ? 0 : m->number % 3 * 1000);
  m->data = malloc(m->room + BEHIND);
  CHECK(m->data, "no memory");
  m->request = s->posted % 2 ? (void *)1 : NULL; // "the end need not be told": a hint that changes nothing
  if (s->sends) {
    fill_pattern(m->data, m->size, s->seed, m->number);
    OK(net_isend(s->comm, m->data, m->size, &m->request));
  } else {
    memset(m->data, UNTOUCHED, m->room + BEHIND);
    OK(net_irecv(s->comm, 1, m->data, m->room, &m->request));
  }
  CHECK(m->request != (void *)1, "the request was not filled in");
  if (m->request) {
    s->posted++;
    return 1;
  }
  s->nothing_yet++;
  free(m->data);
  m->data = NULL;
  return 0;
}

static void check(const stream *s, const message *m, int size) {
  unsigned long long number = m->number;
  if (s->sends) return;
  CHECK((size_t)size == m->size, "message %llu of stream %llu: %d bytes instead of %zu", number,
        (unsigned long long)s->seed, size, m->size);
  size_t good = first_difference(m->data, m->size, s->seed, m->number);
  CHECK(good == m->size, "message %llu of stream %llu, %zu bytes: wrong at %zu: %02x", number,
        (unsigned long long)s->seed, m->size, good, m->data[good]);
  CHECK(all_are(m->data + m->size, m->room + BEHIND - m->size, UNTOUCHED),
        "message %llu of stream %llu: written behind its end", number, (unsigned long long)s->seed);
}

static int ask(stream *s, message *m) {
  int done = 0, size = -1;
  if (!m->request) return 0;
  OK(net_test(m->request, &done, &size));
  if (!done) return 0;
  check(s, m, size);
  free(m->data);
  m->data = NULL;
  m->request = NULL;
  s->done++;
  return 1;
}

int stream_step(stream *s) {
  int went_on = 0;
  for (int i = 0; i < DEPTH && s->posted < s->total; i++)
    if (!s->slot[i].request) went_on |= post(s, &s->slot[i]);
  for (int i = 0; i < DEPTH; i++) went_on |= ask(s, &s->slot[s->newest_first ? DEPTH - 1 - i : i]);
  return went_on;
}

void stream_end(stream *s) {
  for (int i = 0; i < DEPTH; i++) free(s->slot[i].data);
  memset(s, 0, sizeof *s);
}

void run_streams(stream *streams, int count) {
  for (int left = count; left;) {
    int went_on = 0;
    left = 0;
    for (int i = 0; i < count; i++) {
      if (streams[i].done < streams[i].total) went_on |= stream_step(&streams[i]);
      left += streams[i].done < streams[i].total;
    }
    if (!went_on) sched_yield();
  }
  for (int i = 0; i < count; i++) stream_end(&streams[i]);
}

void run_one(void *comm, int sends, uint64_t seed, uint64_t total, size_rule size_of) {
  stream one;
  stream_begin(&one, comm, sends, seed, total, size_of);
  run_streams(&one, 1);
}

void run_both(void *send, void *receive, uint64_t seed, uint64_t total, size_rule size_of) {
  stream both[2];
  stream_begin(&both[0], send, 1, seed, total, size_of);
  stream_begin(&both[1], receive, 0, seed, total, size_of);
  run_streams(both, 2);
}
