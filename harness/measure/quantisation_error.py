"""Measures the error of a grid of integer codecs on a trial's weights and mean gradients.

Each rank encodes and decodes its own shards once with each codec; only sums of squares and maxima are sent.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from harness.cluster import all_ranks
from harness.records.trial_record import QuantisationError
from impl import ops
from impl.codecs.codec import Block, Codec, IntCodec
from impl.zero import Zero

BITS: Final = (2, 3, 4, 5, 6, 7, 8)
BLOCKS: Final[tuple[Block, ...]] = (64, 256, 1024, 2048, "shard")


def measure(zero: Zero) -> list[QuantisationError]:
    """Return the errors of codecs with all :data:`BITS` and :data:`BLOCKS` for each unit, over all ranks.

    All ranks must call this.  Tensors of nothing but zeros are left out.
    """
    grid = [IntCodec(bits, block) for bits in BITS for block in BLOCKS]
    errors = []
    for unit in zero.units:
        shard, name = unit.master_shard, unit.geometry.name
        for purpose, tensor in (("weights", shard.master), ("gradients", shard.mean_gradient())):
            if tensor is None:
                continue
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
