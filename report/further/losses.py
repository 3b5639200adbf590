"""Writes sentences on losses, and on which of the configurations with equally low losses sends the fewest bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import pandas as pd

from harness.records.confidence_intervals import mean_interval
from harness.suites.peers import family_of
from report.data.configuration import spelled
from report.data.text import counted, listed, number
from report.effects import loss_verdicts
from report.effects.counterparts import own_fields, with_policies
from report.effects.effects import Key, Verdict
from report.further.head import Head
from report.further.pairs import memory_sentence, net_sentence
from report.sentence import differences_of, on_largest, on_one, places_of, whose
from report.tables.peers import FAMILIES

# If several configurations send equal bytes, a sentence names at most so many; of more, it gives the number alone.
_MOST_NAMED: Final = 2
# Fewest configurations that are compared because they send equal bytes, or because they change the same field alone.
_FEWEST: Final = 3
_MOST_PLACES: Final = 3  # a sentence gives errors in at most so many settings
_EQUAL: Final[tuple[Verdict, ...]] = ("better", "not significant")
_WITHIN: Final[tuple[Verdict, ...]] = ("higher within the margin",)
_three_digits: Final = number(3)


def on_fewest_bytes(head: Head) -> list[str]:
    """Return sentences on which configurations send the fewest bytes at a loss as low as the baseline's.

    If the suite asks for bytes, a loss is low enough if it equals the baseline's in every digit.

    If the suite asks for losses, a loss is low enough if it is not significantly higher than the baseline's.  If no
    configuration has such a loss, losses that are significantly higher, but within the suite's margin, are low enough.
    The sentences depend on the fields of the policy that configurations change:

    * At least two fields are varied one at a time.  A field is varied in this way if at least :data:`_FEWEST`
      configurations change this field and no other.  There is at most one sentence for each such field, on the
      configurations that change only this field.
    * All other cases.  There is one sentence on all configurations.  If a single configuration sends the fewest bytes,
      a sentence on its net speed-up (how many times as fast it reaches the baseline's loss) follows, if this is known.

    The list is empty in each of these cases:

    * No loss is low enough.
    * The suite asks for another quantity.
    * Configurations are compared in several settings, or with several baselines.
    * The suite asks for losses, and there are too few configurations for a front of bytes and loss
      (:func:`report.effects.loss_verdicts.front`).
    """
    keys = [key for key in head.compared("loss") if key in head.found.get("bytes", {}) and head.base_of(key)]
    if not keys or len({(key[0], head.base_of(key)) for key in keys}) > 1:
        return []
    base = spelled(head.base_of(keys[0]))
    if head.asked == "bytes":
        alike = [key for key in keys if _same_losses(head, key)]
        return _fewest(head, alike, f"whose validation losses equal those of {base} in every digit")
    if head.asked != "loss" or loss_verdicts.front(head.derived).empty:
        return []
    changing = _by_changed_field(head, keys)
    if len(changing) > 1:
        return [text for field, alone in changing.items() for text in _fewest_of_field(head, field, alone)]
    alike = _with_verdict(head, keys, _EQUAL)
    if alike:
        which = f"whose validation loss is not significantly higher than that of {base}"
    else:
        alike = _with_verdict(head, keys, _WITHIN)
        which = f"whose validation loss is higher than that of {base} within the margin"
    sentences = _fewest(head, alike, which)
    first = _senders_of_fewest(head, alike)
    if len(first) == 1:
        sentences += net_sentence(
            first[0][1], head.base_of(first[0]), head.found.get("net", {}).get(first[0])
        )
    return sentences


def _with_verdict(head: Head, keys: Sequence[Key], verdicts: Sequence[Verdict]) -> list[Key]:
    return [key for key in keys if head.found["loss"][key].verdict in verdicts]


def _by_changed_field(head: Head, keys: Sequence[Key]) -> dict[str, list[Key]]:
    """Return, for each field of the policy, the configurations that differ from their baseline in this field alone.

    ``keys`` are the configurations to choose from, as (setting, configuration).  Fields with fewer than :data:`_FEWEST`
    configurations are left out.
    """
    trials = with_policies(head.derived)
    found = defaultdict[str, list[Key]](list)
    for key in keys:
        base = trials.get((key[0], head.base_of(key)))
        if key in trials and base is not None:
            own, usual = own_fields(trials[key]), own_fields(base)
            changed = [name for name in own if own[name] != usual[name]]
            if len(changed) == 1:
                found[changed[0]].append(key)
    return {field: alone for field, alone in found.items() if len({name for _, name in alone}) >= _FEWEST}


def _share(head: Head, key: Key) -> str:
    return _three_digits(head.found["bytes"][key].change.estimate)


def _senders_of_fewest(head: Head, keys: Sequence[Key]) -> list[Key]:
    """Return those of ``keys``, pairs (setting, configuration), whose configurations send the fewest bytes.

    There are several if their bytes, as a share of the baseline's, are equal in the three digits that are printed.
    """
    fewest = min((float(_share(head, key)) for key in keys), default=0.0)
    return [key for key in keys if float(_share(head, key)) == fewest]


def _fewest(head: Head, keys: Sequence[Key], which: str) -> list[str]:
    """Return the sentence that says which of the configurations ``keys`` send the fewest bytes, in a list of one.

    ``which`` is a clause on what all ``keys`` have in common: ``whose validation losses equal those of ZeRO-3``.  The
    list is empty if there are no keys.
    """
    if not keys:
        return []
    first = _senders_of_fewest(head, keys)
    base, fewest = spelled(head.base_of(first[0])), _share(head, first[0])
    share = f"{fewest} of {whose('bytes', base)} between nodes"
    if len(keys) == 1:
        return [f"The one configuration {which}, {spelled(first[0][1])}, sends {share}."]
    if len(first) == len(keys):
        return [f"Each of the {len(keys)} configurations {which} sends {share}."]
    names = listed([spelled(name) for _, name in first]) if len(first) <= _MOST_NAMED else f"{len(first)}"
    send = "sends" if len(first) == 1 else "send"
    share = f"{fewest} of {whose('', base)}"
    return [
        f"Of the {len(keys)} configurations {which}, {names} {send} the fewest bytes between nodes: {share}."
    ]


def _fewest_of_field(head: Head, field: str, keys: Sequence[Key]) -> list[str]:
    """Return the sentence that says which of the configurations ``keys`` sends the fewest bytes, in a list of one.

    All ``keys`` change only ``field``.  The choice is among the configurations whose loss is not significantly higher
    than the baseline's.  If there are none, the choice is among the configurations whose loss is higher within the
    suite's margin.  The list is empty if there are no such configurations either, or if several configurations send the
    fewest bytes.
    """
    alike, how = _with_verdict(head, keys, _EQUAL), "that is not significantly higher"
    if not alike:
        alike, how = _with_verdict(head, keys, _WITHIN), "that is higher within the margin"
    first = _senders_of_fewest(head, alike)
    if len(first) != 1:
        return []
    base = spelled(head.base_of(first[0]))
    share = f"{_share(head, first[0])} of {whose('bytes', base)} between nodes"
    which = f"Of the {len(keys)} configurations that change only {field}"
    return [f"{which}, {spelled(first[0][1])} sends the fewest bytes for a loss {how}: {share}."]


def _same_losses(head: Head, key: Key) -> bool:
    """Return whether a configuration and its baseline have equal validation losses for each seed that both have.

    Returns False if the two share no seed.
    """
    differences = (_losses(head, key) - _losses(head, (key[0], head.base_of(key)))).dropna()
    return len(differences) > 0 and bool(differences.eq(0).all())


def _losses(head: Head, key: Key) -> pd.Series[float]:
    """Return a configuration's final validation losses in nats, by seed; ``key`` is (setting, configuration)."""
    trials = head.derived.trials
    chosen = trials["setting"].eq(key[0]) & trials["configuration"].eq(key[1])
    return loss_verdicts.by_seed(trials[chosen])


def on_equal_bytes(head: Head) -> list[str]:
    """Return a sentence on each group of at least :data:`_FEWEST` configurations that send equal bytes.

    The sentence names the configuration of the group with the lowest mean loss, and says how many others of the group
    have significantly higher losses, compared seed by seed.  If there is a single group, a sentence on the memory of
    the named configuration follows.  The list is empty if the suite does not ask for losses, or if configurations are
    compared in several settings or with several baselines.
    """
    losses, sent = head.compared("loss"), head.found.get("bytes", {})
    if head.asked != "loss" or len({(key[0], head.base_of(key)) for key in losses}) != 1:
        return []
    by_share = defaultdict[str, list[Key]](list)
    for key, effect in losses.items():
        if key in sent and effect.change.known and not effect.why:
            by_share[_share(head, key)].append(key)
    groups = [(share, keys) for share, keys in by_share.items() if len(keys) >= _FEWEST]
    sentences = []
    for share, keys in sorted(groups, key=lambda group: -len(group[1])):
        best = min(keys, key=lambda key: losses[key].change.estimate)
        own = _losses(head, best)
        gaps = [(_losses(head, key) - own).dropna() for key in keys if key != best]
        higher = sum(len(gap) > 0 and mean_interval(list(gap)).low > 0 for gap in gaps)
        base = whose("bytes", spelled(head.base_of(best)))
        which = f"Of the {len(keys)} configurations that send {share} of {base}, {spelled(best[1])}"
        others = f"{higher} of the {len(gaps)} others end significantly higher"
        others = others if 0 < higher < len(gaps) else "all others end significantly higher" if higher else ""
        others = others or "no other ends significantly higher"
        sentences.append(f"{which} ends with the lowest validation loss; {others}.")
        if len(groups) == 1:
            sentences += memory_sentence(head, best, head.base_of(best))
    return sentences


def on_net_speed(head: Head) -> list[str]:
    """Return the sentence on the largest net speed-up, for suites in which no loss differs significantly.

    A net speed-up says how many times as fast a configuration reaches the baseline's final loss, in training seconds.
    If some configurations did not reach this loss, a sentence with their number follows.
    The list is empty if the suite does not ask for losses, if a loss differs significantly, or if no net speed-up is
    significant.
    """
    contrast = {*head.derived.compared.contrast}
    losses, nets = (
        {key: effect for key, effect in head.found.get(kind, {}).items() if key[1] in contrast}
        for kind in ("loss", "net")
    )
    if head.asked != "loss" or any(effect.significant for effect in losses.values()):
        return []
    differences = differences_of(head.derived, "step", nets, [key for key in nets if nets[key].size >= 0])
    if not any(each.known and each.effect.significant for each in differences):
        return []
    without = sum(effect.verdict == "not reached" for effect in nets.values())
    missed = [f"{counted(without, 'configuration')} did not reach that loss."] if without else []
    return [on_largest("net", differences), *missed]


def on_libraries(head: Head) -> list[str]:
    """Return a sentence on the loss of the configuration that a library (DDP, FSDP2 or DeepSpeed) trains, in a list.

    The list is empty if the suite does not ask for losses, if libraries train none or several of its configurations, or
    if the page's first sentence is about this configuration already.
    """
    trials = head.derived.finished
    strategies = dict(zip(trials["configuration"], trials["strategy"], strict=True))
    keys = [key for key in head.compared("loss") if family_of(strategies[key[1]]) in FAMILIES]
    if head.asked != "loss" or len(keys) != 1 or head.key in keys:
        return []
    difference = head.difference("loss", keys[0])
    return [on_one("loss", difference, steps=head.top.effect.steps)] if difference is not None else []


def on_errors(head: Head) -> list[str]:
    """Return the sentence that states the gradient error of the main configuration in each of its settings, in a list.

    The main configuration is the one that the page's first sentence is about; a setting is the cluster, model, batch
    and so on.

    The list is empty in each of these cases:

    * The suite does not ask for losses.
    * The error has no interval in the setting of the first sentence.
    * There are more than :data:`_MOST_PLACES` settings with such errors.
    * The suite varies several fields of the policy one at a time (:func:`_by_changed_field`).  Then the error of one
      configuration says nothing about the fields that this configuration does not change.
    """
    if len(_by_changed_field(head, [*head.compared("loss")])) > 1:
        return []
    errors, places = head.compared("error"), places_of(head.derived)
    known = [key for key in errors if key[1] == head.key[1] and errors[key].value.known]
    if head.asked != "loss" or head.key not in known or len(known) > _MOST_PLACES:
        return []
    values = [
        f"{_three_digits(errors[key].value.estimate)} {places.get(key[0], '').removesuffix(', ')}".rstrip()
        for key in known
    ]
    return [f"The gradient error (vNMSE) of {head.top.name} is {listed(values)}."]
