"""Definitions of the tables and figures of ``zeropp bench``, one board per kind of sample.

A ratio is formed inside a round of one run; tables and figures show its median over rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from harness.records.bench_record import Kind, Sample
from report.data.frames import rate_text
from report.data.text import number
from report.quantities import formula
from report.tables.table import Column

_MEDIANS: Final = "Medians over rounds, in brackets 95 % intervals of ratios formed inside a round."


@dataclass(frozen=True, slots=True)
class Shown(Column):
    """A column of a board: a name or label of the sample, or a measure."""

    measure: str = ""  # a formula of seconds, sizes and names, taken in every round; a row holds the median
    wide: bool = False  # only the page prints it, not the terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Definition of one table of a page, and of the dot plot of its rows; columns are named by their keys."""

    name: str
    title: str
    notes: str  # of the caption, after what columns say
    columns: tuple[Shown, ...]  # all measures are among them; the first with intervals is plotted
    line: str  # what the line at 1 of the plot means
    row: str  # column whose values have a row of the plot each
    panel: str  # column whose values have a panel each, side by side
    below: str | None = None  # column whose values have a row of panels each
    split: Mapping[str, Sequence[str]] = field(default_factory=dict)  # columns with a figure for each value
    colours: tuple[str, Mapping[str, str]] | None = None  # a column, and the colour of each of its values
    log: bool = True  # the plot's axis
    labels: Callable[[Sample], dict[str, Any]] = lambda sample: {"place": _place(sample)}  # beside its names
    rounds: Callable[[Sample], dict[str, list[float]]] = lambda _: {}  # further seconds of a sample by round

    @property
    def caption(self) -> str:
        """What numbers, columns and marks of the table are."""
        says = [_MEDIANS, *(column.says for column in self.columns), self.notes]
        return " ".join(part for part in says if part)

    @property
    def measures(self) -> dict[str, str]:
        """Formulas by key."""
        return {column.key: column.measure for column in self.columns if column.measure}

    @property
    def plotted(self) -> Shown:
        """The plot's measure."""
        return next(column for column in self.columns if column.measure and column.ends)


def _measured(name: str, title: str, measure: str, says: str = "", *, wide: bool = False) -> Shown:
    """A column of medians."""
    return Shown(name, title, number(3), says, ends=False, measure=measure, wide=wide)


def _ratio(name: str, title: str, measure: str, says: str) -> Shown:
    """A column of medians with their intervals."""
    return Shown(name, title, number(3), says, measure=measure)


def _place(sample: Sample) -> str:
    nodes, ranks, rate = sample.place
    return f"{nodes}x{ranks} ranks, {rate_text(rate)}"


_OF_COPY: Final = "reference_seconds / seconds * moved_bytes / (2 * element_bytes)"
_ROOM: Final = "{0} / (8e-6 * sent_{0} / rate_mbit)"
_ROUNDS: Final = Shown("rounds", "rounds", "{:d}".format, wide=True)
BACKENDS: Final = {
    "cpu": "#0072b2", "cuda": "#009e73", "reference": "#777777", "bitsandbytes": "#cc79a7",
    "torchao": "#e69f00", "torch.compile": "#56b4e9", "deepspeed": "#d55e00",
    # The CUDA kernels with one thing taken away.
    "cuda-general": "#005a44", "cuda-shared-memory": "#3fbf9f", "cuda-two-reads": "#8c8c00",
    "cuda-unfused": "#7fd4bd", "cuda-narrow": "#b5b500", "cuda-few-warps": "#444400",
}  # fmt: skip
OPERATIONS: Final = {
    "encode": "encode",
    "decode": "decode",
    "decode_sum": "decode and sum 4",
    "decode_sum_encode": "decode, sum 4, encode",
    "encode_carried": "encode, carried error",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
}
TRANSPORTS: Final = {"shm": "shm", "backend": "gloo"}
_CARRIED: Final = ("carried", {"shm": "#0072b2", "gloo": "#e69f00"})


def _of_codec(sample: Sample) -> dict[str, Any]:
    names = sample.names
    where = f"{names['type']} on {names['device']}, threads: {names['threads']}"
    return {"operation": OPERATIONS[str(names["operation"])], "where": where}


def _of_collective(sample: Sample) -> dict[str, Any]:
    names, sent, size = sample.names, sample.sent, f"{4 * int(sample.names['numel'] or 0) / 2**20:g} MiB"
    return {
        "place": _place(sample),
        "size": size,
        "where": f"{OPERATIONS[str(names['operation'])]}, {_place(sample)}, {size}",
        "run": f"{names['algorithm']}, {names['codec']}",
        "carried": TRANSPORTS[str(names["transport"])],
        "sent_mb": sum(sent.values()) / 1e6,
        "sent_inter_mb": sent["inter"] / 1e6,
        "reference_sent_mb": sample.sizes["reference_sent"] / 1e6,
    }


BOARDS: Final[dict[Kind, Board]] = {
    "codec": Board(
        name="codecs",
        title="Rates of codecs",
        notes="A copy_ is of the same elements into an existing buffer, timed just before. Of its rate: at 1 "
        "memory is the limit, below it arithmetic. Sums are of 4 frames; 'carried error' adds what the last "
        "encoding lost, and keeps what this one loses. Other arithmetic: another library's, which equals "
        "none of ours and makes its own buffers.",
        labels=_of_codec,
        columns=(
            Shown("where", "where", place=True),
            Shown("operation", "operation"),
            Shown("codec", "codec"),
            Shown("backend", "backend"),
            Shown("numel", "elements", "{:d}".format, wide=True),
            _measured("rate", "GB/s", "moved_bytes / seconds / 1e9", formula("bytes moved", "GB/s")),
            _measured("copy_rate", "copy, GB/s", "2 * element_bytes / reference_seconds / 1e9", wide=True),
            _measured("of_copy", "of copy's", _OF_COPY, formula("of the copy's rate"), wide=True),
            _ratio("speed", "speed, copy = 1", "reference_seconds / seconds", formula("speed")),
            _ROUNDS,
            Shown("other", "other arithmetic", wide=True),
        ),
        line="Right of the dashed line an operation takes less time than the copy.",
        split={"type": ("fp32", "bf16", "fp16"), "device": ("cpu", "cuda")},
        row="codec",
        panel="operation",
        colours=("backend", BACKENDS),
    ),
    "collective": Board(
        name="collectives",
        title="Times and bytes of collectives",
        notes="Times are the slowest rank's. Bytes by the wire's ledger count what is read through shared "
        "memory, which carries what stays inside a node, too: a row names it only if a hop lies inside one. "
        "Like for like is fp32.",
        labels=_of_collective,
        columns=(
            Shown("where", "where", place=True),
            Shown("algorithm", "algorithm"),
            Shown("codec", "codec"),
            Shown("carried", "transport"),
            _measured("milliseconds", "ms", "1e3 * seconds"),
            _measured("gloo_milliseconds", "gloo's ms", "1e3 * reference_seconds"),
            _ratio("times", "times gloo", "reference_seconds / seconds", formula("times gloo")),
            Shown("sent_mb", "MB sent", number(3), formula("MB sent")),
            Shown("sent_inter_mb", "between nodes", number(3), wide=True),
            Shown("reference_sent_mb", "gloo's MB", number(3)),
            _ROUNDS,
        ),
        line="Right of the dashed line ours is faster. Like for like is fp32.",
        split={"operation": ("all_gather", "reduce_scatter")},
        row="run",
        panel="size",
        below="place",
        colours=_CARRIED,
    ),
    "step": Board(
        name="steps",
        title="Steps beside compute alone",
        notes="Times are the slowest rank's. Compute alone: the same model that every rank trains by itself "
        "and that sends nothing, optimizer included.",
        columns=(
            Shown("policy", "policy"),
            Shown("place", "where"),
            _measured("milliseconds", "ms", "1e3 * seconds"),
            _measured("alone_milliseconds", "alone, ms", "1e3 * reference_seconds"),
            _measured("room_forward", "room, forward", _ROOM.format("forward"), formula("room")),
            _measured("room_backward", "backward", _ROOM.format("backward")),
            _ratio(
                "of_alone",
                "times compute alone",
                "seconds / reference_seconds",
                formula("times compute alone"),
            ),
            _ROUNDS,
        ),
        line="At the dashed line everything is hidden.",
        row="policy",
        panel="place",
    ),
    "hops": Board(
        name="hops",
        title="Reductions in chunks",
        notes="Times are the slowest rank's. The hops: their messages by themselves, without encoding.",
        columns=(
            Shown("chunks", "chunks", "{:d}".format),
            Shown("place", "where"),
            _measured("milliseconds", "ms", "1e3 * seconds"),
            _measured("one_chunk_milliseconds", "in one, ms", "1e3 * reference_seconds"),
            _measured("first_milliseconds", "hop 1, ms", "1e3 * first"),
            _measured("second_milliseconds", "hop 2, ms", "1e3 * second"),
            _ratio(
                "hidden", "shorter hop hidden", "(reference_seconds - seconds) / shorter", formula("hidden")
            ),
            _ROUNDS,
        ),
        line="At the dashed line all of that hop is hidden.",
        row="chunks",
        panel="place",
        rounds=lambda sample: {"shorter": [min(hops) for hops in zip(*sample.parts.values(), strict=True)]},
        log=False,
    ),
}
