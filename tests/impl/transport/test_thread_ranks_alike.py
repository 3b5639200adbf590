"""Results of thread ranks depend neither on the order of turns, nor on what memory held, nor on garbage collections.

Thread ranks share a process.  What one of them leaves behind, in memory that is used again, in a cache or in torch's
generators, must not reach another one.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.differences import Differences
from impl.codecs.codec import parse
from impl.comm.exchanges import Buffers
from impl.comm.mesh import Mesh
from impl.policy.own_method import method
from impl.policy.policy import MemoryLimits, Policy
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.transport import threads
from impl.transport.threads import ThreadWorld
from impl.unit.context import Reserve
from tests.support.ranks import on_threads
from tests.support.strategies import policies, topologies
from tests.support.training import Training, batch, model

MX = parse("mxfp4:stochastic")
ROOMY = MemoryLimits(max_padding=1e9, prefetch=200, max_reuse=0)
POLICIES = [
    Policy(stage=1, weights=MX, gradients=(MX, MX), reduce="ring", memory=ROOMY),
    preset("zeropp", memory=ROOMY),
    preset("sdp4bit", memory=ROOMY),
    Policy(gradients=(MX, MX), group="node", reduce_every="step", memory=ROOMY),
    Policy(gather=method(Differences), memory=ROOMY),
]


def trained(mesh: Mesh, policy: Policy) -> tuple[list[float], list[Any], Any]:
    """Train for two steps of two micro-batches, the second after a rehearsal and an evaluation."""
    run = Training(mesh, model(), policy)
    losses = [run.step(0, 2)]
    with run.zero.rehearsing():
        losses.append(run.backward(9))
    with torch.no_grad():
        losses.append(run.net(batch(8, mesh.rank)).item())
    losses.append(run.step(1, 2))
    return losses, [master.detach().clone() for master in run.zero.masters], run.zero.wire.ledger.rows()


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Context in which new memory, and memory that is given back to be used again, is full of NaN."""
    take, give_back, done = Reserve.give_back, Buffers.give_back, threads.Arena.done

    def give_reserve(reserve: Reserve, buffer: torch.Tensor) -> None:
        buffer.data.fill_(torch.nan)
        take(reserve, buffer)

    def give_buffers(buffers: Buffers, *given: torch.Tensor) -> None:
        for buffer in given:
            buffer.data.fill_(255)
        give_back(buffers, *given)

    def finish(arena: threads.Arena, number: int) -> None:
        found = arena._rounds[number]
        done(arena, number)
        if found.done == found.size:
            found.whole.data.fill_(255)

    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reserve, "give_back", give_reserve)
        patch.setattr(Buffers, "give_back", give_buffers)
        patch.setattr(threads.Arena, "done", finish)
        yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@contextlib.contextmanager
def shuffled(seed: int) -> Iterator[None]:
    """Context in which a rank drawn at random, of those that can go on, gets the turn."""
    give, draw = ThreadWorld._give_turn, Random(seed)

    def give_any(world: ThreadWorld) -> None:
        if world._ready:
            world._ready.rotate(draw.randrange(len(world._ready)))
        give(world)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadWorld, "_give_turn", give_any)
        yield


@contextlib.contextmanager
def collecting() -> Iterator[None]:
    """Context in which Python collects garbage whenever the turn passes."""
    give = ThreadWorld._give_turn

    def give_after(world: ThreadWorld) -> None:
        gc.collect(0)
        give(world)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadWorld, "_give_turn", give_after)
        yield


CONTEXTS = {"poisoned": poisoned, "shuffled": lambda: shuffled(1), "collecting": collecting}


def _check_alike(topology: Topology, policy: Policy, kind: str) -> None:
    usual = on_threads(topology, trained, policy)
    with CONTEXTS[kind]():
        found = on_threads(topology, trained, policy)
    for (losses, masters, ledger), (others, theirs, booked) in zip(usual, found, strict=True):
        assert losses == others
        assert all(map(torch.equal, masters, theirs))
        assert ledger == booked


@pytest.mark.parametrize("kind", CONTEXTS)
@pytest.mark.parametrize("policy", POLICIES, ids=range(len(POLICIES)))
def test_results_depend_on_the_program_alone(policy: Policy, kind: str) -> None:
    """Losses, masters and ledgers are equal to the bit with poisoned memory, other turns, and garbage collections."""
    _check_alike(Topology(2, 2), policy, kind)


@pytest.mark.long
@settings(deadline=None, max_examples=30)
@given(st.data(), st.sampled_from(sorted(CONTEXTS)))
def test_results_of_any_policy_depend_on_the_program_alone(data: st.DataObject, kind: str) -> None:
    """So they are for drawn policies and topologies."""
    topology = data.draw(topologies(4))
    _check_alike(topology, data.draw(policies(topology)), kind)
