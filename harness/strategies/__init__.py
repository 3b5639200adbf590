"""The strategies that a trial can train with: every policy of `impl`, the peers for comparison, and users' own.

``from harness.strategies import Strategy`` gives the base class of a user's own strategy (docs/guide/own_method.md).
The class is imported on first use, because its module imports torch, which commands that only plan do not need.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "Strategy":
        from harness.strategies.own_strategy import OwnStrategy

        return OwnStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
