/* Capuchin's choice for one stage (Peng et al., ASPLOS 2020, as DawnPiper uses it; PLANNERS.md 3.2 and 9.5).
 *
 * The stage's clock: forwards from 0, then the forwards and backwards of the other micro-batches in flight, then its
 * backwards. A tensor may leave when the next node has read it, and is needed again when its own node's backward starts.
 * Without a graph a tensor's source is the node before it: re-creating a tensor re-creates the run of recomputed ones that
 * ends there. Each is re-created once, since the backwards that need them follow each other. */
#include "csrc/plan/memopt.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "csrc/base/deadline.h"

typedef struct {
    double *evict, *back; /* of capuchin */
    const double *bytes;
    double width;
    double least_s; /* a shorter wait is the rounding of the clock */
    int i, j;
    double *swap; /* of all nodes; whole tensors or 0 */
} channel;

tp_status
tp_capuchin_open(tp_memopt *m, tp_capuchin *out)
{
    void *memory = NULL;
    size_t n = (size_t)m->n;
    TP_TRY(tp_arena_take(&m->arena, 3 * n, sizeof(double), &memory));
    out->evict = memory;
    out->back = out->evict + n;
    out->free_s = out->back + n;
    TP_TRY(tp_arena_take(&m->arena, n, sizeof(int), &memory));
    out->rank = memory;
    return TP_OK;
}

/* Seconds that the backwards wait for the bus. Out: in the order of last accesses. In: latest deadline last, each as late
 * as it can be. A wait moves all later deadlines by as much, so that the longest is all there is. */
static double
delay_of(const channel *c)
{
    double out_end = -INFINITY, in_start = INFINITY, delay = 0.0;
    for (int k = c->i; k < c->j; k++) { /* deadlines fall as k rises */
        if (c->swap[k] <= 0.0)
            continue;
        double service = c->swap[k] / c->width;
        out_end = (c->evict[k] > out_end ? c->evict[k] : out_end) + service;
        in_start = (c->back[k] < in_start ? c->back[k] : in_start) - service;
        delay = out_end - in_start > delay ? out_end - in_start : delay;
    }
    return delay > c->least_s ? delay : 0.0;
}

/* Returns when the last backward ends. */
static double
set_clock(const tp_memopt *m, tp_capuchin *c, int x, int i, int j)
{
    const tp_nodes *nodes = m->nodes;
    double forward = 0.0, backward = 0.0, at = 0.0, gap;
    for (int k = i; k < j; k++) {
        forward += nodes->forward_s[k];
        backward += nodes->backward_s[k];
    }
    int others = tp_dawnpiper_copies(m->options, x) - 1;
    /* 1F1B: as many forwards and backwards of others lie between. GPipe: that many forwards or backwards in all. */
    gap = others * (m->options->flight == TP_FLIGHT_GPIPE ? fmin(forward, backward) : forward + backward);
    for (int k = i; k < j; k++) {
        at += nodes->forward_s[k];
        c->evict[k] = at;
        if (k > i)
            c->evict[k - 1] = at;
    }
    at = forward + gap;
    for (int k = j - 1; k >= i; k--) {
        c->back[k] = at;
        at += nodes->backward_s[k];
    }
    return at;
}

/* Nodes by FreeTime, longest first; the earlier node among equals. Insertion into the few that matter would not pay. */
static void
sort_by_free(tp_capuchin *c, int i, int j)
{
    int count = j - i;
    for (int k = 0; k < count; k++)
        c->rank[k] = i + k;
    for (int gap = count / 2; gap > 0; gap = gap == 2 ? 1 : gap * 5 / 11) /* Shell's sort: nearly sorted already */
        for (int k = gap; k < count; k++) {
            int node = c->rank[k], at = k;
            for (; at >= gap; at -= gap) {
                int other = c->rank[at - gap];
                if (c->free_s[other] > c->free_s[node] || (c->free_s[other] == c->free_s[node] && other < node))
                    break;
                c->rank[at] = other;
            }
            c->rank[at] = node;
        }
}

/* Swap while the bus hides it all. Returns the bytes saved. */
static double
swap_hidden(const tp_memopt *m, tp_capuchin *c, channel *bus, double need, double slack, double time)
{
    double saved = 0.0;
    double unit = ldexp(bus->least_s, 10); /* equal free times are equal whatever the unit of time is */
    for (int k = bus->i; k < bus->j; k++) {
        c->free_s[k] = c->back[k] - c->evict[k] - 2.0 * m->nodes->activation_bytes[k] / bus->width;
        c->free_s[k] = unit > 0.0 ? rint(c->free_s[k] / unit) : c->free_s[k];
    }
    sort_by_free(c, bus->i, bus->j);
    int count = bus->j - bus->i;
    for (int at = 0; at < count && need - saved > slack && !tp_deadline_told_after(&c->asked, 4 * count); at++) {
        int node = c->rank[at];
        double bytes = m->nodes->activation_bytes[node];
        if (c->free_s[node] < 0.0)
            break;
        if (bytes <= 0.0)
            continue;
        bus->swap[node] = bytes;
        if (delay_of(bus) > 0.0 || saved + bytes > bus->width * (time + bus->least_s)) {
            bus->swap[node] = 0.0;
            break;
        }
        saved += bytes;
    }
    return saved;
}

/* The stage's time: work, waits, and never less than the bus needs in the steady state. */
static double
time_of(const channel *c, double work, double swapped)
{
    return c->width > 0.0 ? fmax(work + delay_of(c), swapped / c->width) : work;
}

/* The tensor of most bytes a second of re-creation, its own and that of the run of recomputed ones before it; -1 if none is
 * left. */
static int
best_recompute(const tp_memopt *m, const channel *bus, const uint8_t *recompute, double *cost)
{
    int best = -1;
    double most = -1.0, run = 0.0;
    for (int k = bus->i; k < bus->j; k++) {
        double seconds = run + m->nodes->recompute_s[k];
        run = recompute[k] ? seconds : 0.0;
        if (bus->bytes[k] <= 0.0 || recompute[k] || bus->swap[k] > 0.0)
            continue;
        double speed = seconds > 0.0 ? bus->bytes[k] / seconds : DBL_MAX;
        if (speed > most * (1.0 + 1e-12)) {
            most = speed;
            best = k;
            *cost = seconds;
        }
    }
    return best;
}

/* Then the cheaper of: the tensor of most FreeTime swapped (what it adds to the stage, the bus as it is by then), the
 * tensor of most bytes a second recomputed. Returns the stage's time. */
static double
choose_rest(const tp_memopt *m, tp_capuchin *c, channel *bus, uint8_t *recompute, double need, double slack,
            double saved)
{
    const double *bytes = bus->bytes;
    int count = bus->j - bus->i, at = 0;
    double work = tp_memopt_time(m, bus->i, bus->j), swapped = saved, time = time_of(bus, work, swapped);
    while (need - saved > slack && !tp_deadline_told_after(&c->asked, 4 * count)) {
        double cost = INFINITY, grown = INFINITY;
        int best = best_recompute(m, bus, recompute, &cost), other = -1;
        if (best < 0)
            break;
        if (bus->width > 0.0) {
            while (at < count && (bytes[c->rank[at]] <= 0.0 || recompute[c->rank[at]] || bus->swap[c->rank[at]] > 0.0))
                at++;
            other = c->rank[at];
            bus->swap[other] = bytes[other];
            grown = time_of(bus, work, swapped + bytes[other]);
            bus->swap[other] = 0.0;
        }
        if (other >= 0 && grown - time <= cost + bus->least_s) {
            bus->swap[other] = bytes[other];
            swapped += bytes[other];
            saved += bytes[other];
            time = grown;
        } else {
            recompute[best] = 1;
            work += m->nodes->recompute_s[best];
            saved += bytes[best];
            time = time_of(bus, work, swapped);
        }
    }
    return time;
}

double
tp_capuchin_choose(const tp_memopt *m, tp_capuchin *c, int x, int i, int j, uint8_t *recompute, double *swap_bytes)
{
    double slack, width = m->options->swap_Bps, time = tp_memopt_time(m, i, j), saved = 0.0;
    double need = tp_memopt_need(m, x, i, j, &slack);
    memset(recompute + i, 0, (size_t)(j - i));
    memset(swap_bytes + i, 0, (size_t)(j - i) * sizeof *swap_bytes);
    if (isinf(need))
        return INFINITY;
    if (need <= slack)
        return time;
    channel bus = {c->evict, c->back, m->nodes->activation_bytes, width, 0.0, i, j, swap_bytes};
    if (width > 0.0) {
        bus.least_s = 1e-12 * set_clock(m, c, x, i, j);
        saved = swap_hidden(m, c, &bus, need, slack, time);
    }
    return choose_rest(m, c, &bus, recompute, need, slack, saved);
}
