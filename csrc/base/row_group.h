/* Rows that the sum of a weight gradient takes at once (csrc/backend/backend.h, the reproducibility contract): what no slicing may
 * cut, and what a slice may therefore leave to the next. */
#ifndef TP_BASE_ROW_GROUP_H
#define TP_BASE_ROW_GROUP_H

#define TP_ROW_GROUP 32

#endif
