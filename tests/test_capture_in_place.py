"""What tp.capture says of forwards that write to views and buffers, and how it leaves examples and models of any make. Skipped
where torch is not installed."""

import collections.abc
import dataclasses
import threading

import pytest
from test_capture import torch

import terapipe_c as tp

__all__ = ["torch"]


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
    """A mapping's tensors had become None, the caller's; a dataclass that leads back to itself was a RecursionError."""
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
