"""All figures of the report, in page order."""

from __future__ import annotations

from typing import Final

from report.figures import learning, sizes, speed, trace_picture

FIGURES: Final = (
    speed.SPEEDUP, speed.OVER_RATES, speed.THROUGHPUT, speed.BESIDE_PUBLISHED, speed.GENERATION,
    speed.SCALING, speed.STEP_SPLIT, speed.SHARE, speed.PREDICTED, trace_picture.TRACE, sizes.VOLUME,
    learning.LOSS, learning.FINAL_LOSS, learning.FRONTIER, sizes.MEMORY, sizes.LARGEST_MODEL,
    learning.SENT_ERROR, learning.PARETO,
)  # fmt: skip
