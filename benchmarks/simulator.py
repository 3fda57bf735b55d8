"""How many operations a second does the simulator time: a first pass through Python, and the same order evaluated again?

A first pass checks the program, finds an order, and splits the idle time by its causes; where messages take time that is a
second pass. Again: ``Program.makespan`` of many cost tables, less that of one. Medians of --repeats calls on one thread, with
the fastest beside them.

    python benchmarks/simulator.py [--repeats 9] [--out FILE]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from common import header, repeat_arguments, timed, write

from terapipe_c import schedules

COST = {"F": 1.0, "B": 2.0}


def seconds(call: Callable[[], Any], repeats: int) -> list[float]:
    return timed(call, repeats)[1]


def row(name: str, operations: int, times: list[float]) -> dict[str, Any]:
    median, best = (operations / t / 1e6 for t in (statistics.median(times), times[0]))
    print(f"{name:60s} {operations / 1e6:5.1f} M operations: median {median:6.1f}, best {best:6.1f} M/s")
    return {"name": name, "operations": operations, "median_Mps": median, "best_Mps": best}


def main() -> None:
    options = repeat_arguments(__doc__, "simulator").parse_args()
    print(__doc__)
    about, rows = header("how many operations a second the simulator times"), []
    programs = {
        "1F1B, 64 ranks, 16384 micro-batches": schedules.one_f_one_b(64, 16384),
        "sequence 1F1B, 64 ranks, 1024 micro-batches of 16 slices": schedules.seq1f1b(64, 1024, 16),
        "sequence 1F1B, 64 ranks, 1024 micro-batches of 64 slices": schedules.seq1f1b(64, 1024, 64),
    }
    for name, program in programs.items():
        rows.append(row(name, len(program), seconds(partial(program.simulate, COST), options.repeats)))
    first = programs["1F1B, 64 ranks, 16384 micro-batches"]
    rows.append(row("the first, messages of 0.1 s", len(first), seconds(lambda: first.simulate(COST, 0.1), options.repeats)))
    one = statistics.median(seconds(lambda: first.makespan([COST], comm_s=0.1), options.repeats))
    again = [(t - one) / 20 for t in seconds(lambda: first.makespan([COST] * 21, comm_s=0.1), options.repeats)]
    rows.append(row("the same again", len(first), again))
    write("simulator", {**about, "repeats": options.repeats, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
