"""Compares configurations that differ in a single field of their policies.

For example, a suite that varies the schedule of ZeRO++ asks what each schedule changes.  A comparison with the suite's
baseline, ZeRO-3, does not answer this question, but a comparison with ZeRO++ without a schedule does.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from typing import Final, NamedTuple

from harness.suites.repeat_order import TRAINING
from harness.suites.trial import Trial
from report.data.configuration import changes_of
from report.data.metrics import Derived
from report.effects import effects
from report.effects.effects import Key

FEWEST: Final = 3
"""Least number of configurations with a counterpart, for :func:`one_field`.

A configuration that has a counterpart in two settings counts twice."""


class OneField(NamedTuple):
    """Records in which configurations are compared with their counterparts, which differ in one field only."""

    field: str  # the field in which a configuration and its counterpart differ, such as ``schedule``
    derived: Derived


def one_field(derived: Derived) -> OneField | None:
    """Return the records with other baselines: each configuration's baseline is its counterpart.

    A counterpart of a configuration has the same setting and strategy, and the same changes of the policy except the
    change of one field.  For the field ``feedback``, the counterpart of ``ZeRO++ (g int8:64, feedback loco)`` is
    ``ZeRO++ (g int8:64)``.  Controls and peers have no counterparts.
    A single field is chosen: the field in which the most configurations have a counterpart.  In the returned records,
    these configurations are the contrast, and their counterparts are the baselines.

    Returns None if fewer than :data:`FEWEST` configurations have a counterpart in this field.  Returns None also if
    all counterparts are baselines of the suite, since the suite then compares with them already.
    """
    first = derived.finished.drop_duplicates(["setting", "configuration"])
    names = zip(first["setting"], first["configuration"], first["id"], strict=True)
    trials: dict[Key, Trial] = {
        (setting, name): derived.frames.trial_of[identity] for setting, name, identity in names
    }
    changes = {
        key: changes_of(trial)
        for key, trial in trials.items()
        if trial.control is None and trial.resolved_policy() is not None
    }
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
    frames, table = copy.copy(derived.frames), derived.finished
    keys = list(zip(table["setting"], table["configuration"], strict=True))
    frames.finished = table.assign(
        role=["contrast" if key in chosen else "baseline" if key in bases else "" for key in keys],
        beside=[chosen.get(key, key[1]) for key in keys],
    )
    return OneField(field, Derived(frames, derived.sources))


def _identity(setting: str, trial: Trial, changes: dict[str, str]) -> str:
    """Return text that identifies a configuration: its setting, its strategy, and the changes of its policy.

    ``trial`` is any trial of the configuration; fields of its training, such as clipping, are part of the text.
    """
    fields = trial.canonical()
    others = [fields.get(name) for name in ("strategy", "deepspeed_config", *TRAINING)]
    return json.dumps([setting, others, sorted(changes.items())], sort_keys=True)
