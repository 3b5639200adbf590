"""Shards any torch module for ZeRO-3 or ZeRO++ training: ``shard(model, ...)`` changes the model in place.

The training loop gains one line, and its optimizer gets the engine's parameter groups::

    zero = zeropp.shard(model, mesh=mesh, policy=zeropp.preset("zeropp"))
    optimizer = torch.optim.AdamW(zero.param_groups())
    ...
    loss.backward()
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from impl import ops
from impl.codecs.reference import DTYPES
from impl.codecs.rounding_noise import Clock
from impl.comm.mesh import AnyMesh, Mesh
from impl.comm.wire import Wire, wire_of
from impl.engine import module_buffers
from impl.engine.elementwise_probe import elementwise
from impl.engine.engine import Zero, find
from impl.engine.hooks import Hooks
from impl.engine.outside_uses import register
from impl.engine.unit_planning import GroupOf, check_shapes, drafts_of, find_blocks, plan_units
from impl.errors import ZeroError
from impl.parameters.external import external_to, register_external_parameter
from impl.parameters.gathered import GatheredParameters
from impl.parameters.init import Init, give_values
from impl.parameters.initial_weights import check_same_start
from impl.parameters.presharded import drawn_numbers, take_over
from impl.plan.prefetch_schedule import Schedule, small_units
from impl.plan.traffic import placements_of
from impl.plan.unit_plan import geometries_of
from impl.policy.policy import Offload, Policy
from impl.unit.context import MEMORY, HostMemory, Meter, Passes, Reserve, UnitContext
from impl.unit.flat_buffer import check_plain
from impl.unit.unit import Unit

__all__ = [  # includes the names that DeepSpeed's tutorials use as deepspeed.zero.NAME
    "GatheredParameters",
    "Init",
    "Zero",
    "ZeroError",
    "elementwise",
    "find_blocks",
    "full_state_dict",
    "load_full_state_dict",
    "plan_units",
    "register_external_parameter",
    "shard",
]


def shard(
    model: nn.Module,
    *,
    mesh: AnyMesh | None = None,
    policy: Policy,
    wire: Wire | None = None,
    blocks: Sequence[nn.Module] | None = None,
    group_of: GroupOf | None = None,
    seed: int = 0,
    initialise: Callable[[nn.Module], None] | None = None,
) -> Zero:
    """Shard ``model`` in place over the ranks of ``mesh``, and return its engine.

    All ranks of the mesh must call this, and no other ranks.  The model must have the same values on every
    rank, which is checked.  If the model was constructed under :class:`~impl.parameters.init.Init`, each rank has only
    a slice of most parameters; such parameters get their values from the slices.  A model on the meta device gets its
    values here, block by block.

    Args:
        model: the model.  Its parameters must be plain: of the class ``nn.Parameter`` itself, or made under ``Init``,
            and without gradient hooks.
        mesh: the ranks among which the model is sharded: a mesh, torch's ``DeviceMesh``, a process group or a topology,
            as :meth:`Mesh.of` reads them; by default all ranks.
        policy: what is sharded, and how it is sent.  It must be equal on all ranks, which is checked.
        wire: the object that sends all messages and counts their bytes; by default a new wire without options.
        blocks: the modules that are gathered and resharded as a whole; by default the modules that
            :func:`find_blocks` finds.
        group_of: a function of a parameter's name and the parameter, which returns the number of the parameter's
            optimizer group; by default all parameters are in group 0.
        seed: the seed of stochastic codecs, equal on all ranks.
        initialise: a function that gives a module on the meta device its values; by default it calls the module's
            ``reset_parameters()``.

    Raises:
        PolicyError: if the policy does not fit the topology.
        GeometryError: if the parameters of a block cannot be laid out in shards, or need too much padding.
        ZeroError: if the model cannot be sharded, is sharded already, or differs between ranks.  Also if ``policy``
            differs between ranks.
        MeshError: on a rank that is not in the mesh.
        WireError: if ``wire`` is over another topology, other ranks or another device than ``mesh``.
    """
    if not isinstance(policy, Policy):
        raise ZeroError(
            f"policy has type {type(policy).__name__}: pass a zeropp.Policy, such as zeropp.preset('zeropp')"
        )
    mesh = Mesh.of(mesh)
    check_shapes(model)
    check_plain(model)
    policy.check(mesh.topology)
    for device in {mesh.device, MEMORY} if policy.offload != Offload() else {mesh.device}:
        ops.prepare(device, policy.codecs)
    wire = wire_of(mesh, wire)
    if blocks is None:
        blocks = find_blocks(model, most=policy.memory.largest_unit)
    give_values(model, blocks, mesh, policy, initialise)
    drafts = drafts_of(model, blocks, group_of, policy)
    geometries = geometries_of(drafts, mesh.topology, policy)
    parameters = dict(model.named_parameters())
    module_buffers.check(buffers := module_buffers.persistent(model))
    with wire.calling("shard()"):
        check_same_start(
            wire, policy, parameters, drawn_numbers(parameters), module_buffers.in_words(buffers)
        )
    meter = Meter()
    gradients, weights = (
        Reserve(DTYPES[policy.compute], mesh.device, meter, part) for part in ("local_gradients", "gathered")
    )
    small = small_units(policy, mesh.topology, geometries) if wire.streams else frozenset[int]()
    passes = Passes(Schedule.for_units(policy, geometries, small))
    host = HostMemory(mesh.device, meter)
    context = UnitContext(wire, policy, meter, Clock(seed), gradients, weights, host, passes)
    casts = any(p.dtype != DTYPES[policy.compute] for draft in drafts for p in draft.parameters)
    external, units = list(external_to(model)), list[Unit]()
    placements = placements_of(policy.offload, geometries)
    for draft, geometry, placement in zip(drafts, geometries, placements, strict=True):
        cut = take_over(geometry, draft.parameters, wire)
        arguments = geometry, draft.parameters, draft.holders, context, placement
        units.append(Unit(*arguments, siblings=units, cut=cut))
    hooks = Hooks(model, units, [draft.module for draft in drafts], context, casts_inputs=casts)
    zero = Zero(model, units, context, hooks)
    unit_of = {id(p): unit for draft, unit in zip(drafts, units, strict=True) for p in draft.parameters}
    for module, parameter in external:
        if id(parameter) not in unit_of:
            raise ZeroError(
                f"register_external_parameter() was called for {type(module).__name__} with a parameter of shape "
                f"{tuple(parameter.shape)} that the model does not have: pass a parameter that a module of the model "
                "holds"
            )
        register(module, unit_of[id(parameter)])
    return zero


def engine_of(model: nn.Module) -> Zero:
    """Return the engine of a model that :func:`shard` has sharded.

    Raises:
        ZeroError: if the model is not sharded.  Also if :func:`shard` was called with another module than ``model``: a
            part of ``model``, or a module that contains ``model``.
    """
    owner = next(filter(None, map(find, model.parameters())), None)
    kind = type(model).__name__
    if owner is None:
        raise ZeroError(f"{kind} is not sharded: call shard() first")
    if owner.engine.model is not model:
        raise ZeroError(f"{kind} is not the module that shard() was called with: pass that module")
    return owner.engine


def full_state_dict(
    model: nn.Module,
    *,
    rank0_only: bool = False,
    device: torch.device | str | None = "cpu",
    dtype: torch.dtype | str = torch.float32,
    allow_overflow: bool = False,
) -> dict[str, Tensor]:
    """Gather the state dict of the unsharded model, parameters and buffers; all ranks must call it.

    Args:
        model: the model that :func:`shard` was called with.
        rank0_only: whether only rank 0 of the mesh gets the state dict; all other ranks then get an empty dict.
        device: the device of the result; None for the device of the mesh.
        dtype: the type of the parameters in the result: fp32, bf16, fp16, or a floating-point ``torch.dtype``.
        allow_overflow: whether a finite value that is too large for ``dtype`` may become infinite.

    Raises:
        ZeroError: if the model is not sharded.  Also, on all ranks, if finite values would become infinite and
            ``allow_overflow`` is False.
    """
    return engine_of(model).full_state_dict(
        rank0_only=rank0_only, device=device, dtype=dtype, allow_overflow=allow_overflow
    )


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Overwrite the weights and buffers of a sharded ``model`` with the ``state`` dict of the unsharded model.

    All ranks must call it, each with the whole state dict.  Parameters may be in any floating-point type.

    Raises:
        ZeroError: if the model is not sharded, or if ``state`` does not fit the model; the model is then unchanged.
            :meth:`impl.engine.engine.Zero.load_full_state_dict` lists the cases.
    """
    engine_of(model).load_full_state_dict(state)
