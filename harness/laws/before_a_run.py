"""Tries the laws of a suite's own codecs before its first trial runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from harness.errors import Refusal
from harness.suites.trial import Trial

EXAMPLES: Final = 50  # of each claim; `zeropp check codecs` tries more


def check_laws(trials: Sequence[Trial]) -> list[str]:
    """The names of the own codecs that trials send; the first declared law that one breaks is a Refusal."""
    codecs = {
        codec
        for trial in trials
        if (policy := trial.resolved_policy()) is not None
        for codec in policy.own_codecs
    }
    if not codecs:
        return []
    from harness.laws.adversarial_rows import outcome
    from harness.laws.command import in_lines
    from harness.laws.subject import of_own

    for codec in sorted(codecs, key=str):
        subject = of_own(codec)
        for claim in subject.claims:
            found = outcome(subject, claim, examples=EXAMPLES, seed=0, elements=5000)
            if found.violation is not None:
                lines = in_lines(subject, claim, found.violation)
                raise Refusal(
                    f"{lines[0]}; `zeropp check codecs --codec {codec}` shows the row: {lines[1].strip()}"
                )
    return sorted(map(str, codecs))
