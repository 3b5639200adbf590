"""Chooses up to three sentences that follow the first sentence in the head of a page.

The choice depends on the records alone, so that pages of old records have such sentences, too.  The modules of
:mod:`report.further` write the sentences, which state other facts than the first sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from report.further import losses, settings, speeds
from report.further.head import Head
from report.further.pairs import on_pairs

MOST: Final = 3
"""Largest number of sentences that follow the first sentence."""


def further_sentences(head: Head, likewise: Sequence[str]) -> list[str]:
    """Return up to :data:`MOST` sentences that follow the first sentence of a page, the most important first.

    Args:
        head: What the first sentence is about: a quantity, a configuration, and the configuration's difference from
            its baseline.
        likewise: Sentences on a few other differences in this quantity (:func:`report.sentence.likewise`).
    """
    if head.asked in ("size", "nodes", "trials"):
        return [*likewise][:MOST]
    of_settings = settings.by_setting(head)
    pairs, facts = ([], []) if of_settings or head.asked == "bytes" else on_pairs(head)
    parts = speeds.on_parts(head)
    sentences = [
        *of_settings,
        *likewise,
        *settings.between_settings(head),
        *losses.on_libraries(head),
        *pairs,
        *parts,
        *speeds.on_phases(head),
        *([] if pairs else losses.on_equal_bytes(head)),
        *losses.on_fewest_bytes(head),
        *losses.on_net_speed(head),
        *speeds.on_copies(head),
        *speeds.on_bytes(head),
        *facts,
        *([] if parts else speeds.on_memory(head)),
        *losses.on_errors(head),
    ]
    return list(dict.fromkeys(sentences))[:MOST]
