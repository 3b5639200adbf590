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
    seconds: dict[str, float] = {}
    benchmark.pedantic(
        lambda: seconds.update(on_processes(Topology(1, 1), _passes, name)[0]), rounds=1, iterations=1
    )
    benchmark.extra_info.update(
        {engine: round(1e3 * (seconds[engine] - seconds["plain"]) / UNITS, 3) for engine in ("ours", "FSDP2")}
    )


def _passes(mesh: Mesh, name: str) -> dict[str, float]:
    """Median seconds of forward and backward of a plain module, FSDP2's and ours, which take turns."""
    torch.set_num_threads(1)
    plain = blocks(UNITS)
    models = {engine: copy.deepcopy(plain) for engine in ("plain", "FSDP2", "ours")}
    devices = init_device_mesh("cpu", (1,))
    for block in (*models["FSDP2"], models["FSDP2"]):
        fsdp.fully_shard(block, mesh=devices)
    masters: dict[str, Any] = {engine: model.parameters() for engine, model in models.items()}
    masters["ours"] = shard(models["ours"], mesh=mesh, policy=preset(name)).param_groups()
    optimizers = {engine: torch.optim.SGD(parameters, lr=1e-3) for engine, parameters in masters.items()}
    seconds: dict[str, list[float]] = {engine: [] for engine in models}
    x = torch.ones(4, BLOCK)
    for _ in range(STEPS):
        for engine, model in models.items():
            begun = time.perf_counter()
            model(x).sum().backward()
            seconds[engine].append(time.perf_counter() - begun)
            optimizers[engine].step()
            optimizers[engine].zero_grad()
    return {engine: statistics.median(samples[STEPS // 4 :]) for engine, samples in seconds.items()}
