"""Defines the classes of those fields of a :class:`~impl.policy.policy.Policy` that hold several values.

They are the memory limits, the offload to host memory, the loss scale, error feedback and the bit budget.  The last
three can also be given as text, such as ``loco:decay0.9``, which this module parses.  :mod:`impl.policy.policy`
exports all of them.

Pure: no torch.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args, get_origin, get_type_hints

from impl.codecs.codec import ITEM_BYTES, Codec, Dtype, parse
from impl.policy.setting import out_of_range, setting

Budgeted = Literal["weights", "gradients"]

LARGEST_SCALE: Final = 2.0**126  # largest loss scale; it is finite in fp32


class PolicyError(ValueError):
    """Raised if a policy's settings contradict one another or do not fit a topology; the message gives the reason."""


@functools.cache
def _listed(kind: type) -> tuple[tuple[str, tuple[object, ...]], ...]:
    """Returns (name, allowed values) for each ``Literal`` field of the dataclass ``kind``."""
    types = get_type_hints(kind)
    return tuple((name, get_args(each)) for name, each in types.items() if get_origin(each) is Literal)


def check_literals(settings: object) -> None:
    """Raise a PolicyError if a field with a ``Literal`` type has a value that the type does not list."""
    for name, listed in _listed(type(settings)):  # type: ignore[arg-type]  # a class is hashable
        if (value := getattr(settings, name)) not in listed:
            raise PolicyError(f"{name} = {value!r}: expected one of {', '.join(map(str, listed))}")


def _read(text: str, heads: Iterable[str], forms: Mapping[str, str], allowed: str) -> dict[str, str] | None:
    """Parse a text that consists of a first word and options; return a dict of its parts, or None for ``none``.

    The parts are separated by colons.  For example, ``loco:decay0.9:bf16`` gives
    ``{"head": "loco", "decay": "0.9", "state": "bf16"}``.

    Args:
        text: the text to parse.
        heads: the first words that are allowed.
        forms: maps the name of each option to a regular expression, whose first group matches the option's value.
        allowed: what is allowed, in words, for the end of the error message.

    Raises PolicyError: for another first word, or for an option that is unknown or given twice.
    """
    head, *options = text.strip().split(":")
    if head == "none" and not options:
        return None
    settings = {"head": head}
    for option in options:
        matches = {name: match[1] for name, form in forms.items() if (match := re.fullmatch(form, option))}
        if not matches or matches.keys() & settings.keys():
            raise PolicyError(f"cannot read {text!r}: option {option!r} is unknown or given twice; {allowed}")
        settings |= matches
    if head not in heads:
        raise PolicyError(f"cannot read {text!r}: {allowed}")
    return settings


def _text(head: str, settings: object, defaults: object, prefixes: Mapping[str, str]) -> str:
    """Write ``settings`` as text that :func:`_read` can parse, such as ``loco:decay0.9:bf16``.

    The text begins with ``head``.  An option follows for each field in ``prefixes`` whose value differs from the
    value in ``defaults``.  ``prefixes`` maps the name of a field to the text before its value, such as ``decay``.
    """
    options = [
        f"{prefix}{getattr(settings, name)}".removesuffix(".0")
        for name, prefix in prefixes.items()
        if getattr(settings, name) != getattr(defaults, name)
    ]
    return ":".join([head, *options])


MOST_LIVE: Final = 1_000_000_000  # most elements gathered at once by default; DeepSpeed has the same default


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """Limits on gathered weights and on gradients that are being reduced, in elements of the unsharded model.

    A unit need not be gathered twice if it stays gathered from its forward pass to its backward pass.  A unit stays
    gathered if both limits allow it: ``max_live`` limits the elements that are gathered at one time, and fewer than
    ``max_reuse`` elements must run between the unit's two passes.  These are the elements of all units that run in
    between, counted twice, once in forward and once in backward.  With ``max_reuse=1`` the root's unit and the last
    block stay gathered, because no unit runs between their two passes.  With ``max_reuse=0`` no unit stays gathered.
    On one rank, every ``max_reuse`` above 0 has the same effect: only ``max_live`` limits which units stay gathered.

    While a unit computes, the units that are used next are gathered, up to ``prefetch`` elements.  The very next unit
    is gathered even if it is larger than ``prefetch``; otherwise a model of large blocks would wait for every
    all-gather.  DeepSpeed, too, fetches parameters until ``stage3_prefetch_bucket_size`` is exceeded.  With
    ``prefetch=0`` no unit is gathered before its use.

    A unit is *small* if its first message has at most ``pair_below`` bytes, and if the unit has at most ``prefetch``
    elements.  With NCCL, small units are gathered ahead in pairs.  One NCCL call sends the messages of both units,
    which saves the host's time for a second call and a second event.  While the first unit of a pair computes, the next
    pair is gathered, even if the pair is larger than ``prefetch``.  So up to four units are gathered at one time;
    without pairs, two or three are.

    Raises PolicyError: if a limit is negative or NaN.
    """

    prefetch: int = setting(
        50_000_000, "elements that are gathered ahead of their use. The next unit is gathered ahead even if it is "
        "larger; 0: no unit is", least=0, execution=True, scope="stage 3",
    )  # fmt: skip
    # The units in use may exceed this limit by themselves.  None: the limit is ``MOST_LIVE``, but the unit that is used
    # next is gathered before its use even beyond this limit.
    max_live: int | None = setting(
        None, "most elements that are gathered at the same time: beyond this number no further unit is gathered ahead "
        "or kept. Not given: 1,000,000,000, and the next unit is gathered ahead even beyond this number",
        least=0, execution=True, scope="stage 3",
    )  # fmt: skip
    max_reuse: int = setting(
        1, "a unit stays gathered from forward to backward if the units that run in between have fewer elements than "
        "this, counted once in forward and once in backward. 1: only the last block and the parameters outside of "
        "blocks stay gathered, since no unit runs in between; 0: no unit does",
        least=0, execution=True, scope="stage 3",
    )  # fmt: skip
    pair_below: int = setting(
        4_000_000, "with NCCL, two units are gathered ahead by one call if the first message of each has at most this "
        "many bytes, and each has at most `prefetch` elements; 0: never", least=0, execution=True, scope="stage 3",
    )  # fmt: skip
    persist_below: int = setting(  # these parameters form a persistent unit, which is trained as in stage 2
        0,
        "parameters with fewer elements stay gathered and are never quantised; 0: none",
        least=0,
        execution=True,
    )
    persist_most: int = setting(
        2**63 - 1, "most elements that stay gathered because of `persist_below`; in model order, a parameter that "
        "would exceed it is sharded instead", least=0, execution=True,
    )  # fmt: skip
    reduce_bucket: int = setting(  # earlier reductions are finished to stay within it
        500_000_000, "gradient elements that may be in reduction at the same time", least=0, execution=True
    )
    largest_unit: int = setting(  # a larger block without submodules is refused
        0, "most elements of a unit; larger blocks are cut into their submodules; 0: no limit", least=0, execution=True
    )  # fmt: skip
    max_padding: float = setting(0.2, "largest share of a unit that may be padding", least=0, label="")

    def __post_init__(self) -> None:
        for each, value in out_of_range(self):
            raise PolicyError(f"memory.{each.name} = {value}: expected {each.range}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Shares of a model's states that are kept in host memory (ZeRO-Offload 2101.06840, ZeRO-Infinity 2104.07857).

    Whole units are offloaded, in model order, until at least the share is reached.

    ``optimizer`` moves the optimizer state and the *master* of a trained unit, which is the unit's fp32 shard.
    ``weights`` moves hpZ's copy of a unit.  In addition, it moves:

    - of a frozen unit: the shard;
    - of a trained unit whose master is on the host: the encoded weights, which are otherwise kept on the device;
    - of a trained unit whose master is on the device: nothing, since each gather encodes the master anew, and no
      encoded weights are kept.

    Raises PolicyError: for shares outside [0, 1].
    """

    # For these elements, the mean gradients are on the host too, and the optimizer steps the masters on the host.  The
    # device keeps their encoded weights.
    optimizer: float = setting(
        0.0, "share of trained elements whose masters and optimizer state are on the host", key="offload_optimizer",
        least=0, most=1, execution=True, label="optimizer on the host", in_words="{:g}".format,
    )  # fmt: skip
    # These shards, and hpZ's copy of them, are copied to the device for each gather.
    weights: float = setting(
        0.0, "share of elements whose encoded and frozen shards are on the host", key="offload_weights",
        least=0, most=1, execution=True, label="weights on the host", in_words="{:g}".format,
    )  # fmt: skip

    def __post_init__(self) -> None:
        for each, value in out_of_range(self):
            raise PolicyError(f"offload.{each.name} = {value}: expected {each.range}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The factor by which losses are multiplied, so that small gradients do not vanish in fp16.

    A dynamic scale halves at an overflow (a gradient that is not finite), and doubles after ``window`` steps without an
    overflow.

    Raises PolicyError: if ``window`` is negative, or if ``0 < least <= initial <= LARGEST_SCALE`` does not hold.
    """

    initial: float = 65536.0  # scale at the beginning, or the fixed scale
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
    """Parse the text of a loss scale: ``512`` for a fixed scale, ``dynamic:from1024:window200`` for a dynamic one.

    Returns None for ``none``.

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

    A hop encodes ``h = gradient + error``, and then sets ``error = decay * error + (1 - decay) * (h - decoded)``
    (:class:`impl.codecs.reference.Carried`).  Classic feedback has decay 0.  LoCo (2407.04480) keeps a moving
    average of the errors; DeepSpeed's LoCo has decay 0.8 and is reset every 1024 steps.

    With ``reduce="two_hop"``, each rank keeps the following errors of a unit that has ``padded`` elements, padding
    included:

    - with ``hops="last"``: ``padded / ranks_per_node`` errors, for the last hop, which is between nodes;
    - with ``hops="all"``: the same errors for the last hop, and ``padded`` errors for the first hop.

    Raises PolicyError: for a decay outside [0, 1) or a negative reset.
    """

    decay: float = 0.0  # share of the old error that is kept, in [0, 1)
    reset: int = 0  # optimizer steps after which the error is set to zero; 0: never
    hops: Literal["last", "all"] = "last"  # the hops whose errors are kept
    state: Dtype = "fp32"  # type of the kept errors

    def __post_init__(self) -> None:
        check_literals(self)
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
    """Parse the text of error feedback, such as ``classic`` or ``loco:decay0.9:reset512:bf16``.

    Returns None for ``none``.

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
    """A limit on the bits that units send, within which :mod:`impl.plan.bit_budget` chooses codecs while training.

    Training begins with the policy's own codecs.  In the steps 1, 1 + ``every``, 1 + 2 ``every`` and so on, each
    candidate codec encodes the step's weights and gradients, and its errors are measured.  After such a step, a codec
    is chosen for each unit, so that all units together stay within the limit and the sum of their errors is small.
    Frozen units and persistent units (small parameters that stay gathered) keep their codecs.

    Raises PolicyError: for numbers out of range, no codecs, or neither weights nor gradients.
    """

    codecs: tuple[Codec, ...]  # candidates, in addition to the policy's own codec
    every: int = 50  # optimizer steps from one choice to the next
    # Most bits for each element that weight gathers send between nodes, as the mean over a step.  Scales and padding
    # count.  0: as many bits as the policy's own codec takes.  None: weights keep the policy's codec.
    weights: float | None = None
    gradients: float | None = None  # the same for the elements that gradient reductions send between nodes

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
    """Parse a budget's text, such as ``gradients 4.5 every 50 of int3:128``.

    Returns None for ``none``.

    Raises PolicyError: for any other text.
    """
    if (spaced := " ".join(text.split())) == "none":
        return None
    if (match := re.fullmatch(_BUDGET_TEXT, spaced)) is None:
        raise PolicyError(f"budget {text!r}: {_BUDGET}")
    bits = {name: float(match[name] or 0) for name in get_args(Budgeted) if match[name] is not None}
    return BitBudget(codecs=tuple(map(parse, match["codecs"].split())), every=int(match["every"]), **bits)


def parse_codec(text: str) -> Codec | None:
    """Parse the text of a codec, such as ``int8:2048``.

    Returns None for ``none``.

    Raises CodecError: for any other text.
    """
    return None if text == "none" else parse(text)
