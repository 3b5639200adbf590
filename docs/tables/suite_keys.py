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
from harness.suites.trial import KEYS, Trial
from impl.policy.presets import PRESETS

_TYPES: Final = {int: "whole number", float: "number", str: "text", bool: "true or false", dict: "table"}
_OVERRIDE: Final = (
    f"`[[override]]` has {' and '.join(f'`{name}`' for name in Override.model_fields)}. "
    f"A suite has at most {MOST_TRIALS} trials."
)
_USUAL: Final = "zero3"  # the strategy whose policy has the defaults that the table of policy keys shows
_NO_LIMIT: Final = 2**63 - 1
_DEFAULTS: Final = (
    f"The default is the strategy's. The table has the defaults of `{_USUAL}`; "
    "[other strategies](#strategies-of-our-engine) differ from it in the fields that their descriptions name."
)
_BARE: Final = ("table", "list of tables")  # keys of these types are described above the tables
_PAIRS: Final = "two units are gathered ahead by one call"
# What values a key takes, in more detail than its type.  Limits are inserted before the first colon of the text.
_VALUES: Final = {
    "name": "text: name of the suite and of its results folder",
    "question": "text: heading of the report page",
    "time": "text: how long the suite takes, as its author says",
    "workload": "`train`, `generate`, `rlhf`: [what a step is](#generation-and-rlhf)",
    "generate.prompt": "whole number: tokens that a generation starts from",
    "generate.tokens": "whole number: tokens that a generation decodes",
    "rlhf.group": "whole number: sampled continuations of each prompt",
    "rlhf.kl": "number: weight of the distance from the reference model",
    "cluster.nodes": "whole number: nodes",
    "cluster.ranks_per_node": "whole number: ranks of each node",
    "cluster.link": "`auto`; on one machine `namespaces`, `paced`, `none`; [between hosts]"
    "(cluster.md#limiting-the-network-between-hosts) `real`, `shaped`, `paced`",
    "cluster.device": "`cpu`, `cuda`",
    "tokens_per_rank": "whole number: tokens of a rank in a micro-batch",
    "accumulation": "whole number: micro-batches of a step",
    "clip": "number: largest norm of the gradient",
    "steps": "whole number: timed steps",
    "warmup": "whole number: untimed steps before the timed ones",
    "seed": "whole number: draws weights and the order of the data",
    "threads": "whole number: threads of each rank; none: the processors are divided among the ranks",
    "timeout_seconds": "number: seconds after which a trial fails",
    "repeats": "whole number, at least 1; or `until 2 %`, or `until 2 %, at most 30`",
    "on_failure": f"table with any of the keys {', '.join(f'`{k}`' for k in get_args(Kind))}; each `skip`, "
    "`stop`, `retry 2`, or `retry 2, then stop`",
    "answer": "quantity of the page's first sentence: `loss`, `step`, `bytes`, `error`, `memory`, or `trials` "
    "(how many finished); "
    "empty: [the axes decide](#quantity-that-a-page-begins-with)",
    "strategy": "[ours](#strategies-of-our-engine), `recipe`, [a peer](#strategies-that-are-peers), ours "
    "[inside FSDP2 or DDP](#collectives-inside-fsdp2-and-ddp), or `module:Class`, "
    "[your own](own_method.md#a-strategy-of-your-own)",
    "peer.compute": "`fp32`, `bf16`: type that peers compute in; policies have `policy.compute`",
    "peer.reduce_dtype": "`compute`, `fp32`: type in which FSDP2 reduces gradients",
    "peer.group": "`all`, `node`: ranks that share one copy of FSDP2's states; with `node`, nodes are replicas (HSDP)",
    "peer.bucket_mb": "number: largest bucket of DDP's gradients, in MB",
    "deepspeed_config": "for strategy `recipe` or `deepspeed`: a file next to the suite, or a table",
    "gather_method": "table: arguments of [a gather of your own](own_method.md#a-gather-of-your-own)",
    "method": "table: arguments of [a method or strategy of your own](own_method.md); an argument with the "
    "value `none` is not passed",
    "margin": "how much higher than the baseline's a loss may be, [as a number of steps](#parts-of-a-suite-file); "
    "0: 1 % of the baseline's loss instead",
    "seconds": "name of the suite whose records have the seconds of a step, "
    "[for net speed-ups](#seconds-of-a-step-from-another-suite); empty: this suite's own records",
    "policy.schedule": "list of spans, tables with `until` (steps, or a share such as `50 %`), `every` and policy "
    "fields: [what changes while training](#policies-that-change-while-training)",
    "cluster.slow": "number: rate of the last node's link as a share of the others'",
    "cluster.inner_rate": "text with kbit/s, Mbit/s or Gbit/s: rate between ranks of a node",
    "cluster.launcher": "`local`, `torchrun`, `hosts`, `slurm` ([across hosts](cluster.md))",
    "cluster.hosts": "names for ssh, this machine's first; for launcher `hosts`",
    "cluster.ranks": "`processes`, `threads`: [threads of one process](#ranks-that-are-threads), for questions "
    "that are not about seconds",
    "cluster.slurm": "table of the allocation's options: `partition`, `time` in minutes, `account`, ...",
    "cluster.hcas": "InfiniBand adapters that NCCL may use: how many, or a list of names",
    "cluster.rate": "text with kbit/s, Mbit/s or Gbit/s, or `unshaped`",
    "cluster.transport": "`shm`, `gloo`, `nccl`, `staged`, or `package.module`, which provides a backend",
    "cluster.latency": "text with us or ms: delay one way, in addition to the time for the bytes",
    "model.name": f"{', '.join(MODELS)}, or `module:function`",
    "model.arguments": "table: arguments of the model",
    "optimizer.name": "class of torch.optim, [`Muon`](muon.md#in-suites) included, or `module:class`",
    "optimizer.matrices": "pattern of the names of parameters that Muon steps; empty: the hidden matrices",
    "optimizer.schedule.warmup": "steps of a linear warm-up",
    "optimizer.schedule.start": "number: learning rate from which the warm-up rises, as a share of `lr`",
    "optimizer.schedule.decay": "`none`, `linear`, `cosine`: after the warm-up, until the last step",
    "optimizer.schedule.floor": "number: learning rate at the last step of a decay, as a share of `lr`",
    "tokenizer": "`module:function` that makes tokens from a text; without it bytes are tokens",
    "activation_checkpointing": "true: blocks keep only their inputs, and run again in the backward pass",
    "optimizer.arguments": "table: arguments of the optimizer; `lr` below 1000. With Muon, `adamw` is a table: "
    "arguments of the AdamW that steps all parameters that Muon does not step",
    "corpus": "`stdlib`, a text, token files or `module:function`; for a model that reads images `glyphs`, which is "
    "then the default",
    "sequence": "whole number: tokens of a sequence, or patches of an image: 1, 4, 16, 64 (the default for images), "
    "256 or 1024",
    "validate_every": "steps between validations; 0: once, after the last step; none: no validation",
    "validation_batches": "batches of each rank in a validation",
    "measure_quantisation": "true: in the first repeat, measure the errors of what is sent, and the errors that "
    "[other codecs](../reference/metrics.md#error-of-what-was-sent) would have; this is not timed",
    "memory_limit": "text with MiB or GiB",
    "control": "`none`, or a change that makes training worse on purpose: `stale_secondary`, hpZ's copy is never "
    "renewed; `late_secondary`, it is renewed one step late; `half_batch`, only the first half of each batch is "
    "used; `unordered`, gradients are not reordered before the two hops; `late_schedule`, each span of "
    "`policy.schedule` begins one step late, which the trial's checks find",
    **{
        f"policy.{name}": each.says.replace("a method of your own", "[a method of your own](own_method.md)")
        .replace("a gather of your own", "[a gather of your own](own_method.md#a-gather-of-your-own)")
        .replace("with Muon", "with [Muon](muon.md)")
        .replace(_PAIRS, f"[{_PAIRS}](gpu_loop.md#small-blocks)")
        for name, each in KEYS.items()
    },
}


def render() -> str:
    """Return the tables in Markdown.

    Fields of policies have a table of their own.  Their defaults depend on the strategy; the table has those of ZeRO-3.
    """
    head = ("key", "value", "default")
    rows = [_row(name, field) for name, field in SuiteTables.model_fields.items()]
    top = table(head, (row for row in rows if row[1] not in _BARE))
    fields = [(path, field) for path, field in _leaves(Trial) if path != "repeat"]
    policy = table(
        (*head[:2], f"default of `{_USUAL}`"), (_row(*leaf) for leaf in fields if _of_a_policy(*leaf))
    )
    trial = table(head, (_row(*leaf) for leaf in fields if not _of_a_policy(*leaf)))
    peers = table(("strategy", "what trains"), ((f"`{name}`", peer.says) for name, peer in PEERS.items()))
    return (
        f"### The top of the file\n\n{top}\n{_OVERRIDE}\n\n### Fields of a trial\n\n{trial}"
        f"\n### Fields of a policy\n\n{_DEFAULTS}\n\n{policy}"
        f"\n### Strategies that are peers\n\n{peers}"
    )


def _of_a_policy(path: str, field: Any) -> bool:
    return path.startswith("policy.") and field.default is None


def fields_of_a_trial() -> list[str]:
    """Return the dotted paths of all fields of a trial."""
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
    kind, colon, meaning = (_VALUES.get(path) or _type(field.annotation)).partition(": ")
    value = f"{', '.join([kind, *limits])}{colon}{meaning}"
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
    if _of_a_policy(path, field):
        return _default_of_policy(path.removeprefix("policy."))
    if field.is_required():
        return "required"
    if field.default is None and path == "cluster.rate":
        return "`unshaped`"
    if isinstance(field.default, Repeats):
        return f"`{field.default.least}`"
    return "none" if field.default in (None, {}, []) else f"`{json.dumps(field.default)}`"


def _default_of_policy(name: str) -> str:
    """Return the default of the policy key ``name``: its value in the policy of :data:`_USUAL`."""
    if name not in KEYS:  # a schedule
        return "none"
    value = KEYS[name].of(PRESETS[_USUAL])
    if isinstance(value, tuple):  # the codecs of two hops, which are equal
        value = KEYS[name].in_words(value)
    if value == _NO_LIMIT:
        return "no limit"
    return "none" if value is None else f"`{value:_}`" if isinstance(value, int) else f"`{value}`"
