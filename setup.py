"""Builds terapipe_c._core, and _cuda and _mpi where their compilers and sources are.

Kernels are compiled once per instruction set and chosen at run time (csrc/cpu/cpu.c), so a wheel does not depend on the
processor that built it. Everything else is plain setuptools.

Environment: TERAPIPE_WERROR=1 makes warnings errors; TERAPIPE_SANITIZE=address,undefined (or thread) instruments the
code (an instrumented _core loads only with the sanitizer's runtime preloaded; `make asan tsan` runs the C tests, which
need none); TERAPIPE_CUDA=0 leaves _cuda out.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Wmissing-prototypes", "-Wvla",
            "-Wconversion"]
if os.environ.get("TERAPIPE_WERROR") == "1":
    WARNINGS.append("-Werror")
SANITIZE = os.environ.get("TERAPIPE_SANITIZE", "")
SANITIZER = [f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all"] if SANITIZE else []
# -ffp-contract=off: a multiplication and an addition fuse only where the code says fma, whatever the compiler
# (backend.h, reproducibility contract). -isystem: Python's headers are not ours to warn about.
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno",
         "-fno-trapping-math", "-MMD", "-isystem", sysconfig.get_path("include"), *WARNINGS]  # fmt: skip
FLAGS += ["-O1", "-g", "-fno-omit-frame-pointer", *SANITIZER] if SANITIZE else ["-O3"]
ISA_FLAGS = {  # csrc/cpu/isa_<name>.c
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mavx2", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mfma"],
    "portable": [],
}
X86 = platform.machine() in ("x86_64", "AMD64")
JOBS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_sources():
    """Every room of csrc except the kernel bodies, which csrc/cpu/isa_*.c include."""
    sources = [str(p) for p in sorted(Path("csrc").rglob("*.c")) if p.parent.name != "cpu" and p.name != "mpi.c"]
    sources += ["csrc/cpu/cpu.c", "csrc/cpu/isa_portable.c"]
    return sources + (["csrc/cpu/isa_avx512.c", "csrc/cpu/isa_avx2.c"] if X86 else [])


def flags_of(source):
    """What one C file is compiled with: a kernel body has its instruction set's flags besides."""
    name = Path(source).stem
    return FLAGS + (ISA_FLAGS[name[4:]] if name.startswith("isa_") else [])


def compile_if_stale(output, command, run):
    """Call run() if the object `output` is older than what it was made of (gcc's -MMD file beside it tells), or was made by
    another command."""
    output = Path(output)
    record, listed = output.with_suffix(".command"), output.with_suffix(".d")
    if output.exists() and listed.exists() and record.exists() and record.read_text() == command:
        parts = map(Path, listed.read_text().replace("\\\n", " ").partition(":")[2].split())
        if all(part.exists() and part.stat().st_mtime < output.stat().st_mtime for part in parts):
            return
    output.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    run()
    record.write_text(command)


class BuildExt(build_ext):
    """Compiles each file with flags of its own, only if it is stale, as many at once as there are cores."""

    def build_extensions(self):
        compiler, compile_all = self.compiler, self.compiler.compile
        compiler.src_extensions = [*compiler.src_extensions, ".cu"]

        def compile_each(sources, output_dir=None, extra_postargs=None, **options):
            def compile_one(source):
                (output,) = compiler.object_filenames([source], output_dir=output_dir or "")
                if Path(source).suffix == ".cu":
                    line = ["nvcc", "-c", source, "-o", output, "-MMD", "-MF", str(Path(output).with_suffix(".d")), "-O3",
                            "-I.", "-isystem", sysconfig.get_path("include"), "-Xcompiler=-fPIC,-fvisibility=hidden",
                            *(extra_postargs or [])]  # fmt: skip
                    compile_if_stale(output, shlex.join(line), lambda: self.spawn(line))
                else:
                    args = flags_of(source) + (extra_postargs or [])
                    compile_if_stale(
                        output, shlex.join([*compiler.compiler_so, *args]),
                        lambda: compile_all([source], output_dir=output_dir, extra_postargs=args, **options),
                    )  # fmt: skip
                return output

            with ThreadPoolExecutor(JOBS) as pool:
                return list(pool.map(compile_one, sources))

        compiler.compile = compile_each
        super().build_extensions()


def modules():
    """_core everywhere. _cuda and _mpi are Extensions too: a file dropped beside _core is lost by `pip install -e`."""
    depends = [str(p) for p in (*Path("csrc").rglob("*.*"), *Path("cuda").rglob("*.*"), Path("setup.py"))]
    common = {"include_dirs": ["."], "depends": depends}
    found = [Extension("terapipe_c._core", core_sources(), libraries=["m", "pthread"], extra_link_args=SANITIZER,
                       **common)]  # fmt: skip
    cuda, nvcc = sorted(Path("cuda").glob("*.cu")), shutil.which("nvcc")
    if cuda and nvcc and os.environ.get("TERAPIPE_CUDA") != "0":
        homes = [os.environ.get("CUDA_HOME", ""), Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
        home = next((h for h in map(Path, homes) if (h / "lib64/libcudart_static.a").exists()), Path(homes[1]))
        sources = [str(p) for p in (*cuda, *sorted(Path("cuda").glob("*.c")))]
        found.append(Extension("terapipe_c._cuda", sources, language="c++", library_dirs=[str(home / "lib64")],
                               libraries=["cudart_static", "dl", "rt", "pthread"], **common))  # fmt: skip
    mpi = Path("csrc/comm/mpi.c")
    if mpi.exists() and shutil.which("mpicc"):
        words = shlex.split(subprocess.check_output(["mpicc", "-show"], text=True))[1:]
        found.append(Extension("terapipe_c._mpi", [str(mpi)], **common,
                               extra_compile_args=[w for w in words if w.startswith("-I")],
                               extra_link_args=[w for w in words if not w.startswith("-I")]))  # fmt: skip
    return found


if __name__ == "__main__":
    setup(ext_modules=modules(), cmdclass={"build_ext": BuildExt})
