/* BPipe (Kim et al. 2023, "BPipe: memory-balanced pipeline parallelism for training large language models"): 1F1B, where rank x
 * has min(m, P - x) micro-batches between forward and backward. Rank x < P / 2 (the evictor) sends those above
 * T = ceil((P + 2) / 2) to rank P - 1 - x (the host), which has x + 1 of its own, and loads them back.
 *
 * Which: the micro-batch that has just gone forward, as of all present its backward is farthest away (Belady's rule).
 * When: only as the next forward or the next load needs its room. So every load is announced one forward before its backward, in
 * the slot that the backward before that has left.
 * The host's side: by nominal start times of 1F1B (F 1, B 2 a slice) it gives a guest back before its first op that starts after
 * the load has been announced, and announces its guests as early as it has room for them.
 * No deadlock: by these times, all that an instruction waits for comes before it. */
#include "csrc/sched/internal.h"

#include <stdlib.h>
#include <string.h>

/* An instruction of a guest, before the rank's op `at` of 1F1B (counted from the rank's first). */
typedef struct {
    int64_t at;
    double time_s; /* nominal: when it is due */
    int op, micro;
} insert;

typedef struct {
    const tp_program *base;
    const tp_timeline *line; /* nominal */
    insert *list;            /* [ranks][4 * micros] */
    int64_t *count;          /* [ranks] */
    int most;                /* T */
} balance;

/* One evictor's walk through its forwards and backwards: event e is number e, the next forward or backward of a micro-batch. */
typedef struct {
    balance *b;
    int rank, warm, micros; /* warm: forwards before the first backward's own */
    int room;               /* slots that nothing is in */
    int64_t position;       /* of the event's first op in the rank's list */
    uint8_t *away;          /* [micros] evicted, and not announced to be loaded */
    int forward, backward;  /* micro-batches begun, done */
} walk;

static void
add(balance *b, int rank, int64_t at, double time_s, int op, int micro)
{
    b->list[(int64_t)rank * 4 * b->base->micros + b->count[rank]++] = (insert){at, time_s, op, micro};
}

/* Is the event behind `forward` forwards and `backward` backwards a forward? */
static int
is_forward(const walk *w, int forward, int backward)
{
    return forward < w->micros && forward <= backward + w->warm;
}

static double
time_at(const walk *w, int64_t position)
{
    const tp_timeline *line = w->b->line;
    return position == 0 ? 0.0 : line->end_s[line->begin[w->rank] + position - 1];
}

/* Would a slot that is taken now be missed by a forward before micro-batch q's backward? */
static int
has_room_until(const walk *w, int q)
{
    int room = w->room - 1, f = w->forward, b = w->backward;
    while (room >= 0 && (b < q || is_forward(w, f, b))) {
        int forward = is_forward(w, f, b);
        room += forward ? -1 : 1;
        f += forward;
        b += !forward;
    }
    return room >= 0;
}

/* Announce what is needed next of what is away, as early as there is room. */
static void
load(walk *w)
{
    for (int q = w->backward; q < w->forward; q++) {
        if (!w->away[q])
            continue;
        if (!has_room_until(w, q))
            return;
        w->away[q] = 0;
        w->room--;
        add(w->b, w->rank, w->position, time_at(w, w->position), TP_OP_RL, q);
    }
}

/* Behind the forward of q: does the next one, or the load that comes before it, find no room? */
static int
is_tight(const walk *w)
{
    int room = w->room, f = w->forward, b = w->backward;
    if (!is_forward(w, f, b)) {
        b++;
        room++;
    }
    if (!is_forward(w, f, b)) /* the last forward has been */
        return 0;
    return room < 1 + (!is_forward(w, f + 1, b) && b < w->micros && w->away[b]);
}

static tp_status
walk_events(walk *w)
{
    const tp_program *p = w->b->base;
    for (int e = 0; e < 2 * w->micros; e++) {
        load(w);
        int forward = is_forward(w, w->forward, w->backward), q = forward ? w->forward : w->backward;
        if (forward ? w->room < 1 : w->away[q])
            return tp_fail(TP_EINTERNAL, "rank %d has no room for micro-batch %d within %d", w->rank, q, w->b->most);
        w->position += p->slices[q];
        w->room += forward ? -1 : 1;
        w->forward += forward;
        w->backward += !forward;
        if (forward && q > w->backward && is_tight(w)) {
            add(w->b, w->rank, w->position, time_at(w, w->position), TP_OP_SE, q);
            w->away[q] = 1;
            w->room++;
        }
    }
    return TP_OK;
}

/* The most that are away at once: guests that the host must have room for. */
static int
most_away(const balance *b, int rank)
{
    const insert *list = &b->list[(int64_t)rank * 4 * b->base->micros];
    int away = 0, most = 0;
    for (int64_t k = 0; k < b->count[rank]; k++) {
        away += list[k].op == TP_OP_SE ? 1 : -1;
        most = away > most ? away : most;
    }
    return most;
}

/* SL where the host comes by once the load is announced; RE as soon as there is room, of as many as may be there at once. */
static void
serve(balance *b, int rank)
{
    const tp_program *p = b->base;
    int host = p->ranks - 1 - rank, room = most_away(b, rank);
    const insert *list = &b->list[(int64_t)rank * 4 * p->micros];
    int64_t at = 0, length = p->begin[host + 1] - p->begin[host], came = 0;
    for (int64_t next = 0, k = 0; k <= b->count[rank]; k++) { /* room RE first, then one behind each SL */
        if (k > 0 && list[k - 1].op == TP_OP_RL) {
            while (at < length && b->line->start_s[b->line->begin[host] + at] < list[k - 1].time_s)
                at++;
            add(b, host, at, list[k - 1].time_s, TP_OP_SL, list[k - 1].micro);
            room++;
        }
        for (; next < b->count[rank] && came < room; next++)
            if (list[next].op == TP_OP_SE) {
                add(b, host, at, 0.0, TP_OP_RE, list[next].micro);
                came++;
            }
    }
}

static tp_status
balance_pair(balance *b, int rank)
{
    int micros = b->base->micros, held = b->base->ranks - rank;
    if (b->most >= (held < micros ? held : micros))
        return TP_OK;
    walk w = {.b = b, .rank = rank, .warm = held - 1, .micros = micros, .room = b->most, .away = calloc((size_t)micros, 1)};
    if (w.away == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %d micro-batches", micros);
    tp_status status = walk_events(&w);
    free(w.away);
    if (status == TP_OK)
        serve(b, rank);
    return status;
}

static void
write_rank(const balance *b, int rank, tp_instr *to)
{
    const tp_program *p = b->base;
    const insert *next = &b->list[(int64_t)rank * 4 * p->micros], *end = next + b->count[rank];
    int64_t length = p->begin[rank + 1] - p->begin[rank];
    for (int64_t k = 0; k <= length; k++) {
        for (; next < end && next->at == k; next++) {
            int host = tp_sched_is_host(next->op), other = p->ranks - 1 - rank;
            *to++ = (tp_instr){.op = (uint16_t)next->op,
                               .stage = (uint16_t)(host ? other : rank),
                               .micro = (uint16_t)next->micro,
                               .peer = (int16_t)other};
        }
        if (k < length)
            *to++ = p->code[p->begin[rank] + k];
    }
}

static tp_status
write_all(const balance *b, tp_program **out)
{
    const tp_program *p = b->base;
    int64_t *counts = malloc((size_t)p->ranks * sizeof *counts);
    if (counts == NULL)
        return tp_fail(TP_EMEMORY, "no memory for %d ranks", p->ranks);
    for (int r = 0; r < p->ranks; r++)
        counts[r] = p->begin[r + 1] - p->begin[r] + b->count[r];
    tp_status status = tp_program_open(p->ranks, p->stages, p->micros, p->slices, p->rank_of, counts, out);
    free(counts);
    TP_TRY(status);
    for (int r = 0; r < p->ranks; r++)
        write_rank(b, r, (*out)->code + (*out)->begin[r]);
    return TP_OK;
}

tp_status
tp_program_build_bpipe(int ranks, int micros, const int32_t *slices, tp_program **out)
{
    static const double forward_s = 1.0, backward_s = 2.0;
    tp_durations nominal = {.seconds = {[TP_OP_F] = &forward_s, [TP_OP_B] = &backward_s}};
    tp_program *base = NULL;
    tp_timeline *line = NULL;
    TP_TRY(tp_program_build(TP_1F1B, ranks, 1, micros, slices, &base));
    tp_status status = tp_program_simulate(base, &nominal, NULL, 0, 0, 1, &line);
    balance b = {.base = base, .line = line, .most = tp_bpipe_most(ranks)};
    b.list = malloc((size_t)ranks * 4 * (size_t)micros * sizeof *b.list);
    b.count = calloc((size_t)ranks, sizeof *b.count);
    if (status == TP_OK && (b.list == NULL || b.count == NULL))
        status = tp_fail(TP_EMEMORY, "no memory for the guests of %d micro-batches on %d ranks", micros, ranks);
    for (int r = 0; status == TP_OK && r < ranks / 2; r++)
        status = balance_pair(&b, r);
    if (status == TP_OK)
        status = write_all(&b, out);
    free(b.list);
    free(b.count);
    tp_timeline_close(line);
    tp_program_close(base);
    return status;
}
