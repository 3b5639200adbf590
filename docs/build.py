"""Builds the documents that have numbers from templates, which a person writes, and the committed records.

``python -m docs.build`` writes them and their figures, and prints the paths that changed;
``python -m docs.build --check`` prints each line whose number has moved and each claim that the records no longer
bear, and exits with status 1 if there are any.  Templates call the functions of :mod:`docs.numbers`, and:

- ``figure(suite, name="")``: draws a figure of the suite, by default the one that shows its verdicts, and links it;
- ``verdicts(suite)``: the suite's verdict table; ``finding(suite)``: the sentence above it on its page;
- ``assert_better(estimate)``, ``assert_worse(estimate)``, ``assert_not_significant(estimate)`` and
  ``assert_that(condition, claim)``: print nothing, and fail the build where records do not bear them.
"""

from __future__ import annotations

import difflib
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from docs import numbers
from docs.numbers import ROOT, DocumentError, Estimate
from harness.errors import Refusal
from report import verdicts
from report.draw.figure import style_of
from report.figures.all_figures import FIGURES

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


@dataclass
class Build:
    """Files that follow from templates and records, by path below the root; and claims that do not hold."""

    files: dict[Path, bytes] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # each with its template and line

    def add(self, template: str, folder: Path = ROOT / DOCS) -> None:
        """Render one template; a template that asks for what is not there is a problem with its line."""
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
        """What templates may call beside :mod:`docs.numbers`; links are relative to the document's folder."""
        above = "../" * (len(path.parts) - 1)

        def figure(suite: str, name: str = "") -> str:
            name = name or verdicts.verdicts(numbers.derived(suite)).figure
            title = numbers.title_of_figure(name)
            shown = verdicts.verdicts(numbers.derived(suite)).figure
            drawn = DOCS / "figures" / (f"{suite}.svg" if name == shown else f"{suite}_{name}.svg")
            if drawn not in self.files:
                self.files[drawn] = _svg(suite, name)
            link = drawn.relative_to(DOCS) if path.parent == DOCS else f"{above}{drawn}"
            return f"![{title}]({link})"

        def finding(suite: str) -> str:
            return verdicts.verdicts(numbers.derived(suite)).sentence

        def verdict_table(suite: str) -> str:
            return verdicts.verdicts(numbers.derived(suite)).table.markdown_rows()

        def holds(*, condition: bool, claim: str) -> str:
            if not condition:
                self.problems.append(
                    f"{DOCS / template}:{_line_in(template)}: the records do not bear: {claim}"
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


def build(templates: Mapping[str, Path] = DOCUMENTS) -> Build:
    """All documents and their figures.

    Raises:
        RecordError: for an edited record, or a file that is no archive.
    """
    made = Build()
    for template in templates:
        made.add(template)
    return made


def differences(root: Path = ROOT, made: Build | None = None) -> list[str]:
    """A line for each claim that records do not bear, and for each line that does not follow from them."""
    made = build() if made is None else made
    lines = list(made.problems)
    for path, expected in made.files.items():
        committed = (root / path).read_bytes() if (root / path).exists() else b""
        if committed == expected:
            continue
        if path.suffix == ".svg":
            lines.append(f"{path}: is not the figure of the committed records")
        else:
            lines += [f"{path}:{place}" for place in _moved(committed.decode("utf-8"), expected.decode())]
    return lines


def _moved(committed: str, expected: str) -> list[str]:
    """``12: is 'a 1 b', by the records 'a 2 b'`` for each part in which two texts differ."""
    before, after = committed.splitlines(), expected.splitlines()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [
        f"{i + 1}: is {_quoted(before[i:j], after[k:m])}, by the records {_quoted(after[k:m], before[i:j])}"
        for kind, i, j, k, m in matcher.get_opcodes()
        if kind != "equal"
    ]


def _quoted(lines: list[str], others: list[str]) -> str:
    """The first line, cut to the part around its first difference from another one."""
    line, other = (texts[0] if texts else "" for texts in (lines, others))
    same = next((n for n, (a, b) in enumerate(zip(line, other, strict=False)) if a != b), len(other))
    begin = max(0, same - _LONGEST // 2)
    return repr(("…" if begin else "") + line[begin : begin + _LONGEST])


def _svg(suite: str, name: str) -> bytes:
    """A figure of a suite as SVG."""
    derived = numbers.derived(suite)
    drawing = next(figure for figure in FIGURES if figure.name == name)
    with tempfile.TemporaryDirectory() as folder:
        drawn = drawing.draw(derived, Path(folder), style_of(derived), ("svg",))
    if drawn is None:
        raise DocumentError(f"{suite}: no rows for the figure {name!r}")
    return drawn.svg


def _line_in(template: str) -> int:
    """The line of a template from which this was called."""
    frame: Any = sys._getframe()  # noqa: SLF001  # Jinja compiles templates to functions and knows their lines
    while frame is not None:
        compiled = frame.f_globals.get("__jinja_template__")
        if compiled is not None and compiled.name == template:
            return int(compiled.get_corresponding_lineno(frame.f_lineno))
        frame = frame.f_back
    return 0


def _line_of(error: Exception, template: str) -> int:
    """The line of a template at which an error arose."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(template)
    ]
    return getattr(error, "lineno", None) or (frames[-1].lineno if frames else None) or 0


def main(arguments: list[str]) -> int:
    """Write or check all documents; returns the exit status."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write("usage: python -m docs.build [--check]\n")
        return 2
    made = build()
    if arguments:
        lines = differences(made=made)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        return 1 if lines else 0
    for path, content in made.files.items():
        if not (ROOT / path).exists() or (ROOT / path).read_bytes() != content:
            (ROOT / path).parent.mkdir(exist_ok=True)
            (ROOT / path).write_bytes(content)
            sys.stdout.write(f"{path}\n")
    sys.stderr.write("".join(f"{problem}\n" for problem in made.problems))
    return 1 if made.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
