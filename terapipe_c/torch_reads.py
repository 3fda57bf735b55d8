"""Lets a trace, whose tensors hold no data, follow a model whose Python asks tensors for numbers: the answers are recorded in a run
on data and repeated to the trace."""

from __future__ import annotations

import importlib
import sys
import threading
from collections import UserDict
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy, deepcopy
from dataclasses import fields, is_dataclass
from itertools import islice
from types import FrameType
from typing import Any

import numpy as np

__all__ = ["Reads", "apart", "mapped", "tensors_of"]


class Reads:
    """The numbers, and the shapes that numbers say, that a model asks for on its way through an example: whether a mask is causal,
    which tokens an expert has."""

    def __init__(self, torch: Any) -> None:
        self.torch, self.pytree = torch, importlib.import_module("torch.utils._pytree")
        self.noted: list[tuple[Any, Any]] = []      # who asked what of tensors of what shapes; the answer
        self.told = 0       # how many of them a trace has had
        self.any = False    # whether numbers were asked for at all: a torch.autograd.Function's result alone is none
        self.within = False     # a torch.autograd.Function, whose own questions are answered with its result

        tensor = torch.Tensor
        names = "__bool__ __int__ __float__ __index__ __complex__ __contains__ __format__ item tolist equal allclose is_nonzero"
        self.numbers = {torch.equal, torch.allclose, torch.is_nonzero, *(getattr(tensor, name) for name in names.split())}
        self.places = {torch.nn.functional.one_hot, torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence,
                       torch.nn.functional.ctc_loss}    # whose own intermediate result is as long as lengths that are numbers
        for name in "nonzero argwhere masked_select bincount unique unique_consecutive".split():
            self.places |= {getattr(torch, name), getattr(tensor, name)}
        self.repeats = {torch.repeat_interleave, tensor.repeat_interleave}
        self.layers = {getattr(torch._VF, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
        self.indexing = {tensor.__getitem__, tensor.__setitem__}
        self.makers = {getattr(torch, name) for name in "arange zeros ones full empty rand randn randint eye".split()}
        self.makers |= {getattr(tensor, f"new_{name}") for name in "zeros ones full empty".split()}

    def is_place(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether numbers of a tensor say the shape of what a call gives."""
        tensor = self.torch.Tensor
        if function == tensor.__getitem__:
            return any(map(self._is_mask, args[1] if isinstance(args[1], tuple) else [args[1]]))
        if function == self.torch.where:
            return len(args) + len(kwargs) == 1
        if function in self.repeats:
            return any(isinstance(x, tensor) for x in [*args[1:2], kwargs.get("repeats")]) or len(args) + len(kwargs) == 1
        if function in self.layers:     # of a packed sequence: how many of each step
            return isinstance(args[1], tensor) and args[1].dtype == self.torch.int64
        return function in self.places

    def _is_mask(self, x: Any) -> bool:
        if isinstance(x, list):
            return any(isinstance(part, bool) or self._is_mask(part) for part in x)
        return getattr(x, "dtype", None) in (self.torch.bool, self.torch.uint8, np.bool_)

    def _plain(self, function: Any, given: Any, number: Callable[[Any], Any]) -> Any:
        """(args, kwargs) with number(x) for each x of one whole number that says where a slice ends or how much is made."""
        torch, tree_map = self.torch, self.pytree.tree_map
        kinds = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8

        def one(x: Any) -> Any:
            whole = isinstance(x, torch.Tensor) and x.dim() == 0 and x.dtype in kinds
            return number(x) if whole else x

        def end(x: Any) -> Any:
            return slice(one(x.start), one(x.stop), one(x.step)) if isinstance(x, slice) else x

        if function in self.indexing:
            return (given[0][0], tree_map(end, given[0][1]), *given[0][2:]), given[1]
        return tree_map(one, given) if function in self.makers else given

    def mode(self, made: Callable[[Any, bool, Callable[..., Any], Any], Any]) -> AbstractContextManager[Any]:
        """Within it made(key, whether a tensor is given, function, what it is given) answers what is asked."""
        def run(mode: Any, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
            if self.within:
                self.any = self.any or function in self.numbers or self.is_place(function, args, kwargs or {})
                return function(*args, **(kwargs or {}))
            frame = sys._getframe(1)

            def number(x: Any) -> Any:
                called = self.torch.Tensor.__index__
                return made(self.key(frame, called, [x]), False, called, ((x,), {}))

            args, kwargs = given = self._plain(function, (args, kwargs or {}), number)
            place = self.is_place(function, args, kwargs)
            if not place and function not in self.numbers:
                return function(*args, **kwargs)
            return made(self.key(frame, function, given), place, function, given)

        own: AbstractContextManager[Any] = type("Reading", (self.torch.overrides.TorchFunctionMode,), {"__torch_function__": run})()
        return own

    def key(self, frame: FrameType, function: Any, given: Any) -> Any:
        """Shapes as words: of those that a trace does not know, == would ask."""
        return self._asker(frame), function, [(str(tuple(x.shape)), x.dtype) for x in tensors_of(self.torch, given)]

    def _asker(self, frame: FrameType | None) -> list[Any]:
        """Where in the code: the place itself, and those in the model's own code that led there."""
        found = list[Any]()
        while frame is not None:
            name = str(frame.f_globals.get("__name__"))
            if name.startswith(f"{__package__}."):
                if found:
                    break
            elif not found or not name.startswith("torch."):
                # not f_lasti, which is another one once Python has made the same call a faster one
                places = islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
                found.append((frame.f_code, next(places, None)))
            frame = frame.f_back
        return found

    def note(self, key: Any, place: bool, function: Callable[..., Any], given: Any) -> Any:
        value = function(*given[0], **given[1])
        self.any = True
        self.noted.append((key, self._cut(value) if place else deepcopy(value)))    # a list may be written to
        return value

    def note_function(self, call: Callable[..., Any], tensors: list[Any]) -> Any:
        """A torch.autograd.Function is one operation, whatever it asks for."""
        outer, self.within = self.within, True
        try:
            value = call(*tensors)
        finally:
            self.within = outer
        if not outer:
            self.noted.append((self.key(sys._getframe(1), call.__name__, tensors), self._cut(value)))
        return value

    def _cut(self, value: Any) -> Any:
        return mapped(self.torch, value, lambda x: x.detach())

    @contextmanager
    def telling(self, leaf: Callable[..., Any]) -> Iterator[None]:
        """leaf(call, tensors, known): of one operation."""
        def tell(key: Any, place: bool, function: Callable[..., Any], given: Any) -> Any:
            found = self._found(key)
            if not found:
                return function(*given[0], **given[1])
            if not place:
                return deepcopy(found[0])
            call, tensors = apart(self.pytree, function.__name__.strip("_"), function, given, (self.torch.Tensor,))
            return leaf(call, tensors, self.pytree.tree_flatten(found[0]))

        fake = importlib.import_module("torch._subclasses.fake_tensor").FakeTensor
        own, own_thread = fake.tolist, threading.get_ident()

        def listed(x: Any) -> Any:
            """A tensor without data asks for its numbers one by one."""
            return self.torch.Tensor.tolist(x) if threading.get_ident() == own_thread else own(x)

        self.told, fake.tolist = 0, listed
        try:
            with self.mode(tell):
                yield
        finally:
            fake.tolist = own

    def tell_function(self, leaf: Callable[..., Any], call: Callable[..., Any], tensors: list[Any]) -> Any:
        found = self._found(self.key(sys._getframe(1), call.__name__, tensors))
        return leaf(call, tensors, self.pytree.tree_flatten(found[0]) if found else None)

    def _found(self, key: Any) -> list[Any]:
        """[the answer], or none. What a model does not ask while it is traced is passed over."""
        for k in range(self.told, len(self.noted)):
            if self.noted[k][0] == key:
                self.told = k + 1
                return [self.noted[k][1]]
        return []


def apart(pytree: Any, name: str, function: Any, given: Any, kinds: tuple[type, ...]) -> tuple[Callable[..., Any], list[Any]]:
    """(the function of these alone, what is of these kinds) of a function and all that it is given, (args, kwargs)."""
    flat, form = pytree.tree_flatten(given)
    places = [k for k, x in enumerate(flat) if isinstance(x, kinds)]

    def call(*tensors: Any) -> Any:
        whole = list(flat)
        for k, tensor in zip(places, tensors, strict=True):
            whole[k] = tensor
        args, kwargs = pytree.tree_unflatten(whole, form)
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call, [flat[k] for k in places]


def tensors_of(torch: Any, value: Any) -> list[Any]:
    found = list[Any]()

    def met(tensor: Any) -> Any:
        found.append(tensor)
        return tensor

    mapped(torch, value, met)
    return found


def mapped(torch: Any, value: Any, made: Callable[[Any], Any]) -> Any:
    """The same with made(tensor) for each tensor, in slices, and in dataclasses and mappings that torch does not know, too; torch's
    named results stay what they are."""
    tree_map, others = importlib.import_module("torch.utils._pytree").tree_map, dict[int, tuple[Any, Any]]()

    def one(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return made(x)
        if isinstance(x, slice):
            return slice(one(x.start), one(x.stop), one(x.step))
        if id(x) in others:     # it holds itself, or is held twice
            return others[id(x)][1]
        if isinstance(x, MutableMapping):
            return mapping(x)
        if not is_dataclass(x) or isinstance(x, type):
            return x
        other = copy(x)
        others[id(x)] = x, other
        for field in fields(x):
            if hasattr(x, field.name):
                object.__setattr__(other, field.name, tree_map(one, getattr(x, field.name)))    # of a frozen one, too
        return other

    def mapping(x: Any) -> Any:
        known = isinstance(x, dict | UserDict)
        other = copy(x) if known else x
        others[id(x)] = x, other
        parts = [(key, part, tree_map(one, part)) for key, part in x.items()]
        if not known:   # copy() would share what it holds its parts in, and the caller's would be written to
            memo = {id(key): key for key, _, _ in parts} | {id(part): new for _, part, new in parts}
            try:
                other = deepcopy(x, memo)
            except TypeError:   # it holds what is not copied, such as a lock
                return x
            others[id(x)] = x, other
        for key, _, new in parts:
            other[key] = new
        return other

    return tree_map(one, value)
