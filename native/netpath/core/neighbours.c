// Neighbours: what the kernel knows of a peer's hardware address is kept while the path to the peer is silent.
//
// Without it: an outage in which not even ARP comes through makes the kernel forget the address after 20 to 60 s. It asks
// again once a second from then on (neigh.*.retrans_time_ms), so a path that is back waits for up to a second. Nobody
// without privileges can make it ask more often: a packet to send makes it ask at once only when it has given up, and that
// is once in three seconds.
//
// The same second is lost when somebody sends while there is no carrier: losing it makes the kernel forget all addresses at
// once, and what is sent makes it ask where nobody hears it. So without a carrier nothing is sent to another machine, not
// even the end of a connection, and the first packet after it asks at once, and is answered. What is left is what TCP
// sends by itself before we hear of it: under full load about every third time, and only in outages of less than three
// seconds.
//
// While a path has a carrier and is silent, for some minutes each second an empty datagram goes to the peer's discard port,
// with MSG_CONFIRM: "its address holds" (man 7 udp, man 2 send). Nobody knows that meanwhile; should the peer have got
// another hardware address and not have told anybody, the path comes back only when this is over and the kernel asks
// again. Hence the bound.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <string.h>
#include <unistd.h>

#include "comm.h"
#include "neighbours.h"
#include "paths.h"

enum {
  DISCARD = 9,        // RFC 863: whoever listens there throws it away
  MOST_AT_ONCE = 128, // neighbours; to the others a path comes back when the kernel has asked
};

static const uint64_t EVERY_US = 1000000, LASTS_US = 180 * 1000000ull;

static int socket_of[NP_MAX_PATHS] = {-1, -1, -1, -1};
static uint64_t kept_us;

_Static_assert(NP_MAX_PATHS == 4, "each path's socket is -1 at first");

typedef struct {
  int local;
  address remote;
} neighbour;

static int open_socket(int local) {
  if (socket_of[local] >= 0) return socket_of[local];
  address from = engine.path[local].own;
  from.v4.sin_port = 0; // in the same place for both families
  int file = socket(from.any.sa_family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (file < 0) return -1;
  bind_to_interface(file, &engine.path[local]);
  if (bind(file, &from.any, address_length(&from))) { // the address is gone
    close(file);
    return -1;
  }
  return socket_of[local] = file;
}

static void close_socket(int local) {
  if (socket_of[local] >= 0) close(socket_of[local]);
  socket_of[local] = -1;
}

int neighbours_in_vain(int local, const address *remote) {
  if (engine.path[local].carrier) return 0;
  for (int i = 0; i < engine.paths; i++)
    if (same_address(&engine.path[i].own, remote)) return 0; // this machine needs no carrier to reach itself
  return 1;
}

// Nothing comes over it, something did lately, and it is waited for.
static int is_missed(const np_comm *comm, int path, uint64_t now) {
  const flow_path *p = &comm->flow.path[path];
  if (neighbours_in_vain(comm->local[path], &comm->remote[path])) return 0; // an address may be back before the carrier
  if (comm->closed || comm->flow.peer_closed || (comm->live[path] && !p->silent)) return 0;
  return p->heard_us && now - p->heard_us < LASTS_US && engine.path[comm->local[path]].up;
}

static int add(neighbour *all, int count, int local, const address *remote) {
  neighbour one = {local, *remote};
  one.remote.v4.sin_port = htons(DISCARD);
  for (int i = 0; i < count; i++)
    if (all[i].local == local && !memcmp(&all[i].remote, &one.remote, address_length(remote))) return count;
  if (count < MOST_AT_ONCE) all[count++] = one;
  return count;
}

// To another machine there is no way over the loopback interface. Whoever has no CAP_NET_RAW may not change what a
// socket is bound to, and has to wait for the second.
void neighbours_mute(int fd) { setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, "lo", 3); }

void neighbours_keep(uint64_t now) {
  neighbour all[MOST_AT_ONCE];
  int count = 0;
  if (!engine.settings.neighbours || now - kept_us < EVERY_US) return;
  kept_us = now;
  for (const np_comm *each = engine.comms; each; each = each->next)
    for (int i = 0; i < each->flow.paths; i++)
      if (each->remote[i].any.sa_family && is_missed(each, i, now))
        count = add(all, count, each->local[i], &each->remote[i]);
  for (int i = 0; i < count; i++) {
    int file = open_socket(all[i].local), flags = MSG_CONFIRM | MSG_DONTWAIT | MSG_NOSIGNAL;
    if (file < 0) continue;
    // It may have been bound to an interface that is gone, and there is another of its name by now.
    if (sendto(file, "", 0, flags, &all[i].remote.any, address_length(&all[i].remote)) < 0) close_socket(all[i].local);
  }
}

void neighbours_end(void) {
  for (int i = 0; i < NP_MAX_PATHS; i++) close_socket(i);
}
