"""TeraPipe beyond equal stages: unequal stages, links beside the work, memory of a slice, flushes; all against enumeration."""

import json
from pathlib import Path

import numpy as np
import pytest
from slice_tables import KINDS, dense_table, slicings

import terapipe_c as tp
from terapipe_c import _core, planners
from terapipe_c.planners import SliceMemory

CUTS = {n: [(np.array(x), np.cumsum(x) - x) for x in slicings(n)] for n in range(1, 10)}


def shop(times):
    """The flow shop's recurrence, written once more."""
    clock = [0.0] * times.shape[1]              # plain floats: this loop is most of the time of this file
    for job in times.tolist():
        ready = 0.0
        for q, seconds in enumerate(job):
            ready = clock[q] = max(clock[q], ready) + seconds
    return clock[-1]


def uneven_time(tables, lengths, starts, comm=None):
    columns = []
    for k, t in enumerate(tables):
        if k and comm is not None:
            columns.append(comm[lengths, starts])
        columns.append(t[lengths, starts])
    return shop(np.array(columns).T)


def close(a, b):
    return abs(a - b) <= 1e-9 * max(abs(b), 1e-12)


def test_flow_shop_is_its_recurrence():
    rng = np.random.default_rng(1)
    for _ in range(300):
        times = rng.uniform(0, 3, (int(rng.integers(1, 12)), int(rng.integers(1, 9))))
        assert close(planners.flow_shop_time(times), shop(times))
    # K - 1 equal stages and another last one: the closed form of PLANNERS.md 1.8
    for _ in range(300):
        t, q, stages = rng.uniform(0, 3, 7), rng.uniform(0, 3, 7), int(rng.integers(2, 9))
        want = max(t[: s + 1].sum() + (stages - 2) * t[: s + 1].max() + q[s:].sum() for s in range(7))
        assert close(planners.flow_shop_time(np.column_stack([t] * (stages - 1) + [q])), want)
    with pytest.raises(ValueError, match=r"times\[1, 0\] is nan"):
        planners.flow_shop_time(np.array([[1.0], [np.nan]]))


def test_unequal_stages_equal_enumeration():
    rng = np.random.default_rng(2)
    count, slack = 2000, []
    for i in range(count):
        n, stages = int(rng.integers(1, 8)), int(rng.integers(1, 6))
        tables = [dense_table(rng, n, KINDS[int(rng.integers(0, 5))]) for _ in range(stages)]
        bwd = [dense_table(rng, n, KINDS[int(rng.integers(0, 5))]) for _ in range(stages)] if i % 2 else None
        comm = dense_table(rng, n, KINDS[i % 5]) if i % 3 == 0 else None
        cap = int(rng.integers(1, n + 1)) if i % 5 == 0 else None
        want = min(
            uneven_time(tables, *cut, comm) + (uneven_time(bwd, *cut, comm) if bwd else 0.0)
            for cut in CUTS[n]
            if cap is None or cut[0].max() <= cap
        )
        got = planners.slice_uneven(tables, bwd=bwd, comm=comm, max_slice=cap)
        assert got.optimal and close(got.latency_s, want), (i, n, stages, got, want)
        assert sum(got.lengths) == n and (cap is None or max(got.lengths) <= cap)
        assert want * (1 - 1e-9) <= got.lower_bound_s <= want * (1 + 1e-15)
        hasty = planners.slice_uneven(tables, bwd=bwd, comm=comm, max_slice=cap, work=1)
        assert hasty.lower_bound_s <= want * (1 + 1e-12) <= hasty.latency_s * (1 + 2e-12)
        slack.append(hasty.gap if np.isfinite(hasty.gap) else 0.0)
    print(f"{count} of {count} equal enumeration; without work the mean gap is {np.mean(slack):.2%}")


class Curve:
    """Costs in the form of eq. 9, of one stage."""

    def __init__(self, scale=1.0, backward=None):
        self.scale, self.backward, self.model = scale, backward, None

    def slice_cost(self, seq_len, granularity, phase):
        if phase == "bwd" and self.backward is not None:
            return self.backward.slice_cost(seq_len, granularity, "fwd")
        x = np.arange(seq_len // granularity + 1) * float(granularity)
        g = ((0.9e-3**4 + (2.1e-6 * x) ** 4) ** 0.25 + 1e-10 * x * x) * self.scale
        return {"G0": g, "G1": g + 1e-6 * self.scale, "a2": 0.0, "a3": 2e-10 * granularity**2 * self.scale}

    def table(self, seq_len, granularity):
        p = self.slice_cost(seq_len, granularity, "fwd")
        s, c = np.meshgrid(np.arange(len(p["G0"])), np.arange(len(p["G0"])), indexing="ij")
        return np.where(c == 0, p["G0"][s], p["G1"][s] + p["a2"] * c + p["a3"] * s * c)


def test_equal_stages_are_the_plain_problem():
    for stages in (1, 2, 24):
        plain = planners.slice_tokens(Curve(), stages, seq_len=512, granularity=8)
        same = planners.slice_uneven([Curve()] * stages, seq_len=512, granularity=8)
        assert same.optimal and close(same.latency_s, plain.latency_s) and sum(same.lengths) == 512
        apart = planners.slice_tokens(Curve(backward=Curve(2.5)), stages, seq_len=512, granularity=8, bwd=True)
        both = planners.slice_uneven([Curve()] * stages, bwd=[Curve(2.5)] * stages, seq_len=512, granularity=8)
        assert both.optimal and close(both.latency_s, apart.latency_s)


def test_long_sequences_have_a_local_optimum_and_a_bound():
    costs = [Curve(1.0 + 0.02 * ((7 * k) % 5)) for k in range(12)]
    plans = {g: planners.slice_uneven(costs, seq_len=2048, granularity=g) for g in (16, 8, 2)}
    assert plans[16].optimal and plans[8].latency_s <= plans[16].latency_s * (1 + 1e-12)
    assert plans[2].latency_s <= plans[8].latency_s * (1 + 2e-3) and plans[2].gap < 0.03
    assert plans[2].lower_bound_s <= plans[8].latency_s  # a finer granularity: its bound holds for every coarser slicing
    surrogate = planners.slice_tokens(Curve(1.08), 12, seq_len=2048, granularity=8)
    assert plans[8].latency_s < surrogate.latency_s
    again = planners.slice_uneven(costs, seq_len=2048, granularity=2)
    assert again.lengths == plans[2].lengths and again.latency_s == plans[2].latency_s
    curves = planners.slice_uneven(costs[:3], seq_len=1040, granularity=4)
    tables = planners.slice_uneven([c.table(1040, 4) for c in costs[:3]])
    assert close(tables.lower_bound_s, curves.lower_bound_s) and 0.99 * curves.latency_s < curves.lower_bound_s <= curves.latency_s


def test_unequal_stages_scale_and_grow():
    rng = np.random.default_rng(4)
    for i in range(100):
        n, stages = int(rng.integers(2, 30)), int(rng.integers(1, 7))
        tables = np.stack([dense_table(rng, n, KINDS[i % 4]) for _ in range(stages)])
        base = planners.slice_uneven(tables)
        assert base.optimal
        assert close(planners.slice_uneven(tables * 1024.0).latency_s, 1024.0 * base.latency_s)
        more = planners.slice_uneven(np.concatenate([tables, tables[:1]])).latency_s
        assert more >= base.latency_s * (1 - 1e-12)  # one more stage
        assert planners.slice_uneven(tables, max_slice=max(1, n // 2)).latency_s >= base.latency_s * (1 - 1e-12)
        if n % 2 == 0:
            coarse = np.ascontiguousarray(tables[:, ::2, ::2])
            assert planners.slice_uneven(coarse).latency_s >= base.latency_s * (1 - 1e-12)
    zero = planners.slice_uneven(np.zeros((3, 5, 5)))
    assert zero.optimal and zero.latency_s == zero.lower_bound_s == zero.gap == 0.0 and "unequal" in repr(zero)


def test_links_beside_the_work_equal_enumeration():
    rng = np.random.default_rng(5)
    count, proved, within = 2000, 0, 0
    for i in range(count):
        n, stages = int(rng.integers(1, 9)), int(rng.integers(1, 7))
        t = dense_table(rng, n, KINDS[i % 5])
        b = dense_table(rng, n, KINDS[(i // 5) % 5]) if i % 4 == 0 else None
        short = i % 2 == 0
        x = t * rng.uniform(0, 1, t.shape) if short else dense_table(rng, n, KINDS[(i // 3) % 5]) * rng.uniform(0, 2)
        if short and b is not None:
            x = np.minimum(x, b)
        x = np.ascontiguousarray(x)
        want = min(
            sum(uneven_time([p] * stages, *cut, x) for p in (t, b) if p is not None) for cut in CUTS[n]
        )
        got = planners.slice_tokens(t, stages, bwd=b, comm=x)
        assert close(got.latency_s, want) if got.optimal else want <= got.latency_s * (1 + 1e-12), (i, got, want)
        assert got.lower_bound_s <= want * (1 + 1e-12)
        proved += got.optimal
        within += short
        if short:
            assert got.optimal and close(got.latency_s, want)
            if b is None:
                assert close(got.latency_s, got.total_s + (stages - 1) * got.max_s)
        blocking = planners.slice_tokens(t + x, stages, bwd=None if b is None else b + x)
        assert got.latency_s <= blocking.latency_s * (1 + 1e-9) if got.optimal else True
    assert proved == count  # these are small
    print(f"{count} of {count} equal enumeration, {proved} proved; in {within} no message was longer than its slice")


def test_a_message_may_be_longer_than_its_slice_only_at_the_second_place():
    """Costs that are linear in the context are less after one unit than after none: only there messages are too long."""

    class Costs:
        def slice_cost(self, seq_len, granularity, phase):
            return {"G0": np.array([0.0, 6, 12, 12, 19, 13, 17]), "G1": np.array([0.0, 0, 5, 3, 5, 3, 2]), "a2": 0.0, "a3": 1.0}

    seconds, cost = np.array([0.0, 4, 1, 12, 9, 8, 4]), Costs().slice_cost(6, 1, "both")
    s, c = np.indices((7, 7))
    table = np.where(c == 0, cost["G0"][s], cost["G1"][s] + s * c)
    message = np.repeat(seconds[:, None], 7, axis=1)
    want = min(uneven_time([table] * 3, *cut, message) for cut in CUTS[6])
    found = planners.slice_tokens(Costs(), 3, seq_len=6, granularity=1, comm=seconds)
    assert found.optimal and close(found.latency_s, want)


def test_links_of_a_cost_model_and_by_length():
    seconds = 1e-4 + 1e-7 * np.arange(257) * 8
    plan = planners.slice_tokens(Curve(), 24, seq_len=2048, granularity=8, comm=seconds)
    dense = planners.slice_tokens(Curve().table(2048, 8), 24, comm=np.repeat(seconds[:, None], 257, 1).copy())
    assert plan.optimal and close(plan.latency_s, dense.latency_s)
    free = planners.slice_tokens(Curve(), 24, seq_len=2048, granularity=8)
    assert free.latency_s < plan.latency_s
    slow = planners.slice_tokens(Curve(), 24, seq_len=2048, granularity=8, comm=seconds * 20)
    assert slow.latency_s > plan.latency_s and slow.lower_bound_s <= slow.latency_s and slow.gap < 0.05
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=64, block_size=128)
    costs = tp.CostModel.analytic(model, tp.Cluster(num_devices=2, memory_bytes=1e9))
    own = planners.slice_tokens(costs, 4, seq_len=128, granularity=8, comm=True)
    given = planners.slice_tokens(costs, 4, seq_len=128, granularity=8, comm=costs.message_s(np.arange(17.0) * 8, 64))
    assert own == pytest.approx(given) or own.latency_s == given.latency_s
    with pytest.raises(ValueError, match="comm is True"):
        planners.slice_tokens(np.ones((5, 5)), 4, comm=True)
    with pytest.raises(ValueError, match="comm has 3 units"):
        planners.slice_tokens(np.ones((5, 5)), 4, comm=np.ones((4, 4)))
    with pytest.raises(ValueError, match=r"comm\[1, 3\] is -"):
        planners.slice_tokens(np.ones((5, 5)), 4, comm=np.where(np.add.outer(2 * np.arange(5), np.arange(5)) == 5, -1.0, 1.0))


def test_links_between_unequal_stages_are_given_as_between_equal_ones():
    """By slice length, or True for a cost model's own: both were refused here, and a table alone was taken."""
    rng = np.random.default_rng(43)
    tables, seconds = [dense_table(rng, 6, kind) for kind in KINDS[:3]], rng.uniform(0, 3, 7)
    wanted = planners.slice_uneven(tables, comm=np.repeat(seconds[:, None], 7, axis=1))
    found = planners.slice_uneven(tables, comm=seconds)
    assert (found.lengths, found.latency_s) == (wanted.lengths, wanted.latency_s) and found.optimal
    assert planners.slice_uneven(tables, comm=False).latency_s == planners.slice_uneven(tables).latency_s < found.latency_s
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=64, block_size=48)
    cluster = tp.Cluster(2, devices_per_node=2, memory_bytes=1e9, link_latency_s=1e-5, link_bandwidth_Bps=1e8, peak_flops=1e11)
    costs = tp.CostModel.analytic(model, cluster)
    own = planners.slice_uneven([costs, costs], comm=True, seq_len=48, granularity=8)
    equal = planners.slice_tokens(costs, 2, comm=True, seq_len=48, granularity=8)
    assert own.lengths == equal.lengths and close(own.latency_s, equal.latency_s)
    with pytest.raises(tp.InvalidValueError, match=r"comm is True, but tables\[0\] knows no model"):
        planners.slice_uneven(tables, comm=True)
    for wrong, words in ((seconds[:-1], "comm has 5 units: 6"), ([0.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0], r"comm\[2\] is -1"),
                         ([np.nan] * 7, r"comm\[1\] is nan"), ([1e301] * 7, r"comm\[1\] is 1e\+301: seconds from")):  # fmt: skip
        for call in (planners.slice_uneven, lambda t, **more: planners.slice_tokens(t[0], 2, **more)):
            with pytest.raises(tp.InvalidValueError, match=words):
                call(tables, comm=wrong)


def test_memory_of_a_slice_equals_enumeration():
    rng = np.random.default_rng(6)
    count, refused = 1500, 0
    for i in range(count):
        n, stages = int(rng.integers(1, 9)), int(rng.integers(1, 40))
        row, pair, context = rng.integers(0, 9, 3)
        limit = float(rng.integers(1, 9 * n + 9 * n * n // 2 + 2))
        memory = SliceMemory(limit, float(row), float(pair), float(context))
        t, b = dense_table(rng, n, KINDS[i % 5]), dense_table(rng, n, KINDS[(i + 1) % 5])
        if i % 3 == 0:
            g = t[:, 0].copy()
            a2, a3 = 1e-4 * rng.random(), 1e-4 * rng.random()
            s, c = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
            t = np.where(c == 0, g[s], g[s] + a2 * c + a3 * s * c)
            costs = (g, g, a2, a3)
        kept = [
            (s, c) for s, c in CUTS[n] if (row * s + pair * s * (s + c) + context * (s + c)).max() <= limit
        ]
        if not kept:
            refused += 1
            part = SliceMemory(limit / 8, row / 8, pair / 8, context / 8)      # fractions of bytes too are named in full
            with pytest.raises(tp.InfeasibleError, match="bytes short") as refusal:
                planners.slice_tokens(t, stages, memory=part)
            enough = float(str(refusal.value).split("limit_bytes = ")[1].split()[0])
            planners.slice_tokens(t, stages, memory=SliceMemory(enough, row / 8, pair / 8, context / 8))
            continue
        want = min(t[s, c].sum() + (stages - 1) * t[s, c].max() for s, c in kept)
        if i % 3 == 0:
            model = type("M", (), {"slice_cost": lambda self, *a, k=costs: dict(G0=k[0], G1=k[1], a2=k[2], a3=k[3])})()
            got = planners.slice_tokens(model, stages, seq_len=n, granularity=1, memory=memory)
        else:
            got = planners.slice_tokens(t, stages, memory=memory)
        assert got.optimal and close(got.latency_s, want), (i, n, stages, memory, got, want)
        want = min(
            (t + b)[s, c].sum() + (stages - 1) * (t[s, c].max() + b[s, c].max()) for s, c in kept
        )
        got = planners.slice_tokens(t, stages, bwd=b, memory=memory)
        assert got.optimal and close(got.latency_s, want)
        few = min(stages, 4)
        assert close(
            planners.slice_uneven([t] * few, memory=memory).latency_s,
            planners.slice_tokens(t, few, memory=memory).latency_s,
        )
        more = SliceMemory(2 * limit, float(row), float(pair), float(context))
        assert planners.slice_tokens(t, stages, bwd=b, memory=more).latency_s <= got.latency_s * (1 + 1e-12)
    print(f"{count - refused} equal enumeration, {refused} rightly refused")


def test_memory_in_long_sequences():
    """Coarse hints and vectors: the smooth form and the dense one agree, and keep the limit."""
    for limit, pair in ((3.0e5, 1.0), (9e4, 0.2), (1.2e6, 2.0)):
        memory = SliceMemory(limit, 100.0, pair, 10.0)
        plan = planners.slice_tokens(Curve(), 24, seq_len=1024, granularity=2, memory=memory)
        dense = planners.slice_tokens(
            Curve().table(1024, 2), 24, memory=SliceMemory(limit, 200.0, 4 * pair, 20.0)
        )
        s = np.array(plan.lengths)
        c = np.cumsum(s) - s
        assert (100 * s + pair * s * (s + c) + 10 * (s + c)).max() <= limit
        assert plan.optimal and dense.optimal and close(plan.latency_s, dense.latency_s)
        free = planners.slice_tokens(Curve(), 24, seq_len=1024, granularity=2)
        assert plan.latency_s >= free.latency_s
    with pytest.raises(ValueError, match="limit_bytes"):
        planners.slice_tokens(Curve(), 24, seq_len=1024, memory=SliceMemory(0.0))
    with pytest.raises(ValueError, match="row_bytes is nan"):
        planners.slice_tokens(Curve(), 24, seq_len=1024, memory=SliceMemory(1.0, float("nan")))


def test_flushes_equal_enumeration():
    rng = np.random.default_rng(7)
    count = 500
    for i in range(count):
        n, batch, stages = int(rng.integers(1, 6)), int(rng.integers(1, 7)), int(rng.integers(1, 30))
        flight = int(rng.integers(1, batch + 2))
        tables = [np.zeros((n + 1, n + 1))]
        tables += [dense_table(rng, n, KINDS[i % 5]) * (0.4 + 0.6 * b) for b in range(1, batch + 1)]
        t = np.stack(tables)
        once = [0.0] + [
            planners.slice_batch_and_tokens(t, b, stages).latency_s for b in range(1, min(flight, batch) + 1)
        ]
        least = [0.0] + [np.inf] * batch
        for q in range(1, batch + 1):
            least[q] = min(least[q - b] + once[b] for b in range(1, min(q, flight) + 1))
        got = planners.slice_batch_and_tokens(t, batch, stages, max_in_flight=flight)
        assert got.optimal and close(got.latency_s, least[batch]) and got.lower_bound_s <= least[batch]
        assert close(got.lower_bound_s, least[batch])
        assert sum(got.flushes) == batch and max(got.flushes) <= flight
        groups, at, all_s = list(got.slicing), 0, 0.0
        for flushed in got.flushes:  # the groups in order belong to the flushes
            total, largest, sequences = 0.0, 0.0, 0
            while sequences < flushed:
                size, lengths = groups[at]
                s = np.array(lengths)
                seconds = t[size][s, np.cumsum(s) - s]
                total, largest = total + seconds.sum(), max(largest, seconds.max())
                sequences, at = sequences + size, at + 1
            assert sequences == flushed
            least[0] += total + (stages - 1) * largest
            all_s += total
        assert close(all_s, got.total_s)
        assert at == len(groups) and close(least[0], got.latency_s)
        all_at_once = planners.slice_batch_and_tokens(t, batch, stages)
        assert all_at_once.flushes == [batch] and all_at_once.latency_s <= got.latency_s * (1 + 1e-12)
    print(f"{count} of {count} equal the recursion over flushes")
    with pytest.raises(ValueError, match="max_in_flight is 0"):
        planners.slice_batch_and_tokens(t, 2, 4, max_in_flight=0)


def test_a_gap_ends_the_search_with_a_proof():
    exact = planners.slice_tokens(Curve(), 48, seq_len=4096, granularity=1)
    for gap in (0.05, 2e-3):
        near = planners.slice_tokens(Curve(), 48, seq_len=4096, granularity=1, gap=gap)
        assert near.gap <= gap and near.lower_bound_s <= exact.latency_s <= near.latency_s
        assert near.searches <= exact.searches
    apart = planners.slice_tokens(Curve(), 48, seq_len=4096, granularity=1, bwd=True)
    for gap in (5.0, 0.05, 2e-3):
        near = planners.slice_tokens(Curve(), 48, seq_len=4096, granularity=1, bwd=True, gap=gap)
        assert near.gap <= min(gap, 1.0) and near.lower_bound_s <= apart.latency_s <= near.latency_s
        assert near.boxes < apart.boxes
    hasty = planners.slice_tokens(Curve(), 48, seq_len=4096, granularity=1, time_limit_s=1e-9)
    assert not hasty.optimal and 0 < hasty.gap and hasty.lower_bound_s <= exact.latency_s <= hasty.latency_s
    with pytest.raises(ValueError, match="gap is -1"):
        planners.slice_tokens(Curve(), 4, seq_len=64, gap=-1.0)


def test_a_long_time_limit_is_as_good_as_none():
    """Where messages take longer than slices: with 300 s the bound had 15 times the work that it has without a limit."""

    class Costs:
        def slice_cost(self, seq_len, granularity, phase):
            i = np.arange(1025.0)
            g = (2 + 0.05 * i) * (1.15 + 0.15 * np.sin(i * i))
            return {"G0": g, "G1": g + 0.2, "a2": 0.001, "a3": 5e-5}

    comm = 3 + 0.3 * np.arange(1025.0)
    free, limited = (planners.slice_tokens(Costs(), 4, seq_len=1024, comm=comm, time_limit_s=limit_s) for limit_s in (None, 300.0))
    assert (free.lengths, free.lower_bound_s) == (limited.lengths, limited.lower_bound_s) and not free.optimal


def test_all_numbers_of_stages_at_once():
    costs = Curve()
    counts = [3, 1, 96, 17, 18, 19, 48, 3]
    many = planners.slice_tokens_for(costs, counts, seq_len=512, granularity=8)
    for k, plan in zip(counts, many, strict=True):
        one = planners.slice_tokens(costs, k, seq_len=512, granularity=8)
        assert plan.stages == k and plan.optimal and close(plan.latency_s, one.latency_s)
        assert plan.lower_bound_s <= one.latency_s
    assert planners.slice_tokens_for(costs, []) == []


def test_many_numbers_of_stages_with_messages_are_each_what_one_alone_is() -> None:
    """One stage sends nothing, so that the latencies of more lie on no line with its own."""
    rng = np.random.default_rng(31)
    for i in range(60):
        n = int(rng.integers(1, 8))
        t, comm = rng.uniform(0.1, 9.0, (n + 1, n + 1)), rng.uniform(0.0, (1.0, 20.0)[i % 2], n + 1)
        bwd = rng.uniform(0.1, 9.0, (n + 1, n + 1)) if i % 3 else None
        counts = [1, 2, 4, 7, 12]
        for k, plan in zip(counts, planners.slice_tokens_for(t, counts, bwd=bwd, comm=comm), strict=True):
            alone = planners.slice_tokens(t, k, bwd=bwd, comm=comm)
            assert plan.stages == k and plan.lengths == alone.lengths
            assert (plan.latency_s, plan.max_s, plan.lower_bound_s) == (alone.latency_s, alone.max_s, alone.lower_bound_s)


# TeraPipe (Li et al., ICML 2021), table 3: (setting, lengths of one sequence, sequences, seconds of a step); the last row of
# a setting is the authors' dynamic programme. Pipeline lengths are those of table 1.
PAPER_STAGES = {8: 48, 9: 96}
PAPER_ROWS = [
    (8, [2048], 8, 2.662),
    (8, [512] * 4, 8, 1.241),
    (8, [256] * 8, 8, 1.255),
    (8, [128] * 16, 8, 1.241),
    (8, [384] * 2 + [368, 320] + [296] * 2, 8, 1.111),
    (9, [2048], 2, 9.99),
    (9, [512] * 4, 2, 2.902),
    (9, [256] * 8, 2, 1.892),
    (9, [128] * 16, 2, 1.547),
    (9, [64] * 32, 2, 1.593),
    (9, [32] * 64, 2, 2.227),
    (9, [16] * 128, 2, 3.252),
    (9, [120] * 4 + [112] * 6 + [104] * 8 + [64], 2, 1.481),
]
# Longer sequences, from tables 2 to 4 of the paper as PLANNERS.md 1.9 quotes them: (tokens, lengths).
PAPER_LONGER = [
    (4096, [552, 536, 528, 512, 504, 496, 488, 480]),
    (6144, [584, 568] + [512] * 6 + [496, 488, 472, 464]),
    (8192, [512] * 6 + [480] * 2 + [416] * 10),
]
PLACES = [folder / "shared" / "data" / "papers" / "terapipe.json" for folder in Path(__file__).resolve().parents[1:]]
PAPER = next((path for path in PLACES if path.exists()), PLACES[0])


def calibrated(setting, rows, stages, a3):
    """g through the uniform rows of table 3: T = B sum (g + a3 i k i) + (K - 1) (g + a3 i (L - i)), PLANNERS.md 1.9."""
    points = []
    for _, slices, repeat, seconds in rows:
        if len(set(slices)) == 1:
            length, count, tokens = slices[0], len(slices), sum(slices)
            pairs = repeat * length * length * count * (count - 1) / 2 + (stages - 1) * length * (tokens - length)
            points.append((length, (seconds - a3 * pairs) / (repeat * count + stages - 1)))
    lengths, g = zip(*sorted(points), strict=True)
    curve = np.interp(np.arange(257) * 8.0, lengths, g)
    return type("M", (), {"slice_cost": lambda self, *a: dict(G0=curve, G1=curve, a2=0.0, a3=a3 * 64)})(), curve


@pytest.mark.skipif(not PAPER.exists(), reason="no shared data beside the tests")
def test_the_rows_here_are_those_of_the_shared_data():
    paper = json.loads(PAPER.read_text())
    assert [(row[0], row[2], row[3], row[4]) for row in paper["table3"]] == PAPER_ROWS
    assert {row[0]: row[9] for row in paper["table1"] if row[0] in PAPER_STAGES} == PAPER_STAGES


def test_the_papers_rows():
    for tokens, lengths in [(2048, row[1]) for row in PAPER_ROWS] + PAPER_LONGER:
        assert all(n % 8 == 0 for n in lengths) and sum(lengths) == tokens
    per_slice = {  # PLANNERS.md 1.9: T = t (B M + K - 1), in ms
        (9, 1): 102.99, (9, 4): 28.18, (9, 8): 17.05, (9, 16): 12.18, (9, 32): 10.02, (9, 64): 9.99, (9, 128): 9.27,
        (8, 1): 48.4, (8, 4): 15.7, (8, 8): 11.31, (8, 16): 7.09,
    }  # fmt: skip
    for setting, lengths, batch, seconds in PAPER_ROWS:
        if len(set(lengths)) == 1:
            mean = 1e3 * seconds / (batch * len(lengths) + PAPER_STAGES[setting] - 1)
            assert abs(mean / per_slice[setting, len(lengths)] - 1) < 2e-3
    for setting, a3, published in ((9, 5.95e-9, 1.481), (8, 5e-9, 1.111)):
        rows = [row for row in PAPER_ROWS if row[0] == setting]
        stages, batch = PAPER_STAGES[setting], rows[0][2]
        model, curve = calibrated(setting, rows, stages, a3)
        n = 257
        s, c = np.meshgrid(np.arange(n), np.arange(n), indexing="ij")
        one = curve[s] + a3 * 64 * s * c
        plan = planners.slice_batch_and_tokens(np.stack([0 * one, one]), batch, stages, max_group=1)
        for row in rows:
            lengths = np.array(row[1]) // 8
            seconds = one[lengths, np.cumsum(lengths) - lengths]
            assert plan.latency_s <= (batch * seconds.sum() + (stages - 1) * seconds.max()) * (1 + 1e-12)
        assert plan.optimal and abs(plan.latency_s / published - 1) < (0.013 if setting == 9 else 0.10)


def test_bad_requests_are_refused_by_name():
    good = np.ones((5, 5))
    for kind, word, call in (
        (ValueError, "no stages", lambda: planners.slice_uneven([])),
        (ValueError, r"bwd has 1 stages: 2", lambda: planners.slice_uneven([good, good], bwd=[good])),
        (ValueError, "3 units: 4", lambda: planners.slice_uneven([good, np.ones((4, 4))])),
        (ValueError, r"tables\[1\]\[1, 0\] is -", lambda: planners.slice_uneven([good, -good])),
        (ValueError, r"bwd\[1\]\[1, 0\] is -", lambda: planners.slice_uneven([good, good], bwd=[good, -good])),
        (ValueError, r"bwd\[0\] has 2 units: 4, as tables\[0\]", lambda: planners.slice_uneven([good], bwd=[good[:3, :3]])),
        (ValueError, r"comm\[1, 0\] is -", lambda: planners.slice_uneven([good, good], comm=-good)),
        (ValueError, "nan", lambda: planners.slice_uneven([good * np.nan])),
        (ValueError, "max_slice", lambda: planners.slice_uneven([good], max_slice=0)),
        (ValueError, "work is -1", lambda: planners.slice_uneven([good], work=-1)),
        (ValueError, "seq_len", lambda: planners.slice_uneven([Curve()])),
        (TypeError, "work", lambda: planners.slice_uneven([good], work=0.5)),
        (tp.InfeasibleError, "1 bytes short", lambda: planners.slice_uneven([good], memory=SliceMemory(9.0, 10.0))),
        (ValueError, "no machines", lambda: planners.flow_shop_time(np.ones((2, 0)))),
        (ValueError, "beyond what a double holds", lambda: planners.flow_shop_time(np.full((3, 2), 1e308))),
    ):
        with pytest.raises(kind, match=word):
            call()


def test_the_queue_of_monge_costs_is_the_kernels_search():
    """The queue (slice_monge.c) against the SIMD search: same sums to the bit, on tables where it may be used."""
    rng = np.random.default_rng(8)
    count, used, wrong = 0, 0, 0
    for i in range(3000):
        n, a2 = int(rng.integers(2, 100)), float(rng.choice([0.0, rng.random()]))
        a3 = float(rng.integers(0, 4)) if i % 4 == 3 else float(rng.choice([0.0, 0.3 * rng.random(), 1.0]))
        bend = rng.integers(0, 3, n + 1) if i % 4 == 3 else rng.random(n + 1) * rng.choice([0.01, 1.0, 5.0])
        g = np.cumsum(np.cumsum(a3 + bend)) + 30 * rng.random()
        if i % 10 == 9:
            g[rng.integers(1, n + 1)] *= 1.2  # not Monge: seen, and not used beyond
        cost = (g + rng.random(n + 1) * (i % 3 == 0), g, a2, a3)
        for threshold in [*(g[rng.integers(1, n + 1, 5)] * rng.uniform(0.6, 1.6, 5)), 1e300]:
            fast, plain = (_core.slice_least(cost, threshold, queue=q) for q in (1, -1))
            count, used = count + 1, used + fast[2]
            wrong += abs(fast[0] - plain[0]) > 1e-14 * plain[0] if np.isfinite(plain[0]) else fast[0] != plain[0]
            assert not plain[2] and (sum(fast[1]) == n or not np.isfinite(fast[0]))
    assert wrong == 0 and used > count // 2
    print(f"{count} searches, {used} by the queue, {wrong} wrong")
    assert not _core.slice_least(cost, 1e300)[2]  # short sequences take the kernels


def test_a_finer_grid_is_never_slower_where_the_search_is_local() -> None:
    """Up to 256 units the optimum is proven; above, a descent from coarser slices once ended above the next coarser optimum."""
    for seed, tokens, stages in ((2, 512, 4), (4, 512, 2), (9, 768, 3), (19, 1024, 2), (11, 2048, 4)):
        rng = np.random.default_rng(seed)
        i = np.arange(tokens + 1.0)
        curves = [(rng.uniform(0.5, 6) + rng.uniform(0.01, 0.2) * i) * rng.uniform(1, 1.3, tokens + 1) for _ in range(stages)]
        a2, a3 = rng.uniform(0, 0.003), rng.uniform(0, 2e-4)
        before = np.inf
        for unit in (32, 16, 8, 4, 2, 1):
            plan = planners.slice_uneven([(g[::unit].copy(), g[::unit] + 0.5, a2 * unit, a3 * unit**2) for g in curves])
            assert plan.lower_bound_s <= plan.latency_s <= before * (1 + 1e-9), (seed, unit)
            before = plan.latency_s


@pytest.mark.parametrize(("tokens", "unit", "stages", "seed"), [
    (520, 5, 2, 1053058549), (517, 11, 2, 236222550), (336, 3, 2, 47148783), (236, 2, 13, 636665570), (150, 2, 35, 716859021)])
def test_a_finer_grid_is_never_slower_whatever_it_refines(tokens: int, unit: int, stages: int, seed: int) -> None:
    """Odd divisors, and grids whose optimum a label search does not prove: what they refine was not searched."""
    rng = np.random.default_rng(seed)
    i = np.arange(tokens + 1.0) * (512 / tokens)
    curves = [(rng.uniform(0.5, 6) + rng.uniform(0.01, 0.2) * i) * rng.uniform(1, 1.3, tokens + 1) for _ in range(stages)]
    a2, a3 = rng.uniform(0, 0.003) * 512 / tokens, rng.uniform(0, 2e-4) * (512 / tokens) ** 2
    fine, coarse = (planners.slice_uneven([(g[::u].copy(), g[::u] + 0.5, a2 * u, a3 * u**2) for g in curves], work=400_000_000)
                    for u in (1, unit))
    assert fine.latency_s <= coarse.latency_s * (1 + 1e-9)


def test_labels_go_on_until_plans_of_many_units_are_proven() -> None:
    """With as much work as a descent has, this search ends unproven, 0.14 % above the least."""
    s, c = np.arange(161.0)[:, None], np.arange(161.0)[None, :]
    times = 1 + 0.08 * s + 0.00512 * s * (c + s / 2)
    plan = planners.slice_uneven(times * (1 + 0.05 * np.random.default_rng(0).random((24, 161, 161))))
    assert plan.optimal and sum(plan.lengths) == 160
    assert planners.slice_uneven([np.ones((4, 4)), np.ones((4, 4))], work=1 << 40).optimal


def test_memory_and_lengths_of_cost_models_are_in_tokens():
    assert tp.planners.SliceMemory(10, 1, 2, 3).in_units(4) == (10, 4, 32, 12)
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=16, block_size=32)
    costs = [tp.CostModel.analytic(model, tp.Cluster(num_devices=2, peak_flops=1e9))] * 2
    given = dict(seq_len=32, granularity=4)
    assert tp.planners.slice_uneven(costs, comm=False, **given).lengths == tp.planners.slice_uneven(costs, **given).lengths
    whole, capped, apart = (tp.planners.slice_uneven(costs[:1], **given, **more)
                            for more in ({}, {"max_slice": 8}, {"bwd": costs[:1]}))
    assert whole.lengths == apart.lengths == [32] and sum(capped.lengths) == 32 and max(capped.lengths) <= 8
    assert apart.latency_s == pytest.approx(whole.latency_s)   # without bwd a cost is of both
    held = tp.planners.slice_uneven(costs, memory={"limit_bytes": 64, "row_bytes": 8}, **given)
    assert sum(held.lengths) == 32 and max(held.lengths) <= 8
