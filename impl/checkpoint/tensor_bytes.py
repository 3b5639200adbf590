"""Tensors as the bytes of safetensors files."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from impl.checkpoint.atomic_files import Bytes, CheckpointError
from impl.checkpoint.safetensors_file import Entry

NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES: Final = {name: dtype for dtype, name in NAMES.items()}


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
