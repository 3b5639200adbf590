"""Checkpoints: a run goes on bit for bit; other layouts lose nothing; what cannot be is refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import random
import re
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from impl import checkpoint, checkpoint_files, disk
from impl.agreement import MESSAGE_BYTES
from impl.checkpoint import CheckpointError, Loaded, latest, load, save
from impl.checkpoint_files import MANIFEST, WEIGHT, Parts, checkpoints, read_manifest
from impl.codec import parse
from impl.mesh import Mesh
from impl.plain_values import NUMBER
from impl.policy import PRESETS, Feedback, LossScale, Offload, Policy, preset
from impl.tensor_bytes import tensor_of
from impl.topology import Topology
from impl.wire import Wire
from impl.zero import Zero, ZeroError, shard
from tests.models import Net, Odd
from tests.ranks import on_processes, on_threads
from tests.strategies import ROOMY, policies, topologies
from tests.training import batch, model

# Made once: thread ranks share torch's generator, and would draw each other's values.
NET, ODD = model(), model(Odd)
EXACT = preset("exact", memory=ROOMY)
INT4 = parse("int4:8")
NOISY = parse("int4:8:stochastic")


class Run:
    """A sharded model in training on one rank."""

    def __init__(
        self,
        mesh: Mesh,
        policy: Policy,
        net: nn.Module,
        *,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        width: int = 16,
        **options: Any,
    ) -> None:
        self.net = copy.deepcopy(net)
        self.rank, self.policy, self.width = mesh.rank, policy, width
        self.zero = shard(self.net, mesh=mesh, policy=policy, group_of=_group_of, **options)
        groups = self.zero.param_groups({1: {"weight_decay": 0.0}})
        self.optimizers = [optimizer(groups, lr=1e-2)]

    def step(self, number: int, accumulation: int = 1) -> float:
        """One optimizer step on this rank's batches; its loss."""
        total = 0.0
        for micro in range(accumulation):
            local = micro < accumulation - 1 and not self.policy.reduces_each_micro_batch
            with self.zero.accumulating() if local else contextlib.nullcontext():
                loss = self.net(batch(accumulation * number + micro, self.rank, self.width))
                self.zero.scaler.scaled(loss).backward()
                self.zero.finish_backward()
            total += loss.item()
        self.zero.step(*self.optimizers)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return total

    def state(self) -> dict[str, Tensor]:
        """Weights, and this rank's codecs' state."""
        return {**self.zero.full_state_dict(), **self.zero.communication_state()}


def _group_of(name: str, parameter: nn.Parameter) -> int:
    return int(parameter.dim() < 2)


def contents(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that a checkpoint holds by name: whole tensors of weights and states, and numbers."""
    manifest = read_manifest(path)
    tensors, numbers = {}, {}
    with Parts(path, manifest) as parts:
        for name, parameter in manifest.parameters.items():
            numel = torch.Size(parameter.shape).numel()
            kinds = [WEIGHT]
            for number, optimizer in enumerate(manifest.optimizers):
                if name in optimizer.state:
                    kinds += [f"optimizer{number}.{key}" for key in optimizer.state[name].elements]
                    numbers[f"{number}/{name}"] = optimizer.state[name].numbers
            for kind in kinds:
                runs = [tensor_of(entry, data) for _, entry, data in parts.read(kind, name, 0, numel)]
                tensors[f"{kind}/{name}"] = torch.cat(runs) if runs else torch.empty(0)
        for value in manifest.state:
            if value.kind == "buffer":
                entry = parts.file(0).entry(f"buffer/{value.name}")
                tensors[value.name] = tensor_of(entry, parts.file(0).read(f"buffer/{value.name}"))
        numbers["options"] = [[group.options for group in one.groups] for one in manifest.optimizers]
    return tensors, numbers


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two dicts hold the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Going on


def _resumed(  # noqa: PLR0917  # thread ranks pass by position
    mesh: Mesh, folder: Path, policy: Policy, accumulation: int, net: nn.Module, into: Policy | None = None
) -> bool:
    """Whether a run that is loaded after two steps, ``into`` another policy, ends as the one that went on."""
    run = Run(mesh, policy, net)
    for number in range(2):
        run.step(number, accumulation)
    save(folder, run.zero, run.optimizers, extra={"next": 2})
    done = run.zero.clock.step
    losses = [run.step(number, accumulation) for number in range(2, 5)]

    again = Run(mesh, into or policy, net)
    with torch.no_grad():
        for unit in again.zero.units:
            unit.owned.master.add_(1.0)  # nothing of the new model's own may be left
    loaded = load(folder, again.zero, again.optimizers)
    assert loaded == Loaded({"next": 2}, done, ())
    same_losses = losses == [again.step(number, accumulation) for number in range(loaded.extra["next"], 5)]
    if policy.loss_scale is not None:
        assert 0 < run.zero.scaler.skipped < 5
    scales = again.zero.scaler.state_dict() == run.zero.scaler.state_dict()
    return same_losses and scales and same(again.state(), run.state())


POLICIES = {
    **{name: replace(policy, memory=ROOMY) for name, policy in PRESETS.items()},
    "stochastic": Policy(weights=NOISY, gradients=(NOISY, NOISY), secondary="node", memory=ROOMY),
    "feedback": Policy(
        gradients=(INT4, NOISY), feedback=Feedback(decay=0.5, reset=3, hops="all"), memory=ROOMY
    ),
    # The scale falls and rises, and steps are skipped, before and after the save.
    "fp16": Policy(compute="fp16", loss_scale=LossScale(initial=2.0**18, window=1), memory=ROOMY),
    "persistent": replace(PRESETS["zeropp"], memory=replace(ROOMY, persist_below=30)),
    "offload": replace(PRESETS["zeropp"], memory=ROOMY, offload=Offload(optimizer=0.5, weights=0.5)),
    "mics+feedback": Policy(group=2, gradients=(INT4, INT4), feedback=Feedback(), memory=ROOMY),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, name: str) -> None:
    """Under every preset, loss scale, feedback and noise: losses and weights are equal bit for bit."""
    assert all(on_threads(Topology(2, 2), _resumed, tmp_path, POLICIES[name], 1, model(tied=True)))


@pytest.mark.parametrize("shares", [(0, 1), (1, 0), (0.5, 1)], ids=str)
def test_a_run_may_be_offloaded_from_here_on(tmp_path: Path, shares: tuple[float, float]) -> None:
    """A run goes on bit for bit with another share of its optimizer and weights on the host."""
    before, after = (
        replace(PRESETS["zeropp"], memory=ROOMY, offload=Offload(optimizer=share, weights=share))
        for share in shares
    )
    assert all(on_threads(Topology(2, 2), _resumed, tmp_path, before, 1, model(), after))


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(1, 3)], ids=str)
@pytest.mark.parametrize("group", [0, 1])
def test_frozen_weights_keep_their_codes(tmp_path: Path, topology: Topology, group: int) -> None:
    """Weights held as codes come back as these codes, which encoding them again might not give."""
    policy = Policy(group=group, frozen=parse("int4:8:asym"), memory=ROOMY)
    assert all(on_threads(topology, _resumed_odd, tmp_path, policy, ODD))


def _resumed_odd(mesh: Mesh, folder: Path, policy: Policy, net: nn.Module) -> bool:
    run = Run(mesh, policy, net, width=7)
    run.step(0)
    save(folder, run.zero, run.optimizers)
    held = [unit.owned.held.clone() for unit in run.zero.units]
    loss = run.step(1)
    again = Run(mesh, policy, net, width=7)
    assert load(folder, again.zero, again.optimizers).dropped == ()
    codes = [
        torch.equal(unit.owned.held, before) for unit, before in zip(again.zero.units, held, strict=True)
    ]
    return all(codes) and again.step(1) == loss and same(again.state(), run.state())


def _frozen_resumed(mesh: Mesh, folder: Path, policy: Policy) -> bool:
    net = copy.deepcopy(NET)
    net.blocks[1].requires_grad_(requires_grad=False)
    return _resumed(mesh, folder, policy, 1, net)


@pytest.mark.parametrize(
    "policy",
    [
        replace(PRESETS["zeropp"], weights=NOISY, memory=ROOMY),
        replace(PRESETS["zero2"], weights=NOISY, memory=ROOMY),
        replace(PRESETS["zeropp"], weights=NOISY, memory=ROOMY, offload=Offload(optimizer=1, weights=1)),
    ],
    ids=["hpz", "stage2", "offload"],
)
def test_frozen_weights_keep_their_noise(tmp_path: Path, policy: Policy) -> None:
    """What was gathered of them by a stochastic codec at the first step is gathered again by a later one."""
    assert all(on_threads(Topology(2, 2), _frozen_resumed, tmp_path, policy))


@pytest.mark.parametrize("name", ["zero1", "feedback"])
def test_resuming_at_a_boundary_of_accumulation(tmp_path: Path, name: str) -> None:
    """With micro-batches added up locally, or in shards, a run that is saved between steps goes on alike."""
    assert all(on_threads(Topology(1, 2), _resumed, tmp_path, POLICIES[name], 3, NET))


class Dropping(nn.Module):
    """Draws random numbers, and counts its passes in a buffer and in extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.norm = nn.BatchNorm1d(16)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 16) to a loss."""
        self.passes += 1
        for block in self.blocks:
            x = torch.dropout(block(x), 0.5, self.training)
        return self.norm(x).tanh().square().mean()

    def get_extra_state(self) -> dict[str, Any]:
        """What no tensor holds."""
        return {"passes": self.passes, "of": (1, 2)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take it over."""
        self.passes = state["passes"]


def _processes(mesh: Mesh, folder: str) -> tuple[bool, int, list[bool]]:
    run = Run(mesh, replace(PRESETS["zeropp"], memory=ROOMY), model(Dropping))
    torch.manual_seed(mesh.rank)
    random.seed(mesh.rank)
    run.step(0)
    saving = save(folder, run.zero, run.optimizers, asynchronous=True)
    drawn = [torch.rand(1).item(), random.random(), np.random.random()]  # noqa: NPY002
    losses = [run.step(1), run.step(2)]
    saving.wait()
    again = Run(mesh, replace(PRESETS["zeropp"], memory=ROOMY), model(Dropping))
    load(folder, again.zero, again.optimizers)
    redrawn = [torch.rand(1).item(), random.random(), np.random.random()]  # noqa: NPY002
    passes = again.net.passes
    equal = losses == [again.step(1), again.step(2)] and same(
        _tensors(again.zero.full_state_dict()), _tensors(run.zero.full_state_dict())
    )
    return equal, passes, [one == other for one, other in zip(drawn, redrawn, strict=True)]


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def test_random_numbers_buffers_and_extra_state_go_on_in_processes(tmp_path: Path) -> None:
    """Over gloo: dropout, Python's and NumPy's numbers, running means, extra states are as before."""
    for result in on_processes(Topology(2, 1), _processes, str(tmp_path)):
        assert result == (True, 1, [True, True, True])


# Another layout


def _written(mesh: Mesh, folder: Path, policy: Policy, net: nn.Module, width: int) -> None:
    run = Run(mesh, policy, net, width=width)
    run.step(0)
    run.step(1)
    save(folder, run.zero, run.optimizers)


def _passed_on(mesh: Mesh, folder: Path, policy: Policy, net: nn.Module, blocks: bool) -> tuple[str, ...]:
    options = {} if blocks else {"blocks": []}
    run = Run(mesh, policy, net, **options)
    dropped = load(folder, run.zero, run.optimizers).dropped
    save(folder, run.zero, run.optimizers)
    run.step(2)  # and it trains on
    return dropped


def test_resharding_loses_nothing(tmp_path: Path) -> None:
    """2x2 -> 1x4 -> 3x2 -> 1, by ZeRO++, one unit of stage 1, MiCS: all equal by name."""
    on_threads(Topology(2, 2), _written, tmp_path, POLICIES["zero3"], model(tied=True), 16)
    hops = [
        (Topology(1, 4), POLICIES["zeropp"], True),
        (Topology(3, 2), POLICIES["zero1"], False),
        (Topology(2, 2), POLICIES["mics"], True),
        (Topology(1, 1), POLICIES["zero3"], True),
    ]
    for topology, policy, blocks in hops:
        on_threads(topology, _passed_on, tmp_path, policy, model(tied=True), blocks)
    first, *others = [contents(path) for path in checkpoints(tmp_path)]
    assert len(others) == len(hops)
    for tensors, numbers in others:
        assert same(tensors, first[0])
        assert numbers == first[1]


@st.composite
def two_layouts(draw: st.DrawFn) -> list[tuple[Topology, Policy]]:
    """Two topologies with a policy of each; frozen weights in fp32, since codes are not kept."""
    pairs = []
    for _ in range(2):
        topology = draw(topologies(6))
        pairs.append((topology, replace(draw(policies(topology)), frozen=None)))
    return pairs


def _odd_passed_on(mesh: Mesh, folder: Path, policy: Policy) -> None:
    run = Run(mesh, policy, ODD, width=7)
    load(folder, run.zero, run.optimizers)
    save(folder, run.zero, run.optimizers)


@given(two_layouts())
@settings(max_examples=15)
def test_any_layout_hands_on_to_any_other(
    tmp_path_factory: pytest.TempPathFactory, layouts: list[tuple[Topology, Policy]]
) -> None:
    """Whatever the worlds, stages, groups, blocks and codecs: what is loaded and saved again is the same."""
    folder = tmp_path_factory.mktemp("any")
    (first, policy), (second, other) = layouts
    on_threads(first, _written, folder, policy, ODD, 7)
    on_threads(second, _odd_passed_on, folder, other)
    (tensors, numbers), (again, numbers_again) = [contents(path) for path in checkpoints(folder)]
    assert same(again, tensors)
    assert numbers_again == numbers
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
        torch.optim.Adagrad,
        torch.optim.NAdam,
        lambda groups, lr: torch.optim.AdamW(groups, lr=torch.tensor(lr), amsgrad=True, betas=(0.8, 0.9)),
    ],
    ids=["sgd", "momentum", "adagrad", "nadam", "tensor_lr"],
)
def test_every_elementwise_optimizer_is_saved(tmp_path: Path, optimizer: Any) -> None:
    """States by element, numbers, tensors among options: another world goes on with the same state."""
    on_threads(Topology(2, 1), _optimizer, tmp_path, optimizer, False)
    on_threads(Topology(1, 3), _optimizer, tmp_path, optimizer, True)
    (tensors, numbers), (again, numbers_again) = [contents(path) for path in checkpoints(tmp_path)]
    assert same(again, tensors)
    assert numbers_again == numbers


def _optimizer(mesh: Mesh, folder: Path, optimizer: Any, loads: bool) -> None:
    run = Run(mesh, EXACT, NET, optimizer=optimizer)
    if loads:
        load(folder, run.zero, run.optimizers)
    else:
        run.step(0)
    save(folder, run.zero, run.optimizers)
    run.step(1)


class Mixed(torch.optim.Optimizer):
    """Momentum in 16 bits, a count of 64 and a sum in 64, for each element; a number of 64."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            for master in group["params"]:
                if master.grad is None:
                    continue
                state = self.state[master]
                if not state:
                    state["mean"] = torch.zeros_like(master, dtype=torch.bfloat16)
                    state["count"] = torch.zeros_like(master, dtype=torch.int64)
                    state["sum"] = torch.zeros_like(master, dtype=torch.float64)
                    state["seen"] = torch.tensor(1 << 40)
                state["mean"].mul_(0.9).add_(master.grad.bfloat16())
                state["count"] += (master.grad != 0).long() << 40  # padding has no gradient, and no state
                state["sum"] += master.grad.double() / 3
                state["seen"] += 1
                master.add_(state["mean"].float(), alpha=-group["lr"])


def _mixed(mesh: Mesh, folder: Path) -> bool:
    run = Run(mesh, EXACT, NET, optimizer=Mixed)
    run.step(0)
    save(folder, run.zero, run.optimizers)
    again = Run(mesh, EXACT, NET, optimizer=Mixed)
    load(folder, again.zero, again.optimizers)
    states = [[*one.optimizers[0].state_dict()["state"].values()] for one in (run, again)]
    equal = [
        one[key].dtype == other[key].dtype and torch.equal(one[key], other[key])
        for one, other in zip(*states, strict=True)
        for key in one
    ]
    losses = [[one.step(1), one.step(2)] for one in (run, again)]  # all ranks step, whatever they found
    return all(equal) and losses[0] == losses[1]


def test_state_keeps_its_types(tmp_path: Path) -> None:
    """State of an optimizer that is not fp32 is not made so: bits come back, and the run goes on alike."""
    assert all(on_threads(Topology(1, 3), _mixed, tmp_path))


def _split(zero: Zero, at: int, lr: float = 1e-2) -> torch.optim.Optimizer:
    """AdamW with the engine's first group in two dicts, as where some of its masters lie on the host."""
    first, *rest = zero.param_groups({1: {"weight_decay": 0.0}})
    masters = first["params"]
    halves = [{"params": masters[:at], "lr": lr}, {"params": masters[at:]}]
    return torch.optim.AdamW([*halves, *rest], lr=1e-2)


def _other_split(mesh: Mesh, folder: Path, at: int) -> str:
    run = Run(mesh, EXACT, NET)
    run.optimizers = [_split(run.zero, 1)]
    run.step(0)
    save(folder, run.zero, run.optimizers)
    loss = run.step(1)
    again = Run(mesh, EXACT, NET)
    again.optimizers = [_split(again.zero, at)] if at else again.optimizers
    load(folder, again.zero, again.optimizers)
    assert again.step(1) == loss
    assert same(again.state(), run.state())
    save(folder, again.zero, [_split(again.zero, 2, lr=0.5)])
    with pytest.raises(CheckpointError) as told:
        load(folder, again.zero, again.optimizers)
    return str(told.value)


@pytest.mark.parametrize("at", [0, 3])
def test_a_group_may_lie_on_two_devices(tmp_path: Path, at: int) -> None:
    """Whether, and where, an engine's group is two of the optimizer's makes no difference to a checkpoint;
    unless they have different options, which one group cannot take over.
    """
    (told,) = set(on_threads(Topology(1, 2), _other_split, tmp_path, at))
    assert "share options here, but not in it" in told


def test_groups_that_hold_copies_save_once(tmp_path: Path) -> None:
    """MiCS: every element is in one file alone, and all ranks write a part."""
    on_threads(Topology(2, 2), _written, tmp_path, POLICIES["mics"], NET, 16)
    manifest = read_manifest(tmp_path / "checkpoint-000001")
    elements = 0
    with Parts(tmp_path / "checkpoint-000001", manifest) as parts:
        for number in range(4):
            weights = [e.numel for key, e in parts.file(number).entries.items() if key.startswith("weight/")]
            assert weights
            elements += sum(weights)
    assert elements == manifest.numel


def test_what_is_left_is_said(tmp_path: Path) -> None:
    """On another topology carried errors, random states and another loss scale are dropped, a line each."""
    policy = replace(POLICIES["feedback"], loss_scale=LossScale(initial=8.0))
    on_threads(Topology(2, 2), _written, tmp_path, policy, NET, 16)
    other = replace(policy, loss_scale=None)
    (dropped,) = set(on_threads(Topology(1, 2), _passed_on, tmp_path, other, NET, True))
    assert dropped == (
        "loss scale of dynamic:from8: here none",
        "errors that gradient codecs carried: it was saved with topology 2x2, here 1x2",
        "random states of 4 ranks: here 2",
    )


def _least(mesh: Mesh, folder: Path) -> tuple[str, ...]:
    for least in (1.0, 4.0):
        policy = replace(EXACT, compute="fp16", loss_scale=LossScale(initial=8.0, least=least))
        zero = shard(copy.deepcopy(NET), mesh=mesh, policy=policy)
        dropped = load(folder, zero).dropped if least > 1 else ()
        save(folder, zero)
    return dropped


def test_another_least_loss_scale_is_another_setting(tmp_path: Path) -> None:
    """The scale's state is not taken over by a run that would let it fall less far."""
    told = on_threads(Topology(1, 1), _least, tmp_path)
    assert told == [("loss scale of dynamic:from8: here dynamic:from8:least4",)]


class Hollow(nn.Module):
    """Parameters without elements: alone in a block, and beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.Linear(0, 0, bias=False), nn.Linear(16, 16)])

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 16) to a loss."""
        return self.blocks[2](self.blocks[0](x)).square().mean()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_parameters_without_elements_go_between_layouts(tmp_path: Path) -> None:
    """They are parameters whether or not a unit holds them: one unit hands on to one per block, and back."""
    net = model(Hollow)
    on_threads(Topology(1, 2), _written, tmp_path, EXACT, net, 16)
    for blocks in (False, True):
        assert on_threads(Topology(1, 1), _passed_on, tmp_path, EXACT, net, blocks)
    for path in checkpoints(tmp_path):
        assert {one.kind for one in read_manifest(path).state} == {"parameter"}


# Refusals


def _refused(mesh: Mesh, folder: Path, net: nn.Module, optimizer: Any, count: int) -> str:
    run = Run(mesh, EXACT, net, optimizer=optimizer)
    before = run.zero.full_state_dict()
    try:
        load(folder, run.zero, run.optimizers * count)
    except CheckpointError as error:
        assert same(run.zero.full_state_dict(), before)  # and no rank is out of step
        return str(error)
    return "accepted"


def _spoil(path: Path, how: str) -> None:
    """Make a checkpoint wrong in one way."""
    manifest, file = path / MANIFEST, path / "rank-00002.safetensors"
    held = json.loads(manifest.read_text())
    data = bytearray(file.read_bytes())
    match how:
        case "missing":
            file.unlink()
        case "short":
            file.write_bytes(data[:-1])
        case "flipped":
            data[-1] ^= 1
            file.write_bytes(data)
        case "gone":
            manifest.unlink()
        case "cut":
            manifest.write_text(manifest.read_text()[:-9])
        case "foreign":
            manifest.write_text('{"format": "pt"}')
        case "newer":
            manifest.write_text(json.dumps({**held, "version": 2}))
        case "altered":
            manifest.write_text(json.dumps({**held, "step": 7}))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", r"rank-00002.safetensors: No such file"),
        ("short", r"rank-00002.safetensors: \d+ bytes, the manifest says \d+"),
        ("flipped", "rank-00002.safetensors: altered since it was written"),
        ("gone", "not a checkpoint: manifest.json: No such file"),
        ("cut", "manifest.json: cut short, or not JSON"),
        ("foreign", "not a manifest of a zeropp checkpoint"),
        ("newer", "version 2 of the format; this program reads version 1"),
        ("altered", "manifest.json: altered since it was written"),
    ],
)
def test_broken_checkpoints_are_refused_by_all_ranks(tmp_path: Path, how: str, words: str) -> None:
    """Missing, truncated, altered, foreign, newer: one line on every rank, and nothing has changed."""
    on_threads(Topology(2, 2), _written, tmp_path, EXACT, NET, 16)
    path = latest(tmp_path)
    assert path is not None
    _spoil(path, how)
    told = on_threads(Topology(1, 4), _refused, path, NET, torch.optim.AdamW, 1)
    assert len(set(told)) == 1
    assert "\n" not in told[0]
    with pytest.raises(CheckpointError, match=words):
        raise CheckpointError(told[0])


class Fewer(Net):
    """A buffer of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor([0.5])


@pytest.mark.parametrize(
    ("net", "optimizer", "count", "words"),
    [
        (
            model(hidden=24),
            torch.optim.AdamW,
            1,
            r"parameter 'blocks.0.up.weight' is \(40, 16\) in it, \(24, 16\)",
        ),
        (
            model(depth=2),
            torch.optim.AdamW,
            1,
            "5 parameters differ, first 'blocks.2.down.weight', not in the model",
        ),
        (model(Fewer), torch.optim.AdamW, 1, r"buffer 'scale' is F32 \(\) in it, F32 \(1,\) in the model"),
        (NET, torch.optim.Adagrad, 1, "optimizer 0 is Adagrad, it holds the state of AdamW"),
        (NET, torch.optim.AdamW, 2, "optimizer 1 holds a master that is held twice"),
    ],
    ids=["shape", "names", "buffer", "kind", "twice"],
)
def test_checkpoints_of_others_are_refused(
    tmp_path: Path, net: nn.Module, optimizer: Any, count: int, words: str
) -> None:
    """Other shapes, names, buffers or optimizers: one line that names the first."""
    on_threads(Topology(1, 2), _written, tmp_path, EXACT, NET, 16)
    (told,) = set(on_threads(Topology(1, 2), _refused, tmp_path, net, optimizer, count))
    with pytest.raises(CheckpointError, match=words):
        raise CheckpointError(told)


def test_numbers_that_no_optimizer_has_are_refused_before_anything_changes(tmp_path: Path) -> None:
    """A type that there is not, in a manifest with a right digest."""
    on_threads(Topology(1, 2), _written, tmp_path, EXACT, NET, 16)
    file = tmp_path / "checkpoint-000001" / MANIFEST
    held = json.loads(re.sub(rf'("{NUMBER}":\s*\[\s*)"F32"', r'\1"XX"', file.read_text()))
    del held["sha256"]
    file.write_text(json.dumps({**held, "sha256": checkpoint_files._digest(held)}))
    (told,) = set(on_threads(Topology(1, 2), _refused, tmp_path, NET, torch.optim.AdamW, 1))
    assert "is no number of an optimizer" in told


def _bad_save(mesh: Mesh, folder: Path, how: str) -> str:
    run = Run(mesh, EXACT, NET)
    extra: Any = None
    options: dict[str, Any] = {}
    match how:
        case "extra":
            extra = {"tensor": torch.ones(1)} if mesh.rank else None
        case "differ":
            extra = mesh.rank // 2
        case "lr":
            run.optimizers[0].param_groups[0]["lr"] = 0.1 + mesh.rank
        case "gradients":
            run.net(batch(0, mesh.rank)).backward()
            run.zero.finish_backward()
        case "half":
            masters = run.zero.param_groups()[0]["params"]
            run.optimizers = [torch.optim.SGD(masters[:1], lr=0.1), torch.optim.SGD(masters[1:], lr=0.1)]
            run.net(batch(0, mesh.rank)).backward()
            run.zero.finish_backward()
            run.optimizers[0].step()
        case "unfinished":
            run.net(batch(0, mesh.rank)).backward()
        case "foreign":
            run.optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)]
        case "shape":
            master = run.optimizers[0].param_groups[0]["params"][0]
            run.optimizers[0].state[master]["factor"] = torch.ones(3)
        case "keep":
            options = {"keep": 0}
        case "folder":
            folder.joinpath("file").touch()
            folder = folder / "file"
    try:
        save(folder, run.zero, run.optimizers, extra=extra, **options)
    except CheckpointError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("extra", r"rank 1: extra\['tensor'\]: Tensor cannot be written as JSON"),
        ("differ", "rank 2 would save another extra, or options of optimizers, than rank 0"),
        ("lr", "rank 1 would save another extra, or options of optimizers"),
        ("gradients", "save\\(\\) with gradients that no optimizer has used, of \\d+ masters"),
        ("half", "save\\(\\) with gradients that no optimizer has used, of \\d+ masters"),
        ("unfinished", "call finish_backward\\(\\) first"),
        ("foreign", "optimizer 0 holds what is no master of this engine"),
        ("shape", "state 'factor' has 3 elements for a master of"),
        ("keep", "keep = 0: expected 1 or more"),
        ("folder", "file: Not a directory"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_all_ranks(tmp_path: Path, how: str, words: str) -> None:
    """One line on every rank, wherever the fault is, and no checkpoint."""
    (told,) = set(on_threads(Topology(2, 2), _bad_save, tmp_path, how))
    with pytest.raises(CheckpointError, match=words):
        raise CheckpointError(told)
    assert checkpoints(tmp_path) == []


def _no_optimizer(mesh: Mesh, folder: Path) -> tuple[str, ...]:
    run = Run(mesh, EXACT, NET)
    dropped = load(folder, run.zero).dropped
    save(folder, run.zero)
    with pytest.raises(CheckpointError, match="it holds 0 optimizers, 1 are to be loaded"):
        load(folder, run.zero, run.optimizers)
    with pytest.raises(CheckpointError, match="no such folder"):
        load(folder / "nowhere", run.zero)
    (folder / "empty").mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match="no checkpoint in it"):
        load(folder / "empty", run.zero)
    return dropped


def test_weights_can_be_loaded_without_optimizers(tmp_path: Path) -> None:
    """It is said that the optimizers' state was left; the other way round is refused."""
    on_threads(Topology(1, 2), _written, tmp_path, EXACT, NET, 16)
    (dropped,) = set(on_threads(Topology(1, 2), _no_optimizer, tmp_path))
    assert dropped == ("state of 1 optimizers: not asked for",)


# In the background, and what travels


def _asynchronous(mesh: Mesh, folder: Path) -> bool:
    run = Run(mesh, EXACT, NET)
    run.step(0)
    before = run.state()
    saving = save(folder, run.zero, run.optimizers, asynchronous=True, extra=0)
    run.step(1)  # at once
    assert checkpoints(folder) == []
    path = saving.wait()
    assert path == saving.wait() == latest(folder)
    again = Run(mesh, EXACT, NET)
    load(folder, again.zero, again.optimizers)
    one = same(again.state(), before)
    save(folder, run.zero, run.optimizers, asynchronous=True, extra=1)
    save(folder, run.zero, run.optimizers, asynchronous=True, extra=2)  # waits for the other
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-000001", "checkpoint-000002"]
    return one and load(folder, run.zero, run.optimizers).extra == 2  # so does a load


def test_a_save_in_the_background_holds_the_moment_it_began(tmp_path: Path) -> None:
    """Training goes on at once; the checkpoint is of before, and the next save or load waits for it."""
    assert all(on_threads(Topology(1, 2), _asynchronous, tmp_path))


def _two_engines(mesh: Mesh, folder: Path) -> list[Any]:
    runs = [Run(mesh, EXACT, NET) for _ in range(2)]
    saving = [save(folder, run.zero, extra=number, asynchronous=True) for number, run in enumerate(runs)]
    paths = [one.wait() for one in saving]
    return [load(path, run.zero).extra for path, run in zip(paths, runs, strict=True)]


def test_two_engines_may_save_into_one_folder_at_once(tmp_path: Path) -> None:
    """Each has a checkpoint of its own, whole."""
    assert on_threads(Topology(1, 2), _two_engines, tmp_path) == [[0, 1], [0, 1]]


def _forgotten(mesh: Mesh, folder: Path) -> bool:
    run = Run(mesh, EXACT, NET)
    saving = save(folder, run.zero, asynchronous=True)
    engine = weakref.ref(run.zero)
    del run
    gc.collect()
    gone = engine() is None
    saving.wait()
    return gone


def test_a_save_in_the_background_does_not_hold_the_engine(tmp_path: Path) -> None:
    """It holds copies of values alone, and is completed without the engine."""
    assert on_threads(Topology(1, 1), _forgotten, tmp_path) == [True]


def _never_waited(mesh: Mesh, folder: Path) -> str:
    run = Run(mesh, EXACT, NET)
    saving = save(folder, run.zero, asynchronous=True)
    checkpoint._say_what_is_lost()
    saving.wait()
    checkpoint._say_what_is_lost()
    return saving.path.name


def test_a_save_that_nobody_waits_for_is_said_at_exit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names the checkpoint that will not be; of one that is complete nothing is said."""
    assert on_threads(Topology(1, 1), _never_waited, tmp_path) == ["checkpoint-000001"]
    (line,) = caplog.messages
    assert line.endswith("checkpoint-000001: not complete, and lost: nobody called wait() of its save")


def _full(mesh: Mesh, folder: Path, asynchronous: bool) -> tuple[str, str]:
    run = Run(mesh, EXACT, NET)
    save(folder, run.zero, run.optimizers)
    saving = None
    try:
        saving = save(folder, run.zero, run.optimizers, extra="full", asynchronous=asynchronous)
        save(folder, run.zero, run.optimizers)
    except CheckpointError as error:
        if saving is not None:
            with pytest.raises(CheckpointError, match="No space left"):
                saving.wait()
        save(folder, run.zero, run.optimizers, extra="after")
        return str(error), load(folder, run.zero, run.optimizers).extra
    return "accepted", ""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_of_one_rank_is_an_error_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """In the background too, where wait() or the next save says it; what was complete stays."""
    sync, failed = disk.sync, set()

    def full(file: Any) -> None:
        if "rank-00001" in str(file.name) and "000002" in str(file.name) and not failed:
            failed.add(1)
            raise OSError(28, "No space left on device", str(file.name))
        sync(file)

    monkeypatch.setattr(disk, "sync", full)
    (told,) = set(on_threads(Topology(1, 2), _full, tmp_path, asynchronous))
    assert told[0].startswith("rank 1: ")
    assert told[0].endswith("rank-00001.safetensors: No space left on device")
    assert told[1] == "after"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["checkpoint-000001", "checkpoint-000002"]


def _kept(mesh: Mesh, folder: Path) -> None:
    run = Run(mesh, EXACT, NET)
    for number in range(5):
        save(folder, run.zero, run.optimizers, extra=number, keep=2)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    """keep=2 leaves the last two, under their own numbers, and nothing else."""
    on_threads(Topology(1, 2), _kept, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000004", "checkpoint-000005"]
    assert [read_manifest(path).extra for path in checkpoints(tmp_path)] == [3, 4]


def _sent(mesh: Mesh, folder: Path) -> list[tuple[str, int, int]]:
    zero = shard(copy.deepcopy(NET), mesh=mesh, policy=EXACT, wire=Wire(mesh))
    zero.make_buffers_equal()
    zero.wire.ledger.clear()
    save(folder, zero)
    load(folder, zero)
    return [(key.purpose, *sent) for key, sent in zero.wire.ledger.rows().items()]


def test_ranks_send_each_other_outcomes_alone(tmp_path: Path) -> None:
    """A save and a load are four and three small messages of purpose control to each rank: no values."""
    for rows in on_threads(Topology(1, 3), _sent, tmp_path):
        assert rows == [("control", 7 * 2 * MESSAGE_BYTES, 7 * 2)]


# What is not a checkpoint, and was wrong before


def _extra_state(mesh: Mesh) -> int:
    zero = shard(model(Dropping), mesh=mesh, policy=EXACT)
    state = zero.full_state_dict()
    state["_extra_state"]["passes"] = 5
    zero.load_full_state_dict(state)
    return zero.model.passes


def test_loading_a_full_state_sets_extra_states() -> None:
    """Zero.load_full_state_dict() gives modules the extra state that full_state_dict() took from them."""
    assert on_threads(Topology(1, 2), _extra_state) == [5, 5]


def _copied(mesh: Mesh) -> None:
    zero = shard(copy.deepcopy(NET), mesh=mesh, policy=EXACT)
    for copied in (zero.model, zero.model.blocks[1]):
        with pytest.raises(ZeroError, match=r"deepcopy\(\) of a sharded model"):
            copy.deepcopy(copied)


def test_a_copy_of_a_sharded_model_is_refused() -> None:
    """One clear error, also for one of its blocks."""
    on_threads(Topology(1, 2), _copied)
