// Clock: the time, in microseconds.

#ifndef NP_CLOCK_H
#define NP_CLOCK_H

#include <stdint.h>

uint64_t now_us(void);  // since some time in the past
uint64_t date_us(void); // since 1970

#endif
