"""Chimera on the engine: the bits of two replicas that take the same micro-batches, memory to the byte, runs that go on."""

import json
import os
import signal

import numpy as np
import pytest
from test_engine import merged, partition_of, problem, ranks_do, region_for, same, step
from test_replicas import torchrun_gives

import terapipe_c as tp
from terapipe_c import _core, schedules
from terapipe_c.engine import RankEngine, in_threads, rank_memory
from terapipe_c.job import neighbours


def replicas_do(model, partition, slicing, program, replicas, tokens, params, **saves):
    """(losses, evaluation, {kind name: array}) of so many replicas of a program, each on its own sequences."""
    ranks, share = program.num_ranks, len(tokens) // replicas
    region = region_for(model, partition, slicing, program, replicas, **saves)

    def one(rank):
        replica, own = divmod(rank, ranks)
        engine = RankEngine(model, partition, slicing, program, own, _core.Comm(region, rank, 60.0), replicas=replicas,
                            replica=replica, **saves)
        engine.load(params)
        return step(engine, tokens[replica * share:(replica + 1) * share])

    return merged(in_threads(region, one), params)


# slicings of one copy
SLICINGS = [[(1, [9])] * 2, [(2, [9])], [(1, [4, 5]), (2, [2, 6, 1]), (1, [9])]]


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("ranks, cuts", [(2, [3]), (2, [1]), (4, [1, 3, 4])])
def test_the_bits_of_two_replicas(tie, ranks, cuts):
    count = 0
    for slicing in SLICINGS:
        share = sum(batch for batch, _ in slicing)
        model, params, tokens = problem(2 * share, 9, seed=ranks, tie_weights=tie)
        partition, slices = partition_of(model, cuts), [len(lengths) for _, lengths in slicing]
        plain = schedules.one_f_one_b(ranks, len(slicing), slices).split(pending=0).lower(tie)
        right = replicas_do(model, partition, slicing, plain, 2, tokens, params)
        base = schedules.chimera(ranks, 2 * len(slicing), 2 * slices)
        for program in (base, base.split(pending=0), base.split(pending=2)):
            program = program.lower(tie)
            parts = ranks_do(model, partition, 2 * slicing, program, lambda engine, tokens=tokens: step(engine, tokens),
                             1 + count % 2, params)
            same(merged(parts, params), right)
            count += 1
    assert count == 9


def test_both_copies_hold_the_same_weights_after_every_update():
    model, params, tokens = problem(4, 9)
    program = schedules.chimera(2, 4).lower(True)

    def work(engine):
        for i in range(3):
            engine.run(tokens, step=i + 1, lr=1e-2)
        return {(stage, name): engine._core.read(stage, i, "value") for stage, i, name in engine._held}

    held = {}
    for part in ranks_do(model, partition_of(model, [3]), [(1, [9])] * 4, program, work, params=params):
        held |= part
    assert {stage for stage, _ in held} == {0, 1, 2, 3}
    for (stage, name), value in held.items():
        assert np.array_equal(value, held[(stage + 2) % 4, name]), (stage, name)
        assert not np.array_equal(value, params[name]) or not value.any()


def test_chimera_in_two_replicas_is_four():
    model, params, tokens = problem(8, 9)
    partition = partition_of(model, [3])
    plain = schedules.one_f_one_b(2, 2).split(pending=0).lower(True)
    right = replicas_do(model, partition, [(1, [9])] * 2, plain, 4, tokens, params)
    program = schedules.chimera(2, 4).split(pending=1).lower(True)
    same(replicas_do(model, partition, [(1, [9])] * 4, program, 2, tokens, params), right)


@pytest.mark.parametrize("way", ["recompute", "swap"])
def test_what_saves_memory_gives_the_same_bits(way, tmp_path):
    model, params, tokens = problem(4, 9)
    partition, slicing = partition_of(model, [1, 3, 4]), [(1, [4, 5])] * 2
    right = replicas_do(model, partition, slicing, schedules.one_f_one_b(4, 2, 2).split(pending=0).lower(True), 2, tokens, params)
    kinds = [block.kind for block in model.blocks]
    flags = [kind in ("attention", "ffn") for kind in kinds]
    per_stage = bytes(1 if any(kinds[i] == "attention" for i in range(a, e)) else 2 if any(flags[a:e]) else 0 for a, e in partition)
    again, away = (per_stage * 2, bytes(8)) if way == "recompute" else (bytes(8), per_stage * 2)
    program = schedules.chimera(4, 4, 2).split(pending=0).save_memory(again, away).lower(True)
    saves = {"recompute": flags} if way == "recompute" else {"swap": [int(flag) for flag in flags], "store": str(tmp_path)}
    parts = ranks_do(model, partition, 2 * slicing, program, lambda engine: step(engine, tokens), 1, params, **saves)
    same(merged(parts, params), right)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_memory_is_predicted_to_the_byte(tie):
    """Of a rank: two stages' parameters, gradients and moments, and what the two copies hold in flight."""
    model, params, tokens = problem(4, 9, tie_weights=tie)
    for ranks, cuts in ((2, [2]), (4, [1, 2, 4])):
        program = schedules.chimera(ranks, 4).split(pending=1).lower(tie)
        partition, slicing = partition_of(model, cuts), [(1, [9])] * 4

        def work(engine):
            before = engine.allocations
            engine.run(tokens, step=1, lr=1e-3)
            assert engine.allocations == before
            return engine.peak_memory_bytes

        held = ranks_do(model, partition, slicing, program, work, params=params)
        assert held == rank_memory(model, partition, slicing, program)
        plain = rank_memory(model, partition, slicing[:2], schedules.one_f_one_b(ranks, 2).split(pending=1).lower(tie), replicas=2)
        weights = [16 * sum(model.block_params(block.kind) for block in model.blocks[a:e]) for a, e in partition]
        weights[0] -= 12 * tie * model.vocab_size * model.n_embd     # the head's stage has its gradient and moments
        weights[-1] += 16 * tie * model.vocab_size * model.n_embd
        for rank, size in enumerate(held):
            assert size > plain[rank] + weights[ranks - 1 - rank]


def test_what_does_not_fit_together_is_refused():
    model, params, tokens = problem(4, 9)
    program, partition = schedules.chimera(2, 4).lower(True), partition_of(model, [3])
    with pytest.raises(ValueError, match=r"micro-batch 0 is \(1, \[9\]\) and micro-batch 2 of the other copy"):
        rank_memory(model, partition, [(1, [9]), (1, [9]), (2, [9]), (1, [9])], program)
    with pytest.raises(ValueError, match="boundaries: 3 would be right"):
        rank_memory(model, [*partition, *partition], [(1, [9])] * 4, program)
    with pytest.raises(ValueError, match=r"4 micro-batches for two copies of the model, the slicing 1"):
        rank_memory(model, partition, [(1, [9])] * 2, program)
    bare = schedules.chimera(2, 4).lower(False)
    with pytest.raises(ValueError, match="0 AR, but the model's head is tied"):
        ranks_do(model, partition, [(1, [9])] * 4, bare, lambda engine: None)


# ---- plans and runs -----------------------------------------------------------------------------------------------------

MODEL = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=61, block_size=24)
UNTIED = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=61, block_size=24, tie_weights=False, bias=False)
DATA = (np.random.default_rng(3).integers(0, 61, 4000)).astype(np.uint16)
OPTIONS = {"lr": 1e-2, "lr_schedule": "constant", "progress": False, "seed": 5, "reproducible": False}
# (ranks, slicing of one copy of 3 sequences)
WAYS = [(2, [(1, [24])] * 3), (4, [(1, [24])] * 3), (2, [(1, [20, 4]), (2, [1, 9, 14])]), (4, [(3, [12, 12])])]


def chimera(ways=WAYS[0], model=MODEL, replicas=1, **options):
    ranks, slicing = ways
    cluster = tp.Cluster(num_devices=ranks * replicas, peak_flops=1e12)
    return tp.plan(model, cluster, batch=6 * replicas, seq_len=24, schedule="chimera", stages=ranks, slicing=2 * slicing,
                   data_parallel=replicas, **options)


def replicated(replicas, model=MODEL, stages=1, slicing=None, **options):
    cluster = tp.Cluster(num_devices=stages * replicas, peak_flops=1e12)
    return tp.plan(model, cluster, batch=3 * replicas, seq_len=24, planner="uniform", schedule="1f1b", stages=stages,
                   data_parallel=replicas, slicing=slicing or [(3, [24])], **options)


def trained(plan, steps=3, **options):
    run = tp.launch(plan, DATA, steps, **{**OPTIONS, **options}).wait()
    report = run.report()
    assert report.peak_memory_bytes == report.predicted_peak_memory_bytes == list(plan.peak_memory_bytes) * plan.data_parallel
    return run


@pytest.mark.parametrize("model", [MODEL, UNTIED], ids=["tied", "untied"])
def test_runs_have_the_bits_of_two_replicas(model, tmp_path):
    """Threads and processes; losses, norms, evaluations and weights."""
    right = trained(replicated(2, model), processes=False, out=tmp_path / "right", eval_every=3, checkpoint_every=3)
    wanted = [(r.loss, r.grad_norm, r.eval_loss) for r in right.history]
    weights = tp.load_checkpoint(tmp_path / "right", optimizer=True)
    for i, way in enumerate(WAYS):
        run = trained(chimera(way, model), processes=i in (1, 2), out=tmp_path / str(i), eval_every=3, checkpoint_every=3)
        assert [(r.loss, r.grad_norm, r.eval_loss) for r in run.history] == wanted, way
        found = tp.load_checkpoint(tmp_path / str(i), optimizer=True)
        moments = [(found.optimizer[kind], weights.optimizer[kind]) for kind in weights.optimizer]
        for mine, theirs in ((found.params, weights.params), *moments):
            assert mine.keys() == theirs.keys() and all((mine[name] == theirs[name]).all() for name in theirs), way
    line = run.timeline()
    assert line.program is not None and line.program.copies == 2 and line.bubbles.keys() == run.plan.bubbles.keys()


def test_two_replicas_of_it_are_four():
    right = trained(replicated(4), processes=False)
    run = trained(chimera(WAYS[1], replicas=2), processes=False)
    assert [(r.loss, r.grad_norm) for r in run.history] == [(r.loss, r.grad_norm) for r in right.history]


def test_a_run_goes_on_under_other_plans(tmp_path):
    on = {"out": tmp_path / "run", "resume": True, "processes": False, **OPTIONS}
    whole = trained(replicated(2), steps=9, processes=False)
    trained(chimera(), processes=False, out=tmp_path / "run", checkpoint_every=3)
    for steps, plan in ((6, replicated(2, stages=2, slicing=[(1, [11, 13])] * 3)), (9, chimera(WAYS[1]))):
        rest = tp.launch(plan, DATA, steps, checkpoint_every=3, **on).wait()
        assert [r.loss for r in rest.history] == [r.loss for r in whole.history[steps - 3:steps]]
    alone = tp.plan(MODEL, tp.Cluster.local(), batch=6, seq_len=24, planner="uniform", stages=2)
    last = tp.launch(alone, DATA, 10, **{**on, "reproducible": True}).wait()
    assert [r.step for r in last.history] == [9] and np.isfinite(last.history[0].loss)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(10))


def test_recomputation_in_both_copies():
    plan = chimera(WAYS[1], recompute="full")
    code = np.concatenate([plan.program.instructions(r) for r in range(4)])
    again = code["stage"][code["op"] == schedules.OPS.index("R")].tolist()
    assert {stage: again.count(stage) for stage in again} == {v: 3 for v in range(8) if v % 4 in {s % 4 for s in again}} and again
    plain = trained(replicated(2), processes=False)
    assert [r.loss for r in trained(plan, processes=False).history] == [r.loss for r in plain.history]


def test_one_device_s_bits_are_not_promised():
    plan = chimera()
    assert not plan.executable and plan.why_not_at_all == "" and "reproducible=False" in plan.why_not_executable
    with pytest.raises(tp.Error, match=r"two copies of the model, .*launch\(\.\.\., reproducible=False\)"):
        tp.launch(plan, DATA, 1, progress=False)
    with pytest.raises(ValueError, match="executable=True plans one copy of the model"):
        chimera(executable=True)


def test_one_device_but_for_rounding():
    """The same sequences and the same mean gradient as without copies."""
    plan = tp.plan(MODEL, tp.Cluster.local(), batch=6, seq_len=24, planner="uniform", stages=1)
    alone = tp.launch(plan, DATA, 3, processes=False, **OPTIONS).wait()
    for a, b in zip(alone.history, trained(chimera(), processes=False).history, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=2e-6) and b.grad_norm == pytest.approx(a.grad_norm, rel=2e-5)


def test_an_order_of_ones_own():
    plan = chimera((2, [(1, [24])] * 2 + [(1, [24])]))
    own = plan.with_program(plan.program.strip())
    assert own.schedule == "own" and own.copies == 2 and own.program == plan.program
    losses = [[r.loss for r in trained(one, processes=False).history] for one in (own, plan)]
    assert losses[0] == losses[1]
    with pytest.raises(ValueError, match="program has 1 copy of the model: 2, as the plan"):
        plan.with_program(schedules.one_f_one_b(2, 6))


def test_it_is_emulated():
    plan = chimera(WAYS[1])
    made = tp.emulate(plan)
    assert made.num_ranks == 4 and made.timeline().program.copies == 2
    assert made.predicted_step_time_s == pytest.approx(plan.step_time_s)


def test_under_another_launcher(tmp_path):
    """Opposite ranks, which no neighbours are, meet over TCP too."""
    plan = chimera(WAYS[1])
    plan.save(tmp_path / "plan.json")
    data = tmp_path / "tokens.bin"
    DATA.tofile(data)
    wanted = trained(plan, steps=4, processes=False, seed=0, lr=1e-3, eval_every=2, eval_batches=2)
    torchrun_gives(wanted, tmp_path, data)


def test_opposite_ranks_have_rings():
    pairs = np.frombuffer(bytes(neighbours(6, 1, 1, 2)), np.uint8).reshape(6, 6)
    assert (pairs == pairs.T).all() and not pairs.diagonal().any()
    assert [row.nonzero()[0].tolist() for row in pairs[:3]] == [[1, 5], [0, 2, 4], [1, 3]]
    pairs = np.frombuffer(bytes(neighbours(12, 2, 3, 2)), np.uint8).reshape(12, 12)
    assert (pairs == pairs.T).all() and pairs[1].tolist() == [1, 0, 1, 0, 3, 0, 0, 3, 0, 0, 3, 0]


def test_a_rank_dies():
    run = tp.launch(chimera(WAYS[1]), DATA, 10_000, **OPTIONS)
    next(iter(run))
    os.kill(run.pids[2], signal.SIGKILL)
    with pytest.raises(tp.Error, match=r"rank 2 was killed by signal 9 \(SIGKILL\)"):
        run.wait()
    assert not run.running
