"""What README.md and docs/ say of the committed records, written and checked here.

``python -m report.committed`` writes it anew and prints the files that changed; ``zeropp report --check``
compares.  It is: docs/results.md, docs/claims.md, README's paragraph between its marks, and README's figure.
"""

from __future__ import annotations

import re
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from harness.records import archive
from report import claims, page
from report.data.frames import load
from report.data.metrics import Derived, derive
from report.draw import figure_files
from report.figures.registry import PLOTS
from report.tables import registry as tables
from report.tables.table import markdown

ROOT: Final = Path(__file__).resolve().parents[1]
REFERENCE: Final = Path("results/reference")
_README, _RESULTS, _FIGURE = Path("README.md"), Path("docs/results.md"), Path("docs/quickstart.svg")
_CLAIMS: Final = Path("docs/claims.md")
_SUITE: Final = "quickstart"  # whose numbers README has
_DRAWN: Final = "step_split"  # which of its figures
_MARKED: Final = re.compile(r"(?<=<!-- of the records -->\n).*?(?=<!-- end -->)", re.DOTALL)
_TABLES: Final = (
    "summary",
    "losses",
    "sent_error",
    "parity",
    "break_even",
)  # of each suite, those that it has
_HEAD: Final = """\
# Results

What the committed records say; `zeropp report results/reference` draws the page of each suite from them, with
all figures and tables.
This file is written from them too (`python -m report.committed`), and CI compares.
"""
_CLAIMS_HEAD: Final = """\
# Claims

What the committed records claim, with the command that tries it again and the interval in which it is
expected on a machine like theirs (docs/results.md says which); bytes are the same anywhere.
An interval of one sweep does not hold what differs between days; `zeropp run SUITE --sweeps 3` puts that in.
This file is written from the records (`python -m report.committed`), and CI compares.
"""


def wrong(root: Path = ROOT) -> list[str]:
    """Why committed files do not follow from the committed records: one line each.

    Raises:
        RecordError: for a record that was edited, or an archive that is none.
    """
    found = []
    for path, content in wanted(root).items():
        there = (root / path).read_bytes() if (root / path).exists() else b""
        if there != content:
            found.append(f"{path}: {_first_difference(there, content)}")
    return found


def wanted(root: Path = ROOT) -> dict[Path, bytes]:
    """The files that follow from the committed records, as they must be, by their paths below ``root``.

    Raises:
        RecordError: as :func:`wrong`.
    """
    readme = (root / _README).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        there = Path(name)
        packed = sorted((root / REFERENCE).glob(f"*{archive.SUFFIX}"))
        found = {
            one.name.removesuffix(archive.SUFFIX): derive(load(archive.unpack(one, there))) for one in packed
        }
        text = _paragraph(found[_SUITE])
        (plot,) = [plot for plot in PLOTS if plot.name == _DRAWN]
        figure = figure_files.draw(plot, found[_SUITE], there)
    files = {
        _README: _MARKED.sub(lambda _: text, readme).encode(),
        _RESULTS: _results(found).encode(),
        _CLAIMS: _claims(found).encode(),
    }
    return files | ({} if figure is None else {_FIGURE: figure.svg})


def _paragraph(derived: Derived) -> str:
    """README's sentences: the headline, and what ran when on what."""
    facts = dict(page.facts(derived))
    ran = f"{facts['trials']}, on {facts['ran']}"
    sentences = [*page.headline(derived), f"These are the records of [one run](docs/results.md): {ran}."]
    return "".join(f"{line}\n" for sentence in sentences for line in textwrap.wrap(sentence, 120))


def _results(found: Mapping[str, Derived]) -> str:
    parts = [_HEAD]
    for suite, derived in found.items():
        facts = "; ".join(f"{name}: {value}" for name, value in page.facts(derived) if name != "suite")
        shown = tables.some_tables(derived, _TABLES)
        parts.append(
            f"\n## {suite}\n\n{' '.join(derived.frames.questions)}\n\n"
            f"`zeropp run suites/{suite}.toml`\n\n"
            + "".join(f"{markdown(sentence)}\n" for sentence in page.headline(derived))
            + "".join(f"\n{table.markdown()}" for table in shown)
            + f"\n{markdown(facts)}\n"
        )
    return "".join(parts)


def _claims(found: Mapping[str, Derived]) -> str:
    return _CLAIMS_HEAD + "".join(
        f"\n## {suite}\n\n{claims.table(derived, suite)}" for suite, derived in found.items()
    )


def _first_difference(there: bytes, wanted_content: bytes) -> str:
    ours, theirs = (content.decode(errors="replace").splitlines() for content in (there, wanted_content))
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False), 1):
        if one != other:
            return f"line {number} is {one[:80]!r}, by the records {other[:80]!r}"
    return f"{len(ours)} lines, by the records {len(theirs)}"


def main() -> None:
    """Write the files that differ, and print their names."""
    for path, content in wanted().items():
        if not (ROOT / path).exists() or (ROOT / path).read_bytes() != content:
            (ROOT / path).write_bytes(content)
            sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
