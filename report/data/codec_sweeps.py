"""Integer codecs by bits and block size: their errors, and sweeps of trials that differ only in them."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, Final

import pandas as pd

from harness.suites.trial import Trial
from impl.codecs.codec import CodecError, IntCodec, parse
from report.data.communication import tried
from report.data.contender import BASELINE, NAMES, fields_of, told
from report.data.frames import Frames

_SWEPT: Final[dict[str, tuple[str, ...]]] = {  # each before those whose codecs hold all of its own
    "gradients inside a node": ("gradients_local",),
    "gradients between nodes": ("gradients_node",),
    "weights": ("weights",),
    "gradients": ("gradients_local", "gradients_node"),
    "weights and gradients": ("weights", "gradients_local", "gradients_node"),
}
_SHOWN: Final = (
    "weights and gradients", "weights", "gradients", "gradients inside a node", "gradients between nodes",
)  # fmt: skip
REFERENCE: Final = "reference"


def codecs(frames: Frames, table: pd.DataFrame) -> pd.DataFrame:
    """Errors of integer codecs by bits and block size: one row per trial, purpose, unit and codec.

    Of the trials that :func:`report.data.communication.tried` chooses.
    """
    found, _ = tried(frames, table)
    found = found[found["codec"].str.startswith("int")]
    parsed = [codec for text in found["codec"] if isinstance(codec := parse(text), IntCodec)]
    rows = [(c.bits, str(c.block), c.asymmetric, ", ".join(str(c).split(":")[2:])) for c in parsed]
    told = pd.DataFrame(rows, index=found.index, columns=["bits", "block", "asymmetric", "options"])
    return found.join(told)


def sweeps(frames: Frames, table: pd.DataFrame, axis: str) -> pd.DataFrame:
    """Sweeps: trials that differ only in the ``bits`` or the ``block`` of a codec.

    In a grid of codecs each is swept at every value of the others.  Codecs that change together form a sweep
    if it contains a trial that no sweep of fewer codecs does.

    Args:
        frames: of the same records.
        table: from :func:`report.data.metrics.trials`.
        axis: ``bits`` or ``block``.

    Returns:
        Rows of ``table``, one for each sweep that a trial is in, with ``swept`` (which codecs change
        together), ``held`` (all that is held fixed, of equal text for equal policies), ``line`` (as much of
        it as tells lines of one panel apart), ``bits`` and ``block`` of the swept codec; and, as ``swept``
        = :data:`REFERENCE`, ZeRO-3's trials of the same cells.
    """
    parts: dict[str, pd.DataFrame] = {}
    for swept, columns in _SWEPT.items():
        rows = [
            _sweep_row(frames.ran[trial["id"]], trial, columns, axis) for trial in table.to_dict("records")
        ]
        kept = [place for place, row in enumerate(rows) if row]
        if not kept:
            continue
        found = table.iloc[kept].reset_index(drop=True).join(pd.DataFrame([rows[place] for place in kept]))
        found = found[found.groupby(["cell", "strategy", "held"])[axis].transform("nunique") >= 2]
        narrower = {
            identity
            for name, part in parts.items()
            if set(_SWEPT[name]) < set(columns)
            for identity in part["id"]
        }
        if not set(found["id"]) <= narrower:
            parts[swept] = found.assign(swept=swept)
    if not parts:
        return table.iloc[:0].assign(swept="", line="", held="", bits=0, block="")
    merged = pd.concat([parts[swept] for swept in _SHOWN if swept in parts], ignore_index=True)
    merged["line"] = _lines(merged)
    base = table[(table["contender"] == NAMES[BASELINE]) & table["cell"].isin(merged["cell"].unique())]
    return pd.concat([merged, base.assign(swept=REFERENCE, line="")], ignore_index=True)


def _sweep_row(
    ran: Trial, trial: dict[Any, Any], columns: tuple[str, ...], axis: str
) -> dict[str, Any] | None:
    """Bits and block of the codecs in ``columns``, and all fixed fields as JSON; None if they are not integer
    codecs, or differ in what is swept.
    """
    codecs = [codec for column in columns if (codec := _integer(trial[column])) is not None]
    if len(codecs) < len(columns) or len({getattr(codec, axis) for codec in codecs}) > 1:
        return None
    policy = fields_of(ran)  # of gradients it has both hops
    others = {name: told(name, value) for name, value in policy.items() if name not in columns}
    if "gradients_local" in columns or "gradients_node" in columns:
        del others["gradients"]
        others |= {
            name: f"g {hop} {trial[name]}"
            for name, hop in (("gradients_local", "inside"), ("gradients_node", "between"))
            if name not in columns
        }
    fixed = "block" if axis == "bits" else "bits"
    values = "/".join(dict.fromkeys(str(getattr(codec, fixed)) for codec in codecs))
    options = [", ".join(str(codec).split(":")[2:]) for codec in codecs]
    alike = options[:1] if len(set(options)) == 1 else [" / ".join(option or "plain" for option in options)]
    line = [f"{values} bits" if fixed == "bits" else f"blocks of {values}", *filter(None, alike)]
    rest = [f"{getattr(codec, fixed)} {option}" for codec, option in zip(codecs, options, strict=True)]
    return {
        "line": ", ".join(line),
        "held": json.dumps({"": rest, **others}),
        "bits": codecs[0].bits,
        "block": str(codecs[0].block),
    }


def _lines(found: pd.DataFrame) -> list[str]:
    """Each row's line, with all in which it differs from others of its panel."""
    panels = [tuple(key) for key in found[["swept", "cell"]].to_numpy()]
    held = [json.loads(text) for text in found["held"]]
    values: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for panel, fields in zip(panels, held, strict=True):
        for name, value in fields.items():
            values[*panel, name].add(str(value))
    return [
        ", ".join([line, *(fields[name] for name in fields if name and len(values[*panel, name]) > 1)])
        for line, panel, fields in zip(found["line"], panels, held, strict=True)
    ]


def _integer(text: object) -> IntCodec | None:
    try:
        codec = parse(str(text))
    except CodecError:
        return None
    return codec if isinstance(codec, IntCodec) else None
