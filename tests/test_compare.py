"""tp.compare and `terapipe compare`: one row a planner, errors told, files new, pictures that are pictures."""
import dataclasses
import html.parser
import importlib
import inspect
import json
import os
import signal
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import cli
from terapipe_c._files import write_new
from terapipe_c.compare import _idle
from terapipe_c.planning.request import PLANNERS

MODEL = tp.GPTConfig(n_layer=4, n_head=2, n_embd=16, vocab_size=64, block_size=32)
CLUSTER = tp.Cluster(num_devices=4, memory_bytes=1e9, link_latency_s=1e-6, link_bandwidth_Bps=1e9, peak_flops=2e9)


@pytest.fixture(scope="module")
def comparison():
    return tp.compare(MODEL, CLUSTER, batch=4, seq_len=32, stages=3)


def test_every_planner_has_a_row_that_is_its_plan(comparison):
    assert [row.planner for row in comparison] == list(PLANNERS) and len(comparison) == len(PLANNERS)
    for row in comparison:
        assert row.error == "" and row.executable and row.planning_time_s > 0
        assert row.plan == tp.plan(MODEL, CLUSTER, batch=4, seq_len=32, stages=3, planner=row.planner)
        assert row.plan.planner == row.planner
    steps = [row.plan.step_time_s for row in comparison.ranked]
    assert steps == sorted(steps) and comparison.best.step_time_s == steps[0]
    assert comparison["auto"].plan.step_time_s <= steps[0] * (1 + 1e-9)
    with pytest.raises(KeyError):
        comparison["magic"]


@pytest.mark.parametrize("name", ["bpipe", "pipedream", "chimera", "zb-v"])
def test_a_schedule_that_is_given_is_named_in_the_log(name):
    model = dataclasses.replace(MODEL, tie_weights=False)      # pipedream's
    text = repr(tp.compare(model, CLUSTER, batch=4, seq_len=32, planners=["auto"], schedule=name, stages=2))
    lines = [line.removeprefix("auto: ") for line in text.splitlines() if line.startswith("auto: ")]
    assert lines[-1].startswith("best: ") and any(f"by {name}: " in line or f"schedule {name}: asked" in line for line in lines)


def test_it_prints_as_a_table(comparison):
    text = repr(comparison).splitlines()
    assert text[1].split()[:2] == ["planner", "step"] and len(text) >= 2 + len(PLANNERS)
    assert [line.split()[0] for line in text[2:2 + len(PLANNERS)]] == [row.planner for row in comparison.ranked]
    assert "+0.00 %" in text[2] and any(line.startswith("auto: best:") for line in text)

    class Cells(html.parser.HTMLParser):
        cells = 0

        def handle_starttag(self, tag, attributes):
            self.cells += tag == "td"

    counter = Cells()
    counter.feed(comparison._repr_html_())
    assert counter.cells == 11 * len(PLANNERS) and "<svg" in comparison._repr_html_()


def test_json_holds_it_all_and_files_are_not_overwritten(comparison, tmp_path):
    path = comparison.to_json(tmp_path / "c.json")
    data = json.loads(path.read_text())
    assert data["format"] == "terapipe_c.comparison" and data["model"] == MODEL.to_dict() and data["batch"] == 4
    for stored, row in zip(data["rows"], comparison, strict=True):
        assert stored["planner"] == row.planner and stored["digest"] == row.plan.digest and stored["error"] is None
        assert stored["step_time_s"] == row.plan.step_time_s and stored["peak_memory_bytes"] == row.plan.peak_memory_bytes
        assert sum(stored["bubbles"].values()) == pytest.approx(3 * stored["step_time_s"] - sum(stored["busy_s"]))
    svg = comparison.to_svg(tmp_path / "c.svg")
    for write, target in ((comparison.to_json, path), (comparison.to_svg, svg)):
        before = target.read_bytes()
        with pytest.raises(FileExistsError):
            write(target)
        assert target.read_bytes() == before
        write(target, overwrite=True)


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_comes_meanwhile_stays(links, tmp_path, monkeypatch):
    """Of two that write a new file at once one is refused, and nothing is left beside it."""
    target, sync = tmp_path / "plans.svg", os.fsync

    def refuse(*names):
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "fsync", lambda handle: sync(handle) or target.write_text("another's"))
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(FileExistsError, match="the file is there: another name would be right"):
        write_new(target, "ours")
    assert target.read_text() == "another's" and os.listdir(tmp_path) == ["plans.svg"]
    monkeypatch.setattr(os, "fsync", sync)
    for name, new in (("plans.svg", False), ("more.svg", True)):
        assert write_new(tmp_path / name, "ours", overwrite=not new).read_text() == "ours"
    assert sorted(os.listdir(tmp_path)) == ["more.svg", "plans.svg"]


def test_the_picture_is_to_scale(comparison):
    """Bars are as long as their steps, their parts sum to them, and every name is there."""
    root = ElementTree.fromstring(comparison.svg())
    space = "{http://www.w3.org/2000/svg}"
    words = ["".join(text.itertext()) for text in root.iter(f"{space}text")]
    assert all(name in words for name in PLANNERS)
    keys = [rect for rect in root.iter(f"{space}rect") if rect.get("width") == rect.get("height") == "10"]    # a square and a word
    assert len(keys) > 2 and len({(key.get("x"), key.get("y")) for key in keys}) == len(keys)
    bars: dict[float, float] = {}
    for rect in root.iter(f"{space}rect"):
        if rect.get("height") == "16":
            y = float(rect.get("y"))
            bars[y] = bars.get(y, 0.0) + float(rect.get("width"))
    widths = [bars[y] for y in sorted(bars)]
    steps = [row.plan.step_time_s for row in comparison.ranked]
    assert len(widths) == len(steps)
    for width, step in zip(widths, steps, strict=True):
        assert width / max(widths) == pytest.approx(step / steps[-1], abs=2e-3)


def test_the_picture_says_what_does_not_run_as_it_is():
    options = {"planners": ["uniform"], "stages": 2}
    for more, note in (({}, None), ({"data_parallel": 2}, "runs, not reproducibly")):
        picture = tp.compare(MODEL, CLUSTER, 4, 32, **options, **more).svg()
        words = ["".join(word.itertext()) for word in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
        assert ([word for word in words if "run" in word and word != "uniform"] == ([note] if note else [])), words
        assert "F forward" in words and "work" in words


def test_what_all_planners_would_say_is_said_once():
    options = {"planners": ["uniform", "autopipe", "dapple"], "stages": 2, "data_parallel": 2}
    notes = tp.compare(MODEL, CLUSTER, 4, 32, **options).notes()
    assert [note.partition(": ")[0] for note in notes if "reproducibly" in note] == ["uniform, autopipe, dapple"]
    options = {"planners": ["uniform", "dapple", "auto"], "stages": 4, "schedule": "1f1b", "shard_optimizer": True}
    notes = tp.compare(MODEL, CLUSTER, 4, 32, **options).notes()
    assert [note.partition(": ")[0] for note in notes if "nobody to share moments with" in note] == ["uniform, dapple, auto"]


def test_a_planner_without_a_plan_says_why():
    with pytest.raises(tp.InfeasibleError) as refused:
        tp.plan(MODEL, CLUSTER, batch=4, seq_len=32, planner="uniform", stages=3, memory_bytes=1)
    less = refused.value.memory_bytes - 1
    tight = tp.compare(MODEL, CLUSTER, 4, 32, planners=["uniform", "auto"], stages=3, memory_bytes=less)
    assert tight["uniform"].plan is None and "1 bytes short" in tight["uniform"].error and not tight["uniform"].executable
    assert tight.best == tight["auto"].plan and "uniform: no plan: rank" in repr(tight) and "no plan: uniform" in tight.svg()
    none = tp.compare(MODEL, CLUSTER, 4, 32, planners=["uniform", "terapipe"], stages=3, memory_bytes=1000)
    hanayo = tp.compare(MODEL, CLUSTER, 4, 32, planners=["uniform"], stages=2, schedule="hanayo")
    assert "uniform: hanayo's placement is its authors', its order is ours" in repr(hanayo)
    assert none.best is None and none.ranked == [] and "bytes" in repr(none) and "<svg" in none.svg()
    assert json.loads(json.dumps(none.to_dict()))["rows"][0]["error"]
    chunked = tp.compare(MODEL, CLUSTER, 4, 32, planners=["uniform", "dapple"], stages=2, chunks=2)
    assert chunked["uniform"].plan.chunks == 2 and "one stage a rank" in chunked["dapple"].error


def test_it_takes_every_argument_of_plan():
    taken = set(inspect.signature(tp.plan).parameters) - {"planner"}
    request = {"stages": 2, "backend": "cpu", "dtype": "float32"}
    rows = tp.compare(MODEL, CLUSTER, 4, 32, planners=["uniform"], **request)
    assert rows["uniform"].plan == tp.plan(MODEL, CLUSTER, 4, 32, planner="uniform", **request)
    for name in sorted(taken - {"model", "cluster", "batch", "seq_len", "costs"}):
        given = {**request, name: request.get(name, "auto" if name == "schedule" else None)}
        assert len(tp.compare(MODEL, CLUSTER, 4, 32, planners=["uniform"], **given)) == 1
    with pytest.raises(ValueError, match="backend is 'tpu'"):
        tp.compare(MODEL, CLUSTER, 4, 32, backend="tpu")


def test_what_costs_nothing_is_json_too(tmp_path):
    zeros = np.zeros((5, 5))
    costs = tp.CostModel.from_table(zeros, zeros, granularity=8)
    free = tp.compare(MODEL, CLUSTER, 4, 32, costs, planners=["uniform", "auto"], stages=2)
    row = json.loads(free.to_json(tmp_path / "free.json").read_text(), parse_constant=lambda word: pytest.fail(word))["rows"][0]
    assert row["step_time_s"] == 0 and row["tokens_per_s"] is None
    assert ElementTree.fromstring(free.svg()) is not None and "0 s" in repr(free)


@pytest.mark.parametrize("change,word", [
    ({"planners": ["autopipe", "magic"]}, "magic"), ({"planners": []}, "empty"), ({"planner": "auto"}, "planners"),
    ({"stages": 0}, "stages"), ({"batch": 0}, "batch"), ({"speed": 3}, "speed"), ({"memory_bytes": float("nan")}, "memory_bytes"),
])
def test_bad_requests_are_refused_before_any_planning(change, word, monkeypatch):
    monkeypatch.setattr("terapipe_c.planning.judge.Judge.judge", lambda *_: pytest.fail("work was done"))
    with pytest.raises(ValueError, match=word):
        tp.compare(**{"model": MODEL, "cluster": CLUSTER, "batch": 4, "seq_len": 32, **change})


# ---- the command ----

ARGS = ["compare", "--n-layer", "3", "--n-head", "2", "--n-embd", "16", "--vocab-size", "64", "--batch", "2", "--seq-len", "16",
        "--stages", "2", "--devices", "2", "--planners", "auto,uniform,terapipe"]


def run(capsys, *argv):
    code = cli.main([str(word) for word in argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_command_prints_a_table_and_writes_new_files(capsys, tmp_path):
    code, out, err = run(capsys, *ARGS, "--svg", tmp_path / "c.svg", "--out", tmp_path / "c.json")
    assert code == 0 and not err and all(name in out for name in ("planner", "auto", "uniform", "terapipe", "runs here"))
    assert ElementTree.fromstring((tmp_path / "c.svg").read_text()) is not None
    assert [row["planner"] for row in json.loads((tmp_path / "c.json").read_text())["rows"]] == ["auto", "uniform", "terapipe"]
    code, out, err = run(capsys, *ARGS, "--svg", tmp_path / "c.svg")
    assert code == 2 and not out and "exists already" in err


def test_one_planner_is_asked_as_of_a_plan(capsys):
    """--planner, whatever it was, changed nothing: all of them were asked."""
    code, out, _ = run(capsys, *ARGS[:-2], "--planner", "uniform", "--json")
    assert code == 0 and [row["planner"] for row in json.loads(out)["rows"]] == ["uniform"]
    code, _, err = run(capsys, *ARGS[:-2], "--planner", "nope")
    assert code == 2 and "planners[0] is 'nope'" in err


def test_the_command_prints_json(capsys):
    code, out, err = run(capsys, *ARGS, "--json")
    data = json.loads(out)
    assert code == 0 and not err and {row["planner"] for row in data["rows"]} == {"auto", "uniform", "terapipe"}
    assert all(row["executable"] for row in data["rows"])


def test_the_command_has_exit_codes(capsys):
    code, out, err = run(capsys, *ARGS, "--memory-bytes", "1000")
    assert code == 2 and "no planner found a plan" in err and "bytes" in out
    code, out, err = run(capsys, *ARGS, "--planners", "auto,magic")
    assert code == 2 and "magic" in err and not out
    code, out, err = run(capsys, *ARGS, "--executable", "perhaps")
    assert code == 2 and "neither yes nor no" in err
    code, out, err = run(capsys, "plan", *ARGS[1:-2], "--data-parallel", "2", "--stages", "1", "--json")
    assert code == 0 and json.loads(out)["executable"] is False


def test_the_command_refuses_before_it_measures(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tp, "profile", lambda *_, **__: pytest.fail("measured"))
    for words, said in ((["plan", "--stages", "0"], "stages is 0"), (["plan", "--planner", "nope"], "planner is 'nope'"),
                        (["plan", "--out", str(tmp_path / "no" / "p.json")], "no such folder"),
                        (["compare", "--planners", "nope"], "planners[0] is 'nope'"),
                        (["compare", "--svg", str(tmp_path / "c"), "--out", str(tmp_path / "c")], "two files would be right"),
                        (["compare", "--stages", "99"], "stages is 99")):
        assert cli.main(words) == cli.BAD_REQUEST
        assert said in capsys.readouterr().err


def test_what_a_handler_raises_is_no_refusal_of_a_planner(monkeypatch):
    """A ValueError of the user's own, which came while a planner was at work, was put into its row."""
    def handle(number, frame):
        raise ValueError("the user's own")

    module = importlib.import_module("terapipe_c.compare")
    real = module.made

    def disturbed(*args, **options):
        signal.raise_signal(signal.SIGUSR1)
        return real(*args, **options)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        monkeypatch.setattr(module, "made", disturbed)
        with pytest.raises(ValueError, match="the user's own"):
            tp.compare(MODEL, tp.Cluster(2), batch=4, seq_len=32, planners=["uniform"])
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_row_has_the_largest_rank_and_the_finest_cut():
    """And a planner that is named twice has one."""
    asked = tp.compare(MODEL, CLUSTER, batch=2, seq_len=32, stages=2, planners=["uniform", "merak", "uniform"],
                       slicing=[(1, [32]), (1, [8, 24])], schedule="seq1f1b")
    assert [row.planner for row in asked] == ["uniform", "merak"]
    plan = dataclasses.replace(asked["uniform"].plan, peak_memory_bytes=[1 << 20, 3 << 20], data_parallel=2)
    (cells,) = dataclasses.replace(asked, rows=[dataclasses.replace(asked["uniform"], plan=plan)]).table()
    assert cells[5:8] == ("2 x 2", "seq1f1b, 2 slices", "3.00 MiB")


def test_the_idle_share_is_of_all_ranks_and_names_the_largest_causes():
    bubbles = {"warmup": 0.1, "cooldown": 0.3, "comm": 0.002, "dependency_wait": 0.2, "swap": 0.15}
    told = _idle(SimpleNamespace(ranks=2, step_time_s=1.0, bubbles=bubbles))
    assert told == "37.6 % (cooldown 15.0, dependency wait 10.0, swap 7.5)"
