/* Writing what another core is about to read: by plain stores or past the caches, whichever has been faster of late.
 *
 * Where two cores share a cache, plain stores are best: the reader finds the bytes there. Where they do not (other core complexes
 * of an EPYC, other sockets), a plain store to a line that the reader has read must first be granted by the cache over there, one
 * line after another: on Zen 3 that makes 4 GB/s. A store past the caches asks for nothing and makes 20; the reader fetches from
 * memory what it would else have fetched from the writer's cache, about as fast. A virtual machine cannot ask which of the two it
 * is, and its cores move from one to the other while it runs (benchmarks/comm.py shows both), so the writer measures its own
 * copies. */
#ifndef TP_COMM_PACE_H
#define TP_COMM_PACE_H

#include <stddef.h>
#include <stdint.h>

enum { TP_PACE_STORED, TP_PACE_STREAMED, TP_PACE_WAYS };
#define TP_PACE_LEAST ((size_t)32 << 10) /* bytes; a shorter copy is always stored: its reader waits for all of it anyway */
#define TP_PACE_LOOK  64                 /* one copy in so many goes the other way, to see how fast that is now */

/* Of one writer into one ring. Begins as zeros: both ways are tried at once. */
typedef struct {
    float ns[TP_PACE_WAYS]; /* nanoseconds a byte, the last copies counting most; 0: not yet tried */
    uint32_t copies;        /* that were long enough */
    int streams;            /* the usual way now */
} tp_pace;

/* Copy `bytes` to `to`, a multiple of 64, in whichever way is faster. Ordered before any later store with release. */
void
tp_pace_copy(tp_pace *pace, void *to, const void *from, size_t bytes);

#endif
