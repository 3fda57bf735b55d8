"""Runs a call again and again, each time with another of its requests for host memory refused: tests/test_host_memory.py."""
import ctypes
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import terapipe_c as tp
from terapipe_c import _core
from terapipe_c.engine import boundaries, cut, dimensions, saves_bytes

SHIM = ctypes.CDLL(os.environ["LD_PRELOAD"])


def outcomes(call: Callable[[], Any], library: bytes, least: int = 0, callocs: bool = False) -> list[Any]:
    """What each refusal of a request, of at least so many bytes, or of calloc's alone, led to: the error's text, or the result."""
    found: list[Any] = []
    for n in itertools.count(1):
        SHIM.refuse_at(ctypes.c_long(n), library, ctypes.c_size_t(least), callocs)
        try:
            outcome = call()
        except MemoryError as error:
            outcome = str(error)
        ended = not SHIM.refused()
        SHIM.refuse_at(ctypes.c_long(0), library, ctypes.c_size_t(0), False)
        if ended:
            return found
        found.append(outcome)
    raise AssertionError


def calls() -> dict[str, Callable[[], Any]]:
    """Of what is counted before anything is taken, and of results of several arrays."""
    model = tp.GPTConfig(n_layer=4, n_head=2, n_embd=16, vocab_size=64, block_size=32)
    slicing, stages = [(1, [20, 12])] * 2, [(0, 4), (4, 10)]
    kinds = [block.kind for block in model.blocks]
    shape, saves = dimensions(model), saves_bytes([kind == "ffn" for kind in kinds], [kind == "attention" for kind in kinds])
    program = tp.schedules.one_f_one_b(2, 2, slices=2).split(pending=0).save_memory(b"\1\1", b"\1\1").lower(True)
    whole = tp.schedules.bpipe(4, 8).lower(True)
    ones, eight = cut([(1, [32])] * 8), np.ones(model.num_blocks)
    engine = program, shape, boundaries(stages), cut(slicing)
    high = 2 * max(_core.rank_memory(*engine, saves=saves))
    nodes = {name: np.linspace(1.0, 2.0, 6) for name in (
        "fwd_s", "bwd_s", "recompute_s", "activation_bytes", "param_bytes", "optimizer_bytes")}

    def of(plan: Any) -> Any:
        return [getattr(plan, name).tolist() for name in ("recompute", "swap_bytes", "stage_time_s", "peak_memory_bytes")]

    return {
        "rank_memory": lambda: _core.rank_memory(*engine, saves=saves),
        "guests": lambda: _core.rank_memory(whole, shape, [0, 2, 4, 6, 10], ones),
        "lent_bytes": lambda: _core.lent_bytes(*engine, saves=saves),
        "swap_bytes": lambda: _core.swap_bytes(*engine, saves=saves),
        "stage_memory": lambda: _core.stage_memory(shape, cut(slicing), 0, 4, 2, 1, None, None, saves),
        "guest_bytes": lambda: _core.guest_bytes(shape, 0, 4, 1, 32, None, None, saves),
        "cut_stages": lambda: _core.cut_stages(program, shape, cut(slicing), high, eight, saves=saves),
        "cut_least": lambda: _core.cut_least(program, shape, cut(slicing), 0, high, 0.0, saves=saves),
        "stuck": lambda: whole._stuck(2, False).tolist(),
        "dawnpiper": lambda: of(tp.planners.dawnpiper(nodes, 2, 40.0, micro_batches=4)),
    }


def main() -> None:
    for name, call in calls().items():
        right = call()
        found = outcomes(call, b"terapipe_c/_core")
        told = [outcome for outcome in found if isinstance(outcome, str)]
        assert all(told), f"{name}: one of {told} has no words"
        assert told and all(outcome == right for outcome in found if not isinstance(outcome, str)), (name, right, found)
        print(name, len(told), "of", len(found))


if __name__ == "__main__":
    sys.exit(main())
