"""Offloading to host memory moves bytes, and changes no bit of what is learned."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from impl.codecs.codec import parse
from impl.comm.mesh import Mesh
from impl.engine.engine import describe
from impl.plan.policy import Feedback, LossScale, Offload, Policy, preset
from impl.plan.topology import Topology
from impl.plan.traffic import Copied, CopyKey
from impl.transport.side_stream import Arrival
from impl.unit.context import ACCOUNTING, HostMemory
from impl.zero import shard
from tests.support.history import History, lived
from tests.support.models import Odd
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import ROOMY, policies, topologies
from tests.support.training import batch, model, sgd, train

SHARES = (Offload(optimizer=1), Offload(weights=1), Offload(optimizer=1, weights=1), Offload(optimizer=0.5))
ALL = Offload(optimizer=1, weights=1)


def run(
    mesh: Mesh, net: nn.Module, policy: Policy, passes: list[str], width: int = 16
) -> tuple[History, dict[CopyKey, int], dict[str, Tensor]]:
    """A run, what it copied, and the state that was gathered after it."""
    history = lived(mesh, net, policy, passes, width=width, seed=3)
    return history, history.zero.copied(), history.zero.full_state_dict()


def equal(topology: Topology, net: nn.Module, policy: Policy, passes: list[str], width: int = 16) -> None:
    """Assert that offloading changes nothing but where bytes lie, and that what it copies was foreseen."""
    plain, moved = (
        on_threads(topology, run, net, each, passes, width)
        for each in (replace(policy, offload=Offload()), policy)
    )
    for rank, ((one, none, state), (other, copied, same)) in enumerate(zip(plain, moved, strict=True)):
        assert repr(one.seen) == repr(other.seen), rank  # numbers, to the bit; some are NaN
        for name, value in state.items():
            assert torch.equal(value.nan_to_num(), same[name].nan_to_num()), (rank, name)
            assert torch.equal(value.isnan(), same[name].isnan()), (rank, name)
        assert none == {}
        assert copied == other.foreseen().copied
        assert one.zero.wire.ledger.rows() == other.zero.wire.ledger.rows()


def frozen_parts(net: nn.Module) -> nn.Module:
    """The same model with a frozen bias in each block."""
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(requires_grad=not name.endswith("up.bias"))
    return net


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_offloading_changes_no_bit(data: st.DataObject) -> None:
    """Any policy trains to the same bits with any shares offloaded, and copies what is foreseen."""
    topology = data.draw(topologies(4))
    shares = st.sampled_from([0.0, 0.3, 0.7, 1.0])
    offload = Offload(optimizer=data.draw(shares), weights=data.draw(shares))
    policy = data.draw(policies(topology, offload=offload))
    net, width = data.draw(st.sampled_from([(model(), 16), (frozen_parts(model()), 16), (model(Odd), 7)]))
    kinds = st.sampled_from(["train", "accumulate", "evaluate", "clipped"])
    equal(topology, net, policy, data.draw(st.lists(kinds, min_size=2, max_size=4)), width)


@pytest.mark.parametrize(
    "changes",
    [
        {"frozen": parse("int8:32")},
        {"frozen": parse("int4:32:stochastic"), "weights": parse("int8:32:stochastic")},
        {"weights": parse("int4:32:stochastic"), "secondary": "node"},
        {"weights": parse("int4:32:stochastic")},
        {"gradients": (parse("int4:32"),) * 2, "feedback": Feedback(hops="all")},
        {"memory": replace(ROOMY, persist_below=50, max_reuse=2000)},
        *(
            {"compute": "fp16", "loss_scale": LossScale(initial=256.0), "offload": offload}
            for offload in SHARES
        ),
    ],
    ids=str,
)
def test_what_is_kept_between_steps_stays_in_step(changes: dict[str, Any]) -> None:
    """Frozen codes, noise keyed by step, carried errors and kept units: the same bits; so are those of an
    overflow in fp16, seen on the host, after which the step is skipped and the scale halved.
    """
    policy = Policy(**{"memory": ROOMY, "offload": ALL, **changes})  # type: ignore[arg-type]
    between = "spike" if policy.loss_scale else "accumulate"
    equal(Topology(2, 2), frozen_parts(model()), policy, ["train", "evaluate", between, "train"])


@pytest.mark.parametrize("offload", SHARES, ids=str)
@each_rank(2, 1)
def test_weights_written_by_hand_are_sent_again(mesh: Mesh, offload: Offload) -> None:
    """A kept frame is of the masters as they are: after a write by hand, and after a load."""
    history = History(mesh, model(), preset("exact", memory=ROOMY, offload=offload))
    for kind in ("evaluate", "by hand", "evaluate", "load", "evaluate"):
        history.act(kind, 0)
    first, written, loaded = history.seen
    assert first == loaded
    assert first != written


class Late(HostMemory):
    """Copies to the host that take place when they are waited for, as late as a device may."""

    def download(self, staged: Tensor, target: Tensor, purpose: Copied, unit: str) -> Arrival:
        """As :meth:`HostMemory.download`; until its end the target holds NaN."""
        self.copied[CopyKey("to_host", purpose, unit)] += staged.nbytes
        target.fill_(torch.nan)
        arrival = self._left[self._turn] = _Delayed(staged, target)
        return arrival


class _Delayed(Arrival):
    """A copy that is made by whoever waits for it first."""

    def __init__(self, staged: Tensor, target: Tensor) -> None:
        super().__init__()
        self.staged, self.target, self.done = staged, target, False

    def join(self) -> None:
        """The device goes on after the copy."""
        if not self.done:
            self.target.copy_(self.staged)
            self.done = True

    finish = join


@pytest.mark.parametrize("passes", [["train"] * 3, ["accumulate", "train", "clipped"]], ids=str)
def test_gradients_on_their_way_are_waited_for(monkeypatch: pytest.MonkeyPatch, passes: list[str]) -> None:
    """Staging is written again, and masters' gradients are read, only after the copy: the same bits."""
    monkeypatch.setattr("impl.zero.HostMemory", Late)
    policy = preset("zeropp", memory=ROOMY, offload=ALL)
    equal(Topology(1, 2), model(depth=4), policy, passes)


@pytest.mark.gpu
@pytest.mark.parametrize("offload", SHARES, ids=str)
@pytest.mark.parametrize("name", ["zero3", "zeropp", "zero2"])
def test_a_gpu_trains_to_the_same_bits_with_offload(name: str, offload: Offload) -> None:
    """On one GPU, through NCCL and streams: offloaded or not, the same losses and the same weights."""
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = Mesh.create(Topology(1, 1), torch.device("cuda", 0))
        plain, moved = (
            _on_gpu(mesh, preset(name, memory=ROOMY, offload=each)) for each in (Offload(), offload)
        )
        assert plain[0] == moved[0]
        assert all(torch.equal(value, moved[1][key]) for key, value in plain[1].items())
    finally:
        dist.destroy_process_group()


def _on_gpu(mesh: Mesh, policy: Policy) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state after six steps of two micro-batches.

    Of SGD with a power of two as its rate, which rounds once: host and device round AdamW differently.
    """
    net = model(width=256, hidden=512, depth=6).to(mesh.device)

    def loss_of(net: nn.Module, number: int, rank: int) -> Tensor:
        return net(batch(number, rank, 256).to(mesh.device))

    return train(mesh, net, policy, 6, 2, optimize=partial(sgd, lr=2.0**-4), loss_of=loss_of)[:2]


@each_rank(1, 2)
def test_the_record_says_what_the_hosts_memory_was(mesh: Mesh) -> None:
    """On a CPU it is accounting, and said to be that."""
    plain, moved = (
        describe(shard(model(), mesh=mesh, policy=Policy(memory=ROOMY, offload=offload)))
        for offload in (Offload(), Offload(optimizer=0.4))
    )
    assert moved["offload"] == {"memory": ACCOUNTING}
    assert "offload" not in plain
