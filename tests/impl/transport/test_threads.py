"""Tests of how thread ranks take turns, share values and keys, and use the tensors of messages again."""

from __future__ import annotations

import torch

from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.plan.traffic import Tag
from impl.simulate import simulate
from impl.transport.threads import ThreadRank, ThreadStore, under
from tests.support.ranks import each_rank

TAG = Tag("forward", "weights", "u")


def _thread(mesh: Mesh) -> ThreadRank:
    assert mesh.thread is not None
    return mesh.thread


def test_one_rank_runs_at_a_time_and_each_gets_its_turn() -> None:
    """Ranks run in rank order, each until it waits for another one."""
    order: list[tuple[int, int]] = []

    def body(mesh: Mesh) -> None:
        for number in range(3):
            order.append((number, mesh.rank))
            _thread(mesh).share(None)

    simulate(1, 3)(body)
    first, *rest = order
    assert first == (0, 0)
    # The last rank to arrive does not wait, and so goes on at once.
    assert [number for number, _ in order] == [0, 0, 0, *[1] * 3, *[2] * 3]
    assert sorted(rest) == sorted({(number, rank) for number in range(3) for rank in range(3)} - {first})


@each_rank(2, 2)
def test_shared_values_are_those_of_all_ranks_in_order(mesh: Mesh) -> None:
    """What a rank shares is handed over as it is."""
    mine = torch.full((2,), float(mesh.rank))
    found = _thread(mesh).share(mine)
    assert found[mesh.rank] is mine
    assert [tensor.tolist() for tensor in found] == [[rank, rank] for rank in range(4)]


@each_rank(1, 3)
def test_the_store_is_torchs(mesh: Mesh) -> None:
    """Keys are shared under their prefix; numbers add up, the first to claim a key keeps it, and get() waits."""
    store = mesh.store()
    assert isinstance(store, ThreadStore)
    inner = under(under(store, "a"), "b")
    if mesh.rank == 1:
        inner.set("late", "text")
    assert inner.get("late") == b"text"
    assert store.check(["a/b/late"])
    assert not store.check(["late"])
    total = store.add("count", mesh.rank)
    _thread(mesh).share(None)
    assert total <= store.add("count", 0) == 3
    claimed = store.compare_set("claim", "", str(mesh.rank))
    assert claimed == store.get("claim")
    _thread(mesh).share(None)
    assert [each for each in _thread(mesh).share(store.delete_key("claim")) if each] == [True]


@each_rank(2, 2)
def test_messages_are_read_where_they_were_written(mesh: Mesh) -> None:
    """All ranks of a group read one tensor, and a later exchange of the same size uses it again."""
    wire, places = Wire(mesh), set()
    for number in range(4):
        exchange = wire.all_gather(mesh.topology.world_axis, 24, TAG)
        exchange.send.fill_(10 * number + mesh.rank)
        exchange.post()
        rows = exchange.wait()
        assert rows.tolist() == [[10 * number + rank] * 24 for rank in range(4)]
        assert len(set(_thread(mesh).share(rows.data_ptr()))) == 1
        places.add(rows.data_ptr())
        exchange.close()
        _thread(mesh).share(None)
    assert len(places) == 1


@each_rank(2, 3)
def test_kinds_of_exchanges_arrive(mesh: Mesh) -> None:
    """All-gathers, all-to-alls and steps of a ring along every axis deliver what was sent to this rank."""
    wire = Wire(mesh)
    for axis in (mesh.topology.world_axis, mesh.topology.node_axis, mesh.topology.local_axis):
        ranks = axis.group(mesh.rank)
        me = ranks.index(mesh.rank)
        scatter = wire.all_to_all(axis, 8, TAG)
        for target, row in enumerate(scatter.send.view(axis.size, 8)):
            row.fill_(10 * mesh.rank + target)
        scatter.post()
        step = wire.shift(axis, 8, TAG)
        step.send.fill_(mesh.rank)
        step.post()
        assert scatter.wait().tolist() == [[10 * rank + me] * 8 for rank in ranks]
        assert step.wait().tolist() == [[ranks[me - 1]] * 8]
        scatter.close()
        step.close()
    assert wire.describe() == dict.fromkeys(("world", "node", "local"), "threads")
