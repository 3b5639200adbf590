"""Tests that operations choose a backend by the device, and name it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
import torch

from impl import ops
from impl.codecs import reference
from impl.codecs.codec import parse
from impl.cpu import build
from impl.cuda import kernels as cuda
from impl.cuda.launch import Launch


@pytest.fixture
def _fresh() -> Iterator[None]:
    """Forget choices that were made under a test's patches."""
    ops._choose.cache_clear()
    yield
    ops._choose.cache_clear()


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize(("spec", "backend"), [(None, "reference"), (object(), "cuda")])
def test_a_cuda_device_uses_the_kernels_where_cupy_is_installed(
    monkeypatch: pytest.MonkeyPatch, spec: object, backend: str
) -> None:
    """Without CuPy, a CUDA device uses the reference, also if the backend is asked for by name."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    assert ops.backend_of(torch.device("cuda")) == backend
    warning = ops.warning_of(torch.device("cuda"))
    assert warning == (None if spec else "no CUDA kernels: CuPy is not installed")


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("loads", [False, True])
def test_a_cpu_without_a_library_uses_the_reference_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, loads: bool
) -> None:
    """One line says why the library cannot be built or loaded."""

    def library(_: Path) -> Path:
        if not loads:
            raise build.BuildError("c++ failed with status 1: error: hm")
        (tmp_path / "kernels.so").write_bytes(b"no library")
        return tmp_path / "kernels.so"

    monkeypatch.setattr(build, "library", library)
    codec, x = parse("int8:8"), torch.randn(20)
    got, wanted = (torch.empty(codec.frame_bytes(20), dtype=torch.uint8) for _ in range(2))
    ops.encode(codec, x, got)
    reference.encode(codec, x, wanted)
    assert torch.equal(got, wanted)
    assert ops.backend_of(torch.device("cpu")) == "reference"
    reason = "kernels.so" if loads else "no C++ kernels: c++ failed with status 1: error: hm"
    assert reason in str(ops.warning_of(torch.device("cpu")))


def test_a_codec_whose_kernels_do_not_run_is_named_before_the_first_step() -> None:
    """Every codec with kernels is tried, and an error names the codec and the device."""
    launched: list[str] = []

    def fail(launch: Launch, _: torch.device) -> None:
        launched.append(launch.kernel)
        raise RuntimeError("sm_200: no such architecture")

    for text in ("fp32", "bf16", "int8:256", "int4:32:stochastic", "fp8e4m3:32", "nvfp4", "bf16sr"):
        with pytest.raises(RuntimeError, match=rf"{text}.* do not run on cpu: sm_200: no such architecture"):
            ops.try_codec(cuda.Kernels(fail), parse(text), torch.device("cpu"))
    assert len(launched) == 7


def test_a_device_without_kernels_is_refused() -> None:
    """A device of another type raises an error that names it."""
    with pytest.raises(
        ValueError, match="no kernels for device meta: move the tensors to a device of type cpu or"
    ):
        ops.backend_of(torch.device("meta"))


def _freed(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(0)
    return x


class Wrapper(torch.Tensor):
    """A subclass without memory of its own."""

    @staticmethod
    def __new__(cls, x: torch.Tensor) -> Self:  # noqa: ANN001
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=pytest.mark.needs("c++")), "reference"])
@pytest.mark.parametrize("spec", ["fp32", "int8:8", "mxfp4", "nf4"])
def test_tensors_that_kernels_cannot_read_or_write_are_refused(backend: str, spec: str) -> None:
    """Negated, sparse and freed tensors, and targets whose elements overlap, also after plain ones of their
    layout, raise in one line; nothing is written.
    """
    operations, codec = ops.operations_of(backend), parse(spec)
    x = torch.randn(4, 64)
    frames = torch.zeros(4, codec.frame_bytes(64), dtype=torch.uint8)
    operations.encode(codec, x, frames)
    kept, out = frames.clone(), torch.zeros(4, 64)
    operations.decode(codec, frames, out)
    total = torch.zeros(64)
    operations.decode_sum(codec, frames, total)
    for odd, message in (
        (torch._neg_view(x), r"torch negates this tensor lazily: pass tensor.resolve_neg\(\)"),
        (x.to_sparse(), "codecs read and write dense tensors with memory, got sparse_coo"),
        (_freed(x.clone()), "a Tensor has no memory .*: pass a torch.Tensor with its own storage"),
        (Wrapper(x), "got Wrapper|a Wrapper has no memory .*: pass a torch.Tensor with its own storage"),
    ):
        with pytest.raises(ValueError, match=message):
            operations.encode(codec, odd, frames)
        with pytest.raises(ValueError, match=message):
            operations.decode(codec, frames, odd)
    for write in (
        lambda: operations.decode(codec, frames, out[:1].expand(4, 64)),
        lambda: operations.decode(codec, frames, out[:, :1].expand(4, 64)),
        lambda: operations.decode_sum(codec, frames, total[:1].expand(64)),
        lambda: operations.encode(codec, x, frames[:1].expand(4, -1)),
    ):
        with pytest.raises(ValueError, match=r"cannot write .* with strides \(.*\), whose elements overlap"):
            write()
    assert torch.equal(frames, kept)
