"""Checks, once when a model is sharded, that all ranks start from the same weights.

Ranks compare a sum of each parameter's bits, before cuts if it was cut while it was made, and the shapes and
types of buffers, through the store of their rendezvous, which is in no ledger.  Thread ranks have no store,
and are not compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from impl.comm.wire import Wire
from impl.engine import module_buffers
from impl.errors import ZeroError
from impl.plan.topology import ranks_in_words
from impl.unit.placeholder import Placeholder


def check_same_start(
    wire: Wire, parameters: Mapping[str, Tensor], drawn: Mapping[str, int], buffers: Mapping[str, str]
) -> None:
    """Refuse values that differ between ranks, on all of them; all must call this.

    ``parameters`` that are cut already, or have no values, are left out; ``drawn`` has a number for the
    values that each cut parameter was cut from on this rank; ``buffers`` are the kinds of buffers in words,
    whose values may differ.
    """
    mesh, rank = wire.mesh, wire.mesh.rank
    store = mesh.store()
    if store is None:
        return
    mark = f"zeropp/starts/{store.add(f'zeropp/starts/{rank}', 1)}"
    store.set(f"{mark}/{rank}", json.dumps([{**sums(parameters), **drawn}, buffers]))
    wire.meet("the comparison of first weights")
    if rank == 0:
        ranks = [json.loads(store.get(f"{mark}/{other}")) for other in range(mesh.topology.world)]
        weights, kinds = zip(*ranks, strict=True)
        store.set(f"{mark}/verdict", difference(weights) or module_buffers.difference(kinds) or "")
    if verdict := store.get(f"{mark}/verdict").decode():
        raise ZeroError(verdict + mesh.counting)


def sums(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """A number for the values of each parameter with values; equal values have equal numbers."""
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
    """The error of sums that differ, in order of ``ranks``; None if they are equal."""
    for name in {name: None for numbers in ranks for name in numbers}:
        others = [rank for rank, numbers in enumerate(ranks) if numbers.get(name) != ranks[0].get(name)]
        if others:
            return (
                f"parameter {name!r} starts from other values on {ranks_in_words(others)} than on rank 0; "
                "each rank would train its own slice: seed all ranks alike (Init has seed=), or load the "
                "same state on all"
            )
    return None
