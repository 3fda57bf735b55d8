"""Training on the GPU: right beside the CPU, whole models' TFLOP/s, PyTorch on the same model, and four stages on one GPU.

TFLOP/s are model FLOPs: tokens x tp.GPTConfig.flops_per_token(T) / seconds of a step by the host's clock, from the tokens on
the host to the update, and flops_per_token(T) = 6 N_matmul + 6 n_layer n_embd (T + 1): multiply-adds of the matrices (head
included, embeddings not) forward and twice backward, and attention's visible pairs alone. "dense_tflops" counts every pair
(12 n_layer n_embd T), as llm.c and nanoGPT do. Numbers and tokens are random, and weights those of an initialised model.
"""

import statistics
import threading
import time

import numpy as np
from gpu_check import Question

SIZES = {"124M": ("gpt2-124m", 16, 4), "350M": ("gpt2-345m", 16, 2), "774M": ("gpt2-762m", 8, 2), "1558M": ("gpt2-1558m", 12, 1)}
GOALS = {"124M": 400.0, "350M": 430.0, "774M": 455.0, "1558M": 490.0}
HYPER = dict(lr=1e-4, weight_decay=0.1, grad_clip=1.0)


def small_model(**change):
    import terapipe_c as tp

    return tp.GPTConfig(**{**dict(n_layer=4, n_head=4, n_embd=256, vocab_size=1000, block_size=256), **change})


def parity():
    """Loss and gradients of a small model against the CPU's, and equal bits over slicings, in both types."""
    import terapipe_c as tp

    found = {}
    for tie, bias in ((True, True), (False, False)):
        model = small_model(tie_weights=tie, bias=bias)
        params = tp.init_params(model, seed=1)
        tokens = np.random.default_rng(2).integers(0, model.vocab_size, (3, 257)).astype(np.int32)
        loss, right = tp.loss_and_grads(model, params, tokens, threads=8)
        for dtype, most in (("float32", 2e-5), ("bf16", 3e-2)):
            other, grads = tp.loss_and_grads(model, params, tokens, backend="cuda", dtype=dtype)
            errors = {n: float(np.linalg.norm(grads[n] - g) / np.linalg.norm(g)) for n, g in right.items()}
            worst = max(errors, key=errors.get)
            key = f"{dtype}, {'tied, bias' if tie else 'untied, no bias'}"
            found[key] = {"loss": other, "cpu_loss": loss, "worst_gradient_error": errors[worst], "of": worst}
            assert abs(other / loss - 1) < (1e-5 if dtype == "float32" else 3e-3), found
            assert errors[worst] <= most, found
            for slices in ([1, 1, 200, 54], [64] * 4):
                again, theirs = tp.loss_and_grads(model, params, tokens, slices, 2, backend="cuda", dtype=dtype)
                changed = [n for n in grads if not np.array_equal(grads[n], theirs[n])]
                assert again == other and not changed, (key, slices, again, other, changed)
    return found


def engine_of(model, slicing, ranks=1, schedule="one_f_one_b", dtype="bf16", **device):
    import terapipe_c as tp
    from terapipe_c.backend import Backend
    from terapipe_c.cost import even_partition
    from terapipe_c.engine import RankEngine

    build = getattr(tp.schedules, schedule)
    program = build(ranks, len(slicing), [len(n) for _, n in slicing]).lower(ranks > 1 and model.tie_weights)
    partition = even_partition(model, ranks)

    def make(rank, comm=None, **more):
        return RankEngine(model, partition, slicing, program, rank, comm, backend=Backend("cuda", dtype), **device, **more)

    return program, make


def graphs():
    """A step launched as graphs against one enqueued call by call: the same bits, and how long either keeps the host."""
    import terapipe_c as tp

    model, found = small_model(), {}
    params = tp.init_params(model, seed=1)
    tokens = np.random.default_rng(2).integers(0, model.vocab_size, (4, 257)).astype(np.int32)
    for name, eager in (("graphs", False), ("eager", True)):
        _, make = engine_of(model, [(1, [64] * 4)] * 4, eager=eager)
        engine = make(0)
        engine.load(params)
        steps = []
        for step in range(12):
            start = time.perf_counter()
            loss, norm, *_ = engine.run(tokens, step=step + 1, **HYPER)
            steps.append(time.perf_counter() - start)
        trace = engine.trace()
        assert all(row[4] <= row[5] for row in trace) and trace[-1][5] > trace[0][4]
        found[name] = {"loss": loss, "norm": norm, "step_s": statistics.median(steps[4:]), "first_s": steps[0],
                       "trace_s": trace[-1][5] - trace[0][4]}
    assert found["graphs"]["loss"] == found["eager"]["loss"] and found["graphs"]["norm"] == found["eager"]["norm"], found
    return found


def curve():
    """100 steps of a small model by the GPU in bf16 and float32 and by the CPU: the losses lie on each other."""
    import common

    import terapipe_c as tp

    model = small_model(n_layer=2, n_embd=128, vocab_size=256, block_size=128)
    data, losses = str(common.corpus(400_000)), {}
    for backend, dtype in (("cpu", None), ("cuda", "float32"), ("cuda", "bf16")):
        plan = tp.plan(model, tp.Cluster.local(), 8, 128, stages=1, planner="terapipe", schedule="gpipe",
                       slicing=[(8, [64, 64])], backend=backend, dtype=dtype)
        run = tp.launch(plan, data, 100, lr=3e-3, warmup_steps=10, backend=backend, dtype=dtype, processes=False, progress=False,
                        threads_per_rank=8)
        losses[dtype or "cpu"] = [record.loss for record in run]
    cpu = np.array(losses["cpu"])
    far = {dtype: float(np.abs(np.array(losses[dtype]) / cpu - 1).max()) for dtype in ("float32", "bf16")}
    assert cpu[-1] < 0.7 * cpu[0] and far["float32"] < 5e-3 and far["bf16"] < 3e-2, (far, cpu[0], cpu[-1])
    return {"largest_relative_difference": far, "losses": {k: [round(x, 5) for x in v[::10]] for k, v in losses.items()}}


def some_params(model):
    """As initialised, but quickly: a block of normal numbers over and over."""
    from terapipe_c.checkpoint import param_shapes

    some = np.random.default_rng(3).standard_normal((1 << 20) + 7, np.float32) * np.float32(0.02)
    return {name: np.ones(shape, np.float32) if ".ln_" in name and name.endswith("weight") else np.resize(some, shape)
            for name, shape in param_shapes(model).items()}


def training(size):
    def answer():
        import terapipe_c as tp

        preset, batch, micros = SIZES[size]
        model = tp.GPTConfig.preset(preset)
        seq_len = model.block_size
        slicing = [(batch, [seq_len])] * micros
        _, make = engine_of(model, slicing, candidates=8)
        engine = make(0)
        engine.load(some_params(model))
        rng, steps = np.random.default_rng(5), []
        began = time.monotonic()
        while len(steps) < 4 or (time.monotonic() - began < 6 and len(steps) < 30):
            tokens = rng.integers(0, model.vocab_size, (batch * micros, seq_len + 1)).astype(np.int32)
            start = time.perf_counter()
            loss, norm, *_ = engine.run(tokens, step=len(steps) + 1, **HYPER)
            steps.append(time.perf_counter() - start)
        step_s = statistics.median(steps[3:] or steps)
        tokens_per_step = batch * micros * seq_len
        attention = 6 * model.n_layer * model.n_embd
        flops = model.flops_per_token(seq_len)
        dense = flops - attention * (seq_len + 1) + 2 * attention * seq_len
        spent = {}
        for op, *_, start, end in engine.trace():
            spent[op] = spent.get(op, 0.0) + end - start
        return {"model": repr(model), "parameters": model.num_params, "micro_batch": batch, "micro_batches": micros,
                "step_s": step_s, "steps_s": steps, "loss": loss, "grad_norm": norm, "tokens_per_s": tokens_per_step / step_s,
                "tflops": 1e-12 * flops * tokens_per_step / step_s, "dense_tflops": 1e-12 * dense * tokens_per_step / step_s,
                "goal_tflops": GOALS[size], "formula": __doc__.split("\n\n")[1].replace("\n", " "),
                "peak_bytes": engine.peak_memory_bytes, "seconds_by_operation": spent}

    answer.__doc__ = f"A training step of GPT-2 {size} in bf16 on the whole GPU: TFLOP/s."
    return answer


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

        def forward(self, tokens, targets):
            x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            logits = functional.linear(self.ln_f(x), self.wte.weight)
            return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return Gpt().to(torch.device("cuda"))


def torch_peer(size):
    def answer():
        import torch

        import terapipe_c as tp

        preset, batch, micros = SIZES[size]
        model = tp.GPTConfig.preset(preset)
        seq_len = model.block_size
        torch.set_float32_matmul_precision("high")
        net = torch_gpt(model)
        compiled = torch.compile(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
        steps, began = [], time.monotonic()
        while len(steps) < 4 or (time.monotonic() - began < 30 and len(steps) < 14):
            tokens = torch.randint(0, model.vocab_size, (batch * micros, seq_len + 1))
            torch.cuda.synchronize()
            start = time.perf_counter()
            on_device = tokens.cuda(non_blocking=True)
            for part in on_device.split(batch):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = compiled(part[:, :-1], part[:, 1:])
                (loss / micros).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()
            torch.cuda.synchronize()
            steps.append(time.perf_counter() - start)
        step_s, tokens_per_step = statistics.median(steps[3:] or steps), batch * micros * seq_len
        return {"torch": torch.__version__, "step_s": step_s, "steps_s": steps, "tokens_per_s": tokens_per_step / step_s,
                "tflops": 1e-12 * model.flops_per_token(seq_len) * tokens_per_step / step_s}

    answer.__doc__ = f"The same step of GPT-2 {size} by PyTorch: torch.compile, bf16 autocast, fused AdamW, the same tokens a step."
    return answer


STAGES, LONG = 4, 2048


def pipeline():
    """Four stages on four equal parts of the GPU, one sequence of 2048: token slices against GPipe, the simulator beside."""
    import terapipe_c as tp

    model = tp.GPTConfig(n_layer=24, n_head=16, n_embd=2048, vocab_size=50257, block_size=LONG, tie_weights=False)
    params = some_params(model)
    tokens = np.random.default_rng(7).integers(0, model.vocab_size, (1, LONG + 1)).astype(np.int32)
    found = {"model": repr(model), "stages": STAGES}
    for name, lengths in (("gpipe", [LONG]), ("slices of 512", [512] * 4), ("slices of 256", [256] * 8),
                          ("slices, first longest", [384, 320, 256, 256, 256, 192, 192, 192])):
        program, make = engine_of(model, [(1, lengths)], STAGES, "gpipe", candidates=4)
        steps, traces = run_ranks(model, program, make, params, tokens)
        found[name] = {"step_s": steps, "simulated_s": simulated(program, traces)}
        found[name]["simulated_over_measured"] = found[name]["simulated_s"] / steps
    best = min((k for k in found if k.startswith("slices")), key=lambda k: found[k]["step_s"])
    found["speedup"] = found["gpipe"]["step_s"] / found[best]["step_s"]
    return found


def run_ranks(model, program, make, params, tokens):
    """(median seconds of a step without its update, [trace of each rank]) of all ranks as threads, one part of the GPU each."""
    from terapipe_c import _core, cuda
    from terapipe_c.engine import gather_bytes, in_threads

    ranks = program.num_ranks
    everyone = bytearray(int(a != b) for a in range(ranks) for b in range(ranks))
    region = _core.Region.create(ranks, everyone, 1 << 16, max(64, gather_bytes(model)), False)
    parts, comms = cuda.pipeline_on_one_gpu(region, 0, 120.0)
    steps, start = [], threading.Barrier(ranks)

    def work(rank):
        engine = make(rank, comms[rank], part=parts[rank])
        engine.load(params)
        for _ in range(9):
            start.wait()
            begin = time.perf_counter()
            engine.run(tokens, update=False)
            start.wait()
            if rank == 0:
                steps.append(time.perf_counter() - begin)
        return engine.trace()

    traces = in_threads(region, work)
    return statistics.median(steps[3:]), traces


def simulated(program, traces):
    """The simulator's step, fed with what every operation took in this very run: forward and backward alone."""
    import terapipe_c as tp
    from terapipe_c.report import resimulated

    rows = [(rank, *row) for rank, trace in enumerate(traces) for row in trace if row[0] != "OPT"]
    zero = min(row[5] for row in rows)
    rows = [(*row[:5], row[5] - zero, row[6] - zero) for row in rows]
    return resimulated(program, tp.Timeline.from_intervals(rows, program.num_ranks).intervals)


QUESTIONS = [
    Question("parity", 15, parity, order=20),
    Question("graphs", 8, graphs, order=21),
    Question("loss curve", 20, curve, order=22),
    *(Question(f"training {size}", seconds, training(size), order=41 + i)
      for i, (size, seconds) in enumerate({"124M": 12, "350M": 14, "774M": 17, "1558M": 26}.items())),
    Question("pytorch 124M", 40, torch_peer("124M"), order=46),
    Question("pipeline", 30, pipeline, order=47),
]
