/* Rows of a weight gradient that are summed as one group (csrc/backend/backend.h, the reproducibility contract). No slicing may cut
 * a group, so a slice may leave less than one to the next slice. */
#ifndef TP_BASE_ROW_GROUP_H
#define TP_BASE_ROW_GROUP_H

#define TP_ROW_GROUP 32

#endif
