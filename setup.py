"""Builds terapipe_c._core. Kernels are compiled once per instruction set and chosen at run time (csrc/cpu/cpu.c)."""
import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Wvla"]
ISA_FLAGS = {  # csrc/cpu/isa_<name>.c
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mavx2", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mfma"],
    "portable": [],
}
X86 = platform.machine() in ("x86_64", "AMD64")


def core_sources():
    """Every room of csrc except the kernel bodies, which csrc/cpu/isa_*.c include."""
    sources = [str(p) for p in sorted(Path("csrc").rglob("*.c")) if p.parent.name != "cpu" and p.name != "mpi.c"]
    sources += ["csrc/cpu/cpu.c", "csrc/cpu/isa_portable.c"]
    return sources + (["csrc/cpu/isa_avx512.c", "csrc/cpu/isa_avx2.c"] if X86 else [])


class BuildExt(build_ext):
    """Adds the flags of one instruction set to the files of that instruction set alone."""

    def build_extensions(self):
        compile_one = self.compiler._compile

        def compile_with_isa(obj, src, ext, cc_args, extra_postargs, pp_opts):
            name = Path(src).stem
            flags = ISA_FLAGS[name[4:]] if name.startswith("isa_") else []
            compile_one(obj, src, ext, cc_args, list(extra_postargs) + flags, pp_opts)

        self.compiler._compile = compile_with_isa
        super().build_extensions()


flags = ["-std=c11", "-D_GNU_SOURCE", "-O3", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", *WARNINGS]
if os.environ.get("TERAPIPE_WERROR") == "1":
    flags.append("-Werror")

setup(
    ext_modules=[Extension("terapipe_c._core", core_sources(), include_dirs=["."], depends=[str(p) for p in Path("csrc").rglob("*.[ch]")],
                           extra_compile_args=flags, libraries=["m", "pthread"])],
    cmdclass={"build_ext": BuildExt},
)
