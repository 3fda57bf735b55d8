/* Matrix products on AMX (amx_tile.h).
 *
 * C is walked in strips of 32 rows and panels of 32 columns. A block of strips is split into bf16 once for a group of panels; each
 * panel of B is split while the panel before it is multiplied, into one of two buffers. In linear and linear_t each chunk of k is
 * a sum of its own, added to the chunks before it; linear_w goes on with the gradient that there is. AMX_DEPTH shows in the
 * results, as does where groups of k begin: at multiples of AMX_GROUP from the first k, in linear_w from the first row. */
#ifndef TP_CPU_GEMM_AMX_H
#define TP_CPU_GEMM_AMX_H

#include "csrc/cpu/amx_tile.h"

/* Sizes in strips of rows and groups of k. */
#define AMX_DEPTH   12 /* most groups of one chunk: roundings of as many tiles as a chain of GEMM_DEPTH has terms */
#define AMX_BLOCK   8  /* most strips of one block of A */
#define AMX_PANELS  24 /* panels that share one block of A where sums wait for the next chunk */
#define AMX_A_BYTES ((size_t)AMX_BLOCK * AMX_DEPTH * AMX_BYTES) /* with the sums and the panels, in a level-2 cache of 2 MiB */
#define AMX_B_BYTES ((size_t)AMX_DEPTH * AMX_BYTES)
#define AMX_TILE_FLOATS  (AMX_STRIP * TP_PANEL)
#define AMX_SUMS_FLOATS  ((size_t)AMX_BLOCK * AMX_PANELS * AMX_TILE_FLOATS)
#define GEMM_MEMBER_BYTES (AMX_A_BYTES + 2 * AMX_B_BYTES + (AMX_SUMS_FLOATS + AMX_TILE_FLOATS) * sizeof(float))

#include "csrc/cpu/gemm_walk.h"

typedef struct {
    char *a, *b[2];
    float *sums, *tile;
    amx_panel panel[2];
    int now; /* of the two panels */
} amx_room;

static amx_room
amx_room_of(const tp_backend *be, int member)
{
    amx_room room = {.a = member_workspace(be, member)};
    room.b[0] = room.a + AMX_A_BYTES;
    room.b[1] = room.b[0] + AMX_B_BYTES;
    room.sums = (float *)(void *)(room.b[1] + AMX_B_BYTES);
    room.tile = room.sums + AMX_SUMS_FLOATS;
    return room;
}

/* The panel that comes next: packed in the background of the current one. */
static amx_panel *
amx_room_ahead(amx_room *room, const float *from, int64_t step, int64_t depth, int64_t width)
{
    amx_panel *ahead = &room->panel[!room->now];
    *ahead = (amx_panel){.from = from, .step = step, .depth = depth, .width = width, .to = room->b[!room->now],
                         .pairs = amx_groups(depth) * AMX_PAIRS};
    return ahead;
}

/* The panel that came next becomes the current one. */
static const char *
amx_room_turn(amx_room *room)
{
    room->now = !room->now;
    amx_panel_finish(&room->panel[room->now]);
    return room->b[room->now];
}

/* Packing it is spread evenly over the strips of the current one. */
static int64_t
amx_rate(const amx_panel *ahead, int64_t strips, int64_t groups)
{
    return groups == 0 ? 0 : divide_up(ahead->pairs * AMX_RATE, 3 * strips * groups);
}

/* ---- y = x W ----------------------------------------------------------------------------------------------------- */

/* A chunk of k in elements. */
static range
amx_elements(range groups, int64_t depth)
{
    return (range){groups.first * AMX_GROUP, least(groups.last * AMX_GROUP, depth)};
}

static amx_panel *
linear_ahead(const linear_job *job, amx_room *room, const block *b, int64_t panel)
{
    range k = amx_elements(b->k, job->depth);
    return amx_room_ahead(room, job->op->weight + (panel * job->depth + k.first) * TP_PANEL, TP_PANEL, k.last - k.first, TP_PANEL);
}

static void
add_tile(const float *from, float *to)
{
    for (int64_t i = 0; i < AMX_TILE_FLOATS; i += VEC_LANES)
        vec_store(to + i, vec_add(vec_load(to + i), vec_load(from + i)));
}

/* The strips x panels of y that b names, one chunk of k; the panel of B after the last is the first of `next`. */
static void
linear_block(const linear_job *job, amx_room *room, const block *b, const block *next)
{
    int64_t strips = b->rows.last - b->rows.first, depth = amx_groups(job->depth);
    int first = b->k.first == 0, last = b->k.last == depth;
    for (int64_t p = b->panels.first; p < b->panels.last; p++) {
        amx_product t = {.groups = b->k.last - b->k.first, .a = room->a, .b = amx_room_turn(room)};
        t.ahead = p + 1 < b->panels.last ? linear_ahead(job, room, b, p + 1) : linear_ahead(job, room, next, next->panels.first);
        t.ahead_rate = amx_rate(t.ahead, strips, t.groups);
        for (int64_t strip = 0; strip < strips; strip++, t.a += t.groups * AMX_BYTES) {
            int64_t row = (b->rows.first + strip) * AMX_STRIP, rows = least(job->op->rows - row, AMX_STRIP);
            float *sum = first && last ? room->tile
                                       : room->sums + ((p - b->panels.first) * strips + strip) * AMX_TILE_FLOATS;
            t.c = first ? sum : room->tile;
            amx_multiply(rows, &t);
            if (!first)
                add_tile(t.c, sum);
            if (last)
                finish_tile(job, row, rows, p, sum);
        }
    }
}

static void
linear_member(void *argument, int member, int members)
{
    const linear_job *job = argument;
    const tp_linear *op = job->op;
    amx_room room = amx_room_of(job->be, member);
    const extents e = {divide_up(op->rows, AMX_STRIP), job->columns, amx_groups(job->depth), 1, AMX_BLOCK, AMX_PANELS, AMX_DEPTH};
    walk w = walk_of(&e, member, members);
    if (walk_is_empty(&w))
        return;
    int64_t steps = w.blocks * w.groups * w.chunks;
    block b = linear_step(&w, 0);
    linear_ahead(job, &room, &b, b.panels.first);
    amx_open();
    for (int64_t i = 0; i < steps; i++) {
        block next = linear_step(&w, i + 1 < steps ? i + 1 : i);
        if (w.chunks > 1 || i % w.groups == 0) {
            range k = amx_elements(b.k, job->depth);
            int64_t row = b.rows.first * AMX_STRIP;
            amx_pack_rows(least(b.rows.last * AMX_STRIP, op->rows) - row, k.last - k.first,
                          op->x + row * op->x_stride + k.first, op->x_stride, room.a);
        }
        linear_block(job, &room, &b, &next);
        b = next;
    }
    amx_close();
}

/* ---- dW (+)= x^T dy ---------------------------------------------------------------------------------------------- */

static void
copy_rows(int64_t rows, const float *from, float *to)
{
    memcpy(to, from, (size_t)(rows * TP_PANEL) * sizeof *to);
}

static amx_panel *
weight_ahead(const weight_job *job, amx_room *room, range k, int64_t panel)
{
    int64_t column = panel * TP_PANEL;
    return amx_room_ahead(room, job->dy + k.first * job->dy_stride + column, job->dy_stride, k.last - k.first,
                          least(job->n_out - column, TP_PANEL));
}

/* What a block of the gradient begins with, or goes on with; the last strip of a panel may be shorter than a product. */
static void
weight_strip(const weight_job *job, amx_product *t, float *tile, int64_t panel, int64_t in)
{
    float *grad = job->grad + (panel * job->n_in + in) * TP_PANEL;
    int64_t rows = least(job->n_in - in, AMX_STRIP);
    int whole = rows == AMX_STRIP;
    t->c = whole ? grad : tile;
    t->soon = in + 2 * AMX_STRIP <= job->n_in ? (const char *)(grad + AMX_TILE_FLOATS) : NULL;
    if (!whole && t->go_on)
        copy_rows(rows, grad, tile);
    amx_multiply(rows, t);
    if (!whole)
        copy_rows(rows, tile, grad);
}

/* Strips `in` of the gradient and `panels` of it, one chunk of k; the panel after the last belongs to the chunk `next`. */
static void
weight_block(const weight_job *job, amx_room *room, range in, range panels, range k, range next)
{
    int64_t first = in.first * AMX_STRIP, strips = in.last - in.first;
    amx_pack_columns(least(in.last * AMX_STRIP, job->n_in) - first, k.last - k.first,
                     job->x + k.first * job->x_stride + first, job->x_stride, room->a);
    for (int64_t p = panels.first; p < panels.last; p++) {
        amx_product t = {.groups = amx_groups(k.last - k.first), .a = room->a, .b = amx_room_turn(room),
                         .go_on = job->accumulate || k.first > 0};
        t.ahead = p + 1 < panels.last ? weight_ahead(job, room, k, p + 1) : weight_ahead(job, room, next, panels.first);
        t.ahead_rate = amx_rate(t.ahead, strips, t.groups);
        for (int64_t strip = in.first; strip < in.last; strip++, t.a += t.groups * AMX_BYTES)
            weight_strip(job, &t, room->tile, p, strip * AMX_STRIP);
    }
}

static void
weight_member(void *argument, int member, int members)
{
    const weight_job *job = argument;
    amx_room room = amx_room_of(job->be, member);
    int64_t depth = amx_groups(job->rows), chunk = least(depth, AMX_DEPTH);
    int64_t strips = AMX_BLOCK * AMX_DEPTH / (chunk > 0 ? chunk : 1); /* fewer groups leave room for more */
    const extents e = {divide_up(job->n_in, AMX_STRIP), job->n_out, depth, 1, strips, INT64_MAX, AMX_DEPTH};
    walk w = walk_of(&e, member, members);
    if (walk_is_empty(&w))
        return;
    range k = amx_elements(piece(depth, w.chunks, 0), job->rows);
    weight_ahead(job, &room, k, w.panels.first);
    amx_open();
    for (int64_t c = 0; c < w.chunks; c++)
        for (int64_t i = 0; i < w.blocks; i++) {
            range next = amx_elements(piece(depth, w.chunks, i + 1 < w.blocks || c + 1 == w.chunks ? c : c + 1), job->rows);
            weight_block(job, &room, piece_of(w.rows, w.blocks, i), w.panels, k, next);
            k = next;
        }
    amx_close();
}

#endif
