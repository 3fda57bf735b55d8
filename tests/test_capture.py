"""tp.capture: what torch.fx, torch.export and autograd say of a PyTorch model, as nodes. Skipped where torch is not installed."""

import copy
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


def saved_bytes(torch, model, *example, **named):
    seen, held = {}, []
    own = [*model.parameters(), *model.buffers(), *(x for x in (*example, *named.values()) if isinstance(x, torch.Tensor))]
    skip = {t.untyped_storage().data_ptr() for t in own}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        held.append(model(*example, **named))
    return sum(size for key, size in seen.items() if key not in skip)


def test_kept_bytes_are_what_autograd_saves(torch):
    """The sum is what a whole forward saves, each storage once, without parameters and the example."""
    model = residual_mlp(torch).eval()
    x = torch.randn(8, 16)
    assert tp.capture(model, x, repeats=1).activation_bytes.sum() == saved_bytes(torch, model, x)


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
            return x if x.detach().numpy().sum() > 0 else -x

    with pytest.raises(ValueError, match=r"cannot trace Depends\. torch\.fx: Trace.* control flow\. torch\.export: .+ would be "):
        tp.capture(Depends(), torch.ones(2))
    with pytest.raises(TypeError, match="module is int"):
        tp.capture(3, torch.ones(2))
    with pytest.raises(ValueError, match="argument"):
        tp.capture(torch.fx.symbolic_trace(torch.nn.Linear(2, 2)), ())


def test_an_example_that_is_not_the_models_is_refused_by_name(torch):
    """Surplus inputs were ignored silently, and an example that did not run raised torch's error without the node."""
    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.nn.Linear(6, 6)

        def forward(self, a, b):
            return self.one(a) + b

    model, x = Sum(), torch.randn(3, 6)
    with pytest.raises(ValueError, match="1 more than the model's arguments: a, b would be right"):
        tp.capture(model, (x, x, x))
    with pytest.raises(ValueError, match="example has 'c', which is no argument of the model: a, b would be right"):
        tp.capture(model, {"a": x, "b": x, "c": x})
    with pytest.raises(ValueError, match=r"node one \(one\) does not run on this example: RuntimeError: mat1"):
        tp.capture(model, (x[:, :4], x))
    with pytest.raises(ValueError, match=r"node add \(add\) does not run"):
        tp.capture(model, (x, x[:, :4]))


def test_an_example_that_the_model_refuses_and_its_graph_does_not(torch):
    """The graph of another path through the model was captured silently."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.plain, self.other = torch.nn.Linear(9, 8), torch.nn.Linear(8, 8)

        def forward(self, x, mask=None):
            return self.plain(x) if mask is None else self.other(x)

    with pytest.raises(ValueError, match=r"follows another path than this example.* torch\.export: RuntimeError: "):
        tp.capture(Model(), torch.randn(4, 8), repeats=0)


def test_any_number_of_arguments(torch):
    """The first argument was taken for all arguments, and its first row for the first one."""
    x = torch.randn(3, 6)

    class Pair(torch.nn.Module):
        def forward(self, *parts):
            return parts[0] * parts[1]

    pair = tp.capture(Pair(), (x, x + 1), repeats=0)
    places = {name: k for k, name in enumerate(pair.names)}
    assert pair.working_bytes[places["mul"]] == 3 * x.numel() * 4

    class Named(torch.nn.Module):
        def forward(self, **parts):
            return parts["a"] * parts["b"]

    named = tp.capture(Named(), {"a": x, "b": x + 1}, repeats=0)
    assert named.working_bytes.max() == 3 * x.numel() * 4


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


def test_no_gradient_flows_into_what_is_frozen(torch):
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)), torch.randn(4, 8)
    model[0].requires_grad_(False)
    nodes = tp.capture(model, x, repeats=0)
    assert nodes.bwd_s[:2].tolist() == [0, 0] and nodes.bwd_s[2] > 0
    assert nodes.activation_bytes.tolist() == [0, 4 * 8 * 4, 0] and saved_bytes(torch, model, x) == 4 * 8 * 4


def test_an_example_that_wants_a_gradient_is_no_parameter(torch):
    model = residual_mlp(torch)
    plain, wanted = (tp.capture(model, torch.randn(8, 16, requires_grad=want), repeats=0) for want in (False, True))
    assert wanted.param_bytes.tolist() == plain.param_bytes.tolist()
    assert wanted.optimizer_bytes.tolist() == plain.optimizer_bytes.tolist()


def test_the_path_of_this_example_is_taken(torch):
    """For torch.fx an argument is never None and never a tensor: it followed the wrong path silently."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.plain, self.masked = torch.nn.Linear(8, 8), torch.nn.Linear(8, 64)
            self.calls = 0

        def forward(self, x, mask=None):
            self.calls += 1
            x = x if isinstance(x, torch.Tensor) else x[0]
            return self.plain(x).tanh() if mask is None else self.masked(x).masked_fill(mask, 0.0).tanh()

    model, x, mask = Model(), torch.randn(4, 8), torch.rand(4, 64) > 0.5
    for example in (x, (x, None), {"x": x}, {"x": x, "mask": None}):
        nodes = tp.capture(model, example, repeats=0)
        assert nodes.param_bytes.sum() == (8 + 1) * 8 * 4 and nodes.activation_bytes.sum() == 4 * 8 * 4, nodes.names
    nodes = tp.capture(model, (x, mask), repeats=0)
    assert nodes.param_bytes.sum() == (8 + 1) * 64 * 4
    assert nodes.activation_bytes.sum() == saved_bytes(torch, model, x, mask) == 4 * 64 * 4
    assert model.calls == 1  # our own, for the bytes


@pytest.mark.parametrize("what", ["a tensor", "autocast"])
@pytest.mark.parametrize("start", [0.0, 1e-6])
def test_what_goes_through_weights_that_are_zero_is_part_of_the_model(torch, what, start):
    """As a last layer is before a training, or a gate. The graph without it gave the same result, and was taken for the model's."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.side, self.gate = (torch.nn.Linear(8, 8) for _ in range(3))
            torch.nn.init.constant_(self.gate.weight, start)
            torch.nn.init.zeros_(self.gate.bias)

        def forward(self, x, y):
            if what == "a tensor":
                x = self.first(x)
                return x + self.gate(torch.tanh(self.side(y))) if isinstance(y, torch.Tensor) else x
            with torch.autocast("cpu", torch.bfloat16):
                x = torch.tanh(self.first(torch.tanh(self.side(x))))
            return self.gate(x.float()) + y

    model, example = Model(), (torch.randn(4, 8), torch.randn(4, 8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    nodes = tp.capture(model, example, repeats=0)
    assert nodes.activation_bytes.sum() == saved_bytes(torch, model, *example)
    assert nodes.param_bytes.sum() == 3 * (8 + 1) * 8 * 4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("branch", [False, True])  # a branch is torch.export's
def test_nothing_is_kept_without_a_gradient(torch, branch):
    """torch.fx forgets a torch.no_grad(): what went on within it was charged with tensors and a backward."""
    class Distilled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.teacher, self.pupil = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x):
            if branch and x.shape[0] > 100:
                return x
            with torch.no_grad():
                wanted = self.teacher(x.exp()).exp()
            return self.pupil(x).tanh() - wanted

    model, x = Distilled(), torch.randn(4, 8)
    with torch.no_grad():
        nodes = tp.capture(model, x, repeats=1)
    assert nodes.activation_bytes.sum() == saved_bytes(torch, model, x) == 4 * 8 * 4
    kept = {name.rpartition(".")[2]: size for name, size in zip(nodes.names, nodes.activation_bytes, strict=True) if size}
    assert kept == {"tanh": 4 * 8 * 4}


def test_what_is_within_autocast_is_nodes_of_its_own_type(torch):
    """An autocast region was one node, even a whole model: no planner could cut it."""
    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.norm = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.two(self.one(x).tanh())
                with torch.autocast("cpu", enabled=False):
                    return self.norm(x.float())

    model, x = Mixed(), torch.randn(4, 8)
    nodes = tp.capture(model, x, repeats=1)
    assert nodes.names == ("one.linear", "tanh", "two.linear", "to", "norm.layer_norm")
    assert nodes.cut_bytes.tolist() == [4 * 8 * 2, 4 * 8 * 2, 4 * 8 * 2, 4 * 8 * 4, 0] and (nodes.bwd_s > 0).all()
    assert nodes.param_bytes.tolist() == [(8 + 1) * 8 * 4, 0, (8 + 1) * 8 * 4, 0, 2 * 8 * 4]
    assert nodes.activation_bytes.sum() == saved_bytes(torch, model, x)


def test_a_tensor_that_is_given_twice_is_one(torch):
    """Where it is copied too: the path of another example would be compared."""
    class Asks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.packed, self.apart = torch.nn.Linear(8, 64), torch.nn.Linear(8, 8)

        def forward(self, query, key):
            return self.packed(query).tanh() if query is key else self.apart(query + key).tanh()

    model, x = Asks(), torch.randn(4, 8)
    assert tp.capture(model, (x, x), repeats=0).param_bytes.sum() == (8 + 1) * 64 * 4
    assert tp.capture(model, (x, x.clone()), repeats=0).param_bytes.sum() == (8 + 1) * 8 * 4


def test_the_example_is_left_as_it_was(torch):
    x = torch.randn(4, 8)
    before = x.clone()
    tp.capture(torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(8, 8)), x, repeats=1)
    assert torch.equal(x, before)


# ---- where torch.fx cannot, torch.export does ------------------------------------------------------------------------------

LAYERS = {
    "encoder layer": (lambda nn: nn.TransformerEncoderLayer(32, 4, 64), {"self_attn", "linear1", "norm2", "dropout"}),
    "encoder": (lambda nn: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64), 2, enable_nested_tensor=False),
                {"layers.0.self_attn", "layers.1.linear2"}),
    "attention": (lambda nn: nn.MultiheadAttention(32, 4), {""}),
    "lstm": (lambda nn: nn.LSTM(32, 16, 2, bias=False), {""}),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_only_torch_export_traces(torch, name, training):
    make, places = LAYERS[name]
    torch.manual_seed(0)
    model, x = make(torch.nn).train(training), torch.randn(5, 2, 32)
    example = (x, x, x) if name == "attention" else (x,)
    with pytest.raises(Exception, match="."):
        torch.fx.symbolic_trace(copy.deepcopy(model))
    state = torch.random.get_rng_state()
    with torch.no_grad():
        nodes = tp.capture(model, example, repeats=1)
    assert torch.equal(torch.random.get_rng_state(), state) and all(p.grad is None for p in model.parameters())
    assert all(a is b for a, b in zip(getattr(model, "_flat_weights", ()), model.parameters(), strict=False))  # an LSTM's
    assert nodes.param_bytes.sum() == sum(p.numel() * 4 for p in model.parameters())
    assert nodes.activation_bytes.sum() == saved_bytes(torch, model, *example)
    assert len(set(nodes.names)) == len(nodes) and {n.rpartition(".")[0] for n in nodes.names} >= places
    assert nodes.bwd_s.sum() > 0 and (nodes.bwd_s[nodes.param_bytes > 0] > 0).all()
    plan = tp.planners.dawnpiper(nodes, 2, float(4 * nodes.param_bytes.sum() + nodes.activation_bytes.sum() * 4 + 1e6), 4)
    assert plan.optimal and len(plan.boundaries) == 3


def test_torch_export_says_what_torch_fx_says(torch):
    model, x = residual_mlp(torch), torch.randn(8, 16)
    exported = torch.export.export(model, (x,)).module()
    one, two = tp.capture(model, x, repeats=0), tp.capture(exported, x, repeats=0)
    assert two.names == ("norm.layer_norm", "up.linear", "gelu", "down.linear", "drop.dropout", "mul", "add", "reshape")
    for key in ("param_bytes", "optimizer_bytes", "activation_bytes", "cut_bytes", "cut_tensors", "working_bytes"):
        assert one[key].tolist() == two[key].tolist(), key


def test_an_exported_model_is_left_as_it_was(torch):
    """Tied weights count once, buffers come back, what goes on in place goes on once, and arguments may hold others."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.norm, self.two = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8, bias=False)
            self.table = torch.nn.Embedding(6, 8)
            self.two.weight = self.one.weight

        def forward(self, pair, scale=1.0):
            x, places = pair["x"], torch.zeros(pair["x"].shape[0], dtype=torch.long)
            for _ in range(x.shape[0]):
                places.add_(1)
            return {"y": self.two(self.norm(self.one(x))) * scale + self.table(places), "nothing": None, "kept": object()}

    model, x = Model(), torch.randn(4, 8)
    mean, count = model.norm.running_mean.clone(), model.norm.num_batches_tracked.clone()
    nodes = tp.capture(model, {"pair": {"x": x}, "scale": 2.0}, repeats=3)
    assert nodes.param_bytes.sum() == sum(p.numel() * 4 for p in model.parameters()) == (8 * 8 + 8 + 2 * 8 + 6 * 8) * 4
    assert nodes.optimizer_bytes.sum() == 2 * nodes.param_bytes.sum() + 2 * 8 * 4 + 8
    assert torch.equal(model.norm.running_mean, mean) and torch.equal(model.norm.num_batches_tracked, count)
    assert {"one.linear", "norm.batch_norm", "two.linear", "table.embedding", "add", "add__3"} <= set(nodes.names)


@pytest.mark.parametrize("follows", [True, False])
def test_what_a_forward_changes_in_place_comes_back(torch, follows):
    """While torch.fx traces it, too, where an argument is a proxy and a buffer is itself: it had one more then. And where nothing
    follows it: to torch.export it is no model that writes to constants."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(1))
            self.plain, self.listed, self.calls = torch.zeros(1), {"deep": [(torch.zeros(1),)]}, 0

        def forward(self, x):
            self.count += 1
            self.plain.add_(1)
            self.listed["deep"][0][0].data.add_(1)
            self.calls += 1
            with torch.no_grad():
                self.line.weight.mul_(0.5)
            return self.line(x) if follows or x is not None and isinstance(x, torch.Tensor) else x

    model, x = Model(), torch.randn(3, 4)
    weight, loss = model.line.weight.detach().clone(), (model.line.bias * 2).pow(2).sum()
    if follows:
        assert tp.capture(model, x, repeats=1).param_bytes.sum() == (4 * 4 + 4) * 4
    else:
        with pytest.raises(ValueError, match="cannot trace Model"):
            tp.capture(model, x, repeats=1)
    assert not model.count.any() and not model.plain.any() and not model.listed["deep"][0][0].any() and model.calls == 0
    assert torch.equal(model.line.weight, weight)
    loss.backward()                                            # whose graph is of before
    assert model.line.bias.grad is not None


def test_weights_that_a_forward_makes_anew_and_buffers_that_it_resizes(torch):
    """The graph of the one has no such step: it is compared with what the model has made by then. Nothing may be copied into the
    other as it is by then."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(4, 4)
            self.register_buffer("cache", torch.zeros(0))
            self.register_buffer("none", torch.full((2, 1), torch.nan).expand(2, 3))

        def forward(self, x):
            self.line.weight.data = torch.renorm(self.line.weight.data, p=2, dim=0, maxnorm=0.25)
            if self.cache.numel() == 0:
                self.cache.resize_(4).fill_(1)
            return self.line(x)

    model = Model()
    weight, version = model.line.weight.detach().clone(), model.none._version
    assert "line" in tp.capture(model, torch.randn(3, 4), repeats=1).names
    assert torch.equal(model.line.weight, weight) and model.cache.shape == (0,) and model.none._version == version


def test_a_lazy_module_is_refused_before_it_runs(torch):
    """Its first forward makes it another module, so that it could not be given back as it was."""
    model, x = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d()), torch.randn(3, 4)
    for module in (model, model[0]):
        with pytest.raises(tp.InvalidValueError, match="weight, which has no shape before the lazy module's first forward"):
            tp.capture(module, x, repeats=1)
    assert isinstance(model[0], torch.nn.LazyLinear) and model(x).shape == (3, 4)
    assert tp.capture(model, x, repeats=1).names == ("_0", "_1")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:Converting a tensor")
@pytest.mark.parametrize("made", ["script", "trace"])
def test_a_layer_of_torch_jits_is_one_node_with_its_parameters(torch, made):
    """A call of its method held none: they were said to be of no node, as if the example did not need them."""
    def layer():
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.GELU())

    def scripted(part):
        return torch.jit.script(part) if made == "script" else torch.jit.trace(part, torch.randn(3, 4), check_trace=False)

    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), scripted(layer()), torch.nn.Linear(4, 4)), torch.randn(3, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    nodes = tp.capture(model, x, repeats=1)
    assert nodes.names == ("_0", "_1", "_2") and nodes.bwd_s[1] > 0
    assert nodes.param_bytes.tolist() == [(16 + 4) * 4, (16 + 4 + 4 + 4) * 4, (16 + 4) * 4]
    assert nodes.optimizer_bytes[1] == 2 * nodes.param_bytes[1] + (4 + 4) * 4 + 8       # its means, variances and count
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert nodes.activation_bytes.sum() == saved_bytes(torch, model, x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "error::UserWarning")
def test_a_method_of_a_scripted_layer_holds_the_layers_parameters(torch):
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.line(x)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = torch.jit.script(Scale()), torch.jit.script(Scale())

        def forward(self, x):
            return self.one.forward(self.other.line.forward(x).tanh())

    nodes = tp.capture(Model(), torch.randn(3, 4), repeats=1)
    assert nodes.names == ("forward", "tanh", "forward_1") and nodes.param_bytes.tolist() == [80, 0, 80]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_model_is_refused_in_words_of_its_own(torch):
    class Model(torch.nn.Module):
        def __init__(self, part):
            super().__init__()
            self.part = part

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):     # which is torch.export's
                return self.part(x)

    scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    for model, what in ((scripted, "It is"), (Model(scripted), "Its part is")):
        with pytest.raises(tp.InvalidValueError, match=rf"\. {what} of torch\.jit: the module that this was made of"):
            tp.capture(model, torch.randn(3, 4), repeats=1)


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_models_of_transformers(torch, kind):
    transformers = pytest.importorskip("transformers")
    layers, rows, width, length = 3, 2, 32, 16
    if kind == "GPT2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            n_layer=layers, n_head=2, n_embd=width, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0))
        block, places = "transformer.h.{}", ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2")
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=2, hidden_size=width, intermediate_size=64,
            vocab_size=64, max_position_embeddings=32))
        block, places = "model.layers.{}", ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "input_layernorm")
    tokens = torch.randint(0, 64, (rows, length))
    nodes = tp.capture(model, {"input_ids": tokens, "labels": tokens}, repeats=0)
    assert nodes.param_bytes.sum() == sum(p.numel() * 4 for p in model.parameters())  # GPT-2's head is its embedding
    found = [name.rpartition(".")[0] for name in nodes.names]
    assert {f"{block.format(k)}.{place}" for k in range(layers) for place in places} <= set(found) and "lm_head" in found
    saved = saved_bytes(torch, model, input_ids=tokens, labels=tokens)
    masks = layers * rows * length * length * 4  # which transformers makes because it is traced
    assert saved <= nodes.activation_bytes.sum() <= saved + masks
    stream = rows * length * width * 4
    for k in range(1, layers):
        last = max(i for i, name in enumerate(found) if name.startswith(block.format(k - 1)))
        assert stream <= nodes.cut_bytes[last] <= stream + 4 * length * length + 3 * 4 * length * width
    plan = tp.planners.dawnpiper(nodes, 3, float(4 * nodes.param_bytes.sum() + 4 * nodes.activation_bytes.sum()), 4)
    assert plan.optimal and len(plan.boundaries) == 4
