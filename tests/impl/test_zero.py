"""Tests that sharded training equals training in one process, and that every byte is predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from impl import ops
from impl.codecs.codec import IntCodec
from impl.comm.mesh import Mesh, MeshError
from impl.comm.wire import Transport, Wire
from impl.parameters import access
from impl.plan.memory import memory
from impl.policy.policy import Policy
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import ZeroError, plan_units, shard
from tests.impl.test_zero_models import Stack, data
from tests.support.history import gathered, history_of
from tests.support.models import Odd
from tests.support.params import nightly
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import EXACT, ROOMY, as_published, policies, topologies
from tests.support.training import batch, close, mean_losses, model, sgd, single, train

SMALL = {"memory": ROOMY, "weights": IntCodec(8, 32), "gradients": (IntCodec(8, 32), IntCodec(8, 32))}
FIVE = [Topology(1, 4), Topology(2, 2), Topology(2, 3), Topology(3, 2), Topology(4, 1)]


@pytest.mark.parametrize(
    "topology", [*FIVE[:3], Topology(1, 1), *nightly(*FIVE[3:], Topology(5, 1))], ids=str
)
@pytest.mark.parametrize(
    ("gather", "reduce"), [("hierarchical", "two_hop"), ("hierarchical", "ring"), ("flat", "one_hop")]
)
@each_rank()
def test_exact_gradients_are_those_of_one_process(
    mesh: Mesh, topology: Topology, gather: Any, reduce: Any
) -> None:
    """With the policy "exact", the reduced gradient is the mean over ranks within 1e-5, on any topology."""
    unsharded, net = model(), model()
    zero = shard(net, mesh=mesh, policy=replace(EXACT, gather=gather, reduce=reduce))
    net(batch(0, mesh.rank)).backward()
    for rank in range(topology.world):
        (unsharded(batch(0, rank)) / topology.world).backward()
    wanted = {name: parameter.grad for name, parameter in unsharded.named_parameters()}
    assert close({name: access.Gradient(zero, name).full() for name in wanted}, wanted, 1e-5)


@pytest.mark.parametrize("topology", [*FIVE[:3], *nightly(*FIVE[3:])], ids=str)
@pytest.mark.parametrize("name", ["zero3", "zeropp"])
def test_training_follows_a_single_process(topology: Topology, name: str) -> None:
    """Losses over 5 steps follow one process within 2 %, in 16-bit and in 8-bit codecs."""
    policy = preset(name, **(SMALL if name == "zeropp" else {"memory": ROOMY}))
    results = on_threads(topology, train, model(), policy, 5)
    assert mean_losses(results) == pytest.approx(single(model(), topology.world, 5), rel=0.02)


PASSES = st.lists(
    st.sampled_from(["train", "train", "accumulate", "evaluate", "norm"]), min_size=1, max_size=5
)


def _passed(mesh: Mesh, net: nn.Module, policy: Policy, passes: list[str], width: int) -> list[Tensor]:
    history = history_of(mesh, net, policy, passes, width=width, optimize=sgd)
    wanted = history.predicted(buffer_bytes=history.zero.buffers.nbytes).sent
    got = history.zero.wire.ledger.rows()
    assert got == wanted, got.items() ^ wanted.items()
    return gathered(history.zero)


@given(st.data(), PASSES)
def test_bytes_are_those_foreseen_and_replicas_equal(data: st.DataObject, passes: list[str]) -> None:
    """For any policy, topology, model and passes, ledgers are as predicted and all ranks gather the same bits."""
    topology = data.draw(topologies(6))
    policy = data.draw(as_published(data.draw(policies(topology))))
    net, width = model(Odd), 7
    if not data.draw(st.booleans()):
        width = data.draw(st.integers(1, 12))
        net = model(
            width=width,
            hidden=data.draw(st.integers(1, 30)),
            depth=data.draw(st.integers(0, 4)),
            tied=data.draw(st.booleans()),
            recompute=data.draw(st.booleans()) and policy.planes == 1,  # else refused
        )
    first, *others = on_threads(topology, _passed, net, policy, passes, width)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_plan_equals_what_is_sharded() -> None:
    """Units planned from a model on the meta device are the units that sharding makes."""
    topology = Topology(2, 3)
    policy = preset("zeropp", **SMALL)
    with torch.device("meta"):
        planned = plan_units(Odd(), topology, policy)
    zero = on_threads(topology, train, model(Odd), policy, 1, 1, 7)[0][2]
    assert planned == [unit.geometry for unit in zero.units]


@pytest.mark.parametrize("prefetch", [0, ROOMY.prefetch])
@pytest.mark.parametrize("frozen", [("norm",), ("up", "norm"), ("up", "down", "norm")])
def test_memory_counts_frozen_units_with_their_block(frozen: tuple[str, ...], prefetch: int) -> None:
    """A block's frozen parameters are gathered with it; in backward they are also gathered with the block before."""
    net = model(depth=3)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not any(part in name.split(".") for part in frozen))
    policy = Policy(memory=replace(ROOMY, prefetch=prefetch))
    zero = on_threads(Topology(2, 1), train, net, policy, 1)[0][2]
    units = [unit.geometry for unit in zero.units]
    assert any(not unit.trainable for unit in units)
    assert zero.memory()["gathered"] == memory(policy, Topology(2, 1), units)["gathered"]


@pytest.mark.parametrize("transport", ["backend", "shm"])
@each_rank(2, 1, processes=True)
def test_elements_of_one_hop_arrive_where_they_are_used(mesh: Mesh, transport: Transport) -> None:
    """Between nodes of one rank, unquantised weights arrive in the flat buffer and are not decoded."""

    def refuse(*_: object) -> None:
        raise AssertionError("decoded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "decode", refuse)
        zero = shard(model(), mesh=mesh, policy=EXACT, wire=Wire(mesh, transport=transport))
        zero.model(batch(0, mesh.rank)).backward()


def test_what_is_no_policy_is_refused() -> None:
    """A configuration in place of a policy or a mesh is refused in one line, and so is a job that has not begun."""
    with pytest.raises(ZeroError, match=r"policy has type dict: pass a zeropp\.Policy"):
        shard(nn.Linear(1, 1), mesh=None, policy={"stage": 3})  # type: ignore[arg-type]
    with pytest.raises(
        MeshError, match=r"mesh is a dict: expected zeropp\.mesh\(\.\.\.\), torch's DeviceMesh"
    ):
        shard(nn.Linear(1, 1), mesh={"nodes": 1}, policy=preset("exact"))  # type: ignore[arg-type]
    with pytest.raises(
        MeshError, match=r"no ranks yet: call torch\.distributed\.init_process_group\(\) first"
    ):
        shard(nn.Linear(1, 1), policy=preset("exact"))


@pytest.mark.parametrize("stage", [0, 1, 3])
@each_rank(1, 2)
def test_what_is_sharded_already_is_refused(mesh: Mesh, stage: int) -> None:
    """Sharding the same model, a part of it, or a model that holds it is refused, and the first engine goes on."""
    net = Stack()
    policy = replace(EXACT, stage=stage)
    shard(net, mesh=mesh, policy=policy)
    for candidate in (net, net.blocks[0], nn.Sequential(nn.Linear(2, 2), net)):
        with pytest.raises(ZeroError, match=r"^parameter '[\w.]+' of this model is sharded already:"):
            shard(candidate, mesh=mesh, policy=policy)
    net(data(0, mesh.rank)).sum().backward()


@each_rank(1, 1)
def test_other_types_than_the_policys_are_refused(mesh: Mesh) -> None:
    """A float64 or bf16 model under an fp32 policy is refused by the parameter's name."""
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.raises(ZeroError, match=f"embed.weight' is {dtype}, but the policy computes in fp32"):
            shard(Stack().to(dtype), mesh=mesh, policy=EXACT)
