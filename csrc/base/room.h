/* How much memory this process could still allocate, by what the kernel reports. Nothing is allocated to find out. */
#ifndef TP_BASE_ROOM_H
#define TP_BASE_ROOM_H

#include <stdbool.h>
#include <stddef.h>

typedef struct {
    size_t total, available; /* bytes, at any time and now; SIZE_MAX: nobody says */
    bool grouped;            /* it is a control group (a container's, a batch job's) that leaves so little now, not the machine */
} tp_room;

/* The machine's (proc/meminfo), or what is less: the limit of this process's control group or of one above it (version 2:
 * memory.max, version 1: memory.limit_in_bytes), whose cache of files counts as available. root: a folder that has proc and
 * sys in it; "" is where they are. */
void
tp_room_look(const char *root, tp_room *out);

#endif
