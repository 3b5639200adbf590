"""What tests need beyond the packages of pip, each named once with what installs it.

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


def _programs(package: str, *names: str) -> Callable[[], str | None]:
    return lambda: None if all(map(program, names)) else f"apt-get install {package}"


def _compiler() -> str | None:
    from impl.cpu.build import COMPILERS

    return None if any(map(program, COMPILERS)) else "apt-get install g++"


def _namespaces() -> str | None:
    """Asked of the kernel, not of the code that is tested."""
    if program("unshare") is None:
        return "apt-get install util-linux"
    command = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"]), "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"run as root, or allow user namespaces ({done.stderr.strip()})"


def _cuda_device() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "torch finds no CUDA device"


def _cupy() -> str | None:
    return None if importlib.util.find_spec("cupy") else "pip install 'zeropp-bench[cuda13]'"


def _cuda_compiler() -> str | None:
    from tests.support.cubin import missing

    return None if (why := missing()) is None else f"tox -e compile ({why})"


def _deepspeed() -> str | None:
    from harness.strategies.deepspeed import why_missing

    return None if why_missing() is None else "pip install 'zeropp-bench[deepspeed]'"


# What to do where it is missing; None where it is there.
COMPONENTS: Final[dict[str, Callable[[], str | None]]] = {
    "c++": _compiler,
    "g++": _programs("g++", "g++"),
    "ip": _programs("iproute2", "ip", "tc"),
    "namespaces": _namespaces,
    "nsenter": _programs("util-linux", "nsenter"),
    "root": lambda: None if os.geteuid() == 0 else "run as root",
    "setpriv": _programs("util-linux", "setpriv"),
    "slurm": _programs("slurm-wlm munge", "munged", "slurmctld", "slurmd", "srun", "scontrol"),
    "ssh": _programs("openssh-client", "ssh", "ssh-keygen"),
    "sshd": _programs("openssh-server", "sshd"),
    "x86-64": lambda: None if platform.machine() == "x86_64" else "an x86-64 processor",
    "CUDA compiler": _cuda_compiler,
    "CUDA device": _cuda_device,
    "CuPy": _cupy,
    "DeepSpeed": _deepspeed,
    "no CUDA device": lambda: None if _cuda_device() else "a machine without one",
}


@functools.cache
def missing(component: str) -> str | None:
    """What would provide a component that is not here; None if it is."""
    return COMPONENTS[component]()


def of(item: pytest.Item) -> list[str]:
    """The components that a test needs, by its marks and its fixtures."""
    named = [str(component) for mark in item.iter_markers("needs") for component in mark.args]
    if item.get_closest_marker("gpu"):
        named.append("CUDA device")
    for fixture in getattr(item, "fixturenames", ()):
        named += FIXTURES.get(fixture, ())
    return list(dict.fromkeys(named))


def skip_where_missing(items: list[pytest.Item]) -> None:
    """Skip the tests that would not find what they need; the reason says what provides it."""
    for item in items:
        if absent := {one: do for one in of(item) if (do := missing(one)) is not None}:
            needs = ", ".join(f"{one} ({do})" for one, do in absent.items())
            item.add_marker(pytest.mark.skip(reason=f"needs {needs}"))
