// Text: messages, and the reason of the last failure of each thread.

#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "../netpath.h"
#include "text.h"

static __thread char last[512];
static np_logger log_to;
static int log_level = NP_LEVEL_WARN;

void text_set_logger(np_logger logger) {
  if (logger) log_to = logger;
}

void text_set_level(int level) { log_level = level; }

void say(int level, const char *format, ...) {
  if (level > log_level) return;
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (log_to) log_to(level, text);
  else fprintf(stderr, "torchrelay net [%d]: %s\n", (int)getpid(), text);
}

int fail(int code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last, sizeof last, format, arguments);
  va_end(arguments);
  return code;
}

const char *np_error(void) { return last; }

const char *np_version(void) { return "0.1.0"; }
