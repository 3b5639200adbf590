"""Draws the batches that a rank reads at each step, as tensors on its device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from harness.suites.trial import Trial
from harness.workloads import trial_dataset
from harness.workloads.dataset import Dataset, Pair

Batch = tuple[Tensor, Tensor]  # inputs and targets of the model


class Batches(Protocol):
    """A source of batches for training steps, such as :class:`RankBatches`."""

    def step(self, index: int) -> Iterator[list[tuple[Tensor, Any]]]:
        """Yield a list of batches (inputs, targets) for each micro-batch of step ``index``.

        The list has one batch, which this process's rank reads.  With strategy ``single``, in which one process
        computes for all ranks, it has one batch for each rank.
        """


def batches_of(data: Batches, step: int = 0) -> Iterator[tuple[Tensor, Any]]:
    """Yield all batches of a step, one after the other, in the order of micro-batches."""
    return itertools.chain.from_iterable(data.step(step))


@dataclass(frozen=True, slots=True)
class ExperienceBatch:
    """The batch of one step of workload ``rlhf``: prompts, and their continuations by the actor (the trained model)."""

    batch: tuple[Tensor, Any]  # inputs and targets of the model
    drawn: list[Batch]  # the batches that the prompts were taken from

    def step(self, index: int) -> Iterator[list[tuple[Tensor, Any]]]:
        """Yield one list, which has the one batch of the step.  ``index`` is not used."""
        yield [self.batch]


@dataclass(frozen=True, slots=True)
class FirstSequences:
    """A source of batches that yields only the first sequence of each batch of another source, for quick checks."""

    batches: Batches

    def step(self, index: int) -> Iterator[list[tuple[Tensor, Any]]]:
        """Yield, for each micro-batch of step ``index``, a list of batches with one sequence each."""
        for micro in self.batches.step(index):
            yield [(inputs[:1], targets[:1]) for inputs, targets in micro]


class RankBatches:
    """The batches that one process of a trial reads, for training and for validation.

    A process reads the batches of its rank.  With strategy ``single``, one process reads the batches of all ranks.

    Args:
        trial: The trial.
        rank: Number of the rank.
        device: The device on which the tensors are made.
        dataset: The trial's data set.  If it is None, the data set is loaded.

    Raises:
        CorpusError: if the data cannot be read or do not fit the model.
    """

    def __init__(self, trial: Trial, rank: int, device: torch.device, dataset: Dataset | None = None) -> None:
        trial_dataset.check(trial)
        self.dataset, self._trial, self._device = dataset or trial_dataset.load(trial), trial, device
        world = trial.topology().world
        # The ranks whose batches this process reads.
        self.ranks: Sequence[int] = range(world) if trial.strategy == "single" else (rank,)
        self.sha256 = self.dataset.sha256
        self._sequences = trial.tokens_per_rank // trial.sequence
        self._used = self._sequences // 2 if trial.control == "half_batch" else self._sequences
        self.validation: list[Batch] = []  # the same at each validation
        if trial.validate_every is not None:
            self.validation = [
                self._tensors(pair)
                for part in self.ranks
                for pair in self.dataset.validation_batches(
                    batches=trial.validation_batches, rank=part, world=world, sequences=self._sequences
                )
            ]

    def step(self, index: int) -> Iterator[list[Batch]]:
        """Yield a list of batches (inputs, targets) for each micro-batch of step ``index``.

        The list has one batch, which this process's rank reads.  With strategy ``single``, in which one process
        computes for all ranks, it has one batch for each rank.
        """
        for micro_batch in range(self._trial.accumulation):
            yield [self._batch(index, micro_batch, part) for part in self.ranks]

    def of_rank(self, index: int, rank: int) -> Iterator[Batch]:
        """Yield the batches that the process of rank ``rank`` reads in step ``index``, in the order of micro-batches.

        This is one batch for each micro-batch.  With strategy ``single`` there is only one process: ``rank`` is
        ignored, and each micro-batch has one batch for each rank.
        """
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
