"""Tests of expectations: their grammar, and whether they hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.audit.calls import Calls
from harness.audit.expectations import broken, parse, read_file
from harness.audit.schemes import Model
from harness.errors import Refusal
from tests.harness.audit.events import calls_of, events, row

MODEL = Model(1000, "optimizer AdamW")


def gathers(dtype: str = "int8", item: int = 1) -> Calls:
    """2x2 ranks that gather 1000 elements in forward and in backward."""
    rows = [row("all_gather", 1000, phase=phase, dtype=dtype, item=item) for phase in ("forward", "backward")]
    return calls_of([events(rank, 4, rows) for rank in range(4)], 2)


@pytest.mark.parametrize(
    "text",
    [
        "all_gather int8 in forward == 0.5 M",
        "all_gather int8 <= 1 M",
        "ALL_GATHER  INT8 >= 2 kB",
        "all_gather int8 <= 1500 B between nodes",
        "all_gather over 4 ranks == 2 calls",
        "all <= 1500 B sent",
        "all_gather int8 <= 1500 B inside nodes",
        "all_reduce == 0 MB",
        "all_gather float32 <= 0 M",
        "all_gather over 2 ranks == 0 B",
    ],
)
def test_expectations_that_hold(text: str) -> None:
    """M is two bytes a parameter, and a node's bytes are those that leave it."""
    assert broken([parse(text)], gathers(), [2, 3], MODEL) == []


def test_a_broken_expectation_names_place_step_and_value() -> None:
    """Of a node, the bytes that leave it are given."""
    assert broken([parse("all_gather int8 <= 750 B between nodes")], gathers(), [2, 3], MODEL) == [
        (
            "broken: all_gather int8 <= 750 B between nodes: node 0 has 0.0015 MB in step 2; all_gather was called "
            "with int8 (0.002 MB)"
        )
    ]


def test_a_gather_that_is_no_longer_quantised_is_named() -> None:
    """The line says which types were sent instead."""
    lines = broken([parse("all_gather int8 >= 0.9 M")], gathers("float32", 4), [2], MODEL)
    assert lines == [
        "broken: all_gather int8 >= 0.9 M: rank 0 has 0 M in step 2; all_gather was called with float32 (0.008 MB)"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("all_gather", "expected OPERATION"),
        ("all_gather int8 < 1 M", "expected OPERATION"),
        ("all_gather int8 <= M", "expected OPERATION"),
        ("all_gather int8 <= -1 M", "expected OPERATION"),
        ("allgather int8 <= 1 M", "unknown operation 'allgather'.*did you mean 'all_gather'"),
        ("all_gather int7 <= 1 M", "unknown type 'int7'.*did you mean 'int8'"),
        ("all_gather in front <= 1 M", "unknown phase 'front'"),
        ("all_gather <= 1 MiB", "unknown unit 'MiB'"),
        ("all_gather <= 1 calls sent", "'sent' selects bytes, but the unit is calls: remove 'sent'"),
        ("all_gather <= 1 M between", "expected OPERATION"),
        (f"all_gather over {'9' * 5000} ranks <= 1 M", "expected OPERATION"),
    ],
)
def test_a_text_that_is_no_expectation_is_refused(text: str, message: str) -> None:
    """One line says what was expected."""
    with pytest.raises(Refusal, match=message) as refused:
        parse(text)
    assert "\n" not in str(refused.value)


def test_m_needs_the_number_of_parameters() -> None:
    """Without a model, an expectation in M does not hold, so that the program's run is still reported."""
    (line,) = broken([parse("all <= 1 M"), parse("all <= 1 MB")], gathers(), [2], None)
    assert line.startswith("not checked: all <= 1 M: ")
    assert "give --model" in line


@pytest.mark.parametrize(
    "event",
    [{"event": "lost", "entries": 5, "first": 2, "last": 2}, {"event": "fault", "text": ["KeyError: 'x'"]}],
)
def test_nothing_holds_if_calls_were_missed(event: dict[str, object]) -> None:
    """An audit that overflowed or failed does not say that few bytes were sent."""
    calls = gathers()
    calls.ranks[1].take(event)
    (line,) = broken([parse("all <= 1 MB")], calls, [2], None)
    assert line.startswith("not known to hold: rank 1: the ")
    assert broken([], calls, [2], None) == []


def test_expectations_of_a_file(tmp_path: Path) -> None:
    """A TOML file lists expectations as texts."""
    file = tmp_path / "expected.toml"
    file.write_text('expect = ["all_gather int8 <= 1 M", "all_reduce == 0 B"]\n')
    assert [expectation.text for expectation in read_file(file)] == [
        "all_gather int8 <= 1 M",
        "all_reduce == 0 B",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expect = [", "expected.toml: "),
        (f"expect = {'[' * 5000}", "expected.toml: cannot be read as TOML"),
        (f"expect = {'9' * 5000}", "expected.toml: cannot be read as TOML"),
        ("expect = []", "expected a list of texts"),
        ("expect = [1]", "expected a list of texts"),
        ("expects = ['all <= 1 M']", "unknown key 'expects'"),
        ("expect = ['all < 1 M']", "expected.toml: expectation 'all < 1 M'"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """The line begins with the file's path."""
    (file := tmp_path / "expected.toml").write_text(text)
    with pytest.raises(Refusal, match=message):
        read_file(file)


def test_a_missing_or_special_file_is_refused(tmp_path: Path) -> None:
    """The line names the file, and a FIFO blocks nothing."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(Refusal, match="expected a regular file"):
        read_file(tmp_path / "fifo")
    with pytest.raises(Refusal, match=r"absent\.toml"):
        read_file(tmp_path / "absent.toml")
