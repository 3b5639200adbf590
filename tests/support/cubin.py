"""The resources and the accesses of compiled kernels, read from their cubins without a GPU.

NVRTC compiles, and reports ptxas's counts of registers, shared and local memory.  ``nvdisasm`` (package
``nvidia-cuda-nvdisasm``) lists the instructions; line information, which changes none of them, gives the function of
each access of global memory, which must be in :data:`PURPOSES`.

An access of *elements* goes through ``load_octet`` and ``store_octet``, which leave the end of a row, strided
rows and rows that begin off 16 bytes to ``load_singly`` and ``store_singly``, element by element.  Which
instructions are executed for a whole, aligned row, :mod:`tests.support.sass.executed` finds by executing them.
"""

from __future__ import annotations

import bisect
import functools
import importlib.metadata
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from impl.codecs.codec import FORMATS
from impl.cuda.kernels import AHEAD, AHEAD_FUSED, AHEAD_RAW, TYPES
from impl.cuda.launch import SOURCES, compile_kernels
from tests.support.sass.program import INSTRUCTION

_ANY: Final = ("Scheme<0>", "Floats<0>")
_ROUNDINGS: Final = ("false", "true")  # nearest, stochastic
VARIANTS: Final[dict[str, tuple[str, ...]]] = {  # every kernel that can be launched
    "quantize.cu": (
        *(f"encode_held<{t}, {s}, {r}>" for t in TYPES.values() for s in AHEAD for r in _ROUNDINGS),
        *(f"encode_general<{s}, {octets}>" for s in _ANY for octets in (1, 2)),
        *(f"encode_{version}<{s}>" for version in ("staged", "extents", "given") for s in _ANY),
    ),
    "dequantize.cu": (
        *(f"decode<{t}, {s}>" for t in TYPES.values() for s in AHEAD),
        *(f"decode_sum<{s}, {ahead}>" for s, ahead in AHEAD.items()),
        *(f"{kernel}_general<{s}>" for kernel in ("decode", "decode_sum") for s in _ANY),
    ),
    "reduce.cu": (
        *(
            f"decode_sum_encode<{f}, {ahead}, {s}, {r}>"
            for f, ahead in AHEAD_FUSED.items()
            for s in AHEAD
            for r in _ROUNDINGS
        ),
        *(f"decode_sum_encode_general<{f}, {s}>" for f in _ANY for s in _ANY),
    ),
    "raw.cu": (
        *(f"copy_raw<{t}>" for t in ("Fp32", "Bf16")),
        *(f"sum_raw<{t}, {to}, {ahead}>" for t, ahead in AHEAD_RAW.items() for to in TYPES.values()),
        "sum_bits",
    ),
    "formats.cu": tuple(
        f"{operation}_format<{name.partition(':')[2]}, {kind}>"
        for name in FORMATS.values()
        for operation in ("encode", "decode")
        for kind in TYPES.values()
    ),
}

WARP: Final = 32
FORMAT: Final = re.compile(r"(encode|decode)_format<(\w+), (\w+)>")
# Kernels compiled for a codec and a type.
PLAIN: Final = re.compile(
    rf"(encode_held|decode|decode_sum|decode_sum_encode|copy_raw|sum_raw)<.*|sum_bits|{FORMAT.pattern}"
)
PURPOSES: Final = {  # functions whose lines access global memory
    **dict.fromkeys(("load_octet", "store_octet", "store_held"), "elements"),
    **dict.fromkeys(("load_singly", "store_singly"), "elements, one by one"),
    **dict.fromkeys(("load_codes", "store_codes"), "codes"),
    **dict.fromkeys(("load_float", "store_float", "load_scale", "store_scale"), "scales"),
    **dict.fromkeys(("load_beside", "store_beside"), "scales"),
    "store_padding": "padding",
    "sum_bits": "sums",
    **dict.fromkeys(("encode_extents", "encode_given", "row_extent"), "extents"),
}


# Limits of a multiprocessor of sm_90 (CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability"): warps, thread blocks, registers, bytes of shared memory with the largest carve-out.
WARPS, THREAD_BLOCKS, REGISTERS, SHARED = 64, 32, 65_536, 228 << 10


@dataclass(frozen=True, slots=True)
class Access:
    """An instruction that accesses global memory."""

    number: int  # of the instruction in its section
    name: str  # as ``LDG.E.128``
    width: int  # bytes a thread
    purpose: str  # one of :data:`PURPOSES`

    @property
    def loads(self) -> bool:
        return self.name.startswith("LD")


@dataclass(frozen=True)
class Cubin:
    """The resources of one kernel of :data:`VARIANTS` on one architecture."""

    kernel: str  # as C++ writes it
    registers: int  # of a thread
    shared: int  # bytes of shared memory of a thread block; the kernels have no dynamic ones
    local: int  # bytes of local memory of a thread: the stack, with spilled registers
    lowered: str  # the kernel's name in the image
    image: bytes  # of all kernels that were compiled together
    sources: Path  # where its files are

    @functools.cached_property
    def accesses(self) -> tuple[Access, ...]:
        """The instructions that access global memory, in order; RuntimeError if a function is not listed."""
        return tuple(_accesses(self.section, self.sources))

    @property
    def section(self) -> str:
        """Its instructions, as ``nvdisasm`` lists them."""
        return _sections(self.image)[self.lowered]

    @property
    def constants(self) -> bytes:
        """Constants that ptxas put aside, in bank 2 of the kernel's constants."""
        (table,) = struct.unpack_from("<Q", self.image, 0x28)  # of the sections of a 64-bit ELF file
        size, count, names = struct.unpack_from("<3H", self.image, 0x3A)
        heads = [struct.unpack_from("<2I4Q", self.image, table + i * size) for i in range(count)]
        for name, _, _, _, at, length in heads:
            start = heads[names][4] + name
            if self.image[start : self.image.index(b"\0", start)] == f".nv.constant2.{self.lowered}".encode():
                return self.image[at : at + length]
        return b""

    @property
    def threads(self) -> tuple[int, ...]:
        """The sizes of its thread blocks as :mod:`impl.cuda.kernels` launches it, ascending."""
        name, _, values = self.kernel.partition("<")
        if name == "encode_general" and values.endswith(", 2>"):
            return (512,)
        teams = name in {"encode_general", "decode_sum_encode_general"}
        return (256, 512) if teams or self.kernel.startswith("encode_held<Fp32") else (256,)

    @property
    def occupancy(self) -> tuple[float, str]:
        """The least share of sm_90's warps held, and its limit, as by CUDA's ``cuda_occupancy.h``."""
        quarter = REGISTERS // 4 // _up(self.registers * WARP, 256)  # warps of it, with registers of its own
        limits = []
        for warps in (threads // WARP for threads in self.threads):
            blocks = {
                "registers": quarter * 4 // _up(warps, 4),
                "shared memory": SHARED // _up(self.shared + 1024, 128),  # CUDA adds 1 KiB a block
                "warps": WARPS // warps,
                "blocks": THREAD_BLOCKS,
            }
            limits += [(count * warps / WARPS, resource) for resource, count in blocks.items()]
        return min(limits, key=lambda limit: limit[0])


@functools.cache
def compiled(
    file: str, kernels: tuple[str, ...], architecture: int, sources: Path = SOURCES
) -> dict[str, Cubin]:
    """Kernels of one file of ``sources``, as C++ writes them, compiled together."""
    options = ["--ptxas-options=-v", "--generate-line-info"]
    compilation = compile_kernels(file, kernels, architecture, sources, options=options)
    cubins = {}
    for kernel in kernels:
        lowered = compilation.lowered[kernel]
        counted = (
            rf"properties for {re.escape(lowered)}\n.*? (\d+) bytes stack.*?Used (\d+) registers([^\n]*)"
        )
        if (facts := re.search(counted, compilation.log, re.DOTALL)) is None:
            raise RuntimeError(f"{kernel}: ptxas counted nothing in {compilation.log}")
        shared = re.search(r"(\d+) bytes smem", facts[3])
        resources = int(facts[2]), int(shared[1]) if shared else 0, int(facts[1])
        cubins[kernel] = Cubin(kernel, *resources, lowered, compilation.image, sources)
    return cubins


def missing() -> str | None:
    """What :func:`compiled` and :attr:`Cubin.accesses` lack here; None if nothing."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError) as problem:
        return f"no CuPy with NVRTC: {problem}"
    return None if _disassembler() else "no nvdisasm: pip install nvidia-cuda-nvdisasm"


def _up(value: int, granule: int) -> int:
    return -(-value // granule) * granule


def _disassembler() -> str | None:
    """The path of ``nvdisasm``, from its package, else from PATH."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    return next((str(file.locate()) for file in files if file.name == "nvdisasm"), shutil.which("nvdisasm"))


@functools.lru_cache(16)
def _sections(image: bytes) -> dict[str, str]:
    """Instructions with their source lines, by the kernel's name in the image."""
    if (program := _disassembler()) is None:
        raise FileNotFoundError(missing())
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        command = [program, "-c", "-gi", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parts = re.split(r"^//-+ \.text\.(\S+) -+$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


_LINE: Final = re.compile(r'//## File "([^"]*)", line (\d+)( inlined at)?')
_HELD: Final = {"set", "word", "quad", "set_quad"}  # of struct Held; their callers count
_GLOBAL: Final = re.compile(r"(LDG|STG|LD|ST|RED|REDG|ATOMG|ATOM)\b")  # LD, ST: generic


def _accesses(section: str, sources: Path) -> Iterator[Access]:
    chain: list[tuple[str, int]] = []  # source lines: the innermost, then where each was inlined
    inlined, number = False, 0
    for text in section.splitlines():
        if line := _LINE.search(text):
            chain = [*(chain if inlined else ()), (Path(line[1]).name, int(line[2]))]
            inlined = line[3] is not None
        elif instruction := INSTRUCTION.search(text):
            if _GLOBAL.match(instruction[3]):
                yield _access(number, instruction[3], chain, sources)
            number += 1


def _access(number: int, name: str, chain: list[tuple[str, int]], sources: Path) -> Access:
    functions = (_function(sources / file, line) for file, line in chain)
    function = next((f for f in functions if f not in _HELD), "no function")
    if function not in PURPOSES:
        raise RuntimeError(f"{chain[0]}: {name} in {function}, which is not known to reach global memory")
    sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1, "16": 2, "8": 1}
    width = next((sizes[part] for part in name.split(".") if part in sizes), 4)
    return Access(number, name, width, PURPOSES[function])


@functools.cache
def _functions(path: Path) -> list[tuple[int, str]]:
    heads = (
        (i, re.search(r"(?:__forceinline__|__global__).*?\b(\w+)\((?!\d)", text))
        for i, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    )
    return [(line, head[1]) for line, head in heads if head]


def _function(path: Path, line: int) -> str:
    functions = _functions(path)
    return functions[bisect.bisect(functions, line, key=lambda head: head[0]) - 1][1]
