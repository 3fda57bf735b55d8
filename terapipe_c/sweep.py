"""A sweep: trials over a grid of options, a JSON line for each; when run again it does those that are left."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import itertools
import json
import math
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from ._files import check_output, is_standard_output, loads, make_folders, naming, no_folder, path_of, read_bytes
from ._steps import STATE

__all__ = ["Sweep", "begun", "read_grid", "said"]

SAID: dict[Any, bool | None] = {"yes": True, "true": True, "True": True, 1: True, "no": False, "false": False, "False": False,
                                0: False, None: None}
BEGINNING = b'{"trial": '     # of every row: a last line that begins otherwise is somebody's, and stays
READ_WHOLE = 1 << 26    # bytes of a file of data or parameters up to which it is known by all of them
WRITING, TRIALS = 1 << 60, 1 << 61      # where the locks are of who writes to the file, and of each trial by its key


def read_grid(texts: Sequence[str], known: set[str]) -> dict[str, list[Any]]:
    """Merge `name=v,v,...` and JSON files of name -> list, the values of a name that is there twice too; ValueError naming what is
    not understood or not in `known`."""
    grid: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if equals:
            given: Any = {name.strip(): [_value(word) for word in _words(values)]}
        else:
            if text.strip().lstrip("-").replace("-", "_") in known and not os.path.lexists(text):
                raise ValueError(f"{text}: an option without values, and no file: {text}=V,V,... would be right")
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
            if not all(map(_finite, options)):     # a row would be no JSON
                raise ValueError(f"{text}: a value of {key} is infinite, or no number: finite ones, or null, would be right")
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


class _Locks:
    """What of a sweep no other one on the same file does meanwhile: bytes far behind the file's end are locked, which ends with the
    process that has them. Where the file system has no locks, nobody can know; a pipe or a device has no rows to share."""

    def __init__(self, path: Path) -> None:
        shared = path.is_file() or not path.exists()
        how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC     # of a file that may only be appended to, too (chattr +a)
        self._fd = os.open(path, how, 0o666) if shared else -1

    @contextmanager
    def held(self, at: int, wait: bool = True) -> Iterator[bool]:
        """Within it the lock is ours, unless another one has it, for which this waits if it is to."""
        ours = self._ask(fcntl.F_WRLCK, at, wait)
        try:
            yield ours
        finally:
            if ours:
                self._ask(fcntl.F_UNLCK, at, False)

    def _ask(self, kind: int, at: int, wait: bool) -> bool:
        """Of this open file, not of the process: one that opens and closes the file besides, as each row does, would let go."""
        how = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        try:
            if self._fd >= 0:
                fcntl.fcntl(self._fd, how, struct.pack("hhqqi0q", kind, os.SEEK_SET, at, 1, 0))
        except (BlockingIOError, PermissionError):      # EAGAIN, or EACCES; of who waits it is a file system that has no locks
            return wait
        except OSError:
            pass
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


@contextmanager
def _appending(path: Path, locks: _Locks) -> Iterator[Callable[[str], None]]:
    """Writes to a file, open for a text at a time; to a pipe or a device, open all the while: the reader of a pipe that has a name
    would take the end of a row for that of all, and the next row would wait for ever for another reader."""
    held = None
    if is_standard_output(path):    # a file that is opened anew has another place to write at: what is printed would go over rows
        held = os.fdopen(os.dup(1), "a")
    elif path.exists() and not path.is_file():
        held = path.open("a")

    def write(text: str) -> None:
        with naming(path), locks.held(WRITING), nullcontext(held) if held else path.open("a") as file:
            _end_last_line(path)
            file.write(text)
            file.flush()

    with naming(path), held or nullcontext():   # what could not be written is tried again when it is closed
        yield write


def _end_last_line(path: Path) -> None:
    """Cut off a half-written last row, so that the next one does not run into it; another last line gets its end."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        if file.read(1) in (b"", b"\n"):
            return
    content = read_bytes(path)
    keep = content.rfind(b"\n") + 1
    torn = _is_rows(content[keep:])
    with suppress(ValueError):
        loads(content[keep:])
        torn = False
    if torn:            # nothing is written anew: where that failed, or was killed, all rows would be lost
        os.truncate(path, keep)
    else:
        with naming(path), path.open("ab") as file:
            file.write(b"\n")


def _is_rows(line: bytes) -> bool:
    """Whether it is as a row begins, however little of it is there."""
    return line.startswith(BEGINNING) or BEGINNING.startswith(line)


def _digest(value: Any) -> str:
    return _hash(json.dumps(value, sort_keys=True, default=str).encode())


def _contents(settings: Mapping[str, Any]) -> dict[str, str]:
    """What tells the files of a trial from others of the same names."""
    read = {"costs": _costs, "data": _data, "init": _init}
    found: dict[str, str] = {}
    for name, content in read.items():
        given = settings.get(name)
        if isinstance(given, str):
            with suppress(OSError, ValueError):     # none that can be read twice, or none at all: the trial says what is wrong
                found |= {f"content of {name}": told} if (told := content(given)) else {}
    return found


def _costs(name: str) -> str:
    path = Path(name)
    return _hash(read_bytes(path)) if name not in ("analytic", "profile") and path.is_file() else ""


def _data(name: str) -> str:
    from .data import megatron_pair

    path = path_of("data", name)
    return _files(megatron_pair(path) or [path])


def _init(name: str) -> str:
    """A checkpoint's state has the checksums of its tensors."""
    from .interop import find_params

    folder = find_params(name)
    state = folder / STATE
    return _files([state] if state.is_file() else [folder / "config.json", *sorted(folder.glob("*.safetensors*"))])


def _files(paths: list[Path]) -> str:
    return _hash("".join(_file(str(path), *_seen(path.stat())) for path in paths if path.is_file()).encode()) if paths else ""


def _seen(about: os.stat_result) -> tuple[int, ...]:
    return about.st_size, about.st_mtime_ns, about.st_ino, about.st_dev


@functools.lru_cache(1 << 10)
def _file(path: str, size: int, changed_ns: int, *_: int) -> str:
    """Of a large file its size and the time of its last change: to read it would take minutes."""
    return f"{size}:{_hash(read_bytes(Path(path))) if size <= READ_WHOLE else changed_ns} "


def _hash(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


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
        self._others: dict[str, str] = {}   # of all that came since run() began, up to _end: byte and line of the file
        self._end = 0, 0

    def points(self) -> Iterator[dict[str, Any]]:
        """Every point, the last name varying fastest."""
        for values in itertools.product(*self.grid.values()):
            yield dict(zip(self.grid, values, strict=True))

    def key(self, point: dict[str, Any]) -> str:
        """Of a trial's complete settings, what is in the files that it reads among them: another base or grid is another trial."""
        return self._keys(point)[0]

    def _keys(self, point: dict[str, Any]) -> list[str]:
        """And those of rows of before data and parameters to begin with were known by their content, or costs were: they stay."""
        settings = {**self.base, **point}
        found = _contents(settings)
        costs = {name: content for name, content in found.items() if name == "content of costs"}
        each: tuple[dict[str, str], ...] = (found, costs, {})
        return [_digest({**settings, **known}) for i, known in enumerate(each) if known not in each[:i]]

    @staticmethod
    def _status(statuses: Mapping[str, str], keys: Sequence[str]) -> str | None:
        """What the row of a trial says; None: it has none."""
        return next((statuses[key] for key in keys if key in statuses), None)

    def statuses(self) -> dict[str, str]:
        """"done" or "failed" by the keys of the rows in the file, a key's last. A last line cut short by a kill is no row."""
        return {**self._rows()[0], **self.made}

    def _rows(self, start: int = 0, number: int = 0) -> tuple[dict[str, str], int, int]:
        """What :meth:`statuses` says of the rows from this byte on, before which so many lines are; and both behind the last whole
        line."""
        keys: dict[str, str] = {}
        if not no_folder(self.path).is_file():      # a pipe or a device has no rows: to read them would wait, or go on, for ever
            return keys, start, number
        for line in _lines(self.path, start):
            try:
                row = loads(line)
                keys[row["key"]] = row["status"]
            except (ValueError, KeyError, TypeError) as error:
                torn = isinstance(error, ValueError) and not line.endswith(b"\n")   # half a row is no JSON
                if torn and _is_rows(line):
                    break
                raise ValueError(f"{self.path}, line {number + 1}: no row of a sweep; give another --out") from error
            if line.endswith((b"\n", b"\r")):
                start, number = start + len(line), number + 1
        return keys, start, number

    def all_failed(self) -> bool:
        """Whether every trial of the grid has a row, and none went well."""
        statuses = self.statuses()
        return all(self._status(statuses, self._keys(point)) == "failed" for point in self.points())

    def run(self, retry_failed: bool = False, say: Callable[[str], None] | None = None) -> dict[str, int]:
        """Do what is left; gives how many were done, failed and skipped. Ctrl-C stops between two rows. Another sweep with the same
        file shares the trials: of one that it is at this one waits for the end, when no other is left."""
        tell = say or (lambda text: None)
        (rows, *end), left = self._rows(), {"failed", None} if retry_failed else {None}
        before, self._end = {**rows, **self.made}, (end[0], end[1])
        self._others.clear()
        counts = {"done": 0, "failed": 0, "skipped": 0}
        total = sum(1 for _ in self.points())
        make_folders(self.path.parent)
        check_output(self.path, appended=True)
        with closing(_Locks(self.path)) as locks, _appending(self.path, locks) as write:
            with locks.held(WRITING):
                _end_last_line(self.path)
            waiting: list[tuple[int, dict[str, Any]]] = []
            for wait in (False, True):
                for number, point in waiting if wait else enumerate(self.points(), 1):
                    key, *old = self._keys(point)
                    if self._others.get(key) or self._status(before, (key, *old)) not in left:
                        counts["skipped"] += 1
                        continue
                    if wait:
                        tell(f"{number}/{total} waits for another sweep, which is at {point}")
                    with locks.held(TRIALS + int(key, 16) % TRIALS, wait) as ours:
                        if not ours:
                            waiting.append((number, point))
                            continue
                        row = None if self._is_done(key) else self._row(point, key, write)
                    counts[row["status"] if row else "skipped"] += 1
                    if row:
                        tell(f"{number}/{total} {row['status']:<6} {point} {row.get('error', {}).get('message', '')}".rstrip())
        return counts

    def _is_done(self, key: str) -> bool:
        """Whether it has had a row since this sweep began: by another one."""
        with suppress(ValueError):      # somebody else's line among them, which the next run refuses
            rows, *end = self._rows(*self._end)
            self._others.update(rows)
            self._end = end[0], end[1]
        return key in self._others

    def _row(self, point: dict[str, Any], key: str, write: Callable[[str], None]) -> dict[str, Any]:
        """Do the trial, and write what came of it."""
        row: dict[str, Any] = {"trial": point, "key": key}
        start = time.monotonic()
        try:
            row.update(status="done", result=self.trial(point))
        except Exception as error:
            row.update(status="failed", error={"type": type(error).__name__, "message": str(error)})
        row["seconds"] = round(time.monotonic() - start, 6)
        write(json.dumps(row, default=str) + "\n")
        self.made[key] = self._others[key] = row["status"]
        return row


def _lines(path: Path, start: int) -> Iterator[bytes]:
    with naming(path), path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > start:
            file.seek(start)
            yield from file.read().splitlines(keepends=True)


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


def _finite(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        return all(map(_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _value(word: str) -> Any:
    try:
        value = json.loads(word)
    except json.JSONDecodeError:
        return word.strip()
    return int(value) if isinstance(value, float) and value.is_integer() else value  # 16e9 bytes is a whole number
