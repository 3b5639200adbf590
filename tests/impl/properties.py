"""What every backend of the codecs must do: equal the reference, byte by byte.

A backend's test module imports the tests that stand here, and its conftest gives the fixture ``backend``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from impl import reference
from impl.codec import Codec, IntCodec, parse
from tests.strategies import blocks_of_values, codecs, int_codecs


class Operations(Protocol):
    """The operations of :mod:`impl.reference`."""

    def encode(self, codec: Codec, x: Tensor, frames: Tensor) -> None: ...

    def decode(self, codec: Codec, frames: Tensor, out: Tensor) -> None: ...

    def decode_sum(self, codec: Codec, frames: Tensor, out: Tensor) -> None: ...

    def decode_sum_encode(
        self, first: Codec, second: Codec, frames: Tensor, out: Tensor, numel: int
    ) -> None: ...


class Run(Protocol):
    """How kernels run.

    Attributes:
        order: of threads, where it can be chosen.
        ran: kernels launched so far, where launches can be seen.
    """

    order: int
    ran: list[str]


@dataclass(frozen=True)
class Backend:
    """Kernels, what runs them, and where its tensors lie."""

    kernels: Operations
    run: Run
    device: torch.device

    def put(self, x: Tensor) -> Tensor:
        """``x`` on the device, with its strides."""
        if x.device == self.device:
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.device).copy_(x)


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
ORDERS = st.sampled_from([0, 1, 7])
BUDGET = settings(max_examples=max(100, settings.default.max_examples))  # 2 ms each
EDGES = [1, 7, 8, 9, 255, 256, 257, 2047, 2048, 2049]
LARGE = [  # (block, numel) around what one launch holds, one tile stages and one scan covers
    *itertools.product([2048], [2048, 6144, 6145]),
    *itertools.product([8184, 8192, 8200, 16_384, "shard"], [8192, 8193, 16_384]),
    *itertools.product([16_392, 24_579, "shard"], [16_385, 49_159]),
    *itertools.product([100, 999, 1023, 1025, 4097], [1024, 8193, 10_001]),
]


def garbage(codec: Codec, shape: torch.Size, device: torch.device, skew: int = 0) -> Tensor:
    """(..., F) uint8 frames of 0xA5 for ``shape`` elements, each row ``skew`` bytes off any alignment."""
    flat = torch.full(
        (*shape[:-1], codec.frame_bytes(shape[-1]) + skew), 0xA5, dtype=torch.uint8, device=device
    )
    return flat[..., skew:]


def encoded(codec: Codec, x: Tensor) -> Tensor:
    """The reference's frames of ``x``, on the CPU."""
    frames = garbage(codec, x.shape, x.device)
    reference.encode(codec, x, frames)
    return frames


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, or both NaN."""
    bits = {4: torch.int32, 2: torch.int16}[a.element_size()]
    a, b = a.contiguous().cpu(), b.contiguous().cpu()
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


def check(backend: Backend, codec: Codec, x: Tensor, out: torch.dtype, skew: int = 0) -> None:
    """Encode ``x`` and decode it on both, and compare every byte."""
    wanted, got = encoded(codec, x), garbage(codec, x.shape, backend.device, skew)
    backend.kernels.encode(codec, backend.put(x), got)
    assert torch.equal(got.cpu(), wanted), f"{codec} of {tuple(x.shape)} {x.dtype}: {backend.run.ran[-2:]}"
    decoded, again = torch.empty(x.shape, dtype=out), torch.empty(x.shape, dtype=out, device=backend.device)
    reference.decode(codec, wanted, decoded)
    backend.kernels.decode(codec, got, again)
    assert same(again, decoded), f"{codec} of {tuple(x.shape)} to {out}: {backend.run.ran[-1:]}"


@BUDGET
@given(
    codec=codecs,
    x=blocks_of_values(),
    broken=blocks_of_values(finite=False),
    kind=DTYPES,
    out=DTYPES,
    order=ORDERS,
    skew=st.sampled_from([0, 3]),
)
@example(
    codec=parse("int4:8"),
    x=torch.tensor([-1e-45, 0.0, 1e-45]),
    broken=torch.zeros(1),
    kind=torch.float32,
    out=torch.float16,
    order=0,
    skew=0,
)
@example(
    codec=parse("int3:shard:asym"),
    x=torch.tensor([3.4028234e38, -3.4028234e38, 1.0]),
    broken=torch.tensor([torch.nan]),
    kind=torch.float32,
    out=torch.bfloat16,
    order=1,
    skew=3,
)
@example(  # which zero the minimum is depends on the order
    codec=parse("int2:2:asym"),
    x=torch.tensor([0.0, -0.0]),
    broken=torch.tensor([-0.0]),
    kind=torch.float32,
    out=torch.float32,
    order=0,
    skew=0,
)
def test_hostile_blocks_are_coded_as_the_reference_does(
    backend: Backend,
    *,
    codec: Codec,
    x: Tensor,
    broken: Tensor,
    kind: torch.dtype,
    out: torch.dtype,
    order: int,
    skew: int,
) -> None:
    """Frames and decoded values of every codec are equal, in every order of threads, aligned or not."""
    backend.run.order = order
    for values in (x, broken):
        check(backend, codec, values.to(kind), out, skew=skew if isinstance(codec, IntCodec) else 0)


@BUDGET
@given(
    codec=int_codecs(),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 80)),
    seed=st.integers(0, 2**31),
    kind=DTYPES,
)
def test_strided_batches_are_coded_in_place(
    backend: Backend, *, codec: IntCodec, sizes: tuple[int, int, int], seed: int, kind: torch.dtype
) -> None:
    """A transposed batch becomes the reference's frames: the two-hop transpose costs no copy."""
    (a, b, numel), generator = sizes, torch.Generator().manual_seed(seed)
    x = torch.randn(b, 2, a, numel + seed % 3, generator=generator).to(kind).transpose(0, 2)[..., :numel]
    check(backend, codec, x, torch.float32)


def test_elements_need_not_be_contiguous(backend: Backend) -> None:
    """Every second element of a tensor is coded, and decoded into, where it lies."""
    codec, x = parse("int5:24"), torch.randn(4, 150)[:, ::2]
    check(backend, codec, x, torch.float32)
    frames = encoded(codec, x)
    out, whole = torch.zeros(4, 75), torch.zeros(4, 150, device=backend.device)
    reference.decode(codec, frames, out)
    backend.kernels.decode(codec, backend.put(frames), whole[:, ::2])
    assert same(whole[:, ::2], out)
    assert not whole[:, 1::2].any()


@pytest.mark.parametrize("bits", [4, 5, 8])
@pytest.mark.parametrize("block", [8, 64, 96, 256, 1, 3, 20, "shard"])
def test_lengths_at_the_edges_of_octets_and_tiles(backend: Backend, bits: int, block: int | str) -> None:
    """Lengths one below, at and one above every boundary of a kernel are coded alike."""
    backend.run.order = 1
    for index, numel in enumerate(EDGES):
        codec = IntCodec(bits, block, asymmetric=bool(index % 2))  # type: ignore[arg-type]
        check(backend, codec, torch.randn(2, numel), torch.float32)


@pytest.mark.parametrize(("block", "numel"), LARGE)
def test_blocks_at_the_limits_of_each_version(backend: Backend, block: int | str, numel: int) -> None:
    """Blocks around what registers, shared memory and one scan hold are coded alike."""
    backend.run.order = 7
    codec = IntCodec(4 if numel % 2 else 7, block, asymmetric=numel % 3 == 0)  # type: ignore[arg-type]
    check(backend, codec, torch.randn(numel).to(torch.bfloat16), torch.bfloat16)


@BUDGET
@given(
    codec=int_codecs(),
    sources=st.integers(1, 5),
    x=blocks_of_values(finite=False),
    seed=st.integers(0, 2**31),
    order=ORDERS,
)
def test_sums_are_those_of_the_reference(
    backend: Backend, *, codec: IntCodec, sources: int, x: Tensor, seed: int, order: int
) -> None:
    """The sum over sources is bit-equal: fp32, ascending, saturating term by term."""
    backend.run.order = order
    values = x * torch.randn(sources, 2, 1, generator=torch.Generator().manual_seed(seed))
    frames, wanted = encoded(codec, values), torch.empty(2, x.numel())
    got = torch.empty(2, x.numel(), device=backend.device)
    reference.decode_sum(codec, frames, wanted)
    backend.kernels.decode_sum(codec, backend.put(frames), got)
    assert same(got, wanted)


@BUDGET
@given(
    hops=st.tuples(codecs, codecs),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    x=blocks_of_values(),
    seed=st.integers(0, 2**31),
    order=ORDERS,
)
@example(  # spare codes of the last octet decode to the offset, which once widened the block
    hops=(parse("int2:shard:asym"), parse("int2:shard")),
    sizes=(2, 1),
    x=torch.tensor([0.1257, -0.1321]),
    seed=0,
    order=0,
)
def test_sums_encoded_again_are_those_of_the_reference(
    backend: Backend, *, hops: tuple[Codec, Codec], sizes: tuple[int, int], x: Tensor, seed: int, order: int
) -> None:
    """Frames of sums are bit-equal for any two codecs, also into strided frames."""
    backend.run.order = order
    (first, second), (sources, rows) = hops, sizes
    values = x.clamp(-6e4, 6e4) * torch.randn(sources, rows, 1, generator=torch.Generator().manual_seed(seed))
    frames = encoded(first, values)
    wanted = garbage(second, values.shape[1:], frames.device)
    got = garbage(second, values.shape[1:], backend.device, skew=16)
    reference.decode_sum_encode(first, second, frames, wanted, x.numel())
    backend.kernels.decode_sum_encode(first, second, backend.put(frames), got, x.numel())
    assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("block", [2048, 8192, 8200, 1001, "shard"])
def test_large_sums_encoded_again(backend: Backend, block: int | str) -> None:
    """Blocks below and above what the fused kernel holds give the reference's frames."""
    first, second, numel = parse("int4:256"), IntCodec(8, block), 16_411  # type: ignore[arg-type]
    values = torch.randn(3, numel)
    frames = encoded(first, values)
    wanted, got = (garbage(second, values.shape[1:], place) for place in (frames.device, backend.device))
    reference.decode_sum_encode(first, second, frames, wanted, numel)
    backend.kernels.decode_sum_encode(first, second, backend.put(frames), got, numel)
    assert torch.equal(got.cpu(), wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_the_full_product(backend: Backend, bits: int, kind: torch.dtype, *, asymmetric: bool) -> None:
    """Every width, scheme and type at every block and length of the other tests, in three orders."""
    small = itertools.product([1, 3, 8, 12, 64, 100, 256, "shard"], EDGES)
    for backend.run.order, (block, numel) in itertools.product([0, 1, 7], [*small, *LARGE]):
        check(backend, IntCodec(bits, block, asymmetric), torch.randn(2, numel).to(kind), kind)  # type: ignore[arg-type]
