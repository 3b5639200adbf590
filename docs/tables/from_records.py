"""Writes and checks what README.md and docs/ say of the committed records.

``python -m docs.tables.from_records`` writes docs/results.md, docs/claims.md, the figures in docs/figures and
what stands between marks in README.md, docs/questions.md and docs/paper.md, and prints the files that
changed; ``zeropp report --check`` compares.
"""

from __future__ import annotations

import re
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from docs.tables.findings import DRAWN, PAPER, QUESTIONS
from harness.records import archive
from harness.records.confidence_intervals import of_another_sweep
from harness.suites.answering_quantity import Quantity
from report import artifact_claims, page
from report.answer import effects
from report.answer.effects import ratio, seconds, sent
from report.answer.lead import answer
from report.data.configuration import NAMES, PROPOSED
from report.data.frames import load
from report.data.metrics import Derived, derive
from report.data.text import counted
from report.draw.figure import Figure, style_of
from report.figures.all_figures import FIGURES as DRAWINGS
from report.tables import all_tables as tables
from report.tables.table import markdown

ROOT: Final = Path(__file__).resolve().parents[2]
REFERENCE: Final = Path("results/reference")
DOCS: Final = Path("docs")
FIGURES: Final = DOCS / "figures"  # one of each suite
_MARKED: Final = (Path("README.md"), DOCS / "questions.md", DOCS / "paper.md")
_SUITE: Final = "quickstart"  # whose numbers README has
_LOSSES: Final = "convergence_long"  # whose answer README has
_BLOCK: Final = re.compile(r"<!-- of the records -->\n.*?<!-- end -->", re.DOTALL)
_FINDING: Final = re.compile(r"<!-- finding (\d+) -->\n.*?<!-- end -->", re.DOTALL)
_NUMBER: Final = re.compile(r"<!-- by (\w+) -->.*?<!-- end -->")
_MOST_ROWS: Final = 7  # of a suite's table; a longer one has only _FIRST
_FIRST: Final = 2
_WIDE: Final = 120  # characters of a line
_TABLES: Final[dict[Quantity, str]] = {"memory": "memory", "tokens": "generation"}
_HEAD: Final = """\
# Results

What the committed records say of each suite: the question, the answer, one figure and one table.
`zeropp report results/reference` draws the page of each suite from them, with all figures and tables;
`zeropp run suites/NAME.toml` runs one again.
Columns and marks are explained in [metrics.md](reference/metrics.md).
All ranks of a suite share one machine's processors: bytes cost processor time beside the link's, and a hop
inside a node is a copy in its memory.  Ratios of seconds, break-evens, the best group and chunks may be
others where a node has an adapter and processors of its own; bytes, errors and losses are the same.
This file is written from the records (`python -m docs.tables.from_records`), and CI compares.
"""
_FACTS: Final = ("trials", "processor", "commit", "checkout")  # below a suite's table
_ON_THE_PAGE: Final = {  # titles and keys of columns that only the page has; shares stand in claims.md
    "n", "Tokens/s", "over the paper's baseline", "Pairs", "Power", "Exposed share", "Process peak",
    "in 16 bits", "Allowed step/step", "To the target, s", "bytes_ratio", "_gain",
}  # fmt: skip
_CLAIMS_HEAD: Final = """\
# Claims

What the committed records claim, and where a further sweep is expected on a machine like theirs (a 95 %
prediction interval, wider than the estimate's own in docs/results.md, which says the machine); bytes are the
same anywhere.  `zeropp run suites/NAME.toml`, then `zeropp report NAME`, tries it again.
All ranks share one machine's processors (see [results.md](results.md)): seconds hold for such a machine.
An interval of one sweep does not hold what differs between days; `zeropp run SUITE --sweeps 3` puts that in.
This file is written from the records (`python -m docs.tables.from_records`), and CI compares.
"""


def differences(root: Path = ROOT) -> list[str]:
    """A line for each committed file that does not follow from the committed records.

    Raises:
        RecordError: for an edited record, or a file that is no archive.
    """
    return [
        f"{path}: {_first_difference(committed, expected)}"
        for path, expected in expected_files(root, derive_all(root)).items()
        if (committed := (root / path).read_bytes() if (root / path).exists() else b"") != expected
    ]


def derive_all(root: Path = ROOT, folder: Path = REFERENCE) -> dict[str, Derived]:
    """What the committed records of a folder say, by the name of the suite.

    Raises:
        RecordError: as :func:`differences`.
    """
    with tempfile.TemporaryDirectory() as name:
        return {
            packed.name.removesuffix(archive.SUFFIX): derive(load(archive.unpack(packed, Path(name))))
            for packed in sorted((root / folder).glob(f"*{archive.SUFFIX}"))
        }


def expected_files(root: Path, suites: Mapping[str, Derived]) -> dict[Path, bytes]:
    """The contents that follow from the records, by paths below ``root``."""
    with tempfile.TemporaryDirectory() as name:
        svgs = {FIGURES / f"{suite}.svg": _figure(records, Path(name)) for suite, records in suites.items()}
    texts = {path: (root / path).read_text(encoding="utf-8") for path in _MARKED}
    files = {path: _with_numbers(text, suites) for path, text in texts.items()}
    claims = [f"\n## {suite}\n\n{artifact_claims.table(derived)}" for suite, derived in suites.items()]
    files |= {DOCS / "results.md": _results(suites), DOCS / "claims.md": "".join([_CLAIMS_HEAD, *claims])}
    return {path: text.encode() for path, text in files.items()} | svgs


def _figure(derived: Derived, folder: Path) -> bytes:
    """The figure that shows the answer of a suite, as SVG."""
    drawn = _shows(derived).draw(derived, folder, style_of(derived), ("svg",))
    assert drawn is not None  # noqa: S101  # it has rows
    return drawn.svg


def _shows(derived: Derived) -> Figure:
    """The figure of the answer; where records have no rows for it, the first of the page."""
    ordered = sorted(DRAWINGS, key=lambda figure: figure.name != answer(derived).figure)
    return next(figure for figure in ordered if not figure.table(derived).empty)


def _with_numbers(text: str, suites: Mapping[str, Derived]) -> str:
    """A text in which the records have filled all that stands between marks."""

    def sentence(match: re.Match[str]) -> str:
        suite, finding = QUESTIONS[int(match[1])]
        shows = f"\n![{_shows(suites[suite]).title}](figures/{suite}.svg)\n" if finding in DRAWN else ""
        paragraph = _wrapped(markdown(finding(suites[suite])))
        return f"<!-- finding {match[1]} -->\n{paragraph}{shows}<!-- end -->"

    def number(match: re.Match[str]) -> str:
        suite, finding = PAPER[match[1]]
        return f"<!-- by {match[1]} -->{markdown(finding(suites[suite]))}<!-- end -->"

    text = _BLOCK.sub(lambda _: f"<!-- of the records -->\n{_paragraph(suites)}<!-- end -->", text)
    return _NUMBER.sub(number, _FINDING.sub(sentence, text))


def _paragraph(suites: Mapping[str, Derived]) -> str:
    """README's sentences: seconds and bytes of ZeRO++ beside ZeRO-3's, what ran when, and losses."""
    derived = suites[_SUITE]
    facts, count = dict(page.facts(derived)), derived.trials["sweep"].nunique()
    main = next(effect for effect in effects.effects(derived) if effect.configuration == NAMES[PROPOSED])
    runs = "one run of this suite" if count == 1 else f"{count} runs of this suite"
    if (machines := len(derived.frames.pools)) > 1:
        runs += f" on {machines} machines"
    faster = f"A step of {main.configuration} is {ratio(main.ratio)} times as fast as {main.base}'s"
    again, alone = of_another_sweep(main.ratio, ratio=True), derived.trials["compute_seconds"].median()
    expected = f"another run is expected to find {again.low:.2f} to {again.high:.2f}"
    sentences = [
        f"**{faster}** (95 % interval of {main.ratio.n} pairs of trials in {runs}).",
        f"Where computing by itself takes {alone:.2f} s a step, as here, {expected}.",
        seconds(main),
        sent([main]),
        f"These are the records of [{runs}](docs/results.md#{_SUITE}): {facts['trials']}, on {facts['ran']}.",
    ]
    if losses := suites.get(_LOSSES):
        lead = answer(losses).sentences[0]
        sentences.append(f"Losses ([suite {_LOSSES}](docs/results.md#{_LOSSES})): {lead}")
    return "".join(map(_wrapped, sentences))


def _wrapped(sentence: str) -> str:
    lines = textwrap.wrap(sentence, _WIDE, break_long_words=False, break_on_hyphens=False)
    return "".join(f"{line}\n" for line in lines)


def _results(suites: Mapping[str, Derived]) -> str:
    parts: list[str] = [_HEAD]
    for suite, derived in suites.items():
        facts = "; ".join(f"{name}: {value}" for name, value in page.facts(derived) if name in _FACTS)
        first, *others = answer(derived).sentences
        parts.append(
            f"\n## {suite}\n\n{markdown(' '.join(derived.frames.questions))}\n\n**{markdown(first)}**\n"
            + "".join(f"{markdown(sentence)}\n" for sentence in others)
            + f"\n![{_shows(derived).title}](figures/{suite}.svg)\n"
            f"\n{_numbers(derived, suite)}\n{markdown(facts)}\n"
        )
    return "".join(parts)


def _numbers(derived: Derived, suite: str) -> str:
    """The table of a suite's answer, else its Summary, without what only the page has; for losses, a link to
    docs/claims.md.
    """
    quantity = answer(derived).quantity
    if quantity == "loss":
        return f"Losses: [claims.md](claims.md#{suite}).\n"
    name = "peers" if quantity == "step" else _TABLES.get(quantity, "summary")
    (shown,) = tables.all_tables(derived, (name,)) or tables.all_tables(derived, ("summary",))
    kept = [column for column in shown.columns if not {column.title, column.key} & _ON_THE_PAGE]
    left = len(shown.data) - _FIRST if len(shown.data) > _MOST_ROWS else 0
    shown = replace(shown, columns=tuple(kept), data=shown.data[: len(shown.data) - left])
    rest = f"\n{counted(left, 'more row')} on the page.\n" if left else ""
    return f"**{shown.title}.**\n\n{shown.markdown_rows()}{rest}"


def _first_difference(committed: bytes, expected: bytes) -> str:
    before, after = (content.decode(errors="replace").splitlines() for content in (committed, expected))
    for number, (line, other) in enumerate(zip(before, after, strict=False), 1):
        if line != other:
            return f"line {number} is {line[:80]!r}, by the records {other[:80]!r}"
    return f"{len(before)} lines, by the records {len(after)}"


def main() -> None:
    """Write the files that differ, and print their names."""
    (ROOT / FIGURES).mkdir(exist_ok=True)
    for path, content in expected_files(ROOT, derive_all()).items():
        if not (ROOT / path).exists() or (ROOT / path).read_bytes() != content:
            (ROOT / path).write_bytes(content)
            sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
