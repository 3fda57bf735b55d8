"""The row kernels as a library of visible functions, for benchmarks/gpu_rows.py: compiled for one GPU, all files at once."""

import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".build" / "gpu-rows"
SOURCES = ["cuda/norm.cu", "cuda/pointwise.cu", "cuda/vocab.cu", "cuda/optim.cu", "cuda/groups.c", "cuda/device.c",
           "cuda/device_common.c", "cuda/properties.c", "cuda/faults.c", "csrc/base/status.c"]  # fmt: skip


def build(arch: str) -> Path:
    """The library's path; `arch` is the compute capability without its point, "90"."""
    setup = runpy.run_path(str(ROOT / "setup.py"), run_name="setup_py")
    found = setup["find_cuda"]()
    if isinstance(found, str):
        sys.exit(f"gpu_rows: {found}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"rows-sm{arch}.so"
    newest = max(p.stat().st_mtime for folder in ("cuda", "csrc")
                 for p in (*(ROOT / folder).rglob("*.*"), ROOT / "setup.py", Path(__file__)))
    if path.exists() and path.stat().st_mtime >= newest:
        return path
    flags = ["-O3", *setup["NVCC_NUMBERS"], "-I.", "-isystem", found[1], "-Xcompiler=-fPIC",
             f"-gencode=arch=compute_{arch},code=sm_{arch}"]  # fmt: skip

    def compile_one(source: str) -> str:
        output = FOLDER / f"{source.replace('/', '-')}.o"
        subprocess.run([found[0], *flags, "-c", source, "-o", str(output)], cwd=ROOT, check=True)
        return str(output)

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_one, SOURCES))
    # a file that is missing above is told here, not by who loads the library, on a machine that is lent for minutes
    subprocess.run([found[0], "-shared", *flags[-1:], "-Xlinker=--no-undefined", "-L", found[2], "-o", str(path), *objects, "-ldl",
                    "-lpthread"], cwd=ROOT, check=True)  # fmt: skip
    return path


if __name__ == "__main__":
    print(build(sys.argv[1]))
