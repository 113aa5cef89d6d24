// Wire: what goes over a connection. Frames of 32 bytes, little endian; DATA and HELLO are followed by `length` bytes.

#ifndef NP_WIRE_H
#define NP_WIRE_H

#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "frames are sent as they lie in memory, which must be little endian"
#endif

enum { WIRE_VERSION = 2, HELLO_BYTES = 32, TOKEN_BYTES = 16 };

#define WIRE_MAGIC (0x004e5254u | (uint32_t)WIRE_VERSION << 24) // "TRN" and the version

// What may be relied on: HELLO, WELCOME and REFUSE always have in `crc` the checksum of themselves (with `crc` 0) and of
// what follows. Of a checked comm's other frames the checksum of all after `magic` is added to `magic`, so that a frame is
// known for good before anything is done with it, and `crc` of DATA is that of the chunk.
typedef enum {
  HELLO = 1, // sender: this connection is for comm `seq`, path, epoch; a hello_body follows
  WELCOME,   // receiver: it is the path's connection from now on
  REFUSE,    // receiver: it is not, for the reason in `offset`
  DATA,      // a chunk of message `seq`: at `offset`, `length` bytes of `total`
  ACK,       // `seq` chunks have come in all over this path in this epoch
  CTS,       // `seq` receives have been posted in all: as many messages may be sent
  PING,      // at time `seq` of the sender
  PONG,      // its answer
  DOWN,      // the connection of path, epoch is of no use any more; over itself: nothing is heard over it
  BYE,       // no more messages will come, or: all have come and nobody waits for more; `offset`: I have heard yours
} frame_type;

typedef enum { REFUSE_STRANGER = 1, REFUSE_ALIVE, REFUSE_CLOSED, REFUSE_VERSION } refusal;

typedef struct {
  uint32_t magic;
  uint8_t type, path;
  uint16_t epoch;
  uint64_t seq;
  uint32_t offset, length, total, crc;
} frame;

typedef struct {
  uint8_t token[TOKEN_BYTES]; // whoever has the handle knows it
  uint32_t chunk;             // bytes of a chunk, all but a message's last
  uint32_t checked;           // whether chunks have checksums
  uint8_t unused[8];
} hello_body;

_Static_assert(sizeof(frame) == 32, "no gaps");
_Static_assert(sizeof(hello_body) == HELLO_BYTES, "no gaps");

#endif
