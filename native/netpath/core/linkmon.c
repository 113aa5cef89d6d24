// Linkmon: what the kernel says of links and addresses (rtnetlink, man 7 rtnetlink). Losing a carrier is known within
// milliseconds, and coming back, too. It needs no privilege; where it is not there, silence tells the same, later.
//
// What happened is returned as events, message by message: whoever acts on one sees the paths as they were then.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <string.h>
#include <unistd.h>

#include "comm.h"
#include "linkmon.h"
#include "paths.h"
#include "text.h"

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

// Each of these returns how many events it has filled in.

static int judge(int path, int up, const char *reason, path_event *event) {
  local_path *local = &engine.path[path];
  if (local->up == up) return 0;
  local->up = up;
  say(NP_LEVEL_INFO, "path %d (%s %s) is %s: %s", path, local->interface, local->text, up ? "up" : "down", reason);
  *event = (path_event){up ? PATH_BACK : PATH_LOST, path, reason};
  return 1;
}

static int judge_link(int path, int up, int carrier, path_event *event) {
  local_path *local = &engine.path[path];
  int was_in_vain = !local->carrier && local->up;
  local->carrier = carrier;
  if (judge(path, up, "carrier", event)) return 1;
  if (!was_in_vain || !carrier || !up) return 0;
  *event = (path_event){PATH_BACK, path, "carrier"}; // its address had come back first
  return 1;
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

static int heard_link(const struct nlmsghdr *message, path_event *events) {
  const struct ifinfomsg *link = NLMSG_DATA(message);
  unsigned up = IFF_UP | IFF_RUNNING, carrier = IFF_UP | LOWER_UP;
  int gone = message->nlmsg_type == RTM_DELLINK, count = 0;
  if (gone && link->ifi_family != AF_UNSPEC) return 0; // it has left a bridge
  for (int i = 0; i < engine.paths; i++) {
    local_path *path = &engine.path[i];
    if (!is_link_of(path, link, (int)IFLA_PAYLOAD(message))) continue;
    path->index = (unsigned)link->ifi_index; // one that was made anew has another
    count += judge_link(i, !gone && (link->ifi_flags & up) == up, gone || (link->ifi_flags & carrier) == carrier,
                        &events[count]);
  }
  return count;
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

static int heard_address(const struct nlmsghdr *message, path_event *events) {
  const struct ifaddrmsg *entry = NLMSG_DATA(message);
  int count = 0;
  for (int i = 0; i < engine.paths; i++)
    if (engine.path[i].index && is_of(&engine.path[i], entry, (int)IFA_PAYLOAD(message)))
      count += judge(i, message->nlmsg_type == RTM_NEWADDR, "address", &events[count]);
  return count;
}

static int heard(const struct nlmsghdr *message, path_event *events) {
  if (message->nlmsg_type == RTM_NEWLINK || message->nlmsg_type == RTM_DELLINK) return heard_link(message, events);
  if (message->nlmsg_type == RTM_DELADDR || message->nlmsg_type == RTM_NEWADDR) return heard_address(message, events);
  return 0;
}

// What was read and not heard yet is kept from call to call; nothing is, after 0 was returned.
int kernel_read(path_event events[NP_MAX_PATHS]) {
  static _Alignas(struct nlmsghdr) char buffer[16384];
  static struct nlmsghdr *next = (struct nlmsghdr *)buffer;
  static unsigned left;
  static int missed;
  for (;;) {
    while (NLMSG_OK(next, left)) {
      const struct nlmsghdr *message = next;
      next = NLMSG_NEXT(next, left);
      int count = heard(message, events);
      if (count) return count;
    }
    ssize_t size = recv(engine.kernel, buffer, sizeof buffer, MSG_DONTWAIT);
    if (size < 0 && errno == ENOBUFS) {
      missed = 1;
      continue;
    }
    left = size > 0 ? (unsigned)size : 0;
    next = (struct nlmsghdr *)buffer;
    if (!left) break;
  }
  // Not before all was read: until then more is dropped without another word, and the answer may be old.
  if (missed) ask(engine.kernel);
  missed = 0;
  return 0;
}
