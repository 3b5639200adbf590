"""A process group with NCCL's rules on CPU tensors: what hangs or is undefined over NCCL raises here.

Backend ``nccl_rules`` of ``torch.distributed`` (:func:`register`); gloo carries the bytes.  Each group is a
communicator with one stream: calls only enqueue, a thread carries them out in order, and what they bring
lies in the caller's tensors once ``wait()`` returned, poison until then.  Before a call's data the ranks of
it tell each other what they call, so that a difference is named.  :data:`RULES` says which rule stands where.

Stricter than NCCL in two places: single sends and receives wait in the order in which they were posted also
if they go to different ranks, and tensors that one call writes may be in no other call that is under way.
Not shown: the host runs ahead of a CUDA stream, but not of this one once it waits; speed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from tests.support.nccl_call import NcclRuleError, as_bytes, overlap
from tests.support.nccl_stream import MOVED, Stream

NAME: Final = "nccl_rules"

_REDUCED: Final = MOVED - {torch.bool, torch.float8_e4m3fn, torch.float8_e5m2}
_OPERATIONS: Final = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")


class Communicator(Stream):
    """A group with NCCL's rules (the module's text); made by ``torch.distributed`` once registered.

    Args:
        store: at which the group's ranks meet.
        rank: this rank's place in the group.
        size: of the group.
        timeout: after which a call that others do not join is an error.
    """

    # What torch asks of a group.

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Of the backend."""
        return NAME

    @property
    def group_name(self) -> str:
        """By which torch knows it."""
        return c10d._world.pg_names[self]  # torch tells groups in Python their name nowhere

    def get_group_store(self) -> Any:
        """At which its ranks met."""
        return self._store

    def size(self) -> int:
        """Ranks of the group."""
        return self._size

    def rank(self) -> int:
        """This rank's place among them."""
        return self._me

    def __repr__(self) -> str:
        return f"<{NAME} communicator, rank {self._me} of {self._size}>"

    # Collectives; names as torch calls them.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce in place."""
        (tensor,) = tensors
        operation = _operation(opts)
        _reducible(tensor, operation)
        work = functools.partial(self._reduced, operation)
        return self._collective("all_reduce", [tensor], [tensor], work, detail=operation)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """From one rank to all."""
        (tensor,) = tensors
        root = opts.rootRank

        def carry(read: list[Tensor], brought: list[Tensor]) -> None:
            value = read[0] if self._me == root else brought[0]
            self._done(self._gloo.broadcast([value], opts))
            brought[0].copy_(value)

        return self._collective("broadcast", [tensor], [tensor], carry, detail=f"from {root}")

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        """Into one tensor, in rank order; ``given`` may be this rank's own part of it."""
        if output.numel() != self._size * given.numel():
            raise NcclRuleError(
                "order", f"all_gather of {given.numel()} elements by {self._size} ranks into {output.numel()}"
            )
        self._in_place("all_gather", whole=output, part=given)

        def carry(read: list[Tensor], brought: list[Tensor]) -> None:
            rows = [torch.empty_like(as_bytes(read[0])) for _ in range(self._size)]
            self._done(self._gloo.allgather([rows], [as_bytes(read[0])]))
            as_bytes(brought[0]).copy_(torch.cat(rows))

        return self._collective("all_gather", [given], [output], carry)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Into a tensor for each rank."""
        (rows,), (given,) = outputs, inputs
        sizes = {row.numel() for row in rows}
        if sizes != {given.numel()}:
            raise NcclRuleError("order", f"all_gather of {given.numel()} elements into {sorted(sizes)}")

        def carry(read: list[Tensor], brought: list[Tensor]) -> None:
            self._done(self._gloo.allgather([[as_bytes(row) for row in brought]], [as_bytes(read[0])]))

        return self._collective("all_gather", [given], list(rows), carry)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        """Of one tensor, by rank order; ``output`` may be this rank's own part of it."""
        operation = _operation(opts)
        _reducible(given, operation)
        if given.numel() != self._size * output.numel():
            raise NcclRuleError(
                "order",
                f"reduce_scatter of {given.numel()} elements by {self._size} ranks into {output.numel()}",
            )
        self._in_place("reduce_scatter", whole=given, part=output)

        def carry(read: list[Tensor], brought: list[Tensor]) -> None:
            whole = read[0].clone()
            self._reduced(operation, [whole], [whole])
            brought[0].view(-1).copy_(whole.view(self._size, -1)[self._me])

        return self._collective("reduce_scatter", [given], [output], carry, detail=operation)

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        come: list[int] | None = None,
        go: list[int] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        """Each rank's part to each; ``come`` and ``go`` count rows by rank, equal parts if empty."""
        if overlap(output, given):
            raise NcclRuleError("in place", "all_to_all between tensors that overlap")
        return self._all_to_all(output, given, self._parts(output, come), self._parts(given, go))

    def barrier(self, opts: Any = None) -> dist.Work:
        """As beside NCCL: of the CPU's backend, so it does not make the communicator."""
        return self._gloo.barrier()  # type: ignore[no-any-return]

    # Point to point.

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work | None:
        """To a rank of the group."""
        return self._message("send", tensors[0], to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work | None:
        """From a rank of the group."""
        return self._message("receive", tensors[0], source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """NCCL has none.

        Raises:
            NcclRuleError: always.
        """
        raise NcclRuleError("backend", "a receive from any rank")

    @contextlib.contextmanager
    def group(self) -> Iterator[list[dist.Work]]:
        """Sends and receives inside are one call; gives its work afterwards."""
        messages: list[tuple[str, int, Tensor]] = []
        self._grouped = messages
        works: list[dist.Work] = []
        try:
            yield works
        finally:
            self._grouped = None
        if messages:
            works.append(self._messages("batch_isend_irecv", messages))

    # As torch 2.11 calls them.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _operation(opts: Any) -> str:
    """Name of a reduction.

    Raises:
        NcclRuleError: if NCCL has none of that name.
    """
    operation = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    name = str(getattr(operation, "op", operation)).rpartition(".")[2]
    if name not in _OPERATIONS:
        raise NcclRuleError("datatype", f"reduction {name}")
    return name


def _reducible(tensor: Tensor, operation: str) -> None:
    if tensor.dtype not in _REDUCED:
        raise NcclRuleError("datatype", f"reduction {operation} of {tensor.dtype}")


def _batch_isend_irecv(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Torch's, which groups messages for its own class of groups alone."""
    group: Any = operations[0].group
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, Communicator):
        return _torch_batch(operations)
    with group.group() as works:
        for one in operations:
            end = {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}
            one.op(one.tensor, group=one.group, tag=one.tag, **end)
    return works


_torch_batch: Final = c10d.batch_isend_irecv


def register() -> None:
    """Make the backend known to ``torch.distributed``; again does nothing."""
    if NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, Communicator, devices=["cpu"])
    dist.batch_isend_irecv = c10d.batch_isend_irecv = _batch_isend_irecv  # type: ignore[assignment]
