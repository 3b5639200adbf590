"""Finds counterparts: configurations with which others are compared instead of with the suite's baseline.

For example, a suite that varies the schedule of ZeRO++ asks what each schedule changes.  A comparison with the suite's
baseline, ZeRO-3, does not answer this question.  A comparison with ZeRO++ without a schedule does.  So ZeRO++ without a
schedule is the counterpart of each ZeRO++ with a schedule.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Final, NamedTuple

from harness.suites.repeat_order import TRAINING
from harness.suites.trial import Trial
from report.data.configuration import changes_of, fields_of, name_of
from report.data.metrics import Derived
from report.effects import effects
from report.effects.effects import Key

FEWEST: Final = 3
"""Fewest configurations with a counterpart for which :func:`one_field` returns records.

A configuration counts once in each setting.
"""
FEWEST_OF_PRESET: Final = 2
"""Fewest configurations that change one strategy for which :func:`of_preset` returns records.

A configuration counts once in each setting.
"""
FEWEST_FIELDS: Final = 2
"""Fewest fields in which a strategy must differ from the baseline, so that :func:`of_preset` considers it."""


class Counterparts(NamedTuple):
    """A suite's records in which some configurations are compared with a counterpart, which replaces the baseline.

    A counterpart is another configuration of the same suite (:mod:`report.effects.counterparts`).
    """

    # For :func:`one_field`, the field in which each configuration differs from its counterpart.  For :func:`of_preset`,
    # the strategy that is the counterpart of all.
    shared: str
    derived: Derived  # the records; each counterpart has the role of the baseline


def one_field(derived: Derived) -> Counterparts | None:
    """Compare configurations with counterparts, each of which differs in a single field of the policy.

    Let a configuration change a field.  Its counterpart for this field does not change the field, and is equal in all
    else: setting, strategy, training fields and other changes.  For example, the counterpart of ``ZeRO++ (g int8:64,
    feedback loco)`` for field ``feedback`` is ``ZeRO++ (g int8:64)``.  The function chooses the field for which the
    most configurations have a counterpart.  Configurations with a control, which is a deliberate fault, are ignored.

    Returns:
        The suite's records, in which each configuration with a counterpart for the chosen field is compared with this
        counterpart.  None in each of these cases:

        * Fewer than :data:`FEWEST` configurations have a counterpart.
        * All these counterparts are baselines of the suite, so that the suite's own records make the same comparisons.
    """
    trials = with_policies(derived)
    changes = {key: changes_of(trial) for key, trial in trials.items()}
    by_changes = {_identity(key[0], trials[key], fields): key[1] for key, fields in changes.items()}
    counterparts = defaultdict[str, dict[Key, str]](dict)
    for key, fields in changes.items():
        for field in fields:
            rest = {name: value for name, value in fields.items() if name != field}
            counterpart = by_changes.get(_identity(key[0], trials[key], rest))
            if counterpart is not None:
                counterparts[field][key] = counterpart
    field = max(counterparts, key=lambda field: len(counterparts[field]), default="")
    chosen = counterparts[field] if field else {}
    bases, known = {(setting, name) for (setting, _), name in chosen.items()}, effects.baselines(derived)
    if len(chosen) < FEWEST or all(name in known.get(setting, ()) for setting, name in bases):
        return None
    return Counterparts(field, compared_with(derived, chosen))


def of_preset(derived: Derived) -> Counterparts | None:
    """Compare variants of a strategy, such as ``ZeRO++ (sums fp16)``, with the unchanged strategy, such as ``ZeRO++``.

    The unchanged strategy must be one of the configurations that the suite compares with its baseline.  Another
    configuration is a variant of the strategy if two conditions hold:

    * Its policy differs from the strategy's policy in fewer fields than from the baseline's policy.
    * In each field in which it differs from the strategy, it also differs from the baseline.

    For example, ``ZeRO++ (sums fp16)`` and ``ZeRO++, DeepSpeed's`` are variants of ``ZeRO++``, and ``qwZ`` is not.
    Strategies that differ from the baseline in fewer than :data:`FEWEST_FIELDS` fields are not considered, since
    otherwise ``ZeRO++`` would be a variant of ``qwZ``.  The strategy with the most variants is chosen.

    Returns:
        The suite's records, in which the variants of the chosen strategy are compared with this strategy.  None if
        there are fewer than :data:`FEWEST_OF_PRESET` variants.
    """
    trials, known = with_policies(derived), effects.baselines(derived)
    fields = {key: own_fields(trial) for key, trial in trials.items()}
    presets = {name for (_, name), trial in trials.items() if name == name_of(trial.strategy)}
    found = {preset: dict[Key, str]() for preset in presets & {*derived.compared.contrast}}
    for preset, chosen in found.items():
        for key, own in fields.items():
            usual, base = (
                fields.get((key[0], preset)),
                fields.get((key[0], next(iter(known.get(key[0], ())), ""))),
            )
            if key[1] in (preset, *known.get(key[0], ())) or usual is None or base is None:
                continue
            if sum(usual[name] != base[name] for name in own) < FEWEST_FIELDS:
                continue
            changed = [name for name in own if own[name] != usual[name]]
            from_base = sum(own[name] != base[name] for name in own)
            if len(changed) < from_base and all(own[name] != base[name] for name in changed):
                chosen[key] = preset
    preset = max(sorted(found), key=lambda preset: len(found[preset]), default="")
    if not preset or len(found[preset]) < FEWEST_OF_PRESET:
        return None
    return Counterparts(preset, compared_with(derived, found[preset]))


def with_policies(derived: Derived) -> dict[Key, Trial]:
    """Return one trial of each configuration in each setting (cluster, model, batch), by (setting, configuration).

    Configurations with a control (a fault made on purpose) are left out.  So are the configurations of libraries such
    as DDP, which have no policy.
    """
    first = derived.finished.drop_duplicates(["setting", "configuration"])
    trials = {
        (str(setting), str(name)): derived.frames.trial_of[identity]
        for setting, name, identity in zip(first["setting"], first["configuration"], first["id"], strict=True)
    }
    return {
        key: trial
        for key, trial in trials.items()
        if trial.control is None and trial.resolved_policy() is not None
    }


def own_fields(trial: Trial) -> dict[str, str]:
    """Return the printed fields of a trial's policy as texts, without ``group``, which follows from other fields."""
    fields = fields_of(trial.resolved_policy(), trial.topology())
    return {name: value for name, value in fields.items() if name != "group"}


def compared_with(derived: Derived, counterparts: Mapping[Key, str]) -> Derived:
    """Return a copy of the records in which some configurations are compared with counterparts instead of baselines.

    The keys (setting, configuration) of ``counterparts`` are the configurations to compare.  Its values are the names
    of their counterparts, which are other configurations in the same setting.  In the copy, the configurations to
    compare have the role ``contrast``, their counterparts the role ``baseline``, and all other configurations no role.
    """
    bases = {(setting, name) for (setting, _), name in counterparts.items()}
    frames, table = copy.copy(derived.frames), derived.finished
    keys = list(zip(table["setting"], table["configuration"], strict=True))
    frames.finished = table.assign(
        role=["contrast" if key in counterparts else "baseline" if key in bases else "" for key in keys],
        beside=[counterparts.get(key, key[1]) for key in keys],
    )
    return Derived(frames, derived.sources)


def _identity(setting: str, trial: Trial, changes: dict[str, str]) -> str:
    """Return text that identifies a configuration in a setting: equal configurations give equal texts.

    The text is made from the hash ``setting``, from ``changes``, and from some fields of ``trial``: the strategy, the
    DeepSpeed configuration and the fields of training, such as clipping.  ``changes`` are the fields in which the
    configuration's policy differs from its strategy without changes; the policy of ``trial`` itself is ignored.
    """
    fields = trial.canonical()
    others = [fields.get(name) for name in ("strategy", "deepspeed_config", *TRAINING)]
    return json.dumps([setting, others, sorted(changes.items())], sort_keys=True)
