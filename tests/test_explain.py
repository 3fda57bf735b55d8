"""What explain() says of stages, ranks and idle time, number by number."""
import itertools
from dataclasses import replace

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import cli
from terapipe_c.config import human_bytes
from terapipe_c.explain import GROUPS, format_slicing, memory_by_rank
from terapipe_c.guests import guest_bytes

MODEL = tp.GPTConfig(n_layer=40, n_head=2, n_embd=16, vocab_size=64, block_size=16, tie_weights=False)
FORTY = [*itertools.pairwise([0, *range(3, 80, 2), 82])]       # embedding and a layer; a layer each; a layer and the head


def lines(schedule, ranks, chunks=1, seconds=None):
    """The lines of the stages; seconds: [stages] of a forward of a micro-batch, of which a backward takes three times as long."""
    plan = tp.plan(MODEL, tp.Cluster(num_devices=ranks), 40, 16, planner="uniform", schedule=schedule, stages=ranks, chunks=chunks,
                   partition=FORTY)
    if seconds is not None:
        row = np.asarray(seconds, float)[:, None] * np.ones(40)
        plan = replace(plan, durations={**plan.durations, "F": row, "I": row, "W": 2 * row})
    text = plan.explain().splitlines()
    first = text.index("  stages:") + 1
    return list(itertools.takewhile(lambda line: line.startswith("    "), text[first:]))


def test_neighbours_that_are_alike_share_a_line():
    """Where stages go down the ranks and up again two by two; whatever of a stage differs ends its line."""
    both = ["    0 on rank 0: embedding to h.0.ffn: 40 s forward, 120 s backward",
            "    1 to 19 on ranks 1 to 19: 2 blocks each, h.1.attention to h.19.ffn: 40 s forward, 120 s backward each",
            "    20 to 38 on ranks 19 to 1: 2 blocks each, h.20.attention to h.38.ffn: 40 s forward, 120 s backward each",
            "    39 on rank 0: h.39.attention to head: 40 s forward, 120 s backward"]
    assert lines("zb-v", 20, 2, np.ones(40)) == both
    assert lines("zb-v", 20, 2, np.where(np.arange(40) < 10, 1.0, 2.0))[1].startswith("    1 to 9 on ranks 1 to 9: 2 blocks each, ")


def test_stages_of_one_rank_share_no_line():
    assert lines("interleaved", 1, 40)[1].startswith("    1 on rank 0: h.1.attention to h.1.ffn: ")


def test_versions_of_weights_count_down_along_a_line():
    first, middle, last = lines("pipedream", 40)
    assert first.endswith(", weights in 40 versions") and last.endswith(", weights in 1 version")
    assert middle.startswith("    1 to 38 on ranks 1 to 38: ") and middle.endswith(" each, weights in 39 to 2 versions")


def test_what_is_left_out_has_its_slowest_stage_shown():
    """Two ranks in turn: no line has more than two stages, and a screen has no more than sixteen lines."""
    seconds = np.ones(40)
    seconds[[15, 17, 30]] = 5.0, 9.0, 99.0
    shown = lines("interleaved", 2, 20, seconds)
    assert len(shown) == 16 and shown[0].startswith("    0 on rank 0: ") and shown[-1].startswith("    39 on rank 1: ")
    assert shown[1].startswith("    1 to 2 on ranks 1 to 0: 2 blocks each, ")
    least, most = "2 blocks, 40 s forward, 120 s backward", "2 blocks, 360 s forward, 1080 s backward"
    assert shown[7] == f"    13 to 27: from {least}, to {most}; the slowest is"
    assert shown[8] == "    17 on rank 1: h.17.attention to h.17.ffn: 360 s forward, 1080 s backward"


def test_the_idle_share_is_of_all_ranks():
    plan = tp.plan(MODEL, tp.Cluster(num_devices=40), 40, 16, planner="uniform", schedule="gpipe", stages=40, partition=FORTY)
    text = replace(plan, step_time_s=10.0, bubbles={"warmup": 60.0, "slice_skew": 40.0, "comm": 0.0}).explain()
    assert "  idle: 25 % of the ranks' time (warmup 60 s, slice skew 40 s)\n" in text


def test_memory_of_few_groups_of_ranks_is_named_and_of_many_the_ends():
    sizes = [1 << (20 + k // 2) for k in range(2 * GROUPS)]
    assert memory_by_rank(sizes).split(", ")[0::GROUPS - 1] == ["ranks 0-1 1.00 MiB", "ranks 14-15 128.00 MiB"]
    assert memory_by_rank([5, 1 << 40, *sizes]) == "1.00 TiB on rank 1, the most, to 5 B on rank 0 (plan.peak_memory_bytes has all)"
    assert memory_by_rank([7]) == "rank 0 7 B"


def test_what_is_kept_elsewhere_is_told_with_its_bytes():
    """The bytes of all that is swapped; of a guest, those of the rank that it comes from, whose stage is the smaller one."""
    model, many = tp.GPTConfig(n_layer=8, n_head=2, n_embd=16, vocab_size=64, block_size=16), tp.Cluster(num_devices=32)
    plan = tp.plan(model, many, 4, 16, planner="uniform", schedule="1f1b", stages=2)
    swaps = [1 << 20 if block.kind == "ffn" else 0 for block in model.blocks]
    assert "  swapped until their backward: 8 of 8 ffn blocks, 8.00 MiB a micro-batch\n" in replace(plan, swap=swaps).explain()
    cut = [(0, 2), (2, 5), (5, 8), (8, 18)]
    plan = tp.plan(model, many, 8, 16, planner="uniform", schedule="bpipe", stages=4, partition=cut)
    sizes = guest_bytes(model, cut, plan.slicing)
    assert sizes[0] < sizes[3]
    assert f"  rank 3 keeps activations of rank 0 until their backward: 3 of 8 micro-batches, {human_bytes(sizes[0])} each\n" \
        in plan.explain()
    wide = replace(MODEL, tie_weights=True)
    text = tp.plan(wide, many, 64, 16, planner="uniform", schedule="bpipe", stages=32).explain()
    assert text.count(" keeps activations of rank ") == GROUPS - 1 and "  and so on, 15 pairs of ranks in all\n" in text


def test_a_plan_says_what_its_seconds_are_from(tmp_path):
    """Of a plan in a file nobody could tell whether they were measured, or computed for processors' cores or for GPUs."""
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=32, block_size=16)
    cores, fast = tp.Cluster(2), tp.Cluster(2, peak_flops=5e14)
    table = tp.CostModel.from_table(*np.ones((2, 3, 3)), granularity=8)
    for cluster, costs, words, short in (
            (cores, None, "analytic, 60 GFLOP/s a device (nothing was measured)", "analytic"),
            (fast, None, "analytic, 500 TFLOP/s a device (nothing was measured)", "analytic"),
            (cores, tp.CostModel.analytic(model, fast), "analytic (nothing was measured)", "analytic"),
            (tp.Cluster(2, peak_flops=1e-300), tp.CostModel.analytic(model, fast), "analytic (nothing was measured)", "analytic"),
            (fast, tp.CostModel(table.curves, tables=table.tables, granularity=8, source="measured"), "measured", "measured"),
            (fast, table, "table", "table")):
        plan = tp.plan(model, cluster, batch=2, seq_len=16, costs=costs, planner="uniform")
        plan.save(tmp_path / "plan.json")
        for one in (plan, tp.Plan.load(tmp_path / "plan.json"), plan.with_program(plan.program)):
            assert f"\n  costs: {words}\n" in one.explain() and f" by {short} costs, gap " in repr(one)
            assert words.startswith(one.cost_source) and one.cost_source in one._repr_html_()
    gpu = replace(plan, cost_source="measured", device="GPU 7")
    assert "\n  costs: measured on GPU 7\n" in tp.Plan.from_dict(gpu.to_dict()).explain()
    data = plan.to_dict()
    assert replace(plan, cost_source="").to_dict() == {name: data[name] for name in data if name != "cost_source"}
    older = tp.Plan.from_dict({name: data[name] for name in data if name != "cost_source"})
    assert older.cost_source == "" and "costs" not in older.explain() + repr(older) and older == plan
    with pytest.raises(tp.InvalidValueError, match="cost_source is 3: words would be right"):
        tp.Plan.from_dict(data | {"cost_source": 3})


def test_two_slices_alike_are_written_out_and_three_are_counted():
    assert format_slicing([(1, [8, 8, 4, 4, 4]), (1, [8, 8, 12])]) == "[(1, [8, 8]+[4]*3)] + [(1, [8, 8, 12])]"


def test_the_command_says_whose_seconds_a_plan_has_by_default(capsys):
    """A cluster of GPUs that is given no more than their number was planned as one of processors' cores, without a word."""
    request = ["plan", "--n-layer", "2", "--planner", "uniform", "--batch", "2", "--devices", "2"]
    for more, told in (([], True), (["--costs", "analytic"], True), (["--device", "h100"], False),
                       (["--peak-flops", "1e12"], False), (["--json"], False)):
        assert cli.main([*request, *more]) == 0
        assert ("devices of 60 GFLOP/s, one core each" in capsys.readouterr().out) is told, more
