"""Builds ``kernels.cpp`` once with the system's compiler, and keeps the library for later processes.

A library's name has the hash of its sources, flags, compiler and processor, and it gets that name once it
is whole and on the disk.  Of processes that start at once, one builds and the others wait.
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
# No -ffast-math: it would turn denormals off for the whole process, and drop the tests for NaN.
FLAGS: Final = (
    "-std=c++17",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    # By default compilers use half of AVX-512's width.
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
)
# GCC's -O3 takes twice the time to build and makes nothing faster.
_OPTIMIZATION: Final = {"gcc": ("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic"), "clang": ("-O3",)}
_SECONDS: Final = 120.0  # for one compilation, or for another process's


class BuildError(RuntimeError):
    """There is no library; the message says why in one line."""


def user_cache() -> Path:
    """The user's cache of this project, in ``$XDG_CACHE_HOME`` if that is absolute, else in ``~/.cache``."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        caches = named if named.is_absolute() else Path.home() / ".cache"
    except RuntimeError as problem:  # a number without an account, as in containers
        raise BuildError("no folder for compiled kernels: set XDG_CACHE_HOME, or HOME") from problem
    return caches / "zeropp-bench"


def user_folder() -> Path:
    """The user's cache of kernels."""
    return user_cache() / "kernels"


def library(folder: Path, compiler: str | None = None, flags: tuple[str, ...] = FLAGS) -> Path:
    """The shared library, built if ``folder`` does not hold it.

    ``compiler`` is by default the first of COMPILERS that is installed; ``flags`` are added to those that
    optimise.  Every failure is a BuildError.
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
    except OSError as problem:  # filelock's Timeout is one
        raise BuildError(f"{folder} cannot keep compiled kernels: {problem.strerror or problem}") from problem
    return path


def identity() -> str:
    """Key of this machine's library, which is not built; or why it cannot be built."""
    try:
        return _key(_compiler(), FLAGS)
    except BuildError as problem:
        return str(problem)


def _compiler() -> str:
    command = next(filter(None, map(shutil.which, COMPILERS)), None)
    if command is None:
        raise BuildError(f"no C++ compiler installed: looked for {', '.join(COMPILERS)}")
    return command


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    """16 hexadecimal digits, a hash of all that the library depends on."""
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
    """The processor's model and features, as far as the system reports them."""
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
    """The output of ``command``; a BuildError with its first line that has an error."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise BuildError(f"{command[0]} does not run: {problem}") from problem
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line), lines[0] if lines else "it said nothing")
        raise BuildError(f"{command[0]} failed with status {done.returncode}: {first.strip()}")
    return done.stdout
