"""NCCL's own host code where no GPU is: its sources, a stand-in for the CUDA runtime and a host's kernel for sends and receives
(tests/cuda/nccl_host*.c), in one libnccl.so.2 in .build/nccl-host. Ranks then meet, split, fail and abort as on GPUs, over sockets.

    python tests/nccl_host.py        # fetches NCCL, builds (some minutes) and prints the path
    make nccl-check                  # that, and tests with it

Not part of `make test`: NCCL's sources are fetched from Debian (NCCL_SOURCE: a folder that has them, in whose build/ its objects
then are), and CUDA 13's headers must be here. What it does not know: GPUs' kernels, peers, shared memory, registered buffers, other
versions of NCCL."""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".build" / "nccl-host"
ADDRESS = "http://deb.debian.org/debian/pool/contrib/n/nvidia-nccl/nvidia-nccl_2.29.7-1.orig.tar.gz"
DIGEST = "e67239212c395bfdb398a7519491840d06fdf6b599c299f97c7ed0109777bba1"     # of the .dsc beside it
FLAGS = ["-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]

# Where NCCL's structs keep what, for C: our name of each, NCCL's, and of its fields. NAME_BYTES is a struct's size.
STRUCTS = {
    "CONNECTION": ("ncclConnInfo", {"BUFFERS": "buffs", "FIFO": "connFifo", "STEP_BYTES": "stepSize", "STEP": "step",
                                    "HEAD": "head", "TAIL": "tail"}),
    "FIFO": ("ncclConnFifo", {"MODE": "mode", "SIZE": "size", "OFFSET": "offset"}),
    "PEER": ("ncclDevChannelPeer", {"SEND": "send", "RECV": "recv"}),
    "CHANNEL": ("ncclDevChannel", {"PEERS": "peers"}),
    "DEVICE": ("ncclKernelComm", {"RANK": "rank", "ABORTED": "abortFlag"}),
    "WHOLE_DEVICE": ("ncclKernelCommAndChannels", {"CHANNELS": "channels"}),
    "COMMUNICATOR": ("ncclComm", {"DEVICE": "devComm"}),
    "ARGS": ("ncclDevKernelArgs", {"DEVICE": "comm", "CHANNELS": "channelMask", "STORAGE": "workStorageType", "MASK": "workMask",
                                   "BUFFER": "workBuf"}),
    "BATCH": ("ncclDevWorkBatch", {"BASE": "offsetBase", "SET": "offsetBitset"}),
    "WORK": ("ncclDevWorkP2p", {"SEND_DATA": "sendAddr", "RECV_DATA": "recvAddr", "SEND_BYTES": "sendBytes",
                                "RECV_BYTES": "recvBytes", "SEND_RANK": "sendRank", "RECV_RANK": "recvRank",
                                "CHANNELS": "nP2pChannels", "BASE": "channelBase",
                                "SEND_CHANNELS": "nSendChannels", "RECV_CHANNELS": "nRecvChannels",
                                "SEND_CHUNK": "sendChunkSize_u32fp8", "RECV_CHUNK": "recvChunkSize_u32fp8"}),
}  # fmt: skip
CONSTANTS = {"SIMPLE": "NCCL_PROTO_SIMPLE", "STEPS": "NCCL_STEPS", "FIFO_MODE_OFFSET": "NCCL_MODE_OFFSET"}


def run(*command: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{' '.join(map(str, command))[:300]}\n{ran.stdout[-2000:]}{ran.stderr[-4000:]}")
    return ran


def source() -> Path:
    """NCCL's folder."""
    if told := os.environ.get("NCCL_SOURCE"):
        return Path(told).resolve()
    archive = FOLDER / ADDRESS.rpartition("/")[2]
    if not archive.exists():
        with urllib.request.urlopen(ADDRESS, timeout=120) as page:
            data = page.read()
        if (found := hashlib.sha256(data).hexdigest()) != DIGEST:
            raise SystemExit(f"{ADDRESS} has the SHA-256 {found}: {DIGEST} would be right")
        shutil.rmtree(FOLDER / "source", ignore_errors=True)
        with tarfile.open(fileobj=io.BytesIO(data)) as files:
            files.extractall(FOLDER / "source", filter="data")
        archive.write_bytes(data)
    return next((FOLDER / "source").iterdir())


def cuda_home() -> Path:
    """The folder above the headers of CUDA 13, which nvcc brings: earlier ones declare some calls otherwise."""
    nvcc = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], *Path("/usr/local").glob("cuda*")]
    for place in filter(None, places):
        header = Path(place) / "include" / "cuda_runtime_api.h"
        if header.exists() and re.search(r"define CUDART_VERSION +13", header.read_text(errors="replace")):
            return Path(place)
    raise SystemExit("no headers of CUDA 13: CUDA_HOME=/path/to/cuda-13.0 would be right")


def objects(nccl: Path, cuda: Path) -> tuple[list[Path], list[str]]:
    """NCCL's host objects, compiled by its own Makefile, and the flags by which they were."""
    more = FOLDER / "objects.mk"
    more.write_text("objects-alone: $(INCTARGETS) $(GIT_VERSION_FILE) $(LIBOBJ)\n\t@echo FLAGS $(CXXFLAGS)\n")
    made = run("make", "-f", "Makefile", "-f", more, "-j", str(os.cpu_count()), "objects-alone", "CUDARTLIB=cudart",
               f"CUDA_HOME={cuda}", folder=nccl / "src")
    flags = next(line for line in made.stdout.splitlines() if line.startswith("FLAGS ")).split()[1:]
    there = nccl / "build" / "obj"
    return sorted(path for path in there.rglob("*.o") if path.name not in ("client.o", "enhcompat.o")), flags


def tables(nccl: Path, compile_cc: list[str]) -> list[Path]:
    """The tables of kernels, of which sends and receives alone are there; to the host the others are addresses."""
    made = FOLDER / "tables"
    for folder, words in (("device", ["SendRecv"]), ("device/symmetric", [])):
        (made / folder).mkdir(parents=True, exist_ok=True)
        run(sys.executable, "generate.py", made / folder, *words, folder=nccl / "src" / folder)
    files = [made / "device" / "host_table.cc", made / "device" / "symmetric" / "sym_kernels_host.cc"]
    for file in files:
        run(*compile_cc, "-w", "-c", file, "-o", file.with_suffix(".o"), folder=nccl / "src")
    return [file.with_suffix(".o") for file in files]


def layout(nccl: Path, compile_cc: list[str]) -> None:
    program = FOLDER / "layout.cc"
    values = dict(CONSTANTS)
    for name, (struct, fields) in STRUCTS.items():
        values[f"{name}_BYTES"] = f"sizeof({struct})"
        values |= {f"{name}_{ours}": f"offsetof({struct}, {theirs})" for ours, theirs in fields.items()}
    lines = "".join(f'    printf("#define {name} %zu\\n", (size_t)({value}));\n' for name, value in values.items())
    program.write_text(f'#include "comm.h"\n#include "device.h"\n#include "collectives.h"\n#include <cstddef>\n#include <cstdio>\n'
                       f"int main() {{\n{lines}}}\n")
    run(*compile_cc, "-w", program, "-o", FOLDER / "layout", folder=nccl / "src")
    (FOLDER / "nccl_host_layout.h").write_text(run(FOLDER / "layout").stdout)


def link(parts: list[Path], library: Path) -> None:
    """What is missing still, kernels and what no host without a GPU calls, ends the process by its name."""
    command = ["g++", "-shared", "-Wl,-z,defs,--no-demangle,-soname,libnccl.so.2", "-o", library, *parts, "-lrt", "-ldl"]
    tried = subprocess.run([str(word) for word in command], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    missing = sorted(set(re.findall(r"undefined reference to `([^']+)'", tried.stderr)))
    stubs = FOLDER / "stubs.c"
    stubs.write_text("#include <stdio.h>\n#include <stdlib.h>\n" + "".join(
        f'void stub{i}(void) __asm__("{name}");\n'
        f'void stub{i}(void)\n{{\n    fprintf(stderr, "NCCL called {name}\\n");\n    abort();\n}}\n'
        for i, name in enumerate(missing)))
    run("gcc", "-fPIC", "-fvisibility=hidden", "-c", stubs, "-o", stubs.with_suffix(".o"))
    run(*command, stubs.with_suffix(".o"))


def build() -> Path:
    FOLDER.mkdir(parents=True, exist_ok=True)
    nccl, cuda = source(), cuda_home()
    made, flags = objects(nccl, cuda)
    compile_cc = ["g++", *flags, "-I.", "-Iinclude", "-Iinclude/plugin", "-I../build/include", "-I../build/obj/include"]
    layout(nccl, compile_cc)
    ours = [ROOT / "tests" / "cuda" / name for name in ("nccl_host.c", "nccl_host_kernel.c")]

    def compiled(file: Path) -> Path:
        out = FOLDER / f"{file.stem}.o"
        run("gcc", "-std=c11", "-D_GNU_SOURCE", *FLAGS, "-I", ROOT, "-I", FOLDER, "-isystem", cuda / "include", "-c", file,
            "-o", out)
        return out

    with ThreadPoolExecutor() as several:
        parts = [*several.map(compiled, ours)]
    library = FOLDER / "libnccl.so.2"
    link([*made, *tables(nccl, compile_cc), *parts], library)
    run("gcc", "-std=c11", "-shared", *FLAGS, "-I", ROOT, ROOT / "tests" / "cuda" / "nccl_host_nvml.c", "-o",
        FOLDER / "libnvidia-ml.so.1")
    return library


if __name__ == "__main__":
    print(build())
