"""Measures the errors of integer codecs, and the bytes of lossless codecs, on a trial's weights and mean gradients.

Each rank encodes and decodes its own shards once with each codec.  Neither the shards nor the encoded shards are sent;
ranks exchange only sums and maxima.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from harness.cluster import all_ranks
from harness.records.trial_record import LosslessSize, QuantisationError
from impl import ops
from impl.codecs.codec import Block, Codec, IntCodec, has_zstd, parse
from impl.codecs.own_rows import used_bytes
from impl.codecs.reference import REFERENCE
from impl.zero import Zero

BITS: Final = (2, 3, 4, 5, 6, 7, 8)
BLOCKS: Final[tuple[Block, ...]] = (64, 256, 1024, 2048, "shard")


def measure(zero: Zero) -> list[QuantisationError]:
    """Return the error of each integer codec on each unit's weights and mean gradient, over all ranks.

    A unit is a set of parameters that ``zero``, the engine, gathers and reduces together.  The codecs combine each
    number of bits in :data:`BITS` with each block size in :data:`BLOCKS`, for example 4 bits with blocks of 256
    elements.  All ranks must call this.  Tensors that contain only zeros are left out.
    """
    grid = [IntCodec(bits, block) for bits in BITS for block in BLOCKS]
    errors = []
    for purpose, name, tensor in _tensors(zero):
        sums = torch.stack([_sums(codec, tensor) for codec in grid])  # (codecs, 4)
        largest = sums.clone()
        all_ranks.add(sums)
        all_ranks.take_largest(largest)
        vnmse, worst = (sums[:, 0] / sums[:, 1]).tolist(), (largest[:, 2] / largest[:, 3]).tolist()
        errors += [
            QuantisationError(
                purpose=purpose, unit=name, codec=str(codec), vnmse=_short(mean), largest=_short(most)
            )
            for codec, mean, most, squares in zip(grid, vnmse, worst, sums[:, 1], strict=True)
            if squares
        ]
    return errors


def measure_lossless(zero: Zero) -> list[LosslessSize]:
    """Return how many bytes each unit's weights and mean gradient take when they are compressed without loss.

    A unit is a set of parameters that ``zero``, the engine, gathers and reduces together.  Each tensor is compressed
    twice: in fp32, and after a cast to bf16.  The error of this cast is the field ``vnmse`` of the result.  The bytes
    are summed over the shards of all ranks.  Tensors that contain only zeros are left out.

    The compressor is zstd, or zlib if zstd is not installed.  All ranks must call this, and either all of them must
    have zstd or none.
    """
    coder = "lossless:zstd" if has_zstd() else "lossless:zlib"
    sizes = []
    for purpose, name, tensor in _tensors(zero):
        for text in (coder, f"{coder}:bf16"):
            codec, row = parse(text), tensor.detach().cpu()
            frame, decoded = torch.zeros(codec.frame_bytes(row.numel()), dtype=torch.uint8), row.clone()
            REFERENCE.encode(codec, row, frame)
            REFERENCE.decode(codec, frame, decoded)
            squares = [float((decoded - row).double().square().sum()), float(row.double().square().sum())]
            sums = torch.tensor([row.numel(), used_bytes(codec, frame), *squares], dtype=torch.float64)
            all_ranks.add(sums := sums.to(tensor.device))
            elements, nbytes, error, square = sums.tolist()
            if square:
                size = {"elements": int(elements), "bytes": int(nbytes), "vnmse": _short(error / square)}
                sizes.append(LosslessSize(purpose=purpose, unit=name, codec=text, **size))
    return sizes


def _tensors(zero: Zero) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (purpose, unit, shard) for each unit's weights, and for its mean gradient if it has one.

    The purpose is ``weights`` or ``gradients``, the unit is its name, and the shard is this rank's shard, (S,) fp32.
    """
    for unit in zero.units:
        shard, name = unit.master_shard, unit.geometry.name
        yield "weights", name, shard.master
        if (gradient := shard.mean_gradient()) is not None:
            yield "gradients", name, gradient


@torch.no_grad()
def _sums(codec: Codec, x: Tensor) -> Tensor:
    """Encode and decode x (S,) fp32, and measure the errors.

    Returns (4,) fp64: the sum of squared errors, the sum of squared values, the largest magnitude of an error, and the
    largest magnitude of a value.
    """
    frames = torch.empty(codec.frame_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    decoded = torch.empty_like(x)
    ops.encode(codec, x, frames)
    ops.decode(codec, frames, decoded)
    error, value = (decoded - x).double(), x.double()
    return torch.stack([error.square().sum(), value.square().sum(), error.abs().max(), value.abs().max()])


def _short(value: float) -> float:
    """Round to six significant digits, since more digits would only make records larger."""
    return float(f"{value:.6g}")
