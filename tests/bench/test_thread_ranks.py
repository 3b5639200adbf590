"""Seconds of a training step of 128 thread ranks, beside the computation alone.

A round is one step of all ranks (forward, backward, AdamW), and the reference is the same passes of the unsharded model
for all ranks' batches, without messages.  ``extra_info`` has the parameters and the ranks: the difference, divided by
the ranks, is what a rank's engine and its turns take in a step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

from harness.suites.model_sizes import GPTShape
from harness.workloads.models import GPT
from impl.comm.mesh import Mesh
from impl.policy.policy import MemoryLimits
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.simulate import simulate
from impl.zero import shard

pytestmark = pytest.mark.bench

TOPOLOGY: Final = Topology(16, 8)
SHAPES: Final = {
    "0.14 M": GPTShape(layers=2, width=64, heads=2),
    "1 M": GPTShape(layers=5, width=128, heads=4),
}
TOKENS: Final = 128  # of a rank in a step, one sequence
ROUNDS: Final = 5


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("strategy", ["computation", "zero3", "zeropp"])
def test_step_of_128_ranks(benchmark: BenchmarkFixture, size: str, strategy: str) -> None:
    """A step of all ranks; the unsharded model, whose gradients are added up, is the reference."""
    benchmark.group = f"thread ranks: a step of {TOPOLOGY} ranks, {size} parameters"
    benchmark.extra_info.update(ranks=TOPOLOGY.world, parameters=size, reference=strategy == "computation")
    if strategy == "computation":
        torch.set_num_threads(1)
        run = partial(_every_batch, _model(size))
        benchmark.pedantic(run, rounds=ROUNDS, warmup_rounds=1)
        return
    with stepping(partial(_sharded, size=size, strategy=strategy)) as step:
        benchmark.pedantic(step, rounds=ROUNDS, warmup_rounds=2)


@contextmanager
def stepping(prepare: Callable[[Mesh], Callable[[], object]]) -> Iterator[Callable[[], None]]:
    """Run thread ranks in the background; yields a function that has all of them take one step."""
    commands, answers = queue.SimpleQueue[bool](), queue.SimpleQueue[Any]()

    def body(mesh: Mesh) -> None:
        step, thread = prepare(mesh), mesh.thread
        assert thread is not None
        while thread.share(mesh.rank != 0 or commands.get())[0]:
            step()
            thread.share(None)
            if mesh.rank == 0:
                answers.put(None)

    def serve() -> None:
        try:
            simulate(TOPOLOGY.nodes, TOPOLOGY.ranks_per_node, timeout=1e9)(body)
        except BaseException as error:
            answers.put(error)

    def command() -> None:
        commands.put(True)
        if (error := answers.get()) is not None:
            raise error

    ranks = threading.Thread(target=serve)
    ranks.start()
    try:
        yield command
    finally:
        commands.put(False)
        ranks.join()


def _model(size: str) -> nn.Module:
    torch.manual_seed(0)
    return GPT(SHAPES[size], TOKENS)


def _batch(rank: int) -> Tensor:
    """(1, TOKENS + 1) tokens of a rank."""
    return torch.randint(256, (1, TOKENS + 1), generator=torch.Generator().manual_seed(rank))


def _every_batch(model: nn.Module) -> None:
    for rank in range(TOPOLOGY.world):
        tokens = _batch(rank)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    model.zero_grad()


def _sharded(mesh: Mesh, *, size: str, strategy: str) -> Callable[[], None]:
    policy = preset(strategy, memory=MemoryLimits(max_padding=99.0))
    zero = shard(model := _model(size), mesh=mesh, policy=policy)
    optimizer, tokens = torch.optim.AdamW(zero.param_groups()), _batch(mesh.rank)

    def step() -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
