/* The rules that only count: Megatron-LM's even division and Merak's.
 *
 * Merak, held against its repository (HPDL-Group/Merak at 216a041, Apache-2.0, read for its rules; the paper's text, arXiv
 * 2206.04959, was not found). Merak/core/fx/graph_shard/farthest_deps.py closes a shard once its cost has gone over total /
 * shards; Merak/core/pipeline/module_utils.py, partition_uniform in its floor form ("uniform_floor") gives stages floor(shards /
 * stages) shards and one more to each of the `remainder` stages behind the first, so that the first and the last, which hold
 * embedding and head, stay light. (Its other form, "uniform", rounds up and adds the remainder as well: the same where stages
 * divide the shards, beyond the last shard where they do not.) There is no more to the rule: "parameters" balances parameters
 * as DeepSpeed does, "autopipe" is section 2's planner. Chosen: the cost is the runtime of a block (the code counts parameters,
 * embeddings left out); a shard closes when its cost reaches that share, so that equal
 * blocks make equal shards. Its stage-aware recomputation and its shifted schedule belong to the runtime, not to the partition,
 * and are not modelled. */
#include "csrc/plan/baseline_chain.h"

static tp_status
divide_evenly(const tp_chain_sums *s, tp_arena *arena, int stages, const void *options, tp_chain_plan *plan)
{
    int n = s->chain->blocks;
    (void)arena;
    (void)options;
    plan->stages = stages;
    for (int k = 0; k <= stages; k++)
        plan->boundary[k] = k * (n / stages) + (k < n % stages ? k : n % stages);
    plan->steps = 1;
    return tp_chain_must_fit(s, plan);
}

tp_status
tp_plan_uniform(const tp_chain *chain, int stages, tp_chain_plan *out)
{
    return tp_chain_run(chain, stages, stages, TP_REPLICAS_NONE, divide_evenly, NULL, out);
}

/* end[shard]: the block behind the shard's last; returns the number of shards. */
static int
close_shards(const tp_chain_sums *s, int shards, int *end)
{
    int n = s->chain->blocks, count = 0, first = 0;
    double target = (s->forward[n] + s->backward[n]) / shards;
    for (int i = 0; i < n; i++) {
        double cost = s->forward[i + 1] + s->backward[i + 1] - s->forward[first] - s->backward[first];
        if (i + 1 < n && !(cost > target * (1.0 - 1e-12)) && shards < n)
            continue;
        end[count++] = i + 1;
        first = i + 1;
    }
    return count;
}

static tp_status
divide_shards(const tp_chain_sums *s, tp_arena *arena, int stages, const void *options, tp_chain_plan *plan)
{
    int n = s->chain->blocks, shards = *(const int *)options, *end = NULL;
    if (shards == 0)
        shards = n;
    if (shards < stages || shards > n)
        return tp_fail(TP_EVALUE, "shards is %d for %d stages and %d blocks: %d to %d would be right", shards, stages, n, stages,
                       n);
    TP_ARENA_TAKE(arena, n, end);
    int made = close_shards(s, shards, end), each = made / stages, more = made % stages;
    if (made < stages)
        return tp_fail(TP_EVALUE, "the blocks make only %d shards of about equal runtime for %d stages: more shards than %d are "
                                  "needed",
                       made, stages, shards);
    plan->stages = stages;
    for (int k = 1; k < stages; k++) {
        int extra = k - 1 < more ? k - 1 : more; /* the stages behind the first come first */
        plan->boundary[k] = end[k * each + extra - 1];
    }
    plan->boundary[stages] = n;
    plan->steps = 1;
    return tp_chain_must_fit(s, plan);
}

tp_status
tp_plan_merak(const tp_chain *chain, int stages, int shards, tp_chain_plan *out)
{
    return tp_chain_run(chain, stages, stages, TP_REPLICAS_NONE, divide_shards, &shards, out);
}
