"""Chooses the codecs of an engine's units anew every few steps, within the policy's budget.

In the passes before a choice the hop between nodes is observed: what it encodes goes through every candidate,
too, and the squared errors are added up.  After the optimizer's step the same is done with the masters; one
exchange adds all ranks' sums in their order, and all choose from the same bits
(:meth:`impl.plan.bit_budget.Share.chosen`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from impl import ops
from impl.codecs.codec import Codec
from impl.codecs.rounding_noise import Key, apart
from impl.comm.wire import Hop, Observer
from impl.errors import ZeroError
from impl.plan.bit_budget import shares_of
from impl.plan.policy import BitBudget
from impl.plan.traffic import Decision
from impl.unit.context import UnitContext
from impl.unit.unit import Unit


class Renewal(Observer):
    """The choices of one engine on one rank.

    Attributes:
        decisions: so far, of every unit at every choice.

    Raises:
        PolicyError: if the policy's own codecs take more than its budget.
    """

    def __init__(self, budget: BitBudget, units: Sequence[Unit], context: UnitContext) -> None:
        self._every, self._wire, self._clock = budget.every, context.wire, context.clock
        mesh = context.wire.mesh
        self._shares = shares_of(context.policy, mesh.topology, [unit.geometry for unit in units])
        self._units = {unit.geometry.name: unit for unit in units}
        self._chosen = [[0] * len(share.units) for share in self._shares]  # numbers of codecs
        self._squares = [  # by share: (units, 1 + codecs) sums of squared values and errors
            torch.zeros(len(share.units), 1 + len(share.codecs), dtype=torch.float64, device=mesh.device)
            for share in self._shares
        ]
        self._measuring = False
        self.decisions: list[Decision] = []
        self._observe()

    def _observe(self) -> None:
        """Observe the gradients of this step, if a choice follows it."""
        due = self._clock.step % self._every == 0
        if due or self._measuring:
            self.forget()
            for share in self._shares:
                for name in share.units if share.what == "gradients" else ():
                    self._units[name].reduction.how.watcher = self if due else None
        self._measuring = due

    def encoded(self, unit: str, hop: Hop, values: Tensor, frames: Tensor | None) -> None:
        """Add up the errors that every candidate makes of what the hop between nodes encodes."""
        del frames
        for share, squares in zip(self._shares, self._squares, strict=True):
            if share.hop == hop.axis:
                key = replace(self._clock.gradients(unit, self._wire.mesh.rank), hop=hop.number)
                squares[share.units.index(unit)] += squares_of(share.codecs, values, key)

    def forget(self) -> None:
        """Drop what was measured: of gradients that are not used."""
        for squares in self._squares:
            squares.zero_()

    def stepped(self) -> None:
        """Choose anew, if the step that is over was measured; all ranks must call it."""
        if self._measuring:
            self._choose()
        self._observe()

    def _choose(self) -> None:
        for share, squares in zip(self._shares, self._squares, strict=True):
            for name, row in zip(share.units, squares, strict=True):
                if share.what == "weights":
                    unit = self._units[name]
                    first, _ = unit.geometry.bounds(self._wire.mesh.rank)
                    master = unit.master_shard.master
                    row.copy_(squares_of(share.codecs, master, self._clock.weights(name), first))
        mine = torch.cat([squares.flatten() for squares in self._squares])
        gathered = self._wire.all_gather_small(mine).cpu()  # SQUARES_BYTES of each
        total = torch.zeros(mine.shape, dtype=mine.dtype)
        for row in gathered:  # in the order of ranks
            total += row
        parts = torch.split(total, [squares.numel() for squares in self._squares])
        for number, (share, part) in enumerate(zip(self._shares, parts, strict=True)):
            rows = part.view(len(share.units), -1).tolist()
            if not any(row[0] for row in rows) or not math.isfinite(math.fsum(map(math.fsum, rows))):
                continue  # nothing was reduced, or it overflowed: the codecs stay
            chosen = share.chosen([row[1:] for row in rows])
            self._adopt(number, chosen)
            for name, codec, row in zip(share.units, chosen, rows, strict=True):
                error = row[1 + codec] / row[0] if row[0] else 0.0
                made = Decision(self._clock.step, share.what, name, share.hop, share.codecs[codec], error)
                self.decisions.append(made)

    def _adopt(self, number: int, chosen: Sequence[int]) -> None:
        """Send in these codecs from here on."""
        share = self._shares[number]
        for name, before, codec in zip(share.units, self._chosen[number], chosen, strict=True):
            if codec != before:
                unit = self._units[name]
                unit.follow(unit.policy.decided(share.what, share.codecs[codec]))
        self._chosen[number] = list(chosen)

    def state(self) -> Tensor:
        """(n,) fp64 the numbers of the codecs and what was measured, to be loaded again."""
        numbers = [float(codec) for chosen in self._chosen for codec in chosen]
        squares = (squares.flatten().cpu() for squares in self._squares)
        return torch.cat([torch.tensor(numbers, dtype=torch.float64), *squares])

    def check_state(self, given: Tensor | None) -> None:
        """Refuse a state of other units or codecs.

        Raises:
            ZeroError: naming both sizes.
        """
        size = self.state().numel()
        if given is None or given.numel() != size:
            found = "none" if given is None else f"{given.numel()} numbers"
            raise ZeroError(f"state of a budget: {found}, expected {size} numbers")

    def load(self, given: Tensor) -> None:
        """Take over what :meth:`state` gave on the same rank, once the clock has its step."""
        sizes = [len(share.units) for share in self._shares]
        *numbers, squares = torch.split(given, [*sizes, given.numel() - sum(sizes)])
        for number, one in enumerate(numbers):
            self._adopt(number, list(map(int, one)))
        self._observe()
        parts = torch.split(squares, [own.numel() for own in self._squares])
        for own, part in zip(self._squares, parts, strict=True):
            own.copy_(part.view(own.shape))


def squares_of(codecs: Sequence[Codec], values: Tensor, key: Key, start: int = 0) -> Tensor:
    """(1 + codecs,) fp64 the sum of squared ``values`` (..., S), and of the squared errors of each codec.

    ``key`` and ``start`` are of the random bits of stochastic ones.
    """
    x = values.detach().float().contiguous()
    exact, numel = x.double(), x.shape[-1]
    strides = tuple(math.prod(x.shape[dim + 1 : -1]) * apart(numel) for dim in range(x.dim() - 1))
    sums, decoded = [exact.square().sum()], torch.empty_like(x)
    for codec in codecs:
        frames = torch.empty((*x.shape[:-1], codec.frame_bytes(numel)), dtype=torch.uint8, device=x.device)
        ops.encode(codec, x, frames, noise=key.noise(start, strides) if codec.stochastic else None)
        ops.decode(codec, frames, decoded)
        sums.append((decoded.double() - exact).square().sum())
    return torch.stack(sums)
