"""Reads the listing of a kernel that ``nvdisasm`` prints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_LABEL: Final = re.compile(r"\s*(\.L_x_\d+|\$?[\w$]+):\s*$")
INSTRUCTION: Final = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+) )?([\w.]+)\s*([^;]*?)\s*;")
_COMMAS: Final = re.compile(r"\s*,\s*(?![^\[]*\])")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: ``@!P0 IADD3.X R1, R2, R3, RZ, P1, !PT`` has the name ``IADD3`` and the modifier ``X``."""

    number: int
    guard: str | None  # the predicate without which a lane skips it, as ``!P0``
    name: str
    modifiers: frozenset[str]
    operands: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Program:
    """The instructions of a kernel and of the functions that it calls."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]  # numbers of instructions
    addresses: dict[int, int]  # numbers of instructions by their addresses in the section


def read(section: str) -> Program:
    """Returns the program of a section; lines that are neither a label nor an instruction are skipped."""
    instructions: list[Instruction] = []
    labels, addresses = dict[str, int](), dict[int, int]()
    for line in section.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := INSTRUCTION.search(line):
            addresses[int(found[1], 16)] = len(instructions)
            name, *modifiers = found[3].split(".")
            operands = tuple(
                part for text in _COMMAS.split(found[4]) for part in _target(text.replace(".reuse", ""))
            )
            text = " ".join(found[0].split("*/", 1)[1].split())
            instructions.append(
                Instruction(len(instructions), found[2], name, frozenset(modifiers), operands, text)
            )
    return Program(tuple(instructions), labels, addresses)


def _target(operand: str) -> list[str]:
    """``R40 `(name)`` are two operands; an empty text is none."""
    register, _, label = operand.partition("`(")
    return [part for part in (register.strip(), label.removesuffix(")")) if part]
