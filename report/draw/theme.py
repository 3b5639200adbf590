"""Style of figures: fonts, and a fixed colour and marker per contender, safe for colour-blind readers.

Colours are Okabe and Ito's for the techniques and Tol's for peers; pairs lie between their two
techniques.  Further contenders of one policy, with other codecs, have its shades and their own markers.
Every line also has its name beside it, so no figure needs colour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final

import matplotlib as mpl
import seaborn as sns
from matplotlib.colors import to_hex, to_rgb

WIDTH: Final = 178.0  # mm: a journal's two columns, and a text column of the page
_STACKED_BELOW: Final = 130.0  # mm, panels stand above one another
INK: Final = "#222222"
FAINT: Final = "#8a8a8a"
GRID: Final = "#e4e4e4"
PUBLISHED: Final = "#666666"  # numbers printed by the papers
RULE: Final = "#c00000"  # what the paper's counting rule gives

COLOURS: Final = {
    "zero3": "#4d4d4d",
    "zero3-flat": "#9e9e9e",
    "zeropp": "#d55e00",
    "qwz": "#0072b2",
    "hpz": "#009e73",
    "qgz": "#cc79a7",
    "qwz+hpz": "#35a3c4",
    "qwz+qgz": "#7a6bb8",
    "hpz+qgz": "#b59b00",
    "exact": "#332288",
    "zero0": "#c9b8a0",
    "zero1": "#a98c66",
    "zero2": "#7d6340",
    "mics": "#117733",
    "fsdp2": "#882255",
    "fsdp2+exact": "#aa4499",
    "fsdp2+bf16": "#a0527e",
    "fsdp2+qwz": "#4a7fb0",
    "fsdp2+qgz": "#b784a7",
    "fsdp2+qwz+qgz": "#9a5fb0",
    "fsdp2-prefetch": "#c2528b",
    "fsdp2-kept": "#5e1a45",
    "fsdp2-kept-prefetch": "#e08bb5",
    "ddp": "#999933",
    "ddp-tuned": "#77771f",
    "ddp-bf16": "#c4c46e",
    "deepspeed": "#44aa99",
    "deepspeed-hpz": "#2c7a6d",
    "ddp+exact": "#5f7f1f",
    "ddp+bf16": "#b8b85a",
    "ddp+qgz": "#c98a5a",
    "single": "#aaaaaa",
    "recipe": "#1f5f5f",
}
MARKERS: Final = {
    "zero3": "o", "zeropp": "D", "qwz": "s", "hpz": "^", "qgz": "v", "qwz+hpz": "P", "qwz+qgz": "X",
    "hpz+qgz": "p", "exact": "h", "fsdp2": "<", "ddp": ">", "single": "*",
    "fsdp2-prefetch": "<", "fsdp2-kept": "<", "fsdp2-kept-prefetch": "<", "ddp-tuned": ">", "ddp-bf16": ">",
    "deepspeed": "H", "deepspeed-hpz": "H", "recipe": "d",
    "zero3-flat": "8", "zero0": "P", "zero1": "X", "zero2": "p", "mics": "d",
    "fsdp2+exact": "<", "fsdp2+bf16": "<", "fsdp2+qwz": "<", "fsdp2+qgz": "<", "fsdp2+qwz+qgz": "<",
    "ddp+exact": ">", "ddp+bf16": ">", "ddp+qgz": ">",
}  # fmt: skip
PARTS: Final = {  # of a step's time
    "forward": "#0072b2",
    "exposed in forward": "#a9cfe6",
    "backward": "#009e73",
    "exposed in backward": "#a6dccb",
    "optimizer": "#e69f00",
    "other": "#cccccc",
}
VOLUME: Final = {
    "gather in forward": "#0072b2",
    "gather in backward": "#56b4e9",
    "gradients": "#e69f00",
    "control": "#999999",
    "padding": "#dddddd",
}
LANES: Final = {  # of a rank in a traced step
    "computing": "#009e73",
    "encoding, decoding": "#e69f00",
    "inside the node": "#56b4e9",
    "between nodes": "#0072b2",
    "waiting": "#bbbbbb",
}
SPARED: Final = {
    "sent": "#4d4d4d",
    "padding": "#dddddd",
    "quantising": "#e69f00",
    "copy": "#009e73",
    "hops": "#cfe8df",
}
MEMORY: Final = {
    "masters": "#0072b2",
    "gradients": "#56b4e9",
    "optimizer": "#332288",
    "secondary": "#009e73",
    "gathered": "#e69f00",
    "local_gradients": "#cc79a7",
    "feedback": "#882255",
    "frozen": "#44aa99",
    "frames": "#ddcc77",
    "staging": "#999933",
    "host_masters": "#9cc4de",
    "host_gradients": "#c9e4f5",
    "host_optimizer": "#a79fcf",
    "host_secondary": "#99d3c2",
    "host_frames": "#eee5bb",
    "host_frozen": "#b8dfd8",
}
HATCH: Final = "////"  # a part without a formula
OTHER: Final = "#bbbbbb"
BATCHES: Final = ("#d55e00", "#8a3c00", "#f2a679", "#5b2800")  # shades of ZeRO++, by tokens per rank
# How the second and further contenders of a strategy differ from its first: colour to mix in, and its share.
_SHADES: Final = (("black", 0.0), ("black", 0.45), ("white", 0.5), ("black", 0.7), ("white", 0.3))
_FILLED: Final = ("D", "o", "s", "^", "v", "P", "X", "p", "h", "<", ">", "*", "d", "H", "8")
_variants: Final[ContextVar[Mapping[str, int]]] = ContextVar("variants", default=MappingProxyType({}))
_width: Final[ContextVar[float]] = ContextVar("width", default=WIDTH)
MEASURED: Final = {"calibrated": "#0072b2", "probed": "#222222"}


def colour(strategy: str, contender: str = "") -> str:
    """The colour of a strategy or, of several contenders with it, one's shade, the same in every figure."""
    base = COLOURS.get(strategy, OTHER)
    ground, share = _SHADES[_variants.get().get(contender, 0) % len(_SHADES)]
    if not share:
        return base
    red, green, blue = (
        (1 - share) * one + share * other for one, other in zip(to_rgb(base), to_rgb(ground), strict=True)
    )
    return to_hex((red, green, blue))


def marker(strategy: str, contender: str = "") -> str:
    """The marker of a strategy or, of several contenders with it, one's own, the same in every figure."""
    own, number = MARKERS.get(strategy, "o"), _variants.get().get(contender, 0)
    return own if not number else [one for one in _FILLED if one != own][(number - 1) % (len(_FILLED) - 1)]


def numbered(contenders: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Contenders numbered among those of their strategy, of (strategy, contender) in list order."""
    counts: Counter[str] = Counter()
    found: dict[str, int] = {}
    for strategy, contender in contenders:
        if contender not in found:
            found[contender] = counts[strategy]
            counts[strategy] += 1
    return found


def inches() -> float:
    """Width of a figure."""
    return _width.get() / 25.4


def stacked() -> bool:
    """Whether a figure is too narrow for panels side by side."""
    return _width.get() < _STACKED_BELOW


@contextmanager
def style(variants: Mapping[str, int] | None = None, width: float = WIDTH) -> Iterator[None]:
    """Context in which figures are drawn and saved: fonts, lines, deterministic output.

    Args:
        variants: the page's contenders, :func:`numbered`.
        width: of figures, in mm.
    """
    base = sns.axes_style("ticks") | sns.plotting_context("paper")
    own = {
        "axes.axisbelow": True,
        "axes.edgecolor": "#9a9a9a",
        "axes.formatter.use_mathtext": False,
        "axes.grid": True,
        "axes.labelcolor": INK,
        "axes.labelsize": 9,
        "axes.linewidth": 0.8,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "figure.dpi": 100,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same everywhere
        "font.size": 8.5,
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "legend.fontsize": 8,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "lines.markersize": 5,
        "pdf.fonttype": 42,
        "savefig.dpi": 160,
        "svg.fonttype": "path",
        "svg.hashsalt": "zeropp-bench",
        "text.color": INK,
        "text.parse_math": False,  # names come from records and may hold a dollar sign
        "xtick.color": INK,
        "ytick.color": INK,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "xtick.major.width": 0.8,
        "ytick.major.width": 0.8,
    }
    tokens = _variants.set(variants or {}), _width.set(width)
    try:
        with mpl.rc_context(base | own):
            yield
    finally:
        _variants.reset(tokens[0])
        _width.reset(tokens[1])
