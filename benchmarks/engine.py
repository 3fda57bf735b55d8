"""What does the engine itself take of an instruction, kernels apart?

us an instruction = seconds of a step / instructions of rank 0 in it: every forward and backward of a slice, every send and
receive, the update. The step is sequence 1F1B's, its kernels do nothing (benchmarks/engine.c); order, waits, messages between
ranks (threads), slots and the trace are real. On two ranks each waits for the other at nearly every instruction: latency of
messages is in it.

    python benchmarks/engine.py [--rounds 200] [--out FILE]
"""

from __future__ import annotations

import subprocess
import tempfile

from common import arguments, driver, header, summary, write

LAYOUTS = ((1, 16, 16), (2, 16, 16), (1, 64, 1), (2, 64, 1))  # ranks, micro-batches, slices of each


def main() -> None:
    """Build the driver, time every layout, print the table, write it as JSON."""
    options = arguments(__doc__, rounds=200).parse_args()
    result = header((__doc__ or "").splitlines()[0])
    print((__doc__ or "").split("\n\n")[1], end="\n\n")
    print(f"{'ranks':>5} {'micro-batches':>14} {'slices':>7} {'instructions':>13} {'us each':>9} {'quartiles':>16}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        binary = driver("engine", folder)
        for ranks, micros, slices in LAYOUTS:
            words = [binary, *map(str, (ranks, micros, slices, options.rounds + 5))]
            lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
            count, seconds = int(lines[0]), [float(word) for word in lines[6:]]
            each = summary([1e6 * s / count for s in seconds])
            low, high = each["quartiles"]
            print(f"{ranks:>5} {micros:>14} {slices:>7} {count:>13} {each['median']:>9.3f} {low:>8.3f} {high:>7.3f}", flush=True)
            rows.append({"ranks": ranks, "micro_batches": micros, "slices": slices, "instructions": count, "us": each})
    write("engine", result | {"rounds": options.rounds, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
