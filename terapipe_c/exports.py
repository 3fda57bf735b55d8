"""Exports a plan to Megatron-LM's flags and to torch.distributed.pipelining's CSV; a plan that they cannot express is refused.

Flags as in Megatron-LM's arguments and Megatron Core's user guide ("Custom Pipeline Model Parallel Layout": E embedding, t
decoder layer, L loss, stages split by |, all ranks' first chunks before their second ones). Its defaults are said where they
would be another training: both dropouts are 0.1 there; the vocabulary is the tokenizer's, made divisible by 128
(vocab_size_with_padding of build_tokenizer.py); and it refuses GELU without biases while it fuses both (TransformerConfig).
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from ._core import InvalidValueError
from .schedules import OPS, Program, interleaved, one_f_one_b

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["megatron_flags", "torch_csv"]


def megatron_flags(plan: Plan) -> str:
    """One line for a shell. Megatron takes the number of replicas from the world size: start ``plan.num_devices`` processes. The
    tokenizer, of as many tokens as the model's vocabulary or fewer, is yours to name (``--tokenizer-type NullTokenizer`` adds one
    token to its ``--vocab-size``), and so is the optimizer. Without biases its LayerNorms still have theirs, and its GELU is the
    exact one instead of tanh's."""
    size = _one_size("Megatron", plan)
    if plan.chunks > 1 and plan.ranks == 1:
        raise InvalidValueError(f"Megatron interleaves on two ranks or more: a plan without chunks, not {plan.chunks} on one rank, "
                                "would be right")
    if plan.ranks > 1 or plan.schedule == "pipedream":      # one rank has no order to miss, but updates may be more than a step's
        _check_order(plan)
    if any(plan.swap):
        raise InvalidValueError("Megatron does not swap activations of single blocks between pipeline stages: a plan without "
                                "swap would be right")
    m = plan.model
    flags: dict[str, object] = {
        "pipeline-model-parallel-size": plan.ranks, "pipeline-model-parallel-layout": "|".join(_layout(plan)),
        "micro-batch-size": size, "global-batch-size": plan.batch, "num-layers": m.n_layer, "hidden-size": m.n_embd,
        "num-attention-heads": m.n_head, "seq-length": plan.seq_len, "max-position-embeddings": m.block_size,
        "make-vocab-size-divisible-by": m.vocab_size, "attention-dropout": 0, "hidden-dropout": 0,
        **_recomputation(plan)}  # fmt: skip
    text = [f"--{name} {shlex.quote(str(value))}" for name, value in flags.items()]
    text += [] if m.tie_weights else ["--untie-embeddings-and-output-weights"]
    text += [] if m.bias else ["--disable-bias-linear", "--no-bias-gelu-fusion"]
    text += ["--use-distributed-optimizer"] if plan.shard_optimizer else []
    return " ".join(text + (["--bf16"] if plan.dtype == "bf16" else []))


def _one_size(target: str, plan: Plan) -> int:
    """Sequences of every micro-batch, whole ones and all alike."""
    if any(len(lengths) > 1 for _, lengths in plan.slicing):
        raise InvalidValueError(f"{target} has no token slices: a plan with one slice a micro-batch would be right")
    sizes = {b for b, _ in plan.slicing}
    if len(sizes) > 1:
        raise InvalidValueError(f"{target} has micro-batches of one size, not of {sorted(sizes)}")
    return sizes.pop()


def _check_order(plan: Plan) -> None:
    """Megatron's two schedules, each gradient of weights directly behind that of the input. Of whole sequences seq1f1b is 1f1b. The
    program has to be what the plan calls it: a flag would have Megatron train in another order, with other memory."""
    if plan.schedule not in ("1f1b", "seq1f1b", "interleaved") or (plan.schedule == "interleaved" and plan.chunks == 1):
        one, more = (" of one chunk", " of two or more") if plan.schedule == "interleaved" else ("", "")
        raise InvalidValueError(f"Megatron has no schedule {plan.schedule}{one}: 1f1b or interleaved{more} would be right")
    for rank in range(plan.ranks):
        code = [op for op in plan.program.instructions(rank)[["op", "stage", "micro"]].tolist() if OPS[op[0]] in "FBIW"]
        for (op, *unit), after in zip(code, [*code[1:], None], strict=True):
            if OPS[op] == "I" and after != (OPS.index("W"), *unit):
                raise InvalidValueError(f"Megatron has no gradients of weights that wait, as those of stage {unit[0]}, micro-batch "
                                        f"{unit[1]} do: planner='uniform' with these stages as its partition would be right")
    micros = len(plan.slicing)
    same = one_f_one_b(plan.ranks, micros) if plan.chunks == 1 else interleaved(plan.ranks, micros, plan.chunks)
    for rank in range(plan.ranks):
        for own, theirs in zip(*(_computed(program, rank) for program in (plan.program, same)), strict=False):
            if own != theirs:
                raise InvalidValueError(f"Megatron has no such order as that of rank {rank}, which computes {own} where "
                                        f"{plan.schedule} computes {theirs}: the schedule of its program would be right")


def _computed(program: Program, rank: int) -> list[str]:
    """Forwards and backwards: stage, F or B, micro-batch."""
    code = program.instructions(rank)[["op", "stage", "micro"]].tolist()
    return [f"{stage}{'B' if OPS[op] == 'I' else OPS[op]}{micro}" for op, stage, micro in code if OPS[op] in "FBI"]


def _layout(plan: Plan) -> list[str]:
    words = []
    for first, end in plan.stages:
        blocks = plan.model.blocks[first:end]
        if blocks[0].kind == "ffn" or blocks[-1].kind == "attention":
            raise InvalidValueError(f"Megatron has no stage boundary inside a layer: the stage {blocks[0].name} to "
                                    f"{blocks[-1].name} has one")
        layers = sum(b.kind == "ffn" for b in blocks)
        words.append(("E" if first == 0 else "") + "t" * layers + ("L" if end == plan.model.num_blocks else ""))
    return words


def _recomputation(plan: Plan) -> dict[str, object]:
    """Megatron recomputes whole layers: all, or the first N of every stage. (Layers are alike: which N of a stage's it are
    changes neither time nor memory.)"""
    counts, layers = [], []
    for first, end in plan.stages:
        kinds = [(b, bool(again)) for b, again in zip(plan.model.blocks[first:end], plan.recompute[first:end], strict=False)]
        for block, again in kinds:
            if again and block.layer < 0:
                raise InvalidValueError(f"Megatron recomputes decoder layers alone, not the {block.name}")
        once = {b.layer for b, again in kinds if again and b.kind == "attention"}
        twice = {b.layer for b, again in kinds if again and b.kind == "ffn"}
        if once != twice:
            raise InvalidValueError(f"Megatron recomputes whole layers: of layer {min(once ^ twice)} the plan recomputes one block")
        counts.append(len(once))
        layers.append(len({b.layer for b, _ in kinds if b.layer >= 0}))
    if not any(counts):
        return {}
    full = {"recompute-granularity": "full"}
    if counts == layers:
        return {**full, "recompute-method": "uniform", "recompute-num-layers": 1}
    most = max(counts)
    if plan.chunks > 1 or any(count != min(most, n) for count, n in zip(counts, layers, strict=True)):
        raise InvalidValueError(f"Megatron recomputes as many layers of every stage: the plan recomputes {counts} of {layers}")
    return {**full, "recompute-method": "block", "recompute-num-layers": most}


def torch_csv(plan: Plan) -> str:
    """A line a rank. I with its W directly behind it is B there: torch splits a backward at a price (two passes over its graph),
    which this engine does not pay."""
    _one_size("torch.distributed.pipelining", plan)
    for word, blocks in (("recomputation", plan.recompute), ("swap", plan.swap)):
        if any(blocks):
            first = next(b.name for b, saves in zip(plan.model.blocks, blocks, strict=False) if saves)
            raise InvalidValueError(f"torch.distributed.pipelining has no {word} in a schedule, which the plan has from the block "
                                    f"{first} on: a plan without {word} would be right")
    return re.sub(r"\b(\d+)I(\d+),\1W\2\b", r"\1B\2", str(plan.program.to_csv()))
