"""Settings for Hypothesis, which searches for inputs on which a user's codec or method breaks a property."""

from typing import Final

import hypothesis
from hypothesis import Phase, Verbosity

# A costly claim, such as UNBIASED, is tried on examples / FEWER cases, since each case takes many runs.
FEWER: Final = 10


def search_settings(examples: int, *, costly: bool) -> hypothesis.settings:
    """Return Hypothesis's settings for a search over ``examples`` cases.

    Set ``costly`` if each case takes long.  The search then tries only ``examples`` / 10 cases, but at least 2.  When a
    case has failed, a costly search does not look for a simpler case that fails too, because that needs many further
    cases.
    """
    return hypothesis.settings(
        max_examples=max(2, examples // FEWER) if costly else examples,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate] if costly else [Phase.generate, Phase.shrink],
        verbosity=Verbosity.quiet,
    )
