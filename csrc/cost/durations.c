#include "csrc/cost/cost.h"

#include <string.h>

#include "csrc/base/deadline.h"

typedef struct {
    double seconds[TP_BLOCK_KINDS][TP_COST_PHASES];
} work;

static void
add(const tp_cost *cost, tp_block_kind kind, tp_cost_phase phase, double slice, double context, double batch, work *out)
{
    out->seconds[kind][phase] = tp_cost_seconds(&cost->curve[kind][phase], slice, context, batch);
}

/* All work of one unit, block by block kind. */
static work
unit_work(const tp_cost *cost, int32_t batch, int32_t slices, int32_t slice, double length, double context,
          double total)
{
    work out = {{{0.0}}};
    int whole = batch > 1 && slices > 1, last = slice == slices - 1;
    for (int kind = 0; kind < TP_BLOCK_KINDS; kind++)
        for (int phase = 0; phase < TP_COST_PHASES; phase++) {
            int once = whole && (phase == TP_COST_W || kind == TP_HEAD);
            if (!once)
                add(cost, (tp_block_kind)kind, (tp_cost_phase)phase, length, context, batch, &out);
            else if (phase == TP_COST_W ? slice == 0 : last)
                add(cost, (tp_block_kind)kind, (tp_cost_phase)phase, total, 0.0, batch, &out);
        }
    return out;
}

static tp_status
check_request(int32_t stages, const int32_t *blocks, int32_t micros, const int32_t *batches, const int32_t *slices,
              const int32_t *lengths)
{
    if (stages < 1 || micros < 1)
        return tp_fail(TP_EVALUE, "durations: %d stages, %d micro-batches: at least 1 would be right", (int)stages,
                       (int)micros);
    for (int32_t i = 0; i < stages * TP_BLOCK_KINDS; i++)
        if (blocks[i] < 0)
            return tp_fail(TP_EVALUE, "durations: stage %d has %d blocks", (int)(i / TP_BLOCK_KINDS), (int)blocks[i]);
    for (int32_t q = 0; q < micros; q++) {
        if (batches[q] < 1 || slices[q] < 1)
            return tp_fail(TP_EVALUE,
                           "durations: micro-batch %d has %d sequences in %d slices: at least 1 would be right", (int)q,
                           (int)batches[q], (int)slices[q]);
        for (int32_t s = 0; s < slices[q]; s++, lengths++)
            if (*lengths < 1)
                return tp_fail(TP_EVALUE, "durations: slice %d.%d has %d tokens: at least 1 would be right", (int)q,
                               (int)s, (int)*lengths);
    }
    return TP_OK;
}

/* Is micro-batch q cut as the one before it? lengths: its own. */
static int
is_same(int32_t q, const int32_t *batches, const int32_t *slices, const int32_t *lengths)
{
    return q > 0 && batches[q] == batches[q - 1] && slices[q] == slices[q - 1] &&
           memcmp(lengths, lengths - slices[q], (size_t)slices[q] * sizeof *lengths) == 0;
}

tp_status
tp_cost_durations(const tp_cost *cost, int32_t stages, const int32_t *blocks, int32_t micros, const int32_t *batches,
                  const int32_t *slices, const int32_t *lengths, double *F, double *I, double *W)
{
    TP_TRY(check_request(stages, blocks, micros, batches, slices, lengths));
    double *const out[TP_COST_PHASES] = {F, I, W};
    int64_t units = 0, unit = 0, steps = 0;
    for (int32_t q = 0; q < micros; q++)
        units += slices[q];
    for (int32_t q = 0; q < micros; q++) {
        double total = 0.0, context = 0.0;
        TP_TRY(tp_deadline_check_after(&steps, (int64_t)stages * 4 * slices[q]));
        if (is_same(q, batches, slices, lengths)) { /* most are */
            for (int32_t k = 0; k < stages; k++)
                for (int phase = 0; phase < TP_COST_PHASES; phase++) {
                    double *cell = out[phase] + k * units + unit;
                    memcpy(cell, cell - slices[q], (size_t)slices[q] * sizeof *cell);
                }
            unit += slices[q];
            lengths += slices[q];
            continue;
        }
        for (int32_t s = 0; s < slices[q]; s++)
            total += lengths[s];
        for (int32_t s = 0; s < slices[q]; s++, unit++) {
            work done = unit_work(cost, batches[q], slices[q], s, lengths[s], context, total);
            context += lengths[s];
            for (int32_t k = 0; k < stages; k++)
                for (int phase = 0; phase < TP_COST_PHASES; phase++) {
                    double seconds = cost->overhead_s;
                    for (int kind = 0; kind < TP_BLOCK_KINDS; kind++)
                        seconds += blocks[k * TP_BLOCK_KINDS + kind] * done.seconds[kind][phase];
                    out[phase][k * units + unit] = seconds;
                }
        }
        lengths += slices[q];
    }
    return TP_OK;
}

tp_status
tp_cost_recompute(const tp_cost *cost, int32_t stages, const int32_t *blocks, int32_t micros, const int32_t *batches,
                  const int32_t *slices, const int32_t *lengths, double *R)
{
    TP_TRY(check_request(stages, blocks, micros, batches, slices, lengths));
    int64_t units = 0, unit = 0;
    for (int32_t q = 0; q < micros; q++)
        units += slices[q];
    for (int32_t q = 0; q < micros; q++) {
        double context = 0.0;
        for (int32_t s = 0; s < slices[q]; s++, unit++, context += *lengths++) {
            double attention = tp_cost_seconds(&cost->curve[TP_ATTENTION][TP_COST_F], *lengths, context, batches[q]);
            double ffn = tp_cost_seconds(&cost->curve[TP_FFN][TP_COST_F], *lengths, context, batches[q]);
            attention = attention > ffn / 8 ? attention - ffn / 8 : 0.0;
            for (int32_t k = 0; k < stages; k++) {
                const int32_t *count = blocks + k * TP_BLOCK_KINDS;
                int any = count[TP_ATTENTION] + count[TP_FFN] > 0;
                R[k * units + unit] = any * cost->overhead_s + count[TP_ATTENTION] * attention + count[TP_FFN] * ffn / 2;
            }
        }
    }
    return TP_OK;
}
