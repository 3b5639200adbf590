"""What the engine raises when it is used in a way that it cannot follow."""

from __future__ import annotations


class ZeroError(RuntimeError):
    """The engine is used in a way that would train something else; the message says how."""
