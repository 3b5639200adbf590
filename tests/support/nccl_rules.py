"""A process group with NCCL's rules on CPU tensors: what hangs or is undefined over NCCL raises here.

Backend ``nccl_rules`` of ``torch.distributed`` (:func:`register`); gloo carries the bytes.  Each group is a
communicator with one stream: calls only enqueue, a thread carries them out in order, and what they bring
lies in the caller's tensors once ``wait()`` returned, poison until then.  Before a call's data the ranks of
it tell each other what they call, so that a difference is named.  :data:`RULES` says which rule stands where.

Stricter than NCCL in two places: sends and receives stand in group calls alone, and tensors that one call
writes may be in no other call that is under way.
Not shown: the host runs ahead of a CUDA stream, but not of this one once it waits; speed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from tests.support.nccl_call import TOLD_BYTES, Call, NcclRuleError, Told, as_bytes, carry_out, overlap

NAME: Final = "nccl_rules"

_MOVED: Final = {
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip
_TELL, _ANSWER, _DATA = 1, 2, 3  # gloo's tags
_REDUCED: Final = _MOVED - {torch.bool, torch.float8_e4m3fn, torch.float8_e5m2}
_OPERATIONS: Final = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")


_Group: Any = dist.ProcessGroup  # torch's stubs name overloads that a group need not have


class Communicator(_Group):  # type: ignore[misc]
    """A group with NCCL's rules (the module's text); made by ``torch.distributed`` once registered.

    A call that others do not join within ``timeout`` is an error.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        self._me, self._size, self._limit = rank, size, timeout
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._first = True
        self._members: list[int] | None = None
        self._grouped: list[tuple[str, int, Tensor]] | None = None
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        world = dist.group.WORLD
        # Of the process: what this rank posted with each other rank, and what is under way.
        first = world if isinstance(world, Communicator) else None
        self._positions: Counter[int] = first._positions if first else Counter()
        self._under_way: list[Call] = first._under_way if first else []
        stream = threading.Thread(
            target=carry_out, args=(self._calls, weakref.WeakMethod(self._agree)), daemon=True
        )
        stream.start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    # What torch asks of a group.

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return NAME

    @property
    def group_name(self) -> str:
        return c10d._world.pg_names[self]  # torch tells groups in Python their name nowhere

    def get_group_store(self) -> Any:
        return self._store

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._me

    # Collectives; names as torch calls them.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (tensor,) = tensors
        operation = _operation(opts)
        _reducible(tensor, operation)
        work = functools.partial(self._reduced, operation)
        return self._collective("all_reduce", [tensor], [tensor], work, detail=operation)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
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

    def send(self, tensors: list[Tensor], to: int, tag: int) -> None:
        self._message("send", tensors[0], to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> None:
        self._message("receive", tensors[0], source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
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
            works.append(self._messages(messages))

    # As torch 2.11 calls them.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    # Its stream.

    def _ended(self, call: Call) -> None:
        with contextlib.suppress(ValueError):
            self._under_way.remove(call)

    def _ranks(self) -> list[int]:
        """Global ranks of the group; asked first by the rank's own thread."""
        if self._members is None:
            self._members = dist.get_process_group_ranks(self)
        return self._members

    def _collective(
        self,
        kind: str,
        sources: list[Tensor],
        destinations: list[Tensor],
        carry: Callable[[list[Tensor], list[Tensor]], None],
        *,
        detail: str = "",
        counts: tuple[Sequence[int], Sequence[int]] | None = None,  # bytes to and from each rank
    ) -> dist.Work:
        self._movable(kind, [*sources, *destinations])
        nbytes = sum(source.nbytes for source in sources)
        go, come = counts or ([nbytes] * self._size, [nbytes] * self._size)
        detail = f"{sources[0].dtype} {detail}".removeprefix("torch.").rstrip()
        peers = {
            index: Told(self._position(rank), kind, go[index], come[index], detail)
            for index, rank in enumerate(self._ranks())
            if index != self._me
        }
        return self._enqueue(Call(kind, peers, sources, destinations, carry, self._ended))

    def _all_to_all(
        self, output: Tensor, given: Tensor, into: list[tuple[int, int]], parts: list[tuple[int, int]]
    ) -> dist.Work:
        """Parts are (first byte, bytes) by rank."""

        def cut(tensor: Tensor, spans: list[tuple[int, int]]) -> list[Tensor]:
            return [as_bytes(tensor)[first : first + count] for first, count in spans]

        def carry(read: list[Tensor], brought: list[Tensor]) -> None:
            come, go = cut(brought[0], into), cut(read[0], parts)
            come[self._me].copy_(go[self._me])
            others = [index for index in range(self._size) if index != self._me]
            works = [self._gloo.recv([come[i]], i, _DATA) for i in others if come[i].numel()]
            works += [self._gloo.send([go[i]], i, _DATA) for i in others if go[i].numel()]
            for work in works:
                self._done(work)

        counts = [count for _, count in parts], [count for _, count in into]
        return self._collective("all_to_all", [given], [output], carry, counts=counts)

    def _parts(self, tensor: Tensor, rows: list[int] | None) -> list[tuple[int, int]]:
        """(first byte, bytes) by rank."""
        if not rows and tensor.shape[0] % self._size:
            raise NcclRuleError("order", f"all_to_all of {tensor.shape[0]} rows by {self._size} ranks")
        counts = rows or [tensor.shape[0] // self._size] * self._size
        if sum(counts) != tensor.shape[0]:
            raise NcclRuleError("order", f"all_to_all of {tensor.shape[0]} rows in parts {counts}")
        row = tensor.nbytes // max(tensor.shape[0], 1)
        ends = itertools.accumulate(counts)
        return [((end - count) * row, count * row) for end, count in zip(ends, counts, strict=True)]

    def _message(self, kind: str, tensor: Tensor, peer: int, tag: int) -> None:
        if tag:
            raise NcclRuleError("tags", f"{kind} with tag {tag}")
        self._movable(kind, [tensor])
        if peer == self._me:
            raise NcclRuleError("backend", f"{kind} of rank {peer} to itself")
        if self._grouped is None:
            raise NcclRuleError("grouping", f"{kind} with rank {peer} outside of a group call")
        self._grouped.append((kind, peer, tensor))

    def _messages(self, messages: Sequence[tuple[str, int, Tensor]]) -> dist.Work:
        """One call of messages, as (send or receive, rank of the group, tensor)."""

        def carry(read: list[Tensor], brought: list[Tensor]) -> None:
            sent, got = iter(read), iter(brought)
            works = [
                self._gloo.send([as_bytes(next(sent))], peer, _DATA)
                if kind == "send"
                else self._gloo.recv([as_bytes(next(got))], peer, _DATA)
                for kind, peer, _ in messages
            ]
            for work in works:
                self._done(work)

        told = [
            (peer, Told(0, kind, tensor.nbytes, tensor.nbytes, str(tensor.dtype).removeprefix("torch.")))
            for kind, peer, tensor in messages
        ]
        sources = [tensor for kind, _, tensor in messages if kind == "send"]
        into = [tensor for kind, _, tensor in messages if kind == "receive"]
        return self._enqueue(Call("batch_isend_irecv", {}, sources, into, carry, self._ended, told))

    def _enqueue(self, call: Call) -> dist.Work:
        self._ranks()
        for other in self._under_way:
            clash = [
                (mine, theirs)
                for mine, theirs in [
                    *itertools.product(call.destinations, other.destinations + other.sources),
                    *itertools.product(call.sources, other.destinations),
                ]
                if overlap(mine, theirs)
            ]
            if clash:
                why = f"{call.kind} uses a tensor of {other.kind}, not yet waited for"
                raise NcclRuleError("buffer", why)
        self._under_way.append(call)
        self._calls.put(call)
        return call

    def _position(self, rank: int) -> int:
        """Of the next call that this rank and another take part in; counts it."""
        self._positions[rank] += 1
        return self._positions[rank]

    def _movable(self, kind: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.dtype not in _MOVED:
                raise NcclRuleError("datatype", f"{kind} of {tensor.dtype}")
            if not tensor.is_contiguous():
                raise NcclRuleError(
                    "contiguous", f"{kind} of a tensor {tuple(tensor.shape)} with strides {tensor.stride()}"
                )

    def _in_place(self, kind: str, *, whole: Tensor, part: Tensor) -> None:
        own = whole.data_ptr() + self._me * part.nbytes
        if overlap(whole, part) and part.data_ptr() != own:
            raise NcclRuleError("in place", f"{kind}: rank {self._me}'s part lies elsewhere in the whole")

    def _reduced(self, operation: str, read: list[Tensor], brought: list[Tensor]) -> None:
        """All-reduce over gloo, which has no mean."""
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, "SUM" if operation == "AVG" else operation)
        value = read[0].clone()
        self._done(self._gloo.allreduce([value], options))
        brought[0].copy_(value.div_(self._size) if operation == "AVG" else value)

    def _done(self, work: Any) -> None:
        work.wait(self._limit)

    def _agree(self, call: Call) -> None:
        """On the stream: tell the other ranks of a call what it is, and compare; raise where they call
        something else, or nothing within the time limit.
        """
        ranks = self._ranks()
        if (
            self._first or not call.messages
        ):  # all ranks take part in the first call: it makes the communicator
            told = list(call.peers.items()) or [
                (index, Told(self._position(rank), "creation", 0, 0, ""))
                for index, rank in enumerate(ranks)
                if index != self._me
            ]
            kind = "the group's first call" if call.messages else call.kind
            limit = f"which did not call it within {self._limit}, or ended"
            rule = "creation" if self._first else "order"
            self._compare(told, rule, lambda _, peer: f"{kind} waited for rank {ranks[peer]}, {limit}")
        self._first = False
        self._compare(
            call.messages,
            "order",
            lambda one, peer: (
                f"a {one.kind} between rank {ranks[self._me]} and rank {ranks[peer]} was not matched "
                f"within {self._limit}"
            ),
        )

    def _compare(
        self, told: Iterable[tuple[int, Told]], rule: str, missing: Callable[[Told, int], str]
    ) -> None:
        """Tell each rank what is told to it, all at once, and raise the rule by which two do not fit."""
        under_way = []
        for peer, mine in told:
            theirs = torch.empty(TOLD_BYTES, dtype=torch.uint8)
            out, into = {"send": (_TELL, _ANSWER), "receive": (_ANSWER, _TELL)}.get(mine.kind, (_TELL, _TELL))
            with _naming(rule, missing(mine, peer)):
                works = [
                    self._gloo.recv([theirs], peer, into), self._gloo.send([mine.packed()], peer, out)
                ]  # fmt: skip
            under_way.append((peer, mine, theirs, works))
        for peer, mine, _, works in under_way:
            with _naming(rule, missing(mine, peer)):
                for work in works:
                    self._done(work)
        for peer, mine, theirs, _ in under_way:
            other, ranks = Told.unpacked(theirs), self._ranks()
            both = f"rank {ranks[self._me]} calls {mine}, rank {ranks[peer]} calls {other}"
            kind = {"send": "receive", "receive": "send"}.get(mine.kind, mine.kind)
            fits = (kind, mine.sent, mine.received, mine.detail)
            if fits != (other.kind, other.received, other.sent, other.detail):
                raise NcclRuleError("order", both)
            if mine.position != other.position:
                raise NcclRuleError("communicators", both)


@contextlib.contextmanager
def _naming(rule: str, why: str) -> Iterator[None]:
    """An error of gloo inside is one of the rule."""
    try:
        yield
    except RuntimeError as error:
        raise NcclRuleError(rule, why) from error


def _operation(opts: Any) -> str:
    """Name of a reduction, which NCCL must have."""
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
