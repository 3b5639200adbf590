"""Computes the loss of an unsharded model with the weights with which a sharded engine computes.

The engine's weights have been encoded and decoded by its codecs.  Some context managers of this module give an
unsharded model such weights in place, and restore the former weights afterwards.
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
from harness.workloads.rank_batches import Batch
from impl.adapters.traffic import GroupGeometry
from impl.codecs import reference
from impl.codecs.codec import Blocked, Codec, Raw
from impl.codecs.planes import turn
from impl.codecs.reference import DTYPES
from impl.codecs.rounding_noise import Clock
from impl.policy.policy import Policy
from impl.policy.shard_layout import Band, UnitGeometry
from impl.pytree import cast_tensors
from impl.zero import find_blocks


def mean_loss(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the mean loss of ``model`` over ``batches``, computed in evaluation mode."""
    with evaluating(model), torch.no_grad():
        losses = [float(model(*batch)) for batch in batches]
    return math.fsum(losses) / len(losses)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode in the body of ``with``, then restore the mode of each module."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def as_gathered(
    model: nn.Module, policy: Policy, units: Sequence[UnitGeometry | GroupGeometry], clock: Clock
) -> Iterator[None]:
    """Give an unsharded fp32 model the weights as ranks all-gather them, while the body of ``with`` runs.

    These are the model's weights after encoding and decoding.  Afterwards the former weights are restored.

    Args:
        model: The unsharded model, whose weights are the engine's fp32 master weights.
        policy: The policy, whose codecs for weights are applied.  If forward passes gather hpZ's secondary copy of the
            weights, the codec of this copy is applied too.
        units: Units of our engine, or parameter groups of FSDP2.  Each of their shards is encoded by itself.
        clock: Decides the random bits of stochastic codecs.
    """
    with _restored(model.named_parameters()):
        quantise(model, policy, units, clock)
        yield


def quantise(
    model: nn.Module, policy: Policy, units: Sequence[UnitGeometry | GroupGeometry], clock: Clock
) -> None:
    """Replace an unsharded fp32 model's weights by the weights as ranks all-gather them, and do not restore them.

    The new weights are the model's weights after encoding and decoding.

    Args:
        model: The unsharded model, whose weights are the engine's fp32 master weights.
        policy: The policy, whose codecs for weights are applied.  If forward passes gather hpZ's secondary copy of the
            weights, the codec of this copy is applied too.
        units: Units of our engine, or parameter groups of FSDP2.  Each of their shards is encoded by itself.
        clock: Decides the random bits of stochastic codecs.
    """
    parameters = dict(model.named_parameters())
    for unit in units:
        unit_policy = _policy_of(unit, policy)
        codecs = (unit_policy.weights, unit_policy.copy_codec)
        for codec in codecs if unit_policy.sends_copy else codecs[:1]:
            _encode_and_decode(codec, unit, parameters, clock)


def by_columns(
    model: nn.Module, policy: Policy, units: Sequence[UnitGeometry | GroupGeometry]
) -> dict[str, Tensor]:
    """Return, by the parameter's name, the weights of backward passes if forward passes have other weights.

    They differ if ``policy.planes`` is not 1.  Backward passes then compute with weights that are quantised in blocks
    along columns, and forward passes with weights that are quantised in blocks along rows.  If ``policy.planes`` is 1,
    both passes compute with the same weights, and an empty dict is returned.

    Args:
        model: The unsharded model, whose weights are the engine's fp32 master weights.  It is not changed.
        policy: The policy, whose codec for weights is applied.
        units: Units of our engine, or parameter groups of FSDP2.
    """
    if policy.planes == 1:
        return {}
    with _restored(model.named_parameters()) as parameters:
        for unit in units:
            unit_policy, rows = _policy_of(unit, policy), 0
            if unit_policy.planes != 1 and isinstance(unit_policy.weights, Blocked):
                rows = unit_policy.weights.block_size(unit.shard)
            _encode_and_decode(unit_policy.weights, unit, parameters, Clock(0), rows)
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}


@contextmanager
def computing_with(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Give parameters of a model the values ``values`` while the body of ``with`` runs, and restore them afterwards.

    ``values`` has the new values by the parameter's name.  autograd does not notice the change.
    """
    with _restored((name, model.get_parameter(name)) for name in values) as parameters:
        for name, parameter in parameters.items():
            parameter.data.copy_(values[name])
        yield


def as_computed(trial: Trial, model: nn.Module) -> nn.Module:
    """Return a model that computes in the trial's precision.

    In fp32 this is ``model`` itself, otherwise a copy.  For DDP and the single process, the copy computes under
    autocast.  For sharded engines, the copy's parameters and inputs are cast, as these engines cast them.
    """
    policy = trial.resolved_policy() or Policy(compute=trial.peer.compute)
    if policy.compute == "fp32":
        return model
    twin, dtype = copy.deepcopy(model), DTYPES[policy.compute]
    if family_of(trial.strategy) in ("single", "ddp"):
        under_autocast(twin, next(twin.parameters()).device)
        return twin
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(dtype)

    def cast(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return cast_tensors(args, dtype), cast_tensors(kwargs, dtype)

    for module in (twin, *find_blocks(twin, most=policy.memory.largest_unit)):
        module.register_forward_pre_hook(cast, with_kwargs=True)
    return twin


def packed(
    geometry: UnitGeometry | GroupGeometry,
    values: Mapping[str, Tensor | None],
    device: torch.device | None = None,
) -> Tensor:
    """Copy values, given by parameter name, into a tensor (ranks, shard) fp32, laid out as a unit or parameter group.

    ``geometry`` describes a unit of our engine or a parameter group of FSDP2.  Row r has the elements of rank r's
    shard.  Padding, and parameters whose value is None, are zeros.  The result is on ``device``, by default on the
    device of the values.
    """
    if device is None:
        device = next((value.device for value in values.values() if value is not None), None)
    whole = torch.zeros(geometry.padded, device=device).view(-1, geometry.shard)
    for name, place in _places(geometry, whole):
        place.copy_(padded(values[name], place.numel()).view_as(place))
    return whole


def padded(value: Tensor | None, numel: int) -> Tensor:
    """Flatten ``value`` to fp32, and append zeros up to ``numel`` elements: (numel,).

    If ``value`` is None, all elements are zeros.
    """
    if value is None:
        return torch.zeros(numel)
    return nn.functional.pad(value.detach().reshape(-1).float(), (0, numel - value.numel()))


def _places(geometry: UnitGeometry | GroupGeometry, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter's name, and the view of ``whole`` (ranks, shard) in which the parameter's elements lie.

    In a parameter group of FSDP2, the view includes the parameter's padding.
    """
    if isinstance(geometry, UnitGeometry):
        for slot in geometry.slots:
            yield slot.spec.name, whole.view(-1)[slot.offset : slot.end]
        return
    columns = [0, *itertools.accumulate(map(geometry.part, geometry.parameters))]
    for spec, (start, end) in zip(geometry.parameters, itertools.pairwise(columns), strict=True):
        yield spec.name, whole[:, start:end]


def _names(geometry: UnitGeometry | GroupGeometry) -> list[str]:
    """Return the names of the parameters of a unit or parameter group."""
    if isinstance(geometry, UnitGeometry):
        return [slot.spec.name for slot in geometry.slots]
    return [spec.name for spec in geometry.parameters]


def _policy_of(unit: UnitGeometry | GroupGeometry, policy: Policy) -> Policy:
    return policy.for_unit(unit) if isinstance(unit, UnitGeometry) else policy


@contextmanager
def _restored(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[dict[str, nn.Parameter]]:
    """Yield the parameters by name, so that the caller can change them; restore their values afterwards."""
    by_name = dict(parameters)
    values = {name: parameter.detach().clone() for name, parameter in by_name.items()}
    try:
        yield by_name
    finally:
        for name, parameter in by_name.items():
            parameter.data.copy_(values[name])


@torch.no_grad()
def _encode_and_decode(
    codec: Codec,
    geometry: UnitGeometry | GroupGeometry,
    parameters: Mapping[str, nn.Parameter],
    clock: Clock,
    rows: int = 0,
) -> None:
    """Encode and decode parameters in place, shard by shard, with the reference backend.

    If ``rows`` is not 0, the codec's blocks run along columns: each matrix is cut into bands of ``rows`` rows, and each
    band is transposed before encoding and transposed back after decoding.  ``clock`` decides the random bits of
    stochastic codecs.
    """
    if isinstance(codec, Raw):  # the result of a cast does not depend on where an element lies in its shard
        for name in _names(geometry):
            parameter = parameters[name]
            parameter.copy_(parameter.to(DTYPES[codec.dtype]))
        return
    device, noise = next(iter(parameters.values())).device, None
    shards, turned = packed(geometry, parameters, device), list[tuple[Band, ...]]()
    if isinstance(geometry, UnitGeometry):
        turned = [geometry.bands(index, rows) for index in range(len(shards)) if rows]
        if codec.stochastic:
            key = clock.weights(geometry.name, frozen=not geometry.trainable)
            noise = key.noise(0, (geometry.shard,))
    for shard, bands in zip(shards, turned, strict=False):
        turn(shard, bands, rows)
    frames = torch.empty((len(shards), codec.frame_bytes(geometry.shard)), dtype=torch.uint8, device=device)
    reference.encode(codec, shards, frames, noise=noise)
    reference.decode(codec, frames, shards)
    for shard, bands in zip(shards, turned, strict=False):
        turn(shard, bands, rows, back=True)
    for name, place in _places(geometry, shards):
        parameter = parameters[name]
        parameter.copy_(place.reshape(-1)[: parameter.numel()].view_as(parameter))
