"""Every CUDA kernel compiles with NVRTC for five architectures, without spills; needs no GPU."""

from __future__ import annotations

import itertools

import pytest

from impl.cuda.launch import compile_kernels
from tests.support.cubin import VARIANTS, Cubin, compiled
from tests.support.params import nightly

ARCHITECTURES = (75, 80, 90, 100, 120)
# Registers a thread: 65,536 of a multiprocessor over the threads that the launch bounds promise, and
# a little above what was measured where that would say nothing.
CEILINGS = {"encode_staged": 96, "encode_given": 80, "decode": 56, "decode_general": 48}  # else 64
FEW_THREADS = 128  # two octets of encode_general, and all before sm_80: a multiprocessor holds 512 threads


def ceiling(variant: str, architecture: int) -> int:
    """Returns the most registers that a kernel may have; a multiprocessor of sm_75 has half the warps."""
    name, _, values = variant.partition("<")
    few = architecture < 80 or (name == "encode_general" and values.endswith(", 2>"))
    return FEW_THREADS if few else CEILINGS.get(name, 64)


@pytest.mark.needs("CUDA compiler")
@pytest.mark.parametrize("step", [len(ARCHITECTURES), *nightly(1)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_without_spills(architecture: int, step: int) -> None:
    """A fifth of the kernels (all of them nightly) have no spilled registers and keep within their ceilings."""
    kernels = [(file, variant) for file, variants in VARIANTS.items() for variant in variants]
    cubins: dict[str, Cubin] = {}
    for file, pairs in itertools.groupby(
        kernels[ARCHITECTURES.index(architecture) % step :: step], lambda r: r[0]
    ):
        cubins |= compiled(file, tuple(variant for _, variant in pairs), architecture)
    for variant, cubin in cubins.items():
        print(f"{variant}: {cubin.registers} registers, {cubin.local} bytes of local memory")
    assert not {variant: cubin.local for variant, cubin in cubins.items() if cubin.local}
    assert not {v: c.registers for v, c in cubins.items() if c.registers > ceiling(v, architecture)}


@pytest.mark.needs("CUDA compiler")
def test_an_architecture_that_the_compiler_does_not_know_gets_ptx() -> None:
    """If NVRTC is older than the GPU, it gives PTX, which the driver compiles, with the kernel's name in it."""
    kernel = "decode<Bf16, 8>"
    compilation = compile_kernels("dequantize.cu", [kernel], 999)
    assert f".entry {compilation.lowered[kernel]}(".encode() in compilation.image
    assert compilation.image.rstrip().endswith(b"}")
