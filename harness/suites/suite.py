"""Defines a suite: a question and the trials that answer it, and the keys of a suite file."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field

from harness.errors import Refusal
from harness.suites.answering_quantity import ChosenQuantity
from harness.suites.repeat_order import Repeats, interleave
from harness.suites.trial import Trial

NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
LONGEST_NAME: Final = 100
_MOST_NAMED: Final = 12  # trials that an error message lists
_RESPONSE: Final = re.compile(r"skip|stop|retry ([1-9]|10)(, then stop)?")
Kind = Literal["crashed", "disk", "killed", "link", "lost", "memory", "refused", "timeout", "wrong"]


class FailureResponse(BaseModel, extra="forbid", frozen=True):
    """How a sweep responds to a failed trial: it goes on, runs the trial again, or stops."""

    retries: int = 0  # how often the trial is run again, immediately
    stop: bool = False  # whether the sweep ends if the trial still fails

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Parse ``skip``, ``stop``, ``retry 2`` or ``retry 2, then stop``.

        Raises:
            ValueError: For other values, and for more than 10 retries.
        """
        match = _RESPONSE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError('expected "skip", "stop", "retry 2" (at most 10), or "retry 2, then stop"')
        return cls(retries=int(match[1] or 0), stop=value == "stop" or match[2] is not None)


SKIP: Final = FailureResponse()


class SuiteKeys(BaseModel, extra="forbid", frozen=True):
    """The keys at the top of a suite file.  They apply to the whole suite."""

    name: str = Field(pattern=f"^{NAME}$", max_length=LONGEST_NAME)
    question: str = Field(min_length=1)
    time: str = "not stated"  # text for readers that says how long a sweep takes
    repeats: Annotated[Repeats, BeforeValidator(Repeats.parse)] = Repeats()  # how often each trial is run
    # The response to each kind of failure; kinds that are not listed get `SKIP`.
    on_failure: dict[Kind, Annotated[FailureResponse, BeforeValidator(FailureResponse.parse)]] = {}
    answer: ChosenQuantity = ""  # the quantity that answers the question; if empty, it is inferred
    # Non-inferiority margin of losses, in training steps: the margin is how far the baseline's loss falls in so many
    # steps, at its mean rate over the last quarter of training.  With 0 the margin is 1 % of the baseline's loss.
    margin: int = Field(0, ge=0)
    # Name of another suite, in whose records the seconds of a step were measured.  Net speed-ups (how much faster a
    # configuration reaches its baseline's final loss) are computed with these seconds.  If the name is empty, the
    # seconds of this suite's own records are used.
    seconds: str = Field("", pattern=f"^({NAME})?$", max_length=LONGEST_NAME)


class SuiteError(ValueError):
    """Raised if a suite file is invalid.  The message is one line with the key, the value, and what is allowed."""


class Override(BaseModel, extra="forbid", frozen=True):
    """A table ``[[override]]``, which changes fields of the trials that it matches.

    It matches combinations: a combination has one value of each axis of the suite, and becomes a trial.
    """

    # Values by field.  The table matches the combinations that have all these values; if empty, all combinations.
    match: dict[str, Any]
    set: dict[str, Any]  # the new values, by field


class SuiteTables(SuiteKeys):
    """All keys and tables of a suite file, before they are expanded into trials."""

    baseline: dict[str, Any] = Field({})
    contrast: dict[str, Any] = Field({})
    defaults: dict[str, Any] = Field({})
    matrix: dict[str, Any] = Field({})
    zip: list[dict[str, Any]] = Field([])
    exclude: list[dict[str, Any]] = Field([])
    override: list[Override] = Field([])


class Suite(SuiteKeys):
    """A question and the trials that answer it."""

    combinations: tuple[Trial, ...] = ()  # one trial for each distinct run, with repeat 0
    # Combinations that are not run, because another combination is the same run: the values of their axes, as text.
    merged: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()  # a line for each field that does not apply to some strategies
    # Whether the ids of the suite's trials are known.  They are unknown if a policy has a user's codec and the command
    # imports no modules of the suite: the codec's block size, which determines the alignment, cannot be read then.
    ids_known: bool = True
    roles: dict[str, str] = {}  # "baseline" or "contrast", by the id of a trial's repeat 0
    compared_also: tuple[str, ...] = ()  # training fields that belong to the configuration (`repeat_order`)
    file: str = ""  # name of the suite file; empty if there is none
    text: str = ""  # content of the suite file
    configurations: dict[str, str] = {}  # JSON of the DeepSpeed configurations that the suite names, by path

    def role_of(self, trial: Trial) -> str:
        """Return the trial's role in the comparison: ``baseline``, ``contrast``, or an empty text for neither."""
        return self.roles.get(trial.model_copy(update={"repeat": 0}).id, "")

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The trials of the first sweep (one run of all repeats), in the order in which they run (:meth:`sweep`)."""
        return self.sweep(0)

    def sweep(self, number: int) -> tuple[Trial, ...]:
        """Return the trials of sweep ``number``, counted from 0, in the order in which they run.

        A sweep runs all repeats of the suite's trials once.  With ``repeats = "until ..."``, only the repeats that
        always run are returned.  Whether further repeats run depends on the results
        (:mod:`harness.runs.further_repeats`).
        """
        first = number * self.repeats.most
        repeats = range(first, first + self.repeats.least)
        return tuple(trial for repeat in repeats for trial in interleave(self.combinations, repeat))

    def all_repeats(self, sweeps: int) -> dict[str, Trial]:
        """Return all trials that the first ``sweeps`` sweeps may run, as a dict from a trial's id to the trial.

        A sweep runs all repeats of the suite's trials once.  With ``repeats = "until ..."``, the largest number of
        repeats is returned, although fewer may run.
        """
        repeats = range(sweeps * self.repeats.most)
        trials = (
            setting.model_copy(update={"repeat": repeat})
            for setting in self.combinations
            for repeat in repeats
        )
        return {trial.id: trial for trial in trials}

    def trial_by_prefix(self, identity: str, sweeps: int = 1) -> Trial:
        """Return the trial whose id begins with ``identity``; the first ``sweeps`` sweeps are searched.

        Raises:
            Refusal: if there is no such trial, or if there are several.
        """
        trials = [trial for name, trial in self.all_repeats(sweeps).items() if name.startswith(identity)]
        if len(trials) != 1:
            known = ", ".join(f"{trial.id} ({trial.strategy})" for trial in self.trials[:_MOST_NAMED])
            known += ", ..." if len(self.trials) > _MOST_NAMED else ""
            count = f"{len(trials) or 'no'} trials have an id that begins with {identity!r}"
            raise Refusal(f"suite {self.name!r}: {count}; name one of its trials: {known}")
        return trials[0]
