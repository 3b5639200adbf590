"""Table and figures of ``zeropp bench collectives``: times and bytes beside gloo's own of the same round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pandas as pd
from matplotlib.figure import Figure

from harness.records.bench_record import Bench
from harness.records.statistics import Interval
from report.bench import dots as bench_dots
from report.bench.dots import COLOURS, TRANSPORTS
from report.data.frames import groups, rate_text
from report.data.text import counted, number
from report.draw import drawing
from report.draw.plot import Drawing
from report.tables.table import Column, Table

_IDENTITY: Final = [
    "operation", "algorithm", "codecs", "transport", "nodes", "ranks_per_node", "rate_mbit", "numel",
    "sent_inter", "sent_intra", "reference_sent",
]  # fmt: skip
OPERATIONS: Final = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}
NAMES_OF_FIGURES: Final = ("times-all_gather", "times-reduce_scatter")


def frame(benches: Sequence[Bench]) -> pd.DataFrame:
    """One row per round of each sample; ``id`` names its record."""
    rows: list[dict[str, Any]] = []
    for bench in benches:
        for sample in bench.collectives:
            fixed = {name: getattr(sample, name) for name in _IDENTITY}
            fixed |= {"id": bench.id, "codecs": " + ".join(dict.fromkeys(sample.codecs))}
            for index, (took, gloo) in enumerate(zip(sample.seconds, sample.reference_seconds, strict=True)):
                rows.append(fixed | {"round": index, "seconds": took, "gloo_seconds": gloo})
    return pd.DataFrame(rows)


def derived(data: pd.DataFrame) -> pd.DataFrame:
    """One row per collective: medians over rounds with intervals.

    ``ratio``: gloo's seconds over ours, of the same round.
    """
    rows = []
    for key, group in groups(data, _IDENTITY):
        fixed = dict(zip(_IDENTITY, key, strict=True))
        ratio = bench_dots.median(tuple(group["gloo_seconds"] / group["seconds"]))
        rows.append(
            fixed
            | {"id": ", ".join(sorted(set(group["id"]))), "rounds": ratio.n}
            | {"place": f"{fixed['nodes']}x{fixed['ranks_per_node']} ranks, {rate_text(fixed['rate_mbit'])}"}
            | {"mebibytes": 4 * fixed["numel"] / 2**20}
            | {"milliseconds": 1e3 * float(group["seconds"].median())}
            | {"gloo_milliseconds": 1e3 * float(group["gloo_seconds"].median())}
            | {"ratio": ratio.estimate, "low": ratio.low, "high": ratio.high}
            | {"sent": fixed["sent_inter"] + fixed["sent_intra"]}
        )
    found = pd.DataFrame(rows)
    for name in ("sent", "sent_inter", "reference_sent"):
        found[f"{name}_mb"] = found[name] / 1e6
    return found


def _ratio(row: dict[str, Any]) -> Interval:
    return Interval(row["ratio"], row["low"], row["high"], row["rounds"])


def table(data: pd.DataFrame) -> Table:
    """All medians with their intervals."""
    found = derived(data)
    found["operation_told"] = found["operation"].map(OPERATIONS)
    found["transport_told"] = found["transport"].map(TRANSPORTS)
    found["ratio_told"] = [bench_dots.told(_ratio(row)) for row in bench_dots.rows_of(found)]
    return Table(
        name="collectives",
        title="Times and bytes of collectives",
        caption=(
            "Medians over rounds of the slowest rank's time, in brackets 95 % intervals. Times gloo: seconds "
            "of gloo's own collective of the same fp32 tensor in the same round over ours. MB sent by all "
            "ranks in one call: ours by the wire's ledger, which counts what is read through shared memory "
            "too; gloo's by its algorithms, a ring and an all-reduce's two rings. Shared memory carries what "
            "stays inside a node, gloo the rest: a row names it only if a hop lies inside one. Like for like "
            "is fp32."
        ),
        data=found,
        columns=(
            Column("place", "where"),
            Column("mebibytes", "MiB", number(3)),
            Column("operation_told", "collective"),
            Column("algorithm", "algorithm"),
            Column("codecs", "codec"),
            Column("transport_told", "transport"),
            Column("milliseconds", "ms", number(3)),
            Column("gloo_milliseconds", "gloo's ms", number(3)),
            Column("ratio_told", "times gloo", bench_dots.right),
            Column("sent_mb", "MB sent", number(3)),
            Column("sent_inter_mb", "between nodes", number(3)),
            Column("reference_sent_mb", "gloo's MB", number(3)),
            Column("rounds", "rounds", bench_dots.whole),
        ),
    )


def headline(data: pd.DataFrame) -> list[str]:
    """The best like-for-like ratio of each collective and transport, at the largest size."""
    found = derived(data)
    found = found[found["codecs"] == "fp32"]
    told = []
    for (place,), here in groups(found, ["place"]):
        largest = here[here["numel"] == here["numel"].max()]
        parts = []
        for (operation, transport), group in groups(largest, ["operation", "transport"]):
            best = max(bench_dots.rows_of(group), key=lambda row: row["ratio"])
            parts.append(
                f"{OPERATIONS[operation]} over {TRANSPORTS[transport]} {best['ratio']:.3g} times as fast"
                f" ({best['algorithm']})"
            )
        told.append(
            f"On {place}, {largest['mebibytes'].max():g} MiB in fp32, beside gloo's own: {'; '.join(parts)}."
        )
    return told


def drawings(data: pd.DataFrame) -> list[tuple[Drawing, pd.DataFrame]]:
    """One figure a collective."""
    found = []
    for operation, name in zip(OPERATIONS, NAMES_OF_FIGURES, strict=True):
        mine = data[data["operation"] == operation]
        if len(mine):
            title = f"{OPERATIONS[operation].capitalize()} beside gloo's own"
            drawn = Drawing(name=name, title=title, draw=_draw, caption=_caption, alt=_alt)
            found.append((drawn, mine))
    return found


def _draw(data: pd.DataFrame) -> Figure | None:
    if data.empty:
        return None
    found = derived(data)
    places = groups(found, ["place"])
    sizes = sorted(found["mebibytes"].unique())
    rows = len(groups(found, ["algorithm", "codecs"]))
    height = drawing.bars_height(rows, room=0.75, row=0.2) * len(places) + 0.3
    figure, grid = drawing.panels(len(sizes), len(places), height=height, width=8.2)
    limits = bench_dots.limits([_ratio(row) for row in bench_dots.rows_of(found)])
    for axes, ((place,), here) in zip(grid, places, strict=True):
        names = [f"{key[0]}, {key[1]}" for key, _ in groups(here, ["algorithm", "codecs"])]
        for ax, size in zip(axes, sizes, strict=True):
            dots = [
                bench_dots.Dot(f"{row['algorithm']}, {row['codecs']}", _ratio(row), COLOURS[row["transport"]])
                for row in bench_dots.rows_of(here[here["mebibytes"] == size])
            ]
            bench_dots.draw(ax, dots, names, limits)
            ax.set_title(f"{place}\n{size:g} MiB" if ax is axes[0] else f"\n{size:g} MiB")
            if ax is not axes[0]:
                ax.tick_params(axis="y", labelleft=False)
    figure.supxlabel("times gloo: gloo's seconds / ours", fontsize=9)
    shown = [name for name in COLOURS if (found["transport"] == name).any()]
    bench_dots.legend(figure, {TRANSPORTS[name]: COLOURS[name] for name in shown})
    return figure


def _caption(data: pd.DataFrame) -> str:
    found = derived(data)
    return (
        "Seconds of gloo's own collective of the same fp32 tensor over ours, in the same round, by algorithm "
        f"and codec: medians over up to {counted(int(found['rounds'].max()), 'round')} of the slowest rank's "
        "time, with 95 % intervals. Right of the dashed line ours is faster. Like for like is fp32; the "
        "other codecs send less."
    )


def _alt(data: pd.DataFrame) -> str:
    found = derived(data)
    largest = found[found["numel"] == found["numel"].max()]
    told = [
        f"{row['algorithm']} {row['codecs']} over {TRANSPORTS[row['transport']]} on {row['place']}: "
        f"{row['ratio']:.2g}"
        for row in bench_dots.rows_of(largest)
    ]
    return f"Times gloo at {largest['mebibytes'].max():g} MiB: {'; '.join(told)}."
