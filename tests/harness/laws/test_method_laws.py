"""``zeropp check method`` finds what a reduction of one's own does wrong, and passes what is right."""

from __future__ import annotations

import re
import shlex
from types import SimpleNamespace
from typing import Any

import pytest

from examples.delayed import Delayed
from examples.lossless import Lossless
from examples.powersgd import PowerSGD
from examples.sign_vote import SignVote
from examples.top_k import TopK
from harness import cli
from harness.errors import Refusal
from harness.laws import command, method_cases
from harness.laws.method_laws import MethodDuty, claims_of, falsify
from impl.policy.own_method import LAWS, OwnMethod, method
from tests.support.methods import WRONG, Dither, Hops, Mean, Scaled

OF_GATHERS = {"settles"}  # tried in test_gather_laws.py
CLAIMS = {duty.name.lower(): duty for duty in MethodDuty} | {
    name: law for name, law in LAWS.items() if name not in OF_GATHERS
}


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
        method(Lossless),
    ],
    ids=str,
)  # fmt: skip
def test_the_claims_of_right_classes_hold(own: OwnMethod) -> None:
    """All duties and promised laws of the examples hold on drawn topologies, shapes and gradients."""
    for claim in claims_of(own):
        outcome = falsify(own, claim, examples=8, seed=1)
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
    assert "tests.support.methods:Halved breaks exact: on rank 0, element" in out
    assert "  smallest case found: 1x1 ranks with one copy, parameters" in out


def test_one_fault_that_breaks_several_claims_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Claims that fail in the same way on the same case share a line, which says how arguments are given."""
    own = "tests.support.methods:Needing"
    assert cli.main(["check", "method", "--examples", "2", own]) == command.VIOLATED
    out = capsys.readouterr().out
    assert out.count("'share'; give arguments as `method.NAME` in a suite, or with") == 1
    assert (
        f"{own} breaks mean, advance, resume, apart, keep, unstarted, bytes, same_on_all_ranks, zero, exact: "
        in out
    )


def test_a_rank_that_does_not_come_back_ends_the_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hang is tried once, and no other claim is; class, rank, unit and line are named."""
    monkeypatch.setattr(method_cases, "SECONDS", 0.7)
    own = "tests.support.methods:Stuck"
    assert cli.main(["check", "method", own]) == command.VIOLATED
    out = capsys.readouterr().out
    found = re.search(
        rf"{own} breaks mean: method {own} on rank \d, unit 'unit': has run for 1 s without waiting", out
    )
    assert found, out
    assert re.search(r"in start \(\S*methods\.py:\d+\)", out)
    assert (out.count("FAILS"), out.count("not tried")) == (1, 9)


def test_a_mean_that_depends_on_its_shards_is_told_from_one_that_depends_on_ranks() -> None:
    """The fault against ``same_on_all_ranks`` says that the other mean is of ranks that keep the whole mean."""
    outcome = falsify(method(Scaled), CLAIMS["same_on_all_ranks"], examples=20, seed=0)
    assert "but rank 0 finds " in outcome.violation
    assert outcome.violation.endswith(" if each rank keeps the whole mean")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere:Class",), "nowhere:Class: cannot import 'nowhere'"),
        (("no name",), "'no name' does not name a class: expected 'module:Class'"),
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


def test_a_refused_suite_names_a_command_that_a_shell_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments with spaces or quotes stay one word each."""
    (claim, *_) = MethodDuty
    own = SimpleNamespace(name="mine:Mine", arguments=(("betas", [0.9, 0.99]), ("kind", "a b"), ("rank", 2)))
    broken = SimpleNamespace(case="a case", violation="wrong")
    monkeypatch.setattr("harness.laws.method_laws.claims_of", lambda _: [claim])
    monkeypatch.setattr("harness.laws.method_laws.falsify", lambda *_, **__: broken)
    trials: list[Any] = [SimpleNamespace(own_method=own, own_gather=None, resolved_policy=lambda: None)]
    with pytest.raises(Refusal) as refused:
        command.check_laws(trials)
    typed = str(refused.value).partition("`")[2].partition("`")[0]
    assert shlex.split(typed) == [
        "zeropp", "check", "method", "mine:Mine", "--argument", "betas=[0.9, 0.99]", "--argument", 'kind="a b"',
        "--argument", "rank=2",
    ]  # fmt: skip
