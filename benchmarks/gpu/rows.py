"""The row kernels (LayerNorm, GELU, embedding, classifier, AdamW): right, and how much of the memory's speed they use."""

import ctypes
from typing import Any

from gpu_check import Question, small, so_far


def opened() -> tuple[Any, Any, Any]:
    """(gpu_rows, its library built for this GPU, its launchers); imported late: it needs PyTorch."""
    import gpu_library
    import gpu_rows
    import torch

    if small():
        import cuda_emu

        return gpu_rows, cuda_emu.build(), gpu_rows.Rows(cuda_emu.library(), "cpu")
    library = gpu_library.build("{}{}".format(*torch.cuda.get_device_capability(0)))
    return gpu_rows, library, gpu_rows.Rows(ctypes.CDLL(str(library)), "cuda")


def right() -> dict[str, Any]:
    """Errors against PyTorch in float64, the same bits twice, and tests/test_cuda_rows.py and test_cuda_optim.py on the device."""
    gpu_rows, library, k = opened()
    errors = gpu_rows.check(k, 64, 20_003) if small() else gpu_rows.check(k)
    so_far({"errors": errors})
    edges = "" if small() else gpu_rows.edges(library)
    return {"errors": errors, "edges": edges, "headline": edges}


def speed() -> dict[str, Any]:
    """Bytes per second of each kernel, next to a copy on the device; formulas stand beside them."""
    gpu_rows, _, k = opened()
    if small():
        return {}
    found: dict[str, Any] = gpu_rows.measure(k, 10)
    share = [one["of_copy"] for one in found["kernels"].values()]
    head = f"{found['copy_bytes_per_s'] / 1e12:.2f} TB/s copied; kernels {min(share):.2f} to {max(share):.2f} of it"
    return found | {"headline": head}


QUESTIONS = [Question("rows", 80, right, 18), Question("row bandwidth", 9, speed, 62)]
