"""For each question about the method and each item of the paper, one sentence or number by the records.

docs/questions.md and docs/paper.md hold them between marks (:mod:`docs.tables.from_records`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import pandas as pd

from harness.records.confidence_intervals import mean_interval
from report.answer import by_loss, by_seconds, by_size, effects
from report.answer.effects import g2, g3, ratio, spelled
from report.answer.lead import answer
from report.data import loss_verdicts, speedups
from report.data.configuration import FLAT_FACTOR, NAMES
from report.data.metrics import Derived
from report.data.text import counted, listed, with_interval
from report.tables import all_tables as tables
from report.tables import phases

Finding = Callable[[Derived], str]


def lead(derived: Derived) -> str:
    """The first sentence of the suite's page."""
    return answer(derived).sentences[0]


def verdicts(derived: Derived) -> str:
    """The first two sentences: the verdict on the main configuration's loss, and on the others'."""
    return " ".join(answer(derived).sentences[:2])


def as_predicted(derived: Derived) -> str:
    """In how many trials the ledger equals the prediction, and what each technique sends."""
    equal = derived.trials["predicted_equal"].dropna().astype(bool)
    sent = [
        f"{effect.bytes_ratio:.3f} with {spelled(effect.configuration)}"
        for effect in effects.effects(derived)
        if effect.bytes_ratio < 1
    ]
    return (
        f"The ledger equals the prediction to the byte in {int(equal.sum())} of "
        f"{counted(len(equal), 'trial')}; between nodes a step sends, of ZeRO-3's bytes, {listed(sent)}."
    )


def hidden(derived: Derived) -> str:
    """Seconds of exposed communication in a step, and the shortest possible step's share of it."""
    waits, shares = [], []
    for strategy in ("zero3", "zeropp"):
        trials = derived.trials[derived.trials["configuration"] == NAMES[strategy]]
        step = ratio(speedups.step_interval(trials))
        waits.append(f"{g3(trials['exposed_seconds'].median())} s of {NAMES[strategy]}'s step of {step} s")
        shares.append(f"{trials['share'].median():.2f}")
    return (
        f"Communication that no computation hides takes {listed(waits)}; the shortest steps that schedule, "
        f"link and processors allow are {listed(shares)} of these steps."
    )


def chunks(derived: Derived) -> str:
    """Two hops in four chunks beside whole ones."""
    names = [str(name) for name in derived.trials["configuration"].unique()]
    chunked = next(name for name in names if "int4" in name and "chunks 4" in name)
    whole = chunked.replace(", chunks 4", "")
    return by_seconds.faster(derived, effects.between(derived, whole, [chunked])).first


def blocks(derived: Derived) -> str:
    """The verdicts on losses of one scale a shard, beside blocks."""
    rows = [
        row
        for row in by_loss.rows_of(derived)
        if "ZeRO++" in row["configuration"] and "control" not in row["configuration"]
    ]
    seeds = counted(rows[0]["seeds"], "seed")
    return f"By validation loss minus ZeRO-3's, in nats, {by_loss.by_verdict(derived, rows)} ({seeds})."


def differing_by(derived: Derived, *, parts: tuple[str, ...], base: str = "") -> str:
    """Losses of configurations whose names hold one of ``parts``, less those of ``base`` or of the baseline."""
    losses, base = _losses(derived), base or derived.compared.baseline
    names = [name for name in losses if name != base and any(part in name for part in parts)]
    differences = listed([f"{spelled(name)} {_minus(losses, name, base)}" for name in names])
    seeds = counted(len(losses[base]), "seed")
    return f"By validation loss minus {spelled(base)}'s, in nats, {differences} (95 % intervals of {seeds})."


def budgeted(derived: Derived) -> str:
    """Losses of codecs chosen by unit, less those of the one codec whose bytes they may send."""
    losses, shown = _losses(derived), []
    for name in losses:
        base, budget, _ = name.partition(", budget")
        if budget:
            shown.append(f"{_minus(losses, name, f'{base})')} within the bytes of {base.rpartition(' ')[2]}")
    seeds = counted(len(losses[derived.compared.baseline]), "seed")
    differences = f"By validation loss minus that of one codec for all units, in nats, {listed(shown)}"
    return f"{differences} (95 % intervals of {seeds})."


def _losses(derived: Derived) -> dict[str, pd.Series[float]]:
    """Validation losses by seed of each configuration."""
    ends = derived.trials.dropna(subset=["validation_loss"])
    return {
        str(name): loss_verdicts.by_seed(rows) for name, rows in ends.groupby("configuration", sort=False)
    }


def _minus(losses: Mapping[str, pd.Series[float]], name: str, base: str) -> str:
    return with_interval(mean_interval(list((losses[name] - losses[base]).dropna())), "{:+.4f}".format)


def by_phase(derived: Derived) -> str:
    """How many times as fast ZeRO++ is in each phase of RLHF, and what it sends."""
    table, faster, sent = phases.by_phase(derived), [], []
    for phase, verb in zip(phases.PHASES, ("generates", "scores", "trains"), strict=True):
        rows = table[table["phase"].eq(phase) & table["configuration"].eq(NAMES["zeropp"])]
        faster.append(f"{verb} {ratio(speedups.speedup(rows, below='seconds'))}")
        sent.append(g3(float((rows["inter_bytes"] / rows["baseline_bytes"]).median())))
    return (
        f"ZeRO++ {listed(faster)} times as fast as ZeRO-3 (95 % intervals); "
        f"between nodes it sends {listed(sent)} of its bytes."
    )


def beside_zeropp(derived: Derived, *, strategy: str) -> str:
    """A preset's step and bytes beside ZeRO++'s at each rate, where ZeRO++ is the suite's baseline."""
    by_rate = [effect for effect in effects.effects(derived) if effect.configuration == NAMES[strategy]]
    by_rate.sort(key=lambda effect: float(effect.pairs["rate_mbit"].iloc[0]))
    steps = [f"{ratio(effect.ratio)} times as fast at {by_seconds.rate_of(effect)}" for effect in by_rate]
    return (
        f"A step of {NAMES[strategy]} is, beside ZeRO++'s, {listed(steps)}; it sends "
        f"{by_rate[0].bytes_ratio:.3f} of its bytes between nodes."
    )


def _shares(derived: Derived) -> str:
    """Bytes between nodes of every configuration, as shares of the baseline's."""
    by_name = {effect.configuration: effect for effect in effects.effects(derived)}
    shares = [f"{spelled(name)} {effect.bytes_ratio:.3f}" for name, effect in by_name.items()]
    base = spelled(next(iter(by_name.values())).base)
    return f"of {base}'s bytes between nodes {listed(shares)}"


def _error(derived: Derived, *parts: str) -> float:
    """The error of the first configuration whose name holds all ``parts``."""
    errors = effects.errors(derived).groupby(level="configuration", sort=False).first()
    return float(next(error for name, error in errors.items() if all(part in str(name) for part in parts)))


def _errors(derived: Derived, *, labels: tuple[str, ...]) -> str:
    return "vNMSE " + listed([f"{g2(_error(derived, *label.split()))} ({label})" for label in labels])


def _accuracy(derived: Derived) -> str:
    shard = _error(derived, "shard")
    factors = " and ".join(
        f"{math.sqrt(shard / _error(derived, f'int4:{size})')):.1f} times with blocks of {size}"
        for size in (256, 2048)
    )
    return f"the error is smaller than with one scale a shard {factors} (root of vNMSE, int4)"


def _parity(derived: Derived) -> str:
    rows = speedups.parity(derived.trials)
    intervals = [speedups.parity_interval(pairs) for _, pairs in rows.groupby(["setting", "full_rate"])]
    intervals.sort(key=lambda interval: interval.estimate)
    return f"{ratio(intervals[0])} to {ratio(intervals[-1])} of ZeRO-3's tokens/s at the full rate"


def _cells(derived: Derived, *, text: str) -> str:
    """A text with each ``{table|words of a row|column}`` replaced by that cell as printed, without marks."""

    def cell(match: re.Match[str]) -> str:
        name, row, title = match[1].split("|")
        table = tables.MAKERS[name](derived)
        column = table.column(title)
        return column.cell(table.data.iloc[table.row(row)][column.key])

    return re.sub(r"\{(.*?)\}", cell, text)


def _of_cells(suite: str, text: str) -> tuple[str, Finding]:
    return suite, partial(_cells, text=text)


_SPEEDS: Final = (
    "qwZ {{summary|qwZ|{0}}}, hpZ {{summary|hpZ|{0}}}, qgZ {{summary|qgZ|{0}}}, "
    "together {{summary|ZeRO++|{0}}}"
)
_RATE: Final = "{{summary|ZeRO++, 2x2 ranks, {0} Mbit/s, 256 tokens/rank|speedup}} at {0} Mbit/s"
_SHARDS: Final = "ZeRO++ (w int8:shard, g int4:shard)"
QUESTIONS: Final[Mapping[int, tuple[str, Finding]]] = {
    1: ("block_size", lead), 2: ("hpz_group", lead), 3: ("reordering", lead), 4: ("quickstart", as_predicted),
    5: ("ablation", hidden), 6: ("algorithms", chunks), 8: ("signs", lead), 9: ("bandwidth", lead),
    10: ("convergence", blocks), 11: ("successors", partial(beside_zeropp, strategy="sdp4bit")),
    12: ("frontier", partial(differing_by, parts=("SDP4Bit",))),
    13: ("feedback", partial(differing_by, parts=("int4:128",), base="qgZ (g int4:128)")),
    14: ("frontier", partial(differing_by, parts=("ZeRO++ (g",), base=NAMES["zeropp"])),
    15: ("deviations", partial(
        differing_by, parts=("DeepSpeed's", "(sums", "(blocks", "MXFP8"), base=NAMES["zeropp"])),
    16: ("convergence_long", verdicts), 17: ("equal_memory", by_size.within_memory),
    18: ("inner_rate", lead), 19: ("slow_node", lead), 20: ("budget", budgeted), 21: ("rlhf", by_phase),
    22: ("frontier", partial(differing_by, parts=("LoCo",), base=NAMES["zeropp"])),
}  # fmt: skip
"""The suite and the finding of each question that records answer."""

DRAWN: Final = (lead, blocks, verdicts)
"""Findings beside which their suite's figure stands."""

PAPER: Final[Mapping[str, tuple[str, Finding]]] = {
    "volume": _of_cells("quickstart", "{volume|ZeRO++|ledger} M against {volume|ZeRO-3|ledger} M"),
    "throughput": _of_cells(
        "quickstart",
        "{summary|ZeRO++|over_papers} over flat ZeRO-3, {summary|ZeRO++|speedup} over the best "
        f"({FLAT_FACTOR})",
    ),
    "bandwidth": _of_cells(
        "bandwidth",
        f"{_RATE.format(25)} and {_RATE.format(800)} (2x2 ranks, 256 tokens a rank)",
    ),
    "blocks": ("block_size", partial(_errors, labels=("int4:256", "int4:shard"))),
    "backward": _of_cells("quickstart", "{volume|ZeRO++|gather in backward} M"),
    "rings": ("algorithms", partial(_errors, labels=("int4:128 one_hop", "int4:128 ring"))),
    "reordering": _of_cells(
        "reordering",
        "{losses|qgZ (control: unordered)|difference} nats without, {losses|qgZ|difference} with",
    ),
    "chunks": ("algorithms", chunks),
    "overlap": ("ablation", hidden),
    "accuracy": ("block_size", _accuracy),
    "parity": ("bandwidth", _parity),
    "ablation": _of_cells(
        "ablation",
        f"over flat ZeRO-3 {_SPEEDS.format('over_papers')}; over the best {_SPEEDS.format('speedup')}; the "
        "first holds the same factor",
    ),
    "convergence": _of_cells(
        "convergence",
        "ZeRO++ {losses|ZeRO++|difference} nats, {losses|ZeRO++|verdict}; "
        f"{spelled(_SHARDS)} {{losses|{_SHARDS}|difference}} nats, {{losses|{_SHARDS}|verdict}}",
    ),
    "steps": ("convergence_long", lambda derived: lead(derived).rstrip(".")),
    "generation": _of_cells("generation", "ZeRO++ decodes {generation|ZeRO++|speedup} times the tokens/s"),
    "nodes": ("nodes", lead),
    "rlhf": ("rlhf", lambda derived: by_phase(derived).rstrip(".")),
    "stages": ("stages", lead),
    "successors": ("successors", _shares),
}
"""The suite and the number of each item of the paper for which records have one."""
