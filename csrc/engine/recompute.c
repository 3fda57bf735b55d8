/* Whether a program makes again what its stages do not keep, when they need it. */
#include "csrc/engine/internal.h"

#include <stdlib.h>
#include <string.h>

/* What the walk over one stage's instructions has seen. */
typedef struct {
    const tp_program *program;
    int attends;      /* an attention is made again: its slices read those before them */
    int32_t *forward; /* [micros] slices of which F is done */
    int32_t *again;   /* [micros] and R */
    uint8_t *made;    /* [units] its R is done */
    int open;         /* the micro-batch that is on its way forward; -1: none */
    const tp_instr *last; /* R of which W is still to come */
    int apart;        /* R came before the last one's W: there is more than one slice at once */
} walk;

static int
block_recomputes(const tp_engine_config *config, int block)
{
    return config->recompute != NULL && config->recompute[block];
}

/* Kinds of the blocks that the stage recomputes, a bit each. */
static unsigned
stage_recomputes(const tp_engine_config *config, int stage)
{
    unsigned kinds = 0;
    for (int block = config->partition[stage]; block < config->partition[stage + 1]; block++)
        if (block_recomputes(config, block))
            kinds |= 1u << tp_model_block_kind(&config->model, block);
    return kinds;
}

static tp_status
check_blocks(const tp_engine_config *config)
{
    for (int block = 0; block < tp_model_blocks(&config->model); block++) {
        tp_block_kind kind = tp_model_block_kind(&config->model, block);
        if (!block_recomputes(config, block))
            continue;
        if (kind != TP_ATTENTION && kind != TP_FFN)
            return tp_fail(TP_EVALUE, "block %d is to be recomputed, but it is the %s: attention and FFN blocks can be", block,
                           kind == TP_HEAD ? "head" : "embedding");
        if (config->provider->stage->recompute == NULL)
            return tp_fail(TP_EVALUE, "block %d is to be recomputed: provider %s keeps every activation", block,
                           config->provider->name);
    }
    return TP_OK;
}

/* Keys and values of the micro-batch that goes forward have one place: it goes to its end before the next begins. */
static tp_status
see_forward(walk *x, const tp_instr *instr)
{
    int32_t *done = &x->forward[instr->micro];
    if (x->open >= 0 && x->open != instr->micro)
        return tp_fail(TP_ESCHEDULE, "stage %d recomputes, and begins micro-batch %d forward before %d.%d", instr->stage,
                       instr->micro, x->open, x->forward[x->open]);
    *done += (tp_instr_halves(instr) & TP_HALF_SECOND) != 0;
    x->open = *done < x->program->slices[instr->micro] ? instr->micro : -1;
    return TP_OK;
}

static tp_status
see_again(walk *x, const tp_instr *instr)
{
    if (x->attends && instr->slice != x->again[instr->micro])
        return tp_fail(TP_ESCHEDULE, "%dR%d.%d comes where %dR%d.%d would be right: slices ascend", instr->stage, instr->micro,
                       instr->slice, instr->stage, instr->micro, x->again[instr->micro]);
    x->again[instr->micro]++;
    x->made[tp_program_unit(x->program, instr)] = 1;
    x->apart |= x->last != NULL;
    x->last = instr;
    return TP_OK;
}

static tp_status
see_backward(const walk *x, const tp_instr *instr)
{
    if (x->attends && x->again[instr->micro] < x->program->slices[instr->micro])
        return tp_fail(TP_ESCHEDULE, "%dR%d.%d must come before the first backward of micro-batch %d", instr->stage,
                       instr->micro, x->again[instr->micro], instr->micro);
    if (!x->made[tp_program_unit(x->program, instr)])
        return tp_fail(TP_ESCHEDULE, "%dR%d.%d must come before its backward", instr->stage, instr->micro, instr->slice);
    return TP_OK;
}

static tp_status
see(walk *x, const tp_instr *instr)
{
    switch (instr->op) {
    case TP_OP_F: return x->attends ? see_forward(x, instr) : TP_OK;
    case TP_OP_R: return see_again(x, instr);
    case TP_OP_B:
    case TP_OP_I: TP_TRY(see_backward(x, instr)); break;
    default: break;
    }
    if ((instr->op == TP_OP_B || instr->op == TP_OP_W) && x->last != NULL && instr->micro == x->last->micro &&
        instr->slice == x->last->slice)
        x->last = NULL;
    return TP_OK;
}

/* Every instruction of a stage that recomputes; with `x` zeroed but for its program and tables. */
static tp_status
walk_stage(walk *x, const tp_engine_config *config, int stage, unsigned kinds)
{
    const tp_program *program = config->program;
    int rank = program->rank_of[stage];
    x->attends = (kinds & 1u << TP_ATTENTION) != 0;
    x->open = -1;
    x->last = NULL;
    x->apart = 0;
    memset(x->forward, 0, 2 * (size_t)program->micros * sizeof *x->forward);
    memset(x->made, 0, (size_t)tp_program_units(program));
    for (int64_t i = program->begin[rank]; i < program->begin[rank + 1]; i++) {
        const tp_instr *instr = &program->code[i];
        if (instr->stage != stage)
            continue;
        if (kinds == 0 && instr->op == TP_OP_R)
            return tp_fail(TP_ESCHEDULE, "the program has %dR%d.%d, but no block of that stage is to be recomputed", stage,
                           instr->micro, instr->slice);
        if (kinds != 0)
            TP_TRY(see(x, instr));
    }
    return TP_OK;
}

static tp_status
walk_open(walk *x, const tp_engine_config *config)
{
    int32_t micros = config->program->micros;
    size_t tables = 2 * (size_t)micros * sizeof *x->forward;
    *x = (walk){.program = config->program, .forward = malloc(tables + (size_t)tp_program_units(config->program))};
    if (x->forward == NULL)
        return tp_fail(TP_EMEMORY, "no memory to check the recomputation of %d micro-batches", (int)micros);
    x->again = x->forward + micros;
    x->made = (uint8_t *)(x->again + micros);
    return TP_OK;
}

tp_status
tp_engine_check_recompute(const tp_engine_config *config)
{
    walk x;
    TP_TRY(check_blocks(config));
    TP_TRY(walk_open(&x, config));
    tp_status status = TP_OK;
    for (int stage = 0; status == TP_OK && stage < config->program->stages; stage++)
        status = walk_stage(&x, config, stage, stage_recomputes(config, stage));
    free(x.forward);
    return status;
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

int
tp_engine_remakes_slices(const tp_engine_config *config, int stage)
{
    walk x;
    unsigned kinds = stage_recomputes(config, stage);
    if (!config->provider->stage->remakes_slices || kinds != 1u << TP_FFN || sums_at_once(config->slicing) ||
        walk_open(&x, config) != TP_OK)
        return 0;
    int one = walk_stage(&x, config, stage, kinds) == TP_OK && !x.apart;
    free(x.forward);
    return one;
}
