"""Documents follow from templates and records, and the check names each line and each claim that does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from docs import build, numbers
from docs.build import DOCUMENTS, Build, differences
from docs.numbers import ROOT
from harness import cli
from harness.records.trial_record import Record
from report.data.frames import frames_of
from report.data.metrics import Derived, derive
from tests.report.records import changed_steps, records_of

SUITE = "quickstart"
RECORDS = records_of("quickstart", repeats=6)
PAGE = "page.md.j2"


def slower(records: list[Record], strategy: str, factor: float) -> list[Record]:
    """The same records, with the steps of one strategy longer by a factor."""

    def stretched(record: Record) -> Record:
        return changed_steps(record, lambda step: {"total": step.total * factor})

    return [stretched(record) if record.trial["strategy"] == strategy else record for record in records]


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Build]:
    """Renders a template's text on records that stand for suite quickstart."""
    monkeypatch.setitem(DOCUMENTS, PAGE, Path("docs/page.md"))

    def render(text: str, records: list[Record] = RECORDS) -> Build:
        held: dict[str, Derived] = {SUITE: derive(frames_of(records))}
        monkeypatch.setattr(numbers.records, "_DERIVED", held)
        (tmp_path / PAGE).write_text(text, encoding="utf-8")
        made = Build()
        made.add(PAGE, tmp_path)
        return made

    return render


def committed(made: Build, folder: Path) -> Path:
    """A folder that holds the files of a build."""
    for path, content in made.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def test_every_template_is_a_document() -> None:
    """Each template in docs/ is built, and each document has its template."""
    assert {path.name for path in (ROOT / "docs").glob("*.j2")} == {*DOCUMENTS}


def test_a_changed_record_is_a_named_line(built: Callable[..., Build], tmp_path: Path) -> None:
    """The check names the line whose number moved, with both numbers; unchanged records give no line."""
    text = f'First.\n\nZeRO++: {{{{ speedup("{SUITE}", "ZeRO++").value }}}}x.\n'
    before = built(text)
    assert before.problems == []
    root = committed(before, tmp_path)
    assert differences(root, built(text)) == []
    (line,) = differences(root, built(text, slower(RECORDS, "zeropp", 2.0)))
    number = re.search(r"ZeRO\+\+: (\S+)x", before.files[Path("docs/page.md")].decode())
    assert number is not None
    half = f"{float(number[1]) / 2:.2f}"
    found = re.fullmatch(r"docs/page\.md:4: (\S+) should be (\S+) by the records, in '.*'", line)
    assert found is not None, line
    assert found[1] == number[1]
    assert float(found[2]) == pytest.approx(float(half), abs=0.02)


def test_each_moved_line_is_named(built: Callable[..., Build], tmp_path: Path) -> None:
    """Neighbouring lines are reported one by one; words that a person changed are shown as they are."""
    root = committed(built("One 1.\nTwo 2.\nThree.\n"), tmp_path)
    lines = differences(root, built("One 5.\nTwo 6.\nThird.\n"))
    assert lines == [
        "docs/page.md:2: 1. should be 5. by the records, in 'One 1.'",
        "docs/page.md:3: 2. should be 6. by the records, in 'Two 2.'",
        "docs/page.md:4: is 'Three.', should be 'Third.'",
    ]
    assert differences(tmp_path / "empty", built("One 1.\n"))[0].startswith("docs/page.md:1: ")


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        (f'assert_worse(speedup("{SUITE}", "ZeRO++"))', "the speed-up of ZeRO++ over ZeRO-3"),
        (f'assert_not_significant(speedup("{SUITE}", "ZeRO++"))', "the speed-up of ZeRO++ over ZeRO-3"),
        ('assert_that(2 < 1, "two is less than one")', "two is less than one"),
    ],
)
def test_a_claim_that_does_not_hold_is_a_named_line(
    claim: str, said: str, built: Callable[..., Build]
) -> None:
    """It is one line, with the template's line and what was claimed."""
    (problem,) = built(f"First.\n\n{{% do {claim} %}}\nA sentence.\n").problems
    assert problem.startswith(f"docs/{PAGE}:3: the records do not support: {said}")
    assert "\n" not in problem


def test_a_claim_turns_with_the_records(built: Callable[..., Build]) -> None:
    """A speed-up that is better by the records is worse by those of longer steps."""
    text = f'{{% do assert_better(speedup("{SUITE}", "ZeRO++")) %}}\nZeRO++ is faster.\n'
    assert built(text).problems == []
    (problem,) = built(text, slower(RECORDS, "zeropp", 20.0)).problems
    assert problem.startswith(f"docs/{PAGE}:1: ")
    assert problem.endswith(", worse")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ('speedup("nowhere", "ZeRO++")', "no suite 'nowhere' in results/reference: expected one of ablation"),
        (f'speedup("{SUITE}", "ZeRO-9")', f"{SUITE}: no configuration 'ZeRO-9' at '': expected one of "),
        (f'speedup("{SUITE}", "ZeRO++", at="1 bit/s")', f"{SUITE}: no configuration 'ZeRO++' at '1 bit/s'"),
        (f'figure("{SUITE}", "nothing")', "no figure 'nothing': expected one of "),
        (f'cell("{SUITE}", "nothing", "ZeRO++", "n")', "no table 'nothing': expected one of "),
        ("nothing()", "'nothing' is undefined"),
    ],
)
def test_what_is_not_there_is_one_line(asked: str, message: str, built: Callable[..., Build]) -> None:
    """An unknown suite, configuration, setting, figure, table or function is a problem with its line."""
    made = built(f"First.\n{{{{ {asked} }}}}\n")
    (problem,) = made.problems
    assert problem.startswith(f"docs/{PAGE}:2: {message}")
    assert made.files == {}


def test_arguments_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown template is a usage error that lists the templates."""
    assert build.main(["--check", "nothing.md.j2"]) == 2
    assert "README.md.j2" in capsys.readouterr().err


def test_suites_readme_has_every_suite() -> None:
    """One row for every suite file, and no other."""
    text = (ROOT / "suites" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.toml\) \|", text, flags=re.MULTILINE)
    assert sorted(rows) == sorted((path.stem, path.stem) for path in (ROOT / "suites").glob("*.toml"))


def test_results_has_a_section_of_every_suite() -> None:
    """Every suite with committed records has one heading, which the table at the top links."""
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^### (\w+)$", text, flags=re.MULTILINE)) == numbers.suites()
    assert {*numbers.suites()} <= {*re.findall(r"\]\(#(\w+)\)", text)}


@pytest.mark.long
def test_documents_follow_from_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    """README, docs/results.md and the others, and their figures, equal what templates and records give."""
    assert cli.main(["report", "--check"]) == cli.OK, capsys.readouterr().out


@pytest.mark.long
def test_one_process_writes_what_several_do() -> None:
    """A build in one process equals one whose suites are read and drawn in parallel."""
    command = [
        sys.executable,
        "-c",
        f"import sys; from docs import build; {_ONE}; sys.exit(build.main(sys.argv[1:]))",
    ]
    process = subprocess.run(
        [*command, "--check", "README.md.j2"],
        cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (process.returncode, process.stdout) == (0, ""), process.stdout + process.stderr


_ONE = "build.machine.cores = lambda: 1"


@pytest.mark.parametrize(
    ("drawn", "differs"),
    [
        (b'<clipPath id="pfedcba9876"/><g clip-path="url(#pfedcba9876)" x="1"/>', False),
        (b'<clipPath id="pfedcba9876"/><g clip-path="url(#pfedcba9876)" x="2"/>', True),
    ],
)
def test_a_figure_of_another_processor_is_the_same(drawn: bytes, *, differs: bool, tmp_path: Path) -> None:
    """Ids of clip paths depend on the processor that draws a figure, and are not compared; all else is."""
    figure = Path("docs/figures/one.svg")
    (tmp_path / figure).parent.mkdir(parents=True)
    (tmp_path / figure).write_bytes(b'<clipPath id="p0123456789"/><g clip-path="url(#p0123456789)" x="1"/>')
    assert bool(differences(tmp_path, Build({figure: drawn}, []))) == differs
