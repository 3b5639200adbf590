"""Predicted bytes agree with the paper's formulas; shares of offload are reached by whole units."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.plan.memory import memory
from impl.plan.traffic import ON_DEVICE, Event, passes, placements_of, predict
from impl.policy.policy import MemoryLimits, Offload, Policy, Stage
from impl.policy.presets import PRESETS, TECHNIQUES, preset
from impl.policy.shard_layout import FROZEN, ParameterSpec, UnitGeometry, lay_out
from impl.policy.topology import Topology

PUBLISHED = Path(__file__).parents[3] / "report" / "published"


def inter_bytes(policy: Policy, topology: Topology, events: list[Event]) -> int:
    """Returns the bytes that all ranks send between nodes for one unit of 2^22 elements that is not kept gathered."""
    policy = replace(policy, memory=MemoryLimits(max_reuse=0))
    unit = lay_out(
        "u", [ParameterSpec("w", (1 << 11, 1 << 11))], grain=2048, world=topology.world, max_padding=0
    )
    return sum(
        sent.bytes
        for rank in range(topology.world)
        for key, sent in predict(policy, topology, [unit], rank, events).sent.items()
        if key.link == "inter"
    )


def test_volumes_are_the_published_ones_plus_scales() -> None:
    """Each technique's traffic between nodes is the published multiple of M, plus its scales."""
    topology = Topology(2, 2)
    unit_m = inter_bytes(PRESETS["zero3"], topology, passes(PRESETS["zero3"])) / 3
    with (PUBLISHED / "zeropp_volume.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["method"] for row in rows} == set(TECHNIQUES) - {
        *("exact", "zero0", "zero1", "zero2", "mics", "zero3-flat")
    }
    for row in rows:
        measured = inter_bytes(PRESETS[row["method"]], topology, passes(PRESETS[row["method"]])) / unit_m
        assert float(row["total_m"]) <= measured <= float(row["total_m"]) * 1.014


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("sdp4bit", [4 + 32 / 2048, 4 + 32 / 128]),
        ("loco", [8 + 32 / 2048, 4 + 32 / 256]),
        ("zeropp-deepspeed", [8 + 32 / 2048, 4 + 32 / 256]),
        ("zeropp-shipped", [8 + 32 / 4096, 4 + 32 / 2048]),
        ("qsdp", [8 + 64 / 1024] * 3),
        ("fp8-gather", [8, 8, 16]),
        ("fp4-gather", [4 + 8 / 32, 4 + 8 / 32, 16]),
        ("mxfp8-planes", [2 * 8.25, 2 * 8.25, 16]),
        ("mxfp8-planes, one a phase", [8.25, 8.25, 16]),
        ("mxfp8-planes, one a phase, hpZ", [2 * 8.25, 16]),
    ],
)
def test_volumes_of_successors_are_their_closed_forms(name: str, bits: list[float]) -> None:
    """A step after the first sends the bits and scales of its gathers and its reduction; SDP4Bit sends 0.52 M."""
    topology = Topology(2, 2)
    first: list[Event] = ["forward", "backward", "step"]
    strategy, *changes = name.split(", ")
    planes: dict[str, Any] = {"planes": "phase"} if changes else {}
    policy = preset(strategy, **planes, secondary="node" if "hpZ" in changes else PRESETS[strategy].secondary)
    once, twice = (inter_bytes(policy, topology, first * count) for count in (1, 2))
    unit_m = inter_bytes(PRESETS["zero3"], topology, passes(PRESETS["zero3"])) / 3
    assert (twice - once) / unit_m == pytest.approx(sum(bits) / 16, rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_one_hop_sends_a_nodes_ranks_times_more_between_nodes(ranks: int) -> None:
    """With N ranks a node, the one-hop all-to-all sends N times as much between nodes as two hops (facts A2)."""
    topology = Topology(2, ranks)
    two_hop, one_hop = (
        inter_bytes(policy, topology, passes(policy))
        for policy in (preset("zero3"), preset("zero3", reduce="one_hop"))
    )
    gathers = 2 * two_hop / 3
    assert one_hop - gathers == ranks * (two_hop - gathers)


@pytest.mark.parametrize(("stage", "single", "triple"), [(0, 2, 2), (1, 2, 2), (2, 2, 4), (3, 3, 9)])
def test_volumes_of_stages_are_the_published_ones(stage: Stage, single: int, triple: int) -> None:
    """Steps of one and of three micro-batches send the volumes of facts A10, in units of M."""
    policy, topology = preset("exact", stage=stage), Topology(4, 1)
    shards = 3 * 4 * (1 << 22)  # each rank's, or as much of its gradients, to three others
    for count, volumes in ((1, single), (3, triple)):
        assert inter_bytes(policy, topology, passes(policy, micro_batches=count)) == volumes * shards


@pytest.mark.parametrize("secondary", [1, 2, 4, "node"])
def test_accumulation_and_evaluation_reuse_the_secondary(secondary: Any) -> None:
    """With hpZ inside a node, one gather between nodes serves all passes over the same weights."""
    topology = Topology(2, 4)
    policy = preset("hpz", secondary=secondary)
    once = inter_bytes(policy, topology, passes(policy))
    gather = once / 2  # one gather and one reduction, the same size in 16 bits
    assert inter_bytes(policy, topology, passes(policy, micro_batches=3)) == gather + 3 * gather
    evaluations: list[Event] = ["evaluate"] * 5
    assert inter_bytes(policy, topology, passes(policy) + evaluations) == once + gather
    assert inter_bytes(policy, topology, ["evaluate", "forward", "backward"]) == once  # type: ignore[arg-type]


def test_a_block_with_frozen_parameters_is_two_units_gathered_together() -> None:
    """All units of the largest block count as gathered, and with them the frozen unit of the block after it."""
    sizes = {"root": 64, "a": 320, "a.frozen": 32, "b": 256, "b.frozen": 128, "c": 288, "c.frozen": 32}
    units = [_unit(name, size, trainable=not name.endswith(FROZEN)) for name, size in sizes.items()]
    policy = preset("exact", memory=MemoryLimits(max_reuse=0, prefetch=0))
    held = memory(policy, Topology(1, 1), units)["gathered"]
    assert held == 4 * (64 + 320 + 32 + 128)
    assert [unit.block for unit in units] == ["root", "a", "a", "b", "b", "c", "c"]


def _unit(name: str, size: int, *, trainable: bool) -> UnitGeometry:
    specs = [ParameterSpec("w", (size,))]
    return lay_out(name, specs, grain=1, world=1, max_padding=0, trainable=trainable)


SHARES = st.sampled_from([0.0, 1.0]) | st.floats(0, 1)


@given(st.lists(st.tuples(st.integers(1, 1000), st.booleans()), min_size=1, max_size=8), SHARES, SHARES)
def test_offloaded_shares_are_reached_by_the_first_units_and_no_more(
    sizes: list[tuple[int, bool]], optimizer: float, weights: float
) -> None:
    """The first whole units reach each share, and one fewer would not; a frozen shard is where its frames are."""
    cut = [_unit(f"blocks.{index}", size, trainable=trained) for index, (size, trained) in enumerate(sizes)]
    placements = placements_of(Offload(optimizer=optimizer, weights=weights), cut)
    assert all(u.trainable or p.shard == p.frames for u, p in zip(cut, placements, strict=True))
    trained = [(u.padded, p.shard) for u, p in zip(cut, placements, strict=True) if u.trainable]
    every = [(u.padded, p.frames) for u, p in zip(cut, placements, strict=True)]
    for share, pairs in ((optimizer, trained), (weights, every)):
        chosen = [size for size, offloaded in pairs if offloaded]
        assert [offloaded for _, offloaded in pairs] == [i < len(chosen) for i in range(len(pairs))]
        wanted = share * sum(size for size, _ in pairs)
        assert sum(chosen) >= wanted
        assert not chosen or sum(chosen[:-1]) < wanted
    assert placements_of(Offload(), cut) == [ON_DEVICE] * len(cut)
