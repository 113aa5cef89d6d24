// Report: what others are told of our paths: a datagram when something changes (TORCHRELAY_NET_REPORT, a socket), and a page
// of figures (in the folder TORCHRELAY_NET_STATS). Both by link: one of our paths, and an address of a peer.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "clock.h"
#include "comm.h"
#include "paths.h"
#include "report.h"
#include "text.h"

enum { MOST_LINKS = 63, PAGE_MS = 100 };

typedef struct { // one row of the page
  char interface[32], local[48], remote[48];
  uint32_t path, live, state, round_trip;
  uint64_t sent_bytes, received_bytes, sent_again, duplicates, downs, ups, corrupt, down_since;
  uint8_t unused[32];
} row;

typedef struct {
  char magic[8];
  uint64_t sequence, updated;
  uint32_t pid;
  int32_t rank;
  uint32_t rows, row_bytes;
  uint8_t unused[24];
  row row[MOST_LINKS];
} page;

_Static_assert(sizeof(row) == 240, "readers count on it");
_Static_assert(offsetof(page, row) == 64, "readers count on it");

typedef struct {
  int used, local, live;
  int comms, idle; // that use it now; nobody did, for a while
  char remote[48];
  uint64_t lost_us, lost_date; // 0: is up
  row gone;                    // counters of comms that have ended
} link_state;

static link_state links[MOST_LINKS];
static int reports_to = -1, own_rank = -1;
static struct sockaddr_un report_at;
static page *shown;
static char shown_at[4096];
static uint64_t shown_us;

static int rank_of_process(void) {
  const char *text = getenv("RANK");
  char *end;
  long rank = text && *text ? strtol(text, &end, 10) : -1;
  return text && *text && !*end && rank >= 0 && rank < 1 << 30 ? (int)rank : -1;
}

// ---------------------------------------------------------------- beginning and end

static void open_socket(void) {
  const char *name = getenv("TORCHRELAY_NET_REPORT");
  if (!name || !*name) return;
  if (strlen(name) >= sizeof report_at.sun_path) {
    say(NP_LEVEL_WARN, "TORCHRELAY_NET_REPORT is too long for a socket: nothing is reported");
    return;
  }
  report_at.sun_family = AF_UNIX;
  strcpy(report_at.sun_path, name);
  reports_to = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  // Not connected: whoever listens may begin anew.
  if (reports_to < 0) say(NP_LEVEL_WARN, "nothing is reported: %s", strerror(errno));
}

static void open_page(void) {
  const char *folder = getenv("TORCHRELAY_NET_STATS");
  if (!folder || !*folder) return;
  if (snprintf(shown_at, sizeof shown_at, "%s/net-%d", folder, (int)getpid()) >= (int)sizeof shown_at) {
    say(NP_LEVEL_WARN, "TORCHRELAY_NET_STATS is too long for a folder: there is no page of figures");
    return;
  }
  int file = open(shown_at, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  // All of it now: where there is no room left, writing to it later would end the process (SIGBUS).
  int error = file < 0 ? errno : posix_fallocate(file, 0, sizeof *shown);
  if (error) {
    say(NP_LEVEL_WARN, "no page of figures at %s: %s", shown_at, strerror(error));
    if (file >= 0) unlink(shown_at);
  } else {
    shown = mmap(NULL, sizeof *shown, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shown == MAP_FAILED) shown = NULL;
  }
  if (file >= 0) close(file);
  if (!shown) return;
  shown->pid = (uint32_t)getpid();
  shown->rank = own_rank;
  shown->row_bytes = sizeof(row);
  memcpy(shown->magic, "TRNETST1", 8);
}

void report_start(void) {
  memset(links, 0, sizeof links);
  own_rank = rank_of_process(); // once: other threads may change the environment later
  open_socket();
  open_page();
}

void report_end(void) {
  if (reports_to >= 0) close(reports_to);
  reports_to = -1;
  if (!shown) return;
  if (shown->pid == (uint32_t)getpid()) unlink(shown_at); // a child that was forked has no page of its own yet
  munmap(shown, sizeof *shown);
  shown = NULL;
}

// ---------------------------------------------------------------- datagrams

__attribute__((format(printf, 2, 3))) static void report(const char *what, const char *format, ...) {
  char text[1024], more[640], rank[16] = "null";
  if (reports_to < 0) return;
  if (own_rank >= 0) snprintf(rank, sizeof rank, "%d", own_rank);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(more, sizeof more, format, arguments);
  va_end(arguments);
  unsigned long long date = date_us(); // in whole numbers: of a fraction the locale would choose the point
  int size = snprintf(text, sizeof text, "{\"v\":1,\"what\":\"%s\",\"ts\":%llu.%06llu,\"pid\":%d,\"rank\":%s%s}", what,
                      date / 1000000, date % 1000000, (int)getpid(), rank, more);
  if (size < (int)sizeof text)
    sendto(reports_to, text, (size_t)size, MSG_DONTWAIT | MSG_NOSIGNAL, (void *)&report_at, sizeof report_at);
}

// ---------------------------------------------------------------- links

static link_state *link_of(const np_comm *comm, int path) {
  char remote[48];
  link_state *free_one = NULL;
  if (!comm->remote[path].any.sa_family) return NULL;
  address_text(&comm->remote[path], remote, sizeof remote);
  for (int i = 0; i < MOST_LINKS; i++) {
    link_state *each = &links[i];
    if (each->used && each->local == comm->local[path] && !strcmp(each->remote, remote)) return each;
    if (!each->used && !free_one) free_one = each;
  }
  if (!free_one) return NULL; // so many peers: the rest is counted, and not told of one by one
  free_one->used = 1;
  free_one->local = comm->local[path];
  strcpy(free_one->remote, remote);
  return free_one;
}

static int is_used(const link_state *link) {
  char remote[48];
  for (const np_comm *each = engine.comms; each; each = each->next)
    for (int i = 0; i < each->flow.paths; i++) {
      if (each->local[i] != link->local || !each->remote[i].any.sa_family) continue;
      address_text(&each->remote[i], remote, sizeof remote);
      if (!strcmp(link->remote, remote)) return 1;
    }
  return 0;
}

// All places are taken: one of a peer that is gone, and its figures with it, makes room. 0: there is none.
static int forget_one(void) {
  for (int i = 0; i < MOST_LINKS; i++)
    if (!links[i].live && !is_used(&links[i])) {
      memset(&links[i], 0, sizeof links[i]);
      return 1;
    }
  return 0;
}

static const local_path *own(const link_state *link) { return &engine.path[link->local]; }

void report_up(np_comm *comm, int path, uint64_t now) {
  link_state *link = link_of(comm, path);
  if (!link && forget_one()) link = link_of(comm, path);
  if (!link || link->live++ || !link->lost_us) return;
  if (!link->idle) // else nobody knows for how long it was lost
    report("path_up", ",\"path\":%d,\"interface\":\"%s\",\"local\":\"%s\",\"remote\":\"%s\",\"outage_ms\":%llu", link->local,
           own(link)->interface, own(link)->text, link->remote, (unsigned long long)(now - link->lost_us) / 1000);
  link->lost_us = link->lost_date = 0;
  link->idle = 0;
}

void report_down(np_comm *comm, int path, const char *reason, uint32_t under_way, uint64_t now) {
  link_state *link = link_of(comm, path);
  if (!link || link->live == 0 || --link->live) return;
  // A peer that has closed, or ends in peace, is no fault of a path.
  if (comm->flow.peer_closed || comm->closed) return;
  link->lost_us = now;
  link->lost_date = date_us();
  report("path_down",
         ",\"path\":%d,\"interface\":\"%s\",\"local\":\"%s\",\"remote\":\"%s\",\"reason\":\"%s\",\"under_way\":%u", link->local,
         own(link)->interface, own(link)->text, link->remote, reason, under_way);
}

void report_corrupt(np_comm *comm, int path) {
  const local_path *local = &engine.path[comm->local[path]];
  char remote[48];
  address_text(&comm->remote[path], remote, sizeof remote);
  report("corrupt", ",\"path\":%d,\"interface\":\"%s\",\"local\":\"%s\",\"remote\":\"%s\"", comm->local[path],
         local->interface, local->text, remote);
}

static void remotes_of(const np_comm *comm, char *into, size_t room) {
  size_t used = 0;
  into[0] = 0;
  for (int i = 0; i < comm->flow.paths; i++) {
    char remote[48];
    if (!comm->remote[i].any.sa_family) continue;
    address_text(&comm->remote[i], remote, sizeof remote);
    int size = snprintf(into + used, room - used, "%s\"%s\"", used ? "," : "", remote);
    if (size < 0 || (size_t)size >= room - used) break;
    used += (size_t)size;
  }
}

void report_unreachable(np_comm *comm, uint64_t now) {
  char remotes[256];
  (void)now;
  remotes_of(comm, remotes, sizeof remotes);
  report("peer_unreachable", ",\"remotes\":[%s]", remotes);
}

void report_back(np_comm *comm, uint64_t now) {
  char remotes[256];
  remotes_of(comm, remotes, sizeof remotes);
  report("peer_back", ",\"remotes\":[%s],\"outage_ms\":%llu", remotes, (unsigned long long)(now - comm->cut_us) / 1000);
}

void report_gave_up(np_comm *comm) {
  char remotes[256];
  remotes_of(comm, remotes, sizeof remotes);
  report("gave_up", ",\"remotes\":[%s]", remotes);
}

// ---------------------------------------------------------------- the page

static void add_row(row *sum, const flow_path *p) {
  sum->sent_bytes += p->sent_bytes;
  sum->received_bytes += p->received_bytes;
  sum->sent_again += p->sent_again;
  sum->duplicates += p->duplicates;
  sum->downs += p->downs;
  sum->ups += p->ups;
  sum->corrupt += p->corrupt;
  if (p->live && p->round_trip > sum->round_trip) sum->round_trip = p->round_trip;
  if (p->live && p->suspect) sum->state = 2;
}

void report_drop(np_comm *comm) {
  for (int i = 0; i < comm->flow.paths; i++) {
    link_state *link = link_of(comm, i);
    if (!link) continue;
    add_row(&link->gone, &comm->flow.path[i]);
    if (comm->live[i] && link->live) link->live--;
  }
}

// A link that was lost, and that nobody uses any more, is neither lost nor there. If it is used again, it counts as lost
// from then on.
static void count_comms(uint64_t now) {
  for (int i = 0; i < MOST_LINKS; i++) links[i].comms = 0;
  for (np_comm *each = engine.comms; each; each = each->next)
    for (int i = 0; i < each->flow.paths; i++) {
      link_state *link = each->closed || each->flow.peer_closed ? NULL : link_of(each, i);
      if (link) link->comms++;
    }
  for (int i = 0; i < MOST_LINKS; i++) {
    link_state *each = &links[i];
    if (!each->lost_us) continue;
    if (each->comms && each->idle) {
      each->lost_us = now;
      each->lost_date = date_us();
    }
    each->idle = !each->comms;
  }
}

static void fill_row(row *into, const link_state *link) {
  *into = link->gone;
  snprintf(into->interface, sizeof into->interface, "%.31s", own(link)->interface);
  snprintf(into->local, sizeof into->local, "%.47s", own(link)->text);
  memcpy(into->remote, link->remote, sizeof into->remote);
  into->path = (uint32_t)link->local;
  into->live = (uint32_t)link->live;
  into->state = link->lost_us && !link->idle ? 0 : 1;
  into->down_since = link->idle ? 0 : link->lost_date;
}

void report_page(uint64_t now) {
  if (!shown || now - shown_us < PAGE_MS * 1000) return;
  shown_us = now;
  __atomic_fetch_add(&shown->sequence, 1, __ATOMIC_ACQ_REL); // odd: readers look again
  count_comms(now);
  int rows = 0, at[MOST_LINKS];
  for (int i = 0; i < MOST_LINKS; i++) {
    at[i] = rows;
    if (links[i].used) fill_row(&shown->row[rows++], &links[i]);
  }
  for (np_comm *each = engine.comms; each; each = each->next)
    for (int i = 0; i < each->flow.paths; i++) {
      const link_state *link = link_of(each, i);
      if (link && at[link - links] < rows) add_row(&shown->row[at[link - links]], &each->flow.path[i]);
    }
  shown->rows = (uint32_t)rows;
  shown->updated = date_us();
  __atomic_fetch_add(&shown->sequence, 1, __ATOMIC_ACQ_REL);
}
