"""One of torchrun's ranks prints an error that several have.  Imports torch only after an error."""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta
from typing import Final

_PATIENCE: Final = timedelta(seconds=5)  # for the store


def speaks(line: str) -> bool:
    """Whether this process prints ``line``: the first to ask torchrun's store; without a store, all do."""
    # Without the agent's store rank 0 would have to serve one, and may have failed first.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    import torch.distributed as dist

    key = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{hashlib.sha256(line.encode()).hexdigest()}"
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=_PATIENCE)  # type: ignore[attr-defined]
        return bool(store.add(f"zeropp/{key}", 1) == 1)
    except (KeyError, ValueError, RuntimeError):  # torch's errors of stores are runtime errors
        return True
