"""A model whose ranks fail in a given way, for sweeps that must go on; hosts import it from their folder."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.suites.trial import Model
from harness.workloads import models


class Faulty(nn.Module):
    """A small GPT; one rank fails in its fourth forward pass."""

    def __init__(self, net: nn.Module, fault: str, rank: int) -> None:
        super().__init__()
        self.net, self.fault, self.rank, self.passes = net, fault, rank, 0

    def forward(self, read: Tensor, answer: Tensor) -> Any:
        """The mean loss."""
        self.passes += 1
        if self.passes == 4 and dist.is_initialized() and dist.get_rank() == self.rank:
            if self.fault == "crash":
                raise ZeroDivisionError("a planted error")
            if self.fault == "memory":
                torch.empty(1 << 60, dtype=torch.uint8)
            if self.fault == "hang":
                time.sleep(600)
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return self.net(read, answer)


def model(sequence: int, fault: str = "none", rank: int = 3) -> nn.Module:
    """What a suite names as ``faulty:model``."""
    return Faulty(models.build(Model(name="gpt-tiny"), sequence), fault, rank)
