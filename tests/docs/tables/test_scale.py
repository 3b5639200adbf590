"""What docs/scale.md says follows from its suites and its machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.tables.scale import DOCS, PLOTS, draw, needed_gbps, page, planned


@pytest.mark.long
def test_the_page_is_what_the_suites_say(tmp_path: Path) -> None:
    """The committed page and figures are those that come out now."""
    tables = {plot.suite: planned(plot.suite) for plot in PLOTS}
    assert page(tables) == (DOCS / "scale.md").read_text(encoding="utf-8")
    for plot in PLOTS:
        draw(plot, tables[plot.suite], tmp_path / "figure.svg")
        assert (tmp_path / "figure.svg").stat().st_size > 5000


@given(st.floats(1, 15), st.floats(1e9, 1e11), st.floats(1.1, 10))
def test_a_codec_must_be_faster_on_a_faster_link_and_to_save_less(
    bits: float, rate: float, by: float
) -> None:
    """Twice the rate needs twice the speed; more bits save less, and so need more."""
    assert needed_gbps(bits, by * rate) == pytest.approx(by * needed_gbps(bits, rate))
    assert needed_gbps(min(15.9, bits * by), rate) >= needed_gbps(bits, rate)
