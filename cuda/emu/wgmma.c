/* Products of a warpgroup in the emulator (cuda/wgmma.h), by what the PTX ISA says of descriptors, not by how kernels write tiles.
 * They are done at the wait that covers them, or at once (tp_simt_set_order(4)): whoever reads d too early, or changes an operand
 * too early, gets other numbers in one of the orders. An element's 16 products are added before they are added to d, so that tiles
 * which do not begin at absolute multiples show in the bits; the order and precision in which a GPU adds them are not documented.
 * Also checked: the threads of a warpgroup bring the same descriptors; a fence of the registers lies between a wait (or the
 * begin) and the next product; what a product reads of registers was pinned before that fence, and is since as it was, or is what
 * products under way write; no product is left to itself at the end; and, by the build that looks for races, a product's registers
 * are not touched before it is over and they are pinned again. */
#include "cuda/wgmma.h"

#include <stdlib.h>

#include "cuda/emu/emu.h"
#include "cuda/emu/machine.h"

#define PRODUCTS 32 /* of a warpgroup under way */
#define GROUPS (SIMT_THREADS / SIMT_WARPGROUP)
#define PINS 8       /* of a thread's arrays, the last ones */
#define PINNED 64    /* words of one */
#define HELD 40      /* operands of a thread's that products use */

typedef struct {
    const char *site;
    int n, add, group, done;
    uint64_t a_tile, b_tile;
    float *d[SIMT_WARPGROUP];
    const uint32_t *a[SIMT_WARPGROUP]; /* NULL: a_tile */
} product;

typedef struct {
    int fenced, group, count;
    product product[PRODUCTS]; /* under way, oldest first */
} warpgroup;

/* Registers as they were when a thread pinned them; told: a fence has come since. */
typedef struct {
    const uint32_t *at;
    int n, told;
    uint32_t word[PINNED];
} pin;

/* Registers that products write, or read, until they are over and pinned: before, a compiler may take them for what they were. */
typedef struct {
    uintptr_t begin, end;
    int read; /* 1: an A operand, which alone must not be written */
} held;

struct simt_products {
    warpgroup group[GROUPS];
    pin pin[SIMT_THREADS][PINS];
    int pins[SIMT_THREADS]; /* so far, of this block */
    held held[SIMT_THREADS][HELD];
    int helds[SIMT_THREADS];
};

uint32_t
tp_shared_address(const void *shared)
{
    return (uint32_t)((const char *)shared - tp_simt_machine->shared);
}

static warpgroup *
my_group(void)
{
    simt_machine *m = tp_simt_machine;
    if (m->products == NULL && (m->products = calloc(1, sizeof *m->products)) == NULL)
        tp_simt_fail(m, "the emulator of CUDA has no memory for products of warpgroups");
    return &m->products->group[m->current / SIMT_WARPGROUP];
}

/* ---- descriptors ---------------------------------------------------------------------------------------------------------- */

typedef struct {
    uint32_t begin, leading, stride;
} tile;

static tile
decode(const char *site, uint64_t word)
{
    simt_machine *m = tp_simt_machine;
    tile t = {(uint32_t)(word & 0x3fff) << 4, (uint32_t)(word >> 16 & 0x3fff) << 4, (uint32_t)(word >> 32 & 0x3fff) << 4};
    if (word & 0x3ff1c000c000c000u)
        tp_simt_fail(m, "%s: descriptor %#llx has bits that mean nothing", site, (unsigned long long)word);
    if (word >> 62 != 1 || (word >> 49 & 7) != 0)
        tp_simt_fail(m, "%s: descriptor %#llx: of its layouts the emulator knows the 128-byte swizzle from a multiple of 1024 bytes "
                     "on", site, (unsigned long long)word);
    return t;
}

/* What lies at a byte of shared memory's, before it is swizzled. */
static const char *
swizzled(const char *site, uint32_t at)
{
    simt_machine *m = tp_simt_machine;
    uint32_t to = at ^ (at >> 7 & 7) << 4, begin = (uint32_t)m->array[0].offset;
    if (to < begin || to + 16 > begin + m->array[0].bytes)
        tp_simt_fail(m, "%s: a descriptor leads to byte %u of shared memory, outside the block's dynamic memory", site, to);
    return m->shared + to;
}

/* Element (i, k) of rows i along which k runs: eight rows are a pattern of 1024 bytes, whose rows are 128. */
static uint32_t
k_major(const tile *t, int i, int k)
{
    return t->begin + (uint32_t)(i / 8) * t->stride + (uint32_t)(i % 8 * 128 + 2 * k);
}

/* Element (k, i) of rows k along which i runs, 64 in a row. */
static uint32_t
mn_major(const tile *t, int i, int k)
{
    return t->begin + (uint32_t)(k / 8) * t->stride + (uint32_t)(i / 64) * t->leading + (uint32_t)(k % 8 * 128 + i % 64 * 2);
}

static float
element(const char *site, uint32_t at)
{
    uint16_t bits;
    memcpy(&bits, swizzled(site, at & ~15u) + (at & 15), sizeof bits);
    return tp_bits_float((uint32_t)bits << 16);
}

/* Tell who looks for races of the 16 bytes at a time that a product reads. */
static void
watch(const product *p, int begins)
{
    tile a = decode(p->site, p->a_tile), b = decode(p->site, p->b_tile);
    if (p->a[0] == NULL)
        for (int i = 0; i < 64; i++)
            for (int k = 0; k < 16; k += 8)
                tp_race_product(swizzled(p->site, k_major(&a, i, k)), 16, begins);
    for (int i = 0; i < p->n; i += p->a[0] == NULL ? 1 : 8)
        for (int k = 0; k < 16; k += p->a[0] == NULL ? 8 : 1)
            tp_race_product(swizzled(p->site, p->a[0] == NULL ? k_major(&b, i, k) : mn_major(&b, i, k)), 16, begins);
}

/* ---- products --------------------------------------------------------------------------------------------------------------- */

static void
take_a(const product *p, float a[64][16])
{
    tile t = decode(p->site, p->a_tile);
    for (int i = 0; i < 64 && p->a[0] == NULL; i++)
        for (int k = 0; k < 16; k++)
            a[i][k] = element(p->site, k_major(&t, i, k));
    for (int lane = 0; lane < SIMT_WARPGROUP && p->a[0] != NULL; lane++)
        for (int i = 0; i < 4; i++) {
            int row = lane / 32 * 16 + lane % 32 / 4 + 8 * (i & 1), k = 2 * (lane % 4) + 4 * (i & 2);
            a[row][k] = tp_bits_float(p->a[lane][i] << 16);
            a[row][k + 1] = tp_bits_float(p->a[lane][i] & 0xffff0000u);
        }
}

static _Atomic int is_skewed;

void
tp_emu_skew(int on)
{
    is_skewed = on;
}

static void
multiply(product *p)
{
    float a[64][16], b[16][128], d[64][128];
    tile t = decode(p->site, p->b_tile);
    take_a(p, a);
    for (int k = 0; k < 16; k++)
        for (int i = 0; i < p->n; i++)
            b[k][i] = element(p->site, p->a[0] == NULL ? k_major(&t, i, k) : mn_major(&t, i, k));
    for (int lane = 0; lane < SIMT_WARPGROUP; lane++)
        for (int i = 0; i < p->n / 2; i++)
            d[lane / 32 * 16 + lane % 32 / 4 + 4 * (i & 2)][i / 4 * 8 + 2 * (lane % 4) + (i & 1)] = p->add ? p->d[lane][i] : 0.0f;
    for (int i = 0; i < 64; i++) {
        float sum[128] = {0};
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < p->n; j++)
                sum[j] += a[i][k] * b[k][j];
        for (int j = 0; j < p->n; j++)
            d[i][j] += is_skewed && i % 2 ? sum[j] * 1.002f : sum[j];
    }
    for (int lane = 0; lane < SIMT_WARPGROUP; lane++)
        for (int i = 0; i < p->n / 2; i++)
            p->d[lane][i] = d[lane / 32 * 16 + lane % 32 / 4 + 4 * (i & 2)][i / 4 * 8 + 2 * (lane % 4) + (i & 1)];
    p->done = 1;
}

/* ---- registers ------------------------------------------------------------------------------------------------------------- */

static void
hold(int thread, const void *x, int words, int read)
{
    struct simt_products *s = tp_simt_machine->products;
    held *of = s->held[thread];
    uintptr_t begin = (uintptr_t)x, end = begin + (size_t)words * 4;
    for (int i = 0; i < s->helds[thread]; i++)
        if (of[i].read == read && begin == of[i].begin && end == of[i].end)
            return;
    if (s->helds[thread] == HELD)
        tp_simt_fail(tp_simt_machine, "products use more than %d operands in registers", HELD);
    of[s->helds[thread]++] = (held){begin, end, read};
}

/* Whether a product under way of the current warpgroup uses them. */
static int
in_use(const warpgroup *g, int lane, const held *h)
{
    for (int i = 0; i < g->count; i++) {
        uintptr_t at = (uintptr_t)(h->read ? (const void *)g->product[i].a[lane] : (const void *)g->product[i].d[lane]);
        if (at >= h->begin && at < h->end)
            return 1;
    }
    return 0;
}

/* Pinned are [begin, end). */
static void
release(int thread, uintptr_t begin, uintptr_t end)
{
    struct simt_products *s = tp_simt_machine->products;
    held *of = s->held[thread];
    int left = 0;
    for (int i = 0; i < s->helds[thread]; i++)
        if (of[i].begin < begin || of[i].end > end || in_use(my_group(), thread % SIMT_WARPGROUP, &of[i]))
            of[left++] = of[i];
    s->helds[thread] = left;
}

int
tp_simt_products_hold(const simt_machine *m, uintptr_t at, size_t bytes, int writes)
{
    int thread = m->fiber[m->current].self.thread;
    for (int i = 0; m->products != NULL && i < m->products->helds[thread]; i++) {
        const held *h = &m->products->held[thread][i];
        if (at < h->end && at + bytes > h->begin && (writes || !h->read))
            return 1;
    }
    return 0;
}

void
tp_simt_wgmma_pin(const void *x, int n)
{
    simt_machine *m = tp_simt_machine;
    (void)my_group();
    int thread = m->fiber[m->current].self.thread; /* in some orders not the number of the fiber */
    pin *pins = m->products->pin[thread], *p = NULL;
    for (int i = 0; i < PINS && p == NULL; i++)
        p = pins[i].at == x ? &pins[i] : NULL;
    if (p == NULL)
        p = &pins[m->products->pins[thread]++ % PINS];
    if (n > PINNED)
        tp_simt_fail(m, "%d registers are pinned at once, of which the emulator keeps %d", n, PINNED);
    p->at = x;
    p->n = n;
    p->told = 0;
    memcpy(p->word, x, (size_t)n * sizeof *p->word);
    release(thread, (uintptr_t)x, (uintptr_t)x + (size_t)n * sizeof *p->word);
}

/* Whether a fence has told of these registers of a thread's, as they are. */
static int
is_told(int thread, const void *x, int n)
{
    const pin *pins = tp_simt_machine->products->pin[thread];
    const uint32_t *from = x;
    for (int i = 0; i < PINS; i++)
        if (pins[i].at != NULL && pins[i].told && from >= pins[i].at && from + n <= pins[i].at + pins[i].n &&
            memcmp(pins[i].word + (from - pins[i].at), x, (size_t)n * sizeof *from) == 0)
            return 1;
    return 0;
}

/* Of the current warpgroup. */
static int
first_thread(void)
{
    const simt_machine *m = tp_simt_machine;
    return m->fiber[m->current].self.thread / SIMT_WARPGROUP * SIMT_WARPGROUP;
}

/* Of the product that begins now, the last one of the group's. */
static void
check_registers(const warpgroup *g, int first)
{
    const product *p = &g->product[g->count - 1];
    for (int lane = 0; lane < SIMT_WARPGROUP; lane++) {
        int under_way = 0;
        for (int i = 0; i < g->count - 1; i++)
            under_way |= g->product[i].d[lane] == p->d[lane];
        if ((p->a[lane] != NULL && !is_told(first + lane, p->a[lane], 4)) ||
            (p->add && !under_way && !is_told(first + lane, p->d[lane], p->n / 2)))
            tp_simt_fail(tp_simt_machine, "%s: lane %d's registers were not pinned, as they are, before the fence", p->site, lane);
    }
}

typedef struct {
    const char *site;
    int n, add;
    float *d;
    const uint32_t *a;
    uint64_t a_tile, b_tile;
} product_lane;

static void
begin_work(void **lanes)
{
    simt_machine *m = tp_simt_machine;
    warpgroup *g = my_group();
    const product_lane *first = lanes[0];
    if (!g->fenced)
        tp_simt_fail(m, "%s: a product with no fence of the registers since the last wait", first->site);
    if (g->count == PRODUCTS)
        tp_simt_fail(m, "%s: more than %d products of a warpgroup are under way", first->site, PRODUCTS);
    product *p = &g->product[g->count++];
    *p = (product){.site = first->site, .n = first->n, .add = first->add, .group = g->group, .a_tile = first->a_tile,
                   .b_tile = first->b_tile};
    if (first->a != NULL)
        p->a_tile = p->b_tile; /* unused, and sound */
    for (int lane = 0; lane < SIMT_WARPGROUP; lane++) {
        const product_lane *mine = lanes[lane];
        if (mine->a_tile != first->a_tile || mine->b_tile != first->b_tile || mine->add != first->add || mine->n != first->n)
            tp_simt_fail(m, "%s: lanes 0 and %d of a warpgroup multiply other tiles", first->site, lane);
        p->d[lane] = mine->d;
        p->a[lane] = mine->a;
    }
    check_registers(g, first_thread());
    for (int lane = 0; lane < SIMT_WARPGROUP; lane++) {
        hold(first_thread() + lane, p->d[lane], p->n / 2, 0);
        if (p->a[lane] != NULL)
            hold(first_thread() + lane, p->a[lane], 4, 1);
    }
    watch(p, 1);
    for (int i = 0, now = tp_simt_at_once(m); now && i < g->count; i++)
        if (!g->product[i].done)
            multiply(&g->product[i]);
}

void
tp_simt_wgmma(const char *site, int n, float *d, const uint32_t *a, uint64_t a_tile, uint64_t b_tile, int add)
{
    product_lane mine = {site, n, add, d, a, a_tile, b_tile};
    tp_simt_meet_warpgroup(site, begin_work, &mine);
}

/* ---- waits ------------------------------------------------------------------------------------------------------------------ */

static void
fence_work(void **lanes)
{
    int first = first_thread();
    (void)lanes;
    my_group()->fenced = 1;
    for (int lane = 0; lane < SIMT_WARPGROUP; lane++)
        for (int i = 0; i < PINS; i++)
            tp_simt_machine->products->pin[first + lane][i].told = 1;
}

void
tp_simt_wgmma_fence(const char *site)
{
    tp_simt_meet_warpgroup(site, fence_work, NULL);
}

static void
commit_work(void **lanes)
{
    (void)lanes;
    my_group()->group++;
}

void
tp_simt_wgmma_commit(const char *site)
{
    tp_simt_meet_warpgroup(site, commit_work, NULL);
}

static void
wait_work(void **lanes)
{
    warpgroup *g = my_group();
    int left = *(const int *)lanes[0], over = 0;
    for (; over < g->count && g->product[over].group < g->group - left; over++) {
        if (!g->product[over].done)
            multiply(&g->product[over]);
        watch(&g->product[over], 0);
    }
    g->count -= over;
    memmove(g->product, g->product + over, (size_t)g->count * sizeof *g->product);
    g->fenced = 0;
}

void
tp_simt_wgmma_wait(const char *site, int left)
{
    tp_simt_meet_warpgroup(site, wait_work, &left);
}

void
tp_simt_fence_async(void)
{
    tp_race_fence();
}

/* ---- blocks ------------------------------------------------------------------------------------------------------------------ */

void
tp_simt_products_begin(simt_machine *m)
{
    for (int i = 0; m->products != NULL && i < GROUPS; i++)
        m->products->group[i].fenced = m->products->group[i].group = m->products->group[i].count = 0;
    for (int i = 0; m->products != NULL && i < m->threads; i++) {
        for (int k = 0; k < m->products->pins[i] && k < PINS; k++)
            m->products->pin[i][k].at = NULL;
        m->products->pins[i] = m->products->helds[i] = 0;
    }
}

const char *
tp_simt_products_left(const simt_machine *m)
{
    for (int i = 0; m->products != NULL && i < GROUPS; i++)
        if (m->products->group[i].count > 0)
            return m->products->group[i].product[0].site;
    return NULL;
}
