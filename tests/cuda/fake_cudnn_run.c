/* The false libcudnn computes a graph, operation by operation, on the host's memory: matrix products, pointwise operations and
 * reductions, each over whatever dimensions, strides and types its tensors have. */
#include "tests/cuda/fake_cudnn.h"

#include <dlfcn.h>
#include <link.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/emu/graph.h"

typedef struct {
    const descriptor *plan;
    void *workspace;
    int64_t count, id[MOST_TENSORS];
    void *pointer[MOST_TENSORS];
    float value[MOST_TENSORS]; /* of what is by value: read when the run is asked for */
} job;

typedef struct {
    int count;
    tensor tensor[MOST_TENSORS];
    char *data[MOST_TENSORS];
} memory;

static float
load(int type, const char *data, int64_t at)
{
    uint32_t bits;
    float x;
    switch (type) {
    case DN_FLOAT: return ((const float *)(const void *)data)[at];
    case DN_INT32: return (float)((const int32_t *)(const void *)data)[at];
    case DN_BOOLEAN: return (float)((const uint8_t *)data)[at];
    default:
        bits = (uint32_t)((const uint16_t *)(const void *)data)[at] << 16;
        memcpy(&x, &bits, sizeof x);
        return x;
    }
}

static void
store(int type, char *data, int64_t at, float x)
{
    uint32_t bits;
    switch (type) {
    case DN_FLOAT: ((float *)(void *)data)[at] = x; break;
    case DN_INT32: ((int32_t *)(void *)data)[at] = (int32_t)x; break;
    case DN_BOOLEAN: ((uint8_t *)data)[at] = x != 0.0f; break;
    default:
        memcpy(&bits, &x, sizeof bits);
        ((uint16_t *)(void *)data)[at] = isnan(x) ? 0x7fff : (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    }
}

/* An operand where the others are at `at`: dimensions of 1 stay. */
static int64_t
place(const tensor *t, const int64_t at[4])
{
    int64_t sum = 0;
    for (int i = 0; i < 4; i++)
        sum += t->dim[i] == 1 ? 0 : at[i] * t->stride[i];
    return sum;
}

typedef struct {
    int type; /* of the operation */
    int64_t mode, axis;
    tensor x[OPERANDS];
    char *data[OPERANDS];
} step;

static float
pointwise(const step *s, const int64_t at[4])
{
    float a = s->mode == DN_GEN_INDEX ? 0.0f : load(s->x[A].type, s->data[A], place(&s->x[A], at));
    float b = s->x[B].id == 0 ? 0.0f : load(s->x[B].type, s->data[B], place(&s->x[B], at));
    if (fake_faults & TOP_LEFT && s->x[Y].type == DN_INT32)
        b = 0.0f;
    switch (s->mode) {
    case DN_ADD: return a + b;
    case DN_SUB: return a - b;
    case DN_MUL: return a * b;
    case DN_DIV: return a / b;
    case DN_EXP: return expf(a);
    case DN_LOG: return logf(a);
    case DN_CMP_GE: return a >= b;
    case DN_GEN_INDEX: return (float)at[s->axis];
    default: return load(s->x[T].type, s->data[T], place(&s->x[T], at)) != 0.0f ? a : b;
    }
}

static float
product(const step *s, const int64_t at[4])
{
    float sum = 0.0f;
    for (int64_t k = 0; k < s->x[A].dim[3]; k++) {
        const int64_t a[4] = {at[0], at[1], at[2], k}, b[4] = {at[0], at[1], k, at[3]};
        sum += load(s->x[A].type, s->data[A], place(&s->x[A], a)) * load(s->x[B].type, s->data[B], place(&s->x[B], b));
    }
    return sum;
}

/* Over the last dimension, which is what a softmax reduces. */
static float
reduction(const step *s, const int64_t at[4])
{
    int max = s->mode == DN_REDUCE_MAX;
    float all = max ? -INFINITY : 0.0f;
    for (int64_t k = 0; k < s->x[A].dim[3]; k++) {
        const int64_t from[4] = {at[0], at[1], at[2], k};
        float x = load(s->x[A].type, s->data[A], place(&s->x[A], from));
        all = max ? fmaxf(all, x) : all + x;
    }
    return all;
}

static void
compute(const step *s)
{
    const tensor *y = &s->x[Y];
    int64_t at[4], next = 0;
    for (at[0] = 0; at[0] < y->dim[0]; at[0]++)
        for (at[1] = 0; at[1] < y->dim[1]; at[1]++)
            for (at[2] = 0; at[2] < y->dim[2]; at[2]++)
                for (at[3] = 0; at[3] < y->dim[3]; at[3]++, next++) {
                    float x = s->type == DN_OPERATION_MATMUL      ? product(s, at)
                              : s->type == DN_OPERATION_REDUCTION ? reduction(s, at)
                                                                  : pointwise(s, at);
                    int gapless = fake_faults & PACKED_STATISTICS && !y->virtual && y->type == DN_FLOAT;
                    store(y->type, s->data[Y], gapless ? next : place(y, at), x);
                }
}

static char *
data_of(const memory *m, const tensor *t)
{
    for (int i = 0; i < m->count; i++)
        if (m->tensor[i].id == t->id)
            return m->data[i];
    return NULL;
}

static int
lay(const job *w, memory *m)
{
    m->count = fake_tensors(w->plan->graph, m->tensor);
    for (int i = 0; i < m->count; i++) {
        const tensor *t = &m->tensor[i];
        int at = 0;
        while (at < w->count && w->id[at] != t->id)
            at++;
        size_t elements = (size_t)(t->dim[0] * t->dim[1] * t->dim[2] * t->dim[3]);
        m->data[i] = t->virtual || t->by_value ? malloc(4 * elements) : w->pointer[at];
        if (m->data[i] == NULL)
            return 0;
        if (t->virtual)
            memset(m->data[i], 0xff, 4 * elements);
        if (t->by_value)
            store(t->type, m->data[i], 0, w->value[at]);
    }
    return 1;
}

static tp_status
run(const void *body)
{
    const job *w = body;
    memory m = {0};
    descriptor *const *op;
    int laid = lay(w, &m);
    if (fake_workspace > 0)
        memset(w->workspace, 0xff, (size_t)fake_workspace);
    for (int64_t i = 0, count = fake_operations(w->plan->graph, &op); laid && i < count; i++) {
        const descriptor *how = fake_how(op[i]);
        step s = {.type = op[i]->type, .axis = fake_number(how, DN_POINTWISE_AXIS, 0)};
        s.mode = fake_number(how, s.type == DN_OPERATION_REDUCTION ? DN_REDUCTION_OPERATOR : DN_POINTWISE_MODE, -1);
        fake_operands(op[i], s.x);
        for (int k = 0; k < OPERANDS; k++)
            s.data[k] = data_of(&m, &s.x[k]);
        compute(&s);
    }
    for (int i = 0; i < m.count; i++)
        if (m.tensor[i].virtual || m.tensor[i].by_value)
            free(m.data[i]);
    return laid ? TP_OK : TP_EMEMORY;
}

/* The emulator's way of doing work on a stream; it is in the module that loaded this library. */
typedef tp_status do_on_stream(tp_stream, const char *, tp_emu_run *, const void *, size_t);

static int
look_for_emulator(struct dl_phdr_info *info, size_t size, void *out)
{
    (void)size;
    if (strstr(info->dlpi_name, "_cuda_emu") == NULL)
        return 0;
    void *handle = dlopen(info->dlpi_name, RTLD_NOW | RTLD_NOLOAD), *found = handle != NULL ? dlsym(handle, "tp_emu_do") : NULL;
    memcpy(out, &found, sizeof found);
    return found != NULL;
}

/* Pointers of a run: each tensor in memory has one, of its alignment. */
static int
take(const descriptor *pack, job *w)
{
    const attribute *ids = fake_find(pack, DN_VARIANT_PACK_UNIQUE_IDS);
    const attribute *pointers = fake_find(pack, DN_VARIANT_PACK_DATA_POINTERS);
    tensor all[MOST_TENSORS];
    if (ids == NULL || pointers == NULL || ids->count != pointers->count)
        return fake_refuse(DN_BAD_PARAM, "not as many pointers as numbers");
    w->count = ids->count;
    w->workspace = (void *)(uintptr_t)fake_number(pack, DN_VARIANT_PACK_WORKSPACE, 0);
    memcpy(w->id, ids->elements, (size_t)ids->count * sizeof *w->id);
    memcpy(w->pointer, pointers->elements, (size_t)ids->count * sizeof *w->pointer);
    for (int i = 0, count = fake_tensors(w->plan->graph, all); i < count; i++) {
        int at = 0;
        while (at < w->count && w->id[at] != all[i].id)
            at++;
        if (all[i].virtual)
            continue;
        if (at == w->count || w->pointer[at] == NULL || (uintptr_t)w->pointer[at] % (uintptr_t)all[i].align != 0)
            return fake_refuse(2003, "a tensor without a pointer, or one that is not aligned");
        if (all[i].by_value)
            w->value[at] = load(all[i].type, w->pointer[at], 0);
    }
    return fake_workspace > 0 && w->workspace == NULL ? fake_refuse(2002, "no workspace") : DN_SUCCESS;
}

int
fake_execute(tp_stream stream, const descriptor *plan, const descriptor *pack)
{
    do_on_stream *enqueue = NULL;
    job w;
    memset(&w, 0, sizeof w); /* gaps too: they are hashed */
    w.plan = plan;
    int answer = take(pack, &w);
    if (answer != DN_SUCCESS)
        return answer;
    if (fake_faults & FAILS_TO_RUN)
        return fake_refuse(DN_EXECUTION_FAILED, "as it was told to");
    dl_iterate_phdr(look_for_emulator, &enqueue);
    if (enqueue == NULL)
        return fake_refuse(DN_EXECUTION_FAILED, "no emulator in this process");
    return enqueue(stream, "cuDNN", run, &w, sizeof w) == TP_OK ? DN_SUCCESS : DN_EXECUTION_FAILED;
}
