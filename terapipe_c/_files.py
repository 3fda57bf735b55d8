"""Files of this package: JSON that names its format and version, written whole or not at all; and checks of users' paths."""
from __future__ import annotations

import errno
import itertools
import json
import math
import os
import select
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from ._core import InvalidTypeError, InvalidValueError, StorageError
from .config import brief, human_bytes

_THERE = "the file is there: another name would be right"
_HEAD = 1 << 16    # bytes of a file in which its mark is
_MOST = 1 << 30     # bytes of a text that is read as a whole: /dev/zero and `yes` have no end
_WRITER_MS = 2000   # for which a pipe's reader waits for who is to write to it
_DEEPEST = 500      # folders in each other that are made at once
_ATTEMPTS = 5       # at making a folder in one that others remove meanwhile

T = TypeVar("T")


def path_of(name: str, value: Any, look: bool = True) -> Path:
    """``value`` as a path. A TypeError, ValueError or (where the working directory is gone) FileNotFoundError names the argument;
    an OSError names the path where the system does not tell whether something is there (look=False: leave that to the caller)."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise InvalidTypeError(f"{name} is {brief(value)}: the name of a file or folder, a str or a Path, would be right")
    if not text:                                     # Path("") is the working directory, which nobody means by it
        raise InvalidValueError(f"{name} is empty: the name of a file or folder would be right")
    try:
        possible = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise InvalidValueError(f"{name} is {brief(text)}: a name without zeros, all of it encodable, would be right")
    if not os.path.isabs(text):
        try:
            os.getcwd()
        except FileNotFoundError:
            why = f"{name} is relative to the working directory, which has been deleted: an absolute path would be right"
            raise FileNotFoundError(errno.ENOENT, why, text) from None
    with suppress(FileNotFoundError, NotADirectoryError):
        if look:
            os.stat(text)    # from Python 3.14 on, pathlib takes a name that is too long or may not be looked at for nothing there
    return Path(text)


def no_folder(path: Path) -> Path:
    """The path of a file, whether it exists or not; IsADirectoryError if it is a folder."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder is there: the name of a file would be right", str(path))
    return path


def no_pipe(path: Path) -> Path:
    """The path of a file that is read or replaced, whether it exists or not: a pipe would wait for who is at its other end."""
    if no_folder(path).is_fifo():
        raise InvalidValueError(f"{path} is a pipe: the name of a file would be right")
    return path


def is_standard_output(path: str | os.PathLike[str]) -> bool:
    """Whether it is where the command prints: `--out /dev/stdout`. Nobody reads what goes to /dev/null, whichever two do."""
    with suppress(OSError, ValueError):
        return os.path.realpath(path) != os.devnull and os.path.samestat(os.stat(path), os.fstat(1))
    return False


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Free for this user on the disk of a folder, or of the one that it is to be made in; 2^63 where a file system does not say."""
    place = Path(folder).absolute()
    disk = os.statvfs(next(path for path in (place, *place.parents) if path.is_dir()))
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else 2**63


def check_writable(name: str, folder: str | os.PathLike[str]) -> None:
    """StorageError, with the number that says why, where no file can be made in there."""
    try:
        number = None if stat.S_ISDIR(os.stat(folder).st_mode) else errno.ENOTDIR
    except OSError as error:
        number = error.errno
    if number is None and not os.access(folder, os.W_OK | os.X_OK):
        number = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
    if number is not None:
        refusal = StorageError(f"{name} is {brief(os.fspath(folder))}: a folder that can be written would be right "
                               f"({os.strerror(number)})")
        refusal.errno = number
        raise refusal


def check_output(path: str | os.PathLike[str], *, appended: bool = False) -> None:
    """PermissionError, before the work and not after it, where a file that is there already cannot be replaced, or ``appended`` to,
    or a new one cannot be made. Pipes and devices are not asked."""
    target = Path(os.path.realpath(path_of("path", path, look=False)))
    if target.exists() and not target.is_file():
        return
    asked, how, what = (target, os.W_OK, "file") if appended and target.exists() else (target.parent, os.W_OK | os.X_OK, "folder")
    if asked.exists() and not os.access(asked, how):
        raise PermissionError(errno.EACCES, f"a {what} that can be written would be right", str(asked))


def check_place(path: str | os.PathLike[str], mark: str) -> None:
    """Refuses, before the work and not after it, a file that :func:`write_text` cannot write, or :func:`replaceable` would not."""
    folder = os.path.dirname(path_of("path", path, look=False)) or "."
    for one in (folder, os.path.dirname(os.path.realpath(path))):    # a link may lead elsewhere
        if not os.path.isdir(one):
            raise FileNotFoundError(errno.ENOENT, "there is no such folder to write into: one that exists would be right", one)
    check_output(replaceable(path, mark))


def make_folders(path: Path) -> list[Path]:
    """The folder and those that it is in, where they are not there yet; gives those that this call made, the innermost first, for
    :func:`remove_folders`. Not what others make meanwhile, nor what a name with ``..`` in it turns out to be."""
    new: list[Path] = []
    try:
        again(lambda: _make_missing(path, new))
    except OSError:                                      # the innermost's name may be too long, or a disk be full
        remove_folders(new)
        raise
    return new


def again(make: Callable[[], T]) -> T:
    """What ``make`` gives that makes folders and what is in them, once more where one is gone by then: of runs that begin in the
    same new folder, one that fails removes it while it is empty."""
    for _ in range(_ATTEMPTS):
        with suppress(FileNotFoundError):
            return make()
    return make()


def _make_missing(path: Path, new: list[Path]) -> None:
    """What of the folder and those around it is not there; those made go to the front of ``new``."""
    missing = list(itertools.takewhile(lambda one: not os.path.isdir(one), (path, *path.parents)))
    if len(missing) > _DEEPEST:
        raise InvalidValueError(f"{brief(str(path))} is a folder within {len(path.parts) - 1} others: some hundreds fewer would be "
                                "right")
    for folder in reversed(missing):
        try:
            folder.mkdir()
        except FileExistsError:                          # a link to nothing, too
            if not folder.is_dir():
                if not os.path.lexists(folder):          # made and removed meanwhile
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder)) from None
                raise NotADirectoryError(errno.ENOTDIR, "a file is where a folder would have to be: another path would be "
                                         "right", str(path)) from None
        else:
            new.insert(0, folder)


def remove_folders(new: list[Path]) -> None:
    """Undo :func:`make_folders`; those in which something is by now stay."""
    for folder in new:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Context in which an OSError without a file's name, such as a write's or an fsync's, gets this one's."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None


def read_bytes(path: Path) -> bytes:
    """All of a file, or of a pipe that somebody writes to; a ValueError where it is neither, or has no end that anybody would wait
    for. An OSError names it where the disk gives no more, too."""
    with naming(path):
        told = os.stat(no_folder(path))
        if stat.S_ISFIFO(told.st_mode):
            return _read_pipe(path)
        if not stat.S_ISREG(told.st_mode):
            raise InvalidValueError(f"{path} is a device: a file, or a pipe, would be right")
        _check_size(path, told.st_size)
        return path.read_bytes()


def _read_pipe(path: Path) -> bytes:
    text = bytearray()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)      # else it would wait for a writer
    with os.fdopen(fd, "rb", buffering=0) as pipe:
        if not _is_written(fd):
            raise InvalidValueError(f"{path} is a pipe that nobody writes to: a file would be right")
        while piece := pipe.read(1 << 20):
            text += piece
            _check_size(path, len(text))
    return bytes(text)


def _is_written(fd: int) -> bool:
    """Whether somebody writes to this pipe, or did; a writer may come a moment later than the reader. Reads wait from here on."""
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    if not (come := bool(waiting.poll(_WRITER_MS))):
        try:
            os.read(fd, 1)              # nothing, as at an end: there is no writer
        except BlockingIOError:         # there is one, who has not written yet
            come = True
    os.set_blocking(fd, True)
    return come


def _check_size(path: Path, size: int) -> None:
    if size > _MOST:
        raise InvalidValueError(f"{path} has more than {human_bytes(_MOST)}: a text of fewer would be right")


def loads(raw: bytes | str) -> Any:
    """The value of a JSON text; a ValueError also where it is no UTF-8 or nested beyond reason."""
    try:
        return json.loads(raw if isinstance(raw, str) else raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is no UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_json(path: str | os.PathLike[str], data: dict[str, Any]) -> None:
    """The object as one line, by :func:`write_text`."""
    write_text(path, dumps(data) + "\n")


def dumps(data: dict[str, Any], indent: int | None = None) -> str:
    """The JSON text of an object; a ValueError names the first number in it that JSON has no word for."""
    try:
        return json.dumps(data, allow_nan=False, indent=indent)
    except ValueError as error:
        name, value = next(_not_finite("", data), ("", None))
        if not name:
            raise
        raise InvalidValueError(f"{name} is {value}: a finite number would be right") from error


def _not_finite(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _not_finite(f"{name}[{key!r}]" if name else str(key), one)
    elif isinstance(value, (list, tuple)):
        for i, one in enumerate(value):
            yield from _not_finite(f"{name}[{i}]", one)
    elif isinstance(value, float) and not math.isfinite(value):
        yield name, value


def _name(temporary: Path, target: Path, new: bool) -> None:
    """Rename the finished file to its target. new: FileExistsError if that exists, found by link(), which no other process can
    overtake."""
    if new:
        try:
            os.link(temporary, target)
        except FileExistsError:
            raise FileExistsError(errno.EEXIST, _THERE, str(target)) from None
        except OSError:                              # a file system without links
            new_path(target)
        else:
            temporary.unlink()
            return
    os.replace(temporary, target)


@contextmanager
def writing(path: str | os.PathLike[str], *, new: bool = False, follow: bool = True) -> Iterator[IO[bytes]]:
    """Context with a temporary file beside ``path``, which is flushed to the disk at its end, and renamed: a reader sees the old
    file or the new one, which keeps the old one's mode. An OSError names the file; FileExistsError where the file must be ``new``
    and exists. follow: a link stays, and what it leads to is replaced; False: the link is, and what others lead to stays."""
    given = no_folder(path_of("path", path))
    if given.exists() and not given.is_file():       # a device or a pipe is written to, not replaced
        with naming(given), given.open("wb") as stream:
            yield stream
        return
    target = Path(os.path.realpath(given)) if follow else Path(os.path.realpath(given.parent), given.name)
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder to write into: one that exists would be right",
                                str(target.parent))
    temporary = target.with_name(f".terapipe-{os.urandom(8).hex()}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(handle, "wb") as file:
            if target.exists():
                os.fchmod(handle, stat.S_IMODE(target.stat().st_mode))
            yield file
            file.flush()
            os.fsync(handle)
        _name(temporary, target, new)
    except BaseException as error:
        with suppress(OSError):         # a read-only file system refuses that too, and would name our file, not the user's
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, os.fspath(temporary), temporary):
            raise type(error)(error.errno, error.strerror, str(target)) from None
        raise


def to_disk(file: IO[bytes]) -> None:
    """All that was written to one of :func:`writing`'s is on the disk: what follows it may be named before it is."""
    file.flush()
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        os.fsync(file.fileno())


def write_text(path: str | os.PathLike[str], text: str, *, new: bool = False, follow: bool = True) -> None:
    """The text, by :func:`writing`: UTF-8; bytes of file names that are none are escaped."""
    with writing(path, new=new, follow=follow) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def replaceable(path: str | os.PathLike[str], mark: str) -> Path:
    """The path of a file to write; FileExistsError where a file is there, with something in it, that does not have the ``mark`` of
    those that are written: somebody else's."""
    target = no_folder(path_of("path", path))
    if target.is_file():
        with naming(target), target.open("rb") as file:
            head = file.read(_HEAD)
        if head and mark.encode() not in head:
            raise FileExistsError(errno.EEXIST, f"a file is there that was not written by this command (it has no {mark}): another "
                                  "name would be right", str(target))
    return target


def new_path(path: str | os.PathLike[str]) -> Path:
    """The path; FileExistsError if there is such a file."""
    target = path_of("path", path)
    if target.is_file():
        raise FileExistsError(errno.EEXIST, _THERE, str(target))
    return target


def write_new(path: str | os.PathLike[str], text: str, *, overwrite: bool = False) -> Path:
    """:func:`write_text` where there is no such file yet, or ``overwrite``; else FileExistsError."""
    target = path_of("path", path) if overwrite else new_path(path)
    write_text(target, text, new=not overwrite)
    return target


def read_json(path: str | os.PathLike[str], form: str, version: int, what: str, oldest: int | None = None,
              raw: bytes | None = None) -> dict[str, Any]:
    """The object in a file of ours, of a version from ``oldest`` (or ``version``) to ``version``; a ValueError that names the
    file if it is broken, foreign, older or newer. raw: its bytes, where they were read: a pipe gives them once."""
    raw = read_bytes(path_of("path", path)) if raw is None else raw
    try:
        data = loads(raw)
    except ValueError as error:
        raise InvalidValueError(f"{os.fspath(path)!s} is not {what}: it is no JSON ({error})") from None
    if not isinstance(data, dict) or data.get("format") != form:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise InvalidValueError(f"{os.fspath(path)!s} is not {what}: its format is {found!r}, {form!r} would be right")
    known = range(version if oldest is None else oldest, version + 1)
    if type(data.get("version")) is not int or data["version"] not in known:     # true is 1 for Python
        raise InvalidValueError(f"{os.fspath(path)!s} has version {data.get('version')!r} of {form}; this package reads "
                                f"version {' or '.join(map(str, known))}")
    return data


def read_entry(path: Path, key: str, kind: type) -> dict[str, Any]:
    """The JSON object in a file of a run folder, which has this entry; a ValueError that names the file."""
    try:
        found = loads(read_bytes(path))
    except ValueError as error:
        raise InvalidValueError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get(key), kind):
        raise InvalidValueError(f"{path} is damaged: it has no {key}")
    return found
