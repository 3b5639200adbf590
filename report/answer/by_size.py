"""Answers by errors, bytes, memory, the size of a model, and finished trials."""

from __future__ import annotations

import math

from harness.records.confidence_intervals import FEWEST
from report.answer import by_seconds, effects
from report.answer.effects import NO, OPEN, YES, Draft, distinct_names, g2, g3, listed_most, spelled
from report.data import bytes_and_memory, speedups
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import counted, listed, sentence

_FEWEST = 3  # configurations among which to look for the fastest in a memory
_EQUAL = 1.005  # ratio up to which memories count as equal: padding differs


def within_memory(derived: Derived) -> str:
    """The fastest configurations in one and two times the memory of the baseline's engine, in one setting."""
    every = effects.effects(derived)
    if len(every) < _FEWEST or len({(effect.base, effect.setting) for effect in every}) > 1:
        return ""
    base = every[0].base
    speed_of = {base: 1.0, **{effect.configuration: effect.ratio.estimate for effect in every}}
    held = {name: effects.device_mib(derived, name) for name in speed_of}
    if not held[base] > 0:
        return ""
    fastest = []
    for times in (1, 2):
        fits = [name for name in speed_of if held[name] <= times * held[base] * _EQUAL]
        first, *others = sorted(fits, key=speed_of.__getitem__, reverse=True)
        text = f"{spelled(first)} ({speed_of[first]:.2f}, {held[first]:.3g} MiB)"
        beside = effects.between(derived, first, others[:1])
        if beside and beside[0].verdict == OPEN:
            text += f", not told apart from {spelled(others[0])} ({speed_of[others[0]]:.2f})"
        fastest.append(text)
    budget = f"the memory of {spelled(base)}'s engine, {held[base]:.3g} MiB a rank,"
    if fastest[0] == fastest[1]:
        return f"Within {budget} and within twice that the fastest is {fastest[0]}."
    return f"Within {budget} the fastest is {fastest[0]}, within twice that {fastest[1]}."


def error(derived: Derived) -> Draft:
    """By error end to end and seconds, of one strategy's codecs or algorithms."""
    errors, trials = effects.errors(derived), derived.trials
    if errors.empty:
        return by_seconds.step(derived)
    setting = by_seconds.most_compared(
        trials[trials["setting"].isin(errors.index.get_level_values("setting"))]
    )
    errors = errors.xs(setting, level="setting")
    trials = trials[(trials["setting"] == setting) & trials["configuration"].isin(errors.index)]
    names = distinct_names(derived, list(trials["configuration"].unique()))
    rows = sorted(
        (float(errors[name]), speedups.step_interval(group).estimate, group["sent_bytes"].median(), name)
        for (name,), group in groups(trials, ["configuration"])
    )
    texts = [
        f"{g2(vnmse)} with {names[name]} ({g3(s)} s, {g3(size / 1e6)} MB a step)"
        for vnmse, s, size, name in rows
    ]
    place, least = trials["where"].iloc[0], int(trials.groupby("configuration").size().min())
    text = f"The median error of the gradients end to end (vNMSE) on {place} is {listed_most(texts)}."
    vnmse, step, _, name = min(rows, key=lambda row: row[1])
    fastest = f"The fastest step is that with {names[name]}, {g3(step)} s, at an error of {g2(vnmse)}."
    if least < FEWEST:
        few = counted(least, "trial")
        fastest = f"Which step is the fastest cannot be told from {few} each; an interval takes {FEWEST}."
    return Draft(text, details=[fastest])


def memory(derived: Derived) -> Draft:
    """By the memory of the fullest rank on its device."""
    trials = derived.finished.sort_values(["place", "first"], kind="stable")
    lists = effects.variants(derived) or [[str(name) for name in trials["configuration"].unique()]]
    lists = [[name for name in names if effects.device_mib(derived, name) > 0] for names in lists]
    lists = [names for names in lists if len(names) > 1]
    if not lists:
        return Draft(
            "Cannot be told: the memory of no two configurations of our engine is on record.", [OPEN]
        )
    texts, details = [], []
    for names in lists:
        called, strategy = distinct_names(derived, names), effects.strategy(names[0])
        base, *others = (effects.device_mib(derived, name) for name in names)
        held = zip(names[1:], others, strict=True)
        rest = [f"{size:.1f} ({size / base:.2f} of it) with {called[name]}" for name, size in held]
        texts.append(f"{base:.1f} MiB on its device with {strategy}, {listed_most(rest)}")
        sizes = {name: effects.device_mib(derived, name, "copied") for name in names}
        if copies := [f"{size:.1f} MiB with {called[name]}" for name, size in sizes.items() if size > 0]:
            details.append(f"With {strategy}, a step copies {listed(copies)} between host and device.")
    last = lists[-1]
    beside = effects.between(derived, last[0], last[-1:])
    return Draft(f"The fullest rank holds {'; '.join(texts)}.", [], beside, details)


def size(derived: Derived) -> Draft:
    """By the largest model under a limit of memory."""
    rows = bytes_and_memory.under_limits(derived)
    if rows.empty:
        trials = counted(len(derived.finished), "trial")
        return Draft(f"Cannot be told: {trials} trained, and none met its limit of memory.", [OPEN])
    rows, limits = rows.sort_values(["limit_bytes", "place"], kind="stable"), []
    for (limit,), within in groups(rows, ["limit_bytes"]):
        clauses: list[str] = []
        for (name,), group in groups(within, ["configuration"]):
            largest, smallest = bytes_and_memory.largest(group)
            beyond = f" ({g3(smallest)} M do not fit)" if smallest > 0 else ""
            verb, unit = ("", "") if clauses else (" trains at most", " parameters")
            clauses.append(f"{spelled(name)}{verb} {g3(largest)} M{unit}{beyond}")
        limits.append(f"in {limit / 2**20:g} MiB a rank, {listed(clauses)}")
    return Draft(sentence("; ".join(limits)))


def trials(derived: Derived) -> Draft:
    """By the trials that finished."""
    finished, failed = len(derived.finished), len(derived.frames.failures)
    if stopped := derived.frames.interrupted:
        total = counted(finished + stopped, "trial")
        return Draft(f"Cannot be told: {stopped} of {total} were interrupted.", [OPEN])
    if failed:
        return Draft(f"{failed} of {counted(finished + failed, 'trial')} failed.", [NO])
    return Draft(f"All {counted(finished, 'trial')} finished.", [YES], effects.effects(derived))


def bytes_(derived: Derived) -> Draft:
    """By the bytes between nodes."""
    known = [e for e in by_seconds.named_first(derived) if not math.isnan(e.bytes_ratio)]
    if not known:
        return Draft("Cannot be told: no bytes between nodes are on record of two that are compared.", [OPEN])
    verdicts = [YES if effect.bytes_ratio < 1 else NO for effect in known]
    return Draft(effects.sent(known), verdicts, known, [effects.seconds(known[0])])
