"""Every CUDA kernel compiles with NVRTC for five architectures, without spills; needs no GPU."""

from __future__ import annotations

import itertools

import pytest

from impl.cuda.launch import compile_kernels
from tests.support.cubin import VARIANTS, Cubin, compiled

ARCHITECTURES = (75, 80, 90, 100, 120)
# Registers a thread: 65,536 of a multiprocessor over the threads that the launch bounds promise, and
# a little above what was measured where that would say nothing.
CEILINGS = {
    "encode_held": 64,
    "encode_general": 64,
    "encode_staged": 96,
    "encode_extents": 64,
    "encode_given": 80,
    "decode": 56,
    "decode_general": 48,
    "decode_sum": 64,
    "decode_sum_general": 64,
    "decode_sum_encode": 64,
    "decode_sum_encode_general": 64,
    "encode_format": 64,
    "decode_format": 64,
}
FEW_THREADS = 128  # two octets of encode_general, and all before sm_80: a multiprocessor holds 512 threads


def covering(architecture: int) -> list[tuple[str, str]]:
    """(file, variant): a fifth of all, another for each architecture."""
    every = [(file, variant) for file, variants in VARIANTS.items() for variant in variants]
    return every[ARCHITECTURES.index(architecture) :: len(ARCHITECTURES)]


def compile_all(rows: list[tuple[str, str]], architecture: int) -> dict[str, Cubin]:
    """Each variant, compiled."""
    found: dict[str, Cubin] = {}
    for file, pairs in itertools.groupby(sorted(set(rows)), key=lambda row: row[0]):
        found |= compiled(file, [variant for _, variant in pairs], architecture)
    return found


def ceiling(variant: str, architecture: int) -> int:
    """The most registers; a multiprocessor of sm_75 has half the warps."""
    name, _, values = variant.partition("<")
    few = architecture < 80 or (name == "encode_general" and values.endswith(", 2>"))
    return FEW_THREADS if few else CEILINGS[name]


def check(found: dict[str, Cubin]) -> None:
    """Assert ceilings, and print what was found."""
    for variant, cubin in found.items():
        print(f"{variant}: {cubin.registers} registers, {cubin.local} bytes of local memory")
    assert not {variant: cubin.local for variant, cubin in found.items() if cubin.local}
    assert not {
        v: cubin.registers for v, cubin in found.items() if cubin.registers > ceiling(v, cubin.architecture)
    }


@pytest.mark.needs("CUDA compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_without_spills(architecture: int) -> None:
    """A covering set of kernels compiles with no spilled register and within its ceiling."""
    check(compile_all(covering(architecture), architecture))


@pytest.mark.needs("CUDA compiler")
def test_an_architecture_that_the_compiler_does_not_know_gets_ptx() -> None:
    """NVRTC older than the GPU gives text that the GPU's driver compiles, with the kernel's name in it."""
    kernel = "decode<Bf16, 8>"
    made = compile_kernels("dequantize.cu", [kernel], 999)
    assert f".entry {made.lowered[kernel]}(".encode() in made.image
    assert made.image.rstrip().endswith(b"}")


@pytest.mark.nightly
@pytest.mark.needs("CUDA compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_kernels_compile_without_spills(architecture: int) -> None:
    """Every kernel compiles for every architecture with no spilled register and within its ceiling."""
    rows = [(file, variant) for file, variants in VARIANTS.items() for variant in variants]
    check(compile_all(rows, architecture))
