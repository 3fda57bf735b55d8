"""What every planner takes and refuses alike, and bounds and amounts that rounding or empty costs once broke."""

import copy
import dataclasses
import inspect
import itertools
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import planners

CHAIN = ("autopipe", "autopipe_heuristic", "autopipe_pivot", "autopipe_balanced", "uniform", "pipedream", "dapple", "vpipe",
         "adapipe", "merak")  # fmt: skip
NODES = ("fwd_s", "bwd_s", "recompute_s", "activation_bytes", "param_bytes", "optimizer_bytes")


def calls():
    def nodes_of(times):
        return {key: times if key == "fwd_s" else [1.0, 2.0, 3.0, 4.0] for key in NODES}

    for name in CHAIN:
        yield name, lambda times, name=name, **more: getattr(planners, name)(times, times, 2, 4, **more)
    yield "autopipe_slicer", lambda times, **more: planners.autopipe_slicer(times, times, 4, **more)
    yield "balance", lambda times: planners.balance(times, 2)
    for name in ("dawnpiper", "dawnpiper_binary"):
        yield name, lambda times, name=name: getattr(planners, name)(nodes_of(times), 2, np.inf, 4)
    yield "piper", lambda times, **more: planners.piper(planners.layer_graph(times, times, 2, 4, **more))
    yield "parallel_layers", lambda times, **more: planners.parallel_layers(planners.layer_graph(times, times, 2, 4, **more))


CALLS = dict(calls())
RESULT = re.compile(r"planned in:? [^)]*")


@pytest.mark.parametrize("name", CHAIN)
def test_help_of_a_planner_says_units_shapes_and_errors_of_every_argument(name) -> None:
    planner = getattr(planners, name)
    for word in (*inspect.signature(planner).parameters, "[n] seconds", "InvalidValueError", "InfeasibleError"):
        assert word in planner.__doc__, word


@pytest.mark.parametrize("call", CALLS)
def test_lists_and_integers_plan_what_float64_plans(call) -> None:
    plan = CALLS[call]
    want = RESULT.sub("", repr(plan(np.array([1.0, 2.0, 3.0, 4.0]))))
    for same in ([1.0, 2.0, 3.0, 4.0], [1, 2, 3, 4], (1, 2.0, 3, 4), np.array([1, 2, 3, 4]), np.arange(1, 5, dtype=np.uint8),
                 np.arange(8.0).repeat(2)[2:10:2], np.arange(1.0, 5.0).astype(">f8"), np.arange(1, 5, dtype=np.float32),
                 np.arange(1, 5, dtype=np.float16)):  # fmt: skip
        assert RESULT.sub("", repr(plan(same))) == want


def layouts(table):
    yield np.asfortranarray(table)
    yield table.tolist()
    yield np.ascontiguousarray(table[..., ::-1])[..., ::-1]
    spread = np.full([2 * size for size in table.shape], np.nan)
    spread[tuple(slice(None, None, 2) for _ in table.shape)] = table
    yield spread[tuple(slice(None, None, 2) for _ in table.shape)]
    yield np.frombuffer(bytearray(1) + bytearray(table.tobytes()), offset=1).reshape(table.shape)  # no address is a multiple of 8
    yield table.astype(np.float32)


def test_a_table_of_three_units_may_be_a_tuple_of_four_rows():
    """It was taken for (G0, G1, a2, a3)."""
    table = np.add.outer(np.arange(4.0), 0.1 * np.arange(4.0))
    rows, seconds = tuple(map(tuple, table.tolist())), (0.0, 0.1, 0.2, 0.3)
    assert planners.slice_tokens(rows, 3, bwd=rows) == planners.slice_tokens(table, 3, bwd=table)
    assert planners.slice_uneven((rows, rows)) == planners.slice_uneven([table, table])
    for comm in (rows, seconds):
        assert planners.slice_tokens(rows, 3, comm=comm) == planners.slice_tokens(table, 3, comm=np.array(comm))


def test_a_table_plans_alike_in_every_layout():
    table = np.random.default_rng(0).integers(1, 99, (4, 7, 7)).astype(float)
    for plan in (lambda t: planners.slice_tokens(t[0], 4), lambda t: planners.slice_tokens(table[0], 4, bwd=t[1]),
                 lambda t: planners.slice_tokens(table[0], 4, comm=t[2]), lambda t: planners.slice_batch_and_tokens(t, 3, 4),
                 lambda t: planners.slice_uneven(t), lambda t: planners.slice_bound(t[0], 4, [2, 4])):  # fmt: skip
        for same in layouts(table):
            assert RESULT.sub("", repr(plan(same))) == RESULT.sub("", repr(plan(table)))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("times", "error", "words"),
    [
        (np.ones(4, np.longdouble), ValueError, "dtype float128"),
        (np.ma.masked_array(np.ones(4), [0, 0, 1, 0]), ValueError, "\\[2\\] is masked"),
        (np.ones(4, complex), ValueError, "dtype complex128"),
        (np.ones(4, bool), ValueError, "dtype bool"),
        (np.ones(4, object), ValueError, "dtype object"),
        ([True] * 4, TypeError, "list of bool"),
        ("abcd", TypeError, "is str"),
        (["1", "2", "3", "4"], TypeError, "numbers would be right"),
        (None, TypeError, "is NoneType"),
        (3.0, TypeError, "is float"),
        ([[1.0, 2.0], [3.0]], TypeError, "is list"),
        ([2**53 + 1] * 4, ValueError, r"2\^53"),
        ([10**400] * 4, ValueError, r"2\^53"),
        (np.ones((2, 2)), ValueError, "dimensions|shape"),
        ([1.0, np.nan, 1.0, 1.0], ValueError, "nan"),
    ],
)
def test_what_is_no_list_of_costs_is_refused_by_every_planner(call, times, error, words) -> None:
    with pytest.raises(error, match=words):
        CALLS[call](times)


@pytest.mark.parametrize("name", CHAIN)
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"stages": 2**40}, ValueError, r"is 1099511627776: a number below 2\^31"),
        ({"stages": True}, TypeError, "is True: an integer"),
        ({"micro_batches": 2.0}, TypeError, "micro_batches is 2.0"),
        ({"comm_s": "x"}, TypeError, "comm_s is 'x'"),
        ({"comm_s": None}, TypeError, "comm_s is None"),
        ({"blocking": "no"}, TypeError, "blocking is 'no'"),
    ],
)
def test_scalars_are_refused_by_name(name, change, error, words) -> None:
    given = {"stages": 2, "micro_batches": 4, "comm_s": 0.0, "blocking": False} | change
    with pytest.raises(error, match=words):
        getattr(planners, name)([1.0] * 4, [1.0] * 4, *given.values())


@pytest.mark.parametrize("name", CHAIN)
def test_scalars_of_numpy_are_numbers(name) -> None:
    """Of every type, and of no dimensions: what a mean over an array gives."""
    def planned(*scalars):
        return re.sub(RESULT, "", repr(getattr(planners, name)([1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0], *scalars)))

    wanted = planned(2, 4, 0.5, True)
    assert planned(np.int8(2), np.uint64(4), np.float32(0.5), np.True_) == wanted
    assert planned(np.array(2), np.array(4), np.array(0.5), 1) == wanted
    with pytest.raises(TypeError, match="comm_s is array"):
        planned(2, 4, np.array([0.5]), True)
    with pytest.raises(TypeError, match="comm_s is"):
        planned(2, 4, np.array(True), True)


def test_layer_graph_takes_only_the_memory_it_knows() -> None:
    for memory, words in (({"limit": 3.0}, "'limit'"), (5, "is int"), ({"recompute_s": [1.0]}, "recompute_s has shape")):
        with pytest.raises((ValueError, TypeError), match=words):
            planners.layer_graph([1.0] * 3, [1.0] * 3, 2, 4, memory=memory)


def test_times_that_have_no_digits_left_end_the_search() -> None:
    plan = planners.parallel_layers(planners.layer_graph([5e-324] * 4, [5e-324] * 4, 2, 4))
    assert plan.optimal and plan.time_per_sample_s > 0


def one_f_one_b(f, b, micros, comm):
    """Blocking messages: the stage that receives pays."""
    stages = len(f)
    orders = []
    for k in range(stages):
        early = min(micros, stages - 1 - k)
        order = [("F", q) for q in range(early)]
        for q in range(micros):
            order += [("F", early + q)] * (early + q < micros) + [("B", q)]
        orders.append(order)
    end, clock = {}, [0.0] * stages
    while any(orders):
        for k, order in enumerate(orders):
            while order:
                op, q = order[0]
                source = (op, k - 1 if op == "F" else k + 1, q)
                remote = 0 <= source[1] < stages
                if remote and source not in end:
                    break
                clock[k] = max(clock[k], end.get(source, 0.0)) + comm * remote + (f[k] if op == "F" else b[k])
                end[op, k, q] = clock[k]
                order.pop(0)
    return max(clock)


def test_bounds_hold_where_stages_weigh_less_than_those_before_them() -> None:
    """Blocking messages: a later stage may weigh less than an earlier one, so longest prefixes alone miss partitions."""
    rng = np.random.default_rng(4)
    for _ in range(600):
        n = int(rng.integers(3, 6))
        stages, micros, comm = int(rng.integers(2, min(n, 4) + 1)), int(rng.integers(1, 9)), float(rng.choice([0.4, 3.0]))
        f, b = rng.integers(0, 4, (2, n)) * 1.0
        edges = [(0, *cuts, n) for cuts in itertools.combinations(range(1, n), stages - 1)]
        best = min(one_f_one_b(*([sum(t[i:j]) for i, j in itertools.pairwise(e)] for t in (f, b)), micros, comm) for e in edges)
        for planner in (planners.uniform, planners.autopipe_balanced, planners.autopipe_pivot, planners.autopipe):
            plan = planner(f, b, stages, micros, comm_s=comm, blocking=True)
            assert plan.lower_bound_s <= best * (1 + 1e-12) and plan.step_time_s >= best * (1 - 1e-12)
        assert plan.step_time_s <= best * (1 + 1e-12)


def test_the_bytes_that_are_short_are_enough() -> None:
    rng = np.random.default_rng(5)
    refused = 0
    for _ in range(1500):
        n = int(rng.integers(1, 7))
        stages, micros = int(rng.integers(1, n + 1)), int(rng.integers(1, 6))
        memory = {"limit_bytes": float(rng.uniform(0.1, 12)), "static_bytes": rng.uniform(0, 10, n),
                  "activation_bytes": 10.0 ** rng.uniform(-9, 1, n), "transient_bytes": rng.uniform(0, 3, n)}  # fmt: skip
        try:
            planners.autopipe_pivot([1.0] * n, [1.0] * n, stages, micros, memory=memory)
        except tp.InfeasibleError as error:
            refused += 1
            short = float(re.search(r"([0-9.e+-]+) bytes short", str(error)).group(1))
            memory["limit_bytes"] += short
            planners.autopipe_pivot([1.0] * n, [1.0] * n, stages, micros, memory=memory)
    assert refused > 500


def test_the_baseline_that_needs_least_needs_least() -> None:
    """Early stages hold more micro-batches, so the partition of least need is not that of longest prefixes."""
    rng = np.random.default_rng(6)
    for _ in range(300):
        n, micros = int(rng.integers(2, 6)), int(rng.integers(1, 6))
        stages = int(rng.integers(1, n + 1))
        kept = rng.integers(0, 9, n) * 1.0 + (np.arange(n) == n // 2)
        need = min(max(min(micros, stages - k) * kept[i:j].sum() for k, (i, j) in enumerate(itertools.pairwise((0, *cuts, n))))
                   for cuts in itertools.combinations(range(1, n), stages - 1))  # fmt: skip
        with pytest.raises(tp.InfeasibleError, match=f" has {need:.15g} bytes on stage"):
            planners.pipedream([1.0] * n, [1.0] * n, stages, micros, straight=True,
                               memory={"limit_bytes": 0.5, "activation_bytes": kept})  # fmt: skip


NODE = planners.LayerNode(0, {1: [planners.LayerVariant("keep", 1.0)]})


@pytest.mark.parametrize(
    "call",
    [
        lambda huge: planners.uniform([1.0, 2.0], [1.0, 2.0], 2, 4, memory={"limit_bytes": huge}),
        lambda huge: planners.slice_tokens(np.ones((3, 3)), 2, memory=planners.SliceMemory(huge)),
        lambda huge: planners.slice_tokens(np.ones((3, 3)), 2, memory=planners.SliceMemory(9.0, pair_bytes=huge)),
        lambda huge: planners.piper(planners.LayerGraph([NODE], [], 2, huge, 1e9, 1)),
        lambda huge: planners.parallel_layers(planners.LayerGraph([NODE], [], 2, 1e9, huge, 1)),
    ],
)
def test_no_amount_is_too_large_to_be_refused_by_name(call) -> None:
    with pytest.raises(ValueError, match=r"(limit|memory|pair)_bytes is 1000.*at most 1e300|bandwidth_Bps is 1000.*at most 1e300"):
        call(10**400)


def test_slice_memory_may_be_a_dict_and_nothing_else() -> None:
    table = np.random.default_rng(1).random((7, 7))
    for plan in (lambda m: planners.slice_tokens(table, 4, memory=m), lambda m: planners.slice_uneven([table, 2 * table], memory=m),
                 lambda m: planners.slice_batch_and_tokens(np.stack([table] * 3), 2, 4, memory=m)):  # fmt: skip
        fields = {"limit_bytes": 4.0, "row_bytes": 1.0, "context_bytes": 0.25}
        assert RESULT.sub("", repr(plan(fields))) == RESULT.sub("", repr(plan(planners.SliceMemory(**fields))))
        for wrong, error, words in (
            (4.0, TypeError, "memory is 4.0: a SliceMemory or a dict"),
            ({"limit": 4.0}, ValueError, "memory has .*'limit'.*limit_bytes, and of"),
            ({"row_bytes": 4.0}, ValueError, "limit_bytes, and of"),
            ({"limit_bytes": "4"}, TypeError, "limit_bytes is '4'"),
        ):
            with pytest.raises(error, match=words):
                plan(wrong)


def test_an_infinite_limit_of_a_slices_memory_is_none() -> None:
    table = np.random.default_rng(1).random((7, 7))
    for plan in (lambda m: planners.slice_tokens(table, 4, memory=m), lambda m: planners.slice_uneven([table, 2 * table], memory=m),
                 lambda m: planners.slice_batch_and_tokens(np.stack([table] * 3), 2, 4, memory=m)):  # fmt: skip
        free = RESULT.sub("", repr(plan(None)))
        assert RESULT.sub("", repr(plan({"limit_bytes": float("inf"), "row_bytes": 1e3, "pair_bytes": 1e3}))) == free
        with pytest.raises(ValueError, match="memory"):
            plan({"limit_bytes": float("inf"), "row_bytes": -1.0})


def test_what_is_no_layer_no_phase_and_no_flag_is_named() -> None:
    with pytest.raises(TypeError, match=r"layers\[0\] is .*a dict would be right"):
        planners.bmpipe([np.zeros(2)], 2, 4, 1e9)
    with pytest.raises(TypeError, match="straight is"):
        planners.pipedream([1.0, 2.0], [1.0, 2.0], 2, 4, straight=np.zeros(2))
    with pytest.raises(ValueError, match=r"phase is \['fwd'\]"):
        tp.CostModel.from_table(np.ones((3, 3)), np.ones((3, 3))).slice_cost(16, 8, ["fwd"])


def in_unit(name, costs, unit):
    """The step that the planner finds where the same costs are in another unit of time; None: nothing fits."""
    forward, backward, again, stages, micros, comm, memory, bandwidth = costs
    more = {}
    if memory is not None:
        more["memory"] = dict(memory) if name not in ("vpipe", "adapipe") else {**memory, "recompute_s": again * unit}
    if name in ("pipedream", "dapple"):
        more |= {"param_bytes": again, "bandwidth_Bps": 3.0 / unit}
    if name == "vpipe":
        more["swap_bandwidth_Bps"] = bandwidth / unit
    try:
        return getattr(planners, name)(forward * unit, backward * unit, stages, micros, comm * unit, **more).step_time_s / unit
    except tp.InfeasibleError:
        return None


@pytest.mark.parametrize("name", CHAIN)
def test_ties_of_whole_seconds_are_ties_in_every_unit(name) -> None:
    """Thousandths are no whole numbers: equal sums of them differ in the last bit, and whoever looks at that takes another plan."""
    rng = np.random.default_rng(4)
    for _ in range(250):
        n = int(rng.integers(2, 13))
        sizes = {key: rng.integers(0, 5, n).astype(float) for key in ("static_bytes", "activation_bytes", "transient_bytes")}
        memory = {"limit_bytes": float(rng.integers(20, 90)), **sizes} if rng.random() < 0.5 else None
        costs = (rng.integers(0, 4, n).astype(float), rng.integers(0, 7, n).astype(float), rng.integers(0, 4, n).astype(float),
                 int(rng.integers(1, min(n, 6) + 1)), int(rng.integers(1, 10)), float(rng.choice([0.0, 0.1, 1.0])), memory,
                 float(rng.integers(0, 4)))  # fmt: skip
        whole = in_unit(name, costs, 1.0)
        for unit in (0.001, 0.1, 3.0, 1e6):
            other = in_unit(name, costs, unit)
            assert (whole is None) == (other is None)
            assert whole is None or other == pytest.approx(whole, rel=1e-9), costs


def test_bipar_cuts_ties_alike_in_every_unit() -> None:
    rng = np.random.default_rng(5)
    for _ in range(600):
        n = int(rng.integers(2, 9))
        stages, memory = int(rng.integers(1, min(n, 4) + 1)), float(rng.integers(10, 80))
        nodes = {key: rng.integers(0, 6, n).astype(float) for key in NODES}
        swap = float(rng.choice([0.0, 1.0, 5.0]))
        times = []
        for unit in (1.0, 0.001, 3.0, 1e6):
            scaled = {key: value * unit if key.endswith("_s") else value for key, value in nodes.items()}
            try:
                times.append(planners.dawnpiper_binary(scaled, stages, memory, 3, "gpipe", swap / unit).period_s / unit)
            except tp.InfeasibleError:
                times.append(-1.0)
        assert times == pytest.approx([times[0]] * 4, rel=1e-9)


@pytest.mark.parametrize("call", CALLS)
def test_wrong_shapes_are_errors_of_ours_that_say_what_would_be_right(call) -> None:
    with pytest.raises(tp.InvalidValueError, match=r"(times|fwd|fwd_s) has (2 dimensions: 1|shape \[2, 2\])"):
        CALLS[call]([[1.0, 2.0], [3.0, 4.0]])
    if call in CHAIN:
        with pytest.raises(tp.InvalidValueError, match="bwd has 3 values: 4"):
            getattr(planners, call)([1.0] * 4, [1.0] * 3, 2, 4)
        with pytest.raises(tp.InvalidValueError, match="static_bytes has 3 values: 4"):
            getattr(planners, call)([1.0] * 4, [1.0] * 4, 2, 4, memory={"limit_bytes": 9.0, "static_bytes": [1.0] * 3})
    with pytest.raises(tp.InvalidTypeError, match="isa is 'a'"):
        planners.slice_batch_and_tokens(np.ones((2, 3, 3)), 1, 2, isa="a")


def test_a_layer_graph_of_costs_below_zero_is_refused_where_they_are() -> None:
    for values in ([1.0, -1.0, 1.0], [1.0, np.nan, 1.0], [1.0, np.inf, 1.0]):
        with pytest.raises(tp.InvalidValueError, match=r"bwd\[1\] is"):
            planners.layer_graph([2.0] * 3, values, 2, 4)
    with pytest.raises(tp.InvalidValueError, match="comm_s is -1"):
        planners.layer_graph([2.0] * 3, [2.0] * 3, 2, 4, -1.0)


def test_a_layer_graph_names_the_argument_and_not_the_edge_that_it_makes_of_it() -> None:
    """A bandwidth of nan was told of as the size of edge 0, and 0 micro-batches as in_flight."""
    for more, words in (({"bandwidth_Bps": np.nan}, "bandwidth_Bps is nan"), ({"bandwidth_Bps": -1}, "bandwidth_Bps is -1"),
                        ({"bandwidth_Bps": np.inf}, "bandwidth_Bps is inf"), ({"bandwidth_Bps": 0}, "bandwidth_Bps is 0"),
                        ({"comm_s": 1e299}, r"comm_s \* bandwidth_Bps is"), ({"devices": 0}, "devices is 0"),
                        ({"micro_batches": 0, "memory": {"in_flight": 1}}, "micro_batches is 0")):  # fmt: skip
        with pytest.raises(tp.InvalidValueError, match=words):
            planners.layer_graph(**{"fwd": [2.0] * 3, "bwd": [2.0] * 3, "devices": 2, "micro_batches": 4, **more})
    narrow = planners.layer_graph([2.0] * 3, [2.0] * 3, 2, 4, np.float32(0.5), bandwidth_Bps=np.int64(8))
    assert narrow.edges[0].bytes == 4.0 and narrow == planners.layer_graph([2.0] * 3, [2.0] * 3, 2, 4, 0.5, bandwidth_Bps=8.0)


def test_messages_beyond_all_work_are_planned():
    """Such messages, in ticks of the work, are more than a double holds: they were refused as infinite."""
    for name in ("autopipe", "autopipe_heuristic"):
        plan = getattr(planners, name)(np.full(9, 1e-280), np.full(9, 2e-280), 3, 4, comm_s=1e30)
        assert plan.boundaries[0] == 0 and plan.boundaries[-1] == 9 and (np.diff(plan.boundaries) > 0).all()


def test_numbers_that_are_far_too_large_are_refused_before_there_are_arrays_of_as_many():
    """2^31 - 1 stages took 16 GiB for their limits of memory, as many costs for the machines, and 1e308 seconds were no integer."""
    for name in ("autopipe", "autopipe_heuristic", "autopipe_pivot", "autopipe_balanced"):
        with pytest.raises(tp.InvalidValueError, match="stages is 2147483647 for 4 blocks"):
            getattr(planners, name)([1.0] * 4, [1.0] * 4, 2**31 - 1, 4, memory={"limit_bytes": 9.0})
    table = np.ones((3, 3))
    with pytest.raises(tp.InvalidValueError, match="stages is 2147483647: .* at most 2048"):
        planners.slice_tokens(table, 2**31 - 1, comm=[0.0, 2.0, 2.0])
    long, free = (planners.slice_tokens(table, 3, comm=[0.0, 2.0, 2.0], time_limit_s=limit) for limit in (1e308, None))
    assert long.latency_s == free.latency_s and long.optimal == free.optimal
    costs = tp.CostModel.from_table(table, table, granularity=1)
    with pytest.raises(tp.InvalidValueError, match="batch is 2147483647: at most 65536"):
        planners.slice_batch_and_tokens(costs, 2**31 - 1, 2, seq_len=2)


def test_as_many_micro_batches_as_a_program_holds_are_planned():
    """65536, numbers of 16 bits; with so many the baselines and every plan were refused, though said to be possible."""
    model = tp.GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=9, block_size=8)
    plan = tp.plan(model, tp.Cluster(num_devices=2, memory_bytes=1e11), 65536, 8, planner="uniform", stages=2,
                   slicing=[(1, [8])] * 65536)  # fmt: skip
    assert plan.program.num_micro_batches == 65536 == len(plan.slicing)
    assert planners.uniform([1.0, 1.0], [2.0, 2.0], 2, 65536).step_time_s == 3.0 * 65537
    with pytest.raises(tp.InvalidValueError, match="micro_batches is 65537: 1 to 65536"):
        planners.uniform([1.0, 1.0], [2.0, 2.0], 2, 65537)


def test_a_batch_of_more_sequences_than_micro_batches_is_planned_where_it_is_said_how():
    """Without a slicing it was refused for micro-batches that nobody had asked for, after lists of a gibibyte; and on a cluster of
    32768 devices, whose limit is above an int32's, for a batch of -2147483648."""
    model = tp.GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=9, block_size=8)

    def planned(batch: int, devices: int = 4, **given: object) -> tp.Plan:
        return tp.plan(model, tp.Cluster(num_devices=devices, memory_bytes=10**18), batch, 8, planner="uniform", stages=2, **given)

    with pytest.raises(tp.InvalidValueError, match="batch is 65537: at most 65536 sequences for each replica"):
        planned(65537)
    with pytest.raises(tp.InvalidValueError, match="batch is 131074 and data_parallel 2: at most 65536 sequences for each replica"):
        planned(131074, data_parallel=2)
    with pytest.raises(tp.InvalidValueError, match="batch is 65537: at most .* or a list of no more micro-batches as slicing"):
        planned(65537, slicing=1)                              # a list of them would be made, too
    for given in ({}, {"data_parallel": 2}):
        with pytest.raises(tp.InvalidValueError, match=r"for each replica would be right \(data_parallel=3\), or a list"):
            planned(3 * 65534, **given)
    with pytest.raises(tp.InvalidValueError, match="for each replica would be right, or a list"):
        planned(131072, executable=True)
    assert planned(131072, data_parallel=2).slicing == [(1, [8])] * 65536
    assert planned(4 * 65536, slicing=[(65536, [8])] * 4).slicing == [(65536, [8])] * 4
    with pytest.raises(tp.InvalidValueError, match="batch is 262145: at most 65536 sequences for each device would be right"):
        planned(4 * 65536 + 1, slicing=[(65536, [8])] * 4)
    assert planned(2**31 - 1, 40000, slicing=[(2**31 - 1, [8])]).batch == 2**31 - 1
    with pytest.raises(tp.InvalidValueError, match="batch is 2147483648: .* and 2147483647 in all"):
        planned(2**31, 40000, slicing=[(2**30, [8])] * 2)
    large = tp.max_batch(model, 2, 1e18, 2, planner="uniform", cluster=tp.Cluster(num_devices=40000), most=2**40, executable=True)
    assert large.batch == 2**30 - 1


@pytest.mark.parametrize("wrong, words", [
    ({"update_s": "abc"}, "update_s is str"), ({"update_s": 10**400}, "update_s is 1000"),
    ({"update_s": [1.0, 1.0, 1.0]}, "update_s has 3 entries"),
    ({"update_s": [1.0, -1.0]}, r"update_s\[1\] is -1"), ({"update_s": float("nan")}, r"update_s\[0\] is nan"),
    ({"sum_s": [1.0, 1.0, 1.0]}, "sum_s has 3 entries"), ({"sum_s": [1.0, -1.0]}, r"sum_s\[1\] is -1"),
    ({"rank_of": 3}, "rank_of is 3: a list"),
    ({"rank_of": [0, float("inf")]}, r"rank_of\[1\] is inf"),
    ({"rank_of": [1, 0]}, "rank_of is"),
])  # fmt: skip
def test_what_is_wrong_with_a_slicing_bounds_stages_is_named(wrong, words):
    model = tp.GPTConfig(n_layer=1, n_head=2, n_embd=8, vocab_size=11, block_size=8)
    given = (model, tp.CostModel.analytic(model, tp.Cluster(4)), [(0, 2), (2, 4)], [1])
    with pytest.raises(tp.Error, match=words):
        planners.slicing_bound(*given, seq_len=8, **wrong)
    one, each = (planners.slicing_bound(*given, seq_len=8, update_s=update) for update in (1.5, [1.5, 0.5]))
    assert one == each > 1.5


def answers():
    yield from ((name, lambda call=call: call([1.0, 2.0, 3.0, 4.0])) for name, call in CALLS.items() if name != "balance")
    table = np.add.outer(np.arange(5.0), np.arange(5.0))
    layers = [{"name": "layer", "count": 4, "fwd_s": 1.0, "bwd_s": 2.0, "static_bytes": 1.0,
               "strategies": [{"name": "none", "extra_bwd_s": 0.0, "activation_bytes": 1.0}]}]  # fmt: skip
    nodes = {key: [1.0, 2.0, 3.0, 4.0] for key in NODES}
    yield "bmpipe", lambda: planners.bmpipe(layers, 2, 4, 1e9)
    yield "slice_tokens", lambda: planners.slice_tokens(table, 3)
    yield "slice_batch_and_tokens", lambda: planners.slice_batch_and_tokens(np.stack([table, table]), 1, 3)
    yield "slice_uneven", lambda: planners.slice_uneven([table, 2 * table])
    yield "max_batch", lambda: planners.max_batch(nodes, 2, 100.0)
    yield "StageMemory", lambda: planners.StageMemory(9.0, activation_bytes=np.arange(3.0))


@pytest.mark.parametrize(("name", "ask"), list(answers()), ids=lambda part: part if isinstance(part, str) else "")
def test_answers_are_values(name, ask) -> None:
    answer, again = ask(), ask()
    for same in (again, copy.deepcopy(answer), pickle.loads(pickle.dumps(answer))):
        assert same == answer and hash(same) == hash(answer)
    field = {"autopipe_slicer": "split", "slice_uneven": "stages", "max_batch": "batch", "StageMemory": "limit_bytes"}.get(name)
    field = field or next(f.name for f in dataclasses.fields(answer) if f.name in ("step_time_s", "latency_s", "time_per_sample_s"))
    assert dataclasses.replace(answer, **{field: 77}) != answer and answer != 77


def test_a_table_of_more_than_two_thousand_million_cells_is_refused_and_not_written_beyond() -> None:
    """A million blocks on 4096 devices: the cells were counted in 32 bits, and few were taken."""
    code = """if True:
        import resource, numpy as np, terapipe_c as tp
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
        ones = np.ones(1048320)
        for planner in (tp.planners.pipedream, tp.planners.dapple):
            try:
                planner(ones, ones, 4096, 8)
            except tp.OutOfMemoryError as error:
                assert "refused 34359769280 bytes" in str(error), error
            else:
                raise AssertionError
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_flushes_that_take_longer_together_than_any_number_says_are_refused() -> None:
    """Each is finite, so that each has a plan; of their sum, which is not, none was chosen, and it was written for ever."""
    table = np.full((3, 3, 3), 1e300)
    for flush in (1, 2):
        with pytest.raises(tp.InvalidValueError, match="every slicing takes more than 1.79769e"):
            planners.slice_batch_and_tokens(table, 10, 10**8, max_in_flight=flush)
    assert planners.slice_batch_and_tokens(table, 10, 10**7, max_in_flight=1).latency_s == pytest.approx(1e308)


def test_what_replicas_hold_and_exchange_is_in_the_bytes_and_the_step() -> None:
    two, memory = np.ones(2), {"limit_bytes": 1e3, "activation_bytes": np.array([5.0, 7.0])}
    for planner in (planners.pipedream, planners.dapple):
        alone = planner([1.0], [2.0], 3, 6, param_bytes=[6.0], bandwidth_Bps=2.0)
        assert alone.replicas == [3] and alone.step_time_s == pytest.approx(6 + 4)       # 2 (r - 1) / r of 6 bytes, 2 a second
    turns = planners.pipedream([2.0, 1.0], [4.0, 2.0], 3, 8, memory=memory, param_bytes=[0.0, 100.0], bandwidth_Bps=1.0)
    assert turns.replicas == [2, 1] and turns.peak_memory_bytes.tolist() == [10.0, 7.0]  # three in turn on two: one has two
    memory |= {"limit_bytes": 2.0, "activation_bytes": np.array([1.0, 2.0])}             # to the byte
    fits = planners.dapple(two, two, 2, 4, memory=memory, param_bytes=100 * two, bandwidth_Bps=1.0)
    assert fits.replicas == [1, 1] and fits.peak_memory_bytes.tolist() == [2.0, 2.0]


def test_dapple_names_what_stages_of_equal_replicas_need() -> None:
    three = np.ones(3)
    memory = {"limit_bytes": 4.5, "static_bytes": 2 * three, "activation_bytes": np.array([4.0, 0.0, 0.0])}
    with pytest.raises(tp.InfeasibleError, match="the one of 2 stages that needs least has 6 bytes on stage 0"):
        planners.dapple(three, three, 4, 4, memory=memory)
    assert max(planners.dapple(three, three, 4, 4, memory=memory | {"limit_bytes": 6.0}).peak_memory_bytes) <= 6


def test_few_micro_batches_take_what_the_bound_says() -> None:
    """Of a stage all whose forwards come before its first backward none is left for later, not fewer than none."""
    for micros in (1, 2, 3):
        plan = planners.uniform([3.0, 1.0, 1.0, 1.0], [3.0, 1.0, 1.0, 1.0], 4, micros, 0.5)
        assert plan.lower_bound_s == pytest.approx(12 + 6 * 0.5 + (micros - 1) * 3)


def test_vpipe_swaps_no_more_than_its_micro_batches_need() -> None:
    memory = {"limit_bytes": 6.0, "activation_bytes": np.array([3.0, 3.0, 0.0])}
    plan = planners.vpipe([1.0, 1.0, 2.0], [1.0, 1.0, 2.0], 2, 2, memory=memory, swap_bandwidth_Bps=2.0)
    assert plan.boundaries == [0, 2, 3] and plan.swap.tolist() == [True, False, False]
    assert plan.peak_memory_bytes.tolist() == [6.0, 0.0]


def test_flushes_are_told_by_the_largest_slice_and_bound_by_what_is_proven() -> None:
    rng = np.random.default_rng(2)
    table = np.cumsum(rng.uniform(0.5, 1.0, (4, 41, 41)), axis=1)
    table += rng.uniform(0.5, 4, 4)[:, None, None]
    plan = planners.slice_batch_and_tokens(table, 3, 4, max_in_flight=2)
    starts = [np.cumsum([0, *lengths[:-1]]) for _, lengths in plan.slicing]
    largest = [max(table[b, n, c] for n, c in zip(lengths, at, strict=True))
               for (b, lengths), at in zip(plan.slicing, starts, strict=True)]
    assert plan.flushes == [1, 2] and plan.max_s == pytest.approx(max(largest)) and largest[0] > largest[1]
    hurried = planners.slice_batch_and_tokens(table, 3, 4, max_in_flight=2, time_limit_s=1e-9)
    assert not hurried.optimal and hurried.lower_bound_s <= plan.latency_s <= hurried.latency_s
    assert hurried.lower_bound_s < hurried.latency_s * (1 - 1e-6)


def test_flushes_of_sizes_that_no_time_is_left_for_are_bounded_and_not_searched() -> None:
    rng = np.random.default_rng(3)
    batch, flush, n = 21, 8, 6
    sizes = np.arange(flush + 1.0)[:, None, None]
    smooth = {"G0": np.arange(1.0, n + 2), "G1": np.arange(1.0, n + 2) + 0.5, "a2": 0.25, "a3": 0.125}

    class Smooth:
        def slice_cost_batched(self, most: int, seq_len: int, granularity: int) -> list[object]:
            grow = [b**0.5 for b in range(most + 1)]
            return [None, *({k: v * grow[b] for k, v in smooth.items()} for b in range(1, most + 1))]

    for costs, more in ((rng.uniform(0.5, 1.0, (flush + 1, n + 1, n + 1)) * (1 + sizes), {}),
                        (Smooth(), {"seq_len": n, "granularity": 1})):  # fmt: skip
        both = [planners.slice_batch_and_tokens(costs, b, 4, max_group=flush, time_limit_s=1e-9, **more) for b in (8, 5)]
        hurried = planners.slice_batch_and_tokens(costs, batch, 4, max_in_flight=flush, time_limit_s=1e-9, **more)
        assert hurried.flushes == [5, 8, 8] and hurried.searches == sum(plan.searches for plan in both)
        plan = planners.slice_batch_and_tokens(costs, batch, 4, max_in_flight=flush, **more)
        assert plan.optimal and not hurried.optimal
        assert 0.0 < hurried.lower_bound_s <= plan.latency_s <= hurried.latency_s
