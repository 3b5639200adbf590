"""Warnings at the head of a page: what limits its numbers, one sentence each."""

from __future__ import annotations

from typing import Final

from harness.suites import labels
from impl.plan.shard_layout import MUCH_PADDING
from report.data import footnotes
from report.data.frames import groups
from report.data.metrics import OTHERS_WITHIN, Derived
from report.data.text import counted, listed

_AT_FAULT: Final = {  # columns of what is wrong
    "miscounted": "The interfaces did not send what the ledger holds",
    "off_rate": "The link's rate after the trial is more than 5 % off what was asked for",
}


def of_page(derived: Derived) -> list[str]:
    """All that hold, in the order in which they matter."""
    frames, ran = derived.frames, derived.finished
    trials = counted(len(ran), "trial")
    unequal, taken = ran[ran["predicted_equal"].eq(other=False)], ran[ran["taken_share"].gt(OTHERS_WITHIN)]
    bare = int((~ran["signed"].astype(bool)).sum())
    contents = ran[ran["corpus_sha256"] != ""].groupby(["corpus", "cell"])["corpus_sha256"].nunique()
    where = ran.drop_duplicates("cell").set_index("cell")["where"]
    padded = counted(int(ran["padding_share"].gt(MUCH_PADDING).sum()), "trial")
    modelled = footnotes.modelled_in_words(derived).strip()
    found = [
        f"{why}; PyTorch's reference did its work in {counted(len(group), 'trial')}, far more slowly."
        for (why,), group in groups(ran[ran["kernels_warning"] != ""], ["kernels_warning"])
    ]
    contenders = ran.drop_duplicates("contender").set_index("contender")["id"]
    policies = {str(name): frames.ran[identity].resolved_policy() for name, identity in contenders.items()}
    if own := [name for name, policy in policies.items() if policy is not None and policy.own_codecs]:
        found.append(
            f"{listed(own)} {'encodes' if len(own) == 1 else 'encode'} and decode by a Python function of "
            "the suite: their seconds are those of Python, not of a kernel."
        )
    if len(frames.pools) > 1:
        found.append(f"Sweeps of {len(frames.pools)} machines stand beside one another (see Environment).")
    if frames.left_out:
        failures = counted(frames.left_out, "failure")
        found.append(f"Left out: {failures} of another machine or code, of which nothing was measured.")
    if frames.stale_traces:
        found.append(
            f"Not drawn: {counted(frames.stale_traces, 'trace')} of other trials, another machine or code "
            "than the records; `zeropp trace` writes them again."
        )
    found += frames.journal
    if len(unequal):
        found.append(
            f"The ledger differs from the prediction in {counted(len(unequal), 'trial')}: "
            f"{listed(sorted(unequal['id'])[:6])}; what was sent by them is not to be relied on."
        )
    for column, what in _AT_FAULT.items():
        if len(wrong := ran[ran[column].ne("")]):
            ids, why = listed(sorted(wrong["id"])[:6]), " ".join(wrong.iloc[0][["id", column]])
            found.append(f"{what} in {counted(len(wrong), 'trial')}: {ids}; in {why}.")
    found += [
        f"Corpus {corpus} changed between trials; losses are not of the same text (see Setting)."
        for corpus in sorted({str(corpus) for corpus, _ in contents[contents > 1].index})
    ]
    found += [
        f"{where[cell]}: the rates that the contenders' links achieved differ by {spread:.0%}; their "
        f"comparison is marked ({footnotes.RATES})."
        for cell, spread in derived.differing.items()
    ]
    if len(taken):
        found.append(
            f"During {len(taken)} of {trials} other programs and the machine's host took more than "
            f"{OTHERS_WITHIN:.0%} of the processors' time, at most {taken['taken_share'].max():.0%}; such "
            f"trials are marked ({footnotes.TAKEN})."
        )
    if said := labels.padded_in_words(ran["padding_share"]):
        found.append(f"{said} It stands beside what was sent in {padded}.")
    if bare:
        found.append(
            f"Without digest: {bare} of {counted(len(ran), 'record')}, from before records had one; whether "
            "their content was edited is not known."
        )
    if frames.interrupted:
        trials = counted(frames.interrupted, "trial")
        found.append(f"{trials} interrupted, not yet run again: the same `zeropp run` does.")
    if modelled:
        found.append(modelled)
    if len(frames.failures):
        found.append(f"{counted(len(frames.failures), 'trial')} failed; see Failed trials below.")
    return found
