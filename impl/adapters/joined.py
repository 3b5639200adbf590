"""Defines the base class and the functions that the adapters of FSDP2 and DDP share.

In this folder, a *host* is FSDP2 or DDP: it keeps its own engine and training loop but uses this project's collectives.
The ledger counts the messages of these collectives.  It does not count what the host sends by itself.  For example, DDP
itself broadcasts the following:

- the weights, when the DDP model is created;
- the order of its buckets, after the first step;
- the model's buffers, before forward passes, unless ``broadcast_buffers`` is False.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from impl import ops
from impl.adapters.traffic import GroupGeometry, Host, HostError, check_host, predict_hosted
from impl.codecs.codec import common_grain
from impl.comm.reduce_scatter import Reduction, reduction_of
from impl.comm.wire import Wire
from impl.engine.unit_planning import find_blocks, plan_units
from impl.plan.traffic import Event, LedgerKey, Sent, Tag
from impl.policy.policy import Policy
from impl.policy.shard_layout import ROOT, ParameterSpec, UnitGeometry
from impl.policy.topology import Topology


class Joined:
    """Base class of the adapters, which run this project's collectives inside FSDP2 or DDP.

    An adapter sends all its messages over ``wire``, in the way that ``policy`` sets.  ``host`` is ``fsdp2`` or ``ddp``.
    """

    units: Sequence[GroupGeometry | UnitGeometry]  # each holds the parameters that one message carries

    def __init__(self, host: Host, wire: Wire, policy: Policy) -> None:
        check_host(host, policy)
        policy.check(wire.mesh.topology)
        if host == "ddp" and wire.mesh.device.type != "cpu":
            raise HostError(
                "inside DDP, this project's collectives run on the CPU only, but the mesh is on "
                f"{wire.mesh.device}: use a mesh on the CPU, or FSDP2, or the engine of this project"
            )
        ops.prepare(wire.mesh.device, policy.codecs)
        self._host, self.wire, self.policy = host, wire, policy

    def check_ranks(self, ranks: Sequence[int]) -> None:
        """Raise HostError unless the wire has the same global ranks as the host, in the same order.

        ``ranks`` are the global ranks of FSDP2's device mesh or of DDP's process group.
        """
        theirs, ours = (", ".join(map(str, each)) for each in (ranks, self.wire.mesh.global_ranks))
        if theirs != ours:
            raise HostError(
                f"{self._host} runs on global ranks {theirs}, but the wire runs on global ranks {ours}: make "
                f"the wire's mesh from the process group of {self._host}, as Mesh.create(topology, group=group)"
            )

    def predict(self, events: Iterable[Event]) -> dict[LedgerKey, Sent]:
        """Predicts how many bytes and messages this rank sends, without sending them.

        ``events`` are the passes and steps in their order, such as ``["forward", "backward", "step"]``; see
        :func:`predict_hosted`.  The keys of the result are those of the wire's ledger: phase, purpose, unit, hop and
        link.
        """
        layout = self.policy, self.wire.mesh.topology, self.units
        return predict_hosted(self._host, *layout, rank=self.wire.mesh.rank, events=events)

    def describe(self) -> dict[str, Any]:
        """Returns the names of the collectives, transports and kernels that the adapter uses.

        The keys are ``host`` (``fsdp2`` or ``ddp``), ``gather`` and ``reduce`` (the policy's fields; inside DDP,
        ``gather`` is ``none``), ``transports`` (for each axis of ranks, what carries its messages) and ``kernels``
        (name of the backend).  If no compiled kernels can be used, ``kernels_warning`` says why.  All values can be
        written as JSON, since they are stored in the record of a measurement.
        """
        device = self.wire.mesh.device
        warning = ops.warning_of(device)
        return {
            "gather": self.policy.gather if self._host == "fsdp2" else "none",
            "host": self._host,
            "reduce": self.policy.reduce,
            "transports": self.wire.describe(),
            "kernels": ops.backend_of(device),
            **({} if warning is None else {"kernels_warning": warning}),
        }

    def _reduction(self, name: str, piece: int) -> Reduction:
        """Returns a new reduction, which is not started yet, for the gradients of the unit ``name``.

        The gradients have ``world * piece`` elements, where ``world`` is the number of ranks.  Inside FSDP2, each rank
        receives ``piece`` elements of the mean gradients.  Inside DDP, each rank receives the whole mean.
        """
        tag, grain = Tag("backward", "gradients", name), common_grain(*self.policy.gradients)
        return reduction_of(self.policy, self.wire, tag, piece, grain)


def fsdp2_groups(model: nn.Module, blocks: Iterable[nn.Module], topology: Topology) -> list[GroupGeometry]:
    """Returns FSDP2's parameter groups: first the root's, then one for each of ``blocks``.

    ``blocks`` are the modules on which ``fully_shard`` is called in addition to ``model``.  A block may contain other
    blocks: then the parameters of the inner block belong to the inner block's group.  The root's group holds the
    parameters outside all blocks.  Groups without parameters are left out.

    ``model`` may be sharded already or not yet.  ``topology`` gives the number of ranks.

    Raises HostError: for a parameter without dimensions, which FSDP2 cannot shard.
    """
    names = {module: name for name, module in model.named_modules()}
    groups: dict[nn.Module, dict[nn.Parameter, str]] = {owner: {} for owner in (model, *blocks)}
    owner_of: dict[nn.Module, nn.Module] = {}
    for owner in names:  # outer modules first
        if owner in groups:
            owner_of |= dict.fromkeys(owner.modules(), owner)
    for module, prefix in names.items():
        for name, parameter in module.named_parameters(prefix=prefix, recurse=False):
            if parameter.dim() == 0:
                raise HostError(
                    f"FSDP2 cannot shard parameter {name!r}, which has no dimension: give it shape (1,)"
                )
            groups[owner_of[module]].setdefault(parameter, name)
    geometries = []
    for owner, parameters in groups.items():
        specs = tuple(ParameterSpec(name, tuple(parameter.shape)) for parameter, name in parameters.items())
        trained = tuple(parameter.requires_grad for parameter in parameters)
        geometries.append(GroupGeometry(names[owner] or ROOT, specs, trained, topology.world))
    return [geometry for geometry in geometries if geometry.parameters]


def hosted_units(
    host: Host, model: nn.Module, topology: Topology, policy: Policy
) -> list[GroupGeometry] | list[UnitGeometry]:
    """Returns the groups of parameters of ``model`` that are sent together inside FSDP2 or DDP.

    If ``host`` is ``fsdp2``, the result has FSDP2's parameter groups: one for each block of the model, and one for the
    parameters outside all blocks.  If ``host`` is ``ddp``, the result has this project's units, laid out for
    ``policy``.  The model must not be wrapped by FSDP2 or DDP yet, and may be on the meta device.

    Raises PolicyError, HostError, GeometryError: for the same reasons as the adapters ``InFSDP2`` and ``InDDP``.
    """
    check_host(host, policy)
    if host == "fsdp2":
        return fsdp2_groups(model, find_blocks(model), topology)
    return plan_units(model, topology, policy)
