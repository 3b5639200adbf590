"""The suite key that says what :mod:`harness.runs.sweep` does when a trial has failed, by kind of failure.

It goes on, tries it again, or stops.  No torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, Self, get_args

from pydantic import BaseModel

Kind = Literal["crashed", "disk", "killed", "link", "lost", "memory", "refused", "timeout", "wrong"]
_MOST: Final = 10
_WORDS: Final = re.compile(r"skip|stop|retry ([1-9]\d?)(, then stop)?")


class Answer(BaseModel, extra="forbid", frozen=True):
    """To one kind of failure."""

    retries: int = 0  # how often the trial runs again, at once
    stop: bool = False  # whether the sweep ends if it has failed still

    @classmethod
    def of(cls, value: Any) -> Self:
        """Read ``skip``, ``stop``, ``retry 2`` or ``retry 2, then stop``.

        Raises:
            ValueError: for any other; one line.
        """
        found = _WORDS.fullmatch(value) if isinstance(value, str) else None
        if found is None or int(found[1] or 0) > _MOST:
            raise ValueError(f'expected "skip", "stop", "retry 2" (at most {_MOST}), or "retry 2, then stop"')
        return cls(retries=int(found[1] or 0), stop=value == "stop" or found[2] is not None)


SKIP: Final = Answer()


def answers(value: Any) -> dict[str, Answer]:
    """Read the table ``on_failure``: answers by kind of failure.

    Raises:
        ValueError: for another kind, or another answer; one line.
    """
    if not isinstance(value, Mapping):
        raise ValueError("expected a table")  # noqa: TRY004 - which pydantic turns into its own
    for kind in value:
        if kind not in get_args(Kind):
            raise ValueError(f"{kind}: expected one of {', '.join(get_args(Kind))}")
    return {kind: Answer.of(answer) for kind, answer in value.items()}
