"""What README.md and docs/ say of the committed records, written and checked here.

``python -m docs.tables.from_records`` writes it anew and prints the files that changed; ``zeropp report
--check`` compares.  It is: docs/results.md, docs/claims.md, the figures in docs/figures, and what stands
between marks in README.md, docs/questions.md and docs/paper.md.
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
from report.data.contender import NAMES, PROPOSED
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
_MOST_ROWS: Final = 7  # of a suite's table; of a longer one only _FIRST
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
_FACTS: Final = ("trials", "processor", "commit", "checkout")  # below a suite's table, of all
_ON_THE_PAGE: Final = (  # alone: titles of columns
    "n", "Tokens/s", "over the paper's baseline", "Pairs", "Power", "Exposed share", "Process peak",
    "in 16 bits", "Allowed step/step", "To the target, s",
)  # fmt: skip
_SAID_ELSEWHERE: Final = ("bytes_ratio", "_gain")  # keys likewise: docs/claims.md has shares of bytes
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
    """Why committed files do not follow from the committed records: one line each.

    Raises:
        RecordError: for a record that was edited, or an archive that is none.
    """
    return [
        f"{path}: {_first_difference(there, content)}"
        for path, content in expected_files(root, derive_all(root)).items()
        if (there := (root / path).read_bytes() if (root / path).exists() else b"") != content
    ]


def derive_all(root: Path = ROOT, where: Path = REFERENCE) -> dict[str, Derived]:
    """What the committed records of each suite say, by its name.

    Raises:
        RecordError: as :func:`differences`.
    """
    with tempfile.TemporaryDirectory() as name:
        return {
            one.name.removesuffix(archive.SUFFIX): derive(load(archive.unpack(one, Path(name))))
            for one in sorted((root / where).glob(f"*{archive.SUFFIX}"))
        }


def expected_files(root: Path, found: Mapping[str, Derived]) -> dict[Path, bytes]:
    """The files that follow from the records, as they must be, by their paths below ``root``."""
    with tempfile.TemporaryDirectory() as name:
        figures = {FIGURES / f"{suite}.svg": _figure(one, Path(name)) for suite, one in found.items()}
    texts = {path: (root / path).read_text(encoding="utf-8") for path in _MARKED}
    files = {path: _with_numbers(text, found) for path, text in texts.items()}
    claims = [f"\n## {suite}\n\n{artifact_claims.table(derived)}" for suite, derived in found.items()]
    files |= {DOCS / "results.md": _results(found), DOCS / "claims.md": "".join([_CLAIMS_HEAD, *claims])}
    return {path: text.encode() for path, text in files.items()} | figures


def _figure(derived: Derived, folder: Path) -> bytes:
    """The figure that shows the answer of a suite, as SVG."""
    drawn = _shows(derived).draw(derived, folder, style_of(derived), ("svg",))
    assert drawn is not None  # noqa: S101  # it has rows
    return drawn.svg


def _shows(derived: Derived) -> Figure:
    """That figure; where records have nothing for it, the first of the page."""
    ordered = sorted(DRAWINGS, key=lambda one: one.name != answer(derived).figure)
    return next(one for one in ordered if not one.table(derived).empty)


def _with_numbers(text: str, found: Mapping[str, Derived]) -> str:
    """A text with what stands between its marks by the records."""

    def finding(match: re.Match[str]) -> str:
        suite, of = QUESTIONS[int(match[1])]
        shows = f"\n![{_shows(found[suite]).title}](figures/{suite}.svg)\n" if of in DRAWN else ""
        return f"<!-- finding {match[1]} -->\n{_wrapped(markdown(of(found[suite])))}{shows}<!-- end -->"

    def number(match: re.Match[str]) -> str:
        suite, of = PAPER[match[1]]
        return f"<!-- by {match[1]} -->{markdown(of(found[suite]))}<!-- end -->"

    text = _BLOCK.sub(lambda _: f"<!-- of the records -->\n{_paragraph(found)}<!-- end -->", text)
    return _NUMBER.sub(number, _FINDING.sub(finding, text))


def _paragraph(found: Mapping[str, Derived]) -> str:
    """README's sentences: seconds and bytes of ZeRO++ beside ZeRO-3's, what ran when, and losses."""
    derived = found[_SUITE]
    facts, count = dict(page.facts(derived)), derived.trials["sweep"].nunique()
    main = next(one for one in effects.effects(derived) if one.contender == NAMES[PROPOSED])
    runs = "one run of this suite" if count == 1 else f"{count} runs of this suite"
    if (machines := len(derived.frames.pools)) > 1:
        runs += f" on {machines} machines"
    faster = f"A step of {main.contender} is {ratio(main.ratio)} times as fast as {main.base}'s"
    again, alone = of_another_sweep(main.ratio, ratio=True), derived.trials["compute_seconds"].median()
    expected = f"another run is expected to find {again.low:.2f} to {again.high:.2f}"
    told = [
        f"**{faster}** (95 % interval of {main.ratio.n} pairs of trials in {runs}).",
        f"Where computing by itself takes {alone:.2f} s a step, as here, {expected}.",
        seconds(main),
        sent([main]),
        f"These are the records of [{runs}](docs/results.md#{_SUITE}): {facts['trials']}, on {facts['ran']}.",
    ]
    if lost := found.get(_LOSSES):
        told += [f"Losses ([suite {_LOSSES}](docs/results.md#{_LOSSES})): {answer(lost).sentences[0]}"]
    return "".join(map(_wrapped, told))


def _wrapped(sentence: str) -> str:
    lines = textwrap.wrap(sentence, _WIDE, break_long_words=False, break_on_hyphens=False)
    return "".join(f"{line}\n" for line in lines)


def _results(found: Mapping[str, Derived]) -> str:
    parts: list[str] = [_HEAD]
    for suite, derived in found.items():
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
    """The table of a suite's answer, else its Summary, without what is left to the page; of losses, where
    docs/claims.md has them.
    """
    asked = answer(derived).quantity
    if asked == "loss":
        return f"Losses: [claims.md](claims.md#{suite}).\n"
    name = "peers" if asked == "step" else _TABLES.get(asked, "summary")
    (shown,) = tables.all_tables(derived, (name,)) or tables.all_tables(derived, ("summary",))
    kept = [one for one in shown.columns if one.title not in _ON_THE_PAGE and one.key not in _SAID_ELSEWHERE]
    left = len(shown.data) - _FIRST if len(shown.data) > _MOST_ROWS else 0
    shown = replace(shown, columns=tuple(kept), data=shown.data[: len(shown.data) - left])
    rest = f"\n{counted(left, 'more row')} on the page.\n" if left else ""
    return f"**{shown.title}.**\n\n{shown.markdown_rows()}{rest}"


def _first_difference(there: bytes, expected: bytes) -> str:
    ours, theirs = (content.decode(errors="replace").splitlines() for content in (there, expected))
    for line, (one, other) in enumerate(zip(ours, theirs, strict=False), 1):
        if one != other:
            return f"line {line} is {one[:80]!r}, by the records {other[:80]!r}"
    return f"{len(ours)} lines, by the records {len(theirs)}"


def main() -> None:
    """Write the files that differ, and print their names."""
    (ROOT / FIGURES).mkdir(exist_ok=True)
    for path, content in expected_files(ROOT, derive_all()).items():
        if not (ROOT / path).exists() or (ROOT / path).read_bytes() != content:
            (ROOT / path).write_bytes(content)
            sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
