"""codec.cuh, function by function: conversions exhaustively, the division where it is hardest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from impl.cuda.launch import ARGUMENTS, Launch
from impl.reference import DTYPES
from tests.cuda_on_cpu import host

SOURCE = Path(host.__file__).parent / "arithmetic.cu"
KERNELS = [f"{way}<{kind}>" for way in ("widen", "narrow") for kind in ("Bf16", "Fp16")]
KINDS = {"bf16": "Bf16", "fp16": "Fp16"}
SPECIAL = (0.0, 2.0**-149, 2.0**-127, 2.0**-126, 2.0**-25, 2.0**-24, 2.0**-14, 65504.0, 65520.0, 3.4028235e38)


def probe(libraries: Path, kernel: str, values: Tensor, out: Tensor, *rest: int) -> Tensor:
    """``out`` after ``kernel`` of arithmetic.cu ran on every element of ``values``."""
    library = host.load(host.build(SOURCE, [*KERNELS, "encode_values", "layout"], libraries))
    arguments = np.array([values.data_ptr(), out.data_ptr(), values.numel(), *rest, *[0] * (4 - len(rest))])
    host.call(library, Launch(SOURCE.name, kernel, (-(-values.numel() // 256), 1, 1), 256, arguments))
    return out


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, or both NaN."""
    bits = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("name", KINDS)
def test_every_16_bit_number_widens_as_torch_does(libraries: Path, name: str) -> None:
    """All 65,536 patterns of bf16 and fp16 widen to torch's fp32."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(DTYPES[name])
    assert same(probe(libraries, f"widen<{KINDS[name]}>", patterns, torch.empty(65536)), patterns.float())


@pytest.mark.parametrize("name", KINDS)
def test_narrowing_rounds_as_torch_does(libraries: Path, name: str) -> None:
    """Around every 16-bit number, its neighbours and the ties between, narrowing equals torch's cast."""
    dtype = DTYPES[name]
    centres = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()
    half_step = 1 << (15 if name == "bf16" else 12)
    nudges = torch.tensor([0, 1, -1, half_step, half_step - 1, half_step + 1], dtype=torch.int32)
    around = (centres.view(torch.int32)[:, None] + nudges).view(-1).view(torch.float32)
    special = torch.tensor([*SPECIAL, *(-x for x in SPECIAL), torch.inf, -torch.inf, torch.nan])
    values = torch.cat([around, special])
    largest = torch.finfo(dtype).max
    got = probe(libraries, f"narrow<{KINDS[name]}>", values, torch.empty(values.numel(), dtype=dtype))
    assert same(got, values.clamp(-largest, largest).to(dtype))


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("asymmetric", [False, True])
def test_the_product_with_the_reciprocal_decides_as_the_division(
    libraries: Path, bits: int, *, asymmetric: bool
) -> None:
    """At and beside every tie, for scales across the whole range, the code is the divided one."""
    random = torch.Generator().manual_seed(bits)
    steps = (1 << bits) - 1 if asymmetric else (1 << (bits - 1)) - 1
    count = 60_000
    exponents = torch.randint(-126, 120, (count,), generator=random).double()
    scale = (torch.rand(count, generator=random, dtype=torch.float64) + 1).mul(2**exponents).float()
    scale[:1000] = 2.0**-126
    scale[1000:3000] = (torch.rand(2000, generator=random) + 1) * 2.0**126  # reciprocals are denormal
    ties = torch.randint(-steps - 1, steps + 1, (count,), generator=random) + 0.5
    ties[::7] = torch.rand(ties[::7].shape, generator=random) * 2 * steps - steps
    nudges = torch.randint(-3, 4, (count,), generator=random, dtype=torch.int32)
    values = ties * scale
    finite = values.isfinite()
    values = torch.where(finite, (values.view(torch.int32) + nudges).view(torch.float32), 0.0)
    low = torch.where(torch.rand(count, generator=random) < 0.3, -scale, 0.0) if asymmetric else scale * 0
    out = torch.empty(count, dtype=torch.int32)
    got = probe(libraries, "encode_values", values, out, bits, asymmetric, scale.data_ptr(), low.data_ptr())
    if asymmetric:
        wanted = ((values * 0.5 - low * 0.5) / (scale * 0.5)).round().clamp(0, steps)
    else:
        wanted = (values / scale).round().clamp(-steps, steps)
    assert torch.equal(got, wanted.int() & ((1 << bits) - 1))


def test_the_argument_has_the_same_fields_on_both_sides(libraries: Path) -> None:
    """The structure that Python fills lies as the one that C++ reads."""
    got = probe(libraries, "layout", torch.zeros(1), torch.empty(9, dtype=torch.int64)).tolist()
    fields = ARGUMENTS.fields
    assert fields is not None
    names = ("numel", "team_shift", "extents", "values", "frames", "output", "coding", "second")
    assert got == [ARGUMENTS.itemsize, *(fields[name][1] for name in names)]
