/* What all parts of the BMPipe planner use: the check of the request, sums over layers, the in-flight vectors of the schedule's
 * order (micro-batches by chunk), and the simulation of a plan. */
#include "csrc/plan/bmpipe_core.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/base/clock.h"
#include "csrc/base/deadline.h"
#include "csrc/plan/in_flight.h"

/* ---- the request --------------------------------------------------------------------------------------------------------- */

static tp_status
number_ok(double value, int type, const char *field)
{
    if (isfinite(value) && value >= 0.0 && value < 1e100)
        return TP_OK;
    return tp_fail(TP_EVALUE, "%s of layer type %d is %g: a number from 0 to below 1e100 would be right", field, type, value);
}

static tp_status
type_ok(const tp_bmpipe_layers *l, int t)
{
    if (l->count[t] < 1)
        return tp_fail(TP_EVALUE, "count of layer type %d is %d: at least 1 would be right", t, l->count[t]);
    if (l->choices[t] < 1 || l->choices[t] > l->strategies)
        return tp_fail(TP_EVALUE, "layer type %d has %d strategies: 1 to %d would be right", t, l->choices[t],
                       l->strategies);
    TP_TRY(number_ok(l->forward_s[t], t, "fwd_s"));
    TP_TRY(number_ok(l->backward_s[t], t, "bwd_s"));
    TP_TRY(number_ok(l->static_bytes[t], t, "static_bytes"));
    for (int r = 0; r < l->choices[t]; r++) {
        TP_TRY(number_ok(l->extra_s[t * l->strategies + r], t, "extra_bwd_s"));
        TP_TRY(number_ok(l->activation_bytes[t * l->strategies + r], t, "activation_bytes"));
    }
    return TP_OK;
}

static tp_status
options_ok(const tp_bmpipe_options *o)
{
    if (o->stages < 1 || o->stages > TP_BMPIPE_LAYERS)
        return tp_fail(TP_EVALUE, "stages is %d: 1 to %d would be right", o->stages, TP_BMPIPE_LAYERS);
    if (o->chunks < 1 || o->chunks > TP_BMPIPE_LAYERS)
        return tp_fail(TP_EVALUE, "chunks is %d: 1 to %d would be right", o->chunks, TP_BMPIPE_LAYERS);
    if (o->micros < 1 || o->micros > 65536)
        return tp_fail(TP_EVALUE, "micro_batches is %d: 1 to 65536 would be right", o->micros);
    if (o->chunks > 1 && o->micros % o->stages != 0)
        return tp_fail(TP_EVALUE, "micro_batches is %d with %d stages: %d chunks (interleaved 1F1B) need a multiple of the stages",
                       o->micros, o->stages, o->chunks);
    if (!(o->memory_bytes > 0.0))
        return tp_fail(TP_EVALUE, "memory_bytes is %g: more than 0 would be right", o->memory_bytes);
    if (!isfinite(o->comm_s) || o->comm_s < 0.0)
        return tp_fail(TP_EVALUE, "comm_s is %g: a finite number of 0 or more would be right", o->comm_s);
    if (isnan(o->time_limit_s) || o->time_limit_s < 0.0)
        return tp_fail(TP_EVALUE, "time_limit_s is %g: 0 (none) or more would be right", o->time_limit_s);
    if ((int64_t)o->stages * o->chunks * o->micros > 1 << 24)
        return tp_fail(TP_EVALUE, "stages x chunks x micro_batches is %lld: at most %d would be right",
                       (long long)o->stages * o->chunks * o->micros, 1 << 24);
    if (o->effort < 0)
        return tp_fail(TP_EVALUE, "effort is %lld: 0 (a default) or more would be right", (long long)o->effort);
    return tp_in_flight_check(o->in_flight, o->micros, o->stages * o->chunks);
}

tp_status
tp_bmpipe_check(const tp_bmpipe_layers *l, const tp_bmpipe_options *o)
{
    if (l->types < 1)
        return tp_fail(TP_EVALUE, "there are %d layer types: at least 1 would be right", l->types);
    if (l->strategies < 1 || l->strategies > TP_BMPIPE_CHOICES)
        return tp_fail(TP_EVALUE, "a layer type has %d strategies: 1 to %d would be right", l->strategies,
                       TP_BMPIPE_CHOICES);
    int64_t n = 0;
    for (int t = 0; t < l->types; t++) {
        TP_TRY(type_ok(l, t));
        n += l->count[t];
    }
    if (n > TP_BMPIPE_LAYERS)
        return tp_fail(TP_EVALUE, "there are %lld layers: at most %d would be right", (long long)n, TP_BMPIPE_LAYERS);
    TP_TRY(options_ok(o));
    if ((int64_t)o->stages * o->chunks > n)
        return tp_fail(TP_EVALUE, "stages is %d and chunks is %d: at most %lld virtual stages for %lld layers would be right",
                       o->stages, o->chunks, (long long)n, (long long)n);
    double seconds = 2.0 * o->stages * o->chunks * o->comm_s;
    for (int t = 0; t < l->types; t++) {
        double most = 0.0;
        for (int r = 0; r < l->choices[t]; r++)
            most = fmax(most, l->extra_s[t * l->strategies + r]);
        seconds += l->count[t] * (l->forward_s[t] + l->backward_s[t] + most);
    }
    if (!(seconds * o->micros <= 1e300))
        return tp_fail(TP_EVALUE, "%d micro-batches take %g seconds one by one: at most 1e300 would be right", o->micros,
                       seconds * o->micros);
    return TP_OK;
}

/* ---- the room ------------------------------------------------------------------------------------------------------------ */

tp_status
tp_bmpipe_take(tp_bmpipe *p, size_t count, size_t size, void **out)
{
    return tp_arena_take(p->arena, count, size, out);
}

static tp_status
sum_layers(tp_bmpipe *p)
{
    const tp_bmpipe_layers *l = p->layers;
    double **sums[] = {&p->forward_s, &p->backward_s, &p->static_bytes, &p->least_bytes};
    void *memory = NULL;
    for (int t = 0; t < l->types; t++)
        p->n += l->count[t];
    size_t n = (size_t)p->n;
    TP_TRY(tp_bmpipe_take(p, 2 * n, sizeof(int32_t), &memory));
    p->type_of = memory;
    p->run_begin = p->type_of + n;
    TP_TRY(tp_bmpipe_take(p, 4 * (n + 1), sizeof(double), &memory));
    for (int i = 0; i < 4; i++)
        *sums[i] = (double *)memory + (size_t)i * (n + 1);
    int at = 0;
    for (int t = 0; t < l->types; t++) {
        double least = INFINITY;
        for (int r = 0; r < l->choices[t]; r++)
            least = fmin(least, l->activation_bytes[t * l->strategies + r]);
        int begin = at;
        for (int i = 0; i < l->count[t]; i++, at++) {
            p->type_of[at] = t;
            p->run_begin[at] = begin;
            p->forward_s[at + 1] = p->forward_s[at] + l->forward_s[t];
            p->backward_s[at + 1] = p->backward_s[at] + l->backward_s[t];
            p->static_bytes[at + 1] = p->static_bytes[at] + l->static_bytes[t];
            p->least_bytes[at + 1] = p->least_bytes[at] + least;
        }
    }
    return TP_OK;
}

/* Keep `now` among the maximal vectors [count][chunks]; returns the new count. */
static int
keep_vector(int32_t *vectors, int count, const int32_t *now, int chunks)
{
    int kept = 0;
    for (int i = 0; i < count; i++) {
        int below = 1, above = 1; /* is `now` below (above) this vector in every chunk? */
        for (int c = 0; c < chunks && (below || above); c++) {
            below &= now[c] <= vectors[i * chunks + c];
            above &= now[c] >= vectors[i * chunks + c];
        }
        if (below)
            return count; /* dominated, so it dominates none of the others */
        if (above)
            continue;
        memmove(vectors + kept * chunks, vectors + i * chunks, (size_t)chunks * sizeof *vectors);
        kept++;
    }
    memcpy(vectors + kept * chunks, now, (size_t)chunks * sizeof *vectors);
    return kept + 1;
}

/* Room for one more vector behind *count of them. */
static tp_status
grow_vectors(tp_bmpipe *p, int32_t **all, int count, int *room)
{
    void *memory = NULL;
    if (count < *room)
        return TP_OK;
    *room = 2 * count + 16;
    TP_TRY(tp_bmpipe_take(p, (size_t)*room * (size_t)p->chunks, sizeof(int32_t), &memory));
    if (count > 0)
        memcpy(memory, *all, (size_t)count * (size_t)p->chunks * sizeof(int32_t));
    *all = memory;
    return TP_OK;
}

/* The one vector of every stage that the caller gave. */
static tp_status
take_vectors(tp_bmpipe *p)
{
    void *memory = NULL;
    TP_TRY(tp_bmpipe_take(p, (size_t)p->stages + 1 + (size_t)p->virtuals, sizeof(int32_t), &memory));
    p->vector_begin = memory;
    p->vector = p->vector_begin + p->stages + 1;
    for (int x = 0; x < p->stages; x++) {
        p->vector_begin[x + 1] = x + 1;
        for (int c = 0; c < p->chunks; c++)
            p->vector[x * p->chunks + c] = p->options->in_flight[c * p->stages + x];
    }
    return TP_OK;
}

/* The Pareto-maximal in-flight vectors of every stage (PLANNERS.md 4.2): counts go up at F, down behind B. After the warm-up, of at
 * most (chunks + 1) * stages - 2 F, those of stages * chunks F come round again, however many micro-batches follow. */
static tp_status
find_vectors(tp_bmpipe *p, const tp_program *program)
{
    int32_t *all = NULL, *now = NULL;
    int total = 0, room = 0;
    void *memory = NULL;
    TP_TRY(tp_bmpipe_take(p, (size_t)p->stages + 1, sizeof(int32_t), &memory));
    p->vector_begin = memory;
    TP_TRY(tp_bmpipe_take(p, (size_t)p->chunks, sizeof(int32_t), &memory));
    now = memory;
    for (int x = 0; x < p->stages; x++) {
        int count = 0, left = 3 * p->virtuals; /* F to look at */
        memset(now, 0, (size_t)p->chunks * sizeof *now);
        for (int64_t k = program->begin[x]; k < program->begin[x + 1] && left > 0; k++) {
            int forward = program->code[k].op == TP_OP_F;
            left -= forward;
            TP_TRY(tp_deadline_check_after(&p->asked, 8 + (int64_t)count * p->chunks));
            now[program->code[k].stage / p->stages] += forward ? 1 : -1;
            TP_TRY(grow_vectors(p, &all, total + count, &room));
            if (forward)
                count = keep_vector(all + (size_t)total * (size_t)p->chunks, count, now, p->chunks);
        }
        total += count;
        p->vector_begin[x + 1] = total;
    }
    p->vector = all;
    return TP_OK;
}

static tp_status
open_schedule(tp_bmpipe *p)
{
    tp_program *program = NULL;
    void *memory = NULL;
    TP_TRY(tp_bmpipe_take(p, (size_t)p->micros, sizeof(int32_t), &memory));
    int32_t *slices = memory;
    for (int q = 0; q < p->micros; q++)
        slices[q] = 1;
    TP_TRY(tp_program_build(p->chunks > 1 ? TP_INTERLEAVED : TP_1F1B, p->stages, p->chunks, p->micros, slices, &program));
    tp_status status = tp_sim_open(program, &p->sim);
    if (status == TP_OK)
        status = p->options->in_flight != NULL ? take_vectors(p) : find_vectors(p, program);
    tp_program_close(program);
    return status;
}

tp_status
tp_bmpipe_open(const tp_bmpipe_layers *layers, const tp_bmpipe_options *options, tp_arena *arena, tp_bmpipe *p)
{
    *p = (tp_bmpipe){.layers = layers, .options = options, .arena = arena, .stages = options->stages,
                     .chunks = options->chunks, .virtuals = options->stages * options->chunks, .micros = options->micros};
    if (options->time_limit_s > 0.0 && options->time_limit_s < 1e9)
        p->end_ns = p->deadline_ns = tp_clock_ns() + (int64_t)(options->time_limit_s * 1e9);
    size_t virtuals = (size_t)p->virtuals;
    void *memory = NULL;
    if (layers != NULL)
        TP_TRY(sum_layers(p));
    TP_TRY(tp_bmpipe_take(p, 3 * virtuals, sizeof(double), &memory));
    p->load = memory;
    p->link_s = p->load + 2 * virtuals;
    for (size_t v = 0; v < virtuals; v++)
        p->link_s[v] = options->comm_s;
    TP_TRY(tp_bmpipe_take(p, TP_OPS * virtuals, sizeof(int64_t), &memory));
    p->path = memory;
    p->durations = (tp_durations){.stage_stride = 1, .comm_s = p->link_s};
    p->durations.seconds[TP_OP_F] = p->load;
    p->durations.seconds[TP_OP_B] = p->load + virtuals;
    TP_TRY(open_schedule(p));
    if (layers == NULL)
        return TP_OK;
    TP_TRY(tp_bmpipe_take(p, (size_t)p->n * (size_t)(p->n + 1), sizeof(tp_bmpipe_front *), &memory));
    p->front = memory;
    TP_TRY(tp_bmpipe_take(p, 1, sizeof(tp_bmpipe_front) + sizeof(tp_bmpipe_point), &memory));
    p->nothing = memory;
    *p->nothing = (tp_bmpipe_front){.point = (tp_bmpipe_point *)(p->nothing + 1), .count = 1, .type = -1, .exact = 1};
    size_t room = (size_t)layers->strategies * TP_BMPIPE_POINTS + (size_t)layers->types;
    TP_TRY(tp_bmpipe_take(p, room, sizeof(tp_bmpipe_point), &memory));
    p->merge = memory;
    return TP_OK;
}

void
tp_bmpipe_close(tp_bmpipe *p)
{
    tp_sim_close(p->sim);
}

/* ---- evaluation ---------------------------------------------------------------------------------------------------------- */

double
tp_bmpipe_simulate(tp_bmpipe *p)
{
    double makespan = 0.0;
    tp_sim_run(p->sim, &p->durations, &makespan);
    p->late |= tp_deadline_was_told();
    p->simulations++;
    return makespan;
}

void
tp_bmpipe_last_path(tp_bmpipe *p, tp_bmpipe_row *row)
{
    tp_sim_path(p->sim, &p->durations, p->path, &row->lag_s);
    for (int v = 0; v < p->virtuals; v++) {
        row->run[v] = (double)p->path[TP_OP_F * p->virtuals + v];
        row->run[p->virtuals + v] = (double)p->path[TP_OP_B * p->virtuals + v];
    }
}

double
tp_bmpipe_row_value(const tp_bmpipe *p, const tp_bmpipe_row *row, const double *load)
{
    double sum[4] = {row->lag_s, 0.0, 0.0, 0.0};
    int v = 0, count = 2 * p->virtuals;
    for (; v + 4 <= count; v += 4)
        for (int i = 0; i < 4; i++)
            sum[i] += row->run[v + i] * load[v + i];
    for (; v < count; v++)
        sum[0] += row->run[v] * load[v];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

int
tp_bmpipe_is_late(tp_bmpipe *p)
{
    if (!p->late && p->deadline_ns != 0)
        p->late = tp_clock_ns() > p->deadline_ns;
    p->late |= tp_deadline_late();
    if (!p->late && p->chunks == 1 && p->options->effort > 0) /* the search of several counts its own */
        p->late = p->nodes + 25 * (int64_t)p->micros * p->evaluations > p->options->effort;
    return p->late;
}

double
tp_bmpipe_bytes(const tp_bmpipe *p, int stage, double static_bytes, const double *kept)
{
    double most = 0.0;
    for (int k = p->vector_begin[stage]; k < p->vector_begin[stage + 1]; k++) {
        double bytes = 0.0;
        for (int c = 0; c < p->chunks; c++)
            bytes += p->vector[k * p->chunks + c] * kept[c];
        most = bytes > most ? bytes : most;
    }
    return static_bytes + most;
}

tp_status
tp_bmpipe_path(const tp_bmpipe_options *options, const double *forward_s, const double *backward_s, double *makespan_s,
               int64_t *forward_runs, int64_t *backward_runs, double *lag_s)
{
    tp_arena arena;
    tp_bmpipe p;
    TP_TRY(options_ok(options));
    int virtuals = options->stages * options->chunks;
    for (int v = 0; v < virtuals; v++)
        if (!isfinite(forward_s[v]) || forward_s[v] < 0.0 || !isfinite(backward_s[v]) || backward_s[v] < 0.0)
            return tp_fail(TP_EVALUE, "seconds of virtual stage %d are %g and %g: finite numbers of 0 or more would be right",
                           v, forward_s[v], backward_s[v]);
    TP_TRY(tp_arena_open(&arena));
    tp_status status = tp_bmpipe_open(NULL, options, &arena, &p);
    if (status == TP_OK) {
        memcpy(p.load, forward_s, (size_t)virtuals * sizeof *p.load);
        memcpy(p.load + virtuals, backward_s, (size_t)virtuals * sizeof *p.load);
        *makespan_s = tp_bmpipe_simulate(&p);
        tp_sim_path(p.sim, &p.durations, p.path, lag_s);
        memcpy(forward_runs, p.path + (size_t)TP_OP_F * (size_t)virtuals, (size_t)virtuals * sizeof *forward_runs);
        memcpy(backward_runs, p.path + (size_t)TP_OP_B * (size_t)virtuals, (size_t)virtuals * sizeof *backward_runs);
    }
    tp_bmpipe_close(&p);
    tp_arena_close(&arena);
    return status;
}
