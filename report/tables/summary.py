"""The two main tables: the summary, and the time of a step against its bounds."""

from __future__ import annotations

import math
from typing import Any, Final

import pandas as pd

from harness.records.confidence_intervals import FEWEST, Interval
from harness.suites import labels
from report.data import footnotes, metrics
from report.data.contender import BASELINE, FLAT_FACTOR, PAPERS_BASELINE, name_of, short_names_in_words
from report.data.metrics import Derived
from report.data.text import NOTHING, counted, number, span, sweeps_in_words
from report.tables.columns import CONTENDER, RATIO, STEP, TRIALS, rows_of
from report.tables.table import Column, Table, made

_MEDIANS: Final = (
    "compute_seconds", "wire_seconds", "exposed_seconds", "schedule_seconds", "processor_seconds",
    "best_seconds", *metrics.SHARES, "achieved_mbit", "validation_loss", "m_bytes",
)  # fmt: skip
_PER_SECOND: Final = ("tokens_per_second", "tflops")  # of the median step: with two, no median of their own
_PAPERS_IN_WORDS: Final = (
    f"Over the paper's baseline: the same over {name_of(PAPERS_BASELINE)}, one ring over all ranks for "
    f"gathers and reductions, in 16 bits, as ZeRO++ was compared with; the best {name_of(BASELINE)} goes "
    f"between nodes and inside them by hops of their own. {FLAT_FACTOR}."
)


def summary(derived: Derived) -> Table:
    """The summary, one row per cell and contender: times, speed-up, bytes, loss."""
    rows, two, base = _rows(derived), bool(len(derived.over_papers)), derived.compared.baseline
    best = f"the best {name_of(BASELINE)}" if two and not derived.compared.asked else base
    steps = derived.trials["validation_step"].dropna()
    return made(
        "summary",
        "Summary",
        rows,
        CONTENDER,
        TRIALS,
        STEP,
        Column("tokens_per_second", "Tokens/s", number(3)),
        Column(
            "speedup", f"Speed-up over {best}", RATIO,
            "Speed-up: geometric mean of the pairs' ratios with its 95 % interval, Student's t on their "
            f"logarithms, from {FEWEST} pairs on; 'Pairs' has their number and the range in which they lie."
            f"{sweeps_in_words(derived.trials['sweep'])}",
            "_rates",
        ),
        *([Column("over_papers", "over the paper's baseline", RATIO, _PAPERS_IN_WORDS)] if two else []),
        Column("_pairs", "Pairs", str),
        Column(
            "share", "Allowed step/step", footnotes.share,
            "Allowed step/step: the shortest step that schedule, link and processors allow, over the "
            "measured one (the table Time and processors has a column for each)."
            f"{footnotes.alone_in_words(derived)}",
        ),
        Column(
            "sent_mb", "Sent, MB/step", number(3),
            "Sent: by all ranks between nodes in training (ledger)."
            f"{short_names_in_words(row['contender'] for row in rows)}",
            "_sent",
        ),
        Column("bytes_ratio", f"of {base}'s", number(3)),
        Column(
            "validation_loss", "Validation loss", number(4),
            "Validation loss: mean cross-entropy, in nats, on data held back from training, at the end of "
            f"each trial, after {span(steps, 'step') if len(steps) else ''}; less is better.",
        ),
        notes=f"Other columns: medians. {_above_in_words(derived, rows, 'share')}",
    )  # fmt: skip


def time(derived: Derived) -> Table:
    """Step time, one row per cell and contender: measured against its bounds, and CPU usage."""
    rows = _rows(derived)
    unknown = (
        f" ({NOTHING}: not on record: the system has no /proc/stat, ranks may have stood on several "
        "machines, or the record is older)"
        if derived.trials["taken_share"].isna().any()
        else ""
    )
    return made(
        "time",
        "Time and processors",
        rows,
        CONTENDER,
        TRIALS,
        STEP,
        Column("exposed_seconds", "Exposed, s", number(2), "Exposed: communication waited for."),
        Column("share", "Allowed step/step", footnotes.share),
        Column(
            "schedule_share", "Scheduled step/step", footnotes.share,
            "Step/step: a possible step over the measured one. Scheduled: the step that the engine's order "
            "of gathers and reductions would take with this computation and these bytes on this link if "
            "every rank had a processor of its own.",
        ),
        Column("ideal_share", "Ideal step/step", footnotes.share),
        Column(
            "processors_busy", "Processors busy", footnotes.share,
            "Processors busy: of the step in which the processors, never idle, could compute what the ranks "
            "did; not known on GPUs and of older records. Allowed: the longer of these two. Ideal: "
            f"max(compute, wire), which no schedule reaches.{footnotes.alone_in_words(derived)}",
        ),
        Column(
            "taken_share", "Taken by others", footnotes.part,
            "Taken by others: what other programs, and the machine's host, had of the processors' time, in "
            f"the trial in which it was most{unknown}.",
        ),
        Column(
            "tflops", "TFLOPs", number(2),
            "TFLOPs: of the model, per rank, by Megatron's formula without recomputation.",
        ),
        notes=f"Other columns: medians. {_above_in_words(derived, rows, *metrics.SHARES)}",
    )  # fmt: skip


def _above_in_words(derived: Derived, rows: list[dict[str, Any]], *keys: str) -> str:
    """Why shares are above 1, where one is printed so."""
    if not any(round(row[key], 2) > 1 for row in rows for key in keys):
        return ""
    return footnotes.above_in_words(derived.trials[[*metrics.SHARES[1:], "alone"]])


def _rows(derived: Derived) -> list[dict[str, Any]]:
    pairs, over = derived.pairs, derived.over_papers
    return [
        row | _row(mine, pairs[pairs["id"].isin(mine["id"])], over[over["id"].isin(mine["id"])])
        for row, _, mine in rows_of(derived.trials)
    ]


def _row(mine: pd.DataFrame, paired: pd.DataFrame, over: pd.DataFrame) -> dict[str, Any]:
    step, speedup = metrics.step_interval(mine), metrics.over_itself(paired)
    ledger, interface = (mine[name].median() / 1e6 for name in ("sent_bytes", "interface_bytes"))
    counted_there = math.isnan(ledger) and not math.isnan(interface)  # by the interfaces alone
    row: dict[str, Any] = {
        "step_seconds": step,
        **{key: mine[key].median() for key in _MEDIANS},
        **{key: (mine[key] * mine["step_seconds"]).median() / step.estimate for key in _PER_SECOND},
        **{key: mine[key].max() for key in ("others_share", "steal_share", "taken_share")},
        "sent_mb": interface if counted_there else ledger,
        "_sent": (f" {labels.INTERFACES}" if counted_there else "")
        + labels.padded(float(mine["padding_share"].max())),
        "speedup": speedup,
        "_rates": footnotes.rates(mine),
        "pairs": len(paired),
        "_pairs": NOTHING,
        **{key: paired[key].median() for key in ("bytes_ratio", "interface_ratio")},
        "over_papers": metrics.over_itself(over),
    }
    if len(paired) and not paired["id"].eq(paired["baseline"]).all():
        assert isinstance(speedup, Interval)  # noqa: S101  # there are pairs
        lowest, highest = paired["speedup"].min(), paired["speedup"].max()
        between = f": {lowest:.2f} to {highest:.2f}" if len(paired) > 1 else ""
        sweeps = f" in {counted(speedup.sweeps, 'sweep')}" if speedup.sweeps > 1 else ""
        row |= {"pairs_lowest": lowest, "pairs_highest": highest, "_pairs": f"{len(paired)}{sweeps}{between}"}
    return row
