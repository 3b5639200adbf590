"""All-or-nothing steps of several ranks: raises on every rank if any rank failed.

A rank that raised alone would leave the others waiting in their next exchange.  So each does its part,
and all tell each other how it went, in one all-gather of small messages, before any goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import torch

from impl.checkpoint.atomic_files import CheckpointError
from impl.comm.wire import Wire

MESSAGE_BYTES: Final = 1024  # of each rank
_ERROR_BYTES: Final = 900  # of an error's text in JSON; the rest is cut


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
        mine: dict[str, Any] = {"done": attempt()}
    except Exception as error:
        failure = error
        mine = {"error": _line(error)}
    data = bytearray(json.dumps(mine).encode().ljust(MESSAGE_BYTES))
    sent = torch.frombuffer(data, dtype=torch.uint8).to(wire.mesh.device)
    rows = wire.all_gather_small(sent).cpu().numpy()  # (ranks, MESSAGE_BYTES)
    told = [json.loads(row.tobytes()) for row in rows]
    errors = {rank: one["error"] for rank, one in enumerate(told) if "error" in one}
    if errors:
        alike = len(errors) == len(told) and len(set(errors.values())) == 1
        first = next(iter(errors))
        words = errors[first]
        raise CheckpointError(words if alike else f"rank {first}: {words}") from failure
    return [one["done"] for one in told]


def _line(error: Exception) -> str:
    """One line that says what went wrong, short enough to be sent."""
    words = " ".join(str(error).split()) or "no message"
    if isinstance(error, OSError) and error.strerror:
        words = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if not isinstance(error, CheckpointError | OSError):
        words = f"{type(error).__name__}: {words}"
    while len(json.dumps(words)) > _ERROR_BYTES:
        words = words[: len(words) * 9 // 10].rstrip(".") + "..."
    return words
