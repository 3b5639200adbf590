"""Builds the fake NVIDIA libraries that torch's CUDA build needs, and starts programs on them.

torch's own libraries tell which NVIDIA libraries they need, and which functions.  ``libraries/`` has those that are
called; each other one becomes a stub, which names itself and returns an error.  Needs g++ and binutils, and the
headers of the CUDA runtime.  Imports neither torch nor this project, since it runs when Python starts.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
REPOSITORY: Final = HERE.parents[1]
SOURCES: Final = HERE / "libraries"
FLAGS: Final = ("-O1", "-fPIC", "-std=c++17", "-Wall", "-Wextra", "-Wno-unused-parameter")
# The functions of each library, by its name without versions, and the source that has some of them.
OWNED: Final[dict[str, tuple[str, str | None]]] = {
    "libcudart": (r"(__)?cuda", "runtime.cpp"),
    "libcublas": (r"cublas(?!Lt)", "blas.cpp"),
    "libcublasLt": (r"cublasLt", "blas.cpp"),
    "libcudnn": (r"cudnn", "blas.cpp"),
    "libnccl": (r"nccl", "nccl.cpp"),
    "libcuda": (r"cu[A-Z](?!File)", "driver.cpp"),
    "libcufft": (r"cufft", None),
    "libcufile": (r"cuFile", None),
    "libcurand": (r"curand", None),
    "libcusolver": (r"cusolver", None),
    "libcusparse": (r"cusparse(?!Lt)", None),
    "libcusparseLt": (r"cusparseLt", None),
    "libnvrtc": (r"nvrtc", "driver.cpp"),
    "libnvshmem_host": (r"nvshmem", None),
}
_NEEDING: Final = (
    "torch_cuda",
    "c10_cuda",
    "torch_python",
    "torch_cuda_linalg",
    "torch_nvshmem",
    "caffe2_nvrtc",
)


class NoLibrariesError(RuntimeError):
    """The fake libraries cannot be built here; the message says what is missing."""


def torch_folder() -> Path:
    """Returns the folder of torch's libraries.

    Raises NoLibrariesError: if torch is missing, or is a build for CPUs.
    """
    found = importlib.util.find_spec("torch")
    folder = None if found is None or found.origin is None else Path(found.origin).parent / "lib"
    if folder is None or not (folder / "libtorch_cuda.so").exists():
        raise NoLibrariesError(
            "no CUDA build of torch: run tox -e fakegpu, or pip install --no-deps 'torch===2.13.0'"
        )
    return folder


def headers() -> Path:
    """Returns the folder of the headers of the CUDA runtime: that of the wheels, or of an installed toolkit.

    Raises NoLibrariesError: if there is none.
    """
    found = importlib.util.find_spec("nvidia")
    parents = [Path(path) for path in found.submodule_search_locations or ()] if found is not None else []
    folders = [*(path / "cu13" / "include" for path in parents), Path("/usr/local/cuda/include")]
    for folder in folders:
        if all((folder / name).exists() for name in ("cuda_runtime_api.h", "crt/host_defines.h")):
            return folder
    raise NoLibrariesError("no headers of the CUDA runtime: pip install nvidia-cuda-runtime nvidia-cuda-crt")


def _output(*command: str | Path) -> str:
    """Returns what a command prints.

    Raises NoLibrariesError: if it fails, with its output.
    """
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as problem:
        raise NoLibrariesError(f"no {command[0]}: apt-get install g++") from problem
    if process.returncode:
        raise NoLibrariesError(f"{command[0]} failed:\n{process.stderr}")
    return process.stdout


def _needs(torch: Path) -> dict[str, tuple[set[str], str | None]]:
    """Returns the names of the NVIDIA libraries that torch needs, with the functions and the symbol version."""
    sonames: set[str] = set()
    symbols: set[str] = set()
    for path in (torch / f"lib{name}.so" for name in _NEEDING):
        sonames |= set(re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^\]]+)\]", _output("readelf", "-d", path)))
        symbols |= {line.split()[-1] for line in _output("nm", "-D", "--undefined-only", path).splitlines()}
    needs = {}
    for soname in sonames:
        pattern, _ = OWNED[soname.partition(".")[0]]
        names = {symbol for symbol in symbols if re.match(pattern, symbol)}
        versions = {version for symbol in names if (version := symbol.partition("@")[2])}
        needs[soname] = {symbol.partition("@")[0] for symbol in names}, min(versions, default=None)
    return needs


def _build(torch: Path, folder: Path) -> None:
    """Write all libraries that torch needs into ``folder``, the runtime first, which the others call."""
    needs = _needs(torch)
    (runtime,) = (soname for soname in needs if soname.startswith("libcudart."))
    for soname in sorted(needs, key=lambda name: (name != runtime, name)):
        functions, version = needs[soname]
        source = OWNED[soname.partition(".")[0]][1]
        text = "" if source is None else (SOURCES / source).read_text(encoding="utf-8")
        written = set(re.findall(r"API [\w ]+?[\s*]+(\w+)\(", text)) | set(
            re.findall(r"PRODUCT_OF\((\w+)\)", text)
        )
        stubs = (
            f'long {name}(void) {{ return fake_unwritten("{name}"); }}'
            for name in sorted(functions - written)
        )
        stub, versions = folder / "stub.c", folder / "versions"
        stub.write_text("\n".join(["long fake_unwritten(const char*);", *stubs, ""]), encoding="utf-8")
        versions.write_text(f"{version} {{ global: *; }};\n", encoding="utf-8")
        objects = [folder / "stub.o"]
        _output("gcc", "-w", "-fPIC", "-c", stub, "-o", objects[0])
        if source is not None:
            objects.append(folder / "source.o")
            _output("g++", *FLAGS, f"-I{headers()}", "-c", SOURCES / source, "-o", objects[1])
        options = [f"-Wl,--version-script,{versions}"] if version else []
        links = [] if soname == runtime else [f"-L{folder}", f"-l:{runtime}"]
        _output("g++", "-shared", f"-Wl,-soname,{soname}", "-o", folder / soname, *objects, *options, *links)
    for path in (stub, versions, folder / "stub.o", folder / "source.o"):
        path.unlink(missing_ok=True)


def digest(torch: Path) -> str:
    """Returns 16 hexadecimal digits that change with the sources, this file, and torch's libraries."""
    total = hashlib.sha256()
    for path in (Path(__file__), *sorted(SOURCES.iterdir())):
        total.update(path.read_bytes())
    for name in _NEEDING:
        total.update(str((torch / f"lib{name}.so").stat().st_size).encode())
    return total.hexdigest()[:16]


def libraries() -> Path:
    """Returns the folder of the fake libraries, which are built if they are not in the user's cache.

    Raises NoLibrariesError: if something is missing that the build needs.
    """
    torch = torch_folder()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zeropp-bench"
    folder = cache / f"fake-gpu-{digest(torch)}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix="fake-gpu-", dir=cache))
        _build(torch, aside)
        try:
            aside.rename(folder)
        except OSError:  # another process was faster
            if not folder.exists():
                raise
    return folder


@functools.cache
def load() -> None:
    """Load the fake libraries, before torch looks for libraries of their names."""
    folder = libraries()
    for path in sorted(folder.iterdir(), key=lambda path: not path.name.startswith("libcudart.")):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def active() -> bool:
    """Returns whether this process runs on fake GPUs."""
    return "FAKE_GPUS" in os.environ


def environment(gpus: int = 1, *, values: bool = True, **variables: str) -> Mapping[str, str]:
    """Returns the environment of a process with ``gpus`` fake GPUs.

    Without ``values``, operations are launched but not computed, which shows the host's work alone.
    """
    paths = [str(HERE / "start"), str(REPOSITORY), os.environ.get("PYTHONPATH")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "FAKE_GPUS": str(gpus),
        "FAKE_GPU_VALUES": "true" if values else "none",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
