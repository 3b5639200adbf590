"""Tests that every backend of the codecs must pass: it equals the reference byte by byte.

A backend's test module imports these tests, and its conftest has the fixture ``backend``.  The module's own tests
say which codecs the backend must not leave to the reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.laws.rounding_edges import edge_rows
from harness.laws.subject import REPRESENTATIVE
from impl.codecs import reference
from impl.codecs.codec import Codec, Dtype, FloatCodec, IntCodec, Raw, Sums, parse
from impl.codecs.reference import Carried, Operations
from impl.codecs.rounding_noise import Key, Noise
from tests.support.strategies import blocked_codecs, blocks_of_values, codecs, stochastic_codecs


@dataclass
class Run:
    """Whatever runs kernels: a host or a device."""

    order: int = 0  # of threads, where it can be chosen
    ran: list[str] = field(default_factory=list)  # kernels launched so far, where launches can be seen


@dataclass(frozen=True)
class Backend:
    """Kernels, the object that runs them, and the device of their tensors."""

    kernels: Operations
    run: Any  # a :class:`Run`, or an object with its fields
    device: torch.device

    def moved(self, x: Tensor) -> Tensor:
        """``x`` on the device, with its strides."""
        if x.device == self.device:
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.device).copy_(x)


FLOATS = [torch.float32, torch.bfloat16, torch.float16]
DTYPES = st.sampled_from(FLOATS)
ORDERS = st.sampled_from([0, 1, 7])
BUDGET = settings(max_examples=max(40, settings.default.max_examples))  # for what has tests of its edges, too
ALL_CODECS = st.one_of(codecs, stochastic_codecs)
ALL_BLOCKED = st.one_of(blocked_codecs, stochastic_codecs)
KEY = Key(1, 2, 3, "blocks.0", "gradients", 1, 4)
EDGES = [1, 7, 8, 9, 255, 256, 257, 2047, 2048, 2049]
LENGTHS = {  # by block: around the elements of one launch, one tile and one scan
    block: lengths
    for blocks, lengths in (
        ([8, 64, 96, 256, 1, 3, 20], EDGES),
        ([100, 999, 1023, 1025, 4097], [1024, 8193, 10_001]),
        ([8184, 8200, 16_384], [8192, 8193, 16_384]),
        ([16_392, 24_579], [16_385, 49_159]),
        ([16, 128, 1024], [20_011] * 8),
        ([4096, 8192], [36_395] * 8),
        ([2048], [2048, 6144, 6145, 20_000]),
        (["shard"], [*EDGES, 8192, 8193, 16_384, 16_385, 49_159]),
    )
    for block in blocks
}
VERSIONS = [(64, 300), (8192, 8193), (16_384, 16_400), (100, 1001), (1028, 2100), ("shard", 16_390)]


def garbage(codec: Codec, shape: torch.Size, device: torch.device, skew: int = 0) -> Tensor:
    """Returns frames (..., F) uint8 of 0xA5 for ``shape`` elements, with rows ``skew`` bytes off any alignment."""
    flat = torch.full(
        (*shape[:-1], codec.frame_bytes(shape[-1]) + skew), 0xA5, dtype=torch.uint8, device=device
    )
    return flat[..., skew:]


def noise_of(codec: Codec, lead: Sequence[int]) -> Noise | None:
    """Returns random bits for rows whose strides are in no order that a dense tensor has."""
    strides = tuple(8 * (1 + dim) for dim in range(len(lead)))
    return KEY.noise(8 * (2**32 - 3), strides) if codec.stochastic else None


def encoded(codec: Codec, x: Tensor, noise: Noise | None = None) -> Tensor:
    """Returns the reference's frames of ``x``, on the CPU."""
    frames = garbage(codec, x.shape, x.device)
    reference.encode(codec, x, frames, noise=noise or noise_of(codec, x.shape[:-1]))
    return frames


def same(a: Tensor, b: Tensor) -> bool:
    bits = {4: torch.int32, 2: torch.int16}[a.element_size()]
    a, b = a.contiguous().cpu(), b.contiguous().cpu()
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


def equal_frames(codec: Codec, got: Tensor, wanted: Tensor) -> bool:
    """Whether frames have the same bytes; casts give NaN any of its patterns, also on one processor."""
    if isinstance(codec, Raw):
        dtype = reference.DTYPES[codec.dtype]
        return same(got.contiguous().view(dtype), wanted.contiguous().view(dtype))
    return torch.equal(got.cpu(), wanted)


def check(
    backend: Backend, codec: Codec, x: Tensor, out: torch.dtype, *, skew: int = 0, noise: Noise | None = None
) -> None:
    """Encode ``x`` and decode the frames with backend and reference, and compare every byte."""
    noise = noise or noise_of(codec, x.shape[:-1])
    wanted, got = encoded(codec, x, noise), garbage(codec, x.shape, backend.device, skew)
    backend.kernels.encode(codec, backend.moved(x), got, noise=noise)
    assert equal_frames(codec, got, wanted), f"{codec} of {tuple(x.shape)} {x.dtype}: {backend.run.ran[-2:]}"
    decoded, actual = (torch.empty(x.shape, dtype=out, device=d) for d in (x.device, backend.device))
    reference.decode(codec, wanted, decoded)
    backend.kernels.decode(codec, got, actual)
    assert same(actual, decoded), f"{codec} of {tuple(x.shape)} to {out}: {backend.run.ran[-1:]}"


def check_sum(
    backend: Backend, codec: Codec, frames: Tensor, shape: Sequence[int], sums: Sums = "fp32"
) -> None:
    """Sum ``frames`` over their first dimension with backend and reference, and compare every bit."""
    wanted, got = torch.empty(shape), torch.empty(shape, device=backend.device)
    reference.decode_sum(codec, frames, wanted, sums=sums)
    backend.kernels.decode_sum(codec, backend.moved(frames), got, sums=sums)
    assert same(got, wanted), f"sum of {codec}, {tuple(shape)}: {backend.run.ran[-1:]}"


def check_sum_encode(
    backend: Backend,
    hops: tuple[Codec, Codec],
    frames: Tensor,
    shape: Sequence[int],
    *,
    skew: int = 0,
    carried: Carried | None = None,
) -> None:
    """Sum frames of one codec and encode the sum with another, on both, and compare frames and carried errors."""
    (first, second), shape = hops, torch.Size(shape)
    noise, moved = noise_of(second, shape[:-1]), carried
    if carried is not None:
        moved = replace(carried, error=backend.moved(carried.error).clone())
    wanted, got = garbage(second, shape, frames.device), garbage(second, shape, backend.device, skew)
    reference.decode_sum_encode(first, second, frames, wanted, shape[-1], noise=noise, carried=carried)
    backend.kernels.decode_sum_encode(
        first, second, backend.moved(frames), got, shape[-1], noise=noise, carried=moved
    )
    assert equal_frames(second, got, wanted), f"{first} to {second}, {tuple(shape)}: {backend.run.ran[-2:]}"
    if carried is not None and moved is not None:
        assert same(moved.error, carried.error), f"errors of {second}: {backend.run.ran[-2:]}"


def without_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the reference's coding of blocks, so that a backend cannot use it unnoticed."""
    for name in ("_encode_blocks", "_decode_blocks"):
        monkeypatch.delattr(reference, name)


def use_all(backend: Backend, codec: Codec, *, carries: bool) -> None:
    x = torch.randn(3, 1000, device=backend.device)
    noise, frames = noise_of(codec, x.shape[:-1]), garbage(codec, x.shape, x.device)
    carried = Carried(torch.zeros_like(x), 0.8) if carries else None
    backend.kernels.encode(codec, x, frames, noise=noise, carried=carried)
    backend.kernels.decode(codec, frames, x)
    backend.kernels.decode_sum(codec, frames, x[0])
    again, total = Carried(torch.zeros_like(x[0])) if carries else None, noise_of(codec, torch.Size([]))
    backend.kernels.decode_sum_encode(
        codec, codec, frames.clone(), frames[0], 1000, noise=total, carried=again
    )


@pytest.mark.parametrize(
    "text",
    [*(text for text in REPRESENTATIVE if isinstance(parse(text), IntCodec | FloatCodec)), "int5:24:asym",
     "fp8e5m2:32", "int4:64:hadamard32:stochastic"],
)  # fmt: skip
def test_it_has_kernels_for_all_blocked_codecs(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """The reference is left only what docs/reference/codecs.md says; no other call uses it."""
    without_reference(monkeypatch)
    for carries in (False, True):
        use_all(backend, parse(text), carries=carries)


def check_carried(
    backend: Backend, codec: Codec, x: Tensor, error: Tensor, decay: float, *, rounds: int = 2
) -> None:
    """Encode ``x`` with carried errors several times on both, and compare frames and errors every time."""
    noise = noise_of(codec, x.shape[:-1])
    actual = Carried(backend.moved(error).clone(memory_format=torch.preserve_format), decay)
    expected = Carried(error.clone(memory_format=torch.preserve_format), decay)
    wanted, got = garbage(codec, x.shape, x.device), garbage(codec, x.shape, backend.device)
    for number in range(rounds):
        reference.encode(codec, x, wanted, noise=noise, carried=expected)
        backend.kernels.encode(codec, backend.moved(x), got, noise=noise, carried=actual)
        case = f"{codec} of {tuple(x.shape)} {x.dtype}, {error.dtype}, round {number}: {backend.run.ran[-2:]}"
        assert torch.equal(got.cpu(), wanted), f"frames, {case}"
        assert same(actual.error, expected.error), f"errors, {case}"


@dataclass(frozen=True)
class Drawn:
    """The inputs that a property draws."""

    codec: Any
    x: Tensor  # (n,) fp32
    kind: torch.dtype = torch.float32  # of the encoded elements
    out: torch.dtype = torch.float32  # of decoded elements, or of carried errors
    order: int = 0  # of threads
    seed: int = 0

    @property
    def random(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


def drawn(codecs: st.SearchStrategy[Any], *, finite: bool | None = None) -> st.SearchStrategy[Drawn]:
    """Draw inputs with only finite elements, with broken ones, or with either."""
    values = [blocks_of_values(finite=f) for f in ([True, False] if finite is None else [finite])]
    return st.builds(Drawn, codecs, st.one_of(values), DTYPES, DTYPES, ORDERS, st.integers(0, 2**31))


BIG = 3.4028234e38


@BUDGET
@given(drawn(ALL_CODECS))
@example(Drawn(parse("int4:8"), torch.tensor([-1e-45, 0.0, 1e-45]), out=torch.float16))
@example(Drawn(parse("int3:shard:asym"), torch.tensor([BIG, -BIG, 1.0]), out=torch.bfloat16, order=1, seed=1))
@example(Drawn(parse("int3:shard:asym"), torch.tensor([torch.nan]), order=1, seed=1))
@example(Drawn(parse("int2:2:asym"), torch.tensor([0.0, -0.0])))  # which zero is least depends on the order
# the largest sum of scale and rotation
@example(Drawn(parse("int2:32:hadamard32"), torch.tensor([BIG] * 32)))
@example(Drawn(parse("int2:32:hadamard32"), torch.full((32,), torch.inf)))
def test_hostile_blocks_are_coded_as_the_reference_does(backend: Backend, case: Drawn) -> None:
    """Frames and decoded values of every codec are equal, in every order of threads, with and without alignment."""
    backend.run.order = case.order
    skew = 0 if isinstance(case.codec, Raw) else case.seed % 2 * 3
    check(backend, case.codec, case.x.to(case.kind), case.out, skew=skew)


@pytest.mark.parametrize(
    "head",
    [*(f"int{b}:{{}}{s}" for b in range(2, 9) for s in ("", ":asym", ":clip")), "fp8e4m3:{}", "fp8e5m2:{}",
     "mxfp8", "mxfp8e5m2", "mxfp4"],
)  # fmt: skip
@pytest.mark.parametrize("option", ["", ":stochastic"])
def test_every_edge_between_two_levels_is_rounded_as_the_reference_does(
    backend: Backend, head: str, option: str
) -> None:
    """Ties, and the numbers next to them, at scales where the product with a reciprocal differs from the quotient."""
    if option and head.endswith("clip"):
        return  # refused: a clipped top is rounded to nearest
    for index, (kind, dtype) in enumerate(reference.DTYPES.items()):
        codec = parse(head.format((64, "shard", 100)[index]) + option)
        assert not isinstance(codec, Raw)
        noise = Noise(KEY.noise(0).philox)
        for row in edge_rows(codec, kind, noise):
            check(backend, codec, row, dtype, noise=noise if option else None)


@pytest.mark.parametrize("kind", FLOATS[1:], ids=str)
def test_every_16_bit_number_is_read_and_written_as_by_torch(backend: Backend, kind: torch.dtype) -> None:
    """All bit patterns widen to torch's fp32; at, next to and between them fp32 narrows as torch's cast does."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(kind)
    check(backend, parse("int8:1:asym"), patterns, torch.float32)  # the offset is the number
    half = 1 << (15 if kind is torch.bfloat16 else 12)
    nudges = torch.tensor([0, 1, -1, half, half - 1, half + 1], dtype=torch.int32)
    positive = patterns[: 1 << 15].float().view(torch.int32)
    sizes = positive[:, None] + nudges  # of fp32, as scales of codes 1 and -1
    values = sizes.clamp(min=0).flatten().repeat(2)
    codec, numel = parse("int8:1"), values.numel()
    frames = torch.zeros(codec.frame_bytes(numel), dtype=torch.uint8)
    frames[: numel // 2], frames[numel // 2 : numel] = 1, 255
    frames[codec.scales_at(numel) :][: 4 * numel] = values.view(torch.uint8)
    wanted, got = torch.empty(numel, dtype=kind), torch.empty(numel, dtype=kind, device=backend.device)
    reference.decode(codec, frames, wanted)
    backend.kernels.decode(codec, backend.moved(frames), got)
    assert same(got, wanted)


@BUDGET
@given(
    drawn(ALL_BLOCKED, finite=True),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 80)),
    st.integers(0, 2**58),
    st.tuples(*[st.integers(0, 2**40)] * 3),
)
def test_strided_batches_are_coded_in_place(
    backend: Backend, case: Drawn, sizes: tuple[int, int, int], start: int, strides: tuple[int, int, int]
) -> None:
    """A transposed batch becomes the reference's frames, and each row gets the random bits of its own place."""
    a, b, numel = sizes
    x = torch.randn(b, 2, a, numel + case.seed % 3, generator=case.random).to(case.kind)
    noise = KEY.noise(8 * start, tuple(8 * stride for stride in strides)) if case.codec.stochastic else None
    check(backend, case.codec, x.transpose(0, 2)[..., :numel], torch.float32, noise=noise)


@pytest.mark.parametrize(
    "text", ["int5:24", "int4:150", "fp8e5m2:24", "int8:32:hadamard16:stochastic", "mxfp4"]
)
def test_elements_need_not_be_contiguous(backend: Backend, text: str) -> None:
    """Every second element of a tensor is encoded, and decoded into, without a copy by the caller."""
    codec, x = parse(text), torch.randn(4, 150)[:, ::2]
    check(backend, codec, x, torch.float32)
    frames = encoded(codec, x)
    out, whole = torch.zeros(4, 75), torch.zeros(4, 150, device=backend.device)
    reference.decode(codec, frames, out)
    backend.kernels.decode(codec, backend.moved(frames), whole[:, ::2])
    assert same(whole[:, ::2], out)
    assert not whole[:, 1::2].any()


@pytest.mark.parametrize("head", ["int4", "int5", "int8", "fp8e4m3"])
@pytest.mark.parametrize("block", LENGTHS)
def test_lengths_at_every_edge(backend: Backend, head: str, block: int | str) -> None:
    """Rows with lengths around octets, tiles, scans, registers and shared memory, and long rows, are coded alike."""
    for index, numel in enumerate(LENGTHS[block]):
        backend.run.order = (1, 0, 7)[index % 3]
        codec = parse(f"{head}:{block}" + (":stochastic" if index // 2 % 2 else ""))
        if isinstance(codec, IntCodec):
            cut = index % 3 == 2 and not codec.stochastic
            codec = replace(codec, asymmetric=index % 3 == 1, clipped=cut)
        x = torch.randn(2 if numel < 3000 else 1, numel).to(FLOATS[index % 3])
        check(backend, codec, x, FLOATS[index // 3 % 3])


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *itertools.product(["int4:{}", "int6:{}:asym", "fp8e4m3:{}"], [2, 4, 8, 16, 64, 128, 256]),
        *itertools.product(["mxfp4"], [2, 4, 8, 16, 32]),
    ],
)
def test_rotations_of_every_size(backend: Backend, text: str, size: int) -> None:
    """Groups inside an octet, of a few octets and of a whole warp are rotated there and back; remainders are not."""
    backend.run.order = 7
    for multiple, numel in [(1, 3 * size + size // 2 + 1), (3, 9 * size - 1), (0, 8195), (0, 1)]:
        codec = parse(f"{text.format(multiple * size or 'shard')}:hadamard{size}")
        check(backend, codec, torch.randn(2, numel).to(FLOATS[size % 3]), FLOATS[numel % 3])
    twice = parse(f"{text.format('shard')}:hadamard{size}:stochastic")  # reads each element twice
    check(backend, twice, torch.randn(16_384 + size + 3), torch.float32)


@BUDGET
@given(drawn(ALL_BLOCKED), st.sampled_from([0.0, 0.8]))
def test_error_feedback_is_that_of_the_reference(backend: Backend, case: Drawn, decay: float) -> None:
    """Frames and carried errors are bit-equal, for any block, type of state and strides."""
    backend.run.order = case.order
    numel, random = case.x.numel(), case.random
    error = torch.randn(2, numel + 1, generator=random) * case.x.abs().nan_to_num(0, 0).mean()
    values, error = case.x * torch.randn(2, 1, generator=random), error.to(case.out)
    check_carried(backend, case.codec, values.to(case.kind), error[:, case.seed % 2 :][:, :numel], decay)


@pytest.mark.parametrize("state", FLOATS, ids=str)
@pytest.mark.parametrize(("block", "numel"), VERSIONS)
@pytest.mark.parametrize("head", ["int4:{}", "int8:{}:stochastic", "fp8e4m3:{}", "int4:{}:hadamard4"])
def test_error_feedback_in_each_version(
    backend: Backend, head: str, block: int | str, numel: int, state: torch.dtype
) -> None:
    """Blocks of every size, whether kernels hold, stage or read them twice, carry their error alike."""
    backend.run.order = 1
    x, error = torch.randn(numel).to(FLOATS[numel % 3]), torch.randn(numel).mul(0.1).to(state)
    check_carried(backend, parse(head.format(block)), x, error, 0.8 if numel % 2 else 0.0, rounds=1)


@BUDGET
@given(drawn(blocked_codecs, finite=False), st.integers(1, 9), st.sampled_from(["fp32", "fp16"]))
def test_sums_are_those_of_the_reference(backend: Backend, case: Drawn, sources: int, sums: Sums) -> None:
    """Sums are bit-equal: in ascending order, saturating term by term; in fp16 they overflow."""
    backend.run.order = case.order
    values = case.x * torch.randn(sources, 2, 1, generator=case.random)
    check_sum(backend, case.codec, encoded(case.codec, values), (2, case.x.numel()), sums)


RAMP = torch.arange(-80.0, 70.0)


@BUDGET
@given(
    drawn(codecs, finite=True),
    ALL_CODECS,
    st.tuples(st.integers(1, 9), st.integers(1, 3)),
    st.sampled_from([None, 0.0, 0.8]),
)
# Spare codes of the last octet decode to the offset, which once widened the block.
@example(Drawn(parse("int2:shard:asym"), torch.tensor([0.1257, -0.1321])), parse("int2:shard"), (2, 1), None)
# Threads that rotate back together are not neighbours where blocks of 24 are encoded.
@example(Drawn(parse("int4:64:hadamard64"), RAMP, order=7), parse("int4:24"), (2, 1), None)
# Blocks of 32 cut groups of 64, but threads stay neighbours.
@example(Drawn(parse("int4:64:hadamard64"), RAMP, order=7), parse("mxfp4"), (2, 1), 0.0)
def test_sums_encoded_again_are_those_of_the_reference(
    backend: Backend, case: Drawn, second: Codec, sizes: tuple[int, int], decay: float | None
) -> None:
    """Frames of sums are bit-equal for any two codecs, also in strided frames and with carried errors."""
    backend.run.order = case.order
    random = case.random
    values = case.x.clamp(-6e4, 6e4) * torch.randn(*sizes, 1, generator=random)
    carried = None
    if decay is not None:
        error = torch.randn(values.shape[1:], generator=random).mul(float(values.abs().mean()))
        carried = Carried(error.clamp(-6e4, 6e4).to(case.out), decay)
    frames = encoded(case.codec, values)
    check_sum_encode(backend, (case.codec, second), frames, values.shape[1:], skew=16, carried=carried)


@pytest.mark.parametrize("block", [64, 256, 2048, 4096, 8200, 1001, "shard"])
@pytest.mark.parametrize("option", ["", ":stochastic"])
def test_large_sums_encoded_again(backend: Backend, block: int | str, option: str) -> None:
    """Blocks that the fused kernel can and cannot hold give the reference's frames."""
    first, second, numel = parse("int4:256"), parse(f"int8:{block}{option}"), 16_411
    check_sum_encode(backend, (first, second), encoded(first, torch.randn(9, numel)), [numel])


@pytest.mark.parametrize(
    "text", ["fp32", "bf16", "int8:256", "int4:96:asym", "mxfp4", "int6:64:hadamard64", "int8:256:stochastic"]
)
def test_repeated_operations_work_on_other_tensors(backend: Backend, text: str) -> None:
    """Operations repeated on whole, strided or misaligned tensors of equal shapes equal the reference's."""
    codec, numel = parse(text), 2500
    for step in range(8):
        x = torch.randn(3 * 2 * numel + 3)[step % 4 :][: 3 * 2 * numel].view(3, 2, numel) * 2.0**step
        x = x.transpose(0, 1).contiguous().transpose(0, 1) if step % 2 else x
        check(backend, codec, x, x.dtype)
        frames = encoded(codec, x)
        check_sum(backend, codec, frames, (2, numel))
        check_sum_encode(backend, (codec, codec), frames, (2, numel))


FORMS = [(1, [1]), (2, [8, 3]), (8, [2, 2, 40]), (9, [2051]), (3, [3, 6000])]


@pytest.mark.parametrize(("sources", "shape"), FORMS)
@pytest.mark.parametrize("first", reference.DTYPES)
@pytest.mark.parametrize("second", reference.DTYPES)
def test_elements_are_summed_and_cast_as_by_the_reference(
    backend: Backend, first: Dtype, second: Dtype, sources: int, shape: list[int]
) -> None:
    """Sums of one to nine sources have the reference's bits, also of signed zeros and beyond a type's largest."""
    backend.run.order = sources % 3
    x = torch.randn(sources, *shape) * 10.0 ** torch.randint(-6, 7, (sources, *shape))
    x[torch.rand(x.shape) < 0.3] *= 0.0
    x[..., ::50] = torch.inf
    codec, again = Raw(first), Raw(second)
    frames = encoded(codec, x)
    check_sum(backend, codec, frames, shape)
    check_sum_encode(backend, (codec, again), frames, shape)
    check_sum_encode(backend, (codec, parse("int8:32")), frames, shape)
    rows = x.to(reference.DTYPES[first]).transpose(0, -2)
    check(backend, codec, rows, reference.DTYPES[second])


@pytest.mark.parametrize("numel", [1, 7, 16_384, 20_011])
@pytest.mark.parametrize("order", [0, 7])
def test_sums_of_bits_tell_writes_apart(backend: Backend, numel: int, order: int) -> None:
    """One changed element, two swapped ones and a changed sign change the sums; equal bits have equal sums."""
    backend.run.order = order
    values = torch.arange(1.0, 1.0 + numel, device=backend.device)
    sums, again = (backend.kernels.sums_of_bits(each) for each in (values, values.clone()))
    assert torch.equal(sums, again)
    for place in {0, numel // 2, numel - 1}:
        one, two, sign = values.clone(), values.clone(), values.clone()
        one[place] += 1.0
        two[place], two[-1 - place] = values[-1 - place], values[place]
        sign[place].neg_()
        for changed in (one, two, sign):
            if not torch.equal(changed, values):
                assert not torch.equal(backend.kernels.sums_of_bits(changed), sums)
