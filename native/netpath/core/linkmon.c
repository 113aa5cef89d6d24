// Linkmon: what the kernel says of links and addresses (rtnetlink, man 7 rtnetlink). Losing a carrier is known within
// milliseconds, and coming back, too. It needs no privilege; where it is not there, silence tells the same, later.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"

int kernel_open(void) {
  int file = socket(AF_NETLINK, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, NETLINK_ROUTE);
  struct sockaddr_nl groups = {.nl_family = AF_NETLINK,
                               .nl_groups = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR};
  if (file >= 0 && bind(file, (struct sockaddr *)&groups, sizeof groups)) {
    close(file);
    file = -1;
  }
  if (file < 0) say(NP_LEVEL_INFO, "the kernel tells nothing of links here: paths are judged by what comes over them");
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

static void heard_link(const struct ifinfomsg *link, uint64_t now) {
  unsigned wanted = IFF_UP | IFF_RUNNING;
  for (int i = 0; i < engine.paths; i++)
    if (engine.path[i].index && (int)engine.path[i].index == link->ifi_index)
      judge(i, (link->ifi_flags & wanted) == wanted, "carrier", now);
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
  ssize_t size;
  while ((size = recv(engine.kernel, buffer, sizeof buffer, MSG_DONTWAIT)) > 0) {
    unsigned left = (unsigned)size;
    for (struct nlmsghdr *each = (struct nlmsghdr *)buffer; NLMSG_OK(each, left); each = NLMSG_NEXT(each, left)) {
      if (each->nlmsg_type == RTM_NEWLINK) heard_link(NLMSG_DATA(each), now);
      else if (each->nlmsg_type == RTM_DELADDR || each->nlmsg_type == RTM_NEWADDR) heard_address(each, now);
    }
  }
}
