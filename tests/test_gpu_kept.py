"""benchmarks/gpu/kept.py without a GPU: which room it asks for, and what it makes of the seconds."""

import importlib
import sys
import threading
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
            self.shape, self.kept = shape, Room(room)
            self.dqkv = types.SimpleNamespace(clone=lambda: "bits", fill_=lambda _: None)

        def forward(self, slices):
            assert slices == [self.shape[3]]

        def run(self, slices, groups):
            assert sum(slices) == self.shape[3]

        def backward(self, slices):
            asked.kept = int(self.kept)
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


def test_each_way_to_fetch_it_is_laid_beside_the_packages(kept, monkeypatch):
    """The package's first; of D up to 64 three kernels, of 128 two; with room for all heads; bits that differ fail it."""
    (question,) = (q for q in gpu_check.questions() if q.name == "attention kept, ahead")
    names, asked = question.answer.__globals__, []
    ways = [types.SimpleNamespace(tp_error_message=types.SimpleNamespace(), factor=factor) for factor in (1.0, 1.5, 0.8, 0.5)]

    def backward_by(library, sequence, slices, groups):
        asked.append((sequence.shape[2], groups, library.factor))

    attention = importlib.import_module("gpu.attention")
    monkeypatch.setattr(attention, "clock", lambda work, runs: work() or asked[-1][2])
    monkeypatch.setitem(names, "built", lambda: ways)
    monkeypatch.setitem(names, "backward_by", backward_by)
    told = question.answer()
    assert set(asked) == {(D, n, way.factor) for D, n in ((64, 1), (64, 2), (64, 3), (128, 1), (128, 2)) for way in ways}
    assert told["shapes"][0]["seconds"] == {"0 ahead": 1.0, "1 ahead": 1.5, "1 ahead, behind": 0.8, "3 ahead, behind": 0.5}
    assert told["shapes"][1]["seconds"] == {"3 ahead": 1.0, "5 ahead": 1.5, "3 ahead, behind": 0.8, "5 ahead, behind": 0.5}
    assert "D 128 by 2: 5 ahead, behind 0.500 to 0.500" in told["headline"] and "D 64 by 1: 1 ahead 1.500" in told["headline"]
    kept.same = False
    with pytest.raises(AssertionError):
        question.answer()


def test_what_nine_minutes_have_no_room_for_is_asked_by_name_alone(monkeypatch):
    asked = []

    class Check:
        def __init__(self, chosen, card, options):
            asked.append([question.name for question in chosen])

        def run(self):
            return 0

    for name, value in {"gpu": lambda: {"name": "a GPU"}, "on_the_device": lambda: None, "Check": Check}.items():
        monkeypatch.setattr(gpu_check, name, value)
    for options in ([], ["--only", "attention kept, ahead", "memory"]):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", *options])
        assert gpu_check.main() == 0
    assert "attention kept, ahead" not in asked[0] and len(asked[0]) > 30
    assert asked[1] == ["memory", "attention kept, ahead"]


def test_its_ways_are_built_beside_each_other(kept, monkeypatch):
    """One behind the other they would take what time there is before the questions of speed."""
    together, made = threading.Barrier(4, timeout=20), []
    gpu_library = importlib.import_module("gpu_library")

    def build(arch, name, sources, defines):
        together.wait()
        made.append((arch, name, *defines))
        return name

    monkeypatch.setattr(gpu_library, "build", build)
    monkeypatch.setattr(gpu_library, "toolkit", lambda arch: None)
    monkeypatch.setitem(kept.names, "ctypes", types.SimpleNamespace(CDLL=str))
    assert kept.names["built"]() == ["ahead-3-0-0", "ahead-5-1-0", "ahead-3-1-1", "ahead-5-3-1"]
    defines = "-DTP_CUDA_KEPT_AHEAD=3", "-DTP_CUDA_KEPT_AHEAD_ALONE=1", "-DTP_CUDA_KEPT_BEHIND=1"
    assert sorted(made)[1] == ("90a", "ahead-3-1-1", *defines)
