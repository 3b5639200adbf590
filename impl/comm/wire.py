"""Sends messages along the axes of a mesh, and books every byte in a ledger.

All messages of the engine go through a :class:`Wire`.  A wire has one of three transports:

* ``backend`` hands messages to torch.distributed (gloo or NCCL), or to the other threads if the ranks are threads
  of one process (:mod:`impl.transport.threads`);
* ``shm`` lets the ranks of a node read each other's memory (:mod:`impl.transport.shared_memory`), and uses the
  backend between nodes;
* ``staged`` sends tensors of a GPU with gloo through host memory, so that several ranks may share a GPU.

An *exchange* is one collective of a group of ranks.  A rank starts an exchange by calling a method such as
:meth:`Wire.all_gather`.  The method logs the exchange, and returns it with the memory for the rank's message.  If a
rank does not take part in an exchange, the other ranks raise a :class:`WireError` that says what each rank was waiting
for.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from impl.codecs.codec import Codec
from impl.comm import exchanges
from impl.comm.exchanges import Exchange, Pacer
from impl.comm.hang_monitor import HangMonitor, OnHang, end_process
from impl.comm.ledger import Ledger, Timeline
from impl.comm.mesh import AnyMesh, Mesh
from impl.comm.watchdog import DIFFER, ORDER_CHECK, Watchdog, WireError
from impl.plan.hops import Kind
from impl.plan.owners import Sizes
from impl.plan.traffic import LedgerKey, Purpose, Tag, destinations, uneven
from impl.policy.topology import Axis, ranks_in_words
from impl.transport import shared_memory, threads
from impl.transport.group import Group
from impl.transport.shared_memory import patience
from impl.transport.side_stream import Arrival, SideStream

TIMEOUT_SECONDS: Final = 120.0
# NCCL's own time-out is this many times as long as the wire's.  NCCL counts from the moment at which an exchange is
# enqueued, which may be a whole step before the exchange starts.  NCCL's time-out thus ends the process only if the
# hang monitor, which counts from the last exchange that completed, has failed to do so.
NCCL_TIMES: Final = 5
Transport = Literal["backend", "shm", "staged"]
# For an all-to-all whose messages differ in length: the bytes of its messages, and a text on which ranks must agree.
Lengths = tuple[Sizes, str]
_OF_PASSES: Final = ("weights", "persistent", "gradients")  # purposes of the messages in every pass


class EncodedHop(NamedTuple):
    """Describes a hop, one exchange of a reduction, to an :class:`Observer`."""

    number: int  # from 0; in a ring each step is a hop
    axis: str  # the name of the hop's axis; for a gather of means, the names of all its axes, joined by +
    codec: Codec


class Observer:
    """Base class of objects that look at one rank's gradients, and at their encoding, while the gradients are reduced.

    A reduction calls the methods of its wire's observer (:meth:`Wire.observed`).  The methods of this class do nothing.
    A subclass must not change the tensors that it is given.  If it keeps a tensor, it must keep a copy.
    """

    def local(self, unit: str, gradient: Tensor) -> None:
        """Called when a reduction of ``unit`` begins.

        ``gradient`` (P,) is this rank's gradient of the whole unit, before error feedback adds its errors.
        """

    def encoded(self, unit: str, hop: EncodedHop, values: Tensor, frames: Tensor | None) -> None:
        """Called before the message of a hop (one exchange of a reduction) is sent.

        ``values`` (..., n) are the values that are sent.  Depending on the hop, they are the gradient, a sum of
        gradients, or the mean of the part that this rank sums.  They include the errors that error feedback adds.
        ``frames`` (..., F) uint8 are the encoded values, or None if the values are sent without encoding.
        """

    def averaged(self, unit: str, start: int, mean: Tensor) -> None:
        """Called when a reduction of ``unit`` has ended.

        ``mean`` (n,) fp32 is the mean gradient of elements [start, start + n) of the unit.  Each element of the unit is
        reported on exactly one rank.
        """


class Wire:
    """Sends messages along the axes of a mesh, and counts their bytes in a ledger.

    Args:
        mesh: the ranks, in any form that :meth:`Mesh.of` accepts.
        transport: how messages are carried: ``backend``, ``shm`` or ``staged`` (:mod:`impl.comm.wire`).  Messages
            between nodes never use ``shm``.
        pacer: models a link between nodes that is slower than the machine's.
        timeout: seconds that a rank waits for the other ranks' messages.  After this time, if the host waits for
            messages, a :class:`WireError` is raised.  If a GPU's stream waits for messages (NCCL), the error is passed
            to ``on_hang`` instead.
        on_hang: a function that is called with the error, in a thread of its own.  The default function prints the
            error and ends the process with status 1.

    Raises:
        WireError: if the arguments do not fit together:

            - ``transport`` is ``shm``, but the mesh is on GPUs;
            - ``pacer`` is given, but messages go over NCCL, where the host cannot delay them;
            - the ranks are threads, but ``pacer`` is given;
            - the ranks are threads, but ``transport`` is not ``backend``.
    """

    def __init__(
        self,
        mesh: AnyMesh,
        *,
        transport: Transport = "backend",
        pacer: Pacer | None = None,
        timeout: float = TIMEOUT_SECONDS,
        on_hang: OnHang = end_process,
    ) -> None:
        self.mesh = mesh = Mesh.of(mesh)
        if mesh.thread is not None and transport != "backend":
            raise WireError(
                f"transport {transport!r} joins processes, but the ranks are threads of one process: leave "
                "transport= out"
            )
        if mesh.thread is not None and pacer is not None:
            raise WireError(
                "a pacer delays messages, but ranks that are threads run one at a time, so that measured times say "
                "nothing about a link: leave pacer= out"
            )
        if transport == "shm" and mesh.device.type != "cpu":
            raise WireError(
                f"transport 'shm' exchanges CPU memory, but the mesh is on {mesh.device}: use 'backend' or 'staged'"
            )
        # Whether a GPU's stream waits for messages.
        self.streams = streams = waits_on_streams(mesh, transport)
        if streams and pacer is not None:
            raise WireError(
                "pacer= delays messages on the host, but with NCCL the host does not wait for messages: use transport "
                "'staged', or leave pacer= out"
            )
        self.transport = transport
        self.ledger = Ledger()
        self.observer: Observer | None = None  # observes reductions, if it is set
        self._pacer, self._timeout = pacer, timeout
        self._watchdog = Watchdog(mesh, streams=streams)
        self._monitor = HangMonitor(self._watchdog, timeout, on_hang) if streams else None
        self._group_timeout = timedelta(seconds=NCCL_TIMES * timeout) if streams else None
        self._buffers = exchanges.Buffers(mesh.device, streams=streams)
        # Buffers for messages other than weights and gradients.  On a GPU they are not kept for later messages, since a
        # checkpoint's messages are large and rare.
        self._others = exchanges.Buffers(mesh.device, keep=not streams)
        # The streams for the hops after the first of gathers and reductions; None if the host waits for messages.
        self.gathers = SideStream(mesh.device) if streams else None
        self.reductions = SideStream(mesh.device) if streams else None
        self._host_buffers = exchanges.Buffers(torch.device("cpu")) if transport == "staged" else None
        self._arenas: dict[Axis, exchanges.Arena] = {}
        self._used: dict[str, set[str]] = {}  # for each axis, what has carried its messages
        # The key is (kind of exchange, axis, bytes, tag, whether it is part of a ring, lengths of uneven messages).
        self._routes: dict[tuple[Kind, Axis, int, Tag, bool, Lengths | None], exchanges.Route] = {}

    @property
    def exposed_seconds(self) -> float:
        """Seconds that this rank has waited for messages.

        If a GPU's stream waits for messages, synchronise the device before you read this property.  The stream's waits
        are counted only after the first reading of this property or the first call of :meth:`mark_exposed`, because
        timing a wait costs the host time.
        """
        return self._watchdog.exposed_seconds

    @property
    def carried(self) -> int:
        """Bytes that this rank has sent to other ranks, as the transports count them, independently of the ledger."""
        return self._watchdog.carried

    def mark_exposed(self) -> Callable[[], float]:
        """Return a function that returns the exposed seconds up to this call of ``mark_exposed()``.

        Exposed seconds are those in which this rank has waited for messages (:attr:`exposed_seconds`).

        ``mark_exposed()`` does not wait for a GPU.  If a stream of the GPU waits for messages, as with NCCL, call the
        returned function only after the GPU has executed everything that was queued before ``mark_exposed()``.
        """
        return self._watchdog.mark_exposed()

    @property
    def message_bytes(self) -> int:
        """Bytes of the buffers for messages of weights and gradients, both those in use and those kept for later use.

        :mod:`impl.plan.messages` predicts these bytes for a GPU whose stream waits for messages.
        """
        return self._buffers.held

    @contextlib.contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Context for the body of a public ``call``, such as ``save()``, that all ranks must make.

        If an exchange inside the context fails, the error names the call.  The call also becomes part of the
        fingerprint by which ranks compare their exchanges.  Therefore ranks that have made different calls are found to
        differ, even if their exchanges are alike.  If contexts are nested, only the outermost call counts.
        """
        log = self._watchdog.collective_log
        before = log.call
        if not before:
            log.call, log.before_call = call, log.count
        try:
            yield
        finally:
            log.call = before

    def meet(self, purpose: str) -> None:
        """Wait until all ranks have called this method for ``purpose``.

        Call it before operations of torch, or of the ranks' store, that wait for half an hour if a rank is missing.

        Raises:
            WireError: if a rank has not called it within the wire's timeout; the message names the missing ranks.
                Thread ranks have no timeout: they raise the error when no rank can go on.
        """
        self._watchdog.meet(purpose, self._timeout)

    def group(self, axis: Axis) -> Group:
        """Return this rank's group along ``axis``.

        The first call makes the group, and all ranks of the mesh must make this call.
        """
        if not self.mesh.has_group(axis):
            apart = f", stride {axis.stride}" if axis.stride > 1 else ""
            self.meet(f"the making of groups along {axis.name} ({axis.size} ranks{apart})")
        return self.mesh.group(axis, self._group_timeout)

    def make_groups(self, axes: Iterable[Axis]) -> None:
        """Make the groups along ``axes`` now, so that later no rank makes a group while others wait for its message."""
        for axis in axes:
            self.group(axis)

    @contextlib.contextmanager
    def beside(self, stream: SideStream, *, posted: bool = False) -> Iterator[Arrival]:
        """Context whose body posts messages, waits for them and decodes them on the side stream ``stream``.

        Yields an :class:`Arrival`, which marks the end of this work.  With NCCL, waiting for a message blocks the
        stream and not the host.  Therefore the host can enqueue all later hops as soon as the first hop is posted.

        Pass ``posted=True`` if the body begins by waiting for messages that were just posted on the current stream.
        """
        self._watchdog.paused = True
        try:
            with stream.beside(posted=posted) as arrival:
                self._buffers.arrival = arrival
                yield arrival
        finally:
            self._watchdog.paused, self._buffers.arrival = False, None

    @contextlib.contextmanager
    def on_current_stream(self) -> Iterator[None]:
        """Context whose body posts messages, waits for them and decodes them on the current stream, whichever it is.

        It is for FSDP2, which calls collectives on streams of its own.  A message buffer may have been used last on
        another stream.  Therefore, before the body uses a buffer again, the current stream always waits until the last
        use has ended.  Waits for messages do not count as exposed.  If the host waits for messages, this context
        changes nothing.
        """
        if not self.streams:
            yield
            return
        arrival = Arrival()
        self._watchdog.paused, self._buffers.arrival = True, arrival
        try:
            yield
        finally:
            arrival.event = torch.cuda.current_stream(self.mesh.device).record_event()
            self._watchdog.paused, self._buffers.arrival = False, None

    def join(self, arrival: Arrival) -> None:
        """Make the current stream wait for ``arrival``, the end of work on a side stream.

        The wait counts as exposed.
        """
        self._watchdog.join(arrival)

    @contextlib.contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Context in which reductions call the methods of ``observer`` with their gradients, messages and means.

        Messages that are sent inside the context do not count.  They are booked in a temporary ledger, which replaces
        the attribute ``ledger`` until the context is left.
        """
        before = self.ledger, self.observer
        self.ledger, self.observer = Ledger(), observer
        try:
            yield
        finally:
            self.ledger, self.observer = before

    @contextlib.contextmanager
    def traced(self, timeline: Timeline) -> Iterator[None]:
        """Context in which ``timeline`` records all messages and waits."""
        self._watchdog.timeline = timeline
        try:
            yield
        finally:
            self._watchdog.timeline = None

    def all_gather(
        self,
        axis: Axis,
        nbytes: int,
        tag: Tag,
        *,
        ring: bool = False,
        into: Tensor | None = None,
        in_line: bool = False,
    ) -> Exchange:
        """Start an exchange in which every rank of the axis receives every rank's message.

        The caller writes its message to ``send`` of the returned exchange, and then calls ``post()`` and ``wait()``.

        Args:
            axis: the axis along which ranks exchange.
            nbytes: bytes of one rank's message.
            tag: the phase, purpose and unit under which the ledger books the messages.
            ring: whether gloo uses its own all-gather, in place of one send to each rank; NCCL always uses its own.  If
                True, the ledger books the bytes of a ring.
            into: memory (ranks * nbytes,) uint8 in which to receive the messages.  A transport that cannot receive in
                given memory ignores it.
            in_line: pass True if the caller waits for the messages as soon as they are posted.  An exchange that is
                posted on a side stream of a GPU then runs on this stream, and the host records fewer events.
        """
        return self._exchange("all_gather", axis, nbytes, tag, ring=ring, into=into, in_line=in_line)

    def all_to_all(self, axis: Axis, nbytes: int, tag: Tag, *, in_line: bool = False) -> Exchange:
        """Start an exchange in which every rank of the axis sends a different row of ``nbytes`` bytes to each rank.

        The ledger books the messages under ``tag``.  Pass ``in_line=True`` if the caller waits for the messages as soon
        as they are posted (:meth:`all_gather`).
        """
        return self._exchange("all_to_all", axis, nbytes, tag, in_line=in_line)

    def uneven_all_to_all(self, axis: Axis, sizes: Sizes, tag: Tag, mark: str = "") -> Exchange:
        """Start an all-to-all whose messages differ in length; its messages are read with :meth:`Exchange.parts`.

        Messages of 0 bytes are not sent, and not booked.

        Args:
            axis: the axis along which ranks exchange.
            sizes: ``sizes[i][j]`` is the bytes of the message from the i-th to the j-th rank of a group.  All ranks of
                the group pass the same sizes.  A rank writes its messages to ``send`` one after the other.
            tag: the phase, purpose and unit under which the ledger books the messages.
            mark: a text on which all ranks of the group must agree; it becomes part of the exchange's fingerprint.
        """
        return self._exchange("all_to_all", axis, sum(map(sum, sizes)), tag, lengths=(sizes, mark))

    def shift(self, axis: Axis, nbytes: int, tag: Tag, *, in_line: bool = False) -> Exchange:
        """Start one step of a ring, in which every rank of the axis sends ``nbytes`` bytes to the next rank.

        The ledger books the messages under ``tag``.  Pass ``in_line=True`` if the caller waits for the messages as soon
        as they are posted (:meth:`all_gather`).
        """
        return self._exchange("shift", axis, nbytes, tag, in_line=in_line)

    def all_gather_small(
        self, row: Tensor, purpose: Purpose = "control", axes: Sequence[Axis] | None = None
    ) -> Tensor:
        """Gather every rank's ``row`` (n,), of any type and layout, and return all rows; all ranks must call it.

        Rows are gathered along each of ``axes`` in turn, by default along the axis of all ranks.  The ledger books the
        messages under ``purpose``.

        Returns (ranks, n) of the row's type.  Along a single axis, the rows are in rank order.  Along several axes, the
        rank along the first axis varies fastest.  All ranks whose rows are in the result get the same result.
        """
        rows = row.detach().resolve_conj().resolve_neg().contiguous().view(torch.uint8).view(1, -1)
        for axis in (self.mesh.topology.world_axis,) if axes is None else axes:
            exchange = self.all_gather(axis, rows.numel(), Tag("step", purpose))
            exchange.send.copy_(rows.view(-1))
            exchange.post()
            received = exchange.wait().clone(memory_format=torch.contiguous_format)
            rows = received.view(axis.size * len(rows), rows.shape[1])  # (ranks so far, bytes)
            exchange.close()
        return rows.view(row.dtype)

    def check_order(self) -> None:
        """Raise a WireError if the ranks have started different exchanges so far; all ranks must call it.

        The ranks compare the number of their exchanges, and a hash of these exchanges in their order.
        """
        log = self._watchdog.collective_log
        order = torch.tensor([log.count, log.fingerprint], dtype=torch.uint64, device=self.mesh.device)
        alike = defaultdict[str, list[int]](list)  # count and fingerprint -> the ranks that have these
        with self.calling(ORDER_CHECK):
            orders = self.all_gather_small(order).tolist()
        for rank, (count, mark) in enumerate(orders):
            alike[f"started {count} exchanges (fingerprint {mark:016x})"].append(rank)
        if len(alike) > 1:
            texts = [f"{ranks_in_words(ranks)} {opened}" for opened, ranks in alike.items()]
            raise self._watchdog.error(DIFFER, ", ".join(texts))

    def describe(self) -> dict[str, str]:
        """Return how messages have been sent along each axis, such as ``{"node": "gloo point to point"}``.

        The keys are the names of the axes.  Control messages have entries of their own, such as ``world (control)``.
        """
        return {name: ", ".join(sorted(used)) for name, used in self._used.items()}

    def close(self) -> None:
        """Drop shared memory and buffers, and report in the ranks' store that this rank's wire is closed."""
        self._watchdog.close()
        if self._monitor is not None:
            self._monitor.close()
        self._arenas.clear()
        self._buffers.clear()
        self._others.clear()
        if self._host_buffers is not None:
            self._host_buffers.clear()

    def shares_memory(self, axis: Axis) -> bool:
        """Return whether the ranks along ``axis`` read each other's messages in memory that they share.

        Between processes this does not hold for the steps of a ring (:meth:`shift`).  If there is a single rank along
        ``axis``, the result is False.
        """
        group = self.group(axis)
        shared = self.mesh.thread is not None or (self.transport == "shm" and group.same_node)
        return shared and group.size > 1

    def lets_go(self, axis: Axis) -> bool:
        """Return whether messages along ``axis`` can be received in memory that the caller frees right after the wait.

        The caller gives such memory as ``into`` of :meth:`all_gather`.  The memory is free only when the transport,
        too, has dropped its references to the memory.  The result is:

        - gloo: True.  Gloo drops its references when the wait for the messages ends.  If gloo's own thread drops them,
          this may happen some milliseconds later.
        - NCCL: False, since NCCL may keep references for longer.
        - thread ranks, ``shm`` inside a node, and ``staged``: False, since messages are not received in the caller's
          memory.
        """
        gloo = self.group(axis).backend(self.mesh.device.type) == "gloo"
        return gloo and self.transport != "staged" and not self.shares_memory(axis)

    def _exchange(
        self,
        kind: Kind,
        axis: Axis,
        nbytes: int,
        tag: Tag,
        *,
        ring: bool = False,
        into: Tensor | None = None,
        in_line: bool = False,
        lengths: Lengths | None = None,
    ) -> Exchange:
        """Log an exchange of this rank, book its bytes, and return it with the memory of its messages.

        If ``lengths`` is given, messages differ in length, and ``nbytes`` is the sum of their bytes.
        :meth:`all_gather` explains the other arguments.
        """
        buffers = self._buffers if tag.purpose in _OF_PASSES else self._others
        if axis.size == 1:
            return exchanges.Alone(buffers, nbytes)
        key = (kind, axis, nbytes, tag, ring, lengths)
        route = self._routes.get(key)
        if route is None:
            route = self._route(kind, axis, nbytes, tag, ring=ring)
            route = self._routes[key] = (
                route if lengths is None else self._uneven_route(route, axis, tag, lengths)
            )
        step = self._watchdog.collective_log.open(route.operation)
        for booked, sent, messages in route.booked:
            row = self.ledger.booked[booked]
            row[0] += sent
            row[1] += messages
        dog, pacer = self._watchdog, self._pacer
        if route.shared:
            arena = self._arenas.get(axis)
            if arena is None or arena.row_bytes < route.sent_bytes:  # true on all ranks of the axis at once
                arena = self._arenas[axis] = self._watchdog.wait(step, partial(self._arena, route))
            return exchanges.InMemory(dog, step, route, arena)
        if self._host_buffers is None:
            return exchanges.Distributed(
                dog, step, route, buffers, into=into, pacer=pacer, monitor=self._monitor, in_line=in_line
            )
        host = exchanges.Distributed(dog, step, route, self._host_buffers, into=None, pacer=pacer)
        return exchanges.Staged(host, route, buffers)

    def _arena(self, route: exchanges.Route) -> exchanges.Arena:
        """Make the arena: the memory in which the ranks of a route's group read each other's messages."""
        if self.mesh.thread is not None:
            return threads.Arena(self.mesh.thread, route.group.ranks, route.group.index)
        with torch.inference_mode(mode=False):  # the arena will outlive a pass in inference mode
            return shared_memory.Arena(route.sent_bytes, route.group, self._timeout)

    def _route(self, kind: Kind, axis: Axis, nbytes: int, tag: Tag, *, ring: bool) -> exchanges.Route:
        """Compute the route of messages: how messages of this kind, axis, size and tag are carried and booked.

        ``ring`` says whether gloo all-gathers along a ring (:meth:`all_gather`).

        The method also notes what carries these messages, for :meth:`describe`.
        """
        group, steps = self.group(axis), kind == "shift"
        carried = "cpu" if self.transport == "staged" else self.mesh.device.type
        backend = group.backend(carried)
        shared = self.shares_memory(axis) and (backend == "threads" or not steps)
        direct = backend == "gloo" and not ring
        carrier = (
            "shm" if shared and backend != "threads" else f"{backend} point to point" if direct else backend
        )
        carrier += " through host memory" if self.transport == "staged" else ""
        name = f"{axis.name} (control)" if tag.purpose == "control" else axis.name
        self._used.setdefault(name, set()).add(carrier)
        counts = destinations(self.mesh.topology, axis, self.mesh.rank, ring=ring or steps)
        if steps:  # a shift is one step of a ring, and destinations() counts all steps
            counts = {link: min(count, 1) for link, count in counts.items()}
        parts, receivers = axis.size if kind == "all_to_all" else 1, 1 if steps else axis.size - 1
        sent_bytes, rows = nbytes * parts, 1 if steps else axis.size
        return exchanges.Route(
            operation=(kind, axis.name, axis.size, axis.stride, nbytes, *tag, ring),
            group=group,
            kind=kind,
            nbytes=nbytes,
            sent_bytes=sent_bytes,
            rows=rows,
            parts=parts,
            receivers=receivers,
            shared=shared,
            direct=direct,
            in_place=kind == "all_gather" and (direct or backend != "gloo"),  # gloo's own all-gather copies
            limit=patience(backend, timedelta(seconds=self._timeout)),
            booked=tuple(
                (LedgerKey(*tag, axis.name, link), count * nbytes, count) for link, count in counts.items()
            ),
            inter_bytes=counts.get("inter", 0) * nbytes,
            payload=sent_bytes // parts * receivers,
            shape=(rows, -1),
        )

    def _uneven_route(self, even: exchanges.Route, axis: Axis, tag: Tag, lengths: Lengths) -> exchanges.Route:
        """Compute the route of an all-to-all whose messages have different ``lengths``: how it is carried and booked.

        ``even`` is the route of an all-to-all with messages of equal length along the same axis.
        """
        (sizes, mark), me = lengths, self.group(axis).index
        sent = uneven(self.mesh.topology, axis, self.mesh.rank, sizes[me])
        splits = exchanges.Splits(
            come=[row[me] for row in sizes], go=list(sizes[me]), starts=[sum(row[:me]) for row in sizes]
        )
        return replace(
            even,
            operation=(*even.operation[:-2], mark, False),  # the mark stands where the tag's unit is
            # In shared memory all rows have the length of the longest.
            sent_bytes=max(map(sum, sizes)) if even.shared else sum(splits.go),
            booked=tuple((LedgerKey(*tag, axis.name, link), *each) for link, each in sent.items()),
            inter_bytes=sent["inter"].bytes if "inter" in sent else 0,
            payload=sum(splits.go) - splits.go[me],
            shape=(-1,),
            splits=splits,
        )


def wire_of(mesh: Mesh, wire: Wire | None) -> Wire:
    """Return ``wire``, or a new wire over ``mesh`` if ``wire`` is None.

    Raises:
        WireError: if the mesh of ``wire`` has another topology, other ranks or another device than ``mesh``.
    """
    if wire is None or wire.mesh is mesh:
        return wire or Wire(mesh)
    theirs, ours = (
        f"{each.topology} of global ranks {', '.join(map(str, each.global_ranks))} on {each.device}"
        for each in (wire.mesh, mesh)
    )
    if theirs != ours:
        raise WireError(f"wire= is over the mesh {theirs}, but mesh= is {ours}: pass mesh=wire.mesh")
    return wire


def waits_on_streams(mesh: Mesh, transport: Transport) -> bool:
    """Return whether a stream of the GPU waits for messages, as with NCCL; otherwise the host waits for them."""
    return mesh.device.type == "cuda" and transport != "staged" and mesh.thread is None
