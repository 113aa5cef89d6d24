// Silence: what time tells a flow.

#ifndef NP_SILENCE_H
#define NP_SILENCE_H

#include "proto.h"

int flow_was_stopped(const flow *f, uint64_t now); // so lately that peers may not have been heard since
int flow_watches(const flow *f);                   // busy, or a path is to be found out about
flow_verdict flow_tick(flow *f, uint64_t now);

#endif
