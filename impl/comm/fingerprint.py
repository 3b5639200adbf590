"""The log of a rank's exchanges, its fingerprint, and the first exchange where ranks' logs differ.

All ranks run one program, so all must open the same exchanges in the same order; a rank that does not leaves
the others waiting for ever.  Logs are compared by a count and a 64-bit fingerprint
(:data:`impl.plan.traffic.ORDER_BYTES`); only where these differ exchange by exchange.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

from impl.plan.topology import ranks_in_words

_FACTOR: Final = 0x9E3779B97F4A7C15  # odd, so that no earlier exchange is ever shifted out

# An exchange as all ranks see it: its kind (``all_gather``, ``all_to_all``, ``shift``), axis, group size and
# stride, the bytes of one message, phase, purpose and unit of its tag, and whether it is of a ring.
Fields = tuple[str, str, int, int, int, str, str, str, bool]
# One exchange of a rank: its number from 1, its fields, the fingerprint of all up to it, the public call that
# opened it, as ``save()``, or "" in passes.
Step = tuple[int, Fields, int, str]  # a named tuple would take 0.4 us, as much as all else


def describe(fields: Fields, call: str = "") -> str:
    """An exchange in words."""
    kind, axis, ranks, stride, nbytes, *tag, ring = fields
    # Axes of one name may differ in size and stride: those of two policies on one wire.
    apart = f", stride {stride}" if stride > 1 else ""
    group = f"{axis} ({ranks} ranks{apart}{', ring' if ring else ''})"
    where = f" in {call}" if call else ""
    return f"{kind} of {nbytes} B along {group} for {' '.join(filter(None, tag))}{where}"


def label(step: Step) -> str:
    """An exchange in words, with its number."""
    return f"exchange {step[0]}, {describe(step[1], step[3])}"


@lru_cache(1 << 14)
def _code(fields: Fields, call: str) -> int:
    """64 bits, equal in every process (``hash`` of text is not)."""
    text = f"{fields!r} {call}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class CollectiveLog:
    """One rank's exchanges: their count, the fingerprint of their order, and the last ones in order."""

    def __init__(self) -> None:
        self.count = self.fingerprint = 0
        self.call = ""  # the public call that opens exchanges now, which all ranks must make
        self.before_call = 0  # exchanges opened before it
        self.steps: deque[Step] = deque(maxlen=1024)  # 0.2 MB

    def open(self, fields: Fields) -> Step:
        """Enter the next exchange."""
        self.count += 1
        self.fingerprint = ((self.fingerprint ^ _code(fields, self.call)) * _FACTOR + 1) % 2**64
        step = (self.count, fields, self.fingerprint, self.call)
        self.steps.append(step)
        return step


def parting(histories: Mapping[int, Iterable[Step]]) -> str | None:
    """A sentence on the first exchange that differs in ranks' ``histories``; None if none does."""
    opened: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))  # ranks by exchange
    for rank, steps in sorted(histories.items()):
        for number, fields, _, call in steps:
            opened[number][describe(fields, call)].append(rank)
    for number, sides in sorted(opened.items()):
        if len(sides) > 1:
            texts = (f"{ranks_in_words(ranks)} opened {text}" for text, ranks in sides.items())
            return f"the ranks part at exchange {number}: {'; '.join(texts)}"
    return None
