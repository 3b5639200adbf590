"""Bytes that a policy sends and memory that it holds, from the policy alone.

Pure: no torch.  The engine's ledger must equal :func:`predict` to the byte; a test demands it for
every policy, shape and topology tried.  Counting rule (architecture, decision 8): a logical
message counts once per destination, self excluded; a ring counts what it sends to its neighbour.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from impl.codec import ITEM_BYTES
from impl.geometry import UnitGeometry, pieces
from impl.policy import Policy
from impl.topology import Axis, Topology

Phase = Literal["forward", "backward", "evaluate", "step"]
Purpose = Literal["weights", "gradients", "control", "state"]
Link = Literal["inter", "intra"]
Event = Literal["forward", "backward", "evaluate", "norm", "step"]

NORM_BYTES: Final = 8  # one fp64 per rank: its sum of squares
MASTER_BYTES: Final = 4  # fp32
ADAM_BYTES: Final = 8  # two fp32 moments per element


class LedgerKey(NamedTuple):
    """What a byte was for and over which kind of link it went."""

    phase: Phase
    purpose: Purpose
    unit: str
    hop: str
    link: Link


class Sent(NamedTuple):
    """Payload bytes and messages (one per destination)."""

    bytes: int
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A regular run: ``steps`` optimizer steps, then evaluation passes on the last weights.

    Attributes:
        micro_batches: forward and backward passes per step (accumulation).
        steps: optimizer steps.
        evaluations: forward passes without gradient after the last step.
        norms: global norms computed, in total; taken evenly from the steps.
    """

    micro_batches: int = 1
    steps: int = 1
    evaluations: int = 0
    norms: int = 0

    def events(self) -> list[Event]:
        """The run as a sequence of passes."""
        one: list[Event] = ["forward", "backward"]
        events: list[Event] = []
        for index in range(self.steps):
            events += one * self.micro_batches
            events += ["norm"] * (self.norms * (index + 1) // self.steps - self.norms * index // self.steps)
            events.append("step")
        return events + ["evaluate"] * self.evaluations


def destinations(topology: Topology, axis: Axis, rank: int, *, ring: bool) -> dict[Link, int]:
    """How many messages ``rank`` sends over each kind of link in one exchange along ``axis``.

    Args:
        topology: who shares a node with whom.
        axis: the group.
        rank: the sender.
        ring: all size-1 messages go to the next rank of the group, instead of one to each.
    """
    group = axis.group(rank)
    me = axis.digit(rank)
    targets = [group[(me + 1) % axis.size]] * (axis.size - 1) if ring else [r for r in group if r != rank]
    counts: dict[Link, int] = {"inter": 0, "intra": 0}
    for target in targets:
        counts["intra" if topology.node_of(target) == topology.node_of(rank) else "inter"] += 1
    return {link: count for link, count in counts.items() if count}


@dataclass(slots=True)
class _Book:
    """Adds up one rank's messages."""

    topology: Topology
    rank: int
    rows: dict[LedgerKey, list[int]]

    def exchange(
        self, phase: Phase, purpose: Purpose, unit: str, axis: Axis, size: int, *, ring: bool = False
    ) -> None:
        for link, count in destinations(self.topology, axis, self.rank, ring=ring).items():
            row = self.rows[LedgerKey(phase, purpose, unit, axis.name, link)]
            row[0] += count * size
            row[1] += count


def predict(
    policy: Policy,
    topology: Topology,
    units: Sequence[UnitGeometry],
    rank: int,
    load: Load | Iterable[Event],
) -> dict[LedgerKey, Sent]:
    """Everything that ``rank`` sends, by phase, purpose, unit, hop and link.

    Args:
        policy: what is sent.
        topology: where ranks stand.
        units: the model's units, laid out for ``topology.world`` ranks.
        rank: the sender.
        load: a regular run, or the sequence of passes; a ``step`` ends hpZ's secondary.

    Raises:
        PolicyError: if the policy does not fit the topology.
    """
    policy.check(topology)
    axes, spared = policy.gather_axes(topology)
    book = _Book(topology, rank, defaultdict(lambda: [0, 0]))
    current = False  # hpZ's secondary holds these weights
    for event in load.events() if isinstance(load, Load) else load:
        if event == "norm":
            book.exchange("step", "control", "", topology.world_axis, NORM_BYTES)
        elif event == "step":
            current = False
        elif event in ("forward", "backward", "evaluate"):
            hops = axes[spared:] if current else axes
            for unit in units:
                _book_gather(book, policy, event, unit, (axes, hops))
                if event == "backward" and unit.trainable:
                    _book_reduce(book, policy, unit)
            current = spared > 0
    return {key: Sent(*row) for key, row in book.rows.items()}


def _book_gather(
    book: _Book,
    policy: Policy,
    phase: Phase,
    unit: UnitGeometry,
    route: tuple[tuple[Axis, ...], tuple[Axis, ...]],
) -> None:
    axes, hops = route  # all hops, and those that are sent
    held = policy.weights.frame_bytes(unit.shard)
    for axis in axes:
        if axis in hops:
            book.exchange(phase, "weights", unit.name, axis, held, ring=policy.gather == "flat")
        held *= axis.size


def _book_reduce(book: _Book, policy: Policy, unit: UnitGeometry) -> None:
    slices = book.topology.world
    for axis, codec in policy.reduce_axes(book.topology):
        slices //= axis.size
        for start, end in pieces(unit.shard, policy.chunks, policy.grain):
            size = slices * codec.frame_bytes(end - start)
            book.exchange("backward", "gradients", unit.name, axis, size, ring=policy.reduce == "ring")


def memory(
    policy: Policy, topology: Topology, units: Sequence[UnitGeometry], outer: Sequence[int] = (0,)
) -> dict[str, int]:
    """Bytes that one rank holds, by part, at the worst moment of a step.

    ``masters`` 4 S; ``gradients`` 4 S of trainable units; ``optimizer`` 8 S (Adam); ``secondary``
    the kept frames (facts A4: alpha M / P at 16 bits); ``feedback`` the kept errors, of hop k as
    many as that hop encodes; ``gathered`` and ``local_gradients`` those of the root and of the
    largest block, unsharded, in the compute type (:func:`_largest_block`).  S is the sum of shards.
    Reduces to facts A10 (16 bytes per parameter over P) for stage 3 in 16 bits, less the 16-bit
    shard, which is encoded from the master on the way out.

    Args:
        policy: what is held.
        topology: where ranks stand.
        units: laid out for ``topology.world`` ranks.
        outer: indices of the root's units.
    """
    axes, spared = policy.gather_axes(topology)
    copies = 1
    for axis in axes[:spared]:
        copies *= axis.size
    item = ITEM_BYTES[policy.compute]
    shards = sum(unit.shard for unit in units)
    trainable = sum(unit.shard for unit in units if unit.trainable)
    outer = [i for i in outer if i < len(units)]
    inner = [i for i in range(len(units)) if i not in outer]
    around = sum(units[i].padded for i in outer)
    gradients = [units[i].padded for i in inner if units[i].trainable]
    outer_gradients = sum(units[i].padded for i in outer if units[i].trainable)
    return {
        "masters": MASTER_BYTES * shards,
        "gradients": MASTER_BYTES * trainable,
        "optimizer": ADAM_BYTES * trainable,
        "secondary": sum(copies * policy.weights.frame_bytes(u.shard) for u in units) if spared else 0,
        "feedback": _feedback_bytes(policy, topology, trainable),
        "gathered": item * (around + _largest_block([units[i] for i in inner])),
        "local_gradients": item * (outer_gradients + max(gradients, default=0)),
    }


def _largest_block(units: Sequence[UnitGeometry]) -> int:
    """Most elements of blocks that are gathered together; ``units`` in the order in which they run.

    A block's units, trainable and frozen, and in a backward pass with them the frozen ones of the block
    after it: those go when the gradients of its inputs have arrived, which also calls the block before.
    """
    whole: dict[str, int] = defaultdict(int)
    frozen: dict[str, int] = defaultdict(int)
    for unit in units:
        whole[unit.block] += unit.padded
        frozen[unit.block] += 0 if unit.trainable else unit.padded
    after = [*list(frozen.values())[1:], 0]
    return max((size + more for size, more in zip(whole.values(), after, strict=False)), default=0)


def _feedback_bytes(policy: Policy, topology: Topology, trainable: int) -> int:
    """Bytes of kept errors, for ``trainable`` elements of one rank's shards."""
    if policy.feedback is None:
        return 0
    elements, slices = 0, topology.world
    hops = zip(policy.reduce_axes(topology), policy.feedback_hops(topology), strict=True)
    for (axis, _), kept in hops:
        elements += trainable * slices if kept else 0
        slices //= axis.size
    return ITEM_BYTES[policy.feedback.state] * elements
