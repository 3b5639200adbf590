"""The unsharded model's state dict out of a checkpoint, on one process, without ranks or the model."""

from __future__ import annotations

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

    ``load_state_dict(strict=True)`` takes it: fp32 parameters, tied ones under all their names, buffers and
    extra states.  What is missing, foreign, of another version, cut short or altered is a CheckpointError.
    """
    return {name: from_json(value) for name, value in _open(folder).entries()}


def export(folder: Path | str, path: Path | str, *, dtype: torch.dtype = torch.float32) -> None:
    """Write the unsharded model's state as one safetensors file, tied parameters under all their names.

    ``Zero.load_full_state_dict(safetensors.torch.load_file(path))`` takes it.  Its bytes are held in host
    memory until they are written.  Extra states of modules that are no tensors are left out.

    Args:
        folder: as :func:`consolidated` takes it.
        path: of the file, which must not be there.
        dtype: of the parameters; buffers keep theirs.

    Raises:
        CheckpointError: if the checkpoint cannot be read, or the file not be written.
    """
    path = Path(path)
    if path.exists():
        raise CheckpointError(f"{path}: is there already")
    parts, unfinished = _open(folder), path.with_name(f".{path.name}.partial")
    tensors = (
        (name, value.to(dtype) if "parameter" in parts.manifest.state[name] else value)
        for name, value in parts.entries()
        if isinstance(value, Tensor)
    )
    try:
        write_tensors(unfinished, tensors)
        unfinished.replace(path)
        sync(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _open(folder: Path | str) -> Parts:
    """A checkpoint whose files are all as they were written."""
    path = resolve(Path(folder))
    manifest = read_manifest(path)
    manifest.verify(path, range(len(manifest.files)))
    return Parts(path, manifest)
