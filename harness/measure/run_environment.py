"""This machine in a run's file: changes of the checkout, packages, variables that matter."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from harness.measure import machine
from harness.records.run_record import Changes, Node, Run, Software, SuiteText

MOST_CHANGES: Final = 256 << 10  # bytes of changes that are kept
_PREFIXES: Final = (
    "CUBLAS_", "CUDA_", "GLOO_", "GOMP_", "KMP_", "MALLOC_", "MKL_", "NCCL_", "OMP_", "OPENBLAS_", "PYTORCH_",
    "THP_", "TORCH_",
)  # fmt: skip
_SECRET: Final = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|(^|_)(KEY|PWD)(_|$)", re.IGNORECASE)
_LONGEST: Final = 1000  # letters of a variable
HIDDEN: Final = "<hidden>"
_DIFF: Final = (  # whatever the user's configuration of git says
    "diff", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames",
    "--src-prefix=a/", "--dst-prefix=b/",
)  # fmt: skip


def identity() -> dict[str, Any]:
    """This node for the others, JSON-ready: :class:`~harness.records.run_record.Node`."""
    return Node(
        machine=machine.facts(),
        code=machine.code(),
        software=Software(packages=packages(), libraries=libraries()),
        environment=variables(os.environ),
        hcas=machine.hcas(),
    ).model_dump(mode="json")


def run_of(suite: SuiteText | None, nodes: list[dict[str, Any]]) -> Run:
    """The record of a run that begins now, on nodes with these :func:`identity` values."""
    return Run(suite=suite, changes=changes(), nodes=[Node.model_validate(node) for node in nodes])


def packages() -> list[str]:
    """All installed packages, ``name==version``; the first of a name is the one that is imported."""
    lines: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        if name := package.metadata["Name"]:  # None of a broken one
            lines.setdefault(re.sub(r"[-_.]+", "-", name).lower(), f"{name}=={package.version}")
    return [lines[key] for key in sorted(lines)]


def libraries() -> dict[str, str]:
    """Versions of CUDA, cuDNN and NCCL as torch has them, and of CUDA as the driver allows it."""
    import torch
    import torch.distributed as dist

    versions: dict[str, Any] = {"cuda_of_driver": machine.nvml()[2], "cuda": torch.version.cuda}
    if torch.version.cuda is not None:
        versions["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if dist.is_nccl_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {name: str(version) for name, version in versions.items() if version is not None}


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter to speed and results, values shortened; secrets are :data:`HIDDEN`."""
    return {
        name: HIDDEN if _SECRET.search(name) else value.encode(errors="replace").decode()[:_LONGEST]
        for name, value in sorted(environment.items())
        if name.startswith(_PREFIXES)
    }


def changes(root: Path = machine.ROOT) -> Changes | None:
    """How the checkout differs from its commit, new sources included; None if equal, or without git."""
    patch = machine.git(root, *_DIFF, "HEAD") or b""
    new = machine.git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *machine.SOURCES)
    for name in sorted(os.fsdecode(part) for part in (new or b"").split(b"\0") if part):
        if Path(name).suffix in machine.SOURCE_SUFFIXES:
            patch += machine.git(root, *_DIFF, "--no-index", "--", "/dev/null", name, differs=1) or b""
    if not patch:
        return None
    text = patch[:MOST_CHANGES].decode(errors="ignore")
    return Changes(size=len(patch), sha256=hashlib.sha256(patch).hexdigest(), text=text)
