"""Bytes sent and memory held, by part: ledger, prediction, engine, formula."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np
import pandas as pd

from impl.codecs.codec import BF16
from impl.plan import memory as held
from impl.plan.policy import Policy
from impl.plan.shard_layout import FROZEN, UnitGeometry
from impl.plan.topology import Topology
from impl.plan.traffic import Load, predict
from report.data.frames import Frames
from report.data.metrics import TRAINING, timed_steps

VOLUME_PARTS: Final = ("gather in forward", "gather in backward", "gradients", "control", "padding")


def volume(frames: Frames, table: pd.DataFrame) -> pd.DataFrame:
    """Bytes between nodes per step by part, from the ledger, all ranks: one row per trial and part.

    What is sent of padding is a part of its own, and in no other.
    """
    steps = timed_steps(frames)
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
    sums["bytes"] = sums["bytes"] / sums["id"].map(steps)
    return _in_m(sums, table)


def _in_m(parts: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """``parts`` of the trials in ``table``, with their bytes in units of M."""
    found = table[["id", "m_bytes"]].merge(parts, on="id")
    return found.assign(m=found["bytes"].astype(float) / found["m_bytes"])


def spared(frames: Frames, table: pd.DataFrame) -> pd.DataFrame:
    """Bytes per step that each technique saves against flat collectives in 16 bits.

    From ``impl.plan.traffic`` on the record's own units; every policy in turn is changed from flat
    (ring) collectives in 16 bits to hierarchical ones, then given its hpZ shard, then its codecs:

        ``hops``        flat - hierarchical in 16 bits
        ``copy``        hierarchical - with the hpZ copy, in 16 bits
        ``quantising``  with the hpZ copy in 16 bits - the policy itself
        ``sent``        what is left, of the model's elements
        ``padding``     what is left, of padding

    One row per trial and part; trials of peers, inside FSDP2 or DDP, on one node, and with a user's own
    codec, whose code a report does not run, are left out.
    """
    rows: list[dict[str, object]] = []
    for trial in table[table["nodes"] > 1].itertuples():
        ran = frames.ran[str(trial.id)]
        policy = ran.resolved_policy()
        if policy is None or ran.host is not None or policy.own_codecs:
            continue
        topology = ran.topology()
        units = _units(frames, str(trial.id), policy, topology)
        raw_codecs = {"weights": BF16, "gradients": (BF16, BF16), "feedback": None, "chunks": 1}
        bare = policy.without_secondary()
        ladder = (
            replace(bare, **raw_codecs, group=0, gather="flat", reduce="ring"),  # type: ignore[arg-type]
            replace(bare, **raw_codecs),  # type: ignore[arg-type]
            replace(policy, **raw_codecs),  # type: ignore[arg-type]
            policy,
        )
        of_all = [replace(unit, group=0) for unit in units]
        layouts = (of_all if policy.stage else units, units, units, units)
        sent = [
            _sent_between(p, topology, laid_out, ran.accumulation)
            for p, laid_out in zip(ladder, layouts, strict=True)
        ]
        saved = [before - after for before, after in pairwise(sent)]
        pads = _padding_between(policy, topology, units, frames.units[str(trial.id)], ran.accumulation)
        left = (sent[-1] - pads, pads)
        parts = zip(("hops", "copy", "quantising", "sent", "padding"), (*saved, *left), strict=True)
        rows += [{"id": trial.id, "part": part, "bytes": size} for part, size in parts]
    return _in_m(pd.DataFrame(rows, columns=["id", "part", "bytes"]), table)


def _units(frames: Frames, identity: str, policy: Policy, topology: Topology) -> list[UnitGeometry]:
    """Geometry of a record's units, without their parameters."""
    return [
        UnitGeometry(n, (), padded, topology.world, not n.endswith(FROZEN), policy.group_ranks(topology))
        for n, _, padded in frames.units[identity]
    ]


def secondary_either_way(frames: Frames, identity: str) -> tuple[float, float]:
    """Bytes of a trial's hpZ copy on one rank kept as frames, and in 16 bits, by formula; NaN without one."""
    trial = frames.ran[identity]
    policy, topology = trial.resolved_policy(), trial.topology()
    if policy is None or trial.host is not None or policy.own_codecs:
        return math.nan, math.nan
    found = held.secondary_either_way(policy, topology, _units(frames, identity, policy, topology))
    return found or (math.nan, math.nan)


def _sent_between(policy: Policy, topology: Topology, units: list[UnitGeometry], micro_batches: int) -> int:
    return sum(_unit_bytes(policy, topology, units, micro_batches).values())


def _padding_between(
    policy: Policy,
    topology: Topology,
    units: list[UnitGeometry],
    sizes: list[tuple[str, int, int]],
    micro_batches: int,
) -> float:
    """What of that is of padding: of a unit's messages as much as of its elements."""
    pads = {name: 1 - numel / padded for name, numel, padded in sizes if padded}
    sent = _unit_bytes(policy, topology, units, micro_batches)
    return sum(size * pads.get(unit, 0.0) for unit, size in sent.items())


def _unit_bytes(
    policy: Policy, topology: Topology, units: list[UnitGeometry], micro_batches: int
) -> Counter[str]:
    """Bytes between nodes of all ranks by unit."""
    load, found = Load(micro_batches=micro_batches), Counter[str]()
    for rank in range(topology.world):
        for key, sent in predict(policy, topology, units, rank, load).sent.items():
            if key.link == "inter":
                found[key.unit] += sent.bytes
    return found


def memory(frames: Frames, table: pd.DataFrame) -> pd.DataFrame:
    """Memory of the rank that holds most, by part, engine beside formula: one row per trial and part."""
    largest = frames.memory.groupby(["id", "source", "part"], as_index=False)["bytes"].max()
    kept = ["id", "strategy", "contender", "place", "first", "where", "cell", "secondary", "seed", "repeat"]
    kept += ["nodes", "ranks_per_node", "model"]
    return table[kept].merge(largest, on="id", how="inner")
