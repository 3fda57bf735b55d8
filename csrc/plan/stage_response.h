/* What the stages before a place, or those behind it, do to the rest of 1F1B, as longest paths: all that a makespan depends on
 * once a partition is cut there. Internal to csrc/plan/stage_proof.c.
 *
 * Let L_k = min(p - 1 - k, m - 1), L_p = -1. Stage k does F(0) .. F(L_k), then B(0), F(L_k + 1), B(1), F(L_k + 2) .. until
 * there are no F, then the last B. F(r) is before B(q) where r <= q + L_k.
 *
 * The head at k, of stages 0 .. k - 1, messages to and from stage k included, [tp_response_head_size]:
 *     start[q]   the longest path from the beginning to the arrival of F_k(q)
 *     end[q]     from the end of B_k(q) to the end of all
 *     turn[d]    from the end of B_k(q) to the arrival of F_k(q + L_(k - 1) + 1 + d), whatever q is
 *     through    from the beginning to the end
 * each without a step on stages k .. p - 1. The tail at k, of stages k .. p - 1, messages to and from stage k - 1 included:
 *     tail[r * m + q]  from the end of F_(k - 1)(r) to the arrival of B_(k - 1)(q), for r <= q + L_k; the rest is not set
 * without a step on stages 0 .. k - 1. A makespan is the longest path through a head, a stage, and a tail in turns. All of
 * them rise with the seconds of a stage and with one another: what is least of each number by itself over many heads, and over
 * many tails, gives no more than any plan made of one of those heads and one of those tails. */
#ifndef TP_PLAN_STAGE_RESPONSE_H
#define TP_PLAN_STAGE_RESPONSE_H

#include <stddef.h>

typedef struct {
    int micros, lead, lead_before, lead_behind; /* L_k, L_(k - 1), L_(k + 1) */
    double forward_s, backward_s;               /* receiving included */
    double lag_s;
} tp_response_stage;

static inline int
tp_response_lead(int stages, int micros, int k)
{
    return stages - 1 - k < micros - 1 ? stages - 1 - k : micros - 1;
}
static inline size_t
tp_response_head_size(int micros)
{
    return 3 * (size_t)micros + 1;
}
/* Of no stages: before stage 0. */
void
tp_response_head_empty(int micros, double *head);
/* The head behind the stage, from the one before it, into out. scratch of all: [2 * micros]. */
void
tp_response_head(const tp_response_stage *s, const double *head, double *out, double *scratch);
/* The tail before the stage, from the one behind it: out[] is the lesser of itself and that, or that if `set` is 0. */
void
tp_response_tail(const tp_response_stage *s, const double *tail, int set, double *out, double *scratch);
/* The longest path; or a path longer than limit_s if there is one. */
double
tp_response_makespan(const tp_response_stage *s, const double *head, const double *tail, double limit_s,
                     double *scratch);

/* The same with no more behind the stage than a delay: rest_s from the end of F(q) to the arrival of B(q). Not the last stage. */
double
tp_response_delay(const tp_response_stage *s, const double *head, double rest_s, double limit_s, double *scratch);

#endif
