"""One trial, as data: its fields, what they may hold, and what they resolve to.

A :class:`Trial` says everything that defines a run; its id is a hash of its canonical JSON.  How
a suite file in TOML becomes a list of trials is in ``harness.expansion``.  No torch.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from impl.codec import parse
from impl.policy import MOST_CHUNKS, PRESETS, Policy, parse_feedback
from impl.topology import Topology

PEERS: Final = ("single", "ddp", "fsdp2")
STRATEGIES: Final = (*PEERS, *PRESETS)

_RATE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(kbit|Mbit|Gbit)/s\s*$")
_MBIT = {"kbit": 1e-3, "Mbit": 1.0, "Gbit": 1e3}
_RATES: Final = (1e-3, 1e6)  # 1 kbit/s to 1 Tbit/s: nothing outside is a link between nodes
MOST_MICRO_BATCHES: Final = 1_000_000
_LARGEST_LR: Final = 1e3
_CANONICAL: Final = {"canonical": True}  # validation context: rates are plain Mbit/s


def parse_rate(value: object) -> object:
    """``"50 Mbit/s"`` or ``"unshaped"`` to Mbit/s or None.

    Raises:
        ValueError: for a number without a unit, an unknown unit, no rate at all, or one that no link has.
    """
    if value is None or value == "unshaped":
        return None
    if isinstance(value, str) and (match := _RATE.match(value)) and float(match[1]) > 0:
        mbit = float(match[1]) * _MBIT[match[2]]
        if not _RATES[0] <= mbit <= _RATES[1]:
            raise ValueError("expected a rate from 1 kbit/s to 1000 Gbit/s, or 'unshaped'")
        return mbit
    raise ValueError("expected a number above 0 with a unit, kbit/s, Mbit/s or Gbit/s, or 'unshaped'")


def _rate(value: object, info: ValidationInfo) -> object:
    """A rate as people write it; in a trial's canonical JSON it is a number of Mbit/s."""
    if info.context == _CANONICAL:
        return value
    return parse_rate(value)


def suggestion(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'zeropp'?"`` for a word close to a known one, else nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Model(_Frozen):
    """What is trained. ``name`` is a preset of ``harness.workload`` or ``module:function``;
    ``arguments`` override its keyword arguments.
    """

    name: str = "gpt-small"
    arguments: dict[str, int | float | str | bool] = {}


class Cluster(_Frozen):
    """Where ranks stand and what joins their nodes.

    Attributes:
        link: auto, namespaces, paced, none (ranks joined unshaped) or real (nodes are machines).
        rate: Mbit/s per node and direction; None is unshaped.  A real link is as fast as it is:
            its rate is only what predictions reckon with.
        transport: ``shm`` inside a node where it can, or ``gloo`` everywhere; ``nccl`` on GPUs.
    """

    nodes: int = Field(2, ge=1, le=4096)
    ranks_per_node: int = Field(2, ge=1, le=64)
    link: Literal["auto", "namespaces", "paced", "none", "real"] = "auto"
    rate: Annotated[float | None, BeforeValidator(_rate)] = None
    device: Literal["cpu", "cuda"] = "cpu"
    transport: Literal["shm", "gloo", "nccl"] = "shm"
    launcher: Literal["local", "torchrun", "slurm"] = "local"


class Optimizer(_Frozen):
    """Any elementwise ``torch.optim`` optimizer, by its class name.

    The default rate is one at which a small GPT does not overshoot without a warm-up.
    """

    name: str = "AdamW"
    arguments: dict[str, float | bool | list[float]] = {"lr": 3e-4}

    @field_validator("arguments")
    @classmethod
    def _learning_rate(
        cls, value: dict[str, float | bool | list[float]]
    ) -> dict[str, float | bool | list[float]]:
        rate = value.get("lr")
        if isinstance(rate, float | int) and not abs(rate) < _LARGEST_LR:
            raise ValueError(f"lr = {rate:g}: expected less than {_LARGEST_LR:g}")
        return value


class PolicyChanges(_Frozen):
    """Fields of ``impl.policy.Policy`` that replace those of the strategy's preset; text forms."""

    weights: str | None = None
    gradients: str | tuple[str, str] | None = None
    gather: Literal["flat", "hierarchical"] | None = None
    reduce: Literal["ring", "one_hop", "two_hop"] | None = None
    chunks: int | None = Field(None, ge=1, le=MOST_CHUNKS)
    secondary: int | Literal["node"] | None = None
    feedback: str | None = None
    prefetch: int | None = Field(None, ge=0)
    max_padding: float | None = Field(None, ge=0)
    align: int = Field(1, ge=1)

    @field_validator("weights", "gradients")
    @classmethod
    def _codecs(cls, value: str | tuple[str, str] | None) -> str | tuple[str, str] | None:
        for text in (value,) if isinstance(value, str) else value or ():
            parse(text)
        return value

    @field_validator("feedback")
    @classmethod
    def _feedback(cls, value: str | None) -> str | None:
        if value is not None:
            parse_feedback(value)
        return value


class Trial(_Frozen):
    """Everything that defines a run; its id is a hash of its canonical JSON.

    Attributes:
        strategy: a peer (single, ddp, fsdp2) or a preset of ``impl.policy``.
        tokens_per_rank: tokens in one micro-batch of one rank; a multiple of ``sequence``.
        sequence: tokens in a sequence.
        accumulation: micro-batches per optimizer step.
        steps: timed optimizer steps, after ``warmup`` untimed ones.
        validate_every: optimizer steps between validations; 0 validates only at the end,
            None never.
    """

    strategy: str = "zeropp"
    policy: PolicyChanges = PolicyChanges()
    cluster: Cluster = Cluster()
    model: Model = Model()
    corpus: str = Field("stdlib", min_length=1)
    sequence: int = Field(128, ge=1)
    tokens_per_rank: int = Field(512, ge=1)
    accumulation: int = Field(1, ge=1, le=MOST_MICRO_BATCHES)
    optimizer: Optimizer = Optimizer()
    clip: float | None = Field(None, gt=0)
    steps: int = Field(8, ge=1)
    warmup: int = Field(2, ge=0)
    validate_every: int | None = Field(None, ge=0)
    validation_batches: int = Field(4, ge=1)
    seed: int = Field(0, ge=0, lt=2**63)
    repeat: int = Field(0, ge=0)
    threads: int | None = Field(None, ge=1)
    timeout_seconds: float = Field(600, gt=0)
    measure_quantisation: bool = False

    @field_validator("strategy")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in STRATEGIES:
            raise ValueError(f"expected one of {', '.join(STRATEGIES)}{suggestion(value, STRATEGIES)}")
        return value

    def canonical(self) -> dict[str, Any]:
        """The trial as JSON-ready data; ``rate`` is in Mbit/s."""
        data: dict[str, Any] = json.loads(self.model_dump_json())
        return data

    @classmethod
    def from_canonical(cls, data: Mapping[str, Any]) -> Trial:
        """The trial of which ``data`` is the canonical form, as a record holds it.

        Raises:
            pydantic.ValidationError: if it is not one.
        """
        return cls.model_validate(data, context=_CANONICAL)

    @property
    def id(self) -> str:
        """First 12 hex digits of the SHA-256 of the canonical JSON."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def topology(self) -> Topology:
        """Where its ranks stand."""
        return Topology(self.cluster.nodes, self.cluster.ranks_per_node)

    def resolved_policy(self) -> Policy | None:
        """The strategy's preset with this trial's changes; None for a peer, which has no policy.

        A single codec for ``gradients`` is meant for both hops.

        Raises:
            PolicyError: for a combination that no topology could run.
            CodecError: for a codec's text that means nothing.
        """
        if self.strategy in PEERS:
            return None
        base, changes = PRESETS[self.strategy], self.policy
        hops = (changes.gradients,) * 2 if isinstance(changes.gradients, str) else changes.gradients
        memory = base.memory
        if changes.prefetch is not None:
            memory = replace(memory, prefetch=changes.prefetch)
        if changes.max_padding is not None:
            memory = replace(memory, max_padding=changes.max_padding)
        return replace(
            base,
            weights=base.weights if changes.weights is None else parse(changes.weights),
            gradients=base.gradients if hops is None else (parse(hops[0]), parse(hops[1])),
            gather=changes.gather or base.gather,
            reduce=changes.reduce or base.reduce,
            chunks=base.chunks if changes.chunks is None else changes.chunks,
            feedback=base.feedback if changes.feedback is None else parse_feedback(changes.feedback),
            secondary=base.secondary if changes.secondary is None else changes.secondary,
            memory=memory,
            align=changes.align,
        )

    def check(self) -> None:
        """Refuse fields that are fine alone and impossible together.

        Raises:
            ValueError: naming the fields and their values.
        """
        if self.tokens_per_rank % self.sequence:
            raise ValueError(
                f"tokens_per_rank = {self.tokens_per_rank}: expected a multiple of sequence = {self.sequence}"
            )
        cluster = self.cluster
        if cluster.link == "none" and cluster.rate is not None:
            raise ValueError(
                f"cluster.rate = {cluster.rate:g} Mbit/s: with cluster.link = 'none' nothing shapes the "
                "link; expected 'unshaped', or another link"
            )
        if cluster.transport == "nccl" and cluster.device != "cuda":
            raise ValueError("cluster.transport = 'nccl': expected cluster.device = 'cuda' with it")
        policy = self.resolved_policy()
        if policy is not None:
            policy.check(self.topology())
