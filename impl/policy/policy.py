"""Defines :class:`Policy`, a frozen value that says what training sends, holds and computes.

ZeRO-3, qwZ, hpZ, qgZ and ZeRO++ (2306.10209, sections 3.1 to 3.3) are values of :class:`Policy`, as are the methods of
later papers.  :mod:`impl.policy.presets` gives these values names, but the engine reads only the fields.  Combinations
that cannot be carried out are refused when a policy is built.  If they depend on the number of ranks, they are refused
by :meth:`Policy.check`.

Pure: no torch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from impl.codecs.codec import (
    BF16,
    FORMATS,
    FP32,
    LOSSLESS,
    Blocked,
    BuiltIn,
    Codec,
    Dtype,
    Law,
    OwnCodec,
    Raw,
    Sums,
    common_grain,
    parse,
)
from impl.named_object import is_name
from impl.policy.own_method import MethodError, OwnMethod, Role, method
from impl.policy.policy_parts import LARGEST_SCALE as LARGEST_SCALE
from impl.policy.policy_parts import MOST_LIVE as MOST_LIVE
from impl.policy.policy_parts import BitBudget as BitBudget
from impl.policy.policy_parts import Budgeted as Budgeted
from impl.policy.policy_parts import Feedback as Feedback
from impl.policy.policy_parts import LossScale as LossScale
from impl.policy.policy_parts import MemoryLimits as MemoryLimits
from impl.policy.policy_parts import Offload as Offload
from impl.policy.policy_parts import PolicyError as PolicyError
from impl.policy.policy_parts import check_literals, parse_codec
from impl.policy.policy_parts import parse_budget as parse_budget
from impl.policy.policy_parts import parse_feedback as parse_feedback
from impl.policy.policy_parts import parse_loss_scale as parse_loss_scale
from impl.policy.setting import out_of_range, setting, settings
from impl.policy.shard_layout import UnitGeometry
from impl.policy.spans import Span, SpanError, check_order, in_words, over
from impl.policy.topology import Axis, Topology

Stage = Literal[0, 1, 2, 3]
Gather = Literal["flat", "hierarchical"]
Reduce = Literal["ring", "one_hop", "two_hop"]

MOST_CHUNKS: Final = 8  # each chunk holds a slot of the shared memory between its two hops
_GROUP: Final = 8000  # most elements of a block of weights in DeepSpeed, which loads 8 at a time


def _raw(*codecs: Codec | Iterable[Codec]) -> bool:
    """Returns whether each of ``codecs`` is a cast to fp32, bf16 or fp16 (:class:`Raw`), which does not quantise.

    An argument may also be a tuple of codecs, such as the pair ``policy.gradients``.
    """
    return all(isinstance(codec, Raw) if isinstance(codec, Codec) else _raw(*codec) for codec in codecs)


def _schedule_in_words(spans: Sequence[Span]) -> str:
    return in_words((span.text, span.until) for span in spans) if spans else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """All settings that decide what training sends, holds and computes.

    Raises PolicyError: for combinations of settings that no topology could run.
    """

    # Stage 1 shards masters and optimizer state; stage 2 also mean gradients; stage 3 also weights; stage 0 nothing
    # (1910.02054).  Below stage 3 weights stay gathered until they change.
    stage: Stage = setting(3, "0, 1, 2 or 3: what is sharded", alters=lambda *_: True)
    # Every group of this many ranks has a copy of everything that is sharded (MiCS, 2205.00119; HSDP).
    group: int | Literal["node"] = setting(
        0, "number of ranks that share one copy of all states, 0 for all ranks, or `node`",
        alters=lambda policy, _: not policy.group,
    )  # fmt: skip
    weights: Codec = setting(  # qwZ: an integer codec
        BF16, "codec; or a list of two: inside an hpZ group, and between such groups", read=parse, pair=True, short="w",
        alters=lambda policy, codecs: _raw(policy.weights) and not _raw(codecs),
    )  # fmt: skip
    gradients: tuple[Codec, Codec] = setting(  # qgZ: integer codecs for hop 1, inside nodes, and hop 2, between them
        (BF16, BF16), "codec; or a list of two: inside a node, and between nodes", read=parse, pair=True, short="g",
        in_words=lambda codecs: "/".join(dict.fromkeys(map(str, codecs))), scope="training",
        alters=lambda policy, codecs: _raw(policy.gradients) and not _raw(codecs),
    )  # fmt: skip
    # ``hierarchical``: between nodes first, so that a shard crosses each link between nodes once.
    # A gather of your own is ``method(Differences)`` or ``mine:Differences`` (:mod:`impl.policy.own_method`).
    gather: Gather | OwnMethod = setting(
        "hierarchical", "`flat`: one ring over all ranks; `hierarchical`: between nodes first, then inside nodes; or "
        "`module:Class`, a gather of your own",
        execution=True, alters=lambda policy, _: policy.gather == "flat",
    )  # fmt: skip
    # ``ring``: each of ``world - 1`` steps encodes the partial sum again (the paper's counter-example).
    # A reduction of your own is ``method(PowerSGD, rank=4)`` or ``mine:PowerSGD`` (:mod:`impl.policy.own_method`).
    reduce: Reduce | OwnMethod = setting(
        "two_hop", "`ring`; `one_hop`: one all-to-all over all ranks; `two_hop`: inside nodes, then between; or "
        "`module:Class`, a method of your own",
        execution=True, scope="training", alters=lambda policy, _: policy.reduce == "ring",
    )  # fmt: skip
    chunks: int = setting(  # one is sent between nodes while the next is sent inside
        1, "whole number: parts in which a shard is reduced, so that hops overlap", least=1, most=MOST_CHUNKS,
        execution=True, scope="links", alters=lambda policy, _: policy.reduce == "ring",
    )  # fmt: skip
    secondary: int | Literal["node"] = setting(
        0, "number of ranks that share hpZ's copy, 0 for no copy, or `node`", short="groups of",
        alters=lambda policy, _: not policy.secondary,
    )  # fmt: skip
    # Also the type in which the copy is sent inside its group.  DeepSpeed, and the paper's figure 4, use 16 bits.
    secondary_format: Literal["frames", "fp32", "bf16", "fp16"] = setting(
        "frames", "hpZ's copy: `frames` keeps the codes that were received, `bf16`, `fp16` or `fp32` casts the weights",
        label="hpZ copy", alters=lambda policy, _: not policy.secondary,
    )  # fmt: skip
    # Codec in which hpZ's copy is kept, in place of ``secondary_format``.  Forward passes then also send the copy
    # inside the group of ranks that share it.  A suite gives this codec as the first of two codecs of ``weights``.
    inside: Codec | None = setting(None, in_words=lambda codec: str(codec or "as sent"))
    # Codec in which the hops between hpZ groups send how the masters differ from hpZ's copy (SDP4Bit, 2410.15526).
    # Every rank adds the decoded differences to its copy.  The rank that holds the masters does so too, so that all
    # copies stay equal.
    differences: Codec | None = setting(
        None, "codec of the differences from hpZ's copy, which are sent instead of weights; or `none`",
        read=parse_codec, alters=lambda policy, _: policy.differences is None,
    )  # fmt: skip
    refresh: int = setting(
        0, "optimizer steps after which whole weights are sent again, instead of differences; 0: whole weights are "
        "sent only in the first step", least=0,
        alters=lambda policy, _: policy.differences is None,
    )  # fmt: skip
    feedback: Feedback | None = setting(
        None, "`none`, `classic` or `loco`, followed by `:decay<d>`, `:reset<n>`, `:last`, `:all`, `:fp32`, `:bf16`, "
        "`:fp16`", read=parse_feedback, scope="training", alters=lambda policy, _: _raw(policy.gradients),
    )  # fmt: skip
    # ``fp16`` is DeepSpeed's way (``quant_reduce.cu``): terms and partial sums are rounded to fp16, and a block in
    # which one of them exceeds 65504 arrives as NaN.
    sums: Sums = setting(
        "fp32", "`fp32`, or `fp16` as DeepSpeed: type in which a hop sums", implied=True, scope="training",
        alters=lambda policy, _: _raw(policy.gradients),
    )  # fmt: skip
    # DeepSpeed's rule: for gradients the unit's largest matrix is cut into ``max(rows, columns, ranks)`` blocks
    # (``all_to_all_quant_reduce``), the unit's other parameters have blocks of the same size, and a unit without a
    # matrix is not quantised.  For weights a shard is cut into the fewest equal blocks of at most 8000 elements
    # (``CUDAQuantizer``), which may span several parameters.
    blocks: Literal["codec", "shape"] = setting(
        "codec", "`codec`: blocks of the codec's size; `shape`: blocks of DeepSpeed's sizes", implied=True,
        alters=lambda policy, _: _raw(policy.weights, policy.gradients),
    )  # fmt: skip
    # A *plane* of a matrix is the matrix quantised in blocks along its rows, or in blocks along its columns.  With
    # ``planes=2``, every gather sends both planes, as Megatron-FSDP does in MXFP8 (Megatron-LM's issue 7584).  With
    # ``planes="phase"`` and hpZ, forward brings both planes between nodes, hpZ's copy keeps the columns, and backward
    # sends nothing between nodes.  A unit without a matrix is sent in one plane.  A block along columns spans as many
    # whole rows of a shard as the codec's block has elements; rows that are left over are quantised along rows in both
    # planes.  Unless ``planes`` is 1, no unit stays gathered for backward, and recomputing a block of the model in
    # backward (activation checkpointing) is refused.
    planes: Literal[1, 2, "phase"] = setting(
        1, "1: one quantisation for all passes; 2: by rows for forward and by columns for backward, and every gather "
        "sends both; `phase`: as 2, but a gather sends only the version that its pass computes with (with hpZ, forward "
        "also sends the version of backward, between nodes)", implied=True,
        alters=lambda policy, _: _raw(policy.weights),
    )  # fmt: skip
    reduce_every: Literal["stage", "micro_batch", "step"] = setting(
        "stage", "`micro_batch` reduces gradients after each micro-batch and adds up the shards; `step` adds up "
        "gradients locally and reduces the sum once a step; `stage` means `step` in stages 0 and 1, `micro_batch` in "
        "stages 2 and 3",
        in_words=lambda every: every.replace("_", "-"), execution=True, scope="training",
        alters=lambda policy, every: policy.stage < 2 and every == "micro_batch",
    )  # fmt: skip
    compute: Dtype = setting(  # micro-batches are summed in fp32
        "fp32", "`fp32`, `bf16`, `fp16`: type of gathered weights and local gradients; masters stay fp32",
        execution=True,
    )  # fmt: skip
    loss_scale: LossScale | None = setting(  # for compute in fp16
        None, "`none`, a number, or `dynamic` followed by `:from<scale>`, `:window<steps>`", read=parse_loss_scale,
        execution=True, scope="training",
    )  # fmt: skip
    frozen: Codec | None = setting(  # None: kept in fp32, and sent in the codec ``weights``
        None, "codec in which untrained weights are stored and sent, or `none`", read=parse_codec
    )
    # Codecs of the two exchanges with which Muon orthogonalises a matrix at its owner (:mod:`impl.plan.owners`).  Even
    # in ``exact``, messages in bf16 change no bit of the result, because Newton-Schulz computes in bf16.
    owned: tuple[Codec, Codec] = setting(
        (BF16, BF16), "codec; or a list of two: for the momentum that ranks send to a matrix's owner (with Muon, the "
        "rank that orthogonalises the matrix), and for the update that the owner sends back",
        read=parse, pair=True, scope="training",
        in_words=lambda codecs: "/".join(dict.fromkeys(map(str, codecs))),
    )  # fmt: skip
    memory: MemoryLimits = MemoryLimits()
    offload: Offload = Offload()
    budget: BitBudget | None = setting(  # limit within which codecs are chosen while training
        None, "`none`, or `weights <bits>`, `gradients <bits>` or both, `every <steps> of <codecs>`", read=parse_budget,
        alters=lambda policy, _: _raw(policy.weights, policy.gradients),
    )  # fmt: skip
    # Optimizer steps that each group takes between two exchanges with the other groups (DiLoCo, 2311.08105).  In these
    # steps, gradients are averaged inside a group only.  None: every step averages gradients over all ranks.
    local_steps: int | None = setting(
        None, "whole number: optimizer steps that each group takes between exchanges with the others; or "
        "`none`",
        or_none=True, scope="training", alters=lambda policy, _: not policy.group,
    )  # fmt: skip
    # The units are divided into this many fragments.  Different fragments are exchanged after different steps, which
    # are spread evenly over ``local_steps`` (Streaming DiLoCo, 2501.18512).
    local_fragments: int = setting(
        1, "whole number: fragments into which the units are divided, each exchanged after another step; or `none`",
        or_none=True, scope="training", alters=lambda policy, _: not policy.group,
    )  # fmt: skip
    # The outer SGD's gradient is the mean over groups of how far their masters have moved.
    outer_rate: float = setting(
        0.7, "number: learning rate of the outer step that follows an exchange (0.7); or `none`",
        or_none=True, scope="training", alters=lambda policy, _: not policy.group,
    )  # fmt: skip
    outer_momentum: float = setting(
        0.9, "number: Nesterov momentum of the outer step, below 1 (0.9); or `none`",
        or_none=True, scope="training", alters=lambda policy, _: not policy.group,
    )  # fmt: skip
    order_every: int = setting(
        32, "backward passes between checks of the order of messages; 0: never", least=0, execution=True,
        label="order checked every",
    )  # fmt: skip
    align: int = setting(  # parameters also start on multiples of the codecs' blocks
        1, "whole number: parameters start on multiples of so many elements; a suite sets it for all its policies",
        least=1, unset=1, label="",
    )  # fmt: skip
    # Changes of the policy while training.  In each span, a part of the run, the fields that the span names have the
    # span's values, and all other fields have the values above.  In suites the key is a list of tables
    # (``SpanChanges`` in ``harness.suites.trial``).
    schedule: tuple[Span, ...] = setting((), in_words=_schedule_in_words)

    def __post_init__(self) -> None:
        hops: object = self.gradients
        if not isinstance(hops, tuple) or len(hops) != 2:
            raise PolicyError(
                f"gradients = {hops!r}: expected a tuple of two codecs, for the hops inside and between nodes"
            )
        spans: object = self.schedule
        if not isinstance(spans, tuple) or not all(isinstance(span, Span) for span in spans):
            raise PolicyError(f"schedule = {spans!r}: expected a tuple of Span")
        for codec in self._fields_codecs():
            if not isinstance(codec, Codec):
                kind = type(codec).__name__
                raise PolicyError(
                    f"codec {codec!r} is a {kind}: expected a codec, such as zeropp.codec('int8:2048') returns"
                )
        check_literals(self)
        self._read_method("reduce", get_args(Reduce))
        self._read_method("gather", get_args(Gather))
        errors = (
            *(self._method_errors(), self._gather_errors(), self._contradictions(), self._copy_errors()),
            *(self._budget_errors(), self._schedule_errors(), self._owned_errors(), self._local_errors()),
        )
        for reason in itertools.chain.from_iterable(errors):
            raise PolicyError(reason)

    def _read_method(self, name: Role, known: Sequence[str]) -> None:
        """Check the value of the policy's field ``name``, which is ``reduce`` or ``gather``.

        Three kinds of values are allowed:

        - one of the words ``known``;
        - a method, that is, the result of :func:`~impl.policy.own_method.method`;
        - the name ``module:Class`` of a user's class, which is replaced with ``method("module:Class")``.

        Raises PolicyError: for any other value, or if a method's class cannot be used in this field.  A class that was
        given by its name is not checked here, since this would import its module.
        """
        value = getattr(self, name)
        if isinstance(value, str) and is_name(value):
            value = method(value)
            object.__setattr__(self, name, value)
        elif not isinstance(value, OwnMethod) and value not in known:
            listed = ", ".join(known)
            raise PolicyError(
                f"{name} = {value!r}: expected one of {listed}, 'module:Class' or method(Class, ...)"
            )
        if isinstance(value, OwnMethod) and value.kind is not None:
            try:
                value.check_role(name)
            except MethodError as error:
                raise PolicyError(str(error)) from None

    @property
    def own_reduce(self) -> OwnMethod | None:
        """The user's class that reduces gradients; None if gradients are reduced in hops."""
        return self.reduce if isinstance(self.reduce, OwnMethod) else None

    @property
    def own_gather(self) -> OwnMethod | None:
        """The user's class that gathers weights; None if weights are gathered in hops."""
        return self.gather if isinstance(self.gather, OwnMethod) else None

    def _gather_errors(self) -> Iterator[str]:
        """Yield an error message for each field whose value a user's class that gathers weights does not allow.

        Without such a class, there are no messages.
        """
        if (own := self.own_gather) is None:
            return
        way_out = "or set gather='hierarchical'"
        if self.stage == 0:
            yield f"gather='{own}' needs stage 1 to 3: in stage 0 every rank has all weights; set stage=3, {way_out}"
        if self.secondary != 0:
            keeps = "since hpZ keeps a copy of what hops bring"
            yield f"gather='{own}' does not allow secondary={self.secondary!r}, {keeps}: set secondary=0, {way_out}"
        if self.planes != 1:
            why = "since planes are made by the codec of weights, which a method does not use"
            yield f"gather='{own}' does not allow planes={self.planes!r}, {why}: set planes=1, {way_out}"
        if self.offload != Offload():
            keeps = "which keeps masters or encoded weights on the host"
            yield f"gather='{own}' does not allow offload, {keeps}: remove offload, {way_out}"
        if self.budget is not None and self.budget.weights is not None:
            chooses = "which chooses codecs of weights, and a method has none"
            yield f"gather='{own}' does not allow budget '{self.budget}', {chooses}: remove weights from the budget"

    def _method_errors(self) -> Iterator[str]:
        """Yield an error message for each field whose value a user's class that reduces gradients does not allow.

        Without such a class, there are no messages.
        """
        if (own := self.own_reduce) is None:
            return
        usual = {
            "chunks": (self.chunks, 1, "cuts messages that codecs encode, while a method makes its own"),
            "sums": (
                self.sums,
                "fp32",
                "is the type in which decoded messages are summed, while a method sums itself",
            ),
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
            way_out = "remove gradients from the budget"
            yield f"reduce='{own}' does not allow budget '{self.budget}', which {chooses}: {way_out}"

    def _contradictions(self) -> Iterator[str]:
        """Yield an error message for each combination of built-in settings that cannot be carried out."""
        if any(out_of_range(self)):
            numbers = (each for each in settings(Policy) if each.least is not None and not each.part)
            ranked = sorted(
                numbers, key=lambda each: (each.least == 0, each.most is None, each.range, each.name)
            )
            values = ", ".join(f"{each.name}={each.of(self)}" for each in ranked)
            groups = itertools.groupby(ranked, key=lambda each: each.range)
            limits = (f"{' and '.join(each.name for each in group)} {range_}" for range_, group in groups)
            yield f"{values}: expected {', '.join(limits)}"
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
        for own in self.own_codecs:
            if own.name in LOSSLESS:
                yield _no_fixed_size(own)
        for codec in (self.weights, *self.gradients, self.frozen or FP32) if self.blocks == "shape" else ():
            any_block = isinstance(codec, Blocked) and codec.scale == "fp32" and not codec.hadamard
            if not any_block and not isinstance(codec, Raw):
                way_out = "use an int or fp8 codec without hadamard, or set blocks='codec'"
                yield f"blocks='shape' chooses the size of blocks, but the size of {codec}'s blocks is fixed: {way_out}"
        codec = self.weights
        if self.planes != 1 and (
            not isinstance(codec, Blocked) or codec.block == "shard" or codec.stochastic or codec.hadamard
        ):
            needs = "needs a codec with blocks, rounding to nearest and no hadamard"
            yield f"planes={self.planes!r} {needs}; here weights={codec}: use such a codec, or set planes=1"
        host = f"offload.optimizer={self.offload.optimizer:g}, offload.weights={self.offload.weights:g}"
        if self.planes == 2 and (self.stage < 3 or self.secondary != 0 or self.offload != Offload()):
            values = f"here stage {self.stage}, secondary={self.secondary!r}, {host}"
            yield f"planes=2 needs stage 3, without hpZ and offload; {values}: change these, or set planes=1"
        changed = self.secondary_format != "frames" or self.sends_copy
        if self.planes == "phase" and (self.stage < 3 or changed or self.offload != Offload()):
            texts = f"inside={self.inside or 'none'}, differences={self.differences or 'none'}"
            values = f"here stage {self.stage}, secondary_format={self.secondary_format!r}, {texts}, {host}"
            needs = "needs stage 3, hpZ's copy as frames, without inside and differences, and no offload"
            yield f"planes='phase' {needs}; {values}: change these, or set planes=1"

    def _copy_errors(self) -> Iterator[str]:
        """Yield an error message for each field that conflicts with hpZ, and for each that has no effect without hpZ.

        The fields ``differences`` and ``refresh``, with which weights are sent as differences from hpZ's copy, are
        checked too.
        """
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
        """Yield an error message for each setting, of the policy or of the budget, that conflicts with the bit budget.

        A budget (:class:`BitBudget`) limits the bits that are sent, and chooses codecs during training.  Without a
        budget, there are no messages.
        """
        if (budget := self.budget) is None:
            return
        text = f"budget '{budget}'"
        if self.stage == 0 or self.group != 0 or self.blocks == "shape" or self.planes != 1:
            values = (
                f"stage {self.stage}, group={self.group!r}, blocks={self.blocks!r}, planes={self.planes!r}"
            )
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

    def _schedule_errors(self) -> Iterator[str]:
        """Yield an error message for each contradiction inside the schedule, or between the schedule and another field.

        The schedule has the changes of the policy while training.  Without a schedule, there are no messages.
        """
        if not self.schedule:
            return
        yield from check_order(self.schedule)
        if self.budget is not None:
            yield f"budget '{self.budget}' chooses codecs by itself, and so does schedule: remove one of the two"
        phases = self.phases  # raises if a span's fields contradict one another
        groups = {phase.secondary for phase in phases} - {0}
        if len(groups) > 1:
            values = ", ".join(f"secondary={group!r}" for group in sorted(groups, key=str))
            yield f"schedule has {values}, whose copies lie on different ranks: use one of these values, or 0"
        carried = {phase.feedback for phase in phases} - {None}
        if len(carried) > 1:
            values = ", ".join(f"'{feedback}'" for feedback in carried)
            yield f"schedule has feedback {values}, whose kept errors differ: use one of these values, or none"
        if carried and len({phase.reduce for phase in phases if phase.feedback is not None}) > 1:
            yield (
                "schedule changes reduce, so that the errors which feedback keeps would have other sizes: set one "
                "reduce for all spans, or remove feedback"
            )
        if any(phase.own_reduce != phases[0].own_reduce for phase in phases):
            yield "schedule changes reduce to or from a class of your own, which keeps a state: use it in all spans"
        if any(phase.own_gather != phases[0].own_gather for phase in phases):
            yield "schedule changes gather to or from a class of your own, which keeps a state: use it in all spans"
        if self.offload != Offload() and len({phase.gathering for phase in phases}) > 1:
            keeps = "offload keeps encoded weights in host memory"
            yield f"schedule changes how weights are sent, and {keeps}: let spans change gradients only"

    def _owned_errors(self) -> Iterator[str]:
        """Yield an error message for each codec in ``owned`` that Muon cannot use.

        The field ``owned`` has two codecs.  In the first, ranks send the momentum of a matrix to its owner, the rank
        that orthogonalises the matrix.  In the second, the owner sends updates back.
        """
        codecs: object = self.owned
        if not isinstance(codecs, tuple) or len(codecs) != 2:
            yield f"owned = {codecs!r}: expected a tuple of two codecs, for momentum and for updates"
            return
        for codec in codecs:
            if not isinstance(codec, BuiltIn) or codec.stochastic:
                needs = "needs built-in codecs that round to nearest"
                yield f"owned={', '.join(map(str, codecs))} {needs}: use bf16 or, for example, int8:256"

    def _local_errors(self) -> Iterator[str]:
        """Yield an error message for each wrong value of a field of local steps (``local_steps``, ``outer_rate``, ...).

        With local steps, groups of ranks train apart from one another, and exchange weights after some of the steps.
        Also yield an error message for each other field whose value local steps do not allow.  If ``local_steps`` is
        None, yield an error message for each of the other fields of local steps that is set, since that field has no
        effect.
        """
        steps, fragments = self.local_steps, self.local_fragments
        for name, kind, expected in (
            ("local_steps", (int, type(None)), "a whole number or None"),
            ("local_fragments", (int,), "a whole number"),
            ("outer_rate", (int, float), "a number"),
            ("outer_momentum", (int, float), "a number"),
        ):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind):
                yield f"{name} = {value!r}: expected {expected}"
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
                f"local_steps={steps} needs groups of ranks with a copy of all states in each group; {here}: set "
                "group='node' and stage 1 to 3, or remove local_steps"
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
            "schedule": (
                bool(self.schedule),
                "outer steps keep the codecs and carried errors of the whole run",
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
        """Yield an error message for each gradient codec that does not allow shards to be cut into ``chunks``.

        Such a codec has a single scale for a whole shard.  With ``chunks=1`` there are no messages.

        If ``user_codecs`` is True, only codecs of class ``OwnCodec`` are checked, and the modules that define them are
        imported.  If it is False, the codecs of all other classes are checked.
        """
        for codec in (*self.gradients, *self.candidates.get("gradients", ())) if self.chunks > 1 else ():
            if isinstance(codec, OwnCodec) == user_codecs and codec.block == "shard":
                way_out = "use a codec with blocks of elements, or set chunks=1"
                yield f"chunks={self.chunks} cuts a shard, for which {codec} has a single scale: {way_out}"

    @property
    def grain(self) -> int:
        """The alignment of parameters and shards: each starts on a multiple of this number of elements."""
        return math.lcm(self.align, common_grain(*self.codecs))

    @property
    def grain_in_words(self) -> str:
        """A text for error messages that names the settings from which :attr:`grain` follows, such as ``int8:2048``.

        The settings are the policy's codecs, and ``align`` if it is above 1.  If there are several of them, the text is
        ``the common multiple of``, followed by the settings.
        """
        aligned = [f"align = {self.align}"] if self.align > 1 else []
        parts = list(dict.fromkeys([str(codec) for codec in self.codecs] + aligned))
        return parts[0] if len(parts) == 1 else f"the common multiple of {', '.join(parts)}"

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """All codecs of the policy: of weights, of the first and the second gradient hop, then of the optional fields.

        The codecs in ``owned`` are not included.  With a schedule, the codecs of all steps are included, each once.
        """
        if not self.schedule:
            return self._fields_codecs()
        return tuple(dict.fromkeys(itertools.chain.from_iterable(phase.codecs for phase in self.phases)))

    def _fields_codecs(self) -> tuple[Codec, ...]:
        """Returns the codecs of the policy's own fields, without those of its schedule."""
        budget = () if self.budget is None else self.budget.codecs
        others = (self.inside, self.differences, self.frozen, *budget)
        return (self.weights, *self.gradients, *(codec for codec in others if codec is not None))

    # Schedules

    @property
    def phases(self) -> tuple[Policy, ...]:
        """The different policies that hold during a run, in the order in which the run first uses them.

        There are several if the field ``schedule`` changes the policy while training.  None of the returned policies
        has a schedule.
        """
        return _compiled(self)[0] if self.schedule else (self,)

    def phase_at(self, step: int) -> int:
        """Returns the index in :attr:`phases` of the policy that holds in optimizer step ``step``, counted from 0."""
        begin = 0
        for end, every, changed, own in _compiled(self)[1] if self.schedule else ():
            if step < end:
                return own if (step - begin) % every else changed
            begin = int(end)
        return 0

    def phase_counts(self, begin: int, end: int) -> dict[int, int]:
        """Counts the optimizer steps from ``begin`` to ``end - 1`` by the policy that holds in them.

        Steps are counted from 0.  Returns a dict from the index of a policy in :attr:`phases` to the number of steps in
        which this policy holds.  Policies that hold in none of the steps are left out.
        """
        counts, start = Counter[int](), 0
        rows = _compiled(self)[1] if self.schedule else ((math.inf, 1, 0, 0),)
        for until, every, changed, own in rows:
            first, last = max(begin, start), int(min(end, until))  # the span's steps among those asked for
            if first < last:
                # Steps with the span's changes are those whose distance from its start is a multiple of ``every``.
                often = (last - start - 1) // every - (first - start - 1) // every
                counts[changed] += often
                counts[own] += last - first - often
            start = int(min(end, until))
        return {number: count for number, count in counts.items() if count}

    def policy_at(self, step: int) -> Policy:
        """Returns the policy, without a schedule, that holds in optimizer step number ``step``, counted from 0."""
        return self.phases[self.phase_at(step)]

    def for_steps(self, steps: int) -> Policy:
        """Returns a copy of this policy for a run of ``steps`` optimizer steps.

        A span is a part of the schedule: consecutive steps in which the same fields are changed.  The end of a span may
        be given as a share of the run; in the copy, the end is the number of a step.

        Raises PolicyError: if a span contains no step of this run, or if the last span does not end at the last step.
        """
        try:
            return replace(self, schedule=over(self.schedule, steps)) if self.schedule else self
        except SpanError as error:
            raise PolicyError(str(error)) from None

    @property
    def schedule_in_words(self) -> str:
        """The schedule on one line, such as ``gradients int4:256 until 50 %, then gradients bf16``; or ``none``."""
        return _schedule_in_words(self.schedule)

    @property
    def gathering(self) -> tuple[object, ...]:
        """The values of all fields that decide how weights are gathered.

        A schedule may change these values while training.  The next gather then sends the weights themselves, as at the
        start of training.  It sends neither hpZ's copy of the weights, nor the differences between the weights and this
        copy.
        """
        if self.own_gather is not None:
            return (self.gather,)
        copy = self.secondary, self.secondary_format, self.inside, self.differences, self.refresh
        return (self.weights, self.gather, *copy)

    def _with_span(self, span: Span) -> Policy:
        """Returns the policy, without a schedule, of the steps in which the changes of ``span`` hold.

        A span is a part of the schedule: it gives values to some of the policy's fields for a part of the run.
        """
        changes = dict(span.changes)
        if changes.get("secondary") == 0:
            changes = _NO_COPY | changes
        return replace(self, schedule=(), **changes)

    @property
    def candidates(self) -> dict[Budgeted, tuple[Codec, ...]]:
        """For each purpose of the budget (``weights``, ``gradients``), the codecs from which the budget chooses.

        The codec that the policy itself names comes first.  The dict is empty without a budget.
        """
        if (budget := self.budget) is None:
            return {}
        initial: dict[Budgeted, Codec] = {"weights": self.weights, "gradients": self.gradients[1]}
        return {
            name: tuple(dict.fromkeys([codec, *budget.codecs]))
            for name, codec in initial.items()
            if getattr(budget, name) is not None
        }

    def with_choice(self, purpose: Budgeted, codec: Codec) -> Policy:
        """Returns a copy of this policy in which ``codec``, which a budget has chosen, is the codec for ``purpose``.

        The copy keeps the grain of this policy (the alignment of parameters and shards), so that the layout of units
        does not change.  For gradients, ``codec`` is used between nodes only.
        """
        sent: Any = {"weights": codec, "gradients": (self.gradients[0], codec)}[purpose]
        return replace(self, align=self.grain, **{purpose: sent})

    def choices(self, purpose: Budgeted) -> list[Policy]:
        """Returns one policy for each codec that the budget may choose for ``purpose``.

        If there is no budget for this purpose, the list has only this policy itself.
        """
        return [self.with_choice(purpose, codec) for codec in self.candidates.get(purpose, ())] or [self]

    @property
    def own_codecs(self) -> tuple[OwnCodec, ...]:
        """The policy's codecs of class ``OwnCodec``: codecs of the user, and published formats such as ``nf4``."""
        return tuple(codec for codec in self.codecs if isinstance(codec, OwnCodec))

    @property
    def readable(self) -> bool:
        """Whether the attributes of all codecs may be read.

        Reading the attributes of a user's codec imports the user's module, which some commands must not do
        (:func:`impl.named_object.forbidden`).
        """
        return all(codec.readable for codec in self.own_codecs)

    @property
    def copy_codec(self) -> Codec:
        """The codec of hpZ's copy of the weights, of which each rank of a group (such as a node) keeps a part.

        A rank keeps its part in this codec, and sends it in this codec to the other ranks of the group.
        """
        if self.inside is not None:
            return self.inside
        return self.weights if self.secondary_format == "frames" else Raw(self.secondary_format)

    @property
    def sends_copy(self) -> bool:
        """Whether forward passes send hpZ's copy inside the group of ranks that share it, as backward passes always do.

        In a forward pass, a rank first receives encoded weights, or their differences from hpZ's copy, from other
        groups.  If the result is True, the rank updates its part of the copy with the received values, and then sends
        this part inside its group.  If the result is False, the rank sends the received bytes on unchanged.
        """
        return self.inside is not None or self.differences is not None

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Whether gradients are reduced after each micro-batch; if not, their local sum is reduced once a step."""
        return self.stage >= 2 if self.reduce_every == "stage" else self.reduce_every == "micro_batch"

    def for_kind(self, *, trainable: bool = True, persistent: bool = False) -> Policy:
        """Returns the policy of frozen units (``trainable=False``) or of persistent units (``persistent=True``).

        - Frozen units are kept and sent in the codec of the field ``frozen``.  If ``frozen`` is None, they are kept in
          fp32, and sent like other weights, but never as differences.  A user's class that gathers weights is replaced
          by a built-in gather.
        - Persistent units hold small parameters, stay gathered, and are sent unquantised: codecs that quantise are
          replaced with a cast to the compute type.  User's classes that gather weights or reduce gradients are replaced
          by the built-in gather or reduction.

        With the default arguments, the method returns this policy itself.

        Raises PolicyError: for a policy with a schedule.
        """
        if self.schedule:
            raise PolicyError(
                "a policy with a schedule gives its units different policies in different steps: call for_kind() on "
                "one of the policies in its phases"
            )
        changes: dict[str, Any] = {}
        if persistent:
            changes = _NO_COPY | {"feedback": None, "sums": "fp32", "planes": 1, "budget": None}
            changes["stage"], changes["weights"] = min(self.stage, 2), self._unquantised(self.weights)
            changes["gradients"] = tuple(map(self._unquantised, self.gradients))
            changes |= {} if self.own_reduce is None else {"reduce": "two_hop"}
        if self.own_gather is not None and (persistent or not trainable):
            changes["gather"] = "hierarchical"
        if not trainable:  # frozen weights do not change, so there are no differences to send
            changes |= {"differences": None, "refresh": 0, "budget": None}
            changes |= {} if self.frozen is None else {"planes": 1, "weights": self.frozen}
        return replace(self, **changes) if changes else self

    def _unquantised(self, codec: Codec) -> Codec:
        return codec if isinstance(codec, Raw) else Raw(self.compute)

    def for_unit(self, unit: UnitGeometry) -> Policy:
        """Returns the policy with which ``unit`` is gathered and reduced.

        The result depends on whether the unit is frozen or persistent (:meth:`for_kind`), and on the shapes of the
        unit's parameters (:meth:`by_shape`).
        """
        policy = self.for_kind(trainable=unit.trainable, persistent=unit.persistent)
        shaped = policy.by_shape([slot.spec.shape for slot in unit.slots], unit.world, unit.shard)
        return shaped if unit.trainable or self.frozen is None else replace(shaped, weights=self.frozen)

    def by_shape(self, shapes: Sequence[Sequence[int]], world: int, shard: int = 0) -> Policy:
        """Returns the policy of a unit whose parameters have these ``shapes``.

        Two settings depend on the shapes:

        - ``blocks='shape'``: the codecs of the returned policy have the block sizes that DeepSpeed chooses for these
          shapes, and the field ``blocks`` is ``codec``.  If the unit has no matrix, its gradients are cast instead of
          quantised, without error feedback, and are summed in fp32.
        - ``planes``: if the unit has no matrix, the returned policy has ``planes=1``.

        Args:
            shapes: the shapes; empty if only the size of the unit is known.  The blocks of the gradients' codecs and
                ``planes`` then stay as they are.
            world: number of ranks that reduce the unit's gradient.
            shard: number of elements of a rank's shard; 0 before the unit is laid out.
        """
        matrices = [shape for shape in shapes if len(shape) > 1 and 0 not in shape]
        policy = replace(self, planes=1) if shapes and not matrices and self.planes != 1 else self
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
        """Returns a copy of this policy without hpZ; all fields that need hpZ have their default values in the copy."""
        return replace(self, **_NO_COPY)

    def secondary_ranks(self, topology: Topology) -> int:
        """Returns the number of ranks of ``topology`` that share one of hpZ's copies of the weights; 0 without hpZ."""
        return topology.ranks_per_node if self.secondary == "node" else self.secondary

    def check(self, topology: Topology) -> None:
        """Check that this policy can run on ``topology``.

        A user's codec is checked only if its module may be imported (:attr:`readable`).

        Raises PolicyError: in each of these cases:

        * the topology cannot be cut into the policy's groups;
        * local steps need several groups, and all ranks form one group;
        * a user's codec does not fit the policy;
        * a budget chooses the codec of gradients between nodes, and there is one node;
        * a span of the schedule ends at a share of the run, and the run's number of steps is not known;
        * the last span of the schedule ends before the run ends.
        """
        if self.schedule:
            if any(span.until is not None and span.end is None for span in self.schedule[:-1]):
                way_out = "use policy.for_steps(steps), with the number of steps"
                raise PolicyError(
                    f"schedule ({self.schedule_in_words}) has a span that ends at a share of the run, and the run's "
                    f"length is not known: {way_out}"
                )
            if (end := self.schedule[-1].end) is not None:
                raise PolicyError(
                    f"the last span of schedule ends at step {end}, and the steps after it have no span: remove "
                    "'until' from the last span"
                )
            for phase in self.phases:
                phase.check(topology)
            return
        try:
            topology.check_group(
                f"secondary={self.secondary!r}: an hpZ group", self.secondary_ranks(topology)
            )
            topology.check_group(f"group={self.group!r}: a group", self.group_ranks(topology))
            if self.local_steps is not None and self.group_ranks(topology) == topology.world:
                groups = f"group={self.group!r} on {topology} makes one group of all ranks"
                raise PolicyError(
                    f"local_steps={self.local_steps} needs two groups or more, but {groups}: set group to fewer ranks, "
                    "use more ranks in all, or remove local_steps"
                )
            for reason in self._user_codec_errors() if self.readable else ():
                raise PolicyError(reason)
        except ValueError as error:
            raise PolicyError(str(error)) from None
        if "gradients" in self.candidates and topology.nodes == 1:
            chooses = "chooses the codec of gradients between nodes"
            raise PolicyError(
                f"budget '{self.budget}' {chooses}, and {topology} has one node: use two or more nodes, or remove "
                "gradients from the budget"
            )

    def _user_codec_errors(self) -> Iterator[str]:
        """Yield an error message for each codec of class ``OwnCodec`` that does not fit this policy.

        To find these errors, the method imports the modules that define the codecs.  Building a policy does not import
        these modules.
        """
        yield from self._chunk_errors(user_codecs=True)
        for codec in self.own_codecs:
            kinds = ", ".join(codec.definition.kinds)
            if codec.definition.used_bytes is not None:
                yield _no_fixed_size(codec)
            if "fp32" not in codec.definition.kinds:
                yield f"{codec}: its kinds are {kinds}; add fp32, the type of master shards and of sums"
            if self.loss_scale is not None and Law.NONFINITE not in codec.laws:
                needs = "needs codecs that keep NaN and infinity"
                lacks = f"{codec} does not promise the law 'nonfinite'"
                yield f"loss_scale={self.loss_scale} {needs}; {lacks}: use another codec"

    def group_ranks(self, topology: Topology) -> int:
        """Returns the number of ranks that share one copy of all sharded states.

        At stage 0 the number is 1, since nothing is sharded.
        """
        if self.stage == 0:
            return 1
        return topology.ranks_per_node if self.group == "node" else self.group or topology.world

    def averaged_ranks(self, topology: Topology) -> int:
        """Returns the number of ranks whose gradients are averaged in a step.

        With ``local_steps`` (DiLoCo), each group of :meth:`group_ranks` ranks averages by itself.  Otherwise all ranks
        average together.
        """
        return topology.world if self.local_steps is None else self.group_ranks(topology)

    def gather_axes(self, topology: Topology) -> tuple[tuple[Axis, ...], int]:
        """Returns (axes, saved): the axes along which a weight gather sends, and the number of hops that hpZ saves.

        A hop is one exchange of messages along one axis of ranks.  ``axes`` has one axis for each hop, first hop first.
        hpZ keeps a copy of the weights that the first ``saved`` hops bring, so a gather from this copy sends only the
        later hops.  Without hpZ, ``saved`` is 0.  If a user's class gathers the weights, ``axes`` is empty, since only
        the class knows its messages.
        """
        if self.own_gather is not None:
            return (), 0
        group = self.group_ranks(topology)
        if self.stage == 0 or group < topology.world:
            axes, outside = topology.gather_axes(group)
            return axes[outside:], 0
        if self.gather == "flat":
            return (topology.world_axis,), 0
        return topology.gather_axes(self.secondary_ranks(topology))

    def replica_axes(self, topology: Topology) -> tuple[tuple[Axis, ...], Codec]:
        """Returns (axes, codec) of the hops that all-gather the mean gradient between groups after its reduction.

        A group is a set of ranks that share one copy of all sharded states.  With several groups, the reduction gives
        each rank only a part of its shard's mean gradient.  These hops bring the other parts, from the ranks of the
        other groups that hold the same shard.

        ``axes`` has one axis of ranks for each hop, and ``codec`` encodes the messages of all these hops.  ``axes`` is
        empty if all ranks form one group, and also if a user's class reduces the gradients, since such a class brings
        the mean to every group.
        """
        if self.own_reduce is not None:
            return (), self.gradients[0]
        axes, outside = topology.gather_axes(self.group_ranks(topology))
        between = tuple(axis for axis in axes[:outside] if axis.size > 1)
        return between, self.gradients[any(map(topology.crosses, between))]

    def reduce_axes(self, topology: Topology) -> tuple[tuple[Axis, Codec], ...]:
        """Returns (axis, codec) for each hop of a gradient reduction, first hop first.

        A hop is one exchange of messages along one axis of ranks.  Axes of one rank are left out.  If a user's class
        reduces the gradients, the result is an empty tuple, since only the class knows its messages.
        """
        if self.own_reduce is not None:
            return ()
        axes: tuple[Axis, ...] = (topology.world_axis,)
        if self.reduce == "two_hop":
            axes = (topology.local_axis, topology.node_axis)
        if 1 < self.group_ranks(topology) < topology.world:
            axes = topology.gather_axes(self.group_ranks(topology))[0][::-1]
        return tuple((axis, self.gradients[topology.crosses(axis)]) for axis in axes if axis.size > 1)


SETTINGS: Final = settings(Policy)
"""All fields of a policy, and of its ``memory`` and ``offload``, in the order in which they are declared."""

_NO_COPY: Final[dict[str, Any]] = {  # the fields of a policy without hpZ
    "secondary": 0, "secondary_format": "frames", "inside": None, "differences": None, "refresh": 0,
}  # fmt: skip


@functools.lru_cache(maxsize=256)
def _compiled(policy: Policy) -> tuple[tuple[Policy, ...], tuple[tuple[float, int, int, int], ...]]:
    """Returns (phases, rows): the policies that a schedule switches between, and which of them each span uses.

    A span is a part of the run for which the schedule changes some of the policy's fields.  ``phases`` has each of the
    policies once, without a schedule of its own.  ``rows`` has one row (end, every, changed, own) for each span:

    - ``end`` is the number of steps, counted from the beginning of the run, after which the span ends.  It is infinite
      for the last span, and for a span whose end is not known yet.
    - ``every`` is the span's field of this name: with ``every=2``, the changes hold in every second step.
    - ``changed`` is the index in ``phases`` of the policy for the steps in which the span's changes hold.
    - ``own`` is the index in ``phases`` of the policy for the other steps of the span.  With ``every=1`` there are no
      other steps, and ``own`` equals ``changed``.

    Raises PolicyError: if the fields of a span cannot be combined; the message names the span.
    """
    own, numbers, rows = replace(policy, schedule=()), dict[Policy, int](), []
    for number, span in enumerate(policy.schedule, 1):
        try:
            changed = policy._with_span(span)  # noqa: SLF001
        except PolicyError as error:
            raise PolicyError(f"span {number} of schedule: {error}") from None
        pair = changed, own if span.every > 1 else changed
        first, second = (numbers.setdefault(phase, len(numbers)) for phase in pair)
        rows.append((math.inf if span.end is None else float(span.end), span.every, first, second))
    return tuple(numbers), tuple(rows)


def weight_block(shard: int) -> int:
    """Returns the size of DeepSpeed's quantisation blocks (elements for each scale) in a shard of ``shard`` weights.

    The result is the largest multiple of 8 that divides ``shard`` and is at most 8000.  Returns 1 if there is none.
    """
    return next((size for size in range(_GROUP, 0, -8) if shard and shard % size == 0), 1)


def _no_fixed_size(codec: OwnCodec) -> str:
    """Returns the error message for a codec whose number of bytes depends on the values."""
    sizes = "cannot be sent, since its number of bytes depends on the values, and messages have fixed sizes"
    way_out = (
        "measure it with `zeropp bench formats`, or send gradients with reduce='examples.lossless:Lossless'"
    )
    return f"{codec} {sizes}: {way_out}"


def _in_blocks(codec: Codec, block: int) -> Codec:
    """Returns ``codec`` with blocks of ``block`` elements; a codec without blocks is returned as it is."""
    return replace(codec, block=block) if isinstance(codec, Blocked) else codec
