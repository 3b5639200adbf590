"""Makes sure that an error line is printed only once if several processes of one torchrun job have the same error.

torch is imported only when there is an error to print.
"""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta
from typing import Final

_PATIENCE: Final = timedelta(seconds=5)  # to connect to the store


def speaks(line: str) -> bool:
    """Return whether this process should print ``line``, an error that other processes of the job may have too.

    Among the processes that torchrun started, the first call with this line returns True, and all later calls return
    False.  In a process that torchrun did not start, or that cannot reach torchrun's store, every call returns True.
    """
    # The store must be that of torchrun's agent.  Without one, rank 0 would serve it, and may have failed already.
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
