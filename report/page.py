"""Renders the report as one self-contained HTML page with its figures inline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from report.data import decoding, emulation, footnotes, metrics, published
from report.data.contender import BASELINE, NAMES, PROPOSED, is_contrast, order_of
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import NOTHING, counted, interval_in_words, listed, number
from report.draw.figure_definition import Plot
from report.draw.figure_files import Drawn
from report.tables.settings import essentials
from report.tables.table import Table

_HERE: Final = Path(__file__).parent
_SUITES: Final = _HERE.parent / "suites"
_TEMPLATE: Final = "page.html"
_STYLE: Final = "page.css"
_COMMIT: Final = 12  # characters of a commit's hash
_FACTS: Final = {  # in the page's head, by their names on record
    "machine.cpu": "processor", "machine.cores": "cores", "machine.gpus": "GPUs", "machine.kernel": "kernel",
    "machine.packages.torch": "torch", "link.kind": "link", "code.version": "version",
    "code.commit": "commit",
}  # fmt: skip
_LAST: Final = ("setting", "environment")  # tables with a section of their own
_MOST_NAMES: Final = 3  # in a title
_SHORT: Final = 16  # rows of a summary that stands before the figures


def render(derived: Derived, drawn: Sequence[Drawn], missing: Sequence[Plot], tables: Sequence[Table]) -> str:
    """Render the page as HTML.

    Args:
        derived: the records.
        drawn: figures that had data.
        missing: figures that had none.
        tables: that have rows.
    """
    frames = derived.frames
    by_name = {table.name: table for table in tables}
    first = [table for table in tables if table.name == "summary" and len(table.data) <= _SHORT]
    apart = [*first, *(table for table in tables if table.name in ("failures", *_LAST))]
    subject = heading(derived)
    return fill(
        title=" ".join(part for part in subject if part)
        + ("" if derived.finished.empty else f": {frames.suite}")
        + _modelled(derived),
        kicker=f"Results of suite {frames.suite}{_modelled(derived)}",
        heading=subject,
        questions=frames.questions,
        headline=headline(derived),
        emulated=emulation.of_trials(frames),
        facts=facts(derived),
        warnings=warnings(derived),
        figures=drawn,
        note=footnotes.modelled_in_words(derived),
        marked=derived.disturbed,
        missing=[(plot.title, needed(plot.suite)) for plot in missing if not plot.extra],
        summary=first,
        tables=[table for table in tables if table not in apart],
        last=[by_name[name] for name in _LAST if name in by_name],
        failures=by_name.get("failures"),
        pools=frames.pools,
    )


def fill(**parts: Any) -> str:
    """Fill the template; a missing part is an error."""
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    style = (_HERE / _STYLE).read_text(encoding="utf-8")
    page: str = environment.get_template(_TEMPLATE).render(style=style, **parts)
    return page


def needed(suite: str, suites: Path = _SUITES) -> str:
    """How to come by a suite's records: the command where its file lies beside the program, as in a checkout,
    else the suite's name.
    """
    file = suites / f"{suite}.toml"
    return f"zeropp run {suites.name}/{file.name}" if file.exists() else suite


def heading(derived: Derived) -> tuple[str, str]:
    """(introduction, what it introduces): who is compared with whom, of those that finished a trial."""
    there = sorted({str(name) for name in derived.finished["strategy"]}, key=order_of)
    if not there:
        return "No finished trial of", derived.frames.suite
    if (asked := derived.compared).asked:
        many = len(asked.contrast) > _MOST_NAMES
        told = counted(len(asked.contrast), "contender") if many else listed(list(asked.contrast))
        return f"{told} against", asked.baseline
    if {PROPOSED, BASELINE} <= set(there):
        return f"{NAMES[PROPOSED]} against", NAMES[BASELINE]
    others = [name for name in there if name != BASELINE]
    names = [NAMES.get(name, name) for name in others]
    said = listed(names) if len(names) <= _MOST_NAMES else counted(len(names), "strategy", "strategies")
    if BASELINE not in there:
        return "", said
    return (f"{said} against" if others else ""), NAMES[BASELINE]


def headline(derived: Derived) -> list[str]:
    """Sentences with the main numbers: speed-up and bytes."""
    if derived.trials.empty and len(derived.generations):
        return _generation_sentences(derived)
    pairs = derived.pairs
    if derived.compared.asked:
        return _asked_sentences(derived)
    ours = pairs[(pairs["strategy"] == PROPOSED) & (pairs["nodes"] > 1)]
    names = list(ours["contender"].unique())
    kept = names if len(names) == 1 else [NAMES[PROPOSED]]  # the preset, or the only variant there is
    ours = ours[ours["contender"].isin(kept)]
    if ours.empty:
        if derived.pairs.empty and len(derived.trials):
            return [f"{counted(len(derived.trials), 'finished trial')}.", *_fastest_sentences(derived)]
        why = (
            f"No cell holds {NAMES[BASELINE]} and {NAMES[PROPOSED]} in one repeat, so no speed-up is stated."
        )
        if len(names) > 1:
            variants = f"{len(names)} variants of {NAMES[PROPOSED]}, none of them the preset, stand"
            why = f"{variants} beside {NAMES[BASELINE]} in the Summary: no single speed-up is stated here."
        return [f"{counted(len(derived.trials), 'finished trial')}.", why]
    speedups = {str(cell): metrics.speedup(group) for cell, group in ours.groupby("cell", sort=False)}
    best = max(speedups, key=lambda cell: speedups[cell].estimate)
    shown = ours[ours["cell"] == best]
    sentences = [*_not_to_be_relied_on(derived, shown), _speed_sentence(shown, several=len(speedups) > 1)]
    over_papers = derived.over_papers[derived.over_papers["id"].isin(ours["id"])]
    if len(there := over_papers[over_papers["cell"] == best]):
        sentences.append(_papers_sentence(there))
    if len(speedups) > 1:
        estimates = [found.estimate for found in speedups.values()]
        sentences.append(
            f"Over the {len(speedups)} settings of this folder, the speed-up lies between "
            f"{min(estimates):.2f} and {max(estimates):.2f}."
        )
    return sentences + _bytes_sentences(shown)


def _asked_sentences(derived: Derived) -> list[str]:
    """What a suite that names its baseline asks: for each contrast, in its best and its worst cell."""
    pairs, asked = derived.pairs, derived.compared
    ours = pairs[is_contrast(pairs)]
    if ours.empty:
        beside = f"No cell holds {asked.baseline} beside {listed(list(asked.contrast))} in one repeat"
        return [f"{counted(len(derived.trials), 'finished trial')}.", f"{beside}: no speed-up is stated."]
    sentences = []
    for name in asked.contrast[:_MOST_NAMES]:
        mine = ours[ours["contender"] == name]
        cells = [group for _, group in mine.groupby("cell", sort=False)]
        if not cells:
            continue
        best = max(cells, key=lambda group: metrics.speedup(group).estimate)
        told = _speed_sentence(best, several=len(cells) > 1)
        sentences += [*_not_to_be_relied_on(derived, best), f"{told} {_verdict_sentence(best)}"]
        if len(cells) > 1:
            estimates = [metrics.speedup(group).estimate for group in cells]
            sentences.append(
                f"Over the {len(cells)} settings of this folder, its speed-up lies between "
                f"{min(estimates):.2f} and {max(estimates):.2f}."
            )
        if not math.isnan(ratio := best["bytes_ratio"].median()):
            sentences.append(f"Between nodes it sends {ratio:.3f} of {asked.baseline}'s bytes by the ledger.")
    if len(asked.contrast) > _MOST_NAMES:
        sentences.append(f"The other {len(asked.contrast) - _MOST_NAMES} contenders are in the Summary.")
    return sentences


def _verdict_sentence(group: pd.DataFrame) -> str:
    """Whether the contrast is faster, in words, by the interval of its speed-up."""
    found = metrics.speedup(group)
    name, base = group["contender"].iloc[0], group["baseline_contender"].iloc[0]
    if not found.known:
        return f"Whether {name} is faster than {base} cannot be told from {counted(found.n, 'pair')}."
    if found.contains(1.0):
        return f"That {name} and {base} are equally fast lies within the interval."
    return f"So {name} is {'faster' if found.estimate > 1 else 'slower'} than {base} here."


def _fastest_sentences(derived: Derived) -> list[str]:
    """What was found without a baseline: the fastest contender of the cell in which most ran."""
    table = derived.trials
    cell = table.groupby("cell", sort=False)["contender"].nunique().idxmax()
    here = table[table["cell"] == cell]
    steps = {
        str(name): metrics.step_interval(group).estimate
        for name, group in here.groupby("contender", sort=False)
    }
    fastest = min(steps, key=lambda name: steps[name])
    rest = [f"{name} {number(3)(took)} s" for name, took in steps.items() if name != fastest]
    others = f"; {listed(rest)}" if rest else ""
    took = f"On {here['where'].iloc[0]} a step of {fastest} takes {number(3)(steps[fastest])} s{others}."
    base = derived.compared.baseline
    return [took, f"There is no {base} beside them, and no other baseline is named: no speed-up is stated."]


def _not_to_be_relied_on(derived: Derived, pairs: pd.DataFrame) -> list[str]:
    """What is said before a speed-up if all the trials behind it are marked, on the page and in figures."""
    why = []
    if {*pairs["id"], *pairs["baseline"]} <= derived.disturbed:
        why.append(f"in each trial others had more than {metrics.OTHERS_WITHIN:.0%} of the processors' time")
    if {*pairs["cell"]} <= derived.differing.keys():
        why.append(
            f"the links of what is compared achieved rates that differ by more than "
            f"{metrics.RATES_AGREE_WITHIN:.0%}"
        )
    return [f"The following is not to be relied on: {'; '.join(why)}."] if why else []


def _modelled(derived: Derived) -> str:
    """What follows the suite's name where links were modelled."""
    return ", on a modelled link" if derived.finished["modelled"].any() else ""


def _generation_sentences(derived: Derived) -> list[str]:
    """Sentences on decoding: its speed-up, and its bytes between nodes."""
    table = derived.generations
    ours = table[(table["contender"] == NAMES[PROPOSED]) & table["baseline"].notna()]
    if ours.empty:
        return [f"{counted(table['id'].nunique(), 'finished trial')} of generation."]
    found, told = decoding.speedup(ours), number(3)
    theirs = listed([f"{value:.2f}" for value in published.generation()["speedup"]])
    speed, base = (metrics.middle(ours, name) for name in ("tokens_per_second", "baseline_tokens_per_second"))
    sentence = (
        f"{NAMES[PROPOSED]} decodes {told(speed)} tokens per second and rank where {NAMES[BASELINE]} decodes "
        f"{told(base)} (geometric means of the trials): {found.estimate:.2f} times as many "
        f"({counted(found.n, 'pair')}{'; ' if found.known else ', '}{interval_in_words(found)}); the ZeRO++ "
        f"blog prints {theirs} for far larger models on 32 GPUs."
    )
    sent = f"For a token after the first, its ranks send {ours['later_bytes'].max():.0f} bytes between nodes."
    return [*_not_to_be_relied_on(derived, ours), sentence, sent]


def _speed_sentence(group: pd.DataFrame, *, several: bool) -> str:
    found = metrics.speedup(group)
    told = number(3)
    interval = counted(found.n, "pair")
    if found.n > 1:
        interval += f" between {group['speedup'].min():.2f} and {group['speedup'].max():.2f}"
    interval += f"{'; ' if found.known else ', '}{interval_in_words(found)}"
    rate = group["achieved_mbit"].median()
    achieved = f"; the link achieved {rate:.3g} Mbit/s" if not math.isnan(rate) else ""
    ours, base = (metrics.middle(group, name) for name in ("step_seconds", "baseline_seconds"))
    place = f"{'At its best, on' if several else 'On'} {group['where'].iloc[0]}{achieved}"
    return (
        f"{place}: a step of {group['contender'].iloc[0]} takes {told(ours)} s where "
        f"{group['baseline_contender'].iloc[0]}'s takes {told(base)} s (geometric means of the pairs), a "
        f"speed-up of {found.estimate:.2f} ({interval})."
    )


def _papers_sentence(group: pd.DataFrame) -> str:
    """The speed-up over the paper's own baseline, beside the one over the best ZeRO-3 that stands before."""
    found = metrics.speedup(group)
    return (
        f"That is over the best {NAMES[BASELINE]}; over the paper's baseline, one flat ring over all ranks, "
        f"whose step takes {number(3)(metrics.middle(group, 'baseline_seconds'))} s, it is "
        f"{found.estimate:.2f} ({counted(found.n, 'pair')}{'; ' if found.known else ', '}"
        f"{interval_in_words(found)})."
    )


def _bytes_sentences(ours: pd.DataFrame) -> list[str]:
    ledger, interface = ours["bytes_ratio"].dropna(), ours["interface_ratio"].dropna()
    if ledger.empty:
        return []
    m = (ours["sent_bytes"] / ours["m_bytes"]).median()
    base = (ours["baseline_sent_bytes"] / ours["m_bytes"]).median()
    printed = published.volume().set_index("method")["total_m"]
    counted = f", {interface.median():.3f} by the counters of the interfaces" if len(interface) else ""
    sentence = (
        f"Between nodes it sends {ledger.median():.3f} of {NAMES[BASELINE]}'s bytes by the ledger{counted}: "
        f"{m:.3f} M against {base:.3f} M, where the paper counts {printed[PROPOSED]:g} M against "
        f"{printed[BASELINE]:g} M (M: one gather of the 16-bit model between nodes)."
    )
    return [sentence]


def facts(derived: Derived) -> list[tuple[str, str]]:
    """Facts for the page's head: where and when the trials ran."""
    frames = derived.frames
    known = {
        fact: listed(
            sorted({value[:_COMMIT] if fact == "code.commit" else value for value in of_fact["value"]})
        )
        for (fact,), of_fact in groups(frames.facts, ["fact"])
    }
    ran = derived.finished
    interrupted = f", {frames.interrupted} interrupted, not yet run again" if frames.interrupted else ""
    found = [
        ("suite", frames.suite),
        ("trials", f"{len(ran)} finished, {len(frames.failures)} failed{interrupted}"),
        ("ran", _when(ran)),
    ]
    found += essentials(frames, ran)
    if frames.shared:
        found.append(("all policies", ", ".join(f"{name} {value}" for name, value in frames.shared.items())))
    shown = [(told, known.get(fact)) for fact, told in _FACTS.items()]
    found += [(told, str(value)) for told, value in shown if value not in (None, "[]", "null")]
    if (taken := footnotes.taken_fact(derived)) is not None:
        found.append(("processors taken by others", taken))
    if "true" in str(known.get("code.dirty")):
        found.append(("checkout", "changed since its commit"))
    return found


def _when(ran: pd.DataFrame) -> str:
    if ran.empty:
        return NOTHING
    first, last = (str(when)[:16].replace("T", " ") for when in (ran["started"].min(), ran["started"].max()))
    return first if first == last else f"{first} to {last}"


def warnings(derived: Derived) -> list[str]:
    """Warnings at the head of the page."""
    frames, ran = derived.frames, derived.finished
    found = [
        f"{why}; PyTorch's reference did its work in {counted(len(group), 'trial')}, far more slowly."
        for (why,), group in groups(ran[ran["kernels_warning"] != ""], ["kernels_warning"])
    ]
    if len(frames.pools) > 1:
        found.append(f"Records of {len(frames.pools)} machines or codes stand side by side.")
    if frames.left_out:
        found.append(
            f"Left out: {counted(frames.left_out, 'failure')} of another machine or code, "
            "of which nothing was measured."
        )
    if frames.stale_traces:
        found.append(
            f"Not drawn: {counted(frames.stale_traces, 'trace')} of other trials, another machine or code "
            "than the records; `zeropp trace` writes them again."
        )
    found += footnotes.bytes_warnings(derived)
    contents = ran[ran["corpus_sha256"] != ""].groupby(["corpus", "cell"])["corpus_sha256"].nunique()
    found += [
        f"Corpus {corpus} changed between trials; losses are not of the same text (see Setting)."
        for corpus in sorted({str(corpus) for corpus, _ in contents[contents > 1].index})
    ]
    where = ran.drop_duplicates("cell").set_index("cell")["where"]
    for cell, spread in derived.differing.items():
        found.append(
            f"{where[cell]}: the rates that the contenders' links achieved differ by {spread:.0%}; their "
            f"comparison is marked ({footnotes.RATES})."
        )
    found += [
        said
        for warn in (footnotes.taken_warning, footnotes.padding_warning, footnotes.unsigned_warning)
        if (said := warn(derived))
    ]
    if frames.interrupted:
        found.append(
            f"{counted(frames.interrupted, 'trial')} interrupted, not yet run again: the same `zeropp run` "
            "does."
        )
    if modelled := footnotes.modelled_in_words(derived).strip():
        found.append(modelled)
    if len(frames.failures):
        found.append(f"{counted(len(frames.failures), 'trial')} failed; see Failed trials below.")
    return found
