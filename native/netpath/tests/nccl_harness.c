// Harness: plays NCCL's part through the plugin's own symbols, in two processes.
//
//   nccl_harness LIBRARY VERSION SCENARIO...    VERSION is 8 to 12; "all" plays all scenarios that it has
//   nccl_harness list VERSION                   their names
//
// The paths are 127.0.1.1 and 127.0.2.1, or what TORCHRELAY_NET_PATHS says. Each scenario begins in two new processes.
// What fails is said on standard error, with the version, the scenario and the side; the exit status is the number of
// scenarios that failed. HARNESS_SECONDS is how long a scenario may take (60).

#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "nccl_side.h"

int right, peer_process;
_Thread_local int channel;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
static const double LONGEST_CALL = 10;
#else
static const double LONGEST_CALL = 1;
#endif

static const scenario *played;
static int peer[CHANNELS];
static _Thread_local char where[256];
static const char *where_of_main;

// ---------------------------------------------------------------- what is said

double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

static const char *side(void) { return played && played->cast == ALONE ? "alone" : right ? "right" : "left"; }

void stage(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(where, sizeof where, format, arguments);
  va_end(arguments);
}

void failed(const char *file, int line, const char *format, ...) {
  char text[1024];
  const char *name = strrchr(file, '/');
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fprintf(stderr, "FAILED v%d %s (%s, %s): %s [%s:%d]\n", version, played ? played->name : "", side(), where, text,
          name ? name + 1 : file, line);
  _exit(1);
}

void expect_result(abi_result found, abi_result wanted, const char *call, const char *file, int line) {
  if (found != wanted) failed(file, line, "%s gave %d instead of %d", call, found, wanted);
}

static void no_end(int number) {
  char text[512];
  (void)number;
  int size = snprintf(text, sizeof text, "FAILED v%d %s (%s): no end, at: %s\n", version, played->name, side(),
                      where_of_main);
  if (write(STDERR_FILENO, text, (size_t)size) < 0) _exit(3);
  _exit(2);
}

// ---------------------------------------------------------------- the bootstrap

void tell_peer(const void *bytes, size_t size) {
  CHECK(write(peer[channel], bytes, size) == (ssize_t)size, "the other side is gone");
}

void hear_peer(void *bytes, size_t size) {
  CHECK(recv(peer[channel], bytes, size, MSG_WAITALL) == (ssize_t)size, "the other side is gone");
}

int exchange(int number) {
  tell_peer(&number, sizeof number);
  hear_peer(&number, sizeof number);
  return number;
}

void meet(void) { exchange(0); }

void await_stopped_peer(void) {
  char path[64], text[256] = "";
  snprintf(path, sizeof path, "/proc/%d/stat", peer_process);
  while (!strstr(text, ") T")) {
    FILE *file = fopen(path, "r");
    CHECK(file && fgets(text, sizeof text, file), "%s", path);
    fclose(file);
  }
}

// ---------------------------------------------------------------- one scenario

static const char *library;

static int seconds(void) {
  const char *text = getenv("HARNESS_SECONDS");
  int given = text ? atoi(text) : 0;
  return given > 0 ? given : 60;
}

_Noreturn static void be(int side_of, int sockets[CHANNELS][2], int of_version) {
  right = side_of;
  where_of_main = where;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGALRM, no_end);
  alarm((unsigned)seconds());
  for (int i = 0; i < CHANNELS; i++) {
    peer[i] = sockets[i][right];
    close(sockets[i][!right]);
  }
  stage("loading");
  net_open(library, of_version);
  if (played->cast != ALONE) peer_process = exchange((int)getpid());
  stage("begun");
  played->play();
  CHECK(net_longest_call() < LONGEST_CALL, "a call that must not block took %.3f s", net_longest_call());
  exit(0); // with what the library has to do then
}

static int ended_well(int status, int side_of) {
  if (played->cast == RIGHT_DIES && side_of) return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  if (WIFEXITED(status) && !WEXITSTATUS(status)) return 1;
  if (WIFSIGNALED(status))
    fprintf(stderr, "FAILED v%d %s (%s): ended by signal %d\n", version, played->name, side_of ? "right" : "left",
            WTERMSIG(status));
  else if (WEXITSTATUS(status) > 2)
    fprintf(stderr, "FAILED v%d %s (%s): ended with %d\n", version, played->name, side_of ? "right" : "left",
            WEXITSTATUS(status));
  return 0;
}

static int play(const scenario *which, int of_version) {
  int sockets[CHANNELS][2], sides = which->cast == ALONE ? 1 : 2, good = 1;
  pid_t process[2];
  played = which;
  version = of_version;
  for (int i = 0; i < CHANNELS; i++)
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets[i])) return perror("socketpair"), 0;
  double begun = now();
  for (int i = 0; i < sides; i++) {
    process[i] = fork();
    if (process[i] < 0) return perror("fork"), 0;
    if (!process[i]) be(i, sockets, of_version);
  }
  for (int i = 0; i < CHANNELS; i++) close(sockets[i][0]), close(sockets[i][1]);
  for (int i = 0; i < sides; i++) {
    int status;
    while (waitpid(process[i], &status, 0) < 0 && errno == EINTR) {}
    good &= ended_well(status, i);
  }
  printf("%s v%d %-18s %6.2f s\n", good ? "ok    " : "FAILED", of_version, which->name, now() - begun);
  fflush(stdout);
  return good;
}

// ---------------------------------------------------------------- all of them

enum { GROUPS = 4, OF_ALL = 3 }; // the last ones are played by name only

static const scenario *const groups[GROUPS] = {message_scenarios, life_scenarios, fault_scenarios, figure_scenarios};

static const scenario *find(const char *name) {
  for (int i = 0; i < GROUPS; i++)
    for (const scenario *each = groups[i]; each->name; each++)
      if (!strcmp(each->name, name)) return each;
  return NULL;
}

static int play_all(int of_version, int only_list) {
  int bad = 0;
  for (int i = 0; i < OF_ALL; i++)
    for (const scenario *each = groups[i]; each->name; each++) {
      if (of_version < each->since) continue;
      if (only_list) printf("%s\n", each->name);
      else bad += !play(each, of_version);
    }
  return bad;
}

static int is_version(const char *text) { return strlen(text) < 3 && atoi(text) >= 8 && atoi(text) <= 12; }

int main(int count, char **words) {
  int bad = 0;
  if (count == 3 && !strcmp(words[1], "list") && is_version(words[2])) return play_all(atoi(words[2]), 1);
  if (count < 4 || !is_version(words[2])) {
    fprintf(stderr, "nccl_harness LIBRARY VERSION SCENARIO..., or nccl_harness list VERSION\n");
    return 100;
  }
  library = words[1];
  setenv("TORCHRELAY_NET_PATHS", "127.0.1.1,127.0.2.1", 0);
  for (int i = 3; i < count; i++) {
    const scenario *which = find(words[i]);
    if (!strcmp(words[i], "all")) {
      bad += play_all(atoi(words[2]), 0);
    } else if (which && atoi(words[2]) >= which->since) {
      bad += !play(which, atoi(words[2]));
    } else {
      fprintf(stderr, "version %s has no scenario %s: see nccl_harness list %s\n", words[2], words[i], words[2]);
      bad++;
    }
  }
  return bad > 99 ? 99 : bad;
}
