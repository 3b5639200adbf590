"""Defines a trial as data: its fields, their values, and the policy that they give.  Does not import torch.

A :class:`Trial` is one run, and is defined by its fields alone.  Its id is a hash of its canonical JSON
(:meth:`Trial.canonical`), so that the same trial has the same id in every suite and on every machine.  Fields that were
added after the first version of this project are left out of the canonical JSON if they have their default.  Trials of
older versions therefore keep their ids.

A trial's policy (what its engine sends, holds and computes) is found in two steps.  First the trial's strategy gives a
policy: a preset (:data:`impl.policy.presets.PRESETS`) or, for strategy ``recipe``, the policy that a DeepSpeed
configuration asks for.  Then :class:`PolicyChanges` replaces single fields of this policy.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    create_model,
    field_validator,
    model_serializer,
    model_validator,
)

from harness.errors import suggestion
from harness.suites import folder
from harness.suites.model_sizes import PRESETS as MODELS
from harness.suites.model_sizes import ViTShape
from harness.suites.parse_quantity import CANONICAL, parse_latency, parse_rate, parse_size, text_or_number
from harness.suites.peers import (
    BUCKET_MB,
    PEERS,
    READ_BY,
    Compute,
    Family,
    Group,
    ReduceDtype,
    configuration,
)
from impl.adapters.traffic import HOSTED, Host
from impl.deepspeed.config_to_policy import Recipe, recipe
from impl.deepspeed.keys import load as load_configuration
from impl.named_object import is_name
from impl.plan.learning_rate import Schedule
from impl.plan.owners import MATRICES
from impl.policy.own_method import OwnMethod, method
from impl.policy.policy import SETTINGS, Policy, PolicyError
from impl.policy.presets import PRESETS
from impl.policy.setting import Setting
from impl.policy.spans import VARYING, Span, SpanError, refusal
from impl.policy.topology import Topology

RECIPE: Final = "recipe"  # the strategy whose policy comes from a DeepSpeed configuration
# All strategies that have a name; a strategy of the user's own is given as ``module:Class``.
STRATEGIES: Final = (*PEERS, *HOSTED, *PRESETS, RECIPE)

_LARGEST_LR: Final = 1e3
_LONGEST_SECONDS: Final = 10_000_000  # 116 days; the clock's own limit depends on the system


_FIRST: Final = frozenset((  # fields of the first version; others are left out of canonical JSON if they have defaults
    "strategy", "policy", "cluster", "model", "corpus", "sequence", "tokens_per_rank", "accumulation",
    "optimizer", "clip", "steps", "warmup", "validate_every", "validation_batches", "seed", "repeat",
    "threads", "timeout_seconds", "measure_quantisation", "nodes", "ranks_per_node", "link", "rate", "device",
    "transport", "launcher", "name", "arguments", "weights", "gradients", "gather", "reduce", "chunks",
    "secondary", "feedback", "prefetch", "max_padding", "align",
))  # fmt: skip


class _Frozen(BaseModel):
    """Base class of a trial's parts.  Its objects are immutable, and it refuses unknown fields, infinity and NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def used(self) -> dict[str, Any]:
        """Return the fields as JSON-ready data, by name.

        A field that was added after this project's first version is left out if it has its default, so that the ids
        of older trials, which are hashes of this data, do not change.
        """
        fields, data = type(self).model_fields, self.model_dump(mode="json")
        return {
            name: value
            for name, value in data.items()
            if name in _FIRST or getattr(self, name) != fields[name].default
        }


class Model(_Frozen):
    """A model: the name of a preset or of a user's function (``module:function``), and arguments.

    The arguments replace sizes of the preset, or are passed to the function.
    """

    name: str = "gpt-small"
    arguments: dict[str, int | float | str | bool] = {}

    @field_validator("name")
    @classmethod
    def _known(cls, value: str, info: ValidationInfo) -> str:
        # A record may name a preset of an earlier version.  A user's function is not imported here.
        if value in MODELS or ":" in value or info.context == CANONICAL:
            return value
        known = f"{', '.join(MODELS)} or 'module:function'"
        raise ValueError(f"expected one of {known}{suggestion(value, MODELS)}")


_OwnBackend = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.\w+)+$")]  # package.module
# A host, with or without ``user@`` before it.  Neither host nor user may begin with "-", which ssh would read as an
# option.
_HOST: Final = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?([A-Za-z0-9_][A-Za-z0-9_.-]*)")


def _host(text: str) -> str:
    """Check a host for ssh, and return it without the brackets around an IPv6 address.

    A host is a name or an address, with or without ``user@`` before it.  Raises a ValueError for any other text.
    """
    user, at, name = text.rpartition("@")
    address = name.removeprefix("[").removesuffix("]") if name.startswith("[") == name.endswith("]") else name
    plain = f"{user}{at}{address}"
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(address).version == 6 and _HOST.fullmatch(f"{user}{at}host"):
            return plain
    if _HOST.fullmatch(text) is None:
        examples = '"node1", "me@node1", "10.0.0.1", "fd00::1" or "fe80::1%eth0"'
        raise ValueError(f"expected a host name or address for ssh, such as {examples}")
    return text


_Host = Annotated[str, AfterValidator(_host)]
_Hca = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]


class Cluster(_Frozen):
    """Where a trial's ranks run, and the link between nodes; docs/guide/suites.md explains each field.

    Rates are in Mbit/s for each node and direction, and latency is in ms.
    """

    nodes: int = Field(2, ge=1, le=4096)
    ranks_per_node: int = Field(2, ge=1, le=64)
    link: Literal["auto", "namespaces", "paced", "none", "real", "shaped"] = "auto"
    rate: Annotated[float | None, text_or_number(parse_rate)] = None
    latency: Annotated[float | None, text_or_number(parse_latency)] = None
    slow: float = Field(1.0, gt=0, le=1)
    inner_rate: Annotated[float | None, text_or_number(parse_rate)] = None
    hcas: (
        Annotated[int, Field(ge=1, strict=True)] | Annotated[tuple[_Hca, ...], Field(min_length=1)] | None
    ) = None
    device: Literal["cpu", "cuda"] = "cpu"
    transport: Literal["shm", "gloo", "nccl", "staged"] | _OwnBackend = "shm"
    launcher: Literal["local", "torchrun", "hosts", "slurm"] = "local"
    hosts: tuple[_Host, ...] = ()
    ranks: Literal["processes", "threads"] = "processes"
    slurm: dict[Annotated[str, Field(pattern=r"^[a-z_]+$")], int | str | bool] = {}


class LearningRates(_Frozen):
    """Schedule of the learning rate over all steps of a trial: a warm-up, and then a decay.

    The fields have the meaning that :class:`impl.plan.learning_rate.Schedule` gives them.
    """

    warmup: int = Field(0, ge=0)
    start: float = Field(0.0, ge=0, le=1)
    decay: Literal["none", "linear", "cosine"] = "none"
    floor: float = Field(0.0, ge=0, le=1)


# The optimizer that needs whole matrices.  The update of each matrix is computed on one rank, the matrix's owner.
MUON: Final = "Muon"


class Optimizer(_Frozen):
    """An optimizer: ``Muon``, the name of an elementwise class of ``torch.optim``, or a user's ``module:class``.

    An elementwise optimizer, such as AdamW, computes the update of each element from this element alone.  Muon updates
    some of the parameters, and AdamW updates all others.  If ``matrices`` is a pattern, Muon updates the parameters
    whose names match the pattern; otherwise Muon updates the matrices in the model's blocks.  With Muon, ``arguments``
    may have a table ``adamw``, which holds AdamW's arguments.
    """

    name: str = "AdamW"
    arguments: dict[
        str,
        float
        | bool
        | list[float]
        | Literal["original", "match_rms_adamw"]
        | dict[str, float | bool | list[float]],
    ] = {"lr": 3e-4}
    matrices: str = Field("", pattern=r"^[\w.*?\[\]!-]*$")
    schedule: LearningRates = LearningRates()

    @field_validator("arguments")
    @classmethod
    def _learning_rate(cls, value: dict[str, Any]) -> dict[str, Any]:
        adamw = value.get("adamw")
        for name, rate in (
            ("lr", value.get("lr")),
            ("adamw.lr", adamw.get("lr") if isinstance(adamw, dict) else 0),
        ):
            if isinstance(rate, float | int) and not abs(rate) < _LARGEST_LR:
                raise ValueError(f"{name} = {rate:g}: expected an absolute value less than {_LARGEST_LR:g}")
        return value

    @property
    def orthogonalises(self) -> bool:
        """Whether the optimizer is Muon, which orthogonalises the update of each matrix."""
        return self.name == MUON

    def group(self, name: str, shape: Sequence[int], *, hidden: bool) -> int:
        """Return the number of a parameter's optimizer group: ``MATRICES`` if Muon updates the parameter, else 0.

        Args:
            name: The parameter's name.
            shape: The parameter's shape.
            hidden: Whether the parameter belongs to one of the model's repeated blocks, and is not an embedding.
        """
        chosen = fnmatchcase(name, self.matrices) if self.matrices else hidden and len(shape) == 2
        return MATRICES if self.orthogonalises and chosen else 0


# The name of a user's own class, ``module:Class``.  The class is not imported here.
OwnClass = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]


_SETTINGS: Final = {each.key: each for each in SETTINGS if each.says}
_PLACES: Final = {name: place for place, name in enumerate(_SETTINGS)} | {
    "budget": [*_SETTINGS].index("planes")
}
KEYS: Final = {name: _SETTINGS[name] for name in sorted(_SETTINGS, key=_PLACES.__getitem__)}
"""The settings of a policy that a suite may give, by key after ``policy.``, in the order in which pages list them."""


def _key(each: Setting) -> tuple[Any, Any]:
    """Return the type and the pydantic field that validate a suite's value of one ``policy.*`` key.

    ``each`` describes the key.  If a suite does not set the key, the field has its default.  The default of most keys
    is None, and None leaves the strategy's value as it is.  Codecs, users' classes and other objects of a policy are
    written as text in a suite, so the type of their keys is ``str``.  Keys that may have two codecs, such as
    ``weights``, also take a pair of texts.
    """
    kinds = get_args(each.kind) if get_origin(each.kind) in (Union, UnionType) else (each.kind,)
    if each.read is not None:
        kinds = (str, tuple[str, str]) if each.pair else (str,)
    kinds = tuple(OwnClass if kind is OwnMethod else kind for kind in kinds)
    kind = functools.reduce(operator.or_, kinds if each.unset is not None else (*kinds, None))
    if each.or_none:
        kind = Annotated[kind, BeforeValidator(lambda value: None if value == "none" else value)]
    return kind, Field(each.unset, ge=each.least, le=each.most)


_FIELDS: Any = {name: _key(each) for name, each in KEYS.items()}
_Keys: Any = create_model("_Keys", __base__=_Frozen, **_FIELDS)
_Varying: Any = create_model(
    "_Varying", __base__=_Frozen, **{name: _FIELDS[name] for name in VARYING if name in KEYS}
)


def _as_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the ``policy.*`` keys of a suite to fields of a policy, with their values parsed.

    ``given`` has the suite's values by key; its keys lack the beginning ``policy.``.

    The key ``weights`` may be a pair of texts, such as ``("int4:256", "int8:256")``.  The first is the codec for
    messages inside hpZ's groups, and becomes the field ``inside``.  The second is the codec for all other messages, and
    becomes the field ``weights``.  If both texts are equal, ``inside`` is None.
    """
    values = {name: KEYS[name].parsed(value) for name, value in given.items()}
    # A pair has the codec for messages inside hpZ's groups, then the codec for all other messages.
    if isinstance(texts := given.get("weights"), tuple):
        inside, values["weights"] = values["weights"]
        values["inside"] = None if texts[0] == texts[1] else inside
    return values


class SpanChanges(_Varying):
    """A span of ``policy.schedule``: consecutive steps of a run in which some policy fields have other values.

    ``until`` says where the span ends: a number of steps, a share of the run such as ``"50 %"``, or None for the end of
    the run.  With ``every`` = 2, the other values hold only in the first, third, fifth step of the span and so on.

    Each further field has the name of a policy field, and holds its value in the span.  None keeps the policy's value.
    Codecs and other objects are given as text, such as ``int8:256``.
    """

    until: Annotated[int, Field(strict=True)] | str | None = None
    every: int = Field(1, ge=1)

    # Unknown fields are allowed here, and refused by _may_change(), whose message says more than pydantic's.  A
    # validator of mode "before" is no alternative: pydantic would then turn the JSON into Python objects first, and in
    # strict mode it refuses a Python list where a tuple is expected.
    model_config = ConfigDict(extra="allow")

    @field_validator("until")
    @classmethod
    def _ends(cls, value: int | str | None) -> int | str | None:
        """Check where a span ends: after a number of steps such as 20, at a share such as ``"50 %"``, or None.

        None is the end of the run.  Returns the value unchanged.
        """
        Span(until=value)
        return value

    @model_validator(mode="after")
    def _may_change(self) -> Self:
        """Raise a ValueError if a span of a schedule sets a field that a span cannot set.

        The field is either misspelt, or a ``policy.*`` key that must not change during a run.
        """
        for name in self.model_extra or {}:
            if name in PolicyChanges.model_fields:
                raise ValueError(refusal(name))
            near = suggestion(name, type(self).model_fields)
            raise ValueError(f"a span has no field {name!r}{near}")
        return self

    @field_validator(*(name for name in VARYING if name in KEYS and KEYS[name].read is not None))
    @classmethod
    def _means_something(cls, value: Any, info: ValidationInfo) -> Any:
        return _checked(value, info)

    @model_serializer(mode="wrap")
    def _only_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return this span as JSON-ready data, without the fields that have their default.

        A field that a later version adds therefore does not change the ids of existing trials.
        """
        fields = type(self).model_fields
        return {
            name: value for name, value in dump(self).items() if getattr(self, name) != fields[name].default
        }

    def span(self) -> Span:
        """Convert this span to :class:`impl.policy.spans.Span`, with its texts, such as ``int8:256``, parsed."""
        given = {name: value for name, value in self if value is not None and name not in ("until", "every")}
        return Span(until=self.until, every=self.every, **_as_fields(given))


def _checked(value: Any, info: ValidationInfo) -> Any:
    """Check that the text of a ``policy.*`` key, or each text of a pair, can be parsed; return the value unchanged."""
    if value is not None:
        KEYS[str(info.field_name)].parsed(value)
    return value


class PolicyChanges(_Keys):
    """Values that replace fields of the strategy's policy, and of its parts ``MemoryLimits`` and ``Offload``.

    A field that is None keeps the strategy's value.  Codecs and other objects are given as text, such as ``int8:256``.
    """

    schedule: tuple[SpanChanges, ...] | None = None

    if TYPE_CHECKING:  # the fields are those of KEYS

        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    @field_validator(*(name for name, each in KEYS.items() if each.read is not None))
    @classmethod
    def _means_something(cls, value: Any, info: ValidationInfo) -> Any:
        return _checked(value, info)

    @field_validator("schedule")
    @classmethod
    def _some(cls, value: tuple[SpanChanges, ...] | None) -> tuple[SpanChanges, ...] | None:
        """Replace the empty schedule ``[]`` by None, which means no schedule.

        A suite that compares schedules writes ``[]`` for the configuration without a schedule.
        """
        return value or None

    @field_validator("secondary_format")
    @classmethod
    def _usual(cls, value: str | None) -> str | None:
        """Replace ``secondary_format = "frames"``, the default, by None.

        A trial then has the same id whether or not it sets the default.
        """
        return None if value == "frames" else value

    def applied(
        self,
        base: Policy,
        arguments: Mapping[str, Any] | None = None,
        gather_arguments: Mapping[str, Any] | None = None,
    ) -> Policy:
        """Return a copy of a policy, changed by these values.  A value of None leaves the policy's field as it is.

        Args:
            base: The policy.
            arguments: Arguments of the user's class that ``reduce`` names.
            gather_arguments: Arguments of the user's class that ``gather`` names.

        Raises:
            PolicyError: If no topology could run the resulting policy.
        """
        values = _as_fields({name: value for name, value in self if value is not None and name != "schedule"})
        if ":" in (self.reduce or ""):
            values["reduce"] = method(str(self.reduce), **(arguments or {}))
        if ":" in (self.gather or ""):
            values["gather"] = method(str(self.gather), **(gather_arguments or {}))
        if self.schedule:
            try:
                values["schedule"] = tuple(span.span() for span in self.schedule)
            except SpanError as error:
                raise PolicyError(str(error)) from None
        for part in ("memory", "offload"):
            keys = [key for key, each in KEYS.items() if each.part == part and key in values]
            values[part] = replace(getattr(base, part), **{KEYS[key].name: values.pop(key) for key in keys})
        return replace(base, **values)


def following_model(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a trial's fields; if the model is a preset for images, add the defaults that images need.

    The defaults are ``corpus`` = ``glyphs`` and ``sequence`` = 64, the number of patches into which an image is cut.  A
    value that ``fields`` already has is kept.
    """
    model = fields.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    images = isinstance(MODELS.get(str(name)), ViTShape)
    return {"corpus": "glyphs", "sequence": 64, **fields} if images else fields


class Generate(_Frozen):
    """Lengths of prompts and continuations, for workloads that decode."""

    prompt: int = Field(32, ge=1)  # tokens of a prompt, which is read from the corpus
    tokens: int = Field(32, ge=2)  # tokens that are decoded after the prompt


class Reinforcement(_Frozen):
    """Settings of workload ``rlhf``, which trains with GRPO (:mod:`harness.workloads.reinforcement`)."""

    group: int = Field(4, ge=2)  # continuations of one prompt; their rewards are compared with each other
    kl: float = Field(0.04, ge=0)  # weight of the KL divergence from the frozen reference model


def configuration_text(value: Any) -> Any:
    """Return a DeepSpeed configuration as JSON text.

    ``value`` may be a table, the path of a file, or the text of a configuration in JSON or HJSON.  Text in JSON is
    returned as it is.  A value of any other type is also returned as it is, for pydantic to refuse.
    """
    if isinstance(value, str) and not value.startswith("{"):
        value = load_configuration(folder.path_of(value))
    elif isinstance(value, str) and not _is_json(value):
        value = load_configuration(value)
    return json.dumps(value) if isinstance(value, Mapping) else value


def _is_json(text: str) -> bool:
    """Return whether a configuration's text is valid JSON; DeepSpeed also reads HJSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class PeerSettings(_Frozen):
    """Settings of a peer: a single process, DDP, FSDP2 or DeepSpeed, as the library ships it.

    A peer trains with the library's own engine and messages, and without this project's engine.
    """

    compute: Compute = "fp32"  # type of weights and activations; the optimizer updates fp32 masters
    reduce_dtype: ReduceDtype = "compute"  # FSDP2: type in which gradients are reduced
    group: Group = (
        "all"  # FSDP2: ranks that share one copy of the states; with "node", nodes are replicas (HSDP)
    )
    bucket_mb: float = Field(BUCKET_MB, gt=0)  # DDP: largest bucket of gradients, in MB

    def read_by(self, family: Family) -> PeerSettings:
        """Return a copy of these settings, with defaults for the settings that a library does not read.

        Trials that differ only in such settings become equal, and then run only once.  ``reduce_dtype`` also gets its
        default if ``compute`` is fp32, since gradients are then always reduced in fp32.

        Args:
            family: The library, such as ``ddp``.
        """
        unread = {name for name, families in READ_BY.items() if family not in families}
        unread |= {"reduce_dtype"} if self.compute == "fp32" else set()  # gradients are fp32 then in any case
        return self.model_copy(update={name: getattr(PeerSettings(), name) for name in unread})


class Trial(_Frozen):
    """All fields that define one run; docs/guide/suites.md explains each."""

    workload: Literal["train", "generate", "rlhf"] = "train"
    generate: Generate = Generate()
    rlhf: Reinforcement = Reinforcement()
    strategy: str = "zeropp"
    policy: PolicyChanges = PolicyChanges()
    method: dict[str, bool | int | float | str | list[bool | int | float | str]] = {}
    gather_method: dict[str, bool | int | float | str | list[bool | int | float | str]] = {}
    peer: PeerSettings = PeerSettings()
    deepspeed_config: Annotated[str | None, BeforeValidator(configuration_text)] = None
    cluster: Cluster = Cluster()
    model: Model = Model()
    corpus: str = Field("stdlib", min_length=1)
    tokenizer: str | None = None
    activation_checkpointing: bool = False
    sequence: int = Field(128, ge=1)
    tokens_per_rank: int = Field(512, ge=1)
    accumulation: int = Field(1, ge=1, le=1_000_000)
    optimizer: Optimizer = Optimizer()
    clip: float | None = Field(None, gt=0)
    steps: int = Field(8, ge=1)
    warmup: int = Field(2, ge=0)
    validate_every: int | None = Field(None, ge=0)
    validation_batches: int = Field(4, ge=1)
    seed: int = Field(0, ge=0, lt=2**63)
    repeat: int = Field(0, ge=0)
    threads: int | None = Field(None, ge=1)
    timeout_seconds: float = Field(600, gt=0, le=_LONGEST_SECONDS)
    measure_quantisation: bool = False
    memory_limit: Annotated[int | None, text_or_number(parse_size)] = None
    control: (
        Literal["stale_secondary", "late_secondary", "half_batch", "unordered", "late_schedule"] | None
    ) = None

    @field_validator("strategy")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in STRATEGIES and not is_name(value):
            known = f"{', '.join(STRATEGIES)}, or 'module:Class'"
            raise ValueError(f"expected one of {known}{suggestion(value, STRATEGIES)}")
        return value

    @field_validator("control", "tokenizer", mode="before")
    @classmethod
    def _none(cls, value: object) -> object:
        """Turn the text ``"none"`` into None.

        Suites are written in TOML, which has no value for None.  A suite that compares trials with and without a
        tokenizer, for example, therefore writes ``"none"`` for the trials without.
        """
        return None if value == "none" else value

    @field_validator("method", "gather_method")
    @classmethod
    def _given(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Leave out arguments whose value is the text ``"none"``.

        A suite with several classes gives ``"none"`` to a class that does not take the argument.
        """
        return {name: argument for name, argument in value.items() if argument != "none"}

    def canonical(self) -> dict[str, Any]:
        """Return the trial as JSON-ready data, whose hash is the trial's id.

        Rates are in Mbit/s, ``latency`` is in ms and ``memory_limit`` in bytes.  These fields are left out:

        - fields that were added after the first version and have their default, so that older trials keep their ids;
        - the names of hosts, and Slurm's options;
        - ``generate`` and ``rlhf`` with workloads that do not use them;
        - a policy field that is set to the value that the strategy's preset has anyway.  Only fields with
          :attr:`impl.policy.setting.Setting.implied` are left out for this reason.
        """
        data = self.used()
        parts = ("cluster", "optimizer", "policy", *(("peer",) if "peer" in data else ()))
        data |= {part: getattr(self, part).used() for part in parts}
        for part, is_used in (("generate", self.workload != "train"), ("rlhf", self.workload == "rlhf")):
            data.pop(part, None)
            data |= {part: getattr(self, part).model_dump(mode="json")} if is_used else {}
        for name in ("hosts", "slurm"):  # which machines are used is no part of the question
            data["cluster"].pop(name, None)
        for name, each in KEYS.items():
            if each.implied and data["policy"].get(name) == getattr(PRESETS.get(self.strategy), name, None):
                data["policy"].pop(name, None)
        return data

    @classmethod
    def from_canonical(cls, data: Mapping[str, Any]) -> Trial:
        """Return the trial that ``data`` describes, which is JSON-ready data as :meth:`canonical` returns it.

        Raises:
            ValidationError: If ``data`` does not describe a trial.
        """
        return cls.model_validate(data, context=CANONICAL)

    @property
    def id(self) -> str:
        """The first 12 hex digits of the canonical JSON's SHA-256."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def topology(self) -> Topology:
        """Return the trial's nodes and ranks per node."""
        return Topology(self.cluster.nodes, self.cluster.ranks_per_node)

    @property
    def measures_time(self) -> bool:
        """Whether the trial's seconds are measured.

        False if ranks are threads: threads take turns, so that their seconds mean nothing.
        """
        return self.cluster.ranks == "processes"

    @property
    def slowest_mbit(self) -> float | None:
        """Rate of the slowest node's link in Mbit/s; None if the link has no rate."""
        return None if self.cluster.rate is None else self.cluster.rate * self.cluster.slow

    @property
    def host(self) -> Host | None:
        """The engine of torch, ``fsdp2`` or ``ddp``, inside which the policy runs.  None without such an engine.

        Inside such a host engine, this project sends the messages.  The value is None if this project's own engine runs
        the policy.  It is also None for peers, which have no policy and send their own messages.
        """
        return HOSTED[self.strategy][0] if self.strategy in HOSTED else None

    def base_policy(self) -> Policy | None:
        """Return the strategy's policy without this trial's changes.

        Returns None for a peer (:class:`PeerSettings`), which has no policy.

        Raises:
            ValueError: For strategy ``recipe``, if the trial has no DeepSpeed configuration.
        """
        if self.strategy in PEERS:
            return None
        if self.strategy == RECIPE:
            return self.recipe().policy
        if self.own_strategy:  # its policy is ZeRO-3's with the suite's changes
            return PRESETS["zero3"]
        return HOSTED[self.strategy][1] if self.strategy in HOSTED else PRESETS[self.strategy]

    def recipe(self) -> Recipe:
        """Return the policy, optimizer, schedule and batch that the trial's DeepSpeed configuration asks for.

        Raises:
            ValueError: If the trial has no DeepSpeed configuration.
        """
        if self.deepspeed_config is None:
            raise ValueError(f"strategy = {RECIPE!r}: needs deepspeed_config; set it to a file or a table")
        return recipe(self.deepspeed_config, topology=self.topology(), steps=self.warmup + self.steps)

    def schedule(self) -> Schedule | None:
        """Return the learning-rate schedule.  Returns None if the learning rate is constant.

        Raises:
            ValueError: If the warm-up of the learning rate has more steps than the whole trial, that is, the trial's
                own warm-up steps and its timed steps together.  For strategy ``recipe`` also if the trial has neither a
                schedule nor a DeepSpeed configuration.
        """
        rates, total = self.optimizer.schedule, self.warmup + self.steps
        if rates != LearningRates():
            if (warmup := rates.warmup) > total:
                raise ValueError(
                    f"optimizer.schedule.warmup = {warmup}: the trial has {total} steps in all; set at most {total}"
                )
            return Schedule(steps=total, **rates.model_dump())
        return self.recipe().schedule if self.strategy == RECIPE else None

    def peer_configuration(self) -> dict[str, Any]:
        """Return the DeepSpeed configuration of a trial whose strategy is DeepSpeed as a peer.

        The result has no batch sizes and no data types; :func:`harness.strategies.deepspeed.configuration` adds them.
        """
        table = None if self.deepspeed_config is None else json.loads(self.deepspeed_config)
        return configuration(PEERS[self.strategy], self.cluster.ranks_per_node, table)

    @property
    def own_method(self) -> OwnMethod | None:
        """The user's class that reduces gradients, with its arguments.  None if the trial names no such class.

        The arguments are the suite's ``method.*``.  If the strategy is a user's class too, these arguments go to the
        strategy instead, and the class that reduces gradients gets none.
        """
        named = self.policy.reduce if self.strategy not in PEERS else None
        arguments = {} if self.own_strategy else self.method
        return method(named, **arguments) if named is not None and ":" in named else None

    @property
    def own_gather(self) -> OwnMethod | None:
        """The user's class that gathers weights, with its arguments.  None if the trial names no such class.

        The arguments are the suite's ``gather_method.*``.
        """
        named = self.policy.gather if self.strategy not in PEERS else None
        return method(named, **self.gather_method) if named is not None and ":" in named else None

    @property
    def own_strategy(self) -> bool:
        """Whether the strategy is a user's class, ``module:Class``."""
        return ":" in self.strategy

    @property
    def changes(self) -> dict[str, Any]:
        """The policy fields that the trial changes, with their values."""
        return self.policy.model_dump(exclude_defaults=True)

    def resolved_policy(self) -> Policy | None:
        """Return the policy with which the trial trains: the strategy's policy with this trial's changes.

        Returns None for a peer (:class:`PeerSettings`), which has no policy.  If the policy has a schedule (spans of
        steps in which its fields have other values), the ends of spans that are given in percent are converted to
        steps.  All steps of the trial count, warm-up included: with 10 warm-up steps and 90 timed steps, ``"50 %"``
        becomes 50.

        Raises:
            PolicyError: If no topology could run the policy, or if its schedule does not fit the trial's steps.
        """
        base = self.base_policy()
        if base is None:
            return None
        arguments = {} if self.own_strategy else self.method
        policy = self.policy.applied(base, arguments, self.gather_method)
        return policy.for_steps(self.warmup + self.steps) if policy.schedule else policy
