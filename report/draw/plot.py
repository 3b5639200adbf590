"""Definition of a figure: its data from records, how it is drawn, its texts, and its suite."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pandas as pd
from matplotlib.figure import Figure

from report.data import published
from report.data.contender import NAMES
from report.data.metrics import Derived
from report.data.text import listed

_MOST_NAMES: Final = 4  # in a sentence of a caption


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Drawing of one tidy table of raw values with a column ``id`` (records).

    Attributes:
        name: file name without suffix, and anchor on the page.
        title: heading on the page.
        draw: makes the figure, or None for an empty table.
        caption: what is shown, with its formula.
        alt: alternative text, with the main numbers.
    """

    name: str
    title: str
    draw: Callable[[pd.DataFrame], Figure | None]
    caption: Callable[[pd.DataFrame], str]
    alt: Callable[[pd.DataFrame], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot(Drawing):
    """One figure of a suite's report.

    Attributes:
        suite: the suite to run when there is no data.
        data: the table, sometimes with a column ``baseline`` of further records; empty when the
            records hold nothing to draw.
    """

    suite: str
    data: Callable[[Derived], pd.DataFrame]


def records_behind(data: pd.DataFrame) -> tuple[str, ...]:
    """Sorted ids of the records behind a figure's data."""
    columns = [column for column in ("id", "baseline") if column in data.columns]
    return tuple(sorted({str(value) for column in columns for value in data[column].dropna()}))


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
    peers = [NAMES[name] for name in ("ddp", "fsdp2") if (data["strategy"] == name).any()]
    if not peers:
        return ""
    told = f"{listed(peers)} {'travel' if len(peers) > 1 else 'travels'} in fp32"
    if NAMES["fsdp2"] in peers:
        told += "; on gloo, FSDP2's reduce-scatter sends the bytes of an all-reduce"
    return f"{told}. "


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
