/* Finds missing waits between streams. An emulated stream does all work at once, in the order of the calls, so a missing wait
 * changes no result there. Here every operation has a place in its stream, and events and waits of the host carry what is before
 * what (vector clocks: Fidge 1988; Mattern 1989). Two operations that touch the same bytes, one of them writing, must be
 * ordered, or the later call fails.
 *
 * Copies and messages are known byte by byte. Of a kernel or product only the arguments are known: a pointer to device memory
 * counts as one byte written there. So a conflict with a kernel is found only at the address that the kernel was given, or that
 * stands in a table of which the launcher says so (TP_REACHES). Host memory is not looked at. */
#ifndef TP_CUDA_EMU_ORDER_H
#define TP_CUDA_EMU_ORDER_H

#include "cuda/device.h"

enum { TP_EMU_LINES = 96 }; /* streams that are followed at a time; more are not looked at */

/* Of each stream how much is before: in an event what was before its last record. */
typedef struct {
    int64_t at[TP_EMU_LINES];
} tp_emu_clock;

/* The bodies of copies and fills (cuda/emu/device.c), which are told by their names. */
typedef struct {
    void *to;
    const void *from;
    size_t to_pitch, from_pitch, row_bytes, rows;
} tp_emu_copy;
typedef struct {
    void *memory;
    size_t bytes;
    uint64_t byte;
} tp_emu_fill;

/* A stream begins (1) or ends. */
void
tp_emu_order_stream(tp_stream stream, int begins);
/* An operation of tp_emu_do runs on the stream. ERUNTIME: it touches what another may touch at that time. */
TP_MUST_USE tp_status
tp_emu_order_do(tp_stream stream, const char *name, const void *body, size_t bytes);
/* The same of what another library does with these bytes. */
TP_MUST_USE tp_status
tp_emu_order_touch(tp_stream stream, const char *name, const void *pointer, size_t bytes, int writes);
/* Memory that another library gives as the device's (1), or takes back. 1: it takes back what the calling thread has not waited for. */
int
tp_emu_order_foreign(const void *pointer, size_t bytes, int gives);
/* The bytes are given back: what touched them is over. */
void
tp_emu_order_forget(const void *pointer, size_t bytes);
void
tp_emu_order_record(tp_stream stream, tp_emu_clock *clock);
void
tp_emu_order_wait(tp_stream stream, const tp_emu_clock *clock);
/* The calling thread has waited for a stream, or for an event: what it asks for from now on comes after. */
void
tp_emu_order_host_stream(tp_stream stream);
void
tp_emu_order_host_event(const tp_emu_clock *clock);

#endif
