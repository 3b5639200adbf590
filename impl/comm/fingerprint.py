"""Logs a rank's exchanges with a fingerprint, and finds the first exchange in which ranks differ.

An exchange is one collective: an all-gather, an all-to-all, or one step of a ring.  All ranks run the same program, so
all must start the same exchanges in the same order.  If a rank does not, the others wait for its messages for ever.  To
detect this, ranks send each other the count of their exchanges and a 64-bit fingerprint of their order, and compare
them.  If a count or a fingerprint differs, or if a wait fails, the logs are compared exchange by exchange.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

from impl.policy.topology import ranks_in_words

# Multiplying by an odd number loses no bits modulo 2**64, so a fingerprint depends on every earlier exchange.
_FACTOR: Final = 0x9E3779B97F4A7C15

# An exchange as all ranks see it: its kind (``all_gather``, ``all_to_all``, ``shift``); the name, group size and stride
# of its axis; the bytes of one message; the phase, purpose and unit of its tag; and whether it is part of a ring.
Fields = tuple[str, str, int, int, int, str, str, str, bool]
# One exchange of a rank: its number, from 1; its fields; the fingerprint of all exchanges up to this one; and the call
# of the public interface that started it, such as ``save()``, or "" inside passes.  Making a named tuple would take
# 0.4 us, as long as everything else that is done for an entry.
Step = tuple[int, Fields, int, str]


def describe(fields: Fields, call: str = "") -> str:
    """Return an exchange in words, such as ``all_gather of 64 B along world (4 ranks) for forward weights h.0``.

    ``call`` is the call of the public interface that started the exchange, such as ``save()``.  It is empty if no such
    call is running, as in most forward and backward passes.
    """
    kind, axis, ranks, stride, nbytes, *tag, ring = fields
    # The stride is given because axes of one name may differ in it, if two policies share a wire.
    apart = f", stride {stride}" if stride > 1 else ""
    group = f"{axis} ({ranks} ranks{apart}{', ring' if ring else ''})"
    where = f" in {call}" if call else ""
    return f"{kind} of {nbytes} B along {group} for {' '.join(filter(None, tag))}{where}"


def label(step: Step) -> str:
    """Return a logged exchange in words, preceded by its number, such as ``exchange 3, all_gather of ...``."""
    return f"exchange {step[0]}, {describe(step[1], step[3])}"


@lru_cache(1 << 14)
def _code(fields: Fields, call: str) -> int:
    """Return a 64-bit hash of an exchange and of the public call that started it.

    Equal exchanges have equal hashes in all processes, which Python's ``hash()`` does not guarantee.
    """
    text = f"{fields!r} {call}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class CollectiveLog:
    """The log of one rank's exchanges: their count, the fingerprint of their order, and the last 1024 exchanges."""

    def __init__(self) -> None:
        self.count = self.fingerprint = 0
        # The call of the public interface that is running, which all ranks must make; "" inside passes.
        self.call = ""
        self.before_call = 0  # number of exchanges that were started before this call
        self.steps: deque[Step] = deque(maxlen=1024)  # takes 0.2 MB

    def open(self, fields: Fields) -> Step:
        """Log that this rank starts the exchange described by ``fields``, and return the log's new entry."""
        self.count += 1
        self.fingerprint = ((self.fingerprint ^ _code(fields, self.call)) * _FACTOR + 1) % 2**64
        step = (self.count, fields, self.fingerprint, self.call)
        self.steps.append(step)
        return step


def parting(histories: Mapping[int, Iterable[Step]]) -> str | None:
    """Return a text that says at which exchange the ranks first differ, and what each rank started there.

    ``histories`` has the last exchanges of each rank.  Each rank numbers its exchanges in the order in which it starts
    them, and exchanges with the same number are compared.  Returns None if no exchanges with the same number differ.
    """
    # number of the exchange -> its description -> the ranks that started it
    opened: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, steps in sorted(histories.items()):
        for number, fields, _, call in steps:
            opened[number][describe(fields, call)].append(rank)
    for number, sides in sorted(opened.items()):
        if len(sides) > 1:
            texts = (f"{ranks_in_words(ranks)} started {text}" for text, ranks in sides.items())
            return f"the ranks' exchanges first differ at exchange {number}: {'; '.join(texts)}"
    return None
