"""Writes sentences that compare the difference in a page's first sentence with its value in other settings.

A setting is the cluster, model, batch and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pandas as pd

from harness.records.confidence_intervals import Interval, mean_interval
from report.data import speedups
from report.data.configuration import spelled
from report.data.text import listed
from report.effects import effects, loss_verdicts
from report.effects.counterparts import compared_with, own_fields, with_policies
from report.effects.effects import Effect, Key, Verdict
from report.further.head import Head
from report.sentence import NOT_SIGNIFICANT, capitalised, evidence, places_of, whose

_MOST_SETTINGS: Final = 3  # :func:`between_settings` compares two of at most so many settings
_FEWEST_SETTINGS: Final = 3  # :func:`by_setting` lists at least so many settings
_MOST_LISTS: Final = 2  # :func:`by_setting` lists settings for at most so many other configurations
_LISTS: Final[dict[Verdict, str]] = {
    "better": "is faster than {other} {places}",
    "worse": "is slower {places}",
    "not significant": "does not differ significantly {places}",
    "inconclusive": "has no interval {places}",
}


def between_settings(head: Head) -> list[str]:
    """Return the sentence that compares the difference in a page's first sentence with its value in another setting.

    The first sentence states how much a configuration differs from its baseline in one setting (cluster, model, batch
    and so on).  The other setting is the one in which this difference is farthest from its value in the first setting.
    For example, the sentence says ``ZeRO++'s speed-up over ZeRO-3 is 1.50 times as large with 50 Mbit/s as with 400
    Mbit/s``.
    For losses, one difference is subtracted from the other, seed by seed.  For step times, one speed-up is divided by
    the other, for each seed and repeat.

    The list is empty in each of these cases:

    * The first sentence is neither about losses nor about the time of a step, or its difference is not significant.
    * The configuration is compared in a single setting, or in more than :data:`_MOST_SETTINGS`.
    * There are too few pairs for an interval.
    """
    keys = [key for key in head.compared(head.kind) if key[1] == head.key[1]]
    if (
        head.kind not in ("loss", "step")
        or not 1 < len(keys) <= _MOST_SETTINGS
        or not head.top.effect.significant
    ):
        return []
    changes = {key: head.found[head.kind][key].change.estimate for key in keys}
    other = max(keys, key=lambda key: abs(changes[key] - changes[head.key]))
    of = _losses_apart if head.kind == "loss" else _speedups_apart
    change = of(head, head.key, other)
    if change is None or not change.known:
        return []
    equal = 0.0 if head.kind == "loss" else 1.0
    effect = Effect(change, "not significant", change, equal=equal)
    places = places_of(head.derived)
    here, there = (places.get(key[0], "").removesuffix(", ") for key in (head.key, other))
    ending = "" if effect.significant else NOT_SIGNIFICANT
    name, base = head.top.name, head.top.base
    if head.kind == "loss":
        subject = whose(f"loss difference from {base}", name)
        side = "higher" if change.estimate >= 0 else "lower"
        form = "{:.3f}".format if abs(change.estimate) >= 0.01 else "{:.4f}".format
        size = f"{form(abs(change.estimate))} nats {side} {here} than {there}"
        ends = (change.low, change.high) if change.estimate >= 0 else (-change.high, -change.low)
        return [f"{capitalised(subject)} is {size}{evidence('loss', effect, form, ends)}{ending}."]
    subject = whose(f"speed-up over {base}", name)
    size = f"{change.estimate:.2f} times as large {here} as {there}"
    return [f"{capitalised(subject)} is {size}{evidence('step', effect)}{ending}."]


def _losses_apart(head: Head, key: Key, other: Key) -> Interval | None:
    """Return by how much a configuration's loss difference from its baseline is larger in one setting than in another.

    ``key`` and ``other`` are pairs (setting, configuration) with the same configuration.  The loss difference in the
    setting of ``other`` is subtracted from the loss difference in the setting of ``key``.  The result is in nats: the
    mean, with its interval, over the seeds that both settings have.  Returns None if the settings share no seed.
    """
    trials = head.derived.trials
    differences = []
    for setting, name in (key, other):
        here = trials[trials["setting"].eq(setting)]
        own, base = (
            loss_verdicts.by_seed(here[here["configuration"].eq(each)])
            for each in (name, head.base_of((setting, name)))
        )
        differences.append(own - base)
    apart = list((differences[0] - differences[1]).dropna())
    return mean_interval(apart) if apart else None


def _speedups_apart(head: Head, key: Key, other: Key) -> Interval | None:
    """Return a configuration's speed-up in the setting of ``key`` over its speed-up in the setting of ``other``.

    ``key`` and ``other`` are pairs (setting, configuration) with the same configuration.  The result is the geometric
    mean, with its interval, over the seeds and repeats that both settings have.  Returns None if the settings share
    none.
    """
    pairs = head.derived.pairs
    here, there = (_of(pairs, each) for each in (key, other))
    both = here.merge(there, on=["seed", "repeat"], suffixes=("", "_there"))
    if both.empty:
        return None
    either = both["disturbed"].astype(bool) | both["disturbed_there"].astype(bool)
    return speedups.speedup(both.assign(disturbed=either), "speedup", "speedup_there")


def _of(pairs: pd.DataFrame, key: Key) -> pd.DataFrame:
    """Return the pairs of trials of one configuration in one setting; ``key`` is (setting, configuration).

    A pair is a trial of the configuration and the baseline's trial under the same conditions.  If there are several
    pairs with the same seed and repeat, only the last one is returned.
    """
    own = pairs[pairs["setting"].eq(key[0]) & pairs["configuration"].eq(key[1])]
    own = own[["seed", "repeat", "occasion", "disturbed", "speedup"]]
    return own.drop_duplicates(["seed", "repeat"], keep="last")


def by_setting(head: Head) -> list[str]:
    """Return sentences that say in which settings the main configuration is faster or slower than a similar one.

    The main configuration is the one that the page's first sentence is about; a setting is the cluster, model, batch
    and so on.  Another configuration is similar if the suite compares it with the baseline, and if its policy differs
    from the main configuration's policy in exactly one field.  There is one sentence for each similar configuration
    that differs significantly from the main configuration in at least one setting.

    The list is empty in each of these cases:

    * The first sentence is not about the time of a step, or has no interval.
    * The main configuration is compared in fewer than :data:`_FEWEST_SETTINGS` settings.
    * More than :data:`_MOST_LISTS` configurations are similar.
    """
    keys = [key for key in head.compared(head.kind) if key[1] == head.key[1]]
    if head.kind != "step" or len(keys) < _FEWEST_SETTINGS or not head.top.known:
        return []
    fields = {key: own_fields(trial) for key, trial in with_policies(head.derived).items()}
    contrast = {name for _, name in head.compared(head.kind)}
    alike = [
        name
        for setting, name in fields
        if setting == head.key[0] and name in contrast and _differ(fields, head.key, (setting, name)) == 1
    ]
    sentences = [_places_by_verdict(head, keys, name) for name in alike]
    return [*filter(None, sentences)] if len(alike) <= _MOST_LISTS else []


def _differ(fields: dict[Key, dict[str, str]], key: Key, other: Key) -> int:
    """Return in how many fields the policies of two configurations differ; -1 if one of the two has no policy.

    ``fields`` has the fields of each policy by (setting, configuration), and ``key`` and ``other`` are two of its keys.
    """
    if key not in fields or other not in fields:
        return -1
    return sum(value != fields[other][name] for name, value in fields[key].items())


def _places_by_verdict(head: Head, keys: Sequence[Key], other: str) -> str:
    """Return the sentence that says in which settings a configuration X is faster or slower than a configuration Y.

    For example, ``X is faster than Y with 400 Mbit/s, and is slower with 50 and 100 Mbit/s.``  X is the configuration
    that the page's first sentence is about, and Y is ``other``.  ``keys`` are the pairs (setting, X) of all settings.
    The text is empty if X and Y do not differ significantly in any setting.
    """
    derived = compared_with(head.derived, dict.fromkeys(keys, other))
    found, places = effects.speeds(derived), places_of(head.derived)
    of_verdict = {
        verdict: [
            places[key[0]].removesuffix(", ")
            for key in keys
            if key in found and found[key].verdict == verdict
        ]
        for verdict in _LISTS
    }
    if not of_verdict["better"] and not of_verdict["worse"]:
        return ""
    clauses = [
        text.format(other=spelled(other), places=_listed_alike(of_verdict[verdict]))
        for verdict, text in _LISTS.items()
        if of_verdict[verdict]
    ]
    if not of_verdict["better"]:
        clauses[0] = clauses[0].replace("slower", f"slower than {spelled(other)}", 1)
    return capitalised(f"{head.top.name} {listed(clauses)}.")


def _listed_alike(places: Sequence[str]) -> str:
    """Join texts as ``a, b and c``, and write the words with which all texts begin or end only once.

    For example, ``with 50 Mbit/s inside nodes`` and ``with 100 Mbit/s inside nodes`` give ``with 50 and 100 Mbit/s
    inside nodes``.
    """
    if len(places) < 2:
        return "".join(places)
    words = [place.split(" ") for place in places]
    first = _shared_at_start(words)
    last = _shared_at_start([each[first:][::-1] for each in words])
    parts = [" ".join(each[first : len(each) - last]) for each in words]
    ends = words[0][len(words[0]) - last :] if last else []
    return " ".join(filter(None, [" ".join(words[0][:first]), listed(parts), " ".join(ends)]))


def _shared_at_start(lists: Sequence[Sequence[str]]) -> int:
    """Return how many words all lists have in common, counted from their beginning to the first difference."""
    columns = list(zip(*lists, strict=False))
    return next((number for number, column in enumerate(columns) if len({*column}) > 1), len(columns))
