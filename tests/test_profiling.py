"""Profiling: the measured cost model of a tiny model. Times are noisy here: only their order is asserted. What no other's work can
change: tests/test_profiled.py."""
import numpy as np
import pytest

import terapipe_c as tp

MODEL = tp.GPTConfig(n_layer=3, n_head=2, n_embd=64, vocab_size=97, block_size=256)


@pytest.fixture(scope="module")
def measured():
    return tp.profile(MODEL, micro_batch=2, seq_len=256, budget_s=2)


def test_it_knows_what_was_measured(measured):
    assert measured.source == "measured" and measured.model == MODEL
    assert measured.seq_len == 256 and measured.micro_batch == 2
    assert np.isfinite(measured.fit_error) and measured.fit_error >= 0
    assert {"attention.F", "attention.I", "attention.W", "ffn.F", "ffn.I", "ffn.W"} <= set(measured.fit_errors)
    assert min(measured.latency_s, measured.copy_byte_s, measured.lent_byte_s, measured.optimizer_param_s) > 0
    assert measured.overhead_s >= 0


def test_times_are_positive_and_grow_with_the_slice(measured):
    for phase in ("fwd", "bwd", "both"):
        for context in (0, 64):
            times = [float(measured.time(tokens, context, phase)) for tokens in (8, 32, 128, 192)]
            assert times[0] > 0 and times == sorted(times) and times[-1] > 2 * times[0]
    assert measured.time(128, 0, "both") == pytest.approx(measured.time(128, 0, "fwd") + measured.time(128, 0, "bwd"))
    assert measured.time(128, 0, "bwd") > measured.time(128, 0, "fwd")
    assert measured.time(64, 128) >= measured.time(64, 0)
    assert measured.time(128, batch=2) > measured.time(128)
    assert measured.block_seconds("head", "F", 128) > 0 and measured.block_seconds("head", "I", 128) > 0


def test_it_survives_a_round_trip(measured, tmp_path):
    measured.save(tmp_path / "costs.json")
    again = tp.CostModel.load(tmp_path / "costs.json")
    assert again == measured and hash(again) == hash(measured)
    assert np.array_equal(again.time(np.arange(1, 257)), measured.time(np.arange(1, 257)))
