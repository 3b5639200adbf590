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
    """What a sweep does once a trial has failed: go on, run the trial again, or stop."""

    retries: int = 0  # how often the trial is run again, immediately
    stop: bool = False  # whether the sweep ends if the trial still fails

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Parse ``skip``, ``stop``, ``retry 2`` or ``retry 2, then stop``; raises a ValueError for other values."""
        match = _RESPONSE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError('expected "skip", "stop", "retry 2" (at most 10), or "retry 2, then stop"')
        return cls(retries=int(match[1] or 0), stop=value == "stop" or match[2] is not None)


SKIP: Final = FailureResponse()


class SuiteKeys(BaseModel, extra="forbid", frozen=True):
    """The keys at the top of a suite file, which hold for the whole suite."""

    name: str = Field(pattern=f"^{NAME}$", max_length=LONGEST_NAME)
    question: str = Field(min_length=1)
    time: str = "not stated"  # how long a run takes, in words
    repeats: Annotated[Repeats, BeforeValidator(Repeats.parse)] = Repeats()  # how often each trial is run
    # The response to each kind of failure; kinds that are not listed get `SKIP`.
    on_failure: dict[Kind, Annotated[FailureResponse, BeforeValidator(FailureResponse.parse)]] = {}
    answer: ChosenQuantity = ""  # the quantity that answers the question; if empty, it is inferred
    margin: int = Field(0, ge=0)  # steps of training by which a loss may be worse; 0: 1 % of the loss
    # Name of the suite whose records have the seconds of this suite's steps, for net speed-ups; if empty, its own have.
    seconds: str = Field("", pattern=f"^({NAME})?$", max_length=LONGEST_NAME)


class SuiteError(ValueError):
    """A suite file is invalid; the message is one line with the file, key and value, and what is allowed."""


class Override(BaseModel, extra="forbid", frozen=True):
    """A table ``[[override]]``, which changes fields of the combinations that it matches."""

    match: dict[str, Any]  # a partial match; if empty, it matches all
    set: dict[str, Any]  # the new values


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

    combinations: tuple[Trial, ...] = ()  # one trial per distinct run, as its repeat 0
    merged: tuple[str, ...] = ()  # the axes' values of each combination that resolves to another's run
    left_out: tuple[str, ...] = ()  # a line for each field that does not apply to some strategies
    # Whether the alignment of its policies, and so the ids of its trials, are known.  They are unknown if a policy has
    # a user's codec and the command imports no modules of the suite, since the codec's block cannot be read then.
    ids_known: bool = True
    roles: dict[str, str] = {}  # baseline or contrast, by the id of a trial's repeat 0
    compared_also: tuple[str, ...] = ()  # training fields that belong to the configuration (`repeat_order`)
    file: str = ""  # name of the suite file; empty if there is none
    text: str = ""  # content of the suite file
    configurations: dict[str, str] = {}  # JSON of the DeepSpeed configurations that it names, by path

    def role_of(self, trial: Trial) -> str:
        """Return the trial's role in the suite's comparison: ``baseline``, ``contrast``, or empty."""
        return self.roles.get(trial.model_copy(update={"repeat": 0}).id, "")

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The trials of the first sweep."""
        return self.sweep(0)

    def sweep(self, number: int) -> tuple[Trial, ...]:
        """Return the trials with which sweep ``number`` begins, in the order in which they run.

        With ``repeats = "until ..."`` further repeats follow (:mod:`harness.runs.further_repeats`).
        """
        first = number * self.repeats.most
        repeats = range(first, first + self.repeats.least)
        return tuple(trial for repeat in repeats for trial in interleave(self.combinations, repeat))

    def all_repeats(self, sweeps: int) -> dict[str, Trial]:
        """Return by id all trials that the first ``sweeps`` sweeps may run."""
        repeats = range(sweeps * self.repeats.most)
        trials = (
            setting.model_copy(update={"repeat": repeat})
            for setting in self.combinations
            for repeat in repeats
        )
        return {trial.id: trial for trial in trials}

    def trial_by_prefix(self, identity: str, sweeps: int = 1) -> Trial:
        """Return the trial of the first ``sweeps`` sweeps whose id begins with ``identity``.

        Raises:
            Refusal: unless there is exactly one such trial.
        """
        trials = [trial for name, trial in self.all_repeats(sweeps).items() if name.startswith(identity)]
        if len(trials) != 1:
            known = ", ".join(f"{trial.id} ({trial.strategy})" for trial in self.trials[:_MOST_NAMED])
            known += ", ..." if len(self.trials) > _MOST_NAMED else ""
            count = f"{len(trials) or 'no'} trials have an id that begins with {identity!r}"
            raise Refusal(f"suite {self.name!r}: {count}; its trials are {known}")
        return trials[0]
