"""Tables of ``zeropp bench``: of each kind of sample, what a round measures and how it is printed.

Ratios are formed inside a round of one run; a row of a table holds medians over rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from harness.records.bench_record import Bench, Kind, Sample
from harness.records.confidence_intervals import median_interval
from report.data.frames import groups, rate_text
from report.data.text import number
from report.quantities import formula
from report.tables.table import Column, Table, made

PAGE_ALONE: Final = (
    "numel", "copy_rate", "of_copy", "other", "sent_inter_mb", "rounds",
)  # fmt: skip
"""Columns that a terminal has no room for."""
_ROUNDS: Final = Column("rounds", "rounds", "{:d}".format)
_MEDIANS: Final = "Medians over rounds; ratios are formed inside a round."
OPERATIONS: Final = {
    "encode": "encode", "decode": "decode",
    "decode_sum": "decode and sum 4", "decode_sum_encode": "decode, sum 4 and encode",
    "encode_carried": "encode with carried error", "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of sample."""

    name: str
    title: str
    notes: str
    # labels of a sample, ``where`` and ``contender`` among them, and its measures, (rounds,) each
    values: Callable[[Sample], dict[str, Any]]
    columns: tuple[Column, ...]


def _median(name: str, title: str, says: str = "") -> Column:
    return Column(name, title, number(3), says, ends=False)


def _place(sample: Sample) -> str:
    nodes, ranks, rate = sample.place
    return f"{nodes}x{ranks} ranks, {rate_text(rate)}"


def _codec(sample: Sample) -> dict[str, Any]:
    names, sizes = sample.names, sample.sizes
    seconds, copy = np.array(sample.seconds), np.array(sample.reference_seconds)
    ran = f"{names['type']} on {names['device']}, threads: {names['threads']}"
    return {
        "where": f"{OPERATIONS[str(names['operation'])]}, {ran}",
        "contender": f"{names['codec']}, {names['backend']}",
        **{name: names[name] for name in ("codec", "backend", "numel", "other")},
        "rate": sizes["moved_bytes"] / seconds / 1e9,
        "copy_rate": 2 * sizes["element_bytes"] / copy / 1e9,
        "of_copy": copy / seconds * sizes["moved_bytes"] / (2 * sizes["element_bytes"]),
        "speed": copy / seconds,
    }


def _collective(sample: Sample) -> dict[str, Any]:
    names, sent = sample.names, sample.sent
    seconds, gloo = np.array(sample.seconds), np.array(sample.reference_seconds)
    carried = {"backend": "gloo"}.get(str(names["transport"]), names["transport"])
    size = f"{4 * int(names['numel'] or 0) / 2**20:g} MiB"
    return {
        "where": f"{OPERATIONS[str(names['operation'])]}, {_place(sample)}, {size}",
        "contender": f"{names['algorithm']}, {names['codec']}, {carried}",
        "algorithm": names["algorithm"],
        "codec": names["codec"],
        "carried": carried,
        "sent_mb": sum(sent.values()) / 1e6,
        "sent_inter_mb": sent["inter"] / 1e6,
        "reference_sent_mb": sample.sizes["reference_sent"] / 1e6,
        "milliseconds": 1e3 * seconds,
        "gloo_milliseconds": 1e3 * gloo,
        "times": gloo / seconds,
    }


def _step(sample: Sample) -> dict[str, Any]:
    seconds, alone = np.array(sample.seconds), np.array(sample.reference_seconds)
    bits = {part: 8e-6 * sample.sizes[f"sent_{part}"] for part in ("forward", "backward")}
    rate = float(sample.names["rate_mbit"] or np.nan)
    return {
        "where": _place(sample),
        "contender": sample.names["policy"],
        "milliseconds": 1e3 * seconds,
        "alone_milliseconds": 1e3 * alone,
        **{f"room_{part}": np.array(sample.parts[part]) / (size / rate) for part, size in bits.items()},
        "of_alone": seconds / alone,
    }


def _hops(sample: Sample) -> dict[str, Any]:
    seconds, whole = np.array(sample.seconds), np.array(sample.reference_seconds)
    first, second = (np.array(sample.parts[hop]) for hop in ("first", "second"))
    return {
        "where": _place(sample),
        "contender": f"{sample.names['chunks']} chunks",
        "milliseconds": 1e3 * seconds,
        "one_chunk_milliseconds": 1e3 * whole,
        "first_milliseconds": 1e3 * first,
        "second_milliseconds": 1e3 * second,
        "hidden": (whole - seconds) / np.minimum(first, second),
    }


KINDS: Final[dict[Kind, Measured]] = {
    "codec": Measured(
        "codecs",
        "Rates of codecs",
        "A copy is of the same elements into an existing buffer, timed just before. Of its rate: at 1 memory "
        "is the limit, below it arithmetic. Sums are of 4 frames; 'carried error' adds what the last "
        "encoding lost, and keeps what this one loses. Other arithmetic: another library's, which equals "
        "none of ours and makes its own buffers.",
        _codec,
        (
            Column("codec", "codec"),
            Column("backend", "backend"),
            Column("numel", "elements", "{:d}".format),
            _median("rate", "GB/s", formula("bytes moved", "GB/s")),
            _median("copy_rate", "copy, GB/s"),
            _median("of_copy", "of copy's", formula("of the copy's rate")),
            Column("speed", "speed, copy = 1", number(3), formula("speed")),
            _ROUNDS,
            Column("other", "other arithmetic"),
        ),
    ),
    "collective": Measured(
        "collectives",
        "Times and bytes of collectives",
        "Times are the slowest rank's. Bytes by the wire's ledger count what is read through shared memory, "
        "which carries what stays inside a node, too: a row names it only if a hop lies inside one. Like for "
        "like is fp32.",
        _collective,
        (
            Column("algorithm", "algorithm"),
            Column("codec", "codec"),
            Column("carried", "transport"),
            _median("milliseconds", "ms"),
            _median("gloo_milliseconds", "gloo's ms"),
            Column("times", "times gloo", number(3), formula("times gloo")),
            Column("sent_mb", "MB sent", number(3), formula("MB sent")),
            Column("sent_inter_mb", "between nodes", number(3)),
            Column("reference_sent_mb", "gloo's MB", number(3)),
            _ROUNDS,
        ),
    ),
    "step": Measured(
        "steps",
        "Steps beside compute alone",
        "Times are the slowest rank's. Compute alone: the same model that every rank trains by itself and "
        "that sends nothing, optimizer included. At 1 everything is hidden.",
        _step,
        (
            Column("contender", "policy"),
            _median("milliseconds", "ms"),
            _median("alone_milliseconds", "alone, ms"),
            _median("room_forward", "room, forward", formula("room")),
            _median("room_backward", "backward"),
            Column("of_alone", "times compute alone", number(3), formula("times compute alone")),
            _ROUNDS,
        ),
    ),
    "hops": Measured(
        "hops",
        "Reductions in chunks",
        "Times are the slowest rank's. The hops: their messages by themselves, without encoding. At 1 all of "
        "the shorter hop is hidden.",
        _hops,
        (
            Column("contender", "reduction"),
            _median("milliseconds", "ms"),
            _median("one_chunk_milliseconds", "in one, ms"),
            _median("first_milliseconds", "hop 1, ms"),
            _median("second_milliseconds", "hop 2, ms"),
            Column("hidden", "shorter hop hidden", number(3), formula("hidden")),
            _ROUNDS,
        ),
    ),
}


def tables_of(benches: Sequence[Bench]) -> list[Table]:
    """A table for every kind of sample in records, a row for each contender over all its rounds: medians with
    their intervals; ``id`` names the records.
    """
    tables = []
    for of, kind in KINDS.items():
        rounds = [
            pd.DataFrame(kind.values(sample)).assign(id=bench.id)
            for bench in benches
            for sample in bench.samples
            if sample.kind == of
        ]
        if not rounds:
            continue
        data = pd.concat(rounds, ignore_index=True)
        measures = [name for name in map(str, data.select_dtypes("float")) if not name.endswith("_mb")]
        labels = [name for name in map(str, data) if name not in (*measures, "id")]
        rows: list[dict[str, Any]] = [
            dict(zip(labels, key, strict=True))
            | {name: median_interval(list(mine[name])) for name in measures}
            | {"id": " ".join(sorted(set(mine["id"]))), "rounds": len(mine)}
            for _, here in groups(data, ["where"])
            for key, mine in groups(here, labels)
        ]
        tables.append(made(kind.name, kind.title, rows, *kind.columns, notes=f"{_MEDIANS} {kind.notes}"))
    return tables
