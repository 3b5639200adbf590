"""Tests that ranks with different exchanges are detected, and the first different exchange is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.comm.fingerprint import CollectiveLog, Fields, describe, parting
from impl.comm.mesh import Mesh
from impl.comm.watchdog import WireError
from impl.comm.wire import Wire
from impl.plan.traffic import Tag
from impl.policy.topology import Topology, ranks_in_words
from tests.impl.comm.test_wire import arrive
from tests.support.ranks import each_rank, on_processes

UNITS = ("", "embed", "blocks.0", "blocks.1")
AXES = (("world", 4, 1), ("local", 2, 1), ("node", 2, 2))


def _fields() -> st.SearchStrategy[Fields]:
    return st.builds(
        lambda kind, axis, size, phase, unit, ring: (kind, *axis, size, phase, "weights", unit, ring),
        st.sampled_from(["all_gather", "all_to_all", "shift"]),
        st.sampled_from(AXES),
        st.integers(1, 4).map(lambda n: 16 * n),
        st.sampled_from(["forward", "backward"]),
        st.sampled_from(UNITS),
        st.booleans(),
    )


def _collective_log(opened: list[Fields]) -> CollectiveLog:
    collective_log = CollectiveLog()
    for fields in opened:
        collective_log.open(fields)
    return collective_log


@given(st.lists(_fields(), max_size=30), st.lists(_fields(), max_size=30))
def test_fingerprints_are_equal_exactly_where_the_orders_are(left: list[Fields], right: list[Fields]) -> None:
    """Two ranks have equal fingerprints if and only if they opened the same exchanges in the same order."""
    first, second = _collective_log(left), _collective_log(right)
    assert ((first.count, first.fingerprint) == (second.count, second.fingerprint)) == (left == right)


@given(st.lists(_fields(), max_size=20), st.lists(st.lists(_fields(), max_size=20), min_size=2, max_size=4))
def test_the_first_exchange_that_differs_is_found(common: list[Fields], rests: list[list[Fields]]) -> None:
    """The first number at which two ranks opened different exchanges is found; a rank may be behind."""
    orders = [common + rest for rest in rests]
    sentence = parting({rank: _collective_log(order).steps for rank, order in enumerate(orders)})
    longest = max(len(order) for order in orders)
    expected = next((n for n in range(longest) if len({o[n] for o in orders if n < len(o)}) > 1), None)
    if expected is None:
        assert sentence is None
    else:
        first, _, sides = sentence.partition(": ")
        assert first == f"the ranks' exchanges first differ at exchange {expected + 1}"
        opened = {rank: order[expected] for rank, order in enumerate(orders) if expected < len(order)}
        alike = {fields: [rank for rank in opened if opened[rank] == fields] for fields in opened.values()}
        texts = [f"{ranks_in_words(ranks)} started {describe(fields)}" for fields, ranks in alike.items()]
        assert sides == "; ".join(texts)


Plan = list[tuple[str, int, int, str]]  # kind, which axis, bytes, unit


def _play(wire: Wire, plan: Plan) -> None:
    """Open, post and receive each exchange of the plan."""
    topology = wire.mesh.topology
    for kind, place, nbytes, unit in plan:
        axis = (topology.world_axis, topology.local_axis, topology.node_axis)[place]
        exchange = getattr(wire, kind)(axis, nbytes, Tag("forward", "weights", unit))
        exchange.send.zero_()
        arrive(exchange)


@each_rank(1, 2, backend="threaded")
def test_thread_ranks_that_differ_are_told_apart_by_their_fingerprints(mesh: Mesh) -> None:
    """Without a store for reports, the error still names the ranks that differ."""
    wire = Wire(mesh)
    _play(wire, [("all_gather", 0, 16, unit) for unit in ("embed", f"blocks.{mesh.rank}")])
    with pytest.raises(WireError) as caught:
        wire.check_order()
    text, start = (
        str(caught.value),
        "found that the ranks' exchanges differ: rank 0 started 2 exchanges (fingerprint ",
    )
    assert text.startswith(f"rank {mesh.rank} {start}")
    assert "rank 1 started 2 exchanges (fingerprint " in text


PLAN: Plan = [
    ("all_gather", 0, 48, "embed"),
    ("all_to_all", 1, 16, "blocks.0"),
    ("all_gather", 2, 32, "blocks.1"),
]


def _parted(mesh: Mesh, transport: str) -> tuple[tuple[int, int], str]:
    wire = Wire(mesh, transport=transport, timeout=4)
    _play(wire, PLAN)
    wire.check_order()
    log = wire._watchdog.collective_log
    same = log.count, log.fingerprint
    units = ["blocks.0", "blocks.1" if mesh.rank == 2 else "blocks.0", "embed"]
    with pytest.raises(WireError) as caught:  # noqa: PT012  # at one of the two
        _play(wire, [("all_gather", 1, 16, unit) for unit in units])
        wire.check_order()
    return same, str(caught.value)


@pytest.mark.long
def test_the_first_differing_exchange_is_named_whatever_the_transport() -> None:
    """Every rank learns where ranks part and what each opened, at the exchange itself or at the next check."""
    marks = set()
    for transport in ("backend", "shm"):
        for rank, (mark, text) in enumerate(on_processes(Topology(2, 2), _parted, transport)):
            marks.add(mark)
            first, second = text.splitlines()[:2]
            differ = "found that the ranks' exchanges differ: it is in exchange 6"
            waited = f"could not finish exchange {6 if rank >= 2 else 8}"
            assert first.startswith(f"rank {rank} {differ if transport == 'shm' and rank >= 2 else waited}")
            gather = "all_gather of 16 B along local (2 ranks) for forward weights"
            assert second == (
                f"the ranks' exchanges first differ at exchange 6: ranks 0, 1 and 3 started {gather} blocks.0; "
                f"rank 2 started {gather} blocks.1"
            )
    assert len(marks) == 1
