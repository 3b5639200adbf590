"""``zeropp check method`` finds what a reduction of one's own does wrong, and passes what is right."""

from __future__ import annotations

import pytest

from examples.delayed import Delayed
from examples.powersgd import PowerSGD
from examples.sign_vote import SignVote
from examples.top_k import TopK
from harness import cli
from harness.laws import command
from harness.laws.method_laws import MethodDuty, claims_of, falsify
from impl.plan.own_method import LAWS, OwnMethod, method
from tests.support.methods import WRONG, Dither, Hops, Mean

CLAIMS = {**{duty.name.lower(): duty for duty in MethodDuty}, **LAWS}


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
        method(Mean), method(Hops), method(Dither), method(PowerSGD, rank=1), method(PowerSGD, rank=3),
        method(TopK, share=0.2), method(SignVote), method(SignVote, feedback=False), method(Delayed),
    ],
    ids=str,
)  # fmt: skip
def test_the_claims_of_right_classes_hold(own: OwnMethod) -> None:
    """All duties and promised laws of the examples hold on drawn topologies, shapes and gradients."""
    for claim in claims_of(own):
        outcome = falsify(own, claim, examples=12, seed=1)
        assert outcome.case is None, f"{claim}: {outcome.violation} ({outcome.case})"
        assert outcome.cases


def test_claims_are_duties_and_promised_laws() -> None:
    """A class is tried on its duties and its own laws; ``bytes`` only if it declares them."""
    names = {claim.name.lower() for claim in claims_of(method(Hops))}
    assert names == {duty.name.lower() for duty in MethodDuty} - {"bytes"} | {"exact"}


def test_the_command_prints_what_holds_and_what_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """The command lists each claim with its number of cases, and the smallest case that breaks one."""
    arguments = ["check", "method", "--examples", "5"]
    assert cli.main([*arguments, "examples.top_k:TopK", "--argument", "share=0.5"]) == cli.OK
    out = capsys.readouterr().out
    assert "FAILS" not in out
    assert out.count("holds 5") == 11
    assert cli.main([*arguments, "tests.support.methods:Halved"]) == command.VIOLATED
    out = capsys.readouterr().out
    assert "tests.support.methods:Halved breaks exact: on rank 0 element" in out
    assert "  smallest case found: 1x1 ranks with one copy, parameters" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere:Class",), "nowhere:Class: cannot import 'nowhere'"),
        (("no name",), "'no name': expected 'module:Class'"),
        (("examples.top_k:math",), "examples.top_k:math: is a module, expected a class"),
        (("examples.top_k:TopK", "--argument", "share"), "--argument share: expected NAME=VALUE"),
    ],
)
def test_what_cannot_be_tried_is_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A class that cannot be imported, or an argument without a value, is refused with status 2."""
    assert cli.main(["check", "method", *arguments]) == cli.REFUSED
    assert message in capsys.readouterr().err
