"""BPipe: 1F1B that keeps activations of its first ranks in the memory of its last ones, as a program and as a run."""
import itertools
import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ports import free_port
from test_engine import HYPER, alone, everything, partition_of, problem, ranks_do, same

import terapipe_c as tp
from terapipe_c import _core, schedules
from terapipe_c.cli import main
from terapipe_c.engine import RankEngine, gather_bytes, in_threads, rank_memory
from terapipe_c.guests import evicts, guest_bytes, hosts
from terapipe_c.job import neighbours
from terapipe_c.planning.judge import Savings, saving

NOMINAL = {"F": 1.0, "B": 2.0}
SMALL = """\
0F0.0 0F1.0 0F2.0 0SE2.0@3 0F3.0 0B0.0 0F4.0 0SE4.0@3 0RL2.0@3 0B1.0 0F5.0 0B2.0 0RL4.0@3 0B3.0 0B4.0 0B5.0
1F0.0 1F1.0 1F2.0 1B0.0 1F3.0 1B1.0 1F4.0 1B2.0 1F5.0 1B3.0 1B4.0 1B5.0
2F0.0 2F1.0 2B0.0 2F2.0 2B1.0 2F3.0 2B2.0 2F4.0 2B3.0 2F5.0 2B4.0 2B5.0
0RE2.0@0 0RE4.0@0 3F0.0 3B0.0 3F1.0 3B1.0 3F2.0 3B2.0 3F3.0 0SL2.0@0 3B3.0 3F4.0 3B4.0 0SL4.0@0 3F5.0 3B5.0
"""


def most(ranks):
    """Micro-batches that a rank may hold, guests included: ceil((ranks + 2) / 2)."""
    return -(-(ranks + 2) // 2)


def words(program):
    """[[(op, stage, micro, slice, peer), ...] of each rank]"""
    found = [re.findall(r"(\d+)([A-Z]+)(\d+)\.(\d+)(?:@(\d+))?", line) for line in str(program).splitlines()]
    return [[(op, int(v), int(q), int(s), int(peer) if peer else -1) for v, op, q, s, peer in line] for line in found]


def slots(program):
    """Activation slots of every rank's own stage and of its guests."""
    own, guests = np.zeros(program.num_ranks, int), np.zeros(program.num_ranks, int)
    for rank in range(program.num_ranks):
        for row in program.instructions(rank).tolist():
            kind = guests if schedules.OPS[row[0]] in ("RE", "SL") else own
            kind[rank] = max(kind[rank], (row[6] & 0xFFFF) + 1)
    return own, guests


# ---- the program ---------------------------------------------------------------------------------------------------------

def test_the_text_of_a_small_program():
    program = schedules.bpipe(4, 6)
    assert str(program) == SMALL
    lowered = str(program.lower(True)).splitlines()
    assert lowered[0].startswith("0F0.0 0SF0.0@1 0F1.0 0SF1.0@1 0F2.0 0SF2.0@1 0SE2.0@3 0F3.0 0RB0.0@1 0SF3.0@1 0B0.0 0F4.0")
    assert lowered[3].startswith("3RF0.0@2 0RE2.0@0 0RE4.0@0 3F0.0 3B0.0 3RF1.0@2 3SB0.0@2 3F1.0")


@pytest.mark.parametrize("ranks", range(1, 18))
def test_no_rank_holds_more_than_the_bound_and_no_time_is_lost(ranks):
    for micros, slices in itertools.product((1, 2, 3, 4, 5, 6, 7, 9, 12, 16, 17, 24, 33), (1, 2, 3)):
        program = schedules.bpipe(ranks, micros, slices)
        program.check()
        plain = schedules.one_f_one_b(ranks, micros, slices)
        held = program.simulate(NOMINAL, activation_bytes=1.0).peak_memory_bytes // slices
        before = plain.simulate(NOMINAL, activation_bytes=1.0).peak_memory_bytes // slices
        assert max(held) == min(max(before), most(ranks))
        lowered = program.lower(ranks > 1)
        lowered.check()
        lowered.check(canonical=True)
        own, guests = slots(lowered)
        assert max(own + guests) <= most(ranks)                # the buffers of a rank, not only what is in them at once
        for one in (program, lowered):
            assert tp.Program.parse(str(one)) == one and one.makespan(NOMINAL) == plain.makespan(NOMINAL)
            assert one.simulate(NOMINAL).makespan_s == plain.makespan(NOMINAL)
        if max(before) <= most(ranks):
            assert program == plain
        assert str(program.strip()) == str(program) == str(lowered.strip())
        assert lowered.strip().lower(ranks > 1) == lowered


def test_ragged_slices_and_split_backwards_keep_the_bound():
    rng = np.random.default_rng(5)
    for _ in range(60):
        ranks, micros = int(rng.integers(4, 10)), int(rng.integers(1, 20))
        ragged = bool(rng.integers(0, 2))
        slices = [int(n) for n in rng.integers(1, 5, micros)] if ragged else int(rng.integers(1, 4))
        program = schedules.bpipe(ranks, micros, slices)
        cost = {"F": rng.uniform(0.5, 2), "I": rng.uniform(0.5, 2), "W": rng.uniform(0.5, 2)}
        for pending in (0, 1, 2):
            split = program.split(cost, pending=pending)
            split.check()
            lowered = split.lower(True)
            lowered.check(canonical=True)
            own, guests = slots(lowered)
            # A W that waits keeps its activations; of unequal numbers of slices a message may land in a buffer more.
            assert max(own + guests) <= most(ranks) + pending + ragged
            assert lowered.simulate(cost).makespan_s == lowered.makespan(cost) > 0


def test_not_every_micro_batch_is_evicted():
    """A micro-batch that stays takes a slot that an evicted one left: the first of 8 ranks evicts about half of them."""
    for ranks in range(4, 17):
        micros = 12 * ranks
        program = schedules.bpipe(ranks, micros)
        for rank, line in enumerate(words(program)):
            away = sum(word[0] == "SE" for word in line)
            held, room = min(micros, ranks - rank), most(ranks)
            assert (away > 0) == (held > room and rank < ranks // 2)
            assert away <= micros - room and away == sum(word[0] == "RL" for word in line)
    assert sum(word[0] == "SE" for word in words(schedules.bpipe(16, 512))[0]) < 0.65 * 512


def test_what_makes_again_and_what_it_reads_come_home_first():
    program = schedules.bpipe(4, 6, 2).save_memory(bytes([1] * 4), bytes(4))
    program.check()
    line = [f"{op}{q}.{s}" for op, _, q, s, _ in words(program)[0]]
    assert line.index("RL2.0") < line.index("R2.0") < line.index("R2.1") < line.index("B2.1")
    cost = {**NOMINAL, "R": 0.5, "comm.guest": np.full((4, 12), 40.0)}
    assert program.simulate(cost).makespan_s == program.makespan(cost) > program.makespan({**cost, "comm.guest": 0.0})
    away = str(program).replace("0RL2.0@3 ", "", 1).replace("0B2.1", "0RL2.0@3 0B2.1")
    with pytest.raises(tp.ScheduleError, match=r"0R2\.0: what it reads is on rank 3: its RL must come before it"):
        tp.Program.parse(away).check()
    with pytest.raises(tp.ScheduleError, match="one of both would be right"):
        schedules.bpipe(4, 6).save_memory(bytes(4), bytes([1] * 4)).check()


def test_what_other_formats_have_no_word_for():
    with pytest.raises(tp.ScheduleError, match="torch.distributed.pipelining has no word for SE"):
        schedules.bpipe(4, 6).to_csv()
    for bad in ((0, 4), (4, 0), (4, 4, 0)):
        with pytest.raises(ValueError):
            schedules.bpipe(*bad)


# ---- time ----------------------------------------------------------------------------------------------------------------

def oracle(program, seconds, lag, copies):
    """Makespan by following every rank until nothing moves: eager sends, messages of guests alone take time, one after another."""
    lists, stages = words(program), program.num_stages
    clock, at, made = [0.0] * len(lists), [0] * len(lists), {}
    awaited, free = set(), {}
    while any(at[r] < len(line) for r, line in enumerate(lists)):
        moved = False
        for r, line in enumerate(lists):
            while at[r] < len(line):
                op, v, q, s, _ = line[at[r]]
                if (v, q) in awaited and op in "RBI":
                    if ("SL", v, q) not in made:
                        break
                    awaited.remove((v, q))
                    clock[r] = max(clock[r], made["SL", v, q]) + copies["RL"]
                reads = {"F": ("F", v - 1, q, s) if v else None, "SL": ("SE", v, q)}.get(op)
                if op in "BI" and v < stages - 1:
                    reads = ("B", v + 1, q, s)
                if reads is not None and reads not in made:
                    break
                if op == "RL":
                    awaited.add((v, q))
                elif op == "SE":
                    clock[r] += copies["SE"]
                    made["SE", v, q] = free["SE", v] = max(clock[r], free.get(("SE", v), 0.0)) + lag
                elif op == "SL":
                    clock[r] = max(clock[r], made["SE", v, q]) + copies["RE"]
                    clock[r] += copies["SL"]
                    made["SL", v, q] = free["SL", v] = max(clock[r], free.get(("SL", v), 0.0)) + lag
                elif op in seconds:
                    clock[r] = max(clock[r], made[reads] if reads else 0.0) + seconds[op]
                    made["F" if op == "F" else "B", v, q, s] = clock[r]
                at[r] += 1
                moved = True
        assert moved
    return max(clock)


def test_messages_of_guests_take_their_time():
    rng = np.random.default_rng(3)
    for ranks, micros, slices in ((4, 6, 1), (5, 11, 2), (7, 20, 1), (8, 16, 3), (9, 40, 1)):
        program = schedules.bpipe(ranks, micros, slices)
        for _ in range(6):
            seconds = {"F": float(rng.uniform(0.5, 2)), "B": float(rng.uniform(0.5, 3))}
            lag, copies = float(rng.uniform(0, 8)), {op: float(rng.uniform(0, 0.4)) for op in ("SE", "RE", "SL", "RL")}
            cost = {**seconds, **copies, "comm.guest": np.full((ranks, micros * slices), lag)}
            right = oracle(program, seconds, lag, copies)
            for one in (program, program.lower(True)):
                line = one.simulate(cost)
                assert line.makespan_s == one.makespan(cost) == right
                assert line.makespan_s >= line.lower_bound_s
                assert sum(line.bubbles.values()) == pytest.approx(line.idle_s)
                if right > one.makespan(seconds) + 1e-9:
                    assert line.bubbles["comm"] > 0


@pytest.mark.parametrize("ranks", [4, 5, 6, 7, 8, 9, 16])
def test_messages_of_up_to_a_forward_hide_behind_work(ranks):
    micros = 6 * ranks
    program, plain = schedules.bpipe(ranks, micros), schedules.one_f_one_b(ranks, micros)
    cost = {**NOMINAL, "comm.guest": np.full((ranks, micros), 1.0)}
    assert program.makespan(cost) == plain.makespan(NOMINAL)
    assert program.makespan({**cost, "comm.guest": np.full((ranks, micros), 50.0)}) > plain.makespan(NOMINAL)
    with pytest.raises(ValueError, match=r"comm.guest\[0\] is -1: finite and at least 0"):
        program.simulate({**NOMINAL, "comm.guest": np.full((ranks, micros), -1.0)})


# ---- the proof -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("old, new, message", [
    ("0SE2.0@3", "0SE2.0@3 0SE2.0@3", r"0SE2\.0@3: it is done twice"),
    ("0SE2.0@3", "", r"0RL2\.0@3: its SE must come before it"),
    ("0F2.0 0SE2.0@3", "0SE2.0@3 0F2.0", r"every forward of its micro-batch must come before it"),
    ("0B0.0 0F4.0", "0B0.0 0SE0.0@3 0F4.0", r"0SE0\.0@3: its backward has begun already"),
    ("0RL2.0@3 ", "", r"0B2\.0: what it reads is on rank 3: its RL must come before it"),
    ("0RL2.0@3", "0RL2.0@3 0RL2.0@3", r"0RL2\.0@3: it is done twice"),
    ("0RL4.0@3 0B3.0 0B4.0", "0B3.0 0B4.0 0RL4.0@3", r"0B4\.0: what it reads is on rank 3"),
    ("0SE2.0@3", "0SE2.0@2", r"those of stage 0 are on rank 2"),
    ("0SE4.0@3", "0SE4.0@2", r"0SE4\.0@2: a stage keeps its guests on one rank: those of stage 0 are on rank 3"),
    ("0SE2.0@3", "0SE2.0@0", r"its peer is 0: another rank would be right"),
    ("0RE2.0@0 ", "", r"0SL2\.0@0: its RE must come before it"),
    ("0RE2.0@0 0RE4.0@0", "0RE4.0@0 0RE2.0@0", r"0RE4\.0@0: messages of a pair of ranks .* rank 0 sends 0SE2\.0@3 next"),
    ("0RE2.0@0", "0RE2.0@1", r"stage 0 lives on rank 0, not on rank 1"),
    ("0SL4.0@0 ", "", r"its SL on rank 3 is missing"),
    ("0SL2.0@0", "0SL2.0@0 0SL2.0@0", r"0SL2\.0@0: it is done twice"),
    ("0RE4.0@0 3F0.0", "3F0.0 3B0.0 3F1.0 3B1.0 3F2.0 3B2.0 3F3.0 0SL2.0@0 3B3.0 3F4.0 0RE4.0@0", "done twice|must come before"),
    ("0RE2.0@0 0RE4.0@0 3F0.0", "0RE2.0@0 0RE4.0@0 3F0.0 0RE3.0@0", r"0RE3\.0@0: its SE on rank 0 is missing"),
    ("0SE2.0@3", "0SE2.0", r"`@` and a rank behind"),
    ("1F2.0", "1F2.0 1SE2.0@1", r"its peer is 1"),
])
def test_a_program_that_breaks_a_rule_is_refused(old, new, message):
    assert SMALL.count(old) >= 1
    with pytest.raises((tp.ScheduleError, ValueError), match=message):
        tp.Program.parse(SMALL.replace(old, new, 1)).check()


def test_what_is_sent_from_leaves_before_it_is_evicted():
    text = str(schedules.bpipe(4, 6).lower(True))
    with pytest.raises(tp.ScheduleError, match="its SF must come before it, which sends from what is evicted"):
        tp.Program.parse(text.replace("0SF2.0@1 0SE2.0@3", "0SE2.0@3 0SF2.0@1")).check()


def test_a_host_that_gives_back_too_late_is_a_deadlock():
    """Rank 3 would give micro-batch 2 back behind a backward that needs, by way of rank 0, what comes after."""
    late = SMALL.replace("0SL2.0@0 3B3.0 3F4.0 3B4.0 0SL4.0@0 3F5.0 3B5.0", "3B3.0 3F4.0 3B4.0 3F5.0 3B5.0 0SL2.0@0 0SL4.0@0")
    tp.Program.parse(late).check()
    stuck = SMALL.replace("0RE2.0@0 0RE4.0@0 3F0.0", "0RE2.0@0 3F0.0").replace("3F3.0 0SL2.0@0", "3F3.0 3B3.0 3F4.0 3B4.0 0SL2.0@0")
    stuck = stuck.replace("0SL2.0@0 3B3.0 3F4.0 3B4.0 0SL4.0@0", "0SL2.0@0 0RE4.0@0 0SL4.0@0")
    with pytest.raises(tp.ScheduleError, match=r"deadlock with rendezvous sends: .*0SE4\.0@3 waits for rank 3"):
        tp.Program.parse(stuck).check()
    early = SMALL.replace("0RE4.0@0 3F0.0", "0RE4.0@0 0SL2.0@0 3F0.0").replace("3F3.0 0SL2.0@0", "3F3.0")
    with pytest.raises(tp.ScheduleError, match="deadlock"):
        tp.Program.parse(early).check()


def test_a_guest_s_slot_is_not_rewritten_in_use():
    lowered = schedules.bpipe(4, 6).lower(True)
    lists = [lowered.instructions(rank).copy() for rank in range(4)]
    assert tp.Program.from_instructions(lists, keep_slots=True) == lowered
    hosting = [k for k, row in enumerate(lists[3]) if schedules.OPS[row["op"]] in ("RE", "SL") and row["micro"] == 4]
    lists[3]["slot"][hosting] = 0
    with pytest.raises(tp.ScheduleError, match="guest slot 0 of stage 0 is rewritten while micro-batch 2 still uses it"):
        tp.Program.from_instructions(lists, keep_slots=True).check()
    lists = [lowered.instructions(rank).copy() for rank in range(4)]
    back = [k for k, row in enumerate(lists[0]) if row["micro"] == 4 and schedules.OPS[row["op"]] in ("RL", "B")]
    lists[0]["slot"][back] = lists[0]["slot"][[k for k, row in enumerate(lists[0]) if row["micro"] == 3][0]]
    with pytest.raises(tp.ScheduleError, match=r"slot \d of stage 0"):
        tp.Program.from_instructions(lists, keep_slots=True).check()


def allowed(lists, home):
    """Whether a compute-only program whose F and B are in order treats its guests right: counts, order at both ends, progress."""
    ops = {op: [(r, k, v, q, s, peer) for r, line in enumerate(lists) for k, (o, v, q, s, peer) in enumerate(line) if o == op]
           for op in ("SE", "RE", "SL", "RL")}
    if any(s for rows in ops.values() for *_, s, _ in rows):
        return False
    keys = {op: [(v, q) for _, _, v, q, _, _ in rows] for op, rows in ops.items()}
    if any(sorted(keys[op]) != sorted(set(keys["SE"])) for op in keys):
        return False
    hosts = {v: peer for *_, v, _, _, peer in reversed(ops["SE"])}
    for op, rows in ops.items():
        for r, _, v, _, _, peer in rows:
            here, other = (home[v], hosts[v]) if op in ("SE", "RL") else (hosts[v], home[v])
            if r != here or peer != other or here == other:
                return False
    for (v, q), host in ((key, hosts[key[0]]) for key in keys["SE"]):
        mine = [(o, k) for k, (o, w, p, _, _) in enumerate(lists[home[v]]) if (w, p) == (v, q)]
        order = "".join(o[0] if o in ("F", "B") else {"SE": "x", "RL": "y"}[o] for o, _ in mine)
        if not re.fullmatch(r"F+xyB+", order):
            return False
        theirs = [o for o, w, p, _, _ in lists[host] if (w, p) == (v, q) and o in ("RE", "SL")]
        if theirs != ["RE", "SL"]:
            return False
    for a, b in (("SE", "RE"), ("SL", "RL")):
        for source, target in itertools.permutations(range(len(lists)), 2):
            if [key for key, row in zip(keys[a], ops[a], strict=True) if row[0] == source and row[5] == target] != \
                    [key for key, row in zip(keys[b], ops[b], strict=True) if row[0] == target and row[5] == source]:
                return False
    return runs_through(lists)


def runs_through(lists):
    at, done, stages = [0] * len(lists), set(), 1 + max(v for line in lists for _, v, *_ in line)
    while True:
        moved = False
        for r, line in enumerate(lists):
            while at[r] < len(line):
                op, v, q, s, _ = line[at[r]]
                needs = {"F": {("F", v - 1, q, s)} if v else set(), "B": {("B", v + 1, q, s)} if v < stages - 1 else set(),
                         "SE": {("RE", v, q, 0)}, "SL": {("SE", v, q, 0), ("RL", v, q, 0)}}.get(op, set())
                if op == "B" and ("RL", v, q, 0) in done:
                    needs = needs | {("SL", v, q, 0)}
                if not needs <= done:
                    break
                done.add((op, v, q, s))
                at[r] += 1
                moved = True
        if not moved:
            return all(at[r] == len(line) for r, line in enumerate(lists))


def test_the_proof_refuses_what_an_oracle_refuses():
    """Guests moved, lost, doubled and sent elsewhere at random."""
    rng = np.random.default_rng(11)
    seen = {True: 0, False: 0}
    for _ in range(3000):
        ranks, micros = int(rng.integers(4, 8)), int(rng.integers(5, 9))
        program = schedules.bpipe(ranks, micros, int(rng.integers(1, 3)))
        lists = words(program)
        for _ in range(int(rng.integers(1, 3))):
            r = int(rng.choice([r for r in range(ranks) if any(len(w[0]) > 1 for w in lists[r])] or [0]))
            where = [k for k, w in enumerate(lists[r]) if len(w[0]) > 1]
            if not where:
                continue
            k = int(rng.choice(where))
            op, v, q, s, peer = lists[r].pop(k)
            way = int(rng.integers(0, 10))
            if way < 6:                                        # a few places on, or back
                lists[r].insert(max(0, min(len(lists[r]), k + int(rng.integers(-4, 5)))), (op, v, q, s, peer))
            elif way == 6:
                lists[r][k:k] = [(op, v, q, s, peer)] * 2
            elif way == 7:
                lists[r].insert(k, (op, v, q, s, int(rng.integers(0, ranks))))
            elif way == 8:
                lists[r].insert(k, (op, v, int(rng.integers(0, micros)), s, peer))
        text = "".join(" ".join(f"{v}{op}{q}.{s}" + (f"@{peer}" if peer >= 0 else "") for op, v, q, s, peer in line) + "\n"
                       for line in lists)
        right = allowed(lists, list(range(ranks)))
        seen[right] += 1
        try:
            tp.Program.parse(text).check()
        except tp.ScheduleError:
            assert not right, text
        else:
            assert right, text
            tp.Program.parse(text).lower(True).check()
    assert min(seen.values()) > 300, seen


# ---- the run -------------------------------------------------------------------------------------------------------------

def case(rng, ranks, micros, **shape):
    """A model with a block a stage at least, tokens, a partition and a slicing of one sequence a micro-batch or more."""
    n_layer = int(rng.integers(-(-(ranks - 2) // 2), ranks + 1))
    batch, seq_len = micros + int(rng.integers(0, 4)), int(rng.integers(3, 14))
    model, params, tokens = problem(batch, seq_len, n_layer=n_layer, **shape)
    bounds = sorted(rng.choice(np.arange(1, model.num_blocks), ranks - 1, replace=False).tolist())
    sizes = np.ones(micros, int)
    np.add.at(sizes, rng.integers(0, micros, batch - micros), 1)
    slicing = []
    for size in sizes.tolist():
        cuts = sorted(rng.choice(np.arange(1, seq_len), int(rng.integers(0, 3)), replace=False).tolist())
        slicing.append((size, np.diff([0, *cuts, seq_len]).tolist()))
    return model, params, tokens, partition_of(model, bounds), slicing


@pytest.mark.parametrize("seed", range(24))
def test_a_run_has_the_bits_of_one_device_and_the_predicted_memory(seed):
    rng = np.random.default_rng(4000 + seed)
    ranks, micros = int(rng.integers(4, 9)), int(rng.integers(4, 13))
    model, params, tokens, partition, slicing = case(rng, ranks, micros, tie_weights=bool(rng.integers(0, 2)))
    program = schedules.bpipe(ranks, micros, [len(lengths) for _, lengths in slicing])
    if rng.integers(0, 2):
        program = program.split({"F": 1.0, "I": 1.0, "W": 1.0}, pending=int(rng.integers(0, 3)))
    again = tuple(bool(rng.integers(0, 2)) and block.kind in ("attention", "ffn") for block in model.blocks) \
        if rng.integers(0, 3) == 0 else ()
    program = saving(program, model, partition, Savings(again)).lower(model.tie_weights)
    assert ("SE" in program.counts) == (micros > most(ranks))
    threads = int(rng.integers(1, 3))
    same(alone(model, params, tokens), everything(model, partition, slicing, program, params, tokens, threads, recompute=again))
    predicted = rank_memory(model, partition, slicing, program, threads, recompute=again)

    def held(engine):
        opened = engine._core.memory()
        for step in (1, 2):
            engine.run(tokens, step=step, **HYPER)
        assert engine._core.memory() == opened             # a step allocates nothing
        return opened

    for rank, (bytes_, peak, _) in enumerate(ranks_do(model, partition, slicing, program, held, threads, params, recompute=again)):
        assert bytes_ == peak == predicted[rank]


def test_memory_moves_from_the_first_ranks_to_the_last():
    model, *_ = problem(16, 512, n_layer=6, n_embd=64, vocab_size=17)
    partition, slicing = partition_of(model, [2, 4, 6, 8, 10, 12, 13]), [(1, [512])] * 16
    plain, even = (rank_memory(model, partition, slicing, build(8, 16).lower(True))
                   for build in (schedules.one_f_one_b, schedules.bpipe))
    slot = 4 * 512 * 64 * (3 + 1 + 8)                          # qkv, o, h and g of a layer
    assert plain[1] - even[1] > 2 * slot and even[6] - plain[6] > 3 * slot
    assert max(plain) - max(even) > 2.5 * slot                 # their ratio depends on what the instruction set's kernels work in


def test_a_rank_that_fails_ends_those_that_wait_for_its_guests():
    model, params, tokens = problem(8, 12, n_layer=3)
    partition, slicing = partition_of(model, [2, 4, 6]), [(1, [12])] * 8
    program = schedules.bpipe(4, 8).lower(True)

    def work(engine):
        if engine._core.params()[0][0] == 3:
            raise RuntimeError("the host is gone")
        engine.run(tokens, step=1, **HYPER)

    with pytest.raises(RuntimeError, match="the host is gone"):
        ranks_do(model, partition, slicing, program, work, 1, params)


def test_a_message_of_another_size_is_named():
    """A peer whose plan is another one: its activations would not fit the room."""
    region = _core.Region.create(4, bytearray(int(a != b) for a in range(4) for b in range(4)), 1 << 13, 4096, False)
    model, params, tokens = problem(8, 12, n_layer=3)
    partition, slicing = partition_of(model, [2, 4, 6]), [(1, [12])] * 8
    program = schedules.bpipe(4, 8).lower(True)
    other = partition_of(model, [1, 4, 6])

    def one(rank):
        engine = RankEngine(model, other if rank == 3 else partition, slicing, program, rank, _core.Comm(region, rank, 20.0))
        engine.load(params)
        engine.run(tokens, step=1, **HYPER)

    with pytest.raises(ConnectionError, match=r"receive of the evicted activations of micro-batch \d slice 0 on stage 0 .*bytes"):
        in_threads(region, one)


def test_emulated_ranks_keep_the_predicted_times():
    """Real order and messages, work that is sleep: guests' messages take their seconds there, too."""
    program = schedules.bpipe(4, 8).lower(True)
    cost = {"F": 0.002, "B": 0.004, "OPT": 0.0, "SE": 0.0005, "RL": 0.0005, "comm.guest": np.full((4, 8), 0.01)}
    line, run = program.simulate(cost), tp.emulate(program, cost)
    assert line.makespan_s > program.simulate({"F": 0.002, "B": 0.004}).makespan_s + 0.004
    begun = {(op, v, q): (start, end) for _, op, v, q, _, start, end in run.trace}
    for row in line.intervals:
        key = schedules.OPS[row["op"]], int(row["stage"]), int(row["micro"])
        if key[0] in ("F", "B"):
            assert begun[key][0] == pytest.approx(float(row["start_s"]), abs=1e-5), key


def test_ranks_on_several_machines_keep_each_other_s_activations_too():
    """The same over TCP, here within one process: links of bounded buffers, and messages larger than these."""
    model, params, tokens = problem(8, 200, n_layer=3, n_embd=64, vocab_size=31)
    partition, slicing = partition_of(model, [3, 5, 6]), [(1, [120, 80])] * 8
    program = schedules.bpipe(4, 8, 2).lower(True)
    port, ranks, largest = free_port(), 4, gather_bytes(model)

    def one(rank):
        region = _core.Region.create(ranks, bytes(ranks * ranks), 0, largest, False)
        comm = _core.tcp_comm(region, rank, "127.0.0.1", port, neighbours(ranks, hosts=hosts(program)), largest, timeout_s=60.0,
                              meeting_s=30.0)
        engine = RankEngine(model, partition, slicing, program, rank, comm)
        engine.load(params)
        losses = [engine.run(tokens, step=step, **HYPER)[0] for step in (1, 2, 3)]
        return losses, engine.peak_memory_bytes, comm

    with ThreadPoolExecutor(ranks) as pool:
        ends = list(pool.map(one, range(ranks)))
    assert [peak for _, peak, _ in ends] == rank_memory(model, partition, slicing, program)

    def one_device(engine):
        return [engine.run(tokens, step=step, **HYPER)[0] for step in (1, 2, 3)]

    whole = schedules.gpipe(1, 8).split(pending=0).lower()
    assert [losses for losses, _, _ in ends] == 4 * ranks_do(model, partition_of(model, []), [(1, [200])] * 8, whole, one_device, 1,
                                                             params)


def test_it_is_1f1b_where_nothing_is_evicted():
    for ranks, micros in itertools.product(range(1, 10), range(1, 12)):
        assert evicts(ranks, micros) == (schedules.bpipe(ranks, micros) != schedules.one_f_one_b(ranks, micros))


def test_pairs_that_talk():
    pairs = np.frombuffer(bytes(neighbours(12, 2, 5, near=3, hosts={(0, 5): 7, (1, 4): 2})), np.uint8).reshape(12, 12)
    for first in (0, 6):
        assert pairs[first, first + 5] == pairs[first + 5, first] == pairs[first + 1, first + 4] == pairs[first + 4, first + 1] == 1
        assert pairs[first + 1, first + 2] == 3 and pairs[first + 1, first + 3] == 0
    assert pairs[2, 8] == 5 and hosts(schedules.bpipe(6, 9)) == {(0, 5): 3, (1, 4): 2} and hosts(schedules.gpipe(4, 4)) == {}


# ---- the plan ------------------------------------------------------------------------------------------------------------

MODEL = tp.GPTConfig(n_layer=6, n_head=4, n_embd=64, vocab_size=256, block_size=128)
CLUSTER = tp.Cluster(num_devices=4, memory_bytes=1e10)


def planned(schedule="bpipe", **request):
    return tp.plan(MODEL, CLUSTER, **{"batch": 12, "seq_len": 128, "planner": "uniform", "stages": 4, **request}, schedule=schedule)


def test_a_plan_keeps_activations_on_the_last_rank_where_the_first_one_s_memory_binds(tmp_path):
    even, plain = planned(), planned("1f1b")
    limit = (max(even.peak_memory_bytes) + max(plain.peak_memory_bytes)) // 2
    assert plain.peak_memory_bytes.index(max(plain.peak_memory_bytes)) == 0 and max(even.peak_memory_bytes) < limit
    with pytest.raises(tp.InfeasibleError, match="rank 0 needs"):
        planned("1f1b", memory_bytes=limit)
    plan = planned(memory_bytes=limit)
    assert plan.schedule == "bpipe" and plan.executable and plan == even
    assert re.search(r"rank 3 keeps activations of rank 0 until their backward: \d+ of 12 micro-batches, [\d.]+ .iB each",
                     plan.explain())
    plan.save(tmp_path / "plan.json")
    again = tp.Plan.load(tmp_path / "plan.json")
    assert again == plan and again.timeline().makespan_s == plan.step_time_s == plan.timeline().makespan_s
    assert plan.program.simulate(plan.durations).makespan_s == plan.step_time_s
    with pytest.raises(ValueError, match="Megatron has no schedule bpipe"):
        plan.to_megatron()
    with pytest.raises(tp.ScheduleError, match="no word for SE"):
        plan.to_torch_csv()


@pytest.mark.parametrize("planner", ["autopipe", "terapipe", "dapple", "vpipe", "auto"])
def test_planners_plan_it_by_its_name(planner):
    plan = planned(planner=planner, batch=8, granularity=32)
    assert plan.schedule == "bpipe" and plan.executable
    assert plan.step_time_s == plan.program.simulate(plan.durations).makespan_s >= plan.lower_bound_s
    assert plan.peak_memory_bytes == rank_memory(plan.model, plan.stages, plan.slicing, plan.program, recompute=plan.recompute)


def test_guests_bytes_are_those_of_the_messages():
    """What the plan times is what the engine sends: rank 3 of another plan says how many bytes it was sent."""
    plan, plain = planned(), planned("1f1b")
    sizes = guest_bytes(plan.model, plan.stages, plan.slicing)
    rooms = plan.peak_memory_bytes[3] - plain.peak_memory_bytes[3]
    assert slots(plan.program)[1].tolist() == [0, 0, 0, 2] and 0 < rooms - 2 * sizes[0] < 0.01 * sizes[0]   # and a table
    plan = planned(slicing=2)
    assert (plan.durations["comm.guest"][0, ::2] > 0).all() and not plan.durations["comm.guest"][:, 1::2].any()


@pytest.mark.parametrize("processes", [True, False])
def test_a_launch_trains_as_1f1b_does(processes, tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 6000).astype(np.int32)
    runs = {}
    for schedule in ("1f1b", "bpipe"):
        run = tp.launch(planned(schedule, slicing=2), data=data, steps=3, out=tmp_path / schedule, processes=processes,
                        checkpoint_every=3)
        losses, report = [record.loss for record in run], run.report()
        assert report.peak_memory_bytes == report.predicted_peak_memory_bytes
        runs[schedule] = losses, tp.load_checkpoint(tmp_path / schedule).params if processes else {}
    assert runs["1f1b"][0] == runs["bpipe"][0]
    for name, value in runs["1f1b"][1].items():
        assert np.array_equal(value, runs["bpipe"][1][name])


def test_a_rank_that_dies_ends_the_run_with_its_name(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 6000).astype(np.int32)
    run = tp.launch(planned(), data=data, steps=2000, checkpoint_every=0)
    next(iter(run))
    os.kill(run.pids[3], signal.SIGKILL)
    with pytest.raises(ConnectionError, match="rank 3"):
        run.wait()


def test_replicas_keep_activations_each_for_itself():
    cluster = tp.Cluster(num_devices=8, memory_bytes=1e10)
    data = np.random.default_rng(0).integers(0, 256, 6000).astype(np.int32)
    losses = []
    for schedule in ("1f1b", "bpipe"):
        plan = tp.plan(MODEL, cluster, batch=12, seq_len=64, planner="uniform", stages=4, data_parallel=2, schedule=schedule)
        run = tp.launch(plan, data=data, steps=2, processes=False, reproducible=False)
        losses.append([record.loss for record in run])
        report = run.report()
        assert report.peak_memory_bytes == report.predicted_peak_memory_bytes
    assert losses[0] == losses[1]


def test_the_command_line_simulates_it(capsys):
    assert main(["simulate", "--schedule", "bpipe", "--ranks", "8", "--micro-batches", "16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_s"] == pytest.approx(
        schedules.one_f_one_b(8, 16).makespan({"F": 1.0, "B": 2.0}))
