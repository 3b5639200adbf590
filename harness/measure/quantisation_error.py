"""Measures, on a trial's weights and mean gradients, the error of a grid of integer codecs and the size without loss.

Each rank encodes and decodes its own shards once with each codec; only sums and maxima are sent.
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
    """Return the errors of codecs with all :data:`BITS` and :data:`BLOCKS` for each unit, over all ranks.

    All ranks must call this.  Tensors of nothing but zeros are left out.
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
    """Return the bytes that each unit takes without loss, over all ranks: in fp32, and of the values cast to bf16.

    zstd compresses the elements if it is installed, else zlib.  All ranks must call this, and either all of them must
    have zstd or none.
    Tensors of nothing but zeros are left out.
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
    """Yield the purpose, the unit and this rank's shard (S,) of all weights, and of all gradients that exist."""
    for unit in zero.units:
        shard, name = unit.master_shard, unit.geometry.name
        yield "weights", name, shard.master
        if (gradient := shard.mean_gradient()) is not None:
            yield "gradients", name, gradient


@torch.no_grad()
def _sums(codec: Codec, x: Tensor) -> Tensor:
    """Encode and decode x (S,) fp32.

    Returns (4,) fp64: the sums of squared errors and of squared values, the largest error and largest value.
    """
    frames = torch.empty(codec.frame_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    decoded = torch.empty_like(x)
    ops.encode(codec, x, frames)
    ops.decode(codec, frames, decoded)
    error, value = (decoded - x).double(), x.double()
    return torch.stack([error.square().sum(), value.square().sum(), error.abs().max(), value.abs().max()])


def _short(value: float) -> float:
    """Round to six digits, since more would only make records larger."""
    return float(f"{value:.6g}")
