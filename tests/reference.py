"""The oracle: GPT-2 forward, loss and every gradient in float64 NumPy, written to be read and not to be fast.

Model (Radford et al. 2019; Hugging Face's GPT2LMHeadModel): pre-LayerNorm, causal attention, GELU (tanh), learned positions.
Parameters by Hugging Face's names and shapes (Conv1D weights are [in, out]). Notation: B sequences, T tokens, E width, H heads,
D = E / H. Each forward step returns its result and what its backward needs; each backward adds into `grads`.
test_reference.py proves the gradients by central differences, so everything else may be compared with this file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

EPS = 1e-5


@dataclass(frozen=True)
class Model:
    """The fields of a GPTConfig, for tests that must not need the package."""

    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int
    block_size: int
    bias: bool = True
    tie_weights: bool = True


def shapes(model):
    """{name: shape} in canonical order."""
    E, out = model.n_embd, {}

    def add(name, *shape):
        out[name + ".weight"] = shape
        if model.bias:
            out[name + ".bias"] = shape[-1:]

    out["transformer.wte.weight"] = (model.vocab_size, E)
    out["transformer.wpe.weight"] = (model.block_size, E)
    for i in range(model.n_layer):
        for name, shape in (
            ("ln_1", (E,)),
            ("attn.c_attn", (E, 3 * E)),
            ("attn.c_proj", (E, E)),
            ("ln_2", (E,)),
            ("mlp.c_fc", (E, 4 * E)),
            ("mlp.c_proj", (4 * E, E)),
        ):
            add(f"transformer.h.{i}.{name}", *shape)
    add("transformer.ln_f", E)
    if not model.tie_weights:
        out["lm_head.weight"] = (model.vocab_size, E)
    return out


def random_params(model, seed=0, std=0.2):
    """Every tensor random, LayerNorms and biases too: no gradient is zero by symmetry."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(1.0 if ".ln_" in name and name.endswith("weight") else 0.0, std, shape)
        for name, shape in shapes(model).items()
    }


# ---- pieces: forward gives (y, saved); backward takes (dy, saved) ------------------------------------------------------


def linear(p, name, x):
    y = x @ p[name + ".weight"]
    return (y + p[name + ".bias"] if name + ".bias" in p else y), x


def linear_backward(p, grads, name, dy, x):
    rows, drows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    grads[name + ".weight"] += rows.T @ drows
    if name + ".bias" in p:
        grads[name + ".bias"] += drows.sum(axis=0)
    return dy @ p[name + ".weight"].T


def layer_norm(p, name, x):
    mean = x.mean(axis=-1, keepdims=True)
    rstd = 1.0 / np.sqrt(((x - mean) ** 2).mean(axis=-1, keepdims=True) + EPS)
    normed = (x - mean) * rstd
    y = normed * p[name + ".weight"]
    return (y + p[name + ".bias"] if name + ".bias" in p else y), (normed, rstd)


def layer_norm_backward(p, grads, name, dy, saved):
    normed, rstd = saved
    grads[name + ".weight"] += (dy * normed).sum(axis=(0, 1))
    if name + ".bias" in p:
        grads[name + ".bias"] += dy.sum(axis=(0, 1))
    dn = dy * p[name + ".weight"]
    return rstd * (dn - dn.mean(axis=-1, keepdims=True) - normed * (dn * normed).mean(axis=-1, keepdims=True))


def gelu(x):
    """Hendrycks & Gimpel 2016, the tanh form that GPT-2 uses."""
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def gelu_backward(dy, x):
    t = np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))
    inner = math.sqrt(2.0 / math.pi) * (1.0 + 3 * 0.044715 * x**2)
    return dy * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t**2) * inner)


def attention(model, qkv):
    """qkv [B, T, 3 E] -> [B, T, E]."""
    B, T, _ = qkv.shape
    H, D = model.n_head, model.n_embd // model.n_head
    q, k, v = qkv.reshape(B, T, 3, H, D).transpose(2, 0, 3, 1, 4)  # each [B, H, T, D]
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(D)
    scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
    prob = np.exp(scores - scores.max(axis=-1, keepdims=True))
    prob /= prob.sum(axis=-1, keepdims=True)
    return (prob @ v).transpose(0, 2, 1, 3).reshape(B, T, -1), (q, k, v, prob)


def attention_backward(dy, saved):
    q, k, v, prob = saved
    B, H, T, D = q.shape
    dy = dy.reshape(B, T, H, D).transpose(0, 2, 1, 3)
    dv = prob.swapaxes(-1, -2) @ dy
    dprob = dy @ v.swapaxes(-1, -2)
    dscores = prob * (dprob - (dprob * prob).sum(axis=-1, keepdims=True)) / math.sqrt(D)
    dq, dk = dscores @ k, dscores.swapaxes(-1, -2) @ q
    return np.stack([dq, dk, dv]).transpose(1, 3, 0, 2, 4).reshape(B, T, 3 * H * D)


# ---- the model ---------------------------------------------------------------------------------------------------------


def forward(model, params, tokens):
    """tokens int [B, T] -> (logits float64 [B, T, V], what the backward needs)."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    tokens = np.asarray(tokens)
    x = p["transformer.wte.weight"][tokens] + p["transformer.wpe.weight"][: tokens.shape[1]]
    saved = []
    for i in range(model.n_layer):
        h = f"transformer.h.{i}."
        a, s_ln1 = layer_norm(p, h + "ln_1", x)
        qkv, s_qkv = linear(p, h + "attn.c_attn", a)
        mixed, s_attn = attention(model, qkv)
        out, s_proj = linear(p, h + "attn.c_proj", mixed)
        x = x + out
        a, s_ln2 = layer_norm(p, h + "ln_2", x)
        hidden, s_fc = linear(p, h + "mlp.c_fc", a)
        out, s_out = linear(p, h + "mlp.c_proj", gelu(hidden))
        x = x + out
        saved.append((s_ln1, s_qkv, s_attn, s_proj, s_ln2, s_fc, hidden, s_out))
    final, s_lnf = layer_norm(p, "transformer.ln_f", x)
    head = p["transformer.wte.weight" if model.tie_weights else "lm_head.weight"]
    return final @ head.T, (p, tokens, saved, s_lnf, final)


def loss(model, params, tokens):
    """Mean cross-entropy over batch x T; tokens int [B, T + 1]: inputs and, one on, their targets."""
    tokens = np.asarray(tokens)
    logits, _ = forward(model, params, tokens[:, :-1])
    return float(_cross_entropy(logits, tokens[:, 1:])[0])


def _cross_entropy(logits, targets):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(axis=-1))
    picked = np.take_along_axis(shifted, targets[..., None], axis=-1)[..., 0]
    prob = np.exp(shifted - log_sum[..., None])
    np.put_along_axis(prob, targets[..., None], np.take_along_axis(prob, targets[..., None], axis=-1) - 1.0, axis=-1)
    return (log_sum - picked).mean(), prob / targets.size


def loss_and_grads(model, params, tokens):
    """(mean loss, {name: float64 gradient}); tokens int [B, T + 1]."""
    tokens = np.asarray(tokens)
    logits, (p, inputs, saved, s_lnf, final) = forward(model, params, tokens[:, :-1])
    value, dlogits = _cross_entropy(logits, tokens[:, 1:])
    grads = {name: np.zeros_like(array) for name, array in p.items()}
    head = "transformer.wte.weight" if model.tie_weights else "lm_head.weight"
    grads[head] += dlogits.reshape(-1, dlogits.shape[-1]).T @ final.reshape(-1, model.n_embd)
    dx = layer_norm_backward(p, grads, "transformer.ln_f", dlogits @ p[head], s_lnf)
    for i in reversed(range(model.n_layer)):
        h = f"transformer.h.{i}."
        s_ln1, s_qkv, s_attn, s_proj, s_ln2, s_fc, hidden, s_out = saved[i]
        d = linear_backward(p, grads, h + "mlp.c_proj", dx, s_out)
        d = linear_backward(p, grads, h + "mlp.c_fc", gelu_backward(d, hidden), s_fc)
        dx = dx + layer_norm_backward(p, grads, h + "ln_2", d, s_ln2)
        d = linear_backward(p, grads, h + "attn.c_proj", dx, s_proj)
        d = linear_backward(p, grads, h + "attn.c_attn", attention_backward(d, s_attn), s_qkv)
        dx = dx + layer_norm_backward(p, grads, h + "ln_1", d, s_ln1)
    np.add.at(grads["transformer.wte.weight"], inputs, dx)
    grads["transformer.wpe.weight"][: inputs.shape[1]] += dx.sum(axis=0)
    return float(value), grads


# ---- the optimizer -----------------------------------------------------------------------------------------------------


def learning_rate(step, steps, lr, min_lr=None, warmup_steps=0, schedule="cosine"):
    """Of step 0, 1, ... of `steps`: linear warm-up, lr itself at the last of `warmup_steps`; then half a cosine from lr towards
    min_lr (lr / 10 if None), which step `steps` would reach, or constant (Loshchilov & Hutter 2017, without restarts)."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    min_lr = lr / 10 if min_lr is None else min_lr
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return min_lr + 0.5 * (lr - min_lr) * (1.0 + math.cos(math.pi * done))


def grad_norm(grads):
    return math.sqrt(sum(float((g * g).sum()) for g in grads.values()))


def clip_scale(norm, grad_clip):
    """Factor for all gradients (Pascanu et al. 2013), with the 1e-6 of PyTorch's clip_grad_norm_; 0 does not clip."""
    return min(1.0, grad_clip / (norm + 1e-6)) if grad_clip else 1.0


def adamw_step(params, grads, state, step, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, grad_clip=1.0):
    """In place; step counts from 1; state {} at first. Decoupled decay (Loshchilov & Hutter 2019) on matrices alone.
    Gives the gradient norm before clipping."""
    norm = grad_norm(grads)
    scale = clip_scale(norm, grad_clip)
    for name, p in params.items():
        g = grads[name] * scale
        m, v = state.setdefault(name, (np.zeros_like(p), np.zeros_like(p)))
        m[...] = betas[0] * m + (1 - betas[0]) * g
        v[...] = betas[1] * v + (1 - betas[1]) * g * g
        update = (m / (1 - betas[0] ** step)) / (np.sqrt(v / (1 - betas[1] ** step)) + eps)
        p -= lr * (update + (weight_decay * p if p.ndim == 2 else 0.0))
    return norm


def train(
    model,
    params,
    batches,
    lr=6e-4,
    min_lr=None,
    lr_schedule="cosine",
    warmup_steps=0,
    weight_decay=0.1,
    betas=(0.9, 0.95),
    eps=1e-8,
    grad_clip=1.0,
):
    """Losses of one AdamW step on each of `batches`, in float64, and the trained parameters."""
    params = {name: np.array(value, np.float64) for name, value in params.items()}
    state, losses = {}, []
    for step, tokens in enumerate(batches):
        value, grads = loss_and_grads(model, params, tokens)
        rate = learning_rate(step, len(batches), lr, min_lr, warmup_steps, lr_schedule)
        adamw_step(params, grads, state, step + 1, rate, betas, eps, weight_decay, grad_clip)
        losses.append(value)
    return losses, params
