"""Executes compiled kernels on rows of random elements, compares them with the reference, and counts instructions.

:func:`executed` gives the counts of one kernel, :func:`works` those of all kernels that are compiled for a codec and a
type, and :meth:`Work.share` the largest share of a copy's rate that they allow on a :class:`Device`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from impl.codecs.codec import FORMATS, Codec, parse
from impl.codecs.reference import NAMES, REFERENCE
from impl.codecs.rounding_noise import OCTET, Noise
from impl.cuda.kernels import SPREAD, SUMMED, THREADS, TYPES, Kernels
from impl.cuda.launch import SOURCES, Launch
from tests.support.bits import summed
from tests.support.cubin import FORMAT, PLAIN, VARIANTS, WARP, Access, Cubin, compiled
from tests.support.sass.machine import Machine
from tests.support.sass.memory import Memory
from tests.support.sass.program import read

if TYPE_CHECKING:
    from numpy.typing import NDArray

ELEMENTS: Final = 16_384  # of a row: at least two thread blocks of every kernel
BLOCK: Final = 256  # elements
ADDED: Final = 8  # sources
_LONG: Final = 1 << 24  # elements of a row, whose frame has no padding to speak of
_NOISE: Final = Noise((1, 2, 3, 4))


@dataclass(frozen=True)
class Executed:
    """What the warps of a launch executed."""

    cubin: Cubin
    names: tuple[str, ...]  # of the instructions of the kernel, by number
    issued: NDArray[np.int64]  # (instructions, warps): how often a warp issued an instruction
    reached: frozenset[int]  # numbers of the instructions that accessed global memory
    elements: int

    @property
    def an_element(self) -> float:
        """Instructions of a thread for an element."""
        return float(self.issued.sum()) * WARP / self.elements

    @property
    def accesses(self) -> tuple[Access, ...]:
        """The accesses of global memory that were executed."""
        return tuple(access for access in self.cubin.accesses if access.number in self.reached)

    def of_an_octet(self) -> dict[str, float]:
        """Instructions of a warp, by name, for eight elements of each lane."""
        counts = dict.fromkeys(self.names, 0.0)
        for name, count in zip(self.names, self.issued.sum(axis=1), strict=True):
            counts[name] += float(count) * WARP * OCTET / self.elements
        return counts


class Interpreter:
    """Runs the launches of :mod:`impl.cuda.kernels` on CPU tensors, as cubins for one architecture.

    Kernels reach the tensors in ``memory``, and nothing else.
    """

    def __init__(self, architecture: int, sources: Path = SOURCES) -> None:
        self.memory = Memory()
        self.ran: dict[str, Executed] = {}  # the last run of each kernel; its elements are 1
        self._architecture, self._sources = architecture, sources

    def __call__(self, launch: Launch, device: torch.device) -> None:
        together: tuple[str, ...] = (launch.kernel,)
        if self._sources == SOURCES and PLAIN.fullmatch(launch.kernel):
            together = tuple(kernel for kernel in VARIANTS[launch.file] if PLAIN.fullmatch(kernel))
        cubin = compiled(launch.file, together, self._architecture, self._sources)[launch.kernel]
        if extents := int(launch.arguments["extents"][0]):
            self.memory.add_range(extents, 8 * int(launch.arguments["coding"]["blocks"][0]))
        if launch.kernel == "sum_bits":
            self.memory.add_range(int(launch.arguments["output"]["address"][0]), 8 * THREADS * launch.grid[0])
        program = read(cubin.section)
        machine = Machine(
            program,
            launch,
            self._architecture,
            self.memory,
            shared=cubin.shared,
            more=cubin.constants,
        ).run()
        names = tuple(instruction.name for instruction in program.instructions)
        reached = frozenset(machine.lanes.accessed)
        self.ran[launch.kernel] = Executed(cubin, names, machine.issued, reached, 1)


@dataclass(frozen=True, slots=True)
class Case:
    """The call that launches a kernel in blocks of :data:`BLOCK`, from :data:`ADDED` sources if it sums.

    Codes of 4 bits are clipped if they are rounded to nearest, as those of ZeRO++'s gradients.
    """

    operation: str  # encode, decode, decode_sum, decode_sum_encode or sums_of_bits
    codecs: tuple[Codec, ...]
    dtype: torch.dtype  # of elements; sums are in fp32

    @staticmethod
    def of(kernel: str) -> Case:
        """The call that launches ``kernel``, one of those that :data:`PLAIN` matches."""
        dtypes = {name: dtype for dtype, name in TYPES.items()}
        if coded := FORMAT.fullmatch(kernel):
            dtype = dtypes[coded[3]]
            sums = coded[1] == "decode" and dtype == torch.float32
            codec = next(parse(text) for text, name in FORMATS.items() if name.endswith(f":{coded[2]}"))
            return Case("decode_sum" if sums else coded[1], (codec,), dtype)
        name, *values = re.findall(r"\w+", kernel)
        if name == "sum_bits":
            return Case("sums_of_bits", (), torch.float32)
        if name in ("copy_raw", "sum_raw"):
            codecs = tuple(parse(NAMES[dtypes[kind]]) for kind in values if kind in dtypes)
            return (
                Case("encode", codecs, dtypes[values[0]])
                if name == "copy_raw"
                else Case("decode_sum_encode", codecs, torch.float32)
            )
        if name == "decode_sum_encode":
            return Case(name, (_codec(values[0]), _codec(values[2], values[3])), torch.float32)
        if name == "decode_sum":
            return Case(name, (_codec(values[0]),), torch.float32)
        return Case(name.removesuffix("_held"), (_codec(*values[1:]),), dtypes[values[0]])

    @property
    def moved(self) -> float:
        """Bytes of eight elements that are read and written once."""
        coded = [OCTET * codec.frame_bytes(_LONG) / _LONG for codec in self.codecs]
        elements = float(OCTET * self.dtype.itemsize)
        if self.operation == "sums_of_bits":
            return elements + torch.int64.itemsize / SUMMED
        if self.operation == "decode_sum_encode":
            return ADDED * coded[0] + coded[1]
        return elements + (ADDED if self.operation == "decode_sum" else 1) * coded[0]

    def run(self, kernels: Kernels, memory: Memory, numel: int, seed: int) -> None:
        """Call ``kernels`` on random elements.

        Raises AssertionError: if the result differs from the reference's in a bit.
        """
        random = torch.Generator().manual_seed(seed)
        if self.operation == "sums_of_bits":
            values = torch.randn(numel, generator=random)
            memory.add(values)
            assert torch.equal(kernels.sums_of_bits(values), summed(values)), "sums of bits differ"
            return
        first = self.codecs[0]
        noise = _NOISE if self.codecs[-1].stochastic else None
        sizes = torch.arange(1, ADDED + 1)[:, None] if "sum" in self.operation else torch.ones(1, 1)
        x = (torch.randn(len(sizes), numel, generator=random) * sizes * 3e-3).to(self.dtype)
        frames = torch.zeros(len(x), first.frame_bytes(numel), dtype=torch.uint8)
        for row, frame in zip(x, frames, strict=True):
            REFERENCE.encode(first, row, frame, noise=_NOISE if first.stochastic else None)
        if self.operation == "encode":
            wanted, got = frames[0], torch.full_like(frames[0], 77)
            memory.add(x, got)
            kernels.encode(first, x[0], got, noise=noise)
        elif self.operation == "decode_sum_encode":
            wanted = torch.zeros(self.codecs[1].frame_bytes(numel), dtype=torch.uint8)
            got = torch.full_like(wanted, 77)
            memory.add(frames, got)
            second = self.codecs[1]
            REFERENCE.decode_sum_encode(first, second, frames, wanted, numel, noise=noise)
            kernels.decode_sum_encode(first, second, frames, got, numel, noise=noise)
        else:
            wanted, got = torch.zeros(numel, dtype=self.dtype), torch.ones(numel, dtype=self.dtype)
            memory.add(frames, got)
            sums = self.operation == "decode_sum"
            for backend, out in ((REFERENCE, wanted), (kernels, got)):
                backend.decode_sum(first, frames, out) if sums else backend.decode(first, frames[0], out)
        assert torch.equal(got, wanted), f"{self}: {int((got != wanted).sum())} differ from the reference"


def _codec(bits: str, stochastic: str = "false") -> Codec:
    return parse(
        f"int{bits}:{BLOCK}" + (":stochastic" if stochastic == "true" else ":clip" if bits == "4" else "")
    )


@functools.cache
def executed(
    kernel: str,
    architecture: int,
    numel: int = ELEMENTS,
    *,
    spread: int = SPREAD,
    seed: int = 0,
    sources: Path = SOURCES,
) -> Executed:
    """Run ``kernel`` on a row of ``numel`` elements, with at most ``spread`` thread blocks before they loop.

    Raises AssertionError: if a result differs from the reference.  Raises RuntimeError: as :meth:`Machine.run`.
    """
    interpreter = Interpreter(architecture, sources)
    Case.of(kernel).run(Kernels(interpreter, spread), interpreter.memory, numel, seed)
    run = interpreter.ran[kernel]
    return Executed(run.cubin, run.names, run.issued, run.reached, numel)


# ---- shares of a copy's rate -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Device:
    """Rates of a GPU."""

    architecture: int
    multiprocessors: int  # of four quarters, each of which issues an instruction of a warp a cycle
    hertz: float  # of its clock under load
    copied: float  # bytes that a copy within its memory reads and writes
    # of a quarter for an instruction, by pipe (CUDA C++ Programming Guide, "Throughput of Native Arithmetic
    # Instructions")
    cycles: dict[str, float]


_CYCLES: Final = {
    "issue": 1.0, "FMA": 1.0, "IMAD": 2.0, "ALU": 2.0, "FP64": 2.0, "XU": 8.0, "LSU": 4.0, "uniform": 2.0,
}  # fmt: skip
DEVICES: Final = {  # with SXM: peak bandwidths are 2.0, 3.35 and 4.8 TB/s, of which a copy reaches 0.88 to 0.9
    "A100": Device(80, 108, 1.41e9, 1.75e12, _CYCLES | {"FMA": 2.0, "FP64": 4.0}),
    "H100": Device(90, 132, 1.755e9, 3.0e12, _CYCLES),
    "H200": Device(90, 132, 1.755e9, 4.3e12, _CYCLES),
}
BUSY: Final = 0.86  # share of cycles in which the busiest pipe has an instruction ready
PIPES: Final = {  # by an instruction's first name; others with U or R2UR are uniform, all else is ALU
    **dict.fromkeys(("FADD", "FMUL", "FFMA"), "FMA"),
    **dict.fromkeys(("IMAD", "HFMA2", "HADD2", "HMUL2"), "IMAD"),
    **dict.fromkeys(("DADD", "DMUL", "DFMA"), "FP64"),
    **dict.fromkeys(("MUFU", "I2F", "F2I", "F2F", "POPC", "FLO", "REDUX", "I2FP"), "XU"),
    **dict.fromkeys(("LDG", "STG", "LDS", "STS", "LDC", "SHFL", "S2R"), "LSU"),
    **dict.fromkeys(("BRA", "EXIT", "BSSY", "BSYNC", "BAR", "WARPSYNC", "NOP", "CALL", "RET"), "control"),
}


@dataclass(frozen=True, slots=True)
class Work:
    """What a kernel does for eight elements of each lane of a warp."""

    instructions: dict[str, float]  # by pipe; ``issue`` are all
    moved: float  # bytes of a lane that are read and written once

    def share(self, device: Device) -> tuple[float, str]:
        """At most this share of a copy's bytes per second, and its limit: memory, or a :data:`BUSY` pipe."""
        memory = 4 * WARP * self.moved / device.copied * device.multiprocessors * device.hertz
        issued = self.instructions
        cycles = {pipe: issued[pipe] * cost for pipe, cost in device.cycles.items()}
        cycles["FMA"] += issued["IMAD"] * device.cycles["FMA"]  # on halves of the same pipe
        pipe = max(cycles, key=cycles.__getitem__)
        share = memory * BUSY / cycles[pipe]
        return (1.0, "memory") if share >= 1.0 else (share, pipe)


def plain() -> Iterator[str]:
    """Yield every kernel that is compiled for a codec and a type."""
    yield from (kernel for kernels in VARIANTS.values() for kernel in kernels if PLAIN.fullmatch(kernel))


def work(run: Executed) -> Work:
    """The work of a kernel that was executed."""
    issued = dict.fromkeys(_CYCLES | {"control": 0.0}, 0.0)
    for name, count in run.of_an_octet().items():
        other = "uniform" if name.startswith(("U", "R2UR", "S2UR")) else "ALU"
        for pipe in ("issue", PIPES.get(name, other)):
            issued[pipe] += count
    return Work(issued, Case.of(run.cubin.kernel).moved)


@functools.cache
def works(architecture: int) -> dict[str, Work]:
    """The work of all plain kernels, each of which is executed."""
    return {kernel: work(executed(kernel, architecture)) for kernel in plain()}
