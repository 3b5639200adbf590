"""What cubins for sm_90 predict: widths of access, local memory and occupancy; needs no GPU."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from impl.codecs.codec import parse
from impl.cuda.kernels import Kernels
from impl.cuda.launch import SOURCES, Launch, compile_kernels, cubin
from tests.impl.codecs.properties import garbage, noise_of
from tests.support.cubin import (
    DEVICES,
    FORMAT,
    VARIANTS,
    Cubin,
    _disassembler,
    compiled,
    main_paths,
    works,
)

pytestmark = pytest.mark.xdist_group("cubins")  # which the page's test compiles too: by one process, once
Predicted = tuple[dict[str, Cubin], dict[str, Cubin]]
LEAST = 0.5  # occupancy
# Kernels that miss it, with what they reach: two octets a thread with error feedback need some 100 registers,
# and with 64 they spill.  Theirs are blocks of 4,097 to 8,192 elements of codecs that are not plain.
MISSES = {"encode_general<Scheme<0>, 2>": 0.25, "encode_general<Floats<0>, 2>": 0.25}
# Shares of a copy that an H100 is predicted to reach at least, by the first that a kernel begins with.
# Random bits for fp16 are held by Philox and by widening in integers, the sum of int4 that is encoded in int4
# again by issue: 553 instructions for eight elements of eight sources.  Of formats NF4 is held by comparing
# each quotient with 15 limits, spikes by searching a block six times.
SHARES = {
    "encode_held<Fp16, 4, true": 0.60,
    "encode_held<Fp16, 8, true": 0.68,
    "encode_held": 0.85,
    "decode_sum_encode<4, 4, 4, false": 0.57,
    "decode_sum_encode<4, 4, 8, false": 0.63,
    "decode_sum_encode<4": 0.49,
    "decode_sum_encode<8": 0.88,
    "encode_format<NVFP4": 0.44,
    "encode_format<MXFP6": 0.56,
    "encode_format<NF4": 0.23,
    "encode_format<Spike": 0.16,
    "encode_format": 0.65,
    "decode_format<NVFP4": 0.60,
    "decode_format<Spike": 0.33,
    "decode_format<Sign1": 0.46,
    "decode_format": 0.74,
    "decode": 0.85,
}


@pytest.mark.needs("CUDA compiler")
@pytest.mark.parametrize("architecture", DEVICES)
def test_no_kernel_is_slower_than_is_stated(architecture: int) -> None:
    """Instructions of the main path allow the stated share; the page states those of other architectures."""
    slow = {}
    for kernel, work in works(architecture).items():
        share, limit = work.share(DEVICES[architecture])
        pipes = ", ".join(f"{count:.0f} {pipe}" for pipe, count in work.instructions.items())
        print(f"sm_{architecture} {kernel}: {pipes}: {share:.0%} of a copy, {limit}")
        least = next(least for start, least in SHARES.items() if kernel.startswith(start))
        if architecture == 90 and share < least:
            slow[kernel] = share, limit
    assert not slow


@pytest.fixture(scope="module", params=VARIANTS)
def predicted(request: pytest.FixtureRequest) -> Predicted:
    """The kernels of a file for an H100 as they are launched, and main paths of the plain ones."""
    return compiled(request.param, VARIANTS[request.param], 90), main_paths(request.param, 90)


def test_half_of_all_warps_are_held_and_nothing_is_in_local_memory(predicted: Predicted) -> None:
    """No thread has a stack or spilled registers; half of all warps are held, but by kernels listed above."""
    cubins = predicted[0].values()
    assert not {each.kernel: each.local for each in cubins if each.local}
    low = {each.kernel: each.occupancy for each in cubins if each.occupancy[0] < LEAST}
    assert low == {kernel: (MISSES[kernel], "registers") for kernel in predicted[0] if kernel in MISSES}


def test_elements_are_loaded_and_stored_16_bytes_at_a_time(predicted: Predicted) -> None:
    """All that reaches elements has 16 bytes a thread, but for what goes one by one."""
    for kernel, launched in predicted[0].items():
        widths = {access.width for access in launched.accesses if access.purpose == "elements"}
        assert widths == (set() if kernel.startswith("decode_sum_encode<") else {16}), kernel


def test_nothing_goes_one_by_one_on_the_main_path(predicted: Predicted) -> None:
    """Where all octets are whole and aligned, plain kernels reach elements and codes only as whole octets."""
    for kernel, main in predicted[1].items():
        assert main.local == 0
        wanted = {"codes"} | ({"scales"} if "<BF16SR" not in kernel else set())
        wanted |= {"elements"} if not kernel.startswith("decode_sum_encode<") else set()
        assert {access.purpose for access in main.accesses} - {"padding", "extents"} == wanted, kernel
        widths = {access.width for access in main.accesses if access.purpose == "codes"}
        assert widths <= {4, 8} or FORMAT.fullmatch(kernel)


def _flushed(folder: Path, image: bytes) -> int:
    """Products that take denormals for zeros; sums do so inside an exact division too."""
    path = folder / "one.cubin"
    path.write_bytes(image)
    program = _disassembler()
    text = subprocess.run([program, "-c", str(path)], capture_output=True, text=True, check=True).stdout
    assert "FMUL" in text
    return text.count("FMUL.FTZ")


@pytest.mark.needs("CUDA compiler")
@pytest.mark.parametrize("kernel", ["encode_held<Fp16, 8, false>", "encode_general<Floats<0>, 1>"])
def test_what_is_launched_keeps_denormals(tmp_path: Path, kernel: str) -> None:
    """No instruction of a launched kernel flushes denormals, as those that CuPy compiles do; it is kept."""
    path = cubin("quantize.cu", kernel, 90, tmp_path)
    assert _flushed(tmp_path, path.read_bytes()) == 0
    flushing = compile_kernels("quantize.cu", [kernel], 90, options=["--ftz=true"])
    assert _flushed(tmp_path, flushing.image) > 0
    assert f".{flushing.lowered[kernel]}.cubin" in path.name
    path.write_bytes(b"kept")
    assert cubin("quantize.cu", kernel, 90, tmp_path).read_bytes() == b"kept"


@pytest.mark.needs("CUDA compiler")
def test_narrow_accesses_are_found(tmp_path: Path) -> None:
    """A kernel whose octets go one by one is caught, and so is one that reaches memory from elsewhere."""
    for path in SOURCES.glob("*.cu*"):
        shutil.copy(path, tmp_path)
    text = (SOURCES / "frames.cuh").read_text(encoding="utf-8")
    narrow, kernel = "if (count != kOctet || !vectors) return", "encode_held<Bf16, 8, false>"
    assert text.count(narrow) == 1
    (tmp_path / "frames.cuh").write_text(text.replace(narrow, "return"), encoding="utf-8")
    found = compiled("quantize.cu", (kernel,), 90, tmp_path, main=True)[kernel].accesses
    assert {access.width for access in found if access.purpose == "elements, one by one"} == {2}
    elsewhere = text.replace("load_singly(", "load_elsewhere(").replace("load_singly<", "load_elsewhere<")
    folder = tmp_path / "elsewhere"
    shutil.copytree(SOURCES, folder)
    (folder / "frames.cuh").write_text(elsewhere, encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"frames.cuh.*: LDG.* in load_elsewhere, which is not known"):
        _ = compiled("quantize.cu", (kernel,), 90, folder)[kernel].accesses


def test_thread_blocks_are_those_that_are_launched() -> None:
    """The sizes of thread blocks that are predicted for are all those that blocks of codecs lead to."""
    seen: dict[str, set[int]] = {}

    def note(launch: Launch, _: torch.device) -> None:
        seen.setdefault(launch.kernel, set()).add(launch.threads)

    kernels = Kernels(note)
    for text, block, dtype in itertools.product(
        ("int8:{}", "int4:{}:stochastic", "int5:{}", "fp8e4m3:{}"),
        (8, 100, 256, 1024, 2048, 4096, 4104, 8192, 8200),
        (torch.float32, torch.bfloat16, torch.float16),
    ):
        codec, x = parse(text.format(block)), torch.zeros(4 * block, dtype=dtype)
        frames = garbage(codec, x.shape, x.device)
        kernels.encode(codec, x, frames, noise=noise_of(codec, ()))
        kernels.decode(codec, frames, x)
        if dtype == torch.float32:
            two = frames.expand(2, *frames.shape).contiguous()
            kernels.decode_sum(codec, two, x)
            kernels.decode_sum_encode(codec, codec, two, frames.clone(), x.numel(), noise=noise_of(codec, ()))
    predicted = {kernel: Cubin(kernel, 0, 0, 0, "", b"", SOURCES).threads for kernel in seen}
    assert predicted == {kernel: tuple(sorted(threads)) for kernel, threads in seen.items()}
