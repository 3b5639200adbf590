"""Finds accesses of memory that a GPU could make in either order, in the trace of a run on fake GPUs.

``python -m tests.fake_gpu.races [POLICY ...]`` trains a small GPT for two steps with each policy, as rank 0 of 2x2
ranks, and prints the races.

Two accesses of the same bytes, one of which writes, must be ordered: by one stream, by an event that one stream
records and the other waits for, or by the host, which waits for a stream, an event or the device before it launches
the second.  The trace has them all: of torch's allocator, of its streams and events, and of NCCL.  Each stream has
a vector clock.  While the trace is recorded, no event has ended when the host only asks, so that nothing is
ordered by luck.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tests.fake_gpu.trace import HOST, Entry, Kind

_PAGE: Final = 16  # accesses are searched by the 64 KiB that they are in
Clock = dict[int, int]  # for each stream, how many of its accesses have ended


class Race(NamedTuple):
    """Two accesses in no order, each with its stream."""

    first: str
    first_stream: int
    second: str
    second_stream: int


class _Access(NamedTuple):
    low: int
    high: int
    writes: bool
    stream: int
    time: int  # it is the stream's ``time``-th access
    name: str


@dataclass(slots=True)
class Found:
    """What a trace has: the number of accesses, and each race with the number of times that it occurs."""

    accesses: int = 0
    races: Counter[Race] = field(default_factory=Counter)


def _join(clock: Clock, other: Mapping[int, int]) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


def find(entries: Iterable[Entry]) -> Found:
    """Returns the races of a trace."""
    found = Found()
    clocks: defaultdict[int, Clock] = defaultdict(dict)
    events: dict[int, Clock] = {}  # the clock that each event recorded last
    pages: defaultdict[int, list[_Access]] = defaultdict(list)
    host = clocks[HOST]
    for entry in entries:
        match entry.kind:
            case Kind.RECORD:
                _join(clocks[entry.stream], host)
                events[entry.event] = dict(clocks[entry.stream])
            case Kind.WAIT:
                _join(clocks[entry.stream], events.get(entry.event, {}))
            case Kind.SYNC_EVENT | Kind.QUERY:
                _join(host, events.get(entry.event, {}))
            case Kind.SYNC_STREAM:
                _join(host, clocks[entry.stream])
            case Kind.SYNC_DEVICE:
                for clock in list(clocks.values()):
                    _join(host, clock)
            case Kind.ACCESS:
                _access(entry, clocks[entry.stream], host, pages, found)
    return found


def _access(
    entry: Entry, clock: Clock, host: Clock, pages: defaultdict[int, list[_Access]], found: Found
) -> None:
    """Compare an access with the earlier ones of its memory; forget those that it covers."""
    found.accesses += 1
    _join(clock, host)
    clock[entry.stream] = clock.get(entry.stream, 0) + 1
    low, high = entry.address, entry.address + entry.nbytes
    new = _Access(low, high, entry.writes, entry.stream, clock[entry.stream], entry.name)
    races: set[tuple[_Access, Race]] = set()  # an access of several pages is compared several times
    for page in range(low >> _PAGE, ((high - 1) >> _PAGE) + 1):
        remaining = []
        for old in pages[page]:
            ordered = clock.get(old.stream, 0) >= old.time
            if not ordered and (old.writes or new.writes) and old.low < high and low < old.high:
                races.add((old, Race(old.name, old.stream, new.name, new.stream)))
            if not (ordered and new.writes and low <= old.low and old.high <= high):
                remaining.append(old)
        pages[page] = [*remaining, new]
    found.races.update(race for _, race in races)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the races of all runs; returns 0 if there are none, and every run has accesses."""
    import torch.distributed as dist

    from tests.fake_gpu import engine_runs

    parser = argparse.ArgumentParser(prog="python -m tests.fake_gpu.races", description=__doc__)
    parser.add_argument("policies", nargs="*", default=engine_runs.POLICIES, metavar="POLICY")
    parser.add_argument("--all", action="store_true", help="every variant of every policy")
    options = parser.parse_args(arguments)
    runs, total, wrong = 0, 0, 0
    engine_runs.join_alone()
    for policy in options.policies:
        names = engine_runs.variants_of(policy)
        if not options.all and policy not in engine_runs.MAIN:
            names = ("plain",)
        for name in names:
            for checkpointed in (False, True):
                try:
                    recording = engine_runs.recorded_steps(policy, name, checkpointed)
                except ValueError as refusal:  # the policy and the variant exclude each other
                    print(f"{policy:18} {name:12} refused: {refusal}"[:120], flush=True)
                    break
                found = find(recording.entries)
                runs, total = runs + 1, total + found.races.total()
                wrong += bool(found.races) or not found.accesses
                how = "recomputed" if checkpointed else ""
                print(
                    f"{policy:18} {name:12} {how:10} {found.accesses:6} accesses, {found.races.total()} races"
                )
                for race, count in found.races.most_common(4):
                    print(
                        f"  {count} times {race.first} on stream {race.first_stream:#x}, then {race.second} on "
                        f"stream {race.second_stream:#x}"
                    )
                sys.stdout.flush()
    dist.destroy_process_group()
    print(f"{runs} runs, {total} races")
    return int(wrong > 0 or not runs)


if __name__ == "__main__":
    sys.exit(main())
