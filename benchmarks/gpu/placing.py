"""Which halves of layers to lay on which stage, found by the simulator from what halves of layers took.

One sequence in slices; stages lie on the ranks in turn. A half is an attention or an FFN; the embedding is with the first stage's
halves and the head with the last one's, which may have none. Few halves on the first stages fill the pipeline sooner, a head by
itself keeps its rank free for what others wait for, and weight gradients stand where ranks would wait (Program.split; what that
brings: benchmarks/pipeline_placed.py).
"""

import itertools
import random

import numpy as np

KICKS = 6  # twice as many found nothing better in 12 and 14 stages


def edges_of(model, halves):
    """The partition into blocks."""
    edges = [0, *(1 + np.cumsum(halves[:-1])).astype(int), model.num_blocks]
    return [(int(a), int(b)) for a, b in itertools.pairwise(edges)]


def kinds(halves):
    """[stages, 4]: of each stage the attentions, the FFNs, the heads, and 1."""
    edges = np.cumsum([0, *halves])
    of = [((b + 1) // 2 - (a + 1) // 2, b // 2 - a // 2, b == edges[-1] and k == len(halves) - 1, 1)
          for k, (a, b) in enumerate(itertools.pairwise(edges))]  # fmt: skip
    return np.array(of, float)


def floats_of_kinds(model):
    """Parameters of an attention's products, an FFN's and the head's, as kinds() has them."""
    width = model.n_embd
    return np.array([4 * width**2, 8 * width**2, model.vocab_size * width, 0.0])


def looped(ranks, stages, slices):
    """All forwards, then all backwards of one sequence, rank r with stages r, r + ranks, ...: tp.schedules.looped_bfs, but for any
    number of stages."""
    import terapipe_c as tp

    lines = []
    for rank in range(ranks):
        mine = range(rank, stages, ranks)
        lines.append([f"{stage}F0.{s}" for stage in mine for s in range(slices)]
                     + [f"{stage}B0.{s}" for stage in mine[::-1] for s in range(slices - 1, -1, -1)])  # fmt: skip
    return tp.Program.parse("\n".join(map(" ".join, lines)))


def by_parameters(model, ranks, halves, slices):
    """The looped program, weight gradients laid as if an operation took as long as its stage has parameters in products: before
    it is known what they take."""
    floats = kinds(halves) @ floats_of_kinds(model)
    return looped(ranks, len(halves), slices).split(dict.fromkeys("FIW", floats), pending=slices)


def fit(rows):
    """Least squares of [(what it is made of, seconds)]; what is far off, as an operation that stopped within, is left out."""
    rows = np.array(rows)
    keep = np.full(len(rows), True)
    for _ in range(3):
        parts, *_ = np.linalg.lstsq(rows[keep, :-1], rows[keep, -1], rcond=None)
        off = np.abs(rows[:, :-1] @ parts - rows[:, -1])
        keep = off <= 3 * np.median(off) + 1e-9
    return parts


class Costs:
    """What attentions, FFNs, the head and an operation by itself took in a step of stages of these halves."""

    def __init__(self, model, halves, traces, between):
        self.between = {name: max(0.0, between[name]) for name in ("handover_s", "between_s")}
        of, took = kinds(halves), {}
        for op, stage, _, s, start, end in itertools.chain(*traces):
            if op in "FIW":
                key = op, 0 if op == "W" else s, stage
                took[key] = took.get(key, 0.0) + end - start
        self.rates = {op: np.array([fit([(*of[k], took[op, s, k]) for k in range(len(halves))])
                                    for s in sorted({s for name, s, _ in took if name == op})]) for op in "FIW"}
        self.send_s = float(np.median([row[5] - row[4] for row in itertools.chain(*traces) if row[0] in ("SF", "SB")]))
        # The norm reads every gradient once. Only the first rank has others to complete before.
        self.floats, self.slices = floats_of_kinds(model), len(self.rates["F"])
        ranks = len(traces)
        opt = [sum(row[5] - row[4] for row in trace if row[0] == "OPT") for trace in traces]
        each = [sum(self.floats_of(halves)[rank::ranks]) for rank in range(ranks)]
        self.norm_rate = float(np.median([seconds / floats for seconds, floats in zip(opt[1:], each[1:], strict=True)]))
        self.first_s = max(0.0, opt[0] - self.norm_rate * each[0])

    def floats_of(self, halves):
        found = kinds(halves) @ self.floats
        found[0] += self.floats[2]  # the embedding
        return found

    def tables(self, halves):
        of, between_s = kinds(halves), self.between["between_s"]
        found = {op: np.maximum(of @ rate.T, 0.0) for op, rate in self.rates.items()}
        found["F"] += between_s
        found["I"] += between_s
        found["W"] = np.pad(found["W"], ((0, 0), (0, self.slices - 1)))
        norm = np.zeros_like(found["F"])
        norm[:, 0] = self.norm_rate * self.floats_of(halves)
        norm[0, 0] += self.first_s
        return found | {"OPT": norm, "OPT.norm": norm, "SF": self.send_s + between_s, "SB": self.send_s + between_s}


    def program(self, compute, halves):
        """The looped program with weight gradients where ranks would wait."""
        tables = self.tables(halves)
        return compute.split({op: tables[op] for op in "FIW"}, compute.num_stages, comm_s=self.between["handover_s"])

    def seconds(self, program, halves):
        return float(program.lower().makespan(self.tables(halves), comm_s=self.between["handover_s"]))


def placed(model, stages, program_of, costs, kicks=KICKS):
    """(halves of each stage, seconds by the simulator): moved from stage to stage while that helps, then kicked and moved again.
    program_of: the program of these halves."""
    dice, pairs = random.Random(stages), list(itertools.permutations(range(stages), 2))

    def seconds(halves):
        return costs.seconds(program_of(halves), halves)

    def move(halves, a, b):
        return [n - (k == a) + (k == b) for k, n in enumerate(halves)] if halves[a] > (a < stages - 1) else halves

    def descend(halves):
        best, better = seconds(halves), True
        while better:
            better = False
            dice.shuffle(pairs)
            for a, b in pairs:
                moved = move(halves, a, b)
                if moved is not halves and (now := seconds(moved)) < best - 1e-9:
                    best, halves, better = now, moved, True
        return best, halves

    half = 2 * model.n_layer
    best = descend([half * (k + 1) // stages - half * k // stages for k in range(stages)])
    for _ in range(kicks):
        halves = best[1]
        for _ in range(3):
            halves = move(halves, *dice.sample(range(stages), 2))
        best = min(best, descend(halves))
    return best[1], best[0]
