"""Tests of ``audit()``, without ranks; test_programs.py has them."""

from __future__ import annotations

import pytest
import torch

from harness.audit.inside import Found
from harness.errors import Refusal
from tests.harness.audit.events import events, row

MODEL = torch.nn.Linear(10, 100, bias=False)


def test_nothing_is_found_before_the_block_has_ended() -> None:
    """The error says when to ask."""
    with pytest.raises(Refusal, match="the block has not ended yet"):
        _ = Found(None, None).calls


def test_what_was_found_is_of_this_rank() -> None:
    """Rows, scheme and expectations are those of the events, and nodes follow from the ranks of a node."""
    found = Found(MODEL, 2)
    found.take(events(1, 4, [row("all_reduce", 1000, phase="backward")], ended=""))
    assert [(line["operation"], line["bytes"], line["place"]) for line in found.rows] == [
        ("all_reduce", 4000, "inside and between nodes")
    ]
    assert found.scheme is not None
    assert found.scheme.name == "DDP"
    assert found.check("all_reduce float32 == 2 M", "all_reduce float32 <= 5 kB between nodes") == [
        (
            "broken: all_reduce float32 <= 5 kB between nodes: node 0 has 0.006 MB in step 1; "
            "all_reduce was called with float32 (0.004 MB)"
        )
    ]


def test_a_block_without_a_step_is_one_step() -> None:
    """What was called in it is found all the same."""
    found = Found(None, None)
    given = events(0, 2, [], ended="")
    given[-1] = {"event": "rows", "first": 1, "last": None, "rows": [row("broadcast", 5)]}
    found.take(given)
    assert [line["operation"] for line in found.rows] == ["broadcast"]
