// Receive: what comes over a connection.

#ifndef NP_RECEIVE_H
#define NP_RECEIVE_H

#include "conn.h"

void conn_event(conn *c, unsigned events, uint64_t now); // epoll has something to say of it

#endif
