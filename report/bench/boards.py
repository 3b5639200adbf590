"""Definitions of the tables and figures of ``zeropp bench``, one board per kind of sample.

A ratio is formed inside a round of one run; tables and figures show its median over rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from harness.records.bench_record import Kind, Sample
from report.bench.dots import Dots
from report.data.frames import rate_text
from report.data.text import number
from report.tables.table import Column

Measure = Callable[[Sample, Sequence[Sample]], list[float]]


@dataclass(frozen=True, slots=True)
class Shown(Column):
    """A column of a board: a name or label of the sample, or a measure.

    Attributes:
        measure: of a sample and its run, one value per round; a row holds the median.
        wide: whether only the page prints it, not the terminal.
    """

    measure: Measure | None = None
    wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Definition of one table of a page, with its figure.

    Attributes:
        name: of the table.
        title: of the table.
        caption: describes its columns.
        columns: in order; all measures are among them.
        figure: of the same rows; the page begins with its description.
        labels: further labels of a row, beside the sample's names.
    """

    name: str
    title: str
    caption: str
    columns: tuple[Shown, ...]
    figure: Dots
    labels: Callable[[Sample], dict[str, Any]] = lambda sample: {"place": _place(sample)}

    @property
    def measures(self) -> dict[str, Measure]:
        """By name; a row has the median under the name, and as ``<name>_told`` the text with its interval."""
        return {column.key.removesuffix("_told"): column.measure for column in self.columns if column.measure}


def _quotient(above: str, below: str = "", scale: float = 1.0) -> Measure:
    """A measure: ``scale`` times a product over another in every round, of seconds, sizes and the link's
    Mbit/s by name.
    """

    def measure(sample: Sample, _: Sequence[Sample]) -> list[float]:
        fixed = sample.sizes | {"rate_mbit": sample.place[2]}

        def product(names: str, index: int) -> float:
            values = (
                sample.timed[name][index] if name in sample.timed else fixed[name] for name in names.split()
            )
            return math.prod(values)

        return [scale * product(above, i) / product(below, i) for i in range(len(sample.seconds))]

    return measure


def _over_best(*names: str) -> Measure:
    """A measure: tokens per second over those of the fastest of these contenders, same place and run."""

    def measure(sample: Sample, run: Sequence[Sample]) -> list[float]:
        peers = [one for one in run if one.names["contender"] in names and one.place == sample.place]
        ratios = [[a / b for a, b in zip(peer.seconds, sample.seconds, strict=True)] for peer in peers]
        return min(ratios, key=statistics.median, default=[math.nan] * len(sample.seconds))

    return measure


def _hidden(sample: Sample, _: Sequence[Sample]) -> list[float]:
    """Measure: seconds that chunks save, over those of the shorter hop."""
    rounds = zip(sample.reference_seconds, sample.seconds, *sample.parts.values(), strict=True)
    return [(whole - took) / min(hops) for whole, took, *hops in rounds]


def _measured(name: str, title: str, measure: Measure, digits: int = 3, *, wide: bool = False) -> Shown:
    """A column of medians."""
    return Shown(name, title, number(digits), measure=measure, wide=wide)


def _ratio(name: str, title: str, measure: Measure) -> Shown:
    """A column of medians with their intervals."""
    return Shown(f"{name}_told", title, str, measure=measure)


def _place(sample: Sample) -> str:
    nodes, ranks, rate = sample.place
    return f"{nodes}x{ranks} ranks, {rate_text(rate)}"


_TIMES: Final = _quotient("reference_seconds", "seconds")
_OF_COPY: Final = _quotient("reference_seconds moved_bytes", "seconds element_bytes", 0.5)
_ROUNDS: Final = Shown("rounds", "rounds", "{:d}".format, wide=True)
_MEDIANS: Final = "Medians over rounds, in brackets 95 % intervals of ratios formed inside a round. "
_SLOWEST: Final = f"{_MEDIANS}Times are the slowest rank's. "
OPERATIONS: Final = {
    "encode": "encode",
    "decode": "decode",
    "decode_sum": "decode and sum 4",
    "decode_sum_encode": "decode, sum 4, encode",
    "encode_carried": "encode, carried error",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
}
BACKENDS: Final = {
    "cpu": "#0072b2", "cuda": "#009e73", "reference": "#777777", "bitsandbytes": "#cc79a7",
    "torchao": "#e69f00",
}  # fmt: skip
TRANSPORTS: Final = {"shm": "shm", "backend": "gloo", "none": "nothing"}
CONTENDERS: Final = {
    "alone": "compute alone",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "fsdp2-kept": "FSDP2, kept",
    "deepspeed": "DeepSpeed",
    "deepspeed-kept": "DeepSpeed, kept",
    "exact": "ours, fp32",
    "zeropp": "ours, ZeRO++",
}
_CARRIED: Final = ("carried", {"shm": "#0072b2", "gloo": "#e69f00", "nothing": "#000000"})


def _of_codec(sample: Sample) -> dict[str, Any]:
    names, sizes = sample.names, sample.sizes
    return {
        "work": OPERATIONS[str(names["operation"])],
        "elements": f"{names['type']} on {names['device']}, threads: {names['threads']}",
        "mebibytes": sizes["element_bytes"] / 2**20,
    }


def _of_collective(sample: Sample) -> dict[str, Any]:
    names, sent = sample.names, sample.sent
    size = f"{4 * int(names['numel'] or 0) / 2**20:g} MiB"
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


def _of_contender(sample: Sample) -> dict[str, Any]:
    return {
        "place": f"{sample.names['model']}, {_place(sample)}",
        "who": CONTENDERS[str(sample.names["contender"])],
        "carried": TRANSPORTS[str(sample.names["transport"])],
        "last_loss": sample.losses[-1],
    }


BOARDS: Final[dict[Kind, Board]] = {
    "codec": Board(
        name="codecs",
        title="Rates of codecs",
        caption=(
            f"{_MEDIANS}GB/s: every byte read or written, once, over seconds. Speed: seconds of a copy_ of "
            "the same elements into an existing buffer, timed just before, over seconds. Of the copy's "
            "rate: GB/s over the copy's, which reads and writes the elements: at 1 memory is the limit, "
            "below it arithmetic. Sums are of 4 frames. Other arithmetic: another library's, which equals "
            "none of ours and makes its own buffers."
        ),
        labels=_of_codec,
        columns=(
            Shown("elements", "elements", place=True),
            Shown("work", "operation"),
            Shown("codec", "codec"),
            Shown("backend", "backend"),
            Shown("mebibytes", "MiB", number(3), wide=True),
            _measured("rate", "GB/s", _quotient("moved_bytes", "seconds", 1e-9)),
            _measured(
                "copy_rate", "copy, GB/s", _quotient("element_bytes", "reference_seconds", 2e-9), wide=True
            ),
            _measured("of_copy", "of copy's", _OF_COPY, 2, wide=True),
            _ratio("speed", "speed, copy = 1", _TIMES),
            _ROUNDS,
            Shown("other", "other arithmetic", wide=True),
        ),
        figure=Dots(
            name="speeds",
            title="Speed of codecs, beside a copy",
            line="Right of the dashed line an operation takes less time than the copy.",
            measure="speed",
            label="speed: seconds of a copy / seconds",
            split={"type": ("fp32", "bf16", "fp16"), "device": ("cpu", "cuda")},
            row="codec",
            panel="work",
            colours=("backend", BACKENDS),
        ),
    ),
    "collective": Board(
        name="collectives",
        title="Times and bytes of collectives",
        caption=(
            f"{_SLOWEST}Times gloo: seconds of gloo's own collective of the same fp32 tensor over ours. MB "
            "sent by all ranks in one call: ours by the wire's ledger, which counts what is read through "
            "shared memory too; gloo's by its algorithms, a ring and an all-reduce's two rings. Shared "
            "memory carries what stays inside a node, gloo the rest: a row names it only if a hop lies "
            "inside one. Like for like is fp32."
        ),
        labels=_of_collective,
        columns=(
            Shown("where", "where", place=True),
            Shown("algorithm", "algorithm"),
            Shown("codec", "codec"),
            Shown("carried", "transport"),
            _measured("milliseconds", "ms", _quotient("seconds", scale=1e3)),
            _measured("gloo_milliseconds", "gloo's ms", _quotient("reference_seconds", scale=1e3)),
            _ratio("times", "times gloo", _TIMES),
            Shown("sent_mb", "MB sent", number(3)),
            Shown("sent_inter_mb", "between nodes", number(3), wide=True),
            Shown("reference_sent_mb", "gloo's MB", number(3)),
            _ROUNDS,
        ),
        figure=Dots(
            name="times",
            title="Beside gloo's own",
            line="Right of the dashed line ours is faster. Like for like is fp32.",
            measure="times",
            label="times gloo: gloo's seconds / ours",
            split={"operation": ("all_gather", "reduce_scatter")},
            row="run",
            panel="size",
            below="place",
            colours=_CARRIED,
        ),
    ),
    "training": Board(
        name="engine",
        title="Training steps beside peers",
        caption=(
            f"{_SLOWEST}Tokens of all ranks. Of compute alone: tokens per second over those of the same "
            "model that steps on every rank by itself and sends nothing. Over DDP, and over the faster of "
            "FSDP2 with weights released after use and with weights kept for the backward pass: likewise. "
            "Ours keep the root and the last block. "
            "shm: shared memory inside nodes, gloo between them. DeepSpeed: its ZeRO-3. Nothing is clipped;"
            " AdamW, fp32, one thread a rank. CPU ms: that all ranks' processes computed in a step, waiting"
            " awake included. The last loss is the mean over ranks before the last step: all that train "
            "without quantising agree in every step."
        ),
        labels=_of_contender,
        columns=(
            Shown("place", "where", place=True),
            Shown("who", "contender"),
            Shown("carried", "carried by"),
            _measured("speed", "tok/s", _quotient("tokens", "seconds"), 4),
            _ratio("of_alone", "of alone", _TIMES),
            _ratio("over_ddp", "over DDP", _over_best("ddp")),
            _ratio("over_fsdp2", "over best FSDP2", _over_best("fsdp2", "fsdp2-kept")),
            _measured("milliseconds", "ms a step", _quotient("seconds", "steps", 1e3), wide=True),
            _measured("cpu_milliseconds", "CPU ms", _quotient("cpu", "steps", 1e3), wide=True),
            Shown("last_loss", "last loss", number(5), wide=True),
            _ROUNDS,
        ),
        figure=Dots(
            name="engine",
            title="Training steps beside compute alone",
            line="At the dashed line communication would cost nothing. Colours: what carried messages.",
            measure="of_alone",
            label="tokens per second, of compute alone",
            row="who",
            panel="place",
            colours=_CARRIED,
        ),
    ),
    "step": Board(
        name="steps",
        title="Steps beside compute alone",
        caption=(
            f"{_SLOWEST}Compute alone: the same model that every rank trains by itself and that sends "
            "nothing, optimizer included. Room: its seconds over those that the link needs for the step's "
            "bytes, in forward and in backward."
        ),
        columns=(
            Shown("policy", "policy"),
            Shown("place", "where"),
            _measured("milliseconds", "ms", _quotient("seconds", scale=1e3)),
            _measured("alone_milliseconds", "alone, ms", _quotient("reference_seconds", scale=1e3)),
            _measured(
                "room_forward", "room, forward", _quotient("forward rate_mbit", "sent_forward", 1 / 8e-6)
            ),
            _measured(
                "room_backward", "backward", _quotient("backward rate_mbit", "sent_backward", 1 / 8e-6)
            ),
            _ratio("of_alone", "of compute alone", _quotient("seconds", "reference_seconds")),
            _ROUNDS,
        ),
        figure=Dots(
            name="steps",
            title="Steps on a link that computation can hide",
            line="At the dashed line everything is hidden.",
            measure="of_alone",
            label="seconds, of compute alone",
            row="policy",
            panel="place",
        ),
    ),
    "hops": Board(
        name="hops",
        title="Reductions in chunks",
        caption=(
            f"{_SLOWEST}The hops: their messages by themselves, without encoding. Hidden: what chunks save, "
            "over the shorter hop; encoding that chunks hide counts too."
        ),
        columns=(
            Shown("chunks", "chunks", "{:d}".format),
            Shown("place", "where"),
            _measured("milliseconds", "ms", _quotient("seconds", scale=1e3)),
            _measured("one_chunk_milliseconds", "in one, ms", _quotient("reference_seconds", scale=1e3)),
            _measured("first_milliseconds", "hop 1, ms", _quotient("first", scale=1e3)),
            _measured("second_milliseconds", "hop 2, ms", _quotient("second", scale=1e3)),
            _ratio("hidden", "shorter hop hidden", _hidden),
            _ROUNDS,
        ),
        figure=Dots(
            name="hops",
            title="What chunks hide of the shorter hop",
            line="At the dashed line all of that hop is hidden.",
            measure="hidden",
            label="share of the shorter hop that chunks hide",
            row="chunks",
            panel="place",
            log=False,
        ),
    ),
}
