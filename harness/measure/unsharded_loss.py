"""An unsharded model's loss, as the sharded one's must be: with the fp32 weights, and with the weights as
all-gathered, encoded and decoded once, all in evaluation mode.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from harness.suites.peers import family_of
from harness.suites.trial import Trial
from harness.workloads.models import under_autocast
from impl.adapters.traffic import GroupGeometry
from impl.codecs import reference
from impl.codecs.codec import Blocked, Codec
from impl.codecs.planes import turn
from impl.codecs.reference import DTYPES
from impl.codecs.rounding_noise import Clock
from impl.plan.policy import Policy
from impl.plan.shard_layout import UnitGeometry
from impl.pytree import cast_tensors
from impl.zero import find_blocks

Batch = tuple[Tensor, Tensor]


def mean_loss(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Mean loss of ``model`` over ``batches`` in evaluation mode; its mode is restored."""
    with evaluating(model), torch.no_grad():
        losses = [float(model(*batch)) for batch in batches]
    return math.fsum(losses) / len(losses)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` is in evaluation mode; each module's mode is restored."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def as_gathered(
    model: nn.Module, policy: Policy, units: Sequence[UnitGeometry], clock: Clock
) -> Iterator[None]:
    """Inside, an unsharded fp32 model has its weights as all-gathered then; they are restored after."""
    with _restored(model) as parameters:
        for unit in units:
            own = policy.of(unit)
            codecs = (own.weights, own.kept) if own.sends_copy else (own.weights,)
            for codec in codecs:
                _pass_unit(codec, unit, parameters, clock, frozen=not unit.trainable)
        yield


def by_columns(model: nn.Module, policy: Policy, units: Sequence[UnitGeometry]) -> dict[str, Tensor]:
    """Values by name with which backward computes where two planes are sent; empty where one is."""
    if policy.planes == 1:
        return {}
    with _restored(model) as parameters:
        for unit in units:
            own, rows = policy.of(unit), 0
            if own.planes > 1 and isinstance(own.weights, Blocked):
                rows = own.weights.block_size(unit.shard)
            _pass_unit(own.weights, unit, parameters, Clock(0), frozen=not unit.trainable, rows=rows)
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}


@contextmanager
def computing_with(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, parameters have these values without autograd's knowing; they are restored after."""
    kept = {name: model.get_parameter(name).detach().clone() for name in values}
    for name, value in values.items():
        model.get_parameter(name).data.copy_(value)
    yield
    for name, value in kept.items():
        model.get_parameter(name).data.copy_(value)


def as_computed(model: nn.Module, policy: Policy) -> nn.Module:
    """``model`` in the policy's compute type: itself in fp32, else a copy, which casts inputs."""
    dtype = DTYPES[policy.compute]
    if dtype == torch.float32:
        return model
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(dtype)

    def cast(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return cast_tensors(args, dtype), cast_tensors(kwargs, dtype)

    for module in (twin, *find_blocks(twin, most=policy.memory.largest_unit)):
        module.register_forward_pre_hook(cast, with_kwargs=True)
    return twin


def as_computed_by(trial: Trial, model: nn.Module, device: torch.device) -> nn.Module:
    """``model`` as a trial's peer computes: itself in fp32, else a copy by autocast or with bf16 weights."""
    if trial.peer.compute == "fp32":
        return model
    if family_of(trial.strategy) not in ("single", "ddp"):
        return as_computed(model, Policy(compute="bf16"))
    twin = copy.deepcopy(model)
    under_autocast(twin, device)
    return twin


@contextmanager
def as_gathered_by_fsdp2(model: nn.Module, codec: Codec, groups: Sequence[GroupGeometry]) -> Iterator[None]:
    """As :func:`as_gathered`, for FSDP2, whose message is a rank's shards of a parameter group."""
    with _restored(model) as parameters:
        for group in groups:
            _pass_group(codec, group, parameters)
        yield


@contextmanager
def _restored(model: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """Yields the parameters by name, to be changed; restores their values afterwards."""
    parameters = dict(model.named_parameters())
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        yield parameters
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(kept[name])


@torch.no_grad()
def _pass_group(codec: Codec, group: GroupGeometry, parameters: dict[str, nn.Parameter]) -> None:
    """Encode and decode every rank's message of a parameter group, with the reference backend."""
    whole = torch.zeros(group.world, group.shard)
    columns = [0, *itertools.accumulate(map(group.part, group.parameters))]
    places = []  # (parameter, its elements in rank order with padding: a view of ``whole``)
    for spec, (start, end) in zip(group.parameters, itertools.pairwise(columns), strict=True):
        rows, part = parameters[spec.name], whole[:, start:end]  # (world, part)
        padded = torch.zeros(part.numel())
        padded[: rows.numel()] = rows.reshape(-1)
        part.copy_(padded.view_as(part))
        places.append((rows, part))
    frames = torch.empty((group.world, codec.frame_bytes(group.shard)), dtype=torch.uint8)
    reference.encode(codec, whole, frames)
    reference.decode(codec, frames, whole)
    for rows, part in places:
        rows.copy_(part.reshape(-1)[: rows.numel()].view(rows.shape))


@torch.no_grad()
def _pass_unit(
    codec: Codec,
    unit: UnitGeometry,
    parameters: dict[str, nn.Parameter],
    clock: Clock,
    *,
    frozen: bool,
    rows: int = 0,
) -> None:
    """Encode and decode every shard of a unit by the reference; bands of so many ``rows`` are turned
    meanwhile.
    """
    slots = [(slot, parameters[slot.spec.name]) for slot in unit.slots]
    whole = torch.zeros(unit.padded, device=slots[0][1].device)
    for slot, parameter in slots:
        whole[slot.offset : slot.end] = parameter.reshape(-1)
    shards = whole.view(unit.shards, unit.shard)
    bands = [unit.bands(index, rows) if rows else () for index in range(unit.shards)]
    for shard, turned in zip(shards, bands, strict=True):
        turn(shard, turned, rows)
    frames = torch.empty((unit.shards, codec.frame_bytes(unit.shard)), dtype=torch.uint8, device=whole.device)
    noise = clock.weights(unit.name, frozen=frozen).noise(0, (unit.shard,)) if codec.stochastic else None
    reference.encode(codec, shards, frames, noise=noise)
    reference.decode(codec, frames, shards)
    for shard, turned in zip(shards, bands, strict=True):
        turn(shard, turned, rows, back=True)
    for slot, parameter in slots:
        parameter.copy_(whole[slot.offset : slot.end].view(parameter.shape))
