"""Figures of losses, of the errors of messages, and of what it costs in error, loss and time to send fewer bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pandas as pd

from report.data import speedups
from report.data.configuration import is_baseline
from report.data.metrics import OF_TRIAL, Derived
from report.data.text import byte_unit, counted, number, span
from report.draw.figure import Figure
from report.draw.marks import Front, Lines, Measure, Rows
from report.draw.names_of_rows import titles_of
from report.effects import loss_verdicts
from report.effects.net_speed import net_speeds
from report.effects.step_seconds import OWN
from report.quantities import formula

_ENDS: Final = [*OF_TRIAL, "validation_loss", "validation_step"]
_FEWEST: Final = 4  # configurations that a setting must have, so that a front is drawn
_EXCESS: Final = "loss minus the baseline's, nats"
_EXCESS_OVER_SEEDS: Final = Measure(
    "excess", _EXCESS, "difference of the last validation losses, paired by seed, mean over seeds",
    lambda rows: loss_verdicts.over_seeds(rows, "excess"), "{:+.4f}".format, line=0,
)  # fmt: skip


def _curves(derived: Derived) -> pd.DataFrame:
    """Return validation losses during training, for panels over steps, over seconds and over bytes.

    Only trials with at least three validations have rows.  Each validation has three rows, one for each panel.  Column
    ``against`` holds the steps, the seconds or the bytes up to this validation.  The rows of seconds are left out if no
    trial was timed, as with ranks that are threads.
    """
    long = derived.trials[derived.trials["validation_loss"].notna()]
    rows = long[OF_TRIAL].merge(derived.frames.validations, on="id")
    rows = rows[rows.groupby("id")["step"].transform("nunique") >= 3]
    if rows.empty:
        return rows
    rows = rows.assign(inter_bytes=pd.to_numeric(rows["inter_bytes"]))
    size, unit = byte_unit(float(rows["inter_bytes"].max()))
    axes = {"optimizer steps": rows["step"], "seconds in steps": rows["train_seconds"],
            f"{unit} sent between nodes": rows["inter_bytes"] / size}  # fmt: skip
    heads = {setting: f"{title}: " if title else "" for setting, title in titles_of(rows).items()}
    return pd.concat(
        rows.assign(against=x, panel=rows["setting"].map(heads) + name)
        for name, x in axes.items()
        if x.notna().any()
    )


def _seeds_in_words(data: pd.DataFrame) -> str:
    number = data["seed"].nunique()
    there_are = f"There {'is' if number == 1 else 'are'} {counted(number, 'seed')}"
    return f"{there_are}; repeats of a seed train the same model again and count as one value."


_CURVES: Final = Lines(
    "against", "",
    (Measure("loss", "validation loss, nats", "mean over seeds",
             lambda rows: loss_verdicts.over_seeds(rows, "loss"), "{:.3f}".format, bar=False),),
    points="step", band=True,
)  # fmt: skip
LOSS: Final = Figure(
    name="loss",
    title="Loss during training",
    question="How does the validation loss fall during training?",
    table=_curves,
    mark=_CURVES,
    notes=(_seeds_in_words,),
)


def _against(derived: Derived) -> pd.DataFrame:
    """Return the losses of the configurations whose step has known seconds, and of their baselines.

    The seconds of a step may have several sources (:mod:`report.effects.step_seconds`).  A validation has one row for
    each source, and one row for bytes.  In a source's row, column ``against`` holds seconds of training: the number of
    steps up to this validation, times the source's seconds of a step.  In the row for bytes, ``against`` holds the
    bytes between nodes up to this validation.
    """
    seconds = dict[tuple[str, str], dict[str, float]]()  # seconds of a step by setting, source and trial
    for each in net_speeds(derived):
        if each.step is not None:
            source = "" if each.step.source == OWN else f"\n{each.step.source}, {each.step.where}"
            of_trial = seconds.setdefault((each.row["setting"], f"seconds in steps{source}"), {})
            of_trial |= dict.fromkeys(each.row["id"].split(), each.step.seconds)
            of_trial |= dict.fromkeys(each.row["baseline"].split(), each.step.base_seconds)
    rows = derived.trials[OF_TRIAL].merge(derived.frames.validations, on="id")
    rows = rows.assign(loss=rows["loss"].astype(float), inter_bytes=pd.to_numeric(rows["inter_bytes"]))
    rows = rows[rows["id"].isin({identity for of_trial in seconds.values() for identity in of_trial})]
    if rows.empty:
        return rows
    heads = {setting: f"{title}: " if title else "" for setting, title in titles_of(rows).items()}
    size, unit = byte_unit(float(rows["inter_bytes"].max()))
    panels = [
        rows.assign(against=rows["step"] * rows["id"].map(of_trial), panel=f"{heads[setting]}{name}")
        for (setting, name), of_trial in seconds.items()
    ]
    sent = f"{unit} sent between nodes"
    between = rows["inter_bytes"].where(rows["inter_bytes"] > 0) / size  # one node sends none
    panels.append(rows.assign(against=between, panel=rows["setting"].map(heads) + sent))
    return pd.concat(panels).dropna(subset=["against"])


def _two_sentences(data: pd.DataFrame) -> str:
    seeds = counted(data["seed"].nunique(), "seed")
    return (
        f"Validation loss against seconds of training and against bytes between nodes: lines are means over {seeds}, "
        "and bands reach from the lowest to the highest seed. Seconds are steps times the seconds of a step, which are "
        "from the trials themselves unless another source is named below the axis."
    )


NET_SPEED: Final = Figure(
    name="net_speed",
    title="Loss against seconds and bytes",
    question="After how many seconds and how many bytes between nodes does each configuration reach a given loss?",
    table=_against,
    mark=_CURVES,
    whole_caption=_two_sentences,
)


def _steps_in_words(data: pd.DataFrame) -> str:
    return (
        f"Losses are measured after {span(data['validation_step'], 'step')} of training, warm-up included. "
        f"{_seeds_in_words(data)} "
        "The axis does not start at 0. The table Losses has the differences, their intervals and the verdicts."
    )


FINAL_LOSS: Final = Figure(
    name="final_loss",
    title="Final validation loss",
    question="With which loss does each configuration end?",
    table=lambda derived: derived.trials[_ENDS].dropna(subset=["validation_loss"]),
    mark=Rows((
        Measure(
            "validation_loss", "validation loss, nats",
            "mean over seeds, with a line from the lowest to the highest seed",
            loss_verdicts.over_seeds, "{:.4f}".format, bar=False,
        ),
    )),
    notes=(_steps_in_words,),
)  # fmt: skip


def _front(derived: Derived) -> pd.DataFrame:
    """Return one row per trial of the settings for which a Pareto front of bytes and losses is known.

    A setting is the cluster, model, batch and so on.  ``m`` are the bytes between nodes in a step, divided by the
    number of micro-batches and by M, the bytes of one all-gather of the model in 16 bits.  ``excess`` is the loss minus
    the baseline's loss, in nats.  ``front`` says whether the trial's configuration is on the front
    (:func:`report.effects.loss_verdicts.front`).
    """
    known = loss_verdicts.front(derived)
    trials = derived.trials[derived.trials["setting"].isin(known["setting"])].dropna(
        subset=["validation_loss"]
    )
    return (
        trials[[*OF_TRIAL, "validation_loss"]]
        .assign(
            m=(trials["sent_bytes"] / trials["m_bytes"]).round(3),
            excess=_excess(derived, trials),
        )
        .merge(known[["setting", "configuration", "front"]], how="left")
    )


def _excess(derived: Derived, trials: pd.DataFrame) -> pd.Series[float]:
    """Return each trial's validation loss minus the baseline's mean loss in the same setting and with the same seed."""
    every, keys = derived.trials, ["setting", "seed", "beside"]
    base = every[is_baseline(every)].groupby(keys)["validation_loss"].mean()
    return trials["validation_loss"] - trials.join(base.rename("base"), on=keys)["base"]


FRONTIER: Final = Figure(
    name="frontier",
    title="Loss against bytes between nodes",
    question="Which configurations send the fewest bytes for a given loss?",
    table=_front,
    mark=Front(
        "m", "bytes between nodes in a step, in M",
        (replace(_EXCESS_OVER_SEEDS, label=f"validation {_EXCESS}"),), log=True,
    ),
    note=formula("M", "ledger"),
)  # fmt: skip


def _sent(derived: Derived) -> pd.DataFrame:
    """Return the errors (vNMSE) of the reduced gradients at each trial's last measured step.

    A hop is one exchange of the reduction, such as the exchange inside nodes.  Each hop has a row, with its error in
    column ``each_hop``.  Another row has the error from end to end, over all hops together, in column ``end_to_end``.
    Errors of 0 are left out.
    """
    errors = derived.sent_errors
    last = _last(errors[errors["purpose"].eq("gradients") & errors["repeated"].eq(1)])
    last = last[last["vnmse"].gt(0)]
    end = last["hop"].isna()
    return last.assign(end_to_end=last["vnmse"].where(end), each_hop=last["vnmse"].where(~end))


def _last(errors: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of ``errors`` at the last measured step of each trial."""
    return errors[errors["step"] == errors.groupby("id")["step"].transform("max")]


SENT_ERROR: Final = Figure(
    name="sent_error",
    title="Error of what was sent",
    question="How far are the reduced gradients from their exact mean?",
    table=_sent,
    mark=Rows(
        (
            Measure(
                "end_to_end", "vNMSE, end to end",
                "sum((reduced - exact mean)^2) / sum(exact mean^2) over all units, at the last measured step",
                form=number(2), bar=False, log=True,
            ),
            Measure(
                "each_hop", "vNMSE of each hop",
                "sum((decoded - x)^2) / sum(x^2) in one hop, where x are the values that are encoded for the hop",
                form=number(2), bar=False, log=True, dot="hop of a trial",
            ),
        )
    ),
    note="Each step of a ring is a hop. The table of the same title names the hops of each configuration.",
)  # fmt: skip


def _costs(derived: Derived) -> pd.DataFrame:
    """Return one row for each trial of the configurations whose bytes and error are both known and above 0.

    Often only the first repeat of a configuration measures errors.  The configuration's other repeats have rows too,
    with NaN as error, because their seconds count in the panel of seconds.  Settings (cluster, model, batch and so on)
    in which fewer than :data:`_FEWEST` configurations have rows are left out.  The columns are:

    * ``m``: the bytes between nodes in a step, divided by the number of micro-batches and by M, the bytes of one
      all-gather of the model in 16 bits;
    * ``vnmse``: the largest error from end to end at the last measured step; NaN if the trial measured no error, or 0.
      Gradients and weights have such errors and, with hpZ, also the weights from hpZ's copy;
    * ``excess``: the loss minus the baseline's loss, in nats.
    """
    trials, errors = derived.trials, derived.sent_errors
    last = _last(errors[errors["hop"].isna() & errors["repeated"].eq(1)])
    largest = last.groupby("id")["vnmse"].max()
    trials = trials.assign(
        m=trials["sent_bytes"] / trials["m_bytes"],
        vnmse=trials["id"].map(largest[largest.gt(0)]),
        excess=_excess(derived, trials),
    )
    known = trials.groupby(["setting", "configuration"])["vnmse"].transform("count").gt(0)
    trials = trials[trials["m"].gt(0) & known]
    enough = trials.groupby("setting")["configuration"].transform("nunique") >= _FEWEST
    return trials[enough][[*OF_TRIAL, "occasion", "disturbed", "m", "vnmse", "excess", "step_seconds"]]


PARETO: Final = Figure(
    name="pareto",
    title="What fewer bytes cost",
    question="What do fewer bytes between nodes cost?",
    table=_costs,
    mark=Front(
        "m",
        "bytes between nodes, in M",
        (
            Measure(
                "vnmse", "vNMSE of what was sent",
                "the largest error (of gradients from their exact mean, and of weights and hpZ's copy from their "
                "masters) at the last measured step, median over trials",
                form=number(2), log=True,
            ),
            _EXCESS_OVER_SEEDS,
            Measure("step_seconds", "seconds per step", "geometric mean over trials", speedups.step_interval),
        ),
    ),
)  # fmt: skip
