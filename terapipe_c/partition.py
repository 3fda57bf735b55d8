"""What does each stage of a partition hold? Counts of blocks and parameters; checks, and even divisions."""
from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._core import InvalidTypeError, InvalidValueError
from .config import KINDS, GPTConfig, brief, whole

__all__ = ["block_counts", "block_params", "check_partition", "check_slicing", "equal_lengths", "even_partition", "micros_of",
           "updated_of_kind", "updated_params"]


@lru_cache(maxsize=64)
def _counts_before(num_blocks: int) -> NDArray[np.int32]:
    """int32 [blocks + 1, 4]: how many of each kind come before a block."""
    kind = np.array([0, *[1, 2] * ((num_blocks - 2) // 2), 3])
    return np.concatenate([np.zeros((1, 4), np.int32), np.cumsum(kind[:, None] == np.arange(4), axis=0, dtype=np.int32)])


def block_counts(model: GPTConfig, partition: Sequence[tuple[int, int]]) -> NDArray[np.int32]:
    """int32 [stages, 4]: how many embeddings, attentions, FFNs and heads each stage holds."""
    before, bounds = _counts_before(model.num_blocks), np.array(partition, np.intp).reshape(-1, 2)
    return np.ascontiguousarray(before[bounds[:, 1]] - before[bounds[:, 0]])


def check_partition(partition: Any, model: GPTConfig) -> tuple[tuple[int, int], ...]:
    """[(first block, last block + 1), ...] as a tuple, checked to cover the model in order."""
    try:
        entries = list(partition)                              # zip and pairwise of boundaries, too
    except TypeError:
        raise InvalidTypeError(f"partition is {brief(partition)}: a list of (first block, last block + 1) would be right") from None
    at, result = 0, []
    for k, entry in enumerate(entries):
        if not isinstance(entry, (list, tuple, np.ndarray)) or getattr(entry, "ndim", 1) != 1 or len(entry) != 2:
            raise InvalidValueError(f"partition[{k}] is {brief(entry)}: (first block, last block + 1) would be right")
        first, end = (whole(f"partition[{k}]", x, 0) for x in entry)
        if first != at or end <= first:
            raise InvalidValueError(f"partition[{k}] is ({first}, {end}): a stage from block {at} to a later one would be right")
        result.append((first, end))
        at = end
    if at != model.num_blocks:
        raise InvalidValueError(f"partition ends at block {at}: the model has {model.num_blocks} blocks, so {model.num_blocks} "
                                "would be right")
    return tuple(result)


@lru_cache(maxsize=64)
def block_params(model: GPTConfig) -> NDArray[np.float64]:
    """[4] parameters of a block of each kind."""
    return np.array([model.block_params(k) for k in KINDS], np.float64)


def updated_params(model: GPTConfig, counts: NDArray[np.int32]) -> NDArray[np.float64]:
    """[stages] parameters that a stage has gradients of and updates: a tied embedding's at the head."""
    params = counts @ block_params(model)
    if model.tie_weights:
        params += float(model.vocab_size * model.n_embd) * ((counts[:, 3] > 0) * 1 - (counts[:, 0] > 0))
    return np.asarray(params, np.float64)


def updated_of_kind(model: GPTConfig) -> dict[str, int]:
    """Parameters that a block of each kind has gradients of, where a tied embedding and its head are on two stages."""
    tied = model.tie_weights * model.vocab_size * model.n_embd
    moved = {"embedding": -tied, "head": tied}
    return {kind: model.block_params(kind) + moved.get(kind, 0) for kind in KINDS}


def equal_lengths(total: int, parts: int) -> list[int]:
    """``parts`` whole numbers as equal as can be, the longer ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def even_partition(model: GPTConfig, stages: int) -> list[tuple[int, int]]:
    """Layers divided as evenly as can be, embedding first, head last (Megatron's default). More stages than layers: the
    blocks are divided instead."""
    stages = whole("stages", stages)
    if stages > model.num_blocks:
        raise InvalidValueError(f"stages is {stages}: the model has {model.num_blocks} blocks, so at most "
                                f"{model.num_blocks} would be right")
    if stages <= model.n_layer:
        lengths = [2 * n for n in equal_lengths(model.n_layer, stages)]
        lengths[0] += 1
        lengths[-1] += 1
    else:
        lengths = equal_lengths(model.num_blocks, stages)
    ends = list(itertools.accumulate(lengths))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def check_slicing(slicing: Any, batch: int, seq_len: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """A slicing as a tuple, checked to cover ``batch`` sequences of ``seq_len`` tokens. slicing: in the paper's notation,
    [(sequences, [slice lengths]), ...], or an int M (one sequence a micro-batch, M slices)."""
    if not isinstance(slicing, (list, tuple)):
        try:
            operator.index(slicing)
        except TypeError:
            raise InvalidValueError(f"slicing is {brief(slicing)}: a whole number, of slices of each sequence, or a list "
                                    "[(sequences, [slice lengths]), ...] would be right") from None
        parts = whole("slicing", slicing)
        if parts > seq_len:
            raise InvalidValueError(f"slicing is {parts} slices of seq_len = {seq_len} tokens: at most {seq_len} would be right")
        return ((1, tuple(equal_lengths(seq_len, parts))),) * batch
    result = micros_of(slicing) if len(slicing) else ()
    for q, (_, lengths) in enumerate(result):
        if sum(lengths) != seq_len:
            raise InvalidValueError(f"slicing[{q}]'s lengths sum to {sum(lengths)}: seq_len = {seq_len} would be right")
    covered = sum(b for b, _ in result)
    if covered != batch:
        raise InvalidValueError(f"slicing covers {covered} sequences: batch = {batch} would be right")
    return result


def micros_of(slicing: Iterable[Any], most: int = 2**63 - 1) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """[(sequences, [slice lengths]), ...] as a tuple of whole numbers, or an error that names the micro-batch."""
    if not isinstance(slicing, Iterable):
        raise InvalidTypeError(f"slicing is {brief(slicing)}: a list [(sequences, [slice lengths]), ...] would be right")
    result: list[tuple[int, tuple[int, ...]]] = []
    last: Any = None
    for q, entry in enumerate(slicing):
        if q and entry is last:                                # 65536 micro-batches are mostly one, that many times
            result.append(result[-1])
            continue
        if not isinstance(entry, (list, tuple)) or len(entry) != 2 or isinstance(entry[1], str) \
                or not isinstance(entry[1], Iterable) or getattr(entry[1], "ndim", 1) != 1:
            raise InvalidValueError(f"slicing[{q}] is {brief(entry)}: (sequences, [slice lengths]) would be right")
        size, lengths = entry[0], tuple(entry[1])
        if not all(type(n) is int and 0 < n <= most for n in (size, *lengths)):        # names for whole() take as long again
            size = whole(f"slicing[{q}]'s micro-batch", size, most=most)
            lengths = tuple(whole(f"slicing[{q}]'s slice {i}", n, most=most) for i, n in enumerate(lengths))
        result.append((size, lengths))
        last = entry
    if not result:
        raise InvalidValueError("slicing is empty: at least one micro-batch, (sequences, [slice lengths]), would be right")
    return tuple(result)
