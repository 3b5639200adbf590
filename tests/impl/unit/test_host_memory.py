"""Tests that memory is reused, and that offloading copies the predicted bytes and changes no result."""

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
from impl.plan.traffic import Copied, CopyKey
from impl.policy.policy import Feedback, LossScale, Offload, Policy
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.transport.side_stream import Arrival
from impl.unit.context import ACCOUNTING, HostMemory, Meter, Reserve
from impl.zero import shard
from tests.support.history import History, history_of
from tests.support.models import Odd
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import ROOMY, policies, topologies
from tests.support.training import batch, model, sgd, train

SHARES = (Offload(optimizer=1), Offload(weights=1), Offload(optimizer=1, weights=1), Offload(optimizer=0.5))
ALL = Offload(optimizer=1, weights=1)


def run(
    mesh: Mesh, net: nn.Module, policy: Policy, passes: list[str], width: int = 16
) -> tuple[History, dict[CopyKey, int], dict[str, Tensor]]:
    """Train; return the losses, the bytes copied, and the state that was gathered afterwards."""
    history = history_of(mesh, net, policy, passes, width=width, seed=3)
    return history, history.zero.copied(), history.zero.full_state_dict()


def equal(topology: Topology, net: nn.Module, policy: Policy, passes: list[str], width: int = 16) -> None:
    """Assert that offloading only moves bytes, and that its copies are as predicted."""
    plain, offloaded = (
        on_threads(topology, run, net, run_policy, passes, width)
        for run_policy in (replace(policy, offload=Offload()), policy)
    )
    for rank, ((before, none, state), (after, copied, same)) in enumerate(zip(plain, offloaded, strict=True)):
        assert repr(before.seen) == repr(after.seen), rank  # numbers, to the bit; some are NaN
        torch.testing.assert_close(same, state, rtol=0, atol=0, equal_nan=True)
        assert none == {}
        assert copied == after.predicted().copied
        assert before.zero.wire.ledger.rows() == after.zero.wire.ledger.rows()


def frozen_parts(net: nn.Module) -> nn.Module:
    """Return the model with a frozen bias in each block."""
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(requires_grad=not name.endswith("up.bias"))
    return net


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_offloading_changes_no_bit(data: st.DataObject) -> None:
    """Any policy trains to the same bits whatever share is offloaded, and makes the predicted copies."""
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
        {"frozen": parse("int4:32:stochastic"), "weights": parse("int8:32:stochastic"), "secondary": "node"},
        {"gradients": (parse("int4:32"),) * 2, "feedback": Feedback(hops="all")},
        *(
            {"compute": "fp16", "loss_scale": LossScale(initial=256.0), "offload": offload}
            for offload in SHARES
        ),
    ],
    ids=str,
)
def test_what_is_kept_between_steps_stays_in_step(changes: dict[str, Any]) -> None:
    """Codes, random bits and carried errors are the same with offloading, also after an fp16 step that overflows."""
    policy = Policy(**{"memory": ROOMY, "offload": ALL, **changes})  # type: ignore[arg-type]
    between = "spike" if policy.loss_scale else "accumulate"
    equal(Topology(2, 2), frozen_parts(model()), policy, ["train", "evaluate", between, "train"])


@pytest.mark.parametrize("offload", SHARES, ids=str)
@each_rank(2, 1)
def test_weights_written_by_hand_are_sent_again(mesh: Mesh, offload: Offload) -> None:
    """A frame that is kept on the host is encoded anew after a write by hand, and after a load."""
    history = History(mesh, model(), preset("exact", memory=ROOMY, offload=offload))
    for kind in ("evaluate", "by hand", "evaluate", "load", "evaluate"):
        history.act(kind, 0)
    first, written, loaded = history.seen
    assert first == loaded
    assert first != written


class Late(HostMemory):
    """Copies to the host that are made only when somebody waits for them, which a device may do."""

    def download(self, staged: Tensor, target: Tensor, purpose: Copied, unit: str) -> Arrival:
        """Download as :meth:`HostMemory.download` does, with NaN in the target until the end."""
        self.copied[CopyKey("to_host", purpose, unit)] += staged.nbytes
        target.fill_(torch.nan)
        arrival = self._left[self._turn] = _Delayed(staged, target)
        return arrival


class _Delayed(Arrival):
    """A copy that is made by the first who waits for it."""

    def __init__(self, staged: Tensor, target: Tensor) -> None:
        super().__init__()
        self.staged, self.target, self.done = staged, target, False

    def join(self) -> None:
        """Make the copy, since the device goes on only after it."""
        if not self.done:
            self.target.copy_(self.staged)
            self.done = True

    finish = join


@pytest.mark.parametrize("passes", [["train"] * 3, ["accumulate", "train", "clipped"]], ids=str)
def test_gradients_on_their_way_are_waited_for(monkeypatch: pytest.MonkeyPatch, passes: list[str]) -> None:
    """Staging is overwritten, and masters' gradients are read, only after the copy has been made."""
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
            _on_gpu(mesh, preset(name, memory=ROOMY, offload=share)) for share in (Offload(), offload)
        )
        assert plain[0] == moved[0]
        assert all(torch.equal(value, moved[1][key]) for key, value in plain[1].items())
    finally:
        dist.destroy_process_group()


def _on_gpu(mesh: Mesh, policy: Policy) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and state after six steps of two micro-batches, of SGD with a rate of 2^-k, since devices round
    AdamW differently.
    """
    net = model(width=256, hidden=512, depth=6).to(mesh.device)
    loss_of = lambda net, number, rank: net(batch(number, rank, 256).to(mesh.device))  # noqa: E731
    return train(mesh, net, policy, 6, 2, optimize=partial(sgd, lr=2.0**-4), loss_of=loss_of)[:2]


@each_rank(1, 2)
def test_the_record_says_what_the_hosts_memory_was(mesh: Mesh) -> None:
    """On a CPU the record says that offloading is accounting only."""
    plain, moved = (
        describe(shard(model(), mesh=mesh, policy=Policy(memory=ROOMY, offload=offload)))
        for offload in (Offload(), Offload(optimizer=0.4))
    )
    assert moved["offload"] == {"memory": ACCOUNTING}
    assert "offload" not in plain


SIZES = st.sampled_from([1, 2, 3, 5, 8])
# A positive number takes that many elements; 0 gives the oldest buffer back.
ORDERS = st.lists(st.one_of(SIZES, st.just(0)), max_size=60)


@given(ORDERS, st.lists(SIZES, min_size=1, max_size=6))
def test_a_reserve_never_holds_more_than_was_in_use_at_once(order: list[int], last: list[int]) -> None:
    """Its peak is the peak of buffers in use, these never overlap, and it keeps what the last pass used."""
    meter = Meter()
    reserve = Reserve(torch.float32, torch.device("cpu"), meter, "gathered")
    taken: list[Tensor] = []
    most = 0
    for number, size in enumerate(order):
        if size:
            taken.append(reserve.take(size).fill_(number))
            assert taken[-1].shape == (size,)
        elif taken:
            reserve.give_back(taken.pop(0))
        assert all(bool((buffer == buffer[0]).all()) for buffer in taken)
        assert len({float(buffer[0]) for buffer in taken}) == len(taken)
        most = max(most, sum(map(Tensor.numel, taken)))
        assert 4 * sum(map(Tensor.numel, taken)) <= meter.now.get("gathered", 0) <= 4 * most
    assert meter.peak.get("gathered", 0) == 4 * most
    for buffer in taken:
        reserve.give_back(buffer)
    reserve.trim()
    for buffer in [reserve.take(size) for size in last]:
        reserve.give_back(buffer)
    reserve.trim()
    assert meter.now["gathered"] <= 4 * sum(last)


@given(st.lists(SIZES, min_size=1, max_size=8))
def test_the_same_sequence_again_asks_for_no_fresh_memory(sizes: list[int]) -> None:
    """If passes gather the same units together, the second pass gets the buffers of the first."""
    reserve = Reserve(torch.float32, torch.device("cpu"), Meter(), "gathered")
    seen: list[set[int]] = []
    kept: list[Tensor] = []  # so that no address is used again by chance
    for _ in range(3):
        taken = [reserve.take(size) for size in sizes]
        kept += taken
        seen.append({buffer.data_ptr() for buffer in taken})
        for buffer in taken:
            reserve.give_back(buffer)
    assert seen[1] == seen[0] == seen[2]
