"""benchmarks/gpu_check.py without a GPU: its deadlines, and what becomes of questions that fail, hang or answer."""

import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("no benchmarks beside the tests", allow_module_level=True)

PATH = list(sys.path)
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_check  # noqa: E402

sys.path[:] = PATH  # it puts the checkout first, for a package that is built in place: other tests' is installed


def test_at_worst_it_ends_within_nine_minutes():
    speed = [q for q in gpu_check.questions() if q.order >= gpu_check.SPEED]
    assert gpu_check.BUILD_S + gpu_check.RIGHT_S + sum(q.seconds for q in speed if not q.named) <= 540
    assert speed and all(q.answer.__doc__ for q in gpu_check.questions())
    places = gpu_check.LANES * (gpu_check.RIGHT_S // gpu_check.KEPT_S)
    assert places >= len(gpu_check.questions()) - len(speed), "each is asked, whatever hangs before it"


RANKS = """
import os, sys, terapipe_c
sys.path.insert(0, os.environ["BENCHMARKS"]); import gpu_check
sys.path.remove(str(gpu_check.ROOT))   # here the package is an installed one
for asked in (q for q in gpu_check.questions() if q.name in sys.argv[1:]):
    told = asked.answer()
    assert {len(losses) for losses in told["losses"].values()} == {3} and not any(told.get("caveats", {}).values()), told
    print(asked.name)
"""


def test_ranks_on_one_gpu_send_by_nccl_up_and_down_and_in_halves(tmp_path):
    """What they are called: one rank alone; of three, stages that come back to the first, and forwards in halves."""
    cuda_emu = pytest.importorskip("cuda_emu")
    if not (ROOT / "cuda").is_dir() or not shutil.which("gcc"):
        pytest.skip("no CUDA sources beside the tests, or no gcc")
    names = ["NCCL 1 rank", "NCCL down and up again", "NCCL halves"]
    ran = subprocess.run([sys.executable, "-c", RANKS, *names], cwd=tmp_path, capture_output=True, text=True, env={
        **os.environ, "BENCHMARKS": f"{ROOT}/benchmarks", "GPU_CHECK_SMALL": "1", "TERAPIPE_CUDA_MODULE": str(cuda_emu.build())})
    assert ran.returncode == 0 and ran.stdout.splitlines() == names, ran.stdout + ran.stderr


def test_every_question_is_listed():
    ran = subprocess.run([sys.executable, str(ROOT / "benchmarks/gpu_check.py"), "--list"], capture_output=True, text=True)
    assert ran.returncode == 0 and "training 1558M" in ran.stdout and "at worst" in ran.stdout, ran.stderr


def test_a_model_leaves_the_gpu_some_memory(monkeypatch):
    """GPT-2 1558M as it is trained on an H200 takes 59 GB: a GPU of 59 has not all of it for that."""
    cuda_emu = pytest.importorskip("cuda_emu")
    if not (ROOT / "cuda").is_dir() or not shutil.which("gcc"):
        pytest.skip("no CUDA sources beside the tests, or no gcc")
    monkeypatch.setenv("TERAPIPE_CUDA_MODULE", str(cuda_emu.build()))
    (asked,) = (q for q in gpu_check.questions() if q.name == "training 1558M")
    training = asked.answer.__globals__
    most = training["SIZES"]["1558M"][1]
    assert training["sized"]("1558M", 141 << 30)[1] == most
    device_bytes = 55 << 30
    model, batch, micros = training["sized"]("1558M", device_bytes)
    assert most - 2 <= batch < most and micros == training["SIZES"]["1558M"][2]
    assert training["bytes_of"](model, batch, micros) <= device_bytes - (3 << 30)


def of_training(name, question="profile"):
    """What the file of a question (benchmarks/gpu/training.py) has by this name, where its questions find it."""
    (asked,) = (q for q in gpu_check.questions() if q.name == question)
    return asked.answer.__globals__, asked.answer.__globals__[name]


def test_training_takes_the_sequences_that_fit(monkeypatch):
    import terapipe_c as tp

    _, fitting = of_training("fitting")
    tried = []

    def begin(batch):
        tried.append(batch)
        if batch > 9:
            raise tp.OutOfMemoryError("short of a byte")
        return f"engine of {batch}"

    model = tp.GPTConfig(1, 1, 8, 16, 8)
    assert fitting(model, 16, 4, begin) == ("engine of 9", 9) and tried == [16, 14, 13, 12, 11, 10, 9]
    with pytest.raises(tp.OutOfMemoryError):
        fitting(model, 2, 4, lambda batch: begin(99))


def test_pytorch_takes_the_sequences_that_fit(monkeypatch):
    """The same tokens in more micro-batches; only its own word for it is waited for."""
    import types

    training, torch_steps = of_training("torch_steps")
    torch = types.SimpleNamespace(OutOfMemoryError=type("OutOfMemoryError", (RuntimeError,), {}), freed=0)
    torch.cuda = types.SimpleNamespace(empty_cache=lambda: setattr(torch, "freed", torch.freed + 1))

    def steps_of(model, batch, micros, *_):
        if batch > 5:
            raise torch.OutOfMemoryError(f"no room for {batch}")
        return [1.0, batch * micros]

    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delenv("GPU_CHECK_CACHE", raising=False)
    monkeypatch.setitem(training, "torch_steps_of", steps_of)
    monkeypatch.setitem(training, "sized", lambda size: ("a model", 16, 4))
    assert torch_steps("1558M", False, None) == ([1.0, 64], 4, 16) and torch.freed == 2


def test_a_few_steps_make_figures_that_say_so():
    import terapipe_c as tp

    _, figures = of_training("figures")
    model = tp.GPTConfig.preset("gpt2-124m")
    few, more = (figures("124M", model, 16, 4, [4.0, 1.0, 0.9, *[0.5] * n]) for n in (0, 2))
    assert "2 steps" not in more["headline"] and "by 3 steps alone, which warm up" in few["headline"]
    assert more["step_s"] == 0.5 and few["step_s"] == 1.0 and more["tokens_per_s"] == 16 * 4 * 1024 / 0.5


def test_a_pipeline_that_fails_leaves_the_others(monkeypatch):
    """One fails: the others are measured, and the question fails with all it found; what would need its operations is not asked."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    training, pipeline = of_training("pipeline", "pipeline")
    monkeypatch.setenv("GPU_CHECK_SMALL", "1")
    found, asked, steps = [], [], iter([0.6, 0.5, None, 0.3, 0.25, 0.2, 0.24, 0.23])

    def run_ranks(model, program, *_):
        step = next(steps)
        asked.append((program.num_stages, sum(program.slices)))
        if step is None:
            raise RuntimeError("a sticky error")
        stages, slices = program.num_stages, program.slices[0]
        traces = [[(op, stage, 0, s, 0.0, 0.1) for stage in range(rank, stages, 4) for op in ("F", "I", "W", "SF", "OPT")
                   for s in range(slices)] for rank in range(4)]  # fmt: skip
        return [(step, traces)] * 2, [], ["steps are enqueued anew"]

    monkeypatch.setitem(training, "run_ranks", run_ranks)
    monkeypatch.setitem(training, "simulated", lambda program, traces, between=None: 0.3)
    monkeypatch.setitem(training, "so_far", found.append)
    with pytest.raises(RuntimeError, match="slices of 256: RuntimeError: a sticky error"):
        pipeline()
    assert found[-1]["slices of 256"] == {"why": "RuntimeError: a sticky error"} and found[-1]["speedup"] == pytest.approx(3)
    assert asked == [(4, 1), (4, 1), (4, 8), (4, 4), (12, 4), (12, 4), (14, 4), (14, 4)]
    assert found[-1]["slices of 512"]["caveats"] == ["steps are enqueued anew"]
    assert found[-1]["headline"].startswith("slices of 512, 12 stages: 3.00 times GPipe") and "speedup" not in found[0]


def test_a_step_is_laid_beside_what_the_simulator_makes_of_its_own_operations(monkeypatch):
    import terapipe_c as tp

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    pipeline, measured = of_training("measured", "pipeline")
    again, model = {"a": 0.9, "b": 2.0, "c": 3.3, "d": 1.5}, tp.GPTConfig(8, 1, 8, 64, 32, tie_weights=False)
    monkeypatch.setitem(pipeline, "run_ranks", lambda *_: ([(1.0, "a"), (2.0, "b"), (3.0, "c"), (1.5, "d")], [], []))
    monkeypatch.setitem(pipeline, "simulated", lambda program, traces, between=None: again[traces])
    monkeypatch.setitem(pipeline, "between_of", lambda traces: {"span_s": 0.75})
    monkeypatch.setitem(pipeline, "rows_of", lambda traces: [traces])
    found, traces = measured(model, {}, [2048], tp.schedules.gpipe(4, 1), [(0, 1), (1, 2), (2, 3), (3, 18)])
    assert found["simulated_over_measured"] == 1.0 and found["step_s"] == found["simulated_s"] == 1.75 and traces == "d"
    assert found["outside_s"] == [0.25, 1.25, 2.25, 0.75]


def test_what_lies_between_the_operations_of_a_step_is_simulated_too(monkeypatch):
    """A message that an idle rank waits for, and the next instruction, each as in this step; norms before the ranks meet."""
    import terapipe_c as tp

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    pipeline, between_of = of_training("between_of", "pipeline")
    simulated, ms = pipeline["simulated"], 1e-3
    lists = [[("F", 0, 1.0), ("SF", 0, 0.1), ("B", 0, 2.0), ("OPT", 0, 0.5)],
             [("F", 1, 1.5), ("B", 1, 2.5), ("SB", 1, 0.1), ("OPT", 1, 3.0)]]  # fmt: skip
    starts = [[0.0, 1.02, 5.8, 7.82], [1.42, 2.94, 5.46, 5.58]]  # 0.02 between, 0.3 (SF) and 0.24 (SB) for messages
    traces = [[(op, stage, 0, 0, ms * at, ms * (at + took)) for (op, stage, took), at in zip(*rank, strict=True)]
              for rank in zip(lists, starts, strict=True)]  # fmt: skip
    found, program = between_of(traces), tp.schedules.gpipe(2, 1).lower()
    assert found["handover_s"] == pytest.approx(0.27 * ms) and found["between_s"] == pytest.approx(0.02 * ms)
    assert found["late"] == {"rank 0 B0.0": pytest.approx(0.24 * ms), "rank 1 F1.0": pytest.approx(0.3 * ms)}
    assert found["span_s"] == pytest.approx(8.58 * ms)
    assert simulated(program, traces, {}) == pytest.approx((1.0 + 0.1 + 1.5 + 2.5 + 0.1 + 3.0) * ms)
    assert simulated(program, traces) == pytest.approx((1.02 + 0.12 + 0.27 + 1.52 + 2.52 + 0.12 + 3.0) * ms)


def test_a_pipeline_of_chunks_is_what_the_engine_runs():
    """Every slice through every stage, checked."""
    _, chunked = of_training("chunked", "pipeline")
    for chunks, slices in ((1, 1), (1, 8), (2, 8), (3, 4), (4, 4), (2, 6)):
        program = chunked(chunks, slices)
        program.check()
        assert program.num_stages == 4 * chunks and list(program.slices) == [slices]


def test_halves_of_layers_are_placed_by_what_they_took(monkeypatch):
    """Costs are found again in a made-up step, what stopped within aside; each block has its stage once; and the pipeline is faster
    than with stages alike, by the simulator."""
    import numpy as np

    import terapipe_c as tp

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    placing = vars(importlib.import_module("gpu.placing"))
    looped = placing["looped"]
    assert looped(4, 12, 3) == tp.schedules.looped_bfs(4, 1, 3, 3)
    model, halves, slices = tp.GPTConfig(24, 16, 2048, 50257, 2048, tie_weights=False), [1, 2, 4, 5, 5, 5, 6, 6, 6, 5, 3, 0], 4
    parts = {"F": [150.0, 220.0, 1200.0, 3.0], "I": [260.0, 230.0, 5.0, 20.0], "W": [450.0, 800.0, 2000.0, 40.0]}
    made = placing["kinds"](halves)
    assert made[:, :3].sum(axis=0).tolist() == [24, 24, 1] and made.sum(axis=1).tolist() == [n + 1 for n in halves[:-1]] + [2]
    traces = [[] for _ in range(4)]
    for stage in range(12):
        for op, of in parts.items():
            for s in range(slices):
                took = 1e-6 * float(made[stage] @ of) * (op != "W" or s == 0) * (2.0 if (op, stage, s) == ("I", 5, 3) else 1.0)
                traces[stage % 4].append((op, stage, 0, s, 0.0, took))
        traces[stage % 4] += [("SF", stage, 0, 0, 0.0, 1e-5), ("OPT", stage, 0, 0, 0.0, 3e-4 if stage else 1e-3)]
    costs = placing["Costs"](model, halves, traces, {"between_s": 0.0, "handover_s": 25e-6})
    assert all(np.allclose(costs.rates[op], 1e-6 * np.array(of)) for op, of in parts.items())
    assert costs.send_s == pytest.approx(1e-5) and costs.first_s > 5e-4
    for stages in (4, 13):
        program_of = partial(costs.program, looped(4, stages, slices))
        found, seconds = placing["placed"](model, stages, program_of, costs, kicks=1)
        program_of(found).check(canonical=True)
        partition, alike = placing["edges_of"](model, found), [48 // stages + (k < 48 % stages) for k in range(stages)]
        assert partition[0][0] == 0 and partition[-1][1] == 50 and sum(found) == 48 and min(found[:-1]) > 0
        assert all(before[1] == after[0] for before, after in itertools.pairwise(partition))
        assert seconds < 0.99 * costs.seconds(program_of(alike), alike)
        assert costs.seconds(placing["by_parameters"](model, 4, found, slices), found) < 1.1 * seconds
        assert stages > 4 or (found, seconds) == placing["placed"](model, stages, program_of, costs, kicks=1)


def a_step(late=0.0, given_late=0.0, told_late=0.0, long=0.0):
    """(traces, given) of two ranks: F, its message and F; the second F begins late, given late, its host having been told late, and
    takes longer."""
    ready = 12e-3
    first = [("F", 0, 0, 0, 11e-3, ready - 1e-4), ("SF", 0, 0, 0, ready - 1e-4, ready)]
    second = [("RF", 1, 0, 0, 1e-3, 1e-3), ("F", 1, 0, 0, ready + late, ready + 2e-3 + late + long)]
    told = ready + told_late if told_late else 2e-3
    given = max(told, ready + given_late if given_late else 0.0) + 1e-5
    return [first, second], [[(1e-3, 1e-3, 1e-3), (1e-3, 1e-3, told)], [(1e-3, 1e-3, 1e-3), (2e-3, given - 1e-5, given)]]


def test_what_begins_late_is_the_hosts_doing_or_the_devices(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    late, operations = of_training("operations", "pipeline, late starts")
    right = operations(*a_step())
    assert [op["op"] for op in right] == ["F0.0", "F1.0"] and right[1]["ready"] == 12e-3
    cases = {
        "nothing": ({}, (0, 0, 0, 0, 0)),
        "device": ({"late": 1e-3}, (1, 1, 0, 0, 1)),
        "asleep": ({"late": 1e-3, "given_late": 0.8e-3}, (1, 1, 0.81, 0.8, 0.19)),
        "told late": ({"late": 1e-3, "told_late": 0.6e-3}, (1, 1, 0.61, 0, 0.39)),
        "little": ({"late": 0.1e-3}, (0, 0, 0, 0, 0)),
    }
    for name, (step, (count, *ms)) in cases.items():
        found = late["summed"]([operations(*a_step(**step))])
        told = [found[f"late_{of}ms"] for of in ("", "by_host_", "as_host_slept_", "by_device_")]
        assert (found["late_starts"], told) == (count, pytest.approx(ms, abs=1e-6)), name
        assert found["stops"] == 0 and json.dumps(found)
    found = late["summed"]([operations(*a_step(long=long)) for long in (0.0, 0.0, 0.9e-3)])
    assert found["late_starts"] == found["stops_by_host_ms"] == 0
    assert found["stops"] == pytest.approx(1 / 3) and found["stops_by_device_ms"] == pytest.approx(0.3)
    assert late["rows_of"](right)[1].startswith("1 F1.0 11000 11000 ")
    around = late["around"](15e-3, [1_000_000, 2_000_000], right, a_step()[1], [14_500_000, 14_400_000])
    assert around == pytest.approx({"before_ms": 10, "reading_ms": 12.5, "besides_ms": 1.5})


def test_a_process_that_ends_leaves_the_other_ways(monkeypatch):
    """One is killed, one fails: what the others found is kept, and what is fastest is told."""
    import os
    import signal

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    late, asked = of_training("pipeline_late", "pipeline, late starts")
    found = dict(late_starts=2.0, late_by_host_ms=0.5, late_by_device_ms=1.0, stops=0, stops_by_host_ms=0, stops_by_device_ms=0)

    def steps_by_ways(model, params, ways):
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "8":
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("TERAPIPE_CUDA_GRAPHS") == "0":
            raise RuntimeError("a sticky error")
        return {way: {"step_s": 0.06 - 0.001 * i, **found} for i, way in enumerate(ways)}

    monkeypatch.setenv("GPU_CHECK_SMALL", "1")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setitem(late, "steps_by_ways", steps_by_ways)
    result = asked()
    assert result["8 queues"] == {"why": "ended with exit code -9"}
    assert result["no graphs"] == {"why": "RuntimeError: a sticky error"}
    assert result["headline"].startswith("32 queues, as is: 60.0 ms, 2.0 late (0.5 ms by the host, 1.0 by the device), 0.0 stops")
    assert "; 32 queues, queued: 57.0 ms" in result["headline"]
    monkeypatch.setitem(late, "RUNS", {"8 queues": late["RUNS"]["8 queues"]})
    with pytest.raises(RuntimeError, match="exit code -9"):
        asked()


QUESTIONS = '''
import os, signal, subprocess, sys, time
from pathlib import Path
from gpu_check import Question, so_far

def hang():
    so_far({"step": 3})
    time.sleep(60)

def slow():
    time.sleep(3.6)
    return {"n": 4}

def stray():
    """As a rank of tp.launch: a session of its own."""
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    so_far({"pid": rank.pid})
    time.sleep(60)

def odd():
    class Number:
        size = 1
        def item(self):
            return 0.5
    nan = float("nan")
    return {"headline": "odd", "number": Number(), "place": Path("/x"), "not finite": [nan, {"least": -float("inf")}, (nan, 1.0)]}

def graphs():
    if os.environ.get("GRAPHS") != "0":
        so_far({"headline": "half"})
        os.kill(os.getpid(), signal.SIGSEGV)
    return {"headline": "all the same"}

def where():
    return {name: os.environ.get(name, "") for name in ("TERAPIPE_CUDA_MODULE", "GPU_CHECK_SMALL", "NCCL_NET")}

QUESTIONS = [Question("where", 20, where, 47),
             Question("right", 20, lambda: {"headline": "seven", "n": 7}, 10), Question("wrong", 20, lambda: 1 / 0, 11),
             Question("hangs", 3.2, hang, 40), Question("fast", 20, lambda: [], 41), Question("slow", 3.5, slow, 42),
             Question("stray", 3.2, stray, 43), Question("odd", 20, odd, 44),
             Question("graphs", 20, graphs, 45, otherwise={"GRAPHS": "0"}),
             Question("never", 20, lambda: 1 / 0, 46, otherwise={"GRAPHS": "0"})]
'''


@pytest.fixture
def checkout(tmp_path):
    """The script with four questions of its own, a package that needs no building, and a GPU that a script claims."""
    (tmp_path / "benchmarks/gpu").mkdir(parents=True)
    for name in ("gpu_check.py", "common.py"):
        (tmp_path / "benchmarks" / name).write_text((ROOT / "benchmarks" / name).read_text())
    (tmp_path / "benchmarks/gpu/mine.py").write_text(QUESTIONS)
    (tmp_path / "benchmarks/gpu_library.py").write_text("")
    (tmp_path / "setup.py").write_text("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text(
        '#!/bin/sh\ncase "$1" in *mig*) exit 6;; esac\necho "NVIDIA H200, 9.0"\n')  # an old one does not know every field
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    (tmp_path / "out").mkdir()
    return tmp_path


def check(checkout, *options, **environment):
    for before in (checkout / "out").iterdir():
        before.unlink()
    ran = subprocess.run([sys.executable, "benchmarks/gpu_check.py", *options], cwd=checkout, capture_output=True, text=True,
                         env={"PATH": f"{checkout / 'bin'}:/usr/bin:/bin", "OUT": str(checkout / "out")} | environment)  # fmt: skip
    (written,) = (checkout / "out").iterdir()
    return ran, json.loads(written.read_text(), parse_constant=pytest.fail)  # NaN and Infinity, of which JSON knows nothing


def test_a_question_that_fails_or_hangs_leaves_the_others(checkout):
    ran, result = check(checkout, "--only", "right", "wrong", "hangs", "fast", "--seconds", "60")
    found = result["questions"]
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert result["gpu"] == {"name": "NVIDIA H200", "compute_cap": "9.0"} and result["build"]["archs"] == "90"
    assert found["right"]["answer"]["n"] == 7 and found["fast"]["ok"]
    assert "ZeroDivisionError" in found["wrong"]["output"] and "ZeroDivisionError" in ran.stdout and "seven" in ran.stdout
    assert found["hangs"]["why"] == "ran past its deadline of 6 s" and found["hangs"]["so_far"] == {"step": 3}
    marks = "~^"  # beneath a line of a trace; the ^^^ that 3.11 and 3.12 draw beneath calls are ~~~~^^ from 3.13 on
    told = "there is room for words alone"
    assert len(ran.stdout) < 12000 and marks in found["wrong"]["output"] and marks not in ran.stdout, told


HANGING = """
import os, time
from gpu_check import Question

def hang_here():
    print("so far", flush=True)
    time.sleep(60)

def last():
    return {"headline": os.environ.get("GRAPHS", "1")}

def graphs():
    hang_here() if os.environ.get("GRAPHS") != "0" else None

QUESTIONS = [*(Question(f"hangs {i}", 30, hang_here, 10) for i in range(8)), Question("last", 30, last, 20),
             Question("graphs", 12, graphs, 9, otherwise={"GRAPHS": "0"})]
"""


def test_what_hangs_takes_no_time_of_what_waits(checkout):
    """Eight questions of right or wrong that hang, in lanes that have time for two or three of their deadlines."""
    (checkout / "benchmarks/gpu/mine.py").write_text(HANGING)
    script = checkout / "benchmarks/gpu_check.py"
    text = script.read_text()
    for name, value in (("BUILD_S", 0.75), ("RIGHT_S", 10.5), ("KEPT_S", 2.4), ("LEAST_S", 0.75), ("TRACE_S", 0.8)):
        text, count = re.subn(rf"^{name} = [0-9.]+", f"{name} = {value}", text, flags=re.M)
        assert count == 1, name
    script.write_text(text)
    ran, result = check(checkout, "--seconds", "15.75")
    found = result["questions"]
    assert ran.returncode == 1 and found["last"]["ok"] and result["not_asked"] == [], ran.stdout
    assert found["graphs"]["why"].startswith("ran past") and found["graphs"]["again"]["ok"], found["graphs"]
    for i in range(8):
        one = found[f"hangs {i}"]
        assert "so far" in one["output"] and "in hang_here" in one["output"] and f"---- hangs {i}: ran past" in ran.stdout, one


def test_a_slow_one_has_what_others_left(checkout):
    assert check(checkout, "--only", "slow")[1]["questions"]["slow"]["ok"]
    late = check(checkout, "--only", "slow", "--seconds", "3.4")[1]["questions"]["slow"]
    assert not late["ok"] and late.get("deadline_s", 0.0) <= 3.4


def test_what_cannot_be_loaded_or_written_leaves_the_others(checkout):
    """A file of questions that does not load, a result that has no place, a process that cannot be started."""
    (checkout / "benchmarks/gpu/broken.py").write_text("import nothing_of_this_name\n")
    (checkout / "file").write_text("")
    ran, result = check(checkout, "--only", "broken", "right", "--out", str(checkout / "file/here.json"))
    assert ran.returncode == 1 and "here.json was not written" in ran.stdout, ran.stdout + ran.stderr
    assert ran.stdout.rstrip().endswith(f"NOT written, or not to its end: {checkout}/file/here.json"), ran.stdout
    assert result["questions"]["right"]["ok"] and "nothing_of_this_name" in result["questions"]["broken"]["output"]
    assert not [*(checkout / "out").glob("*.new")]


def test_a_question_that_cannot_be_asked_is_a_failure(monkeypatch, tmp_path):
    def shortage(*_, **__):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(gpu_check, "ask", shortage)
    monkeypatch.setattr(gpu_check, "BEGAN", time.monotonic())  # it was imported before all other tests
    options = gpu_check.arguments().parse_args(["--out", str(tmp_path / "result.json")])
    asked = gpu_check.Question("one", 20, lambda: 1, order=40)
    gpu_check.Check([asked], {"name": "NVIDIA H200"}, options).put(asked, gpu_check.math.inf)
    found = json.loads((tmp_path / "result.json").read_text())["questions"]["one"]
    assert not found["ok"] and "no more processes" in found["output"]


def test_a_gpu_that_does_not_answer_holds_nobody_up(checkout, monkeypatch):
    (checkout / "bin/nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setenv("PATH", f"{checkout / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(gpu_check, "ASK_DRIVER", "print('NVIDIA H100', '9.0', 'GPU-7', sep='\\n')")
    assert gpu_check.gpu(8.0) == {"name": "NVIDIA H100", "compute_cap": "9.0"}


DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGetName(char *name, int most, int device) { strncpy(name, "NVIDIA A100", (unsigned)most); return device; }
int cuDeviceGetUuid(unsigned char *uuid, int device) { memset(uuid, 0xa1, 16); return device; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 75 ? 8 : 0; return device; }
"""


def test_the_gpu_that_is_named_is_the_one_that_cuda_takes(checkout, monkeypatch):
    """nvidia-smi's first may be another, of a display; kernels would be built for that one, and figures bear its name."""
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-", "-o", f"{checkout}/libcuda.so.1"], input=DRIVER, text=True, check=True)
    (checkout / "bin/nvidia-smi").write_text(
        '#!/bin/sh\ncase "$*" in *mig*) exit 6;; *GPU-a1a1a1a1-*) echo "NVIDIA A100, 8.0";; *) echo "NVIDIA T400, 7.5";; esac\n')
    monkeypatch.setenv("PATH", f"{checkout / 'bin'}:/usr/bin:/bin")
    assert gpu_check.gpu() == {"name": "NVIDIA T400", "compute_cap": "7.5"}  # where no driver is found
    monkeypatch.setenv("LD_LIBRARY_PATH", str(checkout))
    assert gpu_check.gpu() == {"name": "NVIDIA A100", "compute_cap": "8.0"}


def test_a_build_that_fails_says_why(checkout):
    (checkout / "setup.py").write_text("import sys\nprint('x.cu(7): error: no such thing')\nsys.exit(1)\n")
    ran, result = check(checkout)
    assert ran.returncode == 1 and "no such thing" in ran.stdout and "no such thing" in result["build"]["output"]
    assert result["questions"] == {}


def test_what_cannot_be_ended_is_left_behind(monkeypatch):
    """A process that waits within the driver for a GPU that hangs does not end when it is killed."""
    monkeypatch.setattr(gpu_check, "ENDING_S", 0.2)
    monkeypatch.setattr(gpu_check.os, "killpg", lambda group, number: None)
    child = gpu_check.Child([sys.executable, "-c", "import time; time.sleep(60)"])
    status, _, took = child.end(0.1)
    child.process.kill()
    child.process.wait()
    assert status is None and took < 30


def test_a_rank_that_is_left_behind_is_ended(checkout):
    """It has a session of its own, so no signal to the question's group ends it; hanging it would keep its memory of the GPU."""
    pid = check(checkout, "--only", "stray")[1]["questions"]["stray"]["so_far"]["pid"]
    assert until_gone(pid)


def until_gone(pid):
    for _ in range(200):
        place = Path(f"/proc/{pid}/stat")
        try:
            if place.read_text().rpartition(") ")[2].startswith("Z"):
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_an_answer_is_not_lost_for_what_json_does_not_know(checkout):
    _, result = check(checkout, "--only", "odd")
    assert result["questions"]["odd"]["answer"] == {"headline": "odd", "number": 0.5, "place": "/x",
                                                    "not finite": ["nan", {"least": "-inf"}, ["nan", 1.0]]}  # fmt: skip


def test_what_fails_is_asked_again_without_what_may_be_at_fault(checkout):
    ran, result = check(checkout, "--only", "graphs", "never")
    one, never = result["questions"]["graphs"], result["questions"]["never"]
    assert not one["ok"] and one["why"] == "killed by SIGSEGV" and one["so_far"] == {"headline": "half"}
    assert one["again"]["ok"] and one["again"]["answer"] == {"headline": "all the same"}
    assert one["again"]["environment"] == {"GRAPHS": "0"} and "with GRAPHS=0: all the same" in ran.stdout
    assert not never["again"]["ok"] and "ZeroDivisionError" in never["again"]["output"] and ran.returncode == 3


def test_told_to_end_it_leaves_nobody_behind(checkout):
    environment = {"PATH": f"{checkout / 'bin'}:/usr/bin:/bin", "OUT": str(checkout / "out")}
    running = subprocess.Popen([sys.executable, "benchmarks/gpu_check.py", "--only", "right", "hangs"], cwd=checkout,
                               stdout=subprocess.PIPE, text=True, env=environment)  # fmt: skip
    for line in running.stdout:
        if line.startswith("right"):
            break
    mine = []
    for _ in range(200):
        if mine:
            break
        time.sleep(0.02)
        for place in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"GPU_CHECK_CHILD={running.pid}.".encode() in place.read_bytes():
                    mine.append(int(place.parent.name))
            except OSError:
                continue
    running.terminate()
    assert running.wait(30) == 128 + 15 and "ended by SIGTERM" in running.stdout.read()
    running.stdout.close()
    assert mine and all(until_gone(pid) for pid in mine)
    (written,) = (checkout / "out").iterdir()
    assert json.loads(written.read_text())["questions"]["right"]["ok"]


def test_exit_status(checkout):
    assert check(checkout, "--only", "right")[0].returncode == 0
    assert check(checkout, "--only", "hangs")[0].returncode == 3  # all is right, some speed was not measured


def test_what_a_run_of_the_day_has_measured_stays(checkout):
    """Another run, of one question or of one that then fails to build, takes another name."""
    first = check(checkout, "--only", "right", "fast")[1]
    check(checkout, "--only", "fast")
    (checkout / "setup.py").write_text("raise SystemExit('no')")
    ran = check(checkout, "--only", "fast")[0]
    names = sorted(path.name for path in (checkout / "benchmarks/results").iterdir())
    assert [re.sub(r"h200-[0-9]{4}-[0-9]{2}-[0-9]{2}", "", name) for name in names] == ["-2.json", "-3.json", ".json"], names
    assert json.loads((checkout / "benchmarks/results" / names[2]).read_text()) == first and ran.returncode == 1


def test_a_shell_that_has_the_emulator_gives_no_figures_of_it(checkout):
    """TERAPIPE_CUDA_MODULE names another backend, and a rehearsal's sizes are tiny: neither is what this GPU does."""
    left = {"TERAPIPE_CUDA_MODULE": "/x/_cuda_emu.so", "GPU_CHECK_SMALL": "1", "NCCL_NET": "Socket"}
    found = check(checkout, "--only", "where", **left)[1]
    assert found["questions"]["where"]["answer"] == {"TERAPIPE_CUDA_MODULE": "", "GPU_CHECK_SMALL": "", "NCCL_NET": "Socket"}
    assert found["environment"] == {"NCCL_NET": "Socket"} and 0 < found["seconds"] < 60


def test_what_was_not_asked_is_not_wrong(checkout):
    """A question of right or wrong that no time was left for."""
    ran, result = check(checkout, "--only", "right", "--seconds", "2.9")
    assert result["questions"]["right"]["why"] == "no time was left" and ran.returncode == 3
    assert result["not_asked"] == ["right"]
    assert "0 of 1 answered" in ran.stdout and "failed: right" in ran.stdout


def test_no_gpu_is_not_measured(checkout):
    (checkout / "bin/nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    ran = subprocess.run([sys.executable, "benchmarks/gpu_check.py"], cwd=checkout, capture_output=True, text=True,
                         env={"PATH": f"{checkout / 'bin'}:/usr/bin:/bin"})  # fmt: skip
    assert ran.returncode == 2 and "nothing was measured" in ran.stderr, ran.stderr
