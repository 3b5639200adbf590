"""Table and figure of ``zeropp bench engine``: training steps beside the same model stepping alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pandas as pd
from matplotlib.figure import Figure

from harness.records import engine_goals
from harness.records.bench_record import Bench
from harness.records.statistics import Interval
from report.bench import dots as bench_dots
from report.bench.dots import COLOURS, TRANSPORTS
from report.data.frames import groups, rate_text
from report.data.text import counted, number
from report.draw import drawing
from report.draw.plot import Drawing
from report.tables.table import Column, Table

_IDENTITY: Final = ["contender", "transport", "nodes", "ranks_per_node", "rate_mbit", "model"]
CONTENDERS: Final = {
    engine_goals.ALONE: "compute alone",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "fsdp2-kept": "FSDP2, weights kept",
    "deepspeed": "DeepSpeed ZeRO-3",
    "deepspeed-kept": "DeepSpeed ZeRO-3, weights kept",
    "exact": "ours, fp32",
    "zeropp": "ours, ZeRO++",
}
NAMES_OF_FIGURES: Final = ("engine",)


def frame(benches: Sequence[Bench]) -> pd.DataFrame:
    """One row per round of each contender; ``id`` names its record."""
    rows: list[dict[str, Any]] = []
    for bench in benches:
        for sample in bench.engine:
            fixed = {name: getattr(sample, name) for name in _IDENTITY}
            fixed |= {"id": bench.id, "parameters": sample.parameters, "tokens": sample.tokens}
            fixed |= {"steps": sample.steps, "last_loss": sample.losses[-1]}
            raw = zip(sample.seconds, sample.reference_seconds, sample.cpu_seconds, strict=True)
            for index, (took, alone, computed) in enumerate(raw):
                values = {"seconds": took, "alone_seconds": alone, "cpu_seconds": computed}
                rows.append(fixed | values | {"round": index})
    return pd.DataFrame(rows)


def derived(data: pd.DataFrame) -> pd.DataFrame:
    """One row per contender: medians over rounds with intervals.

    ``of_alone``: tokens per second over those of the model stepping alone, of the same round.
    """
    rows = []
    for key, group in groups(data, _IDENTITY):
        fixed = dict(zip(_IDENTITY, key, strict=True))
        speed = bench_dots.median(tuple(group["tokens"] / group["seconds"]))
        share = bench_dots.median(tuple(group["alone_seconds"] / group["seconds"]))
        rows.append(
            fixed
            | {"id": ", ".join(sorted(set(group["id"]))), "rounds": share.n}
            | {"place": f"{fixed['nodes']}x{fixed['ranks_per_node']} ranks, {rate_text(fixed['rate_mbit'])}"}
            | {"milliseconds": 1e3 * float((group["seconds"] / group["steps"]).median())}
            | {"cpu_milliseconds": 1e3 * float((group["cpu_seconds"] / group["steps"]).median())}
            | {"speed": speed.estimate, "speed_low": speed.low, "speed_high": speed.high}
            | {"of_alone": share.estimate, "low": share.low, "high": share.high}
            | {"last_loss": float(group["last_loss"].iloc[0])}
        )
    return pd.DataFrame(rows)


def _share(row: dict[str, Any]) -> Interval:
    return Interval(row["of_alone"], row["low"], row["high"], row["rounds"])


def _speed(row: dict[str, Any]) -> Interval:
    return Interval(row["speed"], row["speed_low"], row["speed_high"], row["rounds"])


def table(data: pd.DataFrame) -> Table:
    """All medians with their intervals."""
    found = derived(data)
    found["contender_told"] = found["contender"].map(CONTENDERS)
    found["transport_told"] = found["transport"].map(TRANSPORTS)
    found["speed_told"] = [_thousands(_speed(row)) for row in bench_dots.rows_of(found)]
    found["share_told"] = [bench_dots.told(_share(row)) for row in bench_dots.rows_of(found)]
    return Table(
        name="engine",
        title="Training steps beside peers",
        caption=(
            "Medians over rounds of the slowest rank's time, in brackets 95 % intervals. Tokens of all "
            "ranks. Of compute alone: tokens per second over those of the same model that steps on every "
            "rank by itself and sends nothing, in the same round. Nothing is clipped; AdamW, fp32, one "
            "thread a rank; weights are released after use unless kept. CPU ms: that all ranks' processes "
            "computed in a step, waiting awake included. The last loss is the mean over "
            "ranks before the last step: all that train without quantising agree in every step."
        ),
        data=found,
        columns=(
            Column("place", "where"),
            Column("contender_told", "contender"),
            Column("transport_told", "carried by"),
            Column("speed_told", "tokens/s", bench_dots.right),
            Column("share_told", "of compute alone", bench_dots.right),
            Column("milliseconds", "ms a step", number(3)),
            Column("cpu_milliseconds", "CPU ms", number(3)),
            Column("last_loss", "last loss", number(5)),
            Column("rounds", "rounds", bench_dots.whole),
        ),
    )


def _thousands(found: Interval) -> str:
    """``5,120 [5,010, 5,230]``."""
    if found.n == 1:
        return f"{found.estimate:,.0f}"
    return f"{found.estimate:,.0f} [{found.low:,.0f}, {found.high:,.0f}]"


def headline(data: pd.DataFrame) -> list[str]:
    """Our fastest exact run of each place beside its peers'."""
    told = []
    for (place,), here in groups(derived(data), ["place"]):
        rows = [row for row in bench_dots.rows_of(here) if row["contender"] != engine_goals.ALONE]
        parts = [
            f"{CONTENDERS[row['contender']]} over {TRANSPORTS[row['transport']]} {row['speed']:,.0f}"
            for row in sorted(rows, key=lambda row: -row["speed"])
        ]
        told.append(f"On {place}, in tokens per second: {'; '.join(parts)}.")
    return told


def drawings(data: pd.DataFrame) -> list[tuple[Drawing, pd.DataFrame]]:
    """One figure."""
    (name,) = NAMES_OF_FIGURES
    title = "Training steps beside compute alone"
    return [(Drawing(name=name, title=title, draw=_draw, caption=_caption, alt=_alt), data)]


def _draw(data: pd.DataFrame) -> Figure | None:
    if data.empty:
        return None
    found = derived(data)
    found = found[found["contender"] != engine_goals.ALONE]
    places = groups(found, ["place"])
    here = set(found["contender"])
    names = [told for name, told in CONTENDERS.items() if name in here]
    height = drawing.bars_height(len(names), room=1.1)
    figure, (axes,) = drawing.panels(len(places), height=height, width=8.2)
    limits = bench_dots.limits([_share(row) for row in bench_dots.rows_of(found)])
    for ax, ((place,), rows) in zip(axes, places, strict=True):
        dots = [
            bench_dots.Dot(CONTENDERS[row["contender"]], _share(row), COLOURS[row["transport"]])
            for row in bench_dots.rows_of(rows)
        ]
        bench_dots.draw(ax, dots, names, limits)
        ax.set_title(place)
        if ax is not axes[0]:
            ax.tick_params(axis="y", labelleft=False)
    figure.supxlabel("tokens per second, of compute alone", fontsize=9)
    shown = [name for name in COLOURS if (found["transport"] == name).any()]
    bench_dots.legend(figure, {TRANSPORTS[name]: COLOURS[name] for name in shown})
    return figure


def _caption(data: pd.DataFrame) -> str:
    found = derived(data)
    return (
        "Tokens per second of each contender over those of the same model stepping by itself on every rank, "
        f"in the same round: medians over up to {counted(int(found['rounds'].max()), 'round')} with 95 % "
        "intervals. At the dashed line communication would cost nothing. Colours: what carried messages."
    )


def _alt(data: pd.DataFrame) -> str:
    told = [
        f"{CONTENDERS[row['contender']]} over {TRANSPORTS[row['transport']]} on {row['place']}: "
        f"{row['of_alone']:.2g}"
        for row in bench_dots.rows_of(derived(data))
    ]
    return f"Tokens per second of compute alone: {'; '.join(told)}."
