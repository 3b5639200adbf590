"""One communicator's stream: calls are enqueued, checked against other ranks', and carried out in order.

The lower half of :mod:`tests.support.nccl_rules`, whose text says what it is for.
"""

from __future__ import annotations

import contextlib
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
from torch import Tensor

from tests.support.nccl_call import TOLD_BYTES, Call, NcclRuleError, Told, as_bytes, carry_out, overlap

MOVED: Final = {
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip
_TELL, _ANSWER, _DATA = 1, 2, 3  # gloo's tags
_Group: Any = dist.ProcessGroup  # torch's stubs name overloads that a group need not have


class Stream(_Group):  # type: ignore[misc]
    """The calls of one rank in one group.

    Args:
        store: at which the group's ranks meet.
        rank: this rank's place in the group.
        size: of the group.
        timeout: after which a call that others do not join is an error.
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
        first = world if isinstance(world, Stream) else None
        self._positions: Counter[int] = first._positions if first else Counter()
        self._under_way: list[Call] = first._under_way if first else []
        stream = threading.Thread(
            target=carry_out, args=(self._calls, weakref.WeakMethod(self._agree)), daemon=True
        )
        stream.start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def _ended(self, call: Call) -> None:
        """A call was waited for."""
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

    def _message(self, kind: str, tensor: Tensor, peer: int, tag: int) -> dist.Work | None:
        if tag:
            raise NcclRuleError("tags", f"{kind} with tag {tag}")
        self._movable(kind, [tensor])
        if peer == self._me:
            raise NcclRuleError("backend", f"{kind} of rank {peer} to itself")
        if self._grouped is None:
            return self._messages(kind, [(kind, peer, tensor)])
        self._grouped.append((kind, peer, tensor))
        return None

    def _messages(self, name: str, messages: Sequence[tuple[str, int, Tensor]]) -> dist.Work:
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
        return self._enqueue(Call(name, {}, sources, into, carry, self._ended, told))

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
            if tensor.dtype not in MOVED:
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
        """Tell the other ranks of a call what it is, and compare; on the stream.

        Raises:
            NcclRuleError: if one calls something else, or nothing within the time limit.
        """
        ranks, told = self._ranks(), call.messages or list(call.peers.items())
        grouped = call.kind == "batch_isend_irecv"
        if not call.messages or (self._first and grouped):
            # All ranks of the group take part in its first call, which makes the communicator.
            kind = "the group's first call" if call.messages else call.kind
            rule = "creation" if self._first else "order"
            limit = f"which did not call it within {self._limit}, or ended"
            everyone = told if not call.messages else [
                (index, Told(self._position(rank), "creation", 0, 0, ""))
                for index, rank in enumerate(ranks)
                if index != self._me
            ]  # fmt: skip
            self._compare(everyone, rule, lambda _, peer: f"{kind} waited for rank {ranks[peer]}, {limit}")
        if call.messages:
            mine, behind = ranks[self._me], f"{self._calls.qsize()} calls wait behind it on its stream"
            self._compare(
                told,
                "order" if grouped else "grouping",
                lambda one, peer: (
                    f"a {one.kind} between rank {mine} and rank {ranks[peer]} was not matched "
                    f"within {self._limit}; {behind}"
                ),
            )
        self._first = self._first and call.kind in ("send", "receive")  # these make communicators of two

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
