"""Suites in TOML become trials.  (Types of one trial; expansion follows.)  No torch."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from impl.policy import PRESETS

PEERS = ("single", "ddp", "fsdp2")
STRATEGIES = (*PEERS, *PRESETS)

_RATE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(kbit|Mbit|Gbit)/s\s*$")
_MBIT = {"kbit": 1e-3, "Mbit": 1.0, "Gbit": 1e3}


def parse_rate(value: object) -> object:
    """``"50 Mbit/s"`` or ``"unshaped"`` to Mbit/s or None.

    Raises:
        ValueError: for a number without a unit or an unknown unit.
    """
    if value is None or value == "unshaped":
        return None
    if isinstance(value, str) and (match := _RATE.match(value)):
        return float(match[1]) * _MBIT[match[2]]
    raise ValueError("a rate is a number with a unit, kbit/s, Mbit/s or Gbit/s, or 'unshaped'")


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


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
        rate: Mbit/s per node and direction; None is unshaped.
        transport: ``shm`` inside a node where it can, or ``gloo`` everywhere; ``nccl`` on GPUs.
    """

    nodes: int = Field(2, ge=1)
    ranks_per_node: int = Field(2, ge=1)
    link: Literal["auto", "namespaces", "paced", "none", "real"] = "auto"
    rate: Annotated[float | None, BeforeValidator(parse_rate)] = None
    device: Literal["cpu", "cuda"] = "cpu"
    transport: Literal["shm", "gloo", "nccl"] = "shm"
    launcher: Literal["local", "torchrun", "slurm"] = "local"


class Optimizer(_Frozen):
    """Any elementwise ``torch.optim`` optimizer, by its class name."""

    name: str = "AdamW"
    arguments: dict[str, float | bool | list[float]] = {"lr": 1e-3}


class PolicyChanges(_Frozen):
    """Fields of ``impl.policy.Policy`` that replace those of the strategy's preset; text forms."""

    weights: str | None = None
    gradients: str | tuple[str, str] | None = None
    gather: Literal["flat", "hierarchical"] | None = None
    reduce: Literal["flat", "one_hop", "two_hop"] | None = None
    secondary: int | Literal["node"] | None = None
    prefetch: int | None = None
    max_padding: float | None = None
    align: int = 1


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
    corpus: str = "stdlib"
    sequence: int = Field(128, ge=1)
    tokens_per_rank: int = Field(512, ge=1)
    accumulation: int = Field(1, ge=1)
    optimizer: Optimizer = Optimizer()
    clip: float | None = None
    steps: int = Field(8, ge=1)
    warmup: int = Field(2, ge=0)
    validate_every: int | None = None
    validation_batches: int = Field(4, ge=1)
    seed: int = 0
    repeat: int = Field(0, ge=0)
    threads: int | None = Field(None, ge=1)
    timeout_seconds: float = Field(600, gt=0)
    measure_quantisation: bool = False

    def canonical(self) -> dict[str, Any]:
        """The trial as JSON-ready data with sorted keys."""
        data: dict[str, Any] = json.loads(self.model_dump_json())
        return data

    @property
    def id(self) -> str:
        """First 12 hex digits of the SHA-256 of the canonical JSON."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]
