/* Copies between row-major matrices and panels. */
#ifndef TP_CPU_GEMM_PACK_H
#define TP_CPU_GEMM_PACK_H

#include "csrc/cpu/cpu.h"

#include "csrc/cpu/vec.h"

#include <string.h>

#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__) /* TSan does not see stores past the caches */
#include <emmintrin.h>
#define GEMM_STREAMS 1
#endif

/* Panels [0, panels) of a row-major [rows, cols] matrix; panel p at dst + p * panel_floats; padded with zeros. */
static void
gemm_pack_panels(int64_t rows, int64_t cols, int64_t panels, const float *x, int64_t x_stride, float *restrict dst,
                 int64_t panel_floats)
{
    int64_t full = cols / TP_PANEL < panels ? cols / TP_PANEL : panels;
    for (int64_t r = 0; r < rows; r++) {
        const float *from = x + r * x_stride;
        float *to = dst + r * TP_PANEL;
        for (int64_t p = 0; p < full; p++)
            memcpy(to + p * panel_floats, from + p * TP_PANEL, TP_PANEL * sizeof *to);
        if (full < panels) {
            size_t rest = (size_t)(cols - full * TP_PANEL);
            memset(to + full * panel_floats, 0, TP_PANEL * sizeof *to);
            memcpy(to + full * panel_floats, from + full * TP_PANEL, rest * sizeof *to);
        }
    }
}

typedef float gemm_quad __attribute__((vector_size(16)));

/* A block of lines that nobody reads soon, past the caches: a plain store would first fetch each line. Line after line: scattered
 * quads of four lines took a tenth longer. */
VEC_INLINE void
gemm_stream_block(const float *restrict from, float *restrict to)
{
#ifdef GEMM_STREAMS
    for (int i = 0; i < TP_PANEL * TP_PANEL; i += 4)
        _mm_stream_ps(to + i, _mm_load_ps(from + i));
#else
    memcpy(to, from, TP_PANEL * TP_PANEL * sizeof *to);
#endif
}

/* Before anybody is told of what was streamed. */
VEC_INLINE void
gemm_stream_end(void)
{
#ifdef GEMM_STREAMS
    _mm_sfence();
#endif
}

/* dst[c, r] = src[r, c] of a full TP_PANEL x TP_PANEL block, both with rows of TP_PANEL floats. */
static void
gemm_transpose_block(const float *restrict src, float *restrict dst)
{
    _Alignas(64) float lines[TP_PANEL * TP_PANEL];
    for (int r = 0; r < TP_PANEL; r += 4)
        for (int c = 0; c < TP_PANEL; c += 4) {
            gemm_quad v[4];
            for (int i = 0; i < 4; i++)
                memcpy(&v[i], src + (r + i) * TP_PANEL + c, sizeof v[i]);
            gemm_quad low01 = __builtin_shufflevector(v[0], v[1], 0, 4, 1, 5);
            gemm_quad low23 = __builtin_shufflevector(v[2], v[3], 0, 4, 1, 5);
            gemm_quad high01 = __builtin_shufflevector(v[0], v[1], 2, 6, 3, 7);
            gemm_quad high23 = __builtin_shufflevector(v[2], v[3], 2, 6, 3, 7);
            v[0] = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
            v[1] = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
            v[2] = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
            v[3] = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
            for (int i = 0; i < 4; i++)
                memcpy(lines + (c + i) * TP_PANEL + r, &v[i], sizeof v[i]);
        }
    gemm_stream_block(lines, dst);
}

/* The same where only rows x cols of src exist; dst's columns from `rows` on become zero, its rows from `cols` on are
 * not there. */
static void
gemm_transpose_edge(int64_t rows, int64_t cols, const float *restrict src, float *restrict dst)
{
    for (int64_t c = 0; c < cols; c++)
        for (int64_t r = 0; r < TP_PANEL; r++)
            dst[c * TP_PANEL + r] = r < rows ? src[r * TP_PANEL + c] : 0.0f;
}

#endif
