"""What leaves a rank is booked, and arrives; what does not arrive is an error that names who."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from impl.comm.exchanges import Distributed
from impl.comm.mesh import Mesh, MeshError
from impl.comm.watchdog import WireError
from impl.comm.wire import Transport, Wire
from impl.plan.topology import Topology
from impl.plan.traffic import Tag
from impl.transport.shared_memory import SLOTS
from tests.support.ranks import on_processes, on_threads

TAG = Tag("forward", "weights", "u")


def _rounds(mesh: Mesh, transport: Transport, rounds: int) -> bool:
    """Exchange changing messages of changing size many times; True if all arrived intact."""
    wire = Wire(mesh, transport=transport)
    axis = mesh.topology.local_axis if mesh.topology.nodes == 1 else mesh.topology.node_axis
    place = sum(divmod(mesh.rank, mesh.topology.ranks_per_node))
    intact = True
    for number in range(rounds):
        size = 16 * (1 + number % 5)
        gather = wire.all_gather(axis, size, TAG)
        gather.send.fill_((7 * number + place) % 251)
        gather.post()
        scatter = wire.all_to_all(axis, size, TAG)
        for target in range(axis.size):
            scatter.send.view(axis.size, size)[target] = (number + 16 * place + target) % 251
        scatter.post()
        for source, row in enumerate(gather.wait()):
            intact &= bool((row == (7 * number + source) % 251).all()) and row.numel() == size
        for source, row in enumerate(scatter.wait()):
            intact &= bool((row == (number + 16 * source + place) % 251).all())
        gather.close()
        scatter.close()
    return intact


@pytest.mark.parametrize(
    ("transport", "topology"),
    [("backend", Topology(3, 1)), ("shm", Topology(1, 3))],
    ids=str,
)
def test_many_exchanges_arrive_intact(transport: Transport, topology: Topology) -> None:
    """Hundreds of interleaved exchanges of changing sizes arrive unmixed, slots reused many times."""
    assert all(on_processes(topology, _rounds, transport, 40 * SLOTS))


def _late(mesh: Mesh) -> str:
    wire = Wire(mesh, transport="shm", timeout=0.3)
    axis = mesh.topology.local_axis
    wire.reserve(axis, 64)
    if mesh.rank == 1:
        time.sleep(1)
        return ""
    exchange = wire.all_gather(axis, 64, TAG)
    exchange.post()
    try:
        exchange.wait()
    except WireError as error:
        return str(error)
    return "arrived"


def test_a_missing_rank_is_named() -> None:
    """Waiting for a rank that does not come ends in an error that names it."""
    assert "rank 1 did not send" in on_processes(Topology(1, 2), _late)[0]


def _alone(mesh: Mesh) -> int:
    wire = Wire(mesh)
    exchange = wire.all_gather(mesh.topology.node_axis, 32, TAG)
    exchange.send.fill_(5)
    exchange.post()
    assert exchange.wait().tolist() == [[5] * 32]
    return len(wire.ledger.rows())


def test_a_group_of_one_sends_nothing() -> None:
    """An exchange of one rank gives back what was written and books nothing."""
    assert on_threads(Topology(1, 2), _alone) == [0, 0]


class _Slow:
    """A link that carries everything 0.2 s after it was booked."""

    def __init__(self) -> None:
        self.booked: list[int] = []
        self.release = 0.0

    def book(self, nbytes: int) -> float:
        self.booked.append(nbytes)
        self.release = time.monotonic() + 0.2
        return self.release


def _paced(mesh: Mesh) -> tuple[list[int], bool, bool]:
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
    # From within the wait to the release, unless this thread came back to it after the release.
    counted = (exposed > 0 or begin >= pacer.release) and exposed <= end - begin
    return pacer.booked, end >= pacer.release, counted


def test_a_modelled_link_carries_only_what_crosses_nodes() -> None:
    """The pacer is asked for bytes to other nodes alone, and messages do not complete before it says."""
    for booked, held_back, counted in on_threads(Topology(3, 2), _paced):
        assert booked == [96]
        assert held_back
        assert counted


def _wrong_world(mesh: Mesh) -> str:
    with pytest.raises(MeshError) as caught:
        Mesh.create(Topology(3, 5))
    return str(caught.value)


def test_a_topology_of_another_size_is_refused() -> None:
    """A mesh over a process group of another size is refused, naming both sizes."""
    assert on_threads(Topology(1, 2), _wrong_world)[0] == (
        "topology 3x5 needs 15 ranks, the process group has 2"
    )


def test_shared_memory_is_for_cpus() -> None:
    """Transport shm is refused for a mesh on another device."""
    mesh = Mesh(Topology(1, 1), 0, torch.device("cuda"))
    with pytest.raises(WireError, match="transport 'shm' exchanges CPU memory"):
        Wire(mesh, transport="shm")


def _described(mesh: Mesh) -> dict[str, str]:
    wire = Wire(mesh, transport="shm")
    world = mesh.topology.world_axis
    for exchange in (wire.shift(world, 16, TAG), wire.all_gather(world, 16, Tag("step", "control"))):
        exchange.post()
        exchange.wait()
        exchange.close()
    return wire.describe()


def test_the_record_names_what_carried_each_kind_of_message() -> None:
    """A ring's steps and a norm along one axis are told apart, though their transports differ."""
    for found in on_processes(Topology(1, 3), _described):
        assert found == {"world": "gloo point to point", "world (control)": "shm"}


def _shifted(mesh: Mesh) -> list[int]:
    wire = Wire(mesh)
    got = []
    for number in range(20):
        steps = [wire.shift(mesh.topology.world_axis, 16 * (1 + number % 3), TAG) for _ in range(2)]
        for index, step in enumerate(steps):
            step.send.fill_(mesh.rank + 10 * index)
            step.post()
        got += [int(step.wait()[0, -1]) for step in steps]
        for step in steps:
            step.close()
    return got


def test_shifts_arrive_from_the_rank_before() -> None:
    """Each rank receives its predecessor's messages, in the order in which they were posted."""
    for rank, got in enumerate(on_processes(Topology(1, 3), _shifted)):
        assert got == [(rank - 1) % 3, (rank - 1) % 3 + 10] * 20


def _parted(mesh: Mesh) -> str:
    """Rank 1 opens its two exchanges the other way round."""
    wire = Wire(mesh, transport="shm", timeout=60.0)
    wire.reserve(mesh.topology.world_axis, 64)
    tags = [Tag("backward", "gradients", "blocks.1"), Tag("backward", "weights", "blocks.0")]
    first, _ = tags if mesh.rank == 0 else reversed(tags)
    exchange = wire.all_gather(mesh.topology.world_axis, 64, first)
    exchange.post()
    with pytest.raises(WireError) as caught:
        exchange.wait()
    return str(caught.value)


def test_ranks_that_part_in_shared_memory_are_told_at_once() -> None:
    """A rank never takes another exchange's message for its own: the first one that differs is an error."""
    for said in on_processes(Topology(1, 2), _parted):
        assert "found that the ranks' exchanges differ" in said
        assert "blocks.1" in said
        assert "blocks.0" in said


def _used_again(mesh: Mesh, waits: bool) -> bool:
    """Close an exchange whose message is due, and see whether its memory is given to the next one."""
    wire = Wire(mesh, timeout=0.3)
    axis = mesh.topology.node_axis
    wire.mesh.group(axis)
    if mesh.rank == 1:
        dist.barrier()
        return False
    late = wire.all_to_all(axis, 1024, TAG)
    late.post()
    assert isinstance(late, Distributed)
    due = {buffer.data_ptr() for buffer in late._taken}
    if waits:
        with pytest.raises(WireError, match="could not finish exchange 1"):
            late.wait()
    late.close()
    fresh = wire.all_to_all(axis, 1024, TAG)
    assert isinstance(fresh, Distributed)
    dist.barrier()
    return not due.isdisjoint(buffer.data_ptr() for buffer in fresh._taken)


@pytest.mark.parametrize("waits", [False, True])
def test_memory_of_a_message_that_is_due_is_not_used_again(waits: bool) -> None:
    """An exchange that is closed before it arrived, or after it did not, keeps its buffers to itself."""
    assert on_processes(Topology(2, 1), _used_again, waits) == [False, False]


def _small(mesh: Mesh) -> tuple[list[list[float]], list[tuple[str, str, int]]]:
    """Norms of all ranks, and phase, purpose and bytes of what that sent."""
    wire = Wire(mesh)
    found = wire.all_gather_small(torch.tensor([mesh.rank + 0.5, -mesh.rank], dtype=torch.float64))
    again = wire.all_gather_small(torch.tensor([mesh.rank, 9]), "buffers")
    assert again.tolist() == [[rank, 9] for rank in range(mesh.topology.world)]
    rows = wire.ledger.rows().items()
    return found.tolist(), sorted((key.phase, key.purpose, sent.bytes) for key, sent in rows)


def test_small_values_of_all_ranks_are_control_messages() -> None:
    """Each rank gets every rank's values by rank, in their type, and books them once a destination."""
    for values, booked in on_threads(Topology(1, 3), _small):
        assert values == [[0.5, 0.0], [1.5, -1.0], [2.5, -2.0]]
        assert booked == [("step", "buffers", 32), ("step", "control", 32)]
