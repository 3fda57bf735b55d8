"""What is left to win of the pipeline of four stages on one GPU, by the simulator, from traces that a GPU once gave?

Each trace of `-parts.json` is simulated with what its operations took: with the gradients' norm behind the ranks' meeting and
before it; with what lay in the median between a message and what it kept waiting, and between two instructions of a rank; then
with less of it in turn: a hand-over of its copies alone, no copies either, no norm either. Milliseconds, beside the traced span.

    python benchmarks/pipeline_left.py [--out FILE]
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from common import RESULTS, header, write

import terapipe_c as tp
from terapipe_c.report import resimulated

# Behind the package: gpu_check, which they import, has the sources before what is installed.
from gpu.late import CHUNKS, TOKENS  # isort: skip
from gpu.pipeline import LONG, between_of, chunked, simulated  # isort: skip

SOURCE = "h200-2026-11-26-parts.json"
Traces = list[list[tuple[Any, ...]]]


def traces() -> dict[str, Traces]:
    """Of the program of gpu/late.py, in seconds: [[(op, stage, micro, slice, start, end), ...] of each rank] by name."""
    called = f"{CHUNKS} {[TOKENS] * (LONG // TOKENS)} "
    return {f"{call}: {name}": [[(*row[:4], row[4] * 1e-6, row[5] * 1e-6) for row in rank] for rank in found["trace"]]
            for call, steps in json.loads((RESULTS / SOURCE).read_text())["steps"].items()
            for name, found in steps.items() if name.startswith(called) and "trace" in found}  # fmt: skip


def without(step: Traces, *ops: str) -> Traces:
    """As if these operations took no time."""
    return [[(*row[:5], row[4] if row[0] in ops else row[5]) for row in rank] for rank in step]


def simulations(program: tp.Program, step: Traces) -> dict[str, float]:
    between = between_of(step)
    span, late = between.pop("span_s"), between.pop("late")
    rows = [(rank, *row) for rank, trace in enumerate(step) for row in trace]
    free = between | {"handover_s": 0.0}
    found = {
        "traced": span,
        "norm behind the meeting": resimulated(program, tp.Timeline.from_intervals(rows, program.num_ranks).intervals),
        "norm before it": simulated(program, step, {}),
        "and what lies between": simulated(program, step, between),
        "hand-over of its copies alone": simulated(program, step, free),
        "no copies either": simulated(program, without(step, "SF", "SB"), free),
        "no norm either": simulated(program, without(step, "SF", "SB", "OPT"), free),
    }
    return {name: 1e3 * seconds for name, seconds in found.items()} | {
        "handover_us": 1e6 * between["handover_s"], "between_us": 1e6 * between["between_s"], "late_ms": 1e3 * sum(late.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="result file (default benchmarks/results/pipeline_left.json)")
    options = parser.parse_args()
    print(__doc__)
    program, rows = chunked(CHUNKS, LONG // TOKENS).lower(), []
    for name, step in traces().items():
        rows.append({"trace": name, **simulations(program, step)})
        print(name, *(f"{key:32s} {value:6.2f}" for key, value in rows[-1].items() if key != "trace"), "", sep="\n")
    write("pipeline_left", {**header("what is left to win of a pipeline on one GPU"), "source": SOURCE, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
