"""The log of the collectives that a rank opened, its fingerprint, and where the logs of ranks differ.

All ranks run one program, so all must open the same exchanges in the same order; a rank that does
not leaves the others waiting for a message that never comes.  Each rank keeps a :class:`CollectiveLog`.
Trails are compared by a count and a 64-bit fingerprint (:data:`impl.plan.traffic.ORDER_BYTES`), which
costs one small message; only when these differ are the histories compared, exchange by exchange.

Pure: no torch, and nothing is sent here.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import get_ident
from typing import Final, NamedTuple

from impl.plan.topology import ranks_in_words

REMEMBERED: Final = 1024  # exchanges in a history; about 0.2 MB
_KINDS: Final = 1 << 14  # different exchanges whose hashes are kept at hand
_PACKED: Final = struct.Struct("<QQ")
_FACTOR: Final = 0x9E3779B97F4A7C15  # odd, so that no earlier exchange is ever shifted out
_MASK: Final = (1 << 64) - 1


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


class Step(NamedTuple):
    """One exchange in its place.

    Attributes:
        number: of the exchange on this rank, from 1.
        operation: what it is.
        fingerprint: of all exchanges up to this one.
    """

    number: int
    operation: Operation
    fingerprint: int

    def __str__(self) -> str:
        return f"{self.number}, {self.operation}"


def _code(operation: Operation) -> int:
    """64 bits of an operation, the same in every process (``hash`` of text is not)."""
    return int.from_bytes(hashlib.blake2b(repr(tuple(operation)).encode(), digest_size=8).digest(), "little")


# Plain tuples where every exchange passes: making a named one takes 0.4 us, as much as the rest.
Fields = tuple[str, str, int, int, int, str, str, str, bool]  # an Operation's
Entry = tuple[int, Operation, int]  # a Step's


class CollectiveLog:
    """What one rank has opened, in order, and where it stands now.

    Attributes:
        count: exchanges opened.
        fingerprint: of their order, 64 bits.
        waiting: the exchange, or in words what else, that the rank stands waiting for; None while it
            computes.
        finished: the exchange received last.
        thread: which opened the last exchange; autograd has threads of its own.
    """

    __slots__ = ("_known", "_steps", "count", "fingerprint", "finished", "thread", "waiting")

    def __init__(self) -> None:
        self.count = 0
        self.fingerprint = 0
        self.waiting: Entry | str | None = None
        self.finished: Entry | None = None
        self.thread = get_ident()
        self._known: dict[Fields, tuple[Operation, int]] = {}
        self._steps: deque[Entry] = deque(maxlen=REMEMBERED)

    def open(self, fields: Fields) -> Entry:
        """Enter the next exchange.

        Args:
            fields: of its :class:`Operation`, in that order.
        """
        known = self._known.get(fields) or self._meet(fields)
        self.count += 1
        self.fingerprint = ((self.fingerprint ^ known[1]) * _FACTOR + 1) & _MASK
        self.thread = get_ident()
        entry = (self.count, known[0], self.fingerprint)
        self._steps.append(entry)
        return entry

    def _meet(self, fields: Fields) -> tuple[Operation, int]:
        if len(self._known) == _KINDS:
            self._known.clear()
        operation = Operation(*fields)
        self._known[fields] = known = operation, _code(operation)
        return known

    def steps(self) -> list[Step]:
        """The last :data:`REMEMBERED` exchanges, oldest first; may be asked from another thread."""
        while True:
            try:
                return [Step(*entry) for entry in tuple(self._steps)]
            except RuntimeError:  # the rank opened one meanwhile
                continue

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


@dataclass(frozen=True, slots=True)
class Parting:
    """Where the orders of ranks part.

    Attributes:
        number: of the first exchange that differs; of the oldest remembered by all, if ``earlier``.
        opened: by rank, what it opened there; empty if ``earlier``.
        earlier: whether they had parted before what is still remembered.
    """

    number: int
    opened: Mapping[int, Operation]
    earlier: bool = False

    def __str__(self) -> str:
        if self.earlier:
            return (
                f"the ranks parted before exchange {self.number}, the oldest that all remember: "
                "check the order more often"
            )
        alike: dict[Operation, list[int]] = {}
        for rank, operation in sorted(self.opened.items()):
            alike.setdefault(operation, []).append(rank)
        sides = (f"{ranks_in_words(ranks)} opened {operation}" for operation, ranks in alike.items())
        return f"the ranks part at exchange {self.number}: {'; '.join(sides)}"


def parting(histories: Mapping[int, Sequence[Step]]) -> Parting | None:
    """The first exchange in which ranks differ; None if each only is further on than another.

    Args:
        histories: by rank, its last exchanges, oldest first.
    """
    told = {rank: steps for rank, steps in histories.items() if steps}
    if len(told) < 2:
        return None
    # A rank that is behind everything that another remembers shares no number with it.
    oldest = max(steps[0].number for steps in told.values())
    newest = max(steps[-1].number for steps in told.values())
    by_number = {rank: {step.number: step for step in steps} for rank, steps in told.items()}
    for number in range(oldest, newest + 1):
        here = {rank: steps[number] for rank, steps in by_number.items() if number in steps}
        if len({step.operation for step in here.values()}) > 1:
            return Parting(number, {rank: step.operation for rank, step in here.items()})
        if any(a.fingerprint != b.fingerprint for a, b in pairwise(here.values())):
            return Parting(number, {}, earlier=True)
    return None
