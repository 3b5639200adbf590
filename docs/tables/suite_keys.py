"""Tables of ``docs/guide/suites.md``: the keys of a suite file, from the pydantic models that read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel

from docs.tables.markdown import table
from harness.suites.expand_suite import MOST_TRIALS
from harness.suites.model_sizes import PRESETS as MODELS
from harness.suites.peers import PEERS
from harness.suites.repeat_order import Repeats
from harness.suites.suite import Kind, Override, SuiteTables
from harness.suites.trial import Trial

_TYPES: Final = {int: "whole number", float: "number", str: "text", bool: "true or false", dict: "table"}
_OVERRIDE: Final = (
    f"`[[override]]` has {' and '.join(f'`{name}`' for name in Override.model_fields)}. "
    f"A suite has at most {MOST_TRIALS} trials."
)
_BARE: Final = ("table", "list of tables")  # types of keys that the page describes above the tables
_VALUES: Final = {  # what the type does not say
    "repeats": "whole number, at least 1; or `until 2 %`, or `until 2 %, at most 30`",
    "on_failure": f"table: for any of {', '.join(f'`{k}`' for k in get_args(Kind))}, `skip`, `stop`, "
    "`retry 2`, or `retry 2, then stop`",
    "strategy": "[ours](#strategies-of-our-engine), `recipe`, [a peer](#strategies-that-are-peers), or ours "
    "[inside one](#inside-fsdp2-and-ddp)",
    "peer.compute": "`fp32`, `bf16`: of peers; policies have `policy.compute`",
    "deepspeed_config": "of strategy `recipe` or `deepspeed`: a file beside the suite, or a table",
    "policy.stage": "0, 1, 2 or 3: what is sharded",
    "policy.group": "ranks that share one copy of all states, 0 for all, or `node`",
    "policy.secondary": "ranks that share hpZ's copy, 0 for none, or `node`",
    "policy.secondary_format": "hpZ's copy kept as `frames` that came, or cast to `bf16`, `fp16` or `fp32`",
    "policy.reduce_every": "`micro_batch` adds up in shards, `step` locally; `stage`: as it holds",
    "policy.compute": "`fp32`, `bf16`, `fp16`: of gathered weights and local gradients; masters stay fp32",
    "policy.loss_scale": "`none`, a number, or `dynamic`, then `:from<scale>`, `:window<steps>`",
    "margin": "steps of training that a loss may be worse by; 0: 1 % of the baseline's loss",
    "policy.frozen": "codec in which weights that are not trained are held and sent, or `none`",
    "policy.prefetch": "elements gathered ahead of their use",
    "policy.max_live": "elements gathered at once: beyond, nothing is gathered ahead or kept",
    "policy.max_reuse": "units stay gathered until backward if fewer elements run in between; 0: none",
    "policy.persist_below": "parameters of fewer elements stay gathered, and are never quantised; 0: none",
    "policy.persist_most": "elements that stay gathered so in all; the others, in model order, do not",
    "policy.largest_unit": "elements of a unit: larger blocks are cut into their parts; 0: any",
    "policy.reduce_bucket": "elements of gradients under way at once",
    "policy.offload_optimizer": "share of trained elements whose masters and optimizer state the host holds",
    "policy.offload_weights": "share of elements whose frames, and frozen shards, the host holds",
    "policy.order_every": "backward passes between checks of the order of messages; 0: never",
    "policy.weights": "codec, or a list of two: inside an hpZ group, before it",
    "policy.differences": "codec of what weights differ from hpZ's copy by, sent in their place; or `none`",
    "policy.refresh": "steps after which weights themselves are sent again; 0: never",
    "policy.gradients": "codec, or a list of two: inside a node, between nodes",
    "policy.sums": "`fp32`, or `fp16` as DeepSpeed",
    "policy.blocks": "`codec`, or `shape`: DeepSpeed's",
    "policy.planes": "2: weights by rows, and by columns",
    "policy.feedback": "`none`, `classic` or `loco`, then `:decay<d>`, `:reset<n>`, `:last`, `:all`, `:bf16`",
    "policy.budget": "`none`, or `weights <bits>`, `gradients <bits>` or both, `every <steps> of <codecs>`",
    "cluster.launcher": "`local`, `torchrun`, `hosts`, `slurm` ([across hosts](cluster.md))",
    "cluster.hosts": "names for ssh, the first of this machine; of launcher `hosts`",
    "cluster.slurm": "table of the allocation's options: `partition`, `time` in minutes, `account`, ...",
    "cluster.hcas": "InfiniBand adapters that NCCL may use: how many, or a list of names",
    "cluster.rate": "text with kbit/s, Mbit/s or Gbit/s, or `unshaped`",
    "cluster.transport": "`shm`, `gloo`, `nccl`, `staged`, or `package.module`, which gives a backend",
    "cluster.latency": "text with us or ms: one way, beside the time for the bytes",
    "model.name": f"{', '.join(MODELS)}, or `module:function`",
    "model.arguments": "table: arguments of the model",
    "optimizer.name": "class of torch.optim, or `module:class`",
    "optimizer.schedule.warmup": "steps of a linear warm-up",
    "optimizer.schedule.start": "share of the rate that the warm-up begins above",
    "optimizer.schedule.decay": "`none`, `linear`, `cosine`: after the warm-up, until the last step",
    "optimizer.schedule.floor": "share of the rate at the last step",
    "tokenizer": "`module:function` that makes tokens of a text; without one bytes are tokens",
    "activation_checkpointing": "true: blocks keep their inputs alone, and run again in the backward pass",
    "optimizer.arguments": "table: its arguments; `lr` below 1000",
    "corpus": "`stdlib`, a text, token files or `module:function`; `glyphs` with a model that reads images, "
    "and there the default",
    "sequence": "tokens; of an image, patches: 1, 4, 16, 64 (the default), 256 or 1024",
    "validate_every": "steps between validations; 0: one, after the last step; none: no validation",
    "validation_batches": "batches of each rank in a validation",
    "measure_quantisation": "true: measure errors of what is sent, untimed, in the first repeat; try codecs",
    "memory_limit": "text with MiB or GiB",
    "control": "`none`, or what trains worse: `stale_secondary`, hpZ's copy is never renewed; "
    "`late_secondary`, it is renewed one step late; `half_batch`, of each batch the first half; `unordered`, "
    "gradients are not reordered before the two hops",
}


def render() -> str:
    """The tables, in Markdown; policies stand apart, since their defaults are the strategy's."""
    head = ("key", "value", "default")
    rows = [_row(name, field) for name, field in SuiteTables.model_fields.items()]
    top = table(head, (row for row in rows if row[1] not in _BARE))
    fields = [(path, field) for path, field in _leaves(Trial) if path != "repeat"]
    policy = table(head[:2], (_row(*leaf)[:2] for leaf in fields if _of_a_policy(*leaf)))
    trial = table(head, (_row(*leaf) for leaf in fields if not _of_a_policy(*leaf)))
    peers = table(("strategy", "what trains"), ((f"`{name}`", peer.says) for name, peer in PEERS.items()))
    return (
        f"### The top of the file\n\n{top}\n{_OVERRIDE}\n\n### Fields of a trial\n\n{trial}"
        f"\n### Fields of a policy\n\nThe default is the strategy's.\n\n{policy}"
        f"\n### Strategies that are peers\n\n{peers}"
    )


def _of_a_policy(path: str, field: Any) -> bool:
    return path.startswith("policy.") and field.default is None


def fields_of_a_trial() -> list[str]:
    """Dotted paths of all fields of a trial."""
    return [path for path, _ in _leaves(Trial)]


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _row(path: str, field: Any) -> tuple[str, str, str]:
    limits = [
        f"{sign} {bound}"
        for limit in field.metadata
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if (bound := getattr(limit, name, None)) is not None and (sign, bound) != ("≥", 0)
    ]
    value = ", ".join([_VALUES.get(path) or _type(field.annotation), *limits])
    return f"`{path}`", value, _default(path, field)


def _type(annotation: Any) -> str:
    if annotation in _TYPES:
        return _TYPES[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    origin, parts = get_origin(annotation), [part for part in get_args(annotation) if part is not type(None)]
    if origin in (dict, list):
        return "table" if origin is dict else "list of tables"
    if all(isinstance(part, str) for part in parts):
        return ", ".join(f"`{part}`" for part in parts)
    return " or ".join(_type(part) for part in parts)


def _default(path: str, field: Any) -> str:
    if field.is_required():
        return "must be said"
    if field.default is None and path == "cluster.rate":
        return "`unshaped`"
    if isinstance(field.default, Repeats):
        return f"`{field.default.least}`"
    return "none" if field.default in (None, {}, []) else f"`{json.dumps(field.default)}`"
