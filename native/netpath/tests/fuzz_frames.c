// Fuzz frames: a flow whose peer is broken or hostile. Frames of any content come in any order, while requests are
// posted, paths come and go and time passes. Nothing but outstanding memory may be touched, and nothing may run for
// ever.
//
//   fuzz_frames SEED SECONDS    random input, from a seed; needs -fsanitize=address,undefined to be of use
//   fuzz_frames --input FILE    one input
//
// With -DLIBFUZZER and clang's -fsanitize=fuzzer it is an LLVMFuzzerTestOneInput.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../core/proto.h"
#include "../core/silence.h"

enum { INPUT = 4096, MOST_FRAMES = 100000 };

typedef struct { // input, and how much of it is used
  const uint8_t *bytes;
  size_t left;
} source;

typedef struct { // a chunk that is not whole yet
  frame header;
  uint32_t done;
  int coming;
} chunk;

static flow f;
static chunk coming[NP_MAX_PATHS];
static uint8_t *memory[NP_MAX_REQUESTS];
static uint32_t room[NP_MAX_REQUESTS];
static uint64_t now;
static frame last;
static volatile uint8_t touched;

static void stop(const char *what) {
  fprintf(stderr, "fuzz_frames: %s\n", what);
  abort();
}

static uint32_t take(source *s, int bytes) {
  uint32_t value = 0;
  for (int i = 0; i < bytes && s->left; i++, s->left--) value = value << 8 | *s->bytes++;
  return value;
}

// ---------------------------------------------------------------- what must be true

static void check(void) {
  if (f.tail > f.posted) stop("the oldest message is after the last");
  for (int i = 0; i < f.paths; i++) {
    const flow_path *p = &f.path[i];
    uint64_t bytes = 0;
    if (p->count > FIFO || p->first >= FIFO) stop("the ring of chunks is broken");
    for (uint32_t k = 0; k < p->count; k++) bytes += p->fifo[(p->first + k) % FIFO].length;
    if (bytes != p->unacknowledged) stop("bytes under way are not counted well");
  }
  for (int i = 0; i < NP_MAX_REQUESTS; i++) {
    const flow_slot *slot = &f.slot[i];
    if (slot->state == SLOT_OPEN && (!memory[i] || slot->size > room[i])) stop("a request is larger than its memory");
    if (slot->state == SLOT_OPEN && slot->seq < f.tail) stop("an open request is before the oldest");
  }
}

// ---------------------------------------------------------------- our side

static void release(void) {
  for (int i = 0; i < NP_MAX_REQUESTS; i++) {
    if (!memory[i] || f.slot[i].state == SLOT_OPEN) continue;
    if (f.slot[i].state != SLOT_FREE) flow_release(&f, &f.slot[i]);
    free(memory[i]);
    memory[i] = NULL;
  }
}

static void post(source *s) {
  static const uint32_t sizes[] = {0, 1, 7, 8, 9, 16, 64, 100, 4096, 40000};
  uint32_t size = sizes[take(s, 1) % 10];
  int at = (int)(f.posted % NP_MAX_REQUESTS);
  uint8_t *data = malloc(size ? size : 1);
  if (!data) stop("there is no memory");
  memset(data, 7, size);
  flow_slot *slot = flow_post(&f, data, size, now);
  if (!slot) {
    free(data);
    return;
  }
  free(memory[at]);
  memory[at] = data;
  room[at] = size;
}

// All that is to be sent over a path; what is sent is looked at.
static void drain(int path) {
  flow_frame next;
  for (int i = 0; flow_next(&f, path, now, &next); i++) {
    if (i == MOST_FRAMES) stop("there is always more to send");
    if (next.header.type != DATA || !flow_wanted(&f, &next.header)) continue;
    for (uint32_t k = 0; k < next.header.length; k++) touched ^= next.data[k];
  }
}

static void lose(int path) {
  coming[path].coming = 0;
  flow_down(&f, path, now);
}

static void pass_time(source *s) {
  static const uint32_t steps[] = {1, 1000, 10000, 10000, 60000, 120000, 300000, 5000000};
  now += steps[take(s, 1) % 8];
  flow_verdict verdict = flow_tick(&f, now);
  for (int i = 0; i < f.paths; i++)
    if (verdict.lost & 1 << i) lose(i);
}

// ---------------------------------------------------------------- the peer

// Most are nearly right, as those get further.
static frame frame_from(source *s) {
  frame h = {.magic = WIRE_MAGIC};
  uint32_t kind = take(s, 1);
  h.type = kind & 128 ? DATA : kind % 12;
  h.path = (uint8_t)(take(s, 1) % 6);
  h.epoch = h.path < f.paths && kind % 7 ? f.path[h.path].epoch : (uint16_t)take(s, 2);
  uint64_t acknowledged = h.path < f.paths ? f.path[h.path].acknowledged : 0;
  uint64_t bases[] = {0, f.tail, f.posted, f.allowed, f.posted - 64, acknowledged, now, UINT64_MAX - 4};
  h.seq = bases[take(s, 1) % 8] + take(s, 1) % 5;
  uint32_t totals[] = {0, 1, 7, 8, 9, 16, 64, 100, 4096, 40000, NP_MAX_MESSAGE, UINT32_MAX};
  h.total = totals[take(s, 1) % 12];
  h.offset = take(s, 1) % 16 * f.limits.chunk;
  uint32_t left = h.total > h.offset ? h.total - h.offset : 0;
  h.length = left < f.limits.chunk ? left : f.limits.chunk;
  uint32_t spoil = take(s, 1);
  if (spoil % 16 == 1) h.offset = take(s, 4);
  if (spoil % 16 == 2) h.length = take(s, 4);
  if (spoil % 16 == 3) h.total = take(s, 4);
  if (spoil % 16 == 4) h.seq = (uint64_t)take(s, 4) << 32 | take(s, 4);
  if (spoil % 16 == 5) h = last;
  last = h;
  return h;
}

static void more_of_chunk(int path, uint32_t size) {
  chunk *c = &coming[path];
  uint32_t left = c->header.length - c->done;
  if (size > left) size = left;
  uint8_t *target = flow_target(&f, &c->header);
  if (target) memset(target + c->done, 0x77, size);
  c->done += size;
  flow_alive(&f, path, now);
  if (c->done < c->header.length) return;
  c->coming = 0;
  flow_arrived(&f, path, &c->header, now);
}

static void hear(source *s) {
  int path = (int)(take(s, 1) % (uint32_t)f.paths), lost;
  uint32_t size = take(s, 2);
  if (coming[path].coming) {
    more_of_chunk(path, size);
    return;
  }
  frame h = frame_from(s);
  if (!f.path[path].live) return;
  if (h.type == DATA) {
    if (!flow_accepts(&f, &h)) return;
    if (h.length > f.limits.chunk) stop("a chunk is taken that is too long");
    coming[path] = (chunk){h, 0, 1};
    more_of_chunk(path, size);
  } else if (!flow_heard(&f, path, &h, now, &lost)) {
    lose(path);
  } else if (lost >= 0) {
    if (lost >= f.paths || !f.path[lost].live) stop("a path is lost that is none");
    lose(lost);
  }
}

// ---------------------------------------------------------------- one input

static void begin(source *s) {
  static const uint32_t chunks[] = {8, 16, 33, 4096};
  memset(coming, 0, sizeof coming);
  uint32_t chunk = chunks[take(s, 1) % 4], setup = take(s, 1);
  flow_limits limits = {chunk, chunk * (1 + setup % 100), 50000, 100000, 250000, setup % 3 ? 0 : 2000000};
  flow_init(&f, setup & 128 ? 1 : 0, 1 + (int)(setup % NP_MAX_PATHS), 0, &limits);
  now = 1;
  for (int i = 0; i < f.paths; i++) flow_up(&f, i, (uint16_t)(1 + take(s, 1)), now);
}

static int one_input(const uint8_t *bytes, size_t size) {
  source s = {bytes, size};
  begin(&s);
  for (int i = 0; i < 10; i++) post(&s);
  while (s.left) {
    uint32_t what = take(&s, 1);
    int path = (int)(what / 16 % (uint32_t)f.paths);
    switch (what % 16) {
    case 0: post(&s); break;
    case 1: release(); break;
    case 2: pass_time(&s); break;
    case 3: drain(path); break;
    case 4:
      if (what > 200) lose(path);
      break;
    case 5:
      coming[path].coming = 0;
      flow_up(&f, path, (uint16_t)take(&s, 1), now);
      break;
    case 6:
      if (what > 240 && take(&s, 1) > 200) flow_fail(&f);
      break;
    case 7:
      if (what > 240 && take(&s, 1) > 200) flow_close(&f);
      break;
    default: hear(&s);
    }
    check();
  }
  flow_close(&f);
  release();
  for (int i = 0; i < f.paths; i++) drain(i);
  return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) { return one_input(bytes, size); }

#ifndef LIBFUZZER
static uint64_t random_state;

static uint64_t draw(void) { // splitmix64
  uint64_t x = random_state += 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

static double seconds(void) {
  struct timespec t;
  timespec_get(&t, TIME_UTC);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int loop(uint64_t seed, double lasts) {
  static uint8_t bytes[INPUT];
  double until = seconds() + lasts;
  uint64_t inputs = 0;
  for (; seconds() < until; inputs++) {
    random_state = seed + inputs;
    size_t size = draw() % INPUT;
    for (size_t i = 0; i < size; i++) bytes[i] = (uint8_t)draw();
    one_input(bytes, size);
  }
  printf("%llu inputs from seed %llu on: nothing is wrong\n", (unsigned long long)inputs, (unsigned long long)seed);
  return 0;
}

int main(int count, char **words) {
  if (count == 3 && !strcmp(words[1], "--input")) {
    static uint8_t bytes[1 << 20];
    FILE *file = fopen(words[2], "rb");
    if (!file) {
      fprintf(stderr, "%s cannot be read\n", words[2]);
      return 2;
    }
    size_t size = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    return one_input(bytes, size);
  }
  if (count == 3) return loop(strtoull(words[1], NULL, 10), atof(words[2]));
  fprintf(stderr, "fuzz_frames SEED SECONDS, or fuzz_frames --input FILE\n");
  return 2;
}
#endif
