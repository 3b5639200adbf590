"""The CUDA kernels, on the host and with ``-m gpu`` on a device, equal the reference bit for bit."""

from __future__ import annotations

import pytest
import torch

from impl.codecs.codec import parse
from impl.codecs.rounding_noise import Key
from impl.cuda.kernels import Kernels
from impl.cuda.launch import Launch
from tests.impl.codecs.properties import *  # noqa: F403  # the tests of every backend
from tests.impl.codecs.properties import Backend
from tests.support.cubin import VARIANTS


def nothing(launch: Launch, device: torch.device) -> None:
    raise AssertionError(launch)


def test_what_a_kernel_cannot_do_is_refused() -> None:
    """Impossible strides and shapes are refused in one line with the numbers; ``tests/impl/cpu`` has others."""
    kernels, codec = Kernels(nothing), parse("int8:8")
    many = torch.zeros(2, 2, 2, 2, 2, 2, 2, 2, 32).permute(1, 0, 3, 2, 5, 4, 7, 6, 8)
    with pytest.raises(ValueError, match="the CUDA kernels take at most 3"):
        kernels.encode(codec, many, torch.zeros(*many.shape[:-1], 48, dtype=torch.uint8))
    with pytest.raises(ValueError, match="1 x 65536 rows: the CUDA kernels take at most 65535"):
        kernels.encode(
            codec,
            torch.zeros(1).expand(65_536, 32),
            torch.zeros(1, dtype=torch.uint8).expand(65_536, 48).clone(),
        )
    rows = torch.zeros(1).expand(2**31)
    with pytest.raises(
        ValueError, match="a row of 2147483648 elements: the CUDA kernels take at most 2147483647"
    ):
        kernels.encode(codec, rows, torch.empty(codec.frame_bytes(2**31), dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"and noise with \(8, 24, 8, 72\): the CUDA kernels take at most 3"):
        kernels.encode(
            parse("int8:8:stochastic"),
            torch.zeros(2, 2, 2, 2, 32),
            torch.zeros(2, 2, 2, 2, 48, dtype=torch.uint8),
            noise=Key(0, 0, 0, "", "weights").noise(0, (8, 24, 8, 72)),
        )


def test_only_listed_kernels_are_asked_for(backend: Backend) -> None:
    """All kernels that this session launched are on the list that the compile gate compiles."""
    assert set(backend.run.ran) <= {kernel for kernels in VARIANTS.values() for kernel in kernels}
