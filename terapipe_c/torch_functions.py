"""torch.autograd.Functions as single operations, while ``tp.capture`` traces a model or runs it."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from .torch_reads import apart

__all__ = ["functions_as_operations"]


class _Applying:
    """What becomes of Function.apply. leaf, kinds, on_data: of :func:`functions_as_operations`."""

    def __init__(self, torch: Any, leaf: Callable[[Callable[..., Any], list[Any]], Any], kinds: tuple[type, ...],
                 on_data: bool) -> None:
        self.torch, self.leaf, self.kinds, self.on_data = torch, leaf, kinds, on_data
        self.pytree, self.own_thread = importlib.import_module("torch.utils._pytree"), threading.get_ident()
        self.base: Any = importlib.import_module("torch.autograd.function")._SingleLevelFunction
        checkpoints: Any = importlib.import_module("torch.utils.checkpoint")
        self.again = checkpoints.CheckpointFunction
        self.inputs = getattr(checkpoints, "_NoopSaveInputs", None)  # of PyTorch 2.11 and before: what keeps a checkpoint's inputs
        self.own_calls = 0                                      # of torch's apply that go on
        self.begun: tuple[Any, bool] | None = None              # the Function that torch's apply looks into, and were gradients on

    @property
    def elsewhere(self) -> bool:
        return threading.get_ident() != self.own_thread

    def torchs(self, cls: Any, *args: Any, **kwargs: Any) -> Any:
        """What torch does: ``cls.apply``."""
        above: Any = super(self.base, cls)
        return above.apply(*args, **kwargs)

    def one(self, cls: Any, *args: Any, **kwargs: Any) -> Any:
        """The same as a part of an operation, which is looked into no further."""
        mine = not self.elsewhere
        self.own_calls += mine
        try:
            return self.torchs(cls, *args, **kwargs)
        finally:
            self.own_calls -= mine

    def applied(self, cls: Any, *args: Any, **kwargs: Any) -> Any:
        if self.elsewhere:
            return self.torchs(cls, *args, **kwargs)
        if cls is self.again:
            return args[0](*args[2:])  # behind the function: whether the random state is kept
        if cls is self.inputs:
            return self.torch.empty(0)      # without a gradient: then a checkpoint takes itself to have nothing to do
        return self.leaf(*apart(self.pytree, cls.__name__, partial(self.one, cls), (args, kwargs), self.kinds))

    def applied_or_transformed(self, cls: Any, *args: Any, **kwargs: Any) -> Any:
        """torch.func's transforms have Functions of their own, which come to ``applied``."""
        if self.elsewhere or self.torch._C._are_functorch_transforms_active():
            return self.torchs(cls, *args, **kwargs)
        return self.applied(cls, *args, **kwargs)

    def looked_up(self, cls: Any, name: str) -> Any:
        """An attribute of a Function. torch's apply asks for _backward_cls, and then for the forward that it calls, without
        gradients; behind it for setup_context, where there is one."""
        value = type.__getattribute__(cls, name)
        if name not in {"_backward_cls", "forward"} or self.elsewhere or self.own_calls:
            return value
        begun, self.begun = self.begun, None
        if name == "_backward_cls":
            self.begun = cls, self.torch.is_grad_enabled()
            return value
        return value if begun is None or begun[0] is not cls else partial(self._instead_of_forward, cls, value, begun[1])

    def _instead_of_forward(self, cls: Any, forward: Callable[..., Any], gradients: bool, *given: Any) -> Any:
        split = type.__getattribute__(cls, "setup_context") is not self.base.setup_context
        context, args = ((), given) if split else (given[:1], given[1:])
        call = partial(forward, *context) if self.on_data else partial(self.one, cls)
        with nullcontext() if self.on_data else self._gradients(gradients):
            return self.leaf(*apart(self.pytree, cls.__name__, call, (args, {}), self.kinds))

    @contextmanager
    def _gradients(self, on: bool) -> Iterator[None]:
        """Gradients on or off, which a trace is not to note."""
        def turn(on: bool) -> None:
            with self.torch._C.DisableTorchFunction():
                self.torch._C._set_grad_enabled(on)

        before = self.torch.is_grad_enabled()
        turn(on)
        try:
            yield
        finally:
            turn(before)


@contextmanager
def functions_as_operations(torch: Any, leaf: Callable[[Callable[..., Any], list[Any]], Any], kinds: tuple[type, ...],
                            on_data: bool = False) -> Iterator[None]:
    """A torch.autograd.Function is one operation: what its forward does without gradients is no part of the graph, and its own
    backward is. leaf(call, tensors) is asked instead, where a call of these alone has the Function's other arguments already. But a
    torch.utils.checkpoint is as if there were none: what is made again is a planner's choice. on_data: leaf makes the call at once.

    Function.apply may have been bound to a name long ago. Up to PyTorch 2.13 it asks ``_SingleLevelFunction.apply``, whoever holds
    it; later it is C's own, which asks the class for its forward.
    """
    checkpoints: Any = importlib.import_module("torch.utils.checkpoint")
    hooks, function = checkpoints._checkpoint_hook, torch.autograd.Function
    applying, torchs = _Applying(torch, leaf, kinds, on_data), vars(function)["apply"]
    lookup: Any = type(function)

    def hooked(frame: Any) -> Any:
        """What is saved within one within another makes torch.export take all that comes for without gradients."""
        return hooks(frame) if applying.elsewhere else nullcontext()

    def bound(method: Callable[..., Any]) -> Any:
        return classmethod(lambda cls, *args, **kwargs: method(cls, *args, **kwargs))

    is_cs = not isinstance(torchs, classmethod)
    applying.base.apply = bound(applying.applied)
    if is_cs:
        function.apply = bound(applying.applied_or_transformed)
        lookup.__getattribute__ = lambda cls, name: applying.looked_up(cls, name)
    checkpoints._checkpoint_hook = hooked
    try:
        yield
    finally:
        del applying.base.apply
        if is_cs:
            function.apply = torchs
            del lookup.__getattribute__
        checkpoints._checkpoint_hook = hooks
