"""Tables and figures of ``zeropp bench codecs``: rates beside the copy of the same round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.records.bench_record import Bench
from harness.records.statistics import Interval
from impl.codecs.codec import FloatCodec, Raw, parse
from report.bench import dots as bench_dots
from report.data.frames import groups
from report.data.text import counted, listed, number
from report.draw import drawing, theme
from report.draw.plot import Drawing
from report.tables.table import Column, Table

_IDENTITY: Final = [
    "operation", "codec", "backend", "device", "kind", "threads", "numel", "element_bytes", "moved_bytes",
    "other",
]  # fmt: skip
OPERATIONS: Final = {
    "encode": "encode",
    "decode": "decode",
    "decode_sum": "decode and sum 4",
    "decode_sum_encode": "decode, sum 4, encode",
    "encode_carried": "encode with carried error",
}
BACKENDS: Final = {
    "cpu": "#0072b2", "cuda": "#009e73", "reference": "#777777", "bitsandbytes": "#cc79a7",
    "torchao": "#e69f00",
}  # fmt: skip
FAMILIES: Final = {
    "raw": "o", "integers": "s", "integers, asymmetric": "D", "fp8": "^", "MX": "v", "rotated": "P",
    "stochastic": "X", "other arithmetic": "p",
}  # fmt: skip
DEVICES: Final = ("cpu", "cuda")
KINDS: Final = ("fp32", "bf16", "fp16")


def frame(benches: Sequence[Bench]) -> pd.DataFrame:
    """One row per round of each sample; ``id`` names its record."""
    rows: list[dict[str, Any]] = []
    for bench in benches:
        for sample in bench.codecs:
            fixed = {name: getattr(sample, name) for name in _IDENTITY}
            fixed |= {"id": bench.id, "family": family(sample.codec, sample.other)}
            for index, (took, copy) in enumerate(zip(sample.seconds, sample.reference_seconds, strict=True)):
                rows.append(fixed | {"round": index, "seconds": took, "copy_seconds": copy})
    return pd.DataFrame(rows)


def family(codec: str, other: str | None) -> str:
    """Which kind of codec it is: a marker of the figures."""
    if other is not None:
        return "other arithmetic"
    parsed = parse(codec)
    if isinstance(parsed, Raw):
        return "raw"
    if parsed.stochastic:
        return "stochastic"
    if parsed.hadamard:
        return "rotated"
    if isinstance(parsed, FloatCodec):
        return "MX" if parsed.scale == "e8m0" else "fp8"
    return "integers, asymmetric" if parsed.asymmetric else "integers"


def derived(data: pd.DataFrame) -> pd.DataFrame:
    """One row per operation, codec, backend, type and size: medians over rounds with intervals.

    ``rate``: bytes moved a second, in GB/s; ``copy_rate``: of the copies; ``speed``: seconds of copying
    the elements over seconds of the operation; ``of_copy``: rate over the copy's rate.
    """
    rows = []
    for key, group in groups(data, _IDENTITY):
        fixed = dict(zip(_IDENTITY, key, strict=True))
        speed = bench_dots.median(tuple(group["copy_seconds"] / group["seconds"]))
        rate = bench_dots.median(tuple(fixed["moved_bytes"] / group["seconds"] / 1e9))
        work = fixed["moved_bytes"] / (2 * fixed["element_bytes"])  # of a copy's, in bytes
        rows.append(
            fixed
            | {"id": ", ".join(sorted(set(group["id"]))), "family": group["family"].iloc[0]}
            | {"bytes_per_element": fixed["moved_bytes"] / fixed["numel"], "rounds": speed.n}
            | {"mebibytes": fixed["element_bytes"] / 2**20}
            | {"rate": rate.estimate, "rate_low": rate.low, "rate_high": rate.high}
            | {"copy_rate": float((2 * fixed["element_bytes"] / group["copy_seconds"] / 1e9).median())}
            | {"speed": speed.estimate, "speed_low": speed.low, "speed_high": speed.high}
            | {"of_copy": work * speed.estimate}
        )
    return pd.DataFrame(rows)


def _rate(row: dict[str, Any]) -> Interval:
    return Interval(row["rate"], row["rate_low"], row["rate_high"], row["rounds"])


def _speed(row: dict[str, Any]) -> Interval:
    return Interval(row["speed"], row["speed_low"], row["speed_high"], row["rounds"])


def table(data: pd.DataFrame) -> Table:
    """All medians with their intervals."""
    found = derived(data)
    found["operation_told"] = found["operation"].map(OPERATIONS)
    found["rate_told"] = [bench_dots.told(_rate(row)) for row in bench_dots.rows_of(found)]
    found["speed_told"] = [bench_dots.told(_speed(row)) for row in bench_dots.rows_of(found)]
    common, columns = _shared(
        found,
        {"device": "on {}", "kind": "{} elements", "threads": "threads: {}"},
    )
    return Table(
        name="codecs",
        title="Rates of codecs",
        caption=(
            "Medians over rounds, in brackets 95 % intervals. GB/s: every byte read or written, once, over "
            "seconds. Speed: seconds of a copy_ of the same elements into an existing buffer, timed just "
            "before, over seconds. Of the copy's rate: GB/s over the copy's, which reads and writes the "
            "elements. Sums are of 4 frames. Other arithmetic: another library's, which equals none of "
            f"ours and makes its own buffers.{common}"
        ),
        data=found,
        columns=(
            Column("operation_told", "operation"),
            Column("codec", "codec"),
            Column("backend", "backend"),
            *columns,
            Column("mebibytes", "MiB", number(3)),
            Column("bytes_per_element", "bytes moved an element", number(3)),
            Column("rate_told", "GB/s", bench_dots.right),
            Column("copy_rate", "copy, GB/s", number(3)),
            Column("of_copy", "of the copy's rate", number(2)),
            Column("speed_told", "speed, copy = 1", bench_dots.right),
            Column("rounds", "rounds", bench_dots.whole),
            Column("other", "other arithmetic"),
        ),
    )


def _shared(found: pd.DataFrame, told: dict[str, str]) -> tuple[str, list[Column]]:
    """What all rows have in common, for the caption, and columns of what they have not."""
    values = {key: list(dict.fromkeys(found[key])) for key in told}
    same = [phrase.format(values[key][0]) for key, phrase in told.items() if len(values[key]) == 1]
    differ = [Column(key, "type" if key == "kind" else key) for key in told if len(values[key]) > 1]
    return (f" All: {', '.join(same)}." if same else ""), differ


def headline(data: pd.DataFrame) -> list[str]:
    """The main numbers: what each backend reaches of a copy's speed with codecs of its own."""
    found = derived(data)
    found = found[~found["family"].isin(["raw", "other arithmetic"])]
    told = []
    for (backend, device, kind), group in groups(found, ["backend", "device", "kind"]):
        speeds = [
            f"{OPERATIONS[operation]} at {mine['speed'].median():.2g} ({mine['speed'].min():.2g} to "
            f"{mine['speed'].max():.2g})"
            for (operation,), mine in groups(group, ["operation"])
            if operation in ("encode", "decode")
        ]
        where = "" if device == "cpu" else f" on {device}"
        told.append(
            f"From and to {kind}, backend {backend}{where} works at these speeds of a copy, median and range "
            f"over {counted(group['codec'].nunique(), 'codec')}: {listed(speeds)}."
        )
    return told


def drawings(data: pd.DataFrame) -> list[tuple[Drawing, pd.DataFrame]]:
    """The figures of every device and type, each with its rows."""
    found = []
    for device in DEVICES:
        for kind in KINDS:
            mine = data[(data["device"] == device) & (data["kind"] == kind)]
            if len(mine):
                found += [(_roofline(device, kind), mine), (_speeds(device, kind), mine)]
    return found


NAMES_OF_FIGURES: Final = tuple(
    f"{name}-{device}-{kind}" for name in ("roofline", "speeds") for device in DEVICES for kind in KINDS
)


def _roofline(device: str, kind: str) -> Drawing:
    return Drawing(
        name=f"roofline-{device}-{kind}",
        title=f"Roofline: {kind} on {device}",
        draw=_draw_roofline,
        caption=_roofline_caption,
        alt=_alt,
    )


def _speeds(device: str, kind: str) -> Drawing:
    return Drawing(
        name=f"speeds-{device}-{kind}",
        title=f"Every codec against a copy: {kind} on {device}",
        draw=_draw_speeds,
        caption=_speeds_caption,
        alt=_alt,
    )


def _operations(found: pd.DataFrame) -> list[str]:
    return [name for name in OPERATIONS if (found["operation"] == name).any()]


def _draw_roofline(data: pd.DataFrame) -> Figure | None:
    if data.empty:
        return None
    found = derived(data)
    operations = _operations(found)
    columns = 3
    rows = -(-(len(operations) + 1) // columns)  # one place for the legend
    figure, grid = drawing.panels(columns, rows, height=0.4 + 2.15 * rows, width=8.2, sharey=True)
    places = [ax for row in grid for ax in row]
    roof = found["copy_rate"].median()
    low = found["rate"].min() / 1.6
    for ax, operation in zip(places, operations, strict=False):
        mine = found[found["operation"] == operation]
        ax.set_title(OPERATIONS[operation])
        ax.set_yscale("log")
        ax.set_ylim(low, roof * 2)
        ax.axhline(roof, color=theme.INK, lw=1.1, ls=(0, (4, 3)), zorder=1)
        for row in bench_dots.rows_of(mine):
            colour, x = BACKENDS[row["backend"]], row["bytes_per_element"]
            drawing.error_bar(ax, x, _rate(row), colour, across=False)
            marker = FAMILIES[row["family"]]
            ax.plot(x, row["rate"], marker, color=colour, ms=5.5, mec="white", mew=0.5, zorder=4)
        left, right = mine["bytes_per_element"].min(), mine["bytes_per_element"].max()
        air = 0.08 * max(right - left, 1.0)
        ax.set_xlim(left - air, right + air)
        drawing.decades(ax, "y")
        ax.set_xlabel("bytes moved per element")
    for axes in grid:
        axes[0].set_ylabel("GB/s moved")
    places[0].annotate(
        "copy", (1, roof), (-2, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
        ha="right", fontsize=7.5,
    )  # fmt: skip
    for ax in places[len(operations) :]:
        ax.axis("off")
    _legend(places[len(operations)], found)
    return figure


def _colours(found: pd.DataFrame) -> dict[str, str]:
    """Of the backends that are there."""
    return {name: colour for name, colour in BACKENDS.items() if (found["backend"] == name).any()}


def _legend(ax: Axes, found: pd.DataFrame) -> None:
    """Colours of backends and markers of families, in a place of their own."""
    handles = [
        Line2D([], [], ls="", marker="o", ms=6, color=colour, label=name)
        for name, colour in _colours(found).items()
    ]
    handles += [
        Line2D([], [], ls="", marker=marker, ms=6, color=theme.INK, mec="white", mew=0.5, label=name)
        for name, marker in FAMILIES.items()
        if (found["family"] == name).any()
    ]
    ax.legend(handles=handles, loc="center left", borderaxespad=0, labelspacing=0.35)


def _draw_speeds(data: pd.DataFrame) -> Figure | None:
    if data.empty:
        return None
    found = derived(data)
    operations = _operations(found)
    names = [str(key[0]) for key, _ in groups(found, ["codec"])]
    height = drawing.bars_height(len(names), room=1.1, row=0.21)
    figure, (places,) = drawing.panels(len(operations), height=height, width=8.6)
    limits = bench_dots.limits([_speed(row) for row in bench_dots.rows_of(found)])
    for ax, operation in zip(places, operations, strict=True):
        mine = found[found["operation"] == operation]
        dots = [
            bench_dots.Dot(row["codec"], _speed(row), BACKENDS[row["backend"]], FAMILIES[row["family"]])
            for row in bench_dots.rows_of(mine)
        ]
        bench_dots.draw(ax, dots, names, limits)
        ax.set_title(OPERATIONS[operation].replace(", encode", ",\nencode").replace(" carried", "\ncarried"))
        if ax is not places[0]:
            ax.tick_params(axis="y", labelleft=False)
    figure.supxlabel("speed: seconds of a copy / seconds", fontsize=9)
    bench_dots.legend(figure, _colours(found))
    return figure


def _roofline_caption(data: pd.DataFrame) -> str:
    found = derived(data)
    return (
        "Bytes read and written a second over bytes moved for each element, one point for each codec and "
        "backend: medians with 95 % intervals. Dashed: what copies in the same run move, "
        f"{found['copy_rate'].median():.3g} GB/s (median of {counted(len(found), 'median')}, from "
        f"{found['copy_rate'].min():.3g} to {found['copy_rate'].max():.3g}). A point at the line is bound by "
        f"memory; one below it by arithmetic.{_sizes(found)}"
    )


def _speeds_caption(data: pd.DataFrame) -> str:
    return (
        "Seconds of a copy of the elements over seconds of the operation, in the same round: medians with "
        "95 % intervals. Right of the dashed line an operation takes less time than copying its elements. "
        f"Markers are those of the roofline.{_sizes(derived(data))}"
    )


def _sizes(found: pd.DataFrame) -> str:
    """How much was encoded, by backend where it differs."""
    sizes = {
        str(key[0]): listed([f"{size / 2**20:g}" for size in sorted(set(group["element_bytes"]))])
        for key, group in groups(found, ["backend"])
    }
    first = next(iter(sizes.values()))
    others = [f"{size} MiB of {name}" for name, size in sizes.items() if size != first]
    return f" Elements: {first} MiB{', ' + listed(others) if others else ''}."


def _alt(data: pd.DataFrame) -> str:
    found = derived(data)
    told = [
        f"{OPERATIONS[str(key[0])]} on {key[1]} at {group['speed'].min():.2g} to {group['speed'].max():.2g} "
        f"of a copy's speed"
        for key, group in groups(found, ["operation", "backend"])
    ]
    return f"{'; '.join(told)}."
