"""Counts the CPU seconds that each kind of check takes on a rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


@contextlib.contextmanager
def counted(costs: dict[str, float], check: str) -> Iterator[None]:
    """Add the CPU seconds that this process spends in the body of ``with`` to the entry ``check`` of ``costs``."""
    begin = time.process_time()
    yield
    costs[check] = costs.get(check, 0.0) + time.process_time() - begin
