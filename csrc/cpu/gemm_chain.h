/* Matrix products by chains of fused multiply-adds: AVX-512, AVX2, portable.
 *
 * Loops, outermost first: row blocks of C, groups of panels, chunks of k, panels, tiles of rows. A is copied block by block into
 * the workspace. In linear and linear_t each chunk of k is a chain of its own, added to the chunks before it: one chain over a
 * vocabulary of 50257 would lose a digit. In linear_w, whose k are rows, a chain that crosses chunks is stored and reloaded as
 * fp32, which changes no bit of it. Every size here but GEMM_DEPTH is invisible in the results. */
#ifndef TP_CPU_GEMM_CHAIN_H
#define TP_CPU_GEMM_CHAIN_H

#include "csrc/cpu/gemm_pack.h"
#include "csrc/cpu/gemm_tile.h"

#define GEMM_BLOCK_TILES 16 /* tiles of one block of A: with AVX-512, 182 KiB of the L2 */
#define GEMM_BLOCK_ROWS  (GEMM_BLOCK_TILES * GEMM_ROWS)
#define GEMM_GROUP       24 /* panels that share one packed block of A */
#define GEMM_W_GROUP     48 /* the same in linear_w */

#define GEMM_A_FLOATS      ((int64_t)GEMM_BLOCK_TILES * GEMM_COLUMN_LD * GEMM_ROW_LD) /* both packings of A fit */
#define GEMM_C_FLOATS      ((int64_t)GEMM_BLOCK_ROWS * GEMM_GROUP * TP_PANEL)         /* linear: unfinished sums */
#define GEMM_B_FLOATS      ((int64_t)GEMM_PANEL_LD * GEMM_W_GROUP)                    /* linear_w: dy in panels */
#define GEMM_MEMBER_BYTES \
    ((size_t)(GEMM_A_FLOATS + (GEMM_B_FLOATS > GEMM_C_FLOATS ? GEMM_B_FLOATS : GEMM_C_FLOATS)) * sizeof(float))

#include "csrc/cpu/gemm_walk.h"

/* ---- blocks of A -------------------------------------------------------------------------------------------------- */

/* glibc's memcpy took five times as long for pieces of this length. */
VEC_INLINE void
copy_floats(float *restrict to, const float *restrict from, int64_t n)
{
    int64_t k = 0;
    for (; k + GEMM_LANES <= n; k += GEMM_LANES)
        gemm_store(to + k, gemm_load(from + k));
    if (k < n)
        memcpy(to + k, from + k, (size_t)(n - k) * sizeof *to);
}

/* Row r of the block at dst + r * GEMM_ROW_LD, from x + r * x_stride. */
static void
gemm_pack_rows(int64_t rows, int64_t depth, const float *x, int64_t x_stride, float *restrict dst)
{
    for (int64_t r = 0; r < rows; r++)
        copy_floats(dst + r * GEMM_ROW_LD, x + r * x_stride, depth);
}

/* The transposed block: `count` columns of x as tiles GEMM_TILE_LD floats apart; column k of a tile at
 * + k * GEMM_COLUMN_LD. The first count % tiles tiles are one longer. `readable` floats may be read from each row of x:
 * a copy of fixed size is several times faster. */
static void
gemm_pack_columns(int64_t count, int64_t readable, int64_t tiles, int64_t depth, const float *x, int64_t x_stride,
                  float *restrict dst)
{
    const int64_t size = count / tiles, longer = count % tiles;
    for (int64_t k = 0; k < depth; k++) {
        const float *from = x + k * x_stride;
        float *to = dst + k * GEMM_COLUMN_LD;
        for (int64_t i = 0, at = 0; i < tiles; i++) {
            int64_t rows = size + (i < longer);
            if (readable - at >= GEMM_COLUMN_LD)
                memcpy(to, from + at, GEMM_COLUMN_LD * sizeof *to);
            else
                memcpy(to, from + at, (size_t)rows * sizeof *to);
            at += rows;
            to += GEMM_TILE_LD;
        }
    }
}

/* ---- y = x W ----------------------------------------------------------------------------------------------------- */

/* Fetch part `i` of `parts` (none if i < 0) of `rows` rows of `width` floats, which will be packed soon. */
static void
fetch_part(const float *x, int64_t x_stride, int64_t rows, int64_t width, int64_t i, int64_t parts)
{
    const int64_t line = 16;
    if (i < 0)
        return;
    int64_t lines = divide_up(width, line), per_part = divide_up(rows * lines, parts);
    int64_t first = i * per_part, count = least(per_part, rows * lines - first);
    if (count <= 0)
        return;
    const float *row = x + first / lines * x_stride;
    for (int64_t at = first % lines; count > 0; count--) {
        __builtin_prefetch(row + at * line, 0, 2);
        if (++at == lines) {
            at = 0;
            row += x_stride;
        }
    }
}

static void
finish_tile(const linear_job *job, int64_t row, int64_t rows, int64_t panel, const float *c)
{
    for (int64_t r = 0; r < rows; r++)
        finish_row(job, row + r, panel, c + r * TP_PANEL);
}

/* The rows x panels of y that b names, one chunk of k; `c` holds the sums, panel after panel; `next`: the block whose
 * rows of x are packed after this one. */
static void
linear_block(const linear_job *job, const block *b, const block *next, const float *a, float *c)
{
    const tp_linear *op = job->op;
    int64_t count = b->rows.last - b->rows.first, tiles = pieces_of(count, GEMM_ROWS), size = count / tiles;
    int64_t longer = count % tiles, panels = b->panels.last - b->panels.first;
    int64_t late = least(panels, 8); /* what is fetched before the last panels would be evicted again */
    int finished = b->k.last == job->depth;
    gemm_tile t = {
        .depth = b->k.last - b->k.first,
        .chain = b->k.first > 0 ? GEMM_ADD : GEMM_BEGIN,
        .next_step = divide_up(4 * 2 * 64, tiles),
    };
    for (int64_t p = 0; p < panels; p++) {
        t.b = op->weight + ((b->panels.first + p) * job->depth + b->k.first) * TP_PANEL;
        t.next =
            (const char *)(p + 1 < panels ? t.b + job->depth * TP_PANEL
                                          : op->weight + (next->panels.first * job->depth + next->k.first) * TP_PANEL);
        t.a = a;
        t.c = c + p * count * TP_PANEL;
        for (int64_t i = 0, row = b->rows.first; i < tiles; i++) {
            int64_t rows = size + (i < longer);
            t.soon = finished ? op->y + row * op->y_stride + (b->panels.first + p) * TP_PANEL : t.c + rows * TP_PANEL;
            t.soon_step = finished ? op->y_stride : TP_PANEL;
            fetch_part(op->x + next->rows.first * op->x_stride + next->k.first, op->x_stride,
                       next->rows.last - next->rows.first, next->k.last - next->k.first,
                       (p - panels + late) * tiles + i, late * tiles);
            gemm_tile_rows((int)rows, &t);
            if (finished)
                finish_tile(job, row, rows, b->panels.first + p, t.c);
            row += rows;
            t.a += rows * GEMM_ROW_LD;
            t.c += rows * TP_PANEL;
            t.next += t.depth / 4 * t.next_step;
        }
    }
}

static void
linear_member(void *argument, int member, int members)
{
    const linear_job *job = argument;
    const tp_linear *op = job->op;
    float *a = member_workspace(job->be, member), *c = a + GEMM_A_FLOATS;
    const extents e = {op->rows, job->columns, job->depth, GEMM_ROWS, GEMM_BLOCK_ROWS, GEMM_GROUP, GEMM_DEPTH};
    walk w = walk_of(&e, member, members);
    if (walk_is_empty(&w))
        return;
    int64_t steps = w.blocks * w.groups * w.chunks;
    block b = linear_step(&w, 0);
    for (int64_t i = 0; i < steps; i++) {
        block next = linear_step(&w, i + 1 < steps ? i + 1 : i);
        if (w.chunks > 1 || i % w.groups == 0)
            gemm_pack_rows(b.rows.last - b.rows.first, b.k.last - b.k.first,
                           op->x + b.rows.first * op->x_stride + b.k.first, op->x_stride, a);
        linear_block(job, &b, &next, a, c);
        b = next;
    }
}

/* ---- dW (+)= x^T dy ---------------------------------------------------------------------------------------------- */

/* Rows `in` of the gradient and `panels` of it, one chunk of k (rows of x and dy); b: that chunk of dy in panels. */
static void
weight_block(const weight_job *job, range in, range panels, range k, float *a, const float *b)
{
    int64_t count = in.last - in.first, tiles = pieces_of(count, GEMM_ROWS), size = count / tiles,
            longer = count % tiles;
    gemm_tile t = {.depth = k.last - k.first, .chain = job->accumulate || k.first > 0 ? GEMM_GO_ON : GEMM_BEGIN,
                   .soon_step = TP_PANEL};
    gemm_pack_columns(count, job->n_in - in.first, tiles, t.depth, job->x + k.first * job->x_stride + in.first,
                      job->x_stride, a);
    for (int64_t p = panels.first; p < panels.last; p++) {
        t.a = a;
        t.b = b + (p - panels.first) * GEMM_PANEL_LD;
        t.c = job->grad + (p * job->n_in + in.first) * TP_PANEL;
        for (int64_t i = 0; i < tiles; i++) {
            int64_t rows = size + (i < longer);
            /* the gradient comes from main memory */
            t.soon = i + 1 < tiles || p + 1 == panels.last ? t.c + rows * TP_PANEL
                                                           : t.c + (rows + job->n_in - count) * TP_PANEL;
            gemm_tile_columns((int)rows, &t);
            t.a += GEMM_TILE_LD;
            t.c += rows * TP_PANEL;
        }
    }
}

static void
weight_member(void *argument, int member, int members)
{
    const weight_job *job = argument;
    float *a = member_workspace(job->be, member), *b = a + GEMM_A_FLOATS;
    const extents e = {job->n_in, job->n_out, job->rows, GEMM_ROWS, GEMM_BLOCK_ROWS, GEMM_W_GROUP, GEMM_W_DEPTH};
    walk w = walk_of(&e, member, members);
    if (walk_is_empty(&w))
        return;
    for (int64_t group = 0; group < w.groups; group++)
        for (int64_t chunk = 0; chunk < w.chunks; chunk++) {
            range panels = piece_of(w.panels, w.groups, group), k = piece(w.depth, w.chunks, chunk);
            int64_t column = panels.first * TP_PANEL;
            gemm_pack_panels(k.last - k.first, job->n_out - column, panels.last - panels.first,
                             job->dy + k.first * job->dy_stride + column, job->dy_stride, b, GEMM_PANEL_LD);
            for (int64_t i = 0; i < w.blocks; i++)
                weight_block(job, piece_of(w.rows, w.blocks, i), panels, k, a, b);
        }
}

#endif
