# The CUDA backend, where it was built. terapipe_c/cuda.py is its face; cuda/module*.c say what each does.
from typing import Any

from typing_extensions import Buffer, CapsuleType

provider: Any

def device_count() -> int: ...
def why_not() -> str: ...
def describe(index: int, /) -> dict[str, Any]: ...
def versions() -> tuple[int, int]: ...
def libraries() -> dict[str, tuple[str, str, str, str]]: ...
def set_folders(folders: str, /) -> None: ...
def check(index: int, bytes: int, /) -> None: ...
def exercise(index: int, part: Any = ..., /) -> dict[str, Any]: ...
def gemm(
    kind: int,
    dtype: int,
    epilogue: int,
    accumulate: int,
    rows: int,
    n_in: int,
    n_out: int,
    x: Buffer,
    x_stride: int,
    w: Buffer,
    w_stride: int,
    y: Buffer,
    y_stride: int,
    bias: Buffer | None = ...,
    aux: Buffer | None = ...,
    aux_stride: int = ...,
    device: int = ...,
    candidates: int = ...,
    reproducible: int = ...,
    fuse: int = ...,
) -> str: ...
def gemm_seconds(
    kind: int,
    dtype: int,
    epilogue: int,
    accumulate: int,
    rows: int,
    n_in: int,
    n_out: int,
    repeats: int = ...,
    device: int = ...,
    candidates: int = ...,
    reproducible: int = ...,
    fuse: int = ...,
) -> tuple[list[float], str]: ...
def attention_kernel(device: int, dtype: int, /) -> str: ...
def attention(
    dtype: int,
    shape: tuple[int, int, int, int, int, int, int, int],
    arrays: tuple[int, ...],
    groups: int = ...,
    stream: int = ...,
    wgmma: bool = ...,
    multiprocessors: int = ...,
    kept: tuple[int, int] = ...,
) -> None: ...
def cudnn(workspace: int, bytes: int, device: int = ..., stream: int = ..., /) -> CapsuleType: ...
def cudnn_attention(
    plans: CapsuleType,
    shape: tuple[int, int, int, int, int, int, int, int],
    arrays: tuple[int, int, int, int, int],
    /,
) -> str: ...
def nccl(link: CapsuleType, pairs: Any, message_bytes: int, max_ctas: int = 0, replicas: int = 1, copies: int = 1,
         slots: int = 0, /) -> CapsuleType: ...
def inproc(link: CapsuleType, message_bytes: int, /) -> CapsuleType: ...
def inproc_ways(link: CapsuleType, ways: int, /) -> None: ...
def partitions(index: int, parts: int, /) -> list[tuple[CapsuleType, int]]: ...
