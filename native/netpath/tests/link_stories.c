// Link stories: what linkmon.c makes of what the kernel says, by a kernel that is pretended here. Its queue is as small as
// we want it; once something did not fit, all is dropped until the queue was read empty, and that is said only once.

#define _GNU_SOURCE
#include <errno.h>
#include <net/if.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#define recv told
#define send asks
#define if_indextoname name_of

static ssize_t told(int file, void *into, size_t room, int flags);
static ssize_t asks(int file, const void *what, size_t size, int flags);
static char *name_of(unsigned index, char *name);

#include "../core/linkmon.c"

enum { ROOM = 8, OURS = 5, UP = IFF_UP | IFF_RUNNING | LOWER_UP, NO_CARRIER = IFF_UP };

typedef struct {
  struct nlmsghdr head;
  union {
    struct ifinfomsg link;
    struct ifaddrmsg address;
  };
  struct rtattr which;
  char value[IF_NAMESIZE];
} message;

np_engine engine;
static struct {
  message queue[ROOM];
  int first, count, congested, error, asked, reads;
  int back_after;    // so many reads our link has its carrier again
  int index;         // of a link; 0: there is none
  unsigned flags;    // of it
  const char *name;  // of it
} kernel;
static int lost, back, failures;
static const char *story;

void say(int level, const char *format, ...) { (void)level, (void)format; }

#define EXPECT(that) \
  if (!(that)) printf("%s: not so: %s\n", story, #that), failures++

// ---------------------------------------------------------------- the kernel

static void queue(const message *what) {
  if (kernel.count == ROOM && !kernel.congested) kernel.congested = kernel.error = 1;
  if (kernel.congested) return;
  kernel.queue[(kernel.first + kernel.count++) % ROOM] = *what;
}

static message about(int type, int index, unsigned flags, const char *name) {
  message what = {.head = {.nlmsg_len = sizeof what, .nlmsg_type = (uint16_t)type}};
  what.link = (struct ifinfomsg){.ifi_index = index, .ifi_flags = flags};
  what.which = (struct rtattr){sizeof what.which + sizeof what.value, IFLA_IFNAME};
  snprintf(what.value, sizeof what.value, "%s", name);
  return what;
}

static void link_is(int index, unsigned flags, const char *name) {
  kernel.index = index;
  kernel.flags = flags;
  kernel.name = name;
  message what = about(RTM_NEWLINK, index, flags, name);
  queue(&what);
}

static void link_is_gone(int index, const char *name) {
  message what = about(RTM_DELLINK, index, 0, name);
  kernel.index = 0;
  queue(&what);
}

static void address_is_there(int type) {
  message what = {.head = {.nlmsg_type = (uint16_t)type}};
  what.head.nlmsg_len = (uint32_t)(sizeof what - sizeof what.value + 4 - sizeof what.link + sizeof what.address);
  what.address = (struct ifaddrmsg){.ifa_family = AF_INET, .ifa_index = OURS};
  struct rtattr *which = IFA_RTA(&what.address);
  *which = (struct rtattr){RTA_LENGTH(4), IFA_LOCAL};
  memcpy(RTA_DATA(which), &engine.path[0].own.v4.sin_addr, 4);
  queue(&what);
}

static ssize_t asks(int file, const void *what, size_t size, int flags) {
  (void)file, (void)what, (void)flags;
  kernel.asked = 1;
  return (ssize_t)size;
}

// It answers as soon as half of the queue is free, though it may drop everything else still.
static void answer(void) {
  if (!kernel.asked || kernel.count > ROOM / 2) return;
  kernel.asked = 0;
  message what = about(RTM_NEWLINK, kernel.index, kernel.flags, kernel.name);
  if (kernel.index) kernel.queue[(kernel.first + kernel.count++) % ROOM] = what;
}

static ssize_t told(int file, void *into, size_t room, int flags) {
  (void)file, (void)room, (void)flags;
  if (kernel.error) {
    kernel.error = 0;
    errno = ENOBUFS;
    return -1;
  }
  answer();
  if (!kernel.count) {
    errno = EAGAIN;
    return -1;
  }
  memcpy(into, &kernel.queue[kernel.first], sizeof kernel.queue[0]);
  kernel.first = (kernel.first + 1) % ROOM;
  if (!--kernel.count) kernel.congested = 0;
  if (++kernel.reads == kernel.back_after) link_is(OURS, UP, "eth1");
  return sizeof kernel.queue[0];
}

static char *name_of(unsigned index, char *name) {
  (void)name;
  return index == (unsigned)kernel.index ? name : NULL;
}

static void begin(const char *name) {
  story = name;
  memset(&kernel, 0, sizeof kernel);
  memset(&engine, 0, sizeof engine);
  engine.paths = 1;
  engine.path[0] = (local_path){.interface = "eth1", .index = OURS, .up = 1, .carrier = 1};
  engine.path[0].own.v4.sin_family = AF_INET;
  engine.path[0].own.v4.sin_addr.s_addr = htonl(0x0a000001);
  kernel.index = OURS;
  lost = back = 0;
}

static void hear(void) {
  path_event events[NP_MAX_PATHS];
  for (int i = 0; i < 4; i++)
    for (int count; (count = kernel_read(events));)
      while (count--) {
        lost += events[count].what == PATH_LOST;
        back += events[count].what == PATH_BACK;
      }
}

// ---------------------------------------------------------------- the stories

static void a_carrier_comes_and_goes(void) {
  begin("a carrier comes and goes");
  link_is(OURS, NO_CARRIER, "eth1");
  hear();
  EXPECT(!engine.path[0].carrier && !engine.path[0].up && lost == 1);
  link_is(OURS, UP, "eth1");
  hear();
  EXPECT(engine.path[0].carrier && engine.path[0].up && back == 1);
}

static void more_is_said_than_is_heard(void) {
  for (int after = 1; after <= 2 * ROOM; after++) { // the queue is full, and being read
    begin("more is said than is heard");
    kernel.back_after = after;
    for (int i = 0; i < ROOM + 1; i++) link_is(OURS, NO_CARRIER, "eth1");
    hear();
    EXPECT(engine.path[0].carrier == (kernel.flags == UP) && engine.path[0].up == (kernel.flags == UP));
  }
}

static void the_answer_to_the_first_question(void) {
  begin("the answer to the first question");
  kernel.flags = NO_CARRIER;
  kernel.name = "eth1";
  ask(0);
  EXPECT(engine.path[0].carrier);
  hear();
  EXPECT(!engine.path[0].carrier && lost == 1);
}

static void made_anew(void) {
  begin("made anew");
  link_is(OURS, NO_CARRIER, "eth1");
  link_is_gone(OURS, "eth1");
  hear();
  EXPECT(!engine.path[0].up && engine.path[0].carrier);
  link_is(9, NO_CARRIER, "eth1");
  link_is(9, UP, "eth1");
  hear();
  EXPECT(engine.path[0].index == 9 && engine.path[0].up && engine.path[0].carrier && back == 1);
}

static void another_takes_its_name(void) {
  begin("another takes its name");
  link_is(OURS, UP, "net1");
  message another = about(RTM_NEWLINK, 9, NO_CARRIER, "eth1");
  queue(&another);
  another.head.nlmsg_type = RTM_DELLINK;
  queue(&another);
  hear();
  EXPECT(engine.path[0].index == OURS && engine.path[0].carrier && engine.path[0].up && !lost);
}

static void it_leaves_a_bridge(void) {
  begin("it leaves a bridge");
  message what = about(RTM_DELLINK, OURS, UP, "eth1");
  what.link.ifi_family = AF_BRIDGE;
  queue(&what);
  hear();
  EXPECT(engine.path[0].up && !lost);
}

static void its_address_comes_back_before_its_carrier(void) {
  begin("its address comes back before its carrier");
  link_is(OURS, NO_CARRIER, "eth1");
  address_is_there(RTM_NEWADDR);
  hear();
  EXPECT(engine.path[0].up && !engine.path[0].carrier && back == 1);
  link_is(OURS, UP, "eth1");
  hear();
  EXPECT(engine.path[0].carrier && back == 2 && lost == 1);
}

int main(void) {
  a_carrier_comes_and_goes();
  more_is_said_than_is_heard();
  the_answer_to_the_first_question();
  made_anew();
  another_takes_its_name();
  it_leaves_a_bridge();
  its_address_comes_back_before_its_carrier();
  return failures != 0;
}
