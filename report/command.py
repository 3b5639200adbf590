"""``zeropp report``, ``archive``, ``bundle`` and ``compare``: pages and files made of records."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from harness.cluster import interrupts
from harness.cluster.interrupts import REFUSED
from harness.errors import Refusal, one_line, visible
from harness.measure import machine
from harness.records import archive, bench_record, benchmark_file
from harness.records.trial_record import RecordError, read_valid, write_whole
from harness.suites.parse_quantity import parse_rate
from harness.suites.suite_file import name_of
from harness.terminal_table import console
from harness.whole_file import is_hidden
from impl import named_object
from report import seconds_key, stamp
from report.stamp import PAGE

if TYPE_CHECKING:
    from report.effects.step_seconds import StepsFrom

SOME_FAILED: Final = 1
_WIDTH: Final = 178.0  # mm, of figures
ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = Path("results")
ResultsFolder = Annotated[Path, typer.Option("--results", help="Folder of all suites' results.")]
Suite = Annotated[str, typer.Argument(help="Suite name or file, or results folder.", metavar="SUITE")]


def report(
    suite: Suite = "",
    results: ResultsFolder = RESULTS,
    *,
    check: Annotated[
        bool,
        typer.Option("--check", help="Only print where README and docs differ from the committed records."),
    ] = False,
    explain: Annotated[
        tuple[str, str, str] | None,
        typer.Option(
            help="Only print the records behind one number of a table, and its definition.",
            metavar="TABLE ROW COLUMN",
        ),
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(help="Print only these columns of a table; repeatable.", metavar="TABLE=COLUMN;COLUMN"),
    ] = None,
    width: Annotated[
        float,
        typer.Option(min=60, max=400, help="Width of figures in mm; a paper's column has 84.", metavar="MM"),
    ] = _WIDTH,
    seconds: Annotated[
        list[str] | None,
        typer.Option(
            help="Take the seconds of a step from this suite, results folder or archive, for net speed-ups; "
            "repeatable.",
            metavar="SUITE",
        ),
    ] = None,
    machine: Annotated[
        Path | None,
        typer.Option(
            help="Also predict the seconds of a step on this machine, for net speed-ups.",
            metavar="MACHINE.toml",
        ),
    ] = None,
    rate: Annotated[
        str, typer.Option(help="Link rate for --machine; by default each trial's own rate.", metavar="RATE")
    ] = "",
    pdf: Annotated[
        bool, typer.Option("--pdf", help="Also draw figures as PDF, with embedded fonts.")
    ] = False,
    png: Annotated[bool, typer.Option("--png", help="Also draw figures as PNG.")] = False,
) -> None:
    """Build a suite's report from its records and print its path; for a folder of archives, build every report."""
    drawn = {"--columns": columns, "--width": width != _WIDTH, "--pdf": pdf, "--png": png}
    sources = {"--seconds": seconds, "--machine": machine, "--rate": rate}
    if check:
        _refuse_beside("--check only compares README and docs with the committed records", {
            "SUITE": suite, "--explain": explain, **drawn, **sources,
        })  # fmt: skip
        if not (ROOT / "docs" / "build.py").is_file():
            raise Refusal(
                f"--check needs the README and docs of the sources, and {ROOT} has no docs: run it in a clone"
            )
        sys.path.insert(0, str(ROOT))
        from docs.build import differences

        if differing := differences():
            print("\n".join(differing))
            raise typer.Exit(SOME_FAILED)
        return
    folder = _existing_folder(suite, results)
    requested = _columns(columns or [])
    forms = [form for form, asked in (("pdf", pdf), ("png", png)) if asked]
    steps = _steps_from(seconds or [], machine, rate, results)
    if archives := sorted(path for path in folder.glob(f"*{archive.SUFFIX}") if not path.is_dir()):
        if requested or explain or steps:
            many = f"{folder} holds archives ({len(archives)})"
            needing = "--columns, --explain, --seconds and --machine"
            raise Refusal(
                f"{many}: {needing} need the records of one suite; name the results folder of a suite, or remove these "
                "options"
            )
        _build_archives(archives, width, forms)
        return
    if explain is not None:
        _refuse_beside("--explain only prints one number", drawn)
        if bench_record.holds(folder) or benchmark_file.holds(folder):
            raise Refusal(f"{folder} holds a benchmark's records: --explain is for suites; remove it")
        from report.build import explanation

        print(visible(explanation(folder, *explain, steps)))
        return
    build_report(folder, requested, width, forms, steps)


def _refuse_beside(why: str, options: Mapping[str, object]) -> None:
    """Raise a Refusal if the user gave one of the ``options``, all of which have no effect here.

    ``options`` maps names to values; a value that is false was not given.  ``why`` begins the error message, and says
    why the options have no effect.
    """
    if given := [option for option, value in options.items() if value]:
        raise Refusal(f"{why}: remove {', '.join(given)}")


def archive_records(
    suite: Suite,
    into: Annotated[Path, typer.Argument(help="Folder in which the archive is written.", metavar="FOLDER")],
    results: ResultsFolder = RESULTS,
) -> None:
    """Write a suite's records into one compressed file, SUITE.tar.xz, and print its path."""
    folder = _existing_folder(suite, results)
    print(archive.pack(folder, _packed_into(folder, into)))


def bundle(
    suite: Suite,
    into: Annotated[Path, typer.Argument(help="Folder in which the file is written.", metavar="FOLDER")],
    results: ResultsFolder = RESULTS,
) -> None:
    """Write records, suite, packages, commands and verdicts into one file, for a conference's artifact evaluation."""
    folder = _existing_folder(suite, results)
    from report.bundle import bundle as write_bundle

    print(write_bundle(folder, _packed_into(folder, into)))


def _packed_into(folder: Path, into: Path) -> Path:
    """Return ``into``, the folder for an archive, after checking that it is not the results folder ``folder``.

    If the archive were in the results folder, a report would show the archive instead of the records there.

    Raises a Refusal if both are the same folder.
    """
    if os.path.realpath(into) == os.path.realpath(folder):  # Path.resolve() raises for a link to itself
        raise Refusal(
            f"{into} is the results folder itself, and zeropp report would show the archive in place of its records: "
            "name another folder"
        )
    return into


def compare(
    first: Annotated[Path, typer.Argument(help="Results folder from before a change.", metavar="BEFORE")],
    second: Annotated[
        Path, typer.Argument(help="Results folder of the same suite, after the change.", metavar="AFTER")
    ],
    *,
    margin: Annotated[str, typer.Option(help="Step times within this margin count as the same.")] = "2%",
    html: Annotated[Path | None, typer.Option(help="Also write an HTML page.", metavar="FILE")] = None,
) -> None:
    """Compare two runs of a suite, before and after a change; status 1 if anything got slower."""
    percent = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", margin)
    if percent is None or not 0 < float(percent[1]) < 100:
        raise Refusal(f"--margin {margin}: expected a number above 0 and below 100 with %, such as 2%")
    from report.compare import compare as compare_folders
    from report.compare import page

    comparison, out = compare_folders(first, second, float(percent[1]) / 100), console()
    if html is not None:  # before anything is printed
        write_whole(html, page(comparison))
    comparison.table.show(out)
    out.print("\n".join(comparison.notes), markup=False, highlight=False, soft_wrap=True)
    if comparison.worse:
        raise typer.Exit(SOME_FAILED)


def _build_archives(archives: Sequence[Path], width: float, forms: Sequence[str]) -> None:
    """Build the page of each archive, in several processes; then print the paths of the pages, and the errors.

    If a page cannot be built, the other pages are built nevertheless.
    Raises ``typer.Exit`` with status 2 at the end if a page could not be built.
    """
    processes, pages, errors = min(len(archives), machine.cores()), list[Path](), list[Exception]()
    interrupts.take_over()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _leave_interrupts) as pool, _ended_with_this_process():
        built = {
            packed: pool.submit(_build_archive, packed, width, forms)
            for packed in sorted(archives, key=lambda path: -path.stat().st_size)  # the longest begin first
        }
        for packed in archives:
            try:
                pages.append(built[packed].result())
            except (RecordError, Refusal) as error:
                errors.append(error)
    print("".join(f"{page}\n" for page in pages), end="")
    for why in errors:
        print(f"zeropp: {one_line(str(why))}", file=sys.stderr)
    if errors:
        raise typer.Exit(REFUSED)


def _leave_interrupts() -> None:
    """Let a child process ignore Ctrl-C; its parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def _ended_with_this_process() -> Iterator[None]:
    """Return a context that ends all child processes at once if Ctrl-C interrupts the body of ``with``."""
    try:
        yield
    except KeyboardInterrupt:
        for child in multiprocessing.active_children():
            child.terminate()
        raise


def _build_archive(packed: Path, width: float, forms: Sequence[str]) -> Path:
    """Unpack an archive of records, build its page in this child process, and return the page's path."""
    from report.build import build

    with named_object.forbidden():  # no import of users' modules in the child process either
        return build(archive.unpack(packed), width=width, forms=forms)


def build_report(
    folder: Path,
    columns: Mapping[str, Sequence[str]] | None = None,
    width: float = _WIDTH,
    forms: Sequence[str] = (),
    steps: StepsFrom | None = None,
) -> None:
    """Build the page of a results folder, and print the page's path.

    The folder holds records of a suite, records of ``zeropp bench``, or files of pytest-benchmark.

    Args:
        folder: The results folder.
        columns: For suites: the columns that a table prints, by the name of the table.
        width: For suites: width of figures in mm.
        forms: For suites: formats of figures besides SVG, ``pdf`` and ``png``.
        steps: For suites: other sources of the seconds of a step, for net speed-ups.

    Raises:
        Refusal: If the folder holds benchmarks, and an argument for suites is given.
    """
    interrupts.take_over()
    of_bench, of_tests = bench_record.holds(folder), benchmark_file.holds(folder)
    if (of_bench or of_tests) and (columns or forms or width != _WIDTH or steps):
        raise Refusal(
            f"{folder} holds a benchmark's records: --columns, --width, --seconds, --machine, --pdf and --png are for "
            "suites; remove these options"
        )
    if of_bench:
        from report.bench_page import build as build_bench

        print(build_bench(folder))
        return
    if of_tests:
        from report.benchmark_page import build as build_benchmarks

        print(build_benchmarks(folder))
        return
    from report.build import build

    print(build(folder, columns=columns, width=width, forms=forms, steps=steps))


def report_after_run(folder: Path) -> None:
    """Build a suite's page, print the page's path, and print the page's first sentences on standard error.

    The page is not built again if this version of the code has already built it from the same records
    (:mod:`report.stamp`).
    """
    interrupts.take_over()
    if (sentences := stamp.sentences_of(folder)) is None:
        from report.build import build
        from report.verdicts import of_folder

        with named_object.forbidden():
            build(folder)
            sentences = stamp.sentences_of(folder) or of_folder(folder).lines
    print(folder / PAGE)
    print(visible("\n".join(sentences)), file=sys.stderr)


def named_seconds(folder: Path) -> str:
    """Return the value of the key ``seconds`` in the suite of a results folder; empty if the suite has no such key.

    The key names another suite, whose records give the seconds of a step for net speed-ups.  The value is that of the
    suite file as it was when the folder's latest trial ran.  A report uses this value, since the file may have changed.
    """
    runs = [record.run for record in read_valid(folder)[0] if record.run is not None]
    return seconds_key.named(folder, runs[-1]) if runs else ""


def _columns(options: Sequence[str]) -> dict[str, list[str]]:
    """Return the columns of each table that ``--columns`` names; ``options`` are texts ``TABLE=COLUMN;COLUMN``.

    For example, ``["summary=Step, s;Tokens/s"]`` gives ``{"summary": ["Step, s", "Tokens/s"]}``.
    """
    columns: dict[str, list[str]] = {}
    for text in options:
        table, _, names = map(str.strip, text.partition("="))
        if not (table and names):
            raise Refusal(
                f"--columns {text}: expected TABLE=COLUMN;COLUMN, such as 'summary=Step, s;Tokens/s'"
            )
        columns.setdefault(table, []).extend(name.strip() for name in names.split(";"))
    return columns


def _steps_from(seconds: Sequence[str], machine: Path | None, rate: str, results: Path) -> StepsFrom | None:
    """Return the sources of the seconds of a step that ``--seconds``, ``--machine`` and ``--rate`` name.

    A report computes net speed-ups from these seconds.

    Args:
        seconds: Values of ``--seconds``: suites, results folders or archives, whose records have the seconds.
        machine: Value of ``--machine``: the file of a machine, by which seconds are predicted; None without the option.
        rate: Value of ``--rate``: the rate of the machine's link, such as ``50 Mbit/s``; empty without the option.
        results: Folder of all suites' results, in which names of suites are looked up.

    Returns:
        The sources.  None if neither ``--seconds`` nor ``--machine`` is given.
    """
    if rate and machine is None:
        raise Refusal("--rate sets the link of a machine: add --machine MACHINE.toml, or remove --rate")
    try:
        mbit = parse_rate(rate) if rate else None
    except ValueError as error:
        raise Refusal(f"--rate {rate}: {error}") from None
    folders = []
    for name in seconds:
        packed = [path for path in (Path(name), results / f"{name}{archive.SUFFIX}") if path.is_file()]
        folder = None if name.endswith(archive.SUFFIX) else folder_of(name, results)
        folders.append(folder or next(iter(packed), None) or _existing_folder(name, results))
    if not folders and machine is None:
        return None
    from report.effects.step_seconds import StepsFrom

    return StepsFrom(tuple(folders), machine, mbit)


def folder_of(suite: str, results: Path) -> Path | None:
    """Return the results folder of a suite; ``suite`` is the suite's name, its file, or the results folder itself.

    If ``suite`` is a suite file (``.toml``), the result is this suite's folder in ``results``.

    If ``suite`` is a name or a folder, there are two candidates, in this order: ``suite`` and ``results / suite``.  The
    result is the first candidate that holds records or archives.  If neither holds any, it is the first candidate that
    exists; None if neither exists.

    Raises a Refusal if ``suite`` is a suite file, and the suite has no results folder.
    """
    if suite.endswith(".toml"):
        folder = results / name_of(Path(suite))
        if not folder.is_dir():
            raise Refusal(f"{folder}: there is no such results folder; `zeropp run` makes it")
        return folder
    folders = [path for path in (Path(suite), results / suite) if path.is_dir()] if suite else []
    kept = (path for path in folders if any(path.glob("*.json")) or any(path.glob(f"*{archive.SUFFIX}")))
    return next(kept, next(iter(folders), None))


def _existing_folder(suite: str, results: Path) -> Path:
    """Return the results folder of a suite, as :func:`folder_of` finds it.

    Raises a Refusal if there is no such folder; the message lists the suites that have results.
    """
    if not suite:
        raise Refusal(
            f"no suite given: name a suite ({results} holds {suites_in(results)}) or a results folder"
        )
    if (folder := folder_of(suite, results)) is None:
        unknown = f"unknown suite {suite!r}: {results} holds {suites_in(results)}"
        raise Refusal(
            f"{unknown}; expected a suite with results, or a results folder (for a single trial, use `zeropp show`)"
        )
    return folder


def suites_in(results: Path) -> str:
    """Return the names of the suites that have records in ``results``, as ``a, b``; ``no suites`` if none has.

    Only folders that hold records (``*.json``) are listed; a folder that holds only archives is left out.
    """
    folders = [path for path in results.glob("*") if not is_hidden(path) and any(path.glob("*.json"))]
    names = sorted(path.name for path in folders)
    return ", ".join(names) or "no suites"
