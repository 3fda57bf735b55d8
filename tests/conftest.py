"""What every test gets: a repository root, the promise that no test leaves a process behind, and the machine for itself where it
needs one."""

import fcntl
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

# Before NumPy: no test multiplies so much that more threads would be quicker, and each of 800 Pythons takes 70 ms to start them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import terapipe_c
from terapipe_c.planning import joint

ROOT = Path(__file__).resolve().parents[1]

# Every Python that a test starts meets the package that the test meets: not the sources that lie beside it, which have no
# _core where the package is installed as a wheel.
os.environ["PYTHONPATH"] = str(Path(terapipe_c.__file__).parents[1])
os.environ["PYTHONSAFEPATH"] = "1"

# A shell's background jobs ignore Ctrl-C (`.ci/run &`), and so would all that the tests start, whose Ctrl-C is tested.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `pytest -n 3`, as `make test` has it, runs three of these modules at a time, about the longest first. Their tests ask no clock for
# less than some seconds, and build what they share under a lock. Every other test, a new module's too, runs while no other does:
# those that measure, and test_launch, which kills ranks and asks that all has ended within two seconds. test_data comes before the
# emulator's 16,000 mappings (its fibers' stacks) are there to be read through for each corpus.
SHARING = [f"test_{name}" for name in """
    data auto ladder cuda_pipedream training cuda_guests signals plan judge cuda_stage mpi gpu_check links cuda_wgmma cuda_chimera
    cuda_replicas cuda_cudnn planner_plans surroundings benchmarks train cuda_build lean notebook swap chimera_plan limits
    swap_beside examples uneven cuda_graphs bpipe package cuda_nccl cli comm compare halted pipedream gemm replicas auto_bounds
    dawnpiper progress profiled cuda_attention chimera_engine split layering types passed_over cuda_progress bmpipe planners
    checkpoint engine sweep launchers_end cuda_rows in_flight gpu_sanitize stage layer_graph emulated planner_arguments cuda_optim
    baselines cost sliced cuda_races bad_arguments autopipe chimera sched sched_timing zero_bubble long_slices misplaced network
    cuda_apart reference recompute remade baselines_published capi checkpoint_crashes cuda_gemm interop nodes papers slicing_bound
    view zoo cuda_pipeline doctor capture config cuda_order cudnn_plans guests own_program torch_csv bmpipe_scale bmpipe_start
    cuda_planned capture_data capture_functions capture_in_place dawnpiper_work mapped side_by_side reorder lower_bound
    cuda_processes host_memory cuda_far cuda_late cuda_faults cuda_paths meeting places intervals timelines outcome partition
    cost_files builds_apart explain report baselines_huge cuda_kept engine_comm foreign_names gpu_kept small_plans by_block
    cuda_slices within shards environment enough
""".split()]
TURNS = os.open(__file__, os.O_RDONLY) if "PYTEST_XDIST_WORKER" in os.environ else None


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


def pytest_collection(session: pytest.Session) -> None:
    """Each worker collects every module, and most of that is pytest's rewriting of asserts: of all modules each rewrites its share
    first, and has the others' from the files that they left, which PYTHONDONTWRITEBYTECODE would have it do without."""
    if TURNS is None or [Path(arg) for arg in session.config.args] not in ([ROOT / "tests"], [Path("tests")]):
        return
    first, step = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    for path in sorted(ROOT.glob("tests/test_*.py"))[first::step]:
        try:
            importlib.import_module(path.stem)
        except (Exception, pytest.skip.Exception):  # collection meets it again, and tells
            pass
    sys.dont_write_bytecode = before


def may_share(item: pytest.Item) -> bool:
    return item.path.stem in SHARING


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, saying why, where no device can be opened; what may share the machine comes first."""
    gc.freeze()  # the planners make many tuples: what pytest holds is not gone through again and again for them
    if TURNS is not None:
        items.sort(key=lambda item: SHARING.index(item.path.stem) if may_share(item) else len(SHARING))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (why := terapipe_c.cuda.why_not()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """The wait for a turn is outside of faulthandler_timeout."""
    if TURNS is None:
        return (yield)
    fcntl.flock(TURNS, fcntl.LOCK_SH if may_share(item) else fcntl.LOCK_EX)
    try:
        return (yield)
    finally:
        fcntl.flock(TURNS, fcntl.LOCK_UN)  # not by closing: a fork of a test may have it too


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
    monkeypatch.setattr(joint, "_GLIMPSES", 0)
    monkeypatch.setattr(joint, "by_name", lambda request: iter(()))


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs with backend="cuda" are on the emulated device."""
    import cuda_emu

    monkeypatch.setenv("TERAPIPE_CUDA_MODULE", str(cuda_emu.build()))


@pytest.fixture(scope="session")
def fake_nccl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libnccl of threads for TERAPIPE_NCCL: a false one, or what TERAPIPE_TEST_NCCL names."""
    from cuda_ranks import OWN, compile_fake

    return Path(OWN) if OWN else compile_fake(tmp_path_factory.mktemp("fake"))
