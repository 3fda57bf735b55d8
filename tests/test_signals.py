"""Ctrl-C, and whatever a signal's handler raises, ends a long call in C soon, whichever planner it is in; a handler that returns
changes nothing (csrc/py/away.c)."""
import functools
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import _core, engine, planners, schedules
from terapipe_c._threads import Worker
from terapipe_c.planning.deadline import late, limited, within

HERE = Path(__file__).resolve().parent
LONG = re.findall(r"@call\ndef (\w+)", (HERE / "long_calls.py").read_text())
SOON_S = 60.0          # against minutes; where nothing else runs it is a tenth of a second
MODEL = tp.GPTConfig(n_layer=4, n_head=2, n_embd=16, vocab_size=64, block_size=32)
CLUSTER = tp.Cluster(num_devices=6, memory_bytes=1e9, link_latency_s=1e-6, link_bandwidth_Bps=1e9, peak_flops=2e9)


class Child:
    """long_calls.py in a process of its own."""

    def __init__(self, *names):
        self.process = subprocess.Popen([sys.executable, str(HERE / "long_calls.py"), *names], stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, bufsize=0)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()

    def line(self):
        assert select.select([self.process.stdout], [], [], SOON_S)[0], "nothing was heard"
        return self.process.stdout.readline().decode().strip() or self.process.stderr.read().decode()

    def press(self, after_s=0.4):
        time.sleep(after_s)
        self.process.send_signal(signal.SIGINT)


@pytest.mark.parametrize("names", [LONG[k::4] for k in range(4)], ids=lambda names: names[0])
def test_ctrl_c_ends_every_long_call(names):
    with Child(*names) as child:
        for name in names:
            assert child.line() == name
            child.press()
            assert child.line() == "ended", name


def test_a_process_ends_by_ctrl_c_in_a_long_call():
    source = "import long_calls; print('begins', flush=True); long_calls.CALLS['piper']()"
    paths = os.pathsep.join((str(HERE), os.environ["PYTHONPATH"]))
    child = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             env={**os.environ, "PYTHONPATH": paths})
    assert child.stdout.readline() == "begins\n"
    time.sleep(0.4)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=SOON_S)
    assert child.returncode == -signal.SIGINT and errors.rstrip().endswith("KeyboardInterrupt")


class Alarms:
    """SIGALRM every so many seconds, and its handler, as long as the block lasts."""

    def __init__(self, handler, every_s=0.01):
        self.handler, self.every_s, self.count = handler, every_s, 0

    def __enter__(self):
        def handle(number, frame):
            self.count += 1
            self.handler()

        self.before = signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, self.every_s, self.every_s)
        return self

    def __exit__(self, *exception):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)


def chain(blocks=200):
    rng = np.random.default_rng(1)
    forward = rng.uniform(1.0, 50.0, blocks)
    memory = {"static_bytes": rng.uniform(1.0, 9.0, blocks), "activation_bytes": rng.uniform(1.0, 9.0, blocks)}
    return forward, 2 * forward, memory


def asked(name):
    """About a second of a planner, and its answer; strip takes out how long it took."""
    forward, backward, memory = chain()
    if name == "dapple":
        return planners.dapple(forward[:80], backward[:80], 48, 96)
    if name == "adapipe":
        return planners.adapipe(forward, backward, 16, 64, memory={**memory, "limit_bytes": 1000.0, "recompute_s": forward})
    if name == "slices":
        i = np.arange((1 << 15) + 1, dtype=float)
        G = 1e-6 * (30 + i + np.random.default_rng(1).uniform(0.0, 5.0, i.size))
        return _core.plan_slices([(G, G, 1e-9, 1e-13)], 1, 16)[:-1]
    if name == "split":
        return schedules.one_f_one_b(32, 2000).split()
    return tp.plan(MODEL, CLUSTER, batch=8, seq_len=32)


@functools.cache
def alone(name):
    """What it answers where no signal comes: the same whoever asks."""
    return asked(name)


def undisturbed(name):
    return strip(repr(alone(name)))


def strip(text):
    return re.sub(r"(planned in:?|seconds=|in) ?[\d.e+-]+ ?(m|u|n)?s?", "", text)


NAMES = ["dapple", "adapipe", "slices", "split", "joint"]


@pytest.mark.parametrize("name", NAMES)
def test_a_handler_that_returns_changes_nothing(name):
    with Alarms(lambda: None) as alarms:
        interrupted = asked(name)
    assert alarms.count > 0 and strip(repr(interrupted)) == undisturbed(name)


def test_handlers_run_while_stages_are_cut():
    """Some seconds of a call without a search to interrupt. Where nobody listens they run behind it: once, for all that came."""
    model = tp.GPTConfig(n_layer=1000, n_head=16, n_embd=1024, vocab_size=50257, block_size=1024)
    seconds = np.floor(np.random.default_rng(1).uniform(1e3, 5e3, model.num_blocks))
    asked = model, [(1, [1024])] * 64, schedules.one_f_one_b(64, 64).lower(True), 1 << 36, seconds
    stages = engine.cut_stages(*asked)
    with Alarms(lambda: None) as alarms:
        assert engine.cut_stages(*asked) == stages and len(stages) == 64
    assert alarms.count > 5


class Enough(Exception):
    """A handler's own."""


@pytest.mark.parametrize("name", NAMES)
def test_a_handler_that_raises_ends_the_call_and_leaves_nothing_behind(name):
    whole = undisturbed(name)

    def raise_it():
        raise Enough("by now")

    for _ in range(2):
        with pytest.raises(Enough, match="by now"), Alarms(raise_it, 0.05):
            for _ in range(10_000):
                asked(name)
        assert not late() and not limited()
        assert strip(repr(asked(name))) == whole


def test_a_handler_that_plans_does_so_without_the_limit_around():
    """And the plan that it interrupts keeps its own."""
    begun, seen = [], []

    def plan():
        if len(begun) < 3:
            begun.append(limited())
            seen.append(tp.plan(MODEL, CLUSTER, batch=4, seq_len=32, planner="piper", time_limit_s=1e9))

    small = tp.plan(MODEL, CLUSTER, batch=4, seq_len=32, planner="piper")
    whole = alone("joint")
    with Alarms(plan):
        limited_plan = tp.plan(MODEL, CLUSTER, batch=8, seq_len=32, time_limit_s=1e9)
    assert limited_plan == whole and not limited() and len(seen) == 3 and all(plan == small for plan in seen)


def test_a_handler_within_c_finds_no_limit_and_leaves_the_one_it_came_in():
    found = []
    with Alarms(lambda: found.append(limited())), within(1e6):
        asked("slices")
        assert limited() and not late()
    assert False in found and not limited()


def test_a_plan_within_a_limit_leaves_that_limit():
    with within(1e6):
        at = _core.deadline_get()
        tp.plan(MODEL, CLUSTER, batch=4, seq_len=32, planner="uniform", time_limit_s=1e3)
        assert _core.deadline_get() == at
    assert not limited()


def test_signals_are_the_main_threads():
    """Another thread that plans goes on; the main one is interrupted where it is."""
    whole, answers = undisturbed("slices"), []
    thread = threading.Thread(target=lambda: answers.append(asked("slices")))

    def raise_it():
        raise Enough

    thread.start()
    with pytest.raises(Enough), Alarms(raise_it, 0.05):
        while True:
            time.sleep(0.01)
    thread.join()
    assert [strip(repr(answer)) for answer in answers] == [whole]


def test_an_exception_takes_the_place_of_an_error():
    """The call that it ends fails for that reason alone: no DeadlineError, and nothing is called impossible."""
    forward, backward, memory = chain(400)

    def raise_it():
        raise Enough

    for _ in range(5):
        with pytest.raises(Enough), Alarms(raise_it, 0.02), within(1e6):
            while True:
                planners.dapple(forward, backward, 128, 256, memory={**memory, "limit_bytes": 4000.0})
        assert not late()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_the_thread_that_forked_is_the_childs_main_one():
    """A child of a thread hears signals there, and ends."""
    ended = []

    def fork():
        child = os.fork()
        if child == 0:
            try:
                signal.signal(signal.SIGALRM, signal.default_int_handler)
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                while True:
                    asked("slices")
            except KeyboardInterrupt:
                os._exit(7)
            finally:
                os._exit(8)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join(SOON_S)
    assert ended == [7]


def test_a_thread_is_waited_for_no_longer_than_was_said():
    """Not once for its work and once more for its end."""
    end, waits = threading.Event(), []
    thread = Worker(end.wait, name="rank 0")
    thread._did.wait = waits.append          # of a thread whose work goes on: False, as None is
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "join", lambda self, timeout=None: waits.append(timeout))
        thread.join(7.0)
    assert waits == [7.0] and thread.is_alive()
    end.set()


def test_a_ctrl_c_is_raised_once_no_rank_is_at_work(monkeypatch):
    """Python 3.11 takes a thread for ended whose join a Ctrl-C left: the call's ranks were still at work behind it."""
    at_work = []

    def run(self, tokens, **options):
        at_work.append(self)
        try:
            if len(at_work) == 2:
                time.sleep(0.1)                         # until the call waits for rank 0
                os.kill(os.getpid(), signal.SIGINT)
            while not self.region.aborted():
                time.sleep(0.001)
            time.sleep(0.5 if self.rank == 0 else 0.0)  # what an instruction may take; rank 0 was waited for first
            raise tp.AbortedError("given up")
        finally:
            at_work.remove(self)

    def begin(self, model, stages, slicing, program, rank, comm, **options):
        self.region, self.rank, self.names = comm.region, rank, ()

    monkeypatch.setattr(engine.RankEngine, "__init__", begin)
    monkeypatch.setattr(engine.RankEngine, "load", lambda self, params: None)
    monkeypatch.setattr(engine.RankEngine, "run", run)
    with pytest.raises(KeyboardInterrupt):
        tp.loss_and_grads(MODEL, tp.init_params(MODEL), np.zeros((1, 9), int), stages=2)
    assert not at_work


def test_an_abort_ends_a_rank_where_it_is():
    """It was heard between two instructions: an engine that takes memory for seconds, or a tensor's numbers, was made first. Both
    are made here of what takes longer than 20 ms, and the abort is there before."""
    model = tp.GPTConfig(n_layer=1, n_head=2, n_embd=256, vocab_size=100_000, block_size=8)
    program = schedules.gpipe(1, 1).lower(True)
    region = _core.Region.create(1, bytes(1), 1 << 12, max(64, engine.gather_bytes(model)), False)
    comm = _core.Comm(region, 0, 60.0)

    def made():
        return engine.RankEngine(model, [(0, model.num_blocks)], [(1, [8])], program, 0, comm)

    shape, params, whole = engine.dimensions(model), tp.init_params(model), made()
    region.abort("EIO", -1, "the disk is full")
    with pytest.raises(tp.AbortedError, match="rank 0 was ended: the disk is full"):
        made()
    with pytest.raises(tp.AbortedError, match="interrupted"):
        _core.model_init_param(shape, 0, 0, region)
    with pytest.raises(tp.AbortedError, match="the disk is full"):
        whole.load(params)


def test_handlers_run_while_parameters_are_made():
    """One tensor of some seconds."""
    model = tp.GPTConfig(n_layer=1, n_head=2, n_embd=256, vocab_size=100_000, block_size=8)
    with Alarms(lambda: None) as alarms:
        made = _core.model_init_param(engine.dimensions(model), 0, 1)
    assert alarms.count > 5 and np.array_equal(made, _core.model_init_param(engine.dimensions(model), 0, 1))
