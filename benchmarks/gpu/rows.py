"""The row kernels (LayerNorm, GELU, embedding, classifier, AdamW): right, and how much of the memory's speed they use."""

import ctypes
from typing import Any

from gpu_check import Question


def opened() -> tuple[Any, Any, Any]:
    """(gpu_rows, its library built for this GPU, its launchers); imported late: it needs PyTorch."""
    import gpu_rows
    import torch

    library = gpu_rows.build(torch.cuda.get_device_capability(0))
    return gpu_rows, library, gpu_rows.Rows(ctypes.CDLL(str(library)), "cuda")


def right() -> dict[str, Any]:
    """Errors against PyTorch in float64, the same bits twice, and tests/test_cuda_rows.py on the device."""
    gpu_rows, library, k = opened()
    return {"errors": gpu_rows.check(k), "edges": gpu_rows.edges(library)}


def speed() -> dict[str, Any]:
    """Bytes per second of each kernel, next to a copy on the device; formulas stand beside them."""
    gpu_rows, _, k = opened()
    return gpu_rows.measure(k, 20)


QUESTIONS = [Question("rows", 60, right, 20), Question("row bandwidth", 30, speed, 60)]
