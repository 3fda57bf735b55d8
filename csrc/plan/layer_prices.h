/* Lower and upper bounds on the least time of a stage within its memory, without looking at its nodes. Put a price on a byte: each
 * node then has a variant of least (time + price x bytes), and sums of those over downsets bound every stage, for each number of
 * replicas and of micro-batches in flight. Internal to the layer-graph planners. */
#ifndef TP_PLAN_LAYER_PRICES_H
#define TP_PLAN_LAYER_PRICES_H

#include "csrc/plan/layer_sums.h"

typedef struct tp_layer_price_list tp_layer_price_list;

typedef struct {
    int64_t *place;              /* [replicas] where a number of replicas begins in: */
    int64_t places;              /* and how many a degree has of */
    tp_layer_price_list **lists; /* [degrees][places] by y; NULL: nobody has made them */
    int32_t *asked;              /* [degrees][places] how often somebody would have used them */
    int worth;                   /* so often that to make them pays */
    int64_t most;                /* bytes that may yet be taken; stages beyond are left to their packs */
    int *rim;                    /* scratch: the nodes of a stage that send or receive, [nodes] */
    double *rim_s;               /* scratch: what their variants take, [variants] */
    double *ratio;               /* scratch: [variants] */
} tp_layer_prices;

/* most: bytes for the lists. */
TP_MUST_USE tp_status
tp_layer_prices_open(const tp_layer_space *space, int64_t most, tp_layer_prices *prices);

/* No choice of variants of stage i \ j of replica[r] replicas of degree[t] that fits at y takes less than *low_s, and one takes no
 * more than *high_s; both INFINITY: none fits. 0 and INFINITY where there are no lists, rounding included where there are. */
void
tp_layer_prices_bound(const tp_layer_space *space, const tp_layer_sums *sums, tp_layer_prices *prices, int i, int j, int t, int r,
                      int y, double *low_s, double *high_s);

#endif
