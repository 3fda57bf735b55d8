#include "cuda/groups.h"

#include <string.h>

tp_status
tp_cuda_group_rows(int64_t rows, const int32_t *index, int64_t height, int32_t *counts, int32_t *group_index,
                   int32_t *group_start, int32_t *rows_of, int64_t *groups)
{
    int64_t found = 0;
    int32_t start = 0;
    if (rows < 0 || rows > INT32_MAX || height < 0)
        return tp_fail(TP_EVALUE, "rows to group: %lld rows of %lld indices; rows must be 0..%lld and indices not below 0",
                       (long long)rows, (long long)height, (long long)INT32_MAX);
    memset(counts, 0, (size_t)height * sizeof *counts);
    for (int64_t r = 0; r < rows; r++) {
        if (index[r] < 0 || index[r] >= height)
            return tp_fail(TP_EVALUE, "rows to group: row %lld has index %d; it must be 0..%lld", (long long)r,
                           (int)index[r], (long long)height - 1);
        counts[index[r]]++;
    }
    for (int64_t i = 0; i < height; i++) {
        const int32_t count = counts[i];
        if (count == 0)
            continue;
        group_index[found] = (int32_t)i;
        group_start[found++] = counts[i] = start; /* where the next row of i goes */
        start += count;
    }
    group_start[found] = start;
    for (int64_t r = 0; r < rows; r++)
        rows_of[counts[index[r]]++] = (int32_t)r;
    *groups = found;
    return TP_OK;
}
