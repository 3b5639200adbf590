"""``zeropp check method`` finds what a gather of one's own does wrong, and passes what is right."""

from __future__ import annotations

import re

import pytest

from examples.differences import Differences
from harness import cli
from harness.laws import command, method_cases
from harness.laws.gather_laws import GatherDuty, GatherLaw
from harness.laws.method_laws import claims_of, falsify
from impl.policy.own_method import LAWS, OwnMethod, method
from tests.support.gathers import WRONG, Dither, Hops, Kept, Whole

CLAIMS = {claim.name.lower(): claim for claim in (*GatherDuty, *GatherLaw)}


def test_laws_of_gathers_are_those_of_methods() -> None:
    """Each law that a class can promise has a meaning for gathers."""
    assert {law.name.lower() for law in GatherLaw} == LAWS.keys()


@pytest.mark.parametrize("name", CLAIMS)
def test_every_claim_is_broken_by_a_class_that_breaks_it(name: str) -> None:
    """Each duty and law fails for a class that breaks it, with the smallest case on which it does."""
    own = method(WRONG[name])
    assert CLAIMS[name] in claims_of(own)
    outcome = falsify(own, CLAIMS[name], examples=40, seed=0)
    assert outcome.case is not None
    assert outcome.violation


@pytest.mark.parametrize(
    "own",
    [
        method(Whole), method(Hops), method(Kept), method(Dither), method(Differences),
        method(Differences, block=8),
    ],
    ids=str,
)  # fmt: skip
def test_the_claims_of_right_classes_hold(own: OwnMethod) -> None:
    """All duties and promised laws of right classes hold on drawn topologies, shapes, weights and compute types."""
    for claim in claims_of(own):
        outcome = falsify(own, claim, examples=12, seed=1)
        assert outcome.case is None, f"{claim}: {outcome.violation} ({outcome.case})"
        assert outcome.cases


def test_claims_are_duties_and_promised_laws() -> None:
    """A class is tried on its duties and its own laws; ``bytes`` only if it declares them."""
    names = {claim.name.lower() for claim in claims_of(method(Hops))}
    assert names == {duty.name.lower() for duty in GatherDuty} - {"bytes"} | {"exact"}


def test_the_command_prints_what_holds_and_what_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """The command lists each claim of a gather with its number of cases, and the smallest case that breaks one."""
    arguments = ["check", "method", "--examples", "5"]
    assert cli.main([*arguments, "examples.differences:Differences", "--argument", "block=32"]) == cli.OK
    out = capsys.readouterr().out
    assert "FAILS" not in out
    assert out.count("holds 5") == 11
    assert cli.main([*arguments, "tests.support.gathers:Halved"]) == command.VIOLATED
    out = capsys.readouterr().out
    assert "tests.support.gathers:Halved breaks exact: on rank 0, element" in out
    assert "  smallest case found: 1x1 ranks with one copy, parameters" in out


def test_a_rank_that_does_not_come_back_ends_the_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hang is tried once, and no other claim is; class, rank, unit and line are named."""
    monkeypatch.setattr(method_cases, "SECONDS", 0.7)
    own = "tests.support.gathers:Stuck"
    assert cli.main(["check", "method", own]) == command.VIOLATED
    out = capsys.readouterr().out
    found = re.search(
        rf"{own} breaks whole: method {own} on rank \d, unit 'unit': has run for 1 s without waiting", out
    )
    assert found, out
    assert re.search(r"in start \(\S*gathers\.py:\d+\)", out)
