"""Checks reduced gradients against those of a single process, as ``docs/reference/metrics.md`` says.

A single process's gradient is the mean over ranks, by an fp32 all-reduce past the wire, of gradients on the
unsharded model.  A reduced one may differ from it by what its codecs promise (:func:`relative_bound`) times
``m``, the mean of the largest magnitudes in an element's window, which holds whole blocks of all codecs.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.measure.unsharded_loss import packed, padded
from impl.adapters.traffic import GroupGeometry
from impl.codecs.codec import Codec, Dtype, common_grain
from impl.plan.policy import Policy
from impl.plan.shard_layout import ParameterSpec, UnitGeometry, lay_out
from impl.plan.topology import Topology

SAMPLED: Final = 65536
# Of the window's largest magnitude: sums of the same products, rounded in another order.
ROUNDING: Final[dict[Dtype, float]] = {"fp32": 1e-4, "bf16": 2.0**-5, "fp16": 2.0**-8}
_WINDOW: Final = common_grain()  # elements, at least
_TINY: Final = 1e-30  # absolute: far below any gradient that matters, above all floors of scales


@dataclass(frozen=True, slots=True)
class GradientError:
    """A rank's reduced gradient of a unit before a step, beside a single process's: the one of ``elements``
    whose ``share`` is largest, which is ``|reduced - expected| / allowed``.
    """

    unit: str
    elements: int
    share: float
    reduced: float
    expected: float
    allowed: float
    step: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """The elements that are reduced together, in rows: after a reduction a rank has means of whole rows."""

    geometry: UnitGeometry | GroupGeometry  # of a unit, or of FSDP2's parameter group
    factor: float  # bound of the codecs together, of ``m`` (see the module)
    window: int  # elements of a row that hold whole blocks of all codecs
    floor: float = 0.0  # absolute error of sums in fp16, whose smallest step is 2^-24

    @property
    def row(self) -> int:
        """Elements of a row."""
        return self.geometry.piece

    def packed(self, gradients: Mapping[str, Tensor | None]) -> Tensor:
        """(rows, row) fp32 of whole gradients by name; zeros where a parameter has none."""
        return packed(self.geometry, gradients).view(-1, self.row)

    def part(self, gradients: Mapping[str, Tensor | None]) -> Tensor:
        """(1, row) fp32 of FSDP2's local parts of gradients by name."""
        assert isinstance(self.geometry, GroupGeometry)  # noqa: S101  # units have no parts
        part, specs = self.geometry.part, self.geometry.parameters
        return torch.cat([padded(gradients[spec.name], part(spec)).cpu() for spec in specs]).view(1, -1)


def relative_bound(codec: Codec) -> float:
    """Largest error of an element over the largest magnitude of its block, for any such magnitude.

    Scales grow in steps, at most eight an octave, and the ratio is largest just above a step.
    """
    just_above = [(1 + eighth / 8) * (1 + 1e-6) for eighth in range(8)]
    return max(codec.error_bound(-top, top) / top for top in just_above) * (1 + 1e-5)


def layouts_of(
    units: Iterable[UnitGeometry | GroupGeometry], policy: Policy | None, topology: Topology
) -> list[Layout]:
    """Layouts of what is trained, in fp32 without a policy; without those whose codec has no bound."""
    layouts = []
    for unit in units:
        if isinstance(unit, GroupGeometry):
            specs = tuple(itertools.compress(unit.parameters, unit.trained))
            trained = replace(unit, parameters=specs, trained=(True,) * len(specs))
            layouts += [_layout(trained, policy, topology)] * bool(specs)
        elif unit.trainable:
            layouts.append(_layout(unit, policy and policy.for_unit(unit), topology))
    return [layout for layout in layouts if layout.factor < math.inf]


def model_layouts(model: nn.Module) -> list[Layout]:
    """The layout of all trained parameters of a model that every rank has whole, reduced in fp32."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    specs = [ParameterSpec(name, tuple(parameter.shape)) for name, parameter in trained]
    return [Layout(lay_out("model", specs, grain=_WINDOW, world=1, max_padding=math.inf), 0.0, _WINDOW)]


def _layout(geometry: UnitGeometry | GroupGeometry, policy: Policy | None, topology: Topology) -> Layout:
    if policy is None:
        return Layout(geometry, 0.0, _WINDOW)
    codecs = [codec for _, codec in policy.reduce_axes(topology)]
    if policy.reduce == "ring":
        codecs *= topology.world - 1
    axes, last = policy.replica_axes(topology)
    codecs += [last] * bool(axes)
    shards = any(codec.block == "shard" for codec in codecs)
    window = geometry.piece if shards else min(geometry.piece, common_grain(*codecs))
    factor, floor = composed(codecs), 0.0
    if policy.sums == "fp16":  # each term, and each sum with it, is rounded
        sizes = [axis.size for axis, _ in policy.reduce_axes(topology)]
        factor = (1 + factor) * (1 + 2.0**-11) ** sum(sizes) - 1
        floor = len(sizes) * 2.0**-24 * (1 + factor)  # of n terms 2 n - 1 times, by half a step at most
    return Layout(geometry, factor, window, floor)


def composed(codecs: Sequence[Codec]) -> float:
    """Error bound, relative to ``m``, of a mean that goes through codecs one after the other."""
    return math.prod(1 + relative_bound(codec) for codec in codecs) - 1


@dataclass(slots=True)
class FirstGradient:
    """A single process's gradient of one step's batches, where it is compared."""

    layouts: Sequence[Layout]  # of everything that is reduced
    seed: int  # of the windows that are drawn
    micro_batches: int  # of a step
    rounding: float  # what two computations differ by, of the window's largest magnitude
    step: int = 0  # of the batches
    # by layout: (windows,) numbers, and (windows, window + 1) fp32 means, last of largest magnitudes
    _drawn: dict[Layout, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _finite: bool = True

    def __post_init__(self) -> None:
        for layout in self.layouts:
            geometry = layout.geometry
            total = geometry.world * -(-layout.row // layout.window)
            count = min(total, max(1, SAMPLED // layout.window))
            digest = hashlib.sha256(f"{self.seed} {geometry.name}".encode()).digest()
            draw = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            within = torch.rand(count, generator=draw, dtype=torch.float64)
            numbers = ((torch.arange(count) + within) * total / count).long().clamp(max=total - 1)
            self._drawn[layout] = (numbers, torch.zeros(count, layout.window + 1))

    def add(self, gradients: Mapping[str, Tensor | None], scale: float) -> None:
        """Add this rank's gradient of one micro-batch, whole and by name, computed at a loss of ``scale``."""
        for layout, (numbers, means) in self._drawn.items():
            drawn = _windows(layout, layout.packed(gradients))[numbers] / (scale * self.micro_batches)
            means.add_(torch.cat([drawn, drawn.abs().amax(dim=1, keepdim=True)], dim=1))

    def average(self) -> None:
        """Form the means over all ranks, which must all call it."""
        for _, means in self._drawn.values():
            dist.all_reduce(means)
            means.div_(dist.get_world_size())
            self._finite = self._finite and bool(means.isfinite().all())

    def compare(self, layout: Layout, first: int, rows: Tensor, scale: float) -> GradientError | None:
        """Compare reduced rows (n, row), from number ``first`` on; None if no window of theirs is drawn."""
        numbers, means = self._drawn[layout]
        per_row = -(-layout.row // layout.window)
        inside = (numbers >= first * per_row) & (numbers < (first + len(rows)) * per_row)
        if not (self._finite and bool(inside.any())):
            return None
        reduced = _windows(layout, rows)[numbers[inside] - first * per_row] / scale
        expected, largest = means[inside, :-1], means[inside, -1:]
        least = _TINY + layout.floor / scale
        allowed = ((layout.factor + self.rounding) * largest + least).expand_as(reduced)
        share = (reduced - expected).abs() / allowed
        worst = int(share.nan_to_num(nan=math.inf).argmax())
        tensors = {"share": share, "reduced": reduced, "expected": expected, "allowed": allowed}
        at_worst = {name: float(values.reshape(-1)[worst]) for name, values in tensors.items()}
        return GradientError(layout.geometry.name, reduced.numel(), **at_worst, step=self.step)


def _windows(layout: Layout, rows: Tensor) -> Tensor:
    """(windows, window) of (rows, row); the last window of a row is filled up with zeros."""
    short = -layout.row % layout.window
    return nn.functional.pad(rows.cpu(), (0, short)).view(-1, layout.window)
