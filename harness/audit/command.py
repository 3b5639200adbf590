"""``zeropp audit``: parses its options, runs the program, and prints what its ranks sent."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from harness.audit import expectations, run, tables
from harness.audit.calls import CSV, Calls, read
from harness.audit.expectations import Expectation
from harness.audit.schemes import model_of
from harness.audit.tables import Report, scheme_sentence, sentences
from harness.errors import Refusal
from harness.records.trial_record import write_whole
from harness.suites.labels import counted
from harness.terminal_table import console, say, show

BROKEN: Final = 1
_STEPS: Final = re.compile(r"(?P<first>\d{1,18})(?P<to>:(?P<last>\d{1,18})?)?")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of ``zeropp audit``, checked before the program starts."""

    command: tuple[str, ...]
    first: int  # first step to report
    last: int | None  # last step to report; None to report all steps from the first on
    expected: tuple[Expectation, ...]
    marker: str  # function whose return ends a step, as module:function; empty if optimizer steps end steps
    elements: int | None  # number of parameters of the model that --model names; None without --model
    model: str  # what --model names
    ranks_per_node: int | None
    folder: Path  # where the audit's files are written


def parse_steps(text: str) -> tuple[int, int | None]:
    """Return the first and the last step that ``--steps`` names, counted from 1.

    ``5`` gives (5, 5), ``2:10`` gives (2, 10), and ``2:``, which has no last step, gives (2, None).

    Raises:
        Refusal: If the text has another form, or if the last step comes before the first.
    """
    found = _STEPS.fullmatch(text.strip())
    if found is None:
        raise Refusal(f"--steps {text}: expected a step or a range, such as 5, 2:10 or 2:")
    first = int(found["first"])
    last = (int(found["last"]) if found["last"] else None) if found["to"] else first
    if first < 1 or (last is not None and last < first):
        raise Refusal(f"--steps {text}: steps count from 1, and the last step must not come before the first")
    return first, last


def options(
    command: Sequence[str],
    *,
    steps: str,
    expect: Sequence[str],
    file: Path | None,
    marker: str,
    model: str,
    ranks_per_node: int | None,
    folder: Path,
) -> Options:
    """Check the options of ``zeropp audit``, and return them as :class:`Options`.

    Raises:
        Refusal: If an option cannot be used.  Nothing has been written then.
    """
    first, last = parse_steps(steps)
    expected = [expectations.parse(text) for text in expect]
    if file is not None:
        expected += expectations.read_file(file)
    if marker and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", marker):
        raise Refusal(f"--step-marker {marker}: expected module:function, such as trainer.loop:train_step")
    elements = run.count_parameters(model) if model else None
    return Options(
        tuple(command), first, last, tuple(expected), marker, elements, model, ranks_per_node, folder
    )


def audit(options: Options) -> tuple[int, Report | None]:
    """Run the program under the audit, and return the program's exit status and the report.

    The report is None in two cases: if no process made a process group, or if there is no step whose calls were read on
    every rank.  The reason, and notes on what the audit could not see, are printed to standard error.
    """
    program = options.command[0]
    if shutil.which(program) is None:  # before anything is written
        raise run.not_started(program, exists=Path(program).is_file())
    run.prepare(options.folder, {"last_step": options.last, "marker": options.marker})
    status = run.run(options.command, options.folder)
    calls = read(options.folder / run.RANKS, options.ranks_per_node)
    errors = console(stderr=True)
    if status:
        say(f"the program ended with status {status}", errors)
    if not calls.ranks:
        say(run.why_nothing(calls.processes, options.command), errors)
        return status, None
    for note in calls.notes:
        say(note, errors)
    if 0 < calls.whole < options.first:
        ended = counted(calls.whole, "step")
        say(
            f"--steps {options.first}: the program made only {ended}; the report covers all of them instead",
            errors,
        )
    report = reported(calls, options)
    if report is None:
        say(
            "no optimizer step ended, so that no call belongs to a step; give --step-marker module:function if the "
            "program has no torch optimizer",
            errors,
        )
    return status, report


def reported(calls: Calls, options: Options) -> Report | None:
    """Compute the report of an audited program from its calls.

    Returns None if there is no step whose calls were read on every rank.
    """
    steps = calls.steps(options.first, options.last)
    if not steps:
        return None
    model = model_of(calls, options.elements, options.model)
    broken = expectations.broken(options.expected, calls, steps, model)
    by = f"calls of {options.marker}" if options.marker else "optimizer steps"
    return tables.report_on(calls, steps, model, by=by, broken=broken, kept=len(options.expected))


def show_report(report: Report, out: Console) -> None:
    """Print the tables and sentences of a report."""
    for sentence in sentences(report):
        say(sentence, out)
    show(tables.call_rows(report), tables.COLUMNS, out, whole=f"{CSV} has all")
    if report.scheme is not None:
        say(scheme_sentence(report.scheme), out)
        show(tables.scheme_rows(report.scheme), tables.SCHEME_COLUMNS, out, whole=f"{CSV} has all")
    if rows := tables.counter_rows(report):
        say(
            "Bytes that the nodes' interfaces sent in all these steps together, without headers of packets:",
            out,
        )
        show(rows, tables.COUNTER_COLUMNS, out, whole=f"{CSV} has all")
    for line in report.broken:
        say(line, out)
    if report.kept and not report.broken:
        say(f"All expectations hold ({report.kept}).", out)


def write_files(report: Report, folder: Path) -> Path:
    """Write the calls of a report as a CSV file into the audit's folder, and return the path of this file."""
    path = folder / CSV
    write_whole(path, tables.as_csv(report))
    return path


def exit_status(program: int, report: Report | None, expected: int) -> int:
    """Return the exit status of ``zeropp audit``.

    Args:
        program: Exit status of the audited program.
        report: The report; None if there is none.
        expected: Number of expectations that the user gave.

    Returns:
        - ``program``, if it is not 0;
        - 1 if an expectation is broken or could not be checked (without a report, none can be checked);
        - 0 in all other cases.
    """
    if program:
        return program
    if report is None:
        return BROKEN if expected else 0
    return BROKEN if report.broken else 0


def warn_unchecked(options: Options, report: Report | None) -> None:
    """If there is no report, print to standard error how many expectations could not be checked."""
    if report is None and options.expected:
        print(
            f"zeropp: {counted(len(options.expected), 'expectation')} could not be checked", file=sys.stderr
        )
