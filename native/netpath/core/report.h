// Report: what others are told of our paths.

#ifndef NP_REPORT_H
#define NP_REPORT_H

#include "comm.h"

void report_start(void);
void report_end(void);
void report_up(np_comm *comm, int path, uint64_t now);
void report_down(np_comm *comm, int path, const char *reason, uint32_t under_way, uint64_t now);
void report_unreachable(np_comm *comm, uint64_t now);
void report_back(np_comm *comm, uint64_t now);
void report_corrupt(np_comm *comm, int path);
void report_gave_up(np_comm *comm);
void report_page(uint64_t now);
void report_drop(np_comm *comm); // it ends

#endif
