"""The C++ kernels equal the reference bit for bit, and refuse impossible arguments."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from impl.codecs import reference
from impl.codecs.codec import IntCodec, parse
from impl.codecs.rounding_noise import Noise
from impl.cpu import build
from impl.cuda.kernels import Kernels as CudaKernels
from tests.impl.codecs.properties import *  # noqa: F403  # the tests of every backend
from tests.impl.codecs.properties import (
    Backend,
    check,
    check_sum,
    check_sum_encode,
    encoded,
    garbage,
    noise_of,
    same,
)


@pytest.mark.parametrize("bits", range(2, 9))
def test_one_product_decides_for_bf16(backend: Backend, bits: int) -> None:
    """Every mantissa under every largest magnitude is coded as by division, for ten powers of two below it."""
    mantissas = 1 + torch.arange(128) / 128
    values = torch.cat([mantissas * 2.0**-down for down in range(10)])
    x = torch.where(values <= mantissas[:, None], values, 0.0)
    x[:, 0] = mantissas  # a block each: nothing in it is larger
    for scale in (1.0, 2.0**-126, 2.0**127):
        check(backend, IntCodec(bits, 1280), (x * scale).flatten().to(torch.bfloat16), torch.bfloat16)


def test_an_offset_whose_scale_is_lost_in_rounding(backend: Backend) -> None:
    """A block of neighbouring large values, whose scale is rounded up to the smallest, saturates alike."""
    x = torch.full((300,), 1e30)
    x[::3] = torch.nextafter(x[::3], torch.tensor(torch.inf))
    for bits in range(2, 9):
        check(backend, IntCodec(bits, 100, asymmetric=True), x, torch.float32)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("numel", [1, 8, 2049, 1_048_577, 2_200_003])
def test_raw_frames_are_copied_and_summed(backend: Backend, kind: str, numel: int) -> None:
    """Casts of rows below and above the size that is written past the caches, aligned or not, equal the reference."""
    codec = parse(kind)
    for sources, skew in ((1, 0), (4, 16), (6, 3)):
        x = torch.randn(sources, numel).to(reference.DTYPES[kind])
        x[..., -1] = torch.nan
        wanted, got = (garbage(codec, x.shape, x.device, bytes_off) for bytes_off in (0, skew))
        reference.encode(codec, x, wanted)
        backend.kernels.encode(codec, x, got)
        assert torch.equal(got, wanted)
        back = torch.empty(sources, numel + 1, dtype=x.dtype)[:, 1:]
        backend.kernels.decode(codec, got, back)
        assert same(back, x)
        check_sum(backend, codec, got, [numel])


@pytest.mark.parametrize("block", [32_768, 32_769, 40_001, "shard"])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_blocks_whose_sums_are_not_kept(backend: Backend, block: int | str, *, asymmetric: bool) -> None:
    """Blocks around the largest size that is kept between two passes give the reference's frames."""
    first, second = parse("int5:24"), IntCodec(3, block, asymmetric)  # type: ignore[arg-type]
    frames = encoded(first, torch.randn(3, 2, 70_003))
    check_sum_encode(backend, (first, second), frames, (2, 70_003))


@pytest.mark.parametrize("undefined", [False, pytest.param(True, marks=pytest.mark.long)])
def test_nothing_beyond_a_page_is_touched(libraries: Path, *, undefined: bool) -> None:
    """Rows, frames and errors that end where memory ends are coded, also with undefined behaviour checked."""
    checks = ("-O1", "-fsanitize=undefined", "-fno-sanitize-recover=all")
    try:
        library = (
            build.library(libraries, flags=(*build.FLAGS, *checks))
            if undefined
            else build.library(build.user_folder())
        )
    except build.BuildError as problem:
        if not undefined:
            raise
        pytest.skip(f"no undefined-behaviour sanitizer: {problem}")
    command = [sys.executable, "-m", "tests.impl.cpu.at_the_edge", str(library)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert run.stdout.strip() == "nothing touched", run.stderr


@pytest.mark.parametrize("text", ["int4:256", "int4:256:hadamard32:stochastic", "mxfp8:stochastic"])
def test_threads_code_at_once(backend: Backend, text: str) -> None:
    """Calls from several threads disturb neither one another nor the errors that each carries."""
    codec = parse(text)
    x, error = torch.randn(4, 100_000), torch.randn(4, 100_000)
    noise, wanted = noise_of(codec, torch.Size([])), garbage(codec, x.shape, x.device)
    expected = error.clone()
    got = garbage(codec, x.shape, x.device)
    for row in range(4):
        carried = reference.Carried(expected[row])
        reference.encode(codec, x[row], wanted[row], noise=noise, carried=carried)

    def work(row: int) -> None:
        carried = reference.Carried(error[row])
        backend.kernels.encode(codec, x[row], got[row], noise=noise, carried=carried)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert torch.equal(got, wanted)
    assert same(error, expected)


REFUSED = {
    "fp64": ((2, 8), torch.float64, r"fp32, bf16 or fp16, got \(2, 8\) torch.float64"),
    "int64": ((2, 8), torch.int64, r"fp32, bf16 or fp16, got \(2, 8\) torch.int64"),
    "a scalar": ((), torch.float32, r"expected elements \(..., S\) in fp32, bf16 or fp16, got \(\)"),
    "other rows": ((3, 8), torch.float32, r"elements of shape \(3, 8\) need contiguous"),
}


def no_launch(launch: object, device: object) -> None:
    raise AssertionError(launch, device)


@pytest.mark.parametrize("text", ["fp32", "bf16", "int8:8", "mxfp4"])
@pytest.mark.parametrize(("shape", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_all_backends_refuse_alike(
    backend: Backend, text: str, shape: tuple[int, ...], kind: torch.dtype, message: str
) -> None:
    """All backends refuse wrong types, scalars, shapes and sums with the same message."""
    codec, x = parse(text), torch.zeros(shape, dtype=kind)
    frames = torch.zeros(2, codec.frame_bytes(8), dtype=torch.uint8)
    many = frames.expand(3, *frames.shape)
    for kernels in (reference, backend.kernels, CudaKernels(no_launch)):
        with pytest.raises(ValueError, match=message):
            kernels.encode(codec, x, frames)
        with pytest.raises(ValueError, match=message):
            kernels.decode(codec, frames, x)
        with pytest.raises(ValueError, match=r"sums are written as fp32, got a tensor of torch.bfloat16"):
            kernels.decode_sum(codec, many, torch.zeros(2, 8, dtype=torch.bfloat16))


def test_what_no_kernel_can_do_is_refused(backend: Backend) -> None:
    """Impossible strides and devices are refused in one line with the numbers; missing noise is refused by all."""
    codec, x = parse("int8:8"), torch.zeros(16, 32)
    frames = torch.zeros(16, 48, dtype=torch.uint8)
    for kernels in (backend.kernels, CudaKernels(no_launch)):
        with pytest.raises(
            ValueError, match=r"int8:8: elements of shape \(9,\) need .* of shape \(32,\), got \(33,\)"
        ):
            kernels.encode(codec, torch.zeros(9), torch.zeros(33, dtype=torch.uint8))
        with pytest.raises(ValueError, match=r"contiguous uint8 frames .* strides \(1, 48\)"):
            kernels.decode(codec, torch.zeros(48, 48, dtype=torch.uint8).t(), torch.zeros(48, 32))
        with pytest.raises(ValueError, match="tensors are on cpu and meta"):
            kernels.encode(codec, x.to("meta"), frames)
    for kernels in (reference, backend.kernels, CudaKernels(no_launch)):
        for noise in (None, Noise((1, 2, 3, 4))):
            with pytest.raises(
                ValueError, match=r"stochastically: elements of shape \(16, 32\) need noise with 1 strides"
            ):
                kernels.encode(parse("int8:8:stochastic"), x, frames, noise=noise)
    many = torch.zeros(*[2] * 10, 8).permute(1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 10)
    with pytest.raises(ValueError, match=r"the C\+\+ kernels take at most 8"):
        backend.kernels.encode(codec, many, torch.zeros(*many.shape[:-1], 32, dtype=torch.uint8))


@pytest.mark.parametrize("text", ["fp32", "int4:8", "int3:7:asym", "int4:32:hadamard8", "mxfp4"])
def test_empty_rows_launch_nothing(backend: Backend, text: str) -> None:
    """Empty rows and empty batches are left alone, and no kernel is launched."""
    codec = parse(text)
    size = codec.frame_bytes(8)
    for kernels in (reference, backend.kernels, CudaKernels(no_launch)):
        kernels.encode(codec, torch.zeros(3, 0), torch.zeros(3, 0, dtype=torch.uint8))
        kernels.encode(codec, torch.zeros(0, 8), torch.zeros(0, size, dtype=torch.uint8))
        kernels.decode(codec, torch.zeros(0, size, dtype=torch.uint8), torch.zeros(0, 8))
        kernels.decode_sum(codec, torch.zeros(2, 0, size, dtype=torch.uint8), torch.zeros(0, 8))
