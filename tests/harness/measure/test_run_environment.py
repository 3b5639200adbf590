"""What a run's file says of the machine."""

from __future__ import annotations

import pytest
import torch

from harness.errors import Refusal
from harness.measure.run_environment import libraries


def test_another_cudnn_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names the variable, both versions and the way out."""

    def version() -> int:
        raise RuntimeError(
            "cuDNN version incompatibility: PyTorch was compiled  against (9, 20, 0) but found runtime version "
            "(9, 1, 0). PyTorch already comes bundled with cuDNN. One option is to\nremove it."
        )

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/cudnn/lib")
    with pytest.raises(Refusal) as caught:
        libraries()
    assert "LD_LIBRARY_PATH = /opt/cudnn/lib: cuDNN version incompatibility" in str(caught.value)
    assert "found runtime version (9, 1, 0); remove the folder" in str(caught.value)
    assert "\n" not in str(caught.value)
