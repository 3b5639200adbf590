"""Answers by seconds: of a step beside a baseline, by the rate of the link, by nodes, and of decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from harness.records.confidence_intervals import FEWEST, Interval
from harness.suites.peers import family_of
from report.answer import effects
from report.answer.effects import (
    NO,
    OPEN,
    YES,
    Draft,
    Effect,
    distinct_names,
    g3,
    listed_most,
    ratio,
    spelled,
)
from report.data import break_even, bytes_and_memory, decoding, speedups
from report.data.configuration import NAMES, PROPOSED
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import counted, listed, sentence
from report.tables import peers


def step(derived: Derived) -> Draft:
    """By the seconds of a step."""
    if derived.compared.named_in_suite:
        return faster(derived, named_first(derived))
    lists = effects.variants(derived)
    peers_named = any(effects.is_named(derived, NAMES[name]) for name in peers.FAMILIES)
    if (peers_named or not lists) and (draft := _beside_peers(derived)):
        return draft
    return _of_variants(derived, lists) if lists else faster(derived, named_first(derived))


def named_first(derived: Derived) -> list[Effect]:
    """All effects; first those of configurations that the question names."""
    unsorted = effects.effects(derived)
    names = effects.named_first(derived, (effect.configuration for effect in unsorted))
    return sorted(unsorted, key=lambda effect: names.index(effect.configuration))


def faster(derived: Derived, every: Sequence[Effect]) -> Draft:
    """Who is faster than the baseline, by how much, and of whom it cannot be told."""
    if not every:
        return alone(derived)
    shown, settings, configurations = every, "", len({effect.configuration for effect in every})
    many = len(every) > effects.MOST_NAMED and configurations > 1
    if fastest_alone := many and not effects.is_named(derived, every[0].configuration):
        fastest = {
            e.setting: e for e in sorted(every, key=lambda e: e.ratio.estimate)
        }  # last of each setting
        shown = [fastest[setting] for setting in dict.fromkeys(effect.setting for effect in every)]
        settings = f"; the fastest of {configurations} in each setting"
    main, names = shown[0], list(dict.fromkeys(effect.configuration for effect in shown))
    called, pair = distinct_names(derived, names), distinct_names(derived, [main.configuration, main.base])
    subject, over = f"a step of {spelled(main.configuration)}", f" as {spelled(main.base)}'s"
    if len(names) == 1 and pair[main.base] != spelled(main.base):
        subject = f"a step of {effects.strategy(main.configuration)} with {pair[main.configuration]}"
        over = f" as with {pair[main.base]}"
    places = {setting: f" on {title}" if title else "" for setting, title in effects.titles(shown).items()}

    def claim(compared: Sequence[Effect]) -> str:
        """How fast each is: the first one as a clause, others by their number alone."""
        claims: list[str] = []
        for effect in compared:
            name, factor = called[effect.configuration], ratio(effect.ratio)
            place, is_main = places[effect.setting], effect.configuration == names[0]
            is_strategy = name == spelled(effect.configuration)  # else the name is the field that differs
            if not claims:
                steps = subject if is_main else f"a step {'of' if is_strategy else 'with'} {name}"
                claims.append(f"{steps} is {factor} times as fast{over}{place}")
            elif is_strategy and not is_main:
                claims.append(f"that of {name} {factor}{place}")
            else:
                claims.append(f"{factor}{'' if is_main else f' with {name}'}{place}")
        return listed_most(claims)

    clear = [effect for effect in shown if effect.verdict != OPEN]
    unclear = [effect for effect in shown if effect.verdict == OPEN]
    named = [effect for effect in shown if effects.is_named(derived, effect.configuration)] or shown
    text = f"{claim(clear)} ({clear[0].intervals}{settings})" if clear else ""
    if unclear:
        factors = [f"{ratio(e.ratio)} with {called[e.configuration]}{places[e.setting]}" for e in unclear]
        # Where the fastest configuration of a setting cannot be told from the baseline, no other one is faster.
        nobody = "nobody is told to be faster, and nearest is"
        text += f"; {nobody if fastest_alone else 'no difference can be told:'} {listed(factors)}"
        text += f" ({effects.needed_pairs(unclear)})"
        unclear_settings = [
            effect.setting for effect in unclear if fastest_alone and effect.configuration != names[0]
        ]
        slower = [
            effect
            for effect in every
            if effect.configuration == names[0] and effect.setting in unclear_settings
        ]
        text += "".join(f", {spelled(effect.configuration)} {ratio(effect.ratio)}" for effect in slower)
    if not clear:
        text = f"Cannot be told ({effects.needed_pairs(shown)}): {claim(shown)}"
    return Draft(sentence(text), [effect.verdict for effect in named], shown, [effects.seconds(main)])


def most_compared(table: pd.DataFrame) -> str:
    """The setting in which most configurations ran."""
    return str(table.groupby("setting", sort=False)["configuration"].nunique().idxmax())


def _of_variants(derived: Derived, lists: Sequence[Sequence[str]]) -> Draft:
    """Strategies with several codecs or groups: of two the second beside the first, of more the fastest."""
    drafts: list[Draft] = []
    for names in lists:
        rows = derived.trials[derived.trials["configuration"].isin(names)]
        setting = most_compared(rows)
        steps = (
            rows[rows["setting"] == setting].groupby("configuration")["step_seconds"].agg(speedups.geometric)
        )
        best = names[0] if len(names) == 2 else str(steps.idxmin())
        others = effects.between(derived, best, set(names) - {best})
        if len(names) > 2:
            others = [effect for effect in others if effect.setting == setting]
        if others:
            drafts.append(faster(derived, others) if len(names) == 2 else _fastest(derived, others, names))
    if not drafts:
        return alone(derived)
    *earlier, last = drafts  # the last has the most techniques
    details = [*last.details, *(draft.first for draft in earlier)]
    return Draft(last.first, last.verdicts, last.effects, details)


def _fastest(derived: Derived, others: Sequence[Effect], names: Sequence[str]) -> Draft:
    """The fastest of several configurations, how far the others are from it, and the memory of all."""
    called, first = distinct_names(derived, names), others[0]
    base, name = called[first.base], effects.strategy(first.base)

    def factors(verdict: str) -> str:
        """By which factors those with a verdict take longer."""
        ratios = [
            (called[effect.configuration], effect.ratio) for effect in others if effect.verdict == verdict
        ]
        inverse = [(name, Interval(1 / r.estimate, 1 / r.high, 1 / r.low, 0)) for name, r in ratios]
        return listed([f"{ratio(factor)} with {name}" for name, factor in inverse])

    step = g3(speedups.step_interval(first.pairs, "baseline_seconds").estimate)
    place = f" on {first.where}" if len(set(derived.trials["setting"])) > 1 else ""
    slower, unclear = factors(NO), factors(OPEN)
    if not slower:
        text = f"Cannot be told ({effects.needed_pairs(others)}): the shortest step of {name}{place}, {step} "
        text += f"s, is that with {base}; others take longer by a factor of {unclear}."
        return Draft(text, [OPEN], others)
    text = f"{name} is fastest with {base}, at {step} s a step{place}; "
    text += f"it takes longer by a factor of {slower}"
    text += f"; it cannot be told from {unclear}" if unclear else ""
    held = [f"{effects.device_mib(derived, name):.1f} MiB with {called[name]}" for name in names]
    memory = f"The engine holds {listed(held)} on the fullest rank."
    return Draft(f"{text} ({first.intervals}).", [], others, [memory])


def alone(derived: Derived) -> Draft:
    """The seconds of steps where no two configurations are paired."""
    if derived.trials.empty:
        trials = counted(len(derived.finished), "trial")
        return Draft(f"Cannot be told: {trials} finished, and no two are compared.", [OPEN])
    rows = derived.trials[derived.trials["setting"] == most_compared(derived.trials)]
    steps = [
        f"{g3(speedups.step_interval(group).estimate)} s with {spelled(name)}"
        for (name,), group in groups(rows, ["configuration"])
    ]
    why = "no two configurations ran in one repeat" if len(steps) > 1 else "nothing stands beside it"
    if failed := len(derived.frames.failures):
        why += f" ({counted(failed, 'trial')} failed)"
    text = f"Cannot be told, for {why}: on {rows['where'].iloc[0]} a step takes {listed_most(steps)}."
    return Draft(text, [OPEN])


def _beside_peers(derived: Derived) -> Draft | None:
    """Policies beside the fastest setting of each family of peers, where several families ran."""
    families = {family_of(name) for name in derived.trials["strategy"]} & peers.FAMILIES.keys()
    rows = peers.peers(derived).data.to_dict("records") if len(families) > 1 else []
    clauses: dict[tuple[str, str], str] = {}
    for row in rows:
        gains = {row[f"best_{key}"]: row[f"over_{key}"] for key in peers.FAMILIES if f"over_{key}" in row}
        over = [
            f"{ratio(gain)} times as fast as {best.replace(', ', ' (', 1)}{')' * (', ' in best)}"
            for best, gain in gains.items()
            if isinstance(gain, Interval)
        ]
        if over:
            name, carried = row["configuration"], row["carried"]
            clauses[name, carried] = f"{name}, carried by {carried}, is {listed(over)}"
    if not clauses:
        return None
    main = next((key for key in clauses if key[0] == NAMES[PROPOSED]), next(iter(clauses)))
    pairs = int(derived.trials.groupby("configuration").size().min())
    few = "" if pairs >= FEWEST else f" ({counted(pairs, 'pair')} each, where an interval takes {FEWEST})"
    others = [f"{clause}." for (name, _), clause in clauses.items() if name != main[0]]
    return Draft(f"{clauses[main]}, the fastest setting of each library{few}.", details=others[:2])


def rate(derived: Derived) -> Draft:
    """By the rate at which the baseline becomes as fast."""
    every = named_first(derived)
    if not every:
        return alone(derived)
    name, base = every[0].configuration, spelled(every[0].base)
    by_rate = [effect for effect in every if effect.configuration == name]
    by_rate.sort(key=lambda effect: effect.pairs["achieved_mbit"].median())
    crossed, kept, never, slow, verdicts = (list[str]() for _ in range(5))
    unknown: list[str] = []  # places where the break-even is not determined, with the reason
    unsure: list[str] = []  # places of ``kept`` with an interval around 1 at the highest rate
    others: list[str] = []  # break-evens of further configurations
    for row in break_even.break_even(derived.pairs).to_dict("records"):
        found: break_even.BreakEven = row["found"]
        place = f"on {row['nodes']}x{row['ranks_per_node']} ranks with {row['tokens_per_rank']} tokens a rank"
        place += "".join(f", {part}" for part in row["elsewhere"].split(", ")[2:])
        crossings = f"{break_even.crossings_in_words(found)} Mbit/s {place}" if found.crossings else ""
        unclear = break_even.unclear_in_words(found)
        if row["configuration"] != name:
            others += [f"{spelled(row['configuration'])} at {crossings}"] if crossings else []
            continue
        rates = [effect for effect in by_rate if effect.pairs["elsewhere"].iloc[0] == row["elsewhere"]]
        lowest, highest = rates[0], rates[-1]
        verdicts += [effect.verdict for effect in rates]
        slow.append(f"{ratio(lowest.ratio)} {place} at {rate_of(lowest)}")
        if crossings:
            crossed.append(crossings + (f" ({unclear})" if unclear else ""))
        elif found.outcome == "costs":
            never.append(f"{ratio(lowest.ratio)} {place} at {rate_of(lowest)}")
        elif found.outcome == "pays" or (lowest.verdict == YES and highest.verdict in (YES, OPEN)):
            times = "" if kept else f" times as fast as {base}'s"
            between = f" ({unclear})" if unclear and highest.verdict == YES else ""
            kept.append(f"{ratio(highest.ratio)}{times} {place} at {rate_of(highest)}{between}")
            unsure += [place] if highest.verdict == OPEN else []
        else:
            unknown.append(f"{place} ({found.few or unclear})")
    if not slow:
        return faster(derived, every)
    clauses = [f"{spelled(name)} is as fast as {base} at {listed(crossed)}"] if crossed else []
    if kept:
        up_to = "break-even was found up to the highest rate, where a step of"
        clauses.append(f"{'else no' if clauses else 'No'} {up_to} {spelled(name)} is {listed(kept)}")
        clauses += [f"whether it pays there cannot be told {listed(unsure)}"] if unsure else []
    if never:
        at = "at no measured rate is it faster: at the lowest, a step is"
        clauses.append(f"{at} {listed(never)} times as fast as {base}'s")
    if unknown:
        clauses.append(f"the break-even of {spelled(name)} is not determined {listed(unknown)}")
    details = [f"At the lowest rates it is {listed(slow)} ({every[0].intervals})."]
    details += [f"Of others, as fast as {base} is {listed_most(others)}."] if others else []
    text = "; ".join(clauses)
    return Draft(sentence(text), verdicts, every[:1], details)


def rate_of(effect: Effect) -> str:
    """The rate of an effect's link."""
    rate = float(effect.pairs["rate_mbit"].iloc[0])
    if math.isnan(rate):
        return f"an unshaped link ({effect.pairs['achieved_mbit'].median():.3g} Mbit/s)"
    return f"{rate:g} Mbit/s"


def nodes(derived: Derived) -> Draft:
    """By the throughput of more nodes."""
    rows = bytes_and_memory.by_nodes(derived)
    if rows.empty:
        return step(derived)
    changes = []
    for (kind, _), group in groups(rows, ["kind", "title"]):
        settings = groups(group, ["configuration", "nodes"])
        speeds = [
            (*key, speedups.step_interval(setting, "tokens_per_second").estimate) for key, setting in settings
        ]
        table = pd.DataFrame(speeds, columns=["configuration", "nodes", "speed"])
        means = table.pivot_table("speed", "configuration", "nodes", sort=False)
        common = means.dropna(axis=1).sort_index(axis=1)
        first, last = common.columns[[0, -1]]
        ratios = (common[last] / common[first]).items()
        factors = [f"{factor:.2f} with {spelled(str(name))}" for name, factor in ratios]
        batch = "equal batches a rank" if kind == "weak" else "equal batches in all"
        changes.append(f"{listed(factors)} from {first} to {last} nodes at {batch}")
    least = int(rows.groupby(["kind", "configuration", "nodes"]).size().min())
    few = f" (geometric means of {counted(least, 'repeat')}, where an interval takes {FEWEST})"
    text = f"Tokens per second of all ranks change by a factor of {'; of '.join(changes)}"
    return Draft(f"{text}{few if least < FEWEST else ''}.", [], named_first(derived)[:1])


def tokens(derived: Derived) -> Draft:
    """By decoded tokens per second."""
    table = derived.generations
    rows = table[table["baseline"].notna() & (table["id"] != table["baseline"])]
    if rows.empty:
        trials = counted(table["id"].nunique(), "trial")
        return Draft(f"Cannot be told: {trials} decoded, and none beside a baseline.", [OPEN])
    base, several = spelled(derived.compared.baseline), len(set(rows["setting"])) > 1
    rows = rows[rows["setting"] == most_compared(rows)]
    place = f" on {rows['where'].iloc[0]}" if several else ""
    names = effects.named_first(derived, rows["configuration"])
    speeds = {name: decoding.speedup(rows[rows["configuration"] == name]) for name in names}
    (first, best), *others = speeds.items()
    of_first = rows[rows["configuration"] == first]
    factors = [f"{ratio(best)} times as fast as {base}"]
    factors += [f"{ratio(speed)} with {spelled(name)}" for name, speed in others]
    of_base = of_first.assign(tokens_per_second=of_first["baseline_tokens_per_second"])
    speed, base_speed = (g3(decoding.speed(rows).estimate) for rows in (of_first, of_base))
    pace = f"decodes {speed} tokens per second and rank where {base} decodes {base_speed}"
    later = f"{of_first['later_bytes'].median():.0f} bytes between nodes"
    details = [f"{spelled(first)} {pace} (geometric means of {counted(best.n, 'pair')})."]
    details += [f"For a token after the first, its ranks send {later}."]
    few = "" if best.known else f" ({effects.too_few(best)})"
    named = [name for name in names if effects.is_named(derived, name)] or names
    verdicts = [effects.is_faster(speeds[name]) for name in named]
    return Draft(f"{spelled(first)} decodes{place} {listed_most(factors)}{few}.", verdicts, [], details)
