"""What placing halves of layers and weight gradients brings to a pipeline of four stages on one GPU, by the simulator.

Costs are fitted to a step that a GPU gave (`slices of 512, W in gaps` of some results); with them partitions are searched by
`gpu/placing.py`: with weight gradients last, behind the first input gradient of the rank's next stage, or where ranks would wait
(Program.split); by moving single halves from equal stages or with kicks besides. Beside the seconds found stand those that the GPU
then took, where it ran that. Milliseconds.

    python benchmarks/pipeline_placed.py [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from functools import partial
from typing import Any

from common import RESULTS, header, write

import terapipe_c as tp

# Behind the package: gpu_check, which they import, has the sources before what is installed.
from gpu.pipeline import KNOWN, LONG, STAGES, chunked  # isort: skip
from gpu.placing import KICKS, Costs, looped, placed  # isort: skip

STAGE_COUNTS = 12, 13, 14
BEHIND, IN_WAITS = "behind the first I", "in waits"
SOURCES = {  # and what they ran
    "h200-2026-11-27-placed.json": BEHIND, "h200-2026-11-27.json": BEHIND, "h200-2026-11-27-split.json": IN_WAITS,
    "h200-2026-11-27-split-again.json": IN_WAITS, "h100-80gb-hbm3-2026-11-27.json": IN_WAITS,
}  # fmt: skip
MODEL = tp.GPTConfig(24, 16, 2048, 50257, LONG, tie_weights=False)


def behind_first(ranks: int, stages: int, slices: int) -> tp.Program:
    """As looped(), a stage's weight gradients behind the first input gradient of the rank's next stage, which others wait for."""
    lines = []
    for rank in range(ranks):
        mine = range(rank, stages, ranks)
        line, weights = [f"{stage}F0.{s}" for stage in mine for s in range(slices)], list[str]()
        for stage in mine[::-1]:
            first, *others = [f"{stage}I0.{s}" for s in range(slices - 1, -1, -1)]
            line += [first, *weights, *others]
            weights = [f"{stage}W0.{s}" for s in range(slices - 1, -1, -1)]
        lines.append(" ".join(line + weights))
    return tp.Program.parse("\n".join(lines))


def traces_of(rows: list[list[str]]) -> list[list[tuple[Any, ...]]]:
    """Of gpu/pipeline.py's rows_of: in seconds."""
    found = []
    for rank in rows:
        split = [(*re.split(r"(?<=[A-Z])(?=\d)|\.", name), begin, end) for name, begin, end in map(str.split, rank)]
        found.append([(op, int(stage), 0, int(s), 1e-6 * int(begin), 1e-6 * int(end)) for op, stage, s, begin, end in split])
    return found


def searched(answer: dict[str, Any], ran: str) -> list[dict[str, Any]]:
    run = answer["slices of 512, W in gaps"]
    between = {name: statistics.median(one[name] for one in run["between"]) for name in ("handover_s", "between_s")}
    costs, slices = Costs(MODEL, KNOWN, traces_of(run["trace"]), between), 4
    last, behind = chunked(3, slices), {n: behind_first(STAGES, n, slices) for n in STAGE_COUNTS}
    asked = [(12, "last", lambda _: last, kicks) for kicks in (0, KICKS)]
    asked += [(n, BEHIND, lambda _, n=n: behind[n], kicks) for n in STAGE_COUNTS for kicks in ((0, KICKS) if n == 12 else (KICKS,))]
    asked += [(n, IN_WAITS, partial(costs.program, looped(STAGES, n, slices)), kicks)
              for n in STAGE_COUNTS for kicks in ((0, KICKS) if n == 12 else (KICKS,))]  # fmt: skip
    rows = []
    for stages, where, program_of, kicks in asked:
        halves, seconds = placed(MODEL, stages, program_of, costs, kicks)
        took = [one["step_s"] for said in ("", ", no graphs", ", as graphs")
                if (one := answer.get(f"slices of 512, {stages} stages{said}", {})).get("halves") == halves]
        rows.append({"what": f"{stages} stages, W {where}, {kicks} kicks", "halves": halves, "simulated_ms": 1e3 * seconds,
                     "measured_ms": [1e3 * one for one in took if where == ran]})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="result file (default benchmarks/results/pipeline_placed.json)")
    options = parser.parse_args()
    print(__doc__)
    found = {}
    for source, ran in SOURCES.items():
        found[source] = searched(json.loads((RESULTS / source).read_text())["questions"]["pipeline"]["answer"], ran)
        print(source, *(f"{row['what']:46s} {row['simulated_ms']:6.2f} {row['halves']} measured "
                        f"{', '.join(f'{ms:.2f}' for ms in row['measured_ms'])}" for row in found[source]), "", sep="\n")
    question = "what placing halves of layers and weight gradients brings to a pipeline on one GPU"
    write("pipeline_placed", {**header(question), "found": found}, options.out)


if __name__ == "__main__":
    main()
