#include "csrc/comm/socket.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "csrc/base/clock.h"

int
tp_socket_ms(int64_t deadline_ns)
{
    int64_t left = (deadline_ns - tp_clock_ns() + 999999) / 1000000;
    return left < 0 ? 0 : left > 1000000 ? 1000000 : (int)left;
}

/* Until the socket can: 0, or -1. */
static int
await(int fd, short what, int64_t deadline_ns)
{
    struct pollfd one = {.fd = fd, .events = what};
    for (;;) {
        int ready = poll(&one, 1, tp_socket_ms(deadline_ns));
        if (ready > 0)
            return 0;
        if (ready < 0 && errno != EINTR)
            return -1;
        if (tp_clock_ns() >= deadline_ns) {
            errno = ETIMEDOUT;
            return -1;
        }
    }
}

int
tp_socket_write(int fd, const void *data, size_t bytes, int64_t deadline_ns)
{
    for (const char *at = data, *end = at + bytes; at < end;) {
        ssize_t sent = send(fd, at, (size_t)(end - at), MSG_NOSIGNAL);
        if (sent >= 0)
            at += sent;
        else if (errno != EINTR && ((errno != EAGAIN && errno != EWOULDBLOCK) || await(fd, POLLOUT, deadline_ns) < 0))
            return -1;
    }
    return 0;
}

int
tp_socket_read(int fd, void *data, size_t bytes, int64_t deadline_ns)
{
    for (char *at = data, *end = at + bytes; at < end;) {
        ssize_t got = recv(fd, at, (size_t)(end - at), 0);
        if (got == 0) {
            errno = ECONNRESET;
            return -1;
        }
        if (got > 0)
            at += got;
        else if (errno != EINTR && ((errno != EAGAIN && errno != EWOULDBLOCK) || await(fd, POLLIN, deadline_ns) < 0))
            return -1;
    }
    return 0;
}

/* The family of addresses of a host that means this machine alone, else 0. Of IPv4 all 127.x.y.z do: Debian gives a machine's own
 * name 127.0.1.1. */
static int
loopback_of(const char *host, struct in_addr *v4)
{
    v4->s_addr = htonl(INADDR_LOOPBACK);
    if (strcmp(host, "::1") == 0)
        return AF_INET6;
    if (strncmp(host, "127.", 4) == 0)
        (void)inet_aton(host, v4);
    else if (strcmp(host, "localhost") != 0)
        return 0;
    return AF_INET;
}

/* loopback: an address of this machine alone; NULL: all interfaces. */
static int
listen_at(const struct in_addr *loopback, int family, int port)
{
    struct sockaddr_storage at = {0};
    socklen_t bytes;
    int yes = 1, no = 0, fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    if (family == AF_INET6) { /* all interfaces: both kinds of address */
        struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
        v6.sin6_addr = loopback != NULL ? in6addr_loopback : in6addr_any;
        memcpy(&at, &v6, bytes = sizeof v6);
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
    } else {
        struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
        v4.sin_addr.s_addr = loopback != NULL ? loopback->s_addr : htonl(INADDR_ANY);
        memcpy(&at, &v4, bytes = sizeof v4);
    }
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes); /* a port of a run that has just ended */
    if (bind(fd, (struct sockaddr *)&at, bytes) == 0 && listen(fd, SOMAXCONN) == 0)
        return fd;
    int saved = errno;
    close(fd);
    errno = saved;
    return -1;
}

static int
port_of(int fd)
{
    struct sockaddr_storage at = {0};
    socklen_t bytes = sizeof at;
    if (getsockname(fd, (struct sockaddr *)&at, &bytes) < 0)
        return -1;
    in_port_t port;
    if (at.ss_family == AF_INET6)
        memcpy(&port, (char *)&at + offsetof(struct sockaddr_in6, sin6_port), sizeof port);
    else
        memcpy(&port, (char *)&at + offsetof(struct sockaddr_in, sin_port), sizeof port);
    return ntohs(port);
}

tp_status
tp_socket_listen(const char *host, int port, int ports, int *fd, int *found)
{
    struct in_addr v4;
    int family = loopback_of(host, &v4);
    for (int i = 0; i < ports; i++) {
        *fd = listen_at(family != 0 ? &v4 : NULL, family != 0 ? family : AF_INET6, port + i);
        if (*fd < 0 && family == 0 && errno != EADDRINUSE) /* a machine without IPv6 */
            *fd = listen_at(NULL, AF_INET, port + i);
        if (*fd >= 0) {
            *found = port_of(*fd);
            return TP_OK;
        }
        if (errno != EADDRINUSE)
            break;
    }
    return tp_fail(TP_EIO, "rank 0 cannot listen at port %d%s: %s; a free port (MASTER_PORT) would be right", port,
                   ports > 1 ? " or those after it" : "", strerror(errno));
}

void
tp_socket_with_port(struct sockaddr_storage *at, int port)
{
    in_port_t number = htons((uint16_t)port);
    size_t offset =
        at->ss_family == AF_INET6 ? offsetof(struct sockaddr_in6, sin6_port) : offsetof(struct sockaddr_in, sin_port);
    memcpy((char *)at + offset, &number, sizeof number);
}

void
tp_socket_take_scope(struct sockaddr_storage *at, int fd)
{
    struct sockaddr_in6 to, other;
    socklen_t bytes = sizeof other;
    if (at->ss_family != AF_INET6 || getpeername(fd, (struct sockaddr *)&other, &bytes) < 0 || other.sin6_family != AF_INET6)
        return;
    memcpy(&to, at, sizeof to);
    to.sin6_scope_id = other.sin6_scope_id;
    memcpy(at, &to, sizeof to);
}

int
tp_socket_call(const struct sockaddr *address, socklen_t bytes, int64_t deadline_ns)
{
    int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    int error = connect(fd, address, bytes) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
        socklen_t size = sizeof error;
        error = await(fd, POLLOUT, deadline_ns) < 0 ? errno : 0;
        if (error == 0 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) < 0)
            error = errno;
    }
    if (error == 0) { /* a port of this machine may be given to the caller itself: a connection from it to it */
        struct sockaddr_storage here = {0}, there = {0};
        socklen_t a = sizeof here, b = sizeof there;
        if (getsockname(fd, (struct sockaddr *)&here, &a) == 0 && getpeername(fd, (struct sockaddr *)&there, &b) == 0 &&
            a == b && memcmp(&here, &there, a) == 0)
            error = ECONNREFUSED;
    }
    if (error == 0)
        return fd;
    close(fd);
    errno = error;
    return -1;
}

int
tp_socket_accept(int listener)
{
    return accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
}

int
tp_socket_hung_up(int fd)
{
    struct pollfd one = {.fd = fd, .events = POLLRDHUP};
    return poll(&one, 1, 0) > 0;
}

void
tp_socket_tune(int fd, int64_t silent_ns, int buffer_bytes)
{
    int yes = 1, times = 5, seconds = silent_ns > 12000000000 ? (int)(silent_ns / 6000000000) : 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof times);
    if (buffer_bytes > 0) {
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes);
        setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffer_bytes, sizeof buffer_bytes);
    }
}

/* Keep-alive rests while anything is on its way, and then the kernel tries for a quarter of an hour. TCP_USER_TIMEOUT would end
 * that, but also a connection whose reader is busy for longer. One try alone may have been made this moment, after a long rest. */
int
tp_socket_is_silent(int fd, int64_t silent_ns)
{
    struct tcp_info info;
    socklen_t bytes = sizeof info;
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0 && (info.tcpi_retransmits > 1 || info.tcpi_probes > 1) &&
           info.tcpi_last_ack_recv * 1000000ll >= silent_ns;
}
