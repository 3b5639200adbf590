"""Controls spoil the engine where they should, and nowhere else."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from harness.strategies.controls import spoil
from harness.workloads.rank_batches import RankBatches
from impl.comm.mesh import Mesh
from impl.plan.traffic import LedgerKey, Sent
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import shard
from tests.harness.runs.test_rank_trial import text, trial
from tests.support.ranks import on_threads
from tests.support.strategies import ROOMY
from tests.support.training import batch, model

__all__ = ["text"]  # a fixture

MODEL = model()
HPZ = preset("exact", memory=replace(ROOMY, max_reuse=0), secondary="node")


def _trained(mesh: Mesh, control: str | None) -> tuple[list[float], dict[LedgerKey, Sent]]:
    net = copy.deepcopy(MODEL)
    zero = shard(net, mesh=mesh, policy=HPZ)
    spoil(zero, control)
    optimizer, losses = torch.optim.SGD(zero.param_groups(), lr=0.5), []
    for step in range(4):
        loss = net(batch(step, mesh.rank)).square().mean()
        loss.backward()
        zero.finish_backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(zero.wire.ledger.rows())


def test_an_old_secondary_changes_gradients_from_the_second_step_on() -> None:
    """The first two steps, whose forward passes are right, have equal losses; the third differs, bytes never.

    A late one is one step old: its backward pass of the third step has the second's weights, not the first's.
    """
    controls = (None, "late_secondary", "stale_secondary")
    runs = [on_threads(Topology(2, 2), _trained, control) for control in controls]
    for (right, sent), (late, late_sent), (stale, stale_sent) in zip(*runs, strict=True):
        assert right[:2] == late[:2] == stale[:2]
        assert right[2] != late[2] == stale[2]
        assert late[3] != stale[3]
        assert sent == late_sent == stale_sent


def test_half_a_batch_is_its_first_half(text: str) -> None:
    """Training reads the first half of each micro-batch's sequences; validation reads all of them."""
    whole, half = (
        RankBatches(trial(text, "zero3", tokens_per_rank=32, control=control), 1, torch.device("cpu"))
        for control in (None, "half_batch")
    )
    for batches, halves in zip(whole.step(3), half.step(3), strict=True):
        for (read, answer), (half_read, half_answer) in zip(batches, halves, strict=True):
            assert torch.equal(half_read, read[: len(read) // 2])
            assert torch.equal(half_answer, answer[: len(answer) // 2])
    assert [len(read) for read, _ in half.validation] == [len(read) for read, _ in whole.validation]


def _reduced(mesh: Mesh, spoilt: bool) -> tuple[list[torch.Tensor], dict[LedgerKey, Sent]]:
    """This rank's shard of every unit's mean gradient."""
    net = copy.deepcopy(MODEL)
    zero = shard(net, mesh=mesh, policy=preset("exact", memory=ROOMY))
    spoil(zero, "unordered" if spoilt else None)
    net(batch(0, mesh.rank)).square().mean().backward()
    zero.finish_backward()
    masters = [master for group in zero.param_groups() for master in group["params"]]
    gradients = [master.grad.clone() for master in masters if master.grad is not None]
    return gradients, dict(zero.wire.ledger.rows())


def test_without_the_reordering_two_hops_end_on_other_ranks() -> None:
    """With 2 nodes of 2 ranks, the two middle ranks get each other's slices, and the bytes sent do not change."""
    right, wrong = (on_threads(Topology(2, 2), _reduced, spoilt) for spoilt in (False, True))
    assert [sent for _, sent in wrong] == [sent for _, sent in right]
    for rank, owner in enumerate([0, 2, 1, 3]):
        for gradient, wanted in zip(wrong[rank][0], right[owner][0], strict=True):
            torch.testing.assert_close(gradient, wanted)
        assert (owner == rank) == all(
            torch.equal(a, b) for a, b in zip(wrong[rank][0], right[rank][0], strict=True)
        )
