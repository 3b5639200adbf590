"""Tensors as the bytes of safetensors files."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from impl.checkpoint.atomic_files import Bytes, CheckpointError
from impl.checkpoint.safetensors_file import TYPES, Entry

DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, of) for name, (_, of) in TYPES.items()}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def entry_of(tensor: Tensor, where: str) -> Entry:
    """What a file says of ``tensor``.

    Raises:
        CheckpointError: naming ``where`` for a type that such files do not have.
    """
    if tensor.dtype not in NAMES:
        raise CheckpointError(f"{where}: type {tensor.dtype} has no name in safetensors files")
    return Entry(NAMES[tensor.dtype], tuple(tensor.shape))


def content(tensor: Tensor) -> Bytes:
    """The bytes of ``tensor``, row by row; of a contiguous one on the CPU its own memory."""
    if not tensor.numel():
        return b""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data
