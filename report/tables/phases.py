"""Makes the table of the seconds and bytes of workload ``rlhf`` by phase (generation, scoring, training).

Published throughputs follow the measured rows.
"""

from __future__ import annotations

import math
from typing import Any, Final

import pandas as pd

from harness.records.confidence_intervals import Interval
from report.data import published
from report.data.configuration import is_baseline, with_baseline
from report.data.frames import groups
from report.data.metrics import Derived, slowest_steps, timed_steps
from report.data.speedups import PAIR, speedup, step_interval, undisturbed
from report.data.text import number
from report.effects.effects import Effect, Key, verdict_on
from report.tables.table import CONFIGURATION, RATIO, TRIALS, Column, Table, rows_of, table_of

NOUNS: Final = {"generate": "generation", "score": "scoring", "train": "training"}
PHASES: Final = tuple(NOUNS)
_PUBLISHED: Final = {"generation": "generate", "training": "train"}


def phases(derived: Derived) -> Table:
    """Return the table of the seconds and bytes of each phase of an RLHF step: generation, scoring and training.

    Rows with the throughputs that the ZeRO++ blog published follow the measured rows.
    """
    ran = bool(derived.frames.steps["generate"].notna().any())
    table = by_phase(derived) if ran else derived.trials.iloc[:0].assign(phase="")
    rows: list[dict[str, Any]] = [
        {
            **row,
            "phase": phase,
            "seconds": step_interval(trials, "seconds"),
            "speedup": over_baseline(paired)
            if len(paired := trials.dropna(subset=["baseline_seconds"]))
            else math.nan,
            "exposed": undisturbed(trials)["exposed"].median(),
            "inter_mb": trials["inter_bytes"].median() / 1e6,
            "bytes_ratio": (trials["inter_bytes"] / trials["baseline_bytes"]).median(),
            "intra_mb": trials["intra_bytes"].median() / 1e6,
        }
        for phase in PHASES
        for row, trials in rows_of(table[table["phase"] == phase])
    ]
    rows += [
        cells | {"phase": _PUBLISHED[row["phase"]], "published": f"{row[name]:g} {row['unit']}"}
        for cells, row, name in published.rows_below(rows, *_PUBLISHED)
    ]
    base = derived.compared.baseline if rows else ""
    return table_of(
        "phases",
        "RLHF by phase",
        rows,
        Column("phase", "Phase"),
        CONFIGURATION,
        TRIALS,
        Column(
            "seconds", "Seconds", number(3),
            "Seconds: time of the phase in a step, on the slowest rank; median over the steps of a trial, geometric "
            "mean over trials.",
            of_trials=True,
        ),
        Column("speedup", f"over {base}'s", RATIO),
        Column("exposed", "Exposed share", number(2)),
        Column("inter_mb", "Between nodes, MB", number(4), "Bytes: what all ranks send in one step, by the ledger."),
        Column("bytes_ratio", f"of {base}'s", number(3)),
        Column("intra_mb", "Inside nodes, MB", number(4)),
        Column("published", "Published rate"),
        caption="Generate: the actor decodes. Score: the frozen reference and reward models evaluate what the actor "
        "decoded; train: the rest of the step.",
        notes="Published rates are from the RLHF figure of the ZeRO++ blog, with other batches and models. Its "
        "generation is that of step 3 of RLHF, and its training that of step 1, supervised fine-tuning.",
    )  # fmt: skip


def over_baseline(paired: pd.DataFrame) -> Interval:
    """Return the speed-up of one configuration over its baseline in one phase of an RLHF step.

    ``paired`` are the configuration's rows of :func:`by_phase` for this phase that have a baseline.
    """
    either = paired["disturbed"].astype(bool) | paired["baseline_disturbed"].astype(bool)
    return speedup(paired.assign(disturbed=either), below="seconds")


def speeds_in(phase: str, derived: Derived) -> dict[Key, Effect]:
    """Return the speed-up of each configuration over its baseline in one phase of an RLHF step.

    The keys are (setting, configuration).  The dict is empty if steps have no phases.
    """
    if not derived.frames.steps["generate"].notna().any():
        return {}
    rows = by_phase(derived)
    rows = rows[rows["phase"].eq(phase) & rows["baseline_seconds"].notna() & ~is_baseline(rows)]
    changes = {key: over_baseline(own) for key, own in groups(rows, ["setting", "configuration"])}
    return {
        key: Effect(change, verdict_on(change, more_is_better=True), change)
        for key, change in changes.items()
    }


def by_phase(derived: Derived) -> pd.DataFrame:
    """Return one row for each trial of workload ``rlhf`` and each phase of its steps.

    The phases are ``generate``, ``score`` and ``train``, which is the rest of a step.  A row has the columns of
    ``derived.trials`` and these:

    * ``seconds``: seconds of the phase in a step on the slowest rank, median over steps;
    * ``exposed``: the share of these seconds in which the slowest rank waits for messages;
    * ``inter_bytes`` and ``intra_bytes``: bytes that all ranks send in the phase of a step, between nodes and inside
      nodes, as the ranks count them when sending;
    * ``baseline_seconds`` and ``baseline_bytes``: ``seconds`` and ``inter_bytes`` of the baseline's trial in the same
      setting, sweep, seed and repeat; NaN without such a trial.
    """
    frames = derived.frames
    steps = slowest_steps(frames).dropna(subset=["generate"])
    first = ["generate", "score", "exposed_generate", "exposed_score"]
    steps = steps.set_index("id")[[*first, "total", "exposed"]].astype(float)
    steps["train"] = steps["total"] - steps["generate"] - steps["score"]
    steps["exposed_train"] = steps["exposed"] - steps["exposed_generate"] - steps["exposed_score"]
    parts = {
        phase: steps[[phase, f"exposed_{phase}"]].set_axis(["seconds", "exposed"], axis=1) for phase in PHASES
    }
    medians = pd.concat(parts, names=["phase"]).groupby(["id", "phase"]).median()
    medians["exposed"] /= medians["seconds"]
    sent = frames.bytes[frames.bytes["source"] == "ledger"]
    sent = sent.assign(phase=sent["phase"].where(sent["phase"].isin(PHASES), "train"))
    sums = sent.pivot_table(index=["id", "phase"], columns="link", values="bytes", aggfunc="sum")
    sums = sums.reindex(index=medians.index, columns=["inter", "intra"]).astype(float).fillna(0.0)
    per_step = sums.div(timed_steps(frames), axis=0, level="id")
    medians = medians.join(per_step.set_axis(["inter_bytes", "intra_bytes"], axis=1)).reset_index()
    table = derived.trials.merge(medians, on="id")
    columns = {
        "baseline_seconds": "seconds",
        "baseline_bytes": "inter_bytes",
        "baseline_disturbed": "disturbed",
    }
    return with_baseline(table, is_baseline(table), [*PAIR, "phase"], **columns)
