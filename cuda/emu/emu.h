/* Switches of the emulated device, for tests: how many devices there are, how large, how old, and when one breaks. All are
 * process-wide and meant to be set before a device is opened (tp_emu_break: at any time). */
#ifndef TP_CUDA_EMU_EMU_H
#define TP_CUDA_EMU_EMU_H

#include <stddef.h>
#include <stdint.h>

#include "csrc/base/status.h"

typedef struct {
    int devices;          /* default 1 */
    uint64_t total_bytes; /* of each device; default 4 GiB */
    int major, minor;     /* compute capability; default 9.0 */
    int driver;           /* CUDA version that the driver supports, 1000 * major + 10 * minor; 0: no driver; default 13000 */
    int multiprocessors;  /* default 132 */
} tp_emu_machine;

/* machine NULL: the defaults. EVALUE: a field out of range. Devices that are open keep what they were opened with. */
TP_MUST_USE tp_status
tp_emu_set_machine(const tp_emu_machine *machine);
tp_emu_machine
tp_emu_get_machine(void);
/* The `calls`-th device call from now on (launch, copy, synchronisation, ...) of any thread breaks the process's devices
 * for good: "illegal address", as a kernel's wild store would. 0: heals and never breaks. */
void
tp_emu_break(int64_t calls);
/* A call of a library that uses the device, counted as a device call: 1 if the devices are broken; it has a status for that. */
int
tp_emu_breaks(void);

/* on 1: streams of a part of a device take no kernel. */
void
tp_emu_refuse_parts(int on);
/* Devices on which this process has made a context. */
int
tp_emu_contexts(void);
/* on 1: a warpgroup's products of A and B are not, bit for bit, those of B and A. */
void
tp_emu_skew(int on);

/* on 1: whoever asks an event hears that it has not come yet, as of a GPU that is behind, or hangs. Work is done all the same. 2: that
 * it cannot be asked. 3: as 1, but of events of compute streams. */
void
tp_emu_lag(int on);
/* Events that are there, those of parts of a GPU not counted. */
int
tp_emu_events(void);

/* How graphs go wrong: not at all (0); when a capture ends there is no graph of it; its second operation is refused and spoils it;
 * it cannot begin; a graph cannot be launched. Counts of tp_emu_graph_calls begin anew. */
enum { TP_EMU_NO_GRAPH = 1, TP_EMU_CAPTURE_BREAKS = 2, TP_EMU_NO_BEGIN = 3, TP_EMU_NO_LAUNCH = 4 };
void
tp_emu_set_graphs(int fault);
void
tp_emu_graph_calls(int64_t *captures, int64_t *launches);

/* What the devices of the process did, in order: kernels, copies, fills, products, times taken; by itself or in a graph. */
typedef struct {
    const char *name;
    uint64_t hash; /* of the arguments' bytes */
} tp_emu_traced;
/* on 1: begin anew; 0: stop. Read while nothing runs. */
void
tp_emu_trace(int on);
int64_t
tp_emu_traced_count(void);
tp_emu_traced
tp_emu_traced_at(int64_t i);

/* What the emulated cublasLt says it cannot do: a sum of these. 0: nothing. */
/* FIRST_ALGORITHM: is offered and then does not run. INVALID: fused GELUs are invalid values, not unsupported. */
enum {
    TP_EMU_NO_GELU_AUX = 1,
    TP_EMU_NO_DGELU = 2,
    TP_EMU_NO_PRODUCT = 4,
    TP_EMU_NO_FIRST_ALGORITHM = 8,
    TP_EMU_INVALID = 16,
    TP_EMU_NO_CAPTURE = 32, /* no product while the thread captures: cublasLt 13.3 was seen to do so */
    TP_EMU_NO_PIN = 64,     /* no algorithm of one product for another of an odd number of rows */
    TP_EMU_SPLITS = 128,    /* the first algorithm offered has split sums: two, which lose their end as the real one's do, or, where
                               it was asked for none, of parts that follow from the number of rows */
    TP_EMU_NO_BIAS = 2048,  /* no fp32 product that adds a bias */
    TP_EMU_WRONG_GELU = 512, /* fused, of an odd number of rows, it is max(x, 0); so is the gradient's */
    TP_EMU_NO_RUN = 1024,   /* the first algorithm that is offered does no odd number of rows, which neither heuristics nor the check
                               of an algorithm know */
    TP_EMU_LATE_PIN = 256   /* of twelve algorithms the first nine do but the number of rows that they were asked for */
};
void
tp_emu_set_cublaslt(int refuse);
/* TP_CUDA_WEIGHT_ROWS of stages that are described from now on; 0: as on a GPU. */
void
tp_emu_set_weight_rows(int64_t rows);
int64_t
tp_emu_weight_rows(void);
/* How often it was asked for algorithms, how many products it did, and the SM target of the last (0: none). */
void
tp_emu_cublaslt_calls(int64_t *heuristics, int64_t *products, int64_t *multiprocessors);

#endif
