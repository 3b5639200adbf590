"""Host memory through which messages of tensors on a GPU go, for what carries CPU tensors alone.

So several ranks can share a GPU, which NCCL refuses: gloo carries what they copy out.  Memory is pinned; a
copy out is waited for by an event before gloo may read it, and a copy in lies on the stream that will use it:
its buffer is taken again only once that is done.  On a CPU the copies are plain ones: tests go the same way.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class Staging:
    """Reused host buffers for messages of tensors on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._free: dict[int, list[tuple[Tensor, torch.cuda.Event | None]]] = defaultdict(list)

    def take(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8 in host memory, which no copy reads any more."""
        if free := self._free[nbytes]:
            buffer, read = free.pop(0)  # the one whose copy is the longest ago
            if read is not None:
                read.synchronize()
            return buffer
        with torch.inference_mode(mode=False):  # it outlives a pass in inference mode
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._on_gpu)

    def out(self, message: Tensor, to: Tensor) -> None:
        """Copy a message (bytes,) to a host buffer as long; it is there when this returns."""
        to.view(-1).copy_(message.view(-1), non_blocking=True)
        if (copied := self._event()) is not None:
            copied.synchronize()

    def back(self, came: Tensor, to: Tensor) -> None:
        """Copy what came (bytes,) to the device, in the order of its current stream."""
        to.view(-1).copy_(came.reshape(-1), non_blocking=True)

    def give_back(self, buffer: Tensor) -> None:
        """Let a buffer be used again, once copies that were begun from it are done."""
        self._free[buffer.numel()].append((buffer, self._event()))

    def clear(self) -> None:
        """Let go of what is free."""
        self._free.clear()

    def _event(self) -> torch.cuda.Event | None:
        """Of what the current stream has been given so far; None on a CPU."""
        if not self._on_gpu:
            return None
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return done
