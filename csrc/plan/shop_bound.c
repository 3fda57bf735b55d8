/* The lower bound of shop.h: the longest path is at least any weighted mean of paths. The bound is concave in the weights, so they
 * are raised along a supergradient: towards the near-critical paths of the slicing at which the bound is attained. */
#include "csrc/plan/shop_search.h"

#include <math.h>
#include <string.h>

#include "csrc/base/deadline.h"

tp_status
tp_shop_bound_open(tp_arena *arena, const tp_shop *shop, const tp_shop_options *options, tp_shop_bound *out)
{
    size_t width = (size_t)shop->chains * (size_t)shop->machines, row = (size_t)shop->units + 1, costs = (size_t)shop->costs;
    void *memory;
    *out = (tp_shop_bound){.shop = shop, .options = options, .width = (int)width};
    TP_TRY(tp_arena_take(arena, 4 * width * row, sizeof(double), &memory));
    out->share = memory;
    out->best_share = out->share + width * row;
    out->soft = out->best_share + width * row;
    TP_TRY(tp_arena_take(arena, (3 * costs + 1) * row, sizeof(double), &memory));
    out->in = memory;
    out->out = out->in + costs * row;
    out->row = out->out + costs * row;
    out->rest = out->row + costs * row;
    TP_TRY(tp_arena_take(arena, 2 * row, sizeof(int), &memory));
    out->next = memory;
    out->length = out->next + row;
    return TP_OK;
}

/* Sums of N_{q-1} and N_q over the machines of each cost. */
static void
gather(tp_shop_bound *b)
{
    const tp_shop *shop = b->shop;
    size_t row = (size_t)shop->units + 1;
    memset(b->in, 0, 2 * (size_t)shop->costs * row * sizeof(double));
    for (int q = 0; q < b->width; q++) {
        double *in = b->in + (size_t)shop->cost_of[q] * row, *out = b->out + (size_t)shop->cost_of[q] * row;
        const double *share = b->share + (size_t)q * row;
        if (q % shop->machines == 0)
            for (size_t e = 0; e < row; e++)
                in[e] += 1.0;
        else
            for (size_t e = 0; e < row; e++)
                in[e] += share[e - row];
        if ((q + 1) % shop->machines != 0)
            for (size_t e = 0; e < row; e++)
                out[e] += share[e];
    }
}

/* rest[j] for all j by the current mixture, and its slicing; neither where the thread is told to stop. */
static void
programme(tp_shop_bound *b)
{
    const tp_shop *shop = b->shop;
    int n = shop->units, capped = b->options->longest > 0 && b->options->longest < n ? b->options->longest : n;
    size_t row = (size_t)n + 1;
    b->programmes++;
    b->rest[n] = 0.0;
    for (int j = n - 1; j >= 0; j--) {
        double least = INFINITY, *mean = b->row;
        int last = capped < n - j ? capped : n - j;
        if (tp_deadline_told_after(&b->asked, (int64_t)last * (shop->costs + 1)))
            return;
        for (int i = 1; i <= last; i++)
            mean[i] = b->rest[j + i];
        for (int c = 0; c < shop->costs; c++) {
            const double *in = b->in + (size_t)c * row + j, out = b->out[(size_t)c * row + (size_t)j];
            const tp_slice_cost *cost = &shop->cost[c];
            if (cost->table == NULL && j > 0) {
                const double level = cost->a2 * j, slope = cost->a3 * j, *g = cost->g1;
                for (int i = 1; i <= last; i++)
                    mean[i] += (g[i] + level + slope * i) * (in[i] - out);
            } else
                for (int i = 1; i <= last; i++)
                    mean[i] += tp_slice_cost_at(cost, j, i) * (in[i] - out);
        }
        for (int i = 1; i <= last; i++)
            if (mean[i] < least && tp_slice_held(&b->options->memory, j, i)) {
                least = mean[i];
                b->next[j] = j + i;
            }
        b->rest[j] = least;
    }
    b->slices = 0;
    for (int j = 0; j < n; j = b->next[j])
        b->length[b->slices++] = b->next[j] - j;
}

static double
soft_max(double a, double b, double heat)
{
    if (a == -INFINITY || b == -INFINITY)
        return a > b ? a : b;
    return fmax(a, b) + heat * log1p(exp(-fabs(a - b) / heat));
}

/* Add `weight` times the paths of the line's slicing, each as likely as exp(its length / heat), to the mixture. A machine is
 * left at a token that is uniform in its slice. */
static void
mix(tp_shop_bound *b, const tp_shop_line *l, double heat, double weight)
{
    const tp_shop *shop = b->shop;
    int machines = shop->machines, m_last = l->slices - 1;
    size_t width = (size_t)b->width, row = (size_t)shop->units + 1;
    double *to = b->soft, *from = b->soft + row * width;
    for (int m = 0; m <= m_last && !tp_deadline_told_after(&b->asked, 32 * (int64_t)b->width); m++)
        for (int q = 0; q < b->width; q++) {
            double c = tp_slice_cost_at(&shop->cost[shop->cost_of[q]], l->start[m], l->length[m]);
            double own = m > 0 ? to[(size_t)(m - 1) * width + (size_t)q] : -INFINITY;
            double other = q % machines > 0 ? to[(size_t)m * width + (size_t)q - 1] : -INFINITY;
            double before = m == 0 && q % machines == 0 ? 0.0 : soft_max(own, other, heat);
            to[(size_t)m * width + (size_t)q] = before + c;
        }
    for (int m = m_last; m >= 0 && !tp_deadline_told_after(&b->asked, 32 * (int64_t)b->width); m--)
        for (int q = b->width - 1; q >= 0; q--) {
            double c = tp_slice_cost_at(&shop->cost[shop->cost_of[q]], l->start[m], l->length[m]);
            double own = m < m_last ? from[(size_t)(m + 1) * width + (size_t)q] : -INFINITY;
            double other = (q + 1) % machines > 0 ? from[(size_t)m * width + (size_t)q + 1] : -INFINITY;
            double behind = m == m_last && (q + 1) % machines == 0 ? 0.0 : soft_max(own, other, heat);
            from[(size_t)m * width + (size_t)q] = behind + c;
        }
    for (int q = 0; q < b->width; q++) {
        if ((q + 1) % machines == 0)
            continue;
        double total = to[(size_t)m_last * width + (size_t)(q / machines * machines + machines - 1)], done = 0.0;
        double *share = b->share + (size_t)q * row, sum = 0.0;
        for (int m = 0; m <= m_last; m++)
            sum += exp((to[(size_t)m * width + (size_t)q] + from[(size_t)m * width + (size_t)q + 1] - total) / heat);
        for (int m = 0; m <= m_last; m++) {
            double p =
                exp((to[(size_t)m * width + (size_t)q] + from[(size_t)m * width + (size_t)q + 1] - total) / heat) / sum;
            for (int e = 1; e <= l->length[m]; e++)
                share[l->start[m] + e] += weight * (done + p * e / l->length[m]);
            done += p;
        }
    }
}

/* Rounding must not make N fall, nor N_q exceed N_{q-1}: the mean would be of no paths. */
static void
tidy(tp_shop_bound *b)
{
    size_t row = (size_t)b->shop->units + 1;
    for (int q = 0; q < b->width; q++) {
        double *share = b->share + (size_t)q * row;
        if ((q + 1) % b->shop->machines == 0)
            continue;
        share[0] = 0.0;
        share[row - 1] = 1.0;
        for (size_t e = 1; e < row; e++) {
            double most = q % b->shop->machines > 0 ? share[e - row] : 1.0;
            share[e] = fmin(fmax(share[e], share[e - 1]), most);
        }
    }
}

/* The bound of the current mixture; keeps the best. */
static double
weigh(tp_shop_bound *b)
{
    tidy(b);
    gather(b);
    programme(b);
    double found = b->rest[0] * (1.0 - 1e-11);
    if (found > b->best) {
        b->best = found;
        memcpy(b->best_share, b->share, (size_t)b->width * ((size_t)b->shop->units + 1) * sizeof(double));
    }
    return found;
}

static void
scale(tp_shop_bound *b, double by)
{
    size_t values = (size_t)b->width * ((size_t)b->shop->units + 1);
    for (size_t k = 0; k < values; k++)
        b->share[k] *= by;
}

void
tp_shop_bound_run(tp_shop_bound *b, tp_shop_line *l, int programmes)
{
    static const double heats[] = {0.003, 0.03, 0.01, 0.001, 0.1}; /* of the latency */
    size_t values = (size_t)b->width * ((size_t)b->shop->units + 1);
    double heat = 0.0, top = -1.0;
    int best_count = l->slices, done = 0;
    memcpy(l->order, l->length, (size_t)l->slices * sizeof(int));
    for (size_t h = 0; h < sizeof heats / sizeof heats[0] && done < programmes && !tp_deadline_was_told(); h++, done++) {
        memset(b->share, 0, values * sizeof(double));
        mix(b, l, fmax(heats[h] * l->latency, 1e-300), 1.0);
        double found = weigh(b);
        if (found > top) {
            top = found;
            heat = fmax(heats[h] * l->latency, 1e-300);
        }
    }
    memcpy(b->share, b->best_share, values * sizeof(double));
    double least = l->latency;
    for (int step = 1; done < programmes && least > b->best * (1.0 + 1e-10) && !tp_deadline_was_told(); step++, done++) {
        double gamma = 1.0 / (step + 3.0);
        tp_shop_line_set(l, b->length, b->slices);
        if (l->latency < least) {
            least = l->latency;
            best_count = l->slices;
            memcpy(l->order, l->length, (size_t)l->slices * sizeof(int));
        }
        scale(b, 1.0 - gamma);
        mix(b, l, heat, gamma);
        weigh(b);
    }
    memcpy(b->share, b->best_share, values * sizeof(double));
    gather(b);
    programme(b);
    tp_shop_line_set(l, l->order, best_count);
}
