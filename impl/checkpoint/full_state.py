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
from impl.engine.narrowing import Narrowing, dtype_of
from impl.errors import ZeroError


def consolidated(folder: Path | str) -> dict[str, Any]:
    """The unsharded model's state dict out of a checkpoint, or out of the newest in a folder of them.

    Parameters are fp32, tied ones under all their names.  A CheckpointError names what cannot be read.
    """
    return dict(_entries(folder))


def export(
    folder: Path | str,
    path: Path | str,
    *,
    dtype: torch.dtype | str = torch.float32,
    allow_overflow: bool = False,
) -> tuple[str, ...]:
    """Write that state dict, parameters in ``dtype``, as one safetensors file, which must not exist yet.

    Extra states that are no tensors are left out.  The host holds all bytes until they are written.

    Args:
        folder: a checkpoint, or a folder of them, of which the newest is taken.
        path: the file.
        dtype: fp32, bf16, fp16, or a floating-point ``torch.dtype``.
        allow_overflow: write finite values beyond the type's largest as the cast leaves them, as infinity.

    Returns:
        A line for each kind of value that is not what it was, or not finite: how many of which parameters.

    Raises:
        CheckpointError: for what cannot be read or written, and values that overflow; nothing is written.
    """
    path = Path(path)
    if path.exists():
        raise CheckpointError(f"{path}: is there already")
    try:
        narrowing = Narrowing(dtype_of(dtype))
    except ZeroError as error:
        raise CheckpointError(str(error)) from None

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, value in _entries(folder, narrowing):
            if isinstance(value, Tensor):
                yield name, value
        if not allow_overflow and (overflow := narrowing.overflow()) is not None:
            raise CheckpointError(
                f"{path}: {overflow}; export in a wider type, or pass --allow-overflow (allow_overflow=True)"
            )

    unfinished = path.with_name(f".{path.name}.partial")
    try:
        write_tensors(unfinished, tensors())
        unfinished.replace(path)
        sync(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)
    return narrowing.notes()


def _entries(folder: Path | str, narrowing: Narrowing | None = None) -> Iterator[tuple[str, Any]]:
    """The entries of the state dict, one at a time; all files are verified first."""
    path = resolve(Path(folder))
    manifest = read_manifest(path)
    manifest.verify(path, range(len(manifest.files)))
    parts = Parts(path, manifest)
    buffers = parts.tensors(0, "buffer")
    for name, entry in manifest.state.items():
        if "parameter" in entry:
            whole = parts.read("weight", entry["parameter"], 0, math.prod(entry["shape"]))
            whole = whole.view(entry["shape"])
            yield name, whole if narrowing is None else narrowing.cast(entry["parameter"], whole)
        else:
            yield name, buffers[name] if "buffer" in entry else from_json(entry["extra"])
