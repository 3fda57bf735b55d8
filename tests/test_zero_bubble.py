"""Schedules whose backward is apart from the start (ZB-H1, ZB-H2, ZB-V), and PipeDream's stream: closed forms, bounds, bits."""

import random

import numpy as np
import pytest
from sched_oracle import execute, makespan
from test_engine import alone, everything, partition_of, problem, ranks_do, same

import terapipe_c as tp
from terapipe_c import schedules
from terapipe_c.engine import rank_memory

EQUAL = {"F": 1.0, "I": 1.0, "W": 1.0}


def spans(line, ranks):
    """Seconds from a rank's first start to its last end, less its work."""
    rows = line.intervals
    return [float(mine["end_s"].max() - mine["start_s"].min() - (mine["end_s"] - mine["start_s"]).sum())
            for mine in (rows[rows["rank"] == r] for r in range(ranks))]  # fmt: skip


@pytest.mark.parametrize("ranks", range(1, 17))
def test_closed_forms_of_zb_h1(ranks):
    for micros in (ranks, 2 * ranks, 3 * ranks + 1):
        program = schedules.zb_h1(ranks, micros)
        program.check(canonical=True)
        for f, i, w in ((1.0, 1.0, 1.0), (2.0, 2.0, 2.0)):
            line = program.simulate({"F": f, "I": i, "W": w}, activation_bytes=1)
            assert line.makespan_s * ranks - line.busy_s.sum() == ranks * (ranks - 1) * (f + i - w)
            assert line.peak_memory_bytes.tolist() == [ranks] * ranks


@pytest.mark.parametrize("ranks", range(1, 17))
def test_closed_forms_of_zb_h2(ranks):
    for micros in (2 * ranks - 1, 2 * ranks, 3 * ranks + 1):
        program = schedules.zb_h2(ranks, micros)
        program.check(canonical=True)
        line = program.simulate(EQUAL, activation_bytes=1)
        assert line.makespan_s == line.lower_bound_s == 3 * micros + ranks - 1
        assert spans(line, ranks) == [0.0] * ranks
        assert line.peak_memory_bytes.tolist() == [2 * ranks - 1] * ranks


@pytest.mark.parametrize("ranks", range(1, 17))
def test_closed_forms_of_zb_v(ranks):
    for micros in (2 * ranks - 1, 2 * ranks, 3 * ranks, 4 * ranks + 1):
        program = schedules.zb_v(ranks, micros)
        program.check(canonical=True)
        assert program.rank_of == (*range(ranks), *reversed(range(ranks)))
        line = program.simulate(EQUAL, activation_bytes=1)
        assert line.makespan_s == 6 * micros + ranks - 1
        assert spans(line, ranks) == [0.0] * ranks
        assert line.peak_memory_bytes.max() == 2 * ranks
    for micros in range(1, 2 * ranks - 1, 3):  # too few for the closed rule
        line = schedules.zb_v(ranks, micros).simulate(EQUAL, activation_bytes=1)
        assert line.lower_bound_s <= line.makespan_s <= 1.25 * max(6 * micros + ranks - 1, 4 * ranks + 1)
        assert line.peak_memory_bytes.max() <= 2 * ranks


@pytest.mark.parametrize("ranks", range(1, 13))
def test_closed_forms_of_dualpipe_v(ranks):
    for micros in (2 * ranks, 2 * ranks + 1, 4 * ranks):
        program = schedules.dualpipe_v(ranks, micros)
        program.check(canonical=True)
        line = program.simulate({**EQUAL, "B": 2.0}, activation_bytes=1)
        assert line.makespan_s == 6 * micros + ranks - 1
        assert line.peak_memory_bytes.tolist() == [2 * ranks + 1] * ranks
    with pytest.raises(ValueError, match=f"micro-batches is {2 * ranks - 1} with {ranks} ranks: DualPipeV needs"):
        schedules.dualpipe_v(ranks, 2 * ranks - 1)


def test_zb_v_for_other_times():
    """Never worse than the pattern for equal times; the same program for times scaled by a power of two."""
    rng = np.random.default_rng(3)
    better = 0
    for _ in range(60):
        ranks, micros = int(rng.integers(1, 6)), int(rng.integers(1, 14))
        f, i, w = (float(x) for x in rng.integers(1, 9, 3))
        program = schedules.zb_v(ranks, micros, seconds=(f, i, w))
        program.check(canonical=True)
        execute(program)
        line = program.simulate({"F": f, "I": i, "W": w}, activation_bytes=1)
        assert line.peak_memory_bytes.max() <= 2 * ranks and line.lower_bound_s <= line.makespan_s
        assert program == schedules.zb_v(ranks, micros, seconds=(4 * f, 4 * i, 4 * w))
        if micros >= 2 * ranks - 1:
            plain = schedules.zb_v(ranks, micros).simulate({"F": f, "I": i, "W": w}).makespan_s
            assert line.makespan_s <= plain
            better += line.makespan_s < plain
    assert better > 5
    for bad in ((0.0, 1.0, 1.0), (1.0, -1.0, 1.0), (1.0, float("nan"), 1.0), (1.0, 1.0, float("inf")), (1.0, 1.0, 1e301)):
        with pytest.raises(ValueError, match="nominal seconds .* above 0 and below 1e300 would be right"):
            schedules.zb_v(2, 4, seconds=bad)
    for bad in (None, (1.0, 2.0), (1.0, "x", 2.0)):
        with pytest.raises(TypeError, match="three numbers"):
            schedules.zb_v(2, 4, seconds=bad)


def test_every_zero_bubble_program_is_proved_and_executes():
    for program in (schedules.dualpipe_v(2, 4, [1, 3, 2, 1]), schedules.dualpipe_v(3, 6, 2), schedules.dualpipe_v(1, 3),
                    schedules.hanayo(3, 4, 2, [2, 1, 3, 1]), schedules.hanayo(2, 5, 1, 2), schedules.hanayo(1, 2, 3)):
        for one in (program, program.lower(), program.lower(tied=True)):
            one.check(canonical=True)
            assert execute(one) and tp.Program.parse(str(one)) == one
        assert program.lower(tied=True).strip() == program
    count = 0
    for build in (schedules.zb_h1, schedules.zb_h2, schedules.zb_v):
        for ranks, micros, slices in ((1, 1, 1), (2, 1, 2), (2, 5, 1), (3, 2, [3, 1]), (4, 9, 2), (5, 3, [1, 2, 3])):
            program = build(ranks, micros, slices)
            for one in (program, program.lower(), program.lower(tied=True)):
                one.check(canonical=True)
                assert execute(one)
                assert tp.Program.parse(str(one)) == one
            assert program.lower(tied=True).strip() == program
            units = sum(program.slices)
            assert program.counts == {op: units * program.num_stages for op in ("F", "I", "W")}
            right = makespan(program, lambda op, v, q, m: {"F": 2.0, "I": 3.0, "W": 1.0}.get(op, 0.0), lambda v, q, m: 0.5)
            assert program.simulate({"F": 2.0, "I": 3.0, "W": 1.0}, comm_s=0.5).makespan_s == right
            count += 1
    assert count == 18


def hanayo(ranks, micros, waves):
    line = schedules.hanayo(ranks, micros, waves).simulate({"F": 0.5 / waves, "B": 1.0 / waves}, activation_bytes=1)
    return line.makespan_s, max(line.peak_memory_bytes), line.lower_bound_s


def test_hanayo_places_waves_and_holds_what_1f1b_holds():
    assert schedules.hanayo(3, 2, 2).rank_of == (0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0)
    count = 0
    for ranks in (1, 2, 3, 4, 8):
        for micros in (1, ranks, 2 * ranks - 1, 2 * ranks, 5 * ranks):
            plain = schedules.one_f_one_b(ranks, micros).simulate({"F": 1.0, "B": 2.0}).makespan_s
            for waves in (1, 2, 4):
                seconds, held, bound = hanayo(ranks, micros, waves)
                assert bound * (1 - 1e-12) <= seconds and held <= 2 * waves * ranks
                if waves == 1 or micros <= ranks:
                    assert seconds <= plain * (1 + 1e-12)
                count += 1
    assert count == 75
    assert [hanayo(4, 4, w)[0] for w in (1, 2, 4)] == [18.0, 16.0, 15.0]           # 1F1B: 21
    assert [hanayo(4, m, 1)[0] for m in (7, 16, 32)] == [27.0, 54.0, 102.0]        # 1F1B: 30, 57, 105
    assert str(schedules.hanayo(2, 2, 1)) == (
        "0F0.0 0F1.0 3F0.0 3B0.0 3F1.0 3B1.0 0B0.0 0B1.0\n1F0.0 2F0.0 1F1.0 2F1.0 2B0.0 1B0.0 2B1.0 1B1.0\n"
    )
    for bad in (0, 1 << 20):
        with pytest.raises(ValueError, match="waves is"):
            schedules.hanayo(2, 4, bad)
    with pytest.raises(TypeError, match="waves is"):
        schedules.hanayo(2, 4, 1.5)


def test_zero_bubble_schedules_beat_1f1b():
    for ranks in (2, 4, 8):
        micros = 3 * ranks
        plain = schedules.one_f_one_b(ranks, micros).simulate({"F": 2.0, "B": 4.0}).makespan_s
        h1 = schedules.zb_h1(ranks, micros).simulate({"F": 2.0, "I": 2.0, "W": 2.0}).makespan_s
        v = schedules.zb_v(ranks, micros).simulate(EQUAL).makespan_s
        assert v < h1 < plain


def test_golden_zero_bubble_programs():
    assert str(schedules.zb_h1(2, 3)) == (
        "0F0.0 0F1.0 0I0.0 0W0.0 0F2.0 0I1.0 0W1.0 0I2.0 0W2.0\n1F0.0 1I0.0 1F1.0 1I1.0 1W0.0 1F2.0 1I2.0 1W1.0 1W2.0\n"
    )
    assert str(schedules.zb_v(2, 3)) == (
        "0F0.0 0F1.0 0F2.0 3F0.0 3I0.0 3W0.0 3F1.0 3I1.0 3W1.0 0I0.0 0W0.0 3F2.0 3I2.0 3W2.0 0I1.0 0W1.0 0I2.0 0W2.0\n"
        "1F0.0 2F0.0 1F1.0 2F1.0 2I0.0 2W0.0 1F2.0 1I0.0 1W0.0 2F2.0 2I1.0 2W1.0 1I1.0 2I2.0 1I2.0 1W1.0 2W2.0 1W2.0\n"
    )


def test_pipedreams_period_is_the_busiest_rank():
    rng = np.random.default_rng(0)
    for _ in range(200):
        ranks = int(rng.integers(1, 7))
        f, b = rng.integers(1, 30, (2, ranks)).astype(float)
        short, long = (schedules.pipedream(ranks, k * ranks).simulate({"F": f, "B": b}).makespan_s for k in (12, 18))
        assert (long - short) / (6 * ranks) == (f + b).max()


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_they_train_with_the_bits_of_one_device(tie):
    """V placement puts both ends of the model on rank 0: embedding and head meet there."""
    model, params, tokens = problem(5, 9, tie_weights=tie)
    right = alone(model, params, tokens)
    count = 0
    for build, chunks in ((schedules.zb_h1, 1), (schedules.zb_h2, 1), (schedules.zb_v, 2)):
        for ranks in (1, 2, 3):
            for slicing in ([(1, [9])] * 5, [(2, [4, 5]), (1, [9]), (2, [1, 8])], [(3, [9]), (2, [9])]):
                program = build(ranks, len(slicing), [len(lengths) for _, lengths in slicing]).lower(tie)
                cuts = sorted(random.Random(count).sample(range(1, 6), ranks * chunks - 1))
                partition = partition_of(model, cuts)
                same(everything(model, partition, slicing, program, params, tokens, threads=1 + count % 2), right)
                count += 1
    assert count == 27
    program = schedules.dualpipe_v(2, 5, [1, 2, 1, 1, 3]).lower(tie)
    slicing = [(1, [9]), (1, [4, 5]), (1, [9]), (1, [9]), (1, [2, 6, 1])]
    same(everything(model, partition_of(model, [1, 3, 4]), slicing, program, params, tokens), right)
    for waves, cuts in ((1, [1, 3, 4]), (2, [1, 2, 3, 4, 5])):
        program = schedules.hanayo(2 if waves == 1 else 1, 5, waves if waves == 1 else 3, [1, 2, 1, 1, 3]).lower(tie)
        same(everything(model, partition_of(model, cuts), slicing, program, params, tokens), right)


def test_memory_is_predicted_to_the_byte():
    model, params, tokens = problem(5, 9)
    for program in (schedules.zb_h1(3, 5), schedules.zb_h2(3, 5), schedules.zb_v(3, 5)):
        program = program.lower(True)
        partition = partition_of(model, [2, 4] if program.num_stages == 3 else [1, 2, 3, 4, 5])
        slicing = [(1, [9])] * 5

        def work(engine):
            engine.run(tokens, step=1, lr=1e-3)
            return engine.peak_memory_bytes

        held = ranks_do(model, partition, slicing, program, work, params=params)
        assert held == rank_memory(model, partition, slicing, program)


@pytest.mark.parametrize("name", ["LoopedBFS_2x2x3"])
def test_the_engine_refuses_sums_in_another_order(name):
    import torch_schedules as made

    model, _, _ = problem(3, 8)
    program = tp.Program.from_csv((made.GOLDEN / f"{name}.csv").read_text()).lower(True)
    with pytest.raises(tp.ScheduleError, match="micro-batches ascending"):
        ranks_do(model, partition_of(model, [1, 2, 3]), [(1, [8])] * 3, program, lambda engine: None)


@pytest.mark.parametrize("one", [("ZBVZeroBubble", 2, 2, 3), ("InterleavedZeroBubble", 2, 2, 4), ("DualPipeV", 2, 2, 4)])
def test_torchs_schedules_train_with_the_bits_of_one_device(one):
    import torch_schedules as made

    micros = one[3]
    model, params, tokens = problem(micros, 8)
    right = alone(model, params, tokens)
    program = tp.Program.from_csv(made.path_of(*one).read_text()).lower(True)
    same(everything(model, partition_of(model, [1, 3, 5]), [(1, [8])] * micros, program, params, tokens), right)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_plans_of_zero_bubble_schedules_train_as_one_device_does(schedule):
    model = tp.GPTConfig(n_layer=3, n_head=2, n_embd=16, vocab_size=32, block_size=24)
    data = np.random.default_rng(5).integers(0, 32, 2000).astype(np.int32)
    losses = []
    for name, stages, slicing in (("gpipe", 1, None), (schedule, 3, None), (schedule, 2, 2), (schedule, 2, [(2, [24])] * 2)):
        plan = tp.plan(model, tp.Cluster.local(), batch=4, seq_len=24, planner="terapipe", schedule=name, stages=stages,
                       slicing=slicing)
        assert plan.schedule == name and plan.executable
        run = tp.launch(plan, data=data, steps=3, processes=False, progress=False)
        losses.append([record.loss for record in run])
        assert run.report().peak_memory_bytes == list(plan.peak_memory_bytes)
    assert losses[1:] == losses[:1] * 3
