// Clock: the time, in microseconds.

#define _GNU_SOURCE
#include <time.h>

#include "clock.h"

static uint64_t read_clock(clockid_t clock) {
  struct timespec at;
  clock_gettime(clock, &at);
  return (uint64_t)at.tv_sec * 1000000 + (uint64_t)at.tv_nsec / 1000;
}

uint64_t now_us(void) { return read_clock(CLOCK_MONOTONIC); }

uint64_t date_us(void) { return read_clock(CLOCK_REALTIME); }
