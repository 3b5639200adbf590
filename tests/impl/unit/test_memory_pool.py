"""Memory that is used again: what is held is at most what was in use at once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impl.unit.context import Meter, Reserve

SIZES = st.sampled_from([1, 2, 3, 5, 8])
# A positive number takes that many elements; 0 gives the oldest buffer back.
ORDERS = st.lists(st.one_of(SIZES, st.just(0)), max_size=60)


@given(ORDERS, st.lists(SIZES, min_size=1, max_size=6))
def test_a_reserve_never_holds_more_than_was_in_use_at_once(order: list[int], last: list[int]) -> None:
    """Its peak is that of use alone, no two buffers in use overlap, and after a pass no more is held than the
    last one used.
    """
    meter = Meter()
    reserve = Reserve(torch.float32, torch.device("cpu"), meter, "gathered")
    taken: list[Tensor] = []
    most = 0
    for number, size in enumerate(order):
        if size:
            taken.append(reserve.take(size).fill_(number))
            assert taken[-1].shape == (size,)
        elif taken:
            reserve.give_back(taken.pop(0))
        assert all(bool((one == one[0]).all()) for one in taken)
        assert len({float(one[0]) for one in taken}) == len(taken)
        most = max(most, sum(map(Tensor.numel, taken)))
        assert 4 * sum(map(Tensor.numel, taken)) <= meter.now.get("gathered", 0) <= 4 * most
    assert meter.peak.get("gathered", 0) == 4 * most
    for buffer in taken:
        reserve.give_back(buffer)
    reserve.trim()
    for buffer in [reserve.take(size) for size in last]:
        reserve.give_back(buffer)
    reserve.trim()
    assert meter.now["gathered"] <= 4 * sum(last)


@given(st.lists(SIZES, min_size=1, max_size=8))
def test_the_same_sequence_again_asks_for_no_fresh_memory(sizes: list[int]) -> None:
    """Units that are gathered together in each pass get in the second pass the buffers of the first."""
    reserve = Reserve(torch.float32, torch.device("cpu"), Meter(), "gathered")
    seen: list[set[int]] = []
    kept: list[Tensor] = []  # so that no address is used again by chance
    for _ in range(3):
        taken = [reserve.take(size) for size in sizes]
        kept += taken
        seen.append({buffer.data_ptr() for buffer in taken})
        for buffer in taken:
            reserve.give_back(buffer)
    assert seen[1] == seen[0] == seen[2]
