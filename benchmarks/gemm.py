"""How fast are our fp32 matrix products beside OpenBLAS, MKL and oneDNN, one thread, at the shapes of GPT layers?

A product of [M, K] and [K, N] is M*N*K multiply-adds: GFLOP/s = 2*M*N*K / seconds / 1e9. The three products of a linear
layer [K, N] over M tokens have the same count: forward x W, input gradient dy W^T, weight gradient x^T dy.

Every library runs in a process of its own, pinned to one core; only one of them works at a time. They take turns on
each shape (`--rounds` turns of about `--slice` seconds after one untimed call), so that a change of the machine's speed
meets all of them. Times are processor time of the process (all its threads). The columns are each library's fastest
call; then follow ours / best other by fastest calls, and by turns: each round gives (median call of the best other) /
(our median call), of which median and quartiles are shown. On a shared machine the fastest calls say most. Our weights are packed
before, as they are once in a training step; oneDNN gets packed weights too, the others what they are used with.

    python benchmarks/gemm.py --torch-python /tmp/tv/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("forward", "input_grad", "weight_grad")
Call = Callable[[], Any]


# ---- one library in its own process ----------------------------------------------------------------------------------


def ours(isa: str | None, kind: str, m: int, k: int, n: int) -> dict[str, Call]:
    """Our kernels on packed weights."""
    import numpy as np

    sys.path.append(str(ROOT))  # for a build in place; an installed package comes first
    from terapipe_c import _core

    kernels, rng = _core.Kernels(isa), np.random.default_rng(0)
    weight = kernels.weight(rng.standard_normal((k, n), dtype=np.float32))
    x, dy = rng.standard_normal((m, k), dtype=np.float32), rng.standard_normal((m, n), dtype=np.float32)
    y, dx = np.empty_like(dy), np.empty_like(x)
    calls: dict[str, Call] = {
        "forward": lambda: kernels.linear(x, weight, y),
        "input_grad": lambda: kernels.linear_t(dy, weight, dx),
        "weight_grad": lambda: kernels.linear_w(x, dy, weight),
    }
    return {f"terapipe_c {kernels.isa}": calls[kind]}


def openblas(label: str, kind: str, m: int, k: int, n: int) -> dict[str, Call]:
    """NumPy's OpenBLAS."""
    import numpy as np

    rng = np.random.default_rng(0)
    w = rng.standard_normal((k, n), dtype=np.float32)
    x, dy = rng.standard_normal((m, k), dtype=np.float32), rng.standard_normal((m, n), dtype=np.float32)
    y, dx, dw = np.empty_like(dy), np.empty_like(x), np.empty_like(w)
    calls: dict[str, Call] = {
        "forward": lambda: np.matmul(x, w, out=y),
        "input_grad": lambda: np.matmul(dy, w.T, out=dx),
        "weight_grad": lambda: np.matmul(x.T, dy, out=dw),
    }
    return {label: calls[kind]}


def torch_calls(kind: str, m: int, k: int, n: int) -> dict[str, Call]:
    """PyTorch: MKL through mm and linear, oneDNN through the prepacked linear that its compiler uses."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    w, x, dy = torch.randn(k, n), torch.randn(m, k), torch.randn(m, n)
    w_t = w.t().contiguous()
    if kind == "weight_grad":
        dw = torch.empty(k, n)
        return {"torch mm": lambda: torch.mm(x.t(), dy, out=dw)}
    source, matrix, transposed, width = (x, w, w_t, n) if kind == "forward" else (dy, w_t, w, k)
    y = torch.empty(m, width)
    calls: dict[str, Call] = {
        "torch mm": lambda: torch.mm(source, matrix, out=y) if kind == "forward" else torch.mm(source, w.t(), out=y),
        "torch linear": lambda: torch.nn.functional.linear(source, transposed),
    }
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(transposed, m)
        pointwise = torch.ops.mkldnn._linear_pointwise
        pointwise(source, packed, None, "none", [], "")
        calls["oneDNN packed"] = lambda: pointwise(source, packed, None, "none", [], "")
    except (RuntimeError, AttributeError, NotImplementedError):
        pass  # a build without oneDNN
    return calls


def turn(call: Call, seconds: float) -> list[float]:
    """Fastest and median processor seconds of a call, over calls that last `seconds` together."""
    call()
    samples: list[float] = []
    until = time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < until:
        start = time.process_time_ns()
        call()
        samples.append((time.process_time_ns() - start) * 1e-9)
    return [min(samples), statistics.median(samples)]


def worker(library: str, isa: str | None) -> None:
    """Serve turns over stdin and stdout: a shape makes operands, a name takes a turn."""
    calls: dict[str, Call] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "shape" in request:
            calls.clear()
            kind, (m, k, n) = request["kind"], request["shape"]
            if library == "ours":
                calls = ours(isa, kind, m, k, n)
            elif library == "torch":
                calls = torch_calls(kind, m, k, n)
            else:
                calls = openblas(library, kind, m, k, n)
            print(json.dumps(list(calls)), flush=True)
        else:
            print(json.dumps(turn(calls[request["turn"]], request["seconds"])), flush=True)


class Library:
    """A worker process."""

    def __init__(self, library: str, isa: str | None, core: int, python: str = sys.executable, **extra: str) -> None:
        threads = {name: "1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self.process = subprocess.Popen(
            [python, __file__, "--worker", library, *(["--isa", isa] if isa else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **threads, **extra},
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )

    def ask(self, **request: Any) -> Any:
        """Send a request and wait for its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"worker {self.process.args!r} ended")
        return json.loads(answer)

    def close(self) -> None:
        """End the worker."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# ---- the comparison --------------------------------------------------------------------------------------------------


def shapes(widths: list[int], rows: list[int], head: int) -> list[tuple[str, int, int, int]]:
    """(kind, M, K, N) of the four linear layers of each width, and of the head of the first."""
    layers = [(e, f * e) for e in widths for f in (3, 1, 4)] + [(4 * e, e) for e in widths]
    cases = [(kind, m, k, n) for k, n in sorted(layers) for kind in KINDS for m in rows]
    return cases + [(kind, head, widths[0], 50257) for kind in KINDS if head > 0]


def quantile(values: list[float], q: float) -> float:
    """Linear between order statistics."""
    values = sorted(values)
    at = q * (len(values) - 1)
    low = int(at)
    return values[low] + (at - low) * (values[min(low + 1, len(values) - 1)] - values[low])


def measure(libraries: list[Library], case: tuple[str, int, int, int], rounds: int, seconds: float) -> dict[str, Any]:
    """One row of the table."""
    kind, m, k, n = case
    entries = [(lib, name) for lib in libraries for name in lib.ask(kind=kind, shape=[m, k, n])]
    fastest: dict[str, list[float]] = {name: [] for _, name in entries}
    median: dict[str, list[float]] = {name: [] for _, name in entries}
    for index in range(rounds):
        for lib, name in entries[index % len(entries) :] + entries[: index % len(entries)]:
            low, middle = lib.ask(turn=name, seconds=seconds)
            fastest[name].append(low)
            median[name].append(middle)
    our_name, flops = entries[0][1], 2.0 * m * n * k
    typical = {name: statistics.median(t) for name, t in median.items()}
    best = min((name for name in typical if name != our_name), key=lambda name: typical[name])
    least = {name: min(t) for name, t in fastest.items()}
    ratios = [other / mine for other, mine in zip(median[best], median[our_name], strict=True)]
    return {
        "kind": kind, "M": m, "K": k, "N": n, "best_other": best,
        "gflops": {name: flops / t / 1e9 for name, t in typical.items()},
        "gflops_fastest": {name: flops / t / 1e9 for name, t in least.items()},
        "ratio": statistics.median(ratios), "ratio_quartiles": [quantile(ratios, 0.25), quantile(ratios, 0.75)],
        "ratio_fastest": min(t for name, t in least.items() if name != our_name) / least[our_name],
        "seconds_median_of_turn": median, "seconds_fastest_of_turn": fastest,
    }  # fmt: skip


def processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def print_row(row: dict[str, Any], names: list[str]) -> None:
    """One line; names gives the columns."""
    cells = "".join(f"{row['gflops_fastest'].get(name, float('nan')):>{max(len(name), 6) + 2}.1f}" for name in names)
    low, high = row["ratio_quartiles"]
    print(f"{row['kind']:<12}{row['M']:>6}{row['K']:>6}{row['N']:>7}{cells}{row['ratio_fastest']:>9.2f}"
          f"{row['ratio']:>8.2f}  {low:.2f}..{high:.2f}  "
          f"{row['best_other']}", flush=True)  # fmt: skip


def main() -> None:
    """Run the comparison, print it, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--isa", help="amx, avx512, avx2 or portable; the best one here if absent")
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter that can import torch")
    parser.add_argument("--widths", type=int, nargs="+", default=[768, 2048])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024, 2048], help="values of M")
    parser.add_argument("--head", type=int, default=256, help="M of the [width, 50257] products; 0: leave them out")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slice", type=float, default=0.03, help="seconds of a turn")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gemm.json")
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker, args.isa)
    from common import header  # not at the top: workers run where the benchmarks' own modules need not be

    about = header("how fast the matrix products are beside OpenBLAS, MKL and oneDNN")
    libraries = [
        Library("ours", args.isa, args.core),
        Library("OpenBLAS", None, args.core),
    ]
    if "avx512f" in Path("/proc/cpuinfo").read_text():  # elsewhere that core type is an illegal instruction
        libraries.append(Library("OpenBLAS SkylakeX", None, args.core, OPENBLAS_CORETYPE="SkylakeX"))
    if subprocess.run([args.torch_python, "-c", "import torch"], capture_output=True).returncode == 0:
        libraries.append(Library("torch", None, args.core, python=args.torch_python))
    else:
        print(f"{args.torch_python} cannot import torch: only OpenBLAS is beside us")
    print(__doc__.split("\n\n")[1])
    rows, names = [], None
    for case in shapes(args.widths, args.rows, args.head):
        if case[0] not in args.kinds:
            continue
        row = measure(libraries, case, args.rounds, args.slice)
        if names is None:
            names = list(row["gflops"]) + ["oneDNN packed"] * ("oneDNN packed" not in row["gflops"])
            print(f"{'product':<12}{'M':>6}{'K':>6}{'N':>7}" + "".join(f"{n:>{max(len(n), 6) + 2}}" for n in names)
                  + "  fastest  median  quartiles   best other")  # fmt: skip
        print_row(row, names)
        rows.append(row)
    for lib in libraries:
        lib.close()
    for kind in args.kinds:
        for what in ("ratio_fastest", "ratio"):
            ratios = [row[what] for row in rows if row["kind"] == kind]
            print(f"{kind}, {what}: median {statistics.median(ratios):.2f}, least {min(ratios):.2f}, "
                  f">= 0.9 at {sum(r >= 0.9 for r in ratios)} of {len(ratios)} shapes")  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {**about, "formula": "2*M*N*K / seconds / 1e9", "processor": processor(), "threads": 1, "date": time.strftime("%F"),
              "rounds": args.rounds, "rows": rows}  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
