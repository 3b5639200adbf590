"""Checks AdamW while a trial trains: recomputes its steps in float64, for a few elements of the weights.

Each rank checks two sets of elements:

- *Kept* elements are the same in all steps.  Their moments are computed by this module, from the first step on.
- *Drawn* elements are chosen at random, anew for each step.  Their moments are read from the optimizer before the step.
  If the optimizer never steps an element, or loses its moments, the fault is found when the element is drawn.
  Between two steps, nothing may change the elements that were drawn for the next step.

With local steps (DiLoCo, ``policy.local_steps``), an outer step follows some steps of the optimizer.  In an outer step,
groups of ranks average their progress, which changes the weights again.  Therefore a hook of the optimizer reads the
weights between the optimizer's own step and the outer step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from harness.suites.peers import family_of
from harness.suites.trial import Trial
from impl.plan.local_steps import meeting_steps

_KEPT_TENSORS: Final = 16  # largest number of tensors with kept elements, which are spread over all tensors
_KEPT: Final = 32  # kept elements of each of these tensors, spread evenly
_DRAWN_TENSORS: Final = 32  # largest number of tensors with drawn elements
_DRAWN: Final = 128  # drawn elements of each of these tensors
_SETTINGS: Final = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 1e-2}  # AdamW's defaults
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")  # as torch's AdamW names them
_ULPS: Final = 3 * 2.0**-24  # allowed error relative to a master, which AdamW rounds to fp32 twice
_RATE_ERROR: Final = 2e-5  # allowed error relative to the learning rate, from moments rounded to fp32
# Allowed error of a moment, relative to the magnitudes of the two terms of which it is the sum.  At most four roundings
# of 2^-24 happen: one of each term, and those of the difference and the product in ``lerp``.
_MOMENT_ERROR: Final = 4 * 2.0**-24
# Smallest cosine of two gradients that count as the same.  On GPUs, equal gradients may be rounded differently.
_SAME: Final = 0.999


@dataclass(slots=True)
class _Drawn:
    """The elements that are chosen at random to be checked in one step, with their values and moments.

    Each tensor is (n,) float64, over all these elements.
    """

    places: list[tuple[int, Tensor]]  # number of a master, and the drawn places in it
    value: Tensor
    first: Tensor  # AdamW's first moments
    second: Tensor  # AdamW's second moments


class OptimizerWitness:
    """Recomputes each step of one rank's AdamW for a few elements, and reports where the optimizer's step differs.

    The caller calls :meth:`before` before each step of the optimizer, and :meth:`after` after each step.  Only elements
    that torch's AdamW updates are checked.  If the trial's optimizer is Muon, the matrices that Muon updates are left
    out, and only elements of the other tensors are checked.
    Nothing is checked in these cases:

    - AdamW updates no weights, or the trial gives it an argument that :data:`_SETTINGS` lacks, such as ``amsgrad``;
    - the strategy is DeepSpeed or the user's own.
    """

    def __init__(self, trial: Trial, rank: int, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._key, self._rank = optimizer, f"{trial.seed}/{trial.repeat}/{rank}", rank
        muon, arguments = trial.optimizer.orthogonalises, trial.optimizer.arguments
        own: Any = arguments.get("adamw", {}) if muon else arguments
        self._settings: dict[str, Any] = _SETTINGS | own
        self._schedule = trial.schedule()
        groups = (group for group in optimizer.param_groups if not group.get("matrices"))
        parameters = [p for group in groups for p in group["params"]]
        # DeepSpeed has an implementation of its own.
        adamw = (muon or trial.optimizer.name == "AdamW") and self._settings.keys() == _SETTINGS.keys()
        self._masters: list[Any] = []
        own = trial.own_strategy  # which may step the masters in another way
        if adamw and family_of(trial.strategy) != "deepspeed" and not own:
            self._masters = [p for p in parameters if local(p).numel() and p.dtype is torch.float32]
        self._kept = self._masters[:: max(1, -(-len(self._masters) // _KEPT_TENSORS))]
        self._taken = [0] * len(self._masters)  # steps that each master has taken
        self._steps = 0
        self._value = self._samples(self._kept)  # (n,) float64: the kept elements before the next step
        self._first = self._second = torch.zeros_like(self._value)
        # (n,) float64: gradients of kept elements after the last backward pass
        self._reduced: Tensor | None = None
        self._rehearsed: dict[int, Tensor] = {}
        self._drawn = self._draw(0)
        # What the optimizer's own step has made of kept and drawn elements, if an outer step follows it.
        self._own_step: tuple[Tensor, _Drawn | None] | None = None
        policy = trial.resolved_policy()
        self._local_steps = 0 if policy is None else policy.local_steps or 0
        if policy is not None and self._local_steps:
            self._meeting = meeting_steps(policy)
            optimizer.register_step_post_hook(self._note_own_step)
        # Numbers of steps that were computed again, and of steps that were compared with a rehearsal.
        self.replayed = self.linked = 0

    def note_rehearsal(self, index: int) -> None:
        """Keep the gradients of a rehearsal of step ``index``; :meth:`after` compares them with the step's gradients.

        A rehearsal runs the forward and backward passes of the step in advance, and changes nothing that training
        depends on.  Call this method right after the rehearsal, while its gradients are in the parameters.
        """
        if (gradient := self._gradients()) is not None:
            self._rehearsed[index] = gradient

    def before(self, index: int) -> str | None:
        """Check that nothing has changed the elements drawn for step ``index`` since the optimizer's previous step.

        Call this method when the backward passes of the step have ended, and before the optimizer takes the step.  The
        method also keeps the gradients of these passes.  :meth:`after` compares them with the gradients that the
        optimizer has used.

        Returns:
            A sentence if the value or a moment of a drawn element has changed; else None.
        """
        self._reduced, drawn = self._gradients(), self._drawn
        if drawn is None:
            return None
        now = self._read(drawn.places)
        same = zip((drawn.value, drawn.first, drawn.second), (now.value, now.first, now.second), strict=True)
        if all(torch.equal(old, new) for old, new in same):
            return None
        return (
            f"before the optimizer's step {index}, something other than the optimizer changed weights or moments on "
            f"rank {self._rank}"
        )

    def after(self, index: int, *, done: bool) -> str | None:
        """Recompute the optimizer's step ``index``, which has just ended, and compare the result with the weights.

        The gradients that the optimizer has used must still be in the parameters.

        Args:
            index: Number of the step.
            done: Whether the optimizer took the step.  If it skipped the step after an overflow, weights must not have
                changed.

        Returns:
            A sentence on the first difference; None if there is none.
        """
        self._steps += done
        wrong = self._kept_elements(index, done=done) or self._drawn_elements(index, done=done)
        self._drawn, self._own_step = self._draw(index + 1), None
        return wrong

    def _note_own_step(self, *_: Any) -> None:
        """Read the kept and drawn elements if an outer step, which changes the weights, follows the optimizer's step.

        This is a hook, which torch calls after each step of the optimizer.  Outer steps belong to local steps (DiLoCo):
        groups of ranks average how far their weights have moved.  If no outer step follows, the hook does nothing.
        """
        if self._steps % self._local_steps + 1 in self._meeting:
            drawn = None if self._drawn is None else self._read(self._drawn.places)
            self._own_step = self._samples(self._kept), drawn

    def _kept_elements(self, index: int, *, done: bool) -> str | None:
        gradient, after = self._gradients(), self._samples(self._kept)
        stepped = after if self._own_step is None else self._own_step[0]
        reduced, self._reduced = self._reduced, None
        wrong = self._differs(index, gradient, reduced, "its backward passes left") if done else None
        rehearsed = self._rehearsed.pop(index, None)
        if rehearsed is not None and gradient is not None and bool(rehearsed.any()):
            self.linked += 1
            wrong = wrong or self._differs(
                index, gradient, rehearsed, "a rehearsal of the same step just before it"
            )
        if gradient is not None:
            expected = self._value
            if done:
                self._first, self._second = self._moments(self._first, self._second, gradient)
                expected = self._stepped(self._value, self._first, self._second, self._steps, index)
            wrong = wrong or self._wrong(index, stepped, expected)
            self.replayed += 1
        self._value = after
        return wrong

    def _drawn_elements(self, index: int, *, done: bool) -> str | None:
        if (drawn := self._drawn) is None:
            return None
        gradients = [master.grad for master in self._masters]
        for number, gradient in enumerate(gradients):
            self._taken[number] += done and gradient is not None
        if any(gradients[number] is None for number, _ in drawn.places):
            return None  # a master without a gradient is not stepped; other checks compare all gradients
        now = self._read(drawn.places) if self._own_step is None else self._own_step[1] or drawn
        gradient = _pick(((local(gradients[number]), places) for number, places in drawn.places))
        taken = torch.tensor([self._taken[number] for number, _ in drawn.places], dtype=torch.float64)
        taken = taken.repeat_interleave(torch.tensor([len(at) for _, at in drawn.places]))
        expected, first, second = drawn.value, drawn.first, drawn.second
        if done:
            first, second = self._moments(drawn.first, drawn.second, gradient)
            expected = self._stepped(drawn.value, first, second, taken, index)
        beta1, beta2 = self._settings["betas"]
        for name, found, right, terms in (
            ("exp_avg", now.first, first, beta1 * drawn.first.abs() + gradient.abs()),
            ("exp_avg_sq", now.second, second, beta2 * drawn.second + gradient**2),
        ):
            if not bool(((found - right).abs() <= _MOMENT_ERROR * terms + 1e-40).all()):
                return f"after step {index} {name} of drawn elements on rank {self._rank} is not what AdamW gives"
        return self._wrong(index, now.value, expected, "drawn")

    def _moments(self, first: Tensor, second: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        beta1, beta2 = self._settings["betas"]
        return beta1 * first + (1 - beta1) * gradient, beta2 * second + (1 - beta2) * gradient**2

    def _stepped(self, value: Tensor, first: Tensor, second: Tensor, steps: Any, index: int) -> Tensor:
        """Return elements after one step of AdamW, (n,) float64 (Loshchilov and Hutter, algorithm 2).

        Args:
            value: (n,) the elements before the step.
            first: (n,) AdamW's first moments, with this step's gradient.
            second: (n,) AdamW's second moments, with this step's gradient.
            steps: Number of steps that the elements have taken, this step included: one number, or (n,), one for each
                element.
            index: Number of the step in the trial, which decides the learning rate.
        """
        settings, (beta1, beta2) = self._settings, self._settings["betas"]
        rate = settings["lr"] * (1.0 if self._schedule is None else self._schedule.factor(index))
        mean, spread = first / (1 - beta1**steps), (second / (1 - beta2**steps)).sqrt() + settings["eps"]
        after: Tensor = value * (1 - rate * settings["weight_decay"]) - rate * mean / spread
        return after

    def _wrong(self, index: int, trained: Tensor, expected: Tensor, which: str = "watched") -> str | None:
        """Return a sentence if an element of ``trained`` differs from ``expected`` by more than rounding; else None.

        The sentence is on the first such element.

        Args:
            index: Number of the step, for the sentence.
            trained: (n,) the elements after the optimizer's step.
            expected: (n,) the same elements as this module computes them.
            which: Names the set of elements in the sentence.
        """
        allowed = _ULPS * expected.abs() + _RATE_ERROR * abs(self._settings["lr"])
        wrong = ~((trained - expected).abs() <= allowed)  # negated, so that NaN is wrong too
        if not bool(wrong.any()):
            return None
        at = int(wrong.nonzero()[0])
        return (
            f"after step {index} element {at} of the {which} elements on rank {self._rank} is "
            f"{float(trained[at]):.9g}, but the trial's AdamW gives {float(expected[at]):.9g}: they differ by more "
            f"than {float(allowed[at]):.2g}"
        )

    def _differs(
        self, index: int, gradient: Tensor | None, expected: Tensor | None, whose: str
    ) -> str | None:
        """Return a sentence if ``gradient`` points in another direction than ``expected``; else None.

        The directions count as the same if the cosine of the two gradients is at least :data:`_SAME`.  Their lengths
        may differ, for example because of clipping.  If a gradient is missing, or if the expected gradient is zero,
        None is returned.

        Args:
            index: Number of the step, for the sentence.
            gradient: (n,) the gradient that the optimizer has used.
            expected: (n,) the gradient of the same elements from an earlier moment.
            whose: Says in the sentence what has left the expected gradient.
        """
        if expected is None or gradient is None or not bool(expected.any()):
            return None
        cosine = float(torch.nn.functional.cosine_similarity(expected, gradient, 0))
        if cosine >= _SAME:
            return None
        return (
            f"in step {index} the optimizer of rank {self._rank} had other gradients than {whose}: their cosine is "
            f"{cosine:.3f}"
        )

    def _gradients(self) -> Tensor | None:
        """Return the gradients of the kept elements, (n,) float64.

        Returns None if there are no kept elements, or if the gradient of any of them is missing.
        """
        gradients = [master.grad for master in self._kept if master.grad is not None]
        return self._samples(gradients) if gradients and len(gradients) == len(self._kept) else None

    def _samples(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return up to 32 elements of each tensor, spread evenly from its first to its last, joined to (n,) float64."""
        return _pick((flat, _evenly(flat.numel())) for flat in (local(tensor).view(-1) for tensor in tensors))

    def _draw(self, index: int) -> _Drawn | None:
        """Choose at random the elements that are checked in step ``index``, and read their values and moments.

        Returns None if there are no weights to check (the cases are listed in the documentation of this class).
        """
        seed = hashlib.sha256(f"{self._key}/{index}/drawn elements".encode()).digest()
        draw = torch.Generator().manual_seed(int.from_bytes(seed[:7], "little"))
        numbers = torch.randperm(len(self._masters), generator=draw)[:_DRAWN_TENSORS].tolist()
        if not numbers:
            return None
        sizes = [local(self._masters[number]).numel() for number in numbers]
        places = [torch.randint(size, (min(_DRAWN, size),), generator=draw) for size in sizes]
        return self._read([*zip(numbers, places, strict=True)])

    def _read(self, places: Sequence[tuple[int, Tensor]]) -> _Drawn:
        value = _pick((local(self._masters[number]), at) for number, at in places)
        states = [(self._optimizer.state.get(self._masters[number], {}), at) for number, at in places]
        first, second = (
            # Before its first step a master has no moments; they count as zeros.
            torch.cat(
                [
                    _at(local(state[name]), at) if name in state else torch.zeros(len(at))
                    for state, at in states
                ]
            )
            for name in _MOMENTS
        )
        return _Drawn([*places], value, first.double(), second.double())


def local(tensor: Any) -> Tensor:
    """Return the local shard of a ``DTensor``, and any other tensor as it is; the result is detached from autograd."""
    whole: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return whole.detach()


@lru_cache(64)  # the same tensors are sampled in each step
def _evenly(numel: int) -> Tensor:
    return torch.linspace(0, numel - 1, min(_KEPT, numel), dtype=torch.float64).long()


def _pick(tensors: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return chosen elements of several tensors, joined to one tensor (n,) float64 on the CPU.

    ``tensors`` has pairs (tensor, indices).  The indices say which elements of the flattened tensor are taken.
    """
    picked = [_at(flat, places) for flat, places in tensors]
    return torch.cat(picked).double() if picked else torch.zeros(0, dtype=torch.float64)


def _at(flat: Tensor, places: Tensor) -> Tensor:
    """Return the elements of ``flat`` at the indices ``places``, counted in the flattened tensor, on the CPU."""
    return flat.view(-1)[places.to(flat.device)].cpu()
