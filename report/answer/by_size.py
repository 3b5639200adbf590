"""Answers by what is no time: errors, bytes, memory, the size of a model, and trials that finish."""

from __future__ import annotations

import math

from harness.records.confidence_intervals import FEWEST
from report.answer import by_seconds, effects
from report.answer.effects import NO, OPEN, YES, Draft, distinct_names, g2, g3, listed_most, spelled
from report.data import bytes_and_memory, speedups
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import counted, listed, sentence

_FEWEST = 3  # contenders, of which the fastest for a memory is of interest
_EQUAL = 1.005  # padding differs


def within_memory(derived: Derived) -> str:
    """Who is fastest in the memory that the baseline's engine holds, and in twice that; of one setting."""
    found = effects.effects(derived)
    if len(found) < _FEWEST or len({(effect.base, effect.cell) for effect in found}) > 1:
        return ""
    base = found[0].base
    speed_of = {base: 1.0, **{one.contender: one.ratio.estimate for one in found}}
    held = {name: effects.device_mib(derived, name) for name in speed_of}
    if not held[base] > 0:
        return ""
    told = []
    for times in (1, 2):
        fits = [name for name in speed_of if held[name] <= times * held[base] * _EQUAL]
        first, *others = sorted(fits, key=speed_of.__getitem__, reverse=True)
        text = f"{spelled(first)} ({speed_of[first]:.2f}, {held[first]:.3g} MiB)"
        beside = effects.between(derived, first, others[:1])
        if beside and beside[0].verdict == OPEN:
            text += f", not told apart from {spelled(others[0])} ({speed_of[others[0]]:.2f})"
        told.append(text)
    budget = f"the memory of {spelled(base)}'s engine, {held[base]:.3g} MiB a rank,"
    if told[0] == told[1]:
        return f"Within {budget} and within twice that the fastest is {told[0]}."
    return f"Within {budget} the fastest is {told[0]}, within twice that {told[1]}."


def error(derived: Derived) -> Draft:
    """By error end to end and seconds, of one strategy's codecs or algorithms."""
    found, table = effects.errors(derived), derived.trials
    if found.empty:
        return by_seconds.step(derived)
    table = table[table["cell"].isin(found.index.get_level_values("cell"))]
    cell = by_seconds.most_compared(table)
    errors = found.xs(cell, level="cell")
    here = table[(table["cell"] == cell) & table["contender"].isin(errors.index)]
    names = distinct_names(derived, list(here["contender"].unique()))
    rows = sorted(
        (float(errors[name]), speedups.step_interval(mine).estimate, mine["sent_bytes"].median(), names[name])
        for (name,), mine in groups(here, ["contender"])
    )
    told = [
        f"{g2(one)} with {name} ({g3(step)} s, {g3(size / 1e6)} MB a step)" for one, step, size, name in rows
    ]
    place, least = here["where"].iloc[0], int(here.groupby("contender").size().min())
    first = f"The error of the gradients end to end (vNMSE) on {place} is {listed_most(told)}."
    at, step, _, name = min(rows, key=lambda row: row[1])
    which = f"The fastest step is that with {name}, {g3(step)} s, at an error of {g2(at)}."
    if least < FEWEST:
        few = counted(least, "trial")
        which = f"Which step is the fastest cannot be told from {few} each; an interval takes {FEWEST}."
    return Draft(first, details=[which])


def memory(derived: Derived) -> Draft:
    """By what the fullest rank holds on its device."""
    ran = derived.finished.sort_values(["place", "first"], kind="stable")
    lists = effects.variants(derived) or [[str(name) for name in ran["contender"].unique()]]
    lists = [[name for name in names if effects.device_mib(derived, name) > 0] for names in lists]
    lists = [names for names in lists if len(names) > 1]
    if not lists:
        return Draft("Cannot be told: the memory of no two contenders of our engine is on record.", [OPEN])
    told, copied = [], []
    for names in lists:
        called, strategy = distinct_names(derived, names), effects.strategy(names[0])
        base, *others = (effects.device_mib(derived, name) for name in names)
        held = zip(names[1:], others, strict=True)
        rest = [f"{size:.1f} ({size / base:.2f} of it) with {called[name]}" for name, size in held]
        told.append(f"{base:.1f} MiB on its device with {strategy}, {listed_most(rest)}")
        copies = {name: effects.device_mib(derived, name, "copied") for name in names}
        said = [f"{size:.1f} MiB with {called[name]}" for name, size in copies.items() if size > 0]
        copied += [f"With {strategy}, a step copies {listed(said)} between host and device."] if said else []
    last = lists[-1]
    beside = effects.between(derived, last[0], last[-1:])
    return Draft(f"The fullest rank holds {'; '.join(told)}.", [], beside, copied)


def size(derived: Derived) -> Draft:
    """By the largest model under a limit of memory."""
    rows = bytes_and_memory.under_limits(derived)
    if rows.empty:
        ran = counted(len(derived.finished), "trial")
        return Draft(f"Cannot be told: {ran} trained, and none met its limit of memory.", [OPEN])
    rows, limits = rows.sort_values(["limit_bytes", "place"], kind="stable"), []
    for (limit,), within in groups(rows, ["limit_bytes"]):
        told: list[str] = []
        for (name,), mine in groups(within, ["contender"]):
            largest, smallest = bytes_and_memory.largest(mine)
            beyond = f" ({g3(smallest)} M do not fit)" if smallest > 0 else ""
            verb, unit = ("", "") if told else (" trains at most", " parameters")
            told.append(f"{spelled(name)}{verb} {g3(largest)} M{unit}{beyond}")
        limits.append(f"in {limit / 2**20:g} MiB a rank, {listed(told)}")
    return Draft(sentence("; ".join(limits)))


def trials(derived: Derived) -> Draft:
    """By the trials that finished."""
    ran, failed = len(derived.finished), len(derived.frames.failures)
    if stopped := derived.frames.interrupted:
        of = counted(ran + stopped, "trial")
        return Draft(f"Cannot be told: {stopped} of {of} were interrupted.", [OPEN])
    if failed:
        return Draft(f"{failed} of {counted(ran + failed, 'trial')} failed.", [NO])
    return Draft(f"All {counted(ran, 'trial')} finished.", [YES], effects.effects(derived))


def bytes_(derived: Derived) -> Draft:
    """By the bytes between nodes."""
    known = [one for one in by_seconds.named_first(derived) if not math.isnan(one.bytes_ratio)]
    if not known:
        return Draft("Cannot be told: no bytes between nodes are on record of two that are compared.", [OPEN])
    verdicts = [YES if effect.bytes_ratio < 1 else NO for effect in known]
    return Draft(effects.sent(known), verdicts, known, [effects.seconds(known[0])])
