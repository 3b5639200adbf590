"""Checks, when a model is sharded, that all ranks have the same policy and start from the same weights.

Ranks compare the values of their policies (:func:`impl.policy.setting.texts`), a checksum of each parameter
(:func:`sums`), and the shapes and types of buffers.  If :class:`~impl.parameters.init.Init` has cut a parameter to
slices, each rank has only its slice.  The checksum of such a parameter was computed from the whole values, before the
cut.  The ranks exchange these values through the key-value store of their rendezvous, and not through the wire, which
sends all other messages and would count the bytes as traffic of training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from impl.comm.wire import Wire
from impl.engine import module_buffers
from impl.errors import ZeroError
from impl.policy import setting
from impl.policy.policy import Policy
from impl.policy.topology import ranks_in_words
from impl.unit.placeholder import Placeholder


def check_same_start(
    wire: Wire,
    policy: Policy,
    parameters: Mapping[str, Tensor],
    drawn: Mapping[str, int],
    buffers: Mapping[str, str],
) -> None:
    """Raise a ZeroError on all ranks if their policies or the first values of their models differ.

    All ranks must call this.

    The ranks exchange the values of their policies, checksums of their parameters, and the shapes and types of their
    buffers through the key-value store of their rendezvous.  If they have no store, nothing is compared.

    Args:
        wire: the object through which the ranks send messages.
        policy: the policy of this rank.
        parameters: the model's parameters by name.  Parameters without values, or with only this rank's slice of the
            values, are ignored.
        drawn: by name, a hash for each parameter of which this rank has only a slice.  It is a hash of the whole values
            from which the slice was cut (:func:`impl.parameters.presharded.drawn_numbers`).
        buffers: by name, the shape and type of each buffer as text.  Values of buffers are not compared.
    """
    mesh, rank = wire.mesh, wire.mesh.rank
    store = mesh.store()
    if store is None:
        return
    mark = f"zeropp/starts/{store.add(f'zeropp/starts/{rank}', 1)}"
    store.set(f"{mark}/{rank}", json.dumps([setting.texts(policy), {**sums(parameters), **drawn}, buffers]))
    wire.meet("the comparison of first weights")
    if rank == 0:
        ranks = [json.loads(store.get(f"{mark}/{other}")) for other in range(mesh.topology.world)]
        policies, weights, kinds = zip(*ranks, strict=True)
        # Policies come first, since other values may differ because of them.
        apart = setting.difference(policies) or difference(weights) or module_buffers.difference(kinds)
        store.set(f"{mark}/verdict", apart or "")
    if verdict := store.get(f"{mark}/verdict").decode():
        raise ZeroError(verdict + mesh.counting)


def sums(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Return, by name, a checksum of each parameter of which this rank has the whole values.

    The bits of each element are read as an integer, and the checksum is the sum of these integers.  So parameters with
    equal bits have equal checksums, and ranks can compare their parameters by checksums.
    """
    integers = {
        name: parameter.detach()
        .resolve_neg()
        .contiguous()
        .view(-1)
        .view(getattr(torch, f"int{8 * parameter.itemsize}"))
        for name, parameter in parameters.items()
        if type(parameter) is not Placeholder and parameter.device.type != "meta"
    }
    totals = [bits.sum(dtype=torch.int64) for bits in integers.values()]
    return dict(zip(integers, torch.stack(totals).tolist() if totals else (), strict=True))


def difference(ranks: Sequence[Mapping[str, int]]) -> str | None:
    """Return an error message for the first parameter whose checksum differs between ranks; None if all are equal.

    ``ranks`` has the checksums of each rank (:func:`sums`), in rank order.
    """
    for name in {name: None for numbers in ranks for name in numbers}:
        others = [rank for rank, numbers in enumerate(ranks) if numbers.get(name) != ranks[0].get(name)]
        if others:
            return (
                f"parameter {name!r} starts from other values on {ranks_in_words(others)} than on rank 0, so the "
                "shards would not be of one model: seed all ranks alike (Init has seed=), or load the same state "
                "on all ranks"
            )
    return None
