"""Nodes from a PyTorch model: traced, timed node by node, what autograd saves counted. Needs torch."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ._core import InvalidTypeError, InvalidValueError
from .config import real, whole
from .planners.nodes import Nodes, remake_seconds
from .torch_graph import copied, first_words, preserved, trace

__all__ = ["capture"]


def _torch() -> Any:
    try:
        importlib.import_module("torch.fx")
        return importlib.import_module("torch")
    except ImportError as error:
        raise ImportError("tp.capture needs PyTorch, which cannot be imported here: pip install torch makes it so "
                          f"({error})") from error


class _Book:
    """What was met so far: who made a storage, which are parameters, and what each node keeps."""

    def __init__(self, torch: Any, graph: Any) -> None:
        self.torch, self.pytree = torch, importlib.import_module("torch.utils._pytree")
        self.params = {self.key(p): p for p in (*graph.parameters(), *graph.buffers())}
        self.owned = set(self.params)      # the model's own: the example joins params later, and is nobody's state
        self.charged: set[int] = set()     # parameters that a node has already
        self.maker: dict[int, int] = {}    # storage -> node
        self.counted: set[int] = set()     # storages that are kept by some node already
        self.same: dict[int, int] = {}     # a copy that an operation in place was given -> the storage it stands for
        self.alive: list[Any] = []         # results and saved tensors: no storage may come again while keys are compared
        self.kept: list[float] = []

    def key(self, tensor: Any) -> int:
        return int(self.storages(tensor)[-1].data_ptr())

    def storages(self, tensor: Any) -> list[Any]:
        """Of a sparse one: its indices' and its values'."""
        torch = self.torch
        if tensor.layout in (torch.strided, torch.jagged):
            return [tensor.untyped_storage()]
        if tensor.layout == torch.sparse_coo:
            parts = [tensor._indices(), tensor._values()]
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        else:
            parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        return [part.untyped_storage() for part in parts]

    def size(self, tensor: Any) -> int:
        """Bytes of its numbers; of a sparse one, of what it stores."""
        if tensor.layout == self.torch.strided:
            return int(tensor.numel() * tensor.element_size())
        return sum(int(storage.nbytes()) for storage in self.storages(tensor))

    def map(self, value: Any, made: Callable[[Any], Any]) -> Any:
        """The same with made(tensor) for every tensor, in slices too; torch's named results stay what they are."""
        def one(x: Any) -> Any:
            if isinstance(x, slice):
                return slice(one(x.start), one(x.stop), one(x.step))
            return made(x) if isinstance(x, self.torch.Tensor) else x

        return self.pytree.tree_map(one, value)

    def tensors(self, value: Any) -> list[Any]:
        found: list[Any] = []
        self.map(value, found.append)
        return found

    def state_bytes(self, used: list[Any]) -> tuple[float, float]:
        """Bytes of what among these no node has yet: trainable parameters; frozen ones and buffers, which have no gradient."""
        trained = fixed = 0.0
        for state in used:
            if self.key(state) in self.owned and self.key(state) not in self.charged:
                self.charged.add(self.key(state))
                if state.requires_grad:
                    trained += self.size(state)
                else:
                    fixed += self.size(state)
        return trained, fixed

    def keep(self, tensor: Any, node: int) -> None:
        """Autograd saved it while `node` ran: its maker keeps it, once, whoever reads it."""
        key = self.same.get(self.key(tensor), self.key(tensor))
        if key in self.params or key in self.counted or key == 0:
            return
        self.counted.add(key)
        self.kept[self.maker.get(key, node)] += float(sum(storage.nbytes() for storage in self.storages(tensor)))


def _leaves(book: _Book, value: Any, copy: bool) -> Any:
    """The same arguments cut off from the graph, so that a backward is this node's alone. copy: for ops in place."""
    def leaf(x: Any) -> Any:
        if book.key(x) in book.params and x.grad_fn is None:   # what the module made of a parameter before has the module's graph
            return x
        made = x.detach()
        made.requires_grad_(x.requires_grad)  # of a mask, or of a first state, no gradient is wanted
        return made.clone() if copy else made

    return book.map(value, leaf)


def _synchronise(torch: Any, tensors: list[Any]) -> None:
    if any(t.is_cuda for t in tensors):
        torch.cuda.synchronize()


def _reached(roots: list[Any]) -> list[Any]:
    """The tensors without a history, inputs and parameters, that these were made of. Of what a node has nothing of, no gradient is
    asked for: torch looks for each, and a model has many."""
    found, seen, left = list[Any](), set[Any](), [root.grad_fn for root in roots]
    while left:
        step = left.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        if hasattr(step, "variable"):
            found.append(step.variable)
        left += [before for before, _ in step.next_functions]
    return found


def _backward(book: _Book, result: Any) -> float:
    torch = book.torch
    roots = [t for t in book.tensors(result) if t.requires_grad and t.grad_fn is not None]
    wanted = _reached(roots)
    if not wanted:
        return 0.0
    gradients = [torch.ones_like(t) for t in roots]
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
        back = _backward(book, result)
        if turn > 0 or repeats == 0:
            forward, backward = min(forward, took), min(backward, back)
    return first_result, 0.0 if forward == float("inf") else forward, 0.0 if backward == float("inf") else backward


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
        except (MemoryError, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:     # whatever a layer's own code raises
            raise InvalidValueError(f"node {node.name} ({_called(node)}) does not run on this example: "
                                    f"{first_words(error)}") from error
        values[node] = book.map(result, lambda x: x.detach().requires_grad_(x.requires_grad))
        made = book.tensors(result)
        if not made:  # a shape, a number: nothing that a stage computes or keeps
            book.kept.pop()
            continue
        node_of[node] = at
        sources = {node_of[n]: float(sum(map(book.size, book.tensors(values[n])))) for n in node.all_input_nodes if n in node_of}
        rows.edges += [(source, at, size) for source, size in sources.items()]
        trained, fixed = book.state_bytes(owned)
        rows.add(rows.name(node, exported), fwd_s=forward, bwd_s=backward, param_bytes=trained, fixed_bytes=fixed,
                 working_bytes=sum(map(book.size, made)) + sum(sources.values()))
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
            example and random states are left as they were.
        example: its input: a tensor, a tuple of arguments, or a dict of named ones. One micro-batch.
        repeats: times each forward and backward is measured; the least counts.
        optimizer_bytes_per_param_byte: optimiser state of a parameter in its own bytes (AdamW: 2).

    A node of torch.export's is one of aten's operations, named by its submodule (``h.0.mlp.c_fc.addmm``), of a graph of this
    example's shapes; what a model does because it is traced (transformers makes the causal mask, which attention then keeps)
    counts as well. A torch.autograd.Function is one node, with its own backward and what it saves; a torch.utils.checkpoint is
    taken for what is in it, as if there were none: what is made again is for the planner to say.

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
    with preserved(torch, module) as restore:
        graph, *given = trace(torch, module, example, restore)
        arguments, named = copied(torch, given)
        book = _Book(torch, graph)
        book.params.update({book.key(t): t for t in book.tensors((arguments, named))})
        rows = _run(book, graph, arguments, named, turns)
    if not rows.names:
        raise InvalidValueError(f"{type(module).__name__} computes no tensor")
    columns = {key: np.array(values) for key, values in rows.columns.items()}
    fixed = columns.pop("fixed_bytes")
    kept = np.array(book.kept)
    nodes = columns | {"recompute_s": remake_seconds(columns["fwd_s"], kept, rows.edges), "activation_bytes": kept,
                       "optimizer_bytes": factor * columns["param_bytes"] + fixed, "names": rows.names}
    return Nodes.from_graph(nodes, rows.edges)
