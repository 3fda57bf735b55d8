"""Shows that a run, or a plan that takes long, makes progress: by a bar, a line that is overwritten, or now and then a line."""
from __future__ import annotations

import contextlib
import os
import queue
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from ._threads import begin

LINE_EVERY_S = 10.0
LAST_S = 10.0          # most seconds that the last line waits for another thread to finish the one before
INTERRUPTED_S = 1.0    # most that a notebook whose run was interrupted waits for its bar to be closed
PLANNING_S = 2.0       # a plan that takes no longer shows nothing
PLANNING_EVERY_S = 0.2


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", None)      # None too while another thread imports it
    return shell is not None and type(shell()).__name__ == "ZMQInteractiveShell"


def _is_terminal(stream: Any) -> bool:
    """A program without a console has None in the place of its standard error, or what it likes: closed, or with write alone."""
    try:
        return stream is not None and bool(stream.isatty())
    except (AttributeError, OSError, ValueError):              # a closed file's is a ValueError
        return False


def _columns(stream: Any) -> int:
    """Of the terminal that this stream is: a line that is longer is two, of which the next one overwrites the second alone."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns    # the standard output, which shutil asks, may be a file
    except (AttributeError, OSError, ValueError):
        columns = 0
    return columns or shutil.get_terminal_size().columns


class Progress:
    """Drawn by Beside's threads, by the main one only where no other can be had: Ctrl-C's exception inside tqdm leaves tqdm's
    lock held for ever."""

    def __init__(self, wanted: bool | None, first: int, steps: int) -> None:
        self._first, self._steps, self._shown, self._last_line, self._closed = first, steps, 0, 0.0, False
        self._lock, self._begun = threading.Lock(), time.time()
        self._told: Any = None
        self._bar: Any = None
        self._stream = sys.stderr                              # print takes None for the standard output
        self._terminal = _is_terminal(self._stream)
        self._silent = wanted is False or self._stream is None
        self._notebook = _in_notebook()
        self._bars: Any = _bars() if not self._silent and (self._terminal or self._notebook) else None

    @property
    def silent(self) -> bool:
        return self._silent or self._closed

    def show(self, history: Sequence[Any], over: bool) -> None:
        """history: the records so far. over: there will be no more."""
        if self.silent:     # by the main thread, too: a signal's handler that raises as it has the lock would leave it held
            return
        if not self._lock.acquire(timeout=LAST_S if over else 0):
            return                              # another thread is at it, perhaps on a terminal that halts
        try:
            if not self.silent:
                self._show(history, over)
        except (OSError, ValueError):  # nobody reads any more, the log's disk is full, or it is closed: that ends no training
            self._silent = True
        finally:
            self._lock.release()

    def interrupted(self, history: Sequence[Any]) -> None:
        """The run is over, and who waited for it may have left a loop over its records, of which nobody is told. A notebook goes
        on: a bar that stayed open would push all later ones a line down, and be drawn once more whenever it is collected."""
        if self._notebook and self._bar is not None and not self._closed:
            with Beside(self, INTERRUPTED_S) as shown:
                shown.show(history, True)

    def _show(self, history: Sequence[Any], over: bool) -> None:
        self._closed = over
        last = history[-1] if history else None
        if self._bars is not None:
            if self._bar is None:
                self._bar = self._bars(total=self._steps, initial=self._first, unit="step", desc="steps done", miniters=1,
                                       dynamic_ncols=True, file=self._stream)
                self._bar.start_t = self._bar.last_print_t = self._begun    # not when somebody came to wait: of that is its rate
            if last is not None and last.step + 1 - self._first > self._shown:     # not what another thread was told before
                self._bar.set_postfix_str(f"loss {last.loss:.4f}, {last.tokens_per_s:,.0f} tok/s", refresh=False)
                self._bar.update(last.step + 1 - self._first - self._shown)
                self._shown = last.step + 1 - self._first
            if over:
                self._bar.close()
        elif last is None or (last is self._told and not self._terminal):
            return
        elif over or self._terminal or time.monotonic() - self._last_line > LINE_EVERY_S:
            self._last_line, self._told = time.monotonic(), last
            text = f"{last.step + 1} of {self._steps} steps done  loss {last.loss:.4f}  {last.tokens_per_s:,.0f} tok/s"
            end = "" if self._terminal and not over else "\n"
            text = "\r\x1b[K" + text[: _columns(self._stream) - 1] if self._terminal else text
            print(text + end, end="", file=self._stream, flush=True)     # in one write: an error's words may come meanwhile


def _bars() -> Any:
    """The class of bars, None without tqdm. It has a lock of its own: tqdm's, of all bars, stays held where Ctrl-C came while a bar
    of the user's was drawn. And no thread that draws after silences: with miniters=1 every step draws, ten a second at most."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a notebook without ipywidgets gets a bar of text, and need not be told
            from tqdm.auto import tqdm
    except (ImportError, ValueError):    # of the latter kind is what a TQDM_ variable says that is no number
        return None
    return type("StepsBar", (tqdm,), {"_lock": threading.RLock(), "monitor_interval": 0})


class Beside:
    """A Progress shown by a thread of its own, for callers that must not wait for a terminal: what comes while the terminal halts
    is left out. A context manager: after it everything is shown, or, where it ends by an exception or has waited `limit_s` for
    it, will be. progress None: shows nothing."""

    def __init__(self, progress: Progress | None, limit_s: float | None = None) -> None:
        self._progress, self._limit_s = progress, limit_s
        self._last: tuple[Sequence[Any], bool] = ((), False)   # alone is kept: a terminal may halt for a night
        self._ended = False
        self._word: queue.SimpleQueue[None] = queue.SimpleQueue()   # that there is more; Ctrl-C leaves no lock of it held
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Beside:
        if self._progress is not None and not self._progress.silent:
            thread = threading.Thread(target=self._tell, name="terapipe progress", daemon=True)
            try:
                begin(thread)
                self._thread = thread
            except RuntimeError:        # the system has none left: the training is worth more than this
                pass
            except BaseException:       # Ctrl-C, and nobody leaves who did not enter: the thread would wait for ever
                self._end()
                raise
        return self

    def __exit__(self, kind: object, error: object, where: object) -> None:
        self._end()
        if kind is None and self._thread is not None:
            self._thread.join(self._limit_s)

    def show(self, history: Sequence[Any], over: bool = False) -> None:
        """history: the records so far. over: there will be no more."""
        self._last = history[-1:], over
        if self._thread is None:
            if self._progress is not None:
                self._progress.show(*self._last)
        elif self._word.empty():        # else the thread has yet to take the word, and looks behind it
            self._word.put(None)

    def _end(self) -> None:
        self._ended = True
        self._word.put(None)

    def _tell(self) -> None:
        assert self._progress is not None
        more = True
        while more:
            ended, (last, over) = self._ended, self._last       # in this order: what was told before the end is shown
            self._progress.show(last, over)
            more = not (ended or over)
            if more:
                self._word.get()


class Planning:
    """One line, on a terminal or in a notebook, that says what a planner is doing; it is overwritten, and removed in the end."""

    def __init__(self, wanted: bool | None) -> None:
        self._next = time.monotonic() + PLANNING_S
        self._handle: Any = None                               # a notebook's place for the line
        self._stream = sys.stderr
        self._terminal = _is_terminal(self._stream)
        self._silent = wanted is False or not (self._terminal or _in_notebook())
        self._shown = False

    def say(self, text: str) -> None:
        if self._silent or time.monotonic() < self._next:
            return
        self._next, self._shown = time.monotonic() + PLANNING_EVERY_S, True
        self._write(f"planning: {text}")

    def clear(self) -> None:
        if self._shown and not self._silent:
            self._write("")

    def _write(self, text: str) -> None:
        try:
            if self._terminal:
                print("\r\x1b[K" + text[: _columns(self._stream) - 1], end="", file=self._stream, flush=True)
            elif self._handle is None:
                from IPython.display import display

                untyped: Any = display
                self._handle = untyped({"text/plain": text}, raw=True, display_id=True)
            else:
                self._handle.update({"text/plain": text}, raw=True)
        except (OSError, ValueError):                          # nobody reads, or it is closed: no reason to plan no further
            self._silent = True


@contextlib.contextmanager
def planning(wanted: bool | None) -> Iterator[Planning]:
    """Its line is gone behind this, whatever happens."""
    line = Planning(wanted)
    try:
        yield line
    finally:
        line.clear()
