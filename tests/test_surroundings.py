"""A run in an unusual environment: closed streams, few file descriptors, folders that others change, a run nobody waits for."""
import errno
import importlib
import inspect
import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_launch import all_end, nothing_left, start

import terapipe_c as tp
from terapipe_c import engine, job, ranks, worker
from terapipe_c._threads import start_all
from terapipe_c.environment import find_place

__all__ = ["nothing_left"]
HERE = Path(__file__).resolve().parent
SCRIPT = """
import sys
sys.path.insert(0, {here!r})
from test_launch import start
run = start({steps}, out={out!r})
{then}
"""


def script(tmp_path, steps, then, **options):
    path = tmp_path / "user.py"
    path.write_text(SCRIPT.format(here=str(HERE), steps=steps, out=str(tmp_path / "a"), then=then))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen([sys.executable, str(path)], env=environment, text=True, **options)


@pytest.mark.parametrize("closed", [(0,), (0, 1, 2)])
def test_a_run_of_a_python_whose_streams_are_closed(tmp_path, closed):
    """Its next descriptors get the numbers 0, 1 and 2, which are others' in a rank."""
    child = script(tmp_path, 3, "run.wait()", preexec_fn=lambda: [os.close(fd) for fd in closed])
    assert child.wait(60) == 0
    assert len((tmp_path / "a/metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(("number", "words"), [(errno.EMFILE, "1 of 2 ranks were started under a limit of .* open files"),
                                               (errno.EAGAIN, "1 of 2 ranks were started under a limit of .* processes")])
def test_too_few_of_what_a_process_needs_is_named(tmp_path, monkeypatch, number, words):
    real, calls = os.pidfd_open, []

    def scarce(pid):
        calls.append(pid)
        if len(calls) == 3:     # the launcher's, rank 0's, rank 1's
            raise OSError(number, "x")
        return real(pid)

    with monkeypatch.context() as poor:
        poor.setattr(os, "pidfd_open", scarce)
        with pytest.raises(OSError, match=words):
            start(2, out=tmp_path / "a")
    assert not (tmp_path / "a").exists() and len(list(start(2, out=tmp_path / "a"))) == 2


def test_an_empty_folder_of_the_users_is_as_empty_where_no_rank_can_be_started(tmp_path, monkeypatch):
    """What was written for the run stayed, and the same call was refused for it."""
    out = tmp_path / "a"
    out.mkdir()
    with monkeypatch.context() as poor, pytest.raises(tp.Error, match="sys.executable"):
        poor.setattr(sys, "executable", "")
        start(2, out=out)
    assert list(out.iterdir()) == []
    job = importlib.import_module("terapipe_c.job")
    real = job.write_text

    def full(path, text):
        if path.name == "metrics.jsonl":        # the last of three
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, text)

    with monkeypatch.context() as poor, pytest.raises(OSError, match="No space"):
        poor.setattr(job, "write_text", full)
        start(2, out=out)
    assert list(out.iterdir()) == [] and len(list(start(2, out=out, processes=False))) == 2
    before = sorted(path.name for path in out.iterdir())
    with monkeypatch.context() as poor, pytest.raises(tp.Error, match="sys.executable"):
        poor.setattr(sys, "executable", "")
        start(4, out=out, resume=True)
    assert sorted(path.name for path in out.iterdir()) == before and len(list(start(4, out=out, resume=True))) == 2


@pytest.mark.parametrize("unknown", ["", None])
def test_a_python_that_does_not_know_where_it_is_says_what_ranks_need(tmp_path, monkeypatch, unknown):
    """As embedded in another program."""
    with monkeypatch.context() as embedded:
        embedded.setattr(sys, "executable", unknown)
        with pytest.raises(tp.Error, match=f"sys.executable is {unknown!r}: .*processes=False, would be right"):
            start(2, out=tmp_path / "a")
        assert not (tmp_path / "a").exists() and len(list(start(2, out=tmp_path / "a", processes=False))) == 2
    assert len(list(start(2, out=tmp_path / "b"))) == 2


def test_a_limit_of_a_file_that_the_shared_memory_does_not_keep_is_named():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(tp.StorageError, match=r"a higher limit of a file \(ulimit -f\), or processes=False, would be right"):
            start(2)
        assert len(list(start(2, processes=False))) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("processes", [False, True])
def test_no_thread_for_the_launcher_leaves_no_rank(tmp_path, monkeypatch, processes):
    real, pids = threading.Thread.start, []

    def refuse(thread):
        if thread.name == "terapipe run":
            pids.extend(thread._target.__self__.pids)
            raise RuntimeError("can't start new thread")
        real(thread)

    with monkeypatch.context() as poor:
        poor.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            start(100_000, processes=processes, out=tmp_path / "a")
    assert all_end(pids) and len(pids) == (2 if processes else 0) and not (tmp_path / "a").exists() and not tp.runs()


# What is asked where threads may take no more address space than there is: nothing of it imports or computes much before.
ASKS = {
    "emulate": "tp.emulate(plan)",
    "launch in threads": "tp.launch(plan, data, 1, processes=False, progress=False)",
    "launch": "tp.launch(plan, data, 1, progress=False)",
    "loss_and_grads": "tp.loss_and_grads(model, params, tokens, stages=2)",
    "profile": "tp.profile(model, budget_s=0.1, ranks=2)",
    "swap": "tp.Cluster.local(2, swap_folder='.')",
    "a team": "tp.loss_and_grads(model, params, tokens, threads=200)",
}


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("others", [0, 1])
def test_threads_that_the_system_refuses_are_named_and_leave_nothing(tmp_path, ask, others):
    """As of a small `ulimit -v`: of the threads that are asked for, so many are had."""
    code = f"""
import os, resource, threading
import numpy as np
import terapipe_c as tp
model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=11, block_size=8)
plan = tp.plan(model, tp.Cluster(num_devices=2), batch=2, seq_len=8, planner="uniform", schedule="gpipe", stages=2)
data, params, tokens = np.zeros(100, np.int32), tp.init_params(model), np.zeros((2, 9), np.int32)
tp.emulate(plan), tp.loss_and_grads(model, params, tokens), tp.profile(model, budget_s=0.01, ranks=1)
real, left = threading.Thread.start, {others}
def start(thread):
    global left
    left -= 1
    if left < 0:
        stack = threading.stack_size(1 << 40)     # as the system refuses it, and not as Python would
        try:
            real(thread)
        finally:
            threading.stack_size(stack)
    else:
        real(thread)
threading.Thread.start = start
if {ask!r} == "a team":
    threading.Thread.start = real
    size = 4096 * int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (size + (32 << 20), resource.RLIM_INFINITY))
before = len(os.listdir("/proc/self/fd"))
try:
    {ASKS[ask]}
    print("no error")
except tp.Error as error:
    assert isinstance(error, RuntimeError) and threading.active_count() == 1 and len(os.listdir("/proc/self/fd")) == before
    print(error)
assert not tp.runs()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    if others and ask == "launch":
        assert done.stdout == "no error\n", done.stderr      # it needs no other
    else:
        what = r"could not be started \(" if ask == "a team" else r"no thread for .*\(can't start new thread\)"
        assert re.search(f"{what}.*would be right", done.stdout) and not done.stderr, done.stdout + done.stderr
    assert not os.listdir(tmp_path)


def test_a_handler_that_raises_while_threads_start_leaves_none_waiting(monkeypatch):
    """What has started waits for all of them; and it was no refusal of the system."""
    real, barrier, words = threading.Thread.start, threading.Barrier(3), []

    def wait():
        with suppress(threading.BrokenBarrierError):
            barrier.wait()

    def start(thread):
        real(thread)
        if thread.name == "1":
            raise RuntimeError("the user's own")

    def give_up(why):
        words.append(why)
        barrier.abort()

    threads = [threading.Thread(target=wait, name=str(i)) for i in range(3)]
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="^the user's own$"):
        start_all(threads, give_up)
    assert words == ["the user's own"] and not any(thread.is_alive() for thread in threads)


def test_a_rank_that_cannot_read_its_job_says_so(monkeypatch):
    real = ranks.pack

    def broken(job, arrays):
        fds = real(job, arrays)
        os.pwrite(fds[0], b"<<", 8)
        return fds

    monkeypatch.setattr(ranks, "pack", broken)
    with pytest.raises(tp.Error, match=r"rank [01] failed before its first instruction: .*JSONDecodeError|Expecting value"):
        start(2).wait()


def test_progress_that_nobody_reads_ends_no_run(monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    assert len(list(start(3, processes=False, progress=None))) == 3


@pytest.mark.parametrize("read", [tp.load_checkpoint, tp.import_hf, lambda path: tp.Dataset(path, 4, 1), tp.stdlib_corpus])
def test_a_path_that_cannot_be_looked_at_is_not_nothing_there(tmp_path, read):
    """pathlib said so until Python 3.13, and no longer does."""
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels of symbolic links.*loop"):
        read(tmp_path / "loop")
    with pytest.raises(OSError, match="File name too long.*xxx"):
        read(tmp_path / ("x" * 300))


def test_a_run_that_no_variable_holds_can_be_stopped():
    start(100_000, processes=False)
    start(100_000, ranks=1, processes=False)
    first, second = tp.runs()
    assert first.running and first._job["ranks"] == 2 and second._job["ranks"] == 1
    for run in tp.runs():
        run.stop()
    assert tp.runs() == []


def test_a_python_that_ends_before_its_run_says_so(tmp_path):
    child = script(tmp_path, 100_000, "", stderr=subprocess.PIPE)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 0 and errors.startswith("terapipe_c: Python ends, and with it Run(running, 2 ranks, 100000 steps")


def test_a_folder_without_a_checkpoint_is_not_one_to_resume(tmp_path):
    start(1, processes=False, out=tmp_path / "a", checkpoint_every=0).wait()
    with pytest.raises(FileExistsError, match="another one would be right .it has no checkpoint to resume from"):
        start(2, processes=False, out=tmp_path / "a")
    start(1, processes=False, out=tmp_path / "b").wait()
    with pytest.raises(FileExistsError, match=r"another one, or resume=True \(terapipe resume\), would be right"):
        start(2, processes=False, out=tmp_path / "b")
    with pytest.raises(FileExistsError, match="a file is there: the name of a new folder would be right"):
        start(2, processes=False, out=tmp_path / "b" / "plan.json")


def test_a_run_that_was_copied_with_its_links_followed_is_not_resumed_in_vain(tmp_path):
    """The folder that was a link is found before the first step, not behind those of a first checkpoint."""
    start(1, processes=False, out=tmp_path / "a").wait()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    metrics = (tmp_path / "b" / "metrics.jsonl").read_bytes()
    with pytest.raises(IsADirectoryError, match="renaming it to its step-..., or removing it, would be right: .*latest'"):
        start(2, processes=False, out=tmp_path / "b", resume=True)
    assert (tmp_path / "b" / "metrics.jsonl").read_bytes() == metrics
    assert len(start(2, processes=False, out=tmp_path / "b", resume=True, checkpoint_every=0).wait().history) == 1
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "latest")
    assert start(3, processes=False, out=tmp_path / "b", resume=True).wait().checkpoint_path.name == "step-00000003"


@pytest.mark.parametrize("processes", [False, True])
def test_two_runs_in_one_folder_are_one_too_many(tmp_path, processes):
    """A resume while the first still runs, in this notebook or another: both would write metrics and checkpoints."""
    with start(100_000, processes=processes, out=tmp_path / "a", checkpoint_every=1) as run:
        while run.checkpoint_path is None:
            time.sleep(0.01)
        with pytest.raises(FileExistsError, match="another run is under way in this folder"):
            start(100_000, out=tmp_path / "a", resume=True)
        words = (f"import sys; sys.path.insert(0, {str(HERE)!r}); from test_launch import start; "
                 f"start(3, out={str(tmp_path / 'a')!r}, resume=True)")
        other = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True,
                               env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)})
        assert "another run is under way in this folder" in other.stderr
        run.stop()
    assert [record.step for record in start(len(run.history) + 1, out=tmp_path / "a", resume=True)] == [len(run.history)]


def test_a_folder_in_which_a_run_is_under_way_is_not_read(tmp_path):
    """It removes checkpoints: one that was gone while it was read was a file that is not there."""
    latest = start(2, processes=False, out=tmp_path / "a", checkpoint_every=1).wait().checkpoint_path
    with start(100_000, processes=False, out=tmp_path / "a", resume=True, checkpoint_every=0) as run:
        next(iter(run))                                        # it has read the checkpoint itself
        (latest / "optimizer.safetensors").unlink()
        with pytest.raises(FileExistsError, match="another run is under way in this folder"):
            start(100_000, processes=False, out=tmp_path / "a", resume=True)
        run.stop()


def test_a_fork_that_outlives_a_run_keeps_its_folder_from_nobody(tmp_path):
    """multiprocessing's workers, say, begun while it ran: they have its descriptors."""
    run = start(100_000, processes=False, out=tmp_path / "a", checkpoint_every=1)
    waiting, ours = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        os.read(waiting, 1)
        os._exit(0)
    try:
        while run.checkpoint_path is None:
            time.sleep(0.01)
        run.stop()
        assert len(list(start(len(run.history) + 2, processes=False, out=tmp_path / "a", resume=True))) == 2
    finally:
        os.close(ours)
        os.close(waiting)
        os.waitpid(child, 0)


def test_a_fork_neither_waits_for_a_run_nor_ends_it():
    """It has no thread that watches; and an exception that leaves a with block there is not the run's."""
    told, tell = os.pipe()
    with start(100_000, "Slow") as run:
        pid = os.fork()
        if pid == 0:
            words = []
            for method in (run.wait, run.stop, lambda: next(iter(run))):
                try:
                    method()
                except tp.Error as error:
                    words.append(str(error))
            run.__exit__(SystemExit, SystemExit(), None)
            os.write(tell, json.dumps(words).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        words = json.loads(os.read(told, 4096))
        assert len(words) == 3 and all(f"of process {os.getpid()}, and this is a fork of it" in word for word in words)
        seen = len(run.history)
        while len(run.history) < seen + 3:
            assert run.running
            time.sleep(0.01)
        run.stop()
    os.close(told)
    os.close(tell)


def test_of_two_that_make_a_folder_one_does(tmp_path, monkeypatch):
    job = importlib.import_module("terapipe_c.job")
    real = job.Folder

    def another_first(path):
        monkeypatch.setattr(job, "Folder", real)
        start(1, processes=False, out=path).wait()
        return real(path)

    monkeypatch.setattr(job, "Folder", another_first)
    with pytest.raises(FileExistsError, match="exists already"):
        start(5, processes=False, out=tmp_path / "a")
    assert tp.load_checkpoint(tmp_path / "a").step == 1


def test_a_resume_with_nothing_left_keeps_the_trace(tmp_path):
    start(2, processes=False, out=tmp_path / "a").wait()
    before = (tmp_path / "a/trace.json").read_text()
    assert json.loads(before)["rows"]
    assert list(start(2, processes=False, out=tmp_path / "a", resume=True)) == []
    assert (tmp_path / "a/trace.json").read_text() == before


def test_a_rank_without_proc_tells_its_resident_memory_all_the_same(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert worker._resident_bytes() > 1 << 20


def test_a_report_says_that_ranks_shared_cores(monkeypatch):
    def told(cores, **options):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        return start(2, processes=False, **options).report()

    monkeypatch.setattr(importlib.import_module("terapipe_c.report"), "cpu_quota", lambda: None)  # of the tests' container
    told_of_two = told(1)
    assert told_of_two.caveats == ["2 ranks of 1 thread had 1 core: the prediction gives every thread a core of its own"]
    assert told_of_two.caveats[0] in str(told_of_two) and told_of_two.caveats[0] in told_of_two._repr_html_()
    assert told(8, threads_per_rank=4).caveats == []
    assert "2 ranks of 4 threads had 7 cores" in told(7, threads_per_rank=4).caveats[0]
    monkeypatch.setattr(importlib.import_module("terapipe_c.report"), "cpu_quota", lambda: 1.5)
    assert "2 ranks of 1 thread had 1.5 cores" in told(8).caveats[0]


def test_a_disk_that_is_full_for_the_metrics_ends_the_run_and_names_the_file(tmp_path):
    """What could not be written is tried again when the file is closed: that must not keep anybody from hearing of the end."""
    then = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
size = (run.out / "metrics.jsonl").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
try:
    run.wait()
except OSError as error:
    assert error.filename == str(run.out / "metrics.jsonl"), error
    raise SystemExit(0 if not run.running else 3)
raise SystemExit(4)
"""
    child = script(tmp_path, 100_000, then)
    assert child.wait(60) == 0


@pytest.mark.parametrize("processes", [False, True])
def test_metrics_that_somebody_removes_begin_anew(tmp_path, processes):
    """They went on into a file without a name."""
    run = start(100_000, "Slow", out=tmp_path / "a", processes=processes, checkpoint_every=0)
    for record in run:
        if record.step == 3:
            (tmp_path / "a/metrics.jsonl").unlink()
        if record.step == 6:
            break
    run.stop()
    rows = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [record.step for record in run.history]


def test_a_run_whose_folder_is_removed_ends_and_names_it(tmp_path):
    run = start(100_000, "Slow", out=tmp_path / "a", processes=False, checkpoint_every=0)
    with pytest.raises(FileNotFoundError) as caught:
        for record in run:
            if record.step == 3:
                while (tmp_path / "a").exists():    # between a file's end and its folder's the run may make it anew
                    shutil.rmtree(tmp_path / "a", ignore_errors=True)
    assert caught.value.filename == str(tmp_path / "a/metrics.jsonl") and not run.running


def test_a_resume_of_fewer_steps_than_were_done_says_so(tmp_path):
    """Who takes `steps` for those of the resume alone would not see that nothing happened."""
    start(5, out=tmp_path / "a", processes=False).wait()
    with pytest.warns(UserWarning, match="steps is 3 and the checkpoint has done 5: nothing is left to do"):
        assert start(3, out=tmp_path / "a", processes=False, resume=True).wait().history == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert start(5, out=tmp_path / "a", processes=False, resume=True).wait().history == []


def test_a_loss_that_is_no_number_leaves_metrics_that_are_json(tmp_path):
    def no_constant(name):
        raise ValueError(name)

    model, cluster = tp.GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=256, block_size=8), tp.Cluster.local()
    plan = tp.plan(model, cluster, batch=1, seq_len=8, costs=tp.CostModel.analytic(model, cluster), planner="uniform", stages=1)
    run = tp.launch(plan, np.arange(4000) % 256, 1, out=tmp_path / "a", lr=1e30, grad_clip=0.0, eval_every=1, processes=False,
                    progress=False)
    assert not np.isfinite(run.wait().loss_eval)
    row = json.loads((tmp_path / "a/metrics.jsonl").read_text(), parse_constant=no_constant)
    assert row["eval_loss"] is None and np.isfinite(row["loss"])


def test_a_working_directory_that_was_deleted(tmp_path, monkeypatch):
    """What is relative to it is refused by name; a run that needs none goes."""
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=256, block_size=32)
    plan = tp.plan(model, tp.Cluster.local(), batch=2, seq_len=32, stages=2)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    monkeypatch.syspath_prepend("")                                                             # as of `python -c` and a notebook
    (tmp_path / "gone").rmdir()
    tokens = np.arange(4000) % 256
    for ask in (lambda: tp.launch(plan, data=tokens, steps=1, out="run"), lambda: plan.save("plan.json"),
                lambda: tp.Plan.load("plan.json"), lambda: tp.launch(plan, data="text.txt", steps=1, out=None)):
        with pytest.raises(FileNotFoundError, match="relative to the working directory, which has been deleted: an absolute path"):
            ask()
    plan.save(tmp_path / "plan.json")
    run = tp.launch(plan, data=tokens, steps=1, out=tmp_path / "run", progress=False)
    assert len(list(run)) == 1 and tp.Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("processes", [False, True])
def test_a_disk_that_is_full_for_a_rank_is_known_by_its_number(processes):
    with pytest.raises(tp.StorageError, match="No space left on device") as caught:
        start(10, "Full", processes=processes).wait()
    assert caught.value.errno == errno.ENOSPC


def test_a_read_only_file_system_is_told_of_the_user_s_file_and_not_of_ours(tmp_path, monkeypatch):
    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    plan = tp.plan(tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=256, block_size=32), tp.Cluster.local(), batch=2,
                   seq_len=32, stages=2)
    with monkeypatch.context() as read_only:
        read_only.setattr(os, "open", refuse)
        read_only.setattr(Path, "unlink", refuse)
        with pytest.raises(OSError, match="Read-only") as caught:
            plan.save(tmp_path / "plan.json")
    assert caught.value.filename == str(tmp_path / "plan.json")


def test_ranks_that_the_machine_cannot_hold_together_are_refused_before_any_begins(monkeypatch):
    """Each alone would fit: the system promised it all, and ended a rank in the first steps."""
    plan = tp.plan(tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=256, block_size=32), tp.Cluster(num_devices=2), batch=2,
                   seq_len=32, stages=2)
    data, needed = bytes(range(256)) * 4, sum(plan.peak_memory_bytes)
    has = SimpleNamespace(group=needed, machine=needed, swap=0)
    monkeypatch.setattr(tp._core, "memory_room", lambda: (has.group, 0, True))      # what is in use now may go
    monkeypatch.setattr(job, "machine_memory", lambda: (has.machine, has.swap))
    tp.launch(plan, data, 1, processes=False, progress=False).wait()
    has.group, has.swap = needed - 3, 3
    tp.launch(plan, data, 1, processes=False, progress=False).wait()
    has.swap = 2
    with pytest.raises(tp.OutOfMemoryError, match=f"the 2 ranks of this machine need {needed} bytes .*: 1 bytes short.* would be"):
        tp.launch(plan, data, 1, progress=False)
    tp.launch(plan, data, 0, processes=False, progress=False).wait()        # which touches next to nothing


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_a_launcher_started_on_one_machine_is_counted_where_it_is_known(monkeypatch, replicas):
    """Not which of the others are here: the least are counted, and against the machine, since each may have a control group."""
    model = tp.GPTConfig(n_layer=5, n_head=2, n_embd=16, vocab_size=256, block_size=32)
    plan = tp.plan(model, tp.Cluster(num_devices=3 * replicas), batch=6, seq_len=32, stages=3, planner="uniform",
                   data_parallel=replicas)
    each = list(plan.peak_memory_bytes) * replicas
    has = SimpleNamespace(group=10**12, machine=10**12)
    monkeypatch.setattr(tp._core, "memory_room", lambda: (has.group, 0, True))
    monkeypatch.setattr(job, "machine_memory", lambda: (has.machine, 0))

    def ask(rank, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        place = find_place(os.environ, None)
        signature = inspect.signature(tp.launch).parameters.items()
        defaults = {name: one.default for name, one in signature if name not in ("plan", "data", "steps", "processes", "progress")}
        job.make_job(plan, bytes(range(256)) * 4, 1, **{**defaults, "reproducible": replicas == 1}, rank=place.rank,
                     local_rank=place.local_rank, local_ranks=place.local_ranks)

    words = {"RANK": 1, "WORLD_SIZE": len(each), "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1234}
    for local, sure in ((1, each[1]), (2, each[1] + min(each[:1] + each[2:])), (len(each), sum(each))):
        words["LOCAL_WORLD_SIZE"] = local
        has.machine = sure
        ask(1, words)
        has.machine = sure - 1
        if local > 1:
            with pytest.raises(tp.OutOfMemoryError, match=f"rank 1 and the {local - 1} others? of its machine .* {sure} bytes"):
                ask(1, words)
    has.machine, has.group = 10**12, each[1] - 1
    with pytest.raises(tp.OutOfMemoryError, match=f"rank 1 needs {each[1]} bytes"):
        ask(1, words)


def test_train_counts_the_ranks_that_its_launcher_started_here(monkeypatch):
    train, told = importlib.import_module("terapipe_c.train"), {}

    def make_job(**options):
        told.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "make_job", make_job)
    rank = train._Rank.__new__(train._Rank)
    rank.place = find_place({"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                             "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"})
    with pytest.raises(KeyboardInterrupt):
        rank._train({"timeout_s": 1})
    assert (told["rank"], told["local_rank"], told["local_ranks"]) == (4, 1, 3)


def test_the_memory_of_the_machine_is_read():
    machine, swap = job.machine_memory()
    assert machine is not None and tp._core.memory_room()[0] <= machine and machine > 10**8 and swap >= 0


def test_parameters_that_memory_and_swap_hold_together_are_drawn(monkeypatch):
    model = tp.GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=16, block_size=8)
    needed = 4 * model.num_params
    monkeypatch.setattr(tp._core, "memory_room", lambda: (needed - 5, 0, True))
    monkeypatch.setattr(engine, "machine_memory", lambda: (needed - 5, 5))
    assert sum(array.nbytes for array in tp.init_params(model).values()) == needed
    monkeypatch.setattr(engine, "machine_memory", lambda: (needed - 5, 4))
    with pytest.raises(tp.OutOfMemoryError, match=f"take {needed} bytes"):
        tp.init_params(model)
