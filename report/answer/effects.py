"""Effects of configurations beside a baseline: numbers, verdicts, and their text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pandas as pd

from harness.records.confidence_intervals import FEWEST, Interval, quantile
from harness.records.memory_parts import on_device
from impl.codecs.codec import CodecError, parse
from report.data import speedups
from report.data.configuration import NAMES, field_text, fields_of
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import counted, listed, number, with_interval
from report.draw.names_of_rows import titles_of

YES: Final = "yes"
NO: Final = "no"
OPEN: Final = "cannot be told"
MOST_NAMED: Final = 9  # configurations in a sentence
_MOST_PAIRS: Final = 200  # beyond which no number of further pairs is named
_FEW: Final = 2  # configurations up to which texts name the field that differs
_HOST: Final = "on the host"  # ends the names of fields
_USUAL: Final = {"chunks": "1", f"optimizer {_HOST}": "0", f"weights {_HOST}": "0", "hpZ copy": "frames"}
g3: Final = number(3)
g2: Final = number(2)


@dataclass(frozen=True)
class Effect:
    """One configuration beside its baseline in one setting."""

    pairs: pd.DataFrame  # its rows of :func:`report.data.speedups.pairs`
    ratio: Interval  # the baseline's seconds of a step over the configuration's: above 1 the configuration is faster
    setting: str  # its hash
    configuration: str
    base: str
    where: str  # the setting's description

    @property
    def verdict(self) -> str:
        """Whether the configuration is faster."""
        return is_faster(self.ratio)

    @property
    def count(self) -> str:
        """``6 pairs``, and in how many sweeps."""
        sweeps = f" in {self.ratio.sweeps} sweeps" if self.ratio.sweeps > 1 else ""
        return f"{counted(self.ratio.n, 'pair')}{sweeps}"

    @property
    def intervals(self) -> str:
        """``95 % intervals of 6 pairs``, or ``2 pairs, no interval``."""
        return f"95 % intervals of {self.count}" if self.ratio.known else f"{self.count}, no interval"

    @property
    def bytes_ratio(self) -> float:
        """Bytes between nodes over the baseline's, by the ledger, else by the interfaces; NaN of neither."""
        ledger = float(self.pairs["bytes_ratio"].median())
        return float(self.pairs["interface_ratio"].median()) if math.isnan(ledger) else ledger


@dataclass(frozen=True, slots=True)
class Draft:
    """An answer by one quantity, to which sentences on others are added."""

    first: str  # the sentence that answers
    verdicts: Sequence[str] = ()  # on its comparisons: yes, no, or cannot be told; none for a "how much"
    effects: Sequence[Effect] = ()  # whose bytes and other quantities are added
    details: Sequence[str] = ()  # further sentences, in order
    figure: str = ""  # name of the one that shows it, where it is not its quantity's


def is_faster(ratio: Interval) -> str:
    """``yes`` if a ratio lies above 1, ``no`` if below, else and without an interval ``cannot be told``."""
    if not ratio.known or ratio.contains(1.0):
        return OPEN
    return YES if ratio.estimate > 1 else NO


def effects(derived: Derived) -> list[Effect]:
    """Every contrast of every setting, in page order."""
    rows = derived.pairs[derived.pairs["configuration"] != derived.pairs["baseline_configuration"]]
    return _effects(rows, derived.compared.contrast)


def between(derived: Derived, base: str, others: Iterable[str]) -> list[Effect]:
    """Effects of ``others`` beside any configuration ``base``."""
    return _effects(speedups.pairs(derived.trials, derived.trials["configuration"].eq(base)), others)


def _effects(rows: pd.DataFrame, configurations: Iterable[str]) -> list[Effect]:
    rows = rows[rows["configuration"].isin(list(configurations))]
    keys = ["setting", "configuration", "baseline_configuration", "where"]
    return [Effect(pairs, speedups.speedup(pairs), *key) for key, pairs in groups(rows, keys)]


def variants(derived: Derived) -> list[list[str]]:
    """Configurations of each strategy that has several, without controls; the preset is first."""
    controls = [identity for identity, trial in derived.frames.trial_of.items() if trial.control]
    configurations = derived.trials.drop_duplicates("configuration").sort_values("place", kind="stable")
    lists = [
        sorted(group.sort_values("first")["configuration"], key=lambda name: name != NAMES.get(strategy))
        for (strategy,), group in groups(configurations[~configurations["id"].isin(controls)], ["strategy"])
    ]
    return [names for names in lists if len(names) > 1]


def errors(derived: Derived) -> pd.Series[float]:
    """End-to-end error (vNMSE) by setting and configuration: the median over measured steps and trials."""
    rows = derived.sent_errors
    rows = rows[(rows["purpose"] == "gradients") & rows["hop"].isna() & rows["repeated"].eq(1)]
    return rows.groupby(["setting", "configuration"], sort=False)["vnmse"].median()


def device_mib(derived: Derived, configuration: str, source: str = "engine") -> float:
    """MiB of the fullest rank, median over trials: held on the device, or ``copied`` to and fro in a step."""
    memory, trials = derived.frames.memory, derived.finished
    ids = trials[trials["configuration"] == configuration]["id"]
    parts = memory[memory["id"].isin(ids) & (memory["source"] == source)]
    if source == "engine":
        parts = parts[parts["part"].isin(on_device(dict.fromkeys(parts["part"], 0)))]
    return float(parts.groupby(["id", "rank"])["bytes"].sum().groupby("id").max().median() / 2**20)


def needed_pairs(unclear: Sequence[Effect]) -> str:
    """How many pairs, or sweeps, would decide; without an interval, why there is none."""
    first = unclear[0].ratio
    if not first.known:
        return too_few(first)
    count = max(_pairs_to_decide(effect.ratio) for effect in unclear)
    bound = "more than " if count == _MOST_PAIRS else ""
    return f"{bound}{count} {'sweeps' if first.sweeps > 1 else 'pairs'} would tell"


def _pairs_to_decide(ratio: Interval) -> int:
    """How many pairs would decide if the ratio and its spread stay; _MOST_PAIRS at most."""
    if not ratio.known:
        return FEWEST
    count, distance = ratio.n if ratio.sweeps == 1 else ratio.sweeps, abs(math.log(ratio.estimate))
    spread = math.log(ratio.high / ratio.estimate) / quantile(count - 1) * math.sqrt(count)
    enough = (n for n in range(FEWEST, _MOST_PAIRS) if quantile(n - 1) * spread / math.sqrt(n) < distance)
    return next(enough, _MOST_PAIRS)


def too_few(ratio: Interval) -> str:
    """Why a ratio has no interval."""
    if ratio.sweeps > 1 and ratio.n >= FEWEST:
        return f"{ratio.sweeps} sweeps, where an interval takes {ratio.fewest_sweeps}"
    return f"{counted(ratio.n, 'pair')}, where an interval takes {FEWEST}"


def listed_most(parts: Sequence[str]) -> str:
    """Join parts as ``a, b and c``; beyond :data:`MOST_NAMED`, the others are counted."""
    rest = len(parts) - MOST_NAMED
    return listed(parts) if rest <= 0 else f"{listed(parts[:MOST_NAMED])} ({rest} more in the tables)"


def ratio(interval: Interval) -> str:
    """``2.30 (2.12 to 2.50)``."""
    return with_interval(interval, "{:.2f}".format)


def is_named(derived: Derived, name: str) -> bool:
    """Whether the question names a configuration."""
    return name in " ".join(derived.frames.questions)


def named_first(derived: Derived, names: Iterable[str]) -> list[str]:
    """Distinct configurations in the order in which the question names them; then the others."""
    text, names = " ".join(derived.frames.questions), dict.fromkeys(names)
    positions = {}
    for name in sorted(names, key=len, reverse=True):  # qwZ+hpZ before qwZ, flat ZeRO-3 before ZeRO-3
        position = text.find(name)
        positions[name] = position if position >= 0 else math.inf
        text = text.replace(name, " " * len(name))
    return sorted(names, key=positions.__getitem__)


def spelled(name: str) -> str:
    """A configuration's name in a sentence: ``w`` and ``g``, the fields of its codecs, are written out."""
    return re.sub(r"(?<=[( ])g (?=\S)", "gradients ", re.sub(r"(?<=[( ])w (?=\S)", "weights ", name))


def strategy(name: str) -> str:
    """A configuration's name without its changes."""
    return name.partition(" (")[0]


def distinct_names(derived: Derived, names: Sequence[str]) -> dict[str, str]:
    """Names of configurations of one strategy by the fields in which they differ, ``blocks of 64`` where only the
    blocks of their codecs do; else their full names.
    """
    full = {name: spelled(name) for name in names}
    ids = derived.finished.drop_duplicates("configuration").set_index("configuration")["id"]
    trials = {name: derived.frames.trial_of[str(ids[name])] for name in full}
    if len(full) < 2 or len({(trial.strategy, trial.control) for trial in trials.values()}) > 1:
        return full
    policies = {name: fields_of(trial.resolved_policy(), trial.topology()) for name, trial in trials.items()}
    keys = [key for key in policies[names[0]] if len({p.get(key) for p in policies.values()}) > 1]
    if not keys:  # they differ in how they train
        return full
    values = {name: [policy[key] for key in keys] for name, policy in policies.items()}
    blocks = {name: _block(codecs) for name, codecs in values.items()}
    formats = {str([codec.split(":")[0] for codec in codecs]) for codecs in values.values()}
    if all(blocks.values()) and len(formats) == 1 and len({*blocks.values()}) == len(blocks):
        return blocks
    codecs = [key for key in keys if key in ("weights", "gradients")]
    bare = codecs[0] if len(codecs) == 1 and len(names) > _FEW else ""
    texts = {name: _policy_text(keys, policy, bare, _USUAL) for name, policy in policies.items()}
    if all(key.endswith(_HOST) for key in keys):
        texts = {name: text or f"nothing {_HOST}" for name, text in texts.items()}
    elif not all(texts.values()):
        texts = {name: _policy_text(keys, policy, bare, {}) for name, policy in policies.items()}
    return texts if len(set(texts.values())) == len(texts) and all(texts.values()) else full


def _policy_text(keys: Sequence[str], policy: Mapping[str, str], bare: str, usual: Mapping[str, str]) -> str:
    """Text of these fields of a policy, without those that have their usual value."""
    texts = [_field_text(key, policy[key], bare) for key in keys if policy[key] != usual.get(key)]
    return ", ".join(filter(None, texts))


def _field_text(key: str, value: str, bare: str) -> str:
    """Text of a field of a policy; the codec of the field ``bare`` stands without its name."""
    if value == "none":
        return f"no {key}" if not bare else ""
    if key == "reduce":
        return {"one_hop": "one hop", "two_hop": "two hops"}.get(value, value)
    if key.endswith(_HOST):
        share = "" if value == "1" else "half the " if value == "0.5" else f"{value} of the "
        return f"{share}{key}"
    return value if key == bare else spelled(f"({field_text(key, value)})")[1:-1]


def _block(codecs: Sequence[str]) -> str:
    """``blocks of 64`` if all are codecs with blocks of 64; else empty."""
    try:
        block, *others = {str(getattr(parse(text), "block", "")) for text in codecs}
    except CodecError:
        return ""
    if others or not block:
        return ""
    return "one scale a shard" if block == "shard" else f"blocks of {block}"


def titles(effects: Sequence[Effect]) -> dict[str, str]:
    """Short titles of the effects' settings: only the model, where each setting has another one."""
    full = titles_of(pd.concat([effect.pairs[["setting", "where"]] for effect in effects]))
    models = {
        setting: t for setting, title in full.items() for t in title.split(", ") if t.startswith("model ")
    }
    return models if len(full) > 1 and len({*models.values()}) == len(full) else full


def seconds(effect: Effect) -> str:
    """A sentence on the seconds of steps behind a ratio, and where they were measured."""
    columns = ("step_seconds", "baseline_seconds")
    step, base_step = (speedups.step_interval(effect.pairs, name).estimate for name in columns)
    rate = effect.pairs["achieved_mbit"].median()
    link = "" if math.isnan(rate) else f"; the link achieved {rate:.3g} Mbit/s"
    return (
        f"A step of {spelled(effect.configuration)} takes {g3(step)} s where {spelled(effect.base)}'s takes "
        f"{g3(base_step)} s (geometric means of the pairs, on {effect.where}{link})."
    )


def sent(effects: Sequence[Effect]) -> str:
    """A sentence on configurations' bytes between nodes beside their baseline's; empty where none are known."""
    firsts: dict[str, Effect] = {}
    for effect in effects:
        if not math.isnan(effect.bytes_ratio) and effect.base == effects[0].base:
            firsts.setdefault(effect.configuration, effect)
    if not firsts:
        return ""
    main, *others = firsts.values()
    mb, base_mb = (main.pairs[name].median() / 1e6 for name in ("sent_bytes", "baseline_sent_bytes"))
    in_mb = "" if math.isnan(mb + base_mb) else f" ({g3(mb)} MB a step against {g3(base_mb)} MB)"
    first = (
        f"{spelled(main.configuration)} sends {main.bytes_ratio:.3f} of {spelled(main.base)}'s bytes{in_mb}"
    )
    rest = [f"{spelled(effect.configuration)} {effect.bytes_ratio:.3f}" for effect in others]
    return f"Between nodes {listed_most([first, *rest])}."
