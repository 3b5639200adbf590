"""A message of a backend that never arrives, as from an NCCL whose peers do not take part."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


class Never(dist.Work):
    """The handle of a collective that does not complete, unless a test sets ``done``; waiting returns at once."""

    def __init__(self) -> None:
        super().__init__()
        self.done = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True
