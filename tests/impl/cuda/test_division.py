"""The quotients of ``codec.cuh`` equal divisions bit for bit."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from impl.cuda.launch import SOURCES

# X is an odd number of 25 bits, the middle between two quotients of 24 bits.  A quotient n / d of two mantissas that is
# within 2^-21 of X, in units of X, has n 2^j - X d = c with j of 24 or 25 and |c| below 2^-21 d, which is below 8; so d
# is -c / X modulo 2^j.
PROGRAM = """
#include "codec.cuh"
using namespace codec;
static bool equal(float numerator, float divisor) {
    const Divider divider = divider_of(divisor, 0.0f);
    return divider.quick && bits_of(quotient_of(divider, numerator)) == bits_of(numerator / divisor);
}
extern "C" u64 near_middles(u64* tried) {
    u64 different = 0;
    for (u64 x = (1u << 24) + 1; x < 1u << 25; x += 2) {
        u64 inverse = x;
        for (int i = 0; i < 5; ++i) inverse *= 2 - x * inverse;
        for (int j = 24; j <= 25; ++j) {
            const u64 mask = (u64(1) << j) - 1;
            for (i64 c = -8; c <= 8; ++c) {
                const u64 d = u64(-c) * inverse & mask, n = (x * d + u64(c)) >> j;
                if (c == 0 || d < 1u << 23 || d >= 1u << 24 || n < 1u << 23 || n >= 1u << 24) continue;
                ++*tried;
                different += !equal(float(n), float(d));
            }
        }
    }
    return different;
}
// All bf16 numerators of a binade, over scales as the codecs have them.
extern "C" u64 of_bf16(u64* tried) {
    u64 different = 0;
    for (int steps = 1; steps < 256; ++steps)
        for (u32 most = 128; most < 256; ++most)
            for (u32 numerator = 1; numerator < 256; ++numerator) {
                ++*tried;
                different += !equal(float(numerator), float(most) / float(steps));
            }
    return different;
}
// Random numbers with the largest and smallest divisors that are `quick`, and quotients from 2^-20 to 2^9.
extern "C" u64 at_the_ends(u64* tried) {
    u64 different = 0, state = 1;
    const auto random = [&] { return u32((state = state * 6364136223846793005u + 1442695040888963407u) >> 40); };
    for (int i = 0; i < 4000000; ++i) {
        const int exponent = i % 2 == 0 ? -64 : 124, up = int(random() % 29) - 20;
        const float divisor = float_of((u32(127 + exponent) << 23) | (random() & 0x7fffffu));
        if (exponent + up > 126) continue;
        const float numerator = float_of((u32(127 + exponent + up) << 23) | (random() & 0x7fffffu));
        ++*tried;
        different += !equal(i % 3 == 0 ? -numerator : numerator, divisor);
    }
    return different;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path: Path = tmp_path_factory.mktemp("division") / "division.so"
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", f"-I{SOURCES}"]
    flags += ["-mfma"] if "fma" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split() else []
    subprocess.run(["g++", *flags, "-x", "c++", "-", "-o", str(path)], input=PROGRAM, text=True, check=True)
    return ctypes.CDLL(str(path))


@pytest.mark.needs("g++", "x86-64")
@pytest.mark.parametrize(
    ("function", "least"), [("near_middles", 40_000_000), ("of_bf16", 8_000_000), ("at_the_ends", 3_000_000)]
)
def test_quotients_equal_divisions(library: ctypes.CDLL, function: str, least: int) -> None:
    """So they do for all pairs near the middle of two numbers, all of bf16, and the smallest and largest divisors."""
    tried, run = ctypes.c_uint64(), getattr(library, function)
    run.restype = ctypes.c_uint64
    assert run(ctypes.byref(tried)) == 0
    assert tried.value > least
