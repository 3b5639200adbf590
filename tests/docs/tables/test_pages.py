"""Generated pages and examples of the documentation agree with the program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.tables import BEGIN, DOCS, END, METRICS, PAGES, current_page, insert
from docs.tables.scale import PLOTS, draw, forecast_table, needed_gbps, page
from harness.suites.expand_suite import field_paths
from harness.suites.trial import Cluster, Trial
from impl.codecs.codec import parse
from impl.policy.policy import MemoryLimits
from impl.policy.presets import PRESETS, preset

SUITES = (DOCS / "guide" / "suites.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*PAGES, METRICS])
def test_no_page_is_stale(name: str) -> None:
    """Every page holds what ``python -m docs.tables`` would write."""
    page = (DOCS / name).read_text(encoding="utf-8")
    assert current_page(name, page) == page


def test_only_what_stands_between_the_marks_is_written() -> None:
    """Text around the marks stays, text between them goes, and a page without marks is refused."""
    assert insert(f"a {BEGIN} old {END} b", "new\n") == f"a {BEGIN}\n\nnew\n\n{END} b"
    for unmarked in ("a", f"a {BEGIN}", f"a {END}"):
        with pytest.raises(ValueError, match="lacks the marker"):
            insert(unmarked, "new")


def test_every_key_of_a_suite_stands_on_its_page() -> None:
    """Every field that a suite may set, and every launcher."""
    for path in field_paths(Trial):
        assert f"| `{path}` |" in SUITES
    (row,) = re.findall(r"\| `cluster.launcher` \| (.*?) \|", SUITES)
    known = get_args(Cluster.model_fields["launcher"].annotation)
    assert known == tuple(re.findall(r"`(\w+)`", row))


def test_examples_of_keys_hold() -> None:
    """The codecs that the page names are codecs of the presets, and its remedy for padding is a policy."""
    named = {parse(text) for text in re.findall(r"`(int\d:[\w:]+)`", SUITES)}
    assert named == {PRESETS["zeropp"].weights, *PRESETS["zeropp"].gradients, PRESETS["qsdp"].weights}
    assert preset("zeropp", memory=MemoryLimits(max_padding=0.3)).memory.max_padding == 0.3


@pytest.mark.long
def test_scale_is_what_the_suites_say(tmp_path: Path) -> None:
    """The committed page is the one that comes out now, and every figure is drawn."""
    tables = {plot.suite: forecast_table(plot.suite) for plot in PLOTS}
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
