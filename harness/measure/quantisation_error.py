"""Tries a grid of codecs on a trial's weights and reduced gradients: one encoding each, nothing sent.

What the policy's own codecs do is measured where it is sent (:mod:`harness.measure.communication_error`).
"""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from harness.records.record import QuantisationError
from impl import ops
from impl.codecs.codec import Block, Codec, IntCodec
from impl.zero import Zero

BITS: Final = (2, 3, 4, 5, 6, 7, 8)
BLOCKS: Final[tuple[Block, ...]] = (64, 256, 1024, 2048, "shard")


def measure(zero: Zero) -> list[QuantisationError]:
    """Errors over all ranks of a grid of bits and block sizes, on gradients that no step has consumed; a
    tensor of zeros has none.  All ranks must call it.
    """
    grid = [IntCodec(bits, block) for bits in BITS for block in BLOCKS]
    found = []
    for unit in zero.units:
        tensors = {"weights": unit.master_shard.master, "gradients": unit.master_shard.mean_gradient()}
        for purpose, tensor in tensors.items():
            if tensor is None:
                continue
            mine = torch.tensor([_sums(codec, tensor) for codec in grid], dtype=torch.float64)
            of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(of_ranks, mine)
            ranks = torch.stack(of_ranks)  # (world, codecs, 4)
            for codec, sums, most in zip(grid, ranks.sum(0).tolist(), ranks.amax(0).tolist(), strict=True):
                if sums[1]:
                    found.append(
                        QuantisationError(
                            purpose=purpose,
                            unit=unit.geometry.name,
                            codec=str(codec),
                            vnmse=_short(sums[0] / sums[1]),
                            largest=_short(most[2] / most[3]),
                        )
                    )
    return found


@torch.no_grad()
def _sums(codec: Codec, x: Tensor) -> tuple[float, float, float, float]:
    """Squared errors and values, largest error and value, of one codec on one tensor, (S,) fp32."""
    frames = torch.empty(codec.frame_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    decoded = torch.empty_like(x)
    ops.encode(codec, x, frames)
    ops.decode(codec, frames, decoded)
    error, value = (decoded - x).double(), x.double()
    return (
        float(error.square().sum()),
        float(value.square().sum()),
        float(error.abs().max()),
        float(value.abs().max()),
    )


def _short(value: float) -> float:
    """Six digits: more say nothing of an error, and fill a record."""
    return float(f"{value:.6g}")
