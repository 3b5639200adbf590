"""This rank's fp32 masters and mean gradients as an optimizer sees them, their norm, and fp16's loss scale.

With a loss scale the mean gradients are unscaled in the fp32 shards, and a step whose gradients overflowed is
skipped on all ranks.  Overflow shows in their global norm, in any codec, with the same bits on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from impl.comm.wire import Wire
from impl.errors import ZeroError
from impl.plan.policy import LARGEST_SCALE, LossScale
from impl.unit.unit import Unit

LARGEST_POWER: Final = 8  # of a norm: fp32 gradients to this power stay within fp64
_LEAST: Final = 1e-6  # added to the norm, which may be 0, as in torch's clipping


class Masters:
    """The masters of one sharded model on one rank; ``numbers`` are their :func:`id`."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._all = [master for unit in units for _, master in unit.master_shard.masters]
        self.numbers = frozenset(map(id, self._all))
        self.unused: set[int] = set()  # of these, not stepped by an optimizer since a gradient arrived

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._all)

    def groups(self, options: Mapping[int, Mapping[str, Any]] | None) -> list[dict[str, Any]]:
        """For an optimizer: :meth:`impl.engine.engine.Zero.param_groups`."""
        tables: Any = {} if options is None else options
        if not isinstance(tables, Mapping) or not all(isinstance(t, Mapping) for t in tables.values()):
            raise ZeroError(
                "param_groups(options=...): expected a table of each group's options by its number, as "
                '{0: {"lr": 1e-3}}'
            )
        numbers = sorted({slot.spec.group for unit in self._units for slot in unit.geometry.slots})
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
        """Multiply all gradients."""
        factors: dict[torch.device, float | Tensor] = {}  # a tensor is read from its device once
        for gradient in (master.grad for master in self if master.grad is not None):
            device = gradient.device
            if device not in factors:
                factors[device] = factor.to(device) if isinstance(factor, Tensor) else factor
            gradient.mul_(factors[device])

    def norm(self, wire: Wire, norm_type: float = 2.0) -> Tensor:
        """() fp64 global norm of the gradients: :meth:`impl.engine.engine.Zero.grad_norm`."""
        power, largest = float(norm_type), norm_type == math.inf
        if not (largest or 0 < power <= LARGEST_POWER):
            raise ZeroError(f"norm_type = {norm_type}: expected inf, or above 0 and at most {LARGEST_POWER}")
        add = torch.maximum if largest else torch.add  # both pass a NaN on

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
        norm = torch.zeros_like(total)
        for part in wire.all_gather_small(total.view(1)).view(-1):  # NORM_BYTES of each rank
            norm = add(norm, part)
        if largest:
            return norm
        return norm.sqrt() if power == 2 else norm.pow(1 / power)

    def check_complete(self, held: Collection[int]) -> None:
        """Refuse, with a ZeroError that counts them, optimizers of tensors ``held`` that lack masters with
        gradients.
        """
        expected = [id(master) for master in self if master.grad is not None]
        if missing := sum(number not in held for number in expected):
            raise ZeroError(
                f"step() of optimizers that lack {missing} of {len(expected)} masters with gradients: "
                "with a loss scale, give all optimizers to one step()"
            )

    @property
    def unused_gradients(self) -> int:
        """The number of masters with a gradient that no optimizer has stepped."""
        return sum(master.grad is not None and id(master) in self.unused for master in self)


def joint_norm(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """() fp64 norm of all gradients together, from that of each model; on the device of the first."""
    first, *others = norms
    if not others:
        return first
    together = torch.stack([first, *(norm.to(first.device) for norm in others)])
    if norm_type == math.inf:
        return together.amax()  # passes a NaN on
    return together.pow(norm_type).sum().pow(1 / norm_type)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """() factor that limits gradients of ``norm`` to ``max_norm``; NaN if the norm is not finite."""
    factor = (max_norm / (norm + _LEAST)).clamp(max=1.0)
    return torch.where(norm.isfinite(), factor, math.nan)


class Stepped(NamedTuple):
    """The outcome of a step."""

    norm: float | None  # global, of the unscaled mean gradient, before clipping; None if not computed
    done: bool  # whether the optimizer stepped; False after an overflow, on all ranks alike


class LossScaleError(ArithmeticError):
    """Gradients overflow at the smallest loss scale: the cause is elsewhere."""


# The scale of a backward pass's loss, by autograd's number of the pass: a loss of several models is scaled by
# the scaler of one, and the others learn of it here.
_scales: dict[int, float] = {}
_PASSES: Final = 64  # that are remembered: more than run at once, in threads


def _autograd_pass() -> int:
    """Autograd's number of the backward pass under way in this thread; -1 outside."""
    return torch._C._current_graph_task_id()  # noqa: SLF001  # there is no public one


class LossScaler:
    """The loss scale of one run; without a ``setting`` it stays at 1, and no step is skipped."""

    def __init__(self, setting: LossScale | None) -> None:
        self._setting = setting
        self.scale = 1.0 if setting is None else setting.initial
        self.skipped = 0  # steps that overflowed so far
        self._since = 0  # steps since the scale last changed
        self._reached = False  # whether the backward pass under way began at a loss that scaled() gave
        self._unscaled = 0  # backward passes since the last step

    def scaled(self, loss: Tensor) -> Tensor:
        """The scaled loss, for ``backward()``."""
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
        """A backward pass is over."""
        reached = self._reached or _scales.get(_autograd_pass()) == self.scale
        self._unscaled += self.scale != 1.0 and not reached
        self._reached = False

    def forget(self) -> None:
        """The gradients of all passes since the last step are not used."""
        self._unscaled, self._reached = 0, False

    def check_scaled(self) -> None:
        """Refuse, with a ZeroError that counts them, passes of losses that were not scaled."""
        if self._unscaled:
            raise ZeroError(
                f"step() after {self._unscaled} backward passes whose loss was not scaled: it would divide "
                f"their gradients by the loss scale of {self.scale:g}; run "
                "zero.scaler.scaled(loss).backward() (model.zero_grad() drops these)"
            )

    def factor(self, norm: float, max_norm: float | None) -> float | None:
        """The factor for gradients of this unscaled norm; None if the step is to be skipped."""
        if (setting := self._setting) is not None and not math.isfinite(norm):
            self.skipped += 1
            if setting.window:  # a fixed scale stays, and every overflow is a skipped step
                if self.scale <= setting.least:
                    raise LossScaleError(
                        f"gradients overflow at a loss scale of {self.scale:g}, the smallest allowed"
                    )
                self.scale, self._since = max(self.scale / 2.0, setting.least), 0
            return None
        factor = 1.0 / self.scale
        if max_norm is not None:
            factor *= float(clip_factor(torch.tensor(norm, dtype=torch.float64), max_norm))
        return factor

    def stepped(self) -> None:
        """A step was not skipped."""
        self._since += 1
        if self._setting is not None and 0 < self._setting.window <= self._since:
            self.scale, self._since = min(self.scale * 2.0, LARGEST_SCALE), 0

    def follow(self, other: LossScaler, *, skipped: bool) -> None:
        """Take over the scale of ``other``, which stepped, or ``skipped`` a step, for both."""
        if other is not self:
            self.scale, self._since = other.scale, other._since
            self.skipped += skipped

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run continues from."""
        return {"scale": self.scale, "skipped": self.skipped, "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a :meth:`state_dict`."""
        self.scale, self.skipped, self._since = float(state["scale"]), state["skipped"], state["since"]
