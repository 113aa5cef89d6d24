// Proto exhaustive: every state that two messages of two chunks over two paths can come to, with faults at every place
// where they can happen, and steps taken out of turn. There is no time here.
//
//   proto_exhaustive FAULTS LATE    so many faults at most, and so many steps that are passed over for a later one
//
// A chunk is written in two halves, and read in two halves, as anything may happen between them. A fault is: a
// connection breaks, and both ends notice it when they notice it; the sender mistrusts a path that is well, or finds it
// slow; an end closes early, or aborts.

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "small.h"

static jmp_buf over;
static const char *trail[DEEPEST];
static state *stack[DEEPEST]; // what to go back to
static int deep;
static uint64_t moves;

void wrong(const char *what) {
  printf("after %llu states: %s\n", (unsigned long long)states, what);
  for (int i = 0; i < deep; i++) printf("  %s\n", trail[i]);
  longjmp(over, 1);
}

static int step(const move *m, int first) {
  if (m->fault && !now.faults) return 0;
  if (!m->happens(m->which)) return 0;
  now.faults -= m->fault != 0;
  all_write(first);
  for (int end = 0; end < 2; end++) conclude(end);
  check_flows();
  moves++;
  return 1;
}

static void explore(void) {
  if (!is_new(fingerprint())) return;
  if (deep == DEEPEST) wrong("it does not come to an end");
  if (!stack[deep] && !(stack[deep] = malloc(sizeof **stack))) wrong("there is no memory to go on");
  state *here = stack[deep];
  keep(here);
  int enabled = 0;
  for (unsigned i = 0; i < 2 * MOVES_COUNT; i++) {
    const move *m = &MOVES[i / 2];
    trail[deep++] = m->name;
    int cost = m->fault ? 0 : enabled;
    int moved = cost <= here->late && step(m, i % 2);
    if (moved) {
      now.late -= (uint8_t)cost;
      explore();
    }
    if (moved || m->fault) back_to(here);
    if (moved && !m->fault && i % 2) enabled++;
    deep--;
  }
  if (!enabled && !(now.gone[SENDER] && now.gone[RECEIVER])) wrong("nothing more happens, and not all is over");
}

static int run(int faults, int late, uint32_t first, uint32_t second) {
  flow_limits limits = {CHUNK, 2 * CHUNK, 50000, 100000, 250000, 0};
  memset(&now, 0, sizeof now);
  size_of[0] = first;
  size_of[1] = second;
  for (int i = 0; i < MESSAGES; i++)
    for (int k = 0; k < ROOM; k++) now.sent[i][k] = (uint8_t)(16 * i + k + 1);
  now.faults = (uint8_t)faults;
  now.late = (uint8_t)late;
  deep = 0;
  moves = 0;
  forget_all();
  for (int end = 0; end < 2; end++) flow_init(&flows[end], end == SENDER, PATHS, 0, &limits);
  for (int i = 0; i < PATHS; i++) now.connection[i].cut = 1;
  if (setjmp(over)) return 1;
  explore();
  printf("messages of %u and %u bytes, %d faults, %d steps late: %llu states, %llu moves\n", first, second, faults,
         late, (unsigned long long)states, (unsigned long long)moves);
  return 0;
}

int main(int count, char **words) {
  if (count != 3) {
    fprintf(stderr, "proto_exhaustive FAULTS LATE\n");
    return 2;
  }
  int faults = atoi(words[1]), late = atoi(words[2]);
  int failed = run(faults, late, 4, 3) || run(faults, late, 0, 4);
  forget_all();
  for (int i = 0; i < DEEPEST; i++) free(stack[i]);
  return failed;
}
