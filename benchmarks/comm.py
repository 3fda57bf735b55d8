"""How fast do messages go between two processes?

  latency_us    = half the round trip of an 8-byte message, the median over batches of round trips   (required: <= 2)
  bandwidth     = bytes of one message / seconds until its receiver has it all, the median of many
  memcpy        = bytes / seconds of a plain copy of the same buffers, alone on one core
  handed        = bytes / seconds of one memcpy by a core of what another core has just written, through memory that both map:
                  what the caches allow to any way of handing data over
  ratio         = bandwidth / memcpy                                                    (required: >= 0.7)

Loops run in C (csrc/comm through a small driver below, compiled here), so that Python is not what is measured. The sender
writes its message anew before each, as a kernel would. A message is copied twice, in by the sender and out by the receiver;
the two overlap, so a ratio of 1 is the limit where memcpy goes to memory. Where memcpy stays in its core's own cache no
message can be as fast, because it has to leave the core: there `handed` is the measure.
"""
import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import header, write

ROOT = Path(__file__).resolve().parent.parent
DRIVER = r"""
#include "csrc/base/clock.h"
#include "csrc/comm/comm.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#define OK(call) do { if ((call) != TP_OK) { fprintf(stderr, "%s\n", tp_error_message()); exit(1); } } while (0)
enum { BATCHES = 60, TRIPS = 300, LARGE = 30 };
static void run(int rank, tp_region *region, size_t bytes, char *shared) {
    tp_comm *c;
    char word[8] = {0}, *data = aligned_alloc(4096, bytes), *copy = aligned_alloc(4096, bytes);
    memset(data, 1, bytes), memset(copy, 2, bytes);
    OK(tp_comm_open_region(region, rank, "shm", 20000000000, &c));
    for (int batch = 0; batch < BATCHES; batch++) {
        int64_t start = tp_clock_ns();
        for (int i = 0; i < TRIPS; i++) {
            if (rank == 0) OK(c->ops->send(c, 1, 1, word, 8));
            OK(c->ops->recv_post(c, !rank, 1, word, 8));
            OK(c->ops->recv_wait(c, !rank));
            if (rank == 1) OK(c->ops->send(c, 0, 1, word, 8));
        }
        if (rank == 0) printf("latency_us %.4f\n", (double)(tp_clock_ns() - start) / TRIPS / 2000.0);
    }
    for (int i = 0; i < LARGE; i++) {
        if (rank == 0) memset(data, i, bytes);
        OK(c->ops->allgather(c, NULL, 0, NULL));
        int64_t start = tp_clock_ns();
        if (rank == 0) OK(c->ops->send(c, 1, 2, data, bytes));
        else { OK(c->ops->recv_post(c, 0, 2, copy, bytes)); OK(c->ops->recv_wait(c, 0)); }
        if (rank == 1) printf("message_GBps %.3f\n", (double)bytes / (double)(tp_clock_ns() - start));
    }
    for (int i = 0; i < LARGE; i++) {
        if (rank == 0) memset(shared, i, bytes);
        OK(c->ops->allgather(c, NULL, 0, NULL));
        int64_t start = tp_clock_ns();
        if (rank == 1) memcpy(copy, shared, bytes);
        if (rank == 1) printf("handed_GBps %.3f\n", (double)bytes / (double)(tp_clock_ns() - start + (copy[i] == 77)));
        OK(c->ops->allgather(c, NULL, 0, NULL));
    }
    OK(c->ops->allgather(c, NULL, 0, NULL));
    for (int i = 0; i < LARGE && rank == 0; i++) {
        int64_t start = tp_clock_ns();
        memcpy(copy, data, bytes);
        printf("memcpy_GBps %.3f\n", (double)bytes / (double)(tp_clock_ns() - start + (copy[i] == 7)));
    }
    fflush(stdout);
    c->ops->close(c);
}
int main(int count, char **words) {
    size_t bytes = strtoull(words[1], NULL, 10), ring = strtoull(words[2], NULL, 10), size;
    uint8_t pairs[4] = {0, 1, 1, 0};
    int fd;
    void *memory, *shared;
    tp_region *region;
    OK(tp_region_bytes(2, pairs, ring, 64, &size));
    OK(tp_shm_create(size, &fd, &memory));
    OK(tp_region_create(memory, size, 2, pairs, ring, 64, &region));
    OK(tp_shm_create(bytes, &fd, &shared));
    pid_t other = fork();
    run(other == 0, region, bytes, shared);
    if (other > 0) waitpid(other, NULL, 0);
    return count < 3;
}
"""


def measure(binary: Path, message_bytes: int, ring_bytes: int) -> dict[str, float]:
    """Medians of one run of the driver."""
    out = subprocess.run([binary, str(message_bytes), str(ring_bytes)], check=True, capture_output=True, text=True).stdout
    samples: dict[str, list[float]] = {}
    for line in out.splitlines():
        name, value = line.split()
        samples.setdefault(name, []).append(float(value))
    result = {name: statistics.median(values) for name, values in samples.items()}
    result["latency_best_us"] = min(samples["latency_us"])
    result["ratio"] = result["message_GBps"] / result["memcpy_GBps"]
    result["ratio_handed"] = result["message_GBps"] / result["handed_GBps"]
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="result file (default benchmarks/results/comm.json)")
    parser.add_argument("--cflags", default="-O3", help="compiler flags of the driver")
    options = parser.parse_args()
    print(__doc__)
    about = header("how fast messages go between two processes")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "driver.c", Path(folder) / "driver"
        source.write_text(DRIVER)
        sources = [*sorted((ROOT / "csrc/comm").glob("*.c")), ROOT / "csrc/base/status.c", ROOT / "csrc/base/clock.c"]
        sources = [path for path in sources if path.name != "mpi.c"]
        flags = ["-std=c11", "-D_GNU_SOURCE", f"-I{ROOT}", *options.cflags.split()]
        subprocess.run(["gcc", *flags, source, *sources, "-lpthread", "-o", binary], check=True)
        head = zip(("message", "ring", "latency us", "best us", "GB/s", "memcpy", "ratio", "handed", "ratio"),
                   (10, 10, 11, 8, 7, 7, 6, 7, 6), strict=True)
        print(" ".join(word.rjust(width) for word, width in head))
        for megabytes, ring_megabytes in ((0.25, 4), (3, 4), (24, 4), (24, 1), (24, 8)):
            message, ring = int(megabytes * 2**20), ring_megabytes << 20
            row = {"message_bytes": message, "ring_bytes": ring, **measure(binary, message, ring)}
            rows.append(row)
            print(f"{message:>10} {ring:>10} {row['latency_us']:>11.3f} {row['latency_best_us']:>8.3f} "
                  f"{row['message_GBps']:>7.2f} {row['memcpy_GBps']:>7.2f} {row['ratio']:>6.2f} "
                  f"{row['handed_GBps']:>7.2f} {row['ratio_handed']:>6.2f}")
    write("comm", {**about, "cflags": options.cflags, "rows": rows}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
