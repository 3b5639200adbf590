"""The table of peers: our steps beside the best of DDP, FSDP2 and DeepSpeed, on their own transport first."""

from __future__ import annotations

import math
from typing import Any, Final

import pandas as pd

from harness.records.confidence_intervals import Interval
from harness.suites.peers import PEERS, family_of
from harness.suites.trial import PeerSettings, PolicyChanges, Trial
from report.data import footnotes, metrics
from report.data.contender import BASELINE
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import NOTHING, number
from report.tables.table import Column, Table, placed

FAMILIES: Final = {"ddp": "DDP", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed"}
_CAPTION: Final = (
    "Step: geometric mean over repeats and seeds. Over a peer: its step over ours, geometric mean over pairs "
    "with its interval, of the setting of that peer over which we gain least, which is named; both compute "
    "in the same type. Carried by: peers send over gloo, so ours over gloo alone stand first, on the same "
    "footing; "
    "then ours with shared memory inside nodes."
)


def peers(derived: Derived) -> Table:
    """Table of peers and policies in each setting, with our gain over the best of each family."""
    found = derived.trials.assign(
        **{
            name: [of(derived.frames.ran[identity]) for identity in derived.trials["id"]]
            for name, of in (("elsewhere", _setting), ("compute", _compute), ("carried", carried_by))
        },
        family=[family_of(strategy) or "" for strategy in derived.trials["strategy"]],
    )
    rows = [
        row
        for _, here in groups(found[found["family"] != "single"], ["elsewhere", "compute"])
        if (here["family"] != "").any() and (here["family"] == "").any()
        for row in _rows(here)
    ]
    if not rows:
        return Table("peers", "Beside peers", "", pd.DataFrame(), ())
    columns = (
        Column("contender", "Contender"),
        Column("carried", "Carried by"),
        Column("trials_told", "n", str),
        Column("step_seconds", "Step, s", number(3)),
        *(Column(f"over_{name}_told", f"Over best {title}", str) for name, title in FAMILIES.items()),
    )
    caption = f"{_CAPTION}{footnotes.in_words(str(row['trials_told']) for row in rows)}"
    return placed("peers", "Beside peers", caption, rows, *columns)


def carried_by(trial: Trial) -> str:
    """What carries a trial's messages, in a word or two; a peer's never go through shared memory."""
    transport = trial.cluster.transport
    if transport in ("nccl", "staged"):
        return transport
    if transport == "gloo" or trial.strategy in PEERS:
        return "gloo alone"
    return "shm, gloo" if trial.cluster.nodes > 1 else "shm"


def _rows(here: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of one setting and type: peers, then ours by what carries them, gloo alone first."""
    theirs = here[here["family"] != ""]
    ours = here[here["family"] == ""].sort_values("carried", kind="stable")  # gloo alone, nccl, shm
    rows = []
    for _, mine in groups(pd.concat([theirs, ours]), ["contender", "carried"]):
        first = mine.iloc[0]
        where = [part for part in str(first["where"]).split(", ") if not part.startswith("transport ")]
        row = {
            "where": ", ".join(where),
            **{name: first[name] for name in ("contender", "carried", "compute")},
            "trials": len(mine),
            "trials_told": footnotes.trials(mine),
            "step_seconds": metrics.step_interval(mine).estimate,
        }
        for family in FAMILIES:
            row |= _over(mine, theirs[theirs["family"] == family], family) if first["family"] == "" else {}
            row.setdefault(f"over_{family}_told", NOTHING)
        rows.append(row)
    return rows


def _over(mine: pd.DataFrame, peer: pd.DataFrame, family: str) -> dict[str, Any]:
    """Our gain over the setting of a family over which it is least; nothing if none ran beside us."""
    keys = ["sweep", "seed", "repeat"]
    found: list[tuple[Interval, str]] = []
    for (name,), theirs in groups(peer, ["contender"]):
        base = theirs.drop_duplicates(keys)[[*keys, "step_seconds"]]
        paired = mine.merge(base.rename(columns={"step_seconds": "baseline_seconds"}), on=keys)
        if len(paired):
            found.append((metrics.speedup(paired), str(name)))
    if not found:
        return {}
    least, name = min(found, key=lambda one: one[0].estimate)
    told = f"{least.estimate:.2f}"
    if not math.isnan(least.low):
        told += f" ({least.low:.2f} to {least.high:.2f})"
    key = f"over_{family}"
    values = {key: least.estimate, f"{key}_low": least.low, f"{key}_high": least.high, f"best_{family}": name}
    return values | {f"{key}_told": f"{told}, {name}"}


def _compute(trial: Trial) -> str:
    policy = trial.resolved_policy()
    return trial.peer.compute if policy is None else policy.compute


def _setting(trial: Trial) -> str:
    """Hash of what a trial and its peers have in common: neither who ran, nor over which transport."""
    cluster = trial.cluster.model_copy(update={"transport": "shm"})
    common = {
        "strategy": BASELINE, "policy": PolicyChanges(), "peer": PeerSettings(), "deepspeed_config": None,
        "seed": 0, "repeat": 0, "cluster": cluster, "measure_quantisation": False, "validate_every": None,
        "timeout_seconds": 600.0,
    }  # fmt: skip
    return trial.model_copy(update=common).id
