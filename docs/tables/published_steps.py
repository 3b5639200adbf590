"""Predicts published throughput from a few of its own numbers, with the errors of these predictions.

``python -m docs.tables.published_steps`` writes docs/modelled.md from
``report/published/zeropp_throughput.csv``; with a file of the same columns it prints the page for that one
instead.

Columns: ``system`` (a row of ``zeropp_volume.csv``), ``model``, ``parameters_billion``, ``gpus``,
``gpus_per_node``, ``rate_gbps`` of one adapter, ``adapters`` of a node, ``tokens_per_gpu``, and ``seconds``
of a step or ``tflops_per_gpu``; optional: ``source``, ``layers``, ``hidden``, ``volume_m`` (bytes between
nodes in units of M, where ``zeropp_volume.csv`` has no such system), ``overlap`` (``none`` or ``full``), and
``fitted``: ``yes`` for the rows to which the machine is fitted.  Without a ``yes`` each row is predicted from
all others.
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from docs import numbers
from docs.tables import markdown
from impl.plan.step_time import FLOPS_PER_TOKEN, Machine, Work, flops, least_seconds, step_time
from report.data import published
from report.figures.predictions import measured_over, score, score_in_words

DOCS: Final = Path(__file__).parents[1]
PREDICTED: Final = Path("results/predicted")
ELEMENT_BYTES: Final = 2  # M is the size of the model in 16 bits
NEEDED: Final = (
    "system", "model", "parameters_billion", "gpus", "gpus_per_node", "rate_gbps", "adapters",
    "tokens_per_gpu",
)  # fmt: skip
_MEASURED: Final = ("volume_m", "seconds", "tflops_per_gpu")  # optional


class PublishedError(ValueError):
    """A table that cannot be modelled; the message names the file, the row and the column."""


def read(path: Path) -> pd.DataFrame:
    """Returns the distinct rows of a table with ``seconds``, ``tflops``, ``work`` and ``fitted``.

    Raises:
        PublishedError: for a missing column, a number that is not above 0, or a system of unknown volume.
    """
    table = pd.read_csv(path)
    if missing := [name for name in NEEDED if name not in table]:
        raise PublishedError(f"{path}: column {missing[0]} is missing")
    usual: dict[str, Any] = {**dict.fromkeys(_MEASURED, np.nan), "overlap": "none", "fitted": "no"}
    table = table.assign(**{name: value for name, value in usual.items() if name not in table})
    table = table.fillna({"overlap": "none", "fitted": "no"})
    table = table.drop_duplicates([*NEEDED, "seconds", "tflops_per_gpu"], ignore_index=True)

    def check(name: str, values: pd.Series) -> None:
        parsed = pd.to_numeric(values, errors="coerce")
        if len(bad := values[~(parsed > 0) | ~np.isfinite(parsed)]):
            row = f"{path}, row {bad.index[0] + 1}"
            raise PublishedError(f"{row}: {name} is {bad.iloc[0]}, not a number above 0")

    for name in NEEDED[2:]:
        check(name, table[name])
    known = published.volume().set_index("method")["total_m"]
    volumes = table["volume_m"].fillna(table["system"].map(known))
    if len(unknown := table[volumes.isna()]):
        raise PublishedError(
            f"{path}, row {unknown.index[0] + 1}: what {unknown['system'].iloc[0]} sends is not known; say "
            f"it as volume_m (known: {', '.join(known.index)})"
        )
    parameters, nodes = table["parameters_billion"] * 1e9, table["gpus"] / table["gpus_per_node"]
    egress = volumes * ELEMENT_BYTES * parameters * (nodes - 1).clip(lower=0) / nodes
    rate = table["rate_gbps"] * table["adapters"] * 1e9 / 8
    operations = FLOPS_PER_TOKEN * parameters * table["tokens_per_gpu"]
    seconds = table["seconds"].fillna(operations / (table["tflops_per_gpu"] * 1e12))
    check("seconds, by tflops_per_gpu if not said,", seconds)
    check("volume_m", volumes)
    columns = (parameters, table["tokens_per_gpu"], egress, rate)
    works = [
        Work(parameters=p, tokens=t, egress_bytes=e, rate=r) for p, t, e, r in zip(*columns, strict=True)
    ]
    return table.assign(
        seconds=seconds,
        tflops=operations / seconds / 1e12,
        work=pd.Series(works, table.index, dtype=object),
        fitted=table["fitted"].eq("yes"),
    )


def fit(rows: pd.DataFrame) -> Machine:
    """Returns the machine whose steps are nearest to the rows', by least squares of relative errors.

    Raises:
        PublishedError: for no rows, or rows that do not all have overlap ``none``, or all ``full``.
    """
    if len(set(rows["overlap"])) != 1:
        raise PublishedError(f"a machine is fitted to rows of one overlap, not to {len(rows)} of several")
    tokens, overlap = rows["tokens_per_gpu"], rows["overlap"].iloc[0]
    if overlap not in ("none", "full"):
        raise PublishedError(f'overlap is "{overlap}", not none or full')
    several = len(set(tokens)) > 1  # one batch cannot tell fixed from per token

    def machine(values: np.ndarray) -> Machine:
        # Scaled to be of the order of 1: 1e-10 s for each parameter, 1e-13 s for each of its tokens.
        fixed, per_token, efficiency = values
        return Machine(
            name="fitted",
            source=f"{len(rows)} rows",
            fixed=fixed * 1e-10 if several else 0.0,
            per_token=per_token * 1e-13,
            efficiency=efficiency,
            fewest=float(tokens.min()),
            most=float(tokens.max()),
            overlap=overlap,
        )

    def errors(values: np.ndarray) -> np.ndarray:
        candidate = machine(values)
        steps = [step_time(candidate, work).seconds for work in rows["work"]]
        return np.asarray(np.log(np.array(steps) / rows["seconds"].to_numpy()))

    start = [1.0, 1e13 * float((rows["seconds"] / (rows["parameters_billion"] * 1e9 * tokens)).min()), 0.8]
    bounds = ([0, 1e-9, 0.01], [np.inf, np.inf, 1])
    return machine(least_squares(errors, start, bounds=bounds).x)


@dataclass(frozen=True)
class Predicted:
    """A table with predictions, and the machine that they share (None if each row has its own).

    Rows are those of :func:`read` with ``predicted`` (seconds), ``predicted_tflops``, ``mark``, and errors.
    """

    rows: pd.DataFrame
    machine: Machine | None

    @property
    def held_out(self) -> pd.DataFrame:
        """The rows to which no machine is fitted."""
        return self.rows[~self.rows["fitted"]]

    @property
    def speedups(self) -> pd.DataFrame:
        """Distinct held-out pairs of ``zero3`` with another system: measured and predicted ratio."""
        keys = ["model", "gpus", "rate_gbps", "adapters", "tokens_per_gpu"]
        base = self.rows[self.rows["system"].eq("zero3")]
        others = self.held_out[~self.held_out["system"].eq("zero3")]
        both = others.merge(base, on=keys, suffixes=("", "_base"))
        measured, predicted = (both[f"{name}_base"] / both[name] for name in ("seconds", "predicted"))
        error = predicted / measured - 1
        pairs = both[[*keys, "system"]].assign(measured=measured, predicted=predicted, error=error)
        return pairs.round(9).drop_duplicates([*keys[1:], "system", "measured", "predicted"])


def predict(rows: pd.DataFrame) -> Predicted:
    """Returns the predictions of a table: from its fitted rows, or each row from all others.

    ``naive_error`` is that of perfect overlap at the best throughput of the fitted rows, ``constant_error``
    that of their median throughput.
    """
    known = rows[rows["fitted"]]
    shared = fit(known) if len(known) else None
    predictions = []
    for index, work, fitted in zip(rows.index, rows["work"], rows["fitted"], strict=True):
        seen = known if len(known) else rows.drop(index=index)
        step = step_time(shared or fit(seen), work)
        mark = "fitted" if fitted else "" if step.calibrated else "transferred"
        naive = least_seconds(work, seen["tflops"].max() * 1e12)
        predictions.append((step.seconds, mark, naive, flops(work) / 1e12 / seen["tflops"].median()))
    steps = pd.DataFrame(predictions, rows.index, ["predicted", "mark", "naive", "constant"])
    # Of throughput, as it was published: the measured step over the predicted one.
    over = {name: rows["seconds"] / steps[name] for name in ("predicted", "naive", "constant")}
    return Predicted(
        rows.assign(
            predicted=steps["predicted"],
            mark=steps["mark"],
            predicted_tflops=rows["tflops"] * over["predicted"],
            error=over["predicted"] - 1,
            naive_error=over["naive"] - 1,
            constant_error=over["constant"] - 1,
        ),
        shared,
    )


def _spread(errors: pd.Series) -> str:
    sizes = errors.abs()
    return f"{sizes.median():.1%} in the median, {sizes.quantile(0.9):.1%} at the 90th percentile"


def measured_trials() -> pd.DataFrame:
    """The trials of results/predicted, by suite: one calibration predicted their steps before they ran."""
    tables = {suite: measured_over(numbers.read(suite, PREDICTED)) for suite in numbers.suites(PREDICTED)}
    parts = [
        rows.assign(suite=suite, setting=f"{suite} " + rows["setting"]) for suite, rows in tables.items()
    ]
    return pd.concat(parts, ignore_index=True)


def measured_here(rows: pd.DataFrame) -> str:
    """Returns the section on :func:`measured_trials` as Markdown."""
    lines = []
    for suite, trials in rows.groupby("suite"):
        scores = score(trials)
        errors = [f"{scores[name]:.1%}" for name in ("median", "ninth", "naive_median")]
        ordered = f"{scores['ordered']:.0%} of {scores['pairs']:.0f}" if scores["pairs"] else "-"
        lines.append([suite, f"{scores['settings']:.0f}", *errors, ordered])
    text = f"{len(rows)} trials, predicted by results/predicted/here.toml. {score_in_words(rows)}"
    head = ["suite", "settings", "median error", "90th percentile", "computation + wire", "pairs in order"]
    return f"\n## Measured here\n\n{textwrap.fill(text, 120)}\n\n{markdown.table(head, lines)}"


def page(table: Predicted) -> str:
    """Returns the page of one table as Markdown."""
    rows, held, pairs = table.rows, table.held_out, table.speedups
    fitted = "Each row is predicted from all others of its table."
    if machine := table.machine:
        fitted = f"""The machine is fitted to {int(rows["fitted"].sum())} rows: a step takes
        {machine.fixed:.3g} s for each parameter and {machine.per_token:.3g} s for each parameter and token of
        a rank; adapters carry {machine.efficiency:.0%} of their rate; overlap: {machine.overlap}."""
    keys = ["tokens_per_gpu", "rate_gbps", "adapters", "system", "tflops"]
    distinct = len(rows.round({"tflops": 3}).drop_duplicates(keys))
    speedups = ""
    if len(pairs):
        speedups = (
            f"Speed-ups over ZeRO-3 ({len(pairs)} distinct pairs) are off by {_spread(pairs['error'])}."
        )
    paragraphs = [
        """`python -m docs.tables.published_steps` predicts the published throughput by
        `impl/plan/step_time.py` and writes this page; with a CSV file of the same columns it prints the page
        for that file.""",
        f"""{fitted} Throughput of the {len(held)} rows that were held out is off by
        {_spread(held["error"])}. Perfect overlap at the best throughput seen is off by
        {_spread(held["naive_error"])}; the median throughput by {_spread(held["constant_error"])}.
        {speedups}""",
        f"""This is consistency, not validation: of {len(rows)} rows {distinct} are distinct, and where
        computation and bytes both grow with the parameters, models of all sizes are one.
        Batches outside of those that were fitted are marked *transferred*.""",
    ]
    if len(held):
        worst = held.iloc[int(held["error"].abs().to_numpy().argmax())]
        rate, change = worst["rate_gbps"] * worst["adapters"], "more" if worst["error"] < 0 else "less"
        paragraphs.append(
            f"""The worst is {worst["system"]} of {worst["model"]} at {rate:g} Gbit/s and
            {worst["tokens_per_gpu"]:g} tokens, which achieved {change} than modelled: there one efficiency
            and this overlap do not hold together."""
        )
    alike = rows.assign(gbps=rows["rate_gbps"] * rows["adapters"])
    alike = alike.round({"tflops": 6, "predicted_tflops": 6})
    keys = ["gbps", "tokens_per_gpu", "system", "tflops", "predicted_tflops", "mark"]
    alike = alike.groupby(keys, sort=False).agg({"model": ", ".join, "error": "first"}).reset_index()
    lines = [
        [
            row["model"], f"{row['gbps']:g}", f"{row['tokens_per_gpu']:g}", row["system"],
            f"{row['tflops']:.3g}", f"{row['predicted_tflops']:.3g}", f"{row['error']:+.1%}", row["mark"],
        ]
        for row in alike.to_dict("records")
    ]  # fmt: skip
    head = ["model", "Gbit/s of a node", "tokens/GPU", "system", "TFLOPs/GPU", "modelled", "error", ""]
    text = "\n\n".join(textwrap.fill(" ".join(paragraph.split()), 120) for paragraph in paragraphs)
    return f"# Modelled steps beside published ones\n\n{text}\n\n{markdown.table(head, lines)}"


def main(arguments: list[str]) -> int:
    """Writes docs/modelled.md, or prints the page of the file that is named; 2 if it cannot be read."""
    if not arguments:
        table = predict(read(published.FOLDER / "zeropp_throughput.csv"))
        (DOCS / "modelled.md").write_text(page(table) + measured_here(measured_trials()), encoding="utf-8")
        return 0
    try:
        sys.stdout.write(page(predict(read(Path(arguments[0])))))
    except (PublishedError, OSError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        sys.stderr.write(f"docs.tables.published_steps: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
