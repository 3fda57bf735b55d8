"""The judge in C: its programs and seconds against builders, passes and durations() by hand; its descent against enumeration."""
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from terapipe_c import InfeasibleError, InvalidValueError, _core, schedules
from terapipe_c.config import Cluster, GPTConfig
from terapipe_c.cost import CostModel, filled
from terapipe_c.engine import dimensions, saves_bytes
from terapipe_c.guests import BPIPE, guest_bytes
from terapipe_c.links import Links
from terapipe_c.planning.entrance import plan
from terapipe_c.planning.judge import NOTHING, ORDERS, SLIGHT, Candidate, Judge, Savings, possible, saving
from terapipe_c.planning.replicas import Replicas
from terapipe_c.planning.request import JOINT, ROUND, has_chunks
from terapipe_c.schedules import CHIMERA, LOOPED, PIPEDREAM, SLICED, ZERO_BUBBLE

NAMES = (*JOINT, BPIPE, CHIMERA)
CLUSTER = Cluster(num_devices=8, memory_bytes=16e9, link_latency_s=3e-6, link_bandwidth_Bps=1e8, peak_flops=1e10)


def costs_of(rng, model):
    """First principles with every price that a judge knows, or a wild table."""
    if rng.integers(2):
        base = CostModel.analytic(model, CLUSTER)
        more = {name: float(rng.uniform(0, 1e-4)) for name in ("overhead_s", "optimizer_stage_s", "optimizer_head_s", "latency_s")}
        waits = None
        if rng.integers(2):
            waits = float(rng.uniform(1e-6, 1e-4)), float(rng.integers(0, 40)), float(rng.uniform(0, 1e-4))
        return CostModel(base.curves, source="analytic", model=model, optimizer_param_s=1e-9, byte_s=1e-9, head_pass=waits,
                         copy_byte_s=float(rng.choice([0.0, 1e-9])), lent_byte_s=rng.choice([None, 0.0, 2e-9]), **more)
    table = rng.integers(1, 60, (9, 9)) * 1e-4
    return CostModel.from_table(table, table * rng.uniform(1, 2.5), granularity=4, latency_s=float(10 ** rng.uniform(-7, -4)))


def case(rng, name):
    """(judge, candidate) of a schedule by name; None where it has no such program."""
    model = GPTConfig(n_layer=int(rng.integers(1, 5)), n_head=2, n_embd=8, vocab_size=int(rng.integers(8, 99)), block_size=32,
                      tie_weights=bool(rng.integers(2)))
    chunks = next((c for c in rng.permutation([1, 2, 3, 4]).tolist() if has_chunks(name, c)), 2)
    ranks = int(rng.integers(1, 4 if name in JOINT else 9))
    micros = int(rng.integers(1, 7 if name in JOINT else 13))
    if ranks * chunks > model.num_blocks or possible(name, ranks, micros):
        return None
    far = tuple(rng.integers(0, 2, ranks).astype(bool).tolist()) if name not in JOINT and rng.integers(2) else ()
    links = Links(far, float(rng.uniform(0, 1e-2)), float(rng.uniform(0, 1e-5))) if any(far) else Links()
    ring = Replicas(int(rng.integers(1, 3)), 1e-5, 1e9, shards=ranks % 2 == 0, spared_param_s=3e-10)
    judge = Judge(model, costs_of(rng, model), ranks, chunks, None, ring, links=links)
    inner = rng.choice(np.arange(1, model.num_blocks), ranks * chunks - 1, replace=False)
    cut = tuple(itertools.pairwise([0, *sorted(inner.tolist()), model.num_blocks]))
    slicing = []
    for _ in range(micros):
        ends = sorted({*rng.integers(1, 8, 0 if name == SLICED else int(rng.integers(0, 4))).tolist(), 8})
        slicing.append((int(rng.integers(1, 4)), tuple(int(4 * n) for n in np.diff([0, *ends]))))
    if name == CHIMERA:
        slicing[micros // 2:] = slicing[:micros // 2]
    return judge, Candidate(0.0, name, cut, tuple(slicing), 0 if name == BPIPE else int(rng.integers(0, 3)))


def test_a_ring_of_replicas_sends_a_part_to_each_of_the_others_twice():
    """Of two replicas alone a part is half of all, and there and back once all."""
    ring = Replicas(4, 1e-3, 1e6, copy_byte_s=1e-7)
    assert ring.seconds(8e6) == pytest.approx(2 * 3 * (1e-3 + 2e6 * (1e-6 + 2e-7)))
    assert replace(ring, count=2, copies=2) != ring and replace(ring, count=2, copies=2).seconds(8e6) == ring.seconds(8e6)
    assert Replicas().seconds(8e6) == 0


def by_hand(judge, c):
    """The program and its seconds, out of the package's parts."""
    counts = [len(lengths) for _, lengths in c.slicing]
    d = judge.full_durations(c)
    mean = [float(d[phase].mean()) for phase in "FIW"]
    nominal = (1.0, *(max(1, round(16 * max(s, 1e-12) / mean[0])) / 16 for s in mean[1:]))
    k, m = judge.ranks, len(counts)
    builders = {"gpipe": schedules.gpipe, "1f1b": schedules.one_f_one_b, "seq1f1b": schedules.seq1f1b, "zb-h1": schedules.zb_h1,
                "zb-h2": schedules.zb_h2, "dualpipe-v": schedules.dualpipe_v, BPIPE: schedules.bpipe, CHIMERA: schedules.chimera}
    if c.schedule == SLICED:
        most = next((q for q, (size, _) in enumerate(c.slicing) if size < 2), m)
        made = [schedules.sliced_1f1b(k, m, split) for split in range(min(most, k - 1) + 1)]
        seconds = [p.makespan(d) for p in made]
        program = next(p for p, s in zip(made, seconds, strict=True) if s * (1 - 1e-9) <= min(seconds))
    elif c.schedule in ROUND:
        program = getattr(schedules, c.schedule.replace("-", "_"))(k, m, judge.chunks, counts)
    elif c.schedule == "zb-v":
        program = schedules.zb_v(k, m, counts, nominal)
    elif c.schedule == "hanayo":
        program = schedules.hanayo(k, m, judge.chunks // 2, counts, nominal)
    else:
        program = builders[c.schedule](k, m, counts)
    return completed(judge, c, program, d), d


def completed(judge, c, order, d, savings=None):
    """From the schedule alone to what the engine would run: of several micro-batches in looped stages the faster of two orders."""
    programs, seconds = [], []
    early = c.schedule == LOOPED and len(c.slicing) > 1
    for one in (order, order.reorder(d)) if early else (order,):
        waits = c.schedule in ZERO_BUBBLE or c.pending != 0
        keys = () if c.schedule == BPIPE else c.slicing
        program = saving(one, judge.model, c.partition, savings, keys, waits) if savings else one
        d = judge.timing(c._replace(savings=savings), program) if savings else d       # R of what this one does not keep
        program = program if c.schedule in ZERO_BUBBLE else program.split(d, pending=c.pending)
        programs.append(program.lower(tied=judge.model.tie_weights and judge.ranks * judge.chunks > 1))
        seconds.append(programs[-1].makespan(d))
    return programs[-1] if seconds[-1] < seconds[0] * SLIGHT else programs[0]


@pytest.mark.parametrize("name", NAMES)
def test_programs_and_seconds_are_those_of_the_parts(name):
    rng, seen = np.random.default_rng(NAMES.index(name)), 0
    for _ in range(120 if name in JOINT else 400):
        made = case(rng, name)
        if made is None:
            continue
        judge, c = made
        for _ in range(2):                                     # again: an order that is kept is the same
            found = judge.judge(c.schedule, c.partition, c.slicing, c.pending)
            program, durations = by_hand(judge, c)
            assert judge.lowered(found) == program and str(judge.lowered(found)) == str(program)
            assert judge.peak_bytes(found) == judge.peak(found, program)
            assert found.seconds == pytest.approx(program.simulate(durations).makespan_s, rel=1e-12)
            judge._seen.clear()
            judge._latest.clear()
        seen += 1
    assert seen > 30


@pytest.mark.parametrize("name", NAMES)
def test_what_a_plan_makes_again_is_judged_as_if_the_request_had_said_so(name):
    """A planner's own choice, a request's, and neither; and out of the package's parts."""
    rng, seen = np.random.default_rng(50 + NAMES.index(name)), 0
    for _ in range(60 if name in JOINT else 200):
        made = case(rng, name)
        if made is None:
            continue
        judge, c = made
        flags = tuple(block.kind in ("attention", "ffn") and bool(rng.integers(2)) for block in judge.model.blocks)
        own, said = Savings(flags if any(flags) else ()), Savings(tuple(block.kind == "ffn" for block in judge.model.blocks))

        def judged(of_request, of_plan, judge=judge, c=c):
            fresh = Judge(judge.model, judge.costs, judge.ranks, judge.chunks, None, judge.replicas, savings=of_request,
                          links=judge.links)
            found = fresh.judge(c.schedule, c.partition, c.slicing, c.pending, of_plan)
            assert fresh.peak_bytes(found) == fresh.peak(found, fresh.lowered(found))
            return found.seconds, fresh.lowered(found)

        if c.schedule != SLICED and any(flags):                # whose halves are chosen before anything is made again
            timing = judge.timing(c._replace(savings=own))
            program = completed(judge, c, _core.judge_compute(judge._judge, judge._given(c)), timing, own)
            assert judged(NOTHING, own) == (pytest.approx(program.makespan(timing), rel=1e-12), program)
        assert judged(NOTHING, own) == judged(own, own) == judged(said, own)
        assert judged(said, NOTHING) == judged(NOTHING, NOTHING)
        seen += any(flags)
    assert seen > 10


@pytest.mark.skipif(not any(Path(_core.__file__).parent.glob("_cuda.*.so")), reason="_cuda is not built (no nvcc here)")
def test_durations_of_replicas_and_of_a_gpu_are_those_of_costs():
    model = GPTConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=64, block_size=32, tie_weights=False)
    costs = CostModel.analytic(model, CLUSTER).on("cuda", "bf16")
    judge = Judge(model, costs, 2, 1, None, Replicas(4, 1e-5, 1e8))
    found = judge.judge("1f1b", ((0, 3), (3, 6)), ((2, (16, 16)), (1, (8, 24))))
    d = judge.full_durations(found)
    assert (d["W"][:, 1] == 0).all() and (d["W"][:, 0] > 0).all()       # weight gradients of a micro-batch with its first slice
    alone = filled(costs.timed(costs.stage_work(model, np.array([[1, 1, 1, 0], [0, 1, 1, 1]], np.int32)),
                               costs.slice_work(found.slicing), model))
    assert (d["OPT"] > alone["OPT"]).all()
    assert found.seconds == pytest.approx(judge.lowered(found).simulate(d).makespan_s, rel=1e-12)


def descend(judge, c, **change):
    given = {"unit": 4, "fixed_partition": False, "fixed_slicing": False, "budget": 30_000_000}
    return judge.descend(c, judge.limit, **(given | change))


def test_a_descent_never_ends_slower_and_keeps_what_is_fixed():
    rng, better, total = np.random.default_rng(1), 0, 0
    for name in NAMES:
        for _ in range(25):
            made = case(rng, name)
            if made is None:
                continue
            judge, c = made
            start = judge.judge(c.schedule, c.partition, c.slicing, c.pending)
            sliced = name == SLICED
            end = descend(judge, start, fixed_slicing=sliced)
            again = Judge(judge.model, judge.costs, judge.ranks, judge.chunks, None, judge.replicas, links=judge.links)
            assert end.seconds <= start.seconds and end == descend(again, start, fixed_slicing=sliced)
            assert end.seconds == again.judge(end.schedule, end.partition, end.slicing, end.pending).seconds
            assert [b for b, _ in end.slicing] == [b for b, _ in c.slicing]
            assert name != CHIMERA or end.slicing[len(c.slicing) // 2:] == end.slicing[:len(c.slicing) // 2]
            assert all(sum(lengths) == 32 and min(lengths) >= 4 and not any(n % 4 for n in lengths) for _, lengths in end.slicing)
            assert descend(again, start, budget=0) == start
            assert descend(again, start, fixed_partition=True, fixed_slicing=sliced).partition == start.partition
            assert descend(again, start, fixed_slicing=True).slicing == start.slicing
            beside = again.descend(end, None, unit=4, fixed_partition=False, fixed_slicing=sliced, budget=0, beside=1_000_000)
            assert beside.seconds <= end.seconds
            for by, ended in ((judge, end), (again, beside)):
                assert by.peak_bytes(ended) == by.peak(ended, by.lowered(ended))
            better += end.seconds < start.seconds
            total += 1
    print(f"{better} of {total} starts were improved")
    assert total > 90 and better > 0.6 * total


def test_a_descent_ends_near_the_best_of_all_cuts_and_slicings():
    """One pattern of slices for all micro-batches, every partition and composition by enumeration."""
    rng, met, total = np.random.default_rng(7), 0, 0
    inner = [some for r in range(4) for some in itertools.combinations((1, 2, 3), r)]
    compositions = [tuple(int(8 * n) for n in np.diff([0, *some, 4])) for some in inner]
    for _ in range(25):
        model = GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=16, block_size=32)
        table = rng.integers(1, 60, (5, 5)) * 1e-4
        judge = Judge(model, CostModel.from_table(table, 2 * table, granularity=8, latency_s=1e-5), 2, 1, None)
        micros = int(rng.integers(1, 4))
        every = [judge.judge("1f1b", ((0, at), (at, 6)), ((1, lengths),) * micros).seconds
                 for at in range(1, 6) for lengths in compositions]
        start = judge.judge("1f1b", ((0, 3), (3, 6)), ((1, (32,)),) * micros)
        end = judge.descend(start, None, unit=8, fixed_partition=False, fixed_slicing=False, budget=30_000_000, beside=1_000_000)
        assert min(every) <= end.seconds * (1 + 1e-12)
        met += end.seconds <= min(every) * (1 + 1e-9)
        total += 1
    print(f"{met} of {total} descents end at the optimum")
    assert met >= 0.6 * total


def test_a_descent_stays_within_the_memory_and_tells_the_nearest_miss():
    model = GPTConfig(n_layer=6, n_head=2, n_embd=16, vocab_size=64, block_size=64)
    costs = CostModel.analytic(model, CLUSTER)
    free = Judge(model, costs, 3, 1, None)
    start = free.judge("gpipe", ((0, 5), (5, 9), (9, 14)), ((1, (64,)),) * 4)
    peak = free.peak(start, free.lowered(start))
    tight = Judge(model, costs, 3, 1, max(peak))
    assert tight.fits(tight.judge(start.schedule, start.partition, start.slicing), tight.limit)
    end = tight.descend(start, tight.limit, unit=8, fixed_partition=False, fixed_slicing=False, budget=10_000_000)
    assert max(tight.peak(end, tight.lowered(end))) <= max(peak) and end.seconds <= start.seconds
    loose = Judge(model, costs, 3, 1, 10 ** 30)
    best = loose.descend(start, loose.limit, unit=8, fixed_partition=False, fixed_slicing=False, budget=10_000_000)
    assert best.seconds <= end.seconds
    if tight.shortest is not None:
        short, rank, needed = tight.shortest
        assert short > 0 and 0 <= rank < 3 and needed == max(peak) + short


@pytest.mark.parametrize("name", ["1f1b", BPIPE, CHIMERA])
def test_the_descent_counts_the_memory_that_the_engine_takes(name):
    """To the byte: what is the fullest rank's fits, and one byte less does not; guests and both copies of the model are in it."""
    rng, seen = np.random.default_rng(3), 0
    while seen < 20:
        made = case(rng, name)
        if made is None:
            continue
        judge, c = made
        start = judge.judge(c.schedule, c.partition, c.slicing, c.pending)
        peak = max(judge.peak_bytes(start))
        given = dict(unit=4, fixed_partition=True, fixed_slicing=True, budget=0)
        assert judge.descend(start, peak, **given) == start and judge.descend(start, peak - 1, **given) is None
        free = descend(judge, start)
        assert free is not None and judge.fits(free, max(judge.peak_bytes(free)))
        tight = judge.descend(start, peak, unit=4, fixed_partition=False, fixed_slicing=False, budget=3_000_000)
        assert tight is not None and max(judge.peak_bytes(tight)) <= peak and tight.seconds <= start.seconds
        seen += 1


def test_a_guest_is_as_large_as_the_engine_sends_it():
    """What a slot is more in a stage's memory, but for the output, which has left; the layout aligns both."""
    rng = np.random.default_rng(4)
    for _ in range(30):
        model = GPTConfig(n_layer=3, n_head=2, n_embd=2 * int(rng.integers(1, 9)), vocab_size=31, block_size=64)
        first, end = sorted(rng.choice(np.arange(model.num_blocks + 1), 2, replace=False).tolist())
        batch, tokens = int(rng.integers(1, 4)), int(rng.integers(1, 65))
        recompute = tuple(b.kind in ("attention", "ffn") and bool(rng.integers(2)) for b in model.blocks)
        given = dimensions(model), (tokens, batch, [(batch, [tokens])]), first, end
        one, two = (_core.stage_memory(*given, slots, 1, None, None, saves_bytes(recompute)) for slots in (1, 2))
        output = 0 if end == model.num_blocks else 4 * model.n_embd * batch * tokens
        sizes = guest_bytes(model, [(first, end)], [(1, [tokens]), (batch, [tokens])], recompute)
        assert 0 <= two - one - output - sizes[0] < 64 and sizes[0] % 64 == 0
    with pytest.raises(ValueError, match=r"blocks \[2, 2\)"):
        _core.guest_bytes(dimensions(model), 2, 2, 1, 8)


def test_a_guest_that_is_remembered_is_one_of_as_many_sequences():
    """One judge, and micro-batches of other sizes than before, on a link of which guests take most."""
    model = GPTConfig(n_layer=3, n_head=2, n_embd=8, vocab_size=16, block_size=32)
    slow = replace(CLUSTER, link_bandwidth_Bps=1e3)
    judge, found = Judge(model, CostModel.analytic(model, slow), 4, 1, None), {}
    for batch, tokens in ((1, 32), (3, 32), (1, 16), (1, 32)):
        c = judge.judge(BPIPE, ((0, 5), (5, 6), (6, 7), (7, 8)), ((batch, (tokens,)),) * 8)
        program, durations = by_hand(judge, c)
        assert c.seconds == pytest.approx(program.simulate(durations).makespan_s, rel=1e-12)
        found[batch, tokens] = c.seconds
        judge._seen.clear()
    assert found[3, 32] > 2 * found[1, 32] > 2 * found[1, 16]


def test_the_core_refuses_what_does_not_fit_together():
    model = GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=16, block_size=32)
    judge = Judge(model, CostModel.analytic(model, CLUSTER), 2, 1, None)
    one, arrays = np.array([1], np.int32), dict(boundary=[0, 3, 6], batches=[1], slices=[2], lengths=[16, 16])

    def run(order="1f1b", pending=1, **change):
        order = ORDERS.get(order, order)
        given = [np.array(v, np.int32) for v in {**arrays, **change}.values()]
        return _core.judge_run(judge._judge, (order, pending, *given))

    assert run()[1] > 0
    for change, word in ((dict(boundary=[0, 6, 6]), "stage 1 has no block"), (dict(boundary=[0, 3, 5]), "cover blocks"),
                         (dict(boundary=[0, 6]), "fit together"), (dict(lengths=[16]), "fit together"),
                         (dict(lengths=[32, 0]), "slice 0.1"), (dict(batches=[0]), "0 sequences"), (dict(order=7), "order is 7"),
                         (dict(order=15), "order is 15"), (dict(order=PIPEDREAM), "pending is 1"),
                         (dict(pending=-1), "pending is -1"),
                         (dict(order=SLICED), "has 2 slices"), (dict(order="zb-v"), "stages"),
                         (dict(slices=[0], lengths=[]), "0 slices"), (dict(order=BPIPE), "pending is 1"),
                         (dict(order=CHIMERA), "as many of them in both directions"),
                         (dict(order=CHIMERA, batches=[1, 2], slices=[1, 1], lengths=[32, 32]), "micro-batches 0 and 1 differ"),
                         (dict(order=CHIMERA, batches=[1, 1], slices=[1, 1], lengths=[32, 16]), "micro-batches 0 and 1 differ")):
        with pytest.raises(ValueError, match=word):
            run(**change)
    with pytest.raises(ValueError, match="unit is 0"):
        given = (1, 1, *(np.array(v, np.int32) for v in arrays.values()))
        _core.judge_descend(judge._judge, given, 1.0, -1, 0, False, False, 10, 0)
    with pytest.raises(ValueError, match="chunks for 6 blocks"):
        Judge(model, judge.costs, 7, 1, None).judge("gpipe", ((0, 6),), ((1, (32,)),))
    with pytest.raises(ValueError, match="PyCapsule"):
        _core.judge_run(one, (1, 1, one, one, one, one))
    assert NOTHING == judge.judge("1f1b", ((0, 3), (3, 6)), ((1, (16, 16)),)).savings


def test_a_start_over_the_limit_is_mended_or_refused():
    model = GPTConfig(n_layer=6, n_head=2, n_embd=16, vocab_size=64, block_size=64)
    free = Judge(model, CostModel.analytic(model, CLUSTER), 3, 1, None)
    given = dict(unit=8, fixed_partition=False, fixed_slicing=False, budget=20_000_000)
    lopsided = free.judge("gpipe", ((0, 12), (12, 13), (13, 14)), ((1, (64,)),) * 4)
    even = free.judge("gpipe", ((0, 5), (5, 9), (9, 14)), ((1, (64,)),) * 4)
    limit = max(free.peak_bytes(even))
    assert max(free.peak_bytes(lopsided)) > limit
    end = free.descend(lopsided, limit, **given)
    assert end is not None and max(free.peak_bytes(end)) <= limit and end.seconds < lopsided.seconds
    assert free.descend(lopsided, limit, **{**given, "fixed_partition": True, "fixed_slicing": True}) is None
    assert free.descend(even, 1000, **given) is None


def test_more_memory_never_hurts_a_small_request():
    """Every limit at which the plan could change, and some between: the exact peaks of the plans of lower limits."""
    rng, steps, infeasible = np.random.default_rng(11), 0, 0
    for _ in range(4):
        model = GPTConfig(n_layer=int(rng.integers(2, 7)), n_head=2, n_embd=16, vocab_size=64, block_size=32)
        cluster = Cluster(num_devices=4, memory_bytes=1e12, link_latency_s=1e-6, link_bandwidth_Bps=1e10, peak_flops=1e9)
        request = dict(batch=int(rng.integers(1, 6)), seq_len=32, granularity=8, planner="terapipe", executable=True)
        if rng.integers(2):
            request["stages"] = int(rng.integers(2, 5))
        made, before = plan(model, cluster, **request), 0.0
        for _ in range(40):
            peak = max(made.peak_memory_bytes)
            assert made.step_time_s >= before
            before = made.step_time_s
            same = plan(model, cluster, memory_bytes=peak, **request)       # what fits a limit is found within it
            assert same.step_time_s == made.step_time_s
            steps += 1
            try:
                made = plan(model, cluster, memory_bytes=min(peak - 1, int(peak * rng.uniform(0.99, 1.0))), **request)
            except InfeasibleError:
                infeasible += 1
                break
    print(f"{steps} steps down, {infeasible} to where nothing fits")
    assert steps > 15 and infeasible == 4


@pytest.mark.parametrize("planner", ["terapipe", "auto"])
def test_a_finer_grid_never_hurts(planner):
    """Every grid that divides the one before it, with memory and without a limit that binds."""
    rng, steps, finer = np.random.default_rng(5), 0, 0
    for i in range(6 if planner == "terapipe" else 2):
        tokens = [64, 96, 60][i % 3] if planner == "terapipe" else 32
        model = GPTConfig(n_layer=int(rng.integers(2, 9)), n_head=2, n_embd=16, vocab_size=64, block_size=tokens)
        cluster = Cluster(num_devices=4, memory_bytes=1e12, link_latency_s=1e-6, link_bandwidth_Bps=1e10, peak_flops=1e9)
        request = dict(batch=int(rng.integers(1, 5)), seq_len=tokens, planner=planner, executable=True,
                       stages=int(rng.integers(2, 5)), schedule=["auto", "gpipe", "1f1b", "seq1f1b"][int(rng.integers(4))])
        whole = plan(model, cluster, granularity=tokens, **request)
        for part in (None, 0.8):
            limit = {} if part is None else {"memory_bytes": part * max(whole.peak_memory_bytes)}
            seconds: dict[int, float] = {}
            for unit in (n for n in range(tokens, 3, -1) if tokens % n == 0):
                try:
                    seconds[unit] = plan(model, cluster, granularity=unit, **request, **limit).step_time_s
                except InfeasibleError:
                    seconds[unit] = float("inf")
                least = min(seconds[n] for n in seconds if n % unit == 0)
                assert seconds[unit] <= least * (1 + 1e-10), (i, part, unit, seconds)
                steps, finer = steps + 1, finer + (seconds[unit] < seconds[tokens])
    print(f"{steps} grids, {finer} of them better than whole sequences")
    assert finer > steps / 4


def test_a_grid_is_searched_as_if_it_had_been_asked_for():
    """Whichever others are: where 4 is asked for, 36 and 12 are searched before 8, which refines neither. What those cost and
    remembered was once counted against it, and a finer grid's plan was slower."""
    model = GPTConfig(n_layer=8, n_head=2, n_embd=256, vocab_size=64, block_size=144)
    cluster = Cluster(num_devices=8, memory_bytes=52098969, link_latency_s=1e-6, link_bandwidth_Bps=1e10, peak_flops=1e9)
    seconds: dict[int, float] = {}
    for unit in (72, 48, 36, 24, 16, 12, 8, 6, 4):
        seconds[unit] = plan(model, cluster, batch=5, seq_len=144, planner="terapipe", executable=True, stages=5, schedule="1f1b",
                             granularity=unit).step_time_s
        assert seconds[unit] <= min(seconds[n] for n in seconds if n % unit == 0) * (1 + 1e-9), seconds


def _costs(by_context, backward):
    s, c = np.arange(9)[:, None], np.arange(9)[None]
    forward = 1e-3 * (1 + s * (1 + by_context * c))
    return CostModel.from_table(forward, backward * forward, granularity=8, latency_s=1e-3)


def test_the_stages_that_are_chosen_are_the_fastest_and_a_finer_grid_chooses_no_slower_ones():
    """A search of many ticks ended the choice, though what was left was faster, and a finer grid has more ticks."""
    drawn, rng = [], np.random.default_rng(3)
    drawn.append((_costs(0.0, 2.0), dict(n_layer=3), 8, dict(batch=1, seq_len=32, schedule="seq1f1b"), None))
    drawn.append((_costs(0.1, 0.5), dict(n_layer=6, n_head=3, bias=False), 6, dict(batch=2, seq_len=16, schedule="hanayo"),
                  2309488))
    # of 14 blocks in two chunks a rank seven ranks are possible: halves of these are no halves of eight
    drawn.append((_costs(0.0, 0.5), dict(n_layer=6), 8, dict(batch=2, seq_len=16, schedule="interleaved"), None))
    for _ in range(2):
        names = ("auto", "1f1b", "zb-v", "interleaved", "seq1f1b")
        request = dict(batch=int(rng.integers(1, 4)), seq_len=16, schedule=str(rng.choice(names)))
        drawn.append((_costs(rng.uniform(0, 1), rng.uniform(0.5, 2)), dict(n_layer=int(rng.integers(3, 7))), 4, request, None))
    for i, (costs, model, devices, request, limit) in enumerate(drawn):
        model = GPTConfig(**{**dict(n_head=1, n_embd=24, vocab_size=257, block_size=64, tie_weights=False), **model})
        given = dict(model=model, cluster=Cluster(num_devices=devices), costs=costs, planner="terapipe", memory_bytes=limit,
                     **request)
        seconds = {unit: plan(granularity=unit, **given).step_time_s for unit in (4, 2, 1)}
        assert seconds[1] <= seconds[2] * (1 + 2e-9) and seconds[2] <= seconds[4] * (1 + 2e-9), (i, seconds)
        for ranks in (devices >> k for k in range(devices.bit_length())):
            try:
                alone = plan(granularity=1, stages=ranks, **given).step_time_s
            except (InfeasibleError, InvalidValueError):
                continue
            assert seconds[1] <= alone * (1 + 2e-9), (i, ranks, seconds, alone)


def test_a_judge_that_has_timed_other_slices_times_these_as_ever():
    """More slices of one length, and more micro-batches of one, than it remembers: places are shared."""
    model = GPTConfig(n_layer=1, n_head=2, n_embd=8, vocab_size=16, block_size=2048)
    judge = Judge(model, CostModel.analytic(model, CLUSTER), 1, 1, None)
    for slicing in (((1, (1,) * 2048),), ((1, (2,) * 1024),), tuple((b, (4,)) for b in range(1, 1100)), ((1, (1,) * 2048),)):
        c = judge.judge("1f1b", ((0, 4),), slicing, 0)
        assert c.seconds == pytest.approx(judge.lowered(c).makespan(judge.timing(c)), rel=1e-12)
        judge._seen.clear()
        judge._results.runs.clear()


@pytest.mark.parametrize("name", ["zb-v", "hanayo", BPIPE])
def test_the_work_that_is_counted_for_a_candidate_does_not_depend_on_those_before(name):
    """Orders that take long to find are kept, and the first candidate that had one was charged for it: a search, which counts work,
    went another way where another grid had been judged before."""
    model = GPTConfig(n_layer=8, n_head=2, n_embd=16, vocab_size=99, block_size=64)
    ranks, chunks = 4, 1 if name == BPIPE else 2
    cuts = [tuple(itertools.pairwise([0, *range(1 + more, ranks * chunks + more), model.num_blocks])) for more in (0, 1)]
    slicing = ((1, (32, 32)),) * 8
    ticks = []
    for order in (cuts, cuts[::-1]):
        judge = Judge(model, CostModel.analytic(model, CLUSTER), ranks, chunks, None)
        made = {cut: judge.ticks(judge.judge(name, cut, slicing, 0)) for cut in order}
        ticks.append([made[cut] for cut in cuts])
    assert ticks[0] == ticks[1]


def test_an_order_that_is_kept_is_that_of_a_like_candidate():
    """Of the same schedule, sizes of micro-batches, and seconds of I and W beside F's: each candidate differs in one of them from
    the one before, and a judge that has seen those finds the program that a new one does."""
    model = GPTConfig(n_layer=6, n_head=2, n_embd=16, vocab_size=16, block_size=32)
    plain, bent = ([(float(n), n, 0, (n + more * (n % 16)) * 1e-3) for n in (8, 16, 24, 32)] for more in (0, 6))
    late = plain + [(float(n), n, c, (n + 4 * c) * 1e-3) for n in (8, 16) for c in (8, 16)]   # seconds that rise with the context
    costs = CostModel.from_measurements({"attention": {"F": plain, "I": late, "W": bent}, "ffn": {p: plain for p in "FIW"}})
    even, short, long, one = (1, (16, 16)), (1, (8, 24)), (1, (24, 8)), (1, (32,))
    asked = [("zb-v", (short,) * 6), ("zb-v", (long,) * 6), ("zb-v", (short, long) * 3), ("zb-v", (even,) * 6),
             ("hanayo", (even,) * 6), ("zb-v", (even,) * 5), ("zb-v", (one, even) * 3), ("zb-v", (even, one) * 3)]  # fmt: skip
    cut = tuple(itertools.pairwise([0, 3, 5, 7, 9, 11, model.num_blocks]))
    judge, programs = Judge(model, costs, 3, 2, None), []
    for name, slicing in asked:
        new = Judge(model, costs, 3, 2, None)
        found, right = (x.judge(name, cut, slicing, 0) for x in (judge, new))
        assert found.seconds == right.seconds and judge.lowered(found) == new.lowered(right), (name, slicing)
        programs.append(str(new.lowered(right)))
    assert all(one != other for one, other in itertools.pairwise(programs))
