// Settings: what the environment says. A value that cannot be meant is an error, not a default.

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "settings.h"
#include "text.h"

static int number(const char *name, uint64_t given, uint64_t least, uint64_t most, uint64_t *into) {
  const char *text = getenv(name);
  *into = given;
  if (!text || !*text) return NP_OK;
  char *end;
  errno = 0;
  unsigned long long value = strtoull(text, &end, 10);
  if (errno || *end || *text == '-' || value < least || value > most)
    return fail(NP_INVALID, "%s is '%s': give a number from %llu to %llu", name, text, (unsigned long long)least,
                (unsigned long long)most);
  *into = value;
  return NP_OK;
}

static int level(void) {
  static const struct {
    const char *name;
    int level;
  } levels[] = {{"trace", NP_LEVEL_TRACE}, {"info", NP_LEVEL_INFO}, {"warn", NP_LEVEL_WARN}};
  const char *text = getenv("TORCHRELAY_NET_LOG");
  if (!text || !*text) return NP_OK;
  for (unsigned i = 0; i < sizeof levels / sizeof levels[0]; i++)
    if (!strcmp(text, levels[i].name)) {
      text_set_level(levels[i].level);
      return NP_OK;
    }
  return fail(NP_INVALID, "TORCHRELAY_NET_LOG is '%s': give trace, info or warn", text);
}

// Silence cannot be told from having been stopped where it is not much longer than the time between two ticks (engine.c).
enum { LEAST_DEAD_MS = 50 };

int settings_read(settings *into) {
  uint64_t chunk, window, ping, suspect, dead, giveup, checked, neighbours;
  int code = level();
  if (!code) code = number("TORCHRELAY_NET_CHUNK", 256 << 10, 4 << 10, 16 << 20, &chunk);
  if (!code) code = number("TORCHRELAY_NET_WINDOW", 4 << 20, 4 << 10, 1 << 28, &window);
  if (!code) code = number("TORCHRELAY_NET_PING_MS", 50, 5, 60000, &ping);
  if (!code) code = number("TORCHRELAY_NET_SUSPECT_MS", 100, 10, 60000, &suspect);
  if (!code) code = number("TORCHRELAY_NET_DEAD_MS", 250, LEAST_DEAD_MS, 600000, &dead);
  if (!code) code = number("TORCHRELAY_NET_GIVEUP_S", 0, 0, 1000000, &giveup);
  if (!code) code = number("TORCHRELAY_NET_CRC", 0, 0, 1, &checked);
  if (!code) code = number("TORCHRELAY_NET_NEIGHBOURS", 1, 0, 1, &neighbours);
  if (code) return code;
  if (ping >= suspect || suspect > dead)
    return fail(NP_INVALID,
                "TORCHRELAY_NET_PING_MS (%d) must be below TORCHRELAY_NET_SUSPECT_MS (%d), and that at most "
                "TORCHRELAY_NET_DEAD_MS (%d)",
                (int)ping, (int)suspect, (int)dead);
  into->limits = (flow_limits){(uint32_t)chunk,       (uint32_t)window, ping * 1000,
                               suspect * 1000,        dead * 1000,      giveup * 1000000};
  into->checked = (int)checked;
  into->neighbours = (int)neighbours;
  return NP_OK;
}
