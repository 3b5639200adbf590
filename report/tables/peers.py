"""The table of peers: our steps beside the best of DDP, FSDP2 and DeepSpeed, on their own transport first."""

from __future__ import annotations

from typing import Any, Final

import pandas as pd

from harness.suites.peers import PEERS, family_of
from harness.suites.trial import Trial
from report.data import speedups
from report.data.frames import groups
from report.data.metrics import Derived
from report.tables.table import CONTENDER, RATIO, STEP, TRIALS, Column, Table, table_of, trial_count

FAMILIES: Final = {"ddp": "DDP", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed"}


def peers(derived: Derived) -> Table:
    """Table of peers and policies in each setting, with our gain over the best of each family."""
    ran = [derived.frames.trial_of[identity] for identity in derived.trials["id"]]
    policies = [trial.resolved_policy() or trial.peer for trial in ran]  # a peer's type is its own
    found = derived.trials.assign(
        where=derived.trials["where"].str.replace(r", transport [^,]*", "", regex=True),
        compute=[one.compute for one in policies],
        carried=list(map(carried_by, ran)),
        family=[family_of(trial.strategy) or "" for trial in ran],
    )
    rows = [
        row
        for _, here in groups(found[found["family"] != "single"], ["where", "compute"])
        if 0 < (here["family"] != "").sum() < len(here)
        for row in _rows(here)
    ]
    return table_of(
        "peers",
        "Beside peers",
        rows,
        CONTENDER,
        Column(
            "carried", "Carried by",
            says="Carried by: peers send over gloo, so ours over gloo alone stand first, on the same "
            "footing; then ours with shared memory inside nodes.",
        ),
        TRIALS,
        STEP,
        *(Column(f"over_{name}", f"Over best {of}", RATIO, mark=f"_{name}") for name, of in FAMILIES.items()),
        notes="Over a peer: its step over ours, geometric mean over pairs with its interval, of the setting "
        "of that peer over which we gain least, which is named; both compute in the same type.",
    )  # fmt: skip


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
    rows, keys = [], ["where", "contender", "carried", "compute"]
    for key, mine in groups(pd.concat([theirs, ours]), keys):
        row = dict(zip(keys, key, strict=True)) | trial_count(mine)
        row["step_seconds"] = speedups.step_interval(mine)
        for family in FAMILIES:
            row |= _over(mine, theirs[theirs["family"] == family], family)
        rows.append(row)
    return rows


def _over(mine: pd.DataFrame, peer: pd.DataFrame, family: str) -> dict[str, Any]:
    """Our gain over the setting of a family over which it is least; nothing of a peer, or without any."""
    keys = ["sweep", "seed", "repeat"]
    found = []
    for (name,), theirs in groups(peer, ["contender"]) if mine["family"].iloc[0] == "" else []:
        base = theirs.drop_duplicates(keys)[[*keys, "step_seconds"]]
        paired = mine.merge(base.rename(columns={"step_seconds": "baseline_seconds"}), on=keys)
        found += [(speedups.speedup(paired), str(name))] if len(paired) else []
    if not found:
        return {f"_{family}": ""}
    least, name = min(found, key=lambda one: one[0].estimate)
    return {f"over_{family}": least, f"best_{family}": name, f"_{family}": f", {name}"}
