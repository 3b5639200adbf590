"""Compiles a ``.cu`` file with the host's compiler, and launches its kernels through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from filelock import FileLock

from impl.cuda.launch import SOURCES, Launch
from tests.support.cubin import VARIANTS

SHIM = Path(__file__).parent / "cuda_on_cpu.h"
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-fno-gnu-unique", "-Wall", "-Wextra")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1", "-O0")


class KernelError(RuntimeError):
    """The shim found a deadlock or a misused collective."""


def build(source: Path, kernels: Sequence[str], folder: Path, *, sanitize: bool = False) -> Path:
    """Returns a library of ``kernels`` of a .cu file, built once for its content, flags and compiler."""
    rows = "\n".join(f'    {{"{k}", [](const void* a) {{ call({k}, a); }}}},' for k in kernels)
    count = "const std::size_t kernel_count = sizeof kernels / sizeof *kernels;"
    text = (
        f'#include "{SHIM.name}"\n#include "{source.name}"\n'
        f"const Kernel kernels[] = {{\n{rows}\n}};\n{count}\n"
    )
    flags = (*FLAGS, "-Wno-unknown-pragmas", *(SANITIZE if sanitize else ()))
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256((text + version + " ".join(flags)).encode())
    for path in [SHIM, *sorted(source.parent.glob("*.cu*")), *sorted(SOURCES.glob("*.cu*"))]:
        digest.update(path.read_bytes())
    library = folder / f"{source.stem}-{digest.hexdigest()[:16]}.so"
    with FileLock(library.with_suffix(".lock")):  # other workers need it too
        if not library.exists():
            unfinished = library.with_suffix(".unfinished")
            includes = [f"-I{path}" for path in (SHIM.parent, source.parent, SOURCES)]
            command = ["g++", *flags, *includes, "-x", "c++", "-", "-o", str(unfinished)]
            process = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
            if process.returncode != 0:
                raise RuntimeError(f"{source.name} does not compile for the host:\n{process.stderr}")
            unfinished.replace(library)
    return library


def load(library: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library))
    loaded.launch.restype = ctypes.c_char_p
    loaded.launch.argtypes = [ctypes.c_char_p, *[ctypes.c_uint] * 5, ctypes.c_void_p]
    return loaded


def call(library: ctypes.CDLL, launch: Launch, order: int = 0) -> None:
    """Run ``launch`` to its end, with its threads in the order ``order``."""
    address = launch.arguments.ctypes.data
    error = library.launch(launch.kernel.encode(), *launch.grid, launch.threads, order, address)
    if error:
        raise KernelError(f"{launch.kernel}: {error.decode()}")


@dataclass
class Host:
    """Runs the launches of :mod:`impl.cuda.kernels` on CPU tensors."""

    folder: Path  # of compiled libraries
    sanitize: bool = False  # with the address and undefined-behaviour sanitizers
    order: int = 0  # of threads and thread blocks: 0 up, 1 down, others by that seed
    ran: list[str] = field(default_factory=list)  # kernels launched so far
    _libraries: dict[str, ctypes.CDLL] = field(default_factory=dict)

    def __call__(self, launch: Launch, device: torch.device) -> None:
        if launch.file not in self._libraries:
            source = SOURCES / launch.file
            self._libraries[launch.file] = load(
                build(source, VARIANTS[launch.file], self.folder, sanitize=self.sanitize)
            )
        self.ran.append(launch.kernel)
        call(self._libraries[launch.file], launch, self.order)
