"""What a plan or a run that takes long shows meanwhile."""
import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import progress

PLAN = """
import terapipe_c as tp
from terapipe_c import progress
progress.PLANNING_S = progress.PLANNING_EVERY_S = 0.0
model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=16, block_size=16)
cluster = tp.Cluster(num_devices=2, memory_bytes=1e9, link_latency_s=1e-6, link_bandwidth_Bps=1e10, peak_flops=1e9)
"""
ASKS = {"plan": "tp.plan(model, cluster, 2, 16, progress={})",
        "compare": "tp.compare(model, cluster, 2, 16, planners=['auto', 'merak'], progress={})"}


def said_on_a_terminal(code):
    """What a process writes to its standard error, which is a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stderr=theirs, stdout=subprocess.DEVNULL) as process:
        os.close(theirs)
        said = b""
        try:
            while part := os.read(ours, 65536):
                said += part
        except OSError:                                        # EIO: the other side is closed
            pass
        os.close(ours)
    assert process.returncode == 0, said
    return said.decode()


@pytest.mark.parametrize("ask", ASKS)
def test_a_terminal_is_told_what_is_looked_at_and_left_clean(ask):
    lines = said_on_a_terminal(PLAN + ASKS[ask].format(None)).split("\r\x1b[K")
    assert lines[0] == lines[-1] == "" and len(lines) > 10
    assert all(line.startswith("planning: ") and "\n" not in line for line in lines[1:-1] if line)
    assert any("asked merak; best so far" in line for line in lines) and any("terapipe for" in line for line in lines)
    assert ("planning: merak, 2 of 2" in lines) == (ask == "compare")


@pytest.mark.parametrize("ask", ASKS)
def test_silence_where_it_is_wished_or_nobody_looks(ask):
    assert said_on_a_terminal(PLAN + ASKS[ask].format(False)) == ""
    alone = subprocess.run([sys.executable, "-c", PLAN + ASKS[ask].format(None)], capture_output=True, text=True, check=True)
    assert alone.stderr == alone.stdout == ""


def test_what_fails_leaves_a_clean_line():
    lines = said_on_a_terminal(PLAN + """
try:
    tp.plan(model, cluster, 2, 16, memory_bytes=1000)
except tp.InfeasibleError:
    pass
""").split("\r\x1b[K")
    assert len(lines) > 3 and lines[-1] == ""


class Stream(io.StringIO):
    def __init__(self, lines, then):
        super().__init__()
        self.left, self.then = lines, then

    def isatty(self):
        return True

    def write(self, text):
        self.left -= 1
        if self.left == 0:
            self.then()
        return super().write(text)


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


def vanishing():
    stream = Stream(3, lambda: setattr(sys, "stderr", None))
    return stream


def closing():
    stream = Stream(3, lambda: stream.close())
    return stream


STREAMS = {"none": lambda: None, "closed": closed, "with write alone": lambda: SimpleNamespace(write=lambda text: len(text),
           flush=lambda: None), "is closed meanwhile": closing, "goes meanwhile": vanishing}  # fmt: skip


@pytest.mark.parametrize("stream", STREAMS)
def test_plans_and_runs_whatever_stands_for_the_standard_error(stream, monkeypatch, capsys):
    for constant in ("PLANNING_S", "PLANNING_EVERY_S"):
        monkeypatch.setattr(progress, constant, 0.0)
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=16, block_size=16)
    cluster = tp.Cluster(num_devices=2, memory_bytes=1e9, peak_flops=1e9)
    monkeypatch.setattr(sys, "stderr", STREAMS[stream]())
    plan = tp.plan(model, cluster, 2, 16, executable=True)
    monkeypatch.setattr(sys, "stderr", STREAMS[stream]())
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)        # lines
    history = tp.launch(plan, np.arange(200, dtype=np.int32) % 16, 4, processes=False).wait().history
    assert len(history) == 4 and capsys.readouterr().out == ""


class ZMQInteractiveShell:
    pass


NOTEBOOKS = {"a notebook": {"get_ipython": ZMQInteractiveShell}, "an IPython on its way in": {}}   # in another thread


@pytest.mark.parametrize("words", NOTEBOOKS)
def test_a_notebook_has_one_place_for_the_line(words, monkeypatch):
    shown, handle = [], SimpleNamespace(update=lambda what, raw: shown.append(what["text/plain"]))
    place = SimpleNamespace(display=lambda what, raw, display_id: handle.update(what, raw) or handle)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(**NOTEBOOKS[words]))
    monkeypatch.setitem(sys.modules, "IPython.display", place)
    for constant in ("PLANNING_S", "PLANNING_EVERY_S"):
        monkeypatch.setattr(progress, constant, 0.0)
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=16, block_size=16)
    tp.plan(model, tp.Cluster(num_devices=2, peak_flops=1e9), 2, 16)
    if NOTEBOOKS[words]:
        assert len(shown) > 10 and shown[-1] == "" and all(text.startswith("planning: ") for text in shown[:-1])
    else:
        assert shown == []


def test_ctrl_c_while_a_bar_is_drawn_leaves_no_lock_held(monkeypatch):
    """Its exception came out of tqdm, whose lock stayed held: who closed the bar of the interrupted run waited for it for ever."""
    pytest.importorskip("tqdm")
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=ZMQInteractiveShell))
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=16, block_size=16)
    plan = tp.plan(model, tp.Cluster(num_devices=2, memory_bytes=1e9, peak_flops=1e9), 2, 16, executable=True, progress=False)
    data = np.arange(200, dtype=np.int32) % 16
    for pressed_at in (1, 2, 4):
        monkeypatch.setattr(sys, "stderr", Stream(pressed_at, lambda: os.kill(os.getpid(), signal.SIGINT)))
        with pytest.raises(KeyboardInterrupt):
            tp.launch(plan, data, 10**6, processes=False).wait()
        assert sys.stderr.left <= 0 and "steps done" in sys.stderr.getvalue()
    monkeypatch.setattr(sys, "stderr", Stream(0, lambda: None))
    assert len(tp.launch(plan, data, 4, processes=False).wait().history) == 4 and "4/4" in sys.stderr.getvalue()


def test_a_bar_of_the_users_that_ctrl_c_left_locked_holds_no_run_up(monkeypatch):
    tqdm = pytest.importorskip("tqdm.auto").tqdm
    free, taken = threading.Event(), threading.Event()

    def hold():
        with tqdm.get_lock():
            taken.set()
            free.wait(60)

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    taken.wait()
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=16, block_size=16)
    plan = tp.plan(model, tp.Cluster(num_devices=2, memory_bytes=1e9, peak_flops=1e9), 2, 16, executable=True)
    monkeypatch.setattr(sys, "stderr", Stream(0, lambda: None))
    run = tp.launch(plan, np.arange(200, dtype=np.int32) % 16, 4, processes=False).wait(30)
    assert "4/4" in sys.stderr.getvalue() and not run.running and holder.is_alive()
    free.set()
    holder.join()


def test_the_rate_of_a_run_that_is_waited_for_late_is_since_its_start(monkeypatch):
    """It was of the moment in which all steps were told: millions a second."""
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", Stream(0, lambda: None))
    shown = progress.Progress(True, 0, 200)
    monkeypatch.setattr(shown, "_begun", shown._begun - 1000)
    shown.show([SimpleNamespace(step=199, loss=1.0, tokens_per_s=1.0)], True)
    assert re.search(r"200/200 \[16:4\d<00:00, +5\.0\ds/step", sys.stderr.getvalue()), sys.stderr.getvalue()


def told(step):
    return [SimpleNamespace(step=step, loss=1.0, tokens_per_s=1.0)]


def test_the_bar_of_a_run_that_goes_on_begins_where_the_one_before_ended(monkeypatch):
    """Its rate is of its own steps alone."""
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", Stream(0, lambda: None))
    shown = progress.Progress(True, 150, 200)
    monkeypatch.setattr(shown, "_begun", shown._begun - 1000)
    shown.show([], False)
    shown.show(told(174), False)
    shown.show(told(199), True)
    said = sys.stderr.getvalue()
    assert "75%" in said.split("\r")[1] and "150/200" in said and re.search(r"200/200 \[16:4\d<00:00, +20\.\d\ds/step", said), said


def test_a_log_is_told_the_first_step_the_last_and_now_and_then_one(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0]))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    shown = progress.Progress(True, 0, 100)
    for step in range(100):
        shown.show(told(step), step == 99)
        now[0] += 1.5
    assert [int(line.split()[0]) for line in sys.stderr.getvalue().splitlines()] == [*range(1, 100, 7), 100]


def test_a_line_that_is_overwritten_is_no_longer_than_the_terminal_is_wide(monkeypatch):
    ours, theirs = pty.openpty()
    monkeypatch.setattr(progress, "_bars", lambda: None)       # as without tqdm
    try:
        with os.fdopen(theirs, "w") as terminal:
            termios.tcsetwinsize(terminal, (24, 30))
            monkeypatch.setattr(sys, "stderr", terminal)
            shown = progress.Progress(True, 0, 200)
            shown.show(told(0), False)
            shown.show(told(1), True)
            said = ""
            while not said.endswith("\n"):                    # it may come in parts
                said += os.read(ours, 65536).decode()
    finally:
        os.close(ours)
    lines = said.split("\r\x1b[K")[1:]
    assert [len(line.strip()) for line in lines] == [29, 29] and lines[1].startswith("2 of 200 steps done")


@pytest.mark.parametrize("name", ["TQDM_NCOLS", "TQDM_MININTERVAL"])
def test_a_variable_of_tqdms_that_is_no_number_costs_the_bar_alone(name):
    """tqdm fails when it is imported, and ended the run."""
    ran = subprocess.run([sys.executable, "-P", "-c", "from terapipe_c.progress import _bars; assert _bars() is None"],
                         env={**os.environ, name: "wide"}, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_ctrl_c_while_a_bars_thread_starts_leaves_it_not_waiting(monkeypatch):
    begin = threading.Thread.start
    threads = []

    def start(thread):
        begin(thread)
        threads.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stderr", Stream(0, lambda: None))
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt), progress.Beside(progress.Progress(True, 0, 4)):
        pass
    threads[0].join(60)
    assert not threads[0].is_alive()


def test_where_nothing_is_shown_no_lock_is_taken():
    """The main thread itself is told there: a signal's handler that raised as it had the lock left it held, and a stop waited."""
    class Untouched:
        def __getattr__(self, name):
            raise AssertionError(f"lock.{name}")

    silent, closed = progress.Progress(False, 0, 4), progress.Progress(True, 0, 4)
    closed.show([], True)
    for shown in (silent, closed):
        shown._lock = Untouched()
        shown.show([], False)
        shown.show([], True)


def test_progress_is_a_bool():
    with pytest.raises(tp.InvalidValueError, match="progress is 'yes'"):
        tp.plan(tp.GPTConfig.preset("gpt2-124m"), tp.Cluster.local(), 2, 16, progress="yes")
