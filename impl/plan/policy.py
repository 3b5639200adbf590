"""Defines :class:`Policy`, a frozen value that says what training sends, holds and computes, and its presets.

ZeRO-3, qwZ, hpZ, qgZ and ZeRO++ (2306.10209, sections 3.1 to 3.3) are values of :class:`Policy`, as are the
methods of later papers; :data:`PRESETS` names them.  The engine reads the fields and never asks for a name.
Combinations that cannot be carried out are refused when a policy is built, or, where they depend on the
number of ranks, by :meth:`Policy.check`.

Pure: no torch.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from impl.codecs.codec import (
    BF16,
    FORMATS,
    FP32,
    ITEM_BYTES,
    MX_BLOCK,
    Blocked,
    Codec,
    Dtype,
    FloatCodec,
    IntCodec,
    Law,
    OwnCodec,
    Raw,
    Sums,
    common_grain,
    parse,
)
from impl.named_object import is_name
from impl.plan.own_method import OwnMethod, method
from impl.plan.shard_layout import UnitGeometry
from impl.plan.topology import Axis, Topology

Stage = Literal[0, 1, 2, 3]
Gather = Literal["flat", "hierarchical"]
Reduce = Literal["ring", "one_hop", "two_hop"]
Budgeted = Literal["weights", "gradients"]

LARGEST_SCALE: Final = 2.0**126  # largest loss scale; it is finite in fp32
MOST_CHUNKS: Final = 8  # each chunk holds a slot of the shared memory between its two hops
_GROUP: Final = 8000  # most elements of a block of weights in DeepSpeed, which loads 8 at a time


class PolicyError(ValueError):
    """A policy cannot be carried out, by itself or on a topology; the message gives the reason."""


_types = functools.cache(get_type_hints)  # the types of a class's fields, by name


def _check_literals(settings: object) -> None:
    """Raise PolicyError for a field of a Literal type whose value is not one of the listed ones."""
    for name, kind in _types(type(settings)).items():  # type: ignore[arg-type]  # a class is hashable
        if get_origin(kind) is Literal and (value := getattr(settings, name)) not in get_args(kind):
            raise PolicyError(f"{name} = {value!r}: expected one of {', '.join(map(str, get_args(kind)))}")


def _read(text: str, heads: Iterable[str], forms: Mapping[str, str], allowed: str) -> dict[str, str] | None:
    """Split a text such as ``loco:decay0.9:bf16`` into its first word, "head", and its options.

    ``forms`` maps an option's name to a regular expression whose first group is the option's value;
    ``allowed`` ends the error message.  Returns None for the text ``none``.
    """
    head, *options = text.strip().split(":")
    if head == "none" and not options:
        return None
    settings = {"head": head}
    for option in options:
        matches = {name: match[1] for name, form in forms.items() if (match := re.fullmatch(form, option))}
        if not matches or matches.keys() & settings.keys():
            raise PolicyError(f"{text!r}: option {option!r} is unknown or given twice; {allowed}")
        settings |= matches
    if head not in heads:
        raise PolicyError(f"{text!r}: {allowed}")
    return settings


def _text(head: str, settings: object, defaults: object, prefixes: Mapping[str, str]) -> str:
    """Write ``head`` and, after a colon and its prefix, each field that differs from ``defaults``."""
    options = [
        f"{prefix}{getattr(settings, name)}".removesuffix(".0")
        for name, prefix in prefixes.items()
        if getattr(settings, name) != getattr(defaults, name)
    ]
    return ":".join([head, *options])


MOST_LIVE: Final = 1_000_000_000  # most elements gathered at once by default; DeepSpeed has the same default


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """Limits of gathered weights and of gradients in reduction, in elements of the unsharded model.

    A unit stays gathered from its forward to its backward pass if fewer than ``max_reuse`` elements run in
    between and ``max_live`` allows it.  ``max_reuse=1`` keeps the root's unit and the last block, which
    backward would gather again at once; 0 keeps nothing.  On one rank every value but 0 keeps as many units
    as ``max_live`` allows.

    The next unit is gathered ahead even if it is larger than ``prefetch``.  Otherwise a model of large blocks would
    wait for every all-gather.  DeepSpeed, too, fetches parameters until ``stage3_prefetch_bucket_size`` is
    exceeded.  ``prefetch=0`` gathers nothing ahead.

    Raises PolicyError: if a limit is negative or NaN.
    """

    prefetch: int = 50_000_000  # most elements gathered ahead of the unit in use
    # Most elements gathered at once, unless the units in use alone exceed it.  None: ``MOST_LIVE``, but the next
    # unit is gathered ahead whatever its size.
    max_live: int | None = None
    max_reuse: int = 1
    # Parameters with fewer elements form a persistent unit, which is trained as in stage 2 (always gathered)
    # and sent unquantised; 0: there is no such unit.
    persist_below: int = 0
    persist_most: int = 2**63 - 1  # most elements of the persistent unit; later parameters join their blocks
    reduce_bucket: int = (
        500_000_000  # most gradient elements in reduction; earlier reductions are finished to stay within it
    )
    largest_unit: int = 0  # a larger block is split into its submodules, or refused; 0: no limit
    max_padding: float = 0.2  # largest padding of a unit, as a share of its parameters; more is refused

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value >= 0:  # true of NaN too
                raise PolicyError(f"memory.{field.name} = {value}: expected 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Shares of a model's states that are kept in host memory (ZeRO-Offload 2101.06840, ZeRO-Infinity 2104.07857).

    Whole units are offloaded, in model order, until at least the share is reached.  A trained unit whose
    master is on the device is encoded anew for each gather.  Of such a unit, ``weights`` moves only the frames of
    hpZ's copy to the host.

    Raises PolicyError: for shares outside [0, 1].
    """

    # Share of the trained elements whose masters, mean gradients and optimizer state are in host memory,
    # where the optimizer steps them; the device keeps the encoded weights (a frame).
    optimizer: float = 0.0
    # Share of all elements whose frames, frozen shards and hpZ frames are in host memory; they are copied to
    # the device for each gather.
    weights: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0.0 <= getattr(self, field.name) <= 1.0:
                raise PolicyError(f"offload.{field.name} = {getattr(self, field.name)}: expected 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The factor by which losses are multiplied, so that small gradients do not vanish in fp16.

    A dynamic scale halves at an overflow and doubles after ``window`` steps without one.

    Raises PolicyError: for a negative window, or unless ``0 < least <= initial <= LARGEST_SCALE``.
    """

    initial: float = 65536.0
    window: int = 1000  # optimizer steps; 0 for a fixed scale
    least: float = 1.0  # smallest dynamic scale; an overflow at this scale is an error

    def __post_init__(self) -> None:
        if not (0 < self.least <= self.initial <= LARGEST_SCALE) or self.window < 0:
            values = f"loss scale {self.initial:g} with window {self.window} and least {self.least:g}"
            limits = f"0 < least <= scale <= {LARGEST_SCALE:g}, and a window of 0 or more steps"
            raise PolicyError(f"{values}: expected {limits}")

    def __str__(self) -> str:
        if not self.window:
            return str(self.initial).removesuffix(".0")
        return _text("dynamic", self, DYNAMIC, {"initial": "from", "window": "window"})


DYNAMIC: Final = LossScale()


def parse_loss_scale(text: str) -> LossScale | None:
    """Parse a loss scale's text, such as ``dynamic:from1024:window200``, ``512`` (fixed) or ``none``.

    Raises PolicyError: for any other text.
    """
    number = r"([0-9]+(?:\.[0-9]+)?(?:e\+?[0-9]+)?)"
    if re.fullmatch(number, text.strip()):
        return LossScale(initial=float(text), window=0, least=min(1.0, float(text)))
    allowed = "a loss scale is none, a number, or dynamic[:from<scale>][:window<steps below 10^18>]"
    forms = {"from": f"from{number}", "window": "window([1-9][0-9]{0,17})"}
    if (options := _read(text, ["dynamic"], forms, allowed)) is None:
        return None
    initial, window = float(options.get("from", DYNAMIC.initial)), int(options.get("window", DYNAMIC.window))
    return LossScale(initial=initial, window=window, least=min(1.0, initial))


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Error feedback of gradient codecs: the error of an encoding is added to the next step's gradient.

    ``h = gradient + error`` is encoded, and then ``error = decay * error + (1 - decay) * (h - decoded)``
    (:class:`impl.codecs.reference.Carried`).  Classic feedback has decay 0.  LoCo (2407.04480) keeps a moving
    average of the errors; DeepSpeed's LoCo has decay 0.8 and is reset every 1024 steps.

    For each unit, a rank keeps ``padded / ranks_per_node`` errors of the last hop, between nodes.  With
    ``hops="all"`` it also keeps ``padded`` errors of the first hop, one for each element of the unsharded gradient.

    Raises PolicyError: for a decay outside [0, 1) or a negative reset.
    """

    decay: float = 0.0  # share of the old error that is kept, in [0, 1)
    reset: int = 0  # optimizer steps after which the error is set to zero; 0: never
    hops: Literal["last", "all"] = "last"  # the hops whose errors are kept
    state: Dtype = "fp32"  # type of the kept errors

    def __post_init__(self) -> None:
        _check_literals(self)
        if not 0.0 <= self.decay < 1.0 or self.reset < 0:
            values = f"decay = {self.decay} and reset = {self.reset}"
            expected = "a decay in [0, 1), and a reset of 0 (never) or more steps"
            raise PolicyError(f"feedback: {values}; expected {expected}")

    def __str__(self) -> str:
        head = "loco" if self.decay else "classic"
        prefixes = {"decay": "decay", "reset": "reset", "hops": "", "state": ""}
        return _text(head, self, FEEDBACKS[head], prefixes)


FEEDBACKS: Final = {"classic": Feedback(), "loco": Feedback(decay=0.8, reset=1024, hops="all")}


def parse_feedback(text: str) -> Feedback | None:
    """Parse the text of error feedback, such as ``classic``, ``loco:decay0.9:reset512:bf16`` or ``none``.

    Raises PolicyError: for any other text.
    """
    allowed = (
        "expected none, classic or loco, then :decay<d>, :reset<steps>, :last or :all, :fp32, :bf16 or :fp16"
    )
    forms = {
        "decay": r"decay([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)",
        "reset": "reset([0-9]+)",
        "hops": "(last|all)",
        "state": f"({'|'.join(ITEM_BYTES)})",
    }
    if (options := _read(text, FEEDBACKS, forms, allowed)) is None:
        return None
    base, kinds = FEEDBACKS[options.pop("head")], {"decay": float, "reset": int}
    return replace(base, **{name: kinds.get(name, str)(option) for name, option in options.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class BitBudget:
    """A limit on bits, within which codecs are chosen unit by unit while training (:mod:`impl.plan.bit_budget`).

    Training begins with the policy's own codecs.  After step 1, and then every ``every`` steps, all candidates
    encode that step's weights and gradients.  Then the units get those codecs with which the sum of all units'
    errors is least within the limit.

    Raises PolicyError: for numbers out of range, no codecs, or neither weights nor gradients.
    """

    codecs: tuple[Codec, ...]  # candidates, in addition to the policy's own codec
    every: int = 50  # optimizer steps from one choice to the next
    # Most bits an element in weight gathers between nodes, as the mean over a step and including scales and
    # padding; 0: as many as the policy's own codec takes; None: the codec of weights is not chosen.
    weights: float | None = None
    gradients: float | None = None  # the same for the hop of gradient reductions between nodes

    def __post_init__(self) -> None:
        bits = [limit for limit in (self.weights, self.gradients) if limit is not None]
        if self.every < 1 or not self.codecs or not bits or not all(0 <= limit < math.inf for limit in bits):
            raise PolicyError(f"budget {str(self)!r}: {_BUDGET}")

    def __str__(self) -> str:
        limits = ((name, getattr(self, name)) for name in get_args(Budgeted))
        shares = [f"{name} {bits:.10g}" if bits else name for name, bits in limits if bits is not None]
        return " ".join([*shares, f"every {self.every} of", *map(str, self.codecs)])


_BUDGET: Final = (
    "expected none, or '[weights [bits]] [gradients [bits]] every <steps> of <codecs>', where bits are per "
    "element, by default those of the policy's codec; e.g. 'gradients 4.5 every 50 of int3:128 int6:128'"
)
_BITS: Final = r"(?: [0-9]+(?:\.[0-9]+)?)?"
_BUDGET_TEXT: Final = (
    rf"(?:weights(?P<weights>{_BITS}) )?(?:gradients(?P<gradients>{_BITS}) )?"
    r"every (?P<every>[0-9]{1,9}) of (?P<codecs>.+)"
)


def parse_budget(text: str) -> BitBudget | None:
    """Parse a budget's text, such as ``gradients 4.5 every 50 of int3:128`` or ``none``.

    Raises PolicyError: for any other text.
    """
    if (spaced := " ".join(text.split())) == "none":
        return None
    if (match := re.fullmatch(_BUDGET_TEXT, spaced)) is None:
        raise PolicyError(f"budget {text!r}: {_BUDGET}")
    bits = {name: float(match[name] or 0) for name in get_args(Budgeted) if match[name] is not None}
    return BitBudget(codecs=tuple(map(parse, match["codecs"].split())), every=int(match["every"]), **bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One point of the ablation space of ZeRO: everything that decides what is sent, held and computed.

    Raises PolicyError: for combinations that no topology could run.
    """

    # What is sharded (1910.02054).  Stage 1: masters and optimizer state; stage 2: also mean gradients;
    # stage 3: also weights; stage 0: nothing.  Below stage 3 weights stay gathered until they change.
    stage: Stage = 3
    # Number of ranks that share one copy of everything that is sharded; every group of this many ranks has a copy
    # of its own (MiCS, 2205.00119; HSDP).  0: all ranks share one copy.
    group: int | Literal["node"] = 0
    weights: Codec = BF16  # codec of weight gathers; qwZ: an integer codec
    gradients: tuple[Codec, Codec] = (BF16, BF16)  # codecs of hop 1, inside nodes, and 2, between them (qgZ)
    # ``hierarchical``: between nodes, then inside them, so a shard crosses each link between nodes once;
    # ``flat``: one ring over all ranks.
    gather: Gather = "hierarchical"
    # ``two_hop``: inside nodes, then between them; ``one_hop``: one all-to-all over all ranks; ``ring``: over
    # all ranks, where each of ``world - 1`` steps encodes the partial sum again (the paper's counter-example).
    # Or a reduction of your own: ``method(PowerSGD, rank=4)``, or ``mine:PowerSGD`` (:mod:`impl.plan.own_method`).
    reduce: Reduce | OwnMethod = "two_hop"
    chunks: int = 1  # parts of a unit's reduction: one is sent between nodes while the next is sent inside
    secondary: int | Literal["node"] = 0  # ranks that share one secondary copy of weights (hpZ); 0: no copy
    # Type in which hpZ's copy is kept, and sent inside its group.  ``frames``: the messages as they arrived;
    # else they are decoded and cast (DeepSpeed, and the paper's figure 4, use 16 bits).
    secondary_format: Literal["frames", "fp32", "bf16", "fp16"] = "frames"
    # Codec of hpZ's copy in place of ``secondary_format``; forward then also sends the copy inside its group.
    inside: Codec | None = None
    # Codec in which the hops before an hpZ group send differences instead of weights: how the masters differ from
    # hpZ's copy (SDP4Bit, 2410.15526).  Every rank adds the decoded differences to its copy.  The rank that owns
    # the masters does so too, so that all copies stay equal.
    differences: Codec | None = None
    refresh: int = 0  # optimizer steps of differences after which the weights themselves are sent; 0: never
    feedback: Feedback | None = None  # error feedback of the gradient codecs
    # Type in which the messages of a hop are decoded and added up.  ``fp16`` is DeepSpeed's way
    # (``quant_reduce.cu``): terms and partial sums are rounded to fp16, and a block in which one of them
    # exceeds 65504 arrives as NaN.
    sums: Sums = "fp32"
    # ``codec``: blocks as the codecs say.  ``shape``: DeepSpeed's rule.  For gradients the unit's largest
    # matrix is cut into ``max(rows, columns, ranks)`` blocks (``all_to_all_quant_reduce``), the unit's other
    # parameters have blocks of the same size, and a unit without a matrix is not quantised.  For weights a
    # shard is cut into the fewest equal blocks of at most 8000 elements (``CUDAQuantizer``), which may span
    # several parameters.
    blocks: Literal["codec", "shape"] = "codec"
    # 2: weights are sent twice, quantised along rows for forward and along columns for backward (MXFP8 in
    # Megatron-FSDP, Megatron-LM's issue 7584); a unit without a matrix is sent once.  A block along columns
    # spans as many whole rows of a shard as the codec's block has elements; rows that are left over are
    # quantised along rows in both planes.  No unit stays gathered for backward, and recomputing a block of the
    # model in backward (activation checkpointing) is refused.
    planes: Literal[1, 2] = 1
    # ``micro_batch``: gradients are reduced after each micro-batch and added up in shards; ``step``: they are
    # added up on each rank and reduced once a step; ``stage``: ``step`` below stage 2, else ``micro_batch``.
    reduce_every: Literal["stage", "micro_batch", "step"] = "stage"
    compute: Dtype = "fp32"  # type of gathered weights and local gradients; micro-batches are summed in fp32
    loss_scale: LossScale | None = None  # for compute in fp16
    frozen: Codec | None = None  # codec of frozen weights, kept and sent; None: fp32, sent as ``weights``
    memory: MemoryLimits = MemoryLimits()
    offload: Offload = Offload()
    budget: BitBudget | None = None  # limit within which codecs are chosen while training
    # Optimizer steps of each group between two exchanges with the other groups (DiLoCo, 2311.08105).  Gradients are
    # then averaged inside a group only.  None: over all ranks, in every step.
    local_steps: int | None = None
    # Parts into which units are dealt; the parts are exchanged one after the other, evenly spread over ``local_steps``
    # (Streaming DiLoCo, 2501.18512).
    local_fragments: int = 1
    # Learning rate and Nesterov momentum of the outer SGD, whose gradient is the mean over groups of how far their
    # masters have moved.
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    order_every: int = 32  # backward passes between checks that ranks issue the same collectives; 0: never
    # Parameters start on multiples of this as well as of the codecs' blocks, so that all configurations of a
    # suite can have the same layout.
    align: int = 1

    def __post_init__(self) -> None:
        hops: object = self.gradients
        if not isinstance(hops, tuple) or len(hops) != 2:
            raise PolicyError(
                f"gradients = {hops!r}: expected a tuple of two codecs, for hop 1 and for hop 2"
            )
        for codec in self.codecs:
            if not isinstance(codec, Codec):
                kind = type(codec).__name__
                raise PolicyError(
                    f"codec {codec!r} is a {kind}: expected a codec, such as codec.parse() returns"
                )
        _check_literals(self)
        self._read_reduce()
        errors = self._method_errors(), self._contradictions(), self._copy_errors(), self._budget_errors()
        for reason in itertools.chain(*errors, self._local_errors()):
            raise PolicyError(reason)

    def _read_reduce(self) -> None:
        """Make a method of a ``reduce`` that names a class."""
        if isinstance(self.reduce, str) and is_name(self.reduce):
            object.__setattr__(self, "reduce", method(self.reduce))
        elif not isinstance(self.reduce, OwnMethod) and self.reduce not in get_args(Reduce):
            known = ", ".join(get_args(Reduce))
            raise PolicyError(
                f"reduce = {self.reduce!r}: expected one of {known}, 'module:Class' or method(Class, ...)"
            )

    @property
    def own_reduce(self) -> OwnMethod | None:
        """The reduction of a user's own; None if gradients are reduced in hops."""
        return self.reduce if isinstance(self.reduce, OwnMethod) else None

    def _method_errors(self) -> Iterator[str]:
        """Yield an error for each field that a reduction of a user's own does not allow."""
        if (own := self.own_reduce) is None:
            return
        usual = {
            "chunks": (self.chunks, 1, "cuts messages that are made of codecs"),
            "sums": (self.sums, "fp32", "is a type of sums of decoded messages"),
            "feedback": (self.feedback, None, "carries errors of codecs, while a method keeps its own"),
            "loss_scale": (
                self.loss_scale,
                None,
                "needs overflows to reach the mean, and a method may drop them",
            ),
            "offload": (self.offload, Offload(), "keeps mean gradients on the host"),
        }
        for name, (value, needed, why) in usual.items():
            if value != needed:
                way_out = f"remove {name}, or set reduce='two_hop'"
                shown = "" if name == "offload" else f"={str(value)!r}"
                yield f"reduce='{own}' does not allow {name}{shown}, which {why}: {way_out}"
        if self.budget is not None and self.budget.gradients is not None:
            chooses = "chooses codecs of gradients, and a method has none"
            yield f"reduce='{own}' does not allow budget '{self.budget}', which {chooses}: remove gradients from it"

    def _contradictions(self) -> Iterator[str]:
        """Yield an error for each combination of fields that cannot be carried out."""
        if not 1 <= self.chunks <= MOST_CHUNKS or self.align < 1 or min(self.order_every, self.refresh) < 0:
            values = f"chunks={self.chunks}, align={self.align}, order_every={self.order_every}"
            limits = f"expected chunks 1 to {MOST_CHUNKS}, align 1 or more, order_every and refresh 0 or more"
            yield f"{values}, refresh={self.refresh}: {limits}"
        if self.stage < 2 and self.reduce_every == "micro_batch":
            sharded = "needs the sharded gradients of stage 2 or 3"
            yield f"reduce_every='micro_batch' {sharded}; here stage {self.stage}: set reduce_every='stage'"
        one_hop = self.reduce in ("ring", "one_hop")
        if self.group != 0 and (self.stage == 0 or self.gather == "flat" or one_hop):
            needs = "needs stage 1 to 3, gather='hierarchical' and reduce='two_hop'"
            values = f"here stage {self.stage}, gather={self.gather!r}, reduce={self.reduce!r}"
            yield f"group={self.group!r} {needs}; {values}: change these, or set group=0"
        if one_hop and (self.gradients[0] != self.gradients[1] or self.chunks > 1):
            values = f"gradients={', '.join(map(str, self.gradients))}, chunks={self.chunks}"
            way_out = "set reduce='two_hop', or one codec and chunks=1"
            yield f"reduce={self.reduce!r} has one hop, of one codec, without chunks; here {values}: {way_out}"
        if self.reduce == "ring" and (self.sums != "fp32" or self.feedback is not None):
            values = f"here sums={self.sums!r}, feedback={self.feedback or 'none'}"
            way_out = "set reduce='two_hop', or sums='fp32' and no feedback"
            yield f"reduce='ring' adds up partial sums in fp32, without error feedback; {values}: {way_out}"
        yield from self._chunk_errors(user_codecs=False)
        for codec in (self.weights, *self.gradients, self.frozen or FP32) if self.blocks == "shape" else ():
            any_block = isinstance(codec, Blocked) and codec.scale == "fp32" and not codec.hadamard
            if not any_block and not isinstance(codec, Raw):
                way_out = "use an int or fp8 codec without hadamard, or set blocks='codec'"
                yield f"blocks='shape' chooses the size of blocks, but the size of {codec}'s blocks is fixed: {way_out}"
        codec = self.weights
        if self.planes == 2 and (
            not isinstance(codec, Blocked) or codec.block == "shard" or codec.stochastic or codec.hadamard
        ):
            needs = "needs a codec with blocks, rounding to nearest and no hadamard"
            yield f"planes=2 {needs}; here weights={codec}: use such a codec, or set planes=1"
        if self.planes == 2 and (self.stage < 3 or self.secondary != 0 or self.offload != Offload()):
            host = f"offload.optimizer={self.offload.optimizer:g}, offload.weights={self.offload.weights:g}"
            values = f"here stage {self.stage}, secondary={self.secondary!r}, {host}"
            yield f"planes=2 needs stage 3, without hpZ and offload; {values}: change these, or set planes=1"

    def _copy_errors(self) -> Iterator[str]:
        """Yield an error for each field that hpZ's copy of the weights does not allow."""
        formats = self.secondary_format
        changed = {
            "secondary_format": None if formats == "frames" else formats,
            "inside": self.inside,
            "differences": self.differences,
        }
        for name, value in changed.items() if self.secondary == 0 else ():
            if value is not None:
                yield f"{name}='{value}' needs hpZ: set secondary='node', or remove {name}"
        if self.secondary != 0 and (self.stage < 3 or self.group != 0 or self.gather == "flat"):
            needs = "needs stage 3, group=0 and gather='hierarchical'"
            values = f"here stage {self.stage}, group={self.group!r}, gather={self.gather!r}"
            yield f"hpZ (secondary={self.secondary!r}) {needs}; {values}: change these, or set secondary=0"
        if self.inside is not None and (
            formats != "frames" or self.inside.stochastic or self.offload.weights
        ):
            needs = "needs a codec that rounds to nearest, secondary_format='frames' and offload.weights=0"
            values = f"here secondary_format={formats!r}, offload.weights={self.offload.weights:g}"
            yield f"inside='{self.inside}' {needs}; {values}: change these, or remove inside"
        if self.refresh and self.differences is None:
            yield f"refresh={self.refresh} has no effect without differences: set differences, or refresh=0"
        adds = isinstance(self.copy_codec, Raw) and self.offload == Offload()
        if self.differences is not None and not adds:
            needs = "needs hpZ's copy in fp32, bf16 or fp16, and no offload"
            host = f"offload.optimizer={self.offload.optimizer:g}, offload.weights={self.offload.weights:g}"
            values = f"here the copy is in {self.copy_codec}, {host}"
            way_out = "set secondary_format='bf16' and no offload, or remove differences"
            yield f"differences='{self.differences}' {needs}; {values}: {way_out}"

    def _budget_errors(self) -> Iterator[str]:
        """Yield an error for each field with which a budget could not choose codecs by their bytes."""
        if (budget := self.budget) is None:
            return
        text = f"budget '{budget}'"
        if self.stage == 0 or self.group != 0 or self.blocks == "shape" or self.planes > 1:
            values = f"stage {self.stage}, group={self.group!r}, blocks={self.blocks!r}, planes={self.planes}"
            yield (
                f"{text} needs stage 1 to 3, group=0, blocks='codec' and planes=1; here {values}: change these, or "
                "remove budget"
            )
        if budget.gradients is not None and self.reduce in ("ring", "one_hop"):
            chooses = "chooses the codec of the reductions' hop between nodes"
            yield f"{text} {chooses}, and reduce={self.reduce!r} has one hop: set reduce='two_hop'"
        if budget.weights is not None and (self.differences is not None or self.offload != Offload()):
            chooses = "chooses the codec of weights, which differences and offload do not allow"
            yield f"{text} {chooses}: remove differences and offload, or remove weights from the budget"
        for codec in itertools.chain(*self.candidates.values()):
            if isinstance(codec, OwnCodec) and codec.name not in FORMATS:
                yield f"budget: {codec} is a codec of your own, whose bytes are not known here: use built-in codecs"
            if isinstance(codec, Blocked) and codec.block == "shard":
                yield f"budget: {codec} has one scale for a whole shard: use a codec with blocks of elements"

    def _local_errors(self) -> Iterator[str]:
        """Yield an error for each field with which groups could not take steps of their own."""
        steps, fragments = self.local_steps, self.local_fragments
        outer = {
            "local_fragments": fragments,
            "outer_rate": self.outer_rate,
            "outer_momentum": self.outer_momentum,
        }
        usual = Policy.__dataclass_fields__
        if steps is None:
            for name in (name for name, value in outer.items() if value != usual[name].default):
                yield f"{name}={outer[name]:g} has no effect without local_steps: set local_steps, or remove {name}"
            return
        if steps < 1:
            yield (
                f"local_steps={steps}: expected 1 or more; remove local_steps to average gradients over all ranks in "
                "every step"
            )
        if self.group == 0 or self.stage == 0:
            here = f"here group={self.group!r}, stage {self.stage}"
            yield (
                f"local_steps={steps} needs groups of ranks with a copy of all states each; {here}: set group='node' "
                "and stage 1 to 3, or remove local_steps"
            )
        if not 1 <= fragments <= max(steps, 1):
            yield (
                f"local_fragments={fragments}: expected 1 to local_steps={steps}, so that at most one fragment is "
                "exchanged after a step"
            )
        if not (0 < self.outer_rate < math.inf and 0 <= self.outer_momentum < 1):
            values = f"outer_rate={self.outer_rate:g}, outer_momentum={self.outer_momentum:g}"
            yield f"{values}: expected a rate above 0, and a momentum of 0 or more and below 1"
        conflicts = {
            "reduce": (self.own_reduce is not None, f"reduce='{self.reduce}' averages over all ranks"),
            "loss_scale": (
                self.loss_scale is not None,
                f"after an overflow, loss_scale={self.loss_scale} makes one group skip a step that others take",
            ),
            "offload": (
                self.offload != Offload(),
                "offload keeps on the host the masters that the outer step moves",
            ),
        }
        for name, (conflict, why) in conflicts.items():
            if conflict:
                yield f"local_steps={steps} does not allow {name}: {why}; remove {name}, or local_steps"

    def _chunk_errors(self, *, user_codecs: bool) -> Iterator[str]:
        """Yield an error for each gradient codec whose messages cannot be cut into chunks.

        Checks either the users' codecs, whose modules are imported for it, or all other codecs.
        """
        for codec in (*self.gradients, *self.candidates.get("gradients", ())) if self.chunks > 1 else ():
            if isinstance(codec, OwnCodec) == user_codecs and codec.block == "shard":
                way_out = "use a codec with blocks of elements, or set chunks=1"
                yield f"chunks={self.chunks} cuts a shard, for which {codec} has a single scale: {way_out}"

    @property
    def grain(self) -> int:
        """Every parameter and every shard starts on a multiple of this number of elements."""
        return math.lcm(self.align, common_grain(*self.codecs))

    @property
    def grain_in_words(self) -> str:
        """The codecs and the alignment from which :attr:`grain` follows, for error messages."""
        aligned = [f"align = {self.align}"] if self.align > 1 else []
        parts = list(dict.fromkeys([str(codec) for codec in self.codecs] + aligned))
        return parts[0] if len(parts) == 1 else f"the common multiple of {', '.join(parts)}"

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """All codecs of the policy: those of weights and of both gradient hops, then the optional ones."""
        budget = () if self.budget is None else self.budget.codecs
        others = (self.inside, self.differences, self.frozen, *budget)
        return (self.weights, *self.gradients, *(codec for codec in others if codec is not None))

    @property
    def candidates(self) -> dict[Budgeted, tuple[Codec, ...]]:
        """The codecs from which a budget chooses, by purpose, the policy's own codec first."""
        if (budget := self.budget) is None:
            return {}
        initial: dict[Budgeted, Codec] = {"weights": self.weights, "gradients": self.gradients[1]}
        return {
            name: tuple(dict.fromkeys([codec, *budget.codecs]))
            for name, codec in initial.items()
            if getattr(budget, name) is not None
        }

    def with_choice(self, purpose: Budgeted, codec: Codec) -> Policy:
        """Returns the policy after a budget has chosen ``codec``; its grain, and so the layout, is unchanged."""
        sent: Any = {"weights": codec, "gradients": (self.gradients[0], codec)}[purpose]
        return replace(self, align=self.grain, **{purpose: sent})

    @property
    def own_codecs(self) -> tuple[OwnCodec, ...]:
        """The policy's codecs that are published formats or users' own."""
        return tuple(codec for codec in self.codecs if isinstance(codec, OwnCodec))

    @property
    def readable(self) -> bool:
        """Whether the attributes of all its codecs may be read (:attr:`impl.codecs.codec.OwnCodec.readable`)."""
        return all(codec.readable for codec in self.own_codecs)

    @property
    def copy_codec(self) -> Codec:
        """The codec in which hpZ's copy is kept, and sent inside its group."""
        if self.inside is not None:
            return self.inside
        return self.weights if self.secondary_format == "frames" else Raw(self.secondary_format)

    @property
    def sends_copy(self) -> bool:
        """Whether forward sends hpZ's copy inside its group, as backward does, instead of the weights' frames."""
        return self.inside is not None or self.differences is not None

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Whether gradients are reduced after each micro-batch and added up in shards, not added up locally."""
        return self.stage >= 2 if self.reduce_every == "stage" else self.reduce_every == "micro_batch"

    def for_kind(self, *, trainable: bool = True, persistent: bool = False) -> Policy:
        """Returns the policy of frozen or persistent units; all other units have this policy itself.

        Frozen units are sent in the codec in which they are kept.  The persistent unit, of small parameters, stays
        gathered and is sent unquantised: codecs that quantise are replaced with a cast to the compute type.
        """
        changes: dict[str, Any] = {}
        if persistent:
            changes = _NO_COPY | {"feedback": None, "sums": "fp32", "planes": 1, "budget": None}
            changes["stage"], changes["weights"] = min(self.stage, 2), self._unquantised(self.weights)
            changes["gradients"] = tuple(map(self._unquantised, self.gradients))
            changes |= {} if self.own_reduce is None else {"reduce": "two_hop"}
        if not trainable:  # frozen weights do not change, so there are no differences to send
            changes |= {"differences": None, "refresh": 0, "budget": None}
            changes |= {} if self.frozen is None else {"planes": 1, "weights": self.frozen}
        return replace(self, **changes)

    def _unquantised(self, codec: Codec) -> Codec:
        return codec if isinstance(codec, Raw) else Raw(self.compute)

    def for_unit(self, unit: UnitGeometry) -> Policy:
        """Returns the policy of a laid-out unit, whose blocks and planes depend on its parameters' shapes."""
        policy = self.for_kind(trainable=unit.trainable, persistent=unit.persistent)
        shaped = policy.by_shape([slot.spec.shape for slot in unit.slots], unit.world, unit.shard)
        return shaped if unit.trainable or self.frozen is None else replace(shaped, weights=self.frozen)

    def by_shape(self, shapes: Sequence[Sequence[int]], world: int, shard: int = 0) -> Policy:
        """Returns the policy of a unit whose parameters have these ``shapes``, reduced by ``world`` ranks.

        Resolves ``blocks='shape'`` to sizes in elements, and sets ``planes=1`` for a unit without a matrix.
        Without shapes (a unit of which only the size is known) the gradients' blocks and the planes stay as
        they are.  ``shard`` is the number of elements of a rank's shard; 0 before layout, when the blocks of
        weights do not matter yet.
        """
        matrices = [shape for shape in shapes if len(shape) > 1 and 0 not in shape]
        policy = replace(self, planes=1) if shapes and not matrices else self
        if self.blocks == "codec":
            return policy
        first, second = self.gradients
        if matrices:
            rows, columns, *_ = largest = max(matrices, key=math.prod)
            block = max(1, math.prod(largest) // max(rows, columns, world))
            first, second = _in_blocks(first, block), _in_blocks(second, block)
        elif shapes:
            first, second = self._unquantised(first), self._unquantised(second)
            policy = replace(policy, sums="fp32", feedback=None)
        weights = _in_blocks(self.weights, weight_block(shard))
        return replace(policy, gradients=(first, second), weights=weights, blocks="codec")

    def without_secondary(self) -> Policy:
        """Returns the policy without hpZ and the fields that need it."""
        return replace(self, **_NO_COPY)

    def secondary_ranks(self, topology: Topology) -> int:
        """Returns how many ranks share one secondary copy on ``topology``; 0 without hpZ."""
        return topology.ranks_per_node if self.secondary == "node" else self.secondary

    def check(self, topology: Topology) -> None:
        """Check that this policy can run on ``topology``.

        Users' codecs are not checked where their modules must not be imported.

        Raises PolicyError: if the topology cannot be cut into the policy's groups, if a user's codec does not fit
        the policy, or if a budget needs a second node.
        """
        try:
            topology.check_group("an hpZ group", self.secondary_ranks(topology))
            topology.check_group("a group", self.group_ranks(topology))
            if self.local_steps is not None and self.group_ranks(topology) == topology.world:
                groups = f"group={self.group!r} on {topology} makes one group of all ranks"
                raise PolicyError(
                    f"local_steps={self.local_steps} needs two groups or more, and {groups}: choose smaller groups, or "
                    "remove local_steps"
                )
            for reason in self._user_codec_errors() if self.readable else ():
                raise PolicyError(reason)
        except ValueError as error:
            raise PolicyError(str(error)) from None
        if "gradients" in self.candidates and topology.nodes == 1:
            chooses = "chooses the codec of gradients between nodes"
            raise PolicyError(
                f"budget '{self.budget}' {chooses}, and {topology} has one node: use two or more"
            )

    def _user_codec_errors(self) -> Iterator[str]:
        """Yield an error for each user's codec that does not fit this policy.

        These errors need the codec's definition, which is imported here and not when the policy is built.
        """
        yield from self._chunk_errors(user_codecs=True)
        for codec in self.own_codecs:
            kinds = ", ".join(codec.definition.kinds)
            if "fp32" not in codec.definition.kinds:
                yield f"{codec}: its kinds are {kinds}; add fp32, the type of master shards and of sums"
            if self.loss_scale is not None and Law.NONFINITE not in codec.laws:
                needs = "needs codecs that keep NaN and infinity"
                yield f"loss_scale={self.loss_scale} {needs}; {codec} does not promise the law 'nonfinite': use another"

    def group_ranks(self, topology: Topology) -> int:
        """Returns how many ranks share one copy of everything that is sharded on ``topology``."""
        if self.stage == 0:
            return 1
        return topology.ranks_per_node if self.group == "node" else self.group or topology.world

    def averaged_ranks(self, topology: Topology) -> int:
        """Returns over how many ranks the gradients of a step are averaged: all, or with local steps a group's."""
        return topology.world if self.local_steps is None else self.group_ranks(topology)

    def gather_axes(self, topology: Topology) -> tuple[tuple[Axis, ...], int]:
        """Returns the hops of a weight gather, first hop first, and how many of them hpZ's copy saves."""
        group = self.group_ranks(topology)
        if self.stage == 0 or group < topology.world:
            axes, outside = topology.gather_axes(group)
            return axes[outside:], 0
        if self.gather == "flat":
            return (topology.world_axis,), 0
        return topology.gather_axes(self.secondary_ranks(topology))

    def replica_axes(self, topology: Topology) -> tuple[tuple[Axis, ...], Codec]:
        """Returns the hops that gather a mean gradient between groups, and their codec.

        There are none for one group, nor for a user's own reduction, after which every group has the mean.
        """
        if self.own_reduce is not None:
            return (), self.gradients[0]
        axes, outside = topology.gather_axes(self.group_ranks(topology))
        between = tuple(axis for axis in axes[:outside] if axis.size > 1)
        return between, self.gradients[any(map(topology.crosses, between))]

    def reduce_axes(self, topology: Topology) -> tuple[tuple[Axis, Codec], ...]:
        """Returns the hops of a gradient reduction with their codecs, first hop first, without hops of one rank.

        There are none for a user's own reduction, whose messages are not known here.
        """
        if self.own_reduce is not None:
            return ()
        axes: tuple[Axis, ...] = (topology.world_axis,)
        if self.reduce == "two_hop":
            axes = (topology.local_axis, topology.node_axis)
        if 1 < self.group_ranks(topology) < topology.world:
            axes = topology.gather_axes(self.group_ranks(topology))[0][::-1]
        return tuple((axis, self.gradients[topology.crosses(axis)]) for axis in axes if axis.size > 1)


_NO_COPY: Final[dict[str, Any]] = {  # the fields of a policy without hpZ
    "secondary": 0, "secondary_format": "frames", "inside": None, "differences": None, "refresh": 0,
}  # fmt: skip


def weight_block(shard: int) -> int:
    """Returns how many elements DeepSpeed has in a block of weights, for a ``shard`` of so many elements.

    This is the largest multiple of 8 that is at most 8000 and divides ``shard``; 1 if there is none.
    """
    return next((size for size in range(_GROUP, 0, -8) if shard and shard % size == 0), 1)


def _in_blocks(codec: Codec, block: int) -> Codec:
    """Returns the codec with blocks of ``block`` elements; a cast has no blocks and stays as it is."""
    return replace(codec, block=block) if isinstance(codec, Blocked) else codec


_INT8 = IntCodec(8, 2048)
_INT4 = (IntCodec(4, 256, clipped=True),) * 2  # clipping gives smaller errors with 4 bits, not with 8
_BF16SR = OwnCodec("bf16sr")
_MIN_MAX = IntCodec(8, 1024, asymmetric=True, stochastic=True)
_SHIPPED = Policy(
    weights=replace(_INT8, clipped=True), secondary="node", secondary_format="bf16", gradients=_INT4
)

TECHNIQUES: Final[dict[str, Policy]] = {
    "exact": Policy(weights=FP32, gradients=(FP32, FP32)),
    "zero0": Policy(stage=0),
    "zero1": Policy(stage=1),
    "zero2": Policy(stage=2),
    "zero3": Policy(),
    "zero3-flat": Policy(gather="flat", reduce="ring"),
    "mics": Policy(group="node"),
    "qwz": Policy(weights=_INT8),
    "hpz": Policy(secondary="node"),
    "qgz": Policy(gradients=_INT4),
    "qwz+hpz": Policy(weights=_INT8, secondary="node"),
    "qwz+qgz": Policy(weights=_INT8, gradients=_INT4),
    "hpz+qgz": Policy(secondary="node", gradients=_INT4),
    "zeropp": Policy(weights=_INT8, secondary="node", gradients=_INT4),
}
"""Policies by name:

- ``exact``: ZeRO-3 with all messages in fp32;
- ``zero0`` to ``zero3``: the ZeRO stages with messages in 16 bits; ``zero3`` is the baseline;
- ``zero3-flat``: the ZeRO++ paper's baseline, whose collectives are one ring over all ranks, whatever their nodes;
- ``mics``: ZeRO-3 that shards inside a node only;
- all others: each technique of ZeRO++, each pair of techniques, and all three together (``zeropp``).
"""

SUCCESSORS: Final[dict[str, Policy]] = {
    # ZeRO++ with two more of DeepSpeed's choices: its scale rule for weights too, and hpZ's copy in 16 bits.
    "zeropp-deepspeed": _SHIPPED,
    # Also with DeepSpeed's fp16 sums and block sizes.  What still differs from DeepSpeed: here scales are sent
    # in the same message as the codes, gradients are averaged correctly (DeepSpeed's mean is larger by a factor of
    # the ranks per node), vectors are quantised like the matrices of their unit, and no tensor is sent unquantised
    # because of its size.
    "zeropp-shipped": replace(_SHIPPED, sums="fp16", blocks="shape"),
    # LoCo (2407.04480): ZeRO++ with a moving average of the errors of both hops.
    "loco": Policy(weights=_INT8, secondary="node", gradients=_INT4, feedback=FEEDBACKS["loco"]),
    # SDP4Bit (2410.15526): differences of weights in 4 bits; gradients in 8 bits inside nodes and, after a
    # Hadamard rotation, in 4 bits between them.
    "sdp4bit": Policy(
        secondary="node",
        differences=IntCodec(4, 2048, stochastic=True),
        gradients=(IntCodec(8, 128, stochastic=True), IntCodec(4, 128, hadamard=32, stochastic=True)),
    ),
    # QSDP (2302.02390): 8 bits with minimum and maximum of every 1024 elements, unbiased rounding.
    "qsdp": Policy(weights=_MIN_MAX, gradients=(_MIN_MAX, _MIN_MAX)),
    # Gradients in bf16 by stochastic rounding, summed in fp32, as in torchcomms, but in two hops.
    "bf16-fp32sum": Policy(gradients=(_BF16SR, _BF16SR)),
    # Weights in 8-bit floats with one scale for a shard, where torchao has one for a tensor.
    "fp8-gather": Policy(weights=FloatCodec("e4m3", "shard")),
    # Weights in MXFP4, in which Megatron gathers 4-bit parameters.
    "fp4-gather": Policy(weights=FloatCodec("e2m1", MX_BLOCK, scale="e8m0")),
    # Weights in MXFP8 along rows and along columns in every gather, as in Megatron-FSDP, which keeps vectors in
    # 16 bits.
    "mxfp8-planes": Policy(weights=FloatCodec("e4m3", MX_BLOCK, scale="e8m0"), planes=2),
}
"""Methods that others published.  Megatron's HFSDP (ZeRO-3 inside a node, ZeRO-1 across nodes) places
weights and states as ``hpz`` does.
"""

PRESETS: Final = TECHNIQUES | SUCCESSORS


def preset(name: str, **changes: object) -> Policy:
    """Returns the preset ``name`` with some fields replaced.

    Raises PolicyError: for an unknown name or field.
    """
    if name not in tuple(PRESETS):  # a tuple, so that names that cannot be hashed are refused too
        raise PolicyError(f"unknown policy {name!r}: expected one of {', '.join(PRESETS)}")
    names = sorted(field.name for field in fields(Policy))
    if unknown := [name for name in changes if name not in names]:
        raise PolicyError(f"unknown policy field {unknown[0]!r}: expected one of {', '.join(names)}")
    return replace(PRESETS[name], **changes)  # type: ignore[arg-type]  # checked by Policy itself
