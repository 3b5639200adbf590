"""Predicts the bytes that a policy sends, from the policy alone.

Pure: no torch.  The engine's ledger must equal :func:`predict` to the byte.  A message counts once per
destination, self excluded; in a ring the neighbour is the only one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from impl.codecs.codec import Codec
from impl.plan.policy import Budgeted, Offload, Policy
from impl.plan.prefetch_schedule import kept_units
from impl.plan.shard_layout import UnitGeometry, chunked
from impl.plan.topology import Axis, Topology

Phase = Literal["forward", "backward", "evaluate", "step"]
Purpose = Literal["weights", "gradients", "persistent", "buffers", "control", "state"]
Link = Literal["inter", "intra"]
Direction = Literal["to_host", "to_device"]
Copied = Literal["weights", "secondary", "gradients", "state"]
Event = Literal[
    "forward", "accumulate", "backward", "evaluate", "norm", "step", "changed", "forgotten", "dropped"
]

ORDER_BYTES: Final = 16  # of a fingerprint message: the count of exchanges, and the hash of their order
NORM_BYTES: Final = 8  # one fp64 per rank: its sum of squares
SQUARES_BYTES: Final = 8  # one fp64 per rank, unit and codec of a budget: its sum of squared errors
MASTER_BYTES: Final = 4  # fp32


class Tag(NamedTuple):
    """The purpose of a message; a ledger adds axis and link."""

    phase: Phase
    purpose: Purpose
    unit: str = ""


class LedgerKey(NamedTuple):
    """The purpose of a byte, its hop and the kind of its link."""

    phase: Phase
    purpose: Purpose
    unit: str
    hop: str
    link: Link


class Sent(NamedTuple):
    """Payload bytes and messages (one per destination)."""

    bytes: int
    messages: int


class CopyKey(NamedTuple):
    """The direction of a copy between host and device, its purpose and its unit."""

    direction: Direction
    purpose: Copied
    unit: str


class Decision(NamedTuple):
    """A codec that a budget chose for a unit's messages, from a step's gathers and reductions on."""

    step: int  # optimizer steps before it
    purpose: Budgeted
    unit: str
    hop: str  # name of the axis; empty for weights
    codec: Codec
    vnmse: float  # in the step before: sum((decoded - x)^2) / sum(x^2) on all ranks; 0 for zeros


def passes(policy: Policy, *, micro_batches: int = 1, norms: int = 0) -> list[Event]:
    """The passes of a step; ``accumulate`` is a backward pass that reduces nothing."""
    first: list[Event] = ["forward", "backward" if policy.reduces_each_micro_batch else "accumulate"]
    norm: list[Event] = ["norm"]
    return [*first * (micro_batches - 1), "forward", "backward", *norm * norms, "step"]


@functools.cache
def destinations(topology: Topology, axis: Axis, rank: int, *, ring: bool) -> Mapping[Link, int]:
    """The number of messages that ``rank`` sends over each kind of link in one exchange along ``axis``.

    In a ``ring`` all size - 1 messages go to the next rank of the group, else one to each.
    """
    group, me = axis.group(rank), axis.digit(rank)
    targets = [group[(me + 1) % axis.size]] * (axis.size - 1) if ring else [r for r in group if r != rank]
    inside = sum(topology.node_of(target) == topology.node_of(rank) for target in targets)
    counts: dict[Link, int] = {"inter": len(targets) - inside, "intra": inside}
    return {link: count for link, count in counts.items() if count}


@dataclass(slots=True)
class Book:
    """Adds up one rank's messages, and its copies between host and device; sizes are in bytes."""

    topology: Topology
    rank: int
    sent: dict[LedgerKey, Sent] = field(default_factory=dict)
    copied: Counter[CopyKey] = field(default_factory=Counter)

    def exchange(self, tag: Tag, axis: Axis, size: int, *, ring: bool = False) -> None:
        """One message of ``size`` to every other rank along ``axis``."""
        for link, count in destinations(self.topology, axis, self.rank, ring=ring).items():
            key = LedgerKey(*tag, axis.name, link)
            nbytes, messages = self.sent.get(key, (0, 0))
            self.sent[key] = Sent(nbytes + count * size, messages + count)

    def control(self, size: int, purpose: Purpose = "control") -> None:
        """One message of ``size`` from every rank to all others."""
        self.exchange(Tag("step", purpose), self.topology.world_axis, size)

    def gather(self, tag: Tag, axes: Iterable[Axis], size: int, *, ring: bool = False) -> None:
        """Hops along ``axes``; each forwards all that the hops before it gathered of messages of ``size``."""
        for axis in axes:
            self.exchange(tag, axis, size, ring=ring)
            size *= axis.size

    def reduction(self, policy: Policy, unit: str, piece: int, grain: int) -> None:
        """A reduction to ``piece`` elements a rank, in chunks on ``grain``, and the gather of copies."""
        tag = Tag("backward", "gradients", unit)
        for axis, _, _, sizes in reduction_hops(policy, self.topology, piece, grain):
            for size in sizes:
                self.exchange(tag, axis, size, ring=policy.reduce == "ring")
        axes, codec = policy.replica_axes(self.topology)
        self.gather(tag, axes, codec.frame_bytes(piece))


def gather_hops(
    policy: Policy, topology: Topology, unit: UnitGeometry, codec: Codec, *, again: bool
) -> Iterator[tuple[Axis, Codec, int, int]]:
    """Each hop of the weight gather of a ``unit`` with its own ``policy``.

    Yields its axis, and the codec, elements and bytes of a rank's message.  ``codec`` is that of the hops
    before an hpZ group; a gather ``again`` starts from hpZ's copy.
    """
    axes, spared = policy.gather_axes(topology)
    frames = 1
    for index, axis in enumerate(axes):
        if spared == index > 0 and (again or policy.sends_copy):
            codec = policy.copy_codec
        if index >= spared or not again:
            yield axis, codec, frames * unit.shard, frames * policy.planes * codec.frame_bytes(unit.shard)
        frames *= axis.size


def reduction_hops(
    policy: Policy, topology: Topology, piece: int, grain: int
) -> Iterator[tuple[Axis, Codec, int, list[int]]]:
    """Each hop of a reduction to ``piece`` elements a rank, in chunks on ``grain``.

    Yields its axis and codec, the pieces in a rank's message to another, and that message's bytes by chunk.
    """
    slices = topology.world
    lengths = [end - start for start, end in chunked(piece, policy.chunks, grain)]
    for axis, codec in policy.reduce_axes(topology):
        slices //= axis.size
        yield axis, codec, slices, [slices * codec.frame_bytes(length) for length in lengths]


def predict(
    policy: Policy,
    topology: Topology,
    units: Sequence[UnitGeometry],
    rank: int,
    events: Iterable[Event],
    *,
    buffer_bytes: int = 0,
    decisions: Collection[Decision] = (),
) -> Book:
    """Everything that ``rank`` sends in ``events``, and its copies between host and device for offload.

    For an offloaded master 4 S bytes go to the host per reduction, and its frame to the device once a step
    or, where frames are offloaded, whenever it is sent.  Offloaded secondary frames go to the host when they
    are kept and to the device when they are used again.

    ``units`` are in model order, laid out for ``topology.world`` ranks.  A ``step`` changes the trained
    weights, ``changed`` (``Zero.weights_changed``) all; after ``forgotten`` (``Zero.forget_gathered``) all
    are gathered anew; after ``dropped`` (``Zero.drop_gradients``) the next gather sends no differences.
    ``buffer_bytes`` are of the model's persistent buffers; ``decisions`` of a budget count steps.

    Raises PolicyError: if the policy does not fit the topology.
    """
    policy.check(topology)
    book = Book(topology, rank)
    senders = [
        _Sender(book, policy.for_unit(unit), unit, placement)
        for unit, placement in zip(units, placements_of(policy.offload, units), strict=True)
    ]
    kept = kept_units(policy, units)
    buffers_differ, passes, steps = bool(buffer_bytes), 0, 0
    for event in events:
        match event:
            case "norm":
                book.control(NORM_BYTES)
            case "step" | "changed" | "forgotten":
                for sender in senders:
                    if event != "step" or sender.unit.trainable:
                        sender.weights_changed(event)
                if event == "step" and policy.budget is not None:
                    if steps % policy.budget.every == 0:  # sums of values, and of each codec's errors
                        chosen = sum(unit.trainable and not unit.persistent for unit in units)
                        sums = sum(1 + len(codecs) for codecs in policy.candidates.values())
                        book.control(SQUARES_BYTES * chosen * sums)
                    steps += 1
                    for choice, sender in itertools.product(decisions, senders):
                        if (choice.step, choice.unit) == (steps, sender.unit.name):
                            sender.policy = sender.policy.with_choice(choice.purpose, choice.codec)
            case "dropped":
                for sender in senders:
                    sender.steps = None
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
                passes += 1
                if policy.order_every and passes % policy.order_every == 0:
                    book.control(ORDER_BYTES)
    return book


class Placement(NamedTuple):
    """The parts of one unit in host memory."""

    shard: bool = False  # the master with its mean gradient and optimizer state, or the frozen shard
    frames: bool = False  # the encoded shard, and hpZ's secondary frames


ON_DEVICE = Placement()


def placements_of(offload: Offload, units: Sequence[UnitGeometry]) -> list[Placement]:
    """The placement of each unit's states; ``units`` are in model order, shares are of padded elements."""
    stepped = _chosen([unit.padded if unit.trainable else 0 for unit in units], offload.optimizer)
    framed = _chosen([unit.padded for unit in units], offload.weights)
    rows = zip(units, stepped, framed, strict=True)
    return [Placement(step if unit.trainable else frames, frames) for unit, step, frames in rows]


def _chosen(sizes: Sequence[int], share: float) -> list[bool]:
    """For each size whether it is needed, from the first on, to reach ``share`` of the sum; never for 0."""
    wanted, before = share * sum(sizes), itertools.accumulate(sizes, initial=0)
    return [size > 0 and held < wanted for size, held in zip(sizes, before, strict=False)]


@dataclass(slots=True)
class _Sender:
    """One unit on one rank, with the state that its next messages depend on."""

    book: Book
    policy: Policy
    unit: UnitGeometry
    placement: Placement
    gathered: bool = False  # its weights stayed from the pass before
    current: bool = False  # hpZ's secondary holds these weights
    uploaded: bool = False  # the device holds the frame of an offloaded master
    steps: int | None = None  # optimizer steps since the weights themselves were sent; None: they are next

    def weights_changed(self, event: Event) -> None:
        """All kept copies are stale; after an optimizer step differences may still start from them."""
        self.gathered = self.current = self.uploaded = False
        if event == "changed":
            self.steps = None
        elif event == "step" and self.steps is not None:
            self.steps += 1

    def gather(self, phase: Phase, *, keep: bool) -> None:
        """Gather the weights, unless gathered; ``keep`` them, or reshard."""
        policy, book, placement, unit = self.policy, self.book, self.placement, self.unit
        if not self.gathered:
            if placement.shard and not self.current and (placement.frames or not self.uploaded):
                frames = policy.planes * policy.weights.frame_bytes(unit.shard)
                book.copied[CopyKey("to_device", "weights", unit.name)] += frames
                self.uploaded = True
            if placement.frames and (secondary := secondary_bytes(policy, book.topology, unit)):
                direction: Direction = "to_device" if self.current else "to_host"
                book.copied[CopyKey(direction, "secondary", unit.name)] += secondary
            tag = Tag(phase, "persistent" if unit.persistent else "weights", unit.name)
            hops = gather_hops(policy, book.topology, unit, self._sent(), again=self.current)
            for axis, _, _, size in hops:
                book.exchange(tag, axis, size, ring=policy.gather == "flat")
            self.current = policy.gather_axes(book.topology)[1] > 0
        self.gathered = keep or policy.stage < 3

    def _sent(self) -> Codec:
        """The codec of the hops before an hpZ group: of weights, or of differences from its copy."""
        policy = self.policy
        if policy.differences is not None and not self.current:
            if self.steps is not None and not (policy.refresh and self.steps >= policy.refresh):
                return policy.differences
            self.steps = 0
        return policy.weights

    def reduce(self) -> None:
        """Reduce the gradient of a trained unit."""
        policy, unit, book = self.policy, self.unit, self.book
        if self.placement.shard:
            book.copied[CopyKey("to_host", "gradients", unit.name)] += MASTER_BYTES * unit.shard
        book.reduction(policy, unit.name, unit.piece, policy.grain)


def secondary_bytes(policy: Policy, topology: Topology, unit: UnitGeometry, kept: Codec | None = None) -> int:
    """Bytes on one rank of hpZ's copy of a unit with its own ``policy``, or with codec ``kept``."""
    axes, spared = policy.gather_axes(topology)
    copies = math.prod(axis.size for axis in axes[:spared]) if spared else 0
    return copies * (kept or policy.copy_codec).frame_bytes(unit.shard)
