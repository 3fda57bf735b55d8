"""Nodes as a value, a graph and a file; our own GPT as nodes; the largest micro-batch that fits."""

import itertools
import json
import math

import numpy as np
import pytest
from test_dawnpiper import KEYS, draw, random_nodes

import terapipe_c as tp
from terapipe_c import planners
from terapipe_c.planners import Nodes, dawnpiper, dawnpiper_binary, memory_balanced
from terapipe_c.planners.nodes import NEEDED


def diamond(rng=None):
    nodes = random_nodes(rng or np.random.default_rng(1), 5) | {"names": ["join", "right", "left", "split", "end"]}
    nodes["fwd_s"] = np.array([1.0, 5.0, 2.0, 1.0, 1.0])
    edges = [("split", "left", 3.0), ("split", "right", 3.0), ("left", "join", 1.0), ("right", "join", 2.0), ("join", "end", 4.0),
             ("split", "end", 3.0)]  # fmt: skip
    return nodes, edges


def test_a_graph_is_ordered_and_its_cuts_counted():
    nodes, edges = diamond()
    made = Nodes.from_graph(nodes, edges)
    assert made.names == ("split", "right", "left", "join", "end")  # equal depth and start: as given
    assert made.cut_bytes.tolist() == [3, 5, 6, 7, 0] and made.cut_tensors.tolist() == [1, 2, 3, 2, 0]
    assert made["fwd_s"].tolist() == [1, 5, 2, 1, 1]
    late = Nodes.from_graph({**nodes, "fwd_s": np.array([1.0, 5.0, 2.0, 1.0, 1.0])},
                            [*edges, ("right", "end")])  # fmt: skip
    assert late.edges[-1] == (3, 4, 4.0) or (1, 4, float(nodes["activation_bytes"][1])) in late.edges
    two = random_nodes(np.random.default_rng(1), 4) | {"names": ["x", "y", "s", "t"], "fwd_s": [1, 1, 5, 1], "bwd_s": [1, 1, 1, 5]}
    assert Nodes.from_graph(two, [("s", "x"), ("t", "y")]).names == ("s", "t", "y", "x")     # by the forward's start


def test_a_block_that_no_file_may_have_is_refused(tmp_path):
    """Nodes of block -2 could be saved, and not loaded."""
    nodes = random_nodes(np.random.default_rng(1), 2)
    with pytest.raises(ValueError, match=r"blocks\[1\] is -2: the number of a block would be right, or -1 for none"):
        Nodes.of(nodes | {"blocks": [0, -2]})
    most = Nodes.of(nodes | {"blocks": [-1, (1 << 31) - 1]})
    most.save(tmp_path / "nodes.json")
    assert planners.load_nodes(tmp_path / "nodes.json") == most


def test_an_edge_of_no_bytes_beside_others_is_order_alone():
    """What `a` made was alive up to `c`, and counted twice where an operation in place writes to a view of it."""
    nodes = random_nodes(np.random.default_rng(1), 3) | {"names": ["a", "b", "c"]}
    made = Nodes.from_graph(nodes, [("a", "b", 4), ("a", "c", 0), ("b", "c", 4)])
    assert made.cut_bytes.tolist() == [4, 4, 0] and made.cut_tensors.tolist() == [1, 1, 0]
    assert Nodes.from_graph(nodes, [("a", "c", 0), ("b", "c", 0)]).cut_tensors.tolist() == [1, 2, 0]


def test_random_graphs_are_ordered_and_cycles_named():
    rng = np.random.default_rng(13)
    for _ in range(300):
        n = int(rng.integers(2, 15))
        place = rng.permutation(n)
        nodes = random_nodes(rng, n)
        pairs = {(int(a), int(b)) for a, b in rng.integers(0, n, (2 * n, 2)) if place[a] < place[b]}
        sizes = {a: float(rng.integers(1, 9)) for a in range(n)}
        nodes["names"] = [str(k) for k in range(n)]
        made = Nodes.from_graph(nodes, [(a, b, sizes[a]) for a, b in sorted(pairs)])
        at = {int(name): k for k, name in enumerate(made.names)}
        depth = {}
        for k in sorted(range(n), key=lambda k: place[k]):
            depth[k] = max([depth[a] + 1 for a, b in pairs if b == k], default=0)
        assert all(at[a] < at[b] for a, b in pairs)
        assert [depth[int(name)] for name in made.names] == sorted(depth.values())
        for p in range(n):
            crossing = {a for a, b in pairs if at[a] <= p < at[b]}
            assert made.cut_bytes[p] == sum(sizes[a] for a in crossing) and made.cut_tensors[p] == len(crossing)
        if pairs:
            a, b = sorted(pairs)[0]
            with pytest.raises(ValueError, match="cycle") as refusal:
                Nodes.from_graph(nodes, [*pairs, (b, a)])
            cycle = [int(word.split(" ")[0]) for word in str(refusal.value).split(": ")[1].split(" -> ")]
            assert cycle[0] == cycle[-1] and all(step in {*pairs, (b, a)} for step in itertools.pairwise(cycle))


@pytest.mark.parametrize(("nodes", "edges", "words"), [
    ({}, None, "edges is None: a list, .source, target. or"), ({}, 3, "edges is 3: a list"), ({}, "0 1", "edges is '0 1'"),
    (None, [], "nodes is NoneType: a dict of float64"),
])  # fmt: skip
def test_what_is_no_graph_is_refused_by_name(nodes, edges, words):
    ones = {key: np.ones(3) for key in NEEDED}
    with pytest.raises(tp.InvalidTypeError, match=words):
        Nodes.from_graph(ones if nodes == {} else nodes, edges)


def test_nodes_are_saved_and_loaded(tmp_path):
    nodes, edges = diamond()
    made = Nodes.from_graph({**nodes, "blocks": [0, 1, 1, 2, 3], "working_bytes": np.ones(5)}, edges)
    made.save(tmp_path / "nodes.json")
    again = planners.load_nodes(tmp_path / "nodes.json")
    assert again == made and hash(again) == hash(made) and again.blocks == made.blocks
    assert dawnpiper(again, 2, 1e4) == dawnpiper(made, 2, 1e4)
    assert dawnpiper(dict(made), 2, 1e4) == dawnpiper(made, 2, 1e4)
    plain = Nodes.of({key: nodes[key] for key in KEYS})
    plain.save(tmp_path / "plain.json")
    assert planners.load_nodes(tmp_path / "plain.json") == plain
    assert "5, forward" in repr(made) and "<table>" in made._repr_html_()


def test_starts_that_only_rounding_tells_apart_are_ties(tmp_path):
    """Whether 0.2 + 0.2 + 0.1 and 0.2 + 0.3 are one number depends on the unit: nodes that were scaled and saved came back in
    another order, to which boundaries of their plans do not belong."""
    times = [0.2, 0.3, 0.2, 0.1, 0.2, 0.2, 0.3]
    nodes = {key: times if key == "fwd_s" else np.arange(7.0) for key in NEEDED} | {"names": list("abcdefg")}
    made = Nodes.from_graph(nodes, [(0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 6)])
    for factor in (0.1, 3.0, 7.0, 1e-9):
        scaled = made.scaled(factor)
        scaled.save(tmp_path / "nodes.json")
        assert planners.load_nodes(tmp_path / "nodes.json") == scaled
        nodes["fwd_s"] = [factor * t for t in times]
        assert Nodes.from_graph(nodes, [(0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 6)]).names == made.names


def test_names_and_blocks_may_be_numpys(tmp_path):
    """Such nodes could neither be saved nor put into a set; names that are numbers were others when loaded."""
    plain = {key: np.ones(3) for key in NEEDED}
    for names, blocks in ((np.array(["a", "b", "c"]), np.arange(3)), ([7, 8, 9], [np.int32(0), 1, 1]), ((), (0, 0, 1))):
        for made in (Nodes.of({**plain, "names": names, "blocks": blocks}), Nodes(*plain.values(), names=names, blocks=blocks)):
            made.save(tmp_path / "nodes.json")
            assert {planners.load_nodes(tmp_path / "nodes.json")} == {made} and made.blocks == tuple(blocks)
    for wrong, error, words in (({"blocks": [0, 0.5, 1]}, tp.InvalidTypeError, r"blocks\[1\] is 0.5"), ({"names": 5},
                                tp.InvalidTypeError, "names is 5"), ({"names": "abc"}, tp.InvalidTypeError, "names is 'abc'")):
        with pytest.raises(error, match=words):
            Nodes.of({**plain, **wrong})
    with pytest.raises(tp.InvalidTypeError, match="factor is '2'"):
        Nodes.of(plain).scaled("2")


def test_a_broken_file_is_named(tmp_path):
    nodes, edges = diamond()
    good = Nodes.from_graph(nodes, edges).to_dict()

    def refuse(message, change=None, text=None):
        data = json.loads(json.dumps(good))
        if change:
            change(data)
        path = tmp_path / "bad.json"
        path.write_text(text if text is not None else json.dumps(data, indent=1))
        with pytest.raises(ValueError, match=message) as refusal:
            planners.load_nodes(path)
        assert "bad.json" in str(refusal.value)

    refuse("line 2", text='{"format":\n oops}')
    refuse("format", text="[]")
    refuse(r"nodes is \[\]: a list of one node", lambda d: d.update(nodes=[]))
    refuse(r"edges is {}: a list would be right", lambda d: d.update(edges={}))
    refuse("param_bytes of node 1", lambda d: d["nodes"][1].update(param_bytes=10**400))
    refuse(r"node 1 \(right\), line \d+ lacks 'bwd_s'", lambda d: d["nodes"][1].pop("bwd_s"))
    refuse(r"activation_bytes of node 2 \(left\), line \d+ is -3", lambda d: d["nodes"][2].update(activation_bytes=-3))
    refuse(r"fwd_s of node 2 \(left\), line \d+ is 'x'", lambda d: d["nodes"][2].update(fwd_s="x"))
    refuse("'flops', which means nothing", lambda d: d["nodes"][0].update(flops=1))
    refuse("node 0 .* lacks 'working_bytes'", lambda d: d["nodes"][3].update(working_bytes=1))
    refuse("names node 'nobody'", lambda d: d["edges"].append(["split", "nobody"]))
    refuse("cycle: .*join", lambda d: d["edges"].append(["end", "join"]))
    refuse("has -1 bytes", lambda d: d["edges"].append(["split", "join", -1]))
    refuse(r"edge \d+ is \['split'\]", lambda d: d["edges"].append(["split"]))
    refuse("two nodes are named 'left'", lambda d: d["nodes"][1].update(name="left"))


# ---- our own model, and the largest micro-batch ---------------------------------------------------------------------------


def test_a_gpt_at_tensor_granularity():
    model = tp.GPTConfig(n_layer=3, n_head=2, n_embd=8, vocab_size=50, block_size=16)
    cluster = tp.Cluster(1)
    costs = tp.CostModel.analytic(model, cluster)
    nodes = model.nodes(costs, micro_batch=2, seq_len=12)
    assert len(nodes) == 1 + 10 * 3 + 2 and nodes.names[:3] == ("embedding", "h.0.attention.ln_1", "h.0.attention.qkv")
    for number, block in enumerate(model.blocks):
        inside = np.array(nodes.blocks) == number
        for key, phase in (("fwd_s", "fwd"), ("bwd_s", "bwd")):
            assert math.isclose(nodes[key][inside].sum(), costs.block_seconds(block.kind, phase, 12, 0, 2))
        own = model.block_params(block.kind) + (block.kind == "head") * model.vocab_size * model.n_embd  # a tied head's copy
        updated = own - (block.kind == "embedding") * model.vocab_size * model.n_embd  # by the head's stage
        assert nodes.param_bytes[inside].sum() == 4 * updated
        assert nodes.optimizer_bytes[inside].sum() == 8 * updated + 4 * (own - updated)
    rows, width = 2 * 12, 8
    # csrc/stage/layout.c: inputs of 3 x 2 blocks and the head, statistics, qkv, o, lse, h, g, the head's dx and loss
    kept = 4 * rows * (7 * width + 7 * 2 + 3 * (3 * width + width + 2 + 8 * width) + width + 2)
    assert nodes.activation_bytes.sum() == kept
    stream = 4 * rows * width
    assert nodes.cut_bytes[0] == stream and nodes.cut_tensors[0] == 1  # behind the embedding
    assert nodes.cut_bytes[5] == nodes.cut_bytes[10] == stream  # behind a block
    assert nodes.cut_bytes[2] == 4 * stream and nodes.cut_tensors[2] == 2  # qkv, and the stream past it
    # what a node reads and writes, and the gradients of both
    assert (nodes.working_bytes[:6] == 2 * stream * np.array([1, 2, 4, 4, 2, 2])).all()
    attention, qkv = nodes.fwd_s[3], nodes.fwd_s[2]   # a token attends to itself and half of the others
    assert math.isclose(attention / qkv, (4 * width * 6.5 + 4 * 4 * width * 6) / (6 * width * width + 4 * 4 * width * 6))
    assert nodes.recompute_s[5] == nodes.fwd_s[5] + nodes.fwd_s[4]  # a residual needs its projection again, which keeps nothing
    assert model.nodes() == model.nodes(tp.CostModel.analytic(model, cluster))
    assert np.allclose(model.nodes(costs, micro_batch=4).activation_bytes, 4 * model.nodes(costs).activation_bytes)
    for change in (dict(seq_len=17), dict(micro_batch=0), dict(value_bytes=0), dict(optimizer_bytes_per_param=-1)):
        with pytest.raises(ValueError):
            model.nodes(costs, **change)


def largest(fits, most=10_000):
    return max((b for b in range(1, most) if fits(b)), default=0)


def test_the_largest_micro_batch_is_the_largest():
    rng = np.random.default_rng(14)
    for i in range(40):
        nodes, stages, memory, micro, schedule, swap = draw(rng, i, 8)
        planner = ("dawnpiper", "uniform", "compute", "memory", "dawnpiper_binary")[i % 5]
        request = dict(planner=planner, most=60)
        try:
            got = tp.max_batch(nodes, stages, 3 * memory, micro, schedule, swap, **request)
        except tp.InfeasibleError:
            continue
        assert int(got) == got.batch <= 60 and got.samples_per_s > 0 and got.planner == planner
        if planner == "dawnpiper":
            scale = Nodes.of({**nodes, "working_bytes": nodes["activation_bytes"]}).scaled

            def fits(batch, scale=scale, memory=memory, micro=micro, stages=stages, schedule=schedule, swap=swap):
                try:
                    return dawnpiper(scale(batch), stages, 3 * memory, micro, schedule, swap).peak_memory_bytes.max() <= 3 * memory
                except tp.InfeasibleError:
                    return False

            assert got.batch == largest(fits, 61)
            assert got.plan.period_s == dawnpiper(scale(got.batch), stages, 3 * memory, micro, schedule, swap).period_s


@pytest.mark.parametrize("planner", ["dawnpiper", "uniform", "compute", "memory"])
def test_stages_that_no_partition_has_are_named_by_every_planner(planner):
    nodes = tp.GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=16, block_size=16).nodes()
    for stages in (0, -1, len(nodes) + 1, 10**8, 2**64):       # of the last two a list was made, or begun
        with pytest.raises(tp.InvalidValueError, match=f"stages is {stages}"):
            tp.max_batch(nodes, stages, 1e9, planner=planner)
    for stages in (2.0, "x", None, [1, 2], float("nan"), True):
        with pytest.raises(tp.InvalidTypeError, match="stages is .*: an integer would be right"):
            tp.max_batch(nodes, stages, 1e9, planner=planner)


def test_more_memory_fits_more_and_optimising_fits_most():
    model = tp.GPTConfig(n_layer=6, n_head=2, n_embd=64, vocab_size=256, block_size=64)
    need = 16 * model.num_params
    batches = {}
    for planner in ("dawnpiper", "dawnpiper_binary", "compute", "memory", "uniform"):
        sizes = [tp.max_batch(model, 3, need * k, 6, planner=planner).batch for k in (1.0, 1.5, 2.0, 4.0)]
        assert sizes == sorted(sizes) and sizes[-1] > sizes[0], (planner, sizes)
        batches[planner] = sizes[1]
    assert batches["dawnpiper"] == max(batches.values()) > batches["compute"]
    plain = tp.max_batch(model, 3, 1.5 * need, 6, optimise_memory=False).batch
    assert tp.max_batch(model, 3, 1.5 * need, 6, optimise_memory=np.False_).batch == plain
    assert tp.max_batch(model, 3, 1.5 * need, 6, planner=dawnpiper, optimise_memory=False).batch == plain      # a function is told
    with pytest.raises(TypeError, match="optimise_memory is 'no': True or False"):
        tp.max_batch(model, 3, 1.5 * need, 6, optimise_memory="no")
    assert max(batches["compute"], batches["uniform"]) <= plain <= batches["dawnpiper"]
    assert tp.max_batch(model, 3, 1.5 * need, 6, planner="compute", optimise_memory=True).batch > batches["compute"]
    assert dawnpiper(model.nodes(), 3, need).micro_batches == 3     # as many as stages
    largest = tp.max_batch(model, 3, need, 6)
    assert "MaxBatch(" in repr(largest) and f"micro-batch: {largest.batch}<" in largest._repr_html_()
    assert largest.samples_per_s == pytest.approx(6 * largest.batch / largest.plan.step_time_s)
    asynchronous = tp.max_batch(model, 3, 1.5 * need, 6, "pipedream")               # whose step is a micro-batch's
    assert asynchronous.samples_per_s == pytest.approx(asynchronous.batch / asynchronous.plan.period_s)
    own = tp.max_batch(model.nodes(), 3, need, 6, planner=lambda nodes, *a, **k: dawnpiper(nodes, *a, **k))
    assert own.planner == "<lambda>" and own.batch >= 1
    with pytest.raises(tp.InfeasibleError):
        tp.max_batch(model, 3, 10.0)
    for bad in (dict(planner="x"), dict(most=0)):
        with pytest.raises(ValueError):
            tp.max_batch(model, 3, need, **bad)
    with pytest.raises(ValueError, match="costs is for a GPTConfig"):
        tp.max_batch(model.nodes(), 3, need, costs=1)
    with pytest.raises(TypeError, match="model is int"):
        tp.max_batch(3, 3, need)
    with pytest.raises(TypeError, match="model is NoneType: a GPTConfig, Nodes, or a dict of arrays would be right"):
        tp.max_batch(None, 3, need, seq_len=8)      # not that seq_len is for a GPTConfig


def test_appendix_a_in_quality():
    """DawnPiper's appendix A, GPT-2 770M under PipeDream on 4 stages: memory-balanced stages take very unequal times (29.1
    and 286.3 ms there); compute-balanced ones that recompute do not (136.9 and 145.9 ms), and their period is far shorter."""
    cluster = tp.Cluster(1, peak_flops=1e13, memory_bandwidth_Bps=1e12)
    nodes = tp.GPTConfig.preset("gpt2-762m").nodes(cluster=cluster, micro_batch=2)
    balanced = memory_balanced(nodes, 4)
    times = [(nodes.fwd_s + nodes.bwd_s)[a:e].sum() for a, e in itertools.pairwise(balanced)]
    assert times == sorted(times) and times[-1] > 4 * times[0]
    need = dawnpiper(nodes, 4, 1e15, schedule="pipedream", boundaries=balanced).peak_memory_bytes.max()
    got = dawnpiper(nodes, 4, float(need), schedule="pipedream")
    assert got.recompute.any() and got.period_s < 0.7 * max(times) and got.stage_time_s[:-1].min() > 0.9 * got.stage_time_s.max()


def test_files_that_are_no_text_and_blocks_that_are_no_numbers_are_named(tmp_path):
    path = tmp_path / "graph.json"
    row = {key: 1.0 for key in NEEDED}
    for value in (None, "x", 1.5, True, -2):
        path.write_text(json.dumps({"format": "terapipe_c.nodes", "version": 1, "nodes": [row, {**row, "block": value}]}))
        with pytest.raises(ValueError, match=r"graph.json: node 1.* has block"):
            planners.load_nodes(path)
    for raw in (b"\xff\xfe\x00", b"[" * 100_000):
        path.write_bytes(raw)
        for read in (planners.load_nodes, planners.load_piper):
            with pytest.raises(ValueError, match=r"graph.json is no JSON"):
                read(path)


def test_an_even_division_keeps_blocks_together_where_each_stage_can_have_one():
    nodes = tp.planners.Nodes(*np.ones((6, 7)), blocks=(0, 0, 0, 1, 2, 2, 2))
    cuts = [tp.max_batch(nodes, stages, 1e9, 2, planner="uniform", most=1).plan.boundaries for stages in (2, 3, 4)]
    assert cuts == [[0, 3, 7], [0, 3, 4, 7], [0, 1, 3, 5, 7]]


def test_a_largest_micro_batch_counts_what_it_planned():
    model = tp.GPTConfig(n_layer=6, n_head=2, n_embd=64, vocab_size=256, block_size=64)
    asked = []

    def planner(nodes, *a, **k):
        asked.append(nodes)
        return dawnpiper_binary(nodes, *a, **k)

    got = tp.max_batch(model, 3, 24 * model.num_params, 6, planner=planner)
    assert got.tried == len(asked) > 6 and got.planner == "planner"
    named, plain = (tp.max_batch(model, 3, 24 * model.num_params, 6, planner="dawnpiper_binary", optimise_memory=flag)
                    for flag in (True, False))
    assert plain.batch < named.batch == got.batch and not plain.plan.recompute.any()
    idle = tp.max_batch(tp.planners.Nodes(*np.zeros((6, 4))), 2, 1.0, most=2)
    assert idle.batch == 2 and idle.samples_per_s == math.inf


def test_the_largest_micro_batch_of_the_engine_is_what_tp_plan_fits():
    model = tp.GPTConfig(n_layer=4, n_head=2, n_embd=32, vocab_size=64, block_size=16)
    cluster = tp.Cluster(num_devices=3, peak_flops=1e12)
    given = dict(schedule="1f1b", seq_len=12, cluster=cluster, executable=True)

    def need(planner, batch):
        asked = dict(planner=planner, schedule="1f1b", stages=2, slicing=[(batch, [12])] * 3)
        with pytest.raises(tp.InfeasibleError) as refused:
            tp.plan(model, cluster, 3 * batch, 12, memory_bytes=1, **asked)
        return refused.value.memory_bytes

    for planner in ("dawnpiper", "uniform", "terapipe"):
        needs = [need(planner, batch) for batch in (5, 6)]
        assert needs[0] < needs[1]
        for memory, wanted in ((needs[0], 5), (needs[1] - 1, 5), (needs[1], 6)):
            got = tp.max_batch(model, 2, memory, 3, planner=planner, **given)
            assert (got.batch, got.planner) == (wanted, planner) and max(got.plan.peak_memory_bytes) <= memory
            assert got.plan.executable and got.plan.slicing == [(wanted, [12])] * 3 and got.plan.ranks == 2
            assert got.samples_per_s == 3 * wanted / got.plan.step_time_s
    assert tp.max_batch(model, 2, 1e12, 3, planner="uniform", most=9, **given).batch == 9
    measured = tp.CostModel.from_dict({**tp.CostModel.analytic(model, cluster).to_dict(), "source": "measured", "micro_batch": 3})
    assert tp.max_batch(model, 2, 1e12, 3, planner="uniform", costs=measured, **given).batch == 3
    for stages in (2, 3):                                      # as many as stages
        assert len(tp.max_batch(model, stages, 1e12, planner="uniform", most=9, **given).plan.slicing) == stages
    with pytest.raises(tp.InfeasibleError):
        tp.max_batch(model, 2, 1000, 3, planner="uniform", **given)
    assert tp.max_batch(model, 2, 1e18, 3, planner="uniform", **given).batch == 65536     # of 3 devices: as many as tp.plan takes


@pytest.mark.parametrize(("change", "said"), [
    (dict(optimise_memory=True), "optimise_memory is True and executable True"), (dict(mode="paper"), "mode is 'paper'"),
    (dict(swap_bandwidth_Bps=1e9), "swap_bandwidth_Bps is"), (dict(link_bandwidth_Bps=1e9), "link_bandwidth_Bps is"),
    (dict(cluster=None), "its cluster"), (dict(micro_batches=0), "micro_batches is 0"),
    (dict(micro_batches=10**9), "micro_batches is 1000000000: at most 65536"), (dict(stages=0), "stages is 0"),
    (dict(planner="memory"), "planner is 'memory'"), (dict(stages=4), "stages is 4"),
    (dict(executable="no"), "executable is 'no'")])  # fmt: skip
def test_what_the_engine_takes_no_largest_micro_batch_of(change, said):
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=16, block_size=16)
    given = dict(stages=2, memory_bytes=1e9, cluster=tp.Cluster(num_devices=3, peak_flops=1e12), planner="uniform", executable=True)
    with pytest.raises((tp.InvalidValueError, tp.InvalidTypeError), match=said):
        tp.max_batch(model, **{**given, **change})
    with pytest.raises(tp.InvalidTypeError, match="a GPTConfig as model"):
        tp.max_batch(model.nodes(), **given)


@pytest.mark.parametrize("shards", [False, True])
def test_the_largest_micro_batch_of_replicas_is_what_tp_plan_fits(shards):
    """It knew of one replica alone, whose moments leave less room."""
    model = tp.GPTConfig(n_layer=4, n_head=2, n_embd=32, vocab_size=64, block_size=16)
    cluster = tp.Cluster(num_devices=6, peak_flops=1e12)
    asked = dict(planner="uniform", schedule="1f1b", stages=2, data_parallel=3, shard_optimizer=shards)
    needs = []
    for batch in (5, 6):
        with pytest.raises(tp.InfeasibleError) as refused:
            tp.plan(model, cluster, 3 * 2 * batch, 12, memory_bytes=1, slicing=[(batch, [12])] * 2, **asked)
        needs.append(refused.value.memory_bytes)
    given = {**asked, "micro_batches": 2, "seq_len": 12, "cluster": cluster, "executable": True}
    for memory, wanted in ((needs[0], 5), (needs[1] - 1, 5), (needs[1], 6)):
        got = tp.max_batch(model, memory_bytes=memory, **given)
        same = tp.plan(model, cluster, 3 * 2 * wanted, 12, memory_bytes=memory, slicing=[(wanted, [12])] * 2, **asked)
        assert got.batch == wanted and got.plan == same and got.plan.peak_memory_bytes == same.peak_memory_bytes
        assert (got.plan.data_parallel, got.plan.shard_optimizer, got.plan.batch) == (3, shards, 6 * wanted)
        assert got.samples_per_s == 6 * wanted / got.plan.step_time_s
    assert max(got.plan.peak_memory_bytes) == needs[1]


@pytest.mark.parametrize(("change", "said"), [
    (dict(executable=False, data_parallel=2), "data_parallel is 2 and executable False: .* executable=True"),
    (dict(executable=False, shard_optimizer=True), "shard_optimizer is True and executable False"),
    (dict(data_parallel=0), "data_parallel is 0"), (dict(data_parallel="two"), "data_parallel is 'two'"),
    (dict(data_parallel=2), "stages is 2 and data_parallel 2: the cluster has 3"),
    (dict(shard_optimizer="no"), "shard_optimizer is 'no': True or False")])
def test_what_replicas_have_no_largest_micro_batch_of(change, said):
    model = tp.GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=16, block_size=16)
    given = dict(stages=2, memory_bytes=1e9, planner="dawnpiper", seq_len=8)
    if change.get("executable") is not False:
        given |= dict(cluster=tp.Cluster(num_devices=3, peak_flops=1e12), executable=True)
    with pytest.raises((tp.InvalidValueError, tp.InvalidTypeError), match=said):
        tp.max_batch(model, **{**given, **change})
