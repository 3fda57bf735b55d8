/* A program in memory: opened, closed, compared, made of instructions; who sends to whom; and how a rule that it breaks is told. */
#include "csrc/sched/internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_RANKS 32767 /* peer is an int16 */
#define MAX_INDEX 65536 /* stage, micro and slice are uint16 */

const char *
tp_op_name(int op)
{
    static const char *const names[] = {
#define NAME(name) #name,
        TP_OP_MAP(NAME)
#undef NAME
    };
    return op >= 0 && op < TP_OPS ? names[op] : "?";
}

static tp_status
dimensions_ok(int ranks, int stages, int micros, const int32_t *slices, const int32_t *rank_of, const int64_t *counts)
{
    if (ranks < 1 || ranks > MAX_RANKS)
        return tp_fail(TP_EVALUE, "ranks is %d: 1 to %d would be right", ranks, MAX_RANKS);
    if (stages < 1 || stages > MAX_INDEX)
        return tp_fail(TP_EVALUE, "stages is %d: 1 to %d would be right", stages, MAX_INDEX);
    if (micros < 1 || micros > MAX_INDEX)
        return tp_fail(TP_EVALUE, "micro-batches is %d: 1 to %d would be right", micros, MAX_INDEX);
    for (int q = 0; q < micros; q++)
        if (slices[q] < 1 || slices[q] > MAX_INDEX)
            return tp_fail(TP_EVALUE, "slices of micro-batch %d is %d: 1 to %d would be right", q, slices[q],
                           MAX_INDEX);
    for (int v = 0; v < stages; v++)
        if (rank_of[v] < 0 || rank_of[v] >= ranks)
            return tp_fail(TP_EVALUE, "rank of stage %d is %d: 0 to %d would be right", v, rank_of[v], ranks - 1);
    int64_t total = 0;
    for (int r = 0; r < ranks; r++) {
        if (counts[r] < 0 || counts[r] > INT32_MAX)
            return tp_fail(TP_EVALUE, "rank %d has %lld instructions: 0 to %d would be right", r, (long long)counts[r],
                           INT32_MAX);
        total += counts[r];
    }
    if (total > INT32_MAX)
        return tp_fail(TP_EVALUE, "the program has %lld instructions: at most %d would be right", (long long)total,
                       INT32_MAX);
    return TP_OK;
}

tp_status
tp_program_open(int ranks, int stages, int micros, const int32_t *slices, const int32_t *rank_of, const int64_t *counts,
                tp_program **out)
{
    TP_TRY(dimensions_ok(ranks, stages, micros, slices, rank_of, counts));
    int64_t total = 0;
    for (int r = 0; r < ranks; r++)
        total += counts[r];
    tp_program *p = calloc(1, sizeof *p);
    if (p != NULL) {
        p->slices = malloc((size_t)micros * sizeof *p->slices);
        p->offset = malloc(((size_t)micros + 1) * sizeof *p->offset);
        p->rank_of = malloc((size_t)stages * sizeof *p->rank_of);
        p->begin = malloc(((size_t)ranks + 1) * sizeof *p->begin);
        p->code = calloc((size_t)total + 1, sizeof *p->code);
    }
    if (p == NULL || p->slices == NULL || p->offset == NULL || p->rank_of == NULL || p->begin == NULL ||
        p->code == NULL) {
        tp_program_close(p);
        return tp_fail(TP_EMEMORY, "no memory for a program of %lld instructions", (long long)total);
    }
    p->ranks = ranks;
    p->stages = stages;
    p->copies = 1;
    p->micros = micros;
    memcpy(p->slices, slices, (size_t)micros * sizeof *slices);
    memcpy(p->rank_of, rank_of, (size_t)stages * sizeof *rank_of);
    p->offset[0] = 0;
    for (int q = 0; q < micros; q++) {
        p->offset[q + 1] = p->offset[q] + slices[q];
        p->max_slices = slices[q] > p->max_slices ? slices[q] : p->max_slices;
    }
    p->begin[0] = 0;
    for (int r = 0; r < ranks; r++)
        p->begin[r + 1] = p->begin[r] + counts[r];
    *out = p;
    return TP_OK;
}

tp_status
tp_sched_open_like(const tp_program *program, const int64_t *counts, tp_program **out)
{
    TP_TRY(tp_program_open(program->ranks, program->stages, program->micros, program->slices, program->rank_of, counts, out));
    (*out)->copies = program->copies;
    return TP_OK;
}

void
tp_program_close(tp_program *program)
{
    if (program == NULL)
        return;
    free(program->slices);
    free(program->offset);
    free(program->rank_of);
    free(program->begin);
    free(program->code);
    free(program);
}

int
tp_program_equal(const tp_program *a, const tp_program *b)
{
    return a->ranks == b->ranks && a->stages == b->stages && a->micros == b->micros && a->copies == b->copies &&
           memcmp(a->slices, b->slices, (size_t)a->micros * sizeof *a->slices) == 0 &&
           memcmp(a->rank_of, b->rank_of, (size_t)a->stages * sizeof *a->rank_of) == 0 &&
           memcmp(a->begin, b->begin, ((size_t)a->ranks + 1) * sizeof *a->begin) == 0 &&
           memcmp(a->code, b->code, (size_t)a->begin[a->ranks] * sizeof *a->code) == 0;
}

unsigned
tp_sched_ops(const tp_program *program)
{
    unsigned ops = 0, flags = 0, beside = 0;
    for (int64_t i = 0; i < program->begin[program->ranks]; i++) {
        ops |= TP_SCHED_BIT(program->code[i].op & 31);
        flags |= program->code[i].flags;
        beside |= tp_sched_goes_beside(&program->code[i]) ? TP_SCHED_HAS_BESIDE : 0;
    }
    return ops | beside | (flags & TP_HALVES ? TP_SCHED_HAS_HALVES : 0) | (flags & TP_TWO_PLACES ? TP_SCHED_HAS_TWO_PLACES : 0);
}

int
tp_sched_is_dense(const tp_program *program)
{
    /* of two copies half of the table is of nobody */
    return (int64_t)program->stages * tp_program_units(program) <= program->copies * program->begin[program->ranks];
}

/* ---- from instructions alone ------------------------------------------------------------------------------------------- */

typedef struct {
    int32_t *slices, *rank_of, *votes;
    int32_t stages, micros;
} shape;

/* A stage belongs to the rank that has the majority of its instructions (Boyer and Moore's vote: one pass, no table of
 * stages x ranks), so that one misplaced instruction is the culprit and not all the others. */
static void
read_shape(shape *s, int ranks, const int64_t *counts, const tp_instr *code)
{
    for (int v = 0; v < s->stages; v++)
        s->rank_of[v] = v % ranks;
    for (int q = 0; q < s->micros; q++)
        s->slices[q] = 1;
    for (int r = 0; r < ranks; r++)
        for (int64_t i = 0; i < counts[r]; i++, code++) {
            int v = code->stage, votes = !tp_sched_is_host(code->op); /* those stand where the stage is not */
            if (votes && s->votes[v] == 0)
                s->rank_of[v] = r;
            if (votes)
                s->votes[v] += s->rank_of[v] == r ? 1 : -1;
            if (s->slices[code->micro] <= code->slice)
                s->slices[code->micro] = code->slice + 1;
        }
}

/* ESCHEDULE of the instruction `at`, counted over all ranks. */
static tp_status
refuse_op(const int64_t *counts, int64_t at, int op)
{
    int rank = 0;
    for (; at >= counts[rank]; rank++)
        at -= counts[rank];
    tp_status status = tp_fail(TP_ESCHEDULE, "rank %d, position %lld: there is no operation %d: 0 to %d would be right", rank,
                               (long long)at, op, TP_OPS - 1);
    tp_error_locate(rank, (int)at);
    return status;
}

tp_status
tp_program_from_code(int ranks, const int64_t *counts, const tp_instr *code, int keep_slots, tp_program **out)
{
    if (ranks < 1 || ranks > MAX_RANKS)
        return tp_fail(TP_EVALUE, "the program has %d ranks: 1 to %d would be right", ranks, MAX_RANKS);
    int64_t total = 0;
    for (int r = 0; r < ranks; r++)
        total += counts[r];
    shape s = {.stages = 0, .micros = 0};
    int finished = 0;
    for (int64_t i = 0; i < total; i++) {
        if (code[i].op >= TP_OPS)
            return refuse_op(counts, i, code[i].op);
        s.stages = code[i].stage >= s.stages ? code[i].stage + 1 : s.stages;
        s.micros = code[i].micro >= s.micros ? code[i].micro + 1 : s.micros;
        finished |= code[i].op == TP_OP_OPT;
    }
    if (total == 0)
        return tp_fail(TP_EVALUE, "the program has no instruction");
    s.slices = malloc((size_t)s.micros * sizeof *s.slices);
    s.rank_of = malloc((size_t)s.stages * sizeof *s.rank_of);
    s.votes = calloc((size_t)s.stages, sizeof *s.votes);
    tp_program *p = NULL;
    tp_status status = TP_OK;
    if (s.slices == NULL || s.rank_of == NULL || s.votes == NULL) {
        status = tp_fail(TP_EMEMORY, "no memory for %d stages and %d micro-batches", s.stages, s.micros);
    } else {
        read_shape(&s, ranks, counts, code);
        status = tp_program_open(ranks, s.stages, s.micros, s.slices, s.rank_of, counts, &p);
    }
    free(s.slices);
    free(s.rank_of);
    free(s.votes);
    if (status == TP_OK) {
        memcpy(p->code, code, (size_t)total * sizeof *code);
        p->copies = tp_sched_copies(p);
        for (int64_t i = 0; i < total && !keep_slots; i++)
            p->code[i].slot = 0;
        if (!keep_slots && finished && tp_sched_is_dense(p))
            status = tp_program_assign_slots(p);
    }
    if (status != TP_OK) {
        tp_program_close(p);
        return status;
    }
    *out = p;
    return TP_OK;
}

/* ---- refusing ----------------------------------------------------------------------------------------------------------- */

tp_status
tp_sched_refuse(const tp_program *program, int rank, int64_t position, const char *format, ...)
{
    enum { AROUND = 3 };
    char text[1000];
    int64_t count = program->begin[rank + 1] - program->begin[rank];
    const tp_instr *code = program->code + program->begin[rank];
    char word[TP_WORD] = "end";
    if (position < count)
        tp_instr_print(&code[position], word);
    size_t used = (size_t)snprintf(text, sizeof text, "rank %d, position %lld, %s: ", rank, (long long)position, word);
    va_list arguments;
    va_start(arguments, format);
    int more =
        vsnprintf(text + used, sizeof text - used - 400, format, arguments); /* 400: room for the neighbourhood */
    va_end(arguments);
    size_t room = sizeof text - used - 400 - 1;
    used += (size_t)more < room ? (size_t)more : room;
    int64_t first = position > AROUND ? position - AROUND : 0;
    for (int64_t i = first; i <= position + AROUND && i <= count && used < sizeof text - 1; i++) {
        if (i < count)
            tp_instr_print(&code[i], word);
        else
            memcpy(word, "end", sizeof "end");
        more = snprintf(text + used, sizeof text - used, "\n    [%lld] %s%s", (long long)i, word,
                        i == position ? "   <-- here" : "");
        room = sizeof text - used - 1;
        used += (size_t)more < room ? (size_t)more : room;
    }
    tp_status status = tp_fail(TP_ESCHEDULE, "%s", text);
    tp_error_locate(rank, (int)position);
    return status;
}

/* ---- pairs of ranks that talk -------------------------------------------------------------------------------------------- */

static int
by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int32_t
pair_of(const int64_t *keys, int32_t count, int64_t key)
{
    const int64_t *found = bsearch(&key, keys, (size_t)count, sizeof *keys, by_value);
    return (int32_t)(found - keys);
}

tp_status
tp_pairs_open(const tp_program *program, unsigned ops, tp_pairs *pairs)
{
    size_t stages = (size_t)program->stages;
    int64_t *keys = malloc(4 * stages * sizeof *keys), ranks = program->ranks;
    int32_t *memory = malloc(13 * stages * sizeof *memory);
    if (keys == NULL || memory == NULL) {
        free(keys);
        free(memory);
        return tp_fail(TP_EMEMORY, "no memory for the pairs of %d stages", program->stages);
    }
    *pairs = (tp_pairs){.forward = memory, .backward = memory + stages, .evict = memory + 2 * stages, .load = memory + 3 * stages,
                        .source = memory + 4 * stages, .target = memory + 8 * stages};
    int32_t *hosts = memory + 12 * stages;
    size_t edges = 0;
    if (ops & TP_SCHED_GUESTS)
        tp_sched_hosts(program, hosts);
    else
        memset(hosts, -1, stages * sizeof *hosts);
    for (int v = 1; v < program->stages; v++)
        if (tp_program_remote(program, v)) {
            keys[edges++] = (int64_t)program->rank_of[v - 1] * program->ranks + program->rank_of[v];
            keys[edges++] = (int64_t)program->rank_of[v] * program->ranks + program->rank_of[v - 1];
        }
    for (int v = 0; v < program->stages; v++)
        if (hosts[v] >= 0) {
            keys[edges++] = program->rank_of[v] * ranks + hosts[v];
            keys[edges++] = hosts[v] * ranks + program->rank_of[v];
        }
    qsort(keys, edges, sizeof *keys, by_value);
    for (size_t i = 0; i < edges; i++)
        if (i == 0 || keys[i] != keys[i - 1])
            keys[pairs->count++] = keys[i];
    for (int i = 0; i < pairs->count; i++) {
        pairs->source[i] = (int32_t)(keys[i] / program->ranks);
        pairs->target[i] = (int32_t)(keys[i] % program->ranks);
    }
    for (int v = 0; v < program->stages; v++) {
        pairs->forward[v] =
            !tp_program_remote(program, v + 1)
                ? -1
                : pair_of(keys, pairs->count, (int64_t)program->rank_of[v] * program->ranks + program->rank_of[v + 1]);
        pairs->backward[v] =
            !tp_program_remote(program, v)
                ? -1
                : pair_of(keys, pairs->count, (int64_t)program->rank_of[v] * program->ranks + program->rank_of[v - 1]);
        pairs->evict[v] = hosts[v] < 0 ? -1 : pair_of(keys, pairs->count, program->rank_of[v] * ranks + hosts[v]);
        pairs->load[v] = hosts[v] < 0 ? -1 : pair_of(keys, pairs->count, hosts[v] * ranks + program->rank_of[v]);
    }
    free(keys);
    return TP_OK;
}

void
tp_pairs_close(tp_pairs *pairs)
{
    free(pairs->forward); /* the start of their one block */
    *pairs = (tp_pairs){0};
}

int
tp_pairs_of(const tp_pairs *pairs, const tp_instr *instr)
{
    switch (instr->op) {
    case TP_OP_SF: return pairs->forward[instr->stage];
    case TP_OP_SB: return pairs->backward[instr->stage];
    case TP_OP_RF: return pairs->forward[instr->stage - 1];
    case TP_OP_RB: return pairs->backward[instr->stage + 1];
    case TP_OP_SE:
    case TP_OP_RE: return pairs->evict[instr->stage];
    case TP_OP_SL:
    case TP_OP_RL: return pairs->load[instr->stage];
    default: return -1;
    }
}
