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
from report.data.text import number, text
from report.tables.table import Column

Measure = Callable[[Sample, Sequence[Sample]], list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Definition of one table of a page, with its figure.

    Attributes:
        name: of the table.
        title: of the table.
        caption: describes its columns.
        labels: further labels of a row, beside the sample's names.
        measures: functions of a sample and its run to one value per round, by name; a row holds the median
            over rounds, and as ``<name>_told`` the text with its interval.
        columns: those that are printed.
        wide: keys of columns that only the page prints, not the terminal.
        figure: of the same rows; the page begins with its description.
    """

    name: str
    title: str
    caption: str
    labels: Callable[[Sample], dict[str, Any]]
    measures: dict[str, Measure]
    columns: tuple[Column, ...]
    wide: frozenset[str]
    figure: Dots


def _quotient(above: str, below: str | None = None, scale: float = 1.0) -> Measure:
    """A measure: ``scale * above / below`` in every round, of seconds or sizes by name."""

    def measure(sample: Sample, _: Sequence[Sample]) -> list[float]:
        known = sample.timed | {name: [size] * len(sample.seconds) for name, size in sample.sizes.items()}
        divisors = [1.0] * len(sample.seconds) if below is None else known[below]
        return [scale * value / divisor for value, divisor in zip(known[above], divisors, strict=True)]

    return measure


def _of_copy(sample: Sample, run: Sequence[Sample]) -> list[float]:
    """Measure: bytes moved per second, over those of the copy."""
    return _quotient(
        "reference_seconds", "seconds", sample.sizes["moved_bytes"] / 2 / sample.sizes["element_bytes"]
    )(sample, run)


def _over_best(*names: str) -> Measure:
    """A measure: tokens per second over those of the fastest of these contenders, same place and run."""

    def measure(sample: Sample, run: Sequence[Sample]) -> list[float]:
        peers = [one for one in run if one.names["contender"] in names and one.place == sample.place]
        ratios = [[a / b for a, b in zip(peer.seconds, sample.seconds, strict=True)] for peer in peers]
        return min(ratios, key=statistics.median, default=[math.nan] * len(sample.seconds))

    return measure


def _room(phase: str) -> Measure:
    """A measure: seconds of compute alone over those of communication at the link's rate, in one phase."""

    def measure(sample: Sample, run: Sequence[Sample]) -> list[float]:
        return _quotient(phase, f"sent_{phase}", sample.place[2] / 8e-6)(sample, run)

    return measure


def _hidden(sample: Sample, _: Sequence[Sample]) -> list[float]:
    """Measure: seconds that chunks save, over those of the shorter hop."""
    rounds = zip(sample.reference_seconds, sample.seconds, *sample.parts.values(), strict=True)
    return [(whole - took) / min(hops) for whole, took, *hops in rounds]


def _whole(value: Any) -> str:
    return f"{value:d}"


def _right(value: Any) -> str:
    return text(value)


def _place(sample: Sample) -> str:
    nodes, ranks, rate = sample.place
    return f"{nodes}x{ranks} ranks, {rate_text(rate)}"


_MEDIANS: Final = "Medians over rounds, in brackets 95 % intervals of ratios formed inside a round. "
_SLOWEST: Final = f"{_MEDIANS}Times are the slowest rank's. "
_ROUNDS: Final = Column("rounds", "rounds", _whole)
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
        measures={
            "speed": _quotient("reference_seconds", "seconds"),
            "rate": _quotient("moved_bytes", "seconds", 1e-9),
            "copy_rate": _quotient("element_bytes", "reference_seconds", 2e-9),
            "of_copy": _of_copy,
        },
        columns=(
            Column("elements", "elements", place=True),
            Column("work", "operation"),
            Column("codec", "codec"),
            Column("backend", "backend"),
            Column("mebibytes", "MiB", number(3)),
            Column("rate", "GB/s", number(3)),
            Column("copy_rate", "copy, GB/s", number(3)),
            Column("of_copy", "of copy's", number(2)),
            Column("speed_told", "speed, copy = 1", _right),
            _ROUNDS,
            Column("other", "other arithmetic"),
        ),
        wide=frozenset({"mebibytes", "copy_rate", "of_copy", "rounds", "other"}),
        figure=Dots(
            name="speeds",
            title="Speed of codecs, beside a copy",
            caption=(
                "Seconds of a copy of the elements over seconds of the operation, in the same round: "
                "medians with 95 % intervals. Right of the dashed line an operation takes less time than "
                "the copy."
            ),
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
        measures={
            "times": _quotient("reference_seconds", "seconds"),
            "milliseconds": _quotient("seconds", scale=1e3),
            "gloo_milliseconds": _quotient("reference_seconds", scale=1e3),
        },
        columns=(
            Column("where", "where", place=True),
            Column("algorithm", "algorithm"),
            Column("codec", "codec"),
            Column("carried", "transport"),
            Column("milliseconds", "ms", number(3)),
            Column("gloo_milliseconds", "gloo's ms", number(3)),
            Column("times_told", "times gloo", _right),
            Column("sent_mb", "MB sent", number(3)),
            Column("sent_inter_mb", "between nodes", number(3)),
            Column("reference_sent_mb", "gloo's MB", number(3)),
            _ROUNDS,
        ),
        wide=frozenset({"sent_inter_mb", "rounds"}),
        figure=Dots(
            name="times",
            title="Beside gloo's own",
            caption=(
                "Seconds of gloo's own collective of the same fp32 tensor over ours, in the same round: "
                "medians with 95 % intervals. Right of the dashed line ours is faster. Like for like is "
                "fp32."
            ),
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
        measures={
            "of_alone": _quotient("reference_seconds", "seconds"),
            "speed": _quotient("tokens", "seconds"),
            "over_ddp": _over_best("ddp"),
            "over_fsdp2": _over_best("fsdp2", "fsdp2-kept"),
            "milliseconds": _quotient("seconds", "steps", 1e3),
            "cpu_milliseconds": _quotient("cpu", "steps", 1e3),
        },
        columns=(
            Column("place", "where", place=True),
            Column("who", "contender"),
            Column("carried", "carried by"),
            Column("speed", "tok/s", number(4)),
            Column("of_alone_told", "of alone", _right),
            Column("over_ddp_told", "over DDP", _right),
            Column("over_fsdp2_told", "over best FSDP2", _right),
            Column("milliseconds", "ms a step", number(3)),
            Column("cpu_milliseconds", "CPU ms", number(3)),
            Column("last_loss", "last loss", number(5)),
            _ROUNDS,
        ),
        wide=frozenset({"milliseconds", "cpu_milliseconds", "last_loss", "rounds"}),
        figure=Dots(
            name="engine",
            title="Training steps beside compute alone",
            caption=(
                "Tokens per second over those of the same model stepping by itself on every rank, in the "
                "same round: medians with 95 % intervals. At the dashed line communication would cost "
                "nothing. Colours: what carried messages."
            ),
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
        labels=lambda sample: {"place": _place(sample)},
        measures={
            "of_alone": _quotient("seconds", "reference_seconds"),
            "milliseconds": _quotient("seconds", scale=1e3),
            "alone_milliseconds": _quotient("reference_seconds", scale=1e3),
            "room_forward": _room("forward"),
            "room_backward": _room("backward"),
        },
        columns=(
            Column("policy", "policy"),
            Column("place", "where"),
            Column("milliseconds", "ms", number(3)),
            Column("alone_milliseconds", "alone, ms", number(3)),
            Column("room_forward", "room, forward", number(3)),
            Column("room_backward", "backward", number(3)),
            Column("of_alone_told", "of compute alone", _right),
            _ROUNDS,
        ),
        wide=frozenset({"rounds"}),
        figure=Dots(
            name="steps",
            title="Steps on a link that computation can hide",
            caption=(
                "Seconds of a policy's step over those of compute alone, in the same round: medians with 95"
                " % intervals. At the dashed line everything is hidden."
            ),
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
        labels=lambda sample: {"place": _place(sample)},
        measures={
            "hidden": _hidden,
            "milliseconds": _quotient("seconds", scale=1e3),
            "one_chunk_milliseconds": _quotient("reference_seconds", scale=1e3),
            "first_milliseconds": _quotient("first", scale=1e3),
            "second_milliseconds": _quotient("second", scale=1e3),
        },
        columns=(
            Column("chunks", "chunks", _whole),
            Column("place", "where"),
            Column("milliseconds", "ms", number(3)),
            Column("one_chunk_milliseconds", "in one, ms", number(3)),
            Column("first_milliseconds", "hop 1, ms", number(3)),
            Column("second_milliseconds", "hop 2, ms", number(3)),
            Column("hidden_told", "shorter hop hidden", _right),
            _ROUNDS,
        ),
        wide=frozenset({"rounds"}),
        figure=Dots(
            name="hops",
            title="What chunks hide of the shorter hop",
            caption=(
                "Seconds that chunks save over those of the shorter hop, in the same round: medians with 95"
                " % intervals. At the dashed line all of that hop is hidden."
            ),
            measure="hidden",
            label="share of the shorter hop that chunks hide",
            row="chunks",
            panel="place",
            log=False,
        ),
    ),
}
