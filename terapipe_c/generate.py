"""Text from a trained model: NumPy alone, one token at a time with a key-value cache, on one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ._core import InvalidTypeError, InvalidValueError
from .checkpoint import Checkpoint, check_params
from .config import GPTConfig, brief, real, whole
from .interop import Imported, own_model

__all__ = ["generate", "logits"]

Array = NDArray[np.float32]


@overload
def generate(params: Mapping[str, Array] | Checkpoint | Imported, model: GPTConfig, prompt: str, n: int = 256,
             temperature: float = 0.8, top_k: int | None = None, seed: int = 0) -> str: ...
@overload
def generate(params: Mapping[str, Array] | Checkpoint | Imported, model: GPTConfig, prompt: bytes,  # type: ignore[overload-overlap]
             n: int = 256, temperature: float = 0.8, top_k: int | None = None, seed: int = 0) -> bytes: ...
@overload
def generate(params: Mapping[str, Array] | Checkpoint | Imported, model: GPTConfig, prompt: Sequence[int] | NDArray[Any],
             n: int = 256, temperature: float = 0.8, top_k: int | None = None, seed: int = 0) -> NDArray[np.int32]: ...
@overload
def generate(params: Checkpoint | Imported, prompt: str, *, n: int = 256, temperature: float = 0.8, top_k: int | None = None,
             seed: int = 0) -> str: ...
@overload
def generate(params: Checkpoint | Imported, prompt: bytes, *, n: int = 256,  # type: ignore[overload-overlap]
             temperature: float = 0.8, top_k: int | None = None, seed: int = 0) -> bytes: ...
@overload
def generate(params: Checkpoint | Imported, prompt: Sequence[int] | NDArray[Any], *, n: int = 256, temperature: float = 0.8,
             top_k: int | None = None, seed: int = 0) -> NDArray[np.int32]: ...
def generate(  # type: ignore[misc]  # of a checkpoint the prompt is the second argument, or has its name
    params: Any,
    model: Any = None,
    prompt: Any = None,
    n: int = 256,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> Any:
    """Continue a prompt by n tokens; gives those n tokens alone, in the prompt's type: ``generate(checkpoint, prompt)``, or
    ``generate(params, model, prompt)``.

    Args:
        params: {Hugging Face name: float32 array}, or what `load_checkpoint(path)` or `import_hf(folder)` gives, whose params are
            taken.
        model: the GPTConfig; not needed of what has one.
        prompt: bytes or str (for models of bytes) or token numbers; at least one token. Only its last block_size matter.
        temperature: 0 takes the likeliest token each time.
        top_k: draw among the k likeliest only.
        seed: same seed, same text.

    Past block_size the window moves on by half and is read again, since positions are learned.
    """
    model, prompt = _model_and_prompt(params, model, prompt)
    n, temperature, seed = whole("n", n, 0), real("temperature", temperature, zero=True), whole("seed", seed, 0, 2**64 - 1)
    top_k = None if top_k is None else whole("top_k", top_k)
    params = check_params("params", getattr(params, "params", params), model)
    tokens = _tokens(prompt, model.vocab_size)
    rng = np.random.Generator(np.random.Philox(seed))
    cache = _Cache(params, model)
    window = tokens[-model.block_size :]
    out: list[int] = []
    row = cache.forward(window) if n else None
    while row is not None and len(out) < n:
        token = _draw(row, temperature, top_k, rng)
        out.append(token)
        window = [*window, token]
        if len(window) > model.block_size:
            window = window[-max(1, model.block_size // 2) :]
            cache.length = 0
            row = cache.forward(window)
        else:
            row = cache.forward([token])
    if isinstance(prompt, (str, bytes)):
        text = bytes(out)
        return text if isinstance(prompt, bytes) else text.decode("utf-8", errors="replace")
    return np.array(out, np.int32)


def _model_and_prompt(params: Any, model: Any, prompt: Any) -> tuple[Any, Any]:
    if prompt is None and not hasattr(model, "block_size"):  # generate(checkpoint, prompt)
        model, prompt = None, model
    if model is None:
        model = getattr(params, "model", None)
    if not hasattr(model, "block_size"):
        given = "missing" if model is None else brief(model)
        raise InvalidTypeError(f"model is {given}: the GPTConfig that params are of would be right; a checkpoint has its own, and "
                               "takes prompt alone (and n by name)")
    own = getattr(params, "model", None)
    return (model if own is None else own_model(model, own)), prompt


def logits(params: Mapping[str, Array] | Checkpoint, model: Any, tokens: Sequence[int] | NDArray[Any]) -> Array:
    """float32 [vocab_size]: the unnormalised log-probabilities of the token after `tokens` (at most block_size of them)."""
    params, tokens = check_params("params", getattr(params, "params", params), model), _tokens(tokens, model.vocab_size)
    if len(tokens) > model.block_size:
        raise InvalidValueError(f"{len(tokens)} tokens; a window has 1 .. {model.block_size}")
    return _Cache(params, model).forward(tokens)


class _Cache:
    """Keys and values [H, length, D] of each layer, and the forward pass that extends them."""

    def __init__(self, params: Mapping[str, Array], model: Any) -> None:
        self.params, self.model, self.length = params, model, 0
        heads, dim = model.n_head, model.n_embd // model.n_head
        self.keys = np.zeros((model.n_layer, heads, model.block_size, dim), np.float32)
        self.values = np.zeros_like(self.keys)

    def linear(self, x: Array, name: str) -> Array:
        y: Array = x @ self.params[f"{name}.weight"]
        return np.add(y, self.params[f"{name}.bias"]) if self.model.bias else y

    def norm(self, x: Array, name: str) -> Array:
        x = x - x.mean(axis=-1, keepdims=True)
        y: Array = np.divide(x, np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)) * self.params[f"{name}.weight"]
        return np.add(y, self.params[f"{name}.bias"]) if self.model.bias else y

    def forward(self, tokens: Sequence[int]) -> Array:
        """Append tokens; the logits after the last of them."""
        start, end = self.length, self.length + len(tokens)
        x = self.params["transformer.wte.weight"][np.asarray(tokens)] + self.params["transformer.wpe.weight"][start:end]
        for layer in range(self.model.n_layer):
            head = f"transformer.h.{layer}."
            x = x + self.attention(self.norm(x, head + "ln_1"), layer, start, end)
            x = x + self.linear(_gelu(self.linear(self.norm(x, head + "ln_2"), head + "mlp.c_fc")), head + "mlp.c_proj")
        self.length = end
        out = self.norm(x[-1:], "transformer.ln_f")
        weight = self.params["transformer.wte.weight" if self.model.tie_weights else "lm_head.weight"]
        return np.asarray((out @ weight.T)[0], np.float32)

    def attention(self, x: Array, layer: int, start: int, end: int) -> Array:
        model = self.model
        heads, dim, head = model.n_head, model.n_embd // model.n_head, f"transformer.h.{layer}.attn."
        qkv = self.linear(x, head + "c_attn").reshape(end - start, 3, heads, dim).transpose(1, 2, 0, 3)
        self.keys[layer, :, start:end], self.values[layer, :, start:end] = qkv[1], qkv[2]
        scores = qkv[0] @ self.keys[layer, :, :end].transpose(0, 2, 1) / math.sqrt(dim)
        scores = np.where(np.arange(end) <= np.arange(start, end)[:, None], scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = (weights @ self.values[layer, :, :end]).transpose(1, 0, 2).reshape(end - start, model.n_embd)
        return self.linear(np.ascontiguousarray(mixed), head + "c_proj")


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x))), np.float32)


def _draw(row: Array, temperature: float, top_k: int | None, rng: np.random.Generator) -> int:
    if not np.isfinite(row).all():
        raise InvalidValueError("params give logits that are not finite: those of a training that did not diverge would be right")
    if temperature == 0:
        return int(row.argmax())
    with np.errstate(over="ignore"):    # the likeliest is 0 whatever the temperature
        scaled = (row.astype(np.float64) - row.max()) / temperature
    if top_k is not None and top_k < len(scaled):
        scaled[scaled < np.partition(scaled, -top_k)[-top_k]] = -np.inf
    weights = np.exp(scaled).cumsum()
    return int(np.searchsorted(weights, rng.random() * weights[-1], side="right"))


def _tokens(prompt: str | bytes | Sequence[int] | NDArray[Any], vocab_size: int) -> list[int]:
    if isinstance(prompt, (str, bytes)):
        if vocab_size > 256:
            raise InvalidValueError(
                f"the vocabulary has {vocab_size} tokens, so text needs the tokenizer it was trained with: give tokens"
            )
        try:
            prompt = prompt.encode() if isinstance(prompt, str) else prompt
        except UnicodeEncodeError as error:
            raise InvalidValueError(f"prompt is no text: its character {error.start} has no UTF-8") from None
    try:
        if isinstance(prompt, (Set, Mapping)):      # of one of each, in an order of its own
            raise TypeError
        given = list(prompt)
    except TypeError:
        raise InvalidTypeError(f"prompt is {brief(prompt)}: text, bytes or a list of tokens would be right") from None
    if not given:
        raise InvalidValueError("the prompt is empty; it needs at least one token")
    return [whole(f"the prompt's token {i}", token, 0, vocab_size - 1) for i, token in enumerate(given)]
