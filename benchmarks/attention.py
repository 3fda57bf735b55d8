"""How close does attention come to our own matrix products, one thread, sliced and whole?

Causal attention has P = H*T*(T+1)/2 (query, key) pairs however it is sliced. Forward is two products, 4*D*P flops.
Backward needs five, 10*D*P: a slice adds to the dK, dV of all keys before it what its queries give. Softmax, packing and
masked parts of tiles count as nothing. Beside them, in the same rounds: a [1024, 768] x [768, 768] product. Times are
processor time; the columns are medians over the rounds, the percentages of the product's median; the fastest are in the JSON.

    python benchmarks/attention.py [--isa avx2] [--shapes 12x64x1024x256 ...]
"""

import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from common import arguments, driver, header, write

from terapipe_c import _core

SHAPES = [f"12x64x{t}x{s}" for t in (1024, 2048) for s in (t, 512, 256, 128)] + [
    "12x64x1024x64", "12x64x1024x32", "12x64x1024x8", "6x128x1024x1024", "6x128x1024x256", "6x128x1024x128",
]  # fmt: skip


def measure(binary: Path, isa: str, shape: str, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    h, d, t, s = map(int, shape.split("x"))
    run = subprocess.run([binary, isa, *map(str, (h, d, t, s, rounds))], capture_output=True, text=True, check=True)
    times = [[float(word) for word in line.split()] for line in run.stdout.splitlines()]
    pairs = h * t * (t + 1) // 2
    flops = {"product": 2 * 1024 * 768 * 768, "forward": 4 * d * pairs, "backward": 10 * d * pairs}
    columns = dict(zip(("product", "forward", "backward"), zip(*times, strict=True), strict=True))
    return {
        "heads": h, "head_dim": d, "tokens": t, "slice": s, "flops": flops,
        "gflops": {name: flops[name] / statistics.median(seconds) / 1e9 for name, seconds in columns.items()},
        "gflops_fastest": {name: flops[name] / min(seconds) / 1e9 for name, seconds in columns.items()},
        "seconds": {name: columns[name] for name in ("product", "forward", "backward")},
    }  # fmt: skip


def main() -> None:
    """Build the driver, time every shape, print the table, write it as JSON."""
    parser = arguments(__doc__, rounds=9)
    parser.add_argument("--isa", default=_core.Kernels(None).isa, help="amx, avx512, avx2 or portable; the best one here if absent")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="HxDxTxS", help="heads x head size x tokens x slice")
    options = parser.parse_args()
    result = header((__doc__ or "").splitlines()[0])
    print((__doc__ or "").split("\n\n")[1], end="\n\n")
    print(f"{'H':>3} {'D':>4} {'T':>5} {'S':>5} {'product':>8} {'forward':>14} {'backward':>14}   GFLOP/s")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        binary = driver("attention", folder)
        for shape in options.shapes:
            row = measure(binary, options.isa, shape, options.rounds)
            rate = row["gflops"]
            cells = " ".join(f"{rate[name]:>7.1f} ({rate[name] / rate['product']:>4.0%})"
                             for name in ("forward", "backward"))  # fmt: skip
            print(f"{row['heads']:>3} {row['head_dim']:>4} {row['tokens']:>5} {row['slice']:>5} {rate['product']:>8.1f} {cells}",
                  flush=True)  # fmt: skip
            rows.append(row)
    write("attention", result | {"isa": options.isa, "threads": 1, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
