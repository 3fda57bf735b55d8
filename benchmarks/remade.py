"""Does R take what its costs say?

One rank, one stage of a few layers, a sequence in slices of equal lengths: attentions, FFNs or both are made again, all slices at
once, slice by slice, or within whole backwards. What the engine's trace says of R, beside what `tp.profile`, just before, says of
it: by R's own curves, and by the rule that goes by F alone. Engines take turns, round by round; of each instruction's seconds
medians over the rounds are added up. What F took, and was priced at, says how fast the machine was when: "beside F" is R's quotient
over F's.

    python benchmarks/remade.py [--widths 128 256] [--slices 16 64 512] [--length 512] [--rounds 9] [--budget 20] [--out FILE]
"""
import argparse
import statistics
from collections import defaultdict
from typing import Any

import numpy as np
from common import header, write

import terapipe_c as tp
from terapipe_c import _core
from terapipe_c.config import KINDS
from terapipe_c.cost import slicing_arrays
from terapipe_c.engine import RankEngine, gather_bytes, some_params
from terapipe_c.partition import block_counts

WHAT = {"attention": ("attention",), "ffn": ("ffn",), "full": ("attention", "ffn")}
WAYS = {"at once": 1, "slice by slice": 2, "within": 255}     # tp_again of csrc/sched/sched.h


class Engine:
    """One way to make some blocks again, and the seconds of its instructions."""

    def __init__(self, model: tp.GPTConfig, tokens: int, slice_tokens: int, what: str, way: str) -> None:
        self.model, self.slicing = model, [(1, [slice_tokens] * (tokens // slice_tokens))]
        self.stages = [(0, model.num_blocks)]
        self.what = what
        order = tp.schedules.gpipe(1, 1, len(self.slicing[0][1]))
        order = order if way == "within" else order.split(pending=0)
        self.program = order.save_memory(bytes([WAYS[way]]), bytes(1)).lower()
        self.region = _core.Region.create(1, bytes(1), 0, max(64, gather_bytes(model)), False)
        self.engine = RankEngine(model, self.stages, self.slicing, self.program, 0, _core.Comm(self.region, 0, 600.0),
                                 recompute=[block.kind in WHAT[what] for block in model.blocks])
        params = some_params(model)
        moments = {kind: {name: np.zeros_like(array) for name, array in params.items()} for kind in ("exp_avg", "exp_avg_sq")}
        self.engine.load(params, moments)
        self.taken: dict[tuple[str, int], list[float]] = defaultdict(list)

    def run(self, tokens: Any) -> None:
        self.engine.run(tokens, lr=0.0)
        for op, _, _, s, begin, end in self.engine.trace():
            if op in "FR":
                self.taken[op, s].append(end - begin)

    def measured(self, op: str) -> float:
        """A first round finds pages of its own."""
        return sum(statistics.median(seconds[1:]) for (which, _), seconds in self.taken.items() if which == op)

    def priced(self, costs: tp.CostModel) -> float:
        counts = block_counts(self.model, self.stages)
        counts *= np.array([[kind in WHAT[self.what] for kind in KINDS]])
        kept = bytes(2 * flag for flag in self.program.remakes_apart())
        return float(costs.recompute_s(counts, slicing_arrays(self.slicing), kept).sum())


def rows_of(width: int, options: Any) -> list[dict[str, Any]]:
    model = tp.GPTConfig(n_layer=options.layers, n_head=max(2, width // 64), n_embd=width, vocab_size=64,
                         block_size=options.length, tie_weights=False)
    costs = tp.profile(model, seq_len=options.length, ranks=1, budget_s=options.budget)
    rule = tp.CostModel.from_dict({**costs.to_dict(), "remade": {}})
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (1, options.length + 1)).astype(np.int32)
    keys = [(s, what, way) for s in options.slices for what in WHAT for way in WAYS     # FFNs alone are not made again at once
            if (s == options.length if way == "within" else s < options.length or way == "at once")
            and not (what == "ffn" and way == "at once" and s < options.length)]
    engines = {key: Engine(model, options.length, *key) for key in keys}
    for _ in range(options.rounds + 1):
        for engine in engines.values():
            engine.run(tokens)
    rows = []
    for (s, what, way), engine in engines.items():
        forward = float(costs.durations(partition=engine.stages, slicing=engine.slicing)["F"].sum()) / engine.measured("F")
        seconds = engine.measured("R")
        row = {"n_embd": width, "slice": s, "recompute": what, "way": way, "measured_s": seconds, "F priced/measured": forward}
        for name, model_of in (("curves", costs), ("rule", rule)):
            row[name] = engine.priced(model_of) / seconds
            row[f"{name}, beside F"] = row[name] / forward
        rows.append(row)
        print(f"{width:5d} {s:4d} {what:9s} {way:14s} {1e3 * seconds:8.3f} ms  F {forward:5.2f}  R by its curves "
              f"{row['curves']:5.2f}, by the rule {row['rule']:5.2f}; beside F {row['curves, beside F']:5.2f}, "
              f"{row['rule, beside F']:5.2f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512, 768])
    parser.add_argument("--slices", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=20.0)
    parser.add_argument("--out")
    options = parser.parse_args()
    result = header("Does R take what its costs say?")
    result |= {"length": options.length, "layers": options.layers, "rounds": options.rounds, "budget_s": options.budget}
    result["rows"] = [row for width in options.widths for row in rows_of(width, options)]
    result["summary"] = {}
    for name in ("curves", "rule", "curves, beside F", "rule, beside F"):
        for group in ("all", *WAYS):
            off = [abs(row[name] - 1) for row in result["rows"] if group in ("all", row["way"])]
            if off:
                result["summary"][f"{name}; {group}"] = {"median": statistics.median(off), "worst": max(off)}
                print(f"{name}; {group}: off by {statistics.median(off):.1%} in the median, {max(off):.1%} at most")
    write("remade", result, options.out)


if __name__ == "__main__":
    main()
