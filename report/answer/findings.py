"""One sentence or number by the committed records for each question about the method and item of the paper.

docs/questions.md and docs/paper.md hold them between marks (:mod:`report.docs_from_records`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import pandas as pd

from harness.records.confidence_intervals import mean_interval
from report.answer import effects, loss, sizes, speed
from report.answer.effects import Effect
from report.answer.lead import answer
from report.answer.parts import g2, g3, ratio, spelled
from report.data import bytes_and_memory, loss_verdicts, metrics
from report.data.contender import FLAT_FACTOR, NAMES
from report.data.metrics import Derived
from report.data.text import counted, listed

Finding = Callable[[Derived], str]
_INT4: Final = "qgZ (g int4:128)"


def lead(derived: Derived) -> str:
    """The first sentence of the suite's page."""
    return answer(derived).sentences[0]


def verdicts(derived: Derived) -> str:
    """The first two sentences: the verdict on the main contender's loss, and on the others'."""
    return " ".join(answer(derived).sentences[:2])


def _effect(derived: Derived, strategy: str) -> Effect:
    """The preset of a strategy beside the baseline, in the first cell."""
    return next(one for one in effects.effects(derived) if one.contender == NAMES[strategy])


def as_predicted(derived: Derived) -> str:
    """In how many trials the ledger equals the prediction, and the bytes of each technique."""
    equal = derived.trials["predicted_equal"].dropna().astype(bool)
    sent = [
        f"{one.bytes_ratio:.3f} with {spelled(one.contender)}"
        for one in effects.effects(derived)
        if one.bytes_ratio < 1
    ]
    return (
        f"The ledger equals the prediction to the byte in {int(equal.sum())} of "
        f"{counted(len(equal), 'trial')}; between nodes a step sends, of ZeRO-3's bytes, {listed(sent)}."
    )


def hidden(derived: Derived) -> str:
    """How much of a step is exposed communication, and how near it is to the shortest possible."""
    told, near = [], []
    for strategy in ("zero3", "zeropp"):
        mine = derived.trials[derived.trials["contender"] == NAMES[strategy]]
        step = ratio(metrics.step_interval(mine))
        told.append(f"{g3(mine['exposed_seconds'].median())} s of {NAMES[strategy]}'s step of {step} s")
        near.append(f"{mine['share'].median():.2f}")
    return (
        f"Communication that no computation hides takes {listed(told)}; the shortest steps that schedule, "
        f"link and processors allow are {listed(near)} of these steps."
    )


def chunks(derived: Derived) -> str:
    """Two hops in four chunks beside whole ones."""
    names = [str(name) for name in derived.trials["contender"].unique()]
    cut = next(name for name in names if "int4" in name and "chunks 4" in name)
    whole = cut.replace(", chunks 4", "")
    return speed.faster(derived, effects.between(derived, whole, [cut])).first


def blocks(derived: Derived) -> str:
    """The verdicts on losses of one scale a shard, beside blocks."""
    rows = [
        row
        for row in loss.rows_of(derived)
        if "control" not in row["contender"] and "ZeRO++" in row["contender"]
    ]
    seeds = counted(rows[0]["seeds"], "seed")
    return f"By validation loss minus ZeRO-3's, in nats, {loss.by_verdict(derived, rows)} ({seeds})."


def differing_by(*parts: str, base: str = "") -> Finding:
    """Losses of contenders whose names hold one of ``parts``, less those of ``base`` or of the baseline."""

    def told(derived: Derived) -> str:
        ends = derived.trials.dropna(subset=["validation_loss"])
        of = {str(name): loss_verdicts.by_seed(mine) for name, mine in ends.groupby("contender", sort=False)}
        beside = base or derived.compared.baseline
        shown = []
        for name in (name for name in of if name != beside and any(part in name for part in parts)):
            found = mean_interval(list((of[name] - of[beside]).dropna()))
            shown.append(f"{spelled(name)} {found.estimate:+.4f} ({found.low:+.4f} to {found.high:+.4f})")
        seeds = counted(len(of[beside]), "seed")
        said = f"By validation loss minus {spelled(beside)}'s, in nats, {listed(shown)}"
        return f"{said} (95 % intervals of {seeds})."

    return told


def beside_zeropp(strategy: str) -> Finding:
    """A preset's step and bytes beside ZeRO++'s at each rate, of a suite with that baseline."""

    def told(derived: Derived) -> str:
        found = [one for one in effects.effects(derived) if one.contender == NAMES[strategy]]
        found.sort(key=lambda one: float(one.pairs["rate_mbit"].iloc[0]))
        steps = [f"{ratio(one.ratio)} times as fast at {speed.rate_of(one)}" for one in found]
        return (
            f"A step of {NAMES[strategy]} is, beside ZeRO++'s, {listed(steps)}; it sends "
            f"{found[0].bytes_ratio:.3f} of its bytes between nodes."
        )

    return told


def _shares(derived: Derived) -> str:
    """Bytes between nodes of every contender, of the baseline's."""
    found = {one.contender: one for one in effects.effects(derived)}
    told = [f"{spelled(name)} {one.bytes_ratio:.3f}" for name, one in found.items()]
    base = spelled(next(iter(found.values())).base)
    return f"of {base}'s bytes between nodes {listed(told)}"


def _volume(derived: Derived) -> str:
    pairs = _effect(derived, "zeropp").pairs
    ours, base = ((pairs[name] / pairs["m_bytes"]).median() for name in ("sent_bytes", "baseline_sent_bytes"))
    return f"{ours:.3f} M against {base:.3f} M"


def _speedup(strategy: str) -> Finding:
    return lambda derived: ratio(_effect(derived, strategy).ratio)


def _over_papers(derived: Derived) -> str:
    pairs = derived.over_papers
    mine = pairs[pairs["contender"] == NAMES["zeropp"]]
    best = _speedup("zeropp")(derived)
    return f"{ratio(metrics.speedup(mine))} over flat ZeRO-3, {best} over the best ({FLAT_FACTOR})"


def _fastest(derived: Derived) -> str:
    size = ["nodes", "ranks_per_node", "tokens_per_rank"]
    found = [one for one in effects.effects(derived) if one.contender == NAMES["zeropp"]]
    first = found[0].pairs[size].iloc[0]
    alike = [one for one in found if one.pairs[size].iloc[0].equals(first)]
    alike.sort(key=lambda one: float(one.pairs["rate_mbit"].iloc[0]))
    told = " and ".join(f"{ratio(one.ratio)} at {speed.rate_of(one)}" for one in (alike[0], alike[-1]))
    return (
        f"{told} ({first['nodes']}x{first['ranks_per_node']} ranks, {first['tokens_per_rank']} tokens a rank)"
    )


def _backward(derived: Derived) -> str:
    parts = bytes_and_memory.volume(derived.frames, derived.trials)
    mine = parts[parts["id"].isin(derived.trials[derived.trials["contender"] == NAMES["zeropp"]]["id"])]
    gathered = mine[mine["part"] == "gather in backward"]["m"]
    return f"{gathered.median() if len(gathered) else 0.0:.3g} M"


def _errors(*names: str) -> Finding:
    def told(derived: Derived) -> str:
        found = effects.errors(derived).groupby(level="contender", sort=False).first()
        shown = {
            label: next(name for name in found.index if all(part in name for part in label.split()))
            for label in names
        }
        return "vNMSE " + listed([f"{g2(float(found[name]))} ({label})" for label, name in shown.items()])

    return told


def _accuracy(derived: Derived) -> str:
    found = effects.errors(derived).groupby(level="contender").first()
    values = {name: math.sqrt(float(one)) for name, one in found.items()}
    shard = next(one for name, one in values.items() if "shard" in str(name))
    told = {
        size: next(one for name, one in values.items() if f"int4:{size})" in str(name))
        for size in (256, 2048)
    }
    less = " and ".join(f"{shard / one:.1f} times with blocks of {size}" for size, one in told.items())
    return f"the error is smaller than with one scale a shard {less} (root of vNMSE, int4)"


def _unordered(derived: Derived) -> str:
    rows = {row["contender"]: row for row in loss.rows_of(derived)}
    row = next(one for name, one in rows.items() if "unordered" in name)
    return f"{loss.nats(row)} nats without, {loss.nats(rows[NAMES['qgz']])} with"


def _parity(derived: Derived) -> str:
    rows = metrics.parity(derived.frames, derived.trials)
    found = [metrics.parity_interval(mine) for _, mine in rows.groupby(["cell", "full_rate"])]
    low, high = min(found, key=lambda one: one.estimate), max(found, key=lambda one: one.estimate)
    return f"{ratio(low)} to {ratio(high)} of ZeRO-3's tokens/s at the full rate"


def _alone_and_together(derived: Derived) -> str:
    def told(pairs: pd.DataFrame) -> str:
        found = {
            name: ratio(metrics.speedup(pairs[pairs["contender"] == NAMES[name]]))
            for name in ("qwz", "hpz", "qgz", "zeropp")
        }
        alone = ", ".join(f"{NAMES[name]} {value}" for name, value in found.items() if name != "zeropp")
        return f"{alone}, together {found['zeropp']}"

    return (
        f"over flat ZeRO-3 {told(derived.over_papers)}; over the best {told(derived.pairs)} ({FLAT_FACTOR})"
    )


def _converges(derived: Derived) -> str:
    rows = [
        row
        for row in loss.rows_of(derived)
        if "ZeRO++" in row["contender"] and "control" not in row["contender"]
    ]
    return "; ".join(
        f"{spelled(row['contender'])} {loss.nats(row)} nats, {row['verdict']}" for row in rows[:2]
    )


def _decodes(derived: Derived) -> str:
    return (
        speed.tokens(derived).first.split(" times", maxsplit=1)[0].rpartition("decoded ")[2]
        + " times the tokens/s"
    )


QUESTIONS: Final[Mapping[int, tuple[str, Finding]]] = {
    1: ("block_size", lead), 2: ("hpz_group", lead), 3: ("reordering", lead), 4: ("quickstart", as_predicted),
    5: ("ablation", hidden), 6: ("algorithms", chunks), 8: ("signs", lead), 9: ("bandwidth", lead),
    10: ("convergence", blocks), 11: ("successors", beside_zeropp("sdp4bit")),
    12: ("frontier", differing_by("SDP4Bit")), 13: ("feedback", differing_by("int4:128", base=_INT4)),
    14: ("frontier", differing_by("ZeRO++ (g", base=NAMES["zeropp"])),
    15: ("frontier", differing_by("DeepSpeed's", "LoCo", "(sums", "(blocks", base=NAMES["zeropp"])),
    16: ("convergence_long", verdicts), 17: ("equal_memory", sizes.within_memory),
    18: ("inner_rate", lead), 19: ("slow_node", lead),
}  # fmt: skip
"""The suite and the finding of each question that records answer."""

DRAWN: Final = (lead, blocks, verdicts)
"""The findings that their suite's figure shows."""

PAPER: Final[Mapping[str, tuple[str, Finding]]] = {
    "volume": ("quickstart", _volume),
    "throughput": ("quickstart", _over_papers),
    "bandwidth": ("bandwidth", _fastest),
    "blocks": ("block_size", _errors("int4:256", "int4:shard")),
    "backward": ("quickstart", _backward),
    "rings": ("algorithms", _errors("int4:128 one_hop", "int4:128 ring")),
    "reordering": ("reordering", _unordered),
    "chunks": ("algorithms", chunks),
    "overlap": ("ablation", hidden),
    "accuracy": ("block_size", _accuracy),
    "parity": ("bandwidth", _parity),
    "ablation": ("ablation", _alone_and_together),
    "convergence": ("convergence", _converges),
    "steps": ("convergence_long", lambda derived: lead(derived).rstrip(".")),
    "generation": ("generation", _decodes),
    "nodes": ("nodes", lead),
    "stages": ("stages", lead),
    "successors": ("successors", _shares),
}
"""The suite and the number of each item of the paper that records have one for."""
