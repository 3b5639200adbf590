"""What each contender changes beside what it is compared with: numbers, verdicts, and words for them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pandas as pd

from harness.records.confidence_intervals import FEWEST, FEWEST_SWEEPS, Interval, quantile
from harness.records.memory_parts import on_device
from impl.codecs.codec import CodecError, parse
from report.data import speedups
from report.data.contender import NAMES, field_text, fields_of
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import counted, listed, number, with_interval
from report.draw.names_of_rows import titles_of

YES: Final = "yes"
NO: Final = "no"
OPEN: Final = "cannot be told"
MOST_NAMED: Final = 9  # contenders in a sentence
_MOST_PAIRS: Final = 200  # beyond which no number of further pairs is named
_FEW: Final = 2  # contenders that are told apart with the names of their fields
_HOST: Final = "on the host"  # ends the names of fields
_USUAL: Final = {"chunks": "1", f"optimizer {_HOST}": "0", f"weights {_HOST}": "0", "hpZ copy": "frames"}
g3: Final = number(3)
g2: Final = number(2)


@dataclass(frozen=True)
class Effect:
    """One contender beside its baseline in one cell."""

    contender: str
    base: str
    where: str  # the cell's description
    pairs: pd.DataFrame  # its rows of :func:`report.data.speedups.pairs`
    ratio: Interval  # the baseline's seconds of a step over the contender's: above 1 the contender is faster

    @property
    def verdict(self) -> str:
        """Whether the contender is faster."""
        return is_faster(self.ratio)

    @property
    def cell(self) -> str:
        """The cell's hash."""
        return str(self.pairs["cell"].iloc[0])

    @property
    def count(self) -> str:
        """``6 pairs``, and in how many sweeps."""
        of = f" in {self.ratio.sweeps} sweeps" if self.ratio.sweeps > 1 else ""
        return f"{counted(self.ratio.n, 'pair')}{of}"

    @property
    def intervals(self) -> str:
        """Which intervals stand beside ratios like this one's."""
        return f"95 % intervals of {self.count}" if self.ratio.known else f"{self.count}, no interval"

    @property
    def bytes_ratio(self) -> float:
        """Bytes between nodes over the baseline's, by the ledger, else by the interfaces; NaN of neither."""
        ledger = float(self.pairs["bytes_ratio"].median())
        return float(self.pairs["interface_ratio"].median()) if math.isnan(ledger) else ledger


@dataclass(frozen=True, slots=True)
class Found:
    """What answers by one quantity."""

    first: str  # the sentence that answers
    # of what it compares: yes, no, or cannot be told; none for a question of how much
    verdicts: Sequence[str] = ()
    effects: Sequence[Effect] = ()  # those whose bytes and other quantities belong beside it
    more: Sequence[str] = ()  # further sentences, in order
    figure: str = ""  # name of the one that shows it, where it is not its quantity's


def is_faster(found: Interval) -> str:
    """``yes`` if a ratio lies above 1, ``no`` if below, else and without an interval ``cannot be told``."""
    if not found.known or found.contains(1.0):
        return OPEN
    return YES if found.estimate > 1 else NO


def effects(derived: Derived) -> list[Effect]:
    """Every contrast of every cell, in page order."""
    rows = derived.pairs[derived.pairs["contender"] != derived.pairs["baseline_contender"]]
    return _effects(rows, derived.compared.contrast)


def between(derived: Derived, base: str, others: Iterable[str]) -> list[Effect]:
    """The same for contenders beside one that is not the table's baseline."""
    return _effects(speedups.pairs(derived.trials, derived.trials["contender"].eq(base)), others)


def _effects(rows: pd.DataFrame, contenders: Iterable[str]) -> list[Effect]:
    rows = rows[rows["contender"].isin(list(contenders))]
    named = ["cell", "contender", "baseline_contender", "where"]
    return [
        Effect(contender, base, where, mine, speedups.speedup(mine))
        for (_, contender, base, where), mine in groups(rows, named)
    ]


def variants(derived: Derived) -> list[list[str]]:
    """Contenders of one strategy, a list for each that has several; the preset is first."""
    found = derived.trials.drop_duplicates("contender")
    found = found[~found["id"].isin([one for one, trial in derived.frames.trial_of.items() if trial.control])]
    lists = [
        sorted(mine.sort_values("first")["contender"], key=lambda name: name != NAMES.get(strategy))
        for (strategy,), mine in groups(found.sort_values("place", kind="stable"), ["strategy"])
    ]
    return [names for names in lists if len(names) > 1]


def errors(derived: Derived) -> pd.Series[float]:
    """Error end to end (vNMSE) by cell and contender: the median over measured steps and trials."""
    found = derived.sent_errors
    found = found[(found["purpose"] == "gradients") & found["hop"].isna() & found["repeated"].eq(1)]
    return found.groupby(["cell", "contender"], sort=False)["vnmse"].median()


def device_mib(derived: Derived, contender: str, source: str = "engine") -> float:
    """MiB of the fullest rank, median over trials: held on the device, or ``copied`` to and fro in a step."""
    memory, ran = derived.frames.memory, derived.finished
    ids = ran[ran["contender"] == contender]["id"]
    held = memory[memory["id"].isin(ids) & (memory["source"] == source)]
    if source == "engine":
        held = held[held["part"].isin(on_device(dict.fromkeys(held["part"], 0)))]
    return float(held.groupby(["id", "rank"])["bytes"].sum().groupby("id").max().median() / 2**20)


def would_tell(found: Sequence[Effect]) -> str:
    """How many pairs, or sweeps, would tell; of those without an interval, why there is none."""
    first = found[0].ratio
    if not first.known:
        return too_few(first)
    needed = max(_pairs_needed(effect.ratio) for effect in found)
    more = "more than " if needed == _MOST_PAIRS else ""
    return f"{more}{needed} {'sweeps' if first.sweeps > 1 else 'pairs'} would tell"


def _pairs_needed(found: Interval) -> int:
    """How many pairs would tell the two apart, if their ratio and its spread stay; _MOST_PAIRS at most."""
    if not found.known:
        return FEWEST
    count, far = found.n if found.sweeps == 1 else found.sweeps, abs(math.log(found.estimate))
    spread = math.log(found.high / found.estimate) / quantile(count - 1) * math.sqrt(count)
    enough = (n for n in range(FEWEST, _MOST_PAIRS) if quantile(n - 1) * spread / math.sqrt(n) < far)
    return next(enough, _MOST_PAIRS)


def too_few(found: Interval) -> str:
    """Why there is no interval."""
    if found.sweeps > 1 and found.n >= FEWEST:
        return f"{found.sweeps} sweeps, where an interval takes {FEWEST_SWEEPS}"
    return f"{counted(found.n, 'pair')}, where an interval takes {FEWEST}"


def listed_most(words: Sequence[str]) -> str:
    """Join words as ``a, b and c``; beyond :data:`MOST_NAMED` with the number of those that are left out."""
    more = len(words) - MOST_NAMED
    return listed(words) if more <= 0 else f"{listed(words[:MOST_NAMED])} ({more} more in the tables)"


def ratio(found: Interval) -> str:
    """``2.30 (2.12 to 2.50)``."""
    return with_interval(found, "{:.2f}".format)


def is_named(derived: Derived, name: str) -> bool:
    """Whether the question names a contender."""
    return name in " ".join(derived.frames.questions)


def named_first(derived: Derived, names: Iterable[str]) -> list[str]:
    """Distinct contenders that the question names, in its order; then the others, in theirs."""
    text, names = " ".join(derived.frames.questions), dict.fromkeys(names)
    found = {}
    for name in sorted(names, key=len, reverse=True):  # qwZ+hpZ before qwZ, flat ZeRO-3 before ZeRO-3
        at = text.find(name)
        found[name] = at if at >= 0 else math.inf
        text = text.replace(name, " " * len(name))
    return sorted(names, key=found.__getitem__)


def spelled(name: str) -> str:
    """A contender's name in a sentence: ``w`` and ``g``, the fields of its codecs, are written out."""
    return re.sub(r"(?<=[( ])g (?=\S)", "gradients ", re.sub(r"(?<=[( ])w (?=\S)", "weights ", name))


def strategy(name: str) -> str:
    """A contender's name without its changes."""
    return name.partition(" (")[0]


def apart(derived: Derived, names: Sequence[str]) -> dict[str, str]:
    """Names of contenders of one strategy by the fields in which they differ, ``blocks of 64`` where only the
    blocks of their codecs do; else their own.
    """
    own = {name: spelled(name) for name in names}
    ran = derived.finished.drop_duplicates("contender").set_index("contender")
    trials = {name: derived.frames.trial_of[str(ran.loc[name, "id"])] for name in own}
    if len(own) < 2 or len({(trial.strategy, trial.control) for trial in trials.values()}) > 1:
        return own
    fields = {name: fields_of(trial.resolved_policy(), trial.topology()) for name, trial in trials.items()}
    keys = [key for key in fields[names[0]] if len({one.get(key) for one in fields.values()}) > 1]
    blocks = {name: _block([one[key] for key in keys]) for name, one in fields.items()}
    shapes = {str([one[key].split(":")[0] for key in keys]) for one in fields.values()}
    if all(blocks.values()) and len(shapes) == 1 and len({*blocks.values()}) == len(blocks):
        return blocks
    codecs = [key for key in keys if key in ("weights", "gradients")]
    bare = codecs[0] if len(codecs) == 1 and len(names) > _FEW else ""
    found = {name: _words(keys, one, bare, _USUAL) for name, one in fields.items()}
    if all(key.endswith(_HOST) for key in keys):
        found = {name: said or f"nothing {_HOST}" for name, said in found.items()}
    elif not all(found.values()):
        found = {name: _words(keys, one, bare, {}) for name, one in fields.items()}
    return found if len(set(found.values())) == len(found) and all(found.values()) else own


def _words(keys: Sequence[str], fields: Mapping[str, str], bare: str, usual: Mapping[str, str]) -> str:
    """Fields of a policy in words, without those that have their usual value."""
    said = [_word(key, fields[key], bare) for key in keys if fields[key] != usual.get(key)]
    return ", ".join(filter(None, said))


def _word(key: str, value: str, bare: str) -> str:
    """A field of a policy in words; the codec of ``bare`` stands alone."""
    if value == "none":
        return f"no {key}" if not bare else ""
    if key == "reduce":
        return {"one_hop": "one hop", "two_hop": "two hops"}.get(value, value)
    if key.endswith(_HOST):
        share = "" if value == "1" else "half the " if value == "0.5" else f"{value} of the "
        return f"{share}{key}"
    return value if key == bare else spelled(f"({field_text(key, value)})")[1:-1]


def _block(codecs: Sequence[str]) -> str:
    """``blocks of 64`` if all are codecs with blocks of 64; else nothing."""
    try:
        block, *others = {str(getattr(parse(text), "block", "")) for text in codecs}
    except CodecError:
        return ""
    if others or not block:
        return ""
    return "one scale a shard" if block == "shard" else f"blocks of {block}"


def titles(found: Sequence[Effect]) -> dict[str, str]:
    """Short titles of the effects' cells: the model, where that tells them apart."""
    long = titles_of(pd.concat([effect.pairs[["cell", "where"]] for effect in found]))
    models = {cell: part for cell, of in long.items() for part in of.split(", ") if part.startswith("model ")}
    return models if len(long) > 1 and len({*models.values()}) == len(long) else long


def seconds(effect: Effect) -> str:
    """The steps behind a ratio, and where they were measured."""
    columns = ("step_seconds", "baseline_seconds")
    ours, base = (speedups.step_interval(effect.pairs, name).estimate for name in columns)
    rate = effect.pairs["achieved_mbit"].median()
    link = "" if math.isnan(rate) else f"; the link achieved {rate:.3g} Mbit/s"
    return (
        f"A step of {spelled(effect.contender)} takes {g3(ours)} s where {spelled(effect.base)}'s takes "
        f"{g3(base)} s (geometric means of the pairs, on {effect.where}{link})."
    )


def sent(found: Sequence[Effect]) -> str:
    """What contenders send between nodes beside their baseline; empty where it is not known."""
    once: dict[str, Effect] = {}
    for one in found:
        if not math.isnan(one.bytes_ratio) and one.base == found[0].base:
            once.setdefault(one.contender, one)
    if not once:
        return ""
    main, *others = once.values()
    ours, base = (main.pairs[name].median() / 1e6 for name in ("sent_bytes", "baseline_sent_bytes"))
    in_mb = "" if math.isnan(ours + base) else f" ({g3(ours)} MB a step against {g3(base)} MB)"
    first = f"{spelled(main.contender)} sends {main.bytes_ratio:.3f} of {spelled(main.base)}'s bytes{in_mb}"
    rest = [f"{spelled(one.contender)} {one.bytes_ratio:.3f}" for one in others]
    return f"Between nodes {listed_most([first, *rest])}."
