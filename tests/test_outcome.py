"""What a run tells of itself, made of what ranks sent: exchanges, metrics.jsonl, the trace."""
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import terapipe_c as tp
from terapipe_c.outcome import Metrics, Outcome, Record, met


def exchange(rank, begin, end, op="AR"):
    return rank, op, 0, 0, 0, begin, end


def test_an_exchange_begins_when_both_its_ends_are_there():
    rows = [exchange(0, 0.0, 1.0, "F"), exchange(0, 1.0, 4.0), exchange(1, 3.0, 4.0), exchange(1, 4.0, 5.0, "OPT")]
    assert met(rows, 2) == [rows[0], exchange(0, 3.0, 4.0), *rows[2:]]
    again = [exchange(0, 1.0, 4.0), exchange(0, 5.0, 9.0), exchange(1, 2.0, 4.0), exchange(1, 8.0, 9.0)]     # Chimera's two
    assert [row[5] for row in met(again, 2)] == [2.0, 8.0, 2.0, 8.0]
    replicas = [exchange(0, 1.0, 4.0), exchange(1, 2.0, 4.0), exchange(2, 3.0, 6.0), exchange(3, 5.0, 6.0)]
    assert [row[5] for row in met(replicas, 2)] == [2.0, 2.0, 5.0, 5.0]
    late = [exchange(0, 1.0, 2.0), exchange(1, 2.5, 3.0)]       # by its clock the other came after this one was done
    assert met(late, 2) == [exchange(0, 2.0, 2.0), late[1]]
    assert met([], 2) == [] and met(rows[:1], 1) == rows[:1]


def record(step, loss=1.5, **more):
    return Record(step, loss, 0.5, 1e-3, 100.0, 0.25, 0.2, **more)


def test_metrics_are_json_a_line_and_begin_anew_where_the_file_was_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": -1}\n')
    metrics = Metrics(path)

    def steps():
        return [json.loads(line)["step"] for line in path.read_text().splitlines()]

    metrics.write(record(0), [])
    metrics.write(record(1, math.nan, eval_loss=math.inf), [record(0)])
    assert steps() == [-1, 0, 1]
    last = json.loads(path.read_text().splitlines()[-1])
    assert last["loss"] is last["eval_loss"] is None and last["grad_norm"] == 0.5
    path.unlink()
    metrics.write(record(2), [record(0), record(1)])
    assert steps() == [0, 1, 2]
    metrics.write(record(3), [record(0), record(1), record(2)])
    metrics.close()
    assert steps() == [0, 1, 2, 3]


def test_a_trace_begins_at_0_and_is_of_the_last_step(tmp_path):
    plan = SimpleNamespace(ranks=2, step_time_s=0.125, digest="abc")
    run = Outcome(plan, {"out": str(tmp_path), "resume_from": None, "steps": 2, "ranks": 2})
    assert run.trace == [] and run._so_far() == "2 steps" and run.loss_eval is run.checkpoint_path is None
    run._write_trace()
    assert not (tmp_path / "trace.json").exists()       # nothing was done
    run._ends = {1: {"trace": [("F", 1, 0, 0, 11.0, 12.5)]}, 0: {"trace": [("F", 0, 0, 0, 10.0, 11.0)]}}
    assert run.trace == [(0, "F", 0, 0, 0, 0.0, 1.0), (1, "F", 1, 0, 0, 1.0, 2.5)]
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for step, found in ((0, 3.0), (1, None)):
        run._history.append(run._take_record({"step": step, "loss": 2.0 - step, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 1.0,
                                              "step_time_s": 0.5, "eval_loss": found}, metrics))
    metrics.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert run.history[0].predicted_step_time_s == 0.125 and run.loss_eval == 3.0
    assert run._so_far() == "2 of 2 steps done, loss 1.0000"
    run.history.clear()
    assert len(run.history) == 2        # a list of one's own
    run._write_trace()
    kept = json.loads((tmp_path / "trace.json").read_text())
    assert kept["plan"] == "abc" and kept["rows"] == [list(row) for row in run.trace]


@pytest.mark.parametrize(("ends", "every"), [("interrupted", 2), ("killed", 2), ("killed", 0)])
def test_a_training_that_ends_early_says_how_to_go_on(tmp_path, ends, every):
    """Only one that nobody read did."""
    plan = tp.plan(tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=256, block_size=16), tp.Cluster(num_devices=2), batch=2,
                   seq_len=16, planner="uniform", stages=2)  # fmt: skip
    plan.save(tmp_path / "plan.json")
    tp.stdlib_corpus(tmp_path / "corpus.txt", max_bytes=20_000)
    words = ["--plan", "plan.json", "--data", "corpus.txt", "--steps", "100000", "--checkpoint-every", str(every), "--json"]
    process = subprocess.Popen([sys.executable, "-P", "-m", "terapipe_c", "train", *words, "--out", "a run"], cwd=tmp_path,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        while json.loads(process.stdout.readline())["step"] < 4:
            pass
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(*((process.pid, signal.SIGINT) if ends == "interrupted" else (int(ranks[-1]), signal.SIGKILL)))
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    first, how = said.splitlines()
    assert first == "terapipe: interrupted" if ends == "interrupted" else "was killed by signal 9 (SIGKILL)" in first
    goes_on = f"`terapipe resume '{tmp_path}/a run' --steps 100000` goes on(?: from [0-9]+)?" if every else "there is no checkpoint"
    assert re.fullmatch(rf"terapipe: it ended after \d+ of 100000 steps; {goes_on}", how), how
