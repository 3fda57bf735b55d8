/* One program, many durations: the ops in the order in which the worklist came by them, so that one evaluation is one
 * pass end[i] = max(end[previous on the rank], end[maker] + lag) + seconds. */
#include "csrc/sched/sim.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

void
tp_sim_close(tp_sim *sim)
{
    if (sim == NULL)
        return;
    free(sim->last);
    free(sim->nodes);
    free(sim->ends);
    free(sim->ends_begin);
    free(sim->end);
    free(sim->there);
    free(sim->guest_free);
    tp_sched_links_close(&sim->links);
    tp_sched_copiers_close(&sim->copiers);
    free(sim->rank_of);
    free(sim->place);
    free(sim->clock);
    tp_sched_sums_close(&sim->sums);
    free(sim->gone);
    free(sim->whole);
    free(sim);
}

typedef struct {
    const tp_program *p;
    int32_t *made_f, *made_b; /* [stages * units] node that made it; -1: nobody yet */
    int32_t *made_half;       /* [stages * units] its first half; NULL: nothing is halved */
    uint8_t *halves;          /* tp_sched_halves */
    int32_t *guest;           /* [2][stages * micros] node of its SE, of its SL; -1: nobody yet */
    uint8_t *awaited;         /* [stages * micros] its first reader is to come; NULL: there are no guests */
    int lowered;              /* messages leave with their sends; else with what makes them */
    int64_t *next;
    int32_t *stack;
    uint8_t *queued;
    int stacked;
} order;

/* -2: not made yet; -1: it needs none. */
static int32_t
maker_of(const order *o, const tp_instr *i, int64_t cell, int64_t units)
{
    int32_t made = -1;
    if (i->op == TP_OP_F && !tp_program_is_first(o->p, i->stage))
        made = (i->flags & TP_HALF_FIRST ? o->made_half : o->made_f)[cell - units];
    else if (tp_sched_goes_back(i) && !tp_program_is_last(o->p, i->stage))
        made = o->made_b[cell + units];
    else
        return -1;
    return made < 0 ? -2 : made;
}

static void
order_wake(order *o, int rank)
{
    if (!o->queued[rank]) {
        o->queued[rank] = 1;
        o->stack[o->stacked++] = rank;
    }
}

/* Halves that have left when this node ends, or the gradient: whoever reads them goes on. */
static void
order_publish(order *o, const tp_sim *sim, const tp_instr *i, int forward, unsigned leaving)
{
    const tp_program *p = o->p;
    int64_t cell = i->stage * sim->units + tp_program_unit(p, i);
    if (forward && o->halves != NULL && leaving & TP_HALF_FIRST)
        o->made_half[cell] = (int32_t)sim->count;
    if (leaving & TP_HALF_SECOND)
        (forward ? o->made_f : o->made_b)[cell] = (int32_t)sim->count;
    if (!(forward ? tp_program_is_last(p, i->stage) : tp_program_is_first(p, i->stage)))
        order_wake(o, p->rank_of[i->stage + (forward ? 1 : -1)]);
}

/* Is this the message of what op i leaves? */
static int
sends_it(const tp_instr *message, const tp_instr *i, unsigned leaving)
{
    return message->op == (i->op == TP_OP_F ? TP_OP_SF : TP_OP_SB) && message->stage == i->stage && message->micro == i->micro &&
           message->slice == i->slice && (message->flags & TP_HALVES) == tp_sched_message_flags(leaving);
}

/* The send behind F, B or I at k, with nothing but receives, which take no time where they stand, between them: both are one node
 * then. -1: another instruction is between them, whose time the message has to wait for. */
static int64_t
send_behind(const tp_program *p, int rank, int64_t k, unsigned leaving)
{
    const tp_instr *i = &p->code[k];
    for (k++; k < p->begin[rank + 1]; k++) {
        if (sends_it(&p->code[k], i, leaving))
            return k;
        if (p->code[k].op != TP_OP_RF && p->code[k].op != TP_OP_RB)
            break;
    }
    return -1;
}

/* A node for a send that stands apart. */
static void
order_send(order *o, tp_sim *sim, int rank, const tp_instr *i)
{
    unsigned halves = i->flags & TP_HALVES;
    uint8_t flags = (uint8_t)(halves != 0 ? halves | OUT_APART : 0u);
    sim->nodes[sim->count] = (node){sim->last[rank], -1, (int32_t)tp_program_unit(o->p, i), i->stage, (uint8_t)i->op, flags};
    if (sim->place != NULL)
        sim->place[sim->count] = 0;
    sim->last[rank] = (int32_t)sim->count;
    order_publish(o, sim, i, i->op == TP_OP_SF, halves != 0 ? halves : TP_HALVES);
    sim->count++;
}

static unsigned
half_flags(const order *o, const tp_instr *i, int64_t cell, int64_t units, unsigned leaving)
{
    unsigned flags = i->flags & TP_HALVES;
    if (leaving != TP_HALVES)
        flags |= OUT_APART;
    if (i->stage > 0 && o->halves[cell - units] & TP_SCHED_APART)
        flags |= IN_APART;
    else if (i->flags & TP_HALF_SECOND)
        flags |= COPIED;
    return flags;
}

/* A node for what sends a guest, or reads one that came home; 0: it waits for another rank. */
static int
order_guest(order *o, tp_sim *sim, int rank, const tp_instr *i)
{
    int64_t cell = (int64_t)i->stage * o->p->micros + i->micro, cells = (int64_t)o->p->stages * o->p->micros;
    int reads = o->awaited[cell] && tp_sched_reads_load(i->op);
    o->awaited[cell] |= i->op == TP_OP_RL;
    if (!reads && i->op != TP_OP_SE && i->op != TP_OP_SL)
        return 1;
    int32_t maker = i->op == TP_OP_SE ? -1 : o->guest[reads ? cells + cell : cell];
    if (i->op != TP_OP_SE && maker < 0)
        return 0;
    int op = reads ? TP_OP_RL : i->op;
    sim->nodes[sim->count] = (node){sim->last[rank], maker, (int32_t)o->p->offset[i->micro], i->stage, (uint8_t)op, GUEST};
    sim->last[rank] = (int32_t)sim->count;
    if (reads)
        o->awaited[cell] = 0;
    else {
        o->guest[i->op == TP_OP_SE ? cell : cells + cell] = (int32_t)sim->count;
        order_wake(o, i->peer);
    }
    sim->count++;
    return 1;
}

/* Does what F, B or I leaves go to another rank? */
static int
leaves_rank(const tp_program *p, const tp_instr *i, unsigned leaving)
{
    return leaving != 0 && tp_program_remote(p, i->op == TP_OP_F ? i->stage + 1 : i->stage);
}

/* A node for an op that computes, or a swap; 0: it waits for another rank. *sent: the send that is in it, too. */
static int
order_work(order *o, tp_sim *sim, int rank, int64_t k, int64_t *sent)
{
    const tp_program *p = o->p;
    const tp_instr *i = &p->code[k];
    int forward = i->op == TP_OP_F, backward = tp_sched_is_backward(i->op), back = tp_sched_goes_back(i);
    int64_t unit = tp_program_unit(p, i), cell = i->stage * sim->units + unit;
    int32_t maker = maker_of(o, i, cell, sim->units);
    if (maker == -2)
        return 0;
    node *n = &sim->nodes[sim->count];
    *n = (node){sim->last[rank], maker, (int32_t)unit, i->stage, (uint8_t)i->op, 0};
    unsigned leaving = forward ? tp_sched_leaving(p, i) : TP_HALVES;
    int leaves = (forward || backward) && leaves_rank(p, i, leaving), apart = 0;
    if ((forward && tp_program_remote(p, i->stage)) || (back && tp_program_remote(p, i->stage + 1)))
        n->flags |= IN_REMOTE;
    if (back && !backward)
        n->flags |= COPIED;
    if (leaves && o->lowered) {
        *sent = send_behind(p, rank, k, leaving);
        apart = *sent < 0;
    }
    if (leaves && !apart)
        n->flags |= OUT_REMOTE;
    if (forward && i->flags & TP_HALVES)
        n->flags |= (uint8_t)half_flags(o, i, cell, sim->units, leaving);
    sim->last[rank] = (int32_t)sim->count;
    if (sim->place != NULL)
        sim->place[sim->count] = (uint8_t)tp_sched_place(i, sim->two_places);
    if ((forward || backward) && !apart)
        order_publish(o, sim, i, forward, leaving);
    sim->count++;
    return 1;
}

static void
order_rank(order *o, tp_sim *sim, int rank)
{
    const tp_program *p = o->p;
    for (int64_t sent = -1; o->next[rank] < p->begin[rank + 1]; o->next[rank]++) {
        const tp_instr *i = &p->code[o->next[rank]];
        if ((i->op == TP_OP_SF || i->op == TP_OP_SB) && o->next[rank] != sent)
            order_send(o, sim, rank, i);
        if (tp_sched_is_message(i->op) || tp_sched_is_end(i->op))
            continue;
        if (o->awaited != NULL && !order_guest(o, sim, rank, i))
            return;
        if (!tp_sched_is_guest(i->op) && !order_work(o, sim, rank, o->next[rank], &sent))
            return;
    }
}

static tp_status
find_order(order *o, unsigned ops, tp_sim *sim)
{
    const tp_program *p = o->p;
    size_t cells = (size_t)p->stages * (size_t)sim->units, ranks = (size_t)p->ranks;
    o->made_f = malloc(cells * sizeof *o->made_f);
    o->made_b = malloc(cells * sizeof *o->made_b);
    o->next = malloc(ranks * sizeof *o->next);
    o->stack = malloc(ranks * sizeof *o->stack);
    o->queued = calloc(ranks, 1);
    if (o->made_f == NULL || o->made_b == NULL || o->next == NULL || o->stack == NULL || o->queued == NULL)
        return tp_fail(TP_EMEMORY, "no memory to order %lld instructions", (long long)p->begin[p->ranks]);
    TP_TRY(tp_sched_halves(p, ops, &o->halves));
    if (ops & TP_SCHED_GUESTS) {
        size_t guests = (size_t)p->stages * (size_t)p->micros;
        o->guest = malloc(2 * guests * sizeof *o->guest);
        o->awaited = calloc(guests, 1);
        sim->guest_free = calloc(2 * (size_t)p->stages, sizeof *sim->guest_free);
        if (o->guest == NULL || o->awaited == NULL || sim->guest_free == NULL)
            return tp_fail(TP_EMEMORY, "no memory for the guests of %d stages", p->stages);
        memset(o->guest, -1, 2 * guests * sizeof *o->guest);
    }
    if (o->halves != NULL && (o->made_half = malloc(cells * sizeof *o->made_half)) == NULL)
        return tp_fail(TP_EMEMORY, "no memory to order %lld instructions", (long long)p->begin[p->ranks]);
    if (o->halves != NULL)
        memset(o->made_half, -1, cells * sizeof *o->made_half);
    memset(o->made_f, -1, cells * sizeof *o->made_f);
    memset(o->made_b, -1, cells * sizeof *o->made_b);
    for (int r = p->ranks - 1; r >= 0; r--) {
        o->next[r] = p->begin[r];
        order_wake(o, r);
    }
    while (o->stacked > 0) {
        int rank = o->stack[--o->stacked];
        o->queued[rank] = 0;
        int64_t from = o->next[rank];
        order_rank(o, sim, rank);
        TP_TRY(tp_deadline_check_after(&sim->asked, 8 * (o->next[rank] + 1 - from)));
    }
    for (int r = 0; r < p->ranks; r++)
        if (o->next[r] < p->begin[r + 1])
            return tp_sched_refuse(p, r, o->next[r] - p->begin[r], "deadlock: what it reads is never made");
    return TP_OK;
}

static tp_status
sim_make(const tp_program *p, tp_sim **out)
{
    size_t length = (size_t)p->begin[p->ranks] + 1, ranks = (size_t)p->ranks;
    tp_sim *sim = calloc(1, sizeof *sim);
    if (sim != NULL) {
        sim->nodes = malloc(length * sizeof *sim->nodes);
        sim->ends = malloc(((size_t)p->stages + 2 * (size_t)p->copies) * sizeof *sim->ends); /* OPT, and AR at two ends */
        sim->ends_begin = calloc(ranks + 1, sizeof *sim->ends_begin);
        sim->end = malloc(length * sizeof *sim->end);
        sim->there = malloc(length * sizeof *sim->there);
        sim->clock = malloc(ranks * sizeof *sim->clock);
        sim->last = malloc(ranks * sizeof *sim->last);
    }
    if (sim == NULL || sim->nodes == NULL || sim->ends == NULL || sim->ends_begin == NULL || sim->end == NULL ||
        sim->there == NULL || sim->clock == NULL || sim->last == NULL) {
        tp_sim_close(sim);
        return tp_fail(TP_EMEMORY, "no memory for %zu instructions", length - 1);
    }
    sim->ranks = p->ranks;
    sim->stages = p->stages;
    sim->units = tp_program_units(p);
    memset(sim->last, -1, ranks * sizeof *sim->last);
    int32_t ends = 0;
    for (int r = 0; r < p->ranks; r++) {
        for (int64_t k = p->begin[r]; k < p->begin[r + 1]; k++)
            if (tp_sched_is_end(p->code[k].op))
                sim->ends[ends++] = (node){-1, -1, 0, p->code[k].stage, (uint8_t)p->code[k].op, 0};
        sim->ends_begin[r + 1] = ends;
    }
    *out = sim;
    return TP_OK;
}

static tp_status
copiers_open(const tp_program *p, unsigned ops, tp_sim *sim)
{
    size_t bytes = (size_t)p->stages * sizeof *sim->rank_of;
    if (!(ops & TP_SCHED_HAS_BESIDE))
        return TP_OK;
    TP_TRY(tp_sched_copiers_open(p, &sim->copiers));
    sim->rank_of = malloc(bytes);
    sim->place = malloc((size_t)p->begin[p->ranks]);
    sim->two_places = (ops & TP_SCHED_HAS_TWO_PLACES) != 0;
    if (sim->rank_of == NULL || sim->place == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the ranks of %d stages", p->stages);
    memcpy(sim->rank_of, p->rank_of, bytes);
    return TP_OK;
}

tp_status
tp_sched_sim_open(const tp_program *program, unsigned ops, tp_sim **out)
{
    tp_sim *sim = NULL;
    TP_TRY(sim_make(program, &sim));
    order o = {.p = program, .lowered = (ops & TP_SCHED_MESSAGES) != 0};
    tp_status status = tp_sched_links_open(program, &sim->links);
    if (status == TP_OK)
        status = copiers_open(program, ops, sim);
    if (status == TP_OK)
        status = find_order(&o, ops, sim);
    if (status == TP_OK)
        status = tp_sim_find_sums(program, sim);
    sim->halved = o.halves != NULL;
    free(o.made_f);
    free(o.made_b);
    free(o.made_half);
    free(o.halves);
    free(o.guest);
    free(o.awaited);
    free(o.next);
    free(o.stack);
    free(o.queued);
    if (status != TP_OK) {
        tp_sim_close(sim);
        return status;
    }
    *out = sim;
    return TP_OK;
}

tp_status
tp_sim_open(const tp_program *program, tp_sim **out)
{
    unsigned ops = tp_sched_ops(program);
    TP_TRY(tp_sched_check_order(program, ops));
    return tp_sched_sim_open(program, ops, out);
}

/* What a message adds: copies on both ranks, and the link. Apart, so that the common case stays tight. */
static double
message_in(const tp_sim *sim, const tp_durations *d, const node *n, double ready, double clock)
{
    if (n->flags & GUEST) {
        ready = n->maker < 0 ? 0.0 : sim->there[n->maker];
        double came_s = n->op == TP_OP_SL ? tp_durations_s(d, TP_OP_RE, 0, n->stage, n->unit) : 0.0;
        return (ready > clock ? ready : clock) + came_s;
    }
    int forward = n->op == TP_OP_F, from = forward ? n->stage - 1 : n->stage + 1;
    unsigned flags = n->flags & IN_APART ? n->flags & TP_HALVES : 0;
    if (d->latency_s != NULL)
        ready = sim->there[n->maker];
    else
        ready += tp_durations_lag_s(d, sim->units, !forward, flags, from, n->unit);
    double copy_s = n->flags & COPIED ? 0.0 : tp_durations_s(d, forward ? TP_OP_RF : TP_OP_RB, flags, n->stage, n->unit);
    return (ready > clock ? ready : clock) + copy_s;
}

/* When its message has come: a guest's, or where links carry one at a time. */
static double
message_out(tp_sim *sim, const tp_durations *d, const node *n, double clock)
{
    int back = n->op != TP_OP_F && n->op != TP_OP_SF;
    if (n->flags & GUEST)
        return tp_sched_guest_send(&sim->guest_free[(n->op == TP_OP_SL) * sim->stages + n->stage], clock,
                                   tp_sched_guest_lag_s(d, sim->units, n->stage, n->unit));
    double lag = tp_durations_lag_s(d, sim->units, back, n->flags & OUT_APART ? n->flags & TP_HALVES : 0, n->stage, n->unit);
    return tp_sched_links_send(&sim->links, back, n->stage, clock, lag) + lag;
}

/* When a node may begin that could at `clock`, for copies beside the work; it begins its own. */
static double
copies_of(tp_sim *sim, const tp_durations *d, const node *n, double clock)
{
    int64_t cell = n->stage * sim->units + n->unit;
    int place = sim->place[n - sim->nodes];
    if (tp_sched_is_swap(n->op))
        tp_sched_copiers_begin(&sim->copiers, sim->rank_of[n->stage], n->op, n->stage, place, cell, clock,
                               tp_durations_s(d, n->op, 0, n->stage, n->unit));
    else if (n->op == TP_OP_F || tp_sched_is_backward(n->op) || (n->op == TP_OP_R && n->flags & COPIED))
        clock = tp_sched_copiers_wait(&sim->copiers, n->op, n->stage, place, cell, clock);
    return clock;
}

/* Neighbours in this order are of different stages, and so are their entries of a table by slices: those would come too late. */
static inline void
fetch_seconds(const tp_durations *d, const node *n)
{
    if (d->seconds[n->op] != NULL)
        __builtin_prefetch(&d->seconds[n->op][n->stage * d->stage_stride + n->unit * d->unit_stride]);
}

/* Ends of the nodes begin .. behind - 1. */
static void
run_nodes(tp_sim *sim, const tp_durations *durations, int64_t begin, int64_t behind)
{
    const tp_durations d = *durations;
    double *end = sim->end;
    int in_turn = d.latency_s != NULL, beside = sim->rank_of != NULL;
    int64_t half = d.seconds[TP_OP_B] == NULL; /* B = I + W */
    for (int64_t k = begin; k < behind; k++) {
        const node *n = &sim->nodes[k];
        if (d.unit_stride != 0 && k + AHEAD < behind)
            fetch_seconds(&d, n + AHEAD);
        double clock = n->previous < 0 ? 0.0 : end[n->previous], ready = n->maker < 0 ? 0.0 : end[n->maker];
        if (n->flags & (IN_REMOTE | GUEST))
            clock = message_in(sim, &d, n, ready, clock);
        else
            clock = ready > clock ? ready : clock;
        if (beside) {
            clock = copies_of(sim, &d, n, clock);
            if (tp_sched_is_swap(n->op)) {
                end[k] = clock;
                continue;
            }
        }
        int64_t at = n->stage * d.stage_stride + n->unit * d.unit_stride;
        if ((half && n->op == TP_OP_B) || n->flags & TP_HALVES)
            clock += tp_durations_s(&d, n->op, n->flags & TP_HALVES, n->stage, n->unit);
        else if (d.seconds[n->op] != NULL)
            clock += d.seconds[n->op][at];
        if (n->flags & OUT_REMOTE)
            clock += tp_durations_s(&d, n->op == TP_OP_F ? TP_OP_SF : TP_OP_SB,
                                    n->flags & OUT_APART ? n->flags & TP_HALVES : 0, n->stage, n->unit);
        if ((in_turn && (n->flags & OUT_REMOTE || tp_sched_is_message(n->op))) || (n->flags & GUEST && n->op != TP_OP_RL))
            sim->there[k] = message_out(sim, &d, n, clock);
        end[k] = clock;
    }
}

/* Do whole operations take what their stage takes, and its messages hold up only who waits for them? */
static int
is_plain(const tp_sim *sim, const tp_durations *d)
{
    static const int copies[] = {TP_OP_SF, TP_OP_RF, TP_OP_SB, TP_OP_RB};
    for (int i = 0; i < 4; i++)
        if (d->seconds[copies[i]] != NULL)
            return 0;
    return d->unit_stride == 0 && d->seconds[TP_OP_B] != NULL && d->comm_unit_s == NULL && d->back_comm_unit_s == NULL &&
           d->latency_s == NULL && !sim->halved && sim->guest_free == NULL && sim->rank_of == NULL;
}

/* run_nodes of what is_plain, to the bit: planners ask for so many of these that it is worth its lines. */
static void
run_plain_nodes(tp_sim *sim, const tp_durations *d, int64_t begin, int64_t behind)
{
    double *end = sim->end;
    for (int64_t k = begin; k < behind; k++) {
        const node n = sim->nodes[k];
        double clock = n.previous < 0 ? 0.0 : end[n.previous], ready = n.maker < 0 ? 0.0 : end[n.maker];
        if (n.flags & IN_REMOTE && d->comm_s != NULL)
            ready += d->comm_s[n.op == TP_OP_F ? n.stage - 1 : n.stage + 1];
        clock = ready > clock ? ready : clock;
        if (d->seconds[n.op] != NULL)
            clock += d->seconds[n.op][n.stage * d->stage_stride];
        end[k] = clock;
    }
}

void
tp_sim_run(tp_sim *sim, const tp_durations *durations, double *makespan_s)
{
    const tp_durations d = *durations;
    double *end = sim->end;
    tp_sched_links_reset(&sim->links, durations);
    tp_sched_copiers_reset(&sim->copiers);
    if (sim->guest_free != NULL)
        memset(sim->guest_free, 0, 2 * (size_t)sim->stages * sizeof *sim->guest_free);
    int plain = is_plain(sim, &d);
    for (int64_t k = 0, behind; k < sim->count; k = behind) {
        behind = sim->count - k > TP_SCHED_PART ? k + TP_SCHED_PART : sim->count;
        (plain ? run_plain_nodes : run_nodes)(sim, &d, k, behind);
        if (tp_deadline_told_after(&sim->asked, 4 * (behind - k)))
            break;
    }
    double meet = 0.0;
    for (int r = 0; r < sim->ranks; r++) {
        sim->clock[r] = sim->last[r] < 0 ? 0.0 : end[sim->last[r]];
        if (sim->ends_begin[r] < sim->ends_begin[r + 1] && sim->ends[sim->ends_begin[r]].op == TP_OP_AR)
            meet = sim->clock[r] > meet ? sim->clock[r] : meet;
    }
    *makespan_s = tp_sim_run_ends(sim, &d, meet);
}

void
tp_sim_path(const tp_sim *sim, const tp_durations *durations, int64_t *count, double *lag_s)
{
    int32_t at = -1;
    memset(count, 0, (size_t)TP_OPS * (size_t)sim->stages * sizeof *count);
    for (int r = 0; r < sim->ranks; r++)
        if (sim->last[r] >= 0 && (at < 0 || sim->end[sim->last[r]] > sim->end[at]))
            at = sim->last[r];
    *lag_s = 0.0;
    while (at >= 0) {
        const node *n = &sim->nodes[at];
        count[n->op * sim->stages + n->stage]++;
        at = n->previous;
        if (n->maker < 0)
            continue;
        int from = n->stage + (n->op == TP_OP_F ? -1 : 1);
        unsigned flags = n->flags & IN_APART ? n->flags & TP_HALVES : 0;
        int back = n->op != TP_OP_F;
        double link = n->flags & IN_REMOTE ? tp_durations_lag_s(durations, sim->units, back, flags, from, n->unit) : 0.0;
        if (n->flags & GUEST)
            link = sim->there[n->maker] - sim->end[n->maker];
        if (at < 0 || sim->end[n->maker] + link > sim->end[at]) {
            at = n->maker;
            *lag_s += link;
        }
    }
}
