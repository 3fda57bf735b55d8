"""Questions of ``planner="auto"`` on several cores: the same plan and the same words as on one, and nobody is left at work."""
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import _core
from terapipe_c._core import DeadlineError
from terapipe_c.planning.deadline import late, within
from terapipe_c.planning.side_by_side import SideBySide

MODEL = tp.GPTConfig(n_layer=3, n_head=2, n_embd=32, vocab_size=64, block_size=32)
CLUSTER = tp.Cluster(num_devices=4, memory_bytes=1e9, link_latency_s=1e-5, link_bandwidth_Bps=1e9, peak_flops=1e10)


def cores(monkeypatch, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))


def planners():
    return [thread for thread in threading.enumerate() if thread.name.startswith("terapipe plan")]


def no_more_threads(monkeypatch, count):
    """Of the threads that plan ``count`` can be started."""
    start, left = threading.Thread.start, [count]

    def refuse(thread):
        if thread.name.startswith("terapipe plan"):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.parametrize("request_", [{"stages": 2}, {}, {"stages": 2, "memory_bytes": 2.2e6, "executable": False},
                                      {"stages": 3, "schedule": "hanayo"}], ids=str)
def test_the_plan_does_not_depend_on_the_cores(request_, monkeypatch):
    seen = []
    for count, threads in ((1, 0), (7, 9), (3, 1)):
        cores(monkeypatch, count)
        with monkeypatch.context() as patch:
            no_more_threads(patch, threads)
            plan = tp.plan(MODEL, CLUSTER, batch=3, seq_len=32, granularity=8, **request_)
        seen.append((plan.digest, plan.step_time_s, plan.search_log, plan.compared, plan.peak_memory_bytes))
        assert planners() == []
    assert seen == seen[:1] * len(seen)


def test_a_refusal_does_not_depend_on_them_either(monkeypatch):
    said = set()
    for count in (1, 4):
        cores(monkeypatch, count)
        with pytest.raises(tp.InfeasibleError) as error:
            tp.plan(MODEL, CLUSTER, batch=3, seq_len=32, granularity=8, stages=2, memory_bytes=1000, executable=False)
        said.add((str(error.value), error.value.memory_bytes))
    assert len(said) == 1 and planners() == []


def test_what_is_on_its_way_is_stopped_when_somebody_leaves(monkeypatch):
    """In C for minutes, in Python, and not yet begun."""
    cores(monkeypatch, 2)
    begun, ended = [threading.Event(), threading.Event()], []
    seconds = 1e-6 * (np.arange((1 << 19) + 1) + np.random.default_rng(2).uniform(30.0, 35.0, (1 << 19) + 1))

    def in_c():
        begun[0].set()
        try:
            _core.plan_slices_apart((seconds, seconds, 0.0, 0.0), (2 * seconds, seconds, 0.0, 0.0), 16)
        finally:
            ended.append("C")

    def in_python():
        begun[1].set()
        while not late():
            time.sleep(0.001)
        ended.append("Python")

    with pytest.raises(KeyboardInterrupt), SideBySide() as beside:
        answers = [beside.ask(question) for question in (in_c, in_python, lambda: ended.append("later"))]
        assert all(event.wait(20.0) for event in begun)
        time.sleep(0.2)
        assert ended == []
        raise KeyboardInterrupt
    assert sorted(ended) == ["C", "Python"] and planners() == [] and len(answers) == 3


def test_within_a_limit_of_time_the_asking_thread_answers(monkeypatch):
    """Whose the limit is."""
    cores(monkeypatch, 4)
    with within(3600.0), SideBySide() as beside:
        answer = beside.ask(lambda: (threading.current_thread(), late()))
        assert answer() == (threading.main_thread(), False) and answer() is answer() and beside.window == 1


def test_an_error_is_raised_where_the_answer_is_wanted(monkeypatch):
    def refuse():
        raise DeadlineError("no")

    for count in (1, 2):
        cores(monkeypatch, count)
        with SideBySide() as beside:
            answer = beside.ask(refuse)
            with pytest.raises(DeadlineError, match="no"):
                answer()


def test_a_flag_is_a_byte_at_least():
    with pytest.raises(ValueError, match="one would be right"):
        _core.deadline_stop_by(bytearray())
    with pytest.raises(TypeError):
        _core.deadline_stop_by(1)
    flag = bytearray(1)
    _core.deadline_stop_by(flag)
    try:
        assert not late()
        flag[0] = 1
        assert late()
    finally:
        _core.deadline_stop_by(None)
    assert not late()


def test_ctrl_c_ends_a_plan_on_several_cores():
    """One that takes minutes, in a process whose threads would keep it alive."""
    code = ("import os, terapipe_c as tp\nos.sched_getaffinity = lambda pid: {0, 1, 2}\n"
            "model = tp.GPTConfig(n_layer=96, n_head=96, n_embd=12288, vocab_size=50257, block_size=2048)\n"
            "print('begun', flush=True)\ntp.plan(model, tp.Cluster.preset('a100-80', 96), 256, 2048)")
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "begun\n"
        time.sleep(1.0)
        sent = time.monotonic()
        child.send_signal(signal.SIGINT)
        errors = child.communicate(timeout=60)[1]
        print(f"ended {time.monotonic() - sent:.2f} s later")
    assert child.returncode == -signal.SIGINT and errors.rstrip().endswith("KeyboardInterrupt")


def test_others_may_plan_when_the_main_thread_has_ended():
    """Nor does the interpreter wait for a daemon's plan, which takes minutes."""
    code = ("import atexit, os, threading, time, terapipe_c as tp\nos.sched_getaffinity = lambda pid: {0, 1, 2}\n"
            "def plan(layers, wide):\n"
            "    model = tp.GPTConfig(n_layer=layers, n_head=2, n_embd=wide, vocab_size=64, block_size=2048)\n"
            "    tp.plan(model, tp.Cluster.preset('a100-80', layers), layers, 64 * layers)\n    print(layers, flush=True)\n"
            "def after_main():\n    threading.main_thread().join()\n    plan(2, 32)\n"
            "threading.Thread(target=after_main).start()\natexit.register(plan, 1, 32)\n"
            "threading.Thread(target=plan, args=(32, 4096), daemon=True).start()\ntime.sleep(0.2)")
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.split("\n"), done.stderr) == (["2", "1", ""], "") and done.returncode == 0
