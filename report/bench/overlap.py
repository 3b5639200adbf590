"""Table and figure of ``zeropp bench overlap``: steps beside compute alone, and reductions in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pandas as pd
from matplotlib.figure import Figure

from harness.records import overlap_goals
from harness.records.bench_record import Bench, OverlapHops, OverlapStep
from harness.records.statistics import Interval
from report.bench import dots
from report.data.frames import groups, rate_text
from report.data.text import counted, number
from report.draw import drawing, theme
from report.draw.plot import Drawing
from report.tables.table import Column, Table

NAMES_OF_FIGURES: Final = ("overlap",)
_STEP: Final = "step"
_HOPS: Final = "hops"
_IDENTITY: Final = ["id", "kind", "what", "place"]
_RAW: Final = ("seconds", "reference_seconds")
_OF_STEP: Final = "of compute alone"
_OF_HOPS: Final = "of the shorter hop hidden"


def frame(benches: Sequence[Bench]) -> pd.DataFrame:
    """One row per round of each sample; ``id`` names its record, ``measured`` is what its goal is about.

    ``first`` and ``second`` are the seconds that set the link's rate: of a step compute alone's forward and
    backward over those of communication at that rate, of a reduction its hops' own.
    """
    rows: list[dict[str, Any]] = []
    for bench in benches:
        for step in bench.overlap_steps:
            forward, backward = overlap_goals.room_by_round(step)
            ratios = overlap_goals.of_alone_by_round(step)
            rows += _rows(bench, _STEP, f"{step.policy}, a step", step, forward, backward, ratios)
        for hops in bench.overlap_hops:
            what = f"reduction in {hops.chunks} chunks"
            shares = overlap_goals.hidden_by_round(hops)
            rows += _rows(bench, _HOPS, what, hops, hops.first_seconds, hops.second_seconds, shares)
    return pd.DataFrame(rows)


def _rows(  # noqa: PLR0917  # columns
    bench: Bench,
    kind: str,
    what: str,
    sample: OverlapStep | OverlapHops,
    first: Sequence[float],
    second: Sequence[float],
    measured: Sequence[float],
) -> list[dict[str, Any]]:
    place = f"{sample.nodes}x{sample.ranks_per_node} ranks, {rate_text(sample.rate_mbit)}"
    raw = [getattr(sample, name) for name in _RAW]
    return [
        {"id": bench.id, "kind": kind, "what": what, "place": place, "round": index}
        | dict(zip((*_RAW, "first", "second", "measured"), values, strict=True))
        for index, values in enumerate(zip(*raw, first, second, measured, strict=True))
    ]


def derived(data: pd.DataFrame) -> pd.DataFrame:
    """One row per sample: medians over rounds, of ``measured`` with its interval."""
    rows = []
    for key, group in groups(data, _IDENTITY):
        found = dots.median(tuple(group["measured"]))
        medians = {name: float(group[name].median()) for name in (*_RAW, "first", "second")}
        interval = {"measured": found.estimate, "low": found.low, "high": found.high, "rounds": found.n}
        rows.append(dict(zip(_IDENTITY, key, strict=True)) | medians | interval)
    return pd.DataFrame(rows)


def _found(row: dict[str, Any]) -> Interval:
    return Interval(row["measured"], row["low"], row["high"], row["rounds"])


def table(data: pd.DataFrame) -> Table:
    """All medians with their intervals."""
    found = derived(data)
    rows = dots.rows_of(found)
    of_step = [row["kind"] == _STEP for row in rows]
    found["milliseconds"] = 1e3 * found["seconds"]
    found["reference_milliseconds"] = 1e3 * found["reference_seconds"]
    found["beside"] = ["compute alone" if step else "in one chunk" for step in of_step]
    found["link"] = [
        f"computation {row['first']:.2f} and {row['second']:.2f} x communication"
        if step
        else f"hops {1e3 * row['first']:.0f} and {1e3 * row['second']:.0f} ms"
        for step, row in zip(of_step, rows, strict=True)
    ]
    found["told"] = [
        f"{dots.told(_found(row))} {_OF_STEP if step else _OF_HOPS}"
        for step, row in zip(of_step, rows, strict=True)
    ]
    return Table(
        name="overlap",
        title="What overlap hides",
        caption=(
            "Medians over rounds of the slowest rank's time, in brackets 95 % intervals of ratios formed "
            "inside a round. Compute alone: the same model that every rank trains by itself and that sends "
            "nothing, optimizer included; beside a step stand its seconds over those of communication "
            "at the link's rate, in forward and in backward. Of a reduction the two hops' messages by "
            "themselves; hidden is what chunks save, over the shorter hop."
        ),
        data=found,
        columns=(
            Column("what", "what"),
            Column("place", "where"),
            Column("milliseconds", "ms", number(3)),
            Column("beside", "beside"),
            Column("reference_milliseconds", "its ms", number(3)),
            Column("link", "on this link"),
            Column("told", "found"),
            Column("rounds", "rounds", dots.whole),
        ),
    )


def headline(data: pd.DataFrame) -> list[str]:
    """One sentence a sample."""
    return [
        f"{row['what'].capitalize()} on {row['place']}: {dots.told(_found(row))} "
        f"{_OF_STEP if row['kind'] == _STEP else _OF_HOPS}."
        for row in dots.rows_of(derived(data))
    ]


def drawings(data: pd.DataFrame) -> list[tuple[Drawing, pd.DataFrame]]:
    """One figure."""
    (name,) = NAMES_OF_FIGURES
    return [(Drawing(name=name, title="What overlap hides", draw=_draw, caption=_caption, alt=_alt), data)]


def _draw(data: pd.DataFrame) -> Figure | None:
    if data.empty:
        return None
    kinds = groups(derived(data), ["kind"])
    height = drawing.bars_height(max(len(rows) for _, rows in kinds), room=1.2, row=0.5)
    figure, (axes,) = drawing.panels(len(kinds), height=height, width=8.2)
    for ax, ((kind,), rows) in zip(axes, kinds, strict=True):
        goal = overlap_goals.MOST_OF_ALONE if kind == _STEP else overlap_goals.LEAST_HIDDEN
        ax.axvline(goal, color=theme.INK, lw=1.1, ls=(0, (4, 3)), zorder=1)
        names = [f"{row['what']}, {row['place']}" for row in dots.rows_of(rows)]
        for at, row in enumerate(dots.rows_of(rows)):
            drawing.error_bar(ax, at, _found(row), "#0072b2", across=True)
            ax.plot(row["measured"], at, "o", color="#0072b2", ms=5, mec="white", mew=0.5, zorder=4)
        drawing.row_names(ax, names)
        ax.margins(x=0.2)
        ax.set_title(f"seconds {_OF_STEP}" if kind == _STEP else f"share {_OF_HOPS}")
    return figure


def _caption(data: pd.DataFrame) -> str:
    return (
        "Left of the first dashed line a step on a link that computation can hide takes at most 10 % longer "
        "than compute alone; right of the second, chunks hide at least 80 % of a reduction's shorter hop. "
        f"Medians over up to {counted(int(derived(data)['rounds'].max()), 'round')} with 95 % intervals, of "
        "ratios formed inside a round."
    )


def _alt(data: pd.DataFrame) -> str:
    return " ".join(headline(data))
