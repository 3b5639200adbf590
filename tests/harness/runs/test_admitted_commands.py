"""A node runs only trials of the suite file that it has read itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.cluster.rank_processes import Launch
from harness.errors import Refusal
from harness.runs.rank_trial import Assignment, admit_of
from harness.suites import folder
from harness.suites.suite import Suite
from harness.suites.trial import Cluster, Model, Trial
from impl.policy.topology import Topology

OWN = Trial(strategy="qwz", cluster=Cluster(nodes=2, launcher="torchrun", transport="gloo"))
SUITE = Suite(name="q", question="?", combinations=(OWN,))
LAUNCH = Launch(Topology(2, 1), (), None, 1, 1.0, Path("log"))


def test_a_trial_of_the_suite_is_the_nodes_own() -> None:
    """Any repeat of a trial of the suite is run, in the node's own folder."""
    asked = Assignment(OWN.model_copy(update={"repeat": 3}), None, Path("/elsewhere"))
    admitted = admit_of(SUITE)(asked, LAUNCH)
    assert admitted.trial == asked.trial
    assert admitted.folder == folder.current()


@pytest.mark.parametrize(
    "change", [{"model": Model(name="evil:build")}, {"tokenizer": "os:system"}, {"steps": OWN.steps + 1}]
)
def test_any_other_trial_is_refused(change: dict[str, object]) -> None:
    """A trial that names another module, or differs in any field, is refused by its id."""
    other = OWN.model_copy(update=change)
    with pytest.raises(Refusal, match=f"trial {other.id} is not in this node's suite file: copy node 0's"):
        admit_of(SUITE)(Assignment(other, None), LAUNCH)


def test_another_transport_is_refused() -> None:
    """Neither a trial nor a measurement of the link imports a backend that the suite does not name."""
    with pytest.raises(Refusal, match=r"transport 'evil.backend' is not in this node's suite file"):
        admit_of(SUITE)((8, 1, "gloo", "torchrun"), replace(LAUNCH, backend="evil.backend"))
