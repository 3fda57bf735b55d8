"""How long do the slice planners take, and how tight is the one-search bound?

    latency = sum t_i + (K - 1) max t_i        (TeraPipe, eq. 4; forward and backward apart: max f + max b)

Every figure is the median of --repeats calls through Python on one thread, with the least and the greatest beside it;
"optimal" is proven by the search itself. Costs are synthetic, in the shape of one pipeline stage of a large GPT:
g(i) = (p^4 + (q i)^4)^(1/4) + r i^2 seconds, plus a0 + a3 i j for a context of j. "noisy" multiplies g by up to 1.02 at
random, "tiled" rounds i up to 128.

    python benchmarks/planners.py [--repeats 9] [--out FILE]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from common import header, repeat_arguments, timed, write

import terapipe_c as tp
from terapipe_c import planners


class Costs:
    """A stand-in for CostModel: only the tables, so that the planner alone is timed."""

    def __init__(self, kind: str, p: float = 0.9e-3, q: float = 2.1e-6, r: float = 1e-10, a3: float = 2e-10) -> None:
        self.kind, self.p, self.q, self.r, self.a3 = kind, p, q, r, a3
        self.backward: Costs | None = None
        self.cache: dict[tuple[int, int, int], dict[str, Any]] = {}

    def _make(self, seq_len: int, unit: int, batch: int) -> dict[str, Any]:
        key = (seq_len, unit, batch)
        if key not in self.cache:
            x = np.arange(seq_len // unit + 1) * float(unit)
            y = 128 * np.ceil(x / 128) if self.kind == "tiled" else x
            g = (self.p**4 + (self.q * batch * y) ** 4) ** 0.25 + batch * self.r * x * x
            if self.kind == "noisy":
                g = g * np.random.default_rng(0).uniform(1, 1.02, len(g))
            self.cache[key] = {"G0": g, "G1": g + 1e-6, "a2": 0.0, "a3": batch * self.a3 * unit * unit}
        return self.cache[key]

    def slice_cost(self, seq_len: int, granularity: int, phase: str) -> dict[str, Any]:
        source = self.backward if phase == "bwd" and self.backward is not None else self
        return source._make(seq_len, granularity, 1)

    def slice_cost_batched(self, batch: int, seq_len: int, granularity: int) -> list[dict[str, Any]]:
        return [self._make(seq_len, granularity, b) for b in range(1, batch + 1)]


def row(name: str, call: Callable[[], Any], repeats: int, **more: Any) -> dict[str, Any]:
    result, times = timed(call, repeats, warm=True)
    record = {
        "name": name,
        "median_s": statistics.median(times),
        "least_s": times[0],
        "greatest_s": times[-1],
        "latency_s": result.latency_s,
        "optimal": result.optimal,
        "gap": result.gap,
        "searches": result.searches,
        "small_searches": result.small_searches,
        "edges": result.edges,
        "boxes": result.boxes,
        **more,
    }
    print(
        f"{name:42s} {record['median_s'] * 1e3:9.2f} ms [{times[0] * 1e3:.2f} .. {times[-1] * 1e3:.2f}]  latency "
        f"{result.latency_s * 1e3:10.4f} ms  {'optimal' if result.optimal else f'gap {result.gap:.2e}'}  "
        f"{result.searches} + {result.small_searches} searches"
    )
    return record


def unlike_rows(repeats: int) -> list[dict[str, Any]]:
    """Forward and backward that do not go together: a slice that is dear for the one is cheap for the other."""
    rows, units = [], np.arange(2049.0)
    for noise in (0.0, 0.03):
        forward, backward = Costs("smooth", 8e-3, 2e-6, 0.0, 1e-9), Costs("smooth", 1e-3, 4e-5, 2e-9, 1e-8)
        tables, rng = [], np.random.default_rng(4)
        for costs in (forward, backward):
            made = costs._make(2048, 1, 1)
            made["G0"] = made["G0"] * (1 + noise * rng.standard_normal(2049))
            made["G1"] = made["G0"] + 1e-6
            tables.append(np.ascontiguousarray(made["G0"][:, None] + made["a3"] * units[:, None] * units))
        forward.backward = backward
        what = f"unlike{', noisy' if noise else ''}, 2048 tokens by 1, 96 stages"
        rows.append(row(f"{what}, apart",
                        partial(planners.slice_tokens, forward, 96, seq_len=2048, granularity=1, bwd=True), repeats))
        rows.append(row(f"{what}, tables, apart", partial(planners.slice_tokens, tables[0], 96, bwd=tables[1]), repeats))
    return rows


def main() -> None:
    options = repeat_arguments(__doc__, "planners").parse_args()
    print(__doc__)
    about = header("how long the slice planners take, and how tight the one-search bound is")
    rows = []
    for kind in ("smooth", "noisy", "tiled"):
        for tokens, unit, stages in (
            (2048, 8, 48),
            (2048, 1, 48),
            (2048, 1, 96),
            (8192, 8, 40),
            (8192, 1, 40),
            (8192, 1, 512),
        ):
            costs = Costs(kind)
            name = f"{kind} {tokens} tokens by {unit}, {stages} stages"
            record = row(
                name, partial(planners.slice_tokens, costs, stages, seq_len=tokens, granularity=unit), options.repeats
            )
            lengths = planners.slice_tokens(costs, stages, seq_len=tokens, granularity=unit).lengths
            bound, times = timed(
                partial(planners.slice_bound, costs, stages, lengths, seq_len=tokens, granularity=unit), 3, warm=True
            )
            record.update(bound_gap=record["latency_s"] / bound - 1, bound_s=times[1])
            rows.append(record)
    for tokens, unit, stages in ((2048, 8, 48), (2048, 1, 96), (8192, 1, 40)):
        costs = Costs("smooth", 0.3e-3, 0.7e-6, 0.7e-10, 0.7e-10)
        costs.backward = Costs("smooth", 0.6e-3, 1.4e-6, 2e-10, 1.5e-10)
        rows.append(
            row(
                f"apart {tokens} tokens by {unit}, {stages} stages",
                partial(planners.slice_tokens, costs, stages, seq_len=tokens, granularity=unit, bwd=True),
                options.repeats,
            )
        )
    rows += unlike_rows(options.repeats)
    for batch, tokens, unit, stages in ((32, 2048, 8, 48), (32, 2048, 1, 48), (72, 2048, 8, 48), (2, 8192, 1, 40)):
        costs = Costs("smooth")
        rows.append(
            row(
                f"batch {batch}, {tokens} tokens by {unit}, {stages} stages",
                partial(planners.slice_batch_and_tokens, costs, batch, stages, seq_len=tokens, granularity=unit),
                max(3, options.repeats // 3),
            )
        )
    costs, link = Costs("smooth"), 1e-4 + 1e-7 * np.arange(2049.0)
    rows.append(
        row(
            "links beside, 2048 tokens by 1, 96 stages",
            partial(planners.slice_tokens, costs, 96, seq_len=2048, granularity=1, comm=link),
            options.repeats,
        )
    )
    rows.append(
        row(
            "batch 32 in groups of 8, 2048 by 8, 48 stages",
            partial(planners.slice_batch_and_tokens, costs, 32, 48, seq_len=2048, granularity=8, max_in_flight=8),
            max(3, options.repeats // 3),
        )
    )
    rows.append(
        row(
            "smooth 131072 tokens by 16, 64 stages",
            partial(planners.slice_tokens, costs, 64, seq_len=131072, granularity=16),
            1,
        )
    )
    for n in (128, 512):
        table = np.random.default_rng(1).uniform(1, 1.3, (n + 1, n + 1)) * (1 + np.arange(n + 1.0)[:, None] / 8) * 1e-3
        rows.append(row(f"any table, {n} units, 48 stages", partial(planners.slice_tokens, table, 48), options.repeats))
    for n in (512, 2048):
        rng, s, c = np.random.default_rng(3), np.arange(n + 1.0)[:, None] * 2048 / n, np.arange(n + 1.0) * 2048 / n
        for noise in (0.0, 0.1):
            f, b = (np.ascontiguousarray((a + d * s + e * s * c) * rng.uniform(1, 1 + noise, (n + 1, n + 1)))
                    for a, d, e in ((2e-4, 1e-6, 4e-10), (3e-4, 2e-6, 8e-10)))
            what = f"tables of {n} units, {'noisy, ' if noise else ''}96 stages"
            rows.append(row(what, partial(planners.slice_tokens, f, 96), options.repeats))
            rows.append(row(f"{what}, apart", partial(planners.slice_tokens, f, 96, bwd=b), options.repeats))
    model = tp.GPTConfig(n_layer=12, n_head=12, n_embd=768, vocab_size=50257, block_size=8192)
    roofline = tp.CostModel.analytic(model, tp.Cluster.local())
    for tokens in (2048, 8192):
        rows.append(row(f"a roofline of GPT-2, {tokens} tokens by 1, 48 stages",
                        partial(planners.slice_tokens, roofline, 48, seq_len=tokens, granularity=1), options.repeats))
    times_s = np.random.default_rng(2).uniform(1, 2, 1000)
    _, times = timed(lambda: planners.balance(times_s, 48), options.repeats, warm=True)
    print(f"{'balance 1000 blocks on 48 stages':42s} {statistics.median(times) * 1e3:9.3f} ms")
    rows.append(
        {
            "name": "balance 1000 on 48",
            "median_s": statistics.median(times),
            "least_s": times[0],
            "greatest_s": times[-1],
        }
    )
    write("planners", {**about, "repeats": options.repeats, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
