"""How fast do messages go between two processes?

  latency_us    = half the round trip of an 8-byte message, the median over batches of round trips   (required: <= 2)
  message       = bytes of one message / seconds until its receiver has it all, the median of many: out of the sender's arena,
                  as activations and gradients go between stages (tp_comm_ops.lend)
  ring          = the same out of memory that the receiver does not map, through a ring (tp_comm_ops.send): a tied embedding's,
                  replicas' and guests'
  memcpy        = bytes / seconds of a plain copy of the same buffers, alone on one core
  handed        = bytes / seconds of one memcpy by a core of what another core has just written, through memory that both map:
                  what the caches allow to any way of handing data over
  ratio         = message / memcpy                                                      (required: >= 0.7)

Loops run in C (csrc/comm through a small driver below, compiled here), so that Python is not what is measured; each process keeps
to a core of its own, and the four ways take turns. The sender writes its message anew before each, as a kernel would. A message
from the arena is copied once, by the receiver; through a ring twice, in by the sender and out by the receiver, one after another's
chunk. Where memcpy stays in its core's own cache no message can be as fast, because it has to leave the core: there `handed` is
the measure.

The two cores of a virtual machine share a third-level cache or do not, and change from one to the other while it runs. Before each
message a flag goes to and fro: up to 130 ns one way is "near" (50 where this was written), more is "far" (150 to 300). "near" and
"far" hold the same figures of the messages sent then; where there are fewer than twelve of a kind, null.

"transports" compares shared memory, TCP over the loopback and MPI, by turns in one run of two processes: half a round trip of 8
bytes, and bytes of a message / seconds from the beginning of its sending until its receiver has it all and has said so by the
transport itself, less half such a round trip. MPI is there with each --mpicc (default: MPICC, mpicc in PATH, the wheels that `make`
puts into .venv/mpi); its mpiexec starts the processes. One of --kind alone: no messages of the others.
"""
import argparse
import os
import random
import shlex
import shutil
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
#include "csrc/base/cpu_relax.h"
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#define OK(call) do { if ((call) != TP_OK) { fprintf(stderr, "%s\n", tp_error_message()); exit(1); } } while (0)
enum { BATCHES = 60, TRIPS = 300, FLAG_TRIPS = 8, IN_A_ROW = 4, MESSAGE = 0, RING, HANDED, MEMCPY, WAYS };
static const char *const names[] = {"message", "ring", "handed", "memcpy"};
typedef struct { _Alignas(128) _Atomic uint64_t at[2][16]; } flags; /* of each process, on a line of its own */
static void meet(flags *f, int rank, uint64_t *round) {
    ++*round;
    atomic_store_explicit(&f->at[rank][0], *round, memory_order_release);
    for (int looks = 0; atomic_load_explicit(&f->at[!rank][0], memory_order_acquire) < *round; looks++)
        if (looks < 10000) tp_cpu_relax(); else sched_yield();
}
static void keep_to_one_core(int rank) {
    cpu_set_t all, one;
    CPU_ZERO(&one);
    if (sched_getaffinity(0, sizeof all, &all) != 0 || CPU_COUNT(&all) < 2) return;
    for (int core = 0, seen = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &all) && seen++ == rank) CPU_SET(core, &one);
    sched_setaffinity(0, sizeof one, &one);
}
static int64_t one_way_ns(flags *f, int rank, uint64_t *round) {
    int64_t best = INT64_MAX;
    for (int batch = 0; batch < 3; batch++) {
        int64_t start = tp_clock_ns();
        for (int i = 0; i < FLAG_TRIPS; i++) meet(f, rank, round);
        int64_t took = (tp_clock_ns() - start) / FLAG_TRIPS;
        best = took < best ? took : best;
    }
    return best;
}
static void run(int rank, tp_region *region, size_t bytes, int messages, flags *f, char *shared) {
    tp_comm *c;
    uint64_t round = 0, seen = 0, loan = 0;
    size_t room;
    char word[8] = {0}, *data = aligned_alloc(4096, bytes), *copy = aligned_alloc(4096, bytes), *lent;
    memset(data, 1, bytes), memset(copy, 2, bytes);
    setvbuf(stdout, NULL, _IOFBF, 1 << 20); /* rank 0 writes it out here, rank 1 at the end: no line in a line */
    OK(tp_comm_open_region(region, rank, "shm", 20000000000, &c));
    lent = c->ops->arena(c, &room);
    memset(lent, 3, bytes);
    keep_to_one_core(rank);
    for (int batch = 0; batch < BATCHES; batch++) {
        int64_t start = tp_clock_ns();
        for (int i = 0; i < TRIPS; i++) {
            if (rank == 0) OK(c->ops->send(c, 1, 1, word, 8));
            OK(c->ops->recv_post(c, !rank, 1, word, 8));
            OK(c->ops->recv_wait(c, !rank));
            if (rank == 1) OK(c->ops->send(c, 0, 1, word, 8));
        }
        if (rank == 0) printf("latency_us 0 %.4f\n", (double)(tp_clock_ns() - start) / TRIPS / 2000.0);
    }
    fflush(stdout);
    for (int i = 0; i < messages * WAYS; i++) {
        int way = i / IN_A_ROW % WAYS;
        if (rank == (way == MEMCPY)) memset(way == HANDED ? shared : way == MESSAGE ? lent : data, i, bytes);
        int64_t near = one_way_ns(f, rank, &round);
        meet(f, rank, &round);
        int64_t start = tp_clock_ns();
        if (way == MESSAGE && rank == 0) OK(c->ops->lend(c, 1, 2, lent, bytes, &loan));
        if (way == RING && rank == 0) OK(c->ops->send(c, 1, 2, data, bytes));
        if (way <= RING && rank == 1) { OK(c->ops->recv_post(c, 0, 2, copy, bytes)); OK(c->ops->recv_wait(c, 0)); }
        if (way > RING && rank == 1) memcpy(copy, way == HANDED ? shared : data, bytes);
        int64_t end = tp_clock_ns();
        seen += (unsigned char)copy[bytes / 2];
        if (rank == 1) printf("%s_GBps %lld %.6g\n", names[way], (long long)near, (double)bytes / (double)(end - start));
        meet(f, rank, &round);
        if (way == MESSAGE && rank == 0) OK(c->ops->reclaim(c, 1, loan, 2, bytes));
    }
    fprintf(stderr, "%llu\n", (unsigned long long)seen);
    fflush(stdout);
    c->ops->close(c);
}
int main(int count, char **words) {
    size_t bytes = strtoull(words[1], NULL, 10), ring = strtoull(words[2], NULL, 10), size;
    int messages = count > 3 ? atoi(words[3]) : 1;
    uint8_t pairs[4] = {0, 1, 1, 0};
    tp_region_shape shape = {2, pairs, ring, 64, (size_t[2]){bytes, bytes}};
    int fd;
    void *memory, *flag, *shared;
    tp_region *region;
    OK(tp_region_bytes(&shape, &size));
    OK(tp_shm_create(size, &fd, &memory));
    OK(tp_region_create(memory, size, &shape, &region));
    OK(tp_shm_create(bytes, &fd, &shared));
    OK(tp_shm_create(sizeof(flags), &fd, &flag));
    pid_t other = fork();
    run(other == 0, region, bytes, messages, flag, shared);
    if (other > 0) waitpid(other, NULL, 0);
    return 0;
}
"""


TRANSPORTS = r"""
#include "csrc/base/clock.h"
#include "csrc/comm/tcp.h"
#ifdef WITH_MPI
#include "csrc/comm/mpi.h"
#endif
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define OK(call) do { if ((call) != TP_OK) { fprintf(stderr, "%s\n", tp_error_message()); exit(1); } } while (0)
enum { ROUNDS = 12, TRIPS = 100, RING = 4 << 20 };
static int rank, kinds;
static const char *names[3];
static tp_comm *comms[3];
static const size_t sizes[] = {65536, 262144, 1 << 20, 3 << 20, 24 << 20};
static void there_and_back(tp_comm *c, char *out, size_t out_bytes, char *in, size_t in_bytes) {
    if (rank == 0) {
        uint64_t loan; /* the answer says that it is back */
        OK(c->ops->recv_post(c, 1, 2, in, in_bytes));
        OK(c->ops->lend != NULL ? c->ops->lend(c, 1, 1, out, out_bytes, &loan) : c->ops->send(c, 1, 1, out, out_bytes));
        OK(c->ops->recv_wait(c, 1));
    } else {
        OK(c->ops->recv_post(c, 0, 1, out, out_bytes));
        OK(c->ops->recv_wait(c, 0));
        OK(c->ops->send(c, 0, 2, in, in_bytes));
    }
}
static double latency(tp_comm *c) {
    char a[8] = {0}, b[8] = {0};
    int64_t begin = tp_clock_ns();
    for (int i = 0; i < TRIPS; i++) there_and_back(c, a, 8, b, 8);
    return (double)(tp_clock_ns() - begin) / TRIPS / 2;
}
static void add(const char *name, tp_comm *comm) { names[kinds] = name; comms[kinds++] = comm; }
int main(int count, char **words) {
    const char *mine = getenv("PMI_RANK") ? getenv("PMI_RANK") : getenv("OMPI_COMM_WORLD_RANK");
    uint8_t pairs[4] = {0, 1, 1, 0};
    size_t bytes;
    void *memory;
    tp_region *shared, *own;
    tp_comm *control, *comm;
    rank = atoi(mine);
    if (count < 4) return 2;
    tp_tcp_config config = {.rank = rank, .ranks = 2, .host = "127.0.0.1", .port = atoi(words[1]), .ports = 16, .token = "",
                            .version = "", .plan = "", .pairs = pairs, .max_gather_bytes = 64, .meeting_ns = 30000000000,
                            .timeout_ns = 60000000000};
    tp_region_shape alone = {2, (uint8_t[4]){0}, 1, 64, NULL}, rings = {2, pairs, RING, 64, (size_t[2]){24 << 20, 24 << 20}};
    OK(tp_region_bytes(&alone, &bytes));
    OK(tp_local_create(bytes, &memory));
    OK(tp_region_create(memory, bytes, &alone, &own));
    OK(tp_comm_open_tcp(&config, own, &control));
    OK(tp_region_bytes(&rings, &bytes));
    long pid = getpid(), both[2];
    int fd = -1;
    char path[64];
    if (rank == 0) { OK(tp_shm_create(bytes, &fd, &memory)); OK(tp_region_create(memory, bytes, &rings, &shared)); }
    long told[2] = {pid, fd}, all[4];
    OK(control->ops->allgather(control, told, sizeof told, all));
    both[0] = all[0], both[1] = all[1];
    snprintf(path, sizeof path, "/proc/%ld/fd/%ld", both[0], both[1]);
    if (rank == 1) { OK(tp_shm_attach(open(path, O_RDWR), &bytes, &memory)); OK(tp_region_attach(memory, bytes, &shared)); }
    OK(control->ops->allgather(control, NULL, 0, NULL));
    OK(tp_comm_open_region(shared, rank, "shm", 60000000000, &comm));
    if (strstr(words[3], "shm")) add("shm", comm);
    if (strstr(words[3], "tcp")) add("tcp", control);
#ifdef WITH_MPI
    int ranks;
    tp_comm *mpi;
    OK(tp_mpi()->start(&rank, &ranks));
    OK(tp_mpi()->open(control, own, RING, &mpi));
    if (strstr(words[3], "mpi")) add("mpi", mpi);
    if (rank == 0) printf("library %s\n", tp_mpi()->library());
#endif
    size_t most = sizes[sizeof sizes / sizeof *sizes - 1];
    char *own_data = aligned_alloc(4096, most), word[8] = {0};
    memset(own_data, rank, most);
    for (int round = 0, rounds = atoi(words[2]) * ROUNDS; round < rounds; round++)
        for (int k = 0; k < kinds; k++) {
            double trip = latency(comms[k]);
            if (rank == 0) printf("%s latency_us %.3f\n", names[k], trip * 1e-3);
            size_t room;
            char *data = rank == 0 && comms[k]->ops->arena != NULL ? comms[k]->ops->arena(comms[k], &room) : own_data;
            for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
                memset(data, round, rank == 0 ? sizes[i] : 0); /* anew, as a kernel would */
                int64_t begin = tp_clock_ns();
                there_and_back(comms[k], data, sizes[i], word, 8);
                double took = (double)(tp_clock_ns() - begin) - trip;
                if (rank == 0) printf("%s %zu %.6g\n", names[k], sizes[i], (double)sizes[i] / took);
            }
        }
    fflush(stdout);
#ifdef WITH_MPI
    mpi->ops->close(mpi);
    tp_mpi()->finish();
#endif
    control->ops->close(control);
    return 0;
}
"""

WAYS = ("message_GBps", "ring_GBps", "handed_GBps", "memcpy_GBps")
NEAR_NS = 130   # one way of a flag between two cores that share a cache, at most
FEWEST = 12     # messages that make a median
IN_A_ROW = 4    # messages of one way: the caches are in the state that it leaves


def rates(samples: dict[str, list[float]]) -> dict[str, float] | None:
    """Medians of each way, and of the message to the other two."""
    if min((len(values) for values in samples.values()), default=0) < FEWEST:
        return None
    result: dict[str, float] = {name: statistics.median(values) for name, values in samples.items()}
    quarters = statistics.quantiles(samples["message_GBps"], n=4)
    return {**result, "message_quartiles_GBps": [quarters[0], quarters[2]], "messages": len(samples["message_GBps"]),
            "ratio": result["message_GBps"] / result["memcpy_GBps"],
            "ratio_handed": result["message_GBps"] / result["handed_GBps"],
            "ring_ratio": result["ring_GBps"] / result["memcpy_GBps"]}


def measure(binary: Path, message_bytes: int, ring_bytes: int, messages: int) -> dict[str, object]:
    """Medians of one run of the driver: of all messages, and of those sent while the cores were near or far."""
    out = subprocess.run([binary, str(message_bytes), str(ring_bytes), str(messages)], check=True, capture_output=True,
                         text=True).stdout
    latency: list[float] = []
    kinds: dict[str, dict[str, list[float]]] = {kind: {way: [] for way in WAYS} for kind in ("all", "near", "far")}
    for line in out.splitlines():
        name, one_way_ns, value = line.split()
        if name == "latency_us":
            latency.append(float(value))
            continue
        for kind in ("all", "near" if int(one_way_ns) <= NEAR_NS else "far"):
            kinds[kind][name].append(float(value))
    return {"latency_us": statistics.median(latency), "latency_best_us": min(latency), **(rates(kinds["all"]) or {}),
            "near": rates(kinds["near"]), "far": rates(kinds["far"])}


def mpiccs(given: list[str] | None) -> list[Path]:
    """The compilers of the MPIs to measure."""
    named = given or [name for name in (os.environ.get("MPICC"), shutil.which("mpicc")) if name]
    return [Path(name).absolute() for name in named] or sorted((Path(sys.prefix) / "mpi").glob("*/bin/mpicc"))


def sources_of(mpi: bool) -> list[Path]:
    """What a driver of messages is linked with."""
    base = [ROOT / f"csrc/base/{name}.c" for name in ("clock", "room", "status")]
    return base + [path for path in sorted((ROOT / "csrc/comm").glob("*.c")) if mpi or not path.name.startswith("mpi")]


def compare(folder: Path, mpicc: Path | None, kinds: str, rounds: int) -> dict[str, object]:
    """Medians of each transport, by turns; mpicc None: without MPI."""
    binary, source = folder / "transports", folder / "transports.c"
    source.write_text(TRANSPORTS)
    sources = sources_of(mpicc is not None)
    command = ["gcc", "-std=c11", "-D_GNU_SOURCE", "-O3", f"-I{ROOT}", source, *sources]
    if mpicc is not None:
        command += ["-DWITH_MPI", *shlex.split(subprocess.check_output([mpicc, "-show"], text=True))[1:]]
    subprocess.run([*command, "-lpthread", "-lm", "-o", binary], check=True)
    words = [str(binary), str(random.randrange(20_000, 30_000)), str(rounds), kinds]
    freely = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PRTE_MCA_hwloc_default_binding_policy": "none",
              "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    if mpicc is not None:
        out = subprocess.run([mpicc.with_name("mpiexec"), "-n", "2", *words], check=True, capture_output=True, text=True,
                             env={**os.environ, **freely}).stdout
    else:
        ranks = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PMI_RANK": str(rank)})
                 for rank in range(2)]
        out = [rank.communicate()[0] for rank in ranks][0]
    library, samples = "", {}
    for line in out.splitlines():
        if line.startswith("library "):
            library = " ".join(line.split()[1:])
        else:
            kind, what, value = line.split()
            samples.setdefault(kind, {}).setdefault(what, []).append(float(value))
    columns = [what for what in next(iter(samples.values())) if what != "latency_us"]
    print(f"\n{library or 'no MPI'}\n" + "".join(word.rjust(12) for word in ("transport", "latency us", *columns)))
    rows = {}
    for kind, found in samples.items():
        middle = {what: statistics.median(values) for what, values in found.items()}
        rows[kind] = {"latency_us": middle.pop("latency_us"), "GBps": middle,
                      "quartiles_GBps": {what: statistics.quantiles(found[what], n=4)[::2] for what in middle}}
        print("".join(word.rjust(12) for word in (kind, f"{rows[kind]['latency_us']:.2f}", *(f"{v:.2f}" for v in middle.values()))))
    return {"library": library, "rounds": len(samples[kind]["latency_us"]), **rows}


WIDTHS = (9, 8, 10, 8, 5, 8, 6, 6, 6, 6, 6, 6, 6)


def line_of(row: dict[str, object], kind: str, rate: dict[str, float]) -> str:
    """One line of the table."""
    words = [str(row["message_bytes"]), str(row["ring_bytes"]), f"{row['latency_us']:.3f}", f"{row['latency_best_us']:.3f}", kind,
             str(rate["messages"])]
    columns = ("message_GBps", "memcpy_GBps", "ratio", "handed_GBps", "ratio_handed", "ring_GBps", "ring_ratio")
    words += [f"{rate[name]:.2f}" for name in columns]
    return " ".join(word.rjust(width) for word, width in zip(words, WIDTHS, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="result file (default benchmarks/results/comm.json)")
    parser.add_argument("--cflags", default="-O3", help="compiler flags of the driver")
    parser.add_argument("--messages", type=int, default=240, help="of each way and size (default 240; a quarter of 24 MB)")
    parser.add_argument("--mpicc", action="append", help="of an MPI to measure; repeat for more")
    parser.add_argument("--kind", default="shm,tcp,mpi", help="transports to compare (default shm,tcp,mpi)")
    parser.add_argument("--rounds", type=int, default=3, help="dozens of rounds of the transports (default 3)")
    parser.add_argument("--transports", action="store_true", help="these alone")
    options = parser.parse_args()
    print(__doc__)
    about = header("how fast messages go between two processes")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "driver.c", Path(folder) / "driver"
        source.write_text(DRIVER)
        flags = ["-std=c11", "-D_GNU_SOURCE", f"-I{ROOT}", *options.cflags.split()]
        subprocess.run(["gcc", *flags, source, *sources_of(mpi=False), "-lpthread", "-o", binary], check=True)
        rates = ("GB/s", "memcpy", "ratio", "handed", "ratio", "ring", "ratio")
        head = ("message", "ring", "latency us", "best us", "cores", "messages", *rates)
        print(" ".join(word.rjust(width) for word, width in zip(head, WIDTHS, strict=True)))
        for megabytes, ring_megabytes in () if options.transports else ((0.25, 4), (1, 4), (3, 4), (24, 4), (24, 1), (24, 8)):
            message, ring = int(megabytes * 2**20), ring_megabytes << 20
            count = max(options.messages // (4 if megabytes > 8 else 1), FEWEST) // IN_A_ROW * IN_A_ROW
            row = {"message_bytes": message, "ring_bytes": ring, **measure(binary, message, ring, count)}
            rows.append(row)
            for kind, rate in (("any", row), ("near", row["near"]), ("far", row["far"])):
                if rate is not None:
                    print(line_of(row, kind, rate))
        transports = [compare(Path(folder), mpicc, options.kind, options.rounds) for mpicc in mpiccs(options.mpicc) or [None]]
    write("comm", {**about, "cflags": options.cflags, "rows": rows, "transports": transports}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
