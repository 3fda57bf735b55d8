/* What the fullest rank takes at least, whatever the partition: a certificate that nothing fits, before anything is searched. Sizes
 * are the stages' own (tp_stage_ops.bytes) with the fewest slots that the caller knows of and, where slices are open, as if these
 * took no room; so no plan takes less. One stage a rank: the partition whose largest stage is least. Several: as if a rank
 * could take what another has left, but for what stages take that are as small as can be. */
#include "csrc/engine/internal.h"

#include <stdlib.h>

#define STEPS ((int64_t)1 << 22) /* of the dynamic programmes: some hundredths of a second */
enum { SHAPES = 6, HALVINGS = 12 };

/* Of some blocks: what they take whatever the slots, and for each of these; [1]: where attentions that are remade keep their keys, of
 * which a plan may have what takes less. base 0: not known yet. */
typedef struct {
    int64_t base[2], slot[2];
} least_size;

typedef struct {
    const tp_engine_least_asked *asked;
    int blocks, alike, rows; /* rows: of `known` */
    int slices_gradients;    /* stages might (tp_stage_config) */
    int keeps_keys;          /* likewise */
    least_size *known;       /* [rows][blocks + 1] */
    tp_slicing open[2];      /* slices as long as sequences, and shorter ones */
    int ways;                /* of open */
    tp_micro micro[2];
    int32_t start[2][3];
    tp_status failed;
} least;

static int
are_alike(const tp_engine_least_asked *asked, int blocks)
{
    for (int i = 3; asked->saves != NULL && i < blocks - 1; i++)
        if (asked->saves[i] != asked->saves[i - 2])
            return 0;
    return 1;
}

/* The slicings that a stage is sized for, of which the lesser counts. Open slices: whole sequences; and as if the longest slice
 * were one unit, and W left no rows to the slice before. */
static void
slicings_open(least *x)
{
    const tp_slicing *given = x->asked->slicing;
    x->open[0] = *given;
    x->ways = 1;
    if (x->asked->unit == 0)
        return;
    for (int way = 0; way < 2; way++) {
        int32_t *start = x->start[way];
        start[1] = start[2] = given->seq_len;
        x->micro[way] = (tp_micro){.batch = given->max_batch, .slices = 1 + way, .start = start};
        x->open[way] = (tp_slicing){.seq_len = given->seq_len, .batch = x->asked->batch, .micros = 1, .max_batch = given->max_batch,
                                    .micro = &x->micro[way]};
        x->open[way].max_rows = (int64_t)given->max_batch * (way ? x->asked->unit : given->seq_len);
    }
    x->ways = 2;
}

static int
remakes_attention(const least *x, int from, int to)
{
    for (int i = from; x->asked->saves != NULL && i < to; i++)
        if (x->asked->saves[i] && i % 2 == 1)
            return 1;
    return 0;
}

static int64_t
bytes_with(least *x, const tp_stage_config *config)
{
    const tp_engine_least_asked *a = x->asked;
    tp_stage_bytes bytes;
    tp_status status = x->failed == TP_OK ? a->provider->stage->bytes(config, &a->device, &bytes) : x->failed;
    x->failed = status;
    if (status != TP_OK)
        return 0;
    int one = a->provider->counts_tables && a->stages == a->ranks && a->copies == 1; /* of several the largest alone counts */
    size_t shared = one ? a->provider->device->workspace_bytes(config, &a->device) : 0;
    return (int64_t)(bytes.memory + tp_align_bytes(shared));
}

static int
has_slices(const tp_slicing *slicing)
{
    int sliced = 0;
    for (int32_t q = 0; q < slicing->micros; q++)
        sliced |= slicing->micro[q].slices > 1;
    return sliced;
}

/* Whether blocks are made again slice by slice, and gradients have room for one, is the program's matter, and what W leaves to the
 * slice before may make that more. So is whether B are whole, and R within them, which never makes it more. */
static int64_t
bytes_of(least *x, int way, int slots, int from, int to, const uint8_t *saves, int keys)
{
    const tp_engine_least_asked *a = x->asked;
    int64_t least_bytes = INT64_MAX;
    int slice = keys || !remakes_attention(x, from, to);
    int by_block = !a->apart && a->provider->stage->backward != NULL && !has_slices(&x->open[way]);
    int within = by_block && saves != NULL && a->provider->stage->backward_block != NULL;
    for (int remakes = 0; remakes <= (saves != NULL && slice); remakes++)
        for (int gradients = 0; gradients <= (x->slices_gradients && slice); gradients++) {
            tp_stage_config config = {.model = a->model, .slicing = &x->open[way], .first_block = from, .last_block = to,
                                      .activation_slots = slots, .gradient_slots = 1, .saves = saves,
                                      .replicas = a->replicas * a->copies,
                                      .shards = a->shards && a->replicas * a->copies > 1, .keep_keys = keys, .remake_slices = remakes,
                                      .slice_gradients = gradients, .by_block = by_block, .remake_within = within};
            int64_t bytes = bytes_with(x, &config);
            least_bytes = bytes < least_bytes ? bytes : least_bytes;
        }
    return least_bytes;
}

/* Where blocks are free to keep no more than their input: what they keep besides, in a slot. */
static int64_t
spared(least *x, int from, int to)
{
    const uint8_t *saves = x->asked->all_saved;
    if (saves == NULL)
        return 0;
    int64_t kept = bytes_of(x, 0, 2, from, to, NULL, 0) - bytes_of(x, 0, 1, from, to, NULL, 0);
    return kept - bytes_of(x, 0, 2, from, to, saves, 0) + bytes_of(x, 0, 1, from, to, saves, 0);
}

static int
is_whole(const least *x)
{
    const tp_slicing *slicing = x->asked->slicing;
    return x->asked->unit == 0 && slicing->max_rows == (int64_t)slicing->max_batch * slicing->seq_len && !has_slices(slicing);
}

/* All slots take as much, in every way (tp_lay_slots): so two are asked for, however many there are. What whole sequences may be
 * spared they are in all but one: that of one micro-batch is made again, or brought back, in a place of its own, if not within B. */
static void
know(least *x, least_size *known, int from, int to, int keys)
{
    const uint8_t *saves = x->asked->saves;
    int64_t less = spared(x, from, to), one = bytes_of(x, 0, 1, from, to, saves, keys), lesser = one;
    int64_t slot = bytes_of(x, 0, 2, from, to, saves, keys) - one;
    for (int way = 1; way < x->ways; way++) {
        int64_t other = bytes_of(x, way, 1, from, to, saves, keys);
        lesser = other < lesser ? other : lesser;
    }
    known->base[keys] = lesser - slot + (is_whole(x) && x->asked->apart ? less : 0);
    known->slot[keys] = slot - less;
}

static int64_t
size_of(least *x, int stage, int from, int to)
{
    int shape = !x->alike ? from : (from == 0 ? 0 : 2 + 2 * (from & 1)) + (to == x->blocks);
    least_size *known = &x->known[(size_t)shape * (size_t)(x->blocks + 1) + (size_t)(to - from)];
    for (int keys = 0; keys <= x->keeps_keys; keys++)
        if (known->base[keys] == 0)
            know(x, known, from, to, keys);
    int64_t slots = x->asked->slots[stage], bytes = known->base[0] + slots * known->slot[0];
    int64_t other = x->keeps_keys ? known->base[1] + slots * known->slot[1] : bytes;
    return other < bytes ? other : bytes;
}

/* [stages][blocks + 1]: over partitions of the first blocks into the first stages, the least of their largest, or of their sum, where
 * stage k may take `most`[k]; TP_ENGINE_NEVER or more: there is none. */
static int64_t
over_partitions(least *x, int64_t *best, int sum, const int64_t *most)
{
    int stages = x->asked->stages, wide = x->blocks + 1;
    for (int k = 0; k < stages; k++) {
        int64_t *mine = best + (size_t)k * (size_t)wide, *before = mine - wide;
        for (int to = k + 1; to <= x->blocks - (stages - 1 - k); to++) {
            mine[to] = TP_ENGINE_NEVER;
            for (int from = k == 0 ? 0 : to - 1; from >= k; from--) {
                int64_t size = size_of(x, k, from, to), rest = k == 0 ? 0 : before[from];
                int64_t all = sum ? size + rest : size > rest ? size : rest;
                if (all < mine[to] && (most == NULL || size <= most[k]))
                    mine[to] = all;
                if (k == 0)
                    break;
            }
        }
    }
    return best[(size_t)stages * (size_t)wide - 1];
}

/* The least that the stage may take by itself, wherever it begins and ends. */
static int64_t
alone(least *x, int stage)
{
    int stages = x->asked->stages, last = x->blocks - (stages - 1 - stage);
    int64_t bytes = INT64_MAX;
    for (int from = stage == 0 ? 0 : stage; from < last; from++) {
        int to = stage == stages - 1 ? x->blocks : from + 1;
        int64_t size = size_of(x, stage, from, to);
        bytes = size < bytes ? size : bytes;
        if (stage == 0)
            break;
    }
    return bytes;
}

/* Might a partition be within `limit` bytes a rank? own: [stages] the least of each alone. */
static int
is_enough(least *x, int64_t *best, const int64_t *own, int64_t *most, int64_t limit)
{
    const tp_engine_least_asked *a = x->asked;
    for (int k = 0; k < a->stages; k++) {
        most[k] = limit + own[k];
        for (int other = 0; other < a->stages; other++)
            most[k] -= a->rank_of[other] == a->rank_of[k] ? own[other] : 0;
    }
    return over_partitions(x, best, 1, most) <= a->ranks * limit;
}

/* Within a limit that one has, no stage takes more than its rank's others leave, and all together no more than all ranks have. */
static int64_t
of_several(least *x, int64_t *best)
{
    const tp_engine_least_asked *a = x->asked;
    int64_t *own = best + (size_t)a->stages * (size_t)(x->blocks + 1), *most = own + a->stages, low = 0, high = 0;
    for (int k = 0; k < a->stages; k++)
        own[k] = alone(x, k);
    for (int rank = 0; rank < a->ranks; rank++) {
        int64_t bytes = 0;
        for (int k = 0; k < a->stages; k++)
            bytes += a->rank_of[k] == rank ? own[k] : 0;
        low = bytes - 1 > low ? bytes - 1 : low;
    }
    int64_t mean = over_partitions(x, best, 1, NULL) / a->ranks - 1;
    low = mean > low ? mean : low;
    for (high = low + 1; high < TP_ENGINE_NEVER / 4 && !is_enough(x, best, own, most, high); high *= 2)
        low = high;
    for (int halvings = 0; halvings < HALVINGS && low + 1 < high; halvings++) {
        int64_t middle = low + (high - low) / 2;
        *(is_enough(x, best, own, most, middle) ? &high : &low) = middle;
    }
    return low + 1;
}

/* Of two copies of the model, whose stages each have another rank, and each rank two. */
static int64_t
of_copies(least *x, int64_t *best)
{
    int64_t mean = 2 * over_partitions(x, best, 1, NULL) / x->asked->ranks, most = over_partitions(x, best, 0, NULL);
    return mean > most ? mean : most;
}

static int64_t
of_given(least *x)
{
    const tp_engine_least_asked *a = x->asked;
    int64_t most = 0;
    for (int rank = 0; rank < a->ranks; rank++) {
        int64_t bytes = 0;
        for (int k = 0; k < a->stages; k++)
            bytes += a->rank_of[k] == rank ? size_of(x, k, a->partition[k], a->partition[k + 1]) : 0;
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* What every rank has beside its stages, however long its program is. */
static int64_t
beside(const tp_engine_least_asked *a)
{
    tp_program one = {.copies = a->copies};
    tp_engine_config config = {.program = &one, .replicas = a->replicas, .model = a->model, .provider = a->provider};
    size_t gathered = (size_t)(a->replicas * a->ranks + 1) * (size_t)(tp_model_params(&a->model) + TP_GATHER_EXTRA);
    return (int64_t)(tp_align_bytes(a->provider->counts_tables ? gathered * sizeof(double) : 0) +
                     tp_align_bytes(tp_engine_sums_bytes(&config)));
}

static tp_status
check(const tp_engine_least_asked *a)
{
    TP_TRY(tp_model_check(&a->model));
    TP_TRY(tp_slicing_check(a->slicing, &a->model));
    if (a->ranks < 1 || a->stages < a->ranks || a->stages > tp_model_blocks(&a->model))
        return tp_fail(TP_EVALUE, "%d stages on %d ranks, of %d blocks: a stage for each rank, and a block for each stage, would be right",
                       a->stages, a->ranks, tp_model_blocks(&a->model));
    if (a->unit < 0 || a->batch < a->slicing->max_batch || a->replicas < 1 || a->copies < 1 || a->copies > 2)
        return tp_fail(TP_EVALUE, "units of %d tokens, %d sequences, %d replicas and %d copies: from 0, %d, 1 and 1 on, and at most 2 "
                       "copies, would be right", a->unit, a->batch, a->replicas, a->copies, a->slicing->max_batch);
    for (int k = 0; k < a->stages; k++)
        if (a->slots[k] < 1 || a->rank_of[k] < 0 || a->rank_of[k] >= a->ranks)
            return tp_fail(TP_EVALUE, "stage %d has %d slots on rank %d: 1 or more on one of %d ranks would be right", k, a->slots[k],
                           a->rank_of[k], a->ranks);
    for (int k = 0; a->partition != NULL && k < a->stages; k++)
        if (a->partition[0] != 0 || a->partition[k + 1] <= a->partition[k] || a->partition[a->stages] != tp_model_blocks(&a->model))
            return tp_fail(TP_EVALUE, "stage %d has blocks [%d, %d): one or more, and all in all stages, would be right", k,
                           a->partition[k], a->partition[k + 1]);
    return TP_OK;
}

static int64_t
over_ranks(least *x, int64_t *best)
{
    const tp_engine_least_asked *a = x->asked;
    if (a->copies > 1)
        return of_copies(x, best);
    if (a->partition != NULL)
        return of_given(x);
    return a->stages > a->ranks ? of_several(x, best) : over_partitions(x, best, 0, NULL);
}

tp_status
tp_engine_least(const tp_engine_least_asked *asked, int64_t *bytes)
{
    TP_TRY(check(asked));
    least x = {.asked = asked, .blocks = tp_model_blocks(&asked->model)};
    size_t stages = (size_t)asked->stages, wide = (size_t)x.blocks + 1;
    x.alike = are_alike(asked, x.blocks);
    x.slices_gradients = asked->provider->stage->remakes_slices && (asked->saves != NULL || asked->all_saved != NULL);
    x.keeps_keys = asked->provider->stage->keeps_keys && remakes_attention(&x, 0, x.blocks) && !is_whole(&x);
    x.rows = x.alike ? SHAPES : x.blocks;
    *bytes = 0;
    if (stages * wide * wide > (size_t)STEPS)
        return TP_OK;
    slicings_open(&x);
    int64_t *best = calloc(stages * (wide + 2), sizeof *best);
    x.known = best == NULL ? NULL : calloc((size_t)x.rows * wide, sizeof *x.known);
    tp_status status = x.known == NULL ? tp_fail(TP_EMEMORY, "no memory to bound %zu stages", stages) : TP_OK;
    if (status == TP_OK) {
        *bytes = beside(asked) + over_ranks(&x, best);
        status = x.failed;
    }
    free(x.known);
    free(best);
    return status;
}
