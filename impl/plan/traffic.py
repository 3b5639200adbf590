"""Predicts the bytes and messages that a policy sends, from the policy and the units' layout alone.

It counts the hops (:mod:`impl.plan.hops`) that the engine sends.  Tests check that the engine's ledger equals
:func:`predict` to the byte.  A message counts once for each destination other than the sender.  In a ring, all
messages of a rank go to its neighbour.

Pure: no torch.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from impl.codecs.codec import Codec
from impl.plan.hops import Hop, Sends, copy_bytes, gather_hops, in_phase, outer_hops, reduction_hops
from impl.plan.local_steps import fragments_of, meets
from impl.plan.owners import Owners
from impl.plan.prefetch_schedule import kept_units
from impl.policy.own_method import Change, Declared, DeclaredGathers, GatherInfo, MethodMessage, axis_of
from impl.policy.policy import Budgeted, Offload, Policy
from impl.policy.shard_layout import UnitGeometry
from impl.policy.topology import Axis, Topology

Phase = Literal["forward", "backward", "evaluate", "step"]
Purpose = Literal["weights", "gradients", "persistent", "momentum", "update", "buffers", "control", "state"]
Link = Literal["inter", "intra"]
Direction = Literal["to_host", "to_device"]
Copied = Literal["weights", "secondary", "gradients", "state"]
Event = Literal[
    "forward", "accumulate", "backward", "evaluate", "norm", "step", "changed", "forgotten", "dropped"
]

ORDER_BYTES: Final = 16  # of a check that ranks agree: the count of their exchanges, and a hash of the order
NORM_BYTES: Final = 8  # of a rank's sum of squares for a norm: one fp64
SQUARES_BYTES: Final = 8  # of a rank's sum of squared errors for one unit and codec of a budget: one fp64
MASTER_BYTES: Final = 4  # fp32


class Tag(NamedTuple):
    """The purpose of a message; a :class:`LedgerKey` adds the hop and the kind of link."""

    phase: Phase
    purpose: Purpose
    unit: str = ""  # name of the unit; empty for messages that concern no single unit


MOMENTUM: Final = Tag("step", "momentum")  # to the owners of matrices
UPDATE: Final = Tag("step", "update")  # back from them


class LedgerKey(NamedTuple):
    """The entry of a ledger to which a message belongs."""

    phase: Phase
    purpose: Purpose
    unit: str  # name of the unit; empty for messages that concern no single unit
    hop: str  # name of the axis
    link: Link  # whether the message leaves the node


class Sent(NamedTuple):
    """Payload bytes and number of messages; a message to several destinations counts once for each."""

    bytes: int
    messages: int


class CopyKey(NamedTuple):
    """The entry of a ledger to which a copy between host and device belongs."""

    direction: Direction
    purpose: Copied
    unit: str


class Decision(NamedTuple):
    """A budget's choice of a codec for a unit's messages, in effect from one optimizer step on."""

    step: int  # number of optimizer steps before the first that uses the codec
    purpose: Budgeted
    unit: str
    hop: str  # name of the axis; empty for weights
    codec: Codec
    vnmse: float  # error in the step before: sum((decoded - x)^2) / sum(x^2) over all ranks; 0 if x is 0


def passes(policy: Policy, *, micro_batches: int = 1, norms: int = 0) -> list[Event]:
    """Returns the events of a step with ``micro_batches``; ``accumulate`` is a backward pass that reduces nothing.

    ``norms`` is how often a gradient norm is computed before the optimizer steps.
    """
    first: list[Event] = ["forward", "backward" if policy.reduces_each_micro_batch else "accumulate"]
    norm: list[Event] = ["norm"]
    return [*first * (micro_batches - 1), "forward", "backward", *norm * norms, "step"]


@functools.cache
def destinations(topology: Topology, axis: Axis, rank: int, *, ring: bool) -> Mapping[Link, int]:
    """Returns how many messages ``rank`` sends over each kind of link in one exchange along ``axis``.

    Each other rank of the group gets one message; in a ``ring`` the next rank of the group gets all these messages.
    """
    group, me = axis.group(rank), axis.digit(rank)
    targets = [group[(me + 1) % axis.size]] * (axis.size - 1) if ring else [r for r in group if r != rank]
    inside = sum(topology.node_of(target) == topology.node_of(rank) for target in targets)
    counts: dict[Link, int] = {"inter": len(targets) - inside, "intra": inside}
    return {link: count for link, count in counts.items() if count}


def uneven(topology: Topology, axis: Axis, rank: int, sizes: Sequence[int]) -> Mapping[Link, Sent]:
    """Returns what ``rank`` sends over each kind of link if it sends ``sizes[i]`` bytes to the i-th rank of its group.

    The rank sends nothing to itself, and no message of 0 bytes.
    """
    sent: dict[Link, Sent] = {}
    for target, size in zip(axis.group(rank), sizes, strict=True):
        if target != rank and size:
            link: Link = "intra" if topology.node_of(target) == topology.node_of(rank) else "inter"
            nbytes, messages = sent.get(link, (0, 0))
            sent[link] = Sent(nbytes + size, messages + 1)
    return sent


@dataclass(slots=True)
class Book:
    """Adds up one rank's messages, and its copies between host and device; all sizes are in bytes."""

    topology: Topology
    rank: int
    sent: dict[LedgerKey, Sent] = field(default_factory=dict)
    copied: Counter[CopyKey] = field(default_factory=Counter)
    # Bytes sent over each kind of link so far, evaluations left out: ``trained`` now, and ``steps`` at the end of each
    # optimizer step.
    trained: Counter[Link] = field(default_factory=Counter)
    steps: list[dict[Link, int]] = field(default_factory=list)
    # The axes along which it has sent, each with whether in a ring; without uneven messages, and thus without owners.
    routes: set[tuple[Axis, bool]] = field(default_factory=set)

    def exchange(self, tag: Tag, axis: Axis, size: int, *, ring: bool = False) -> None:
        """Count one message of ``size`` to every other rank along ``axis``."""
        self.routes.add((axis, ring))
        for link, count in destinations(self.topology, axis, self.rank, ring=ring).items():
            key = LedgerKey(*tag, axis.name, link)
            nbytes, messages = self.sent.get(key, (0, 0))
            self.sent[key] = Sent(nbytes + count * size, messages + count)
            self.trained[link] += count * size if tag.phase != "evaluate" else 0

    def method_message(self, tag: Tag, message: MethodMessage) -> None:
        """Count a message of a user's own reduction or gather."""
        axis, shift = axis_of(self.topology, message.axis), message.kind == "shift"
        self.routes.add((axis, shift))
        for link, others in destinations(self.topology, axis, self.rank, ring=shift).items():
            # A shift is one step of a ring, and destinations() counts all steps.
            count = 1 if shift else others
            key = LedgerKey(*tag, axis.name, link)
            nbytes, messages = self.sent.get(key, (0, 0))
            self.sent[key] = Sent(nbytes + count * message.nbytes, messages + count)
            self.trained[link] += count * message.nbytes if tag.phase != "evaluate" else 0

    def fits(self, rank: int) -> bool:
        """Returns whether ``rank`` sends as many bytes over each kind of link in the exchanges counted here."""
        both = (
            [destinations(self.topology, axis, each, ring=ring) for each in (self.rank, rank)]
            for axis, ring in self.routes
        )
        return all(mine == other for mine, other in both)

    def control(self, size: int, purpose: Purpose = "control") -> None:
        """Count one message of ``size`` to every other rank."""
        self.exchange(Tag("step", purpose), self.topology.world_axis, size)

    def norm(self, axes: Iterable[Axis]) -> None:
        """Count the messages of a gradient norm, which ranks sum up along one axis after the other."""
        size = NORM_BYTES
        for axis in axes:
            self.exchange(Tag("step", "control"), axis, size)
            size *= axis.size

    def uneven(self, tag: Tag, axis: Axis, sizes: Sequence[int]) -> None:
        """Count a message of ``sizes[i]`` bytes to each i-th rank along ``axis``; none to this rank or of 0 bytes."""
        for link, (nbytes, messages) in uneven(self.topology, axis, self.rank, sizes).items():
            key = LedgerKey(*tag, axis.name, link)
            before = self.sent.get(key, (0, 0))
            self.sent[key] = Sent(before[0] + nbytes, before[1] + messages)
            self.trained[link] += nbytes

    def optimizer_step(self, owners: Owners) -> None:
        """Count what this rank sends in a step of Muon: momentum to the owners of matrices, and updates as an owner."""
        me = owners.axis.digit(self.rank)
        self.uneven(MOMENTUM, owners.axis, owners.to_owners[me])
        self.uneven(UPDATE, owners.axis, owners.from_owners[me])

    def send(self, tag: Tag, hops: Iterable[Hop]) -> None:
        """Count the messages of a gather or of a reduction."""
        for hop in hops:
            for size in hop.sizes:
                self.exchange(tag, hop.axis, size, ring=hop.ring)


def norm_axes(policy: Policy, topology: Topology) -> tuple[Axis, ...]:
    """Returns the axes along which ranks exchange parts of a gradient norm; with local steps, only inside a group."""
    if policy.local_steps is None:
        return (topology.world_axis,)
    axes, outside = topology.gather_axes(policy.group_ranks(topology))  # also with a gather of a user's own
    return tuple(axis for axis in axes[outside:] if axis.size > 1)


def predict(
    policy: Policy,
    topology: Topology,
    units: Sequence[UnitGeometry],
    rank: int,
    events: Iterable[Event],
    *,
    buffer_bytes: int = 0,
    decisions: Collection[Decision] = (),
    methods: Declared | None = None,
    gathers: DeclaredGathers | None = None,
    begun: int = 0,
    owners: Owners | None = None,
) -> Book:
    """Predicts the bytes and messages that ``rank`` sends in ``events``, and its copies between host and device.

    Some events change what later events send:

    - ``step`` changes the trained weights; with local steps, groups exchange the fragment that is due after the step;
    - ``changed`` (``Zero.weights_changed``) changes all weights; - ``forgotten`` (``Zero.forget_gathered``): all
    weights are gathered anew; - ``dropped`` (``Zero.drop_gradients``): the next gather sends weights, not
    differences.

    With offload, each reduction copies the mean gradient of an offloaded master (4 bytes an element of the
    shard) to the host.  The encoded master is copied to the device once a step or, if frames are offloaded
    too, whenever it is sent.  Offloaded frames of hpZ's copy are copied to the host when they are kept and to
    the device when they are used again.

    Args:
        policy: the policy of the model.
        topology: nodes and ranks.
        units: the model's units, in model order, laid out for ``topology.world`` ranks.
        rank: the rank that sends.
        events: passes and changes, in order (:func:`passes`).
        buffer_bytes: bytes of the model's persistent buffers.
        decisions: the choices of the policy's budget.
        methods: by unit, the messages that a user's own reduction declares; the messages of a reduction that declares
            none are not counted.
        gathers: by unit, a function that returns the messages that a user's own gather declares.
        begun: optimizer steps before the first event, which decide where in its schedule the policy begins.
        owners: the owners of matrices, if Muon steps them.

    Raises:
        PolicyError: if the policy does not fit the topology.
    """
    policy.check(topology)
    book = Book(topology, rank)
    phases = [[phase.for_unit(unit) for phase in policy.phases] for unit in units]
    hops = _Hops(topology)
    senders = [
        _Sender(book, hops, rules[policy.phase_at(begun)], unit, placement, (gathers or {}).get(unit.name))
        for rules, unit, placement in zip(phases, units, placements_of(policy.offload, units), strict=True)
    ]
    kept = kept_units(policy, units)
    fragments, norms = fragments_of(policy, units), norm_axes(policy, topology)
    buffers_differ, passes, steps = bool(buffer_bytes), 0, begun
    for event in events:
        match event:
            case "norm":
                book.norm(norms)
            case "step" | "changed" | "forgotten":
                for sender, fragment in zip(senders, fragments, strict=True):
                    if event == "step" and meets(policy, steps + 1, fragment):
                        sender.meet()
                for sender in senders:
                    if event != "step" or sender.unit.trainable:
                        sender.weights_changed(event)
                if event == "step" and owners is not None:
                    book.optimizer_step(owners)
                if event == "step" and policy.budget is not None:
                    # Ranks exchange the sum of squared values, and for each codec the sum of squared errors.
                    if steps % policy.budget.every == 0:
                        chosen = sum(unit.trainable and not unit.persistent for unit in units)
                        sums = sum(1 + len(codecs) for codecs in policy.candidates.values())
                        book.control(SQUARES_BYTES * chosen * sums)
                    for choice, sender in itertools.product(decisions, senders):
                        if (choice.step, choice.unit) == (steps + 1, sender.unit.name):
                            sender.policy = sender.policy.with_choice(choice.purpose, choice.codec)
                if event == "step":
                    steps += 1
                    book.steps.append(dict(book.trained))
                    for sender, rules in zip(senders, phases, strict=True) if policy.schedule else ():
                        sender.follow(rules[policy.phase_at(steps)])
            case "dropped":
                for sender in senders:
                    sender.steps, sender.change = None, "loaded"
            case "forward" | "evaluate":
                if buffers_differ:
                    book.control(buffer_bytes, "buffers")
                buffers_differ = bool(buffer_bytes) and event == "forward"
                for index, sender in enumerate(senders):
                    sender.gather(event, keep=event == "forward" and index in kept)
            case "backward" | "accumulate":
                for sender in senders:
                    sender.gather("backward", keep=False)
                    if event == "backward" and sender.unit.trainable:
                        sender.reduce()
                        for message in (methods or {}).get(sender.unit.name) or ():
                            book.method_message(Tag("backward", "gradients", sender.unit.name), message)
                passes += 1
                if policy.order_every and passes % policy.order_every == 0:
                    book.control(ORDER_BYTES)
    return book


@dataclass(slots=True)
class _Hops:
    """Compiles the hops of each policy and size once, since most units of a model have the same ones."""

    topology: Topology
    # By the function, its arguments and the policy's identity, which takes less time to compare than the policy.  The
    # policy is kept, so that no other one gets its identity.
    _known: dict[tuple[object, ...], tuple[Policy, tuple[Hop, ...]]] = field(default_factory=dict)

    def of(
        self, compile_: Callable[..., tuple[Hop, ...]], policy: Policy, *arguments: int | str
    ) -> tuple[Hop, ...]:
        """Returns ``compile_(policy, topology, *arguments)``, a function of :mod:`impl.plan.hops`."""
        key = (compile_, id(policy), *arguments)
        if key not in self._known:
            self._known[key] = policy, compile_(policy, self.topology, *arguments)
        return self._known[key][1]


class Placement(NamedTuple):
    """Which parts of one unit are in host memory."""

    shard: bool = False  # the master, its mean gradient and optimizer state; of a frozen unit, the shard
    frames: bool = False  # the encoded shard, and the frames of hpZ's copy


ON_DEVICE = Placement()


def placements_of(offload: Offload, units: Sequence[UnitGeometry]) -> list[Placement]:
    """Returns the placement of each unit; ``units`` are in model order, and a share counts padded elements."""
    stepped = _chosen([unit.padded if unit.trainable else 0 for unit in units], offload.optimizer)
    framed = _chosen([unit.padded for unit in units], offload.weights)
    rows = zip(units, stepped, framed, strict=True)
    return [Placement(step if unit.trainable else frames, frames) for unit, step, frames in rows]


def _chosen(sizes: Sequence[int], share: float) -> list[bool]:
    """Returns for each size whether it is chosen: the first sizes, until their sum reaches ``share`` of the whole sum.

    A size of 0 is never chosen.
    """
    wanted, before = share * sum(sizes), itertools.accumulate(sizes, initial=0)
    return [size > 0 and held < wanted for size, held in zip(sizes, before, strict=False)]


@dataclass(slots=True)
class _Sender:
    """One unit on one rank, with the state on which its next messages depend."""

    book: Book
    hops: _Hops
    policy: Policy
    unit: UnitGeometry
    placement: Placement
    # Returns the messages that a user's own gather declares; None if the policy has no such gather.
    own_gather: Callable[[GatherInfo], Sequence[MethodMessage] | None] | None = None
    gathered: bool = False  # whether the weights are still gathered from the pass before
    current: bool = False  # whether hpZ's copy holds the current weights
    uploaded: bool = False  # whether the device holds the current frame of an offloaded master
    # Optimizer steps since the weights themselves were sent; None: they are sent next, not differences.
    steps: int | None = None
    change: Change = "loaded"  # how the weights have changed since the last call of a user's own gather

    def weights_changed(self, event: Event) -> None:
        """Mark all copies of the weights as stale.

        After the event ``changed`` the next gather sends the weights themselves, not differences from hpZ's copy.
        """
        self.gathered = self.current = self.uploaded = False
        if event == "changed":
            self.steps, self.change = None, "loaded"
        elif event == "step" and self.steps is not None:
            self.steps += 1
            self.change = "stepped" if self.change == "unchanged" else self.change

    def follow(self, policy: Policy) -> None:
        """Send as ``policy`` says from now on; weights are gathered anew if ``policy`` gathers them in another way."""
        if policy.gathering != self.policy.gathering:
            self.gathered = self.current = False
            self.steps = None
        self.policy = policy

    def gather(self, phase: Phase, *, keep: bool) -> None:
        """Count a gather of the weights, unless they are gathered already.

        Afterwards they stay gathered with ``keep`` or below stage 3; otherwise they are resharded.
        """
        policy, book, placement, unit = self.policy, self.book, self.placement, self.unit
        if not self.gathered and policy.own_gather is not None:
            self._gather_by_method(phase)
        elif not self.gathered:
            sends = in_phase(policy, phase, self._sends())
            hops = self.hops.of(gather_hops, policy, unit.shard, sends)
            if placement.shard and not self.current and (placement.frames or not self.uploaded):
                book.copied[CopyKey("to_device", "weights", unit.name)] += hops[0].nbytes
                self.uploaded = True
            if placement.frames and (secondary := copy_bytes(policy, book.topology, unit.shard)):
                direction: Direction = "to_device" if self.current else "to_host"
                book.copied[CopyKey(direction, "secondary", unit.name)] += secondary
            book.send(Tag(phase, "persistent" if unit.persistent else "weights", unit.name), hops)
            self.current = policy.secondary != 0 and (self.current or sends != "rows")
        self.gathered = keep or policy.stage < 3

    def _gather_by_method(self, phase: Phase) -> None:
        """Count the messages that a user's own gather declares."""
        if self.change == "loaded" or self.steps is None:
            self.steps = 0
        assert phase != "step"  # noqa: S101  # gathers are of passes
        info, self.change = GatherInfo(phase, self.change, self.steps), "unchanged"
        for message in (self.own_gather and self.own_gather(info)) or ():
            self.book.method_message(Tag(phase, "weights", self.unit.name), message)

    def _sends(self) -> Sends:
        """Returns what the next gather sends."""
        if self.current:
            return "copy"
        if self.policy.differences is not None:
            refresh = self.policy.refresh
            if self.steps is not None and not (refresh and self.steps >= refresh):
                return "differences"
            self.steps = 0
        return "weights"

    def meet(self) -> None:
        """Count the exchange in which groups average how far their masters of the unit have moved."""
        hops = self.hops.of(outer_hops, self.policy, self.unit.piece, self.policy.grain)
        self.book.send(Tag("step", "gradients", self.unit.name), hops)

    def reduce(self) -> None:
        """Count the reduction of a trained unit's gradient."""
        policy, unit, book = self.policy, self.unit, self.book
        if self.placement.shard:
            book.copied[CopyKey("to_host", "gradients", unit.name)] += MASTER_BYTES * unit.shard
        hops = self.hops.of(reduction_hops, policy, unit.piece, policy.grain)
        book.send(Tag("backward", "gradients", unit.name), hops)
