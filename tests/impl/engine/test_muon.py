"""Muon on shards follows ``torch.optim.Muon`` in one process, and sends and holds what is predicted."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from impl.checkpoint.save_load import load, save
from impl.codecs.codec import BF16, FP32, Codec, parse
from impl.comm.mesh import Mesh
from impl.comm.watchdog import WireError
from impl.comm.wire import Wire
from impl.engine.muon import Muon, hidden_matrices
from impl.errors import ZeroError
from impl.parameters.access import OptimizerState
from impl.plan.memory import memory, with_muon
from impl.plan.traffic import passes, predict
from impl.policy.policy import LossScale, Offload, Policy
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import shard
from tests.support.diloco import diloco
from tests.support.models import Net
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import EXACT, ROOMY
from tests.support.training import Training, batch, model

RATE, STEPS = 0.05, 3
MUON: dict[str, Any] = {"lr": RATE, "momentum": 0.9, "weight_decay": 0.1}
ADAMW: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}
# Newton-Schulz computes in bf16: gradients that differ in the last bit of fp32 move an element of an update, which is
# at most about 1, by a few units of 2^-8.
ROUNDING = STEPS * RATE * 2.0**-5


class InOneProcess:
    """torch's Muon on the hidden matrices of an unsharded model, and torch's AdamW on everything else."""

    def __init__(self, net: nn.Module, muon: dict[str, Any] = MUON) -> None:
        chosen = hidden_matrices(net)
        groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for name, parameter in net.named_parameters():
            groups[chosen(name, parameter)].append(parameter)
        self.optimizers = [torch.optim.AdamW(groups[0], **ADAMW), torch.optim.Muon(groups[1], **muon)]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def in_one_process(net: nn.Module, world: int, accumulation: int = 1, **muon: Any) -> dict[str, Tensor]:
    """The weights after :data:`STEPS` steps in which one process reads the batches of all ranks."""
    net = copy.deepcopy(net)
    optimizer = InOneProcess(net, MUON | muon)
    for step in range(STEPS):
        for micro in range(accumulation):
            for rank in range(world):
                (net(batch(step * accumulation + micro, rank)) / world / accumulation).backward()
        optimizer.step()
    return net.state_dict()


class MuonTraining(Training):
    """A sharded model in training with Muon on one rank; losses are divided by the accumulation."""

    def __init__(
        self, mesh: Mesh, policy: Policy, accumulation: int = 1, muon: dict[str, Any] = MUON, **options: Any
    ) -> None:
        def loss_of(net: Any, number: int, rank: int) -> Tensor:
            return net(batch(number, rank)) / accumulation  # type: ignore[no-any-return]

        net = model()
        super().__init__(
            mesh,
            net,
            policy,
            group_of=hidden_matrices(net),
            loss_of=loss_of,
            optimize=lambda _: None,
            **options,
        )  # type: ignore[arg-type]
        self.optimizer = Muon(self.zero, adamw=ADAMW, **muon)
        self.optimizers = [self.optimizer]


def trained(mesh: Mesh, policy: Policy, accumulation: int, muon: dict[str, Any]) -> dict[str, Tensor]:
    run = MuonTraining(mesh, policy, accumulation, muon)
    for step in range(STEPS):
        run.step(step, accumulation)
    return run.zero.full_state_dict()


def farthest(one: dict[str, Tensor], other: dict[str, Tensor], *, hidden: bool | None = None) -> float:
    """The largest difference of an element, of all parameters or of hidden matrices or of the others."""
    chosen = hidden_matrices(model())
    parameters = dict(model().named_parameters())
    names = [n for n, p in parameters.items() if hidden in (None, bool(chosen(n, p)))]
    return max(float((one[name] - other[name]).abs().max()) for name in names)


@pytest.mark.parametrize("codec", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0, "ns_steps": 3}],
    ids=str,
)
def test_one_rank_equals_torch_to_the_bit(codec: Codec, options: dict[str, Any]) -> None:
    """Messages in fp32 and in bf16 give the bits of torch.optim.Muon, which rounds to bf16 itself."""
    policy = replace(EXACT, owned=(codec, codec))
    (weights,) = on_threads(Topology(1, 1), trained, policy, 1, MUON | options)
    expected = in_one_process(model(), 1, **options)
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(4, 1), Topology(3, 2)], ids=str)
def test_shards_follow_one_process(topology: Topology, accumulation: int) -> None:
    """On every topology and with accumulation, weights stay within the rounding of Newton-Schulz in bf16."""
    weights = on_threads(topology, trained, EXACT, accumulation, MUON)
    expected = in_one_process(model(), topology.world, accumulation)
    assert all(farthest(weights[0], other) == 0 for other in weights[1:])
    assert farthest(weights[0], expected, hidden=True) <= ROUNDING
    assert farthest(weights[0], expected, hidden=False) <= ROUNDING


@pytest.mark.parametrize(
    "policy",
    [
        replace(EXACT, stage=0), replace(EXACT, stage=1), replace(EXACT, stage=2), replace(EXACT, group="node"),
        replace(EXACT, secondary="node"), replace(EXACT, memory=replace(ROOMY, persist_below=650)),
        replace(EXACT, reduce_every="step"),
    ],
    ids=["0", "1", "2", "mics", "hpz", "persistent", "local"],
)  # fmt: skip
def test_every_placement_follows_one_process(policy: Policy) -> None:
    """Stages, groups, hpZ and the persistent unit change where states are, and no weight beyond rounding."""
    weights = on_threads(Topology(2, 2), trained, policy, 2, MUON)[0]
    assert farthest(weights, in_one_process(model(), 4, 2)) <= ROUNDING


def test_accumulated_micro_batches_are_orthogonalised_once() -> None:
    """One step over four micro-batches is the step over all of them at once; one by one it is not (the control)."""

    def step(mesh: Mesh, each: bool) -> dict[str, Tensor]:
        run = MuonTraining(mesh, EXACT, 4, MUON | ({"lr": RATE / 4} if each else {}))
        for micro in range(4):
            run.backward(micro)
            if each:
                run.optimizer.step()
                run.optimizer.zero_grad()
        if not each:
            run.optimizer.step()
        return run.zero.full_state_dict()

    net = copy.deepcopy(model())
    optimizer = InOneProcess(net)
    for micro in range(4):
        for rank in range(4):
            (net(batch(micro, rank)) / 16).backward()
    optimizer.step()
    together, one_by_one = (on_threads(Topology(2, 2), step, each)[0] for each in (False, True))
    assert farthest(together, net.state_dict(), hidden=True) <= ROUNDING
    assert farthest(one_by_one, net.state_dict(), hidden=True) > 3 * ROUNDING


@pytest.mark.parametrize(
    "policy",
    [
        EXACT, replace(EXACT, owned=(parse("int8:256"), parse("int4:32"))), preset("zeropp", memory=ROOMY),
        replace(EXACT, group="node"), replace(EXACT, stage=1), replace(EXACT, stage=0),
    ],
    ids=["exact", "int8+int4", "zeropp", "mics", "1", "0"],
)  # fmt: skip
@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(3, 2), Topology(1, 3)], ids=str)
@each_rank()
def test_ledger_and_memory_are_as_predicted(mesh: Mesh, topology: Topology, policy: Policy) -> None:
    """What each rank sends and holds equals the prediction to the byte, momentum and updates included."""
    run = MuonTraining(mesh, policy)
    for step in range(2):
        run.step(step)
    units = [unit.geometry for unit in run.zero.units]
    buffers = run.zero.buffers.nbytes
    owners = run.optimizer.owners
    book = predict(
        policy, topology, units, mesh.rank, passes(policy) * 2, buffer_bytes=buffers, owners=owners
    )
    assert run.zero.wire.ledger.rows() == book.sent
    expected = with_muon(memory(policy, topology, units), units, owners, mesh.rank)
    state = sum(
        value.nbytes
        for values in run.optimizer.state.values()
        for value in values.values()
        if value.dim() > 0
    )
    assert run.zero.memory()["owned"] == expected["owned"]
    assert state == expected["optimizer"]


@pytest.mark.parametrize("text", ["int8:256", "int4:64"])
def test_coarse_exchanges_train_near_the_exact_ones(text: str) -> None:
    """Quantised momentum and updates move weights by less than the step itself, and by more than rounding."""
    codec = parse(text)
    weights = on_threads(Topology(2, 2), trained, replace(EXACT, owned=(codec, codec)), 1, MUON)[0]
    distance = farthest(weights, in_one_process(model(), 4), hidden=True)
    assert 0 < distance < STEPS * RATE


@each_rank(2, 2)
def test_ranks_with_another_assignment_are_found(mesh: Mesh) -> None:
    """A rank that assigns two equal matrices the other way round opens another exchange, which is an error."""
    run = MuonTraining(mesh, EXACT)
    run.backward(0)
    if mesh.rank == 1:
        matrices = run.optimizer.owners.matrices
        turned = [
            replace(matrix, owner=other.owner) for matrix, other in zip(matrices, matrices[::-1], strict=True)
        ]
        run.optimizer.owners = replace(run.optimizer.owners, matrices=tuple(turned))
    with pytest.raises(WireError, match=r"optimizer\.step\(\)"):
        run.optimizer.step()


def _saved(mesh: Mesh, folder: Path, policy: Policy) -> None:
    run = MuonTraining(mesh, policy)
    run.step(0)
    save(folder, run.zero, run.optimizers)


def _state(run: MuonTraining) -> dict[str, Tensor]:
    """The momentum of all matrices, whole, and AdamW's first moment of a vector."""
    names = [matrix.slot.spec.name for matrix in run.optimizer.owners.matrices]
    keys = {**dict.fromkeys(names, "momentum_buffer"), "blocks.0.up.bias": "exp_avg"}
    found = {name: OptimizerState(run.zero, name, run.optimizer, key).full() for name, key in keys.items()}
    return {name: value for name, value in found.items() if value is not None}


def _loaded(mesh: Mesh, folder: Path, policy: Policy) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    run = MuonTraining(mesh, policy)
    load(folder, run.zero, run.optimizers)
    before = _state(run)
    run.step(1)
    return before, run.zero.full_state_dict()


def test_a_checkpoint_holds_the_momentum(tmp_path: Path) -> None:
    """Other topologies, stages and groups load the momentum bit for bit, and train on within rounding."""
    on_threads(Topology(2, 2), _saved, tmp_path, EXACT)
    first, weights = on_threads(Topology(2, 2), _loaded, tmp_path, EXACT)[0]
    assert len(first) == 7
    assert all(bool(value.any()) for value in first.values())
    for topology, policy in (
        (Topology(1, 1), EXACT),
        (Topology(1, 3), replace(EXACT, stage=1)),
        (Topology(2, 2), replace(EXACT, group="node")),
    ):
        other, _ = on_threads(topology, _loaded, tmp_path, policy)[0]
        assert all(torch.equal(first[name], other[name]) for name in first)
    straight = on_threads(Topology(2, 2), _straight)[0]
    assert all(torch.equal(weights[name], straight[name]) for name in weights)


def _straight(mesh: Mesh) -> dict[str, Tensor]:
    run = MuonTraining(mesh, EXACT)
    run.step(0)
    run.step(1)
    return run.zero.full_state_dict()


@each_rank(1, 2)
def test_a_skipped_step_changes_nothing(mesh: Mesh) -> None:
    """After an overflow nobody exchanges momentum, and the next step is taken."""
    policy = replace(EXACT, compute="fp16", loss_scale=LossScale(initial=2.0**30))
    run = MuonTraining(mesh, policy)
    before = run.zero.full_state_dict()
    run.step(0)
    assert run.zero.scaler.skipped == 1
    assert farthest(before, run.zero.full_state_dict()) == 0
    assert not any(key.purpose == "momentum" for key in run.zero.wire.ledger.rows())


@each_rank(1, 2)
def test_a_unit_without_gradients_keeps_its_weights(mesh: Mesh) -> None:
    """Masters whose gradients were dropped stay as they are, and the other matrices are stepped."""
    run = MuonTraining(mesh, EXACT)
    run.backward(0)
    before = run.zero.full_state_dict()
    (frozen,) = (unit for unit in run.zero.units if unit.geometry.name == "blocks.1")
    for _, master in frozen.master_shard.masters:
        master.grad = None
    run.optimizer.step()
    after = run.zero.full_state_dict()
    assert torch.equal(before["blocks.1.up.weight"], after["blocks.1.up.weight"])
    assert not torch.equal(before["blocks.0.up.weight"], after["blocks.0.up.weight"])


def made(mesh: Mesh, policy: Policy = EXACT, group_of: Any = None, **options: Any) -> Muon:
    net = model()
    zero = shard(net, mesh=mesh, policy=policy, group_of=group_of or hidden_matrices(net))
    return Muon(zero, **options)


@each_rank(1, 2)
def test_what_muon_cannot_step_is_refused(mesh: Mesh) -> None:
    """Vectors, models without a group of matrices, offloaded masters and unknown objects are refused in one line."""
    for options, message in (
        ({"group_of": lambda *_: 1}, r"has shape \(\d+,\), and only a matrix.*: leave the parameter to"),
        ({"group_of": lambda *_: 0}, r"no trained parameter is in optimizer group 1: call shard"),
        ({"policy": replace(EXACT, offload=Offload(optimizer=1.0))}, r"set offload\.optimizer=0"),
    ):
        with pytest.raises(ZeroError, match=message) as caught:
            made(mesh, **options)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    with pytest.raises(ZeroError, match="expected the engine"):
        Muon(model())
    with pytest.raises(ValueError, match="momentum should be >= 0"):
        made(mesh, momentum=-1.0)
    with pytest.raises(
        ZeroError, match=r"^Muon\(\.\.\.\): 'betas' is no argument of Muon: use one of lr, .* or remove it$"
    ):
        made(mesh, betas=(0.9, 0.99))
    with pytest.raises(
        ZeroError, match=r"^Muon\(adamw=\.\.\.\): 'momentum' is no argument of AdamW: use one of lr, betas"
    ):
        made(mesh, adamw={"momentum": 0.9})
    with pytest.raises(ZeroError, match=r"^Muon\(adamw=0\.1\): expected a table of AdamW's arguments"):
        made(mesh, adamw=0.1)


@pytest.mark.parametrize("tied", [False, True])
def test_hidden_matrices_are_those_of_blocks(tied: bool) -> None:
    """Vectors, embeddings, the output head and whatever is tied to them are left to AdamW."""
    net = nn.ModuleDict({
        "net": Net(depth=1, tied=tied), "inner": nn.ModuleList([nn.Embedding(4, 4), nn.Linear(4, 4)]),
    })  # fmt: skip
    if tied:
        net["inner"][1].weight = net["inner"][0].weight  # type: ignore[index]
    chosen = hidden_matrices(net)
    found = {name for name, parameter in net.named_parameters() if chosen(name, parameter)}
    hidden = {"net.blocks.0.up.weight", "net.blocks.0.down.weight"}
    assert found == hidden | (set() if tied else {"inner.1.weight"})


@each_rank(2, 2, processes=True)
def test_processes_exchange_momentum_over_gloo_and_shared_memory(mesh: Mesh) -> None:
    """Weights are equal bit by bit whichever transport carries the messages."""
    found: list[dict[str, Tensor]] = []
    for transport in ("backend", "shm"):
        wire = Wire(mesh, transport=transport)  # type: ignore[arg-type]
        net = model()
        zero = shard(net, mesh=mesh, policy=EXACT, wire=wire, group_of=hidden_matrices(net))
        optimizer = Muon(zero, adamw=ADAMW, **MUON)
        for step in range(STEPS):
            net(batch(step, mesh.rank)).backward()
            zero.step(optimizer, max_norm=1.0)
            optimizer.zero_grad()
        found.append(zero.full_state_dict())
        carried, rows = wire.carried, wire.ledger.rows()
        assert carried >= sum(sent.bytes for sent in rows.values())
    assert farthest(*found) == 0


class _InGroup(InOneProcess):
    """The optimizer of one group's copy of the model, made from its parameters in the model's order."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        names, chosen = [name for name, _ in model().named_parameters()], hidden_matrices(model())
        groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for name, parameter in zip(names, parameters, strict=True):
            groups[chosen(name, parameter)].append(parameter)
        self.optimizers = [torch.optim.AdamW(groups[0], **ADAMW), torch.optim.Muon(groups[1], **MUON)]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize(("topology", "group"), [(Topology(2, 2), "node"), (Topology(4, 1), 2)], ids=str)
@pytest.mark.parametrize("fragments", [1, 2])
def test_groups_with_local_steps_have_owners_of_their_own(
    topology: Topology, group: Any, fragments: int
) -> None:
    """Each group's matrices have owners inside the group, and groups train and meet as DiLoCo in one process."""
    policy = replace(EXACT, group=group, local_steps=2, local_fragments=fragments)
    _, wanted = diloco(model(), policy, topology, STEPS, optimize=_InGroup)  # type: ignore[arg-type]
    size = policy.group_ranks(topology)
    for rank, weights in enumerate(on_threads(topology, trained, policy, 1, MUON)):
        assert farthest(weights, wanted[rank // size]) <= ROUNDING
        assert (rank < size) == (farthest(weights, wanted[0]) <= ROUNDING)
