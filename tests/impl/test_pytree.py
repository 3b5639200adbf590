"""Tests that arguments of modules are cast to the compute type, in containers of the same types."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from impl.comm.mesh import Mesh
from impl.engine.outside_uses import memory_of
from impl.policy.presets import preset
from impl.pytree import cast_tensors, tensors_in
from impl.zero import shard
from tests.support.ranks import each_rank
from tests.support.strategies import ROOMY
from tests.support.training import model


class Point(NamedTuple):
    x: Tensor
    label: str


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    derived: int = field(init=False, default=3)


@dataclass(slots=True)
class Slotted:
    x: list[Tensor]


@dataclass
class Unset:
    x: Tensor
    later: Tensor = field(init=False)


class Named(dict[str, Any]):
    pass


def _containers(x: Tensor) -> list[Any]:
    mapping = defaultdict(list, x=[x])
    return [
        (x, 1), [x], Point(x, "a"), {"x": x}, Named(x=x), OrderedDict(x=x), UserDict(x=x), mapping, Frozen(x),
        Slotted([x]), Unset(x), {"deep": (Point(x, "b"), [Frozen(x)])}, pack_sequence([x]),
    ]  # fmt: skip


@pytest.mark.parametrize("value", _containers(torch.ones(2)), ids=lambda value: type(value).__name__)
def test_containers_keep_their_type_when_tensors_in_them_are_cast(value: Any) -> None:
    """Named tuples, subclasses of dict, and dataclasses are copied; the original and other values do not change."""
    new = cast_tensors(value, torch.bfloat16)
    assert type(new) is type(value)
    for container, dtype in ((value, torch.float32), (new, torch.bfloat16)):
        assert {x.dtype for x in tensors_in(container) if x.is_floating_point()} == {dtype}
    assert cast_tensors(new, torch.bfloat16) is new
    if isinstance(new, defaultdict):
        assert new["other"] == []
    assert getattr(new, "label", "a") == "a"
    assert getattr(new, "derived", 3) == 3


class Widens(nn.Module):
    """A model with norms in fp32 between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, point: Point) -> Tensor:
        x = point.x
        for block in self.blocks:
            x = block(nn.functional.layer_norm(x.float(), (16,)))
        assert x.dtype == torch.bfloat16
        return x.float().square().mean()


@each_rank(1, 2)
def test_blocks_that_are_given_fp32_compute_in_the_type_of_their_weights(mesh: Mesh) -> None:
    """The root takes a named tuple, blocks take fp32 from an operation between them, and gradients arrive."""
    zero = shard(net := model(Widens), mesh=mesh, policy=preset("zero3", compute="bf16", memory=ROOMY))
    x = torch.randn(4, 16, requires_grad=True)
    net(Point(x, "a")).backward()
    assert x.grad.dtype == torch.float32
    assert zero.grad_norm() > 0


class _Wrapper(Tensor):
    """A tensor subclass with a shape but without memory of its own, like subclasses that hold several tensors."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is computed with it")


def test_what_has_no_one_memory_is_nobodys_view() -> None:
    """Wrappers, sparse tensors and tensors on the meta device have no address; a view has that of its base."""
    whole = torch.ones(4)
    wrapper = Tensor._make_wrapper_subclass(_Wrapper, whole.shape)  # type: ignore[attr-defined]
    for other in (wrapper, whole.to_sparse(), whole.to("meta")):
        assert memory_of(other) == 0
    assert memory_of(whole[2:]) == memory_of(whole[4:]) == whole.data_ptr()
