"""Predicts published throughput from a few of the published numbers, and reports how far the predictions are off.

``python -m docs.tables.published_steps`` writes docs/modelled.md from ``report/published/zeropp_throughput.csv``.
Given another file with the same columns, it prints the page for that file instead.  Given also the name of a TOML
file, it writes the machine that is fitted to the rows, with all equally good fits, for ``zeropp plan --machine``.

Columns that the file needs:

- ``system``: a row of ``zeropp_volume.csv``, or any name if ``volume_m`` is given;
- ``model``, ``parameters_billion``, ``gpus``, ``gpus_per_node``;
- ``rate_gbps`` of one adapter, ``adapters`` of a node, ``tokens_per_gpu``;
- ``seconds`` of a step, or ``tflops_per_gpu``.

Optional columns:

- ``volume_m``: bytes between nodes in a micro-batch in units of M, the size of the model in 16 bits;
- ``accumulation``: micro-batches in a step, each of which sends these bytes; ``tokens_per_gpu`` are those of the step;
- ``tp``, ``pp``: ranks among which layers are cut, and stages of a pipeline.  ``tokens_per_gpu`` are the step's tokens
  divided by all GPUs.  Messages of tensor parallelism stay inside nodes and are not modelled.  A stage sends 1 / ``pp``
  of M, to the nodes with the same stage, and is idle for ``(pp - 1) / accumulation`` of its computation;
- ``overlap``: ``none`` (the default) or ``full``;
- ``fitted``: ``yes`` for the rows to which the machine is fitted.  If no row has a ``yes``, each row is predicted from
  all others;
- ``source``, ``layers``, ``hidden``: not used.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from docs import numbers
from docs.tables import markdown
from harness.measure import machine_file
from impl.plan.step_time import EQUAL_FITS, FLOPS_PER_TOKEN, Machine, Work, flops, least_seconds, step_time
from report.data import published
from report.figures.predictions import measured_over, score, score_in_words

DOCS: Final = Path(__file__).parents[1]
PREDICTED: Final = Path("results/predicted")
ELEMENT_BYTES: Final = 2  # the unit M of volumes is the size of the model in 16 bits
NEEDED: Final = (
    "system", "model", "parameters_billion", "gpus", "gpus_per_node", "rate_gbps", "adapters",
    "tokens_per_gpu",
)  # fmt: skip
_MEASURED: Final = ("volume_m", "seconds", "tflops_per_gpu")  # optional
_PARALLEL: Final = ("accumulation", "tp", "pp")  # optional, 1 by default
APART: Final = (
    1.25  # ratio of the largest to the smallest speed-up of these fits, above which nothing is known
)
IDLE_LINK: Final = 0.1  # share of a step up to which sending tests nothing: its computation decides
EFFICIENCIES: Final = tuple(np.geomspace(0.05, 1.0, 77))  # of adapters, 4 % apart, for which fits are made


class PublishedError(ValueError):
    """Raised for a table that cannot be modelled; the message names the file, the row and the column."""


def read(path: Path) -> pd.DataFrame:
    """Read the distinct rows of a table, and compute the columns ``seconds``, ``tflops``, ``work`` and ``fitted``.

    Raises:
        PublishedError: If a column is missing, a number is not above 0, a system's volume is not known, or a row's
            parallelism cannot be modelled.
    """
    table = pd.read_csv(path)
    if missing := [name for name in NEEDED if name not in table]:
        raise PublishedError(f"{path}: column {missing[0]} is missing: add it (needed: {', '.join(NEEDED)})")
    usual: dict[str, Any] = {**dict.fromkeys(_MEASURED, np.nan), "overlap": "none", "fitted": "no"}
    usual |= dict.fromkeys(_PARALLEL, 1)
    table = table.assign(**{name: value for name, value in usual.items() if name not in table})
    table = table.fillna({"overlap": "none", "fitted": "no"})
    table = table.drop_duplicates([*NEEDED, "seconds", "tflops_per_gpu"], ignore_index=True)

    def check(name: str, values: pd.Series) -> None:
        parsed = pd.to_numeric(values, errors="coerce")
        if len(bad := values[~(parsed > 0) | ~np.isfinite(parsed)]):
            row = f"{path}, row {bad.index[0] + 1}"
            raise PublishedError(f"{row}: {name} is {bad.iloc[0]}; expected a number above 0")

    for name in (*NEEDED[2:], *_PARALLEL):
        check(name, table[name])
    _check_parallel(path, table)
    known = published.volume().set_index("method")["total_m"]
    volumes = table["volume_m"].fillna(table["system"].map(known))
    if len(unknown := table[volumes.isna()]):
        raise PublishedError(
            f"{path}, row {unknown.index[0] + 1}: the volume that system {unknown['system'].iloc[0]} sends is not "
            f"known; add column volume_m (known systems: {', '.join(known.index)})"
        )
    parameters, stages = table["parameters_billion"] * 1e9, table["pp"]
    nodes = (table["gpus"] / table["gpus_per_node"] / stages).clip(lower=1)  # that exchange a stage's weights
    egress = volumes * table["accumulation"] * ELEMENT_BYTES * parameters / stages * (nodes - 1) / nodes
    idle = (stages - 1) / table["accumulation"]
    rate = table["rate_gbps"] * table["adapters"] * 1e9 / 8
    operations = FLOPS_PER_TOKEN * parameters * table["tokens_per_gpu"]
    seconds = table["seconds"].fillna(operations / (table["tflops_per_gpu"] * 1e12))
    check("seconds (or tflops_per_gpu)", seconds)
    check("volume_m", volumes)
    columns = (parameters, table["tokens_per_gpu"], egress, rate, idle)
    works = [
        Work(parameters=p, tokens=t, egress_bytes=e, rate=r, idle=i)
        for p, t, e, r, i in zip(*columns, strict=True)
    ]
    return table.assign(
        seconds=seconds,
        tflops=operations / seconds / 1e12,
        work=pd.Series(works, table.index, dtype=object),
        fitted=table["fitted"].eq("yes"),
    )


def _check_parallel(path: Path, table: pd.DataFrame) -> None:
    """Raise a PublishedError for a row whose parallelism cannot be modelled."""
    for index, row in table.iterrows():
        gpus, inside, tp, pp, accumulation = (
            row[name] for name in ("gpus", "gpus_per_node", "tp", "pp", "accumulation")
        )
        why = ""
        if tp > inside or inside % tp:
            why = f"tp is {tp:g}, and the {inside:g} GPUs of a node are not a multiple of it"
        elif gpus % (tp * pp):
            why = f"tp times pp is {tp * pp:g}, and the {gpus:g} GPUs are not a multiple of it"
        elif pp > 1 and accumulation < pp:
            why = f"pp is {pp:g}, and accumulation is {accumulation:g}; as many micro-batches as stages are needed"
        elif pp > 1 and gpus / inside % pp:
            why = f"pp is {pp:g}, and the {gpus / inside:g} nodes are not a multiple of it"
        if why:
            raise PublishedError(
                f"{path}, row {int(str(index)) + 1}: {why}: correct the row, or leave it out"
            )


def _columns(works: Sequence[Work]) -> dict[str, np.ndarray]:
    """Return each field of the works as an array (works,)."""
    return {each.name: np.array([getattr(work, each.name) for work in works]) for each in fields(Work)}


def _seconds(machine: Machine, works: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the seconds (works,) of :func:`step_time` for works of :func:`_columns`, all at once.

    A fit asks for them a hundred times.
    """
    compute = (1 + works["idle"]) * machine.compute(works["parameters"], works["tokens"])  # type: ignore[arg-type]
    wire = works["egress_bytes"] / (works["rate"] * machine.efficiency)
    return np.asarray(compute + wire if machine.overlap == "none" else np.maximum(compute, wire))


def fit(rows: pd.DataFrame, efficiency: float | None = None) -> Machine:
    """Return the machine whose steps are nearest to those of the rows, by least squares of relative errors.

    Args:
        rows: Rows of :func:`read`.
        efficiency: Share of their rate that adapters achieve; None to fit it, too.

    Raises:
        PublishedError: If there are no rows, or their ``overlap`` is not ``none`` in all or ``full`` in all.
    """
    if len(set(rows["overlap"])) != 1:
        raise PublishedError(
            f"a machine can be fitted only to rows with one value of column overlap, but these {len(rows)} rows have "
            f"{len(set(rows['overlap']))} values: keep the rows with one of them"
        )
    tokens, overlap = rows["tokens_per_gpu"], rows["overlap"].iloc[0]
    if overlap not in ("none", "full"):
        raise PublishedError(f'column overlap is "{overlap}": expected none or full')
    several = len(set(tokens)) > 1  # a single batch size does not separate `fixed` from `per_token`

    def machine(values: np.ndarray) -> Machine:
        # The values are scaled to be about 1: 1e-10 s for each parameter, 1e-13 s for each parameter and token.
        fixed, per_token, share = values
        return Machine(
            name="fitted",
            source=f"{len(rows)} rows",
            fixed=fixed * 1e-10 if several else 0.0,
            per_token=per_token * 1e-13,
            efficiency=share if efficiency is None else efficiency,
            fewest=float(tokens.min()),
            most=float(tokens.max()),
            overlap=overlap,
        )

    works, measured = _columns(list(rows["work"])), rows["seconds"].to_numpy()

    def errors(values: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(_seconds(machine(values), works) / measured))

    start = [1.0, 1e13 * float((rows["seconds"] / (rows["parameters_billion"] * 1e9 * tokens)).min()), 0.8]
    bounds = ([0, 1e-9, 0.01], [np.inf, np.inf, 1])
    return machine(least_squares(errors, start, bounds=bounds).x)


def equal_fits(rows: pd.DataFrame) -> list[Machine]:
    """Return the machines whose error of fit to the rows is at most :data:`EQUAL_FITS` larger than the best machine's.

    One machine is fitted for each efficiency of adapters in :data:`EFFICIENCIES`.
    """
    works, measured = _columns(list(rows["work"])), rows["seconds"].to_numpy()

    def error(machine: Machine) -> float:
        return float(np.sqrt(np.mean(np.log(_seconds(machine, works) / measured) ** 2)))

    fits = [fit(rows), *(fit(rows, float(share)) for share in EFFICIENCIES)]
    errors = [error(machine) for machine in fits]
    return [machine for machine, each in zip(fits, errors, strict=True) if each <= min(errors) + EQUAL_FITS]


def machine_of(rows: pd.DataFrame, name: str, source: str) -> Machine:
    """Return the machine that is fitted to the rows, with the other equally good fits as its alternatives.

    Its numbers have four digits, more than published throughputs have.
    """
    known = rows[rows["fitted"]] if rows["fitted"].any() else rows
    values: list[dict[str, Any]] = [
        {field: float(f"{getattr(machine, field):.4g}") for field in ("fixed", "per_token", "efficiency")}
        for machine in equal_fits(known)
    ]
    best, *others = values
    alternatives = [
        {field: other[field] for field in other if other[field] != best[field]} for other in others
    ]
    return replace(
        fit(known), **best, name=name, source=source, nature="published steps",
        alternatives=tuple(filter(None, alternatives)),
    )  # fmt: skip


def speed_up_range(machines: Sequence[Machine], work: Work, share: float) -> tuple[float, float]:
    """Return the smallest and largest speed-up that the machines predict if ``share`` of the bytes is sent."""
    fewer = replace(work, egress_bytes=share * work.egress_bytes)
    found = [step_time(one, work).seconds / step_time(one, fewer).seconds for one in machines]
    return min(found), max(found)


@dataclass(frozen=True)
class Predicted:
    """A table with a prediction for each row."""

    # The rows of :func:`read`, with the columns ``predicted`` (seconds), ``predicted_tflops`` and ``mark``, and the
    # errors of throughput.
    rows: pd.DataFrame
    machine: Machine | None  # the machine on which all rows are predicted; None if each row has its own

    @property
    def held_out(self) -> pd.DataFrame:
        """The rows to which the machine was not fitted."""
        return self.rows[~self.rows["fitted"]]

    @property
    def speedups(self) -> pd.DataFrame:
        """Speed-ups over ``zero3`` of held-out rows, each distinct pair once: ``measured`` and ``predicted``."""
        keys = ["model", "gpus", "rate_gbps", "adapters", "tokens_per_gpu"]
        base = self.rows[self.rows["system"].eq("zero3")]
        others = self.held_out[~self.held_out["system"].eq("zero3")]
        both = others.merge(base, on=keys, suffixes=("", "_base"))
        measured, predicted = (both[f"{name}_base"] / both[name] for name in ("seconds", "predicted"))
        error = predicted / measured - 1
        pairs = both[[*keys, "system"]].assign(measured=measured, predicted=predicted, error=error)
        return pairs.round(9).drop_duplicates([*keys[1:], "system", "measured", "predicted"])


def predict(rows: pd.DataFrame) -> Predicted:
    """Predict each row of a table from the fitted rows or, if there are none, from all other rows.

    For comparison, two simpler predictions are made from the rows to which the machine was fitted.  ``naive_error`` is
    the error if perfect overlap at their best throughput is assumed, ``constant_error`` if their median throughput is.
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
    # The published numbers are throughputs, so errors are those of throughput: measured seconds / predicted seconds.
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


def _errors(name: str, errors: pd.Series) -> list[str]:
    """Return a row of the table of errors: name, number of predictions, and median and 90th percentile of errors."""
    sizes = errors.abs()
    return [name, str(len(sizes)), f"{sizes.median():.1%}", f"{sizes.quantile(0.9):.1%}"]


def measured_trials() -> pd.DataFrame:
    """Return the trials of results/predicted.  A calibration predicted their steps before the trials ran."""
    tables = {suite: measured_over(numbers.read(suite, PREDICTED)) for suite in numbers.suites(PREDICTED)}
    parts = [
        rows.assign(suite=suite, setting=f"{suite} " + rows["setting"]) for suite, rows in tables.items()
    ]
    return pd.concat(parts, ignore_index=True)


def measured_here(rows: pd.DataFrame) -> str:
    """Return the page's section on :func:`measured_trials` as Markdown."""
    lines = []
    for suite, trials in rows.groupby("suite"):
        scores = score(trials)
        errors = [f"{scores[name]:.1%}" for name in ("median", "ninth", "naive_median")]
        ordered = f"{scores['ordered']:.0%} of {scores['pairs']:.0f}" if scores["pairs"] else "-"
        lines.append([suite, f"{scores['settings']:.0f}", *errors, ordered])
    text = (
        f"results/predicted has {len(rows)} trials that were predicted from the calibration in "
        f"results/predicted/here.toml before they ran. {score_in_words(rows)}"
    )
    head = [
        "suite", "settings", "median error", "90th percentile", "median error of computation + wire",
        "pairs in right order",
    ]  # fmt: skip
    return f"\n## Measured here\n\n{textwrap.fill(text, 120)}\n\n{markdown.table(head, lines)}"


def page(table: Predicted) -> str:
    """Return the page of one table as Markdown."""
    rows, held, pairs = table.rows, table.held_out, table.speedups
    fitted = "Each row is predicted from all other rows of its table."
    if machine := table.machine:
        fitted = f"""The machine is fitted to {int(rows["fitted"].sum())} rows of the table below. On it, computing
        takes {machine.fixed:.3g} s for each parameter plus {machine.per_token:.3g} s for each parameter and token of a
        rank. Network adapters achieve {machine.efficiency:.0%} of their rate, and communication
        {"does not overlap" if machine.overlap == "none" else "overlaps fully"} with computation."""
    outside = " Rows whose batch lies outside the fitted range are marked *transferred*."
    transferred = outside if rows["mark"].eq("transferred").any() else ""
    keys = ["tokens_per_gpu", "rate_gbps", "adapters", "system", "tflops"]
    distinct = len(rows.round({"tflops": 3}).drop_duplicates(keys))
    errors = [
        _errors("throughput of the rows that were held out", held["error"]),
        _errors(
            "the same by a simpler model: perfect overlap at the best fitted throughput", held["naive_error"]
        ),
        _errors("the same by a simpler model: the median fitted throughput", held["constant_error"]),
    ]
    errors += [_errors("speed-up over ZeRO-3, distinct pairs of rows", pairs["error"])] if len(pairs) else []
    introduction = [
        """This page tests the step-time model (`impl/plan/step_time.py`) on published throughput: a machine is fitted
        to some of the rows, and the model predicts the others. `python -m docs.tables.published_steps` writes it from
        `report/published/zeropp_throughput.csv`, which has the bars of ZeRO++'s announcement (June 2023).
        Given another CSV file with the same columns, it prints the page for that file.""",
        f"{fitted} The errors of its predictions are:",
    ]
    paragraphs = [
        _identified(rows),
        _untested(rows),
        f"""This shows that the published numbers are consistent with the model; it does not validate the model. Only
        {distinct} of the {len(rows)} rows are distinct, since several models have the same published throughput. The
        size of a language model does not change its predicted throughput, because computation and bytes both grow in
        proportion to the parameters. The number of nodes does not change it either, because the model has neither
        stragglers nor congestion. An adapter's efficiency belongs to its transport: RDMA and TCP at one nominal rate
        achieve different efficiencies.{transferred}""",
    ]
    if len(held):
        worst = held.iloc[int(held["error"].abs().to_numpy().argmax())]
        rate, change = worst["rate_gbps"] * worst["adapters"], "more" if worst["error"] < 0 else "less"
        paragraphs.append(
            f"""The prediction is worst for {worst["system"]} of {worst["model"]} at {rate:g} Gbit/s and
            {worst["tokens_per_gpu"]:g} tokens, which achieved {change} than predicted: the fitted efficiency and
            overlap do not both hold there."""
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
    head = ["model", "Gbit/s of a node", "tokens/GPU", "system", "TFLOPs/GPU", "predicted", "error", "mark"]
    summary = markdown.table(["predicted quantity", "predictions", "median error", "90th percentile"], errors)
    begin, text = (
        "\n\n".join(textwrap.fill(" ".join(paragraph.split()), 120) for paragraph in part)
        for part in (introduction, filter(None, paragraphs))
    )
    return f"# Published steps against the model\n\n{begin}\n\n{summary}\n{text}\n\n{markdown.table(head, lines)}"


def _identified(rows: pd.DataFrame) -> str:
    """Return sentences on the speed-ups of ZeRO++ that the equally good fits predict, and on how far they are apart."""
    known = rows[rows["fitted"]] if rows["fitted"].any() else rows
    machines = equal_fits(known)
    shares = published.volume().set_index("method")["total_m"]
    share = float(shares["zeropp"] / shares["zero3"])
    # Of each rate and batch, the row that sends most has ZeRO-3's bytes.
    bases = rows[rows["system"].eq("zero3")] if rows["system"].eq("zero3").any() else rows
    ranges = [speed_up_range(machines, work, share) for work in bases["work"]]
    widest = max(ranges, key=lambda pair: pair[1] / pair[0])
    low, high = min(one.efficiency for one in machines), max(one.efficiency for one in machines)
    found = f"{len(machines)} fits with efficiencies of adapters from {low:.0%} to {high:.0%}"
    fits = (
        f"{found} are as good as the best one\n(within {100 * EQUAL_FITS:.0f} percentage point of its error)."
    )
    if widest[1] / widest[0] > APART:
        return f"""{fits} They predict speed-ups of ZeRO++ over ZeRO-3 that are too far apart, as from
        {widest[0]:.2f} to {widest[1]:.2f} in one row: these rows do not tell computation from sending, so no speed-up
        is predicted."""
    return f"""{fits} In each row, the speed-ups of ZeRO++ over ZeRO-3 that they predict are at most a factor of
    {widest[1] / widest[0]:.2f} apart."""


def _untested(rows: pd.DataFrame) -> str:
    """Return a sentence on the rows whose sending is so short that they do not test it; empty if there are none."""
    works = rows["work"]
    pairs = zip(works, rows["seconds"], strict=True)
    shares = [work.egress_bytes / work.rate / seconds for work, seconds in pairs]
    count = sum(share < IDLE_LINK for share in shares)
    if not count:
        return ""
    return f"""In {count} of {len(rows)} rows, sending at the nominal rate would take less than {IDLE_LINK:.0%} of the
    step. Such rows hardly test the model of communication."""


PEAKS: Final = {"A100": 312e12, "H200": 989e12}  # dense operations a second in bf16, by data sheet


def shares_of_peak() -> pd.Series:
    """Return the shares of the peak that published steps of other systems achieve.

    ``report/published/step_times_others.csv`` has 26 steps of FSDP on A100 and H200, with their sources.  A parameter
    and a token count as 6 operations, also with activation checkpointing, whose repeated operations are no progress.
    """
    rows = pd.read_csv(published.FOLDER / "step_times_others.csv")
    peak = rows["hardware"].map(lambda text: next(flops for name, flops in PEAKS.items() if name in text))
    return 6e9 * rows["parameters_billion"] * rows["tokens_per_gpu"] / rows["seconds"] / peak


def main(arguments: list[str]) -> int:
    """Write docs/modelled.md, or print the page for the file that is given; return 2 if the file cannot be read.

    A second argument names a machine file to write.
    """
    if not arguments:
        table = predict(read(published.FOLDER / "zeropp_throughput.csv"))
        (DOCS / "modelled.md").write_text(page(table) + measured_here(measured_trials()), encoding="utf-8")
        return 0
    try:
        path, *machines = map(Path, arguments)
        rows = read(path)
        for target in machines[:1]:
            machine_file.write(target, machine_of(rows, target.stem, f"fitted to rows of {path.name}"))
        sys.stdout.write(page(predict(rows)))
    except (PublishedError, OSError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        sys.stderr.write(f"docs.tables.published_steps: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
