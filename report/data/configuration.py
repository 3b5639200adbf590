"""Names configurations (strategies with changes to their policies) as pages print them, and finds the baseline.

Changes that concern only the execution (types, prefetch, gather, ...) and that all policies of a folder share are left
out of the names.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pandas as pd

from harness.suites.labels import differing, flatten, in_words
from harness.suites.peers import BUCKET_MB, DEEPSPEED, family_of
from harness.suites.trial import RECIPE, Trial
from impl.deepspeed.config_to_policy import recipe
from impl.policy.policy import SETTINGS, Policy
from impl.policy.topology import Topology
from report.data.text import plain

BASELINE: Final = "zero3"  # in hops, without quantisation or a copy (hpZ)
PAPERS_BASELINE: Final = (
    "zero3-flat"  # the baseline of the ZeRO++ paper: one ring over all ranks, whatever their node
)
PROPOSED: Final = "zeropp"


@dataclass(frozen=True, slots=True)
class Strategy:
    """The printed name of a strategy, and the colour and marker with which it is drawn."""

    name: str
    colour: str
    marker: str


_FILE: Final = Path(__file__).parents[1] / "strategies.csv"
with _FILE.open(encoding="utf-8", newline="") as _file:
    STRATEGIES: Final = {row.pop("strategy"): Strategy(**row) for row in csv.DictReader(_file)}
"""In the order in which figures and tables list strategies."""

NAMES: Final = {key: strategy.name for key, strategy in STRATEGIES.items()}
_SHORT: Final = {each.label: each.short for each in SETTINGS if each.short}
_OF_EXECUTION: Final = {each.label for each in SETTINGS if each.execution}


_MODULE: Final = re.compile(r"^[\w.]+:")  # of a user's own class


@dataclass(frozen=True, slots=True)
class Comparison:
    """Printed names of a suite's baseline, and of the configurations that are compared with it."""

    baseline: str
    contrast: tuple[str, ...]
    # Whether the suite names both.  If not, :func:`is_baseline` chooses the baseline, and the contrast is every other
    # configuration.
    named_in_suite: bool


FLAT_FACTOR = (
    "With N nodes and P ranks in all, one ring over all ranks sends ((P - 1) / P) / ((N - 1) / N) times as many bytes "
    "between nodes as collectives in two hops: 1.5 on 2 nodes of 2 ranks, 1.015 on 64 nodes of 16 ranks"
)


ROLES: Final = ("baseline", "contrast")


def is_baseline(table: pd.DataFrame) -> pd.Series[bool]:
    """Return whether each row belongs to the baseline.

    Rows with the role ``baseline`` belong to it.  If no row has a role, the baseline is plain ZeRO-3 or, without plain
    ZeRO-3, the configuration listed first.  If the suite names a baseline and no trial of it is in the table, no row
    belongs to a baseline: another configuration must not take its place unnoticed.
    """
    if table["role"].isin(ROLES).any():
        return table["role"].eq("baseline")
    preset = is_preset(table, BASELINE)
    if preset.any():
        return preset
    listed_at = table.groupby("configuration")["order"].transform("min")
    return listed_at.eq(listed_at.min())


def with_baseline(
    table: pd.DataFrame, is_base: pd.Series[bool], on: Sequence[str], **columns: str
) -> pd.DataFrame:
    """Add values of the baseline to each row of ``table``.

    They are taken from the baseline's row that has the same values in the columns ``on``, and are NaN if there is no
    such row.  ``columns`` maps the name of each new column to the column of the baseline's row that it is copied from.
    If a setting has several baselines, column ``beside`` names the baseline that counts.
    """
    base, keys = table[is_base], [*on]
    if base[["setting", "configuration"]].drop_duplicates()["setting"].duplicated().any():
        base, keys = (
            base.assign(beside=base["configuration"].where(base["beside"].ne(""), "")),
            [*on, "beside"],
        )
    base = base.drop_duplicates(keys)
    base = base[keys].assign(**{new: base[old] for new, old in columns.items()})
    return table.merge(base, on=keys, how="left")


def is_preset(table: pd.DataFrame, strategy: str) -> pd.Series[bool]:
    """Return whether each row belongs to ``strategy`` without changes."""
    return table["strategy"].eq(strategy) & table["configuration"].eq(NAMES[strategy])


def fields_of(policy: Policy | None, topology: Topology) -> dict[str, str]:
    """Return the fields of a policy that affect what is computed and sent, as text; empty without a policy."""
    if policy is None:
        return {}
    ranks = {"group": policy.group_ranks(topology), "secondary": policy.secondary_ranks(topology)}
    return {
        each.label: each.in_words(ranks.get(each.name, each.of(policy)))
        for each in sorted(SETTINGS, key=lambda each: each.part)
        if each.label
    }


def changes_of(trial: Trial, base: Policy | None = None) -> dict[str, str]:
    """Return the fields of a trial's policy that differ from ``base``, by default its strategy's preset, as text."""
    usual = fields_of(base or trial.base_policy(), trial.topology())
    values = fields_of(trial.resolved_policy(), trial.topology())
    return {name: value for name, value in values.items() if value != usual[name]}


def differences_of(trial: Trial, base: Trial) -> str:
    """Return as text the fields in which a trial's policy differs from that of ``base``: ``weights int8:2048, hpZ 2``.

    If the trial has a control, its name follows.  Peers have no policy, so no field is named for them.
    """
    usual = fields_of(base.resolved_policy(), base.topology())
    values = fields_of(trial.resolved_policy(), trial.topology())
    changes = {name: value for name, value in values.items() if usual and value != usual[name]}
    changes.pop("group", None)  # follows from other fields
    first = [name for name in ("weights", "secondary", "gradients") if name in changes]
    texts = [_changed_text(name, changes[name]) for name in dict.fromkeys([*first, *changes])]
    texts += [f"control: {trial.control.replace('_', ' ')}"] if trial.control is not None else []
    return ", ".join(texts)


def _changed_text(field: str, value: str) -> str:
    if field == "secondary":
        return f"hpZ {value}" if value != "0" else "no hpZ"
    if field == "schedule" and value != "none":
        return f"schedule: {value}"
    return f"no {field}" if value == "none" else f"{field} {_without_module(field, value)}"


def shared_changes(trials: Sequence[Trial]) -> dict[str, str]:
    """Return the changes from presets that only concern execution (types, prefetch) and that all policies share."""
    of_policies = [changes_of(trial) for trial in trials if trial.resolved_policy() is not None]
    return {
        name: value
        for name, value in next(iter(of_policies), {}).items()
        if name in _OF_EXECUTION
        and all(changes.get(name) == value for changes in of_policies)
        and not (name in ("reduce", "gather") and _MODULE.match(value))  # a method is no matter of execution
    }


def labels_of(
    trials: Mapping[str, Trial], shared: Mapping[str, str], also: Sequence[str] = ()
) -> dict[str, str]:
    """Return the names of the trials' configurations, by id of the trial.

    Names also contain those of the trial's fields ``also`` in which the trials differ.
    """
    fields = {
        name: {path: value for path, value in flatten(trial.canonical()) if path.split(".")[0] in also}
        for name, trial in trials.items()
    }
    varying = differing(list(fields.values()))
    return {
        name: label_of(trial, shared, {path: fields[name].get(path) for path in varying})
        for name, trial in trials.items()
    }


def label_of(trial: Trial, shared: Mapping[str, str], also: Mapping[str, Any] = {}) -> str:
    """Name a configuration: ``ZeRO++``, or ``ZeRO++ (w int8:64)`` if it has changes or the further fields ``also``."""
    name, changes = name_of(trial.strategy), changes_of(trial)
    if (
        trial.strategy == RECIPE
    ):  # the name has the stage, and the policy's changes from a recipe of the stage alone
        stage = trial.recipe().policy.stage
        bare = recipe({"zero_optimization": {"stage": stage}}, topology=trial.topology()).policy
        changes = {"stage": str(stage)} | changes_of(trial, bare)
    changes = {field: value for field, value in changes.items() if field not in shared}
    texts = [field_text(*change) for change in (*changes.items(), *_peer_settings(trial).items())]
    for path, value in also.items():
        name_of_field = path.removesuffix(".name").rpartition(".")[2].replace("_", " ")
        texts.append(f"{name_of_field} {plain(in_words(value))}")
    if trial.control is not None:
        texts.append(f"control: {trial.control.replace('_', ' ')}")
    return f"{name} ({', '.join(texts)})" if texts else name


def name_of(strategy: str) -> str:
    """Return the printed name of a strategy; for a user's own strategy, the name of its class."""
    return NAMES.get(strategy) or strategy.rpartition(":")[2]


def field_text(field: str, value: str) -> str:
    """Return a policy field and its value as short text: ``g int4:64``, ``groups of 2``, ``prefetch 0``."""
    if field == "secondary" and value == "0":
        return "no hpZ copy"
    if field == "schedule" and value != "none":
        return value  # which names the fields that it changes
    return f"{_SHORT.get(field, field)} {_without_module(field, value)}"


def _without_module(field: str, value: str) -> str:
    """Return the value of a field; for a user's own reduction, its class and arguments without the module."""
    return _MODULE.sub("", value) if field == "reduce" else value


def spelled(name: str) -> str:
    """Return a configuration's name for a sentence: ``w`` is written out as weights, and ``g`` as gradients."""
    return re.sub(r"(?<=[( ])g (?=\S)", "gradients ", re.sub(r"(?<=[( ])w (?=\S)", "weights ", name))


def short_names_in_words(names: Iterable[str]) -> str:
    """Return caption text that explains ``w`` and ``g`` in names, with a space before it; empty without such names."""
    text = " ".join(names)
    clauses = [
        f"{_SHORT[field]} is the codec of {field}"
        for field in ("weights", "gradients")
        if re.search(rf"[( ]{_SHORT[field]} \w", text)
    ]
    return f" In names {' and '.join(clauses)}." if clauses else ""


def _peer_settings(trial: Trial) -> dict[str, str]:
    """Return a peer's settings that are not the usual ones (stage 3, fp32).

    These are the keys of DeepSpeed's configuration, the types, and the size of buckets.
    """
    config = trial.deepspeed_config if family_of(trial.strategy) == DEEPSPEED else None
    settings = {path.rpartition(".")[2]: str(value) for path, value in flatten(json.loads(config or "{}"))}
    if trial.peer.bucket_mb != BUCKET_MB:
        settings["buckets of"] = f"{trial.peer.bucket_mb:g} MB"
    settings |= trial.peer.model_dump(include={"compute", "group"})
    settings["gradients"] = trial.peer.reduce_dtype
    usual = {"stage": "3", "compute": "fp32", "gradients": "compute", "group": "all"}
    return {name: value for name, value in settings.items() if value != usual.get(name)}
