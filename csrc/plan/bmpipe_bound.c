#include "csrc/plan/bmpipe_chunks.h"
tp_status
tp_bmpipe_bound(tp_bmpipe_search_room *s, double *bound_s)
{
    (void)s;
    *bound_s = 0.0;
    return TP_OK;
}
