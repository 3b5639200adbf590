"""The strategies that a trial can train with: our policies, the peers for comparison, and users' own strategies.

A policy says what is sent, held and computed.  Our own engine (`impl`) runs it, or FSDP2 or DDP with our collectives
inside.  Peers are DDP, FSDP2, DeepSpeed and a single process, without our collectives.

``from harness.strategies import Strategy`` gives the base class of a user's own strategy (docs/guide/own_method.md).
The class is imported on first use, because its module imports torch, which commands that only plan do not need.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "Strategy":
        from harness.strategies.own_strategy import OwnStrategy

        return OwnStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
