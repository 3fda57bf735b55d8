"""What a report makes of a step that is told to it: all of it by hand, where tests of runs have what a machine took."""
import re

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c.report import Report, loss_curve, resimulated
from terapipe_c.schedule import BESIDE, INTERVAL, LAST, OPS, SUM, Timeline

MODEL = tp.GPTConfig(n_layer=4, n_head=2, n_embd=32, vocab_size=64, block_size=32)
CLUSTER = tp.Cluster(num_devices=4, memory_bytes=1e9, link_bandwidth_Bps=1e9, peak_flops=1e9, sums_beside=True)


def told(plan, slower, steps=(9.0, 3.0, 4.0, 5.0)):
    """The report of a run whose operations all took `slower` times what was predicted, whose messages took no time, and whose
    steps took so many seconds. OPT's intervals begin behind the replicas' sums."""
    once = {name: slower * seconds for name, seconds in plan.durations.items()
            if name in OPS and name not in ("SF", "SB", "RF", "RB")}
    if SUM in plan.durations:
        once["OPT"] = once["OPT"] - slower * plan.durations[SUM]
    rows = [(rank + plan.ranks * replica, OPS[op], *rest) for replica in range(plan.data_parallel)
            for rank, op, *rest in plan.program.simulate(once).intervals.tolist()]
    line = Timeline.from_intervals(rows, plan.num_devices, program=plan.program)
    peaks = plan.peak_memory_bytes * plan.data_parallel
    job = {"ranks": plan.num_devices, "batch": plan.batch, "seq_len": plan.seq_len, "out": None, "backend": "cpu", "local_rank": 0,
           "threads_per_rank": 1, "reproducible": False, "predicted_peak_memory_bytes": peaks, "steps": 10}
    ends = [{"peak_memory_bytes": peak + 1 - i % 2, "resident_memory_bytes": 1 << 30} for i, peak in enumerate(peaks)]
    records = [{"step": i + 2, "loss": 4.0 - i, "step_time_s": seconds} for i, seconds in enumerate(steps)]
    return Report.of(plan, records, ends, line, job), once


@pytest.mark.parametrize("replicas", [1, 2])
def test_predicted_and_measured_are_of_the_same_ranks_and_steps(replicas):
    plan = tp.plan(MODEL, CLUSTER, batch=4, seq_len=32, stages=2, data_parallel=replicas, schedule="1f1b")
    report, once = told(plan, 3.0)
    assert report.step_time_s == 4.0 and report.last_step_time_s == 5.0         # the first step does not count
    assert report.tokens_per_s == 4 * 32 / 4.0
    assert report.work_ratio == pytest.approx(3.0)
    sums = plan.durations.get(SUM, np.zeros(1))
    again = {**once, "OPT": once["OPT"] + sums, **{name: plan.durations[name] for name in (SUM, BESIDE, LAST) if replicas > 1}}
    assert report.resimulated_step_time_s == pytest.approx(plan.program.makespan(again))
    idle = plan.ranks * plan.step_time_s - sum(plan.busy_s)
    assert sum(report.predicted_bubbles.values()) == pytest.approx(replicas * idle) and idle > 0
    assert sum(report.bubbles.values()) == pytest.approx(report.measured.idle_s) and report.measured.num_ranks == 2 * replicas
    assert f"summed over {2 * replicas} ranks" in repr(report) and "took 3.00 times what they were predicted" in repr(report)
    assert "6 of 10 steps done: loss 4.0000 after 3 steps, 1.0000 after 6" in repr(report)


def test_errors_are_of_the_prediction():
    plan = tp.plan(MODEL, CLUSTER, batch=4, seq_len=32, stages=2, schedule="1f1b")
    report, _ = told(plan, 1.0, (9.0, 2 * plan.step_time_s))
    rows = {name: rest for name, *rest in report.rows()}
    assert rows["step time"][2] == "-50.0 %"                  # half of what it took was predicted
    head, *lines = repr(report).splitlines()[:len(rows) + 1]
    ends = {line.rfind(cells[1]) + len(cells[1]) for line, cells in zip(lines, rows.values(), strict=True)}
    assert ends == {head.index("measured") + len("measured")}
    assert rows["memory of rank 0"][2] == "-0.0 %" and rows["memory of rank 1"][2] == "exact"
    assert report.resimulated_step_time_s < plan.step_time_s < report.last_step_time_s
    assert rows["last step, from measured operations"][2].startswith("-5")
    first, _ = told(plan, 1.0, (9.0,))                        # of which nothing is known but what it was to be
    assert first.step_time_s is first.last_step_time_s is first.resimulated_step_time_s is first.work_ratio is None
    assert {name: rest for name, *rest in first.rows()}["step time"][1:] == ["-", ""]


@pytest.mark.parametrize("guests", [{"SE": 1.5, "SL": 0.25}, {"SE": 0.25, "SL": 1.5}], ids=["away", "back"])
def test_a_step_is_as_long_as_its_operations_make_it(guests):
    """Of replicas as long as the slower one's; what a rank gives away, and has back, is its own time."""
    program = tp.schedules.bpipe(4, 6).lower()
    assert {"SE", "SL"} <= set(program.counts)
    cost = {"F": 1.0, "B": 2.0, "SF": 0.125, "SB": 0.0625} | guests

    def measured(replica, **own):      # an engine's trace has its messages, a simulation's intervals have none
        names = [OPS.index(name) for name in ("SE", "SL", "SF", "SB")]
        sent = [(rank, *row[["op", "stage", "micro", "slice"]].tolist(), 0.0, cost[OPS[row["op"]]]) for rank in range(4)
                for row in program.instructions(rank) if row["op"] in names]
        rows = np.array([*program.simulate(cost | own).intervals.tolist(), *sent], INTERVAL)
        rows["rank"] += 4 * replica
        return rows

    assert resimulated(program, measured(0)) == pytest.approx(program.makespan(cost))
    between = {name: seconds + 0.5 * (name not in guests) for name, seconds in cost.items()}
    assert resimulated(program, measured(0), between_s=0.5) == pytest.approx(program.makespan(between))
    assert resimulated(program, measured(0), handover_s=0.5) == pytest.approx(program.makespan(cost | {"comm": 0.5}))
    rows = np.concatenate([measured(0, F=3.0), measured(1)])
    both = resimulated(program, rows)
    assert both == pytest.approx(program.makespan(cost | {"F": 3.0})) and both > program.makespan(cost) + 1
    line, slow = Timeline.from_intervals(rows, 8, program=program), program.simulate({"F": 3.0, "B": 2.0})
    assert line.lower_bound_s == pytest.approx(slow.lower_bound_s)       # no order of either replica is faster


def test_a_curve_of_losses_is_to_scale():
    picture = loss_curve([4, 5, 6, 8], [4.0, float("nan"), 3.0, 2.0])
    assert re.search('points="([^"]*)"', picture)[1] == "60.0,10.0 345.0,72.5 630.0,135.0"
    assert "after 5 steps" in picture and "after 9 steps" in picture and ">4.00<" in picture and ">2.00<" in picture
    assert re.search('points="([^"]*)"', loss_curve([0, 1], [2.0, 2.0]))[1] == "60.0,10.0 630.0,10.0"
    assert loss_curve([0, 1], [2.0, float("inf")]) == ""
