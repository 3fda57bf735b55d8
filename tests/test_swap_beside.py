"""Swaps that a thread of each rank makes beside its work: planned, emulated and run."""
import dataclasses
import gc
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from test_engine import HYPER, partition_of, problem, ranks_do
from test_swap import TOKENS, evenly, trained

import terapipe_c as tp
from terapipe_c.backend import choose
from terapipe_c.planning.block_bytes import saved_bytes
from terapipe_c.planning.judge import Savings, saving
from terapipe_c.schedules import OPS

MODEL = tp.GPTConfig(n_layer=16, n_head=4, n_embd=128, vocab_size=256, block_size=256)
WIDE = tp.Cluster(num_devices=8, memory_bytes=1e12)
REQUEST = {"batch": 32, "seq_len": 256, "costs": tp.CostModel.analytic(MODEL, WIDE), "stages": 8, "schedule": "1f1b"}


def beside(plan, ahead, which=("attention", "ffn")):
    """The same plan, of which every such block swaps beside the work."""
    swap = [bytes_ if block.kind in which else 0
            for block, bytes_ in zip(plan.model.blocks, saved_bytes(plan.model, plan.slicing, choose("cpu", None)), strict=True)]
    compute = saving(plan.program.strip(), plan.model, tuple(plan.stages), Savings(swap=tuple(swap), ahead=ahead))
    program = compute.lower(plan.model.tie_weights and plan.ranks > 1)
    program.check(canonical=True)
    line = program.simulate(plan.durations)
    peak = tp.engine.rank_memory(plan.model, plan.stages, plan.slicing, program, swap=swap, replicas=plan.data_parallel)
    return dataclasses.replace(plan, program=program, swap=swap, step_time_s=line.makespan_s, bubbles=dict(line.bubbles),
                               busy_s=[float(x) for x in line.busy_s], peak_memory_bytes=peak)


def copiers():
    """Threads of this process that copy."""
    gc.collect()                                               # an engine that an error's traceback still names
    return sum(Path(f"/proc/self/task/{task}/comm").read_text().strip() == "tp-copier" for task in os.listdir("/proc/self/task"))


def begun(count):
    """Whether so many threads copy, once they have had the time to begin: each names itself, and on a busy machine later."""
    for _ in range(3000):
        if copiers() >= count:
            break
        time.sleep(0.01)
    return copiers() == count


def test_the_pass_brings_back_as_far_ahead_as_it_is_told():
    program = tp.schedules.one_f_one_b(2, 3)
    flags = bytes(2), bytes((1, 2))
    late, behind, before = (str(program.save_memory(*flags, ahead, beside=True)).splitlines() for ahead in (0, 1, 2))
    assert late == ["0F0.0 0SO0.0& 0F1.0 0SO1.0& 0SI0.0& 0B0.0 0F2.0 0SO2.0& 0SI1.0& 0B1.0 0SI2.0& 0B2.0",
                    "1F0.0 1SO0.0& 1SI0.0& 1B0.0 1F1.0 1SO1.0& 1SI1.0& 1B1.0 1F2.0 1SO2.0& 1SI2.0& 1B2.0"]
    assert behind[0] == "0F0.0 0SO0.0& 0F1.0 0SO1.0& 0SI0.0& 0B0.0 0SI1.0& 0F2.0 0SO2.0& 0B1.0 0SI2.0& 0B2.0"
    assert before[0] == "0F0.0 0SO0.0& 0F1.0 0SO1.0& 0SI0.0& 0SI1.0& 0B0.0 0F2.0 0SO2.0& 0SI2.0& 0B1.0 0B2.0"
    assert behind[1] == before[1] == late[1]                   # never before its SO
    two = program.save_memory(*flags, 3, beside=True)
    assert str(two).splitlines()[0] == "0F0.0 0SO0.0&& 0F1.0 0SO1.0&& 0SI0.0& 0SI1.0& 0B0.0 0F2.0 0SO2.0&& 0SI2.0& 0B1.0 0B2.0"
    assert tp.Program.parse(str(two)) == two and "&" not in str(program.save_memory(*flags, 3))
    with pytest.raises(ValueError, match="ahead is 4: 0 to 3 would be right"):
        program.save_memory(*flags, 4)
    with pytest.raises(tp.ScheduleError, match=r"swaps are made beside the work \(&\) all or none"):
        tp.Program.parse("0F0.0 0SO0.0& 0SI0.0 0B0.0").check()
    with pytest.raises(tp.ScheduleError, match=r"swaps leave two places \(&&\) all or none"):
        tp.Program.parse("0F0.0 0SO0.0&& 0F1.0 0SO1.0& 0SI0.0& 0B0.0 0SI1.0& 0B1.0").check()


def test_copies_are_hidden_behind_work_one_after_another():
    """By hand: two micro-batches on one rank, copies of 3 seconds beside forwards of 1 and backwards of 2."""
    cost = {"F": 1.0, "B": 2.0, "SO": 3.0, "SI": 3.0}
    line = tp.Program.parse("0F0.0 0SO0.0& 0F1.0 0SO1.0& 0SI0.0& 0B0.0 0SI1.0& 0B1.0").simulate(cost)
    # out 1 to 4, so F1 from 4 to 5; out 5 to 8, in 8 to 11, B0 11 to 13, in 13 to 16, B1 16 to 18
    assert line.makespan_s == 18.0 and line.busy_s[0] == 6.0 and line.bubbles["swap"] == 12.0 == line.idle_s
    rows = line.intervals
    assert rows["start_s"][np.isin(rows["op"], [OPS.index("SO"), OPS.index("SI")])].tolist() == [1.0, 5.0, 8.0, 13.0]
    ahead = tp.Program.parse("0F0.0 0SO0.0& 0F1.0 0SO1.0& 0SI0.0& 0SI1.0& 0B0.0 0B1.0").simulate(cost)
    assert ahead.makespan_s == 16.0 and ahead.bubbles["swap"] == 10.0
    assert line.lower_bound_s == ahead.lower_bound_s == 12.0   # the copier's own work
    two = tp.Program.parse("0F0.0 0SO0.0&& 0F1.0 0SO1.0&& 0SI0.0& 0SI1.0& 0B0.0 0B1.0").lower()
    # out 1 to 4 and, made from 1 to 2 in the other place, 4 to 7, in 7 to 10 and 10 to 13, B0 10 to 12, B1 13 to 15
    assert two.simulate(cost).makespan_s == 15.0 == two.makespan(cost)
    alone = tp.Program.parse("0F0.0 0SO0.0 0F1.0 0SO1.0 0SI0.0 0B0.0 0SI1.0 0B1.0").simulate(cost)
    assert alone.makespan_s == 18.0 == alone.lower_bound_s and alone.work_s == 18.0 and line.work_s == 6.0


def test_a_plan_hides_what_it_swaps_and_says_so():
    """Of 60 % of the memory: at full speed, where a rank that makes the copies itself loses time, and making again does."""
    free = tp.plan(MODEL, WIDE, planner="uniform", **REQUEST)
    tight = dataclasses.replace(WIDE, memory_bytes=0.6 * max(free.peak_memory_bytes), host_bandwidth_Bps=2e9)
    waits = tp.plan(MODEL, tight, planner="dawnpiper", **REQUEST)
    hides = tp.plan(MODEL, dataclasses.replace(tight, swaps_beside=True), planner="dawnpiper", **REQUEST)
    assert waits.step_time_s > 1.03 * free.step_time_s and hides.step_time_s == pytest.approx(free.step_time_s, rel=1e-3)
    assert any(hides.swap) and hides.program.swaps_beside and not waits.program.swaps_beside and hides.executable
    assert "a micro-batch, beside the work" in hides.explain()
    assert max(hides.peak_memory_bytes) <= tight.memory_bytes and hides.bubbles["swap"] < 0.01 * free.step_time_s
    request = {**REQUEST, "schedule": "gpipe"}
    free = tp.plan(MODEL, WIDE, planner="uniform", **request)
    tight = dataclasses.replace(tight, memory_bytes=0.6 * max(free.peak_memory_bytes))
    waits = tp.plan(MODEL, tight, planner="dawnpiper", **request)
    hides = tp.plan(MODEL, dataclasses.replace(tight, swaps_beside=True), planner="dawnpiper", **request)
    assert waits.step_time_s > 1.06 * free.step_time_s and hides.step_time_s < 1.01 * free.step_time_s
    assert "&&" in str(hides.program)


def test_auto_swaps_beside_the_work_too():
    free = tp.plan(MODEL, WIDE, planner="uniform", **REQUEST)
    tight = dataclasses.replace(WIDE, memory_bytes=0.6 * max(free.peak_memory_bytes), host_bandwidth_Bps=2e9)
    hides = tp.plan(MODEL, dataclasses.replace(tight, swaps_beside=True), planner="dawnpiper", **REQUEST)
    auto = tp.plan(MODEL, dataclasses.replace(tight, swaps_beside=True), planner="auto", **REQUEST)
    assert auto.step_time_s <= hides.step_time_s


def test_more_memory_never_hurts_a_plan_that_swaps_beside_its_work():
    model, request = tp.GPTConfig(**{**MODEL.to_dict(), "n_layer": 6}), {**REQUEST, "stages": 4, "batch": 8}
    cluster = dataclasses.replace(WIDE, num_devices=4, host_bandwidth_Bps=1e9, swaps_beside=True)
    most = max(tp.plan(model, cluster, planner="uniform", **request).peak_memory_bytes)
    times = []
    for part in np.linspace(0.5, 1.0, 11):
        try:
            times.append(tp.plan(model, dataclasses.replace(cluster, memory_bytes=part * most), planner="dawnpiper",
                                 **request).step_time_s)
        except tp.InfeasibleError:
            assert not times
    assert len(times) > 5 and times == sorted(times, reverse=True)


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_an_emulation_takes_what_was_predicted(ahead):
    """Copies of three quarters of a forward on one stage, of more than all work on another."""
    program = tp.schedules.seq1f1b(3, 4, 2).save_memory(bytes(3), bytes((2, 0, 1)), ahead, beside=True).lower()
    copies = np.array([[0.003], [0.0], [0.012]]) * np.ones((3, 8))
    cost = {"F": 0.004, "B": 0.008, "SO": copies, "SI": copies}
    run = tp.emulate(program, cost)
    assert run.predicted_step_time_s == pytest.approx(program.makespan(cost))
    assert run.step_time_s == pytest.approx(run.predicted_step_time_s, rel=0.05)
    rows = run.timeline().intervals
    for row in rows[np.isin(rows["op"], [OPS.index("SO"), OPS.index("SI")])]:
        assert row["end_s"] - row["start_s"] == pytest.approx(copies[row["stage"], 0], abs=1e-6)


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_a_run_has_the_bits_of_one_device_and_shows_its_copies(ahead, tmp_path):
    plan = beside(evenly("1f1b", which=()), ahead)
    assert trained(plan) == trained(evenly("gpipe", 1, 1, ()))
    run = tp.launch(plan, TOKENS, steps=3, out=tmp_path / "run", processes=False, progress=False).wait()
    line, report = run.timeline(), run.report()
    assert copiers() == 0
    assert line.program is not None and line.program.counts["SO"] == plan.program.counts["SO"]
    assert sum(line.bubbles.values()) == pytest.approx(line.idle_s, rel=1e-6)
    assert report.resimulated_step_time_s > 0 and "of 1 thread and one that swaps had" in repr(report)
    assert tp.Plan.load(tmp_path / "run" / "plan.json") == plan
    rows = line.intervals
    copies = rows[np.isin(rows["op"], [OPS.index("SO"), OPS.index("SI")])]
    for rank in range(2):
        mine = np.sort(copies[copies["rank"] == rank], order="start_s")
        assert len(mine) == 16 and (mine["start_s"][1:] >= mine["end_s"][:-1] - 1e-9).all()
    planned = plan.timeline()
    page, trace = planned._repr_html_(), tmp_path / "trace.json"
    planned.to_chrome_trace(trace)
    assert 'class="SO' in page and '"name": "copies"' in trace.read_text()


@pytest.mark.parametrize(("schedule", "request_", "ahead"), [
    ("seq1f1b", {"slicing": [(1, [20, 12])] * 8}, 1), ("gpipe", {"slicing": [(1, [20, 12])] * 8}, 3), ("zb-h2", {}, 3),
    ("interleaved", {}, 1), ("zb-v", {}, 0), ("hanayo", {}, 1),
    ("chimera", {"ranks": 4, "stages": 4}, 1), ("1f1b", {"ranks": 4, "data_parallel": 2}, 2),
    ("sliced-1f1b", {"ranks": 4, "data_parallel": 2}, 1)], ids=str)
@pytest.mark.parametrize("which", [("attention", "ffn"), ("ffn",)], ids=["all", "ffn"])
def test_every_schedule_swaps_beside_its_work(schedule, request_, ahead, which):
    plan = beside(evenly(schedule, which=(), **request_), ahead, which)
    assert plan.program.swaps_beside and plan.program.counts["SO"] == plan.program.counts["SI"] > 0
    members = plan.data_parallel * plan.copies
    assert trained(plan) == trained(evenly("gpipe", members, 1, (), data_parallel=members))


def test_own_programs_keep_their_swaps_beside_the_work():
    plan = beside(evenly("1f1b", which=()), 1)
    own = plan.with_program(tp.schedules.gpipe(2, len(plan.slicing)))
    assert own.program.swaps_beside and own.schedule == "own" and trained(own) == trained(plan)


def test_a_rank_that_ends_in_the_middle_of_a_step_ends_its_copies(tmp_path):
    """A loss that is not finite, found at the end of a step; and an engine that is closed with nothing run."""
    model, params, tokens = problem(4, 8)
    assert copiers() == 0
    partition, slicing, swap = partition_of(model, []), [(1, [8])] * 4, (0, 1, 1, 1, 1, 0)
    program = tp.schedules.gpipe(1, 4).save_memory(bytes(1), bytes([1]), 2, beside=True).split(pending=0).lower()

    def broken(engine):
        assert begun(1)
        with pytest.raises(tp.ExecutionError, match="the loss is"):
            engine.run(tokens, step=1, **HYPER)
        with pytest.raises(tp.AbortedError):                               # the copies are counted afresh
            engine.run(tokens, step=1, **HYPER)

    params = {name: np.full_like(array, np.nan) if name.endswith("ln_f.weight") else array for name, array in params.items()}
    ranks_do(model, partition, slicing, program, broken, 1, params, swap=swap, store=str(tmp_path))
    ranks_do(model, partition, slicing, program, lambda engine: None, 1, params, swap=swap, store=str(tmp_path))
    assert copiers() == 0 and os.listdir(tmp_path) == []


def test_who_swaps_beside_its_work():
    """On a CPU who has a core to spare, on CUDA everyone."""
    with pytest.raises(ValueError, match="swaps_beside is 'yes': True or False would be right"):
        tp.Cluster(num_devices=2, swaps_beside="yes")
    model, wide = tp.GPTConfig(n_layer=4, n_head=2, n_embd=32, vocab_size=256, block_size=128), tp.Cluster(num_devices=2)
    request = {"batch": 8, "seq_len": 128, "stages": 2, "schedule": "gpipe"}
    for backend, given, found in (("cpu", False, False), ("cpu", True, True), ("cuda", False, True)):
        most = max(tp.plan(model, wide, planner="uniform", backend=backend, **request).peak_memory_bytes)
        again = tp.plan(model, wide, planner="dawnpiper", backend=backend, memory_bytes=most, **request)
        cluster = dataclasses.replace(wide, host_bandwidth_Bps=1e14, swaps_beside=given)
        saved = 0.75 * (most - (32 << 20) * (backend == "cuda")) + (32 << 20) * (backend == "cuda")
        plan = tp.plan(model, cluster, planner="dawnpiper", backend=backend, memory_bytes=saved, **request)
        assert not any(again.swap) and any(plan.swap) and plan.program.swaps_beside == found, backend


def test_the_death_of_a_rank_is_the_end_of_one_that_waits_for_it_while_it_copies(tmp_path, monkeypatch):
    plan = beside(evenly("1f1b", which=()), 2)
    monkeypatch.setenv("TERAPIPE_SWAP_DIR", str(tmp_path))
    run = tp.launch(plan, TOKENS, 10_000, progress=False)
    with pytest.raises(tp.PeerError, match=r"rank 1 was killed by signal 9 \(SIGKILL\)"):
        for record in run:
            if record.step == 3:
                os.kill(run.pids[1], signal.SIGKILL)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in run.pids) and os.listdir(tmp_path) == []


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "zb", "interleaved"])
def test_a_measured_timeline_has_the_bubbles_of_the_simulated_one(schedule, ahead):
    """Also where no copy happens to go on beside work, where one has to wait for others, and where there are two places."""
    program = {"gpipe": lambda: tp.schedules.gpipe(3, 5), "zb": lambda: tp.schedules.one_f_one_b(3, 5).split(pending=2),
               "interleaved": lambda: tp.schedules.interleaved(2, 4, 2)}[schedule]()
    rng = np.random.default_rng(ahead)
    for swap in ((1, 0, 2), (0, 0, 1)):
        stages, units = program.num_stages, sum(program.slices)
        whole = program.save_memory(bytes(stages), bytes([*swap, 1][:stages]), ahead, beside=True).lower()
        cost = {op: rng.integers(1, 8, (stages, units)).astype(float) for op in ("F", "B", "I", "W", "SO", "SI")}
        alone = program.save_memory(bytes(stages), bytes([*swap, 1][:stages]), ahead).lower().simulate(cost)
        told = tp.Timeline.from_intervals(alone.intervals)     # by the times alone: no copy goes on beside the work
        assert not told.program.swaps_beside and told.bubbles == pytest.approx(alone.bubbles, abs=1e-9)
        line = whole.simulate(cost)
        measured = tp.Timeline.from_intervals(line.intervals, program=whole)
        assert measured.bubbles == pytest.approx(line.bubbles, abs=1e-9) and measured.program == whole
        assert measured.lower_bound_s == pytest.approx(line.lower_bound_s) and measured.work_s == pytest.approx(line.work_s)
        if ahead < 3:                                          # by the times alone: nothing that copies are blamed for is made up
            told = tp.Timeline.from_intervals(line.intervals)
            assert told.program.simulate(cost).makespan_s <= line.makespan_s * (1 + 1e-9)
        twice = np.concatenate([line.intervals, line.intervals])
        twice["rank"][len(line.intervals):] += whole.num_ranks
        assert tp.Timeline.from_intervals(twice, program=whole).bubbles == pytest.approx(
            {cause: 2 * seconds for cause, seconds in line.bubbles.items()}, abs=1e-9)
        cut = tp.Timeline.from_intervals(line.intervals[1:], whole.num_ranks, program=whole)
        assert cut.program is None and sum(cut.bubbles.values()) == pytest.approx(cut.idle_s)      # not all of it
    with pytest.raises(TypeError, match="program is 'x': a Program, or None, would be right"):
        tp.Timeline.from_intervals([], program="x")


def test_emulations_and_runs_blame_copies_for_what_the_prediction_does():
    program = tp.schedules.gpipe(2, 4).save_memory(bytes(2), bytes((1, 1)), 3, beside=True).lower()
    cost = {"F": 0.004, "B": 0.008, "SO": 0.007, "SI": 0.007}
    run, line = tp.emulate(program, cost).timeline(), program.simulate(cost)
    assert run.program == program and run.bubbles["swap"] == pytest.approx(line.bubbles["swap"], rel=0.1)


def test_own_programs_swap_as_far_ahead_as_fits():
    """The fastest order takes more memory than there is; a slower one of the same program does not."""
    model, request = tp.GPTConfig(**{**MODEL.to_dict(), "n_layer": 6}), {**REQUEST, "stages": 4, "batch": 8}
    cluster = dataclasses.replace(WIDE, num_devices=4, host_bandwidth_Bps=1e9, swaps_beside=True)
    most = max(tp.plan(model, cluster, planner="uniform", **request).peak_memory_bytes)
    tight = dataclasses.replace(cluster, memory_bytes=0.55 * most)
    plan = tp.plan(model, tight, planner="dawnpiper", **request)
    own = plan.with_program(tp.schedules.one_f_one_b(4, 8))
    assert any(plan.swap) and max(own.peak_memory_bytes) <= tight.memory_bytes
    free = dataclasses.replace(plan, memory_limit_bytes=None).with_program(tp.schedules.one_f_one_b(4, 8))
    assert max(free.peak_memory_bytes) > tight.memory_bytes and free.step_time_s < own.step_time_s


def test_plans_that_were_saved_before_there_were_swaps_beside_the_work_are_read():
    """Their checksum is of a cluster without that word."""
    cluster = tp.Cluster(num_devices=2, host_bandwidth_Bps=1e9)
    assert "swaps_beside" not in cluster.to_dict() and tp.Cluster.from_dict(cluster.to_dict()) == cluster
    beside_ = dataclasses.replace(cluster, swaps_beside=True)
    assert beside_.to_dict()["swaps_beside"] is True and tp.Cluster.from_dict(beside_.to_dict()) == beside_
