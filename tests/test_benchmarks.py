"""Benchmarks with a driver in C: built against today's objects and run once, in small. What they measure no test judges."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_attention_builds_and_measures_each_direction(tmp_path) -> None:
    script = ROOT / "benchmarks/attention.py"
    if not script.exists():
        pytest.skip("no benchmarks beside the tests")
    out = tmp_path / "attention.json"
    folders = [str(script.parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # where PYTHONSAFEPATH hides the script's own
    run = subprocess.run([sys.executable, script, "--isa", "portable", "--shapes", "2x16x64x32", "--rounds", "2", "--out", out],
                         cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
                         capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["heads"], row["head_dim"], row["tokens"], row["slice"]) == (2, 16, 64, 32)
    assert all(len(row["seconds"][name]) == 2 and row["gflops"][name] > 0 for name in ("product", "forward", "backward"))
