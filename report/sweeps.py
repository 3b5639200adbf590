"""Integer codecs by bits and block: their errors, and trials between which only they change."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd

from impl.codec import CodecError, IntCodec, parse
from report.contender import BASELINE, NAMES
from report.frame import Frames

_CODECS: Final = ("weights", "gradients_local", "gradients_node")
_SWEPT: Final[dict[str, tuple[str, ...]]] = {
    "weights and gradients": _CODECS,
    "weights": ("weights",),
    "gradients": ("gradients_local", "gradients_node"),
    "gradients inside a node": ("gradients_local",),
    "gradients between nodes": ("gradients_node",),
}
REFERENCE: Final = "reference"


def codecs(frames: Frames, table: pd.DataFrame) -> pd.DataFrame:
    """Error of integer codecs by bits and block: one row per trial, purpose, unit and codec."""
    found = frames.quantisation.merge(table[["id", "contender", "strategy", "seed", "repeat"]], on="id")
    return _with_codec(found, "codec")


def sweeps(table: pd.DataFrame, axis: str) -> pd.DataFrame:
    """Trials between which the ``bits`` or the ``block`` of a codec changes and all else stays.

    Args:
        table: from :func:`report.metrics.trials`.
        axis: ``bits`` or ``block``.

    Returns:
        ``table`` with ``swept`` (which codecs change together), ``line`` (what is held fixed, told),
        ``bits`` and ``block`` of the swept codec; and, as ``swept`` = :data:`REFERENCE`, ZeRO-3's
        trials of the same cells.
    """
    parts: list[pd.DataFrame] = []
    taken: set[str] = set()  # trials whose changes a wider sweep explains
    for swept, columns in _SWEPT.items():
        rows = [_sweep_row(trial, columns, axis) for trial in table.to_dict("records")]
        kept = [place for place, row in enumerate(rows) if row and table["id"].iloc[place] not in taken]
        if not kept:
            continue
        found = table.iloc[kept].reset_index(drop=True).join(pd.DataFrame([rows[place] for place in kept]))
        keys = ["cell", "strategy", "secondary", "held"]
        found = found[found.groupby(keys)[axis].transform("nunique") >= 2]
        parts.append(found.assign(swept=swept))
        taken |= set(found["id"])
    if not taken:
        return table.iloc[:0].assign(swept="", line="", held="", bits=0, block="")
    merged = pd.concat(parts, ignore_index=True)
    base = table[(table["contender"] == NAMES[BASELINE]) & table["cell"].isin(merged["cell"].unique())]
    return pd.concat([merged, base.assign(swept=REFERENCE, line="")], ignore_index=True)


def _sweep_row(trial: dict[Any, Any], columns: tuple[str, ...], axis: str) -> dict[str, Any] | None:
    """Bits and block of the codecs in ``columns``, and all that must stay equal; None if they
    are no integer codecs or differ in what is swept.
    """
    codecs = [codec for column in columns if (codec := _integer(trial[column])) is not None]
    if len(codecs) < len(columns) or len({getattr(codec, axis) for codec in codecs}) > 1:
        return None
    fixed = "block" if axis == "bits" else "bits"
    held = [f"{getattr(codec, fixed)}{' asym.' if codec.asymmetric else ''}" for codec in codecs]
    told = "/".join(dict.fromkeys(held))
    others = [str(trial[column]) for column in _CODECS if column not in columns]
    return {
        "line": f"{told} bits" if fixed == "bits" else f"blocks of {told}",
        "held": "|".join(held + others),
        "bits": codecs[0].bits,
        "block": str(codecs[0].block),
    }


def _with_codec(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Rows whose ``column`` names a symmetric or asymmetric integer codec, with bits and block."""
    parsed = [
        parse(text) if isinstance(text, str) and text.startswith("int") else None for text in rows[column]
    ]
    kept = rows.loc[np.array([codec is not None for codec in parsed], dtype=bool)].copy()
    found = [codec for codec in parsed if isinstance(codec, IntCodec)]
    kept["bits"] = [codec.bits for codec in found]
    kept["block"] = [str(codec.block) for codec in found]
    kept["asymmetric"] = [codec.asymmetric for codec in found]
    return kept


def _integer(text: object) -> IntCodec | None:
    try:
        codec = parse(str(text))
    except CodecError:
        return None
    return codec if isinstance(codec, IntCodec) else None
