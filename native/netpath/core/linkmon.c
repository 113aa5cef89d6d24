// Linkmon: what the kernel says of links and addresses (rtnetlink, man 7 rtnetlink). Losing a carrier is known within
// milliseconds, and coming back, too. It needs no privilege; where it is not there, silence tells the same, later.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"

enum { LOWER_UP = 1 << 16 }; // IFF_LOWER_UP, which libc's header has not got

// All links are told: at first, and when something was not heard.
static void ask(int file) {
  struct {
    struct nlmsghdr head;
    struct ifinfomsg all;
  } request = {.head = {.nlmsg_len = sizeof request, .nlmsg_type = RTM_GETLINK, .nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP}};
  for (int i = 0; i < engine.paths; i++) engine.path[i].carrier = 1; // until it is said
  if (send(file, &request, sizeof request, MSG_DONTWAIT) < 0)
    say(NP_LEVEL_INFO, "the kernel cannot be asked for links now: %s", strerror(errno));
}

int kernel_open(void) {
  int file = socket(AF_NETLINK, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, NETLINK_ROUTE);
  struct sockaddr_nl groups = {.nl_family = AF_NETLINK,
                               .nl_groups = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR};
  if (file >= 0 && bind(file, (struct sockaddr *)&groups, sizeof groups)) {
    close(file);
    file = -1;
  }
  if (file < 0) say(NP_LEVEL_INFO, "the kernel tells nothing of links here: paths are judged by what comes over them");
  else ask(file);
  return file;
}

static void judge(int path, int up, const char *reason, uint64_t now) {
  local_path *local = &engine.path[path];
  if (local->up == up) return;
  local->up = up;
  say(NP_LEVEL_INFO, "path %d (%s %s) is %s: %s", path, local->interface, local->text, up ? "up" : "down", reason);
  if (up) path_back(path, now);
  else path_lost(path, reason, now);
}

static void judge_link(int path, int up, int carrier, uint64_t now) {
  local_path *local = &engine.path[path];
  int was_in_vain = !local->carrier && local->up;
  local->carrier = carrier;
  judge(path, up, "carrier", now);
  if (was_in_vain && carrier && up) path_back(path, now); // its address had come back first
}

static int is_named(const struct ifinfomsg *link, int length, const char *name) {
  for (struct rtattr *each = IFLA_RTA(link); RTA_OK(each, length); each = RTA_NEXT(each, length))
    if (each->rta_type == IFLA_IFNAME) return !strncmp(RTA_DATA(each), name, RTA_PAYLOAD(each));
  return 0;
}

static int is_link_of(const local_path *path, const struct ifinfomsg *link, int length) {
  char name[IF_NAMESIZE];
  if (!path->index) return 0;
  if ((int)path->index == link->ifi_index) return 1;
  // Made anew; or ours has another name now, and somebody else its old one.
  return is_named(link, length, path->interface) && !if_indextoname(path->index, name);
}

static void heard_link(const struct nlmsghdr *message, uint64_t now) {
  const struct ifinfomsg *link = NLMSG_DATA(message);
  unsigned up = IFF_UP | IFF_RUNNING, carrier = IFF_UP | LOWER_UP;
  int gone = message->nlmsg_type == RTM_DELLINK;
  if (gone && link->ifi_family != AF_UNSPEC) return; // it has left a bridge
  for (int i = 0; i < engine.paths; i++) {
    local_path *path = &engine.path[i];
    if (!is_link_of(path, link, (int)IFLA_PAYLOAD(message))) continue;
    path->index = (unsigned)link->ifi_index; // one that was made anew has another
    judge_link(i, !gone && (link->ifi_flags & up) == up, gone || (link->ifi_flags & carrier) == carrier, now);
  }
}

static int is_of(const local_path *path, const struct ifaddrmsg *entry, int length) {
  if (path->index != entry->ifa_index || path->own.any.sa_family != entry->ifa_family) return 0;
  const void *own = entry->ifa_family == AF_INET6 ? (const void *)&path->own.v6.sin6_addr : &path->own.v4.sin_addr;
  size_t size = entry->ifa_family == AF_INET6 ? 16 : 4;
  for (struct rtattr *each = IFA_RTA(entry); RTA_OK(each, length); each = RTA_NEXT(each, length))
    if ((each->rta_type == IFA_LOCAL || each->rta_type == IFA_ADDRESS) && RTA_PAYLOAD(each) == size &&
        !memcmp(RTA_DATA(each), own, size))
      return 1;
  return 0;
}

static void heard_address(const struct nlmsghdr *message, uint64_t now) {
  const struct ifaddrmsg *entry = NLMSG_DATA(message);
  for (int i = 0; i < engine.paths; i++)
    if (engine.path[i].index && is_of(&engine.path[i], entry, (int)IFA_PAYLOAD(message)))
      judge(i, message->nlmsg_type == RTM_NEWADDR, "address", now);
}

void kernel_read(uint64_t now) {
  _Alignas(struct nlmsghdr) char buffer[16384];
  int missed = 0;
  for (;;) {
    ssize_t size = recv(engine.kernel, buffer, sizeof buffer, MSG_DONTWAIT);
    if (size < 0 && errno == ENOBUFS) {
      missed = 1;
      continue;
    }
    if (size <= 0) break;
    unsigned left = (unsigned)size;
    for (struct nlmsghdr *each = (struct nlmsghdr *)buffer; NLMSG_OK(each, left); each = NLMSG_NEXT(each, left)) {
      if (each->nlmsg_type == RTM_NEWLINK || each->nlmsg_type == RTM_DELLINK) heard_link(each, now);
      else if (each->nlmsg_type == RTM_DELADDR || each->nlmsg_type == RTM_NEWADDR) heard_address(each, now);
    }
  }
  // Not before all was read: until then more is dropped without another word, and the answer may be old.
  if (missed) ask(engine.kernel);
}
