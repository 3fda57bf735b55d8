"""Every plan of every planner that this engine can execute trains: losses bit-equal to one device, memory as predicted to the
byte. What it cannot execute is refused before work starts."""
import dataclasses
from functools import cache

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c.request import PLANNERS

SEQ, BATCH, STEPS = 16, 4, 3
MODEL = tp.GPTConfig(n_layer=5, n_head=2, n_embd=8, vocab_size=48, block_size=SEQ)
CLUSTER = tp.Cluster(num_devices=8, memory_bytes=1e9, link_latency_s=1e-6, link_bandwidth_Bps=1e10, peak_flops=1e9)
DATA = np.random.default_rng(8).integers(0, 48, 3000).astype(np.int32)


def make(planner, model=MODEL, **request):
    return tp.plan(model, CLUSTER, batch=BATCH, seq_len=SEQ, planner=planner, **request)


def trained(plan, **options):
    run = tp.launch(plan, DATA, STEPS, seed=4, lr=1e-2, processes=False, progress=False, **options)
    records = [(record.loss, record.grad_norm) for record in run]
    return records, run.report()


@cache
def one_device(tied):
    model = dataclasses.replace(MODEL, tie_weights=tied)
    return trained(make("uniform", model, stages=1, schedule="gpipe"))[0]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("planner", PLANNERS)
def test_what_can_be_executed_trains_as_planned(planner, tied):
    plan = make(planner, dataclasses.replace(MODEL, tie_weights=tied), stages=3)
    assert plan.executable and plan.why_not_executable == "" and plan.planner == planner and plan.ranks == 3
    losses, report = trained(plan)
    assert losses == one_device(tied)
    assert report.peak_memory_bytes == report.predicted_peak_memory_bytes == plan.peak_memory_bytes


@pytest.mark.parametrize("planner", PLANNERS)
def test_slices_and_schedules_that_are_given_train_too(planner):
    plan = make(planner, stages=4, slicing=[(2, [16]), (1, [7, 9]), (1, [16])], schedule="gpipe")
    losses, report = trained(plan)
    assert losses == one_device(True) and plan.schedule == "gpipe"
    assert report.peak_memory_bytes == plan.peak_memory_bytes


@pytest.mark.parametrize("planner", ["auto", "terapipe", "uniform", "bmpipe"])
def test_several_chunks_train_too(planner):
    plan = make(planner, stages=2, chunks=2)
    assert plan.chunks == 2 and plan.schedule == "interleaved" and len(plan.stages) == 4
    losses, report = trained(plan)
    assert losses == one_device(True) and report.peak_memory_bytes == plan.peak_memory_bytes


def refused(plan, word, monkeypatch):
    monkeypatch.setattr("terapipe_c.launch._region", lambda *_: pytest.fail("work was begun"))
    assert not plan.executable and word in plan.why_not_executable and "not executable" in repr(plan)
    assert plan.why_not_executable in plan.explain()
    with pytest.raises(tp.InvalidValueError, match=word):
        tp.launch(plan, DATA, STEPS, processes=False, progress=False)


def test_replicas_are_planned_and_refused_by_launch(monkeypatch):
    plan = make("uniform", stages=2, data_parallel=2)
    assert plan.data_parallel == 2 and plan.num_devices == 4 and sum(b for b, _ in plan.slicing) == BATCH // 2
    refused(plan, "data_parallel = 2", monkeypatch)
