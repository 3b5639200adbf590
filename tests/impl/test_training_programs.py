"""Tests that programs as users write them train as one process does, or are refused in one line."""

from __future__ import annotations

import tempfile

import pytest
import torch
from hypothesis import given, settings

from impl.errors import ZeroError
from impl.policy.topology import Topology
from tests.support.programs import POLICIES, OneProcess, Program, Step, on_rank, programs, run
from tests.support.ranks import on_threads

SECONDS = 30  # after which a rank that waits for another has hung
TOLERANCE = 1e-4  # of the largest value: sums over ranks are in another order


def outcome(program: Program) -> str:
    """Return "trained" if the program trains as in one process, or the line that refuses it."""
    outputs, states = run(OneProcess(program), program)
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = on_threads(program.topology, on_rank, program, folder, seconds=SECONDS)
        except ZeroError as error:
            return str(error)
    for seen, state in results:
        for ours, wanted in zip(seen, outputs, strict=True):
            assert close(ours, wanted), (ours, wanted)
        for ours, wanted in zip(state, states, strict=True):
            assert ours.keys() == wanted.keys()
            for name, value in wanted.items():
                assert close(ours[name], value), (name, ours[name], value)
    return "trained"


def close(ours: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((ours - wanted).abs().max() <= TOLERANCE * wanted.abs().max().clamp(min=0.1))


@given(programs())
def test_programs_train_as_one_process_or_are_refused(program: Program) -> None:
    """Twenty programs train to the weights of one process or are refused; none hangs."""
    outcome(program)


@pytest.mark.nightly
@settings(max_examples=200)
@given(programs())
def test_many_programs_train_as_one_process_or_are_refused(program: Program) -> None:
    """Two hundred programs, drawn anew at each run, train or are refused."""
    outcome(program)


@pytest.mark.parametrize("policy", POLICIES)
def test_plain_programs_train(policy: str) -> None:
    """A program of each policy that does nothing unusual is not refused."""
    steps = Step(action="average", micro_batches=2, max_norm=0.5), Step(action="checkpoint")
    program = Program(policy=policy, topology=Topology(2, 2), optimizer="AdamW", tied=True, steps=steps)
    assert outcome(program) == "trained"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (Program(optimizer="Lamb"), "not elementwise"),
        (Program(steps=(Step(action="freeze"),)), "is now frozen"),
    ],
)
def test_what_shards_cannot_train_is_refused(program: Program, words: str) -> None:
    """Programs that shards cannot train are refused with the reason in one line."""
    refusal = outcome(program)
    assert words in refusal
    assert "\n" not in refusal
