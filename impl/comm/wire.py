"""Sends messages along the axes of a mesh and books every byte in a ledger; nothing else sends any.

Transports: ``backend`` hands messages to torch.distributed (gloo, NCCL, thread ranks); ``shm`` lets the ranks
of a node read each other's memory (:mod:`impl.transport.shared_memory`) and uses the backend between nodes;
``staged`` sends tensors of a GPU by gloo through host memory, so that ranks may share the GPU.

An exchange that a rank does not join ends in a :class:`WireError` with all ranks' states.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Final, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from impl.codecs.codec import Codec
from impl.comm import exchanges
from impl.comm.exchanges import Exchange, Kind, Pacer
from impl.comm.ledger import Ledger, Timeline
from impl.comm.mesh import Mesh
from impl.comm.watchdog import DIFFER, Watchdog, WireError
from impl.plan.topology import Axis, ranks_in_words
from impl.plan.traffic import LedgerKey, Purpose, Tag, destinations
from impl.transport.group import Group
from impl.transport.shared_memory import Arena, patience
from impl.transport.side_stream import Arrival, SideStream

TIMEOUT_SECONDS: Final = 120.0
Transport = Literal["backend", "shm", "staged"]


class Hop(NamedTuple):
    """A hop that encodes: its number from 0 (a ring has one a step), the name of its axis, its codec."""

    number: int
    axis: str
    codec: Codec


class Observer:
    """Observes the reductions of one rank; must not change tensors, nor keep them without a copy."""

    def local(self, unit: str, gradient: Tensor) -> None:
        """A reduction of ``unit`` begins: (world * S,) this rank's gradient, without carried errors."""

    def encoded(self, unit: str, hop: Hop, values: Tensor, frames: Tensor | None) -> None:
        """Before a hop's message: (..., S) ``values`` with carried errors, encoded as ``frames``.

        These are (..., F) uint8; None if the elements themselves are sent.
        """

    def averaged(self, unit: str, start: int, mean: Tensor) -> None:
        """A reduction ended: (n,) fp32 mean of elements ``start`` to ``start + n``, each on one rank."""


class Wire:
    """Sends messages along the axes of a mesh and keeps the ledger."""

    def __init__(
        self,
        mesh: Mesh | DeviceMesh,
        *,
        transport: Transport = "backend",  # inside a node
        pacer: Pacer | None = None,  # models the link between nodes, if it is not shaped
        timeout: float = TIMEOUT_SECONDS,  # after which a missing rank is an error
    ) -> None:
        self.mesh = mesh = Mesh.of(mesh)
        if transport == "shm" and mesh.device.type != "cpu":
            raise WireError(f"transport 'shm' exchanges CPU memory, the mesh is on {mesh.device}")
        self.transport = transport
        self.ledger = Ledger()
        self.observer: Observer | None = None  # of reductions
        self._pacer, self._timeout = pacer, timeout
        streams = waits_on_streams(mesh, transport)
        self._watchdog = Watchdog(mesh, streams=streams)
        self._buffers = exchanges.Buffers(mesh.device, streams=streams)
        # For their hops after the first; None where the host waits.
        self.gathers = SideStream(mesh.device) if streams else None
        self.reductions = SideStream(mesh.device) if streams else None
        self._host_buffers = exchanges.Buffers(torch.device("cpu")) if transport == "staged" else None
        self._arenas: dict[Axis, Arena] = {}
        self._used: dict[str, set[str]] = {}
        self._routes: dict[tuple[Kind, Axis, int, Tag, bool], exchanges.Route] = {}  # ring last

    @property
    def exposed_seconds(self) -> float:
        """Seconds spent waiting for messages: by this rank, or its stream, after a synchronisation."""
        return self._watchdog.exposed_seconds

    @contextlib.contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Inside, exchanges are those of a public ``call``, as ``save()``, which all ranks must make.

        Errors name it, and ranks in another call part.  Of calls inside calls the outermost counts.
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
        """Wait until all ranks are here for ``purpose``; a WireError after the timeout names missing ranks.

        For what only the ranks' store or torch does, which would wait for half an hour.  Thread ranks, which
        have no store, do not wait.
        """
        self._watchdog.meet(purpose, self._timeout)

    def group(self, axis: Axis) -> Group:
        """This rank's group along ``axis``, made at the first call, which all ranks must reach."""
        if not self.mesh.has_group(axis):
            apart = f", stride {axis.stride}" if axis.stride > 1 else ""
            self.meet(f"the making of groups along {axis.name} ({axis.size} ranks{apart})")
        return self.mesh.group(axis)

    def make_groups(self, axes: Iterable[Axis]) -> None:
        """Make the groups along ``axes``, all ranks together, before any of them waits for a message."""
        for axis in axes:
            self.group(axis)

    @contextlib.contextmanager
    def beside(self, stream: SideStream) -> Iterator[Arrival]:
        """Enqueue the body's posts, waits and decoding on ``stream``; yields its end, for :meth:`join`.

        On a GPU waits for messages block no host, so all hops are enqueued once the first is posted.
        """
        self._watchdog.paused = True
        try:
            with stream.beside() as arrival:
                yield arrival
        finally:
            self._watchdog.paused = False

    def join(self, arrival: Arrival) -> None:
        """Let the computation wait for work enqueued beside it; the wait is exposed."""
        with self._watchdog.stalling():
            arrival.join()

    @contextlib.contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Inside, ``observer`` sees reductions, and bytes are booked in a ledger of its own."""
        before = self.ledger, self.observer
        self.ledger, self.observer = Ledger(), observer
        try:
            yield
        finally:
            self.ledger, self.observer = before

    @contextlib.contextmanager
    def traced(self, timeline: Timeline) -> Iterator[None]:
        """Inside, ``timeline`` notes messages and waits; outside this costs a comparison each."""
        self._watchdog.timeline = timeline
        try:
            yield
        finally:
            self._watchdog.timeline = None

    def all_gather(
        self, axis: Axis, nbytes: int, tag: Tag, *, ring: bool = False, into: Tensor | None = None
    ) -> Exchange:
        """Every rank of the axis receives every rank's message of ``nbytes``, booked as ``tag`` says.

        A ``ring`` books the messages of the library's algorithm over the whole world.  ``into`` (ranks *
        nbytes,) uint8 receives them, if the transport can do that.
        """
        return self._exchange("all_gather", axis, nbytes, tag, ring=ring, into=into)

    def all_to_all(self, axis: Axis, nbytes: int, tag: Tag) -> Exchange:
        """Every rank of the axis receives from every rank the row of ``nbytes`` meant for it."""
        return self._exchange("all_to_all", axis, nbytes, tag)

    def shift(self, axis: Axis, nbytes: int, tag: Tag) -> Exchange:
        """Every rank sends ``nbytes`` to the next rank of the axis: one step of a ring."""
        return self._exchange("shift", axis, nbytes, tag)

    def all_gather_small(self, row: Tensor, purpose: Purpose = "control") -> Tensor:
        """(ranks, n) the ``row`` (n,) of every rank, of any type and layout; all ranks must call it."""
        plain = row.detach().resolve_conj().resolve_neg().contiguous().view(torch.uint8)
        exchange = self.all_gather(self.mesh.topology.world_axis, plain.numel(), Tag("step", purpose))
        exchange.send.copy_(plain)
        exchange.post()
        rows = exchange.wait().clone(memory_format=torch.contiguous_format)  # (ranks, bytes)
        exchange.close()
        return rows.view(row.dtype)

    def check_order(self) -> None:
        """Raise a WireError unless all ranks opened equal exchanges in one order; all must call it."""
        log = self._watchdog.collective_log
        order = torch.tensor([log.count, log.fingerprint], dtype=torch.uint64, device=self.mesh.device)
        alike = defaultdict[str, list[int]](list)  # ranks by order
        with self.calling("check_order()"):
            orders = self.all_gather_small(order).tolist()
        for rank, (count, mark) in enumerate(orders):
            alike[f"opened {count} ({mark:016x})"].append(rank)
        if len(alike) > 1:
            texts = [f"{ranks_in_words(ranks)} {opened}" for opened, ranks in alike.items()]
            raise self._watchdog.error(DIFFER, ", ".join(texts))

    def describe(self) -> dict[str, str]:
        """The transports of messages along each axis, for the record; control messages apart."""
        return {name: ", ".join(sorted(used)) for name, used in self._used.items()}

    def close(self) -> None:
        """Drop shared memory and buffers, and report the wire as closed."""
        self._watchdog.close()
        self._arenas.clear()
        self._buffers.clear()
        if self._host_buffers is not None:
            self._host_buffers.clear()

    def shares_memory(self, axis: Axis) -> bool:
        """Whether ranks along ``axis`` read each other's messages in place, as a whole."""
        group = self.group(axis)
        return self.transport == "shm" and group.same_node and group.size > 1

    def lets_go(self, axis: Axis) -> bool:
        """Whether messages along ``axis`` can arrive in the caller's memory, with no reference kept after.

        gloo's works end with their wait; NCCL's and those of thread ranks may outlive it.
        """
        gloo = dist.get_backend(self.group(axis).process_group) == "gloo"
        return gloo and self.transport != "staged" and not self.shares_memory(axis)

    def _exchange(
        self, kind: Kind, axis: Axis, nbytes: int, tag: Tag, *, ring: bool = False, into: Tensor | None = None
    ) -> Exchange:
        if axis.size == 1:
            return exchanges.Alone(self._buffers, nbytes)
        key = (kind, axis, nbytes, tag, ring)
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = self._route(kind, axis, nbytes, tag, ring=ring)
        step = self._watchdog.collective_log.open(route.operation)
        for booked, sent, messages in route.booked:
            row = self.ledger.booked[booked]
            row[0] += sent
            row[1] += messages
        dog, pacer = self._watchdog, self._pacer
        if route.shared:
            arena = self._arenas.get(axis)
            if arena is None or arena.row_bytes < route.sent_bytes:  # on all ranks of the axis at once
                make = partial(Arena, route.sent_bytes, route.group, self._timeout)
                with torch.inference_mode(mode=False):  # it outlives a pass
                    arena = self._arenas[axis] = self._watchdog.wait(step, make)
            return exchanges.InMemory(dog, step, route, arena)
        if self._host_buffers is None:
            return exchanges.Distributed(dog, step, route, self._buffers, into=into, pacer=pacer)
        host = exchanges.Distributed(dog, step, route, self._host_buffers, into=None, pacer=pacer)
        return exchanges.Staged(host, route, self._buffers)

    def _route(self, kind: Kind, axis: Axis, nbytes: int, tag: Tag, *, ring: bool) -> exchanges.Route:
        """The route of such messages, whose transport is noted."""
        group, steps = self.group(axis), kind == "shift"
        backend, shared = dist.get_backend(group.process_group), not steps and self.shares_memory(axis)
        direct = backend == "gloo" and not ring
        carrier = "shm" if shared else f"{backend} point to point" if direct else backend
        carrier += " through host memory" if self.transport == "staged" else ""
        name = f"{axis.name} (control)" if tag.purpose == "control" else axis.name
        self._used.setdefault(name, set()).add(carrier)
        counts = destinations(self.mesh.topology, axis, self.mesh.rank, ring=ring or steps)
        if steps:  # one step of a ring
            counts = {link: min(count, 1) for link, count in counts.items()}
        return exchanges.Route(
            operation=(kind, axis.name, axis.size, axis.stride, nbytes, *tag, ring),
            group=group,
            kind=kind,
            nbytes=nbytes,
            sent_bytes=nbytes * axis.size if kind == "all_to_all" else nbytes,
            rows=1 if steps else axis.size,
            shared=shared,
            direct=direct,
            limit=patience(backend, timedelta(seconds=self._timeout)),
            booked=tuple(
                (LedgerKey(*tag, axis.name, link), count * nbytes, count) for link, count in counts.items()
            ),
            inter_bytes=counts.get("inter", 0) * nbytes,
        )


def wire_of(mesh: Mesh, wire: Wire | None) -> Wire:
    """``wire``, which must be over the ranks of ``mesh``, or a plain one; WireError: if it is over others."""
    if wire is None or wire.mesh is mesh:
        return wire or Wire(mesh)
    theirs, ours = (
        f"{each.topology} of global ranks {', '.join(map(str, each.global_ranks))} on {each.device}"
        for each in (wire.mesh, mesh)
    )
    if theirs != ours:
        raise WireError(f"wire= is over the mesh {theirs}, mesh= is {ours}: pass mesh=wire.mesh")
    return wire


def waits_on_streams(mesh: Mesh, transport: Transport) -> bool:
    """Whether a stream of the GPU waits for messages, not the host."""
    return mesh.device.type == "cuda" and transport != "staged"
