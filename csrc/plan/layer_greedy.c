/* Piper's heuristic for the choice of variants within a stage: start from the fastest and exchange time for bytes, cheapest
 * exchange first; and the linear-relaxation bound that this order gives. */
#include "csrc/plan/layer_space.h"

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

/* Time of pack->choice if that fits, else INFINITY. */
static double
time_if_it_fits(const tp_layer_pack *pack, int y)
{
    double time = 0.0, a = 0.0, b = 0.0;
    for (int n = 0; n < pack->nodes; n++) {
        time += pack->time[pack->choice[n]];
        a += pack->a[pack->choice[n]];
        b += pack->b[pack->choice[n]];
    }
    return a * y + b <= pack->memory_bytes ? time : INFINITY;
}

double
tp_layer_pack_greedy(tp_layer_pack *pack, int y)
{
    double a, b, time = tp_layer_pack_fastest(pack, &a, &b), excess = a * y + b - pack->memory_bytes;
    int count = 0;
    pack->price = 0.0;
    if (excess <= 0.0)
        return time;
    if (tp_layer_pack_least_bytes(pack, y) > pack->memory_bytes)
        return INFINITY;
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
    for (int k = 0; k < count && excess > 0.0; k++) {
        int n = pack->exchange[2 * k], l = pack->exchange[2 * k + 1], now = pack->choice[n];
        double saved = saved_bytes(pack, now, l, y);
        if (saved <= 0.0)
            continue; /* of more than two variants: this one has been passed */
        excess -= saved;
        pack->choice[n] = l;
        pack->price = fmax(pack->ratio[k], 0.0);
    }
    return time_if_it_fits(pack, y);
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

/* Make exchanges in order from the fastest choice, which is `excess` bytes too large. Those that save nothing stand last and are
 * not made. */
static double
exchange_all(tp_layer_pack *pack, int y, int count, double excess)
{
    memcpy(pack->choice, pack->fastest, (size_t)pack->nodes * sizeof *pack->choice);
    for (int k = 0; k < count && excess > 0.0; k++) {
        int n = pack->exchange[2 * k], l = pack->exchange[2 * k + 1];
        double saved = saved_bytes(pack, pack->choice[n], l, y);
        if (saved <= 0.0 || (pack->ratio[k] == INFINITY && saved_bytes(pack, pack->fastest[n], l, y) <= 0.0))
            continue;
        excess -= saved;
        pack->choice[n] = l;
    }
    return time_if_it_fits(pack, y);
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
        double excess = a * y + b - pack->memory_bytes;
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
        if (!(time[y] < INFINITY))
            break;
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
