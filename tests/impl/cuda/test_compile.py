"""Every CUDA kernel compiles with NVRTC for four architectures, without spills; needs no GPU."""

from __future__ import annotations

import itertools
import re

import pytest

from impl.cuda.kernels import VARIANTS
from impl.cuda.launch import OPTIONS, SOURCES

ARCHITECTURES = (75, 80, 90, 100)
# Registers a thread: 65,536 of a multiprocessor over the threads that the launch bounds promise, and
# a little above what was measured where that would say nothing.
CEILINGS = {
    "encode_held": 128,
    "encode_general": 128,
    "encode_staged": 96,
    "encode_extents": 64,
    "encode_given": 80,
    "decode": 56,
    "decode_general": 48,
    "decode_sum": 128,
    "decode_sum_general": 64,
    "decode_sum_encode": 128,
    "decode_sum_encode_general": 96,
}


def covering(architecture: int) -> list[tuple[str, str]]:
    """(file, variant): a quarter of all, another for each architecture."""
    every = [(file, variant) for file, variants in VARIANTS.items() for variant in variants]
    return every[ARCHITECTURES.index(architecture) :: len(ARCHITECTURES)]


def compile_all(rows: list[tuple[str, str]], architecture: int) -> dict[str, tuple[int, int]]:
    """Registers and spilled bytes of each variant."""
    nvrtc = pytest.importorskip("cupy", reason="CuPy is not installed: tox -e compile").cuda.nvrtc
    try:
        nvrtc.getVersion()
    except RuntimeError as problem:
        pytest.skip(f"NVRTC is not installed (tox -e compile): {problem}")
    found: dict[str, tuple[int, int]] = {}
    for file, pairs in itertools.groupby(sorted(set(rows)), key=lambda row: row[0]):
        variants = [variant for _, variant in pairs]
        program = nvrtc.createProgram((SOURCES / file).read_text(encoding="utf-8"), file, (), ())
        for variant in variants:
            nvrtc.addNameExpression(program, variant)
        options = (*OPTIONS, f"--gpu-architecture=sm_{architecture}", "--ptxas-options=-v")
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as problem:
            raise AssertionError(f"{file}: {nvrtc.getProgramLog(program)}") from problem
        log = nvrtc.getProgramLog(program)
        for variant in variants:
            lowered = re.escape(nvrtc.getLoweredName(program, variant))
            pattern = (
                rf"'{lowered}' for.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
            )
            facts = re.search(pattern, log, re.DOTALL)
            assert facts is not None, f"{variant}: no resources in {log}"
            found[variant] = (int(facts[3]), int(facts[1]) + int(facts[2]))
        nvrtc.destroyProgram(program)
    return found


def check(facts: dict[str, tuple[int, int]]) -> None:
    """Assert ceilings, and print what was found."""
    for variant, (registers, spilled) in facts.items():
        print(f"{variant}: {registers} registers, {spilled} bytes spilled")
    assert not {variant: spilled for variant, (_, spilled) in facts.items() if spilled}
    assert not {v: registers for v, (registers, _) in facts.items() if registers > CEILINGS[v.split("<")[0]]}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_without_spills(architecture: int) -> None:
    """A covering set of kernels compiles with no spilled register and within its ceiling."""
    check(compile_all(covering(architecture), architecture))


def test_the_covering_sets_cover() -> None:
    """Over the four architectures every kernel is compiled."""
    chosen = {row for architecture in ARCHITECTURES for row in covering(architecture)}
    assert chosen == {(file, variant) for file, variants in VARIANTS.items() for variant in variants}


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_kernels_compile_without_spills(architecture: int) -> None:
    """Every kernel compiles for every architecture with no spilled register and within its ceiling."""
    rows = [(file, variant) for file, variants in VARIANTS.items() for variant in variants]
    check(compile_all(rows, architecture))
