"""Seconds that sharding adds to a unit's forward and backward pass where nothing is sent, beside FSDP2's."""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any, Final

import pytest
import torch
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from impl.comm.mesh import Mesh
from impl.plan.policy import preset
from impl.plan.topology import Topology
from impl.zero import shard
from tests.impl.engine.test_costs import BLOCK, blocks
from tests.support.ranks import on_processes

pytestmark = pytest.mark.bench

UNITS: Final = 24
STEPS: Final = 40


@pytest.mark.parametrize("name", ["zero3", "zeropp"])
def test_step_of_one_rank(benchmark: Any, name: str) -> None:
    """Milliseconds a unit and step beyond the plain module's: hooks, casts and copies of 65,792 elements."""
    found: dict[str, float] = {}
    benchmark.pedantic(
        lambda: found.update(on_processes(Topology(1, 1), _passes, name)[0]), rounds=1, iterations=1
    )
    benchmark.extra_info.update(
        {whose: round(1e3 * (found[whose] - found["plain"]) / UNITS, 3) for whose in ("ours", "FSDP2")}
    )


def _passes(mesh: Mesh, name: str) -> dict[str, float]:
    """Median seconds of forward and backward of a plain module, FSDP2's and ours, which take turns."""
    torch.set_num_threads(1)
    plain = blocks(UNITS)
    models = {whose: copy.deepcopy(plain) for whose in ("plain", "FSDP2", "ours")}
    devices = init_device_mesh("cpu", (1,))
    for block in (*models["FSDP2"], models["FSDP2"]):
        fsdp.fully_shard(block, mesh=devices)
    masters: dict[str, Any] = {whose: model.parameters() for whose, model in models.items()}
    masters["ours"] = shard(models["ours"], mesh=mesh, policy=preset(name)).param_groups()
    optimizers = {whose: torch.optim.SGD(mine, lr=1e-3) for whose, mine in masters.items()}
    seconds: dict[str, list[float]] = {whose: [] for whose in models}
    x = torch.ones(4, BLOCK)
    for _ in range(STEPS):
        for whose, model in models.items():
            begun = time.perf_counter()
            model(x).sum().backward()
            seconds[whose].append(time.perf_counter() - begun)
            optimizers[whose].step()
            optimizers[whose].zero_grad()
    return {whose: statistics.median(those[STEPS // 4 :]) for whose, those in seconds.items()}
