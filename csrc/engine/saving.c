/* Whether a program brings back, when they need it, what its stages do not keep: made again (R), or swapped out and in. */
#include "csrc/engine/internal.h"

#include <stdlib.h>
#include <string.h>

/* What the walk over one stage's instructions has seen of R, or of SI. */
typedef struct {
    unsigned kinds;   /* of the blocks that save so, a bit each */
    int at_once;      /* attentions among them need all of a micro-batch before its first backward */
    tp_op op;         /* TP_OP_R or TP_OP_SI */
    int32_t *brought; /* [micros] slices of which it is done */
    uint8_t *done;    /* [units] */
} way;

enum { REMAKES, SWAPS, WAYS };

typedef struct {
    const tp_program *program;
    way way[WAYS];
    int32_t *forward;       /* [micros] slices of which F is done */
    int open;               /* the micro-batch that is on its way forward, or half way; -1: none */
    const tp_instr *made;   /* F of a stage that swaps, of which SO is still to come */
    const tp_instr *last;   /* R or SI of which W is still to come */
    int apart;              /* another slice's came before that: there is more than one slice at once */
    int whole;              /* what SI brought of a micro-batch is read until the W of its slice 0, but as remake_slices says */
    int64_t inside;         /* slices that SI brought and W has not read for the last time */
    int crossed;            /* a forward came while there were some, or SI while a micro-batch was on its way forward */
} walk;

static tp_saves
block_saves(const tp_engine_config *config, int block)
{
    return config->saves == NULL ? TP_KEEPS : (tp_saves)config->saves[block];
}

/* Kinds of the stage's blocks that save so, a bit each. */
static unsigned
stage_saves(const tp_engine_config *config, int stage, tp_saves saves)
{
    unsigned kinds = 0;
    int part = tp_engine_part(config, stage);
    for (int block = config->partition[part]; block < config->partition[part + 1]; block++)
        if (block_saves(config, block) == saves)
            kinds |= 1u << tp_model_block_kind(&config->model, block);
    return kinds;
}

static tp_status
check_block(const tp_engine_config *config, int block)
{
    tp_block_kind kind = tp_model_block_kind(&config->model, block);
    tp_saves saves = block_saves(config, block);
    const tp_stage_ops *ops = config->provider->stage;
    const char *what = saves == TP_REMAKES ? "recomputed" : "swapped";
    if (saves == TP_KEEPS)
        return TP_OK;
    if (saves != TP_REMAKES && saves != TP_SWAPS)
        return tp_fail(TP_EVALUE, "block %d saves memory in way %d: 0 to %d would be right", block, (int)saves, TP_SWAPS);
    if (kind != TP_ATTENTION && kind != TP_FFN)
        return tp_fail(TP_EVALUE, "block %d is to be %s, but it is the %s: attention and FFN blocks can be", block, what,
                       kind == TP_HEAD ? "head" : "embedding");
    if (saves == TP_REMAKES ? ops->recompute == NULL : ops->swap_out == NULL || ops->swap_in == NULL)
        return tp_fail(TP_EVALUE, "block %d is to be %s: provider %s does not do that", block, what, config->provider->name);
    return TP_OK;
}

static int
attends(unsigned kinds)
{
    return (kinds & 1u << TP_ATTENTION) != 0;
}

int
tp_engine_keeps_keys(const tp_engine_config *config, int stage)
{
    return config->provider->stage->keeps_keys && attends(stage_saves(config, stage, TP_REMAKES)) &&
           tp_program_remakes_apart(config->program, stage);
}

/* Keys and values of the micro-batch that goes forward have one place: it goes to its end before the next begins. So do the halves
 * of what is swapped out together. */
static tp_status
see_forward(walk *x, const tp_instr *instr)
{
    int32_t *done = &x->forward[instr->micro];
    int attending = x->way[REMAKES].at_once || x->way[SWAPS].at_once, ends = (tp_instr_halves(instr) & TP_HALF_SECOND) != 0;
    x->crossed |= x->inside > 0;
    if (x->made != NULL)
        return tp_fail(TP_ESCHEDULE, "%dSO%d.%d must come before the next forward of its stage, %dF%d.%d", x->made->stage,
                       x->made->micro, x->made->slice, instr->stage, instr->micro, instr->slice);
    if (x->way[SWAPS].kinds != 0 && ends)
        x->made = instr;
    if (!attending && x->way[SWAPS].kinds == 0)
        return TP_OK;
    if (x->open >= 0 && x->open != instr->micro)
        return tp_fail(TP_ESCHEDULE, "stage %d does not keep its %s, and begins micro-batch %d forward before %d.%d",
                       instr->stage, attending ? "attentions" : "FFNs", instr->micro, x->open, x->forward[x->open]);
    *done += ends;
    x->open = !ends || (attending && *done < x->program->slices[instr->micro]) ? instr->micro : -1;
    return TP_OK;
}

/* Its rows are the last that went forward. */
static tp_status
see_out(walk *x, const tp_instr *instr)
{
    if (x->made == NULL || x->made->micro != instr->micro || x->made->slice != instr->slice)
        return tp_fail(TP_ESCHEDULE, "%dSO%d.%d must come right after its forward: another has taken its place", instr->stage,
                       instr->micro, instr->slice);
    x->made = NULL;
    return TP_OK;
}

static tp_status
see_back(walk *x, way *w, const tp_instr *instr)
{
    const char *op = tp_op_name((int)w->op);
    if (w->at_once && instr->slice != w->brought[instr->micro])
        return tp_fail(TP_ESCHEDULE, "%d%s%d.%d comes where %d%s%d.%d would be right: slices ascend", instr->stage, op,
                       instr->micro, instr->slice, instr->stage, op, instr->micro, w->brought[instr->micro]);
    w->brought[instr->micro]++;
    w->done[tp_program_unit(x->program, instr)] = 1;
    x->apart |= x->last != NULL && (x->last->micro != instr->micro || x->last->slice != instr->slice);
    x->last = instr;
    if (w->op == TP_OP_SI) {
        x->crossed |= x->made != NULL || x->open >= 0;
        x->inside++;
    }
    return TP_OK;
}

/* The last that reads what SI brought. */
static void
see_weights(walk *x, const tp_instr *instr)
{
    if (x->last != NULL && instr->micro == x->last->micro && instr->slice == x->last->slice)
        x->last = NULL;
    if (x->way[SWAPS].kinds != 0 && (!x->whole || instr->slice == 0))
        x->inside -= x->whole ? x->program->slices[instr->micro] : 1;
}

static tp_status
see_backward(const walk *x, const way *w, const tp_instr *instr)
{
    const char *op = tp_op_name((int)w->op);
    if (w->kinds == 0)
        return TP_OK;
    if (w->at_once && w->brought[instr->micro] < x->program->slices[instr->micro])
        return tp_fail(TP_ESCHEDULE, "%d%s%d.%d must come before the first backward of micro-batch %d", instr->stage, op,
                       instr->micro, w->brought[instr->micro], instr->micro);
    if (!w->done[tp_program_unit(x->program, instr)])
        return tp_fail(TP_ESCHEDULE, "%d%s%d.%d must come before its backward", instr->stage, op, instr->micro, instr->slice);
    return TP_OK;
}

static tp_status
see(walk *x, const tp_instr *instr)
{
    switch (instr->op) {
    case TP_OP_F: return see_forward(x, instr);
    case TP_OP_SO: return see_out(x, instr);
    case TP_OP_R: return see_back(x, &x->way[REMAKES], instr);
    case TP_OP_SI: return see_back(x, &x->way[SWAPS], instr);
    case TP_OP_B:
    case TP_OP_I:
        for (int k = 0; k < WAYS; k++)
            TP_TRY(see_backward(x, &x->way[k], instr));
        break;
    default: break;
    }
    if (instr->op == TP_OP_B || instr->op == TP_OP_W)
        see_weights(x, instr);
    return TP_OK;
}

/* What only a stage with such a block may have. */
static tp_status
expected(const walk *x, const tp_instr *instr)
{
    int swaps = instr->op == TP_OP_SO || instr->op == TP_OP_SI;
    if ((instr->op != TP_OP_R && !swaps) || x->way[swaps ? SWAPS : REMAKES].kinds != 0)
        return TP_OK;
    return tp_fail(TP_ESCHEDULE, "the program has %d%s%d.%d, but no block of that stage is to be %s", instr->stage,
                   tp_op_name(instr->op), instr->micro, instr->slice, swaps ? "swapped" : "recomputed");
}

/* Sums over rows of several sequences and slices are done at slice 0, with all rows there (tp_slice_at.whole). */
static int
sums_at_once(const tp_slicing *slicing)
{
    int any = 0;
    for (int32_t q = 0; q < slicing->micros; q++)
        any |= slicing->micro[q].batch > 1 && slicing->micro[q].slices > 1;
    return any;
}

/* Every instruction of a stage that does not keep everything. */
static tp_status
walk_stage(walk *x, const tp_engine_config *config, int stage)
{
    const tp_program *program = config->program;
    size_t micros = (size_t)program->micros;
    int rank = program->rank_of[stage];
    x->open = -1;
    x->made = x->last = NULL;
    x->apart = x->crossed = 0;
    x->inside = 0;
    memset(x->forward, 0, micros * sizeof *x->forward);
    for (int k = 0; k < WAYS; k++) {
        x->way[k].kinds = stage_saves(config, stage, k == REMAKES ? TP_REMAKES : TP_SWAPS);
        x->way[k].at_once = attends(x->way[k].kinds) && (k == SWAPS || !tp_engine_keeps_keys(config, stage));
        memset(x->way[k].brought, 0, micros * sizeof *x->forward);
        memset(x->way[k].done, 0, (size_t)tp_program_units(program));
    }
    int any = x->way[REMAKES].kinds != 0 || x->way[SWAPS].kinds != 0;
    for (int64_t i = program->begin[rank]; i < program->begin[rank + 1]; i++) {
        if (program->code[i].stage != stage)
            continue;
        TP_TRY(expected(x, &program->code[i]));
        if (any)
            TP_TRY(see(x, &program->code[i]));
    }
    if (x->made != NULL)
        return tp_fail(TP_ESCHEDULE, "%dSO%d.%d is missing", stage, x->made->micro, x->made->slice);
    return TP_OK;
}

static tp_status
walk_open(walk *x, const tp_engine_config *config)
{
    size_t micros = (size_t)config->program->micros, units = (size_t)tp_program_units(config->program);
    *x = (walk){.program = config->program, .forward = malloc((1 + WAYS) * micros * sizeof *x->forward + WAYS * units)};
    if (x->forward == NULL)
        return tp_fail(TP_EMEMORY, "no memory to check what %zu micro-batches save", micros);
    for (size_t k = 0; k < WAYS; k++)
        x->way[k] = (way){.op = k == REMAKES ? TP_OP_R : TP_OP_SI,
                          .brought = x->forward + (1 + k) * micros,
                          .done = (uint8_t *)(x->forward + (1 + WAYS) * micros) + k * units};
    return TP_OK;
}

tp_status
tp_engine_check_saving(const tp_engine_config *config)
{
    walk x;
    TP_TRY(tp_engine_check_within(config));
    for (int block = 0; block < tp_model_blocks(&config->model); block++)
        TP_TRY(check_block(config, block));
    TP_TRY(walk_open(&x, config));
    tp_status status = TP_OK;
    for (int stage = 0; status == TP_OK && stage < config->program->stages; stage++)
        status = walk_stage(&x, config, stage);
    free(x.forward);
    return status;
}

tp_status
tp_engine_remakes_slices(const tp_engine_config *config, int stage, int *one)
{
    walk x;
    unsigned remade = stage_saves(config, stage, TP_REMAKES), swapped = stage_saves(config, stage, TP_SWAPS);
    *one = 0;
    if (!config->provider->stage->remakes_slices || (remade | swapped) == 0 || attends(swapped) ||
        (attends(remade) && !tp_engine_keeps_keys(config, stage)) || sums_at_once(config->slicing))
        return TP_OK;
    if (config->provider->stage->remakes_slices == 2 && !tp_engine_slices_gradients(config, stage))
        return TP_OK;
    TP_TRY(walk_open(&x, config));
    *one = walk_stage(&x, config, stage) == TP_OK && !x.apart;
    free(x.forward);
    return TP_OK;
}

/* Does no R, SI or I of a slice of the stage come before the W of the slice that one came of? */
static int
is_serial(const tp_program *program, int stage)
{
    const tp_instr *last = NULL;
    int rank = program->rank_of[stage];
    for (int64_t i = program->begin[rank]; i < program->begin[rank + 1]; i++) {
        const tp_instr *instr = &program->code[i];
        int begins = instr->op == TP_OP_R || instr->op == TP_OP_SI || instr->op == TP_OP_I, ends = instr->op == TP_OP_W;
        if (instr->stage != stage || (!begins && !ends && instr->op != TP_OP_B))
            continue;
        if (last != NULL && (last->micro != instr->micro || last->slice != instr->slice))
            return 0;
        last = begins ? instr : NULL;
    }
    return 1;
}

/* Of all blocks, not of the stage's alone: else a stage might take less with one more block. A provider that keeps no keys has all
 * of a micro-batch at once where it saves an attention, as each has that swaps one, and what some sum in groups for room of a slice
 * should not show where there is none. */
int
tp_engine_slices_gradients(const tp_engine_config *config, int stage)
{
    const tp_stage_ops *ops = config->provider->stage;
    unsigned remade = 0, swapped = 0;
    for (int block = 0; block < tp_model_blocks(&config->model); block++) {
        unsigned kind = 1u << tp_model_block_kind(&config->model, block);
        remade |= block_saves(config, block) == TP_REMAKES ? kind : 0;
        swapped |= block_saves(config, block) == TP_SWAPS ? kind : 0;
    }
    int whole = (attends(remade | swapped) && !ops->keeps_keys) || (attends(swapped) && ops->remakes_slices == 2);
    return (remade | swapped) != 0 && !whole && ops->remakes_slices && !sums_at_once(config->slicing) &&
           is_serial(config->program, stage);
}

int
tp_engine_goes_by_block(const tp_engine_config *config, const tp_stage_counts *counts)
{
    int by_block = config->provider->stage->backward != NULL && !counts->apart;
    for (int32_t q = 0; q < config->slicing->micros && by_block; q++)
        by_block = config->slicing->micro[q].slices == 1;
    return by_block;
}

/* Does a forward, or a micro-batch on its way forward, come between an SI and the last that reads what it brought? */
static tp_status
crosses(const tp_engine_config *config, int stage, int whole, int *out)
{
    walk x;
    TP_TRY(walk_open(&x, config));
    x.whole = whole;
    *out = walk_stage(&x, config, stage) != TP_OK || x.crossed;
    free(x.forward);
    return TP_OK;
}

tp_status
tp_engine_has_one_room(const tp_engine_config *config, int stage, int *one)
{
    int slices, crossed;
    *one = 0;
    if (stage_saves(config, stage, TP_SWAPS) == 0 || tp_program_has_two_places(config->program, stage))
        return TP_OK;
    TP_TRY(tp_engine_remakes_slices(config, stage, &slices));
    TP_TRY(crosses(config, stage, 1, &crossed));
    *one = crossed ? 0 : TP_ROOM_BETWEEN_MICROS;
    if (!crossed || !slices)
        return TP_OK;
    TP_TRY(crosses(config, stage, 0, &crossed));
    *one = crossed ? 0 : TP_ROOM_BETWEEN_SLICES;
    return TP_OK;
}
