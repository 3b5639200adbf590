"""Recomputes which batches and validation samples a trial must read, to check what the ranks have read.

This module computes by itself which samples belong to a batch.  It does not call the data set's code that chooses them,
which is :meth:`harness.workloads.dataset.Dataset.batch`, ``validation_batches`` and ``draw``.  The samples themselves
come from two places.  Sequences of a text are cut from the tokens here.  Masked text, images and users' examples are
made by the data set's own method :meth:`~harness.workloads.dataset.Dataset.at`, since a second implementation of this
method would prove nothing.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from harness.suites.trial import Trial
from harness.workloads.corpus import Text
from harness.workloads.dataset import Dataset
from harness.workloads.own_pairs import OwnPairs
from harness.workloads.rank_batches import Batch

_CHANCES: Final = 2**24  # if more batches than this are possible, two equal batches are no coincidence
_WINDOWS: Final = 4  # windows of a text's validation part that are looked for in its training part
_LEAST: Final = 64  # least number of tokens of such a window
_SEARCHED: Final = 64 * 2**20  # bytes of the largest training part that is searched for them


class BatchWitness:
    """Computes the batches that any rank of a trial must read, independently of the data set's own code."""

    def __init__(self, trial: Trial, dataset: Dataset) -> None:
        self._trial, self._dataset = trial, dataset
        self._sequences = trial.tokens_per_rank // trial.sequence
        # The control "half_batch" reads half of each batch on purpose.
        self._used = self._sequences // 2 if trial.control == "half_batch" else self._sequences
        self.samples = trial.accumulation * self._used  # number of samples that one rank reads in a step
        count = dataset.count(dataset.train)
        self.distinct = count ** (trial.accumulation * self._sequences) > _CHANCES

    def batches(self, step: int, ranks: Sequence[int]) -> list[Batch]:
        """Return the batches that the given ranks must read in step ``step``, ordered by micro-batch, then by rank."""
        dataset, count = self._dataset, self._dataset.count(self._dataset.train)
        read = []
        for micro_batch, rank in itertools.product(range(self._trial.accumulation), ranks):
            keys = [f"{self._trial.seed}/{step}/{micro_batch}/{rank}/{place}" for place in range(self._used)]
            digests = [hashlib.blake2b(key.encode(), digest_size=16).digest() for key in keys]
            numbers = [int.from_bytes(digest, "little") % count for digest in digests]
            read.append(self._samples(dataset.train, numbers, keys))
        return read

    def held_out(self, ranks: Sequence[int]) -> list[Batch]:
        """Return the validation batches that the given ranks must read, ordered by rank."""
        dataset, count, world = self._dataset, self._sequences, self._trial.topology().world
        batches = self._trial.validation_batches
        last, gaps = dataset.count(dataset.validation) - 1, max(batches * world * count - 1, 1)
        read = []
        for rank, batch in itertools.product(ranks, range(batches)):
            places = [(batch * world + rank) * count + place for place in range(count)]
            keys = [f"validation/{place}" for place in places]
            read.append(self._samples(dataset.validation, [place * last // gaps for place in places], keys))
        return read

    def _samples(self, part: Any, numbers: list[int], keys: list[str]) -> Batch:
        dataset = self._dataset
        if isinstance(dataset, Text) and not dataset.masks:
            windows = [part[number : number + dataset.length + 1] for number in numbers]
            tokens = torch.from_numpy(np.stack(windows).astype(np.int64))
            return tokens[:, :-1], tokens[:, 1:]
        inputs, targets = dataset.at(part, numbers, keys)
        return torch.tensor(inputs), torch.tensor(targets)


@lru_cache(1)  # of ranks that are threads, the first looks for all
def shared_split(dataset: Dataset) -> str | None:
    """Return a sentence if a data set trains on its validation samples; else None.

    The sentence is returned in two cases:

    - The training part and the validation part are the same object, or share memory.
    - The data set is a text, and four passages of its validation part, spread evenly, all occur in its training part
      too.

    There are two exceptions to the second case.  If the training part has more than 64 MiB, it is not searched, and
    None is returned.  If the text repeats itself, a match proves nothing, and None is returned.  A text is taken to
    repeat itself if at least one of four passages of its training part occurs there twice.
    """
    shared = "validation samples are part of the training data"
    if isinstance(dataset, OwnPairs):
        pairs = zip(dataset.train, dataset.validation, strict=True)
        return shared if any(np.shares_memory(train, validation) for train, validation in pairs) else None
    if not isinstance(dataset, Text):
        return shared if dataset.train is dataset.validation else None
    train, validation = dataset.train, dataset.validation
    if np.shares_memory(train, validation):
        return shared
    if train.nbytes > _SEARCHED:
        return None
    whole, length = train.tobytes(), min(max(dataset.length + 1, _LEAST), len(train), len(validation))

    def occurrences(part: Any) -> Iterable[int]:
        for start in np.linspace(0, len(part) - length, _WINDOWS).astype(int):
            window = part[start : start + length].astype(train.dtype).tobytes()
            first = whole.find(window)
            yield 0 if first < 0 else 1 + (whole.find(window, first + 1) >= 0)

    return shared if min(occurrences(validation)) > 0 and max(occurrences(train)) == 1 else None


def digest(batches: Iterable[Batch]) -> str:
    """Return 32 hex digits: a BLAKE2b digest of the types, shapes and values of the inputs and targets of batches."""
    total = hashlib.blake2b(digest_size=16)
    for tensor in itertools.chain.from_iterable(batches):
        total.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(np.ascontiguousarray(tensor.detach().cpu().numpy()).data)
    return total.hexdigest()


def same_inputs(read: Sequence[Tensor], given: Sequence[Batch]) -> bool:
    """Return whether the tensors ``read`` are the inputs of the batches ``given``, in the same order.

    Tensors of the same type must have equal values.  If the types differ, because the model reads bf16 instead of fp32
    for example, only the shapes are compared.

    Args:
        read: The inputs that the model read.
        given: The batches, as pairs of inputs and targets.
    """
    if len(read) != len(given):
        return False
    pairs = [(seen, inputs) for seen, (inputs, _) in zip(read, given, strict=True)]
    return all(
        seen.shape == inputs.shape and (seen.dtype != inputs.dtype or torch.equal(seen, inputs))
        for seen, inputs in pairs
    )
