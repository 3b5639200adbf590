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


def _reserve() -> tuple[Reserve, Meter]:
    meter = Meter()
    return Reserve(torch.float32, torch.device("cpu"), meter, "gathered"), meter


@given(ORDERS)
def test_a_reserve_never_holds_more_than_was_in_use_at_once(order: list[int]) -> None:
    """Free buffers go before the sum would exceed the most in use, so the peak is that of use alone."""
    reserve, meter = _reserve()
    taken: list[Tensor] = []
    most = 0
    for size in order:
        if size:
            taken.append(reserve.take(size))
            assert taken[-1].shape == (size,)
        elif taken:
            reserve.give_back(taken.pop(0))
        most = max(most, sum(map(Tensor.numel, taken)))
        assert 4 * sum(map(Tensor.numel, taken)) <= meter.now.get("gathered", 0) <= 4 * most
    assert meter.peak.get("gathered", 0) == 4 * most


@given(st.lists(SIZES, min_size=1, max_size=8))
def test_the_same_sequence_again_asks_for_no_fresh_memory(sizes: list[int]) -> None:
    """Units that are gathered together in each pass get in the second pass the buffers of the first."""
    reserve, _ = _reserve()
    seen: list[set[int]] = []
    kept: list[Tensor] = []  # so that no address is used again by chance
    for _ in range(3):
        taken = [reserve.take(size) for size in sizes]
        kept += taken
        seen.append({buffer.data_ptr() for buffer in taken})
        for buffer in taken:
            reserve.give_back(buffer)
    assert seen[1] == seen[0] == seen[2]


@given(st.lists(SIZES, min_size=2, max_size=8))
def test_no_two_buffers_in_use_overlap(sizes: list[int]) -> None:
    """What is written to one is not seen in another."""
    reserve, _ = _reserve()
    first = reserve.take(sizes[0])
    reserve.give_back(first)
    taken = [reserve.take(size) for size in sizes]
    for number, buffer in enumerate(taken):
        buffer.fill_(number)
    assert all(bool((buffer == number).all()) for number, buffer in enumerate(taken))


@given(ORDERS, st.lists(SIZES, min_size=1, max_size=6))
def test_after_a_pass_no_more_is_held_than_the_last_one_used(order: list[int], sizes: list[int]) -> None:
    """One pass that touches everything does not keep its memory for ever."""
    reserve, meter = _reserve()
    for buffer in [reserve.take(size) for size in order if size]:
        reserve.give_back(buffer)
    reserve.trim()
    for buffer in [reserve.take(size) for size in sizes]:
        reserve.give_back(buffer)
    reserve.trim()
    assert meter.now["gathered"] <= 4 * sum(sizes)
