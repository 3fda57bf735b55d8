"""What tp.capture says of forwards that write to views and buffers, and how it leaves examples and models of any make. Skipped
where torch is not installed."""

import collections.abc
import dataclasses
import threading

import pytest
from test_capture import saved_bytes, torch

import terapipe_c as tp

__all__ = ["torch"]


def test_what_was_detached_has_no_gradient_for_what_is_written_where_it_lies(torch):
    """A detached copy of what a later operation writes to in place had one, and kept what is made of it."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.nn.Linear(8, 8)

        def forward(self, x):
            y = self.one(x)
            apart, view = y.detach().view(-1), y.view(-1)
            y.mul_(2)
            return y.exp(), view.sin(), apart.exp().sin()

    model, x = Model(), torch.randn(4, 8)
    nodes = tp.capture(model, x, repeats=1)
    assert nodes.activation_bytes.sum() == saved_bytes(torch, model, x) == 2 * 4 * 8 * 4
    assert (nodes.bwd_s[[nodes.names.index(name) for name in ("exp", "sin")]] > 0).all()
    assert not nodes.bwd_s[[nodes.names.index(name) for name in ("exp_1", "sin_1")]].any()


@pytest.mark.parametrize("history", [True, False])
def test_what_is_written_to_a_buffer_is_read_from_who_wrote(torch, history):
    """Readers of the buffer were ordered before the write. And a buffer to which a tensor with a history was written kept that
    history: no later run worked, and the model could not be restored (a bare RuntimeError)."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.register_buffer("last", torch.zeros(4, 8))

        def forward(self, x):
            y = self.one(x).exp()
            self.last.copy_(y if history else y.detach())
            return self.two(self.last).exp()

    model, x = Model(), torch.randn(4, 8)
    nodes = tp.capture(model, x, repeats=2)
    names = [name.removesuffix(".linear") for name in nodes.names]
    assert names.index("one") < names.index("copy_") < names.index("two")
    assert not model.last.any() and model.last.grad_fn is None and not model.last.requires_grad
    assert nodes.optimizer_bytes.sum() == 2 * nodes.param_bytes.sum() + 4 * 8 * 4
    assert nodes.activation_bytes.sum() == 2 * 4 * 8 * 4 and nodes.bwd_s[names.index("copy_")] > 0 or not history


def test_a_layer_that_leaves_a_history_in_its_buffer_is_given_back_without(torch):
    class Cell(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(8, 8)
            self.register_buffer("last", torch.zeros(4, 8))

        def forward(self, x):
            self.last.copy_(self.line(x))
            return self.last * 1

    model = torch.nn.Sequential(Cell(), torch.nn.Linear(8, 8))
    tracer = type("Tracer", (torch.fx.Tracer,), {"is_leaf_module": lambda *_: True})()
    graph = torch.fx.GraphModule(model, tracer.trace(model))
    assert tp.capture(graph, torch.randn(4, 8), repeats=0).names == ("_0", "_1")
    last = model[0].last
    assert last.grad_fn is None and not last.requires_grad and not last.any()


class Bag(collections.abc.MutableMapping):
    """A mapping that copy.copy gives its own parts."""

    def __init__(self, **parts):
        self.parts = parts

    def __getitem__(self, key):
        return self.parts[key]

    def __setitem__(self, key, value):
        self.parts[key] = value

    def __delitem__(self, key):
        del self.parts[key]

    def __iter__(self):
        return iter(self.parts)

    def __len__(self):
        return len(self.parts)


@dataclasses.dataclass
class Linked:
    x: object
    other: object = None


@pytest.mark.parametrize("kind", ["mapping", "mapping with a lock", "dataclass"])
def test_an_example_of_any_make_is_left_as_it_was(torch, kind):
    """The tensors of the caller's mapping became None; a dataclass that refers to itself raised a RecursionError."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(8, 8)

        def forward(self, batch):
            return self.line(batch.other.other.x if kind == "dataclass" else batch["x"]).exp()

    x = torch.randn(4, 8)
    given = Linked(x) if kind == "dataclass" else Bag(x=x) if kind == "mapping" else Bag(x=x, lock=threading.Lock())
    if kind == "dataclass":
        given.other = Linked(x.clone(), given)
    nodes = tp.capture(Model(), (given,), repeats=1)
    assert (given.x if kind == "dataclass" else given["x"]) is x and nodes.names[-2:] == ("line", "exp")


def test_parameters_that_can_have_no_gradient_are_refused(torch):
    """They once raised a bare RuntimeError."""
    with torch.inference_mode():
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    with pytest.raises(tp.InvalidValueError, match=r"module has 0\.weight, which was made in torch\.inference_mode and can have"):
        tp.capture(model, torch.randn(3, 4))


def test_a_tensor_that_has_no_storage_is_no_obstacle(torch):
    """An attribute in oneDNN's own form once raised a bare RuntimeError."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    model.packed = torch.randn(3, 3).to_mkldnn()
    assert tp.capture(model, torch.randn(3, 4), repeats=0).names == ("_0", "_1")


LATER = {
    "a view made after": lambda torch, m, x: [y := torch.zeros_like(x), y.add_(m.one(x)), y[:2].exp()][2],
    "views of views made before": lambda torch, m, x: [y := torch.zeros_like(x), v := y.view(-1).view(2, 16).view(4, 8),
                                                       y.add_(m.one(x)), v.exp()][3],
    "an item of a buffer": lambda torch, m, x: [m.last.__setitem__(slice(2), m.one(x)[:2]), (x + m.last).exp()][1],
}


@pytest.mark.parametrize("what", LATER)
def test_who_reads_comes_after_who_wrote_and_after_what_it_reads(torch, what):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.nn.Linear(8, 8)
            self.register_buffer("last", torch.zeros(4, 8))

        def forward(self, x):
            return LATER[what](torch, self, x)

    nodes = tp.capture(Model(), torch.randn(4, 8), repeats=1)
    links = {(nodes.names[source], nodes.names[target]): size for source, target, size in nodes.edges}
    wanted = {
        "a view made after": {("add_", "getitem"): 4 * 8 * 4, ("getitem", "exp"): 2 * 8 * 4, ("add_", "exp"): None},
        "views of views made before": {("view_2", "add_"): 0, ("zeros_like", "add_"): 4 * 8 * 4, ("add_", "exp"): 4 * 8 * 4},
        "an item of a buffer": {("getitem", "setitem"): 2 * 8 * 4, ("setitem", "add"): 4 * 8 * 4},
    }[what]
    assert {link: links.get(link) for link in wanted} == wanted
    assert (nodes.bwd_s[[k for k, name in enumerate(nodes.names) if name in ("add_", "setitem", "add", "exp")]] > 0).all()


def test_a_tensor_that_is_made_of_others_has_their_bytes(torch):
    """A jagged one, of sequences of different lengths: its own storage has no address, and asking for it was an error."""
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    rows = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    nodes = tp.capture(layers, rows, repeats=1)
    values, places = (3 + 5) * 8 * 4, (2 + 1) * 8
    assert nodes.activation_bytes.tolist() == [0, values + places, 0] and nodes.cut_bytes.tolist() == [values + places] * 2 + [0]
    assert nodes.param_bytes.tolist() == [(8 + 1) * 8 * 4, 0, (8 + 1) * 8 * 4] and (nodes.bwd_s > 0).all()
