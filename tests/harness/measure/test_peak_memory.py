"""Tests of the readings of a process's and a GPU's memory."""

from __future__ import annotations

import pytest
import torch

from harness.measure.peak_memory import device_in_use


def test_what_a_gpu_holds_besides_torchs_tensors_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes in use are all that are not free, whoever holds them; the CPU has no such reading."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5, 80))
    assert device_in_use(torch.device("cuda", 0)) == 75
    assert device_in_use(torch.device("cpu")) is None
