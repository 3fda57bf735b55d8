"""The same model in torch, by autograd and torch.optim: a second opinion where torch is installed (never needed to train)."""

import torch
import torch.nn.functional as F


def to_torch(params, dtype=torch.float32):
    return {name: torch.tensor(value, dtype=dtype, requires_grad=True) for name, value in params.items()}


def forward(model, p, tokens):
    """tokens int64 [B, T] -> logits [B, T, V]."""
    B, T = tokens.shape
    E, H = model.n_embd, model.n_head

    def norm(x, name):
        return F.layer_norm(x, (E,), p[name + ".weight"], p.get(name + ".bias"), 1e-5)

    def linear(x, name):
        y = x @ p[name + ".weight"]
        return y + p[name + ".bias"] if name + ".bias" in p else y

    x = p["transformer.wte.weight"][tokens] + p["transformer.wpe.weight"][:T]
    for i in range(model.n_layer):
        h = f"transformer.h.{i}."
        q, k, v = (
            t.view(B, T, H, E // H).transpose(1, 2)
            for t in linear(norm(x, h + "ln_1"), h + "attn.c_attn").split(E, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(1, 2).reshape(B, T, E), h + "attn.c_proj")
        x = x + linear(F.gelu(linear(norm(x, h + "ln_2"), h + "mlp.c_fc"), approximate="tanh"), h + "mlp.c_proj")
    head = p["transformer.wte.weight" if model.tie_weights else "lm_head.weight"]
    return norm(x, "transformer.ln_f") @ head.T


def loss(model, p, tokens):
    tokens = torch.as_tensor(tokens, dtype=torch.int64)
    out = forward(model, p, tokens[:, :-1])
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), tokens[:, 1:].reshape(-1))


def loss_and_grads(model, params, tokens, dtype=torch.float64):
    p = to_torch(params, dtype)
    value = loss(model, p, tokens)
    value.backward()
    return float(value.detach()), {name: tensor.grad.numpy() for name, tensor in p.items()}


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
    dtype=torch.float32,
):
    """Losses of one torch.optim.AdamW step on each of `batches`, and the trained parameters as arrays."""
    from reference import learning_rate

    p = to_torch(params, dtype)
    groups = [
        {"params": [t for t in p.values() if t.ndim == 2], "weight_decay": weight_decay},
        {"params": [t for t in p.values() if t.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)
    losses = []
    for step, tokens in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, len(batches), lr, min_lr, warmup_steps, lr_schedule)
        optimizer.zero_grad()
        value = loss(model, p, tokens)
        value.backward()
        if grad_clip:
            torch.nn.utils.clip_grad_norm_(p.values(), grad_clip)
        optimizer.step()
        losses.append(float(value.detach()))
    return losses, {name: tensor.detach().numpy() for name, tensor in p.items()}
