"""What autograd saves: views of gathered weights are told from all other tensors by where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impl.engine.outside_uses import SavedTensors
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


def _unit_of(saved: SavedTensors, tensor: Tensor) -> Any:
    """The unit whose weights ``tensor`` is saved as; None if it is kept."""
    kept: Any = saved._pack(tensor)
    return kept[0] if isinstance(kept[0], _Stored) else None


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=12))
def test_a_view_is_found_in_whatever_lies_there_now(events: list[tuple[int, bool]]) -> None:
    """Units come and go in three buffers; a view is a weight's if, and only if, its unit is there."""
    buffers = [torch.zeros(ELEMENTS) for _ in range(3)]
    units, there = list[_Stored](), dict[int, _Stored]()
    weights_at = dict[int, int]()
    saved = SavedTensors(cast("list[Unit]", units), weights_at)
    for place, comes in events:
        if (before := there.pop(place, None)) is not None:
            before.gathered = False
        if comes:
            start = buffers[place].data_ptr()
            units.append(_Stored((start, start + 4 * ELEMENTS)))
            there[place] = units[-1]
            weights_at[start] = len(units) - 1
    for place, buffer in enumerate(buffers):
        for view in (buffer, buffer[7:9], buffer[2:2].view(0, 5)):  # an empty one has its storage's address
            assert _unit_of(saved, view) is there.get(place)
    assert _unit_of(saved, torch.zeros(3)) is None


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
