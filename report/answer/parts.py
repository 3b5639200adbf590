"""What the sentences of an answer are made of: names, ratios with intervals, and verdicts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pandas as pd

from harness.records.confidence_intervals import FEWEST, FEWEST_SWEEPS, Interval
from impl.codecs.codec import CodecError, parse
from report.answer import effects
from report.answer.effects import Effect
from report.data import metrics
from report.data.contender import fields_of, told
from report.data.metrics import Derived
from report.data.text import counted, listed, number, with_interval
from report.draw.contenders import titles_of

_FEW: Final = 2  # contenders that are told apart with the names of their fields
_USUAL: Final = {
    "chunks": "1",
    "optimizer on the host": "0",
    "weights on the host": "0",
    "hpZ copy": "frames",
}
MOST_NAMED: Final = 9  # contenders in a sentence
YES, NO, OPEN = "yes", "no", "cannot be told"
g3: Final = number(3)
g2: Final = number(2)


@dataclass(frozen=True, slots=True)
class Found:
    """What answers by one quantity.

    Attributes:
        first: the sentence that answers.
        verdicts: of what it compares: yes, no, or cannot be told; none for a question of how much.
        effects: those whose bytes and other quantities belong beside it.
        more: further sentences, in order.
        figure: name of the one that shows it, where it is not its quantity's.
    """

    first: str
    verdicts: Sequence[str] = ()
    effects: Sequence[Effect] = ()
    more: Sequence[str] = ()
    figure: str = ""


def listed_most(words: Sequence[str]) -> str:
    """Join words as ``a, b and c``; beyond :data:`MOST_NAMED` with the number of those that are left out."""
    more = len(words) - MOST_NAMED
    return listed(words) if more <= 0 else f"{listed(words[:MOST_NAMED])} ({more} more in the tables)"


def ratio(found: Interval) -> str:
    """``2.30 (2.12 to 2.50)``."""
    return with_interval(found, "{:.2f}".format)


def count(effect: Effect) -> str:
    """``6 pairs``, and in how many sweeps."""
    of = f" in {effect.ratio.sweeps} sweeps" if effect.ratio.sweeps > 1 else ""
    return f"{counted(effect.ratio.n, 'pair')}{of}"


def intervals(effect: Effect) -> str:
    """Which intervals stand beside ratios like this one's."""
    return f"95 % intervals of {count(effect)}" if effect.ratio.known else f"{count(effect)}, no interval"


def would_tell(found: Sequence[Effect]) -> str:
    """How many pairs, or sweeps, would tell."""
    needed = max(effects.pairs_needed(effect) for effect in found)
    more = "more than " if needed == effects.MOST_PAIRS else ""
    return f"{more}{needed} {'sweeps' if found[0].ratio.sweeps > 1 else 'pairs'} would tell"


def too_few(found: Interval) -> str:
    """Why there is no interval."""
    if found.sweeps > 1 and found.n >= FEWEST:
        return f"{found.sweeps} sweeps, where an interval takes {FEWEST_SWEEPS}"
    return f"{counted(found.n, 'pair')}, where an interval takes {FEWEST}"


def named_first(derived: Derived, names: Sequence[str]) -> list[str]:
    """Contenders that the question names, in its order; then the others, in theirs."""
    text = " ".join(derived.frames.questions)
    found = {}
    for name in sorted(names, key=len, reverse=True):  # qwZ+hpZ before qwZ, flat ZeRO-3 before ZeRO-3
        at = text.find(name)
        found[name] = at if at >= 0 else math.inf
        text = text.replace(name, " " * len(name))
    return sorted(names, key=lambda name: found[name])


def is_named(derived: Derived, name: str) -> bool:
    """Whether the question names a contender."""
    return name in " ".join(derived.frames.questions)


def spelled(name: str) -> str:
    """A contender's name in a sentence: ``w`` and ``g``, the fields of its codecs, are written out."""
    return re.sub(r"(?<=[( ])g (?=\S)", "gradients ", re.sub(r"(?<=[( ])w (?=\S)", "weights ", name))


def apart(derived: Derived, names: Sequence[str]) -> dict[str, str]:
    """Names of contenders of one strategy by the fields in which they differ, else their own.

    ``blocks of 64`` where only the blocks of their codecs differ.
    """
    own = {name: spelled(name) for name in names}
    ran = derived.finished.drop_duplicates("contender").set_index("contender")
    trials = {name: derived.frames.ran[str(ran.loc[name, "id"])] for name in names}
    if len(set(names)) < 2 or len({(trial.strategy, trial.control) for trial in trials.values()}) > 1:
        return own
    fields = {name: fields_of(trial) for name, trial in trials.items()}
    keys = _differing(fields)
    blocks = {name: _block([one[key] for key in keys]) for name, one in fields.items()}
    shapes = {str([one[key].split(":")[0] for key in keys]) for one in fields.values()}
    if all(blocks.values()) and len(shapes) == 1 and len({*blocks.values()}) == len(blocks):
        return blocks
    codecs = [key for key in keys if key in ("weights", "gradients")]
    bare = codecs[0] if len(codecs) == 1 and len(names) > _FEW else ""
    found = {name: _words(keys, one, bare, _USUAL) for name, one in fields.items()}
    if all(key.endswith("on the host") for key in keys):
        found = {name: said or "nothing on the host" for name, said in found.items()}
    elif not all(found.values()):
        found = {name: _words(keys, one, bare, {}) for name, one in fields.items()}
    return found if len(set(found.values())) == len(found) and all(found.values()) else own


def _differing(fields: Mapping[str, Mapping[str, str]]) -> list[str]:
    first = next(iter(fields.values()))
    return [key for key in first if len({one.get(key) for one in fields.values()}) > 1]


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
    if key.endswith("on the host"):
        share = "" if value == "1" else "half the " if value == "0.5" else f"{value} of the "
        return f"{share}{key}"
    return value if key == bare else spelled(f"({told(key, value)})")[1:-1]


def _block(codecs: Sequence[str]) -> str:
    """``blocks of 64`` if all are codecs with blocks of 64; else nothing."""
    try:
        blocks = {str(getattr(parse(text), "block", "")) for text in codecs}
    except CodecError:
        return ""
    if len(blocks) != 1 or "" in blocks:
        return ""
    (block,) = blocks
    return "one scale a shard" if block == "shard" else f"blocks of {block}"


def titles(found: Sequence[Effect]) -> dict[str, str]:
    """Short titles of the effects' cells: one field, where that tells them apart."""
    long = titles_of(pd.concat([effect.pairs[["cell", "where"]] for effect in found]))
    parts = {cell: title.split(", ") for cell, title in long.items()}
    for number_ in range(max(len(one) for one in parts.values())):
        short = {cell: one[number_] for cell, one in parts.items() if number_ < len(one)}
        if len(set(short.values())) == len(parts) and (len(parts) > 1):
            heads = {text.split(" ")[0] for text in short.values()}
            if heads == {"model"} or all(len(one) == 1 for one in parts.values()):
                return short
    return long


def cell_of(effect: Effect) -> str:
    """The cell of an effect."""
    return str(effect.pairs["cell"].iloc[0])


def seconds(effect: Effect) -> str:
    """The steps behind a ratio, and where they were measured."""
    ours, base = (metrics.middle(effect.pairs, name) for name in ("step_seconds", "baseline_seconds"))
    rate = effect.pairs["achieved_mbit"].median()
    link = "" if math.isnan(rate) else f"; the link achieved {rate:.3g} Mbit/s"
    return (
        f"A step of {spelled(effect.contender)} takes {g3(ours)} s where {spelled(effect.base)}'s takes "
        f"{g3(base)} s (geometric means of the pairs, on {effect.where}{link})."
    )


def sent(found: Sequence[Effect], names: dict[str, str] | None = None) -> str:
    """What contenders send between nodes beside their baseline; empty where it is not known."""
    known: dict[str, Effect] = {}
    for one in found:
        if not math.isnan(one.bytes_ratio) and one.base == found[0].base:
            known.setdefault(one.contender, one)
    once = list(known.values())
    if not once:
        return ""
    called = names or {effect.contender: spelled(effect.contender) for effect in once}
    main = once[0]
    pairs = main.pairs
    ours, base = (pairs[name].median() / 1e6 for name in ("sent_bytes", "baseline_sent_bytes"))
    in_mb = f" ({g3(ours)} MB a step against {g3(base)} MB)"
    of = f"{called[main.contender]} sends {main.bytes_ratio:.3f} of {spelled(main.base)}'s bytes"
    told_ = [of + ("" if math.isnan(ours) or math.isnan(base) else in_mb)]
    told_ += [f"{called[effect.contender]} {effect.bytes_ratio:.3f}" for effect in once[1:]]
    return f"Between nodes {listed_most(told_)}."
