"""Sentences on configurations that are compared with a counterpart instead of with the suite's baseline.

A counterpart is another configuration of the suite, from which the configuration differs in few fields
(:mod:`report.effects.counterparts`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from report.data.configuration import spelled
from report.data.text import number
from report.effects import effects
from report.effects.counterparts import of_preset, one_field
from report.effects.effects import SAME_MEMORY, Effect, Key
from report.further.head import Head
from report.sentence import NOT_SIGNIFICANT, differences_of, evidence, foremost, likewise, on_largest, whose

_NAMES: Final = {  # fields whose printed name is not the policy's key
    "secondary": "hpZ's group",
    "hpZ copy": "policy.secondary_format",
    "optimizer on the host": "policy.offload_optimizer",
    "weights on the host": "policy.offload_weights",
}
_three_digits: Final = number(3)


def on_pairs(head: Head) -> tuple[list[str], list[str]]:
    """Return two lists of sentences on configurations that are compared with a counterpart.

    A counterpart is another configuration of the suite, from which the configuration differs in few fields.  The
    counterparts are those that :func:`report.effects.counterparts.one_field` finds.  If it finds none, they are those
    of :func:`report.effects.counterparts.of_preset`.

    * The first list has one sentence.  It states one configuration's difference from its counterpart, usually the
      largest significant improvement (:func:`report.sentence.foremost`).  If no difference is significant, the sentence
      says so.
    * The second list begins with sentences on the bytes, the memory and the net speed-up of the same configuration.
      Then follows a sentence for each other configuration that has the same counterpart, if these configurations are
      few.  The list is empty if the difference in the first list is not significant.

    Both lists are empty in each of these cases:

    * There are no counterparts, or the differences from them are not known.
    * A verdict is possible on the difference in the page's first sentence, but on none of the differences from
      counterparts.
    """
    if (found := one_field(head.derived)) is not None:
        among = f"where only {_NAMES.get(found.shared, f'policy.{found.shared}')} differs, "
    elif (found := of_preset(head.derived)) is not None:
        among = f"among changes of {found.shared}, "
    else:
        return [], []
    derived = found.derived
    of_pairs = head.effects_of(derived)
    if head.kind == "loss":
        of_pairs = {key: _by_interval(effect) for key, effect in of_pairs.items()}
    compared = [key for key in of_pairs if key[1] in derived.compared.contrast and of_pairs[key].size >= 0]
    differences = differences_of(derived, "step", of_pairs, compared)
    if head.kind == "loss":
        differences = [replace(each, notes="") for each in differences]
    if not differences or (head.top.known and not any(each.known for each in differences)):
        return [], []
    top = foremost(head.shown, differences, gains=True)
    others = [each for each in differences if (each.base, each.place) == (top.base, top.place)]
    first = on_largest(head.shown, differences, among=among, steps=head.top.effect.steps)
    if not (top.known and top.effect.significant):
        return [first], []
    key = next(key for key in compared if of_pairs[key] is top.effect)
    net = effects.net_speeds(derived).get(key) if head.kind == "loss" else None
    facts = _facts(head, key, effects.beside(derived)[key][0], net)
    return [first], [*facts, *likewise(head.shown, top, [each for each in others if each is not top])]


def _by_interval(effect: Effect) -> Effect:
    """Return the comparison of a loss with a counterpart's loss, with a verdict that ignores the suite's margin.

    The verdict follows from the interval alone: better, worse or not significant.  The margin limits by how much a
    configuration's loss may exceed the baseline's loss, and says nothing about the loss of a counterpart (another
    configuration that replaces the baseline in the comparison).  If ``effect`` has no interval, or has a reason against
    a verdict (``why``), it is returned unchanged.
    """
    if effect.why or not effect.change.known:
        return effect
    if effect.change.contains(0.0):
        return replace(effect, verdict="not significant")
    return replace(effect, verdict="better" if effect.change.high < 0 else "worse")


def _facts(head: Head, key: Key, counterpart: str, net: Effect | None) -> list[str]:
    """Return sentences on a configuration's bytes, memory and net speed-up, compared with those of ``counterpart``.

    ``key`` is (setting, configuration), ``counterpart`` is the name of another configuration, and ``net`` the net
    speed-up over it.  There is no sentence on bytes or memory that are equal, and none on a net speed-up without an
    interval.
    """
    bytes_and_memory = [*_bytes(head, key, counterpart), *memory_sentence(head, key, counterpart)]
    return [*bytes_and_memory, *net_sentence(key[1], counterpart, net)]


def _bytes(head: Head, key: Key, counterpart: str) -> list[str]:
    """Return the sentence that compares the bytes of a configuration with those of its counterpart, in a list of one.

    For example, ``X sends 0.481 of ZeRO-3's bytes between nodes, and ZeRO++ sends 0.323.``  X is the configuration of
    ``key``, ZeRO-3 its baseline, and ZeRO++ the configuration ``counterpart``, with which X is compared.  The list is
    empty if X and its counterpart send equal bytes, if the bytes of one of them are not known, or if the page's first
    sentence is about bytes.
    """
    sent, base = head.found.get("bytes", {}), head.base_of(key)
    other = (key[0], counterpart)
    if head.kind == "bytes" or key not in sent or not base or (counterpart != base and other not in sent):
        return []
    own = _three_digits(sent[key].change.estimate)
    before = _three_digits(1.0 if counterpart == base else sent[other].change.estimate)
    if own == before:
        return []
    text = f"{spelled(key[1])} sends {own} of {whose('bytes', spelled(base))} between nodes"
    return [f"{text}." if counterpart == base else f"{text}, and {spelled(counterpart)} sends {before}."]


def memory_sentence(head: Head, key: Key, counterpart: str) -> list[str]:
    """Return the sentence that compares the memory of a configuration with its counterpart's, in a list of one.

    For example, ``X holds 1.64 MiB a rank where Y holds 1.23 MiB.``  X is the configuration of ``key``, and Y is
    ``counterpart``, the configuration with which X is compared.  The list is empty if both hold equal memory, if memory
    was not measured, or if the page's first sentence is about memory.
    """
    held = head.found.get("memory", {})
    pair = [held[each].value.estimate for each in (key, (key[0], counterpart)) if each in held]
    if head.kind == "memory" or len(pair) < 2 or abs(pair[0] / pair[1] - 1) <= SAME_MEMORY:
        return []
    own, other = map(_three_digits, pair)
    return [f"{spelled(key[1])} holds {own} MiB a rank where {spelled(counterpart)} holds {other} MiB."]


def net_sentence(name: str, base: str, net: Effect | None) -> list[str]:
    """Return the sentence that states a configuration's net speed-up, in a list of one.

    A net speed-up says how many times as fast the configuration reaches another configuration's final loss.  For
    example, ``The net speed-up of X over ZeRO++ is 1.02 (95 % CI ...).``  X is ``name``, ZeRO++ is ``base``, and
    ``net`` has the net speed-up.  The list is empty if the net speed-up has no interval, or if ``net`` is None or has a
    reason against a verdict (``why``).
    """
    if net is None or net.why or not net.change.known:
        return []
    equal = "" if net.significant else NOT_SIGNIFICANT
    subject = f"The net speed-up of {spelled(name)} over {spelled(base)}"
    return [f"{subject} is {net.change.estimate:.2f}{evidence('net', net)}{equal}."]
