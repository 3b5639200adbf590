"""Figures of time: speed-ups, throughput over rates and nodes, decoding, and where a step's time goes."""

from __future__ import annotations

from typing import Final

import pandas as pd

from harness.records.trace_record import LANES, hidden
from impl.comm.timeline import Span
from report.data import decoding, emulation, footnotes, metrics, published, scaling
from report.data.contender import NAMES, PROPOSED
from report.data.metrics import KEPT, Derived
from report.data.quantities import QUANTITIES, formula
from report.data.text import FEWEST_IN_WORDS, listed
from report.draw.contenders import by_cell_and_contender, contenders, titles_of
from report.draw.figure import Figure, Measure
from report.draw.marks import Lanes, Lines, Rows, Stacked
from report.figures import predictions

_SPEEDUP: Final = Measure(
    "speedup",
    "speed-up over {base}",
    f"the baseline's step over the contender's in pairs of one repeat: geometric mean, {FEWEST_IN_WORDS}",
    metrics.speedup,
    "{:.2f}".format,
    bar=False,
    line=1,
)
_SHARE: Final = Measure(
    "share", "share of what is allowed", QUANTITIES["allowed step/step"]["formula"].replace("`", ""),
    form=footnotes.share, line=1, stroke="schedule_share",
)  # fmt: skip
_TOKENS: Final = Measure(
    "tokens_per_second", "tokens/s of all ranks", "geometric means over repeats",
    lambda group: metrics.step_interval(group, "tokens_per_second"), "{:.0f}".format,
)  # fmt: skip


def _by_size(data: pd.DataFrame) -> pd.DataFrame:
    """With a column ``panel``: the batch per rank and, where there are several, the nodes and ranks."""
    several = len(data[["nodes", "ranks_per_node"]].drop_duplicates()) > 1
    data = data.sort_values(["nodes", "ranks_per_node", "tokens_per_rank"], kind="stable")
    return data.assign(
        panel=[
            f"{row['tokens_per_rank']} tokens per rank"
            + (f", {row['nodes']}x{row['ranks_per_node']} ranks" if several else "")
            for row in data.to_dict("records")
        ]
    )


def _pairs(derived: Derived) -> pd.DataFrame:
    rows = derived.pairs[derived.pairs["nodes"] > 1]
    if not (rows["id"] != rows["baseline"]).any():
        rows = rows.iloc[:0]
    more = ["baseline", "baseline_contender", "baseline_seconds", "step_seconds", "best_seconds", "speedup"]
    return rows[[*KEPT, *more, "allowed", *metrics.SHARES, "alone", "rates_differ"]]


def _at_one_rate(derived: Derived) -> pd.DataFrame:
    rows = _pairs(derived)
    return rows.drop(metrics.several_rates(rows).index)


def _beside_possible(derived: Derived) -> pd.DataFrame:
    rows = _at_one_rate(derived)
    return rows if rows["share"].notna().any() else rows.iloc[:0]


def _over_rates(derived: Derived) -> pd.DataFrame:
    return _by_size(metrics.several_rates(_pairs(derived)))


def _bounds_in_words(data: pd.DataFrame) -> str:
    """Caption text on what the shortest step is, and on shares above 1, where one is drawn."""
    drawn = data.groupby(["cell", "contender"])["share"].median()
    above = f" {footnotes.ABOVE_IN_WORDS}" if drawn.round(2).gt(1).any() else ""
    return formula("best possible step", "scheduled step", "best step by processors") + above


def _differing_in_words(data: pd.DataFrame) -> str:
    """Caption text for the mark of links of different rates, where it is drawn."""
    return footnotes.RATES_IN_WORDS if data["rates_differ"].any() else ""


def _emulated_in_words(data: pd.DataFrame) -> str:
    return emulation.note(data["link_kind"].dropna())


SPEEDUP: Final = Figure(
    name="speedup",
    title="Speed-up",
    question="How much faster is each contender?",
    table=_at_one_rate,
    mark=Rows((_SPEEDUP,)),
    notes=(_differing_in_words,),
)
SHARE: Final = Figure(
    name="share",
    title="Steps beside the shortest possible",
    question="How near is each contender's step to the shortest possible?",
    table=_beside_possible,
    mark=Rows((_SHARE,)),
    notes=(_bounds_in_words,),
)
OVER_RATES: Final = Figure(
    name="speedup_over_rates",
    title="Speed-up against bandwidth",
    question="From which rate of the link on does a contender no longer pay?",
    table=_over_rates,
    mark=Lines(
        "achieved_mbit", "achieved rate of a node's link, Mbit/s", (_SPEEDUP, _SHARE), points="cell", log=True
    ),
    notes=(_bounds_in_words, _differing_in_words),
)
THROUGHPUT: Final = Figure(
    name="throughput",
    title="Throughput against bandwidth",
    question="How is throughput bound by bandwidth and by the batch per rank?",
    table=lambda derived: _by_size(metrics.several_rates(derived.trials))[
        [*KEPT, "panel", "step_seconds", "tokens_per_second", "rates_differ"]
    ],
    mark=Lines(
        "achieved_mbit", "achieved rate of a node's link, Mbit/s", (_TOKENS,), points="cell", log=True
    ),
    notes=(_differing_in_words,),
)


def _beside_published(derived: Derived) -> pd.DataFrame:
    ours, theirs = metrics.several_rates(derived.pairs[derived.pairs["role"] == ""]), published.throughput()
    ours = ours[ours["contender"] == NAMES[PROPOSED]]
    if ours.empty:
        return ours
    size = _by_size(ours)["panel"].str.replace(" tokens per rank", " tokens")
    ours = ours.assign(panel="here, Mbit/s", line=size, rate=ours["achieved_mbit"])
    gpus = listed(list(dict.fromkeys(theirs["gpus"].astype(str) + " " + theirs["gpu"])))
    theirs = theirs.assign(
        panel=f"published, {gpus}, Gbit/s",
        line=[f"published, {tokens} tokens" for tokens in theirs["tokens_per_gpu"]],
        rate=theirs["inter_node_gbps"],
        cell=[f"published {rate}" for rate in theirs["inter_node_gbps"]],
    )
    more = ["baseline", "panel", "line", "rate", "speedup", "model", "source"]
    return pd.concat([ours, theirs], ignore_index=True)[[*KEPT, *more]]


BESIDE_PUBLISHED: Final = Figure(
    name="beside_published",
    title="Speed-up beside the published",
    question="Has the speed-up over the rate the shape that was published?",
    table=_beside_published,
    mark=Lines(
        "rate",
        "",
        (
            Measure(
                "speedup",
                "speed-up",
                "of the proposed policy over the baseline, medians; published: of the TFLOPs per GPU that "
                "the blog's figures print, rounded to integers (June 2023, models of 18 to 138 B parameters)",
                form="{:.2f}".format,
                line=1,
            ),
        ),
        lines="line",
        points="cell",
        log=True,
    ),
    notes=(
        lambda _: "Rates and hardware differ by orders of magnitude: compare shapes, not positions.",
        _emulated_in_words,
    ),
)


def _published_decoding() -> str:
    rows = published.generation().to_dict("records")
    return listed([f"{row['speedup']:.2f} ({row['model']})" for row in rows]) + "."


GENERATION: Final = Figure(
    name="generation",
    title="Decoding with sharded weights",
    question="How fast does each contender decode, and what does it send between nodes for a token?",
    table=lambda derived: derived.generations.assign(
        baseline_contender=derived.compared.baseline,
        first_mb=derived.generations["first_bytes"] / 1e6,
        later_mb=derived.generations["later_bytes"] / 1e6,
    ),
    mark=Rows(
        (
            Measure(
                "tokens_per_second", "tokens/s per rank",
                f"prompt included, geometric means of the trials, {FEWEST_IN_WORDS}", decoding.speed,
            ),
            Measure(
                "speedup", "over {base}'s", "of the same repeat, geometric mean of the trials",
                decoding.speedup, "{:.2f}".format, line=1,
            ),
            Measure("first_mb", "MB, first token", "that all ranks send between nodes, by the ledger"),
            Measure("later_mb", "MB, later token", "for each one after the first"),
        )
    ),
    notes=(
        lambda _: "The blog prints for generation in RLHF on 32 GPUs, over ZeRO-3, " + _published_decoding(),
    ),
)  # fmt: skip
PREDICTED: Final = Figure(
    name="predicted",
    title="Steps beside their predictions",
    question="How well was each step predicted before it ran?",
    table=predictions.measured_over,
    mark=Rows(
        tuple(
            Measure(column, label, says, form="{:.2f}".format, bar=False, line=1)
            for column, label, says in (
                ("over_predicted", "measured over predicted", "by the calibrated machine"),
                ("over_naive", "over computation + wire", "without overlap or an engine"),
                ("over_constant", "over one number", "the median step of all"),
            )
        )
    ),
    notes=(predictions.score_in_words,),
)
SCALING: Final = Figure(
    name="scaling",
    title="More nodes",
    question="How does the throughput of all ranks change with the number of nodes?",
    table=lambda derived: scaling.by_nodes(derived).rename(columns={"title": "panel"}),
    mark=Lines("nodes", "nodes", (_TOKENS,)),
    notes=(
        lambda _: (
            "Weak: as many tokens a rank; strong: as many in all, dealt to more ranks. On one machine all "
            "nodes share its processors: a further node brings a link of its own and further ranks, not "
            "further arithmetic."
        ),
    ),
)


def _split(derived: Derived) -> pd.DataFrame:
    """Each trial's parts, scaled so that the means of a contender add up to the step of the Summary."""
    table = derived.trials[[*KEPT, "step_seconds"]].merge(metrics.split(derived.frames), on="id")
    means = table.groupby(["cell", "contender", "id"])["seconds"].sum().groupby(level=[0, 1]).mean()
    steps = {key: metrics.step_interval(group).estimate for key, group in
             derived.trials.groupby(["cell", "contender"])}  # fmt: skip
    scale = [steps[key] / means[key] for key in zip(table["cell"], table["contender"], strict=True)]
    titles = titles_of(table) if len(table) else {}
    return table.assign(kind="bar", seconds=table["seconds"] * scale, panel=table["cell"].map(titles))


def _unexposed_in_words(data: pd.DataFrame) -> str:
    """Of whom exposed communication is not known, where there are such contenders."""
    known = set(data[data["part"].str.startswith("exposed")]["contender"])
    without = [contender for _, contender in contenders(data) if contender not in known]
    return f"For {listed(without)} it is not known: it is part of forward and backward." if without else ""


STEP_SPLIT: Final = Figure(
    name="step_split",
    title="Where a step's time goes",
    question="Where does a step's time go, on its slowest rank?",
    table=_split,
    mark=Stacked(
        "seconds",
        "seconds per step",
        "The step of the Summary, divided as the mean of all timed steps and repeats is; pale, exposed "
        "communication: time in which the rank only waited",
        (
            "generate",
            "exposed in generate",
            "score",
            "exposed in score",
            "forward",
            "exposed in forward",
            "backward",
            "exposed in backward",
            "optimizer",
            "other",
        ),
    ),
    notes=(_unexposed_in_words,),
)


def _traced(derived: Derived) -> pd.DataFrame:
    """Spans of the first rank of each traced trial, with a sentence on them in ``told``."""
    spans = derived.frames.traces
    table = derived.trials[KEPT].merge(spans[spans["rank"] == 0], on="id")
    parts = [
        mine.assign(panel=f"{name} ({identity})", told=f"{name} ({identity}): {_under_way(mine)}")
        for name, _, group in by_cell_and_contender(table)
        for identity, mine in group.groupby("id", sort=False)
    ]
    return pd.concat(parts, ignore_index=True) if parts else table


def _under_way(spans: pd.DataFrame) -> str:
    """How long messages between nodes were under way, and how much of it without waiting for one."""
    columns = (spans[name] for name in ("lane", "name", "begin", "end"))
    total, apart = hidden([Span(*row) for row in zip(*columns, strict=True)])
    share, first = apart / total if total else 0.0, spans.iloc[0]
    return (
        f"{total:.3g} s under way, {share:.0%} of it hidden, in a step of {first['seconds']:.3g} s (the one "
        f"before, which nothing noted: {first['before']:.3g} s)"
    )


LANES_OF_A_RANK: Final = Lanes(LANES)
TRACE: Final = Figure(
    name="trace",
    title="One step, taken apart",
    question="What did the first rank compute, encode, send and wait for in one step, and when?",
    table=_traced,
    mark=LANES_OF_A_RANK,
    notes=(
        lambda _: (
            "Noted by `zeropp trace`, apart from the trials. Messages are under way from when they are "
            "posted until they are waited for; hidden: without waiting for one between nodes."
        ),
    ),
)
