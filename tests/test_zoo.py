"""The model zoo against published totals and against counting; the device table; the roofline."""
import dataclasses
import math

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import devices, zoo


@pytest.mark.parametrize("name", zoo.names())
def test_parameters_match_the_published_total(name):
    spec = zoo.get(name)
    assert abs(spec.num_params / spec.published_params - 1) <= spec.tolerance
    assert spec.source and spec.name in repr(spec) and "<table" in spec._repr_html_()


def test_biases_and_norms_are_those_of_the_released_weights():
    """Llama 2 and Qwen2 by their configurations' shapes; BLOOM (176,247,271,424, a norm behind the embedding) above."""
    def tensors(layers, h, kv, inner, vocab, qkv_bias):
        layer = 2 * h * h + 2 * h * kv + 3 * h * inner + 2 * h + (h + 2 * kv if qkv_bias else 0)   # no bias behind the attention
        return layers * layer + 2 * vocab * h + h

    assert zoo.get("llama-70b").num_params == tensors(80, 8192, 1024, 28672, 32000, False)
    assert zoo.get("qwen2-72b").num_params == tensors(80, 8192, 1024, 29568, 152064, True)


def test_t5_has_every_tensor_of_t5_large():
    """google-t5/t5-large: no biases, one shared embedding, a table of distances and a last norm in each of the two stacks."""
    h, inner, layers, stacks = 1024, 4096, 24, 2
    attention, ffn = 4 * h * h + h, 2 * h * inner + h
    count = 32128 * h + layers * (attention + ffn) + layers * (2 * attention + ffn) + stacks * (32 * 16 + h)
    assert zoo.get("t5-780m").num_params == count == 737_668_096


def test_bert_has_every_tensor_of_bert_large_but_its_pooler():
    h, inner = 1024, 4096
    layer = 4 * (h * h + h) + 2 * h * inner + inner + h + 2 * 2 * h
    assert zoo.get("bert-340m").num_params == (30522 + 512 + 2) * h + 2 * h + 24 * layer == 335_141_888 - h * h - h


@pytest.mark.parametrize(("gated", "bias", "kv"), [(True, False, 2), (False, True, 4)])
def test_parameters_are_those_of_arrays(gated, bias, kv):
    h, heads, d, inner = 12, 4, 3, 20
    arrays = [np.zeros((h, heads * d)), np.zeros((h, kv * d)), np.zeros((h, kv * d)), np.zeros((heads * d, h)), np.zeros(h)]
    arrays += [np.zeros(n) for n in (heads * d, kv * d, kv * d, h)] if bias else []
    assert zoo.attention(h, heads, kv, d, bias=bias, norm=1).params == sum(a.size for a in arrays)
    arrays = [np.zeros((h, inner)), np.zeros((inner, h)), np.zeros(h)] + ([np.zeros((h, inner))] if gated else [])
    arrays += [np.zeros(inner), np.zeros(h)] if bias else []
    assert zoo.feed_forward(h, inner, gated=gated, bias=bias, norm=1).params == sum(a.size for a in arrays)


@pytest.mark.parametrize("name", zoo.names())
def test_the_operations_of_a_block_add_up_to_it(name):
    for block in set(zoo.get(name).blocks):
        for key in ("params", "active_params", "pair_flops", "token_bytes", "pair_bytes") if block.tensors else ():
            assert sum(getattr(part, key) for part in block.tensors) == getattr(block, key), (block.name, key)


@pytest.mark.parametrize("name", zoo.names())
def test_tensor_nodes_hold_what_the_blocks_hold(name):
    spec = zoo.get(name)
    fine, coarse = spec.tensor_nodes("v100", micro_batch=2), spec.nodes("v100", micro_batch=2)
    assert fine.names == spec.tensor_nodes("v100").names and len(set(fine.names)) == len(fine)
    for key in ("activation_bytes", "param_bytes", "optimizer_bytes"):
        assert sum(fine[key]) == pytest.approx(sum(coarse[key]))
        for number in range(0, len(spec.blocks), 7):
            inside = [fine[key][k] for k, block in enumerate(fine.blocks) if block == number]
            assert sum(inside) == pytest.approx(coarse[key][number])
    ends = [k for k in range(len(fine) - 1) if fine.blocks[k] != fine.blocks[k + 1]]
    assert fine.cut_bytes[ends].tolist() == pytest.approx(coarse["cut_bytes"][:-1].tolist())


def test_the_output_of_an_encoder_crosses_until_its_last_reader():
    cuts = zoo.get("t5-780m").nodes("v100")["cut_bytes"]
    names = [block.name for block in zoo.get("t5-780m").blocks]
    first, last = names.index("decoder"), len(names) - 1 - names[::-1].index("cross")
    assert all(cuts[k] == cuts[0] * (2 if first <= k < last else 1) for k in range(len(cuts)))


def test_feed_forward_and_head_flops_are_those_of_loops():
    h, inner, vocab, length, experts, top = 5, 7, 11, 4, 3, 2
    for gated, count in ((False, 1), (True, 1), (True, experts)):
        adds = 0
        for _token in range(length):
            if count > 1:
                for _expert in range(count):
                    adds += h
            for _used in range(top if count > 1 else 1):
                for _row in range(inner):
                    adds += h * (2 if gated else 1)   # up, and gate
                for _row in range(h):
                    adds += inner
        block = zoo.feed_forward(h, inner, gated=gated, bias=True, norm=1, experts=count, top=top if count > 1 else 1)
        assert block.flops(length) == 2 * adds
    adds = sum(h for _token in range(length) for _word in range(vocab))
    for tied in (True, False):
        first, last = zoo._ends(h, vocab, 0, 1, tied)
        assert (first.flops(length), last.flops(length)) == (0, 2 * adds)


def test_cells_are_a_graph_of_as_many_parameters_as_published():
    nodes = zoo.amoebanet("a100-40")
    assert sum(nodes.param_bytes) / 2 == pytest.approx(28e6, rel=0.05)
    assert max(nodes.cut_tensors) >= 4 and sum(nodes.optimizer_bytes) == pytest.approx(6 * sum(nodes.param_bytes))
    two = zoo.amoebanet("a100-40", micro_batch=2)
    assert sum(two.activation_bytes) == pytest.approx(2 * sum(nodes.activation_bytes))
    assert len(tp.planners.dawnpiper(nodes, 4, 40e9).boundaries) == 5
    with pytest.raises(ValueError, match="cells"):
        zoo.amoebanet("a100-40", cells=1)
    with pytest.raises(ValueError, match="cells is 2147483648: at most 10000 would be right"):
        zoo.amoebanet("a100-40", cells=2**31)       # went on for hours
    for classes in (0, 2.5, "10", None, [1]):
        with pytest.raises(ValueError, match="classes is .*would be right"):
            zoo.amoebanet("a100-40", cells=3, classes=classes)


def test_cells_count_what_their_operations_do():
    """Of one cell a group: (pixels, bytes read, channels, multiply-adds, weights) of each node, by its name."""
    of, batch, right = devices.get("h100"), 3, {"image": (64 * 64, 0, 3, 0, 0)}

    def conv(name, pixels, reads, into, out, taps=1):       # reads: bytes a sample, which may be of a larger picture
        right[name] = pixels, reads, out, taps * into * out * pixels, taps * into * out
        right[f"{name}.norm"] = pixels, 2 * pixels * out, out, 0, 2 * out

    conv("stem", 16 * 16, 2 * 64 * 64 * 3, 3, 2, 9)
    conv("stem.2", 8 * 8, 2 * 16 * 16 * 2, 2, 8, 9)
    for group, (side, c, left, two) in enumerate(((8, 8, 8, 8), (4, 16, 8, 16), (2, 32, 16, 32))):
        pixels, cell, one = side * side, f"cell.{group}.0", 2 * side * side * c
        for j, width in enumerate((left, two)):
            conv(f"{cell}.{('left', 'right')[j]}", pixels, 2 * pixels * width, width, c)
            if group:       # half the side: what it reads has four times the pixels
                right[f"reduce.{group}.{j}"] = pixels, 8 * pixels * width, width, 0, 0
        for name in ("0a.conv", "2b.conv", "4b.conv"):
            conv(f"{cell}.{name}", pixels, one, c, c)
        for name in ("0b", "3a", "4a"):
            right[f"{cell}.{name}.pool"] = pixels, one, c, 0, 0
        for name in ("1a", "2a"):
            for part, into, out, taps in (("in", c, c // 4, 1), ("row", c // 4, c // 4, 7), ("column", c // 4, c // 4, 7),
                                          ("out", c // 4, c, 1)):
                conv(f"{cell}.{name}.{part}", pixels, 2 * pixels * into, into, out, taps)
        right |= {f"{cell}.{k}.sum": (pixels, 2 * one, c, 0, 0) for k in range(5)}
        right[f"{cell}.join"] = pixels, 2 * one, 2 * c, 0, 0        # two sums that no other reads
    right |= {"mean": (1, 2 * 4 * 64, 64, 0, 0), "classes": (1, 2 * 64, 10, 640, 650)}
    graph = zoo.amoebanet(of, cells=3, channels=8, image=64, classes=10, micro_batch=batch, efficiency=1e-6)
    assert sorted(graph.names) == sorted(right)
    for k, name in enumerate(graph.names):
        pixels, reads, made, macs, weights = right[name]
        out = 2 * pixels * made * batch
        assert (graph.activation_bytes[k], graph.param_bytes[k], graph.optimizer_bytes[k]) == (out, 2 * weights, 12 * weights), name
        assert graph.working_bytes[k] == 2 * (reads * batch + out), name
        for seconds, times in ((graph.fwd_s[k], 1), (graph.bwd_s[k], 2), (graph.recompute_s[k], 1)):
            move = times * (reads * batch + out + 2 * weights)
            assert seconds == of.seconds(times * 2 * macs * batch, move, efficiency=1e-6), name
    first = zoo.amoebanet(of, cells=18, image=32)
    assert sum(name.endswith("join") for name in first.names) == 18 and len(first) == len(zoo.amoebanet(of))
    assert [sum(name.startswith(f"cell.{g}.") and name.endswith("join") for name in zoo.amoebanet(of, cells=4).names)
            for g in range(3)] == [2, 1, 1]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("context", [0, 3])
def test_flops_are_those_of_a_loop(causal, context):
    h, heads, kv, d, length, batch = 6, 3, 1, 2, 5, 2
    adds = 0
    for _ in range(batch):
        for query in range(length):
            for width in (heads * d, kv * d, kv * d):
                adds += h * width
            for _key in range(context + (query + 1 if causal else length)):
                for _head in range(heads):
                    adds += d + d
            adds += heads * d * h
    block = zoo.attention(h, heads, kv, d, bias=False, norm=1, causal=causal)
    assert block.flops(length, context, batch) == 2 * adds


def test_slices_add_up_to_the_sequence():
    block = zoo.get("llama-70b").blocks[1]
    lengths = [1, 7, 24, 32]
    parts = [block.flops(n, sum(lengths[:i])) for i, n in enumerate(lengths)]
    assert sum(parts) == block.flops(64)


def test_gpt_shape_agrees_with_gptconfig():
    model = tp.GPTConfig(3, 4, 32, 100, 16)
    assert zoo.attention(32, 4, 4, 8, bias=True, norm=2).params == model.block_params("attention")
    assert zoo.feed_forward(32, 128, gated=False, bias=True, norm=2).params == model.block_params("ffn")


def test_activations_are_those_of_korthikanti():
    s, b, h, a = 16, 3, 64, 4
    mix = zoo.attention(h, a, a, h // a, bias=True, norm=2, dropout=True)
    ffn = zoo.feed_forward(h, 4 * h, gated=False, bias=True, norm=2, dropout=True)
    assert mix.activation_bytes(s, 0, b) + ffn.activation_bytes(s, 0, b) == s * b * h * 34 + 5 * a * s * s * b


def test_without_dropout_scores_are_kept_once():
    # What autograd saves of such a layer in bf16: norm's input and output, q, k, v, softmax, what the projection reads.
    s, b, h, a = 16, 3, 64, 4
    saved = [(b, s, h)] * 6 + [(b, a, s, s)]
    mix = zoo.attention(h, a, a, h // a, bias=True, norm=2)
    assert mix.activation_bytes(s, 0, b) == 2 * sum(math.prod(shape) for shape in saved)
    assert sum(part.pair_bytes for part in mix.tensors) == mix.pair_bytes == 2 * a


@pytest.mark.parametrize("name", zoo.names())
def test_layers_and_nodes_are_whole(name):
    spec = zoo.get(name)
    layers, nodes = spec.layers("a100-80"), spec.nodes("a100-80")
    assert sum(x["count"] * x["static_bytes"] for x in layers) == pytest.approx(16 * spec.num_params)
    assert sum(2 * nodes["param_bytes"] + nodes["optimizer_bytes"]) == pytest.approx(16 * spec.num_params)
    assert all(len(v) == len(spec.blocks) and np.isfinite(v).all() and (v >= 0).all() for v in nodes.values())
    boundaries = tp.planners.autopipe_balanced(nodes["fwd_s"], nodes["bwd_s"], 4, 8).boundaries
    assert boundaries[0] == 0 and boundaries[-1] == len(spec.blocks)


@pytest.mark.parametrize("name", ["bert-340m", "t5-780m"])
def test_planners_take_nodes_and_layers(name):
    spec = zoo.get(name)
    assert len(tp.planners.dawnpiper(spec.nodes("a100-40"), 4, 40e9).boundaries) == 5
    assert tp.planners.bmpipe(spec.layers("a100-40"), 4, 8, 40e9).step_time_s > 0


def test_more_micro_batch_more_of_everything():
    spec = zoo.get("bert-340m")
    one, two = spec.nodes("v100"), spec.nodes("v100", micro_batch=2)
    assert (two["activation_bytes"] == 2 * one["activation_bytes"]).all() and (two["fwd_s"] >= one["fwd_s"]).all()


def test_roofline_has_two_sides():
    h100 = devices.get("h100")      # what nobody says: half of fp16's peak, 0.8 of the bandwidth, 5 us
    assert h100.seconds(0.5 * 989e12, 0) == pytest.approx(1 + 5e-6) and h100.seconds(0, 0.8 * 3350e9) == pytest.approx(1 + 5e-6)
    assert h100.peak("float32") == h100.peak("fp32") == 67e12 and devices.get(h100) is h100 is devices.get("H100")
    assert h100.seconds(67e12, 0, dtype="float32", efficiency=1, launch_s=0) == 1.0
    device = devices.get("h100")
    assert device.seconds(989e12, 0, efficiency=1.0, launch_s=0) == pytest.approx(1.0)
    assert device.seconds(0, 3.35e12, bandwidth_efficiency=1.0, launch_s=0) == pytest.approx(1.0)


@pytest.mark.parametrize("name", devices.names())
def test_a_cluster_of_every_device_has_costs(name):
    cluster = tp.Cluster.preset(name, 8)
    assert cluster.memory_bytes == devices.get(name).memory_bytes
    costs = tp.CostModel.analytic(tp.GPTConfig.preset("gpt3-1b"), cluster)
    slow = tp.CostModel.analytic(tp.GPTConfig.preset("gpt3-1b"), tp.Cluster.preset(name, 8, efficiency=0.05))
    assert 0 < costs.time(1024, 0) < slow.time(1024, 0)


def test_what_is_wrong_is_named():
    for call, word in ((lambda: zoo.get("gpt5"), "gpt5"), (lambda: devices.get("tpu"), "tpu"),
                       (lambda: devices.get("v100").peak("bf16"), "bf16"),
                       (lambda: tp.Cluster.preset("v100", efficiency=2), "efficiency"),
                       (lambda: devices.get("v100").seconds(-1, 0), "flops"),
                       (lambda: zoo.get("t5-780m").nodes(7), "no device 7"),
                       (lambda: zoo.amoebanet(None), "no device None"),
                       (lambda: zoo.get("t5-780m").nodes("v100", micro_batch=0), "micro_batch")):
        with pytest.raises(ValueError, match=word):
            call()


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int32, np.int64])
@pytest.mark.parametrize("name", ["bloom-176b", "moe-1t", "t5-780m"])
def test_a_number_of_numpy_is_any_other(name, kind):
    """Bytes were those modulo 2^32, with a warning, of a micro_batch out of an array of int32."""
    spec, given, own = zoo.get(name), {"micro_batch": kind(64), "seq_len": np.int32(4096)}, {"micro_batch": 64, "seq_len": 4096}
    for of in (spec.nodes, spec.tensor_nodes):
        one, other = of("h100", **given), of("h100", **own)
        keys = ("fwd_s", "bwd_s", "recompute_s", "activation_bytes", "param_bytes", "optimizer_bytes", "cut_bytes")
        assert all(np.array_equal(one[key], other[key]) for key in keys)
    assert spec.layers("h100", tensor_parallel=kind(2), **given) == spec.layers("h100", tensor_parallel=2, **own)
    assert np.array_equal(spec.block_costs("h100", **given), spec.block_costs("h100", **own))
    assert spec.cut_bytes(np.int32(4096), kind(64)) == spec.cut_bytes(4096, 64)
    for block in spec.blocks[1:3]:
        assert block.flops(np.int32(4096), np.int32(9), kind(64)) == block.flops(4096, 9, 64)
        assert block.activation_bytes(np.int32(4096), np.int32(9), kind(64)) == block.activation_bytes(4096, 9, 64)


@pytest.mark.parametrize("name", ["bert-340m", "t5-780m", "moe-1t"])
def test_seconds_are_rooflines_of_what_is_counted(name):
    """A backward is two forwards of FLOPs and bytes, on each of the devices that share a block."""
    spec, of, parts, two = zoo.get(name), devices.get("a100-80"), 4, {"efficiency": 0.3, "launch_s": 1e-6}
    fwd, bwd = spec.block_costs(of, seq_len=256, micro_batch=3, tensor_parallel=parts, **two)
    seconds = {}
    for k, block in enumerate(spec.blocks):
        flops = block.flops(256, 0, 3) / parts
        move = (2 * block.params + block.activation_bytes(256, 0, 3)) / parts
        seconds[block] = of.seconds(flops, move, **two), of.seconds(2 * flops, 2 * move, **two)
        assert (fwd[k], bwd[k]) == seconds[block]
        more = block.activation_bytes(256, 100, 3) - block.activation_bytes(256, 0, 3)
        assert more == 3 * block.pair_bytes * 256 * 100 and block.activation_bytes(256, 100, 3, True) == 3 * block.token_bytes * 256
        assert block.activation_bytes(256) == block.activation_bytes(256, 0, 1, False)
        assert block.flops(256) == block.flops(256, 0, 1)
    short = dataclasses.replace(spec, seq_len=256)
    for ask in ("nodes", "tensor_nodes"):
        one, other = getattr(spec, ask)(of, seq_len=256), getattr(short, ask)(of)
        assert all(np.array_equal(one[key], other[key]) for key in ("fwd_s", "bwd_s", "activation_bytes", "cut_bytes"))
    assert short.layers(of) == spec.layers(of, seq_len=256)
    layers = spec.layers(of, seq_len=256, micro_batch=3, tensor_parallel=parts, **two)
    for (group, count), layer in zip(spec.parts, layers, strict=True):
        pairs = 3 * sum(block.pair_flops * block.pairs(256) for block in group)
        none, selective, full = layer["strategies"]
        assert layer["count"] == count and layer["fwd_s"] == pytest.approx(sum(seconds[block][0] for block in group))
        assert layer["bwd_s"] == pytest.approx(sum(seconds[block][1] for block in group))
        assert layer["static_bytes"] == 16 * sum(block.params for block in group) / parts
        assert none["activation_bytes"] == sum(block.activation_bytes(256, 0, 3) for block in group) / parts
        assert selective["activation_bytes"] == sum(3 * block.token_bytes * 256 for block in group) / parts
        assert selective["extra_bwd_s"] == (of.seconds(pairs / parts, 0, **two) if pairs else 0)
        assert full["activation_bytes"] == 2 * spec.hidden * 256 * 3 and full["extra_bwd_s"] == layer["fwd_s"]
        assert none["extra_bwd_s"] == 0
    assert zoo.attention(8, 2, 2, 4, bias=False, norm=1).pairs(5) == 15
    assert zoo.attention(8, 2, 2, 4, bias=False, norm=1, causal=False).pairs(5, 2) == 35


@pytest.mark.parametrize("name", ["bert-340m", "llama-70b", "t5-780m", "moe-1t"])
def test_an_operation_moves_what_it_reads_and_makes(name):
    """Each reads what the one before makes: seconds, working bytes, and the bytes of a cut behind it, but for what crosses it."""
    spec, of, length, batch = zoo.get(name), devices.get("h100"), 512, 3
    fine, rows, before = spec.tensor_nodes(of, seq_len=length, micro_batch=batch, efficiency=0.4), 512 * 3, 0.0
    parts = [(block, part) for block in spec.blocks for part in block.tensors or (None,)]
    assert fine.names[0] == "embedding" and fine.names[1] == f"1.{'encoder' if name == 't5-780m' else 'attention'}.norm"
    for k, (block, part) in enumerate(parts):
        if part is None:        # an embedding, a head, a norm between: the residual stream
            out, flops, params = 2 * spec.hidden * rows, 2 * block.active_params * rows, block.params
        else:
            kept = {"scores": part.pair_bytes * length * rows}
            out = kept.get(part.name, 2 * part.width * rows)
            flops, params = 2 * part.active_params * rows + part.pair_flops * batch * block.pairs(length), part.params
        move = 2 * params + before + out
        assert fine.fwd_s[k] == pytest.approx(of.seconds(flops, move, efficiency=0.4), rel=1e-12)
        assert fine.bwd_s[k] == pytest.approx(of.seconds(2 * flops, 2 * move, efficiency=0.4), rel=1e-12)
        assert fine.working_bytes[k] == 2 * (before + out) and fine.param_bytes[k] == 2 * params
        again = k > 0 and fine.activation_bytes[k] > 0 and not fine.activation_bytes[k - 1]     # what keeps nothing is made again
        first = part is not None and part.name == "residual" and fine.blocks[k] == 1            # reads the embedding, too
        made = fine.fwd_s[k] + again * fine.fwd_s[k - 1] + first * fine.fwd_s[0]
        assert fine.recompute_s[k] == pytest.approx(made, rel=1e-12)
        if name != "t5-780m" and k + 1 < len(parts):        # there the encoder's output crosses, too
            stream = 2 * spec.hidden * rows if part is not None and part.name != "residual" else 0
            assert fine.cut_bytes[k] == out + stream + (before if part is not None and part.name == "scores" else 0)    # v waits
        before = out
