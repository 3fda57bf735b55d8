/* Sockets of the meeting: addresses, listening, calling. None blocks, none outlives an exec. */
#ifndef TP_COMM_SOCKET_H
#define TP_COMM_SOCKET_H

#include <stdint.h>
#include <sys/socket.h>

#include "csrc/base/status.h"

/* Write or read all of it: 0, or -1 with errno (ETIMEDOUT past the deadline, ECONNRESET at the end of the stream). */
int
tp_socket_write(int fd, const void *data, size_t bytes, int64_t deadline_ns);
int
tp_socket_read(int fd, void *data, size_t bytes, int64_t deadline_ns);
/* Milliseconds for poll(2) until then, at least 0. */
int
tp_socket_ms(int64_t deadline_ns);

/* Listen at the first free one of so many ports (port 0: any): where the host is an address, or "localhost", that means this
 * machine alone, at that, so that nothing is opened to the network; else on all its interfaces. *found is the port. EIO. */
TP_MUST_USE tp_status
tp_socket_listen(const char *host, int port, int ports, int *fd, int *found);
/* Put a port into an address. */
void
tp_socket_with_port(struct sockaddr_storage *at, int port);
/* The link that an address of IPv6 is of, where it is of one alone (fe80::): that of this connection. */
void
tp_socket_take_scope(struct sockaddr_storage *at, int fd);
/* A connection, or -1 with errno. */
int
tp_socket_call(const struct sockaddr *address, socklen_t bytes, int64_t deadline_ns);
/* A waiting connection, or -1. */
int
tp_socket_accept(int listener);
/* Has the other end closed, or is it lost? */
int
tp_socket_hung_up(int fd);
/* Small messages at once; a peer whose machine has not answered for so long is noticed while nothing is on its way to it; buffers
 * as asked (0: as they are). */
void
tp_socket_tune(int fd, int64_t silent_ns, int buffer_bytes);
/* Whether something is on its way to the peer's machine and that has not answered for so long. A process that reads nothing is no
 * such thing: its machine's kernel answers. */
int
tp_socket_is_silent(int fd, int64_t silent_ns);

#endif
