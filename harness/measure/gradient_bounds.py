"""Checks that reduced gradients are as close to the gradient of a single process as the codecs' error bounds promise.

All ranks together compute the gradient of a single process.  Each rank runs its batches through the unsharded model,
and an fp32 all-reduce averages the gradients.  This all-reduce is not one of the tested messages.

Gradients are compared in windows.  A window is a run of consecutive elements that consists of whole quantisation blocks
of every codec.  An element may differ by ``factor * m``, and in addition by what rounding explains:

- ``factor`` is the relative error bound of all codecs together (:func:`composed`).
- ``m`` is the largest magnitude in the window of one rank's own gradient, averaged over ranks and micro-batches.

Only some windows, chosen at random, are compared.  ``docs/reference/metrics.md`` has the formulas.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor, nn

from harness.cluster import all_ranks
from harness.measure.unsharded_loss import packed, padded
from impl.adapters.traffic import GroupGeometry
from impl.codecs.codec import Codec, Dtype, common_grain
from impl.policy.own_method import MethodUnit
from impl.policy.policy import Policy
from impl.policy.shard_layout import ParameterSpec, UnitGeometry, lay_out
from impl.policy.topology import Topology

SAMPLED: Final = 65536  # approximate number of elements that are compared in each layout
# Allowed difference, relative to ``m``, because the two computations add the same products in another order.
ROUNDING: Final[dict[Dtype, float]] = {"fp32": 1e-4, "bf16": 2.0**-5, "fp16": 2.0**-8}
_WINDOW: Final = common_grain()  # elements of the smallest window
_TINY: Final = 1e-30  # allowed absolute error: far below gradients that matter, above the floors of scales


@dataclass(frozen=True, slots=True)
class GradientError:
    """The worst element of one unit's reduced gradient on one rank, compared with the gradient of a single process.

    A unit is a set of parameters that are reduced together.  Each element has an allowed difference from the single
    process's gradient.  The worst element is the one whose difference is the largest share of its allowed difference.
    """

    unit: str
    elements: int  # number of elements that were compared
    share: float  # |reduced - expected| / allowed of the worst element; above 1 the bound is broken
    reduced: float
    expected: float  # the single process's value
    allowed: float  # the largest difference that the codecs and rounding allow
    step: int = 0  # index of the step


@dataclass(frozen=True, slots=True)
class Layout:
    """Arranges the elements of a gradient as a matrix, in which each rank's shard is one or more whole rows."""

    geometry: UnitGeometry | GroupGeometry  # a unit of our engine, or a parameter group of FSDP2
    factor: float  # error bound of all codecs together, relative to ``m`` (see the module)
    window: int  # elements of a window, which holds whole blocks of all codecs
    floor: float = 0.0  # allowed absolute error of sums in fp16, whose smallest step is 2^-24

    @property
    def row(self) -> int:
        """Number of elements in a row."""
        return self.geometry.piece

    def packed(self, gradients: Mapping[str, Tensor | None]) -> Tensor:
        """Pack unsharded gradients, given by parameter name, into an fp32 matrix with :attr:`row` columns.

        Parameters without a gradient have zeros.
        """
        return packed(self.geometry, gradients).view(-1, self.row)

    def part(self, gradients: Mapping[str, Tensor | None]) -> Tensor:
        """Join this rank's shards of FSDP2's gradients, given by parameter name, into one row: (1, row) fp32.

        Each shard is padded with zeros, so that a parameter's shards are equally long on all ranks.
        """
        assert isinstance(self.geometry, GroupGeometry)  # noqa: S101  # only FSDP2 shards each parameter
        part, specs = self.geometry.part, self.geometry.parameters
        return torch.cat([padded(gradients[spec.name], part(spec)).cpu() for spec in specs]).view(1, -1)


def relative_bound(codec: Codec) -> float:
    """Return an upper bound of a codec's relative error: an element's error over the largest magnitude in its block.

    Some codecs have only a few scales, at most eight between a number and its double.  A block gets the smallest of
    these scales that suffices for its largest magnitude.  The relative error is largest if this magnitude is slightly
    too large for one scale, because the block then gets the next larger scale.  This function computes the error bound
    for eight such magnitudes, from just above 1 to just above 1.875.  It returns the largest ratio of an error bound to
    its magnitude.
    """
    just_above = [(1 + eighth / 8) * (1 + 1e-6) for eighth in range(8)]
    return max(codec.error_bound(-top, top) / top for top in just_above) * (1 + 1e-5)


def layouts_of(
    units: Iterable[UnitGeometry | GroupGeometry], policy: Policy | None, topology: Topology
) -> list[Layout]:
    """Return a :class:`Layout` for each trained unit, or for each parameter group of FSDP2 that has trained parameters.

    A unit is a set of parameters that our engine reduces together.  A unit or group is left out if its reduction has no
    error bound, because a codec of the reduction, or a user's own reduction, promises none.

    Args:
        units: All units or parameter groups; frozen ones are left out.
        policy: The policy, whose codecs set the bounds; None for an engine that reduces in fp32.
        topology: Nodes and ranks, which decide the hops of a reduction.
    """
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
    """Return the :class:`Layout` of a model that DDP trains, in a list: all trained parameters in one row.

    Each rank holds the whole row, which DDP reduces in fp32.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    specs = [ParameterSpec(name, tuple(parameter.shape)) for name, parameter in trained]
    return [Layout(lay_out("model", specs, grain=_WINDOW, world=1, max_padding=math.inf), 0.0, _WINDOW)]


def _layout(geometry: UnitGeometry | GroupGeometry, policy: Policy | None, topology: Topology) -> Layout:
    if policy is None:
        return Layout(geometry, 0.0, _WINDOW)
    if policy.own_reduce is not None and isinstance(geometry, UnitGeometry):
        bounds = (
            policy.own_reduce.error_bound(MethodUnit.of(geometry, rank)) for rank in range(topology.world)
        )
        return Layout(geometry, max(bounds), geometry.piece)
    sums = policy.reduce_axes(topology)
    if policy.local_steps is not None:  # gradients are reduced inside groups
        sums = tuple((axis, codec) for axis, codec in sums if axis.stride < policy.group_ranks(topology))
    codecs = [codec for _, codec in sums]
    if policy.reduce == "ring":
        codecs *= topology.world - 1
    axes, last = policy.replica_axes(topology)
    codecs += [last] * bool(axes and policy.local_steps is None)
    shards = any(codec.block == "shard" for codec in codecs)
    window = geometry.piece if shards else min(geometry.piece, common_grain(*codecs))
    factor, floor = composed(codecs), 0.0
    if policy.sums == "fp16":  # each decoded term is rounded, and each partial sum is rounded
        sizes = [axis.size for axis, _ in sums]
        factor = (1 + factor) * (1 + 2.0**-11) ** sum(sizes) - 1
        # A sum of n terms is rounded 2 n - 1 times, by at most half of fp16's smallest step.
        floor = len(sizes) * 2.0**-24 * (1 + factor)
    return Layout(geometry, factor, window, floor)


def composed(codecs: Sequence[Codec]) -> float:
    """Return the relative error bound of a reduction whose hops (exchanges) use ``codecs``, one after the other.

    Each element of the mean gradient is wrong by at most the returned factor times ``m``.  To compute ``m``, take the
    run of consecutive elements (the window) in which the element lies, find the largest magnitude of each rank's
    gradient in this window, and average these magnitudes over ranks.
    """
    return math.prod(1 + relative_bound(codec) for codec in codecs) - 1


@dataclass(slots=True)
class FirstGradient:
    """Samples of the gradient that a single process computes in one step, to compare reduced gradients with them.

    A sample is a window, which is a run of consecutive elements.  Windows are chosen at random, and only these are
    stored and compared.  Call :meth:`add` for each micro-batch, then :meth:`average`, then :meth:`compare`.
    """

    layouts: Sequence[Layout]  # the layouts of everything that is reduced
    seed: int  # decides which windows are drawn
    micro_batches: int  # number of micro-batches in a step
    rounding: float  # difference that rounding alone may cause, relative to ``m``: an entry of ROUNDING
    step: int = 0  # index of the step whose gradient is computed
    ranks: int = 0  # number of ranks in a state group, over which gradients are averaged; 0: over all ranks
    # (P,) this rank's gradient of one unit in the last micro-batch; None if the caller compares all units.
    latest: Tensor | None = None
    # By layout: the numbers (windows,) of the drawn windows, and a tensor (windows, window + 1) fp32.  A row of the
    # tensor has the mean gradient of a window and, in the last column, the mean over ranks of its largest magnitude.
    _drawn: dict[Layout, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _finite: bool = (
        True  # False if the single process's gradient overflowed, so that nothing can be compared with it
    )

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
        """Add this rank's gradients of one micro-batch to the samples.

        Args:
            gradients: Unsharded gradients by parameter name.
            scale: Loss scale by which the gradients are multiplied; this method divides by it.
        """
        for layout, (numbers, means) in self._drawn.items():
            drawn = _windows(layout, layout.packed(gradients), numbers) / (scale * self.micro_batches)
            means.add_(torch.cat([drawn, drawn.abs().amax(dim=1, keepdim=True)], dim=1))

    def average(self) -> None:
        """Average the added gradients over all ranks or, with local steps, over this rank's state group.

        With local steps, ranks form state groups, which train apart from each other.  The number of ranks in a state
        group is the field ``ranks``; without local steps this field is 0.  All ranks must call this.
        """
        for _, means in self._drawn.values():
            if self.ranks:
                means.copy_(all_ranks.mean_of_group(means, self.ranks))
            else:
                all_ranks.add(means)
                means.div_(all_ranks.world())
            self._finite = self._finite and bool(means.isfinite().all())

    def compare(self, layout: Layout, first: int, rows: Tensor, scale: float) -> GradientError | None:
        """Compare this rank's reduced gradient with the single process's gradient, and return the worst element.

        The worst element is the one whose difference is the largest share of its allowed difference.

        Args:
            layout: The layout of the unit or parameter group whose gradient is compared.
            first: Index in the layout of the first row of ``rows``.
            rows: (n, row) reduced gradient, multiplied by the loss scale.
            scale: The loss scale.

        Returns:
            The worst element.  None if ``rows`` contains none of the windows that were chosen at random, or if the
            single process's gradient is not finite.
        """
        numbers, means = self._drawn[layout]
        per_row = -(-layout.row // layout.window)
        inside = (numbers >= first * per_row) & (numbers < (first + len(rows)) * per_row)
        if not (self._finite and bool(inside.any())):
            return None
        reduced = _windows(layout, rows, numbers[inside] - first * per_row) / scale
        expected, largest = means[inside, :-1], means[inside, -1:]
        least = _TINY + layout.floor / scale
        allowed = ((layout.factor + self.rounding) * largest + least).expand_as(reduced)
        share = (reduced - expected).abs() / allowed
        worst = int(share.nan_to_num(nan=math.inf).argmax())
        tensors = {"share": share, "reduced": reduced, "expected": expected, "allowed": allowed}
        at_worst = {name: float(values.reshape(-1)[worst]) for name, values in tensors.items()}
        return GradientError(layout.geometry.name, reduced.numel(), **at_worst, step=self.step)


def _windows(layout: Layout, rows: Tensor, numbers: Tensor) -> Tensor:
    """Cut each row of ``rows`` into windows, and return the windows at the indices ``numbers``: (n, window) on the CPU.

    A window is a run of consecutive elements; the last window of a row is padded with zeros.  Windows are selected on
    the device of ``rows``, so that only these windows are copied from a GPU.  Copying all gradients of a large model
    takes longer than a step.

    Args:
        layout: Gives the number of elements in a row and in a window.
        rows: (rows, row) elements.
        numbers: (n,) indices of windows, where index 0 is the first window of the first row.
    """
    short = -layout.row % layout.window
    windows = nn.functional.pad(rows, (0, short)).view(-1, layout.window)
    return windows[numbers.to(rows.device)].cpu()
