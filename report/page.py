"""Renders the report as one self-contained HTML page with its figures inline."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from report.data import caveats
from report.data.configuration import NAMES
from report.data.metrics import Derived
from report.data.text import NOTHING, counted, listed
from report.draw import theme
from report.draw.figure import Drawn
from report.effects.effects import baselines
from report.tables.provenance import essentials
from report.tables.table import Table
from report.verdicts import MARKS, Verdicts, verdicts

_HERE: Final = Path(__file__).parent
_COMMIT: Final = 12  # characters of a commit's hash
_FACTS: Final = {  # facts in the page's head: the name in the records, and the name on the page
    "machine.cpu": "processor", "machine.cores": "cores", "machine.gpus": "GPUs", "machine.kernel": "kernel",
    "machine.packages.torch": "torch", "link.kind": "link", "code.version": "version",
    "code.commit": "commit",
}  # fmt: skip
_LAST: Final = ("setting", "environment")  # tables with a section of their own
_OPTIONAL: Final = (
    "suite", "note", "questions", "sentence", "further", "verdicts", "tones", "shows", "marked", "summary", "figures",
    "last", "failures",
)  # fmt: skip
_INTERVAL: Final = re.compile(
    rf"(\([^()]*\)|± \S+|to [+-]?[\d.e-]+$)( [{''.join(MARKS.values())}{caveats.TAKEN}])*"
)
_LONGEST_NAMES: Final = 60  # characters of configurations in a title
_SHORT: Final = 16  # rows of a summary that stands before the figures


def render(derived: Derived, drawn: Sequence[Drawn], tables: Sequence[Table]) -> str:
    """Return the page as HTML, with the figures ``drawn`` and the ``tables``, all of which have data."""
    frames = derived.frames
    by_name = {table.name: table for table in tables}
    first = [table for table in tables if table.name == "summary" and len(table.data) <= _SHORT]
    apart = {"verdicts", "failures", *_LAST, *(table.name for table in first)}
    subject, head = heading(derived), verdicts(derived)
    shows = next((figure for figure in drawn if figure.figure.name == head.figure), next(iter(drawn), None))
    modelled = ", on a modelled link" if derived.finished["modelled"].any() else ""
    suite = "" if derived.finished.empty else f": {frames.suite}"
    return fill(
        suite=frames.suite,
        title=f"{' '.join(filter(None, subject))}{suite}{modelled}",
        kicker=f"Results of suite {frames.suite}{modelled}",
        heading=subject,
        questions=frames.questions,
        sentence=head.first.replace("n = ", "n\u00a0=\u00a0"),
        further=head.further.replace("n = ", "n\u00a0=\u00a0"),
        verdicts=_head_table(head, by_name["verdicts"]) if "verdicts" in by_name else (),
        tones={mark: verdict.replace(" ", "-") for verdict, mark in MARKS.items()},
        shows=shows,
        emulated=caveats.emulated_by_trials(frames),
        facts=facts(derived),
        warnings=[*head.lines[1:], *caveats.warnings(derived)],
        figures=[figure for figure in drawn if figure is not shows],
        note=caveats.modelled_in_words(derived),
        marked=derived.disturbed,
        summary=first,
        tables=[table for table in tables if table.name not in apart],
        last=[by_name[name] for name in _LAST if name in by_name],
        failures=by_name.get("failures"),
        pools=frames.pools,
    )


def _head_table(head: Verdicts, table: Table) -> tuple[Table, Table, str]:
    """Split the table of verdicts into the rows that the page shows and the rows that are folded away.

    Returns both parts as tables, and the label with which a reader unfolds the second part, such as ``3 more rows``.
    ``head`` says which rows are shown, and ``table`` is the table of verdicts, possibly with other columns.
    """
    shown, rest = head.parts(table)
    noun = "more row" if table.places else "more configuration"
    return shown, rest, counted(len(rest.data), noun)


def fill(**parts: Any) -> str:
    """Return the HTML of the template ``page.html``, filled with ``parts``.

    ``parts`` has a value for each variable of the template.  A variable that is named in ``_OPTIONAL`` may be left out;
    it is then empty.
    """
    return render_template("page.html", {"full": theme.WIDTH} | dict.fromkeys(_OPTIONAL, ()) | parts)


def render_template(template: str, parts: Mapping[str, Any]) -> str:
    """Return the HTML of a template file of this folder, filled with ``parts`` and the style sheet ``page.css``."""
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["unbroken"] = unbroken
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    return environment.get_template(template).render(parts, style=style)


def unbroken(cell: str) -> str:
    """Return a cell's text with non-breaking spaces inside its interval, so that a browser breaks no line there.

    For example, in ``2.36 (2.05 to 2.72) ▲`` only the space before the parenthesis stays an ordinary space.
    """
    return _INTERVAL.sub(lambda found: found[0].replace(" ", "\u00a0"), cell)


def heading(derived: Derived) -> tuple[str, str]:
    """Return the page's heading in two parts; the page prints the second part as a name.

    The first of these cases that applies decides:

    * No trial has finished: ``No finished trial of``, and the name of the suite.
    * No configuration is compared with the baseline: an empty part, and the baseline.
    * The names of the compared configurations are short: ``A and B against``, and the baseline.
    * All configurations have one strategy, and the suite names no baseline: ``4 configurations of``, and the strategy.
    * Otherwise: ``3 configurations in 2 settings against``, and the baseline.  The settings are the settings in which
      a compared configuration and a baseline ran; a single setting is not mentioned.
    """
    if derived.finished.empty:
        return "No finished trial of", derived.frames.suite
    compared = derived.compared
    if not compared.contrast:
        return "", compared.baseline
    if len(names := listed(list(compared.contrast))) <= _LONGEST_NAMES:
        return f"{names} against", compared.baseline
    strategies = {str(name) for name in derived.finished["strategy"]}
    if len(strategies) == 1 and not compared.named_in_suite:
        (strategy,) = strategies
        return f"{len(compared.contrast) + 1} configurations of", NAMES.get(strategy, strategy)
    number = counted(len(compared.contrast), "configuration")
    of_contrast = derived.finished[derived.finished["configuration"].isin(compared.contrast)]
    settings = len({*of_contrast["setting"]} & {*baselines(derived)})
    where = f" in {settings} settings" if settings > 1 else ""
    return f"{number}{where} against", compared.baseline


def facts(derived: Derived) -> list[tuple[str, str]]:
    """Return the facts in the page's head, as pairs (name, value): when, where and with what code the trials ran."""
    frames, ran = derived.frames, derived.finished
    known = {
        str(fact): listed(sorted({value[:_COMMIT] if fact == "code.commit" else value for value in values}))
        for fact, values in frames.facts.groupby("fact")["value"]
    }
    interrupted = f", {frames.interrupted} interrupted, not yet run again" if frames.interrupted else ""
    started = sorted(ran["started"].str[:16].str.replace("T", " "))
    head = [
        ("suite", frames.suite),
        ("trials", f"{len(ran)} finished, {len(frames.failures)} failed{interrupted}"),
        ("ran", " to ".join(dict.fromkeys([*started[:1], *started[-1:]])) or NOTHING),
        *essentials(frames, ran),
    ]
    if frames.shared:
        head.append(("all policies", ", ".join(f"{name} {value}" for name, value in frames.shared.items())))
    shown = [(name, known.get(fact, "null")) for fact, name in _FACTS.items()]
    head += [(name, value) for name, value in shown if value not in ("[]", "null")]
    if (taken := caveats.taken_fact(derived)) is not None:
        head.append(("processors taken by others", taken))
    if "true" in str(known.get("code.dirty")):
        head.append(("checkout", "changed since its commit"))
    return head
