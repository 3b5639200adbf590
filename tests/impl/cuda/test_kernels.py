"""The CUDA kernels, on the host and with ``-m gpu`` on a device, equal the reference bit for bit."""

from __future__ import annotations

import pytest
import torch

from impl.codecs import reference
from impl.codecs.codec import Raw, parse
from impl.codecs.reference import REFERENCE
from impl.codecs.rounding_noise import Key
from impl.cuda.kernels import Kernels
from impl.cuda.launch import Launch
from tests.impl.codecs.properties import *  # noqa: F403  # the tests of every backend
from tests.impl.codecs.properties import Backend, encoded, garbage, same
from tests.support.bits import summed
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
        ValueError, match="a row has 2147483648 elements: the CUDA kernels take at most 2147483647"
    ):
        kernels.encode(codec, rows, torch.empty(codec.frame_bytes(2**31), dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"and noise with \(8, 24, 8, 72\): the CUDA kernels take at most 3"):
        kernels.encode(
            parse("int8:8:stochastic"),
            torch.zeros(2, 2, 2, 2, 32),
            torch.zeros(2, 2, 2, 2, 48, dtype=torch.uint8),
            noise=Key(0, 0, 0, "", "weights").noise(0, (8, 24, 8, 72)),
        )


@pytest.mark.parametrize("text", ["bf16", "fp32", "fp16"])
def test_messages_of_elements_take_one_launch_a_hop(backend: Backend, text: str) -> None:
    """A transposed gradient is encoded, its messages are summed and encoded again, or summed, by a launch each."""
    codec, shape, device = parse(text), torch.Size([2, 3, 1000]), backend.device
    assert isinstance(codec, Raw)
    x = torch.randn(3, 2, 1000, device=device).to(reference.DTYPES[codec.dtype]).transpose(0, 1)
    frames, out = garbage(codec, shape, device), garbage(codec, shape[1:], device)
    sums, before = torch.empty(3, 1000, device=device), len(backend.run.ran)
    backend.kernels.encode(codec, x, frames)
    backend.kernels.decode_sum(codec, frames, sums)
    backend.kernels.decode_sum_encode(codec, codec, frames, out, 1000)
    names = [kernel.partition("<")[0] for kernel in backend.run.ran[before:]]
    assert names == ["copy_raw", "sum_raw", "sum_raw"]
    wanted = torch.empty(3, 1000)
    REFERENCE.decode_sum(codec, encoded(codec, x.cpu()), wanted)
    assert same(sums, wanted)


def test_elements_that_no_kernel_takes_are_left_to_the_reference(backend: Backend) -> None:
    """Frames that begin at odd bytes, and rows of four dimensions without common strides, take torch's operations."""
    codec, before = Raw("bf16"), len(backend.run.ran)
    x = torch.randn(2, 3, 40).to(torch.bfloat16)
    odd = garbage(codec, x.shape, backend.device, skew=1)
    backend.kernels.encode(codec, backend.moved(x), odd)
    assert torch.equal(odd.cpu(), encoded(codec, x))
    again = garbage(codec, x.shape[1:], backend.device, skew=1)
    backend.kernels.decode_sum_encode(codec, codec, odd, again, 40)
    wanted = garbage(codec, x.shape[1:], x.device)
    REFERENCE.decode_sum_encode(codec, codec, encoded(codec, x), wanted, 40)
    assert torch.equal(again.cpu(), wanted)
    many = torch.zeros(2, 2, 2, 2, 2, 2, 2, 2, 32, device=backend.device).permute(1, 0, 3, 2, 5, 4, 7, 6, 8)
    frames = garbage(Raw("fp32"), many.shape, backend.device)
    backend.kernels.encode(Raw("fp32"), many, frames)
    assert not frames.any()
    assert len(backend.run.ran) == before


@pytest.mark.parametrize("numel", [3, 2048, 16_400])
def test_sums_of_bits_are_the_stated_polynomial(backend: Backend, numel: int) -> None:
    """Every thread's number is that of :mod:`tests.support.bits`, also for rows off 16 bytes."""
    values = torch.randn(numel + 1, device=backend.device)
    for row in (values[:numel], values[1:]):
        assert torch.equal(backend.kernels.sums_of_bits(row).cpu(), summed(row))


def test_only_listed_kernels_are_asked_for(backend: Backend) -> None:
    """All kernels that this session launched are on the list that the compile gate compiles."""
    assert set(backend.run.ran) <= {kernel for kernels in VARIANTS.values() for kernel in kernels}
