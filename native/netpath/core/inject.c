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

#include "engine.h"

enum { MOST = 32 };

typedef struct {
  int path;
  injected what;
  uint64_t from_us, until_us;
  int begun, ended;
} injection;

static injection plan[MOST];
static int planned;

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

static void end_all(uint64_t now) {
  for (int i = 0; i < planned; i++)
    if (plan[i].begun) plan[i].until_us = now;
  inject_tick(now);
  planned = 0;
}

int inject_set(const char *faults, uint64_t now) {
  injection read[MOST];
  int count = 0;
  char copy[1024], *rest = copy, *item;
  if (strlen(faults) >= sizeof copy) return fail(NP_INVALID, "the list of faults is too long");
  strcpy(copy, faults);
  while ((item = strsep(&rest, ","))) {
    if (!*item) continue;
    if (count == MOST || !parse_one(item, now, &read[count]))
      return fail(NP_INVALID, "'%s' is no fault: write path1:drop@3s+5s, with drop, down, reset or corrupt", item);
    count++;
  }
  end_all(now);
  memcpy(plan, read, sizeof read);
  planned = count;
  inject_tick(now);
  return NP_OK;
}

int inject_any(void) { return planned; }

int inject_now(int path, injected what, uint64_t now) {
  for (int i = 0; i < planned; i++)
    if (plan[i].path == path && plan[i].what == what && now >= plan[i].from_us && now < plan[i].until_us) return 1;
  return 0;
}

void inject_tick(uint64_t now) {
  for (int i = 0; i < planned; i++) {
    injection *each = &plan[i];
    if (each->path >= engine.paths) continue;
    if (!each->begun && now >= each->from_us) {
      each->begun = 1;
      say(NP_LEVEL_INFO, "a fault is injected into path %d", each->path);
      if (each->what == INJECT_DOWN || each->what == INJECT_RESET) path_lost(each->path, "injected", now);
      if (each->what == INJECT_DROP) conn_refresh(each->path);
    }
    if (each->begun && !each->ended && now >= each->until_us) {
      each->ended = 1;
      if (each->what == INJECT_DROP) conn_refresh(each->path);
      if (each->what == INJECT_DOWN) path_back(each->path, now);
    }
  }
}
