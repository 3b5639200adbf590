"""Computes what the head of a page shows: sentences on the largest differences, a table, and the name of a figure.

The table has the verdicts.  A verdict says whether a configuration is better or worse than its baseline in one
quantity.
Definitions: docs/reference/metrics.md, Verdicts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import pandas as pd

from harness.records.confidence_intervals import Interval, Prediction, of_another_run
from harness.suites.answering_quantity import Quantity, quantity
from harness.suites.peers import PEERS, family_of
from harness.suites.trial import Trial
from report.data import break_even, bytes_and_memory, caveats, decoding, speedups
from report.data.configuration import NAMES, differences_of, spelled
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import NOTHING, counted, listed, lowest_to_highest, number, plus_or_minus
from report.draw.names_of_rows import by_configuration, peers_note, titles_of
from report.effects import effects, loss_verdicts
from report.effects.effects import Effect, Key, Verdict
from report.effects.net_speed import seconds_behind, sources
from report.effects.step_seconds import derive_folder
from report.further.head import Head
from report.further.libraries import on_libraries
from report.further_sentences import MOST, further_sentences
from report.sentence import Sentence, caveat, on_peers, sentence, two_digits
from report.tables.peers import FAMILIES, ours_over_peers, peers
from report.tables.phases import NOUNS, speeds_in
from report.tables.table import CONFIGURATION, Column, Table, interval_notes

MARKS: Final[dict[Verdict, str]] = {
    "better": "▲", "worse": "▼", "higher within the margin": "▽", "not significant": "○", "inconclusive": "?",
    "not measured": NOTHING,
}  # fmt: skip
"""The mark that follows a number of the table, so that its verdict can be read without colours."""
MOST_OPEN: Final = 12  # at most so many rows of the table are shown unfolded
_BASELINE: Final = "baseline"
_FIGURES: Final[dict[Quantity, str]] = {
    "loss": "final_loss", "step": "speedup", "bytes": "volume", "error": "sent_error", "memory": "memory",
    "trials": "speedup", "rate": "speedup_over_rates", "nodes": "scaling", "size": "largest_model",
    "tokens": "generation",
}  # fmt: skip
_g3, _ratio = number(3), "{:.2f}".format


@dataclass(frozen=True, slots=True)
class _Quantity:
    """One quantity of the table of verdicts: its column, and the function that compares configurations by it."""

    key: str  # the column's name in the CSV; the verdicts are in the column KEY_verdict
    title: str
    form: Callable[[float], str]  # formats a number
    # Returns, from the records, the effect of each configuration in each setting on this quantity.
    effects_of: Callable[[Derived], dict[Key, Effect]]
    # The number that the row of a baseline shows, such as 1 for a ratio.  NaN: the row shows the baseline's own value.
    of_baseline: float = math.nan


_QUANTITIES: Final = {
    "step": _Quantity("speedup", "Speed-up", _ratio, effects.speeds, 1.0),
    **{
        phase: _Quantity(f"speedup_{phase}", f"Speed-up in {noun}", _ratio, partial(speeds_in, phase), 1.0)
        for phase, noun in NOUNS.items()
    },
    "net": _Quantity("net_speedup", "Net speed-up", _ratio, effects.net_speeds, 1.0),
    "bytes": _Quantity("bytes_share", "Bytes between nodes", _g3, effects.sent, 1.0),
    "error": _Quantity("vnmse", "Error (vNMSE)", _g3, effects.errors),
    "loss": _Quantity("loss_difference", "Change of loss, nats", "{:+.4f}".format, effects.losses, 0.0),
    "memory": _Quantity("memory_mib", "Memory, MiB a rank", _g3, effects.memory),
    "size": _Quantity(
        "largest_model",
        "Largest model that trained, M parameters (activations not counted)",
        _g3,
        effects.largest_models,
    ),
}
"""The quantities in the order of their columns.

``size`` has a row for each memory limit instead of each setting, so it is not shown with other quantities.
"""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What the head of a page shows: its sentences, its table of verdicts, and the name of its figure.

    A verdict says whether a configuration is better or worse than its baseline in one quantity.
    """

    quantity: Quantity  # the quantity that the suite asks for
    first: str  # the first sentence, on the largest difference
    further: str  # the sentences that follow the first sentence; may be empty
    caveat: str  # a sentence that says why seconds are unreliable; empty if they are reliable
    figure: str  # name of the figure for this quantity
    table: Table  # the table of verdicts; without rows if nothing is compared
    open: tuple[int, ...]  # indices of the table's rows that a page shows unfolded

    @property
    def sentence(self) -> str:
        """The first sentence and the sentences ``further``, joined by a space."""
        return f"{self.first} {self.further}".rstrip()

    @property
    def lines(self) -> list[str]:
        """The texts of the head: first all sentences as one text, then the caveat, if there is one."""
        return [self.sentence, *filter(None, [self.caveat])]

    def parts(self, table: Table) -> tuple[Table, Table]:
        """Return two tables: the rows of ``table`` that the page shows unfolded, and the other rows of ``table``.

        ``table`` is the table of verdicts, possibly with other columns; it has the same rows as :attr:`table`.
        """
        is_open = table.data.reset_index(drop=True).index.isin(self.open)
        return replace(table, data=table.data[is_open]), replace(table, data=table.data[~is_open])


def of_folder(results: Path) -> Verdicts:
    """Return what the head of a results folder's page shows: sentences, the table of verdicts, and a figure's name.

    Raises a ReportError if the folder's records cannot be reported together (:func:`report.data.frames.load`).
    """
    return verdicts(derive_folder(results))


@lru_cache(maxsize=32)  # page, documents and terminal ask for it
def verdicts(derived: Derived) -> Verdicts:
    """Return what the head of these records' page shows: sentences, the table of verdicts, and a figure's name."""
    frames = derived.frames
    asked = quantity([frames.trial_of[identity] for identity in sorted(frames.trial_of)], frames.answer)
    names = {*derived.compared.contrast, *effects.all_baselines(derived)}
    found = {
        kind: {key: effect for key, effect in of.effects_of(derived).items() if key[1] in names}
        for kind, of in _QUANTITIES.items()
        if (kind == "size") is (asked == "size")
    }
    compared = {kind: _compared(derived, every) for kind, every in found.items()}
    kind = asked if compared.get(asked) else "step"
    table = _table(derived, asked, kind, found) if any(compared.values()) else _NONE
    ranked = {key: found[kind][key] for key in compared.get(kind, ())}
    over_libraries = ours_over_peers(derived) if kind == "step" and _mostly_peers(derived) else {}
    if over_libraries:
        head = Sentence(on_peers([*itertools.chain(*over_libraries.values())]))
        further = on_libraries(derived, over_libraries)
    else:
        head = sentence(derived, asked, kind, found.get(kind, {}), compared.get(kind, ()))
        further = [*head.likewise]
    if head.top is not None:
        about = Head(derived, asked, kind, found, _QUANTITIES[kind].effects_of, head.top)
        further = further_sentences(about, head.likewise)
    figure = "frontier" if asked == "loss" and _has_front(derived) else _FIGURES[asked]
    rows = _open_rows(table, ranked, None if head.top is None else head.top.effect)
    return Verdicts(asked, head.text, " ".join(further[:MOST]), caveat(derived), figure, table, rows)


def _mostly_peers(derived: Derived) -> bool:
    """Return whether more than half of the configurations are trained by DDP, FSDP2 or DeepSpeed.

    If so, the suite's question is taken to be about these libraries.
    """
    first = derived.finished.drop_duplicates("configuration")["id"]
    libraries = [family_of(derived.frames.trial_of[name].strategy) in FAMILIES for name in first]
    return 2 * sum(libraries) > len(libraries)


_NONE: Final = Table("verdicts", "Verdicts", "", pd.DataFrame(), ())


def _compared(derived: Derived, found: Mapping[Key, Effect]) -> list[Key]:
    """Return the keys of ``found`` that were measured and whose configuration is compared with a baseline.

    ``found`` has the effects (comparisons with the baseline) in one quantity, by (setting, configuration).
    """
    return [key for key, effect in found.items() if key[1] in derived.compared.contrast and effect.size >= 0]


def _has_values(derived: Derived, found: Mapping[Key, Effect]) -> bool:
    """Return whether a quantity's column in the table of verdicts has a value in any row that is not a baseline's.

    ``found`` are the effects (comparisons with the baseline) in the quantity, and a value is a number or a text.  The
    column has no values, for example, if the quantity is step time and the ranks were threads, whose steps are not
    timed.
    """
    own = [effect for key, effect in found.items() if key[1] in derived.compared.contrast]
    return any(effect.text or not math.isnan(effect.value.estimate) for effect in own)


def _table(derived: Derived, asked: Quantity, kind: str, found: Mapping[str, Mapping[Key, Effect]]) -> Table:
    """Return the table of verdicts: a row for each setting and configuration, the setting's baselines first.

    A setting is the cluster, model, batch and so on.

    Args:
        derived: The records.
        asked: The quantity that the suite asks for.
        kind: The quantity that the page's first sentence reports; it may differ from ``asked``.  After its column come
            two more: the interval in which a new run is expected, and the number of values (n).
        found: By quantity, the comparison of each configuration with its baseline in each setting.
    """
    shown = {name: of for name, of in _QUANTITIES.items() if _has_values(derived, found.get(name, {}))}
    own, own_title = _own_column(derived, asked)
    # The trial whose changes a row shows: one of its own setting, since "a node" has other ranks in another setting.
    # Largest models are compared by memory limit, and not by setting.
    trials: dict[Key, Trial] = {}
    for setting, name, identity in derived.finished[["setting", "configuration", "id"]].itertuples(
        index=False
    ):
        for key in ((setting, name), ("", name)):
            trials.setdefault(key, derived.frames.trial_of[identity])
    rows: list[dict[str, Any]] = []
    beside = effects.beside(derived)
    for place, setting, names, bases in _places(derived, found.get("size", {})):
        for name in names:
            key, is_base = (setting, name), name in bases
            nearest = beside.get(key, bases)
            change = _BASELINE if is_base else ""
            if nearest and not is_base:
                own_trial, base_trial = (
                    trials.get((setting, each), trials["", each]) for each in (name, nearest[0])
                )
                change = differences_of(own_trial, base_trial)
            row = place | {"_setting": setting, "configuration": name, "change": change}
            for column, of in shown.items():
                row |= _cell(of, found[column].get(key), is_base=is_base)
            row["own"] = own.get(key, math.nan)
            effect = None if is_base else found[kind].get(key)
            is_sure = not (kind == "step" and derived.mostly_disturbed)
            rows.append(row | _expected(effect if is_sure else None, _QUANTITIES[kind].form))
    data = pd.DataFrame(rows)
    columns = [
        Column("setting", "Setting", place=True),
        CONFIGURATION,
        Column("change", "Change", names_row=False),
    ]
    for name, of in shown.items():
        columns.append(Column(f"_{of.key}", of.title, str))
        if name == kind:
            columns += [Column("_expected", "Expected in a new run", str), Column("n", "n", "{:.0f}".format)]
    columns.append(Column("own", own_title, _text_or_number, ends=False))
    kept = [column for column in columns if data[column.key].notna().any()]
    if len(set(data["setting"])) == 1:
        kept = kept[1:]
    left = [name for name in ("own", "setting") if name not in {column.key for column in kept}]
    data = data.drop(columns=left).dropna(axis="columns", how="all")
    notes = " ".join(filter(None, _footnotes(derived, data, shown)))
    return Table(
        "verdicts", "Verdicts", _caption(derived, shown, again="_expected" in data), data, tuple(kept), notes
    )


def _footnotes(derived: Derived, data: pd.DataFrame, shown: Mapping[str, _Quantity]) -> list[str]:
    """Return the notes below the table: on intervals, on trials that were left out, and on cells without a mark.

    Marks such as ▲ show verdicts.  Each note is one or a few sentences; a note may be empty.  ``data`` are the table's
    values, and ``shown`` the quantities that have a column.
    """
    one_value = "error" in shown and data[f"{shown['error'].key}_verdict"].eq("one value").any()
    columns = [
        Column(of.key, of.title)
        for name, of in shown.items()
        if of.key in data and not (name == "error" and one_value)
    ]
    behind = seconds_behind(derived) if "net" in shown else ()
    notes = interval_notes(data, columns, behind)
    cells = [str(cell) for of in shown.values() if f"_{of.key}" in data for cell in data[f"_{of.key}"]]
    pairs = derived.pairs[derived.pairs["id"] != derived.pairs["baseline"]]
    if "step" in shown and len(set(pairs["occasion"])) > 1:
        apart: dict[int, list[str]] = {}  # names of rows, by the number of occasions outside of the interval
        for (_, name), rows in groups(pairs, ["setting", "configuration"]):
            apart.setdefault(speedups.outside(rows), []).append(name)
        notes += [
            "Each interval is for the mean over all occasions. In "
            f"{'the row' if len(names) == 1 else 'each of the rows'} {listed(names)}, the mean of "
            f"{counted(count, 'occasion')} alone lies outside of the row's interval."
            for count, names in sorted(apart.items())
            if count
        ]
    notes.append(caveats.footnotes(cells).strip())
    ran = [NAMES[name].partition(",")[0] for name in derived.finished["strategy"].unique() if name in PEERS]
    if "memory" in shown and ran:
        notes.append(
            f"The memory of {listed([*dict.fromkeys(ran)])} is not compared: the count of a library's memory "
            "leaves out gathered weights and local gradients."
        )
    if "net" in shown:
        notes.append(
            "The net speed-up compares the times in which a configuration and the baseline reach the baseline's final "
            f"loss. The step times of a net speed-up are from {sources(derived)}."
        )
        if any("not reached" in cell for cell in cells):
            notes.append(
                'A cell with "not reached" has the final losses of the configuration and of the baseline and, where it '
                "is known, the net speed-up to the higher loss."
            )
    if one_value:
        notes.append(
            "Errors without a mark were measured in one trial only, so they have no interval and no verdict."
        )
    return [*notes, caveats.modelled_in_words(derived).strip()]


def _places(
    derived: Derived, sizes: Mapping[Key, Effect]
) -> Iterator[tuple[dict[str, Any], str, list[str], Sequence[str]]]:
    """Yield the groups of rows of the table of verdicts, as (cells, key, configurations, baselines).

    There is one group for each setting (cluster, model, batch and so on).  If a suite compares the largest models that
    fit into memory, ``sizes`` is not empty, and there is one group for each memory limit instead.

    * ``cells`` are the cells that all rows of the group share, by column.
    * ``key`` is the setting's hash, or the memory limit as text.
    * ``configurations`` are the names of the rows: the baselines, then the configurations compared with them.
    * ``baselines`` are the names of the baselines.

    Settings in which nothing is compared with a baseline have no group.
    """
    contrast, overall = derived.compared.contrast, effects.all_baselines(derived)
    if sizes:
        rows = bytes_and_memory.under_limits(derived)
        for limit in dict.fromkeys(limit for limit, _ in sizes):
            names = sorted(
                (name for each, name in sizes if each == limit), key=lambda name: name not in overall
            )
            yield {"setting": limit, "records": " ".join(sorted(rows["id"]))}, limit, names, overall
        return
    bases, titles = effects.baselines(derived), titles_of(derived.finished)
    for (setting,), trials in groups(derived.finished, ["setting"]):
        present, own = [name for name, _ in by_configuration(trials)], bases.get(str(setting), ())
        names = [*own, *(name for name in present if name in contrast and name not in own)]
        if len(names) > len(own):
            place = {"where": trials["where"].iloc[0], "setting": titles[str(setting)]}
            yield place, str(setting), names, own


def _cell(of: _Quantity, effect: Effect | None, *, is_base: bool) -> dict[str, Any]:
    """Return a row's entries for one quantity in the table's data: the value, the verdict and the printed text.

    ``effect`` is the comparison of the row's configuration with its baseline; None if there is none.  The keys of the
    result are columns of the table.  For the speed-up they are ``speedup``, ``speedup_verdict`` and ``_speedup``.
    ``is_base`` says whether the row is a baseline's.  In the row of a baseline, the verdict is ``baseline``, and the
    value is 1 for a ratio, 0 for a difference, and otherwise the baseline's own value.
    """
    value = effect.value if effect is not None else Interval(math.nan, math.nan, math.nan, 0)
    verdict, mark = "not measured", ""
    if is_base:
        verdict = _BASELINE
        if not math.isnan(of.of_baseline):
            value = Interval(of.of_baseline, math.nan, math.nan, 0)
    elif effect is not None:
        verdict, mark = effect.verdict, f" {MARKS.get(effect.verdict, '')}".rstrip()
    if math.isnan(value.estimate):
        text = effect.text if effect is not None and effect.text else NOTHING
        return {of.key: math.nan, f"{of.key}_verdict": verdict, f"_{of.key}": text}
    text = plus_or_minus(value, of.form)
    text += f" {caveats.TAKEN}" if value.disturbed else ""
    if of.key == "memory_mib" and effect is not None and effect.base > 0:
        text += f" ({value.estimate / effect.base:.2f})"
    return {of.key: value, f"{of.key}_verdict": verdict, f"_{of.key}": text + mark}


def _expected(effect: Effect | None, form: Callable[[float], str]) -> dict[str, Any]:
    """Return a row's entries for the interval in which a new run is expected, and for the number of values, ``n``.

    ``effect`` is the comparison of the row's configuration with its baseline.  All entries are NaN if there is no
    effect, or if the quantity is counted exactly (bytes, memory), since it does not vary.  In these cases only the
    expected interval is NaN, and ``n`` is given:

    * The effect has no interval, or has a reason against a verdict (``why``).
    * The effect's seconds were measured at one occasion (start of the machine), which says nothing about other
      occasions.

    If the interval was predicted for a certain computation time of a step, another entry
    ``expected_at_compute_seconds`` holds this time.
    """
    row: dict[str, Any] = dict.fromkeys(("expected_low", "expected_high", "_expected", "n"), math.nan)
    if effect is None or effect.counted:
        return row
    row["n"] = effect.change.n or math.nan
    if effect.value.known and not effect.why:
        again: Interval | Prediction = of_another_run(effect.value, ratio=effect.equal == 1)
        if effect.expected is not None:
            again = effect.expected
        if not math.isnan(again.low):
            row |= {"expected_low": again.low, "expected_high": again.high}
            row["_expected"] = f"{form(again.low)} to {form(again.high)}"
        if isinstance(again, Prediction) and not math.isnan(again.at):
            row |= {"expected_at_compute_seconds": again.at}
            row["_expected"] += f" at {again.at:.2g} s of computation"
    return row


def _own_column(derived: Derived, asked: Quantity) -> tuple[dict[Key, Any], str]:
    """Return the last column of the table of verdicts: its values, by (setting, configuration), and its title.

    The column shows the quantity that the suite asks for, if no other column shows this quantity:

    * ``asked`` is ``tokens`` or ``nodes``: tokens/s;
    * ``asked`` is ``rate``: break-even rates, the link rates at which a configuration is as fast as its baseline.

    For other quantities, there is no such column; values and title are empty.
    """
    keys = ["setting", "configuration"]
    if asked == "tokens":
        decoded = groups(derived.generations, keys)
        return {key: decoding.speed(trials) for key, trials in decoded}, "Tokens/s of a rank"
    if asked == "nodes":
        trained, column = groups(derived.trials, keys), "tokens_per_second"
        return {key: speedups.step_interval(own, column) for key, own in trained}, "Tokens/s"
    if asked == "rate":
        found = derived.break_evens
        places = zip(found["elsewhere"], found["configuration"], strict=True)
        texts = dict(zip(places, found["found"].map(_break_even), strict=True))
        settings = derived.trials.drop_duplicates(keys)[[*keys, "elsewhere"]].to_numpy()
        by_key = {(s, name): texts.get((elsewhere, name), math.nan) for s, name, elsewhere in settings}
        return by_key, "Break-even, Mbit/s"
    return {}, ""


def _break_even(found: break_even.BreakEven) -> str:
    names = {"pays": "none: faster at every measured rate", "costs": "none: slower at every measured rate"}
    return (
        break_even.crossings_in_words(found) if found.crossings else names.get(found.outcome, found.outcome)
    )


def _text_or_number(value: Any) -> str:
    return value if isinstance(value, str) else _g3(value)


def _caption(derived: Derived, shown: Mapping[str, _Quantity], *, again: bool) -> str:
    """Return the caption of the table of verdicts: what its numbers and marks mean, and when a loss counts as worse.

    ``shown`` are the quantities that have a column.  ``again`` says whether the table has the column "Expected in a
    new run".
    """
    base = spelled(derived.compared.baseline)
    margins = [row["margin"] for row in loss_verdicts.losses(derived) if row["margin"] > 0]
    has_margin = bool("loss" in shown and margins)
    marks = ", ".join(
        f"{mark} {verdict}"
        for verdict, mark in MARKS.items()
        if has_margin or verdict != "higher within the margin"
    )
    first = "Intervals are 95 % confidence intervals."
    if again:
        first += ' "Expected in a new run" is the interval in which the value of one further run is expected, for the '
        first += "quantity that the suite asks for."
    first += f" In parentheses after memory: its ratio to {base}'s memory." if "memory" in shown else ""
    first += f" Marks are the verdicts against {base} (docs/reference/metrics.md): {marks}."
    if has_margin:
        allowed = (
            f"{loss_verdicts.allowed(derived)} of {base}'s {'training' if derived.frames.margin else 'loss'}"
        )
        margin = lowest_to_highest(margins, two_digits)
        each = " in each setting" * (" to " in margin)
        rule = f"lies above the margin of {margin} nats ({allowed}{each})"
        otherwise = (
            "better if it lies below 0; higher within the margin if it lies between 0 and the margin; not significant "
            "if it contains 0 and ends below the margin"
        )
        first += f" A loss is worse if the interval of its change {rule}; {otherwise}."
    note = peers_note(derived.finished)
    if note and not peers(derived).data.empty:
        note += (
            ' The table "Steps compared with peers" compares configurations of the same types, and quantised ones with '
            "peers that send bf16."
        )
    return f"{first} {note}".rstrip()


def _open_rows(table: Table, ranked: Mapping[Key, Effect], first: Effect | None) -> tuple[int, ...]:
    """Return the indices of the rows that a page shows unfolded, at most :data:`MOST_OPEN`.

    ``ranked`` are the effects (comparisons with the baseline) by which rows are chosen, by (setting, configuration).
    If the table has at most :data:`MOST_OPEN` rows, all are shown.  Otherwise rows are added in this order while there
    is room: the row of effect ``first``, the rows of significant effects, and the rows of other effects.  Larger
    effects precede smaller effects of the same kind.  With each row, the row of its setting's baseline is added.
    """
    rows = table.data.to_dict("records")
    if len(rows) <= MOST_OPEN:
        return tuple(range(len(rows)))
    numbers = {(row["_setting"], row["configuration"]): number for number, row in enumerate(rows)}
    bases = {row["_setting"]: number for number, row in enumerate(rows) if row["change"] == _BASELINE}
    shown = set[int]()

    def rank(key: Key) -> tuple[bool, bool, float]:
        return ranked[key] is first, ranked[key].significant, ranked[key].size

    for key in sorted(ranked, key=rank, reverse=True):
        more = shown | {numbers[key], bases.get(key[0], numbers[key])}
        shown = more if len(more) <= MOST_OPEN else shown
    return tuple(sorted(shown))


def _has_front(derived: Derived) -> bool:
    """Return whether the page's figure is the Pareto front of bytes between nodes and loss.

    Returns True if :func:`report.effects.loss_verdicts.front` has exactly one setting (cluster, model, batch and so
    on), and the configurations in its table are of at least ``FEWEST_OF_FRONT`` different strategies.
    """
    front = loss_verdicts.front(derived)
    trials = derived.trials[derived.trials["configuration"].isin(front["configuration"])]
    return len(set(front["setting"])) == 1 and len(set(trials["strategy"])) >= loss_verdicts.FEWEST_OF_FRONT
