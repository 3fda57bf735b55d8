"""GPTConfig and Cluster: published counts, formulas against an independent listing of every tensor, and refusals."""
import dataclasses

import numpy as np
import pytest

import terapipe_c as tp
from terapipe_c import _core
from terapipe_c.config import Cluster, GPTConfig, human_bytes, human_count

PUBLISHED = {"gpt2-124m": 124_439_808, "gpt2-345m": 354_823_168, "gpt2-762m": 774_030_080, "gpt2-1558m": 1_557_611_200}


def tensors(m):
    """Shapes of Hugging Face's GPT2LMHeadModel, listed one by one: the oracle of num_params."""
    E, b = m.n_embd, m.bias
    yield (m.vocab_size, E)
    yield (m.block_size, E)
    for _ in range(m.n_layer):
        for _norm in range(2):
            yield (E,)
            if b:
                yield (E,)
        for rows, cols in ((E, 3 * E), (E, E), (E, 4 * E), (4 * E, E)):
            yield (rows, cols)
            if b:
                yield (cols,)
    yield (E,)
    if b:
        yield (E,)
    if not m.tie_weights:
        yield (m.vocab_size, E)


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name):
    assert GPTConfig.preset(name).num_params == PUBLISHED[name]


def test_counts_that_round_up_to_the_next_unit_have_it():
    """Almost a million tokens a second were 1e+03k of them."""
    told = {0: "0", 999: "999", 999.7: "1k", 1000: "1k", 1_234_567: "1.23M", 999_499: "999k", 999_500: "1M", 999_950_000: "1B"}
    assert {value: human_count(value) for value in told} == told


def test_bytes_that_round_up_to_the_next_unit_have_it():
    """One byte less than a mebibyte was 1024.00 KiB."""
    told = {0: "0 B", 1023: "1023 B", 1023.7: "1.00 KiB", 1536: "1.50 KiB", 2**20 - 6: "1023.99 KiB", 2**20 - 5: "1.00 MiB",
            2**30 - 1: "1.00 GiB", -(2**20 - 1): "-1.00 MiB", 2**40 - 1: "1.00 TiB", 2000 * 2**40: "2000.00 TiB",
            float("inf"): "inf B", np.int64(1152): "1.13 KiB"}  # fmt: skip
    assert {value: human_bytes(value) for value in told} == told
    assert human_bytes(2.0**1000) == f"{2**960}.00 TiB"


def test_gpt3_presets_are_near_their_names():
    for name, billions, tolerance in (("gpt3-175b", 174.6, 0.01), ("gpt3-13b", 13, 0.02), ("gpt3-44b", 44, 0.02),
                                      ("gpt2-1.3b", 1.314, 0.01)):
        assert abs(GPTConfig.preset(name).num_params / (billions * 1e9) - 1) < tolerance, name


def test_gpt3_presets_have_the_shapes_of_terapipes_table_1():
    for name, shape in {"gpt3-1b": (24, 16, 2048), "gpt3-13b": (40, 40, 5120), "gpt3-44b": (96, 48, 6144),
                        "gpt3-175b": (96, 96, 12288)}.items():
        model = GPTConfig.preset(name)
        assert (model.n_layer, model.n_head, model.n_embd, model.vocab_size, model.block_size) == (*shape, 50257, 2048)


def test_aliases_and_changes_of_presets():
    assert GPTConfig.preset("gpt2-xl") == GPTConfig.preset("gpt2-1558m")
    assert GPTConfig.preset("gpt2-124m", block_size=2048).block_size == 2048
    with pytest.raises(ValueError, match="gpt5.*gpt2-124m"):
        GPTConfig.preset("gpt5")
    with pytest.raises(ValueError, match="layers"):
        GPTConfig.preset("gpt2-124m", layers=3)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tie", [True, False])
def test_parameters_equal_the_sum_over_tensors_and_over_blocks(bias, tie):
    m = GPTConfig(n_layer=3, n_head=4, n_embd=20, vocab_size=61, block_size=17, bias=bias, tie_weights=tie)
    assert m.num_params == sum(int(np.prod(shape)) for shape in tensors(m))
    assert m.num_params == sum(m.block_params(block.kind) for block in m.blocks)


def test_blocks_are_embedding_layers_head():
    m = GPTConfig(2, 2, 8, 10, 16)
    assert [b.kind for b in m.blocks] == ["embedding", "attention", "ffn", "attention", "ffn", "head"]
    assert [b.layer for b in m.blocks] == [-1, 0, 0, 1, 1, -1]
    assert m.blocks[3].name == "h.1.attention" and len(m.blocks) == m.num_blocks == 6


def test_flops_count_every_product_of_forward_and_backward():
    m = GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=11, block_size=32)
    T, E = 7, 8
    products = m.n_layer * T * (E * 3 * E + E * E + 2 * E * 4 * E) + T * E * 11          # multiply-adds, forward
    products += m.n_layer * 2 * E * sum(range(1, T + 1))                                 # q.k and p.v of causal pairs
    assert m.flops_per_token(T) == pytest.approx(3 * 2 * products / T, rel=1e-12)


@pytest.mark.parametrize("field,value", [("n_layer", 0), ("n_head", -1), ("n_embd", 2.5), ("vocab_size", "many"),
                                         ("block_size", True), ("n_head", 3), ("bias", 2), ("tie_weights", None),
                                         ("vocab_size", 2**31)])
def test_bad_fields_are_named(field, value):
    good = dict(n_layer=2, n_head=4, n_embd=64, vocab_size=256, block_size=64)
    with pytest.raises(ValueError, match=field):
        GPTConfig(**{**good, field: value})


def test_a_head_count_that_does_not_divide_suggests_one_that_does():
    with pytest.raises(ValueError, match=r"n_head is 3.*n_embd = 64.*(2|4) would be right"):
        GPTConfig(n_layer=2, n_head=3, n_embd=64, vocab_size=256, block_size=64)
    with pytest.raises(ValueError, match=r"n_head is 2.*n_embd = 2147483647: 1 would be right"):      # at once, not after hours
        GPTConfig(n_layer=2, n_head=2, n_embd=2**31 - 1, vocab_size=256, block_size=64)
    with pytest.raises(ValueError, match=r"n_head is 7, which does not divide n_embd = 36: 6 would be right"):
        GPTConfig(n_layer=2, n_head=7, n_embd=36, vocab_size=256, block_size=64)


def test_a_config_is_a_value():
    m = GPTConfig(2, 2, 8, 10, 16, bias=False)
    assert GPTConfig.from_dict(m.to_dict()) == m and hash(GPTConfig.from_dict(m.to_dict())) == hash(m)
    assert eval(repr(m)) == m
    assert GPTConfig(np.int64(2), 2, 8, 10, 16, bias=False) == m
    with pytest.raises(dataclasses.FrozenInstanceError):
        m.n_layer = 3
    with pytest.raises(ValueError, match="vocab_size"):
        GPTConfig.from_dict({"n_layer": 1, "n_head": 1, "n_embd": 4, "block_size": 8})
    with pytest.raises(ValueError, match="depth"):
        GPTConfig.from_dict({**m.to_dict(), "depth": 3})
    assert "<table" in m._repr_html_() and "10" in m._repr_html_()


def test_local_cluster_is_this_machine():
    import os
    local = Cluster.local()
    assert local.num_devices == len(os.sched_getaffinity(0))
    with open("/proc/meminfo") as file:
        total = int(next(line for line in file if line.startswith("MemTotal")).split()[1]) * 1024
    assert 0 < local.memory_bytes <= total // local.num_devices
    assert local.is_local and Cluster.local() == local
    assert Cluster.local(3).num_devices == 3


def test_cluster_is_a_checked_value():
    c = Cluster(num_devices=384, devices_per_node=8, memory_bytes=16e9, link_latency_s=5e-6, link_bandwidth_Bps=12.5e9,
                peak_flops=125e12)
    assert Cluster.from_dict(c.to_dict()) == c and "384" in repr(c) and "<table" in c._repr_html_()
    assert repr(c) == ("<Cluster: 384 devices, 8 a node, 14.90 GiB and 125 TFLOP/s each, links of 5 us and 12.5 GB/s>")
    assert "60 GFLOP/s" in repr(Cluster(2, peak_flops=60e9)) and "60 GFLOP/s" in Cluster(2, peak_flops=60e9)._repr_html_()
    plain = Cluster(4)
    assert (plain.memory_bytes, plain.link_latency_s, plain.link_bandwidth_Bps) == (16 * 10**9, 5e-6, 12.5e9)
    assert not plain.swaps_beside and not plain.is_local and plain.peak_flops is plain.host_bandwidth_Bps is None
    assert not plain.sums_beside and "sums_beside" not in plain.to_dict()
    assert Cluster.from_dict(Cluster(4, sums_beside=True).to_dict()).sums_beside
    assert Cluster(4, memory_bytes=0.5).memory_bytes == 1 and Cluster(4, memory_bytes=2.9).memory_bytes == 2     # not 0
    assert Cluster(4).devices_per_node == 4 and isinstance(c.memory_bytes, int)
    for field, value in (("num_devices", 0), ("devices_per_node", 7), ("memory_bytes", -1), ("link_latency_s", float("nan")),
                         ("link_bandwidth_Bps", 0), ("peak_flops", -5), ("memory_bandwidth_Bps", "fast")):
        with pytest.raises(ValueError, match=field):
            Cluster(**{"num_devices": 8, field: value})
    with pytest.raises(ValueError, match="gpus"):
        Cluster.from_dict({"num_devices": 8, "gpus": 3})


def test_a_preset_of_one_node_has_the_link_that_it_is_given():
    """With devices_per_node=None, which is all of them, that link was one between nodes, of which there is one."""
    for nodes in ({}, {"devices_per_node": None}, {"devices_per_node": 8}, {"devices_per_node": 16}):
        one = Cluster.preset("h100", 8, link_bandwidth_Bps=1e9, link_latency_s=1e-5, **nodes)
        assert one.near_link == (1e-5, 1e9) and not one.tells_nodes_apart
    several = Cluster.preset("h100", 8, link_bandwidth_Bps=1e9, link_latency_s=1e-5, devices_per_node=np.int64(4))
    assert Cluster.preset("h100").num_devices == 1
    assert several.near_link == (5e-6, 450e9) and several.tells_nodes_apart and several.link_bandwidth_Bps == 1e9


@pytest.mark.parametrize("name", ["peak_flops", "memory_bandwidth_Bps", "link_bandwidth_Bps", "node_link_bandwidth_Bps"])
def test_a_cluster_that_is_too_slow_for_seconds_is_named(name):
    """Of its inverse, which is infinite, "a curve has a number that is not finite" was said, or "byte_s is inf"."""
    model = GPTConfig(n_layer=1, n_head=1, n_embd=2**20, vocab_size=2**20, block_size=8)
    for rate in (5e-324, 1e-320, 1e-300):
        with pytest.raises(ValueError, match=rf"^{name} is [15]e-3\d+: at least 1e-250 would be right$"):
            tp.CostModel.analytic(model, Cluster(num_devices=2, **{name: rate}))
    tp.CostModel.analytic(model, Cluster(num_devices=2, **{name: 1e-250}))


@pytest.mark.parametrize("layers", [1, 8])
def test_initial_values_are_gpt2s(layers):
    """0.02 around 0, and of what is added to the residual stream 0.02 / sqrt(2 layers)."""
    model = GPTConfig(n_layer=layers, n_head=1, n_embd=64, vocab_size=64, block_size=64, tie_weights=False)
    for name, values in tp.init_params(model, seed=1).items():
        if values.ndim == 2:
            std = 0.02 / (2 * layers) ** 0.5 if name.endswith("c_proj.weight") else 0.02
            assert abs(values.std() / std - 1) < 0.08 and abs(values.mean()) < 0.1 * std, name
        else:
            assert (values == float(name.endswith(".weight"))).all(), name


@pytest.mark.parametrize(("bias", "tied"), [(0, 1), (1, 0)])
def test_every_tensor_is_of_its_block(bias, tied):
    found = {name: block for name, *_, block in _core.model_params((3, 1, 8, 11, 4, bias, tied))}
    for name, block in found.items():
        layer, part = name.split(".")[2:4] if ".h." in name else ("0", "")
        inside = 1 + 2 * int(layer) + (part in ("ln_2", "mlp"))
        assert block == (inside if part else 0 if ".w" in name and "ln_f" not in name and "head" not in name else 7), name
    assert len(found) == 3 * 6 * (1 + bias) + 3 + bias + (not tied)
