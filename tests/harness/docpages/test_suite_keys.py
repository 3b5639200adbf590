"""The reference of a suite's keys is what the program reads."""

from __future__ import annotations

import re

from harness.docpages import DOCS
from harness.suites.expansion import _fields
from harness.suites.trial import Trial
from impl.codecs.codec import parse
from impl.plan.policy import PRESETS, MemoryLimits, preset


def test_it_is_whole() -> None:
    """Every field that a suite may set stands there."""
    page = (DOCS / "guide" / "suites.md").read_text(encoding="utf-8")
    for path, kind in _fields(Trial):
        assert kind == "table" or f"| `{path}` |" in page


def test_what_does_not_run_is_said() -> None:
    """A launcher that predicts and never runs is not offered beside those that do."""
    page = (DOCS / "guide" / "suites.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"\| `cluster.launcher` \| (.*?) \|", page)
    assert "`slurm` is for predictions only" in row


def test_its_examples_hold() -> None:
    """The codecs that it names are codecs of the presets, and its remedy for padding is a policy."""
    page = (DOCS / "guide" / "suites.md").read_text(encoding="utf-8")
    named = {parse(text) for text in re.findall(r"`(int\d:[\w:]+)`", page)}
    assert named == {PRESETS["zeropp"].weights, *PRESETS["zeropp"].gradients}
    assert preset("zeropp", memory=MemoryLimits(max_padding=0.3)).memory.max_padding == 0.3
