/* cublasLt on the host, as far as cuda/gemm.c asks it: D = epilogue(op(A) op(B) + beta C), column-major, fp32 sums over k
 * ascending, one rounding. Columns of D (a row of the caller) depend on that column alone. It refuses what the real one
 * refuses (GELU's aux stride), and what a test tells it to (tp_emu_set_cublaslt). */
#include "cuda/dl_cublaslt.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "csrc/model/waits.h"
#include "cuda/emu/emu.h"
#include "cuda/emu/graph.h"

enum { ALLOC_FAILED = 3, INVALID = 7, EXECUTION_FAILED = 13 };
enum { TILE = 64, FREE_PARTS = 99 }; /* of depth; a number of parts that says there is none */

typedef struct {
    int32_t trans_a, trans_b, multiprocessors;
    uint32_t epilogue;
    const void *bias;
    void *aux;
    int64_t aux_stride;
} product;

typedef struct {
    int type;
    int64_t rows, columns, stride;
} matrix;

typedef struct {
    uint64_t workspace;
    uint32_t sums, aligned[4];
} preference;

static _Atomic int flags;
static _Atomic int64_t asked, multiplied, last_multiprocessors, weight_rows;

void
tp_emu_set_cublaslt(int refuse)
{
    atomic_store(&flags, refuse);
}

void
tp_emu_set_weight_rows(int64_t rows)
{
    atomic_store(&weight_rows, rows);
}

int64_t
tp_emu_weight_rows(void)
{
    int64_t rows = atomic_load(&weight_rows);
    return rows > 0 ? rows : TP_CUDA_WEIGHT_ROWS;
}

void
tp_emu_cublaslt_calls(int64_t *heuristics, int64_t *products, int64_t *multiprocessors)
{
    *heuristics = atomic_load(&asked);
    *products = atomic_load(&multiplied);
    *multiprocessors = atomic_load(&last_multiprocessors);
}

/* ---- objects -------------------------------------------------------------------------------------------------------- */

static int
create(lt_handle *out)
{
    *out = malloc(1);
    return *out ? LT_SUCCESS : ALLOC_FAILED;
}

static int
destroy(void *object)
{
    free(object);
    return LT_SUCCESS;
}

static size_t
version(void)
{
    return 130000;
}

static const char *
status_string(int status)
{
    return status == LT_SUCCESS ? "success" : status == INVALID ? "an invalid value" : status == LT_NOT_SUPPORTED
                            ? "not supported" : status == EXECUTION_FAILED ? "execution failed" : "no memory";
}

static int
desc_create(lt_desc *out, int compute, int scale)
{
    product *p = calloc(1, sizeof *p);
    *out = p;
    if (!p)
        return ALLOC_FAILED;
    p->epilogue = LT_EPILOGUE_DEFAULT;
    return compute == LT_COMPUTE_32F && scale == LT_R_32F ? LT_SUCCESS : INVALID;
}

static int
desc_set(lt_desc desc, int attribute, const void *value, size_t bytes)
{
    product *p = desc;
    struct {
        int attribute;
        void *field;
        size_t bytes;
    } const fields[] = {
        {LT_DESC_TRANSA, &p->trans_a, 4}, {LT_DESC_TRANSB, &p->trans_b, 4}, {LT_DESC_EPILOGUE, &p->epilogue, 4},
        {LT_DESC_BIAS_POINTER, &p->bias, 8}, {LT_DESC_EPILOGUE_AUX_POINTER, &p->aux, 8},
        {LT_DESC_EPILOGUE_AUX_LD, &p->aux_stride, 8}, {LT_DESC_SM_COUNT_TARGET, &p->multiprocessors, 4},
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        if (fields[i].attribute == attribute && fields[i].bytes == bytes) {
            memcpy(fields[i].field, value, bytes);
            return LT_SUCCESS;
        }
    return INVALID;
}

static int
layout_create(lt_layout *out, int type, uint64_t rows, uint64_t columns, int64_t stride)
{
    matrix *m = calloc(1, sizeof *m);
    *out = m;
    if (!m)
        return ALLOC_FAILED;
    *m = (matrix){type, (int64_t)rows, (int64_t)columns, stride};
    return stride >= m->rows && (type == LT_R_32F || type == LT_R_16BF) ? LT_SUCCESS : INVALID;
}

static int
preference_create(lt_preference *out)
{
    *out = calloc(1, sizeof(preference));
    return *out ? LT_SUCCESS : ALLOC_FAILED;
}

static int
preference_set(lt_preference object, int attribute, const void *value, size_t bytes)
{
    preference *p = object;
    if (attribute == LT_PREF_MAX_WORKSPACE_BYTES && bytes == 8)
        memcpy(&p->workspace, value, bytes);
    else if (attribute == LT_PREF_REDUCTION_SCHEME_MASK && bytes == 4)
        memcpy(&p->sums, value, bytes);
    else if (attribute >= LT_PREF_MIN_ALIGNMENT_A_BYTES && attribute <= LT_PREF_MIN_ALIGNMENT_D_BYTES && bytes == 4)
        memcpy(&p->aligned[attribute - LT_PREF_MIN_ALIGNMENT_A_BYTES], value, bytes);
    else
        return INVALID;
    return LT_SUCCESS;
}

/* ---- the product ---------------------------------------------------------------------------------------------------- */

static int
check(const product *p, const matrix *a, const matrix *b, const matrix *c, const matrix *d)
{
    int64_t m = p->trans_a ? a->columns : a->rows, k = p->trans_a ? a->rows : a->columns;
    int64_t n = p->trans_b ? b->rows : b->columns, also_k = p->trans_b ? b->columns : b->rows;
    int refuse = atomic_load(&flags), gelu = p->epilogue == LT_EPILOGUE_GELU_AUX_BIAS || p->epilogue == LT_EPILOGUE_DGELU;
    if (k != also_k || d->rows != m || d->columns != n || c->rows != m || c->columns != n || c->type != d->type ||
        a->type != b->type)
        return INVALID;
    if (gelu && (p->aux_stride % 8 || p->aux_stride < m || !p->aux || (uintptr_t)p->aux % 16))
        return INVALID;
    if ((p->epilogue & LT_EPILOGUE_BIAS) && !p->bias)
        return INVALID;
    if ((p->epilogue == LT_EPILOGUE_GELU_AUX_BIAS && refuse & TP_EMU_NO_GELU_AUX) ||
        (p->epilogue == LT_EPILOGUE_DGELU && refuse & TP_EMU_NO_DGELU) || refuse & TP_EMU_NO_PRODUCT)
        return gelu && refuse & TP_EMU_INVALID ? INVALID : LT_NOT_SUPPORTED;
    if (p->epilogue & LT_EPILOGUE_BIAS && a->type == LT_R_32F && refuse & TP_EMU_NO_BIAS)
        return refuse & TP_EMU_INVALID ? INVALID : LT_NOT_SUPPORTED;
    return LT_SUCCESS;
}

static int
get_heuristic(lt_handle handle, lt_desc desc, lt_layout a, lt_layout b, lt_layout c, lt_layout d, lt_preference wishes,
              int wanted, lt_heuristic results[], int *count)
{
    (void)handle;
    atomic_fetch_add(&asked, 1);
    *count = 0;
    int answer = check(desc, a, b, c, d);
    if (answer != LT_SUCCESS)
        return answer;
    int late = atomic_load(&flags) & TP_EMU_LATE_PIN;
    for (int i = 0; i < wanted && i < (late ? 12 : 3); i++) {
        memset(&results[i], 0, sizeof results[i]);
        results[i].algo.data[2] = late && i < 9 ? (uint64_t)((const matrix *)d)->columns : 0;
        results[i].algo.data[0] = (uint64_t)(i + 1);
        if (i == 0 && atomic_load(&flags) & TP_EMU_SPLITS)
            results[i].algo.data[1] = ((const preference *)wishes)->sums == LT_REDUCTION_NONE ? FREE_PARTS : 2;
        results[i].waves = 1.0f;
        (*count)++;
    }
    return LT_SUCCESS;
}

static int
algo_check(lt_handle handle, lt_desc desc, lt_layout a, lt_layout b, lt_layout c, lt_layout d, const lt_algo *algo,
           lt_heuristic *result)
{
    (void)handle;
    memset(result, 0, sizeof *result);
    result->algo = *algo;
    result->waves = 1.0f;
    if (atomic_load(&flags) & TP_EMU_NO_PIN && ((const matrix *)d)->columns % 2)
        return LT_NOT_SUPPORTED;
    if (algo->data[2] != 0 && algo->data[2] != (uint64_t)((const matrix *)d)->columns)
        return LT_NOT_SUPPORTED;
    return algo->data[0] ? check(desc, a, b, c, d) : INVALID;
}

static int
algo_get(const lt_algo *algo, int attribute, void *value, size_t bytes, size_t *written)
{
    uint32_t answer = attribute == LT_ALGO_ID ? (uint32_t)algo->data[0] : 1;
    if (attribute == LT_ALGO_SPLITK && algo->data[1] != 0)
        answer = algo->data[1] == FREE_PARTS ? (uint32_t)-2 : (uint32_t)algo->data[1];
    if (bytes != sizeof answer)
        return INVALID;
    memcpy(value, &answer, bytes);
    if (written)
        *written = bytes;
    return LT_SUCCESS;
}

static float
load(int type, const void *from, int64_t at)
{
    float x;
    if (type == LT_R_32F)
        return ((const float *)from)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void
store(int type, void *to, int64_t at, float x)
{
    uint32_t bits;
    if (type == LT_R_32F) {
        ((float *)to)[at] = x;
        return;
    }
    memcpy(&bits, &x, sizeof bits);
    uint32_t rounded = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    ((uint16_t *)to)[at] = (uint16_t)rounded;
}

static float
gelu(float h)
{
    float t = tanhf(0.7978845608f * (h + 0.044715f * h * h * h));
    return 0.5f * h * (1.0f + t);
}

static float
dgelu(float h)
{
    float t = tanhf(0.7978845608f * (h + 0.044715f * h * h * h));
    return 0.5f * (1.0f + t) + 0.5f * h * (1.0f - t * t) * 0.7978845608f * (1.0f + 3.0f * 0.044715f * h * h);
}

static void
finish(const product *p, const matrix *d, int64_t column, const float *sums, float beta, const void *c, const matrix *cm,
       void *to)
{
    int wrong = atomic_load(&flags) & TP_EMU_WRONG_GELU && d->columns % 2;
    for (int64_t i = 0; i < d->rows; i++) {
        int64_t aux = column * p->aux_stride + i;
        float x = sums[i];
        if (beta != 0.0f)
            x += beta * load(cm->type, c, column * cm->stride + i);
        if (p->epilogue & LT_EPILOGUE_BIAS)
            x += load(d->type, p->bias, i);
        if (p->epilogue == LT_EPILOGUE_GELU_AUX_BIAS) {
            store(d->type, p->aux, aux, x);
            x = wrong ? fmaxf(x, 0.0f) : gelu(x);
        } else if (p->epilogue == LT_EPILOGUE_DGELU) {
            float h = load(d->type, p->aux, aux);
            x *= wrong ? (float)(h > 0.0f) : dgelu(h);
        }
        store(d->type, to, column * d->stride + i, x);
    }
}

/* op(A) as floats, k by k: [k][m]. */
static void
spread(const product *p, const matrix *a, const void *from, int64_t depth, int64_t height, float *to)
{
    for (int64_t k = 0; k < depth; k++)
        for (int64_t i = 0; i < height; i++)
            to[k * height + i] = load(a->type, from, p->trans_a ? i * a->stride + k : k * a->stride + i);
}

typedef struct {
    product p;
    matrix a, b, c, d;
    const void *a_at, *b_at, *c_at;
    void *d_at;
    double alpha, beta;
    int64_t parts;
} work;

/* How many of `depth` products are summed, of which the first is *first: see emu.h. */
static int64_t
summed(const work *w, int64_t depth, int64_t *first)
{
    *first = w->parts == FREE_PARTS ? w->d.columns % depth : 0;
    return w->parts == 2 && depth / TILE % 2 == 0 && depth % TILE < 2 ? depth - depth % TILE : depth;
}

static tp_status
multiply(const void *body)
{
    const work *w = body;
    const product *p = &w->p;
    int64_t depth = p->trans_a ? w->a.rows : w->a.columns;
    float *rows = malloc((size_t)((depth + 1) * w->d.rows) * sizeof *rows), *sums = rows + depth * w->d.rows;
    if (!rows)
        return tp_fail(TP_EMEMORY, "no host memory for an emulated product");
    atomic_fetch_add(&multiplied, 1);
    atomic_store(&last_multiprocessors, p->multiprocessors);
    int64_t first, count = summed(w, depth, &first);
    spread(p, &w->a, w->a_at, depth, w->d.rows, rows);
    for (int64_t j = 0; j < w->d.columns; j++) {
        memset(sums, 0, (size_t)w->d.rows * sizeof *sums);
        for (int64_t i = 0; i < count; i++) {
            int64_t k = (first + i) % depth;
            float x = load(w->b.type, w->b_at, p->trans_b ? k * w->b.stride + j : j * w->b.stride + k);
            const float *row = rows + k * w->d.rows;
            for (int64_t m = 0; m < w->d.rows; m++)
                sums[m] += x * row[m];
        }
        for (int64_t m = 0; w->alpha != 1.0 && m < w->d.rows; m++)
            sums[m] *= (float)w->alpha;
        finish(p, &w->d, j, sums, (float)w->beta, w->c_at, &w->c, w->d_at);
    }
    free(rows);
    return TP_OK;
}

static int
matmul(lt_handle handle, lt_desc desc, const void *alpha, const void *a, lt_layout a_layout, const void *b,
       lt_layout b_layout, const void *beta, const void *c, lt_layout c_layout, void *d, lt_layout d_layout,
       const lt_algo *algo, void *workspace, size_t workspace_bytes, tp_stream stream)
{
    const product *p = desc;
    (void)handle, (void)workspace_bytes;
    int answer = tp_emu_breaks() ? EXECUTION_FAILED : check(p, a_layout, b_layout, c_layout, d_layout);
    if (answer != LT_SUCCESS || !algo->data[0] || !workspace)
        return answer != LT_SUCCESS ? answer : INVALID;
    if (algo->data[0] == 1 && atomic_load(&flags) & TP_EMU_NO_FIRST_ALGORITHM)
        return LT_NOT_SUPPORTED;
    if (algo->data[0] == 1 && atomic_load(&flags) & TP_EMU_NO_RUN && ((const matrix *)d_layout)->columns % 2)
        return LT_NOT_SUPPORTED;
    if (atomic_load(&flags) & TP_EMU_NO_CAPTURE && tp_emu_captures())
        return EXECUTION_FAILED;
    work w;
    memset(&w, 0, sizeof w); /* gaps too: they are hashed */
    memcpy(&w.p, p, sizeof w.p);
    memcpy(&w.a, a_layout, sizeof w.a);
    memcpy(&w.b, b_layout, sizeof w.b);
    memcpy(&w.c, c_layout, sizeof w.c);
    memcpy(&w.d, d_layout, sizeof w.d);
    w.a_at = a, w.b_at = b, w.c_at = c, w.d_at = d;
    w.alpha = (double)*(const float *)alpha;
    w.beta = (double)*(const float *)beta;
    w.parts = (int64_t)algo->data[1];
    return tp_emu_do(stream, "product", multiply, &w, sizeof w) == TP_OK ? LT_SUCCESS : EXECUTION_FAILED;
}

static const tp_cublaslt table = {
    create, destroy, version, status_string, desc_create, destroy, desc_set, layout_create, destroy, preference_create,
    destroy, preference_set, get_heuristic, algo_check, algo_get, matmul,
};

tp_status
tp_cublaslt_load(const tp_cublaslt **out)
{
    *out = &table;
    return TP_OK;
}

void
tp_cublaslt_found(const char **path, int *number)
{
    *path = "emulated";
    *number = 130000;
}
