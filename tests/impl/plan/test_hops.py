"""Hops of gathers and reductions bring every frame to every rank that needs it, whatever the policy."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from impl.codecs.codec import BF16
from impl.plan.hops import Hop, Sends, copy_bytes, gather_hops, in_phase, reduction_hops
from impl.policy.policy import Policy
from impl.policy.presets import preset
from impl.policy.topology import Topology
from tests.support.strategies import as_published, policies, topologies


@st.composite
def draws(draw: st.DrawFn) -> tuple[Policy, Topology, int]:
    """Return a policy, a topology and the elements of a shard."""
    topology = draw(topologies(12))
    policy = draw(policies(topology).flatmap(as_published))
    return policy, topology, policy.grain * draw(st.integers(1, 9))


def ranks_of(hops: tuple[Hop, ...]) -> int:
    return math.prod(hop.axis.size for hop in hops)


@given(draws(), st.sampled_from(["weights", "differences", "copy"]))
def test_a_gather_brings_all_shards(drawn: tuple[Policy, Topology, int], sends: Sends) -> None:
    """Each hop sends all that the hops before it have gathered, and the last one completes the group's shards."""
    policy, topology, shard = drawn
    hops, group = gather_hops(policy, topology, shard, sends), policy.group_ranks(topology)
    copies = group // policy.secondary_ranks(topology) if policy.secondary else 1
    frames = copies if sends == "copy" else 1
    # With the plane of a phase, both planes go as far as hpZ's copy, and one from there on.
    both = policy.planes == "phase" and policy.secondary != 0 and sends != "copy"
    for hop in hops:
        assert hop.frames == frames
        planes = 2 if policy.planes == 2 or both else 1
        assert hop.sizes == (frames * planes * hop.codec.frame_bytes(shard),)
        frames *= hop.axis.size
        both = both and hop.keeps != "copy"
    assert frames == group
    first, *others = hops
    wanted = {"copy": "copy", "differences": "difference" if policy.differences else "master"}
    assert first.source == (wanted.get(sends, "master") if policy.secondary else "master")
    assert {hop.source for hop in others} <= {"received", "copy"}
    for before, hop in zip(
        hops, others, strict=False
    ):  # frames are sent on as they arrived, or hpZ's copy of them
        assert hop.codec == (policy.copy_codec if hop.source == "copy" else before.codec)


@given(draws(), st.sampled_from(["forward", "backward", "evaluate"]), st.sampled_from(["weights", "copy"]))
def test_a_pass_gathers_the_plane_that_it_computes_with(
    drawn: tuple[Policy, Topology, int], phase: str, sends: Sends
) -> None:
    """The last hop of a gather has the plane of the phase, and a copy is kept whenever columns arrive."""
    policy, topology, shard = drawn
    hops = gather_hops(policy, topology, shard, in_phase(policy, phase, sends))
    wanted = {1: ("rows",), 2: ("rows", "columns")}
    plane = ("columns",) if phase == "backward" else ("rows",)
    assert hops[-1].planes == wanted.get(policy.planes, plane)  # type: ignore[call-overload]
    if policy.planes == "phase" and policy.secondary:
        arrive = [hop for hop in hops if hop.source != "copy" and "columns" in hop.planes]
        assert any(hop.keeps == "copy" for hop in hops) == bool(arrive)


@given(draws())
def test_what_the_hops_between_nodes_bring_is_kept(drawn: tuple[Policy, Topology, int]) -> None:
    """With hpZ one hop keeps a copy; a gather from the copy has only the hops after it, and sends the whole copy."""
    policy, topology, shard = drawn
    hops, again = (gather_hops(policy, topology, shard, sends) for sends in ("weights", "copy"))
    keeping = [number for number, hop in enumerate(hops) if hop.keeps != "nothing"]
    assert len(keeping) == (policy.secondary != 0)
    if not keeping:
        assert again == hops
        assert copy_bytes(policy, topology, shard) == 0
        return
    assert [hop.axis for hop in again] == [hop.axis for hop in hops[keeping[0] + 1 :]]
    assert again[0].nbytes == copy_bytes(policy, topology, shard)
    assert not any(hop.crosses for hop in again) or policy.secondary_ranks(topology) > topology.ranks_per_node


@given(draws())
def test_a_reduction_leaves_each_rank_its_pieces(drawn: tuple[Policy, Topology, int]) -> None:
    """Hops of sums run over all ranks and end with one piece; then each rank gathers the pieces of its shard."""
    policy, topology, piece = drawn
    hops = reduction_hops(policy, topology, piece, policy.grain)
    sums = tuple(hop for hop in hops if hop.kind != "all_gather")
    means = hops[len(sums) :]
    assert ranks_of(sums) == topology.world
    assert ranks_of(means) == topology.world // policy.group_ranks(topology)
    assert [hop.source for hop in sums] == ["gradient", "sum"][: len(sums)] + ["sum"] * (len(sums) - 2)
    assert [hop.source for hop in means] == (["mean"] + ["received"] * len(means))[: len(means)]
    places = {0}  # the numbers of the pieces that a rank's messages reach are those of all pieces
    for hop in sums:
        assert hop.frames == topology.world // ranks_of(sums[: sums.index(hop) + 1])
        assert sum(end - start for start, end in hop.chunks) == piece
        assert hop.sizes == tuple(
            hop.frames * hop.codec.frame_bytes(end - start) for start, end in hop.chunks
        )
        places = {place + digit * hop.stride for place in places for digit in range(hop.axis.size)}
    assert places == set(range(topology.world))
    kept = [hop.keeps == "errors" for hop in sums]
    feedback = policy.feedback
    assert kept == [feedback is not None and (feedback.hops == "all" or hop is sums[-1]) for hop in sums]


def test_the_hops_of_zero_plus_plus() -> None:
    """On two nodes of two ranks the hops are those of the table in :mod:`impl.plan.hops`."""
    policy, topology = preset("zeropp"), Topology(2, 2)
    weights, again = (gather_hops(policy, topology, 2048, sends) for sends in ("weights", "copy"))
    reduction = reduction_hops(policy, topology, 2048, policy.grain)
    rows = [
        (hop.axis.name, str(hop.codec).split(":")[0], hop.source, hop.frames, hop.keeps) for hop in weights
    ]
    assert rows == [("node", "int8", "master", 1, "copy"), ("local", "int8", "received", 2, "nothing")]
    assert [(hop.axis.name, hop.source, hop.frames) for hop in again] == [("local", "copy", 2)]
    found = [(hop.axis.name, str(hop.codec).split(":")[0], hop.source, hop.frames) for hop in reduction]
    assert found == [("local", "int4", "gradient", 2), ("node", "int4", "sum", 1)]


def test_a_rank_alone_exchanges_with_itself_only_where_a_part_has_no_other_axis() -> None:
    """Axes of one rank are left out, but each side of hpZ's copy keeps one if it has no other."""
    gather = Policy(weights=BF16)
    assert [hop.axis.name for hop in gather_hops(gather, Topology(1, 4), 8)] == ["local"]
    assert [hop.axis.name for hop in gather_hops(gather, Topology(1, 1), 8)] == ["node"]
    assert [hop.axis.name for hop in gather_hops(preset("hpz"), Topology(1, 4), 8)] == ["node", "local"]
    assert reduction_hops(gather, Topology(1, 1), 8, 1) == ()
