"""Builds a page from files of pytest-benchmark (``tox -e bench``).

The page has a table for each group of benchmarks, with medians over the rounds of the last run.
A comparison of two benchmarks is the ratio of their medians.  It has no confidence interval, because the benchmarks of
a group run one after the other, and no round of one is measured together with a round of the other.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

from harness.records.benchmark_file import BenchmarkFile, Timed, read_all
from harness.records.confidence_intervals import median_interval
from report import page
from report.build import publish
from report.data.frames import groups
from report.data.text import number
from report.tables.table import Column, Table, table_of

_GROUP: Final = "benchmarks"  # group of the benchmarks that name no group
# Most characters of the name of a table's files, without the number that distinguishes equal names.
_LONGEST_NAME: Final = 80
_COLUMNS: Final = (
    Column("configuration", "Benchmark"),
    Column("milliseconds", "ms", number(3)),
    Column(
        "times", "speed, reference = 1", number(3),
        "Speed: the reference's median over the benchmark's, if both have equally many elements.",
    ),
    Column("rate", "GB/s", number(3), "GB/s: bytes that a call reads and writes, each counted once, over the median."),
    Column("sent_mb", "MB sent", number(3), "MB sent: bytes that all ranks send in a call, by the wire's ledger."),
    Column(
        "change", "times the previous run's ms", number(3),
        "Times the previous run's ms: this run's median over the median of the run before it in the same folder.",
    ),
    Column("rounds", "rounds", "{:d}".format),
)  # fmt: skip


def tables_of(files: Sequence[BenchmarkFile]) -> list[Table]:
    """Return one table for each group of benchmarks in the last file, with one row per benchmark.

    ``files`` are the files of all runs, in the order in which they were written.  The file before the last gives the
    previous run's medians; all earlier files are ignored.
    """
    import pandas as pd

    last, before = files[-1], {}
    if len(files) > 1:
        before = {timed.identity: timed.stats.median for timed in files[-2].benchmarks}
    data = pd.DataFrame([{"group": timed.group or _GROUP, "timed": timed} for timed in last.benchmarks])
    tables, names = [], set[str]()
    alike = Counter(timed.name for timed in last.benchmarks)
    for (group,), rows in groups(data, ["group"]):
        members: list[Timed] = list(rows["timed"])
        reference = next((timed for timed in members if timed.extra_info.get("reference")), None)
        names.add(name := _file_name(str(group), names))
        title = f"{str(group)[:1].upper()}{str(group)[1:]}"
        tables.append(
            table_of(
                name, title, [_row(timed, reference, before, whole=alike[timed.name] > 1) for timed in members],
                *_COLUMNS,
                caption="Medians over rounds of the last run.",
            )
        )  # fmt: skip
    return tables


def _file_name(group: str, taken: Collection[str]) -> str:
    """Return a name for the files of a group's table, such as ``all-gather`` for the group ``All gather``.

    The name is the group's name in lower case, with one hyphen in place of each run of characters other than a to z and
    digits, and cut to 80 characters.  The names in ``taken`` belong to other groups.  If the name is among them, a
    number is appended, as in ``codecs-2``.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", group.lower()).strip("-")[:_LONGEST_NAME].strip("-") or _GROUP
    names = (plain if place == 1 else f"{plain}-{place}" for place in itertools.count(1))
    return next(name for name in names if name not in taken)


def _row(timed: Timed, reference: Timed | None, before: dict[str, float], *, whole: bool) -> dict[str, Any]:
    """Return the row of one benchmark: a dict of its cells by the keys of ``_COLUMNS``.

    Four cells may be None:

    * ``times`` (how many times as fast as the reference), if there is no reference, or if the reference has another
      number of elements;
    * ``rate``, if the test did not note how many bytes a call reads and writes;
    * ``sent_mb``, if the test did not note how many bytes are sent;
    * ``change`` (median seconds over those of the previous run), if the previous run did not have the benchmark.

    Args:
        timed: The benchmark.
        reference: The benchmark with which all benchmarks of the group are compared; None if the group has none.
        before: The median seconds of each benchmark in the previous run, by the benchmark's identity.
        whole: Whether the row's name includes the file of the test.  The caller sets it if the run has several
            benchmarks of one name.
    """
    stats, moved, sent = timed.stats, timed.noted("moved_bytes"), timed.noted("sent_bytes")
    alike = reference is not None and reference.noted("elements") == timed.noted("elements")
    return {
        "configuration": timed.identity if whole else timed.name.removeprefix("test_"),
        "milliseconds": median_interval([1e3 * second for second in stats.data or [stats.median]]),
        "times": reference.stats.median / stats.median if reference is not None and alike else None,
        "rate": None if moved is None else moved / stats.median / 1e9,
        "sent_mb": None if sent is None else sent / 1e6,
        "change": stats.median / before[timed.identity] if timed.identity in before else None,
        "rounds": stats.rounds,
    }


def build(results: Path) -> Path:
    """Build the page of a folder with files of pytest-benchmark, and return the page's path.

    Raises:
        RecordError: If the folder holds no JSON files, or a JSON file that pytest-benchmark did not write.
    """
    files = read_all(results)
    last, tables = files[-1], tables_of(files)
    cpu = last.machine_info.get("cpu")
    facts = {
        "runs": str(len(files)),
        "ran": last.datetime[:16].replace("T", " "),
        "processor": str(cpu.get("brand_raw") or "") if isinstance(cpu, dict) else "",
        "Python": str(last.machine_info.get("python_version") or ""),
        "commit": str(last.commit_info.get("id") or "")[:12]
        + (", changed since" if last.commit_info.get("dirty") else ""),
        "pytest-benchmark": last.version,
    }
    text = page.fill(
        title="Benchmarks of the tests",
        kicker="Results of pytest-benchmark",
        heading=("Benchmarks in", "tests/bench"),
        emulated="",
        facts=[(name, value) for name, value in facts.items() if value],
        warnings=[],
        tables=tables,
        pools=[],
    )
    return publish(results, tables, lambda _: text)
