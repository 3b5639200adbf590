"""Compares steps that ``zeropp whatif`` predicts with steps that are measured later, and writes docs/whatif_errors.md.

The suite ``docs/tables/whatif_errors.toml`` is measured.  Only its first two trials, FSDP2 and DDP at one rate, are
traced, and all others are predicted from those two traces.  Predictions are committed before the suite runs::

    zeropp calibrate docs/tables/whatif_errors_machine.toml    # this machine's codecs
    python -m docs.tables.whatif_errors trace FOLDER      # traces of two trials
    python -m docs.tables.whatif_errors predict FOLDER    # writes docs/tables/whatif_errors.csv: commit it
    zeropp run docs/tables/whatif_errors.toml --results FOLDER
    python -m docs.tables.whatif_errors measure "what else ran on the machine" FOLDER...    # one folder for each run
    python -m docs.tables.whatif_errors                   # writes the page from the table
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, Final

import pandas as pd

from docs.tables import markdown
from harness import cli
from harness.measure import machine_file
from harness.records.trial_record import path_of, read, slowest_seconds
from harness.suites.peers import family_of
from harness.suites.suite import Suite
from harness.suites.suite_file import load
from harness.suites.trial import Trial
from harness.whatif import joint, kineto
from harness.whatif.joint import Traced
from harness.whatif.policies import SAME, Target
from harness.whatif.predict import check_replay, predict

HERE: Final = Path(__file__).parent
SUITE: Final = HERE / "whatif_errors.toml"
TABLE: Final = HERE / "whatif_errors.csv"
PAGE: Final = HERE.parent / "whatif_errors.md"
# Seconds of codecs on the machine that measures, and how its ranks share processors.
MACHINE: Final = HERE / "whatif_errors_machine.toml"
SOURCES: Final = 2  # the first trials of the suite, which are traced
APART: Final = 0.05  # relative difference of two measured steps from which their order is compared
BYTES_PER_MBIT: Final = 1.25e5
_OURS: Final = "our engine, from a trace of FSDP2 or DDP"
_ITSELF: Final = "the traced setting itself"


def sources(suite: Suite) -> dict[str, Trial]:
    """Return the trials that are traced, by strategy."""
    return {trial.strategy: trial for trial in suite.trials[:SOURCES]}


@dataclass(frozen=True)
class Question:
    """What is predicted: a trial of the suite, from the trace of another trial."""

    trial: Trial
    source: str  # strategy of the traced trial
    policy: str

    @property
    def row(self) -> dict[str, Any]:
        """The prediction's setting as a row of the table."""
        trial = self.trial
        return {
            "trial": trial.id, "strategy": trial.strategy, "types": trial.peer.compute, "source": self.source,
            "policy": self.policy, "topology": str(trial.topology()), "rate_mbit": trial.cluster.rate,
        }  # fmt: skip


def questions(suite: Suite) -> list[Question]:
    """Return all predictions: each trial from the trace of its own library, and ours from both traces."""
    asked = []
    for trial in suite.trials:
        if (family := family_of(trial.strategy)) is None:
            asked += [Question(trial, source, trial.strategy) for source in sources(suite)]
        else:
            narrow = trial.strategy.endswith("bf16") or trial.peer.compute == "bf16"
            asked.append(Question(trial, family, "bf16" if narrow else SAME))
    return asked


def traced(suite: Suite, results: Path) -> dict[str, Traced]:
    """Read the traces of both sources, by strategy."""
    found = {}
    for strategy, trial in sources(suite).items():
        paths = sorted((results / suite.name / "traces" / trial.id).glob("rank-*.json.gz"))
        topology, rate = trial.topology(), (trial.cluster.rate or 0.0) * BYTES_PER_MBIT
        found[strategy] = joint.join(map(kineto.read, paths), topology.ranks_per_node, rate)
    return found


def predicted(suite: Suite, results: Path) -> pd.DataFrame:
    """Predict all trials of the suite from the traces, and return a table with a row for each prediction."""
    machine, rows = machine_file.read(MACHINE), []
    traces = traced(suite, results)
    for run in traces.values():
        check_replay(run)
    for question in questions(suite):
        run, topology = traces[question.source], question.trial.topology()
        before, after = (machine.stretch(one.nodes, one.ranks_per_node) for one in (run.topology, topology))
        rate = (question.trial.cluster.rate or 0.0) * BYTES_PER_MBIT
        target = Target(question.policy, rate, topology, machine, after / before)
        prediction = predict(run, target)
        rows.append(
            question.row | {"predicted": prediction.seconds, "low": prediction.low, "high": prediction.high}
        )
    return pd.DataFrame(rows)


def measured(table: pd.DataFrame, suite: Suite, folders: Sequence[Path], load_text: str) -> pd.DataFrame:
    """Add each trial's measured step, in all and by run, to the table of predictions.

    The step of a run is the median of its steps, NaN if it failed.  The measured step is the median over runs.

    Args:
        table: The predictions.
        suite: The suite.
        folders: The results folders, one for each run of the suite.
        load_text: What else ran on the machine.
    """
    runs = pd.DataFrame({f"run {number}": _steps(suite, folder) for number, folder in enumerate(folders, 1)})
    columns = runs.reindex(table["trial"]).reset_index(drop=True)
    return table.assign(**columns, measured=columns.median(axis=1), load=load_text)


def _steps(suite: Suite, folder: Path) -> dict[str, float]:
    """Return the median step of each trial in one results folder, by the trial's id."""
    steps = {}
    for trial in suite.trials:
        record = read(path_of(folder / suite.name, trial.id))
        seconds = slowest_seconds(record) if record.failure is None else []
        steps[trial.id] = float(pd.Series(seconds, dtype=float).median())
    return steps


def kind_of(row: Any) -> str:
    """Return what changes from the trace to the prediction of a row, in words."""
    if row["policy"] not in (SAME, "bf16"):
        return _OURS
    if row["policy"] == "bf16":
        return "bf16 instead of fp32 messages"
    if row["topology"] != "2x1":
        return "another topology"
    return _ITSELF if row["rate_mbit"] == 50 else "another rate"


def page(table: pd.DataFrame) -> str:
    """Return the page as Markdown."""
    table = table if "measured" in table else table.assign(measured=float("nan"), load="")
    rows = table.assign(kind=table.apply(kind_of, axis=1), error=table["predicted"] / table["measured"] - 1)
    done = rows[rows["measured"].notna()]
    text = """# Errors of zeropp whatif

This page says how far steps that [`zeropp whatif`](guide/what_if.md) predicts are from steps that were measured later.
FSDP2 and DDP are traced on 2x1 ranks at 50 Mbit/s between network namespaces, and every other setting is predicted from
these two traces. The predictions were committed before the settings were measured.
`python -m docs.tables.whatif_errors` writes this page, and the module's docstring lists the commands that repeat the
measurement.
"""
    if done.empty:
        return text + "\nNo setting is measured yet.\n"
    kinds = [(str(kind), part) for kind, part in done.groupby("kind", sort=False)]
    elsewhere = done[~done["kind"].isin([_OURS, _ITSELF])]
    kinds.append(("DDP and FSDP2 at another rate, topology or type", elsewhere))
    summary = [
        [
            kind,
            str(len(part)),
            f"{part['error'].abs().median():.1%}",
            f"{part['error'].abs().quantile(0.9):.1%}",
        ]
        for kind, part in kinds
    ]
    right, pairs = order(done)
    load_text = f"While the settings were measured, {done['load'].iloc[0]}."
    text += f"\n{textwrap.fill(load_text, 120)}\n"
    runs = done.drop_duplicates("trial").filter(like="run ")
    if runs.shape[1] > 1:
        apart = (runs.max(axis=1) / runs.min(axis=1) - 1).dropna()
        text += (
            f"The suite ran {runs.shape[1]} times, and a measured step is the median over these runs.\nThe longest "
            f"step of a trial was longer than its shortest by {apart.median():.0%} in the median and by up to "
            f"{apart.max():.0%}:\nno prediction can be better than that.\n"
        )
    for first, second in rising(done):
        text += (
            f"{first['strategy']} took {first['measured']:.3f} s at {first['rate_mbit']:g} Mbit/s and "
            f"{second['measured']:.3f} s at {second['rate_mbit']:g} Mbit/s, "
            "although the link was faster: such differences are errors of these measurements.\n"
        )
    text += "\n"
    text += markdown.table(["what changes", "predictions", "median error", "90th percentile"], summary)
    text += (
        f"\nOf {pairs} pairs of configurations of one setting whose measured steps differ by more than {APART:.0%},\n"
        f"{right} ({right / max(1, pairs):.0%}) are predicted in the right order.\n\n"
    )
    inside = done["measured"].between(done["low"], done["high"]).sum()
    text += (
        "[The interval](guide/what_if.md#what-the-interval-means) spans two assumptions on overheads of collectives.\n"
        f"It contains the measured step in {inside} of "
        f"{len(done)} predictions: it shows what a trace at one rate leaves open, and is not\na confidence interval. "
        "The column *traced* names the trace from which the row is predicted.\n\n"
    )
    lines = [
        [
            row["strategy"] + (", bf16" if row["types"] == "bf16" else ""), row["source"], row["topology"],
            f"{row['rate_mbit']:g}", f"{row['measured']:.3f}", f"{row['predicted']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}", f"{row['error']:+.1%}",
        ]
        for row in done.to_dict("records")
    ]  # fmt: skip
    head = [
        "configuration",
        "traced",
        "ranks",
        "Mbit/s",
        "measured, s",
        "predicted, s",
        "interval, s",
        "error",
    ]
    return text + markdown.table(head, lines)


def rising(rows: pd.DataFrame) -> list[tuple[Any, Any]]:
    """Return pairs of trials of one configuration whose measured step is longer although the link is faster."""
    pairs = []
    for _, same in rows.drop_duplicates("trial").groupby(["strategy", "types", "topology"]):
        by_rate = same.sort_values("rate_mbit").to_dict("records")
        pairs += [(slow, fast) for slow, fast in pairwise(by_rate) if fast["measured"] > slow["measured"]]
    return pairs


def order(rows: pd.DataFrame) -> tuple[int, int]:
    """Return how many pairs of configurations of one setting are predicted in the right order, and how many there are.

    Pairs whose measured steps differ by at most :data:`APART` are left out.
    """
    right = pairs = 0
    for _, setting in rows.groupby(["topology", "rate_mbit"]):
        for first, second in combinations(setting.to_dict("records"), 2):
            apart = abs(first["measured"] / second["measured"] - 1)
            if first["trial"] == second["trial"] or apart <= APART:
                continue
            pairs += 1
            right += (first["measured"] < second["measured"]) == (first["predicted"] < second["predicted"])
    return right, pairs


def main(arguments: list[str]) -> int:
    """Run one of the commands in the module's docstring."""
    suite = load(SUITE)
    match arguments:
        case ["trace", results]:
            for trial in sources(suite).values():
                if status := cli.main(["trace", str(SUITE), trial.id, "--results", results]):
                    return status
            return 0
        case ["predict", results]:
            predicted(suite, Path(results)).to_csv(TABLE, index=False, float_format="%.6g")
            return 0
        case ["measure", load_text, *folders] if folders:
            table = pd.read_csv(TABLE)[["trial", *questions(suite)[0].row, "predicted", "low", "high"]]
            table = measured(
                table.loc[:, ~table.columns.duplicated()], suite, [*map(Path, folders)], load_text
            )
            table.to_csv(TABLE, index=False, float_format="%.6g")
        case []:
            table = pd.read_csv(TABLE)
        case _:
            sys.stderr.write(f"{__doc__}\n")
            return 2
    PAGE.write_text(page(table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
