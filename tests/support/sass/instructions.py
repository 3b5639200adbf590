"""What the instructions of sm_80 and sm_90 that this project's kernels have compute, for many lanes at once.

NVIDIA documents their names only ("CUDA Binary Utilities", "Instruction Set Reference"); what they do is known from the
PTX that they are compiled from.  Three things are not NVIDIA's: a NaN has NumPy's bits; MUFU gives the nearest number,
off by one unit in the last place in two of three lanes, which is the error that the PTX manual allows; and FCHK, which
sends a division to its slow path, does so for all operands whose quotient, or a step on the way, may leave the range of
normal numbers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tests.support.sass.memory import Memory
from tests.support.sass.program import Instruction

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint32]
    Doubles = NDArray[np.uint64]
    Reals = NDArray[np.float32]
    Lot = NDArray[np.bool_]

_LOW: Final = np.uint64(0xFFFFFFFF)
_UP: Final = np.uint64(32)
_REGISTER: Final = re.compile(r"(U?)R(\d+|Z)$")
_PREDICATE: Final = re.compile(r"!?U?P[\dT]$")
_CONSTANT: Final = re.compile(r"c\[0x([02])\]\[(0x[0-9a-f]+|RZ|URZ)\]$")


@functools.cache
def _taken_apart(text: str) -> tuple[str, bool, bool, bool]:
    """An operand without its signs, and whether it is negative, inverted and a magnitude."""
    inverted, text = text.startswith("~"), text.removeprefix("~")
    number = re.match(r"[-+]?(\d|INF|QNAN)", text) is not None
    negative = text.startswith("-") and not number
    text = text if number else text.removeprefix("-")
    return text.strip("|"), negative, inverted, text.startswith("|")


class Lanes:
    """Registers, predicates, constants and memory; each value is an array with one element a lane.

    Uniform registers, which a warp has once, are kept for each lane.
    """

    def __init__(self, count: int, constants: dict[str, bytes], memory: Memory) -> None:
        self.count, self._constants = count, constants
        self._registers = {"": np.zeros((256, count), np.uint32), "U": np.zeros((64, count), np.uint32)}
        self._predicates: dict[str, Lot] = {}
        self.memory, self.shared = memory, Memory()
        self.shared_at = np.zeros(count, np.uint64)
        zero = np.zeros(count, np.uint32)
        self.special: dict[str, Words] = dict.fromkeys(
            ("SR_TID.Y", "SR_TID.Z", "SR_CTAID.X", "SR_CTAID.Y", "SR_CTAID.Z", "SR_CgaCtaId", "SRZ"), zero
        )
        self.accessed: set[int] = set()  # numbers of instructions that reached global memory

    # ---- operands --------------------------------------------------------------------------------

    def predicate(self, text: str) -> Lot:
        """The predicate ``text``, such as ``!P0``; PT holds always."""
        name = text.lstrip("!")
        always = name in {"PT", "UPT"}
        value = (
            np.ones(self.count, bool) if always else self._predicates.get(name, np.zeros(self.count, bool))
        )
        return ~value if text.startswith("!") else value

    def _bits(self, text: str) -> Words:
        """A register or a constant."""
        if register := _REGISTER.match(text):
            return (
                np.zeros(self.count, np.uint32)
                if register[2] == "Z"
                else self._registers[register[1]][int(register[2])]
            )
        if constant := _CONSTANT.match(text):
            return np.full(self.count, self._constant(constant, 4), np.uint32)
        return np.full(self.count, int(text, 0) & 0xFFFFFFFF, np.uint32)

    def _constant(self, found: re.Match[str], size: int) -> int:
        bank, at = found[1], 0 if "RZ" in found[2] else int(found[2], 16)
        return int.from_bytes(self._constants[bank][at : at + size], "little")

    def integer(self, text: str) -> Words:
        """An operand of 32 bits."""
        text, negative, inverted, magnitude = _taken_apart(text)
        value = self._bits(text)
        if magnitude:
            value = np.abs(value.view(np.int32)).view(np.uint32)
        return ~value if inverted else np.uint32(0) - value if negative else value

    def real(self, text: str) -> Reals:
        """An operand in fp32."""
        text, negative, _, magnitude = _taken_apart(text)
        if _REGISTER.match(text) or _CONSTANT.match(text):
            bits = self._bits(text)
        else:
            number = np.nan if "QNAN" in text else float(text)
            bits = np.full(self.count, number, np.float32).view(np.uint32)
        bits = bits & np.uint32(0x7FFFFFFF) if magnitude else bits
        return (bits ^ np.uint32(0x80000000) if negative else bits).view(np.float32)

    def pair(self, text: str) -> Doubles:
        """An operand of 64 bits: two registers from an even one on, or eight bytes of constants."""
        text, negative, inverted, _ = _taken_apart(text)
        if (register := _REGISTER.match(text)) and register[2] != "Z":
            low, high = self._registers[register[1]][int(register[2]) : int(register[2]) + 2].astype(
                np.uint64
            )
            value = low | high << _UP
        elif constant := _CONSTANT.match(text):
            value = np.full(self.count, self._constant(constant, 8), np.uint64)
        else:
            value = np.full(self.count, 0 if register else int(text, 0) & (2**64 - 1), np.uint64)
        signed: Doubles = ~value if inverted else np.uint64(0) - value if negative else value
        return signed

    def double(self, text: str) -> NDArray[np.float64]:
        """An operand in fp64."""
        text, negative, _, magnitude = _taken_apart(text)
        value = self.pair(text).view(np.float64) if text[0] in "RUc" else np.full(self.count, float(text))
        value = np.abs(value) if magnitude else value
        return -value if negative else value

    def address(self, text: str) -> Doubles:
        """The sum in the last brackets of an operand: ``desc[UR4][R2.64+0x10]``."""
        total = np.zeros(self.count, np.uint64)
        for part in re.findall(r"\[([^]]*)\]", text)[-1].replace("+-", "-").replace("-", "+-").split("+"):
            name, _, kind = part.partition(".")
            if kind in {"64", ""} and name.startswith("UR") and "R" in text.replace("UR", ""):
                kind = "64" if ".64" in text else "U32"  # what is added to a register has its width
            if not name:
                continue
            if not name.lstrip("-").startswith(("R", "UR")):
                total = total + np.uint64(int(name, 0) & (2**64 - 1))
            elif kind == "64":
                total = total + self.pair(name)
            else:
                factor = np.uint64(int(kind[1:])) if kind.startswith("X") else np.uint64(1)
                total = total + self.integer(name).astype(np.uint64) * factor
        return total

    # ---- results ---------------------------------------------------------------------------------

    def put(self, text: str, value: NDArray[np.generic], active: Lot) -> None:
        """Write 32 bits, or fp32, to a register; 64 bits, or fp64, to two."""
        register = _REGISTER.match(text)
        assert register is not None, text
        if register[2] == "Z":
            return
        file, number = self._registers[register[1]], int(register[2])
        words = [value]
        if value.dtype.itemsize == 8:
            bits = value.view(np.uint64)
            words = [(bits & _LOW).astype(np.uint32), (bits >> _UP).astype(np.uint32)]
        for i, word in enumerate(words):
            np.copyto(file[number + i], word.view(np.uint32), where=active)

    def put_predicate(self, text: str, value: Lot, active: Lot) -> None:
        if text not in {"PT", "UPT"}:
            self._predicates[text] = np.where(active, value, self.predicate(text))


# ---- arithmetic ----------------------------------------------------------------------------------


def rounded(exact: NDArray[np.float64], modifiers: frozenset[str]) -> Reals:
    """Numbers rounded to odd in fp64, rounded to fp32: to nearest, or as a modifier says."""
    near = exact.astype(np.float32)
    if not modifiers & {"RM", "RP", "RZ"}:
        return near
    down = "RM" in modifiers or ("RZ" in modifiers) & (exact > 0)
    below, above = np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))
    return np.where(down, np.where(near > exact, below, near), np.where(near < exact, above, near))


def multiplied_and_added(x: Reals, y: Reals, z: Reals) -> NDArray[np.float64]:
    """Sums of products and addends, rounded to odd in fp64; rounded again to fp32 they are as if rounded once."""
    product, addend = x.astype(np.float64) * y, z.astype(np.float64)  # the product is exact
    total = product + addend
    back = total - product
    rest = (product - (total - back)) + (addend - back)  # what is lost, exactly (Knuth)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (rest != 0) & (bits & 1 == 0)
    away = (rest > 0) == (total > 0)
    return np.where(inexact, bits + np.where(away, 1, -1), bits).view(np.float64)


def _flushed(value: Reals) -> Reals:
    return np.where(np.abs(value) < np.float32(2.0**-126), np.copysign(np.float32(0), value), value)


def _unsigned(it: Instruction) -> bool:
    return "U32" in it.modifiers


def _ordered(value: Words, it: Instruction) -> NDArray[np.generic]:
    return value if _unsigned(it) else value.view(np.int32)


def _table(look_up: int, x: NDArray[Any], y: NDArray[Any], z: NDArray[Any]) -> NDArray[Any]:
    """The bitwise function of three operands whose eight results are the bits of ``look_up``."""
    total: NDArray[Any] = x ^ x
    for case in range(8):
        if look_up >> case & 1:
            total = total | (x if case & 4 else ~x) & (y if case & 2 else ~y) & (z if case & 1 else ~z)
    return total


def _compared(it: Instruction, x: NDArray[np.generic], y: NDArray[np.generic]) -> Lot:
    compare: dict[str, Callable[..., Lot]] = {
        "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal,
    }  # fmt: skip
    unordered = np.isnan(x) | np.isnan(y) if x.dtype == np.float32 else np.zeros(len(x), bool)
    for name in it.modifiers:
        if name in {"NAN", "NUM"}:
            return unordered if name == "NAN" else ~unordered
        if name in {"NE", "NEU"}:
            unequal: Lot = (x != y) & ~unordered | (unordered if name == "NEU" else False)
            return unequal
        if name.removesuffix("U") in compare:
            return compare[name.removesuffix("U")](x, y) | (unordered if name.endswith("U") else False)
    raise NotImplementedError("an unknown comparison")


def _split(operands: tuple[str, ...]) -> tuple[str, list[str], list[str]]:
    """The result, the predicates that follow it (carries), and the other operands."""
    end = 1
    while _PREDICATE.match(operands[end]):
        end += 1
    return operands[0], [*operands[1:end]], [*operands[end:]]


# ---- instructions, by name; U before a name makes it uniform --------------------------------------

Run = Callable[[Lanes, Instruction, "Lot"], None]
RUNS: dict[str, Run] = {}


def _runs(*names: str) -> Callable[[Run], Run]:
    def note(run: Run) -> Run:
        RUNS.update(dict.fromkeys(names, run))
        return run

    return note


def execute(lanes: Lanes, it: Instruction, active: Lot) -> None:
    """Let the ``active`` lanes execute an instruction that is no jump and no barrier.

    Raises NotImplementedError: if it is not known.  Raises IndexError: as :class:`Memory` does.
    """
    if it.name not in RUNS:
        raise NotImplementedError("an unknown instruction")
    with np.errstate(all="ignore"):
        RUNS[it.name](lanes, it, active)


@_runs("NOP", "WARPSYNC", "YIELD")
def _nothing(lanes: Lanes, it: Instruction, active: Lot) -> None:
    pass


@_runs("MOV", "UMOV", "R2UR", "S2R", "S2UR", "CS2R", "LDC", "ULDC")
def _move(lanes: Lanes, it: Instruction, active: Lot) -> None:
    to, source = it.operands[0], it.operands[-1]
    if source in lanes.special:
        value = lanes.special[source]
        lanes.put(to, value if "32" in it.modifiers or it.name != "CS2R" else value.astype(np.uint64), active)
    else:
        lanes.put(to, lanes.pair(source) if "64" in it.modifiers else lanes.integer(source), active)


@_runs("IADD3", "UIADD3", "VIADD")
def _add(lanes: Lanes, it: Instruction, active: Lot) -> None:
    to, carries, operands = _split(it.operands)
    total = np.zeros(lanes.count, np.uint64)
    for operand in operands[: 2 if it.name == "VIADD" else 3]:
        value = lanes.integer(operand).astype(np.uint64)
        if _taken_apart(operand)[1]:  # 2^32 - x, so that -0 has a carry
            value = np.where(value == 0, np.uint64(1) << _UP, value)
        total = total + value
    if "X" in it.modifiers:
        for carry in operands[3:]:
            total = total + lanes.predicate(carry)
    lanes.put(to, (total & _LOW).astype(np.uint32), active)
    for i, carry in enumerate(carries):
        lanes.put_predicate(carry, total >> _UP > i, active)


@_runs("IMAD", "UIMAD")
def _multiply(lanes: Lanes, it: Instruction, active: Lot) -> None:
    to, carries, (first, second, third, *carried) = _split(it.operands)
    if not it.modifiers & {"WIDE", "HI"}:
        total = lanes.integer(first) * lanes.integer(second) + lanes.integer(third)
        if "X" in it.modifiers:
            total = total + lanes.predicate(carried[0])
        return lanes.put(to, total.astype(np.uint32), active)
    x, y = (lanes.integer(operand) for operand in (first, second))
    if _unsigned(it):
        product = x.astype(np.uint64) * y
    else:
        product = (x.view(np.int32).astype(np.int64) * y.view(np.int32)).view(np.uint64)
    wide = product + lanes.pair(third)
    lanes.put(to, (wide >> _UP).astype(np.uint32) if "HI" in it.modifiers else wide, active)
    for carry in carries:
        lanes.put_predicate(carry, wide < product, active)
    return None


@_runs("LEA", "ULEA")
def _load_effective_address(lanes: Lanes, it: Instruction, active: Lot) -> None:
    to, carries, operands = _split(it.operands)
    x, y = lanes.integer(operands[0]), lanes.integer(operands[1]).astype(np.uint64)
    if "SX32" in it.modifiers:
        wide, left = x.view(np.int32).astype(np.int64).view(np.uint64), operands[2:]
    elif "HI" in it.modifiers:
        wide, left = x.astype(np.uint64) | lanes.integer(operands[2]).astype(np.uint64) << _UP, operands[3:]
    else:
        wide, left = x.astype(np.uint64), operands[2:]
    wide = wide << np.uint64(int(left[0], 0))
    total = (wide >> _UP if "HI" in it.modifiers else wide & _LOW) + y
    if "X" in it.modifiers:
        total = (total & _LOW) + lanes.predicate(left[1])
    lanes.put(to, (total & _LOW).astype(np.uint32), active)
    for carry in carries:
        lanes.put_predicate(carry, (total >> _UP) != 0, active)


@_runs("LOP3", "ULOP3")
def _logic(lanes: Lanes, it: Instruction, active: Lot) -> None:
    operands = [*it.operands]
    holds = operands.pop(0) if _PREDICATE.match(operands[0]) else "PT"
    value = _table(int(operands[4], 0), *map(lanes.integer, operands[1:4]))
    lanes.put(operands[0], value, active)
    lanes.put_predicate(holds, value != 0, active)


@_runs("PLOP3", "UPLOP3")
def _logic_of_predicates(lanes: Lanes, it: Instruction, active: Lot) -> None:
    values = [*map(lanes.predicate, it.operands[2:5])]
    for to, look_up in zip(it.operands[:2], it.operands[5:7], strict=True):
        lanes.put_predicate(to, _table(int(look_up, 0), *values), active)


@_runs("P2R")
def _predicates_to_register(lanes: Lanes, it: Instruction, active: Lot) -> None:
    mask = np.uint32(int(it.operands[3], 0))
    bits = sum(lanes.predicate(f"P{i}").astype(np.uint32) << np.uint32(i) for i in range(7))
    lanes.put(it.operands[0], bits & mask | lanes.integer(it.operands[2]) & ~mask, active)


@_runs("R2P")
def _register_to_predicates(lanes: Lanes, it: Instruction, active: Lot) -> None:
    bits, mask = lanes.integer(it.operands[1]), int(it.operands[2], 0)
    for i in range(7):
        if mask >> i & 1:
            lanes.put_predicate(f"P{i}", (bits >> np.uint32(i) & np.uint32(1)) != 0, active)


@_runs("ISETP", "UISETP", "FSETP")
def _set_predicate(lanes: Lanes, it: Instruction, active: Lot) -> None:
    x: NDArray[np.generic]
    y: NDArray[np.generic]
    if it.name == "FSETP":
        x, y = lanes.real(it.operands[2]), lanes.real(it.operands[3])
        if "FTZ" in it.modifiers:
            x, y = _flushed(x), _flushed(y)
    else:
        x, y = (_ordered(lanes.integer(operand), it) for operand in it.operands[2:4])
    holds, other = _compared(it, x, y), lanes.predicate(it.operands[4])
    if "EX" in it.modifiers:  # the upper halves decide, if they are equal the lower ones
        strict = (x != y) & ("EQ" not in it.modifiers) & holds | (x != y) & ("NE" in it.modifiers)
        holds = np.where(x == y, lanes.predicate(it.operands[5]), strict)
    both = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}
    join = next(both[name] for name in both if name in it.modifiers)
    first, second = join(holds, other), join(~holds, other)
    lanes.put_predicate(it.operands[0], first, active)
    lanes.put_predicate(it.operands[1], second, active)


@_runs("SEL", "USEL")
def _select(lanes: Lanes, it: Instruction, active: Lot) -> None:
    to, x, y, which = it.operands
    lanes.put(to, np.where(lanes.predicate(which), lanes.integer(x), lanes.integer(y)), active)


@_runs("FSEL")
def _select_real(lanes: Lanes, it: Instruction, active: Lot) -> None:
    to, x, y, which = it.operands
    lanes.put(
        to,
        np.where(lanes.predicate(which), lanes.real(x).view(np.uint32), lanes.real(y).view(np.uint32)),
        active,
    )


@_runs("SHF", "USHF")
def _shift(lanes: Lanes, it: Instruction, active: Lot) -> None:
    low, by, high = (lanes.integer(operand).astype(np.uint64) for operand in it.operands[1:4])
    wide, by = low | high << _UP, np.minimum(by, np.uint64(63))
    if "L" in it.modifiers:
        wide = (wide << by) >> _UP if "HI" in it.modifiers else wide << by
    elif "U64" in it.modifiers:
        wide = wide >> by >> (_UP if "HI" in it.modifiers else np.uint64(0))
    elif "HI" in it.modifiers:
        signed = high.astype(np.uint32).view(np.int32).astype(np.int64) >> np.minimum(
            by, np.uint64(31)
        ).astype(np.int64)
        wide = signed.view(np.uint64) if "S32" in it.modifiers else high >> by
    else:
        raise NotImplementedError("an unknown shift")
    lanes.put(it.operands[0], (wide & _LOW).astype(np.uint32), active)


@_runs("PRMT")
def _permute(lanes: Lanes, it: Instruction, active: Lot) -> None:
    to, x, selector, y = it.operands
    wide = lanes.integer(x).astype(np.uint64) | lanes.integer(y).astype(np.uint64) << _UP
    chosen, total = lanes.integer(selector).astype(np.uint64), np.zeros(lanes.count, np.uint64)
    for i in range(4):
        nibble = chosen >> np.uint64(4 * i) & np.uint64(15)
        byte = wide >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        total |= np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * i)
    lanes.put(to, total.astype(np.uint32), active)


@_runs("IMNMX", "VIMNMX", "VIMNMX3", "VIADDMNMX")
def _extreme(lanes: Lanes, it: Instruction, active: Lot) -> None:
    to, *operands, least = it.operands
    values = [*map(lanes.integer, operands)]
    if it.name == "VIADDMNMX":
        values = [values[0] + values[1], values[2]]
    ordered = [_ordered(value, it) for value in values]
    low, high = functools.reduce(np.minimum, ordered), functools.reduce(np.maximum, ordered)
    lanes.put(to, np.where(lanes.predicate(least), low, high), active)


@_runs("FADD", "FMUL", "FFMA")
def _real_arithmetic(lanes: Lanes, it: Instruction, active: Lot) -> None:
    values = [*map(lanes.real, it.operands[1:])]
    if "FTZ" in it.modifiers:
        values = [*map(_flushed, values)]
    if it.name == "FFMA":
        result = rounded(multiplied_and_added(*values), it.modifiers)
    else:
        result = values[0] + values[1] if it.name == "FADD" else values[0] * values[1]
        if it.modifiers & {"RM", "RP", "RZ"}:
            raise NotImplementedError("a directed rounding")
    lanes.put(it.operands[0], _flushed(result) if "FTZ" in it.modifiers else result, active)


@_runs("DADD", "DMUL")
def _double_arithmetic(lanes: Lanes, it: Instruction, active: Lot) -> None:
    x, y = map(lanes.double, it.operands[1:3])
    lanes.put(it.operands[0], x + y if it.name == "DADD" else x * y, active)


@_runs("FMNMX")
def _extreme_real(lanes: Lanes, it: Instruction, active: Lot) -> None:
    to, first, second, least = it.operands
    x, y = lanes.real(first), lanes.real(second)
    low, high = (np.minimum, np.maximum) if "NAN" in it.modifiers else (np.fmin, np.fmax)
    lanes.put(to, np.where(lanes.predicate(least), low(x, y), high(x, y)), active)


@_runs("MUFU")
def _approximate(lanes: Lanes, it: Instruction, active: Lot) -> None:
    x = _flushed(lanes.real(it.operands[1]))
    exact = np.float32(1) / (x if "RCP" in it.modifiers else np.sqrt(x))
    off = np.arange(lanes.count) % 3
    near = np.where(
        off == 0,
        exact,
        np.nextafter(exact, np.where(off == 1, np.float32(0), np.copysign(np.float32(np.inf), exact))),
    )
    lanes.put(it.operands[0], _flushed(np.where(np.isfinite(exact), near, exact)), active)


@_runs("FCHK")
def _check_division(lanes: Lanes, it: Instruction, active: Lot) -> None:
    x, y = (
        (lanes.real(operand).view(np.uint32) >> np.uint32(23) & np.uint32(255)).astype(int)
        for operand in it.operands[1:3]
    )
    normal = (x > 24) & (x < 255) & (y > 0) & (y < 253) & (np.abs(x - y) < 125)
    zero = (lanes.real(it.operands[1]) == 0) & (y > 0) & (y < 253)
    lanes.put_predicate(it.operands[0], ~(normal | zero), active)


@_runs("I2F", "I2FP")
def _integer_to_real(lanes: Lanes, it: Instruction, active: Lot) -> None:
    bits = lanes.integer(it.operands[1])
    if "U16" in it.modifiers:
        bits = bits & np.uint32(0xFFFF)
    exact = (bits if it.modifiers & {"U16", "U32"} else bits.view(np.int32)).astype(np.float64)
    lanes.put(it.operands[0], rounded(exact, it.modifiers), active)


@_runs("F2I")
def _real_to_integer(lanes: Lanes, it: Instruction, active: Lot) -> None:
    if not it.modifiers >= {"U32", "TRUNC"}:
        raise NotImplementedError("another conversion")
    value = np.clip(np.nan_to_num(np.trunc(lanes.real(it.operands[1]).astype(np.float64))), 0, 2**32 - 1)
    lanes.put(it.operands[0], value.astype(np.uint32), active)


@_runs("F2F")
def _widen_or_narrow(lanes: Lanes, it: Instruction, active: Lot) -> None:
    source = it.operands[1]
    if "F2F.F64.F32" in it.text:
        lanes.put(it.operands[0], lanes.real(source).astype(np.float64), active)
    else:
        lanes.put(it.operands[0], lanes.double(source).astype(np.float32), active)


@_runs("F2FP")
def _narrow_two(lanes: Lanes, it: Instruction, active: Lot) -> None:
    halves = []
    for operand in it.operands[1:3]:
        value = lanes.real(operand)
        bits = value.view(np.uint32)
        if "BF16" in it.modifiers:
            half = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        else:
            half = value.astype(np.float16).view(np.uint16).astype(np.uint32)
        halves.append(np.where(np.isnan(value), np.uint32(0x7FFF), half))
    lanes.put(it.operands[0], halves[0] << np.uint32(16) | halves[1], active)


@_runs("HFMA2")
def _two_constants(lanes: Lanes, it: Instruction, active: Lot) -> None:
    if [operand.strip("-") for operand in it.operands[1:3]] != ["RZ", "RZ"]:
        raise NotImplementedError("arithmetic in fp16")
    high, low = (int(np.float16(float(operand)).view(np.uint16)) for operand in it.operands[3:5])
    lanes.put(it.operands[0], np.full(lanes.count, high << 16 | low, np.uint32), active)


@_runs("SHFL")
def _shuffle(lanes: Lanes, it: Instruction, active: Lot) -> None:
    if "BFLY" not in it.modifiers:
        raise NotImplementedError("another shuffle")
    to, source, apart = it.operands[1:4]
    other = np.arange(lanes.count) ^ lanes.integer(apart).astype(np.int64)
    if not active[other[active]].all():
        raise NotImplementedError("a shuffle with a lane that is elsewhere")
    lanes.put(to, lanes.integer(source)[other], active)
    lanes.put_predicate(it.operands[0], np.ones(lanes.count, bool), active)


@_runs("REDUX")
def _reduce(lanes: Lanes, it: Instruction, active: Lot) -> None:
    if "MAX" not in it.modifiers or "S32" in it.modifiers:
        raise NotImplementedError("another reduction")
    masked = np.where(active, lanes.integer(it.operands[1]), np.uint32(0)).reshape(-1, 32)
    lanes.put(it.operands[0], masked.max(axis=1).repeat(32), active)


@_runs("VOTE", "VOTEU")
def _vote(lanes: Lanes, it: Instruction, active: Lot) -> None:
    if "ALL" not in it.modifiers:
        raise NotImplementedError("another vote")
    agree = (lanes.predicate(it.operands[-1]) | ~active).reshape(-1, 32).all(axis=1).repeat(32)
    lanes.put_predicate(it.operands[-2], agree, active)


_SIZES: Final = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@_runs("LDG", "LDS")
def _load(lanes: Lanes, it: Instruction, active: Lot) -> None:
    if not active.any():
        return
    to, source = it.operands[:2]
    size = next((_SIZES[name] for name in it.modifiers if name in _SIZES), 4)
    if it.modifiers & {"S8", "S16"}:
        raise NotImplementedError("a load with a sign")
    addresses = lanes.address(source)
    if it.name == "LDS":
        addresses = addresses + lanes.shared_at
    else:
        lanes.accessed.add(it.number)
    register = _REGISTER.match(to)
    assert register is not None
    for i, part in enumerate(
        (lanes.shared if it.name == "LDS" else lanes.memory).load(addresses[active], size)
    ):
        if register[2] != "Z":
            word = np.zeros(lanes.count, np.uint32)
            word[active] = part
            lanes.put(f"{register[1]}R{int(register[2]) + i}", word, active)


@_runs("STG", "STS")
def _store(lanes: Lanes, it: Instruction, active: Lot) -> None:
    if not active.any():
        return
    to, source = it.operands[:2]
    size = next((_SIZES[name] for name in it.modifiers if name in _SIZES), 4)
    addresses = lanes.address(to)
    if it.name == "STS":
        addresses = addresses + lanes.shared_at
    else:
        lanes.accessed.add(it.number)
    register = _REGISTER.match(source)
    assert register is not None
    names = [source if register[2] == "Z" else f"R{int(register[2]) + i}" for i in range(-(-size // 4))]
    words = [lanes.integer(name)[active] for name in names]
    (lanes.shared if it.name == "STS" else lanes.memory).store(addresses[active], size, words)


@_runs("RED", "REDG")
def _reduce_in_memory(lanes: Lanes, it: Instruction, active: Lot) -> None:
    if "MAX" not in it.modifiers or "S32" in it.modifiers:
        raise NotImplementedError("another reduction")
    lanes.accessed.add(it.number)
    addresses, values = lanes.address(it.operands[0])[active], lanes.integer(it.operands[1])[active]
    for address in np.unique(addresses):  # lanes, and launches, do this one after the other
        here = np.array([address])
        (old,) = lanes.memory.load(here, 4)
        lanes.memory.store(here, 4, [np.maximum(old, values[addresses == address].max())])
