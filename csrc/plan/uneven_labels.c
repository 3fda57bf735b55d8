/* Slices for uneven stages: the label search. */
#include "csrc/plan/uneven_core.h"

#include <math.h>
#include <string.h>

enum { CHUNK_BITS = 10, CHUNK = 1 << CHUNK_BITS };

/* A partial slicing that is worth to be continued. */
typedef struct {
    double bound, sum; /* of any completion; of the vector: a vector that is nowhere later has no larger one */
    int64_t record;    /* where it came from */
    int vector;
} label;

typedef struct {
    label *item;
    int count, room;
} label_list;

typedef struct {
    int64_t parent;
    int cut;
} label_record;

typedef struct {
    tp_uneven *u;
    label_list *list; /* [cuts] */
    double **vector;  /* chunks of vectors */
    int chunks, chunk_room;
    int *spare, spares, spare_room; /* vectors of no label */
    label_record *record;
    int64_t records, record_room;
    int64_t final; /* the record before the last slice of the best plan found here; -1: none */
    double *next;  /* [width] scratch */
} labels;

static double *
vector_of(const labels *l, int at)
{
    return l->vector[at >> CHUNK_BITS] + (size_t)(at & (CHUNK - 1)) * (size_t)l->u->width;
}

/* Room for twice as many; what was there stays. */
static tp_status
grow(const labels *l, void **items, size_t size, int64_t count, int64_t *room)
{
    void *wider;
    int64_t more = 2 * *room + 16;
    TP_TRY(tp_slice_arena_take(l->u->arena, (size_t)more, size, &wider));
    if (count > 0)
        memcpy(wider, *items, (size_t)count * size);
    *items = wider;
    *room = more;
    return TP_OK;
}

static tp_status
grow_vectors(labels *l)
{
    void *items, *memory;
    int64_t room;
    if (l->chunks == l->chunk_room) {
        items = l->vector;
        room = l->chunk_room;
        TP_TRY(grow(l, &items, sizeof *l->vector, l->chunks, &room));
        l->vector = items;
        l->chunk_room = (int)room;
    }
    TP_TRY(tp_slice_arena_take(l->u->arena, (size_t)CHUNK * (size_t)l->u->width, sizeof(double), &memory));
    l->vector[l->chunks++] = memory;
    TP_TRY(tp_slice_arena_take(l->u->arena, (size_t)l->chunks << CHUNK_BITS, sizeof(int), &items));
    if (l->spares > 0)
        memcpy(items, l->spare, (size_t)l->spares * sizeof *l->spare);
    l->spare = items;
    for (int i = 0; i < CHUNK; i++)
        l->spare[l->spares++] = l->chunks * CHUNK - 1 - i;
    return TP_OK;
}

/* A lower bound on every completion of l->next at cut b. */
static double
bound_of(const labels *l, int b)
{
    const tp_uneven *u = l->u;
    const double *rest = u->rest + (size_t)b * (size_t)u->width, *free = l->next;
    double sum = 0.0;
    for (int first = 0; first < u->width; first += u->stages) {
        double most = 0.0;
        for (int k = first; k < first + u->stages; k++) {
            double s = free[k] + rest[k];
            most = s > most ? s : most;
        }
        sum += most;
    }
    const double *both = u->both + (size_t)b * (size_t)u->stages;
    for (int k = 0; u->width > u->stages && k < u->stages; k++) {
        double s = free[k] + free[k + u->stages] + both[k];
        sum = s > sum ? s : sum;
    }
    return sum;
}

/* A machine that is free before anything can reach it again might as well be free then: more vectors compare. */
static void
raise_free(const labels *l, int b)
{
    const tp_uneven *u = l->u;
    const double *least = u->least + (size_t)b * (size_t)u->width;
    for (int first = 0; first < u->width; first += u->stages)
        for (int k = first + 1; k < first + u->stages; k++) {
            double s = l->next[k - 1] + least[k - 1];
            l->next[k] = s > l->next[k] ? s : l->next[k];
        }
}

static int
nowhere_later(const double *x, const double *y, int width)
{
    for (int k = 0; k < width; k++)
        if (x[k] > y[k])
            return 0;
    return 1;
}

/* 1 if l->next adds nothing to the list; otherwise the labels that it makes useless are gone. */
static int
dominated(labels *l, label_list *list, double sum)
{
    int kept = 0, width = l->u->width;
    l->u->plan->work += list->count;
    for (int i = 0; i < list->count; i++)
        if (list->item[i].sum <= sum && nowhere_later(vector_of(l, list->item[i].vector), l->next, width))
            return 1;
    for (int i = 0; i < list->count; i++) {
        if (list->item[i].sum >= sum && nowhere_later(l->next, vector_of(l, list->item[i].vector), width))
            l->spare[l->spares++] = list->item[i].vector;
        else
            list->item[kept++] = list->item[i];
    }
    list->count = kept;
    return 0;
}

static tp_status
add_record(labels *l, int64_t parent, int cut, int64_t *at)
{
    if (l->records == l->record_room) {
        void *items = l->record;
        TP_TRY(grow(l, &items, sizeof *l->record, l->records, &l->record_room));
        l->record = items;
    }
    l->record[l->records] = (label_record){parent, cut};
    *at = l->records++;
    return TP_OK;
}

/* Keep l->next at cut b. */
static tp_status
insert(labels *l, int64_t parent, int b, double bound)
{
    label_list *list = &l->list[b];
    double sum = 0.0;
    raise_free(l, b);
    for (int k = 0; k < l->u->width; k++)
        sum += l->next[k];
    if (dominated(l, list, sum))
        return TP_OK;
    if (list->count == list->room) {
        void *items = list->item;
        int64_t room = list->room;
        TP_TRY(grow(l, &items, sizeof *list->item, list->count, &room));
        list->item = items;
        list->room = (int)room;
    }
    if (l->spares == 0)
        TP_TRY(grow_vectors(l));
    label *added = &list->item[list->count];
    TP_TRY(add_record(l, parent, b, &added->record));
    added->bound = bound;
    added->sum = sum;
    added->vector = l->spare[--l->spares];
    memcpy(vector_of(l, added->vector), l->next, (size_t)l->u->width * sizeof *l->next);
    list->count++;
    l->u->plan->labels++;
    return TP_OK;
}

static tp_status
extend(labels *l, const label *from, int a)
{
    tp_uneven *u = l->u;
    const double *free = vector_of(l, from->vector);
    for (int b = a + 1; b <= u->cuts && u->at[b] - u->at[a] <= u->cap; b++) {
        tp_uneven_advance(u->stages, u->width, free, tp_uneven_edge(u, a, b), l->next);
        u->plan->work++;
        if (b == u->cuts) {
            double end = tp_uneven_end(u->stages, u->width, l->next);
            if (end < u->plan->latency_s) {
                u->plan->latency_s = end;
                l->final = from->record;
            }
            continue;
        }
        double bound = bound_of(l, b);
        if (bound < u->plan->latency_s)
            TP_TRY(insert(l, from->record, b, bound > from->bound ? bound : from->bound));
    }
    return TP_OK;
}

/* The slicing that ends in l->final. */
static void
unwind(labels *l)
{
    const tp_uneven *u = l->u;
    tp_uneven_plan *plan = u->plan;
    int slices = 0, end = u->request->units;
    for (int64_t at = l->final; at >= 0; at = l->record[at].parent)
        slices++;
    plan->slices = slices;
    for (int64_t at = l->final; at >= 0; at = l->record[at].parent) {
        int start = u->at[l->record[at].cut];
        plan->length[--slices] = end - start;
        end = start;
    }
}

static tp_status
search(labels *l, double *open_s)
{
    tp_uneven *u = l->u;
    int64_t end = u->plan->work + u->limit;
    double open = INFINITY;
    TP_TRY(insert(l, -1, 0, 0.0));
    for (int a = 0; a < u->cuts; a++) {
        label_list *list = &l->list[a];
        for (int i = 0; i < list->count; i++) {
            const label *from = &list->item[i];
            if (from->bound >= u->plan->latency_s)
                continue;
            if (u->plan->work >= end)
                open = from->bound < open ? from->bound : open;
            else
                TP_TRY(extend(l, from, a));
            /* Vectors of this cut are not read again: lists behind it take them. */
        }
        for (int i = 0; i < list->count; i++)
            l->spare[l->spares++] = list->item[i].vector;
    }
    *open_s = open < u->plan->latency_s ? open : u->plan->latency_s;
    return TP_OK;
}

tp_status
tp_uneven_labels(tp_uneven *u, double *open_s)
{
    void *memory;
    labels l = {.u = u, .final = -1};
    TP_TRY(tp_slice_arena_take(u->arena, (size_t)u->cuts, sizeof *l.list, &memory));
    l.list = memory;
    TP_TRY(tp_slice_arena_take(u->arena, (size_t)u->width, sizeof *l.next, &memory));
    l.next = memory;
    TP_TRY(search(&l, open_s));
    if (l.final >= 0)
        unwind(&l);
    return TP_OK;
}
