"""Offloading to host memory moves bytes, and changes no bit of what is learned."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from impl.codecs.codec import parse
from impl.comm.mesh import Mesh
from impl.engine.engine import describe
from impl.plan.memory import ADAM_BYTES, memory
from impl.plan.policy import Feedback, LossScale, Offload, Policy, PolicyError, Stage, preset
from impl.plan.topology import Topology
from impl.plan.traffic import Copied, CopyKey, Event, predict
from impl.transport.side_stream import Arrival
from impl.unit.context import ACCOUNTING, HostMemory
from impl.zero import Zero, shard
from tests.support.models import Odd
from tests.support.ranks import on_threads
from tests.support.strategies import ROOMY, policies, topologies
from tests.support.training import batch, model

SHARES = (Offload(optimizer=1), Offload(weights=1), Offload(optimizer=1, weights=1), Offload(optimizer=0.5))
ALL = Offload(optimizer=1, weights=1)


class Ran(NamedTuple):
    """What one rank saw of a run, and its engine."""

    seen: list[Any]  # losses, norms, whether steps were done: numbers, to the bit
    state: dict[str, Tensor]
    copied: dict[CopyKey, int]  # before the state was gathered
    events: list[Event]
    zero: Zero


def frozen_parts(net: nn.Module) -> nn.Module:
    """The same model with a frozen bias in each block."""
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(requires_grad=not name.endswith("up.bias"))
    return net


def run(mesh: Mesh, net: nn.Module, policy: Policy, passes: list[str], width: int = 16) -> Ran:
    """Train and evaluate as ``passes`` say; a spike is a loss that overflows."""
    net = copy.deepcopy(net)
    zero = shard(net, mesh=mesh, policy=policy, seed=3)
    optimizer = torch.optim.AdamW(zero.param_groups(), lr=1e-2)
    seen: list[Any] = []
    events: list[Event] = []
    for number, kind in enumerate(passes):
        x = batch(number, mesh.rank, width)
        if kind == "evaluate":
            with torch.inference_mode():
                seen.append(net(x).item())
            events.append("evaluate")
            continue
        alone = kind == "accumulate" and not policy.reduces_each_micro_batch
        with zero.accumulating() if alone else contextlib.nullcontext():
            loss = net(x * (torch.inf if kind == "spike" else 1))
            zero.scaler.scaled(loss).backward()
            zero.finish_backward()
        seen.append(loss.item())
        events += ["forward", "accumulate" if alone else "backward"]
        if kind == "accumulate":
            continue
        if kind == "clipped":
            seen.append(zero.clip_grad_norm_(0.01).item())
            optimizer.step()
            events += ["norm", "step"]
        else:
            stepped = zero.step(optimizer)
            seen.append(stepped)
            events += ["step"] if stepped.done else []
        optimizer.zero_grad(set_to_none=number % 2 == 0)
    copied = zero.copied()
    return Ran([repr(value) for value in seen], zero.full_state_dict(), copied, events, zero)


def equal(topology: Topology, net: nn.Module, policy: Policy, passes: list[str], width: int = 16) -> None:
    """Assert that offloading changes nothing but where bytes lie, and that what it copies was foreseen."""
    plain = on_threads(topology, run, net, replace(policy, offload=Offload()), passes, width)
    for rank, (one, other) in enumerate(
        zip(plain, on_threads(topology, run, net, policy, passes, width), strict=True)
    ):
        assert one.seen == other.seen, rank
        for name, value in one.state.items():
            same = value == other.state[name]
            assert bool((same | (value.isnan() & other.state[name].isnan())).all()), (rank, name)
        assert one.copied == {}
        units = [unit.geometry for unit in other.zero.units]
        assert other.copied == predict(policy, topology, units, 0, other.events).copied
        assert one.zero.wire.ledger.rows() == other.zero.wire.ledger.rows()


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_offloading_changes_no_bit(data: st.DataObject) -> None:
    """Any policy trains to the same bits with any shares offloaded, and copies what is foreseen."""
    topology = data.draw(topologies(4))
    shares = st.sampled_from([0.0, 0.3, 0.7, 1.0])
    offload = Offload(optimizer=data.draw(shares), weights=data.draw(shares))
    policy = replace(data.draw(policies(topology, offloads=True)), offload=offload)
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
    ],
    ids=str,
)
def test_what_is_kept_between_steps_stays_in_step(changes: dict[str, Any]) -> None:
    """Frozen codes, noise keyed by step, carried errors and kept units: the same bits."""
    policy = Policy(**{"memory": ROOMY, **changes}, offload=ALL)  # type: ignore[arg-type]
    equal(Topology(2, 2), frozen_parts(model()), policy, ["train", "evaluate", "accumulate", "train"])


@pytest.mark.parametrize("offload", SHARES, ids=str)
def test_a_skipped_step_is_skipped_with_offload(offload: Offload) -> None:
    """An overflow in fp16 is seen on the host: the step is skipped, the scale halved, training goes on."""
    policy = Policy(compute="fp16", loss_scale=LossScale(initial=256.0), memory=ROOMY, offload=offload)
    equal(Topology(1, 2), model(), policy, ["train", "spike", "train"])


@pytest.mark.parametrize(
    ("changes", "micro_batches", "offload"),
    [
        *(({"stage": stage}, 2, ALL) for stage in (0, 1, 2, 3)),
        ({}, 1, ALL),
        ({}, 2, Offload(weights=1)),
        ({}, 2, Offload(optimizer=0.5)),
        ({"group": 2}, 2, ALL),
        ({"secondary": "node"}, 2, ALL),
        ({"reduce_every": "step"}, 2, ALL),
        ({"frozen": parse("int8:32")}, 2, ALL),
    ],
    ids=str,
)
def test_memory_is_the_formulas_with_offload(
    changes: dict[str, Any], micro_batches: int, offload: Offload
) -> None:
    """What host and device held at most, by part, is what the formula says, to the byte."""
    policy = Policy(memory=replace(ROOMY, prefetch=0), offload=offload, **changes)
    passes = (["accumulate"] * (micro_batches - 1) + ["train"]) * 2
    zero = on_threads(Topology(2, 2), trained, frozen_parts(model(depth=4)), policy, passes)[0]
    units = [unit.geometry for unit in zero.units]
    formula = memory(policy, Topology(2, 2), units, micro_batches=micro_batches)
    measured = zero.memory()
    without = {"optimizer", "host_optimizer"}  # torch's own
    assert measured.keys() <= formula.keys()
    assert {part: measured.get(part, 0) for part in formula.keys() - without} == {
        part: size for part, size in formula.items() if part not in without
    }
    held = sum(
        master.numel()
        for unit in zero.units
        for _, master in unit.master_shard.masters
        if unit.master_shard.placement.shard
    )
    assert formula["host_optimizer"] == ADAM_BYTES * held


def trained(mesh: Mesh, net: nn.Module, policy: Policy, passes: list[str]) -> Zero:
    """An engine after a regular run."""
    net = copy.deepcopy(net)
    zero = shard(net, mesh=mesh, policy=policy)
    optimizer = torch.optim.AdamW(zero.param_groups(), lr=1e-2)
    for number, kind in enumerate(passes):
        alone = kind == "accumulate" and not policy.reduces_each_micro_batch
        with zero.accumulating() if alone else contextlib.nullcontext():
            net(batch(number, mesh.rank)).backward()
            zero.finish_backward()
        if kind == "train":
            zero.step(optimizer)
            optimizer.zero_grad()
    return zero


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_the_device_gives_up_the_host_holds(stage: Stage) -> None:
    """Offloaded whole, a rank's device holds of masters, gradients and Adam states nothing but staging."""
    zero = on_threads(Topology(1, 2), trained, model(), Policy(stage=stage, memory=ROOMY), ["train"])[0]
    units = [unit.geometry for unit in zero.units]
    plain, moved = (
        memory(Policy(stage=stage, memory=ROOMY, offload=offload), Topology(1, 2), units)
        for offload in (Offload(), ALL)
    )
    for part in ("masters", "gradients", "optimizer"):
        assert (moved[part], moved[f"host_{part}"]) == (0, plain[part])
    assert moved["staging"] == 2 * 4 * max(unit.shard for unit in units)
    assert moved["frames"] == 0
    assert moved["gathered"] == plain["gathered"]


def _hand_written(mesh: Mesh, policy: Policy) -> list[float]:
    net = copy.deepcopy(MODEL)
    zero = shard(net, mesh=mesh, policy=policy)
    losses = [net(batch(0, 0)).item()]
    with torch.no_grad():
        for unit in zero.units:
            unit.master_shard.master.mul_(0.5)
    zero.weights_changed()
    losses.append(net(batch(0, 0)).item())
    state = {name: 2 * value if value.dim() else value for name, value in zero.full_state_dict().items()}
    zero.load_full_state_dict(state)
    losses.append(net(batch(0, 0)).item())
    return losses


MODEL = model()


@pytest.mark.parametrize("offload", SHARES, ids=str)
def test_weights_written_by_hand_are_sent_again(offload: Offload) -> None:
    """A kept frame is of the masters as they are: after a write by hand, and after a load."""
    policy = preset("exact", memory=ROOMY, offload=offload)
    first, written, loaded = on_threads(Topology(2, 1), _hand_written, policy)[0]
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


class Signs(torch.optim.Optimizer):
    """Steps of equal size against the sign of the gradient: the same bits on every device.

    Host and device round an AdamW step differently in the last bit, whatever is offloaded.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        """One step."""
        del closure
        with torch.no_grad():
            for group in self.param_groups:
                for master in group["params"]:
                    if master.grad is not None:
                        master.sub_(master.grad.sign() * 2.0**-8)


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
    """Losses and state after six steps of two micro-batches."""
    net = model(width=256, hidden=512, depth=6).to(mesh.device)
    zero = shard(net, mesh=mesh, policy=policy)
    optimizer = Signs(zero.param_groups())
    losses = []
    for number in range(12):
        loss = net(batch(number, 0, 256).to(mesh.device))
        loss.backward()
        zero.finish_backward()
        losses.append(loss.item())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses, zero.full_state_dict()


def _described(mesh: Mesh, policy: Policy) -> dict[str, Any]:
    return describe(shard(copy.deepcopy(MODEL), mesh=mesh, policy=policy))


def test_the_record_says_what_the_hosts_memory_was() -> None:
    """On a CPU it is accounting, and said to be that; shares are those that whole units come to."""
    told = on_threads(Topology(1, 2), _described, Policy(memory=ROOMY, offload=Offload(optimizer=0.4)))[0]
    assert told["offload"]["memory"] == ACCOUNTING
    assert 0.4 <= told["offload"]["optimizer"] < 1
    assert told["offload"]["weights"] == 0
    assert "offload" not in on_threads(Topology(1, 2), _described, Policy(memory=ROOMY))[0]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_shares_are_between_none_and_all(share: float) -> None:
    """Anything else is refused, naming it."""
    with pytest.raises(PolicyError, match=r"offload\.optimizer = .*expected 0 to 1"):
        Offload(optimizer=share)
