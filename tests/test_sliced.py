"""AutoPipe's sliced 1F1B: forwards of the first micro-batches in halves along the batch, proved, timed and run."""

import argparse
import itertools
import json
import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from mutations import checked
from test_engine import HYPER, alone, everything, partition_of, problem, ranks_do, same, step

import terapipe_c as tp
from terapipe_c import _core, timelines
from terapipe_c.engine import rank_memory
from terapipe_c.planning.judge import Candidate, Judge
from terapipe_c.report import resimulated

COST = {"F": 2.0, "B": 3.0, "I": 1.0, "W": 2.0}


def recurrence(stages, m, split, f, b, comm):
    """Makespan of the sliced order, written from the words alone: each stage runs its list, each message is a time.

    f, b, comm: [stages] seconds of a whole forward, of a backward, of a whole message that leaves the stage."""
    lists = []
    for x in range(stages):
        warm = min(m, stages - 1 - x)
        order = [("F", q) for q in range(warm)]
        for q in range(m):
            order += [("F", q + warm)] * (q + warm < m) + [("B", q)]
        ops = []
        for kind, q in order:
            ops += [("F", q, "a"), ("F", q, "b")] if kind == "F" and q < split else [(kind, q, "")]
        lists.append((warm, ops))
    there, at, clock = {}, [0] * stages, [0.0] * stages
    moved = True
    while moved:
        moved = False
        for x, (warm, ops) in enumerate(lists):
            while at[x] < len(ops):
                kind, q, half = ops[at[x]]
                key = (kind, x - 1, q, half) if kind == "F" else (kind, x + 1, q, "")
                if (kind == "F" and x > 0) or (kind == "B" and x < stages - 1):
                    if key not in there:
                        break
                    clock[x] = max(clock[x], there[key])
                clock[x] += (f[x] / 2 if half else f[x]) if kind == "F" else b[x]
                if kind == "B" or not half:
                    there[kind, x, q, ""] = clock[x] + comm[x]
                elif q == warm - 1:  # the last warm-up forward: one message behind the second half
                    if half == "b":
                        there["F", x, q, "a"] = there["F", x, q, "b"] = clock[x] + comm[x]
                else:
                    there["F", x, q, half] = clock[x] + comm[x] / 2
                at[x] += 1
                moved = True
    assert all(at[x] == len(ops) for x, (_, ops) in enumerate(lists))
    return max(clock)


def shapes(most=6):
    for ranks in range(1, most):
        for m in (1, 2, ranks, 2 * ranks + 1):
            for split in range(min(ranks + 1, m) + 1):
                yield ranks, m, split


def test_simulation_equals_the_recurrence():
    rng = np.random.default_rng(0)
    count = 0
    for ranks, m, split in shapes():
        for _ in range(8):
            f, b, comm = rng.integers(0, 20, (3, ranks)).astype(float)
            made = tp.schedules.sliced_1f1b(ranks, m, split)
            right = recurrence(ranks, m, split, f, b, comm)
            for program in (made, made.lower()):
                line = program.simulate({"F": f, "B": b}, comm_s=comm)
                assert line.makespan_s == right == program.makespan({"F": f, "B": b}, comm_s=comm)
                assert line.lower_bound_s <= right
                assert math.isclose(sum(line.bubbles.values()), line.idle_s, abs_tol=1e-9)
            count += 1
    assert count == 8 * len(list(shapes())) > 400


def test_one_micro_batch_in_halves_takes_its_longest_path():
    """The second half of a stage's forward waits for the first."""
    line = tp.schedules.sliced_1f1b(3, 1, 1).simulate({"F": [9.0, 1.0, 1.0], "B": 1.0}, comm_s=2.0)
    assert line.lower_bound_s == line.makespan_s


def test_autopipes_slicer_means_this_program():
    """tp.planners.autopipe_slicer has a recurrence of its own: its times are the simulator's, its split the fewest best."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        ranks = int(rng.integers(1, 9))
        m = int(rng.integers(1, 3 * ranks + 2))
        f, b = rng.integers(1, 30, (2, ranks)).astype(float)
        comm = float(rng.choice([0, 1, 4]))
        seconds = [tp.schedules.sliced_1f1b(ranks, m, split).simulate({"F": f, "B": b}, comm_s=comm).makespan_s
                   for split in range(min(ranks - 1, m) + 1)]  # fmt: skip
        found = tp.planners.autopipe_slicer(f, b, m, comm_s=comm)
        assert found.step_time_s == min(seconds) and found.split == seconds.index(min(seconds))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 12, 16])
def test_closed_form_of_balanced_stages(ranks):
    """PLANNERS.md 2.6: ceil(p f / 2 b) micro-batches are enough, and save (p - 2) f / 2."""
    whole, *sliced = (tp.schedules.sliced_1f1b(ranks, 2 * ranks, s).simulate({"F": 1.0, "B": 2.0}).makespan_s
                      for s in range(ranks))  # fmt: skip
    assert whole == 3.0 * (3 * ranks - 1)
    assert whole - min(sliced) == (ranks - 2) / 2
    assert sliced[math.ceil(ranks / 4) - 1] == min(sliced)


def test_what_equal_stages_save():
    """sliced_1f1b's docstring, also of slow forwards (f > 2 b), of fewer micro-batches than ranks, and of none left whole."""
    for ranks, m, (f, b) in itertools.product(range(2, 8), range(1, 10), ((1, 2), (2, 1), (3, 1), (5, 2), (20, 1), (0, 1), (1, 0))):
        whole, *times = (tp.schedules.sliced_1f1b(ranks, m, s).simulate({"F": float(f), "B": float(b)}).makespan_s
                         for s in range(m + 1))  # fmt: skip
        for split, seconds in enumerate(times, 1):
            most = (ranks - 2) * f / 2
            saved = min(most, min(split, ranks - 2) * b if split < m else (m - 1) * (f / 2 + b))
            assert whole - seconds == saved, (ranks, m, f, b, split)
            if b and f <= 2 * b and math.ceil(most / b) <= split < m:
                assert saved == most


def test_nothing_split_is_1f1b_and_memory_is_1f1bs():
    for ranks, m, split in shapes():
        program = tp.schedules.sliced_1f1b(ranks, m, split)
        if split == 0:
            assert program == tp.schedules.one_f_one_b(ranks, m)
        held = program.simulate(COST, activation_bytes=1).peak_memory_bytes.tolist()
        assert held == [min(m, ranks - r) for r in range(ranks)]
        lowered = program.lower()
        assert [lowered.activation_slots(v) for v in range(ranks)] == held


def test_text_round_trips_and_says_what_is_wrong():
    for ranks, m, split in shapes(5):
        for program in (tp.schedules.sliced_1f1b(ranks, m, split), tp.schedules.sliced_1f1b(ranks, m, split).lower()):
            program.check()
            assert tp.Program.parse(str(program)) == program
            assert program.split(pending=1).strip().counts["W"] == program.counts["B"]
    text = str(tp.schedules.sliced_1f1b(2, 2, 1))
    assert text == "0F0.0a+ 0F0.0b+ 0F1.0 0B0.0 0B1.0\n1F0.0a 1F0.0b 1B0.0 1F1.0 1B1.0\n"
    for bad in ("0B0.0a", "0F0.0c", "0F0.0+", "0SF0.0a+@1"):
        with pytest.raises(ValueError, match="rank 0, word 0"):
            tp.Program.parse(bad)
    with pytest.raises(ValueError, match="half a micro-batch"):
        tp.schedules.sliced_1f1b(2, 2, 1).to_csv()
    for split in (-1, 4, 9):
        with pytest.raises(ValueError, match=r"split is -?\d: 0 to the 3 micro-batches"):
            tp.schedules.sliced_1f1b(2, 3, split)
    with pytest.raises(TypeError, match="split is 0.5"):
        tp.schedules.sliced_1f1b(2, 3, 0.5)


REFUSED = [
    ("0F0.0a 0B0.0", "comes first|missing|forward must"),
    ("0F0.0b 0F0.0a 0B0.0", "the first half of this forward comes first"),
    ("0F0.0a 0F0.0a 0F0.0b 0B0.0", "done twice"),
    ("0F0.0a 0F0.0 0B0.0", "the second half of this forward comes first"),
    ("0F0.0a+ 0F0.0b 0B0.0", "both halves leave as one message"),
    ("0F0.0a 0F0.0b 0F0.1 0B0.1 0B0.0", "halves are of a micro-batch of one"),
    ("0F0.0a 0F0.0b 0B0.0\n1F0.0 1B0.0", "stage 0 sends this micro-batch in two halves"),
    ("0F0.0a 0B0.0 0F0.0b\n1F0.0a 1F0.0b 1B0.0", "its forward must come before it"),
    ("0F0.0a+ 0SF0.0a@1 0F0.0b+ 0SF0.0b@1 0RB0.0@1 0B0.0\n1RF0.0a@0 1F0.0a 1RF0.0b@0 1F0.0b 1B0.0 1SB0.0@0",
     "both halves as one message"),
    ("0F0.0a 0F0.0b 0SF0.0@1 0RB0.0@1 0B0.0\n1RF0.0@0 1F0.0a 1F0.0b 1B0.0 1SB0.0@0", "each half as a message of its own"),
    ("0F0.0a 0SF0.0b@1 0F0.0b 0SF0.0a@1 0RB0.0@1 0B0.0\n1RF0.0a@0 1F0.0a 1RF0.0b@0 1F0.0b 1B0.0 1SB0.0@0",
     "its F must come before it"),
    ("0F0.0a 0SF0.0a@1 0F0.0b 0SF0.0b@1 0RB0.0@1 0B0.0\n1RF0.0a@0 1F0.0a 1F0.0b 1RF0.0b@0 1B0.0 1SB0.0@0",
     "its RF from rank 0 must come before it"),
    ("0F0.0a 0SF0.0a@1 0F0.0b 0SF0.0b@1 0RB0.0@1 0B0.0\n1RF0.0b@0 1RF0.0a@0 1F0.0a 1F0.0b 1B0.0 1SB0.0@0",
     "messages of a pair of ranks keep their order"),
    ("0F0.0a 0SF0.0a@1 0F0.0b 0RB0.0@1 0B0.0\n1RF0.0a@0 1F0.0a 1F0.0b 1B0.0 1SB0.0@0", "RF from rank 0|1.5 of its 2"),
]  # fmt: skip


@pytest.mark.parametrize("text, why", REFUSED)
def test_wrong_halves_are_refused(text, why):
    with pytest.raises(tp.ScheduleError, match=why) as error:
        tp.Program.parse(text).check()
    assert "<-- here" in str(error.value)


class Ranks:
    """Runs a program's words with values, halves and all; knows nothing of csrc/sched. True: it came to its end."""

    def __init__(self, program):
        self.lists = [program.instructions(r).tolist() for r in range(program.num_ranks)]
        self.home, self.stages, self.micros = program.rank_of, program.num_stages, program.num_micro_batches
        self.lowered = "SF" in program.counts
        self.has, self.wire, self.read, self.done = set(), {}, {}, set()

    def halves(self, flags):
        return {"a", "b"} if not flags & 3 else {"a"} if flags & 1 else {"b"}

    def run(self, rank, word):
        op, v, q, _, peer, flags, _ = word
        name, mine = tp.schedules.OPS[op], self.halves(flags)
        assert self.home[v] == rank
        if name == "F":
            far = v > 0 and self.home[v - 1] != rank
            source = {("in" if far and self.lowered else "out", v if far and self.lowered else v - 1, q, h) for h in mine}
            if v > 0 and not source <= self.has:
                return False
            assert not self.done & {("F", v, q, h) for h in mine}
            assert "a" in mine or ("F", v, q, "a") in self.done
            self.done |= {("F", v, q, h) for h in mine}
            away = v + 1 < self.stages and self.home[v + 1] != rank
            if not (flags & 4 and away):
                self.has |= {("out", v, q, h) for h in mine}
            elif "b" in mine:
                self.has |= {("out", v, q, h) for h in "ab"}
        elif name in ("B", "I"):
            far = v + 1 < self.stages and self.home[v + 1] != rank
            source = ("gin", v, q) if far and self.lowered else ("gout", v + 1, q)
            if v + 1 < self.stages and source not in self.has:
                return False
            assert {("F", v, q, "a"), ("F", v, q, "b")} <= self.done and ("B", v, q) not in self.done
            self.done.add(("B", v, q))
            self.has.add(("gout", v, q))
        elif name == "SF":
            assert {("out", v, q, h) for h in mine} <= self.has and self.home[v + 1] == peer != rank
            self.wire.setdefault((rank, peer), []).append(("in", v + 1, q, tuple(sorted(mine))))
        elif name == "SB":
            assert ("gout", v, q) in self.has and self.home[v - 1] == peer != rank
            self.wire.setdefault((rank, peer), []).append(("gin", v - 1, q, ()))
        elif name in ("RF", "RB"):
            what = ("in", v, q, tuple(sorted(mine))) if name == "RF" else ("gin", v, q, ())
            self.read.setdefault((peer, rank), []).append(what)
        for key, sent in self.wire.items():
            while sent and self.read.get(key):
                one, two = sent.pop(0), self.read[key].pop(0)
                assert one == two
                self.has |= {(*one[:3], h) for h in one[3]} if one[0] == "in" else {one[:3]}
        return True

    def finish(self):
        at, moved = [0] * len(self.lists), True
        while moved:
            moved = False
            for r, words in enumerate(self.lists):
                while at[r] < len(words) and self.run(r, words[at[r]]):
                    at[r], moved = at[r] + 1, True
        return all(at[r] == len(words) for r, words in enumerate(self.lists)) and all(
            ("B", v, q) in self.done for v in range(self.stages) for q in range(self.micros))


def mutate(rng, lists):
    lists = [list(rank) for rank in lists]
    rank = rng.randrange(len(lists))
    i, j = rng.randrange(len(lists[rank])), rng.randrange(len(lists[rank]))
    kind = rng.choice(("swap", "near", "delete", "copy", "flags", "flags"))
    if kind in ("swap", "near"):
        j = min(i + 1, len(lists[rank]) - 1) if kind == "near" else j
        lists[rank][i], lists[rank][j] = lists[rank][j], lists[rank][i]
    elif kind == "delete":
        del lists[rank][i]
    elif kind == "copy":
        lists[rank].insert(j, lists[rank][i])
    else:
        word = lists[rank][i].copy()
        word["flags"] = rng.randrange(8)
        lists[rank][i] = word
    return lists


def test_what_check_accepts_executes():
    rng = random.Random(1)
    bases = [tp.schedules.sliced_1f1b(p, m, s) for p, m, s in ((2, 2, 1), (3, 2, 2), (3, 4, 1), (4, 3, 3))]
    bases += [base.lower() for base in bases]
    for base in bases:
        assert Ranks(base).finish()
    refused = accepted = 0
    for program, error in checked(rng, bases, 3000, mutate):
        if error is not None:
            refused += 1
        else:
            assert Ranks(program).finish()
            program.simulate(COST)
            accepted += 1
    assert refused > 1800 and accepted > 100, (refused, accepted)


def test_halves_have_their_own_durations():
    program = tp.schedules.sliced_1f1b(3, 2, 1)
    cost = {"F": 4.0, "B": 6.0, "SF": 1.0, "RF": 1.0, "comm": 2.0}
    even = program.simulate({**cost, "F.a": 2.0, "F.b": 2.0, "SF.a": 0.5, "SF.b": 0.5, "RF.a": 0.5, "RF.b": 0.5,
                             "comm.a": 1.0, "comm.b": 1.0})  # fmt: skip
    assert even.makespan_s == program.simulate(cost).makespan_s
    dear = {**cost, "F.a": 3.0, "F.b": 2.5}
    for one in (program, program.lower()):
        line = one.simulate(dear)
        # rank 0 begins with a (1 s more), rank 1 has both before it sends (1.5 s), rank 2 both (1.5 s)
        assert line.makespan_s == one.makespan(dear) == even.makespan_s + 1.0 + 1.5 + 1.5
        assert line.busy_s.tolist() == [5.5 + 4 + 12] * 3
        assert line.lower_bound_s <= line.makespan_s
    for parts in (200, 50, 12):  # slower, where others have the machine
        emulated = tp.emulate(program, {k: v / parts for k, v in dear.items()})
        assert emulated.step_time_s >= emulated.predicted_step_time_s
        if emulated.error < 0.5:
            break
    assert emulated.error < 0.5
    with pytest.raises(ValueError, match="cost has 'B.a'"):
        program.simulate({**cost, "B.a": 1.0})


def test_a_gradient_waits_as_if_a_whole_message_came_once():
    """Not with each of the halves that read it: a weight gradient went where its rank does not wait."""
    f, i, w = np.array([[[6.0, 7, 1], [2, 4, 5]], [[7, 3, 1], [2, 4, 4]], [[8, 4, 6], [5, 1, 6]]])
    cost = {"F": f, "I": i, "W": w, "RF": 3.0, "SF": 3.0}
    assert tp.schedules.sliced_1f1b(2, 3, 1).split(cost, pending=3).makespan(cost) == 52.0


# ---- on the engine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_losses_and_weights_have_the_bits_of_one_device(tie):
    """Odd and even batches, every split, whole and split backward, threads in a rank; memory to the byte."""
    model, params, tokens = problem(8, 9, tie_weights=tie)
    right = alone(model, params, tokens)
    count = 0
    for sizes in ([2, 3, 3], [5, 3]):
        slicing = [(b, [9]) for b in sizes]
        for ranks in (1, 2, 3, 4):
            for split in range(min(ranks - 1, len(sizes)) + 1):
                made = tp.schedules.sliced_1f1b(ranks, len(sizes), split)
                program = (made.split(pending=split) if count % 2 else made).lower(tie)
                program.check()
                partition = partition_of(model, sorted(random.Random(count).sample(range(1, 6), ranks - 1)))
                same(everything(model, partition, slicing, program, params, tokens, threads=1 + count % 2), right)
                count += 1
    assert count == 10 + 9


def test_memory_is_predicted_to_the_byte_and_no_more_than_1f1bs():
    model, params, tokens = problem(7, 12)
    partition, slicing = partition_of(model, [2, 4]), [(3, [12]), (2, [12]), (2, [12])]
    for split in range(3):
        program = tp.schedules.sliced_1f1b(3, 3, split).lower(True)

        def work(engine):
            before = engine.allocations
            step(engine, tokens)
            assert engine.allocations == before
            return engine.peak_memory_bytes

        held = ranks_do(model, partition, slicing, program, work, params=params)
        assert held == rank_memory(model, partition, slicing, program)
        if split == 0:
            plain = held
    events = 40 * 3 * 2 * 2  # a halved forward is one instruction more, and so may be its messages
    assert all(p <= h <= p + 64 * 8 + 3 * events for h, p in zip(held, plain, strict=True))


def test_any_order_of_halves_that_check_accepts_runs():
    """Halves of a whole message, joined halves that stay on a rank, the head's own halves, whole forwards between."""
    model, params, tokens = problem(5, 7)
    right = alone(model, params, tokens)
    texts = [
        "0F0.0a 0F0.0b 0F1.0 0B0.0 0B1.0",
        "0F0.0 0F1.0 0B0.0 0B1.0\n1F0.0a 1F0.0b 1B0.0 1F1.0a 1F1.0b 1B1.0",
        "0F0.0a+ 0F0.0b+ 0F1.0 0B0.0 0B1.0\n1F0.0 1F1.0 1B0.0 1B1.0",
        "0F0.0a+ 1F0.0a 0F0.0b+ 1F0.0b 1B0.0 0B0.0 0F1.0a 0F1.0b 1F1.0 1B1.0 0B1.0",
        "0F0.0a 0F0.0b 2F0.0a 2F0.0b 2B0.0 0B0.0 0F1.0 2F1.0 2B1.0 0B1.0\n1F0.0a 1F0.0b 1B0.0 1F1.0 1B1.0",
    ]
    for i, text in enumerate(texts):
        program = tp.Program.parse(text).lower(True)
        cuts = [2, 4][: program.num_stages - 1]
        same(everything(model, partition_of(model, cuts), [(2 + i % 2, [7]), (3 - i % 2, [7])], program, params, tokens),
             right)  # fmt: skip


def test_halves_need_two_sequences():
    model, _, _ = problem(3, 8)
    program = tp.schedules.sliced_1f1b(2, 2, 1).lower(True)
    with pytest.raises(ValueError, match="micro-batch 0 has 1 sequence: a forward in halves needs at least 2"):
        rank_memory(model, partition_of(model, [3]), [(1, [8]), (2, [8])], program)
    with pytest.raises(ValueError, match="micro-batch 0 has 1 sequence"):
        ranks_do(model, partition_of(model, [3]), [(1, [8]), (2, [8])], program, lambda engine: None)


def test_a_measured_trace_is_the_program_again():
    model, params, tokens = problem(6, 16)
    program = tp.schedules.sliced_1f1b(3, 3, 2).lower(True)
    slicing = [(2, [16])] * 3

    def work(engine):
        engine.run(tokens, step=1, **HYPER)
        return engine.trace()

    traces = ranks_do(model, partition_of(model, [2, 4]), slicing, program, work, params=params)
    line = tp.Timeline.from_intervals([(r, *row) for r, rows in enumerate(traces) for row in rows], 3)
    assert line.program is not None and _core.OPS[int(line.program.instructions(0)["op"][0])] == "F"
    assert [int(x) for x in line.program.instructions(0)["flags"][:4]] == [1, 2, 1, 2]
    assert line.lower_bound_s <= line.makespan_s


@pytest.mark.parametrize("program", [tp.schedules.sliced_1f1b(4, 6, 2), tp.schedules.dualpipe_v(2, 8)],
                         ids=["halves", "backwards in one and in two"])
def test_what_some_micro_batches_do_not_do_is_no_skew_of_the_measured_ones(program):
    cost = {"F": 2.0, "B": 5.0, "I": 2.0, "W": 3.0}
    line = program.simulate(cost)
    for known in (program, None):
        measured = tp.Timeline.from_intervals(line.intervals, program=known).bubbles
        assert line.bubbles["slice_skew"] == measured["slice_skew"] == 0.0
        if known is not None:
            assert measured == pytest.approx(line.bubbles, abs=1e-9)


@pytest.mark.parametrize(("program", "ops"), [(tp.schedules.sliced_1f1b(4, 6, 2), ("F", "F.a", "F.b", "B")),
                                              (tp.schedules.dualpipe_v(2, 8), "FBIW"),
                                              (tp.schedules.pipedream(3, 4, [2, 1, 3, 2]), "FBU")],
                         ids=["halves", "backwards in one and in two", "updates"])
def test_skew_is_of_what_is_done(program, ops):
    """The means that it compares with once counted what a table says of forwards that are halved, of slices whose backward is in
    two and of slices that have no update: measured and predicted causes differed."""
    rng = np.random.default_rng(9)
    shape = program.num_stages, sum(program.slices)
    cost = {op: rng.uniform(1.0, 3.0, shape) for op in ops}
    line, offset = program.simulate(cost), np.cumsum((0, *program.slices))
    assert line.bubbles["slice_skew"] > 0.1
    for known in (program, *([] if "F.a" in ops else [None])):  # times do not tell which halves' messages are joined
        assert tp.Timeline.from_intervals(line.intervals, program=known).bubbles == pytest.approx(line.bubbles, abs=1e-9)
    done = {op: np.zeros(shape, bool) for op in cost}
    for rank in range(program.num_ranks):
        for i in program.instructions(rank):
            half = ("", ".a", ".b")[int(i["flags"]) & 3]
            done[_core.OPS[int(i["op"])] + half][i["stage"], offset[i["micro"]] + i["slice"]] = True
    other = {op: np.where(done[op], table, 100.0) for op, table in cost.items()}
    assert any((~table).any() for table in done.values())
    assert program.simulate(other).bubbles == line.bubbles


@pytest.mark.parametrize("uneven", ["F.a", "F.b"])
def test_halves_that_differ_between_micro_batches_are_skew(uneven):
    program = tp.schedules.sliced_1f1b(3, 4, 4)
    cost = dict.fromkeys(("F.a", "F.b"), 2.0) | {"F": 4.0, "B": 3.0, uneven: np.tile([1.0, 9.0, 1.0, 1.0], (3, 1))}
    line, even = program.simulate(cost), program.makespan(cost | {uneven: 3.0})
    assert line.bubbles["slice_skew"] == pytest.approx(3 * (line.makespan_s - even)) and line.makespan_s > even


# ---- planned, launched -----------------------------------------------------------------------------------------------

MODEL = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=32, block_size=16)
CLUSTER = tp.Cluster(num_devices=3, devices_per_node=3, memory_bytes=1e9, link_latency_s=1e-7, link_bandwidth_Bps=1e10,
                     peak_flops=1e9)  # fmt: skip
CUT = [(2, [16])] * 2 + [(3, [16])] + [(1, [16])]


def test_a_step_of_halves_is_as_long_again_from_its_own_operations():
    rng = np.random.default_rng(4)
    for program in (tp.schedules.sliced_1f1b(4, 6, 2), tp.schedules.sliced_1f1b(4, 6, 3).lower(), tp.schedules.seq1f1b(3, 4, 2)):
        shape = program.num_stages, sum(program.slices)
        cost = {name: rng.uniform(1.0, 2.0, shape) for name in ("F", "B", *(("F.a", "F.b") if program.num_stages == 4 else ()))}
        line = program.simulate(cost)
        assert resimulated(program, line.intervals) == pytest.approx(line.makespan_s)
        again = tp.Timeline.from_intervals(line.intervals, program=program)    # each half with its own seconds
        assert again.bubbles["imbalance"] == pytest.approx(line.bubbles["imbalance"])
        assert again.bubbles["comm"] == pytest.approx(0.0, abs=1e-9)


def test_what_is_shown_of_a_runs_folder_is_by_its_own_program(tmp_path):
    """The times alone do not tell of messages that wait for the second half."""
    plan = tp.plan(MODEL, CLUSTER, 8, 16, schedule="sliced-1f1b", slicing=CUT, partition=[(0, 2), (2, 4), (4, 6)])
    line = plan.program.simulate({"F": [2.0, 1.0, 1.0], "I": 2.0, "W": 1.0})
    names = [(rank, _core.OPS[op], *rest) for rank, op, *rest in line.intervals.tolist()]
    assert tp.Timeline.from_intervals(names).bubbles["comm"] > 0.5
    plan.save(tmp_path / "plan.json")
    (tmp_path / "trace.json").write_text(json.dumps({"rows": names}))
    what, shown = timelines.timeline_of(tmp_path, argparse.Namespace())
    assert what == "measured timeline of the last step" and shown.bubbles == pytest.approx(line.bubbles, abs=1e-9)


def test_plan_halves_what_helps_and_predicts_it():
    cut = CUT
    plan = tp.plan(MODEL, CLUSTER, 8, 16, schedule="sliced-1f1b", slicing=cut, partition=[(0, 2), (2, 4), (4, 6)])
    assert plan.schedule == "sliced-1f1b" and plan.slicing == cut
    assert "0F0.0a" in str(plan.program) and "0F1.0a" not in str(plan.program)
    assert "[16])], the forward of the first micro-batch in halves along the batch\n" in plan.explain()
    eight = tp.plan(replace(MODEL, n_layer=6), replace(CLUSTER, num_devices=8, devices_per_node=8), 16, 16, schedule="sliced-1f1b",
                    slicing=[(2, [16])] * 8, stages=8)
    count = len(set(re.findall(r"\b0F(\d)\.0a", str(eight.program))))
    assert count > 1 and f"the forwards of the first {count} micro-batches in halves along the batch\n" in eight.explain()
    assert {"F.a", "F.b", "comm.a", "comm.b"} <= set(plan.durations)
    assert tp.Plan.from_dict(plan.to_dict()) == plan
    assert plan.timeline().makespan_s == plan.step_time_s >= plan.lower_bound_s
    whole = tp.plan(MODEL, CLUSTER, 8, 16, schedule="1f1b", slicing=cut, partition=plan.stages)
    assert plan.step_time_s < whole.step_time_s
    assert tp.plan(MODEL, CLUSTER, 8, 16, schedule="sliced-1f1b", stages=3, slicing=cut).step_time_s <= plan.step_time_s
    with pytest.raises(ValueError, match="Megatron has"):
        plan.to_megatron()
    with pytest.raises(ValueError, match=r"micro-batches of one size, not of \[1, 2, 3\]"):
        plan.to_torch_csv()
    with pytest.raises(ValueError, match=r"slicing\[0\] has 2 slices, but schedule sliced-1f1b has whole sequences: 1 would"):
        tp.plan(MODEL, CLUSTER, 1, 16, schedule="sliced-1f1b", slicing=[(1, [8, 8])])
    alone_ = tp.plan(MODEL, CLUSTER, 3, 16, schedule="sliced-1f1b", slicing=[(1, [16])] * 3)
    assert not alone_.program.instructions(0)["flags"].any()  # single sequences: 1F1B
    assert tp.plan(MODEL, CLUSTER, 8, 16, schedule="sliced-1f1b").step_time_s <= whole.step_time_s


def test_threads_and_processes_train_as_one_device_at_the_predicted_memory(tmp_path):
    data = np.random.default_rng(0).integers(0, 32, 4000).astype(np.uint16)
    cut = [(3, [16]), (2, [16]), (2, [16])]
    sliced = tp.plan(MODEL, CLUSTER, 7, 16, schedule="sliced-1f1b", stages=3, slicing=cut)
    assert sliced.program.instructions(0)["flags"].any()
    losses = []
    for plan, processes in ((tp.plan(MODEL, CLUSTER, 7, 16, schedule="gpipe", stages=1, slicing=[(1, [16])] * 7), False),
                            (sliced, False), (sliced, True)):  # fmt: skip
        run = tp.launch(plan, data=data, steps=3, seed=1, out=tmp_path / str(len(losses)), lr=1e-2, processes=processes,
                        progress=False)  # fmt: skip
        losses.append([(rec.loss, rec.grad_norm) for rec in run])
        run.wait()
        report = run.report()
        assert list(report.peak_memory_bytes) == list(report.predicted_peak_memory_bytes) == plan.peak_memory_bytes
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 3


def test_halves_make_all_of_the_heads_weight_gradient():
    """Each half, by itself, had too few rows for one, and what the two have together was nowhere: a plan was below its bound."""
    model = tp.GPTConfig(n_layer=1, n_head=1, n_embd=4, vocab_size=8, block_size=128, tie_weights=False)
    line = tp.CostModel.from_samples([(8, 0, 8.0), (128, 0, 128.0)]).curves["ffn", "F"]
    waits = {"source": "samples", "model": model, "head_pass": (0.5, 100.0, 0.5)}
    costs = tp.CostModel({("head", "F"): line, ("head", "I"): line}, **waits)
    cut, micro = ((0, 2), (2, 4)), ((3, (128,)),)
    judge = Judge(model, costs, 2, 1, None)
    d = judge.full_durations(Candidate(0.0, "sliced-1f1b", cut, micro, 1))
    assert d["F"][1, 0] == pytest.approx(float(costs.block_seconds("head", "F", 128, 0, 3)) - 0.5)    # one of 3 x 43 rows is left
    for half, batch in (("a", 2), ("b", 1)):                   # a pass of fewer than 100 rows takes as long as of 100
        alone = float(costs.block_seconds("head", "F", 128, 0, batch)) + 0.5 * (100 - 43 * batch)
        assert d[f"F.{half}"][1, 0] == pytest.approx(alone)
    found = judge.judge("sliced-1f1b", cut, micro)
    assert found.seconds == pytest.approx(judge.lowered(found).simulate(d).makespan_s)
