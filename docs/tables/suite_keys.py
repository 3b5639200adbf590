"""Generates the tables of ``docs/guide/suites.md``: all keys of a suite file, from the pydantic models that read it."""

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
    f"Each `[[override]]` has the keys {' and '.join(f'`{name}`' for name in Override.model_fields)}. "
    f"A suite may have at most {MOST_TRIALS} trials."
)
_BARE: Final = ("table", "list of tables")  # keys of these types are left out: the page describes them above
_VALUES: Final = {  # descriptions of keys whose type alone does not explain them
    "repeats": "whole number, at least 1; or `until 2 %`, or `until 2 %, at most 30`",
    "on_failure": f"table: for each of {', '.join(f'`{k}`' for k in get_args(Kind))}, one of `skip`, `stop`, "
    "`retry 2` and `retry 2, then stop`",
    "strategy": "[a strategy of our engine](#strategies-of-our-engine), `recipe`, "
    "[a peer](#strategies-that-are-peers), or one of ours [inside a peer](#inside-fsdp2-and-ddp)",
    "peer.compute": "`fp32` or `bf16`: type that a peer computes in; policies have `policy.compute`",
    "deepspeed_config": "for strategies `recipe` and `deepspeed`: a file in the suite's folder, or a table",
    "policy.stage": "0, 1, 2 or 3: which states are sharded",
    "policy.group": "number of ranks that together hold one copy of all states, or `node`; 0: all ranks",
    "policy.secondary": "number of ranks that together hold hpZ's copy, or `node`; 0: no copy",
    "policy.secondary_format": "`frames`: hpZ's copy stays encoded, as it was received; `bf16`, `fp16` or `fp32`: it "
    "is decoded and cast",
    "policy.reduce_every": "`micro_batch`: gradients are reduced after each micro-batch and added up in shards; "
    "`step`: they are added up locally and reduced once a step; `stage`: `step` below stage 2, else `micro_batch`",
    "policy.compute": "`fp32`, `bf16` or `fp16`: type of gathered weights and local gradients; masters stay fp32",
    "policy.loss_scale": "`none`, a number, or `dynamic`, then `:from<scale>`, `:window<steps>`",
    "margin": "by how many steps of training a loss may be worse and still count as equal; 0: 1 % of the baseline's "
    "loss",
    "policy.frozen": "codec in which frozen weights are held and sent, or `none`",
    "policy.prefetch": "elements that are gathered ahead of their use",
    "policy.max_live": "elements gathered at once; beyond this, nothing is gathered ahead or kept",
    "policy.max_reuse": "a unit stays gathered until its backward pass if fewer elements run in between; 0: none "
    "stays",
    "policy.persist_below": "parameters with fewer elements stay gathered, and are never quantised; 0: none stays",
    "policy.persist_most": "limit on the elements that `policy.persist_below` keeps gathered; in model order, "
    "parameters beyond the limit are sharded",
    "policy.largest_unit": "elements of a unit, at most: larger blocks are cut into their parts; 0: no limit",
    "policy.reduce_bucket": "elements of gradients that are being reduced at once, at most",
    "policy.offload_optimizer": "share of trained elements whose masters and optimizer state are in host memory",
    "policy.offload_weights": "share of elements whose encoded shards, and frozen shards, are in host memory",
    "policy.order_every": "backward passes between checks that ranks communicate in the same order; 0: no checks",
    "policy.weights": "codec of weight gathers, or a list of two: inside an hpZ group, then outside",
    "policy.differences": "codec of the differences between weights and hpZ's copy, which are sent instead of "
    "weights; or `none`",
    "policy.refresh": "steps after which weights themselves are sent again instead of differences; 0: never",
    "policy.gradients": "codec of gradients, or a list of two: inside a node, then between nodes",
    "policy.sums": "`fp32`, or `fp16` as in DeepSpeed: type in which decoded gradients are added up",
    "policy.blocks": "`codec`: blocks of the codec's size; `shape`: blocks as DeepSpeed cuts them, from the shapes of "
    "parameters",
    "policy.planes": "2: weights are sent twice, quantised along rows for forward and along columns for backward",
    "policy.feedback": "`none`, `classic` or `loco`, then `:decay<d>`, `:reset<n>`, `:last`, `:all`, `:bf16`",
    "policy.budget": "`none`, or `weights <bits>`, `gradients <bits>` or both, then `every <steps> of <codecs>`",
    "cluster.launcher": "`local`, `torchrun`, `hosts` or `slurm` ([across hosts](cluster.md))",
    "cluster.hosts": "for launcher `hosts`: names of hosts for ssh, beginning with this machine",
    "cluster.slurm": "table of options of the Slurm job: `partition`, `time` in minutes, `account`, ...",
    "cluster.hcas": "InfiniBand adapters that NCCL may use: their number, or a list of names",
    "cluster.rate": "text with kbit/s, Mbit/s or Gbit/s, or `unshaped`",
    "cluster.transport": "`shm`, `gloo`, `nccl`, `staged`, or the `package.module` of a user's backend",
    "cluster.latency": "text with us or ms: added one way to the time of the bytes",
    "model.name": f"{', '.join(MODELS)}, or `module:function`",
    "model.arguments": "table of arguments of the model",
    "optimizer.name": "class of torch.optim, or `module:class`",
    "optimizer.schedule.warmup": "steps of a linear warm-up",
    "optimizer.schedule.start": "share of the learning rate that the warm-up starts from",
    "optimizer.schedule.decay": "`none`, `linear` or `cosine`: from the end of the warm-up to the last step",
    "optimizer.schedule.floor": "share of the learning rate at the last step",
    "tokenizer": "`module:function` that makes tokens of a text; without one, bytes are the tokens",
    "activation_checkpointing": "true: blocks keep only their inputs, and run again in the backward pass",
    "optimizer.arguments": "table of arguments of the optimizer; `lr` below 1000",
    "corpus": "`stdlib`, a text, token files or `module:function`; or `glyphs`, which is the default for models that "
    "read images",
    "sequence": "tokens of a sequence; for images, the number of patches: 1, 4, 16, 64 (the default), 256 or 1024",
    "validate_every": "steps between validations; 0: only after the last step; none: no validation",
    "validation_batches": "batches that each rank reads in a validation",
    "measure_quantisation": "true: in the first repeat, outside the timed steps, measure communication errors and the "
    "errors of a grid of codecs",
    "memory_limit": "text with MiB or GiB",
    "control": "`none`, or a way to train worse on purpose: `stale_secondary`, hpZ's copy is never renewed; "
    "`late_secondary`, it is renewed one step late; `half_batch`, only the first half of each batch is read; "
    "`unordered`, gradients are not reordered before the two hops",
}


def render() -> str:
    """Return the tables in Markdown.  Keys of policies have a table of their own, without a column of defaults."""
    head = ("key", "value", "default")
    rows = [_row(name, field) for name, field in SuiteTables.model_fields.items()]
    top = table(head, (row for row in rows if row[1] not in _BARE))
    fields = [(path, field) for path, field in _leaves(Trial) if path != "repeat"]
    policy = table(head[:2], (_row(*leaf)[:2] for leaf in fields if _of_a_policy(*leaf)))
    trial = table(head, (_row(*leaf) for leaf in fields if not _of_a_policy(*leaf)))
    peers = table(("strategy", "what trains"), ((f"`{name}`", peer.says) for name, peer in PEERS.items()))
    return (
        f"### The top of the file\n\n{top}\n{_OVERRIDE}\n\n### Fields of a trial\n\n{trial}"
        f"\n### Fields of a policy\n\nThe strategy sets the defaults of these fields.\n\n{policy}"
        f"\n### Strategies that are peers\n\n{peers}"
    )


def _of_a_policy(path: str, field: Any) -> bool:
    """Return whether a field changes the strategy's policy, which sets the field's default."""
    return path.startswith("policy.") and field.default is None


def fields_of_a_trial() -> list[str]:
    """Return the dotted paths of all fields of a trial."""
    return [path for path, _ in _leaves(Trial)]


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted path and field of every key that is not itself a table of keys."""
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
        return "required"
    if field.default is None and path == "cluster.rate":
        return "`unshaped`"
    if isinstance(field.default, Repeats):
        return f"`{field.default.least}`"
    return "none" if field.default in (None, {}, []) else f"`{json.dumps(field.default)}`"
