"""Sweeps that train: a trial that was cut short, or failed, is done when the sweep is run again."""
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from test_cli import SMALL, run

import terapipe_c as tp
from terapipe_c import cli
from terapipe_c.explain import format_slicing
from terapipe_c.job import Folder
from terapipe_c.sweep import TRIALS, Sweep, _Locks, begun, read_grid

TRIAL = ["sweep", "--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--vocab-size", "256", "--seq-len", "16", "--batch", "2",
         "--costs", "analytic", "--devices", "2", "--train", "--grid", "stages=1"]  # fmt: skip


def test_a_trial_that_was_cut_short_goes_on(capsys, tmp_path):
    (tmp_path / "c.txt").write_bytes(bytes(range(32, 127)) * 40)
    argv = [*TRIAL, "--data", str(tmp_path / "c.txt"), "--steps", "4000", "--checkpoint-every", "20", "--lr-schedule", "constant",
            "--out", str(tmp_path / "k.jsonl")]  # fmt: skip
    with subprocess.Popen([sys.executable, "-m", "terapipe_c", *argv], stderr=subprocess.DEVNULL, cwd=tmp_path) as child:
        while not (found := list(tmp_path.glob("k.jsonl.runs/*/checkpoints/latest"))) and child.poll() is None:
            time.sleep(0.01)
        child.kill()
    assert found and (tmp_path / "k.jsonl").read_bytes() == b""        # which the child held a lock of, and no row
    assert run(capsys, *argv)[0] == 0
    (row,) = map(json.loads, (tmp_path / "k.jsonl").read_text().splitlines())
    assert row["status"] == "done" and row["result"]["loss"] > 0
    steps = [json.loads(line)["step"] for line in (Path(row["result"]["run"]) / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == 3999    # what was on its way to the killed launcher is in no line


def test_two_sweeps_on_one_file_share_the_trials(tmp_path):
    """Both did all of them, so that each was there twice; and where they trained, what one was at failed in the other."""
    path, grid, calls, begun_one, waited = tmp_path / "s.jsonl", {"a": [1, 2, 3]}, [], threading.Event(), threading.Event()

    def slow(point):
        begun_one.set()
        assert waited.wait(60)
        calls.append(("first", point["a"]))
        return {}

    def say(text):
        if "waits for another sweep" in text:
            waited.set()

    counts = []
    first = threading.Thread(target=lambda: counts.append(Sweep(path, grid, {}, slow).run()))
    first.start()
    assert begun_one.wait(60)
    second = Sweep(path, grid, {}, lambda point: calls.append(("second", point["a"])) or {})
    counts.append(second.run(say=say))
    first.join()
    assert sorted(calls) == [("first", 1), ("second", 2), ("second", 3)]
    assert sorted(json.loads(line)["trial"]["a"] for line in path.read_text().splitlines()) == [1, 2, 3]
    assert sorted(count["done"] for count in counts) == [1, 2] and all(sum(count.values()) == 3 for count in counts)


@pytest.mark.parametrize("error", [PermissionError, BlockingIOError, OSError])
def test_a_sweep_ends_where_locks_are_refused(monkeypatch, tmp_path, error):
    """Where they are refused also to who waits, as by a network's file system or a sandbox, it asked again and again, for ever."""
    asked = []

    def refuse(file, how, what):
        asked.append(how)
        assert len(asked) < 100
        raise error("no locks here")

    monkeypatch.setattr("terapipe_c.sweep.fcntl.fcntl", refuse)
    assert Sweep(tmp_path / "s.jsonl", {"a": [1, 2]}, {}, lambda point: {}).run() == {"done": 2, "failed": 0, "skipped": 0}


def test_rows_go_to_a_file_that_may_only_be_appended_to(tmp_path):
    """chattr +a, as of what is to lose no row: to lock it, it was opened for writing anywhere, which is refused."""
    path = tmp_path / "s.jsonl"
    assert Sweep(path, {"a": [1]}, {}, lambda point: {}).run()["done"] == 1
    if shutil.which("chattr") is None or subprocess.run(["chattr", "+a", path], check=False, capture_output=True).returncode:
        pytest.skip("no file can be made so here: that needs root, and a file system that knows it")
    try:
        assert Sweep(path, {"a": [1, 2]}, {}, lambda point: {}).run() == {"done": 1, "failed": 0, "skipped": 1}
    finally:
        subprocess.run(["chattr", "-a", path], check=True)


def test_what_others_write_among_the_rows_meanwhile_stays(tmp_path):
    """Half a row of a sweep that is killed goes; a note without its end is no row, and is not cut off before the next one."""
    path = tmp_path / "s.jsonl"
    for written, kept in (('{"trial": {"a"', ""), ("a note", "a note\n"), ("a note\n", "a note\n")):
        path.unlink(missing_ok=True)
        sweep = Sweep(path, {"a": [1, 2]}, {}, lambda point, text=written: path.open("a").write(text) and {})
        assert sweep.run() == {"done": 2, "failed": 0, "skipped": 0}
        rows = path.read_text().replace(kept, "", 2 if kept else 0).splitlines()
        assert path.read_text().count("note") == 2 * bool(kept) and [json.loads(row)["trial"]["a"] for row in rows] == [1, 2]


def test_a_trial_of_a_sweep_that_is_killed_is_done_by_the_one_that_waits(tmp_path):
    """A lock ends with its process; and a trial that failed meanwhile is not tried again by who was to try failed ones again."""
    path, told = tmp_path / "s.jsonl", []
    sweep = Sweep(path, {"a": [1, 2]}, {}, lambda point: {})
    other = _Locks(path)
    stack = contextlib.ExitStack()
    assert stack.enter_context(other.held(TRIALS + int(sweep.key({"a": 1}), 16) % TRIALS))

    def say(text):
        told.append(text)
        if "waits" in text:
            other.close()       # as when its process ends

    assert sweep.run(say=say) == {"done": 2, "failed": 0, "skipped": 0}
    assert [text.split()[1] for text in told] == ["done", "waits", "done"]
    row = path.read_text().splitlines()[0].replace(sweep.key({"a": 2}), sweep.key({"a": 1})).replace("done", "failed")

    def fails(point):
        with path.open("a") as file:        # another's, of the next trial
            file.write(row.replace(sweep.key({"a": 1}), failing.key({"a": 2})) + "\n")
        raise ValueError("no")

    failing = Sweep(path, {"a": [1, 2]}, {"b": 1}, fails)
    assert failing.run(retry_failed=True) == {"done": 0, "failed": 1, "skipped": 1}


def test_rows_go_to_what_is_no_file(tmp_path):
    """`--out /dev/stdout | jq`: a pipe has no rows to skip, and to look for them would wait for ever."""
    argv = [sys.executable, "-m", "terapipe_c", "sweep", "--n-layer", "1", "--costs", "analytic", "--planner", "uniform", "--grid"]
    for grid, code, statuses in (("stages=1,9", 0, ["done", "failed"]), ("stages=9", 1, ["failed"])):
        done = subprocess.run([*argv, grid, "--json", "--out", "/dev/stderr"], capture_output=True, cwd=tmp_path, timeout=60)
        rows = [json.loads(line) for line in done.stderr.splitlines() if line.startswith(b"{")]
        assert (done.returncode, [row["status"] for row in rows]) == (code, statuses), done.stderr
    os.mkfifo(tmp_path / "pipe")        # its reader ends where nobody has it open to write
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
        subprocess.run([*argv, "stages=1,9", "--out", "pipe"], capture_output=True, cwd=tmp_path, timeout=60, check=True)
        assert [json.loads(line)["status"] for line in reader.stdout] == ["done", "failed"]


def test_rows_on_standard_output_are_alone_there(tmp_path):
    """The table of counts went over the first row of a file, and behind the rows, or the picture, of a pipe."""
    argv = [sys.executable, "-m", "terapipe_c", "sweep", "--n-layer", "1", "--costs", "analytic", "--planner", "uniform", "--grid",
            "stages=1,9", "--out", "/dev/stdout"]  # fmt: skip
    told = {"check": True, "cwd": tmp_path, "timeout": 60, "stderr": subprocess.PIPE}
    with (tmp_path / "rows").open("wb") as file:
        done = subprocess.run(["sh", "-c", '"$@" && echo behind', "sh", *argv], stdout=file, **told)
    *rows, last = (tmp_path / "rows").read_text().splitlines()
    assert [json.loads(row)["status"] for row in rows] == ["done", "failed"] and last == "behind"
    assert b"\ndone     1\n" in done.stderr
    piped = subprocess.run([*argv, "--json"], stdout=subprocess.PIPE, **told)
    assert [json.loads(row)["status"] for row in piped.stdout.splitlines()] == ["done", "failed"]
    assert json.loads(piped.stderr)["failed"] == 1
    with (tmp_path / "rows").open("ab") as file:        # where nothing is left to do: what is no row would be told of
        refused = subprocess.run(argv, stdout=file, stderr=subprocess.PIPE, cwd=tmp_path, timeout=60)
    assert refused.returncode == 2 and b"line 3: no row of a sweep" in refused.stderr
    drawn = subprocess.run([*argv[:3], "simulate", "--schedule", "gpipe", "--svg", "/dev/stdout"], stdout=subprocess.PIPE, **told)
    assert drawn.stdout.endswith(b"</svg>\n") and b"makespan_s" in drawn.stderr
    unread = subprocess.run([*argv[:-1], os.devnull], stdout=subprocess.DEVNULL, **told)
    assert b"\ndone     1\n" not in unread.stderr
    train = subprocess.run([*argv, "--train", "--data", "x", "--steps", "1"], capture_output=True, cwd=tmp_path, timeout=60)
    assert train.returncode == 2 and b"--out is /dev/stdout, the standard output" in train.stderr and not train.stdout


def test_other_costs_of_the_same_name_are_another_trial(capsys, tmp_path):
    """A file that was measured anew, and a trial by it was taken for done. Rows of before that was told apart stay."""
    model, path = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=256, block_size=16), tmp_path / "rows.jsonl"
    argv = ["sweep", "--n-layer", "2", "--n-head", "2", "--n-embd", "16", "--seq-len", "16", "--batch", "2", "--planner", "uniform",
            "--devices", "2", "--grid", "stages=1,2", "--grid", f"costs={tmp_path / 'a.json'},analytic", "--out", path]  # fmt: skip

    def counts():
        return list(json.loads(run(capsys, *argv, "--json")[1]).values())[:3]

    for flops, left in ((1e9, 4), (2e9, 2)):
        tp.CostModel.analytic(model, tp.Cluster(2, peak_flops=flops)).save(tmp_path / "a.json")
        assert counts() == [left, 0, 4 - left] and counts() == [0, 0, 4]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [row["result"]["step_time_s"] for row in rows if row["trial"]["costs"] != "analytic"]
    assert len(rows) == 6 and steps[0] > steps[2] and steps[1] > steps[3]
    sweep = Sweep(path, {"costs": [str(tmp_path / "a.json")]}, {}, lambda point: {})
    before = sweep.key({"costs": str(tmp_path / "none.json")})          # by its name alone
    path.write_text(json.dumps({"trial": {}, "key": before, "status": "done"}) + "\n")
    (tmp_path / "a.json").rename(tmp_path / "none.json")
    sweep.grid["costs"] = [str(tmp_path / "none.json")]
    assert sweep.run() == {"done": 0, "failed": 0, "skipped": 1}


def test_other_data_or_parameters_of_the_same_name_are_another_trial(monkeypatch, tmp_path):
    """As other costs are: a corpus that had grown, or a checkpoint that had gone on, and the trial was taken for done."""
    data, pair, large = tmp_path / "c.txt", tmp_path / "m", tmp_path / "l.npy"
    model = tp.GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=9, block_size=8)
    monkeypatch.setattr("terapipe_c.sweep.READ_WHOLE", 100)
    for name, size in ((data, 9), (tmp_path / "m.bin", 8), (tmp_path / "m.idx", 9), (large, 101)):
        name.write_bytes(b"MMIDIDX\0\0".ljust(size, b"a")[:size])
    tp.save_checkpoint(tmp_path / "run", model, tp.init_params(model, 0))
    tp.export_hf(tmp_path / "hf", model=model, params=tp.init_params(model, 0))
    grid = {"data": [str(data), str(pair), str(large)], "init": [None, str(tmp_path / "run"), str(tmp_path / "hf"), "none"]}

    def left():
        return Sweep(tmp_path / "s.jsonl", grid, {"train": True}, lambda point: {}).run()["done"]

    assert (left(), left()) == (12, 0)
    os.utime(data, ns=(7, 7))
    assert left() == 0, "a copy of the same"
    data.write_bytes(b"b" * 9)
    assert (left(), left()) == (4, 0)
    (tmp_path / "m.bin").write_bytes(b"b" * 8)
    assert (left(), left()) == (4, 0)
    os.utime(large, ns=(7, 7))
    assert (left(), left()) == (4, 0), "which is not read"
    tp.save_checkpoint(tmp_path / "run", model, tp.init_params(model, 1), step=1)
    assert (left(), left()) == (3, 0)
    tp.export_hf(tmp_path / "hf", model=model, params=tp.init_params(model, 1))
    assert (left(), left()) == (3, 0)


def test_what_cannot_be_written_is_told_before_the_work(capsys, monkeypatch, tmp_path):
    """Root may write anywhere, so the question is answered for it."""
    def work(*args, **kwargs):
        raise AssertionError("measured, planned or tried before the file was asked for")

    rows = tmp_path / "m.jsonl"
    rows.write_text("")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) not in (tmp_path, rows))
    monkeypatch.setattr(tp, "profile", work)
    monkeypatch.setattr(tp, "plan", work)
    for argv in (["profile", "--out", str(tmp_path / "c.json")], ["plan", "--costs", "analytic", "--out", str(tmp_path / "p.json")],
                 ["sweep", "--costs", "analytic", "--grid", "stages=1", "--out", str(rows)]):  # fmt: skip
        code, _, err = run(capsys, *argv)
        assert code == 2 and "that can be written would be right" in err, (argv, err)


def test_a_trial_that_failed_is_tried_again(capsys, tmp_path):
    (tmp_path / "c.txt").write_bytes(bytes(range(32, 127)) * 40)
    argv = [*TRIAL, "--data", str(tmp_path / "c.txt"), "--steps", "20", "--lr", "1e30", "--out", str(tmp_path / "l.jsonl")]
    assert run(capsys, *argv)[0] == 1
    run(capsys, *argv)      # which leaves it
    assert len((tmp_path / "l.jsonl").read_text().splitlines()) == 1 and run(capsys, *argv, "--retry-failed")[0] == 1
    first, again = map(json.loads, (tmp_path / "l.jsonl").read_text().splitlines())
    assert first["status"] == again["status"] == "failed" and first["error"] == again["error"]
    (folder,) = tmp_path.glob("l.jsonl.runs/*")
    (folder / "config.json").unlink()
    (folder / "mine.txt").write_text("not of a trial")
    assert run(capsys, *argv, "--retry-failed")[0] == 1 and (folder / "mine.txt").exists()
    assert "exists already" in json.loads((tmp_path / "l.jsonl").read_text().splitlines()[-1])["error"]["message"]


def test_a_sweep_of_which_nothing_goes_well_exits_with_1(capsys, tmp_path):
    plans = ["sweep", "--n-layer", "2", "--n-head", "2", "--n-embd", "16", "--vocab-size", "256", "--seq-len", "16", "--batch", "2",
             "--costs", "analytic", "--planner", "uniform", "--out", str(tmp_path / "p.jsonl")]  # fmt: skip
    bad, both = [*plans, "--grid", "stages=98,99"], [*plans, "--grid", "stages=2,99"]
    assert run(capsys, *bad)[0] == 1 and run(capsys, *both)[0] == 0
    assert run(capsys, *bad)[0] == 1 and run(capsys, *both)[0] == 0, "nor when there is nothing left to do"


def test_rows_of_a_sweep_are_read_once_to_tell_whether_all_failed(tmp_path):
    """They were read anew for each trial: of a thousand this took seven seconds when all was done."""
    reads, path = [], tmp_path / "s.jsonl"

    class Counting(Sweep):
        def statuses(self):
            reads.append(1)
            return super().statuses()

    def trial(point):
        if point["a"] < 3:
            raise ValueError("no")
        return {}

    for values, failed in (([0, 1, 2], True), ([1, 2, 3], False)):
        sweep = Counting(path, {"a": values}, {}, trial)
        assert not sweep.all_failed()       # not all of them have a row
        sweep.run()
        reads.clear()
        assert (sweep.all_failed(), reads) == (failed, [1])


def test_a_point_that_a_grid_has_twice_is_one_trial(tmp_path):
    """A name as the command's flags have it, or as the package does."""
    grid, done = read_grid(["min-lr=1,1e0,2", "min_lr=2,3"], {"min_lr"}), []
    assert json.dumps(grid) == '{"min_lr": [1, 1, 2, 3]}'      # whole numbers are whole however they are written
    sweep = Sweep(tmp_path / "s.jsonl", grid, {}, lambda point: done.append(point) or {})
    assert sweep.run() == {"done": 3, "failed": 0, "skipped": 1}
    assert done == [{"min_lr": value} for value in (1, 2, 3)]


def test_what_is_measured_has_the_threads_of_the_run(capsys, monkeypatch, tmp_path):
    """With one thread always, a run of several was predicted to take as long as it takes one."""
    asked = []

    def profile(model, threads=1, **options):
        asked.append(threads)
        return tp.CostModel.analytic(model, tp.Cluster(1))

    monkeypatch.setattr(tp, "profile", profile)
    cli._measured.cache_clear()
    (tmp_path / "c.txt").write_bytes(bytes(range(32, 127)) * 40)
    argv = ["sweep", *TRIAL[1:13], "--planner", "uniform", "--stages", "1", "--threads", "--data", str(tmp_path / "c.txt"),
            "--steps", "1", "--train", "--grid", "threads_per_rank=1,2", "--out", str(tmp_path / "t.jsonl")]  # fmt: skip
    assert run(capsys, *argv)[0] == 0 and asked == [1, 2]
    cli._measured.cache_clear()


def test_an_option_that_came_later_leaves_the_keys_of_rows_as_they_were(capsys, monkeypatch, tmp_path):
    """With one more name in what is hashed every trial of a sweep of before was done again, in another folder."""
    bases = []
    monkeypatch.setattr(Sweep, "run", lambda sweep, *_: bases.append(sweep.base) or {})
    monkeypatch.setattr(Sweep, "all_failed", lambda sweep: False)
    argv = ["sweep", *TRIAL[1:13], "--train", "--data", "x", "--steps", "1", "--grid", "stages=1", "--out", str(tmp_path / "t")]
    assert run(capsys, *argv)[0] == 0 and run(capsys, *argv, "--timeout-s", "7")[0] == 0
    assert "timeout_s" not in bases[0] and bases[1] == {**bases[0], "timeout_s": 7.0}


@pytest.mark.parametrize("torn", ['{"trial": {"a": 1', '{"trial": {"a": 1}, "key": "k", "status": "done"}'])
def test_a_full_disk_costs_no_row_of_before(tmp_path, torn):
    """It left half a line, or one without its end; which is mended where it may be full still."""
    path, rows = tmp_path / "s.jsonl", ""
    Sweep(path, {"a": [0]}, {}, lambda point: {}).run()
    rows = path.read_text()
    path.write_text(rows + torn)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))     # Python ignores the signal, so that a write fails
    try:
        with pytest.raises(OSError, match="File too large: .*s.jsonl"):
            Sweep(path, {"a": [1]}, {}, lambda point: {}).run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text().startswith(rows)
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):      # a device's is open from row to row
        Sweep(Path("/dev/full"), {"a": [1]}, {}, lambda point: {}).run()
    assert Sweep(path, {"a": [0, 1]}, {}, lambda point: {}).run() == {"done": 1, "failed": 0, "skipped": 1}
    assert path.read_text().startswith(rows) and len(path.read_text().splitlines()) == 2 + (torn[-1] == "}")


def test_what_is_left_of_a_trial_is_not_lost(tmp_path):
    """Where another sweep trains in the folder, where the newest checkpoint is damaged, and where only the row is missing."""
    model = tp.GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=256, block_size=16)
    cluster = tp.Cluster(num_devices=1)
    plan = tp.plan(model, cluster, 2, 16, tp.CostModel.analytic(model, cluster), planner="uniform", stages=1)
    folder = tmp_path / "trial"
    assert not begun(folder, 4)
    tp.launch(plan, np.arange(900) % 256, 4, out=folder, checkpoint_every=2, processes=False, progress=False).wait()
    assert begun(folder, 5) and folder.exists()
    with pytest.raises(FileExistsError, match="another run is under way"), contextlib.closing(Folder(folder)):
        begun(folder, 4)
    state = folder / "checkpoints" / "step-00000004" / "state.json"
    whole = state.read_text()
    state.write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        begun(folder, 5)
    state.write_text(whole)
    assert not begun(folder, 4) and not folder.exists()
    assert tp.load_checkpoint(tmp_path / "trial.1").step == 4
    shutil.rmtree(tmp_path / "trial.1" / "checkpoints")
    (tmp_path / "trial.1").rename(folder)
    assert not begun(folder, 4) and list(tmp_path.iterdir()) == []


def test_a_grid_of_a_name_alone_is_told_what_it_lacks(capsys, tmp_path):
    """It was told that there is no file of that name."""
    code, _, err = run(capsys, "sweep", *SMALL, "--grid", "memory-bytes", "--out", tmp_path / "rows.jsonl")
    assert code == 2 and "memory-bytes: an option without values, and no file: memory-bytes=V,V,... would be right" in err
    code, _, err = run(capsys, "sweep", *SMALL, "--grid", "nothing", "--out", tmp_path / "rows.jsonl")
    assert code == 2 and "No such file or directory: 'nothing'" in err


def test_what_is_given_or_not_is_no_word(capsys, tmp_path):
    """no_bias=False, as Python writes it, was a model without biases, and threads=2 was taken for threads=true."""
    path = tmp_path / "rows.jsonl"
    grid = ("--grid", "no_bias=True,False,false", "--grid", "executable=yes,no,null")
    assert run(capsys, "sweep", *SMALL, *grid, "--out", path)[0] == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    trials = [(bias, able) for bias in (True, False) for able in (True, False, None)]
    assert [tuple(row["trial"].values()) for row in rows] == trials and all(row["status"] == "done" for row in rows)
    peaks = [max(row["result"]["peak_memory_bytes"]) for row in rows]
    assert max(peaks[:3]) < min(peaks[3:])
    for value in ("maybe", "2", "1.5", "[]", '"no way"'):
        for name in ("untied", "shard_optimizer"):
            code, _, err = run(capsys, "sweep", *SMALL, "--grid", f"{name}={value}", "--out", path)
            assert code == 2 and f"of {name} is neither true nor false" in err
    assert run(capsys, "sweep", *SMALL, "--grid", "shard_optimizer=yes,False", "--out", tmp_path / "shards.jsonl")[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "shards.jsonl").read_text().splitlines()]
    assert [(row["trial"]["shard_optimizer"], row["status"]) for row in rows] == [(True, "done"), (False, "done")]


def test_a_grid_has_slices_and_stages_as_a_plan_prints_them(capsys, tmp_path):
    """As --slicing and --partition do; they were texts, which the error said would have been right."""
    path = tmp_path / "rows.jsonl"
    plan = json.loads(run(capsys, "plan", *SMALL, "--stages", "2", "--slicing", "2", "--json")[1])
    slicing, partition = ([tuple(part) for part in plan[name]] for name in ("slicing", "stages"))
    texts = [format_slicing(slicing), str(slicing), json.dumps(slicing)]
    grid = [*("--grid=slicing=" + text for text in texts), f"--grid=partition={partition}"]
    assert run(capsys, "sweep", *SMALL, *grid, "--out", path)[0] == 0
    (row,) = map(json.loads, path.read_text().splitlines())      # of three texts that say the same
    assert row["status"] == "done" and row["result"]["slicing"] == plan["slicing"] and row["result"]["stages"] == plan["stages"]
    for name in ("slicing", "partition"):
        code, _, err = run(capsys, "sweep", *SMALL, "--grid", f"{name}=[(1, x)]", "--out", path)
        assert code == 2 and f"(of {name})" in err and len(path.read_text().splitlines()) == 1
