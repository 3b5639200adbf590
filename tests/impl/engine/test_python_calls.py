"""A step makes few Python calls: a GPU's small steps wait for them."""

from __future__ import annotations

from impl.plan.topology import Topology
from tests.support.python_calls import calls_of_gather, calls_of_step
from tests.support.ranks import on_processes

STEP, UNIT, FILES, GATHER = 409, 250, 20, 60


def test_a_step_makes_few_python_calls() -> None:
    """Of two units, on one of four gloo ranks, fewer than FSDP2's, in few files; and what a third adds."""
    (two, fsdp2), (three, _) = (
        on_processes(Topology(1, 4), calls_of_step, units, "zero3")[0] for units in (2, 3)
    )
    assert two.calls <= min(STEP, fsdp2.calls)
    assert two.files <= FILES
    assert three.calls - two.calls <= UNIT


def test_a_gather_makes_few_python_calls() -> None:
    """From the hook before a module to weights that it sees, in one hop and in two."""
    for topology, name in ((Topology(1, 4), "zero3"), (Topology(2, 2), "zeropp")):
        assert on_processes(topology, calls_of_gather, name)[0].calls <= GATHER
