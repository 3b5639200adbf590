"""Makes the tables of losses, of the errors of messages, and of codecs that were tried on tensors without sending."""

from __future__ import annotations

import math
from typing import Any, Final, Literal

import pandas as pd

from harness.suites.answering_quantity import LEAST_STEPS
from impl.codecs.codec import ITEM_BYTES, parse
from report.data import metrics
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import NOTHING, listed, lowest_to_highest, number, with_interval
from report.draw.names_of_rows import by_setting_and_configuration
from report.effects import loss_verdicts
from report.effects.loss_verdicts import ENOUGH_POWER
from report.quantities import formula
from report.tables.table import CONFIGURATION, TRIALS, Column, Table, table_of, trial_count

_ENDS: Final = ["end_to_end", "repeated", "weights", "secondary"]
_BESIDE: Final = 256  # block size of the integer codecs with which lossless codecs are compared
_MANY: Final = 1 << 20  # number of elements of a frame from which the bytes of one value are computed


def sent_error(derived: Derived) -> Table:
    """Return the table of the errors (vNMSE) of messages at the measured steps: in each hop, and from end to end.

    A hop is one exchange of a reduction, such as the exchange inside nodes.
    """
    errors, rows = derived.sent_errors, []
    kind = errors["purpose"].mask(errors["repeated"].gt(1), "repeated").replace("gradients", "end_to_end")
    for *_, trials in by_setting_and_configuration(errors.assign(kind=kind)):
        for _, step in groups(trials, ["step"]):
            hops, ends = step[step["purpose"].eq("gradients") & step["hop"].notna()], step[step["hop"].isna()]
            rows.append({
                **step.iloc[0][["where", "configuration", "step"]],
                **trial_count(derived.trials[derived.trials["id"].isin(step["id"])]),
                "cosine": ends[ends["kind"] == "end_to_end"]["cosine"].median(),
                "hops": hops_text(hops),
                "smallest_of_a_hop": float(hops["vnmse"].min()),
                "largest_of_a_hop": float(hops["vnmse"].max()),
                **ends.groupby("kind")["vnmse"].median().reindex(_ENDS),
            })  # fmt: skip
    times = ", ".join(str(count) for count in sorted(set(errors["repeated"]) - {1}))
    return table_of(
        "sent_error",
        "Error of what was sent",
        rows,
        CONFIGURATION,
        Column("step", "Step", str),
        TRIALS,
        Column("cosine", "Cosine of ranks", number(3), formula("cosine of ranks")),
        Column("hops", "Each hop", says=formula("of each hop")),
        Column("end_to_end", "End to end", number(3), formula("end to end")),
        Column("repeated", f"of {times} reductions' sum", number(3), formula("of repeated reductions")),
        Column("weights", "Weights", number(3), formula("of weights")),
        Column("secondary", "from hpZ's copy", number(3)),
        caption="Errors (vNMSE) over all units, as medians over repeats and seeds. They are measured just before the "
        "step that is named, in passes that are not timed.",
    )


def hops_text(hops: pd.DataFrame) -> str:
    """Return the error of each hop as text: ``local int4:128 0.012; node int4:128 0.011``.

    A hop is one exchange of a reduction.  An entry has the hop's axis (``local`` is inside nodes, ``node`` between
    nodes, ``world`` over all ranks), the hop's codec, and the median vNMSE.  The steps of a ring share one entry, with
    the range of the steps' errors and their number: ``world int4:128 0.01 to 0.03 in 3 steps``.
    """
    parts = []
    for (axis, codec), group in hops.groupby(["axis", "codec"], sort=False):
        errors = group.groupby("hop")["vnmse"].median()
        low, high = number(2)(float(errors.min())), number(2)(float(errors.max()))
        ring = f" to {high} in {len(errors)} steps" if len(errors) > 1 else ""
        parts.append(f"{axis} {codec} {low}{ring}")
    return "; ".join(parts)


def chosen_codecs(derived: Derived) -> Table:
    """Return the table of the codecs that were chosen for each unit within a budget, and after how many steps.

    A unit is a set of parameters that are sent together.  With ``policy.budget``, each unit's codec is chosen anew
    every few steps of training.  The budget limits how many bits are sent for an element, as a mean over all units.
    """
    order = derived.trials.sort_values(["seed", "repeat"], kind="stable")
    first = order.drop_duplicates(["setting", "configuration"]).sort_index()[metrics.OF_TRIAL]
    choices, keys = (
        first.merge(derived.frames.chosen_codecs, on="id"),
        ["setting", "configuration", "what", "unit"],
    )
    new = choices["codec"] != choices.groupby(keys)["codec"].shift()
    codecs = (choices["step"].astype(str) + ": " + choices["codec"]).where(new)
    rows = choices.assign(codecs=codecs).groupby(["where", *keys], sort=False, as_index=False)
    columns: dict[str, Any] = {"codecs": lambda codecs: "; ".join(codecs.dropna()), "vnmse": "last"}
    return table_of(
        "chosen_codecs",
        "Codecs chosen within a budget",
        rows.agg(columns).drop(columns="setting"),
        CONFIGURATION,
        Column("what", "Of"),
        Column("unit", "Unit"),
        Column(
            "codecs",
            "After steps",
            says="After steps: the number of steps after which a codec was chosen, and the codec.",
        ),
        Column(
            "vnmse", "vNMSE", number(3), "vNMSE: error of the last chosen codec, at the time of the choice."
        ),
        caption="Codecs that the budget chose for each unit, in the first trial of each configuration. For gradients, "
        "they encode the messages between nodes.",
    )


def quantisation(derived: Derived) -> Table:
    """Return the table of the median vNMSE of each codec that was tried on tensors, with a column per block size.

    Nothing of these encodings was sent.  The vNMSE is the sum of squared errors over the sum of squares.
    """
    return _of_codecs(derived, "quantisation", "Codecs tried", "vnmse", "Median vNMSE over units and trials")


def largest_error(derived: Derived) -> Table:
    """Return the table of the largest error of each codec that was tried on tensors, with a column per block size.

    Nothing of these encodings was sent.  An error is divided by the tensor's largest absolute value.
    """
    says = "Largest |decoded - x| over the largest |x|, of any unit and trial"
    return _of_codecs(derived, "largest_error", "Codecs tried: largest error", "largest", says)


def _of_codecs(derived: Derived, name: str, title: str, value: str, says: str) -> Table:
    """Return a table of the errors of codecs that were tried on tensors without sending the result.

    It has a row per kind of tensor and codec, and a column per block size.  The errors are from the first configuration
    and setting that tried codecs.

    Args:
        derived: The records.
        name: Name of the table.
        title: Title of the table.
        value: The error that a cell summarises over units and trials: the median of ``vnmse``, or the maximum of
            ``largest``.
        says: Words for this error in the caption.
    """
    errors = derived.frames.quantisation.merge(derived.trials[metrics.OF_TRIAL], on="id")
    first = errors.sort_values(["place", "first"], kind="stable").head(1)
    errors = errors.merge(first[["configuration", "setting"]], on=["configuration", "setting"])
    where = "".join(first["configuration"] + " (" + first["where"] + ")")
    parts = errors["codec"].astype(str).str.extract(r"(?P<head>[^:]*):?(?P<block>[^:]*):?(?P<options>.*)")
    kinds = (parts["head"] + " " + parts["options"]).str.strip()
    errors = errors.assign(kind=kinds, block=parts["block"].replace("", "none"))
    over: Literal["median", "max"] = "median" if value == "vnmse" else "max"
    wide = errors.pivot_table(index=["purpose", "kind"], columns="block", values=value, aggfunc=over)
    blocks = sorted(wide.columns, key=lambda block: float(block) if block.isdecimal() else math.inf)
    return table_of(
        name,
        title,
        wide[blocks].reset_index(),
        Column("purpose", "Of"),
        Column("kind", "Codec"),
        *(Column(block, "no blocks" if block == "none" else block, number(3)) for block in blocks),
        caption=f"{says}, by elements per block ('shard': one scale for a whole shard). Each codec encodes the "
        "weights and "
        f"the reduced gradients of {where} once; nothing of this is sent.",
    )


def lossless(derived: Derived) -> Table:
    """Return the table of lossless codecs: the bytes that they need for a value, and their error.

    The error is not 0 for codecs that first cast to bf16.  For comparison, the table also has the integer codecs with
    blocks of 256 elements that were tried on the same tensors.
    """
    whole = derived.frames.lossless.merge(derived.trials[metrics.OF_TRIAL], on="id")
    first = whole.sort_values(["place", "first"], kind="stable").head(1)
    same = first[["configuration", "setting"]]
    whole = whole.merge(same, on=["configuration", "setting"])
    sums = whole.groupby(["purpose", "codec"], as_index=False)[["elements", "bytes"]].sum()
    tried = derived.frames.quantisation.merge(derived.trials[metrics.OF_TRIAL], on="id").merge(same)
    tried = tried[tried["codec"].astype(str).str.endswith(f":{_BESIDE}")]
    medians = whole.groupby(["purpose", "codec"])["vnmse"].median()
    rows: list[dict[str, Any]] = [
        {"purpose": purpose, "codec": codec, "bytes": size / elements, "vnmse": medians[purpose, codec]}
        for purpose, codec, elements, size in sums.itertuples(index=False)
    ]
    others = tried.groupby(["purpose", "codec"], as_index=False)["vnmse"].median()
    rows += [
        {
            "purpose": purpose,
            "codec": codec,
            "bytes": parse(codec).frame_bytes(_MANY) / _MANY,
            "vnmse": median,
        }
        for purpose, codec, median in others.itertuples(index=False)
    ]
    rows = [row | {"of_bf16": row["bytes"] / ITEM_BYTES["bf16"]} for row in rows]
    where = "".join(first["configuration"] + " (" + first["where"] + ")")
    return table_of(
        "lossless",
        "Bytes without loss",
        sorted(rows, key=lambda row: (row["purpose"], -row["bytes"])),
        Column("purpose", "Of"),
        Column("codec", "Codec"),
        Column("bytes", "Bytes a value", number(3), "Bytes a value: scales included."),
        Column("of_bf16", "of bf16's", number(3)),
        Column("vnmse", "vNMSE", number(3), "vNMSE: median over units and trials."),
        caption=f"Bytes that the weights and the reduced gradients of {where} take if nothing is lost, and with the "
        f"integer codecs whose blocks have {_BESIDE} elements. A codec without loss whose name ends in bf16 encodes "
        "the values cast to bf16, which is all that a 16-bit baseline sends. Bytes without loss depend on the values: "
        "they were measured, and none of them were sent.",
    )


def losses(derived: Derived) -> Table:
    """Return the table of final validation losses: their means, their differences from the baseline, and verdicts.

    It also has the training time to a target loss, which is the baseline's mean loss plus the margin (by how much a
    loss may be higher than the baseline's).
    """
    rows = loss_verdicts.losses(derived)
    base = listed(list(filter(None, dict.fromkeys(row["base"] for row in rows)))) or "the baseline"
    margins = [row["margin"] for row in rows if not math.isnan(row["margin"])]
    margin = f" (here {lowest_to_highest(margins, number(2))} nats)" if margins else ""

    def printed(row: loss_verdicts.Row) -> loss_verdicts.Row:
        few = row["target"] == row["target"] and row["reached"] < row["seeds"]
        gain = with_interval(row["gain"], "{:.2f}".format) if row["gain"].n else NOTHING
        reached = f"{row['reached']} of {row['seeds']} seeds reach it"
        return row | {"verdict": row["verdict"] or NOTHING, "_gain": reached if few else gain}

    verdict = (
        f"Verdict: the margin is {loss_verdicts.allowed(derived)} of {base}'s "
        f"{'training' if derived.frames.margin else 'loss'}{margin}. Within the margin: the whole interval lies below "
        "the margin. Beyond the margin: the whole interval lies above the margin. Inconclusive: the interval contains "
        f"the margin. No power: with this spread, fewer than {ENOUGH_POWER:.0%} of equal configurations would be found "
        "within the margin, so nothing is concluded; the table Verdicts calls this inconclusive."
    )
    return table_of(
        "losses",
        "Losses",
        [printed(row) for row in rows],
        CONFIGURATION,
        Column("seeds", "Seeds", str),
        Column("loss", "Validation loss, mean", number(4), "Validation loss: mean over seeds."),
        Column("difference", f"minus {base}'s", "{:+.4f}".format, formula("difference")),
        Column("verdict", "Verdict", str, verdict),
        Column("power", "Power", number(2), formula("power")),
        Column("seconds", "To the target, s", number(3), formula("target", "time to the target")),
        Column("_gain", f"Speed-up over {base} to the target", str, formula("speed-up to the target")),
        caption=f"Validation losses at the end of training, paired with {base} by seed. Trials of fewer than "
        f"{LEAST_STEPS} steps have no verdict.",
    )
