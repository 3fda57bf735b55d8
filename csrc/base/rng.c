#include "csrc/base/rng.h"

#include "csrc/base/deadline.h"

#include <math.h>

void
tp_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

uint64_t
tp_rng_stream(const char *name)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (; *name; name++)
        hash = (hash ^ (unsigned char)*name) * 0x100000001b3u;
    return hash;
}

static void
block(uint64_t seed, uint64_t stream, uint64_t index, uint32_t out[4])
{
    uint32_t counter[4] = {(uint32_t)index, (uint32_t)(index >> 32), (uint32_t)stream, (uint32_t)(stream >> 32)};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    tp_philox(counter, key, out);
}

void
tp_rng_normal(uint64_t seed, uint64_t stream, double std, int64_t n, float *out)
{
    const double two_pi = 6.283185307179586476925, unit = 1.0 / 16777216.0;
    int64_t steps = 0;
    for (int64_t i = 0; i < n && !tp_deadline_told_after(&steps, 32); i += 4) {
        uint32_t bits[4];
        block(seed, stream, (uint64_t)i / 4, bits);
        for (int64_t j = 0; j < 4 && i + j < n; j += 2) {
            double radius = sqrt(-2.0 * log(((bits[j] >> 8) + 0.5) * unit)); /* + 0.5: log never sees 0 */
            double angle = two_pi * ((bits[j + 1] >> 8) * unit);
            out[i + j] = (float)(std * radius * cos(angle));
            if (i + j + 1 < n)
                out[i + j + 1] = (float)(std * radius * sin(angle));
        }
    }
}

uint64_t
tp_rng_below(uint64_t seed, uint64_t stream, uint64_t index, uint64_t bound)
{
    uint32_t bits[4];
    block(seed, stream, index, bits);
    uint64_t word = (uint64_t)bits[0] << 32 | bits[1];
    return (uint64_t)(((unsigned __int128)word * bound) >> 64);
}
