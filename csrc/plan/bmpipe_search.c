#include "csrc/plan/bmpipe_core.h"
tp_status
tp_bmpipe_search(tp_bmpipe *p, int32_t *assignment, tp_bmpipe_found *found)
{
    (void)p;(void)assignment;(void)found;
    return tp_fail(TP_EINTERNAL, "todo");
}
