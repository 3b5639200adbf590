"""Tests of docs/audited.md, which ``python -m docs.audited`` writes."""

from __future__ import annotations

import pytest
import torch

from docs.audited import programs
from docs.audited.__main__ import HEAD, PAGE, audit, row_of


def test_the_page_has_every_program_and_no_difference() -> None:
    """A row for each program, each equal to its closed form, and within 2 % of what interfaces counted."""
    text, parameters = PAGE.read_text(), sum(p.numel() for p in programs.build().parameters())
    assert text.startswith(
        HEAD.format(version=torch.__version__, parameters=parameters).partition(" (torch ")[0]
    )
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert [row[0].partition("`: ")[0] for row in rows] == [f"| `{name}" for name in programs.PROGRAMS]
    assert {row[4] for row in rows} == {"+0.00%"}
    for row in rows:
        away, within = (float(text.rstrip("% |")) for text in row[6].split(" ± "))
        assert abs(away) <= 2 + within


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "zeropp"])
def test_a_row_is_what_its_program_sends(name: str) -> None:
    """Audited again on one machine, a program has the row of the page, up to the column of counters."""
    assert row_of(name, audit(name)).markdown().removesuffix("|  |\n") in PAGE.read_text()
