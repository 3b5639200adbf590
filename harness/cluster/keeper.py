"""A process that holds a resource of the kernel until its standard input closes (the keeper).

``python -m MODULE REQUEST`` answers with one JSON line, ``{"error": ...}`` where it refuses, and releases the
resource when it ends, so also after ``kill -9`` of its parent.  No torch: a fresh interpreter starts in a
tenth of a second.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from harness.errors import LinkError, not_imported

ANSWER_SECONDS: Final = 120.0  # it imports its libraries first; one that dies is noticed at once
_ROOT: Final = Path(__file__).resolve().parents[2]  # where harness is importable from


class Keeper:
    """A keeper, as its parent sees it."""

    def __init__(self, module: str, request: str) -> None:
        """Start one and read its ``answer``; a LinkError if it refuses the request."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, request],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            start_new_session=True,  # a Ctrl-C in the terminal is for the sweep alone
        )
        try:
            self.answer = self._read()
        except BaseException:
            self.end()
            raise

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None  # noqa: S101 - piped above
        if not select.select([self.process.stdout], [], [], ANSWER_SECONDS)[0]:
            raise LinkError(f"the keeper of the link did not answer within {ANSWER_SECONDS:g} s")
        if not (line := self.process.stdout.readline()):
            raise LinkError(f"the keeper of the link died: {self.end() or 'no message'}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LinkError(answer["error"])
        return answer

    def end(self, seconds: float = 2.0) -> str:
        """Close its standard input, and kill it if it then does not end; returns its last line of errors."""
        try:
            errors = self.process.communicate(timeout=seconds)[1]
        except subprocess.TimeoutExpired:
            self.process.kill()
            errors = self.process.communicate()[1]
        return "".join(errors.strip().splitlines()[-1:])


def send_answer(answer: dict[str, Any]) -> None:
    """In the keeper: send the parent a description of what it holds."""
    print(json.dumps(answer), flush=True)


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """In the keeper: report an error in the body to the parent, which alone reacts to a Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    except Exception as error:  # netlink raises many
        missing = not_imported(error) if isinstance(error, ImportError) else None
        send_answer({"error": missing or str(error)})
        raise
