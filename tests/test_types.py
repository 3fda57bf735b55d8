"""What mypy --strict sees of the package in a user's script: the types of what is asked for, and arguments that make no sense."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import terapipe_c

SCRIPT = """
import numpy as np
import terapipe_c as tp

def shown(plan: tp.Plan, run: tp.Run, checkpoint: tp.Checkpoint, program: tp.Program, costs: tp.CostModel) -> None:
    reveal_type(plan.timeline())                                          # terapipe_c.schedule.Timeline
    reveal_type(run.timeline())                                           # terapipe_c.schedule.Timeline
    reveal_type(run.plan)                                                 # terapipe_c.plan.Plan
    reveal_type(checkpoint.model)                                         # terapipe_c.config.GPTConfig
    reveal_type(tp.import_hf("gpt2").model)                               # terapipe_c.config.GPTConfig
    reveal_type(program.makespan({"F": 1.0, "B": np.ones(2)}))            # float
    reveal_type(program.makespan(costs))                                  # float
    reveal_type(program.makespan([{"F": 1.0, "B": 2.0}, costs]))          # numpy.ndarray[
    reveal_type(tp.generate(checkpoint, "def "))                          # str
    reveal_type(tp.generate(checkpoint, prompt=b"def ", n=3))             # bytes
    reveal_type(tp.generate(checkpoint, [1, 2], seed=1))                  # numpy.ndarray[
    reveal_type(tp.generate(checkpoint, checkpoint.model, "def ", 4))     # str
    reveal_type(tp.generate(checkpoint.params, checkpoint.model, b"a"))   # bytes
    reveal_type(tp.generate(tp.import_hf("gpt2"), np.array([1, 2])))      # numpy.ndarray[
    for data in ("corpus.txt", b"abc", [1, 2], np.zeros(9, np.uint16)):
        reveal_type(tp.launch(plan, data=data, steps=1))                  # terapipe_c.launch.Run
    tp.launch(plan, data=3.5, steps=1)                                    # error: "data"
    tp.launch(3, data="corpus.txt", steps=1)                              # error: "Plan"
    tp.train(plan, 3.5, 1)                                                # error: "train"
    tp.Dataset(3.5, 8, 1)                                                 # error: "Dataset"
    tp.generate(checkpoint.params, "def ")                                # error: "generate"
    program.makespan(3)                                                   # error: "makespan"
    tp.plann(1)                                                           # error: "plann"
"""


def test_a_users_script(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n")
    home = str(Path(terapipe_c.__file__).parents[1])
    where = os.environ if "site-packages" in home else {**os.environ, "MYPYPATH": home}  # built in place
    ran = subprocess.run([sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "script.py"], cwd=tmp_path, env=where,
                         capture_output=True, text=True)
    said: dict[int, str] = {}
    for line in ran.stdout.splitlines():
        place, _, words = line.partition(": ")
        if place.startswith("script.py:"):
            at = int(place.split(":")[1])
            said[at] = f"{said.get(at, '')} {words}"
    lines = SCRIPT.splitlines()
    for at, line in enumerate(lines, 1):
        code, _, wanted = line.partition("  # ")
        if not wanted:
            assert at not in said, (line, said[at])
            continue
        words, kind = wanted.removeprefix("error: "), "error:" if wanted.startswith("error: ") else "note: Revealed type is"
        found = said.get(at, ran.stdout + ran.stderr)
        assert kind in found and words in found, (code.strip(), found)
        assert ("error:" in found) == (kind == "error:"), (code.strip(), found)
