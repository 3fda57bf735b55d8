"""Training on the GPU: right beside the CPU, whole models' TFLOP/s, and PyTorch on the same model.

TFLOP/s are model FLOPs: tokens x tp.GPTConfig.flops_per_token(T) / seconds of a step by the host's clock, from the tokens on
the host to the update, and flops_per_token(T) = 6 N_matmul + 6 n_layer n_embd (T + 1): multiply-adds of the matrices (head
included, embeddings not) forward and twice backward, and attention's visible pairs alone. "dense_tflops" counts every pair
(12 n_layer n_embd T), as llm.c and nanoGPT do. Numbers and tokens are random, and weights those of an initialised model.
"""

import math
import os
import statistics
import time

import numpy as np
from gpu_check import Question, small, so_far

SIZES = {"124M": ("gpt2-124m", 16, 4), "350M": ("gpt2-345m", 16, 4), "774M": ("gpt2-762m", 8, 6), "1558M": ("gpt2-1558m", 12, 4)}
GOALS = {"124M": 400.0, "350M": 430.0, "774M": 455.0, "1558M": 490.0}
SPARE_BYTES = 3 << 30
EAGER = {"TERAPIPE_CUDA_GRAPHS": "0"}  # what remains where a device refuses the graphs of steps, or loses its way in them
HYPER = dict(lr=1e-4, weight_decay=0.1, grad_clip=1.0)


def small_model(**change):
    import terapipe_c as tp

    usual = dict(n_layer=4, n_head=4, n_embd=256, vocab_size=1000, block_size=256)
    if small():
        usual = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=16)
        change = {k: v for k, v in change.items() if k in ("tie_weights", "bias", "vocab_size")}
    return tp.GPTConfig(**{**usual, **change})


def slicings(T):
    """Ragged and even cuts of T tokens."""
    return [1, 1, 3 * T // 4 + 1, T // 4 - 3], [T // 4] * 4


def parity():
    """Loss and gradients of a small model against the CPU's, in both types."""
    import terapipe_c as tp

    found = {}
    for tie, bias in ((True, True), (False, False)):
        model = small_model(tie_weights=tie, bias=bias)
        params = tp.init_params(model, seed=1)
        tokens = np.random.default_rng(2).integers(0, model.vocab_size, (3, model.block_size + 1)).astype(np.int32)
        loss, right = tp.loss_and_grads(model, params, tokens, threads=min(8, os.cpu_count() or 1))
        for dtype, most, over_all in (("float32", 2e-5, 1e-5), ("bf16", 5e-2, 1.5e-2)):
            other, grads = tp.loss_and_grads(model, params, tokens, backend="cuda", dtype=dtype)
            errors = {n: float(np.linalg.norm(grads[n] - g) / np.linalg.norm(g)) for n, g in right.items()}
            worst = max(errors, key=errors.get)
            key = f"{dtype}, {'tied, bias' if tie else 'untied, no bias'}"
            whole = np.sqrt(sum(np.sum((grads[n] - g).astype(float) ** 2) for n, g in right.items()))
            whole /= np.sqrt(sum(np.sum(g.astype(float) ** 2) for g in right.values()))
            found[key] = {"loss": other, "cpu_loss": loss, "worst_gradient_error": errors[worst], "of": worst,
                          "over_all": float(whole)}
            so_far(found)
            assert abs(other / loss - 1) < (1e-5 if dtype == "float32" else 3e-3), found
            assert errors[worst] <= most and whole <= over_all, found
    worst = {d: max(v["worst_gradient_error"] for k, v in found.items() if k.startswith(d)) for d in ("float32", "bf16")}
    return found | {"headline": f"worst gradient: float32 {worst['float32']:.1e}, bf16 {worst['bf16']:.1e}"}


def invariance():
    """The same bits of loss and gradients for every slicing, on one stage and on two, in both types, and in fp32 off 16 bytes."""
    import dataclasses

    import terapipe_c as tp

    found, both = {}, ("float32", "bf16")
    odd = dataclasses.replace(small_model(), n_head=5, n_embd=15 if small() else 250)
    for name, model, dtypes in (("tied", small_model(), both), ("untied", small_model(tie_weights=False), both),
                                ("rows off 16 bytes", odd, both[:1])):  # fmt: skip
        params = tp.init_params(model, seed=1)
        tokens = np.random.default_rng(2).integers(0, model.vocab_size, (3, model.block_size + 1)).astype(np.int32)
        for dtype in dtypes:
            loss, grads = tp.loss_and_grads(model, params, tokens, backend="cuda", dtype=dtype)
            for slices in slicings(model.block_size):
                again, theirs = tp.loss_and_grads(model, params, tokens, slices, 2, backend="cuda", dtype=dtype)
                changed = {n: float(np.abs(grads[n] - theirs[n]).max()) for n in grads if not np.array_equal(grads[n], theirs[n])}
                found[f"{dtype}, {name}, {slices}"] = {"loss": [loss, again], "changed": changed}
                so_far(found)
    wrong = {k: v for k, v in found.items() if v["loss"][0] != v["loss"][1] or v["changed"]}
    assert not wrong, wrong
    return found | {"headline": f"equal over {len(found)} slicings"}


def plan_of(model, slicing, ranks=1, schedule="one_f_one_b"):
    """(program, partition) of engine_of."""
    import terapipe_c as tp
    from terapipe_c.partition import even_partition

    program = getattr(tp.schedules, schedule)(ranks, len(slicing), [len(n) for _, n in slicing])
    return program.lower(ranks > 1 and model.tie_weights), even_partition(model, ranks)


def engine_of(model, slicing, ranks=1, schedule="one_f_one_b", dtype="bf16", **device):
    """(program, make(rank, ...) of an engine that runs it)."""
    from terapipe_c.backend import Backend
    from terapipe_c.engine import RankEngine

    program, partition = plan_of(model, slicing, ranks, schedule)

    def make(rank, comm=None, **more):
        return RankEngine(model, partition, slicing, program, rank, comm, backend=Backend("cuda", dtype), **device, **more)

    return program, make


def graphs():
    """Steps launched as graphs against those enqueued call by call, tokens and rate changing: the same bits, and their time."""
    import terapipe_c as tp

    model, found = small_model(), {}
    params = tp.init_params(model, seed=1)
    shape = (6 if small() else 12, 4, model.block_size + 1)
    batches = np.random.default_rng(2).integers(0, model.vocab_size, shape).astype(np.int32)
    for name, eager in (("graphs", False), ("eager", True)):
        _, make = engine_of(model, [(1, [model.block_size // 4] * 4)] * 4, eager=eager)
        engine = make(0)
        engine.load(params)
        steps, told = [], []
        for step, tokens in enumerate(batches):
            start = time.perf_counter()
            told.append(engine.run(tokens, step=step + 1, **HYPER | {"lr": 1e-3 / (step + 1)})[:2])
            steps.append(time.perf_counter() - start)
        trace = engine.trace()
        assert all(row[4] <= row[5] for row in trace) and trace[-1][5] > trace[0][4]
        found[name] = {"losses_and_norms": told, "caveats": engine.caveats, "step_s": statistics.median(steps[4:]),
                       "first_s": steps[0], "trace_s": trace[-1][5] - trace[0][4]}
        so_far(found)
        del engine
    assert found["graphs"]["losses_and_norms"] == found["eager"]["losses_and_norms"], found
    assert not any("as graphs" in text for text in found["graphs"]["caveats"]), found["graphs"]["caveats"]  # all could be captured
    ms = {name: f"{1e3 * one['step_s']:.2f} ms" for name, one in found.items()}
    return found | {"headline": f"a step {ms['graphs']} by graphs, {ms['eager']} eager"}


# PipeDream's order of two stages, on one rank: the first has two versions of its weights, for five micro-batches
TWO_VERSIONS = """0F0.0 0F1.0 1F0.0 1B0.0 1U0.0 0B0.0 0U0.0 0F2.0 1F1.0 1B1.0 1U1.0 0B1.0 0U1.0 0F3.0 1F2.0 1B2.0 1U2.0 0B2.0 0U2.0
0F4.0 1F3.0 1B3.0 1U3.0 0B3.0 0U3.0 1F4.0 1B4.0 1U4.0 0B4.0 0U4.0""".replace("\n", " ")


def micro_updates():
    """An update behind every micro-batch, with versions of the weights: near the CPU, by graphs the bits of eager steps."""
    import terapipe_c as tp
    from terapipe_c.backend import Backend
    from terapipe_c.engine import RankEngine, rank_memory
    from terapipe_c.partition import even_partition

    model, found = small_model(tie_weights=False), {}
    params, program = tp.init_params(model, seed=1), tp.Program.parse(TWO_VERSIONS).lower()
    partition, slicing = even_partition(model, 2), [(1, [model.block_size])] * 5
    tokens = np.random.default_rng(2).integers(0, model.vocab_size, (5, model.block_size + 1)).astype(np.int32)
    float32, bf16 = Backend("cuda", "float32"), Backend("cuda", "bf16")
    for name, device in (("cpu", {"threads": min(8, os.cpu_count() or 1)}), ("float32", {"backend": float32}),
                         ("float32, eager", {"backend": float32, "eager": True}), ("bf16", {"backend": bf16}),
                         ("bf16, eager", {"backend": bf16, "eager": True})):
        engine = RankEngine(model, partition, slicing, program, 0, None, **device)
        engine.load(params)
        found[name] = [engine.run(tokens, step=step + 1, **HYPER | {"lr": 3e-4})[:2] for step in range(6)]
        so_far(found)
        for known in [device["backend"]] if "backend" in device else []:
            assert engine.peak_memory_bytes == rank_memory(model, partition, slicing, program, backend=known)[0]
        del engine
    assert found["float32"] == found["float32, eager"] and found["bf16"] == found["bf16, eager"], found
    far = {name: float(np.abs(np.array(found[name]) / np.array(found["cpu"]) - 1)[:, 0].max()) for name in ("float32", "bf16")}
    # Apart from the CPU's (AVX2) at 3e-4: 7e-8 where the weights began 1e-7 apart, or by the portable kernels; 1e-7 in PyTorch,
    # 1.1e-4 where that rounds to bf16 as we do. (At 3e-3 the CPU is apart from itself by 2e-2 in the fifth step.) A wrong version
    # of the weights shows: a backward that reads the newest 7e-3, an update that begins at the one before 4e-3, a forward that
    # reads the newest 3e-2.
    assert far["float32"] < 1e-5 and far["bf16"] < 1e-3, far
    return found | {"headline": f"graphs as eager; losses apart from the CPU's by {far['float32']:.1e} (float32), "
                                f"{far['bf16']:.1e} (bf16)"}


def curve():
    """100 steps of a small model by the GPU in bf16 and float32 and by the CPU: the losses lie on each other."""
    import common

    import terapipe_c as tp

    model = small_model(n_layer=2, n_embd=128, vocab_size=256, block_size=128)
    T, steps = model.block_size, 3 if small() else 100
    tokens = np.fromfile(common.corpus(400_000), np.uint16)
    most = model.vocab_size - 1
    data = np.where(tokens < 256, most, np.minimum(tokens.astype(np.int32) - 256, most)).astype(np.int32)  # the most frequent
    # pieces; all others, and those that are spelled in bytes, are one
    losses = {}
    for backend, dtype in (("cpu", None), ("cuda", "float32"), ("cuda", "bf16")):
        plan = tp.plan(model, tp.Cluster.local(), 8, T, stages=1, planner="terapipe", schedule="gpipe",
                       slicing=[(8, [T // 2, T // 2])], backend=backend, dtype=dtype)
        run = tp.launch(plan, data, steps, lr=3e-4, warmup_steps=10, backend=backend, dtype=dtype, processes=False,
                        progress=False, threads_per_rank=min(8, os.cpu_count() or 1))
        losses[dtype or "cpu"] = [record.loss for record in run]
        so_far(losses)
    cpu = np.array(losses["cpu"])
    found = {dtype: differences(np.array(losses[dtype]), cpu) for dtype in ("float32", "bf16")}
    assert small() or cpu[-1] < 0.8 * cpu[0], (cpu[0], cpu[-1])
    # PyTorch on a CPU, with this data (of Python 3.11 and of 3.12): bf16 autocast is apart from float32 by 1.1e-4 and 1.5e-4, over
    # ten steps by 5.7e-5 (2 runs); float32 that rounds to bf16 where we do by 0.9e-4 to 1.6e-4 and 3e-5 to 7e-5, about zero (10
    # runs); weights that begin 1e-7 apart by 1e-6 at most. Without float32 masters 1.5e-2 and 1.9e-2, over ten steps 1.3e-2 and
    # more, most of it above. At a rate of 1e-3 some data makes what is apart hundreds of times more in a few steps: autocast 1e-2.
    most = {"float32": {"largest": 1e-4, "over_10_steps": 3e-5}, "bf16": {"largest": 1e-3, "over_10_steps": 3e-4}}
    assert all(found[dtype][key] < bound for dtype, bounds in most.items() for key, bound in bounds.items()), found
    far = {dtype: f"{one['largest']:.1e}" for dtype, one in found.items()}
    return {"relative_differences": found, "losses": {k: [round(x, 5) for x in v[::10]] for k, v in losses.items()},
            "headline": f"loss {cpu[0]:.3f} to {cpu[-1]:.3f}; apart by {far['float32']} (float32), {far['bf16']} (bf16)"}


def differences(losses, right):
    """Relative ones of a curve: of a step, where noise shows, and of the mean of ten in a row, where what has a direction does."""
    ten = np.ones(min(10, len(right)))
    steps, smooth = losses / right - 1, np.convolve(losses, ten, "valid") / np.convolve(right, ten, "valid") - 1
    return {"largest": float(np.abs(steps).max()), "at": int(np.abs(steps).argmax()), "rms": float(np.sqrt((steps**2).mean())),
            "mean": float(steps.mean()), "over_10_steps": float(np.abs(smooth).max())}


def some_params(model):
    """As initialised, but quickly and in little memory: parts of one block of normal numbers."""
    from terapipe_c.checkpoint import param_shapes

    shapes = param_shapes(model)
    some = np.random.default_rng(3).standard_normal((1 << 20) + 7, np.float32) * np.float32(0.02)
    block = np.resize(some, max(math.prod(shape) for shape in shapes.values()) + 64 * len(shapes))
    return {name: np.ones(shape, np.float32) if ".ln_" in name and name.endswith("weight")
            else block[64 * i:64 * i + math.prod(shape)].reshape(shape) for i, (name, shape) in enumerate(shapes.items())}


def sized(size, device_bytes=None):
    """(model, sequences of a micro-batch, micro-batches of a step): of SIZES, or fewer sequences where the GPU has no room for
    them. GPT-2 1558M takes 59 GB with 12 (82 where the blocks of a stage share no room for gradients), and the contexts, cublasLt's
    kernels and graphs want some too."""
    import terapipe_c as tp

    if small():
        return small_model(), 1, 2
    preset, batch, micros = SIZES[size]
    model = tp.GPTConfig.preset(preset)
    room = (tp.cuda.devices()[0].total_bytes if device_bytes is None else device_bytes) - SPARE_BYTES
    while batch > 1 and bytes_of(model, batch, micros) > room:
        batch -= 1
    return model, batch, micros


def bytes_of(model, batch, micros):
    """Of the device's memory, that training() takes."""
    from terapipe_c.backend import Backend
    from terapipe_c.engine import rank_memory

    slicing = [(batch, [model.block_size])] * micros
    program, partition = plan_of(model, slicing)
    return rank_memory(model, partition, slicing, program, backend=Backend("cuda", "bf16"))[0]


def figures(size, model, batch, micros, steps):
    """What these steps amount to; the first three do not count where there are more."""
    seq_len, step_s = model.block_size, statistics.median(steps[3:] or steps)
    tokens_per_step, attention = batch * micros * seq_len, 6 * model.n_layer * model.n_embd
    flops = model.flops_per_token(seq_len)
    dense = flops - attention * (seq_len + 1) + 2 * attention * seq_len
    tflops = 1e-12 * flops * tokens_per_step / step_s
    few = "" if len(steps) > 3 else f" by {len(steps)} steps alone, which warm up"
    return {"headline": f"{tflops:.0f} TFLOP/s (goal {GOALS[size]:.0f}), {tokens_per_step / step_s:.0f} tokens/s{few}",
            "model": repr(model), "parameters": model.num_params, "micro_batch": batch, "micro_batches": micros,
            "step_s": step_s, "steps_s": steps, "tokens_per_s": tokens_per_step / step_s,
            "tflops": tflops, "dense_tflops": 1e-12 * dense * tokens_per_step / step_s,
            "goal_tflops": GOALS[size], "formula": __doc__.split("\n\n")[1].replace("\n", " ")}  # fmt: skip


def fitting(model, batch, micros, begin):
    """(begin(batch), batch) of as many sequences as there is memory for: fewer than planned where the device says so."""
    import terapipe_c as tp

    while True:
        try:
            return begin(batch), batch
        except tp.OutOfMemoryError as error:
            if batch == 1:
                raise
            print(f"{model.n_layer} layers, micro-batches of {batch}: {error}")
            batch -= max(1, batch // 8)


def trained(size, keep=so_far):
    """What training(size) answers; keep: so_far, or who adds to it."""
    from terapipe_c.engine import TIMED

    model, batch, micros = sized(size)
    seq_len, rng, steps = model.block_size, np.random.default_rng(5), []
    params, opened = some_params(model), time.monotonic()

    def step(engine, batch):
        tokens = rng.integers(0, model.vocab_size, (batch * micros, seq_len + 1)).astype(np.int32)
        start = time.perf_counter()
        told = engine.run(tokens, step=len(steps) + 1, **HYPER)
        steps.append(time.perf_counter() - start)
        return told

    def begin(batch):
        _, make = engine_of(model, [(batch, [seq_len])] * micros, candidates=TIMED)
        engine = make(0)
        engine.load(params)
        step(engine, batch)
        return engine

    engine, batch = fitting(model, batch, micros, begin)
    opened, began = time.monotonic() - opened, time.monotonic()
    while len(steps) < 5 or (time.monotonic() - began < 4 and len(steps) < 30):
        loss, norm, *_ = step(engine, batch)
        keep(figures(size, model, batch, micros, steps) | {"opened_s": opened, "caveats": engine.caveats})
    spent = {}
    for op, *_, start, end in engine.trace():
        spent[op] = spent.get(op, 0.0) + end - start
    assert np.isfinite(loss) and np.isfinite(norm), (loss, norm)
    return figures(size, model, batch, micros, steps) | {
        "opened_s": opened, "loss": loss, "grad_norm": norm, "peak_bytes": engine.peak_memory_bytes,
        "seconds_by_operation": spent, "caveats": engine.caveats}


def training(size):
    def answer():
        return trained(size)

    answer.__doc__ = f"A training step of GPT-2 {size} in bf16 on the whole GPU: TFLOP/s."
    return answer


def profiled():
    """tp.profile of GPT-2 124M on the device: seconds of slices after contexts, and how well the fit foretells others."""
    import terapipe_c as tp

    model, *_ = sized("124M")
    costs = tp.profile(model, 1, backend="cuda", budget_s=1.0 if small() else 5.0)
    T = model.block_size
    shares = {f"slices of {T // n}": sum(float(costs.time(T // n, i * (T // n))) for i in range(n)) for n in (1, 2, 4)}
    return {"headline": f"fit error {100 * costs.fit_error:.1f} %; a layer's {T} tokens " +
                        ", ".join(f"{1e3 * s:.2f} ms in {name}" for name, s in shares.items()),
            "layer_s": shares, "costs": costs.to_dict()}  # fmt: skip


def torch_gpt(model):
    """The same GPT-2 in PyTorch's own layers."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            E = model.n_embd
            self.ln_1, self.ln_2 = nn.LayerNorm(E), nn.LayerNorm(E)
            self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)
            self.up, self.down = nn.Linear(E, 4 * E), nn.Linear(4 * E, E)

        def forward(self, x):
            B, T, E = x.shape
            heads = self.qkv(self.ln_1(x)).view(B, T, 3, model.n_head, E // model.n_head).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(B, T, E))
            return x + self.down(functional.gelu(self.up(self.ln_2(x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            padded = -(-model.vocab_size // 64) * 64
            self.wte, self.wpe = nn.Embedding(padded, model.n_embd), nn.Embedding(model.block_size, model.n_embd)
            self.blocks = nn.ModuleList(Block() for _ in range(model.n_layer))
            self.ln_f = nn.LayerNorm(model.n_embd)
            self.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, (nn.Linear, nn.Embedding)) else None)

        def loss(self, x, targets):
            logits = functional.linear(self.ln_f(x), self.wte.weight)
            return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

        def forward(self, tokens, targets):
            x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.loss(x, targets)

    with torch.device("cpu" if small() else "cuda"):
        return Gpt()


def torch_steps(size, whole, enough, layers=None):
    """(seconds of each step of the same training by PyTorch, until enough(seconds); sequences of a micro-batch; micro-batches).
    whole: compiled as one graph; else every block by itself (they share what is compiled) and the head: a deep model as one graph
    takes minutes to compile. layers: so many of the model's."""
    import torch

    if cache := os.environ.get("GPU_CHECK_CACHE"):
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    model, batch, micros = sized(size)
    while True:  # the same tokens in more micro-batches, where PyTorch has no room for these
        try:
            return torch_steps_of(model, batch, micros, whole, enough, layers), batch, micros
        except torch.OutOfMemoryError as error:
            if batch == 1:
                raise
            print(f"micro-batches of {batch}: {str(error).splitlines()[0]}")
            batch, micros = -(-batch // 2), 2 * micros
        torch.cuda.empty_cache()


def torch_steps_of(model, batch, micros, whole, enough, layers):
    import dataclasses

    import torch

    model = dataclasses.replace(model, n_layer=layers or model.n_layer)
    where = "cpu" if small() else "cuda"
    torch.set_float32_matmul_precision("high")
    net = torch_gpt(model)
    if whole and not small():
        net.compile(dynamic=False)
    elif not small():
        for block in net.blocks:
            block.compile(dynamic=False)
        net.loss = torch.compile(net.loss, dynamic=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    steps = []
    while not enough(steps):
        tokens = torch.randint(0, model.vocab_size, (batch * micros, model.block_size + 1))
        start = time.perf_counter()
        for part in tokens.to(where, non_blocking=True).split(batch):
            with torch.autocast(where, torch.bfloat16):
                loss = net(part[:, :-1], part[:, 1:])
            (loss / micros).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        if where == "cuda":
            torch.cuda.synchronize()
        steps.append(time.perf_counter() - start)
        so_far({"steps_s": steps})
    return steps


def torch_peer(size, whole):
    def answer():
        import torch

        began = time.monotonic()
        steps, batch, micros = torch_steps(size, whole, lambda s: len(s) >= (2 if small() else 5) and (
            len(s) >= 14 or sum(s[1:]) > 5 or time.monotonic() - began > 24))
        model, *_ = sized(size)
        step_s, tokens_per_step = statistics.median(steps[3:] or steps), batch * micros * model.block_size
        tflops = 1e-12 * model.flops_per_token(model.block_size) * tokens_per_step / step_s
        return {"headline": f"{tflops:.0f} TFLOP/s, {tokens_per_step / step_s:.0f} tokens/s (PyTorch {torch.__version__})",
                "torch": torch.__version__, "compiled": "as one graph" if whole else "each block by itself, and the head",
                "micro_batch": batch, "micro_batches": micros,
                "step_s": step_s, "steps_s": steps, "tokens_per_s": tokens_per_step / step_s, "tflops": tflops}

    answer.__doc__ = f"The same step of GPT-2 {size} by PyTorch: torch.compile, bf16 autocast, fused AdamW, the same tokens a step."
    return answer


def warm_torch(size, whole):
    """One step, so that what is compiled lies on the disk. Of blocks compiled by themselves two are all: others check meanwhile,
    and 1558M would leave them no memory of an H100."""
    return lambda: torch_steps(size, whole, lambda steps: len(steps) >= 1, None if whole else 2)


QUESTIONS = [
    Question("parity", 50, parity, order=12),
    Question("slicings", 60, invariance, order=14),
    Question("graphs", 30, graphs, order=15),
    Question("updates by micro-batches", 40, micro_updates, order=23),
    Question("loss curve", 60, curve, order=22, otherwise=EAGER),
    *(Question(f"training {size}", seconds, training(size), order=41 + i, otherwise=EAGER)
      for i, (size, seconds) in enumerate({"124M": 13, "350M": 12, "774M": 14, "1558M": 24}.items())),
    Question("pytorch 124M", 30, torch_peer("124M", True), order=45, warm=warm_torch("124M", True)),
    Question("profile", 8, profiled, order=49),
    Question("pytorch 1558M", 33, torch_peer("1558M", False), order=48, warm=warm_torch("1558M", False)),
]
