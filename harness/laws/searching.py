"""Settings for Hypothesis, which searches for inputs on which a user's codec or method breaks a property."""

from typing import Final

import hypothesis
from hypothesis import Phase, Verbosity

# A costly claim, such as UNBIASED, is tried on examples / FEWER cases, since each case takes many runs.
FEWER: Final = 10


def search_settings(examples: int, *, costly: bool) -> hypothesis.settings:
    """Return Hypothesis's settings for a search over ``examples`` cases.

    With ``costly``, for a property whose every case takes long, the search tries ``examples`` / 10 cases, but at least
    2.  It then does not shrink the failing case to a simpler one, because each attempt takes as long as a case.
    """
    return hypothesis.settings(
        max_examples=max(2, examples // FEWER) if costly else examples,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate] if costly else [Phase.generate, Phase.shrink],
        verbosity=Verbosity.quiet,
    )
