"""How many operations a second does the simulator time: a first pass through Python, and the same order evaluated again?

A first pass checks the program, finds an order, splits the idle time by its causes and finds the bound. Again: ``Program.makespan``
of many cost tables, less that of one. Medians of --repeats calls on one thread, with the fastest beside them.

    python benchmarks/simulator.py [--repeats 9] [--out FILE]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from common import header, repeat_arguments, timed, write

from terapipe_c import Program, schedules

RANKS = 64
COST = {"F": 1.0, "B": 2.0}
SWAPS = {**COST, "SO": 0.2, "SI": 0.2}
GUESTS = {**COST, "SE": 0.1, "RE": 0.1, "SL": 0.1, "RL": 0.1}


def seconds(call: Callable[[], Any], repeats: int) -> list[float]:
    return timed(call, repeats)[1]


def row(name: str, operations: int, times: list[float]) -> dict[str, Any]:
    median, best = (operations / t / 1e6 for t in (statistics.median(times), times[0]))
    print(f"{name:60s} {operations / 1e6:5.1f} M operations: median {median:6.1f}, best {best:6.1f} M/s")
    return {"name": name, "operations": operations, "median_Mps": median, "best_Mps": best}


def cases() -> Iterator[tuple[str, Program, dict[str, Any], float]]:
    """Names, programs, costs, seconds of a message."""
    many = schedules.one_f_one_b(RANKS, 16384)
    whole, half = bytes(RANKS), bytes([1] * (RANKS // 2) + [0] * (RANKS // 2))
    slices = schedules.seq1f1b(RANKS, 1024, 16)
    grown = 1.0 + 0.01 * np.tile(np.arange(16.0), (RANKS, 1024))
    yield "1F1B, 64 ranks, 16384 micro-batches", many, COST, 0.0
    yield "sequence 1F1B, 64 ranks, 1024 micro-batches of 16 slices", slices, COST, 0.0
    yield "sequence 1F1B, 64 ranks, 1024 micro-batches of 64 slices", schedules.seq1f1b(RANKS, 1024, 64), COST, 0.0
    yield "1F1B, messages", many, COST, 0.1
    yield "1F1B, messages that take time of the ranks", many, {**COST, "SF": 0.1, "RF": 0.1, "SB": 0.1, "RB": 0.1}, 0.1
    yield "16 slices, each longer than the one before, messages", slices, {"F": grown, "B": 2.0 * grown}, 0.1
    yield "sliced 1F1B (32 in halves), messages", schedules.sliced_1f1b(RANKS, 16384, 32), COST, 0.1
    yield "BPipe", schedules.bpipe(RANKS, 16384), COST, 0.0
    yield "BPipe, messages", schedules.bpipe(RANKS, 16384), GUESTS, 0.1
    yield "half of the ranks swap, messages", many.save_memory(whole, half), SWAPS, 0.1
    yield "the same beside the work", many.save_memory(whole, half, 1, True), SWAPS, 0.1
    yield "all recompute, messages", many.save_memory(bytes([1] * RANKS), whole), {**COST, "R": 1.0}, 0.1
    yield "ZB-H1, messages", schedules.zb_h1(RANKS, 16384), {"F": 1.0, "I": 1.0, "W": 1.0}, 0.1
    yield "PipeDream, messages", schedules.pipedream(RANKS, 16384), {**COST, "U": 0.1}, 0.1


def main() -> None:
    options = repeat_arguments(__doc__, "simulator").parse_args()
    print(__doc__)
    about, rows = header("how many operations a second the simulator times"), []
    for name, program, cost, comm_s in cases():
        rows.append(row(name, len(program), seconds(partial(program.simulate, cost, comm_s), options.repeats)))
        if comm_s > 0.0:
            one = statistics.median(seconds(partial(program.makespan, [cost], comm_s=comm_s), options.repeats))
            more = seconds(partial(program.makespan, [cost] * 21, comm_s=comm_s), options.repeats)
            rows.append(row("    again", len(program), [(t - one) / 20 for t in more]) | {"name": f"{name}: again"})
    write("simulator", {**about, "repeats": options.repeats, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
