"""A terminal or a launcher that halts for longer than a rank may wait for a message: the ranks go on, and so does the run."""
import contextlib
import errno
import fcntl
import os
import pty
import resource
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import threading
import time
import warnings
import weakref
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
from test_launch import HERE, start

import terapipe_c as tp
from terapipe_c import AbortedError, _core, checkpoint, engine, worker
from terapipe_c._threads import Worker, start_all
from terapipe_c.cli import main
from terapipe_c.progress import Beside, Progress

# Some 1500 events fill a socket; ranks that wait for each other do so many small steps in a second or two.
ENOUGH = 4000
STOPPED = "stopped, as by SIGSTOP or a debugger"


def prepared(tmp_path, name):
    """(model, a plan of 2 ranks, a folder)"""
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=16)
    cluster = tp.Cluster(num_devices=2, memory_bytes=1 << 34)
    plan = tp.plan(model, cluster, batch=2, seq_len=16, costs=tp.CostModel.analytic(model, cluster), planner="uniform",
                   schedule="1f1b", stages=2)
    return model, plan, tmp_path / name


def test_a_launcher_that_is_stopped_holds_no_rank_up():
    code = f"""
        import os, sys
        sys.path.insert(0, {str(HERE)!r})
        from test_launch import start
        run = start(10**7, timeout_s=2)
        for record in run:
            if record.step == 3:
                print("begun", flush=True)
            if record.step >= {ENOUGH}:
                run.stop()
        print("over", run.history[-1].step >= {ENOUGH}, flush=True)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "begun\n"
        child.send_signal(signal.SIGSTOP)
        time.sleep(6)           # a rank that told the launcher of each step waited for it, and after 2 s the other for that
        child.send_signal(signal.SIGCONT)
        assert child.stdout.readline() == "over True\n"
    finally:
        child.send_signal(signal.SIGCONT)
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_rank_that_is_stopped_as_it_leaves_holds_no_run_up(tmp_path):
    """Nobody waits for it but the launcher, which did so for ever: a run that was good is good, or it is said who did not end."""
    run = start(3, "Lingers", timeout_s=1.0, out=tmp_path / "run", checkpoint_every=3).wait(60)
    assert not run.running and len(run.history) == 3 and tp.load_checkpoint(run.out).step == 3 and run.report() is not None
    mute = start(3, "Mute", timeout_s=1.0)
    words = f"rank 1 did not end within 1 s of another rank's good end; {STOPPED}: rank 1 .process {mute.pids[1]}."
    with pytest.raises(tp.DeadlineError, match=words):
        mute.wait(60)
    assert not mute.running and not any(os.path.exists(f"/proc/{pid}") for pid in [*run.pids, *mute.pids])


def test_a_slow_disk_is_no_rank_that_does_not_answer(tmp_path):
    """A deadline that finds who is lost soon ended runs whose checkpoints go to a disk that takes its time."""
    run = start(2, "SlowDisk", timeout_s=0.6, out=tmp_path / "run", checkpoint_every=2).wait(60)
    assert tp.load_checkpoint(run.out).step == 2 and len(run.history) == 2


def test_a_rank_that_reads_long_is_no_rank_that_does_not_answer(tmp_path, monkeypatch):
    """Its part of a checkpoint may be many times another's: the others waited for timeout_s."""
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=16)
    data, read = np.arange(900) % 64, checkpoint.read_tensor
    plan = tp.plan(model, tp.Cluster(2), batch=2, seq_len=16, planner="uniform", schedule="1f1b", executable=True)
    options = {"out": tmp_path / "run", "processes": False, "progress": False, "lr_schedule": "constant"}
    tp.launch(plan, data, 1, checkpoint_every=1, **options).wait(60)

    def slow(path, spec):
        if spec.name == "transformer.ln_f.weight" and threading.current_thread() is not threading.main_thread():
            time.sleep(2.5)         # of rank 1
        return read(path, spec)

    monkeypatch.setattr(checkpoint, "read_tensor", slow)
    run = tp.launch(plan, data, 2, resume=True, checkpoint_every=0, timeout_s=1.0, **options).wait(60)
    assert [record.step for record in run.history] == [1]


def test_a_disk_is_not_waited_for_in_vain():
    """As by Ctrl-C, or where another rank has failed: what is left to read or write of a large checkpoint is left."""
    region, begun, told = _core.Region.create(2, bytes([0, 1, 1, 0]), 4096, 64, False), threading.Event(), []

    def work(in_vain):
        begun.set()
        told.append(in_vain.wait(30))

    def fail():
        assert begun.wait(30)
        region.abort("EIO", 1, "rank 1: no space")

    threading.Thread(target=fail).start()
    with pytest.raises(AbortedError, match="rank 1: no space"):
        worker.meanwhile(_core.Comm(region, 0, 20.0), 20.0, work)
    assert told == [True]


def test_who_only_reads_is_not_waited_for_where_the_run_ends():
    """A tokenizer looks at no Event, and may take minutes."""
    region, over = _core.Region.create(2, bytes([0, 1, 1, 0]), 4096, 64, False), threading.Event()
    region.abort("EIO", 1, "rank 1: no space")
    try:
        with pytest.raises(AbortedError, match="rank 1: no space"):
            worker.meanwhile(_core.Comm(region, 0, 20.0), 20.0, lambda in_vain: over.wait(60), leave=True)
        assert any(thread.name.startswith("the disk of") and thread.daemon for thread in threading.enumerate())
    finally:
        over.set()


def test_the_disk_of_a_rank_that_is_a_thread_does_not_hold_up_the_end_of_python():
    """Python ends a run of its own threads at its exit, before which it waits for all that are no daemons."""
    region, kinds = _core.Region.create(1, bytes(1), 0, 64, False), []

    def rank():
        kinds.append(worker.meanwhile(_core.Comm(region, 0, 20.0), 20.0, lambda in_vain: threading.current_thread().daemon))

    for daemon in (True, False):
        thread = threading.Thread(target=rank, daemon=daemon)
        thread.start()
        thread.join()
    assert kinds == [True, False]


def test_a_rank_that_is_stopped_in_a_step_is_named(tmp_path):
    """Whoever's wait was the longest: rank 0 may have waited for 1, which waited for 2."""
    model = tp.GPTConfig(n_layer=3, n_head=2, n_embd=16, vocab_size=256, block_size=16)
    cluster = tp.Cluster(3, memory_bytes=1 << 34)
    plan = tp.plan(model, cluster, batch=4, seq_len=16, costs=tp.CostModel.analytic(model, cluster), planner="uniform",
                   schedule="1f1b", stages=3)
    (tmp_path / "text").write_bytes(b"who holds them up? " * 300)
    run = tp.launch(plan, tmp_path / "text", 10**6, timeout_s=3.0)         # of one second a busy machine may need more for a step
    while run.running and len(run.history) < 3:
        time.sleep(0.01)
    os.kill(run.pids[2], signal.SIGSTOP)
    with pytest.raises(tp.DeadlineError, match=f"waited 3 s .*; {STOPPED}: rank 2 .process {run.pids[2]}."):
        run.wait(60)


def test_a_plan_whose_ranks_wait_beyond_the_deadline_is_warned_of(tmp_path):
    """Its run would end in the first step, as if a rank did not answer."""
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=256, block_size=16)
    cluster = tp.Cluster(2, memory_bytes=1 << 34, peak_flops=2e3)       # of years ago: rank 0 waits while rank 1 does its forwards
    plan = tp.plan(model, cluster, batch=16, seq_len=16, costs=tp.CostModel.analytic(model, cluster), planner="uniform",
                   schedule="gpipe", stages=2)
    (tmp_path / "text").write_bytes(b"who holds them up? " * 300)
    rows = plan.timeline().intervals
    rank, op = rows["rank"] == 0, rows["op"]
    longest = rows["start_s"][rank & (op > 0)].min() - rows["end_s"][rank & (op == 0)].max()     # behind its last forward
    assert 500 < longest < plan.step_time_s / 2
    words = f"timeout_s is 500, and by its costs this plan lets a rank wait {longest:.4g} s for"
    with pytest.warns(UserWarning, match=words) as told:
        tp.launch(plan, tmp_path / "text", 1, timeout_s=500, processes=False, out=tmp_path / "run").wait(60)
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match=f"timeout_s is {longest - 1:g}, and by its costs"):     # but not of other steps
        assert main(["resume", str(tmp_path / "run"), "--steps", "1", "--timeout-s", str(longest - 1), "--quiet"]) == 0
    for enough in (longest + 1, 0):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tp.launch(plan, tmp_path / "text", 0, timeout_s=enough, processes=False).wait(60)


def test_a_terminal_that_halts_holds_no_rank_up(monkeypatch):
    """As by Ctrl-S, or a connection that stalls: who iterates waits until it goes on, nobody else does."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    with open(slave, "w", buffering=1) as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        run = start(10**7, timeout_s=2, progress=True)
        monkeypatch.undo()

        def read_late():
            limit = time.monotonic() + 60
            while len(run.history) < ENOUGH and time.monotonic() < limit:
                time.sleep(0.1)
            with suppress(OSError):
                while os.read(master, 1 << 16):
                    pass

        reader = threading.Thread(target=read_late, daemon=True)
        try:
            for record in run:
                if record.step == 20:
                    os.set_blocking(slave, False)
                    with suppress(BlockingIOError):
                        while True:
                            os.write(slave, b"x" * 50)
                    os.set_blocking(slave, True)
                    reader.start()
                if record.step >= ENOUGH:
                    run.stop()
        finally:
            os.close(master)
    reader.join()
    assert run.history[-1].step >= ENOUGH


def test_a_rank_of_another_launcher_does_not_wait_for_a_terminal():
    """Rank 0 under torchrun shows the progress itself."""
    out, into = os.pipe()
    records = [SimpleNamespace(step=step, loss=1.0, tokens_per_s=1.0) for step in range(ENOUGH)]
    with open(into, "w", buffering=1) as stream, contextlib.redirect_stderr(stream):
        os.set_blocking(into, False)
        with suppress(BlockingIOError):
            while True:
                os.write(into, b"x" * 4096)
        os.set_blocking(into, True)
        reader = threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(out, 1 << 16), b"")], daemon=True)
        with Beside(Progress(True, 0, ENOUGH)) as shown:
            for count in range(1, ENOUGH + 1):
                shown.show(records[:count])                     # nobody reads, and this returns
            reader.start()
        assert not shown._thread.is_alive()
    reader.join(30)
    assert not reader.is_alive() and not os.close(out)


def test_records_that_a_halted_terminal_was_not_shown_are_not_kept():
    """A terminal may halt for a night, and each of its steps was kept until it went on."""
    halted, goes, shown = threading.Event(), threading.Event(), []

    def show(history, over):
        shown.append(([record.step for record in history], over))
        halted.set()
        goes.wait(60)

    with Beside(SimpleNamespace(silent=False, show=show)) as beside:
        halted.wait(60)
        records = [type("Record", (), {"step": step})() for step in range(100)]      # SimpleNamespace has no weak references
        kept = [weakref.ref(record) for record in records]
        while records:
            beside.show([records.pop(0)])
        assert sum(record() is not None for record in kept) == 1
        goes.set()
    assert shown[0] == ([], False) and shown[-1] == ([99], False) and len(shown) <= 3


def test_two_threads_that_wait_count_each_step_once(capsys):
    """Each is told of each step: the bar of one run."""
    shown = Progress(True, 0, 200)
    shown._bar = SimpleNamespace(n=0, set_postfix_str=lambda *_, **__: None, close=lambda: None)
    shown._bars = lambda **how: shown._bar

    def update(more):
        before = shown._bar.n
        time.sleep(0.001)               # a terminal takes its time
        shown._bar.n = before + more

    shown._bar.update = update
    records = [SimpleNamespace(step=step, loss=1.0, tokens_per_s=1.0) for step in range(200)]

    def wait():
        for count in range(1, 201):
            shown.show(records[:count], False)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shown.show(records, True)
    assert shown._bar.n == 200 and shown._closed


def test_a_ctrl_c_is_not_lost_after_a_handler_that_raised():
    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    run = start(10**7, processes=False)
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in run:
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                with pytest.raises(Alarm):
                    run.wait()
                signal.raise_signal(signal.SIGINT)      # in the loop, where nobody waits for the run
                raise AssertionError("the interruption was lost")
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(AbortedError, match="Ctrl-C"):
        run.wait()


def test_a_handler_that_raises_where_a_with_block_waits_for_its_run_ends_it():
    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(Alarm), start(10**7, processes=False) as run:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
    finally:
        signal.signal(signal.SIGALRM, before)
    left, listed = run.running, tp.runs()
    run.stop()                  # or it would go on for ever where the test fails
    assert not left and listed == []
    with pytest.raises(AbortedError, match="with block"):
        run.wait()


@pytest.mark.parametrize("where", ["release", "_acquire_restore"])
def test_a_handler_that_raises_where_a_lock_changes_hands_holds_no_run_up(where):
    class Alarm(Exception):
        pass

    class Struck:
        """A run's lock, at one of whose methods a signal's handler raises once, in the main thread, before it has done anything."""

        def __init__(self, lock):
            self.lock, self.struck = lock, False

        def __getattr__(self, name):
            if name == where and threading.current_thread() is threading.main_thread():
                return self.strike
            return getattr(self.lock, name)

        def strike(self, *arguments):
            if not self.struck:
                self.struck = True
                raise Alarm
            return getattr(self.lock, where)(*arguments)

        def __exit__(self, *error):
            self.release()

    run = start(10**7, processes=False)
    with run._changed:
        run._changed = threading.Condition(Struck(run._changed._lock))
    with pytest.raises(Alarm):
        run.wait(0.5)
    before, limit = len(run.history), time.monotonic() + 5
    while len(run.history) == before and time.monotonic() < limit:
        time.sleep(0.01)
    heard = len(run.history) > before       # or its watcher waits for a lock that the main thread has, and ends nobody
    run.stop()
    assert heard


def test_what_fails_in_a_checkpoint_is_told_and_not_what_followed(tmp_path, monkeypatch):
    """Rank 0 takes the folder of what it could not write away, in which the others were about to write."""
    write, abort = checkpoint.write_tensors, checkpoint.CheckpointWriter.abort
    about, gone, followed = threading.Event(), threading.Event(), threading.Event()

    def fail_or_follow(folder, *arguments):
        if threading.current_thread().name.endswith(" rank 0"):
            assert about.wait(30)       # a slow one finds no folder, and has nothing to write
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        about.set()
        gone.wait(30)
        try:
            return write(folder, *arguments)
        finally:
            followed.set()

    def abort_and_wait(writer):
        abort(writer)
        gone.set()
        assert followed.wait(30)        # the other has failed for want of the folder

    monkeypatch.setattr(checkpoint, "write_tensors", fail_or_follow)
    monkeypatch.setattr(checkpoint.CheckpointWriter, "abort", abort_and_wait)
    _, plan, folder = prepared(tmp_path, "run")
    with pytest.raises(tp.StorageError, match=r"rank 0 failed .*Input/output error"):
        tp.launch(plan, np.arange(900) % 64, 1, out=folder, processes=False, progress=False).wait()


def test_a_rank_that_resumes_reads_its_own_tensors_one_at_a_time(tmp_path, monkeypatch):
    """Each read all of the checkpoint: a model that fits its ranks and no single one did not fit when it went on."""
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=16, tie_weights=False)
    cluster = tp.Cluster(num_devices=2, memory_bytes=1 << 34)
    plan = tp.plan(model, cluster, batch=2, seq_len=16, costs=tp.CostModel.analytic(model, cluster), planner="uniform",
                   schedule="1f1b", stages=2)
    options = {"out": tmp_path / "run", "processes": False, "progress": False, "lr_schedule": "constant"}
    tp.launch(plan, np.arange(900) % 64, 1, **options).wait()
    reads, kept, read_tensor = {}, {}, checkpoint.read_tensor

    def noted(path, spec):
        rank = threading.current_thread().name
        assert rank not in kept or kept[rank]() is None, f"{rank} keeps what it has loaded"
        array = read_tensor(path, spec)
        if "rank" in rank:      # and not who reads all of it first, to see that it is whole
            reads.setdefault(rank, []).append((str(path), spec.offset, array.nbytes))
            kept[rank] = weakref.ref(array)
        return array

    monkeypatch.setattr(checkpoint, "read_tensor", noted)
    tp.launch(plan, np.arange(900) % 64, 2, resume=True, **options).wait()
    one, other = reads.values()
    assert not set(one) & set(other) and sum(size for *_, size in one + other) == 12 * sum(
        int(np.prod(shape)) for shape in checkpoint.param_shapes(model).values())


def test_a_rank_that_writes_a_checkpoint_copies_one_tensor_at_a_time(tmp_path, monkeypatch):
    """It had two copies of all its parameters: memory that no plan counts, when a run has gone well for an hour."""
    _, plan, folder = prepared(tmp_path, "run")
    each, made, alive = engine.RankEngine.export_each, set(), {}

    def noted(self, kind):
        for name, array in each(self, kind):
            assert alive.get(id(self), lambda: None)() is None, f"another is kept while {name} of {kind} is made"
            alive[id(self)] = weakref.ref(array)
            made.add((kind, name))
            yield name, array
            del array

    monkeypatch.setattr(engine.RankEngine, "export_each", noted)
    tp.launch(plan, np.arange(900) % 64, 1, out=folder, processes=False, progress=False).wait()
    assert len(made) == 3 * len(tp.load_checkpoint(folder).params)


def test_there_is_no_going_on_without_the_optimizer(tmp_path):
    """Moments of zero as if they had summed up three steps: it trained, and nobody was told."""
    model, plan, folder = prepared(tmp_path, "run")
    options = {"processes": False, "progress": False, "lr_schedule": "constant"}
    tp.launch(plan, np.arange(900) % 64, 3, out=folder, checkpoint_every=3, **options).wait()
    whole, poor = tp.load_checkpoint(folder), tmp_path / "poor"
    tp.save_checkpoint(poor / "checkpoints", whole.model, whole.params, None, 3, seed=whole.seed, data_state=whole.data_state,
                       hyper=whole.hyper)
    with pytest.raises(ValueError, match="no state of the optimizer.*begins anew with its parameters"):
        tp.launch(plan, np.arange(900) % 64, 6, out=poor, resume=True, **options)
    (record,) = tp.launch(plan, np.arange(900) % 64, 1, init=poor, out=tmp_path / "anew", **options)
    assert np.isfinite(record.loss)


def test_a_fifo_is_no_checkpoint(tmp_path):
    _, plan, folder = prepared(tmp_path, "run")
    options = {"processes": False, "progress": False, "lr_schedule": "constant"}
    tp.launch(plan, np.arange(900) % 64, 1, out=folder, checkpoint_every=1, **options).wait()
    for name in ("model.safetensors", "optimizer.safetensors"):
        path = folder / "checkpoints" / "step-00000001" / name
        path.rename(tmp_path / name)
        os.mkfifo(path)
        with pytest.raises(ValueError, match=f"{name}: not a safetensors file: no regular file"):
            tp.launch(plan, np.arange(900) % 64, 2, out=folder, resume=True, **options)
        path.unlink()
        (tmp_path / name).rename(path)
    state = folder / "checkpoints" / "step-00000001" / "state.json"
    state.write_text("[" * 200_000)
    with pytest.raises(ValueError, match="state.json: damaged, no JSON: nested too deeply"):
        tp.launch(plan, np.arange(900) % 64, 2, out=folder, resume=True, **options)


def test_a_thread_that_finds_no_memory_to_begin_with_is_not_waited_for(monkeypatch):
    """Python waits for ever for one that ends before it says that it has begun: `ulimit -v` may leave room for its stack alone."""
    name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
    start_one, ran = getattr(threading, name), []
    with monkeypatch.context() as patched:
        patched.setattr(threading, name, lambda work, *rest, **more: start_one(lambda *nothing: None, *rest, **more))
        with pytest.raises(tp.ExecutionError, match=r"no thread for a voice, one of 1 \(can't start new thread: it found no"):
            start_all([threading.Thread(target=ran.append, args=(1,), name="a voice")], ran.append)
    assert len(ran) == 1 and "a voice" in ran[0] and "a voice" not in {thread.name for thread in threading.enumerate()}
    comm = _core.Comm(_core.Region.create(1, bytes(1), 0, 64, False), 0, 5.0)
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "run", lambda self: None)      # as if it had ended between its beginning and its work
        with pytest.raises(tp.ExecutionError, match="no thread for the disk of MainThread"):
            worker.meanwhile(comm, 1.0, lambda in_vain: None)
    assert worker.meanwhile(comm, 1.0, lambda in_vain: 7) == 7
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "run", lambda self: None)
        with pytest.raises(tp.ExecutionError, match="no thread for what meets the ranks for MainThread"):
            worker.while_others_meet(comm, 1.0, lambda in_vain: None)


def test_a_thread_that_proc_has_under_another_number_is_waited_for(monkeypatch, tmp_path):
    """As under `unshare --pid --fork` without a /proc of its own: a checkpoint was called off after a quarter of a second, for want
    of memory, and what waited for a thread's end went on without it."""
    for number in ("31503", "31504"):
        (tmp_path / number).touch()
    monkeypatch.setattr("terapipe_c._threads.TASKS", str(tmp_path))
    go_on = threading.Event()
    thread = Worker(go_on.wait, name="a voice")
    start_all([thread], print)
    lost = thread.is_lost()
    go_on.set()
    thread.join()
    assert not lost and not thread.is_lost()


def test_a_thread_that_a_list_of_threads_misses_once_is_waited_for(monkeypatch):
    """Linux' ends early where another thread ends while it is read (2 of 1.2 million here): a checkpoint was called off for it."""
    looks, listed, go_on = [], os.listdir, threading.Event()

    def missing(folder):
        looks.append(folder)
        if len(looks) > 2:
            go_on.set()
        return [] if len(looks) == 2 else listed(folder)

    def late(work, *rest, **more):
        return start_one(lambda *given: (go_on.wait(), work(*given)), *rest, **more)

    name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
    start_one, ran, held = getattr(threading, name), [], threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(threading, name, late)
        patched.setattr("terapipe_c._threads.os.listdir", missing)
        start_all([threading.Thread(target=ran.append, args=(1,), name="a voice")], print)
        assert len(looks) == 3
    thread = Worker(held.wait, name="another")
    start_all([thread], print)
    with monkeypatch.context() as patched:
        patched.setattr("terapipe_c._threads.os.listdir", lambda folder: [str(threading.get_native_id())])
        lost = thread.is_lost()
    held.set()
    thread.join()
    assert not lost


def test_an_error_that_says_nothing_is_told_by_its_name_and_what_would_be_right():
    """Python's MemoryError says nothing: "rank 0 failed before its first instruction: MemoryError: "."""
    def told(error):
        return worker.accuse(error, 0, _core.Region.create(1, bytes(1), 0, 64, False))[1]

    limits = resource.getrlimit(resource.RLIMIT_AS)
    assert told(KeyError("x")) == "rank 0 failed before its first instruction: KeyError: 'x'"
    assert told(StopIteration()) == "rank 0 failed before its first instruction: StopIteration"
    assert told(MemoryError()).startswith("rank 0 failed before its first instruction: MemoryError: more memory")
    resource.setrlimit(resource.RLIMIT_AS, (1 << 50, limits[1]))
    try:
        assert told(MemoryError()).endswith(f"more memory, or address space (ulimit -v is {1 << 40} now), would be right")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
