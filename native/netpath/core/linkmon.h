// Linkmon: what the kernel says of links and addresses.

#ifndef NP_LINKMON_H
#define NP_LINKMON_H

#include "paths.h"

int kernel_open(void); // -1 if the kernel tells nothing

// Reads until something has happened to our paths. Returns what it was, one event for a path at most; call it again until
// it returns 0: then all was read.
int kernel_read(path_event events[NP_MAX_PATHS]);

#endif
