/* The addresses of a host by its name, asked for in a thread: getaddrinfo waits for whoever serves names for as long as
 * resolv.conf says (5 s, twice, for each server), and a meeting has its own deadline and may be called off. */
#ifndef TP_COMM_HOST_H
#define TP_COMM_HOST_H

#include <netdb.h>
#include <stdint.h>

#include "csrc/base/status.h"

typedef struct tp_host tp_host;

/* Begin to ask for the host's addresses for TCP, as they are now. EMEMORY; ERUNTIME: no thread. */
TP_MUST_USE tp_status
tp_host_ask(const char *host, tp_host **out);
/* Whether there is an answer, waiting for it until then at most. If so it is in place of *addresses (NULL: the first time), ended
 * by freeaddrinfo, and `asked` has ended; where none are known, those stay that were, and *why there never were any. */
int
tp_host_answer(tp_host *asked, int64_t until_ns, struct addrinfo **addresses, const char **why);
/* Nobody waits any more: it ends with its thread. NULL does nothing. */
void
tp_host_forget(tp_host *asked);

#endif
