/* The connections of a rank, which are this process's alone. */
#ifndef TP_COMM_LINKS_H
#define TP_COMM_LINKS_H

#include "csrc/base/status.h"

typedef struct tp_links {
    int ranks;
    int *control; /* [ranks] rank 0: to each other one; others: to rank 0 alone; -1: none */
    int *data;    /* [ranks] to each that this rank talks with; -1: none */
    struct tp_links *next; /* of this process's: links.c */
} tp_links;

/* None yet. A process that is forked from this one loses all that there are in *out: they end with this one. EMEMORY. */
TP_MUST_USE tp_status
tp_links_make(int ranks, tp_links *out);
/* Of none (zeroed) too. */
void
tp_links_close(tp_links *links);

#endif
