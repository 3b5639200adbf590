"""Predictions from cubins for sm_90: widths of access, local memory, occupancy and speed; needs no GPU."""

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
from tests.support.cubin import FORMAT, PLAIN, VARIANTS, Cubin, _disassembler, compiled
from tests.support.sass.executed import DEVICES, ELEMENTS, executed, plain, works

pytestmark = pytest.mark.xdist_group("cubins")  # the page's test compiles them too: one process, once
LEAST = 0.5  # occupancy
# Kernels below it, with their occupancy: two octets a thread with error feedback need some 100 registers, and
# with 64 they spill.  They serve blocks of 4,097 to 8,192 elements of codecs that are not plain.
MISSES = {"encode_general<Scheme<0>, 2>": 0.25, "encode_general<Floats<0>, 2>": 0.25}
# Least predicted shares of a copy on an H100, by the first entry that a kernel's name begins with.  The page
# docs/reference/cuda_kernels.md says what limits those below 0.9.
SHARES = {
    "encode_held<Fp16, 4, true": 0.55,
    "encode_held<Fp16, 8, true": 0.62,
    "encode_held<Bf16, 4, true": 0.75,
    "encode_held<Bf16, 8, true": 0.84,
    "encode_held": 0.90,
    "decode_sum_encode<4, 4, 4, false": 0.55,
    "decode_sum_encode<4, 4, 8, false": 0.60,
    "decode_sum_encode<4": 0.47,
    "decode_sum_encode<8": 0.85,
    "encode_format<NVFP4": 0.38,
    "encode_format<MXFP6": 0.54,
    "encode_format<NF4": 0.25,
    "encode_format<Spike": 0.15,
    "encode_format": 0.57,
    "decode_format<NVFP4": 0.58,
    "decode_format<Spike": 0.28,
    "decode_format<Sign1": 0.40,
    "decode_format": 0.60,
    "decode": 0.90,
    "copy_raw": 0.90,
    "sum_raw": 0.90,
    "sum_bits": 0.90,
}
HARDEST = (
    "encode_held<Bf16, 4, false>",
    "encode_held<Bf16, 8, true>",
    "decode<Bf16, 4>",
    "decode_sum<4, 4>",
    "decode_sum_encode<4, 4, 4, false>",
    "decode_sum_encode<8, 2, 4, false>",
    "sum_raw<Bf16, Fp32, 4>",
    "sum_raw<Bf16, Bf16, 4>",
    "sum_bits",
)


@pytest.mark.needs("CUDA compiler")
@pytest.mark.parametrize("device", DEVICES)
def test_no_kernel_is_slower_than_is_stated(device: str) -> None:
    """What a kernel executes, to the reference's bits, allows the stated share; the page has those of other GPUs."""
    slow = {}
    for kernel, work in works(DEVICES[device].architecture).items():
        share, limit = work.share(DEVICES[device])
        pipes = ", ".join(f"{count:.0f} {pipe}" for pipe, count in work.instructions.items())
        print(f"{device} {kernel}: {pipes}: {share:.0%} of a copy, {limit}")
        least = next(least for start, least in SHARES.items() if kernel.startswith(start))
        if device == "H100" and share < least:
            slow[kernel] = share, limit
    assert not slow


@pytest.mark.needs("CUDA compiler")
@pytest.mark.parametrize("kernel", HARDEST)
def test_the_count_of_a_small_row_is_that_of_a_long_one(kernel: str) -> None:
    """A row of 16 times the elements, other ones, takes as many instructions an element, within 3 %."""
    long, short = executed(kernel, 90, 16 * ELEMENTS, seed=1), executed(kernel, 90)
    assert long.an_element == pytest.approx(short.an_element, rel=0.03)


# sum_bits takes no turns: each of its threads reads 64 elements, however many thread blocks there are.
@pytest.mark.needs("CUDA compiler")
@pytest.mark.parametrize("kernel", [kernel for kernel in HARDEST if kernel != "sum_bits"])
def test_turns_of_a_thread_block_cost_the_same(kernel: str) -> None:
    """With 1, 2 and 4 turns the instructions of an element are a start's share and a turn's, within 3 %."""
    blocks = executed(kernel, 90, 16 * ELEMENTS).issued.shape[1] * 32 // executed(kernel, 90).cubin.threads[0]
    one, two, four = (
        executed(kernel, 90, 16 * ELEMENTS, spread=blocks // turns).an_element for turns in (1, 2, 4)
    )
    assert one > two > four
    assert four == pytest.approx(two - (one - two) / 2, rel=0.03)


@pytest.mark.needs("CUDA compiler")
@pytest.mark.parametrize("numel", [ELEMENTS - 3, 8_009])
@pytest.mark.parametrize("kernel", HARDEST)
def test_the_end_of_a_row_is_executed_as_in_the_reference(kernel: str, numel: int) -> None:
    """Rows that end inside an octet have the reference's bits too, with branches that other rows never take."""
    issued = executed(kernel, 90, numel, seed=2).issued
    assert ((issued > 0).any(axis=1) & ~(executed(kernel, 90).issued > 0).any(axis=1)).any()


@pytest.fixture(scope="module", params=VARIANTS)
def predicted(request: pytest.FixtureRequest) -> dict[str, Cubin]:
    """The kernels of a file for an H100 as they are launched."""
    kernels = VARIANTS[request.param]
    general = tuple(kernel for kernel in kernels if not PLAIN.fullmatch(kernel))
    together = tuple(kernel for kernel in kernels if PLAIN.fullmatch(kernel))
    return compiled(request.param, together, 90) | (compiled(request.param, general, 90) if general else {})


def test_half_of_all_warps_are_held_and_nothing_is_in_local_memory(predicted: dict[str, Cubin]) -> None:
    """No thread has a stack or spilled registers; all but the kernels above hold half of all warps."""
    assert not {c.kernel: c.local for c in predicted.values() if c.local}
    low = {c.kernel: c.occupancy for c in predicted.values() if c.occupancy[0] < LEAST}
    assert low == {kernel: (MISSES[kernel], "registers") for kernel in predicted if kernel in MISSES}


def test_elements_are_loaded_and_stored_16_bytes_at_a_time(predicted: dict[str, Cubin]) -> None:
    """Accesses of elements have 16 bytes a thread, but for those one by one."""
    for kernel, launched in predicted.items():
        widths = {access.width for access in launched.accesses if access.purpose == "elements"}
        assert widths == (set() if kernel.startswith("decode_sum_encode<") else {16}), kernel


@pytest.mark.needs("CUDA compiler")
def test_nothing_goes_one_by_one_in_whole_rows() -> None:
    """Where all octets are whole and aligned, plain kernels reach elements and codes only as whole octets."""
    for kernel in plain():
        accesses = executed(kernel, 90).accesses
        wanted = {"codes"} | ({"scales"} if "<BF16SR" not in kernel else set())
        wanted |= {"elements"} if not kernel.startswith("decode_sum_encode<") else set()
        if not any(verb in kernel for verb in ("encode", "decode")):
            wanted = {"elements", "sums"} if kernel == "sum_bits" else {"elements"}
        assert {access.purpose for access in accesses} - {"padding", "extents"} == wanted, kernel
        widths = {access.width for access in accesses if access.purpose == "codes"}
        assert widths <= {4, 8} or FORMAT.fullmatch(kernel)


def _flushed(folder: Path, image: bytes) -> int:
    """The number of products that flush denormals; sums do so in exact divisions too."""
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
    """A kernel that accesses octets one by one is caught, and so is an access from an unlisted function."""
    for path in SOURCES.glob("*.cu*"):
        shutil.copy(path, tmp_path)
    text = (SOURCES / "frames.cuh").read_text(encoding="utf-8")
    narrow, kernel = "if (count != kOctet || !vectors) return", "encode_held<Bf16, 8, false>"
    assert text.count(narrow) == 1
    (tmp_path / "frames.cuh").write_text(text.replace(narrow, "return"), encoding="utf-8")
    accesses = executed(kernel, 90, sources=tmp_path).accesses
    assert {access.width for access in accesses if access.purpose == "elements, one by one"} == {2}
    elsewhere = text.replace("load_singly(", "load_elsewhere(").replace("load_singly<", "load_elsewhere<")
    folder = tmp_path / "elsewhere"
    shutil.copytree(SOURCES, folder)
    (folder / "frames.cuh").write_text(elsewhere, encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"frames.cuh.*: LDG.* in load_elsewhere, which is not known"):
        _ = compiled("quantize.cu", (kernel,), 90, folder)[kernel].accesses


def test_thread_blocks_are_those_that_are_launched() -> None:
    """Predicted sizes of thread blocks are those launched for blocks of codecs."""
    launched: dict[str, set[int]] = {}

    def note(launch: Launch, _: torch.device) -> None:
        launched.setdefault(launch.kernel, set()).add(launch.threads)

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
    predicted = {kernel: Cubin(kernel, 0, 0, 0, "", b"", SOURCES).threads for kernel in launched}
    assert predicted == {kernel: tuple(sorted(threads)) for kernel, threads in launched.items()}
