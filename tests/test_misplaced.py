"""Files of a run that are not what they are called: a folder where a file belongs, a module of the user's by another's name."""
import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ports import free_port

import terapipe_c as tp
from terapipe_c import _files, cli, ranks
from terapipe_c.job import other_cosine
from terapipe_c.sweep import Sweep

MODEL = tp.GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=61, block_size=16)
CLUSTER = tp.Cluster(num_devices=1, memory_bytes=1e9, link_latency_s=1e-6, link_bandwidth_Bps=1e9, peak_flops=2e9)
DATA = np.arange(4000, dtype=np.int32) % 61


def a_run(tmp_path):
    plan = tp.plan(MODEL, CLUSTER, batch=2, seq_len=8)
    tp.launch(plan, DATA, steps=1, out=tmp_path / "run", checkpoint_every=1, processes=False, progress=False).wait()
    return plan, tmp_path / "run"


FILES = ("config.json", "plan.json", "metrics.jsonl", "trace.json")


@pytest.mark.parametrize("name", FILES)
def test_a_folder_where_a_file_of_the_run_belongs_is_named_before_it_begins(name, tmp_path):
    plan, run = a_run(tmp_path)
    (run / name).unlink()
    (run / name).mkdir()
    with pytest.raises(IsADirectoryError, match=f"a folder is there: the name of a file would be right: '.*{name}'"):
        tp.launch(plan, DATA, steps=3, out=run, resume=True, checkpoint_every=1, processes=False, progress=False)


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_where_a_file_of_the_run_belongs_is_told_and_not_waited_for(name, tmp_path):
    plan, run = a_run(tmp_path)
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(ValueError, match=f"{name} is a pipe: the name of a file would be right"):
        tp.launch(plan, DATA, steps=3, out=run, resume=True, lr_schedule="constant", processes=False, progress=False)


def test_what_has_no_end_or_no_beginning_is_no_plan_nor_costs(tmp_path, monkeypatch):
    """A pipe that nobody writes to was waited for without end, and /dev/zero filled the memory."""
    plan = tp.plan(MODEL, CLUSTER, batch=2, seq_len=8)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(_files, "_WRITER_MS", 50)
    for load in (tp.Plan.load, tp.CostModel.load, lambda path: tp.Dataset(path, 8, 1)):
        for path, told in ((pipe, "is a pipe that nobody writes to|is not a file"), ("/dev/zero", "is a device|is not a file")):
            with pytest.raises(ValueError, match=told):
                load(path)
    monkeypatch.setattr(_files, "_MOST", 3 << 20)
    with open(tmp_path / "large", "wb") as large:
        large.truncate((3 << 20) + 1)
    endless = subprocess.Popen(["yes"], stdout=subprocess.PIPE)
    assert endless.stdout is not None
    for path in (tmp_path / "large", f"/dev/fd/{endless.stdout.fileno()}"):
        with pytest.raises(ValueError, match="has more than 3.00 MiB: a text of fewer would be right"):
            tp.Plan.load(path)
    endless.stdout.close()
    endless.wait()
    text = json.dumps(plan.to_dict())
    for words in (["cat", "-"], ["sh", "-c", "sleep 0.2; cat -"]):      # who writes late is waited for
        slow = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        slow.stdin.write(text.encode())
        slow.stdin.close()
        assert tp.Plan.load(f"/dev/fd/{slow.stdout.fileno()}").digest == plan.digest
        slow.stdout.close()
        slow.wait()


def test_where_no_run_folder_can_be_made_is_told_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tp, "profile", lambda *_, **__: pytest.fail("it was measured"))
    (tmp_path / "text").write_bytes(bytes(range(100)))
    words = ["train", *"--n-layer 1 --n-head 1 --n-embd 8 --seq-len 8 --stages 1 --steps 1 --data".split(), str(tmp_path / "text")]
    assert cli.main([*words, "--out", str(tmp_path / "text" / "new" / "run")]) == 2
    assert f"out is '{tmp_path}/text': a folder that can be written would be right" in capsys.readouterr().err


def test_a_disk_that_is_only_read_is_called_so(monkeypatch, tmp_path):
    """The superuser was told that permission is denied."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for flag, why in ((os.ST_RDONLY, "Read-only file system"), (0, "Permission denied")):
        monkeypatch.setattr(os, "statvfs", lambda path, flag=flag: SimpleNamespace(f_flag=flag))
        with pytest.raises(tp.StorageError, match=why) as refused:
            _files.check_writable("out", tmp_path)
        assert os.strerror(refused.value.errno) == why


def test_a_plan_that_does_not_run_says_how_one_is_made_that_does(capsys, monkeypatch, tmp_path):
    """Of Python alone, to who has the command."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_bytes(bytes(range(100)) * 9)
    words = ["plan", *"--n-layer 1 --n-head 1 --n-embd 8 --seq-len 8 --stages 2 --devices 2 --schedule chimera --out p".split()]
    train = "train p --data text --steps 1 --threads --quiet --out run".split()
    assert cli.main(words) == 0 and cli.main(train) == 2
    assert "or terapipe plan --executable yes, plans only what can" in capsys.readouterr().err
    words[words.index("chimera")] = "auto"
    assert cli.main([*words, "--executable", "yes"]) == 0 and cli.main(train) == 0


def test_a_cosine_that_ends_elsewhere_is_told_of_where_it_is_known():
    """Not of a checkpoint before the first step, nor of one that lacks what it is made of."""
    was = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 0, "lr_schedule": "cosine", "steps": 40}
    now = {**was, "steps": 80}
    assert other_cosine(40, was, now) == ("the cosine of the learning rate ends at step 80 now, not at 40: it goes on with 0.55, "
                                          "after 0.101")
    for done, before in ((0, was), (40, {**was, "min_lr": None}), (40, {}), (40, {**was, "lr_schedule": "constant"}), (40, now)):
        assert other_cosine(done, before, now) == ""
    assert other_cosine(80, was, now) == ""


def test_a_cosine_that_ends_elsewhere_is_told_of_in_python_too(tmp_path, capsys, monkeypatch):
    """The command told it alone: of `launch` and `train` a rate that leapt up by a half was seen in the losses."""
    plan, run = a_run(tmp_path)

    def go_on(steps, **options):
        return tp.launch(plan, DATA, steps=steps, out=run, resume=True, processes=False, progress=False, **options).wait()

    words = r"resumed with another number of steps: the cosine .* ends at step 3 now, not at 1: .* with 0\.000465, after 0\.0006"
    with pytest.warns(UserWarning, match=words) as told:
        assert go_on(3).history[0].lr == pytest.approx(0.000465)
    assert told[0].filename == __file__ and len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert go_on(3).history == []
    given = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**given, "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.warns(UserWarning, match="ends at step 5 now, not at 3"):
        assert len(tp.train(plan, DATA, 5, out=run, resume=True, progress=False).history) == 2
    np.save(tmp_path / "data.npy", DATA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")      # the command has told it
        assert cli.main(["resume", str(run), "--steps", "7", "--quiet", "--threads", "--data", str(tmp_path / "data.npy")]) == 0
    assert capsys.readouterr().err.count("ends at step 7 now, not at 5") == 1


def test_the_help_of_resume_says_what_it_does_where_a_flag_is_left_out(tmp_path, capsys):
    """It told `launch`'s defaults, and took the run's own; and had an --init, which it refuses."""
    assert cli.main(["resume", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "values that are not given, but --steps, are the run's own" in told and "default" not in told and "--init" not in told
    assert cli.main(["train", "--help"]) == 0 and "learning rate behind the warm-up (default 0.0006)" in capsys.readouterr().out
    plan, run = tp.plan(MODEL, CLUSTER, batch=2, seq_len=8), tmp_path / "run"
    plan.save(tmp_path / "plan.json")
    np.save(tmp_path / "data.npy", DATA)
    own = ("--lr 0.01 --min-lr 0.005 --warmup-steps 3 --weight-decay 0.2 --eps 1e-7 --grad-clip 2 --seed 7 --threads-per-rank 2 "
           "--checkpoint-every 2 --timeout-s 99 --log-every 3 --eval-every 5 --lr-schedule constant --betas 0.8 0.9 --fast")
    train = ["train", str(tmp_path / "plan.json"), "--data", str(tmp_path / "data.npy"), "--steps", "2", "--out", str(run)]
    assert cli.main([*train, *own.split(), "--threads", "--quiet"]) == 0
    before = json.loads((run / "config.json").read_text())
    assert cli.main(["resume", str(run), "--steps", "3", "--threads", "--quiet"]) == 0
    after, moved = json.loads((run / "config.json").read_text()), ("steps", "first_step", "resume_from", "drawn")
    assert {name: value for name, value in after.items() if name not in moved} == {
        name: value for name, value in before.items() if name not in moved}


def test_a_run_of_no_steps_leaves_a_checkpoint_to_go_on_from(tmp_path):
    """There was none, so that its folder was good for nothing: neither to resume in nor to begin in."""
    plan, run = tp.plan(MODEL, CLUSTER, batch=2, seq_len=8), tmp_path / "run"
    options = dict(processes=False, progress=False, lr_schedule="constant")
    none = tp.launch(plan, DATA, steps=0, out=run, **options).wait()
    saved, drawn = tp.load_checkpoint(run), tp.init_params(MODEL, 0)
    assert (saved.step, none.checkpoint_path, none.history) == (0, saved.path, []) and saved.params.keys() == drawn.keys()
    assert all(np.array_equal(saved.params[name], array) for name, array in drawn.items())
    rest = tp.launch(plan, DATA, steps=3, out=run, resume=True, **options).wait()
    right = tp.launch(plan, DATA, steps=3, out=tmp_path / "at once", **options).wait()
    assert [record.loss for record in rest.history] == [record.loss for record in right.history]
    one, other = tp.load_checkpoint(run), tp.load_checkpoint(tmp_path / "at once")
    assert all(np.array_equal(other.params[name], array) for name, array in one.params.items())
    tp.launch(plan, DATA, steps=0, out=tmp_path / "none", checkpoint_every=0, **options).wait()
    assert not (tmp_path / "none" / "checkpoints").exists()


def test_a_checkpoint_is_no_run_folder_to_resume_in(tmp_path):
    """The run's own checkpoints lay deeper, where the next resume did not look: it began where the first had, and said nothing."""
    plan, run = a_run(tmp_path)
    for out, what in (("step-00000001", "a checkpoint"), ("latest", "a checkpoint"), ("", "a folder of checkpoints")):
        with pytest.raises(ValueError, match=rf"out is .*, {what}, in which .*: the run's folder, {re.escape(str(run))}, would"):
            tp.launch(plan, DATA, steps=3, out=run / "checkpoints" / out, resume=True, processes=False, progress=False)
    assert sorted(os.listdir(run / "checkpoints")) == ["latest", "step-00000001"]


def test_a_run_that_goes_on_from_what_was_saved_is_gone_on_with(tmp_path):
    plan, run = a_run(tmp_path)
    of, saved = tp.load_checkpoint(run), tmp_path / "saved"
    hyper = {**of.hyper, "lr_schedule": "constant"}
    tp.save_checkpoint(saved, of.model, of.params, of.optimizer, 1, seed=of.seed, data_state=of.data_state, hyper=hyper)
    with pytest.raises(ValueError, match=f"out is .*, a checkpoint, .*: the run's folder, {re.escape(str(saved))}, would"):
        tp.launch(plan, DATA, steps=3, out=saved / "latest", resume=True, processes=False, progress=False)
    for steps in (3, 5):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            records = list(tp.launch(plan, DATA, steps=steps, out=saved, resume=True, processes=False, progress=False,
                                     lr_schedule="constant"))
        assert [record.step for record in records] == [steps - 2, steps - 1] and tp.load_checkpoint(saved).step == steps
    tp.save_checkpoint(saved, of.model, of.params, step=9)
    assert tp.load_checkpoint(saved).step == 9 and tp.load_checkpoint(saved / "checkpoints").step == 5


def test_what_was_saved_in_a_folder_named_checkpoints_is_gone_on_with(tmp_path):
    """It was refused as a run's own checkpoints, which no run's are around it; the run's lie in it, where the next resume looks."""
    plan, run = a_run(tmp_path)
    of, saved = tp.load_checkpoint(run), tmp_path / "checkpoints"
    plan.save(tmp_path / "plan.json")       # as `terapipe plan` writes it where one works
    tp.save_checkpoint(saved, of.model, of.params, of.optimizer, 1, seed=of.seed, data_state=of.data_state, hyper=of.hyper)
    for steps in (3, 5):
        records = list(tp.launch(plan, DATA, steps=steps, out=saved, resume=True, processes=False, progress=False))
        assert [record.step for record in records] == [steps - 2, steps - 1] and tp.load_checkpoint(saved).step == steps


def test_a_folder_where_a_file_is_read_or_written_is_no_bare_error(tmp_path, capsys):
    plan, run = a_run(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    costs = tp.CostModel.analytic(MODEL, CLUSTER)
    said = "a folder is there: the name of a file would be right"
    for call in (tp.Plan.load, plan.save, tp.CostModel.load, costs.save, plan.timeline().to_svg, tp.Dataset):
        with pytest.raises((OSError, ValueError), match="a folder is there"):
            call(*([folder, 8, 1] if call is tp.Dataset else [folder]))
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(OSError, match=said):
        tp.Dataset(DATA, 8, 1).save(tmp_path / "folder.npy")
    for name in ("plan.json", "trace.json"):
        (run / name).rename(run / f"old-{name}")
        (run / name).mkdir()
        assert cli.main(["view", str(run)]) != 0 and said in capsys.readouterr().err
        (run / name).rmdir()
        (run / f"old-{name}").rename(run / name)
    (run / "config.json").unlink()
    (run / "config.json").mkdir()
    assert cli.main(["resume", str(run), "--steps", "2"]) != 0 and said in capsys.readouterr().err
    for grid, out in (("batch=1", folder), (str(folder), tmp_path / "rows")):
        assert cli.main(["sweep", "--grid", grid, "--out", str(out)]) != 0 and said in capsys.readouterr().err


def test_a_resume_from_a_damaged_file_names_the_checkpoint_before(tmp_path, capsys):
    """`launch(resume=True)` did; the command looks at the newest checkpoint before, and said that it is damaged alone."""
    plan, run = a_run(tmp_path)
    tp.launch(plan, DATA, steps=3, out=run, resume=True, checkpoint_every=1, processes=False, progress=False).wait()
    newest = (run / "checkpoints" / "latest").resolve()
    os.truncate(newest / "model.safetensors", 100)
    assert cli.main(["resume", str(run), "--steps", "4"]) == cli.BAD_REQUEST
    before = newest.with_name("step-00000002")
    assert capsys.readouterr().err.endswith(f"; where {before} is whole, moving {newest} away would be right\n")
    assert newest.name == "step-00000003"
    newest.rename(tmp_path / "aside")
    assert tp.load_checkpoint(run).step == 2


def test_a_trace_of_the_plan_before_is_not_shown_as_this_ones(tmp_path, capsys):
    """A resume that finds nothing left to do measures nothing: its plan is in the folder, and the trace of the one before."""
    plan, run = a_run(tmp_path)
    assert cli.main(["view", str(run)]) == 0 and capsys.readouterr().out.startswith("measured timeline of the last step\n")
    again = tp.launch(plan, DATA, steps=1, out=run, resume=True, processes=False, progress=False).wait().report()
    assert again.measured is None and {row[2] for row in again.rows() if row[0].startswith("idle: ")} == {"-"}      # not 0 s
    assert cli.main(["view", str(run)]) == 0 and capsys.readouterr().out.startswith("measured timeline of the last step\n")
    other = tp.plan(MODEL, CLUSTER, batch=2, seq_len=8, slicing=[(1, [4, 4]), (1, [8])])
    tp.launch(other, DATA, steps=1, out=run, resume=True, processes=False, progress=False).wait()
    assert cli.main(["view", str(run)]) == 0
    assert capsys.readouterr().out.startswith("planned timeline of a run (trace.json is of the plan before)\n")
    tp.launch(other, DATA, steps=2, out=run, resume=True, processes=False, progress=False).wait()
    assert cli.main(["view", str(run)]) == 0 and capsys.readouterr().out.startswith("measured timeline of the last step\n")


def test_a_module_in_the_working_directory_is_not_taken_for_what_the_launcher_has(tmp_path):
    """Ranks ended with exit code 3 and no word: "" of sys.path had become another folder since NumPy was imported."""
    for name in ("numpy.py", "random.py"):
        (tmp_path / name).write_text("import os\nos._exit(3)\n")
    source = f"""if True:
        import json, os, numpy, random, terapipe_c
        tp = terapipe_c
        os.chdir({str(tmp_path)!r})
        model = tp.GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=61, block_size=16)
        cluster = tp.Cluster(num_devices=1, memory_bytes=1e9, link_latency_s=1e-6, link_bandwidth_Bps=1e9, peak_flops=2e9)
        run = tp.launch(tp.plan(model, cluster, batch=2, seq_len=8), numpy.arange(4000) % 61, steps=1, progress=False)
        print(len(list(run)))
        assert json.loads(terapipe_c.ranks._environment(1)[terapipe_c._rank.PATHS])[0] == os.getcwd()
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}     # a user has none
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, cwd="/")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_a_folder_of_modules_may_have_a_colon_in_its_name(tmp_path, monkeypatch):
    """PYTHONPATH was two other folders, and a rank did not find an engine, or the package, there."""
    folder, packages = tmp_path / "run 12:30", Path(tp.__file__).parent.parent
    folder.mkdir()
    for name in ("terapipe_c", "numpy", *(["numpy.libs"] if (packages / "numpy.libs").is_dir() else [])):
        (folder / name).symlink_to(packages / name)
    (folder / "own_engine.py").write_text("from terapipe_c.engine import make_engine as make\n")
    monkeypatch.syspath_prepend(folder)
    plan = tp.plan(MODEL, CLUSTER, batch=2, seq_len=8)
    assert len(list(tp.launch(plan, DATA, steps=1, engine="own_engine:make", progress=False))) == 1
    monkeypatch.setattr(ranks, "COMMAND", ["-I", *ranks.COMMAND[:-1], str(folder / "terapipe_c" / "_rank.py")])
    assert len(list(tp.launch(plan, DATA, steps=1, engine="own_engine:make", progress=False))) == 1


def test_folders_are_made_again_where_another_run_that_failed_removed_the_one_around_them(tmp_path, monkeypatch):
    """Of two that begin in the same new folder: between finding it and making its own in it the one has lost it to the other."""
    mkdir, runs, lost = Path.mkdir, tmp_path / "runs", []

    def rival(self, *args, **options):
        if self.parent == runs and self not in lost:
            lost.append(self)
            with contextlib.suppress(OSError):      # it is empty
                runs.rmdir()
        mkdir(self, *args, **options)

    monkeypatch.setattr(Path, "mkdir", rival)
    a_run(runs)
    assert (runs / "run/checkpoints/step-00000001/state.json").is_file() and lost == [runs / "run"]
    assert _files.make_folders(runs / "a/b") == [runs / "a/b", runs / "a"]     # runs is not empty any more
    shutil.rmtree(runs)
    lost.clear()
    assert _files.make_folders(runs / "a/b") == [runs / "a/b", runs / "a", runs, runs]
    monkeypatch.setattr(Path, "mkdir", lambda self: mkdir(tmp_path / "never" / self.name))
    with pytest.raises(FileNotFoundError, match="never"):
        _files.make_folders(tmp_path / "else")      # and not for ever


@pytest.mark.parametrize("call", [
    tp.CostModel.load, tp.Plan.load, tp.planners.load_piper, tp.planners.load_nodes, lambda path: tp.Dataset(path, 8, 1),
    lambda path: tp.Dataset(path, 8, 1, tokenizer=list), lambda path: tp.import_hf(path.parent), tp.load_checkpoint,
    lambda path: cli.main(["simulate", str(path)]), lambda path: cli.main(["compare", "--preset", "gpt2-124m", "--out", str(path)]),
    lambda path: Sweep(path, {"lr": [1]}, {}, dict).run(),
])  # fmt: skip
def test_a_file_of_which_the_disk_gives_no_more_is_named(call, tmp_path, monkeypatch, capsys):
    """A disk that fails, a mount whose server has lost the file: `open` is right, and what `read` says has no name."""
    path = tmp_path / "config.json"
    path.write_text("{}")
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(64))

    def failing(self, *args, **options):
        raise OSError(errno.EIO, "Input/output error")

    opened = Path.open
    monkeypatch.setattr(Path, "read_bytes", failing)
    monkeypatch.setattr(Path, "read_text", failing)
    monkeypatch.setattr(Path, "open", lambda self, *args, **options: Failing(opened(self, *args, **options)))
    try:
        call(tmp_path if call is tp.load_checkpoint else path)
    except OSError as error:
        assert error.errno == errno.EIO and str(tmp_path) in str(error)
    else:
        assert f"Input/output error: '{path}" in capsys.readouterr().err


class Failing:
    """A file that is open and cannot be read."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def read(self, *_):
        raise OSError(errno.EIO, "Input/output error")


def test_a_trace_of_a_step_that_is_not_the_last_is_not_called_so(tmp_path, capsys):
    """A resume that is killed leaves the trace of the run before it, and newer records."""
    plan, run = a_run(tmp_path)
    before = (run / "trace.json").read_bytes()
    tp.launch(plan, DATA, steps=3, out=run, resume=True, processes=False, progress=False).wait()
    assert cli.main(["view", str(run)]) == 0 and capsys.readouterr().out.startswith("measured timeline of the last step\n")
    (run / "trace.json").write_bytes(before)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 17')                               # killed while it wrote a record
    assert cli.main(["view", str(run)]) == 0
    assert capsys.readouterr().out.startswith("measured timeline of step 1 of the 3 that were done: what ended early left none\n")
    (run / "metrics.jsonl").unlink()
    assert cli.main(["view", str(run)]) == 0 and capsys.readouterr().out.startswith("measured timeline of the last step\n")
