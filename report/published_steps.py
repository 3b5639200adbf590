"""Predicts published throughput from a few of its own numbers, and says how far off that is.

``python -m report.published_steps`` writes docs/modelled.md from ``report/published/zeropp_throughput.csv``;
with a file of the same columns it prints the page for that one instead.

Columns: ``system`` (a row of ``zeropp_volume.csv``), ``model``, ``parameters_billion``, ``gpus``,
``gpus_per_node``, ``rate_gbps`` of one adapter, ``adapters`` of a node, ``tokens_per_gpu``, and ``seconds``
of a step or ``tflops_per_gpu``; if there: ``source``, ``layers``, ``hidden``, ``volume_m`` (bytes between
nodes in units of M, where ``zeropp_volume.csv`` has no such system), ``overlap`` (``none`` or ``full``), and
``fitted``: ``yes`` for the rows that the machine is fitted to.  Without a ``yes`` each row is predicted from
all others.
"""

from __future__ import annotations

import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from harness.records import archive
from impl.plan.machine import Machine
from impl.plan.step_time import FLOPS_PER_TOKEN, Work, flops, least_seconds, step_time
from report.data import published
from report.data.frames import load
from report.data.metrics import derive
from report.figures.predictions import measured_over, score, score_in_words

DOCS: Final = Path(__file__).parents[1] / "docs"
PREDICTED: Final = Path(__file__).parents[1] / "results" / "predicted"
ELEMENT_BYTES: Final = 2  # M is the size of the model in 16 bits
NEEDED: Final = (
    "system", "model", "parameters_billion", "gpus", "gpus_per_node", "rate_gbps", "adapters",
    "tokens_per_gpu",
)  # fmt: skip
_NUMBERS: Final = NEEDED[2:]


class PublishedError(ValueError):
    """A table that cannot be modelled; the message names the file, the row and the column."""


def read(path: Path) -> pd.DataFrame:
    """Returns the distinct rows of a table, with ``seconds``, ``work`` and ``fitted`` worked out.

    Raises:
        PublishedError: for a missing column, a number that is not above 0, or a system of unknown volume.
    """
    table = pd.read_csv(path)
    if missing := [name for name in NEEDED if name not in table]:
        raise PublishedError(f"{path}: column {missing[0]} is missing")
    if "seconds" not in table and "tflops_per_gpu" not in table:
        raise PublishedError(f"{path}: neither column seconds nor column tflops_per_gpu is there")
    table = table.drop_duplicates([*NEEDED, *table.columns.intersection(["seconds", "tflops_per_gpu"])])
    table = table.reset_index(drop=True)

    def column(name: str, default: Any) -> pd.Series:
        return table.get(name, pd.Series(default, table.index)).fillna(default)

    def check(name: str, values: pd.Series) -> None:
        numbers = pd.to_numeric(values, errors="coerce")
        if len(bad := values[~(numbers > 0) | ~np.isfinite(numbers)]):
            raise PublishedError(
                f"{path}, row {bad.index[0] + 1}: {name} is {bad.iloc[0]}, not a number above 0"
            )

    for name in _NUMBERS:
        check(name, table[name])
    known = published.volume().set_index("method")["total_m"]
    volumes = column("volume_m", np.nan).fillna(table["system"].map(known))
    if volumes.isna().any():
        row = int(volumes.isna().to_numpy().argmax())
        raise PublishedError(
            f"{path}, row {row + 1}: what {table['system'][row]} sends is not known; say it as volume_m "
            f"(known: {', '.join(known.index)})"
        )
    parameters, nodes = table["parameters_billion"] * 1e9, table["gpus"] / table["gpus_per_node"]
    egress = volumes * ELEMENT_BYTES * parameters * (nodes - 1).clip(lower=0) / nodes
    rate = table["rate_gbps"] * table["adapters"] * 1e9 / 8
    operations = FLOPS_PER_TOKEN * parameters * table["tokens_per_gpu"]
    seconds = column("seconds", np.nan).fillna(operations / (column("tflops_per_gpu", np.nan) * 1e12))
    check("seconds, by tflops_per_gpu if not said,", seconds)
    check("volume_m", volumes)
    works = [
        Work(parameters=p, tokens=t, egress_bytes=e, rate=r)
        for p, t, e, r in zip(parameters, table["tokens_per_gpu"], egress, rate, strict=True)
    ]
    return table.assign(
        seconds=seconds,
        tflops=operations / seconds / 1e12,
        work=pd.Series(works, table.index, dtype=object),
        overlap=column("overlap", "none"),
        fitted=column("fitted", "no").eq("yes"),
    )


def fit(rows: pd.DataFrame) -> Machine:
    """Returns the machine whose steps are nearest to the rows', by least squares of relative errors.

    Raises:
        PublishedError: for no rows, or rows that overlap differently, or neither not at all nor fully.
    """
    if len(set(rows["overlap"])) != 1:
        raise PublishedError(
            f"a machine is fitted to rows of one kind of overlap, not to {len(rows)} of several"
        )
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
        made = machine(values)
        steps = np.array([step_time(made, work).seconds for work in rows["work"]])
        ratios: np.ndarray = np.log(steps / rows["seconds"].to_numpy())
        return ratios

    start = [1.0, 1e13 * float((rows["seconds"] / (rows["parameters_billion"] * 1e9 * tokens)).min()), 0.8]
    found = least_squares(errors, start, bounds=([0, 1e-9, 0.01], [np.inf, np.inf, 1]))
    return machine(found.x)


@dataclass(frozen=True)
class Predicted:
    """A table with predictions, and the machine behind them (None if each row has its own)."""

    rows: (
        pd.DataFrame
    )  # of read(), with predicted (seconds), predicted_tflops, error, naive_error, constant_error
    machine: Machine | None

    @property
    def held_out(self) -> pd.DataFrame:
        """The rows that no fit has seen."""
        return self.rows[~self.rows["fitted"]]

    @property
    def speedups(self) -> pd.DataFrame:
        """Distinct held-out pairs of ``zero3`` with another system: measured and predicted ratio."""
        keys = ["model", "gpus", "rate_gbps", "adapters", "tokens_per_gpu"]
        base = self.rows[self.rows["system"].eq("zero3")]
        others = self.held_out[~self.held_out["system"].eq("zero3")]
        both = others.merge(base, on=keys, suffixes=("", "_base"))
        measured = both["seconds_base"] / both["seconds"]
        predicted = both["predicted_base"] / both["predicted"]
        pairs = both[[*keys, "system"]].assign(
            measured=measured, predicted=predicted, error=predicted / measured - 1
        )
        return pairs.round(9).drop_duplicates([*keys[1:], "system", "measured", "predicted"])


def predict(rows: pd.DataFrame) -> Predicted:
    """Returns the predictions of a table: from its fitted rows, or each row from all others.

    Beside them stand two things that need no model: ``naive_error`` of perfect overlap at the best throughput
    that the fitted rows show, and ``constant_error`` of their median throughput.
    """
    told = bool(rows["fitted"].any())
    shared = fit(rows[rows["fitted"]]) if told else None
    steps, marks, naive, constant = [], [], [], []
    for index, work, fitted in zip(rows.index, rows["work"], rows["fitted"], strict=True):
        seen = rows[rows["fitted"]] if told else rows.drop(index=index)
        step = step_time(shared or fit(seen), work)
        steps.append(step.seconds)
        marks.append("fitted" if fitted else "" if step.calibrated else "transferred")
        naive.append(least_seconds(work, seen["tflops"].max() * 1e12))
        constant.append(flops(work) / 1e12 / seen["tflops"].median())
    # Of throughput, as it was published: the measured step over the predicted one.
    measured = rows["seconds"]
    return Predicted(
        rows.assign(
            predicted=steps,
            mark=marks,
            predicted_tflops=rows["tflops"] * measured / np.array(steps),
            error=measured / np.array(steps) - 1,
            naive_error=measured / np.array(naive) - 1,
            constant_error=measured / np.array(constant) - 1,
        ),
        shared,
    )


def _spread(errors: pd.Series) -> str:
    sizes = errors.abs()
    return f"{sizes.median():.1%} in the median, {sizes.quantile(0.9):.1%} at the 90th percentile"


def measured() -> pd.DataFrame:
    """The trials of results/predicted, whose steps one calibration predicted before they ran, by suite."""
    found = []
    with tempfile.TemporaryDirectory() as there:
        for path in sorted(PREDICTED.glob(f"*{archive.SUFFIX}")):
            rows = measured_over(derive(load(archive.unpack(path, Path(there)))))
            suite = path.name.removesuffix(archive.SUFFIX)
            found.append(rows.assign(suite=suite, cell=f"{suite} " + rows["cell"].astype(str)))
    return pd.concat(found, ignore_index=True)


def measured_here(rows: pd.DataFrame) -> str:
    """Returns the section on :func:`measured` as Markdown."""
    lines = []
    for suite, mine in rows.groupby("suite"):
        found = score(mine)
        ordered = f"{found['ordered']:.0%} of {found['pairs']:.0f}" if found["pairs"] else "-"
        lines.append(
            f"| {suite} | {found['cells']:.0f} | {found['median']:.1%} | {found['ninth']:.1%} "
            f"| {found['naive_median']:.1%} | {ordered} |"
        )
    told = textwrap.fill(
        f"{len(rows)} trials, predicted by results/predicted/here.toml. {score_in_words(rows)}", 120
    )
    return "\n".join([
        "", "## Measured here", "", told, "",
        "| suite | cells | median error | 90th percentile | computation + wire | pairs in order |",
        "| --- | --- | --- | --- | --- | --- |", *lines, "",
    ])  # fmt: skip


def page(table: Predicted) -> str:
    """Returns the page of one table as Markdown."""
    rows, held, pairs = table.rows, table.held_out, table.speedups
    distinct = rows.round({"tflops": 3}).drop_duplicates(
        ["tokens_per_gpu", "rate_gbps", "adapters", "system", "tflops"]
    )
    fitted = "Each row is predicted from all others of its table."
    if machine := table.machine:
        fitted = f"""The machine is fitted to {int(rows["fitted"].sum())} rows: a step takes
        {machine.fixed:.3g} s for each parameter and {machine.per_token:.3g} s for each parameter and token of
        a rank; adapters carry {machine.efficiency:.0%} of their rate; overlap: {machine.overlap}."""
    worst = held.iloc[int(held["error"].abs().to_numpy().argmax())] if len(held) else None
    paragraphs = [
        """`python -m report.published_steps` predicts the published throughput by `impl/plan/step_time.py`
        and writes this page; with a CSV file of the same columns it prints the page for that file.""",
        f"""{fitted} Throughput of the {len(held)} rows that were held out is off by
        {_spread(held["error"])}. Perfect overlap at the best throughput seen is off by
        {_spread(held["naive_error"])}; the median throughput by {_spread(held["constant_error"])}.""",
        f"""This is consistency, not validation: of {len(rows)} rows {len(distinct)} are distinct, and where
        computation and bytes both grow with the parameters, models of all sizes are one.
        Batches outside of those that were fitted are marked *transferred*.""",
    ]
    if len(pairs):
        paragraphs[1] += (
            f" Speed-ups over ZeRO-3 ({len(pairs)} distinct pairs) are off by {_spread(pairs['error'])}."
        )
    if worst is not None:
        rate, more = worst["rate_gbps"] * worst["adapters"], "more" if worst["error"] < 0 else "less"
        paragraphs.append(
            f"""The worst is {worst["system"]} of {worst["model"]} at {rate:g} Gbit/s and
            {worst["tokens_per_gpu"]:g} tokens, which achieved {more} than modelled: there one efficiency and
            this overlap do not hold together."""
        )
    like = ["gbps", "tokens_per_gpu", "system", "tflops", "predicted_tflops", "mark"]
    alike = rows.assign(
        gbps=rows["rate_gbps"] * rows["adapters"],
        tflops=rows["tflops"].round(6),
        predicted_tflops=rows["predicted_tflops"].round(6),
    )
    alike = alike.groupby(like, sort=False).agg({"model": ", ".join, "error": "first"}).reset_index()
    lines = [
        f"| {row['model']} | {row['gbps']:g} | {row['tokens_per_gpu']:g} "
        f"| {row['system']} | {row['tflops']:.3g} | {row['predicted_tflops']:.3g} | {row['error']:+.1%} "
        f"| {row['mark']} |"
        for row in alike.to_dict("records")
    ]
    text = "\n\n".join(textwrap.fill(" ".join(paragraph.split()), 120) for paragraph in paragraphs)
    return "\n".join([
        "# Modelled steps beside published ones", "", text, "",
        "| model | Gbit/s of a node | tokens/GPU | system | TFLOPs/GPU | modelled | error | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *lines, "",
    ])  # fmt: skip


def main(arguments: list[str]) -> int:
    """Writes docs/modelled.md, or prints the page of the file that is named; 2 if it cannot be read."""
    if not arguments:
        table = predict(read(published.FOLDER / "zeropp_throughput.csv"))
        (DOCS / "modelled.md").write_text(page(table) + measured_here(measured()), encoding="utf-8")
        return 0
    try:
        sys.stdout.write(page(predict(read(Path(arguments[0])))))
    except (PublishedError, OSError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        sys.stderr.write(f"report.published_steps: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
