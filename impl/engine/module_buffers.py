"""Keeps a sharded model's persistent buffers equal on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from impl.comm.wire import Wire

_AVERAGED = (torch.float32, torch.float16, torch.bfloat16)  # sums of these are exact enough in fp64


class ModuleBuffers:
    """The persistent buffers (running means, counters) of one model, which each rank's passes change.

    All ranks take the mean of floating-point buffers, and rank 0's values of others (DDP: of all).
    """

    def __init__(self, model: nn.Module, wire: Wire) -> None:
        self._model, self._wire = model, wire
        self.nbytes = sum(buffer.nbytes for buffer in self._persistent())  # of a rank's message
        self.differ = True  # whether a training pass may have changed them; at first unknown

    def _persistent(self) -> list[Tensor]:
        """Persistent buffers with elements, each once, in the model's order."""
        buffers = {
            id(buffer): buffer
            for module in self._model.modules()
            for name, buffer in module._buffers.items()  # noqa: SLF001  # as state_dict() does
            if buffer is not None and name not in module._non_persistent_buffers_set  # noqa: SLF001
        }
        return [buffer for buffer in buffers.values() if buffer.numel()]

    @staticmethod
    def changed_by(module: nn.Module) -> bool:
        """Whether a pass of ``module`` may change some, as running means, without recording gradients."""
        return any(part.training and part._buffers for part in module.modules())  # noqa: SLF001

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Context that restores all buffers, also those that are not persistent."""
        differ, kept = self.differ, [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        try:
            yield
        finally:
            self.differ = differ
            with torch.no_grad():
                for buffer, values in kept:
                    buffer.copy_(values)

    @torch.no_grad()
    def make_equal(self) -> None:
        """Make them equal if a pass may have changed them; all ranks must call it."""
        if not self.differ or not self.nbytes:
            return
        self.differ = False
        buffers = self._persistent()
        local = torch.cat([buffer.contiguous().view(-1).view(torch.uint8) for buffer in buffers])
        rows = self._wire.all_gather_small(local, "buffers")  # (ranks, bytes)
        start = 0
        for buffer in buffers:
            part = rows[:, start : start + buffer.nbytes].clone(memory_format=torch.contiguous_format)
            part = part.view(buffer.dtype)  # (ranks, elements); a clone of one row would keep its stride
            if buffer.dtype in _AVERAGED:
                part = part.double().mean(0, keepdim=True)
            buffer.copy_(part[0].view(buffer.shape))
            start += buffer.nbytes
