#include "csrc/comm/pace.h"

#include "csrc/base/clock.h"

#include <string.h>

/* TSan does not see stores past the caches, so it would miss a race: it gets plain ones, and all the rest. */
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
#if defined(__has_feature)
#if !__has_feature(thread_sanitizer)
#define STREAMS 1
#endif
#else
#define STREAMS 1
#endif
#endif

#ifdef STREAMS
#include <emmintrin.h>
#endif

/* Streaming is taken up where it is so many times faster, and given up where it is no longer that much. Alike is not enough: the
 * reader has it easier with what is in a cache. The two differ because lines that were streamed are quickly stored to once. */
#define TAKE_UP 2.5F
#define GIVE_UP 1.5F
#define OUTLIER 4.0F /* times longer than of late: somebody else had the core */
#define LINE    64

static void
stream(unsigned char *to, const unsigned char *from, size_t bytes)
{
    size_t at = 0;
#ifdef STREAMS
    for (; at + LINE <= bytes; at += LINE) { /* whole lines leave the core in one piece */
        const __m128i *read = (const __m128i *)(from + at);
        __m128i *write = (__m128i *)(to + at);
        __m128i a = _mm_loadu_si128(read), b = _mm_loadu_si128(read + 1);
        __m128i c = _mm_loadu_si128(read + 2), d = _mm_loadu_si128(read + 3);
        _mm_stream_si128(write, a);
        _mm_stream_si128(write + 1, b);
        _mm_stream_si128(write + 2, c);
        _mm_stream_si128(write + 3, d);
    }
    _mm_sfence(); /* a store with release orders only what is plain */
#endif
    memcpy(to + at, from + at, bytes - at);
}

void
tp_pace_copy(tp_pace *pace, void *to, const void *from, size_t bytes)
{
    if (bytes < TP_PACE_LEAST) {
        if (bytes > 0)
            memcpy(to, from, bytes);
        return;
    }
    pace->streams = pace->ns[TP_PACE_STREAMED] * (pace->streams ? GIVE_UP : TAKE_UP) < pace->ns[TP_PACE_STORED];
    int streamed = ++pace->copies % TP_PACE_LOOK == 0 ? !pace->streams : pace->streams;
    float *ns = &pace->ns[streamed ? TP_PACE_STREAMED : TP_PACE_STORED];
    int64_t start = tp_clock_ns();
    if (streamed)
        stream(to, from, bytes);
    else
        memcpy(to, from, bytes);
    float now = (float)(tp_clock_ns() - start + 1) / (float)bytes; /* + 1: never 0, which says "not yet tried" */
    if (*ns > 0 && now > OUTLIER * *ns)
        now = OUTLIER * *ns;
    *ns = *ns > 0 ? *ns + (now - *ns) / 4 : now;
}
