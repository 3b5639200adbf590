"""Lets only one of the ranks that torchrun started print an error that several of them have.

torch is imported only when there is an error to print.
"""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta
from typing import Final

_PATIENCE: Final = timedelta(seconds=5)  # to connect to the store


def speaks(line: str) -> bool:
    """Return whether this process shall print ``line``.

    Among the processes that torchrun started, the first process that calls this function with a line prints the line.
    A process that torchrun did not start, or that cannot reach torchrun's store, always prints the line.
    """
    # Only the agent's store is used: another one would be served by rank 0, which may have failed already.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    import torch.distributed as dist

    key = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{hashlib.sha256(line.encode()).hexdigest()}"
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=_PATIENCE)  # type: ignore[attr-defined]
        return bool(store.add(f"zeropp/{key}", 1) == 1)
    except (KeyError, ValueError, RuntimeError):  # what torch raises for stores is a RuntimeError
        return True
