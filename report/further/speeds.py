"""Writes sentences on the configuration that a page's first sentence is about: speed-ups, memory and bytes.

The functions of this module return an empty list if the records have nothing to say.
"""

from __future__ import annotations

from typing import Final

from report.data.configuration import spelled
from report.data.text import number
from report.effects.counterparts import own_fields, with_policies
from report.effects.effects import Effect, Key
from report.further.head import Head
from report.further.pairs import memory_sentence
from report.sentence import NOT_SIGNIFICANT, capitalised, evidence, on_one, whose
from report.tables.phases import NOUNS

_FEWEST: Final = 2  # fewest configurations, or fewest phases, of which a sentence names the largest speed-up
_IN_BETTER_MEMORY: Final = ("better", "not significant")  # verdicts on memory no larger than the baseline's
_three_digits: Final = number(3)


def on_parts(head: Head) -> list[str]:
    """Return sentences on how much each change of the main configuration contributes to its speed-up.

    The main configuration is the one that the page's first sentence is about.  Its changes are the fields in which its
    policy differs from the baseline's policy.  Some configurations have only one of these changes.  The sentences name
    two of these configurations: the one with the largest and the one with the smallest speed-up.  If at least two
    configurations have exactly two of the changes, a sentence on the largest speed-up of these configurations follows.

    The list is empty in each of these cases:

    * The page's first sentence is not about the time of a step, or the main configuration is not significantly faster
      than the baseline.
    * Configurations are compared in several settings (cluster, model, batch and so on).
    * Fewer than two configurations have one of the changes alone.
    """
    if head.kind != "step" or len(head.settings) > 1 or not _is_faster(head.top.effect):
        return []
    parts = _parts(head)
    alone, pairs = ([key for key, count in parts.items() if count == number_of] for number_of in (1, 2))
    if len(alone) < _FEWEST:
        return []
    speeds = head.compared("step")
    ranked = sorted(alone, key=lambda key: speeds[key].change.estimate)
    best, least = ranked[-1], ranked[0]
    of = f"of {whose('changes', head.top.name)} alone, {spelled(best[1])} brings the largest speed-up"
    sentences = [
        f"{capitalised(of)}: {_with_interval(speeds[best])}.",
        f"{capitalised(spelled(least[1]))} brings the smallest: {_with_interval(speeds[least])}.",
    ]
    if len(pairs) >= _FEWEST:
        both = max(pairs, key=lambda key: speeds[key].change.estimate)
        of = f"Of pairs of these changes, {spelled(both[1])} brings the largest speed-up"
        sentences.append(f"{of}: {_with_interval(speeds[both])}.")
    return sentences


def _parts(head: Head) -> dict[Key, int]:
    """Return the configurations with some of the main configuration's changes, and how many changes each has.

    The main configuration is the one that the page's first sentence is about (``head.key``).  A change is a field of
    the policy whose value differs from the baseline's.  The keys of the result are (setting, configuration), and the
    values the numbers of changes.  These configurations are left out:

    * configurations with none or all of the main configuration's changes;
    * configurations with a change that the main configuration lacks;
    * configurations whose speed-up has no interval.
    """
    trials = with_policies(head.derived)
    base = trials.get((head.key[0], head.base_of(head.key)))
    if base is None or head.key not in trials:
        return {}
    usual = own_fields(base)
    changes = {
        key: {item for item in own_fields(trial).items() if usual[item[0]] != item[1]}
        for key, trial in trials.items()
    }
    speeds = head.compared("step")
    return {
        key: len(own)
        for key, own in changes.items()
        if key in speeds and speeds[key].change.known and own and own < changes[head.key]
    }


def _is_faster(effect: Effect) -> bool:
    return effect.significant and effect.change.estimate > 1


def _with_interval(effect: Effect) -> str:
    ending = "" if effect.significant else NOT_SIGNIFICANT
    return f"{effect.change.estimate:.2f}{evidence('step', effect)}{ending}"


def on_phases(head: Head) -> list[str]:
    """Return the sentence on the phases of an RLHF step in which a configuration gains most and least, in a list.

    The phases are generation, scoring and training.  The configuration is the one that the page's first sentence is
    about.  The table of verdicts has the speed-ups of all configurations in all phases.

    The list is empty if the page's first sentence is not about the time of a step, or if fewer than two phases have a
    speed-up with an interval.
    """
    of_phases = {phase: head.found.get(phase, {}).get(head.key) for phase in NOUNS}
    gains = {
        phase: effect for phase, effect in of_phases.items() if effect is not None and effect.change.known
    }
    if head.kind != "step" or len(gains) < _FEWEST:
        return []
    ranked = sorted(gains, key=lambda phase: gains[phase].change.estimate)
    largest, smallest = (
        f"{gains[phase].change.estimate:.2f}{evidence('step', gains[phase])} in {NOUNS[phase]}"
        for phase in (ranked[-1], ranked[0])
    )
    subject = capitalised(whose("speed-up", head.top.name))
    ending = "" if gains[ranked[0]].significant else NOT_SIGNIFICANT
    return [
        f"{subject} is {largest}, the largest of {len(gains)} phases, and {smallest}, the smallest{ending}."
    ]


def on_memory(head: Head) -> list[str]:
    """Return sentences on the fastest configuration that holds no more memory than the baseline.

    The first sentence of the result names this configuration and its speed-up.  The second sentence compares the memory
    of the main configuration, which the page's first sentence is about, with the baseline's.

    The list is empty in each of these cases:

    * The suite does not ask for step times, or configurations are compared in several settings.
    * The main configuration is not significantly faster than the baseline, or holds no more memory than the baseline.
    * No configuration that holds no more memory than the baseline is significantly faster than the baseline.
    """
    if (
        head.asked != "step"
        or head.kind != "step"
        or len(head.settings) > 1
        or not _is_faster(head.top.effect)
    ):
        return []
    speeds, held = head.compared("step"), head.compared("memory")
    if head.key not in held or held[head.key].verdict != "worse":
        return []
    alike = [key for key in speeds if key in held and held[key].verdict in _IN_BETTER_MEMORY]
    alike = [key for key in alike if _is_faster(speeds[key])]
    if not alike:
        return []
    best = max(alike, key=lambda key: speeds[key].change.estimate)
    base = head.base_of(head.key)
    which = f"Of the configurations that hold no more memory than {spelled(base)}, {spelled(best[1])}"
    fastest = f"{which} has the largest speed-up: {_with_interval(speeds[best])}."
    return [fastest, *memory_sentence(head, head.key, base)]


def on_bytes(head: Head) -> list[str]:
    """Return the sentence on a configuration's bytes between nodes, for a page about errors, in a list.

    The configuration is the one that the page's first sentence is about.

    The list is empty in each of these cases:

    * The page's first sentence is not about errors.
    * A verdict on the error is possible, and the error does not differ significantly from the baseline's.
    * The bytes equal the baseline's, or are not known.
    """
    differs = head.top.effect.significant or not head.top.known
    difference = head.difference("bytes", head.key) if head.kind == "error" and differs else None
    return [on_one("bytes", difference)] if difference is not None and difference.effect.significant else []


def on_copies(head: Head) -> list[str]:
    """Return the sentence on the bytes that are copied between device and host in a step, for a page about memory.

    Offload causes these copies.  The bytes are those of the configuration that the page's first sentence is about, on
    its busiest rank.  The list is empty if the page's first sentence is not about memory, or if the records count no
    such copies.
    """
    parts = head.derived.frames.memory
    parts = parts[parts["source"].eq("copied")]
    if head.kind != "memory" or parts.empty:
        return []
    trials = head.derived.finished
    own = trials[trials["setting"].eq(head.key[0]) & trials["configuration"].eq(head.key[1])]["id"]
    of_rank = parts[parts["id"].isin(own)].groupby(["id", "rank"])["bytes"].sum()
    if of_rank.empty:
        return []
    copied = _three_digits(float(of_rank.groupby("id").max().median()) / 2**20)
    return [f"{capitalised(head.top.name)} copies {copied} MiB a rank in a step between device and host."]
