/* The communicator between machines: the contract of comm.h over TCP, on host memory.
 *
 * One connection for each pair that talks, and one from every rank to rank 0 for all-gathers, progress and aborts. A
 * thread sleeps on the latter: it relays what any rank says of its end, and takes a connection that closes without a word
 * for the death of its rank. A machine that vanishes without closing is noticed once it has not answered for silent_ns. */
#ifndef TP_COMM_TCP_H
#define TP_COMM_TCP_H

#include "csrc/comm/comm.h"

#define TP_TCP_WORD  64   /* most bytes of token, version and plan each, with their end */
#define TP_TCP_SILENT_NS 30000000000ll
#define TP_TCP_RANKS 1024 /* most ranks: rank 0 holds a connection to each */

typedef struct {
    int rank, ranks;
    const char *host;     /* of rank 0 */
    int port, ports;      /* rank 0 listens at the first free one of port, ..., port + ports - 1; the others try them all */
    const char *token;    /* who has another one is a stranger and not heard; "" is one too */
    const char *version, *plan; /* must be the same on all ranks */
    const uint8_t *pairs; /* [ranks * ranks], as in tp_region_bytes */
    size_t max_gather_bytes;
    int64_t meeting_ns; /* how long the ranks wait for each other at the beginning */
    int64_t timeout_ns; /* of one wait afterwards; 0: none */
    int64_t silent_ns;  /* a machine that has not answered for so long is gone; 0: half a minute */
    int buffer_bytes;   /* of a connection in the kernel, each way; 0: what the kernel thinks best */
} tp_tcp_config;

/* Meet all ranks and connect. region: of this process alone, of so many ranks, without rings; it outlives the communicator,
 * which keeps the other ranks' progress in it (some 0.2 s old, with each 64 ranks more as much older) and brings every rank's
 * abort into it and this one's to all. EVALUE: config, or world size, version or plan that differ between ranks (on every rank,
 * naming the odd one). EIO: no such host, port in use. ETIMEOUT: names who did not come. ECONNECTION: a rank left during the
 * meeting. EABORTED: the region's abort, which ends the meeting too. */
TP_MUST_USE tp_status
tp_comm_open_tcp(const tp_tcp_config *config, tp_region *region, tp_comm **out);

#endif
