/* What judge.c, judge_times.c and descend.c share. */
#ifndef TP_PLAN_JUDGE_CORE_H
#define TP_PLAN_JUDGE_CORE_H

#include "csrc/plan/judge.h"

enum { TP_JUDGE_KEPT = 16,  /* orders that take longer to find than all else, and are kept */
       TP_JUDGE_SIZES = 64 }; /* sizes of guests that are kept */

typedef struct {
    int order;
    double input_s, weight_s; /* of orders that depend on times */
    tp_program *program;
} tp_judge_kept;

/* What a guest of the request's own blocks takes. */
typedef struct {
    int32_t first, end, batch, seq_len; /* end 0: nothing is here */
    int64_t bytes;
} tp_judge_size;

struct tp_judge {
    tp_judge_request asked;
    tp_cost cost; /* the request's, with room to remember */
    int stages; /* of one copy of the model */
    int64_t work;
    double *table;             /* [tables][cells]; a table: [rows][units] */
    int64_t cells;
    int tables;
    double *latency_s;         /* [2][rows] */
    int32_t *blocks, *remade;  /* [stages][TP_BLOCK_KINDS] all of a stage, and those that are made again */
    const tp_program *looked;  /* at which tp_judge_look has looked: apart says tp_program_remakes_apart of its stages */
    uint8_t *apart;            /* [rows of two copies] */
    uint8_t *keys;             /* [rows of two copies] what the stages' attentions keep of what R would make (tp_cost_recompute) */
    int32_t *halved, micros;   /* [micros] */
    double *left_s;            /* [micros] */
    tp_judge_size size[TP_JUDGE_SIZES];
    tp_judge_kept kept[TP_JUDGE_KEPT];
    int next;
};

/* Of the model that an order trains. */
static inline int
tp_judge_copies(int order)
{
    return order == TP_ORDER_CHIMERA ? 2 : 1;
}

/* Durations of a candidate in the judge's own tables, until the next call. program: of the candidate's stages, whose R say what
 * attentions keep; NULL: without those of R. */
TP_MUST_USE tp_status
tp_judge_time(tp_judge *judge, const tp_candidate *candidate, const tp_program *program, tp_durations *durations);
/* Until it is told another, or NULL, many candidates are timed for this one program. */
void
tp_judge_look(tp_judge *judge, const tp_program *program);
/* Those of R, beside those of the candidate, which was timed last. */
TP_MUST_USE tp_status
tp_judge_time_again(tp_judge *judge, const tp_candidate *candidate, const tp_program *program, tp_durations *durations);
/* The blocks that a candidate makes again: its own or the request's; NULL: none. */
const uint8_t *
tp_judge_again(const tp_judge *judge, const tp_candidate *candidate);
/* A candidate's program with its seconds. */
typedef struct {
    tp_completed of;
    double seconds;
} tp_judge_timed;
/* tp_judge_run, with what tp_program_complete makes, which the caller closes. known, goal_s: as there, of this judge; of a candidate
 * that was found to take longer than goal_s out->seconds is infinite. */
TP_MUST_USE tp_status
tp_judge_make(tp_judge *judge, const tp_candidate *candidate, const tp_completed *known, double goal_s, tp_judge_timed *out);
void
tp_judge_count(tp_judge *judge, int64_t work);
const tp_judge_request *
tp_judge_asked(const tp_judge *judge);

#endif
