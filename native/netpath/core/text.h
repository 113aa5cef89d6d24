// Text: what is said to people, and the reason of a failure.

#ifndef NP_TEXT_H
#define NP_TEXT_H

#include "../netpath.h"

void text_set_logger(np_logger logger);
void text_set_level(int level);
__attribute__((format(printf, 2, 3))) void say(int level, const char *format, ...);
__attribute__((format(printf, 2, 3))) int fail(int code, const char *format, ...); // keeps the text for np_error()

#endif
