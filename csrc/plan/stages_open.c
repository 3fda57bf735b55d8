/* What the partition searches read: checked arguments, running sums, and what fits. */
#include "csrc/plan/stages.h"

#include <math.h>

#include "csrc/base/deadline.h"
#include "csrc/plan/in_flight.h"

static tp_status
check_list(const double *list, int count, const char *name, const char *what)
{
    double total = 0.0;
    for (int i = 0; i < count; i++) {
        if (!(list[i] >= 0.0 && list[i] <= 1e300))
            return tp_fail(TP_EVALUE, "%s[%d] is %g: %s from 0 to 1e300 would be right", name, i, list[i], what);
        total += list[i];
    }
    if (!(total <= 1e300))
        return tp_fail(TP_EVALUE, "%s sums to %g: less than 1e300 would be right", name, total);
    return TP_OK;
}

static tp_status
check_memory(const tp_stage_problem *q)
{
    const tp_stage_memory *m = q->memory;
    if (m == NULL)
        return TP_OK;
    if (m->static_bytes != NULL)
        TP_TRY(check_list(m->static_bytes, q->blocks, "static_bytes", "bytes"));
    if (m->activation_bytes != NULL)
        TP_TRY(check_list(m->activation_bytes, q->blocks, "activation_bytes", "bytes"));
    if (m->transient_bytes != NULL)
        TP_TRY(check_list(m->transient_bytes, q->blocks, "transient_bytes", "bytes"));
    for (int k = 0; k < q->stages; k++)
        if (!(m->limit_bytes[k] >= 0.0))
            return tp_fail(TP_EVALUE, "limit_bytes[%d] is %g: 0 bytes or more would be right", k, m->limit_bytes[k]);
    return tp_in_flight_check(m->in_flight, q->micros, q->stages);
}

static tp_status
check_problem(const tp_stage_problem *q)
{
    if (q->blocks < 1)
        return tp_fail(TP_EVALUE, "fwd has %d blocks: at least 1 is needed", q->blocks);
    if (q->stages < 1)
        return tp_fail(TP_EVALUE, "stages is %d: at least 1 is needed", q->stages);
    if (q->stages > q->blocks)
        return tp_fail(TP_EVALUE, "stages is %d for %d blocks: at most one stage a block, %d, is possible", q->stages,
                       q->blocks, q->blocks);
    if (q->stages > TP_AUTOPIPE_STAGES)
        return tp_fail(TP_EVALUE, "stages is %d: at most %d are possible", q->stages, TP_AUTOPIPE_STAGES);
    if (q->micros < 1 || q->micros > TP_F1B_MICROS)
        return tp_fail(TP_EVALUE, "micro_batches is %d: 1 to %d would be right", q->micros, TP_F1B_MICROS);
    if (!(q->comm_s >= 0.0 && q->comm_s <= 1e300))
        return tp_fail(TP_EVALUE, "comm_s is %g: seconds from 0 to 1e300 would be right", q->comm_s);
    TP_TRY(check_list(q->forward_s, q->blocks, "fwd", "seconds"));
    TP_TRY(check_list(q->backward_s, q->blocks, "bwd", "seconds"));
    double total = 0.0;
    for (int i = 0; i < q->blocks; i++)
        total += q->forward_s[i] + q->backward_s[i];
    total = (total + 2.0 * q->stages * q->comm_s) * q->micros;
    if (!(total <= 1e300))
        return tp_fail(TP_EVALUE, "%d micro-batches take %g seconds one by one: less than 1e300 would be right",
                       q->micros, total);
    return check_memory(q);
}

double
tp_stage_bytes(const tp_stage_problem *q, int k, int from, int to)
{
    const tp_stage_memory *m = q->memory;
    int copies = tp_in_flight(m->in_flight, q->micros, q->stages, k);
    double fixed = 0.0, kept = 0.0, most = 0.0;
    for (int i = from; i < to; i++) {
        fixed += m->static_bytes != NULL ? m->static_bytes[i] : 0.0;
        kept += m->activation_bytes != NULL ? m->activation_bytes[i] : 0.0;
        most = fmax(most, m->transient_bytes != NULL ? m->transient_bytes[i] : 0.0);
    }
    return fixed + copies * kept + most;
}

typedef struct {
    const tp_stage_problem *q;
    double *fixed, *kept; /* [blocks + 1] running sums of static and activation bytes, huge blocks left out */
    int *huge;            /* [blocks + 1] running count of them */
    int *queue;           /* [blocks] scratch: blocks of falling transient bytes */
} memory_sums;

/* For a stage that may use so many bytes. A block that alone is more is huge: in the running sums it would take the bytes of those
 * behind it. */
static void
sum_blocks(const memory_sums *s, double limit)
{
    const tp_stage_memory *m = s->q->memory;
    for (int i = 0; i < s->q->blocks; i++) {
        double fixed = m->static_bytes != NULL ? m->static_bytes[i] : 0.0;
        double kept = m->activation_bytes != NULL ? m->activation_bytes[i] : 0.0;
        int huge = fixed > limit || kept > limit;
        s->huge[i + 1] = s->huge[i] + huge;
        s->fixed[i + 1] = s->fixed[i] + (huge ? 0.0 : fixed);
        s->kept[i + 1] = s->kept[i] + (huge ? 0.0 : kept);
    }
}

/* reach[k][from] under limits that are `more` bytes larger: two pointers, the largest transient of the window in a queue. */
static void
fill_reach(const memory_sums *s, double more, int *reach)
{
    const tp_stage_problem *q = s->q;
    const double *transient = q->memory->transient_bytes;
    for (int k = 0; k < q->stages; k++) {
        int head = 0, tail = 0, to = 0, copies = tp_in_flight(q->memory->in_flight, q->micros, q->stages, k);
        double limit = q->memory->limit_bytes[k] + more;
        if (k == 0 || q->memory->limit_bytes[k] != q->memory->limit_bytes[k - 1])
            sum_blocks(s, limit);
        for (int from = 0; from < q->blocks; from++) {
            to = to < from ? from : to;
            while (head < tail && s->queue[head] < from)
                head++;
            for (; to < q->blocks; to++) {
                double most = head < tail ? transient[s->queue[head]] : 0.0;
                if (transient != NULL && transient[to] > most)
                    most = transient[to];
                double bytes = (s->fixed[to + 1] - s->fixed[from]) + copies * (s->kept[to + 1] - s->kept[from]) + most;
                if (!(bytes <= limit) || s->huge[to + 1] > s->huge[from])
                    break;
                if (transient == NULL)
                    continue;
                while (head < tail && transient[s->queue[tail - 1]] <= transient[to])
                    tail--;
                s->queue[tail++] = to;
            }
            reach[(size_t)k * (size_t)q->blocks + (size_t)from] = to;
        }
    }
}

/* The bytes by which stage k of blocks from .. to is short, rounded so that the limit and they are enough; summed as under limits
 * that are `more` bytes larger. */
static double
short_bytes(const memory_sums *s, double more, int k, int from, int to)
{
    double need = tp_stage_bytes(s->q, k, from, to), limit = s->q->memory->limit_bytes[k];
    sum_blocks(s, limit + more);
    if (s->huge[to] == s->huge[from]) {
        int copies = tp_in_flight(s->q->memory->in_flight, s->q->micros, s->q->stages, k);
        double most = 0.0;
        for (int i = from; i < to && s->q->memory->transient_bytes != NULL; i++)
            most = fmax(most, s->q->memory->transient_bytes[i]);
        need = (s->fixed[to] - s->fixed[from]) + copies * (s->kept[to] - s->kept[from]) + most;
    }
    double missing = need - limit;
    while (missing > 0.0 && limit + missing < need)
        missing = nextafter(missing, INFINITY);
    return missing;
}

/* Nothing fits: find the partition whose worst stage is short of least, and say which stage that is. */
static tp_status
refuse(tp_arena *arena, const memory_sums *sums, tp_stages *s)
{
    double low = 0.0, high = 0.0, need = 0.0;
    int worst = 0, *boundary;
    void *memory = NULL;
    TP_TRY(tp_arena_take(arena, (size_t)s->stages + 1, sizeof(int), &memory));
    boundary = memory;
    for (int k = 0; k < s->stages; k++)
        high = fmax(high, short_bytes(sums, 0.0, k, 0, s->blocks));
    double most_bytes = high;
    for (int round = 0; round < 200 && high - low > 0.5 && high - low > 1e-15 * high; round++) {
        double more = low + 0.5 * (high - low), most = 0.0;
        fill_reach(sums, more, s->reach);
        if (!tp_stages_narrow(s, INFINITY)) {
            low = more;
            continue;
        }
        tp_stages_take(s, 1, boundary);
        for (int k = 0; k < s->stages; k++) {
            double missing = short_bytes(sums, more, k, boundary[k], boundary[k + 1]);
            if (missing > most) {
                most = missing;
                worst = k;
            }
        }
        high = most;
    }
    double more = high;
    fill_reach(sums, more, s->reach);
    for (int round = 0; !tp_stages_narrow(s, INFINITY); round++) { /* its sums may be rounded otherwise */
        TP_TRY(tp_deadline_check_told());
        if (round == 40)
            return tp_fail(TP_EINTERNAL, "no partition is short of %.17g bytes a stage", high);
        more += ldexp(1e-16 * most_bytes, round);
        fill_reach(sums, more, s->reach);
    }
    tp_stages_take(s, 1, boundary);
    for (int k = 0; k < s->stages; k++)
        if (short_bytes(sums, more, k, boundary[k], boundary[k + 1]) >= need) {
            need = short_bytes(sums, more, k, boundary[k], boundary[k + 1]);
            worst = k;
        }
    double limit = sums->q->memory->limit_bytes[worst];
    return tp_fail(TP_EINFEASIBLE,
                   "no partition of %d blocks into %d stages fits: in the one that is short of least, stage %d (blocks "
                   "%d to %d) needs %.17g bytes and may use %.17g: %.17g bytes short; limits larger by that would fit",
                   s->blocks, s->stages, worst, boundary[worst], boundary[worst + 1] - 1, limit + need, limit, need);
}

static tp_status
take_sums(tp_arena *arena, const double *list, int count, double **out)
{
    void *memory = NULL;
    TP_TRY(tp_arena_take(arena, (size_t)count + 1, sizeof(double), &memory));
    *out = memory;
    for (int i = 0; i < count && list != NULL; i++)
        (*out)[i + 1] = (*out)[i] + list[i];
    return TP_OK;
}

static tp_status
open_memory(tp_arena *arena, const tp_stage_problem *q, tp_stages *s)
{
    memory_sums sums = {.q = q};
    TP_ARENA_TAKE(arena, q->blocks + 1, sums.fixed);
    TP_ARENA_TAKE(arena, q->blocks + 1, sums.kept);
    TP_ARENA_TAKE(arena, q->blocks + 1, sums.huge);
    TP_ARENA_TAKE(arena, q->blocks, sums.queue);
    TP_ARENA_TAKE(arena, (size_t)q->stages * (size_t)q->blocks, s->reach);
    fill_reach(&sums, 0.0, s->reach);
    return tp_stages_narrow(s, INFINITY) ? TP_OK : refuse(arena, &sums, s);
}

tp_status
tp_stages_open(tp_arena *arena, const tp_stage_problem *q, tp_stages *s)
{
    TP_TRY(check_problem(q));
    *s = (tp_stages){.blocks = q->blocks, .stages = q->stages, .micros = q->micros};
    *(q->blocking ? &s->wait_s : &s->lag_s) = q->comm_s;
    size_t places = (size_t)q->stages + 1;
    void *first = NULL, *behind = NULL, *alive = NULL;
    TP_TRY(take_sums(arena, q->forward_s, q->blocks, &s->forward_s));
    TP_TRY(take_sums(arena, q->backward_s, q->blocks, &s->backward_s));
    TP_TRY(tp_arena_take(arena, places, sizeof(int), &first));
    TP_TRY(tp_arena_take(arena, places, sizeof(int), &behind));
    TP_TRY(tp_arena_take(arena, places * ((size_t)q->blocks + 2), sizeof(int), &alive));
    s->first = first;
    s->behind = behind;
    s->alive = alive;
    return q->memory != NULL ? open_memory(arena, q, s) : TP_OK;
}
