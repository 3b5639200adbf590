"""``python -m tests.fake_gpu.install``: installs what fake GPUs need, into the environment of this Python.

The CUDA build of torch is the one whose version has no local part such as ``+cpu``.  It is installed without its
dependencies, of which the NVIDIA libraries would be some gigabytes.  Its other dependencies follow, and those of
this project with its extras ``test`` and ``cuda13``, in the versions of constraints.txt.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from typing import Final

from tests.fake_gpu.build import REPOSITORY

_HEADERS: Final = ("nvidia-cuda-crt", "nvidia-cuda-runtime")  # those of the CUDA runtime
_CUDA: Final = re.compile(r"(nvidia-|cuda-|triton)")  # what only a GPU needs of torch's dependencies


def _pip(*arguments: str) -> None:
    """Call pip.

    Raises SystemExit: if it fails, with one line for what could not be installed.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if process.returncode:
        errors = [line for line in process.stderr.splitlines() if line.startswith("ERROR")]
        raise SystemExit(f"fake GPU: pip cannot install {' '.join(arguments)}: {' '.join(errors)[:300]}")


def torch_version() -> str:
    """Returns the version of torch in constraints.txt."""
    text = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^torch==([\d.]+)$", text, re.MULTILINE)
    return str(version)


def requirements() -> Iterator[str]:
    """Yields what is installed after torch: the requirements of torch, without CUDA's, and of this project."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    torch = [text for text in importlib.metadata.requires("torch") or () if "extra ==" not in text]
    ours = [*project["dependencies"], *extras["test"], *extras["cuda13"], *_HEADERS]
    yield from (text for text in torch if not _CUDA.match(text))
    yield from (text for text in ours if re.split(r"[^\w-]", text)[0] != "torch")


def main() -> None:
    """Install torch unless it is there, and then the rest."""
    version, constraints = torch_version(), ("--constraint", "constraints.txt")
    if importlib.util.find_spec("torch") is None or importlib.metadata.version("torch") != version:
        _pip("--no-deps", "--no-compile", f"torch==={version}")
    importlib.invalidate_caches()
    _pip(*constraints, *requirements())
    _pip(*constraints, "--no-deps", "--editable", ".")


if __name__ == "__main__":
    main()
