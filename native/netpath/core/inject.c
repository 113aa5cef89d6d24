// Inject: faults of our own making, for tests where the network may not be touched.
//
//   TORCHRELAY_NET_INJECT=path1:drop@3s+5s,path0:reset@2s     after 3 s nothing passes path 1, for 5 s, and so on
//   drop      nothing is read or written: a blackhole
//   down      the connections are lost, and none is made
//   reset     the connections are lost
//   corrupt   checksums of what is sent are wrong (needs TORCHRELAY_NET_CRC=1)

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inject.h"
#include "paths.h"
#include "text.h"

static injections plan;

static int parse_one(const char *text, uint64_t now, injection *into) {
  static const char *const names[] = {"drop", "down", "reset", "corrupt"};
  char what[16] = "", from_unit[3] = "", for_unit[3] = "";
  double from = 0, lasts = 0;
  int path;
  int found = sscanf(text, "path%d:%15[a-z]@%lf%2[ms]+%lf%2[ms]", &path, what, &from, from_unit, &lasts, for_unit);
  if (found < 4 || found == 5 || path < 0 || path >= NP_MAX_PATHS || from < 0 || lasts < 0) return 0;
  for (int i = 0; i < 4; i++)
    if (!strcmp(what, names[i])) {
      double unit = strcmp(from_unit, "ms") ? 1e6 : 1e3, lasting = strcmp(for_unit, "ms") ? 1e6 : 1e3;
      into->path = path;
      into->what = (injected)i;
      into->from_us = now + (uint64_t)(from * unit);
      into->until_us = found == 6 ? into->from_us + (uint64_t)(lasts * lasting) : UINT64_MAX;
      if (into->what == INJECT_RESET) into->until_us = into->from_us;
      into->begun = into->ended = 0;
      return 1;
    }
  return 0;
}

int inject_read(const char *faults, uint64_t now, injections *into) {
  char copy[1024], *rest = copy, *item;
  into->count = 0;
  if (strlen(faults) >= sizeof copy) return fail(NP_INVALID, "the list of faults is too long");
  strcpy(copy, faults);
  while ((item = strsep(&rest, ","))) {
    if (!*item) continue;
    if (into->count == MOST_FAULTS || !parse_one(item, now, &into->each[into->count]))
      return fail(NP_INVALID, "'%s' is no fault: write path1:drop@3s+5s, with drop, down, reset or corrupt", item);
    into->count++;
  }
  return NP_OK;
}

void inject_end(uint64_t now) {
  for (int i = 0; i < plan.count; i++)
    if (plan.each[i].begun) plan.each[i].until_us = now;
}

void inject_set(const injections *faults) { plan = *faults; }

int inject_any(void) { return plan.count; }

int inject_now(int path, injected what, uint64_t now) {
  for (int i = 0; i < plan.count; i++) {
    const injection *each = &plan.each[i];
    if (each->path == path && each->what == what && now >= each->from_us && now < each->until_us) return 1;
  }
  return 0;
}

// What the beginning of a fault does to its path. 0: nothing.
static int begins(const injection *fault, path_event *event) {
  *event = (path_event){fault->what == INJECT_DROP ? PATH_REFRESH : PATH_LOST, fault->path, "injected"};
  return fault->what != INJECT_CORRUPT;
}

// And its end.
static int ends(const injection *fault, path_event *event) {
  *event = (path_event){fault->what == INJECT_DROP ? PATH_REFRESH : PATH_BACK, fault->path, "injected"};
  return fault->what == INJECT_DROP || fault->what == INJECT_DOWN;
}

int inject_next(int paths, uint64_t now, path_event *event) {
  for (int i = 0; i < plan.count; i++) {
    injection *each = &plan.each[i];
    if (each->path >= paths) continue;
    if (!each->begun && now >= each->from_us) {
      each->begun = 1;
      say(NP_LEVEL_INFO, "a fault is injected into path %d", each->path);
      if (begins(each, event)) return 1;
    }
    if (each->begun && !each->ended && now >= each->until_us) {
      each->ended = 1;
      if (ends(each, event)) return 1;
    }
  }
  return 0;
}
