"""codec.cuh, function by function: conversions exhaustively, the division where it is hardest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from impl.codecs.codec import parse
from impl.codecs.reference import DTYPES, _elements, _float_codes
from impl.codecs.rounding_noise import Key
from impl.cuda.launch import ARGUMENTS, Launch
from tests.cuda_on_cpu import host
from tests.support.philox import bits_of

SOURCE = Path(host.__file__).parent / "arithmetic.cu"
KERNELS = [
    *(f"{way}<{kind}>" for way in ("widen", "narrow") for kind in ("Bf16", "Fp16")),
    *("encode_values", "encode_values_at_random", "encode_floats", "random_words", "layout"),
]
KINDS = {"bf16": "Bf16", "fp16": "Fp16"}
SPECIAL = (0.0, 2.0**-149, 2.0**-127, 2.0**-126, 2.0**-25, 2.0**-24, 2.0**-14, 65504.0, 65520.0, 3.4028235e38)


def probe(cuda_libraries: Path, kernel: str, values: Tensor, out: Tensor, *rest: int) -> Tensor:
    """``out`` after ``kernel`` of arithmetic.cu ran on every element of ``values``."""
    library = host.load(host.build(SOURCE, KERNELS, cuda_libraries))
    arguments = np.array([values.data_ptr(), out.data_ptr(), values.numel(), *rest, *[0] * (5 - len(rest))])
    host.call(library, Launch(SOURCE.name, kernel, (-(-values.numel() // 256), 1, 1), 256, arguments))
    return out


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, or both NaN."""
    bits = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("name", KINDS)
def test_every_16_bit_number_widens_as_torch_does(cuda_libraries: Path, name: str) -> None:
    """All 65,536 patterns of bf16 and fp16 widen to torch's fp32."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(DTYPES[name])
    assert same(
        probe(cuda_libraries, f"widen<{KINDS[name]}>", patterns, torch.empty(65536)), patterns.float()
    )


@pytest.mark.parametrize("name", KINDS)
def test_narrowing_rounds_as_torch_does(cuda_libraries: Path, name: str) -> None:
    """Around every 16-bit number, its neighbours and the ties between, narrowing equals torch's cast."""
    dtype = DTYPES[name]
    centres = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()
    half_step = 1 << (15 if name == "bf16" else 12)
    nudges = torch.tensor([0, 1, -1, half_step, half_step - 1, half_step + 1], dtype=torch.int32)
    around = (centres.view(torch.int32)[:, None] + nudges).view(-1).view(torch.float32)
    special = torch.tensor([*SPECIAL, *(-x for x in SPECIAL), torch.inf, -torch.inf, torch.nan])
    values = torch.cat([around, special])
    largest = torch.finfo(dtype).max
    got = probe(cuda_libraries, f"narrow<{KINDS[name]}>", values, torch.empty(values.numel(), dtype=dtype))
    assert same(got, values.clamp(-largest, largest).to(dtype))


def hardest(count: int, steps: int, seed: int, least: int = 0) -> tuple[Tensor, Tensor]:
    """Values and their scales: at and beside ties of ``least`` to ``steps`` steps, across the whole range."""
    random = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-126, 120, (count,), generator=random).double()
    scale = (torch.rand(count, generator=random, dtype=torch.float64) + 1).mul(2**exponents).float()
    scale[:1000] = 2.0**-126
    scale[1000:3000] = (torch.rand(2000, generator=random) + 1) * 2.0**126  # reciprocals are denormal
    ties = torch.randint(least - 1, steps + 1, (count,), generator=random) + 0.5
    ties[::7] = torch.rand(ties[::7].shape, generator=random) * (steps - least) + least
    nudges = torch.randint(-3, 4, (count,), generator=random, dtype=torch.int32)
    values = ties * scale
    values = torch.where(values.isfinite(), (values.view(torch.int32) + nudges).view(torch.float32), 0.0)
    return values, scale


def shifts(values: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """(n,) random bits, int32, the extreme ones among them, and what they add to a quotient."""
    bits = torch.randint(0, 1 << 16, values.shape, generator=torch.Generator().manual_seed(seed))
    bits[::5], bits[1::5] = 0, 65_535
    return bits.int(), bits.float() * 2.0**-16 - (0.5 - 2.0**-17)


@pytest.mark.parametrize("at_random", [False, True])
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("asymmetric", [False, True])
def test_the_product_with_the_reciprocal_decides_as_the_division(
    cuda_libraries: Path, bits: int, *, asymmetric: bool, at_random: bool
) -> None:
    """At and beside every tie, also of sums with random bits, for scales across the whole range, the code is
    the divided one.
    """
    steps, count = (1 << bits) - 1 if asymmetric else (1 << (bits - 1)) - 1, 60_000
    values, scale = hardest(count, steps, bits, 0 if asymmetric and at_random else -steps)
    random, shift, low = *shifts(values, bits), torch.zeros(count)
    if at_random:
        values[::2] -= (shift * scale)[::2]  # the sum is the tie
        values = torch.where((values.abs() <= steps * scale) & values.isfinite(), values, 0.0)
    elif asymmetric:
        some = torch.rand(count, generator=torch.Generator().manual_seed(bits + 1)) < 0.3
        low = torch.where(some, -scale, 0.0)
    rest = (bits, asymmetric, scale.data_ptr(), low.data_ptr(), *([random.data_ptr()] if at_random else []))
    kernel, out = "encode_values_at_random" if at_random else "encode_values", torch.empty(count).int()
    got = probe(cuda_libraries, kernel, values, out, *rest)
    quotients = (values * 0.5 - low * 0.5) / (scale * 0.5) if asymmetric else values / scale
    rounded = (quotients + shift if at_random else quotients).round()
    assert torch.equal(got, rounded.clamp(0 if asymmetric else -steps, steps).int() & ((1 << bits) - 1))


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("at_random", [False, True])
@pytest.mark.parametrize("text", ["fp8e4m3:1", "fp8e5m2:1", "mxfp4"])
def test_floats_are_coded_as_the_reference_does(
    cuda_libraries: Path, text: str, *, at_random: bool, powers: bool
) -> None:
    """At and beside ties and exponents' ends of every element, the code is the divided one."""
    codec, count = parse(text), 60_000
    every = _elements(codec, torch.arange(1 << (codec.bits - 1), dtype=torch.uint8))
    every = every[every <= codec.largest].sort().values
    points = torch.cat([every, (every[1:] + every[:-1]) / 2])
    random = torch.Generator().manual_seed(count)
    v = points[torch.randint(0, len(points), (count,), generator=random)]
    v[::7] = torch.rand(v[::7].shape, generator=random) * codec.largest
    _, scale = hardest(count, 2, 0)
    scale = scale.clamp(2.0**-126, 2.0**127 / codec.largest)
    if powers:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    bits, shift = shifts(v, 1)
    if at_random:
        smallest = 2.0 ** (codec.smallest_exponent - codec.mantissa)
        v[::2] -= (
            shift[::2]
            * torch.exp2(v[::2].clamp(smallest * 2**codec.mantissa).log2().floor())
            / (2.0**codec.mantissa)
        )
    v = (v * scale).view(torch.int32) + torch.randint(-3, 4, (count,), generator=random, dtype=torch.int32)
    v = torch.where(v < 0, 0, v).view(torch.float32).clamp(max=(codec.largest * scale))
    v[1::2] *= -1
    out = torch.empty(count, dtype=torch.int32)
    noise = bits.data_ptr() if at_random else 0
    got = probe(cuda_libraries, "encode_floats", v, out, codec.mantissa, powers, scale.data_ptr(), 0, noise)
    wanted = _float_codes(codec, v / scale, shift if at_random else None)
    assert torch.equal(got, wanted.int())


def test_random_words_are_those_of_the_oracle(cuda_libraries: Path) -> None:
    """Philox gives its authors' words, for octets below and above 2^32, and each element its 16 bits."""
    noise = Key(7, 3, 1, "unit", "gradients", 1, 5).noise()
    octets = torch.tensor([0, 1, 2**32 - 1, 2**32, 2**61 - 1])
    words, out = torch.tensor(noise.words), torch.empty(5, 4, dtype=torch.int32)
    key = words.to(torch.int32)
    probe(cuda_libraries, "random_words", octets, out, 0, 0, 0, 0, key.data_ptr())
    for octet, got in zip(octets.tolist(), out.tolist(), strict=True):
        halves = [half for word in got for half in (word & 0xFFFF, word >> 16 & 0xFFFF)]
        assert halves == [bits_of(noise, 8 * octet + j) for j in range(8)]


def test_the_argument_has_the_same_fields_on_both_sides(cuda_libraries: Path) -> None:
    """The structure that Python fills lies as the one that C++ reads."""
    got = probe(cuda_libraries, "layout", torch.zeros(1), torch.empty(9, dtype=torch.int64)).tolist()
    names = ("numel", "carried", "values", "error.kind", "coding", "second.shift", "noise.key", "decay")
    assert got == [ARGUMENTS.itemsize, *(offset(ARGUMENTS, name) for name in names)]


def offset(structure: np.dtype[np.void], name: str) -> int:
    """Bytes before a field, or a field of a field."""
    head, _, rest = name.partition(".")
    kind, start = structure.fields[head][:2]
    return int(start) + (offset(kind, rest) if rest else 0)
