"""Seconds that sharding adds to a unit's forward and backward pass where nothing is sent, beside FSDP2's.

All engines train the same blocks on one rank.  The difference to the plain module is hooks, casts and copies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from impl.comm.mesh import Mesh
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import shard
from tests.bench.running_ranks import Ranks, running
from tests.impl.engine.test_costs import BLOCK, blocks

pytestmark = pytest.mark.bench

UNITS: Final = 24
ROUNDS: Final = 40


@pytest.fixture(scope="module")
def rank() -> Iterator[Ranks]:
    """One rank alone."""
    with running(Topology(1, 1)) as started:
        yield started


@pytest.mark.parametrize("engine", ["plain", "FSDP2", "zero3", "zeropp"])
def test_step_of_one_rank(benchmark: BenchmarkFixture, rank: Ranks, engine: str) -> None:
    """A step of 24 units of 65,792 elements; the plain module is the reference."""
    rank.prepare(step_of, engine)
    benchmark.group = f"hooks: a step of {UNITS} units"
    benchmark.extra_info.update({"reference": True} if engine == "plain" else {}, units=UNITS)
    benchmark.pedantic(rank.round, rounds=ROUNDS, warmup_rounds=10)


def step_of(mesh: Mesh, engine: str) -> Callable[[], None]:
    """Return a step (forward, backward, SGD) of the blocks under an engine."""
    model = copy.deepcopy(blocks(UNITS))
    masters: Any = model.parameters()
    if engine == "FSDP2":
        devices = init_device_mesh("cpu", (1,))
        for block in (*model, model):
            fsdp.fully_shard(block, mesh=devices)
        masters = model.parameters()
    elif engine != "plain":
        masters = shard(model, mesh=mesh, policy=preset(engine)).param_groups()
    optimizer, x = torch.optim.SGD(masters, lr=1e-3), torch.ones(4, BLOCK)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
