"""Compares configurations with a counterpart that is not the suite's baseline.

A suite that varies the schedule of ZeRO++ asks what each schedule changes.  Its baseline, ZeRO-3, does not answer that;
ZeRO++ without a schedule does.
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
"""Number of configurations, counted in each setting, from which on :func:`one_field` compares those of one field."""
FEWEST_OF_PRESET: Final = 2
"""Number of configurations, counted in each setting, from which on :func:`of_preset` compares those of one strategy."""
FEWEST_FIELDS: Final = 2
"""Number of fields in which a strategy differs from the baseline, from which on :func:`of_preset` regards it."""


class Counterparts(NamedTuple):
    """Records in which the contrast are these configurations, and the baseline of each is its counterpart."""

    shared: str  # the field in which each differs from its counterpart, or the strategy that each changes
    derived: Derived


def one_field(derived: Derived) -> Counterparts | None:
    """Return the records of configurations that differ from a counterpart in one field, compared with it.

    A configuration's counterpart has the same setting and strategy, and the same changes of the strategy's policy
    without the change of this field.  The counterpart of ``ZeRO++ (g int8:64, feedback loco)`` by ``feedback`` is
    ``ZeRO++ (g int8:64)``.  Controls have none.

    Of several fields, the one with the most such configurations counts.  The result is None if these are fewer than
    :data:`FEWEST`, or if all their counterparts are baselines, since the records then already compare them.
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
    """Return the records of configurations that change a strategy that is itself compared, compared with it.

    A configuration changes such a strategy if it differs from it in fewer fields than from the baseline, and sets none
    of these fields to the baseline's value: ``ZeRO++ (sums fp16)`` and ``ZeRO++, DeepSpeed's`` change ``ZeRO++``, and
    ``qwZ`` does not.  The strategy must differ from the baseline in :data:`FEWEST_FIELDS` fields or more, since
    otherwise ``ZeRO++`` would change ``qwZ``.  Of several strategies, the one with the most such configurations counts.
    The result is None if these are fewer than :data:`FEWEST_OF_PRESET`.
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
    """Return a trial of each configuration in each setting; controls and peers, which have no policy, are left out."""
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
    """Return the fields of a trial's policy that another field does not imply, as text."""
    fields = fields_of(trial.resolved_policy(), trial.topology())
    return {name: value for name, value in fields.items() if name != "group"}


def compared_with(derived: Derived, counterparts: Mapping[Key, str]) -> Derived:
    """Return the records in which these configurations are the contrast, each compared with its counterpart alone."""
    bases = {(setting, name) for (setting, _), name in counterparts.items()}
    frames, table = copy.copy(derived.frames), derived.finished
    keys = list(zip(table["setting"], table["configuration"], strict=True))
    frames.finished = table.assign(
        role=["contrast" if key in counterparts else "baseline" if key in bases else "" for key in keys],
        beside=[counterparts.get(key, key[1]) for key in keys],
    )
    return Derived(frames, derived.sources)


def _identity(setting: str, trial: Trial, changes: dict[str, str]) -> str:
    """Return a text that is equal for configurations of one setting with the same strategy and these changes."""
    fields = trial.canonical()
    others = [fields.get(name) for name in ("strategy", "deepspeed_config", *TRAINING)]
    return json.dumps([setting, others, sorted(changes.items())], sort_keys=True)
