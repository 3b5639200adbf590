"""The unsharded model's state dict out of a checkpoint, on one process, without ranks or the model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from impl.checkpoint.commit import CheckpointError, resolve, sync
from impl.checkpoint.json_values import from_json
from impl.checkpoint.manifest import read_manifest
from impl.checkpoint.resharding import Parts, write_tensors


def consolidated(folder: Path | str) -> dict[str, Any]:
    """The unsharded model's state dict out of a checkpoint, or out of the newest in a folder of them.

    Parameters are fp32, tied ones under all their names.  A CheckpointError names what cannot be read.
    """
    return dict(_entries(folder, torch.float32))


def export(folder: Path | str, path: Path | str, *, dtype: torch.dtype = torch.float32) -> None:
    """Write that state dict, parameters in ``dtype``, as one safetensors file, which must not exist yet.

    Extra states that are no tensors are left out.  The host holds all bytes until they are written.  A
    CheckpointError names what cannot be read or written.
    """
    path = Path(path)
    if path.exists():
        raise CheckpointError(f"{path}: is there already")
    unfinished = path.with_name(f".{path.name}.partial")
    try:
        write_tensors(unfinished, (e for e in _entries(folder, dtype) if isinstance(e[1], Tensor)))
        unfinished.replace(path)
        sync(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _entries(folder: Path | str, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """The entries of the state dict, one at a time; all files are verified first."""
    path = resolve(Path(folder))
    manifest = read_manifest(path)
    manifest.verify(path, range(len(manifest.files)))
    parts = Parts(path, manifest)
    buffers = parts.tensors(0, "buffer")
    for name, entry in manifest.state.items():
        if "parameter" in entry:
            whole = parts.read("weight", entry["parameter"], 0, math.prod(entry["shape"]))
            yield name, whole.view(entry["shape"]).to(dtype)
        else:
            yield name, buffers[name] if "buffer" in entry else from_json(entry["extra"])
