/* The flow shop's recurrence, and the descent on slice boundaries. */
#include "csrc/plan/shop_search.h"

#include <math.h>
#include <string.h>

#include "csrc/base/deadline.h"

double
tp_flow_shop(const double *time_s, int64_t jobs, int64_t machines, double *clock_s)
{
    int64_t steps = 0;
    memset(clock_s, 0, (size_t)machines * sizeof(double));
    for (int64_t m = 0; m < jobs && !tp_deadline_told_after(&steps, machines); m++) {
        double before = 0.0;
        for (int64_t q = 0; q < machines; q++)
            before = clock_s[q] = fmax(clock_s[q], before) + time_s[m * machines + q];
    }
    return clock_s[machines - 1];
}

static void
times_of(const tp_shop *shop, int start, int length, double *time)
{
    for (int c = 0; c < shop->costs; c++)
        time[c] = tp_slice_cost_at(&shop->cost[c], start, length);
}

void
tp_shop_advance(const tp_shop *shop, int start, int length, double *time, double *clock)
{
    times_of(shop, start, length, time);
    for (int chain = 0, q = 0; chain < shop->chains; chain++) {
        double before = 0.0;
        for (int k = 0; k < shop->machines; k++, q++) {
            double ready = clock[q] > before ? clock[q] : before;
            before = clock[q] = ready + time[shop->cost_of[q]];
        }
    }
}

double
tp_shop_latency(const tp_shop *shop, const double *clock)
{
    double sum = 0.0;
    for (int chain = 1; chain <= shop->chains; chain++)
        sum += clock[chain * shop->machines - 1];
    return sum;
}

tp_status
tp_shop_line_open(tp_arena *arena, const tp_shop *shop, const tp_shop_options *options, tp_shop_line *out)
{
    size_t width = (size_t)shop->chains * (size_t)shop->machines, rows = (size_t)shop->units + 1;
    void *memory;
    *out = (tp_shop_line){.shop = shop, .options = options, .width = (int)width, .latency = INFINITY};
    TP_TRY(tp_arena_take(arena, 3 * rows, sizeof(int), &memory));
    out->length = memory;
    out->start = out->length + rows;
    out->order = out->start + rows;
    TP_TRY(tp_arena_take(arena, 2 * rows * width + width + (size_t)shop->costs, sizeof(double), &memory));
    out->head = memory;
    out->tail = out->head + rows * width;
    out->clock = out->tail + rows * width;
    out->time = out->clock + width;
    return TP_OK;
}

/* Set the tails: seconds from the start of a slice on a machine to the end of all work; after the last slice only the last machine
 * counts. */
static void
set_tails(tp_shop_line *l)
{
    const tp_shop *shop = l->shop;
    double *end = l->tail + (size_t)l->slices * (size_t)l->width;
    for (int q = 0; q < l->width; q++)
        end[q] = (q + 1) % shop->machines == 0 ? 0.0 : -INFINITY;
    for (int m = l->slices - 1; m >= 0; m--) {
        double *tail = l->tail + (size_t)m * (size_t)l->width, *behind = tail + l->width;
        times_of(shop, l->start[m], l->length[m], l->time);
        for (int q = l->width - 1; q >= 0; q--) {
            double rest = behind[q];
            if ((q + 1) % shop->machines != 0 && tail[q + 1] > rest)
                rest = tail[q + 1];
            tail[q] = rest + l->time[shop->cost_of[q]];
        }
    }
}

void
tp_shop_line_set(tp_shop_line *l, const int *length, int slices)
{
    int start = 0;
    memmove(l->length, length, (size_t)slices * sizeof(int));
    memset(l->head, 0, (size_t)l->width * sizeof(double));
    l->slices = slices;
    l->asked += 2 * (int64_t)slices * l->width; /* the next move asks */
    for (int m = 0; m < slices; start += l->length[m++]) {
        double *head = l->head + (size_t)m * (size_t)l->width;
        l->start[m] = start;
        memcpy(head + l->width, head, (size_t)l->width * sizeof(double));
        tp_shop_advance(l->shop, start, l->length[m], l->time, head + l->width);
    }
    set_tails(l);
    l->latency = tp_shop_latency(l->shop, l->head + (size_t)slices * (size_t)l->width);
}

/* The latency with slices first .. behind - 1 replaced by these; +inf if one of them is not allowed. */
static double
latency_with(tp_shop_line *l, int first, int behind, const int *length, int slices)
{
    const double *tail = l->tail + (size_t)behind * (size_t)l->width;
    int start = l->start[first];
    if (tp_deadline_was_told() || tp_deadline_told_after(&l->asked, 2 * (int64_t)l->width * (slices + 1)))
        return INFINITY;
    memcpy(l->clock, l->head + (size_t)first * (size_t)l->width, (size_t)l->width * sizeof(double));
    l->moves++;
    for (int k = 0; k < slices; start += length[k++]) {
        if (length[k] < 1 || !tp_shop_allowed(l->shop, l->options, start, length[k]))
            return INFINITY;
        tp_shop_advance(l->shop, start, length[k], l->time, l->clock);
    }
    double sum = 0.0;
    for (int chain = 0, q = 0; chain < l->shop->chains; chain++) {
        double longest = -INFINITY;
        for (int k = 0; k < l->shop->machines; k++, q++)
            longest = fmax(longest, l->clock[q] + tail[q]);
        sum += longest;
    }
    return sum;
}

static int
try_with(tp_shop_line *l, int first, int behind, const int *length, int slices)
{
    if (!(latency_with(l, first, behind, length, slices) < l->latency * (1.0 - 1e-13)))
        return 0;
    memcpy(l->order, l->length, (size_t)first * sizeof(int));
    memcpy(l->order + first, length, (size_t)slices * sizeof(int));
    memcpy(l->order + first + slices, l->length + behind, (size_t)(l->slices - behind) * sizeof(int));
    tp_shop_line_set(l, l->order, l->slices - (behind - first) + slices);
    return 1;
}

enum { RUN = 6 }; /* boundaries that move together, at most */

/* Try to move boundaries at .. at + run - 1 (boundary k lies between slices k and k + 1) `step` tokens to the right. */
static int
shift(tp_shop_line *l, int at, int run, int step)
{
    int length[RUN + 1];
    for (int k = 0; k <= run; k++)
        length[k] = l->length[at + k];
    length[0] += step;
    length[run] -= step;
    return try_with(l, at, at + run + 1, length, run + 1);
}

static int
shift_all(tp_shop_line *l, int step)
{
    int found = 0;
    for (int run = 1; run <= RUN && run < l->slices; run++)
        for (int at = 0; at + run < l->slices; at++)
            while (shift(l, at, run, step) || shift(l, at, run, -step))
                found = 1;
    return found;
}

/* Try to join two neighbouring slices, or to cut one in two at a few places. */
static int
recount(tp_shop_line *l)
{
    int found = 0;
    for (int m = 0; m < l->slices; m++) {
        int n = l->length[m];
        if (m + 1 < l->slices) {
            int joined = n + l->length[m + 1];
            found |= try_with(l, m, m + 2, &joined, 1);
        }
        for (int part = 1; part <= 3 && m < l->slices && l->length[m] == n && n > 1; part++) {
            int halves[2] = {n * part / 4 > 0 ? n * part / 4 : 1, 0};
            halves[1] = n - halves[0];
            found |= try_with(l, m, m + 1, halves, 2);
        }
    }
    return found;
}

void
tp_shop_line_descend(tp_shop_line *l, int64_t work)
{
    int64_t stop = l->moves + work / (4 * l->width) + 1;
    int coarsest = 1, found = 1;
    while (coarsest < l->shop->units / 16)
        coarsest *= 2;
    while (found && l->moves < stop) {
        found = 0;
        for (int step = coarsest; step >= 1 && l->moves < stop; step /= 2)
            found |= shift_all(l, step);
        found |= recount(l);
    }
}
