// Neighbours: what the kernel knows of a peer's hardware address is kept.

#ifndef NP_NEIGHBOURS_H
#define NP_NEIGHBOURS_H

#include "paths.h"

void neighbours_keep(uint64_t now);
int neighbours_in_vain(int local, const address *remote); // there is no carrier: nothing should be sent there now
void neighbours_mute(int fd);                             // what is sent over it goes nowhere
void neighbours_end(void);

#endif
