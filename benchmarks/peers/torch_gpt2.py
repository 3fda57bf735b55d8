"""GPT-2 in plain PyTorch, as nanoGPT users write it: pre-LayerNorm, fused attention, tanh GELU, tied head, AdamW.

As a program: the one-process contender. Modes: eager-b<batch>, compile-b<batch>. See benchmarks/common.py, Peer.
"""

import argparse
import json
import os
import random
import sys
import time
import zlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, e = x.shape
        q, k, v = (p.view(b, t, self.heads, e // self.heads).transpose(1, 2) for p in self.c_attn(self.ln_1(x)).split(e, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, e))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Part(nn.Module):
    """Layers [first, last) of the model, with the embedding if it is the first part and the head if it is the last.
    One part alone is the whole model, its head tied to its embedding."""

    def __init__(self, first: int, last: int, layers: int = 12, width: int = 768, heads: int = 12, vocab: int = 50257,
                 length: int = 1024) -> None:  # fmt: skip
        super().__init__()
        self.opens, self.closes, self.layers = first == 0, last == layers, layers
        if self.opens:
            self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(first, last))
        if self.closes:
            self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
            if self.opens:
                self.head.weight = self.wte.weight
        self.initialise(first)

    def initialise(self, first: int) -> None:
        """Keyed by the parameter's name in the whole model: the parts start as the whole does."""
        for name, p in self.named_parameters():
            words = name.split(".")
            if words[0] == "h":
                words[1] = str(first + int(words[1]))
            if p.ndim == 2:
                key = "wte.weight" if name == "head.weight" else ".".join(words)
                residual = name.endswith(("c_proj.weight", "c_out.weight"))
                random_numbers = torch.Generator().manual_seed(zlib.crc32(key.encode()))
                nn.init.normal_(p, std=0.02 / (2 * self.layers) ** 0.5 if residual else 0.02, generator=random_numbers)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        if self.opens:
            x = self.wte(x) + self.wpe.weight[: x.shape[1]]
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x)) if self.closes else x


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)  # its fastest on the CPU


class Text:
    """Random windows of a uint16 file, the same sequence of batches whoever asks."""

    def __init__(self, path: str, length: int) -> None:
        count = os.path.getsize(path) // 2
        self.tokens = torch.from_file(path, size=count, dtype=torch.int16)
        self.length, self.random = length, random.Random(0)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        starts = [self.random.randrange(len(self.tokens) - self.length - 1) for _ in range(size)]
        rows = torch.stack([self.tokens[s : s + self.length + 1] for s in starts]).to(torch.int64) & 0xFFFF
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    return parser


def main() -> None:
    args = options().parse_args()
    torch.set_num_threads(args.threads)
    text = Text(args.data, args.length)
    model = Part(0, args.layers, layers=args.layers, length=args.length)
    compiled = torch.compile(model)
    optimizer = adamw(model)

    def step(forward: nn.Module, batch: int) -> tuple[float, float]:
        x, y = text.batch(batch)
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = token_loss(forward(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = loss.item()
        return time.perf_counter() - start, value

    count = sum(p.numel() for p in model.parameters())
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "parameters": count}), flush=True)
    warm: set[str] = set()
    for line in sys.stdin:
        request = json.loads(line)
        kind, _, batch = request["mode"].partition("-b")
        forward = compiled if kind == "compile" else model
        if request["mode"] not in warm:  # the first step compiles, allocates, packs: it is nobody's step time
            step(forward, int(batch))
            warm.add(request["mode"])
        timed = [step(forward, int(batch)) for _ in range(request["steps"])]
        print(json.dumps({"seconds": [t for t, _ in timed], "losses": [loss for _, loss in timed]}), flush=True)


if __name__ == "__main__":
    main()
