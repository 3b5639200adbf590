"""The sentences that follow the first sentence in the head of a page, on other answers to the suite's question.

The records alone decide which sentences follow, not the words of the question; so pages of old records have them too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from harness.suites.answering_quantity import Quantity
from report.data.configuration import spelled
from report.data.metrics import Derived
from report.data.text import counted, listed, number
from report.effects import effects, loss_verdicts
from report.effects.effects import Effect, Key
from report.effects.one_field import one_field
from report.sentence import Difference, differences_of, evidence, foremost, likewise, on_largest

_FIELDS: Final = {"secondary": "hpZ's group"}  # fields that pages call by another name
_MOST_NAMES: Final = 2  # a sentence names so many configurations that send equal bytes, or else their number
_EQUAL: Final = ("better", "not significant")
_three_digits: Final = number(3)

Found = Mapping[str, Mapping[Key, Effect]]  # the effects of each quantity


def further_sentences(
    derived: Derived,
    asked: Quantity,
    kind: str,
    found: Found,
    effects_of: Callable[[Derived], dict[Key, Effect]],
) -> list[str]:
    """Return the sentences that follow the first sentence in a page's head; the list may be empty.

    Args:
        derived: The records.
        asked: The quantity that the suite asks for.
        kind: The quantity that the first sentence compares.
        found: For each quantity, the effect of each setting and configuration.
        effects_of: The function that computes the effects on ``kind`` from records.
    """
    if asked in ("size", "nodes", "trials"):
        return []
    sentences = [
        _on_one_field(derived, asked, kind, found, effects_of),
        _on_fewest_bytes(derived, asked, found),
        _on_net_speed(derived, asked, found),
    ]
    return [text for text in sentences if text]


def _on_one_field(
    derived: Derived,
    asked: Quantity,
    kind: str,
    found: Found,
    effects_of: Callable[[Derived], dict[Key, Effect]],
) -> str:
    """Return the sentence on the largest significant difference between two configurations that differ in one field.

    Improvements are preferred: a significant decrease of a loss is stated even if an increase is larger.
    The text is empty if too few configurations differ from another in one field only
    (:func:`report.effects.one_field.one_field`), or if all differences between them are inconclusive.
    """
    pairs = one_field(derived)
    if pairs is None:
        return ""
    of_pairs = effects_of(pairs.derived)
    if kind == "loss":
        of_pairs = {key: _by_interval(effect) for key, effect in of_pairs.items()}
    compared = [key for key, effect in of_pairs.items() if key[1] in pairs.derived.compared.contrast]
    compared = [key for key in compared if of_pairs[key].size >= 0]
    differences = differences_of(pairs.derived, "step", of_pairs, compared)
    if not any(each.known for each in differences):
        return ""
    if kind == "loss":
        nets, bases = effects.net_speeds(pairs.derived), effects.beside(pairs.derived)
        differences = [
            replace(
                each,
                notes="",
                facts=_bytes(derived, key, bases[key][0], each, found) + _net(each, nets.get(key)),
            )
            for key, each in zip(compared, differences, strict=True)
        ]
    shown = "tokens" if asked == "tokens" else kind
    top = foremost(shown, differences, gains=True)
    others = [
        each for each in differences if (each.base, each.place) == (top.base, top.place) and each is not top
    ]
    field = _FIELDS.get(pairs.field, f"policy.{pairs.field}")
    text = on_largest(shown, differences, among=f"where only {field} differs, ")
    return text + likewise(shown, top, others)


def _by_interval(effect: Effect) -> Effect:
    """Return an effect on a loss, with a verdict that depends on its interval alone and not on the suite's margin.

    The margin does not apply here, because it is the difference that a suite allows between a configuration and the
    suite's baseline.
    """
    if effect.why or not effect.change.known:
        return effect
    if effect.change.contains(0.0):
        return replace(effect, verdict="not significant")
    return replace(effect, verdict="better" if effect.change.high < 0 else "worse")


def _bytes(derived: Derived, key: Key, counterpart: str, difference: Difference, found: Found) -> str:
    """Return a sentence that compares the bytes of a configuration with the bytes of its counterpart.

    The counterpart is the configuration that differs from it in one field.  The text begins with a space, for example:
    `` X sends 0.481 of ZeRO-3's bytes between nodes, and ZeRO++ sends 0.323.``
    It is empty if the bytes of the configuration or of the counterpart were not measured.
    """
    sent, bases = found.get("bytes", {}), effects.beside(derived).get(key, ())
    other = (key[0], counterpart)
    if key not in sent or not bases or (counterpart not in bases and other not in sent):
        return ""
    own = _three_digits(sent[key].change.estimate)
    text = f" {difference.name} sends {own} of {spelled(bases[0])}'s bytes between nodes"
    if counterpart in bases:
        return f"{text}."
    before = _three_digits(sent[other].change.estimate)
    if own == before:
        return f"{text}, as {difference.base} does."
    return f"{text}, and {difference.base} sends {before}."


def _net(difference: Difference, net: Effect | None) -> str:
    """Return the sentence `` The net speed-up of X over ZeRO++ is 1.02 (95 % CI ...).``

    The text is empty if the net speed-up is not known or has no interval.
    """
    if net is None or net.why or not net.change.known:
        return ""
    equal = "" if net.significant else ", not significant"
    of = f"of {difference.name} over {difference.base}"
    return f" The net speed-up {of} is {net.change.estimate:.2f}{evidence('net', net)}{equal}."


def _on_fewest_bytes(derived: Derived, asked: Quantity, found: Found) -> str:
    """Return the sentence on the configuration with the fewest bytes among those whose loss is like the baseline's.

    If the suite asks for losses, a loss is like the baseline's if it is not significantly higher.  If no configuration
    has such a loss, losses within the margin count.  If the suite asks for bytes, a loss must equal the baseline's in
    every digit.
    The text is empty if the suite asks for another quantity, if there are several settings, if no loss is like the
    baseline's, or if a suite that asks for losses has too few configurations for a front of bytes and losses.
    """
    losses, sent = found.get("loss", {}), found.get("bytes", {})
    bases, trials = effects.beside(derived), derived.finished.drop_duplicates("configuration")
    controls = {
        name
        for name, identity in zip(trials["configuration"], trials["id"], strict=True)
        if derived.frames.trial_of[identity].control is not None
    }
    shown = {*derived.compared.contrast} - controls
    keys = [key for key in losses if key in sent and key[1] in shown and bases.get(key, ())]
    if not keys or len({(key[0], bases[key]) for key in keys}) > 1:
        return ""
    base = spelled(bases[keys[0]][0])
    if asked == "bytes":
        alike = [key for key in keys if _same_losses(derived, key, bases[key][0])]
        which = f"whose validation losses equal those of {base} in every digit"
    elif asked == "loss" and len(loss_verdicts.front(derived)):
        alike = [key for key in keys if losses[key].verdict in _EQUAL]
        which = f"whose validation loss is not significantly higher than that of {base}"
        if not alike:
            alike = [key for key in keys if losses[key].verdict == "within the margin"]
            which = f"whose validation loss is higher than that of {base} by less than the margin"
    else:
        return ""
    shares = {spelled(key[1]): _three_digits(sent[key].change.estimate) for key in alike}
    if not shares:
        return ""
    fewest = min(shares.values(), key=float)
    first = [name for name, share in shares.items() if share == fewest]
    share = f"{fewest} of {base}'s"
    if len(shares) == 1:
        return f"The one configuration {which}, {first[0]}, sends {share} bytes between nodes."
    if len(first) == len(shares):
        return f"Each of the {len(shares)} configurations {which} sends {share} bytes between nodes."
    names = listed(first) if len(first) <= _MOST_NAMES else f"{len(first)}"
    senders = f"{names} {'sends' if len(first) == 1 else 'send'}"
    return f"Of the {len(shares)} configurations {which}, {senders} the fewest bytes between nodes: {share}."


def _same_losses(derived: Derived, key: Key, base: str) -> bool:
    """Return whether a configuration and its baseline have equal validation losses for each seed that both have.

    Returns False if they have no seed in common.
    """
    trials = derived.trials[derived.trials["setting"].eq(key[0])]
    own, other = (loss_verdicts.by_seed(trials[trials["configuration"].eq(name)]) for name in (key[1], base))
    differences = (own - other).dropna()
    return len(differences) > 0 and bool(differences.eq(0).all())


def _on_net_speed(derived: Derived, asked: Quantity, found: Found) -> str:
    """Return the sentence on the largest net speed-up, for a suite of losses in which no loss differs significantly.

    The text is empty if the suite asks for another quantity, if a loss differs significantly from the baseline's, or if
    no net speed-up differs significantly from 1.
    """
    losses, nets = (
        {key: effect for key, effect in found.get(kind, {}).items() if key[1] in derived.compared.contrast}
        for kind in ("loss", "net")
    )
    if asked != "loss" or any(effect.significant for effect in losses.values()):
        return ""
    differences = differences_of(derived, "step", nets, [key for key in nets if nets[key].size >= 0])
    if not any(each.known and each.effect.significant for each in differences):
        return ""
    without = sum(effect.verdict == "not reached" for effect in nets.values())
    missed = f" {counted(without, 'configuration')} did not reach that loss." if without else ""
    return on_largest("net", differences) + missed
