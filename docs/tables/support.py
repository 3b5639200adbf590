"""Tables of ``docs/reference/support.md``: which options of a policy can be combined.

Every pair is built as a policy and checked on a topology; refusals are quoted in the program's own words.
The tests train every pair that is not refused.
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
from impl.plan.policy import Feedback, LossScale, MemoryLimits, Offload, Policy, PolicyError
from impl.plan.topology import Topology

TOPOLOGY: Final = Topology(2, 2)
Changes = Mapping[str, Any]


def parts(weights: Codec, gradients: Codec, memory: MemoryLimits) -> dict[str, Changes]:
    """Techniques and options of a policy by name, each as changes of ``Policy()``, with these codecs and with
    ``memory`` for the limits that no part is about.
    """
    both = (gradients, gradients)
    limited = replace(memory, persist_below=50, max_reuse=2000)
    return {
        **{f"stage {stage}": {"stage": stage} for stage in (0, 1, 2, 3)},
        "groups (MiCS)": {"group": "node"},
        "qwZ": {"weights": weights},
        "two planes": {"weights": weights, "planes": 2},
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
    """Every pair of parts that change different fields: (one, other, the policy or why it is refused)."""
    for one, other in itertools.combinations(changes, 2):
        if not changes[one].keys() & changes[other].keys():
            yield one, other, combine(base, changes[one], changes[other])


def combine(base: Policy, *changes: Changes) -> Policy | str:
    """``base`` with all ``changes``, or the text of its refusal."""
    try:
        policy = replace(base, **{name: value for each in changes for name, value in each.items()})
        policy.check(TOPOLOGY)
    except PolicyError as error:
        return str(error)
    return policy


def render() -> str:
    """The parts, and tables of what is refused, in Markdown: pairs, and parts inside FSDP2 and DDP."""
    refused: dict[str, list[tuple[str, str, str]]] = {}
    for one, other, found in pairs(PARTS, Policy()):
        if isinstance(found, str):
            refused.setdefault(re.sub("stage [0-2]", "stage n", found), []).append((one, other, found))
    hosted: dict[tuple[str, str], list[str]] = {}
    for host, name in itertools.product(BASES, PARTS):
        if isinstance(found := _inside(host, name), str):
            hosted.setdefault((host, _without_names(found)), []).append(name)
    between = table(("refused", "in these words"), (_told(why, found) for why, found in refused.items()))
    inside = table(
        ("inside", "refused", "in these words"),
        ((host, ", ".join(names), why) for (host, why), names in hosted.items()),
    )
    return f"The parts: {', '.join(PARTS)}.\n\n{between}\n{inside}"


def _told(why: str, pairs: Sequence[tuple[str, str, str]]) -> tuple[str, str]:
    """Pairs by name, and why they are refused; stage n stands for several."""
    ones, others, words = (list(dict.fromkeys(column)) for column in zip(*pairs, strict=True))
    names = "; ".join(f"{one} with {other}" for one, other, _ in pairs)
    if len(pairs) == len(ones) * len(others):
        names = f"{', '.join(ones)} with {', '.join(others)}"
    return names, words[0] if len(words) == 1 else why


def _without_names(refusal: str) -> str:
    """What a refusal says after the part and the host that it names, and before what it expects instead."""
    return refusal.partition(": ")[2].partition("; expected")[0] if "; expected" in refusal else refusal


def _inside(host: Host, name: str) -> Policy | str:
    """The policy of a part inside FSDP2 or DDP, or why it does not support the part."""
    policy = combine(BASES[host], PARTS[name])
    try:
        if isinstance(policy, Policy):
            check_host(host, policy)
    except PolicyError as error:
        return str(error)
    return policy
