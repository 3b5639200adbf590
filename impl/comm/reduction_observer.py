"""Observes reductions while their errors are measured: gradients, what each hop sends, and what comes out.

A training step has none, unless it measures errors for a budget (:mod:`impl.engine.bit_renewal`).  With one
(:meth:`impl.comm.wire.Wire.observed`) the same messages are sent, to the same bits.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from impl.codecs.codec import Codec


class Hop(NamedTuple):
    """A hop that encodes: its number, 0 first (a ring has one a step), its axis's name and its codec."""

    number: int
    axis: str
    codec: Codec


class Observer(Protocol):
    """Is told of the reductions of one rank; it must not change what it is given, nor keep it uncopied."""

    def local(self, unit: str, gradient: Tensor) -> None:
        """A reduction of ``unit`` begins: (world * S,) this rank's gradient, without carried errors."""

    def encoded(self, unit: str, hop: Hop, values: Tensor, frames: Tensor | None) -> None:
        """A hop's message is about to be sent.

        Args:
            unit: what is reduced.
            hop: which one.
            values: (..., S) what was encoded, error feedback included.
            frames: (..., F) uint8 of them; None if the elements are sent as they are.
        """

    def averaged(self, unit: str, start: int, mean: Tensor) -> None:
        """A reduction ended: (n,) fp32 mean of elements ``start`` to ``start + n`` of the unit.

        n is the unit's elements over the ranks, and each of its elements is told on one rank.
        """
