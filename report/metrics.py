"""What is derived from raw records.  Formulas and units: docs/metrics.md.

Each function takes :class:`report.frame.Frames` and returns one row per trial, pair or part, so
that every printed number can be traced to record ids.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pandas as pd

from harness.statistics import Interval, paired_ratio_interval
from harness.suite import PolicyChanges
from impl.codec import BF16, CodecError, IntCodec, parse
from impl.geometry import UnitGeometry
from impl.policy import Policy
from impl.topology import Topology
from impl.traffic import Load, predict
from report.contender import BASELINE, NAMES, PROPOSED
from report.frame import Frames

RATES_AGREE_WITHIN: Final = 0.10  # policies of a cell are compared at one rate if within this
BITS_PER_MBIT: Final = 1e6
TRAINING: Final = ("forward", "backward", "step")  # phases of a training step
PAIR: Final = ("cell", "seed", "repeat")  # trials that ran under the same conditions


def trials(frames: Frames) -> pd.DataFrame:
    """One row per finished trial: what ran and what follows from its raw values.

    Beside the columns of ``frames.trials``:
        step_seconds: median over timed steps of the slowest rank's total.
        compute_seconds: median over timed steps of the largest (total - exposed) of any rank.
        exposed_seconds: median over timed steps of the slowest rank's exposed communication.
        tokens_per_second: tokens of all ranks in a step / step_seconds.
        sent_bytes: bytes per step that all ranks sent between nodes in training (ledger).
        predicted_bytes, interface_bytes: the same, from the prediction and the interfaces.
        egress_bytes: the largest of any node; ledger, or the interface where there is no ledger.
        wire_seconds: 8 egress_bytes / achieved rate.
        best_seconds: max(compute_seconds, wire_seconds): all communication hidden that can be.
        share: best_seconds / step_seconds.
        m_bytes: M, bytes of all units in 16 bits that cross between nodes in one hierarchical
            gather: 2 * padded * (nodes - 1), summed over ranks.
        validation_loss: of the last validation.
    """
    table = frames.trials.copy()
    for found in (_times(frames), _traffic(frames), _final_loss(frames)):
        table = table.merge(found, on="id", how="left")
    tokens = table["tokens_per_rank"] * table["world"] * table["accumulation"]
    table["tokens_per_second"] = tokens / table["step_seconds"]
    rate = pd.to_numeric(table["achieved_mbit"]).astype(float) * BITS_PER_MBIT
    table["wire_seconds"] = np.where(table["egress_bytes"] == 0, 0.0, 8 * table["egress_bytes"] / rate)
    best = table[["compute_seconds", "wire_seconds"]].max(axis=1, skipna=False)
    table["best_seconds"] = best
    table["share"] = best / table["step_seconds"]
    model = ["nodes", "ranks_per_node", "model", "accumulation"]  # peers have no units of their own
    table["padded"] = table.groupby(model)["padded"].transform("max")
    table["m_bytes"] = (2.0 * table["padded"] * (table["nodes"] - 1)).replace(0.0, np.nan)
    table["first"] = table.groupby("contender")["order"].transform("min")
    table["rate_mbit"] = pd.to_numeric(table["rate_mbit"]).astype(float)
    table["achieved_mbit"] = pd.to_numeric(table["achieved_mbit"]).astype(float)
    cell = ["nodes", "ranks_per_node", "tokens_per_rank", "rate_mbit", "where"]
    return table.sort_values([*cell, "place", "first", "seed", "repeat"], ignore_index=True)


def _timed(frames: Frames) -> pd.DataFrame:
    """Timed steps with their exposed communication and what is left of the total."""
    timed = frames.steps[~frames.steps["warmup"].astype(bool)].copy()
    exposed = pd.to_numeric(timed["exposed_forward"]) + pd.to_numeric(timed["exposed_backward"])
    return timed.assign(exposed=exposed, compute=timed["total"] - exposed)


def _slowest(timed: pd.DataFrame) -> pd.DataFrame:
    """For each step of each trial, the row of the rank that took longest."""
    return timed.loc[timed.groupby(["id", "index"])["total"].idxmax()]


def _times(frames: Frames) -> pd.DataFrame:
    timed = _timed(frames)
    computing = timed.groupby(["id", "index"])["compute"].max().groupby("id").median()
    slowest = _slowest(timed).groupby("id")[["total", "exposed"]].median()
    found = slowest.rename(columns={"total": "step_seconds", "exposed": "exposed_seconds"})
    return found.assign(compute_seconds=computing).reset_index()


def timed_steps(frames: Frames) -> pd.Series[int]:
    """Number of timed steps of each trial, as counted in its records."""
    return _timed(frames).groupby("id")["index"].nunique()


def _traffic(frames: Frames) -> pd.DataFrame:
    steps = timed_steps(frames)
    between = frames.bytes[(frames.bytes["link"] == "inter") & frames.bytes["phase"].isin(TRAINING)]
    ledger, predicted = (between[between["source"] == name] for name in ("ledger", "predicted"))
    has_ledger = frames.bytes[frames.bytes["source"] == "ledger"]["id"].unique()
    found = pd.DataFrame(index=pd.Index(frames.trials["id"], name="id"))
    totals = {
        "sent_bytes": ledger.groupby("id")["bytes"].sum(),
        "predicted_bytes": predicted.groupby("id")["bytes"].sum(),
        "interface_bytes": frames.interfaces.groupby("id")["tx_bytes"].sum(),
    }
    for name, total in totals.items():
        found[name] = total.reindex(found.index) / steps.reindex(found.index)
    for source, column in (("ledger", "sent_bytes"), ("predicted", "predicted_bytes")):
        whole = frames.bytes[frames.bytes["source"] == source]["id"].unique()
        found.loc[found.index.isin(whole), column] = found[column].fillna(0)
    busiest = ledger.groupby(["id", "node"])["bytes"].sum().groupby("id").max()
    counted = frames.interfaces.groupby("id")["tx_bytes"].max()
    egress = busiest.reindex(found.index)
    egress[found.index.isin(has_ledger)] = egress.fillna(0)
    found["egress_bytes"] = egress.fillna(counted.reindex(found.index)) / steps.reindex(found.index)
    return found.astype(float).reset_index()


def _final_loss(frames: Frames) -> pd.DataFrame:
    last = frames.validations.sort_values("step").groupby("id").tail(1)
    return last[["id", "loss"]].rename(columns={"loss": "validation_loss"})


def pairs(table: pd.DataFrame) -> pd.DataFrame:
    """Each trial beside ZeRO-3's of the same cell, seed and repeat.

    Args:
        table: from :func:`trials`.

    Returns:
        Columns of ``table`` and ``baseline`` (its id), ``speedup`` (its step seconds over ours),
        ``allowed`` (its step seconds over our best_seconds), ``bytes_ratio`` (our bytes between
        nodes over its, ledger) and ``interface_ratio``.  Trials without a partner are left out.
    """
    base = table[(table["strategy"] == BASELINE) & (table["contender"] == NAMES[BASELINE])]
    columns = [*PAIR, "id", "step_seconds", "sent_bytes", "interface_bytes"]
    base = base[columns].drop_duplicates(list(PAIR))
    renamed = {c: f"baseline_{c}" for c in columns[4:]} | {"id": "baseline"}
    joined = table.merge(base.rename(columns=renamed), on=list(PAIR), how="inner")
    joined["speedup"] = joined["baseline_step_seconds"] / joined["step_seconds"]
    joined["allowed"] = joined["baseline_step_seconds"] / joined["best_seconds"]
    joined["bytes_ratio"] = joined["sent_bytes"] / joined["baseline_sent_bytes"]
    joined["interface_ratio"] = joined["interface_bytes"] / joined["baseline_interface_bytes"]
    return joined.rename(columns={"baseline_step_seconds": "baseline_seconds"})


def speedup(group: pd.DataFrame) -> Interval:
    """Geometric mean of paired speed-ups with its confidence interval.

    Args:
        group: rows of :func:`pairs` of one contender in one cell.
    """
    keys = list(zip(group["seed"], group["repeat"], strict=True))
    return paired_ratio_interval(
        dict(zip(keys, group["baseline_seconds"], strict=True)),
        dict(zip(keys, group["step_seconds"], strict=True)),
    )


def rates_differ(table: pd.DataFrame) -> dict[str, float]:
    """Cells whose contenders had links of different rates: largest over smallest, minus one.

    Args:
        table: from :func:`trials`.
    """
    rates = table.assign(achieved_mbit=pd.to_numeric(table["achieved_mbit"])).dropna(subset=["achieved_mbit"])
    medians = rates.groupby(["cell", "contender"])["achieved_mbit"].median().groupby("cell")
    spread = medians.max() / medians.min() - 1
    return {str(cell): float(value) for cell, value in spread.items() if value > RATES_AGREE_WITHIN}


def parity(frames: Frames, table: pd.DataFrame) -> pd.DataFrame:
    """ZeRO++ at a quarter of the rate over ZeRO-3 at the full rate, paired by seed and repeat.

    Args:
        frames: of the same records.
        table: from :func:`trials`.

    Returns:
        ``id``, ``baseline``, ``rate_mbit`` (of ZeRO-3), ``parity`` (ratio of tokens per second),
        ``place`` told without the rate.
    """
    shaped = table.dropna(subset=["rate_mbit"])
    keys = ["elsewhere", "seed", "repeat"]
    elsewhere = [_cell_without_rate(frames, identity) for identity in shaped["id"]]
    shaped = shaped.assign(elsewhere=elsewhere, rate_mbit=pd.to_numeric(shaped["rate_mbit"]).astype(float))
    named = shaped["contender"]
    ours = shaped[named == NAMES[PROPOSED]].assign(full_rate=lambda t: 4 * t["rate_mbit"])
    base = shaped[named == NAMES[BASELINE]]
    columns = [*keys, "rate_mbit", "id", "tokens_per_second", "achieved_mbit"]
    joined = ours.merge(
        base[columns].rename(columns={"rate_mbit": "full_rate", "id": "baseline"}),
        on=[*keys, "full_rate"],
        suffixes=("", "_baseline"),
    )
    joined["parity"] = joined["tokens_per_second"] / joined["tokens_per_second_baseline"]
    return joined.sort_values(["nodes", "ranks_per_node", "tokens_per_rank", "full_rate"], ignore_index=True)


def _cell_without_rate(frames: Frames, identity: str) -> str:
    trial = frames.ran[identity]
    everywhere = {"strategy": BASELINE, "policy": PolicyChanges(), "seed": 0, "repeat": 0}
    unshaped = trial.cluster.model_copy(update={"rate": None})
    return trial.model_copy(update=everywhere | {"cluster": unshaped, "measure_quantisation": False}).id


def split(frames: Frames) -> pd.DataFrame:
    """Where a step's time goes: the mean over timed steps of the slowest rank's parts.

    Means, so that the parts add up to the mean step; one row per trial and part.  Where exposed
    communication was not measured (peers), it stays inside forward and backward.
    """
    slowest = _slowest(_timed(frames))
    forward = slowest["exposed_forward"].astype(float)
    backward = slowest["exposed_backward"].astype(float)
    parts = pd.DataFrame(
        {
            "id": slowest["id"],
            "forward": slowest["forward"] - forward.fillna(0),
            "exposed in forward": forward,
            "backward": slowest["backward"] - backward.fillna(0),
            "exposed in backward": backward,
            "optimizer": slowest["optimizer"],
            "other": slowest["total"] - slowest["forward"] - slowest["backward"] - slowest["optimizer"],
        }
    )
    means = parts.groupby("id").mean()
    means["other"] = means["other"].clip(lower=0)
    long = means.reset_index().melt(id_vars="id", var_name="part", value_name="seconds")
    return long.dropna(subset=["seconds"])


VOLUME_PARTS: Final = ("gather in forward", "gather in backward", "gradients", "control")


def volume(frames: Frames, table: pd.DataFrame) -> pd.DataFrame:
    """Bytes between nodes per step by part, ledger, all ranks: one row per trial and part."""
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
    sums = between.assign(part=part).groupby(["id", "part"], as_index=False)["bytes"].sum()
    sums["bytes"] = sums["bytes"] / sums["id"].map(steps)
    kept = ["id", "strategy", "contender", "place", "nodes", "ranks_per_node", "model", "accumulation"]
    kept += ["m_bytes", "predicted_bytes", "interface_bytes", "sent_bytes", "where", "cell"]
    found = table[kept].merge(sums, on="id", how="inner")
    return found.assign(m=found["bytes"] / found["m_bytes"])


def spared(frames: Frames, table: pd.DataFrame) -> pd.DataFrame:
    """What each technique spares against flat collectives in 16 bits, in bytes per step.

    From ``impl.traffic`` on the record's own units; every policy in turn is changed from flat
    (ring) collectives in 16 bits to hops by node, then given its hpZ copy, then its codecs:

        ``hops``        flat - hierarchical in 16 bits
        ``copy``        hierarchical - with the hpZ copy, in 16 bits
        ``quantising``  with the hpZ copy in 16 bits - the policy itself
        ``sent``        what is left

    One row per trial and part; trials of peers and trials on one node are left out.
    """
    rows: list[dict[str, object]] = []
    for trial in table[table["nodes"] > 1].itertuples():
        ran = frames.ran[str(trial.id)]
        policy = ran.resolved_policy()
        if policy is None:
            continue
        topology = ran.topology()
        units = [UnitGeometry(n, (), padded, topology.world) for n, _, padded in frames.units[str(trial.id)]]
        raw_codecs = {"weights": BF16, "gradients": (BF16, BF16)}
        ladder = (
            replace(policy, **raw_codecs, secondary=0, gather="flat", reduce="flat"),  # type: ignore[arg-type]
            replace(policy, **raw_codecs, secondary=0),  # type: ignore[arg-type]
            replace(policy, **raw_codecs),  # type: ignore[arg-type]
            policy,
        )
        sent = [_sent_between(p, topology, units, ran.accumulation) for p in ladder]
        parts = {
            "sent": sent[3],
            "quantising": sent[2] - sent[3],
            "copy": sent[1] - sent[2],
            "hops": sent[0] - sent[1],
        }
        rows += [{"id": trial.id, "part": part, "bytes": size} for part, size in parts.items()]
    found = pd.DataFrame(rows, columns=["id", "part", "bytes"])
    kept = table[
        ["id", "strategy", "contender", "place", "nodes", "ranks_per_node", "model", "m_bytes", "cell"]
    ]
    merged = kept.merge(found, on="id", how="inner")
    return merged.assign(m=pd.to_numeric(merged["bytes"]) / merged["m_bytes"])


def _sent_between(policy: Policy, topology: Topology, units: list[UnitGeometry], micro_batches: int) -> int:
    load = Load(micro_batches=micro_batches)
    return sum(
        sent.bytes
        for rank in range(topology.world)
        for key, sent in predict(policy, topology, units, rank, load).items()
        if key.link == "inter"
    )


def memory(frames: Frames, table: pd.DataFrame) -> pd.DataFrame:
    """Bytes per rank by part, engine beside formula: the largest rank of each trial."""
    largest = frames.memory.groupby(["id", "source", "part"], as_index=False)["bytes"].max()
    kept = ["id", "strategy", "contender", "place", "where", "cell", "secondary", "seed", "repeat"]
    return table[kept].merge(largest, on="id", how="inner")


def codecs(frames: Frames, table: pd.DataFrame) -> pd.DataFrame:
    """Error of integer codecs by bits and block: one row per trial, purpose, unit and codec."""
    found = frames.quantisation.merge(table[["id", "contender", "strategy", "seed", "repeat"]], on="id")
    return _with_codec(found, "codec")


SWEPT: Final = ("weights", "gradients", "gradients inside a node", "gradients between nodes", "both")
_CODECS: Final = ("weights", "gradients_local", "gradients_node")


def sweeps(table: pd.DataFrame, axis: str) -> pd.DataFrame:
    """Trials between which the ``bits`` or the ``block`` of a codec changes and all else stays.

    Args:
        table: from :func:`trials`.
        axis: ``bits`` or ``block``.

    Returns:
        ``table`` with ``swept`` (one of :data:`SWEPT`), ``line`` (what is held fixed, told),
        ``bits`` and ``block`` of the swept codec.
    """
    fixed = "block" if axis == "bits" else "bits"
    parsed = {column: [_integer(text) for text in table[column]] for column in _CODECS}
    told: dict[str, tuple[str, ...]] = {
        "both": _CODECS,
        "weights": ("weights",),
        "gradients": ("gradients_local", "gradients_node"),
        "gradients inside a node": ("gradients_local",),
        "gradients between nodes": ("gradients_node",),
    }
    parts: list[pd.DataFrame] = []
    taken: set[str] = set()  # trials whose changes a wider sweep explains
    for swept, columns in told.items():
        rows = []
        for place, identity in enumerate(table["id"]):
            codecs = [parsed[column][place] for column in columns]
            values = {getattr(codec, axis, None) for codec in codecs}
            if None in values or len(values) > 1 or identity in taken:
                continue
            lead = codecs[0]
            held = [str(getattr(codec, fixed)) for codec in codecs]
            held += [str(table[column].iloc[place]) for column in _CODECS if column not in columns]
            rows.append({"at": place, "bits": lead.bits, "block": str(lead.block), "held": "|".join(held)})  # type: ignore[union-attr]  # None is not in values
        if not rows:
            continue
        found = pd.DataFrame(rows)
        found = table.iloc[found["at"].tolist()].reset_index(drop=True).join(found)
        keys = ["cell", "strategy", "secondary", "held"]
        found = found[found.groupby(keys)[axis].transform("nunique") >= 2]
        line = found[fixed].map(lambda value: f"{value} bits" if fixed == "bits" else f"blocks of {value}")
        parts.append(found.assign(swept=swept, line=line))
        taken |= set(found["id"])
    if not parts:
        return table.iloc[:0].assign(swept="", line="", bits=0, block="")
    return pd.concat(parts, ignore_index=True)


def _with_codec(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Rows whose ``column`` names a symmetric or asymmetric integer codec, with bits and block."""
    parsed = [
        parse(text) if isinstance(text, str) and text.startswith("int") else None for text in rows[column]
    ]
    kept = rows.loc[np.array([codec is not None for codec in parsed], dtype=bool)].copy()
    found = [codec for codec in parsed if isinstance(codec, IntCodec)]
    kept["bits"] = [codec.bits for codec in found]
    kept["block"] = [str(codec.block) for codec in found]
    kept["asymmetric"] = [codec.asymmetric for codec in found]
    return kept


def _integer(text: object) -> IntCodec | None:
    try:
        codec = parse(str(text))
    except CodecError:
        return None
    return codec if isinstance(codec, IntCodec) else None


@dataclass(frozen=True)
class Derived:
    """Raw tables and what every figure needs of them, computed once.

    Attributes:
        frames: raw tables.
        trials: from :func:`trials`.
        pairs: from :func:`pairs`.
        differing: from :func:`rates_differ`.
    """

    frames: Frames
    trials: pd.DataFrame
    pairs: pd.DataFrame
    differing: dict[str, float]


def derive(frames: Frames) -> Derived:
    """Everything that figures and tables start from."""
    table = trials(frames)
    return Derived(frames, table, pairs(table), rates_differ(table))
