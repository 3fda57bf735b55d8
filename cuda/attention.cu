#include "cuda/attention.h"

/* ---- delta: of each row and head, the sum of dO O over the head ------------------------------------------------------------- */

#define DELTA_LANES    8  /* share one (row, head) */
#define DELTA_FEW_KEYS 16 /* rows of bf16 that see so many or fewer do not take it from o */

/* Whose delta this group of lanes computes: heads fastest, then sequences, then tokens: as memory lies. */
typedef struct {
    int64_t at, stat;  /* element of o and dO; of lse and delta */
    int item, t, lane; /* (sequence, head); token */
    int mine;          /* 0: the groups of the last block that are too many */
} delta_place;

TP_DEVICE delta_place
delta_place_of(const tp_attention_args *a)
{
    delta_place place;
    int64_t group = (int64_t)TP_BLOCK_X * (TP_ATTENTION_THREADS / DELTA_LANES) + TP_THREAD / DELTA_LANES;
    int64_t count = (a->last - a->first) * a->items;
    int b, h;
    place.mine = group < count;
    group = place.mine ? group : 0;
    place.item = (int)(group % a->items);
    place.t = a->first + (int)(group / a->items);
    b = place.item / a->heads;
    h = place.item % a->heads;
    place.lane = TP_THREAD % DELTA_LANES;
    place.at = b * a->o_sequence + place.t * a->o_row + h * a->dim;
    place.stat = (int64_t)place.item * a->total + place.t;
    return place;
}

TP_DEVICE void
delta_write(const tp_attention_args *a, const delta_place *place, float sum)
{
    sum += TP_SHFL_XOR_F(sum, 4);
    sum += TP_SHFL_XOR_F(sum, 2);
    sum += TP_SHFL_XOR_F(sum, 1);
    if (place->mine && place->lane == 0)
        TP_ST(a->delta_out + place->stat, sum);
}

TP_KERNEL(attention_delta_f32, tp_attention_args)
{
    delta_place place = delta_place_of(&a);
    const float *o = (const float *)a.o + place.at, *d_o = (const float *)a.d_o + place.at;
    float sum = 0.0f;
    for (int i = place.lane; i < a.dim; i += DELTA_LANES)
        sum = tp_fmaf(TP_LD(o + i), TP_LD(d_o + i), sum);
    delta_write(&a, &place, sum);
}

/* The products of x and y at [from, n) by eights that lie `step` apart. */
TP_DEVICE float
delta_dot_bf16(const tp_bf16 *x, const tp_bf16 *y, int from, int step, int n)
{
    float sum = 0.0f;
    for (int i = from; i < n; i += step) {
        tp_vec16 left = tp_load16(x + i), right = tp_load16(y + i);
        TP_UNROLL
        for (int j = 0; j < 4; j++) {
            sum = tp_fmaf(tp_vec_low(&left, j), tp_vec_low(&right, j), sum);
            sum = tp_fmaf(tp_vec_high(&left, j), tp_vec_high(&right, j), sum);
        }
    }
    return sum;
}

/* Of a row that sees few keys, the same number as the sum of P dP, as the kernels make both: where o was rounded to bf16, what was
 * lost would stand beside dP - delta, which cancels there. By o, from which it is usually taken (Dao et al. 2022, algorithm 4), dQ
 * of two tokens was more than 1 % off in a fifth of 768 heads, in some by more than itself; so, in none. Each lane has its own
 * keys. Which rows these are is a matter of their position alone, so that no slicing shows. */
TP_DEVICE float
delta_of_few_keys(const tp_attention_args *a, const delta_place *place, const tp_bf16 *d_o)
{
    tp_attention_head head = tp_attention_head_of(a, place->item);
    const tp_bf16 *q = (const tp_bf16 *)a->q + head.at + place->t * a->row;
    float less = TP_LD(a->lse + place->stat) * TP_ATTENTION_LOG2E, sum = 0.0f;
    for (int key = place->lane; key <= place->t; key += DELTA_LANES) {
        int64_t at = head.at + key * a->row;
        float s = delta_dot_bf16(q, (const tp_bf16 *)a->k + at, 0, 8, a->dim);
        float dp = delta_dot_bf16(d_o, (const tp_bf16 *)a->v + at, 0, 8, a->dim);
        sum = tp_fmaf(tp_exp2f(tp_fmaf(s, a->scale2, -less)), dp, sum);
    }
    return sum;
}

TP_KERNEL(attention_delta_bf16, tp_attention_args)
{
    delta_place place = delta_place_of(&a);
    const tp_bf16 *o = (const tp_bf16 *)a.o + place.at, *d_o = (const tp_bf16 *)a.d_o + place.at;
    float sum = place.t < DELTA_FEW_KEYS ? delta_of_few_keys(&a, &place, d_o)
                                         : delta_dot_bf16(o, d_o, 8 * place.lane, 8 * DELTA_LANES, a.dim);
    delta_write(&a, &place, sum);
}

/* ---- arguments ----------------------------------------------------------------------------------------------------------------- */

static tp_status
check_shape(tp_dtype dtype, const tp_attention *s)
{
    int64_t width = s->heads * s->head_dim, most = 65535 * (dtype == TP_BF16 ? 64 : 32); /* tiles of that many rows lie in y */
    if (s->batch < 1 || s->heads < 1 || s->slice < 1 || s->context < 0 || s->total < s->context + s->slice)
        return tp_fail(TP_EVALUE, "attention of %lld sequences x %lld heads, slice %lld after %lld of %lld tokens: counts are at "
                       "least 1 and the slice ends by the sequence's end", (long long)s->batch, (long long)s->heads,
                       (long long)s->slice, (long long)s->context, (long long)s->total);
    if (s->batch * s->heads > INT32_MAX - 65536 || s->total > most)
        return tp_fail(TP_EVALUE, "attention of %lld sequences x %lld heads of %lld tokens: at most 2^31 - 2^16 (sequence, head) pairs "
                       "and %lld tokens", (long long)s->batch, (long long)s->heads, (long long)s->total, (long long)most);
    if (s->head_dim < 1 || s->head_dim > 128 || (dtype == TP_BF16 && s->head_dim % 8))
        return tp_fail(TP_EVALUE, "attention on CUDA: head_dim is %lld; bf16 needs a multiple of 8 up to 128, f32 1 to 128",
                       (long long)s->head_dim);
    if (s->qkv_stride < width || s->o_stride < width || (dtype == TP_BF16 && (s->qkv_stride % 8 || s->o_stride % 8)))
        return tp_fail(TP_EVALUE, "attention on CUDA: rows are %lld and %lld elements apart; at least heads x head_dim = %lld is "
                       "needed, and for bf16 a multiple of 8", (long long)s->qkv_stride, (long long)s->o_stride,
                       (long long)width);
    return TP_OK;
}

/* bf16 rows move 16 bytes at a time. */
static tp_status
check_aligned(tp_dtype dtype, const char *name, const void *pointer)
{
    size_t align = dtype == TP_BF16 ? 16 : 4;
    if (pointer == NULL || (uintptr_t)pointer % align)
        return tp_fail(TP_EVALUE, "attention on CUDA: %s is at %p; it must be on %llu bytes", name, pointer,
                       (unsigned long long)align);
    return TP_OK;
}

static void
fill(tp_attention_args *a, const tp_attention *s, int multiprocessors, const void *q, const void *k, const void *v)
{
    memset(a, 0, sizeof *a);
    a->heads = (int)s->heads;
    a->dim = (int)s->head_dim;
    a->first = (int)s->context;
    a->last = (int)(s->context + s->slice);
    a->total = (int)s->total;
    a->items = s->batch * s->heads;
    a->multiprocessors = multiprocessors;
    a->row = s->batch * s->qkv_stride;
    a->o_row = s->batch * s->o_stride;
    a->sequence = s->qkv_stride;
    a->o_sequence = s->o_stride;
    a->scale = 1.0f / sqrtf((float)s->head_dim);
    a->scale2 = a->scale * TP_ATTENTION_LOG2E;
    a->q = q;
    a->k = k;
    a->v = v;
}

tp_status
tp_cuda_attention_check(tp_attention_kernel kernel, const tp_cuda_properties *p)
{
    if (kernel != TP_ATTENTION_WGMMA || tp_cuda_has_wgmma(p))
        return TP_OK;
    return tp_fail(TP_ERUNTIME, "device %d (%s) has compute capability %d.%d; attention by wgmma runs on 9.0 (Hopper) alone", p->index,
                   p->name, p->major, p->minor);
}

tp_status
tp_cuda_attention_forward(tp_stream stream, tp_dtype dtype, tp_attention_kernel kernel, int multiprocessors,
                          const tp_attention *shape, const void *q, const void *k, const void *v, void *o, float *lse)
{
    tp_attention_args args;
    TP_TRY(check_shape(dtype, shape));
    TP_TRY(check_aligned(dtype, "q", q));
    TP_TRY(check_aligned(dtype, "k", k));
    TP_TRY(check_aligned(dtype, "v", v));
    TP_TRY(check_aligned(dtype, "o", o));
    TP_TRY(check_aligned(TP_F32, "lse", lse));
    fill(&args, shape, multiprocessors, q, k, v);
    args.out = o;
    args.lse_out = lse;
    if (dtype != TP_BF16)
        return tp_attention_forward_f32(stream, &args);
    return kernel == TP_ATTENTION_WGMMA ? tp_attention_forward_wgmma(stream, &args) : tp_attention_forward_bf16(stream, &args);
}

/* Of tiles of 64 queries and 64 of the slice's own keys, in one head, those that hide not all. */
static int64_t
kept_tiles(const tp_attention *s)
{
    int64_t n = (s->context + s->slice + 63) / 64 - (s->context + 63) / 64;
    return n * (n + 1) / 2;
}

int64_t
tp_cuda_attention_kept_bytes(const tp_attention *shape)
{
    return shape->batch * shape->heads * kept_tiles(shape) * TP_ATTENTION_KEPT_BYTES;
}

/* As many heads as fit have their dS kept. */
static tp_status
keep(tp_attention_args *a, const tp_attention *s, void *kept, size_t kept_bytes)
{
    int64_t each = kept_tiles(s) * TP_ATTENTION_KEPT_BYTES;
    if (kept_bytes == 0 || each == 0)
        return TP_OK;
    TP_TRY(check_aligned(TP_BF16, "what is kept", kept));
    a->ds = (uint32_t *)kept;
    a->kept = (int64_t)(kept_bytes / (size_t)each);
    return TP_OK;
}

tp_status
tp_cuda_attention_backward(tp_stream stream, tp_dtype dtype, tp_attention_kernel kernel, int multiprocessors,
                           const tp_attention *shape, const void *q, const void *k, const void *v, const void *o, const void *d_o,
                           const float *lse, float *delta, void *dq, void *dk, void *dv, void *kept, size_t kept_bytes)
{
    static const char *const names[8] = {"q", "k", "v", "o", "d_o", "dq", "dk", "dv"};
    const void *pointers[8];
    tp_attention_args args;
    int64_t groups, per_block = TP_ATTENTION_THREADS / DELTA_LANES;
    pointers[0] = q, pointers[1] = k, pointers[2] = v, pointers[3] = o;
    pointers[4] = d_o, pointers[5] = dq, pointers[6] = dk, pointers[7] = dv;
    TP_TRY(check_shape(dtype, shape));
    for (int i = 0; i < 8; i++)
        TP_TRY(check_aligned(dtype, names[i], pointers[i]));
    TP_TRY(check_aligned(TP_F32, "lse", lse));
    TP_TRY(check_aligned(TP_F32, "delta", delta));
    fill(&args, shape, multiprocessors, q, k, v);
    args.o = o;
    args.d_o = d_o;
    args.lse = lse;
    args.delta = args.delta_out = delta;
    args.dq = dq;
    args.dk = dk;
    args.dv = dv;
    TP_TRY(keep(&args, shape, kept, kept_bytes));
    groups = (args.last - args.first) * args.items;
    if (dtype == TP_BF16) {
        TP_TRY(TP_LAUNCH(attention_delta_bf16, tp_grid1((groups + per_block - 1) / per_block), TP_ATTENTION_THREADS, 0, stream,
                         args));
        return kernel == TP_ATTENTION_WGMMA ? tp_attention_backward_wgmma(stream, &args) : tp_attention_backward_bf16(stream, &args);
    }
    TP_TRY(TP_LAUNCH(attention_delta_f32, tp_grid1((groups + per_block - 1) / per_block), TP_ATTENTION_THREADS, 0, stream, args));
    return tp_attention_backward_f32(stream, &args);
}
