/* The matrix products of the CPU backend. Included by isa_body.h once per instruction set.
 *
 * Weights are kept in panels (cpu.h), so that B needs no packing where sums are chains (gemm_chain.h); AMX (gemm_amx.h) splits A
 * and B into bf16. */
#include "csrc/cpu/cpu.h"

#ifdef TP_AMX
#include "csrc/cpu/gemm_amx.h"
#else
#include "csrc/cpu/gemm_chain.h"
#endif
#include "csrc/cpu/gemm_pack.h"
#include "csrc/cpu/gemm_walk.h"

#include <string.h>

/* Independent of the sizes of the model: long sums are cut into chunks. */
static size_t
gemm_workspace_bytes(int64_t n_embd, int64_t vocab, int64_t rows, int64_t seq_len, int members)
{
    (void)n_embd, (void)vocab, (void)rows, (void)seq_len;
    return (size_t)members * tp_align_bytes(GEMM_MEMBER_BYTES);
}

enum { TOUCHED = 8 }; /* multiplications in the time that a float of memory takes */

/* A team's round costs some microseconds, and a hundred where other work holds the cores: small products are done alone. */
static tp_team *
product_team(const tp_backend *be, int64_t work)
{
    return work >= 1 << 19 ? be->team : NULL;
}

static void
cpu_linear(tp_backend *be, const tp_linear *op)
{
    linear_job job = {.be = be, .op = op, .depth = op->n_in, .columns = op->n_out, .bias = op->bias};
    tp_team_run(product_team(be, op->rows * op->n_in * op->n_out), linear_member, &job);
}

static void
cpu_linear_t(tp_backend *be, const tp_linear *op)
{
    linear_job job = {.be = be, .op = op, .depth = op->n_out, .columns = op->n_in};
    tp_team_run(product_team(be, op->rows * op->n_in * op->n_out), linear_member, &job);
}

static void
cpu_linear_w(tp_backend *be, int64_t rows, int64_t n_in, int64_t n_out, const float *x, int64_t x_stride,
             const float *dy, int64_t dy_stride, float *grad, int accumulate)
{
    weight_job job = {.be = be,
                      .rows = rows,
                      .n_in = n_in,
                      .n_out = n_out,
                      .x = x,
                      .dy = dy,
                      .x_stride = x_stride,
                      .dy_stride = dy_stride,
                      .grad = grad,
                      .accumulate = accumulate};
    tp_team_run(product_team(be, rows * n_in * n_out), weight_member, &job);
}

/* ---- db (+)= sum of dy ------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t rows, n;
    const float *dy;
    int64_t dy_stride;
    float *grad;
    int accumulate;
} bias_job;

static void
bias_columns(int64_t rows, int64_t n, const float *restrict dy, int64_t dy_stride, float *restrict grad, int accumulate)
{
    if (!accumulate)
        memset(grad, 0, (size_t)n * sizeof *grad);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < n; j++)
            grad[j] += dy[r * dy_stride + j];
}

static void
bias_member(void *argument, int member, int members)
{
    const bias_job *job = argument;
    const int64_t most = 2048; /* columns whose sums stay in the level-1 cache */
    int64_t first, last;
    tp_team_share(job->n, 16, member, members, &first, &last);
    for (int64_t j = first; j < last; j += most)
        bias_columns(job->rows, least(last - j, most), job->dy + j, job->dy_stride, job->grad + j, job->accumulate);
}

static void
cpu_bias_w(tp_backend *be, int64_t rows, int64_t n, const float *dy, int64_t dy_stride, float *grad, int accumulate)
{
    bias_job job = {.rows = rows, .n = n, .dy = dy, .dy_stride = dy_stride, .grad = grad, .accumulate = accumulate};
    tp_team_run(product_team(be, TOUCHED * rows * n), bias_member, &job);
}

/* ---- layouts ----------------------------------------------------------------------------------------------------- */

static int64_t
cpu_weight_floats(int64_t rows, int64_t cols)
{
    return divide_up(cols, TP_PANEL) * TP_PANEL * rows;
}

static int64_t
cpu_weight_t_floats(int64_t rows, int64_t cols)
{
    return cpu_weight_floats(cols, rows);
}

typedef struct {
    int64_t rows, cols;
    const float *from;
    float *to;
} layout_job;

static void
import_member(void *argument, int member, int members)
{
    const layout_job *job = argument;
    int64_t first, last;
    tp_team_share(divide_up(job->cols, TP_PANEL), 1, member, members, &first, &last);
    gemm_pack_panels(job->rows, job->cols - first * TP_PANEL, last - first, job->from + first * TP_PANEL, job->cols,
                     job->to + first * TP_PANEL * job->rows, job->rows * TP_PANEL);
}

static void
export_member(void *argument, int member, int members)
{
    const layout_job *job = argument;
    int64_t first, last;
    tp_team_share(divide_up(job->cols, TP_PANEL), 1, member, members, &first, &last);
    for (int64_t r = 0; r < job->rows; r++)
        for (int64_t p = first; p < last; p++)
            memcpy(job->to + r * job->cols + p * TP_PANEL, job->from + (p * job->rows + r) * TP_PANEL,
                   (size_t)least(job->cols - p * TP_PANEL, TP_PANEL) * sizeof(float));
}

/* A block of TP_PANEL rows of one panel is contiguous in both layouts. */
static void
transpose_member(void *argument, int member, int members)
{
    const layout_job *job = argument;
    int64_t first, last;
    tp_team_share(divide_up(job->cols, TP_PANEL), 1, member, members, &first, &last);
    for (int64_t p = first; p < last; p++)
        for (int64_t r = 0; r < job->rows; r += TP_PANEL) {
            const float *from = job->from + (p * job->rows + r) * TP_PANEL;
            float *to = job->to + (r * job->cols + p * TP_PANEL * TP_PANEL);
            int64_t rows = least(job->rows - r, TP_PANEL), cols = least(job->cols - p * TP_PANEL, TP_PANEL);
            if (rows == TP_PANEL && cols == TP_PANEL)
                gemm_transpose_block(from, to);
            else
                gemm_transpose_edge(rows, cols, from, to);
        }
    gemm_stream_end();
}

static void
cpu_weight_import(tp_backend *be, int64_t rows, int64_t cols, const float *row_major, float *value)
{
    layout_job job = {.rows = rows, .cols = cols, .from = row_major, .to = value};
    tp_team_run(product_team(be, TOUCHED * rows * cols), import_member, &job);
}

static void
cpu_weight_export(tp_backend *be, int64_t rows, int64_t cols, const float *value, float *row_major)
{
    layout_job job = {.rows = rows, .cols = cols, .from = value, .to = row_major};
    tp_team_run(product_team(be, TOUCHED * rows * cols), export_member, &job);
}

static void
cpu_weight_transpose(tp_backend *be, int64_t rows, int64_t cols, const float *value, float *packed_t)
{
    layout_job job = {.rows = rows, .cols = cols, .from = value, .to = packed_t};
    tp_team_run(product_team(be, TOUCHED * rows * cols), transpose_member, &job);
}
