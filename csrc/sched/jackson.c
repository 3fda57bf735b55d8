/* Of each rank a one-machine problem: no pass can begin before the longest chain of others that leads to it (its head), and behind it
 * comes the longest one that it leads to (its tail). No schedule of one machine, preemptive ones too, ends before
 * max over sets of passes (least head + work of all + least tail), which Jackson's rule attains: always the job with the longest tail
 * of those that have come (Jackson 1955; Carlier 1982).
 *
 * Chains are those that check demands of each micro-batch alone: forwards through stages and slices ascending, backwards through both
 * descending and behind their forward (and its recomputation), weight gradients behind their I and through slices descending. Nothing
 * is said of the order of two micro-batches. Those alike have equal heads and tails, and are one job for each pass. */
#include "csrc/sched/internal.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/base/deadline.h"

/* Jobs with heads and tails of their own: beyond these, micro-batches of as many slices share the least of each, a weaker bound.
 * Beyond the second number there is none: of so many slices the way there and back is short, and the simulator is quicker. */
enum { MOST_JOBS = 1 << 16, TOO_MANY_JOBS = 1 << 18 };

typedef struct {
    double head, seconds, tail;
} job;

/* What a rank does with a slice on a stage. RF is right before its F and RB before its B or I; SF, SB may stand later. */
enum { FORWARD, SENT, AGAIN, BACKWARD, RETURNED, WEIGHTS, KINDS };

typedef struct {
    const tp_program *p;
    const tp_durations *d;
    int64_t units;
    int split, copies;     /* I and W apart; messages take time of the ranks */
    const uint8_t *again;  /* [stages * units] has R; NULL: none has */
    double *end_s;         /* [ranks] tp_sched_before_meeting_s */
    int32_t *like;         /* [micros] the micro-batch whose jobs this one's are */
    int32_t *times;        /* [micros] how many are like it */
    int32_t *newest;       /* [max_slices + 1] the last one that has its own, of so many slices; -1 */
    int64_t *begin;        /* [micros] its jobs, [each stage of its copy][slices][KINDS] */
    job *jobs, *own;       /* all; [stages * max_slices * KINDS] of one micro-batch */
    int64_t count;
    job *line, **heap;     /* of a rank: by head; those that have come, the longest tail first */
    int64_t asked;         /* steps since somebody was asked whether to stop */
} machine;

static double
larger(double a, double b)
{
    return a > b ? a : b;
}

static double
smaller(double a, double b)
{
    return a < b ? a : b;
}

/* ---- which micro-batches are alike ------------------------------------------------------------------------------------- */

static int
same_row(const double *table, int64_t stride, int64_t a, int64_t b, int slices)
{
    if (table == NULL || stride == 1)
        return table == NULL || memcmp(table + a, table + b, (size_t)slices * sizeof *table) == 0;
    for (int s = 0; s < slices; s++)
        if (table[(a + s) * stride] != table[(b + s) * stride])
            return 0;
    return 1;
}

/* Of as many slices and of one copy of the model: do all passes and messages take the same? */
static int
alike(const machine *m, int q, int other)
{
    static const tp_op ops[] = {TP_OP_F, TP_OP_B, TP_OP_I, TP_OP_W, TP_OP_R, TP_OP_SF, TP_OP_RF, TP_OP_SB, TP_OP_RB};
    const tp_program *p = m->p;
    const tp_durations *d = m->d;
    int64_t a = p->offset[q], b = p->offset[other];
    int slices = p->slices[q], each = tp_program_copy_stages(p), first = q / tp_program_copy_micros(p) * each;
    for (int v = first; v < first + each; v++) {
        for (int k = 0; d->unit_stride != 0 && k < (int)(sizeof ops / sizeof *ops); k++) {
            const double *table = d->seconds[ops[k]];
            if (!same_row(table == NULL ? NULL : table + v * d->stage_stride, d->unit_stride, a, b, slices))
                return 0;
        }
        int64_t row = v * m->units;
        if (!same_row(d->comm_unit_s == NULL ? NULL : d->comm_unit_s + row, 1, a, b, slices) ||
            !same_row(d->back_comm_unit_s == NULL ? NULL : d->back_comm_unit_s + row, 1, a, b, slices) ||
            (m->again != NULL && memcmp(m->again + row + a, m->again + row + b, (size_t)slices) != 0))
            return 0;
    }
    return 1;
}

/* Fills like and begin, and counts jobs. apart == 0: those of as many slices share theirs, alike or not. */
static void
sort_micros(machine *m, int apart)
{
    const tp_program *p = m->p;
    int each = tp_program_copy_stages(p);
    m->count = 0;
    memset(m->times, 0, (size_t)p->micros * sizeof *m->times);
    for (int q = 0; q < p->micros && !tp_deadline_told_after(&m->asked, 8 * (int64_t)p->slices[q] * each); q++) {
        if (q % tp_program_copy_micros(p) == 0)
            memset(m->newest, -1, ((size_t)p->max_slices + 1) * sizeof *m->newest);
        int32_t *newest = &m->newest[p->slices[q]];
        if (*newest < 0 || (apart && !alike(m, q, *newest))) {
            *newest = q;
            m->begin[q] = m->count;
            m->count += (int64_t)each * p->slices[q] * KINDS;
        }
        m->like[q] = *newest;
        m->times[*newest]++;
    }
}

/* ---- heads and tails of one micro-batch ---------------------------------------------------------------------------------- */

static job *
own_job(const machine *m, int v, int s, int kind)
{
    return m->own + ((int64_t)v * m->p->max_slices + s) * KINDS + kind;
}

static double
end_of(const job *j)
{
    return j->head + j->seconds;
}

/* From the end of what comes before j to that of the step. */
static double
rest_from(const job *j)
{
    return j->seconds + j->tail;
}

static double
lag_s(const machine *m, int from, int to, int64_t u)
{
    return m->p->rank_of[from] == m->p->rank_of[to] ? 0.0 : tp_durations_lag_s(m->d, m->units, to < from, 0, from, u);
}

static void
set_seconds(const machine *m, int v, int s, int64_t u)
{
    const tp_durations *d = m->d;
    int below = m->copies && tp_program_remote(m->p, v), above = m->copies && tp_program_remote(m->p, v + 1);
    own_job(m, v, s, FORWARD)->seconds = tp_durations_s(d, TP_OP_F, 0, v, u) + (below ? tp_durations_s(d, TP_OP_RF, 0, v, u) : 0.0);
    own_job(m, v, s, SENT)->seconds = above ? tp_durations_s(d, TP_OP_SF, 0, v, u) : 0.0;
    own_job(m, v, s, AGAIN)->seconds =
        m->again != NULL && m->again[v * m->units + u] ? tp_durations_s(d, TP_OP_R, 0, v, u) : 0.0;
    own_job(m, v, s, BACKWARD)->seconds = tp_durations_s(d, m->split ? TP_OP_I : TP_OP_B, 0, v, u) +
                                          (above ? tp_durations_s(d, TP_OP_RB, 0, v, u) : 0.0);
    own_job(m, v, s, RETURNED)->seconds = below ? tp_durations_s(d, TP_OP_SB, 0, v, u) : 0.0;
    own_job(m, v, s, WEIGHTS)->seconds = m->split ? tp_durations_s(d, TP_OP_W, 0, v, u) : 0.0;
}

static void
set_heads(const machine *m, int q, int first, int last)
{
    int slices = m->p->slices[q];
    int64_t u = m->p->offset[q];
    for (int v = first; v <= last; v++)
        for (int s = 0; s < slices; s++) {
            job *f = own_job(m, v, s, FORWARD);
            set_seconds(m, v, s, u + s);
            f->head = v > first ? end_of(own_job(m, v - 1, s, SENT)) + lag_s(m, v - 1, v, u + s) : 0.0;
            if (s > 0)
                f->head = larger(f->head, end_of(own_job(m, v, s - 1, FORWARD)));
            own_job(m, v, s, SENT)->head = own_job(m, v, s, AGAIN)->head = end_of(f);
        }
    for (int v = last; v >= first; v--)
        for (int s = slices - 1; s >= 0; s--) {
            job *b = own_job(m, v, s, BACKWARD), *w = own_job(m, v, s, WEIGHTS);
            b->head = end_of(own_job(m, v, s, AGAIN));
            if (v < last)
                b->head = larger(b->head, end_of(own_job(m, v + 1, s, RETURNED)) + lag_s(m, v + 1, v, u + s));
            if (s < slices - 1)
                b->head = larger(b->head, end_of(own_job(m, v, s + 1, BACKWARD)));
            own_job(m, v, s, RETURNED)->head = w->head = end_of(b);
            if (s < slices - 1)
                w->head = larger(w->head, end_of(own_job(m, v, s + 1, WEIGHTS)));
        }
}

static void
set_tails(const machine *m, int q, int first, int last)
{
    int slices = m->p->slices[q];
    int64_t u = m->p->offset[q];
    for (int v = first; v <= last; v++)
        for (int s = 0; s < slices; s++) {
            job *b = own_job(m, v, s, BACKWARD), *w = own_job(m, v, s, WEIGHTS), *away = own_job(m, v, s, RETURNED);
            w->tail = s > 0 ? rest_from(own_job(m, v, s - 1, WEIGHTS)) : m->end_s[m->p->rank_of[v]];
            away->tail = m->end_s[m->p->rank_of[v]];
            if (v > first)
                away->tail = larger(away->tail, lag_s(m, v, v - 1, u + s) + rest_from(own_job(m, v - 1, s, BACKWARD)));
            b->tail = larger(rest_from(w), rest_from(away));
            if (s > 0)
                b->tail = larger(b->tail, rest_from(own_job(m, v, s - 1, BACKWARD)));
        }
    for (int v = last; v >= first; v--)
        for (int s = slices - 1; s >= 0; s--) {
            job *f = own_job(m, v, s, FORWARD), *again = own_job(m, v, s, AGAIN), *away = own_job(m, v, s, SENT);
            again->tail = rest_from(own_job(m, v, s, BACKWARD));
            away->tail = m->end_s[m->p->rank_of[v]];
            if (v < last)
                away->tail = larger(away->tail, lag_s(m, v, v + 1, u + s) + rest_from(own_job(m, v + 1, s, FORWARD)));
            f->tail = larger(rest_from(again), rest_from(away));
            if (s < slices - 1)
                f->tail = larger(f->tail, rest_from(own_job(m, v, s + 1, FORWARD)));
        }
}

/* Adds a micro-batch to the jobs that it shares: a set's bound grows with heads and tails, so the least of each are safe. */
static void
add_micro(const machine *m, int q, int first, int last)
{
    job *to = m->jobs + m->begin[m->like[q]];
    int opens = m->like[q] == q, slices = m->p->slices[q];
    set_heads(m, q, first, last);
    set_tails(m, q, first, last);
    for (int v = first; v <= last; v++)
        for (int k = 0; k < slices * KINDS; k++, to++) {
            const job *one = own_job(m, v, 0, k);
            *to = opens ? *one
                        : (job){smaller(to->head, one->head), to->seconds + one->seconds, smaller(to->tail, one->tail)};
        }
}

static void
add_micros(machine *m, int apart)
{
    const tp_program *p = m->p;
    int each = tp_program_copy_stages(p);
    for (int q = 0; q < p->micros && !tp_deadline_told_after(&m->asked, 64 * (int64_t)p->slices[q] * each); q++) {
        int first = q / tp_program_copy_micros(p) * each;
        if (m->like[q] == q || !apart)
            add_micro(m, q, first, first + each - 1);
    }
    for (int q = 0; apart && q < p->micros; q++)
        for (int64_t k = 0; m->times[q] > 1 && k < (int64_t)each * p->slices[q] * KINDS; k++)
            m->jobs[m->begin[q] + k].seconds *= m->times[q];
}

/* ---- one rank ------------------------------------------------------------------------------------------------------------- */

static int
by_head(const void *a, const void *b)
{
    const job *x = a, *y = b;
    if (x->head != y->head)
        return x->head < y->head ? -1 : 1;
    return x->tail != y->tail ? (x->tail > y->tail ? -1 : 1) : (x->seconds > y->seconds) - (x->seconds < y->seconds);
}

static void
push(job **heap, int64_t *size, job *one)
{
    int64_t at = (*size)++;
    for (; at > 0 && heap[(at - 1) / 2]->tail < one->tail; at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = one;
}

static void
pop(job **heap, int64_t *size)
{
    job *last = heap[--*size];
    int64_t at = 0;
    for (int64_t next = 1; next < *size; next = 2 * at + 1) {
        next += next + 1 < *size && heap[next + 1]->tail > heap[next]->tail;
        if (heap[next]->tail <= last->tail)
            break;
        heap[at] = heap[next];
        at = next;
    }
    heap[at] = last;
}

/* The moment at which all has ended under Jackson's rule. Uses up the seconds of line[count]. */
static double
preemptive_s(machine *m, int64_t count)
{
    double now = 0.0, most = 0.0;
    int64_t come = 0, waiting = 0;
    qsort(m->line, (size_t)count, sizeof *m->line, by_head);
    while ((come < count || waiting > 0) && !tp_deadline_told_after(&m->asked, 32)) {
        if (waiting == 0)
            now = larger(now, m->line[come].head);
        while (come < count && m->line[come].head <= now)
            push(m->heap, &waiting, &m->line[come++]);
        job *one = m->heap[0];
        double next = come < count ? m->line[come].head : 0.0;
        if (come < count && now + one->seconds > next) {
            one->seconds -= next - now;
            now = next;
        } else {
            now += one->seconds;
            most = larger(most, now + one->tail);
            pop(m->heap, &waiting);
        }
    }
    return most;
}

static double
rank_s(machine *m, int rank)
{
    const tp_program *p = m->p;
    int each = tp_program_copy_stages(p);
    int64_t count = 0;
    for (int q = 0; q < p->micros; q++) {
        int first = q / tp_program_copy_micros(p) * each, width = p->slices[q] * KINDS;
        for (int v = first; m->like[q] == q && v < first + each; v++)
            for (int k = 0; p->rank_of[v] == rank && k < width; k++) {
                const job *one = &m->jobs[m->begin[q] + (int64_t)(v - first) * width + k];
                if (one->seconds > 0.0)
                    m->line[count++] = *one;
            }
    }
    return preemptive_s(m, count);
}

/* ---- all of them ------------------------------------------------------------------------------------------------------------ */

static tp_status
mark_again(const tp_program *p, int64_t units, uint8_t **again)
{
    *again = calloc((size_t)(p->stages * units), 1);
    if (*again == NULL)
        return tp_fail(TP_EMEMORY, "no memory for what %d stages do again", p->stages);
    for (int64_t k = 0; k < p->begin[p->ranks]; k++)
        if (p->code[k].op == TP_OP_R)
            (*again)[p->code[k].stage * units + tp_program_unit(p, &p->code[k])] = 1;
    return TP_OK;
}

static tp_status
sort_all(machine *m, int *apart)
{
    const tp_program *p = m->p;
    size_t micros = (size_t)p->micros;
    m->like = malloc(micros * sizeof *m->like);
    m->times = malloc(micros * sizeof *m->times);
    m->newest = malloc(((size_t)p->max_slices + 1) * sizeof *m->newest);
    m->begin = malloc(micros * sizeof *m->begin);
    if (m->like == NULL || m->times == NULL || m->newest == NULL || m->begin == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the bound of %d micro-batches", p->micros);
    sort_micros(m, *apart = 1);
    if (m->count > MOST_JOBS)
        sort_micros(m, *apart = 0);
    return tp_deadline_check_told();
}

static tp_status
find(machine *m, double *seconds)
{
    const tp_program *p = m->p;
    int apart = 1;
    TP_TRY(sort_all(m, &apart));
    int64_t own = (int64_t)p->stages * p->max_slices * KINDS;
    if (m->count > TOO_MANY_JOBS || own > TOO_MANY_JOBS)
        return TP_OK;
    m->end_s = malloc((size_t)p->ranks * sizeof *m->end_s);
    m->own = malloc((size_t)own * sizeof *m->own);
    m->jobs = malloc((size_t)m->count * sizeof *m->jobs);
    m->line = malloc((size_t)m->count * sizeof *m->line);
    m->heap = malloc((size_t)m->count * sizeof *m->heap);
    if (m->end_s == NULL || m->own == NULL || m->jobs == NULL || m->line == NULL || m->heap == NULL)
        return tp_fail(TP_EMEMORY, "no memory for the bound of %d stages", p->stages);
    for (int r = 0; r < p->ranks; r++)
        m->end_s[r] = tp_sched_before_meeting_s(p, m->d, r);
    add_micros(m, apart);
    TP_TRY(tp_deadline_check_told());
    for (int r = 0; r < p->ranks; r++)
        *seconds = larger(*seconds, rank_s(m, r));
    *seconds *= 1.0 - 1e-12 - 4e-16 * (double)p->begin[p->ranks]; /* the simulator adds the same in another order */
    return tp_deadline_check_told();
}

tp_status
tp_sched_jackson(const tp_program *program, unsigned ops, const tp_durations *durations, double *seconds)
{
    const unsigned others = TP_SCHED_HAS_HALVES | TP_SCHED_GUESTS | TP_SCHED_BIT(TP_OP_SO) | TP_SCHED_BIT(TP_OP_SI) |
                            TP_SCHED_BIT(TP_OP_U), both = TP_SCHED_BIT(TP_OP_B) | TP_SCHED_BIT(TP_OP_I);
    *seconds = 0.0;
    if (ops & others || (ops & both) == both)
        return TP_OK;
    uint8_t *again = NULL;
    machine m = {.p = program, .d = durations, .units = tp_program_units(program), .split = (ops & TP_SCHED_BIT(TP_OP_I)) != 0,
                 .copies = tp_sched_has_copies(durations)};
    tp_status status = ops & TP_SCHED_BIT(TP_OP_R) ? mark_again(program, m.units, &again) : TP_OK;
    m.again = again;
    if (status == TP_OK)
        status = find(&m, seconds);
    free(m.end_s);
    free(m.like);
    free(m.times);
    free(m.newest);
    free(m.begin);
    free(m.own);
    free(m.jobs);
    free(m.line);
    free(m.heap);
    free(again);
    return status;
}
