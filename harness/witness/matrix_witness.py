"""Checks one matrix that Muon updates, and records one step of Muon so that it can be computed again as a check.

In every step, each rank checks its part of the matrix: between two steps nothing may change the weights or the
momentum, and the momentum must follow Muon's formula.  In one step, chosen at random, the rank also records its part of
the weights, the momentum and the gradient.  After this step, :mod:`harness.reference_checks.muon_step` gathers these
parts from all ranks, and computes the step of the whole matrix again with the formula of ``torch.optim.Muon``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from impl.plan.owners import Matrix

_MOMENTUM_ERROR = 4 * 2.0**-24  # relative to the terms of the sum; each is rounded, and so is ``lerp``


@dataclass(frozen=True, slots=True)
class MatrixParts:
    """One rank's part (n,) of a matrix before and after one step of Muon.

    The step is chosen at random.  It is computed again as a check, from the parts of all ranks.
    """

    value: Tensor  # weights before the step
    momentum: Tensor  # momentum before the step
    gradient: Tensor  # gradient that the optimizer got
    after: Tensor  # weights after the step


class MatrixWitness:
    """Checks, in every step, this rank's part of one matrix that Muon updates.

    Only Muon may change the weights and the momentum of this part, and the momentum must follow Muon's formula.  The
    attribute ``parts`` is None until one step, chosen at random, has ended.  From then on it holds what is needed to
    compute this step again as a check.

    Args:
        optimizer: The optimizer.  After its first step, its state of ``master`` has a tensor ``momentum_buffer``.
        matrix: The matrix.
        master: The flat fp32 weights (n,) that this rank optimizes, and that contain its part of the matrix.
        part: The slice of ``master`` that is this rank's part of the matrix.
        drawn: Number of the step that was chosen at random to be computed again.
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
        """Check that nothing has changed weights or momentum of this part since the optimizer's previous step.

        Args:
            index: Number of the step that the optimizer is about to take.

        Returns:
            A sentence if something has changed them; else None.
        """
        value, momentum = self._read()
        if torch.equal(value, self._value) and torch.equal(momentum, self._momentum):
            return None
        return (
            f"before the optimizer's step {index}, something other than the optimizer changed weights or momentum of "
            f"matrix {self.matrix.slot.spec.name!r} on rank {self._rank}"
        )

    def after(self, index: int, *, done: bool) -> str | None:
        """Compare the momentum after a step with Muon's formula; after step :attr:`drawn`, also set :attr:`parts`.

        Args:
            index: Number of the step that has just ended.
            done: Whether the optimizer took the step; it skips a step after an overflow.

        Returns:
            A sentence if the momentum is not what the formula gives; else None.  If the step was skipped, or there is
            no gradient, nothing is compared and None is returned.
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
