"""Nodes from a PyTorch model: traced by torch.fx, or else by torch.export, timed node by node, what autograd saves counted. Needs
torch."""

from __future__ import annotations

import importlib
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np

from ._core import InvalidTypeError, InvalidValueError
from .config import real, whole
from .planners.nodes import Nodes, remake_seconds

__all__ = ["capture"]


def _torch() -> Any:
    try:
        importlib.import_module("torch.fx")
        return importlib.import_module("torch")
    except ImportError as error:
        raise ImportError("tp.capture needs PyTorch, which cannot be imported here: pip install torch makes it so "
                          f"({error})") from error


def _trace(torch: Any, module: Any, example: Any,
           restore: Callable[[], None]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(graph, what its placeholders take by place, by name)."""
    arguments: tuple[Any, ...] = example if isinstance(example, tuple) else () if isinstance(example, Mapping) else (example,)
    named = dict(example) if isinstance(example, Mapping) else {}
    if isinstance(module, torch.fx.GraphModule):
        return module, arguments, named
    try:
        with _restored(module):
            graph = _symbolic(torch, module)
        restore()
        if _follows(torch, graph, module, arguments, named, restore):
            return graph, arguments, named
        refused = "it follows another path than this example: to torch.fx an argument is neither None nor a tensor"
    except Exception as error:  # whatever the model's own code raises at a proxy
        refused = _reason(error)
    try:
        with _restored(module):
            return (*_export(torch, module, arguments, named), {})
    except Exception as error:  # and at a tensor without data
        raise InvalidValueError(
            f"torch.fx and torch.export cannot trace {type(module).__name__}. torch.fx: {refused}. torch.export: "
            f"{_reason(error)}. Arguments that its forward takes, a forward whose path does not depend on its data, or one traced "
            "by hand into a torch.fx.GraphModule, would be right") from error


def _symbolic(torch: Any, module: Any) -> Any:
    """torch.fx's graph, which alone says nothing of torch.no_grad(): nodes within one are marked, for _measure."""
    def create_node(self: Any, *args: Any, **kwargs: Any) -> Any:
        node = torch.fx.Tracer.create_node(self, *args, **kwargs)
        node.meta["without_gradient"] = not torch.is_grad_enabled()
        return node

    tracer = type("Tracer", (torch.fx.Tracer,), {"create_node": create_node})()
    with torch.enable_grad():  # whatever the caller is within
        return torch.fx.GraphModule(module, tracer.trace(module), type(module).__name__)


def _follows(torch: Any, graph: Any, module: Any, arguments: tuple[Any, ...], named: dict[str, Any],
             restore: Callable[[], None]) -> bool:
    """Whether torch.fx's graph computes what the module does of this example. It does not where the module asks whether an argument
    is None, or is a tensor (a proxy is neither), or says torch.autocast. Of an example that the module itself refuses: yes, for the
    graph says at which node. restore: the module's tensors, after each."""
    leaves = importlib.import_module("torch.utils._pytree").tree_leaves

    def results(*calls: Any) -> list[Any]:
        try:
            with _restored(module), torch.random.fork_rng(), torch.no_grad():
                for call in calls:
                    arguments_now, named_now = _copied(torch, (arguments, named))
                    found = call(*arguments_now, **named_now)
                return [x for x in leaves(found) if isinstance(x, torch.Tensor)]
        finally:
            restore()

    def alike(found: list[Any]) -> bool:
        return len(found) == len(right) and all(
            a.shape == b.shape and a.dtype == b.dtype and bool(torch.isclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True).all())
            for a, b in zip(found, right, strict=True))

    try:
        right = results(module)
    except Exception:  # whatever the model's own code raises
        return True
    try:
        return alike(results(graph)) or alike(results(module, graph))   # what it makes of its weights beside the graph is made then
    except Exception:
        return False


def _copied(torch: Any, example: Any) -> Any:
    """The example's tensors anew, so that what a model does in place is not done to the caller's. One that is given twice stays one
    (attention asks whether its query is its key)."""
    made: dict[int, Any] = {}

    def copied(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in made:
            made[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
        return made[id(x)]

    return importlib.import_module("torch.utils._pytree").tree_map(copied, example)


@contextmanager
def _kept(torch: Any, tensors: Iterable[Any]) -> Iterator[Callable[[], None]]:
    """Tensors have the values afterwards that they had, and whenever what this gives is called; those of lazy modules have none
    yet."""
    lazy = torch.nn.parameter.UninitializedTensorMixin
    before = [(x, x.detach().clone()) for x in {id(x): x for x in tensors}.values() if not isinstance(x, lazy)]

    def same(tensor: Any, old: Any) -> bool:    # a copy of the same would spoil what autograd holds elsewhere: it asks for versions
        return bool(((tensor == old) | ((tensor != tensor) & (old != old))).all())  # noqa: PLR0124 (NaN)

    def restore() -> None:
        with torch.no_grad():
            for tensor, old in before:
                try:
                    if tensor.shape != old.shape:
                        tensor.data = old.clone()
                    elif not same(tensor, old):
                        tensor.copy_(old)
                except RuntimeError:            # of a kind that is not compared or written to
                    tensor.data = old.clone()

    try:
        yield restore
    finally:
        restore()


def _tensors_of(torch: Any, module: Any) -> list[Any]:
    """Parameters, buffers (BatchNorm's means), and tensors that are plain attributes or within lists, tuples and dicts that are: a
    forward may change any of them in place, while it is traced, too."""
    leaves = importlib.import_module("torch.utils._pytree").tree_leaves
    return [x for part in module.modules() for x in leaves(dict(vars(part))) if isinstance(x, torch.Tensor)]


@contextmanager
def _restored(module: Any) -> Iterator[None]:
    """Attributes, lists and dicts of all submodules as they were: tracing leaves proxies where a module holds its parameters twice
    (LSTM)."""
    before = []
    for part in module.modules():
        inside = {key: copy(value) for key, value in vars(part).items() if isinstance(value, list | dict)}
        before.append((vars(part), dict(vars(part)), inside))
    try:
        yield
    finally:
        for now, values, inside in before:
            now.clear()
            now.update(values)
            for key, value in inside.items():
                now[key].clear()
                (now[key].extend if isinstance(value, list) else now[key].update)(value)


def _reason(error: Exception) -> str:
    """What an error says first: torch's go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _export(torch: Any, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The graph of this very example: aten's operations on the module's own parameters; and the example's leaves, which are its
    placeholders."""
    leaves = importlib.import_module("torch.utils._pytree").tree_leaves

    def forward(self: Any, arguments: Any, named: Any) -> Any:
        """Gives tensors alone: what holds them (a cache of keys and values) may be nothing that torch.export knows."""
        return [x for x in leaves(self._captured(*arguments, **named)) if isinstance(x, torch.Tensor)]

    whole = type("Whole", (torch.nn.Module,), {"forward": forward})()
    whole._captured = module
    with torch.enable_grad(), warnings.catch_warnings():  # without gradients attention takes a path that has no backward
        warnings.simplefilter("ignore")  # of how a layer of torch's own is written (LSTM)
        exported = importlib.import_module("torch.export").export(whole, (arguments, named), strict=False)
    return exported.module(), tuple(leaves((arguments, named)))


class _Book:
    """What was met so far: who made a storage, which are parameters, and what each node keeps."""

    def __init__(self, torch: Any, graph: Any) -> None:
        self.torch = torch
        self.params = {self.key(p): p for p in (*graph.parameters(), *graph.buffers())}
        self.owned = set(self.params)      # the model's own: the example joins params later, and is nobody's state
        self.charged: set[int] = set()     # parameters that a node has already
        self.maker: dict[int, int] = {}    # storage -> node
        self.counted: set[int] = set()     # storages that are kept by some node already
        self.same: dict[int, int] = {}     # a copy that an operation in place was given -> the storage it stands for
        self.alive: list[Any] = []         # results and saved tensors: no storage may come again while keys are compared
        self.kept: list[float] = []

    @staticmethod
    def key(tensor: Any) -> int:
        return int(tensor.untyped_storage().data_ptr())

    def tensors(self, value: Any) -> list[Any]:
        found: list[Any] = []
        self.torch.fx.node.map_aggregate(value, lambda x: found.append(x) if isinstance(x, self.torch.Tensor) else None)
        return found

    def state_bytes(self, used: list[Any]) -> tuple[float, float]:
        """Bytes of what among these no node has yet: trainable parameters; frozen ones and buffers, which have no gradient."""
        trained = fixed = 0.0
        for state in used:
            if self.key(state) in self.owned and self.key(state) not in self.charged:
                self.charged.add(self.key(state))
                if state.requires_grad:
                    trained += state.numel() * state.element_size()
                else:
                    fixed += state.numel() * state.element_size()
        return trained, fixed

    def keep(self, tensor: Any, node: int) -> None:
        """Autograd saved it while `node` ran: its maker keeps it, once, whoever reads it."""
        key = self.same.get(self.key(tensor), self.key(tensor))
        if key in self.params or key in self.counted or key == 0:
            return
        self.counted.add(key)
        self.kept[self.maker.get(key, node)] += float(tensor.untyped_storage().nbytes())


def _leaves(book: _Book, value: Any, copy: bool) -> Any:
    """The same arguments cut off from the graph, so that a backward is this node's alone. copy: for ops in place."""
    def leaf(x: Any) -> Any:
        if not isinstance(x, book.torch.Tensor) or book.key(x) in book.params:
            return x
        made = x.detach()
        made.requires_grad_(x.requires_grad)  # of a mask, or of a first state, no gradient is wanted
        return made.clone() if copy else made

    return book.torch.fx.node.map_aggregate(value, leaf)


def _synchronise(torch: Any, tensors: list[Any]) -> None:
    if any(t.is_cuda for t in tensors):
        torch.cuda.synchronize()


def _backward(book: _Book, result: Any, inputs: list[Any]) -> float:
    torch = book.torch
    roots = [t for t in book.tensors(result) if t.requires_grad and t.grad_fn is not None]
    if not roots:
        return 0.0
    gradients = [torch.ones_like(t) for t in roots]
    wanted = [p for p in (*inputs, *book.params.values()) if p.requires_grad]
    _synchronise(torch, roots)
    start = time.perf_counter()
    torch.autograd.grad(roots, wanted, gradients, allow_unused=True)
    _synchronise(torch, roots)
    return time.perf_counter() - start


def _measure(book: _Book, call: Any, arguments: Any, node: int, repeats: int, gradient: bool) -> tuple[Any, float, float]:
    """(result, forward seconds, backward seconds): the least of the repeats. gradient: not within a torch.no_grad()."""
    torch, forward, backward, first_result = book.torch, float("inf"), float("inf"), None
    cloned = False
    for turn in range(repeats + 1):  # the first one warms up, and counts what is saved
        cut = _leaves(book, arguments, cloned)
        inputs = [t for t in book.tensors(cut) if book.key(t) not in book.params]

        saved: list[Any] = []

        def pack(tensor: Any, saved: list[Any] = saved) -> Any:
            saved.append(tensor)
            return tensor

        with torch.set_grad_enabled(gradient), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            try:
                _synchronise(torch, inputs)
                versions = [t._version for t in inputs]
                start = time.perf_counter()
                result = call(*cut[0], **cut[1])
                _synchronise(torch, inputs)
                took = time.perf_counter() - start
                cloned = cloned or [t._version for t in inputs] != versions  # in place, once is enough
            except RuntimeError as error:
                if cloned or "in-place" not in str(error):
                    raise
                cloned = True
                saved.clear()
                cut = _leaves(book, arguments, cloned)
                inputs = [t for t in book.tensors(cut) if book.key(t) not in book.params]
                result = call(*cut[0], **cut[1])
                took = float("inf")
        if turn == 0:
            first_result = result
            book.alive += [cut, result, *saved]
            for made, old in zip(book.tensors(cut), book.tensors(arguments), strict=True):
                if book.key(made) != book.key(old):
                    book.same[book.key(made)] = book.same.get(book.key(old), book.key(old))
            for tensor in book.tensors(result):
                key = book.same.get(book.key(tensor), book.key(tensor))
                if key not in book.params:
                    book.maker.setdefault(key, node)
            for tensor in saved:
                book.keep(tensor, node)
        back = _backward(book, result, inputs)
        if turn > 0 or repeats == 0:
            forward, backward = min(forward, took), min(backward, back)
    return first_result, 0.0 if forward == float("inf") else forward, 0.0 if backward == float("inf") else backward


def _size(tensors: list[Any]) -> float:
    return float(sum(t.numel() * t.element_size() for t in tensors))


class _Rows:
    def __init__(self) -> None:
        keys = ("fwd_s", "bwd_s", "param_bytes", "fixed_bytes", "working_bytes")
        self.columns: dict[str, list[float]] = {key: [] for key in keys}
        self.names: list[str] = []
        self.times: dict[str, int] = {}    # how often a name was given
        self.edges: list[tuple[int, int, float]] = []

    def name(self, node: Any, exported: bool) -> str:
        """torch.fx names a node by its submodule already; of torch.export's, which are operations, the path goes before it."""
        if not exported:
            return str(node.name)
        path = next((str(place[0]) for place in reversed((node.meta.get("nn_module_stack") or {}).values())), "")
        op = re.sub(r"_\d+$", "", node.name)
        name = f"{path.removeprefix('_captured').removeprefix('.')}.{op}".removeprefix(".")
        self.times[name] = self.times.get(name, -1) + 1
        return f"{name}_{self.times[name]}" if self.times[name] else name

    def add(self, name: str, **values: float) -> None:
        self.names.append(name)
        for key, value in values.items():
            self.columns[key].append(value)


def _run(book: _Book, graph: Any, arguments: tuple[Any, ...], named: dict[str, Any], repeats: int) -> _Rows:
    torch = book.torch
    rows, values, node_of = _Rows(), {}, {}
    rest, given_names = list(arguments), dict(named)
    aten = torch._ops.OpOverload, torch._ops.HigherOrderOperator  # a torch.autocast's region is one of the latter
    exported = any(isinstance(node.target, aten) for node in graph.graph.nodes)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = _argument(node, rest, given_names)
            continue
        if node.op == "output":
            break
        if not exported:               # whose placeholders torch has made of this very example
            _check_all_taken(graph, rest, given_names)
        if node.op == "get_attr":
            values[node] = _attribute(graph, node.target)
            continue
        given = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
        owned: list[Any] = [t for t in book.tensors(given) if book.key(t) in book.params]
        if node.op == "call_module":
            call = graph.get_submodule(node.target)
            owned += [*call.parameters(), *call.buffers()]
        elif node.op == "call_method":
            call = _method(node.target)
        else:
            call = node.target
        at = len(rows.names)
        book.kept.append(0.0)
        try:
            gradient = not node.meta.get("without_gradient", False)
            result, forward, backward = _measure(book, call, given, at, repeats, gradient)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            raise InvalidValueError(f"node {node.name} ({_called(node)}) does not run on this example: {_reason(error)}") from error
        values[node] = torch.fx.node.map_aggregate(
            result, lambda x: x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x)
        made = book.tensors(result)
        if not made:  # a shape, a number: nothing that a stage computes or keeps
            book.kept.pop()
            continue
        node_of[node] = at
        sources = {node_of[n]: _size(book.tensors(values[n])) for n in node.all_input_nodes if n in node_of}
        rows.edges += [(source, at, size) for source, size in sources.items()]
        trained, fixed = book.state_bytes(owned)
        rows.add(rows.name(node, exported), fwd_s=forward, bwd_s=backward, param_bytes=trained, fixed_bytes=fixed,
                 working_bytes=_size(made) + sum(sources.values()))
    return rows


def _argument(node: Any, rest: list[Any], named: dict[str, Any]) -> Any:
    """What a placeholder takes, taken off what is left of the example."""
    target = str(node.target)
    if target.startswith("**"):
        taken = dict(named)
        named.clear()
        return taken
    if target.startswith("*"):
        several = tuple(rest)
        rest.clear()
        return several
    if rest:
        return rest.pop(0)
    if target in named:
        return named.pop(target)
    if node.args:
        return node.args[0]
    raise InvalidValueError(f"example has nothing for the model's argument {target!r}")


def _check_all_taken(graph: Any, rest: list[Any], named: dict[str, Any]) -> None:
    takes = ", ".join(str(node.target) for node in graph.graph.nodes if node.op == "placeholder")
    if rest:
        raise InvalidValueError(f"example has {len(rest)} more than the model's arguments: {takes} would be right")
    if named:
        raise InvalidValueError(f"example has {next(iter(named))!r}, which is no argument of the model: {takes} would be right")


def _called(node: Any) -> str:
    return str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _attribute(graph: Any, path: str) -> Any:
    value = graph
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _method(name: str) -> Any:
    return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)


def capture(module: Any, example: Any, *, repeats: int = 3, optimizer_bytes_per_param_byte: float = 2.0) -> Nodes:
    """A PyTorch model as :class:`tp.planners.Nodes`: one node a torch.fx operation, measured on the example's device.

    Args:
        module: a torch.nn.Module that torch.fx can trace, or else torch.export (most of torch.nn, transformers' models, and what
            goes another way where an argument is None), or a torch.fx.GraphModule. Its parameters, buffers, gradients, the
            example and the random state are left as they were.
        example: its input: a tensor, a tuple of arguments, or a dict of named ones. One micro-batch.
        repeats: times each forward and backward is measured; the least counts.
        optimizer_bytes_per_param_byte: optimiser state of a parameter in its own bytes (AdamW: 2).

    A node of torch.export's is one of aten's operations, named by its submodule (``h.0.mlp.c_fc.addmm``), of a graph of this
    example's shapes; what a model does because it is traced (transformers makes the causal mask, which attention then keeps)
    counts as well.

    fwd_s and bwd_s are of each node alone. activation_bytes is what autograd saves (saved_tensors_hooks), counted once and
    charged to the node that made it; parameters and the example are not counted. param_bytes are of trainable parameters;
    frozen ones and buffers, which a stage holds without a gradient, are in optimizer_bytes as they are. recompute_s is its
    forward and that of the sources that keep nothing. Edges carry the tensors' bytes. ImportError where torch is not installed.
    """
    torch = _torch()
    turns = whole("repeats", repeats, 0)
    factor = real("optimizer_bytes_per_param_byte", optimizer_bytes_per_param_byte, zero=True)
    if not isinstance(module, torch.nn.Module):
        raise InvalidTypeError(f"module is {type(module).__name__}: a torch.nn.Module would be right")
    with _kept(torch, _tensors_of(torch, module)) as restore:
        graph, *given = _trace(torch, module, example, restore)
        arguments, named = _copied(torch, given)
        book = _Book(torch, graph)
        book.params.update({book.key(t): t for t in book.tensors((arguments, named))})
        with torch.random.fork_rng():
            rows = _run(book, graph, arguments, named, turns)
    if not rows.names:
        raise InvalidValueError(f"{type(module).__name__} computes no tensor")
    columns = {key: np.array(values) for key, values in rows.columns.items()}
    fixed = columns.pop("fixed_bytes")
    kept = np.array(book.kept)
    nodes = columns | {"recompute_s": remake_seconds(columns["fwd_s"], kept, rows.edges), "activation_bytes": kept,
                       "optimizer_bytes": factor * columns["param_bytes"] + fixed, "names": rows.names}
    return Nodes.from_graph(nodes, rows.edges)
