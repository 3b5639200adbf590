"""Base class of data sets, which decides the samples that each rank reads at each step.  No torch.

Samples are drawn by hashing a key of seed, step, micro-batch, rank and index.  A batch therefore depends on
nothing else: not on the strategy, on earlier draws, or on the version of a library.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pair = tuple[NDArray[Any], NDArray[np.int64]]  # inputs and targets of a model


class Dataset(ABC):
    """A data set with a part for training and a part for validation; subclasses implement :meth:`at`."""

    sha256: str  # digest of the whole data set
    train: Any  # the part with training samples, as the subclass stores it
    validation: Any  # the part with validation samples

    def count(self, part: Any) -> int:
        """Return the number of samples in a part, ``train`` or ``validation``."""
        return len(part)

    @abstractmethod
    def at(self, part: Any, numbers: list[int], keys: list[str]) -> Pair:
        """Return samples of a part as inputs and targets.

        Args:
            part: ``train`` or ``validation``.
            numbers: Numbers of the samples, from 0.
            keys: A key for each sample.  Whatever else is random in a sample, such as its masks, is derived from its
                key.
        """

    def batch(self, *, seed: int, step: int, micro_batch: int, rank: int, sequences: int) -> Pair:
        """Draw the ``sequences`` training samples of a rank's micro-batch.

        ``step`` counts from the first warm-up step.
        """
        keys = [f"{seed}/{step}/{micro_batch}/{rank}/{index}" for index in range(sequences)]
        count = self.count(self.train)
        return self.at(self.train, [draw(key, count) for key in keys], keys)

    def validation_batches(self, *, batches: int, rank: int, world: int, sequences: int) -> list[Pair]:
        """Return a rank's ``batches`` validation batches, of ``sequences`` samples each.

        The samples of all ranks and batches are spread evenly over the validation part, in order: first the
        first batch of every rank, then the second.
        """
        last, gaps = self.count(self.validation) - 1, max(batches * world * sequences - 1, 1)
        pairs = []
        for batch in range(batches):
            first = (batch * world + rank) * sequences
            places = range(first, first + sequences)
            keys = [f"validation/{place}" for place in places]
            pairs.append(self.at(self.validation, [place * last // gaps for place in places], keys))
        return pairs


def draw(key: str, count: int) -> int:
    """Return a pseudo-random number from 0 to ``count - 1``, from a hash of ``key``.

    A hash gives the same number in every version of every library, which generators do not promise.
    """
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "little") % count
