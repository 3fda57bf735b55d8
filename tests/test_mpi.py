"""Messages over MPI: the cases of the C tests, and trainings, under the mpiexec of MPICH and of Open MPI, and what goes wrong."""
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import mpi_module
import numpy as np
import pytest
from ports import free_port
from test_train import OPTIONS, begin, launched, mpich, plans, run

import terapipe_c as tp

__all__ = ["launched", "plans"]
HERE = Path(__file__).resolve().parent
MPIS = {one.name: one for one in mpi_module.mpis()}
OPTIONS = {**OPTIONS, "comm": "mpi", "timeout_s": 30}


def named(name):
    if name not in MPIS:
        pytest.skip(mpi_module.NONE)
    return MPIS[name]


def trained(mpi, plan, data, ranks, **options):
    """(what each rank told, the ended mpiexec)."""
    words = [sys.executable, HERE / "train_rank.py", plan, data, json.dumps({**OPTIONS, **options})]
    ended = mpi.run(words, ranks)
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"')], ended


@pytest.mark.parametrize(("name", "ranks"), [("mpich", 2), ("mpich", 3), ("mpich", 4), ("mpich", 5), ("openmpi", 2),
                                             ("openmpi", 3)])
def test_every_case_of_the_communicators(name, ranks):
    """tests/c/test_comm.c: order, sizes around every border, far more receives than there is room for, wrong messages, deadlines,
    aborts."""
    one = named(name)
    ended = one.run([one.conformance(), "mpi", str(free_port(20))], ranks)
    cases = {2: 11, 3: 4, 4: 3, 5: 1}[ranks]
    held = [line for line in ended.stdout.splitlines() if line.endswith(" holds")]
    assert "tests/c/" not in ended.stderr, ended
    # a message that is never taken keeps MPI from being finalised, and mpiexec may end ranks over that before their last line
    assert len(held) == cases * ranks or (ranks in (3, 4) and len(held) > (cases - 1) * ranks), ended
    assert ended.returncode == 0 or ranks in (3, 4), ended


@pytest.mark.parametrize("name", ["mpich", "openmpi"])
def test_a_message_that_failed_stays_failed(name):
    ended = named(name).run([named(name).wire()], 2)
    assert ended.returncode == 0 and not ended.stderr, ended


def test_more_bytes_than_an_int_can_count():
    ended = named("mpich").run([sys.executable, HERE / "comm_rank.py", "large", "mpi"], 2)
    assert sorted(ended.stdout.splitlines()) == ["0 ok", "1 ok"] and ended.returncode == 0, ended


@pytest.mark.parametrize(("name", "ranks"), [("mpich", 3), ("openmpi", 2)])
def test_bits_are_those_of_launch(plans, launched, tmp_path, name, ranks):
    _, files, data = plans
    results, ended = trained(named(name), files[ranks], data, ranks, out=str(tmp_path / "run"))
    wanted = launched[ranks]
    assert ended.returncode == 0 and sorted(one["rank"] for one in results) == list(range(ranks)), ended
    for one in results:
        assert one["losses"] == [record.loss for record in wanted] and one["norms"] == [record.grad_norm for record in wanted]
        assert one["evals"] == [record.eval_loss for record in wanted]
        assert one["memory"] == list(wanted.report().peak_memory_bytes)
    ours, theirs = tp.load_checkpoint(tmp_path / "run"), tp.load_checkpoint(wanted.out)
    assert all(np.array_equal(ours.params[name], value) for name, value in theirs.params.items())
    assert json.loads((tmp_path / "run/config.json").read_text())["comm"] == "mpi"


def test_replicas_add_their_gradients(plans, tmp_path):
    """Every message is an exchange then; TERAPIPE_COMM chooses as comm= does. Here they shard the optimizer, there they do not."""
    _, _, data = plans
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=256, block_size=16)
    plan, whole = (tp.plan(model, tp.Cluster(num_devices=2, peak_flops=1e12), batch=2, seq_len=16, planner="uniform", stages=1,
                           data_parallel=2, slicing=[(1, [16])], shard_optimizer=shards) for shards in (True, False))
    plan.save(tmp_path / "plan.json")
    options = {"steps": 3, "lr": 1e-3, "reproducible": False}
    wanted = [record.loss for record in tp.launch(whole, data, progress=False, processes=False, **options)]
    words = [sys.executable, HERE / "train_rank.py", tmp_path / "plan.json", data, json.dumps(options)]
    ended = named("mpich").run(words, 2, {"TERAPIPE_COMM": "mpi"})
    assert [json.loads(line)["losses"] for line in ended.stdout.splitlines()] == [wanted] * 2, ended


def test_the_death_of_a_rank_ends_all_with_its_name(plans):
    _, files, data = plans
    results, ended = trained(named("openmpi"), files[3], data, 3, die={"rank": 1, "step": 2})
    assert ended.returncode != 0 and "terapipe_c: rank 1 ended without a word" in ended.stderr, ended
    assert results and all(one["error"] == "AbortedError" and "because rank 1 failed first: rank 1 " in one["text"]
                           for one in results), ended


def test_the_death_of_a_rank_where_mpiexec_kills_at_once(plans):
    """MPICH's gives nobody a moment, so that what the others say may be lost; but nothing else is said, and nobody waits."""
    _, files, data = plans
    results, ended = trained(named("mpich"), files[3], data, 3, die={"rank": 1, "step": 2})
    said = [line for line in ended.stderr.splitlines() if line.startswith("terapipe_c: ")]
    assert ended.returncode != 0 and all("rank 1 ended without a word" in line for line in said), ended
    assert all(one["error"] == "AbortedError" and "because rank 1 failed first: rank 1 " in one["text"] for one in results), ended


def test_the_failure_of_a_rank_reaches_all_in_its_own_words(plans):
    _, files, data = plans
    results, ended = trained(named("openmpi"), files[3], data, 3, fail={"rank": 1, "step": 1})
    words = "rank 1 failed at step 1, between instructions: ValueError: no café here"
    assert ended.returncode != 0 and f"terapipe_c: {words}" in ended.stderr and "ValueError: no café here" in ended.stderr
    assert results and all(one["error"] == "AbortedError" and words in one["text"] for one in results), ended


def test_an_mpi_that_is_not_the_launchers(plans):
    """Ranks whose MPI knows nothing of each other; and where MPI_Init would end the process, before it."""
    _, files, data = plans
    one = named("mpich").run([sys.executable, HERE / "train_rank.py", files[2], data, json.dumps(OPTIONS)], 2,
                             {"TERAPIPE_MPI_MODULE": str(named("openmpi").module())})
    told = [json.loads(line) for line in one.stdout.splitlines() if line.startswith('{"')]
    assert told and all(each["error"] in ("InvalidValueError", "AbortedError") for each in told), one
    assert any("says that this is rank 0 of 1, MPICH's or Intel's mpiexec that it is rank" in each["text"] and
               "mpirun of Open MPI (or an srun that speaks its PMI) would be right" in each["text"] for each in told), one


ALONE = """
import ctypes, os, sys
from terapipe_c import _core, mpi
libmpi = ctypes.CDLL(sys.argv[1])
region = _core.Region.create(1, bytes(1), 0, 64, False)
control = _core.tcp_comm(region, 0, "127.0.0.1", int(sys.argv[2]), bytes(1), 4096)
for launcher in ("mpirun", "torchrun"):
    try:
        mpi.connect(control, launcher)
    except ValueError as error:
        print(error)
level = ctypes.c_int()
libmpi.MPI_Init_thread(None, None, int(sys.argv[3]), ctypes.byref(level))
try:
    comm = mpi.connect(control, "mpiexec")
    comm.barrier()
    comm.close()
    del comm
    count = sys.getrefcount(control)
    comm = mpi.connect(control, "mpiexec")     # again, in the same process
    kept = sys.getrefcount(control) - count    # whatever becomes of a script's names, what it stands on goes after it
    comm.close()
    del comm
    print("kept", kept, sys.getrefcount(control) - count)
    comm = mpi.connect(control, "mpiexec")
    control.close()
    try:
        comm.barrier()      # the end of the process: what it stands on was freed
    except ValueError as error:
        print("refused:", error)
    comm.close()            # it would gather there whether all close
except ValueError as error:
    print(error)
_core.mpi_finish(mpi.load().transport)
was = ctypes.c_int()
libmpi.MPI_Finalized(ctypes.byref(was))
print("finalised", bool(was.value))
libmpi.MPI_Finalize()
"""


@pytest.mark.parametrize(("level", "words"), [("2", "kept 1 0\nrefused: the communicator that this one stands on is closed: to "
                                                "close this one first would be right\nfinalised False"),
                                              ("0", "level 0 of threads by somebody else: MPI_THREAD_SERIALIZED (2)")])
def test_mpi_that_somebody_else_has_initialised(level, words):
    """Where mpi4py, for example, has initialised MPI it is neither initialised again nor finalised."""
    one = named("mpich")
    maps = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(*{l.split()[-1] for l in open('/proc/self/maps') if 'libmpi' in l})"
    libmpi = subprocess.run([sys.executable, "-c", maps, one.module()], capture_output=True, text=True).stdout.strip()
    ended = one.run([sys.executable, "-c", ALONE, libmpi, str(free_port()), level], 1)
    assert words in ended.stdout, ended
    assert "Open MPI's mpirun started this rank, and it starts none of MPICH" in ended.stdout
    assert "torchrun started this rank" in ended.stdout and "mpiexec of MPICH" in ended.stdout


def test_what_is_missing_is_said(plans, monkeypatch, tmp_path):
    from terapipe_c import mpi as face

    _, files, data = plans
    plan = tp.Plan.load(files[1])
    monkeypatch.setenv("TERAPIPE_MPI_MODULE", str(tmp_path / "none.so"))
    with pytest.raises(tp.ExecutionError, match="none.so', which is no file"):
        tp.train(plan, data, 1, comm="mpi")
    (tmp_path / "none.so").write_text("no module")
    with pytest.raises(tp.ExecutionError, match="does not load: .* the MPI that it was built with"):
        face.load()
    monkeypatch.delenv("TERAPIPE_MPI_MODULE")
    face._module_at.cache_clear()
    monkeypatch.setattr(face.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(tp.ExecutionError, match="built without MPI: mpicc was missing .* TERAPIPE_MPI=1 pip install"):
        tp.train(plan, data, 1, comm="mpi")
    assert "mpicc was missing" in (tp.mpi.why_not() or "")
    face._module_at.cache_clear()
    with pytest.raises(ValueError, match="comm is 'pigeon': .*'tcp'.*'mpi'|comm is 'pigeon': tcp"):
        tp.train(plan, data, 1, comm="pigeon")
    monkeypatch.setenv("TERAPIPE_COMM", "pigeon")
    with pytest.raises(ValueError, match="TERAPIPE_COMM is 'pigeon'"):
        tp.train(plan, data, 1)
    with pytest.raises(ValueError, match="comm is 'mpi' and backend 'cuda'"):
        tp.train(plan, data, 1, comm="mpi", backend="cuda")


def test_an_mpicc_that_is_of_no_use_costs_mpi_alone(tmp_path, monkeypatch):
    """Without a usable mpicc only MPI is missing: the build and these tests go on."""
    monkeypatch.chdir(mpi_module.ROOT)
    monkeypatch.setenv("MPICC", str(tmp_path / "mpicc"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("TERAPIPE_MPIS", str(tmp_path))
    monkeypatch.delenv("TERAPIPE_MPI", raising=False)
    for script, words in ((None, "which is no program"), ("#!/no/such/interpreter", "does not run: No such file"),
                          ("#!/bin/sh\necho no >&2; exit 3", "-show failed: no")):
        if script:
            (tmp_path / "mpicc").write_text(script + "\n")
            (tmp_path / "mpicc").chmod(0o755)
        setup = runpy.run_path("setup.py", run_name="setup_py")
        assert words in setup["find_mpi"]() and setup["wanted"]("MPI", setup["find_mpi"]) == (None, False)
        assert mpi_module.mpis.__wrapped__() == ()


def test_ranks_that_want_different_transports(plans):
    """Before MPI is touched."""
    _, files, data = plans
    one = named("mpich")
    own = [{"comm": "mpi"}, {"comm": "tcp"}]

    def words(rank, ranks, port):
        return {**mpich(rank, ranks, port), "TERAPIPE_MPI_MODULE": one.module(), "TERAPIPE_COMM": own[rank]["comm"]}

    ends = run(files[2], data, words, 2)
    assert all("comm of rank 1 is not that of rank 0" in end["text"] for end in ends), ends


def test_doctor_and_library():
    one = named("mpich")
    ended = one.run([sys.executable, "-m", "terapipe_c", "doctor"], 1)
    assert "MPICH Version: " in ended.stdout and "train(..., comm='mpi')" in ended.stdout, ended


@pytest.mark.parametrize("hangs", [1, 0])
def test_ctrl_c_ends_a_wait_for_who_does_not_answer(plans, hangs):
    """Over TCP as over MPI: the wait is in C, and nobody else would end it. A rank that is in Python says the same."""
    _, files, data = plans
    port = free_port()
    hang = {"rank": hangs, "step": 1}
    children = [begin(files[2], data, rank, mpich(rank, 2, port), hang=hang, timeout_s=50) for rank in range(2)]
    try:
        assert children[hangs].stdout.readline() == "hangs\n"
        children[0].send_signal(signal.SIGINT)
        _, err = children[0].communicate(timeout=20)
        assert "KeyboardInterrupt" in err and "terapipe_c: rank 0 was interrupted" in err and children[0].returncode != 0
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_two_jobs_at_one_port_do_not_take_each_others_ranks(tmp_path):
    """MPICH 5 gives its ranks no variable that tells one job from another."""
    code = """if True:
        import os, sys, time
        from pathlib import Path
        from terapipe_c import _core
        from terapipe_c.environment import find_place
        place, (job, late, word) = find_place(os.environ), sys.argv[1:]
        while place.rank == int(late) and not Path(word).exists():
            time.sleep(0.05)
        region = _core.Region.create(2, bytes(4), 0, 64, False)
        comm = _core.tcp_comm(region, place.rank, place.host, place.port, bytes(4), 64, ports=place.ports, token=place.token)
        sys.stdout.write(f"{place.rank} {comm.allgather(job.encode())}\\n")     # in one piece, among others' lines
        comm.close()
    """
    mpi, words = named("mpich"), [tmp_path / "first", tmp_path / "second"]
    environment = {**mpi_module.CLEAN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    jobs = [subprocess.Popen([mpi.mpiexec, "-n", "2", sys.executable, "-P", "-c", code, str(job), str(1 - job), words[job]],
                             env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) for job in range(2)]
    time.sleep(2.0)         # rank 1 of the second job calls, rank 0 of the first is there
    for word, job in zip(words, jobs, strict=True):
        word.touch()
        job.wait(60)
    assert [sorted(job.communicate()[0].splitlines()) for job in jobs] == [[f"{rank} b'{job}{job}'" for rank in (0, 1)]
                                                                           for job in "01"]


# What a rank of two begins with: `comm` over MPI.
CONNECTED = """if True:
        import os, sys
        from terapipe_c import _core, mpi
        from terapipe_c.environment import find_place
        place = find_place(os.environ)
        region = _core.Region.create(2, bytes(4), 0, 64, False)
        control = _core.tcp_comm(region, place.rank, place.host, place.port, bytes(4), 4096, ports=place.ports, timeout_s=30.0)
        comm = mpi.connect(control, place.launcher)
"""


@pytest.mark.parametrize("name", ["mpich", "openmpi"])
def test_a_fork_sends_nothing_in_the_name_of_the_rank_and_ends(name):
    """Over MPICH its message came, in the place of the rank's next; over Open MPI it waited for ever, and at its end over both: to
    finalise the rank's MPI."""
    code = CONNECTED + """if True:
        if place.rank == 0:
            comm.send(1, 1, b"first")       # in the outbox, it may be
            if not os.fork():
                try:
                    comm.send(1, 2, b"forks")
                except _core.InvalidValueError as error:
                    assert "this is a fork of it" in str(error)
                    comm.close()
                    sys.exit(0)
                os._exit(1)
            assert os.wait()[1] == 0
            comm.send(1, 2, b"ranks")
        else:
            comm.recv(0, 1, bytearray(5))
            comm.recv(0, 2, into := bytearray(5))
            assert into == b"ranks"
        comm.barrier()
        comm.close()
        control.close()
        sys.stdout.write("well ")
    """
    done = named(name).run([sys.executable, "-P", "-W", "ignore::DeprecationWarning", "-c", code], 2)
    assert (done.returncode, done.stdout) == (0, "well well "), done.stderr


@pytest.mark.parametrize("name", ["mpich", "openmpi"])
def test_a_message_that_comes_too_late_is_the_next_receives(name):
    """It was written into the memory of the receive that had given up, and the next one returned with nothing."""
    code = """if True:
        import os, sys
        from terapipe_c import _core, mpi
        from terapipe_c.environment import find_place
        place = find_place(os.environ)
        region = _core.Region.create(2, bytes(4), 0, 64, False)
        control = _core.tcp_comm(region, place.rank, place.host, place.port, bytes(4), 4096, ports=place.ports,
                                 timeout_s=(0.2, 20.0)[place.rank])
        comm = mpi.connect(control, place.launcher)
        for turn, size in enumerate((8, 100_000, 3_000_000)):
            if place.rank == 0:
                given_up, into = bytearray(size), bytearray(size)
                for give_up in (lambda: comm.recv(1, turn, given_up), lambda: comm.exchange(1, 9, b"", given_up)):
                    try:
                        give_up()
                        assert False
                    except _core.DeadlineError:
                        pass
                comm.send(1, turn, b"now")
                comm.recv(1, turn, into)
                assert (given_up, into) == (bytes(size), b"x" * size), (turn, into[:8], given_up[:8])
            else:
                comm.recv(0, 9, bytearray(0))
                comm.recv(0, turn, bytearray(3))
                comm.send(0, turn, b"x" * size)
            comm.barrier()
        comm.close()
        control.close()
        sys.stdout.write("well ")
    """
    done = named(name).run([sys.executable, "-P", "-c", code], 2)
    assert (done.returncode, done.stdout) == (0, "well well "), done.stderr


def test_who_is_killed_leaves_no_shared_memory():
    """MPICH's stayed in /dev/shm, megabytes of the machine's memory for every run in which a rank died."""
    code = CONNECTED + """if True:
        import re, signal
        from pathlib import Path
        if place.rank == 0:
            names = set(re.findall("/dev/shm/mpich_shm[^ \\n]*", Path("/proc/self/maps").read_text()))
            sys.stdout.write(" ".join(names))
            sys.stdout.flush()
        comm.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = named("mpich").run([sys.executable, "-P", "-c", code], 2)
    names = [word for word in done.stdout.split() if word.startswith("/dev/shm/mpich_shm")]
    assert names and not any(os.path.exists(name) for name in names), done
