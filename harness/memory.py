"""Which of the bytes that a rank holds a workload needs.  No torch."""

from __future__ import annotations

from typing import Final

TRAINING: Final = ("gradients", "optimizer", "local_gradients", "feedback")


def without_training(memory: dict[str, int]) -> dict[str, int]:
    """Bytes by part, without the parts that only training holds."""
    return {part: size for part, size in memory.items() if part not in TRAINING}
