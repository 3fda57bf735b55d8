"""Benchmarks with a driver in C: built against today's objects and run once, in small. What they measure no test judges."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def measured(name, out, *words):
    """What benchmarks/<name>.py writes."""
    script = ROOT / f"benchmarks/{name}.py"
    if not script.exists():
        pytest.skip("no benchmarks beside the tests")
    folders = [str(script.parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # where PYTHONSAFEPATH hides the script's own
    run = subprocess.run([sys.executable, script, *words, "--out", out], cwd=ROOT, capture_output=True, text=True,
                         env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)})  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(out.read_text())


def test_attention_builds_and_measures_each_direction(tmp_path) -> None:
    told = measured("attention", tmp_path / "attention.json", "--shapes", "2x16x64x32", "--rounds", "2")
    (row,) = told["rows"]
    assert (row["heads"], row["head_dim"], row["tokens"], row["slice"]) == (2, 16, 64, 32)
    assert all(len(row["seconds"][name]) == 2 and row["gflops"][name] > 0 for name in ("product", "forward", "backward"))


def test_messages_build_and_are_measured_by_each_transport(tmp_path) -> None:
    told = measured("comm", tmp_path / "comm.json", "--transports", "--kind", "shm,tcp", "--rounds", "1")
    assert told["transports"]
    assert all(min(table[kind]["GBps"].values()) > 0 for table in told["transports"] for kind in ("shm", "tcp"))


def test_the_engines_own_time_is_of_every_instruction(tmp_path) -> None:
    told = measured("engine", tmp_path / "engine.json", "--rounds", "3")
    assert [row["ranks"] for row in told["rows"]] == [1, 2, 1, 2]
    assert all(row["us"]["median"] > 0 and row["instructions"] >= 2 * row["micro_batches"] * row["slices"] for row in told["rows"])
