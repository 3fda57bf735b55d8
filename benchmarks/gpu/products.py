"""The device and its matrix products: what it is, the tests that need it, the ceiling, and a table of every product of GPT-2.

TFLOP/s here are 2 m n k / seconds of the device's clock, the median of the runs, on random numbers (zeros multiply faster).
"""

import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

from gpu_check import Question, in_time, share, small, so_far

ROOT = Path(__file__).resolve().parents[2]
LINEAR, LINEAR_T, LINEAR_W = range(3)
NONE, BIAS, GELU_AUX, RESIDUAL, DGELU = range(5)
F32, BF16 = 0, 1
MODELS = {"124M": 768, "350M": 1024, "774M": 1280, "1558M": 1600}
LONG_S = 15.0  # of the table: then it is cut short
PYTEST_S = 4.0  # kept for each file of tests behind one
DATASHEET = {"H200": 989.0, "H100": 989.0, "A100": 312.0}  # dense bf16 TFLOP/s, NVIDIA's data sheets


def device():
    """What the backend says of the GPU, the driver and the libraries it finds."""
    import dataclasses

    import terapipe_c as tp

    assert tp.cuda.device_count() > 0, tp.cuda.why_not()
    versions = tp.cuda.versions()
    (cublaslt,) = (library for library in versions.libraries if library.name == "cublasLt")
    assert cublaslt.version, cublaslt.why_not
    found = {"devices": [dataclasses.asdict(d) for d in tp.cuda.devices()], "versions": dataclasses.asdict(versions)}
    found["contexts_made"] = [] if small() else [d.index for d in tp.cuda.devices() if has_context(d.index)]
    so_far(found)
    assert not found["contexts_made"], "who only lists GPUs makes a context"
    for d in tp.cuda.devices():
        found["trial"] = tp.cuda.load().exercise(d.index)
    first = found["devices"][0]
    return found | {"headline": f"{first['name']}, {first['multiprocessors']} multiprocessors, driver {versions.driver}, cublasLt "
                                f"{cublaslt.version}"}


def has_context(index):
    """Whether this process has made the primary context of a GPU (cuDevicePrimaryCtxGetState)."""
    import ctypes

    flags, active = ctypes.c_uint(), ctypes.c_int()
    assert ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active)) == 0
    return bool(active.value)


def memory():
    """A byte more than is free is refused before anything runs, and says how much there is."""
    import terapipe_c as tp

    assert tp.cuda.device_count() > 0, tp.cuda.why_not()
    first = tp.cuda.devices()[0]
    try:
        tp.cuda.load().check(0, first.total_bytes + 1)
    except tp.OutOfMemoryError as error:
        assert str(first.total_bytes + 1) in str(error) and "short" in str(error), error
        return {"headline": str(error)[:100]}
    raise AssertionError("more memory than the device has was given")


def tests():
    """pytest -m gpu: every test that needs a device; and our declarations against the libraries' headers, where they lie."""
    files = sorted((ROOT / "tests").glob("test_cuda_*.py"))
    marked, told = [path for path in files if "mark.gpu" in path.read_text()], {}
    for i, path in enumerate(marked):  # a process each: one that loses the device, or hangs, takes its own tests with it
        told[path.name] = pytest(share(in_time(), len(marked) - i, PYTEST_S), [path], "-m", "gpu")
        so_far({"told": told})
    on_gpu = list(told.values())
    told["declarations"] = pytest(in_time(), files, "-k", "declarations")
    so_far({"told": told})
    assert all(one["status"] == 0 for one in told.values()), "\n".join(one["tail"] for one in told.values() if one["status"] != 0)
    assert on_gpu and all(" passed" in one["last"] for one in on_gpu), on_gpu
    return {"headline": "; ".join(f"{name}: {one['last']}" for name, one in told.items()), "told": told}


def pytest(seconds, files, *options):
    names = [str(path.relative_to(ROOT)) for path in files]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "--tb=short", "-p", "no:cacheprovider", *options, *names]
    try:
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment(),
                             timeout=None if seconds == math.inf else max(seconds, 0.1))
    except subprocess.TimeoutExpired as late:
        return {"status": None, "last": f"longer than {seconds:.0f} s", "tail": f"{names}: {(late.stdout or b'')[-3000:]!r}"}
    lines = ran.stdout.strip().splitlines() or [""]
    return {"status": ran.returncode, "last": lines[-1], "tail": "\n".join(lines[-40:])[-3000:] + ran.stderr[-1000:]}


def environment():
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # others' plugins load others' libraries


def time_of(kind, dtype, epilogue, accumulate, rows, n_in, n_out, **options):
    """{"tflops", "seconds", "how"} of one product, the best of so many algorithms (8 unless told otherwise)."""
    import terapipe_c as tp

    options = {"repeats": 12, "candidates": 8} | options
    if small():
        rows, n_in, n_out = (min(n, 64) for n in (rows, n_in, n_out))
    seconds, how = tp.cuda.load().gemm_seconds(kind, dtype, epilogue, accumulate, rows, n_in, n_out, **options)
    seconds = [max(s, 1e-9) for s in seconds]
    middle = statistics.median(seconds)
    return {"tflops": round(2e-12 * rows * n_in * n_out / middle, 1), "seconds": middle, "least": min(seconds), "how": how}


def ceiling():
    """8192^3 in bf16 on random numbers: what a product can reach here; and in fp32; of as many algorithms as training times."""
    import terapipe_c as tp
    from terapipe_c.engine import TIMED

    found = {"bf16": time_of(LINEAR, BF16, NONE, 0, 8192, 8192, 8192, repeats=40, candidates=TIMED),
             "f32": time_of(LINEAR, F32, NONE, 0, 4096, 4096, 4096, repeats=5, candidates=TIMED)}  # fmt: skip
    sheet = next((v for k, v in DATASHEET.items() if k in tp.cuda.devices()[0].name), None)
    return found | {"datasheet_bf16_tflops": sheet, "formula": "2 m n k / seconds, 8192^3 (fp32: 4096^3), random numbers",
                    "headline": f"bf16 {found['bf16']['tflops']} TFLOP/s (data sheet {sheet}), fp32 {found['f32']['tflops']}"}


def products(c):
    """(name, kind, epilogue, accumulate, n_in, n_out) of a layer of width c and of the head."""
    forward = [("qkv", c, 3 * c), ("projection", c, c), ("fc1", c, 4 * c), ("fc2", 4 * c, c)]
    for name, n_in, n_out in forward:
        epilogue = {"qkv": BIAS, "fc1": GELU_AUX}.get(name, RESIDUAL)
        yield f"{name} forward", LINEAR, epilogue, 0, n_in, n_out
        yield f"{name} dx", LINEAR_T, DGELU if name == "fc2" else NONE, 0, n_in, n_out
        yield f"{name} dw", LINEAR_W, NONE, 1, n_in, n_out
    yield "head forward", LINEAR_T, NONE, 0, 50304, c
    yield "head dx", LINEAR, NONE, 0, 50304, c
    yield "head dw", LINEAR_W, NONE, 1, 50304, c


def table():
    """t(rows) of every product of GPT-2 124M and 1558M at 256 to 16384 rows, all multiprocessors."""
    began, rows_of_table = time.monotonic(), []
    over = lambda: {"cut_short": time.monotonic() - began > LONG_S, "products": rows_of_table,  # noqa: E731
                    "headline": f"{len(rows_of_table)} products"}
    for rows in (16384, 1024, 4096, 256):  # a run cut short has both ends
        for model in ("1558M", "124M"):
            for name, kind, epilogue, accumulate, n_in, n_out in products(MODELS[model]):
                if name.startswith("head") and rows > 4096:
                    continue
                if time.monotonic() - began > LONG_S:
                    return over()
                found = time_of(kind, BF16, epilogue, accumulate, rows, n_in, n_out, candidates=4, repeats=8)
                rows_of_table.append({"model": model, "product": name, "rows": rows} | found)
            so_far(over())
    return over()


def fused():
    """GELU fused into the product against a kernel after it, and one pinned algorithm against the best."""
    found = []
    for model, c in (("124M", 768), ("1558M", 1600)):
        for rows in (1024, 8192):
            for name, kind, epilogue, n_in, n_out in (("fc1 forward", LINEAR, GELU_AUX, c, 4 * c),
                                                      ("fc2 dx", LINEAR_T, DGELU, 4 * c, c)):  # fmt: skip
                row = {"model": model, "product": name, "rows": rows}
                for label, options in (("fused", {"candidates": 1}), ("apart", {"candidates": 1, "fuse": 1}),
                                       ("best", {}), ("reproducible", {"reproducible": 1})):  # fmt: skip
                    one = time_of(kind, BF16, epilogue, 0, rows, n_in, n_out, **options)
                    row[label] = {"seconds": one["seconds"], "how": one["how"]}
                found.append(row)
                so_far(found)
    gains = [row["apart"]["seconds"] / row["fused"]["seconds"] for row in found]
    return {"headline": f"fused {min(gains):.2f} to {max(gains):.2f} times as fast as apart", "found": found}


QUESTIONS = [
    Question("device", 25, device, order=10),
    Question("memory", 20, memory, order=11),
    Question("tests", 70, tests, order=16),
    Question("matmul ceiling", 7, ceiling, order=40),
    Question("products", 10, table, order=60),
    Question("fused gelu", 7, fused, order=61),
]
