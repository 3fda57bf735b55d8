"""The row kernels as a library of visible functions, for benchmarks/gpu_rows.py, and attention's, compiled in other ways, for
benchmarks/gpu/kept.py: for one GPU, all files at once."""

import functools
import runpy
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".build" / "gpu-rows"
BELOW = ["cuda/device.c", "cuda/device_common.c", "cuda/dl.c", "cuda/properties.c", "cuda/faults.c", "csrc/base/status.c"]
SOURCES = ["cuda/norm.cu", "cuda/pointwise.cu", "cuda/vocab.cu", "cuda/optim.cu", "cuda/groups.c", *BELOW]
ATTENTION = ["cuda/attention.cu", "cuda/attention_bf16.cu", "cuda/attention_f32.cu", "cuda/attention_ring.cu", "cuda/pointwise.cu",
             "cuda/attention_ring_backward.cu", "cuda/attention_wgmma.cu", *BELOW]  # fmt: skip


@functools.cache
def toolkit(arch: str) -> tuple[str, list[str], list[str]]:
    """(nvcc, what it compiles with for `arch`, what it links with)."""
    setup = runpy.run_path(str(ROOT / "setup.py"), run_name="setup_py")
    found = setup["find_cuda"]()
    if isinstance(found, str):
        sys.exit(f"gpu_rows: {found}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    return (found[0], ["-O3", *setup["NVCC_NUMBERS"], "-I.", "-isystem", found[1], "-Xcompiler=-fPIC,-D_GNU_SOURCE", target],
            [target, "-Xlinker=--no-undefined", "-L", found[2], "-ldl", "-lpthread"])  # fmt: skip


def path_of(arch: str, name: str = "rows") -> Path:
    """Where build leaves the library; `arch` is the compute capability without its point, "90"."""
    return FOLDER / f"{name}-sm{arch}.so"


def program(source: str, arch: str) -> Path:
    """One file as a program of its own."""
    (nvcc, flags, link), path = toolkit(arch), FOLDER / Path(source).stem
    subprocess.run([nvcc, *flags, source, "-o", str(path), *link], cwd=ROOT, check=True)
    return path


def build(arch: str, name: str = "rows", sources: Sequence[str] = SOURCES, defines: Sequence[str] = ()) -> Path:
    """The library's path. name: other than that of one of other sources or defines."""
    (nvcc, flags, link), path = toolkit(arch), path_of(arch, name)
    newest = max(p.stat().st_mtime for folder in ("cuda", "csrc")
                 for p in (*(ROOT / folder).rglob("*.*"), ROOT / "setup.py", Path(__file__)))
    if path.exists() and path.stat().st_mtime >= newest:
        return path

    def compile_one(source: str) -> str:
        output = FOLDER / f"{name}-{source.replace('/', '-')}.o"
        subprocess.run([nvcc, *flags, *defines, "-c", source, "-o", str(output)], cwd=ROOT, check=True)
        return str(output)

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_one, sources))
    # a file that is missing above is told here, not by who loads the library, on a machine that is lent for minutes
    subprocess.run([nvcc, "-shared", "-o", str(path), *objects, *link], cwd=ROOT, check=True)
    return path


if __name__ == "__main__":
    print(program(sys.argv[2], sys.argv[1]) if len(sys.argv) > 2 else build(sys.argv[1]))
