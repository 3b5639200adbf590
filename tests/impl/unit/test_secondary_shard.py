"""hpZ's secondary: what it saves, and when its life ends."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from impl.codecs.codec import parse
from impl.codecs.reference import DTYPES
from impl.comm.mesh import Mesh
from impl.plan.policy import Offload, Policy, preset
from impl.plan.topology import Topology
from impl.zero import shard
from tests.impl.test_zero_models import Stack, data
from tests.support.ranks import on_threads
from tests.support.strategies import ROOMY
from tests.support.training import batch, model

EXACT = preset("exact", memory=ROOMY)
MODEL = model()


def _phases(mesh: Mesh, policy: Policy) -> dict[str, int]:
    net = copy.deepcopy(MODEL)
    zero = shard(net, mesh=mesh, policy=policy)
    optimizer = torch.optim.SGD(zero.param_groups(), lr=0.1)
    for step in range(2):
        for micro in range(2):
            net(batch(2 * step + micro, mesh.rank)).backward()
            zero.finish_backward()
        optimizer.step()
        optimizer.zero_grad()
    crossing: dict[str, int] = {}
    for key, sent in zero.wire.ledger.rows().items():
        if key.link == "inter" and key.purpose == "weights":
            crossing[key.phase] = crossing.get(key.phase, 0) + sent.bytes
    return crossing


@pytest.mark.parametrize("secondary", [1, 2, 4, "node"])
def test_hpz_inside_a_node_sends_nothing_between_nodes_in_backward(secondary: Any) -> None:
    """With a group inside a node, backward gathers cross no node border, and forward ones once a step."""
    topology, exact = Topology(2, 4), replace(EXACT, memory=replace(EXACT.memory, max_reuse=0))
    for crossing, plain in zip(
        on_threads(topology, _phases, replace(exact, secondary=secondary)),
        on_threads(topology, _phases, exact),
        strict=True,
    ):
        assert "backward" not in crossing
        assert crossing["forward"] * 2 == plain["forward"] == plain["backward"]


def _kept(mesh: Mesh, policy: Policy) -> bool:
    """Gather every unit in forward, then twice from the copy; whether those are the cast of the first."""
    zero = shard(copy.deepcopy(MODEL), mesh=mesh, policy=policy)
    kind = DTYPES[policy.secondary_format]
    equal = []
    for unit in zero.units:
        seen = []
        for phase in ("forward", "backward", "evaluate"):
            unit.start_gather(phase)
            unit.wait()
            seen.append([member.parameter.detach().clone() for member in unit.members])
            unit.release()
        first, *again = seen
        equal += [
            torch.equal(later, value.to(kind).to(value.dtype))
            for each in again
            for later, value in zip(each, first, strict=True)
        ]
    return all(equal) and len(equal) > 0


@pytest.mark.parametrize(
    ("weights", "kept", "secondary", "offload"),
    [
        ("int8:32", "bf16", "node", 0.0),
        ("int8:32", "fp16", 2, 1.0),
        ("mxfp4", "bf16", 8, 1.0),
        ("mxfp4", "fp16", 1, 0.0),
        ("fp32", "bf16", "node", 1.0),
        ("fp32", "fp16", 2, 0.0),
    ],
)
def test_a_copy_in_16_bits_is_the_decoded_frames_cast(
    weights: str, kept: Any, secondary: Any, offload: float
) -> None:
    """What backward computes with is, bit for bit, what forward did, cast to 16 bits, whatever the codec."""
    policy = replace(
        EXACT, weights=parse(weights), secondary=secondary, secondary_format=kept,
        offload=Offload(optimizer=offload, weights=offload),
    )  # fmt: skip
    assert all(on_threads(Topology(2, 4), _kept, policy))


def _lives(mesh: Mesh, change: str) -> list[tuple[set[bool], float]]:
    net = copy.deepcopy(MODEL)
    zero = shard(net, mesh=mesh, policy=replace(EXACT, secondary="node"))
    optimizer = torch.optim.AdamW(zero.param_groups(), lr=0.05, fused=True)
    x = batch(0, 0)
    seen = []

    def look() -> None:
        with torch.no_grad():
            seen.append(
                ({unit.weight_gather.secondary._version is not None for unit in zero.units}, net(x).item())
            )

    look()
    look()
    if change == "step":
        net(x).backward()
        zero.finish_backward()
        optimizer.step()
    elif change == "load":
        state = {name: value * 0.5 for name, value in zero.full_state_dict().items()}
        zero.load_full_state_dict(state)
    else:
        with torch.no_grad():
            for unit in zero.units:
                unit.master_shard.master.mul_(0.5)
        zero.weights_changed()
    look()
    state = zero.full_state_dict()
    plain = copy.deepcopy(MODEL)
    plain.load_state_dict(state)
    seen.append((set(), plain(x).item()))
    return seen


@pytest.mark.parametrize("change", ["step", "load", "by hand"])
def test_a_stale_secondary_is_never_used(change: str) -> None:
    """A step (fused too), a load or a declared write ends the secondary's life: the next pass sees it."""
    for seen in on_threads(Topology(2, 2), _lives, change):
        (_, before), (current, again), (stale, after), (_, wanted) = seen
        assert current == {True}
        assert again == before
        assert stale == {False}
        assert after == pytest.approx(wanted, rel=1e-5)
        assert after != before


def test_hand_written_updates_end_the_secondary() -> None:
    """Masters written in place, without an optimizer, are noticed: hpZ's copy is not used again."""

    def body(mesh: Mesh) -> list[float]:
        torch.manual_seed(0)
        net = copy.deepcopy(base)
        zero = shard(net, mesh=mesh, policy=preset("exact", memory=ROOMY, secondary="node"))
        losses = []
        for _ in range(3):
            loss = net(data(0, 0))
            loss.backward()
            zero.finish_backward()
            with torch.no_grad():
                for group in zero.param_groups():
                    for master in group["params"]:
                        master.sub_(0.1 * master.grad)
                        master.grad = None
            losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    base = Stack()
    for losses in on_threads(Topology(2, 2), body):
        assert losses[0] > losses[1] > losses[2]
