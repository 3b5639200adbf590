"""Metrics derived from raw records.  Formulas and units: docs/reference/metrics.md.

Each function takes :class:`report.data.frames.Frames` and returns one row per trial, pair or part, so
that every printed number can be traced to record ids.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pandas as pd

from harness.records.confidence_intervals import Interval, crossing, geometric_interval, paired_ratio_interval
from harness.suites.model_sizes import PRESETS, tflops_per_rank
from harness.suites.question import LEAST_STEPS
from harness.suites.repeat_order import setting_of
from harness.suites.trial import Trial
from report.data import best_step, contender
from report.data.contender import Comparison, is_baseline, is_preset
from report.data.decoding import generations
from report.data.frames import Frames, groups

RATES_AGREE_WITHIN: Final = 0.10  # policies of a cell are compared at one rate if within this
TRAINING: Final = ("generate", "score", "forward", "backward", "step")  # phases of a step that trains
OTHERS_WITHIN: Final = 0.05  # of the processors' time, of which others may have so much in a trial
SHARES: Final = ("share", "schedule_share", "ideal_share", "processors_busy")  # of bounds on a step
_SOURCES: Final = ("ledger", "predicted")
PAIR: Final = ("cell", "sweep", "seed", "repeat")  # trials that ran under the same conditions
KEPT: Final = [
    "id", "strategy", "contender", "place", "first", "cell", "where", "sweep", "seed", "repeat", "nodes",
    "ranks_per_node", "tokens_per_rank", "rate_mbit", "achieved_mbit", "link_kind",
]  # fmt: skip
"""Columns by which the table of a figure says whose its rows are."""


def trials(frames: Frames) -> pd.DataFrame:
    """Metrics of every finished trial that trained, one row each; seconds, and bytes per step.

    Beside the columns of ``frames.trials`` those that ``report/quantities.csv`` names, and
        alone: whether computation, and the bounds that follow from it, are of computation by itself; else of
            what ranks did in their timed steps while they did not wait.
        schedule_share, ideal_share: schedule_seconds and ideal_seconds / step_seconds.
        egress_bytes: the largest of any node; ledger, or the interface where there is no ledger.
        m_bytes: M times the micro-batches of a step.
        tflops: model TFLOP/s of a rank, for presets.
        first_loss: of the first step, mean over ranks.
        validation_loss, validation_step: of the last validation and the steps before it, warm-ups included;
            NaN if that alone was made, before :data:`harness.suites.question.LEAST_STEPS`.
    """
    table = frames.trials
    for found in (_times(frames), _traffic(frames), _first_loss(frames), _final_loss(frames)):
        table = table.merge(found, on="id", how="left")
    tokens = table["tokens_per_rank"] * table["world"] * table["accumulation"]
    table["tokens_per_second"] = tokens / table["step_seconds"]
    rate = table["achieved_mbit"] * best_step.BITS_PER_MBIT
    table["wire_seconds"] = np.where(table["egress_bytes"] == 0, 0.0, 8 * table["egress_bytes"] / rate)
    table["ideal_seconds"] = table[["compute_seconds", "wire_seconds"]].max(axis=1, skipna=False)
    table["schedule_seconds"] = table["id"].map(best_step.schedule_seconds(frames, timed_steps(frames)))
    at_least = table[["schedule_seconds", "wire_seconds"]].max(axis=1)  # what is sent beside units' messages
    table["schedule_seconds"] = at_least.where(table["schedule_seconds"].notna())
    table["processor_seconds"] = table["id"].map(best_step.processor_seconds(frames))
    either = table[["schedule_seconds", "processor_seconds"]].max(axis=1)
    table["best_seconds"] = either.where(table["schedule_seconds"].notna())
    for name, bound in zip(SHARES, ("best", "schedule", "ideal", "processor"), strict=True):
        table[name] = table[f"{bound}_seconds"] / table["step_seconds"]
    model = ["nodes", "ranks_per_node", "shape", "accumulation"]  # peers have no units of their own
    table["padded"] = table.groupby(model)["padded"].transform("max")
    table["numel"] = table.groupby(model)["numel"].transform("max")
    table["m_bytes"] = (2.0 * table["numel"] * (table["nodes"] - 1)).replace(0.0, np.nan)
    table["m_bytes"] *= table["accumulation"]
    others = np.array([frames.ran[identity].workload != "train" for identity in table["id"]], bool)
    table.loc[others, ["m_bytes", "first_loss"]] = np.nan  # of no meaning: several models, a loss around 0
    columns = (table[name] for name in ("id", "step_seconds", "processes"))
    table["tflops"] = [_tflops(frames.ran[one], *rest) for one, *rest in zip(*columns, strict=True)]
    table["first"] = table.groupby("contender")["order"].transform("min")
    table["_where"] = table["where"].str.replace(r"\d+", lambda number: number[0].zfill(9), regex=True)
    cell = ["nodes", "ranks_per_node", "tokens_per_rank", "rate_mbit", "parameters", "_where"]
    ordered = table.sort_values([*cell, "place", "first", "seed", "repeat"], ignore_index=True)
    return ordered.drop(columns="_where")


def _tflops(trial: Trial, seconds: float, ranks: int) -> float:
    """Model TFLOP/s of each rank; NaN for models whose sizes this package does not know, and of ``rlhf``."""
    model = trial.model
    preset = PRESETS.get(model.name) if trial.workload == "train" else None
    if preset is None or not set(model.arguments) <= {field.name for field in fields(preset)}:
        return math.nan
    changed: dict[str, Any] = asdict(preset) | model.arguments
    shape = type(preset)(**changed)
    sequences = trial.tokens_per_rank // trial.sequence * trial.accumulation * trial.topology().world
    return tflops_per_rank(
        shape, sequences=sequences, length=trial.sequence, recompute=False, seconds=seconds, ranks=ranks
    )


def slowest_steps(frames: Frames) -> pd.DataFrame:
    """For each timed step of each trial, the row of the rank that took longest, with its ``exposed``."""
    timed = frames.steps[~frames.steps["warmup"].astype(bool)]
    slowest = timed.loc[timed.groupby(["id", "index"])["total"].idxmax()]
    exposed = pd.to_numeric(slowest["exposed_forward"]) + pd.to_numeric(slowest["exposed_backward"])
    exposed += best_step.before_training(slowest, "exposed_generate", "exposed_score")
    return slowest.assign(exposed=exposed)


def _times(frames: Frames) -> pd.DataFrame:
    computed = best_step.computations(frames)
    whole = computed[["forward", "backward", "rest"]].astype(float).sum(axis=1, skipna=False)
    computing = whole.groupby([computed["id"], computed["index"]]).max().groupby("id").median()
    slowest = slowest_steps(frames).groupby("id")[["total", "exposed"]].median()
    found = slowest.rename(columns={"total": "step_seconds", "exposed": "exposed_seconds"})
    alone = computed.groupby("id")["alone"].any()
    return found.assign(compute_seconds=computing, alone=alone).reset_index()


def timed_steps(frames: Frames) -> pd.Series[int]:
    """Number of timed steps of each trial, as counted in its records."""
    return frames.steps[~frames.steps["warmup"].astype(bool)].groupby("id")["index"].nunique()


def _traffic(frames: Frames) -> pd.DataFrame:
    """Bytes per step between nodes of each trial; NaN where there is no ledger, prediction or interface."""
    between = (frames.bytes["link"] == "inter") & frames.bytes["phase"].isin(TRAINING)
    sent = frames.bytes.assign(bytes=frames.bytes["bytes"].where(between, 0).astype(float))
    packets = (frames.bytes["bytes"] + frames.bytes["headers"]).where(between, 0).astype(float)
    of_ledger = frames.bytes["source"] == "ledger"
    of_source = {name: sent[sent["source"] == name].groupby("id")["bytes"].sum() for name in _SOURCES}
    of_node = sent[sent["source"] == "ledger"].groupby(["id", "node"])["bytes"].sum()
    counted = frames.interfaces.set_index("id")
    headers = counted["tx_packets"] * counted["header_bytes"].astype(float)
    by_trial = counted["tx_bytes"].astype(float).groupby("id")
    found = pd.DataFrame(
        {
            "sent_bytes": of_source["ledger"],
            "predicted_bytes": of_source["predicted"],
            "segment_bytes": packets[of_ledger].groupby(frames.bytes["id"]).sum(),
            "interface_bytes": by_trial.sum(),
            "header_bytes": headers.groupby("id").sum(min_count=1),
            "egress_bytes": of_node.groupby("id").max().combine_first(by_trial.max()),
        }
    )
    return found.div(timed_steps(frames), axis=0).reset_index(names="id")


def _first_loss(frames: Frames) -> pd.DataFrame:
    """Mean over ranks of the first step's loss."""
    steps = frames.steps
    first = steps[steps["index"] == steps.groupby("id")["index"].transform("min")]
    return first.groupby("id")["loss"].mean().rename("first_loss").reset_index()


def _final_loss(frames: Frames) -> pd.DataFrame:
    """The last validation of trials that repeat it, or trained long; those of others say nothing."""
    last = frames.validations.sort_values("step").groupby("id").tail(1)
    often = {identity for identity, trial in frames.ran.items() if trial.validate_every}
    last = last[last["id"].isin(often) | last["step"].ge(LEAST_STEPS)]
    names = {"loss": "validation_loss", "step": "validation_step"}
    return last[["id", *names]].rename(columns=names)


def pairs(table: pd.DataFrame, is_base: pd.Series[bool]) -> pd.DataFrame:
    """Pairs of each trial with the baseline's of the same cell, seed and repeat.

    Args:
        table: from :func:`trials`.
        is_base: which of its rows are the baseline, one contender in each cell.

    Returns:
        Columns of ``table`` and ``baseline`` (its id), ``speedup`` (its step seconds over ours),
        ``allowed`` (its step seconds over our best_seconds), ``bytes_ratio`` (our bytes between
        nodes over its, ledger) and ``interface_ratio``.  Trials without a baseline are left out.
    """
    of = {"baseline": "id", "baseline_contender": "contender", "baseline_seconds": "step_seconds"}
    of |= {f"baseline_{name}": name for name in ("sent_bytes", "interface_bytes")}
    joined = contender.with_baseline(table, is_base, PAIR, "inner", **of)
    joined["speedup"] = joined["baseline_seconds"] / joined["step_seconds"]
    joined["allowed"] = joined["baseline_seconds"] / joined["best_seconds"]
    joined["bytes_ratio"] = joined["sent_bytes"] / joined["baseline_sent_bytes"]
    joined["interface_ratio"] = joined["interface_bytes"] / joined["baseline_interface_bytes"]
    return joined


def speedup(group: pd.DataFrame, above: str = "baseline_seconds", below: str = "step_seconds") -> Interval:
    """Geometric mean of the ratios of two columns, by seed and repeat, with the spread between sweeps in its
    interval; of rows of :func:`pairs` of one contender in one cell the speed-up.
    """
    by_pair = group.set_index(["seed", "repeat"])  # a trial run again under another time limit: no new pair
    columns = (by_pair[name].to_dict() for name in (above, below, "sweep"))
    return paired_ratio_interval(*columns)


def over_itself(paired: pd.DataFrame) -> Interval | float:
    """The speed-up of some pairs; without ends of a baseline beside itself, and NaN without pairs."""
    if paired.empty:
        return math.nan
    found = speedup(paired)
    itself = paired["contender"].iloc[0] == paired["baseline_contender"].iloc[0]
    return replace(found, low=math.nan, high=math.nan) if itself else found


def geometric(values: pd.Series[float]) -> float:
    """Geometric mean."""
    return float(np.exp(np.log(values).mean()))


def middle(group: pd.DataFrame, column: str) -> float:
    """Geometric mean over sweeps of each one's geometric mean: of paired columns the ratio of two of these
    is :func:`speedup`'s.
    """
    return float(np.exp(np.log(group[column]).groupby(group["sweep"]).mean().mean()))


def step_interval(group: pd.DataFrame, column: str = "step_seconds") -> Interval:
    """Geometric mean of a column of trials with its interval, which is what pages print of their steps."""
    return geometric_interval(list(group[column]), list(group["sweep"]))


def rates_differ(table: pd.DataFrame) -> dict[str, float]:
    """Relative spread of the rates of the contenders' links, for cells where it is too large.

    Unshaped links are left out: they have no target rate, and their probes vary with the machine's load.
    """
    kept = table[table["rate_mbit"].notna() | (table["link_kind"] == "real")].dropna(subset=["achieved_mbit"])
    medians = kept.groupby(["cell", "contender"])["achieved_mbit"].median().groupby("cell")
    spread = medians.max() / medians.min() - 1
    return {str(cell): float(value) for cell, value in spread.items() if value > RATES_AGREE_WITHIN}


def several_rates(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of sizes and topologies that ran at two or more rates."""
    keys = ["nodes", "ranks_per_node", "tokens_per_rank"]
    rates = table.assign(told=table["rate_mbit"].fillna(-1.0)).groupby(keys)["told"].transform("nunique")
    return table[(rates >= 2) & table["achieved_mbit"].notna()]


def records_of(derived: Derived, row: pd.Series) -> list[str]:
    """Ids of the trials behind a table's row: those of its contender where it ran; none of published ones."""
    if isinstance(told := row.get("records"), str):
        return told.split()
    ran = derived.finished
    if not {"contender", "where"} <= set(row.index):
        return []
    behind = (ran["contender"] == row["contender"]) & (ran["where"] == row["where"])
    return sorted({str(one) for one in ran[behind]["id"]})


def break_even(pairs: pd.DataFrame) -> pd.DataFrame:
    """The rate at which a contender and the baseline are equally fast, in settings that differ in rate alone.

    Between two neighbouring measured rates whose speed-ups lie on both sides of 1, on the straight
    line through their logarithms over the logarithm of the rate; NaN where none is crossed.

    Returns:
        One row per such setting and contender that ran at two or more rates: ``break_even_mbit`` (the
        highest crossing) with the ends of its interval, ``break_even_low_mbit`` and ``_high_mbit`` (infinite
        beyond the neighbours, NaN for few pairs; :func:`harness.records.confidence_intervals.crossing`),
        ``fewest_pairs``, which both neighbours have, ``low_mbit`` and ``high_mbit`` (the range measured),
        ``low_speedup`` and ``high_speedup`` at its ends, and ``records``, the ids of its trials and ZeRO-3's,
        with spaces between them.
    """
    keys = ["elsewhere", "nodes", "ranks_per_node", "tokens_per_rank", "place", "contender"]
    rows: list[tuple[object, ...]] = []
    measured = pairs[pairs["achieved_mbit"].notna() & (pairs["id"] != pairs["baseline"])]
    for key, group in groups(measured, keys):
        cells = ((float(mine["achieved_mbit"].median()), mine) for _, mine in groups(group, ["cell"]))
        points = sorted(cells, key=lambda point: point[0])
        if len(points) < 2:
            continue
        (lowest, slow), (highest, fast) = points[0], points[-1]
        records = " ".join(sorted({*group["id"], *group["baseline"]}))
        ends = (lowest, highest, speedup(slow).estimate, speedup(fast).estimate)
        rows.append((*key, *_highest_crossing(points), *ends, records))
    names = ["break_even_mbit", "break_even_low_mbit", "break_even_high_mbit", "fewest_pairs"]
    names += ["low_mbit", "high_mbit", "low_speedup", "high_speedup", "records"]
    return pd.DataFrame(rows, columns=[*keys, *names])


def _highest_crossing(points: list[tuple[float, pd.DataFrame]]) -> tuple[float, float, float, int]:
    """Rate, ends and pairs of the last neighbours whose speed-ups lie on both sides of 1."""
    for (r0, slow), (r1, fast) in reversed(list(pairwise(points))):
        left, right = _log_speedups(slow), _log_speedups(fast)
        both = left.index.intersection(right.index)
        if len(both) and left[both].mean() * right[both].mean() < 0:
            sweeps = slow.set_index(["seed", "repeat"])["sweep"].to_dict()
            places = crossing(left.to_dict(), right.to_dict(), sweeps)
            rates = [r0 * (r1 / r0) ** place if math.isfinite(place) else place for place in places]
            return rates[0], rates[1], rates[2], len(both)
    return math.nan, math.nan, math.nan, 0


def _log_speedups(group: pd.DataFrame) -> pd.Series[float]:
    """Logarithms of the speed-ups of a cell's pairs, by seed and repeat."""
    by_pair = group.drop_duplicates(["seed", "repeat"]).set_index(["seed", "repeat"])
    return by_pair["baseline_seconds"].map(math.log) - by_pair["step_seconds"].map(math.log)


def parity(frames: Frames, table: pd.DataFrame) -> pd.DataFrame:
    """The contrast at a quarter of the rate over the baseline at the full rate, paired by seed and repeat.

    Returns:
        Columns of ``table``, ``baseline`` (its id), ``full_rate``, and ``parity``, of tokens per second.
    """
    shaped = table.dropna(subset=["rate_mbit"])
    ran = [frames.ran[identity] for identity in shaped["id"]]
    unshaped = [
        one.model_copy(update={"cluster": one.cluster.model_copy(update={"rate": None})}) for one in ran
    ]
    elsewhere = [setting_of(one, "seed", "repeat", "measure_quantisation") for one in unshaped]
    shaped = shaped.assign(elsewhere=elsewhere)
    ours = shaped[contender.is_contrast(shaped)].assign(full_rate=lambda t: 4 * t["rate_mbit"])
    base = shaped[is_baseline(shaped)]
    base = base.rename(columns={"rate_mbit": "full_rate", "id": "baseline"})
    keys = ["elsewhere", "sweep", "seed", "repeat", "full_rate"]
    columns = [*keys, "baseline", "tokens_per_second", "achieved_mbit"]
    joined = ours.merge(base[columns], on=keys, suffixes=("", "_baseline"))
    joined["parity"] = joined["tokens_per_second"] / joined["tokens_per_second_baseline"]
    return joined.sort_values(["nodes", "ranks_per_node", "tokens_per_rank", "full_rate"], ignore_index=True)


def parity_interval(group: pd.DataFrame) -> Interval:
    """Geometric mean of the parity of rows of :func:`parity` with one place and rate, with its interval."""
    return speedup(group, "tokens_per_second", "tokens_per_second_baseline")


def split(frames: Frames) -> pd.DataFrame:
    """Mean time of each part of a step, on the slowest rank of each timed step.

    Means, so that the parts add up to the mean step; one row per trial and part.  Where exposed
    communication was not measured (peers), it stays inside forward and backward.
    """
    slowest = slowest_steps(frames)
    parts = slowest[["id", "forward", "backward", "optimizer"]].copy()
    parts["other"] = slowest["total"] - slowest[["forward", "backward", "optimizer"]].sum(axis=1)
    parts["other"] -= best_step.before_training(slowest, "generate", "score")
    parts[["generate", "score"]] = slowest[["generate", "score"]].astype(float)
    for name in ("forward", "backward", "generate", "score"):
        parts[f"exposed in {name}"] = slowest[f"exposed_{name}"].astype(float)
        parts[name] -= parts[f"exposed in {name}"].fillna(0)
    means = parts.groupby("id").mean()
    means["other"] = means["other"].clip(lower=0)
    long = means.reset_index().melt(id_vars="id", var_name="part", value_name="seconds")
    return long.dropna(subset=["seconds"])


@dataclass(frozen=True, eq=False)  # one is another's equal only if it is the same: what is cached of it stays
class Derived:
    """Raw tables with the derived tables that figures share, computed once."""

    frames: Frames
    trials: pd.DataFrame  # of the function of that name, as all below; with a column ``rates_differ``
    pairs: pd.DataFrame
    over_papers: pd.DataFrame  # pairs with the paper's baseline in the place of ZeRO-3's
    differing: dict[str, float]  # of rates_differ
    generations: pd.DataFrame

    @cached_property
    def compared(self) -> Comparison:
        """What the suite's question compares."""
        return contender.comparison(self.finished)

    @cached_property
    def finished(self) -> pd.DataFrame:
        """One row per finished trial, trained or generated: the columns of ``frames.trials``."""
        columns = [*self.frames.trials.columns, "first"]
        generated = self.generations.drop_duplicates("id")[columns]
        both = [table for table in (self.trials[columns], generated) if len(table)]
        return pd.concat(both, ignore_index=True) if both else generated

    @property
    def disturbed(self) -> frozenset[str]:
        """Ids of finished trials in which others took more than :data:`OTHERS_WITHIN` of the processors."""
        ran = self.finished
        return frozenset(str(identity) for identity in ran[ran["taken_share"].gt(OTHERS_WITHIN)]["id"])

    @property
    def mostly_disturbed(self) -> bool:
        """Whether these are more than half of the finished trials: seconds are not to be relied on."""
        return 2 * len(self.disturbed) > len(self.finished)


def derive(frames: Frames) -> Derived:
    """Compute all derived tables."""
    table = trials(frames)
    differing = rates_differ(table)
    table["rates_differ"] = table["cell"].isin(list(differing))
    papers = pairs(table, is_preset(table, contender.PAPERS_BASELINE))
    return Derived(frames, table, pairs(table, is_baseline(table)), papers, differing, generations(frames))
