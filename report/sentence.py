"""Writes the first sentence in the head of a page, on the quantity that the suite asks for, such as step time or loss.

The sentence states how much a configuration differs from its baseline.  It fills a template of this quantity
(:mod:`harness.suites.answering_quantity`); the words of the suite's question are never parsed.

If several configurations are compared, :func:`foremost` chooses the configuration for the sentence.  This is usually
the strategy without changes that has the largest significant difference.  The sentence then ends with the numbers of
better and worse comparisons, so that readers see what the choice leaves out.

Up to three sentences may follow (:mod:`report.further_sentences`).
Definitions: docs/reference/metrics.md, Verdicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from harness.records.confidence_intervals import FEWEST, FEWEST_UNDISTURBED, WITHIN_START, Interval
from harness.records.trial_record import OTHERS_WITHIN
from harness.suites.answering_quantity import Quantity
from harness.suites.peers import PEERS
from report.data import break_even, speedups
from report.data.configuration import has_own_method, name_of, spelled
from report.data.metrics import Derived
from report.data.text import counted, listed, number
from report.draw.names_of_rows import common_and_rest, titles_of
from report.effects import effects, loss_verdicts
from report.effects.effects import MOST_NEEDED, Effect, Key, Verdict

_WORDS: Final = dict(enumerate(("no", "one", "two", "three", "four", "five", "six")))
_IN_WORDS: Final = {  # what configurations are compared in
    "step": "step time", "tokens": "decoding speed", "bytes": "bytes between nodes", "error": "gradient error",
    "loss": "validation loss", "memory": "memory", "size": "the largest model", "net": "net speed",
}  # fmt: skip
_SPEEDS: Final = ("step", "tokens", "net")
NOT_SIGNIFICANT: Final = ", not significant"
_MOST_OTHERS: Final = 2  # differences that follow the largest one, in a sentence each
# Settings that differ in the rate of the link alone form a group, which has break-even rates of its own.  If there are
# more groups than this number, only the rates of one group are given.
_MOST_SIZES: Final = 4
_three_digits: Final = number(3)


def two_digits(value: float) -> str:
    """Format a positive number with two significant digits: ``4600``, ``18``, ``0.11``."""
    return number(2)(float(f"{value:.1e}"))


@dataclass(frozen=True, slots=True)
class Difference:
    """How one configuration differs from its baseline in one setting, and the words of a sentence on this difference.

    A setting is what trials run in: cluster, model, batch and so on.
    """

    effect: Effect
    name: str  # of the configuration
    base: str  # name of the baseline
    place: str = ""  # words for the setting, if there are several settings: ``with 50 Mbit/s, ``
    notes: str = ""  # clauses that follow the claim and its interval in the same sentence
    sequel: str = ""  # sentences at the end, on break-even rates; a space precedes each
    # Whether the configuration is a strategy without changes, a strategy with a method of a user's own, or a control,
    # which has a deliberate fault.
    preset: bool = True

    @property
    def known(self) -> bool:
        """Whether a verdict is possible: the effect has an interval, and no reason against one (``effect.why``)."""
        return self.effect.change.known and not self.effect.why


class Sentence(NamedTuple):
    """The first sentence of a page's head, the difference that it states, and sentences on a few other differences."""

    text: str
    top: Difference | None = None  # None if the sentence states none of the differences that are compared
    likewise: tuple[str, ...] = ()  # a sentence for each of a few other differences (:func:`likewise`)


def sentence(
    derived: Derived, asked: Quantity, kind: str, found: Mapping[Key, Effect], compared: Sequence[Key]
) -> Sentence:
    """Return the first sentence of a page's head, the difference that it states, and a few similar sentences.

    Args:
        derived: The records.
        asked: The quantity that the suite asks for.
        kind: The quantity that the sentence compares.  It is ``asked`` or, if nothing is compared in ``asked``,
            ``step``.
        found: The comparisons with the baseline in ``kind``, one for each setting and configuration.
        compared: The keys of ``found`` whose configurations are compared with a baseline.
    """
    if derived.finished.empty:
        return Sentence(_nothing_finished(derived))
    if asked == "trials":
        return Sentence(_on_trials(derived))
    differences = _of_nodes(derived) if asked == "nodes" else []
    if differences:
        top = foremost(asked, differences)
        alike = [each for each in differences if (each.name == top.name) is not (each.place == top.place)]
        return Sentence(on_largest(asked, differences), None, tuple(likewise(asked, top, alike)))
    differences = differences_of(derived, asked, found, compared)
    shown = "tokens" if asked == "tokens" else kind
    left_out = [found[key] for key in compared if all(found[key] is not each.effect for each in differences)]
    if not differences:
        return Sentence(_nothing_compared(derived))
    text = on_largest(shown, differences, controls=[effect.verdict for effect in left_out])
    top = foremost(shown, differences)
    others = [each for each in differences if each.name == top.name and each is not top]
    if asked == "size":  # the places of its differences are memory limits
        others = [each for each in differences if each.place == top.place and each is not top]
    return Sentence(text, top, tuple(likewise(shown, top, others)))


def on_largest(
    kind: str,
    differences: Sequence[Difference],
    *,
    controls: Sequence[Verdict] = (),
    among: str = "",
    steps: int = -1,
) -> str:
    """Return the sentence on one of the ``differences``, usually the largest significant one (:func:`foremost`).

    Args:
        kind: The quantity that is compared.
        differences: The differences to choose from, at least one.
        controls: The verdicts on controls, which are configurations with a deliberate fault.  ``differences`` leaves
            these configurations out; the sentence counts their verdicts separately.
        among: Empty if the differences are from baselines.  If they are from counterparts, other configurations of the
            suite (:mod:`report.effects.counterparts`), text that begins the sentence: ``where only policy.schedule
            differs, ``.
        steps: The number of training steps that the previous sentence names; -1 if it names none.  The sentence does
            not repeat this number.
    """
    count = len(differences)
    of_all = f", the largest of {count} differences" if count > 1 else ""
    top = foremost(kind, differences, gains=bool(among))
    claim, interval = _claim(kind, top, steps)
    claim = top.place + claim
    if top.known and top.effect.significant:
        counts = _counts(kind, differences, controls, such=bool(among))
        return f"{capitalised(among + claim + interval + top.notes + counts)}.{top.sequel}"
    if not any(each.known for each in differences):
        return f"Inconclusive ({_why(kind, top.effect)}): {among}{claim}{of_all}{top.notes}.{top.sequel}"
    base = "its counterpart" if among else "its baseline"
    base = top.base if len({each.base for each in differences}) == 1 else base
    if top.effect.counted:
        return f"{capitalised(among + 'no configuration differs')} from {base} in {_IN_WORDS[kind]}."
    subject = f"{top.name} does not differ" if count == 1 else "no configuration differs"
    subject = f"{capitalised(among + subject)} significantly from {base} in {_IN_WORDS.get(kind, '')}"
    if kind == "nodes":
        subject = "No configuration's tokens/s differ significantly between numbers of nodes"
    change, pairs = top.effect.change, counted(top.effect.change.n, _noun(kind))
    needed = effects.needed(change, top.effect.equal)
    bound, noun = "more than " * (needed == MOST_NEEDED), "occasion" if change.occasions > 1 else _noun(kind)
    largest = f"the largest of {count} differences: {claim}" if count > 1 else "a difference of this size"
    needed_words = f"{bound}{needed} {noun}s would show {largest}"
    return f"{subject} ({pairs}); {needed_words}.{top.sequel}"


def on_peers(found: Sequence[Interval]) -> str:
    """Return the sentence on our engine's speed-ups over DDP, FSDP2 and DeepSpeed.

    ``found`` are these speed-ups, at least one.  A speed-up compares one of our configurations with one library: with
    the library's fastest configuration of those that use the same data types
    (:func:`report.tables.peers.ours_over_peers`).
    """
    verdicts: list[Verdict] = [_over_peer(each) for each in found]
    ratios = [each.estimate for each in found]
    span = f"{min(ratios):.2f} to {max(ratios):.2f} times"
    claim = f"in the same types, a step of our engine is {span} as fast as with the fastest setting of each library"
    comparisons = counted(len(found), "comparison")
    if {*verdicts} == {"inconclusive"}:
        most = _in_words(max(each.n for each in found), "undisturbed pair")
        needed = _WORDS[FEWEST]
        if any(each.n + each.left_out >= FEWEST for each in found):
            needed = f"{_WORDS[FEWEST_UNDISTURBED]} of at least {needed} measured"
        return f"Inconclusive (at most {most}; a verdict needs {needed}): {claim} ({comparisons})."
    return f"{claim[0].upper()}{claim[1:]}; of {comparisons}, {_verdicts_in_words(verdicts)}."


def _over_peer(speedup: Interval) -> Verdict:
    if not speedup.known:
        return "inconclusive"
    if speedup.low > 1:
        return "better"
    return "worse" if speedup.high < 1 else "not significant"


def capitalised(text: str) -> str:
    """Return a text with a capital first letter.

    The text stays unchanged if its first word has a capital after the first letter, as ``qwZ`` has.
    """
    first = text.split(maxsplit=1)[0]
    return text if first[1:].lower() != first[1:] else f"{text[0].upper()}{text[1:]}"


def likewise(kind: str, top: Difference, others: Sequence[Difference]) -> list[str]:
    """Return sentences that follow a sentence on the difference ``top``, one for each difference in ``others``.

    ``kind`` is the quantity of all differences.  There are sentences in two cases:

    * A verdict on ``top`` is possible (``top.known``), and ``top`` is significant.
    * No verdict on ``top`` is possible, and ``kind`` is ``nodes``, the throughput on more nodes.

    In all other cases the list is empty.  It is also empty if ``others`` has more than :data:`_MOST_OTHERS`
    differences.
    """
    told = top.effect.significant if top.known else kind == "nodes"
    if not told or len(others) > _MOST_OTHERS:
        return []
    return [on_one(kind, each, steps=top.effect.steps) for each in others]


def on_one(kind: str, difference: Difference, *, steps: int = -1) -> str:
    """Return a sentence that states one difference in the quantity ``kind``, whatever the verdict on this difference.

    ``steps`` is the number of training steps that the previous sentence names, or -1 if it names none.  The number is
    not repeated.
    """
    claim, interval = _claim(kind, difference, steps)
    if not difference.known:
        return f"Inconclusive ({_why(kind, difference.effect)}): {difference.place}{claim}."
    equal = "" if difference.effect.significant or difference.effect.counted else NOT_SIGNIFICANT
    return f"{capitalised(difference.place + claim + interval + equal + difference.notes)}."


def foremost(kind: str, differences: Sequence[Difference], *, gains: bool = False) -> Difference:
    """Return the difference that a sentence states: the largest significant one.

    If no difference is significant, return the largest difference on which a verdict is possible
    (:attr:`Difference.known`).  If there is no such difference, return the largest of all.

    If several differences are significant, two rules narrow the choice, one after the other.  A rule that would leave
    no difference is skipped.

    * The first rule applies if ``kind`` is a speed (step time, tokens/s, net speed-up) or the loss.  It keeps the
      differences of strategies without changes, of strategies with a method of a user's own, and of controls
      (configurations with a deliberate fault).
    * The second rule applies if ``kind`` is a speed, or if ``gains`` is true.  It keeps improvements.
    """
    known = [each for each in differences if each.known]
    shown = [each for each in known if each.effect.significant]
    if shown:
        shown = [each for each in shown if each.preset and kind in (*_SPEEDS, "loss")] or shown
        better = [each for each in shown if each.effect.verdict == "better"]
        shown = better if better and (gains or kind in _SPEEDS) else shown
    return max(shown or known or differences, key=lambda each: each.effect.size)


def _counts(
    kind: str, differences: Sequence[Difference], controls: Sequence[Verdict] = (), *, such: bool = False
) -> str:
    """Return the clause ``; of 9 comparisons of step time, 8 are better and 1 is worse``.

    The clause is empty if there is only one comparison.

    Args:
        kind: The quantity that is compared.
        differences: The comparisons.
        controls: Verdicts on controls, which are configurations with a deliberate fault.  They are not counted as
            comparisons; their verdicts follow: ``; the control is worse``.
        such: Whether the page also has other comparisons.  The clause then says ``; of 4 such comparisons, ...``.
    """
    if len(differences) < 2:
        return ""
    quantity = f" of {_IN_WORDS[kind]}" if kind in _IN_WORDS else ""
    counted_verdicts = _verdicts_in_words([each.effect.verdict for each in differences])
    comparisons = "such comparisons" if such else f"comparisons{quantity}"
    text = f"; of {len(differences)} {comparisons}, {counted_verdicts}"
    if len(controls) == 1:
        return f"{text}; the control is {controls[0]}"
    return text + (f"; of {len(controls)} controls, {_verdicts_in_words(controls)}" if controls else "")


def _verdicts_in_words(found: Sequence[Verdict]) -> str:
    """Return text that counts the verdicts of each kind: ``8 are better and 1 is worse``."""
    counts = Counter(found)
    verdicts: tuple[Verdict, ...] = (
        "better",
        "worse",
        "higher within the margin",
        "not significant",
        "inconclusive",
    )
    parts = [
        f"{counts[name]} {'is' if counts[name] == 1 else 'are'} {name}" for name in verdicts if counts[name]
    ]
    return listed(parts)


def _claim(kind: str, difference: Difference, steps: int = -1) -> tuple[str, str]:
    """Return two texts: a clause that states a difference in the quantity ``kind``, and its interval in parentheses.

    The second text also gives the number of values.  It is empty for a quantity that is counted exactly, such as bytes,
    and has no interval.  ``steps`` is the number of training steps that the previous sentence names, or -1 if it names
    none; the clause does not repeat the number.
    """
    effect, name, base = difference.effect, difference.name, difference.base
    change, value = effect.change, effect.change.estimate
    form: Callable[[float], str] = "{:.2f}".format
    ends = (change.low, change.high)
    held, of_base = _three_digits(effect.value.estimate), _three_digits(effect.base)
    match kind:
        case "loss":
            form = "{:.3f}".format if abs(value) >= 0.01 else "{:.4f}".format
            ends, side = (ends, "higher") if value >= 0 else ((-change.high, -change.low), "lower")
            loss = (
                f"{whose('validation loss', name)} is {form(abs(value))} nats {side} than {whose('', base)}"
            )
            claim = loss if effect.steps == steps else f"after {effect.steps:,} steps {loss}"
        case "bytes":
            form, of = _three_digits, "of" if value <= 1 else "times"
            claim = f"{name} sends {form(value)} {of} {whose('bytes', base)} between nodes"
        case "error":
            form = two_digits
            error = whose("gradient error (vNMSE)", name)
            claim = f"{error} is {form(value)}x {whose('', base)}"
        case "memory":
            claim = f"{name} holds {held} MiB a rank where {base} holds {of_base} MiB"
        case "size" if value == 0:
            claim = f"{name} trained no model where {base} trained one of {of_base} M parameters"
        case "size":
            model = f"the largest model that {name} trained has {held} M parameters"
            claim = f"{model}, where {whose('', base)} has {of_base} M"
        case "net" if value < 1:
            ends = (1 / change.high, 1 / change.low)
            final_loss = whose("final validation loss", base)
            claim = f"{name} takes {form(1 / value)}x as long to reach {final_loss}"
        case "net":
            claim = f"{name} reaches {whose('final validation loss', base)} {form(value)}x as fast"
        case "nodes":
            claim = f"{whose('tokens/s of all ranks', name)} change by a factor of {form(value)}"
        case "tokens":
            claim = f"{name} decodes {form(value)}x as many tokens/s as {base}"
        case _ if value < 1:
            ends = (1 / change.high, 1 / change.low)
            claim = f"a step of {name} takes {form(1 / value)}x as long as {whose('', base)}"
        case _:
            claim = f"{name} is {form(value)}x faster than {base}"
    return claim, evidence(kind, effect, form, ends)


def evidence(
    kind: str,
    effect: Effect,
    form: Callable[[float], str] = "{:.2f}".format,
    ends: tuple[float, float] | None = None,
) -> str:
    """Return the interval of an effect and its number of values: `` (95 % CI 1.72 to 1.84, n = 12)``.

    An effect is the comparison of a configuration with its baseline in one quantity, ``kind``.  ``form`` formats the
    two ends of the interval.  ``ends`` are the ends to print, by default the effect's own.
    A net speed-up (``kind`` is ``net``) has no number of values, since it is the product of two samples.  The text is
    empty for a quantity that is counted exactly, such as bytes.
    """
    if effect.counted:
        return ""
    change = effect.change
    low, high = (change.low, change.high) if ends is None else ends
    within = f" {WITHIN_START}" if change.within_start else ""
    if kind == "net":
        return f" (95 % CI{within} {form(low)} to {form(high)})"
    values = counted(change.n, "seed") if kind == "loss" else f"n = {change.n}"
    at = f" at {change.occasions} occasions" if change.occasions > 1 else ""
    left = (
        f", {change.left_out} disturbed left out" if change.left_out else ", all disturbed" * change.disturbed
    )
    return f" (95 % CI{within} {form(low)} to {form(high)}, {values}{at}{left})"


def whose(thing: str, name: str) -> str:
    """Return words that say to which configuration a thing belongs: ``ZeRO++'s loss``.

    For names with other characters than letters, digits, ``+`` and ``-``, the words are ``the loss of ZeRO++ (weights
    int4:64)``.  If ``thing`` is empty, they are ``ZeRO++'s``, or ``that of ZeRO++ (weights int4:64)``.
    """
    if name.replace("+", "").replace("-", "").isalnum():
        return f"{name}'s {thing}".strip()
    return f"{f'the {thing}' if thing else 'that'} of {name}"


def _noun(kind: str) -> str:
    """Return the word for one of the values from which a quantity is computed: ``seed``, ``repeat`` or ``pair``.

    It is ``seed`` for losses, ``repeat`` for the quantity ``nodes`` (throughput on more nodes), and ``pair`` otherwise.
    """
    return {"loss": "seed", "nodes": "repeat"}.get(kind, "pair")


def _why(kind: str, effect: Effect) -> str:
    """Return text that says why a verdict on ``effect`` is impossible: ``one seed; a verdict needs six``.

    An effect is the comparison of a configuration with its baseline in one quantity, ``kind``.
    """
    change = effect.change
    if effect.why:
        return effect.why
    measured = change.n + change.left_out
    if change.left_out and measured >= FEWEST:
        undisturbed = f"{_WORDS.get(change.n, change.n)} undisturbed of {_in_words(measured, _noun(kind))}"
        return f"{undisturbed}; a verdict needs {_WORDS[FEWEST_UNDISTURBED]}"
    disturbed = f", {change.left_out} disturbed left out" if change.left_out else ""
    disturbed = ", all disturbed" if change.disturbed else disturbed
    return f"{_in_words(change.n, _noun(kind))}{disturbed}; a verdict needs {_WORDS[FEWEST]}"


def _in_words(number: int, noun: str) -> str:
    return f"{_WORDS.get(number, number)} {noun}{'' if number == 1 else 's'}"


def differences_of(
    derived: Derived, asked: Quantity, found: Mapping[Key, Effect], compared: Sequence[Key]
) -> list[Difference]:
    """Return the differences of the configurations ``compared`` from their baselines, with the words for sentences.

    A control is a configuration with a deliberate fault, with which a suite shows that it would notice this fault.
    Controls are left out if there are at least two other configurations.

    Args:
        derived: The records.
        asked: The quantity that the suite asks for.  If it is ``loss``, the words mention the margin of losses; if it
            is ``rate``, they give break-even rates (at which a configuration is as fast as its baseline).
        found: Comparisons with the baseline in one quantity, by (setting, configuration).
        compared: The keys of ``found`` for which differences are returned, in this order.
    """
    trial_of, first = derived.frames.trial_of, derived.finished.drop_duplicates("configuration")
    trials = {
        name: trial_of[identity] for name, identity in zip(first["configuration"], first["id"], strict=True)
    }
    without = [key for key in compared if trials[key[1]].control is None]
    keys = without if len({name for _, name in without}) > 1 else compared
    bases, places = effects.beside(derived), places_of(derived)
    notes = dict.fromkeys(keys, "")
    for key in keys:
        peer = PEERS.get(trials[key[1]].strategy)
        if peer is not None and peer.family != "single":
            settings = trials[key[1]].peer
            notes[key] += f"; {key[1]} sends {peer.wire(settings.compute, settings.reduce_dtype)}"
    sequels = {key: _break_evens(derived, key) for key in keys} if asked == "rate" else {}
    if asked == "loss":
        margins = {
            (row["setting"], row["configuration"]): row["margin"] for row in loss_verdicts.losses(derived)
        }
        sides = {"not significant": "within", "higher within the margin": "within", "worse": "beyond"}
        steps = f" ({loss_verdicts.allowed(derived)} of training)" if derived.frames.margin else ""
        notes |= {
            key: notes[key] + f", {sides[verdict]} the margin of {two_digits(margins[key])} nats{steps}"
            for key in keys
            if (verdict := found[key].verdict) in sides
        }
    overall = effects.all_baselines(derived)
    return [
        Difference(
            found[key], spelled(key[1]), spelled(next(iter(bases.get(key, overall)), "")),
            f"within {key[0]} without activations, " if asked == "size" else places.get(key[0], ""), notes[key],
            sequels.get(key, ""),
            preset=key[1] == name_of(trials[key[1]].strategy)
            or has_own_method(trials[key[1]])
            or trials[key[1]].control is not None,
        )
        for key in keys
    ]  # fmt: skip


def places_of(derived: Derived) -> dict[str, str]:
    """Return words that tell the settings apart, such as ``with 50 Mbit/s, ``, by the setting's hash.

    A setting is the cluster, model, batch and so on.  The words name one field whose value is different in every
    setting.  If there is no such field, they name all fields in which any settings differ.  The dict is empty if there
    is a single setting.
    """
    titles = titles_of(derived.finished[["setting", "where"]])
    if len(titles) < 2:
        return {}
    parts = {setting: title.split(", ") for setting, title in titles.items()}
    counts = Counter(field for fields in parts.values() for field in set(fields))
    # Settings with different optimizers have different numbers of parts.  Names precede arguments, so the parts that
    # all settings have are at the beginning.
    columns = list(zip(*parts.values(), strict=False))
    distinct = [fields for fields in columns if all(counts[field] == 1 for field in fields)]
    distinct.sort(key=lambda fields: not fields[0].startswith("model "))
    titles = dict(zip(parts, distinct[0], strict=True)) if distinct else titles
    return {setting: f"with {title}, " for setting, title in titles.items()}


def _of_nodes(derived: Derived) -> list[Difference]:
    """Return how the throughput of each configuration grows with the number of nodes, as differences for sentences.

    A difference states the tokens/s on the most nodes over the tokens/s on the fewest nodes.  There is one for each
    configuration and each way of scaling: with equal batches on each rank, and with equal batches on all ranks
    together.
    """
    batches = {"weak": "a rank", "strong": "in all"}
    return [
        Difference(
            effect, spelled(name), "", f"from {first} to {last} nodes with equal batches {batches[kind]}, "
        )
        for kind, name, first, last, effect in effects.scaling(derived)
    ]


def _break_evens(derived: Derived, key: Key) -> str:
    """Return sentences on a configuration's break-even rates; a space precedes each sentence.

    A break-even rate is a rate of the link at which the configuration is as fast as its baseline.  Settings (cluster,
    model, batch and so on) that differ in the link's rate alone form a group, and there is one sentence for each group.
    ``key`` is (setting, configuration): the sentence on the group of this setting comes first.  If there are more than
    :data:`_MOST_SIZES` groups, only this sentence is returned.  The text is empty if the configuration ran at a single
    rate in the group of this setting.
    """
    elsewhere = derived.trials.loc[derived.trials["setting"].eq(key[0]), "elsewhere"].iloc[0]
    rows = derived.break_evens
    rows = rows[rows["configuration"].eq(key[1])]
    found_at = {
        where: (found, high)
        for where, found, high in rows[["elsewhere", "found", "high_mbit"]].itertuples(index=False)
    }
    if elsewhere not in found_at:
        return ""
    names = common_and_rest(found_at)[1]
    others = [where for where in found_at if where != elsewhere]
    shown = [elsewhere, *others] if len(found_at) <= _MOST_SIZES else [elsewhere]
    found_in_words = [(names[where], _at_size(spelled(key[1]), *found_at[where])) for where in shown]
    return "".join(
        f" With {name}, {clause}." if name else f" {clause}." for name, clause in found_in_words if clause
    )


def _at_size(name: str, found: break_even.BreakEven, high_mbit: float) -> str:
    """Return a clause on a configuration's break-even rates: ``ZeRO++ breaks even at 96.1 (90.2 to 104) Mbit/s``.

    Args:
        name: Name of the configuration.
        found: The link rates at which the configuration is as fast as its baseline.
        high_mbit: The highest measured rate in Mbit/s.

    If there are no such rates, the clause says why, or that the configuration is faster at every rate or at none.  It
    is empty if there are too few repeats for an interval.
    """
    highest = f"{_three_digits(high_mbit)} Mbit/s"
    match found.outcome:
        case "crosses":
            return f"{name} breaks even at {break_even.crossings_in_words(found)} Mbit/s"
        case "pays":
            return f"{name} is faster at every measured rate, up to {highest}"
        case "costs":
            return f"{name} is faster at no measured rate, up to {highest}"
    if found.few:
        return ""
    speedup = "its speed-up, interpolated between measured rates, is"
    return f"{whose('break-even', name)} is not determined: {speedup} {break_even.unclear_in_words(found)}"


def _on_trials(derived: Derived) -> str:
    finished, failed = len(derived.finished), len(derived.frames.failures)
    if stopped := derived.frames.interrupted:
        return f"Inconclusive: {stopped} of {counted(finished + failed + stopped, 'trial')} were interrupted."
    if failed:
        return f"{failed} of {counted(finished + failed, 'trial')} failed."
    return f"All {counted(finished, 'trial')} finished."


def _nothing_finished(derived: Derived) -> str:
    failed, stopped = len(derived.frames.failures), derived.frames.interrupted
    ended = [f"{failed} failed"] * (failed > 0)
    ended += [f"{stopped} {'was' if stopped == 1 else 'were'} interrupted"] * (stopped > 0)
    return f"No trial has finished: {listed(ended)}."


def _nothing_compared(derived: Derived) -> str:
    """Return the sentence for a page without comparisons, which says how many trials finished and what is missing."""
    failed, compared = len(derived.frames.failures), derived.compared
    beside = f"; {counted(failed, 'trial')} failed" if failed else ""
    finished = f"{counted(len(derived.finished), 'trial')}"
    if not compared.baseline:
        return f"Nothing is compared: {finished} finished, but none of the baseline that the suite names{beside}."
    if compared.contrast:
        shared = "no configuration shares setting, seed and repeat with the baseline"
        return f"Nothing is compared: {finished} finished, and {shared}{beside}."
    return f"Nothing is compared: {finished} finished, all of {spelled(compared.baseline)}{beside}."


def caveat(derived: Derived) -> str:
    """Return a sentence that says why the page's seconds are unreliable; empty if they are reliable.

    Seconds are unreliable if other programs took much processor time during most trials (disturbed trials), or if the
    link was faster for some configurations of a setting than for others.
    """
    clauses: list[str] = []
    if derived.mostly_disturbed:
        trials = f"{len(derived.disturbed)} of {counted(len(derived.finished), 'trial')}"
        clauses.append(
            f"in {trials} other programs and the hypervisor together took more than {OTHERS_WITHIN:.0%} of "
            "the processors' time"
        )
    if differing := len(derived.differing):
        apart = f"achieved rates more than {speedups.RATES_AGREE_WITHIN:.0%} apart"
        clauses.append(f"in {counted(differing, 'setting')} the links of compared configurations {apart}")
    return f"The seconds are unreliable: {'; '.join(clauses)}." if clauses else ""
