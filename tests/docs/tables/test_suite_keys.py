"""The reference of a suite's keys is what the program reads."""

from __future__ import annotations

import re
from typing import get_args

from docs.tables import DOCS
from harness.suites.suite_file import _fields
from harness.suites.trial import Cluster, Trial
from impl.codecs.codec import parse
from impl.plan.policy import PRESETS, MemoryLimits, preset


def test_it_is_whole() -> None:
    """Every field that a suite may set stands there."""
    page = (DOCS / "guide" / "suites.md").read_text(encoding="utf-8")
    for path in _fields(Trial):
        assert f"| `{path}` |" in page


def test_every_launcher_is_named() -> None:
    """The row of launchers has all of them."""
    page = (DOCS / "guide" / "suites.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"\| `cluster.launcher` \| (.*?) \|", page)
    known = get_args(Cluster.model_fields["launcher"].annotation)
    assert known == tuple(re.findall(r"`(\w+)`", row))


def test_its_examples_hold() -> None:
    """The codecs that it names are codecs of the presets, and its remedy for padding is a policy."""
    page = (DOCS / "guide" / "suites.md").read_text(encoding="utf-8")
    named = {parse(text) for text in re.findall(r"`(int\d:[\w:]+)`", page)}
    assert named == {PRESETS["zeropp"].weights, *PRESETS["zeropp"].gradients, PRESETS["qsdp"].weights}
    assert preset("zeropp", memory=MemoryLimits(max_padding=0.3)).memory.max_padding == 0.3
