/* What the judge's two files share. */
#ifndef TP_PLAN_JUDGE_CORE_H
#define TP_PLAN_JUDGE_CORE_H

#include "csrc/plan/judge.h"

/* Durations of a candidate in the judge's own tables, until the next call. */
TP_MUST_USE tp_status
tp_judge_time(tp_judge *judge, const tp_candidate *candidate, tp_durations *durations);
/* tp_judge_run, and the simulator of the program, which the caller closes. */
TP_MUST_USE tp_status
tp_judge_make(tp_judge *judge, const tp_candidate *candidate, tp_program **program, tp_sim **sim, double *makespan_s);
void
tp_judge_count(tp_judge *judge, int64_t work);
const tp_judge_request *
tp_judge_asked(const tp_judge *judge);

#endif
