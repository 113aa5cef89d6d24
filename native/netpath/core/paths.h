// Paths: our own addresses, what may happen to them, and the handle that tells them to a peer.

#ifndef NP_PATHS_H
#define NP_PATHS_H

#include <netinet/in.h>
#include <sys/socket.h>

#include "../netpath.h"
#include "wire.h"

typedef union {
  struct sockaddr any;
  struct sockaddr_in v4;
  struct sockaddr_in6 v6;
} address;

typedef struct {
  char interface[NP_TEXT];
  char text[NP_TEXT]; // the address
  address own;        // with the port where we listen
  unsigned index;     // of the interface; 0: not known
  uint32_t speed_mbps;
  int up;             // as far as the kernel has said
  int carrier;        // what is sent may go somewhere; 1 where it is not known
  int listens;        // descriptor
} local_path;

// What whoever watches the paths (linkmon.c, inject.c) returns, and the engine's loop acts on: they know no connection.
typedef enum {
  PATH_LOST,    // all connections of the path are lost
  PATH_BACK,    // new ones may be tried at once
  PATH_REFRESH, // whether anything is read and written has changed
} path_change;

typedef struct {
  path_change what;
  int path;
  const char *reason; // of PATH_LOST
} path_event;

typedef struct {
  uint32_t magic;
  uint8_t version, paths, unused[2];
  uint8_t token[TOKEN_BYTES];
  struct {
    uint8_t family, unused; // 4 or 6
    uint16_t port;          // big endian, as the address
    uint8_t bytes[16];
  } at[NP_MAX_PATHS];
  uint64_t begun; // id of the comm that np_connect has begun
} np_handle;

_Static_assert(sizeof(np_handle) <= NP_HANDLE_BYTES, "fits into what NCCL carries");

int paths_find(local_path *paths, int *count); // reads TORCHRELAY_NET_PATHS
int paths_listen(local_path *paths, int count);
void bind_to_interface(int fd, const local_path *path); // where that is permitted
socklen_t address_length(const address *of);
void address_text(const address *of, char *text, size_t room);
int same_address(const address *a, const address *b); // whatever their ports
void handle_fill(np_handle *handle, const local_path *paths, int count);
int handle_read(const np_handle *handle, int at, address *into); // 0: there is none

#endif
