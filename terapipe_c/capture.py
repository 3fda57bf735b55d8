"""Makes the planners' nodes from a PyTorch model: traces it, times it node by node, and counts what autograd saves. Needs torch."""

from __future__ import annotations

import importlib
import itertools
import re
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._core import InvalidTypeError, InvalidValueError
from .config import counted, human_bytes, real, whole
from .planners.nodes import Nodes, remake_seconds
from .torch_graph import copied, first_words, held, mapped, preserved, tensors_of, trace

__all__ = ["capture"]


def _torch() -> Any:
    try:
        importlib.import_module("torch.fx")
        return importlib.import_module("torch")
    except ImportError as error:
        raise ImportError("tp.capture needs PyTorch, which cannot be imported here: pip install torch makes it so "
                          f"({error})") from error


_Around = tuple[Callable[[], AbstractContextManager[Any]], ...]     # what a node runs within


class _Book:
    """What was met so far: who made a storage, which are parameters, and what each node keeps."""

    def __init__(self, torch: Any, graph: Any, module: Any, example: Any) -> None:
        self.torch = torch
        subclasses = [importlib.import_module(f"torch._subclasses.{name}_tensor") for name in ("fake", "functional")]
        self.is_made_of_others = importlib.import_module("torch.utils._python_dispatch").is_traceable_wrapper_subclass
        self.without_data = subclasses[0].FakeTensor, subclasses[1].FunctionalTensor    # of what traces itself: torch.cond
        own = {self.key(x) for x in held(torch, module) if isinstance(x, torch.Tensor)}
        self.scripted = [(part, getattr(part, "_c", part)) for part in module.modules() if isinstance(part, torch.jit.ScriptModule)]
        self.states: dict[int, list[Any]] = {}      # storage -> the model's parameters and buffers in it
        for state in (*graph.parameters(), *graph.buffers(), *self.held_by(tuple(made for _, made in self.scripted))):
            if self.key(state) in own:      # torch.fx makes a buffer of what a forward makes of nothing, too
                self.states.setdefault(self.key(state), []).append(state)
        self.given = own | {self.key(x) for x in self.tensors(example)}    # nobody keeps it
        self.charged: set[tuple[int, int, int]] = set()     # parameters that a node has already
        self.maker: dict[int, int] = {}    # storage -> node
        self.writer: dict[int, int] = {}   # storage -> the last node that wrote to it in place
        self.readers: dict[int, set[int]] = {}      # storage -> who made or read it since
        self.views: dict[int, list[Any]] = {}       # storage -> the values that lie there
        self.kin: dict[int, object] = {}    # id of a value -> the same for all that torch gives a gradient with it
        self.twins: dict[int, tuple[Any, Any]] = {}     # id of a frozen parameter or a buffer -> (it, what nodes are given for it)
        self.counted: set[int] = set()     # storages that are kept by some node already
        self.alive: list[Any] = []         # results and saved tensors: no storage may come again while keys are compared
        self.kept: list[float] = []

    def key(self, tensor: Any) -> int:
        storages = self.storages(tensor)
        return int(storages[-1].data_ptr()) if storages else -id(tensor)

    def storages(self, tensor: Any) -> list[Any]:
        """Of a sparse one: its indices' and its values'; of one that is made of others (a jagged one): theirs. None of what oneDNN
        holds."""
        torch = self.torch
        if self.is_made_of_others(tensor):
            inner = [getattr(tensor, name) for name in reversed(tensor.__tensor_flatten__()[0])]    # its values are the first
            return [storage for part in inner for storage in self.storages(part)]
        if tensor.layout == torch.strided:
            return [tensor.untyped_storage()]
        if tensor.layout == torch.sparse_coo:
            parts = [tensor._indices(), tensor._values()]
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        else:
            parts = []
        return [part.untyped_storage() for part in parts]

    def is_plain(self, tensor: Any) -> bool:
        return tensor.layout == self.torch.strided and not self.is_made_of_others(tensor)

    def size(self, tensor: Any) -> int:
        """Bytes of its numbers; of a sparse one, of what it stores."""
        if self.is_plain(tensor):
            return int(tensor.numel() * tensor.element_size())
        return sum(int(storage.nbytes()) for storage in self.storages(tensor))

    def tensors(self, value: Any) -> list[Any]:
        return tensors_of(self.torch, value)

    def held_by(self, called: tuple[Any, ...]) -> list[Any]:
        """Of a part that torch.jit made, one of whose methods is called: to torch.fx what it is in C is given to the method."""
        parts = [part for part, made in self.scripted for x in called if x is made]
        return [state for part in parts for state in (*part.parameters(), *part.buffers())]

    def span(self, tensor: Any) -> tuple[int, int]:
        """Where its numbers lie: one storage may hold several parameters (an LSTM's on a GPU)."""
        if not self.is_plain(tensor) or not tensor.numel():
            return 0, 1
        last = sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()

    def state_bytes(self, used: list[Any]) -> tuple[float, float]:
        """Bytes of what among these no node has yet: trainable parameters; frozen ones and buffers, which have no gradient."""
        trained = fixed = 0.0
        for tensor in used:
            key, (first, end) = self.key(tensor), self.span(tensor)
            for state in self.states.get(key, ()):
                low, high = self.span(state)
                if (key, low, high) in self.charged or not (low < end and first < high):
                    continue
                self.charged.add((key, low, high))
                if state.requires_grad:
                    trained += self.size(state)
                else:
                    fixed += self.size(state)
        return trained, fixed

    def is_charged(self, state: Any) -> bool:
        return (self.key(state), *self.span(state)) in self.charged or not state.numel()

    def keep(self, tensor: Any, node: int) -> None:
        """Autograd saved it while `node` ran: its maker keeps it, once, whoever reads it."""
        key = self.key(tensor)
        if key in self.given or key in self.counted or key == 0:
            return
        self.counted.add(key)
        self.kept[self.maker.get(key, node)] += float(sum(storage.nbytes() for storage in self.storages(tensor)))

    def ran(self, node: int, turn: _Turn) -> None:
        """What the node's first turn made, saved and wrote to."""
        self.alive.append(turn)
        for tensor in self.tensors(turn.result):
            if self.key(tensor) not in self.given:
                self.maker.setdefault(self.key(tensor), node)
        for tensor in turn.saved:
            if not isinstance(tensor, self.without_data):
                self.keep(tensor, node)

    def meet(self, values: list[Any], node: int | None = None, kin: list[object] | None = None) -> None:
        """What nodes may read from now on: the example's and constants, or what `node` made, of such kin."""
        for value, own in zip(values, kin or [object() for _ in values], strict=True):
            self.kin.setdefault(id(value), own)
            self.views.setdefault(self.key(value), []).append(value)
            if node is not None:
                self.readers.setdefault(self.key(value), set()).add(node)

    def kin_of(self, turn: _Turn) -> list[object]:
        """Of the results: a view, or what was given, has a gradient with what it was made of; what was detached from it has not."""
        found = list[object]()
        for result in self.tensors(turn.result):
            root = turn.given.get(id(result._base if result._is_view() else result))
            found.append(object() if root is None else self.kin.get(id(root[1]), object()))
        return found

    def attribute(self, value: Any) -> Any:
        """What nodes are given for an attribute: for what wants no gradient (a buffer) another tensor that lies there, as a forward
        that writes to it what has one leaves its history with what it wrote to."""
        if not isinstance(value, self.torch.Tensor) or value.requires_grad or self.key(value) not in self.states:
            return value
        return self.twins.setdefault(id(value), (value, value.detach()))[1]

    def sources(self, node: int, values: list[tuple[int | None, Any]]) -> dict[int, float]:
        """Bytes that `node` reads of each other node. values: (the node that made a value, or None, and the value) for all that it
        reads. What has been written to in place since, through whatever view, counts as the writer's."""
        found: dict[int, float] = {}
        for made_by, value in values:
            sizes: dict[int, float] = {}
            for tensor in self.tensors(value):
                key = self.key(tensor)
                source = max(self.writer.get(key, -1), -1 if made_by is None else made_by)
                if source >= 0:
                    sizes[source] = sizes.get(source, 0.0) + self.size(tensor)
                self.readers.setdefault(key, set()).add(node)
            for source, size in sizes.items():
                found[source] = max(found.get(source, 0.0), size)
        return found

    def wrote(self, node: int, turn: _Turn) -> list[int]:
        """What `node` wrote to: its kin there wants a gradient if it does now. Gives who must have run before."""
        before = set[int]()
        for tensor in turn.written:
            key, kin = self.key(tensor), self.kin.get(id(turn.given[id(tensor)][1]))
            before |= self.readers.pop(key, set())
            self.writer[key] = node
            for view in self.views.get(key, ()) if tensor.requires_grad else ():
                if self.kin[id(view)] is kin and (view.is_floating_point() or view.is_complex()):
                    view.requires_grad_(True)
        return sorted(before - {node})


@dataclass
class _Turn:
    """One run of a node."""

    result: Any
    seconds: float
    saved: list[Any]
    written: list[Any]      # of what it was given, without the model's parameters
    given: dict[int, tuple[Any, Any]]   # id of what it was given -> (that, the value that it stands for)


def _leaves(book: _Book, value: Any, own: bool, copy: bool) -> tuple[Any, dict[int, tuple[Any, Any]]]:
    """The same arguments cut off from the graph, so that a backward is this node's alone; and which stands for which. own: results
    of an operation, for torch writes to no leaf that wants a gradient; copy: with storages of their own. One that is given twice
    stays one: attention asks."""
    cut: dict[int, Any] = {}
    given: dict[int, tuple[Any, Any]] = {}

    def leaf(x: Any) -> Any:
        if id(x) not in cut:
            cut[id(x)] = apart(x)
            given[id(cut[id(x)])] = cut[id(x)], x
        return cut[id(x)]

    def apart(x: Any) -> Any:
        if x.grad_fn is None and any(x is state for state in book.states.get(book.key(x), ())):     # else the module's history
            return x
        made = x.detach()
        made.requires_grad_(x.requires_grad)  # of a mask, or of a first state, no gradient is wanted
        if own or copy:
            made = made.clone()
            if not copy:
                made.data = x.detach()
        return made

    return mapped(book.torch, value, leaf), given


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


def _backward(book: _Book, turn: _Turn) -> float:
    torch = book.torch
    roots = [t for t in book.tensors(turn.result) or turn.written if t.requires_grad and t.grad_fn is not None]
    wanted = _reached(roots)
    if not wanted:
        return 0.0
    gradients = [torch.ones_like(t) for t in roots]
    _synchronise(torch, roots)
    start = time.perf_counter()
    torch.autograd.grad(roots, wanted, gradients, allow_unused=True)
    _synchronise(torch, roots)
    return time.perf_counter() - start


def _turn(book: _Book, call: Any, arguments: Any, around: _Around, own: bool = False, copy: bool = False) -> _Turn:
    torch, saved = book.torch, list[Any]()
    cut, given = _leaves(book, arguments, own, copy)
    inputs = [made for made, value in given.values() if made is not value]

    def pack(tensor: Any) -> Any:
        saved.append(tensor)
        return tensor

    with ExitStack() as within, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        for made in around:
            within.enter_context(made())
        _synchronise(torch, inputs)
        before = [(t, t._version) for t in inputs]
        start = time.perf_counter()
        result = call(*cut[0], **cut[1])
        _synchronise(torch, inputs)
        took = time.perf_counter() - start
    return _Turn(result, took, saved, [t for t, version in before if t._version != version], given)


def _measure(book: _Book, call: Any, arguments: Any, node: int, repeats: int, around: _Around) -> tuple[_Turn, float, float]:
    """(the first turn, forward seconds, backward seconds): the least of the repeats."""
    try:        # it warms up, counts what is saved, and alone writes to what the node was given
        first = _turn(book, call, arguments, around)
    except RuntimeError as error:
        if "in-place" not in str(error):
            raise
        first = _turn(book, call, arguments, around, own=True)
    book.ran(node, first)
    forward, backward = first.seconds, _backward(book, first)
    for again in range(repeats):
        turn = _turn(book, call, arguments, around, copy=bool(first.written))
        took, back = turn.seconds, _backward(book, turn)
        forward, backward = (min(forward, took), min(backward, back)) if again else (took, back)
    return first, forward, backward


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
            values[node] = book.attribute(_attribute(graph, node.target))
            book.meet(book.tensors(values[node]))
            continue
        given = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
        call, owned = _call(graph, node)
        owned += book.tensors(given) + book.held_by(given[0][:1])
        at = len(rows.names)
        book.kept.append(0.0)
        try:
            around = (torch.no_grad if node.meta.get("without_gradient") else torch.enable_grad, *node.meta.get("within", ()))
            first, forward, backward = _measure(book, call, given, at, repeats, around)
        except (MemoryError, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:     # whatever a layer's own code raises
            raise InvalidValueError(f"node {node.name} ({_called(node)}) does not run on this example: "
                                    f"{first_words(error)}") from error
        values[node] = mapped(torch, first.result, lambda x: x.detach().requires_grad_(x.requires_grad))
        made = book.tensors(values[node])
        if not made and not first.written:  # a shape, a number: nothing that a stage computes or keeps
            book.kept.pop()
            continue
        node_of[node] = at
        sources = book.sources(at, [(node_of.get(n), values[n]) for n in node.all_input_nodes])
        book.meet(made, at, book.kin_of(first))
        before = dict.fromkeys(book.wrote(at, first), 0.0)
        rows.edges += [(source, at, size) for source, size in (before | sources).items()]
        trained, fixed = book.state_bytes(owned)
        rows.add(rows.name(node, exported), fwd_s=forward, bwd_s=backward, param_bytes=trained, fixed_bytes=fixed,
                 working_bytes=sum(map(book.size, made)) + sum(sources.values()))
    return rows


def _call(graph: Any, node: Any) -> tuple[Callable[..., Any], list[Any]]:
    """What a node calls, and the parameters and buffers that it holds."""
    if node.op == "call_module":
        part = graph.get_submodule(node.target)
        return part, [*part.parameters(), *part.buffers()]
    return (_method(node.target) if node.op == "call_method" else node.target), []


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


def _tell_unused(book: _Book, module: Any) -> None:
    """An expert that the example has no token for has to be somewhere, too."""
    left = {name: book.size(p) for name, p in module.named_parameters()
            if p.requires_grad and not book.is_charged(p)}
    if left:
        first = ", ".join(itertools.islice(left, 3)) + (", ..." if len(left) > 3 else "")
        warnings.warn(f"{counted(len(left), 'parameter')}, {human_bytes(sum(left.values()))}, of no node, as this example does not "
                      f"need them: {first}", stacklevel=3)


def capture(module: Any, example: Any, *, repeats: int = 3, optimizer_bytes_per_param_byte: float = 2.0) -> Nodes:
    """A PyTorch model as :class:`tp.planners.Nodes`: one node a torch.fx operation, measured on the example's device.

    Args:
        module: a torch.nn.Module that torch.fx can trace, or else torch.export (most of torch.nn, transformers' models, and what
            goes another way where an argument is None), or a torch.fx.GraphModule. Its parameters, buffers, gradients, the
            example and random states are left as they were.
        example: its input: a tensor, a tuple of arguments, or a dict of named ones. One micro-batch.
        repeats: times each forward and backward is measured; the least counts.
        optimizer_bytes_per_param_byte: optimiser state of a parameter in its own bytes (AdamW: 2).

    A layer of torch.nn's is one node, but one that is a model by itself (a TransformerEncoder), for which all is torch.export's.
    Where the model's Python asks for numbers of a tensor (is this mask causal?), the graph is of the way that this example goes.
    A node of torch.export's is one of aten's operations, named by its submodule (``h.0.mlp.c_fc.addmm``), of a graph of this
    example's shapes; what a model does because it is traced (transformers makes the causal mask, which attention then keeps)
    counts as well. A torch.autograd.Function is one node, with its own backward and what it saves; a torch.utils.checkpoint is
    taken for what is in it, as if there were none: what is made again is for the planner to say.

    What is written in place is read, from there on, from the operation that wrote, and so are all views of it (but a parameter,
    and what a layer that is one node holds, are read from nowhere). fwd_s and bwd_s are of each node alone. activation_bytes is
    what autograd saves (saved_tensors_hooks), counted once and charged to the node that made it; parameters and the example are
    not counted. param_bytes are of trainable parameters; frozen ones and buffers, which a stage holds without a gradient, are in
    optimizer_bytes as they are. A UserWarning names trainable parameters of no node (of an expert that has none of the example's
    tokens). recompute_s is its forward and that of the sources that keep nothing. Edges carry the tensors' bytes. ImportError
    where torch is not installed.
    """
    torch = _torch()
    turns = whole("repeats", repeats, 0)
    factor = real("optimizer_bytes_per_param_byte", optimizer_bytes_per_param_byte, zero=True)
    if not isinstance(module, torch.nn.Module):
        raise InvalidTypeError(f"module is {type(module).__name__}: a torch.nn.Module would be right")
    with torch.inference_mode(False), preserved(torch, module) as restore:     # a tensor of that mode can have no gradient
        graph, *given = trace(torch, module, example, restore)
        arguments, named = copied(torch, given)
        book = _Book(torch, graph, module, (arguments, named))
        book.meet(book.tensors((arguments, named)))
        rows = _run(book, graph, arguments, named, turns)
        _tell_unused(book, module)
    if not rows.names:
        raise InvalidValueError(f"{type(module).__name__} computes no tensor")
    columns = {key: np.array(values) for key, values in rows.columns.items()}
    fixed = columns.pop("fixed_bytes")
    kept = np.array(book.kept)
    nodes = columns | {"recompute_s": remake_seconds(columns["fwd_s"], kept, rows.edges), "activation_bytes": kept,
                       "optimizer_bytes": factor * columns["param_bytes"] + fixed, "names": rows.names}
    return Nodes.from_graph(nodes, rows.edges)
