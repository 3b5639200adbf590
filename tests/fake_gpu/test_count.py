"""The counts of a step's calls, and the figures that must stay within their bars."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.fake_gpu import count

ALONE = dict.fromkeys(count.COLUMNS, 10) | {count.MOVED: 1000, "parameters": 100}


@pytest.mark.parametrize(
    ("more", "name"),
    [({"codecs": 501}, "added"), ({count.MOVED: 2001}, "added B"), ({"events": 5000}, "events")],
)
def test_a_figure_above_its_bar_is_named(more: Mapping[str, int], name: str) -> None:
    """An engine with more launches, bytes or events than its bar is named with the figure; one at its bar is not."""
    (line,) = count.above({"single": ALONE, "zero3": {key: ALONE[key] + more.get(key, 0) for key in ALONE}})
    assert line.startswith(f"zero3: {name} ")
    assert not count.above({"single": ALONE, "zero3": {**ALONE, "codecs": 510, count.MOVED: 3000}})


@pytest.mark.needs("fake GPU")
def test_a_step_of_gpt_1_5b_is_within_its_bars() -> None:
    """ZeRO-3 and ZeRO++ on 2x8 ranks add no more launches, bytes and events than the bars of ``count``."""
    counted = {engine: count.counted_apart(engine) for engine in ("single", *count.BARS)}
    assert not count.above(counted)
