/* libcudnn.so for tests: takes a graph through the backend API, and on execute computes that very graph (fake_cudnn_run.c). It is
 * strict where the real library is: attributes have their types, descriptors are whole before they are used, tensors of an
 * operation match, every tensor in memory has a pointer of its alignment. Work goes in the order of the emulated stream, and into
 * graphs that it captures. Faults: fake_cudnn_set. */
#include "tests/cuda/fake_cudnn.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define FAKE(name) EXPORT int name

enum { NOT_FINALIZED = 2004, WRONG_SHAPE = 2008, WRONG_TYPE = 2010, NO_PATTERN = 3001 };

int fake_faults;
int64_t fake_workspace = 256;
static int64_t built, executed;

EXPORT void
fake_cudnn_set(int faults, int64_t workspace)
{
    fake_faults = faults;
    fake_workspace = workspace;
    built = executed = 0;
}

/* which: 0 plans built, 1 plans run */
EXPORT int64_t
fake_cudnn_count(int which)
{
    return which == 0 ? built : executed;
}

static char said[256];

int
fake_refuse(int code, const char *why)
{
    snprintf(said, sizeof said, "%s", why);
    return code;
}

/* ---- descriptors ------------------------------------------------------------------------------------------------------------ */

struct dn_context {
    tp_stream stream;
};

/* What may be set on what, of which type, and at most how many. */
static const struct {
    int on, name, type, most;
} known[] = {
    {DN_TENSOR, DN_TENSOR_DATA_TYPE, DN_TYPE_DATA_TYPE, 1},
    {DN_TENSOR, DN_TENSOR_DIMENSIONS, DN_TYPE_INT64, 8},
    {DN_TENSOR, DN_TENSOR_STRIDES, DN_TYPE_INT64, 8},
    {DN_TENSOR, DN_TENSOR_UNIQUE_ID, DN_TYPE_INT64, 1},
    {DN_TENSOR, DN_TENSOR_BYTE_ALIGNMENT, DN_TYPE_INT64, 1},
    {DN_TENSOR, DN_TENSOR_IS_VIRTUAL, DN_TYPE_BOOLEAN, 1},
    {DN_TENSOR, DN_TENSOR_IS_BY_VALUE, DN_TYPE_BOOLEAN, 1},
    {DN_MATMUL, DN_MATMUL_COMP_TYPE, DN_TYPE_DATA_TYPE, 1},
    {DN_REDUCTION, DN_REDUCTION_OPERATOR, DN_TYPE_REDUCTION_OPERATOR_TYPE, 1},
    {DN_REDUCTION, DN_REDUCTION_COMP_TYPE, DN_TYPE_DATA_TYPE, 1},
    {DN_POINTWISE, DN_POINTWISE_MODE, DN_TYPE_POINTWISE_MODE, 1},
    {DN_POINTWISE, DN_POINTWISE_MATH_PREC, DN_TYPE_DATA_TYPE, 1},
    {DN_POINTWISE, DN_POINTWISE_AXIS, DN_TYPE_INT64, 1},
    {DN_OPERATION_MATMUL, DN_OPERATION_MATMUL_ADESC, DN_TYPE_BACKEND_DESCRIPTOR, 1},
    {DN_OPERATION_MATMUL, DN_OPERATION_MATMUL_BDESC, DN_TYPE_BACKEND_DESCRIPTOR, 1},
    {DN_OPERATION_MATMUL, DN_OPERATION_MATMUL_CDESC, DN_TYPE_BACKEND_DESCRIPTOR, 1},
    {DN_OPERATION_MATMUL, DN_OPERATION_MATMUL_DESC, DN_TYPE_BACKEND_DESCRIPTOR, 1},
    {DN_OPERATION_REDUCTION, DN_OPERATION_REDUCTION_XDESC, DN_TYPE_BACKEND_DESCRIPTOR, 1},
    {DN_OPERATION_REDUCTION, DN_OPERATION_REDUCTION_YDESC, DN_TYPE_BACKEND_DESCRIPTOR, 1},
    {DN_OPERATION_REDUCTION, DN_OPERATION_REDUCTION_DESC, DN_TYPE_BACKEND_DESCRIPTOR, 1},
    {DN_OPERATION_POINTWISE, DN_OPERATION_POINTWISE_PW_DESCRIPTOR, DN_TYPE_BACKEND_DESCRIPTOR, 1},
    {DN_OPERATION_POINTWISE, DN_OPERATION_POINTWISE_XDESC, DN_TYPE_BACKEND_DESCRIPTOR, 1},
    {DN_OPERATION_POINTWISE, DN_OPERATION_POINTWISE_BDESC, DN_TYPE_BACKEND_DESCRIPTOR, 1},
    {DN_OPERATION_POINTWISE, DN_OPERATION_POINTWISE_TDESC, DN_TYPE_BACKEND_DESCRIPTOR, 1},
    {DN_OPERATION_POINTWISE, DN_OPERATION_POINTWISE_YDESC, DN_TYPE_BACKEND_DESCRIPTOR, 1},
    {DN_OPERATIONGRAPH, DN_OPERATIONGRAPH_HANDLE, DN_TYPE_HANDLE, 1},
    {DN_OPERATIONGRAPH, DN_OPERATIONGRAPH_OPS, DN_TYPE_BACKEND_DESCRIPTOR, 64},
    {DN_ENGINEHEUR, DN_ENGINEHEUR_OPERATION_GRAPH, DN_TYPE_BACKEND_DESCRIPTOR, 1},
    {DN_ENGINEHEUR, DN_ENGINEHEUR_MODE, DN_TYPE_HEUR_MODE, 1},
    {DN_EXECUTION_PLAN, DN_EXECUTION_PLAN_HANDLE, DN_TYPE_HANDLE, 1},
    {DN_EXECUTION_PLAN, DN_EXECUTION_PLAN_ENGINE_CONFIG, DN_TYPE_BACKEND_DESCRIPTOR, 1},
    {DN_VARIANT_PACK, DN_VARIANT_PACK_UNIQUE_IDS, DN_TYPE_INT64, MOST_TENSORS},
    {DN_VARIANT_PACK, DN_VARIANT_PACK_DATA_POINTERS, DN_TYPE_VOID_PTR, MOST_TENSORS},
    {DN_VARIANT_PACK, DN_VARIANT_PACK_WORKSPACE, DN_TYPE_VOID_PTR, 1},
};

static size_t
bytes_of(int type)
{
    switch (type) {
    case DN_TYPE_BOOLEAN:
    case DN_TYPE_CHAR: return 1;
    case DN_TYPE_HANDLE:
    case DN_TYPE_INT64:
    case DN_TYPE_VOID_PTR:
    case DN_TYPE_BACKEND_DESCRIPTOR: return 8;
    default: return 4;
    }
}

const attribute *
fake_find(const descriptor *d, int name)
{
    for (int i = 0; i < d->attributes; i++)
        if (d->attribute[i].name == name)
            return &d->attribute[i];
    return NULL;
}

int64_t
fake_number(const descriptor *d, int name, int64_t otherwise)
{
    const attribute *a = fake_find(d, name);
    if (a == NULL)
        return otherwise;
    size_t bytes = bytes_of(a->type);
    return bytes == 1 ? *(const bool *)a->elements : bytes == 4 ? *(const int32_t *)a->elements : *(const int64_t *)a->elements;
}

static const descriptor *
named(const descriptor *d, int name)
{
    const attribute *a = fake_find(d, name);
    return a == NULL ? NULL : *(descriptor *const *)a->elements;
}

FAKE(cudnnBackendCreateDescriptor)(int type, dn_descriptor *out)
{
    descriptor *made = calloc(1, sizeof *made);
    if (made == NULL)
        return fake_refuse(4003, "no memory");
    made->type = type;
    *out = made;
    return DN_SUCCESS;
}

FAKE(cudnnBackendDestroyDescriptor)(dn_descriptor gone)
{
    descriptor *d = gone;
    if (d == NULL)
        return fake_refuse(2002, "no descriptor");
    for (int i = 0; i < d->attributes; i++)
        free(d->attribute[i].elements);
    memset(d, 0xee, sizeof *d); /* what still needs it finds nothing */
    free(d);
    return DN_SUCCESS;
}

FAKE(cudnnBackendSetAttribute)(dn_descriptor to, int name, int type, int64_t count, const void *elements)
{
    descriptor *d = to;
    if (d == NULL || elements == NULL || d->finalized || d->attributes == MOST_ATTRIBUTES || fake_find(d, name) != NULL)
        return fake_refuse(DN_BAD_PARAM, "set of what is not there, finalized, or set before");
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (known[i].on != d->type || known[i].name != name)
            continue;
        if (known[i].type != type || count < 1 || count > known[i].most)
            return fake_refuse(WRONG_TYPE, "an attribute of another type or number");
        for (int64_t j = 0; type == DN_TYPE_BACKEND_DESCRIPTOR && j < count; j++)
            if (!(*((descriptor *const *)elements + j))->finalized)
                return fake_refuse(NOT_FINALIZED, "a descriptor that is not finalized");
        size_t bytes = bytes_of(type) * (size_t)count;
        attribute *a = &d->attribute[d->attributes++];
        *a = (attribute){name, type, count, malloc(bytes)};
        memcpy(a->elements, elements, bytes);
        return DN_SUCCESS;
    }
    return fake_refuse(DN_BAD_PARAM, "an attribute that such a descriptor has not");
}

/* ---- tensors ---------------------------------------------------------------------------------------------------------------- */

static tensor
tensor_of(const descriptor *d)
{
    tensor t = {.id = fake_number(d, DN_TENSOR_UNIQUE_ID, 0),
                .type = (int)fake_number(d, DN_TENSOR_DATA_TYPE, -1),
                .virtual = (int)fake_number(d, DN_TENSOR_IS_VIRTUAL, 0),
                .by_value = (int)fake_number(d, DN_TENSOR_IS_BY_VALUE, 0),
                .align = fake_number(d, DN_TENSOR_BYTE_ALIGNMENT, 1)};
    memcpy(t.dim, fake_find(d, DN_TENSOR_DIMENSIONS)->elements, sizeof t.dim);
    memcpy(t.stride, fake_find(d, DN_TENSOR_STRIDES)->elements, sizeof t.stride);
    return t;
}

static int
check_tensor(const descriptor *d)
{
    const attribute *dim = fake_find(d, DN_TENSOR_DIMENSIONS), *stride = fake_find(d, DN_TENSOR_STRIDES);
    if (dim == NULL || stride == NULL || dim->count != 4 || stride->count != 4 || fake_find(d, DN_TENSOR_UNIQUE_ID) == NULL ||
        fake_find(d, DN_TENSOR_DATA_TYPE) == NULL || fake_find(d, DN_TENSOR_BYTE_ALIGNMENT) == NULL)
        return fake_refuse(DN_BAD_PARAM, "a tensor without its dimensions, strides, type, alignment or number");
    for (int i = 0; i < 4; i++)
        if (((const int64_t *)dim->elements)[i] < 1)
            return fake_refuse(WRONG_SHAPE, "a dimension below 1");
    return DN_SUCCESS;
}

static int
same(const tensor *a, const tensor *b, int last)
{
    for (int i = 0; i < last; i++)
        if (a->dim[i] != b->dim[i] && a->dim[i] != 1)
            return 0;
    return 1;
}

void
fake_operands(const descriptor *op, tensor out[OPERANDS])
{
    static const int names[3][OPERANDS] = {
        {DN_OPERATION_MATMUL_ADESC, DN_OPERATION_MATMUL_BDESC, -1, DN_OPERATION_MATMUL_CDESC},
        {DN_OPERATION_REDUCTION_XDESC, -1, -1, DN_OPERATION_REDUCTION_YDESC},
        {DN_OPERATION_POINTWISE_XDESC, DN_OPERATION_POINTWISE_BDESC, DN_OPERATION_POINTWISE_TDESC,
         DN_OPERATION_POINTWISE_YDESC},
    };
    int kind = op->type == DN_OPERATION_MATMUL ? 0 : op->type == DN_OPERATION_REDUCTION ? 1 : 2;
    for (int i = 0; i < OPERANDS; i++) {
        const descriptor *d = names[kind][i] < 0 ? NULL : named(op, names[kind][i]);
        out[i] = d == NULL ? (tensor){0} : tensor_of(d);
    }
}

const descriptor *
fake_how(const descriptor *op)
{
    return named(op, op->type == DN_OPERATION_MATMUL      ? DN_OPERATION_MATMUL_DESC
                     : op->type == DN_OPERATION_REDUCTION ? DN_OPERATION_REDUCTION_DESC
                                                          : DN_OPERATION_POINTWISE_PW_DESCRIPTOR);
}

static int
check_operation(const descriptor *op)
{
    tensor x[OPERANDS];
    fake_operands(op, x);
    if (fake_how(op) == NULL || x[A].id == 0 || x[Y].id == 0 || (op->type == DN_OPERATION_MATMUL && x[B].id == 0))
        return fake_refuse(DN_BAD_PARAM, "an operation without its tensors");
    if (op->type == DN_OPERATION_MATMUL)
        return x[A].dim[3] == x[B].dim[2] && x[Y].dim[2] == x[A].dim[2] && x[Y].dim[3] == x[B].dim[3] &&
                       same(&x[A], &x[Y], 2) && same(&x[B], &x[Y], 2)
                   ? DN_SUCCESS
                   : fake_refuse(WRONG_SHAPE, "a product of matrices that do not match");
    if (op->type == DN_OPERATION_REDUCTION)
        return same(&x[Y], &x[A], 4) ? DN_SUCCESS : fake_refuse(WRONG_SHAPE, "a reduction that does not match");
    for (int i = 0; i < Y; i++)
        if (x[i].id != 0 && !same(&x[i], &x[Y], 4))
            return fake_refuse(WRONG_SHAPE, "a pointwise operation whose tensors do not match");
    int64_t mode = fake_number(fake_how(op), DN_POINTWISE_MODE, -1);
    int one = mode == DN_EXP || mode == DN_LOG || mode == DN_GEN_INDEX;
    if ((x[B].id == 0) != one || (x[T].id == 0) != (mode != DN_BINARY_SELECT) || (x[T].id != 0 && x[T].type != DN_BOOLEAN) ||
        (mode == DN_CMP_GE && x[Y].type != DN_BOOLEAN) || (mode == DN_GEN_INDEX && x[Y].type != DN_INT32))
        return fake_refuse(DN_BAD_PARAM, "a pointwise operation with operands that it has not");
    return DN_SUCCESS;
}

/* ---- the graph -------------------------------------------------------------------------------------------------------------- */

int64_t
fake_operations(const descriptor *graph, descriptor *const **out)
{
    const attribute *a = fake_find(graph, DN_OPERATIONGRAPH_OPS);
    *out = a->elements;
    return a->count;
}

int
fake_tensors(const descriptor *graph, tensor out[MOST_TENSORS])
{
    descriptor *const *op;
    int count = 0;
    for (int64_t i = 0, operations = fake_operations(graph, &op); i < operations; i++) {
        tensor x[OPERANDS];
        fake_operands(op[i], x);
        for (int k = 0; k < OPERANDS; k++) {
            int at = 0;
            while (at < count && out[at].id != x[k].id)
                at++;
            if (x[k].id != 0 && at == count && count < MOST_TENSORS)
                out[count++] = x[k];
        }
    }
    return count;
}

/* What is virtual is written before it is read. */
static int
check_graph(const descriptor *graph)
{
    descriptor *const *op;
    int64_t written[MOST_TENSORS];
    int count = 0;
    if (fake_find(graph, DN_OPERATIONGRAPH_OPS) == NULL || fake_find(graph, DN_OPERATIONGRAPH_HANDLE) == NULL)
        return fake_refuse(DN_BAD_PARAM, "a graph without operations or a handle");
    for (int64_t i = 0, operations = fake_operations(graph, &op); i < operations; i++) {
        tensor x[OPERANDS];
        fake_operands(op[i], x);
        for (int k = 0; k < Y; k++) {
            int found = !x[k].virtual;
            for (int j = 0; j < count; j++)
                found |= written[j] == x[k].id;
            if (!found)
                return fake_refuse(DN_BAD_PARAM, "a virtual tensor that nothing writes");
        }
        written[count++] = x[Y].id;
    }
    return DN_SUCCESS;
}

static int
check_plan(descriptor *plan)
{
    const descriptor *config = named(plan, DN_EXECUTION_PLAN_ENGINE_CONFIG);
    tensor all[MOST_TENSORS];
    if (config == NULL || fake_find(plan, DN_EXECUTION_PLAN_HANDLE) == NULL)
        return fake_refuse(DN_BAD_PARAM, "a plan without an engine or a handle");
    plan->graph = config->graph;
    plan->engine = config->engine;
    fake_tensors(plan->graph, all);
    if (fake_faults & NO_ODD && all[0].dim[2] % 2)
        return fake_refuse(NO_PATTERN, "Reason: an odd number of queries");
    built++;
    return DN_SUCCESS;
}

FAKE(cudnnBackendFinalize)(dn_descriptor whole)
{
    descriptor *d = whole;
    int answer = DN_SUCCESS;
    if (d == NULL || d->finalized)
        return fake_refuse(DN_BAD_PARAM, "finalized before");
    switch (d->type) {
    case DN_TENSOR: answer = check_tensor(d); break;
    case DN_OPERATIONGRAPH: answer = check_graph(d); break;
    case DN_EXECUTION_PLAN: answer = check_plan(d); break;
    case DN_OPERATION_MATMUL:
    case DN_OPERATION_REDUCTION:
    case DN_OPERATION_POINTWISE: answer = check_operation(d); break;
    default: break;
    }
    if (answer == DN_SUCCESS)
        d->finalized = 1;
    return answer;
}

/* Engine 7, if it is not deterministic, then 2. */
static int
offer(const descriptor *heuristic, int64_t asked, int64_t *count, dn_descriptor *out)
{
    int first = fake_faults & NOT_THE_SAME ? 7 : 2, offered = fake_faults & NO_ENGINE ? 0 : first == 7 ? 2 : 1;
    *count = offered < asked ? offered : asked;
    for (int64_t i = 0; i < *count; i++) {
        descriptor *config = out[i];
        config->graph = named(heuristic, DN_ENGINEHEUR_OPERATION_GRAPH);
        config->engine = i == 0 ? first : 2;
        config->finalized = 1;
    }
    return DN_SUCCESS;
}

FAKE(cudnnBackendGetAttribute)(dn_descriptor from, int name, int type, int64_t asked, int64_t *count, void *out)
{
    descriptor *d = from;
    *count = 1;
    if (d == NULL || !d->finalized || asked < 1)
        return fake_refuse(NOT_FINALIZED, "asked of what is not finalized");
    if (d->type == DN_ENGINEHEUR && name == DN_ENGINEHEUR_RESULTS && type == DN_TYPE_BACKEND_DESCRIPTOR)
        return offer(d, asked, count, out);
    if (d->type == DN_ENGINECFG && name == DN_ENGINECFG_ENGINE && type == DN_TYPE_BACKEND_DESCRIPTOR) {
        descriptor *engine = *(descriptor **)out;
        engine->engine = d->engine;
        engine->finalized = 1;
    } else if (d->type == DN_ENGINE && name == DN_ENGINE_GLOBAL_INDEX && type == DN_TYPE_INT64) {
        *(int64_t *)out = d->engine;
    } else if (d->type == DN_ENGINE && name == DN_ENGINE_NUMERICAL_NOTE && type == DN_TYPE_NUMERICAL_NOTE) {
        *(int *)out = d->engine == 7 ? DN_NOTE_NONDETERMINISTIC : 0;
    } else if (d->type == DN_EXECUTION_PLAN && name == DN_EXECUTION_PLAN_WORKSPACE_SIZE && type == DN_TYPE_INT64) {
        *(int64_t *)out = fake_workspace;
    } else {
        return fake_refuse(WRONG_TYPE, "asked for what it has not");
    }
    return DN_SUCCESS;
}

FAKE(cudnnBackendExecute)(dn_handle handle, dn_descriptor plan, dn_descriptor pack)
{
    if (handle == NULL || !((descriptor *)plan)->finalized || !((descriptor *)pack)->finalized)
        return fake_refuse(NOT_FINALIZED, "run of what is not finalized");
    int answer = fake_execute(handle->stream, plan, pack);
    executed += answer == DN_SUCCESS;
    return answer;
}

/* ---- the rest ----------------------------------------------------------------------------------------------------------------- */

EXPORT size_t
cudnnGetVersion(void)
{
    const char *told = getenv("FAKE_CUDNN_VERSION");
    return told != NULL ? (size_t)atol(told) : 91900;
}

EXPORT const char *
cudnnGetErrorString(int status)
{
    return status == DN_SUCCESS         ? "CUDNN_STATUS_SUCCESS"
           : status / 1000 == 3 ? "CUDNN_STATUS_NOT_SUPPORTED"
                                : "CUDNN_STATUS_OTHER";
}

#ifndef FAKE_CUDNN_LACKS /* a library without it */
EXPORT void
cudnnGetLastErrorString(char *text, size_t size)
{
    snprintf(text, size, "%s", said);
}
#endif

FAKE(cudnnCreate)(dn_handle *out)
{
    if (fake_faults & NO_HANDLE)
        return fake_refuse(1008, "a library of its own is missing");
    *out = calloc(1, sizeof **out);
    return DN_SUCCESS;
}

FAKE(cudnnDestroy)(dn_handle handle)
{
    free(handle);
    return DN_SUCCESS;
}

FAKE(cudnnSetStream)(dn_handle handle, tp_stream stream)
{
    handle->stream = stream;
    return DN_SUCCESS;
}
