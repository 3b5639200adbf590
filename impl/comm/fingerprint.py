"""The log of the collectives that a rank opened, its fingerprint, and where the logs of ranks differ.

All ranks run one program, so all must open the same exchanges in the same order; a rank that does
not leaves the others waiting for a message that never comes.  Each rank keeps a :class:`CollectiveLog`.
Logs are compared by a count and a 64-bit fingerprint (:data:`impl.plan.traffic.ORDER_BYTES`), which
costs one small message; only when these differ are the histories compared, exchange by exchange.

Pure: no torch, and nothing is sent here.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from impl.plan.topology import ranks_in_words

REMEMBERED: Final = 1024  # exchanges in a history; about 0.2 MB
_PACKED: Final = struct.Struct("<QQ")
_FACTOR: Final = 0x9E3779B97F4A7C15  # odd, so that no earlier exchange is ever shifted out
_MASK: Final = (1 << 64) - 1


Fields = tuple[str, str, int, int, int, str, str, str, bool]  # an Operation's


class Operation(NamedTuple):
    """What is equal on all ranks about one exchange; who carries it is not in it.

    Attributes:
        kind: ``all_gather``, ``all_to_all`` or ``shift``.
        axis: its name.
        ranks: in a group of the axis.
        stride: of the axis.
        nbytes: of one message.
        phase, purpose, unit: of its tag.
        ring: whether it goes round a ring.
    """

    kind: str
    axis: str
    ranks: int
    stride: int
    nbytes: int
    phase: str
    purpose: str
    unit: str
    ring: bool

    def __str__(self) -> str:
        # Axes of one name may differ in size and stride: those of two policies on one wire.
        stride = f", stride {self.stride}" if self.stride > 1 else ""
        group = f"{self.axis} ({self.ranks} ranks{stride}{', ring' if self.ring else ''})"
        what = " ".join(word for word in (self.phase, self.purpose, self.unit) if word)
        return f"{self.kind} of {self.nbytes} B along {group} for {what}"


# One exchange in its place on a rank: its number from 1, what it is, the fingerprint of all up to it.  A
# plain tuple, as every exchange makes one: a named one takes 0.4 us, as much as the rest.
Step = tuple[int, Operation, int]


def told(step: Step) -> str:
    """The number of an exchange, and what it is."""
    number, operation, _ = step
    return f"{number}, {operation}"


@lru_cache(1 << 14)
def _met(fields: Fields) -> tuple[Operation, int]:
    """The operation, and 64 bits of it that are the same in every process (``hash`` of text is not)."""
    code = hashlib.blake2b(repr(fields).encode(), digest_size=8).digest()
    return Operation(*fields), int.from_bytes(code, "little")


class CollectiveLog:
    """What one rank has opened, in order, and where it stands now.

    Attributes:
        count: exchanges opened.
        fingerprint: of their order, 64 bits.
        waiting: the exchange, or in words what else, that the rank stands waiting for; None while it
            computes.
        finished: the exchange received last.
    """

    __slots__ = ("_steps", "count", "fingerprint", "finished", "waiting")

    def __init__(self) -> None:
        self.count = self.fingerprint = 0
        self.waiting: Step | str | None = None
        self.finished: Step | None = None
        self._steps: deque[Step] = deque(maxlen=REMEMBERED)

    def open(self, fields: Fields) -> Step:
        """Enter the next exchange, whose :class:`Operation` has these ``fields``."""
        operation, code = _met(fields)
        self.count += 1
        self.fingerprint = ((self.fingerprint ^ code) * _FACTOR + 1) & _MASK
        step = (self.count, operation, self.fingerprint)
        self._steps.append(step)
        return step

    def steps(self) -> list[Step]:
        """The last :data:`REMEMBERED` exchanges, oldest first."""
        return list(self._steps)

    def packed(self) -> bytes:
        """:data:`impl.plan.traffic.ORDER_BYTES` to send to the other ranks."""
        return _PACKED.pack(self.count, self.fingerprint)


def unpacked(message: bytes) -> tuple[int, int]:
    """(count, fingerprint) of another rank.

    Args:
        message: what :meth:`CollectiveLog.packed` gave there.
    """
    count, fingerprint = _PACKED.unpack(message)
    return count, fingerprint


def parting(histories: Mapping[int, Sequence[Step]]) -> str | None:
    """The first exchange in which ranks differ, in words; None if each only is further on than another.

    Args:
        histories: by rank, its last exchanges, oldest first.
    """
    known = {rank: steps for rank, steps in sorted(histories.items()) if steps}
    if len(known) < 2:
        return None
    # A rank that is behind everything that another remembers shares no number with it.
    oldest, newest = (
        max(steps[0][0] for steps in known.values()),
        max(steps[-1][0] for steps in known.values()),
    )
    by_number = {rank: {step[0]: step[1:] for step in steps} for rank, steps in known.items()}
    for number in range(oldest, newest + 1):
        here = {rank: steps[number] for rank, steps in by_number.items() if number in steps}
        opened: dict[Operation, list[int]] = {}
        for rank, (operation, _) in here.items():
            opened.setdefault(operation, []).append(rank)
        if len(opened) > 1:
            sides = (f"{ranks_in_words(ranks)} opened {operation}" for operation, ranks in opened.items())
            return f"the ranks part at exchange {number}: {'; '.join(sides)}"
        if len({fingerprint for _, fingerprint in here.values()}) > 1:
            return (
                f"the ranks parted before exchange {number}, the oldest that all remember: check the order "
                "more often"
            )
    return None
