"""Bytes sent and memory held, by part: ledger, prediction, engine, formula."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import pandas as pd

from impl.plan import memory as held
from impl.plan.shard_layout import FROZEN, UnitGeometry
from report.data.frames import Frames
from report.data.metrics import TRAINING, timed_steps

VOLUME_PARTS: Final = ("gather in forward", "gather in backward", "gradients", "control", "padding")


def volume(frames: Frames, table: pd.DataFrame) -> pd.DataFrame:
    """Bytes between nodes per step by part, from the ledger, all ranks: one row per trial and part.

    What is sent of padding is a part of its own, and in no other.
    """
    between = frames.bytes[
        (frames.bytes["link"] == "inter")
        & frames.bytes["phase"].isin(TRAINING)
        & (frames.bytes["source"] == "ledger")
    ]
    part = np.select(
        [
            (between["purpose"] == "weights") & (between["phase"] == "forward"),
            between["purpose"] == "weights",
            between["purpose"] == "gradients",
        ],
        VOLUME_PARTS[:3],
        default=VOLUME_PARTS[3],
    )
    own = between.assign(part=part, bytes=between["bytes"] - between["padding"])
    of_padding = between.assign(part=VOLUME_PARTS[4], bytes=between["padding"])
    parts = pd.concat([own, of_padding[of_padding["padding"] > 0]])
    sums = parts.groupby(["id", "part"], as_index=False)[["bytes"]].sum()
    sums["bytes"] = sums["bytes"] / sums["id"].map(timed_steps(frames))
    found = table[["id", "m_bytes"]].merge(sums, on="id")
    return found.assign(m=found["bytes"].astype(float) / found["m_bytes"])


def secondary_either_way(frames: Frames, identity: str) -> tuple[float, float]:
    """Bytes of a trial's hpZ copy on one rank kept as frames, and in 16 bits, by formula; NaN without one."""
    trial = frames.ran[identity]
    policy, topology = trial.resolved_policy(), trial.topology()
    if policy is None or trial.host is not None or policy.own_codecs:
        return math.nan, math.nan
    group = policy.group_ranks(topology)
    units = [
        UnitGeometry(name, (), padded, topology.world, not name.endswith(FROZEN), group)
        for name, _, padded in frames.units[identity]
    ]
    return held.secondary_either_way(policy, topology, units) or (math.nan, math.nan)


def memory(frames: Frames, table: pd.DataFrame) -> pd.DataFrame:
    """Memory of the rank that holds most, by part, engine beside formula: one row per trial and part."""
    largest = frames.memory.groupby(["id", "source", "part"], as_index=False)["bytes"].max()
    kept = ["id", "strategy", "contender", "place", "first", "where", "cell", "secondary", "seed", "repeat"]
    kept += ["nodes", "ranks_per_node", "shape"]
    return table[kept].merge(largest, on="id", how="inner")
