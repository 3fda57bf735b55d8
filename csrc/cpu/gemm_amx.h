/* Matrix products on AMX (amx_tile.h).
 *
 * C is walked in strips of 32 rows and panels of 32 columns. A block of strips is split into bf16 once for a group of panels; each
 * panel of B is split while the panel before it is multiplied, into one of two buffers. In linear and linear_t each chunk of k is
 * a sum of its own, added to the chunks before it, and what follows a sum is done while the next strip is multiplied: read at once,
 * it would wait for the tiles' stores, and the tiles for it. linear_w goes on with the gradient that there is. AMX_DEPTH shows in the
 * results, as does where groups of k begin: at multiples of AMX_GROUP from the first k, in linear_w from the first row. */
#ifndef TP_CPU_GEMM_AMX_H
#define TP_CPU_GEMM_AMX_H

#include "csrc/cpu/amx_tile.h"

#define AMX_FETCH 2048 /* floats of a weight's panel, which lies in one piece, that are fetched ahead */

/* Sizes in strips of rows and groups of k. */
#define AMX_DEPTH   12 /* most groups of one chunk: its sum is rounded 72 times, that of a chain of FMAs 192 */
#define AMX_BLOCK   8  /* most strips of one block of A */
#define AMX_PANELS  24 /* panels that share one block of A where sums wait for the next chunk */
#define AMX_ROOM    24 /* groups for which a block of A has room, to be packed once for several chunks */
#define AMX_A_BYTES ((size_t)AMX_BLOCK * AMX_ROOM * AMX_BYTES) /* in a level-2 cache of 2 MiB */
#define AMX_B_BYTES ((size_t)AMX_DEPTH * AMX_BYTES)
#define AMX_TILE_FLOATS  (AMX_STRIP * TP_PANEL)
#define AMX_SUMS_FLOATS  ((size_t)AMX_BLOCK * AMX_PANELS * AMX_TILE_FLOATS)
#define GEMM_MEMBER_BYTES (AMX_A_BYTES + 2 * AMX_B_BYTES + (AMX_SUMS_FLOATS + 2 * AMX_TILE_FLOATS) * sizeof(float))

#include "csrc/cpu/gemm_walk.h"

/* A strip's chunk that was multiplied: its rows are on their way to the sum, and where it is the last chunk, to y. */
typedef struct {
    const linear_job *job;
    int64_t row, panel;
    const float *tile; /* NULL: it is in the sum already */
    float *sum;
    int last;
} amx_sum;

typedef struct {
    char *a, *b[2];
    float *sums, *tile[2];
    amx_panel panel[2];
    int now, turn; /* of the two panels, of the two tiles */
    amx_sum done;
    amx_company with;
} amx_room;

static amx_room
amx_room_of(const tp_backend *be, int member)
{
    amx_room room = {.a = member_workspace(be, member)};
    room.b[0] = room.a + AMX_A_BYTES;
    room.b[1] = room.b[0] + AMX_B_BYTES;
    room.sums = (float *)(void *)(room.b[1] + AMX_B_BYTES);
    room.tile[0] = room.sums + AMX_SUMS_FLOATS;
    room.tile[1] = room.tile[0] + AMX_TILE_FLOATS;
    return room;
}

/* The panel that comes next: packed in the background of the current one. */
static amx_panel *
amx_room_ahead(amx_room *room, const float *from, int64_t step, int64_t depth, int64_t width, int64_t fetch)
{
    amx_panel *ahead = &room->panel[!room->now];
    *ahead = (amx_panel){.from = from, .step = step, .depth = depth, .width = width, .fetch = fetch, .to = room->b[!room->now],
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

/* A walk over y. Where all k of the rows fit (`whole`), x is packed once for all panels, and each panel's chunks follow one another,
 * as they do in memory; else each chunk of x is packed for a group of panels, whose sums wait for the next chunk. */
typedef struct {
    walk w;
    int whole;
    int64_t step;         /* of linear_step; its k are all there are where `whole` */
    int64_t panel, chunk; /* panel: from the block's first */
    block b;
} amx_walk;

static void
amx_walk_to(amx_walk *at, int64_t step)
{
    at->step = step;
    at->b = linear_step(&at->w, step);
    at->panel = at->chunk = 0;
}

static amx_walk
amx_walk_begin(const linear_job *job, int member, int members)
{
    extents e = {divide_up(job->op->rows, AMX_STRIP), job->columns, amx_groups(job->depth), 1, AMX_BLOCK, AMX_PANELS, AMX_DEPTH};
    amx_walk at = {.w = walk_of(&e, member, members)};
    int64_t strips = at.w.rows.last - at.w.rows.first, room = AMX_BLOCK * AMX_ROOM / (e.depth > 0 ? e.depth : 1);
    at.whole = room >= least(strips, AMX_BLOCK);
    if (at.whole) {
        at.w.blocks = pieces_of(strips, least(room, AMX_BLOCK * AMX_PANELS / 2));
        at.w.groups = at.w.chunks = 1;
    }
    if (!walk_is_empty(&at.w))
        amx_walk_to(&at, 0);
    return at;
}

/* The k of this chunk. */
static range
amx_walk_k(const amx_walk *at)
{
    return at->whole ? piece(at->w.depth, pieces_of(at->w.depth, AMX_DEPTH), at->chunk) : at->b.k;
}

/* 0: that was the last. */
static int
amx_walk_on(amx_walk *at)
{
    if (at->whole && ++at->chunk < pieces_of(at->w.depth, AMX_DEPTH))
        return 1;
    at->chunk = 0;
    if (++at->panel < at->b.panels.last - at->b.panels.first)
        return 1;
    if (at->step + 1 == at->w.blocks * at->w.groups * at->w.chunks)
        return 0;
    amx_walk_to(at, at->step + 1);
    return 1;
}

static amx_panel *
linear_ahead(const linear_job *job, amx_room *room, const amx_walk *at)
{
    range k = amx_elements(amx_walk_k(at), job->depth);
    int64_t panel = at->b.panels.first + at->panel;
    return amx_room_ahead(room, job->op->weight + (panel * job->depth + k.first) * TP_PANEL, TP_PANEL, k.last - k.first, TP_PANEL,
                          AMX_FETCH);
}

static void
linear_pack(const linear_job *job, const amx_room *room, const amx_walk *at)
{
    const tp_linear *op = job->op;
    range k = amx_elements(at->b.k, job->depth);
    int64_t row = at->b.rows.first * AMX_STRIP;
    amx_pack_rows(least(at->b.rows.last * AMX_STRIP, op->rows) - row, k.last - k.first, op->x + row * op->x_stride + k.first,
                  op->x_stride, room->a);
}

/* One row of room->done. */
static void
linear_row(void *argument)
{
    amx_room *room = argument;
    const amx_sum done = room->done;
    if (done.tile != NULL) {
        const vf16 low = vec_add(vec_load(done.sum), vec_load(done.tile));
        vec_store(done.sum + VEC_LANES, vec_add(vec_load(done.sum + VEC_LANES), vec_load(done.tile + VEC_LANES)));
        vec_store(done.sum, low);
        room->done.tile = done.tile + TP_PANEL;
    }
    room->done.row = done.row + 1;
    room->done.sum = done.sum + TP_PANEL;
    if (done.last)
        finish_row(done.job, done.row, done.panel, done.sum);
}

/* A strip of one panel, one chunk of k. What follows is done while the next one is multiplied. */
static void
linear_strip(amx_room *room, amx_product *t, amx_sum done, int first)
{
    const int64_t rows = least(done.job->op->rows - done.row, AMX_STRIP);
    room->turn = !room->turn;
    done.tile = first ? NULL : room->tile[room->turn];
    t->c = first ? done.sum : room->tile[room->turn];
    amx_multiply(rows, t);
    amx_company_finish(&room->with);
    room->done = done;
    if (!first || done.last)
        room->with = amx_company_of(linear_row, room, rows, t->groups);
}

/* One panel of y, one chunk of k; the piece of B that `next` needs, NULL after the last, is packed meanwhile. */
static void
linear_panel(const linear_job *job, amx_room *room, const amx_walk *at, const amx_walk *next)
{
    const range k = amx_walk_k(at);
    const int64_t strips = at->b.rows.last - at->b.rows.first, packed = at->b.k.last - at->b.k.first;
    const int first = k.first == 0, last = k.last == at->w.depth;
    /* Two panels' sums where `whole`: the last strip of the panel before is not done with yet. */
    float *sum = room->sums + (at->whole ? at->panel % 2 : at->panel) * strips * AMX_TILE_FLOATS;
    amx_product t = {.groups = k.last - k.first, .b = amx_room_turn(room), .with = &room->with};
    t.ahead = next == NULL ? amx_room_ahead(room, NULL, 0, 0, 0, 0) : linear_ahead(job, room, next);
    t.a = room->a + (k.first - at->b.k.first) * AMX_BYTES;
    t.ahead_rate = amx_rate(t.ahead, strips, t.groups);
    for (int64_t strip = 0; strip < strips; strip++, t.a += packed * AMX_BYTES, sum += AMX_TILE_FLOATS) {
        amx_sum done = {.job = job, .row = (at->b.rows.first + strip) * AMX_STRIP, .panel = at->b.panels.first + at->panel,
                        .sum = sum, .last = last};
        linear_strip(room, &t, done, first);
    }
}

static void
linear_member(void *argument, int member, int members)
{
    const linear_job *job = argument;
    amx_room room = amx_room_of(job->be, member);
    amx_walk at = amx_walk_begin(job, member, members), next = at;
    if (walk_is_empty(&at.w))
        return;
    linear_ahead(job, &room, &at);
    amx_open();
    for (int more = 1; more; at = next) {
        if (at.panel == 0 && at.chunk == 0)
            linear_pack(job, &room, &at);
        more = amx_walk_on(&next);
        linear_panel(job, &room, &at, more ? &next : NULL);
    }
    amx_company_finish(&room.with);
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
                          least(job->n_out - column, TP_PANEL), TP_PANEL); /* the panel after it */
}

/* What a block of the gradient begins with, or goes on with; the last strip of a panel may be shorter than a product. */
static void
weight_strip(const weight_job *job, amx_product *t, float *tile, int64_t panel, int64_t in)
{
    float *grad = job->grad + (panel * job->n_in + in) * TP_PANEL;
    int64_t rows = least(job->n_in - in, AMX_STRIP);
    int whole = rows == AMX_STRIP;
    t->c = whole ? grad : tile;
    t->soon = grad + AMX_TILE_FLOATS;
    t->soon_rows = least(job->n_in - in - rows, AMX_STRIP);
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
                         .go_on = job->accumulate || k.first > 0, .with = &room->with};
        t.ahead = p + 1 < panels.last ? weight_ahead(job, room, k, p + 1) : weight_ahead(job, room, next, panels.first);
        t.ahead_rate = amx_rate(t.ahead, strips, t.groups);
        for (int64_t strip = in.first; strip < in.last; strip++, t.a += t.groups * AMX_BYTES)
            weight_strip(job, &t, room->tile[0], p, strip * AMX_STRIP);
    }
}

static void
weight_member(void *argument, int member, int members)
{
    const weight_job *job = argument;
    amx_room room = amx_room_of(job->be, member);
    int64_t depth = amx_groups(job->rows), chunk = least(depth, AMX_DEPTH);
    int64_t strips = AMX_BLOCK * AMX_ROOM / (chunk > 0 ? chunk : 1); /* fewer groups leave room for more */
    const extents e = {divide_up(job->n_in, AMX_STRIP), job->n_out, depth, 1, strips, INT64_MAX, AMX_DEPTH};
    walk w = walk_of(&e, member, members);
    if (walk_is_empty(&w))
        return;
    range k = amx_elements(piece(depth, w.chunks, 0), job->rows);
    weight_ahead(job, &room, k, w.panels.first);
    amx_open();
    for (int64_t c = 0; c < w.chunks; c++)
        for (int64_t i = 0; i < w.blocks; i++) {
            int64_t after = i + 1 < w.blocks ? c : c + 1;
            range next = after < w.chunks ? amx_elements(piece(depth, w.chunks, after), job->rows) : (range){0, 0};
            weight_block(job, &room, piece_of(w.rows, w.blocks, i), w.panels, k, next);
            k = next;
        }
    amx_close();
}

#endif
