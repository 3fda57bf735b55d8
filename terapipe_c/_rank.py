"""The script of a rank's process (ranks.py). Before it imports the package, which takes a second, it sees to it that the process
ends if its launcher does.

The launcher's pidfd, the script's last argument, tells a running process of the launcher's end. A stopped process (SIGSTOP) would
not notice: so it asks the kernel to continue it then.
"""
from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

__all__: list[str] = []
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PATHS = "TERAPIPE_SYS_PATH"  # ranks.py: the launcher's sys.path, absolute, a JSON list: a folder's name may have a colon


def continue_at_launchers_end() -> None:
    """Ask for SIGCONT at the launcher's end. Not for a signal that kills: the kernel sends it at the end of the launching THREAD,
    which a run may outlive."""
    with suppress(ImportError):  # a Python can be built without it
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGCONT))


@contextmanager
def ending_with(launcher: int) -> Iterator[None]:
    """The process ends if its launcher does within the block, or had ended before."""
    told, tell = os.pipe()

    def watch() -> None:
        poll = select.poll()
        poll.register(told, select.POLLHUP)
        poll.register(launcher, select.POLLIN)
        if launcher in dict(poll.poll()):
            os._exit(1)

    thread = threading.Thread(target=watch, name="its watch", daemon=True)
    with suppress(RuntimeError):  # refused: main() needs one as well, and has a way to say so
        thread.start()
    try:
        yield
    finally:
        os.close(tell)
        if thread.ident is not None:
            thread.join()
        os.close(told)


def joined(paths: Iterable[str]) -> str:
    """For PYTHONPATH, which a folder with a colon in its name cannot be in: it would be two others."""
    return os.pathsep.join(path for path in paths if os.pathsep not in path)


def find_the_package() -> None:
    """Where PYTHONPATH could not say it, by where this script is."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.pathsep in folder:
        sys.path.insert(0, folder)


def take_paths() -> None:
    """Look for modules in the launcher's order from now on, and let processes of ours do so."""
    paths = os.environ.pop(PATHS, None)
    if paths is not None:
        given = json.loads(paths)
        os.environ["PYTHONPATH"] = joined(given)
        sys.path[:] = dict.fromkeys([*given, *sys.path])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which ends us
    continue_at_launchers_end()
    find_the_package()
    with ending_with(int(sys.argv[-1])):
        from terapipe_c import checkpoint, data, device_comm, engine, mapped, mpi  # noqa: F401 -- what main would, later
        from terapipe_c.plan import Plan  # noqa: F401
        from terapipe_c.worker import main
    take_paths()
    sys.exit(main(sys.argv[1:]))
