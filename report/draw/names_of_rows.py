"""Rows of a tidy table by contender and cell, with their names; and sentences of captions on all rows."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from harness.suites.peers import PEERS
from report.data.contender import NAMES
from report.data.text import listed


def common_and_rest(wheres: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Parts that all descriptions of cells have; and the other parts of each, by description."""
    parts = {where: where.split(", ") for where in map(str, wheres)}
    common = [part for part in next(iter(parts.values()), []) if all(part in cell for cell in parts.values())]
    rest = {where: ", ".join(part for part in cell if part not in common) for where, cell in parts.items()}
    return common, rest


def titles_of(data: pd.DataFrame) -> dict[str, str]:
    """Short title of each cell: the fields in which it differs from the table's other cells."""
    where = data.drop_duplicates("cell").set_index("cell")["where"]
    titles = common_and_rest(where)[1]
    return {str(cell): titles[str(text)] for cell, text in where.items()}


def common_to(data: pd.DataFrame) -> str:
    """Last sentence of a caption, with what all cells have in common: ``All: 2x2 ranks.``"""
    common = common_and_rest(data["where"].unique())[0]
    return f"All: {', '.join(common)}." if common else ""


def peers_note(data: pd.DataFrame) -> str:
    """Caption text on the bytes of peers, if ``data`` has any."""
    travels: dict[str, dict[str, None]] = {"fp32": {}, "bf16": {}}
    for strategy, contender in zip(data["strategy"], data.get("contender", data["strategy"]), strict=True):
        if strategy in PEERS and strategy != "single":
            wire = PEERS[strategy].wire("bf16" if "compute bf16" in contender else "fp32")
            travels[wire][NAMES[strategy]] = None
    sentences = [
        f"{listed(list(names))} {'travel' if len(names) > 1 else 'travels'} in {wire}"
        for wire, names in travels.items()
        if names
    ]
    if any(PEERS[strategy].family == "fsdp2" for strategy in set(data["strategy"]) & set(PEERS)):
        sentences.append("on gloo, FSDP2's reduce-scatter sends the bytes of an all-reduce")
    return f"{'; '.join(sentences)}." if sentences else ""


def contenders(data: pd.DataFrame) -> list[str]:
    """Distinct contenders, in list order."""
    return list(data.sort_values(["place", "first"], kind="stable")["contender"].unique())


def by_contender(data: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(contender, its rows) in list order."""
    return [(name, data[data["contender"] == name]) for name in contenders(data)]


def by_cell(data: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(short title, rows) of each cell."""
    return [(title, data[data["cell"] == cell]) for cell, title in titles_of(data).items()]


def by_cell_and_contender(data: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """(name, contender, rows) of each contender of each cell; the name ends with the cell's short title."""
    return [
        (f"{contender}, {title}" if title else contender, contender, group)
        for title, rows in by_cell(data)
        for contender, group in by_contender(rows)
    ]
