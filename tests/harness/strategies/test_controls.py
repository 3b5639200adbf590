"""Controls are spoilt where they say, and nowhere else."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch

from harness.strategies.controls import never_renew_secondary
from harness.suites.contradictions import check
from harness.suites.trial import Trial
from impl.comm.mesh import Mesh
from impl.plan.policy import preset
from impl.plan.topology import Topology
from impl.plan.traffic import LedgerKey, Sent
from impl.zero import shard
from report.data.contender import label_of
from tests.support.ranks import on_threads
from tests.support.strategies import ROOMY
from tests.support.training import batch, model

MODEL = model()
HPZ = preset("exact", memory=replace(ROOMY, max_reuse=0), secondary="node")


def _trained(mesh: Mesh, spoilt: bool) -> tuple[list[float], dict[LedgerKey, Sent]]:
    net = copy.deepcopy(MODEL)
    zero = shard(net, mesh=mesh, policy=HPZ)
    if spoilt:
        never_renew_secondary(zero)
    optimizer, losses = torch.optim.SGD(zero.param_groups(), lr=0.5), []
    for step in range(4):
        loss = net(batch(step, mesh.rank)).square().mean()
        loss.backward()
        zero.finish_backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(zero.wire.ledger.rows())


def test_a_stale_secondary_changes_gradients_from_the_second_step_on() -> None:
    """Losses of two steps are equal, whose forward passes are right; the third differs, bytes never."""
    topology = Topology(2, 2)
    for (right, sent), (wrong, other) in zip(
        on_threads(topology, _trained, False), on_threads(topology, _trained, True), strict=True
    ):
        assert right[:2] == wrong[:2]
        assert right[2] != wrong[2]
        assert sent == other


def test_a_control_is_part_of_a_trial_and_of_its_name() -> None:
    """Another id than the same trial's without, which keeps its own; tables name it."""
    control = Trial(control="stale_secondary")
    assert control.id != Trial().id
    assert "control" not in Trial().canonical()
    assert Trial.from_canonical(control.canonical()) == control
    assert label_of(control, {}) == "ZeRO++ (control: stale secondary)"


@pytest.mark.parametrize("strategy", ["zero3", "ddp", "fsdp2+exact"])
def test_without_a_secondary_there_is_no_such_control(strategy: str) -> None:
    """It is refused by name: nothing would be spoilt."""
    with pytest.raises(ValueError, match=f"stale_secondary.*{re.escape(repr(strategy))} keeps no"):
        check(Trial.model_validate({"strategy": strategy, "control": "stale_secondary"}))
