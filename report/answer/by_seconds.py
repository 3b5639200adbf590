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
    Draft,
    Effect,
    distinct_names,
    g3,
    listed_most,
    ratio,
    seconds,
    spelled,
)
from report.data import bytes_and_memory, decoding, speedups
from report.data.contender import NAMES, PROPOSED
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import counted, listed, sentence, with_interval
from report.tables import peers


def step(derived: Derived) -> Draft:
    """By the seconds of a step."""
    lists = [] if derived.compared.named_in_suite else effects.variants(derived)
    peers_named = any(effects.is_named(derived, NAMES[name]) for name in peers.FAMILIES)
    by_peers = not derived.compared.named_in_suite and (peers_named or not lists)
    if by_peers and (beside := _beside_peers(derived)):
        return beside
    return _of_variants(derived, lists) if lists else faster(derived, ordered(derived))


def ordered(derived: Derived) -> list[Effect]:
    """All effects, those of contenders that the question names first."""
    found = effects.effects(derived)
    names = effects.named_first(derived, (effect.contender for effect in found))
    return sorted(found, key=lambda effect: names.index(effect.contender))


def faster(derived: Derived, found: Sequence[Effect]) -> Draft:
    """Who is faster than the baseline, by how much, and of whom it cannot be told."""
    if not found:
        return alone(derived)
    every, settings, others = found, "", len({one.contender for one in found})
    many = len(found) > effects.MOST_NAMED and others > 1
    if fastest_alone := many and not effects.is_named(derived, found[0].contender):
        fastest = {one.cell: one for one in sorted(found, key=lambda one: one.ratio.estimate)}  # its last
        found = [fastest[cell] for cell in dict.fromkeys(one.cell for one in found)]
        settings = f"; the fastest of {others} in each setting"
    main, names = found[0], list(dict.fromkeys(one.contender for one in found))
    called, pair = distinct_names(derived, names), distinct_names(derived, [main.contender, main.base])
    subject, over = f"a step of {spelled(main.contender)}", f" as {spelled(main.base)}'s"
    if len(names) == 1 and pair[main.base] != spelled(main.base):
        subject = f"a step of {effects.strategy(main.contender)} with {pair[main.contender]}"
        over = f" as with {pair[main.base]}"
    places = {cell: f" on {title}" if title else "" for cell, title in effects.titles(found).items()}

    def claim(mine: Sequence[Effect]) -> str:
        """Who is how fast: of the first in words, of others the number alone."""
        claims: list[str] = []
        for one in mine:
            name, place, is_main = called[one.contender], places[one.cell], one.contender == names[0]
            own = name == spelled(one.contender)  # a strategy's name, where others have what differs
            if not claims:
                who = subject if is_main else f"a step {'of' if own else 'with'} {name}"
                claims.append(f"{who} is {ratio(one.ratio)} times as fast{over}{place}")
            elif own and not is_main:
                claims.append(f"that of {name} {ratio(one.ratio)}{place}")
            else:
                claims.append(f"{ratio(one.ratio)}{'' if is_main else f' with {name}'}{place}")
        return listed_most(claims)

    told = [one for one in found if one.verdict != OPEN]
    unclear = [one for one in found if one.verdict == OPEN]
    named = [one for one in found if effects.is_named(derived, one.contender)] or found
    text = f"{claim(told)} ({told[0].intervals}{settings})" if told else ""
    if unclear:
        said = [f"{ratio(one.ratio)} with {called[one.contender]}{places[one.cell]}" for one in unclear]
        # The fastest of a setting that is not told from the baseline: no other one is faster there.
        word = (
            "nobody is told to be faster, and nearest is" if fastest_alone else "no difference can be told:"
        )
        text += f"; {word} {listed(said)} ({effects.needed_pairs(unclear)})"
        there = [one.cell for one in unclear if fastest_alone and one.contender != names[0]]
        rest = [one for one in every if one.contender == names[0] and one.cell in there]
        text += "".join(f", {spelled(one.contender)} {ratio(one.ratio)}" for one in rest)
    if not told:
        text = f"Cannot be told ({effects.needed_pairs(found)}): {claim(found)}"
    return Draft(sentence(text), [one.verdict for one in named], found, [seconds(main)])


def most_compared(table: pd.DataFrame) -> str:
    """The cell in which most contenders ran."""
    return str(table.groupby("cell", sort=False)["contender"].nunique().idxmax())


def _of_variants(derived: Derived, lists: Sequence[Sequence[str]]) -> Draft:
    """Strategies with several codecs or groups: of two the second beside the first, of more the fastest."""
    found: list[Draft] = []
    for names in lists:
        ran = derived.trials[derived.trials["contender"].isin(names)]
        cell = most_compared(ran)
        steps = ran[ran["cell"] == cell].groupby("contender")["step_seconds"].agg(speedups.geometric)
        best = names[0] if len(names) == 2 else str(steps.idxmin())
        mine = effects.between(derived, best, set(names) - {best})
        if len(names) > 2:
            mine = [effect for effect in mine if effect.cell == cell]
        if mine:
            found.append(faster(derived, mine) if len(names) == 2 else _fastest(derived, mine, names))
    if not found:
        return alone(derived)
    last = found[-1]  # the one with the most techniques
    return Draft(last.first, last.verdicts, last.effects, [*last.details, *(one.first for one in found[:-1])])


def _fastest(derived: Derived, found: Sequence[Effect], names: Sequence[str]) -> Draft:
    """The fastest of several values, which others cannot be told from it, and what their ranks hold."""
    called, first = distinct_names(derived, names), found[0]
    base, name = called[first.base], effects.strategy(first.base)

    def times(verdict: str) -> str:
        """By which factors those with a verdict take longer."""
        mine = [(called[one.contender], one.ratio) for one in found if one.verdict == verdict]
        turned = [(Interval(1 / of.estimate, 1 / of.high, 1 / of.low, 0), name) for name, of in mine]
        return listed([f"{ratio(longer)} with {name}" for longer, name in turned])

    took = g3(speedups.step_interval(first.pairs, "baseline_seconds").estimate)
    place = f" on {first.where}" if len(set(derived.trials["cell"])) > 1 else ""
    if not times(NO):
        shortest = f"the shortest step of {name}{place}, {took} s, is that with {base}"
        others = f"others take longer by a factor of {times(OPEN)}"
        return Draft(f"Cannot be told ({effects.needed_pairs(found)}): {shortest}; {others}.", [OPEN], found)
    text = f"{name} is fastest with {base}, at {took} s a step{place}; "
    text += f"it takes longer by a factor of {times(NO)}"
    text += f"; it cannot be told from {times(OPEN)}" if times(OPEN) else ""
    held = [f"{effects.device_mib(derived, name):.1f} MiB with {called[name]}" for name in names]
    more = [f"The engine holds {listed(held)} on the fullest rank."]
    return Draft(f"{text} ({first.intervals}).", [], found, more)


def alone(derived: Derived) -> Draft:
    """Without a pair: the steps of those that ran."""
    if derived.trials.empty:
        ran = counted(len(derived.finished), "trial")
        return Draft(f"Cannot be told: {ran} finished, and no two are compared.", [OPEN])
    here = derived.trials[derived.trials["cell"] == most_compared(derived.trials)]
    steps = [
        f"{g3(speedups.step_interval(mine).estimate)} s with {spelled(name)}"
        for (name,), mine in groups(here, ["contender"])
    ]
    why = "no two contenders ran in one repeat" if len(steps) > 1 else "nothing stands beside it"
    text = f"Cannot be told, for {why}: on {here['where'].iloc[0]} a step takes {listed_most(steps)}."
    return Draft(text, [OPEN])


def _beside_peers(derived: Derived) -> Draft | None:
    """Ours beside the fastest setting of each family of peers, where several families ran."""
    families = {family_of(one) for one in derived.trials["strategy"]} & peers.FAMILIES.keys()
    rows = peers.peers(derived).data.to_dict("records") if len(families) > 1 else []
    told: dict[tuple[str, str], str] = {}
    for row in rows:
        gains = {row[f"best_{one}"]: row[f"over_{one}"] for one in peers.FAMILIES if f"over_{one}" in row}
        over = [
            f"{ratio(gain)} times as fast as {best.replace(', ', ' (', 1)}{')' * (', ' in best)}"
            for best, gain in gains.items()
            if isinstance(gain, Interval)
        ]
        if over:
            name, carried = row["contender"], row["carried"]
            told[name, carried] = f"{name}, carried by {carried}, is {listed(over)}"
    if not told:
        return None
    main = next((key for key in told if key[0] == NAMES[PROPOSED]), next(iter(told)))
    pairs = int(derived.trials.groupby("contender").size().min())
    few = "" if pairs >= FEWEST else f" ({counted(pairs, 'pair')} each, where an interval takes {FEWEST})"
    more = [f"{text}." for (name, _), text in told.items() if name != main[0]]
    return Draft(f"{told[main]}, the fastest setting of each library{few}.", details=more[:2])


def rate(derived: Derived) -> Draft:
    """By the rate from which on the baseline is as fast."""
    found = ordered(derived)
    if not found:
        return alone(derived)
    name, base = found[0].contender, spelled(found[0].base)
    mine = [one for one in found if one.contender == name]
    mine.sort(key=lambda one: one.pairs["achieved_mbit"].median())
    crossed, kept, slow, verdicts = list[str](), list[str](), list[str](), list[str]()
    unsure: list[str] = []  # of those kept, whose interval at the highest rate holds 1
    others: list[str] = []  # break-evens of further contenders
    for row in speedups.break_even(derived.pairs).to_dict("records"):
        at: Interval = row["break_even_mbit"]
        size = f"on {row['nodes']}x{row['ranks_per_node']} ranks with {row['tokens_per_rank']} tokens a rank"
        size += "".join(f", {part}" for part in row["elsewhere"].split(", ")[2:])
        crossing = with_interval(at, lambda end: "beyond what was measured" if math.isinf(end) else g3(end))
        if row["contender"] != name:
            bounded = math.isfinite(at.low) or math.isfinite(at.high)
            others += [f"{spelled(row['contender'])} at {crossing} Mbit/s {size}"] if bounded else []
            continue
        here = [one for one in mine if one.pairs["elsewhere"].iloc[0] == row["elsewhere"]]
        verdicts += [one.verdict for one in here]
        slow.append(f"{ratio(here[0].ratio)} {size} at {rate_of(here[0])}")
        if not math.isnan(at.estimate):
            crossed.append(f"{crossing} Mbit/s {size}")
            continue
        times = "" if kept else f" times as fast as {base}'s"
        kept.append(f"{ratio(here[-1].ratio)}{times} {size} at {rate_of(here[-1])}")
        unsure += [size] if here[-1].verdict == OPEN else []
    if not slow:
        return faster(derived, found)
    text = f"{spelled(name)} is as fast as {base} at {listed(crossed)}" if crossed else ""
    if kept:
        up_to = "break-even was found up to the highest rate, where a step of"
        text += f"{'; else no' if text else 'No'} {up_to} {spelled(name)} is {listed(kept)}"
        text += f"; whether it pays there cannot be told {listed(unsure)}" if unsure else ""
    more = [f"At the lowest rates it is {listed(slow)} ({found[0].intervals})."]
    more += [f"Of others, as fast as {base} is {listed_most(others)}."] if others else []
    return Draft(f"{text}.", verdicts, found[:1], more)


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
    for (kind, _), mine in groups(rows, ["kind", "title"]):
        middles = mine.pivot_table("tokens_per_second", "contender", "nodes", speedups.geometric, sort=False)
        common = middles.dropna(axis=1).sort_index(axis=1)
        first, last = common.columns[[0, -1]]
        told = [f"{of:.2f} with {spelled(str(name))}" for name, of in (common[last] / common[first]).items()]
        batch = "equal batches a rank" if kind == "weak" else "equal batches in all"
        changes.append(f"{listed(told)} from {first} to {last} nodes at {batch}")
    least = int(rows.groupby(["kind", "contender", "nodes"]).size().min())
    few = f" (geometric means of {counted(least, 'repeat')}, where an interval takes {FEWEST})"
    text = f"Tokens per second of all ranks change by a factor of {'; of '.join(changes)}"
    return Draft(f"{text}{few if least < FEWEST else ''}.", [], ordered(derived)[:1])


def tokens(derived: Derived) -> Draft:
    """By decoded tokens per second."""
    table = derived.generations
    rows = table[table["baseline"].notna() & (table["id"] != table["baseline"])]
    if rows.empty:
        ran = counted(table["id"].nunique(), "trial")
        return Draft(f"Cannot be told: {ran} decoded, and none beside a baseline.", [OPEN])
    base, several = spelled(derived.compared.baseline), len(set(rows["cell"])) > 1
    rows = rows[rows["cell"] == most_compared(rows)]
    place = f" on {rows['where'].iloc[0]}" if several else ""
    names = effects.named_first(derived, rows["contender"])
    speeds = {name: decoding.speedup(rows[rows["contender"] == name]) for name in names}
    (first, best), *others = speeds.items()
    mine = rows[rows["contender"] == first]
    told = [f"{ratio(best)} times as fast as {base}"]
    told += [f"{ratio(one)} with {spelled(name)}" for name, one in others]
    columns = ("tokens_per_second", "baseline_tokens_per_second")
    ours, theirs = (g3(speedups.step_interval(mine, name).estimate) for name in columns)
    pace = f"decodes {ours} tokens per second and rank where {base} decodes {theirs}"
    later = f"{mine['later_bytes'].max():.0f} bytes between nodes"
    more = [
        f"{spelled(first)} {pace} (geometric means of {counted(best.n, 'pair')}).",
        f"For a token after the first, its ranks send {later}.",
    ]
    few = "" if best.known else f" ({effects.too_few(best)})"
    named = [name for name in names if effects.is_named(derived, name)] or names
    verdicts = [effects.is_faster(speeds[name]) for name in named]
    return Draft(f"{spelled(first)} decodes{place} {listed_most(told)}{few}.", verdicts, [], more)
