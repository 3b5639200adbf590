"""Answers by seconds: of a step beside a baseline, by the rate of the link, by nodes, and of decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.records.confidence_intervals import FEWEST, Interval
from harness.suites.peers import family_of
from report.answer import effects
from report.answer.effects import Effect
from report.answer.parts import (
    MOST_NAMED,
    NO,
    OPEN,
    YES,
    Found,
    apart,
    cell_of,
    g3,
    intervals,
    is_named,
    listed_most,
    named_first,
    ratio,
    seconds,
    spelled,
    titles,
    too_few,
    would_tell,
)  # fmt: skip
from report.data import decoding, metrics, scaling
from report.data.contender import NAMES, PROPOSED
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import counted, listed
from report.tables import peers

_VERDICTS = {"faster": YES, "slower": NO, "cannot be told": OPEN}


def step(derived: Derived) -> Found:
    """By the seconds of a step."""
    if derived.compared.asked:
        return faster(derived, ordered(derived, effects.effects(derived)))
    lists = effects.variants(derived)
    peers_named = any(NAMES[name] in " ".join(derived.frames.questions) for name in peers.FAMILIES)
    if (peers_named or not lists) and (beside := _beside_peers(derived)):
        return beside
    if lists:
        return _of_variants(derived, lists)
    return faster(derived, ordered(derived, effects.effects(derived)))


def ordered(derived: Derived, found: Sequence[Effect]) -> list[Effect]:
    """Effects of the contenders that the question names first."""
    names = named_first(derived, list(dict.fromkeys(effect.contender for effect in found)))
    return sorted(found, key=lambda effect: names.index(effect.contender))


def faster(derived: Derived, found: Sequence[Effect]) -> Found:
    """Who is faster than the baseline, by how much, and of whom it cannot be told.

    Two contenders of one strategy are told apart by the fields in which they differ.
    """
    if not found:
        return alone(derived)
    every: Sequence[Effect] = ()
    settings = ""
    others = len({effect.contender for effect in found})
    if len(found) > MOST_NAMED and others > 1 and not is_named(derived, found[0].contender):
        cells: dict[str, list[Effect]] = {}
        for one in found:
            cells.setdefault(cell_of(one), []).append(one)
        every, found = found, [max(mine, key=lambda one: one.ratio.estimate) for mine in cells.values()]
        settings = f"; the fastest of {others} in each setting"
    elif len(found) > MOST_NAMED:  # in many settings: the first contender, where it gains least and most
        mine = sorted(
            (one for one in found if one.contender == found[0].contender), key=lambda one: one.ratio.estimate
        )
        settings = f"; the least and the most of {len(mine)} settings" if len(mine) > 2 else ""
        found = [mine[0], mine[-1]] if len(mine) > 1 else found
    main = found[0]
    base, several = spelled(main.base), len({effect.contender for effect in found}) > 1
    where = titles(found)
    names = apart(derived, list(dict.fromkeys(effect.contender for effect in found))) if several else {}
    subject, over = f"a step of {spelled(main.contender)}", f" as {base}'s"
    pair = apart(derived, [main.contender, main.base])
    if not several and pair[main.base] != base:
        strategy = spelled(main.contender).split(" (")[0]
        subject = f"a step of {strategy} with {pair[main.contender]}"
        over = f" as with {pair[main.base]}"

    def claim(mine: Sequence[Effect]) -> str:
        """Who is how fast: of the first in words, of others the number alone."""
        parts: list[str] = []
        for effect in mine:
            title = where[cell_of(effect)]
            place = f" on {title}" if title else ""
            name = names.get(effect.contender, "")
            own = name == spelled(effect.contender)  # a strategy's name, where others have what differs
            if not parts:
                other = f"a step {'of' if own else 'with'} {name}"
                who = subject if effect.contender == main.contender else other
                parts.append(f"{who} is {ratio(effect.ratio)} times as fast{over}{place}")
            elif effect.contender == main.contender:
                parts.append(f"{ratio(effect.ratio)}{place}")
            elif own:
                parts.append(f"that of {name} {ratio(effect.ratio)}{place}")
            else:
                parts.append(f"{ratio(effect.ratio)} with {name}{place}")
        return listed(parts)

    told = [effect for effect in found if effect.verdict != OPEN]
    unclear = [effect for effect in found if effect.verdict == OPEN]
    named = [effect for effect in found if is_named(derived, effect.contender)] or found
    verdicts = [_VERDICTS[effect.verdict] for effect in named]
    if not told:
        why = would_tell(found) if main.ratio.known else too_few(main.ratio)
        return Found(f"Cannot be told ({why}): {claim(found)}.", verdicts, found, [seconds(main)])
    text = f"{claim(told)} ({intervals(told[0])}{settings})"
    if unclear:
        said = [
            f"{ratio(one.ratio)} with {names.get(one.contender, spelled(one.contender))}" for one in unclear
        ]
        places = [f" on {where[cell_of(one)]}" if where[cell_of(one)] else "" for one in unclear]
        both = listed([f"{one}{place}" for one, place in zip(said, places, strict=True)])
        # The fastest of a setting that is not told from the baseline: no other one is faster there.
        word = "nobody is told to be faster, and nearest is" if every else "no difference can be told:"
        text += f"; {word} {both} ({would_tell(unclear)})"
        there = {cell_of(one) for one in unclear}
        mine = [one for one in every if one.contender == main.contender and cell_of(one) in there]
        text += "".join(
            f", {spelled(one.contender)} {ratio(one.ratio)}" for one in mine if one not in unclear
        )
    return Found(f"{text[0].upper()}{text[1:]}.", verdicts, found, [seconds(main)])


def _of_variants(derived: Derived, lists: Sequence[Sequence[str]]) -> Found:
    """Strategies with several codecs or groups: of two the second beside the first, of more the fastest."""
    found: list[Found] = []
    for names in lists:
        if len(names) == 2:
            mine = effects.between(derived, names[0], names[1:])
            found += [faster(derived, mine)] if mine else []
            continue
        ran = derived.trials[derived.trials["contender"].isin(names)]
        cell = ran.groupby("cell", sort=False)["contender"].nunique().idxmax()  # where most of them ran
        steps = ran[ran["cell"] == cell].groupby("contender")["step_seconds"].agg(metrics.geometric)
        best = min(map(str, steps.index), key=lambda name: float(steps[name]))
        others = effects.between(derived, best, [name for name in names if name != best])
        mine = [effect for effect in others if cell_of(effect) == cell]
        found += [_fastest(derived, mine, names)] if mine else []
    if not found:
        return alone(derived)
    last = found[-1]  # the one with the most techniques
    return Found(last.first, last.verdicts, last.effects, [*last.more, *(one.first for one in found[:-1])])


def _fastest(derived: Derived, found: Sequence[Effect], names: Sequence[str]) -> Found:
    """The fastest of several values, which others cannot be told from it, and what their ranks hold."""
    called = apart(derived, names)
    strategy = spelled(found[0].base).split(" (")[0]
    base = called[found[0].base]

    def times(effect: Effect) -> str:
        one = effect.ratio
        between = f" ({1 / one.high:.2f} to {1 / one.low:.2f})" if one.known else ""
        return f"{1 / one.estimate:.2f}{between} with {called[effect.contender]}"

    slower = [times(effect) for effect in found if effect.verdict == "slower"]
    same = [times(effect) for effect in found if effect.verdict == OPEN]
    took = g3(metrics.middle(found[0].pairs, "baseline_seconds"))
    place = f" on {found[0].where}" if derived.trials["cell"].nunique() > 1 else ""
    if not slower:
        why = would_tell(found) if found[0].ratio.known else too_few(found[0].ratio)
        shortest = f"the shortest step of {strategy}{place}, {took} s, is that with {base}"
        text = f"Cannot be told ({why}): {shortest}; others take longer by a factor of {listed(same)}."
        return Found(text, [OPEN], found)
    text = f"{strategy} is fastest with {base}, at {took} s a step{place}"
    text += f"; it takes longer by a factor of {listed(slower)}" if slower else ""
    text += f"; it cannot be told from {listed(same)}" if same else ""
    held = [f"{effects.device_mib(derived, name):.1f} MiB with {called[name]}" for name in names]
    more = [f"The engine holds {listed(held)} on the fullest rank."]
    return Found(f"{text} ({intervals(found[0])}).", [], found, more)


def alone(derived: Derived) -> Found:
    """Without a pair: the steps of those that ran."""
    table = derived.trials
    if table.empty:
        return Found(
            f"Cannot be told: {counted(len(derived.finished), 'trial')} finished, and no two are compared.",
            [OPEN],
        )
    cell = table.groupby("cell", sort=False)["contender"].nunique().idxmax()
    here = table[table["cell"] == cell]
    steps = [
        f"{g3(metrics.step_interval(mine).estimate)} s with {spelled(name)}"
        for (name,), mine in groups(here, ["contender"])
    ]
    why = "no two contenders ran in one repeat" if len(steps) > 1 else "nothing stands beside it"
    took = listed_most(steps)
    return Found(f"Cannot be told, for {why}: on {here['where'].iloc[0]} a step takes {took}.", [OPEN])


def _beside_peers(derived: Derived) -> Found | None:
    """Ours beside the fastest setting of each family of peers, where several families ran."""
    families = [
        name for name in peers.FAMILIES if name in {family_of(one) for one in derived.trials["strategy"]}
    ]
    data = peers.peers(derived).data if len(families) > 1 else None
    if data is None or data.empty:
        return None
    told = {}
    for row in data.to_dict("records"):
        over = [
            f"{ratio(row[f'over_{name}'])} times as fast as {_setting(row[f'best_{name}'])}"
            for name in families
            if isinstance(row.get(f"over_{name}"), Interval)
        ]
        if over:
            told[row["contender"], row["carried"]] = listed(over)
    main = next((key for key in told if key[0] == NAMES[PROPOSED]), next(iter(told), None))
    if main is None:
        return None
    pairs = int(derived.trials.groupby("contender").size().min())
    few = "" if pairs >= FEWEST else f" ({counted(pairs, 'pair')} each, where an interval takes {FEWEST})"
    first = f"{main[0]}, carried by {main[1]}, is {told[main]}, the fastest setting of each library{few}."
    more = [
        f"{name}, carried by {carried}, is {text}."
        for (name, carried), text in told.items()
        if name != main[0]
    ]
    return Found(first, [], [], more[:2])


def _setting(name: str) -> str:
    """``FSDP2 (kept, prefetch)``."""
    family, _, settings = name.partition(", ")
    return f"{family} ({settings})" if settings else family


def rate(derived: Derived) -> Found:
    """By the rate from which on the baseline is as fast."""
    found = ordered(derived, effects.effects(derived))
    if not found:
        return alone(derived)
    name, base = found[0].contender, spelled(found[0].base)
    called = spelled(name)
    sizes = ["nodes", "ranks_per_node", "tokens_per_rank"]
    rows = metrics.break_even(derived.pairs)
    crossed: list[str] = []
    kept: list[str] = []
    unsure: list[str] = []  # of those kept, whose interval at the highest rate holds 1
    slow: list[str] = []
    verdicts: list[str] = []
    for row in rows[rows["contender"] == name].to_dict("records"):
        here = [
            one
            for one in found
            if one.contender == name
            and [one.pairs[key].iloc[0] for key in sizes] == [row[key] for key in sizes]
        ]
        here.sort(key=lambda one: one.pairs["achieved_mbit"].median())
        size = f"on {row['nodes']}x{row['ranks_per_node']} ranks with {row['tokens_per_rank']} tokens a rank"
        verdicts += [_VERDICTS[one.verdict] for one in here]
        if not math.isnan(row["break_even_mbit"]):
            low, high = row["break_even_low_mbit"], row["break_even_high_mbit"]
            between = "" if math.isnan(low) else f" ({_mbit(low)} to {_mbit(high)})"
            crossed.append(f"{g3(row['break_even_mbit'])}{between} Mbit/s {size}")
        else:
            times = "" if kept else f" times as fast as {base}'s"
            kept.append(f"{ratio(here[-1].ratio)}{times} {size} at {rate_of(here[-1])}")
            unsure += [size] if _VERDICTS[here[-1].verdict] == OPEN else []
        slow.append(f"{ratio(here[0].ratio)} {size} at {rate_of(here[0])}")
    if not slow:
        return faster(derived, found)
    text = f"{called} is as fast as {base} at {listed(crossed)}" if crossed else ""
    if kept:
        least = f"no break-even was found up to the highest rate, where a step of {called} is {listed(kept)}"
        text += f"; else {least}" if text else f"{least[0].upper()}{least[1:]}"
        text += f"; whether it pays there cannot be told {listed(unsure)}" if unsure else ""
    more = [f"At the lowest rates it is {listed(slow)} ({intervals(found[0])})."]
    return Found(f"{text}.", verdicts, found[:1], more)


def _mbit(value: float) -> str:
    return "beyond what was measured" if math.isinf(value) else g3(value)


def rate_of(effect: Effect) -> str:
    """The rate of an effect's link."""
    rate = float(effect.pairs["rate_mbit"].iloc[0])
    if math.isnan(rate):
        return f"an unshaped link ({effect.pairs['achieved_mbit'].median():.3g} Mbit/s)"
    return f"{rate:g} Mbit/s"


def nodes(derived: Derived) -> Found:
    """By the throughput of more nodes."""
    rows = scaling.by_nodes(derived)
    if rows.empty:
        return step(derived)
    parts = []
    for (kind, _), all_of_kind in groups(rows, ["kind", "title"]):
        told = []
        common = set.intersection(*(set(mine["nodes"]) for _, mine in groups(all_of_kind, ["contender"])))
        of_kind = all_of_kind[all_of_kind["nodes"].isin(common)]
        for (name,), mine in groups(of_kind, ["contender"]):
            middle = mine.groupby("nodes")["tokens_per_second"].agg(metrics.geometric)
            told.append(f"{middle.iloc[-1] / middle.iloc[0]:.2f} with {spelled(name)}")
        batch = "equal batches a rank" if kind == "weak" else "equal batches in all"
        low, high = of_kind["nodes"].min(), of_kind["nodes"].max()
        parts.append(f"{listed(told)} from {low} to {high} nodes at {batch}")
    least = int(rows.groupby(["kind", "contender", "nodes"]).size().min())
    few = (
        f" (geometric means of {counted(least, 'repeat')}, where an interval takes {FEWEST})"
        if least < FEWEST
        else ""
    )
    first = f"Tokens per second of all ranks change by a factor of {'; of '.join(parts)}{few}."
    return Found(first, [], ordered(derived, effects.effects(derived))[:1])


def tokens(derived: Derived) -> Found:
    """By decoded tokens per second."""
    table = derived.generations
    rows = table[table["baseline"].notna() & (table["id"] != table["baseline"])]
    if rows.empty:
        ran = counted(table["id"].nunique(), "trial")
        return Found(f"Cannot be told: {ran} decoded, and none beside a baseline.", [OPEN])
    base = spelled(derived.compared.baseline)
    cell = rows.groupby("cell", sort=False)["contender"].nunique().idxmax()
    place = f" on {rows[rows['cell'] == cell]['where'].iloc[0]}" if rows["cell"].nunique() > 1 else ""
    rows = rows[rows["cell"] == cell]
    mine = {str(name): of for (name,), of in groups(rows, ["contender"])}
    names = named_first(derived, list(mine))
    speeds = {name: decoding.speedup(mine[name]) for name in names}
    told = [f"{ratio(speeds[name])} with {spelled(name)}" for name in names]
    first, best = names[0], speeds[names[0]]
    told[0] = f"{ratio(speeds[names[0]])} times as fast as {base}"
    ours, theirs = (metrics.middle(mine[first], f"{key}tokens_per_second") for key in ("", "baseline_"))
    verdicts = [
        OPEN if not one.known or one.contains(1) else YES if one.estimate > 1 else NO
        for name, one in speeds.items()
        if is_named(derived, name) or not any(is_named(derived, other) for other in speeds)
    ]
    speed = (
        f"{spelled(first)} decodes {g3(ours)} tokens per second and rank where {base} decodes {g3(theirs)} "
        f"(geometric means of {counted(best.n, 'pair')})."
    )
    later = mine[first]["later_bytes"].max()
    more = [speed, f"For a token after the first, its ranks send {later:.0f} bytes between nodes."]
    few = "" if best.known else f" ({too_few(best)})"
    return Found(f"{spelled(first)} decodes{place} {listed_most(told)}{few}.", verdicts, [], more)
