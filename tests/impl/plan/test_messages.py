"""Tests of the predicted buffers of messages; tests/impl/unit/test_side_streams.py compares them with exchanges."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from impl.plan.messages import SPARE, message_bytes, size_class
from impl.policy.policy import MemoryLimits
from impl.policy.presets import preset
from impl.policy.shard_layout import ParameterSpec, lay_out
from impl.policy.topology import Topology


@given(st.integers(0, 2**40))
def test_a_class_holds_its_messages_with_little_room_to_spare(nbytes: int) -> None:
    """A buffer is at least as large as its message, and at most an eighth larger or 512 bytes; classes are fixed."""
    size = size_class(nbytes)
    assert nbytes <= size <= max(512, nbytes * 9 / 8)
    assert size_class(size) == size


def test_units_share_buffers() -> None:
    """One rank of two holds what a unit sends, what it receives, and a spare, however many units there are."""
    units = [
        lay_out(f"blocks.{i}", [ParameterSpec("w", (2**20,))], grain=1, world=2, max_padding=0.1)
        for i in range(9)
    ]
    policy = preset("zero3", compute="bf16", memory=MemoryLimits(pair_below=0))
    assert message_bytes(policy, Topology(1, 2), units) == (2 + SPARE) * 2**21
    assert message_bytes(policy, Topology(1, 2), units, backward=False) == (1 + SPARE) * 2**21
    pairs = preset("zero3", compute="bf16")
    assert message_bytes(pairs, Topology(1, 2), units, backward=False) == (2 + SPARE) * 2**21
