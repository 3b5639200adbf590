"""Makes the tables that say where a page's numbers come from: links, GPUs, settings, machine and failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pandas as pd

from harness.records.confidence_intervals import median_interval
from harness.suites import labels
from harness.suites.labels import flatten
from harness.suites.repeat_order import CONFIGURATION as OF_CONFIGURATION
from report.data.frames import Frames
from report.data.metrics import Derived
from report.data.text import counted, listed, number, with_arguments
from report.quantities import formula
from report.tables.table import CONFIGURATION, TRIALS, Column, Table, rows_of, table_of

HELD: Final = "¶"  # marks trials with throttled or shared GPUs
_HELD_FROM: Final = 0.05  # share of samples in which a GPU may be throttled without a mark
_SHOWN: Final = 12  # largest number of values that are printed of one key
_MEASURED: Final = {  # columns of the trials
    "parameters": "parameters", "units": "units", "link": "link_kind", "kernels": "kernels",
    "corpus, SHA-256": "corpus_sha256",
}  # fmt: skip


def energy(derived: Derived) -> Table:
    """Return the table of the GPUs' energy per token, power, utilisation and clocks.

    It has one row per configuration and setting, and no rows if no trial ran on a GPU.
    """
    rows: list[dict[str, Any]] = []
    for row, trials in rows_of(derived.trials[derived.trials["gpus"].gt(0)]):
        held = int((trials["throttled"].gt(_HELD_FROM) | trials["gpu_others"].gt(0)).sum())
        row.update(trials[["watts", "utilisation", "clock_mhz", "throttled"]].median())
        row["_taken"] += f" ({held} {HELD})" if held else ""
        row["held_or_shared"] = held
        if len(known := trials.dropna(subset=["joules_per_token"])):
            row["joules_per_token"] = median_interval(
                list(known["joules_per_token"]), list(known["occasion"])
            )
        rows.append(row)
    return table_of(
        "energy",
        "Energy",
        rows,
        CONFIGURATION,
        TRIALS,
        Column("joules_per_token", "J/token", number(3), formula("joules per token")),
        Column("watts", "W per GPU", number(3)),
        Column("utilisation", "Utilisation", number(2)),
        Column("clock_mhz", "Clock, MHz", number(4)),
        Column("throttled", "Throttled", number(2)),
        caption="Energy and clocks of the GPUs of all ranks, as NVML reports them; medians over trials.",
        notes="Utilisation is the share of time in which a kernel ran, including kernels that only "
        "waited. Throttled is "
        "the share of samples in which power or temperature limited a clock. "
        ""
        f"{HELD}: trials whose GPUs were throttled in more than {_HELD_FROM:.0%} of samples, or also computed for "
        "other processes.",
    )


def links(derived: Derived) -> Table:
    """Return the table of the requested and measured rates of the links between nodes.

    It has one row for each kind of link, requested rate, and time of the measurement: before the sweep (``calibrated``)
    or after a trial (``probed``).
    """
    rates = derived.frames.links.groupby(["kind", "requested_mbit", "when"], dropna=False)
    data = rates["achieved_mbit"].agg(["size", "median", "min", "max"]).reset_index()
    return table_of(
        "links",
        "Links",
        data.assign(share=data["median"] / data["requested_mbit"]),
        Column("kind", "Kind"),
        Column("requested_mbit", "Requested, Mbit/s", number(3), formula("requested rate")),
        Column("when", "When"),
        Column("size", "n", str),
        Column("median", "Median, Mbit/s", number(4), formula("calibrated rate", "probed rate")),
        Column("min", "Lowest", number(4)),
        Column("max", "Highest", number(4)),
        Column("share", "of requested", number(3)),
        caption="Requested and achieved rates of the links, before and after trials.",
    )


def failures(derived: Derived) -> Table:
    """Return the table of failed trials, which have a record without a result."""
    rows = derived.frames.failures
    heads = ("Configuration", "Where", "Repeat", "Kind", "Message", "Log")
    columns = (Column("id", "Record"), *(Column(head.lower(), head) for head in heads))
    caption = "Trials that left a record without a result; no figure or other table contains them."
    if rows["by"].notna().any():
        caption += (
            " Refused by a peer's library: this library is not installed, or cannot do what the trial asks."
        )
    return Table("failures", "Failed trials", caption, rows, columns)


def setting(derived: Derived) -> Table:
    """Return the table of the values that the keys of a suite file have in the trials: model, data and options."""
    return table_of(
        "setting",
        "Setting",
        pd.DataFrame(settings(derived.frames, derived.finished), columns=["setting", "value"]),
        Column("setting", "Setting"),
        Column("value", "Value"),
        caption="The values of a suite's keys in these trials. If a value differs between "
        "configurations but not within one, each value is followed by the configurations that have it.",
        notes="Kernels encode and decode: 'reference' is plain PyTorch, 'cpu' the C++ kernels, 'cuda' the CUDA "
        "kernels.",
    )


def environment(derived: Derived) -> Table:
    """Return the table of recorded facts about machine, code, link and algorithms, one row for each value of a fact."""
    return table_of(
        "environment",
        "Environment",
        derived.frames.facts.replace({"value": {"null": "none", "[]": "none"}}),
        *([Column("pool", "Pool")] if len(derived.frames.pools) > 1 else []),
        Column("fact", "Fact"),
        Column("value", "Value"),
        Column("records", "Records", str),
        caption="Facts that the records hold: machine, code, link, and the algorithms and transports that really ran.",
    )


def settings(frames: Frames, table: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the settings of the trials in ``table`` as pairs (name, value).

    First come the keys of a suite file, then facts about the trials such as the number of parameters, and then the
    numbers of repeats, sweeps and occasions.  Keys in which configurations differ by definition, such as the policy,
    are left out, and so are keys without a value in any trial.  If trials have several values of a key, these values
    are joined as one text.
    """
    trials = [dict(flatten(frames.trial_of[str(identity)].canonical())) for identity in table["id"]]
    keys = dict.fromkeys(key for trial in trials for key in trial)
    kept = [key for key in keys if key.split(".")[0] not in (*OF_CONFIGURATION, "repeat")]
    values = {key: [labels.at({key: trial.get(key)}, key) for trial in trials] for key in kept}
    values |= {name: [str(value or "") for value in table[column]] for name, column in _MEASURED.items()}

    def by_configuration(values: list[str]) -> str:
        """Return the distinct ``values`` as one text; ``values`` has one value for each row of ``table``, in its order.

        If each configuration has a single value, and not all have the same, each value is followed by the names of the
        configurations that have it: ``fp32 (DDP); bf16 (ZeRO-3, ZeRO++)``.
        """
        names = {
            str(value): part.unique() for value, part in table["configuration"].groupby(values, sort=False)
        }
        apart = len(names) > 1 and sum(map(len, names.values())) == table["configuration"].nunique()
        return _some([f"{value} ({', '.join(names[value])})" if apart else value for value in names])

    pairs = [(name, by_configuration(cells)) for name, cells in values.items()]
    pairs += [
        (f"{name}s", str(table[name].nunique())) for name in ("repeat", "sweep", "occasion") if len(table)
    ]
    return [(name, text) for name, text in pairs if text not in ("", labels.NONE)]


def _some(values: Sequence[str]) -> str:
    """Return values joined by semicolons, at most :data:`_SHOWN` of them; ``and 3 more`` follows if 3 are left out."""
    rest = len(values) - _SHOWN
    return "; ".join(values[:_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


def essentials(frames: Frames, table: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the main settings of the trials in ``table`` as pairs (name, value), for the head of a page.

    They include the model, the optimizer, and the numbers of seeds and repeats.  The list is empty if there are no
    trials.
    """
    if not len(table):
        return []
    trials = [frames.trial_of[str(identity)] for identity in table["id"]]
    values = {
        "model": [with_arguments(trial.model.name, trial.model.arguments) for trial in trials],
        "tokens per rank": [f"{trial.tokens_per_rank}, in sequences of {trial.sequence}" for trial in trials],
        "steps": [f"{trial.steps} timed, after {counted(trial.warmup, 'warm-up')}" for trial in trials],
        "optimizer": [with_arguments(trial.optimizer.name, trial.optimizer.arguments) for trial in trials],
        "corpus": [trial.corpus for trial in trials],
    }
    facts = [(name, _some(list(dict.fromkeys(texts)))) for name, texts in values.items()]
    if sizes := sorted({int(size) for size in table["parameters"] if size}):
        facts.append(("parameters", listed([_size(size) for size in sizes[:_SHOWN]])))
    repeated = ["seed", "repeat", *(name for name in ("sweep", "occasion") if len(set(table["sweep"])) > 1)]
    return [*facts, ("repetition", ", ".join(counted(table[key].nunique(), key) for key in repeated))]


def _size(count: int) -> str:
    """Return a number of parameters as text, in millions or billions: ``3.31 M``, ``18.0 B``."""
    size, unit = (1e9, "B") if count >= 1e9 else (1e6, "M")
    return f"{number(3)(count / size)} {unit}"
