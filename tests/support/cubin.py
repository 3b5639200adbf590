"""The resources and instructions of compiled kernels, read from their cubins without a GPU.

NVRTC compiles, and reports ptxas's counts of registers, shared and local memory.  ``nvdisasm`` (package
``nvidia-cuda-nvdisasm``) lists the instructions that load or store global memory; line information, which
changes no instruction, gives the function of each, which must be in :data:`PURPOSES`.

An access of *elements* goes through ``load_octet`` and ``store_octet``, which leave the end of a row, strided
rows and rows that begin off 16 bytes to ``load_singly`` and ``store_singly``, element by element.
The *main path* of a plain kernel serves thread blocks whose octets are all whole and aligned: ``whole`` of
``teams.cuh``.  Compiled again with traps for all rare cases, it shows its loads and stores, and the
instructions of a turn: :func:`works`.  General kernels have no main path: they check each octet.
"""

from __future__ import annotations

import bisect
import functools
import importlib.metadata
import itertools
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from impl.codecs.codec import FORMATS, parse
from impl.codecs.rounding_noise import OCTET
from impl.cuda.kernels import AHEAD, AHEAD_FUSED, TYPES
from impl.cuda.launch import SOURCES, compile_kernels

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
    "formats.cu": tuple(
        f"{operation}_format<{name.partition(':')[2]}, {kind}>"
        for name in FORMATS.values()
        for operation in ("encode", "decode")
        for kind in TYPES.values()
    ),
}

WARP: Final = 32
FORMAT: Final = re.compile(r"(encode|decode)_format<(\w+), (\w+)>")
# Kernels with a main path.
PLAIN: Final = re.compile(rf"(encode_held|decode|decode_sum|decode_sum_encode)<.*|{FORMAT.pattern}")
PURPOSES: Final = {  # functions whose lines access global memory
    **dict.fromkeys(("load_octet", "store_octet"), "elements"),
    **dict.fromkeys(("load_singly", "store_singly"), "elements, one by one"),
    **dict.fromkeys(("load_codes", "store_codes"), "codes"),
    **dict.fromkeys(("load_float", "store_float", "load_scale", "store_scale"), "scales"),
    **dict.fromkeys(("load_beside", "store_beside"), "scales"),
    "store_padding": "padding",
    **dict.fromkeys(("encode_extents", "encode_given", "row_extent"), "extents"),
}


# Limits of a multiprocessor of sm_90 (CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability"): warps, thread blocks, registers, bytes of shared memory with the largest carve-out.
WARPS, THREAD_BLOCKS, REGISTERS, SHARED = 64, 32, 65_536, 228 << 10


@dataclass(frozen=True, slots=True)
class Device:
    """Rates of the fastest GPU of an architecture."""

    multiprocessors: int  # of four quarters, each of which issues an instruction of a warp a cycle
    hertz: float  # of its clock under load
    copied: float  # bytes that a copy within its memory reads and writes
    # of a quarter for an instruction, by pipe (CUDA C++ Programming Guide, "Throughput of Native Arithmetic
    # Instructions")
    cycles: dict[str, float]


_CYCLES: Final = {
    "issue": 1.0, "FMA": 1.0, "IMAD": 2.0, "ALU": 2.0, "FP64": 2.0, "XU": 8.0, "LSU": 4.0, "uniform": 2.0,
}  # fmt: skip
DEVICES: Final = {  # A100, H100 and B200 with SXM: peak bandwidths are 2.0, 3.35 and 8 TB/s
    80: Device(108, 1.41e9, 1.75e12, _CYCLES | {"FMA": 2.0, "FP64": 4.0}),
    90: Device(132, 1.755e9, 3.0e12, _CYCLES),
    100: Device(148, 1.85e9, 7.0e12, _CYCLES),
}
BUSY: Final = 0.86  # share of cycles in which the busiest pipe has an instruction ready
BLOCK: Final = 256  # elements
ADDED: Final = 8  # sources
_LONG: Final = 1 << 24  # elements of a row
PIPES: Final = {  # by an instruction's first name; others with U or R2UR are uniform, all else is ALU
    **dict.fromkeys(("FADD", "FMUL", "FFMA"), "FMA"),
    **dict.fromkeys(("IMAD", "HFMA2", "HADD2", "HMUL2"), "IMAD"),
    **dict.fromkeys(("DADD", "DMUL", "DFMA"), "FP64"),
    **dict.fromkeys(("MUFU", "I2F", "F2I", "F2F", "POPC", "FLO", "REDUX", "I2FP"), "XU"),
    **dict.fromkeys(("LDG", "STG", "LDS", "STS", "LDC", "SHFL", "S2R"), "LSU"),
    **dict.fromkeys(("BRA", "EXIT", "BSSY", "BSYNC", "BAR", "WARPSYNC", "NOP"), "control"),
}


@dataclass(frozen=True, slots=True)
class Access:
    """An instruction that accesses global memory."""

    name: str  # of the instruction, as ``LDG.E.128``
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
        return tuple(_accesses(_sections(self.image)[self.lowered], self.sources))

    @functools.cached_property
    def turns(self) -> tuple[Counter[str], Counter[str]]:
        """Main-path instructions of a turn, and of a turn over sources, by name, without rare blocks."""
        names, jumps, targets = _instructions(_sections(self.image)[self.lowered])
        loops = sorted((to, at) for at, to in jumps.items() if to < at)
        ends = [-1, *(i for i, name in enumerate(names) if name in _ENDS or i + 1 in targets)]
        blocks = [range(a + 1, b + 1) for a, b in itertools.pairwise(ends)]
        slow = {i for block in blocks if names[block[-1]].startswith(("CALL", "BPT")) for i in block}
        counted = [Counter(names[i] for i in range(a, b + 1) if i not in slow) for a, b in loops]
        return counted[0] - sum(counted[1:], Counter()), sum(counted[1:], Counter())

    @property
    def threads(self) -> tuple[int, ...]:
        """The sizes of its thread blocks as :mod:`impl.cuda.kernels` launches it, ascending."""
        name, _, values = self.kernel.partition("<")
        if name == "encode_general" and values.endswith(", 2>"):
            return (512,)
        teams = name in {"encode_general", "decode_sum_encode", "decode_sum_encode_general"}
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
    file: str, kernels: tuple[str, ...], architecture: int, sources: Path = SOURCES, *, main: bool = False
) -> dict[str, Cubin]:
    """Kernels of one file of ``sources``, as C++ writes them, compiled together, or their main paths."""
    options = ["--ptxas-options=-v", "--generate-line-info", *(["-DMAIN_PATH"] if main else [])]
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


@functools.lru_cache(4)
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


_ENDS: Final = {"BRA", "EXIT", "CALL", "BPT", "RET"}  # of a basic block


def _instructions(section: str) -> tuple[list[str], dict[int, int], set[int]]:
    """First names of all instructions; targets by the numbers of branches; all targets."""
    names: list[str] = []
    labels, branches, always = dict[str, int](), dict[int, str](), dict[int, str]()
    for text in section.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", text):
            labels[label[1]] = len(names)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ )?(\w+)([\w.]*.*)", text):
            to = re.search(r"\.L_x_\d+", instruction[3])  # functions have other names
            if instruction[2] == "BRA" and to and (instruction[1] or "UP" in instruction[3]):
                branches[len(names)] = to[0]
            elif instruction[2] == "BRA" and to:
                always[len(names)] = to[0]
            names.append("BRA" if instruction[2] == "CALL" and to else instruction[2])
    last = max(at for at, name in enumerate(names) if name == "EXIT")  # code after it jumps back
    branches |= {at: to for at, to in always.items() if at < last}
    return names, {at: labels[to] for at, to in branches.items()}, set(labels.values())


_LINE: Final = re.compile(r'//## File "([^"]*)", line (\d+)( inlined at)?')
_HELD: Final = {"set", "word", "quad", "set_quad"}  # of struct Held; their callers count
_GLOBAL: Final = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?((?:LDG|STG|LD|ST|RED|REDG|ATOMG|ATOM)\b[\w.]*)"  # LD, ST: generic
)


def _accesses(section: str, sources: Path) -> Iterator[Access]:
    chain: list[tuple[str, int]] = []  # source lines: the innermost, then where each was inlined
    inlined = False
    for text in section.splitlines():
        if line := _LINE.search(text):
            chain = [*(chain if inlined else ()), (Path(line[1]).name, int(line[2]))]
            inlined = line[3] is not None
        elif instruction := _GLOBAL.search(text):
            yield _access(instruction[1], chain, sources)


def _access(name: str, chain: list[tuple[str, int]], sources: Path) -> Access:
    functions = (_function(sources / file, line) for file, line in chain)
    function = next((f for f in functions if f not in _HELD), "no function")
    if function not in PURPOSES:
        raise RuntimeError(f"{chain[0]}: {name} in {function}, which is not known to reach global memory")
    sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1, "16": 2, "8": 1}
    width = next((sizes[part] for part in name.split(".") if part in sizes), 4)
    return Access(name, width, PURPOSES[function])


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


@dataclass(frozen=True, slots=True)
class Work:
    """A plain kernel's main path for eight elements, in blocks of 256, of 8 sources if it sums."""

    instructions: dict[str, float]  # of a warp, by pipe; ``issue`` are all
    moved: float  # bytes that are read and written once

    def share(self, device: Device) -> tuple[float, str]:
        """At most this share of a copy's bytes per second, and its limit: memory, or a :data:`BUSY` pipe."""
        memory = 4 * WARP * self.moved / device.copied * device.multiprocessors * device.hertz
        issued = self.instructions
        cycles = {pipe: issued[pipe] * cost for pipe, cost in device.cycles.items()}
        cycles["FMA"] += issued["IMAD"] * device.cycles["FMA"]  # on halves of the same pipe
        pipe = max(cycles, key=cycles.__getitem__)
        share = memory * BUSY / cycles[pipe]
        return (1.0, "memory") if share >= 1.0 else (share, pipe)


def _work(kernel: str, main: Cubin) -> Work:
    """The work of a plain ``kernel`` with the main path ``main``."""
    name, _, values = kernel.removesuffix(">").partition("<")
    parameters = values.split(", ")
    loads = name == "decode"
    octets = sum(access.purpose == "codes" and access.loads is loads for access in main.accesses) or 1
    turns, moved, coded = 0.0, 0.0, FORMAT.fullmatch(kernel)
    if coded:
        octets, elements = 1, (4 if coded[3] == "Fp32" else 2) * OCTET
        turns = ADDED if coded[1] == "decode" and coded[3] == "Fp32" else 1.0
        moved = elements + turns * OCTET * parse(coded[2].lower()).frame_bytes(_LONG) / _LONG
    elif name.startswith("decode_sum"):
        turns, moved = ADDED / int(parameters[1]), ADDED * _coded(parameters[0])
        moved += _coded(parameters[2]) if name == "decode_sum_encode" else 4 * OCTET
    else:
        moved = (4 if parameters[0] == "Fp32" else 2) * OCTET + _coded(parameters[1])
    issued = dict.fromkeys(_CYCLES | {"control": 0.0}, 0.0)
    for counted, times in zip(main.turns, (1.0, turns), strict=True):
        for instruction, count in counted.items():
            other = "uniform" if instruction.startswith(("U", "R2UR", "S2UR")) else "ALU"
            for pipe in ("issue", PIPES.get(instruction, other)):
                issued[pipe] += count * times / octets
    return Work(issued, moved)


def _coded(bits: str) -> float:
    """Bytes of eight codes and their share of a scale."""
    return int(bits) + OCTET * 4 / BLOCK


def main_paths(file: str, architecture: int) -> dict[str, Cubin]:
    """The main paths of a file's plain kernels."""
    plain = tuple(kernel for kernel in VARIANTS[file] if PLAIN.fullmatch(kernel))
    return compiled(file, plain, architecture, main=True)


@functools.cache
def works(architecture: int) -> dict[str, Work]:
    paths = [path for file in VARIANTS for path in main_paths(file, architecture).items()]
    return {kernel: _work(kernel, main) for kernel, main in paths}
