"""What placing halves of layers and weight gradients brings to a pipeline of four stages on one GPU, by the simulator.

Costs are fitted to a step that a GPU gave (`slices of 512, W in gaps` of two results); with them partitions are searched by
`gpu/placing.py`: with weight gradients last or in gaps, by moving single halves from equal stages or with kicks besides; and beside
the seconds found those that the GPU then took. Milliseconds.

    python benchmarks/pipeline_placed.py [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from typing import Any

from common import RESULTS, header, write

import terapipe_c as tp

# Behind the package: gpu_check, which they import, has the sources before what is installed.
from gpu.pipeline import KNOWN, LONG, PLACED, STAGES, chunked  # isort: skip
from gpu.placing import KICKS, Costs, in_gaps, placed  # isort: skip

SOURCES = "h200-2026-11-27-placed.json", "h200-2026-11-27.json"
MODEL = tp.GPTConfig(24, 16, 2048, 50257, LONG, tie_weights=False)


def traces_of(rows: list[list[str]]) -> list[list[tuple[Any, ...]]]:
    """Of gpu/pipeline.py's rows_of: in seconds."""
    found = []
    for rank in rows:
        split = [(*re.split(r"(?<=[A-Z])(?=\d)|\.", name), begin, end) for name, begin, end in map(str.split, rank)]
        found.append([(op, int(stage), 0, int(s), 1e-6 * int(begin), 1e-6 * int(end)) for op, stage, s, begin, end in split])
    return found


def searched(answer: dict[str, Any]) -> list[dict[str, Any]]:
    run = answer["slices of 512, W in gaps"]
    between = {name: statistics.median(one[name] for one in run["between"]) for name in ("handover_s", "between_s")}
    costs, slices = Costs(MODEL, KNOWN, traces_of(run["trace"]), between), 4
    asked = [(f"12 stages, W {where}, {kicks} kicks", program, kicks)
             for where, program in (("last", chunked(3, slices)), ("in gaps", in_gaps(STAGES, 12, slices))) for kicks in (0, KICKS)]
    asked += [(f"{n} stages, W in gaps, {KICKS} kicks", in_gaps(STAGES, n, slices), KICKS) for n in PLACED[1:]]
    rows = []
    for name, program, kicks in asked:
        halves, seconds = placed(MODEL, program.lower(), costs, kicks)
        took = [one["step_s"] for said in ("", ", no graphs", ", as graphs")
                if (one := answer.get(f"slices of 512, {program.num_stages} stages{said}", {})).get("halves") == halves]
        rows.append({"what": name, "halves": halves, "simulated_ms": 1e3 * seconds,
                     "measured_ms": [1e3 * one for one in took if "in gaps" in name]})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="result file (default benchmarks/results/pipeline_placed.json)")
    options = parser.parse_args()
    print(__doc__)
    found = {}
    for source in SOURCES:
        found[source] = searched(json.loads((RESULTS / source).read_text())["questions"]["pipeline"]["answer"])
        print(source, *(f"{row['what']:36s} {row['simulated_ms']:6.2f} {row['halves']} measured "
                        f"{', '.join(f'{ms:.2f}' for ms in row['measured_ms'])}" for row in found[source]), "", sep="\n")
    question = "what placing halves of layers and weight gradients brings to a pipeline on one GPU"
    write("pipeline_placed", {**header(question), "found": found}, options.out)


if __name__ == "__main__":
    main()
