"""A sweep: trials over a grid of options, a JSON line for each; when run again it does those that are left."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from ._files import check_output, is_standard_output, loads, make_folders, naming, no_folder, read_bytes

__all__ = ["Sweep", "begun", "read_grid", "said"]

SAID: dict[Any, bool | None] = {"yes": True, "true": True, "True": True, 1: True, "no": False, "false": False, "False": False,
                                0: False, None: None}
BEGINNING = b'{"trial": '     # of every row: a last line that begins otherwise is somebody's, and stays


def read_grid(texts: Sequence[str], known: set[str]) -> dict[str, list[Any]]:
    """Merge `name=v,v,...` and JSON files of name -> list, the values of a name that is there twice too; ValueError naming what is
    not understood or not in `known`."""
    grid: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if equals:
            given: Any = {name.strip(): [_value(word) for word in _words(values)]}
        else:
            try:
                given = loads(read_bytes(Path(text)))
            except ValueError as error:
                raise ValueError(f"{text}: a grid is NAME=V,V,... or a JSON file of name -> list ({error})") from error
        if not isinstance(given, dict):
            raise ValueError(f"{text}: a grid file is a JSON object of name -> list")
        for key, options in given.items():
            key = key.replace("-", "_")
            if key not in known:
                raise ValueError(f"{text}: no option {key!r}; known are {', '.join(sorted(known))}")
            if not isinstance(options, list) or not options:
                raise ValueError(f"{text}: {key} must have a list of at least one value")
            if "" in options:
                raise ValueError(f"{text}: value {options.index('')} of {key} is empty: a value, or null for none, would be right")
            grid[key] = [*grid.get(key, ()), *(value for value in options if value not in grid.get(key, ()))]
    if not grid:
        raise ValueError("the grid is empty: give --grid NAME=V,V,... or --grid FILE.json")
    return grid


def said(name: str, value: Any) -> bool | None:
    """A value of an option that is given or not: any word would be taken for given, "False" too."""
    if isinstance(value, (list, dict)) or value not in SAID:
        raise ValueError(f"value {value!r} of {name} is neither true nor false: one of them would be right")
    return SAID[value]


@contextmanager
def _appending(path: Path) -> Iterator[Callable[[str], None]]:
    """Writes to a file, open for a text at a time; to a pipe or a device, open all the while: the reader of a pipe that has a name
    would take the end of a row for that of all, and the next row would wait for ever for another reader."""
    held = None
    if is_standard_output(path):    # a file that is opened anew has another place to write at: what is printed would go over rows
        held = os.fdopen(os.dup(1), "a")
    elif path.exists() and not path.is_file():
        held = path.open("a")

    def write(text: str) -> None:
        with naming(path), nullcontext(held) if held else path.open("a") as file:
            file.write(text)
            file.flush()

    with naming(path), held or nullcontext():   # what could not be written is tried again when it is closed
        yield write


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def _content(costs: Any) -> str | None:
    """What tells a file of costs from another one of its name; None: there is none that can be read twice."""
    if isinstance(costs, str) and costs not in ("analytic", "profile"):
        with suppress(OSError, ValueError):     # the trial says what is wrong with it
            return hashlib.blake2b(read_bytes(Path(costs)), digest_size=8).hexdigest() if Path(costs).is_file() else None
    return None


class Sweep:
    """Runs `trial(point)` for every point of `grid`, appending {"trial", "key", "status", "seconds", "result" | "error"}."""

    def __init__(
        self,
        path: Path,
        grid: dict[str, list[Any]],
        base: dict[str, Any],
        trial: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self.path, self.grid, self.base, self.trial = path, grid, base, trial
        self.made: dict[str, str] = {}      # statuses() of the rows that this object wrote: a pipe does not give them back

    def points(self) -> Iterator[dict[str, Any]]:
        """Every point, the last name varying fastest."""
        for values in itertools.product(*self.grid.values()):
            yield dict(zip(self.grid, values, strict=True))

    def key(self, point: dict[str, Any]) -> str:
        """Of a trial's complete settings, what is in the file of costs among them: another base or grid is another trial."""
        settings = {**self.base, **point}
        content = _content(settings.get("costs"))
        return _digest(settings if content is None else {**settings, "content of costs": content})

    def _status(self, statuses: Mapping[str, str], point: dict[str, Any]) -> str | None:
        """What its row says; None: it has none. Rows of before costs were known by their content have only the name in their keys:
        they stay."""
        return statuses.get(self.key(point)) or statuses.get(_digest({**self.base, **point}))

    def statuses(self) -> dict[str, str]:
        """"done" or "failed" by the keys of the rows in the file, a key's last. A last line cut short by a kill is no row."""
        keys: dict[str, str] = {}
        if no_folder(self.path).is_file():      # a pipe or a device has no rows: to read them would wait, or go on, for ever
            for number, line in enumerate(read_bytes(self.path).splitlines(keepends=True), 1):
                try:
                    row = loads(line)
                    keys[row["key"]] = row["status"]
                except (ValueError, KeyError, TypeError) as error:
                    torn = isinstance(error, ValueError) and not line.endswith(b"\n")   # half a row is no JSON
                    if torn and (line.startswith(BEGINNING) or BEGINNING.startswith(line)):
                        break
                    raise ValueError(f"{self.path}, line {number}: no row of a sweep; give another --out") from error
        return {**keys, **self.made}

    def all_failed(self) -> bool:
        """Whether every trial of the grid has a row, and none went well."""
        statuses = self.statuses()
        return all(self._status(statuses, point) == "failed" for point in self.points())

    def run(self, retry_failed: bool = False, say: Callable[[str], None] | None = None) -> dict[str, int]:
        """Do what is left; gives how many were done, failed and skipped. Ctrl-C stops between two rows."""
        statuses, left = self.statuses(), {"failed", None} if retry_failed else {None}
        tried: set[str] = set()
        counts = {"done": 0, "failed": 0, "skipped": 0}
        total = sum(1 for _ in self.points())
        make_folders(self.path.parent)
        check_output(self.path, appended=True)
        self._end_last_line()
        with _appending(self.path) as write:
            for number, point in enumerate(self.points(), 1):
                key = self.key(point)
                if key in tried or self._status(statuses, point) not in left:
                    counts["skipped"] += 1
                    continue
                row: dict[str, Any] = {"trial": point, "key": key}
                start = time.monotonic()
                try:
                    row.update(status="done", result=self.trial(point))
                except Exception as error:
                    row.update(status="failed", error={"type": type(error).__name__, "message": str(error)})
                row["seconds"] = round(time.monotonic() - start, 6)
                write(json.dumps(row, default=str) + "\n")
                tried.add(key)
                self.made[key] = row["status"]
                counts[row["status"]] += 1
                if say is not None:
                    say(f"{number}/{total} {row['status']:<6} {point} {row.get('error', {}).get('message', '')}".rstrip())
        return counts

    def _end_last_line(self) -> None:
        """Cut off a half-written last line, so that the next row does not run into it."""
        if not self.path.is_file():
            return
        content = read_bytes(self.path)
        if content and not content.endswith(b"\n"):
            keep = content.rfind(b"\n") + 1
            try:                # nothing is written anew: where that failed, or was killed, all rows would be lost
                loads(content[keep:])
            except ValueError:
                os.truncate(self.path, keep)
            else:
                with naming(self.path), self.path.open("ab") as file:
                    file.write(b"\n")


def begun(folder: Path, steps: int) -> bool:
    """Whether a trial that was cut short is to go on from its checkpoint. If not, a run without one is no longer there, and a
    whole one, of which only the row is missing, has another name. FileExistsError where another sweep is at it."""
    from .checkpoint import load_checkpoint
    from .job import Folder

    try:
        done: int | None = load_checkpoint(folder, names=(), optimizer=False).step
    except FileNotFoundError:
        done = None
    if done is not None and done < steps:
        return True
    if (folder / "config.json").is_file():      # what launch writes first: the folder is a trial's, whoever's name it has
        lock = Folder(folder)
        try:
            if done is None:
                shutil.rmtree(folder)
            else:
                number = next(n for n in itertools.count(1) if not folder.with_name(f"{folder.name}.{n}").exists())
                folder.rename(folder.with_name(f"{folder.name}.{number}"))
        finally:
            lock.close()
    return False


def _words(text: str) -> Iterator[str]:
    """Split at commas outside brackets: 1,[[1,[50,46]]] has two words."""
    depth, word = 0, ""
    for letter in text:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            yield word
            word = ""
        else:
            word += letter
    if word:
        yield word


def _value(word: str) -> Any:
    try:
        value = json.loads(word)
    except json.JSONDecodeError:
        return word.strip()
    return int(value) if isinstance(value, float) and value.is_integer() else value  # 16e9 bytes is a whole number
