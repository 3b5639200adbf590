"""Defines the base class of data sets, which chooses the samples that each rank reads at each step.

Which training sample is read follows from a hash of seed, step, micro-batch, rank and the sample's index in the batch.
A batch therefore does not depend on the strategy, on earlier batches, or on the version of a library.  Validation
samples are spread evenly over their part of the data set.  This module does not import torch.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pair = tuple[NDArray[Any], NDArray[np.int64]]  # inputs and targets of a model


class Dataset(ABC):
    """A data set with a part for training and a part for validation.  Subclasses implement :meth:`at`."""

    sha256: str  # digest of the whole data set
    train: Any  # the part with training samples, as the subclass stores it
    validation: Any  # the part with validation samples

    def count(self, part: Any) -> int:
        """Return the number of samples in a part; ``part`` is the attribute ``train`` or ``validation``."""
        return len(part)

    @abstractmethod
    def at(self, part: Any, numbers: list[int], keys: list[str]) -> Pair:
        """Return samples of a part as inputs and targets.

        Args:
            part: The attribute ``train`` or ``validation``.
            numbers: Numbers of the samples in the part, from 0.
            keys: A text for each sample.  Everything that is random in a sample, such as its masks, is derived from a
                hash of this text.
        """

    def batch(self, *, seed: int, step: int, micro_batch: int, rank: int, sequences: int) -> Pair:
        """Return the training samples that a rank reads in one micro-batch, as inputs and targets.

        ``sequences`` is the number of samples.  ``step`` is the number of the step; the first warm-up step is 0.
        """
        keys = [f"{seed}/{step}/{micro_batch}/{rank}/{index}" for index in range(sequences)]
        count = self.count(self.train)
        return self.at(self.train, [draw(key, count) for key in keys], keys)

    def validation_batches(self, *, batches: int, rank: int, world: int, sequences: int) -> list[Pair]:
        """Return the validation batches of a rank, each as inputs and targets.

        All ranks' batches together have ``batches * world * sequences`` samples, which are spread evenly over the
        validation part.  The first ``sequences`` samples are the first batch of rank 0, the next ones the first batch
        of rank 1, and so on.  After the first batches of all ranks come their second batches, in the same order.

        Args:
            batches: Number of batches of the rank.
            rank: Number of the rank.
            world: Number of ranks.
            sequences: Number of samples of a batch.
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

    The number is the same in every version of every library.  Random number generators do not promise this.
    """
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "little") % count
