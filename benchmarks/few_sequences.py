"""One to eight long sequences: how long is a step by each schedule, by the simulator, each planned by the terapipe planner?

GPTs by first principles (100 TFLOP/s a device, links of 10 us and 100 GB/s), memory enough for all. Schedules of several stages a
rank are asked for with 2, 3 and 4 of them, and the fastest is taken. Milliseconds, and the proven gap of this order's plan.

    python benchmarks/few_sequences.py [--out FILE]
"""

from __future__ import annotations

import argparse
from typing import Any

from common import header, write

import terapipe_c as tp

VOCABULARY = 50257
REQUESTS = [  # layers, width, ranks, sequences, tokens
    (12, 768, 4, 1, 1024), (24, 1024, 8, 1, 2048), (24, 2048, 4, 1, 8192), (24, 2048, 4, 2, 2048), (48, 1600, 8, 2, 1024),
    (96, 12288, 16, 1, 2048), (24, 2048, 8, 4, 4096), (48, 1600, 8, 8, 1024),
]  # fmt: skip
SCHEDULES = {"seq1f1b": (1,), "gpipe": (1,), "zb-h1": (1,), "zb-v": (2,), "hanayo": (2, 4), "interleaved": (2, 3, 4),
             "looped-bfs": (2, 3, 4)}  # fmt: skip


def planned(layers: int, width: int, ranks: int, batch: int, tokens: int) -> dict[str, Any]:
    """By schedule; None where it cannot be."""
    model = tp.GPTConfig(layers, width // 64, width, VOCABULARY, tokens, tie_weights=False)
    cluster = tp.Cluster(num_devices=ranks, devices_per_node=ranks, memory_bytes=1e13, link_latency_s=1e-5, link_bandwidth_Bps=1e11,
                         peak_flops=1e14)  # fmt: skip
    request = dict(batch=batch, seq_len=tokens, costs=tp.CostModel.analytic(model, cluster), stages=ranks, planner="terapipe")
    found: dict[str, Any] = {}
    for schedule, counts in SCHEDULES.items():
        plans = []
        for chunks in counts:
            try:
                plans.append(tp.plan(model, cluster, schedule=schedule, chunks=chunks, **request))
            except ValueError as error:
                assert "multiple of the ranks" in str(error), error
        best = min(plans, key=lambda plan: plan.step_time_s, default=None)
        found[schedule] = best and {"ms": 1e3 * best.step_time_s, "gap": best.gap, "chunks": best.chunks, "slicing": best.slicing}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="result file (default benchmarks/results/few_sequences.json)")
    options = parser.parse_args()
    print(__doc__)
    rows = []
    for request in REQUESTS:
        layers, width, ranks, batch, tokens = request
        rows.append({"layers": layers, "width": width, "ranks": ranks, "sequences": batch, "tokens": tokens, **planned(*request)})
        print(f"{layers} layers of {width}, {ranks} ranks, {batch} x {tokens}:", *(
            f"{name} {one['ms']:.2f} ({100 * one['gap']:.1f} %{', ' + str(one['chunks']) + ' chunks' if one['chunks'] > 1 else ''})"
            for name, one in rows[-1].items() if isinstance(one, dict)), sep="  ", flush=True)  # fmt: skip
    write("few_sequences", {**header("a step of one to eight long sequences by schedule, simulated"), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
