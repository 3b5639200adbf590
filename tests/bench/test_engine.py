"""A training step of the engine against DDP's and FSDP2's, interleaved in one run of four processes.

``extra_info["tokens_per_second"]`` of each contender; all see the same model, data and threads.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.suite import Model
from harness.workload import build
from impl.mesh import Mesh
from impl.policy import preset
from impl.topology import Topology
from impl.wire import Wire
from impl.zero import shard
from tests.ranks import on_processes

pytestmark = pytest.mark.bench

SEQUENCES, LENGTH, ROUNDS = 4, 128, 4


def _contender(mesh: Mesh, name: str) -> tuple[torch.nn.Module, Any, Any]:
    torch.manual_seed(0)
    net = build(Model(name="gpt-small"), LENGTH)
    if name == "ddp":
        net = torch.nn.parallel.DistributedDataParallel(net)
        return net, net.parameters(), lambda: None
    if name == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
        return net, net.parameters(), lambda: None
    zero = shard(net, mesh=mesh, policy=preset(name), wire=Wire(mesh, transport="shm"))
    return net, zero.param_groups(), zero.finish_backward


def _step_seconds(mesh: Mesh, names: list[str]) -> dict[str, list[float]]:
    """Seconds of each contender's steps, round by round."""
    generator = torch.Generator().manual_seed(mesh.rank)
    tokens = torch.randint(0, 256, (SEQUENCES, LENGTH + 1), generator=generator)
    contenders = {name: _contender(mesh, name) for name in names}
    optimizers = {
        name: torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        for name, (_, parameters, _) in contenders.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(ROUNDS + 1):
        for name, (net, _, finish) in contenders.items():
            for _ in range(3):
                dist.barrier()
                begin = time.perf_counter()
                net(tokens[:, :-1], tokens[:, 1:]).backward()
                finish()
                optimizers[name].step()
                optimizers[name].zero_grad()
                dist.barrier()
                if index:
                    seconds[name].append(time.perf_counter() - begin)
    return seconds


@pytest.mark.timeout(600)
def test_step(benchmark: Any) -> None:
    """2 x 2 ranks, gpt-small, fp32, no clipping, unshaped."""
    names = ["ddp", "fsdp2", "exact", "zero3", "zeropp"]
    result: list[dict[str, list[float]]] = []
    benchmark.pedantic(
        lambda: result.extend(on_processes(Topology(2, 2), _step_seconds, names)), rounds=1, iterations=1
    )
    tokens = 4 * SEQUENCES * LENGTH
    benchmark.extra_info["tokens_per_second"] = {
        name: round(tokens / statistics.median(result[0][name])) for name in names
    }
