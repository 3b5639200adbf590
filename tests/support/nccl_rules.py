"""A process group with NCCL's rules on CPU tensors: what hangs or is undefined over NCCL raises here.

Backend ``nccl_rules`` of ``torch.distributed`` (:func:`register`); gloo carries the bytes.  Each group is a
communicator with one stream: calls only enqueue, a thread runs them in order, and the caller's tensors hold
poison until ``wait()`` writes the results.  Before its data is sent, ranks announce a call to each other,
so that a difference is named.  :data:`RULES` names where each rule is written.

Stricter than NCCL: sends and receives are only in group calls, at most one of each with a rank, whose answers
are in one call too; and a tensor that one call writes may be in no other call under way.
Not modelled: how far the host runs ahead of a CUDA stream, and speed.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

NAME: Final = "nccl_rules"
_GUIDE: Final = "NCCL user guide"
# Where each rule is written down.
RULES: Final = {
    "order": f"{_GUIDE}, Collective Operations: every rank calls with the same count and datatype, in order",
    "grouping": f"{_GUIDE}, Point-to-point communication and Group Calls: a send or receive blocks until "
    "matched; those that must progress together stand between ncclGroupStart and ncclGroupEnd",
    "communicators": f"{_GUIDE}, Using multiple NCCL communicators concurrently: operations of several "
    "communicators are issued in one order on all ranks",
    "creation": "torch.distributed.batch_isend_irecv: as a group's first call, all its ranks take part",
    "datatype": f"{_GUIDE}, Types: ncclDataType_t and ncclRedOp_t",
    "tags": f"{_GUIDE}, ncclSend: there is no tag, messages of two ranks match in order",
    "contiguous": f"{_GUIDE}, Data Pointers: a buffer is a pointer and a count",
    "in place": f"{_GUIDE}, In-place Operations: a rank's own part of the other buffer, or apart from it",
    "buffer": f"{_GUIDE}, CUDA Stream Semantics: a buffer belongs to the call until the stream has passed it",
    "backend": "torch.distributed, Backends: what NCCL offers",
}
_REDUCED: Final = {
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64,
}  # fmt: skip
_MOVED: Final = _REDUCED | {torch.bool, torch.float8_e4m3fn, torch.float8_e5m2}
_OPERATIONS: Final = {
    "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
}  # fmt: skip
_TELL, _DATA = 1, 2  # gloo's tags
_ANNOUNCED_BYTES: Final = 256  # of what a rank announces to another before a call
_POISON: Final = 0xA5


class NcclRuleError(RuntimeError):
    """A call that NCCL would not carry out as meant; the message begins with the rule of :data:`RULES`."""

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(f"{rule}: {reason} [{RULES[rule]}]")
        self.rule = rule


class Announced(NamedTuple):
    """What a rank announces of a call to another rank; both must agree."""

    kind: str  # name of the collective
    sent: int  # bytes to that rank
    received: int  # bytes from it
    detail: str  # element type, root and operation
    position: int = 0  # of a collective among all that these two ranks take part in, over all communicators


@dataclass(slots=True, eq=False)
class Call(dist.Work):
    """A call under way, and the handle with which its caller waits."""

    kind: str
    sources: list[Tensor]  # that it reads
    destinations: list[Tensor]  # that it writes, at :meth:`wait`
    sent: dict[int, Tensor]  # bytes for each rank of the group that takes part
    finish: Callable[[dict[int, Tensor]], Sequence[Tensor]]  # of rows by rank: bytes of the destinations
    announced: dict[int, Announced]  # to the other ranks, in their order
    carried: Future[Sequence[Tensor]] = field(default_factory=Future)
    delivered: bool = False
    _read: list[Tensor] = field(default_factory=list)  # sources as they were posted

    def __post_init__(self) -> None:
        dist.Work.__init__(self)
        for tensor in self.sources + self.destinations:
            if tensor.dtype not in _MOVED:
                raise NcclRuleError("datatype", f"{self.kind} of {tensor.dtype}")
        self._read = [source.clone() for source in self.sources]
        self.sent = {rank: part.clone() for rank, part in self.sent.items()}
        for target in self.destinations:
            if not any(overlap(target, source) for source in self.sources):
                as_bytes(target).fill_(_POISON)

    def is_completed(self) -> bool:
        return self.carried.done()

    def wait(self, timeout: timedelta | None = None) -> bool:  # the group's holds
        """Wait until the stream has passed it, and write its results, or raise its error."""
        brought = self.carried.result()
        if not self.delivered:
            self.delivered = True
            for source, posted in zip(self.sources, self._read, strict=True):
                separate = not any(overlap(source, target) for target in self.destinations)
                if separate and not torch.equal(as_bytes(source), as_bytes(posted)):
                    raise NcclRuleError("buffer", f"what {self.kind} sends was written before its wait()")
            for target, value in zip(self.destinations, brought, strict=True):
                as_bytes(target).copy_(as_bytes(value))
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self.wait()
        future.set_result(self.destinations)
        return future


_Group: Any = dist.ProcessGroup  # torch's stubs name overloads that a group need not have


class Communicator(_Group):  # type: ignore[misc]
    """A group with NCCL's rules, made by torch; a call not joined within ``timeout`` is an error."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        self._me, self._size, self._limit = rank, size, timeout
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._rule = "creation"  # the rule that the next call breaks if it is late
        self._failed: BaseException | None = None
        self._stream = ThreadPoolExecutor(1)
        world = dist.group.WORLD
        # Shared by all groups: calls that this rank posted with each other rank, and those under way.
        first = world if isinstance(world, Communicator) else None
        self._positions: Counter[int] = first._positions if first else Counter()
        self._under_way: list[Call] = first._under_way if first else []

    # Methods that torch requires of a group.

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
        operation = _operation(opts, tensor)
        sent = [as_bytes(tensor)] * self._size
        finish = functools.partial(_reduced, operation, tensor.dtype)
        return self._collective("all_reduce", tensor, [tensor], sent, finish, detail=operation)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (tensor,), root = tensors, opts.rootRank
        none = torch.empty(0, dtype=torch.uint8)
        sent = [as_bytes(tensor) if self._me == root else none] * self._size
        come = [tensor.nbytes if rank == root else 0 for rank in range(self._size)]
        detail = f"from {root}"
        return self._collective(
            "broadcast", tensor, [tensor], sent, lambda rows: [rows[root]], received=come, detail=detail
        )

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """Into one tensor, in rank order; ``source`` may be this rank's part of it."""
        self._whole("all_gather", whole=output, part=source)
        sent = [as_bytes(source)] * self._size
        return self._collective("all_gather", source, [output], sent, _joined)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Several of :meth:`all_gather_single` in one call."""
        for output, source in zip(outputs, sources, strict=True):
            self._whole("all_gather", whole=output, part=source)
        sizes = [source.nbytes for source in sources]

        def finish(rows: dict[int, Tensor]) -> list[Tensor]:
            parts = [row.split(sizes) for row in rows.values()]
            return [torch.cat(of_ranks) for of_ranks in zip(*parts, strict=True)]

        sent = [torch.cat(list(map(as_bytes, sources)))] * self._size
        return self._collective(f"all_gather of {sizes}", sources[0], outputs, sent, finish, more=sources[1:])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        (rows,), (source,) = outputs, inputs
        if {row.numel() for row in rows} != {source.numel()}:
            raise NcclRuleError("order", f"all_gather of {source.numel()} elements into rows of other sizes")
        sent = [as_bytes(source)] * self._size
        return self._collective("all_gather", source, rows, sent, lambda got: list(got.values()))

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """Of one tensor, in rank order; ``output`` may be this rank's part of it."""
        operation = _operation(opts, source)
        self._whole("reduce_scatter", whole=source, part=output)
        sent = list(as_bytes(source).chunk(self._size))
        finish = functools.partial(_reduced, operation, source.dtype)
        return self._collective("reduce_scatter", source, [output], sent, finish, detail=operation)

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        received: list[int] | None = None,
        sent: list[int] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        """One part to each rank; ``received`` and ``sent`` count rows by rank, equal parts if empty."""
        if overlap(output, source):
            raise NcclRuleError("in place", "all_to_all between tensors that overlap")
        sizes = [part.nbytes for part in self._parts(output, received)]
        parts = self._parts(source, sent)
        return self._collective("all_to_all", source, [output], parts, _joined, received=sizes)

    def barrier(self, opts: Any = None) -> dist.Work:
        """By the CPU's backend, as beside NCCL, so it does not make the communicator."""
        return self._gloo.barrier()  # type: ignore[no-any-return]

    # Point to point: only in group calls.

    def send(self, tensors: list[Tensor], to: int, tag: int) -> None:
        raise NcclRuleError("tags" if tag else "grouping", f"send to rank {to}, tag {tag}, in no group call")

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> None:
        raise NcclRuleError("tags" if tag else "grouping", f"receive from rank {source}, in no group call")

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        raise NcclRuleError("backend", "a receive from any rank")

    def grouped(self, operations: list[dist.P2POp]) -> dist.Work:
        """Sends and receives in one call."""
        sends, receives = (
            {p.group_peer: p.tensor for p in operations if p.op is kind} for kind in (dist.isend, dist.irecv)
        )
        if len(sends) + len(receives) < len(operations) or any(p.tag for p in operations):
            raise NcclRuleError("tags", "messages with tags, or several of one direction between two ranks")
        announced, none, kind = {}, torch.empty(0, dtype=torch.uint8), "batch_isend_irecv"
        for peer in sorted(sends | receives):
            source, target = sends.get(peer, none), receives.get(peer, none)
            types = sorted({str(x.dtype) for x in (source, target) if x is not none})
            announced[peer] = Announced(kind, source.nbytes, target.nbytes, ", ".join(types))
        rows = {peer: as_bytes(sends.get(peer, none)) for peer in announced}
        tensors = list(sends.values()), list(receives.values())
        return self._enqueue(Call(kind, *tensors, rows, lambda got: [got[p] for p in receives], announced))

    # As torch 2.11 calls them.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    # The stream.

    @functools.cached_property
    def _ranks(self) -> list[int]:
        """Global ranks of the group; first read by the rank's own thread."""
        return dist.get_process_group_ranks(self)

    def _collective(
        self,
        kind: str,
        source: Tensor,
        outputs: list[Tensor],
        sent: list[Tensor],
        finish: Callable[[dict[int, Tensor]], Sequence[Tensor]],
        *,
        received: Sequence[int] | None = None,  # bytes from each rank; as sent to it by default
        detail: str = "",
        more: Sequence[Tensor] = (),  # that the call reads besides ``source``
    ) -> dist.Work:
        received = received or [part.nbytes for part in sent]
        detail = f"{source.dtype} {detail}".removeprefix("torch.").rstrip()
        announced = {}
        for index, rank in enumerate(self._ranks):
            self._positions[rank] += 1
            if index != self._me:
                sizes = sent[index].nbytes, received[index]
                announced[index] = Announced(kind, *sizes, detail, self._positions[rank])
        return self._enqueue(Call(kind, [source, *more], outputs, dict(enumerate(sent)), finish, announced))

    def _enqueue(self, call: Call) -> dist.Work:
        self._under_way[:] = [other for other in self._under_way if not other.delivered]
        for other in self._under_way:
            pairs = [
                *itertools.product(call.destinations, other.destinations + other.sources),
                *itertools.product(call.sources, other.destinations),
            ]
            if any(overlap(x, y) for x, y in pairs):
                reason = f"{call.kind} uses a tensor of {other.kind}, not yet waited for"
                raise NcclRuleError("buffer", reason)
        self._under_way.append(call)
        _ = self._ranks
        call.carried = self._stream.submit(self._carry, call)
        return call

    def _carry(self, call: Call) -> Sequence[Tensor]:
        """On the stream, unless an earlier call failed: agree with the other ranks, then move the data."""
        if self._failed is not None:
            raise self._failed
        try:
            rule, self._rule = self._rule, "order"
            others = [rank for rank in range(self._size) if rank != self._me]
            if rule == "creation" and len(call.announced) < len(others):  # makes the communicator: all call
                self._agree(dict.fromkeys(others, Announced("the group's first call", 0, 0, "")), rule)
            self._agree(call.announced, rule)
            rows = dict(call.sent)
            sizes = {peer: announced.received for peer, announced in call.announced.items()}
            received = {peer: torch.empty(size, dtype=torch.uint8) for peer, size in sizes.items()}
            works = [self._gloo.recv([row], peer, _DATA) for peer, row in received.items() if row.numel()]
            works += [self._gloo.send([rows[peer]], peer, _DATA) for peer in received if rows[peer].numel()]
            for work in works:
                work.wait(self._limit)
            return call.finish(rows | received)
        except BaseException as error:
            self._failed = error
            raise

    def _agree(self, announced: Mapping[int, Announced], rule: str) -> None:
        """Exchange announcements with each rank, lower ones first; raise if two differ, or one is late."""
        answers = {}
        for peer, local in announced.items():
            text = bytearray(json.dumps(local).encode().ljust(_ANNOUNCED_BYTES))
            remote = torch.empty(_ANNOUNCED_BYTES, dtype=torch.uint8)
            try:
                send = self._gloo.send([torch.frombuffer(text, dtype=torch.uint8)], peer, _TELL)
                for work in (send, self._gloo.recv([remote], peer, _TELL)):
                    work.wait(self._limit)
            except RuntimeError as error:
                limit = f"which did not call it within {self._limit}, or ended"
                reason = f"{local.kind} waited for rank {self._ranks[peer]}, {limit}"
                raise NcclRuleError(rule, reason) from error
            answers[peer] = Announced(*json.loads(bytes(remote.tolist())))
        for peer, remote in answers.items():
            local = announced[peer]
            calls = f"rank {self._ranks[self._me]} calls {local}, rank {self._ranks[peer]} calls {remote}"
            if remote[:4] != (local.kind, local.received, local.sent, local.detail):
                raise NcclRuleError("order", calls)
            if local.position != remote.position:
                raise NcclRuleError("communicators", calls)

    # Checks at the call.

    def _parts(self, tensor: Tensor, rows: list[int] | None) -> list[Tensor]:
        """Its rows by rank, as bytes."""
        counts = rows or [tensor.shape[0] // self._size] * self._size
        if sum(counts) != tensor.shape[0]:
            raise NcclRuleError("order", f"all_to_all of {tensor.shape[0]} rows in parts {counts}")
        return list(map(as_bytes, tensor.split(counts)))

    def _whole(self, kind: str, *, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != self._size * part.numel():
            sizes = f"{whole.numel()} elements with parts of {part.numel()}"
            raise NcclRuleError("order", f"{kind} of {sizes} on {self._size} ranks")
        place = whole.data_ptr() + self._me * part.nbytes
        if overlap(whole, part) and part.data_ptr() != place:
            raise NcclRuleError("in place", f"{kind}: rank {self._me}'s part lies elsewhere in the whole")


def as_bytes(tensor: Tensor) -> Tensor:
    """(bytes,) uint8 view of a tensor, which must be contiguous."""
    if not tensor.is_contiguous():
        raise NcclRuleError("contiguous", f"{tuple(tensor.shape)} elements with strides {tensor.stride()}")
    return tensor.reshape(-1).view(torch.uint8)


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether the memory of two contiguous tensors overlaps."""
    first, begin = x.data_ptr(), y.data_ptr()
    return first < begin + y.nbytes and begin < first + x.nbytes


def _joined(rows: dict[int, Tensor]) -> list[Tensor]:
    return [torch.cat(list(rows.values()))]


def _operation(opts: Any, tensor: Tensor) -> str:
    """Name of a reduction, which NCCL must have for this tensor's type."""
    operation = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    name = str(getattr(operation, "op", operation)).rpartition(".")[2]
    if name not in _OPERATIONS or tensor.dtype not in _REDUCED:
        raise NcclRuleError("datatype", f"reduction {name} of {tensor.dtype}")
    return name


def _reduced(operation: str, dtype: torch.dtype, rows: dict[int, Tensor]) -> list[Tensor]:
    """In rank order."""
    total = functools.reduce(_OPERATIONS[operation], (rows[rank].view(dtype) for rank in sorted(rows)))
    return [total / len(rows) if operation == "AVG" else total]


def _batch_isend_irecv(operations: list[dist.P2POp]) -> list[dist.Work]:
    """As torch's, which groups messages only for its own class of groups."""
    group: Any = operations[0].group or dist.group.WORLD
    return [group.grouped(operations)] if isinstance(group, Communicator) else _torch_batch(operations)


_torch_batch: Final = c10d.batch_isend_irecv


def register() -> None:
    """Make the backend known to ``torch.distributed``; again does nothing."""
    if NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, Communicator, devices=["cpu"])
    dist.batch_isend_irecv = c10d.batch_isend_irecv = _batch_isend_irecv  # type: ignore[assignment]
