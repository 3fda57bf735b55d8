"""benchmarks/papers.py: its functions without timing, on the papers' numbers in benchmarks/papers/."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def papers():
    if not (FOLDER / "papers.py").exists():
        pytest.skip("no benchmarks here")
    sys.path.insert(0, str(FOLDER))
    try:
        import papers as module
    finally:
        sys.path.remove(str(FOLDER))
    return module


def facts(name):
    return json.loads((FOLDER / "papers" / f"{name}.json").read_text())


def test_slowest_least_is_least_of_all(papers):
    rng = np.random.default_rng(3)
    for _ in range(200):
        n, stages = int(rng.integers(2, 8)), int(rng.integers(1, 4))
        stages = min(stages, n)
        devices = stages + int(rng.integers(0, 4))
        times = rng.integers(1, 20, n).astype(float)
        cuts, replicas = papers.slowest_least(times, stages, devices)
        assert sum(replicas) == devices and cuts[0] == 0 and cuts[-1] == n and len(cuts) == stages + 1

        def worst(cuts, replicas, times=times):
            return max(times[a:b].sum() / r for a, b, r in zip(cuts, cuts[1:], replicas, strict=False))

        least = min(worst([0, *inner, n], r) for inner in itertools.combinations(range(1, n), stages - 1)
                    for r in itertools.product(range(1, devices + 1), repeat=stages) if sum(r) == devices)  # fmt: skip
        assert worst(cuts, replicas) == pytest.approx(least)


@pytest.mark.parametrize("way", ["linear", "power", "cubic"])
@pytest.mark.parametrize("setting", [8, 9])
def test_every_uniform_row_is_met(papers, setting, way):
    rows = [row for row in facts("terapipe")["table3"] if row[0] == setting]
    uniform = papers.uniform_rows(rows)
    for pair_s in (0.0, papers.counted_pair_s(setting, uniform, rows[0][3], True)):
        solo = papers.solo_seconds(uniform, pair_s, rows[0][3], papers.STAGES[setting])
        table = papers.slice_table(solo, pair_s, 256, way)
        for row in rows[:-1]:
            costs = papers.slice_costs(table, row[2])
            assert row[3] * costs.sum() + (papers.STAGES[setting] - 1) * costs.max() == pytest.approx(row[4])


def test_a_pair_is_counted_without_the_dp_row(papers):
    rows = [row for row in facts("terapipe")["table3"] if row[0] == 9]
    uniform = papers.uniform_rows(rows)
    assert len(uniform) == len(rows) - 1   # the DP row is not among them
    assert papers.counted_pair_s(9, uniform, 2, True) > papers.counted_pair_s(9, uniform, 2, False) > 0


def test_the_calibrated_row_is_met(papers):
    table = facts("dawnpiper")["table1"]
    for place, (model, nodes) in enumerate(papers.dawnpiper_nodes().items()):
        published = next(row for row in table if row[:3] == [4, "none", "GPipe"])[3 + place] // 4
        grown = papers.grown(nodes, papers.activation_factor(nodes, published))
        assert papers.batch_of(grown, 4, "gpipe", "compute", False) == published, model
        rebuilt = [papers.rebuilt_batch(grown, 4, "1f1b", planner) for planner in ("compute", "dawnpiper")]
        assert published < rebuilt[0] <= rebuilt[1]   # any partition is at least as good as one


def test_one_row_calibrates_a_model(papers, capsys):
    rows = papers.autopipe(facts("autopipe"))
    capsys.readouterr()
    assert sum(r["calibrates"] for r in rows) == 2 == len({r["model"] for r in rows})
    assert all(r["error_percent"] == pytest.approx(0) for r in rows if r["calibrates"])
