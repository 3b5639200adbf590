"""Computes tables of bytes and memory by part, of scaling over nodes, and of models tried under a memory limit."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import pandas as pd

from impl.plan import memory as formulas
from report.data.frames import Frames, groups
from report.data.metrics import KEPT, OF_TRIAL, TRAINING, Derived, timed_steps

VOLUME_PARTS: Final = ("gather in forward", "gather in backward", "gradients", "control", "padding")
OWNERS: Final = "owners of matrices"  # a further part, which only trials with Muon have
_FEWEST: Final = 3  # trials must have run on so many different numbers of nodes, so that scaling is shown
_CONSTANT: Final = ["ranks_per_node", "model", "rate_mbit", "sequence", "accumulation"]


def volume(frames: Frames, table: pd.DataFrame) -> pd.DataFrame:
    """Return the bytes that all ranks together send between nodes in a step, one row per trial and part.

    Each rank counts the bytes that it sends (its ledger); the table is computed from these counts.  Only trials in
    ``table`` (:func:`report.data.metrics.trials`) have rows.  These columns hold the result:

    * ``part``: what the bytes were sent for, one of :data:`VOLUME_PARTS` or :data:`OWNERS`;
    * ``bytes``: the mean over timed steps;
    * ``m``: ``bytes`` divided by the number of micro-batches and by M, where M are the bytes that one all-gather of the
      whole model in 16 bits sends between nodes.
    """
    ledger = frames.bytes[frames.bytes["source"] == "ledger"]
    between = ledger[ledger["link"].eq("inter") & ledger["phase"].isin(TRAINING)]
    purpose, in_forward = between["purpose"], between["phase"].eq("forward")
    gathers = in_forward.map({True: VOLUME_PARTS[0], False: VOLUME_PARTS[1]})
    part = purpose.where(purpose.eq("gradients"), VOLUME_PARTS[3]).mask(purpose.eq("weights"), gathers)
    part = part.mask(purpose.isin(["momentum", "update"]), OWNERS)
    unpadded = between.assign(part=part, bytes=between["bytes"] - between["padding"])
    padding = between.assign(part=VOLUME_PARTS[4], bytes=between["padding"])
    parts = pd.concat([unpadded, padding[padding["padding"] > 0]])
    sums = parts.groupby(["id", "part"], as_index=False)[["bytes"]].sum()
    sums["bytes"] = sums["bytes"] / sums["id"].map(timed_steps(frames))
    rows = table[["id", "m_bytes"]].merge(sums, on="id")
    return rows.assign(m=rows["bytes"].astype(float) / rows["m_bytes"])


def secondary_either_way(frames: Frames, identity: str) -> tuple[float, float]:
    """Return how many bytes hpZ's copy of the weights takes on one rank, by formula, for two formats of the copy.

    In the first format, the rank keeps the encoded bytes that it received.  In the second, it keeps weights of 16 bits.
    ``identity`` is the id of a trial.  Both sizes are NaN for trials without hpZ's copy, and for trials inside FSDP2 or
    DDP.  They are also NaN for policies with a codec of the user's own or of a published format.
    """
    trial = frames.trial_of[identity]
    policy, topology = trial.resolved_policy(), trial.topology()
    if policy is None or trial.host is not None or policy.own_codecs:
        return math.nan, math.nan
    sizes = formulas.secondary_either_way(policy, topology, frames.geometries(identity))
    return sizes or (math.nan, math.nan)


def memory(frames: Frames, table: pd.DataFrame) -> pd.DataFrame:
    """Return the bytes that a rank holds in memory, or copies in a step: one row per trial, source and part.

    Only trials in ``table`` (:func:`report.data.metrics.trials`) have rows.  ``source`` says where the number is from,
    such as the engine or a formula, and ``part`` what the bytes are, such as gradients (``Frames.memory``).  ``bytes``
    is the maximum over the trial's ranks, for each part separately: the gradients may be those of rank 0, and the
    weights those of rank 1.
    """
    largest = frames.memory.groupby(["id", "source", "part"], as_index=False)["bytes"].max()
    return table[[*OF_TRIAL, "secondary", "nodes", "ranks_per_node", "shape"]].merge(largest, on="id")


def by_nodes(derived: Derived) -> pd.DataFrame:
    """Return the trials that show how speed scales with the number of nodes, one row per trial and group.

    The trials of a group have the same model, rate, ranks per node, sequence length and number of micro-batches.  In a
    group of kind ``weak``, they also have the same batch on each rank.  In a group of kind ``strong``, they have the
    same batch on all ranks together.  Column ``kind`` holds the kind, and ``title`` describes the group.
    A group is returned if its trials ran on at least three different numbers of nodes, such as 1, 2 and 4.  A trial
    that is in a group of each kind has two rows.
    """
    table = derived.trials.assign(everyone=lambda t: t["tokens_per_rank"] * t["world"])
    columns, parts = [*KEPT, "step_seconds", "tokens_per_second", "sent_bytes"], []
    for kind, batch, suffix in (("weak", "tokens_per_rank", "a rank"), ("strong", "everyone", "in all")):
        for key, group in groups(table, [*_CONSTANT, batch]):
            if group["nodes"].nunique() >= _FEWEST:
                title = f"{kind}: {int(key[-1])} tokens {suffix}"
                parts.append(group[columns].assign(kind=kind, title=title))
    return pd.concat(parts, ignore_index=True) if parts else table[columns].iloc[:0]


def under_limits(derived: Derived) -> pd.DataFrame:
    """Return the trials that had a memory limit: those that trained within it, and those that exceeded it.

    Column ``trained`` is true for trials that trained, and false for trials that exceeded their limit.  If all trials
    with a limit trained, or if all exceeded it, the table is empty.
    """
    keys = [
        "id",
        "strategy",
        "configuration",
        "place",
        "where",
        "setting",
        "parameters",
        "nodes",
        "ranks_per_node",
    ]
    trial_of, failures = derived.frames.trial_of, derived.frames.failures
    refused = failures[failures["kind"] == "memory"][keys].assign(trained=False)
    rows = pd.concat([derived.trials[keys].assign(trained=True), refused], ignore_index=True)
    limits = np.array([trial_of[identity].memory_limit or np.nan for identity in rows["id"]])
    rows = rows.assign(limit_bytes=limits, first=rows["place"]).dropna(subset=["limit_bytes"])
    return rows if rows["trained"].nunique() == 2 else rows.iloc[:0]


def largest(group: pd.DataFrame) -> tuple[float, float]:
    """Return two sizes in millions of parameters: of the largest model that trained, and of the smallest that did not.

    ``group`` are rows of :func:`under_limits`.  The first size is 0 if no model trained; the second size is NaN if all
    models trained.
    """
    trained, millions = group["trained"].astype(bool), group["parameters"] / 1e6
    return millions[trained].max() if trained.any() else 0.0, millions[~trained].min()
