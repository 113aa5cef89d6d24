// Inject: faults of our own making.

#ifndef NP_INJECT_H
#define NP_INJECT_H

#include "paths.h"

enum { MOST_FAULTS = 32 };

typedef enum { INJECT_DROP, INJECT_DOWN, INJECT_RESET, INJECT_CORRUPT } injected;

typedef struct {
  int path;
  injected what;
  uint64_t from_us, until_us;
  int begun, ended;
} injection;

typedef struct {
  injection each[MOST_FAULTS];
  int count;
} injections;

// Faults are replaced in order: the new are read; the old end, and what comes of that is acted on; the new are set.
int inject_read(const char *faults, uint64_t now, injections *into); // NP_OK, or what is wrong
void inject_end(uint64_t now);
void inject_set(const injections *faults);

int inject_next(int paths, uint64_t now, path_event *event); // what a fault does to a path now; 0: nothing more
int inject_now(int path, injected what, uint64_t now);
int inject_any(void);

#endif
