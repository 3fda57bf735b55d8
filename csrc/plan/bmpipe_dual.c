/* A proven lower bound for several chunks from weights, wherever they come from. Every critical path is an inequality,
 * makespan >= sum of runs * seconds + lag, and so is every convex combination of them, with weights lambda. Memory (for stage
 * x and each vector n in flight, static bytes + sum n_c kept bytes <= M) is priced with mu >= 0, and limits on numbers of
 * layers with a bonus or a fine a layer. What is left is a sum over layers: each layer takes the cheapest strategy of the
 * virtual stage it is on, and the cheapest consecutive partition is a dynamic programme over (layer, virtual stage). Its
 * value is a lower bound whatever the weights (weak Lagrangian duality). */
#include "csrc/plan/bmpipe_dual.h"

#include <math.h>
#include <string.h>

static double
price_memory(tp_bmpipe_dual *d)
{
    const tp_bmpipe *p = d->p;
    double memory = p->options->memory_bytes, constant = 0.0;
    memset(d->byte_price, 0, (size_t)d->virtuals * sizeof *d->byte_price);
    memset(d->static_price, 0, (size_t)d->virtuals * sizeof *d->static_price);
    for (int x = 0; x < p->stages && isfinite(memory); x++)
        for (int k = p->vector_begin[x]; k < p->vector_begin[x + 1]; k++) {
            if (d->mu[k] <= 0.0)
                continue;
            double price = d->mu[k] * d->unit / memory;
            constant -= d->mu[k] * d->unit * (1.0 + TP_BMPIPE_SLACK);
            for (int c = 0; c < p->chunks; c++) {
                d->static_price[c * p->stages + x] += price;
                d->byte_price[c * p->stages + x] += price * p->vector[k * p->chunks + c];
            }
        }
    return constant;
}

static double
price_paths(tp_bmpipe_dual *d)
{
    double constant = 0.0;
    memset(d->weight, 0, 2 * (size_t)d->virtuals * sizeof *d->weight);
    for (int q = 0; q < d->row_count; q++) {
        if (d->lambda[q] <= 0.0)
            continue;
        constant += d->lambda[q] * d->rows[q].lag_s;
        for (int v = 0; v < 2 * d->virtuals; v++)
            d->weight[v] += d->lambda[q] * d->rows[q].run[v];
    }
    return constant;
}

static void
price_layers(tp_bmpipe_dual *d)
{
    const tp_bmpipe_layers *l = d->p->layers;
    for (int i = 0; i < d->types * d->virtuals; i++)
        d->cost[i] = INFINITY;
    for (int j = 0; j < d->columns - 1; j++) {
        const tp_bmpipe_column *at = &d->column[j];
        double *least = &d->cost[at->type * d->virtuals + at->v];
        int choice = at->type * l->strategies + at->strategy;
        double cost = d->weight[at->v] * l->forward_s[at->type] +
                      d->weight[d->virtuals + at->v] * (l->backward_s[at->type] + l->extra_s[choice]) +
                      d->byte_price[at->v] * l->activation_bytes[choice] +
                      d->static_price[at->v] * l->static_bytes[at->type] - d->bonus[j];
        *least = cost < *least ? cost : *least;
    }
}

/* The cheapest consecutive partition without an empty virtual stage. */
static double
cheapest(tp_bmpipe_dual *d)
{
    const tp_bmpipe *p = d->p;
    int virtuals = d->virtuals;
    double *reach = d->reach + 1; /* [-1]: never */
    for (int v = -1; v < virtuals; v++)
        reach[v] = INFINITY;
    reach[0] = d->cost[p->type_of[0] * virtuals];
    for (int i = 1; i < p->n; i++) {
        const double *cost = d->cost + p->type_of[i] * virtuals;
        for (int v = virtuals - 1; v >= 0; v--)
            reach[v] = (reach[v - 1] < reach[v] ? reach[v - 1] : reach[v]) + cost[v];
    }
    return reach[virtuals - 1];
}

double
tp_bmpipe_dual_value(tp_bmpipe_dual *d, double constant)
{
    constant += price_paths(d);
    constant += price_memory(d);
    price_layers(d);
    d->work -= (int64_t)d->virtuals * (d->p->n + 16) + d->columns;
    return constant + cheapest(d);
}
