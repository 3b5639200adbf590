"""Components that tests need beyond pip's packages, with how to install each.

``@pytest.mark.needs("sshd", "ip")`` skips a test where one of them is missing.  Needs of a fixture are in
FIXTURES, and a test marked ``gpu`` needs a CUDA device.  No torch at import.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from typing import Final

import pytest

from tests.fake_gpu.build import active

SEARCHED: Final = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
FIXTURES: Final = {
    "libraries": ("c++",),
    "cuda_libraries": ("g++", "x86-64"),
    "predicted": ("CUDA compiler",),
    "host_pair": ("root", "namespaces", "ip", "nsenter"),  # an ordinary user may not shape interfaces
}


def program(name: str) -> str | None:
    """The path of a program, also of one that only root has in PATH."""
    return shutil.which(name, path=SEARCHED)


def _programs(*names: str) -> Callable[[], bool]:
    return lambda: all(map(program, names))


def _compiler() -> bool:
    from impl.cpu.build import COMPILERS

    return any(map(program, COMPILERS))


def _namespaces() -> bool:
    """By the kernel, not by the code under test."""
    if program("unshare") is None:
        return False
    command = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"]), "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _cuda_device() -> bool:
    import torch

    return torch.cuda.is_available()


def _cuda_compiler() -> bool:
    from tests.support.cubin import missing

    return missing() is None


def _deepspeed() -> bool:
    from harness.strategies.deepspeed import why_missing

    return why_missing() is None


# Whether it is installed, and how to install it.
COMPONENTS: Final[dict[str, tuple[Callable[[], bool], str]]] = {
    "c++": (_compiler, "apt-get install g++"),
    "g++": (_programs("g++"), "apt-get install g++"),
    "ip": (_programs("ip", "tc"), "apt-get install iproute2"),
    "namespaces": (_namespaces, "run as root, or allow user namespaces, with unshare of util-linux"),
    "nsenter": (_programs("nsenter"), "apt-get install util-linux"),
    "root": (lambda: os.geteuid() == 0, "run as root"),
    "setpriv": (_programs("setpriv"), "apt-get install util-linux"),
    "slurm": (
        _programs("munged", "slurmctld", "slurmd", "srun", "scontrol"), "apt-get install slurm-wlm munge"
    ),
    "ssh": (_programs("ssh", "ssh-keygen"), "apt-get install openssh-client"),
    "sshd": (_programs("sshd"), "apt-get install openssh-server"),
    "x86-64": (lambda: platform.machine() == "x86_64", "an x86-64 processor"),
    "CUDA compiler": (_cuda_compiler, "tox -e compile"),
    "CUDA device": (_cuda_device, "torch finds no CUDA device"),
    "fake GPU": (active, "tox -e fakegpu"),
    "CuPy": (lambda: importlib.util.find_spec("cupy") is not None, "pip install 'zeropp-bench[cuda13]'"),
    "DeepSpeed": (_deepspeed, "pip install 'zeropp-bench[deepspeed]'"),
    "zstandard": (
        lambda: importlib.util.find_spec("zstandard") is not None, "pip install 'zeropp-bench[lossless]'"
    ),
    "no CUDA device": (lambda: not _cuda_device(), "a machine without one"),
}  # fmt: skip


@functools.cache
def missing(component: str) -> str | None:
    """How to install a component that is missing; None if it is installed."""
    is_installed, remedy = COMPONENTS[component]
    return None if is_installed() else remedy


def needs_of(item: pytest.Item) -> list[str]:
    """The components that a test needs, by its marks and its fixtures."""
    named = [str(component) for mark in item.iter_markers("needs") for component in mark.args]
    if item.get_closest_marker("gpu"):
        named.append("CUDA device")
    for fixture in getattr(item, "fixturenames", ()):
        named += FIXTURES.get(fixture, ())
    return list(dict.fromkeys(named))


def skip_where_missing(items: list[pytest.Item]) -> None:
    """Skip tests with missing components; the reason says how to install them."""
    for item in items:
        if absent := [
            f"{need} ({remedy})" for need in needs_of(item) if (remedy := missing(need)) is not None
        ]:
            item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(absent)}"))
