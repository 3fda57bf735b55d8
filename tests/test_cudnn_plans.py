"""The real libcudnn, where it is installed, takes the graphs that cuda/cudnn_graph.c builds: its heuristics know them, and its
engines compile plans for them, for GPUs that are described to it (9.8 or newer needs none here). That shows that every descriptor
is right and every shape supported (9.19.0 and 9.28.1, on 2026-11-22); what such a plan computes only a GPU can show
(benchmarks/gpu/attention.py).

    pip download --no-deps nvidia-cudnn-cu13==9.19.0.56 nvidia-cuda-nvrtc==13.0.* nvidia-cublas   # and unpack all in one folder
    TERAPIPE_CUDNN=.../nvidia/cudnn/lib/libcudnn.so.9 python -m pytest tests/test_cudnn_plans.py
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "cuda").is_dir():
    pytest.skip("no sources beside the tests", allow_module_level=True)

# As cuDNN would describe each to itself: cudaDeviceProp's numbers.
HOPPER = {"cudaDeviceId": 0, "deviceVer": 900, "driverVer": 13000, "totalGlobalMem": 150754820096,
          "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
          "multiProcessorCount": 132, "warpSize": 32, "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448,
          "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024,
          "maxThreadsPerSM": 2048, "pciDeviceId": 0, "isTccDriver": 0, "supportCoopLaunch": 1, "smClockRateKHz": 1980000,
          "memClockRateKHz": 3201000, "memoryBusWidth": 6144, "l2CacheSize": 62914560, "deviceName": "NVIDIA H200"}  # fmt: skip
GPUS = {
    "H200": HOPPER,
    "H100": HOPPER | {"totalGlobalMem": 85027979264, "memoryBusWidth": 5120, "l2CacheSize": 52428800,
                      "deviceName": "NVIDIA H100 80GB HBM3"},
    "A100": HOPPER | {"deviceVer": 800, "multiProcessorCount": 108, "maxSharedMemoryPerBlockOptin": 166912,
                      "totalGlobalMem": 42949672960, "memoryBusWidth": 5120, "l2CacheSize": 41943040, "smClockRateKHz": 1410000,
                      "deviceName": "NVIDIA A100-SXM4-40GB"},
    "B200": HOPPER | {"deviceVer": 1000, "multiProcessorCount": 148, "totalGlobalMem": 191500000000, "memoryBusWidth": 8192,
                      "l2CacheSize": 132644864, "deviceName": "NVIDIA B200"},
}  # fmt: skip
# batch, heads, head dimension, slice, context, tokens of the sequence
SHAPES = [
    (16, 25, 64, 256, 0, 1024), (16, 25, 64, 256, 768, 1024), (8, 12, 64, 128, 896, 1024), (1, 32, 64, 256, 1792, 2048),
    (1, 16, 128, 512, 7680, 8192), (2, 16, 128, 1024, 0, 1024), (8, 12, 64, 200, 800, 1000), (1, 12, 64, 100, 512, 612),
    (2, 3, 40, 70, 5, 200), (2, 3, 80, 125, 75, 200), (1, 2, 8, 33, 64, 150), (3, 1, 64, 62, 2, 65), (8, 12, 64, 8, 992, 1000),
    (8, 12, 64, 1, 999, 1000), (1, 1, 64, 1, 0, 65),
]  # fmt: skip


def places() -> tuple[Path, list[Path]]:
    """libcudnn.so.9 and the folders of the NVRTC that it compiles with."""
    nvidia = [Path(p) / "nvidia" for p in sys.path if p]
    named = os.environ.get("TERAPIPE_CUDNN")
    library = Path(named) if named else next((f for n in nvidia if (f := n / "cudnn/lib/libcudnn.so.9").is_file()), None)
    if library is None or not library.is_file():
        pytest.skip("libcudnn.so.9 is not installed (pip install nvidia-cudnn-cu13)")
    folders = [f for n in [library.resolve().parents[2], *nvidia] if (f := n / "cu13/lib").is_dir() and [*f.glob("libnvrtc.so.*")]]
    if not folders:
        pytest.skip("libnvrtc, with which cuDNN compiles its kernels, is not installed (pip install nvidia-cuda-nvrtc)")
    return library, folders


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It, and beside it a libcuda.so.1 of a machine without a driver."""
    places()
    folder = tmp_path_factory.mktemp("plans")
    warn = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror", "-I."]
    sources = ["tests/cudnn_plans.c", "cuda/cudnn_graph.c", "cuda/dl_cudnn.c", "cuda/dl.c", "csrc/base/status.c"]
    subprocess.run(["gcc", *warn, *sources, "-o", str(folder / "plans"), "-lm", "-ldl", "-lpthread"], cwd=ROOT, check=True)
    subprocess.run(["gcc", *warn, "-shared", "-fPIC", "tests/cuda/fake_driver.c", "-o", str(folder / "libcuda.so.1")], cwd=ROOT,
                   check=True)  # fmt: skip
    return folder / "plans"


@pytest.mark.parametrize(("gpu", "shapes"), [(gpu, SHAPES if gpu == "H200" else SHAPES[1::3]) for gpu in GPUS])
def test_cudnn_has_a_plan_for_every_shape(program: Path, gpu: str, shapes: list[tuple[int, ...]]) -> None:
    library, folders = places()
    words = [",".join(map(str, (b, h, d, s, c, t, 3 * h * d, h * d))) for b, h, d, s, c, t in shapes]
    paths = os.pathsep.join(map(str, [program.parent, *folders]))
    ran = subprocess.run([program, json.dumps(GPUS[gpu]), *words], capture_output=True, text=True,
                         env={**os.environ, "LD_LIBRARY_PATH": paths, "TERAPIPE_CUDNN": str(library)})  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = dict(zip(shapes, ran.stdout.splitlines(), strict=True))
    wrong = {shape: text for shape, text in told.items() if not (found := re.fullmatch(r"engine \d+ workspace (\d+)", text))
             or int(found[1]) > 1 << 20}  # fmt: skip
    assert not wrong, wrong
