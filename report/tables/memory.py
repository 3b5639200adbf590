"""Table of what ranks hold: as the engine counts it, by formula, and the process."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import pandas as pd

from report.data import bytes_and_memory
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import number
from report.draw import theme
from report.draw.figure_definition import by_contender
from report.tables.table import Column, Table, placed


def memory(derived: Derived) -> Table:
    """Table of memory of the rank that holds most: engine beside formula, by part, and the process."""
    found = bytes_and_memory.memory(derived.frames, derived.trials)
    places = ["nodes", "ranks_per_node", "model"]
    rows = [
        {
            "where": f"{nodes}x{ranks} ranks, {model}",
            "contender": contender,
            **_memory_row(mine),
            **_copy_row(derived, mine),
        }
        for (nodes, ranks, model), group in groups(found.sort_values(places, kind="stable"), places)
        for _, contender, mine in by_contender(group)
    ]
    if not any(row["beyond_mib"] for row in rows):  # then Sum says it all
        rows = [row | {"beyond_mib": math.nan, "covered_mib": math.nan} for row in rows]
    data = pd.DataFrame(rows)
    held = found[(found["source"] == "engine") & (found["bytes"] > 0)]["part"].unique()
    usual = [part for part in theme.MEMORY if part in held]  # as in the figure; others after them
    parts = [*usual, *sorted(set(held) - set(usual))]
    columns = (
        Column("contender", "Contender"),
        *(Column(f"engine_{part}_mib", part.replace("_", " "), number(3)) for part in parts),
        Column("engine_mib", "Sum", number(4)),
        Column("beyond_mib", "Without formula", number(3)),
        Column("covered_mib", "With formula", number(4)),
        Column("formula_mib", "Formula", number(4)),
        *(
            Column(key, title, number(3))
            for key, title in _COPY.items()
            if len(data) and data[key].notna().any()
        ),
        Column("process_peak_rss_mib", "Process peak", number(3)),
        *(
            Column(f"{source}_step_mib", title, number(4))
            for source, title in (("copied", "Copied, a step"), ("copied_formula", "Copied, formula"))
            if len(data) and data[f"{source}_step_mib"].notna().any()
        ),
    )
    apart = "covered_mib" in data and data["covered_mib"].notna().any()
    beyond = "of that, parts without and with a formula; the sum of the formulas, to compare with the latter"
    copied = any(column.key.startswith("copied") for column in columns)
    caption = (
        "MiB of the fullest rank: what the engine owns, by part and in sum; "
        f"{beyond if apart else 'the sum of the formulas'}; and the process."
        + (
            " Of what is offloaded (host parts) also what is copied between host and device in a step."
            if copied
            else ""
        )
        + (
            " hpZ's copy: by formula, as the frames that came and in 16 bits, as DeepSpeed and the paper "
            "keep it, whichever was kept."
            if any(column.key in _COPY for column in columns)
            else ""
        )
    )
    return placed("memory", "Memory per rank", caption, rows, *columns)


_COPY: Final = {"copy_frames_mib": "hpZ's copy as frames", "copy_halves_mib": "in 16 bits"}


def _copy_row(derived: Derived, mine: pd.DataFrame) -> dict[str, float]:
    """MiB of one contender's hpZ copy by formula, in either form; NaN without one."""
    of_ids = [bytes_and_memory.secondary_either_way(derived.frames, str(one)) for one in mine["id"].unique()]
    return dict(zip(_COPY, (np.array(of_ids).max(axis=0) / 2**20).tolist(), strict=True))


def _memory_row(mine: pd.DataFrame) -> dict[str, float]:
    """MiB of one contender by source and part, and sums: of parts with and without a formula too."""
    sizes = mine.groupby(["source", "part"])["bytes"].median() / 2**20
    told = sizes.drop(["copied", "copied_formula"], level="source", errors="ignore").reset_index()
    row = {f"{source}_{part}_mib": float(size) for source, part, size in told.to_numpy()}
    of_source = {name: found.droplevel(0) for name, found in sizes.groupby(level="source")}
    for name, source in (
        ("engine",) * 2,
        ("formula",) * 2,
        ("copied_step", "copied"),
        ("copied_formula_step", "copied_formula"),
    ):
        row[f"{name}_mib"] = of_source[source].sum() if source in of_source else math.nan
    engine, formula = (of_source.get(source, sizes.iloc[:0]) for source in ("engine", "formula"))
    row["beyond_mib"] = engine[~engine.index.isin(formula.index)].sum()
    return row | {"covered_mib": row["engine_mib"] - row["beyond_mib"]}
