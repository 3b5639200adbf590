"""Reads the JSON files of torch.profiler (Kineto), event by event, without holding a whole file in memory.

``torch.profiler.profile`` writes one JSON object for each rank.  The object has the array ``traceEvents``, and other
keys before and after the array.  Only the events that a prediction needs are kept: steps, operations of the host,
launches, and kernels.  Times are in seconds of the host's clock.

Sources: the files that torch 2.13 writes, and the traces in HolisticTraceAnalysis's ``tests/data``.  This module does
not import torch.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, TypeGuard

from harness.errors import Refusal
from impl import regular_file

STEP: Final = "ProfilerStep#"  # begins the name of the event that torch.profiler writes for each step
HOST: Final = ("cpu_op", "user_annotation")
DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES: Final = ("cuda_runtime", "cuda_driver")
_KEPT: Final = frozenset((*HOST, *DEVICE, *LAUNCHES))
# Beginnings of the names of events that belong to a collective.  Other events of the host are kept without arguments.
_COLLECTIVE: Final = ("c10d::", "gloo:", "record_param_comms", "nccl:")
_CHUNK: Final = 4 << 20  # characters that are read at once
_LARGEST: Final = 16 << 20  # most characters of one event, or of the other keys before or after the events
_LATEST: Final = 1e18  # bound of the absolute value of a time, in microseconds since 1970
_MOST_RANKS: Final = 1 << 20
_LISTS: Final = ("Input Dims", "Input type", "Concrete Inputs")  # arguments of collectives
_NUMBERS: Final = ("correlation", "stream")  # arguments of launches and kernels
_BETWEEN: Final = re.compile(r"[\s,]*")
_EVENTS: Final = re.compile(r'"traceEvents"\s*:\s*\[')
_NOT_OURS: Final = (
    "is not a trace that torch.profiler wrote: export one with profile(...).export_chrome_trace(PATH)"
)


class Event(NamedTuple):
    """One event of a trace that has a beginning and an end; times are in seconds."""

    name: str
    category: str
    thread: int
    begin: float
    end: float
    arguments: Mapping[str, Any]


@dataclass(slots=True)
class Step:
    """The events of one step of one rank, sorted by their beginning."""

    number: int
    thread: int  # the thread that called ``profiler.step()``
    begin: float
    end: float
    host: list[Event] = field(default_factory=list)  # operations and annotations of the host
    launches: list[Event] = field(default_factory=list)  # the host's calls of CUDA, such as launches
    device: list[Event] = field(default_factory=list)  # kernels, copies and fills that this step launched


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace of one rank."""

    path: Path
    rank: int
    world: int
    host: str  # name of the rank's host; empty if the file does not say
    backend: str  # backend of torch.distributed, such as ``nccl``; empty if the file does not say
    groups: Mapping[str, Sequence[int]]  # ranks of each process group, by the group's name
    base: int  # nanoseconds to add to all times of the trace
    steps: Sequence[Step]


def read(path: Path) -> Trace:
    """Read one rank's trace.  A file whose name ends in ``.gz`` is decompressed.

    Raises:
        Refusal: if the path is a folder; if the file is truncated or no trace of torch.profiler; if it does not name
            its rank and the number of ranks; or if it has fewer than two complete steps.
        OSError: if the file cannot be read.
    """
    if path.is_dir():
        raise Refusal(f"{path}: is a folder: name the traces in it, such as {path / 'rank-*.json.gz'}")
    regular_file.status(path)
    facts: dict[str, Any] = {}
    try:
        with _opened(path) as file:
            events = [event for raw in _raw_events(path, file, facts) if (event := _event(path, raw))]
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise Refusal(f"{path}: is truncated, or not compressed with gzip: write the trace again") from None
    except UnicodeDecodeError:
        raise Refusal(f"{path}: {_NOT_OURS}") from None
    base = facts.get("baseTimeNanoseconds", 0)
    about = facts.get("distributedInfo")
    if not isinstance(about, dict) or not isinstance(about.get("rank"), int):
        raise Refusal(
            f"{path}: has no distributedInfo with a rank: profile after torch.distributed.init_process_group(), on "
            "every rank"
        )
    groups: dict[str, Sequence[int]] = {}
    configured = about.get("pg_config")
    for group in configured if isinstance(configured, list) else []:
        if isinstance(group, dict) and isinstance(group.get("ranks"), list):
            groups[str(group.get("pg_name"))] = [rank for rank in group["ranks"] if isinstance(rank, int)]
    rank, world = about["rank"], about.get("world_size")
    if not isinstance(world, int) or not 0 <= rank < world <= _MOST_RANKS:
        raise Refusal(f"{path}: distributedInfo says rank {rank} of {world}: write the trace again")
    return Trace(
        path=path,
        rank=rank,
        world=world,
        host=str(facts.get("host_name", "")),
        backend=str(about.get("backend", "")),
        groups=groups,
        base=base if isinstance(base, int) and abs(base) < 1e3 * _LATEST else 0,
        steps=_steps(path, events),
    )


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8")
    return path.open(encoding="utf-8")


def _raw_events(path: Path, file: IO[str], facts: dict[str, Any]) -> Iterator[Any]:
    """Yield the items of the array ``traceEvents``.  Add the other keys of the file to ``facts``.

    Raises:
        Refusal: If the text is no JSON object with ``traceEvents``, or is truncated.
    """
    decoder = json.JSONDecoder(strict=False)  # torch writes line breaks inside names
    text = file.read(_CHUNK)
    if not text.lstrip().startswith("{"):
        raise Refusal(f"{path}: {_NOT_OURS}")
    while (found := _EVENTS.search(text)) is None:
        more = file.read(_CHUNK) if len(text) < _LARGEST else ""
        if not more:
            raise Refusal(f"{path}: {_NOT_OURS}; it has no traceEvents")
        text += more
    facts.update(_facts(path, text[: found.start()].rstrip().rstrip(",") + "}"))
    place = found.end()
    while True:
        match = _BETWEEN.match(text, place)
        place = match.end() if match else place
        if text.startswith("]", place):
            break
        try:
            event, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            more = file.read(_CHUNK) if len(text) - place < _LARGEST else ""
            if not more:
                raise Refusal(
                    f"{path}: is truncated, or not JSON, in its events ({error}): wait until the profiler has written "
                    "the file, or trace the program again"
                ) from None
            text, place = text[place:] + more, 0
            continue
        yield event
    rest = text[place + 1 :] + file.read(_LARGEST)
    facts.update(_facts(path, "{" + rest.strip().lstrip(",")))


def _facts(path: Path, text: str) -> dict[str, Any]:
    try:
        facts = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise Refusal(f"{path}: is truncated, or {_NOT_OURS}") from None
    return facts if isinstance(facts, dict) else {}


def _event(path: Path, raw: Any) -> Event | None:
    """Return an item of ``traceEvents`` as an event, with its times in seconds.

    Returns None if the item has no beginning and end, or if a prediction does not need its category.

    Raises:
        Refusal: If the item is not as torch.profiler writes it.
    """
    if not isinstance(raw, dict):
        raise Refusal(f"{path}: {_NOT_OURS}; an event is {str(raw)[:40]!r}, expected an object")
    category = raw.get("cat")
    if raw.get("ph") != "X" or not isinstance(category, str) or category not in _KEPT:
        return None
    name, begin, duration = raw.get("name"), raw.get("ts"), raw.get("dur", 0)
    if not (isinstance(name, str) and _is_time(begin) and _is_time(duration)):
        raise Refusal(f"{path}: {_NOT_OURS}; an event lacks its name or its times: {str(raw)[:60]}")
    arguments = raw.get("args")
    if not isinstance(arguments, dict) or (category in HOST and not name.startswith(_COLLECTIVE)):
        arguments = {}
    for key, kind in (*((key, list) for key in _LISTS), *((key, int) for key in _NUMBERS)):
        if not isinstance(arguments.get(key, kind()), kind):
            expected = "a list" if kind is list else "a whole number"
            raise Refusal(
                f"{path}: {_NOT_OURS}; argument {key!r} of event {name[:40]!r} is {str(arguments[key])[:40]!r}, "
                f"expected {expected}"
            )
    thread = raw.get("tid")
    return Event(
        name,
        category,
        thread if isinstance(thread, int) else 0,
        begin / 1e6,
        (begin + max(0.0, duration)) / 1e6,
        arguments,
    )


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and abs(value) < _LATEST


def _steps(path: Path, events: Sequence[Event]) -> list[Step]:
    """Return the steps of a trace, each with the events that began in it.

    A kernel belongs to the step in which it was launched.  Raises a Refusal if there are fewer than two steps.
    """
    marks = sorted(
        (event for event in events if event.name.startswith(STEP) and event.category == "user_annotation"),
        key=lambda event: event.begin,
    )
    numbers = [mark.name.removeprefix(STEP) for mark in marks]
    if odd := [mark.name for mark, number in zip(marks, numbers, strict=True) if not number.isdecimal()]:
        raise Refusal(
            f"{path}: {odd[0]!r} is no step's name, expected one such as {STEP}3: rename this record_function"
        )
    if len(marks) < 2:
        raise Refusal(
            f"{path}: the number of complete steps (events with names such as ProfilerStep#3) is {len(marks)}, and two "
            "or more are needed: profile with schedule(active=5), and call profiler.step() after each step"
        )
    steps = [
        Step(int(number), mark.thread, mark.begin, mark.end)
        for number, mark in zip(numbers, marks, strict=True)
    ]
    starts, launched = [step.begin for step in steps], dict[Any, Step]()
    for event in sorted(events, key=lambda event: (event.category in DEVICE, event.begin)):
        if event.category in DEVICE:  # all launches come before all kernels
            if (step := launched.get(event.arguments.get("correlation"))) is not None:
                step.device.append(event)
            continue
        step = _step_at(steps, starts, event.begin)
        if step is None or event.name.startswith(STEP):
            continue
        if event.category in LAUNCHES:
            step.launches.append(event)
            launched[event.arguments.get("correlation")] = step
        else:
            step.host.append(event)
    return steps


def _step_at(steps: Sequence[Step], starts: Sequence[float], moment: float) -> Step | None:
    from bisect import bisect_right

    place = bisect_right(starts, moment) - 1
    return steps[place] if place >= 0 and moment < steps[place].end else None
