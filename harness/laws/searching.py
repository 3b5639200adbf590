"""Settings with which Hypothesis searches for a case that breaks a claim."""

from typing import Final

import hypothesis
from hypothesis import Phase, Verbosity

# A costly claim, such as UNBIASED, is tried on examples / FEWER cases, since each case takes many runs.
FEWER: Final = 10


def search_settings(examples: int, *, costly: bool) -> hypothesis.settings:
    """Return Hypothesis's settings for a search over ``examples`` cases.

    For a ``costly`` claim, the search has a tenth as many cases, at least 2, and the case found is not shrunk, since
    each attempt would take as long as a case.
    """
    return hypothesis.settings(
        max_examples=max(2, examples // FEWER) if costly else examples,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate] if costly else [Phase.generate, Phase.shrink],
        verbosity=Verbosity.quiet,
    )
