"""The two main tables: the summary, and the time of a step against its bounds."""

from __future__ import annotations

import math
from typing import Any, Final

import pandas as pd

from harness.records.confidence_intervals import FEWEST
from harness.suites import labels
from report.data import footnotes, metrics
from report.data.contender import BASELINE, NAMES, PAPERS_BASELINE, short_names_in_words
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import NOTHING, counted, number, span, sweeps_in_words
from report.draw.figure_definition import by_contender
from report.tables.table import Column, Table, placed

_MEDIANS: Final = (
    "compute_seconds", "wire_seconds", "exposed_seconds", "schedule_seconds",
    "processor_seconds", "best_seconds", *metrics.SHARES, "achieved_mbit", "validation_loss", "m_bytes",
)  # fmt: skip
_PER_SECOND: Final = ("tokens_per_second", "tflops")  # of the median step: with two, no median of their own
_OF_TIME: Final = (
    "where", "contender", "trials", "trials_told", "step_seconds", "compute_seconds", "wire_seconds",
    "exposed_seconds", "schedule_seconds", "processor_seconds", "best_seconds", *metrics.SHARES,
    "others_share", "steal_share", "taken_share", "tflops",
)  # fmt: skip


_PAPERS_IN_WORDS: Final = (
    f"Over the paper's baseline: the same over {NAMES[PAPERS_BASELINE]}, one ring over all ranks for gathers "
    f"and reductions, in 16 bits, as ZeRO++ was compared with; the best {NAMES[BASELINE]} goes between nodes "
    "and inside them by hops of their own. "
)


def summary(derived: Derived) -> Table:
    """The summary, one row per cell and contender: times, speed-up, bytes, loss."""
    rows, two = _rows(derived), bool(len(derived.over_papers))
    base = derived.compared.baseline
    best = "Speed-up over the best ZeRO-3" if two and not derived.compared.asked else f"Speed-up over {base}"
    speedups = [Column("speedup_told", best, str)]
    speedups += [Column("over_papers_told", "over the paper's baseline", str)] if two else []
    learned = derived.trials["validation_loss"].notna().any()
    loss = [Column("validation_loss", "Validation loss", number(4))] if learned else []
    columns = (
        Column("contender", "Contender"),
        Column("trials_told", "n", str),
        Column("step_seconds", "Step, s", number(3)),
        Column("tokens_per_second", "Tokens/s", number(3)),
        *speedups,
        Column("pairs_told", "Pairs", str),
        Column("share", "Allowed step/step", footnotes.share),
        Column("sent_told", "Sent, MB/step", str),
        Column("bytes_ratio", f"of {base}'s", number(3)),
        *loss,
    )
    caption = (
        "Step: geometric mean over repeats and seeds; other columns: medians. "
        "Speed-up: geometric mean of the pairs' ratios with its 95 % "
        f"interval, Student's t on their logarithms, from {FEWEST} pairs on; 'Pairs' has their number "
        f"and the range in which they lie.{sweeps_in_words(derived.trials['sweep'])} "
        f"{_PAPERS_IN_WORDS if two else ''}Allowed step/step: the shortest step that schedule, link and "
        "processors allow, over the measured one (the table Time and processors has a column for each)."
        f"{footnotes.alone_in_words(derived)} Sent: by all ranks between nodes in training "
        f"(ledger).{short_names_in_words(row['contender'] for row in rows)}{_loss_in_words(derived)}"
        f"{_marks_in_words(derived, rows, 'speedup_told', 'share', 'sent_told')}"
    )
    return placed("summary", "Summary", caption, rows, *columns)


def time(derived: Derived) -> Table:
    """Step time, one row per cell and contender: measured against its bounds, and CPU usage."""
    rows = [{name: row[name] for name in _OF_TIME} for row in _rows(derived)]
    columns = (
        Column("contender", "Contender"),
        Column("trials_told", "n", str),
        Column("step_seconds", "Step, s", number(3)),
        Column("exposed_seconds", "Exposed, s", number(2)),
        Column("share", "Allowed step/step", footnotes.share),
        Column("schedule_share", "Scheduled step/step", footnotes.share),
        Column("ideal_share", "Ideal step/step", footnotes.share),
        Column("processors_busy", "Processors busy", footnotes.share),
        Column("taken_share", "Taken by others", footnotes.part),
        Column("tflops", "TFLOPs", number(2)),
    )
    caption = (
        "Medians over repeats and seeds. Exposed: communication waited for. Step/step: a possible step "
        "over the measured one. Scheduled: the step that the engine's order of gathers and reductions would "
        "take with this computation and these bytes on this link if every rank had a processor of its own. "
        "Processors busy: of the step in which the processors, never idle, could "
        "compute what the ranks did; not known on GPUs and of older records. Allowed: the longer of "
        "these two. Ideal: max(compute, wire), which no schedule reaches."
        f"{footnotes.alone_in_words(derived)} Taken by others: what other "
        "programs, and the machine's host, had of the processors' time, in the trial in "
        f"which it was most{_unknown_in_words(derived)}. TFLOPs: of the model, per rank, by Megatron's "
        f"formula without recomputation.{_marks_in_words(derived, rows, *metrics.SHARES)}"
    )
    return placed("time", "Time and processors", caption, rows, *columns)


def _unknown_in_words(derived: Derived) -> str:
    if not derived.trials["taken_share"].isna().any():
        return ""
    return (
        f" ({NOTHING}: not on record: the system has no /proc/stat, ranks may have stood on several "
        "machines, or the record is older)"
    )


def _marks_in_words(derived: Derived, rows: list[dict[str, Any]], *keys: str) -> str:
    """Caption text for the marks in these columns and beside the numbers of trials."""
    data = pd.DataFrame(rows)
    told = footnotes.in_words(str(row[key]) for row in rows for key in ("trials_told", *keys))
    shares = [key for key in keys if key in metrics.SHARES]
    if len(data) and data[shares].astype(float).round(2).gt(1).to_numpy().any():
        bounds = derived.trials[[*metrics.SHARES[1:], "alone"]]
        told += f" {footnotes.above_in_words(bounds)}"
    return told.rstrip()


def _loss_in_words(derived: Derived) -> str:
    steps = derived.trials["validation_step"].dropna()
    if steps.empty:
        return ""
    return (
        " Validation loss: mean cross-entropy, in nats, on data held back from training, at the end of each "
        f"trial, after {span(steps, 'step')}; less is better."
    )


def _rows(derived: Derived) -> list[dict[str, Any]]:
    pairs, over_papers = derived.pairs, derived.over_papers
    return [
        _row(mine, pairs[pairs["id"].isin(mine["id"])])
        | _over_papers(over_papers[over_papers["id"].isin(mine["id"])])
        for _, of_cell in groups(derived.trials, ["cell"])
        for _, _, mine in by_contender(of_cell)
    ]


def _sent_in_words(ledger: float, interfaces: float) -> str:
    """MB by the ledger or, where there is none, by the interfaces, marked so."""
    if math.isnan(ledger) and not math.isnan(interfaces):
        return f"{number(3)(interfaces)} {labels.INTERFACES}"
    return number(3)(ledger)


def _row(mine: pd.DataFrame, paired: pd.DataFrame) -> dict[str, Any]:
    first = mine.iloc[0]
    step = metrics.step_interval(mine)
    row: dict[str, Any] = {
        "where": first["where"],
        "contender": first["contender"],
        "trials": len(mine),
        "trials_told": footnotes.trials(mine),
        "step_seconds": step.estimate,
        "step_seconds_low": step.low,
        "step_seconds_high": step.high,
        "sent_mb": (sent := mine["sent_bytes"].median() / 1e6),
        "interface_mb": (interface := mine["interface_bytes"].median() / 1e6),
        "sent_told": _sent_in_words(sent, interface) + labels.padded(float(mine["padding_share"].max())),
        **dict.fromkeys(("speedup", "speedup_low", "speedup_high"), math.nan),
        "speedup_told": NOTHING,
        "pairs": len(paired),
        **dict.fromkeys(("pairs_lowest", "pairs_highest"), math.nan),
        "pairs_told": NOTHING,
        **{key: mine[key].median() for key in _MEDIANS},
        **{key: (mine[key] * mine["step_seconds"]).median() / step.estimate for key in _PER_SECOND},
        **{key: mine[key].max() for key in ("others_share", "steal_share", "taken_share")},
        **{key: paired[key].median() for key in ("bytes_ratio", "interface_ratio")},
    }
    if len(paired):
        found = metrics.speedup(paired)
        row |= {"speedup": found.estimate, "speedup_low": found.low, "speedup_high": found.high}
        row["speedup_told"] = f"{found.estimate:.2f}"
    if len(paired) and not paired["id"].eq(paired["baseline"]).all():
        if found.known:
            row["speedup_told"] += f" ({found.low:.2f} to {found.high:.2f})"
        lowest, highest = paired["speedup"].min(), paired["speedup"].max()
        row |= {"pairs_lowest": lowest, "pairs_highest": highest}
        between = f": {lowest:.2f} to {highest:.2f}" if len(paired) > 1 else ""
        sweeps = f" in {counted(found.sweeps, 'sweep')}" if found.sweeps > 1 else ""
        row["pairs_told"] = f"{len(paired)}{sweeps}{between}"
    row["speedup_told"] += footnotes.rates(mine)
    return row


def _over_papers(paired: pd.DataFrame) -> dict[str, Any]:
    """Columns of a row on its speed-up over the paper's baseline; ``paired`` has its pairs with that one."""
    if not len(paired):
        return {"over_papers": math.nan, "over_papers_told": NOTHING}
    found = metrics.speedup(paired)
    told = f"{found.estimate:.2f}"
    if found.known and paired["contender"].iloc[0] != NAMES[PAPERS_BASELINE]:
        told += f" ({found.low:.2f} to {found.high:.2f})"
    return {
        "over_papers": found.estimate,
        "over_papers_low": found.low,
        "over_papers_high": found.high,
        "over_papers_told": told,
    }
