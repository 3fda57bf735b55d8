"""Which rank of how many is this process? As torchrun, mpirun or srun tell it in the environment."""
from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from . import _core
from .config import brief, one_of

__all__ = ["LAUNCHERS", "Place", "find_place"]

PORTS = 16  # how many ports after the first one are tried where the launcher, not the user, chose it


@dataclass(frozen=True)
class Place:
    """Where this process stands among all that the launcher started."""

    launcher: str
    rank: int
    ranks: int
    local_rank: int  # among those of this machine: the device it uses
    host: str  # of rank 0
    port: int
    ports: int  # rank 0 listens at the first free one of port .. port + ports - 1
    token: str  # names the job: a process with another token belongs to another job
    local_ranks: int = 1  # at least so many are on this machine


@dataclass(frozen=True)
class _Launcher:
    names: str
    rank: str
    ranks: str
    local_rank: str
    local_ranks: str
    jobs: tuple[str, ...]  # what tells one job from another
    start: str


LAUNCHERS = {
    "torchrun": _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                          ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"), "torchrun --nproc-per-node 2 script.py"),
    "mpirun": _Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                        "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
                        "mpirun -n 2 -x MASTER_ADDR -x MASTER_PORT python script.py"),
    "mpiexec": _Launcher("MPICH's or Intel's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
                         ("PMI_KVSNAME", "HYDRA_JOBID"), "mpiexec -n 2 -genvlist MASTER_ADDR,MASTER_PORT python script.py"),
    "srun": _Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE",
                      ("SLURM_JOB_ID", "SLURM_STEP_ID"), "srun -n 2 python script.py"),
}  # in the order in which they are looked for: mpirun may run within a Slurm job
NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


def find_place(environ: Mapping[str, str], launcher: str | None = None) -> Place:
    """The place that `launcher` (None: the first one found) gave this process. InvalidValueError says what was looked for,
    what is missing and how to give it."""
    launcher = None if launcher is None else one_of("launcher", launcher, LAUNCHERS)
    names = [launcher] if launcher else [name for name, one in LAUNCHERS.items() if one.rank in environ and one.ranks in environ]
    if not names:
        looked = "; ".join(f"{one.rank} and {one.ranks} ({one.names})" for one in LAUNCHERS.values())
        raise _core.InvalidValueError(f"no launcher started this process: looked for {looked}. {LAUNCHERS['torchrun'].start!r} "
                                      "would be right, or tp.launch, which starts its ranks itself")
    name = "srun" if names[:2] == ["mpiexec", "srun"] and _pmi_is_slurms(environ) else names[0]
    one = LAUNCHERS[name]
    rank, ranks = (_whole(environ, variable, one) for variable in (one.rank, one.ranks))
    if not 0 <= rank < ranks:
        raise _core.InvalidValueError(f"{one.rank} is {rank} and {one.ranks} {ranks}: a rank from 0 to one less than all would be "
                                      "right")
    local, local_ranks = _on_this_machine(environ, name, one, ranks)
    host = _host(environ, name, one, ranks)
    port, ports = _port(environ, name, one)
    return Place(name, rank, ranks, local, host, port, ports, _token(environ, one), local_ranks)


def _on_this_machine(environ: Mapping[str, str], name: str, one: _Launcher, ranks: int) -> tuple[int, int]:
    """The local rank, and how many there are at least. Of srun's the latter is what was asked for at most (sbatch's manual), which
    an srun within that job need not keep to."""
    local = _whole(environ, one.local_rank, one) if one.local_rank in environ else 0
    local_ranks = _whole(environ, one.local_ranks, one) if environ.get(one.local_ranks) else None
    if local_ranks is not None and (local_ranks < 1 or name != "srun" and local_ranks > ranks):
        raise _core.InvalidValueError(f"{one.local_ranks} is {local_ranks} and {one.ranks} {ranks}: "
                                      f"{'at least 1' if name == 'srun' else '1 to as many as all'} would be right")
    of, most = (one.local_ranks, local_ranks) if local_ranks is not None and name != "srun" else (one.ranks, ranks)
    known = of == one.local_ranks
    if not 0 <= local < most:
        raise _core.InvalidValueError(f"{one.local_rank} is {local} and {of} {most}: a rank from 0 to one less than all "
                                      f"{'of this machine ' if known else ''}would be right")
    return local, most if known else 1


def _pmi_is_slurms(environ: Mapping[str, str]) -> bool:
    """Whether srun itself set PMI_RANK: with --mpi=pmi2, many clusters' default, it speaks PMI to its tasks (Slurm's
    src/plugins/mpi/pmi2/setup.c sets PMI_JOBID, too). An mpiexec within a Slurm job numbers ranks, srun its proxies."""
    return ("PMI_JOBID" in environ and LAUNCHERS["mpiexec"].local_rank not in environ
            and (environ["PMI_RANK"], environ["PMI_SIZE"]) == (environ["SLURM_PROCID"], environ["SLURM_NTASKS"]))


def _whole(environ: Mapping[str, str], variable: str, one: _Launcher) -> int:
    if variable not in environ:
        raise _core.InvalidValueError(f"{variable} is not set: {one.names} sets it ({one.start})")
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", environ[variable]):
        raise _core.InvalidValueError(f"{variable} is {brief(environ[variable])}: a whole number would be right")
    return int(environ[variable])


def _host(environ: Mapping[str, str], name: str, one: _Launcher, ranks: int) -> str:
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    nodes = next((environ[variable] for variable in NODE_LISTS if environ.get(variable)), "") if name == "srun" else ""
    if nodes:
        return first_host(nodes)
    if environ.get(one.local_ranks) == str(ranks):
        return "127.0.0.1"
    looked = ", ".join(("MASTER_ADDR", *(NODE_LISTS if name == "srun" else ()), f"{one.local_ranks} = {ranks} (all here)"))
    raise _core.InvalidValueError(f"where rank 0 is cannot be told: looked for {looked}. The address of rank 0's machine in "
                                  f"MASTER_ADDR would be right ({one.start})")


def _port(environ: Mapping[str, str], name: str, one: _Launcher) -> tuple[int, int]:
    if environ.get("MASTER_PORT"):
        port = _whole(environ, "MASTER_PORT", one)
        shared = name == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # its own store listens there
        if not 1 <= port <= 65535 - PORTS:
            raise _core.InvalidValueError(f"MASTER_PORT is {port}: 1 to {65535 - PORTS} would be right")
        return (port + 1, PORTS) if shared else (port, 1)
    job = _job(environ, one)
    if not job:
        raise _core.InvalidValueError(f"MASTER_PORT is not set, and nothing tells this job from another ({', '.join(one.jobs)}): a "
                                      f"free port of rank 0's machine in MASTER_PORT would be right ({one.start})")
    return 20000 + int(hashlib.sha256(os.fsencode(job)).hexdigest(), 16) % 1000 * PORTS, PORTS


def _job(environ: Mapping[str, str], one: _Launcher) -> str:
    named = "/".join(environ[variable] for variable in one.jobs if variable in environ)
    alone = one is LAUNCHERS["mpiexec"] and environ.get(one.local_ranks) == environ[one.ranks]
    return named or (_hydras_port() if alone else "")


def _hydras_port() -> str:
    """Where MPICH's mpiexec listens to what it starts ranks by, which tells one job from another; its ranks, since MPICH 5, have no
    variable that does. Asked for where all are on this machine: others may have been started by something between. "": not seen."""
    pid = os.getppid()
    with suppress(OSError, ValueError, IndexError):     # no /proc, or another's process
        while pid > 1:
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            if words[0].rpartition("/")[2] == "hydra_pmi_proxy":
                return words[words.index("--control-port") + 1]
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return ""


def _token(environ: Mapping[str, str], one: _Launcher) -> str:
    secret = f"{environ.get('TERAPIPE_TOKEN', '')}\0{_job(environ, one)}"
    return hashlib.sha256(os.fsencode(secret)).hexdigest()[:40]     # the bytes that were set, text or not


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list such as "login,gpu[07-09,12],big3"."""
    first = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes.strip())
    if first is None:
        raise _core.InvalidValueError(f"the node list is {nodes!r}: hosts such as gpu[07-09,12] would be right")
    return first.group(1) + (first.group(2) or "") + (first.group(3) or "")
