"""Training with shards is training: equal to a single process, and every byte is foreseen."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from impl import ops
from impl.codecs.codec import Codec, IntCodec
from impl.comm.mesh import Mesh
from impl.comm.wire import Transport, Wire
from impl.plan.memory import memory
from impl.plan.policy import PRESETS, Policy, preset
from impl.plan.topology import Topology
from impl.plan.traffic import Event, predict
from impl.unit.unit import WholeValues
from impl.zero import ZeroError, plan_units, shard
from tests.impl.test_zero_models import Stack, data
from tests.support.models import Odd
from tests.support.params import nightly
from tests.support.ranks import on_processes, on_threads
from tests.support.strategies import ROOMY, as_published, policies, topologies
from tests.support.training import batch, close, mean_losses, model, single, train

EXACT = preset("exact", memory=ROOMY)


SMALL = {"memory": ROOMY, "weights": IntCodec(8, 32), "gradients": (IntCodec(8, 32), IntCodec(8, 32))}


FIVE = [Topology(1, 4), Topology(2, 2), Topology(2, 3), Topology(3, 2), Topology(4, 1)]


def _gradients(mesh: Mesh, net: nn.Module, policy: Policy) -> dict[str, Tensor]:
    """Mean gradients by parameter name, put together from all ranks' shards."""
    net = copy.deepcopy(net)
    zero = shard(net, mesh=mesh, policy=policy)
    net(batch(0, mesh.rank)).backward()
    zero.finish_backward()
    found = {}
    for unit in zero.units:
        mean = unit.master_shard.mean_gradient()
        assert mean is not None
        unit.master_shard.master.copy_(mean)  # let full_master() gather gradients instead of weights
        for slot, value in zip(unit.geometry.slots, WholeValues(unit).masters(), strict=True):
            found[slot.spec.name] = value
    return found


@pytest.mark.parametrize(
    "topology", [*FIVE[:3], Topology(1, 1), *nightly(*FIVE[3:], Topology(5, 1))], ids=str
)
@pytest.mark.parametrize(
    ("gather", "reduce"), [("hierarchical", "two_hop"), ("hierarchical", "ring"), ("flat", "one_hop")]
)
def test_exact_gradients_are_those_of_one_process(topology: Topology, gather: Any, reduce: Any) -> None:
    """With policy exact the reduced gradient is the mean over ranks, within 1e-5, on any topology."""
    net = model()
    policy = replace(EXACT, gather=gather, reduce=reduce)
    found = on_threads(topology, _gradients, net, policy)
    for rank in range(topology.world):
        (net(batch(0, rank)) / topology.world).backward()
    for gradients in found:
        wanted = {name: parameter.grad for name, parameter in net.named_parameters()}
        assert close(gradients, wanted, 1e-5)


@pytest.mark.parametrize("topology", [*FIVE[:3], *nightly(*FIVE[3:])], ids=str)
@pytest.mark.parametrize("name", ["exact", "zero3", "zeropp"])
def test_training_follows_a_single_process(topology: Topology, name: str) -> None:
    """Losses over 5 steps follow one process: exact within 1e-5, 16-bit and 8-bit within 2 %."""
    policy = preset(name, **(SMALL if name == "zeropp" else {"memory": ROOMY}))
    results = on_threads(topology, train, model(), policy, 5)
    wanted = single(model(), topology.world, 5)
    tolerance = 1e-5 if name == "exact" else 0.02
    for got, want in zip(mean_losses(results), wanted, strict=True):
        assert got == pytest.approx(want, rel=tolerance)


@pytest.mark.parametrize("accumulation", [3, *nightly(1)])
@pytest.mark.parametrize("secondary", [0, 1, 2, *nightly(4)])
def test_exact_is_exact_with_accumulation_and_any_secondary(accumulation: int, secondary: int) -> None:
    """Accumulation and hpZ of any group size change nothing about what is learned."""
    topology = Topology(2, 2)
    policy = replace(EXACT, secondary=secondary)
    results = on_threads(topology, train, model(), policy, 4, accumulation)
    net = model()
    wanted = single(net, 4, 4, accumulation)
    assert mean_losses(results) == pytest.approx(wanted, rel=1e-5)
    assert close(results[0][1], net.state_dict(), 1e-4)


@pytest.mark.parametrize("options", [{"tied": True}, {"recompute": True}, {"depth": 1}], ids=str)
def test_models_as_people_write_them(options: dict[str, Any]) -> None:
    """Tied weights, recomputed blocks and single blocks train as in one process."""
    results = on_threads(Topology(2, 2), train, model(**options), EXACT, 4)
    net = model(**options)
    assert mean_losses(results) == pytest.approx(single(net, 4, 4), rel=1e-5)
    assert close(results[0][1], net.state_dict(), 1e-4)


def test_odd_parameters_train_too() -> None:
    """Scalar, empty, tiny, frozen and twice-used parameters, and dicts, train as in one process.

    Beside an unused one, whose mean gradient is zero where one process has none.
    """
    results = on_threads(Topology(3, 2), train, model(Odd), EXACT, 4, 1, 7)
    net = model(Odd)
    assert mean_losses(results) == pytest.approx(single(net, 6, 4, 1, 7), rel=1e-5)
    frozen = results[0][1]["frozen"]
    assert torch.equal(frozen, net.frozen)
    assert results[0][1].keys() == net.state_dict().keys()


def _replicas(mesh: Mesh, policy: Policy, steps: int) -> list[Tensor]:
    net = copy.deepcopy(MODEL)
    zero = shard(net, mesh=mesh, policy=policy)
    optimizer = torch.optim.SGD(zero.param_groups(), lr=0.1)
    seen = []
    for step in range(steps):
        net(batch(step, mesh.rank)).backward()
        zero.finish_backward()
        optimizer.step()
        optimizer.zero_grad()
        for unit in zero.units:
            unit.start_gather("evaluate")
            unit.wait()
            seen += [member.parameter.detach().clone() for member in unit.members]
            unit.release()
    return seen


MODEL = model()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_replicas_are_bit_equal_after_every_step(name: str) -> None:
    """After every step all ranks gather the same bits, whatever the codec."""
    policy = preset(name, memory=ROOMY)
    first, *others = on_threads(Topology(2, 2), _replicas, policy, 3)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


PASSES = st.lists(
    st.sampled_from(["train", "train", "accumulate", "evaluate", "norm"]), min_size=1, max_size=5
)


def _ledger(mesh: Mesh, net: nn.Module, policy: Policy, passes: list[str], width: int) -> bool:
    net = copy.deepcopy(net)
    zero = shard(net, mesh=mesh, policy=policy)
    optimizer = torch.optim.SGD(zero.param_groups(), lr=0.01)
    events: list[Event] = []
    for number, kind in enumerate(passes):
        x = batch(number, mesh.rank, width)
        if kind == "evaluate":
            with torch.no_grad():
                net(x)
            events.append("evaluate")
        elif kind == "norm":
            if [event for event in events if event != "evaluate"][-1:] == ["accumulate"]:
                zero.drop_gradients()  # a norm of what has not been reduced is refused
                events.append("dropped")
            zero.grad_norm()
            events.append("norm")
        else:
            alone = kind == "accumulate" and not policy.reduces_each_micro_batch
            with zero.accumulating() if alone else contextlib.nullcontext():
                net(x).backward()
                zero.finish_backward()
            events += ["forward", "accumulate" if alone else "backward"]
            if kind == "train":
                optimizer.step()
                optimizer.zero_grad()
                events.append("step")
    units = [unit.geometry for unit in zero.units]
    wanted = predict(policy, mesh.topology, units, mesh.rank, events, buffer_bytes=zero.buffers.nbytes).sent
    got = zero.wire.ledger.rows()
    assert got == wanted, got.items() ^ wanted.items()
    return True


@given(st.data(), PASSES)
def test_the_ledger_equals_the_prediction_to_the_byte(data: st.DataObject, passes: list[str]) -> None:
    """For any policy, topology, model shape and sequence of passes, bytes sent are bytes foreseen."""
    topology = data.draw(topologies(6))
    policy = data.draw(as_published(data.draw(policies(topology))))
    if data.draw(st.booleans()):
        net, width = model(Odd), 7
    else:
        width = data.draw(st.integers(1, 12))
        net = model(
            width=width,
            hidden=data.draw(st.integers(1, 30)),
            depth=data.draw(st.integers(0, 4)),
            tied=data.draw(st.booleans()),
            recompute=data.draw(st.booleans()) and policy.planes == 1,  # else refused
        )
    assert all(on_threads(topology, _ledger, net, policy, passes, width))


def test_plan_equals_what_is_sharded() -> None:
    """Units planned from a model on the meta device are those that sharding makes."""
    topology = Topology(2, 3)
    policy = preset("zeropp", **SMALL)
    with torch.device("meta"):
        planned = plan_units(Odd(), topology, policy)
    zero = on_threads(topology, train, model(Odd), policy, 1, 1, 7)[0][2]
    assert planned == [unit.geometry for unit in zero.units]


# Memory


@pytest.mark.parametrize("name", ["zero3", "zeropp", "hpz", "zeropp with a copy in 16 bits"])
def test_memory_is_the_formulas(name: str) -> None:
    """What the engine held at most, by part, is what the formula says, to the byte."""
    known, _, more = name.partition(" ")
    policy = preset(known, memory=ROOMY, **({"secondary_format": "bf16"} if more else {}))
    zero = on_threads(Topology(2, 2), train, model(depth=4), policy, 2)[0][2]
    formula = memory(policy, Topology(2, 2), [unit.geometry for unit in zero.units])
    measured = zero.memory()
    for part in ("masters", "gradients", "secondary", "gathered", "local_gradients"):
        assert measured.get(part, 0) == formula[part], part


def _master_shard(mesh: Mesh, net: nn.Module, policy: Policy) -> tuple[dict[str, int], dict[str, int], int]:
    """Of a training step: bytes held by part, what the formula says, and parameters."""
    net = copy.deepcopy(net)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    zero = shard(net, mesh=mesh, policy=policy)
    optimizer = torch.optim.AdamW(zero.param_groups())
    zero.scaler.scaled(net(batch(0, mesh.rank, 768))).backward()
    zero.finish_backward()
    zero.step(optimizer)
    moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    held = zero.memory() | {"optimizer": sum(value.nbytes for value in moments)}
    return held, memory(policy, mesh.topology, [unit.geometry for unit in zero.units]), parameters


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["zero3", "hpz", "zeropp"])
def test_memory_of_50_million_parameters(name: str) -> None:
    """All that a rank holds in mixed precision is the formula's within 5 %, and 16 M / P with fp32 shards.

    Of 16 bytes a parameter (facts A10) the 16-bit shard is not held: it is encoded on its way out.
    """
    net = model(width=768, hidden=3072, depth=12)
    policy = preset(name, compute="bf16", memory=replace(ROOMY, prefetch=0))
    topology = Topology(2, 2)
    for held, formula, parameters in on_threads(topology, _master_shard, net, policy):
        assert parameters > 50e6
        assert sum(held.values()) == pytest.approx(sum(formula.values()), rel=0.05)
        states = sum(held[part] for part in ("masters", "gradients", "optimizer"))
        assert states == pytest.approx(16 * parameters / topology.world, rel=0.05)
        node_copies = topology.world / topology.ranks_per_node if policy.secondary else 0
        width = policy.weights.frame_bytes(1 << 20) / (1 << 20)
        secondary = node_copies * parameters * width / topology.world  # facts A4, at the codec's width
        assert held.get("secondary", 0) == pytest.approx(secondary, rel=0.05)


@pytest.mark.parametrize("prefetch", [0, ROOMY.prefetch])
@pytest.mark.parametrize("frozen", [("norm",), ("up", "norm"), ("up", "down", "norm")])
def test_memory_counts_frozen_units_with_their_block(frozen: tuple[str, ...], prefetch: int) -> None:
    """Frozen parameters of a block are gathered with it, and in backward with the block before too."""
    net = model(depth=3)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not any(part in name.split(".") for part in frozen))
    policy = Policy(memory=replace(ROOMY, prefetch=prefetch))
    zero = on_threads(Topology(2, 1), train, net, policy, 1)[0][2]
    units = [unit.geometry for unit in zero.units]
    assert any(not unit.trainable for unit in units)
    assert zero.memory()["gathered"] == memory(policy, Topology(2, 1), units)["gathered"]


# Peers


def _with_ddp(mesh: Mesh, steps: int) -> list[float]:
    net = DistributedDataParallel(copy.deepcopy(MODEL))
    return _peer(mesh, net, net.parameters(), steps)


def _with_fsdp2(mesh: Mesh, steps: int) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    net = copy.deepcopy(MODEL)
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    return _peer(mesh, net, net.parameters(), steps)


def _peer(mesh: Mesh, net: nn.Module, parameters: Any, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for step in range(steps):
        loss = net(batch(step, mesh.rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dist.barrier()
    return losses


def _with_shards(mesh: Mesh, steps: int) -> list[float]:
    net = copy.deepcopy(MODEL)
    zero = shard(net, mesh=mesh, policy=EXACT, wire=Wire(mesh, transport="shm"))
    optimizer = torch.optim.AdamW(zero.param_groups(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = net(batch(step, mesh.rank))
        loss.backward()
        zero.finish_backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_exact_follows_ddp_and_fsdp2_over_20_steps() -> None:
    """On four processes, exact's losses are within 1e-4 of DDP's and of FSDP2's for 20 steps."""
    topology = Topology(2, 2)
    ours = on_processes(topology, _with_shards, 20)
    for peer in (_with_ddp, _with_fsdp2):
        for mine, theirs in zip(ours, on_processes(topology, peer, 20), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)


# Transports


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize(
    "topology", [Topology(1, 4), Topology(2, 2), Topology(3, 2), Topology(4, 1)], ids=str
)
def test_transports_agree_everywhere(name: str, topology: Topology) -> None:
    """Gloo and shared memory give the same losses, bit for bit."""
    policy = preset(name, memory=ROOMY)
    gloo, shared = (on_processes(topology, _losses, policy, way) for way in ("backend", "shm"))
    assert gloo == shared


def _losses(mesh: Mesh, policy: Policy, transport: Any) -> list[float]:
    return train(mesh, model(), policy, 3, wire=Wire(mesh, transport=transport))[0]


def test_transports_agree_to_the_bit() -> None:
    """Gloo and shared memory give the same losses, bit for bit, with ZeRO++ on four processes."""
    test_transports_agree_everywhere("zeropp", Topology(2, 2))


def _decoded(mesh: Mesh, transport: Transport) -> list[int]:
    """Elements of each gather that was decoded, in a forward and a backward pass."""
    decoded: list[int] = []
    decode = ops.decode

    def counting(codec: Codec, frames: Tensor, out: Tensor) -> None:
        decoded.append(out.numel())
        decode(codec, frames, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "decode", counting)
        zero = shard(model(), mesh=mesh, policy=EXACT, wire=Wire(mesh, transport=transport))
        zero.model(batch(0, mesh.rank)).backward()
        zero.finish_backward()
    return decoded


@pytest.mark.parametrize("transport", ["backend", "shm"])
def test_elements_of_one_hop_arrive_where_they_are_used(transport: Transport) -> None:
    """Between nodes of one rank, weights in the type of computation are received in place: none is copied."""
    assert on_processes(Topology(2, 1), _decoded, transport) == [[], []]


# Refusals


def test_what_is_no_policy_is_refused() -> None:
    """A recipe, or a configuration, in the place of its policy: one line that says what is expected."""
    with pytest.raises(ZeroError, match=r"policy is a dict: expected an impl\.plan\.policy\.Policy"):
        shard(nn.Linear(1, 1), mesh=None, policy={"stage": 3})  # type: ignore[arg-type]
    with pytest.raises(ZeroError, match=r"mesh is a NoneType: expected an impl\.comm\.mesh\.Mesh"):
        shard(nn.Linear(1, 1), mesh=None, policy=preset("exact"))  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_is_sharded_already_is_refused(stage: int) -> None:
    """The same model, a part of it, or one that holds it: the line says so, and the first engine goes on."""

    def body(mesh: Mesh) -> None:
        net = Stack()
        policy = preset("exact", memory=ROOMY, stage=stage)
        zero = shard(net, mesh=mesh, policy=policy)
        for again in (net, net.blocks[0], nn.Sequential(nn.Linear(2, 2), net)):
            with pytest.raises(ZeroError, match=r"^parameter '[\w.]+' of this model is sharded already:"):
                shard(again, mesh=mesh, policy=policy)
        net(data(0, mesh.rank)).sum().backward()
        zero.finish_backward()

    on_threads(Topology(1, 2), body)


def test_other_types_than_the_policys_are_refused() -> None:
    """A float64 or bf16 model under an fp32 policy is refused by the parameter's name."""
    for dtype in (torch.float64, torch.bfloat16):

        def body(mesh: Mesh, dtype: torch.dtype = dtype) -> None:
            with pytest.raises(ZeroError, match=f"embed.weight' is {dtype}, but the policy computes in fp32"):
                shard(Stack().to(dtype), mesh=mesh, policy=EXACT)

        on_threads(Topology(1, 1), body)


# Products: pairs are covered above, everything with everything at night


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("topology", FIVE, ids=str)
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_trains_everywhere(
    name: str, topology: Topology, accumulation: int, options: dict[str, Any]
) -> None:
    """Every preset on every topology follows a single process: exact within 1e-5, the others 2 %."""
    small = {key: SMALL[key] for key in SMALL if getattr(PRESETS[name], key) != getattr(EXACT, key)}
    quantised = {
        "weights": isinstance(PRESETS[name].weights, IntCodec),
        "gradients": isinstance(PRESETS[name].gradients[0], IntCodec),
    }
    changes = {key: value for key, value in small.items() if quantised.get(key, True)}
    policy = preset(name, **{"memory": ROOMY, **changes})
    results = on_threads(topology, train, model(**options), policy, 4, accumulation)
    wanted = single(model(**options), topology.world, 4, accumulation)
    assert mean_losses(results) == pytest.approx(wanted, rel=1e-5 if name == "exact" else 0.02)
