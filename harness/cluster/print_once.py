"""Errors that all ranks of torchrun meet are printed by the first alone.  torch only where one failed.

Ranks that check the same flags and the same plan fail with the same line; torchrun shows what each writes.
They agree through the store by which torchrun's ranks find one another; where there is none, all speak.
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
    """Whether this process is the one to print ``words``, which it does inside the block.

    A rank that is not waits until the words are out; if the one that claimed them ends first, it prints them.
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
