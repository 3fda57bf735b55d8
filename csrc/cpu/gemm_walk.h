/* What the matrix products of all instruction sets share: what a product is asked for, how a team's members share it and in which
 * order each walks its part, and what follows a finished sum. gemm_chain.h and gemm_amx.h say before how much workspace a member
 * has (GEMM_MEMBER_BYTES). */
#ifndef TP_CPU_GEMM_WALK_H
#define TP_CPU_GEMM_WALK_H

#include "csrc/cpu/cpu.h"

#include "csrc/cpu/vec.h"

static void *
member_workspace(const tp_backend *be, int member)
{
    return (char *)be->workspace + (size_t)member * tp_align_bytes(GEMM_MEMBER_BYTES);
}

static int64_t
divide_up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static int64_t
least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* `items` cut into pieces of at most `most`, as equal as can be: at least one, which may be empty. */
static int64_t
pieces_of(int64_t items, int64_t most)
{
    return items > most ? divide_up(items, most) : 1;
}

typedef struct {
    int64_t first, last;
} range;

static range
piece(int64_t items, int64_t pieces, int64_t i)
{
    return (range){items * i / pieces, items * (i + 1) / pieces};
}

/* A member's part of C: the grid of row parts x panel parts whose largest part is smallest; sharing panels is
 * preferred, because then each panel of B is read by one member. */
static void
grid_part(int64_t rows, int64_t tile, int64_t panels, int member, int members, range *row_part, range *panel_part)
{
    int64_t tiles = pieces_of(rows, tile), best = INT64_MAX;
    int row_parts = 1;
    for (int d = 1; d <= members; d++) {
        int64_t largest = members % d == 0 ? divide_up(tiles, d) * divide_up(panels, members / d) : INT64_MAX;
        if (largest < best) {
            best = largest;
            row_parts = d;
        }
    }
    range tile_part = piece(tiles, row_parts, member % row_parts);
    *row_part = (range){rows * tile_part.first / tiles, rows * tile_part.last / tiles};
    *panel_part = piece(panels, members / row_parts, member / row_parts);
}

/* What a block of rows, a group of panels and a chunk of k have in common. */
typedef struct {
    range rows, panels, k;
} block;

/* The rows, columns and k of a product, and the most of them (tile, block: rows; group: panels; chunk: k) that one tile, one
 * packed block of A, the panels that share it and one packed piece of k have. */
typedef struct {
    int64_t rows, columns, depth, tile, block, group, chunk;
} extents;

/* A member's part of C, and into how many pieces each of its extents is cut. */
typedef struct {
    range rows, panels;
    int64_t depth, blocks, groups, chunks;
} walk;

static walk
walk_of(const extents *e, int member, int members)
{
    walk w = {.depth = e->depth};
    grid_part(e->rows, e->tile, divide_up(e->columns, TP_PANEL), member, members, &w.rows, &w.panels);
    w.blocks = pieces_of(w.rows.last - w.rows.first, e->block);
    w.groups = pieces_of(w.panels.last - w.panels.first, e->group);
    w.chunks = pieces_of(e->depth, e->chunk);
    return w;
}

static int
walk_is_empty(const walk *w)
{
    return w->rows.first == w->rows.last || w->panels.first == w->panels.last;
}

static range
piece_of(range whole, int64_t pieces, int64_t i)
{
    range part = piece(whole.last - whole.first, pieces, i);
    return (range){whole.first + part.first, whole.first + part.last};
}

/* Chunks of k innermost: the sums of one block are finished before the next begins. */
static block
linear_step(const walk *w, int64_t step)
{
    return (block){.rows = piece_of(w->rows, w->blocks, step / w->chunks / w->groups),
                   .panels = piece_of(w->panels, w->groups, step / w->chunks % w->groups),
                   .k = piece_of((range){0, w->depth}, w->chunks, step % w->chunks)};
}

/* ---- y = x W ----------------------------------------------------------------------------------------------------- */

typedef struct {
    const tp_backend *be;
    const tp_linear *op;
    int64_t depth, columns; /* of the matrix that x meets: W, or its transpose */
    const float *bias;
} linear_job;

VEC_INLINE vf16
load_lanes(const float *p, int64_t width)
{
    return width >= VEC_LANES ? vec_load(p) : vec_load_n(p, width);
}

VEC_INLINE void
store_lanes(float *p, vf16 v, int64_t width)
{
    if (width >= VEC_LANES)
        vec_store(p, v);
    else
        vec_store_n(p, v, width);
}

/* Sixteen finished sums of one row: bias, epilogue, write. `width` of them exist. */
VEC_INLINE void
finish_lanes(const linear_job *job, int64_t row, int64_t column, int64_t width, const float *sum)
{
    const tp_linear *op = job->op;
    float *y = op->y + row * op->y_stride + column,
          *aux = op->aux == NULL ? NULL : op->aux + row * op->aux_stride + column;
    vf16 v = vec_load(sum);
    if (job->bias != NULL)
        v = vec_add(v, load_lanes(job->bias + column, width));
    switch (op->epilogue) {
    case TP_EPILOGUE_RESIDUAL: v = vec_add(load_lanes(aux, width), v); break;
    case TP_EPILOGUE_GELU:
        store_lanes(aux, v, width);
        v = vec_gelu(v);
        break;
    case TP_EPILOGUE_DGELU: v = vec_mul(v, vec_dgelu(load_lanes(aux, width))); break;
    case TP_EPILOGUE_NONE: break;
    }
    store_lanes(y, v, width);
}

VEC_INLINE void
finish_row(const linear_job *job, int64_t row, int64_t panel, const float *sum)
{
    int64_t column = panel * TP_PANEL, width = least(job->columns - column, TP_PANEL);
    for (int64_t j = 0; j < width; j += VEC_LANES)
        finish_lanes(job, row, column + j, width - j, sum + j);
}

/* ---- dW (+)= x^T dy ---------------------------------------------------------------------------------------------- */

typedef struct {
    const tp_backend *be;
    int64_t rows, n_in, n_out;
    const float *x, *dy;
    int64_t x_stride, dy_stride;
    float *grad;
    int accumulate;
} weight_job;

#endif
