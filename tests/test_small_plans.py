"""Small plans against every plan that there is: all stages, sizes of micro-batches and slices, by the simulator."""
import itertools

import pytest

import terapipe_c as tp
from terapipe_c.planning.front import Front, Given
from terapipe_c.planning.judge import Judge
from terapipe_c.planning.request import check_request
from terapipe_c.planning.starts import sizes_apart

NONE = dict.fromkeys(("data_parallel", "tensor_parallel", "chunks", "memory_bytes", "partition", "slicing", "executable",
                      "time_limit_s"))


def parts_of(total, unit=1):
    """Every way to write it as a sum, in units."""
    for cut in itertools.chain.from_iterable(itertools.combinations(range(unit, total, unit), k) for k in range(total // unit)):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cut, total)))


def every_plan(model, cluster, batch, schedule, stages, unit, lengths=None):
    """(seconds, bytes) of all plans with these lengths; None: all of them, in each micro-batch its own."""
    request = check_request(model, cluster, batch, model.block_size, None, planner="terapipe", schedule=schedule, stages=stages,
                            granularity=unit, **NONE)
    judge, found = request.judge(stages), []
    each = list(parts_of(model.block_size, unit)) if lengths is None else [lengths]
    for inner in itertools.combinations(range(1, model.num_blocks), stages * request.chunks - 1):
        cut = tuple(itertools.pairwise((0, *inner, model.num_blocks)))
        for sizes in parts_of(batch):
            for cuts in itertools.product(each, repeat=len(sizes)):
                for pending in (0, 1, 2):
                    c = judge.judge(schedule, cut, tuple(zip(sizes, cuts, strict=True)), pending)
                    found.append((c.seconds, max(judge.peak_bytes(c))))
    return found


def test_a_pipeline_fills_and_drains_by_smaller_micro_batches():
    """All of one size made a step of zb-h1 2.8 % longer than 1 and 2 sequences, of sliced-1f1b 3.2 %, of zb-v 6.5 % than 1, 2
    and 1."""
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=16, tie_weights=False)
    cluster = tp.Cluster(3, memory_bytes=1e12, link_latency_s=171e-9, link_bandwidth_Bps=764.4e6, peak_flops=24.86e9)
    for schedule, lengths in (("zb-h1", None), ("sliced-1f1b", (16,))):
        least_s = min(every_plan(model, cluster, 3, schedule, 3, 8, lengths))[0]
        plan = tp.plan(model, cluster, 3, 16, planner="terapipe", schedule=schedule, stages=3, granularity=8)
        assert plan.step_time_s <= 1.002 * least_s
        assert [b for b, _ in plan.slicing] in ([1, 2], [2, 1])


LIMITED = [(tp.GPTConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=2000, block_size=24, tie_weights=False),
            tp.Cluster(3, memory_bytes=1e12, link_latency_s=10.36e-6, link_bandwidth_Bps=4.026e6, peak_flops=3.098e9)),
           (tp.GPTConfig(n_layer=3, n_head=2, n_embd=8, vocab_size=300, block_size=16, tie_weights=False),
            tp.Cluster(4, memory_bytes=1e12, link_latency_s=280.5e-9, link_bandwidth_Bps=4.684e9, peak_flops=1.058e9))]


@pytest.mark.parametrize(("model", "cluster"), LIMITED)
def test_within_any_limit_the_plan_is_about_the_best_there_is(model, cluster):
    """The search for the fastest had seen better ones than the ladder's next rung, a hundredth below, and what needs least had
    front-heavy stages before a long last one: steps of the first were 3.4 to 5.5 % longer than the best, of the second up to
    13.3 %."""
    stages = cluster.num_devices
    request = dict(batch=2, seq_len=model.block_size, planner="terapipe", schedule="1f1b", stages=stages, granularity=8)
    plans = every_plan(model, cluster, 2, "1f1b", stages, 8)
    least, most = min(needed for _, needed in plans), min(plans)[1]
    limits = [least + (most - least) * i // 8 for i in range(9)]
    found = [tp.plan(model, cluster, memory_bytes=limit, **request).step_time_s for limit in limits]
    best = [min(seconds for seconds, needed in plans if needed <= limit) for limit in limits]
    assert found == sorted(found, reverse=True)
    assert found[0] <= best[0] * (1 + 1e-12)                   # within what needs least
    assert sum(one > two * (1 + 1e-12) for one, two in zip(found, best, strict=True)) <= 1


BESIDE = [("1f1b", 3, tp.GPTConfig(n_layer=6, n_head=2, n_embd=8, vocab_size=300, block_size=16),
           tp.Cluster(2, memory_bytes=1e12, link_latency_s=4.918e-6, link_bandwidth_Bps=969.1e6, peak_flops=82.75e9)),
          ("zb-v", 4, tp.GPTConfig(n_layer=6, n_head=2, n_embd=16, vocab_size=2000, block_size=16),
           tp.Cluster(2, memory_bytes=1e12, link_latency_s=288.8e-9, link_bandwidth_Bps=213.3e6, peak_flops=68.28e9)),
          ("looped-bfs", 2, tp.GPTConfig(n_layer=5, n_head=2, n_embd=16, vocab_size=300, block_size=8, tie_weights=False),
           tp.Cluster(2, memory_bytes=1e12, link_latency_s=691.4e-9, link_bandwidth_Bps=5.1e9, peak_flops=1.845e9))]


@pytest.mark.parametrize(("schedule", "batch", "model", "cluster"), BESIDE)
def test_plans_beside_those_that_were_seen_are_weighed(schedule, batch, model, cluster):
    """Within some of these limits steps were 11.4, 7.6 and 7.3 % longer than the best: single moves led from plans that a search
    had seen to micro-batches of other sizes, and through what needs fewer bytes to other stages."""
    request = dict(batch=batch, seq_len=model.block_size, planner="terapipe", schedule=schedule, stages=2,
                   granularity=model.block_size)
    plans = every_plan(model, cluster, batch, schedule, 2, model.block_size)
    least, most = min(needed for _, needed in plans), min(plans)[1]
    limits = [least + (most - least) * i // 5 for i in range(1, 6)]
    found = [tp.plan(model, cluster, memory_bytes=limit, **request).step_time_s for limit in limits]
    best = [min(seconds for seconds, needed in plans if needed <= limit) for limit in limits]
    assert found == sorted(found, reverse=True)
    assert all(one <= 1.025 * two for one, two in zip(found, best, strict=True))


def test_no_other_plan_is_beside_one_that_is_given():
    model = tp.GPTConfig(n_layer=3, n_head=2, n_embd=16, vocab_size=64, block_size=16)
    judge = Judge(model, tp.CostModel.analytic(model, BESIDE[0][3]), 2, 1, None)
    start = judge.judge("1f1b", ((0, 4), (4, 8)), ((1, (16,)), (2, (8, 8))), 1)
    fixed = Given(8, True, True, True)
    for given, moved in ((fixed, set()), (fixed._replace(partition=False), {2}), (fixed._replace(slices=False), {3}),
                         (fixed._replace(sizes=False), {3})):
        seen = [c for c in Front(judge, ("1f1b",), given)._beside(start) if c.pending == start.pending and c != start]
        assert {i for c in seen for i in range(1, 4) if c[i] != start[i]} == moved
        assert all(sum(b for b, _ in c.slicing) == 3 and {sum(lengths) for _, lengths in c.slicing} == {16} for c in seen)


def test_sizes_apart_keeps_all_sequences():
    whole, cut = (1, (16,)), (1, (8, 8))
    assert ((1, (16,)), (2, (16,)), (1, (16,))) in sizes_apart((whole,) * 4, 4)
    assert ((1, (8, 8)), (1, (8, 8)), (2, (8, 8)), (1, (8, 8)), (1, (8, 8))) in sizes_apart(((2, (8, 8)),) * 3, 2)
    assert ((1, (16,)), (2, (16,)), (1, (16,))) in sizes_apart(((2, (16,)),) * 2, 2)
    assert sizes_apart((whole, cut), 1) == [(cut, whole)] and sizes_apart((whole,), 4) == sizes_apart((whole,) * 9, 1) == []
    for slicing in ((whole,) * 5, (cut, whole, cut), ((3, (16,)), (2, (8, 8))), ((4, (16,)),)):
        found = sizes_apart(slicing, 3)
        assert len(set(found)) == len(found) and slicing not in found
        assert all(sum(b for b, _ in s) == sum(b for b, _ in slicing) and max(b for b, _ in s) <= 3 for s in found)


@pytest.mark.parametrize(("schedule", "ranks", "batch", "model"), [
    ("gpipe", 3, 2, tp.GPTConfig(n_layer=6, n_head=2, n_embd=32, vocab_size=700, block_size=64)),
    ("auto", 4, 4, tp.GPTConfig(n_layer=6, n_head=2, n_embd=128, vocab_size=700, block_size=128)),
])
def test_what_is_beside_a_coarse_grids_plans_makes_no_plan_slower(schedule, ranks, batch, model, monkeypatch):
    """Finer grids that started from that alone, and not from the coarse grid's own plan, were 0.15 % slower in the end."""
    def seconds():
        return tp.plan(model, tp.Cluster(ranks, memory_bytes=1e15), batch, model.block_size, planner="terapipe", schedule=schedule,
                       chunks=2 if schedule == "auto" else None).step_time_s

    found_s = seconds()
    monkeypatch.setattr(Front, "explore", lambda *_: False)
    assert found_s <= seconds() * (1 + 1e-9)
