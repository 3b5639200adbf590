"""The table of peers: steps of our policies compared with the best of DDP, FSDP2 and DeepSpeed."""

from __future__ import annotations

from typing import Any, Final

import pandas as pd

from harness.records.confidence_intervals import Interval
from harness.suites.peers import PEERS, family_of
from harness.suites.trial import Trial
from report.data import speedups
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import listed
from report.tables.table import CONFIGURATION, RATIO, STEP, TRIALS, Column, Table, table_of, trial_count

FAMILIES: Final = {"ddp": "DDP", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed"}


def peers(derived: Derived) -> Table:
    """Return the table of peers and our policies by setting, with each policy's speed-up over each library's best."""
    ran = [derived.frames.trial_of[identity] for identity in derived.trials["id"]]
    trials = derived.trials.assign(
        where=derived.trials["where"].str.replace(r", transport [^,]*", "", regex=True),
        types=[shared_types(trial) for trial in ran],
        carried=list(map(carried_by, ran)),
        family=[family_of(trial.strategy) or "" for trial in ran],
    )
    rows = [
        row
        for _, setting in groups(trials[trials["family"] != "single"], ["where", "types"])
        if 0 < (setting["family"] != "").sum() < len(setting)
        for row in _rows(setting)
    ]
    return table_of(
        "peers",
        "Steps compared with peers",
        rows,
        CONFIGURATION,
        Column(
            "carried", "Carried by",
            says="Carried by: the transport of the messages. Peers send over gloo alone. Our policies that do so too "
            "come first, so that like is compared with like; policies that use shared memory inside nodes follow.",
        ),
        TRIALS,
        STEP,
        *(Column(f"over_{family}", f"Over best {name}", RATIO, mark=f"_{family}")
          for family, name in FAMILIES.items()),
        caption="Steps of our policies, compared with peers that compute in the same type and send the same type; "
        "policies that quantise are compared with peers that send bf16. Each speed-up is a geometric mean over pairs; "
        "the peer's configuration that it was computed against, the hardest one to beat, follows it.",
    )  # fmt: skip


def ours_over_peers(derived: Derived) -> dict[str, list[Interval]]:
    """Return our speed-ups over the best configuration of each library by setting, one for each of our rows.

    If policies of ours ran over gloo alone, as the libraries do, only the speed-ups of these are returned.
    """
    rows = peers(derived).data
    if rows.empty:
        return {}
    alike = rows[rows["carried"].eq("gloo alone")]
    columns = [f"over_{family}" for family in FAMILIES if f"over_{family}" in rows]

    def speedups_of(some: pd.DataFrame) -> dict[str, list[Interval]]:
        found = {
            str(where): [value for name in columns for value in own[name] if isinstance(value, Interval)]
            for (where,), own in groups(some, ["where"])
        }
        return {where: values for where, values in found.items() if values}

    return speedups_of(alike) or speedups_of(rows)


def sent_types(trial: Trial) -> str:
    """Return the types that a trial sends, in words: ``fp32``, ``bf16``, ``int8 and int4``."""
    policy = trial.resolved_policy()
    if policy is None:
        return PEERS[trial.strategy].wire(trial.peer.compute, trial.peer.reduce_dtype)
    codecs = [
        codec
        for phase in policy.phases
        for codec in (phase.weights, phase.inside or phase.weights, *phase.gradients)
    ]
    return listed(list(dict.fromkeys(str(codec).partition(":")[0] for codec in codecs)))


def shared_types(trial: Trial) -> str:
    """Return the types of the peers that a trial is compared with: ``bf16``, or ``fp32, sent as bf16``.

    They are the type in which the trial itself computes and the type that it sends; a policy that quantises is
    compared with peers that send bf16, because no peer sends less.
    """
    compute, sent = (trial.resolved_policy() or trial.peer).compute, sent_types(trial)
    sent = sent if sent in ("fp32", "bf16", "bf16 and fp32") else "bf16"
    return sent if sent == compute else f"{compute}, sent as {sent}"


def carried_by(trial: Trial) -> str:
    """Return the transport of a trial's messages in a word or two; messages of peers never go through shared memory."""
    transport = trial.cluster.transport
    if transport in ("nccl", "staged"):
        return transport
    if transport == "gloo" or trial.strategy in PEERS:
        return "gloo alone"
    return "shm, gloo" if trial.cluster.nodes > 1 else "shm"


def _rows(setting: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of one setting and type: peers, then our policies by transport, gloo alone first."""
    is_peer = setting["family"] != ""
    peer_rows, policy_rows = setting[is_peer], setting[~is_peer].sort_values("carried", kind="stable")
    rows, keys = [], ["where", "configuration", "carried", "types"]
    for key, trials in groups(pd.concat([peer_rows, policy_rows]), keys):
        row = dict(zip(keys, key, strict=True)) | trial_count(trials)
        row["step_seconds"] = speedups.step_interval(trials)
        for family in FAMILIES:
            row |= _over(trials, peer_rows[peer_rows["family"] == family], family)
        rows.append(row)
    return rows


def _over(trials: pd.DataFrame, peer_rows: pd.DataFrame, family: str) -> dict[str, Any]:
    """Return the smallest speed-up of our trials over a configuration of a library, with this configuration's name.

    Both are cells of the table's row.

    There is no speed-up if the ``trials`` are a peer's own, or if they have no pairs with the library's.
    """
    keys = ["sweep", "seed", "repeat"]
    gains = []
    for (name,), peer in groups(peer_rows, ["configuration"]) if trials["family"].iloc[0] == "" else []:
        base = peer.drop_duplicates(keys)[[*keys, "step_seconds", "disturbed"]]
        names = {"step_seconds": "baseline_seconds", "disturbed": "baseline_disturbed"}
        paired = trials.merge(base.rename(columns=names), on=keys)
        paired["disturbed"] = paired["disturbed"].astype(bool) | paired["baseline_disturbed"].astype(bool)
        gains += [(speedups.speedup(paired), str(name))] if len(paired) else []
    if not gains:
        return {f"_{family}": ""}
    least, name = min(gains, key=lambda gain: gain[0].estimate)
    return {f"over_{family}": least, f"best_{family}": name, f"_{family}": f", {name}"}
