"""Tests that all messages arrive and are booked, and that an error names the rank of a message that does not."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from impl.comm.exchanges import Exchange
from impl.comm.mesh import Mesh
from impl.comm.watchdog import WireError
from impl.comm.wire import Transport, Wire
from impl.plan.traffic import Tag
from impl.policy.topology import Topology
from impl.transport.shared_memory import SLOTS
from tests.support.ranks import each_rank

TAG = Tag("forward", "weights", "u")


def arrive(exchange: Exchange) -> None:
    """Take an exchange, whose message is written, through ``post()``, ``wait()`` and ``close()``."""
    exchange.post()
    exchange.wait()
    exchange.close()


@pytest.mark.parametrize(
    ("transport", "topology"), [("backend", Topology(3, 1)), ("shm", Topology(1, 3))], ids=str
)
@each_rank(processes=True)
def test_many_exchanges_arrive_intact(mesh: Mesh, transport: Transport, topology: Topology) -> None:
    """Hundreds of interleaved exchanges of all kinds and changing sizes arrive unmixed, slots reused."""
    wire = Wire(mesh, transport=transport)
    axis = topology.local_axis if topology.nodes == 1 else topology.node_axis
    for number in range(40 * SLOTS):
        size = 16 * (1 + number % 5)
        gather = wire.all_gather(axis, size, TAG)
        gather.send.fill_((7 * number + mesh.rank) % 251)
        gather.post()
        scatter = wire.all_to_all(axis, size, TAG)
        for target in range(axis.size):
            scatter.send.view(axis.size, size)[target] = (number + 16 * mesh.rank + target) % 251
        scatter.post()
        step = wire.shift(axis, size, TAG)
        step.send.fill_((number + mesh.rank) % 251)
        step.post()
        for source, row in enumerate(gather.wait()):
            assert row.tolist() == [(7 * number + source) % 251] * size
        for source, row in enumerate(scatter.wait()):
            assert row.tolist() == [(number + 16 * source + mesh.rank) % 251] * size
        assert step.wait().tolist() == [[(number + (mesh.rank - 1) % 3) % 251] * size]
        for exchange in (gather, scatter, step):
            exchange.close()


@pytest.mark.parametrize(
    ("transport", "topology"), [("backend", Topology(3, 1)), ("shm", Topology(1, 3))], ids=str
)
@each_rank(processes=True)
def test_messages_of_any_length_arrive(mesh: Mesh, transport: Transport, topology: Topology) -> None:
    """In an uneven all-to-all every message arrives whole, none of 0 bytes is sent, and all others are booked."""
    _exchange_unevenly(Wire(mesh, transport=transport))


@each_rank(2, 2)
def test_threads_exchange_messages_of_any_length(mesh: Mesh) -> None:
    """Ranks that are threads read their messages in the others' rows."""
    _exchange_unevenly(Wire(mesh))


@each_rank(2, 2, backend="nccl_rules")
def test_nccls_rules_hold_for_messages_of_any_length(mesh: Mesh) -> None:
    """A backend without messages from rank to rank carries them as one collective."""
    _exchange_unevenly(Wire(mesh))


def _exchange_unevenly(wire: Wire) -> None:
    """Exchange messages whose lengths change from pair to pair and from exchange to exchange."""
    mesh, axis, sent = wire.mesh, wire.mesh.topology.world_axis, 0
    tag, me = Tag("step", "momentum"), wire.mesh.rank
    for number in range(3 * SLOTS):
        sizes = tuple(
            tuple(16 * ((source + 2 * target + number) % 4) for target in range(axis.size))
            for source in range(axis.size)
        )
        exchange, start = wire.uneven_all_to_all(axis, sizes, tag, "a mark"), 0
        for target, size in enumerate(sizes[me]):
            exchange.send[start : start + size] = (number + 16 * me + target) % 251
            start += size
        exchange.post()
        for source, message in enumerate(exchange.parts()):
            assert message.tolist() == [(number + 16 * source + me) % 251] * sizes[source][me]
        exchange.close()
        sent += sum(sizes[me]) - sizes[me][me]
    booked = wire.ledger.rows()
    assert {key.purpose for key in booked} == {"momentum"}
    assert sum(row.bytes for row in booked.values()) == wire.carried == sent
    assert mesh.topology.nodes > 1 or {key.link for key in booked} == {"intra"}


@each_rank(1, 2)
def test_ranks_with_other_sizes_or_marks_are_found(mesh: Mesh) -> None:
    """What ranks must agree on is part of the fingerprint, and the error shows both sides."""
    wire, sizes = Wire(mesh), ((0, 16), (32, 0))
    exchange = wire.uneven_all_to_all(
        mesh.topology.world_axis, sizes, Tag("step", "update"), f"owners {mesh.rank}"
    )
    exchange.post()
    with pytest.raises(WireError, match="owners"):
        exchange.parts()


@each_rank(1, 2, processes=True)
def test_a_missing_rank_is_named(mesh: Mesh) -> None:
    """Waiting for a rank that does not take part ends in an error that names the rank."""
    wire = Wire(mesh, transport="shm", timeout=0.3)
    axis = mesh.topology.local_axis
    arrive(wire.all_gather(axis, 64, TAG))
    if mesh.rank == 1:
        time.sleep(1)
        return
    exchange = wire.all_gather(axis, 64, TAG)
    exchange.post()
    with pytest.raises(WireError, match="rank 1 did not send"):
        exchange.wait()


@each_rank(1, 2)
def test_a_group_of_one_sends_nothing(mesh: Mesh) -> None:
    """An exchange of one rank returns what was written, and books nothing."""
    wire = Wire(mesh)
    exchange = wire.all_gather(mesh.topology.node_axis, 32, TAG)
    exchange.send.fill_(5)
    exchange.post()
    assert exchange.wait().tolist() == [[5] * 32]
    assert wire.ledger.total("inter") == wire.ledger.total("intra") == 0


class _Slow:
    """A link on which everything arrives 0.2 s after it was booked."""

    def __init__(self) -> None:
        self.booked: list[int] = []
        self.release = 0.0

    def book(self, nbytes: int) -> float:
        self.booked.append(nbytes)
        self.release = time.monotonic() + 0.2
        return self.release


@each_rank(3, 2, backend="threaded")
def test_a_modelled_link_carries_only_what_crosses_nodes(mesh: Mesh) -> None:
    """Only bytes to other nodes are booked with the pacer, and their messages do not complete before its time."""
    pacer = _Slow()
    wire = Wire(mesh, pacer=pacer)
    for axis in (mesh.topology.local_axis, mesh.topology.node_axis):
        exchange = wire.all_gather(axis, 48, TAG)
        exchange.send.zero_()
        exchange.post()
        exposed, begin = wire.exposed_seconds, time.monotonic()
        exchange.wait()
        end = time.monotonic()
        exchange.close()
    exposed = wire.exposed_seconds - exposed
    assert pacer.booked == [96]
    assert end >= pacer.release
    # From within the wait to the release, unless this thread came back to it after the release.
    assert exposed > 0 or begin >= pacer.release
    assert exposed <= end - begin


def test_shared_memory_is_for_cpus() -> None:
    """Transport shm is refused for a mesh on another device."""
    mesh = Mesh(Topology(1, 1), 0, torch.device("cuda"))
    with pytest.raises(WireError, match="transport 'shm' exchanges CPU memory"):
        Wire(mesh, transport="shm")


def test_messages_on_streams_are_not_paced() -> None:
    """A pacer is refused where a GPU's stream waits for messages, because the host would sleep instead."""
    mesh = Mesh(Topology(1, 1), 0, torch.device("cuda"))
    with pytest.raises(WireError, match="use transport 'staged', or leave pacer= out"):
        Wire(mesh, pacer=_Slow())


@each_rank(1, 3, processes=True)
def test_the_record_names_what_carried_each_kind_of_message(mesh: Mesh) -> None:
    """The record distinguishes a ring's steps and a norm along one axis, whose transports differ."""
    wire = Wire(mesh, transport="shm")
    world = mesh.topology.world_axis
    for exchange in (wire.shift(world, 16, TAG), wire.all_gather(world, 16, Tag("step", "control"))):
        arrive(exchange)
    assert wire.describe() == {"world": "gloo point to point", "world (control)": "shm"}


@each_rank(1, 2, processes=True)
def test_ranks_that_part_in_shared_memory_are_told_at_once(mesh: Mesh) -> None:
    """A rank never takes the message of another exchange for its own: the first different exchange is an error."""
    wire = Wire(mesh, transport="shm", timeout=60.0)
    tag = [Tag("backward", "gradients", "blocks.1"), Tag("backward", "weights", "blocks.0")][mesh.rank]
    exchange = wire.all_gather(mesh.topology.world_axis, 64, tag)
    exchange.post()
    with pytest.raises(WireError, match="found that the ranks' exchanges differ") as caught:
        exchange.wait()
    assert "blocks.1" in str(caught.value)
    assert "blocks.0" in str(caught.value)


@pytest.mark.parametrize("waits", [False, True])
@each_rank(2, 1, processes=True)
def test_memory_of_a_message_that_is_due_is_not_used_again(mesh: Mesh, waits: bool) -> None:
    """The buffers of an exchange that was closed before it arrived, or failed, are not reused."""
    wire = Wire(mesh, timeout=0.3)
    axis = mesh.topology.node_axis
    wire.mesh.group(axis)
    if mesh.rank == 1:
        dist.barrier()
        return
    late = wire.all_to_all(axis, 1024, TAG)
    late.post()
    due = {buffer.data_ptr() for buffer in late._taken}
    if waits:
        with pytest.raises(WireError, match="could not finish exchange 1"):
            late.wait()
    late.close()
    fresh = wire.all_to_all(axis, 1024, TAG)
    dist.barrier()
    assert due.isdisjoint(buffer.data_ptr() for buffer in fresh._taken)


@each_rank(1, 2)
def test_small_rows_of_any_layout_and_type_arrive(mesh: Mesh) -> None:
    """Strided, expanded, negated and conjugate rows arrive as their values, and are left as they are."""
    wire = Wire(mesh)
    for row in (
        torch.arange(8.0)[::2],
        torch.ones(1).expand(3),
        torch._neg_view(torch.arange(3.0)),
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([1 + 2j, 3j]).conj().imag,
        torch.tensor([True, False]),
        torch.tensor([1.5], dtype=torch.float16, requires_grad=True),
    ):
        values = row.tolist()
        rows = wire.all_gather_small(row)
        assert rows.dtype == row.dtype
        assert rows.tolist() == [values, values]
        assert row.tolist() == values
