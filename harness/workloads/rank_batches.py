"""The batches that a rank reads at each step, as tensors on its device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from harness.suites.trial import Trial
from harness.workloads import trial_dataset
from harness.workloads.dataset import Pair

Batch = tuple[Tensor, Tensor]  # inputs of the model, and targets


class Batches(Protocol):
    """The batches of a step's passes: :class:`RankBatches`, or :class:`ExperienceBatch`."""

    def step(self, index: int) -> Iterator[list[tuple[Tensor, Any]]]:
        """For each micro-batch of a step, one batch for each rank that is computed here."""


def batches_of(data: Batches, step: int = 0) -> Iterator[tuple[Tensor, Any]]:
    """The batches of a step, micro-batch after micro-batch."""
    return itertools.chain.from_iterable(data.step(step))


@dataclass(frozen=True, slots=True)
class ExperienceBatch:
    """One batch that was made from others, the same for every step."""

    batch: tuple[Tensor, Any]  # inputs of the model, and targets
    drawn: list[Batch]  # the batches from which it was made

    def step(self, index: int) -> Iterator[list[tuple[Tensor, Any]]]:
        """See :class:`Batches`."""
        yield [self.batch]


class RankBatches:
    """Batches of one rank of a trial, or of all for strategy ``single``; a CorpusError for bad data."""

    def __init__(self, trial: Trial, rank: int, device: torch.device) -> None:
        trial_dataset.check(trial)
        self.dataset, self._trial, self._device = trial_dataset.load(trial), trial, device
        world = trial.topology().world
        self.ranks: Sequence[int] = range(world) if trial.strategy == "single" else (rank,)  # computed here
        self.sha256 = self.dataset.sha256
        self._sequences = trial.tokens_per_rank // trial.sequence
        self._used = self._sequences // 2 if trial.control == "half_batch" else self._sequences
        self.validation: list[Batch] = []  # of the fixed split
        if trial.validate_every is not None:
            self.validation = [
                self._tensors(pair)
                for part in self.ranks
                for pair in self.dataset.validation_batches(
                    batches=trial.validation_batches, rank=part, world=world, sequences=self._sequences
                )
            ]

    def step(self, index: int) -> Iterator[list[Batch]]:
        """See :class:`Batches`."""
        for micro_batch in range(self._trial.accumulation):
            yield [self._batch(index, micro_batch, part) for part in self.ranks]

    def of_rank(self, index: int, rank: int) -> Iterator[Batch]:
        """Batches of a step of another rank, or of all ranks for strategy ``single``."""
        ranks = (rank,) if len(self.ranks) == 1 else self.ranks
        for micro_batch in range(self._trial.accumulation):
            yield from (self._batch(index, micro_batch, part) for part in ranks)

    def _batch(self, step: int, micro_batch: int, rank: int) -> Batch:
        inputs, targets = self.dataset.batch(
            seed=self._trial.seed, step=step, micro_batch=micro_batch, rank=rank, sequences=self._sequences
        )
        return self._tensors((inputs[: self._used], targets[: self._used]))

    def _tensors(self, pair: Pair) -> Batch:
        return torch.tensor(pair[0]).to(self._device), torch.tensor(pair[1]).to(self._device)
