"""Names configurations (strategies with changes to their policies) as pages print them, and finds the baseline.

The names leave out a change that all policies of a results folder share, if the change concerns only the execution
(types, prefetch, gather and so on).
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
from report.data.text import plain, short_integer

BASELINE: Final = "zero3"  # ZeRO-3 with collectives in two hops, without quantisation and without hpZ's copy
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
"""The strategies by their names in suites, in the order in which figures and tables list them."""

NAMES: Final = {key: strategy.name for key, strategy in STRATEGIES.items()}
_SHORT: Final = {each.label: each.short for each in SETTINGS if each.short}
_OF_EXECUTION: Final = {each.label for each in SETTINGS if each.execution}


_MODULE: Final = re.compile(r"^[\w.]+:")  # the module in the name ``module:Class`` of a user's own class
_OWN: Final = ("reduce", "gather")  # the fields of a policy that may name a user's own class


@dataclass(frozen=True, slots=True)
class Comparison:
    """The printed names of a suite's baseline, and of the configurations that are compared with the baseline."""

    baseline: str  # several baselines are listed as ``A and B``; empty if no trial of the baseline finished
    contrast: tuple[str, ...]
    # Whether the suite names baseline and contrast.  If not, :func:`is_baseline` chooses the baseline, and the contrast
    # is every other configuration.
    named_in_suite: bool


FLAT_FACTOR = (
    "With N nodes and P ranks in all, one ring over all ranks sends ((P - 1) / P) / ((N - 1) / N) times as many bytes "
    "between nodes as collectives in two hops: 1.5 on 2 nodes of 2 ranks, 1.015 on 64 nodes of 16 ranks"
)


ROLES: Final = ("baseline", "contrast")


def is_baseline(table: pd.DataFrame) -> pd.Series[bool]:
    """Return, for each row of ``table``, whether it belongs to a baseline.

    A suite may name its baseline.  Then column ``role`` of the table is ``baseline`` in the rows of the baseline, and
    ``contrast`` in the rows of configurations that are compared with it.  There are two cases:

    * The suite names its baseline.  The rows with the role ``baseline`` belong to it.  If no trial of the baseline
      finished, there are no such rows, and no other configuration takes its place.
    * The suite names no baseline.  The baseline is ZeRO-3 without changes.  If the table has no row of ZeRO-3 without
      changes, the baseline is the configuration that the suite lists first.
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
    """Return ``table`` with new columns that hold values of the baseline.

    Each row of the table is matched with the baseline's row that has equal cells in the columns ``on``, such as setting
    and seed.  The new cells are copied from this row of the baseline; they are NaN if there is no such row.
    If a setting has several baselines, a row is matched with the baseline that the row's cell ``beside`` names.

    Args:
        table: One row per trial.
        is_base: For each row, whether it belongs to a baseline.
        on: Names of the columns by which rows are matched.
        columns: The new columns, given as NEW="OLD".  Column NEW holds the baseline's values of column OLD.
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
    """Return which rows belong to the policy that is named ``strategy``, such as ``zeropp``, without changes."""
    return table["strategy"].eq(strategy) & table["configuration"].eq(NAMES[strategy])


def fields_of(policy: Policy | None, topology: Topology) -> dict[str, str]:
    """Return the fields of a policy that pages print, as texts by their labels: ``{"weights": "int8:2048", ...}``.

    Two of these fields, ``group`` and ``secondary``, are numbers of ranks, which follow from ``topology``.  The dict is
    empty if ``policy`` is None.
    """
    if policy is None:
        return {}
    ranks = {"group": policy.group_ranks(topology), "secondary": policy.secondary_ranks(topology)}
    return {
        each.label: each.in_words(ranks.get(each.name, each.of(policy)))
        for each in sorted(SETTINGS, key=lambda each: each.part)
        if each.label
    }


def changes_of(trial: Trial, base: Policy | None = None) -> dict[str, str]:
    """Return the fields in which a trial's policy differs from the policy ``base``, with the trial's values as texts.

    By default ``base`` is the policy that the trial's strategy has without changes.
    """
    usual = fields_of(base or trial.base_policy(), trial.topology())
    values = fields_of(trial.resolved_policy(), trial.topology())
    return {name: value for name, value in values.items() if value != usual[name]}


def differences_of(trial: Trial, base: Trial) -> str:
    """Return text that lists the fields in which two trials' policies differ: ``weights int8:2048, hpZ 2``.

    The values are those of ``trial``.  If ``trial`` has a control, a fault made on purpose, the control's name follows.
    Libraries such as DDP have no policy, so no field is listed if a library trains one of the two trials.
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
    return f"no {field}" if value == "none" else f"{field} {_short(field, value)}"


def shared_changes(trials: Sequence[Trial]) -> dict[str, str]:
    """Return the changes that all policies have in common, so that the names of configurations need not mention them.

    A field of a policy is such a change if all ``trials`` have the same value of the field, and this value differs from
    the value that their strategies have without changes.  Only fields that concern the execution are considered, such
    as types and prefetch.  A field that names a class of the user's own is never such a change.  Keys are labels of
    fields, and values are texts: ``{"prefetch": "0"}``.  Trials of libraries such as DDP, which have no policy, are
    ignored.
    """
    of_policies = [changes_of(trial) for trial in trials if trial.resolved_policy() is not None]
    return {
        name: value
        for name, value in next(iter(of_policies), {}).items()
        if name in _OF_EXECUTION
        and all(changes.get(name) == value for changes in of_policies)
        and not (name in _OWN and _MODULE.match(value))  # a method is no matter of execution
    }


def labels_of(
    trials: Mapping[str, Trial], shared: Mapping[str, str], also: Sequence[str] = ()
) -> dict[str, str]:
    """Return the printed name of each trial's configuration, by id of the trial.

    ``shared`` are the changes that names leave out (:func:`shared_changes`).  ``also`` names fields of a trial, such as
    clipping, that are not part of its policy.  If the trials differ in such a field, all names contain its value.
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
    """Return the printed name of a trial's configuration: ``ZeRO++``, or ``ZeRO++ (w int8:64)`` if it has changes.

    The parentheses list, in this order:

    * the policy's changes from the strategy without changes, except the changes in ``shared`` (:func:`shared_changes`);
    * the settings of a library such as DDP;
    * the fields in ``also``, each with its value; ``also`` maps the path of a field of the trial to the value;
    * the name of the control, if the trial has one: a fault made on purpose.

    If a DeepSpeed configuration determines the policy, the first item is instead the stage and the changes from a
    DeepSpeed configuration that sets nothing but the stage.
    """
    name, changes = name_of(trial.strategy), changes_of(trial)
    if (
        trial.strategy == RECIPE
    ):  # the name of a DeepSpeed recipe has its stage, and its changes from a recipe that sets the stage alone
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


def has_own_method(trial: Trial) -> bool:
    """Return whether a class of the user's own reduces a trial's gradients or gathers its weights.

    The trial's policy names such a class in ``policy.reduce`` or ``policy.gather``.
    """
    values = fields_of(trial.resolved_policy(), trial.topology())
    return any(_MODULE.match(values.get(name, "")) for name in _OWN)


def name_of(strategy: str) -> str:
    """Return the printed name of a strategy; for a strategy that is a user's class, the name of this class."""
    return NAMES.get(strategy) or strategy.rpartition(":")[2]


def field_text(field: str, value: str) -> str:
    """Return a field of a policy and its value as short text, as it stands in the name of a configuration.

    For example, ``g int4:64`` for field ``gradients``, ``groups of 2`` for ``secondary``, or ``max reuse 1e9``.
    """
    if field == "secondary" and value == "0":
        return "no hpZ copy"
    if field == "schedule" and value != "none":
        return value  # which names the fields that it changes
    return f"{_SHORT.get(field, field)} {_short(field, value)}"


def _short(field: str, value: str) -> str:
    """Return the value of a policy's field as the name of a configuration prints it.

    If field ``reduce`` or ``gather`` names a user's class as ``module:Class``, the module is left out.  In other
    fields, large round integers are written as ``1e9`` (:func:`report.data.text.short_integer`).  All other values stay
    unchanged.
    """
    return _MODULE.sub("", value) if field in _OWN else short_integer(value)


def spelled(name: str) -> str:
    """Return a configuration's name for a sentence: the short ``w`` and ``g`` become ``weights`` and ``gradients``.

    For example, ``ZeRO++ (w int8:64)`` becomes ``ZeRO++ (weights int8:64)``.
    """
    return re.sub(r"(?<=[( ])g (?=\S)", "gradients ", re.sub(r"(?<=[( ])w (?=\S)", "weights ", name))


def short_names_in_words(names: Iterable[str]) -> str:
    """Return caption text that explains the short ``w`` and ``g``; empty if they occur in none of the ``names``.

    The text begins with a space: `` In names w is the codec of weights and g is the codec of gradients.``
    """
    text = " ".join(names)
    clauses = [
        f"{_SHORT[field]} is the codec of {field}"
        for field in ("weights", "gradients")
        if re.search(rf"[( ]{_SHORT[field]} \w", text)
    ]
    return f" In names {' and '.join(clauses)}." if clauses else ""


def _peer_settings(trial: Trial) -> dict[str, str]:
    """Return the settings in which a library's trial differs from the usual settings, as texts by their names.

    These are the settings:

    * the keys of DeepSpeed's configuration; the only usual key is ``stage``, with the value 3;
    * ``compute``, the type of weights and activations, which is usually fp32;
    * ``gradients``, the type in which FSDP2 reduces gradients, which is usually the type of ``compute``;
    * ``group``, the ranks that FSDP2 shards over, which are usually all ranks;
    * ``buckets of``, the size of DDP's buckets of gradients, which is usually DDP's default.
    """
    config = trial.deepspeed_config if family_of(trial.strategy) == DEEPSPEED else None
    settings = {path.rpartition(".")[2]: str(value) for path, value in flatten(json.loads(config or "{}"))}
    if trial.peer.bucket_mb != BUCKET_MB:
        settings["buckets of"] = f"{trial.peer.bucket_mb:g} MB"
    settings |= trial.peer.model_dump(include={"compute", "group"})
    settings["gradients"] = trial.peer.reduce_dtype
    usual = {"stage": "3", "compute": "fp32", "gradients": "compute", "group": "all"}
    return {name: value for name, value in settings.items() if value != usual.get(name)}
