"""The race detector: which order of accesses it accepts, and which waits it misses in a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from impl.comm import exchanges
from impl.comm.wire import Wire
from impl.plan.memory import STAGED
from impl.plan.messages import size_class
from impl.transport import side_stream
from impl.transport.side_stream import Arrival
from impl.unit.context import HostMemory, Meter
from tests.fake_gpu.races import Found, find
from tests.fake_gpu.trace import HOST, Entry, Kind

WRITE = Entry(Kind.ACCESS, stream=1, address=0x10000, nbytes=64, name="write", writes=True)
READ = Entry(Kind.ACCESS, stream=2, address=0x10020, nbytes=64, name="read")
HOST_READ = Entry(Kind.ACCESS, stream=HOST, address=0x10020, nbytes=4, name="read")


@pytest.mark.parametrize(
    "between",
    [
        [Entry(Kind.RECORD, 1, event=7), Entry(Kind.WAIT, 2, event=7)],
        [Entry(Kind.RECORD, 1, event=7), Entry(Kind.SYNC_EVENT, 0, event=7)],
        [Entry(Kind.RECORD, 1, event=7), Entry(Kind.WAIT, 3, event=7), Entry(Kind.SYNC_STREAM, 3)],
        [Entry(Kind.SYNC_STREAM, 1)],
        [Entry(Kind.SYNC_DEVICE, 0)],
    ],
)
@pytest.mark.parametrize("second", [READ, HOST_READ], ids=["stream", "host"])
def test_a_wait_orders(between: list[Entry], second: Entry) -> None:
    """A read is after a write if a stream or the host has waited for it; the host's read needs the host's wait."""
    waits_on_host = any(entry.kind.name.startswith("SYNC") for entry in between)
    assert bool(find([WRITE, *between, second]).races) is (second is HOST_READ and not waits_on_host)


@pytest.mark.parametrize(
    "between",
    [
        [],
        [Entry(Kind.RECORD, 1, event=7)],
        [Entry(Kind.WAIT, 2, event=7), Entry(Kind.RECORD, 1, event=7)],
        [Entry(Kind.RECORD, 3, event=7), Entry(Kind.WAIT, 2, event=7)],
        [Entry(Kind.SYNC_STREAM, 2)],
    ],
)
def test_a_missing_wait_is_a_race(between: list[Entry]) -> None:
    """Without a wait, or with one for another stream or for an event before the write, there is a race."""
    (race,) = find([WRITE, *between, READ]).races
    assert (race.first, race.first_stream, race.second, race.second_stream) == ("write", 1, "read", 2)


def test_what_cannot_race() -> None:
    """Two reads, accesses of other bytes, and accesses of one stream are no races."""
    apart = Entry(Kind.ACCESS, 2, address=0x10040, nbytes=64, writes=True)
    same = Entry(Kind.ACCESS, 1, address=0x10000, nbytes=64, writes=True)
    read = Entry(Kind.ACCESS, 1, address=0x10000, nbytes=64)
    assert not find([WRITE, apart, same]).races
    assert not find([read, READ]).races


def test_an_access_of_many_pages_is_one_race() -> None:
    """A race is counted once for each pair of accesses, also if these share several pages of the search."""
    first = Entry(Kind.ACCESS, 1, address=0, nbytes=1 << 20, name="write", writes=True)
    second = Entry(Kind.ACCESS, 2, address=0, nbytes=1 << 20, name="read")
    assert find([first, second]).races.total() == 1


# From here on, whole runs on a fake GPU.


@pytest.fixture
def races_of() -> Iterator[Callable[..., Found]]:
    """Returns the races of two training steps with a policy and one of ``engine_runs.variants_of`` it."""
    from tests.fake_gpu import engine_runs, trace

    def run(policy: str, variant: str = "plain") -> Found:
        recording = engine_runs.recorded_steps(policy, variant, True)
        found = find(recording.entries)
        assert found.accesses > 1000
        return found

    engine_runs.join_alone()
    try:
        yield run
    finally:
        dist.destroy_process_group()
        trace.set_option(trace.Option.PEERS, 0)


ON_FAKE_GPU = pytest.mark.needs("fake GPU")


@ON_FAKE_GPU
@pytest.mark.parametrize(
    ("policy", "variant"),
    [
        *(("zeropp", "plain"), ("zero3", "chunks"), ("zeropp", "offload all"), ("zero2", "accumulate")),
        *(("fsdp2+qwz+qgz", variant) for variant in ("plain", "kept", "ahead", "some ahead")),
        ("fsdp2+bf16", "plain"),
    ],
)
def test_the_engine_has_no_race(races_of: Callable[..., Found], policy: str, variant: str) -> None:
    """Two training steps and a forward pass without gradients have no race, also inside FSDP2."""
    assert not races_of(policy, variant).races


class _Swapped(side_stream.SideStream):
    """Runs the body's work on another stream than that of which it records the end."""

    def beside(self, *, posted: bool = False) -> Any:
        return _Elsewhere(super().beside(posted=posted), torch.cuda.Stream(self._device))


class _Elsewhere:
    def __init__(self, beside: Any, stream: torch.cuda.Stream) -> None:
        self._beside, self._stream = beside, torch.cuda.stream(stream)

    def __enter__(self) -> Arrival:
        arrival: Arrival = self._beside.__enter__()
        self._stream.__enter__()
        return arrival

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.__exit__(kind, error, trace)
        self._beside.__exit__(kind, error, trace)


def _forgetting(self: exchanges.Buffers, *buffers: torch.Tensor) -> None:
    """Take buffers back without an event after their last use."""
    for buffer in buffers:
        self._free[buffer.numel()].append((buffer, Arrival(joined=True)))


def _used_last(self: exchanges.Buffers, nbytes: int) -> torch.Tensor:
    """Return the buffer that was used last, without waiting for that use."""
    size = size_class(nbytes)
    if self._free[size]:
        return self._free[size].pop()[0]
    return torch.empty(size, dtype=torch.uint8, device=self._device)


def _out_of_line(*args: Any, in_line: bool = False) -> Any:
    """Post what should be in line on another stream, for which nothing waits."""
    with torch.cuda.stream(torch.cuda.Stream()) if in_line else contextlib.nullcontext():
        return _collective(*args, in_line=in_line)


_collective = exchanges.collective


def _waits_for_nothing(self: exchanges.Distributed) -> None:
    """Return before the messages have come."""


def _on_a_stream_of_its_own(self: Wire) -> Any:
    """Encode, send and decode on another stream than FSDP2's, which nothing waits for."""
    return torch.cuda.stream(torch.cuda.Stream(self.mesh.device))


def _late_start(self: torch.cuda.Stream, stream: torch.cuda.Stream) -> None:
    """Do not wait for the other stream."""


def _unrecorded(self: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Do not tell the allocator that another stream uses the tensor."""


@ON_FAKE_GPU
@pytest.mark.parametrize(
    ("sabotage", "run"),
    [
        pytest.param((Arrival, "join", lambda _: None), ("zeropp", "plain"), id="Arrival.join"),
        pytest.param((Arrival, "join", lambda _: None), ("zero2", "offload"), id="Arrival.join-offload"),
        pytest.param((Arrival, "finish", lambda _: None), ("zero3", "offload all"), id="Arrival.finish"),
        pytest.param(
            (exchanges.Buffers, "give_back", _forgetting), ("zeropp", "plain"), id="Buffers.give_back"
        ),
        pytest.param(
            (torch.cuda.Stream, "wait_stream", _late_start), ("zero2", "offload"), id="stream-order"
        ),
        pytest.param(
            (exchanges.Distributed, "_receive", _waits_for_nothing), ("zero3", "plain"), id="messages"
        ),
        pytest.param((exchanges, "collective", _out_of_line), ("zeropp", "plain"), id="in-line"),
        pytest.param((Arrival, "join", lambda _: None), ("fsdp2+qwz+qgz", "ahead"), id="Arrival.join-fsdp2"),
        pytest.param((exchanges, "collective", _out_of_line), ("fsdp2+qwz+qgz", "plain"), id="in-line-fsdp2"),
        pytest.param(
            (exchanges.Buffers, "take", _used_last),
            ("fsdp2+bf16", "plain"),
            id="Buffers.take-fsdp2",
        ),
        pytest.param(
            (exchanges.Distributed, "_receive", _waits_for_nothing),
            ("fsdp2+qwz+qgz", "plain"),
            id="messages-fsdp2",
        ),
        pytest.param(
            (Wire, "on_current_stream", _on_a_stream_of_its_own),
            ("fsdp2+qwz+qgz", "plain"),
            id="stream-of-FSDP2",
        ),
    ],
)
def test_a_wait_that_is_removed_is_found(
    races_of: Callable[..., Found],
    monkeypatch: pytest.MonkeyPatch,
    sabotage: tuple[Any, str, Callable[..., Any]],
    run: tuple[str, str],
) -> None:
    """Without one of the engine's waits, the same run has races."""
    monkeypatch.setattr(*sabotage)
    assert races_of(*run).races


@ON_FAKE_GPU
def test_a_swapped_stream_is_found(races_of: Callable[..., Found], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers on another stream than the one that the computation waits for are races."""
    monkeypatch.setattr("impl.comm.wire.SideStream", _Swapped)
    assert races_of("zeropp").races


@ON_FAKE_GPU
@pytest.mark.parametrize("recorded", [True, False])
def test_memory_that_a_copy_still_reads_is_not_reused(
    monkeypatch: pytest.MonkeyPatch,
    recorded: bool,
) -> None:
    """Staging memory that is replaced is free only after the last copy out of it, which ``record_stream`` ensures."""
    from tests.fake_gpu import engine_runs

    if not recorded:
        monkeypatch.setattr(torch.Tensor, "record_stream", _unrecorded)
    memory, numel = HostMemory(torch.device("cuda", 0), Meter()), 1 << 20
    target = memory.empty("states", numel, torch.float32)
    with engine_runs.noted_accesses() as recording:
        staged = memory.stage(numel)
        staged.fill_(1.0)
        memory.download(staged, target, "gradients", "unit")
        del staged
        memory.stage(2 * numel)
        torch.zeros(STAGED, numel, device="cuda")  # of the size that was given back
    assert bool(find(recording.entries).races) is not recorded
