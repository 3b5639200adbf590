"""A data set, and which of its samples each rank reads at each step.  No torch."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pair = tuple[NDArray[Any], NDArray[np.int64]]  # inputs of a model, and targets


class Dataset(ABC):
    """A data set from which batches are drawn; the key alone decides what a draw gives."""

    sha256: str  # of the whole data set
    train: Any  # the part with training samples
    validation: Any  # the part with validation samples

    def count(self, part: Any) -> int:
        """Number of samples in a part, ``train`` or ``validation``."""
        return len(part)

    @abstractmethod
    def at(self, part: Any, numbers: list[int], keys: list[str]) -> Pair:
        """The samples of a part by number; all else that is random in a sample follows from its key."""

    def batch(self, *, seed: int, step: int, micro_batch: int, rank: int, sequences: int) -> Pair:
        """The B = ``sequences`` training samples of a rank's micro-batch; ``step`` counts warm-ups too."""
        keys = [f"{seed}/{step}/{micro_batch}/{rank}/{index}" for index in range(sequences)]
        count = self.count(self.train)
        return self.at(self.train, [draw(key, count) for key in keys], keys)

    def validation_batches(self, *, batches: int, rank: int, world: int, sequences: int) -> list[Pair]:
        """A rank's ``batches`` of B samples, of those spread evenly over the split and dealt to all ranks."""
        last, gaps = self.count(self.validation) - 1, max(batches * world * sequences - 1, 1)
        pairs = []
        for batch in range(batches):
            first = (batch * world + rank) * sequences
            places = range(first, first + sequences)
            keys = [f"validation/{place}" for place in places]
            pairs.append(self.at(self.validation, [place * last // gaps for place in places], keys))
        return pairs


def draw(key: str, count: int) -> int:
    """A pseudo-random number below ``count``: a hash of ``key``, equal in every version of every library."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "little") % count
