"""The process group with NCCL's rules names each broken rule; collectives and the link's probe keep them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.cluster.link import exchange
from harness.cluster.port import Port
from harness.cluster.rank import Rank
from impl.comm.mesh import Mesh
from impl.policy.topology import Topology
from tests.support.nccl_rules import RULES, NcclRuleError
from tests.support.ranks import on_threads

RULE = "nccl_rules"
PAIR = Topology(2, 1)


def _other_collective(mesh: Mesh) -> None:
    x = torch.ones(4)
    dist.all_reduce(x) if mesh.rank else dist.broadcast(x, 0)


def _missing(mesh: Mesh) -> None:
    dist.all_reduce(torch.ones(4))
    if mesh.rank == 0:
        dist.all_reduce(torch.ones(4))


def _two_communicators(mesh: Mesh) -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    works = [
        dist.all_reduce(torch.ones(4), group=group, async_op=True)
        for group in (groups if mesh.rank else groups[::-1])
    ]
    for work in works:
        work.wait()


def _part_of_the_ranks_first(mesh: Mesh) -> None:
    if mesh.rank < 2:
        other = 1 - mesh.rank
        both = [dist.P2POp(dist.isend, torch.ones(4), other), dist.P2POp(dist.irecv, torch.empty(4), other)]
        for work in dist.batch_isend_irecv(both):
            work.wait()


def _elsewhere_in_place(mesh: Mesh) -> None:
    whole = torch.ones(8)
    dist.all_gather_into_tensor(whole, whole.view(2, 4)[1 - mesh.rank])


def _written_before_the_wait(_: Mesh) -> None:
    part, whole = torch.ones(4), torch.empty(8)
    work = dist.all_gather_into_tensor(whole, part, async_op=True)
    part.zero_()
    work.wait()


def _used_twice(_: Mesh) -> None:
    x = torch.ones(4)
    works = [dist.all_reduce(x, async_op=True) for _ in range(2)]
    for work in works:
        work.wait()


def _complex(_: Mesh) -> None:
    """Past torch's own functions, which send complex numbers as pairs of real ones."""
    dist.group.WORLD.allreduce([torch.ones(2, dtype=torch.complex64)])  # type: ignore[union-attr]


BROKEN: list[tuple[str, Callable[..., object], Topology]] = [
    ("order", _other_collective, PAIR),
    ("order", lambda mesh: dist.all_reduce(torch.ones(4 + mesh.rank)), PAIR),
    ("order", lambda mesh: dist.all_reduce(torch.ones(4).to([torch.int32, torch.float32][mesh.rank])), PAIR),
    ("order", _missing, PAIR),
    ("grouping", lambda mesh: dist.isend(torch.ones(4), 1 - mesh.rank), PAIR),
    ("communicators", _two_communicators, PAIR),
    ("creation", _part_of_the_ranks_first, Topology(3, 1)),
    ("datatype", lambda _: dist.all_reduce(torch.ones(2, dtype=torch.int16)), PAIR),
    ("datatype", lambda _: dist.all_reduce(torch.ones(2, dtype=torch.bool)), PAIR),
    ("datatype", _complex, PAIR),
    ("datatype", lambda _: dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.BAND), PAIR),
    ("tags", lambda mesh: dist.isend(torch.ones(1), 1 - mesh.rank, tag=7), PAIR),
    ("contiguous", lambda _: dist.all_reduce(torch.ones(4, 4)[:, ::2]), PAIR),
    ("in place", _elsewhere_in_place, PAIR),
    ("buffer", _written_before_the_wait, PAIR),
    ("buffer", _used_twice, PAIR),
    ("backend", lambda _: dist.recv(torch.ones(1)), PAIR),
]


@pytest.mark.parametrize(("rule", "body", "topology"), BROKEN)
def test_a_broken_rule_is_named(rule: str, body: Callable[..., None], topology: Topology) -> None:
    """Where NCCL would hang, or be undefined, this raises, with the rule and its source."""
    with pytest.raises(NcclRuleError, match=rule) as caught:
        on_threads(topology, body, backend=RULE, seconds=3)
    assert caught.value.rule == rule
    assert RULES[rule] in str(caught.value)


def test_every_rule_is_broken_above() -> None:
    """No rule without a call that breaks it."""
    assert {rule for rule, _, _ in BROKEN} == set(RULES)


def _collectives(mesh: Mesh) -> list[Any]:
    rank, world = mesh.rank, mesh.topology.world
    local = torch.tensor([rank, 10.0 + rank])
    reduced = []
    for operation in ("SUM", "AVG", "MAX"):
        reduced.append(local.clone())
        dist.all_reduce(reduced[-1], getattr(dist.ReduceOp, operation))
    whole, part, rows = torch.empty(2 * world), torch.empty(2), torch.empty(world)
    work = dist.all_gather_into_tensor(whole, local, async_op=True)
    unseen = whole.clone()  # before it was waited for
    work.wait()
    assert dist.get_backend() != RULE or not torch.equal(unseen, whole)
    in_place = torch.zeros(2 * world)
    in_place.view(world, 2)[rank] = local
    dist.all_gather_into_tensor(in_place, in_place.view(world, 2)[rank])
    dist.reduce_scatter_tensor(part, whole)
    dist.all_to_all_single(rows, torch.arange(world) + 100.0 * rank)
    uneven = torch.empty(world - 1)
    go = [int(index == (rank + 1) % world) * (world - 1) for index in range(world)]
    come = [int(index == (rank - 1) % world) * (world - 1) for index in range(world)]
    dist.all_to_all_single(uneven, torch.full((world - 1,), float(rank)), come, go)
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    parts = [torch.empty(2) for _ in range(world)]
    dist.all_gather(parts, local)
    return [[x.tolist() for x in (*reduced, whole, in_place, part, rows, uneven, *parts)], objects]


def test_collectives_bring_what_they_should() -> None:
    """On three ranks results are those of thread ranks, and are not visible before the wait."""
    topology = Topology(3, 1)
    assert on_threads(topology, _collectives, backend=RULE) == on_threads(
        topology, _collectives, backend="threaded"
    )


def _probed(mesh: Mesh) -> list[float]:
    rank = Rank(mesh.rank, mesh.topology, Port(None, "127.0.0.1"), None, lambda _: None, 1)
    return exchange(rank, 4096, 2, grouped=True)


def test_the_links_probe_keeps_the_rules() -> None:
    """Around a ring of nodes, as a communicator's first messages: only first ranks send, and all arrive.

    It once began with messages of some ranks, before the call of all that makes the communicator.
    """
    rates = on_threads(Topology(3, 2), _probed, backend=RULE)
    assert [len(of_rank) for of_rank in rates] == [2, 0] * 3
