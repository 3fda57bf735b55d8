/* Baselines: what others plan with, each the published algorithm, on the cost tables of the other planners. A chain of blocks
 * is cut into stages of consecutive blocks that run 1F1B. What a paper leaves open and what was chosen stands in the .c.
 *
 * Every plan is judged alike, whatever its algorithm optimised: step_time_s by our simulator, bytes by one memory model:
 * stage k of K holds min(micros, K - k) micro-batches, or in_flight[k], so it needs static + copies * activation of what it
 * keeps + the largest transient of its blocks. */
#ifndef TP_PLAN_BASELINES_H
#define TP_PLAN_BASELINES_H

#include <stdint.h>

#include "csrc/base/status.h"

typedef struct {
    int blocks, micros;
    const double *forward_s, *backward_s; /* [blocks] of one micro-batch */
    double comm_s;                        /* a message between stages */
    int blocking;                         /* 1: the receiving stage pays comm_s itself; 0: the link does */
    double limit_bytes;                   /* 0: no memory limit, the arrays below are not read */
    const double *static_bytes, *activation_bytes;  /* [blocks] */
    const double *transient_bytes, *recompute_s;    /* [blocks] or NULL */
    const int32_t *in_flight; /* [stages] micro-batches that a stage holds in the order it runs, at least 1; NULL: as in 1F1B.
                                 Stages are not replicated then: EVALUE from PipeDream and DAPPLE unless straight. */
    /* where stages are replicated (PipeDream, DAPPLE) */
    const double *param_bytes; /* [blocks] exchanged between replicas, or NULL: 0 */
    double bandwidth_Bps;
} tp_chain;

typedef enum { TP_BLOCK_KEEP, TP_BLOCK_RECOMPUTE, TP_BLOCK_SWAP } tp_block_action;
/* How replicas of a stage share micro-batches: whole ones in turn (PipeDream), or each cut in parts (DAPPLE). NONE: of a
 * planner, or a request, that knows no replicas. */
typedef enum { TP_REPLICAS_NONE, TP_REPLICAS_TURN, TP_REPLICAS_SPLIT } tp_replicas;

typedef struct {
    int stages, pivot;    /* pivot: DAPPLE's, twice its stage, odd: the message behind; else -1 */
    int *boundary;        /* [stages + 1], 0 first, blocks last */
    int *replica;         /* [stages] devices of a stage */
    uint8_t *action;      /* [blocks] tp_block_action */
    double *time_s;       /* [stages] forward + backward of a micro-batch, of the whole stage (replicas at work together) */
    double *peak_bytes;   /* [stages] of one device */
    double objective_s;   /* what the algorithm itself minimised */
    double step_time_s;   /* by our simulator: 1F1B, and the exchange of weights behind each stage's last backward */
    double lower_bound_s; /* no plan of these blocks without recompute is faster: on as many stages, or where there may be
                             replicas on as many devices */
    int64_t steps;        /* candidates that the algorithm evaluated */
    double seconds;
} tp_chain_plan;

/* EVALUE naming the cell. */
TP_MUST_USE tp_status
tp_chain_check(const tp_chain *chain, int stages);
void
tp_chain_plan_free(tp_chain_plan *plan);

/* All: EVALUE, EMEMORY; EINFEASIBLE naming the stage, the bytes it is short, and what would fit. End with
 * tp_chain_plan_free, on error too. */

/* Megatron-LM's even division (Narayanan et al., SC 2021, section 2.2): blocks / stages each; the remainder, which Megatron
 * refuses, goes one each to the first stages. */
TP_MUST_USE tp_status
tp_plan_uniform(const tp_chain *chain, int stages, tp_chain_plan *out);

/* Merak (Lai et al., TPDS 2023; held against its repository): blocks are merged into `shards` subgraphs of about equal
 * runtime, and stages get equal numbers of shards; the remainder goes one each to the stages behind the first. shards 0:
 * every block is one. */
TP_MUST_USE tp_status
tp_plan_merak(const tp_chain *chain, int stages, int shards, tp_chain_plan *out);

/* PipeDream's dynamic programme (Narayanan et al., SOSP 2019, section 3.1), one level of machines: least time of the slowest
 * stage or link over cuts and replicas. Exact in that objective. straight: no replication, stages = devices. */
TP_MUST_USE tp_status
tp_plan_pipedream(const tp_chain *chain, int devices, int straight, tp_chain_plan *out);

/* DAPPLE's planner (Fan et al., PPoPP 2021, section 4; held against a summary of the paper, its author's slides and code, and
 * published plans: baseline_dapple.c): least modelled latency, warm-up + steady phase of the pivot stage + ending with the
 * exchange of weights; one best prefix for each (blocks, devices), so not exact even in its own model. straight: no replication,
 * stages = devices; blocks that are not placed yet count, as published, as one stage on the devices that are left. */
TP_MUST_USE tp_status
tp_plan_dapple(const tp_chain *chain, int devices, int straight, tp_chain_plan *out);
/* Its latency model: seconds[stages] forward and backward of the stages at work, exchange_s[stages]. */
double
tp_dapple_latency(const double *forward_s, const double *backward_s, const double *exchange_s, int stages, int micros,
                  double comm_s, int *pivot);

/* vPipe (Zhao et al., TPDS 2022; its parts held against what readers report, its details not: baseline_vpipe.c): swap and
 * recompute chosen within each stage, blocks moved between neighbours as Kernighan and Lin do. Heuristic. swap_Bps 0: no
 * swap. */
TP_MUST_USE tp_status
tp_plan_vpipe(const tp_chain *chain, int stages, double swap_Bps, tp_chain_plan *out);

/* AdaPipe (Sun et al., ASPLOS 2024; only its abstract was seen, equations derived here: baseline_adapipe.c): the least
 * recomputation that fits by a knapsack for every possible stage, then a dynamic programme over a 1F1B model of warm-up, steady
 * and ending phase, last stage first; one best suffix for each (stage, first block). */
TP_MUST_USE tp_status
tp_plan_adapipe(const tp_chain *chain, int stages, tp_chain_plan *out);

#endif
