"""Tests of weight differences: copies stay equal, errors stay bounded, and the right values are sent."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from impl.codecs import reference
from impl.codecs.codec import HALF_ULP, parse
from impl.comm.mesh import Mesh
from impl.policy.policy import Policy
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.unit.master_shard import part_of
from impl.unit.unit import Unit
from impl.zero import shard
from tests.support.history import History, gathered, history_of
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import ROOMY
from tests.support.training import batch, booked, model

SDP4BIT = preset("sdp4bit", memory=ROOMY, differences=parse("int4:32:stochastic"))
NET = model()
KINDS = ("train", "train", "accumulate", "evaluate", "skip", "rehearse", "by hand", "load", "save")


def _replicas(mesh: Mesh, policy: Policy, kinds: Sequence[str]) -> tuple[list[Tensor], bool]:
    history = history_of(mesh, NET, policy, kinds)
    foreseen = history.predicted().sent.items()
    wanted = sum(sent.bytes for k, sent in foreseen if (k.link, k.purpose) == ("inter", "weights"))
    as_foreseen = wanted == sent(history)
    return gathered(history.zero), as_foreseen


def sent(history: History) -> int:
    """Return the bytes of weights that a rank has sent to other nodes."""
    return booked(history.zero, link="inter", purpose="weights")


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=7),
    st.sampled_from(["int4:32:stochastic", "int4:8", "mxfp4", "int8:32", "bf16"]),
    st.sampled_from(["bf16", "fp16", "fp32"]),
    st.sampled_from([0, 0, 1, 2]),
    st.sampled_from(
        [(Topology(2, 2), "node"), (Topology(2, 2), 1), (Topology(3, 1), 1), (Topology(4, 1), 2)]
    ),
)
@example(["train", "save", "train", "evaluate"], "int4:32:stochastic", "bf16", 0, (Topology(2, 2), "node"))
@example(["train", "train", "rehearse", "train"], "int4:8", "bf16", 0, (Topology(2, 2), "node"))
def test_replicas_are_equal_to_the_bit_after_any_history(
    kinds: list[str], differences: str, kept: Any, refresh: int, where: tuple[Topology, Any]
) -> None:
    """In any run, all ranks gather the same bits and send the predicted bytes between nodes."""
    topology, secondary = where
    policy = replace(
        SDP4BIT, differences=parse(differences), secondary=secondary, secondary_format=kept, refresh=refresh
    )
    first, *others = on_threads(topology, _replicas, policy, kinds)
    for values, foreseen in others:
        assert foreseen
        assert all(map(torch.equal, first[0], values))


def _between(mesh: Mesh, kinds: tuple[str, ...]) -> list[Tensor]:
    history = history_of(mesh, NET, SDP4BIT, ("train", "train"))
    for kind in kinds:
        if kind == "anew":  # as the harness does after a validation
            history.zero.forget_gathered()
        else:
            history.act(kind, 9)
    history.act("train", 2)
    history.act("train", 3)
    return gathered(history.zero)


@pytest.mark.parametrize(
    "kinds",
    [
        ("rehearse",), ("evaluate", "anew"), ("evaluate", "rehearse"), ("evaluate", "anew", "rehearse"),
        ("save",), ("evaluate", "save"), ("evaluate", "save", "rehearse"), ("save", "evaluate", "save"),
    ],
)  # fmt: skip
def test_what_trains_nothing_leaves_no_trace_in_copies(kinds: tuple[str, ...]) -> None:
    """Evaluating, gathering anew, or saving and loading in the middle of a run does not change its results."""
    after, without = (on_threads(Topology(2, 2), _between, between)[0] for between in (kinds, ()))
    assert all(map(torch.equal, after, without))


def _interrupted(mesh: Mesh) -> list[Tensor]:
    history = history_of(mesh, NET, SDP4BIT, ("train", "train"))

    def stop(*_: Any) -> None:
        raise RuntimeError("stopped")

    handle = history.net.blocks[-1].register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="stopped"):
        history.net(batch(2, mesh.rank))
    handle.remove()
    history.zero.drop_gradients()
    if mesh.rank == 0:  # as if this rank had gone further than the others
        for unit in history.zero.units:
            if unit.policy.differences is not None:
                unit.weight_gather.secondary._values().add_(1)
    history.act("train", 3)
    history.act("train", 4)
    return gathered(history.zero)


def test_copies_are_sent_anew_after_a_pass_that_failed() -> None:
    """If ranks stopped with different copies, drop_gradients() makes the copies equal again."""
    first, *others = on_threads(Topology(2, 2), _interrupted)
    for values in others:
        assert all(map(torch.equal, first, values))


@pytest.mark.parametrize("differences", ["int4:32", "int4:32:stochastic", "int2:8", "mxfp4"])
@each_rank(2, 2)
def test_the_drift_of_a_copy_is_bounded_by_one_encoding(mesh: Mesh, differences: str) -> None:
    """After any number of steps, a copy is off by the error of one difference and of one rounding."""
    history = History(mesh, NET, replace(SDP4BIT, differences=parse(differences)))
    checked = 0
    for number in range(6):
        history.act("train", number)
        before = [_copy_of_shard(unit) for unit in history.zero.units]
        masters = [unit.master_shard.master.clone() for unit in history.zero.units]
        gathered(history.zero)
        for unit, old, master in zip(history.zero.units, before, masters, strict=True):
            if (codec := unit.policy.differences) is not None:
                drift, bound = (_copy_of_shard(unit) - master).abs(), _bound(codec, master - old, old)
                assert bool((drift <= bound).all()), float((drift - bound).max())
                checked += 1
    assert checked


def _copy_of_shard(unit: Unit) -> Tensor:
    return unit.weight_gather.secondary.copy_of_shard().float()


def _bound(codec: Any, difference: Tensor, copied: Tensor) -> Tensor:
    """Return the bound (S,): each block's error, and half an ulp of the sum in bf16 and in fp32."""
    rows = reference.rotated(codec, difference).view(-1, codec.block_size(difference.numel()))
    bounds = [codec.error_bound(float(row.min()), float(row.max())) for row in rows]
    error = torch.tensor(bounds).repeat_interleave(rows.shape[1])
    largest = copied.abs() + difference.abs() + error
    return error + largest * (HALF_ULP["bf16"][0] + 4 * HALF_ULP["fp32"][0]) + HALF_ULP["bf16"][1]


def _crossing(mesh: Mesh, policy: Policy) -> list[int]:
    history = History(mesh, NET, policy)
    totals = [0]
    for number in range(5):
        history.act("train", number)
        totals.append(sent(history))
    return [after - before for before, after in itertools.pairwise(totals)]


def test_a_refresh_is_on_the_ledger() -> None:
    """Every n-th step sends the weights themselves, all other steps send differences."""
    often, never = (
        on_threads(Topology(2, 2), _crossing, replace(SDP4BIT, refresh=refresh))[0] for refresh in (2, 0)
    )
    assert often[0] == often[2] == often[4] == never[0] > 2 * never[1]
    assert often[1] == often[3] == never[1] == never[2] == never[3] == never[4]


@pytest.mark.parametrize(
    ("between", "inside"), [("int8:32", "int4:32"), ("bf16", "int8:8"), ("mxfp4", "bf16")]
)
@each_rank(2, 2)
def test_weights_travel_in_a_codec_for_each_hop(mesh: Mesh, between: str, inside: str) -> None:
    """The owner encodes in the first codec; each node encodes what it received in the second, in both passes."""
    policy = preset("hpz", memory=ROOMY, weights=parse(between), inside=parse(inside))
    zero = shard(model(), mesh=mesh, policy=policy)
    units = [unit for unit in zero.units if unit.policy.inside is not None]
    assert units
    for unit in units:
        shards = unit.master_shard.master.clone()
        for codec in (unit.policy.weights, unit.policy.inside):
            frame = torch.empty(codec.frame_bytes(shards.numel()), dtype=torch.uint8)
            reference.encode(codec, shards, frame)
            reference.decode(codec, frame, shards)
        for phase in ("forward", "backward"):
            unit.all_gather(phase)
            for member, slot in zip(unit.members, unit.geometry.slots, strict=True):
                start, stop = unit.geometry.part(slot, mesh.rank)
                part = part_of(member.parameter, unit.geometry, slot, mesh.rank)
                assert torch.equal(part, shards[start:stop])
            unit.reshard()
