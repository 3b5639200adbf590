"""What the adapters of FSDP2 and DDP share, which keep their training loop and use our collectives.

Messages of the host itself are in no ledger: DDP's broadcasts of the weights when it is made, of its buckets'
order after the first step, and of buffers unless ``broadcast_buffers=False``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from impl import ops
from impl.adapters.traffic import GroupGeometry, Host, HostError, check_host, predict_hosted
from impl.codecs.codec import common_grain
from impl.comm.reduce_scatter import Reduction, Ring
from impl.comm.wire import Wire
from impl.engine.unit_planning import find_blocks, plan_units
from impl.plan.policy import Policy
from impl.plan.shard_layout import ROOT, ParameterSpec, UnitGeometry, chunked
from impl.plan.topology import Topology
from impl.plan.traffic import Event, LedgerKey, Sent, Tag


class Joined:
    """A host with our collectives on one rank; the ledger is its wire's."""

    units: Sequence[GroupGeometry | UnitGeometry]  # parameters that travel in one message

    def __init__(self, host: Host, wire: Wire, policy: Policy) -> None:
        check_host(host, policy)
        policy.check(wire.mesh.topology)
        if wire.mesh.device.type != "cpu":
            raise HostError(
                f"inside {host} our collectives are on the CPU, the mesh is on {wire.mesh.device}"
            )
        ops.prepare(wire.mesh.device, policy.codecs)
        self._host, self.wire, self.policy = host, wire, policy

    def check_ranks(self, ranks: Sequence[int]) -> None:
        """Refuse a host over other global ``ranks`` than the wire's, or in another order."""
        theirs, ours = (", ".join(map(str, each)) for each in (ranks, self.wire.mesh.global_ranks))
        if theirs != ours:
            raise HostError(
                f"{self._host} is over global ranks {theirs}, the wire over {ours}: give both the same ranks "
                "in one order, as by Mesh.create(topology, group=group)"
            )

    def predict(self, events: Iterable[Event]) -> dict[LedgerKey, Sent]:
        """Bytes and messages that this rank sends in the passes of ``events``."""
        layout = self.policy, self.wire.mesh.topology, self.units
        return predict_hosted(self._host, *layout, rank=self.wire.mesh.rank, events=events)

    def describe(self) -> dict[str, Any]:
        """Algorithms, transports and kernels that ran, for the record."""
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
        """A reduction of ``world * piece`` elements; inside DDP each rank receives the whole mean."""
        policy, topology = self.policy, self.wire.mesh.topology
        kind, (axes, codec) = Ring if policy.reduce == "ring" else Reduction, policy.replica_axes(topology)
        return kind(
            wire=self.wire,
            hops=policy.reduce_axes(topology),
            tag=Tag("backward", "gradients", name),
            piece=piece,
            chunks=chunked(piece, policy.chunks, common_grain(*policy.gradients)),
            replicas=[(axis, axis.stride) for axis in axes],
            replica_codec=codec,
        )


def fsdp2_groups(model: nn.Module, blocks: Iterable[nn.Module], topology: Topology) -> list[GroupGeometry]:
    """FSDP2's parameter groups: the rest of ``model``, the root, first, then each of ``blocks``.

    ``model`` may be sharded, or not yet; ``blocks``, each sharded by itself, may lie in one another.

    Raises HostError: for a parameter without dimensions, which FSDP2 cannot cut.
    """
    names = {module: name for name, module in model.named_modules()}
    groups: dict[nn.Module, dict[nn.Parameter, str]] = {owner: {} for owner in (model, *blocks)}
    owner_of: dict[nn.Module, nn.Module] = {}
    for owner in names:  # outer ones first
        if owner in groups:
            owner_of |= dict.fromkeys(owner.modules(), owner)
    for module, prefix in names.items():
        for name, parameter in module.named_parameters(prefix=prefix, recurse=False):
            if parameter.dim() == 0:
                raise HostError(f"FSDP2 cannot cut parameter {name!r}: it has no dimension")
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
    """The units of an unwrapped model, on the meta device too, inside ``host``; raises as its adapter."""
    check_host(host, policy)
    if host == "fsdp2":
        return fsdp2_groups(model, find_blocks(model), topology)
    return plan_units(model, topology, policy)
