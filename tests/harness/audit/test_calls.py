"""Tests of reading and merging what witnesses wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.audit.calls import Group, Topology, alike, lines, read, spans
from harness.errors import Refusal
from tests.harness.audit.events import calls_of, events, row, write


def test_ranks_with_equal_calls_in_groups_of_one_shape_share_a_line() -> None:
    """Four ranks in two pairs make one line of two groups; a rank with other bytes has a line of its own."""
    pairs = {0: ("a", (0, 1)), 1: ("a", (0, 1)), 2: ("b", (2, 3)), 3: ("b", (2, 3))}
    ranks = [
        events(rank, 4, [row("all_gather", 100, group=pairs[rank][0])], groups=[pairs[rank]])
        for rank in range(4)
    ]
    (line,) = lines(calls_of(ranks, 2), 2)
    assert (line.ranks, [group.ranks for group in line.groups]) == ((0, 1, 2, 3), [(0, 1), (2, 3)])
    ranks[3] = events(3, 4, [row("all_gather", 101, group="b")], groups=[pairs[3]])
    assert [line.ranks for line in lines(calls_of(ranks, 2), 2)] == [(3,), (0, 1, 2)]


def test_rows_of_a_step_add_up() -> None:
    """Calls that the witness wrote late count for the step they belong to."""
    late = {"event": "rows", "first": 2, "last": 2, "rows": [row("all_gather", 5, phase="optimizer")]}
    calls = calls_of([[*events(0, 2, [row("all_reduce", 7)]), late, late]])
    assert {key.operation: count for key, count in calls.ranks[0].rows[2].items()} == {
        "all_reduce": (1, 7, 28),
        "all_gather": (2, 10, 40),
    }


def test_steps_are_in_classes_of_equal_calls() -> None:
    """The largest class is first, whatever its steps' numbers."""
    other = {"event": "rows", "first": 2, "last": 2, "rows": [row("broadcast", 5)]}
    calls = calls_of([[*events(0, 2, [row("all_reduce", 7)], steps=5), other]])
    assert alike(calls, [1, 2, 3, 4, 5]) == [[1, 3, 4, 5], [2]]


@pytest.mark.parametrize(
    ("environment", "ranks_per_node", "nodes"),
    [
        ({}, None, [0, 0, 0, 0]),
        ({}, 1, [0, 1, 2, 3]),
        ({"GROUP_RANK": "{node}"}, None, [0, 0, 1, 1]),
        ({"SLURM_NODEID": "{node}"}, None, [0, 0, 1, 1]),
        ({"GROUP_RANK": "{node}"}, 4, [0, 0, 0, 0]),
    ],
)
def test_a_rank_is_on_the_node_of_its_launcher(
    environment: dict[str, str], ranks_per_node: int | None, nodes: list[int]
) -> None:
    """The option wins over torchrun's and Slurm's variables, and these over the host."""
    ranks = [
        events(r, 4, [], environment={name: text.format(node=r // 2) for name, text in environment.items()})
        for r in range(4)
    ]
    assert [calls_of(ranks, ranks_per_node).topology.nodes[rank] for rank in range(4)] == nodes


def test_ranks_on_another_host_are_placed_as_torchrun_places_them() -> None:
    """Each node's audit has the files of its own ranks only."""
    environment = {"GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    calls = calls_of([events(rank, 4, [], environment=environment) for rank in (2, 3)])
    assert calls.topology.nodes == {0: 0, 1: 0, 2: 1, 3: 1}


def test_places_of_groups() -> None:
    """A group is inside a node, between nodes, or across both."""
    topology = Topology({0: 0, 1: 0, 2: 1, 3: 1})
    assert [topology.place(ranks) for ranks in ((0, 1), (1, 3), (0, 1, 2))] == ["inside", "between", "across"]


def test_a_killed_rank_is_named_with_its_unread_steps(tmp_path: Path) -> None:
    """A file without an end, whose counter of steps is ahead, tells how many steps were not read."""
    write(tmp_path, [events(0, 1, [row("all_reduce", 7)], steps=3, ended="")])
    (tmp_path / "here-0.jsonl.steps").write_text("5")
    assert read(tmp_path).notes == [
        "rank 0 was killed in step 6; the calls of its last 2 steps were not read"
    ]


def test_a_file_that_is_cut_off_is_read_to_its_last_line(tmp_path: Path) -> None:
    """A full disk leaves half a line: the lines before it count, and a note says so."""
    write(tmp_path, [events(0, 1, [row("all_reduce", 7)])])
    with (tmp_path / "here-0.jsonl").open("a") as file:
        file.write('{"event": "rows", "fir')
    calls = read(tmp_path)
    note = "rank 0: the last line of its file is incomplete, as on a full disk: calls may be missing"
    assert (calls.whole, calls.notes) == (3, [note])


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    """A line that is no event is refused with the file's name."""
    (tmp_path / "x.jsonl").write_text('{"event": "rows"}\n')
    with pytest.raises(Refusal, match=r"x\.jsonl: cannot be read"):
        read(tmp_path)


def test_of_a_restarted_rank_the_last_process_counts() -> None:
    """An elastic restart leaves two files of one rank."""
    first, second = events(0, 1, [row("all_reduce", 7)]), events(0, 1, [row("all_reduce", 9)])
    second[0]["started"] = 10
    calls = calls_of([first, second])
    (line,) = lines(calls, 1)
    assert line.count.elements == 9
    assert calls.notes == ["rank 0 was started again: only its last process is reported"]


def test_a_backend_without_a_recorder_is_named() -> None:
    """Calls of C++ over such a backend are not seen, and a note says so."""
    given = events(0, 1, [])
    given[2] |= {"backend": "mpi", "seen": False}
    assert "backend mpi of torch 2.13.0 has no flight recorder" in calls_of([given]).notes[0]


def test_overflow_and_faults_are_notes() -> None:
    """What the recorder lost and what failed inside the program is said."""
    more = [
        {"event": "lost", "entries": 12, "first": 3, "last": 4},
        {"event": "fault", "text": ["line", "ValueError: x"]},
    ]
    notes = calls_of([[*events(0, 1, []), *more]]).notes
    assert notes == [
        (
            "rank 0: the flight recorder overflowed: 12 calls of steps 3 to 4 are lost; "
            "set TORCH_FR_BUFFER_SIZE to a larger number"
        ),
        "rank 0: the audit failed inside the program: line | ValueError: x",
    ]


def test_an_unknown_group_is_that_of_all_ranks() -> None:
    """A group whose ranks no one knows stands for all ranks."""
    calls = calls_of([events(0, 2, [row("all_reduce", 7, group="?")])])
    assert calls.group(calls.ranks[0], "?") == Group("?", (0, 1))


def test_reported_steps_are_whole_ones() -> None:
    """Steps after the last whole one are left out; without any in the range, all whole steps are reported."""
    calls = calls_of([events(0, 1, [], steps=3)])
    assert (calls.steps(2, None), calls.steps(2, 9), calls.steps(5, None)) == ([2, 3], [2, 3], [1, 2, 3])


def test_spans() -> None:
    """Consecutive numbers are written as ranges."""
    assert spans([5, 0, 1, 2]) == "0-2, 5"
