"""Shows records of ``zeropp bench`` as tables, in a terminal and on the page ``report.html`` of their folder.

A benchmark runs in rounds: a round times an operation and its reference, such as a copy in memory.  A ratio divides
two times of the same round.  A row of a table holds the median of each quantity over all rounds.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from rich.console import Console
from rich.markup import escape

from harness.records.bench_record import Bench, Kind, Sample, read_all
from harness.records.confidence_intervals import median_interval
from harness.terminal_table import console
from report import page
from report.build import publish
from report.data import caveats
from report.data.frames import ReportError, groups, rate_text
from report.data.text import listed, number
from report.quantities import formula
from report.tables.table import Column, Table, table_of

_TEXT_COLUMNS: Final = 98  # width of the text below a table
_PAGE_ALONE: Final = (
    "numel", "copy_rate", "of_copy", "other", "sent_inter_mb", "rounds",
)  # fmt: skip
"""Columns that only the page shows, because a terminal has no room for them."""
_ROUNDS: Final = Column("rounds", "rounds", "{:d}".format)
OPERATIONS: Final = {
    "encode": "encode", "decode": "decode",
    "decode_sum": "decode and sum 4", "decode_sum_encode": "decode, sum 4 and encode",
    "encode_carried": "encode with carried error", "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """Describes the table of one kind of benchmark: its texts, its columns, and a function that computes its values."""

    name: str  # of the table's files
    title: str
    notes: str  # sentences below the table
    # Returns the labels and the measures of one sample, by column.  Labels are equal in all rounds: texts such as
    # ``where`` and ``configuration``, and sizes such as ``sent_mb``.  A measure is an array (rounds,).
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
        "configuration": f"{names['codec']}, {names['backend']}",
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
        "configuration": f"{names['algorithm']}, {names['codec']}, {carried}",
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
        "configuration": sample.names["policy"],
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
        "configuration": f"{sample.names['chunks']} chunks",
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
        "The copy moves the same elements into an existing buffer, and is timed just before the codec. A codec that "
        "reaches the copy's rate is limited by memory; a slower codec is limited by arithmetic. 'Sum 4' adds the "
        "elements of 4 frames. 'Encode with carried error' adds the error of the previous encoding to the elements, "
        "encodes the sums, and keeps the error of this encoding. A row with 'other arithmetic' is the codec of another "
        "library, which allocates new buffers in each call.",
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
        "Times are those of the slowest rank. Bytes are counted by the ledger, which also counts the bytes that ranks "
        "of a node read from each other's shared memory. The column 'transport' names shared memory only if a hop lies "
        "inside a node. gloo sends fp32, so only rows with the codec fp32 compare messages of the same type.",
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
        "Steps compared with compute alone",
        "Times are those of the slowest rank. Compute alone is a step of the same model, with its optimizer, that "
        "every rank trains by itself without sending anything. A ratio of 1 means that all communication is hidden.",
        _step,
        (
            Column("configuration", "policy"),
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
        "Times are those of the slowest rank. Each of the two hops is also timed by itself, as messages without "
        "encoding. 'Shorter hop hidden' is 1 if all the time of the shorter hop is hidden behind the longer hop.",
        _hops,
        (
            Column("configuration", "reduction"),
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
    """Return one table for each kind of benchmark (codec, collective, step, hops) that occurs in the records.

    Each row is for one configuration in one setting (``where``) and, in the tables of some kinds, for one size, such as
    a number of elements.  The row combines all samples of this configuration, setting and size, from all records: for
    each measured quantity, it holds the median over all rounds of these samples, with the median's interval.  The
    column ``id`` holds the ids of the records from which the samples come, joined by spaces.
    """
    tables = []
    for name, kind in KINDS.items():
        rounds = [
            pd.DataFrame(kind.values(sample)).assign(id=bench.id)
            for bench in benches
            for sample in bench.samples
            if sample.kind == name
        ]
        if not rounds:
            continue
        data = pd.concat(rounds, ignore_index=True)
        measures = [key for key in map(str, data.select_dtypes("float")) if not key.endswith("_mb")]
        labels = [key for key in map(str, data) if key not in (*measures, "id")]
        rows: list[dict[str, Any]] = [
            dict(zip(labels, cells, strict=True))
            | {key: median_interval(list(group[key])) for key in measures}
            | {"id": " ".join(sorted(set(group["id"]))), "rounds": len(group)}
            for _, place in groups(data, ["where"])
            for cells, group in groups(place, labels)
        ]
        caption = "Medians over rounds; each ratio is formed within one round."
        tables.append(table_of(kind.name, kind.title, rows, *kind.columns, caption=caption, notes=kind.notes))
    return tables


def build(results: Path) -> Path:
    """Build the page of a folder with records of ``zeropp bench``, and return the page's path.

    Raises:
        ReportError: If the records come from several machines, versions of the code, or benchmarks.
    """
    benches = read_all(results)
    for field, name in (("pool", "machines or versions of the code"), ("subject", "benchmarks")):
        if len(values := sorted({getattr(bench, field) for bench in benches})) > 1:
            kinds = f"{len(values)} {name} ({', '.join(values)}), which cannot be combined"
            raise ReportError(
                f"{results}: holds records of {kinds}; keep the records of one of these here, and move the others away"
            )
    tables, last = tables_of(benches), benches[-1]
    text = page.fill(
        title=f"zeropp bench {last.subject}",
        kicker="Results of a benchmark",
        heading=("zeropp bench", last.subject),
        emulated=caveats.emulated_by_benches(benches),
        facts=_facts(benches),
        warnings=[f"Missing in the last run: {name} ({reason})." for name, reason in last.missing.items()],
        tables=tables,
        pools=[last.pool],
    )
    return publish(results, tables, lambda _: text)


def _facts(benches: Sequence[Bench]) -> list[tuple[str, str]]:
    """Return the facts in the page's head, as pairs (name, value): when, where and with what code the benchmark ran.

    Machine and code are those of the last record.  A fact without a value is left out.
    """
    machine, code = benches[-1].machine, benches[-1].code
    ran = (bench.started[:16].replace("T", " ") for bench in (benches[0], benches[-1]))
    facts = {
        "runs": len(benches),
        "ran": " to ".join(dict.fromkeys(ran)),
        **{name: machine.get(name) for name in ("cpu", "cores", "kernel")},
        "GPUs": listed([str(gpu.get("name")) for gpu in machine.get("gpus") or []]),
        "torch": machine.get("packages", {}).get("torch"),
        "version": code.get("version"),
        "commit": str(code.get("commit") or "")[:12] + (", changed since" if code.get("dirty") else ""),
    }
    return [(name, str(value)) for name, value in facts.items() if value not in (None, "")]


def show(benches: Sequence[Bench], out: Console) -> None:
    """Print the tables of several records of one benchmark, each with its caption, footnotes and definitions."""
    for table in tables_of(benches):
        columns = tuple(column for column in table.columns if column.key not in _PAGE_ALONE)
        replace(table, columns=columns).show(out)
        for sentences in filter(None, (table.caption, table.footnotes, *table.definitions)):
            out.print(textwrap.fill(sentences, _TEXT_COLUMNS), markup=False, highlight=False)


def show_run(record: Path) -> None:
    """Print the tables of one record of ``zeropp bench``, and build the page of the folder that holds the record.

    ``record`` is the path of the record's JSON file.  After the tables, a line is printed for each thing that could not
    be measured.  The last line is the path of the page, which shows all records of the folder.
    """
    (bench,) = [bench for bench in read_all(record.parent) if bench.id == record.stem]
    out = console()
    show([bench], out)
    for name, reason in bench.missing.items():
        out.print(f"not measured: {escape(name)}: {escape(reason)}")
    print(build(record.parent))
