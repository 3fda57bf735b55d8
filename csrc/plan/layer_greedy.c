/* Piper's heuristic for the choice of variants within a stage: start from the fastest and exchange time for bytes, cheapest
 * exchange first; and the linear-relaxation bound that this order gives. */
#include "csrc/plan/layer_space.h"

#include <float.h>
#include <math.h>
#include <string.h>

double
tp_layer_pack_fastest(tp_layer_pack *pack, double *a, double *b)
{
    double time = 0.0;
    *a = *b = 0.0;
    for (int n = 0; n < pack->nodes; n++) {
        int best = pack->begin[n];
        for (int l = best + 1; l < pack->begin[n + 1]; l++)
            if (pack->time[l] < pack->time[best])
                best = l;
        pack->choice[n] = best;
        time += pack->time[best];
        *a += pack->a[best];
        *b += pack->b[best];
    }
    return time;
}

double
tp_layer_pack_bytes(const tp_layer_pack *pack, const int *choice, int y)
{
    double bytes = 0.0;
    for (int n = 0; n < pack->nodes; n++)
        bytes += pack->a[choice[n]] * y + pack->b[choice[n]];
    return bytes;
}

double
tp_layer_pack_least_bytes(const tp_layer_pack *pack, int y)
{
    double bytes = 0.0;
    for (int n = 0; n < pack->nodes; n++) {
        double least = INFINITY;
        for (int l = pack->begin[n]; l < pack->begin[n + 1]; l++) {
            double here = pack->a[l] * y + pack->b[l];
            least = here < least ? here : least;
        }
        bytes += least;
    }
    return bytes;
}

/* Exchanges (node, variant) by time per byte, ascending; stable. */
static void
sort_exchanges(tp_layer_pack *pack, int count)
{
    for (int gap = count / 2; gap > 0; gap /= 2)
        for (int i = gap; i < count; i++) {
            double ratio = pack->ratio[i];
            int node = pack->exchange[2 * i], variant = pack->exchange[2 * i + 1], k = i;
            for (; k >= gap && (pack->ratio[k - gap] > ratio ||
                                (pack->ratio[k - gap] == ratio && pack->exchange[2 * (k - gap) + 1] > variant));
                 k -= gap) {
                pack->ratio[k] = pack->ratio[k - gap];
                pack->exchange[2 * k] = pack->exchange[2 * (k - gap)];
                pack->exchange[2 * k + 1] = pack->exchange[2 * (k - gap) + 1];
            }
            pack->ratio[k] = ratio;
            pack->exchange[2 * k] = node;
            pack->exchange[2 * k + 1] = variant;
        }
}

/* Bytes that variant l saves over the node's present variant `now`. */
static inline double
saved_bytes(const tp_layer_pack *pack, int now, int l, int y)
{
    return (pack->a[now] - pack->a[l]) * y + pack->b[now] - pack->b[l];
}

/* Each node's variant of least bytes: what tp_layer_pack_least_bytes adds up, which fits to the last bit if that does. */
static void
choose_least(tp_layer_pack *pack, int y)
{
    for (int n = 0; n < pack->nodes; n++)
        for (int l = pack->begin[n]; l < pack->begin[n + 1]; l++) {
            int now = pack->choice[n];
            if (pack->a[l] * y + pack->b[l] < pack->a[now] * y + pack->b[now])
                pack->choice[n] = l;
        }
}

/* Make exchanges in order from the fastest choice, which is `excess` bytes too large, until it fits, as it does at the latest with
 * the variants of least bytes; gives its time. Those that save nothing stand last and are not made. */
static double
exchange_all(tp_layer_pack *pack, int y, int count, double excess)
{
    double time = 0.0;
    memcpy(pack->choice, pack->fastest, (size_t)pack->nodes * sizeof *pack->choice);
    for (int k = 0; k < count && excess > 0.0; k++) {
        int n = pack->exchange[2 * k], l = pack->exchange[2 * k + 1];
        double saved = saved_bytes(pack, pack->choice[n], l, y);
        if (saved <= 0.0 || (pack->ratio[k] == INFINITY && saved_bytes(pack, pack->fastest[n], l, y) <= 0.0))
            continue; /* of more than two variants: this one has been passed */
        excess -= saved;
        pack->choice[n] = l;
        pack->price = fmax(pack->ratio[k], 0.0);
        if (excess <= 0.0) /* or seems to: where bytes are fractions, the differences are an ulp off */
            excess = tp_layer_pack_bytes(pack, pack->choice, y) - pack->memory_bytes;
    }
    if (excess > 0.0 && tp_layer_pack_bytes(pack, pack->choice, y) > pack->memory_bytes) {
        choose_least(pack, y);
        pack->price = fmax(pack->price, DBL_MIN); /* some was needed */
    }
    for (int n = 0; n < pack->nodes; n++)
        time += pack->time[pack->choice[n]];
    return time;
}

double
tp_layer_pack_greedy(tp_layer_pack *pack, int y)
{
    double a, b, time = tp_layer_pack_fastest(pack, &a, &b);
    double excess = tp_layer_pack_bytes(pack, pack->choice, y) - pack->memory_bytes;
    int count = 0;
    pack->price = 0.0;
    if (excess <= 0.0)
        return time;
    if (tp_layer_pack_least_bytes(pack, y) > pack->memory_bytes)
        return INFINITY;
    memcpy(pack->fastest, pack->choice, (size_t)pack->nodes * sizeof *pack->fastest);
    for (int n = 0; n < pack->nodes; n++) {
        int now = pack->choice[n];
        for (int l = pack->begin[n]; l < pack->begin[n + 1]; l++) {
            double saved = saved_bytes(pack, now, l, y);
            if (saved <= 0.0)
                continue;
            pack->ratio[count] = (pack->time[l] - pack->time[now]) / saved;
            pack->exchange[2 * count] = n;
            pack->exchange[2 * count++ + 1] = l;
        }
    }
    sort_exchanges(pack, count);
    return exchange_all(pack, y, count, excess);
}

/* Insertion sort of exchange[], most of which are in order by ratio; gives the same order as sort_exchanges. */
static void
mend_order(tp_layer_pack *pack, int count)
{
    for (int i = 1; i < count; i++) {
        double ratio = pack->ratio[i];
        int node = pack->exchange[2 * i], variant = pack->exchange[2 * i + 1], k = i;
        for (; k > 0 && (pack->ratio[k - 1] > ratio || (pack->ratio[k - 1] == ratio && pack->exchange[2 * k - 1] > variant));
             k--) {
            pack->ratio[k] = pack->ratio[k - 1];
            pack->exchange[2 * k] = pack->exchange[2 * k - 2];
            pack->exchange[2 * k + 1] = pack->exchange[2 * k - 1];
        }
        pack->ratio[k] = ratio;
        pack->exchange[2 * k] = node;
        pack->exchange[2 * k + 1] = variant;
    }
}

void
tp_layer_pack_greedy_each(tp_layer_pack *pack, int most, double *time)
{
    double a, b, fastest = tp_layer_pack_fastest(pack, &a, &b);
    int count = 0, ordered = 0, y = 1;
    memcpy(pack->fastest, pack->choice, (size_t)pack->nodes * sizeof *pack->fastest);
    for (int n = 0; n < pack->nodes; n++)
        for (int l = pack->begin[n]; l < pack->begin[n + 1]; l++)
            if (l != pack->fastest[n]) {
                pack->exchange[2 * count] = n;
                pack->exchange[2 * count++ + 1] = l;
            }
    for (; y <= most; y++) {
        double excess = tp_layer_pack_bytes(pack, pack->fastest, y) - pack->memory_bytes;
        time[y] = fastest;
        if (excess <= 0.0)
            continue;
        if (tp_layer_pack_least_bytes(pack, y) > pack->memory_bytes)
            break;
        for (int k = 0; k < count; k++) {
            int l = pack->exchange[2 * k + 1], now = pack->fastest[pack->exchange[2 * k]];
            double saved = saved_bytes(pack, now, l, y);
            pack->ratio[k] = saved > 0.0 ? (pack->time[l] - pack->time[now]) / saved : INFINITY;
        }
        if (ordered)
            mend_order(pack, count);
        else
            sort_exchanges(pack, count);
        ordered = 1;
        time[y] = exchange_all(pack, y, count, excess);
    }
    for (; y <= most; y++)
        time[y] = INFINITY;
}

double
tp_layer_pack_bound(const tp_layer_pack *pack, int y)
{
    double bound = -pack->price * pack->memory_bytes, size = pack->price * pack->memory_bytes;
    for (int n = 0; n < pack->nodes; n++) {
        double least = INFINITY;
        for (int l = pack->begin[n]; l < pack->begin[n + 1]; l++)
            least = fmin(least, pack->time[l] + pack->price * (pack->a[l] * y + pack->b[l]));
        bound += least;
        size += least;
    }
    return bound - 1e-12 * size; /* less what its rounding may amount to */
}
