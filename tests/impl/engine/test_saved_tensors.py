"""What autograd saves: views of gathered weights are told from all other tensors by where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impl.engine.saved_tensors import SavedTensors
from impl.pytree import memory_of
from impl.unit.unit import Unit

ELEMENTS = 64


@dataclass(eq=False)
class _Stored:
    """A unit as saving sees it."""

    bounds: tuple[int, int]
    gathered: bool = True

    @property
    def master_shard(self) -> _Stored:
        """Itself."""
        return self

    flat = master_shard

    @property
    def version(self) -> tuple[int, int]:
        """Of weights that never change."""
        return 0, 0

    def locate(self, tensor: Tensor) -> str:
        """Whose it is."""
        return f"{self.bounds}, {tuple(tensor.shape)}"


def _found(saved: SavedTensors, tensor: Tensor) -> Any:
    """The unit whose weights ``tensor`` is saved as; None if it is kept."""
    kept: Any = saved._pack(tensor)
    return kept[0] if isinstance(kept[0], _Stored) else None


@given(st.data())
def test_a_view_is_found_in_whatever_lies_there_now(data: st.DataObject) -> None:
    """Units come and go at overlapping addresses; a view is a weight's if, and only if, its unit is there."""
    memory = torch.zeros(ELEMENTS)
    saved, there = SavedTensors(), list[tuple[int, int, _Stored]]()
    for _ in range(data.draw(st.integers(0, 12))):
        start = data.draw(st.integers(0, ELEMENTS - 1))
        end = data.draw(st.integers(start + 1, ELEMENTS))
        for low, high, unit in there:
            if low < end and start < high:
                unit.gathered = False
        there = [each for each in there if each[2].gathered]
        at = memory.data_ptr() + 4 * start, memory.data_ptr() + 4 * end
        there.append((start, end, _Stored(at)))
        saved.gathered(cast("Unit", there[-1][2]))
        if there and data.draw(st.booleans()):
            there.pop(data.draw(st.integers(0, len(there) - 1)))[2].gathered = False
    for place in range(ELEMENTS):
        owner = [unit for start, end, unit in there if start <= place < end]
        assert _found(saved, memory[place : place + 1]) is (owner[0] if owner else None)
    assert _found(saved, torch.zeros(3)) is None


def test_an_empty_weight_is_found_too() -> None:
    """An empty view has no address, but would keep the unit's memory: it is found by its storage."""
    memory = torch.zeros(4)
    saved, unit = SavedTensors(), _Stored((memory.data_ptr(), memory.data_ptr() + 16))
    saved.gathered(cast("Unit", unit))
    assert _found(saved, memory[2:2].view(0, 5)) is unit


class _Wrapper(Tensor):
    """A tensor of another's shape, and no memory of its own, as subclasses of several tensors are."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is computed with it")


def test_what_has_no_one_memory_is_nobodys_view() -> None:
    """Wrappers, sparse tensors and those of the meta device have no address; a view has that of its whole."""
    whole = torch.ones(4)
    wrapper = Tensor._make_wrapper_subclass(_Wrapper, whole.shape)  # type: ignore[attr-defined]
    for other in (wrapper, whole.to_sparse(), whole.to("meta")):
        assert memory_of(other) == 0
    assert memory_of(whole[2:]) == memory_of(whole[4:]) == whole.data_ptr()
