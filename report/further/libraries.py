"""Sentences on how fast our engine is compared with DDP, FSDP2 and DeepSpeed, and on their fastest settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from harness.records.confidence_intervals import Interval
from harness.suites.peers import family_of
from report.data import speedups
from report.data.configuration import spelled
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import counted, lowest_to_highest, span
from report.draw.names_of_rows import common_and_rest
from report.tables.peers import FAMILIES, shared_types

_FEWEST_LIBRARIES: Final = 2  # a sentence on the fastest settings names at least so many libraries


def on_libraries(derived: Derived, found: Mapping[str, Sequence[Interval]]) -> list[str]:
    """Return the sentences after the first sentence of a page that compares our engine with DDP, FSDP2 and DeepSpeed.

    :func:`report.sentence.on_peers` writes that first sentence.  ``found`` maps the description of each setting to the
    speed-ups of our configurations over the libraries' configurations (:func:`report.tables.peers.ours_over_peers`).
    With several settings, there is a sentence on the speed-ups in each setting.  With a single setting, there are
    sentences on the fastest configuration of each library.
    """
    return _by_setting(found) if len(found) > 1 else _fastest(derived)


def _by_setting(found: Mapping[str, Sequence[Interval]]) -> list[str]:
    """Return a sentence for each setting: ``With 1x4 ranks, these speed-ups are 0.91 to 1.10 (4 comparisons).``

    ``found`` maps the description of each setting (cluster, model, batch and so on) to the speed-ups in this setting.
    """
    titles, sentences = common_and_rest(found)[1], []
    for where, intervals in found.items():
        ends = lowest_to_highest([each.estimate for each in intervals], "{:.2f}".format)
        comparisons = counted(len(intervals), "comparison")
        sentences.append(f"With {titles[where]}, these speed-ups are {ends} ({comparisons}).")
    return sentences


def _fastest(derived: Derived) -> list[str]:
    """Return sentences that name the fastest configuration of each library (DDP, FSDP2 and DeepSpeed).

    There is a sentence for each pair of data types: the type in which trials compute, and the type that they send.
    Only pairs that at least two libraries used have a sentence.
    """
    ran = [derived.frames.trial_of[identity] for identity in derived.trials["id"]]
    trials = derived.trials.assign(
        types=[shared_types(trial) for trial in ran],
        family=[family_of(trial.strategy) or "" for trial in ran],
    )
    trials, sentences = trials[trials["family"].isin([*FAMILIES])], []
    for (types,), alike in groups(trials, ["types"]):
        fastest = dict[str, tuple[float, str, int]]()
        for (family, name), own in groups(alike, ["family", "configuration"]):
            step = speedups.step_interval(own)
            if not math.isnan(step.estimate):
                fastest[family] = min(
                    fastest.get(family, (math.inf, "", 0)), (step.estimate, str(name), step.n)
                )
        if len(fastest) >= _FEWEST_LIBRARIES:
            names = [spelled(fastest[family][1]) for family in FAMILIES if family in fastest]
            each = f"{span([count for *_, count in fastest.values()], 'trial')} each"
            listed_names = f"{'; '.join(names[:-1])}; and {names[-1]}"
            sentences.append(
                f"In {types.replace(', ', ' ')}, the fastest settings ({each}) are {listed_names}."
            )
    return sentences
