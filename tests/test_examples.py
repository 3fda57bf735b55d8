"""The examples: they parse, the notebook is a notebook, and they run as a user would run them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port

import terapipe_c as tp

EXAMPLES = Path(__file__).parents[1] / "examples"


def cells():
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text())
    return notebook, ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_python(folder, *argv):
    done = subprocess.run([sys.executable, *map(str, argv)], cwd=folder, capture_output=True, text=True, timeout=120, check=False,
                          env={**os.environ, "PYTHONPATH": str(Path(tp.__file__).parents[1])})  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_notebook_is_valid():
    notebook, code = cells()
    assert notebook["nbformat"] == 4 and notebook["nbformat_minor"] >= 5 and len(code) >= 8
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert all(cell.get("outputs", []) == [] for cell in notebook["cells"])
    for number, source in enumerate(code):
        compile(source, f"cell {number}", "exec")
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.from_dict(notebook))


def test_the_demo_draws_a_loss_chart(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    rows = demo.chart([4.0 - 0.02 * i for i in range(100)], width=50, height=4).splitlines()
    assert len(rows) == 5 and rows[-1].strip() == "first 4.0000, last 2.0200, 100 steps"
    heights = [sum(" ▁▂▃▄▅▆▇█".index(row[9 + i]) if 9 + i < len(row) else 0 for row in rows[:4]) for i in range(50)]
    assert heights == sorted(heights, reverse=True) and heights[0] == 32 and heights[-1] == 1
    assert "last 3.0000, 1 steps" in demo.chart([3.0]) and demo.chart([2.0] * 5)


def test_the_demo_never_writes_over_a_run(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    assert demo.new_folder(tmp_path / "runs" / "demo") == tmp_path / "runs" / "demo-1"
    (tmp_path / "runs" / "demo-1").mkdir()
    assert demo.new_folder(tmp_path / "runs" / "demo") == tmp_path / "runs" / "demo-2"


def test_the_demo_runs(tmp_path):
    """Small and short, from an empty folder, to the last line."""
    out = run_python(
        tmp_path, EXAMPLES / "demo.py", "--steps", 8, "--layers", 2, "--width", 32, "--batch", 2, "--seq-len", 32
    )
    assert "predicted" in out and "def " in out and "done in" in out
    assert (tmp_path / "runs" / "demo-1" / "timeline.html").exists() and list(
        (tmp_path / "runs" / "demo-1").rglob("step-*")
    )


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_the_cluster_example_plans_and_trains_as_torchrun_starts_it(tmp_path, monkeypatch, request, backend):
    """On CUDA two emulated machines of one GPU, each a rank's own, and messages through the hosts."""
    if backend == "cuda":
        request.getfixturevalue("emulation")
        monkeypatch.setenv("TERAPIPE_COMM", "host")
    (tmp_path / "corpus.txt").write_bytes(Path(tp.__file__).read_bytes() * 20)
    told = run_python(tmp_path, EXAMPLES / "cluster.py", "plan", "--nodes", 2, "--per-node", 1, "--layers", 2, "--heads", 2,
                      "--width", 16, "--seq-len", 32, "--batch", 2, "--backend", backend)
    assert "2 ranks" in told and (tmp_path / "plan.json").exists()
    port = free_port()
    words = [sys.executable, str(EXAMPLES / "cluster.py"), "train", "--steps", "4"]
    ranks = [subprocess.Popen(words, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={
        **os.environ, "PYTHONPATH": str(Path(tp.__file__).parents[1]), "RANK": str(rank), "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank if backend == "cpu" else 0),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}) for rank in range(2)]
    ends = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    assert "predicted" in ends[0][0] and not ends[1][0] and tp.Plan.load(tmp_path / "plan.json").backend == backend
    assert tp.load_checkpoint(tmp_path / "runs" / "cluster").step == 4
    done = subprocess.run(["bash", "-n", str(EXAMPLES / "cluster.sbatch")], check=False)
    assert done.returncode == 0


def test_the_notebook_runs_top_to_bottom(tmp_path):
    source = "\n".join(cells()[1]).replace("steps=60", "steps=6").replace("warmup_steps=6", "warmup_steps=1")
    (tmp_path / "notebook.py").write_text(source)
    assert run_python(tmp_path, "notebook.py")
