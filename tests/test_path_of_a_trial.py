"""How many files a trial passes through in the sweep's process."""

from __future__ import annotations

import pytest

from tests.path_of_a_trial import path_of_a_trial, stays

MOST_STAYS = 20
MOST_RETURNS = 6


@pytest.mark.long
@pytest.mark.needs("namespaces")
def test_a_trial_goes_one_way() -> None:
    """From the sweep to its record it stays in few files, and comes back to few of them."""
    found = stays(path_of_a_trial())
    assert found[0] == "runs/sweep.py"
    assert "runs/trial_on_cluster.py" in found
    assert len(found) <= MOST_STAYS, found
    assert len(found) - len(set(found)) <= MOST_RETURNS, found
