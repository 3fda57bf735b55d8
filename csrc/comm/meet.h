/* How the ranks of a TCP communicator find each other. The result is connected sockets; no message is sent over them here. */
#ifndef TP_COMM_MEET_H
#define TP_COMM_MEET_H

#include "csrc/comm/links.h"
#include "csrc/comm/tcp.h"

/* Errors as tp_comm_open_tcp. On failure nothing is left open. */
TP_MUST_USE tp_status
tp_links_open(const tp_tcp_config *config, const tp_region *region, tp_links *out);

static inline int64_t
tp_tcp_silent_ns(const tp_tcp_config *config)
{
    return config->silent_ns > 0 ? config->silent_ns : TP_TCP_SILENT_NS;
}

static inline int
tp_tcp_talk(const tp_tcp_config *config, int a, int b)
{
    return a != b && (config->pairs[a * config->ranks + b] || config->pairs[b * config->ranks + a]);
}

#endif
