"""Builds a shared library from ``kernels.cpp``, once, with the system's compiler; later processes load the same file.

``kernels.cpp`` has the C++ code of codecs, which encode tensors as bytes.

The library's file name contains a hash of sources, flags, compiler and processor.  A library is built under a temporary
name, and gets its final name when it is complete and synced to disk.  If several processes start at once, one process
builds the library and the others wait.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Final

from filelock import FileLock

SOURCE: Final = Path(__file__).parent / "kernels.cpp"
HEADERS: Final = (SOURCE.parent.parent / "cuda" / "codec.cuh", *sorted(SOURCE.parent.glob("*.hpp")))
COMPILERS: Final = ("c++", "g++", "clang++")
# Without -ffast-math, which would turn denormals off for the whole process and drop the checks for NaN.
FLAGS: Final = (
    "-std=c++17",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    # By default compilers use only half the width of AVX-512.
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
)
# GCC's -O3 takes twice as long to build, and its code is not faster.
_OPTIMIZATION: Final = {"gcc": ("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic"), "clang": ("-O3",)}
_SECONDS: Final = 120.0  # longest wait for a compilation, also for that of another process


class BuildError(RuntimeError):
    """Raised when the library of C++ kernels cannot be built or kept; the message gives the reason in one line."""


def user_cache() -> Path:
    """Returns this project's folder inside the user's cache folder.

    The user's cache folder is ``$XDG_CACHE_HOME`` if that is an absolute path, else ``~/.cache``.

    Raises BuildError: if ``XDG_CACHE_HOME`` is not set to an absolute path, and the user has no home folder.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        caches = named if named.is_absolute() else Path.home() / ".cache"
    except RuntimeError as problem:  # the user has no account, as may be in containers
        raise BuildError(
            "no folder for compiled kernels: set HOME, or XDG_CACHE_HOME to an absolute path"
        ) from problem
    return caches / "zeropp-bench"


def user_folder() -> Path:
    """Returns the folder in which this user's compiled kernels are kept: ``kernels`` inside :func:`user_cache`.

    Raises BuildError: for the same reason as :func:`user_cache`.
    """
    return user_cache() / "kernels"


def library(folder: Path, compiler: str | None = None, flags: tuple[str, ...] = FLAGS) -> Path:
    """Returns the path of the library of C++ kernels in ``folder``; builds the library if it is not there.

    ``compiler`` is by default the first of COMPILERS that is installed.  The command line first has the optimisation
    flags that this file sets for GCC or for clang, and then ``flags``.

    Raises BuildError: if there is no compiler, if the compiler fails, or if the folder cannot be written.
    """
    command = compiler or _compiler()
    path = folder / f"kernels-{_key(command, flags)}.so"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock"), timeout=_SECONDS):
            if not path.exists():
                _build(command, flags, path)
    except OSError as problem:  # includes filelock's Timeout
        raise BuildError(
            f"cannot keep compiled kernels in {folder}: {problem.strerror or problem}; set XDG_CACHE_HOME to a folder "
            "that can be written"
        ) from problem
    return path


def identity() -> str:
    """Returns the hash that the file name of :func:`library` contains, as 16 hexadecimal digits; builds nothing.

    The hash is that of the default compiler and flags.  If no compiler is installed, or the compiler does not run,
    returns the reason in one line instead.
    """
    try:
        return _key(_compiler(), FLAGS)
    except BuildError as problem:
        return str(problem)


def _compiler() -> str:
    command = next(filter(None, map(shutil.which, COMPILERS)), None)
    if command is None:
        raise BuildError(f"no C++ compiler is installed: install one of {', '.join(COMPILERS)}")
    return command


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    """Returns a hash of the sources, the flags, the compiler's version and the processor, as 16 hexadecimal digits.

    The library's file name contains this hash, so that a change of any of these leads to a new library.
    """
    total = hashlib.sha256()
    command = " ".join((*_optimization(compiler), *flags))
    facts = (_run([compiler, "--version"]), command, platform.machine(), _processor())
    for part in (*(fact.encode() for fact in facts), *(path.read_bytes() for path in (SOURCE, *HEADERS))):
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()[:16]


def _optimization(compiler: str) -> tuple[str, ...]:
    return _OPTIMIZATION["clang" if "clang" in _run([compiler, "--version"]) else "gcc"]


@functools.cache
def _processor() -> str:
    """Returns the processor's model and features, as far as the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:  # not Linux
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("model", "flags", "CPU", "Features")))


def _build(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        _run([compiler, *_optimization(compiler), *flags, str(SOURCE), "-o", str(unfinished)])
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    """Runs ``command`` and returns its standard output.

    Raises BuildError: if the command does not start, takes longer than 120 s, or fails.  If it fails, the message has
    one line of its standard error: the first that contains "error", else the first that is not empty.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise BuildError(f"{command[0]} does not run: {problem}; check that this compiler works") from problem
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        first = next(
            (line for line in lines if "error" in line), lines[0] if lines else "it printed no message"
        )
        raise BuildError(
            f"{command[0]} failed with status {done.returncode}: {first.strip()}; update or repair this compiler"
        )
    return done.stdout
