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

NEEDS: Final = {  # what a figure takes, by its name
    "speedup": "two contenders in one cell, on two nodes or more",
    "ablation": "the eight combinations of qwZ, hpZ and qgZ in one cell",
    "throughput": "two rates of the link or more",
    "beside_published": "ZeRO++ and its baseline at two rates of the link or more",
    "parity": "ZeRO++ at a quarter of the rate of its baseline",
    "break_even_map": "two rates of the link and two batches or more",
    "generation": "trials that decode",
    "scaling": "three numbers of nodes or more",
    "step_split": "trained steps",
    "trace": "a traced step",
    "volume": "bytes between two nodes or more",
    "energy": "GPUs",
    "loss": "three validations in a trial or more (validate_every)",
    "final_loss": "a validation (validate_every)",
    "memory": "ranks of our engine",
    "largest_model": "a limit of memory that a trial keeps and another exceeds",
    "sent_error": "measured errors (measure_quantisation)",
    "pareto": "four contenders in one cell, with measured errors",
    "error": "measured errors (measure_quantisation)",
    "block_sweep": "codecs of three block sizes or more",
    "bits_sweep": "codecs of three numbers of bits or more",
    "link": "two nodes or more",
}
