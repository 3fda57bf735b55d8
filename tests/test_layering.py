"""Which folder may include headers of which, and CONTRIBUTING.md's map of modules, held against the sources and the built
module."""

import fcntl
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from terapipe_c import _core

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "csrc").is_dir():
    pytest.skip("no sources beside the tests", allow_module_level=True)

# room: the rooms whose headers it may include, besides its own
MAY_SEE = {
    "csrc/base": set(),
    "csrc/model": {"csrc/base"},
    "csrc/backend": {"csrc/base"},
    "csrc/sched": {"csrc/base"},
    "csrc/cost": {"csrc/base", "csrc/model"},
    "csrc/plan": {"csrc/base", "csrc/model", "csrc/sched", "csrc/cost"},
    "csrc/cpu": {"csrc/base", "csrc/backend"},
    "csrc/comm": {"csrc/base", "csrc/backend"},
    "csrc/stage": {"csrc/base", "csrc/model", "csrc/backend"},
    "csrc/engine": {"csrc/base", "csrc/model", "csrc/backend", "csrc/comm", "csrc/sched", "csrc/stage"},
    "cuda": {"csrc/base", "csrc/model", "csrc/backend", "csrc/comm", "csrc/stage"},  # of stage what describes one, see below
    "tests/c": {f"csrc/{room}" for room in
                ("base", "model", "backend", "sched", "cost", "plan", "cpu", "comm", "stage", "engine")},
}  # fmt: skip
FOR_PROVIDERS = {"csrc/stage/stage_ops.h", "csrc/stage/describe.h"}  # the vtable, and what every provider's stage begins with
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
FILES = sorted(p.relative_to(ROOT) for top in ("csrc", "cuda", "tests/c") for p in (ROOT / top).rglob("*")
               if p.suffix in {".c", ".h", ".inc", ".cu", ".cuh"})  # fmt: skip


def test_the_map_of_the_facade_has_every_module() -> None:
    told = (ROOT / "CONTRIBUTING.md").read_text().partition("Which module of `terapipe_c`")[2].partition("## ")[0]
    there = {path.stem for folder in ("", "planning") for path in (ROOT / "terapipe_c" / folder).glob("*.py")} - {"__init__"}
    assert set(re.findall(r"`(\w+)`", told)) - {"terapipe_c"} == there


def room_of(path: Path) -> str:
    return "/".join(path.parts[:2]) if path.parts[0] != "cuda" else "cuda"


def includes(path: Path) -> list[tuple[str, bool]]:
    """(name, ours) of every #include line: ours are the quoted ones."""
    return [(ours or theirs, bool(ours)) for ours, theirs in INCLUDE.findall((ROOT / path).read_text())]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_sees_only_what_its_room_may(path: Path) -> None:
    room = room_of(path)
    assert room == "csrc/py" or room in MAY_SEE, f"{room} is no room of ARCHITECTURE.md; give it a row here and there"
    for name, ours in includes(path):
        if ours:
            assert (ROOT / name).is_file(), f"{path} includes {name}: includes are relative to the root"
            seen = room_of(Path(name))
            allowed = seen == room or (room == "csrc/py" and seen != "cuda") or seen in MAY_SEE.get(room, set())
            assert allowed, f"{path} ({room}) may not look into {seen}: {name}"
            if seen == "csrc/stage" and room == "cuda":
                assert name in FOR_PROVIDERS, f"{path} looks behind the stages' vtable: {name}"
        if name == "Python.h" or name.startswith(("numpy/", "cpython/")):
            ours_too = room == "cuda" and path.name.startswith("module")
            assert room == "csrc/py" or ours_too, f"{path} includes {name}: Python is csrc/py's and cuda/module*.c's business"
        if re.match(r"(cuda|cublas|cudnn|curand|nccl|nvrtc)", name):
            assert room == "cuda", f"{path} includes {name}: CUDA is cuda's business"
        if name == "mpi.h":
            assert path == Path("csrc/comm/mpi.c"), f"{path} includes mpi.h: MPI is csrc/comm/mpi.c's business"


@pytest.mark.parametrize("path", [p for p in FILES if p.suffix == ".c" and p.parts[0] == "csrc"], ids=str)
def test_a_file_includes_its_own_header_first(path: Path) -> None:
    """Its own header, or its room's where it has none of its own: so every header is proved to stand alone."""
    named = [name for name, ours in includes(path) if ours]
    own = [str(path.with_suffix(".h")), *(str(p.relative_to(ROOT)) for p in sorted((ROOT / path).parent.glob("*.h")))]
    own = [name for name in own if (ROOT / name).is_file()]
    first = includes(path)[:1]
    if own and set(own) & set(named):
        assert first[0][0] in own, f"{path} includes {first[0][0]} before its own header ({own[0]})"


def test_the_table_has_no_cycle() -> None:
    seen: set[str] = set()
    while left := MAY_SEE.keys() - seen:
        free = {room for room in left if MAY_SEE[room] <= seen}
        assert free, f"these look at each other in a circle: {sorted(left)}"
        seen |= free


def test_no_room_prints_exits_or_aborts() -> None:
    banned = re.compile(r"(?<![\w.>])(printf|puts|exit|_exit|abort|perror)\s*\(")
    for path in FILES:
        if path.parts[0] == "csrc":
            text = re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', "", (ROOT / path).read_text(), flags=re.DOTALL)
            found = banned.search(text)
            assert not found, f"{path} calls {found.group(1)}: errors are statuses"
            assert not re.search(r"fprintf\s*\(\s*std(out|err)", text), f"{path} prints"


def symbols(*arguments: str) -> list[list[str]]:
    run = subprocess.run(["nm", *arguments], capture_output=True, text=True, check=True)
    return [line.split() for line in run.stdout.splitlines() if line.strip()]


def built() -> list[str]:
    """_core, and _cuda and _mpi where they were built: whether they load or not."""
    folder = Path(_core.__file__).parent
    return [_core.__file__, *map(str, (*folder.glob("_cuda.*.so"), *folder.glob("_mpi.*.so")))]


@pytest.mark.parametrize("module", built(), ids=lambda name: Path(name).name)
def test_the_module_exports_its_init_function_alone(module: str) -> None:
    names = [row[-1] for row in symbols("-D", "--defined-only", module)]
    system = {"_init", "_fini", "__bss_start", "_edata", "_end"}  # older linkers list these
    assert [name for name in names if name not in system] == ["PyInit_" + Path(module).name.partition(".")[0]]


@pytest.mark.parametrize("module", built(), ids=lambda name: Path(name).name)
def test_the_module_needs_only_the_c_library(module: str) -> None:
    """_cuda too: the CUDA runtime is linked into it, the driver and all other libraries are found at run time. _mpi needs its MPI
    besides, which is why it is a module of its own."""
    run = subprocess.run(["readelf", "-d", module], capture_output=True, text=True, check=True)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+?)\]", run.stdout))
    mpi = r"|lib(p?mpi\w*|open-(pal|rte))" if Path(module).name.startswith("_mpi.") else ""
    allowed = re.compile(rf"(libc|libm|libpthread|libgomp|ld-linux[\w-]*{mpi})\.so\.\d+$")
    assert all(allowed.match(name) for name in needed), needed


def test_objects_are_compiled_by_one_process_at_a_time() -> None:
    """Those of the C tests' harness: this module and the benchmarks' ask for them, and may run at the same time."""
    folder = ROOT / ".build/c-gcc"
    folder.mkdir(parents=True, exist_ok=True)
    turn = os.open(folder, os.O_RDONLY)
    fcntl.flock(turn, fcntl.LOCK_EX)
    command = [sys.executable, ROOT / "tests/c/run", "--objects"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "CC": "gcc", "TERAPIPE_SANITIZE": ""}) as child:
        try:
            while not re.search(rf"-> FLOCK .* {child.pid} ", Path("/proc/locks").read_text()):     # until it waits
                assert child.poll() is None, "it did not wait"
                time.sleep(0.01)
        finally:
            child.kill()
            os.close(turn)


def test_every_global_symbol_starts_with_tp() -> None:
    """Compiled by the harness of the C tests (a moment where `make test-c` has just done it)."""
    run = subprocess.run([sys.executable, ROOT / "tests/c/run", "--objects"], capture_output=True, text=True,
                         env={k: v for k, v in os.environ.items() if k != "TERAPIPE_SANITIZE"})  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    objects = [line for line in run.stdout.splitlines() if line.endswith(".o")]
    assert len(objects) > 10
    rows = symbols("-A", "-g", "--defined-only", *(str(ROOT / name) for name in objects))  # file:value type name
    assert len({row[0].rpartition(":")[0] for row in rows}) > 10
    for where, _, name in rows:
        assert name.startswith(("tp_", "PyInit_")), f"{where.rpartition(':')[0]} defines {name}"
