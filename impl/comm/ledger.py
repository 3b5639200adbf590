"""The ledger: bytes and messages that a rank has sent, by what they were for.

The wire books every message; ``impl.plan.traffic`` predicts the same rows (docs/reference/metrics.md).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from impl.plan.traffic import LedgerKey, Link, Phase, Purpose, Sent


@dataclass(frozen=True, slots=True)
class Tag:
    """What a message is for; the ledger adds axis and link."""

    phase: Phase
    purpose: Purpose
    unit: str = ""


@dataclass(slots=True)
class Ledger:
    """Bytes and messages that this rank has sent."""

    _rows: dict[LedgerKey, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    def book(self, key: LedgerKey, nbytes: int, messages: int) -> None:
        """Add messages of ``nbytes`` in total."""
        row = self._rows[key]
        row[0] += nbytes
        row[1] += messages

    def rows(self) -> dict[LedgerKey, Sent]:
        """A copy of everything booked."""
        return {key: Sent(*row) for key, row in self._rows.items()}

    def total(self, link: Link) -> int:
        """Bytes over one kind of link."""
        return sum(row[0] for key, row in self._rows.items() if key.link == link)

    def clear(self) -> None:
        """Forget everything."""
        self._rows.clear()
