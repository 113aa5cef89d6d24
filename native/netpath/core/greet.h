// Greet: how a connection comes to be.

#ifndef NP_GREET_H
#define NP_GREET_H

#include "conn.h"

uint32_t greeting_sum(const uint8_t *bytes, uint32_t size);

void conn_connect(np_comm *comm, int path, uint64_t now); // begin an attempt
void conn_greet(conn *c, uint64_t now);                   // it is connected, or could not be
void conn_accept(int local, uint64_t now);
void conn_listen(int local, int on);
void conn_refuse(conn *c, refusal why, uint64_t now);
void heard_greeting(conn *c, const frame *in, const hello_body *body, uint64_t now); // before it is live

#endif
