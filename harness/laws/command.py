"""``zeropp check``: tests the laws that codecs (``codecs``) and a user's own methods (``method``) declare.

A law is a property, such as an error bound.  A method is a reduction of gradients, or a gather of weights.  The exit
status is 0 if all laws hold, 1 if a law is broken, and 2 if a codec, method or backend cannot be tried.  ``zeropp run``
calls :func:`check_laws` for the user codecs and methods of a suite.  torch and Hypothesis are imported only when a
check runs.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from harness import terminal_table
from harness.cluster import interrupts
from harness.errors import Refusal
from harness.laws import ELEMENTS
from harness.suites.labels import NONE
from harness.suites.trial import Trial
from impl.codecs.codec import Codec, Law
from impl.policy import own_method
from impl.policy.own_method import OwnMethod

if TYPE_CHECKING:
    from harness.laws.adversarial_rows import Outcome
    from harness.laws.laws import Claim, Subject, Violation

VIOLATED: Final = 1
EXAMPLES: Final = 40
_BEFORE_A_RUN: Final = 50  # examples of each claim when zeropp run checks a suite's user codecs
_MOST_SHOWN: Final = 64  # elements or bytes of a violation that are printed

_METHODS_BEFORE_A_RUN: Final = 8  # examples of each claim when zeropp run checks a suite's methods

app = typer.Typer(
    help="Check that codecs and methods keep the laws that they declare.", rich_markup_mode=None
)


@app.callback()
def _entry() -> None:
    """Check that codecs and methods keep the laws that they declare."""


@app.command()
def codecs(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="Backend to check: reference, cpu or cuda; may be given several times. Default: all that are "
            "available."
        ),
    ] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            help="Codec to check, in its text form or as your own module:object; may be given several times. "
            "Default: one of every kind."
        ),
    ] = None,
    examples: Annotated[
        int, typer.Option(min=1, help="Number of random rows that each law is tried on.")
    ] = EXAMPLES,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the random rows; an equal seed gives equal rows.")
    ] = 0,
    elements: Annotated[
        int, typer.Option(min=1, max=2**31 - 1, help="Elements of the longest row that each law is tried on.")
    ] = ELEMENTS,
) -> None:
    """Try every law that a codec declares on adversarial rows, and print the smallest row that breaks a law."""
    from harness.laws.adversarial_rows import falsify

    subjects, left_out = _subjects(codec or [], backend or [])
    out = terminal_table.console()
    outcomes = {
        subject: {
            claim: falsify(subject, claim, examples=examples, seed=seed, elements=elements)
            for claim in subject.claims
        }
        for subject in subjects
    }
    out.print(_table(outcomes))
    violations = [
        (subject, claim, outcome.violation)
        for subject, by_claim in outcomes.items()
        for claim, outcome in by_claim.items()
        if outcome.violation is not None
    ]
    lines = [line for violation in violations for line in violation_lines(*violation)] + left_out
    if examples < EXAMPLES:
        lines.append(
            f"Each law was tried on {examples} random rows, not on {EXAMPLES} as by default: fewer rows find fewer "
            "faults."
        )
    for line in lines:
        out.print(escape(line), soft_wrap=True)
    if violations:
        raise typer.Exit(VIOLATED)


@app.command()
def method(
    name: Annotated[
        str, typer.Argument(help="Your class, as module:Class of the working folder.", metavar="MODULE:CLASS")
    ],
    argument: Annotated[
        list[str] | None,
        typer.Option(help="Argument of the class, as NAME=VALUE; may be given several times."),
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="Number of random cases of each law.")] = EXAMPLES,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the random cases; an equal seed gives equal cases.")
    ] = 0,
) -> None:
    """Try every law that a reduction or gather of your own declares, on ranks that are threads, and print the smallest
    case that breaks a law.
    """
    from harness.laws.method_laws import claims_of, falsify

    interrupts.take_over()
    own = _method(name, argument or [])
    out = terminal_table.console()
    table, broken = Table("claim", "outcome", "meaning", box=box.SIMPLE_HEAD), dict[str, list[str]]()
    hung = False
    for claim in claims_of(own):
        if hung:
            table.add_row(claim.name.lower(), "not tried", claim.value)
            continue
        outcome = falsify(own, claim, examples=examples, seed=seed)
        title = claim.name.lower()
        if outcome.case is not None:
            # One fault often breaks several claims in the same way, and is then printed once.
            fault = (
                f"{outcome.violation}\n  {'case' if outcome.hung else 'smallest case found'}: {outcome.case}"
            )
            broken.setdefault(fault, []).append(title)
            hung = outcome.hung
        result = "[bold red]FAILS[/]" if outcome.case is not None else f"holds {outcome.cases}"
        table.add_row(title, result, claim.value)
    out.print(table)
    for fault, titles in broken.items():
        out.print(escape(f"{own} breaks {', '.join(titles)}: {fault}"), soft_wrap=True)
    if broken:
        raise typer.Exit(VIOLATED)


def _method(name: str, arguments: Sequence[str]) -> OwnMethod:
    """Return the user's reduction or gather that the command line names, with its arguments.

    Each argument is a text ``NAME=VALUE``.  The value is read as JSON or, if it is no JSON, as a text.

    Raises:
        Refusal: If the method cannot be imported, or an argument has another form.
    """
    values: dict[str, Any] = {}
    for text in arguments:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise Refusal(f"--argument {text}: expected NAME=VALUE, such as rank=4")
        try:
            values[key] = json.loads(value)
        except (ValueError, RecursionError):
            values[key] = value  # a text
    try:
        own = own_method.method(name, **values)
        _ = own.definition
    except own_method.MethodError as error:
        raise Refusal(str(error)) from error
    return own


def check_laws(trials: Sequence[Trial]) -> list[str]:
    """Check the laws of the user's own codecs and methods in a suite's trials, before the first trial runs.

    A method is a reduction of gradients, or a gather of weights, that the user has written.

    Returns:
        The names of the checked codecs and methods; an empty list if the trials use none.

    Raises:
        Refusal: If a law is broken, or if a codec or method cannot be tried.
    """
    return [*_check_codecs(trials), *_check_methods(trials)]


def _check_methods(trials: Sequence[Trial]) -> list[str]:
    owns = (own for trial in trials for own in (trial.own_method, trial.own_gather))
    methods = {str(own): own for own in owns if own is not None}
    if not methods:
        return []
    from harness.laws.method_laws import claims_of, falsify

    for text, own in sorted(methods.items()):
        for claim in claims_of(own):
            outcome = falsify(own, claim, examples=_METHODS_BEFORE_A_RUN, seed=0)
            if outcome.case is not None:
                given = [f"{key}={json.dumps(value)}" for key, value in own.arguments]
                options = "".join(f" --argument {shlex.quote(each)}" for each in given)
                raise Refusal(
                    f"{text} breaks the claim {claim.name.lower()!r} ({claim.value}): {outcome.violation}; run `zeropp "
                    f"check method {own.name}{options}` to see the case"
                )
    return sorted(methods)


def _check_codecs(trials: Sequence[Trial]) -> list[str]:
    codecs = {
        codec
        for trial in trials
        if (policy := trial.resolved_policy()) is not None
        for codec in policy.own_codecs
    }
    if not codecs:
        return []
    from harness.laws.adversarial_rows import falsify
    from harness.laws.laws import title
    from harness.laws.subject import user_subject

    for codec in sorted(codecs, key=str):
        subject = user_subject(codec)
        for claim in subject.claims:
            outcome = falsify(subject, claim, examples=_BEFORE_A_RUN, seed=0, elements=5000)
            if outcome.violation is not None:
                raise Refusal(
                    f"{subject.name} breaks the claim {title(claim)!r} ({claim.value}): {outcome.violation}; run "
                    f"`zeropp check codecs --codec {codec}` to see the smallest values that break it"
                )
    return sorted(map(str, codecs))


def _table(outcomes: Mapping[Subject, Mapping[Claim, Outcome]]) -> Table:
    """Make a table of outcomes: a row for each checked codec, a column for each law or duty."""
    from harness.laws.laws import Duty, title

    tried = {claim for by_claim in outcomes.values() for claim in by_claim}
    claims: list[Claim] = [claim for claim in (*Duty, *Law) if claim in tried]
    table = Table("codec", *map(title, claims), box=box.SIMPLE_HEAD)
    table.columns[0].overflow = "fold"
    for subject, by_claim in outcomes.items():
        cells = {
            claim: "[bold red]FAILS[/]" if outcome.violation else f"holds {outcome.cases}"
            for claim, outcome in by_claim.items()
        }
        table.add_row(escape(subject.name), *(cells.get(claim, NONE) for claim in claims))
    return table


def violation_lines(subject: Subject, claim: Claim, violation: Violation) -> list[str]:
    """Return lines of text for the terminal that describe how ``subject`` breaks ``claim``, a law or a duty of codecs.

    The lines have the broken claim, the element or byte that breaks it and the row.  If the row was encoded, they also
    have the frame: the bytes that the row was encoded to.
    """
    from harness.laws.laws import title

    x = violation.x
    values = [f"{value:.9g}" for value in x[:_MOST_SHOWN].tolist()]  # nine digits distinguish any two fp32
    kind = str(x.dtype).removeprefix("torch.")
    lines = [
        f"{subject.name} breaks {title(claim)}: {claim.value}",
        f"  {violation}",
        f"  smallest row found, {kind}[{x.numel()}]: {' '.join(values)}{_more(x.numel())}",
    ]
    if violation.frame is not None:
        frame = bytes(violation.frame.tolist())
        lines.append(f"  frame, {len(frame)} bytes: {frame[:_MOST_SHOWN].hex(' ')}{_more(len(frame))}")
    return lines


def _more(count: int) -> str:
    return f" ... ({count - _MOST_SHOWN} more)" if count > _MOST_SHOWN else ""


def _subjects(texts: Sequence[str], backends: Sequence[str]) -> tuple[list[Subject], list[str]]:
    """Return the implementations of codecs to check, and a line of text for each backend that this machine lacks.

    Args:
        texts: Codecs that the user named; if empty, :data:`harness.laws.subject.REPRESENTATIVE`.
        backends: Backends that the user named; if empty, all backends.

    Raises:
        Refusal: If this machine lacks a backend that the user named, or if the user named a backend although all named
            codecs are user codecs, which have no backends.
    """
    from harness.laws import subject
    from harness.laws.laws import Subject

    interrupts.take_over()  # a user's codec may start something that it has to clean up after Ctrl-C
    named = [subject.read(text) for text in texts or subject.REPRESENTATIVE]
    users = [codec for codec in named if isinstance(codec, Subject)]
    codecs: list[Codec] = [codec for codec in named if not isinstance(codec, Subject)]
    if backends and not codecs:
        raise Refusal(
            f"--backend {backends[0]} does not apply to {users[0].name}, which brings its own code and has no "
            "backends: leave --backend out"
        )
    candidates = backends or (subject.BACKENDS if codecs else ())
    reasons = {name: reason for name in candidates if (reason := subject.why_missing(name)) is not None}
    if backends and reasons:
        raise Refusal(next(iter(reasons.values())))
    left_out = [f"not checked: {reason}" for reason in reasons.values()]
    available = [name for name in candidates if name not in reasons]
    return [*(subject.subject_of(codec, name) for name in available for codec in codecs), *users], left_out
