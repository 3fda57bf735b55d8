"""tp.capture: what torch.fx and autograd say of a PyTorch model, as nodes. Skipped where torch is not installed."""

import sys

import numpy as np
import pytest

import terapipe_c as tp


def test_without_torch_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "torch.fx", None)
    with pytest.raises(ImportError, match="pip install torch"):
        tp.capture(object(), None)


@pytest.fixture(scope="module")
def torch():
    module = pytest.importorskip("torch")
    module.set_num_threads(1)
    return module


def residual_mlp(torch, width=16):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(width)
            self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
            self.scale = torch.nn.Parameter(torch.ones(width))
            self.drop = torch.nn.Dropout(0.5)

        def forward(self, x):
            rows = x.shape[0] * 1  # a number ("mul"): no node
            y = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
            return (x + self.drop(y) * self.scale).reshape(rows, -1)

    torch.manual_seed(0)
    return Model()


def test_a_residual_mlp(torch, tmp_path):
    model, x = residual_mlp(torch), torch.randn(8, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    nodes = tp.capture(model, x, repeats=2)
    assert nodes.names == ("norm", "up", "gelu", "down", "drop", "mul_1", "add", "reshape")
    kept, params = (dict(zip(nodes.names, nodes[key], strict=True)) for key in ("activation_bytes", "param_bytes"))
    assert params["norm"] == 2 * 16 * 4 and params["up"] == (16 + 1) * 64 * 4 and params["mul_1"] == 16 * 4
    assert nodes.param_bytes.sum() == sum(p.numel() * 4 for p in model.parameters())
    assert (nodes.optimizer_bytes == 2 * nodes.param_bytes).all() and nodes.param_bytes[[2, 4, 6, 7]].sum() == 0
    assert kept["up"] == kept["gelu"] == 8 * 64 * 4 and kept["add"] == kept["reshape"] == kept["down"] == 0
    assert kept["norm"] >= 8 * 16 * 4 and kept["drop"] > 0
    assert (nodes.fwd_s > 0).all() and (nodes.bwd_s[:4] > 0).all() and (nodes.recompute_s[:3] == nodes.fwd_s[:3]).all()
    assert np.isclose(nodes.recompute_s[4], nodes.fwd_s[4] + nodes.fwd_s[3])  # drop's source, down, keeps nothing
    assert nodes.cut_bytes[1] == 8 * 64 * 4 and nodes.cut_tensors[-1] == 0
    assert all(p.grad is None for p in model.parameters()) and torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    nodes.save(tmp_path / "mlp.json")
    assert tp.planners.load_nodes(tmp_path / "mlp.json") == nodes
    plan = tp.planners.dawnpiper(nodes, 2, float(4 * nodes.param_bytes.sum() + nodes.activation_bytes.sum()), 4)
    assert plan.optimal and plan.boundaries[-1] == len(nodes)


def test_kept_bytes_are_what_autograd_saves(torch):
    """The sum is what a whole forward saves, each storage once, without parameters and the example."""
    model = residual_mlp(torch).eval()
    x = torch.randn(8, 16)
    seen, held = {}, []
    skip = {p.untyped_storage().data_ptr() for p in model.parameters()} | {x.untyped_storage().data_ptr()}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = model(x)
    want = sum(size for key, size in seen.items() if key not in skip)
    assert tp.capture(model, x, repeats=1).activation_bytes.sum() == want and result is not None


def test_operations_in_place_shared_parameters_and_several_inputs(torch):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.nn.Linear(4, 4)
            self.relu = torch.nn.ReLU(inplace=True)
            self.norm = torch.nn.BatchNorm1d(4)

        def forward(self, a, b, scale=2.0):
            first, second = torch.chunk(self.norm(self.relu(self.one(a))), 2, dim=1)
            return torch.cat([first, second * scale], 1) + self.one(b)

    torch.manual_seed(0)
    model = Model()
    mean = model.norm.running_mean.clone()
    nodes = tp.capture(model, (torch.randn(6, 4), torch.randn(6, 4)), repeats=1)
    assert nodes.param_bytes.sum() == sum(p.numel() * 4 for p in model.parameters())  # shared: once
    assert torch.equal(model.norm.running_mean, mean)
    named = tp.capture(model, {"a": torch.randn(6, 4), "b": torch.randn(6, 4)}, repeats=1)
    assert sorted(named.names) == sorted(nodes.names)
    places = {name: k for k, name in enumerate(nodes.names)}
    assert places["one"] < places["relu"] < places["norm"] < places["cat"] < places["add"]


def test_what_cannot_be_traced_is_refused(torch):
    class Depends(torch.nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(ValueError, match="cannot trace Depends"):
        tp.capture(Depends(), torch.ones(2))
    with pytest.raises(TypeError, match="module is int"):
        tp.capture(3, torch.ones(2))
    with pytest.raises(ValueError, match="argument"):
        tp.capture(torch.fx.symbolic_trace(torch.nn.Linear(2, 2)), ())


def test_twice_the_batch_keeps_twice_as_much(torch):
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)).eval()
    one, two = (tp.capture(model, torch.randn(rows, 8), repeats=1) for rows in (4, 8))
    assert np.array_equal(2 * one.activation_bytes, two.activation_bytes) and one.activation_bytes.sum() > 0
    assert np.array_equal(one.param_bytes, two.param_bytes)


def adapted(torch, width=16):
    """A frozen layer under a trained one, and a buffer: what fine-tuning of adapters holds."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.norm = torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width)
            self.head = torch.nn.Linear(width, width)
            self.register_buffer("mask", torch.ones(width))
            self.base.requires_grad_(False)

        def forward(self, x):
            return self.head(self.norm(self.base(x)) * self.mask)

    return Model()


def test_frozen_parameters_and_buffers_take_memory_without_gradients(torch):
    nodes = tp.capture(adapted(torch), torch.randn(8, 16), repeats=0)
    assert nodes.names == ("base", "norm", "mul", "head")
    linear = (16 + 1) * 16 * 4
    assert nodes.param_bytes.tolist() == [0, 2 * 16 * 4, 0, linear]
    batches = 8  # BatchNorm's count of them, an int64
    assert nodes.optimizer_bytes.tolist() == [linear, 2 * 2 * 16 * 4 + 2 * 16 * 4 + batches, 16 * 4, 2 * linear]
    held = tp.planners.dawnpiper(nodes, 1, 1e9, 1).peak_memory_bytes[0]
    assert held >= linear + 4 * linear + nodes.activation_bytes.sum()


def test_an_example_that_wants_a_gradient_is_no_parameter(torch):
    model = residual_mlp(torch)
    plain, wanted = (tp.capture(model, torch.randn(8, 16, requires_grad=want), repeats=0) for want in (False, True))
    assert wanted.param_bytes.tolist() == plain.param_bytes.tolist()
    assert wanted.optimizer_bytes.tolist() == plain.optimizer_bytes.tolist()
