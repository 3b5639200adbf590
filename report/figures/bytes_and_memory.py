"""Figures of the bytes that are sent between nodes, of the memory of ranks, and of models under a memory limit."""

from __future__ import annotations

import math
from typing import Final

import pandas as pd

from harness.records.confidence_intervals import Interval
from report.data import bytes_and_memory, published
from report.data.metrics import Derived
from report.data.text import plain
from report.draw import theme
from report.draw.figure import Figure
from report.draw.marks import Measure, Rows, Stacked

_PLACE: Final = ["nodes", "ranks_per_node", "shape", "accumulation"]


def _place(row: pd.Series) -> str:
    """Return the title of a panel, such as ``2x2 ranks, gpt-small``.

    ``row`` is a row of the figure's table.  If a step has several micro-batches, their number follows.
    """
    place = f"{row['nodes']}x{row['ranks_per_node']} ranks, {plain(row['shape'])}"
    return place + (f", {row['accumulation']} micro-batches" if row.get("accumulation", 1) > 1 else "")


def _volume(derived: Derived) -> pd.DataFrame:
    table = derived.trials[derived.trials["m_bytes"].notna()].sort_values(_PLACE, kind="stable")
    named = table[
        ["id", "strategy", "configuration", "place", "first", *_PLACE, "m_bytes", "where", "setting"]
    ]
    parts = [bytes_and_memory.volume(derived.frames, table).assign(kind="bar")]
    totals = {"predicted": "predicted_bytes", "interfaces": "interface_bytes"}
    parts += [table[["id"]].assign(kind=kind, part="total", bytes=table[key]) for kind, key in totals.items()]
    rows = named.merge(pd.concat(parts)[["id", "kind", "part", "bytes"]].dropna(), on="id")
    rows = rows.assign(m=rows["bytes"].astype(float) / rows["m_bytes"])
    rule = named.drop_duplicates([*_PLACE, "configuration"]).assign(kind="published rule", part="total")
    rule["m"] = list(map(published.total, rule["strategy"], rule["configuration"]))
    if rows.empty:
        return rows.assign(panel="")
    rows = pd.concat([rows, rule.dropna(subset=["m"])], ignore_index=True)
    return rows.assign(panel=rows.apply(_place, axis=1))


def _m_in_words(data: pd.DataFrame) -> str:
    """Return sentences of a caption that define M, and give its size in MB for each panel.

    M are the bytes that one all-gather of the whole model in 16 bits sends between nodes.
    """
    m = data["m_bytes"] / data["accumulation"] / 1e6
    panels = data.groupby("panel", sort=False)
    sizes = "; ".join(f"{panel}: {m[rows.index[0]]:.2f} MB" for panel, rows in panels)
    several = (
        " If a step has several micro-batches, its bytes are divided by their number."
        if data["accumulation"].gt(1).any()
        else ""
    )
    return (
        "M: the bytes that one hierarchical gather of the whole model in 16 bits sends between nodes, without padding; "
        f"these are 2 bytes x elements x (nodes - 1) ({sizes}).{several}"
    )


VOLUME: Final = Figure(
    name="volume",
    title="Bytes between nodes",
    question="What does each configuration send between nodes in a step, in units of M?",
    table=_volume,
    mark=Stacked(
        "m",
        "bytes between nodes per step, in M",
        "Bars are the bytes in the ledger, split by purpose",
        bytes_and_memory.VOLUME_PARTS,
        also={
            "predicted": ("|", theme.INK, "the prediction of impl.plan.traffic"),
            "interfaces": ("o", theme.INK, "the bytes that the network interfaces counted, headers included"),
            "published rule": (
                "x", theme.PUBLISHED,
                "the bytes that the ZeRO++ blog states for presets (3 M, 0.75 M), without scales and control messages",
            ),
        },
    ),
    notes=(_m_in_words,),
)  # fmt: skip


def _memory(derived: Derived) -> pd.DataFrame:
    parts: pd.DataFrame = bytes_and_memory.memory(derived.frames, derived.trials)
    engine, formula = (parts[parts["source"] == source] for source in ("engine", "formula"))
    if engine["secondary"].nunique() < 2:
        return parts[:0]
    keys = [name for name in formula.columns if name not in ("part", "bytes")]
    totals = formula.groupby(keys, as_index=False, sort=False)["bytes"].sum()
    rows: pd.DataFrame = pd.concat([engine.assign(kind="bar"), totals.assign(kind="formula", part="total")])
    rows = rows.sort_values([*_PLACE[:3], "secondary"], kind="stable", ignore_index=True)
    mib, part = rows["bytes"] / 2**20, rows["part"].str.replace("_", " ")
    return rows.assign(mib=mib, part=part, place=rows["secondary"], panel=rows.apply(_place, axis=1))


VARIED: Final = (
    "masters", "host masters", "optimizer", "host optimizer", "gradients", "host gradients", "secondary",
    "host secondary", "gathered", "local gradients", "frames", "host frames", "feedback", "staging", "frozen",
    "host frozen",
)  # fmt: skip
MEMORY: Final = Figure(
    name="memory",
    title="Memory per rank",
    question="What does the engine hold on the fullest rank, and what do the formulas say?",
    table=_memory,
    mark=Stacked(
        "mib",
        "MiB on the fullest rank",
        "Bars are the bytes that the engine owns, by part, each part at the moment when that part is largest",
        VARIED,
        also={"formula": ("|", theme.INK, "the sum of the formulas of impl.plan.memory")},
    ),
    note="Configurations without hpZ come first. With hpZ, a group of ranks shares a copy of the weights, and the "
    "backward pass gathers weights inside the group only; the smaller the group, the more memory the copy takes on "
    "each rank.",
)


def _largest(derived: Derived) -> pd.DataFrame:
    """Return one row for each trial that had a memory limit.

    ``trained_millions`` is the size of the trial's model in millions of parameters; NaN if the model exceeded the
    limit.  ``next_size_not_run`` is the smallest size, in millions, with which the trial's configuration exceeded the
    limit.
    """
    rows = bytes_and_memory.under_limits(derived)
    millions, trained = rows["parameters"] / 1e6, rows["trained"].astype(bool)
    least = millions.mask(trained).groupby([rows["limit_bytes"], rows["configuration"]]).transform("min")
    limits = [f"{size / 2**20:g} MiB a rank" for size in rows["limit_bytes"]]
    millions = millions.where(trained)
    return rows.assign(trained_millions=millions, next_size_not_run=least, where=limits, setting=limits)


_TRAINED: Final = Measure(
    "trained_millions",
    "largest model that trained, million parameters",
    "masters, gradients, optimizer state, copies and gathered weights must lie within the limit, both by the formulas "
    "before the run and by the engine's count after it; activations and buffers for messages are not counted. The next "
    "larger size that the suite tried exceeds the limit: it is recorded as a failure, and was not run",
    lambda trials: Interval(bytes_and_memory.largest(trials)[0], math.nan, math.nan, len(trials)),
    stroke="next_size_not_run",
)
LARGEST_MODEL: Final = Figure(
    name="largest_model",
    title="The largest model under a memory limit",
    question="How large a model trains within a memory limit per rank?",
    table=_largest,
    mark=Rows((_TRAINED,)),
)
