"""Policy: what is sent, held and computed, as one frozen value; presets and what is supported.

Pure: no torch.  ZeRO-3, qwZ, hpZ, qgZ and ZeRO++ are values of :class:`Policy`
(paper 2306.10209, sections 3.1 to 3.3); the engine never asks for their names.
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
from impl.plan.shard_layout import UnitGeometry
from impl.plan.topology import Axis, Topology

Stage = Literal[0, 1, 2, 3]
Gather = Literal["flat", "hierarchical"]
Reduce = Literal["ring", "one_hop", "two_hop"]
Budgeted = Literal["weights", "gradients"]

LARGEST_SCALE: Final = 2.0**126  # of losses; within fp32
MOST_CHUNKS: Final = 8  # each holds a slot of the shared memory between its two hops
_GROUP: Final = 8000  # elements of DeepSpeed's blocks of weights at most, of which 8 are a vector load


class PolicyError(ValueError):
    """A policy, alone or with a topology, cannot be carried out; the message names why."""


_types = functools.cache(get_type_hints)  # of a class's fields


def _check_literals(settings: object) -> None:
    """Refuse a field whose value is none of the few that its type allows."""
    for name, kind in _types(type(settings)).items():  # type: ignore[arg-type]  # a class is hashable
        if get_origin(kind) is Literal and (value := getattr(settings, name)) not in get_args(kind):
            raise PolicyError(f"{name} = {value!r}: expected one of {', '.join(map(str, get_args(kind)))}")


def _read(text: str, heads: Iterable[str], forms: Mapping[str, str], allowed: str) -> dict[str, str] | None:
    """The ``head`` of a text and its options, by the names of their forms; None for ``none``."""
    head, *options = text.strip().split(":")
    if head == "none" and not options:
        return None
    settings = {"head": head}
    for option in options:
        matches = {name: match[1] for name, form in forms.items() if (match := re.fullmatch(form, option))}
        if not matches or matches.keys() & settings.keys():
            raise PolicyError(f"{text!r}: option {option!r} is unknown or stands twice; {allowed}")
        settings |= matches
    if head not in heads:
        raise PolicyError(f"{text!r}: {allowed}")
    return settings


def _text(head: str, settings: object, defaults: object, prefixes: Mapping[str, str]) -> str:
    """``head``, and each field that differs from ``defaults``, after its prefix."""
    options = [
        f"{prefix}{getattr(settings, name)}".removesuffix(".0")
        for name, prefix in prefixes.items()
        if getattr(settings, name) != getattr(defaults, name)
    ]
    return ":".join([head, *options])


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """How much may be gathered, in elements of the unsharded model.

    A unit stays gathered from forward to backward if fewer than ``max_reuse`` elements run in between and
    ``max_live`` allows it.  1 keeps the root's unit and the last block, which any schedule would gather again
    at once; 0 keeps nothing.  On one rank anything but 0 keeps what ``max_live`` allows.

    Raises PolicyError: for limits that are negative, or no number.
    """

    prefetch: int = 50_000_000  # gathered ahead of the unit in use
    max_live: int = 1_000_000_000  # gathered at once; beyond it only the units in use
    max_reuse: int = 1
    persist_below: int = 0  # smaller parameters form a unit of stage 2, which travels unquantised; 0: none
    persist_most: int = 2**63 - 1  # of that unit; further parameters, in model order, stay with their block
    reduce_bucket: int = 500_000_000  # of gradients under way; beyond it an earlier reduction ends first
    largest_unit: int = 0  # a larger block is cut into its parts, a larger part refused; 0 for no limit
    max_padding: float = 0.2  # share of a unit that may be padding; more is refused, naming the unit

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) >= 0:  # nor NaN
                raise PolicyError(f"memory.{field.name} = {getattr(self, field.name)}: expected 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What lies in host memory instead of the device's (ZeRO-Offload 2101.06840, ZeRO-Infinity 2104.07857).

    Whole units are offloaded, in model order, until at least the share is reached.  A trained unit with its
    master on the device encodes it for each message; only its secondary frames (hpZ) go to the host.

    Raises PolicyError: for shares outside [0, 1].
    """

    # share of trained elements with masters, mean gradients and optimizer state on the host, where the
    # optimizer steps them; the device keeps the encoded frame
    optimizer: float = 0.0
    # share of elements with frames, frozen shards and secondary frames on the host, copied for each gather
    weights: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0.0 <= getattr(self, field.name) <= 1.0:
                raise PolicyError(f"offload.{field.name} = {getattr(self, field.name)}: expected 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The factor of losses that keeps small gradients from vanishing in fp16.

    Raises PolicyError: for scales that are not positive, or a negative window.
    """

    initial: float = 65536.0
    window: int = 1000  # steps without an overflow after which a dynamic scale doubles; 0 for a fixed scale
    least: float = 1.0  # below which it does not fall; an overflow at this scale is an error

    def __post_init__(self) -> None:
        if not (0 < self.least <= self.initial <= LARGEST_SCALE) or self.window < 0:
            values = f"loss scale {self.initial:g} with window {self.window} and least {self.least:g}"
            raise PolicyError(f"{values}: expected 0 < least <= scale <= {LARGEST_SCALE:g}, and steps, or 0")

    def __str__(self) -> str:
        if not self.window:
            return str(self.initial).removesuffix(".0")
        return _text("dynamic", self, DYNAMIC, {"initial": "from", "window": "window"})


DYNAMIC: Final = LossScale()


def parse_loss_scale(text: str) -> LossScale | None:
    """Read a loss scale's text: ``dynamic:from1024:window200``, ``512``, ``none``; else a PolicyError."""
    number = r"([0-9]+(?:\.[0-9]+)?(?:e\+?[0-9]+)?)"
    if re.fullmatch(number, text.strip()):
        return LossScale(initial=float(text), window=0, least=min(1.0, float(text)))
    allowed = "a loss scale is none, a number, or dynamic, then :from<scale>, :window<steps>, below 10^18"
    forms = {"from": f"from{number}", "window": "window([1-9][0-9]{0,17})"}
    if (options := _read(text, ["dynamic"], forms, allowed)) is None:
        return None
    initial, window = float(options.get("from", DYNAMIC.initial)), int(options.get("window", DYNAMIC.window))
    return LossScale(initial=initial, window=window, least=min(1.0, initial))


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Error feedback of gradient codecs: the error of an encoding is added to the next step's gradient.

    ``error = decay * error + (1 - decay) * (h - decoded)`` after encoding ``h = gradient + error``
    (:class:`impl.codecs.reference.Carried`).  Classic feedback has decay 0; LoCo (2407.04480) keeps a moving
    average, which DeepSpeed sets to 0.8, and forgets it every 1024 steps.  The last hop, between nodes, has
    ``padded / ranks_per_node`` errors a rank, the first as many as the unsharded gradient has elements.

    Raises PolicyError: for a decay outside [0, 1) or a negative reset.
    """

    decay: float = 0.0  # share of the old error that stays, in [0, 1)
    reset: int = 0  # optimizer steps after which the error is forgotten; 0 for never
    hops: Literal["last", "all"] = "last"  # that keep their errors
    state: Dtype = "fp32"  # type of the kept error

    def __post_init__(self) -> None:
        _check_literals(self)
        if not 0.0 <= self.decay < 1.0 or self.reset < 0:
            values = f"decay = {self.decay} and reset = {self.reset}"
            raise PolicyError(f"feedback: {values}; a decay is in [0, 1), a reset in steps, 0 for never")

    def __str__(self) -> str:
        head = "loco" if self.decay else "classic"
        prefixes = {"decay": "decay", "reset": "reset", "hops": "", "state": ""}
        return _text(head, self, FEEDBACKS[head], prefixes)


FEEDBACKS: Final = {"classic": Feedback(), "loco": Feedback(decay=0.8, reset=1024, hops="all")}


def parse_feedback(text: str) -> Feedback | None:
    """Read feedback's text: ``classic``, ``loco:decay0.9:reset512:bf16``, ``none``; else a PolicyError."""
    allowed = "expected none, classic or loco, then :decay<d>, :reset<steps>, :last or :all, :fp32 or :bf16"
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
    """Codecs that are chosen anew while a model trains, unit by unit (:mod:`impl.plan.bit_budget`).

    Training begins in the policy's own codecs.  After step 1, and then every ``every`` steps, the errors of
    all candidates on that step's weights and gradients decide: units travel in the codecs with the least sum
    of errors within the budget's bytes.

    Raises PolicyError: for numbers out of range, no codecs, or neither weights nor gradients.
    """

    codecs: tuple[Codec, ...]  # candidates, beside the policy's own
    every: int = 50  # optimizer steps from one choice to the next
    # bits an element of weight gathers between nodes at most, in the mean of a step, with scales and padding;
    # 0 for as many as the policy's own codec takes; None chooses nothing
    weights: float | None = None
    gradients: float | None = None  # the same for the reductions' hop between nodes

    def __post_init__(self) -> None:
        bits = [limit for limit in (self.weights, self.gradients) if limit is not None]
        if self.every < 1 or not self.codecs or not bits or not all(0 <= limit < math.inf for limit in bits):
            raise PolicyError(f"budget {str(self)!r}: {_BUDGET}")

    def __str__(self) -> str:
        limits = ((name, getattr(self, name)) for name in get_args(Budgeted))
        shares = [f"{name} {bits:.10g}" if bits else name for name, bits in limits if bits is not None]
        return " ".join([*shares, f"every {self.every} of", *map(str, self.codecs)])


_BUDGET: Final = (
    "expected none, or weights, gradients or both, each with bits an element or, without, within its own "
    "codec's bytes, then every <steps> of <codecs>, as in 'gradients 4.5 every 50 of int3:128 int6:128'"
)
_BITS: Final = r"(?: [0-9]+(?:\.[0-9]+)?)?"
_BUDGET_TEXT: Final = (
    rf"(?:weights(?P<weights>{_BITS}) )?(?:gradients(?P<gradients>{_BITS}) )?"
    r"every (?P<every>[0-9]{1,9}) of (?P<codecs>.+)"
)


def parse_budget(text: str) -> BitBudget | None:
    """Read a budget's text: ``gradients 4.5 every 50 of int3:128``, ``none``; else a PolicyError."""
    if (spaced := " ".join(text.split())) == "none":
        return None
    if (match := re.fullmatch(_BUDGET_TEXT, spaced)) is None:
        raise PolicyError(f"budget {text!r}: {_BUDGET}")
    bits = {name: float(match[name] or 0) for name in get_args(Budgeted) if match[name] is not None}
    return BitBudget(codecs=tuple(map(parse, match["codecs"].split())), every=int(match["every"]), **bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One point of the ablation space of ZeRO.

    Raises PolicyError: for combinations that no topology could run.
    """

    # what is sharded (1910.02054): 1 the optimizer's state and the masters, 2 also the mean gradients, 3 also
    # the weights; 0 nothing.  Below 3 weights stay gathered until they change
    stage: Stage = 3
    # ranks that share one copy of all that is sharded, each group its own (MiCS, 2205.00119; HSDP); 0: all
    group: int | Literal["node"] = 0
    weights: Codec = BF16  # of weight gathers (qwZ: an integer codec)
    gradients: tuple[Codec, Codec] = (BF16, BF16)  # of hop 1, inside a node, and hop 2, between nodes (qgZ)
    # ``hierarchical`` sends a shard once across each link between nodes; ``flat`` is one ring over all ranks
    gather: Gather = "hierarchical"
    # ``two_hop``: inside nodes, then between them; ``one_hop``: one all-to-all over all ranks; ``ring``, the
    # paper's counter-example: over all ranks, partial sums encoded again at each of ``world - 1`` steps
    reduce: Reduce = "two_hop"
    chunks: int = 1  # pieces of a unit: one travels between nodes while the next travels inside them
    secondary: int | Literal["node"] = 0  # ranks that share one secondary copy of the weights (hpZ); 0: none
    # type that the copy is kept and sent in inside its group: ``frames`` as they arrived, or decoded and cast
    # (16 bits in DeepSpeed and the paper's figure 4)
    secondary_format: Literal["frames", "fp32", "bf16", "fp16"] = "frames"
    inside: Codec | None = None  # codec of the copy instead, in forward too; None: ``secondary_format``
    # codec of differences between masters and copy, sent by the hops before an hpZ group (SDP4Bit,
    # 2410.15526); every rank, the owner too, adds the decoded difference to its copy
    differences: Codec | None = None
    refresh: int = 0  # optimizer steps of differences before weights themselves are sent; 0 for no limit
    feedback: Feedback | None = None  # of the gradient codecs
    # type that a hop's messages are decoded to and added up in.  ``fp16`` is DeepSpeed's
    # (``quant_reduce.cu``): terms and partial sums are rounded; a block with one beyond 65504 arrives as NaN
    sums: Sums = "fp32"
    # ``shape`` is DeepSpeed's.  Gradients: a unit's largest matrix has ``max(rows, columns, ranks)`` blocks
    # (``all_to_all_quant_reduce``), other parameters blocks of that size; a unit without a matrix is not
    # quantised.  Weights: a shard has the fewest blocks of <= 8000 elements (``CUDAQuantizer``), across slots
    blocks: Literal["codec", "shape"] = "codec"
    # 2 sends weights twice, quantised along rows for forward and along columns for backward (MXFP8 in
    # Megatron-FSDP, Megatron-LM's issue 7584), but a unit without a matrix once.  A block along columns spans
    # as many whole rows of a shard as the codec's block has elements; rest rows are equal in both planes.
    # Nothing stays gathered; recomputing a model block in backward is refused
    planes: Literal[1, 2] = 1
    # gradients are reduced after each ``micro_batch`` and added up in shards, or added up locally and reduced
    # once a ``step``; ``stage`` is ``step`` below stage 2, else ``micro_batch``
    reduce_every: Literal["stage", "micro_batch", "step"] = "stage"
    compute: Dtype = "fp32"  # of gathered weights and local gradients; sums over micro-batches are fp32
    loss_scale: LossScale | None = None  # of fp16
    frozen: Codec | None = None  # that frozen weights are held and sent in; None: fp32, sent as ``weights``
    memory: MemoryLimits = MemoryLimits()
    offload: Offload = Offload()
    budget: BitBudget | None = None  # for choosing codecs anew while training
    order_every: int = 32  # backward passes between checks that ranks open the same collectives; 0: never
    align: int = 1  # multiple on which parameters start, beside codecs' blocks: one geometry for a suite

    def __post_init__(self) -> None:
        hops: object = self.gradients
        if not isinstance(hops, tuple) or len(hops) != 2:
            raise PolicyError(f"gradients = {hops!r}: expected a tuple of two codecs, of hop 1 and of hop 2")
        for codec in self.codecs:
            if not isinstance(codec, Codec):
                kind = type(codec).__name__
                raise PolicyError(f"codec {codec!r} is a {kind}: expected what codec.parse() gives")
        _check_literals(self)
        for reason in itertools.chain(self._contradictions(), self._copy_errors(), self._budget_errors()):
            raise PolicyError(reason)

    def _contradictions(self) -> Iterator[str]:
        """Why fields do not go together."""
        if not 1 <= self.chunks <= MOST_CHUNKS or self.align < 1 or min(self.order_every, self.refresh) < 0:
            values = f"chunks = {self.chunks}, align = {self.align}, order_every = {self.order_every}"
            yield f"{values}, refresh = {self.refresh}: expected 1 to {MOST_CHUNKS}, 1 or more, and 0 or more"
        if self.stage < 2 and self.reduce_every == "micro_batch":
            yield f"stage {self.stage} adds gradients up locally; to reduce every micro-batch is stage 2"
        one_hop = self.reduce != "two_hop"
        if self.group != 0 and (self.stage == 0 or self.gather == "flat" or one_hop):
            values = f"here stage {self.stage}, {self.gather}, {self.reduce}"
            yield f"group={self.group} needs stages 1 to 3, hierarchical, two_hop; {values}"
        if one_hop and (self.gradients[0] != self.gradients[1] or self.chunks > 1):
            values = f"gradients={', '.join(map(str, self.gradients))}, chunks={self.chunks}"
            yield f"reduce={self.reduce} has one hop; here {values}: use two_hop"
        if self.reduce == "ring" and (self.sums != "fp32" or self.feedback is not None):
            values = f"here sums={self.sums}, feedback={self.feedback or 'none'}"
            yield f"a ring sums others' values, in fp32; {values}: use two_hop"
        yield from self._chunk_errors(user_codecs=False)
        for codec in (self.weights, *self.gradients, self.frozen or FP32) if self.blocks == "shape" else ():
            any_block = isinstance(codec, Blocked) and codec.scale == "fp32" and not codec.hadamard
            if not any_block and not isinstance(codec, Raw):
                yield f"blocks = 'shape' and {codec}, whose blocks are of its format, or of its rotation"
        codec = self.weights
        if self.planes == 2 and (
            not isinstance(codec, Blocked) or codec.block == "shard" or codec.stochastic or codec.hadamard
        ):
            yield f"planes = 2 and weights = {codec}: expected blocks, rounded to nearest and unrotated"
        offload = self.offload != Offload()
        if self.planes == 2 and (self.stage < 3 or self.secondary != 0 or offload):
            values = f"here stage {self.stage}, secondary={self.secondary}, offload={offload}"
            yield f"planes=2: weights that stay, in hpZ or offload, have one; {values}"

    def _copy_errors(self) -> Iterator[str]:
        """Why hpZ's copy cannot be kept or sent so."""
        formats, differences = self.secondary_format, f"differences = {self.differences}"
        if self.secondary == 0 and (formats != "frames" or self.sends_copy):
            values = f"secondary_format = {formats}, inside = {self.inside}, {differences}"
            yield f"secondary = 0 keeps no copy for {values}"
        if self.secondary != 0 and (self.stage < 3 or self.group != 0 or self.gather == "flat"):
            values = f"here stage {self.stage}, group={self.group}, gather={self.gather}"
            spares = f"hpZ (secondary={self.secondary}) spares stage 3's second gather"
            yield f"{spares}, after a hierarchical one, in no group; {values}"
        if self.inside is not None and (
            formats != "frames" or self.inside.stochastic or self.offload.weights
        ):
            expected = "rounding to nearest, secondary_format=frames, offload.weights=0"
            yield f"inside = {self.inside}: expected {expected}"
        if self.refresh and self.differences is None:
            yield f"refresh = {self.refresh} is of differences, and there are none"
        adds = isinstance(self.copy_codec, Raw) and self.offload == Offload()
        if self.differences is not None and not adds:
            yield f"{differences} are added to copies in 16 or 32 bits, not offloaded; here {self.copy_codec}"

    def _budget_errors(self) -> Iterator[str]:
        """Why a budget cannot choose codecs by their bytes."""
        if (budget := self.budget) is None:
            return
        text = f"budget '{budget}'"
        if self.stage == 0 or self.group != 0 or self.blocks == "shape" or self.planes > 1:
            yield f"{text} chooses whole codecs of one copy: expected stages 1 to 3, and no group or shape"
        if budget.gradients is not None and self.reduce != "two_hop":
            yield f"{text} is of a hop between nodes, and reduce = {self.reduce} has one hop; use two_hop"
        if budget.weights is not None and (self.differences is not None or self.offload != Offload()):
            yield f"{text} is of weights: expected neither differences nor offload"
        for codec in itertools.chain(*self.candidates.values()):
            if isinstance(codec, OwnCodec) and codec.name not in FORMATS:
                yield f"budget: {codec} is a codec of your own, whose bytes nobody knows; use others"
            if isinstance(codec, Blocked) and codec.block == "shard":
                yield f"budget: {codec} has one scale a shard, of any length; use a block of elements"

    def _chunk_errors(self, *, user_codecs: bool) -> Iterator[str]:
        """Why gradients in users' codecs, or in all others, cannot be cut into chunks."""
        for codec in (*self.gradients, *self.candidates.get("gradients", ())) if self.chunks > 1 else ():
            if isinstance(codec, OwnCodec) == user_codecs and codec.block == "shard":
                yield f"chunks = {self.chunks} cut a shard, of which {codec} has one scale; use blocks"

    @property
    def grain(self) -> int:
        """Elements on which parameters and shards start."""
        return math.lcm(self.align, common_grain(*self.codecs))

    @property
    def grain_in_words(self) -> str:
        """The codecs, and the alignment, that make the grain."""
        aligned = [f"align = {self.align}"] if self.align > 1 else []
        parts = list(dict.fromkeys([str(codec) for codec in self.codecs] + aligned))
        return parts[0] if len(parts) == 1 else f"the common multiple of {', '.join(parts)}"

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Codecs of weights, both hops of gradients, hpZ's copy, differences, frozen weights, budget."""
        budget = () if self.budget is None else self.budget.codecs
        others = (self.inside, self.differences, self.frozen, *budget)
        return (self.weights, *self.gradients, *(codec for codec in others if codec is not None))

    @property
    def candidates(self) -> dict[Budgeted, tuple[Codec, ...]]:
        """Codecs that a budget chooses from, the policy's own first, by purpose."""
        if (budget := self.budget) is None:
            return {}
        initial: dict[Budgeted, Codec] = {"weights": self.weights, "gradients": self.gradients[1]}
        return {
            name: tuple(dict.fromkeys([codec, *budget.codecs]))
            for name, codec in initial.items()
            if getattr(budget, name) is not None
        }

    def with_choice(self, purpose: Budgeted, codec: Codec) -> Policy:
        """The policy once a budget has chosen ``codec``; parameters and chunks start where they did."""
        sent: Any = {"weights": codec, "gradients": (self.gradients[0], codec)}[purpose]
        return replace(self, align=self.grain, **{purpose: sent})

    @property
    def own_codecs(self) -> tuple[OwnCodec, ...]:
        """Codecs that users brought."""
        return tuple(codec for codec in self.codecs if isinstance(codec, OwnCodec))

    @property
    def copy_codec(self) -> Codec:
        """The codec that hpZ's copy is kept and sent in."""
        if self.inside is not None:
            return self.inside
        return self.weights if self.secondary_format == "frames" else Raw(self.secondary_format)

    @property
    def sends_copy(self) -> bool:
        """Whether forward, too, sends hpZ's copy inside its group, not the frames from other nodes."""
        return self.inside is not None or self.differences is not None

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Whether gradients are added up in shards; else locally."""
        return self.stage >= 2 if self.reduce_every == "stage" else self.reduce_every == "micro_batch"

    def for_kind(self, *, trainable: bool = True, persistent: bool = False) -> Policy:
        """The policy of units of a kind: most have the model's own.

        Frozen units are sent in the codec that holds them.  A persistent unit, of small parameters, stays
        gathered and travels unquantised, in the compute type where the policy quantises.
        """
        changes: dict[str, Any] = {}
        if persistent:
            changes = _NO_COPY | {"feedback": None, "sums": "fp32", "planes": 1, "budget": None}
            changes["stage"], changes["weights"] = min(self.stage, 2), self._unquantised(self.weights)
            changes["gradients"] = tuple(map(self._unquantised, self.gradients))
        if not trainable:  # frozen weights never differ
            changes |= {"differences": None, "refresh": 0, "budget": None}
            changes |= {} if self.frozen is None else {"planes": 1, "weights": self.frozen}
        return replace(self, **changes)

    def _unquantised(self, codec: Codec) -> Codec:
        return codec if isinstance(codec, Raw) else Raw(self.compute)

    def for_unit(self, unit: UnitGeometry) -> Policy:
        """The policy of a laid-out unit, with its blocks and planes."""
        policy = self.for_kind(trainable=unit.trainable, persistent=unit.persistent)
        shaped = policy.by_shape([slot.spec.shape for slot in unit.slots], unit.world, unit.shard)
        return shaped if unit.trainable or self.frozen is None else replace(shaped, weights=self.frozen)

    def by_shape(self, shapes: Sequence[Sequence[int]], world: int, shard: int = 0) -> Policy:
        """The policy of a unit of these ``shapes``, reduced by ``world`` ranks.

        Without shapes, for a unit known by its size alone, blocks of gradients and planes are the policy's.
        ``shard`` is the elements of a rank's shard; 0 before layout, when any block of weights fits.
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
        """The policy without hpZ."""
        return replace(self, **_NO_COPY)

    def secondary_ranks(self, topology: Topology) -> int:
        """Ranks that share one secondary copy on ``topology``; 0 for none."""
        return topology.ranks_per_node if self.secondary == "node" else self.secondary

    def check(self, topology: Topology) -> None:
        """Refuse a topology that this policy cannot run on.  Raises PolicyError: naming both."""
        try:
            topology.check_group("an hpZ group", self.secondary_ranks(topology))
            topology.check_group("a group", self.group_ranks(topology))
            for reason in self._user_codec_errors():
                raise PolicyError(reason)
        except ValueError as error:
            raise PolicyError(str(error)) from None
        if "gradients" in self.candidates and topology.nodes == 1:
            raise PolicyError(f"budget '{self.budget}' is of gradients between nodes, and {topology} has one")

    def _user_codec_errors(self) -> Iterator[str]:
        """Why users' codecs do not fit; importing them is left until the policy is used."""
        yield from self._chunk_errors(user_codecs=True)
        for codec in self.own_codecs:
            kinds = ", ".join(codec.definition.kinds)
            if "fp32" not in codec.definition.kinds:
                yield f"{codec}: its kinds are {kinds}; expected fp32 too, of master shards and of sums"
            if self.loss_scale is not None and Law.NONFINITE not in codec.laws:
                yield f"loss_scale = {self.loss_scale}, and {codec} does not promise 'nonfinite'"

    def group_ranks(self, topology: Topology) -> int:
        """Ranks that share one copy of all that is sharded on ``topology``."""
        if self.stage == 0:
            return 1
        return topology.ranks_per_node if self.group == "node" else self.group or topology.world

    def gather_axes(self, topology: Topology) -> tuple[tuple[Axis, ...], int]:
        """Hops of a weight gather, and the number of them that the secondary spares."""
        group = self.group_ranks(topology)
        if self.stage == 0 or group < topology.world:
            axes, outside = topology.gather_axes(group)
            return axes[outside:], 0
        if self.gather == "flat":
            return (topology.world_axis,), 0
        return topology.gather_axes(self.secondary_ranks(topology))

    def replica_axes(self, topology: Topology) -> tuple[tuple[Axis, ...], Codec]:
        """Hops that bring a mean gradient to all groups, and its codec; no hops for one group."""
        axes, outside = topology.gather_axes(self.group_ranks(topology))
        between = tuple(axis for axis in axes[:outside] if axis.size > 1)
        return between, self.gradients[any(map(topology.crosses, between))]

    def feedback_hops(self, topology: Topology) -> tuple[bool, ...]:
        """For each hop of a reduction, first hop first, whether its error is kept."""
        last, feedback = len(self.reduce_axes(topology)) - 1, self.feedback
        if feedback is None:
            return (False,) * (last + 1)
        return tuple(feedback.hops == "all" or hop == last for hop in range(last + 1))

    def reduce_axes(self, topology: Topology) -> tuple[tuple[Axis, Codec], ...]:
        """Hops of a gradient reduction of more than one rank, with their codecs, first hop first."""
        axes: tuple[Axis, ...] = (topology.world_axis,)
        if self.reduce == "two_hop":
            axes = (topology.local_axis, topology.node_axis)
        if 1 < self.group_ranks(topology) < topology.world:
            axes = topology.gather_axes(self.group_ranks(topology))[0][::-1]
        return tuple((axis, self.gradients[topology.crosses(axis)]) for axis in axes if axis.size > 1)


_NO_COPY: Final[dict[str, Any]] = {  # without hpZ
    "secondary": 0, "secondary_format": "frames", "inside": None, "differences": None, "refresh": 0,
}  # fmt: skip


def weight_block(shard: int) -> int:
    """Elements of a block of weights in DeepSpeed: the most that divide ``shard``; 1 for an empty one."""
    return next((size for size in range(_GROUP, 0, -8) if shard and shard % size == 0), 1)


def _in_blocks(codec: Codec, block: int) -> Codec:
    """The codec with other blocks; casts have none."""
    return replace(codec, block=block) if isinstance(codec, Blocked) else codec


_INT8 = IntCodec(8, 2048)
_INT4 = (IntCodec(4, 256, clipped=True),) * 2  # the better scale rule in 4 bits, not in 8
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
"""Policies by name: the stages in 16 bits, the baseline ``zero3`` among them; ``zero3-flat``, the baseline of
the ZeRO++ paper, whose collectives are one ring over all ranks, blind to nodes; states in a group; then each
technique of ZeRO++, every pair, and all three.
"""

SUCCESSORS: Final[dict[str, Policy]] = {
    # ZeRO++ with DeepSpeed's scale rule for weights too, and its hpZ copy in 16 bits
    "zeropp-deepspeed": _SHIPPED,
    # Also its sums and blocks.  Scales travel with their codes, a mean is a mean (its is larger by the ranks
    # of a node), vectors are quantised with the matrices beside them, nothing falls back.
    "zeropp-shipped": replace(_SHIPPED, sums="fp16", blocks="shape"),
    # 2407.04480: ZeRO++ with a moving average of the errors of both hops
    "loco": Policy(weights=_INT8, secondary="node", gradients=_INT4, feedback=FEEDBACKS["loco"]),
    # 2410.15526: weight differences in 4 bits; gradients in 8, between nodes in 4, rotated
    "sdp4bit": Policy(
        secondary="node",
        differences=IntCodec(4, 2048, stochastic=True),
        gradients=(IntCodec(8, 128, stochastic=True), IntCodec(4, 128, hadamard=32, stochastic=True)),
    ),
    # 2302.02390: 8 bits, unbiased, by minimum and maximum of 1024 elements
    "qsdp": Policy(weights=_MIN_MAX, gradients=(_MIN_MAX, _MIN_MAX)),
    # bf16 by stochastic rounding, summed in fp32, as torchcomms, but by two hops
    "bf16-fp32sum": Policy(gradients=(_BF16SR, _BF16SR)),
    # 8-bit floats with one scale a shard, where torchao has one a tensor
    "fp8-gather": Policy(weights=FloatCodec("e4m3", "shard")),
    # MXFP4, as Megatron gathers 4-bit parameters
    "fp4-gather": Policy(weights=FloatCodec("e2m1", MX_BLOCK, scale="e8m0")),
    # MXFP8 by rows and columns in every gather, as Megatron-FSDP, whose vectors stay in 16 bits
    "mxfp8-planes": Policy(weights=FloatCodec("e4m3", MX_BLOCK, scale="e8m0"), planes=2),
}
"""What others published; Megatron's HFSDP (ZeRO-3 in a node, ZeRO-1 across) has the placements of ``hpz``."""

PRESETS: Final = TECHNIQUES | SUCCESSORS


def preset(name: str, **changes: object) -> Policy:
    """A preset with some fields replaced.  Raises PolicyError: for an unknown name or field."""
    if name not in tuple(PRESETS):  # which compares, and hashes nothing
        raise PolicyError(f"unknown policy {name!r}: expected one of {', '.join(PRESETS)}")
    names = sorted(field.name for field in fields(Policy))
    if unknown := [name for name in changes if name not in names]:
        raise PolicyError(f"unknown policy field {unknown[0]!r}: expected one of {', '.join(names)}")
    return replace(PRESETS[name], **changes)  # type: ignore[arg-type]  # checked by Policy itself
