"""Policies as values, and which combinations are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given

from impl.codec import BF16, FP32, parse
from impl.policy import PRESETS, Feedback, Policy, PolicyError, parse_feedback, preset
from impl.topology import Topology
from tests.strategies import feedbacks


def test_presets_are_the_eight_combinations_and_exact() -> None:
    """The presets are ZeRO-3, each technique, every pair, all three, and the unquantised exact one."""
    combinations = {
        (policy.weights != BF16, policy.secondary != 0, policy.gradients != (BF16, BF16))
        for name, policy in PRESETS.items()
        if name != "exact"
    }
    assert len(combinations) == len(PRESETS) - 1 == 8
    assert PRESETS["exact"].weights == FP32


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gather": "flat", "secondary": 2}, "a flat gather has no such hop"),
        ({"reduce": "one_hop", "gradients": (BF16, FP32)}, "has one hop"),
        ({"reduce": "ring", "feedback": Feedback()}, "the partial sums of a ring are others' too"),
        ({"reduce": "one_hop", "chunks": 2}, "chunks = 2 overlap two hops, and reduce='one_hop' has one"),
        ({"chunks": 9}, "chunks = 9: expected 1 to 8"),
        (
            {"gradients": (parse("int4:shard"), BF16), "chunks": 2},
            "a shard that int4:shard and bf16 give one",
        ),
        ({"reduce": "twohop"}, "reduce = 'twohop': expected one of ring, one_hop, two_hop"),
        ({"gather": "falt"}, "gather = 'falt': expected one of flat, hierarchical"),
        ({"compute": "fp64"}, "compute = 'fp64': expected one of fp32"),
        ({"align": 0}, "at least 1"),
    ],
)
def test_impossible_combinations_are_refused(fields: dict[str, Any], words: str) -> None:
    """What no topology could run raises at construction and says why."""
    with pytest.raises(PolicyError, match=words):
        Policy(**fields)


def test_unknown_names_are_refused() -> None:
    """An unknown preset or field raises, listing what there is."""
    with pytest.raises(PolicyError, match="unknown policy 'zero4': expected one of exact, zero3"):
        preset("zero4")
    with pytest.raises(PolicyError, match="unknown policy field 'bits'"):
        preset("zero3", bits=4)


def test_group_size_is_checked_against_the_topology() -> None:
    """A group size that does not fit a topology is a policy error there, not before."""
    policy = preset("hpz", secondary=3)
    policy.check(Topology(2, 3))
    with pytest.raises(PolicyError, match="3 ranks does not fit 2 nodes x 2 ranks"):
        policy.check(Topology(2, 2))


@given(feedbacks)
@example(Feedback(decay=0.8, reset=1024, hops="all"))
def test_the_text_of_feedback_reads_back(feedback: Feedback) -> None:
    """Reading the text form of any feedback gives the feedback."""
    assert parse_feedback(str(feedback)) == feedback


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("locko", "expected none, classic or loco"),
        ("loco:0.9", "unknown option '0.9'"),
        ("loco:all:last", "'last' says a thing twice"),
        ("classic:decay1.0", "a decay is in"),
        ("none:bf16", "expected none"),
        ("loco:reset-1", "unknown option 'reset-1'"),
    ],
)
def test_impossible_feedback_is_refused(text: str, words: str) -> None:
    """A text that is no feedback raises one line that says what is allowed."""
    with pytest.raises(PolicyError, match=words):
        parse_feedback(text)


@pytest.mark.parametrize("fields", [{"hops": "lst"}, {"state": "fp64"}, {"decay": 1.0}, {"reset": -1}])
def test_impossible_fields_of_feedback_are_refused(fields: dict[str, Any]) -> None:
    """What no feedback is raises at construction."""
    with pytest.raises(PolicyError, match=r"expected one of|a decay is in"):
        Feedback(**fields)
