// Settings: what the environment says.

#ifndef NP_SETTINGS_H
#define NP_SETTINGS_H

#include "proto.h"

typedef struct {
  flow_limits limits;
  int checked; // chunks have checksums
  int neighbours; // hardware addresses of peers are kept, see neighbours.c
} settings;

int settings_read(settings *into); // NP_OK, or what is wrong

#endif
