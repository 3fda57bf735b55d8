#include "cuda/cudnn_graph.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ALIGNED = 16, /* bytes: what tp_cuda_attention_forward asks of its arrays */
    FIRST_VIRTUAL = 100,
    MOST_OPERATIONS = 32,
    MOST_DESCRIPTORS = 128,
    MOST_OFFERED = 8 /* engine configurations looked at */
};

struct tp_cudnn_plan {
    tp_attention shape;
    float scale, hidden;
    int32_t s_q, s_kv;
    dn_descriptor plan;
    int64_t engine, workspace;
    int count;
    dn_descriptor kept[MOST_DESCRIPTORS]; /* all that the plan was made of, which lives as long as it */
};

/* ---- errors ------------------------------------------------------------------------------------------------------------------ */

/* The library's own words are the thread's last: they end in a line's end or none. */
static tp_status
check(const tp_cudnn_library *dnn, int answer, const char *what)
{
    char more[256] = "";
    if (answer == DN_SUCCESS)
        return TP_OK;
    dnn->last_error(more, sizeof more);
    more[strcspn(more, "\n")] = 0;
    return tp_fail(TP_ERUNTIME, "cuDNN: %s: status %d (%s)%s%s", what, answer, dnn->error_string(answer), *more ? ": " : "",
                   more);
}

/* ---- a graph in the making --------------------------------------------------------------------------------------------------- */

/* What fails is kept, and nothing is asked after it: so a graph is written down as one reads it. */
typedef struct {
    const tp_cudnn_place *place;
    tp_cudnn_plan *plan;
    tp_status status;
    int64_t ids;
    int operations;
    dn_descriptor operation[MOST_OPERATIONS];
} maker;

static dn_descriptor
create(maker *m, int type, const char *what)
{
    dn_descriptor made = NULL;
    if (m->status != TP_OK)
        return NULL;
    if (m->plan->count == MOST_DESCRIPTORS) {
        m->status = tp_fail(TP_EINTERNAL, "a graph of more than %d descriptors", MOST_DESCRIPTORS);
        return NULL;
    }
    m->status = check(m->place->dnn, m->place->dnn->create_descriptor(type, &made), what);
    if (m->status == TP_OK)
        m->plan->kept[m->plan->count++] = made;
    return made;
}

static void
set(maker *m, dn_descriptor descriptor, int attribute, int type, int64_t count, const void *elements, const char *what)
{
    if (m->status == TP_OK)
        m->status = check(m->place->dnn, m->place->dnn->set(descriptor, attribute, type, count, elements), what);
}

static void
set_int(maker *m, dn_descriptor descriptor, int attribute, int64_t value, const char *what)
{
    set(m, descriptor, attribute, DN_TYPE_INT64, 1, &value, what);
}

static void
get(maker *m, dn_descriptor from, int attribute, int type, int64_t most, int64_t *count, void *out, const char *what)
{
    if (m->status == TP_OK)
        m->status = check(m->place->dnn, m->place->dnn->get(from, attribute, type, most, count, out), what);
}

/* Enumerations of the library are ints. */
static void
set_enum(maker *m, dn_descriptor descriptor, int attribute, int type, int value, const char *what)
{
    set(m, descriptor, attribute, type, 1, &value, what);
}

static void
set_descriptor(maker *m, dn_descriptor descriptor, int attribute, dn_descriptor value, const char *what)
{
    set(m, descriptor, attribute, DN_TYPE_BACKEND_DESCRIPTOR, 1, &value, what);
}

static void
finalize(maker *m, dn_descriptor descriptor, const char *what)
{
    if (m->status == TP_OK)
        m->status = check(m->place->dnn, m->place->dnn->finalize(descriptor), what);
}

typedef struct {
    int64_t dim[4], stride[4];
} extent;

typedef enum { IN_MEMORY, VIRTUAL, BY_VALUE } residence;

static dn_descriptor
tensor(maker *m, int64_t id, int type, residence where, const extent *e, const char *what)
{
    dn_descriptor made = create(m, DN_TENSOR, what);
    bool yes = true;
    set_enum(m, made, DN_TENSOR_DATA_TYPE, DN_TYPE_DATA_TYPE, type, what);
    set(m, made, DN_TENSOR_DIMENSIONS, DN_TYPE_INT64, 4, e->dim, what);
    set(m, made, DN_TENSOR_STRIDES, DN_TYPE_INT64, 4, e->stride, what);
    set_int(m, made, DN_TENSOR_UNIQUE_ID, id, what);
    set_int(m, made, DN_TENSOR_BYTE_ALIGNMENT, where == BY_VALUE || type != DN_BFLOAT16 ? 4 : ALIGNED, what);
    if (where == VIRTUAL)
        set(m, made, DN_TENSOR_IS_VIRTUAL, DN_TYPE_BOOLEAN, 1, &yes, what);
    if (where == BY_VALUE)
        set(m, made, DN_TENSOR_IS_BY_VALUE, DN_TYPE_BOOLEAN, 1, &yes, what);
    finalize(m, made, what);
    return made;
}

static extent
packed(int64_t b, int64_t h, int64_t rows, int64_t columns)
{
    return (extent){{b, h, rows, columns}, {h * rows * columns, rows * columns, columns, 1}};
}

static dn_descriptor
intermediate(maker *m, int type, const extent *e, const char *what)
{
    return tensor(m, FIRST_VIRTUAL + m->ids++, type, VIRTUAL, e, what);
}

static dn_descriptor
number(maker *m, tp_cudnn_id id, int type, const char *what)
{
    extent one = packed(1, 1, 1, 1);
    return tensor(m, id, type, BY_VALUE, &one, what);
}

static void
add_operation(maker *m, dn_descriptor made, const char *what)
{
    finalize(m, made, what);
    if (m->status == TP_OK && m->operations == MOST_OPERATIONS)
        m->status = tp_fail(TP_EINTERNAL, "a graph of more than %d operations", MOST_OPERATIONS);
    if (m->status == TP_OK)
        m->operation[m->operations++] = made;
}

static void
matmul(maker *m, dn_descriptor a, dn_descriptor b, dn_descriptor c, const char *what)
{
    dn_descriptor how = create(m, DN_MATMUL, what), made = create(m, DN_OPERATION_MATMUL, what);
    set_enum(m, how, DN_MATMUL_COMP_TYPE, DN_TYPE_DATA_TYPE, DN_FLOAT, what);
    finalize(m, how, what);
    set_descriptor(m, made, DN_OPERATION_MATMUL_ADESC, a, what);
    set_descriptor(m, made, DN_OPERATION_MATMUL_BDESC, b, what);
    set_descriptor(m, made, DN_OPERATION_MATMUL_CDESC, c, what);
    set_descriptor(m, made, DN_OPERATION_MATMUL_DESC, how, what);
    add_operation(m, made, what);
}

static void
reduce(maker *m, int operator, dn_descriptor x, dn_descriptor y, const char *what)
{
    dn_descriptor how = create(m, DN_REDUCTION, what), made = create(m, DN_OPERATION_REDUCTION, what);
    set_enum(m, how, DN_REDUCTION_OPERATOR, DN_TYPE_REDUCTION_OPERATOR_TYPE, operator, what);
    set_enum(m, how, DN_REDUCTION_COMP_TYPE, DN_TYPE_DATA_TYPE, DN_FLOAT, what);
    finalize(m, how, what);
    set_descriptor(m, made, DN_OPERATION_REDUCTION_XDESC, x, what);
    set_descriptor(m, made, DN_OPERATION_REDUCTION_YDESC, y, what);
    set_descriptor(m, made, DN_OPERATION_REDUCTION_DESC, how, what);
    add_operation(m, made, what);
}

/* y = x (mode) second; of BINARY_SELECT: where `chosen` x, else second; of GEN_INDEX: of each place its index along `axis`. */
typedef struct {
    int mode, precision;
    int64_t axis;
    dn_descriptor x, second, chosen, y;
} pointwise_operation;

static void
pointwise(maker *m, const pointwise_operation *op, const char *what)
{
    dn_descriptor how = create(m, DN_POINTWISE, what), made = create(m, DN_OPERATION_POINTWISE, what);
    set_enum(m, how, DN_POINTWISE_MODE, DN_TYPE_POINTWISE_MODE, op->mode, what);
    set_enum(m, how, DN_POINTWISE_MATH_PREC, DN_TYPE_DATA_TYPE, op->precision, what);
    if (op->mode == DN_GEN_INDEX)
        set_int(m, how, DN_POINTWISE_AXIS, op->axis, what);
    finalize(m, how, what);
    set_descriptor(m, made, DN_OPERATION_POINTWISE_PW_DESCRIPTOR, how, what);
    set_descriptor(m, made, DN_OPERATION_POINTWISE_XDESC, op->x, what);
    if (op->second != NULL)
        set_descriptor(m, made, DN_OPERATION_POINTWISE_BDESC, op->second, what);
    if (op->chosen != NULL)
        set_descriptor(m, made, DN_OPERATION_POINTWISE_TDESC, op->chosen, what);
    set_descriptor(m, made, DN_OPERATION_POINTWISE_YDESC, op->y, what);
    add_operation(m, made, what);
}

/* Into an intermediate of the same type. */
static dn_descriptor
apply(maker *m, int type, int mode, dn_descriptor x, dn_descriptor second, const extent *e, const char *what)
{
    dn_descriptor y = intermediate(m, type, e, what);
    pointwise(m, &(pointwise_operation){.mode = mode, .precision = type, .x = x, .second = second, .y = y}, what);
    return y;
}

static dn_descriptor
index_along(maker *m, int64_t axis, dn_descriptor x, const extent *e, const char *what)
{
    dn_descriptor y = intermediate(m, DN_INT32, e, what);
    pointwise(m, &(pointwise_operation){.mode = DN_GEN_INDEX, .precision = DN_INT32, .axis = axis, .x = x, .y = y}, what);
    return y;
}

/* ---- attention -------------------------------------------------------------------------------------------------------------- */

/* Scores with what a query may not see hidden. */
static dn_descriptor
mask(maker *m, dn_descriptor scores, const extent *square)
{
    dn_descriptor row = index_along(m, 2, scores, square, "row numbers");
    row = apply(m, DN_INT32, DN_ADD, row, number(m, TP_CUDNN_S_KV, DN_INT32, "s_kv"), square, "adding s_kv");
    row = apply(m, DN_INT32, DN_SUB, row, number(m, TP_CUDNN_S_Q, DN_INT32, "s_q"), square, "subtracting s_q");
    dn_descriptor column = index_along(m, 3, scores, square, "column numbers");
    dn_descriptor seen = apply(m, DN_BOOLEAN, DN_CMP_GE, row, column, square, "what a row sees");
    dn_descriptor hidden = number(m, TP_CUDNN_HIDDEN, DN_FLOAT, "what is hidden");
    dn_descriptor out = intermediate(m, DN_FLOAT, square, "masked scores");
    pointwise(m, &(pointwise_operation){.mode = DN_BINARY_SELECT, .precision = DN_FLOAT, .x = scores, .second = hidden,
                                        .chosen = seen, .y = out}, "masking");
    return out;
}

/* Probabilities in bf16; lse is written. */
static dn_descriptor
softmax(maker *m, dn_descriptor scores, dn_descriptor lse, const extent *square, const extent *row)
{
    dn_descriptor most = intermediate(m, DN_FLOAT, row, "the largest score"), sum = intermediate(m, DN_FLOAT, row, "the sum");
    reduce(m, DN_REDUCE_MAX, scores, most, "the largest score");
    dn_descriptor less = apply(m, DN_FLOAT, DN_SUB, scores, most, square, "subtracting the largest");
    dn_descriptor power = apply(m, DN_FLOAT, DN_EXP, less, NULL, square, "the exponential");
    reduce(m, DN_REDUCE_ADD, power, sum, "the sum");
    dn_descriptor log = apply(m, DN_FLOAT, DN_LOG, sum, NULL, row, "the logarithm");
    pointwise(m, &(pointwise_operation){.mode = DN_ADD, .precision = DN_FLOAT, .x = log, .second = most, .y = lse}, "lse");
    dn_descriptor p = intermediate(m, DN_BFLOAT16, square, "probabilities");
    pointwise(m, &(pointwise_operation){.mode = DN_DIV, .precision = DN_FLOAT, .x = power, .second = sum, .y = p}, "probabilities");
    return p;
}

static void
forward(maker *m)
{
    const tp_attention *s = &m->plan->shape;
    int64_t b = s->batch, h = s->heads, d = s->head_dim, s_q = s->slice, s_kv = s->context + s->slice;
    int64_t token = b * s->qkv_stride, o_token = b * s->o_stride;
    extent q = {{b, h, s_q, d}, {s->qkv_stride, d, token, 1}}, v = {{b, h, s_kv, d}, {s->qkv_stride, d, token, 1}};
    extent k = {{b, h, d, s_kv}, {s->qkv_stride, d, 1, token}}, o = {{b, h, s_q, d}, {s->o_stride, d, o_token, 1}};
    extent stats = {{b, h, s_q, 1}, {h * s->total, s->total, 1, 1}};
    extent square = packed(b, h, s_q, s_kv), row = packed(b, h, s_q, 1);
    dn_descriptor q_in = tensor(m, TP_CUDNN_Q, DN_BFLOAT16, IN_MEMORY, &q, "q");
    dn_descriptor k_in = tensor(m, TP_CUDNN_K, DN_BFLOAT16, IN_MEMORY, &k, "k");
    dn_descriptor v_in = tensor(m, TP_CUDNN_V, DN_BFLOAT16, IN_MEMORY, &v, "v");
    dn_descriptor lse = tensor(m, TP_CUDNN_LSE, DN_FLOAT, IN_MEMORY, &stats, "lse");
    dn_descriptor scores = intermediate(m, DN_FLOAT, &square, "scores");
    matmul(m, q_in, k_in, scores, "scores");
    scores = apply(m, DN_FLOAT, DN_MUL, scores, number(m, TP_CUDNN_SCALE, DN_FLOAT, "the scale"), &square, "scaling");
    dn_descriptor p = softmax(m, mask(m, scores, &square), lse, &square, &row);
    matmul(m, p, v_in, tensor(m, TP_CUDNN_O, DN_BFLOAT16, IN_MEMORY, &o, "o"), "o");
}

/* ---- choosing a plan ----------------------------------------------------------------------------------------------------------- */

static dn_descriptor
operation_graph(maker *m)
{
    dn_descriptor made = create(m, DN_OPERATIONGRAPH, "the graph");
    if (m->place->handle != NULL)
        set(m, made, DN_OPERATIONGRAPH_HANDLE, DN_TYPE_HANDLE, 1, &m->place->handle, "the graph's handle");
    set(m, made, DN_OPERATIONGRAPH_OPS, DN_TYPE_BACKEND_DESCRIPTOR, m->operations, m->operation, "the graph's operations");
    finalize(m, made, "the graph");
    return made;
}

/* How many configurations of engines cuDNN offers; they are in `offered`. */
static int64_t
ask(maker *m, dn_descriptor graph, dn_descriptor offered[MOST_OFFERED])
{
    static const char what[] = "what heuristics offer";
    dn_descriptor asked = create(m, DN_ENGINEHEUR, what);
    int64_t count = 0;
    for (int i = 0; i < MOST_OFFERED; i++)
        offered[i] = create(m, DN_ENGINECFG, what);
    set_descriptor(m, asked, DN_ENGINEHEUR_OPERATION_GRAPH, graph, what);
    set_enum(m, asked, DN_ENGINEHEUR_MODE, DN_TYPE_HEUR_MODE, DN_HEUR_MODE_A, what);
    if (m->place->handle == NULL)
        set_descriptor(m, asked, DN_ENGINEHEUR_DEVICEPROP, m->place->deviceprop, what);
    finalize(m, asked, what);
    get(m, asked, DN_ENGINEHEUR_RESULTS, DN_TYPE_BACKEND_DESCRIPTOR, MOST_OFFERED, &count, offered, what);
    return count < MOST_OFFERED ? count : MOST_OFFERED;
}

/* The number of its engine; a failure where runs of it may differ. */
static int64_t
look_at_engine(maker *m, dn_descriptor offered)
{
    static const char what[] = "an engine";
    dn_descriptor engine = create(m, DN_ENGINE, what);
    int64_t count = 0, index = -1;
    int note[DN_NOTES];
    get(m, offered, DN_ENGINECFG_ENGINE, DN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &engine, what);
    get(m, engine, DN_ENGINE_GLOBAL_INDEX, DN_TYPE_INT64, 1, &count, &index, "an engine's number");
    get(m, engine, DN_ENGINE_NUMERICAL_NOTE, DN_TYPE_NUMERICAL_NOTE, DN_NOTES, &count, note, "an engine's notes");
    for (int64_t i = 0; m->status == TP_OK && i < count && i < DN_NOTES; i++)
        if (note[i] == DN_NOTE_NONDETERMINISTIC)
            m->status = tp_fail(TP_ERUNTIME, "cuDNN: engine %lld is not deterministic", (long long)index);
    return index;
}

/* One attempt: sets the plan, or leaves why not in m->status. */
static void
build(maker *m, dn_descriptor offered)
{
    int64_t engine = look_at_engine(m, offered), count = 0, bytes = 0;
    dn_descriptor made = create(m, DN_EXECUTION_PLAN, "the plan");
    if (m->place->handle != NULL)
        set(m, made, DN_EXECUTION_PLAN_HANDLE, DN_TYPE_HANDLE, 1, &m->place->handle, "the plan's handle");
    else
        set_descriptor(m, made, DN_EXECUTION_PLAN_DEVICEPROP, m->place->deviceprop, "the plan's device");
    set_descriptor(m, made, DN_EXECUTION_PLAN_ENGINE_CONFIG, offered, "the plan's engine");
    finalize(m, made, "the plan");
    get(m, made, DN_EXECUTION_PLAN_WORKSPACE_SIZE, DN_TYPE_INT64, 1, &count, &bytes, "the plan's workspace");
    if (m->status == TP_OK && (bytes < 0 || (uint64_t)bytes > m->place->workspace_bytes))
        m->status = tp_fail(TP_ERUNTIME, "cuDNN: engine %lld wants %lld bytes of workspace, of which there are %llu",
                            (long long)engine, (long long)bytes, (unsigned long long)m->place->workspace_bytes);
    if (m->status != TP_OK)
        return;
    m->plan->plan = made;
    m->plan->engine = engine;
    m->plan->workspace = bytes;
}

static void
choose(maker *m)
{
    dn_descriptor graph = operation_graph(m), offered[MOST_OFFERED] = {NULL};
    int64_t count = ask(m, graph, offered);
    if (m->status == TP_OK && count < 1)
        m->status = tp_fail(TP_ERUNTIME, "cuDNN: no engine takes the graph (CUDNN_LOGLEVEL_DBG=2 CUDNN_LOGDEST_DBG=stderr tells why)");
    for (int64_t i = 0; i < count && m->plan->plan == NULL; i++) {
        if (m->status == TP_EINTERNAL)
            return;
        m->status = TP_OK;
        build(m, offered[i]);
    }
}

tp_status
tp_cudnn_plan_forward(const tp_cudnn_place *place, const tp_attention *shape, tp_cudnn_plan **out)
{
    tp_cudnn_plan *plan = calloc(1, sizeof *plan);
    maker m = {.place = place, .plan = plan};
    if (plan == NULL)
        return tp_fail(TP_EMEMORY, "no host memory for a plan of cuDNN");
    plan->shape = *shape;
    plan->scale = 1.0f / sqrtf((float)shape->head_dim);
    plan->hidden = -FLT_MAX;
    plan->s_q = (int32_t)shape->slice;
    plan->s_kv = (int32_t)(shape->context + shape->slice);
    forward(&m);
    if (m.status == TP_OK)
        choose(&m);
    if (m.status != TP_OK) {
        tp_cudnn_plan_free(place->dnn, plan);
        return m.status;
    }
    *out = plan;
    return TP_OK;
}

void
tp_cudnn_plan_free(const tp_cudnn_library *dnn, tp_cudnn_plan *plan)
{
    if (plan == NULL)
        return;
    while (plan->count > 0)
        (void)dnn->destroy_descriptor(plan->kept[--plan->count]);
    free(plan);
}

/* ---- running ----------------------------------------------------------------------------------------------------------------- */

static tp_status
fill(const tp_cudnn_library *dnn, dn_descriptor pack, const int64_t *id, void *const *pointer, int64_t count, void *workspace)
{
    static const char what[] = "naming the arrays of a run";
    TP_TRY(check(dnn, dnn->set(pack, DN_VARIANT_PACK_UNIQUE_IDS, DN_TYPE_INT64, count, id), what));
    TP_TRY(check(dnn, dnn->set(pack, DN_VARIANT_PACK_DATA_POINTERS, DN_TYPE_VOID_PTR, count, pointer), what));
    TP_TRY(check(dnn, dnn->set(pack, DN_VARIANT_PACK_WORKSPACE, DN_TYPE_VOID_PTR, 1, &workspace), what));
    return check(dnn, dnn->finalize(pack), what);
}

tp_status
tp_cudnn_plan_run(const tp_cudnn_place *place, const tp_cudnn_plan *plan, const void *q, const void *k, const void *v, void *o,
                  float *lse, void *workspace)
{
    const tp_cudnn_library *dnn = place->dnn;
    const tp_attention *s = &plan->shape;
    size_t before = (size_t)(s->context * s->batch), bf16 = 2; /* rows of q and o that are not this slice's */
    void *const pointer[] = {
        [TP_CUDNN_Q - 1] = (char *)(uintptr_t)q + before * (size_t)s->qkv_stride * bf16,
        [TP_CUDNN_K - 1] = (void *)(uintptr_t)k,
        [TP_CUDNN_V - 1] = (void *)(uintptr_t)v,
        [TP_CUDNN_O - 1] = (char *)o + before * (size_t)s->o_stride * bf16,
        [TP_CUDNN_LSE - 1] = lse + s->context,
        [TP_CUDNN_SCALE - 1] = (void *)(uintptr_t)&plan->scale,
        [TP_CUDNN_HIDDEN - 1] = (void *)(uintptr_t)&plan->hidden,
        [TP_CUDNN_S_Q - 1] = (void *)(uintptr_t)&plan->s_q,
        [TP_CUDNN_S_KV - 1] = (void *)(uintptr_t)&plan->s_kv,
    };
    int64_t id[TP_CUDNN_IDS - 1];
    dn_descriptor pack = NULL;
    for (int i = 0; i < TP_CUDNN_IDS - 1; i++)
        id[i] = i + 1;
    TP_TRY(check(dnn, dnn->create_descriptor(DN_VARIANT_PACK, &pack), "naming the arrays of a run"));
    tp_status status = fill(dnn, pack, id, pointer, TP_CUDNN_IDS - 1, workspace);
    if (status == TP_OK)
        status = check(dnn, dnn->execute(place->handle, plan->plan, pack), "running a plan of attention");
    (void)dnn->destroy_descriptor(pack);
    return status;
}

int64_t
tp_cudnn_plan_engine(const tp_cudnn_plan *plan)
{
    return plan->engine;
}

size_t
tp_cudnn_plan_workspace(const tp_cudnn_plan *plan)
{
    return (size_t)plan->workspace;
}
