"""Tests of casts of whole weights to narrower types, and of the values that they lose."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from impl.comm.mesh import Mesh
from impl.engine.narrowing import Narrowing, dtype_of
from impl.errors import ZeroError
from impl.zero import shard
from tests.support.ranks import each_rank
from tests.support.strategies import EXACT

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
NET = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
NET.register_buffer("count", torch.tensor(3))
VALUES = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=False)


@pytest.mark.parametrize("dtype", TYPES)
@given(st.lists(VALUES, max_size=6))
def test_each_value_is_rounded_or_counted(dtype: torch.dtype, numbers: list[float]) -> None:
    """A finite value is rounded to a neighbour, or counted as an overflow or as a value that became 0."""
    values = torch.tensor(numbers, dtype=torch.float32)
    narrowing = Narrowing(dtype)
    cast = narrowing.cast("w", values)
    assert cast.dtype == dtype
    info, back = torch.finfo(dtype), cast.double()
    kept = [
        abs(new - old) <= max(abs(old) * info.eps / 2, info.smallest_normal * info.eps / 2)
        for old, new in zip(values.tolist(), back.tolist(), strict=True)
        if math.isfinite(old)
    ]
    text = " | ".join(narrowing.notes())
    lost, not_finite = kept.count(False), len(values) - len(kept)
    assert (f"'w' ({lost} of {len(values)}, largest " in text) == bool(lost)
    assert ("overflow" in text) == bool(lost)
    assert (f"as they were before the cast: 'w' ({not_finite} of {len(values)})" in text) == bool(not_finite)
    zeros = sum(old != 0 and new == 0 for old, new in zip(values.tolist(), back.tolist(), strict=True))
    assert (f"'w' ({zeros} of {len(values)})" in text.split("values are")[0]) == bool(zeros)


@pytest.mark.parametrize(
    ("dtype", "fits", "overflows"),
    [
        (torch.float16, 65519.996, 65520.0),
        (torch.bfloat16, 3.396e38, 3.397e38),
        (torch.float8_e4m3fn, 464.0, 464.1),
        (torch.float8_e5m2, 61439.0, 61440.0),
    ],
)
def test_the_edge_of_a_type(dtype: torch.dtype, fits: float, overflows: float) -> None:
    """A value up to half a step beyond the largest is rounded to it, also in types that saturate."""
    for sign in (1, -1):
        narrowing = Narrowing(dtype)
        narrowing.cast("w", torch.tensor([[sign * fits]]))
        assert narrowing.overflow() is None
        narrowing.cast("v", torch.tensor([[1.0, sign * overflows, sign * 1.0]]))
        text = narrowing.overflow()
        assert text is not None
        assert f"'v' (1 of 3, largest {sign * overflows:g})" in text
        assert "'w'" not in text


def test_many_tensors_are_counted_and_some_named() -> None:
    """A tied weight, which has two names, counts once."""
    narrowing = Narrowing(torch.float16)
    for number in (*range(7), 0):
        narrowing.cast(f"w{number}", torch.tensor([1e5, math.inf, 1e-12]))
    overflow, vanished, not_finite = narrowing.notes()
    assert overflow == narrowing.overflow()
    assert overflow.startswith("finite values overflow fp16, whose largest is 65504: 'w0' (1 of 3, largest 1")
    for line in (overflow, vanished, not_finite):
        assert "'w3' (1 of 3" in line
        assert line.endswith(" and 3 more parameters")
    assert Narrowing(torch.bfloat16).notes() == ()


def test_types_by_name() -> None:
    """Types may be given by a policy's names or as torch's; others are refused in one line."""
    assert [*map(dtype_of, ("fp32", "bf16", "fp16", torch.float8_e5m2))] == [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e5m2,
    ]
    wrong: Any
    for wrong in ("half", "torch.float16", torch.int8, torch.complex64, torch.bool, None, 16):
        with pytest.raises(
            ZeroError, match=r"dtype=.*: expected one of 'fp32', 'bf16', 'fp16', torch.float32, "
        ):
            dtype_of(wrong)


@each_rank(2, 2)
def test_a_full_state_in_fewer_bits(mesh: Mesh) -> None:
    """All ranks refuse a weight that overflows, whichever rank has it, and go on; bf16 holds it."""
    net = copy.deepcopy(NET)
    with torch.no_grad():
        net[0].weight[2, 1], net[1].bias[3] = -1e5, math.nan
    wanted = {name: value.clone() for name, value in net.state_dict().items()}
    zero = shard(net, mesh=mesh, policy=EXACT)
    with pytest.raises(ZeroError, match=r"full_state_dict\(\): .* '0.weight' \(1 of 16, largest -100000\); "):
        zero.full_state_dict(dtype="fp16")
    for dtype, options in (("bf16", {}), (torch.float16, {"allow_overflow": True}), (torch.float32, {})):
        state = zero.full_state_dict(dtype=dtype, **options)
        for name, value in wanted.items():
            expected = value if name == "count" else value.to(dtype_of(dtype))
            assert state[name].dtype == expected.dtype
            assert torch.equal(state[name].nan_to_num(7.0), expected.nan_to_num(7.0))
