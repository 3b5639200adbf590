"""Every matrix has one owner, whose load is balanced, and the parts on all ranks cover it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.codecs.codec import BF16, FP32, parse
from impl.errors import ZeroError
from impl.plan.owners import MATRICES, Owners, newton_schulz_flops, owners_of
from impl.plan.traffic import Book, predict
from impl.plan.unit_plan import Placed, plan_units
from impl.policy.policy import MemoryLimits, Offload, Policy, PolicyError
from impl.policy.presets import preset
from impl.policy.shard_layout import ParameterSpec
from impl.policy.topology import Topology
from tests.support.strategies import ROOMY, topologies

SHAPES = st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=9)


def owned(policy: Policy, topology: Topology, shapes: list[tuple[int, int]]) -> Owners:
    """The owners of matrices of these shapes, in blocks of two, with a vector beside each."""
    placed = [
        Placed(spec, f"b{number // 2}")
        for number, shape in enumerate(shapes)
        for spec in (
            ParameterSpec(f"b{number // 2}.w{number}", shape, MATRICES),
            ParameterSpec(f"b{number // 2}.v{number}", shape[:1]),
        )
    ]
    blocks = list(dict.fromkeys(each.block for each in placed))
    found = owners_of(policy, topology, plan_units(placed, blocks, topology, policy))
    assert found is not None
    return found


@given(topologies(), SHAPES, st.sampled_from([0, 1, "node"]))
def test_parts_cover_every_matrix_once(
    topology: Topology, shapes: list[tuple[int, int]], group: int | str
) -> None:
    """The parts on the ranks of one group are consecutive elements of the whole matrix."""
    policy = preset("exact", group=group, memory=ROOMY)
    owners = owned(policy, topology, shapes)
    assert owners.axis.size == policy.group_ranks(topology)
    parts = sorted((part.matrix, part.first, part.numel) for held in owners.parts for part in held)
    for number, shape in enumerate(shapes):
        reached = 0
        for _, first, numel in (part for part in parts if part[0] == number):
            assert (first, numel > 0) == (reached, True)
            reached += numel
        assert reached == math.prod(shape)


@given(topologies(), SHAPES)
def test_loads_are_balanced(topology: Topology, shapes: list[tuple[int, int]]) -> None:
    """No rank has more operations than an equal share and one matrix more; every matrix is somebody's."""
    owners = owned(preset("exact", memory=ROOMY), topology, shapes)
    costs = [newton_schulz_flops(shape) for shape in shapes]
    assert sum(owners.loads) == pytest.approx(sum(costs))
    assert max(owners.loads) <= sum(costs) / topology.world + max(costs)
    assert {matrix.owner for matrix in owners.matrices} <= set(range(topology.world))


def test_equal_matrices_are_spread_evenly() -> None:
    """Eight equal matrices on four ranks are two for each, and a rank prefers those that it holds."""
    owners = owned(Policy(memory=ROOMY), Topology(2, 2), [(64, 64)] * 8)
    assert len(set(owners.loads)) == 1
    elsewhere = sum(
        size for row, sizes in enumerate(owners.to_owners) for to, size in enumerate(sizes) if to != row
    )
    assert elsewhere < 3 / 4 * 2 * 8 * 64 * 64  # bf16 bytes that a random assignment would send


@given(topologies(), SHAPES, st.sampled_from(["fp32", "bf16", "int8:256", "int4:32"]))
def test_updates_go_back_the_way_that_momentum_came(
    topology: Topology, shapes: list[tuple[int, int]], text: str
) -> None:
    """With one codec for both, each message back is as long as the message there; their sum is that of all frames."""
    codec = parse(text)
    owners = owned(preset("exact", owned=(codec, codec), memory=ROOMY), topology, shapes)
    assert owners.from_owners == tuple(zip(*owners.to_owners, strict=True))
    frames = sum(codec.frame_bytes(part.numel) for held in owners.parts for part in held)
    assert sum(map(sum, owners.to_owners)) == frames


def test_the_bytes_of_a_step_are_those_of_both_exchanges() -> None:
    """The event of a step books what a rank sends to others, once each way, and nothing else."""
    topology, shapes = Topology(2, 2), [(32, 64), (64, 32), (48, 48)]
    policy = Policy(memory=ROOMY, owned=(FP32, BF16))
    owners = owned(policy, topology, shapes)
    for rank in range(4):
        sent = predict(policy, topology, [], rank, ["step"], owners=owners).sent
        for purpose, sizes in (("momentum", owners.to_owners), ("update", owners.from_owners)):
            booked = sum(each.bytes for key, each in sent.items() if key.purpose == purpose)
            assert booked == sum(size for to, size in enumerate(sizes[rank]) if to != rank)
        book = Book(topology, rank)
        book.optimizer_step(owners)
        assert book.sent == sent
    assert predict(policy, topology, [], 0, ["step"]).sent == {}


def test_another_assignment_has_another_digest() -> None:
    """Matrices of equal shape that change places are told apart, as are codecs."""
    owners = owned(Policy(memory=ROOMY), Topology(2, 2), [(32, 32)] * 4)
    others = [replace(matrix, owner=3 - matrix.owner) for matrix in owners.matrices]
    assert owners.digest == owned(Policy(memory=ROOMY), Topology(2, 2), [(32, 32)] * 4).digest
    assert owners.digest != replace(owners, matrices=tuple(others)).digest
    assert owners.digest != replace(owners, update=FP32).digest


def test_what_has_no_owner_is_refused() -> None:
    """A vector or a tensor of more dimensions, and masters on the host, are refused with the way out."""
    for shape in ((8,), (2, 3, 4)):
        placed = [Placed(ParameterSpec("b.w", shape, MATRICES), "b")]
        units = plan_units(placed, ["b"], Topology(1, 2), Policy(memory=ROOMY))
        with pytest.raises(ZeroError, match=r"parameter 'b\.w' has shape .* leave the parameter to AdamW"):
            owners_of(Policy(memory=ROOMY), Topology(1, 2), units)
    policy = Policy(memory=ROOMY, offload=Offload(optimizer=0.5))
    with pytest.raises(ZeroError, match=r"set offload\.optimizer=0, or use AdamW"):
        owned(policy, Topology(1, 2), [(8, 8)])


@pytest.mark.parametrize("codecs", ["int8:256:stochastic", "nf4", "bf16sr"])
def test_codecs_that_owners_cannot_use_are_refused(codecs: str) -> None:
    """Random rounding would need the step's number, and formats without kernels for short frames are left out."""
    with pytest.raises(PolicyError, match="needs built-in codecs that round to nearest"):
        Policy(owned=(BF16, parse(codecs)), memory=MemoryLimits())


def test_a_single_codec_is_no_pair() -> None:
    """The codecs of momentum and of updates are given both."""
    with pytest.raises(PolicyError, match="expected a tuple of two codecs"):
        Policy(owned=BF16)  # type: ignore[arg-type]
