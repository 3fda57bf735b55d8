/* Row-major matrices are cublasLt's column-major ones transposed, so every product is asked for as its transpose, D = A B:
 *   linear     y^T  [n_out, rows] = w^T [n_out, n_in]     x^T [n_in, rows]    A = w, as it lies    B = x, as it lies
 *   linear_t   y^T  [n_in, rows]  = w   [n_in, n_out]     x^T [n_out, rows]   A = w, transposed    B = x, as it lies
 *   linear_w   dw^T [n_out, n_in] = dy^T [n_out, rows]    x   [rows, n_in]    A = dy, as it lies   B = x, transposed
 * The bias runs along D's rows, which are y's columns: what the epilogue wants. The residual is C with beta 1. */
#include "cuda/gemm_inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/gemm_algo.h"

enum {
    MAX_CANDIDATES = 32, /* and asked for of what takes any number of rows: the fastest for many may not */
    RAGGED_CANDIDATES = 8, /* at least, of what no algorithm may do well */
    TIMED_RUNS = 4,   /* one behind the other: a product is shorter than the host takes to ask for it alone */
    TIMED_ROUNDS = 2, SHARED_ROUNDS = 8,
    CANONICAL_ROWS = 2048 /* a reproducible handle's algorithm for so many is that for any: many, since small tiles cost a large
                             product more than large ones a small one */
};

/* ---- a plan's descriptors ------------------------------------------------------------------------------------------- */

static tp_status
check_lt(const tp_gemm *gemm, int status, const tp_gemm_op *op, const char *what)
{
    static const char *const kinds[] = {"linear", "linear_t", "linear_w"};
    if (status == LT_SUCCESS)
        return TP_OK;
    return tp_fail(TP_ERUNTIME, "%s of %s (%lld rows, n_in %lld, n_out %lld, %s, epilogue %d): cublasLt status %d (%s)", what,
                   kinds[op->kind], (long long)op->rows, (long long)op->n_in, (long long)op->n_out,
                   op->dtype == TP_BF16 ? "bf16" : "fp32", (int)op->epilogue, status, gemm->lt->status_string(status));
}

#define NEVER 1e30 /* seconds */
#define LT_TRY(call, what) TP_TRY(check_lt(gemm, (call), op, (what)))

void
tp_gemm_plan_free(const tp_gemm *gemm, plan *p)
{
    if (!p)
        return;
    lt_layout layouts[] = {p->a, p->b, p->c, p->d};
    for (int i = 0; i < 4; i++)
        if (layouts[i])
            (void)gemm->lt->layout_destroy(layouts[i]);
    if (p->desc)
        (void)gemm->lt->desc_destroy(p->desc);
    free(p);
}

static int
epilogue_of(const tp_gemm_op *op, int fused, int bias_apart)
{
    int bias = op->bias && !bias_apart ? LT_EPILOGUE_BIAS : LT_EPILOGUE_DEFAULT;
    switch (op->epilogue) {
    case TP_GEMM_BIAS:
    case TP_GEMM_BIAS_RESIDUAL: return bias;
    case TP_GEMM_BIAS_GELU_AUX: return fused ? LT_EPILOGUE_GELU_AUX_BIAS : bias;
    case TP_GEMM_DGELU: return fused ? LT_EPILOGUE_DGELU : LT_EPILOGUE_DEFAULT;
    default: return LT_EPILOGUE_DEFAULT;
    }
}

/* The descriptor holds pointers: set before each run (and before heuristics, which read their alignment). */
tp_status
tp_gemm_set_pointers(const tp_gemm *gemm, const plan *p, const tp_gemm_op *op)
{
    if (p->epilogue & LT_EPILOGUE_BIAS)
        LT_TRY(gemm->lt->desc_set(p->desc, LT_DESC_BIAS_POINTER, &op->bias, sizeof op->bias), "the bias");
    if (p->fused && tp_gemm_is_gelu(op->epilogue))
        LT_TRY(gemm->lt->desc_set(p->desc, LT_DESC_EPILOGUE_AUX_POINTER, &op->aux, sizeof op->aux), "aux");
    return TP_OK;
}

static tp_status
describe_layouts(const tp_gemm *gemm, plan *p, const tp_gemm_op *op)
{
    int weight = op->kind == TP_GEMM_LINEAR_W, type = op->dtype == TP_BF16 ? LT_R_16BF : LT_R_32F;
    uint64_t rows = (uint64_t)op->rows, width = (uint64_t)tp_gemm_width(op);
    uint64_t out = (uint64_t)op->n_out, in = (uint64_t)op->n_in;
    const tp_cublaslt *lt = gemm->lt;
    LT_TRY(lt->layout_create(&p->a, type, out, weight ? rows : in, op->w_stride), "the layout of w");
    LT_TRY(lt->layout_create(&p->b, type, op->kind == TP_GEMM_LINEAR_T ? out : in, rows, op->x_stride), "the layout of x");
    int64_t c_stride = op->epilogue == TP_GEMM_BIAS_RESIDUAL ? op->aux_stride : op->y_stride;
    LT_TRY(lt->layout_create(&p->c, weight ? LT_R_32F : type, width, weight ? in : rows, c_stride), "the layout of C");
    LT_TRY(lt->layout_create(&p->d, weight ? LT_R_32F : type, width, weight ? in : rows, op->y_stride), "the layout of y");
    return TP_OK;
}

/* Tell cublasLt how many multiprocessors are free. A grid with as many blocks as there are multiprocessors takes twice its time
 * where some of these are held by waiting receives: the last blocks begin when the first have ended. A reproducible handle must
 * choose the same algorithm with messages as without, so it is told only after the choice, and only for products of one sum, whose
 * bits do not depend on the grid (a weight's gradient may be split by the grid's size). */
static tp_status
aim_at(const tp_gemm *gemm, const plan *p, const tp_gemm_op *op, int32_t multiprocessors)
{
    if (multiprocessors < tp_cuda_device_properties(gemm->device)->multiprocessors)
        LT_TRY(gemm->lt->desc_set(p->desc, LT_DESC_SM_COUNT_TARGET, &multiprocessors, sizeof multiprocessors),
               "the number of multiprocessors");
    return TP_OK;
}

static tp_status
describe_product(const tp_gemm *gemm, plan *p, const tp_gemm_op *op, gemm_way way)
{
    const tp_cublaslt *lt = gemm->lt;
    int32_t trans_a = op->kind == TP_GEMM_LINEAR_T ? LT_OP_T : LT_OP_N;
    int32_t trans_b = op->kind == TP_GEMM_LINEAR_W ? LT_OP_T : LT_OP_N;
    p->fused = way == GEMM_FUSED;
    p->bias_apart = way == GEMM_BARE;
    p->epilogue = epilogue_of(op, p->fused, p->bias_apart);
    uint32_t epilogue = (uint32_t)p->epilogue;
    LT_TRY(lt->desc_create(&p->desc, LT_COMPUTE_32F, LT_R_32F), "the descriptor");
    LT_TRY(lt->desc_set(p->desc, LT_DESC_TRANSA, &trans_a, sizeof trans_a), "transposing w");
    LT_TRY(lt->desc_set(p->desc, LT_DESC_TRANSB, &trans_b, sizeof trans_b), "transposing x");
    LT_TRY(lt->desc_set(p->desc, LT_DESC_EPILOGUE, &epilogue, sizeof epilogue), "the epilogue");
    if (p->fused && tp_gemm_is_gelu(op->epilogue))
        LT_TRY(lt->desc_set(p->desc, LT_DESC_EPILOGUE_AUX_LD, &op->aux_stride, sizeof op->aux_stride), "the stride of aux");
    TP_TRY(aim_at(gemm, p, op, gemm->multiprocessors - (gemm->options.reproducible ? 0 : tp_cuda_held(gemm->device))));
    TP_TRY(tp_gemm_set_pointers(gemm, p, op));
    return describe_layouts(gemm, p, op);
}

/* ---- running one ---------------------------------------------------------------------------------------------------- */

tp_status
tp_gemm_execute(const tp_gemm *gemm, const plan *p, const tp_gemm_op *op, const lt_algo *algo, float alpha)
{
    int residual = op->epilogue == TP_GEMM_BIAS_RESIDUAL;
    float beta = op->accumulate || residual ? 1.0f : 0.0f;
    void *y;
    TP_TRY(tp_gemm_before(p, op, &y));
    TP_TRY(tp_cuda_enter(gemm->device));
    int answer = gemm->lt->matmul(gemm->handle, p->desc, &alpha, op->w, p->a, op->x, p->b, &beta,
                                  residual ? op->aux : y, p->c, y, p->d, algo, gemm->workspace, gemm->workspace_bytes,
                                  gemm->stream);
    TP_TRY(tp_cuda_leave(gemm->device));
    TP_TRY(tp_cuda_library_launched(gemm->device, gemm->stream, "cublasLtMatmul", answer != LT_SUCCESS));
    LT_TRY(answer, "cublasLtMatmul");
    return tp_gemm_behind(gemm, p, op, y);
}

/* ---- choosing ------------------------------------------------------------------------------------------------------- */

static plan_key
key_of(const tp_gemm *gemm, const tp_gemm_op *op)
{
    /* slices begin where they do, and must get the same algorithm: by rows, gemm_key.h */
    return plan_key_of(op, gemm->options.reproducible ? 16 : 256);
}

/* A row's bits would follow from how many rows there are. A weight's gradient has a micro-batch's rows whatever the slicing, and
 * split sums are the same bits in every run (cuBLAS documentation, "Results reproducibility"): without them a small weight keeps
 * few multiprocessors busy. */
static int
one_sum(const tp_gemm *gemm, const tp_gemm_op *op)
{
    return gemm->options.reproducible && op->kind != TP_GEMM_LINEAR_W;
}

static tp_status
prefer(const tp_gemm *gemm, const plan *p, const tp_gemm_op *op, lt_preference preference)
{
    const tp_cublaslt *lt = gemm->lt;
    uint64_t workspace = gemm->workspace_bytes;
    uint32_t sums = one_sum(gemm, op) || tp_gemm_ragged(op) ? LT_REDUCTION_NONE : LT_REDUCTION_ALL;
    int64_t c = op->epilogue == TP_GEMM_BIAS_RESIDUAL ? p->key.align_aux : p->key.align_y;
    uint32_t aligned[4] = {(uint32_t)p->key.align_w, (uint32_t)p->key.align_x, (uint32_t)c, (uint32_t)p->key.align_y};
    LT_TRY(lt->preference_set(preference, LT_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace), "the workspace");
    LT_TRY(lt->preference_set(preference, LT_PREF_REDUCTION_SCHEME_MASK, &sums, sizeof sums), "the reduction schemes");
    for (int i = 0; i < 4; i++)
        LT_TRY(lt->preference_set(preference, LT_PREF_MIN_ALIGNMENT_A_BYTES + i, &aligned[i], sizeof aligned[i]),
               "the alignment");
    return TP_OK;
}

/* Up to `wanted` algorithms, the one expected to be fastest first; *count 0: cublasLt has none for this. */
static tp_status
candidates(const tp_gemm *gemm, const plan *p, const tp_gemm_op *op, int wanted, lt_heuristic *found, int *count)
{
    lt_preference preference = NULL;
    *count = 0;
    LT_TRY(gemm->lt->preference_create(&preference), "preferences");
    tp_status status = prefer(gemm, p, op, preference);
    int answer = LT_SUCCESS;
    if (status == TP_OK)
        status = tp_cuda_enter(gemm->device);
    if (status == TP_OK) {
        answer = gemm->lt->get_heuristic(gemm->handle, p->desc, p->a, p->b, p->c, p->d, preference, wanted, found, count);
        status = tp_cuda_leave(gemm->device);
    }
    (void)gemm->lt->preference_destroy(preference);
    TP_TRY(status);
    int other = p->fused ? tp_gemm_is_gelu(op->epilogue) : !p->bias_apart && tp_gemm_may_add_bias(op);
    if (answer == LT_NOT_SUPPORTED || (answer != LT_SUCCESS && other))
        *count = 0; /* a fused epilogue that some architecture lacks is an invalid value there, or not supported */
    else
        LT_TRY(answer, "asking for algorithms");
    tp_gemm_drop_refused(gemm, found, count);
    tp_gemm_sift(gemm->lt, op, one_sum(gemm, op), gemm->workspace_bytes, found, count);
    return TP_OK;
}

static void
take(plan *p, const lt_heuristic *choice)
{
    p->algo = choice->algo;
    p->workspace = choice->workspace;
    p->waves = choice->waves;
}

/* Seconds of one run with this algorithm, of a few one behind the other. */
static tp_status
time_algo(const tp_gemm *gemm, const plan *p, const tp_gemm_op *op, const lt_algo *algo, tp_cuda_event events[2],
          double *seconds)
{
    double all;
    TP_TRY(tp_gemm_execute(gemm, p, op, algo, 1.0f)); /* warms up, and lets the calls run ahead of the device */
    TP_TRY(tp_cuda_event_record(gemm->device, events[0], gemm->stream));
    for (int i = 0; i < TIMED_RUNS; i++)
        TP_TRY(tp_gemm_execute(gemm, p, op, algo, 1.0f));
    TP_TRY(tp_cuda_event_record(gemm->device, events[1], gemm->stream));
    TP_TRY(tp_cuda_event_synchronize(gemm->device, events[1]));
    TP_TRY(tp_cuda_event_elapsed(gemm->device, events[0], events[1], &all));
    *seconds = all / (double)TIMED_RUNS;
    return TP_OK;
}

/* Time the candidates of p, keep the fastest in it; *seconds its time. In rounds of all of them: the clock of a device that was
 * idle rises meanwhile, and would favour the later ones. The best round of each counts; of a part of a device their mean, since the
 * other parts time theirs meanwhile, as they will work later, and what is fastest alone need not be so beside others (512 rows of a
 * quarter of an H200: by tiles of 128 x 128 and of 128 x 256 78.1 and 78.5 us alone, 101.8 and 95.0 with three others). */
static tp_status
pick(const tp_gemm *gemm, plan *p, const tp_gemm_op *op, lt_heuristic *found, int count, double *seconds)
{
    tp_cuda_event events[2] = {NULL, NULL};
    tp_status status = tp_cuda_event_create(gemm->device, 1, &events[0]);
    if (status == TP_OK)
        status = tp_cuda_event_create(gemm->device, 1, &events[1]);
    *seconds = NEVER;
    tp_status tried = TP_OK;
    int shares = gemm->multiprocessors < tp_cuda_device_properties(gemm->device)->multiprocessors;
    int rounds = shares ? SHARED_ROUNDS : TIMED_ROUNDS;
    double took[MAX_CANDIDATES] = {0};
    for (int i = 0; status == TP_OK && i < rounds * count; i++) {
        double one, *mine = &took[i % count];
        tried = time_algo(gemm, p, op, &found[i % count].algo, events, &one); /* one that does not run is passed over */
        one = tried != TP_OK ? NEVER : shares ? *mine + one / rounds : one;
        *mine = shares || i < count || one < *mine ? one : *mine;
    }
    for (int i = 0; status == TP_OK && i < count; i++) {
        if (took[i] < *seconds)
            take(p, &found[i]);
        *seconds = took[i] < *seconds ? took[i] : *seconds;
    }
    if (*seconds == NEVER && status == TP_OK)
        status = tried;
    for (int i = 0; i < 2; i++)
        tp_cuda_event_destroy(gemm->device, events[i]);
    return status;
}

/* Whether the algorithm can do the product that p describes; *found has it and what it needs. */
static int
can(const tp_gemm *gemm, const plan *p, const lt_algo *algo, lt_heuristic *found)
{
    if (tp_cuda_enter(gemm->device) != TP_OK)
        return 0;
    int answer = gemm->lt->algo_check(gemm->handle, p->desc, p->a, p->b, p->c, p->d, algo, found);
    found->algo = *algo;
    return tp_cuda_leave(gemm->device) == TP_OK && answer == LT_SUCCESS && found->workspace <= gemm->workspace_bytes;
}

/* *does: 1 if the algorithm can do this product for few rows and for many. */
static tp_status
does_any_rows(const tp_gemm *gemm, const tp_gemm_op *op, gemm_way way, const lt_algo *algo, int *does)
{
    static const int64_t probes[] = {1, 7, 64, 200, 16384};
    *does = 1;
    for (size_t i = 0; *does && i < sizeof probes / sizeof *probes; i++) {
        tp_gemm_op other = *op;
        lt_heuristic checked;
        plan *p = calloc(1, sizeof *p);
        if (!p) /* not 0: another algorithm would be taken without a word, and may sum in another order */
            return tp_fail(TP_EMEMORY, "no host memory for the plan of a product");
        other.rows = probes[i];
        *does = describe_product(gemm, p, &other, way) == TP_OK && can(gemm, p, algo, &checked);
        tp_gemm_plan_free(gemm, p);
    }
    return TP_OK;
}

tp_status
tp_gemm_try_plan(const tp_gemm *gemm, const plan_key *key, const tp_gemm_op *op, gemm_way way, double *seconds, plan **out)
{
    lt_heuristic found[MAX_CANDIDATES];
    int pins = one_sum(gemm, op), count = 0;
    int timed = seconds ? gemm->options.candidates : 1, least = tp_gemm_ragged(op) ? RAGGED_CANDIDATES : 1;
    int wanted = pins || gemm->refusals > 0 ? MAX_CANDIDATES : timed > least ? timed : least;
    *out = NULL;
    plan *p = calloc(1, sizeof *p);
    if (!p)
        return tp_fail(TP_EMEMORY, "no host memory for the plan of a product");
    p->key = *key;
    memset(found, 0, sizeof found);
    tp_status status = describe_product(gemm, p, op, way);
    if (status == TP_OK)
        status = candidates(gemm, p, op, wanted, found, &count);
    if (status == TP_OK && count > 0) {
        int best = 0, does = 0;
        for (; pins && !does && best < count && status == TP_OK; best += !does)
            status = does_any_rows(gemm, op, way, &found[best].algo, &does);
        take(p, &found[best < count ? best : 0]);
        if (seconds && status == TP_OK)
            status = pick(gemm, p, op, found, count, seconds);
    }
    if (status != TP_OK || count == 0) {
        tp_gemm_plan_free(gemm, p);
        return status;
    }
    *out = p;
    return TP_OK;
}

/* cublasLt fuses a GELU only where aux has rows of a multiple of 8 elements (CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD) at
 * 16-byte boundaries; GELU_AUX_BIAS reads a bias. */
static int
may_fuse(const tp_gemm *gemm, const plan_key *key)
{
    if (gemm->options.fuse == 1 || key->aux_stride % 8 || key->align_aux < 16)
        return 0;
    return key->epilogue == TP_GEMM_DGELU || key->align_bias >= 16;
}

static tp_status
choose(tp_gemm *gemm, const plan_key *key, const tp_gemm_op *op, int timed, plan **out)
{
    double seconds[2] = {NEVER, NEVER};
    plan *fused = NULL, *separate = NULL;
    int gelu = tp_gemm_is_gelu(op->epilogue), gaps = gelu && (op->aux_stride != tp_gemm_width(op) || op->y_stride != op->aux_stride);
    tp_status status = TP_OK;
    if (gelu && may_fuse(gemm, key))
        status = tp_gemm_try_plan(gemm, key, op, GEMM_FUSED, timed ? &seconds[0] : NULL, &fused);
    if (status == TP_OK && (!fused || (timed && !gaps)))
        status = tp_gemm_try_plan(gemm, key, op, GEMM_APART, timed ? &seconds[1] : NULL, &separate);
    if (status == TP_OK && !fused && !separate && tp_gemm_may_add_bias(op)) {
        status = tp_gemm_try_plan(gemm, key, op, GEMM_BARE, NULL, &separate);
        if (separate)
            tp_gemm_say(gemm, GEMM_NO_BIAS, "a bias is added by a kernel of its own (for %lld rows, n_in %lld, n_out %lld cublasLt has "
                        "no fp32 product that adds one)", (long long)op->rows, (long long)op->n_in, (long long)op->n_out);
    }
    if (status == TP_OK && !fused && !separate)
        status = check_lt(gemm, LT_NOT_SUPPORTED, op, "asking for algorithms");
    int keep_fused = fused && (!separate || seconds[0] <= seconds[1]);
    *out = status != TP_OK ? NULL : keep_fused ? fused : separate;
    tp_gemm_plan_free(gemm, *out == fused ? NULL : fused);
    tp_gemm_plan_free(gemm, *out == separate ? NULL : separate);
    return status;
}

/* A reproducible handle's algorithm of this class of products: asked for at CANONICAL_ROWS whatever comes first. */
static tp_status
pin_of(tp_gemm *gemm, const tp_gemm_op *op, plan **out)
{
    tp_gemm_op canonical = *op;
    canonical.rows = CANONICAL_ROWS;
    plan_key key = key_of(gemm, &canonical);
    for (plan *p = gemm->pins; p; p = p->next)
        if (memcmp(&p->key, &key, sizeof key) == 0) {
            *out = p;
            return TP_OK;
        }
    plan *made;
    TP_TRY(choose(gemm, &key, &canonical, 0, &made));
    made->next = gemm->pins;
    *out = gemm->pins = made;
    return TP_OK;
}

/* *out NULL: cublasLt refuses the algorithm for so many rows, or it was found wanting. */
static tp_status
try_pin(const tp_gemm *gemm, plan *pin, const plan_key *key, const tp_gemm_op *op, plan **out)
{
    lt_heuristic checked = {0};
    *out = NULL;
    if (tp_gemm_was_refused(gemm, &pin->algo) || (pin->fused && tp_gemm_is_gelu(op->epilogue) && gemm->options.fuse == 1))
        return TP_OK;
    plan *p = calloc(1, sizeof *p);
    if (!p)
        return tp_fail(TP_EMEMORY, "no host memory for the plan of a product");
    p->key = *key;
    tp_status status = describe_product(gemm, p, op, pin->bias_apart ? GEMM_BARE : pin->fused ? GEMM_FUSED : GEMM_APART);
    int does = status == TP_OK && can(gemm, p, &pin->algo, &checked);
    if (does && tp_gemm_is_one_sum(gemm->lt, &pin->algo))
        status = aim_at(gemm, p, op, gemm->multiprocessors - tp_cuda_held(gemm->device));
    if (status != TP_OK || !does) {
        tp_gemm_plan_free(gemm, p);
        return status;
    }
    take(p, &checked);
    p->pin = pin;
    pin->users++;
    *out = p;
    return TP_OK;
}

/* Where the pinned algorithm cannot be had, the product is done all the same, and it is said. */
static tp_status
choose_pinned(tp_gemm *gemm, const plan_key *key, const tp_gemm_op *op, plan **out)
{
    plan *pin;
    TP_TRY(pin_of(gemm, op, &pin));
    TP_TRY(try_pin(gemm, pin, key, op, out));
    if (*out && tp_gemm_is_one_sum(gemm->lt, &pin->algo))
        return TP_OK;
    tp_gemm_say(gemm, GEMM_DIFFERS, "products may differ in their last bits from one slicing to another (for %lld rows, n_in %lld, "
                "n_out %lld cublasLt %s)", (long long)op->rows, (long long)op->n_in, (long long)op->n_out,
                *out ? "has only algorithms with split sums" : "refuses the algorithm of other rows");
    return *out ? TP_OK : choose(gemm, key, op, 0, out);
}

static plan **
bucket_of(tp_gemm *gemm, const plan_key *key)
{
    const unsigned char *bytes = (const unsigned char *)key;
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < sizeof *key; i++)
        hash = (hash ^ bytes[i]) * 1099511628211u;
    return &gemm->buckets[hash % GEMM_BUCKETS];
}

static plan *
find(tp_gemm *gemm, const plan_key *key)
{
    for (plan *p = *bucket_of(gemm, key); p; p = p->next)
        if (memcmp(&p->key, key, sizeof *key) == 0)
            return p;
    return NULL;
}

static tp_status
plan_of(tp_gemm *gemm, const tp_gemm_op *op, int timed, plan **out)
{
    plan_key key = key_of(gemm, op);
    *out = find(gemm, &key);
    if (*out)
        return TP_OK;
    if (tp_cuda_capturing(gemm->device, gemm->stream))
        return tp_fail(TP_EINTERNAL, "a product was not prepared before its capture (kind %d, %lld rows, n_in %lld, n_out %lld)",
                       (int)op->kind, (long long)op->rows, (long long)op->n_in, (long long)op->n_out);
    int times = timed && gemm->options.candidates > 1;
    TP_TRY(one_sum(gemm, op) ? choose_pinned(gemm, &key, op, out) : choose(gemm, &key, op, times, out));
    plan **bucket = bucket_of(gemm, &key);
    (*out)->next = *bucket;
    *bucket = *out;
    gemm->count++;
    return TP_OK;
}

static void
drop_pin(tp_gemm *gemm, plan *pin)
{
    if (pin == NULL || --pin->users > 0)
        return;
    plan **at = &gemm->pins;
    while (*at != pin)
        at = &(*at)->next;
    *at = pin->next;
    tp_gemm_plan_free(gemm, pin);
}

tp_status
tp_gemm_replan(tp_gemm *gemm, const tp_gemm_op *op, plan **p)
{
    plan **at = bucket_of(gemm, &(*p)->key);
    while (*at != *p)
        at = &(*at)->next;
    *at = (*p)->next;
    gemm->count--;
    drop_pin(gemm, (*p)->pin);
    tp_gemm_plan_free(gemm, *p);
    return plan_of(gemm, op, 1, p);
}

/* ---- the handle ----------------------------------------------------------------------------------------------------- */

tp_status
tp_gemm_open(tp_cuda_device *device, tp_stream stream, const tp_gemm_options *options, void *workspace, tp_gemm **out)
{
    static const tp_gemm_options plain = {0, 0, 0};
    const tp_cublaslt *lt;
    *out = NULL;
    if (!workspace)
        return tp_fail(TP_EVALUE, "gemm: the workspace is NULL; it takes %zu bytes", tp_gemm_workspace_bytes(device));
    if (options && (options->candidates < 0 || options->candidates > MAX_CANDIDATES))
        return tp_fail(TP_EVALUE, "gemm: candidates is %d; it must be 0 to %d", options->candidates, MAX_CANDIDATES);
    TP_TRY(tp_cublaslt_load(&lt));
    TP_TRY(tp_cuda_bind(device));
    tp_gemm *gemm = calloc(1, sizeof *gemm);
    if (!gemm)
        return tp_fail(TP_EMEMORY, "no host memory for a gemm handle");
    gemm->device = device;
    gemm->stream = stream;
    gemm->options = options ? *options : plain;
    gemm->lt = lt;
    gemm->workspace = workspace;
    gemm->workspace_bytes = tp_gemm_workspace_bytes(device);
    gemm->multiprocessors = tp_cuda_multiprocessors(device);
    int status = LT_SUCCESS;
    tp_status entered = tp_cuda_enter(device);
    if (entered == TP_OK) {
        status = lt->create(&gemm->handle);
        entered = tp_cuda_leave(device);
    }
    if (entered != TP_OK || status != LT_SUCCESS) {
        free(gemm);
        return entered != TP_OK ? entered : tp_fail(TP_ERUNTIME, "cublasLtCreate: status %d (%s)", status, lt->status_string(status));
    }
    *out = gemm;
    return TP_OK;
}

void
tp_gemm_close(tp_gemm *gemm)
{
    if (!gemm)
        return;
    for (int i = 0; i <= GEMM_BUCKETS; i++)
        for (plan *p = i < GEMM_BUCKETS ? gemm->buckets[i] : gemm->pins, *next; p; p = next) {
            next = p->next;
            tp_gemm_plan_free(gemm, p);
        }
    (void)gemm->lt->destroy(gemm->handle);
    free(gemm);
}

tp_status
tp_gemm_prepare(tp_gemm *gemm, const tp_gemm_op *op)
{
    plan *p;
    TP_TRY(tp_gemm_check(op));
    if (op->rows == 0)
        return TP_OK;
    TP_TRY(tp_cuda_bind(gemm->device));
    int64_t known = gemm->count;
    TP_TRY(plan_of(gemm, op, 1, &p));
    return gemm->count > known ? tp_gemm_prove(gemm, op, p) : TP_OK;
}

tp_status
tp_gemm_run(tp_gemm *gemm, const tp_gemm_op *op)
{
    plan *p;
    TP_TRY(tp_gemm_check(op));
    TP_TRY(tp_cuda_bind(gemm->device));
    if (op->rows > 0) {
        TP_TRY(plan_of(gemm, op, 0, &p));
        TP_TRY(tp_gemm_set_pointers(gemm, p, op));
        return tp_gemm_execute(gemm, p, op, &p->algo, 1.0f);
    }
    if (op->kind != TP_GEMM_LINEAR_W || op->accumulate)
        return TP_OK;
    for (int64_t i = 0; i < op->n_in; i++)
        TP_TRY(tp_cuda_memset(gemm->device, gemm->stream, (float *)op->y + i * op->y_stride, 0, 4 * (size_t)op->n_out));
    return TP_OK;
}

int64_t
tp_gemm_plans(const tp_gemm *gemm)
{
    return gemm->count;
}

const char *
tp_gemm_caveat(const tp_gemm *gemm)
{
    return gemm->caveat;
}

void
tp_gemm_describe(tp_gemm *gemm, const tp_gemm_op *op, char *text, size_t size)
{
    int32_t id = -1, split = -1;
    uint32_t tile = 0, stages = 0;
    plan_key key = key_of(gemm, op);
    const plan *p = find(gemm, &key);
    if (!p) {
        snprintf(text, size, "not prepared");
        return;
    }
    (void)gemm->lt->algo_get(&p->algo, LT_ALGO_ID, &id, sizeof id, NULL);
    (void)gemm->lt->algo_get(&p->algo, LT_ALGO_TILE_ID, &tile, sizeof tile, NULL);
    (void)gemm->lt->algo_get(&p->algo, LT_ALGO_SPLITK, &split, sizeof split, NULL);
    (void)gemm->lt->algo_get(&p->algo, LT_ALGO_STAGES_ID, &stages, sizeof stages, NULL);
    snprintf(text, size, "cublasLt algorithm %d, tile %u, stages %u, split-K %d, %zu bytes of workspace, %.2f waves%s%s", (int)id,
             (unsigned)tile, (unsigned)stages, (int)split, p->workspace, (double)p->waves,
             !tp_gemm_is_gelu(op->epilogue) ? "" : p->fused ? ", GELU fused" : ", GELU apart", p->bias_apart ? ", bias apart" : "");
}
