"""Which weight gradients wait, and where they go: ``Program.split`` against all its ten fillings, made one by one."""

import random

import numpy as np
import pytest
from sched_oracle import read

import terapipe_c as tp
from terapipe_c import schedules

TICKS, SLIGHT = 2.0**40, 1 - 1e-9  # csrc/sched/split.c


class Filling:
    """One list scheduling: each rank decides as soon as it is known how long it waits."""

    def __init__(self, program, seconds, pending, threshold):
        self.lists, self.home, self.slices = read(str(program)), program.rank_of, program.slices
        self.offset = np.cumsum([0, *self.slices])
        self.stages, self.pending, self.threshold = program.num_stages, pending, threshold
        total = sum(float(seconds[op].sum()) for op in "FIW") + float(seconds["comm"].sum())
        self.ticks = {op: np.rint(table * (TICKS / total)) for op, table in seconds.items()}
        self.ready, self.clock = {}, [0.0] * len(self.lists)
        self.inputs = {v: [] for v in range(self.stages)}
        self.weights = {v: [] for v in range(self.stages)}
        self.out, self.at = [[] for _ in self.lists], [0] * len(self.lists)
        while any([self.decide(rank) for rank in range(len(self.lists))]):
            pass
        assert all(at == len(line) for at, line in zip(self.at, self.lists, strict=True))

    def text(self):
        return "\n".join(" ".join(f"{v}{op}{q}.{s}" for v, op, q, s in line) for line in self.out) + "\n"

    def cost(self, op, v, q, s):
        return float(self.ticks[op][v, self.offset[q] + s])

    def do(self, rank, op, v, q, s):
        self.clock[rank] += self.cost(op, v, q, s)
        self.out[rank].append((v, op, q, s))

    def weigh(self, rank, v):
        q, s = self.inputs[v][len(self.weights[v])]
        self.weights[v].append((q, s))
        self.do(rank, "W", v, q, s)
        return True

    def open_micros(self, v):
        begun = {q for q, _ in self.inputs[v]}
        return sum(1 for q in begun if sum(q == other for other, _ in self.weights[v]) < self.slices[q])

    def decide(self, rank):
        waiting = {v: len(self.inputs[v]) - len(self.weights[v]) for v in range(self.stages) if self.home[v] == rank}
        full = max(waiting, key=lambda v: (waiting[v], -v)) if any(waiting.values()) else None
        if self.at[rank] == len(self.lists[rank]):
            return full is not None and self.weigh(rank, full)
        v, op, q, s, _ = self.lists[rank][self.at[rank]]
        if full is not None and self.threshold is None:
            return self.weigh(rank, full)
        if op == "B" and s == self.slices[q] - 1 and self.open_micros(v) >= self.pending and waiting[v]:
            return self.weigh(rank, v)
        maker = v - 1 if op == "F" else v + 1
        wait = copy = 0.0
        if 0 <= maker < self.stages:
            if (op, maker, q, s) not in self.ready:
                return False
            wait = self.ready[op, maker, q, s] - self.clock[rank]
            if self.home[maker] != rank:
                copy = self.cost("R" + op, v, q, s)
        if wait > 0 and full is not None:
            first = self.inputs[full][len(self.weights[full])]
            if wait >= self.threshold * self.cost("W", full, *first):
                return self.weigh(rank, full)
        self.clock[rank] += max(wait, 0.0) + copy
        self.do(rank, "I" if op == "B" else op, v, q, s)
        self.at[rank] += 1
        if op == "B":
            self.inputs[v].append((q, s))
        reader = v + 1 if op == "F" else v - 1
        if 0 <= reader < self.stages:
            far = self.home[reader] != rank
            if far:
                self.clock[rank] += self.cost("S" + op, v, q, s)
            self.ready[op, v, q, s] = self.clock[rank] + (self.cost("comm", v, q, s) if far else 0.0)
        return True


def best_filling(program, seconds, pending):
    """The first of ten that none beats."""
    best, least = None, float("inf")
    for threshold in [*(eighths / 8 for eighths in range(9)), None] if pending else [None]:
        text = Filling(program, seconds, pending, threshold).text()
        took = tp.Program.parse(text).makespan(seconds)
        if best is None or took < least * SLIGHT:
            best, least = text, took
    return best


def programs(rng):
    ranks, micros, slices = rng.randint(1, 5), rng.randint(1, 6), rng.randint(1, 3)
    uneven = [rng.randint(1, 3) for _ in range(micros)]
    return rng.choice([
        lambda: schedules.gpipe(ranks, micros, uneven),
        lambda: schedules.one_f_one_b(ranks, micros, uneven),
        lambda: schedules.one_f_one_b(ranks, micros, slices),
        lambda: schedules.seq1f1b(ranks, micros, slices),
        lambda: schedules.interleaved(ranks, ranks * rng.randint(1, 3), 2, slices),
    ])()  # fmt: skip


@pytest.mark.parametrize("grain", [0, 1, 4])
def test_split_is_the_best_of_all_fillings(grain: int) -> None:
    """Most of them are never finished, or not begun: the answer is as if they were. grain: whole numbers of parts, so that many
    programs take equally long."""
    rng, compared, kinds = random.Random(grain), 0, set()
    for seed in range(60):
        program, random_s = programs(rng), np.random.default_rng(seed)
        shape = program.num_stages, sum(program.slices)

        def table(scale, shape=shape, random_s=random_s):
            part = random_s.random(shape)
            return scale * (np.floor(part * grain) + 1 if grain else part + 0.01)

        seconds = {"F": table(1.0), "I": table(1.0), "W": table(rng.choice([0.1, 1.0, 2.0]))}
        seconds["comm"] = table(rng.choice([0.01, 1.0]))
        copies = rng.choice([0.0, 0.1])
        seconds |= {op: copies * table(1.0) for op in ("SF", "RF", "SB", "RB")}
        for pending in (0, 1, 2, 4):
            found = str(program.split(seconds, pending=pending))
            assert found == best_filling(program, seconds, pending), (seed, pending, str(program))
            compared += 1
            kinds.add(found == str(program.split(seconds, pending=0)))
    assert compared == 240 and kinds == {False, True}


def test_a_large_program_is_split_by_fewer_fillings() -> None:
    """Which still are no worse than W at once, and have every W, in order."""
    program = schedules.one_f_one_b(4, 1600, 4)
    rng = np.random.default_rng(0)
    seconds = {op: rng.random((4, 6400)) * scale for op, scale in (("F", 1.0), ("I", 1.0), ("W", 1.5), ("comm", 0.5))}
    assert sum(len(program.instructions(rank)) for rank in range(4)) > 50_000
    split, at_once = (program.split(seconds, pending=pending) for pending in (2, 0))
    assert split.makespan(seconds) < at_once.makespan(seconds)
    for rank in range(4):
        for op in "FIW":
            mine, its = ([(i["micro"], i["slice"]) for i in p.instructions(rank) if i["op"] == schedules.OPS.index(op)]
                         for p in (split, at_once))
            assert mine == its
