"""tp.capture of what has ways of its own: torch.autograd.Functions, checkpoints, transforms, errors, and what a module holds
besides parameters. Skipped where torch is not installed."""

import collections
import dataclasses
import warnings

import numpy as np
import pytest
from test_capture import saved_bytes, torch

import terapipe_c as tp

__all__ = ["torch"]


def functions(torch):
    """A model with a clamped product by a torch.autograd.Function, and the same without one."""
    class Clamped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, least):
            y = (x @ weight.T).clamp(min=least)
            ctx.save_for_backward(x, weight)
            return y, y.sum(), "words"

        @staticmethod
        def backward(ctx, dy, dsum, words):
            x, weight = ctx.saved_tensors
            return dy @ weight, dy.T @ x, None

    class Model(torch.nn.Module):
        def __init__(self, by_function):
            super().__init__()
            self.line, self.by_function = torch.nn.Linear(8, 8), by_function
            self.weight = torch.nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            x = torch.exp(self.line(x))
            if self.by_function:
                y, total, words = Clamped.apply(x, self.weight, 0.0)
                assert not isinstance(words, torch.Tensor)
            else:
                y = (x @ self.weight.T).clamp(min=0.0)
                total = y.sum()
            return torch.tanh(torch.sin(y)), total

    torch.manual_seed(3)
    return Model(True), Model(False)


def test_a_function_of_ones_own_is_one_node_with_its_own_backward(torch):
    model, plain = functions(torch)
    x = torch.randn(16, 8)
    nodes, apart = tp.capture(model, x, repeats=1), tp.capture(plain, x, repeats=1)
    at = {name: k for k, name in enumerate(nodes.names)}
    assert {"line", "exp", "clamped", "sin", "tanh"} <= set(at) and "matmul" not in at and "matmul" in apart.names
    assert all(nodes.bwd_s[at[name]] > 0 for name in ("line", "exp", "clamped", "sin", "tanh"))
    assert nodes.activation_bytes.sum() == saved_bytes(torch, model, x) == 3 * 16 * 8 * 4  # exp's, the Function's, tanh's
    assert nodes.param_bytes[at["clamped"]] == 8 * 8 * 4 and nodes.param_bytes.sum() == apart.param_bytes.sum()
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)  # torch is as it was


def test_torch_export_does_not_take_a_function_apart_either(torch):
    """torch.export counted what a Function's forward computes without gradients: transformers' BLOOM seemed to save 2.2 times as
    much as it does."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = functions(torch)[0]

        def forward(self, x, mask=None):
            if mask is None:
                x = x * 1
            y, total = self.inner(x)
            return y + total

    model, x = Model(), torch.randn(16, 8)
    nodes = tp.capture(model, (x, torch.ones(1)), repeats=1)
    assert any("clamped" in name for name in nodes.names) and not any("clamp_" in name or "matmul" in name for name in nodes.names)
    assert nodes.activation_bytes.sum() == saved_bytes(torch, model, x, torch.ones(1))
    assert nodes.param_bytes.sum() == sum(p.numel() * 4 for p in model.parameters())
    product = next(k for k, name in enumerate(nodes.names) if "clamped" in name)
    assert nodes.bwd_s[product] > 0 and nodes.param_bytes[product] == 8 * 8 * 4


@pytest.mark.parametrize("within", ["autocast", "no_grad", "an old name", "a part of the rows"])
@pytest.mark.parametrize("exported", [False, True])
def test_wherever_and_by_whatever_name_a_function_is_applied(torch, within, exported):
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            y = x.exp().sin()
            return y[:, :8] if within == "a part of the rows" else y

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            return torch.nn.functional.pad(dy, (0, x.shape[1] - dy.shape[1])) * x

    apply = Exp.apply  # as torch's own documentation does

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

        def forward(self, x, mask=None):
            x = self.a(x)
            if exported and mask is None:  # a path that torch.fx does not take
                x = x * 1
            if within == "autocast":
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return apply(x) + self.b(x)
            if within == "no_grad":
                with torch.no_grad():
                    still = Exp.apply(x)
                return self.b(x) + still
            y = apply(x)
            return y * 2 if y.shape[1] == 16 else (y if y.is_contiguous() else y.contiguous()).view(-1)

    model, x = Model(), torch.randn(4, 16)
    nodes = tp.capture(model, x, repeats=1)
    assert not any("sin" in name for name in nodes.names) and nodes.param_bytes.sum() >= 4 * 16 * 17, nodes.names
    assert nodes.activation_bytes.sum() == saved_bytes(torch, model, x)
    if within not in ("no_grad", "autocast"):
        assert nodes.bwd_s[[k for k, name in enumerate(nodes.names) if "exp" in name.lower()][0]] > 0
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("asks", [False, True])
def test_a_function_with_a_context_of_its_own_by_an_old_name(torch, exported, asks):
    """PyTorch 2.14 calls such a forward without a context, and asks for setup_context behind it; asks: the model wants a gradient
    of it, and a number, within its forward."""
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(x, by=2.0):
            return x.exp().sin() * by

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0])
            ctx.by = inputs[1]

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            return dy * x * ctx.by, None

    apply = Scaled.apply

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(16, 16)

        def forward(self, x, mask=None):
            x = self.a(x)
            if exported and mask is None:
                x = x * 1
            if asks:
                with torch.enable_grad():
                    given = torch.ones(2, requires_grad=True)
                    (slope,) = torch.autograd.grad(apply(given).sum(), given)
                x = x * 3 if slope[0].item() == 2.0 else x
            return apply(x, 3.0)

    model, x = Model(), torch.randn(4, 16)
    nodes = tp.capture(model, x, repeats=1)
    assert not any("sin" in name for name in nodes.names), nodes.names
    assert sum("scaled" in name.lower() for name in nodes.names) == 1       # of the slope the graph has the number alone
    assert nodes.activation_bytes.sum() == saved_bytes(torch, model, x) - 8 * asks == 4 * 16 * 4      # the slope's is gone by then
    assert Scaled.forward(torch.zeros(1)) == torch.sin(torch.ones(1)) * 2


def test_transforms_of_torch_func_are_seen_through_and_left(torch):
    """torch.export's graph had their beginnings as nodes, which were run without their ends: torch stayed within them."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(4, 4)

        def forward(self, x):
            return torch.vmap(lambda row: row * 2)(self.line(x))

    model, x = Model(), torch.randn(3, 4)
    nodes = tp.capture(model, x, repeats=1)
    assert nodes.names[-1] == "mul" and nodes.param_bytes.sum() == 20 * 4
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0 and torch.nn.Linear(2, 2)(torch.rand(2)).shape == (2,)


def test_the_history_of_what_a_module_holds_is_neither_walked_nor_freed(torch):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 8))
            self.square = self.weight * self.weight

        def forward(self, x):
            return torch.tanh(x @ self.square)

    model, x = Model(), torch.randn(4, 8)
    nodes = tp.capture(model, x, repeats=1)
    assert nodes.names == ("matmul", "tanh") and (nodes.bwd_s > 0).all()
    model(x).sum().backward()
    assert model.weight.grad is not None


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_is_as_if_there_were_none(torch, reentrant):
    class Model(torch.nn.Module):
        def __init__(self, again):
            super().__init__()
            self.again, self.up, self.down = again, torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

        def inner(self, x):
            return self.down(torch.tanh(self.up(x)))

        def forward(self, x):
            x = torch.sin(x)
            if not self.again:
                return self.inner(x)
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=reentrant)

    import torch.utils.checkpoint
    x = torch.randn(4, 8, requires_grad=True)
    with_it, without = (tp.capture(Model(again), x, repeats=1) for again in (True, False))
    assert with_it.names == without.names and (with_it.bwd_s > 0).all()
    assert (with_it.activation_bytes == without.activation_bytes).all() and (with_it.param_bytes == without.param_bytes).all()


def test_no_backward_asks_for_gradients_of_the_whole_model(torch, monkeypatch):
    """torch searches for every gradient that is asked for: with 48 layers the nodes' backwards took 20 times as long as the
    model's."""
    asked = []
    grad = torch.autograd.grad

    def counting(roots, wanted, *rest, **options):
        asked.append(len(wanted))
        return grad(roots, wanted, *rest, **options)

    monkeypatch.setattr(torch.autograd, "grad", counting)
    nodes = tp.capture(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(20))), torch.randn(2, 4), repeats=1)
    assert len(nodes) == 20 and max(asked) == 3 and (nodes.bwd_s > 0).all()  # of its input, weight and bias


def test_named_results_sparse_buffers_and_lists_in_circles(torch):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(6, 6)
            self.register_buffer("adjacent", torch.eye(5).to_sparse())
            self.circle = [torch.zeros(2)]
            self.circle.append(self.circle)

        def forward(self, x):
            x = torch.sparse.mm(self.adjacent, self.line(x))
            best = x.topk(3)
            return best.values + torch.sort(x).values[:, :3] + x.max(-1, keepdim=True)[0] + torch.linalg.qr(x).Q[:, :3]

    nodes = tp.capture(Model(), torch.randn(5, 6, requires_grad=True), repeats=1)
    assert {"_sparse_mm", "topk", "sort"} <= set(nodes.names) and nodes.param_bytes.sum() == 6 * 7 * 4
    assert nodes.optimizer_bytes.sum() == 2 * 6 * 7 * 4 + 5 * (2 * 8 + 4)  # the sparse ones: two indices and a value each


def test_whatever_a_node_raises_is_told_with_its_name(torch):
    class Model(torch.nn.Module):
        def __init__(self, fails):
            super().__init__()
            self.fails, self.mix = fails, torch.nn.MultiheadAttention(8, 2)

        def forward(self, x):
            return self.fails(self, x)

    x = torch.randn(3, 2, 4)
    for fails, words in ((lambda m, x: m.mix(x, x, x), r"node mix .*AssertionError"), (lambda m, x: x.nope, "AttributeError"),
                         (lambda m, x: x / (x.shape[0] // 4 // x.dim() // (x.shape[1] - 2)), "ZeroDivisionError")):
        with pytest.raises(tp.InvalidValueError, match=rf"node .* does not run on this example: .*{words}|{words}"):
            tp.capture(Model(fails), x, repeats=1)


def test_random_states_gradients_and_pending_backwards_are_left_as_they_were(torch):
    import random

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.line, self.chance = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4), torch.Generator()
            self.own = {"numpy": np.random.default_rng(1), "python": random.Random(2)}
            self.seen, self.last = {0}, collections.deque([0], maxlen=2)

        def forward(self, x):
            self.seen.add(len(self.seen))
            self.last.append(x)
            self.line.weight.requires_grad_(False)
            self.line.weight.grad = None
            noise = torch.rand(4, generator=self.chance) + np.random.rand() + random.random()
            noise = noise + self.own["numpy"].random() + self.own["python"].random()
            return self.line(self.norm(x)) + noise

    model, x = Model(), torch.randn(6, 4)
    model.line.weight.grad = torch.ones(4, 4)
    gradient = model.line.weight.grad
    pending = model.norm(x).sum()
    np.random.seed(5)
    random.seed(5)

    def states():
        return (random.getstate(), repr(np.random.get_state()), model.chance.get_state().tolist(), model.own["python"].getstate(),
                model.own["numpy"].bit_generator.state, torch.random.get_rng_state().tolist())

    before = states()
    tp.capture(model, x, repeats=1)
    assert states() == before and model.seen == {0} and list(model.last) == [0]
    assert model.line.weight.requires_grad and model.line.weight.grad is gradient
    pending.backward()
    assert model.norm.weight.grad is not None


WRITES = {
    "a whole": lambda torch, m, x: torch.zeros_like(x).add_(m.one(x)),
    "a slice": lambda torch, m, x: torch.cat([rows(torch, m, x, 0), rows(torch, m, x, 1)]),
    "a view": lambda torch, m, x: [y := torch.zeros_like(x), y.view(-1).add_(m.one(x).reshape(-1))][0],
    "nothing is given back": lambda torch, m, x: [y := torch.zeros_like(x), torch._foreach_add_([y], [m.one(x)])][0],
    "the example": lambda torch, m, x: [x, x.add_(m.one(x))][0],
    "after it was read": lambda torch, m, x: [y := m.one(x).clone(), z := y + m.two(x.sin().cos()), y.zero_(), y + z][3],
}


def rows(torch, model, x, first):
    y = torch.zeros_like(x[:2])
    y[:, :4] = model.one(x[2 * first:2 * first + 2])[:, :4]
    y[:, 4:] = model.two(x[2 * first:2 * first + 2])[:, 4:]
    return y


@pytest.mark.parametrize("what", WRITES)
def test_what_is_written_in_place_is_read_by_all_that_lies_there(torch, what):
    """Later readers of the tensor, or of a view of it, took it for what it was before: without a gradient nothing behind them kept
    a byte or had a backward, and they stood before the operation that wrote."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x):
            return torch.tanh(torch.exp(WRITES[what](torch, self, x)))

    model, x = Model(), torch.randn(4, 8)
    before = x.clone()
    nodes = tp.capture(model, x, repeats=2)
    assert torch.equal(x, before)
    assert nodes.activation_bytes.sum() == saved_bytes(torch, model, before) >= 2 * 4 * 8 * 4, nodes.names
    assert nodes.names[-2:] == ("exp", "tanh") and (nodes.bwd_s[-2:] > 0).all(), nodes.names
    if what == "after it was read":
        assert nodes.names.index("add") < nodes.names.index("zero_")


def test_what_a_forward_makes_of_nothing_is_no_part_of_the_model(torch):
    """torch.fx makes a buffer of such a tensor: it counted as a stage's memory instead of an activation, and could be written to
    only once."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x):
            y = torch.zeros(3, 4, 8)
            for k in range(3):
                y[k] = self.one(x)
            return (self.two(y) * torch.ones(8)).exp()

    model, x = Model(), torch.randn(4, 8)
    nodes = tp.capture(model, x, repeats=2)
    assert "one" in nodes.names and nodes.activation_bytes.sum() == saved_bytes(torch, model, x)
    assert (nodes.optimizer_bytes == 2 * nodes.param_bytes).all() and (nodes.bwd_s[-3:] > 0).all()


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated", "ignore:Converting a tensor to a Python boolean")
def test_a_model_of_torch_jit_has_parameters_and_is_left_as_it_was(torch):
    """The parameters of a torch.jit model are no Python attributes."""
    x = torch.randn(4, 8)
    model = torch.jit.trace(torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)), x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    nodes = tp.capture(model, x, repeats=1)
    assert nodes.param_bytes.sum() == (2 * 8 + 8 * 8 + 8) * 4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_within_a_model_too_a_tensor_that_is_given_twice_is_one(torch):
    """Attention asks whether its query is its key: it took another path than the model's, and kept more."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mix = torch.nn.LayerNorm(16), torch.nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x):
            x = self.norm(x)
            return self.mix(x, x, x, need_weights=False)[0]

    model, x = Model(), torch.randn(2, 5, 16)
    nodes = tp.capture(model, x, repeats=0)
    assert nodes.names[:2] == ("norm", "mix") and nodes.activation_bytes.sum() == saved_bytes(torch, model, x)


def test_parameters_in_one_storage_are_counted_each(torch):
    """An LSTM's parameters on a GPU share one storage: the first was taken for all of them."""
    whole = torch.randn(3 * 8 * 8 + 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    model[0].weight, model[0].bias = torch.nn.Parameter(whole[:64].view(8, 8)), torch.nn.Parameter(whole[64:72])
    model[1].weight = torch.nn.Parameter(whole[72:136].view(8, 8))
    model[2].weight = model[1].weight
    nodes = tp.capture(model, torch.randn(4, 8), repeats=0)
    assert nodes.param_bytes.tolist() == [72 * 4, 64 * 4, 0]


def test_in_inference_mode(torch):
    """Tensors made in inference mode can have no gradient: the second node did not run."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    with torch.inference_mode():
        nodes = tp.capture(model, torch.randn(3, 4), repeats=1)
    assert nodes.param_bytes.tolist() == [20 * 4, 0] and (nodes.bwd_s > 0).all()


def test_a_layer_that_is_a_model_by_itself_is_taken_apart(torch):
    """A TransformerEncoder within a model was one node: no planner could cut it."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.table, self.head = torch.nn.Embedding(9, 16), torch.nn.Linear(16, 9)
            self.body = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

        def forward(self, tokens, mask=None):
            return self.head(self.body(self.table(tokens), mask))

    model, tokens = Model(), torch.randint(0, 9, (2, 5))
    nodes = tp.capture(model, tokens, repeats=1)
    assert {f"body.layers.{k}.linear2.linear" for k in range(3)} <= set(nodes.names)
    assert nodes.activation_bytes.sum() == saved_bytes(torch, model, tokens)
    assert nodes.param_bytes.max() < nodes.param_bytes.sum() / 4


def test_a_layer_that_cannot_be_taken_apart_stays_one_node(torch):
    class Deep(torch.nn.Module):
        __module__ = "torch.nn.modules.deep"    # torch.fx takes it for one of torch's own

        def __init__(self):
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Linear(16, 16))

        def forward(self, x):
            return self.body(x) if x.detach().numpy().sum() < 1e9 else x

    nodes = tp.capture(torch.nn.Sequential(torch.nn.Linear(16, 16), Deep()), torch.randn(4, 16), repeats=0)
    assert nodes.names == ("_0", "_1") and nodes.param_bytes.tolist() == [272 * 4] * 2


def test_the_path_is_asked_where_results_are_in_a_dataclass(torch):
    @dataclasses.dataclass
    class Result:
        y: object
        words: str

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.plain, self.masked = torch.nn.Linear(8, 8), torch.nn.Linear(8, 64)

        def forward(self, x, mask=None):
            return Result((self.plain if mask is None else self.masked)(x).tanh(), "words")

    model, x = Model(), torch.randn(4, 8)
    nodes = tp.capture(model, x, repeats=0)
    assert nodes.param_bytes.sum() == 9 * 8 * 4 and nodes.activation_bytes.sum() == 4 * 8 * 4


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_hooks_of_the_model_itself_and_what_they_leave(torch):
    """torch.fx leaves out hooks of the model that it traces: weight_norm makes the weight in one. What a hook put aside stayed."""
    x = torch.randn(4, 8)
    normed = torch.nn.utils.weight_norm(torch.nn.Linear(8, 8))
    weight = normed.weight
    nodes = tp.capture(normed, x, repeats=0)
    assert nodes.param_bytes.sum() == (8 * 8 + 8 + 8) * 4 and nodes.activation_bytes.sum() == saved_bytes(torch, normed, x)
    held = torch.nn.Sequential(torch.nn.utils.weight_norm(torch.nn.Linear(8, 8)))
    held.seen, held.last, weight = {}, None, held[0].weight

    def put_aside(part, given, result):
        held.seen[part], held.last = result, result

    held[0].register_forward_hook(put_aside)
    tp.capture(held, x, repeats=1)
    assert held.seen == {} and held.last is None and held[0].weight is weight


def test_a_model_on_device_meta_is_refused(torch):
    """On device meta all parameters seemed to be one, of no bytes."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()).to("meta")
    with pytest.raises(tp.InvalidValueError, match=r"module has 0\.weight on device meta, where nothing is computed or timed: "):
        tp.capture(model, torch.randn(3, 4, device="meta"))


@pytest.mark.parametrize("kind", ["dataclass", "mapping"])
def test_an_example_in_what_torch_does_not_know_is_an_example(torch, kind):
    """What is written to it in place was done to the caller's, and it counted as kept."""
    @dataclasses.dataclass(frozen=True)
    class Batch:
        x: object
        words: tuple[str, ...] = ("words",)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(8, 8)

        def forward(self, batch):
            x = batch["x"] if kind == "mapping" else batch.x
            x.mul_(2)
            return self.line(x).exp()

    x = torch.randn(4, 8)
    before = x.clone()
    nodes = tp.capture(Model(), (collections.UserDict(x=x) if kind == "mapping" else Batch(x),), repeats=1)
    assert torch.equal(x, before) and nodes.activation_bytes.sum() == 4 * 8 * 4


# ---- numbers that a model asks for ---------------------------------------------------------------------------------------


def test_a_mask_whose_numbers_torch_asks_for_does_not_make_a_model_one_node(torch, capfd):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.line, self.body = torch.nn.Linear(16, 16), torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

        def forward(self, x, mask):
            return self.body(self.line(x), mask=mask)

    model, x = Model(), torch.randn(2, 5, 16)
    for mask in (torch.nn.Transformer.generate_square_subsequent_mask(5), torch.randn(5, 5)):
        nodes = tp.capture(model, (x, mask), repeats=0)
        assert sum("self_attn.linear" in name for name in nodes.names) == 6
        assert nodes.activation_bytes.sum() == saved_bytes(torch, model, x, mask)
        assert nodes.param_bytes.sum() == sum(4 * p.numel() for p in model.parameters())
    assert capfd.readouterr() == ("", "")


def test_a_way_that_numbers_say_is_the_examples(torch):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lines = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            if x.sum() > 0 and not torch.equal(x, -x):
                x = self.lines[0](x)
            for _ in range(int(x.abs().max().clamp(2, 3).item())):
                x = torch.tanh(self.lines[1](x))
            return self.lines[2](x) if torch.isnan(x).any() else x

    model = Model()
    for x in (torch.full((4, 8), 0.01), torch.full((4, 8), -0.01)):
        nodes = tp.capture(model, x, repeats=0)
        assert [name for name in nodes.names if "linear" in name or "tanh" in name] == [
            *["lines.0.linear"] * (x[0, 0] > 0), "lines.1.linear", "tanh", "lines.1.linear_1", "tanh_1"]
        assert nodes.activation_bytes.sum() == saved_bytes(torch, model, x)


def test_tokens_go_to_the_experts_that_the_example_says(torch):
    """Shapes that depend on data: which tokens an expert has, chosen by torch.where and by a mask; some have none."""
    class Experts(torch.nn.Module):
        def __init__(self, by_mask):
            super().__init__()
            self.gate, self.by_mask = torch.nn.Linear(8, 16), by_mask
            self.experts = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(16))

        def forward(self, x):
            weight, best = self.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for k, expert in enumerate(self.experts):
                if self.by_mask:
                    out[best == k] = expert(x[best == k]) * weight[best == k][:, None]
                elif len(rows := torch.where(best == k)[0]) > 0:
                    out.index_add_(0, rows, expert(x[rows]) * weight[rows, None])
            return out

    for by_mask in (False, True):
        model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), Experts(by_mask), torch.nn.Linear(8, 8)), torch.randn(12, 8)
        used = model[1].gate(model[0](x)).argmax(-1).unique()
        with warnings.catch_warnings(record=True) as told:
            nodes = tp.capture(model, x, repeats=0)
        idle = 0 if by_mask else 16 - len(used)
        assert [str(one.message).split(",")[0] for one in told] == [f"{2 * idle} parameters"] * (idle > 0)
        assert nodes.activation_bytes.sum() == saved_bytes(torch, model, x)
        assert sum("tanh" in name for name in nodes.names) == (16 if by_mask else len(used)) and 0 < len(used) < 16
        assert sum(("getitem" if by_mask else "where") in name for name in nodes.names) >= 16
        assert nodes.param_bytes.sum() == sum(p.numel() * 4 for p in model.parameters()) - idle * (64 + 8) * 4
