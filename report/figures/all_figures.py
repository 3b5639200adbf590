"""Lists all figures of a page, in page order."""

from __future__ import annotations

from typing import Final

from report.figures import bytes_and_memory, learning, speed, trace_picture

FIGURES: Final = (
    speed.SPEEDUP, speed.OVER_RATES, speed.THROUGHPUT, speed.BESIDE_PUBLISHED, speed.GENERATION,
    speed.SCALING, speed.STEP_SPLIT, speed.SHARE, speed.PREDICTED, trace_picture.TRACE,
    bytes_and_memory.VOLUME, learning.LOSS, learning.NET_SPEED, learning.FINAL_LOSS, learning.FRONTIER,
    bytes_and_memory.MEMORY, bytes_and_memory.LARGEST_MODEL, learning.SENT_ERROR, learning.PARETO,
)  # fmt: skip
