"""Executes the warps of a launch in lockstep: control flow, registers and counts.

A *group* is all lanes, of whatever warps, that are at one instruction; the group that is furthest behind runs, and
groups that meet become one.  An instruction is counted once for each warp that has a lane in the group, also if its
predicate holds for no lane: a scheduler issues it.  As on a GPU, lanes that a branch has parted wait for one another
at BSYNC, and the warps of a thread block at BAR.

What instructions compute is in :mod:`tests.support.sass.instructions`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import numpy as np

from impl.cuda.launch import Launch
from tests.support.sass.instructions import Lanes, execute
from tests.support.sass.memory import Memory
from tests.support.sass.program import Instruction, Program

if TYPE_CHECKING:
    from numpy.typing import NDArray

ARGUMENTS_AT: Final = {80: 0x160, 90: 0x210}  # address of a kernel's argument in constant bank 0
WARP: Final = 32
_CONSTANTS: Final = 0x1000  # bytes
_RESERVED: Final = 1024  # bytes of shared memory that sm_90 keeps for itself
_LIMIT: Final = 1_000_000  # steps; more are an endless loop


class Machine:
    """All lanes of a launch over one row, from its first instruction to its last.

    ``shared`` is the shared memory of a thread block in bytes, and ``more`` are the constants of bank 2.
    """

    def __init__(
        self,
        program: Program,
        launch: Launch,
        architecture: int,
        memory: Memory,
        *,
        shared: int,
        more: bytes = b"",
    ) -> None:
        constants = bytearray(_CONSTANTS)
        struct.pack_into("<6I", constants, 0, launch.threads, 1, 1, *launch.grid)
        argument, at = launch.arguments.tobytes(), ARGUMENTS_AT[architecture]
        constants[at : at + len(argument)] = argument
        blocks, *rows = launch.grid
        if rows != [1, 1]:
            raise ValueError(f"a grid of {launch.grid}: only one row is interpreted")
        count = blocks * launch.threads
        thread = np.tile(np.arange(launch.threads, dtype=np.uint32), blocks)
        block = np.repeat(np.arange(blocks, dtype=np.uint64), launch.threads)
        self._program, self._threads = program, launch.threads
        self.lanes = Lanes(count, {"0": bytes(constants), "2": more}, memory)
        self.lanes.shared_at = block * np.uint64(shared + _RESERVED)
        self.lanes.shared.add_shared(blocks * (shared + _RESERVED))
        self.lanes.special |= {
            "SR_TID.X": thread,
            "SR_LANEID": thread % np.uint32(WARP),
            "SR_CTAID.X": block.astype(np.uint32),
        }
        self.issued: NDArray[np.int64] = np.zeros((len(program.instructions), count // WARP), np.int64)
        self._alive = np.ones(count, bool)
        self._groups = {0: np.ones(count, bool)}
        self._members = {f"B{i}": np.zeros(count, bool) for i in range(16)}
        self._waiting: dict[
            tuple[str, int], NDArray[np.bool_]
        ] = {}  # lanes by barrier and by what comes after

    def run(self) -> Machine:
        """Run all lanes to their end.

        Raises RuntimeError: for an instruction that is not known, a trap, a deadlock or an endless loop.
        """
        for _ in range(_LIMIT):
            if not self._groups:
                if self._alive.any():
                    raise RuntimeError(f"deadlock: lanes wait at {sorted(self._waiting)}")
                return self
            number = min(self._groups)
            group, instruction = self._groups.pop(number), self._program.instructions[number]
            self.issued[number] += group.reshape(-1, WARP).any(axis=1)
            guard = instruction.guard
            active = group & self.lanes.predicate(guard) if guard else group
            try:
                self._step(instruction, group, active)
            except (ArithmeticError, IndexError, KeyError, NotImplementedError, ValueError) as problem:
                raise RuntimeError(f"{instruction.text}: {problem!r}") from problem
        raise RuntimeError("an endless loop")

    def _go(self, number: int, lanes: NDArray[np.bool_]) -> None:
        if lanes.any():
            self._groups[number] = self._groups[number] | lanes if number in self._groups else lanes

    def _step(self, it: Instruction, group: NDArray[np.bool_], active: NDArray[np.bool_]) -> None:
        after = it.number + 1
        match it.name:
            case "BRA" if "DIV" not in it.modifiers:
                taken = active & self.lanes.predicate(it.operands[0]) if len(it.operands) > 1 else active
                self._go(self._program.labels[it.operands[-1]], taken)
                self._go(after, group & ~taken)
            case "BRA":  # only if a warp's lanes are apart, which a collective may not find here
                warps = group.reshape(-1, WARP)
                if not np.array_equal(warps.all(axis=1), warps.any(axis=1)):
                    raise NotImplementedError("a collective of a part of a warp")
                self._go(after, group)
            case "CALL":
                self._go(self._program.labels[it.operands[-1]], active)
                self._go(after, group & ~active)
            case "RET":
                addresses = self.lanes.integer(it.operands[0])
                for address in np.unique(addresses[active]):
                    self._go(self._program.addresses[int(address)], active & (addresses == address))
                self._go(after, group & ~active)
            case "EXIT":
                self._alive &= ~active
                self._go(after, group & ~active)
                self._release()
            case "BSSY":
                of_warps = group.reshape(-1, WARP).any(axis=1).repeat(WARP)
                self._members[it.operands[0]] = np.where(of_warps, group, self._members[it.operands[0]])
                self._go(after, group)
            case "BSYNC" | "BAR":
                self._go(after, group & ~active)
                name = it.operands[0] if it.name == "BSYNC" else "BAR"
                self._waiting[name, after] = self._waiting.get((name, after), False) | active
                self._release()
            case "BPT":
                raise NotImplementedError("a trap")
            case _:
                execute(self.lanes, it, active)
                self._go(after, group)

    def _release(self) -> None:
        """Let those go on that waited for the last lane of a warp at BSYNC, or of a thread block at BAR."""
        for name in {name for name, _ in self._waiting}:
            here = {key: lanes for key, lanes in self._waiting.items() if key[0] == name}
            waiting = np.logical_or.reduce([*here.values()])
            members, size = (self._alive, self._threads) if name == "BAR" else (self._members[name], WARP)
            late = (members & self._alive & ~waiting).reshape(-1, size).any(axis=1).repeat(size)
            for key, lanes in here.items():
                self._go(key[1], lanes & ~late)
                self._waiting[key] = lanes & late
                if not self._waiting[key].any():
                    del self._waiting[key]
