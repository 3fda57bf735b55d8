#include "cuda/cudnn.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/kernels.h"

enum { POISON = 0xff }; /* bytes of a NaN in bf16 and fp32 */

/* Of one row and head, by what cuDNN may part from our kernel: both round o and probabilities to bf16 (2^-9 each), lse to fp32.
 * One key too many or too few moves lse by its share in the sum. */
#define MOST_O 5e-2
#define MOST_LSE 1e-3

typedef struct {
    tp_attention shape;
    tp_cudnn_plan *plan; /* NULL: our kernel */
    int checked;
} entry;

struct tp_cudnn {
    tp_cuda_device *device;
    tp_stream stream;
    tp_cudnn_place place;
    void *workspace;
    int64_t count, room, left; /* shapes, and those of them that are our kernel's */
    entry *entry;
    char why[384];             /* the first of those was left, or "" */
    char caveat[640];
};

/* ---- what is said ------------------------------------------------------------------------------------------------------------ */

static void
tell(tp_cudnn *cudnn)
{
    int found;
    const char *path;
    tp_cudnn_found(&path, &found);
    int used = snprintf(cudnn->caveat, sizeof cudnn->caveat, "the forward of attention is cuDNN %d.%d.%d's for %lld of %lld shapes "
                        "of a slice, as TERAPIPE_ATTENTION asks", found / 10000, found % 10000 / 100, found % 100,
                        (long long)(cudnn->count - cudnn->left), (long long)cudnn->count);
    if (cudnn->left > 0)
        snprintf(cudnn->caveat + used, sizeof cudnn->caveat - (size_t)used, ", and the package's own for the others (%s)",
                 cudnn->why);
}

static void
leave(tp_cudnn *cudnn, const tp_attention *s)
{
    if (cudnn->left++ == 0)
        snprintf(cudnn->why, sizeof cudnn->why, "the first of %lld x %lld heads of %lld, %lld tokens after %lld: %s",
                 (long long)s->batch, (long long)s->heads, (long long)s->head_dim, (long long)s->slice, (long long)s->context,
                 tp_error_message());
}

const char *
tp_cudnn_caveat(const tp_cudnn *cudnn)
{
    return cudnn->caveat;
}

/* ---- opening and closing ----------------------------------------------------------------------------------------------------- */

static tp_status
begin(tp_cudnn *cudnn)
{
    const tp_cudnn_library *dnn = cudnn->place.dnn;
    TP_TRY(tp_cuda_bind(cudnn->device));
    int answer = dnn->create(&cudnn->place.handle);
    if (answer == DN_SUCCESS)
        answer = dnn->set_stream(cudnn->place.handle, cudnn->stream);
    if (answer == DN_SUCCESS)
        return TP_OK;
    const char *path;
    int found;
    tp_cudnn_found(&path, &found);
    return tp_fail(TP_ERUNTIME, "cuDNN at %s cannot be begun with: status %d (%s)", path, answer, dnn->error_string(answer));
}

tp_status
tp_cudnn_open(tp_cuda_device *device, tp_stream stream, void *workspace, size_t bytes, tp_cudnn **out)
{
    const tp_cudnn_library *dnn;
    TP_TRY(tp_cudnn_load(&dnn));
    tp_cudnn *cudnn = calloc(1, sizeof *cudnn);
    if (cudnn == NULL)
        return tp_fail(TP_EMEMORY, "no host memory for the plans of cuDNN");
    cudnn->device = device;
    cudnn->stream = stream;
    cudnn->workspace = workspace;
    cudnn->place = (tp_cudnn_place){.dnn = dnn, .workspace_bytes = bytes};
    tp_status status = begin(cudnn);
    if (status != TP_OK) {
        tp_cudnn_close(cudnn);
        return status;
    }
    tell(cudnn);
    *out = cudnn;
    return TP_OK;
}

void
tp_cudnn_close(tp_cudnn *cudnn)
{
    if (cudnn == NULL)
        return;
    for (int64_t i = 0; i < cudnn->count; i++)
        tp_cudnn_plan_free(cudnn->place.dnn, cudnn->entry[i].plan);
    if (cudnn->place.handle != NULL)
        (void)cudnn->place.dnn->destroy(cudnn->place.handle);
    free(cudnn->entry);
    free(cudnn);
}

/* ---- plans ------------------------------------------------------------------------------------------------------------------- */

/* Tens of shapes at most: a stage has one for each slice and part of a micro-batch that is like no other. */
static entry *
find(const tp_cudnn *cudnn, const tp_attention *shape)
{
    for (int64_t i = 0; i < cudnn->count; i++)
        if (memcmp(&cudnn->entry[i].shape, shape, sizeof *shape) == 0)
            return &cudnn->entry[i];
    return NULL;
}

tp_status
tp_cudnn_prepare(tp_cudnn *cudnn, const tp_attention *shape)
{
    if (find(cudnn, shape) != NULL)
        return TP_OK;
    if (cudnn->count == cudnn->room) {
        int64_t room = cudnn->room == 0 ? 16 : 2 * cudnn->room;
        entry *more = realloc(cudnn->entry, (size_t)room * sizeof *more);
        if (more == NULL)
            return tp_fail(TP_EMEMORY, "no host memory for %lld plans of cuDNN", (long long)room);
        cudnn->entry = more;
        cudnn->room = room;
    }
    entry *one = &cudnn->entry[cudnn->count];
    *one = (entry){.shape = *shape};
    tp_status status = tp_cudnn_plan_forward(&cudnn->place, shape, &one->plan);
    if (status != TP_OK && status != TP_ERUNTIME)
        return status;
    cudnn->count++;
    if (status == TP_ERUNTIME)
        leave(cudnn, shape);
    tell(cudnn);
    return TP_OK;
}

int
tp_cudnn_has(const tp_cudnn *cudnn, const tp_attention *shape)
{
    const entry *one = find(cudnn, shape);
    return one != NULL && one->plan != NULL;
}

static tp_status
run_plan(tp_cudnn *cudnn, const entry *one, const void *q, const void *k, const void *v, void *o, float *lse)
{
    tp_status status = tp_cudnn_plan_run(&cudnn->place, one->plan, q, k, v, o, lse, cudnn->workspace);
    TP_TRY(tp_cuda_library_launched(cudnn->device, cudnn->stream, "cudnnBackendExecute", status != TP_OK));
    return status;
}

tp_status
tp_cudnn_forward(tp_cudnn *cudnn, const tp_attention *shape, const void *q, const void *k, const void *v, void *o, float *lse)
{
    const entry *one = find(cudnn, shape);
    if (one == NULL || one->plan == NULL)
        return tp_fail(TP_EINTERNAL, "attention of a shape that was not prepared for cuDNN");
    return run_plan(cudnn, one, q, k, v, o, lse);
}

/* ---- beside our kernel --------------------------------------------------------------------------------------------------------- */

/* What either wrote, on the host. */
typedef struct {
    uint16_t *o;
    float *lse;
} written;

static size_t
o_bytes(const tp_attention *s)
{
    return (size_t)(s->total * s->batch * s->o_stride) * sizeof(uint16_t);
}

static size_t
lse_bytes(const tp_attention *s)
{
    return (size_t)(s->batch * s->heads * s->total) * sizeof(float);
}

static tp_status
run(tp_cudnn *cudnn, const entry *one, int ours, const void *q, const void *k, const void *v, void *o, float *lse,
    const written *to)
{
    const tp_attention *s = &one->shape;
    TP_TRY(tp_cuda_memset(cudnn->device, cudnn->stream, o, POISON, o_bytes(s)));
    TP_TRY(tp_cuda_memset(cudnn->device, cudnn->stream, lse, POISON, lse_bytes(s)));
    TP_TRY(tp_cuda_memset(cudnn->device, cudnn->stream, cudnn->workspace, POISON, tp_cudnn_plan_workspace(one->plan)));
    TP_TRY(ours ? tp_cuda_attention_forward(cudnn->stream, TP_BF16, TP_ATTENTION_MMA, tp_cuda_multiprocessors(cudnn->device), s, q, k, v,
                                            o, lse)
                : run_plan(cudnn, one, q, k, v, o, lse));
    TP_TRY(tp_cuda_copy(cudnn->device, cudnn->stream, to->o, o, o_bytes(s), TP_CUDA_TO_HOST));
    TP_TRY(tp_cuda_copy(cudnn->device, cudnn->stream, to->lse, lse, lse_bytes(s), TP_CUDA_TO_HOST));
    return tp_cuda_synchronize(cudnn->device, cudnn->stream);
}

static double
number(uint16_t bf16)
{
    uint32_t bits = (uint32_t)bf16 << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return (double)x;
}

/* Of one row and head: how far apart, as a part of how long. A NaN in either is far. */
static double
apart(const uint16_t *a, const uint16_t *b, int64_t dim)
{
    double difference = 0.0, length = 0.0;
    for (int64_t i = 0; i < dim; i++) {
        double x = number(a[i]), y = number(b[i]);
        difference += (x - y) * (x - y);
        length += x * x;
    }
    return sqrt(difference / (length > 0.0 ? length : 1.0));
}

static tp_status
compare_row(const tp_attention *s, const written *ours, const written *its, int64_t t, int64_t b, int64_t h)
{
    int64_t stat = (b * s->heads + h) * s->total + t, at = (t * s->batch + b) * s->o_stride + h * s->head_dim;
    double lse = fabs((double)ours->lse[stat] - (double)its->lse[stat]), o = apart(ours->o + at, its->o + at, s->head_dim);
    if (lse <= MOST_LSE && o <= MOST_O)
        return TP_OK;
    return tp_fail(TP_ERUNTIME, "cuDNN: token %lld, head %lld: lse is %g and o %.2g away from our kernel's; %g and %g at most would "
                   "be right", (long long)t, (long long)h, lse, o, MOST_LSE, MOST_O);
}

/* The rows of the slice alike, all others as they were. */
static tp_status
compare(const tp_attention *s, const written *ours, const written *its)
{
    for (int64_t t = 0; t < s->total; t++)
        for (int64_t b = 0; b < s->batch; b++) {
            const uint16_t *row = its->o + (t * s->batch + b) * s->o_stride;
            if (t >= s->context && t < s->context + s->slice) {
                for (int64_t h = 0; h < s->heads; h++)
                    TP_TRY(compare_row(s, ours, its, t, b, h));
                continue;
            }
            for (int64_t i = 0; i < s->heads * s->head_dim; i++)
                if (row[i] != 0xffff)
                    return tp_fail(TP_ERUNTIME, "cuDNN writes o of token %lld, which is not of the slice", (long long)t);
            for (int64_t h = 0; h < s->heads; h++)
                if (!isnan(its->lse[(b * s->heads + h) * s->total + t]))
                    return tp_fail(TP_ERUNTIME, "cuDNN writes lse of token %lld, which is not of the slice", (long long)t);
        }
    return TP_OK;
}

static tp_status
check(tp_cudnn *cudnn, entry *one, const void *q, const void *k, const void *v, void *o, float *lse, const written *host)
{
    if (host[0].o == NULL || host[1].o == NULL || host[0].lse == NULL || host[1].lse == NULL)
        return tp_fail(TP_EMEMORY, "no host memory to compare %zu bytes of attention", o_bytes(&one->shape));
    TP_TRY(run(cudnn, one, 1, q, k, v, o, lse, &host[0]));
    tp_status status = run(cudnn, one, 0, q, k, v, o, lse, &host[1]);
    if (status == TP_OK)
        status = compare(&one->shape, &host[0], &host[1]);
    if (status != TP_ERUNTIME)
        return status;
    leave(cudnn, &one->shape);
    tp_cudnn_plan_free(cudnn->place.dnn, one->plan);
    one->plan = NULL;
    tell(cudnn);
    return tp_cuda_synchronize(cudnn->device, cudnn->stream); /* of a device that failed this is the error */
}

tp_status
tp_cudnn_check(tp_cudnn *cudnn, const tp_attention *shape, const void *q, const void *k, const void *v, void *o, float *lse)
{
    entry *one = find(cudnn, shape);
    if (one == NULL || one->plan == NULL || one->checked)
        return TP_OK;
    one->checked = 1;
    written host[2];
    for (int i = 0; i < 2; i++)
        host[i] = (written){malloc(o_bytes(shape)), malloc(lse_bytes(shape))};
    tp_status status = check(cudnn, one, q, k, v, o, lse, host);
    for (int i = 0; i < 2; i++) {
        free(host[i].o);
        free(host[i].lse);
    }
    return status;
}
