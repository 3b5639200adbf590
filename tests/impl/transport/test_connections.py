"""Messages over TCP connections arrive whole and in their places; what cannot arrive is told."""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from impl.comm.mesh import Mesh
from impl.comm.wire import Tag, Wire, WireError
from impl.plan.topology import Topology
from impl.transport import calling, connections
from impl.transport.connections import Connections, PartedError, PendingExchange
from impl.transport.shared_memory import Waiting
from tests.support.ranks import on_processes, on_threads

LIMIT = timedelta(seconds=20)
LARGE = 3 << 20  # more than two kernels take of a connection whose buffers are small
Plan = list[tuple[str, int, bool]]  # kind and bytes of an exchange, and whether one is waited for after it


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of few KiB, so that all but small messages need the thread."""
    monkeypatch.setattr(calling, "BUFFER_BYTES", 8192)
    monkeypatch.setattr(connections, "_UNFORCED_BYTES", 2048)
    monkeypatch.setattr(connections, "_LINGER_SECONDS", 0.05)


def _connections(mesh: Mesh, seconds: float = 20.0) -> Connections:
    return Connections(Waiting(mesh.group(mesh.topology.world_axis), seconds, lambda _: ()))


def _posted(made: Connections, mark: int, sends: Any, receives: Any) -> PendingExchange:
    passage = made.prepare(mark, sends, receives)
    passage.post()
    return passage


def _message(source: int, target: int, number: int, nbytes: int) -> Tensor:
    """(bytes,) uint8 that no other message equals, but for empty ones."""
    return ((torch.arange(nbytes) * 7 + 31 * source + 17 * target + 5 * number) % 251).to(torch.uint8)


def _planned(mesh: Mesh, plan: Plan, order: int) -> bool:
    """Carry out a plan, waiting in some order; True if every byte arrived in its place."""
    made, me, world = _connections(mesh), mesh.rank, mesh.topology.world
    under_way: list[tuple[PendingExchange, list[tuple[int, int, Tensor]]]] = []
    intact = True

    def wait() -> None:
        nonlocal intact
        passage, expected = under_way.pop(order % len(under_way))
        passage.wait(LIMIT)
        for source, number, received in expected:
            intact &= torch.equal(received, _message(source, me, number, received.numel()))

    for number, (kind, nbytes, waits) in enumerate(plan):
        others = [(me + step) % world for step in range(1, world)]
        to, of = ([others[0]], [others[-1]]) if kind == "shift" else (others, others)
        received = [(source, torch.full((nbytes,), 255, dtype=torch.uint8)) for source in of]
        sent = [(target, _message(me, target, number, nbytes)) for target in to]
        under_way.append((_posted(made, number, sent, received), [(i, number, row) for i, row in received]))
        if waits:
            wait()
    while under_way:
        wait()
    made.close()
    return intact


PLANS = st.lists(
    st.tuples(
        st.sampled_from(["all", "shift"]),
        st.one_of(st.integers(0, 64), st.integers(2000, 300_000)),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.usefixtures("narrow")
@settings(max_examples=25)
@given(plan=PLANS, world=st.integers(2, 4), order=st.integers(0, 5))
@example(plan=[("all", LARGE, False), ("all", 3, True), ("shift", LARGE, False)], world=3, order=1)
@example(plan=[("shift", 0, False), ("all", 0, False)], world=2, order=0)
def test_messages_of_any_size_arrive_whole_in_any_order_of_waits(plan: Plan, world: int, order: int) -> None:
    """Whatever is posted, and in whichever order it is waited for, each byte arrives in its place."""
    assert all(on_threads(Topology(world, 1), _planned, plan, order))


def _while_computing(mesh: Mesh) -> bool:
    """Post a large message, look away, and see all but a buffer of it arrive before anybody waits."""
    made, other = _connections(mesh), 1 - mesh.rank
    received, expected = torch.zeros(LARGE, dtype=torch.uint8), _message(other, mesh.rank, 0, LARGE)
    passage = _posted(made, 7, [(other, _message(mesh.rank, other, 0, LARGE))], [(other, received)])
    most, deadline = LARGE - connections._UNFORCED_BYTES, time.monotonic() + 20
    while not torch.equal(received[:most], expected[:most]) and time.monotonic() < deadline:
        time.sleep(0.01)  # a rank that computes
    there = torch.equal(received[:most], expected[:most])
    passage.wait(LIMIT)
    made.close()
    return there and torch.equal(received, expected)


@pytest.mark.usefixtures("narrow")
def test_what_is_larger_than_the_buffers_travels_while_ranks_compute() -> None:
    """What no kernel takes at once arrives before anybody waits for it; then the thread ends."""
    assert on_threads(Topology(2, 1), _while_computing) == [True, True]
    deadline = time.monotonic() + 20
    while any(thread.name == "zeropp-connections" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _by_the_kernel(mesh: Mesh) -> tuple[bool, bool]:
    """Whether a message that fits the buffers arrived, and whether it needed a thread."""
    made, other = _connections(mesh), 1 - mesh.rank
    received = torch.zeros(1 << 20, dtype=torch.uint8)
    passage = _posted(made, 7, [(other, _message(mesh.rank, other, 0, 1 << 20))], [(other, received)])
    threads = {thread.name for thread in threading.enumerate()}
    passage.wait(LIMIT)
    made.close()
    whole = torch.equal(received, _message(other, mesh.rank, 0, 1 << 20))
    return whole, "zeropp-connections" in threads


def _described(mesh: Mesh) -> dict[str, str]:
    wire = Wire(mesh, transport="tcp", timeout=20)
    exchange = wire.all_gather(mesh.topology.node_axis, 8, Tag("forward", "weights", "u"))
    exchange.send.zero_()
    exchange.post()
    exchange.wait()
    exchange.close()
    told = wire.describe()
    wire.close()
    return told


def test_the_record_says_that_the_kernel_refused_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where buffers are of the size that the kernel chose, the record has another word than where of ours."""
    monkeypatch.setattr(calling, "_enlarge", lambda _: None)
    assert on_threads(Topology(2, 1), _described) == [{"node": "tcp in small buffers"}] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only CAP_NET_ADMIN may ask for large buffers")
def test_what_fits_the_buffers_needs_no_thread() -> None:
    """Where the kernel may be asked for room, a message of 1 MiB is its alone, and the record says so."""
    assert on_processes(Topology(2, 1), _by_the_kernel) == [(True, False)] * 2
    assert on_threads(Topology(2, 1), _described) == [{"node": "tcp"}] * 2


def _parting(mesh: Mesh, marks: tuple[int, int], sizes: tuple[int, int]) -> str:
    made, other = _connections(mesh), 1 - mesh.rank
    nbytes = sizes[mesh.rank]
    received = torch.zeros(nbytes, dtype=torch.uint8)
    passage = _posted(made, marks[mesh.rank], [(other, received.clone())], [(other, received)])
    with pytest.raises(PartedError) as caught:
        passage.wait(LIMIT)
    with pytest.raises(PartedError):  # and nothing else is read from there
        _posted(made, 1, [], [(other, received)]).wait(LIMIT)
    made.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("marks", "sizes"), [((1, 2), (8, 8)), ((1, 1), (8, 24)), ((1, 1), (24, 8)), ((1, 2), (LARGE, LARGE))]
)
def test_a_message_of_another_exchange_is_told(marks: tuple[int, int], sizes: tuple[int, int]) -> None:
    """Another mark or another length ends the connection at once, naming the rank and what it sent."""
    first, second = on_threads(Topology(2, 1), _parting, marks, sizes)
    assert first == f"rank 1 sent another message, of {sizes[1]} B"
    assert second == f"rank 0 sent another message, of {sizes[0]} B"


def _orders(mesh: Mesh) -> str:
    wire = Wire(mesh, transport="tcp", timeout=20)
    exchange = wire.all_gather(mesh.topology.node_axis, 8, Tag("forward", "weights", f"u{mesh.rank}"))
    exchange.send.zero_()
    exchange.post()
    with pytest.raises(WireError) as caught:
        exchange.wait()
    return str(caught.value)


def test_ranks_that_part_are_told_at_once() -> None:
    """The wire says which exchange a rank is in when it meets another rank's."""
    (text, _) = on_processes(Topology(2, 1), _orders)
    assert text.startswith(
        "rank 0 found that the ranks' exchanges differ: it is in exchange 1, all_gather of 8 B"
    )


def _late(mesh: Mesh, sends: bool) -> str:
    made = _connections(mesh)
    if mesh.rank == 1:
        time.sleep(1)
        made.close()
        return ""
    row = torch.zeros(8, dtype=torch.uint8)
    sent, received = ([(1, torch.zeros(LARGE, dtype=torch.uint8))], []) if sends else ([], [(1, row)])
    with pytest.raises(TimeoutError) as caught:
        _posted(made, 1, sent, received).wait(timedelta(seconds=0.3))
    return str(caught.value)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(("sends", "told"), [(False, "did not send"), (True, "did not receive")])
def test_a_wait_ends_at_its_limit(sends: bool, told: str) -> None:
    """Who does not send, or take, is named after the limit."""
    assert on_threads(Topology(2, 1), _late, sends)[0] == f"waited 0.3 s: rank 1 {told}"


def _gone(mesh: Mesh) -> str:
    made = _connections(mesh)
    if mesh.rank == 1:
        made.close()
        return ""
    begin = time.monotonic()
    with pytest.raises(ConnectionError, match=r"rank 1 (has ended its connection|is lost)") as caught:
        _posted(made, 1, [], [(1, torch.zeros(8, dtype=torch.uint8))]).wait(LIMIT)
    assert time.monotonic() - begin < LIMIT.total_seconds()
    return str(caught.value)


def test_a_rank_that_is_gone_is_told_before_the_limit() -> None:
    """A connection that ended is an error that names the rank."""
    assert "rank 1" in on_threads(Topology(2, 1), _gone)[0]


def _unused() -> Callable[[], int]:
    return lambda: len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_nothing_stays_open() -> None:
    """Connections that were closed, or forgotten, leave no handle behind."""

    def forgotten(mesh: Mesh) -> None:
        _connections(mesh)

    count = _unused()
    on_threads(Topology(2, 1), _planned, [("all", 100, True)], 0)
    gc.collect()
    before = count()
    for body in (lambda mesh: _planned(mesh, [("all", 100, True)], 0), forgotten):
        on_threads(Topology(3, 1), body)
        gc.collect()
    assert count() <= before


class _Ctrl(KeyboardInterrupt):
    """Ctrl-C, as this test presses it."""


@functools.cache
def _looks(code: Any) -> frozenset[int]:
    """Where the interpreter looks for signals in ``code``: after each call, and as it is entered."""
    found, before = set(), ""
    for one in dis.get_instructions(code):
        if before in {"CALL", "CALL_FUNCTION_EX", "RESUME"}:
            found.add(one.offset)
        before = one.opname
    return frozenset(found)


class _Pressed:
    """Presses Ctrl-C at the ``number``-th look for it in :mod:`impl.transport.connections` on this thread."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __enter__(self) -> Self:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    @property
    def done(self) -> bool:
        """Whether it was pressed."""
        return self._left <= 0

    def _called(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != connections.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._traced

    def _traced(self, frame: Any, event: str, _: Any) -> Any:
        if event == "opcode" and frame.f_lasti in _looks(frame.f_code):
            self._left -= 1
            if self._left == 0:
                sys.settrace(None)
                frame.f_trace = None
                raise _Ctrl
        return self._traced


def _interrupted(mesh: Mesh, nbytes: int, numbers: range) -> list[int]:
    """Interrupt one exchange after the other, each a little later, and go on; where one was not intact."""
    made, other = _connections(mesh), 1 - mesh.rank
    broken = []
    for number in numbers:
        before, between = torch.zeros(2, nbytes, dtype=torch.uint8).unbind()
        gone = _posted(
            made, 3 * number, [(other, _message(mesh.rank, other, number, nbytes))], [(other, before)]
        )
        passage = made.prepare(
            3 * number + 1, [(other, _message(mesh.rank, other, number + 1, nbytes))], [(other, between)]
        )
        with contextlib.suppress(_Ctrl), _Pressed(number if mesh.rank == 0 else -1):
            passage.post()
            passage.wait(LIMIT)
        passage.post()
        for each in (passage, gone):
            each.wait(LIMIT)
        whole = torch.equal(before, _message(other, mesh.rank, number, nbytes))
        if not (whole and torch.equal(between, _message(other, mesh.rank, number + 1, nbytes))):
            broken.append(number)
    made.close()
    return broken


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("nbytes", [40, 30_000])
def test_an_interrupt_at_any_call_loses_no_byte(nbytes: int) -> None:
    """Wherever Ctrl-C comes in a post or a wait, both may be called again, and all arrives whole."""
    assert on_threads(Topology(2, 1), _interrupted, nbytes, range(1, 160)) == [[], []]


def _used_again(mesh: Mesh, waits: bool) -> bool:
    """Close an exchange whose message is due, and see whether its memory is given to the next one."""
    wire = Wire(mesh, transport="tcp", timeout=0.2)
    axis = mesh.topology.node_axis
    wire.reserve(axis, 0)
    if mesh.rank == 1:
        dist.barrier()
        wire.close()
        return False
    late = wire.all_to_all(axis, 1024, Tag("backward", "gradients"))
    late.post()
    addresses = {late.send.data_ptr()}
    if waits:
        with pytest.raises(WireError, match="rank 1 did not send"):
            late.wait()
    late.close()
    left = wire.buffer_bytes
    fresh = wire.all_to_all(axis, 1024, Tag("backward", "gradients"))
    dist.barrier()
    wire.close()
    return fresh.send.data_ptr() in addresses or left != 0


@pytest.mark.parametrize("waits", [False, True])
def test_memory_of_a_message_that_is_due_is_not_used_again(waits: bool) -> None:
    """An exchange that is closed before it arrived, or after it did not, keeps its buffers to itself."""
    assert on_processes(Topology(2, 1), _used_again, waits) == [False, False]


def _posted_twice(mesh: Mesh) -> list[int]:
    wire = Wire(mesh, transport="tcp", timeout=20)
    axis, found = mesh.topology.node_axis, []
    for number in range(3):
        exchange = wire.all_gather(axis, 4, Tag("forward", "weights"))
        exchange.send.fill_(10 * mesh.rank + number)
        exchange.post()
        if mesh.rank == 0:
            exchange.post()
        found.append(int(exchange.wait()[1 - mesh.rank, 0]))
        exchange.close()
    wire.close()
    return found


def test_what_is_posted_again_is_sent_once() -> None:
    """A pass that was interrupted as it posted may post again."""
    assert on_processes(Topology(2, 1), _posted_twice) == [[10, 11, 12], [0, 1, 2]]


def _orphaned(mesh: Mesh) -> float:
    """Seconds until a rank is told that another one is gone, which has left a process behind."""
    made = _connections(mesh)
    if mesh.rank == 1:
        if (left := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        made.close()
        dist.barrier()
        os.kill(left, signal.SIGKILL)
        os.waitpid(left, 0)
        return 0.0
    begin = time.monotonic()
    with pytest.raises(ConnectionError, match="rank 1"):
        _posted(made, 1, [], [(1, torch.zeros(8, dtype=torch.uint8))]).wait(LIMIT)
    seconds = time.monotonic() - begin
    dist.barrier()
    return seconds


def test_a_rank_that_is_gone_is_told_though_processes_of_its_own_go_on() -> None:
    """What a rank has forked, as a loader of data is, holds none of its connections."""
    assert on_processes(Topology(2, 1), _orphaned)[0] < LIMIT.total_seconds() / 2


def _two_waits(mesh: Mesh) -> float:
    """Seconds until a thread has what another thread's wait has read for it."""
    made, other = _connections(mesh), 1 - mesh.rank
    rows = torch.zeros(2, 100_000, dtype=torch.uint8)
    passages = [_posted(made, i, [], [(other, row)]) for i, row in enumerate(rows)]
    threads = [threading.Thread(target=passage.wait, args=(LIMIT,)) for passage in reversed(passages)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    for i, row in enumerate(rows):
        _posted(made, i, [(other, row.clone())], []).wait(LIMIT)
    for thread in threads:
        thread.join()
    made.close()
    return time.monotonic() - begin


def test_two_threads_may_wait() -> None:
    """What one thread reads for another does not leave that one asleep until its limit."""
    assert max(on_threads(Topology(2, 1), _two_waits)) < LIMIT.total_seconds() / 2


def _forgotten_behind(mesh: Mesh) -> None:
    made = _connections(mesh)
    _posted(made, 1, [(1 - mesh.rank, torch.zeros(LARGE, dtype=torch.uint8))], [])


@pytest.mark.usefixtures("narrow")
def test_connections_that_are_forgotten_end_with_all_that_they_carried() -> None:
    """The thread that hands on a message nobody takes does not keep its connections alive."""
    on_threads(Topology(2, 1), _forgotten_behind)
    deadline = time.monotonic() + 20
    while any(thread.name == "zeropp-connections" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _lost_twice(mesh: Mesh) -> tuple[int, int]:
    made = _connections(mesh)
    if mesh.rank == 1:
        made.close()
        return 0, 0
    kept, depths = [], []
    for number in range(3):
        row = torch.zeros(8, dtype=torch.uint8)
        kept.append(weakref.ref(row))
        with pytest.raises(ConnectionError) as caught:
            _posted(made, number, [], [(1, row)]).wait(LIMIT)
        depths.append(len(caught.traceback))
        del row, caught
    gc.collect()
    return sum(row() is not None for row in kept), depths[2] - depths[1]


def test_errors_of_a_lost_rank_keep_no_memory() -> None:
    """Each wait on a connection that is lost raises its own error, and lets its message's memory go."""
    assert on_threads(Topology(2, 1), _lost_twice)[0] == (0, 0)
