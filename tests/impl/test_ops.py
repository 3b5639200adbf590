"""Operations choose a backend by device, and say which."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from impl import ops, reference
from impl.codec import parse


@pytest.fixture
def _fresh() -> Iterator[None]:
    """Choices made under a test's patches do not outlive it."""
    ops._choose.cache_clear()
    yield
    ops._choose.cache_clear()


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize(("found", "backend"), [(None, "reference"), (object(), "cuda")])
def test_a_cuda_device_uses_the_kernels_where_cupy_is_installed(
    monkeypatch: pytest.MonkeyPatch, found: object, backend: str
) -> None:
    """Without CuPy a CUDA device runs the reference, and the name says so."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: found)
    assert ops.backend_of(torch.device("cuda")) == backend
    assert ops.backend_of(torch.device("cpu")) == "reference"


def test_a_device_without_kernels_is_refused() -> None:
    """A device of another kind raises, naming it."""
    with pytest.raises(ValueError, match="no kernels for device meta: expected one of cpu, cuda"):
        ops.backend_of(torch.device("meta"))


def test_a_sum_encoded_again_equals_its_two_steps() -> None:
    """decode_sum_encode gives the frames of decode_sum, then encode."""
    first, second = parse("int8:8"), parse("int4:16:asym")
    frames = torch.empty(3, 2, first.frame_bytes(40), dtype=torch.uint8)
    ops.encode(first, torch.randn(3, 2, 40), frames)
    held, wanted = torch.empty(2, 40), torch.empty(2, second.frame_bytes(40), dtype=torch.uint8)
    reference.decode_sum(first, frames, held)
    reference.encode(second, held, wanted)
    got = torch.empty_like(wanted)
    ops.decode_sum_encode(first, second, frames, got, 40)
    assert torch.equal(got, wanted)
