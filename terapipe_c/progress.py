"""How a run shows that it moves: a bar, a line that is written over, or now and then a line."""
from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

LINE_EVERY_S = 10.0


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"


class Progress:
    """Call show() from the thread that waits for the run."""

    def __init__(self, wanted: bool | None, first: int, steps: int) -> None:
        self._first, self._steps, self._shown, self._last_line, self._closed = first, steps, 0, 0.0, False
        self._told: Any = None
        self._bar: Any = None
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._silent = wanted is False or sys.stderr is None
        if not self._silent and (self._terminal or _in_notebook()):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a notebook without ipywidgets gets a bar of text, and need not be told
                    from tqdm.auto import tqdm
            except ImportError:
                return
            try:
                self._bar = tqdm(total=steps, initial=first, unit="step", dynamic_ncols=True)
            except OSError:
                self._silent = True

    def show(self, history: Sequence[Any], over: bool) -> None:
        """history: the records so far. over: there will be no more."""
        if self._silent or self._closed:
            return
        try:
            self._show(history, over)
        except OSError:  # nobody reads any more, or the log's disk is full: that ends no training
            self._silent = True

    def _show(self, history: Sequence[Any], over: bool) -> None:
        self._closed = over
        last = history[-1] if history else None
        if self._bar is not None:
            if last is not None:
                self._bar.set_postfix_str(f"loss {last.loss:.4f}, {last.tokens_per_s:,.0f} tok/s", refresh=False)
                self._bar.update(last.step + 1 - self._first - self._shown)
                self._shown = last.step + 1 - self._first
            if over:
                self._bar.close()
        elif last is None or (last is self._told and not self._terminal):
            return
        elif over or self._terminal or time.monotonic() - self._last_line > LINE_EVERY_S:
            self._last_line, self._told = time.monotonic(), last
            text = f"step {last.step + 1}/{self._steps}  loss {last.loss:.4f}  {last.tokens_per_s:,.0f} tok/s"
            end = "" if self._terminal and not over else "\n"
            print(("\r\x1b[K" if self._terminal else "") + text, end=end, file=sys.stderr, flush=True)
