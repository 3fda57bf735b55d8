"""What every test gets: a repository root, and the promise that no test leaves a process behind."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import terapipe_c
from terapipe_c import joint

ROOT = Path(__file__).resolve().parents[1]

# Every Python that a test starts meets the package that the test meets: not the sources that lie beside it, which have no
# _core where the package is installed as a wheel.
os.environ["PYTHONPATH"] = str(Path(terapipe_c.__file__).parents[1])
os.environ["PYTHONSAFEPATH"] = "1"


def children() -> set[int]:
    """The living (not zombie) child processes of this one."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:  # the thread has ended
            continue
        for pid in pids:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state != "Z":
                found.add(int(pid))
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, saying why, where no device can be opened."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (why := terapipe_c.cuda.why_not()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """A run that ends, well or badly, ends its workers: what is still alive two seconds after a test is a leak."""
    before = children()
    yield
    deadline = time.monotonic() + 2.0
    while (left := children() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in left
             if os.path.exists(f"/proc/{pid}/cmdline")}  # fmt: skip
    assert not left, f"processes left behind: {lines}"


@pytest.fixture
def brief(monkeypatch):
    """planner="auto" with less work than a user would have done."""
    for name, ticks in (("_NEAR", 0), ("_GLIMPSES", 0)):
        monkeypatch.setattr(joint, name, ticks)
    monkeypatch.setattr(joint, "by_name", lambda request: iter(()))
