"""Tries a grid of codecs on a trial's weights and reduced gradients: one encoding each; nothing is sent.

Every rank sums squares over its own shards; the sums of all ranks give one error per tensor.  What the
policy's own codecs do to what is sent is measured there (:mod:`harness.measure.communication_error`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from harness.records.record import QuantisationError
from impl import ops
from impl.codecs.codec import Block, Codec, IntCodec
from impl.zero import Zero

BITS: Final = (2, 3, 4, 5, 6, 7, 8)
BLOCKS: Final[tuple[Block, ...]] = (64, 256, 1024, 2048, "shard")
Key = tuple[str, str, str]  # purpose, unit, codec


@dataclass(frozen=True, slots=True)
class Squares:
    """Error sums over one rank's shard: squared errors and values, largest error and value."""

    error: float
    value: float
    largest_error: float
    largest_value: float


def measure(zero: Zero) -> dict[Key, Squares]:
    """Measure the error sums of a grid of bits and block sizes.

    ``zero`` has gradients that no optimizer step has consumed.
    """
    grid = [IntCodec(bits, block) for bits in BITS for block in BLOCKS]
    found: dict[Key, Squares] = {}
    with torch.no_grad():
        for unit in zero.units:
            tensors = {"weights": unit.master_shard.master, "gradients": unit.master_shard.mean_gradient()}
            for purpose, tensor in tensors.items():
                if tensor is None:
                    continue
                for codec in grid:
                    found[purpose, unit.geometry.name, str(codec)] = squares(codec, tensor)
    return found


def squares(codec: Codec, x: Tensor) -> Squares:
    """Error sums of one codec, which rounds to nearest, on one tensor: (S,) fp32."""
    frames = torch.empty(codec.frame_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    decoded = torch.empty_like(x)
    ops.encode(codec, x, frames)
    ops.decode(codec, frames, decoded)
    error, value = (decoded - x).double(), x.double()
    return Squares(
        error=float(error.square().sum()),
        value=float(value.square().sum()),
        largest_error=float(error.abs().max()),
        largest_value=float(value.abs().max()),
    )


def _short(value: float) -> float:
    """Six digits: more say nothing of an error, and fill a record."""
    return float(f"{value:.6g}")


def errors_of(ranks: Sequence[Mapping[Key, Squares]]) -> list[QuantisationError]:
    """Combine the sums of all ranks into errors; a tensor of zeros is left out."""
    errors = []
    for key in ranks[0] if ranks else ():
        parts = [rank[key] for rank in ranks if key in rank]
        value, largest = sum(part.value for part in parts), max(part.largest_value for part in parts)
        if value == 0:
            continue
        purpose, unit, codec = key
        errors.append(
            QuantisationError(
                purpose=purpose,
                unit=unit,
                codec=codec,
                vnmse=_short(sum(part.error for part in parts) / value),
                largest=_short(max(part.largest_error for part in parts) / largest),
            )
        )
    return errors
