"""Tables of what was sent between nodes, in units of M, and of how it was checked."""

from __future__ import annotations

import math
from typing import Any

from report.data import bytes_and_memory, published
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import NOTHING, number
from report.draw.figure_definition import by_contender, unpublished_note
from report.tables.table import Column, Table, placed


def volume(derived: Derived) -> Table:
    """Table of bytes between nodes in units of M, by prediction, ledger and interface."""
    parts = bytes_and_memory.volume(derived.frames, derived.trials)
    rows: list[dict[str, Any]] = []
    between = derived.trials[derived.trials["nodes"] > 1]
    keys = ["nodes", "ranks_per_node", "model", "accumulation"]
    for (nodes, ranks, model, _), of_place in groups(between.sort_values(keys, kind="stable"), keys):
        for strategy, contender, mine in by_contender(of_place):
            m = parts[parts["id"].isin(mine["id"])].groupby("part")["m"].median()
            row: dict[str, Any] = {"where": f"{nodes}x{ranks} ranks, {model}", "contender": contender}
            parted = m.reindex(bytes_and_memory.VOLUME_PARTS, fill_value=0.0 if len(m) else math.nan)
            row |= {str(part): size for part, size in parted.items()}
            for name, sent in (("predicted",) * 2, ("ledger", "sent"), ("interface",) * 2, ("segment",) * 2):
                row[name] = (mine[f"{sent}_bytes"] / mine["m_bytes"]).median()
            row |= {"published": published.total(strategy, contender), "m_bytes": mine["m_bytes"].median()}
            rows.append(row)
    heads = ("Forward gather", "Backward gather", "Gradients", "Control", "Padding")
    columns = (
        Column("contender", "Contender"),
        *(
            Column(part, head, number(3))
            for part, head in zip(bytes_and_memory.VOLUME_PARTS, heads, strict=False)
        ),
        Column("predicted", "Predicted", number(4)),
        Column("ledger", "Ledger", number(4)),
        Column("interface", "Interface", number(4)),
        Column("segment", "In 1,448-byte segments", number(4)),
        Column("published", "Published rule", number(3)),
    )
    caption = (
        "Bytes between nodes per step in units of M, one hierarchical 16-bit gather of the model without "
        "padding, which is a column of its own and in no other part. Interfaces count headers too, of "
        "packets that this machine makes larger than a real network does; in segments: the ledger with 66 "
        "bytes for each 1,448 bytes of a message. The published rule counts no scales. "
        f"{unpublished_note(between)}"
    ).rstrip()
    return placed("volume", "Volume between nodes", caption, rows, *columns)


def checks(derived: Derived) -> Table:
    """Table of checks: bytes against prediction, first loss against that of a single process."""
    rows: list[dict[str, Any]] = []
    for (where,), of_place in groups(derived.trials, ["where"]):
        for _, contender, mine in by_contender(of_place):
            equal = mine["predicted_equal"].dropna().astype(bool)
            stated = mine["sent_bytes"] + mine["header_bytes"]
            reference = mine["reference_loss"]
            rows.append(
                {
                    "where": where,
                    "contender": contender,
                    "trials": len(mine),
                    "equal": f"{int(equal.sum())} of {len(equal)}" if len(equal) else NOTHING,
                    "interface_over_ledger": (mine["interface_bytes"] / mine["sent_bytes"]).median(),
                    "interface_over_stated": (mine["interface_bytes"] / stated).median(),
                    "gradient_share": mine["gradient_share"].max(),
                    "first_loss_deviation": ((mine["first_loss"] - reference).abs() / reference).max(),
                }
            )
    columns = (
        Column("contender", "Contender"),
        Column("trials", "n", str),
        Column("equal", "Ledger as predicted", str),
        Column("interface_over_ledger", "Interface/ledger", number(4)),
        Column("interface_over_stated", "Interface/(ledger + headers)", number(4)),
        Column("first_loss_deviation", "First loss, relative deviation", number(2)),
        Column("gradient_share", "First gradient, difference/allowed", number(2)),
    )
    caption = (
        "Trials whose ledger equals the prediction to the byte, row by row; bytes that the interfaces "
        "counted over the ledger's, and over the ledger's with the headers of the packets; and the largest "
        "relative difference of the first step's loss from a single process on the same batches; and the "
        "largest difference of a reduced gradient before training from a single process's, over what the "
        "codecs allow together."
    )
    return placed("checks", "Checks", caption, rows, *columns)
