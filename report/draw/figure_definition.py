"""Definition of a figure: its data from records, how it is drawn, its texts, and its suite."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pandas as pd
from matplotlib.figure import Figure

from harness.suites.peers import PEERS
from report.data import published
from report.data.contender import NAMES
from report.data.metrics import Derived
from report.data.text import listed

_MOST_NAMES: Final = 4  # in a sentence of a caption


@dataclass(frozen=True, slots=True)
class Drawing:
    """Drawing of one tidy table of raw values with a column ``id`` (records)."""

    name: str  # file name without suffix, and anchor on the page
    title: str
    draw: Callable[[pd.DataFrame], Figure]  # of a table with rows
    caption: Callable[[pd.DataFrame], str]  # what is shown, with its formula
    alt: Callable[[pd.DataFrame], str]  # alternative text, with the main numbers


@dataclass(frozen=True, slots=True)
class Plot(Drawing):
    """One figure of a suite's report."""

    data: Callable[[Derived], pd.DataFrame]  # without rows if the records hold nothing to draw
    suite: str = "quickstart"  # to run when there is no data
    extra: bool = False  # whether most suites give no data for it, and a page without it does not say so


def records_behind(data: pd.DataFrame) -> tuple[str, ...]:
    """Sorted ids of the records behind a figure's data, those of column ``baseline`` among them."""
    ids = data.filter(["id", "baseline"]).melt()["value"].dropna()
    return tuple(sorted({str(identity) for identity in ids}))


def titles_of(data: pd.DataFrame) -> dict[str, str]:
    """Short title of each cell: the fields in which it differs from the figure's other cells."""
    where = data.drop_duplicates("cell").set_index("cell")["where"]
    told = {str(cell): str(text).split(", ") for cell, text in where.items()}
    common = set.intersection(*(set(parts) for parts in told.values())) if told else set()
    return {cell: ", ".join(part for part in parts if part not in common) for cell, parts in told.items()}


def common_to(data: pd.DataFrame) -> str:
    """Last sentence of a caption, with what all cells have in common: ``All: 2x2 ranks.``"""
    told = [str(text).split(", ") for text in data["where"].unique()]
    common = [part for part in told[0] if all(part in parts for parts in told)] if told else []
    return f"All: {', '.join(common)}." if common else ""


def peers_note(data: pd.DataFrame) -> str:
    """Caption text on the bytes of peers, if ``data`` has any; ends with a space."""
    travels: dict[str, dict[str, None]] = {"fp32": {}, "bf16": {}}
    for strategy, contender in zip(data["strategy"], data.get("contender", data["strategy"]), strict=True):
        if strategy in PEERS and strategy != "single":
            wire = PEERS[strategy].wire("bf16" if "compute bf16" in contender else "fp32")
            travels[wire][NAMES[strategy]] = None
    told = [
        f"{listed(list(names))} {'travel' if len(names) > 1 else 'travels'} in {wire}"
        for wire, names in travels.items()
        if names
    ]
    if not told:
        return ""
    if any(PEERS[strategy].family == "fsdp2" for strategy in set(data["strategy"]) & set(PEERS)):
        told.append("on gloo, FSDP2's reduce-scatter sends the bytes of an all-reduce")
    return f"{'; '.join(told)}. "


def unpublished_note(data: pd.DataFrame) -> str:
    """Caption text on contenders that the published rule of bytes does not cover; ends with a space."""
    methods = set(published.volume()["method"])
    without = [found for found in contenders(data) if math.isnan(published.total(*found))]
    changed = [name for method, name in without if method in methods]
    others = [name for method, name in without if method not in methods]
    told = ""
    if changed:
        many = len(changed) > _MOST_NAMES
        names = f"the {len(changed)} contenders with changes in parentheses" if many else listed(changed)
        told += (
            f"It has no number for {names}: it counts the presets, whose blocks and bits are the paper's, "
            "not what stands in parentheses. "
        )
    if others:
        names = f"{len(others)} other strategies" if len(others) > _MOST_NAMES else listed(others)
        told += f"Nor for {names}" if changed else f"It has no number for {names}"
        told += ": it is of ZeRO-3 and of ZeRO++'s techniques alone. "
    return told


def contenders(data: pd.DataFrame) -> list[tuple[str, str]]:
    """Distinct (strategy, contender) pairs, in list order."""
    found = data.drop_duplicates("contender").sort_values(["place", "first"], kind="stable")
    return list(zip(found["strategy"], found["contender"], strict=True))


def by_contender(data: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """(strategy, contender, its rows) in list order."""
    return [(*named, data[data["contender"] == named[1]]) for named in contenders(data)]


def by_cell_and_contender(data: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """(name, strategy, rows) of each contender of each cell; the name ends with the cell's short title."""
    return [
        (f"{contender}, {title}" if title else contender, strategy, group)
        for title, of_cell in by_cell(data)
        for strategy, contender, group in by_contender(of_cell)
    ]


def by_cell(data: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(short title, rows) of each cell: the title has the fields in which it differs from the others."""
    return [(title, data[data["cell"] == cell]) for cell, title in titles_of(data).items()]
