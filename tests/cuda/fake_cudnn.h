/* Inside the false libcudnn: what its two files share. */
#ifndef TP_TESTS_FAKE_CUDNN_H
#define TP_TESTS_FAKE_CUDNN_H

#include <stdint.h>

#include "cuda/dl_cudnn.h"

enum { MOST_TENSORS = 64, MOST_ATTRIBUTES = 16 };

/* What it does wrong or not at all: a sum of these. */
enum {
    NO_ENGINE = 1,          /* heuristics offer nothing */
    NO_ODD = 2,             /* no plan for an odd number of queries */
    NOT_THE_SAME = 4,       /* the first engine offered is not deterministic */
    TOP_LEFT = 8,           /* numbers added to row numbers are taken as 0 */
    PACKED_STATISTICS = 16, /* what is fp32 in memory is written as if its rows had no gaps */
    FAILS_TO_RUN = 32,
    NO_HANDLE = 64
};
extern int fake_faults;
extern int64_t fake_workspace; /* bytes that every plan wants */

/* Keeps what cudnnGetLastErrorString says; returns the code. */
int
fake_refuse(int code, const char *why);

/* Whatever attributes it was given. */
typedef struct {
    int name, type;
    int64_t count;
    void *elements;
} attribute;

typedef struct descriptor {
    int type, finalized, attributes;
    attribute attribute[MOST_ATTRIBUTES];
    const struct descriptor *graph; /* of engines, their configurations and plans */
    int engine;
} descriptor;

typedef struct {
    int64_t id, dim[4], stride[4];
    int type, virtual, by_value;
    int64_t align;
} tensor;

enum { A, B, T, Y, OPERANDS };

const attribute *
fake_find(const descriptor *d, int name);
int64_t
fake_number(const descriptor *d, int name, int64_t otherwise);
/* The tensors of an operation; an absent one has id 0. And the descriptor of what it does. */
void
fake_operands(const descriptor *op, tensor out[OPERANDS]);
const descriptor *
fake_how(const descriptor *op);
int64_t
fake_operations(const descriptor *graph, descriptor *const **out);
/* All tensors of a graph, each once; how many. */
int
fake_tensors(const descriptor *graph, tensor out[MOST_TENSORS]);
/* Run the plan's graph on the arrays of a variant pack, in the order of an emulated stream. */
int
fake_execute(tp_stream stream, const descriptor *plan, const descriptor *pack);

#endif
