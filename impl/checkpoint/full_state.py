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

    ``load_state_dict(strict=True)`` takes it: fp32 parameters, tied ones under all their names, buffers and
    extra states.  What is missing, foreign, of another version, cut short or altered is a CheckpointError.
    """
    return dict(_entries(folder, torch.float32))


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
    unfinished = path.with_name(f".{path.name}.partial")
    try:
        write_tensors(unfinished, (one for one in _entries(folder, dtype) if isinstance(one[1], Tensor)))
        unfinished.replace(path)
        sync(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _entries(folder: Path | str, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """The state dict out of files that are all as they were written, one whole entry after the other."""
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
