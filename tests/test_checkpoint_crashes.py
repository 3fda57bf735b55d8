"""Crashes while a checkpoint is written: what is on the disk when, what is found afterwards, what the next writer cleans up."""

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_checkpoint import MODEL, float_params, moments, same, save, step_names

from terapipe_c import _steps, checkpoint
from terapipe_c.checkpoint import CheckpointWriter, load_checkpoint, write_tensors

HERE = Path(__file__).parent


def tensors(seed=0):
    """All of a checkpoint, as ranks write it."""
    return float_params(MODEL, seed) | {f"{kind}.{name}": a for kind, one in moments(MODEL).items() for name, a in one.items()}


def test_what_gets_its_name_is_on_the_disk_before(tmp_path, monkeypatch):
    """fsync, rename, fsync: a crash at any point leaves a whole checkpoint under every name that is there."""
    save(tmp_path, 10)
    told = []

    def syncing(call):
        def synced(fd):
            told.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
            return call(fd)
        return synced

    def renaming(call):
        def renamed(source, target, **options):
            told.append(f"{Path(target).name} is named")
            return call(source, target, **options)
        return renamed

    for names, noting in ((("fsync", "fdatasync"), syncing), (("rename", "replace"), renaming)):
        for name in names:
            monkeypatch.setattr(os, name, noting(getattr(os, name)))
    writer = CheckpointWriter(tmp_path, MODEL)
    folder = writer.begin(20)
    sums = write_tensors(folder, writer.layout, tensors(), sync=False)  # ranks sync what they write: finish relies on nobody
    assert told == []
    writer.finish(sums)
    step, latest = told.index("step-00000020 is named"), told.index("latest is named")
    assert set(told[:step]) == {"model.safetensors", "optimizer.safetensors", "state.json", folder.name}
    assert told[step - 1] == folder.name
    assert tmp_path.name in told[step:latest] and tmp_path.name in told[latest:]


def test_what_a_living_process_writes_stays(tmp_path):
    living = tmp_path / f".step-00000020.tmp-{os.getppid()}"
    living.mkdir()
    save(tmp_path, 10)
    assert step_names(tmp_path) == [living.name, "latest", "step-00000010"]


def test_what_a_dead_process_of_our_number_left_goes(tmp_path):
    """In a container each run's ranks have the same numbers: what was killed in there stayed for good, as large as the model."""
    writer = CheckpointWriter(tmp_path / "run", MODEL)
    ours = writer.begin(30)
    for name in (f".step-00000020.tmp-{os.getpid()}", f".step-00000030.tmp-{os.getpid()}"):
        (tmp_path / "run" / name).mkdir(exist_ok=True)
    (tmp_path / "same").symlink_to("run")
    save(tmp_path / "same", 10)
    assert step_names(tmp_path / "run") == [ours.name, "latest", "step-00000010"]
    writer.finish(write_tensors(ours, writer.layout, tensors()))
    ours.mkdir()
    save(tmp_path / "run", 40)
    assert step_names(tmp_path / "run") == ["latest", "step-00000030", "step-00000040"]
    writer.begin(50)
    writer.abort()
    (tmp_path / "run" / f".step-00000050.tmp-{os.getpid()}").mkdir()
    save(tmp_path / "run", 60)
    assert step_names(tmp_path / "run") == ["latest", "step-00000040", "step-00000060"]


# ---- file systems that cannot swap two folders ---------------------------------------------------------------------------

KILLED = """
    import ctypes, os, shutil, signal, sys
    sys.path.insert(0, sys.argv[1])
    import test_checkpoint_crashes as t

    def killed(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def renamed(source, target):
        rename(source, target)
        if sys.argv[3] == "between" and ".old-" in str(target):
            killed()

    rename = os.rename
    writer = t.CheckpointWriter(sys.argv[2], t.MODEL)
    sums = t.write_tensors(writer.begin(10), writer.layout, t.tensors(seed=1))
    ctypes.CDLL = lambda *_, **__: object()     # a libc without renameat2
    os.rename, shutil.rmtree = renamed, killed
    writer.finish(sums)
"""


@pytest.mark.parametrize(("at", "seed"), [("between", 0), ("behind", 1)])
def test_a_writer_killed_where_it_replaces_a_step_leaves_one(tmp_path, at, seed):
    """Between the writer's two renames the old checkpoint exists only under its name aside; after them it is left there."""
    save(tmp_path, 5)
    save(tmp_path, 10)
    argv = [sys.executable, "-c", textwrap.dedent(KILLED), str(HERE), str(tmp_path), at]
    assert subprocess.run(argv, check=False).returncode == -signal.SIGKILL
    assert any(".old-" in name for name in step_names(tmp_path)) and (tmp_path / "step-00000010").exists() == bool(seed)
    for path in (tmp_path, tmp_path / "step-00000010", tmp_path / "latest"):
        found = load_checkpoint(path)
        assert found.step == 10 and same(found.params, float_params(MODEL, seed))
    save(tmp_path, 20)
    assert step_names(tmp_path) == ["latest", "step-00000010", "step-00000020"]
    assert same(load_checkpoint(tmp_path / "step-00000010").params, float_params(MODEL, seed))


@pytest.mark.parametrize("ahead", ["", "checkpoints"])
def test_a_clock_that_is_set_back_makes_no_new_checkpoint_an_old_one(tmp_path, ahead):
    """The first stayed for ever, and each second newest went in its place; without the link a run began there again."""
    save(tmp_path / ahead, 5)
    future = time.time() + 3600
    os.utime(tmp_path / ahead / "step-00000005" / "state.json", (future, future))
    save(tmp_path, 10)
    assert load_checkpoint(tmp_path).step == 10
    save(tmp_path, 20)
    (tmp_path / "latest").unlink()
    assert load_checkpoint(tmp_path).step == 20
    save(tmp_path, 15)
    assert step_names(tmp_path)[-3:] == ["latest", "step-00000015", "step-00000020"]
    assert load_checkpoint(tmp_path).step == 15


def test_one_that_goes_meanwhile_leaves_the_others_their_dates(tmp_path, monkeypatch):
    """Another process of the same folder makes room while ours is dated: all others were forgotten for it."""
    save(tmp_path, 5)
    future = time.time() + 3600
    os.utime(tmp_path / "step-00000005" / "state.json", (future, future))
    shutil.copytree(tmp_path / "step-00000005", tmp_path / "step-00000006")
    dates = _steps.written_ns

    def going(folder):
        if folder.name == "step-00000006":
            shutil.rmtree(folder, ignore_errors=True)
        return dates(folder)

    monkeypatch.setattr(_steps, "written_ns", going)
    save(tmp_path, 10)
    assert dates(tmp_path / "step-00000010") > dates(tmp_path / "step-00000005")


def test_a_step_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    def refusing(source, target):
        if ".tmp-" in str(source):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    save(tmp_path, 10)
    rename = os.rename
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    monkeypatch.setattr(os, "rename", refusing)
    with pytest.raises(OSError, match="Input/output error"):
        save(tmp_path, 10, seed=1)
    assert step_names(tmp_path) == ["latest", "step-00000010"] and same(load_checkpoint(tmp_path).params, float_params(MODEL))


def test_what_is_aside_is_put_back_unless_its_process_lives(tmp_path, monkeypatch):
    """A dead process whose pid the next writer has, as in a container that was started again, does not count as alive."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    for pid, stays in ((os.getppid(), True), (os.getpid(), False)):
        run = tmp_path / str(pid)
        aside = run / f".step-00000010.old-{pid}"
        save(run, 10).rename(aside)
        assert load_checkpoint(run).step == 10
        save(run, 20)
        kept = aside.name if stays else "step-00000010"
        assert step_names(run) == sorted([kept, "latest", "step-00000020"])
        save(run, 20, seed=1)
        assert step_names(run) == sorted([kept, "latest", "step-00000020"])
        assert same(load_checkpoint(run).params, float_params(MODEL, 1))


def test_steps_of_a_containers_image_are_replaced_and_removed(tmp_path, monkeypatch):
    """overlayfs renames none of the image's folders: a step was not written again, and old ones stayed."""
    def renamed(source, target):
        if Path(source).name.startswith("step-") and Path(source).is_dir():
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, target)

    save(tmp_path, 10)
    (tmp_path / "step-00000010" / "notes").touch()
    rename = os.rename
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    monkeypatch.setattr(os, "rename", renamed)
    save(tmp_path, 10, seed=1)
    assert step_names(tmp_path) == ["latest", "step-00000010"] and same(load_checkpoint(tmp_path).params, float_params(MODEL, 1))
    assert sorted(os.listdir(tmp_path / "latest")) == ["model.safetensors", "optimizer.safetensors", "state.json"]
    for step in (20, 30):
        save(tmp_path, step)
    assert step_names(tmp_path) == ["latest", "step-00000020", "step-00000030"]


# ---- several at once -----------------------------------------------------------------------------------------------------

def test_writers_of_one_step_have_folders_of_their_own(tmp_path):
    """The second removed what the first was writing, and both failed, or a checkpoint was of both."""
    first, second = CheckpointWriter(tmp_path, MODEL), CheckpointWriter(tmp_path, MODEL)
    folders = [writer.begin(10) for writer in (first, second)]
    assert folders[0] != folders[1] and step_names(tmp_path) == sorted(folder.name for folder in folders)
    for writer, folder, seed in ((second, folders[1], 1), (first, folders[0], 2)):
        writer.finish(write_tensors(folder, writer.layout, tensors(seed)))
        assert same(load_checkpoint(tmp_path).params, float_params(MODEL, seed))
    assert step_names(tmp_path) == ["latest", "step-00000010"]
    third = CheckpointWriter(tmp_path, MODEL)
    assert third.begin(10).name == folders[0].name
    third.abort()
    folders[1].mkdir()      # of a process that was killed, and had our number
    save(tmp_path, 20)
    assert step_names(tmp_path) == ["latest", "step-00000010", "step-00000020"]


@pytest.mark.parametrize("steps", [(10, 20, 30, 40), (10, 10, 10, 10)])
def test_threads_that_save_in_one_folder_wait_for_each_other(tmp_path, steps):
    """Of those that keep one each removed the other's in half of all such folders, and `latest` was named by two at once."""
    with ThreadPoolExecutor(len(steps)) as pool:
        for run in (tmp_path / str(k) for k in range(5)):
            together = threading.Barrier(len(steps))

            def one(step, run=run, together=together):
                together.wait()
                return save(run, step, seed=step, keep=1)

            saved = {path.name for path in pool.map(one, steps)}
            last = load_checkpoint(run)
            assert len(saved) == len(set(steps)) and step_names(run) == ["latest", last.path.name]
            assert same(last.params, float_params(MODEL, last.step))


FORKED = """
    import os, signal, sys, threading
    sys.path.insert(0, sys.argv[1])
    import test_checkpoint_crashes as t
    from terapipe_c import _steps

    def hold():
        with _steps.one_at_a_time:
            held.set()
            ended.wait()

    held, ended = threading.Event(), threading.Event()
    threading.Thread(target=hold).start()
    held.wait()
    if not (child := os.fork()):
        signal.alarm(20)
        os._exit(t.save(sys.argv[2], 10).name != "step-00000010")
    found = os.waitpid(child, 0)[1]
    ended.set()
    sys.exit(found != 0)
"""


def test_a_forked_child_does_not_wait_for_its_parents_threads(tmp_path):
    argv = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(FORKED), str(HERE), str(tmp_path)]
    assert subprocess.run(argv, check=False).returncode == 0
    assert load_checkpoint(tmp_path).step == 10


def test_of_processes_that_remove_each_others_steps_one_loses_its_own(tmp_path, monkeypatch):
    """Each had what the other had put in place for an old one, and no checkpoint was left of two."""
    def meanwhile(run, name):
        point_latest(run, name)
        shutil.copytree(tmp_path / "other" / "step-00000020", run / "step-00000020")
        shutil.rmtree(run / name)       # as that process, which keeps one, does

    save(tmp_path / "other", 20, seed=1)
    point_latest = checkpoint.point_latest
    monkeypatch.setattr(checkpoint, "point_latest", meanwhile)
    save(tmp_path / "run", 10, keep=1)
    assert step_names(tmp_path / "run") == ["latest", "step-00000020"]
    assert same(load_checkpoint(tmp_path / "run").params, float_params(MODEL, 1))


ROOM = """
    import errno, os, subprocess, sys
    import terapipe_c as tp
    from terapipe_c.checkpoint import CheckpointWriter
    def free():
        return os.statvfs(sys.argv[1]).f_bavail * os.statvfs(sys.argv[1]).f_frsize
    model, run = tp.GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=64, block_size=8), sys.argv[1] + "/run"
    plan = tp.plan(model, tp.Cluster(1), batch=1, seq_len=8, planner="uniform", stages=1)
    wanted = CheckpointWriter.plan(model).nbytes
    def fill(path):
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, free() - wanted // 4096 * 4096)
    def go(steps=2, **options):
        return tp.launch(plan, [1, 2, 3] * 99, steps, out=run, processes=False, progress=False, **options).wait()
"""
SHORT = ROOM + """
    fill(sys.argv[1] + "/filler")
    try:
        go()
    except tp.StorageError as error:
        assert error.errno == errno.ENOSPC and not os.path.exists(run), error
        told = f"a checkpoint has {wanted} bytes, and {run}/checkpoints has {free()} free: {wanted - free()} bytes short"
        assert told in str(error), error
        go(checkpoint_every=0)
        sys.exit(6)
"""
LEFT = ROOM + """
    go()
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = f"{run}/checkpoints/.step-00000003.tmp-{dead.pid}"
    os.mkdir(left)
    fill(left + "/optimizer.safetensors")
    assert free() < wanted
    sys.exit(3 + go(4, resume=True).history[-1].step)
"""
ENOUGH = ROOM + "    sys.exit(6 + len(go().history))\n"
SEVERAL = ROOM + """
    def refused(room, more, **options):
        with open(sys.argv[1] + "/filler", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, free() - room)
        try:
            go(**options)
        except tp.StorageError as error:
            assert f"{more} more checkpoints of {wanted} bytes will be" in str(error), error
            return True
        finally:
            os.remove(sys.argv[1] + "/filler")
    page, two, three = 4096, (2 * wanted + 8 * 4096) // 4096 * 4096, (3 * wanted + 12 * 4096) // 4096 * 4096
    every = {"checkpoint_every": 1}
    assert refused(two, 3, steps=3, **every) and not os.path.exists(run)
    assert refused(2 * wanted // page * page, 2, steps=2, **every) and not refused(two, 0, steps=2, **every)
    assert not refused(three - two, 0, steps=9, resume=True, **every)       # a third, for as long as it is not whole
    sys.exit(len(os.listdir(run + "/checkpoints")))
"""


@pytest.mark.parametrize(("script", "code"), [(SHORT, 6), (ENOUGH, 8), (LEFT, 6), (SEVERAL, 3)],
                         ids=["short", "enough", "left by a killed one", "several at once"])
def test_a_disk_with_no_room_for_a_checkpoint_is_told_before_the_first_step(tmp_path, script, code):
    """On a tmpfs of its own, a page less free than a checkpoint has: that was known when the first one was due, after its steps.
    What a killed writer left is room: the next one removes it."""
    argv = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    probe = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && exec "$@"', str(tmp_path), "true"]
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace here (needs root)")
    done = subprocess.run([*probe[:-1], *argv], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
