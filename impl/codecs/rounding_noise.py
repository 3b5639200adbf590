"""Defines the random bits of stochastic rounding, which do not depend on layout, world size or backend.

[Note: rounding noise]
Each element gets 16 random bits.  These bits depend only on a :class:`Key` and on the element's number in its unit
(parameters that are gathered and reduced together).  The bits do not depend on the device or the backend, so a failure
can be replayed anywhere.

The key of gradients contains the rank that encodes them: if all ranks had the same noise, the variance of the mean over
N ranks would be N times as large.  The key of weights contains the step, but neither the rank nor the micro-batch, so
that all ranks and all passes of a step see the same weights.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), with one call
for every eight elements; docs/reference/wire_format.md gives the layout of key and bits.  This module does not import
torch.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final, Literal

OCTET: Final = 8  # elements that one Philox call serves
BITS: Final = 16  # random bits for each element
ROUNDS: Final = 10
MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
WEYL: Final = (0x9E3779B9, 0xBB67AE85)  # added to the key in each round
NO_SOURCE: Final = -1  # in keys of weights, whose bits do not depend on the rank

Purpose = Literal["weights", "gradients"]
Words = tuple[int, int, int, int]


def shard_stride(numel: int) -> int:
    """Returns ``numel``, the number of elements of a shard, rounded up to a multiple of 8.

    The result is the distance between the element numbers of two neighbouring shards.  An element's random bits depend
    on its number, and shard k begins at the number k times the result.  With ``numel = 100`` the result is 104, so the
    first element of shard 2 has the number 208.
    """
    return -(-numel // OCTET) * OCTET


@dataclass(frozen=True, slots=True)
class Noise:
    """Determines the random bits for the elements of a tensor (..., S).

    The bits of an element depend only on its number and on ``philox``.  ``philox`` are the words that start the random
    generator.  The numbers of a row's elements are consecutive, and the first row begins at the number ``start``.
    ``strides`` has one entry for each leading dimension: how much larger the numbers become from one row to the next
    along this dimension.

    Raises ValueError: if ``start`` or a stride is negative, or is not a multiple of 8.
    """

    philox: Words  # 4 words of 32 bits: the upper half of Philox's counter, then Philox's key
    start: int = 0  # number of the first row's first element
    strides: tuple[
        int, ...
    ] = ()  # for each leading dimension, the number of elements from one row to the next

    def __post_init__(self) -> None:
        for number in (self.start, *self.strides):
            if number % OCTET or number < 0:
                raise ValueError(
                    f"noise starts and strides must be non-negative multiples of {OCTET} elements, got {number}"
                )


@dataclass(frozen=True, slots=True)
class Key:
    """Identifies an encoded tensor; an element's random bits depend on this key and the element's number only."""

    seed: int
    step: int  # number of optimizer steps so far; 0 for frozen weights
    micro_batch: int  # index inside the step; 0 for weights, which do not change inside a step
    unit: str
    purpose: Purpose
    hop: int = 0  # index of the collective's hop
    source: int = NO_SOURCE  # rank that encodes, for gradients

    def noise(self, start: int = 0, strides: tuple[int, ...] = ()) -> Noise:
        """Returns the random bits that this key gives to the elements of a tensor (..., S).

        An element's bits depend on this key and on the element's number.  The first element of the first row has the
        number ``start``.  ``strides`` has an entry for each leading dimension.  It is the increase of the numbers from
        one row to the next along this dimension.  ``start`` and ``strides`` must be multiples of 8.
        """
        numbers = (self.seed, self.step, self.micro_batch, self.purpose, self.hop, self.source)
        text = "/".join([*map(str, numbers), self.unit])  # the unit is last, since its name may contain "/"
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        return Noise(struct.unpack("<4I", digest), start, strides)


@dataclass(slots=True)
class Clock:
    """Holds a run's seed and its current step and micro-batch, and makes the keys of random bits from these numbers.

    A :class:`Key` determines the random bits of stochastic rounding.
    """

    seed: int = 0
    step: int = 0
    micro_batch: int = 0

    def weights(self, unit: str, *, frozen: bool = False) -> Key:
        """Returns the key of the random bits for a unit's weights, equal in every pass over the same weights.

        Frozen weights have the same key at every step.  They may stay gathered for the whole run, and a resumed run,
        which gathers them at a later step, must get the same values.
        """
        return Key(self.seed, 0 if frozen else self.step, 0, unit, "weights")

    def gradients(self, unit: str, rank: int) -> Key:
        """Returns the key of the random bits with which ``rank`` encodes a unit's gradient in this micro-batch."""
        return Key(self.seed, self.step, self.micro_batch, unit, "gradients", source=rank)
