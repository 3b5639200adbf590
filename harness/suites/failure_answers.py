"""What a sweep does when a trial has failed, by kind: it goes on, tries again, or stops.  No torch."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator

Kind = Literal["crashed", "disk", "killed", "link", "lost", "memory", "refused", "timeout", "wrong"]
_WORDS: Final = re.compile(r"skip|stop|retry ([1-9]|10)(, then stop)?")


class Answer(BaseModel, extra="forbid", frozen=True):
    """To one kind of failure."""

    retries: int = 0  # how often the trial runs again, at once
    stop: bool = False  # whether the sweep ends if it has failed still

    @classmethod
    def of(cls, value: Any) -> Self:
        """Read ``skip``, ``stop``, ``retry 2`` or ``retry 2, then stop``; a ValueError for any other."""
        found = _WORDS.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            raise ValueError('expected "skip", "stop", "retry 2" (at most 10), or "retry 2, then stop"')
        return cls(retries=int(found[1] or 0), stop=value == "stop" or found[2] is not None)


SKIP: Final = Answer()
Answers = dict[Kind, Annotated[Answer, BeforeValidator(Answer.of)]]
