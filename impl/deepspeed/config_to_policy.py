"""Reads a DeepSpeed configuration as a recipe: a policy, and the settings that are not part of a policy.

Keys that change what is sent, held or computed are either honoured or refused with an error that names the key.  All
other known keys are accepted and reported as without effect (:mod:`impl.deepspeed.keys` lists every key).

A missing key has DeepSpeed's default, not this project's: a missing ``stage3_param_persistence_threshold`` is 1e5.
``"auto"``, which HuggingFace's Trainer replaces before DeepSpeed reads the configuration, counts as missing.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, cast

from impl.codecs.codec import BF16, FP16, FP32, Codec, Dtype, IntCodec
from impl.deepspeed.keys import (
    AUTO,
    KEYS,
    LOCO,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    SWITCHED,
    ZERO,
    DeepSpeedError,
    Key,
    as_json,
    leaves,
    load,
    shown,
)
from impl.plan.learning_rate import Decay, Schedule
from impl.policy.policy import Feedback, LossScale, MemoryLimits, Offload, Policy, PolicyError, Stage
from impl.policy.shard_layout import UnitGeometry
from impl.policy.topology import Topology

Kind = Literal["honoured", "without effect", "renamed", "changed"]

QWZ: Final = IntCodec(8, 2048, clipped=True)  # clipped is DeepSpeed's scale rule
QGZ: Final = IntCodec(4, 256, clipped=True)
MOST_SCALE_POWER: Final = 126
LARGEST: Final = 1e30  # numbers beyond it, infinity and NaN are refused as mistakes
LIVE: Final = f"{ZERO}.stage3_max_live_parameters"
_WIRE_TYPES: Final[dict[str, Codec]] = {"fp32": FP32, "fp16": FP16, "bf16": BF16, "bfp16": BF16}
_DECAYS: Final[dict[str, Decay]] = {"WarmupLR": "none", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_DECAY_LR: Final = 0.001  # default of warmup_max_lr in WarmupDecayLR
_OF_SHARDS: Final = tuple(  # keys, and prefixes of tables, without effect on parameters that stay gathered
    f"{ZERO}.{name}."
    for name in (
        "zero_quantized_weights", "zero_hpz_partition_size", "zero_quantized_gradients", "zeropp_loco_param",
        "stage3_prefetch_bucket_size", "stage3_max_reuse_distance", "stage3_allgather_sequential",
    )
)  # fmt: skip
_WANTED: Final = {
    "switch": "true or false", "count": "a whole number of 0 or more", "number": "a number of 0 or more",
    "text": "text", "list": "a list",
}  # fmt: skip
TORCH_DECAY: Final = 0.01  # torch.optim.AdamW's default weight decay


@dataclass(frozen=True, slots=True)
class Finding:
    """How one key of a configuration is treated."""

    key: str  # dotted path, as the configuration spells it
    value: Any
    kind: Kind  # ``changed`` if the run does something other than the key says
    text: str  # what the key does here, or why it has no effect

    def __str__(self) -> str:
        return f"{self.key} = {as_json(self.value)}: {self.kind}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamOptions:
    """The optimizer that a configuration asks for; ``type`` is the class in ``torch.optim``."""

    type: Literal["Adam", "AdamW"]
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings that a configuration asks for."""

    policy: Policy  # what is sent, held and computed, including precision and loss scale
    clip: float | None  # largest global norm of the mean gradient; None: gradients are not clipped
    accumulation: int  # micro-batches in a step
    micro_batch: int | None  # sequences of one rank in a micro-batch; None if the configuration has none
    optimizer: (
        AdamOptions | None
    )  # None if the configuration has no optimizer, so that the caller chooses one
    schedule: Schedule | None  # schedule of the learning rate; None if the learning rate is constant
    peak: float | None  # learning rate at the end of the warm-up; None: the optimizer's own rate
    findings: tuple[Finding, ...]  # one for each key, in the configuration's order


def recipe(config: Mapping[str, Any] | str | Path, *, topology: Topology, steps: int | None = None) -> Recipe:
    """Returns the recipe that a DeepSpeed configuration asks for: the policy and all other settings of a run.

    Args:
        config: a mapping, JSON text (which begins with ``{``), or the path of a JSON file.
        topology: the nodes and ranks, which limit the size of hpZ's groups and determine the batch.
        steps: optimizer steps of the run.  If the configuration's learning-rate schedule has no ``total_num_steps``, it
            decays over this number of steps.

    Raises:
        DeepSpeedError: if the configuration cannot be read as JSON or HJSON, or if a key or value is unknown,
            contradicts another, or is not supported here.
    """
    return _Reading(load(config), topology, steps).recipe()


def laid_out(base: Recipe, units: Sequence[UnitGeometry]) -> Recipe:
    """Returns the recipe ``base`` with its findings corrected for a model that consists of the ``units``.

    A finding says how one key of the configuration is treated.  A unit is a group of parameters that are gathered
    together, usually those of a block.  The parameters of a persistent unit stay gathered.  Findings change in two
    cases:

    - A unit that is not persistent has more elements than ``stage3_max_live_parameters`` allows.  The finding of this
      key becomes ``changed``, since the unit cannot be cut, so that it is gathered although it exceeds the limit.
    - Otherwise, if the stage is 3 and all units are persistent, the findings of keys that concern shards become
      ``without effect``.  An example is ``zero_quantized_weights``: persistent parameters are sent unquantised.
    """
    sizes = {unit.name: unit.numel for unit in units if not unit.persistent}
    largest = max(sizes, key=sizes.__getitem__, default="")
    if (most := base.policy.memory.largest_unit) and sizes and sizes[largest] > most:
        text = f"unit {largest!r} cannot be cut, so its {sizes[largest]:,} elements are gathered at once"
        findings = tuple(
            replace(note, kind="changed", text=text) if note.key == LIVE else note for note in base.findings
        )
        return replace(base, findings=findings)
    if base.policy.stage < 3 or not all(unit.persistent for unit in units):
        return base
    text = (
        "all parameters persist: they stay gathered, and are sent unquantised "
        f"(stage3_param_persistence_threshold = {base.policy.memory.persist_below - 1:,})"
    )
    findings = tuple(
        replace(note, kind="without effect", text=text)
        if f"{note.key}.".startswith(_OF_SHARDS) and (note.value or note.key == LOCO) and note.value != AUTO
        else note
        for note in base.findings
    )
    return replace(base, findings=findings)


class _Reading:
    """Reads one configuration: checks its keys and values, and builds the recipe.

    DeepSpeed has renamed some keys, and accepts their old names too.  Some attributes of this class are dicts "by
    current path": they have a key's present name, even if the configuration uses an old name.
    """

    def __init__(self, table: Mapping[str, Any], topology: Topology, steps: int | None) -> None:
        self.topology, self.steps = topology, steps
        self.entries: dict[str, Any] = dict(leaves(table))
        self.values: dict[str, Any] = {}  # typed values, by current path
        self.spelt: dict[str, str] = {}  # by current path, the path as the configuration spells it
        # By current path, findings that differ from those in KEYS.
        self.notes: dict[str, tuple[Kind, str]] = {}
        self.loco = isinstance(table.get(ZERO), Mapping) and table[ZERO].get("zeropp_loco_param") is not None
        for path, value in self.entries.items():
            if path in KEYS and value not in (None, AUTO):
                self._take(KEYS[path], value)
        stage = self.get(f"{ZERO}.stage")
        for path, value in self.values.items():
            if value and value != KEYS[path].default and stage < (least := KEYS[path].stage):
                self.refuse(
                    path,
                    f"needs stage {least}, but {self.says(f'{ZERO}.stage')}: raise the stage, or remove this key",
                )

    def _take(self, key: Key, value: Any) -> None:
        """Check the value of ``key``, and store it under the path that DeepSpeed uses for this key today.

        Raises DeepSpeedError: if the value does not have the key's type, is not supported, or differs from the value
        that the configuration gives under another spelling of the key.
        """
        target = key.means or key.path
        typed = _typed(key, value)
        if target.endswith(".device") and isinstance(typed, bool):
            typed = "cpu" if typed else "none"
        if target in self.values and self.values[target] != typed:
            other = self.spelt[target]
            both = f"{key.path} = {shown(value)} and {other} = {shown(self.entries[other])}"
            raise DeepSpeedError(f"{both} are two spellings of one key with different values: remove one")
        off = key.path in SWITCHED and isinstance(typed, Mapping) and typed.get("enabled") is False
        if key.fate == "only the default" and typed != key.default and not off:
            raise DeepSpeedError(f"{key.path} = {shown(value)} is not supported: {key.text}; remove this key")
        self.values[target] = typed
        self.spelt.setdefault(target, key.path)

    def recipe(self) -> Recipe:
        """Returns the policy and all other settings that the configuration asks for.

        Raises DeepSpeedError: if settings contradict one another, or do not fit the topology.
        """
        try:
            policy = self._policy()
            policy.check(self.topology)
        except PolicyError as error:
            raise DeepSpeedError(str(error)) from None
        micro_batch, accumulation = self._batches()
        schedule, peak = self._schedule()
        return Recipe(
            policy=policy,
            clip=float(self.get("gradient_clipping")) or None,
            accumulation=accumulation,
            micro_batch=micro_batch,
            optimizer=self._optimizer(peak),
            schedule=schedule,
            peak=peak,
            findings=tuple(self._findings()),
        )

    def get(self, path: str) -> Any:
        """Returns the configuration's value of the key ``path``; DeepSpeed's default if the key is missing."""
        return self.values.get(path, KEYS[path].default)

    def says(self, path: str) -> str:
        """Returns the text ``key = value`` for error messages, with key and value as the configuration spells them.

        ``path`` is the key.  If the configuration does not have the key, the value is DeepSpeed's default.
        """
        spelt = self.spelt.get(path, path)
        return f"{spelt} = {shown(self.entries.get(spelt, self.get(path)))}"

    def refuse(self, path: str, reason: str) -> NoReturn:
        """Raise DeepSpeedError for the key ``path``: the message has the key, its value, and ``reason``."""
        raise DeepSpeedError(f"{self.says(path)}: {reason}")

    def note(self, path: str, kind: Kind, text: str) -> None:
        """Set the finding of the key ``path``: how the key is treated (``kind``), and why (``text``).

        If this method has set a finding of the key before, the first finding stays.  The recipe has only the findings
        of keys that the configuration gives (:meth:`_findings`).
        """
        self.notes.setdefault(path, (kind, text))

    def _policy(self) -> Policy:
        """Returns the policy that the configuration asks for."""
        stage: Stage = self.get(f"{ZERO}.stage")
        for path in self.entries if stage < 3 else ():
            if path.startswith(f"{ZERO}.stage3_"):
                self.note(
                    KEYS[path].means or path, "without effect", f"for stage 3 only; this is stage {stage}"
                )
        scatters = f"{ZERO}.reduce_scatter"
        if stage == 0:
            self.note(scatters, "without effect", "for stages 1 to 3 only; this is stage 0")
        elif not self.get(scatters):
            self.refuse(
                scatters,
                "not supported: gradients are reduced to shards and never all-reduced; remove this key",
            )
        compute, scale = self._precision()
        weights, gradients = self._codecs(compute)
        return Policy(
            stage=stage,
            group=self._group(),
            weights=weights,
            gradients=(gradients, gradients),
            secondary=self._secondary(),
            feedback=self._feedback(),
            compute=compute,
            loss_scale=scale,
            frozen=QWZ if self.get(f"{ZERO}.zero_quantized_nontrainable_weights") else None,
            memory=self._memory(stage),
            offload=self._offload(stage),
        )

    def _precision(self) -> tuple[Dtype, LossScale | None]:
        enabled = {section: self.get(f"{section}.enabled") for section in ("fp16", "bf16")}
        if all(enabled.values()):
            self.refuse("fp16.enabled", f"contradicts {self.says('bf16.enabled')}: enable one of them")
        for path in self.entries:
            section, _, key = path.partition(".")
            if key != "enabled" and not enabled.get(section, True):
                self.note(path, "without effect", f"{section} is not enabled")
        if not enabled["fp16"]:
            return ("bf16" if enabled["bf16"] else "fp32"), None
        became: Kind = "without effect" if self.get("fp16.hysteresis") == 1 else "changed"
        self.note("fp16.hysteresis", became, KEYS["fp16.hysteresis"].text)
        fixed, power = float(self.get("fp16.loss_scale")), self.get("fp16.initial_scale_power")
        least, window = float(self.get("fp16.min_loss_scale")), self.get("fp16.loss_scale_window")
        if fixed:
            for name in ("initial_scale_power", "min_loss_scale", "loss_scale_window"):
                self.note(
                    f"fp16.{name}", "without effect", f"{self.says('fp16.loss_scale')} is a fixed scale"
                )
            return "fp16", LossScale(initial=fixed, window=0, least=min(1.0, fixed))
        if power > MOST_SCALE_POWER:
            self.refuse("fp16.initial_scale_power", f"expected at most {MOST_SCALE_POWER}")
        if not window:
            self.refuse("fp16.loss_scale_window", "a dynamic scale needs a window of 1 step or more")
        return "fp16", LossScale(initial=2.0**power, window=window, least=least)

    def _codecs(self, compute: Dtype) -> tuple[Codec, Codec]:
        """Returns (codec of weights, codec of gradients): how weights and gradients are encoded in messages.

        If the configuration quantises weights or gradients, they have the codec of ZeRO++'s qwZ or qgZ.  If it does not
        quantise them, they are cast to the type in which DeepSpeed sends them.  ``compute`` is the type in which the
        model computes.
        """
        quantises = f"{ZERO}.zero_quantized_gradients"
        weights = QWZ if self.get(f"{ZERO}.zero_quantized_weights") else _WIRE_TYPES[compute]
        if not self.get(quantises):
            return weights, _WIRE_TYPES[self.get("communication_data_type") or compute]
        if self.get("gradient_predivide_factor") != 1:
            self.refuse("gradient_predivide_factor", f"expected 1 with {self.says(quantises)}")
        self.note("communication_data_type", "without effect", "gradients are sent quantised, as int4")
        return weights, QGZ

    def _secondary(self) -> int:
        """Returns the number of ranks in an hpZ group; 0 without hpZ.

        The ranks of an hpZ group together hold a second copy of the weights.  If the configuration asks for more ranks
        than there are, the group has all ranks.  If the group then has a single rank, hpZ is not used, and the result
        is 0.
        """
        path = f"{ZERO}.zero_hpz_partition_size"
        ranks, world, nodes = self.get(path), self.topology.world, self.topology.nodes
        if ranks > world:
            span = f", which span {nodes} nodes, so hpZ saves no traffic between nodes" if nodes > 1 else ""
            self.note(path, "changed", f"the hpZ group is all {world} ranks{span}")
        return min(ranks, world) if min(ranks, world) > 1 else 0

    def _group(self) -> int:
        """Returns the number of ranks in a MiCS group; 0 if all ranks are one group.

        The ranks of a MiCS group together hold one copy of weights, gradients and optimizer states, in shards.
        """
        path, hpz = f"{ZERO}.mics_shard_size", f"{ZERO}.zero_hpz_partition_size"
        ranks, world = self.get(path), self.topology.world
        if ranks != int(ranks) or not -1 <= ranks <= world:
            self.refuse(path, f"expected a whole number of ranks, at most {world}, or -1 for all")
        if ranks >= 1 and self.get(hpz) > 1:
            has_copy = "each MiCS group holds all weights already, so hpZ has nothing to copy"
            self.refuse(path, f"not supported with {self.says(hpz)}: {has_copy}; remove one of them")
        return int(ranks) if 1 <= ranks < world else 0

    def _feedback(self) -> Feedback | None:
        """Returns the error feedback of gradients if the configuration has the table ``zeropp_loco_param``; otherwise
        None.

        The table asks for LoCo, which adds the quantisation errors of each step to the gradients of the next.

        Raises DeepSpeedError: if the configuration has this table, but does not quantise gradients.
        """
        if not self.loco:
            return None
        if not self.get(switch := f"{ZERO}.zero_quantized_gradients"):
            raise DeepSpeedError(
                f"{LOCO}: LoCo needs quantised gradients, but {self.says(switch)}: set it to true, or remove the table"
            )
        decay, reset = float(self.get(f"{LOCO}.err_beta")), self.get(f"{LOCO}.reset_T")
        return Feedback(decay=decay, reset=reset, hops="all")

    def _memory(self, stage: Stage) -> MemoryLimits:
        bucket = self.get(f"{ZERO}.reduce_bucket_size")
        if stage < 3:
            return MemoryLimits(reduce_bucket=bucket)
        sequential, ahead = f"{ZERO}.stage3_allgather_sequential", f"{ZERO}.stage3_prefetch_bucket_size"
        if self.get(sequential):
            self.note(ahead, "without effect", f"with {self.says(sequential)} nothing is gathered ahead")
        live = self.get(LIVE)
        if not live:
            self.refuse(LIVE, "expected 1 or more")
        return MemoryLimits(
            prefetch=0 if self.get(sequential) else self.get(ahead),
            # None is the same limit as the default, but lets the next unit be gathered ahead.
            max_live=None if live == KEYS[LIVE].default else live,
            max_reuse=self.get(f"{ZERO}.stage3_max_reuse_distance"),
            persist_below=self.get(f"{ZERO}.stage3_param_persistence_threshold") + 1,
            persist_most=self.get(f"{ZERO}.stage3_model_persistence_threshold"),
            reduce_bucket=bucket,
            largest_unit=live,
        )

    def _offload(self, stage: Stage) -> Offload:
        parameters, ratio = f"{OFFLOAD_PARAM}.device", f"{OFFLOAD_OPTIMIZER}.ratio"
        share = float(self.get(ratio))
        if self.get(f"{OFFLOAD_OPTIMIZER}.device") == "none":
            self.note(ratio, "without effect", "the optimizer is not offloaded")
            share = 0.0
        elif share < 1 and stage < 3:
            stage_is = self.says(f"{ZERO}.stage")
            self.refuse(ratio, f"offloading a part needs stage 3, but {stage_is}: set ratio to 1")
        weights = self.get(parameters) == "cpu"
        if weights and share < 1 and not self._secondary():
            text = (
                "host memory holds only frozen weights, and weights whose optimizer is offloaded; all other "
                "weights are encoded for each gather from their fp32 masters on the device"
            )
            self.note(parameters, "changed", text)
        return Offload(optimizer=share, weights=float(weights))

    def _batches(self) -> tuple[int | None, int]:
        """Returns (sequences of one rank in a micro-batch, micro-batches in a step).

        DeepSpeed has three sizes: ``train_batch_size`` (B), ``train_micro_batch_size_per_gpu`` (m) and
        ``gradient_accumulation_steps`` (a), with B = m x a x ranks.

        - If the configuration gives two of them or all three, the result is (m, a).
        - If it gives only B, or only m, then a is 1.
        - If it gives only a, or none, m is not known, and the first number is None.  Without a, the second number is 1.

        Raises DeepSpeedError: if a size is 0, or if the sizes contradict one another or the number of ranks.
        """
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        whole, micro, steps = sizes = [self.values.get(name) for name in names]
        if 0 in sizes:
            self.refuse(names[sizes.index(0)], "expected 1 or more")
        if whole is None:
            return micro, steps or 1
        world = self.topology.world
        known = world * (micro or 1) * (steps or 1)
        if micro and steps and known != whole:
            both = f"{self.says(names[1])}, {self.says(names[2])}"
            self.refuse(names[0], f"contradicts {both} and {world} ranks, which make {known}")
        if whole % known:
            others = "".join(f" x {self.says(name)}" for name in names[1:] if name in self.values)
            self.refuse(names[0], f"expected a multiple of {known} ({world} ranks{others})")
        return micro or whole // known, steps or (whole // known if micro else 1)

    def _kind(self, section: str) -> str | None:
        """Returns the ``type`` in ``section``, which is ``optimizer`` or ``scheduler``; None if the section is missing.

        Raises DeepSpeedError: if the section has keys, but no type.
        """
        path = f"{section}.type"
        if path not in self.values and any(name.startswith(f"{section}.") for name in self.values):
            allowed = ", ".join(KEYS[path].allowed)
            raise DeepSpeedError(f"{section} has no type: set {path} to one of {allowed}")
        return cast("str | None", self.get(path))

    def _schedule(self) -> tuple[Schedule | None, float | None]:
        """Returns (schedule of the learning rate, learning rate at the end of the warm-up).

        Both are None if the configuration has no scheduler.  If the scheduler does not set the learning rate, only the
        second is None: the rate at the end of the warm-up is then the optimizer's own.
        """
        say, kind = "scheduler.params.{}".format, self._kind("scheduler")
        if kind is None:
            return None, None
        cosine = kind == "WarmupCosineLR"
        warmup, total = self.get(say("warmup_num_steps")), self.get(say("total_num_steps")) or self.steps
        if warmup < 1:
            self.refuse(say("warmup_num_steps"), "expected at least 1")
        if total is None and kind != "WarmupLR":
            raise DeepSpeedError(
                f"scheduler.type = {kind} needs a number of steps: set {say('total_num_steps')}"
            )
        others = ("warmup_min_lr", "warmup_max_lr") if cosine else ("warmup_min_ratio", "cos_min_ratio")
        for name in others:
            self.note(say(name), "without effect", f"{kind} has no such parameter")
        usual = _DECAY_LR if kind == "WarmupDecayLR" else None
        peak, least = self.values.get(say("warmup_max_lr"), usual), self.get(say("warmup_min_lr"))
        ends = self.get("optimizer.params.lr") if peak is None else peak
        if not cosine and least > ends:
            reason = f"expected 0 to {ends:g}, the learning rate at the end of the warm-up"
            self.refuse(say("warmup_min_lr"), reason)
        begins = self.get(say("warmup_min_ratio")) if cosine else least / ends if ends else 0.0
        try:
            schedule = Schedule(
                steps=max(total or 0, warmup),
                warmup=max(2, warmup),
                start=begins,
                shape=self.get(say("warmup_type")),
                decay=_DECAYS[kind],
                floor=self.get(say("cos_min_ratio")) if cosine else begins,
                as_deepspeed=True,
            )
        except ValueError as error:
            raise DeepSpeedError(f"scheduler.params: {error}") from None
        return schedule, None if cosine else peak

    def _optimizer(self, peak: float | None) -> AdamOptions | None:
        say, name = "optimizer.params.{}".format, self._kind("optimizer")
        if name is None:
            return None
        if name == "Adam" and self.get(say("adam_w_mode")):
            name = "AdamW"
            self.note("optimizer.type", "changed", "AdamW: optimizer.params.adam_w_mode is true, its default")
        elif name == "AdamW":
            self.note(say("adam_w_mode"), "without effect", "the optimizer is AdamW in either case")
        decay, betas, rate = (self.get(say(key)) for key in ("weight_decay", "betas", "lr"))
        if self.get(say("torch_adam")) and name == "AdamW":
            self.note(say("torch_adam"), "honoured", KEYS[say("torch_adam")].text)
            if say("weight_decay") not in self.values:
                decay = TORCH_DECAY
                self.note(say("weight_decay"), "changed", f"torch's default, {decay}")
        if len(betas) != 2 or not all(_is_number(beta) and 0 <= beta < 1 for beta in betas):
            self.refuse(say("betas"), "expected two numbers in [0, 1)")
        if peak is not None and peak != rate:
            rate = peak
            self.note(say("lr"), "changed", f"{peak:g}, from scheduler.params.warmup_max_lr")
        return AdamOptions(
            type=cast("Literal['Adam', 'AdamW']", name),
            lr=float(rate),
            betas=(float(betas[0]), float(betas[1])),
            eps=float(self.get(say("eps"))),
            weight_decay=float(decay),
        )

    def _findings(self) -> Iterator[Finding]:
        """Yield, for every key and every empty table of the configuration, how it is treated, in the configuration's
        order.
        """
        for path, value in self.entries.items():
            kind: Kind = "without effect"
            if value is None:
                text = "null counts as missing"
            elif path == LOCO:
                kind, text = "honoured", f"LoCo with its defaults: {self._feedback()}"
            elif path not in KEYS:
                text = "an empty table"
            elif value == AUTO:
                default = "no value" if KEYS[path].default is None else shown(KEYS[path].default)
                kind, text = self.notes.get(
                    path, ("changed", f"counts as missing, so DeepSpeed's default holds: {default}")
                )
            else:
                target = KEYS[(key := KEYS[path]).means or path]
                plain: Kind = "honoured" if target.fate == "honoured" else "without effect"
                kind, text = self.notes.get(target.path, (plain, target.text))
                if key.means:
                    kind, text = "renamed", f"{key.text}: {target.path}: {text}"
            yield Finding(path, value, kind, text)


def _typed(key: Key, value: Any) -> Any:
    """Returns ``value`` converted to the type that ``key`` takes; for example, 5e8 becomes 500000000 if the key takes a
    count.

    Raises DeepSpeedError: if the key does not take the value.
    """
    typed = wrong = object()
    match key.takes, value:
        case ("anything", _) | ("switch", bool()) | ("text", str()) | ("list", list() | tuple()):
            typed = value
        case "count", _ if _is_number(value) and value >= 0 and value == int(value):
            typed = int(value)
        case "number", _ if _is_number(value) and (value >= 0 or key.path == f"{ZERO}.mics_shard_size"):
            typed = value
    if typed is wrong:
        raise DeepSpeedError(f"{key.path} = {shown(value)}: expected {_WANTED[key.takes]}")
    allowed = {word.lower(): word for word in key.allowed}
    if allowed and str(typed).lower() not in allowed:
        raise DeepSpeedError(f"{key.path} = {shown(value)}: expected one of {', '.join(key.allowed)}")
    return allowed[typed.lower()] if allowed and isinstance(typed, str) else typed


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
