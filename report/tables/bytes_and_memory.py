"""Makes the tables of bytes between nodes, of checks of these bytes and of gradients, and of memory."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import pandas as pd

from report.data import bytes_and_memory, published
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import NOTHING, number
from report.draw.names_of_rows import by_configuration
from report.figures.bytes_and_memory import VARIED
from report.quantities import formula
from report.tables.table import CONFIGURATION, TRIALS, Column, Table, rows_of, table_of

_COPY: Final = {"copy_frames_mib": "hpZ's copy as received", "copy_halves_mib": "in 16 bits"}
_SUMS: Final = ("engine_mib", "covered_mib", "formula_mib", "copied_step_mib", "copied_formula_step_mib")
_SENT: Final = {"predicted": "predicted", "ledger": "sent", "interface": "interface", "segment": "segment"}
_MEMORY_NOTES: Final = {  # what a column means, by the column
    "beyond_mib": "Without formula: the sum of the parts that no formula predicts. With formula: the sum of all other "
    "parts.",
    "copy_frames_mib": "The sizes of hpZ's copy in the two formats are computed; a trial keeps the copy in one format.",
    "copied_step_mib": "Copied: MiB of offloaded states that a step copies between host and device.",
}


def volume(derived: Derived) -> Table:
    """Return the table of bytes between nodes: as predicted, as ranks counted them, and as interfaces counted them.

    The bytes are in units of M, the bytes that one all-gather of the model in 16 bits sends between nodes.
    """
    parts = bytes_and_memory.volume(derived.frames, derived.trials)
    keys, shown = ["nodes", "ranks_per_node", "shape", "accumulation"], bytes_and_memory.VOLUME_PARTS
    between = derived.trials[derived.trials["m_bytes"].notna()].sort_values(keys, kind="stable")
    rows: list[dict[str, Any]] = []
    for row, trials in rows_of(between, *keys):
        m = parts[parts["id"].isin(trials["id"])].groupby("part")["m"].median()
        first = trials.iloc[0]
        rows.append({
            **row,
            "where": f"{first['nodes']}x{first['ranks_per_node']} ranks, {first['shape']}",
            **{part: m.get(part, 0.0 if len(m) else math.nan) for part in (*shown, bytes_and_memory.OWNERS)},
            **{key: (trials[f"{sent}_bytes"] / trials["m_bytes"]).median() for key, sent in _SENT.items()},
            "published": published.total(first["strategy"], row["configuration"]),
            "m_bytes": trials["m_bytes"].median(),
        })  # fmt: skip
    titles = ("Forward gather", "Backward gather", "Gradients", "Control", "Padding")
    heads = [*zip(shown, titles, strict=True)]
    if parts["part"].eq(bytes_and_memory.OWNERS).any():
        heads.append((bytes_and_memory.OWNERS, "Owners of matrices"))
    return table_of(
        "volume",
        "Volume between nodes",
        rows,
        CONFIGURATION,
        *(Column(part, title, number(3)) for part, title in heads),
        Column("predicted", "Predicted", number(4)),
        Column("ledger", "Ledger", number(4)),
        Column("interface", "Interface", number(4), formula("interface")),
        Column("segment", "In 1,448-byte segments", number(4), formula("in 1,448-byte segments")),
        Column(
            "published",
            "Published rule",
            number(3),
            f"Published rule: what the ZeRO++ blog states for each preset, without scales. {formula('volume', 'M')}",
        ),
        caption="Bytes between nodes in a step, in units of M, the bytes of one 16-bit gather of the model. Padding "
        "has a column of its own: the columns before it leave padding out, and Predicted and Ledger include it.",
    )


def checks(derived: Derived) -> Table:
    """Return the table of checks of each configuration's bytes, first loss and reduced gradients.

    The bytes that ranks sent are compared with the predicted bytes.  The first loss and the reduced gradients are
    compared with the loss and the gradients that a single process computes.
    """
    rows: list[dict[str, Any]] = []
    for row, trials in rows_of(derived.trials, "where"):
        equal, reference = trials["predicted_equal"].dropna().astype(bool), trials["reference_loss"]
        stated = trials["sent_bytes"] + trials["header_bytes"]
        rows.append({
            **row,
            "equal": _compared(equal, measured_only=bool(trials["measured_only"].any())),
            "interface_over_ledger": (trials["interface_bytes"] / trials["sent_bytes"]).median(),
            "interface_over_stated": (trials["interface_bytes"] / stated).median(),
            "gradient_share": trials["gradient_share"].max(),
            "first_loss_deviation": ((trials["first_loss"] - reference).abs() / reference).max(),
        })  # fmt: skip
    stated_over = formula("interface / ledger", "interface / (ledger + headers)")
    deviation = formula("reference loss", "first-loss deviation")
    return table_of(
        "checks",
        "Checks",
        rows,
        CONFIGURATION,
        TRIALS,
        Column("equal", "Ledger as predicted", str, formula("ledger", "predicted")),
        Column("interface_over_ledger", "Interface/ledger", number(4)),
        Column("interface_over_stated", "Interface/(ledger + headers)", number(4), stated_over),
        Column("first_loss_deviation", "First loss, relative deviation", number(2), deviation),
        Column("gradient_share", "Gradient, difference/allowed", number(2), formula("gradient / allowed")),
        caption="Checks of every trial: bytes compared with their prediction, and first losses and gradients compared "
        "with those of one process.",
    )


def _compared(equal: pd.Series[bool], *, measured_only: bool) -> str:
    """Return text that says for how many trials the ranks sent exactly the predicted bytes: ``5 of 6``.

    ``equal`` has one value for each trial with a prediction: whether the bytes are equal.  Without such trials, the
    text is a dash.  With ``measured_only``, the text is ``measured, not predicted``, because a user's class sends bytes
    that nothing predicts.
    """
    if measured_only:
        return "measured, not predicted"
    return f"{int(equal.sum())} of {len(equal)}" if len(equal) else NOTHING


def memory(derived: Derived) -> Table:
    """Return the table of memory on the fullest rank: by the engine's count, by formulas, and the process's peak."""
    places = ["nodes", "ranks_per_node", "shape"]
    parts = bytes_and_memory.memory(derived.frames, derived.trials).sort_values(places, kind="stable")
    rows = pd.DataFrame(
        {
            "where": f"{nodes}x{ranks} ranks, {model}",
            "configuration": configuration,
            **_memory_row(derived, group),
        }
        for (nodes, ranks, model), place in groups(parts, places)
        for configuration, group in by_configuration(place)
    )
    if len(rows) and not rows["beyond_mib"].any():  # then the column Sum holds the same numbers
        rows[["beyond_mib", "covered_mib"]] = math.nan
    held = set(parts[(parts["source"] == "engine") & (parts["bytes"] > 0)]["part"].str.replace("_", " "))
    order = {part: (part.startswith("host "), place) for place, part in enumerate(VARIED)}
    names = sorted(held, key=lambda name: (*order.get(name, (True, len(order))), name))
    columns = {
        **{f"engine_{name.replace(' ', '_')}_mib": name for name in names},
        "engine_mib": "Sum",
        "beyond_mib": "Without formula",
        "covered_mib": "With formula",
        "formula_mib": "Formula",
        **_COPY,
        "process_peak_rss_mib": "Process peak",
        "copied_step_mib": "Copied, a step",
        "copied_formula_step_mib": "Copied, formula",
    }
    return table_of(
        "memory",
        "Memory per rank",
        rows,
        CONFIGURATION,
        *(Column(key, title, number(4 if key in _SUMS else 3)) for key, title in columns.items()),
        caption="MiB that the engine owns on the fullest rank, by part and in sum, and the sum of the formulas of "
        "impl.plan.memory.",
        notes=" ".join(
            note for key, note in _MEMORY_NOTES.items() if key in rows and rows[key].notna().any()
        ),
    )


def _memory_row(derived: Derived, parts: pd.DataFrame) -> dict[str, float]:
    """Return the memory of one configuration as cells of the table, in MiB.

    ``parts`` are the configuration's rows of :func:`report.data.bytes_and_memory.memory`.  The main cells are:

    * ``engine_masters_mib``, ``formula_masters_mib`` and so on: one part of the memory, as the engine counts it and as
      a formula predicts it;
    * ``engine_mib`` and ``formula_mib``: the sums over these parts;
    * ``covered_mib`` and ``beyond_mib``: the engine's sums over the parts that a formula predicts, and over the others.
    """
    medians = parts.groupby(["source", "part"])["bytes"].median() / 2**20
    row = {
        f"{source}_{part}_mib": float(size)
        for source, part, size in medians.reset_index().to_numpy()
        if not source.startswith("copied")
    }
    by_source = {str(source): sizes.droplevel(0) for source, sizes in medians.groupby(level="source")}
    for source in ("engine", "formula", "copied", "copied_formula"):
        if source in by_source:
            row[f"{source}{'_step' * source.startswith('copied')}_mib"] = by_source[source].sum()
    engine, formula = (by_source.get(source, medians.iloc[:0]) for source in ("engine", "formula"))
    beyond = float(engine[~engine.index.isin(formula.index)].sum())
    ids = map(str, parts["id"].unique())
    copies = [bytes_and_memory.secondary_either_way(derived.frames, identity) for identity in ids]
    copy = dict(zip(_COPY, np.max(copies, axis=0) / 2**20, strict=True))
    return row | {"beyond_mib": beyond, "covered_mib": float(engine.sum()) - beyond, **copy}
