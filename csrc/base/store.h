/* Memory behind a file, for what waits outside a rank's heap. The kernel writes it to the disk in its own time, and may then
 * use the pages for something else: a copy into it is as fast as memory while there is some, and as the disk where not. */
#ifndef TP_BASE_STORE_H
#define TP_BASE_STORE_H

#include <stddef.h>

#include "csrc/base/status.h"

/* Zeroed memory of so many bytes (0: NULL), aligned to a page, behind a file without a name in `folder`: all of its room is
 * reserved at once. `what` names it in errors. EIO: no such folder, no right to write there, or too little room (names the
 * folder and the bytes). EVALUE: folder is NULL. EMEMORY. */
TP_MUST_USE tp_status
tp_store_open(const char *folder, size_t bytes, const char *what, void **out);
/* memory NULL is allowed. */
void
tp_store_close(void *memory, size_t bytes);
/* Measures a store: copies `bytes` into it and back, through a buffer that stays in no cache, `rounds` times: seconds
 * [rounds][2] out and in. The first round also touches the pages for the first time. Errors as tp_store_open, EVALUE. */
TP_MUST_USE tp_status
tp_store_time(const char *folder, size_t bytes, int rounds, double *seconds);

#endif
