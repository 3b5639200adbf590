"""A model that fails on one rank, for sweeps that must go on; hosts import it from their folder."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from harness.suites.trial import Model
from harness.workloads import models


class Faulty(nn.Module):
    """A small GPT; rank 3 may fail in its fourth forward pass."""

    def __init__(self, net: nn.Module, fault: str) -> None:
        super().__init__()
        self.net, self.fault, self.passes = net, fault, 0

    def forward(self, read: Tensor, answer: Tensor) -> Any:
        """Return the mean loss."""
        self.passes += 1
        if self.fault == "crash" and self.passes == 4 and dist.is_initialized() and dist.get_rank() == 3:
            raise ZeroDivisionError("a planted error")
        return self.net(read, answer)


def model(sequence: int, fault: str = "none") -> nn.Module:
    """Return the model; a suite names it as ``faulty:model``."""
    return Faulty(models.build(Model(name="gpt-tiny"), sequence), fault)
