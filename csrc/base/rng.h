/* Philox4x32-10 (Salmon et al., SC 2011): counter-based, so a number depends on (seed, name, index) alone and never on
 * the partition, the number of threads or the order of calls. */
#ifndef TP_BASE_RNG_H
#define TP_BASE_RNG_H

#include <stdint.h>

/* The four 32-bit outputs of block `counter` under `key`. */
void
tp_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);
/* FNV-1a 64 of a parameter's name: its stream. */
uint64_t
tp_rng_stream(const char *name);
/* out[i] = mean 0, deviation `std`, normal (Box-Muller on 24-bit uniforms) for i in [0, n). Where the thread is told to stop
 * (deadline.h) the rest stays as it was. */
void
tp_rng_normal(uint64_t seed, uint64_t stream, double std, int64_t n, float *out);
/* Uniform integer in [0, bound) keyed by (seed, stream, index); bound >= 1; bias below 2^-32. */
uint64_t
tp_rng_below(uint64_t seed, uint64_t stream, uint64_t index, uint64_t bound);

#endif
