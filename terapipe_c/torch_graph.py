"""The graph of a PyTorch module, for ``tp.capture``: by torch.fx, or else by torch.export; and what tracing, which runs the
module's own code, must leave as it was."""

from __future__ import annotations

import importlib
import itertools
import logging
import random
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from functools import partial
from typing import Any

import numpy as np

from ._core import InvalidValueError
from .torch_functions import functions_as_operations
from .torch_reads import Reads, mapped, tensors_of

__all__ = ["copied", "first_words", "held", "mapped", "preserved", "tensors_of", "trace"]

_LIBRARY = itertools.count()    # torch's libraries of operations have names of their own
_TRACING = threading.RLock()    # which changes what all threads see of torch, and torch.export is one's alone


# ---- tracing -------------------------------------------------------------------------------------------------------------

def trace(torch: Any, module: Any, example: Any, restore: Callable[[], None]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(graph, what its placeholders take by place, by name). restore: of ``preserved``."""
    arguments: tuple[Any, ...] = example if isinstance(example, tuple) else () if isinstance(example, Mapping) else (example,)
    named = dict(example) if isinstance(example, Mapping) else {}
    if isinstance(module, torch.fx.GraphModule):
        return module, arguments, named

    def symbolic(whole: bool) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        with _restored(module):
            graph = _symbolic(torch, module, whole)
        restore()
        follows = partial(_follows, torch, graph.forward, module, arguments, named, restore)
        if not follows() or (_small(module) and not follows(stirred=True)):
            raise InvalidValueError("it follows another path than this example: an argument is neither None nor a tensor to it")
        return graph, arguments, named

    def told() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        reads = _reads_of(torch, module, arguments, named)
        if not reads.any:
            raise NotImplementedError("it asks for no tensor's numbers")
        restore()
        with _restored(module):
            graph, leaves = _export(torch, module, arguments, named, reads)
        restore()
        # before what is within torch.autocast is taken out of it, which the graph alone would not follow
        if not _follows(torch, lambda *given, **names: graph.forward(given, names), module, arguments, named, restore):
            raise InvalidValueError("it asks for other numbers when it is traced")
        _open_autocasts(torch, graph)
        return graph, leaves, {}

    def exported() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        with _restored(module):
            graph, leaves = _export(torch, module, arguments, named, None)
        _open_autocasts(torch, graph)
        return graph, leaves, {}

    refused = list[Exception]()
    for way in (partial(symbolic, False), told, exported, partial(symbolic, True)):
        try:
            with _TRACING, torch.random.fork_rng():     # each way meets the random numbers that the model would
                return way()
        except Exception as error:  # whatever the model's own code raises at a proxy, and at a tensor without data
            refused.append(error)
            restore()
    right = ("Arguments that its forward takes, a forward whose shapes do not depend on its data, or one traced by hand into a "
             "torch.fx.GraphModule, would be right")
    scripted = [name for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted:
        right = f"{f'Its {scripted[0]}' if scripted[0] else 'It'} is of torch.jit: the module that this was made of would be right"
    raise InvalidValueError(
        f"torch.fx and torch.export cannot trace {type(module).__name__}. torch.fx: {first_words(refused[0])}. torch.export: "
        f"{first_words(refused[2])}. {right}") from refused[2]


def _symbolic(torch: Any, module: Any, whole: bool) -> Any:
    """torch.fx's graph, which alone says nothing of torch.no_grad(): nodes within one are marked, for the measurement. whole: each
    layer of torch.nn is one node, and the model's own hooks are left out, as torch.fx does; else not where a layer is a model by
    itself (a TransformerEncoder: no planner could cut it), nor where a hook may make weights (torch.nn.utils.weight_norm)."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if hooks and not whole:
        name = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__)
        raise NotImplementedError(f"a hook of the model's own ({name}) is no part of the graph")
    parametrized = importlib.import_module("torch.nn.utils.parametrize").is_parametrized

    def autocasts() -> list[Any]:
        return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]

    callers = autocasts()

    def is_leaf_module(self: Any, part: Any, path: str) -> bool:
        if isinstance(part, torch.jit.ScriptModule):    # which no proxy goes through; as a call of its method it would hold nothing
            return True
        deep = any(True for child in part.children() for _ in child.children()) and not parametrized(part)
        return torch.fx.Tracer.is_leaf_module(self, part, path) and (whole or not deep)

    def create_node(self: Any, *args: Any, **kwargs: Any) -> Any:
        node = torch.fx.Tracer.create_node(self, *args, **kwargs)
        node.meta["without_gradient"] = not torch.is_grad_enabled()
        if autocasts() != callers:
            raise NotImplementedError("torch.autocast is no part of the graph")
        return node

    tracer = type("Tracer", (torch.fx.Tracer,), {"create_node": create_node, "is_leaf_module": is_leaf_module})()

    def leaf(call: Callable[..., Any], tensors: list[Any]) -> Any:
        if not any(isinstance(x, torch.fx.Proxy) for x in tensors):
            return call(*tensors)
        return tracer.create_proxy("call_function", call, tuple(tensors), {})

    with torch.enable_grad(), functions_as_operations(torch, leaf, (torch.fx.Proxy, torch.Tensor)):  # whatever the caller is within
        return torch.fx.GraphModule(module, tracer.trace(module), type(module).__name__)


def _follows(torch: Any, forward: Callable[..., Any], module: Any, arguments: tuple[Any, ...], named: dict[str, Any],
             restore: Callable[[], None], stirred: bool = False) -> bool:
    """Whether a graph's forward computes what the module does of this example. torch.fx's does not where the module asks whether an
    argument is None, or is a tensor (a proxy is neither). Of an example that the module itself refuses: whether the graph does,
    which says at which node. restore: the module's tensors, after each. stirred: with other numbers where parameters are zeros, or
    nearly, as some are before a training: what is left out of what goes through them would change no result."""
    def results(*calls: Any) -> list[Any]:
        try:
            with _restored(module), torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")     # of what is without gradients here
                for part in _small(module) if stirred else ():
                    row = part[0].numel() if part.dim() > 1 else 10
                    part.data.copy_(torch.linspace(0.5 / row, 1.5 / row, part.numel()).reshape(part.shape))     # no random number
                for call in calls:
                    arguments_now, named_now = copied(torch, (arguments, named))
                    with torch.random.fork_rng():
                        found = call(*arguments_now, **named_now)
                return tensors_of(torch, found)
        finally:
            restore()

    def alike(found: list[Any], right: list[Any]) -> bool:
        return len(found) == len(right) and all(
            a.shape == b.shape and a.dtype == b.dtype and bool(torch.isclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True).all())
            for a, b in zip(found, right, strict=True))

    right: list[Any] | None = None
    with suppress(Exception):   # whatever the model's own code raises
        right = results(module)
    try:    # not by graph(...), which prints where it fails; what the module makes of its weights beside the graph is made at last
        found = results(forward)
        return right is not None and (alike(found, right) or alike(results(module, forward), right))
    except Exception:
        return right is None


def _small(module: Any) -> list[Any]:
    """Parameters by which what goes through them is as good as lost."""
    found = []
    for part in module.parameters():
        with suppress(RuntimeError):    # of a kind that has no such operation
            if part.is_floating_point() and part.numel() and part.detach().abs().max() < 1e-2:
                found.append(part)
    return found


def _reads_of(torch: Any, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Reads:
    reads = Reads(torch)
    with _restored(module), torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")     # the model is run once more than was asked for
        given, given_names = copied(torch, (arguments, named))
        # as it is traced: a layer may go another way without gradients
        with torch.enable_grad(), functions_as_operations(torch, reads.note_function, (torch.Tensor,), on_data=True), \
                reads.mode(reads.note):
            module(*given, **given_names)
    return reads


def _export(torch: Any, module: Any, arguments: tuple[Any, ...], named: dict[str, Any],
            reads: Reads | None) -> tuple[Any, tuple[Any, ...]]:
    """The graph of this very example: aten's operations on the module's own parameters; and the example's leaves, which are its
    placeholders. reads: what the model is told of tensors' numbers, where it asks what it asked before; None: it must not depend
    on any."""
    leaves = importlib.import_module("torch.utils._pytree").tree_leaves
    failed = list[Exception]()

    def forward(self: Any, arguments: Any, named: Any) -> Any:
        """Gives tensors alone: what holds them (a cache of keys and values) may be nothing that torch.export knows."""
        try:
            with reads.telling(own.leaf) if reads else nullcontext():
                return tensors_of(torch, self._captured(*arguments, **named))
        except RuntimeError as error:
            failed.append(error)
            raise InterruptedError from error   # of a RuntimeError torch.export prints the graph so far

    own, whole = _Operations(torch), type("Whole", (torch.nn.Module,), {"forward": forward})()
    whole._captured = module
    function = partial(reads.tell_function, own.leaf) if reads else own.leaf
    with torch.enable_grad(), warnings.catch_warnings(), functions_as_operations(torch, function, (torch.Tensor,)), _quiet():
        warnings.simplefilter("ignore")  # of how a layer of torch's own is written (LSTM)
        try:
            exported = importlib.import_module("torch.export").export(whole, (arguments, named), strict=False)
        except InterruptedError as error:
            raise (failed or [error])[-1] from None
        if any("functorch" in str(getattr(node.target, "__module__", "")) for node in exported.graph.nodes):
            exported = exported.run_decompositions({})  # torch.vmap's beginning and end are nodes, to be run as one
        graph = exported.module()        # with gradients: without them attention takes a path that has no backward
    for part in graph.modules():
        if isinstance(part, torch.fx.GraphModule):      # what is within autocast or no_grad is a graph of its own
            for node in part.graph.nodes:
                node.target = own.calls.get(node.target, node.target)
            part.recompile()
    return graph, tuple(leaves((arguments, named)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch logs of a question that its trace cannot answer: what is raised says it."""
    log, own_thread = logging.getLogger("torch.fx.experimental.symbolic_shapes"), threading.get_ident()

    def is_told(record: logging.LogRecord) -> bool:
        return record.thread != own_thread

    log.addFilter(is_told)
    try:
        yield
    finally:
        log.removeFilter(is_told)


def _open_autocasts(torch: Any, graph: Any) -> None:
    """What goes on within a torch.autocast, to torch.export one operation on a graph of its own, as nodes that say which they are
    within, in the order of entering: a planner may cut there."""
    for region in [node for node in graph.graph.nodes if getattr(node.target, "__name__", "") == "wrap_with_autocast"]:
        kind, dtype, enabled, cache, body, *given = region.args
        part = getattr(graph, body.target)
        _open_autocasts(torch, part)
        rest, made = iter(given), dict[Any, Any]()
        around = (partial(torch.autocast, kind, dtype=dtype, enabled=enabled, cache_enabled=cache),)
        with graph.graph.inserting_before(region):
            for node in part.graph.nodes:
                if node.op == "placeholder":
                    made[node] = next(rest)
                elif node.op == "output":
                    results = torch.fx.node.map_arg(node.args[0], made.__getitem__)
                else:
                    made[node] = graph.graph.node_copy(node, made.__getitem__)
                    made[node].meta["within"] = around + node.meta.get("within", ())
                    if node.op in ("get_attr", "call_module"):
                        made[node].target = f"{body.target}.{node.target}"
        for user in list(region.users):     # each takes one of its results
            user.replace_all_uses_with(results[user.args[1]])
            graph.graph.erase_node(user)
        graph.graph.erase_node(region)
    graph.recompile()


class _Operations:
    """Functions as operations of torch's, which torch.export does not look into, nor ask for shapes that are known."""

    def __init__(self, torch: Any) -> None:
        self.torch, self.calls = torch, dict[Any, Callable[..., Any]]()
        self.space = f"terapipe_capture_{next(_LIBRARY)}"
        self.library = torch.library.Library(self.space, "DEF")
        self.pytree = importlib.import_module("torch.utils._pytree")

    def leaf(self, call: Callable[..., Any], tensors: list[Any], known: Any = None) -> Any:
        """The call's result; known: of a run on data, leaves and form."""
        torch, tree, whole = self.torch, self.pytree, list[Any]()
        if not tensors:
            return call()

        def several(given: list[Any]) -> list[Any]:
            return [x for x in tree.tree_leaves(call(*given)) if isinstance(x, torch.Tensor)]

        def fake(given: list[Any]) -> list[Any]:
            whole[:] = tree.tree_flatten(call(*given)) if known is None else known
            return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) if x.layout == torch.strided
                    else torch.empty_like(x) for x in whole[0] if isinstance(x, torch.Tensor)]

        name = f"{call.__name__}_{len(self.calls)}"
        several.__name__ = call.__name__
        self.library.define(f"{name}(Tensor[] given) -> Tensor[]")
        torch.library.register_fake(f"{self.space}::{name}", fake, lib=self.library)
        operation = getattr(getattr(torch.ops, self.space), name).default
        self.calls[operation] = several
        found = iter(operation(tensors))
        return tree.tree_unflatten([next(found) if isinstance(x, torch.Tensor) else x for x in whole[0]], whole[1])


# ---- what is left as it was ----------------------------------------------------------------------------------------------

def copied(torch: Any, example: Any) -> Any:
    """The example's tensors anew, so that what a model does in place is not done to the caller's. One that is given twice stays one
    (attention asks whether its query is its key)."""
    made: dict[int, Any] = {}

    def one(x: Any) -> Any:
        if id(x) not in made:
            made[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
        return made[id(x)]

    return mapped(torch, example, one)


def held(torch: Any, module: Any) -> list[Any]:
    """All that a module has: of its submodules, and within lists, tuples, dicts, sets and what else torch knows as such."""
    nodes = importlib.import_module("torch.utils._pytree").SUPPORTED_NODES
    found, seen, left = list[Any](), set[int](), [module]
    while left:
        x = left.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        found.append(x)             # which keeps it alive, and its id its own
        if isinstance(x, torch.nn.Module):
            left += [*vars(x).values(), *x.parameters(recurse=False), *x.buffers(recurse=False), *x.children()]     # torch.jit's
        elif isinstance(x, Mapping):
            left += x.values()
        elif isinstance(x, list | tuple | set | frozenset):
            left += x
        elif type(x) in nodes:
            left += nodes[type(x)].flatten_fn(x)[0]
    return found


def _check_has_shapes(torch: Any, module: Any) -> None:
    """Running a lazy module makes it another one, so that it could not be given back as it was; what is on device meta has no
    place in memory either, by which it could be told from other parameters; and what was made in inference mode has no backward."""
    lazy = torch.nn.parameter.UninitializedTensorMixin
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise InvalidValueError(f"module has {name} on device meta, where nothing is computed or timed: its weights, or "
                                    "module.to_empty(device='cpu'), and then tp.capture would be right")
        if isinstance(tensor, lazy):
            raise InvalidValueError(f"module has {name}, which has no shape before the lazy module's first forward: "
                                    "module(example), once, and then tp.capture would be right")
        if tensor.is_inference() and tensor.requires_grad:
            raise InvalidValueError(f"module has {name}, which was made in torch.inference_mode and can have no gradient: a module "
                                    "made outside of it would be right")


@contextmanager
def preserved(torch: Any, module: Any) -> Iterator[Callable[[], None]]:
    """Parameters, buffers (BatchNorm's means) and tensors that are plain attributes, or within some, have the values afterwards
    that they had, and whenever what this gives is called: a forward may change any of them in place, while it is traced, too.
    Attributes (what a hook has put aside), gradients and random states, the module's own and everybody's, are as they were
    afterwards."""
    _check_has_shapes(torch, module)
    everything = held(torch, module)
    tensors = [x for x in everything if isinstance(x, torch.Tensor)]
    grads = [(x, x.grad, x.requires_grad) for x in tensors if x.is_leaf]
    tensors += [grad for _, grad, _ in grads if grad is not None]
    before = [(x, x.detach().clone()) for x in tensors]
    chances = _chances(torch, everything)

    def same(tensor: Any, old: Any) -> bool:    # a copy of the same may cost what is worth sparing
        return bool(((tensor == old) | ((tensor != tensor) & (old != old))).all())  # noqa: PLR0124 (NaN)

    def restore() -> None:
        with torch.no_grad():
            for tensor, old in before:
                try:
                    if tensor.shape != old.shape:
                        tensor.data = old.clone()
                    elif not same(tensor, old):
                        tensor.data.copy_(old)  # not tensor.copy_: a backward that is still to come asks whether it was written to
                except RuntimeError:            # of a kind that is not compared or written to
                    tensor.data = old.clone()
        for put_back, state in chances:
            put_back(state)

    try:
        with torch.random.fork_rng(), _restored(module):
            yield restore
    finally:
        restore()
        for tensor, grad, requires_grad in grads:
            if tensor.grad_fn is not None:      # a layer wrote to its buffer what has a history
                tensor.detach_()
            tensor.requires_grad_(requires_grad)
            tensor.grad = grad


def _chances(torch: Any, everything: list[Any]) -> list[tuple[Callable[[Any], Any], Any]]:
    """(how to put it back, state) of Python's and NumPy's random numbers and of the module's own generators. torch's own is
    fork_rng's."""
    states: list[tuple[Callable[[Any], Any], Any]] = [(random.setstate, random.getstate())]
    states.append((np.random.set_state, np.random.get_state()))
    for x in everything:
        if isinstance(x, torch.Generator):
            states.append((x.set_state, x.get_state()))
        elif isinstance(x, random.Random):
            states.append((x.setstate, x.getstate()))
        elif isinstance(x, np.random.Generator):
            states.append((partial(setattr, x.bit_generator, "state"), x.bit_generator.state))
        elif isinstance(x, np.random.RandomState):
            states.append((x.set_state, x.get_state()))
    return states


@contextmanager
def _restored(module: Any) -> Iterator[None]:
    """Attributes of all submodules, and what lists, dicts and the like of them hold, as they were: tracing leaves proxies where a
    module holds its parameters twice (LSTM)."""
    before = []
    for part in module.modules():
        inside = {key: copy(value) for key, value in vars(part).items() if isinstance(value, list | dict | set | deque)}
        before.append((vars(part), dict(vars(part)), inside))
    try:
        yield
    finally:
        for now, values, inside in before:
            now.clear()
            now.update(values)
            for key, value in inside.items():
                now[key].clear()
                (now[key].update if isinstance(value, dict | set) else now[key].extend)(value)


def first_words(error: Exception) -> str:
    """What an error says first: torch's go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
