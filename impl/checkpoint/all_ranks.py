"""All-or-nothing steps of several ranks: raises on every rank if any rank failed.

A rank that raised alone would leave the others waiting in their next exchange.  So each does its part,
and all tell each other how it went, in one all-gather of small messages, before any goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import torch

from impl.checkpoint.commit import CheckpointError
from impl.comm.wire import Wire
from impl.errors import ZeroError

MESSAGE_BYTES: Final = 1024  # of each rank: a result in JSON, or "!" and an error's line, which may be cut


def together(wire: Wire, attempt: Callable[[], Any]) -> list[Any]:
    """Run ``attempt`` on this rank, and learn what came of it on all; all ranks must call it.

    Args:
        wire: what sends: :data:`MESSAGE_BYTES` to every rank, purpose ``control``.
        attempt: returns something short that JSON has.

    Returns:
        What it returned on each rank, in rank order.

    Raises:
        CheckpointError: on all ranks, if it raised on any; the first rank's error, and its number where
            not all say the same.
    """
    failure: Exception | None = None
    try:
        outcome = json.dumps(attempt())
    except Exception as error:
        failure, outcome = error, "!" + _line(error)
    data = bytearray(outcome.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES))
    sent = torch.frombuffer(data, dtype=torch.uint8).to(wire.mesh.device)
    rows = wire.all_gather_small(sent).cpu().numpy()  # (ranks, MESSAGE_BYTES)
    outcomes = [row.tobytes().decode(errors="ignore").rstrip() for row in rows]
    for rank, words in enumerate(outcomes):
        if words.startswith("!"):
            where = "" if len(set(outcomes)) == 1 else f"rank {rank}: "
            raise CheckpointError(where + words[1:]) from failure
    return [json.loads(words) for words in outcomes]


def _line(error: Exception) -> str:
    """One line that says what went wrong."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    words = " ".join(str(error).split()) or "no message"
    return words if isinstance(error, CheckpointError | ZeroError) else f"{type(error).__name__}: {words}"
