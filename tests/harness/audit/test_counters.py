"""Tests of the comparison between interfaces' counters and the bytes of calls."""

from __future__ import annotations

from typing import Any

import pytest

from harness.audit import tables
from tests.harness.audit.events import calls_of, events, row

STEP = 1000  # bytes that a node sends to the other in a step: 4 bytes an element from each of 2 ranks


def audited(
    readings: dict[int, dict[int, int]], *, ended: str = "exit", tail: int = 0
) -> list[dict[str, Any]]:
    """The rows of node 0, whose ranks 0 and 1 read these counters after steps."""
    ranks = []
    for rank in range(4):
        made = events(rank, 4, [row("send", STEP // 8, peer=(rank + 2) % 4)], ended="")
        if tail:
            rows = [row("send", tail // 8, peer=(rank + 2) % 4)]
            made.append({"event": "rows", "first": 4, "last": None, "rows": rows})
        made += [
            {"event": "counters", "step": step, "sent": {"eth0": value}}
            for step, value in readings[rank % 2].items()
        ]
        ranks.append([*made, {"event": "end", "how": ended, "steps": 3}])
    report = tables.report_on(calls_of(ranks, 2), [2, 3], None, by="optimizer steps")
    return [each for each in tables.counter_rows(report) if each["node"] == "0"]


def test_ranks_that_end_a_step_together_know_their_bytes() -> None:
    """Counters of equal readings are exact."""
    (found,) = audited({rank: {1: 5000, 3: 5000 + 2 * STEP} for rank in (0, 1)})
    assert (found["counted"], found["uncertain"], found["expected"]) == (2 * STEP, 0, 2 * STEP)


@pytest.mark.parametrize("behind", [0, 1])
def test_a_rank_that_is_behind_makes_the_bytes_uncertain(behind: int) -> None:
    """Whichever rank reads first, what both have sent is within the interval, unlike the reading of one rank."""
    late, early = {1: 5300, 3: 5000 + 2 * STEP}, {1: 5000, 3: 4700 + 2 * STEP}
    (found,) = audited({behind: late, 1 - behind: early}, ended="step 3")
    assert (found["counted"], found["uncertain"]) == (2 * STEP - 300, 300)
    assert abs(found["counted"] - found["expected"]) <= found["uncertain"]


def test_the_last_reading_after_the_end_is_exact() -> None:
    """It holds what the slower rank sent since the faster one ended, and what both sent after the last step."""
    late, early = {1: 5000, 3: 5000 + 2 * STEP + 400}, {1: 5000, 3: 4700 + 2 * STEP}
    (found,) = audited({0: early, 1: late}, tail=400)
    assert (found["counted"], found["uncertain"], found["expected"]) == (2 * STEP + 400, 0, 2 * STEP + 400)


def test_the_steps_between_which_bytes_are_known_best_are_compared() -> None:
    """Step 1, which the ranks ended far apart, is left out."""
    late, early = {1: 5900, 2: 6000, 3: 7000}, {1: 5000, 2: 6000, 3: 7000}
    (found,) = audited({0: late, 1: early})
    assert (found["counted"], found["uncertain"], found["expected"]) == (STEP, 0, STEP)


def test_a_step_that_not_all_ranks_of_a_node_read_is_not_compared() -> None:
    """The counters of step 2 are those of one rank only."""
    (found,) = audited({0: {1: 5000, 2: 9999, 3: 7000}, 1: {1: 5000, 3: 7000}})
    assert (found["counted"], found["uncertain"]) == (2 * STEP, 0)


def test_a_node_without_files_has_no_counters() -> None:
    """An audit on several hosts without a shared folder has the files of its own host only."""
    ranks = []
    for rank in (0, 1):  # of 4
        made = events(rank, 4, [row("send", STEP // 8, peer=rank + 2)], ended="")
        read = [{"event": "counters", "step": step, "sent": {"eth0": step * STEP}} for step in (1, 3)]
        ranks.append([*made, *read, {"event": "end", "how": "exit", "steps": 3}])
    calls = calls_of(ranks, 2)
    assert calls.topology.count == 2
    (found,) = tables.counter_rows(tables.report_on(calls, [2, 3], None, by="optimizer steps"))
    assert (found["node"], found["counted"], found["expected"]) == ("0", 2 * STEP, 2 * STEP)


@pytest.mark.parametrize("ended", ["exit", "step 3"])
def test_calls_after_a_reading_are_in_the_next_one(ended: str) -> None:
    """Half of a step is sent after its counters are read: the last reading after the end has it, others do not."""
    half, ranks = 2 * 4 * (STEP // 16), []  # 4 bytes an element, from each of 2 ranks
    for rank in range(4):
        made = events(rank, 4, [row("send", STEP // 8, peer=(rank + 2) % 4)], ended="")
        late = [row("send", STEP // 16, peer=(rank + 2) % 4)]
        read = {step: 5000 + step * STEP - half for step in (1, 2, 3)}
        for step, value in read.items():
            made.append({"event": "counters", "step": step, "sent": {"eth0": value}})
            made.append({"event": "late", "step": step, "rows": late})
        if ended == "exit":
            made.append({"event": "counters", "step": 3, "sent": {"eth0": read[3] + half}})
        ranks.append([*made, {"event": "end", "how": ended, "steps": 3}])
    report = tables.report_on(calls_of(ranks, 2), [2, 3], None, by="optimizer steps")
    for found in tables.counter_rows(report):
        assert found["counted"] == found["expected"]


@pytest.mark.parametrize("ended", ["", "exit"])
def test_calls_before_a_second_reading_are_in_it(ended: str) -> None:
    """Counters that are read again after a step, as when a group is destroyed, have the calls after the first reading.

    This holds whether the program then ends by itself or is killed.
    """
    half, ranks = 2 * 4 * (STEP // 16), []
    for rank in range(4):
        made = events(rank, 4, [row("send", STEP // 8, peer=(rank + 2) % 4)], ended="")
        late = [row("send", STEP // 16, peer=(rank + 2) % 4)]
        for step in (1, 2, 3):
            made.append({"event": "counters", "step": step, "sent": {"eth0": 5000 + step * STEP - half}})
            made.append({"event": "late", "step": step, "rows": late})
            made.append({"event": "counters", "step": step, "sent": {"eth0": 5000 + step * STEP}})
        ranks.append([*made, *([{"event": "end", "how": ended, "steps": 3}] if ended else [])])
    report = tables.report_on(calls_of(ranks, 2), [2, 3], None, by="optimizer steps")
    for found in tables.counter_rows(report):
        assert found["counted"] == found["expected"]
