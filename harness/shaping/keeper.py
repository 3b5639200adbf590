"""Runs a *keeper*: a child process that holds a resource of the kernel, such as network namespaces, until it ends.

The parent starts ``python -m MODULE REQUEST``.  The keeper makes the resource, and answers with one line of JSON that
describes it, or with ``{"error": ...}``.  The keeper ends, and releases the resource, when its standard input closes.
This happens also when the parent is killed by ``kill -9``.  Keepers do not import torch, so that they start in a tenth
of a second.

The two kinds of keeper are :mod:`harness.shaping.netns_shaper` and :mod:`harness.shaping.nic_shaper`.
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

ANSWER_SECONDS: Final = 120.0  # limit for a keeper's answer; a keeper that dies is noticed at once
_ROOT: Final = Path(__file__).resolve().parents[2]  # folder from which harness can be imported


class Keeper:
    """Starts a *keeper*, reads its answer, and ends it.

    A keeper is a child process that holds a resource of the kernel, such as network namespaces, until it ends.  Its
    answer is a dict that describes the resource.
    """

    def __init__(self, module: str, request: str) -> None:
        """Start a keeper with a request, and wait for its answer, which becomes the attribute ``answer``.

        Args:
            module: Name of the keeper's module, which is run with ``python -m``.
            request: The request, which is the module's only argument.

        Raises:
            LinkError: If the keeper refuses the request, dies, or does not answer within :data:`ANSWER_SECONDS`.
        """
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, request],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            start_new_session=True,  # a Ctrl-C in the terminal must reach only the sweep
        )
        try:
            self.answer = self._read()
        except BaseException:
            self.end()
            raise

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None  # noqa: S101 - piped above
        if not select.select([self.process.stdout], [], [], ANSWER_SECONDS)[0]:
            raise LinkError(
                f"the process that sets up the link did not answer within {ANSWER_SECONDS:g} s; run the trial again"
            )
        if not (line := self.process.stdout.readline()):
            raise LinkError(
                f"the process that sets up the link died: {self.end() or 'it printed no reason'}; run the trial again"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LinkError(answer["error"])
        return answer

    def end(self, seconds: float = 2.0) -> str:
        """End the keeper by closing its standard input; kill the keeper if it has not ended after ``seconds``.

        Returns:
            The last line of the keeper's standard error; empty if there is none.
        """
        try:
            errors = self.process.communicate(timeout=seconds)[1]
        except subprocess.TimeoutExpired:
            self.process.kill()
            errors = self.process.communicate()[1]
        return "".join(errors.strip().splitlines()[-1:])


def send_answer(answer: dict[str, Any]) -> None:
    """Send ``answer`` from a keeper (:class:`Keeper`) to its parent process, as one line of JSON on standard output."""
    print(json.dumps(answer), flush=True)


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """In a keeper, send any error of the ``with`` block to the parent process as the answer, and raise the error again.

    A keeper is a child process that holds a resource of the kernel.  From the beginning of the block on, this process
    also ignores Ctrl-C, which the parent process handles.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    except Exception as error:  # netlink raises many kinds of errors
        missing = not_imported(error) if isinstance(error, ImportError) else None
        send_answer({"error": missing or str(error)})
        raise
