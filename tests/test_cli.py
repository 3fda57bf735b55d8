"""The command line: parsing, help, exit codes, sweep, plan, simulate, train and resume."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import terapipe_c as tp
from terapipe_c import cli
from terapipe_c.arguments import build_parser
from terapipe_c.explain import format_slicing
from terapipe_c.sweep import Sweep, read_grid

COMMANDS = ("profile", "plan", "compare", "simulate", "train", "resume", "view", "sweep", "doctor")  # API.md


def run(capsys, *argv):
    code = cli.main([str(word) for word in argv])
    out = capsys.readouterr()
    return code, out.out, out.err


# ---- parsing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_parses(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0 and "example:" in out
    example = out.split("example:\n")[1].strip()
    assert example.startswith(f"terapipe {command}")
    args = build_parser(cli.COMMANDS).parse_args(example.split()[1:])
    assert args.command == command and callable(args.run)


def test_the_examples_work_one_after_the_other(capsys, monkeypatch, tmp_path):
    """As printed, but for sizes, which are made smaller: the same in all."""
    smaller = {"--steps 200": "--steps 2", "--steps 400": "--steps 3", "--n-embd 128": "--n-embd 16",
               "--seq-len 256": "--seq-len 16"}  # fmt: skip
    monkeypatch.chdir(tmp_path)
    tp.stdlib_corpus("corpus.txt", max_bytes=50_000)
    Path("runs").mkdir()
    for command in ("profile", "plan", "train", "resume", "view", "simulate", "doctor"):
        _, out, _ = run(capsys, command, "--help")
        example = out.split("example:\n")[1].strip()
        for words, fewer in smaller.items():
            example = example.replace(words, fewer)
        code, _, err = run(capsys, *example.split()[1:])
        assert code == 0 or command == "doctor", (example, err)
    assert Path("timeline.html").exists() and tp.load_checkpoint("runs/a").step == 3


@pytest.mark.parametrize("command", ["train", "resume", "sweep"])
def test_help_says_which_files_are_data(capsys, command):
    _, out, _ = run(capsys, command, "--help")
    said = " ".join(out.split("--data DATA")[-1].split())
    assert all(word in said for word in ("nanoGPT (uint16)", "llm.c", "beside its .idx", "a .npy, 1-D", "not compressed"))


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0 and out.split() == ["terapipe_c", tp.__version__]


def test_help_names_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(command in out for command in COMMANDS)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["dance"],
        ["plan", "--stages", "two"],
        ["plan", "--slicing", "[[1,"],
        ["plan", "--slicing", "[" * 20000],
        ["plan", "--partition", "[" * 20000],
        ["plan", "--slicing", "[(1, [" + "(" * 20000],
        ["plan", "--slicing", "[(1, [8] * 4)] * 1000000000000"],
        ["plan", "--slicing", "[(1, [8] * 100000)] * 1000000"],
        ["plan", "--slicing", "[(1, [8] + 8)]"],
        ["plan", "--slicing", "open('x')"],
        ["plan", "--partition", "[(0, True)]"],
        ["plan", "--memory-bytes", "-1"],
        ["train", "plan.json"],
        ["plan", "--partition", "3"],
        ["doctor", "--nonsense"],
        ["plan", "--costs", "analytic", "--out", ""],
    ],
)
def test_bad_arguments_exit_2(capsys, argv):
    code, out, err = run(capsys, *argv)
    assert code == 2 and "usage: terapipe" in err and not out
    assert len(err.splitlines()) == 2 and err.splitlines()[1].startswith(f"terapipe{' plan' if argv[:1] == ['plan'] else ''}")


@pytest.mark.parametrize("command", ["plan", "profile"])
def test_a_length_is_refused_by_its_own_name(capsys, command):
    """Not as the block size that a model without one gets from it."""
    code, _, err = run(capsys, command, "--seq-len", "0")
    assert code == 2 and "seq_len is 0: at least 1 would be right" in err


@pytest.mark.parametrize(
    "argv",
    ["plan --out", "plan --costs", "plan --preset", "plan --device", "plan --swap-folder", "profile --out", "compare --svg",
     "compare --out", "simulate path", "simulate --schedule", "simulate --html", "view path", "view p --trace", "resume folder",
     "resume f --plan", "resume f --init", "resume f --data", "train plan --out runs/a", "train --out", "sweep --out",
     "doctor --out"],
)  # fmt: skip
def test_what_is_given_but_empty_is_not_as_if_it_were_not_given(capsys, monkeypatch, tmp_path, argv):
    """An unset variable of the shell: `--out "$OUT"`."""
    monkeypatch.chdir(tmp_path)
    command, *words = argv.split()
    place = next((i for i, word in enumerate(words) if word in ("path", "folder", "plan")), None)
    name = words[-1] if place is None else words[place]
    words = [*words, ""] if place is None else [*words[:place], "", *words[place + 1:]]
    code, out, err = run(capsys, command, *words)
    assert code == 2 and f"argument {name}: it is empty" in err and not out, err
    assert not list(tmp_path.iterdir())


def test_a_number_of_bytes_is_asked_for_by_an_example(capsys):
    for text in ("16GB", "0.5"):                                    # half a byte became none, and was refused as 0
        code, _, err = run(capsys, "plan", "--memory-bytes", text)
        assert code == 2 and f"'{text}' is no number of bytes: one of at least 1, such as 16e9, would be right" in err


def test_values_are_read_as_the_api_wants_them():
    def parse(*words):
        return build_parser(cli.COMMANDS).parse_args(["plan", *words])

    assert parse("--slicing", "4").slicing == 4
    assert parse("--slicing", "[[1,[50,46]],[2,[96]]]").slicing == [(1, [50, 46]), (2, [96])]
    assert parse("--partition", "[[0,3],[3,8]]").partition == [(0, 3), (3, 8)]
    assert parse("--partition", "[(0, 3), (3, 8)]").partition == [(0, 3), (3, 8)]
    assert parse("--memory-bytes", "16e9").memory_bytes == 16_000_000_000
    train = build_parser(cli.COMMANDS).parse_args(
        "train p --data d --steps 5 --out o --lr 1e-3 --betas 0.9 0.99 --threads --fast".split()
    )
    assert cli._launch_options(train) == {"lr": 1e-3, "betas": [0.9, 0.99], "processes": False, "reproducible": False}
    train.betas = 0.9       # as a sweep's grid may say it: launch's own words tell what would be right
    assert cli._launch_options(train)["betas"] == 0.9


@pytest.mark.parametrize("slicing", [[(1, [96])] * 3, [(2, [40, 40, 16]), (1, [96])], [(1, [16] * 5 + [8, 8])] * 8,
                                     [(3, [32] * 3)]])
def test_a_slicing_is_read_as_a_plan_prints_it(slicing):
    parsed = build_parser(cli.COMMANDS).parse_args(["plan", "--slicing", format_slicing(slicing)])
    assert parsed.slicing == slicing
    assert build_parser(cli.COMMANDS).parse_args(["plan", "--slicing", str(slicing)]).slicing == slicing


@pytest.mark.parametrize(
    "argv, message",
    [
        (["simulate"], "either a file or --schedule"),
        (["view", "x.json"], "x.json"),
        (["train", "--out", "runs/x"], "--data and --steps"),
        (["plan", "--peak-flops", "1e12"], "give --devices too"),
        (["plan", "--device-memory-bytes", "1e9"], "--device-memory-bytes describes a cluster: give --devices too"),
        (["view", "/nowhere/plan.json", "--svg", "t.svg"], "/nowhere/plan.json"),
        (["sweep", "--out", "s.jsonl"], "grid is empty"),
        (["sweep", "--out", "s.jsonl", "--grid", "colour=red"], "no option 'colour'"),
        (["sweep", "--out", "s.jsonl", "--grid", "/nowhere/grid.json"], "/nowhere/grid.json"),
        (["sweep", "--out", "s.jsonl", "--grid", "costs=analytic,,profile"], "value 1 of costs is empty"),
        (["resume", "/nowhere/run", "--steps", "5"], "/nowhere/run"),
        (["plan", "--swap-folder", "/nowhere"], "swap_folder is '/nowhere': a folder that can be written would be right"),
        (["plan", "--devices", "2", "--costs", "x" * 300], "File name too long"),
        (["resume", "x" * 300, "--steps", "5"], "File name too long"),
    ],
)
def test_bad_requests_exit_2_and_say_why(capsys, monkeypatch, tmp_path, argv, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TERAPIPE_SWAP_DIR", raising=False)
    code, out, err = run(capsys, *argv)
    assert code == 2 and message in err and err.startswith(f"terapipe {argv[0]}:") and not out, err
    assert "TERAPIPE_SWAP_DIR" not in os.environ
    assert not list(tmp_path.iterdir())


def test_kinds_of_errors_and_their_codes():
    for error, bad in (
        (tp.InfeasibleError("x"), True),
        (ValueError("x"), True),
        (FileExistsError(17, "x"), True),
        (PermissionError(13, "x"), True),
        (OSError(36, "too long"), True),
        (OSError(40, "links in a circle"), True),
        (OSError(30, "read-only"), True),
        (RuntimeError("x"), False),
        (MemoryError(), False),
        (OSError(28, "full"), False),
        (TimeoutError("x"), False),
        (KeyError("x"), False),
    ):
        assert cli._is_bad_request(error) is bad, error
    assert cli._told(KeyError("x")) == "KeyError: 'x'"


def test_module_and_command_are_the_same(tmp_path):
    module = subprocess.run(
        [sys.executable, "-m", "terapipe_c", "plan", "--slicing", "x"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(tp.__file__).parents[1])},
    )
    assert module.returncode == 2 and "neither a number of slices" in module.stderr


def test_an_interrupt_before_all_is_imported_is_no_traceback(tmp_path):
    (tmp_path / "argparse.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    paths = f"{tmp_path}{os.pathsep}{Path(tp.__file__).parents[1]}"
    for command in ([sys.executable, "-m", "terapipe_c"], [str(Path(sys.executable).with_name("terapipe"))]):
        ended = subprocess.run([*command, "doctor"], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
        assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "terapipe: interrupted\n")


def test_a_closed_pipe_is_no_failure(tmp_path):
    code = "import sys; from terapipe_c import cli; sys.exit(cli.main(['doctor']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(tp.__file__).parents[1])},
    )
    process.stdout.close()
    assert process.wait(60) == 0 and b"Traceback" not in process.stderr.read()
    process.stderr.close()


@pytest.mark.parametrize("every", [None, 0])
def test_a_training_that_nobody_reads_stops_and_says_how_to_go_on(tmp_path, every):
    """`terapipe train ... --json | head -1`: what was asked for was not done."""
    tp.stdlib_corpus(tmp_path / "corpus.txt", max_bytes=50_000)
    words = ["train", *SMALL, "--stages", "1", "--data", "corpus.txt", "--steps", "100000", "--threads", "--json", "--out", "a"]
    words += [] if every is None else ["--checkpoint-every", str(every)]
    process = subprocess.Popen(
        [sys.executable, "-m", "terapipe_c", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(tp.__file__).parents[1])},
    )  # fmt: skip
    assert json.loads(process.stdout.readline())["step"] == 0
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 1 and "Traceback" not in said, said
    if every == 0:
        assert said.endswith("; there is no checkpoint\n"), said
        return
    step = tp.load_checkpoint(tmp_path / "a").step
    assert f"stopped after {step} of 100000 steps; `terapipe resume {tmp_path}/a --steps 100000` goes on" in said


def test_streams_that_are_closed_or_full(tmp_path):
    def streams(words, redirect):
        line = f"{sys.executable} -m terapipe_c {words} {redirect}"
        return subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=tmp_path,
                              env={**os.environ, "PYTHONPATH": str(Path(tp.__file__).parents[1])})  # fmt: skip

    simulate = "simulate --schedule gpipe --ranks 2 --micro-batches 2"
    assert streams(simulate, ">&-").returncode == 0
    full = streams(simulate, ">/dev/full")
    assert full.returncode == 1 and full.stderr == "terapipe simulate: [Errno 28] No space left on device\n"
    assert streams("plan --what", "2>/dev/full").returncode == 2
    deaf = streams("plan --n-layer 2 --n-head 2 --n-embd 32 --seq-len 32 --batch 2 --json", "2>/dev/full")
    assert deaf.returncode == 0 and json.loads(deaf.stdout)["step_time_s"] > 0


def test_help_says_the_defaults_of_launch():
    import inspect

    from terapipe_c.arguments import LAUNCH_NUMBERS

    defaults = {name: value.default for name, value in inspect.signature(tp.launch).parameters.items()}
    assert defaults["min_lr"] is None
    for name, (kind, text) in LAUNCH_NUMBERS.items():
        assert name == "min_lr" or isinstance(defaults[name], kind)
        assert f"(default {'lr / 10' if name == 'min_lr' else defaults[name]})" in text


def test_flags_replace_fields_of_a_preset_and_of_a_device(capsys):
    flags = "plan --planner uniform --devices 2 --batch 2 --json --preset gpt2-124m --n-layer 3 --block-size 64".split()
    code, out, err = run(capsys, *flags, "--untied")
    assert code == 0 and json.loads(out)["stages"][-1][1] == 2 * 3 + 2, err
    plain = json.loads(out)["step_time_s"]
    code, out, err = run(capsys, *flags, "--device", "h100")
    assert code == 0 and json.loads(out)["step_time_s"] < plain / 50, err
    code, out, err = run(capsys, *flags, "--device", "h100", "--device-memory-bytes", "1e6")
    assert code == 2 and "may use 1000000" in err
    for wrong, words in (("--device abacus --devices 2", "there is no device 'abacus'"), ("--device h100", "give --devices too")):
        code, _, err = run(capsys, "plan", *wrong.split())
        assert code == 2 and words in err


# ---- sweep -------------------------------------------------------------------------------------------------------------


def test_grids_are_read_from_words_and_files(tmp_path):
    known = {"stages", "slicing", "schedule", "lr"}
    assert read_grid(["stages=1,2e0", "schedule=gpipe,1f1b", "slicing=2,[[1,[50,46]]]"], known) == {
        "stages": [1, 2],
        "schedule": ["gpipe", "1f1b"],
        "slicing": [2, [[1, [50, 46]]]],
    }
    assert read_grid(["slicing=((1,(50,46)),),2"], known) == {"slicing": ["((1,(50,46)),)", 2]}, "brackets of any kind"
    (tmp_path / "grid.json").write_text('{"lr": [0.1, 0.2]}')
    assert read_grid([str(tmp_path / "grid.json"), "stages=3"], known) == {"lr": [0.1, 0.2], "stages": [3]}
    assert read_grid(["stages=1,2", "lr=0.1", "stages=2,4"], known) == {"stages": [1, 2, 4], "lr": [0.1]}, "no value is dropped"
    for content, message in (('{"lr": 1}', "list of at least one"), ("[1]", "JSON object"), ("{", "grid is NAME")):
        (tmp_path / "grid.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            read_grid([str(tmp_path / "grid.json")], known)
    (tmp_path / "grid.json").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"grid\.json: a grid is NAME.*no UTF-8"):
        read_grid([str(tmp_path / "grid.json")], known)


def test_a_sweep_writes_failures_too_and_resumes(tmp_path):
    path, calls = tmp_path / "sub" / "rows.jsonl", []

    def trial(point):
        calls.append(point)
        if point["b"] == "bad":
            raise tp.InfeasibleError("rank 1 is 5 bytes short")
        return {"sum": point["a"] * 2}

    def sweep(base=None):
        return Sweep(path, {"a": [1, 2], "b": ["good", "bad"]}, base or {"x": 0}, trial)

    assert sweep().run() == {"done": 2, "failed": 2, "skipped": 0}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["trial"] for row in rows] == list(sweep().points()) == calls and len(calls) == 4
    assert rows[0]["result"] == {"sum": 2} and rows[1]["error"] == {
        "type": "InfeasibleError",
        "message": "rank 1 is 5 bytes short",
    }
    assert sweep().run() == {"done": 0, "failed": 0, "skipped": 4} and len(calls) == 4
    assert sweep().run(retry_failed=True) == {"done": 0, "failed": 2, "skipped": 2}
    assert sweep({"x": 1}).run()["skipped"] == 0  # another base is another trial
    lines = path.read_text().splitlines()
    for written in (3, 30):  # characters of its third row, when it was killed
        path.write_text("\n".join(lines[:2]) + "\n" + lines[2][:written])
        assert sweep().run() == {"done": 1, "failed": 1, "skipped": 2}
        assert [json.loads(line)["trial"] for line in path.read_text().splitlines()] == list(sweep().points())
    for foreign in (b"not a row\n" + lines[0].encode() + b"\n", b"no row, and the only line", b"a note\n", b"\xff\xfe", b"7",
                    b'{"trial": 7}'):
        path.write_bytes(foreign)
        with pytest.raises(ValueError, match="line 1: no row of a sweep"):
            sweep().run()
        assert path.read_bytes() == foreign  # what is not a sweep's is not cut off, nor written on


# ---- the whole way -----------------------------------------------------------------------------------------------------

SMALL = "--n-layer 2 --n-head 2 --n-embd 32 --seq-len 48 --batch 2 --costs analytic --planner uniform --schedule gpipe".split()


def test_a_plan_as_json_says_what_it_saves_and_how_many_replicas_it_has(capsys):
    code, out, err = run(capsys, "plan", *SMALL, "--devices", "4", "--stages", "2", "--data-parallel", "2", "--recompute", "ffn",
                         "--json")  # fmt: skip
    assert code == 0, err
    plan = json.loads(out)
    assert (plan["ranks"], plan["data_parallel"], plan["chunks"]) == (2, 2, 1)
    assert plan["recompute"] == [False, False, True, False, True, False] and not any(plan["swap"])
    assert not plan["executable"] and "data_parallel = 2" in plan["why_not_executable"] and len(plan["digest"]) == 16


def test_plan_simulate_view(capsys, tmp_path):
    plan = tmp_path / "plan.json"
    code, out, err = run(capsys, "plan", *SMALL, "--stages", "2", "--slicing", "3", "--json", "--out", plan)
    assert code == 0, err
    result = json.loads(out)
    assert len(result["stages"]) == 2 and result["step_time_s"] > 0 and result["saved"] == str(plan)
    code, out, err = run(capsys, "plan", *SMALL, "--stages", "2")
    assert code == 0 and out.strip(), err
    code, out, err = run(capsys, "simulate", plan, "--json")
    assert code == 0 and abs(json.loads(out)["makespan_s"] / result["step_time_s"] - 1) < 1e-6, (out, err)
    assert json.loads(out)["peak_memory_bytes"] == result["peak_memory_bytes"] and min(result["peak_memory_bytes"]) > 0
    code, out, err = run(
        capsys, "view", plan, "--svg", tmp_path / "t.svg", "--html", tmp_path / "t.html", "--trace", tmp_path / "t.json"
    )
    assert code == 0 and "<svg" in (tmp_path / "t.svg").read_text() and json.loads((tmp_path / "t.json").read_text()), (
        err
    )
    reader, writer = os.pipe()
    os.write(writer, plan.read_bytes())     # some 6 kB, which a pipe holds
    os.close(writer)
    code, out, err = run(capsys, "view", f"/dev/fd/{reader}")
    assert code == 0 and out.startswith("plan\nTimeline: 2 ranks"), err
    os.close(reader)
    code, _, err = run(capsys, "plan", *SMALL, "--stages", "99")
    assert code == 2 and "99" in err
    plan.write_text('{"format": "something else"}')
    code, _, err = run(capsys, "simulate", plan)
    assert code == 2 and "plan.json" in err


def test_simulate_a_named_schedule_and_its_text(capsys, tmp_path):
    code, out, err = run(capsys, "simulate", "--schedule", "1f1b", "--ranks", "4", "--micro-batches", "8", "--json")
    assert code == 0 and json.loads(out)["makespan_s"] == pytest.approx(3.0 * (8 + 4 - 1)), err
    assert json.loads(out)["peak_memory_bytes"] is None
    (tmp_path / "p.txt").write_text(str(tp.schedules.gpipe(4, 8)))
    code, out, err = run(capsys, "simulate", tmp_path / "p.txt")
    assert code == 0 and "makespan_s" in out and "33" in out and "slice skew 0" in out, err
    code, out, err = run(capsys, "view", tmp_path / "p.txt", "--fwd", "2", "--bwd", "4")
    assert code == 0 and out.startswith("program\nTimeline: ") and "66" in out and "rank 3" in out, err
    assert json.loads(run(capsys, "view", tmp_path / "p.txt", "--json")[1])["makespan_s"] == 33
    (tmp_path / "p.txt").write_text("0F0.0 0R0.0 0B0.0\n")      # what is recomputed is a forward: it was refused for want of a flag
    code, out, err = run(capsys, "simulate", tmp_path / "p.txt", "--fwd", "4", "--bwd", "5", "--json")
    assert code == 0 and json.loads(out)["makespan_s"] == 13, err
    code, _, err = run(capsys, "simulate", "--schedule", "waltz")
    assert code == 2 and "waltz" in err


def test_named_schedules_of_several_chunks(capsys):
    for name, makespan in (("hanayo", "28"), ("interleaved", "27"), ("looped-bfs", "27"),
                           ("sliced-1f1b", "15"), ("1f1b", "15"), ("zb_h1", "13")):
        code, out, err = run(capsys, "simulate", "--schedule", name, "--ranks", 2, "--micro-batches", 4)
        assert code == 0 and f"makespan_s         {makespan}\n" in out, (name, out, err)
    for name, word in (("Program", "one of 1f1b"), ("brute-force", "chimera, dualpipe-v")):
        code, _, err = run(capsys, "simulate", "--schedule", name, "--ranks", 2)
        assert code == 2 and word in err
    code, out, err = run(capsys, "simulate", "--schedule", "chimera", "--ranks", 4, "--micro-batches", 4, "--fwd", 1, "--bwd", 1)
    assert code == 0 and "makespan_s         10\n" in out, (out, err)
    code, _, err = run(capsys, "simulate", "--schedule", "chimera", "--ranks", 3)
    assert code == 2 and "ranks is 3: Chimera has an even number" in err
    code, _, err = run(capsys, "simulate", "--schedule", "hanayo", "--chunks", 3)
    assert code == 2 and "--chunks is 3" in err


def test_what_would_be_ignored_or_lost_is_refused_first(capsys, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe")
    plan = (tmp_path / "plan.json").as_posix()
    assert run(capsys, "plan", "--n-layer", 1, "--seq-len", 8, "--stages", 1, "--costs", "analytic", "--out", plan)[0] == 0
    for argv, word in (
        (["train", plan, "--stages", 2, "--data", "x", "--steps", 1, "--out", "x"], "--stages would change nothing"),
        (["train", plan, "--batch", 4, "--data", "x", "--steps", 1, "--out", "x"], "--batch would change nothing"),
        (["train", plan, "--batch", 8, "--data", "x", "--steps", 1, "--out", "x"], "--batch would change nothing"),
        (["profile", "--out", tmp_path / "none/costs.json"], "no such folder to write into"),
        (["profile", "--budget-s", -1], "budget_s is -1"),
        (["profile", "--ranks", 0], "ranks is 0"),
        (["view", tmp_path / "text.txt", "--svg", "x"], "text.txt is neither a plan nor a program: byte 0"),
        (["simulate", plan, "--fwd", 1], "--fwd would change nothing: that is for a program or a named schedule"),
        (["view", plan, "--bwd", 2, "--comm", 0], "--bwd, --comm would change nothing"),
        (["simulate", plan, "--micro-batches", 8], "--micro-batches would change nothing"),
        (["simulate", "--schedule", "1f1b", "--chunks", 2], "--chunks would change nothing"),
        (["simulate", "--schedule", "1f1b", "--split", 1], "--split would change nothing"),
        (["plan", "--seq-len", 0, "--block-size", 8, "--costs", "analytic"], "seq_len is 0"),
        (["plan", "--memory-bytes", "lots"], "'lots' is no number of bytes"),
    ):
        code, _, err = run(capsys, *argv)
        assert code == 2 and word in err, err


def test_sweep_plans(capsys, tmp_path):
    rows = tmp_path / "rows.jsonl"
    argv = ["sweep", *SMALL, "--grid", "stages=1,2,99", "--grid", "slicing=1,2", "--out", rows, "--json"]
    code, out, err = run(capsys, *argv)
    assert code == 0 and json.loads(out) == {"done": 4, "failed": 2, "skipped": 0, "rows": str(rows)}, err
    assert json.loads(run(capsys, *argv)[1])["skipped"] == 6
    table = [json.loads(line) for line in rows.read_text().splitlines()]
    assert all(row["result"]["step_time_s"] > 0 for row in table if row["status"] == "done")
    assert all("99" in row["error"]["message"] for row in table if row["status"] == "failed")


def test_a_sweep_that_plans_only_refuses_what_is_for_training(capsys, tmp_path):
    for given, words in (
        (["--grid", "lr=1e-3,nan"], "lr would change nothing"),  # rows that are done, and all the same plan
        (["--grid", "stages=1,2", "--data", "corpus.txt", "--seed", "0"], "data, seed would change nothing"),
    ):
        code, _, err = run(capsys, "sweep", *SMALL, *given, "--out", tmp_path / "rows.jsonl")
        assert code == 2 and words in err and "--train" in err, err
    assert not (tmp_path / "rows.jsonl").exists()


def test_train_resume_view(capsys, tmp_path):
    data, plan, out_folder = tmp_path / "corpus.txt", tmp_path / "plan.json", tmp_path / "run"
    tp.stdlib_corpus(data, max_bytes=100_000)
    assert run(capsys, "plan", *SMALL, "--stages", "2", "--slicing", "2", "--out", plan)[0] == 0
    code, out, err = run(
        capsys, "train", plan, "--data", data, "--steps", "4", "--out", out_folder, "--checkpoint-every", "2", "--json"
    )
    assert code == 0, err
    records = [json.loads(line) for line in out.splitlines()]
    assert [r["step"] for r in records[:-1]] == sorted(r["step"] for r in records[:-1]) and len(records) == 5
    assert Path(records[-1]["checkpoint"]).exists() and records[-1]["report"]["predicted_step_time_s"] > 0
    config = json.loads((out_folder / "config.json").read_text())       # of a resume that was killed before its first checkpoint
    (out_folder / "config.json").write_text(json.dumps({**config, "lr": 0.25, "betas": [0.5, 0.5], "seed": 7}))
    code, out, err = run(capsys, "resume", out_folder, "--steps", "6", "--json")
    assert code == 0 and len(out.splitlines()) == 3, (out, err)
    rates = [record["lr"] for record in (*records[:4], *map(json.loads, out.splitlines()[:2]))]
    told = f"the cosine of the learning rate ends at step 6 now, not at 4: it goes on with {rates[4]:.3g}, after {rates[3]:.3g}"
    assert rates[3] < rates[4] < 6e-4 > rates[5] and told in err
    assert tp.load_checkpoint(out_folder).step == 6
    code, out, err = run(capsys, "resume", out_folder, "--steps", "8", "--init", out_folder)
    assert code == 2 and "none would be right" in err
    code, out, err = run(capsys, "resume", out_folder, "--steps", "7", "--lr", "1e-3", "--quiet")
    assert code == 0 and "Warning" not in err, err
    code, out, err = run(capsys, "resume", f"{out_folder}/checkpoints", "--steps", "9", "--data", data)
    assert code == 2 and "checkpoints has no plan.json: a run's folder" in err
    code, out, err = run(capsys, "resume", out_folder, "--steps", "5", "--quiet")
    assert code == 0 and "nothing to do: 7 steps are done in the newest checkpoint" in err and "cosine" not in err
    code, _, err = run(capsys, "view", out_folder, "--html", tmp_path / "t.html")
    assert code == 0 and (tmp_path / "t.html").exists(), err
    code, _, err = run(capsys, "train", plan, "--data", data, "--steps", "1", "--out", out_folder)
    assert code == 2 and "run" in err
    code, _, err = run(
        capsys, "train", plan, "--data", tmp_path / "nowhere.txt", "--steps", "1", "--out", tmp_path / "b"
    )
    assert code == 2 and "nowhere.txt" in err


def test_a_folder_whose_name_the_terminal_cannot_show(tmp_path):
    """Neither the last line nor the report may fail for it, once the training went well."""
    name = os.fsdecode(b"caf\xc3\xa9 \xff")
    tp.stdlib_corpus(tmp_path / "corpus.txt", max_bytes=5000)
    words = ("--n-layer 1 --n-head 1 --n-embd 8 --seq-len 16 --batch 1 --stages 1 --costs analytic --data corpus.txt --steps 1 "
             "--threads")
    ended = subprocess.run([sys.executable, "-m", "terapipe_c", "train", *words.split(), "--quiet", "--out", name], cwd=tmp_path,
                           env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)},
                           capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert rb"caf\xe9 \udcff" in ended.stdout
    costs = tp.CostModel.analytic(tp.GPTConfig(1, 1, 8, 256, 16), tp.Cluster.local())
    plan = tp.plan(costs.model, tp.Cluster.local(), 1, 16, costs, planner="uniform", stages=1)
    run = tp.launch(plan, data=tmp_path / "corpus.txt", steps=1, out=tmp_path / "b" / name, processes=False, progress=False)
    run.report().save(tmp_path / "report.html")
    assert rb"\udcff" in (tmp_path / "report.html").read_bytes()


def test_numbers_of_slices_and_blocks_are_not_rounded(capsys):
    few = "--n-layer 1 --n-head 1 --n-embd 8 --seq-len 16 --batch 2 --stages 2 --costs analytic".split()
    for flag, value, message in (("--slicing", "[[1.5, [16]], [1, [16]]]", "slicing[0]'s micro-batch is 1.5"),
                                 ("--slicing", "[[2, [8.9, 8]]]", "slicing[0]'s slice 0 is 8.9"),
                                 ("--partition", "[[0, 2.7], [2, 4]]", "partition[0] is 2.7")):
        code, _, err = run(capsys, "plan", *few, flag, value)
        assert code == 2 and message in err, err


def test_damaged_files_of_a_run_folder_are_named(capsys, tmp_path, monkeypatch):
    """And a damaged metrics.jsonl, of which nothing is needed, stops no resume."""
    monkeypatch.chdir(tmp_path)
    tp.stdlib_corpus("corpus.txt", max_bytes=5000)
    few = "--n-layer 1 --n-head 1 --n-embd 8 --seq-len 16 --batch 1 --stages 1 --costs analytic".split()
    again = ["--threads", "--quiet"]
    assert run(capsys, "train", *few, "--data", "corpus.txt", "--steps", 2, "--out", "a", *again)[0] == 0
    wrongs = {"config.json": (b"{", b"\xff{}", b"[]", b"{}"),
              "trace.json": (b"", b"\xb8", b"{}", b'{"rows": 3}', b'{"rows": [3]}', b'{"rows": [[3]]}')}
    for name, wrong in wrongs.items():
        good = Path("a", name).read_bytes()
        for content in wrong:
            Path("a", name).write_bytes(content)
            words = ("view", "a", "--svg", "a.svg") if name == "trace.json" else ("resume", "a", "--steps", 3, *again)
            code, _, err = run(capsys, *words)
            assert code == 2 and f"{name} is damaged" in err, (name, content, err)
        Path("a", name).write_bytes(good)
    lines = Path("a/metrics.jsonl").read_bytes().splitlines(keepends=True)
    Path("a/metrics.jsonl").write_bytes(lines[0] + b"\xfe\x00" + lines[1][5:])
    assert run(capsys, "resume", "a", "--steps", 3, *again)[0] == 0
    assert [json.loads(line)["step"] for line in Path("a/metrics.jsonl").read_text().splitlines()] == [0, 2]


def test_two_pictures_want_two_files(capsys, tmp_path):
    path = str(tmp_path / "a.svg")
    code, _, err = run(capsys, "simulate", "--schedule", "gpipe", "--svg", path, "--html", f"{tmp_path}/./a.svg")
    assert code == 2 and "--svg and --html are both" in err and not os.path.exists(path)


@pytest.mark.parametrize("words", [["p.json", "--plan", "q.json"], ["--plan", "q.json", "p.json"]])
def test_a_plan_file_is_given_once(capsys, words):
    code, _, err = run(capsys, "train", *words, "--data", "x", "--steps", "1", "--out", "y")
    assert code == 2 and "p.json" in err and "q.json" in err and "one of them would be right" in err
    for one in (["--plan", "q.json"], ["q.json"]):
        code, _, err = run(capsys, "train", *one, "--data", "x", "--steps", "1", "--out", "y")
        assert code == 2 and "'q.json'" in err


def test_a_file_of_somebody_else_is_not_replaced(capsys, tmp_path, monkeypatch):
    """By what this command writes again and again: refused before the work; its own are."""
    monkeypatch.chdir(tmp_path)
    model = ["--n-layer", 1, "--n-head", 1, "--n-embd", 8, "--vocab-size", 9, "--seq-len", 8, "--batch", 1, "--stages", 1]
    plan, profile = ["plan", *model, "--planner", "uniform", "--out"], ["profile", *model[:10], "--out"]
    simulate = ["simulate", "--schedule", "gpipe"]
    assert [run(capsys, *plan, "a.json")[0] for _ in range(2)] == [cli.DONE] * 2
    for argv, name in ((plan, "corpus.txt"), (profile, "corpus.txt"), (profile, "a.json"), ([*simulate, "--svg"], "a.json"),
                       ([*simulate, "--html"], "a.json"), ([*simulate, "--trace"], "corpus.txt")):
        Path("corpus.txt").write_text("words")
        before = Path(name).read_bytes()
        code, _, error = run(capsys, *argv, name)
        assert code == cli.BAD_REQUEST and "another name would be right" in error, (argv, error)
        assert Path(name).read_bytes() == before
    for flag in ("--svg", "--html", "--trace"):
        Path(flag).touch()
        assert run(capsys, *simulate, flag, f"./{flag}")[0] == run(capsys, *simulate, flag, f"./{flag}")[0] == cli.DONE
