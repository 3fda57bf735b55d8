"""What planner="auto" says that any plan takes is never more than one does, and nobody is asked for what has no room."""
import itertools
from dataclasses import replace

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import _core
from terapipe_c.engine import dimensions, rank_memory, saves_bytes
from terapipe_c.planning import joint, singles
from terapipe_c.planning.deadline import within
from terapipe_c.planning.judge import Savings, as_built, possible
from terapipe_c.planning.least import LeastBytes
from terapipe_c.planning.partitioners import plan_one
from terapipe_c.planning.request import BY_NAME, JOINT, RECOMPUTE, check_request, has_chunks
from terapipe_c.planning.whole import WHOLE, WITHIN
from terapipe_c.schedules import CHIMERA, LOOPED, SLICED

NONE = dict.fromkeys(("stages", "tensor_parallel", "time_limit_s"))


def request_of(model, cluster, batch, **given):
    asked = {"planner": "terapipe", "schedule": "auto", "chunks": None, "granularity": 1, "partition": None, "slicing": None,
             "executable": False, "memory_bytes": 1, "data_parallel": None, "recompute": None, **NONE, **given}
    return check_request(model, cluster, batch, model.block_size, tp.CostModel.analytic(model, cluster), **asked)


def cut_at_random(rng, total, parts):
    ends = [0, *sorted(int(n) for n in 1 + rng.permutation(total - 1)[:parts - 1]), total]
    return tuple(int(b - a) for a, b in itertools.pairwise(ends))


def slicing_at_random(rng, share, tokens, whole):
    """Micro-batches of one size, or of any; each cut alike, or as it comes."""
    micros = int(rng.integers(1, share + 1))
    sizes = [share // micros] * micros if share % micros == 0 and rng.random() < 0.5 else cut_at_random(rng, share, micros)
    alike = cut_at_random(rng, tokens, int(rng.integers(1, min(tokens, 5) + 1)))
    return tuple((b, (tokens,) if whole else alike if rng.random() < 0.7 else cut_at_random(rng, tokens, int(rng.integers(1, 3))))
                 for b in sizes)


def a_plan(rng, name, model, cluster, share, replicas, again):
    """(the question, its number of ranks, bytes of the fullest rank of a plan at random), or None: it has none such."""
    chunks = int(rng.choice([n for n in (1, 2, 3, 4) if has_chunks(name, n)]))
    ranks = int(rng.integers(1, 5))
    slicing = slicing_at_random(rng, share, model.block_size, name == SLICED)
    if ranks * chunks > model.num_blocks or possible(name, ranks, len(slicing)) or ranks * replicas > cluster.num_devices:
        return None
    if name == CHIMERA:
        slicing = slicing[:len(slicing) // 2] * 2
        share = sum(b for b, _ in slicing)
    asked = request_of(model, cluster, share * replicas, schedule=name, chunks=chunks, stages=ranks, data_parallel=replicas,
                       recompute=again, slicing=slicing if name in (CHIMERA, "interleaved") else None)
    cut = tuple(itertools.pairwise(itertools.accumulate((0, *cut_at_random(rng, model.num_blocks, ranks * chunks)))))
    pending = int(rng.choice([0, 1, 4])) if name != LOOPED or rng.random() < 0.5 else as_built(0)
    judge = asked.judge(ranks)
    return asked, ranks, min(max(judge.peak_bytes(judge.judge(name, cut, slicing, waits))) for waits in (pending, WHOLE, WITHIN))


@pytest.mark.parametrize("name", [*JOINT, *BY_NAME])
def test_bound_is_below_every_plan(name):
    rng = np.random.default_rng(sum(map(ord, name)))
    found = []
    while len(found) < 12:
        heads = int(rng.integers(1, 3))
        model = tp.GPTConfig(n_layer=int(rng.integers(2, 6)), n_head=heads, n_embd=heads * 4 * int(rng.integers(1, 9)),
                             vocab_size=int(rng.choice([11, 60, 700])), block_size=int(rng.choice([5, 16, 64, 96, 192])),
                             tie_weights=bool(rng.random() < 0.5), bias=bool(rng.random() < 0.7))
        again = str(rng.choice(list(RECOMPUTE))) if rng.random() < 0.5 else None
        share, replicas = int(rng.integers(1, 8)), int(rng.choice([1, 1, 2]))
        plan = a_plan(rng, name, model, tp.Cluster(8, memory_bytes=1e12), share, replicas, again)
        if plan is not None:
            asked, ranks, bytes_of_plan = plan
            assert 0 < LeastBytes().of(asked, ranks) <= bytes_of_plan, (asked, ranks)
            found.append(bytes_of_plan)


@pytest.mark.parametrize("planner, schedule, close", [
    ("terapipe", "1f1b", 0.99), ("terapipe", "gpipe", 0.98), ("terapipe", "zb-h1", 0.95), ("terapipe", "interleaved", 0.4),
    ("terapipe", "zb-v", 0.4), ("pipedream", "1f1b", 0.97), ("uniform", "1f1b", 0.6)])
def test_bound_is_near_what_a_planner_needs(planner, schedule, close):
    model, cluster = tp.GPTConfig(n_layer=4, n_head=2, n_embd=32, vocab_size=60, block_size=64), tp.Cluster(3, memory_bytes=1)
    asked = request_of(model, cluster, 6, planner=planner, schedule=schedule, stages=3)
    with pytest.raises(tp.InfeasibleError) as refused:
        plan_one(asked)
    assert close * refused.value.memory_bytes < LeastBytes().of(asked, 3) <= refused.value.memory_bytes


def test_who_saves_what_is_cut_and_what_is_whole():
    """Planners that recompute and swap, whose plans keep inputs alone in all slots but one."""
    model, cluster = tp.GPTConfig(n_layer=4, n_head=2, n_embd=32, vocab_size=60, block_size=64), tp.Cluster(3, memory_bytes=1e12)
    asked = request_of(model, cluster, 6, planner="dawnpiper", schedule="1f1b", stages=3)
    keeps = request_of(model, cluster, 6, planner="pipedream", schedule="1f1b", stages=3)
    least = LeastBytes().of(asked, 3)
    assert least < LeastBytes().of(keeps, 3)
    judge = asked.judge(3)
    whole = ((1, (64,)),) * 6
    kinds = [block.kind for block in model.blocks]
    for what in itertools.product((False, True), repeat=3):
        for cut in itertools.combinations(range(1, 10), 2):
            again = tuple(what[i // 4] and kind in ("attention", "ffn") for i, kind in enumerate(kinds))
            ends = tuple(itertools.pairwise((0, *cut, 10)))
            found = judge.judge("1f1b", ends, whole, 0, Savings(again) if any(again) else None)
            assert max(judge.peak_bytes(found)) >= least


@pytest.mark.parametrize("unit", [0, 16])
def test_bound_of_who_may_recompute_is_below_a_sequence_in_slices(unit):
    """Whose gradients between blocks have room for one slice: the fullest rank's, from the head to its FFN."""
    model = tp.GPTConfig(n_layer=1, n_head=2, n_embd=32, vocab_size=500, block_size=512, tie_weights=False)
    ffns, able = (tuple(block.kind in kinds for block in model.blocks) for kinds in (("ffn",), ("attention", "ffn")))
    slicing, ends = [(1, [16] * 32)], [0, 1, 2, 4]
    program = tp.schedules.seq1f1b(3, 1, 32).split(pending=0).save_memory(bytes([0, 0, 2]), bytes(3)).lower()
    taken = rank_memory(model, list(itertools.pairwise(ends)), slicing, program, recompute=ffns)
    least = _core.least_memory(dimensions(model), (512, 1, slicing), unit, 1, 3, [0, 1, 2], [1, 1, 1], 1, 1,
                               all_saved=saves_bytes(able), partition=ends)
    assert max(taken) == taken[2] and 0.9 * taken[2] < least <= taken[2]


def count_asked(monkeypatch):
    asked = []

    def counting(request, judge_of=None):
        asked.append(request)
        return plan_one(request, judge_of)

    monkeypatch.setattr(joint, "plan_one", counting)
    monkeypatch.setattr(singles, "plan_one", counting)
    return asked


@pytest.mark.parametrize("limit", [2_000_000, 2_740_000])
def test_only_what_may_fit_or_need_less_is_asked(monkeypatch, limit):
    """A refusal, and a plan: the same as if all had been asked."""
    model, cluster = tp.GPTConfig(n_layer=2, n_head=1, n_embd=64, vocab_size=11, block_size=64), tp.Cluster(2, memory_bytes=limit)
    asked, answers = count_asked(monkeypatch), []
    for lacks in (LeastBytes.lacks, lambda *_: False):
        monkeypatch.setattr(LeastBytes, "lacks", lacks)
        try:
            plan = tp.plan(model, cluster, 2, 64, granularity=16, stages=2, recompute="ffn")
            answers.append((plan.digest, plan.step_time_s, plan.peak_memory_bytes, len(asked)))
        except tp.InfeasibleError as refused:
            answers.append((str(refused), len(asked)))
        asked.clear()
    assert answers[0][:-1] == answers[1][:-1]
    assert answers[0][-1] < 0.75 * answers[1][-1]           # of 59 questions 37 and 42: plans with whole B need little


def test_sizes_of_micro_batches_are_asked_of_until_one_may_fit(monkeypatch):
    """Of sequences of no whole lines each size has its own bound; out of time none is looked for."""
    model, cluster = tp.GPTConfig(n_layer=2, n_head=1, n_embd=64, vocab_size=11, block_size=60), tp.Cluster(2, memory_bytes=1e12)
    asked, bound = [], _core.least_memory
    monkeypatch.setattr(_core, "least_memory", lambda *given, **more: asked.append(given) or bound(*given, **more))
    request = request_of(model, cluster, 24, schedule="1f1b", stages=2, memory_bytes=1e12)
    assert not LeastBytes().lacks(request, 2, 0.0) and len(asked) == 1
    known = LeastBytes()
    assert not known.lacks(request, 2, 1e12) and known.lacks(replace(request, limit=1), 2, 0.0) and len(asked) == 1 + 24
    with within(0.0):
        assert not LeastBytes().lacks(replace(request, limit=1), 2, 0.0) and len(asked) == 1 + 24


def test_bound_of_a_given_partition():
    model, cluster = tp.GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=60, block_size=64), tp.Cluster(2, memory_bytes=1e12)
    cut = [(0, 5), (5, 6)]
    asked = request_of(model, cluster, 4, schedule="1f1b", partition=cut, stages=2)
    judge = asked.judge(2)
    bytes_of_plan = max(judge.peak_bytes(judge.judge("1f1b", tuple(cut), ((1, (64,)),) * 4, 0)))
    open_cut = request_of(model, cluster, 4, schedule="1f1b", stages=2)
    assert LeastBytes().of(open_cut, 2) < LeastBytes().of(asked, 2) <= bytes_of_plan < 1.03 * LeastBytes().of(asked, 2)


def test_bound_of_ffns_that_are_made_again_at_once():
    """Where several sequences are cut, a slice and what a W leaves to it would have more rows than a micro-batch has."""
    model, cluster = tp.GPTConfig(n_layer=5, n_head=1, n_embd=8, vocab_size=11, block_size=63), tp.Cluster(1, memory_bytes=1e12)
    slicing = ((2, (58, 5)), (2, (63,)))
    asked = request_of(model, cluster, 4, schedule="1f1b", stages=1, slicing=slicing, recompute="ffn")
    judge = asked.judge(1)
    bytes_of_plan = max(judge.peak_bytes(judge.judge("1f1b", ((0, 12),), slicing, 0)))
    assert 0.99 * bytes_of_plan < LeastBytes().of(asked, 1) <= bytes_of_plan


@pytest.mark.parametrize("change, said", [
    ({"slots": [1, 0]}, "stage 1 has 0 slots on rank 1"), ({"rank_of": [0, 2]}, "stage 1 has 1 slots on rank 2"),
    ({"slots": [1]}, "the stages' slots are 1: 2 would be right"), ({"rank_of": [0] * 9, "slots": [1] * 9}, "9 stages on 2 ranks"),
    ({"batch": 0}, "0 sequences"), ({"copies": 3}, "3 copies"), ({"unit": -1}, "units of -1"), ({"replicas": 0}, "0 replicas"),
    ({"partition": [0, 4, 5]}, "stage 0 has blocks"), ({"partition": [0, 6]}, "boundaries are 2: 3 would be right"),
    ({"saves": b"1"}, "saves has 1 entries")])
def test_what_does_not_fit_together_is_refused(change, said):
    given = {"model": (2, 1, 8, 11, 8, 1, 1), "slicing": (8, 1, [(1, [8])]), "unit": 1, "batch": 1, "ranks": 2, "rank_of": [0, 1],
             "slots": [1, 1], "replicas": 1, "copies": 1}
    assert _core.least_memory(**given) > 0
    with pytest.raises(tp.InvalidValueError, match=said):
        _core.least_memory(**{**given, **change})


def test_many_layers_on_many_ranks_are_not_bounded():
    """Where it would take long: 0 says nothing."""
    model = (400, 1, 8, 11, 8, 1, 1)
    given = {"model": model, "slicing": (8, 1, [(1, [8])]), "unit": 1, "batch": 1, "ranks": 100, "rank_of": range(100),
             "slots": [1] * 100, "replicas": 1, "copies": 1}
    assert _core.least_memory(**given) == 0
