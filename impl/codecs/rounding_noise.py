"""The random bits of stochastic rounding, by element: the same for every layout, world size and backend.

[Note: rounding noise]
An element's 16 bits depend on what it is, never on where it is computed: on a :class:`Key` and on its number
in the unit.  So a failure can be replayed anywhere.  Gradients (world, S) of a rank have that rank as their
source: else all ranks would share their noise, and the variance of a mean over N ranks would be N times as
large.  Weights (S,) have none, and are keyed by the step alone: all passes see the same weights.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), one
call for an octet of elements; docs/reference/wire_format.md says how key and bits are laid out.  No torch.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final, Literal

OCTET: Final = 8  # elements of one Philox call
BITS: Final = 16  # of randomness an element
ROUNDS: Final = 10
MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
WEYL: Final = (0x9E3779B9, 0xBB67AE85)  # added to the key from round to round
NO_SOURCE: Final = -1  # of weights: all ranks draw what the owner drew

Purpose = Literal["weights", "gradients"]
Words = tuple[int, int, int, int]


def shard_stride(numel: int) -> int:
    """Elements between the first of one shard and of the next, as noise counts them: whole octets."""
    return -(-numel // OCTET) * OCTET


@dataclass(frozen=True, slots=True)
class Noise:
    """Random bits for the rows of a tensor (..., S); starts and strides are multiples of 8, from 0."""

    philox: Words  # 4 words of 32 bits: the upper half of the counter, then the key
    start: int = 0  # number of the first row's first element
    strides: tuple[int, ...] = ()  # elements from one row to the next, by leading dimension

    def __post_init__(self) -> None:
        for number in (self.start, *self.strides):
            if number % OCTET or number < 0:
                raise ValueError(f"noise starts and strides are multiples of {OCTET} elements, got {number}")


@dataclass(frozen=True, slots=True)
class Key:
    """What an encoded tensor is: all that its random bits depend on, but for the element's number."""

    seed: int
    step: int  # optimizer steps before it; 0 for frozen weights
    micro_batch: int  # inside the step; 0 for weights, which do not change there
    unit: str
    purpose: Purpose
    hop: int = 0  # of the collective, 0 first
    source: int = NO_SOURCE  # the rank that encodes, for gradients

    def noise(self, start: int = 0, strides: tuple[int, ...] = ()) -> Noise:
        """Its random bits for rows that start as :class:`Noise` says."""
        numbers = (self.seed, self.step, self.micro_batch, self.purpose, self.hop, self.source)
        text = "/".join([*map(str, numbers), self.unit])  # the unit last: it may hold anything
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        return Noise(struct.unpack("<4I", digest), start, strides)


@dataclass(slots=True)
class Clock:
    """The moment of a run, as random bits are keyed by it: optimizer steps, and backward passes since."""

    seed: int = 0
    step: int = 0
    micro_batch: int = 0

    def weights(self, unit: str, *, frozen: bool = False) -> Key:
        """The key of a unit's weights: the same for every pass over the same weights.

        Frozen weights have one key at every step: they may stay gathered for the whole run, and a resumed
        run, which gathers them later, must get the same.
        """
        return Key(self.seed, 0 if frozen else self.step, 0, unit, "weights")

    def gradients(self, unit: str, rank: int) -> Key:
        """The key of the gradient that ``rank`` sends of a unit."""
        return Key(self.seed, self.step, self.micro_batch, unit, "gradients", source=rank)
