/* Rows grouped by an index, on the host: what makes the embedding's gradient a sum per group with no atomics. */
#ifndef TP_CUDA_GROUPS_H
#define TP_CUDA_GROUPS_H

#include <stdint.h>

#include "csrc/base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sort rows 0..rows-1 by index[r] in [0, height), counting; rows of one index stay ascending. *groups = the indices seen,
 * at most min(rows, height); group_index[groups] ascending; rows_of[group_start[g], group_start[g + 1]) the rows of g,
 * group_start[0] = 0. Arrays: group_index [min(rows, height)], group_start one more, rows_of [rows], counts [height]
 * (scratch). O(rows + height). EVALUE: an index outside (names the row); rows not in [0, 2^31). */
TP_MUST_USE tp_status
tp_cuda_group_rows(int64_t rows, const int32_t *index, int64_t height, int32_t *counts, int32_t *group_index,
                   int32_t *group_start, int32_t *rows_of, int64_t *groups);

#ifdef __cplusplus
}
#endif

#endif
