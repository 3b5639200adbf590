"""FSDP2 and DDP train with this project's collectives as without them, and send the predicted bytes."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from impl.adapters.inside_ddp import InDDP
from impl.adapters.inside_fsdp2 import InFSDP2
from impl.adapters.joined import HostError, fsdp2_groups, hosted_units
from impl.adapters.traffic import BASES, GroupGeometry, Host, check_host, predict_hosted
from impl.codecs.codec import Codec, parse
from impl.comm.mesh import Mesh
from impl.comm.wire import Transport, Wire
from impl.engine.unit_planning import find_blocks
from impl.plan.traffic import Event, LedgerKey, Sent
from impl.policy.policy import MemoryLimits, Policy, PolicyError
from impl.policy.presets import preset
from impl.policy.shard_layout import ParameterSpec
from impl.policy.topology import Topology
from tests.support.models import Net
from tests.support.ranks import each_rank, on_processes
from tests.support.strategies import engine_codecs, raw_codecs, topologies

STEPS, ACCUMULATION = 3, 2
WIDTH = 18  # rows divide neither by 4 nor by 8
FP32 = parse("fp32")
PADDED = MemoryLimits(max_padding=99.0)  # the model is tiny
EXACT: dict[Host, Policy] = {
    "fsdp2": preset("exact", memory=PADDED),
    "ddp": replace(BASES["ddp"], gradients=(FP32, FP32), memory=PADDED),
}
HOSTS: tuple[Host, ...] = ("fsdp2", "ddp")


def quantised(host: Host, **changes: Any) -> Policy:
    """Returns a policy with 4-bit gradients inside ``host``, and with 8-bit weights if the host gathers them."""
    codec = parse("int4:32")
    weights = {"weights": parse("int8:64")} if host == "fsdp2" else {}
    return replace(EXACT[host], **weights, **{"gradients": (codec, codec), **changes})


@dataclass(frozen=True)
class Case:
    """One training run of a host; without a policy it uses the host's own collectives."""

    host: Host
    policy: Policy | None = None
    transport: Transport = "backend"
    clip: float | None = 0.01  # which every step exceeds


@dataclass
class Trained:
    """Losses of every micro-batch, whole gradients of the last step, and the bytes sent and predicted."""

    losses: list[float] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    sent: dict[LedgerKey, Sent] = field(default_factory=dict)  # nothing of a host by itself
    predicted: dict[LedgerKey, Sent] = field(default_factory=dict)


def net() -> Net:
    """Returns a model that is the same on every rank."""
    torch.manual_seed(3)
    return Net(width=WIDTH, hidden=42, depth=2)


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def wrapped(host: Host, model: nn.Module, shape: tuple[int, ...], part: DeviceMesh | None = None) -> Any:
    """Returns ``model`` in its host over a device mesh of ``shape``, or over ``part``."""
    if host == "ddp":
        group = None if part is None else part.get_group()
        # Several buckets for this small model.
        return DistributedDataParallel(model, bucket_cap_mb=0.004, process_group=group)
    # torch 2.13 renames two collectives that its own FSDP2 still calls by their old names.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    mesh = part or init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    for block in find_blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(mesh: Mesh, case: Case, part: DeviceMesh | None = None) -> Trained:
    """Evaluate once, then train a few steps with AdamW."""
    model = wrapped(case.host, net(), (mesh.topology.world,), part)
    wire = Wire(mesh, transport=case.transport)
    kind: Any = InFSDP2 if case.host == "fsdp2" else InDDP
    joined = None if case.policy is None else kind(model, wire, case.policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    events: list[Event] = ["evaluate"]
    trained = Trained()
    with torch.no_grad():
        model(inputs(99, mesh.rank))
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(ACCUMULATION):
            if case.host == "ddp":
                model.require_backward_grad_sync = micro == ACCUMULATION - 1
            loss = model(inputs(step * ACCUMULATION + micro, mesh.rank)) / ACCUMULATION
            loss.backward()
            trained.losses.append(loss.item())
            events += ["forward", "backward"]
        if case.clip is not None:
            if joined is None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            else:
                joined.clip_grad_norm_(case.clip)
            events.append("norm")
        trained.gradients = [_whole(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        events.append("step")
    if joined is not None:
        with torch.device("meta"):  # units as they are planned before anything runs
            planned = hosted_units(case.host, net(), mesh.topology, case.policy)
        assert [(u.name, u.padded) for u in joined.units] == [(u.name, u.padded) for u in planned]
        wire.close()
        trained.sent, trained.predicted = wire.ledger.rows(), joined.predict(events)
    return trained


def _whole(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


def _train_all(mesh: Mesh, cases: list[Case]) -> list[Trained]:
    return [train(mesh, case) for case in cases]


def cases_of(host: Host) -> dict[str, Case]:
    """Returns different runs of one host on 2x2 ranks."""
    int4, int8 = parse("int4:32"), parse("int8:96")
    other = {"fsdp2": {"gather": "flat", "reduce": "one_hop"}, "ddp": {"reduce": "ring"}}[host]
    return {
        "own": Case(host),
        "exact": Case(host, EXACT[host], "shm"),
        "quantised": Case(host, quantised(host, gradients=(int8, int4), chunks=3), "shm"),
        "flat": Case(host, quantised(host, **other)),
    }


@pytest.mark.parametrize("host", HOSTS)
def test_four_ranks(host: Host) -> None:
    """On 2x2 gloo processes hosts equal themselves with exact codecs, train with others, and send what is predicted.

    With fp32 frames the first loss is the host's bit for bit, and all losses and gradients are within 1e-6, since sums
    have another order.  For all codecs, hops, chunks and transports each rank's ledger equals the prediction, row by
    row.  Every rank decodes the same frames, its own part too, so replicas of DDP cannot drift apart.  With 4-bit
    gradients, and 8-bit weights in FSDP2, mean losses stay within a tenth of the first loss of the host's and halve; at
    most half of fp32's bytes cross between nodes.
    """
    cases = cases_of(host)
    ranks = on_processes(Topology(2, 2), _train_all, list(cases.values()))  # once, to save time
    runs = {name: [rank[index] for rank in ranks] for index, name in enumerate(cases)}
    for host_run, joined in zip(runs["own"], runs["exact"], strict=True):
        assert joined.losses[0] == host_run.losses[0]
        assert joined.losses == pytest.approx(host_run.losses, abs=1e-6)
        for x, y in zip(joined.gradients, host_run.gradients, strict=True):
            torch.testing.assert_close(x, y, atol=1e-6, rtol=0)
    means = {}
    for name, trained in runs.items():
        for rank in trained:
            assert rank.sent == rank.predicted, name
            assert name == "own" or rank.sent
            assert all(map(torch.equal, trained[0].gradients, rank.gradients))
        means[name] = [
            math.fsum(losses) / 4 for losses in zip(*(rank.losses for rank in trained), strict=True)
        ]
    for name in ("quantised", "flat"):
        assert means[name] == pytest.approx(means["own"], abs=0.1 * means["own"][0])
        assert means[name] != means["exact"]
        assert means[name][-1] < means[name][0] / 2
    exact, small = (
        sum(sent.bytes for key, sent in runs[name][0].sent.items() if key.link == "inter")
        for name in ("exact", "quantised")
    )
    assert 0 < 2 * small < exact


@each_rank(1, 2, processes=True)
def test_two_ranks_equal_their_host_bit_for_bit(mesh: Mesh) -> None:
    """With fp32 frames on two ranks, on one node or two, losses and gradients equal the host's bit for bit."""
    for host in HOSTS:
        host_run = train(mesh, Case(host, clip=None))
        for topology in (Topology(1, 2), Topology(2, 1)):
            joined = train(Mesh(topology, mesh.rank, mesh.device), Case(host, EXACT[host], clip=None))
            assert joined.losses == host_run.losses
            assert all(map(torch.equal, joined.gradients, host_run.gradients))
            assert joined.sent == joined.predicted


@each_rank(1, 4, processes=True)
def test_hosts_over_some_of_the_ranks(mesh: Mesh) -> None:
    """Two groups of ranks equal their hosts bit for bit; a wire over other ranks is refused."""
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    part = Mesh.of(halves["dp"])
    for host in HOSTS:
        host_run = train(part, Case(host, clip=None), halves["dp"])
        joined = train(part, Case(host, EXACT[host], "shm", clip=None), halves["dp"])
        assert joined.losses == host_run.losses
        assert all(map(torch.equal, joined.gradients, host_run.gradients))
        assert joined.sent == joined.predicted
        model = wrapped(host, net(), (), halves["tp"])
        kind: Any = InFSDP2 if host == "fsdp2" else InDDP
        ranks = ", ".join(map(str, part.global_ranks))
        with pytest.raises(
            HostError,
            match=f"{host} runs on global ranks ., ., but the wire runs on global ranks {ranks}: make",
        ):
            kind(model, Wire(part), EXACT[host])


# Predictions

shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@given(topologies(6), shapes, st.one_of(raw_codecs, engine_codecs.filter(lambda c: not c.stochastic)))
def test_a_hierarchical_gather_crosses_each_link_once(
    topology: Topology, shape: tuple[int, ...], codec: Codec
) -> None:
    """All ranks together send every rank's frame once to each other node."""
    group = GroupGeometry("g", (ParameterSpec("w", shape),), (True,), topology.world)
    policy = replace(BASES["fsdp2"], weights=codec)
    sent = [
        predict_hosted("fsdp2", policy, topology, [group], rank=rank, events=["evaluate"])
        for rank in range(topology.world)
    ]
    inter = sum(row.bytes for rows in sent for key, row in rows.items() if key.link == "inter")
    assert inter == topology.world * codec.frame_bytes(group.shard) * (topology.nodes - 1)


def test_tied_and_frozen_parameters() -> None:
    """A tied weight is in its group once; a frozen weight is gathered and not reduced."""
    model = Net(width=8, hidden=8, depth=1, tied=True)
    model.blocks[0].up.weight.requires_grad_(requires_grad=False)
    root, block = fsdp2_groups(model, find_blocks(model), Topology(1, 2))
    assert [parameter.name for parameter in root.parameters] == ["embed.weight", "embed.bias", "head.bias"]
    assert block.shard - block.piece == 8 * 8 // 2


# Refusals


@pytest.mark.parametrize(
    ("host", "changes", "message"),
    [
        ("fsdp2", {"weights": parse("int8:64:stochastic")}, "int8:64:stochastic inside fsdp2"),
        ("ddp", {"gradients": (FP32, parse("int4:32:stochastic"))}, "int4:32:stochastic inside ddp"),
        ("ddp", {"stage": 3}, "stage = 3 inside ddp.*expected 0"),
        ("fsdp2", {"memory": MemoryLimits(prefetch=7)}, "memory.prefetch = 7 inside fsdp2"),
    ],
)
def test_what_a_host_cannot_do_is_refused(host: Host, changes: dict[str, Any], message: str) -> None:
    """A field that a host cannot carry out is refused with its value; docs/reference/support.md has more."""
    policy = replace(EXACT[host], **changes)
    with pytest.raises(PolicyError, match=message):
        check_host(host, policy)


@each_rank(1, 2, processes=True)
def test_what_a_host_refuses_when_it_runs(mesh: Mesh) -> None:
    """Scalars, unsharded models, replicas, two modules in a group, deleted hooks, sparse gradients: one line each."""

    def refused(message: str) -> Any:
        return pytest.raises((HostError, PolicyError), match=rf"\A[^\n]*{re.escape(message)}[^\n]*\Z")

    wire = Wire(mesh)
    scalar = nn.Linear(2, 2)
    scalar.gain = nn.Parameter(torch.tensor(1.0))
    with refused("FSDP2 cannot shard parameter 'gain'"):
        fsdp2_groups(scalar, [], mesh.topology)
    with refused("Net is not sharded"):
        InFSDP2(net(), wire, EXACT["fsdp2"])
    with refused("secondary = node"):
        InFSDP2(net(), wire, replace(EXACT["fsdp2"], secondary="node"))
    with refused("over a device mesh of shape (2, 1), expected (2,)"):
        InFSDP2(wrapped("fsdp2", net(), (2, 1)), wire, EXACT["fsdp2"])
    pairs = net()
    fully_shard([pairs.embed, pairs.head], mesh=init_device_mesh("cpu", (2,)))
    fully_shard(pairs, mesh=init_device_mesh("cpu", (2,)))
    InFSDP2(pairs, wire, EXACT["fsdp2"])
    with refused("call fully_shard() on one module at a time"):
        pairs(inputs(0, mesh.rank))
    ddp = wrapped("ddp", net(), ())
    InDDP(ddp, wire, EXACT["ddp"])
    with refused("the InDDP of its model was deleted"):
        ddp(inputs(0, mesh.rank)).backward()
    ddp = wrapped("ddp", nn.Embedding(4, 2, sparse=True), ())
    kept = InDDP(ddp, wire, EXACT["ddp"])
    with refused("gradients in DDP are sparse"):
        ddp(torch.tensor(kept.wire.mesh.rank)).sum().backward()
    for unfrozen in (True, False):
        layer = nn.Linear(4, 2)
        layer.bias.requires_grad_(requires_grad=False)
        ddp = wrapped("ddp", layer, ())  # never reduces the bias
        layer.bias.requires_grad_(requires_grad=unfrozen)
        kept = InDDP(ddp, wire, EXACT["ddp"])
        loss = ddp(torch.full((1, 4), 1.0 + kept.wire.mesh.rank)).sum()
        if unfrozen:
            with refused("call requires_grad_(False) on the parameters that DDP does not reduce"):
                loss.backward()
        else:  # as the message says
            loss.backward()
            assert layer.weight.grad is not None
            assert torch.equal(layer.weight.grad, torch.full((2, 4), 1.5))
