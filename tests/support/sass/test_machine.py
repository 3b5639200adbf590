"""The interpreter executes short listings as a GPU does: control flow, arithmetic and memory."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from impl.cuda.launch import ARGUMENTS, Launch
from tests.support.sass.instructions import multiplied_and_added, rounded
from tests.support.sass.machine import Machine
from tests.support.sass.memory import Memory
from tests.support.sass.program import read


def run(listing: str, *, threads: int = 64, memory: Memory | None = None) -> Machine:
    """The lanes of one thread block after the instructions of ``listing``, one a line."""
    at = 0
    lines = []
    for line in listing.strip().splitlines():
        label = line.strip().endswith(":")
        lines.append(line if label else f"        /*{at:04x}*/    {line.strip()} ;")
        at += 0 if label else 16
    launch = Launch("none.cu", "none", (1, 1, 1), threads, np.zeros(1, ARGUMENTS))
    return Machine(read("\n".join(lines)), launch, 90, memory or Memory(), shared=256).run()


def test_lanes_that_a_branch_parts_wait_for_one_another() -> None:
    """A warp whose lanes part issues both sides, and what comes after BSYNC once; other warps one side."""
    machine = run("""
        S2R R0, SR_TID.X
        ISETP.GE.U32.AND P0, PT, R0, 0x10, PT
        BSSY B0, `(.L_x_2)
        @P0 BRA `(.L_x_1)
        MOV R1, 0x7
        BRA `(.L_x_2)
        .L_x_1:
        MOV R1, 0x9
        .L_x_2:
        BSYNC B0
        EXIT
        """)
    assert machine.issued.tolist() == [[1, 1]] * 4 + [[1, 0]] * 2 + [[1, 1]] * 3
    assert machine.lanes.integer("R1").tolist() == [7] * 16 + [9] * 48


def test_a_function_returns_to_its_caller_before_others_go_on() -> None:
    """Lanes at BSYNC wait for those in a function that lies behind it; both issue BSYNC, and EXIT together."""
    machine = run("""
        S2R R0, SR_LANEID
        ISETP.EQ.AND P0, PT, R0, RZ, PT
        BSSY B1, `(.L_x_1)
        @!P0 BRA `(.L_x_1)
        MOV R40, 0x60
        CALL.REL.NOINC `($__internal_0)
        NOP
        .L_x_1:
        BSYNC B1
        EXIT
        $__internal_0:
        IADD3 R2, R0, 0x5, RZ
        RET.REL.NODEC R40 `(none)
        """)
    assert machine.issued[:, 0].tolist() == [*[1] * 7, 2, *[1] * 3]
    assert machine.lanes.integer("R2").tolist() == [5, *[0] * 31] * 2


def test_warps_exchange_words_over_a_barrier() -> None:
    """What one warp stores in shared memory another loads after BAR."""
    machine = run("""
        S2R R0, SR_TID.X
        LEA R1, R0, 0x400, 0x2
        STS [R1], R0
        BAR.SYNC.DEFER_BLOCKING 0x0
        LOP3.LUT R2, R1, 0x80, RZ, 0x3c, !PT
        LDS R3, [R2]
        EXIT
        """)
    assert machine.lanes.integer("R3").tolist() == [*range(32, 64), *range(32)]


def test_global_memory_is_that_of_the_tensors() -> None:
    """A pair of registers addresses a tensor; an address beyond it, and an unaligned one, are refused."""
    memory, numbers = Memory(), torch.arange(64, dtype=torch.int32)
    memory.add(numbers)
    address = numbers.data_ptr()
    load = f"""
        S2R R0, SR_TID.X
        MOV R4, {address & 0xFFFFFFFF:#x}
        MOV R5, {address >> 32:#x}
        IMAD.WIDE.U32 R2, R0, 0x4, R4
        LDG.E R6, desc[UR4][R2.64+0x0]
        IADD3 R6, R6, R6, 0x1
        STG.E desc[UR4][R2.64], R6
        EXIT
        """
    machine = run(load, memory=memory)
    assert machine.lanes.accessed == {4, 6}
    assert numbers.tolist() == [*range(1, 129, 2)]
    with pytest.raises(
        RuntimeError, match=r"LDG.E R6, .*: IndexError\('an access of 4 bytes at .*, outside of all"
    ):
        run(load.replace("+0x0", "+0x4"), memory=memory)
    with pytest.raises(
        RuntimeError, match=r"LDG.E R6, .*: IndexError\('an access of 4 bytes is not aligned'\)"
    ):
        run(
            load.replace("+0x0", "+-0x2")
            .replace("R0, 0x4", "RZ, 0x4")
            .replace(hex(address & 0xFFFFFFFF), hex((address & 0xFFFFFFFF) + 8)),
            memory=memory,
        )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("HMMA.1688.F32 R0, R0, R0, R0", "HMMA.1688.F32 R0, R0, R0, R0 ;: NotImplementedError"),
        ("BPT.TRAP 0x1", "a trap"),
        (
            "S2R R0, SR_TID.X\nISETP.GE.U32.AND P0, PT, R0, 0x28, PT\n@P0 EXIT\nSHFL.BFLY PT, R1, R0, 0x10, 0x1f",
            "lane that is elsewhere",
        ),
        (".L_x_0:\nBRA `(.L_x_0)", "an endless loop"),
    ],
)
def test_what_cannot_be_executed_is_reported(
    lines: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown instruction, a trap, a shuffle with a lane that has ended, and an endless loop end a run."""
    monkeypatch.setattr("tests.support.sass.machine._LIMIT", 100)
    with pytest.raises(RuntimeError, match=message):
        run(lines + "\nEXIT")


def test_integer_instructions() -> None:
    """Carries, products of 64 bits, shifts, tables and bytes are those that PTX specifies."""
    lanes = run("""
        MOV R0, 0xfffffff0
        MOV R1, 0x12345678
        IADD3 R2, P0, R0, 0x20, RZ
        IADD3.X R3, R1, RZ, RZ, P0, !PT
        IADD3 R4, P1, R1, -R1, RZ
        IMAD.WIDE.U32 R6, R0, R0, RZ
        SHF.R.U64 R8, R0, 0x8, R1
        SHF.L.U64.HI R9, R0, 0x8, R1
        SHF.R.S32.HI R10, RZ, 0x4, R0
        PRMT R11, R1, 0x7610, R0
        PRMT R12, R0, 0x8888, RZ
        LOP3.LUT R13, R0, 0xff, R1, 0x78, !PT
        LEA.HI R14, R1, 0x1, RZ, 0x4
        VIADDMNMX R15, R0, 0x4, 0x2, !PT
        EXIT
        """).lanes
    values = [int(lanes.integer(f"R{i}")[0]) for i in (2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]
    assert values == [
        0x10, 0x12345679, 0, 0x100, 0xFFFFFFE0, 0x78FFFFFF, 0x345678FF, 0xFFFFFFFF, 0xFFFF5678, 0xFFFFFFFF,
        0xFFFFFFF0 ^ 0x78, 2, 2,
    ]  # fmt: skip
    assert lanes.predicate("P0").all()
    assert lanes.predicate("P1").all()  # 2^32 - x + x


def test_fused_products_are_rounded_once() -> None:
    """An FFMA equals the exact sum, rounded to nearest and in each direction."""
    random = np.random.default_rng(0)
    x, y = (random.standard_normal(500).astype(np.float32) for _ in range(2))
    z = (-x * y * (1 + random.integers(-2, 3, 500) * np.float32(2.0**-23))).astype(np.float32)
    z[::2] = random.standard_normal(250)[:] * np.float32(2.0) ** random.integers(-40, 40, 250).astype(
        np.float32
    )
    exact = [
        Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)) for a, b, c in zip(x, y, z, strict=True)
    ]
    for modifier in ("RN", "RM", "RP", "RZ"):
        got = rounded(multiplied_and_added(x, y, z), frozenset({modifier}))
        for value, want in zip(got, exact, strict=True):
            here = Fraction(float(value))
            up = Fraction(float(np.nextafter(value, np.float32(np.inf))))
            down = Fraction(float(np.nextafter(value, np.float32(-np.inf))))
            if modifier == "RN":
                assert abs(here - want) <= min(abs(up - want), abs(down - want))
            below = modifier == "RM" or (modifier == "RZ" and want > 0)
            assert modifier == "RN" or (here <= want < up if below else down < want <= here)
