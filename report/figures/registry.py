"""Registry of all figures of the report, in page order.

Each is a :class:`report.draw.figure_definition.Plot`: records to a tidy table, the table to a figure (or
None, and then the page names the suite to run).
"""

from __future__ import annotations

from typing import Final

from report.figures import (
    break_even,
    codecs,
    communication,
    energy,
    generation,
    loss,
    memory,
    pareto,
    scaling,
    speed,
    step,
    trace,
)
from report.figures import bytes as bytes_figures

_MODULES: Final = (
    speed, break_even, step, scaling, generation, bytes_figures, energy, loss, memory, communication, codecs,
    pareto, trace,
)  # fmt: skip
_BY_NAME: Final = {plot.name: plot for module in _MODULES for plot in module.PLOTS}
_ORDER: Final = (
    "speedup", "ablation", "throughput", "beside_published", "parity", "break_even_map", "generation",
    "scaling", "step_split", "trace", "volume", "energy", "loss", "final_loss", "memory", "largest_model",
    "sent_error", "pareto", "error", "block_sweep", "bits_sweep", "link",
)  # fmt: skip
PLOTS: Final = tuple(_BY_NAME[name] for name in _ORDER)
