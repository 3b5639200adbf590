"""Prints an error that all ranks of torchrun raise only once.  Imports torch only after an error.

Ranks that check the same flags fail with the same line, and torchrun shows the output of each.  They agree
through torchrun's rendezvous store on one that prints; where there is none, all do.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

_PATIENCE: Final = timedelta(seconds=5)  # for the store, and for the rank that said it would speak


@contextlib.contextmanager
def saying(words: str) -> Iterator[bool]:
    """Yields whether this process is the one to print ``words``, inside the block.

    Other ranks first wait until they are printed; if the rank that claimed them ends before, all print.
    """
    # Without the agent's store rank 0 would have to serve one, and may have failed first.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        yield True
        return
    import torch.distributed as dist

    key = hashlib.sha256(words.encode()).hexdigest()
    key = f"zeropp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{key}"
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=_PATIENCE)  # type: ignore[attr-defined]
        first = store.add(f"{key}/claimed", 1) == 1
        if not first:
            store.wait([f"{key}/said"], _PATIENCE)
    except (KeyError, ValueError, RuntimeError):  # torch's errors of stores are runtime errors
        yield True
        return
    yield first
    if first:
        with contextlib.suppress(RuntimeError):
            store.set(f"{key}/said", "")
