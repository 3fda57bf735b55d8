#include "cuda/mma.h"

#include "cuda/emu/machine.h"

typedef struct {
    float *d;
    const uint32_t *a, *b;
} mma_lane;

static float
low(uint32_t pair)
{
    return tp_bits_float(pair << 16);
}

static float
high(uint32_t pair)
{
    return tp_bits_float(pair & 0xffff0000u);
}

static void
mma_work(void **lanes)
{
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < TP_WARP; lane++) {
        const mma_lane *mine = lanes[lane];
        int g = lane / 4, c = 2 * (lane % 4);
        for (int i = 0; i < 4; i++) {
            a[g + 8 * (i & 1)][c + 4 * (i & 2)] = low(mine->a[i]);
            a[g + 8 * (i & 1)][c + 4 * (i & 2) + 1] = high(mine->a[i]);
            d[g + 4 * (i & 2)][c + (i & 1)] = mine->d[i];
        }
        for (int i = 0; i < 2; i++) {
            b[c + 8 * i][g] = low(mine->b[i]);
            b[c + 8 * i + 1][g] = high(mine->b[i]);
        }
    }
    for (int m = 0; m < 16; m++) {
        float sum[8] = {0};
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 8; n++)
                sum[n] += a[m][k] * b[k][n];
        for (int n = 0; n < 8; n++)
            d[m][n] += sum[n];
    }
    for (int lane = 0; lane < TP_WARP; lane++)
        for (int i = 0; i < 4; i++)
            ((const mma_lane *)lanes[lane])->d[i] = d[lane / 4 + 4 * (i & 2)][2 * (lane % 4) + (i & 1)];
}

void
tp_simt_mma(const char *site, float *d, const uint32_t *a, const uint32_t *b)
{
    mma_lane mine = {d, a, b};
    tp_simt_meet(site, mma_work, &mine);
}

typedef struct {
    uint32_t *f;
    const void *row;
    int transposed;
} ldmatrix_lane;

static void
ldmatrix_work(void **lanes)
{
    for (int i = 0; i < 4; i++) {
        uint16_t matrix[8][8];
        for (int r = 0; r < 8; r++)
            memcpy(matrix[r], ((const ldmatrix_lane *)lanes[8 * i + r])->row, sizeof matrix[r]);
        for (int lane = 0; lane < TP_WARP; lane++) {
            ldmatrix_lane *mine = lanes[lane];
            int r = lane / 4, c = 2 * (lane % 4);
            mine->f[i] = mine->transposed ? matrix[c][r] | (uint32_t)matrix[c + 1][r] << 16
                                          : matrix[r][c] | (uint32_t)matrix[r][c + 1] << 16;
        }
    }
}

void
tp_simt_ldmatrix(const char *site, uint32_t *f, const void *row, int transposed)
{
    ldmatrix_lane mine = {f, row, transposed};
    tp_simt_check(site, row, 16, 16);
    tp_race_touch(row, 16, 0);
    tp_simt_meet(site, ldmatrix_work, &mine);
}

static void
transpose_work(void **lanes)
{
    uint16_t matrix[8][8];
    for (int lane = 0; lane < TP_WARP; lane++)
        memcpy(&matrix[lane / 4][2 * (lane % 4)], lanes[lane], sizeof(uint32_t));
    for (int lane = 0; lane < TP_WARP; lane++) {
        int r = lane / 4, c = 2 * (lane % 4);
        *(uint32_t *)lanes[lane] = matrix[c][r] | (uint32_t)matrix[c + 1][r] << 16;
    }
}

uint32_t
tp_simt_transpose(const char *site, uint32_t pair)
{
    tp_simt_meet(site, transpose_work, &pair);
    return pair;
}
