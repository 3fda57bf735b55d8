"""benchmarks/gpu/kept.py without a GPU: which room it asks for, and what it makes of the seconds."""

import importlib
import types

import pytest
from test_gpu_check import ROOT, gpu_check

MIB = 1 << 20


@pytest.fixture
def kept(monkeypatch):
    """(the question's names, those of benchmarks/gpu/attention.py with a device that takes 1 s, and less by what is kept, at 1 %
    a MiB)."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    attention = importlib.import_module("gpu.attention")

    class Room(int):
        def new_empty(self, count):
            return Room(count)

    class Sequence:
        def __init__(self, dtype, *shape, wgmma, room):
            self.shape, self.kept, self.dqkv, self.slices = shape, Room(room), types.SimpleNamespace(clone=lambda: "bits"), None

        def forward(self, slices):
            assert slices == [self.shape[3]]

        def backward(self, slices):
            self.slices, asked.kept = slices, int(self.kept)
            asked.rooms.append((*self.shape[2:], slices[0], int(self.kept)))

    def clock(work, runs):
        work()
        return 1.0 - 0.01 * min(asked.kept / MIB, 50)

    (question,) = (q for q in gpu_check.questions() if q.name == "attention kept")
    asked = types.SimpleNamespace(rooms=[], kept=0, same=True, **{"names": question.answer.__globals__, "answer": question.answer})
    for name, value in {"Sequence": Sequence, "clock": clock, "same": lambda *_: asked.same, "no_wgmma": lambda: ""}.items():
        monkeypatch.setattr(attention, name, value)
    return asked


def test_rooms_are_those_that_are_less_than_all_and_all(kept):
    told = kept.answer()
    by_slices = {}
    for *shape, size, room in kept.rooms:
        by_slices.setdefault((*shape, size), []).append(room)
    assert {size for *_, size in by_slices} == {256, 512, 1024, 2048} and len(by_slices) == len(told["shapes"]) == 27
    every = 12 * 16 * 136 * 8192  # GPT-2 124M: 16 sequences of 12 heads, 16 (16 + 1) / 2 tiles
    assert by_slices[64, 1024, 1024] == [0, 32 * MIB, 80 * MIB, 160 * MIB, every, 0] and every < 320 * MIB
    assert all(max(rooms) <= 4 << 30 for rooms in by_slices.values())
    assert told["shapes"][0]["seconds"]["32 MiB"] == pytest.approx(0.68) and told["shapes"][0]["all_bytes"] == every
    assert "32 MiB 0.680 to 0.680" in told["headline"] and "0 MiB again 1.000 to 1.000" in told["headline"]


def test_bits_that_differ_fail_it_with_all_that_was_found(kept, monkeypatch):
    found = []
    monkeypatch.setitem(kept.names, "so_far", found.append)
    kept.same = False
    with pytest.raises(AssertionError, match="what is kept shows in the bits"):
        kept.answer()
    assert len(found[-1]["shapes"]) == 27


def test_without_time_it_tells_what_it_has(kept, monkeypatch):
    left = iter([9.0, 9.0, 2.0])
    monkeypatch.setitem(kept.names, "in_time", lambda: next(left))
    told = kept.answer()
    assert len(told["shapes"]) == 2 and told["told"] == "no time was left for the rest"


def test_kernels_that_no_gpu_ran_are_asked_of_first():
    """What is right or wrong of them among the first six, and what they bring before what was measured before."""
    names = [question.name for question in gpu_check.questions()]
    assert names.index("wgmma right") < 6 and names.index("attention kept") < names.index("attention speed")


def test_slicings_are_asked_of_rows_off_16_bytes(monkeypatch):
    """Whose products have other alignments in a slice than in all rows: what gives them one algorithm has run on no GPU."""
    import numpy as np

    import terapipe_c as tp

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    (question,) = (q for q in gpu_check.questions() if q.name == "slicings")
    asked = set()

    def loss_and_grads(model, params, tokens, *cut, backend, dtype):
        asked.add((4 if dtype == "float32" else 2) * model.n_embd % 16 == 0)
        return 1.0, {"w": np.ones(3)}

    monkeypatch.setattr(tp, "loss_and_grads", loss_and_grads)
    told = question.answer()
    assert asked == {True, False} and told["headline"] == "equal over 10 slicings"
