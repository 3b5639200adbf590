"""Makes the two main tables: the summary, and the table that compares step times with their lower bounds."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Final

import pandas as pd

from harness.records.confidence_intervals import Interval
from harness.suites import labels
from report.data import caveats, metrics, speedups
from report.data.configuration import BASELINE, FLAT_FACTOR, NAMES, short_names_in_words
from report.data.metrics import Derived
from report.data.text import NOTHING, counted, number, span
from report.effects import loss_verdicts
from report.quantities import formula
from report.tables.table import CONFIGURATION, RATIO, STEP, TRIALS, Column, Table, rows_of, table_of

_MEDIANS: Final = [
    "compute_seconds", "wire_seconds", "exposed_seconds", "schedule_seconds", "processor_seconds",
    "best_seconds", *metrics.SHARES, "achieved_mbit", "m_bytes",
]  # fmt: skip
# Rates that are recomputed from the printed step, so that the numbers of a row fit each other.
_PER_SECOND: Final = ("tokens_per_second", "tflops")


def summary(derived: Derived) -> Table:
    """Return the table Summary, one row per setting and configuration: times, speed-up, bytes and loss."""
    rows, base, two = _rows(derived), derived.compared.baseline, len(derived.over_papers) > 0
    best = f"the hierarchical {NAMES[BASELINE]}" if two and not derived.compared.named_in_suite else base
    steps = derived.trials["validation_step"].dropna()
    after = f", after {span(steps, 'step')}" if len(steps) else ""
    loss = (
        "Validation loss: cross-entropy in nats on data held back from training, at the end of each trial"
        f"{after}; mean over seeds, where repeats of a seed count as one value; lower is better."
    )
    papers = formula("over the paper's baseline") + f" {FLAT_FACTOR}."
    return table_of(
        "summary",
        "Summary",
        rows,
        CONFIGURATION,
        TRIALS,
        STEP,
        Column("tokens_per_second", "Tokens/s", number(3)),
        Column("speedup", f"Speed-up over {best}", RATIO, formula("speed-up"), "_rates"),
        Column("over_papers", "over the paper's baseline", RATIO, papers),
        Column(
            "_pairs",
            "Pairs",
            str,
            "Pairs: the number of pairs of trials, without pairs left out, and their lowest and highest speed-up.",
        ),
        Column("share", "Best possible step/step", caveats.share, formula("best possible step/step")),
        Column("sent_mb", "Sent, MB/step", number(3), formula("sent"), "_sent"),
        Column("bytes_ratio", f"of {base}'s", number(3)),
        Column("validation_loss", "Validation loss, mean", number(4), loss),
        caption=f"Each configuration compared with {base}: time, bytes and, if the suite asks for it, loss. Columns "
        "for which this page gives no definition are medians over trials.",
        notes=f"{caveats.alone_in_words(derived)}{short_names_in_words(row['configuration'] for row in rows)}",
    )


def time(derived: Derived) -> Table:
    """Return the table of step times, their lower bounds, and who used the processors.

    It has one row per setting (cluster, model, batch and so on) and configuration.
    """
    taken = formula("others' share", "steal share", "taken by others")
    if derived.trials["taken_share"].isna().any():
        taken += (
            f" {NOTHING}: not recorded, because the system has no /proc/stat, ranks may have run on several machines, "
            "or the record is older than this measurement."
        )
    return table_of(
        "time",
        "Time and processors",
        _rows(derived),
        CONFIGURATION,
        TRIALS,
        STEP,
        Column("exposed_seconds", "Exposed, s", number(2), formula("exposed communication")),
        Column("share", "Best possible step/step", caveats.share, formula("best possible step")),
        Column("schedule_share", "Scheduled step/step", caveats.share, formula("scheduled step")),
        Column("ideal_share", "Ideal step/step", caveats.share, formula("ideal step")),
        Column("processors_busy", "Processors busy", caveats.share, formula("processors busy")),
        Column("taken_share", "Taken by others", "{:.1%}".format, taken),
        Column(
            "tflops",
            "TFLOP/s",
            number(2),
            "TFLOP/s: model FLOPs of a rank per second, without recomputation.",
        ),
        caption="How close each step comes to the shortest possible step, and who used the processors. "
        "Columns for which this page gives no definition are medians over trials.",
        notes=caveats.alone_in_words(derived),
    )


@lru_cache(maxsize=1)  # both tables ask for them
def _rows(derived: Derived) -> list[dict[str, Any]]:
    return [row | _row(derived, trials) for row, trials in rows_of(derived.trials)]


def _row(derived: Derived, trials: pd.DataFrame) -> dict[str, Any]:
    paired, over = (pairs[pairs["id"].isin(trials["id"])] for pairs in (derived.pairs, derived.over_papers))
    timed, timed_pairs = speedups.undisturbed(trials), speedups.undisturbed(paired)
    step, speedup = speedups.step_interval(trials), speedups.over_itself(paired)
    ledger, interface = (trials[name].median() / 1e6 for name in ("sent_bytes", "interface_bytes"))
    by_interfaces = math.isnan(ledger) and not math.isnan(interface)
    mark = f" {labels.INTERFACES}" if by_interfaces else ""
    row: dict[str, Any] = {
        "step_seconds": step,
        **timed[_MEDIANS].median(),
        **{key: (timed[key] * timed["step_seconds"]).median() / step.estimate for key in _PER_SECOND},
        "validation_loss": loss_verdicts.over_seeds(trials).estimate,
        **{key: trials[key].max() for key in ("others_share", "steal_share", "taken_share")},
        "sent_mb": interface if by_interfaces else ledger,
        "_sent": mark + labels.pad_mark(float(trials["padding_share"].max())),
        "speedup": speedup,
        "_rates": caveats.rates(trials),
        "pairs": len(timed_pairs),
        "_pairs": NOTHING,
        **paired[["bytes_ratio", "interface_ratio"]].median(),
        "over_papers": speedups.over_itself(over),
    }
    if isinstance(speedup, Interval) and not paired["id"].eq(paired["baseline"]).all():
        lowest, highest = timed_pairs["speedup"].min(), timed_pairs["speedup"].max()
        between = f": {lowest:.2f} to {highest:.2f}" if len(timed_pairs) > 1 else ""
        at = f" at {counted(speedup.occasions, 'occasion')}" if speedup.occasions > 1 else ""
        row |= {
            "pairs_lowest": lowest,
            "pairs_highest": highest,
            "_pairs": f"{len(timed_pairs)}{at}{between}" if timed_pairs["speedup"].notna().any() else NOTHING,
        }
    return row
