"""The row kernels on a GPU: right against PyTorch in float64, and bytes per second against what the device copies.

Each kernel moves `bytes` (the formula is in the result: what it has to read and write once) in the median of --steps runs
between two CUDA events; its rate is held against a copy of 1 GiB on the device (read and written, so 2 GiB), measured in
the same run, and against the memory's own peak. Inputs are random; where a kernel works in place they are restored before
each run. Peers are PyTorch's operations of the same meaning. Needs PyTorch with CUDA, nvcc and a GPU; --emulate does the
checks alone, small, on the host's emulator, and measures nothing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import math
import os
import statistics
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import gpu_library
import numpy as np

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    sys.exit("gpu_rows: PyTorch is missing")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from cuda_launchers import declare, list_tensors  # noqa: E402


@dataclass
class Case:
    """One kernel on one set of inputs."""

    name: str
    bytes: int
    formula: str
    call: Callable[[], None]
    # after a call: (result, what float64 says, size that errors are relative to beyond one rounding; 0: the largest number)
    check: Callable[[], list[tuple[torch.Tensor, torch.Tensor, float]]]
    reset: Callable[[], object] = lambda: None
    peer: Callable[[], object] | None = None
    results: list[torch.Tensor] = field(default_factory=list)  # what must be the same bits in every run


class Rows:
    """The launchers on tensors of one device."""

    def __init__(self, library: ctypes.CDLL, device: str) -> None:
        self.lib, self.device = declare(library), device
        self.random = torch.Generator(device=device).manual_seed(1)

    def __call__(self, name: str, *arguments: Any) -> None:
        values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        if getattr(self.lib, "tp_cuda_" + name)(None, *values):
            raise RuntimeError(self.lib.tp_error_message().decode())

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random, device=self.device).to(dtype)

    def below(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self.random, device=self.device, dtype=torch.int32)

    def nan(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, math.nan, device=self.device, dtype=dtype)

    def groups(self, index: torch.Tensor, height: int) -> tuple[int, list[torch.Tensor]]:
        host, most = index.cpu().contiguous(), min(len(index), height)
        counts, *arrays = (torch.empty(size, dtype=torch.int32) for size in (height, most, most + 1, len(index)))
        found = torch.zeros(1, dtype=torch.int64)
        pointers = [t.data_ptr() for t in (counts, *arrays, found)]
        if self.lib.tp_cuda_group_rows(len(host), host.data_ptr(), height, *pointers):
            raise RuntimeError(self.lib.tp_error_message().decode())
        return int(found), [t.to(self.device) for t in arrays]


def norm_cases(k: Rows, dtype: torch.dtype, rows: int, n: int) -> Iterator[Case]:
    d, e = int(dtype == torch.bfloat16), dtype.itemsize
    x, dy, residual = (k.normal(rows, n, dtype=dtype) for _ in range(3))
    gamma, beta = k.normal(n), k.normal(n)
    y, dx, mean, rstd = k.nan(rows, n, dtype=dtype), k.nan(rows, n, dtype=dtype), k.nan(rows), k.nan(rows)
    sums = k.nan(2, n)
    partial = k.nan(max(1, k.lib.tp_cuda_partial_floats(rows, n)))

    def unit() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x64 = x.double()
        m = x64.mean(dim=1, keepdim=True)
        s = 1 / torch.sqrt(((x64 - m) ** 2).mean(dim=1, keepdim=True) + 1e-5)
        return (x64 - m) * s, m, s

    def backward() -> torch.Tensor:
        u, _, s = unit()
        g = dy.double() * gamma.double()
        return residual.double() + s * (g - g.mean(dim=1, keepdim=True) - u * (g * u).mean(dim=1, keepdim=True))

    low = [t.to(dtype) for t in (gamma, beta)]
    yield Case("layernorm", 2 * e * rows * n + 8 * (rows + n), "2 e R n + 8 (R + n)",
               lambda: k("layernorm", d, rows, n, x, n, gamma, beta, y, n, mean, rstd),
               lambda: [(y, unit()[0] * gamma.double() + beta.double(), 0.0), (mean, unit()[1][:, 0], 1.0),
                        (rstd, unit()[2][:, 0], 0.0)],
               peer=lambda: F.layer_norm(x, (n,), *low), results=[y, mean, rstd])  # fmt: skip
    yield Case("layernorm_backward", 4 * e * rows * n + 8 * rows + 4 * n, "4 e R n + 8 R + 4 n",
               lambda: k("layernorm_backward", d, rows, n, dy, n, x, n, mean, rstd, gamma, residual, n, dx, n),
               lambda: [(dx, backward(), 0.0)], results=[dx])  # fmt: skip
    yield Case("layernorm_param_gradient", 2 * e * rows * n + 8 * rows + 8 * n, "2 e R n + 8 R + 8 n",
               lambda: k("layernorm_param_gradient", d, rows, n, dy, n, x, n, mean, rstd, sums[0], sums[1], 0, partial),
               lambda: [(sums[0], (dy.double() * unit()[0]).sum(dim=0), float(rows) ** 0.5 * 16),
                        (sums[1], dy.double().sum(dim=0), float(rows) ** 0.5 * 16)], results=[sums])  # fmt: skip
    db = k.nan(n)
    yield Case("bias_gradient", e * rows * n + 4 * n, "e R n + 4 n",
               lambda: k("bias_gradient", d, rows, n, dy, n, db, 0, partial),
               lambda: [(db, dy.double().sum(dim=0), float(rows) ** 0.5 * 16)],
               peer=lambda: dy.sum(dim=0, dtype=torch.float32), results=[db])  # fmt: skip


def pointwise_cases(k: Rows, dtype: torch.dtype, rows: int, n: int) -> Iterator[Case]:
    d, e = int(dtype == torch.bfloat16), dtype.itemsize
    h, dg = (k.normal(rows, n, dtype=dtype) for _ in range(2))
    start, bias, out = k.normal(rows, n, dtype=dtype), k.normal(n), k.nan(rows, n, dtype=dtype)

    def slope() -> torch.Tensor:
        with torch.enable_grad():
            x = h.double().requires_grad_()
            (gradient,) = torch.autograd.grad(F.gelu(x, approximate="tanh"), x, dg.double())
        return gradient

    yield Case("gelu", 2 * e * rows * n, "2 e R n", lambda: k("gelu", d, rows, n, h, out),
               lambda: [(out, F.gelu(h.double(), approximate="tanh"), 0.0)],
               peer=lambda: F.gelu(h, approximate="tanh"), results=[out])  # fmt: skip
    yield Case("dgelu", 3 * e * rows * n, "3 e R n", lambda: k("dgelu", d, rows, n, h, dg, out),
               lambda: [(out, slope(), 0.0)],
               peer=lambda: torch.ops.aten.gelu_backward(dg, h, approximate="tanh"), results=[out])  # fmt: skip
    restore = lambda: out.copy_(start)  # noqa: E731
    yield Case("add", 3 * e * rows * n, "3 e R n", lambda: k("add", d, rows * n, h, out),
               lambda: [(out, start.double() + h.double(), 0.0)], restore, lambda: out.add_(h), [out])  # fmt: skip
    yield Case("add_bias", 3 * e * rows * n + 4 * n, "3 e R n + 4 n", lambda: k("add_bias", d, rows, n, out, bias, h),
               lambda: [(out, start.double() + bias.double() + h.double(), 0.0)], restore, None, [out])  # fmt: skip
    wide = k.normal(rows, n)
    yield Case("cast", (4 + e) * rows * n, "(4 + e) n", lambda: k("cast", d, rows * n, wide, out),
               lambda: [(out, wide.to(dtype).double(), 0.0)], peer=lambda: out.copy_(wide), results=[out])  # fmt: skip


def vocab_cases(
    k: Rows, dtype: torch.dtype, rows: int, n: int, loss_rows: int, vocab: int, stride: int
) -> Iterator[Case]:
    d, e = int(dtype == torch.bfloat16), dtype.itemsize
    wte, wpe, dy = (k.normal(size, n, dtype=dtype) for size in (vocab, 1024, rows))
    tokens, places, y = k.below(vocab, rows), k.below(1024, rows), k.nan(rows, n, dtype=dtype)
    yield Case("embedding", 2 * e * rows * n + 8 * rows, "2 e R n + 8 R",
               lambda: k("embedding", d, rows, n, tokens, places, wte, wpe, y, n),
               lambda: [(y, wte[tokens.long()].double() + wpe[places.long()].double(), 0.0)], results=[y])  # fmt: skip
    # text: few tokens make most of it (Zipf's law)
    common_tokens = (vocab ** torch.rand(rows, generator=k.random, device=k.device)).to(torch.int32) % vocab
    groups, arrays = k.groups(common_tokens, vocab)
    start = k.normal(vocab, n)
    grad = start.clone()
    yield Case("embedding_gradient", e * rows * n + 8 * groups * n, "e R n + 8 n (indices seen)",
               lambda: k("embedding_gradient", d, n, groups, *arrays, dy, n, grad, n),
               lambda: [(grad, start.double().index_add_(0, common_tokens.long(), dy.double()), float(rows) ** 0.5)],
               lambda: grad.copy_(start), None, [grad])  # fmt: skip
    given = 4 * k.normal(loss_rows, stride, dtype=dtype)
    given[:, vocab:] = math.nan
    logits, loss, targets = given.clone(), k.nan(loss_rows), k.below(vocab, loss_rows)

    def classified() -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        x = given[:, :vocab].double()
        gradient = torch.softmax(x, dim=1)
        gradient[torch.arange(loss_rows, device=k.device), targets.long()] -= 1
        padding = torch.zeros(loss_rows, stride - vocab, device=k.device, dtype=torch.float64)
        return [(loss, F.cross_entropy(x, targets.long(), reduction="none"), 0.0), (logits[:, :vocab], gradient * 0.5, 0.0),
                (logits[:, vocab:], padding, 0.0)]  # fmt: skip

    yield Case("softmax_loss", 2 * e * loss_rows * stride, "2 e R V",
               lambda: k("softmax_loss", d, loss_rows, vocab, logits, stride, targets, 0.5, 1, loss), classified,
               lambda: logits.copy_(given), None, [logits, loss])  # fmt: skip


def optim_cases(k: Rows, dtype: torch.dtype, n: int) -> Iterator[Case]:
    d, e = int(dtype == torch.bfloat16), dtype.itemsize
    p0, g, m0 = (k.normal(n) for _ in range(3))
    v0 = k.normal(n) ** 2
    out = torch.full((1,), math.nan, device=k.device, dtype=torch.float64)
    p, m, v = p0.clone(), m0.clone(), v0.clone()
    copy = k.nan(n, dtype=dtype)
    tensor, owner = (torch.from_numpy(table.view(np.uint8)).to(k.device) for table in list_tensors(
        k.lib, [(n, *(t.data_ptr() for t in (g, p, m, v, copy)), 1)]))  # fmt: skip
    leaves = k.lib.tp_cuda_leaves(n)
    whole = torch.tensor([1, leaves, tensor.data_ptr(), owner.data_ptr()])  # tp_cuda_tensors, the host's
    partial = torch.full((leaves,), math.nan, device=k.device, dtype=torch.float64)
    yield Case("sumsq", 4 * n, "4 n", lambda: k("sumsq", whole, out, partial),
               lambda: [(out, (g.double() ** 2).sum()[None], 0.0)], peer=lambda: torch.linalg.vector_norm(g),
               results=[out])  # fmt: skip
    beta1, beta2, lr, eps, decay, scale = 0.9, 0.95, 1e-2, 1e-8, 0.1, 0.5
    packed = struct.pack("dd6f", beta1, beta2, lr, eps, decay, 1 - beta1**3, 1 - beta2**3, scale)  # tp_adamw_args
    args = torch.tensor(list(packed), device=k.device, dtype=torch.uint8)

    def stepped() -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        g64 = g.double() * scale
        m64 = beta1 * m0.double() + (1 - beta1) * g64
        v64 = beta2 * v0.double() + (1 - beta2) * g64**2
        update = m64 / (1 - beta1**3) / (torch.sqrt(v64 / (1 - beta2**3)) + eps)
        p64 = p0.double() - lr * (update + decay * p0.double())
        return [(p, p64, 0.0), (m, m64, 0.0), (v, v64, 0.0), (copy, p64, 0.0)]

    def restore() -> None:
        for to, start in ((p, p0), (m, m0), (v, v0)):
            to.copy_(start)

    yield Case("adamw", (28 + e) * n, "(28 + e) n", lambda: k("adamw", d, whole, tensor, None, args), stepped, restore,
               None, [p, m, v, copy])  # fmt: skip


def error_of(got: torch.Tensor, want: torch.Tensor, size: float) -> tuple[float, float]:
    """(the largest error relative to `size` beyond the rounding of a bf16 result, the RMS error relative to RMS)."""
    if not want.numel():
        return 0.0, 0.0
    error, rounding = (got.double() - want).abs(), 2.0**-8 if got.dtype == torch.bfloat16 else 0.0
    size = max(size, float(want.abs().max()), 1e-30)
    beyond = torch.clamp(error - rounding * want.abs(), min=0)
    rms = float((error**2).mean().sqrt()) / max(float((want**2).mean().sqrt()), 1e-30)
    return float(beyond.max()) / size if not bool(beyond.isnan().any()) else math.inf, rms


def correctness(k: Rows, cases: Callable[[], Iterator[Case]]) -> dict[str, dict[str, float]]:
    """{kernel: its largest errors}; raises where one is wrong, or where a second run gives other bits."""
    found = {}
    for case in cases():
        case.reset()
        case.call()
        first = [r.clone() for r in case.results]
        errors = [error_of(*checked) for checked in case.check()]
        case.reset()
        case.call()
        same = all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, case.results, strict=True)
        )
        worst, rms = max(e[0] for e in errors), max(e[1] for e in errors)
        found[case.name] = {"beyond_rounding": worst, "rms": rms}
        if not same or not worst <= 1e-5 or not rms <= 3e-3:
            raise RuntimeError(
                f"{case.name}: error {worst:.3g} (<= 1e-5), RMS {rms:.3g} (<= 3e-3), same bits again: {same}"
            )
    return found


def seconds_of(case: Case, call: Callable[[], object], steps: int) -> list[float]:
    """By the device's clock. Before each the GPU reads 1 GiB: so it is asked for before it may begin (a short one takes as long as
    the host takes to ask for it), and no cache holds what it reads, nor what is still to be written."""
    times, busy = [], torch.zeros(1 << 28, device="cuda")
    for i in range(-3, steps):  # three to warm up
        case.reset()
        busy.sum()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if i >= 0:
            times.append(begin.elapsed_time(end) * 1e-3)
    return times


def copied(steps: int) -> float:
    """Bytes per second of a copy on the device, read and written."""
    a, b = (torch.randint(0, 255, (1 << 30,), device="cuda", dtype=torch.uint8) for _ in range(2))
    case = Case("copy", 2 << 30, "2 n", lambda: None, list)
    return case.bytes / statistics.median(seconds_of(case, lambda: b.copy_(a), steps))


def bandwidth(k: Rows, cases: Callable[[], Iterator[Case]], steps: int, ceiling: float) -> dict[str, dict[str, Any]]:
    """{kernel: what it moved, in what time, and how fast next to the device's copy}."""
    found: dict[str, dict[str, Any]] = {}
    for case in cases():
        times = seconds_of(case, case.call, steps)
        median = statistics.median(times)
        rate = case.bytes / median
        found[case.name] = {"bytes": case.bytes, "formula": case.formula, "median_s": median, "least_s": min(times),
                            "bytes_per_s": rate, "of_copy": rate / ceiling}  # fmt: skip
        if case.peer:
            found[case.name]["torch_median_s"] = statistics.median(seconds_of(case, case.peer, steps))
    return found


def all_cases(
    k: Rows, dtype: torch.dtype, rows: int, n: int, loss_rows: int, params: int
) -> Callable[[], Iterator[Case]]:
    vocab, stride = (50257, 50304) if n > 100 else (257, 264)
    return lambda: itertools.chain(norm_cases(k, dtype, rows, n), pointwise_cases(k, dtype, rows, n),
                                   vocab_cases(k, dtype, rows, n, loss_rows, vocab, stride),
                                   optim_cases(k, dtype, params))  # fmt: skip


def check(k: Rows, rows: int = 4096, params: int = 1_000_003) -> dict[str, Any]:
    """Every kernel in both types, on a width of GPT-2 XL and on an odd one."""
    return {f"{str(dtype)[6:]} n={n}": correctness(k, all_cases(k, dtype, rows, n, max(1, rows // 8), params))
            for dtype in (torch.float32, torch.bfloat16) for n in (1600, 77)}  # fmt: skip


def measure(k: Rows, steps: int) -> dict[str, Any]:
    """Sizes of GPT-2 XL at 32768 tokens: no array of activations fits in a cache."""
    ceiling = copied(steps)
    rates = bandwidth(k, all_cases(k, torch.bfloat16, 32768, 1600, 8192, 100_000_000), steps, ceiling)
    return {"copy_bytes_per_s": ceiling, "kernels": rates}


def edges(library: Path) -> str:
    """tests/test_cuda_rows.py and test_cuda_optim.py on the device: their last line. Raises where a test fails."""
    if importlib.util.find_spec("pytest") is None:
        return "pytest is missing: the edge cases were not run"
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider", "tests/test_cuda_rows.py",
               "tests/test_cuda_optim.py"]  # fmt: skip
    environment = {**os.environ, "TERAPIPE_CUDA_ROWS": str(library), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"the edge cases fail on the device:\n{ran.stdout[-4000:]}{ran.stderr[:1500]}")
    return ran.stdout.strip().splitlines()[-1]


def run(steps: int = 20) -> dict[str, Any]:
    """What gpu_check.py asks for: correctness first, then rates."""
    properties = torch.cuda.get_device_properties(0)
    library = gpu_library.build("{}{}".format(*torch.cuda.get_device_capability(0)))
    k = Rows(ctypes.CDLL(str(library)), "cuda")
    right = {"errors": check(k), "edges": edges(library)}
    return {"gpu": properties.name, "torch": torch.__version__, **right, **measure(k, steps)}


def main() -> None:
    parser = common.arguments(__doc__, steps=20)
    parser.add_argument("--emulate", action="store_true", help="small checks on the host's emulator; measures nothing")
    options = parser.parse_args()
    if options.emulate:
        import cuda_emu

        for case, errors in check(Rows(cuda_emu.library(), "cpu"), 64, 20_003).items():
            print(case, {name: f"{e['beyond_rounding']:.1e} {e['rms']:.1e}" for name, e in errors.items()})
        print(edges(Path(cuda_emu.build())))
        return
    if not torch.cuda.is_available():
        sys.exit("gpu_rows: PyTorch sees no GPU; nothing was measured")
    result = common.header(
        "Do the row kernels agree with PyTorch in float64, and how much of the memory's speed do they use?"
    )
    result |= run(options.steps)
    for name, one in result["kernels"].items():
        print(f"{name:26} {one['bytes_per_s'] / 1e9:8.0f} GB/s  {one['of_copy']:.2f} of a copy")
    common.write("gpu_rows", result, options.out)


if __name__ == "__main__":
    main()
