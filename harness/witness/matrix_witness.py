"""Watches one matrix that Muon steps, so that a step can be taken again on the whole matrix.

In every step, each rank checks its part of the matrix: nothing else may change weights or momentum between two steps,
and the momentum follows Muon's formula.  For one drawn step, the rank also keeps its part of weights, momentum and
gradient; :mod:`harness.runs.reference_checks` gathers the parts and takes the step again with ``torch.optim.Muon``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from impl.plan.owners import Matrix

_MOMENTUM_ERROR = 4 * 2.0**-24  # relative to the terms of the sum; each is rounded, and so is ``lerp``


@dataclass(frozen=True, slots=True)
class MatrixParts:
    """One rank's part (n,) of a matrix in a drawn step."""

    value: Tensor  # weights before the step
    momentum: Tensor  # momentum before the step
    gradient: Tensor  # gradient that the optimizer got
    after: Tensor  # weights after the step


class MatrixWitness:
    """Checks, in every step, this rank's part of one matrix that Muon updates.

    Only Muon may change the weights and the momentum of this part, and the momentum must follow Muon's formula.  For
    one drawn step, the witness also keeps what is needed to repeat the step (``parts``).

    Args:
        optimizer: The optimizer, which has ``momentum_buffer`` as the state of ``master``.
        matrix: The matrix.
        master: The masters (n,) that contain this rank's part.
        part: The slice of ``master`` that is this rank's part.
        drawn: Number of the drawn step, which is repeated afterwards.
        rank: Number of this rank, for messages.
    """

    def __init__(  # noqa: PLR0917  # all are needed, and called by one function
        self,
        optimizer: torch.optim.Optimizer,
        matrix: Matrix,
        master: nn.Parameter,
        part: slice,
        drawn: int,
        rank: int,
    ) -> None:
        self.matrix, self.drawn = matrix, drawn
        self.parts: MatrixParts | None = None  # after the drawn step
        self._optimizer, self._master, self._part, self._rank = optimizer, master, part, rank
        self._group = next(
            group for group in optimizer.param_groups if any(each is master for each in group["params"])
        )
        self._value, self._momentum = self._read()

    def before(self, index: int) -> str | None:
        """Return a sentence if weights or momentum of this part changed outside the optimizer's steps; else None."""
        value, momentum = self._read()
        if torch.equal(value, self._value) and torch.equal(momentum, self._momentum):
            return None
        return (
            f"before the optimizer's step {index} something else changed weights or momentum of matrix "
            f"{self.matrix.slot.spec.name!r} on rank {self._rank}"
        )

    def after(self, index: int, *, done: bool) -> str | None:
        """Compare the momentum after step ``index`` with Muon's formula, and in the drawn step keep all parts.

        Returns:
            A sentence if the momentum is not what the formula gives; else None.  Returns None too if the optimizer
            skipped the step (not ``done``), or if there is no gradient.
        """
        value, momentum = self._value, self._momentum
        self._value, self._momentum = self._read()
        gradient = None if self._master.grad is None else self._master.grad.detach()[self._part].clone()
        if not done or gradient is None:
            return None
        if index == self.drawn:
            self.parts = MatrixParts(value, momentum, gradient, self._value)
        new, old = 1 - self._group["momentum"], momentum.double()
        expected = old + new * (gradient.double() - old)
        allowed = _MOMENTUM_ERROR * (old.abs() + new * (gradient.double() - old).abs()) + 1e-40
        if bool(((self._momentum.double() - expected).abs() <= allowed).all()):
            return None
        return (
            f"after step {index} the momentum of matrix {self.matrix.slot.spec.name!r} on rank {self._rank} is not "
            "what Muon gives"
        )

    def _read(self) -> tuple[Tensor, Tensor]:
        """Return copies of this rank's part of the weights and of the momentum.

        Before the optimizer's first step, the momentum is zeros.
        """
        value = self._master.detach()[self._part].clone()
        state = self._optimizer.state.get(self._master, {})
        return value, (state["momentum_buffer"][self._part].clone() if state else torch.zeros_like(value))
