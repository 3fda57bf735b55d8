"""The device and its matrix products: what it is, the tests that need it, the ceiling, and a table of every product of GPT-2.

TFLOP/s here are 2 m n k / seconds of the device's clock, the median of the runs, on random numbers (zeros multiply faster).
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

from gpu_check import Question

ROOT = Path(__file__).resolve().parents[2]
LINEAR, LINEAR_T, LINEAR_W = range(3)
NONE, BIAS, GELU_AUX, RESIDUAL, DGELU = range(5)
F32, BF16 = 0, 1
MODELS = {"124M": 768, "350M": 1024, "774M": 1280, "1558M": 1600}
DATASHEET = {"H200": 989.0, "H100": 989.0, "A100": 312.0}  # dense bf16 TFLOP/s, NVIDIA's data sheets


def device():
    """What the backend says of the GPU, the driver and the libraries it finds."""
    import dataclasses

    import terapipe_c as tp

    assert tp.cuda.device_count() > 0, tp.cuda.why_not()
    versions = tp.cuda.versions()
    (cublaslt,) = (library for library in versions.libraries if library.name == "cublasLt")
    assert cublaslt.version, cublaslt.why_not
    for d in tp.cuda.devices():
        trial = tp.cuda.load().exercise(d.index)
    return {"trial": trial, "devices": [dataclasses.asdict(d) for d in tp.cuda.devices()], "versions": dataclasses.asdict(versions)}


def memory():
    """A byte more than is free is refused before anything runs, and says how much there is."""
    import terapipe_c as tp

    (first, *_) = tp.cuda.devices()
    try:
        tp.cuda.load().check(0, first.total_bytes + 1)
    except tp.OutOfMemoryError as error:
        assert str(first.total_bytes + 1) in str(error) and "short" in str(error), error
        return str(error)
    raise AssertionError("more memory than the device has was given")


def tests():
    """pytest -m gpu: every test that needs a device."""
    ran = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"], cwd=ROOT,
                         capture_output=True, text=True, env=environment())  # fmt: skip
    tail = ran.stdout.strip().splitlines()[-25:]
    assert ran.returncode == 0, "\n".join(tail) + ran.stderr[-1500:]
    return tail[-1]


def environment():
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT)}


def time_of(kind, dtype, epilogue, accumulate, rows, n_in, n_out, **options):
    """{"tflops", "seconds", "how"} of one product, the best of eight algorithms unless told otherwise."""
    import terapipe_c as tp

    options = {"repeats": 12, "candidates": 8} | options
    seconds, how = tp.cuda.load().gemm_seconds(kind, dtype, epilogue, accumulate, rows, n_in, n_out, **options)
    middle = statistics.median(seconds)
    return {"tflops": round(2e-12 * rows * n_in * n_out / middle, 1), "seconds": middle, "least": min(seconds), "how": how}


def ceiling():
    """8192^3 in bf16 on random numbers: what a product can reach here; and in fp32."""
    import terapipe_c as tp

    found = {"bf16": time_of(LINEAR, BF16, NONE, 0, 8192, 8192, 8192, repeats=40),
             "f32": time_of(LINEAR, F32, NONE, 0, 4096, 4096, 4096, repeats=5)}  # fmt: skip
    sheet = next((v for k, v in DATASHEET.items() if k in tp.cuda.devices()[0].name), None)
    return found | {"datasheet_bf16_tflops": sheet}


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
    for rows in (16384, 1024, 4096, 256):  # a run cut short has both ends
        for model in ("1558M", "124M"):
            for name, kind, epilogue, accumulate, n_in, n_out in products(MODELS[model]):
                if name.startswith("head") and rows > 4096:
                    continue
                if time.monotonic() - began > 38:
                    return {"cut_short": True, "products": rows_of_table}
                found = time_of(kind, BF16, epilogue, accumulate, rows, n_in, n_out, candidates=4, repeats=8)
                rows_of_table.append({"model": model, "product": name, "rows": rows} | found)
    return {"cut_short": False, "products": rows_of_table}


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
    return found


QUESTIONS = [
    Question("device", 15, device, order=10),
    Question("memory", 10, memory, order=11),
    Question("tests", 100, tests, order=12),
    Question("matmul ceiling", 20, ceiling, order=40),
    Question("products", 45, table, order=60),
    Question("fused gelu", 15, fused, order=61),
]
