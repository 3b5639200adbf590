"""Tables of ``docs/reference/support.md``: which options of a policy can be combined.

Every pair of options is built as a policy and checked on a topology.  The tables quote the errors of the pairs that
are refused; the tests train with every other pair.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from docs.tables.markdown import table
from impl.adapters.traffic import BASES, Host, check_host
from impl.codecs.codec import Codec, IntCodec
from impl.policy.policy import SETTINGS, Feedback, LossScale, MemoryLimits, Offload, Policy, PolicyError
from impl.policy.topology import Topology

TOPOLOGY: Final = Topology(2, 2)
Changes = Mapping[str, Any]


def parts(weights: Codec, gradients: Codec, memory: MemoryLimits) -> dict[str, Changes]:
    """Return options of a policy by name, each as changes of the fields of ``Policy()``.

    Args:
        weights: codec of the options that quantise weights.
        gradients: codec of the option that quantises gradients.
        memory: limits on memory; the option that sets some of these limits keeps the others.
    """
    both = (gradients, gradients)
    limited = replace(memory, persist_below=50, max_reuse=2000)
    return {
        **{f"stage {stage}": {"stage": stage} for stage in (0, 1, 2, 3)},
        "groups (MiCS)": {"group": "node"},
        "local steps": {"group": "node", "local_steps": 1},
        "qwZ": {"weights": weights},
        "two planes": {"weights": weights, "planes": 2},
        "plane of the phase": {"weights": weights, "planes": "phase"},
        "hpZ": {"secondary": "node"},
        "hpZ in 16 bits": {"secondary": "node", "secondary_format": "bf16"},
        "weights by hop": {"secondary": "node", "inside": weights},
        "differences": {"secondary": "node", "secondary_format": "bf16", "differences": weights},
        "qgZ": {"gradients": both},
        "ring": {"reduce": "ring"},
        "one hop": {"reduce": "one_hop"},
        "flat gather": {"gather": "flat"},
        "fp16 sums": {"sums": "fp16"},
        "blocks by shape": {"blocks": "shape"},
        "chunks": {"chunks": 2},
        "error feedback": {"feedback": Feedback()},
        "LoCo": {"feedback": Feedback(decay=0.8, reset=1024, hops="all")},
        "local accumulation": {"reduce_every": "step"},
        "bf16": {"compute": "bf16"},
        "fp16 with loss scale": {"compute": "fp16", "loss_scale": LossScale(initial=256.0)},
        "frozen as codes": {"frozen": weights},
        "kept and persistent": {"memory": limited},
        "optimizer offloaded": {"offload": Offload(optimizer=1.0)},
        "all offloaded": {"offload": Offload(optimizer=1.0, weights=1.0)},
    }


PARTS: Final = parts(IntCodec(8, 2048), IntCodec(4, 256), MemoryLimits())


def pairs(changes: Mapping[str, Changes], base: Policy) -> Iterator[tuple[str, str, Policy | str]]:
    """Yield both names of every pair of options that change different fields, and the policy or its error."""
    for part, other in itertools.combinations(changes, 2):
        if not changes[part].keys() & changes[other].keys():
            yield part, other, combine(base, changes[part], changes[other])


def combine(base: Policy, *changes: Changes) -> Policy | str:
    """Return ``base`` with all ``changes``, or the text of the error."""
    try:
        policy = replace(base, **{name: value for part in changes for name, value in part.items()})
        policy.check(TOPOLOGY)
    except PolicyError as error:
        return str(error)
    return policy


def render() -> str:
    """Return tables of the options, of refused pairs, and of options refused inside FSDP2 and DDP."""
    refused: dict[str, list[tuple[str, str, str]]] = {}
    for part, other, outcome in pairs(PARTS, Policy()):
        if isinstance(outcome, str):
            refused.setdefault(re.sub("stage [0-2]", "stage n", outcome), []).append((part, other, outcome))
    hosted: dict[tuple[str, str], list[str]] = {}
    for host, name in itertools.product(BASES, PARTS):
        if isinstance(outcome := _inside(host, name), str):
            hosted.setdefault((host, _without_names(outcome)), []).append(name)
    options = table(("option", "keys `policy.*`"), ((name, keys_of(name)) for name in PARTS))
    between = table(("refused pairs", "error"), (_row(*reason) for reason in refused.items()))
    inside = table(
        ("inside", "refused options", "error"),
        ((host, ", ".join(names), reason) for (host, reason), names in hosted.items()),
    )
    return (
        f"### Options\n\n{options}\n### Refused pairs\n\n{between}"
        f"\n### Options refused inside FSDP2 and DDP\n\n{inside}"
    )


def keys_of(name: str) -> str:
    """Return the keys ``policy.*`` of a suite that make up an option, with their values, in Markdown.

    Each key with its value is in backquotes, such as ``secondary = "node"``.
    """
    own, policy = Policy(), replace(Policy(), **PARTS[name])
    shown = []
    for each in SETTINGS:
        value = each.of(policy)
        if value == each.of(own) and (each.part or each.name not in PARTS[name]):
            continue
        value = value[0] if isinstance(value, tuple) else value  # one codec for both hops
        text = f"{value:g}" if isinstance(value, int | float) else f'"{value}"'
        if each.name == "inside":  # no key of its own: the first of two codecs of the key ``weights``
            shown.append(f'`weights = ["{value}", "{policy.weights}"]`')
        else:
            shown.append(f"`{each.key} = {text}`")
    return ", ".join(shown)


def _row(reason: str, pairs: Sequence[tuple[str, str, str]]) -> tuple[str, str]:
    """Return the names of the pairs that are refused for one ``reason``, and their error.

    If the errors of the pairs differ, the ``reason`` takes the place of the error.
    """
    parts, others, refusals = (list(dict.fromkeys(column)) for column in zip(*pairs, strict=True))
    names = "; ".join(f"{part} with {other}" for part, other, _ in pairs)
    if len(pairs) == len(parts) * len(others):
        names = f"{', '.join(parts)} with {', '.join(others)}"
    return names, refusals[0] if len(refusals) == 1 else reason


def _without_names(refusal: str) -> str:
    """Return an error without its beginning, which names option and host, and its end, which says what is expected."""
    return refusal.partition(": ")[2].partition("; expected")[0] if "; expected" in refusal else refusal


def _inside(host: Host, name: str) -> Policy | str:
    """Return the policy of an option inside FSDP2 or DDP, or the text of the error."""
    policy = combine(BASES[host], PARTS[name])
    try:
        if isinstance(policy, Policy):
            check_host(host, policy)
    except PolicyError as error:
        return str(error)
    return policy
