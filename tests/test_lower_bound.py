"""``Timeline.lower_bound_s`` against the fastest of all legal orders, found by branch and bound over active schedules that knows
nothing of csrc/sched; and closed forms."""

import re

import numpy as np
import pytest
from sched_oracle import read

from terapipe_c import Program, schedules


class Orders:
    """All orders of a program's operations that keep data dependencies and the order of slices: F (with its RF), B, I (with RB), W,
    R, and SF and SB, where they take time, as work that may stand anywhere later."""

    def __init__(self, program, cost):
        self.program, self.cost, self.home = program, cost, program.rank_of
        words = {word[:4] for rank in read(str(program)) for word in rank}
        offset = np.cumsum([0, *program.slices])
        self.again = {(v, offset[q] + s) for v, op, q, s in words if op == "R"}
        self.back = "I" if any(op == "I" for _, op, *_ in words) else "B"
        self.each = program.num_stages // program.copies
        self.work, self.before, self.after = {}, {}, {}
        for q, count in enumerate(program.slices):
            first = q // (len(program.slices) // program.copies) * self.each
            for v in range(first, first + self.each):
                for s in range(count):
                    self.add_slice(v, v > first, v < first + self.each - 1, offset[q] + s, s > 0, s < count - 1)
        for key, before in self.before.items():
            for other, lag in before:
                self.after[other].append((key, lag))
        self.tail = {}
        for key in self.work:
            self.rest(key)

    def rest(self, key):
        """From its start to the end of the longest chain that it leads to."""
        if key not in self.tail:
            self.tail[key] = self.work[key] + max((lag + self.rest(other) for other, lag in self.after[key]), default=0.0)
        return self.tail[key]

    def seconds(self, name, v, unit):
        return float(self.cost[name][v, unit]) if name in self.cost else 0.0

    def add(self, op, v, unit, seconds, *before):
        key = op, v, unit
        self.work[key], self.after[key], self.before[key] = seconds, [], [one for one in before if one]

    def add_slice(self, v, has_below, has_above, u, has_left, has_right):
        below = has_below and self.home[v - 1] != self.home[v]
        above = has_above and self.home[v + 1] != self.home[v]
        back, again, lag_back = self.back, (v, u) in self.again, "comm.back" if "comm.back" in self.cost else "comm"
        self.add("F", v, u, self.seconds("F", v, u) + below * self.seconds("RF", v, u),
                 has_below and (("SF" if below else "F", v - 1, u), below and self.seconds("comm", v - 1, u)),
                 has_left and (("F", v, u - 1), 0.0))  # fmt: skip
        if again:
            self.add("R", v, u, self.seconds("R", v, u), (("F", v, u), 0.0))
        self.add(back, v, u, self.seconds(back, v, u) + above * self.seconds("RB", v, u), (("R" if again else "F", v, u), 0.0),
                 has_above and (("SB" if above else back, v + 1, u), above and self.seconds(lag_back, v + 1, u)),
                 has_right and ((back, v, u + 1), 0.0))  # fmt: skip
        if above:
            self.add("SF", v, u, self.seconds("SF", v, u), (("F", v, u), 0.0))
        if below:
            self.add("SB", v, u, self.seconds("SB", v, u), ((back, v, u), 0.0))
        if back == "I":
            self.add("W", v, u, self.seconds("W", v, u), (("I", v, u), 0.0), has_right and (("W", v, u + 1), 0.0))

    def step_s(self, clock):
        """With AR, whose two ends meet, and OPT, whose first waits until all have measured their gradients."""
        words = re.findall(r"(\d+)(AR|OPT)0\.0", str(self.program))
        ends = [(int(v), op, self.home[int(v)]) for v, op in words]
        met = max((clock[rank] for _, op, rank in ends if op == "AR"), default=0.0)
        clock, norms, updates = list(clock), [0.0] * len(clock), [0.0] * len(clock)
        for v, op, rank in ends:
            if op == "AR":
                clock[rank] = max(clock[rank], met) + self.seconds("AR", v, 0)
            else:
                norms[rank] += self.seconds("OPT.norm", v, 0)
                updates[rank] += self.seconds("OPT", v, 0)
        meet = max(map(sum, zip(clock, norms, strict=True)))
        return meet + max(update - norm for update, norm in zip(updates, norms, strict=True))

    def fastest(self, most):
        """None: there are too many to look at. (Giffler and Thompson's active schedules: one of them is fastest.)"""
        ranks, best, looked = self.program.num_ranks, np.inf, 0
        missing, ends = {key: len(before) for key, before in self.before.items()}, {}

        def place(ready, clock, left):
            nonlocal best, looked
            looked += 1
            if not ready:
                best = min(best, self.step_s(clock))
            starts = {key: max(when, clock[self.home[key[1]]]) for key, when in ready.items()}
            below = max([starts[key] + self.tail[key] for key in ready] + [c + x for c, x in zip(clock, left, strict=True)])
            if not ready or below >= best or looked > most:
                return
            end, _, quickest = min((starts[key] + self.work[key], -self.tail[key], key) for key in ready)
            rank = self.home[quickest[1]]
            mine = [key for key in ready if self.home[key[1]] == rank and (starts[key] < end or key == quickest)]
            for key in sorted(mine, key=lambda key: (-self.tail[key], starts[key])):
                ends[key] = done = starts[key] + self.work[key]
                later = {other: when for other, when in ready.items() if other != key}
                for other, _ in self.after[key]:
                    missing[other] -= 1
                    if missing[other] == 0:
                        later[other] = max(ends[one] + lag for one, lag in self.before[other])
                place(later, [done if r == rank else c for r, c in enumerate(clock)],
                      [x - self.work[key] if r == rank else x for r, x in enumerate(left)])  # fmt: skip
                for other, _ in self.after[key]:
                    missing[other] += 1

        work = [sum(s for key, s in self.work.items() if self.home[key[1]] == rank) for rank in range(ranks)]
        place({key: 0.0 for key, before in self.before.items() if not before}, [0.0] * ranks, work)
        return None if looked > most else best


def any_placement(rng, ranks, slices, stages, split):
    """Stages wherever it falls, one micro-batch behind another."""
    home = [*range(ranks), *rng.integers(0, ranks, stages - ranks)]
    lists = [[] for _ in range(ranks)]
    for q, count in enumerate(slices):
        for v in range(stages):
            lists[home[v]] += [f"{v}F{q}.{s}" for s in range(count)]
        for v in reversed(range(stages)):
            for s in reversed(range(count)):
                lists[home[v]] += [f"{v}I{q}.{s}", f"{v}W{q}.{s}"] if split else [f"{v}B{q}.{s}"]
    return Program.parse("\n".join(map(" ".join, lists)) + "\n")


def tiny(rng, kind, split):
    ranks = int(rng.integers(1, 4))
    slices = [int(n) for n in rng.integers(1, 3, rng.integers(1, 4))]
    if kind == "chimera":
        program = schedules.chimera(2, 2)
        return program.split({"F": 1.0, "I": 1.0, "W": 1.0}) if split else program
    program = any_placement(rng, ranks, slices, ranks + int(rng.integers(0, 3)), split)
    if kind == "again":
        stages = program.num_stages
        program = program.save_memory(bytes(int(x) for x in rng.integers(0, 3, stages)), bytes(stages))
    return program


def costs(rng, program, kind):
    shape = program.num_stages, sum(program.slices)
    cost = {op: rng.integers(0, 9, shape).astype(float) for op in ("F", "B", "I", "W", "R", "comm")}
    if kind == "alike":                                        # micro-batches of as many slices are
        offset = np.cumsum([0, *program.slices])
        unit = [list(program.slices).index(count) for count in program.slices]
        units = [offset[first] + s for first, count in zip(unit, program.slices, strict=True) for s in range(count)]
        cost = {op: seconds[:, units] for op, seconds in cost.items()}
    if kind == "copies":
        cost |= {op: rng.integers(0, 4, shape).astype(float) for op in ("SF", "RF", "SB", "RB", "comm.back")}
    if kind == "end":
        cost |= {"AR": rng.integers(0, 9, shape).astype(float), "OPT": rng.integers(0, 9, shape).astype(float)}
        cost["OPT.norm"] = np.floor(cost["OPT"] * rng.uniform(0, 1, shape))
    return cost


KINDS = ("any", "alike", "copies", "again", "end", "chimera")


def compare(kind, split, seed, rounds, most=400):
    """How many tiny programs were looked at, and in how many some order comes to the bound."""
    rng = np.random.default_rng([KINDS.index(kind), split, seed])
    met = count = 0
    for _ in range(rounds):
        program = tiny(rng, kind, split)
        if program.num_stages * len(program.slices) > 12:
            continue
        cost = costs(rng, program, kind)
        if kind != "again":
            program = program.lower(tied=kind == "end")
        best = Orders(program, cost).fastest(most)
        if best is not None:
            line = program.simulate(cost)
            assert line.lower_bound_s <= best * (1 + 1e-12) <= line.makespan_s * (1 + 2e-12), (str(program), cost)
            met, count = met + (line.lower_bound_s >= best * (1 - 1e-9)), count + 1
    return count, met


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_legal_order_is_faster(kind, split):
    count, met = compare(kind, split, 0, 60)
    assert count >= 15 and met >= 0.6 * count, (count, met)


def test_sends_that_change_places_are_orders_too():
    """Slice 1's gradient is sent behind slice 0's, whose way is longer: the bound had slice 0 wait for both copies out, 19 s."""
    program = Program.parse("0RB0.0@1 0RB0.1@1 0F0.0 0SF0.0@1 0F0.1 0SF0.1@1 0B0.1 0B0.0\n"
                            "1RF0.0@0 1RF0.1@0 1F0.0 1F0.1 1B0.1 1B0.0 1SB0.0@0 1SB0.1@0\n")  # fmt: skip
    program.check(canonical=True)
    zero = np.zeros((2, 2))
    line = program.simulate({"F": zero, "B": zero + 1, "SB": zero + 3, "comm": zero, "comm.back": np.array([[0, 0], [10.0, 0]])})
    assert line.lower_bound_s <= line.makespan_s == 16.0
    halves = Program.parse("0RB0.0@1 0F0.0a 0F0.0b 0SF0.0b@1 0SF0.0a@1 0B0.0\n"
                           "1RF0.0b@0 1RF0.0a@0 1F0.0a 1F0.0b 1B0.0 1SB0.0@0\n")  # fmt: skip
    halves.check(canonical=True)
    one = np.ones((2, 1))
    line = halves.simulate({"F": one, "B": one, "SF.a": 3 * one, "SF.b": 0 * one, "comm.a": 0 * one, "comm.b": 10 * one})
    assert line.lower_bound_s <= line.makespan_s


def test_one_sequence_of_equal_slices_cannot_be_faster():
    """f = i = w: the first rank's gradients come back from 2 R + S - 2 on, one each second, and it has S of W left then. The bound
    knew the way there alone: R - 1 + 3 S."""
    unit = {"F": 1.0, "I": 1.0, "W": 1.0}
    for ranks, slices in ((2, 3), (4, 4), (8, 4), (3, 7)):
        line = schedules.seq1f1b(ranks, 1, slices).split(unit, pending=slices).simulate(unit)
        assert line.makespan_s == pytest.approx(3 * slices + 2 * (ranks - 1), rel=1e-12)
        assert line.lower_bound_s == pytest.approx(line.makespan_s, rel=1e-9)
        looped = schedules.looped_bfs(ranks, 1, 2, ranks).split(unit, pending=99).simulate(unit)
        assert looped.lower_bound_s == pytest.approx(looped.makespan_s, rel=1e-9), (ranks, looped)


def test_a_backward_waits_for_its_micro_batch_alone():
    """Two micro-batches on two ranks: the second's forward may come first, and the bound must not have it wait."""
    cost = {"F": np.array([[9.0, 1.0], [1.0, 1.0]]), "B": np.array([[1.0, 1.0], [1.0, 9.0]])}
    early = Program.parse("0F1.0 0F0.0 0B1.0 0B0.0\n1F1.0 1B1.0 1F0.0 1B0.0\n").simulate(cost)
    late = Program.parse("0F0.0 0F1.0 0B0.0 0B1.0\n1F0.0 1B0.0 1F1.0 1B1.0\n").simulate(cost)
    assert early.lower_bound_s == late.lower_bound_s <= early.makespan_s < late.makespan_s


def test_the_bound_scales_with_the_costs():
    rng = np.random.default_rng(4)
    for program in (schedules.zb_v(3, 4), schedules.looped_bfs(3, 2, 2, [3, 2]), schedules.seq1f1b(4, 2, 3)):
        shape = program.num_stages, sum(program.slices)
        cost = {op: rng.uniform(0.1, 1.0, shape) for op in ("F", "I", "W", "B", "comm")}
        line = program.simulate(cost)
        for factor in (4.0, 0.125, 1e3, 1e-6, 1 / 3):
            other = program.simulate({op: factor * seconds for op, seconds in cost.items()})
            assert other.lower_bound_s == pytest.approx(factor * line.lower_bound_s, rel=1e-12)


MANY = [(lambda: schedules.one_f_one_b(4, 4000), 0.01), (lambda: schedules.zb_v(2, 4000), 1e-3),
        (lambda: schedules.seq1f1b(4, 1, 8000), 0.01), (lambda: schedules.gpipe(8, 1, 9000), 0.01)]  # fmt: skip


@pytest.mark.parametrize("build, most", MANY, ids=range(len(MANY)))
def test_many_slices_that_all_differ(build, most):
    """More than have heads and tails of their own (MOST_JOBS in csrc/sched/jackson.c), and than are looked at at all."""
    program = build()
    rng = np.random.default_rng(1)
    unit = rng.uniform(0.99, 1.01, sum(program.slices))
    cost = {op: np.tile(s * unit, (program.num_stages, 1)) for op, s in {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}.items()}
    line = program.simulate(cost)
    assert line.lower_bound_s <= line.makespan_s <= line.lower_bound_s * (1 + most)


@pytest.mark.parametrize("name, program", [
    ("comm", "0F1.0 0F0.0 0B1.0 0B0.0\n1F1.0 1B1.0 1F0.0 1B0.0\n"),
    ("comm.back", "0F0.0 0F1.0 0B1.0 0B0.0\n1F0.0 1B0.0 1F1.0 1B1.0\n"),
])
def test_messages_that_differ_where_passes_are_alike(name, program):
    """Micro-batch 0's alone takes long: it may leave last, or be the first that leaves for home. The bound must look at both."""
    slow = {"comm": [[10.0, 0.0], [0.0, 0.0]], "comm.back": [[0.0, 0.0], [10.0, 0.0]]}[name]
    for passes in ({"F": 1.0, "B": 1.0}, {"F": [1.0, 1.0], "B": [1.0, 1.0]}, {"F": np.ones((2, 2)), "B": np.ones((2, 2))}):
        line = Program.parse(program).simulate({**passes, name: np.array(slow)})
        assert line.lower_bound_s <= line.makespan_s == 14.0 + (name == "comm"), (passes, line)


def test_a_halved_micro_batch_may_come_before_whole_ones_of_its_size():
    """Its first half lets the second rank begin after 1 s instead of 2."""
    program = Program.parse("0F1.0a 0F1.0b 0F0.0 0B1.0 0B0.0\n1F1.0a 1F1.0b 1B1.0 1F0.0 1B0.0\n")
    program.check()
    line = program.simulate({"F": 2.0, "F.a": 1.0, "F.b": 1.0, "B": 1.0})
    assert line.lower_bound_s == pytest.approx(8.0, rel=1e-9) and line.lower_bound_s <= line.makespan_s == 8.0


@pytest.mark.parametrize("op", ["F", "B", "R", "I", "W", "SF", "RF", "SB", "RB", "some R"])
def test_micro_batches_that_differ_in_one_operation_are_no_job_twice(op):
    """What is alike is one job, as many times as it comes (csrc/sched/jackson.c). "some R": only one is made again."""
    cost = {name: np.ones((2, 2)) for name in ("F", "B", "I", "W", "R")}
    if op in ("I", "W"):
        program = "0F0.0 0I0.0 0W0.0 0F1.0 0I1.0 0W1.0\n1F0.0 1I0.0 1W0.0 1F1.0 1I1.0 1W1.0\n"
    elif op.endswith("R"):
        program = f"0F0.0 0R0.0 0F1.0 {'0R1.0 ' * (op == 'R')}0B0.0 0B1.0\n1F0.0 1B0.0 1F1.0 1B1.0\n"
    else:
        program = "0F0.0 0F1.0 0B1.0 0B0.0\n1F0.0 1F1.0 1B1.0 1B0.0\n"
    cost |= {"R": 9 * cost["R"]} if op == "some R" else {op: np.where([[True, False]] * 2, 9.0, float(op in cost))}
    line = Program.parse(program).simulate(cost)
    assert line.lower_bound_s <= line.makespan_s, (line.lower_bound_s, line.makespan_s)
