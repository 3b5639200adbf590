"""Tables of errors: of what was sent, and of codecs that were tried on it; and of losses."""

from __future__ import annotations

import math
from typing import Final, Literal

import pandas as pd

from harness.records.confidence_intervals import ENOUGH_POWER
from harness.suites.answering_quantity import LEAST_STEPS
from report.data import loss_verdicts, metrics
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import NOTHING, listed, number, with_interval
from report.draw.names_of_rows import by_cell_and_contender
from report.quantities import formula
from report.tables.table import CONTENDER, TRIALS, Column, Table, table_of, trial_count

_ENDS: Final = ["end_to_end", "repeated", "weights", "secondary"]


def sent_error(derived: Derived) -> Table:
    """Table of the error of what was sent, hop by hop and end to end, at the measured steps."""
    found, rows = derived.sent_errors, []
    of = found["purpose"].mask(found["repeated"].gt(1), "repeated").replace("gradients", "end_to_end")
    for *_, of_all in by_cell_and_contender(found.assign(of=of)):
        for _, mine in groups(of_all, ["step"]):
            hops, ends = mine[mine["purpose"].eq("gradients") & mine["hop"].notna()], mine[mine["hop"].isna()]
            rows.append({
                **mine.iloc[0][["where", "contender", "step"]],
                **trial_count(derived.trials[derived.trials["id"].isin(mine["id"])]),
                "cosine": ends[ends["of"] == "end_to_end"]["cosine"].median(),
                "hops": hops_text(hops),
                "smallest_of_a_hop": float(hops["vnmse"].min()),
                "largest_of_a_hop": float(hops["vnmse"].max()),
                **ends.groupby("of")["vnmse"].median().reindex(_ENDS),
            })  # fmt: skip
    times = ", ".join(str(count) for count in sorted(set(found["repeated"]) - {1}))
    return table_of(
        "sent_error",
        "Error of what was sent",
        rows,
        CONTENDER,
        Column("step", "Step", str),
        TRIALS,
        Column("cosine", "Cosine of ranks", number(3), formula("cosine of ranks")),
        Column("hops", "Each hop", says=formula("of each hop")),
        Column("end_to_end", "End to end", number(3), formula("end to end")),
        Column("repeated", f"of {times} reductions' sum", number(3), formula("of repeated reductions")),
        Column("weights", "Weights", number(3), formula("of weights")),
        Column("secondary", "from hpZ's copy", number(3)),
        notes="vNMSE, sums over all units; medians over repeats and seeds. Measured just before the step of "
        "that number, in passes that are not timed.",
    )


def hops_text(mine: pd.DataFrame) -> str:
    """``local int4:128 0.012; node int4:128 0.011``; of a ring the range and the number of its steps."""
    told = []
    for (axis, codec), group in mine.groupby(["axis", "codec"], sort=False):
        of_hop = group.groupby("hop")["vnmse"].median()
        low, high = number(2)(float(of_hop.min())), number(2)(float(of_hop.max()))
        ring = f" to {high} in {len(of_hop)} steps" if len(of_hop) > 1 else ""
        told.append(f"{axis} {codec} {low}{ring}")
    return "; ".join(told)


def chosen_codecs(derived: Derived) -> Table:
    """Table of the codecs that a budget chose for each unit, step by step."""
    order = derived.trials.sort_values(["seed", "repeat"], kind="stable")
    first = order.drop_duplicates(["cell", "contender"]).sort_index()[metrics.OF_TRIAL]
    found, of = first.merge(derived.frames.chosen_codecs, on="id"), ["cell", "contender", "what", "unit"]
    new = found["codec"] != found.groupby(of)["codec"].shift()
    told = (found["step"].astype(str) + ": " + found["codec"]).where(new)
    rows = found.assign(codecs=told).groupby(["where", *of], sort=False, as_index=False)

    def joined(codecs: pd.Series[str]) -> str:
        return "; ".join(codecs.dropna())

    return table_of(
        "chosen_codecs",
        "Codecs chosen within a budget",
        rows.agg({"codecs": joined, "vnmse": "last"}).drop(columns="cell"),
        CONTENDER,
        Column("what", "Of"),
        Column("unit", "Unit"),
        Column("codecs", "After steps", says="After so many steps: the codec, until it changes."),
        Column("vnmse", "vNMSE", number(3), "vNMSE: of the last choice, when it was made."),
        notes="Of the first trial of each contender; gradients are those that cross nodes.",
    )


def quantisation(derived: Derived) -> Table:
    """Table of the median vNMSE of each codec that was tried, by block size."""
    return _tried(derived, "quantisation", "Codecs tried", "vnmse", "Median vNMSE over units and trials")


def largest_error(derived: Derived) -> Table:
    """Table of the largest error of each codec that was tried, by block size."""
    says = "Largest |decoded - x| over the largest |x|, of any unit and trial"
    return _tried(derived, "largest_error", "Codecs tried: largest error", "largest", says)


def _tried(derived: Derived, name: str, title: str, value: str, says: str) -> Table:
    """Errors by tensor, kind of codec and block size, of the first contender that tried any, in one cell."""
    found = derived.frames.quantisation.merge(derived.trials[metrics.OF_TRIAL], on="id")
    first = found.sort_values(["place", "first"], kind="stable").head(1)
    found = found.merge(first[["contender", "cell"]], on=["contender", "cell"])
    where = "".join(first["contender"] + " (" + first["where"] + ")")
    parts = found["codec"].astype(str).str.extract(r"(?P<head>[^:]*):?(?P<block>[^:]*):?(?P<options>.*)")
    kinds = (parts["head"] + " " + parts["options"]).str.strip()
    found = found.assign(kind=kinds, block=parts["block"].replace("", "none"))
    of: Literal["median", "max"] = "median" if value == "vnmse" else "max"
    wide = found.pivot_table(index=["purpose", "kind"], columns="block", values=value, aggfunc=of)
    blocks = sorted(wide.columns, key=lambda block: float(block) if block.isdecimal() else math.inf)
    return table_of(
        name,
        title,
        wide[blocks].reset_index(),
        Column("purpose", "Of"),
        Column("kind", "Codec"),
        *(Column(block, "no blocks" if block == "none" else block, number(3)) for block in blocks),
        notes=f"{says}, by elements per block ('shard': one scale for all of it). Each codec encodes once "
        f"what training left to {where}: weights, and reduced gradients. Nothing of it is sent.",
    )


def losses(derived: Derived) -> Table:
    """Table of the last validation losses, their difference from the baseline's, and time to its loss."""
    rows = loss_verdicts.losses(derived)
    base = listed([one for one in dict.fromkeys(row["base"] for row in rows) if one]) or "the baseline"
    margins = [row["margin"] for row in rows if not math.isnan(row["margin"])]
    margin = f" (here {number(2)(min(margins))} nats)" if margins else ""

    def told(row: loss_verdicts.Row) -> loss_verdicts.Row:
        few = row["target"] == row["target"] and row["reached"] < row["seeds"]
        gain = with_interval(row["gain"], "{:.2f}".format) if row["gain"].n else NOTHING
        reached = f"{row['reached']} of {row['seeds']} reach it"
        return row | {"verdict": row["verdict"] or NOTHING, "_gain": reached if few else gain}

    verdict = (
        f"Verdict: against a margin of {loss_verdicts.allowed(derived)} of {base}'s "
        f"{'training' if derived.frames.margin else 'loss'}{margin}; not inferior: the interval ends below "
        f"it; inferior: it begins above it; no power: below {ENOUGH_POWER:g}, and nothing is claimed."
    )
    return table_of(
        "losses",
        "Losses",
        [told(row) for row in rows],
        CONTENDER,
        Column("seeds", "Seeds", str),
        Column("loss", "Validation loss", number(4)),
        Column("difference", f"minus {base}'s", "{:+.4f}".format, formula("difference")),
        Column("verdict", "Verdict", str, verdict),
        Column("power", "Power", number(2), formula("power")),
        Column("seconds", "To the target, s", number(3), formula("target", "time to the target")),
        Column("_gain", f"{base}'s over it", str, formula("the baseline's over it")),
        notes=f"Losses of fewer than {LEAST_STEPS} steps have no verdict.",
    )
