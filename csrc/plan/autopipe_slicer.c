/* AutoPipe's slicer: warm-up micro-batches in halves, so that the last stage starts in half the time. */
#include "csrc/plan/autopipe.h"

#include <math.h>

#include "csrc/base/clock.h"
#include "csrc/base/deadline.h"

typedef struct {
    int stages, micros, split;
    double comm_s;
    const double *forward_s, *backward_s;
    double *end, *half, *before; /* [stages] last end; end of the first half of the last forward; `end` one slot ago */
} sliced;

/* F_k(q): of a neighbour's row one slot ago, as in csrc/plan/f1b.h. Its first half's end is still the one of F_{k-1}(q): a
 * stage's next forward is later than its neighbour's op of this slot. */
static void
run_forward(sliced *s, int k, int q)
{
    double own = s->before[k], first = 0.0, second = 0.0;
    int warm = s->micros < s->stages - k ? s->micros : s->stages - k; /* of stage k - 1 */
    int whole = q >= s->split, together = whole || q == warm - 1;
    if (k > 0) {
        second = s->before[k - 1] + (together ? s->comm_s : 0.5 * s->comm_s);
        first = together ? second : s->half[k - 1] + 0.5 * s->comm_s;
    }
    if (whole) {
        s->end[k] = fmax(own, second) + s->forward_s[k];
        return;
    }
    s->half[k] = fmax(own, first) + 0.5 * s->forward_s[k];
    s->end[k] = fmax(s->half[k], second) + 0.5 * s->forward_s[k];
}

static void
run_backward(sliced *s, int k)
{
    double ready = k < s->stages - 1 ? s->before[k + 1] + s->comm_s : 0.0;
    s->end[k] = fmax(s->before[k], ready) + s->backward_s[k];
}

double
tp_sliced_f1b(int stages, int micros, int split, const double *forward_s, const double *backward_s, double comm_s,
              double *row)
{
    sliced s = {stages, micros, split, comm_s, forward_s, backward_s, row, row + stages, row + 2 * stages};
    int64_t steps = 0;
    for (int k = 0; k < 3 * stages; k++)
        row[k] = 0.0;
    for (int slot = 0; slot < 2 * (stages + micros - 1) && !tp_deadline_told_after(&steps, 8 * (int64_t)stages); slot++) {
        for (int k = 0; k < stages; k++)
            s.before[k] = s.end[k];
        /* From the last stage: stage k reads the first half of k - 1 before that moves on. */
        for (int k = stages - 1; k >= 0; k--) {
            tp_f1b_op op;
            if (!tp_f1b_op_at(stages, micros, slot, k, &op))
                continue;
            if (op.backward)
                run_backward(&s, k);
            else
                run_forward(&s, k, op.micro);
        }
    }
    return s.end[0];
}

/* Algorithm 2 with its misprints put right (PLANNERS.md 2.6): split mb micro-batches as soon as the first whole one then
 * reaches stage 0 no later than the first backward lets it in. end: [stages + 1][2]. */
static int
algorithm2(int p, const double *f, const double *b, double c, double *start, double (*end)[2])
{
    double t = 0.5 * f[p - 1];
    for (int i = 0; i < p - 1; i++)
        t += 0.5 * f[i] + 0.5 * c;
    for (int i = p - 1; i >= 1; i--)
        start[p - 1 - i] = t += b[i] + c;
    start[p - 1] = t + b[0];
    for (int i = 0; i <= p; i++)
        end[i][0] = end[i][1] = 0.0;
    for (int mb = 1; mb < p; mb++) {
        for (int i = 0; i <= p - mb && i < p; i++)
            for (int h = 0; h < 2; h++) {
                double e = end[i][1 - h] + 0.5 * f[i];
                if (i > 0)
                    e = fmax(e, end[i - 1][h] + 0.5 * f[i]);
                if (i < p - 1)
                    e += 0.5 * c;
                end[i][h] = fmax(e, end[i + 1][1 - h]);
            }
        t = start[mb - 1] - f[0];
        for (int i = 1; i <= p - 1 - mb; i++)
            t -= f[i] + c;
        if (t >= end[0][1])
            return mb;
    }
    return p > 1 ? p - 1 : 0;
}

/* No split gives less: stage k does all its work after half a micro-batch has come to it (behind the last stage but one: a
 * whole one, whose halves leave it together), and the last backward goes back to stage 0. */
static double
sliced_bound(int p, int m, const double *f, const double *b, double c)
{
    double most = 0.0, head = 0.0, tail = 0.0;
    for (int k = 0; k < p; k++) {
        if (k == p - 1 && k > 0)
            head += 0.5 * f[k - 1] + 0.5 * c;
        most = fmax(most, head + m * (f[k] + b[k]) + tail);
        head += 0.5 * f[k] + 0.5 * c;
        tail += b[k] + c;
    }
    return most;
}

static tp_status
check_stages(int stages, int micros, const double *forward_s, const double *backward_s, double comm_s)
{
    const double *lists[] = {forward_s, backward_s};
    double total = 0.0;
    if (stages < 1)
        return tp_fail(TP_EVALUE, "fwd has %d stages: at least 1 is needed", stages);
    if (micros < 1 || micros > TP_F1B_MICROS)
        return tp_fail(TP_EVALUE, "micro_batches is %d: 1 to %d would be right", micros, TP_F1B_MICROS);
    if (!(comm_s >= 0.0 && comm_s <= 1e300))
        return tp_fail(TP_EVALUE, "comm_s is %g: seconds from 0 to 1e300 would be right", comm_s);
    for (int l = 0; l < 2; l++)
        for (int k = 0; k < stages; k++) {
            if (!(lists[l][k] >= 0.0 && lists[l][k] <= 1e300))
                return tp_fail(TP_EVALUE, "%s[%d] is %g: seconds from 0 to 1e300 would be right",
                               l == 0 ? "fwd" : "bwd", k, lists[l][k]);
            total += lists[l][k] + comm_s;
        }
    if (!(total * micros <= 1e300))
        return tp_fail(TP_EVALUE, "%d micro-batches take %g seconds one by one: less than 1e300 would be right", micros,
                       total * micros);
    return TP_OK;
}

tp_status
tp_plan_sliced_f1b(int stages, int micros, int split, const double *forward_s, const double *backward_s, double comm_s,
                   double *makespan_s)
{
    tp_arena arena;
    void *row = NULL;
    TP_TRY(check_stages(stages, micros, forward_s, backward_s, comm_s));
    if (split < 0 || split > micros)
        return tp_fail(TP_EVALUE, "split is %d of %d micro-batches: 0 to %d would be right", split, micros, micros);
    TP_TRY(tp_arena_open(&arena));
    tp_status status = tp_arena_take(&arena, 3 * (size_t)stages, sizeof(double), &row);
    if (status == TP_OK)
        *makespan_s = tp_sliced_f1b(stages, micros, split, forward_s, backward_s, comm_s, row);
    if (status == TP_OK)
        status = tp_deadline_check_told();
    tp_arena_close(&arena);
    return status;
}

tp_status
tp_plan_slicer(int stages, int micros, const double *forward_s, const double *backward_s, double comm_s,
               tp_slicer_plan *out)
{
    tp_arena arena;
    void *row = NULL;
    int64_t begun = tp_clock_ns();
    TP_TRY(check_stages(stages, micros, forward_s, backward_s, comm_s));
    TP_TRY(tp_arena_open(&arena));
    tp_status status = tp_arena_take(&arena, 3 * (size_t)stages + 2, sizeof(double), &row);
    if (status == TP_OK) {
        double *scratch = row, (*end)[2] = (double(*)[2])(scratch + stages);
        int most = micros < stages - 1 ? micros : stages - 1;
        int split = algorithm2(stages, forward_s, backward_s, comm_s, scratch, end);
        *out = (tp_slicer_plan){.algorithm2_split = split < most ? split : most};
        double bound = sliced_bound(stages, micros, forward_s, backward_s, comm_s) * (1.0 + 1e-12);
        split = out->algorithm2_split;
        out->algorithm2_s = tp_sliced_f1b(stages, micros, split, forward_s, backward_s, comm_s, scratch);
        out->whole_s = out->step_time_s = tp_sliced_f1b(stages, micros, 0, forward_s, backward_s, comm_s, scratch);
        int64_t steps = 0;
        for (int s = 1; s <= most && out->step_time_s > bound && !tp_deadline_was_told(); s++) {
            if (tp_deadline_told_after(&steps, 16 * ((int64_t)stages + micros) * stages))
                break;
            double makespan = tp_sliced_f1b(stages, micros, s, forward_s, backward_s, comm_s, scratch);
            if (makespan < out->step_time_s * (1.0 - 1e-12)) {
                out->step_time_s = makespan;
                out->split = s;
            }
        }
        out->seconds = 1e-9 * (double)(tp_clock_ns() - begun);
        status = tp_deadline_check_told();
    }
    tp_arena_close(&arena);
    return status;
}
