"""Tests of hpZ's secondary shard: which bytes it saves, and when it becomes stale."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from impl.codecs.codec import parse
from impl.codecs.reference import DTYPES
from impl.comm.mesh import Mesh
from impl.policy.policy import Offload, Policy
from impl.policy.topology import Topology
from impl.zero import shard
from tests.support.history import History
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import EXACT
from tests.support.training import batch, booked, model, train


def _phases(mesh: Mesh, policy: Policy) -> list[int]:
    """Return the bytes of weights that cross between nodes in forward and in backward."""
    zero = train(mesh, model(), policy, 2, 2)[2]
    return [booked(zero, link="inter", purpose="weights", phase=phase) for phase in ("forward", "backward")]


@pytest.mark.parametrize("secondary", [1, 2, 4, "node"])
def test_hpz_inside_a_node_sends_nothing_between_nodes_in_backward(secondary: Any) -> None:
    """With a group inside a node, backward gathers send nothing between nodes, and forward gathers only once a
    step.
    """
    topology, exact = Topology(2, 4), replace(EXACT, memory=replace(EXACT.memory, max_reuse=0))
    kept, plain = (on_threads(topology, _phases, replace(exact, secondary=ranks)) for ranks in (secondary, 0))
    for (forward, backward), (gathered, again) in zip(kept, plain, strict=True):
        assert backward == 0
        assert forward * 2 == gathered == again > 0


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
@each_rank(2, 4)
def test_a_copy_in_16_bits_is_the_decoded_frames_cast(
    mesh: Mesh, weights: str, kept: Any, secondary: Any, offload: float
) -> None:
    """Backward computes with forward's weights cast to 16 bits, bit for bit, in any codec."""
    policy = replace(
        EXACT, weights=parse(weights), secondary=secondary, secondary_format=kept,
        offload=Offload(optimizer=offload, weights=offload),
    )  # fmt: skip
    zero = shard(model(), mesh=mesh, policy=policy)
    for unit in zero.units:
        seen = []
        for phase in ("forward", "backward", "evaluate"):
            unit.start_gather(phase)
            unit.wait()
            seen.append([member.parameter.detach().clone() for member in unit.members])
            unit.reshard()
        first, *again = seen
        assert first
        for weights_again in again:
            for later, value in zip(weights_again, first, strict=True):
                assert torch.equal(later, value.to(DTYPES[kept]).to(value.dtype))


@pytest.mark.parametrize("change", ["train", "load", "by hand", "untold"])
@each_rank(2, 2)
def test_a_stale_secondary_is_never_used(mesh: Mesh, change: str) -> None:
    """After a fused step, a load, or any write to masters, the next pass gathers the new weights."""
    fused = partial(torch.optim.AdamW, lr=0.05, fused=True)
    history = History(mesh, model(), replace(EXACT, secondary="node"), optimize=fused)

    def look() -> tuple[set[bool], float]:
        held = [(unit.weight_gather.secondary, unit.master_shard.version) for unit in history.zero.units]
        current = {secondary.sends(version, step=0) == "copy" for secondary, version in held}
        with torch.no_grad():
            return current, history.net(batch(0, 0)).item()

    _, before = look()
    assert look() == ({True}, before)
    if change == "untold":
        for master in history.zero.masters:
            master.detach().mul_(2)
    else:
        history.act(change, 0)
    stale, after = look()
    assert stale == {False}
    assert after != before
    plain = model()
    plain.load_state_dict(history.zero.full_state_dict())
    assert after == pytest.approx(plain(batch(0, 0)).item(), rel=1e-5)
