"""Figures of time: speed-ups, throughput over rates and nodes, decoding, and the parts of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final

import pandas as pd

from harness.records.confidence_intervals import Interval
from harness.suites.peers import PEERS
from report.data import bytes_and_memory, caveats, decoding, metrics, published, speedups
from report.data.configuration import NAMES, PROPOSED
from report.data.metrics import KEPT, Derived
from report.data.text import FEWEST_IN_WORDS, listed
from report.draw.figure import Figure
from report.draw.marks import Lines, Measure, Rows, Stacked
from report.draw.names_of_rows import configurations, peers_named, titles_of
from report.figures import predictions
from report.quantities import formula

_SPEEDUP: Final = Measure(
    "speedup",
    "speed-up over {base}",
    "the baseline's step time over the configuration's, geometric mean over pairs of trials from the same "
    f"repeat, {FEWEST_IN_WORDS}",
    speedups.speedup,
    "{:.2f}".format,
    bar=False,
    line=1,
    dot="pair of trials",
)


def _share(group: pd.DataFrame) -> Interval:
    """Return the median of the ratio "best possible step / step" over the trials of one configuration.

    The best possible step is a lower bound on the step's time.  ``group`` are pairs of a trial and the baseline's
    trial.  Disturbed trials, during which other programs took much processor time, are left out; if all trials are
    disturbed, all are kept.  It does not matter whether the baseline's trial is disturbed, since it does not enter this
    ratio.  Tables print the same median.
    """
    shares = speedups.undisturbed(group.assign(disturbed=group["own_disturbed"]))["share"]
    return Interval(float(shares.median()), math.nan, math.nan, len(shares))


_SHARE: Final = Measure(
    "share", "best possible step / measured step",
    "1 means that the step cannot be shorter, and a value above 1 that the best possible step was estimated too high",
    _share, form=caveats.share, line=1, stroke="schedule_share", stroke_label="scheduled step / measured step",
)  # fmt: skip
_TOKENS: Final = Measure(
    "tokens_per_second", "tokens/s of all ranks", "geometric means over repeats",
    lambda group: speedups.step_interval(group, "tokens_per_second"), "{:.0f}".format,
)  # fmt: skip


def _over_rates(data: pd.DataFrame) -> pd.DataFrame:
    """Return the trials that ran at several link rates (:func:`report.data.speedups.several_rates`), with their panels.

    The new column ``panel`` is the title of the panel that shows the trial.  There is one panel for each topology
    (number of nodes and ranks per node) and number of tokens per rank.
    """
    keys = ["nodes", "ranks_per_node", "tokens_per_rank"]
    data = speedups.several_rates(data).sort_values(keys, kind="stable")
    nodes, ranks, tokens = (data[key].astype(str) for key in keys)
    several = len(data[keys[:2]].drop_duplicates()) > 1
    where = ", " + nodes + "x" + ranks + " ranks" if several else ""
    return data.assign(panel=tokens + " tokens per rank" + where)


def _pairs(derived: Derived) -> pd.DataFrame:
    """Return all pairs of a trial and the baseline's trial (:func:`report.data.speedups.pairs`).

    The table is empty if no configuration is compared with the baseline on two or more nodes.
    """
    rows = derived.pairs
    if not (rows["nodes"].gt(1) & rows["id"].ne(rows["baseline"])).any():
        rows = rows.iloc[:0]
    keys = [
        "baseline",
        "baseline_configuration",
        "baseline_seconds",
        "own_disturbed",
        "step_seconds",
        "best_seconds",
        "speedup",
    ]
    return rows[[*KEPT, *keys, "allowed", *metrics.SHARES, "alone", "rates_differ"]]


def _at_one_rate(derived: Derived, known: str, *, least_nodes: int = 1) -> pd.DataFrame:
    """Return the pairs of trials (:func:`_pairs`) that cannot be compared over several link rates.

    The other pairs are shown in figures over rates (:func:`_over_rates`).  Two kinds of settings (cluster, model, batch
    and so on) are left out, too:

    * settings on fewer than ``least_nodes`` nodes;
    * settings in which no pair has a value in column ``known``, such as ``speedup``.
    """
    rows = _pairs(derived)
    rows = rows.drop(speedups.several_rates(rows).index)
    rows = rows[rows["nodes"] >= least_nodes]
    return rows[rows["setting"].isin(rows[rows[known].notna()]["setting"])]


def _above_in_words(data: pd.DataFrame) -> str:
    """Return the footnote that explains shares above 1; empty if no configuration's share is drawn above 1.

    A share is the ratio of the best possible step, a lower bound, to the measured step.
    """
    drawn = data.groupby(["setting", "configuration"])["share"].median()
    return caveats.FOOTNOTES[caveats.ABOVE] if drawn.round(2).gt(1).any() else ""


_BOUNDS: Final[tuple[Callable[[pd.DataFrame], str], ...]] = (
    lambda _: formula("best possible step"),
    lambda _: formula("scheduled step"),
    lambda _: formula("best step by processors"),
    _above_in_words,
)


_AGAINST_RATES: Final = partial(
    Lines, "achieved_mbit", "achieved rate of a node's link, Mbit/s", points="setting", log=True
)
SPEEDUP: Final = Figure(
    name="speedup",
    title="Speed-up",
    question="How much faster is each configuration?",
    table=lambda derived: _at_one_rate(derived, "speedup"),
    mark=Rows((_SPEEDUP,)),
)
SHARE: Final = Figure(
    name="share",
    title="Steps compared with the shortest possible",
    question="How close does each configuration's step come to the shortest possible step?",
    table=lambda derived: _at_one_rate(derived, "share", least_nodes=2),
    mark=Rows((_SHARE,)),
    notes=_BOUNDS,
)
OVER_RATES: Final = Figure(
    name="speedup_over_rates",
    title="Speed-up against bandwidth",
    question="Up to which rate of the link is each configuration faster than the baseline?",
    table=lambda derived: _over_rates(_pairs(derived)),
    mark=_AGAINST_RATES(measures=(_SPEEDUP, _SHARE)),
    notes=_BOUNDS,
)
THROUGHPUT: Final = Figure(
    name="throughput",
    title="Throughput against bandwidth",
    question="How does throughput depend on the link's rate and on the batch of a rank?",
    table=lambda derived: _over_rates(derived.trials)[
        [*KEPT, "panel", "step_seconds", "tokens_per_second", "rates_differ"]
    ],
    mark=_AGAINST_RATES(measures=(_TOKENS,)),
)


def _beside_published(derived: Derived) -> pd.DataFrame:
    pairs, blog = derived.pairs[derived.pairs["role"] == ""], published.throughput()
    pairs = _over_rates(pairs[pairs["configuration"] == NAMES[PROPOSED]]).sort_index()
    if pairs.empty:
        return pairs
    size = pairs["panel"].str.replace(" tokens per rank", " tokens")
    pairs = pairs.assign(panel="here, Mbit/s", line=size, rate=pairs["achieved_mbit"])
    gpus, rate = blog["gpus"].astype(str) + " " + blog["gpu"], blog["inter_node_gbps"]
    blog = blog.assign(
        panel=f"published, {listed(list(gpus.unique()))}, Gbit/s",
        line="published, " + blog["tokens_per_gpu"].astype(str) + " tokens",
        rate=rate,
        setting="published " + rate.astype(str),
    )
    keys = [
        "baseline",
        "baseline_seconds",
        "step_seconds",
        "panel",
        "line",
        "rate",
        "speedup",
        "model",
        "source",
    ]
    return pd.concat([pairs, blog], ignore_index=True)[[*KEPT, *keys]]


def _speedup_or_published(rows: pd.DataFrame) -> Interval:
    """Return the speed-up of ``rows``, which are either pairs of trials, or rows of one published speed-up.

    For pairs of trials it is computed, with its interval; a published speed-up has no interval.
    """
    if rows["baseline"].notna().all():
        return speedups.speedup(rows)
    return Interval(float(rows["speedup"].median()), math.nan, math.nan, len(rows))


_BESIDE: Final = Measure(
    "speedup", "speed-up",
    "ZeRO++ over the baseline, geometric means; the published speed-ups are ratios of the TFLOPs per GPU that the "
    "figures of the ZeRO++ blog give as integers (June 2023, 18 to 138 B parameters)",
    _speedup_or_published, "{:.2f}".format, line=1, dot="pair of trials or published value",
)  # fmt: skip
BESIDE_PUBLISHED: Final = Figure(
    name="beside_published",
    title="Speed-up compared with the published one",
    question="Does the speed-up fall as the link gets faster, as the published speed-up does?",
    table=_beside_published,
    mark=Lines("rate", "", (_BESIDE,), lines="line", points="setting", log=True),
    note="Rates and hardware differ by orders of magnitude, so only the shapes of the curves can be compared.",
    notes=(lambda data: caveats.beside_real(data["link_kind"].dropna()),),
)


GENERATION: Final = Figure(
    name="generation",
    title="Decoding with sharded weights",
    question="How fast does each configuration decode, and what does it send between nodes for a token?",
    table=lambda derived: derived.generations.assign(
        baseline_configuration=derived.compared.baseline,
        first_mb=derived.generations["first_bytes"] / 1e6,
        later_mb=derived.generations["later_bytes"] / 1e6,
    ),
    mark=Rows(
        (
            Measure(
                "tokens_per_second", "tokens/s per rank",
                f"the time of the prompt included, geometric mean over trials, {FEWEST_IN_WORDS}", decoding.speed,
            ),
            Measure(
                "speedup", "over {base}'s", "paired by repeat, geometric mean over trials",
                decoding.speedup, "{:.2f}".format, line=1, dot="pair of trials",
            ),
            Measure("first_mb", "MB, first token", "MB that all ranks send between nodes for it, by the ledger"),
            Measure("later_mb", "MB, later token", "MB that all ranks send between nodes for each later token"),
        )
    ),
    notes=(
        lambda _: "The ZeRO++ blog prints these speed-ups over ZeRO-3 for generation in RLHF on 32 GPUs: "
        + listed([f"{row.speedup:.2f} ({row.model})" for row in published.rlhf("generation").itertuples()])
        + ".",
    ),
)  # fmt: skip
PREDICTED: Final = Figure(
    name="predicted",
    title="Steps compared with their predictions",
    question="How well was each step predicted before it ran?",
    table=predictions.measured_over,
    mark=Rows(
        tuple(
            Measure(column, label, says, form="{:.2f}".format, bar=False, line=1)
            for column, label, says in (
                (
                    "over_predicted",
                    "measured over predicted",
                    "the prediction is from the model of a step, for the calibrated machine",
                ),
                (
                    "over_naive",
                    "over computation + wire",
                    "the prediction is the sum of computation and wire, as if they did not overlap",
                ),
                ("over_constant", "over one number", "the prediction is the median step of all trials"),
            )
        )
    ),
    notes=(predictions.score_in_words,),
)
SCALING: Final = Figure(
    name="scaling",
    title="More nodes",
    question="How does the throughput of all ranks change with the number of nodes?",
    table=lambda derived: bytes_and_memory.by_nodes(derived).rename(columns={"title": "panel"}),
    mark=Lines("nodes", "nodes", (_TOKENS,)),
    note="In weak scaling, the tokens of each rank stay the same; in strong scaling, the tokens of all ranks together "
    "do. On one machine all nodes share its processors: a further node adds a link and ranks, but no processors.",
)


def _split(derived: Derived) -> pd.DataFrame:
    """Return the seconds of each part of a step (forward, backward and so on), one row per trial and part.

    The seconds are scaled.  After scaling, the means of a configuration's parts add up to the step that the table
    Summary prints for this configuration.
    """
    table = derived.trials[[*KEPT, "step_seconds"]].merge(metrics.split(derived.frames), on="id")
    keys = ["setting", "configuration"]
    means = table.groupby([*keys, "id"])["seconds"].sum().groupby(level=keys).mean()
    steps = {key: speedups.step_interval(trials).estimate for key, trials in derived.trials.groupby(keys)}
    scale = [steps[key] / means[key] for key in table[keys].itertuples(index=False, name=None)]
    panel = table["setting"].map(titles_of(table))
    return table.assign(kind="bar", seconds=table["seconds"] * scale, panel=panel)


def _unexposed_in_words(data: pd.DataFrame) -> str:
    """Return a sentence that names the configurations for which it is not known how long ranks waited for messages.

    The text is empty if there are no such configurations.
    """
    known = set(data[data["part"].str.startswith("exposed")]["configuration"])
    unknown = data[~data["configuration"].isin(known)]
    of_peers = unknown["strategy"].isin(PEERS)
    names = peers_named(unknown[of_peers]["strategy"], data["strategy"])
    names += configurations(unknown[~of_peers])
    text = "The exposed communication of {} is not known, and is part of forward and backward."
    return text.format(listed(names)) if names else ""


_PASSES: Final = tuple(
    part for name in ("generate", "score", "forward", "backward") for part in (name, f"exposed in {name}")
)
STEP_SPLIT: Final = Figure(
    name="step_split",
    title="Where a step's time goes",
    question="Where does a step's time go, on its slowest rank?",
    table=_split,
    mark=Stacked(
        "seconds",
        "seconds per step",
        "Each bar is as long as the step in the table Summary; its parts are in proportion to the mean seconds of the "
        "parts of a step, over all timed steps and trials; pale parts are exposed communication, in which the rank "
        "only waited for messages",
        (*_PASSES, "optimizer", "other"),
        middle="mean",
    ),
    notes=(_unexposed_in_words,),
)
