"""Traces of torch.profiler are read event by event; a file that is no whole trace is refused in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from harness.errors import Refusal
from harness.whatif import kineto
from tests.harness.whatif.written import REAL, Writer, ddp, on_gpu


def test_steps_hold_their_own_events(tmp_path: Path) -> None:
    """Events belong to the step in which the host ran or launched them; rank, world and host are those of the file."""
    trace = kineto.read(on_gpu(Writer(1, host="b")).write(tmp_path))
    assert (trace.rank, trace.world, trace.host, trace.groups) == (1, 2, "b", {"0": [0, 1]})
    assert [(step.number, len(step.device), len(step.launches)) for step in trace.steps] == [
        (3, 4, 5),
        (4, 4, 5),
        (5, 4, 5),
    ]
    assert trace.base == 10**18
    assert trace.steps[1].begin == pytest.approx(0.143)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("chunk", [64, 1000, 1 << 22])
def test_any_chunk_gives_the_same_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, zipped: bool
) -> None:
    """How much is read at once, and whether the file is compressed, changes nothing."""
    path = ddp(Writer(0)).write(tmp_path, zipped=zipped)
    whole = kineto.read(path)
    monkeypatch.setattr(kineto, "_CHUNK", chunk)
    assert kineto.read(path) == whole


def test_a_real_trace_of_gpus_is_read() -> None:
    """A real trace of two A100s has its steps, kernels and the metadata of its collectives."""
    trace = kineto.read(REAL)
    assert (trace.rank, trace.world, len(trace.steps)) == (0, 2, 3)
    nccl = [event for event in trace.steps[1].device if "nccl" in event.name]
    assert {event.arguments["Collective name"] for event in nccl} == {"allreduce", "broadcast"}
    assert sum(event.arguments["In msg nelems"] for event in nccl) > 25e6


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 0.8, 0.99])
def test_a_truncated_trace_is_refused(tmp_path: Path, share: float, zipped: bool) -> None:
    """A file that ends early is refused in one line that names the file."""
    path = ddp(Writer(0)).write(tmp_path, zipped=zipped)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(Refusal, match=r"rank0\.json") as caught:
        kineto.read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a trace that torch.profiler wrote"),
        (b"[1, 2]", "not a trace that torch.profiler wrote"),
        (b"\xff\xfe\x00", "not a trace that torch.profiler wrote"),
        (b'{"a": 1}', "it has no traceEvents"),
        (b'{"traceEvents": [1]}', "an event is '1'"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": 5}]}', "lacks its name or its times"),
        (b'{"traceEvents": []}', "has no distributedInfo"),
        (b'{"traceEvents": [{"ph": "X" "x"}]}', "truncated"),
        (b'{"traceEvents": [], "distributedInfo": {"rank": 3, "world_size": 2}}', "rank 3 of 2"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, content: bytes, says: str) -> None:
    """A JSON file of something else is refused with what it lacks."""
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    with pytest.raises(Refusal, match="foreign") as caught:
        kineto.read(path)
    assert says in str(caught.value)


@pytest.mark.parametrize("steps", [0, 1])
def test_one_step_is_too_few(tmp_path: Path, steps: int) -> None:
    """A trace of one step is refused, and the message says how to trace several."""
    with pytest.raises(Refusal, match=f"number of complete steps .* is {steps}, .*active=5"):
        kineto.read(ddp(Writer(0), steps=steps).write(tmp_path))


def test_a_step_without_a_number_is_refused_by_its_name(tmp_path: Path) -> None:
    """A user's own event that is named like a step is no missing step."""
    path = ddp(Writer(0)).write(tmp_path)
    path.write_text(path.read_text().replace("ProfilerStep#4", "ProfilerStep#last"))
    with pytest.raises(Refusal, match="'ProfilerStep#last' is no step's name"):
        kineto.read(path)


def test_names_may_hold_line_breaks(tmp_path: Path) -> None:
    """Torch writes line breaks inside names, which strict JSON does not allow."""
    writer = ddp(Writer(0))
    writer.add("a@b", 101, 102)
    path = writer.write(tmp_path)
    path.write_text(path.read_text().replace("a@b", "a\nb"))
    assert any(event.name == "a\nb" for event in kineto.read(path).steps[0].host)


def test_a_folder_is_refused_with_the_names_of_traces(tmp_path: Path) -> None:
    """`zeropp trace` prints a folder; the refusal says what to type in its place."""
    with pytest.raises(Refusal, match=r"is a folder: name the traces in it, such as .*rank-\*\.json\.gz"):
        kineto.read(tmp_path)


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    """What is no regular file is an error, not a wait for a writer."""
    import os

    os.mkfifo(tmp_path / "fifo.json")
    with pytest.raises(OSError, match="FIFO"):
        kineto.read(tmp_path / "fifo.json")


def test_unknown_events_do_not_matter(tmp_path: Path) -> None:
    """Events of other categories and phases are left out."""
    writer = ddp(Writer(0))
    known = kineto.read(writer.write(tmp_path))
    others: list[Any] = [
        {"ph": "M", "name": "process_name"},
        {"ph": "s", "cat": "fwdbwd"},
        {"ph": "X", "cat": "Trace"},
    ]
    whole = writer.whole()
    whole["traceEvents"] = [*others, *whole["traceEvents"]]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(whole))
    assert kineto.read(path) == known


def _changed(folder: Path, place: int, **changes: Any) -> Path:
    """Write the trace of DDP with changes of one event; ``args__`` begins the name of an argument's change."""
    whole = ddp(Writer(0)).whole()
    event = whole["traceEvents"][place]
    for name, value in changes.items():
        (event["args"] if name.startswith("args__") else event)[name.removeprefix("args__")] = value
    (path := folder / "rank0.json").write_text(json.dumps(whole))
    return path


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e300, 10**400])
@pytest.mark.parametrize("name", ["ts", "dur"])
def test_times_that_are_none_are_refused(tmp_path: Path, name: str, value: float) -> None:
    """Python's JSON has NaN, infinity and numbers of any size; as times they would give a prediction of nonsense."""
    with pytest.raises(Refusal, match="lacks its name or its times"):
        kineto.read(_changed(tmp_path, 2, **{name: value}))


@pytest.mark.parametrize(
    ("name", "value"), [("correlation", []), ("stream", {}), ("Input type", 5), ("Concrete Inputs", True)]
)
def test_arguments_of_another_type_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    """The line names the argument."""
    with pytest.raises(Refusal, match=f"'{name}' of event 'c10d::allreduce_' is"):
        kineto.read(_changed(tmp_path, 4, **{f"args__{name}": value}))


def test_facts_of_another_type_do_not_matter(tmp_path: Path) -> None:
    """A category that is no text is an unknown one, and groups that are no list are none."""
    path = _changed(tmp_path, 2, cat=[])
    path.write_text(path.read_text().replace('"pg_config": [', '"pg_config": true, "other": ['))
    assert not kineto.read(path).groups
