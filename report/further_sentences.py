"""Chooses the sentences that follow the first one in the head of a page.

Which of them follow depends on the records alone, so that pages of old records have them too.  The kinds of sentences
are in :mod:`report.further`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from report.further import losses, settings, speeds
from report.further.head import Head
from report.further.pairs import on_pairs

MOST: Final = 3
"""Number of sentences that follow the first one at most."""


def further_sentences(head: Head, likewise: Sequence[str]) -> list[str]:
    """Return the sentences that follow the first one in a page's head, the most important ones first.

    Args:
        head: What the head is about.
        likewise: The sentences on a few differences that are like the first sentence's.
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
