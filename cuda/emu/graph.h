/* What an emulated stream does with work: it runs it at once or, while it captures, records it for a graph. A launch repeats
 * what was recorded: arguments by value, memory by address. So an argument that should differ from launch to launch, but was
 * captured, gives a wrong result that a test sees.
 *
 * Held to CUDA's rules for captures in thread-local mode (CUDA Programming Guide, "Stream Capture"; Runtime API, error codes
 * 900-907): a thread that captures neither takes nor gives back memory, a stream that captures is not waited for, events from
 * outside are no edges, what was recorded in a capture is no time, and every stream that was forked is joined. A call against
 * them fails and spoils the capture. */
#ifndef TP_CUDA_EMU_GRAPH_H
#define TP_CUDA_EMU_GRAPH_H

#include "cuda/device.h"

typedef tp_status tp_emu_run(const void *body);

/* Run it now, or note a copy of its `bytes` where the stream captures. `name`: for tp_emu_trace, a literal. */
TP_MUST_USE tp_status
tp_emu_do(tp_stream stream, const char *name, tp_emu_run *run, const void *body, size_t bytes);
/* 1 while the calling thread captures. */
int
tp_emu_captures(void);
/* Before a call that the calling thread may not make while it captures, or that a stream may not which does. */
TP_MUST_USE tp_status
tp_emu_outside(const char *call);
TP_MUST_USE tp_status
tp_emu_outside_of(tp_stream stream, const char *call);

/* What an event knows of captures; 0s: nothing. */
typedef struct {
    uint64_t capture; /* its number, where the last record was captured; 0: it was not */
    int branch;
    int64_t at;
} tp_emu_point;

/* Record: 1 if the stream captures, and then nothing else is to be done. */
int
tp_emu_point_record(tp_stream stream, tp_emu_point *point);
TP_MUST_USE tp_status
tp_emu_point_wait(tp_stream stream, const tp_emu_point *point);
/* Before the host reads it. */
TP_MUST_USE tp_status
tp_emu_point_read(const tp_emu_point *point, const char *call);

#endif
