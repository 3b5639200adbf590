"""The guides name every command, their command lines are accepted, and links to headings lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import zeropp
from docs.tables import DOCS
from harness.cli import app

ROOT = DOCS.parent
GUIDES = sorted((DOCS / "guide").glob("*.md"))
PAGES = [*ROOT.glob("*.md"), ROOT / "results" / "README.md", *DOCS.rglob("*.md")]
COMMANDS = (DOCS / "guide" / "commands.md").read_text(encoding="utf-8")
GROUP: Any = typer.main.get_command(app)


def commands(group: Any = GROUP, before: str = "zeropp") -> Iterator[str]:
    """Names of all commands, as ``zeropp bench codecs``."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before} {name}")
        else:
            yield f"{before} {name}"


def lines(page: Path) -> Iterator[str]:
    """Every line of a page's shell blocks, with continued ones joined and here-documents left out."""
    for block in re.findall(
        r"^```(?:sh|bash)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        text = re.sub(r"<<'(\w+)'\n.*?^\1$", "", block, flags=re.MULTILINE | re.DOTALL)
        yield from text.replace("\\\n", " ").splitlines()


def typed(page: Path) -> Iterator[list[str]]:
    """Arguments of every ``zeropp`` in the lines of a page, also behind ``torchrun`` or ``srun``."""
    for line in lines(page):
        words = shlex.split(line, comments=True)
        if "zeropp" in words:
            yield [word.rstrip(";") for word in words[words.index("zeropp") + 1 :]]


@pytest.mark.parametrize("name", list(commands()))
def test_every_command_has_a_section_with_an_example_and_its_exit_status(name: str) -> None:
    """In commands.md, and the overview links to it."""
    _, _, section = COMMANDS.partition(f"\n### `{name}`\n")
    section = section.partition("\n### ")[0]
    assert re.search(rf"^```sh\n{name}( |$)", section, re.MULTILINE)
    assert re.search("^Exit status: 0", section, re.MULTILINE)
    assert f"(#{name.replace(' ', '-')})" in COMMANDS.partition("## Exit statuses")[0]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_command_lines_are_accepted(page: Path) -> None:
    """The parser takes every command line of a guide; nothing is run."""
    for arguments in typed(page):
        group, words = GROUP, arguments
        while hasattr(group, "commands"):
            group, words = group.commands[words[0]], words[1:]
        group.make_context("zeropp", words)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_begins_with_what_it_is_for_and_for_whom(page: Path) -> None:
    """Before its first block of code or second heading."""
    beginning = re.split(r"^(?:## |```)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[0]
    assert "After this page you" in beginning
    assert "It is for " in beginning


def python(page: Path) -> str:
    """The Python of a page's blocks."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return "\n".join(blocks)


@pytest.mark.parametrize("page", [ROOT / "README.md", *GUIDES], ids=lambda page: page.stem)
def test_python_of_readme_and_guides_imports_zeropp_alone(page: Path) -> None:
    """No block imports the project's other packages, and each name of zeropp in a page exists."""
    assert re.findall(r"^\s*(?:from|import) (?:impl|harness|report)\b.*", python(page), re.MULTILINE) == []
    text = page.read_text(encoding="utf-8")
    named = {
        *re.findall(r"\bzeropp\.([A-Za-z]\w*)", python(page)),
        *re.findall(r"`zeropp\.([A-Za-z]\w*)", text),
    }
    assert named <= {*zeropp.__all__}


def test_guides_have_examples_in_python() -> None:
    """Of the module that users import."""
    assert sum("import zeropp" in python(page) for page in (ROOT / "README.md", *GUIDES)) >= 6


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_no_page_has_marks_of_an_unfinished_merge() -> None:
    """A page with both sides of a conflict in it is not published."""
    marks = re.compile(r"^(<{7} |={7}$|>{7} )", re.MULTILINE)
    assert [page for page in PAGES if marks.search(page.read_text(encoding="utf-8"))] == []


def test_links_to_headings_lead_to_one() -> None:
    """Of all pages."""
    links = [
        (page, to, anchor)
        for page in PAGES
        for to, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    ]
    assert len(links) > 30
    missing = [
        link for link in links if link[2] not in anchors((link[0].parent / link[1]) if link[1] else link[0])
    ]
    assert missing == []
