"""Predicts the bytes and messages that a policy sends, from the policy and the units' layout alone.

The prediction counts the messages of the hops that the engine sends (:mod:`impl.plan.hops`).  During training, each
rank records in its ledger what it sends.  Tests check that :func:`predict` and this ledger agree to the byte.  A
message counts once for each destination other than the sender.  In a ring, all messages of a rank go to the next rank.

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

# Bytes with which ranks check that their exchanges have the same order: the number of exchanges, and a hash of them.
ORDER_BYTES: Final = 16
NORM_BYTES: Final = 8  # bytes of a rank's sum of squares for a gradient norm: one fp64
SQUARES_BYTES: Final = 8  # bytes of a rank's sum of squared errors for one unit and codec: one fp64
MASTER_BYTES: Final = 4  # bytes of an element of a master: one fp32


class Tag(NamedTuple):
    """The phase of training in which a message is sent, and the purpose and the unit of the message.

    A :class:`LedgerKey` consists of these fields, the axis and the kind of link.
    """

    phase: Phase
    purpose: Purpose
    unit: str = ""  # name of the unit; empty for messages that concern no single unit


MOMENTUM: Final = Tag("step", "momentum")  # to the owners of matrices
UPDATE: Final = Tag("step", "update")  # back from the owners


class LedgerKey(NamedTuple):
    """The key under which a message is counted in a ledger, a rank's record of the bytes and messages it has sent."""

    phase: Phase
    purpose: Purpose
    unit: str  # name of the unit; empty for messages that concern no single unit
    hop: str  # name of the axis
    link: Link  # ``inter`` if the message goes to another node, else ``intra``


class Sent(NamedTuple):
    """Payload bytes and number of messages; a message to several ranks counts once for each of these ranks."""

    bytes: int
    messages: int


class CopyKey(NamedTuple):
    """The key under which the bytes of a copy between host and device are counted."""

    direction: Direction
    purpose: Copied
    unit: str


class Decision(NamedTuple):
    """The codec that a budget (``policy.budget``) has chosen during training for the messages of one unit."""

    step: int  # number of optimizer steps that were taken before the first step with this codec
    purpose: Budgeted
    unit: str
    hop: str  # name of the axis; empty for weights
    codec: Codec
    # Error of the codec in the step before this choice: sum((decoded - x)^2) / sum(x^2), both sums over all ranks.
    # 0 if all x are 0.
    vnmse: float


def passes(policy: Policy, *, micro_batches: int = 1, norms: int = 0) -> list[Event]:
    """Returns the events of one training step, in order, as :func:`predict` takes them.

    ``norms`` is the number of gradient norms that are computed before the optimizer steps.  With 2 micro-batches and
    one norm: forward, backward, forward, backward, norm, step.

    If the policy reduces gradients only in the last micro-batch, the backward pass of each earlier micro-batch is the
    event ``accumulate``, which sends no gradients.
    """
    first: list[Event] = ["forward", "backward" if policy.reduces_each_micro_batch else "accumulate"]
    norm: list[Event] = ["norm"]
    return [*first * (micro_batches - 1), "forward", "backward", *norm * norms, "step"]


@functools.cache
def destinations(topology: Topology, axis: Axis, rank: int, *, ring: bool) -> Mapping[Link, int]:
    """Returns the number of messages that ``rank`` sends over each kind of link in one exchange along ``axis``.

    The kinds are ``inter`` (to other nodes) and ``intra`` (inside the node); a kind without messages is left out.
    ``rank`` sends one message to each other rank of its group along the axis.  In a ``ring``, it sends the same number
    of messages, but all of them to the next rank of the group.
    """
    group, me = axis.group(rank), axis.digit(rank)
    targets = [group[(me + 1) % axis.size]] * (axis.size - 1) if ring else [r for r in group if r != rank]
    inside = sum(topology.node_of(target) == topology.node_of(rank) for target in targets)
    counts: dict[Link, int] = {"inter": len(targets) - inside, "intra": inside}
    return {link: count for link, count in counts.items() if count}


def uneven(topology: Topology, axis: Axis, rank: int, sizes: Sequence[int]) -> Mapping[Link, Sent]:
    """Returns the bytes and messages that ``rank`` sends over each kind of link if its messages differ in size.

    The kinds are ``inter`` (to other nodes) and ``intra`` (inside the node); a kind without messages is left out.
    ``rank`` sends ``sizes[i]`` bytes to the i-th rank of its group along ``axis``.  It sends nothing to itself, and no
    message of 0 bytes.
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
    """Adds up the messages of one rank, and its copies between host and device; all sizes are in bytes."""

    topology: Topology
    rank: int
    sent: dict[LedgerKey, Sent] = field(default_factory=dict)
    copied: Counter[CopyKey] = field(default_factory=Counter)
    # ``trained``: bytes sent over each kind of link so far, without evaluations.  ``steps``: for each optimizer step,
    # the value that ``trained`` had after this step.
    trained: Counter[Link] = field(default_factory=Counter)
    steps: list[dict[Link, int]] = field(default_factory=list)
    # (axis, whether in a ring) of all exchanges so far, except those that :meth:`uneven` has counted.
    routes: set[tuple[Axis, bool]] = field(default_factory=set)

    def exchange(self, tag: Tag, axis: Axis, size: int, *, ring: bool = False) -> None:
        """Count one message of ``size`` bytes from this rank to every other rank along ``axis``.

        In a ``ring``, the same number of messages is counted, but all of them go to the next rank.
        """
        self.routes.add((axis, ring))
        for link, count in destinations(self.topology, axis, self.rank, ring=ring).items():
            key = LedgerKey(*tag, axis.name, link)
            nbytes, messages = self.sent.get(key, (0, 0))
            self.sent[key] = Sent(nbytes + count * size, messages + count)
            self.trained[link] += count * size if tag.phase != "evaluate" else 0

    def method_message(self, tag: Tag, message: MethodMessage) -> None:
        """Count one exchange along an axis, which a user's own reduction or gather declares as ``message``.

        If the kind of the exchange is ``shift``, this rank sends one message to the next rank.  Otherwise it sends one
        message to every other rank along the axis.
        """
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
        """Returns whether the counts of this book also hold for ``rank``.

        The book counts the messages of one rank.  Its counts hold for another rank too if both ranks send equally many
        messages over each kind of link.  The method compares these numbers for every kind of exchange counted so far
        (``routes``), but not for exchanges that :meth:`uneven` has counted.
        """
        both = (
            [destinations(self.topology, axis, each, ring=ring) for each in (self.rank, rank)]
            for axis, ring in self.routes
        )
        return all(mine == other for mine, other in both)

    def control(self, size: int, purpose: Purpose = "control") -> None:
        """Count one message of ``size`` bytes from this rank to every other rank of the run, in the phase ``step``.

        By default it is a control message, which carries neither weights nor gradients.
        """
        self.exchange(Tag("step", purpose), self.topology.world_axis, size)

    def norm(self, axes: Iterable[Axis]) -> None:
        """Count the messages of one gradient norm, for which ranks exchange the sums of squares of their gradients.

        The sums are gathered along each of the ``axes`` in turn.  Along the first axis, this rank sends its own
        sum, 8 bytes, to every other rank.  Along each later axis, it sends all the sums that it has by then.
        """
        size = NORM_BYTES
        for axis in axes:
            self.exchange(Tag("step", "control"), axis, size)
            size *= axis.size

    def uneven(self, tag: Tag, axis: Axis, sizes: Sequence[int]) -> None:
        """Count one message to each other rank along ``axis``, of ``sizes[i]`` bytes to the i-th rank.

        A message of 0 bytes is not sent, and not counted.
        """
        for link, (nbytes, messages) in uneven(self.topology, axis, self.rank, sizes).items():
            key = LedgerKey(*tag, axis.name, link)
            before = self.sent.get(key, (0, 0))
            self.sent[key] = Sent(before[0] + nbytes, before[1] + messages)
            self.trained[link] += nbytes

    def optimizer_step(self, owners: Owners) -> None:
        """Count the messages that this rank sends in a step of Muon.

        The rank sends its parts of the momentum to the owners of matrices, the ranks that orthogonalise them.  For the
        matrices that it owns itself, it sends updates to the ranks that hold parts of them.
        """
        me = owners.axis.digit(self.rank)
        self.uneven(MOMENTUM, owners.axis, owners.to_owners[me])
        self.uneven(UPDATE, owners.axis, owners.from_owners[me])

    def send(self, tag: Tag, hops: Iterable[Hop]) -> None:
        """Count the messages of a gather or a reduction that consists of ``hops``."""
        for hop in hops:
            for size in hop.sizes:
                self.exchange(tag, hop.axis, size, ring=hop.ring)


def norm_axes(policy: Policy, topology: Topology) -> tuple[Axis, ...]:
    """Returns the axes along which ranks exchange the sums of squares of their gradients, for the gradient norm.

    Without local steps, the result is the axis of all ranks.  With local steps, groups of ranks, each with a copy of
    all sharded states, train by themselves.  The result is then the axes inside one such group.
    """
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

    - ``step``: the trained weights change.  With local steps, state groups exchange a fragment (a set of units) after
      some of the steps.
    - ``changed`` (``Zero.weights_changed``): all weights change.
    - ``forgotten`` (``Zero.forget_gathered``): all weights are gathered anew, although they have not changed.
    - ``dropped`` (``Zero.drop_gradients``): if the policy sends differences between the weights and hpZ's copy, the
      next gather that is due to send differences sends the weights themselves.  A user's own gather is told that the
      weights were loaded.

    With offload, data is copied between host and device:

    - Each reduction copies the mean gradient of an offloaded master, 4 bytes for each element, to the host.
    - The encoded form of an offloaded master is copied to the device once a step.  If encoded masters are offloaded
      too, it is copied to the device whenever it is sent.
    - If hpZ's copy is offloaded, it is copied to the host when it is made, and to the device when it is used.

    Args:
        policy: the policy of the model.
        topology: nodes and ranks.
        units: the model's units, in model order, laid out for ``topology.world`` ranks.
        rank: the rank that sends.
        events: passes, optimizer steps and the other events above, in order.  :func:`passes` returns those of one step.
        buffer_bytes: bytes of a rank's message with the model's persistent buffers (``ModuleBuffers.nbytes``).
        decisions: the codecs that the policy's budget chose in the run to be predicted.
        methods: maps the name of each unit to the messages that a user's own reduction declares.  A reduction that
            declares no messages is not counted.
        gathers: maps the name of each unit to a function that returns the messages that a user's own gather declares.
        begun: number of optimizer steps taken before the first event.  With a schedule, this number decides with which
            settings the events begin.
        owners: the owners of matrices, the ranks that orthogonalise them, if Muon steps the matrices.

    Returns:
        A book with the bytes and messages by phase, purpose, unit, axis and kind of link, and the bytes of copies.

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
    """Caches the hops of gathers and reductions; units with the same policy and shard size have the same hops."""

    topology: Topology
    # The key is (function, identity of the policy, arguments), since identities are compared faster than policies.  The
    # value holds the policy too, so that the policy is not freed and its identity not given to another policy.
    _known: dict[tuple[object, ...], tuple[Policy, tuple[Hop, ...]]] = field(default_factory=dict)

    def of(
        self, compile_: Callable[..., tuple[Hop, ...]], policy: Policy, *arguments: int | str
    ) -> tuple[Hop, ...]:
        """Returns the hops that ``compile_``, a function of :mod:`impl.plan.hops`, returns for these arguments.

        ``compile_`` is called with ``policy``, the topology and ``arguments``, and only once for the same arguments.
        """
        key = (compile_, id(policy), *arguments)
        if key not in self._known:
            self._known[key] = policy, compile_(policy, self.topology, *arguments)
        return self._known[key][1]


class Placement(NamedTuple):
    """For each part of one unit's state, whether the part is in host memory (True) or on the device (False)."""

    # The masters, their mean gradient and their optimizer state.  For a frozen unit: the shard.
    shard: bool = False
    frames: bool = False  # the encoded shard, and the frames of hpZ's copy


ON_DEVICE = Placement()


def placements_of(offload: Offload, units: Sequence[UnitGeometry]) -> list[Placement]:
    """Returns for each of the ``units``, which are in model order, which parts of its state are in host memory.

    ``offload.optimizer`` and ``offload.weights`` are fractions from 0 to 1.  Elements of padding count as well.

    - Masters, mean gradients and optimizer state are offloaded unit by unit, in model order, until the offloaded units
      have at least the fraction ``offload.optimizer`` of all trained elements.
    - Encoded shards are offloaded unit by unit, in model order, until they have at least the fraction
      ``offload.weights`` of all elements.  The shard of a frozen unit is offloaded together with its encoded shard.
    """
    stepped = _chosen([unit.padded if unit.trainable else 0 for unit in units], offload.optimizer)
    framed = _chosen([unit.padded for unit in units], offload.weights)
    rows = zip(units, stepped, framed, strict=True)
    return [Placement(step if unit.trainable else frames, frames) for unit, step, frames in rows]


def _chosen(sizes: Sequence[int], share: float) -> list[bool]:
    """Returns for each of the ``sizes`` whether it is one of the first sizes that make up ``share`` of the total.

    Sizes are chosen from the first on, until the sum of the chosen sizes is at least ``share`` times the sum of all
    sizes.  A size of 0 is never chosen.  With sizes (4, 0, 2, 2) and share 0.6: [True, False, True, False].
    """
    wanted, before = share * sum(sizes), itertools.accumulate(sizes, initial=0)
    return [size > 0 and held < wanted for size, held in zip(sizes, before, strict=False)]


@dataclass(slots=True)
class _Sender:
    """Counts the messages of one unit on one rank, and keeps the state on which the unit's later messages depend."""

    book: Book
    hops: _Hops
    policy: Policy
    unit: UnitGeometry
    placement: Placement
    # A function that returns the messages that a user's own gather declares; None if the policy has no such gather.
    own_gather: Callable[[GatherInfo], Sequence[MethodMessage] | None] | None = None
    gathered: bool = False  # whether the weights are still gathered since an earlier event
    current: bool = False  # whether hpZ's copy holds the current weights
    uploaded: bool = False  # whether the device holds the current frame of an offloaded master
    # Number of optimizer steps since whole weights were sent.  If None, the next gather sends whole weights, even if
    # the policy sends differences.
    steps: int | None = None
    change: Change = "loaded"  # how the weights have changed since the last call of a user's own gather

    def weights_changed(self, event: Event) -> None:
        """Mark all copies of the weights as outdated, because of ``event``: ``step``, ``changed`` or ``forgotten``.

        The copies are the gathered weights, hpZ's copy, and the encoded weights of an offloaded master on the device.

        After the event ``changed`` the next gather sends the weights themselves, not the differences between the
        weights and hpZ's copy.
        """
        self.gathered = self.current = self.uploaded = False
        if event == "changed":
            self.steps, self.change = None, "loaded"
        elif event == "step" and self.steps is not None:
            self.steps += 1
            self.change = "stepped" if self.change == "unchanged" else self.change

    def follow(self, policy: Policy) -> None:
        """Count, from now on, the messages that ``policy`` sends.

        If ``policy`` gathers weights in another way than the policy before, hpZ's copy of the weights is outdated.  The
        next gather then sends the weights themselves, not hpZ's copy, and not the differences between the weights and
        this copy.
        """
        if policy.gathering != self.policy.gathering:
            self.gathered = self.current = False
            self.steps = None
        self.policy = policy

    def gather(self, phase: Phase, *, keep: bool) -> None:
        """Count the messages of a gather of the unit's weights, unless the weights are gathered already.

        Afterwards the weights stay gathered if ``keep`` is set or the policy's stage is below 3.  Otherwise they are
        freed.
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
        """Count the messages that a user's own gather declares for this ``phase``."""
        if self.change == "loaded" or self.steps is None:
            self.steps = 0
        assert phase != "step"  # noqa: S101  # gathers are of passes
        info, self.change = GatherInfo(phase, self.change, self.steps), "unchanged"
        for message in (self.own_gather and self.own_gather(info)) or ():
            self.book.method_message(Tag(phase, "weights", self.unit.name), message)

    def _sends(self) -> Sends:
        """Returns what the next gather sends: ``copy``, ``differences`` or ``weights``.

        - ``copy`` (hpZ's copy of the weights): if this copy holds the current weights.
        - ``weights`` (the weights themselves): if the copy is outdated and one of three conditions holds.  Either the
          policy does not send differences.  Or the weights themselves were never sent or must be sent again (the field
          ``steps`` is None).  Or the weights themselves were sent ``refresh`` or more optimizer steps ago
          (``policy.refresh``; 0: no such limit).
        - ``differences`` (the weights minus hpZ's copy): in all other cases.

        The field ``steps`` counts the optimizer steps since the weights themselves were sent.  If the policy sends
        differences and the result is ``weights``, this method sets ``steps`` to 0.
        """
        if self.current:
            return "copy"
        if self.policy.differences is not None:
            refresh = self.policy.refresh
            if self.steps is not None and not (refresh and self.steps >= refresh):
                return "differences"
            self.steps = 0
        return "weights"

    def meet(self) -> None:
        """Count the messages of an outer step for this unit.

        With local steps, groups of ranks train by themselves.  In an outer step, they average the changes of the unit's
        masters (fp32 weights) since the last outer step.
        """
        hops = self.hops.of(outer_hops, self.policy, self.unit.piece, self.policy.grain)
        self.book.send(Tag("step", "gradients", self.unit.name), hops)

    def reduce(self) -> None:
        """Count the messages of a reduction of this unit's gradient, and with offload the mean's copy to the host."""
        policy, unit, book = self.policy, self.unit, self.book
        if self.placement.shard:
            book.copied[CopyKey("to_host", "gradients", unit.name)] += MASTER_BYTES * unit.shard
        hops = self.hops.of(reduction_hops, policy, unit.piece, policy.grain)
        book.send(Tag("backward", "gradients", unit.name), hops)
