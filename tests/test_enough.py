"""A refusal names the least limit that has a plan: that has one, a byte less has none, and whatever was refused names it."""

import pytest

import terapipe_c as tp
from terapipe_c.planning import enough
from terapipe_c.planning.side_by_side import SideBySide


def cluster(devices, latency_s=1e-6, bandwidth_Bps=1e10, **more):
    return tp.Cluster(num_devices=devices, memory_bytes=1e12, link_latency_s=latency_s, link_bandwidth_Bps=bandwidth_Bps,
                      peak_flops=1e12, **more)


def model(layers, heads, width, words, length, **more):
    return tp.GPTConfig(n_layer=layers, n_head=heads, n_embd=width, vocab_size=words, block_size=length, **more)


LOOPED = (model(6, 2, 8, 500, 32, bias=False), cluster(2, bandwidth_Bps=1e8, host_bandwidth_Bps=1e9),
          dict(batch=5, seq_len=32, planner="terapipe", stages=2, schedule="looped-bfs", chunks=2, granularity=16))
CASES = {
    # where no limit is near a search of looped stages ends with the leanest partition; its ladder goes below that
    "looped": LOOPED,
    "looped and recomputing": (model(2, 2, 32, 3000, 16, tie_weights=False), cluster(2), dict(
        batch=4, seq_len=16, planner="terapipe", stages=2, schedule="looped-bfs", chunks=2, recompute="attention", granularity=4)),
    # auto asked nobody for several chunks where there was no room for the parameters
    "several chunks": (model(4, 2, 64, 20, 8), cluster(6, bandwidth_Bps=1e8), dict(
        batch=3, seq_len=8, stages=2, data_parallel=3, slicing=4)),
    "chunks told to recompute": (model(6, 1, 32, 500, 32, bias=False, tie_weights=False), cluster(2, sums_beside=True), dict(
        batch=2, seq_len=32, stages=2, schedule="interleaved", slicing=1)),
    # nor for ranks that have none
    "numbers of ranks": (model(3, 1, 32, 100, 64), cluster(6, 1e-4), dict(
        batch=10, seq_len=64, data_parallel=2, schedule="looped-bfs", recompute="ffn", granularity=64)),
    "sharded": (model(1, 2, 128, 500, 64, bias=False), cluster(12), dict(
        batch=6, seq_len=64, data_parallel=3, shard_optimizer=True, recompute="ffn", slicing=4)),
}


def refused(case, limit):
    gpt, devices, request = case
    with pytest.raises(tp.InfeasibleError) as error:
        tp.plan(gpt, devices, memory_bytes=limit, executable=False, **request)
    return error.value


@pytest.mark.parametrize("name", CASES)
def test_a_byte_less_than_what_a_refusal_names_has_no_plan(name):
    case = CASES[name]
    least = refused(case, 1).memory_bytes
    gpt, devices, request = case
    assert max(tp.plan(gpt, devices, memory_bytes=least, executable=False, **request).peak_memory_bytes) == least
    for limit in (least - 1, int(0.98 * least)):
        error = refused(case, limit)
        assert error.memory_bytes == least
        assert f"needs {least} bytes and may use {limit}: {least - limit} bytes short" in str(error)


def test_no_more_is_asked_once_that_took_much_work(monkeypatch):
    """What is named is enough, then."""
    gpt, devices, request = case = CASES["several chunks"]
    least = refused(case, 1).memory_bytes
    monkeypatch.setattr(enough, "_WORK", 0)
    named = refused(case, 1).memory_bytes
    assert named > least
    tp.plan(gpt, devices, memory_bytes=named, executable=False, **request)


def test_under_a_time_limit_the_least_is_not_asked_for(monkeypatch):
    monkeypatch.setattr(enough, "plan_one", lambda *_: pytest.fail("asked"))
    gpt, devices, request = LOOPED
    refused((gpt, devices, request | {"time_limit_s": 60}), 1)


def test_the_same_is_named_with_one_core(monkeypatch):
    named = refused(CASES["several chunks"], 1).memory_bytes
    monkeypatch.setattr(SideBySide, "_start", lambda self: None)
    assert refused(CASES["several chunks"], 1).memory_bytes == named
