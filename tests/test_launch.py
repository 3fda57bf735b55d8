"""The launcher: runs as threads and as processes, and every way in which one can end."""
import html
import importlib
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from terapipe_c import AbortedError, _core, ranks, schedules
from terapipe_c.job import Folder
from terapipe_c.launch import launch, runs
from terapipe_c.worker import learning_rate, pack, share, unpack

MODEL = dict(n_layer=2, n_head=1, n_embd=8, vocab_size=256, block_size=8, bias=True, tie_weights=True)
DATA = np.arange(4000, dtype=np.int32) % 256
launching = importlib.import_module("terapipe_c.launch")
HERE = Path(__file__).resolve().parent
BOTH = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])


@dataclass
class Plan:
    """What launch reads of a plan."""
    ranks: int = 2
    model: object = field(default_factory=lambda: SimpleNamespace(**MODEL))
    batch: int = 2
    seq_len: int = 8
    step_time_s: float = 0.125
    slicing: object = ((2, [4, 2, 2]),)
    bubbles: object = field(default_factory=lambda: {"warmup": 0.5})

    @property
    def peak_memory_bytes(self):
        return [1000 + rank for rank in range(self.ranks)]

    @property
    def program(self):
        return schedules.gpipe(self.ranks, 1, 3)

    def timeline(self):
        return self.program.simulate({"F": 1e-3, "B": 2e-3})

    def to_dict(self):
        return {"ranks": self.ranks}

    def save(self, path):
        Path(path).write_text(json.dumps(self.to_dict()))


def start(steps, engine="Engine", ranks=2, data=DATA, **options):
    options = {"progress": False, "lr": 0.1, "lr_schedule": "constant", **options}
    return launch(Plan(ranks), data, steps, engine=f"toy_engine:{engine}", **options)


def start_in_a_thread(*arguments, **options):
    """The thread ends when the ranks work."""
    begun = []

    def launch_and_look():
        begun.append(start(*arguments, **options))
        next(iter(begun[0]))

    thread = threading.Thread(target=launch_and_look)
    thread.start()
    thread.join()
    return begun[0]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_end(pids, seconds=10.0):
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


@pytest.fixture(autouse=True)
def nothing_left():
    """No descriptor, thread, child or zombie that was not there before."""
    def children_of(task):
        try:
            return (task / "children").read_text().split()
        except OSError:     # the thread ended while we looked; its children are another's now
            return []

    def census():
        children = [pid for task in Path("/proc/self/task").iterdir() for pid in children_of(task)]
        return sorted(os.listdir("/proc/self/fd")), threading.active_count(), children
    before = census()
    yield
    deadline = time.monotonic() + 5
    while census() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert census() == before


# ---- a run that goes well --------------------------------------------------------------------------------------------


@BOTH
def test_a_run_trains_and_leaves_what_it_promised(tmp_path, processes):
    run = start(7, processes=processes, out=tmp_path / "a", checkpoint_every=5, eval_every=3, ranks=3)
    assert len(run.pids) == (3 if processes else 0) and os.getpid() not in run.pids
    records = list(run)
    assert [record.step for record in records] == list(range(7))
    assert records[-1].loss < records[0].loss
    assert all(record.grad_norm > 0 and record.step_time_s > 0 and record.predicted_step_time_s == 0.125 for record in records)
    assert [record.step for record in records if record.eval_loss is not None] == [2, 5, 6]
    assert run.loss_eval == records[-1].eval_loss and run.history == records == list(run)
    lines = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [record.loss for record in records]
    assert json.loads((tmp_path / "a/config.json").read_text())["lr"] == 0.1
    assert json.loads((tmp_path / "a/plan.json").read_text()) == {"ranks": 3}
    assert {row[0] for row in json.loads((tmp_path / "a/trace.json").read_text())["rows"]} == {0, 1, 2}
    assert run.checkpoint_path == tmp_path / "a/checkpoints/step-00000007"
    assert (tmp_path / "a/checkpoints/step-00000005").is_dir()


def test_threads_and_processes_give_the_same_losses():
    one, two = ([record.loss for record in start(4, processes=processes)] for processes in (False, True))
    assert one == two


@BOTH
def test_a_resumed_run_continues_bit_for_bit(tmp_path, processes):
    whole = [record.loss for record in start(6, processes=False)]
    start(3, processes=processes, out=tmp_path / "a").wait()
    (tmp_path / "a/metrics.jsonl").open("a").write('{"step": 3, "loss": 9}\n{"step": 4, "lo')  # of a run that was cut off
    rest = list(start(6, processes=processes, out=tmp_path / "a", resume=True))
    assert [record.step for record in rest] == [3, 4, 5]
    assert [record.loss for record in rest] == whole[3:]
    kept = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in kept] == list(range(6)) and [record["loss"] for record in kept] == whole


def test_a_resume_on_other_data_is_refused_before_a_rank_starts(tmp_path):
    start(2, processes=False, out=tmp_path / "a").wait()
    for word, options in (("seed was 0 and is now 3", dict(seed=3)), ("num_tokens was", dict(data=DATA[:-1]))):
        with pytest.raises(ValueError, match=word):
            start(4, processes=False, out=tmp_path / "a", resume=True, **options)
    state = tmp_path / "a/checkpoints/step-00000002/state.json"
    state.write_text(state.read_text().replace('"step": 2', '"step": 1'))
    with pytest.raises(ValueError, match="state.json: damaged"):
        start(4, processes=False, out=tmp_path / "a", resume=True)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_damaged_checkpoint_is_refused_before_a_rank_starts_and_an_older_one_named(tmp_path, monkeypatch, file):
    start(4, processes=False, out=tmp_path / "a", checkpoint_every=2).wait()
    whole = [record.loss for record in start(6, processes=False)]
    newest = tmp_path / "a/checkpoints/step-00000004"
    content = bytearray((newest / file).read_bytes())
    content[-3] ^= 1
    (newest / file).write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(launching, "ThreadRanks", lambda *_: pytest.fail("ranks were started"))
        with pytest.raises(ValueError, match="is damaged: its checksum.*step-00000002 is whole, moving .*step-00000004 away"):
            start(6, processes=False, out=tmp_path / "a", resume=True)
    newest.rename(tmp_path / "away")
    rest = list(start(6, processes=False, out=tmp_path / "a", resume=True))
    assert [record.loss for record in rest] == whole[2:]


def test_every_evaluation_has_a_record():
    records = list(start(8, processes=False, log_every=5, eval_every=3))
    assert [(record.step, record.eval_loss is not None) for record in records] == [
        (0, False), (2, True), (5, True), (7, True)]  # fmt: skip


def test_initial_parameters_reach_the_ranks_by_memory():
    from terapipe_c.checkpoint import param_shapes
    init = {name: np.full(shape, 0.5, np.float32) for name, shape in param_shapes(SimpleNamespace(**MODEL)).items()}
    given = [[record.loss for record in start(2, init=init, processes=processes)] for processes in (False, True)]
    assert given[0] == given[1] != [record.loss for record in start(2, processes=False)]


def test_stop_ends_after_a_step_with_a_checkpoint(tmp_path):
    run = start(100_000, "Slow", out=tmp_path / "a", checkpoint_every=100_000)
    for record in run:
        if record.step == 4:
            break
    assert run.running
    run.stop()
    done = run.history[-1].step + 1
    assert not run.running and 5 <= done < 100_000
    assert run.checkpoint_path == tmp_path / f"a/checkpoints/step-{done:08d}"
    assert [record.step for record in run] == list(range(done))
    with pytest.raises(TypeError, match=f"process {os.getpid()}, .*run.report.*{tmp_path}/a"):
        pickle.dumps(run)


def test_the_report_lays_predicted_beside_measured(tmp_path):
    run = start(4, out=tmp_path / "a", processes=False)
    report = run.report()
    times = sorted(record.step_time_s for record in run.history[1:])
    assert report.step_time_s == times[1] and report.predicted_step_time_s == 0.125
    assert report.peak_memory_bytes == report.predicted_peak_memory_bytes == [1000, 1001]
    assert all(size > 1 << 20 for size in report.resident_memory_bytes)
    busy = sum(row[6] - row[5] for row in run.trace)
    assert min(row[5] for row in run.trace) == 0.0
    assert sum(report.bubbles.values()) == pytest.approx(2 * max(row[6] for row in run.trace) - busy)
    assert run.timeline().bubbles == report.bubbles
    forward = sum(row[6] - row[5] for row in run.trace if row[0] == 0 and row[1] in (0, "F"))
    assert forward < report.resimulated_step_time_s < 2 * max(row[6] for row in run.trace)     # its F waits inside
    assert report.work_ratio == pytest.approx(busy / 18e-3)
    text = str(report)
    assert repr(report) == text  # an interpreter shows the table, too
    assert "125 ms" in text and "1000 B" in text and "exact" in text and "metrics.jsonl" in text
    first, last = (f"{report.losses[i]:.4f} after {done}" for i, done in ((0, "1 step"), (-1, "4")))
    assert f"4 of 4 steps done: loss {first}, {last}" in text
    assert repr(run).startswith("Run(done, 2 ranks, 4 of 4 steps done, loss ")
    assert "idle: slice skew" in text and "idle: warmup" in text and "slice_skew" not in text
    assert all(f">{words}</text>" in report.loss_svg() for words in ("loss", "after 1 step", "after 4 steps"))
    assert "4 of 4 steps done" in run._repr_html_() and "<polyline" in run._repr_html_()
    page = report.save(tmp_path / "report.html").read_text()
    assert "<polyline" in page and "memory of rank 1" in page and "from measured operations" in page
    for said in text.splitlines()[len(report.rows()) + 1:]:
        assert html.escape(said) in page
    assert page.count("<svg") == 3 and "prefers-color-scheme:dark){body{" in page       # the losses and two timelines
    planned, measured = page.index("<h2>Planned step</h2>"), page.index("<h2>Measured, the last step</h2>")
    assert planned < page.index("2 ranks · ") < measured < page.rindex("2 ranks · ")
    assert "idle: in the last step, summed over 2 ranks" in page and "tokens per second" in page and "Plan(ranks=2" in page


def test_progress_is_lines_where_there_is_no_terminal(capsys):
    start(3, processes=False, progress=None).wait()
    assert "3 of 3 steps done  loss " in capsys.readouterr().err
    start(3, processes=False, progress=None).report()
    assert "3 of 3 steps done  loss " in capsys.readouterr().err
    assert start(3, processes=False, progress=False).timeline().makespan_s > 0      # it waits for the end, as the report does
    assert capsys.readouterr().err == ""


# ---- refused before anybody starts -----------------------------------------------------------------------------------


def test_bad_requests_are_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/precious").write_text("")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("abc")
    (tmp_path / "long.txt").write_text("abc" * 1000)
    wild = np.full(5000, 255, np.int32)
    wild[4321] = 256
    for kind, word, options in (
            (FileExistsError, "mine", dict(out=tmp_path / "mine")), (OSError, "file", dict(out=tmp_path / "file/below")),
            (FileNotFoundError, "nowhere", dict(data=str(tmp_path / "nowhere.txt"))), (ValueError, "4321", dict(data=wild)),
            (ValueError, "lr is nan", dict(lr=float("nan"))), (ValueError, "'linear'", dict(lr_schedule="linear")),
            (ValueError, "min_lr is 0.002.* 0.001", dict(lr=1e-3, min_lr=2e-3, lr_schedule="cosine")),
            (ValueError, "betas", dict(betas=(0.9, 1.0))), (ValueError, "log_every is 0", dict(log_every=0)),
            (ValueError, "backend is .gpu.", dict(backend="gpu")),
            (ValueError, "resume", dict(resume=True)), (FileNotFoundError, "new", dict(resume=True, out=tmp_path / "new")),
            (ValueError, "float64", dict(init={"w": np.zeros(3)})), (TypeError, "init is int", dict(init=5)),
            (ValueError, "eps is 0", dict(eps=0)), (ValueError, "processes is 'no'", dict(processes="no")),
            (ValueError, "lr is 1e.39: at most 3.4", dict(lr=1e39)), (ValueError, "weight_decay is 1e.99", dict(weight_decay=1e99)),
            (ValueError, "timeout_s is 1e.30", dict(timeout_s=1e30)), (TypeError, "tokenizer is 3", dict(tokenizer=3)),
            (ValueError, "long.txt: the val split has 0 of", dict(data=tmp_path / "long.txt", eval_every=1, val_fraction=0)),
            (ValueError, "lr is '1'", dict(lr="1")), (ValueError, "empty.txt is empty", dict(data=tmp_path / "empty.txt")),
            (ValueError, r"short.txt.*3 tokens.*needs \d+", dict(data=tmp_path / "short.txt"))):
        with pytest.raises(kind, match=word):
            start(2, **{"out": tmp_path / "fresh", **options} if "resume" not in options else options)
        assert not (tmp_path / "fresh").exists()
    with pytest.raises(TypeError, match="plan is dict"):
        launch({}, data=wild, steps=1)
    with pytest.raises(ValueError, match="steps is -1"):
        start(-1)


def test_a_launch_that_cannot_start_leaves_no_folder(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(importlib.import_module("terapipe_c.launch"), "ThreadRanks", refuse)
    with pytest.raises(OSError, match="Too many"):
        start(2, processes=False, out=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_folder_that_another_run_fills_meanwhile_is_refused(tmp_path, monkeypatch):
    """Between the look at it and its lock: it stays as that run left it."""
    class Late(Folder):
        def __init__(self, path):
            path.mkdir()
            (path / "config.json").write_text("another's")
            super().__init__(path)

    monkeypatch.setattr("terapipe_c.job.Folder", Late)
    with pytest.raises(FileExistsError, match="this run folder exists already"):
        start(2, processes=False, out=tmp_path / "a")
    assert [file.read_text() for file in (tmp_path / "a").iterdir()] == ["another's"]


def test_a_full_disk_leaves_what_a_run_folder_holds(tmp_path, monkeypatch):
    start(2, processes=False, out=tmp_path / "a").wait()
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir() if path.is_file()}

    def refuse(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("os.fsync", refuse)
        with pytest.raises(OSError, match=r"No space left on device: '.*/a/config.json'"):
            start(4, processes=False, out=tmp_path / "a", resume=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir() if path.is_file()} == before
    assert [record.step for record in start(4, processes=False, out=tmp_path / "a", resume=True)] == [2, 3]


# ---- runs that go wrong ----------------------------------------------------------------------------------------------


@BOTH
def test_an_exception_in_one_rank_ends_all_and_names_it(processes):
    run = start(100_000, "Raises", ranks=3, processes=processes)
    seen = []
    with pytest.raises(_core.InvalidValueError) as caught:
        seen.extend(run)
    assert [record.step for record in seen] == [0, 1, 2]
    assert str(caught.value) == ("rank 1 failed at step 3 while running forward of micro-batch 0 slice 2 on stage 1: "
                                 "ValueError: the weights caught fire")
    assert "in work" in "".join(caught.value.__notes__) and not any(map(alive, run.pids))
    with pytest.raises(_core.InvalidValueError):
        run.wait()
    assert [record.step for record in start(2, processes=processes)] == [0, 1]  # and again


@BOTH
def test_an_exception_while_starting_is_told_too(processes):
    with pytest.raises(_core.StorageError, match="rank 1 failed before its first instruction: OSError.*no space"):
        start(3, "Unbuildable", processes=processes).wait()


def test_a_killed_rank_is_named_with_what_it_was_doing():
    with pytest.raises(_core.PeerError) as caught:
        start(100_000, "Dies", ranks=3).wait()
    assert str(caught.value) == ("rank 1 was killed by signal 9 (SIGKILL) at step 5 while running forward of micro-batch 0 "
                                 "slice 2 on stage 1")


def test_a_rank_that_leaves_without_a_word_is_named():
    with pytest.raises(_core.PeerError, match="rank 1 ended early at step 2 while running forward"):
        start(100_000, "Exits").wait()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_any_rank_may_be_killed_at_any_moment(victim):
    run = start(100_000, "Slow", ranks=3)
    delay = random.Random().uniform(0, 0.6)  # from before it has started Python to the middle of a step
    time.sleep(delay)
    os.kill(run.pids[victim], signal.SIGKILL)
    with pytest.raises(_core.PeerError, match=rf"^rank {victim} was killed by signal 9 \(SIGKILL\) (at step|before)"):
        run.wait()
    assert not any(map(alive, run.pids)), delay


def test_what_a_killed_rank_was_writing_goes_with_the_run(tmp_path):
    """A checkpoint is twelve bytes a parameter, and the run may never be resumed."""
    run = start(100_000, out=tmp_path / "a", checkpoint_every=1)
    next(iter(run))
    stale = tmp_path / "a" / "checkpoints" / f".step-00100001.tmp-{run.pids[0]}"    # as if it had been at it
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half of one")
    os.kill(run.pids[0], signal.SIGKILL)
    with pytest.raises(_core.PeerError, match="rank 0 was killed by signal 9"):
        run.wait()
    assert not [path.name for path in stale.parent.iterdir() if path.name.startswith(".")]


def test_a_rank_that_hears_nothing_is_ended_by_force():
    run = start(100_000, "Deaf")
    with pytest.raises(_core.OutOfMemoryError, match="rank 0 failed at step 1 .* no room"):
        run.wait()
    assert not any(map(alive, run.pids))


SCRIPT = """
import sys, time
sys.path.insert(0, {here!r})
from test_launch import start
{before}
run = start(100_000, "Slow", ranks=2, processes={processes})
{after}
for record in run:
    if record.step == 1:
        print(*run.pids, flush=True)
    {body}
"""


def script(tmp_path, body="pass", processes=True, before="", after=""):
    """A user's script: no __main__ guard, another working folder."""
    path = tmp_path / "user.py"
    path.write_text(SCRIPT.format(here=str(HERE), body=body, processes=processes, before=before, after=after))
    paths = os.pathsep.join(path for path in sys.path if path)
    child = subprocess.Popen([sys.executable, str(path)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             env={**os.environ, "PYTHONPATH": paths})
    return child, [int(word) for word in child.stdout.readline().split()]


def end_with_launcher(child, pids, stopped):
    """SIGKILL of the launcher: the ranks end by themselves, one that somebody stopped too."""
    try:
        assert len(pids) == 2 and all(map(alive, pids))
        if stopped:
            os.kill(pids[1], signal.SIGSTOP)
        child.kill()
        child.wait()
        assert all_end(pids)
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
        child.communicate()


STOPPED = pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])


@STOPPED
def test_ranks_end_when_their_launcher_is_killed(tmp_path, stopped):
    end_with_launcher(*script(tmp_path), stopped)


@STOPPED
def test_ranks_end_when_their_launcher_is_killed_while_they_import(tmp_path, stopped):
    (tmp_path / "numpy.py").write_text("import os, time\nopen(f'{__file__}.{os.getpid()}', 'x').close()\ntime.sleep(600)\n")
    child, pids = script(tmp_path, before=f"sys.path.insert(0, {str(tmp_path)!r})", after="print(*run.pids, flush=True)")
    deadline = time.monotonic() + 20
    while len(list(tmp_path.glob("numpy.py.*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {path.suffix for path in tmp_path.glob("numpy.py.*")} == {f".{pid}" for pid in pids}
    end_with_launcher(child, pids, stopped)


def test_a_run_outlives_the_thread_that_launched_it(tmp_path):
    """To the kernel that thread is its ranks' parent; and another of its process, when it has ended."""
    assert len(start_in_a_thread(5).wait().history) == 5
    end_with_launcher(*script(tmp_path, before="from test_launch import start_in_a_thread as start"), stopped=True)


@pytest.mark.parametrize("body", ["pass", "time.sleep(600 if record.step == 1 else 0)"], ids=["waiting", "in the loop"])
@BOTH
def test_ctrl_c_ends_everything(tmp_path, body, processes):
    child, pids = script(tmp_path, body, processes)
    time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=20)
    assert child.returncode == -signal.SIGINT and "KeyboardInterrupt" in errors, errors
    assert len(pids) == (2 if processes else 0) and all_end(pids)


@pytest.mark.parametrize("where", ["a rank is started", "the watcher is started", "all is there"])
def test_ctrl_c_while_ranks_are_started_leaves_none(monkeypatch, where):
    """Ctrl-C used to raise before the process that had just been started was noted anywhere."""
    def interrupting(function):
        def also(*arguments, **options):
            result = function(*arguments, **options)
            if getattr(arguments[0] if arguments else None, "name", "terapipe run") == "terapipe run":
                signal.raise_signal(signal.SIGINT)
            return result
        return also

    place, name = {"a rank is started": (ranks, "_Worker"), "the watcher is started": (threading.Thread, "start"),
                   "all is there": (launching, "Run")}[where]
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(place, name, interrupting(getattr(place, name)))
    with pytest.raises(KeyboardInterrupt):
        start(10**6)
    assert signal.getsignal(signal.SIGINT) is handler and runs() == []
    monkeypatch.undo()
    assert len(start(2).wait().history) == 2


class Pressed:
    """A notebook's Ctrl-C: this Python goes on afterwards. It comes as soon as the main thread waits for `run`."""

    def __init__(self, run, waited_for=1):
        self.handler, self.run, self.waited_for = signal.getsignal(signal.SIGINT), run, waited_for
        self.thread = threading.Thread(target=self.press)

    def press(self):
        deadline = time.monotonic() + 20
        followed = importlib.import_module("terapipe_c.launch")._followed
        while not (self.run._locking and self.run.history and len(followed) == self.waited_for) and time.monotonic() < deadline:
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def __enter__(self):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.thread.start()

    def __exit__(self, *_):
        self.thread.join()
        signal.signal(signal.SIGINT, self.handler)


@BOTH
def test_what_is_asked_of_an_interrupted_run_afterwards_is_no_ctrl_c(processes):
    run = start(100_000, "Slow", processes=processes)
    with Pressed(run), pytest.raises(KeyboardInterrupt):
        run.wait()
    for ask in (run.wait, run.report, lambda: list(run)):
        with pytest.raises(AbortedError, match=r"interrupted \(Ctrl-C\)"):
            ask()
    assert repr(run).startswith("Run(interrupted, 2 ranks") and run.stop() is run
    assert len(start(2, processes=processes).wait().history) == 2


@pytest.mark.parametrize("waited", [0, 1])
def test_ctrl_c_ends_all_runs_that_are_waited_for_in_turn(waited):
    """The exception reaches only one of the runs; the other went on unseen."""
    both = [start(100_000, "Slow", processes=False) for _ in range(2)]
    with Pressed(both[waited], len(both)), pytest.raises(KeyboardInterrupt):   # not before the second is waited for, too
        for _ in zip(*both, strict=True):
            pass
    for run in both:
        with pytest.raises(AbortedError, match="interrupted"):
            run.wait(20)
    assert runs() == []


def test_an_exception_in_the_with_block_ends_the_run():
    with pytest.raises(ZeroDivisionError), start(100_000, "Slow") as run:
        assert 1 / 0
    assert not run.running and not any(map(alive, run.pids))
    with pytest.raises(_core.AbortedError, match="with block"):
        run.wait()


def test_metrics_that_cannot_be_written_end_the_run(tmp_path):
    run = start(100_000, "Slow", out=tmp_path / "a", checkpoint_every=0)

    def full(*words):
        raise OSError(28, "No space left on device", "metrics.jsonl")

    run._hear = full
    with pytest.raises(OSError, match="metrics.jsonl"):
        run.wait()
    assert not any(map(alive, run.pids))


# ---- the parts -------------------------------------------------------------------------------------------------------


def test_pack_round_trips():
    arrays = {"a": np.arange(7, dtype=np.uint16), "b": np.ones((3, 5), np.float32)[:, ::2], "empty": np.empty((0, 4))}
    (fd,) = pack({"steps": 3}, arrays)
    job, back = unpack(fd)
    os.close(fd)
    assert job == {"steps": 3} and set(back) == set(arrays)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype and np.array_equal(back[name], array)
    with pytest.raises(ValueError):
        back["a"][0] = 1


def test_learning_rate():
    job = dict(lr=1.0, min_lr=0.1, warmup_steps=4, steps=14, lr_schedule="cosine")
    assert [learning_rate(job, step) for step in (0, 3, 4)] == [0.25, 1.0, 1.0]
    assert learning_rate(job, 9) == pytest.approx(0.55)
    assert 0.1 < learning_rate(job, 13) < 0.15
    assert learning_rate({**job, "lr_schedule": "constant"}, 13) == 1.0


def test_share_carries_things_longer_than_one_gather():
    region = _core.Region.create(3, bytes(9), 4096, 4096, False)
    things = [{"rank": rank, "long": "x" * (rank * 5000)} for rank in range(3)]
    got = {}
    threads = [threading.Thread(target=lambda rank=rank: got.update({rank: share(_core.Comm(region, rank), things[rank])}))
               for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {rank: things for rank in range(3)}


def test_an_exchange_works_from_when_both_its_ends_are_there() -> None:
    from terapipe_c.outcome import met

    rows = [(0, "W", 0, 0, 0, 0.0, 5.0), (0, "AR", 0, 0, 0, 5.0, 5.1), (1, "W", 1, 0, 0, 0.0, 2.0), (1, "AR", 1, 0, 0, 2.0, 5.1)]
    assert met(rows, 2)[3] == (1, "AR", 1, 0, 0, 5.0, 5.1) and met(rows, 2)[:3] == rows[:3]
    assert met(rows, 1) == rows           # ends of two replicas do not meet
