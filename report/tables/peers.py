"""Makes the table of peers, which compares steps of our policies with steps of DDP, FSDP2 and DeepSpeed."""

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
    """Return the table that compares steps of our policies with steps of peers, in each setting.

    Peers are DDP, FSDP2 and DeepSpeed; a setting is the cluster, model, batch and so on.  Policies and peers that
    compute and send in the same data types are compared (:func:`shared_types`).  The row of a policy has one speed-up
    for each library: the smallest of its speed-ups over the library's configurations.
    """
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
        "policies that quantise are compared with peers that send bf16. Each speed-up is a geometric mean over pairs "
        "of trials, and is followed by the name of the library's configuration over which it is smallest.",
    )  # fmt: skip


def ours_over_peers(derived: Derived) -> dict[str, list[Interval]]:
    """Return, by the description of each setting, our speed-ups over the best configuration of each library.

    A setting is the cluster, model, batch and so on.  There is one speed-up for each of our configurations and each
    library (DDP, FSDP2 and DeepSpeed).  It is over the library's configuration that gives the smallest speed-up.
    On CPUs, libraries send over gloo alone.  Therefore only the speed-ups of our configurations that also send over
    gloo alone are returned.  If there are none, the speed-ups of all our configurations are returned.
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
    """Return the types of a trial's messages as text: ``fp32``, ``bf16``, ``int8 and int4``."""
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
    """Return the data types of a trial as text: ``bf16``, or ``fp32, sent as bf16``.

    The text names the type in which the trial computes and, if the trial sends another type, this type.  A trial of
    ours is compared with those trials of a library for which this function returns the same text.  A policy that
    quantises counts as sending bf16, so that it is compared with bf16 trials: no library sends fewer bits.
    """
    compute, sent = (trial.resolved_policy() or trial.peer).compute, sent_types(trial)
    sent = sent if sent in ("fp32", "bf16", "bf16 and fp32") else "bf16"
    return sent if sent == compute else f"{compute}, sent as {sent}"


def carried_by(trial: Trial) -> str:
    """Return the transport of a trial's messages as text: ``gloo alone``, ``shm``, ``shm, gloo``, ``nccl``, ``staged``.

    ``shm`` is shared memory, which carries our engine's messages inside a node on CPUs.  Messages of libraries such as
    DDP never go through shared memory.  ``staged`` is the transport of ranks that share a GPU.
    """
    transport = trial.cluster.transport
    if transport in ("nccl", "staged"):
        return transport
    if transport == "gloo" or trial.strategy in PEERS:
        return "gloo alone"
    return "shm, gloo" if trial.cluster.nodes > 1 else "shm"


def _rows(setting: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the table's rows for ``setting``: trials of one setting (cluster, model, batch) and the same types.

    Each configuration has a row.  Libraries come first, then our policies by transport: policies over gloo alone
    precede policies with shared memory.
    """
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
    """Return the cells of a row that compare the configuration of ``trials`` with one library (``family``).

    ``peer_rows`` are the library's trials in the same setting.  The speed-up over each configuration of the library is
    computed; the cells hold the smallest of these speed-ups, and the name of the library's configuration over which it
    is smallest.  There is no speed-up if ``trials`` are a library's own, or if no trial of the library ran under the
    same conditions.
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
