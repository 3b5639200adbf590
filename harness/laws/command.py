"""``zeropp check codecs``: the declared laws of codecs, ours or anyone's, on hostile rows.

Status 0 where all hold, 1 where one does not, 2 for what cannot be tried.  torch and Hypothesis are imported
only once the command runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final

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

if TYPE_CHECKING:
    from harness.laws.adversarial_rows import Outcome
    from harness.laws.laws import Claim, Subject, Violation

VIOLATED: Final = 1
EXAMPLES: Final = 40
_BEFORE_A_RUN: Final = 50  # examples of each claim of a suite's own codecs
_MOST_SHOWN: Final = 64  # elements or bytes of a violation

app = typer.Typer(help="Try the laws that codecs declare.", rich_markup_mode=None)


@app.callback()
def _entry() -> None:
    """Try the laws that codecs declare."""  # with it, ``codecs`` stays a word of the command line


@app.command()
def codecs(
    backend: Annotated[
        list[str] | None, typer.Option(help="reference, cpu or cuda; several times; default: all found.")
    ] = None,
    codec: Annotated[
        list[str] | None, typer.Option(help="Text form, or your own module:object; several times.")
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="Rows that each law is tried on.")] = EXAMPLES,
    seed: Annotated[int, typer.Option(min=0, help="Of the rows: the same seed, the same rows.")] = 0,
    elements: Annotated[
        int, typer.Option(min=1, max=2**31 - 1, help="Of the longest row that each law is tried on.")
    ] = ELEMENTS,
) -> None:
    """Try every declared law on hostile rows; print the smallest row that breaks one."""
    from harness.laws.adversarial_rows import outcome

    subjects, left_out = _subjects(codec or [], backend or [])
    out = terminal_table.console()
    found = {
        subject: {
            claim: outcome(subject, claim, examples=examples, seed=seed, elements=elements)
            for claim in subject.claims
        }
        for subject in subjects
    }
    out.print(_table(found))
    broken = [
        (subject, claim, one.violation)
        for subject, each in found.items()
        for claim, one in each.items()
        if one.violation is not None
    ]
    lines = [line for violation in broken for line in in_lines(*violation)] + left_out
    if examples < EXAMPLES:
        lines.append(f"On {examples} rows a law, not {EXAMPLES}: more find faults that these do not.")
    for line in lines:
        out.print(escape(line), soft_wrap=True)
    if broken:
        raise typer.Exit(VIOLATED)


def check_laws(trials: Sequence[Trial]) -> list[str]:
    """Try a suite's own codecs before its first trial; returns the names of those that trials send.

    The first declared law that one breaks is a Refusal.
    """
    codecs = {
        codec
        for trial in trials
        if (policy := trial.resolved_policy()) is not None
        for codec in policy.own_codecs
    }
    if not codecs:
        return []
    from harness.laws.adversarial_rows import outcome
    from harness.laws.subject import of_own

    for codec in sorted(codecs, key=str):
        subject = of_own(codec)
        for claim in subject.claims:
            found = outcome(subject, claim, examples=_BEFORE_A_RUN, seed=0, elements=5000)
            if found.violation is not None:
                lines = in_lines(subject, claim, found.violation)
                raise Refusal(
                    f"{lines[0]}; `zeropp check codecs --codec {codec}` shows the row: {lines[1].strip()}"
                )
    return sorted(map(str, codecs))


def _table(found: Mapping[Subject, Mapping[Claim, Outcome]]) -> Table:
    """Subjects, and the claims that any makes."""
    from harness.laws.laws import Duty, title

    made = {claim for each in found.values() for claim in each}
    claims: list[Claim] = [claim for claim in (*Duty, *Law) if claim in made]
    table = Table("codec", *map(title, claims), box=box.SIMPLE_HEAD)
    table.columns[0].overflow = "fold"
    for subject, each in found.items():
        words = {
            claim: "[bold red]FAILS[/]" if one.violation else f"holds {one.cases}"
            for claim, one in each.items()
        }
        table.add_row(escape(subject.name), *(words.get(claim, NONE) for claim in claims))
    return table


def in_lines(subject: Subject, claim: Claim, violation: Violation) -> list[str]:
    """A violation in lines: what is broken and how far, the row and its frame."""
    from harness.laws.laws import title

    x = violation.x
    values = [f"{value:.9g}" for value in x[:_MOST_SHOWN].tolist()]  # as many digits as tell fp32 apart
    kind = str(x.dtype).removeprefix("torch.")
    lines = [
        f"{subject.name} breaks {title(claim)}: {claim.value}",
        f"  {violation}",
        f"  smallest row found, {x.numel()} of {kind}: {' '.join(values)}{_more(x.numel())}",
    ]
    if violation.frame is not None:
        frame = bytes(violation.frame.tolist())
        lines.append(f"  frame, {len(frame)} bytes: {frame[:_MOST_SHOWN].hex(' ')}{_more(len(frame))}")
    return lines


def _more(count: int) -> str:
    return f" ... ({count - _MOST_SHOWN} more)" if count > _MOST_SHOWN else ""


def _subjects(texts: Sequence[str], backends: Sequence[str]) -> tuple[list[Subject], list[str]]:
    """Whom to try; a line for each backend that is not here."""
    from harness.laws import subject
    from harness.laws.laws import Subject

    interrupts.take_over()  # a codec of one's own may begin what it cleans up
    named = [subject.read(text) for text in texts or subject.REPRESENTATIVE]
    own = [each for each in named if isinstance(each, Subject)]
    ours: list[Codec] = [each for each in named if not isinstance(each, Subject)]
    if backends and not ours:
        raise Refusal(f"--backend {backends[0]}: {own[0].name} brings its own code; leave the option out")
    asked = backends or (subject.BACKENDS if ours else ())
    reasons = {name: reason for name in asked if (reason := subject.missing(name)) is not None}
    if backends and reasons:
        raise Refusal(next(iter(reasons.values())))
    here = [name for name in asked if name not in reasons]
    left_out = [f"not here: {reason}" for reason in reasons.values()]
    return [*(subject.of_codec(each, name) for name in here for each in ours), *own], left_out
