# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel of native/ for GPUs that are not here.

usage: compile_kernels.py CUDA_FOLDER [--arch SM]... [--log FILE]

nvcc compiles each source for each architecture, and the NVRTC of CUDA 12 and of 13, for one of
them, the very text that CuPy would hand it. Prints registers, shared memory and spills of each
kernel, and writes what the compilers said into FILE. Exits 1 if a source does not compile or a
kernel spills registers, unless its source says `// spills allowed: KERNEL, because ...`. Needs no
GPU. CUDA_FOLDER: where the packages of requirements-kernels.txt are.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hifc.kernels import backend as kernels

ARCHITECTURES = ["80", "90", "100"]
# CuPy 13 and 14 add these to ours.
CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")
COMPILE_TIMEOUT_S = 300
PTXAS = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'.*?(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


@dataclass
class Outcome:
    """What a compiler said about one source and architecture."""

    what: str
    ok: bool
    output: str


def by_nvcc(nvcc: Path, name: str, arch: str) -> Outcome:
    command = [str(nvcc), "-std=c++17", "-fmad=false", "-Werror", "all-warnings", "-cubin"]
    command += [
        f"-I{kernels.header_folder()}",
        f"-arch=sm_{arch}",
        "-Xptxas",
        "-v",
        str(kernels.source_folder() / name),
    ]
    done = subprocess.run(
        [*command, "-o", os.devnull],
        capture_output=True,
        text=True,
        check=False,
        timeout=COMPILE_TIMEOUT_S,
    )
    return Outcome(f"nvcc {name} sm_{arch}", done.returncode == 0, done.stdout + done.stderr)


def by_nvrtc(library: Path, name: str, arch: str) -> Outcome:
    nvrtc = ctypes.CDLL(str(library))
    what = f"{library.name} {name} sm_{arch}"
    program = ctypes.c_void_p()
    code = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), kernels.source(name).encode(), name.encode(), 0, None, None
    )
    if code != 0:
        return Outcome(what, False, f"nvrtcCreateProgram answered {code}")
    wanted = (f"-arch=sm_{arch}", *kernels.NVRTC_OPTIONS, *CUPY_OPTIONS)
    options = [option.encode() for option in wanted]
    code = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return Outcome(what, code == 0, log.value.decode(errors="replace"))


def find(folder: Path, pattern: str, count: int) -> list[Path]:
    """The files of the packages that fit."""
    found = sorted(folder.glob(pattern))
    if len(found) != count:
        sys.exit(f"compile_kernels.py: {pattern} in {folder}: install requirements-kernels.txt")
    return found


def spills(outcome: Outcome, name: str) -> list[str]:
    """Prints a line a kernel, and returns those that spill and may not."""
    text = (kernels.source_folder() / name).read_text()
    allowed = set(re.findall(r"// spills allowed: (\w+), because", text))
    bad = []
    for match in PTXAS.finditer(outcome.output):
        spilled = int(match["stores"]) + int(match["loads"])
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        print(
            f"{match['kernel']:<28}{outcome.what.split()[-1]:<8}"
            f"{match['registers']:>10}{shared[1] if shared else 0:>14}{match['stack']:>8}"
            f"{spilled:>8}"
        )
        if spilled and match["kernel"] not in allowed:
            bad.append(f"{match['kernel']} spills {spilled} bytes for {outcome.what.split()[-1]}")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description="compiles the kernels for GPUs")
    parser.add_argument("cuda", type=Path)
    parser.add_argument("--arch", action="append", help="80, 90, 100; all of them by default")
    parser.add_argument("--log", type=Path, help="where the compilers' output goes")
    arguments = parser.parse_args()
    (nvcc,) = find(arguments.cuda, "nvidia/*/bin/nvcc", 1)
    libraries = find(arguments.cuda, "nvidia/*/lib/libnvrtc.so.*", 2)

    sources = sorted({kernel.source for kernel in kernels.KERNELS.values()})
    architectures = arguments.arch or ARCHITECTURES
    work = [(name, arch) for name in sources for arch in architectures]
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        by_text = [
            pool.submit(by_nvrtc, library, name, architectures[0])
            for library in libraries
            for name in sources
        ]
        compiled = list(pool.map(lambda item: by_nvcc(nvcc, *item), work))
        compiled_here = [done.result() for done in by_text]

    bad, seen = [], set()
    print(f"{'kernel':<28}{'for':<8}{'registers':>10}{'shared bytes':>14}{'stack':>8}{'spills':>8}")
    for outcome, (name, _) in zip(compiled, work, strict=True):
        bad += spills(outcome, name)
        seen |= {match["kernel"] for match in PTXAS.finditer(outcome.output)}
    for outcome in [*compiled, *compiled_here]:
        if not outcome.ok:
            bad.append(f"{outcome.what} does not compile:\n{outcome.output}")
    if missing := kernels.KERNELS.keys() - seen:
        bad.append(f"nvcc made no {', '.join(sorted(missing))}")
    if arguments.log:
        text = [f"== {outcome.what}\n{outcome.output}" for outcome in [*compiled, *compiled_here]]
        arguments.log.write_text("\n".join(text))
    print(f"{len(compiled)} by nvcc, {len(compiled_here)} by NVRTC")
    for problem in bad:
        print(f"failed: {problem}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
