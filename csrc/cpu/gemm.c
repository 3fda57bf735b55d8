/* The matrix products of the CPU backend. Included by isa_body.h once per instruction set.
 *
 * Weights are kept in panels (cpu.h), so that B needs no packing; A is copied block by block into the workspace.
 * Loops, outermost first: row blocks of C, groups of panels, chunks of k, panels, tiles of rows. In linear and linear_t each
 * chunk of k is a chain of its own, added to the chunks before it: one chain over a vocabulary of 50257 would lose a digit.
 * In linear_w, whose k are rows, a chain that crosses chunks is stored and reloaded as fp32, which changes no bit of it. Every
 * size here but GEMM_DEPTH is invisible in the results. */
#include "csrc/cpu/cpu.h"

#include "csrc/cpu/gemm_pack.h"
#include "csrc/cpu/gemm_tile.h"
#include "csrc/cpu/vec.h"

#include <string.h>

#define GEMM_BLOCK_TILES 16 /* tiles of one block of A: with AVX-512, 182 KiB of the L2 */
#define GEMM_BLOCK_ROWS  (GEMM_BLOCK_TILES * GEMM_ROWS)
#define GEMM_GROUP       24 /* panels that share one packed block of A */
#define GEMM_W_GROUP     48 /* the same in linear_w */

#define GEMM_A_FLOATS      ((int64_t)GEMM_BLOCK_TILES * GEMM_COLUMN_LD * GEMM_ROW_LD) /* both packings of A fit */
#define GEMM_C_FLOATS      ((int64_t)GEMM_BLOCK_ROWS * GEMM_GROUP * TP_PANEL)         /* linear: unfinished sums */
#define GEMM_B_FLOATS      ((int64_t)GEMM_PANEL_LD * GEMM_W_GROUP)                    /* linear_w: dy in panels */
#define GEMM_MEMBER_FLOATS (GEMM_A_FLOATS + (GEMM_B_FLOATS > GEMM_C_FLOATS ? GEMM_B_FLOATS : GEMM_C_FLOATS))

/* Independent of the sizes of the model: long sums are cut into chunks. */
static size_t
gemm_workspace_bytes(int64_t n_embd, int64_t vocab, int64_t rows, int64_t seq_len, int members)
{
    (void)n_embd, (void)vocab, (void)rows, (void)seq_len;
    return (size_t)members * tp_align_bytes((size_t)GEMM_MEMBER_FLOATS * sizeof(float));
}

static float *
member_workspace(const tp_backend *be, int member)
{
    return (float *)((char *)be->workspace +
                     (size_t)member * tp_align_bytes((size_t)GEMM_MEMBER_FLOATS * sizeof(float)));
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
grid_part(int64_t rows, int64_t panels, int member, int members, range *row_part, range *panel_part)
{
    int64_t tiles = pieces_of(rows, GEMM_ROWS), best = INT64_MAX;
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

/* ---- y = x W ----------------------------------------------------------------------------------------------------- */

typedef struct {
    const tp_backend *be;
    const tp_linear *op;
    int64_t depth, columns; /* of the matrix that x meets: W, or its transpose */
    const float *bias;
} linear_job;

GEMM_INLINE vf16
load_lanes(const float *p, int64_t width)
{
    return width >= VEC_LANES ? vec_load(p) : vec_load_n(p, width);
}

GEMM_INLINE void
store_lanes(float *p, vf16 v, int64_t width)
{
    if (width >= VEC_LANES)
        vec_store(p, v);
    else
        vec_store_n(p, v, width);
}

/* Sixteen finished chains of one row: bias, epilogue, write. `width` of them exist. */
GEMM_INLINE void
finish_lanes(const linear_job *job, int64_t row, int64_t column, int64_t width, const float *chain)
{
    const tp_linear *op = job->op;
    float *y = op->y + row * op->y_stride + column,
          *aux = op->aux == NULL ? NULL : op->aux + row * op->aux_stride + column;
    vf16 v = vec_load(chain);
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

static void
finish_tile(const linear_job *job, int64_t row, int64_t rows, int64_t panel, const float *c)
{
    int64_t column = panel * TP_PANEL, width = least(job->columns - column, TP_PANEL);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < width; j += VEC_LANES)
            finish_lanes(job, row + r, column + j, width - j, c + r * TP_PANEL + j);
}

/* What a block of rows, a group of panels and a chunk of k have in common. */
typedef struct {
    range rows, panels, k;
} block;

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

/* A member's part of C, and into how many pieces each of its extents is cut. */
typedef struct {
    range rows, panels;
    int64_t depth, blocks, groups, chunks;
} walk;

static walk
walk_of(int64_t rows, int64_t columns, int64_t depth, int64_t group, int64_t chunk, int member, int members)
{
    walk w = {.depth = depth};
    grid_part(rows, divide_up(columns, TP_PANEL), member, members, &w.rows, &w.panels);
    w.blocks = pieces_of(w.rows.last - w.rows.first, GEMM_BLOCK_ROWS);
    w.groups = pieces_of(w.panels.last - w.panels.first, group);
    w.chunks = pieces_of(depth, chunk);
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

static void
linear_member(void *argument, int member, int members)
{
    const linear_job *job = argument;
    const tp_linear *op = job->op;
    float *a = member_workspace(job->be, member), *c = a + GEMM_A_FLOATS;
    walk w = walk_of(op->rows, job->columns, job->depth, GEMM_GROUP, GEMM_DEPTH, member, members);
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

/* ---- dW (+)= x^T dy ---------------------------------------------------------------------------------------------- */

typedef struct {
    const tp_backend *be;
    int64_t rows, n_in, n_out;
    const float *x, *dy;
    int64_t x_stride, dy_stride;
    float *grad;
    int accumulate;
} weight_job;

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
    walk w = walk_of(job->n_in, job->n_out, job->rows, GEMM_W_GROUP, GEMM_W_DEPTH, member, members);
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
