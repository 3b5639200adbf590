"""Writes texts that say how far a page's numbers can be trusted: footnotes, warnings, and notes on emulated links."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pandas as pd

from harness.records.bench_record import Bench
from harness.records.trial_record import OTHERS_WITHIN
from harness.suites import labels
from impl.policy.shard_layout import MUCH_PADDING
from report.data.frames import Frames, groups
from report.data.metrics import Derived
from report.data.speedups import RATES_AGREE_WITHIN
from report.data.text import NOTHING, counted, listed

RATES: Final = "†"
TAKEN: Final = "‡"
SOME_TAKEN: Final = f"{TAKEN})"  # as in 6 (2 ‡)
ALL_TAKEN: Final = f"{TAKEN} "  # as in 1.04 ‡ ○
ABOVE: Final = "§"
FOOTNOTES: Final = {
    RATES: f"{RATES}: the links of one setting's configurations achieved rates that differ by more than "
    f"{RATES_AGREE_WITHIN:.0%}.",
    SOME_TAKEN: f"{TAKEN} in parentheses after n: the number of disturbed trials, during which other programs and the "
    f"hypervisor together took more than {OTHERS_WITHIN:.0%} of the processors' time.",
    ALL_TAKEN: f"{TAKEN} after a number: all trials behind it were disturbed, that is, other programs and the "
    f"hypervisor together took more than {OTHERS_WITHIN:.0%} of the processors' time.",
    ABOVE: f"{ABOVE}: above 1, so that the lower bound is longer than the measured step. Possible reasons: the link "
    "was faster during the steps than when it was probed after the trial; the computation is not divided over the "
    "units in proportion to their elements; ranks competed for processors while computation was measured; ranks do "
    "not begin a step at the same time.",
    labels.INTERFACES: labels.INTERFACES_IN_WORDS,
}
_FAULTS: Final = {  # faults of trials, by the column of the table of trials that describes the fault
    "miscounted": "The interfaces did not count the bytes that the ledger holds",
    "crossed": "Backward passes gathered weights from other nodes, although hpZ keeps a copy of them in each node",
    "flat": "The training loss did not fall",
    "off_rate": "The link's rate, measured after the trial, differs by more than 5 % from the requested rate",
}
_NODES: Final = {  # by the kind of their link
    "open": "nodes are network namespaces of one machine, and the link between them is not limited to a rate",
    "namespaces": "nodes are network namespaces of one machine, joined by a link that the kernel shapes",
    "paced": "nodes are processes of one machine, and the link between them is modelled: each message is delayed by "
    "the time that its bytes would take",
    "none": "nodes are processes of one machine, and the link between them is not limited to a rate",
    "threads": "ranks are threads of one process that take turns, and no link joins the nodes",
}
_SHAPED: Final = "Throttled: nodes are hosts, and the kernel limited the outgoing rate of their interfaces."


def share(value: float) -> str:
    """Format the ratio of a lower bound on a step's time to the measured time, with two decimals.

    The mark §, which refers to a footnote, follows a ratio above 1.  NaN gives an en dash.
    """
    if pd.isna(value):
        return NOTHING
    return f"{value:.2f}" + (f" {ABOVE}" if round(value, 2) > 1 else "")


def rates(rows: pd.DataFrame) -> str:
    """Return the mark `` †`` if the configurations in ``rows`` were measured over links of different speeds.

    Configurations of one setting (cluster, model, batch and so on) should have equally fast links.  Column
    ``rates_differ`` is true in the rows of a setting whose link was faster for some configurations than for others.
    The mark is returned if the column is true in any row.  The text is empty if the column is true in no row, or if
    ``rows`` lacks this column.
    """
    return f" {RATES}" if "rates_differ" in rows and rows["rates_differ"].any() else ""


def footnotes(cells: Iterable[str]) -> str:
    """Return the footnotes for the marks, such as †, in the texts ``cells``; a space precedes each footnote."""
    text = "".join(f"{cell} " for cell in cells)
    return "".join(f" {footnote}" for mark, footnote in FOOTNOTES.items() if mark in text)


def alone_in_words(derived: Derived) -> str:
    """Return a footnote that counts the trials whose computation was not measured by itself; empty if there are none.

    Computation by itself is the time that the model takes if no messages are sent.  Trials whose ranks are threads are
    not counted, since their steps are not timed.  The footnote begins with a space.
    """
    timed = derived.trials[~derived.trials["id"].isin(derived.frames.untimed)]
    unmeasured = int((~timed["alone"].eq(other=True)).sum())
    is_rlhf = any(trial.workload == "rlhf" for trial in derived.frames.trial_of.values())
    why = "their steps do more than train" if is_rlhf else "their records are older"
    sentence = (
        f" In {unmeasured} of {counted(len(timed), 'trial')} computation was not measured by itself ({why}). "
        "For these trials, the time in which ranks did not wait is given instead; it includes stalls of the engine."
    )
    return sentence if unmeasured else ""


def modelled_in_words(derived: Derived) -> str:
    """Return a footnote that counts the trials whose link was modelled; empty if there are none.

    With a modelled link, a rank's own process delays each message by the time that the message's bytes would take at
    the link's rate; no network is limited.  The footnote begins with a space.
    """
    trials = derived.finished
    paced = int(trials["modelled"].sum())
    which = "all trials" if paced == len(trials) else f"{paced} of {counted(len(trials), 'trial')}"
    sentence = (
        f" Modelled: in {which} the link between nodes was a pacer in the process, which delays each message by the "
        "time that its bytes would take; no network was limited."
    )
    return sentence if paced else ""


def untimed_in_words(derived: Derived) -> str:
    """Return a warning that counts the trials whose ranks were threads of one process; empty if there are none.

    Such threads take turns, so that the time of a step means nothing and is not measured.
    """
    trials = derived.finished
    untimed = int(trials["id"].isin(derived.frames.untimed).sum())
    which = "all trials" if untimed == len(trials) else f"{untimed} of {counted(len(trials), 'trial')}"
    sentence = (
        f"In {which} the ranks were threads of one process that took turns: no step was timed. Losses, errors and "
        "bytes are the same as with ranks that are processes."
    )
    return sentence if untimed else ""


def taken_fact(derived: Derived) -> str | None:
    """Return text on the CPU time that other programs and the hypervisor took: ``at most 3.1% in a trial``.

    The number is the largest share in any trial.  If some records lack this share, their number follows:
    ``at most 3.1% in a trial; not recorded in 2``.  If all records lack it, the text is ``not recorded``.
    Returns None if no trial has finished.
    """
    shares = derived.finished["taken_share"]
    if not shares.notna().any():
        return "not recorded" if len(shares) else None
    unknown = f"; not recorded in {shares.isna().sum()}" if shares.hasnans else ""
    return f"at most {shares.max():.1%} in a trial{unknown}"


def warnings(derived: Derived) -> list[str]:
    """Return the warnings for the head of a page, the most important first."""
    frames, trials = derived.frames, derived.finished
    sentences = [
        f"{why}; the PyTorch reference encoded and decoded in {counted(len(group), 'trial')}, which is far slower."
        for (why,), group in groups(trials[trials["kernels_warning"] != ""], ["kernels_warning"])
    ]
    sentences.append(untimed_in_words(derived))
    first_ids = trials.drop_duplicates("configuration").set_index("configuration")["id"]
    policies = {str(name): frames.trial_of[first].resolved_policy() for name, first in first_ids.items()}
    if names := [name for name, policy in policies.items() if policy is not None and policy.own_codecs]:
        sentences.append(
            f"{listed(names)} encoded and decoded with a Python function of the suite, so the seconds of these "
            "configurations measure Python, not a kernel."
        )
    for (name, bounded, unbiased), group in groups(
        trials[trials["method"] != ""], ["method", "bounded", "unbiased"]
    ):
        if not bounded:
            promise = (
                "unbiased gradients, which one step cannot show" if unbiased else "no bound of its error"
            )
            sentences.append(
                f"The reduced gradients of {name} were not compared with those of a single process, since the class "
                f"promises {promise}; `zeropp check method` tests what it promises."
            )
        if group["measured_only"].any():
            sentences.append(
                f"The bytes of {name}'s gradients were measured, not predicted: the class declares none."
            )
    for (name, bounded), group in groups(
        trials[trials["gather_method"] != ""], ["gather_method", "gather_bounded"]
    ):
        if not bounded:
            sentences.append(
                f"The weights that {name} gathered were not compared with the masters, since the class promises no "
                "bound of its error; losses and gradients were compared with a single process that has the gathered "
                "weights."
            )
        if group["weights_measured"].any():
            sentences.append(
                f"The bytes of the weights that {name} gathered were measured, not predicted: the class declares none."
            )
    if (pools := len(frames.pools)) > 1:
        sentences.append(f"The records are from sweeps on {pools} machines (see the table Environment).")
    if frames.left_out:
        failures = counted(frames.left_out, "failure")
        sentences.append(
            f"Left out: {failures} on another machine or with other code, where no trial of this folder finished."
        )
    if frames.stale_traces:
        stale = counted(frames.stale_traces, "trace")
        why = "from other trials, another machine or other code than the records; `zeropp trace` writes them again"
        sentences.append(f"Not drawn: {stale} {why}.")
    sentences += frames.journal

    def which(wrong: pd.DataFrame) -> str:
        ids, further = sorted(wrong["id"])[:6], len(wrong) - 6
        return f"{counted(len(wrong), 'trial')}: {listed([*ids, *[f'{further} more'] * (further > 0)])}"

    if len(unequal := trials[trials["predicted_equal"].eq(other=False)]):
        differs = f"The ledger differs from the prediction in {which(unequal)}"
        sentences.append(f"{differs}; do not rely on their bytes.")
    for column, fault in _FAULTS.items():
        if len(wrong := trials[trials[column].ne("")]):
            first = "For example, trial" if len(wrong) > 1 else "Trial"
            sentences.append(
                f"{fault} in {which(wrong)}. {first} {': '.join(wrong.iloc[0][['id', column]])}."
            )
    contents = trials[trials["corpus_sha256"] != ""].groupby(["corpus", "setting"])["corpus_sha256"].nunique()
    sentences += [
        f"Corpus {corpus} changed between trials, so that their losses are not comparable (see Setting)."
        for corpus in sorted({str(corpus) for corpus, _ in contents[contents > 1].index})
    ]
    where = trials.drop_duplicates("setting").set_index("setting")["where"]
    sentences += [
        f"{where[setting]}: the links of the configurations achieved rates that differ by {spread:.0%}; comparisons in "
        f"this setting are marked ({RATES})."
        for setting, spread in derived.differing.items()
    ]
    if disturbed := len(derived.disturbed):
        sentences.append(
            f"During {disturbed} of {counted(len(trials), 'trial')} other programs and the hypervisor together "
            f"took more than {OTHERS_WITHIN:.0%} of the processors' time, at most "
            f"{trials['taken_share'].max():.0%}; such trials are marked ({TAKEN}), and seconds leave them out where "
            "the same configuration also has undisturbed ones."
        )
    if padding := labels.pad_note(trials["padding_share"]):
        padded = counted(int(trials["padding_share"].gt(MUCH_PADDING).sum()), "trial")
        sentences.append(f"{padding} The mark is printed beside the bytes of {padded}.")
    if unsigned := int((~trials["signed"].astype(bool)).sum()):
        sentences.append(
            f"{unsigned} of {counted(len(trials), 'record')} have no digest, because they are older than digests: "
            "whether they were edited is not known."
        )
    if frames.interrupted:
        stopped = counted(frames.interrupted, "trial")
        sentences.append(
            f"Interrupted and not yet run again: {stopped}; the same `zeropp run` command runs them."
        )
    sentences.append(modelled_in_words(derived).strip())
    if len(frames.failures):
        sentences.append(f"{counted(len(frames.failures), 'trial')} failed; see Failed trials below.")
    return list(filter(None, sentences))


def emulated(kinds: Iterable[str], latencies_ms: Iterable[float | None]) -> str:
    """Return text that says how links emulate a network; empty if all links are real networks.

    ``kinds`` are the kinds of the links, such as ``paced``.  ``latencies_ms`` are the latencies that the links add in
    one direction, in ms; None counts as 0.
    """
    kinds = set(kinds)
    nodes, throttled = [_NODES[kind] for kind in _NODES if kind in kinds], _SHAPED * ("shaped" in kinds)
    if not nodes:
        return throttled
    added = " or ".join(f"{latency:g}" for latency in sorted({latency or 0.0 for latency in latencies_ms}))
    latency = "no latency" if added == "0" else f"{added} ms of latency one way"
    if kinds & {*_NODES} == {"threads"}:
        hops = "and each hop is a copy in memory"
    else:
        hops = f"a hop inside a node is a copy in memory, and the link adds {latency}"
    return (
        f"Emulated: {'; or '.join(nodes)}. All ranks share the processors of one machine: sending a byte also costs "
        f"processor time, {hops}. {throttled}"
    ).strip()


def emulated_by_trials(frames: Frames) -> str:
    """Return text that says how the links of the finished trials emulate a network (:func:`emulated`).

    Trials on one node are ignored, since they have no link.
    """
    trials = frames.finished[frames.finished["nodes"] > 1]
    latencies = [frames.trial_of[identity].cluster.latency for identity in trials["id"]]
    is_held = trials["rate_mbit"].notna() | trials["link_kind"].ne("namespaces")
    return emulated(trials["link_kind"].where(is_held, "open"), latencies)


def emulated_by_benches(benches: Iterable[Bench]) -> str:
    """Return text that says how the links of the benchmarks emulate a network (:func:`emulated`).

    Measurements on one node are ignored, since they use no link.  A measurement with a rate ran over a link of this
    rate between network namespaces.  A measurement without a rate ran over a link that nothing limited.
    """
    places = {sample.place for bench in benches for sample in bench.samples}
    rates = [rate for nodes, _, rate in places if (nodes or 1) > 1]
    return emulated({"none" if rate is None else "namespaces" for rate in rates}, [None])


def beside_real(kinds: Iterable[str]) -> str:
    """Return caption text that says that nodes are emulated; empty if no link of these ``kinds`` is emulated.

    The text is for figures that also show published numbers, which were measured on real networks.
    """
    return "Nodes here are emulated: see the head of the page." if {*kinds} & {*_NODES} else ""
