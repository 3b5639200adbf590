"""Answers by seconds: of a step beside a baseline, by the rate of the link, by nodes, and of decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from harness.records.confidence_intervals import FEWEST, Interval
from harness.suites.peers import family_of
from report.answer import effects, parts
from report.answer.effects import NO, OPEN, Effect
from report.answer.parts import Found, apart, g3, listed_most, ratio, seconds, spelled, strategy, too_few
from report.data import bytes_and_memory, decoding, speedups
from report.data.contender import NAMES, PROPOSED
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import counted, listed, sentence, with_interval
from report.tables import peers


def step(derived: Derived) -> Found:
    """By the seconds of a step."""
    if not derived.compared.asked:
        lists = effects.variants(derived)
        peers_named = any(parts.is_named(derived, NAMES[name]) for name in peers.FAMILIES)
        if (peers_named or not lists) and (beside := _beside_peers(derived)):
            return beside
        if lists:
            return _of_variants(derived, lists)
    return faster(derived, ordered(derived, effects.effects(derived)))


def ordered(derived: Derived, found: Sequence[Effect]) -> list[Effect]:
    """Effects of the contenders that the question names first."""
    names = parts.named_first(derived, list(dict.fromkeys(effect.contender for effect in found)))
    return sorted(found, key=lambda effect: names.index(effect.contender))


def faster(derived: Derived, found: Sequence[Effect]) -> Found:
    """Who is faster than the baseline, by how much, and of whom it cannot be told; two contenders of one
    strategy are told apart by the fields in which they differ.
    """
    if not found:
        return alone(derived)
    every: Sequence[Effect] = ()
    settings = ""
    others = len({one.contender for one in found})
    by_ratio = sorted(found, key=lambda one: one.ratio.estimate)
    if len(found) > parts.MOST_NAMED and others > 1 and not parts.is_named(derived, found[0].contender):
        every, fastest = found, {one.cell: one for one in by_ratio}  # the last of a cell
        found = [fastest[cell] for cell in dict.fromkeys(one.cell for one in found)]
        settings = f"; the fastest of {others} in each setting"
    elif len(found) > parts.MOST_NAMED:  # the first contender, where it gains least and most
        mine = [one for one in by_ratio if one.contender == found[0].contender]
        settings = f"; the least and the most of {len(mine)} settings" if len(mine) > 2 else ""
        found = [mine[0], mine[-1]] if len(mine) > 1 else found
    main = found[0]
    names = list(dict.fromkeys(one.contender for one in found))
    called = apart(derived, names)
    subject, over = f"a step of {spelled(main.contender)}", f" as {spelled(main.base)}'s"
    pair = apart(derived, [main.contender, main.base])
    if len(names) == 1 and pair[main.base] != spelled(main.base):
        subject = f"a step of {strategy(main.contender)} with {pair[main.contender]}"
        over = f" as with {pair[main.base]}"
    places = {cell: f" on {title}" if title else "" for cell, title in parts.titles(found).items()}

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
        return listed(claims)

    told = [one for one in found if one.verdict != OPEN]
    unclear = [one for one in found if one.verdict == OPEN]
    named = [one for one in found if parts.is_named(derived, one.contender)] or found
    verdicts = [one.verdict for one in named]
    if not told:
        text = f"Cannot be told ({parts.would_tell(found)}): {claim(found)}."
        return Found(text, verdicts, found, [seconds(main)])
    text = f"{claim(told)} ({told[0].intervals}{settings})"
    if unclear:
        said = [f"{ratio(one.ratio)} with {called[one.contender]}{places[one.cell]}" for one in unclear]
        # The fastest of a setting that is not told from the baseline: no other one is faster there.
        word = "nobody is told to be faster, and nearest is" if every else "no difference can be told:"
        text += f"; {word} {listed(said)} ({parts.would_tell(unclear)})"
        there = {one.cell for one in unclear}
        rest = [one for one in every if one.contender == names[0] and one.cell in there]
        text += "".join(
            f", {spelled(one.contender)} {ratio(one.ratio)}" for one in rest if one not in unclear
        )
    return Found(sentence(text), verdicts, found, [seconds(main)])


def most_compared(table: pd.DataFrame) -> str:
    """The cell in which most contenders ran."""
    return str(table.groupby("cell", sort=False)["contender"].nunique().idxmax())


def _of_variants(derived: Derived, lists: Sequence[Sequence[str]]) -> Found:
    """Strategies with several codecs or groups: of two the second beside the first, of more the fastest."""
    found: list[Found] = []
    for names in lists:
        if len(names) == 2:
            mine = effects.between(derived, names[0], names[1:])
            found += [faster(derived, mine)] if mine else []
            continue
        ran = derived.trials[derived.trials["contender"].isin(names)]
        cell = most_compared(ran)
        steps = ran[ran["cell"] == cell].groupby("contender")["step_seconds"].agg(speedups.geometric)
        best = str(steps.idxmin())
        others = effects.between(derived, best, [name for name in names if name != best])
        mine = [effect for effect in others if effect.cell == cell]
        found += [_fastest(derived, mine, names)] if mine else []
    if not found:
        return alone(derived)
    last = found[-1]  # the one with the most techniques
    return Found(last.first, last.verdicts, last.effects, [*last.more, *(one.first for one in found[:-1])])


def _fastest(derived: Derived, found: Sequence[Effect], names: Sequence[str]) -> Found:
    """The fastest of several values, which others cannot be told from it, and what their ranks hold."""
    called, first = apart(derived, names), found[0]
    base = called[first.base]

    def times(verdict: str) -> str:
        """By which factors those with a verdict take longer."""
        turned = [(called[one.contender], one.ratio) for one in found if one.verdict == verdict]
        longer = [(name, Interval(1 / of.estimate, 1 / of.high, 1 / of.low, 0)) for name, of in turned]
        return listed([f"{ratio(of)} with {name}" for name, of in longer])

    took = g3(speedups.step_interval(first.pairs, "baseline_seconds").estimate)
    place = f" on {first.where}" if len(set(derived.trials["cell"])) > 1 else ""
    if not times(NO):
        shortest = f"the shortest step of {strategy(first.base)}{place}, {took} s, is that with {base}"
        others = f"others take longer by a factor of {times(OPEN)}"
        return Found(f"Cannot be told ({parts.would_tell(found)}): {shortest}; {others}.", [OPEN], found)
    text = f"{strategy(first.base)} is fastest with {base}, at {took} s a step{place}; "
    text += f"it takes longer by a factor of {times(NO)}"
    text += f"; it cannot be told from {times(OPEN)}" if times(OPEN) else ""
    held = [f"{effects.device_mib(derived, name):.1f} MiB with {called[name]}" for name in names]
    more = [f"The engine holds {listed(held)} on the fullest rank."]
    return Found(f"{text} ({first.intervals}).", [], found, more)


def alone(derived: Derived) -> Found:
    """Without a pair: the steps of those that ran."""
    table = derived.trials
    if table.empty:
        ran = counted(len(derived.finished), "trial")
        return Found(f"Cannot be told: {ran} finished, and no two are compared.", [OPEN])
    here = table[table["cell"] == most_compared(table)]
    steps = [
        f"{g3(speedups.step_interval(mine).estimate)} s with {spelled(name)}"
        for (name,), mine in groups(here, ["contender"])
    ]
    why = "no two contenders ran in one repeat" if len(steps) > 1 else "nothing stands beside it"
    text = f"Cannot be told, for {why}: on {here['where'].iloc[0]} a step takes {listed_most(steps)}."
    return Found(text, [OPEN])


def _beside_peers(derived: Derived) -> Found | None:
    """Ours beside the fastest setting of each family of peers, where several families ran."""
    ran = {family_of(one) for one in derived.trials["strategy"]}
    families = [name for name in peers.FAMILIES if name in ran]
    rows = peers.peers(derived).data.to_dict("records") if len(families) > 1 else []
    told: dict[tuple[str, str], str] = {}
    for row in rows:
        over = []
        for family in families:
            if isinstance(row.get(f"over_{family}"), Interval):
                library, _, setting = row[f"best_{family}"].partition(", ")
                best = f"{library} ({setting})" if setting else library
                over.append(f"{ratio(row[f'over_{family}'])} times as fast as {best}")
        if over:
            name, carried = row["contender"], row["carried"]
            told[name, carried] = f"{name}, carried by {carried}, is {listed(over)}"
    if not told:
        return None
    main = next((key for key in told if key[0] == NAMES[PROPOSED]), next(iter(told)))
    pairs = int(derived.trials.groupby("contender").size().min())
    few = "" if pairs >= FEWEST else f" ({counted(pairs, 'pair')} each, where an interval takes {FEWEST})"
    more = [f"{text}." for (name, _), text in told.items() if name != main[0]]
    return Found(f"{told[main]}, the fastest setting of each library{few}.", more=more[:2])


def rate(derived: Derived) -> Found:
    """By the rate from which on the baseline is as fast."""
    found = ordered(derived, effects.effects(derived))
    if not found:
        return alone(derived)
    name, base = found[0].contender, spelled(found[0].base)
    mine = sorted(
        (one for one in found if one.contender == name), key=lambda one: one.pairs["achieved_mbit"].median()
    )
    crossed, kept, slow, verdicts = list[str](), list[str](), list[str](), list[str]()
    unsure: list[str] = []  # of those kept, whose interval at the highest rate holds 1
    others: list[str] = []  # break-evens of further contenders
    for row in speedups.break_even(derived.pairs).to_dict("records"):
        at: Interval = row["break_even_mbit"]
        size = f"on {row['nodes']}x{row['ranks_per_node']} ranks with {row['tokens_per_rank']} tokens a rank"
        size += "".join(f", {part}" for part in row["elsewhere"].split(", ")[2:])
        crossing = with_interval(at, lambda end: "beyond what was measured" if math.isinf(end) else g3(end))
        break_even = f"{crossing} Mbit/s {size}"
        if row["contender"] != name:
            bounded = math.isfinite(at.low) or math.isfinite(at.high)
            others += [f"{spelled(row['contender'])} at {break_even}"] if bounded else []
            continue
        here = [one for one in mine if one.pairs["elsewhere"].iloc[0] == row["elsewhere"]]
        verdicts += [one.verdict for one in here]
        if not math.isnan(at.estimate):
            crossed.append(break_even)
        else:
            times = "" if kept else f" times as fast as {base}'s"
            kept.append(f"{ratio(here[-1].ratio)}{times} {size} at {rate_of(here[-1])}")
            unsure += [size] if here[-1].verdict == OPEN else []
        slow.append(f"{ratio(here[0].ratio)} {size} at {rate_of(here[0])}")
    if not slow:
        return faster(derived, found)
    text = f"{spelled(name)} is as fast as {base} at {listed(crossed)}" if crossed else ""
    if kept:
        text += "; else no" if text else "No"
        text += " break-even was found up to the highest rate, where a step of "
        text += f"{spelled(name)} is {listed(kept)}"
        text += f"; whether it pays there cannot be told {listed(unsure)}" if unsure else ""
    more = [f"At the lowest rates it is {listed(slow)} ({found[0].intervals})."]
    more += [f"Of others, as fast as {base} is {listed_most(others)}."] if others else []
    return Found(f"{text}.", verdicts, found[:1], more)


def rate_of(effect: Effect) -> str:
    """The rate of an effect's link."""
    rate = float(effect.pairs["rate_mbit"].iloc[0])
    if math.isnan(rate):
        return f"an unshaped link ({effect.pairs['achieved_mbit'].median():.3g} Mbit/s)"
    return f"{rate:g} Mbit/s"


def nodes(derived: Derived) -> Found:
    """By the throughput of more nodes."""
    rows = bytes_and_memory.by_nodes(derived)
    if rows.empty:
        return step(derived)
    changes = []
    for (kind, _), all_of_kind in groups(rows, ["kind", "title"]):
        told = []
        common = set.intersection(*(set(mine["nodes"]) for _, mine in groups(all_of_kind, ["contender"])))
        of_kind = all_of_kind[all_of_kind["nodes"].isin(common)]
        for (name,), mine in groups(of_kind, ["contender"]):
            middle = mine.groupby("nodes")["tokens_per_second"].agg(speedups.geometric)
            told.append(f"{middle.iloc[-1] / middle.iloc[0]:.2f} with {spelled(name)}")
        batch = "equal batches a rank" if kind == "weak" else "equal batches in all"
        changes.append(f"{listed(told)} from {min(common)} to {max(common)} nodes at {batch}")
    least = int(rows.groupby(["kind", "contender", "nodes"]).size().min())
    few = f" (geometric means of {counted(least, 'repeat')}, where an interval takes {FEWEST})"
    first = f"Tokens per second of all ranks change by a factor of {'; of '.join(changes)}"
    first += f"{few if least < FEWEST else ''}."
    return Found(first, [], ordered(derived, effects.effects(derived))[:1])


def tokens(derived: Derived) -> Found:
    """By decoded tokens per second."""
    table = derived.generations
    rows = table[table["baseline"].notna() & (table["id"] != table["baseline"])]
    if rows.empty:
        ran = counted(table["id"].nunique(), "trial")
        return Found(f"Cannot be told: {ran} decoded, and none beside a baseline.", [OPEN])
    base, several = spelled(derived.compared.baseline), len(set(rows["cell"])) > 1
    rows = rows[rows["cell"] == most_compared(rows)]
    place = f" on {rows['where'].iloc[0]}" if several else ""
    mine = {str(name): of for (name,), of in groups(rows, ["contender"])}
    speeds = {name: decoding.speedup(mine[name]) for name in parts.named_first(derived, list(mine))}
    (first, best), *others = speeds.items()
    told = [f"{ratio(best)} times as fast as {base}"]
    told += [f"{ratio(one)} with {spelled(name)}" for name, one in others]
    columns = ("tokens_per_second", "baseline_tokens_per_second")
    ours, theirs = (speedups.step_interval(mine[first], name).estimate for name in columns)
    named = [name for name in speeds if parts.is_named(derived, name)] or list(speeds)
    pace = f"decodes {g3(ours)} tokens per second and rank where {base} decodes {g3(theirs)}"
    more = [f"{spelled(first)} {pace} (geometric means of {counted(best.n, 'pair')})."]
    later = mine[first]["later_bytes"].max()
    more += [f"For a token after the first, its ranks send {later:.0f} bytes between nodes."]
    few = "" if best.known else f" ({too_few(best)})"
    verdicts = [effects.is_faster(speeds[name]) for name in named]
    return Found(f"{spelled(first)} decodes{place} {listed_most(told)}{few}.", verdicts, [], more)
