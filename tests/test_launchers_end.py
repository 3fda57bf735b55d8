"""What is left when a launcher, or SIGTERM, ends the ranks that it started: nothing, and the words of the first that failed."""
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import mpi_module
import pytest
from ports import free_port
from test_mpi import HERE, OPTIONS, named
from test_train import CLEAN, plans

from terapipe_c import _core, watch
from terapipe_c.environment import find_place

__all__ = ["plans"]
SOON_MS = 30_000       # against ever; where nothing else runs it is half a second, and a second more for who does not listen


def of_file(pid, name):
    return Path(f"/proc/{pid}/{name}").read_text()


def ranks_of(launcher):
    """{rank: process} of Open MPI's or MPICH's, whose proxy is between."""
    found = {}
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        try:
            above = [pid]
            while above[-1] > 1 and len(above) < 4:
                above.append(int(of_file(above[-1], "stat").rpartition(")")[2].split()[1]))
            words = dict(word.partition("=")[::2] for word in of_file(pid, "environ").split("\0"))
        except OSError:     # it has ended
            continue
        rank = words.get("OMPI_COMM_WORLD_RANK", words.get("PMI_RANK"))
        if launcher in above[1:] and rank is not None:
            found[int(rank)] = pid
    return found


@contextmanager
def hanging(one, plan, data, comm, rank=1):
    """(mpiexec, its ranks): `rank` is in Python and does nothing more, the other waits for it in C."""
    words = [sys.executable, HERE / "train_rank.py", plan, data,
             json.dumps({**OPTIONS, "timeout_s": 300, "comm": comm, "hang": {"rank": rank, "step": 1}})]
    environment = {**mpi_module.CLEAN, **mpi_module.FREELY, "TERAPIPE_MPI_MODULE": str(one.module()), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(free_port())}
    child = subprocess.Popen([one.mpiexec, "-n", "2", *words], env=environment, stdin=subprocess.DEVNULL, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    ranks = {}
    try:
        assert child.stdout.readline() == "hangs\n", child.stderr.read()
        ranks = ranks_of(child.pid)
        assert sorted(ranks) == [0, 1]
        yield child, ranks
    finally:
        child.kill()
        for pid in ranks.values():
            if Path(f"/proc/{pid}").exists() and "train_rank.py" in of_file(pid, "cmdline"):
                os.kill(pid, signal.SIGKILL)
        child.communicate()


def ended(fds):
    """Whether all of these processes end soon."""
    left = set(fds)
    while left and (ready := select.select(left, [], [], SOON_MS / 1000)[0]):
        left -= set(ready)
    return not left


@pytest.mark.parametrize("comm", ["tcp", "mpi"])
def test_the_death_of_mpirun_ends_its_ranks(plans, comm):
    """Also one that looks at nothing. Over TCP nothing but that tells Open MPI's ranks of it."""
    _, files, data = plans
    with hanging(named("openmpi"), files[2], data, comm) as (child, ranks):
        fds = [os.pidfd_open(pid) for pid in ranks.values()]
        maps = "".join(of_file(pid, "maps") for pid in ranks.values())
        memory = {word for word in maps.split() if word.startswith("/dev/shm/")}
        assert comm == "tcp" or memory
        child.kill()
        try:
            assert ended(fds)
            assert not [name for name in memory if Path(name).exists()]
        finally:
            for fd in fds:
                os.close(fd)


@pytest.mark.parametrize(("name", "comm"), [("openmpi", "tcp"), ("openmpi", "mpi"), ("mpich", "tcp"), ("mpich", "mpi")])
def test_a_rank_that_is_terminated_says_so_and_leaves_no_shared_memory(plans, name, comm):
    """MPICH's mpiexec kills the others as soon as one has ended: what a rank says before that is heard."""
    _, files, data = plans
    with hanging(named(name), files[2], data, comm) as (child, ranks):
        memory = {word for word in of_file(ranks[0], "maps").split() if word.startswith("/dev/shm/")}
        os.kill(ranks[1], signal.SIGTERM)
        out, err = child.communicate(timeout=SOON_MS / 1000)
        words = "rank 1 was ended by SIGTERM at step 1, between instructions"
        assert f"terapipe_c: {words}\n" in err and child.returncode != 0, err
        told = [json.loads(line) for line in out.splitlines() if line.startswith('{"')]
        assert all(one["error"] == "AbortedError" and one["text"].endswith(f"because rank 1 failed first: {words}") for one in told)
        assert name == "mpich" or not [path for path in memory if Path(path).exists()]     # which may kill who would remove it


MAPPED = """
import atexit, pathlib, runpy, sys
atexit.register(lambda: print(*{word for word in pathlib.Path("/proc/self/maps").read_text().split() if "mpich_shm" in word}))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_failure_leaves_no_shared_memory(plans):
    """MPI is not finalised then: MPICH would leave 3 MB every time."""
    _, files, data = plans
    words = [HERE / "train_rank.py", files[2], data, json.dumps({**OPTIONS, "fail": {"rank": 1, "step": 1}})]
    ran = named("mpich").run([sys.executable, "-c", MAPPED, *words], 2)
    mapped = {word for word in ran.stdout.split() if word.startswith("/dev/shm/mpich_shm")}
    assert ran.returncode != 0 and "rank 1 failed at step 1" in ran.stderr and mapped, ran
    assert not [name for name in mapped if Path(name).exists()]


# ---- without an MPI --------------------------------------------------------------------------------------------------------

STARTED = {"mpirun": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
                      "PMIX_NAMESPACE": "prterun-1@1"},
           "torchrun": {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
                        "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "1"}}
ASK = "import os; from terapipe_c import watch, environment; print(watch.launcher_of(environment.find_place(os.environ)))"


@pytest.mark.parametrize("launcher", sorted(STARTED))
def test_the_launcher_is_who_has_no_rank_itself(launcher):
    """A shell between does not hide it; and who sets the variables by hand, and no job's, is no launcher."""
    def asked(words, environment):
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    environment = {**CLEAN, **STARTED[launcher]}
    assert asked([sys.executable, "-c", ASK], environment) == str(os.getpid())
    assert asked(["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", ASK], environment) == str(os.getpid())
    by_hand = {name: value for name, value in environment.items() if name not in ("PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID")}
    assert asked([sys.executable, "-c", ASK], {**by_hand, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}) == "0"


def test_a_launcher_that_tells_all_of_anothers_failure_is_not_the_first():
    """Open MPI's mpirun sends SIGTERM to all when one has died: who gets it before it knows why waits for the word."""
    region = _core.Region.create(2, bytes(4), 0, 64, False)
    place = find_place({**STARTED["mpirun"], "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"})
    before = signal.getsignal(signal.SIGTERM)
    assert before is signal.SIG_DFL
    with watch.Watch(region, place):
        region.abort("ECONNECTION", 1, "rank 1 ended without a word")
        signal.raise_signal(signal.SIGTERM)
    assert region.aborted()[1:] == (1, "rank 1 ended without a word") and signal.getsignal(signal.SIGTERM) is before


def test_who_handles_sigterm_is_left_alone():
    heard, region = [], _core.Region.create(1, bytes(1), 0, 64, False)
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with watch.Watch(region, find_place(STARTED["mpirun"])):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM] and region.aborted() is None


@pytest.mark.parametrize("watches", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_fork_of_a_rank_is_not_the_ranks(number, watches):
    """A tokenizer's pool of workers, which ends them by SIGTERM, ended the training; of two watches the outer
    one heard it still."""
    region = _core.Region.create(1, bytes(1), 0, 64, False)
    handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    with ExitStack() as stack, warnings.catch_warnings():
        for _ in range(watches):
            stack.enter_context(watch.Watch(region, find_place(STARTED["mpirun"])))
        warnings.simplefilter("ignore")     # of threads, beside which Python 3.12 would rather not be forked
        fork = multiprocessing.get_context("fork")
        began = fork.Event()
        child = fork.Process(target=lambda: (began.set(), time.sleep(60)))
        child.start()
        assert began.wait(30)       # with handlers of its own by now
        os.kill(child.pid, number)
        child.join(30)
        time.sleep(4 * watch.TICK_S)
    assert region.aborted() is None and handlers == {one: signal.getsignal(one) for one in handlers}
    assert child.exitcode == (1 if number == signal.SIGINT else -number)


@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGTERM)], ids=["sigterm", "ctrl-c, sigterm"])
def test_a_command_that_is_terminated_leaves_no_rank_and_no_half_checkpoint(plans, tmp_path, signals):
    """It went at once: its ranks, here stopped, which hear nothing, had to notice, and what a dead writer had begun stayed."""
    _, files, data = plans
    words = ["train", "--plan", files[2], "--data", data, "--steps", 1000000, "--out", tmp_path / "run", "--checkpoint-every", 0]
    child = subprocess.Popen([sys.executable, "-P", "-m", "terapipe_c", *map(str, words), "--quiet"], env=CLEAN, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert child.stdout.readline().startswith("1 of 1000000 steps done"), child.stderr.read()
        ranks = [int(pid) for pid in of_file(child.pid, f"task/{child.pid}/children").split()]
        assert len(ranks) == 2
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        half = tmp_path / "run" / "checkpoints" / f".step-00000001.tmp-{ranks[0]}"
        half.mkdir(parents=True)
        for number in signals:
            child.send_signal(number)
        assert child.wait(SOON_MS / 1000) == -signal.SIGTERM
        assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()] and not half.exists()
    finally:
        child.kill()
        child.communicate()


def test_a_sweep_that_is_terminated_leaves_no_rank_and_does_its_trial_again(plans, tmp_path):
    """As above, and the trial under way has no row, which would have said that it failed."""
    _, files, data = plans
    words = ["sweep", "--train", "--grid", "n_embd=16", "--n-head", 2, "--block-size", 16, "--data", data, "--steps", 1000000,
             "--out", tmp_path / "rows", "--batch", 2, "--stages", 2, "--slicing", "[[2,[16]]]", "--planner", "uniform",
             "--devices", 2, "--checkpoint-every", 0]
    child = subprocess.Popen([sys.executable, "-P", "-m", "terapipe_c", *map(str, words)], env=CLEAN, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        until = time.monotonic() + SOON_MS / 1000
        while not any(path.stat().st_size for path in tmp_path.glob("rows.runs/*/metrics.jsonl")):
            assert child.poll() is None and time.monotonic() < until, child.communicate()
            time.sleep(0.05)
        ranks = [int(pid) for pid in of_file(child.pid, f"task/{child.pid}/children").split()]
        assert len(ranks) == 2
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        child.terminate()
        assert child.wait(SOON_MS / 1000) == -signal.SIGTERM
        assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()] and not (tmp_path / "rows").read_text()
    finally:
        child.kill()
        child.communicate()


def test_a_rank_of_a_launcher_that_is_terminated_as_it_tells_its_records_just_ends(plans, tmp_path):
    """Its training is over: what SIGTERM was to end was no run of this process, and the command ended by AttributeError."""
    _, files, data = plans
    words = ["train", "--under", "torchrun", "--plan", files[1], "--data", data, "--steps", 2000, "--out", tmp_path / "run",
             "--checkpoint-every", 0, "--quiet"]
    child = subprocess.Popen([sys.executable, "-P", "-m", "terapipe_c", *map(str, words)], env={**CLEAN, **STARTED["torchrun"]},
                             text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert child.stdout.readline().startswith("1 of 2000 steps done"), child.stderr.read()
        child.terminate()       # the pipe is full, and nobody reads it
        assert child.wait(SOON_MS / 1000) == -signal.SIGTERM, child.stderr.read()
    finally:
        child.kill()
        child.communicate()


def test_a_command_that_is_terminated_as_it_starts_its_ranks_leaves_none(plans, tmp_path):
    """It was not listening yet: one rank, here stopped, was there, and the other about to be."""
    _, files, data = plans
    words = ["train", "--plan", files[2], "--data", data, "--steps", 1000000, "--out", tmp_path / "run", "--checkpoint-every", 0]
    child = subprocess.Popen([sys.executable, "-P", "-m", "terapipe_c", *map(str, words)], env=CLEAN, stderr=subprocess.DEVNULL)
    ranks = []
    try:
        until = time.monotonic() + SOON_MS / 1000
        while not ranks or "_rank" not in of_file(ranks[0], "cmdline"):     # until then the command waits for it to begin (vfork)
            assert child.poll() is None and time.monotonic() < until
            ranks = [int(pid) for pid in of_file(child.pid, f"task/{child.pid}/children").split()]
        child.terminate()
        os.kill(ranks[0], signal.SIGSTOP)
        assert child.wait(SOON_MS / 1000) == -signal.SIGTERM
        assert not Path(f"/proc/{ranks[0]}").exists()
    finally:
        child.kill()
        child.wait()
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
