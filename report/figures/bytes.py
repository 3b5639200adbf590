"""Figures of bytes: volume by technique beside the published volume, and the link's rates."""

from __future__ import annotations

from typing import Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from report.data import bytes_and_memory, published
from report.data.metrics import Derived
from report.data.text import listed, plain
from report.draw import chart_parts, theme
from report.draw.figure_definition import Plot, contenders, peers_note, unpublished_note

_PLACE: Final = ["nodes", "ranks_per_node", "model", "accumulation"]
_LEAST: Final = -1e-9  # M; what is spared is not below it but for rounding
_MARKS: Final[dict[str, tuple[str, str, int]]] = {  # beside the ledger's bars: marker, colour and size
    "predicted": ("|", theme.INK, 13),
    "interface": ("o", theme.INK, 4),
    "published rule": ("x", theme.RULE, 6),
}
_SPARED: Final = {
    "sent": "sent",
    "padding": "sent, of padding",
    "quantising": "spared by quantising",
    "copy": "spared by hpZ's copy inside the node",
    "hops": "spared by hopping by node",
}


def _volume_data(derived: Derived) -> pd.DataFrame:
    """Ledger bytes by part; ``part`` also has predicted, interface and saved bytes."""
    table = derived.trials[derived.trials["nodes"] > 1]
    sent = bytes_and_memory.volume(derived.frames, table).assign(kind="ledger")
    if sent.empty:
        return sent.assign(first=0)
    spared = bytes_and_memory.spared(derived.frames, table).assign(kind="split")
    totals = []
    for kind in ("predicted", "interface"):
        rows = table.assign(kind=kind, part="total", bytes=table[f"{kind}_bytes"])
        totals.append(rows.assign(m=rows["bytes"] / rows["m_bytes"]).dropna(subset=["bytes"]))
    found = pd.concat([sent, spared, *totals], ignore_index=True)
    kept = ["id", "kind", "part", "bytes", "m"]
    named = ["strategy", "contender", "place", "first", *_PLACE, "m_bytes", "where", "cell"]
    return found[kept].merge(table[["id", *named]], on="id")


def _draw_volume(data: pd.DataFrame) -> Figure:
    groups = [group for _, group in data.groupby(_PLACE)]
    rows = [max(group["contender"].nunique(), 2) for group in groups]
    height = 0.75 + 0.55 * len(groups) + 0.32 * sum(rows)
    figure, grid = chart_parts.panels(2, len(groups), height=height, sharey=True, height_ratios=rows)
    for (left, right), group in zip(grid, groups, strict=True):
        _volume_bars(left, group)
        spared = _wide(group, "split", list(_SPARED))
        spared = spared.mask((spared < _LEAST).any(axis=1))  # more than 16 bits: nothing is spared
        chart_parts.stacked_bars(right, spared, theme.SPARED, _SPARED)
        chart_parts.same_rows(right)
        if len(groups) > 1:
            left.set_title(_told(group))
    grid[-1][0].set_xlabel("bytes between nodes per step, in M")
    grid[-1][1].set_xlabel("against flat collectives in 16 bits, in M")
    chart_parts.legend_above(figure, grid[0][0], columns=2)
    chart_parts.legend_above(figure, grid[0][1], columns=1, side="right")
    return figure


def _told(group: pd.DataFrame) -> str:
    first = group.iloc[0]
    told = f"{first['nodes']}x{first['ranks_per_node']} ranks, {plain(first['model'])}"
    return told + (f", {first['accumulation']} micro-batches" if first["accumulation"] > 1 else "")


def _wide(group: pd.DataFrame, kind: str, parts: list[str]) -> pd.DataFrame:
    """Medians in M of one kind: contenders in list order as rows, parts as columns."""
    rows = group[group["kind"] == kind]
    table = rows.pivot_table(index="contender", columns="part", values="m", aggfunc="median")
    names = [contender for _, contender in contenders(group)]
    return table.reindex(index=names, columns=[part for part in parts if part in table.columns])


def _volume_bars(ax: Axes, group: pd.DataFrame) -> None:
    values = _wide(group, "ledger", list(bytes_and_memory.VOLUME_PARTS))
    chart_parts.stacked_bars(ax, values, theme.VOLUME, {})
    totals = pd.DataFrame({"ledger": values.sum(axis=1)})
    for kind in ("predicted", "interface"):
        totals[kind] = group[group["kind"] == kind].groupby("contender")["m"].median()
    totals["published rule"] = [published.total(*found) for found in contenders(group)]
    places = range(len(totals))
    for name, (marker, colour, size) in _MARKS.items():
        if totals[name].notna().any():
            ax.plot(totals[name], places, marker, color=colour, ms=size, mfc="none", mew=1.2, label=name)
    for place, (most, total) in enumerate(zip(totals.max(axis=1), totals["ledger"], strict=True)):
        chart_parts.beside(ax, most, place, f"{total or most:.3f}", points=7)
    ax.set_xlim(0, totals[["ledger", "interface", "published rule"]].max().max() * 1.2)


def _unsplit_in_words(data: pd.DataFrame) -> str:
    """Caption text on contenders without a bar on the right, and why; empty if there are none."""
    split = data[data["kind"] == "split"]
    drawn = set(split["contender"]) - set(split[split["m"] < _LEAST]["contender"])
    without = [contender for _, contender in contenders(data) if contender not in drawn]
    return f" (of our engine's policies of at most 16 bits: not of {listed(without)})" if without else ""


def _volume_caption(data: pd.DataFrame) -> str:
    m = data["m_bytes"] / data["accumulation"] / 1e6
    places = [group for _, group in data.groupby(_PLACE)]
    sizes = "; ".join(f"{_told(group)}: {m[group.index[0]]:.2f} MB" for group in places)
    with_ledger = data[data["kind"] == "ledger"]["contender"]
    without = (data["kind"] == "interface") & ~data["contender"].isin(with_ledger)
    unledgered = "; the interfaces' where there is no ledger" if without.any() else ""
    several = "Of several micro-batches: the mean of one. " if data["accumulation"].gt(1).any() else ""
    return (
        "M is what one hierarchical gather of the whole model in 16 bits carries between nodes: 2 bytes x "
        f"elements x (nodes - 1) ({sizes}), without padding, which is a part of its own. Left: the ledger by "
        "purpose "
        f"(bars and numbers{unledgered}), what impl.plan.traffic predicts ( | ), what the network "
        "interfaces counted, headers included ( o ), and the rule printed in the ZeRO++ blog, 3M for ZeRO-3 "
        "and 0.75M for ZeRO++, applied to each technique ( x; only the two totals were printed there); the "
        f"rule leaves out scales and control. {unpublished_note(data)}Right: computed from the same units, "
        "what is spared against flat (ring) collectives in 16 bits, first by hopping by node, then by hpZ's "
        f"copy, then by quantising{_unsplit_in_words(data)}. "
        f"{peers_note(data)}{several}Median over repeats."
    )


def _volume_alt(data: pd.DataFrame) -> str:
    totals = data[data["kind"] == "ledger"].groupby(["contender", "id"], sort=False)["m"].sum()
    told = [f"{name} {value:.3f}" for name, value in totals.groupby("contender", sort=False).median().items()]
    return f"Bytes between nodes per step in units of M: {listed(told[:12])}; published 3 and 0.75."


def _link_data(derived: Derived) -> pd.DataFrame:
    shaped = derived.frames.links.dropna(subset=["requested_mbit"])
    share = shaped["achieved_mbit"] / shaped["requested_mbit"]
    named = derived.trials[["id", "strategy", "contender", "place", "first"]]
    return shaped.assign(share=share).merge(named, on="id")


def _draw_link(data: pd.DataFrame) -> Figure:
    figure, ((ax,),) = chart_parts.panels(1, height=2.5)
    requested = data["requested_mbit"]
    several = len(requested.unique()) > 1
    if several:
        chart_parts.log_ticks(ax, sorted(requested.unique()))
        ax.set_xlabel("requested rate, Mbit/s")
    else:
        last = int(data["order"].max()) + 1
        ticks = MaxNLocator(integer=True).tick_values(1, last)
        ax.set_xticks([tick for tick in ticks if 1 <= tick <= last and tick == int(tick)])
        ax.set_xlabel(f"trial, in order of running (requested: {requested.iloc[0]:g} Mbit/s)")
    beside = max(1.08, (requested.max() / requested.min()) ** 0.02)  # on a log axis
    looks = {"calibrated": ("o", 1 / beside), "probed": ("D", beside)}
    for when, (marker, shift) in looks.items():
        mine = data[data["when"] == when]
        if several:
            at = requested[mine.index] * shift
        else:  # a calibration stands before the first trial that it served
            turn = mine.groupby("id").cumcount()
            within = 0.3 + 0.4 * turn / max(1, int(turn.max()) if len(turn) else 1)
            at = mine["order"] + 1 - (within if when == "calibrated" else 0)
        ax.plot(
            at, 100 * mine["share"], marker, color=theme.MEASURED[when], ms=4.5, alpha=0.8, mec="white",
            mew=0.4, label=when,
        )  # fmt: skip
    ax.axhline(100, color=theme.FAINT, lw=0.9, zorder=1)
    low, high = 100 * data["share"].min(), 100 * data["share"].max()
    room = max(5.0, 0.15 * (high - low))
    ax.set_ylim(min(low, 100) - room, max(high, 100) + room)
    ax.set_ylabel("achieved, % of requested")
    chart_parts.legend_above(figure, ax, columns=2)
    return figure


def _link_caption(data: pd.DataFrame) -> str:
    kinds = data.drop_duplicates(["kind", "why"])
    told = "; ".join(f"{row.kind} ({row.why})" for row in kinds.itertuples())
    over_trials = len(data["requested_mbit"].unique()) == 1 and data["when"].eq("calibrated").any()
    where = "; a calibration stands before the first trial that it served" if over_trials else ""
    return (
        "The link between nodes: rate achieved by messages of at least "
        f"{data['message_bytes'].min() / 1e6:.3g} MB before the sweep (calibrated) and right after each "
        f"trial (probed), as a share of the rate asked for{where}. "
        f"Kind of link: {told}."
    )


def _link_alt(data: pd.DataFrame) -> str:
    told = [
        f"{rate:g} Mbit/s {100 * group.min():.0f} to {100 * group.max():.0f} %"
        for rate, group in data.groupby("requested_mbit")["share"]
    ]
    return f"Achieved share of the requested rate: {listed(told)}."


PLOTS: Final = (
    Plot("volume", "Bytes between nodes", _draw_volume, _volume_caption, _volume_alt, _volume_data),
    Plot("link", "The link, as asked for and as it was", _draw_link, _link_caption, _link_alt, _link_data),
)
