"""An engine whose streams are delayed at random, and whose memory is filled with NaN when it is given back.

An engine that waits for the wrong event, or reads memory after giving it back, then learns something else.
On a CPU, without streams, ranks sleep instead; memory is poisoned too.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from impl.comm import exchanges
from impl.unit import context
from impl.unit.context import HostMemory

_CYCLES = 2_000_000  # of a GPU's clock, at most: a millisecond
_SECONDS = 2e-4  # of a CPU, at most


def poison(buffer: Tensor) -> None:
    """Make every byte 0xFF, in the order of the current stream: NaN in all types, and an impossible code."""
    with torch.inference_mode(mode=False), torch.no_grad():
        buffer.view(-1).view(torch.uint8).fill_(0xFF)


class Late:
    """Delays of the current stream, or of a CPU's thread, by ``seed``."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.delays = 0

    def __call__(self, device: torch.device) -> None:
        """Delay every other call on average."""
        share = max(0.0, self._draw.uniform(-1, 1))
        self.delays += share > 0
        if device.type == "cuda":
            torch.cuda._sleep(int(share * _CYCLES))
        else:
            time.sleep(share * _SECONDS)


@contextlib.contextmanager
def shaken(device: torch.device, seed: int) -> Iterator[Late]:
    """Delay and poison all engines of this process; :func:`computing_late` delays a model."""
    late = Late(seed)

    def first(delay: Callable[..., None], method: Callable[..., Any]) -> Callable[..., Any]:
        def delayed(self: Any, *args: Any, **kwargs: Any) -> Any:
            delay(self)
            return method(self, *args, **kwargs)

        return delayed

    def poisoning(method: Callable[..., None]) -> Callable[..., None]:
        def giving_back(self: Any, *buffers: Tensor) -> None:
            for buffer in buffers:
                poison(buffer)
            method(self, *buffers)

        return giving_back

    def on_this_stream(_: object) -> None:
        late(device)

    def on_its_stream(host: HostMemory) -> None:
        with contextlib.nullcontext() if host._down is None else torch.cuda.stream(host._down._stream):
            late(device)

    with pytest.MonkeyPatch.context() as patch:
        for pool in (context.Reserve, exchanges.Buffers):
            patch.setattr(pool, "give_back", poisoning(pool.give_back))
        for kind, name in ((exchanges.Staged, "wait"), (HostMemory, "copy"), (exchanges.Distributed, "post")):
            patch.setattr(kind, name, first(on_this_stream, getattr(kind, name)))
        patch.setattr(HostMemory, "download", first(on_its_stream, HostMemory.download))
        yield late


def computing_late(net: nn.Module, late: Late, device: torch.device) -> None:
    """Have each module of ``net`` begin late, in forward and in backward."""

    def before_backward(_: nn.Module, __: object, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda _: late(device))  # type: ignore[no-untyped-call]

    for module in net.modules():
        module.register_forward_pre_hook(lambda *_: late(device))
        module.register_forward_hook(before_backward)
