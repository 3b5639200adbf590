"""Drives collectives: each is a generator that stops after every message it posted.

So the caller can compute while a message travels.  What is sent, and in which order, follows from the
collective alone.

[Note: deferred last hop]
After a message of an earlier hop the caller comes back soon, for the next hop cannot be posted before this
one has arrived and the link would idle.  After the last hop nothing is left to post: if it travels between
nodes, on the slowest link, its wait is deferred until the values are needed (:meth:`Transfer.proceed`);
inside a node it is over by the time that anybody asks.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, Literal, TypeVar

from impl.errors import ZeroError

T = TypeVar("T")


# Yields after each message whether it is the last, and travels between nodes ([Note: deferred last hop]).
Steps = Generator[bool, None, T]

_INTERRUPTED: Final = {
    "gather": "a gather that was interrupted cannot be finished: its weights did not arrive on this rank; "
    "call drop_gradients(), and run the pass anew",
    "reduction": "a reduction that was interrupted cannot be finished: its gradients are lost on this rank; "
    "call drop_gradients(), finish_backward() and zero_grad(), and run the step anew",
}


def finish(steps: Steps[T]) -> T:
    """Carry a collective to its end and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


class Transfer:
    """A collective under way: starts at once, goes on when told.

    All ranks must call :meth:`proceed`, :meth:`advance` and :meth:`wait` in the same order: each may post
    the next hop's message, and messages of one axis match by order.

    Args:
        of: what it is, for the error of one that was interrupted.

    Attributes:
        failed: whether it ended in an error, or was interrupted: then it is never carried on.
    """

    def __init__(self, steps: Steps[None], of: Literal["gather", "reduction"]) -> None:
        self._steps: Steps[None] | None = steps
        self._of = of
        self.failed = self._deferred = False
        self.advance()

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return self._steps is None

    def advance(self) -> None:
        """Wait for the message under way and post the next one, if there is one.

        Raises:
            ZeroError: if it failed before.
        """
        if self.failed:
            raise ZeroError(_INTERRUPTED[self._of])
        if self._steps is not None:
            try:
                self._deferred = next(self._steps)
            except StopIteration:
                self._steps = None
            except BaseException:  # a generator that raised would look as if it had ended
                self.failed = True
                raise

    def proceed(self) -> None:
        """:meth:`advance`, unless it would only wait for the slowest link ([Note: deferred last hop]).

        Raises:
            ZeroError: if it failed before.
        """
        if self.failed or not self._deferred:
            self.advance()

    def wait(self) -> None:
        """Carry the collective to its end."""
        while self._steps is not None:
            self.advance()
