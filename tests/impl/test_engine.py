"""The engine by itself: how long it lives, and what it refuses."""

from __future__ import annotations

import gc

import torch

from impl.gathered import GatheredParameters
from impl.mesh import Mesh
from impl.policy import preset
from impl.topology import Topology
from impl.watch import find
from impl.zero import shard
from tests.ranks import on_threads
from tests.strategies import ROOMY
from tests.training import batch, model

EXACT = preset("exact", memory=ROOMY)


def test_an_engine_that_nobody_keeps_lives_as_long_as_its_model() -> None:
    """What finds it by its parameters and optimizers works on, as in a function that returns its model."""

    def body(mesh: Mesh) -> None:
        net = model()
        optimizer = torch.optim.SGD(shard(net, mesh=mesh, policy=EXACT).param_groups(), lr=0.1)
        gc.collect()
        found = find(net.head.weight)
        assert found is not None
        net(batch(0, 0)).backward()
        found.engine.finish_backward()
        optimizer.step()
        del found
        gc.collect()
        net.zero_grad()
        assert all(master.grad is None for group in optimizer.param_groups for master in group["params"])
        with GatheredParameters(net.head.weight, modifier_rank=0):
            net.head.weight.data.zero_()

    on_threads(Topology(1, 1), body)
