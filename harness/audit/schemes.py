"""Finds the scheme of data parallelism whose messages match those that a program sent in a step.

An audit knows a closed form of each scheme: a formula for the number of elements that each kind of collective has in a
micro-batch.  A collective counts with its whole message, which is the complete tensor, such as the gathered tensor of
an all-gather.  A rank sends only a part of this tensor; :mod:`harness.audit.wire` computes how many bytes the part has.
In the table, 1 stands for as many elements as the model has parameters.

| scheme | all-gather | reduce-scatter | all-reduce |
| --- | --- | --- | --- |
| DDP | | | 1 |
| ZeRO-1, ZeRO-2 | 1 in the optimizer's step | 1, or 1 in a reduce or an all-reduce instead | |
| ZeRO-3 | 1 in forward, 1 in backward | 1 | |
| HSDP of S shards | as ZeRO-3, among the shards | 1 among the shards | 1 / S among the replicas |
| hpZ | 1 in forward among all ranks, 1 in backward inside a group | as ZeRO-3 | |

Modules whose weights stay gathered after forward are not gathered again in backward.  As in ZeRO++, an all-gather in a
type of 8 bits or less is called qwZ.  An all-to-all in such a type that takes the place of the reduce-scatter is called
qgZ.  If the program uses FSDP2, the sizes, padding and types are read from its units, which are the modules given to
``fully_shard()``.  The closed form is then exact.

This project's engine sends frames.  A frame is an encoded shard: codes, scales and padding.  The sizes of frames are
read from the running engine, so the closed form of the engine's messages is exact too.  The next table has the bytes
that a rank sends in hierarchical ZeRO-3 and ZeRO++.  N is the number of nodes, R the number of ranks on each node, and
F the bytes of one rank's frames for the whole model.

| | to other nodes | inside the rank's node |
| --- | --- | --- |
| gather for forward | (N - 1) F | (R - 1) N F |
| gather for backward, of weights that do not stay gathered | (N - 1) F, or 0 with hpZ | (R - 1) N F |
| reduction | (N - 1) F | (R - 1) N F |
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from harness.audit.calls import PHASES, Calls, Count, Rank
from harness.audit.witness import item_bytes

TOLERANCE: Final = 0.01  # largest relative difference of measured bytes from those of the closed form
_SMALL: Final = 0.005  # share of the model's elements; messages with fewer count as norms, losses or scales
_NARROW: Final = ("int8", "uint8")


@dataclass(frozen=True, slots=True)
class Term:
    """One row of the comparison with a scheme of data parallelism: measured and expected bytes of one kind of messages.

    Messages are of one kind if they have the same operation, phase, element type and group size.  For this project's
    engine, they are of one kind if they have the same operation, phase and group.  Both numbers of bytes are sums over
    the messages of one rank in one step.  A collective counts with its whole message, such as the gathered tensor of an
    all-gather.  The expected bytes come from the scheme's closed form, a formula for what the scheme sends.
    """

    operation: str
    phase: str
    dtype: str
    group_size: int
    measured: int
    expected: float | None = None  # bytes by the closed form; None if the closed form has no such messages
    holds: str = ""  # what this project's engine sends in these messages, in words

    @property
    def difference(self) -> float | None:
        """Measured bytes over expected bytes, minus 1; None if the scheme has no such messages."""
        return None if not self.expected else self.measured / self.expected - 1


@dataclass(frozen=True, slots=True)
class Scheme:
    """A scheme of data parallelism, compared with the messages of one rank in one step."""

    name: str
    terms: tuple[Term, ...]  # the messages that the scheme's closed form has
    rest: tuple[Term, ...]  # all other messages, such as norms and losses
    source: str  # where the number of parameters is from

    @property
    def measured(self) -> int:
        """The measured bytes of all ``terms`` together."""
        return sum(term.measured for term in self.terms)

    @property
    def expected(self) -> float:
        """The expected bytes of all ``terms`` together, by the scheme's closed form (a formula for what it sends)."""
        return sum(term.expected or 0 for term in self.terms)


NONE: Final = "no known scheme"


@dataclass(frozen=True, slots=True)
class Model:
    """The size of the audited model."""

    elements: int  # of all parameters
    source: str  # where the number of elements is from
    units: tuple[dict[str, Any], ...] = ()  # FSDP2's units, as the witness describes them
    hops: tuple[dict[str, Any], ...] = ()  # hops of this project's engine, as the witness describes them


def model_of(calls: Calls, elements: int | None = None, named: str = "") -> Model | None:
    """Return the size of the audited model; None if the number of its parameters is not known.

    If FSDP2 trains the model, the result also describes FSDP2's units (the modules given to ``fully_shard()``).  If
    this project's engine trains the model, the result describes the engine's messages.

    Args:
        calls: The calls of all ranks, with what was recorded about the model in the program's processes.
        elements: Number of parameters, if the user has named the model; otherwise None.
        named: The name that the user has given, such as ``train:build_model``.  It becomes the result's ``source``.
    """
    events = [rank.model for rank in calls.ranks if rank.model is not None]
    units: list[dict[str, Any]] = max((event["fsdp"] for event in events), key=len, default=[])
    of_units = sum(unit["elements"] for unit in units)
    hops = next((tuple(event["own"]) for event in events if event.get("own")), ())
    if elements is not None:
        return Model(elements, named, tuple(units) if of_units == elements else (), hops)
    if not events:
        return None
    event = max(events, key=lambda event: int(event["elements"]))
    if of_units:
        return Model(of_units, "the units of FSDP2", tuple(units))
    return Model(event["elements"], event["by"], hops=hops) if event["elements"] else None


def recognise(calls: Calls, rank: Rank, step: int, model: Model) -> Scheme:
    """Return the scheme of data parallelism whose closed form fits the calls that ``rank`` made in ``step``.

    A closed form is a formula for the bytes that a scheme sends.  If no closed form fits within :data:`TOLERANCE`, the
    name of the returned scheme is :data:`NONE`.
    """
    if model.hops and (own := rank.model or {}).get("own"):
        return _of_hops(calls, rank, step, model, own["own"])
    sums: dict[tuple[str, str, str, int], Count] = defaultdict(lambda: Count(0, 0, 0))
    for key, count in rank.rows.get(step, {}).items():
        place = (key.operation, key.phase, key.dtype, calls.group(rank, key.group).size)
        sums[place] = sums[place].plus(count)
    large = {place: count for place, count in sums.items() if count.elements >= _SMALL * model.elements}
    small = [_term(place, count) for place, count in sums.items() if place not in large and count.bytes]
    name, expected = _closed_form(large, model)
    order = sorted(large, key=lambda place: (PHASES.index(place[1]), place))
    terms = [_term(place, large[place], expected.get(place)) for place in order]
    fits = all(term.difference is not None and abs(term.difference) <= TOLERANCE for term in terms)
    if not large or not fits or set(expected) - set(large):
        named = [term for term in terms if term.expected is not None]
        rest = [term for term in terms if term.expected is None]
        return Scheme(NONE, tuple(named), (*rest, *small), model.source)
    return Scheme(name, tuple(terms), tuple(small), model.source)


Place = tuple[str, str, str, int]  # operation, phase, type, size of the group


def _term(place: Place, count: Count, expected: float | None = None) -> Term:
    return Term(*place, measured=count.bytes, expected=expected)


def _closed_form(large: dict[Place, Count], model: Model) -> tuple[str, dict[Place, float]]:
    """Guess the scheme from the kinds of messages that a rank sent, and return its name and its expected bytes.

    Args:
        large: Measured sums of one rank's messages in one step, by (operation, phase, type, group size).  Sums that are
            too small to be weights or gradients are left out.
        model: Size of the model.

    Returns:
        (name, bytes).  ``name`` is :data:`NONE` if the messages look like those of no scheme.  ``bytes`` has the
        expected bytes, by the same keys as ``large``.  A key is missing if the scheme sends no such messages.
    """
    if model.units:
        found = _of_units(large, model)
        if found is not None:
            return found
    of = {name: {place: count for place, count in large.items() if place[0] == name} for name in _OPERATIONS}
    gathers, reductions, sums, swaps = (of[name] for name in _OPERATIONS[:4])
    elements = model.elements

    def whole(places: Sequence[Place], share: float = 1.0) -> dict[Place, float]:
        """Return the expected bytes of one step, for each of ``places``.

        The number of micro-batches is not known.  It is estimated for each place from the elements that were measured
        there, and is at least 1.  For example, with 1000 parameters, a share of 0.5 and 1490 measured elements, the
        quotient 1490 / (0.5 * 1000) = 2.98 is rounded to 3 micro-batches.

        Args:
            places: The places, which are keys of ``large``: (operation, phase, type, group size).
            share: Elements of one micro-batch's messages at each of the places, divided by the model's parameters.
        """
        return {
            place: share
            * elements
            * _item(place[2])
            * max(1, round(large[place].elements / (share * elements)))
            for place in places
        }

    if sums and not gathers and not reductions and not swaps and not of["reduce"]:
        return ("DDP" if len(sums) == 1 else NONE), whole([*sums])
    in_optimizer = [place for place in gathers if place[1] == "optimizer"]
    if in_optimizer and len(in_optimizer) == len(gathers):
        reduced = reductions or of["reduce"] or sums
        return "ZeRO-1 or ZeRO-2", whole([*in_optimizer, *reduced])
    if not gathers or not (reductions or swaps):
        return NONE, {}
    name, shards = "ZeRO-3", max(place[3] for place in [*reductions, *swaps])
    expected = whole([*gathers, *reductions])
    if replicas := [*sums]:
        name = f"HSDP of {shards} shards"
        expected |= whole(replicas, 1 / shards)
    forward = [place for place in gathers if place[1] == "forward"]
    backward = [place for place in gathers if place[1] == "backward"]
    techniques = []
    if any(_bits(place[2]) <= 8 for place in gathers):
        techniques.append("qwZ")
    if forward and backward and max(p[3] for p in backward) < max(p[3] for p in forward):
        techniques.append("hpZ")
    if swaps:
        techniques.append("qgZ" if all(_bits(place[2]) <= 8 for place in swaps) else "all-to-all reduction")
        expected |= {place: float(large[place].bytes) for place in swaps}
    if not backward:
        name += ", weights kept for backward"
    return " with ".join(filter(None, (name, ", ".join(techniques)))), expected


_OPERATIONS: Final = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "reduce", "broadcast")


def _of_units(large: dict[Place, Count], model: Model) -> tuple[str, dict[Place, float]] | None:
    """Return the name of FSDP2's scheme and its expected bytes, computed from the sizes and groups of FSDP2's units.

    A unit is a module that was given to ``fully_shard()``.  ``large`` has the measured sums of a rank's messages, by
    (operation, phase, type, group size).  The returned bytes have the same keys.  Returns None if FSDP2 should have
    sent messages under a key that ``large`` lacks.
    """
    once: dict[Place, float] = defaultdict(float)
    kept = all(not unit["gathered_again_in"] for unit in model.units)
    for unit in model.units:
        weights, gradients, shards = unit["weights"], unit["gradients"], unit["shards"]
        once["all_gather", "forward", weights, shards] += unit["padded"] * _item(weights)
        if unit["gathered_again_in"]:
            group = unit["gathered_again_in"]
            once["all_gather", "backward", weights, group] += unit["padded"] * _item(weights)
        once["reduce_scatter", "backward", gradients, shards] += unit["trained"] * _item(gradients)
        if unit["replicas"] > 1:
            place = ("all_reduce", "backward", gradients, unit["replicas"])
            once[place] += unit["trained"] * _item(gradients) / shards
    once = {place: size for place, size in once.items() if size and place[3] > 1}
    if set(once) - set(large):
        return None
    expected = {place: size * max(1, round(large[place].bytes / size)) for place, size in once.items()}
    shards = "/".join(sorted({str(unit["shards"]) for unit in model.units}))
    hybrid = any(unit["replicas"] > 1 for unit in model.units)
    name = f"HSDP of {shards} shards" if hybrid else "ZeRO-3"
    return f"{name} (FSDP2{', weights kept for backward' if kept else ''})", expected


def _of_hops(calls: Calls, rank: Rank, step: int, model: Model, hops: Sequence[dict[str, Any]]) -> Scheme:
    """Compare what ``rank`` sent in ``step`` with what this project's engine should send, and return the scheme.

    ``hops`` describes the exchanges in which the engine gathers weights and reduces gradients; these descriptions were
    read from the running engine.  The expected bytes are summed over all exchanges, without those through shared
    memory, which an audit does not see.  The scheme's name is :data:`NONE` if the measured bytes differ from the
    expected bytes by more than :data:`TOLERANCE`, or if the rank sent other large messages too.
    """
    sums: dict[_Spot, Count] = defaultdict(lambda: Count(0, 0, 0))
    types: dict[_Spot, str] = {}
    for key, count in rank.rows.get(step, {}).items():
        if key.done_as != "recv":  # the bytes of a recv are sent by another rank
            place = key.operation, key.phase, calls.group(rank, key.group).ranks
            sums[place], types[place] = sums[place].plus(count), key.dtype
    seen = [hop for hop in hops if not hop["unseen"]]
    expected: dict[_Spot, float] = defaultdict(float)
    holds: dict[_Spot, list[str]] = defaultdict(list)
    micro_batches = _micro_batches(sums, seen)
    for hop in seen:
        ranks, phase = tuple(hop["ranks"]), _PHASE[hop["turn"]]
        others = len(ranks) - 1
        if ("send", phase, ranks) in sums:
            place, times = ("send", phase, ranks), others
        elif hop["kind"] == "shift":
            place, times = ("all_to_all", phase, ranks), others
        else:  # the whole message of a collective also holds the rank's own part
            place, times = (hop["kind"], phase, ranks), others + 1
        made = micro_batches - 1 if hop["turn"] == "again" else micro_batches if hop["each"] else 1
        nbytes = (1 if hop["turn"] == "forward" else made) * times * hop["bytes"]
        if nbytes:
            expected[place] += nbytes
            what = "gradients" if hop["turn"] == "reduction" else "weights"
            scales = f" with {hop['scales'] / hop['bytes']:.1%} scales" if hop["scales"] else ""
            where = "between nodes" if hop["between"] else "inside nodes"
            holds[place].append(f"{what} {where} as {hop['codec']}{scales}")
    order = sorted(expected, key=lambda place: (PHASES.index(place[1]), place))
    terms = [
        Term(
            place[0], place[1], types.get(place, "uint8"), len(place[2]), sums[place].bytes, expected[place],
            "; ".join(dict.fromkeys(holds[place])),
        )
        for place in order
    ]  # fmt: skip
    outside = {place: count for place, count in sums.items() if place not in expected and count.bytes}
    rest = [
        Term(place[0], place[1], types[place], len(place[2]), count.bytes) for place, count in outside.items()
    ]
    fits = all(abs(term.difference or 0.0) <= TOLERANCE for term in terms)
    large = any(count.elements >= _SMALL * model.elements for count in outside.values())
    name = NONE if not terms or not fits or large else _name_of(hops)
    return Scheme(name, tuple(terms), tuple(rest), model.source)


_Spot = tuple[str, str, tuple[int, ...]]  # operation, phase, ranks of the group
_PHASE: Final = {"forward": "forward", "again": "forward", "backward": "backward", "reduction": "backward"}


def _micro_batches(sums: dict[_Spot, Count], hops: Sequence[dict[str, Any]]) -> int:
    """Return the number of micro-batches in the audited step of this project's engine.

    Each micro-batch has one forward pass.  ``sums`` has the bytes that the rank sent in all forward passes of the step
    together.  ``hops`` has the bytes of a single forward pass: of the step's first (turn ``forward``), and of each
    later forward pass (turn ``again``).  For example, with 100 bytes in the first pass, 60 in each later pass and 220
    in all, there were 3 micro-batches.

    If only the first forward pass gathers weights, the number cannot be computed, and 1 is returned.
    """
    first, again = (
        sum((len(hop["ranks"]) - 1) * hop["bytes"] for hop in hops if hop["turn"] == turn)
        for turn in ("forward", "again")
    )
    sent = sum(
        count.bytes if operation == "send" else count.bytes * (len(ranks) - 1) / len(ranks)
        for (operation, phase, ranks), count in sums.items()
        if phase == "forward"
    )
    return 1 + max(0, round((sent - first) / again)) if again else 1


def _name_of(hops: Sequence[dict[str, Any]]) -> str:
    """Return the name of the scheme whose messages ``hops`` describes, such as ``hierarchical ZeRO-3 with qwZ``."""
    by_pass = {turn: [hop for hop in hops if hop["turn"] == turn] for turn in _PHASE}
    gathers, reductions = by_pass["forward"] + by_pass["backward"], by_pass["reduction"]
    techniques = []
    if any(hop["scales"] and hop["source"] != "copy" for hop in gathers):
        techniques.append("qwZ")
    if any(hop["source"] == "copy" for hop in by_pass["backward"]):
        techniques.append("hpZ")
    if any(hop["scales"] for hop in reductions):
        techniques.append("qgZ")
    stage = "ZeRO-3" if by_pass["again"] else "ZeRO-1 or ZeRO-2"
    two_hops = {hop["between"] for hop in gathers} == {False, True}
    name = f"hierarchical {stage}" if two_hops else stage
    if two_hops and len(techniques) == 3:
        name, techniques = "ZeRO++", ["qwZ", "hpZ", "qgZ"]
    return f"{' with '.join(filter(None, (name, ', '.join(techniques))))} (this project's engine)"


def _item(dtype: str) -> int:
    return item_bytes(dtype)


def _bits(dtype: str) -> int:
    return 8 * item_bytes(dtype)


def share_of(count: float, dtype: str, model: Model | None) -> float | None:
    """Convert ``count`` bytes of the type ``dtype`` into elements, and return these as a share of the model's elements.

    Returns None if there is no model, or if ``count`` is NaN.
    """
    return None if model is None or math.isnan(count) else count / item_bytes(dtype) / model.elements
