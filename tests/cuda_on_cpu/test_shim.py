"""The shim runs correct kernels correctly, and reports races and misused collectives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from impl.cuda.launch import Launch
from tests.cuda_on_cpu import host

PLANTED = Path(__file__).parent / "planted.cu"
KERNELS = (
    *("rotate<true>", "rotate<false>", "two_turns<1>", "two_turns<2>"),
    *("barrier_in_a_branch", "half_a_warp_shuffles", "wrong_mask"),
)


def run(cuda_libraries: Path, kernel: str, order: int = 0) -> torch.Tensor:
    """Returns (256,) int32 that ``kernel`` of planted.cu makes of 0, 1, 2, ..."""
    library = host.load(host.build(PLANTED, KERNELS, cuda_libraries))
    values, out = torch.arange(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    arguments = np.array([values.data_ptr(), out.data_ptr(), 256])
    host.call(library, Launch(PLANTED.name, kernel, (1, 1, 1), 256, arguments), order)
    return out


def test_a_race_shows_between_orders(cuda_libraries: Path) -> None:
    """Without its barrier, the exchange gives different results in different orders of threads."""
    up, *others = (run(cuda_libraries, "rotate<false>", order) for order in (0, 1, 7))
    assert not any(torch.equal(up, other) for other in others)


@pytest.mark.parametrize("order", range(5))
def test_a_correct_kernel_does_not_depend_on_the_order(cuda_libraries: Path, order: int) -> None:
    """With its barrier the exchange is right in all orders; so it is with two buffers, but not with one."""
    assert torch.equal(run(cuda_libraries, "rotate<true>", order), torch.arange(256).roll(-1).int())
    wanted = (((torch.arange(256) // 32 + 1) % 8) * 2 + 100).int()
    assert torch.equal(run(cuda_libraries, "two_turns<2>", order), wanted)
    assert not torch.equal(run(cuda_libraries, "two_turns<1>", order), wanted)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (
            "barrier_in_a_branch",
            r"block \(0, 0, 0\): 128 threads at __syncthreads, 0 in .* 128 have returned",
        ),
        ("half_a_warp_shuffles", r"deadlock .*: 0 threads at .*, 128 in a warp collective, 128 have"),
        ("wrong_mask", "a warp collective's mask lacks its caller"),
        ("none_of_that_name", "no kernel none_of_that_name"),
    ],
)
def test_what_would_hang_or_be_undefined_is_reported(cuda_libraries: Path, kernel: str, message: str) -> None:
    """A barrier or collective that not all threads reach ends with an error that has counts, and does not hang."""
    with pytest.raises(host.KernelError, match=message):
        run(cuda_libraries, kernel)


@pytest.mark.long
def test_kernels_are_clean_under_sanitizers(cuda_libraries: Path) -> None:
    """No kernel accesses memory outside its tensors, at row ends of every kind, or has undefined behaviour."""
    command = ["g++", "-print-file-name=libasan.so"]
    runtime = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("g++ comes without the address sanitizer's library")
    process = subprocess.run(
        [sys.executable, "-m", "tests.cuda_on_cpu.sanitized", str(cuda_libraries)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"},
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == "clean\n"
