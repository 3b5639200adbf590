"""A suite: a question, and the trials that answer it."""

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
_MOST_NAMED: Final = 12  # trials in a message
_RESPONSE: Final = re.compile(r"skip|stop|retry ([1-9]|10)(, then stop)?")
Kind = Literal["crashed", "disk", "killed", "link", "lost", "memory", "refused", "timeout", "wrong"]


class FailureResponse(BaseModel, extra="forbid", frozen=True):
    """What a sweep does after a trial failed: go on, try again, or stop."""

    retries: int = 0  # how often the trial runs again, at once
    stop: bool = False  # whether the sweep ends if it still fails

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Read ``skip``, ``stop``, ``retry 2`` or ``retry 2, then stop``; a ValueError for any other."""
        match = _RESPONSE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError('expected "skip", "stop", "retry 2" (at most 10), or "retry 2, then stop"')
        return cls(retries=int(match[1] or 0), stop=value == "stop" or match[2] is not None)


SKIP: Final = FailureResponse()


class SuiteKeys(BaseModel, extra="forbid", frozen=True):
    """The keys of a suite's file that hold for the whole suite."""

    name: str = Field(pattern=f"^{NAME}$", max_length=LONGEST_NAME)
    question: str = Field(min_length=1)
    time: str = "not stated"  # how long it takes
    repeats: Annotated[Repeats, BeforeValidator(Repeats.parse)] = Repeats()  # how often each trial is run
    on_failure: dict[
        Kind, Annotated[FailureResponse, BeforeValidator(FailureResponse.parse)]
    ] = {}  # `SKIP` for others
    answer: ChosenQuantity = ""  # the quantity that answers the question; empty leaves it to the axes
    margin: int = Field(0, ge=0)  # steps of training that losses may differ by; 0 leaves it to the report


class SuiteError(ValueError):
    """A suite file is invalid; the message is one line with file, key, value and what is allowed."""


class Override(BaseModel, extra="forbid", frozen=True):
    """What an ``[[override]]`` sets in the combinations that it matches."""

    match: dict[str, Any]
    set: dict[str, Any]


class SuiteTables(SuiteKeys):
    """All keys of a suite file."""

    baseline: dict[str, Any] = Field({})
    contrast: dict[str, Any] = Field({})
    defaults: dict[str, Any] = Field({})
    matrix: dict[str, Any] = Field({})
    zip: list[dict[str, Any]] = Field([])
    exclude: list[dict[str, Any]] = Field([])
    override: list[Override] = Field([])


class Suite(SuiteKeys):
    """A question and the trials that answer it."""

    combinations: tuple[Trial, ...] = ()  # of the axes' values: each trial once
    merged: tuple[str, ...] = ()  # combinations that are the same run as another, by their values on the axes
    left_out: tuple[str, ...] = ()  # fields that are left out of strategies, and why, one line each
    roles: dict[str, str] = {}  # by the id of a trial's first repeat
    compared_also: tuple[str, ...] = ()  # fields that, by the baseline, are part of a configuration too
    file: str = ""  # the file's name, if there is one
    text: str = ""  # of the file
    configurations: dict[str, str] = {}  # DeepSpeed's in files, JSON by path

    def role_of(self, trial: Trial) -> str:
        """The trial's role in the suite's question: ``baseline``, ``contrast``, or empty."""
        return self.roles.get(trial.model_copy(update={"repeat": 0}).id, "")

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The trials of the first sweep."""
        return self.sweep(0)

    def sweep(self, number: int) -> tuple[Trial, ...]:
        """The trials with which a sweep begins, in their order: repeat by repeat."""
        first = number * self.repeats.most
        repeats = range(first, first + self.repeats.least)
        return tuple(trial for repeat in repeats for trial in interleave(self.combinations, repeat))

    def all_repeats(self, sweeps: int) -> dict[str, Trial]:
        """All trials that ``sweeps`` may run, by id."""
        repeats = range(sweeps * self.repeats.most)
        trials = (
            setting.model_copy(update={"repeat": repeat})
            for setting in self.combinations
            for repeat in repeats
        )
        return {trial.id: trial for trial in trials}

    def trial_by_prefix(self, identity: str, sweeps: int = 1) -> Trial:
        """The one trial of ``sweeps`` whose id begins with ``identity``; else a Refusal."""
        trials = [trial for name, trial in self.all_repeats(sweeps).items() if name.startswith(identity)]
        if len(trials) != 1:
            known = ", ".join(f"{trial.id} ({trial.strategy})" for trial in self.trials[:_MOST_NAMED])
            known += ", ..." if len(self.trials) > _MOST_NAMED else ""
            count = f"{len(trials) or 'no'} trials begin with {identity!r}"
            raise Refusal(f"suite {self.name!r}: {count}; it has {known}")
        return trials[0]
