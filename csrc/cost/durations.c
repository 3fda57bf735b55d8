/* Curves into seconds of instructions: F, I and W of each unit on each stage, and R (cost.h). */
#include "csrc/cost/cost.h"

#include <string.h>

#include "csrc/base/deadline.h"

static void
add(const tp_cost *cost, int kind, int phase, double slice, double context, double batch, tp_cost_work *out)
{
    out->seconds[kind][phase] = tp_cost_seconds(&cost->curve[kind][phase], slice, context, batch);
}

/* Of a micro-batch with several sequences and slices: rows of one sequence are summed in one fixed order. */
static tp_cost_work
whole_work(const tp_cost *cost, int32_t batch, int32_t slices, int32_t slice, double length, double context, double total)
{
    tp_cost_work out = {.slice = 0.0};
    int last = slice == slices - 1;
    for (int kind = 0; kind < TP_BLOCK_KINDS; kind++)
        for (int phase = 0; phase < TP_COST_PHASES; phase++)
            if (phase != TP_COST_W && kind != TP_HEAD)
                add(cost, kind, phase, length, context, batch, &out);
            else if (phase == TP_COST_W ? slice == 0 : last)
                add(cost, kind, phase, total, 0.0, batch, &out);
    return out;
}

/* Where it is remembered: the mixed bits of the three, as whole numbers. */
static tp_cost_work *
place_of(const tp_cost *cost, double length, double context, double batch)
{
    uint32_t key = (uint32_t)length * 2654435761u ^ (uint32_t)context * 2246822519u ^ (uint32_t)batch * 3266489917u;
    return &cost->known[(key ^ key >> 15) % TP_COST_KNOWN];
}

/* All work of one unit, block by block kind. */
static tp_cost_work
unit_work(const tp_cost *cost, double batch, double length, double context)
{
    tp_cost_work *known = cost->known == NULL ? NULL : place_of(cost, length, context, batch);
    if (known != NULL && known->slice == length && known->context == context && known->batch == batch)
        return *known;
    tp_cost_work out = {length, context, batch, {{0.0}}};
    for (int kind = 0; kind < TP_BLOCK_KINDS; kind++)
        for (int phase = 0; phase < TP_COST_PHASES; phase++)
            add(cost, kind, phase, length, context, batch, &out);
    if (known != NULL)
        *known = out;
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

/* Of all stages, where they go. */
typedef struct {
    const tp_cost *cost;
    int32_t stages;
    const int32_t *blocks, *prompt;
    int64_t units;
    double *out[TP_COST_PHASES];
} tables;

/* Seconds of a unit on every stage; W of blocks that wait, alone, without what an instruction costs besides. */
static void
put_unit(const tables *t, const tp_cost_work *done, int waits, int64_t unit)
{
    for (int32_t k = 0; k < t->stages; k++)
        for (int phase = 0; phase < TP_COST_PHASES; phase++) {
            int alone = waits && phase == TP_COST_W;
            double seconds = alone ? 0.0 : t->cost->overhead_s;
            for (int kind = 0; kind < TP_BLOCK_KINDS; kind++) {
                int32_t at = k * TP_BLOCK_KINDS + kind, prompt = alone && t->prompt != NULL ? t->prompt[at] : 0;
                seconds += (t->blocks[at] - prompt) * done->seconds[kind][phase];
            }
            t->out[phase][k * t->units + unit] = seconds;
        }
}

/* Weight gradients of a sequence's slices, the first of them `unit`: where those that wait are made. */
static void
put_weights(const tables *t, int32_t slices, const int32_t *lengths, int64_t unit)
{
    for (int32_t k = 0; k < t->stages; k++) {
        double *w = t->out[TP_COST_W] + k * t->units + unit;
        const int32_t *prompt = t->prompt == NULL ? NULL : t->prompt + k * TP_BLOCK_KINDS;
        double context = 0.0;
        tp_weights_wait(slices, lengths, w);
        for (int32_t s = 0; s < slices; context += lengths[s++]) {
            w[s] += t->cost->overhead_s;
            for (int kind = 0; prompt != NULL && kind < TP_BLOCK_KINDS; kind++)
                if (prompt[kind] > 0)
                    w[s] += prompt[kind] * tp_cost_seconds(&t->cost->curve[kind][TP_COST_W], lengths[s], context, 1.0);
        }
    }
}

static void
put_micro(const tables *t, int32_t batch, int32_t slices, const int32_t *lengths, int64_t unit)
{
    double total = 0.0, context = 0.0;
    int waits = t->cost->waits.row_s > 0.0 && batch == 1 && slices > 1;
    for (int32_t s = 0; s < slices; s++)
        total += lengths[s];
    for (int32_t s = 0; s < slices; context += lengths[s++]) {
        tp_cost_work done = batch > 1 && slices > 1 ? whole_work(t->cost, batch, slices, s, lengths[s], context, total)
                                                    : unit_work(t->cost, batch, lengths[s], context);
        put_unit(t, &done, waits, unit + s);
    }
    if (waits)
        put_weights(t, slices, lengths, unit);
}

/* As in the micro-batch before. */
static void
repeat_micro(const tables *t, int32_t slices, int64_t unit)
{
    for (int32_t k = 0; k < t->stages; k++)
        for (int phase = 0; phase < TP_COST_PHASES; phase++) {
            double *cell = t->out[phase] + k * t->units + unit;
            memcpy(cell, cell - slices, (size_t)slices * sizeof *cell);
        }
}

typedef struct {
    const tables *t;
    int64_t unit; /* the micro-batch's first */
} head_place;

static void
add_head(void *context, int forward, int32_t slice, const tp_head_rows *rows)
{
    const head_place *place = context;
    const tables *t = place->t;
    double more_s = tp_head_waits_s(&t->cost->waits, rows, forward), least = t->cost->overhead_s;
    for (int32_t k = 0; k < t->stages; k++) {
        double *cell = t->out[forward ? TP_COST_F : TP_COST_I] + k * t->units + place->unit + slice;
        if (t->blocks[k * TP_BLOCK_KINDS + TP_HEAD] > 0)
            *cell = *cell + more_s > least ? *cell + more_s : least;
    }
}

/* The head's rows wait over the ends of micro-batches, but not over those of a copy's. left_s: NULL, or [copies]. */
static void
let_head_wait(const tables *t, int32_t copies, int32_t micros, const int32_t *batches, const int32_t *slices,
              const int32_t *lengths, double *left_s)
{
    const int32_t each = micros / copies;
    tp_head_walk walk = {{0, 0}, 0};
    head_place place = {t, 0};
    for (int32_t q = 0; q < micros; place.unit += slices[q++]) {
        if (q % each == 0)
            walk = (tp_head_walk){{0, 0}, 0};
        tp_head_walk_on(&walk, batches[q], slices[q], lengths + place.unit, add_head, &place);
        if (left_s != NULL)
            left_s[q / each] = tp_head_left_s(&t->cost->waits, &walk);
    }
}

tp_status
tp_cost_durations(const tp_cost *cost, int32_t stages, const int32_t *blocks, const int32_t *prompt, int32_t copies,
                  int32_t micros, const int32_t *batches, const int32_t *slices, const int32_t *lengths, double *F, double *I,
                  double *W, double *left_s)
{
    TP_TRY(check_request(stages, blocks, micros, batches, slices, lengths));
    if (copies < 1 || micros % copies != 0)
        return tp_fail(TP_EVALUE, "durations: %d micro-batches for %d copies of the model: as many of them in both directions would be "
                       "right", (int)micros, (int)copies);
    tables t = {cost, stages, blocks, prompt, 0, {F, I, W}};
    int64_t unit = 0, steps = 0;
    const int32_t *length = lengths;
    for (int32_t q = 0; q < micros; q++)
        t.units += slices[q];
    for (int32_t q = 0; q < micros; unit += slices[q], length += slices[q], q++) {
        TP_TRY(tp_deadline_check_after(&steps, (int64_t)stages * 4 * slices[q]));
        if (is_same(q, batches, slices, length)) /* most are */
            repeat_micro(&t, slices[q], unit);
        else
            put_micro(&t, batches[q], slices[q], length, unit);
    }
    for (int32_t copy = 0; left_s != NULL && copy < copies; copy++)
        left_s[copy] = 0.0;
    if (cost->waits.row_s > 0.0)
        let_head_wait(&t, copies, micros, batches, slices, lengths, left_s);
    return TP_OK;
}

/* An attention's forward less so many products of E^2 multiply-adds a token. Its own four are no longer than it: differences of two
 * measured curves, either of which may be of a busier machine, otherwise leave nothing of those that are made. */
static double
remade_attention(double attention, double ffn, int spared)
{
    double less = attention - spared * ffn / 8, own = spared < 4 ? attention * (4 - spared) / 4 : 0.0;
    return less > own ? less : own;
}

/* A slice, and F of its attention and its FFN. */
typedef struct {
    const tp_cost *cost;
    double slice, context, batch, attention, ffn;
} unit_forward;

/* By its own curve, within bounds; `otherwise` where it has none. */
static double
remade(const unit_forward *unit, tp_cost_remade what, double forward, double least_share, double otherwise)
{
    const tp_cost_curve *curve = &unit->cost->remade[what];
    if (curve->points == 0 && curve->table == NULL)
        return otherwise;
    double seconds = tp_cost_seconds(curve, unit->slice, unit->context, unit->batch), least = least_share * forward;
    return seconds < least ? least : seconds > forward ? forward : seconds;
}

/* FFNs alone are made again slice by slice always. slices: of the micro-batch. */
static void
put_remade(const unit_forward *unit, int32_t stages, const int32_t *blocks, const uint8_t *kept, int32_t slices, int64_t units,
           double *R)
{
    for (int32_t k = 0; k < stages; k++) {
        const int32_t *count = blocks + k * TP_BLOCK_KINDS;
        int any = count[TP_ATTENTION] + count[TP_FFN] > 0, spared = 1 + (kept != NULL ? kept[k] : 0); /* of E^2 */
        int apart = count[TP_ATTENTION] > 0 ? spared > 1 : slices > 1;
        double attention = 0.0, ffn = 0.0;
        if (count[TP_ATTENTION] > 0)
            attention = remade(unit, apart ? TP_COST_REMADE_ATTENTION_APART : TP_COST_REMADE_ATTENTION, unit->attention,
                               spared < 4 ? (4 - spared) / 8.0 : 0.0, remade_attention(unit->attention, unit->ffn, spared));
        if (count[TP_FFN] > 0)
            ffn = remade(unit, apart ? TP_COST_REMADE_FFN_APART : TP_COST_REMADE_FFN, unit->ffn, 0.25, unit->ffn / 2);
        R[k * units] = any * unit->cost->overhead_s + count[TP_ATTENTION] * attention + count[TP_FFN] * ffn;
    }
}

tp_status
tp_cost_recompute(const tp_cost *cost, int32_t stages, const int32_t *blocks, const uint8_t *kept, int32_t micros,
                  const int32_t *batches, const int32_t *slices, const int32_t *lengths, double *R)
{
    TP_TRY(check_request(stages, blocks, micros, batches, slices, lengths));
    int64_t units = 0, unit = 0;
    for (int32_t q = 0; q < micros; q++)
        units += slices[q];
    for (int32_t q = 0; q < micros; lengths += slices[q], unit += slices[q++]) {
        int same = is_same(q, batches, slices, lengths);
        for (int32_t k = 0; same && k < stages; k++)
            memcpy(R + k * units + unit, R + k * units + unit - slices[q], (size_t)slices[q] * sizeof *R);
        unit_forward at = {cost, 0.0, 0.0, batches[q], 0.0, 0.0};
        for (int32_t s = 0; !same && s < slices[q]; at.context += lengths[s++]) {
            at.slice = lengths[s];
            at.attention = tp_cost_seconds(&cost->curve[TP_ATTENTION][TP_COST_F], at.slice, at.context, at.batch);
            at.ffn = tp_cost_seconds(&cost->curve[TP_FFN][TP_COST_F], at.slice, at.context, at.batch);
            put_remade(&at, stages, blocks, kept, slices[q], units, R + unit + s);
        }
    }
    return TP_OK;
}
