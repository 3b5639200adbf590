"""Reads the unsharded model's state dict from a checkpoint, in one process, without other ranks or the model."""

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
    """Returns the unsharded model's state dict from a checkpoint, or from the newest checkpoint in a folder.

    Parameters are fp32; tied parameters are under all their names.

    Raises CheckpointError: if a file is missing, altered, or cannot be read.
    """
    return dict(_entries(folder))


def export(
    folder: Path | str,
    path: Path | str,
    *,
    dtype: torch.dtype | str = torch.float32,
    allow_overflow: bool = False,
) -> tuple[str, ...]:
    """Write the unsharded model's state dict as one safetensors file.

    Modules' extra states that are not tensors are left out.  The whole state dict is in host memory before it is
    written.

    Args:
        folder: a checkpoint, or a folder of checkpoints.  From a folder of checkpoints the newest is taken.
        path: the file to write, which must not exist yet.
        dtype: type of the parameters: ``fp32``, ``bf16``, ``fp16`` or the ``torch.dtype`` of one of these, or
            ``torch.float64``, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        allow_overflow: whether finite values beyond the type's range are written as torch casts them, usually as
            infinity.  If False, these values are an error.

    Returns:
        A tuple of at most three warnings, each a line of text; empty if no value was lost and all values are finite.
        The first is about finite values beyond the type's range, the second about values that became 0, and the third
        about values that were infinite or NaN before the cast.  A warning is left out if no parameter has such values.
        Each warning names up to four parameters, each with the number of these values, and says how many more
        parameters have such values.

    Raises:
        CheckpointError: if ``path`` exists, if ``dtype`` is another type, if a file cannot be read or written, or if
            values overflow and ``allow_overflow`` is False.  No file is then written to ``path``.
    """
    path = Path(path)
    if path.exists():
        raise CheckpointError(f"{path}: exists already; remove it, or choose another file")
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
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)
    return narrowing.notes()


def _entries(folder: Path | str, narrowing: Narrowing | None = None) -> Iterator[tuple[str, Any]]:
    """Verify all files of a checkpoint, then yield (name, value) for each entry of the model's state dict.

    Values are unsharded.  ``narrowing`` casts the parameters to another type; if it is None, they stay fp32.
    """
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
