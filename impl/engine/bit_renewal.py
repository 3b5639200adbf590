"""Chooses a codec for the messages of each unit every few steps, so that all units together stay within a bit budget.

A unit is a group of parameters that are sent together, and a codec encodes elements as bytes.  The policy's bit budget
limits the mean number of bits that each element of weights or gradients may take between nodes.  The codecs are chosen
so that the sum of their errors is small within this limit (:mod:`impl.plan.bit_budget`).

Before a choice, the errors of all candidate codecs are measured for one step.  For gradients, every candidate encodes
the values that a rank sends between nodes in the passes of this step.  For weights, every candidate encodes the masters
(fp32 weights) after the optimizer's step.  The squared errors of each candidate are added up for each unit.  The ranks
then send one another their sums.  Each rank adds the sums of all ranks in rank order, so that all ranks get equal
totals and make the same choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from impl import ops
from impl.codecs.codec import Codec
from impl.codecs.rounding_noise import Key, shard_stride
from impl.comm.wire import EncodedHop, Observer
from impl.plan.bit_budget import Share, shares_of
from impl.plan.traffic import Decision
from impl.policy.policy import BitBudget
from impl.unit.context import UnitContext
from impl.unit.unit import Unit


@dataclass(slots=True)
class _Choice:
    """The codecs (encodings) chosen for weights or for gradients, and the errors measured for the next choice.

    ``share`` is the part of the bit budget for weights, or the part for gradients.  It has the limit in bytes, the
    candidate codecs, and the units (groups of parameters that are sent together) for which codecs are chosen.
    """

    share: Share
    chosen: list[int]  # for each unit, the index of its codec among the share's candidates
    # (units, 1 + candidates) fp64: the sum of squared values, then the sum of squared errors of each candidate codec
    squares: Tensor


class Renewal(Observer):
    """Measures the errors of candidate codecs (encodings), and chooses a codec for each unit of one engine, on one
    rank.

    A unit is a group of parameters that are sent together.

    Raises:
        PolicyError: if the policy's own codecs, with which training begins, take more bits than the budget allows.
            Also if there is no codec to choose, because all units are frozen or persistent (their small parameters stay
            gathered).
    """

    def __init__(self, budget: BitBudget, units: Sequence[Unit], context: UnitContext) -> None:
        self._every, self._wire, self._clock = budget.every, context.wire, context.clock
        mesh, self._units = context.wire.mesh, {unit.geometry.name: unit for unit in units}
        shares = shares_of(context.policy, mesh.topology, [unit.geometry for unit in units])
        self._sizes = [len(share.units) * (1 + len(share.codecs)) for share in shares]
        self._squares = torch.zeros(sum(self._sizes), dtype=torch.float64, device=mesh.device)
        self._choices = [
            _Choice(share, [0] * len(share.units), part.view(len(share.units), -1))
            for share, part in zip(shares, torch.split(self._squares, self._sizes), strict=True)
        ]
        self._measuring = False
        self.decisions: list[Decision] = []  # one for every unit at every choice
        self._observe()

    def _observe(self) -> None:
        """Begin to measure errors if a choice of codecs is due after the coming step; otherwise stop measuring.

        If errors are measured, and the budget limits the bits of gradients, this object becomes the observer of the
        wire, through which all messages leave the rank.  Reductions then call :meth:`encoded` for the gradients that
        they encode.
        """
        due = self._clock.step % self._every == 0
        if due or self._measuring:
            self.forget()
            gradients = any(choice.share.purpose == "gradients" for choice in self._choices)
            self._wire.observer = self if due and gradients else None
        self._measuring = due

    def encoded(self, unit: str, hop: EncodedHop, values: Tensor, frames: Tensor | None) -> None:
        """Encode ``values`` (..., n) with every candidate codec, and add the squared errors to the sums of ``unit``.

        A reduction calls this method for each hop, which is one exchange between ranks.  ``values`` are the gradients
        that the hop encodes, and ``unit`` is the name of their unit (a group of parameters).  Only the hop between
        nodes is measured: calls for other hops do nothing.  ``frames`` is not used.
        """
        del frames
        for choice in self._choices:
            share = choice.share
            if share.hop == hop.axis and unit in share.units:
                key = replace(self._clock.gradients(unit, self._wire.mesh.rank), hop=hop.number)
                choice.squares[share.units.index(unit)] += squares_of(share.codecs, values, key)

    def forget(self) -> None:
        """Set the sums of squared errors to 0, because the gradients that were measured were dropped."""
        self._squares.zero_()

    def stepped(self) -> None:
        """Note that a step has ended: if errors were measured in this step, choose codecs by these errors.

        All ranks must call it.
        """
        if self._measuring:
            self._choose()
        self._observe()

    def _choose(self) -> None:
        for choice in self._choices:
            if choice.share.purpose == "weights":
                for name, row in zip(choice.share.units, choice.squares, strict=True):
                    unit = self._units[name]
                    first, _ = unit.geometry.bounds(self._wire.mesh.rank)
                    key = self._clock.weights(name)
                    row.copy_(squares_of(choice.share.codecs, unit.master_shard.master, key, first))
        total = torch.zeros(self._squares.shape, dtype=torch.float64)
        with self._wire.calling("optimizer.step()"):  # each number has traffic.SQUARES_BYTES bytes
            squares = self._wire.all_gather_small(self._squares).cpu()
        for row in squares:  # in rank order, so that all ranks round the sums alike
            total += row
        for choice, part in zip(self._choices, torch.split(total, self._sizes), strict=True):
            rows, share = part.view(choice.squares.shape).tolist(), choice.share
            if not any(row[0] for row in rows) or not math.isfinite(math.fsum(map(math.fsum, rows))):
                continue  # keep the codecs, since nothing was reduced in this step, or its gradients overflowed
            self._adopt(choice, share.choose([row[1:] for row in rows]))
            for name, index, row in zip(share.units, choice.chosen, rows, strict=True):
                error, codec = row[1 + index] / row[0] if row[0] else 0.0, share.codecs[index]
                self.decisions.append(
                    Decision(self._clock.step, share.purpose, name, share.hop, codec, error)
                )

    def _adopt(self, choice: _Choice, chosen: list[int]) -> None:
        """Make the units (groups of parameters) of ``choice`` send with the ``chosen`` codecs from now on.

        ``chosen`` has, for each unit, the index of its codec among the candidates.
        """
        share = choice.share
        for name, before, index in zip(share.units, choice.chosen, chosen, strict=True):
            if index != before:
                unit = self._units[name]
                unit.follow(unit.policy.with_choice(share.purpose, share.codecs[index]))
        choice.chosen = chosen

    def state(self) -> Tensor:
        """Return, as (n,) fp64, the state from which a resumed run makes the same choices as this run.

        The first entries are, for each unit (group of parameters), the index of the unit's present codec among the
        candidates.  All other entries are the sums of squared errors.
        """
        indices = [float(index) for choice in self._choices for index in choice.chosen]
        return torch.cat([torch.tensor(indices, dtype=torch.float64), self._squares.cpu()])

    def load(self, state: Tensor) -> None:
        """Continue from ``state``, the result of :meth:`state` that this rank has saved.

        Before the call, the engine's step counter (``clock.step``) must be set to the step at which the state was
        saved.  The counter decides whether errors are measured in the coming step.
        """
        sizes = [*(len(choice.chosen) for choice in self._choices), self._squares.numel()]
        *indices, squares = torch.split(state, sizes)
        for choice, chosen in zip(self._choices, indices, strict=True):
            self._adopt(choice, list(map(int, chosen)))
        self._observe()
        self._squares.copy_(squares)

    def reset(self) -> None:
        """Return to the codecs with which training begins, and forget the errors that were measured.

        Before the call, the engine's step counter (``clock.step``) must be set to the step from which training
        continues.
        """
        self.load(torch.zeros_like(self.state()))


def squares_of(codecs: Sequence[Codec], values: Tensor, key: Key, start: int = 0) -> Tensor:
    """Measure the squared errors with which ``codecs`` encode ``values`` (..., S).

    Returns (1 + len(codecs),) fp64: the sum of squared values, then the sum of squared errors of each codec.

    The random bits of stochastic codecs depend only on ``key`` and on the position of each element.  ``start`` is the
    position of the first element of ``values``.
    """
    x = values.detach().float().contiguous()
    exact, numel = x.double(), x.shape[-1]
    strides = tuple(math.prod(x.shape[dim + 1 : -1]) * shard_stride(numel) for dim in range(x.dim() - 1))
    sums, decoded = [exact.square().sum()], torch.empty_like(x)
    for codec in codecs:
        frames = torch.empty((*x.shape[:-1], codec.frame_bytes(numel)), dtype=torch.uint8, device=x.device)
        ops.encode(codec, x, frames, noise=key.noise(start, strides) if codec.stochastic else None)
        ops.decode(codec, frames, decoded)
        sums.append((decoded.double() - exact).square().sum())
    return torch.stack(sums)
