/* Sixteen rows of sixteen floats, transposed in registers. */
#ifndef TP_CPU_TRANSPOSE_H
#define TP_CPU_TRANSPOSE_H

#include "csrc/cpu/vec.h"

#if defined(__AVX512F__)
/* Pairs, then quadruples of rows within each 128-bit lane, then the lanes themselves: four rounds of sixteen. */
VEC_INLINE void
transpose_16(vf16 r[16])
{
    __m512 t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
            r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        t[c] = _mm512_shuffle_f32x4(r[c], r[c + 4], 0x88);
        t[c + 4] = _mm512_shuffle_f32x4(r[c], r[c + 4], 0xdd);
        t[c + 8] = _mm512_shuffle_f32x4(r[c + 8], r[c + 12], 0x88);
        t[c + 12] = _mm512_shuffle_f32x4(r[c + 8], r[c + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        r[c] = _mm512_shuffle_f32x4(t[c], t[c + 8], 0x88);
        r[c + 8] = _mm512_shuffle_f32x4(t[c], t[c + 8], 0xdd);
        r[c + 4] = _mm512_shuffle_f32x4(t[c + 4], t[c + 12], 0x88);
        r[c + 12] = _mm512_shuffle_f32x4(t[c + 4], t[c + 12], 0xdd);
    }
}
#else
VEC_INLINE void
transpose_16(vf16 r[16])
{
    float in[16][16], out[16][16];
    for (int i = 0; i < 16; i++)
        vec_store(in[i], r[i]);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++)
            out[j][i] = in[i][j];
    for (int i = 0; i < 16; i++)
        r[i] = vec_load(out[i]);
}
#endif

#endif
