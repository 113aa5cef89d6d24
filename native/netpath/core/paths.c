// Paths: which of our addresses are used, and the handle that tells them to a peer.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "paths.h"
#include "text.h"

enum { HANDLE_MAGIC = 0x484e5254, HANDLE_VERSION = 1 }; // "TRNH"

static const char *const VARIABLE = "TORCHRELAY_NET_PATHS";
// What is an interface and seldom a way to another machine.
static const char *const SELDOM = "lo,docker,virbr,br-,cni,flannel,cali";

socklen_t address_length(const address *of) {
  return of->any.sa_family == AF_INET6 ? sizeof of->v6 : sizeof of->v4;
}

void address_text(const address *of, char *text, size_t room) {
  const void *bytes = of->any.sa_family == AF_INET6 ? (const void *)&of->v6.sin6_addr : &of->v4.sin_addr;
  if (!inet_ntop(of->any.sa_family, bytes, text, (socklen_t)room)) snprintf(text, room, "?");
}

int same_address(const address *a, const address *b) {
  if (a->any.sa_family != b->any.sa_family) return 0;
  if (a->any.sa_family == AF_INET) return a->v4.sin_addr.s_addr == b->v4.sin_addr.s_addr;
  return !memcmp(&a->v6.sin6_addr, &b->v6.sin6_addr, sizeof a->v6.sin6_addr);
}

static uint32_t speed_of(const char *interface) {
  char name[128];
  int speed = 0;
  snprintf(name, sizeof name, "/sys/class/net/%s/speed", interface);
  FILE *file = fopen(name, "r");
  if (!file) return 0;
  if (fscanf(file, "%d", &speed) != 1 || speed < 0) speed = 0;
  fclose(file);
  return (uint32_t)speed;
}

static int add(local_path *paths, int *count, const char *interface, const struct sockaddr *at) {
  for (int i = 0; i < *count; i++)
    if (same_address(&paths[i].own, (const address *)at)) return NP_OK;
  if (*count == NP_MAX_PATHS) return NP_OK;
  local_path *path = &paths[(*count)++];
  memset(path, 0, sizeof *path);
  memcpy(&path->own, at, at->sa_family == AF_INET6 ? sizeof path->own.v6 : sizeof path->own.v4);
  path->own.v4.sin_port = 0; // in the same place for both families
  path->listens = -1;
  path->up = path->carrier = 1;
  address_text(&path->own, path->text, sizeof path->text);
  if (interface) {
    snprintf(path->interface, sizeof path->interface, "%s", interface);
    path->index = if_nametoindex(interface);
    path->speed_mbps = speed_of(interface);
  }
  return NP_OK;
}

static int usable(const struct ifaddrs *entry) {
  if (!entry->ifa_addr || !(entry->ifa_flags & IFF_UP)) return 0;
  if (entry->ifa_addr->sa_family == AF_INET) return 1;
  return entry->ifa_addr->sa_family == AF_INET6 &&
         !IN6_IS_ADDR_LINKLOCAL(&((struct sockaddr_in6 *)entry->ifa_addr)->sin6_addr);
}

// The first address of an interface, of the fourth version if it has one.
static void add_interface(local_path *paths, int *count, struct ifaddrs *all, const char *name) {
  for (int i = 0; i < 2; i++)
    for (struct ifaddrs *each = all; each; each = each->ifa_next)
      if (!strcmp(each->ifa_name, name) && usable(each) && each->ifa_addr->sa_family == (i ? AF_INET6 : AF_INET)) {
        add(paths, count, name, each->ifa_addr);
        return;
      }
}

// Whether a name begins with one of a comma-separated list; '=' before it: whether it is one of them.
static int listed(const char *list, const char *name) {
  char copy[512], *rest = copy, *item;
  snprintf(copy, sizeof copy, "%s", list);
  int exact = *rest == '=';
  rest += exact;
  while ((item = strsep(&rest, ",")))
    if (*item && (exact ? !strcmp(item, name) : !strncmp(item, name, strlen(item)))) return 1;
  return 0;
}

static void add_others(local_path *paths, int *count, struct ifaddrs *all, const char *without) {
  for (struct ifaddrs *each = all; each; each = each->ifa_next)
    if (usable(each) && !(each->ifa_flags & IFF_LOOPBACK) && !listed(without, each->ifa_name))
      add_interface(paths, count, all, each->ifa_name);
}

static int parse(const char *text, address *into) {
  memset(into, 0, sizeof *into);
  if (inet_pton(AF_INET, text, &into->v4.sin_addr) == 1) into->any.sa_family = AF_INET;
  else if (inet_pton(AF_INET6, text, &into->v6.sin6_addr) == 1) into->any.sa_family = AF_INET6;
  return into->any.sa_family != 0;
}

static int is_ours(const address *of) {
  int probe = socket(of->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (probe < 0) return 0;
  int bound = bind(probe, &of->any, address_length(of));
  close(probe);
  return !bound;
}

static int add_address(local_path *paths, int *count, struct ifaddrs *all, const char *text, const address *of) {
  for (struct ifaddrs *each = all; each; each = each->ifa_next)
    if (each->ifa_addr && same_address(of, (const address *)each->ifa_addr) && !(each->ifa_flags & IFF_LOOPBACK))
      return add(paths, count, each->ifa_name, &of->any);
  if (!is_ours(of))
    return fail(NP_INVALID, "%s names %s, which is no address of this machine: see `ip address`", VARIABLE, text);
  return add(paths, count, NULL, &of->any); // 127.0.1.1, say
}

static int add_named(local_path *paths, int *count, struct ifaddrs *all, const char *given) {
  char copy[512], *rest = copy, *item;
  snprintf(copy, sizeof copy, "%s", given);
  int exact = *rest == '=';
  rest += exact;
  while ((item = strsep(&rest, ","))) {
    address at;
    int before = *count;
    if (!*item) continue;
    if (parse(item, &at)) {
      int code = add_address(paths, count, all, item, &at);
      if (code) return code;
    } else {
      for (struct ifaddrs *each = all; each; each = each->ifa_next)
        if (exact ? !strcmp(each->ifa_name, item) : !strncmp(each->ifa_name, item, strlen(item)))
          add_interface(paths, count, all, each->ifa_name);
    }
    if (*count == before && *count < NP_MAX_PATHS)
      return fail(NP_INVALID, "%s names %s: no interface of that name is up and has an address of its own", VARIABLE,
                  item);
  }
  return NP_OK;
}

int paths_find(local_path *paths, int *count) {
  const char *given = getenv(VARIABLE);
  struct ifaddrs *all;
  *count = 0;
  if (given && strlen(given) >= 512) return fail(NP_INVALID, "%s is too long", VARIABLE);
  if (getifaddrs(&all)) return fail(NP_SYSTEM, "the interfaces cannot be listed: %s", strerror(errno));
  int code = NP_OK;
  if (!given || !*given) add_others(paths, count, all, SELDOM);
  else if (*given == '^') add_others(paths, count, all, given + 1);
  else code = add_named(paths, count, all, given);
  freeifaddrs(all);
  if (code) return code;
  if (*count == 0 && given && *given) return fail(NP_INVALID, "%s is '%s': no path is left", VARIABLE, given);
  if (*count == 0) {
    address loop = {.v4 = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}}};
    add(paths, count, "lo", &loop.any);
    say(NP_LEVEL_WARN, "no interface is up: only processes of this machine can be reached. See `ip address`, and %s",
        VARIABLE);
  }
  if (*count == 1) say(NP_LEVEL_INFO, "one path only (%s): if it is lost there is nothing to fail over to", paths->text);
  return NP_OK;
}

int paths_listen(local_path *paths, int count) {
  for (int i = 0; i < count; i++) {
    local_path *path = &paths[i];
    socklen_t length = address_length(&path->own);
    path->listens = socket(path->own.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (path->listens < 0 || bind(path->listens, &path->own.any, length) || listen(path->listens, 1024) ||
        getsockname(path->listens, &path->own.any, &length))
      return fail(NP_SYSTEM, "cannot listen at %s: %s", path->text, strerror(errno));
  }
  return NP_OK;
}

void bind_to_interface(int fd, const local_path *path) {
  if (path->interface[0]) // where it is not permitted, the address alone has to do
    setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, path->interface, (socklen_t)strlen(path->interface) + 1);
}

// ---------------------------------------------------------------- the handle

void handle_fill(np_handle *handle, const local_path *paths, int count) {
  handle->magic = HANDLE_MAGIC;
  handle->version = HANDLE_VERSION;
  handle->paths = (uint8_t)count;
  for (int i = 0; i < count; i++) {
    int six = paths[i].own.any.sa_family == AF_INET6;
    handle->at[i].family = six ? 6 : 4;
    handle->at[i].port = paths[i].own.v4.sin_port;
    if (six) memcpy(handle->at[i].bytes, &paths[i].own.v6.sin6_addr, 16);
    else memcpy(handle->at[i].bytes, &paths[i].own.v4.sin_addr, 4);
  }
}

int handle_read(const np_handle *handle, int at, address *into) {
  if (handle->magic != HANDLE_MAGIC || handle->version != HANDLE_VERSION || handle->paths < 1 ||
      handle->paths > NP_MAX_PATHS)
    return 0;
  // The peer may have fewer paths than we: then several of ours lead to one of its.
  int index = at % handle->paths;
  memset(into, 0, sizeof *into);
  if (handle->at[index].family == 6) {
    into->v6.sin6_family = AF_INET6;
    into->v6.sin6_port = handle->at[index].port;
    memcpy(&into->v6.sin6_addr, handle->at[index].bytes, 16);
  } else {
    into->v4.sin_family = AF_INET;
    into->v4.sin_port = handle->at[index].port;
    memcpy(&into->v4.sin_addr, handle->at[index].bytes, 4);
  }
  return 1;
}
