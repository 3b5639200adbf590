"""Describes the environment of a run, for a file that is written beside the run's records.

The description has what is needed to repeat the run: the machine, the difference between the checkout and its commit,
all packages, and the environment variables that affect speed or results.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from harness.errors import Refusal
from harness.measure import machine
from harness.records.run_record import Changes, Node, Run, Software, SuiteText

MOST_CHANGES: Final = 256 << 10  # bytes of the checkout's changes that are kept; the rest is cut off
_PREFIXES: Final = (
    "CUBLAS_", "CUDA_", "GLOO_", "GOMP_", "KMP_", "MALLOC_", "MKL_", "NCCL_", "OMP_", "OPENBLAS_", "PYTORCH_",
    "THP_", "TORCH_",
)  # fmt: skip
_SECRET: Final = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|(^|_)(KEY|PWD)(_|$)", re.IGNORECASE)
_LONGEST: Final = 1000  # characters of a variable's value that are kept
HIDDEN: Final = "<hidden>"  # stands for the value of a variable whose name looks like a secret
_DIFF: Final = (  # options that override the user's configuration of git
    "diff", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames",
    "--src-prefix=a/", "--dst-prefix=b/",
)  # fmt: skip


def identity() -> dict[str, Any]:
    """Return a description of this node: its machine, sources, installed software and environment variables.

    Returns:
        A :class:`~harness.records.run_record.Node` as a dict for JSON, which can be sent to other nodes and written
        into the file of the run.
    """
    return Node(
        machine=machine.facts(),
        code=machine.code(),
        software=Software(packages=packages(), libraries=libraries()),
        environment=variables(os.environ),
        hcas=machine.hcas(),
    ).model_dump(mode="json")


def run_of(suite: SuiteText | None, nodes: list[dict[str, Any]]) -> Run:
    """Return the description of a run that begins now.

    ``suite`` is the text of the run's suite file; None if there is no such file.  ``nodes`` has a description of each
    node, made by :func:`identity`.
    """
    return Run(suite=suite, changes=changes(), nodes=[Node.model_validate(node) for node in nodes])


def packages() -> list[str]:
    """Return all installed packages as ``name==version``, sorted by name."""
    lines: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        # A name may occur twice on sys.path; Python imports the first.  A broken installation has no name.
        if name := package.metadata["Name"]:
            lines.setdefault(re.sub(r"[-_.]+", "-", name).lower(), f"{name}=={package.version}")
    return [lines[key] for key in sorted(lines)]


def libraries() -> dict[str, str]:
    """Return the versions of the GPU libraries that torch uses, by name.

    The keys are ``cuda``, ``cudnn`` and ``nccl``, and ``cuda_of_driver`` for the newest CUDA version that the driver
    supports.  Libraries that are absent have no key.

    Raises:
        Refusal: if LD_LIBRARY_PATH leads torch to a cuDNN that it cannot use.
    """
    import torch
    import torch.distributed as dist

    versions: dict[str, Any] = {"cuda_of_driver": machine.nvml()[2], "cuda": torch.version.cuda}
    if torch.version.cuda is not None:
        try:
            versions["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # torch found another cuDNN than its own
            reason = str(error).partition(". ")[0]
            raise Refusal(
                f"LD_LIBRARY_PATH = {os.environ.get('LD_LIBRARY_PATH', '')}: {reason}; remove the folder of this "
                "cuDNN from LD_LIBRARY_PATH, or install the version that torch was compiled against"
            ) from error
    if dist.is_nccl_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {name: str(version) for name, version in versions.items() if version is not None}


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Select from ``environment`` the variables that affect speed or results, such as ``NCCL_*`` and ``OMP_*``.

    Values are cut after 1000 characters.  If a variable's name looks like the name of a secret, its value is replaced
    with :data:`HIDDEN`.
    """
    return {
        name: HIDDEN if _SECRET.search(name) else value.encode(errors="replace").decode()[:_LONGEST]
        for name, value in sorted(environment.items())
        if name.startswith(_PREFIXES)
    }


def changes(root: Path = machine.ROOT) -> Changes | None:
    """Return the difference between the checkout ``root`` and its commit, including new source files.

    Returns None if there is no difference, or if ``root`` is no git checkout.
    """
    patch = machine.git(root, *_DIFF, "HEAD") or b""
    new = machine.git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *machine.SOURCES)
    for name in sorted(os.fsdecode(part) for part in (new or b"").split(b"\0") if part):
        if Path(name).suffix in machine.SOURCE_SUFFIXES:
            patch += machine.git(root, *_DIFF, "--no-index", "--", "/dev/null", name, differs=1) or b""
    if not patch:
        return None
    text = patch[:MOST_CHANGES].decode(errors="ignore")
    return Changes(size=len(patch), sha256=hashlib.sha256(patch).hexdigest(), text=text)
