"""Hands this rank's masters (fp32 weights) to optimizers, computes gradient norms, and keeps the loss scale.

If the policy has a loss scale, as for fp16, the mean gradients in the fp32 shards are divided by this scale before a
step.  A step whose gradients overflow is skipped on all ranks.  Ranks detect an overflow by the global norm of the
gradients: after an overflow, this norm is infinite or NaN, whichever codec has encoded the gradients, and has the same
bits on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from impl.comm.wire import Wire
from impl.errors import ZeroError
from impl.plan.traffic import norm_axes
from impl.policy.policy import LARGEST_SCALE, LossScale, Policy
from impl.unit.unit import Unit

LARGEST_POWER: Final = 8  # the largest p of a p-norm: fp32 gradients to this power stay within fp64
# Added to a norm before dividing by it, since the norm may be 0; torch's clipping does the same.
_LEAST: Final = 1e-6


class Masters:
    """The masters of one sharded model on one rank: the fp32 weights of this rank's shards, which optimizers step.

    ``numbers`` is the set of the masters' :func:`id`.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._all = [master for unit in units for _, master in unit.master_shard.masters]
        self.numbers = frozenset(map(id, self._all))
        # the :func:`id` of each master that no optimizer has stepped since the last backward pass
        self.unused: set[int] = set()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._all)

    def groups(self, options: Mapping[int, Mapping[str, Any]] | None) -> list[dict[str, Any]]:
        """Return this rank's masters (fp32 weights) as parameter groups of an optimizer, one dict for each group and
        device.

        ``options`` maps the number of a group to the options of this group, such as ``{0: {"lr": 1e-3}}``.  See
        :meth:`impl.engine.engine.Zero.param_groups`.

        Raises:
            ZeroError: if ``options`` is not such a mapping, has the number of a group that the model does not have, or
                has an option ``params``.
        """
        tables: Any = {} if options is None else options
        if not isinstance(tables, Mapping) or not all(isinstance(t, Mapping) for t in tables.values()):
            raise ZeroError(
                "param_groups(options=...): expected a table that maps a group's number to its options, such as "
                '{0: {"lr": 1e-3}}'
            )
        numbers = sorted({slot.spec.group for unit in self._units for slot in unit.geometry.slots})
        if unknown := [number for number in tables if number not in numbers]:
            raise ZeroError(
                f"param_groups(options=...) has options for group {unknown[0]!r}, but the model's groups are "
                f"{', '.join(map(repr, numbers)) or 'none'}, as group_of= of shard() numbers them: remove these "
                "options, or return this number in group_of="
            )
        if any("params" in table for table in tables.values()):
            raise ZeroError(
                "param_groups(options=...) has an option 'params', which would replace a group's masters: remove it"
            )
        groups: dict[int, dict[torch.device, list[Tensor]]] = {number: {} for number in numbers}
        for unit in self._units:
            for number, master in unit.master_shard.masters:
                groups[number].setdefault(master.device, []).append(master)
        return [
            {"params": masters, **tables.get(number, {})}
            for number, by_device in groups.items()
            for masters in by_device.values() or ([],)
        ]

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the gradients of all masters (fp32 weights) by ``factor``, in place."""
        # The factor on each device, so that a tensor is copied to each device only once.
        factors: dict[torch.device, float | Tensor] = {}
        for gradient in (master.grad for master in self if master.grad is not None):
            device = gradient.device
            if device not in factors:
                factors[device] = factor.to(device) if isinstance(factor, Tensor) else factor
            gradient.mul_(factors[device])

    def norm(self, wire: Wire, policy: Policy, norm_type: float = 2.0) -> Tensor:
        """Compute the global norm of the mean gradient, over the shards of all ranks, as a scalar tensor in fp64.

        All ranks must call it, and all get the same bits.  There is one exception: with local steps (DiLoCo) in
        ``policy``, each group of ranks trains by itself and has its own mean gradient.  Only the ranks of one group
        then get the same bits.  ``wire`` sends the ranks' parts of the norm.  ``norm_type`` is the p of the p-norm.

        Raises:
            ZeroError: if ``norm_type`` is out of range.  It must be ``inf``, or a number above 0 and at most 8.
        """
        power, largest = float(norm_type), norm_type == math.inf
        if not (largest or 0 < power <= LARGEST_POWER):
            raise ZeroError(
                f"norm_type = {norm_type}: expected inf, or a number above 0 and at most {LARGEST_POWER}"
            )
        add = torch.maximum if largest else torch.add  # both propagate NaN

        def part_of(gradient: Tensor) -> Tensor:
            if largest:
                return gradient.abs().amax().double()
            wide = gradient.double()
            return (wide.square() if power == 2 else wide.abs().pow(power)).sum()

        sums: dict[torch.device, Tensor] = {}
        for unit in self._units:
            for gradient in unit.master_shard.own_gradients():
                part, device = part_of(gradient), gradient.device
                sums[device] = add(sums[device], part) if device in sums else part
        total = torch.zeros((), dtype=torch.float64, device=wire.mesh.device)
        for part in sums.values():
            total = add(total, part.to(total.device))
        norm, axes = torch.zeros_like(total), norm_axes(policy, wire.mesh.topology)
        # traffic.NORM_BYTES bytes from each rank
        for part in wire.all_gather_small(total.view(1), axes=axes).view(-1):
            norm = add(norm, part)
        if largest:
            return norm
        return norm.sqrt() if power == 2 else norm.pow(1 / power)

    def check_complete(self, held: Collection[int]) -> None:
        """Raise a ZeroError if the optimizers of ``step()`` do not hold every master (fp32 weight) that has a gradient.

        ``held`` has the :func:`id` of each tensor that these optimizers hold.
        """
        expected = [id(master) for master in self if master.grad is not None]
        if missing := sum(number not in held for number in expected):
            raise ZeroError(
                f"the optimizers of step() do not hold {missing} of the {len(expected)} masters that have gradients: "
                "with a loss scale, pass all optimizers to one call of step()"
            )

    @property
    def unused_gradients(self) -> int:
        """Number of masters (fp32 weights) that have a gradient, but were not stepped since the last backward pass."""
        return sum(master.grad is not None and id(master) in self.unused for master in self)


def joint_norm(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm () fp64 of the gradients of several models, taken as one vector.

    ``norms`` has the norm () of each model's gradients.  ``norm_type`` is the p of the p-norm, for ``norms`` and for
    the result.  The result is on the device of the first norm.
    """
    first, *others = norms
    if not others:
        return first
    together = torch.stack([first, *(norm.to(first.device) for norm in others)])
    if norm_type == math.inf:
        return together.amax()  # propagates NaN
    return together.pow(norm_type).sum().pow(1 / norm_type)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor () that scales gradients whose norm is ``norm`` down to a norm of at most ``max_norm``.

    The factor is at most 1.  It is NaN if ``norm`` is not finite.
    """
    factor = (max_norm / (norm + _LEAST)).clamp(max=1.0)
    return torch.where(norm.isfinite(), factor, math.nan)


class Stepped(NamedTuple):
    """The outcome of :meth:`impl.engine.engine.Zero.step`."""

    # the global norm of the mean gradient, without loss scale and before clipping; None if it was not computed
    norm: float | None
    done: bool  # whether the optimizers stepped; False after an overflow, on all ranks alike


class LossScaleError(ArithmeticError):
    """Raised when gradients overflow although the loss scale is the smallest that the policy allows."""


# The loss scale of each backward pass; the keys are the numbers that autograd gives the passes.  If a loss is computed
# with several models, one model's scaler scales it, and the other models' scalers find the scale here.
_scales: dict[int, float] = {}
_PASSES: Final = 1 << 14  # how many passes are remembered: more than run at once in all threads


def _autograd_pass() -> int:
    """Return the number that autograd has given the backward pass of this thread; -1 if no backward pass is running."""
    return torch._C._current_graph_task_id()  # noqa: SLF001  # there is no public function for it


class LossScaler:
    """Holds the loss scale of one model, and adapts it to overflows.

    ``setting`` is the policy's loss scale.  If it is None, the scale stays 1 and no step is skipped.
    """

    def __init__(self, setting: LossScale | None) -> None:
        self._setting = setting
        self.scale = 1.0 if setting is None else setting.initial
        self.skipped = 0  # how many steps were skipped because of an overflow
        self._since = 0  # steps since the scale last changed
        self._reached = False  # whether the running backward pass began at a loss that scaled() returned
        self._unscaled = 0  # how many backward passes since the last step had a loss that was not scaled

    def scaled(self, loss: Tensor) -> Tensor:
        """Return ``loss`` multiplied by the loss scale; call ``backward()`` on the result."""
        if self.scale == 1.0:
            return loss
        scaled = loss * self.scale
        if scaled.requires_grad:
            scaled.register_hook(self._reach)  # type: ignore[no-untyped-call]
        return scaled

    def _reach(self, _: Tensor) -> None:
        self._reached = True
        _scales[_autograd_pass()] = self.scale
        while len(_scales) > _PASSES:
            _scales.pop(min(_scales), None)

    def passed(self) -> None:
        """Record the end of a backward pass; count the pass if its loss was not scaled, although the scale is not 1.

        With a scale other than 1, ``backward()`` must be called on the result of :meth:`scaled`.  Once a pass has
        been counted, :meth:`check_scaled` raises an error until :meth:`forget` is called.
        """
        reached = self._reached or _scales.get(_autograd_pass()) == self.scale
        self._unscaled += self.scale != 1.0 and not reached
        self._reached = False

    def forget(self) -> None:
        """Set the count of backward passes with an unscaled loss to 0, because the gradients of these passes were
        dropped.
        """
        self._unscaled, self._reached = 0, False

    def check_scaled(self) -> None:
        """Raise a ZeroError if a backward pass since the last :meth:`forget` had a loss that was not scaled."""
        if self._unscaled:
            passes = "1 backward pass" if self._unscaled == 1 else f"{self._unscaled} backward passes"
            raise ZeroError(
                f"step() would divide the gradients by the loss scale of {self.scale:g}, but they have parts from "
                f"{passes} whose loss was not scaled: drop the gradients with model.zero_grad(), and run "
                "zero.scaler.scaled(loss).backward()"
            )

    def factor(self, norm: float, max_norm: float | None) -> float | None:
        """Return the factor by which to multiply gradients, to undo the loss scale and to clip them.

        Returns None after an overflow: if there is a loss scale and ``norm`` is not finite.  The caller must then skip
        the step.  In this case the method also counts a skipped step, and halves a dynamic loss scale, down to the
        smallest scale that the policy allows.

        Args:
            norm: the norm of the gradients, divided by the loss scale.
            max_norm: the largest norm that gradients may have; None does not clip.

        Raises:
            LossScaleError: after an overflow at the smallest dynamic scale.
        """
        if (setting := self._setting) is not None and not math.isfinite(norm):
            self.skipped += 1
            if setting.window:  # a scale without a window is fixed: every overflow only skips a step
                if self.scale <= setting.least:
                    raise LossScaleError(
                        f"gradients overflow at a loss scale of {self.scale:g}, the smallest allowed: look for "
                        "the cause in the model or its data, or lower the learning rate"
                    )
                self.scale, self._since = max(self.scale / 2.0, setting.least), 0
            return None
        factor = 1.0 / self.scale
        if max_norm is not None:
            factor *= float(clip_factor(torch.tensor(norm, dtype=torch.float64), max_norm))
        return factor

    def stepped(self) -> None:
        """Count a step that was not skipped; after enough of these steps, double a dynamic loss scale.

        The scale is doubled when ``window`` steps without an overflow have followed its last change.  ``window`` is a
        field of the policy's loss scale.  The scale does not grow beyond ``LARGEST_SCALE``.
        """
        self._since += 1
        if self._setting is not None and 0 < self._setting.window <= self._since:
            self.scale, self._since = min(self.scale * 2.0, LARGEST_SCALE), 0

    def follow(self, other: LossScaler, *, skipped: bool) -> None:
        """Copy the scale from ``other``, the scaler of another model that has stepped together with this model.

        ``skipped`` says whether the models have skipped the step.  If True, this scaler counts a skipped step too.
        """
        if other is not self:
            self.scale, self._since = other.scale, other._since
            self.skipped += skipped

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, the number of skipped steps, and the steps since the scale last changed."""
        return {"scale": self.scale, "skipped": self.skipped, "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the loss scale and its counters from ``state``, which :meth:`state_dict` has returned."""
        self.scale, self.skipped, self._since = float(state["scale"]), state["skipped"], state["since"]
