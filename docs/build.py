"""Builds the documents that quote numbers, from hand-written templates and the committed records.

``python -m docs.build`` writes the documents and their figures, and prints the paths of the files that changed.
``python -m docs.build --check`` writes nothing.  It prints each line with a number that differs from the records, and
each claim that the records no longer support, and exits with status 1 if there are any.  Both commands build all
templates, or only those whose names they are given.

Templates call the functions of :mod:`docs.numbers`, and also:

- ``figure(suite, name="")``: draws a figure of the suite, by default the figure that shows its verdicts, and links it;
- ``verdicts(suite)``: the suite's verdict table;
- ``finding(suite)``: the sentence above this table on the suite's page;
- ``assert_better(estimate)``, ``assert_worse(estimate)``, ``assert_not_significant(estimate)`` and
  ``assert_that(condition, claim)``: print nothing, and fail the build if the records do not support the claim.
"""

from __future__ import annotations

import difflib
import multiprocessing
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from docs import numbers
from docs.numbers import ROOT, DocumentError, Estimate
from harness.errors import Refusal
from harness.measure import machine
from report import verdicts
from report.data.metrics import Derived
from report.draw.figure import style_of
from report.figures.all_figures import FIGURES
from report.tables.table import markdown

DOCS: Final = Path("docs")
DOCUMENTS: Final = {
    "README.md.j2": Path("README.md"),
    "results.md.j2": DOCS / "results.md",
    "questions.md.j2": DOCS / "questions.md",
    "paper.md.j2": DOCS / "paper.md",
    "suites.md.j2": Path("suites/README.md"),
}
"""Templates in docs/, with the documents that they make."""
_LONGEST: Final = 100  # characters of a line in a message
_OPEN_ROWS: Final = 16  # rows of a verdict table; a longer table is folded
_NUMBER: Final = re.compile(r"[+-]?\d[\d,.]*(?:e[+-]\d+)?")
# The id of a clip path, as in id="p71bd74362c" and url(#p71bd74362c).
_CLIP: Final = re.compile(rb"(?<=[\"#])p[0-9a-f]{10}(?=[\")])")


@dataclass(frozen=True)
class Head:
    """The parts at the beginning of a suite's page that documents may show."""

    sentence: str
    table: str  # the verdict table as Markdown
    rows: int  # of this table
    figure: str  # name of the figure that shows the verdicts
    svg: bytes | None = None  # the figure, if it was drawn


@dataclass
class Build:
    """The documents and figures that follow from templates and records, and the problems that were found."""

    files: dict[Path, bytes] = field(default_factory=dict)  # by path below the root
    # Claims that the records do not support, and errors of templates; each with its template and line.
    problems: list[str] = field(default_factory=list)
    heads: dict[str, Head] = field(default_factory=dict)  # by suite
    drawn: dict[tuple[str, str], bytes] = field(default_factory=dict)  # figures by suite and name

    def prepare(self, texts: Iterable[str], processes: int) -> None:
        """Read the suites that templates name, and draw the figure of each suite's verdicts, in parallel."""
        named = set(re.findall(r"[\"'](\w+)[\"']", " ".join(texts)))
        suites = [suite for suite in numbers.suites() if suite in named]
        drawing = any("figure(" in text for text in texts)
        if processes < 2 or len(suites) < 2:
            return
        context = multiprocessing.get_context("spawn")  # threads of NumPy do not survive a fork
        with ProcessPoolExecutor(min(processes, len(suites)), context) as pool:
            heads = pool.map(partial(_read, drawing=drawing), suites)
            for suite, (records, head) in zip(suites, heads, strict=True):
                numbers.keep(suite, records)
                self.heads[suite] = head
                if head.svg is not None:
                    self.drawn[suite, head.figure] = head.svg

    def head(self, suite: str) -> Head:
        """Return the beginning of a suite's page; read it now unless :meth:`prepare` has read it."""
        if suite not in self.heads:
            self.heads[suite] = _read(suite, drawing=False)[1]
        return self.heads[suite]

    def add(self, template: str, folder: Path = ROOT / DOCS) -> None:
        """Render one template.  If it asks for something that does not exist, add a problem that names the line."""
        path = DOCUMENTS[template]
        environment = Environment(
            loader=FileSystemLoader(folder), undefined=StrictUndefined, autoescape=False,  # noqa: S701  # Markdown
            trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, extensions=["jinja2.ext.do"],
        )  # fmt: skip
        functions = {function.__name__: function for function in numbers.FUNCTIONS}
        try:
            text = environment.get_template(template).render(functions | self._functions(template, path))
        except (DocumentError, Refusal, TemplateError) as error:
            self.problems.append(f"{DOCS / template}:{_line_of(error, template)}: {error}")
            return
        head = f"<!-- Written from {DOCS / template} by `python -m docs.build`: edit the template. -->\n"
        self.files[path] = (head + text).encode()

    def _functions(self, template: str, path: Path) -> dict[str, Callable[..., str]]:
        """Return the functions that templates may call besides those of :mod:`docs.numbers`, by name.

        Links to figures are relative to the folder of the document, whose ``path`` is below the root.
        """
        above = "../" * (len(path.parts) - 1)

        def figure(suite: str, name: str = "") -> str:
            shown = self.head(suite).figure
            name = name or shown
            title = numbers.title_of_figure(name)
            drawn = DOCS / "figures" / (f"{suite}.svg" if name == shown else f"{suite}_{name}.svg")
            if (suite, name) not in self.drawn:
                self.drawn[suite, name] = _svg(suite, name)
            self.files[drawn] = self.drawn[suite, name]
            link = drawn.relative_to(DOCS) if path.parent == DOCS else f"{above}{drawn}"
            return f"![{title}]({link})"

        def finding(suite: str) -> str:
            return self.head(suite).sentence

        def verdict_table(suite: str) -> str:
            head = self.head(suite)
            if head.rows <= _OPEN_ROWS:
                return head.table
            return f"<details><summary>{head.rows} rows</summary>\n\n{head.table}\n\n</details>"

        def holds(*, condition: bool, claim: str) -> str:
            if not condition:
                self.problems.append(
                    f"{DOCS / template}:{_line_in(template)}: the records do not support: {claim}"
                )
            return ""

        def compared(estimate: Estimate, verdict: str) -> str:
            claim = f"{estimate.what} is {verdict}: it is {estimate}, {estimate.verdict}"
            return holds(condition=estimate.verdict == verdict, claim=claim)

        return {
            "figure": figure,
            "finding": finding,
            "verdicts": verdict_table,
            "assert_better": lambda estimate: compared(estimate, "better"),
            "assert_worse": lambda estimate: compared(estimate, "worse"),
            "assert_not_significant": lambda estimate: compared(estimate, "not significant"),
            "assert_that": lambda condition, claim: holds(condition=bool(condition), claim=claim),
        }


def build(templates: Sequence[str] = tuple(DOCUMENTS)) -> Build:
    """Build the documents of these templates, by default all, and their figures.

    Raises:
        RecordError: If a record was edited, or a file is no archive.
    """
    made = Build()
    paths = [ROOT / DOCS / template for template in templates]
    made.prepare([path.read_text(encoding="utf-8") for path in paths if path.exists()], machine.cores())
    for template in templates:
        made.add(template)
    return made


def differences(root: Path = ROOT, made: Build | None = None) -> list[str]:
    """Return a line for each claim that records do not support, and for each committed line that must change."""
    made = build() if made is None else made
    lines = list(made.problems)
    for path, expected in made.files.items():
        committed = (root / path).read_bytes() if (root / path).exists() else b""
        if _same(committed, expected):
            continue
        if path.suffix == ".svg":
            lines.append(f"{path}: is not the figure of the committed records; run `python -m docs.build`")
        else:
            lines += [f"{path}:{place}" for place in _moved(committed.decode("utf-8"), expected.decode())]
    return lines


def _same(committed: bytes, expected: bytes) -> bool:
    """Return whether two files are equal, except for the ids of clip paths in figures.

    Matplotlib computes these ids from coordinates, whose last bits depend on the processor.
    """
    return _CLIP.sub(b"", committed) == _CLIP.sub(b"", expected)


def _moved(committed: str, expected: str) -> list[str]:
    """Return a message for each line of a document that differs: the line's number, and what differs in the line.

    For example, ``12: 2.39 should be 2.36 by the records, in '…ZeRO++ is 2.39x faster…'``.
    """
    before, after = committed.splitlines(), expected.splitlines()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    moved = []
    for kind, i, j, k, m in matcher.get_opcodes():
        if kind == "replace" and j - i == m - k:
            moved += [f"{i + n + 1}: {_change(before[i + n], after[k + n])}" for n in range(j - i)]
        elif kind != "equal":
            moved.append(f"{i + 1}: {_change(' '.join(before[i:j]), ' '.join(after[k:m]))}")
    return moved


def _change(line: str, other: str) -> str:
    """Return as text how two lines differ: the first number that differs, or else what stands around the difference."""
    same = next(
        (n for n, (a, b) in enumerate(zip(line, other, strict=False)) if a != b), min(len(line), len(other))
    )
    old, new = _NUMBER.findall(line), _NUMBER.findall(other)
    begin = max(0, same - _LONGEST // 2)
    context = repr(("…" if begin else "") + line[begin : begin + _LONGEST])
    if _NUMBER.sub("", line) == _NUMBER.sub("", other) and len(old) == len(new):
        was, now = next(pair for pair in zip(old, new, strict=True) if pair[0] != pair[1])
        return f"{was} should be {now} by the records, in {context}"
    return f"is {context}, should be {('…' if begin else '') + other[begin : begin + _LONGEST]!r}"


def _read(suite: str, *, drawing: bool) -> tuple[Derived, Head]:
    """Read a suite's records, and return them with the beginning of the suite's page; draw its figure if asked."""
    derived = numbers.derived(suite)
    found = verdicts.verdicts(derived)
    figure = _shows(derived, found.figure)
    svg = _svg(suite, figure) if drawing else None
    table = f"{found.table.markdown_rows()}\n{markdown(found.table.footnotes)}".strip()
    return derived, Head(found.sentence, table, len(found.table.data), figure, svg)


def _shows(derived: Derived, wanted: str) -> str:
    """Return ``wanted`` if the records have rows for this figure, else the first figure of the page that has rows."""
    ordered = sorted(FIGURES, key=lambda figure: figure.name != wanted)
    return next(figure.name for figure in ordered if not figure.table(derived).empty)


def _svg(suite: str, name: str) -> bytes:
    """Draw a figure of a suite, and return the content of its SVG file."""
    derived = numbers.derived(suite)
    drawing = next(figure for figure in FIGURES if figure.name == name)
    with tempfile.TemporaryDirectory() as folder:
        drawn = drawing.draw(derived, Path(folder), style_of(derived), ("svg",))
    if drawn is None:
        raise DocumentError(f"{suite}: figure {name!r} has no data in this suite: name another figure")
    return drawn.svg


def _line_in(template: str) -> int:
    """Return the line of a template from which this function was called; 0 if it is not known."""
    frame: Any = sys._getframe()  # noqa: SLF001  # Jinja compiles templates to functions and knows their lines
    while frame is not None:
        compiled = frame.f_globals.get("__jinja_template__")
        if compiled is not None and compiled.name == template:
            return int(compiled.get_corresponding_lineno(frame.f_lineno))
        frame = frame.f_back
    return 0


def _line_of(error: Exception, template: str) -> int:
    """Return the line of a template at which an error arose; 0 if it is not known."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(template)
    ]
    return getattr(error, "lineno", None) or (frames[-1].lineno if frames else None) or 0


def main(arguments: list[str]) -> int:
    """Write or check documents; returns the exit status."""
    checks = arguments[:1] == ["--check"]
    templates = arguments[1:] if checks else arguments
    if not {*templates} <= {*DOCUMENTS}:
        sys.stderr.write(
            f"usage: python -m docs.build [--check] [TEMPLATE...]\ntemplates: {', '.join(DOCUMENTS)}\n"
        )
        return 2
    made = build(templates or tuple(DOCUMENTS))
    if checks:
        lines = differences(made=made)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        return 1 if lines else 0
    for path, content in made.files.items():
        if not (ROOT / path).exists() or not _same((ROOT / path).read_bytes(), content):
            (ROOT / path).parent.mkdir(exist_ok=True)
            (ROOT / path).write_bytes(content)
            sys.stdout.write(f"{path}\n")
    sys.stderr.write("".join(f"{problem}\n" for problem in made.problems))
    return 1 if made.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
